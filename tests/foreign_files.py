"""Checkpoints as other programs write them, made from a Hugging Face folder by those programs' own conversions.

None of the package's code is used: what is read must come back to the folder it was made from.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

State = dict[str, Tensor]

META_NAMES = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}


def read(folder: Path) -> tuple[dict[str, Any], State]:
    """A folder's config and its tensors."""
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """Rows of W_Q or W_K as Meta keeps them: row 2 i of a head is Hugging Face's i, row 2 i + 1 its i + d_head / 2."""
    d_head = rows.shape[0] // heads
    order = [h * d_head + i + half * (d_head // 2) for h in range(heads) for i in range(d_head // 2) for half in (0, 1)]
    return rows[order]


def meta_state(config: Mapping[str, Any], state: State) -> State:
    """A Llama under Meta's names and in Meta's order."""
    made: State = {}
    for name, tensor in state.items():
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if f"{part}.weight" in name:
                tensor = interleaved(tensor, config[heads])
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            made[f"layers.{layer}.{META_NAMES[rest.removesuffix('.weight')]}.weight"] = tensor
        else:
            tops = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output"}
            made[f"{tops[name.removesuffix('.weight')]}.weight"] = tensor
    return made


def write_meta(folder: Path, target: Path, ranks: int = 1, embedding_axis: int = 1, **params: Any) -> Path:
    """``consolidated.*.pth`` of so many tensor-parallel ranks, and ``params.json``."""
    config, state = read(folder)
    target.mkdir()
    axes = {
        "wq": 0,
        "wk": 0,
        "wv": 0,
        "wo": 1,
        "w1": 0,
        "w2": 1,
        "w3": 0,
        "output": 0,
        "tok_embeddings": embedding_axis,
    }
    for rank in range(ranks):
        shard: State = {"rope.freqs": torch.ones(config["head_dim"] // 2)}
        for name, tensor in meta_state(config, state).items():
            axis = axes.get(name.split(".")[-2])
            shard[name] = tensor.clone() if axis is None else tensor.chunk(ranks, dim=axis)[rank].clone()
        torch.save(shard, target / f"consolidated.{rank:02d}.pth")
    said = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "multiple_of": 4,
        "norm_eps": config["rms_norm_eps"],
        "vocab_size": -1,
    }
    (target / "params.json").write_text(json.dumps(said | params))
    return target


def write_nanogpt(folder: Path, target: Path, *, bias: bool = True, compiled: bool = True, **extra: Any) -> Path:
    """nanoGPT's ``ckpt.pt``: torch's Linear, names as a compiled model has them, the optimizer's state beside it."""
    config, state = read(folder)
    linear = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    made = {name: t.T.contiguous() if name.endswith(linear) else t.clone() for name, t in state.items()}
    if not bias:
        made = {name: t for name, t in made.items() if not name.endswith(".bias")}
    made.setdefault("lm_head.weight", made["transformer.wte.weight"])
    settings = {
        "n_layer": config["n_layer"],
        "n_head": config["n_head"],
        "n_embd": config["n_embd"],
        "block_size": config["n_positions"],
        "vocab_size": config["vocab_size"],
        "bias": bias,
        "dropout": 0.0,
    }
    torch.save(
        {
            "model": {("_orig_mod." if compiled else "") + name: t for name, t in made.items()},
            "optimizer": {
                "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}},
                "param_groups": [{"lr": 1e-3}],
            },
            "model_args": settings,
            "iter_num": 3,
            "best_val_loss": torch.tensor(1.5),
            "config": {"out_dir": "out", "learning_rate": 6e-4},
        }
        | extra,
        target,
    )
    return target


def write_mingpt(folder: Path, target: Path) -> Path:
    """minGPT's ``model.pt`` and ``config.json``."""
    config, state = read(folder)
    target.mkdir()
    linear = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    made = {name: t.T.contiguous() if name.endswith(linear) else t for name, t in state.items()}
    made |= {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 4, 4) for i in range(config["n_layer"])}
    torch.save(made, target / "model.pt")
    model = {"model_type": None, "n_layer": config["n_layer"], "n_head": config["n_head"], "n_embd": config["n_embd"]}
    model |= {"vocab_size": config["vocab_size"], "block_size": config["n_positions"]}
    (target / "config.json").write_text(json.dumps({"system": {"seed": 1}, "model": model}))
    return target / "model.pt"


def write_llama2c(folder: Path, target: Path, version: int = 0, group: int = 8) -> Path:
    """llama2.c's ``.bin`` as its export.py writes it."""
    config, state = read(folder)
    meta = meta_state(config, state)
    tied = "output.weight" not in meta
    layers = range(config["num_hidden_layers"])
    numbers = [config["hidden_size"], config["intermediate_size"], len(layers), config["num_attention_heads"]]
    numbers += [config["num_key_value_heads"], config["vocab_size"], config["max_position_embeddings"]]

    def floats(*names: str) -> bytes:
        return b"".join(meta[name].float().numpy().tobytes() for name in names)

    def kind(name: str) -> list[str]:
        return [f"layers.{i}.{name}.weight" for i in layers]

    attention = ("attention.wq", "attention.wk", "attention.wv", "attention.wo")
    mlp = ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
    if version == 0:
        if not tied:
            numbers[5] = -numbers[5]
        data = struct.pack("<7i", *numbers) + floats("tok_embeddings.weight")
        for name in ("attention_norm", *attention, "ffn_norm", *mlp):
            data += floats(*kind(name))
        rotation = np.ones(config["max_position_embeddings"] * config["head_dim"], dtype=np.float32).tobytes()
        data += floats("norm.weight") + rotation + (b"" if tied else floats("output.weight"))
    else:
        data = struct.pack("<Ii7iB", 0x616B3432, version, *numbers, tied)
        data += struct.pack("<i", group) if version == 2 else b""
        data = data.ljust(256, b"\0")
        data += floats(*kind("attention_norm"), *kind("ffn_norm"), "norm.weight")
        weights = ["tok_embeddings.weight", *(name for part in (*attention, *mlp) for name in kind(part))]
        weights += [] if tied else ["output.weight"]
        for name in weights:
            data += floats(name) if version == 1 else quantised(meta[name], group)
    target.write_bytes(data)
    return target


def quantised(tensor: Tensor, group: int) -> bytes:
    """llama2.c's Q8_0: groups of int8, then their scales."""
    rows = tensor.float().reshape(-1, group)
    scale = rows.abs().amax(1) / 127
    return (rows / scale[:, None]).round().to(torch.int8).numpy().tobytes() + scale.numpy().tobytes()


def write_megatron(
    folder: Path, target: Path, ranks: int = 1, *, core: bool = False, random_state: bool = True
) -> Path:
    """Megatron-LM's ``mp_rank_*`` folders of a GPT-2 or Llama folder, query_key_value fused by group."""
    config, state = read(folder)
    llama = config["model_type"] == "llama"
    heads = config["num_attention_heads" if llama else "n_head"]
    groups = config["num_key_value_heads"] if llama else heads
    layers = config["num_hidden_layers" if llama else "n_layer"]
    d_model = config["hidden_size" if llama else "n_embd"]
    made: dict[str, tuple[list[Tensor], int | None]] = {}

    def put(name: str, tensor: Tensor, axis: int | None) -> None:
        parts = [tensor] * ranks if axis is None else list(tensor.chunk(ranks, dim=axis))
        made[name] = (parts, axis)

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """For each group: its queries, its key, its value."""
        d_head = k.shape[0] // groups
        rows = []
        for g in range(groups):
            rows.append(q[g * (heads // groups) * d_head : (g + 1) * (heads // groups) * d_head])
            rows += [k[g * d_head : (g + 1) * d_head], v[g * d_head : (g + 1) * d_head]]
        return torch.cat(rows)

    names = {"qkv": "query_key_value", "dense": "dense", "in": "dense_h_to_4h", "out": "dense_4h_to_h"}
    if core:
        names = {"qkv": "linear_qkv", "dense": "linear_proj", "in": "linear_fc1", "out": "linear_fc2"}
    norm = "self_attention.linear_qkv.layer_norm_" if core else "input_layernorm."
    mlp_norm = "mlp.linear_fc1.layer_norm_" if core else "post_attention_layernorm."
    for i in range(layers):
        at = f"layers.{i}."
        if llama:
            a = f"model.layers.{i}."
            put(f"{at}{norm}weight", state[f"{a}input_layernorm.weight"], None)
            put(f"{at}{mlp_norm}weight", state[f"{a}post_attention_layernorm.weight"], None)
            qkv = [state[f"{a}self_attn.{p}_proj.weight"] for p in "qkv"]
            put(f"{at}self_attention.{names['qkv']}.weight", fused(*qkv), 0)
            put(f"{at}self_attention.{names['dense']}.weight", state[f"{a}self_attn.o_proj.weight"], 1)
            gate, up = (state[f"{a}mlp.{p}_proj.weight"].chunk(ranks) for p in ("gate", "up"))
            made[f"{at}mlp.{names['in']}.weight"] = [torch.cat(pair) for pair in zip(gate, up, strict=True)], 0
            put(f"{at}mlp.{names['out']}.weight", state[f"{a}mlp.down_proj.weight"], 1)
        else:
            a = f"transformer.h.{i}."
            for end in ("weight", "bias"):
                put(f"{at}{norm}{end}", state[f"{a}ln_1.{end}"], None)
                put(f"{at}{mlp_norm}{end}", state[f"{a}ln_2.{end}"], None)
                qkv = (
                    state[f"{a}attn.c_attn.{end}"].T.chunk(3)
                    if end == "weight"
                    else state[f"{a}attn.c_attn.{end}"].chunk(3)
                )
                put(f"{at}self_attention.{names['qkv']}.{end}", fused(*qkv), 0)
                put(
                    f"{at}mlp.{names['in']}.{end}",
                    state[f"{a}mlp.c_fc.{end}"].T if end == "weight" else state[f"{a}mlp.c_fc.{end}"],
                    0,
                )
            put(f"{at}self_attention.{names['dense']}.weight", state[f"{a}attn.c_proj.weight"].T, 1)
            put(f"{at}self_attention.{names['dense']}.bias", state[f"{a}attn.c_proj.bias"], None)
            put(f"{at}mlp.{names['out']}.weight", state[f"{a}mlp.c_proj.weight"].T, 1)
            put(f"{at}mlp.{names['out']}.bias", state[f"{a}mlp.c_proj.bias"], None)
    for end in ("weight",) if llama else ("weight", "bias"):
        put(f"final_layernorm.{end}", state[f"model.norm.{end}" if llama else f"transformer.ln_f.{end}"], None)
    embedding: dict[str, tuple[list[Tensor], int | None]] = {}
    words = state["model.embed_tokens.weight" if llama else "transformer.wte.weight"]
    padded = torch.cat([words, torch.zeros(-len(words) % ranks, d_model)])
    embedding["word_embeddings.weight"] = list(padded.chunk(ranks)), 0
    if not llama:
        embedding["position_embeddings.weight"] = [state["transformer.wpe.weight"]] * ranks, None
    unembedding = state.get("lm_head.weight")
    if unembedding is not None:
        unembedding = torch.cat([unembedding, torch.zeros(len(padded) - len(words), d_model)])

    args = argparse.Namespace(
        num_layers=layers,
        num_attention_heads=heads,
        hidden_size=d_model,
        ffn_hidden_size=config["intermediate_size"] if llama else config.get("n_inner") or 4 * d_model,
        kv_channels=config["head_dim"] if llama else d_model // heads,
        max_position_embeddings=config["max_position_embeddings" if llama else "n_positions"],
        norm_epsilon=config["rms_norm_eps" if llama else "layer_norm_epsilon"],
        normalization="RMSNorm" if llama else "LayerNorm",
        position_embedding_type="rope" if llama else "learned_absolute",
        swiglu=llama,
        bias_gelu_fusion=not llama,
        group_query_attention=groups != heads,
        num_query_groups=groups,
        rotary_base=int(config["rope_parameters"]["rope_theta"]) if llama else 10000,
        rotary_percent=1.0,
        tensor_model_parallel_size=ranks,
        pipeline_model_parallel_size=1,
        params_dtype=torch.float32,
    )
    for rank in range(ranks):
        here = {name: parts[rank].clone() for name, (parts, _) in made.items()}
        words_here = {name: parts[rank].clone() for name, (parts, _) in embedding.items()}
        if core:
            model: dict[str, Any] = {f"embedding.{name}": t for name, t in words_here.items()}
            model |= {f"decoder.{name}": t for name, t in here.items()}
            model["decoder.layers.0.self_attention.core_attention._extra_state"] = None
        else:
            nested = {"word_embeddings": {"weight": words_here["word_embeddings.weight"]}}
            if not llama:
                nested["position_embeddings"] = {"weight": words_here["position_embeddings.weight"]}
            model = {"language_model": {"embedding": nested, "encoder": here}}
        if unembedding is not None:
            part = unembedding.chunk(ranks)[rank].clone()
            if core:
                model["output_layer.weight"] = part
            else:
                model["language_model"]["output_layer"] = {"weight": part}
        content: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": 5, "model": model}
        if random_state:
            content["rng_state"] = [{"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state()}]
        file = target / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        file.parent.mkdir(parents=True)
        torch.save(content, file)
    return target

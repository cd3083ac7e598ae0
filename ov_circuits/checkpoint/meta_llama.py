"""Llama and Mistral as their makers publish them: ``consolidated.*`` shards and ``params.json``.

Several shards are the ranks of a tensor-parallel run: each holds some heads with the matching blocks. W_Q, W_K, W_V, W_1, W_3
and the unembedding are cut along rows (outputs), W_O and W_2 along columns (inputs), and the embedding along columns by
Llama 1 and 2 and along rows (the vocabulary) by Llama 3: its shape tells. Rows of W_Q and W_K lie in interleaved rotary order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ov_circuits.checkpoint.foreign import Foreign, Settings, halves, joined
from ov_circuits.checkpoint.stores import (
    MemoryStore,
    Recipe,
    RecipeStore,
    SafetensorsStore,
    TensorStore,
    TorchStore,
    is_file,
    read_json,
    state_dict,
)
from ov_circuits.errors import CircuitsError

# Meta's name -> Hugging Face's, and the axis that ranks cut (None: every rank holds the whole).
_GLOBAL: dict[str, tuple[str, int | None]] = {
    "norm.weight": ("model.norm.weight", None),
    "output.weight": ("lm_head.weight", 0),
}
_IN_LAYER: dict[str, tuple[str, int | None]] = {
    "attention_norm": ("input_layernorm", None),
    "attention.wq": ("self_attn.q_proj", 0),
    "attention.wk": ("self_attn.k_proj", 0),
    "attention.wv": ("self_attn.v_proj", 0),
    "attention.wo": ("self_attn.o_proj", 1),
    "ffn_norm": ("post_attention_layernorm", None),
    "feed_forward.w1": ("mlp.gate_proj", 0),
    "feed_forward.w2": ("mlp.down_proj", 1),
    "feed_forward.w3": ("mlp.up_proj", 0),
}
_LAYER = re.compile(r"layers\.([0-9]{1,5})\.(.+)\.weight")
_SHARD = re.compile(r"consolidated(\.[0-9]{2,3})?\.(pth|safetensors)")


def shard_files(folder: Path) -> list[Path]:
    """The ``consolidated.*`` files of a folder, in the ranks' order; of two kinds, the safetensors."""
    found = sorted(file for file in folder.glob("consolidated*") if _SHARD.fullmatch(file.name) and file.is_file())
    safe = [file for file in found if file.suffix == ".safetensors"]
    return safe or found


def open_meta(folder: Path) -> Foreign:
    """A folder with ``params.json`` and ``consolidated.*`` shards.

    Raises:
        CircuitsError: a shard is missing or of another model, or the model is no plain Llama (experts, images, 8-bit weights).
    """
    params = folder / "params.json"
    if not is_file(params):
        raise CircuitsError(f"{folder} has no params.json, which says how many heads there are: copy it to the shards")
    files = shard_files(folder)
    if len(files) > 1 and [file.suffixes[0] for file in files] != [f".{i:02d}" for i in range(len(files))]:
        raise CircuitsError(
            f"{folder} holds {', '.join(file.name for file in files)}: shards are numbered from 00 without a gap; "
            "copy the missing ones there"
        )
    stores = [SafetensorsStore([file]) if file.suffix == ".safetensors" else TorchStore([file]) for file in files]
    tokenizer = folder / "tokenizer.model"
    return _open(
        stores, read_json(params), str(params), tokenizer=tokenizer if is_file(tokenizer) else None, files=(params,)
    )


def is_llama2c_training(loaded: Any) -> bool:
    """Whether it is the ``ckpt.pt`` of llama2.c's training script: Meta's names beside ``model_args``."""
    return isinstance(loaded.get("model_args"), Mapping) and "dim" in loaded["model_args"]


def open_llama2c_training(loaded: Mapping[str, Any], file: Path) -> Foreign:
    """The ``ckpt.pt`` of llama2.c's training script.

    Raises:
        CircuitsError: settings are missing, or ``model`` holds no tensors.
    """
    tensors = {name.removeprefix("_orig_mod."): t for name, t in state_dict(loaded["model"], file).items()}
    return _open([MemoryStore(tensors, str(file))], loaded["model_args"], f"{file} (model_args)")


def _open(stores: Sequence[TensorStore], params: Mapping[str, Any], where: str, **more: Any) -> Foreign:
    get = Settings(params, where)
    for key, reason in (
        ("moe", "has a mixture of experts, whose files are not read"),
        ("vision_chunk_size", "is for a model that sees images, whose files are not read"),
        ("vision_encoder", "is for a model that sees images, whose files are not read"),
        ("quantization_args", "says that the weights are quantised: use the bfloat16 checkpoint"),
    ):
        if get.get(key):
            raise get.refusal(key, reason)
    dim, heads = get.count("dim"), get.count("n_heads")
    kv_heads = get.count("n_kv_heads", heads)
    recipes = _recipes(stores, dim, where)
    for name, recipe in recipes.items():
        for part, n in (("q_proj", heads), ("k_proj", kv_heads)):
            if f"self_attn.{part}." in name:
                recipes[name] = halves(recipe, n, where)
    embed, gate = (
        _need(recipes, f"model.{n}", where) for n in ("embed_tokens.weight", "layers.0.mlp.gate_proj.weight")
    )
    theta = get.number("rope_theta", 10000.0)
    config: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": dim,
        "num_hidden_layers": get.count("n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": get.count("head_dim", max(dim // heads, 1)),
        "intermediate_size": gate.shape[0],  # what multiple_of and ffn_dim_multiplier come to
        "vocab_size": embed.shape[0],  # params.json may say -1
        "max_position_embeddings": _context(get, theta),
        "rms_norm_eps": get.number("norm_eps", 1e-5),
        "rope_parameters": _rope(get, theta, dim),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "lm_head.weight" not in recipes,
        "bos_token_id": 128000 if embed.shape[0] >= 128000 else 1,
    }
    return Foreign(config, RecipeStore(recipes), **more)


def _recipes(stores: Sequence[TensorStore], dim: int, where: str) -> dict[str, Recipe]:
    """Every tensor that has a name of Hugging Face's, its blocks joined."""
    recipes: dict[str, Recipe] = {}
    for name in stores[0].names():
        place = _place(name)
        if name == "tok_embeddings.weight":
            place = "model.embed_tokens.weight", _embedding_axis(stores[0].shape(name), dim, len(stores), where)
        if place is None:
            continue  # rope.freqs, and what else a program keeps beside its weights
        for rank, store in enumerate(stores):
            if name not in store or len(store.shape(name)) != len(stores[0].shape(name)):
                raise CircuitsError(
                    f"tensor {name} is in {stores[0].origin(name)} but not, or not alike, in shard {rank}: "
                    "shards of two checkpoints are mixed in one folder"
                )
        recipes[place[0]] = joined([Recipe.of(store, name) for store in stores], place[1])
    return recipes


def _place(name: str) -> tuple[str, int | None] | None:
    """Hugging Face's name of a tensor, and the axis that ranks cut; None for what it does not have."""
    if name in _GLOBAL:
        return _GLOBAL[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _IN_LAYER:
        return None
    module, axis = _IN_LAYER[match[2]]
    return f"model.layers.{int(match[1])}.{module}.weight", axis


def _embedding_axis(shape: tuple[int, ...], dim: int, ranks: int, where: str) -> int:
    if len(shape) == 2 and shape[1] == dim:
        return 0
    if len(shape) == 2 and shape[1] * ranks == dim:
        return 1
    raise CircuitsError(
        f"tok_embeddings.weight of {where} has shape {list(shape)} in each of {ranks} shards, which joins to width {dim} "
        "along neither axis: a shard is missing, or params.json is of another model"
    )


def _need(recipes: Mapping[str, Recipe], name: str, where: str) -> Recipe:
    if name not in recipes or len(recipes[name].shape) != 2:
        raise CircuitsError(
            f"the checkpoint of {where} lacks the matrix that Hugging Face calls {name}: it is incomplete"
        )
    return recipes[name]


def _context(get: Settings, theta: float) -> int:
    """How many positions it reads, which params.json leaves to the model's version."""
    if get.get("max_seq_len") is not None:
        return get.count("max_seq_len")
    if get.flag("use_scaled_rope"):
        return 131072  # Llama 3.1 and after
    if theta > 10000:
        return 8192  # Llama 3
    return 2048 if get.get("norm_eps") == 1e-6 else 4096  # Llama 1, Llama 2


def _rope(get: Settings, theta: float, dim: int) -> dict[str, Any]:
    if not get.flag("use_scaled_rope"):
        return {"rope_type": "default", "rope_theta": theta}
    # transformers' conversion: 32 for Llama 3.2, whose models are all narrower than those of 3.1 (8). params.json says no more.
    factor = get.number("rope_scaling_factor", 32.0 if dim < 4096 else 8.0)
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": get.number("rope_high_freq_factor", 4.0),
        "original_max_position_embeddings": 8192,
    }

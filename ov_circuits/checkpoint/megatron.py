"""Megatron-LM's GPT and Llama checkpoints: ``mp_rank_*/model_optim_rng.pt``, one folder for each tensor-parallel rank.

Rank r holds some heads with the matching block of the output projection, and the sum over ranks is the attention layer's output
(Shoeybi et al. 2019). query_key_value is fused by group: in each group of [queries.. , key, value], d_head rows apiece. Rows of
query_key_value, of the MLP's first matrix and of the embeddings are cut along outputs, dense and the MLP's second along inputs.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ov_circuits.checkpoint.foreign import Foreign, Settings, joined
from ov_circuits.checkpoint.stores import (
    MemoryStore,
    Recipe,
    RecipeStore,
    TensorStore,
    first_bytes,
    is_file,
    load_torch,
    state_dict,
)
from ov_circuits.errors import CircuitsError

_RANK = re.compile(r"mp_rank_([0-9]{2,3})")
_LAYER = re.compile(r"layers\.([0-9]{1,5})\.(.+)")
_LATEST = "latest_checkpointed_iteration.txt"

# Both of Megatron's spellings (before and after its core) -> one name here, and the axis that ranks cut.
_GLOBAL: dict[str, tuple[str, int | None]] = {
    "embedding.word_embeddings.weight": ("embed.weight", 0),
    "embedding.position_embeddings.weight": ("positions.weight", None),
    "final_layernorm.weight": ("final_norm.weight", None),
    "final_layernorm.bias": ("final_norm.bias", None),
    "output_layer.weight": ("unembed.weight", 0),
}
_IN_LAYER: dict[str, tuple[str, int | None]] = {
    "input_layernorm.weight": ("norm.weight", None),
    "input_layernorm.bias": ("norm.bias", None),
    "self_attention.linear_qkv.layer_norm_weight": ("norm.weight", None),
    "self_attention.linear_qkv.layer_norm_bias": ("norm.bias", None),
    "self_attention.query_key_value.weight": ("qkv.weight", 0),
    "self_attention.query_key_value.bias": ("qkv.bias", 0),
    "self_attention.linear_qkv.weight": ("qkv.weight", 0),
    "self_attention.linear_qkv.bias": ("qkv.bias", 0),
    "self_attention.dense.weight": ("dense.weight", 1),
    "self_attention.dense.bias": ("dense.bias", None),
    "self_attention.linear_proj.weight": ("dense.weight", 1),
    "self_attention.linear_proj.bias": ("dense.bias", None),
    "post_attention_norm.weight": ("mlp_norm.weight", None),
    "post_attention_layernorm.weight": ("mlp_norm.weight", None),
    "post_attention_layernorm.bias": ("mlp_norm.bias", None),
    "pre_mlp_layernorm.weight": ("mlp_norm.weight", None),
    "pre_mlp_layernorm.bias": ("mlp_norm.bias", None),
    "mlp.linear_fc1.layer_norm_weight": ("mlp_norm.weight", None),
    "mlp.linear_fc1.layer_norm_bias": ("mlp_norm.bias", None),
    "mlp.dense_h_to_4h.weight": ("mlp_in.weight", 0),
    "mlp.dense_h_to_4h.bias": ("mlp_in.bias", 0),
    "mlp.linear_fc1.weight": ("mlp_in.weight", 0),
    "mlp.linear_fc1.bias": ("mlp_in.bias", 0),
    "mlp.dense_4h_to_h.weight": ("mlp_out.weight", 1),
    "mlp.dense_4h_to_h.bias": ("mlp_out.bias", None),
    "mlp.linear_fc2.weight": ("mlp_out.weight", 1),
    "mlp.linear_fc2.bias": ("mlp_out.bias", None),
}
# Then -> Hugging Face's; what is fused or transposed there is made in _gpt2 and _llama.
_GPT2_NAMES = {
    "norm": "ln_1",
    "mlp_norm": "ln_2",
    "dense": "attn.c_proj",
    "mlp_in": "mlp.c_fc",
    "mlp_out": "mlp.c_proj",
}
_GPT2_GLOBAL = {"embed": "transformer.wte", "positions": "transformer.wpe", "final_norm": "transformer.ln_f"}
_LLAMA_NAMES = {
    "norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "dense": "self_attn.o_proj",
    "mlp_out": "mlp.down_proj",
}
_LLAMA_GLOBAL = {"embed": "model.embed_tokens", "final_norm": "model.norm"}
_UNEMBED = {"unembed": "lm_head"}


def rank_folder(folder: Path) -> Path | None:
    """The folder with the ``mp_rank_*`` folders: this one, or the latest iteration's in it; None when there is neither."""
    if any(_RANK.match(path.name) for path in folder.glob("mp_rank_*")):
        return folder
    latest = folder / _LATEST
    if not is_file(latest):
        return None
    word = first_bytes(latest, 100).decode("utf-8", errors="replace").strip()
    inside = folder / ("release" if word == "release" else f"iter_{word.zfill(7)}")
    return inside if word.isalnum() and inside.is_dir() else None


def open_megatron(folder: Path) -> Foreign:
    """A folder of ``mp_rank_*`` folders, or the one above it.

    Raises:
        CircuitsError: a rank is missing, the model is cut into pipeline stages or experts too, or its pickle holds more than
            tensors and settings.
    """
    files = _rank_files(folder)
    loaded = [load_torch(file, _allowed()) for file in files]
    args = _args(loaded[0], files[0])
    get = Settings(args, f"{files[0]} (args)")
    _refuse_unknown(loaded[0], get, len(files))
    ranks = [MemoryStore(dict(_flat(x, file)), str(file)) for x, file in zip(loaded, files, strict=True)]
    return _Model(ranks, get).open()


def _rank_files(folder: Path) -> list[Path]:
    names = sorted(path.name for path in folder.glob("mp_rank_*") if path.is_dir())
    odd = [name for name in names if not _RANK.fullmatch(name)]
    if odd:
        raise CircuitsError(
            f"{folder} holds {odd[0]}: the model is cut into pipeline stages or experts as well, which is not read. "
            "Convert it to one stage with Megatron's own tools"
        )
    if [int(name.removeprefix("mp_rank_")) for name in names] != list(range(len(names))):
        raise CircuitsError(
            f"{folder} holds {', '.join(names)}: ranks are numbered from 00 without a gap; copy the rest there"
        )
    files = []
    for name in names:
        found = [folder / name / file for file in ("model_optim_rng.pt", "model_rng.pt")]
        file = next((file for file in found if is_file(file)), None)
        if file is None:
            raise CircuitsError(
                f"{folder / name} has no model_optim_rng.pt, which holds the rank's weights: copy it there"
            )
        files.append(file)
    return files


class _Passed:
    """Holds nothing. It stands where a pickle asks for something that Megatron keeps and nobody needs here.

    Above all it stands for numpy, which must not be asked itself: ``ndarray(shape, dtype, buffer)`` makes objects out of
    whatever addresses a file names.
    """

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...


# What Megatron's own list of harmless names (its safe_globals) has besides its arguments, and numpy's scalars.
_NAMES = (
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    "numpy.ndarray",
    "numpy.dtype",
    "types.SimpleNamespace",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "_io.BytesIO",
    "signal.Signals",
    "megatron.core.enums.ModelType",
    "megatron.core.transformer.enums.AttnBackend",
    *(f"megatron.core.rerun_state_machine.Rerun{name}" for name in ("Diagnostic", "Mode", "State")),
)


def _allowed() -> list[Any]:
    """What a rank's file may hold besides tensors: Megatron's arguments; what stands for the rest is passed over."""
    return [argparse.Namespace, _Passed, *((_Passed, name) for name in _NAMES)]


def _args(loaded: Any, file: Path) -> dict[str, Any]:
    if not isinstance(loaded, Mapping):
        loaded = {}
    args: Any = loaded.get("args")
    if isinstance(args, argparse.Namespace):
        args = vars(args)
    if not isinstance(args, Mapping) or "model" not in loaded:
        raise CircuitsError(f"{file} has no args and model: it is no checkpoint of Megatron-LM")
    return {str(key): value for key, value in args.items()}


def _refuse_unknown(loaded: Mapping[str, Any], get: Settings, ranks: int) -> None:
    """Raise a CircuitsError for what would be read wrongly."""
    version = loaded.get("checkpoint_version", 0)
    if not isinstance(version, (int, float)) or version < 2:
        raise get.refusal("checkpoint_version", f"is {version}: rows of query_key_value lie otherwise before 2.0")
    if get.get("tensor_model_parallel_size", ranks) != ranks:
        raise get.refusal(
            "tensor_model_parallel_size", f"is {get.get('tensor_model_parallel_size')}, but {ranks} ranks are there"
        )
    if get.get("pipeline_model_parallel_size", 1) != 1:
        raise get.refusal(
            "pipeline_model_parallel_size", "is above 1: convert it to one stage with Megatron's own tools"
        )
    if get.get("num_experts"):
        raise get.refusal("num_experts", "is set: mixtures of experts are not read")
    if get.flag("rotary_interleaved"):
        raise get.refusal("rotary_interleaved", "is true, which is not read")
    if get.number("rotary_percent", 1.0) != 1.0:
        raise get.refusal("rotary_percent", "is below 1, which neither GPT-2 nor Llama has")


def _flat(loaded: Mapping[str, Any], file: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a rank under this module's names."""
    model = loaded["model"]
    if not isinstance(model, Mapping):
        raise CircuitsError(f"{file} holds a {type(model).__name__} under model, not a dictionary of tensors")
    tensors = state_dict(dict(_dotted(model, "", 0)), file)
    for name, tensor in tensors.items():
        short = re.sub(r"^((language_model|encoder|transformer|decoder|model|module)\.)+", "", name)
        short = short.replace(".attention.", ".self_attention.")
        layer = _LAYER.fullmatch(short)
        if short in _GLOBAL:
            yield _GLOBAL[short][0], tensor
        elif layer is not None and layer[2] in _IN_LAYER:
            yield f"{int(layer[1])}.{_IN_LAYER[layer[2]][0]}", tensor


def _dotted(nested: Mapping[Any, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    for key, value in nested.items():
        if isinstance(value, Mapping) and depth < 10:
            yield from _dotted(value, f"{prefix}{key}.", depth + 1)
        else:
            yield f"{prefix}{key}", value


_AXES = dict((*_GLOBAL.values(), *_IN_LAYER.values()))


class _Model:
    """The ranks of one model, and how they make Hugging Face's tensors."""

    def __init__(self, ranks: Sequence[TensorStore], get: Settings) -> None:
        self._ranks, self._get = ranks, get
        self._layers = get.count("num_layers")
        self._heads = get.count("num_attention_heads")
        grouped = get.flag("group_query_attention")
        self._kv_heads = get.count("num_query_groups") if grouped else self._heads
        self._d_model = get.count("hidden_size")
        self._d_head = get.count("kv_channels", max(self._d_model // self._heads, 1))
        self._gated = get.flag("swiglu")
        if self._heads % self._kv_heads:
            raise get.refusal("num_query_groups", f"is {self._kv_heads}, which does not divide {self._heads} heads")

    def open(self) -> Foreign:
        rms = self._get.get("normalization", "LayerNorm") == "RMSNorm"
        rotary = self._get.get("position_embedding_type", "learned_absolute") == "rope"
        if rms and rotary and self._gated:
            recipes, config = self._llama(), self._llama_config()
        elif not (rms or rotary or self._gated) and self._kv_heads == self._heads:
            recipes, config = self._gpt2(), self._gpt2_config()
        else:
            raise self._get.refusal(
                "normalization, position_embedding_type, swiglu and num_query_groups",
                "make neither a GPT-2 (LayerNorm, learned positions, no gate, no groups) nor a Llama (RMSNorm, rope, swiglu)",
            )
        config |= {
            "vocab_size": self._joined("embed.weight").shape[0],
            "tie_word_embeddings": "lm_head.weight" not in recipes,
        }
        return Foreign(config, RecipeStore(recipes))

    # -- one tensor -----------------------------------------------------------------------------------------------------

    def _parts(self, name: str) -> list[Recipe]:
        for rank, store in enumerate(self._ranks):
            if name not in store:
                raise CircuitsError(
                    f"{store.origin(name) if store.names() else 'rank'} {rank} lacks {name}: a file is incomplete"
                )
        return [Recipe.of(store, name) for store in self._ranks]

    def _has(self, name: str) -> bool:
        return name in self._ranks[0]

    def _joined(self, name: str) -> Recipe:
        axis = _AXES[name.lstrip("0123456789").removeprefix(".")]
        parts = self._parts(name)
        if any(
            len(part.shape) != len(parts[0].shape) or (axis is not None and axis >= len(part.shape)) for part in parts
        ):
            raise CircuitsError(
                f"tensor {name} has unlike shapes in the ranks of {parts[0].origin}: they are of different models"
            )
        return joined(parts, axis)

    def _roles(self, layer: int, kind: str) -> tuple[Recipe, Recipe, Recipe]:
        """Q, K and V out of query_key_value: weight [heads * d_head, d_model] or bias [heads * d_head]."""
        fused = self._joined(f"{layer}.qkv.{kind}")
        queries, rest = self._heads // self._kv_heads, fused.shape[1:]
        if fused.shape[0] != (queries + 2) * self._kv_heads * self._d_head:
            raise CircuitsError(
                f"query_key_value of layer {layer} in {fused.origin} has {fused.shape[0]} rows, which are not "
                f"{self._heads} + 2 * {self._kv_heads} heads of {self._d_head}: args and weights belong to different models"
            )

        def part(start: int, n: int) -> Recipe:
            def cut(rows: Tensor) -> Tensor:
                groups = rows.unflatten(0, (self._kv_heads, queries + 2, self._d_head))
                return groups[:, start : start + n].reshape(-1, *rest)

            return fused.then(cut, (self._kv_heads * n * self._d_head, *rest))

        return part(0, queries), part(queries, 1), part(queries + 1, 1)

    def _gain(self, name: str) -> Recipe:
        recipe = self._joined(name)
        offset = self._get.flag("apply_layernorm_1p") and name.endswith("norm.weight")
        return recipe.then(lambda gain: gain + 1) if offset else recipe

    # -- Hugging Face's names ---------------------------------------------------------------------------------------------

    def _plain(self, outside: Mapping[str, str], inside: Mapping[str, str], layer: str) -> dict[str, Recipe]:
        """What only changes its name."""
        wanted = {**outside, **_UNEMBED}
        wanted |= {
            f"{i}.{ours}": f"{layer.format(i)}.{theirs}" for i in range(self._layers) for ours, theirs in inside.items()
        }
        return {
            f"{theirs}.{kind}": self._gain(f"{ours}.{kind}")
            for ours, theirs in wanted.items()
            for kind in ("weight", "bias")
            if self._has(f"{ours}.{kind}")
        }

    def _gpt2(self) -> dict[str, Recipe]:
        recipes = self._plain(_GPT2_GLOBAL, _GPT2_NAMES, "transformer.h.{}")
        for name, recipe in recipes.items():
            if name.endswith((".c_proj.weight", ".c_fc.weight")):
                recipes[name] = recipe.transposed()
        for layer in range(self._layers):
            stem = f"transformer.h.{layer}.attn.c_attn"
            recipes[f"{stem}.weight"] = joined(self._roles(layer, "weight"), 0).transposed()
            recipes[f"{stem}.bias"] = joined(self._roles(layer, "bias"), 0)
        return recipes

    def _llama(self) -> dict[str, Recipe]:
        recipes = self._plain(_LLAMA_GLOBAL, _LLAMA_NAMES, "model.layers.{}")
        for layer in range(self._layers):
            stem = f"model.layers.{layer}"
            for kind in ("weight", "bias"):
                if self._has(f"{layer}.qkv.{kind}") or kind == "weight":
                    for role, recipe in zip("qkv", self._roles(layer, kind), strict=True):
                        recipes[f"{stem}.self_attn.{role}_proj.{kind}"] = recipe
                if self._has(f"{layer}.mlp_in.{kind}"):
                    # Each rank's first matrix is its part of the gate, then its part of what is gated.
                    for i, half in enumerate(("gate", "up")):
                        parts = [_half(part, i) for part in self._parts(f"{layer}.mlp_in.{kind}")]
                        recipes[f"{stem}.mlp.{half}_proj.{kind}"] = joined(parts, 0)
        return recipes

    # -- configs --------------------------------------------------------------------------------------------------------

    def _eps(self) -> float:
        return self._get.number("norm_epsilon", self._get.number("layernorm_epsilon", 1e-5))

    def _gpt2_config(self) -> dict[str, Any]:
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_layer": self._layers,
            "n_head": self._heads,
            "n_embd": self._d_model,
            "n_inner": self._get.count("ffn_hidden_size", 4 * self._d_model),
            "n_positions": self._get.count("max_position_embeddings"),
            "layer_norm_epsilon": self._eps(),
            # Megatron's fused kernel is the approximation with tanh; without it, torch's exact one.
            "activation_function": "gelu_new" if self._get.flag("bias_gelu_fusion") else "gelu",
            "bos_token_id": None,
            "eos_token_id": None,
        }

    def _llama_config(self) -> dict[str, Any]:
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": self._d_model,
            "num_hidden_layers": self._layers,
            "num_attention_heads": self._heads,
            "num_key_value_heads": self._kv_heads,
            "head_dim": self._d_head,
            "intermediate_size": self._get.count("ffn_hidden_size"),
            "max_position_embeddings": self._get.count("max_position_embeddings"),
            "rms_norm_eps": self._eps(),
            "rope_parameters": {"rope_type": "default", "rope_theta": self._get.number("rotary_base", 10000.0)},
            "hidden_act": "silu",
            "attention_bias": self._has("0.qkv.bias") and self._has("0.dense.bias"),
            "mlp_bias": self._has("0.mlp_in.bias"),
            "bos_token_id": None,
        }


def _half(part: Recipe, i: int) -> Recipe:
    if part.shape[0] % 2:
        raise CircuitsError(
            f"the MLP's gated matrix in {part.origin} has {part.shape[0]} rows, an odd number: it is damaged"
        )
    shape = (part.shape[0] // 2, *part.shape[1:])
    return part.then(lambda rows: torch.chunk(rows, 2)[i], shape)

"""GGUF files: dequantised one tensor at a time, under Hugging Face's names, llama.cpp's conversions undone.

llama.cpp's converter renames tensors, and of some families changes them as well: rows of W_Q and W_K in interleaved rotary order
(read as they lie, OV is right and QK is wrong), gains of Gemma with their 1 added, fused projections in another order of rows.
The names' correspondence is gguf-py's own table; the conversions and the words of the config are the table below.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ov_circuits.checkpoint.foreign import Foreign, halves, unpermute_rotary
from ov_circuits.checkpoint.stores import Recipe, RecipeStore, is_file
from ov_circuits.errors import CircuitsError

__all__ = ["open_gguf", "unpermute_rotary"]

Config = dict[str, Any]
Change = Callable[[Recipe, Config, str], Recipe]


# -- conversions undone -------------------------------------------------------------------------------------------------


def _halves(heads: str) -> Change:
    """Rotary row order of a projection with as many heads as this key of the config says."""
    return lambda recipe, config, where: halves(recipe, config[heads], where)


def _minus_one(recipe: Recipe, config: Config, where: str) -> Recipe:
    """A gain that transformers adds 1 to when it runs."""
    return recipe.then(lambda gain: gain - 1)


def _transposed(recipe: Recipe, config: Config, where: str) -> Recipe:
    """A Conv1D; biases have one side."""
    return recipe.transposed() if len(recipe.shape) == 2 else recipe


def _by_group(recipe: Recipe, config: Config, where: str) -> Recipe:
    """All queries, all keys, all values -> for each group its queries, key and value (Falcon; BLOOM and NeoX: groups of one)."""
    heads: int = config["n_head" if "n_head" in config else "num_attention_heads"]
    groups: int = config.get("num_kv_heads", heads)
    rows = recipe.shape[0]
    if heads % groups or rows % (heads + 2 * groups):
        raise CircuitsError(
            f"{where} has a query_key_value of {rows} rows, which are not {heads} + 2 * {groups} heads: the file is damaged"
        )

    def regroup(fused: Tensor) -> Tensor:
        q, k, v = fused.unflatten(0, (heads + 2 * groups, -1)).split((heads, groups, groups))
        return torch.cat([q.unflatten(0, (groups, -1)), k[:, None], v[:, None]], dim=1).reshape(fused.shape)

    return recipe.then(regroup)


# -- the table ------------------------------------------------------------------------------------------------------------

_LLAMA_MODULES = (
    "model.embed_tokens",
    "model.norm",
    "lm_head",
    *(
        f"model.layers.0.{name}"
        for name in (
            "input_layernorm",
            *(f"self_attn.{p}" for p in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
            *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
        )
    ),
)
_PHI_MODULES = (
    "model.embed_tokens",
    "model.final_layernorm",
    "lm_head",
    "model.layers.0.input_layernorm",
    *(f"model.layers.0.self_attn.{p}" for p in ("q_proj", "k_proj", "v_proj", "dense")),
    "model.layers.0.mlp.fc1",
    "model.layers.0.mlp.fc2",
)
_PHI3_MODULES = (
    *(name for name in _LLAMA_MODULES if not name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))),
    "model.layers.0.self_attn.qkv_proj",
    "model.layers.0.mlp.gate_up_proj",
)
_STARCODER2_MODULES = (
    *(name for name in _LLAMA_MODULES if ".mlp." not in name),
    "model.layers.0.mlp.c_fc",
    "model.layers.0.mlp.c_proj",
)
_GPT2_MODULES = (
    "transformer.wte",
    "transformer.wpe",
    "transformer.ln_f",
    "lm_head",
    *(f"transformer.h.0.{name}" for name in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")),
)
_BLOOM_LAYER = ("self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
_BLOOM_MODULES = (
    "transformer.word_embeddings",
    "transformer.ln_f",
    "lm_head",
    *(f"transformer.h.0.{name}" for name in ("input_layernorm", *_BLOOM_LAYER)),
)
_NEOX_MODULES = (
    "gpt_neox.embed_in",
    "gpt_neox.final_layer_norm",
    "embed_out",
    *(
        f"gpt_neox.layers.0.{name}"
        for name in (
            "input_layernorm",
            "attention.query_key_value",
            "attention.dense",
            "post_attention_layernorm",
            "mlp.dense_h_to_4h",
            "mlp.dense_4h_to_h",
        )
    ),
)

# GGUF's word after the architecture's name -> the config's.
_SIZES = {
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count_kv": "num_key_value_heads",
}
_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_ROTARY = {"rope.freq_base": "rope_theta"}
_HEAD_DIM = {"attention.key_length": "head_dim"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_LLAMA_WORDS = _SIZES | _RMS | _ROTARY | _HEAD_DIM
_GPT2_WORDS = {
    "context_length": "n_positions",
    "block_count": "n_layer",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
_UNGROUPED = {key: value for key, value in _SIZES.items() if key != "attention.head_count_kv"}
_LAYER_NORM = {"attention.layer_norm_epsilon": "layer_norm_eps"}
_QK_HALVES = {".q_proj": _halves("num_attention_heads"), ".k_proj": _halves("num_key_value_heads")}
_GELU = {"hidden_activation": "gelu_pytorch_tanh"}


@dataclass(frozen=True)
class _Kind:
    """One of GGUF's architectures in Hugging Face's terms.

    Attributes:
        model_type, class_name: what the config calls it.
        modules: Hugging Face's module names that a file may hold, in layer 0.
        words: GGUF's metadata -> the config's keys.
        always: what the config says of every such model and a GGUF file does not.
        changes: end of a module's name -> how llama.cpp's conversion of it is undone.
        finish: what the config says of this very file.
    """

    model_type: str
    class_name: str
    modules: tuple[str, ...]
    words: Mapping[str, str]
    always: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Change] = field(default_factory=dict)
    finish: Callable[[Config, _Metadata], None] = lambda config, metadata: None


def _partial_rotary(key: str) -> Callable[[Config, _Metadata], None]:
    def finish(config: Config, metadata: _Metadata) -> None:
        dimensions = metadata.number("rope.dimension_count")
        if dimensions is not None:
            config[key] = dimensions * config["num_attention_heads"] / config["hidden_size"]

    return finish


def _finish_llama(config: Config, metadata: _Metadata) -> None:
    if metadata.number("expert_count"):
        experts = {"num_local_experts": metadata.number("expert_count")}
        config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], **experts}
        config["num_experts_per_tok"] = metadata.number("expert_used_count") or 2


def _finish_gemma2(config: Config, metadata: _Metadata) -> None:
    # Not in the metadata: llama.cpp too knows the 27B model, which scales otherwise, by its number of layers.
    largest = config["num_hidden_layers"] == 46
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    )
    config["attn_logit_softcapping"] = metadata.number("attn_logit_softcapping")
    config["final_logit_softcapping"] = metadata.number("final_logit_softcapping")


def _finish_gemma3(config: Config, metadata: _Metadata) -> None:
    largest = config["num_hidden_layers"] == 62
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    )
    whole: dict[str, Any] = {"rope_type": "default", "rope_theta": config.pop("rope_theta", 1e6)}
    if metadata.text("rope.scaling.type") == "linear":
        whole |= {"rope_type": "linear", "factor": metadata.number("rope.scaling.factor") or 8.0}
    near = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa") or 10000.0}
    config["rope_parameters"] = {"full_attention": whole, "sliding_attention": near}


def _finish_stablelm(config: Config, metadata: _Metadata) -> None:
    _partial_rotary("partial_rotary_factor")(config, metadata)
    config["use_parallel_residual"] = not metadata.has("blk.0.ffn_norm.weight")
    config["use_qkv_bias"] = metadata.has("blk.0.attn_q.bias")
    config["qk_layernorm"] = metadata.has("blk.0.attn_q_norm.weight")


def _finish_neox(config: Config, metadata: _Metadata) -> None:
    _partial_rotary("rotary_pct")(config, metadata)
    parallel = metadata.flag("use_parallel_residual")
    config["use_parallel_residual"] = True if parallel is None else parallel


def _finish_falcon(config: Config, metadata: _Metadata) -> None:
    # The new layout (Falcon 40B) has groups and mostly two norms side by side; the old one (7B) one key/value head and one norm.
    groups = config.pop("num_key_value_heads", 1)
    config |= {"new_decoder_architecture": groups > 1, "multi_query": groups == 1, "num_kv_heads": groups}
    if groups > 1:
        config["num_ln_in_parallel_attn"] = 2 if metadata.has("blk.0.attn_norm_2.weight") else 1


def _finish_granite(config: Config, metadata: _Metadata) -> None:
    words = {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
    config |= {key: found for word, key in words.items() if (found := metadata.number(word)) is not None}


def _finish_olmo(config: Config, metadata: _Metadata) -> None:
    config["clip_qkv"] = metadata.number("attention.clamp_kqv")


def _finish_cohere(config: Config, metadata: _Metadata) -> None:
    config["logit_scale"] = metadata.number("logit_scale")
    config["use_qk_norm"] = metadata.has("blk.0.attn_q_norm.weight")


_KINDS: dict[str, _Kind] = {
    "llama": _Kind(
        "llama", "LlamaForCausalLM", _LLAMA_MODULES, _LLAMA_WORDS, {"hidden_act": "silu"}, _QK_HALVES, _finish_llama
    ),
    "gpt2": _Kind(
        "gpt2",
        "GPT2LMHeadModel",
        _GPT2_MODULES,
        _GPT2_WORDS,
        changes=dict.fromkeys((".c_attn", ".c_proj", ".c_fc"), _transposed),
    ),
    "starcoder": _Kind("gpt_bigcode", "GPTBigCodeForCausalLM", _GPT2_MODULES, _GPT2_WORDS, {"multi_query": True}),
    "starcoder2": _Kind(
        "starcoder2",
        "Starcoder2ForCausalLM",
        _STARCODER2_MODULES,
        _SIZES | _ROTARY | _WINDOW | {"attention.layer_norm_epsilon": "norm_epsilon"},
        {"hidden_act": "gelu_pytorch_tanh", "use_bias": True},
    ),
    "qwen2": _Kind("qwen2", "Qwen2ForCausalLM", _LLAMA_MODULES, _SIZES | _RMS | _ROTARY, {"hidden_act": "silu"}),
    "qwen3": _Kind("qwen3", "Qwen3ForCausalLM", _LLAMA_MODULES, _LLAMA_WORDS, {"hidden_act": "silu"}),
    "gemma": _Kind("gemma", "GemmaForCausalLM", _LLAMA_MODULES, _LLAMA_WORDS, _GELU, {"norm": _minus_one}),
    "gemma2": _Kind(
        "gemma2",
        "Gemma2ForCausalLM",
        _LLAMA_MODULES,
        _LLAMA_WORDS | _WINDOW,
        _GELU,
        {"norm": _minus_one},
        _finish_gemma2,
    ),
    "gemma3": _Kind(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _LLAMA_MODULES,
        _LLAMA_WORDS | _WINDOW,
        _GELU,
        {"norm": _minus_one},
        _finish_gemma3,
    ),
    "phi2": _Kind(
        "phi",
        "PhiForCausalLM",
        _PHI_MODULES,
        _SIZES | _ROTARY | _LAYER_NORM,
        {"hidden_act": "gelu_new"},
        finish=_partial_rotary("partial_rotary_factor"),
    ),
    "phi3": _Kind(
        "phi3",
        "Phi3ForCausalLM",
        _PHI3_MODULES,
        _SIZES | _RMS | _ROTARY | _WINDOW,
        {"hidden_act": "silu", "pad_token_id": None},
        finish=_partial_rotary("partial_rotary_factor"),
    ),
    "gptneox": _Kind(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        _NEOX_MODULES,
        _UNGROUPED | _LAYER_NORM | _ROTARY,
        {"hidden_act": "gelu"},
        {".query_key_value": _by_group},
        _finish_neox,
    ),
    "bloom": _Kind(
        "bloom",
        "BloomForCausalLM",
        _BLOOM_MODULES,
        {
            "block_count": "n_layer",
            "embedding_length": "hidden_size",
            "attention.head_count": "n_head",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        changes={".query_key_value": _by_group},
    ),
    "falcon": _Kind(
        "falcon",
        "FalconForCausalLM",
        _BLOOM_MODULES,
        _SIZES
        | _ROTARY
        | {"attention.layer_norm_epsilon": "layer_norm_epsilon", "feed_forward_length": "ffn_hidden_size"},
        {"parallel_attn": True, "bias": False, "alibi": False},
        {".query_key_value": _by_group},
        _finish_falcon,
    ),
    "olmo": _Kind(
        "olmo", "OlmoForCausalLM", _LLAMA_MODULES, _SIZES | _ROTARY, {"hidden_act": "silu"}, _QK_HALVES, _finish_olmo
    ),
    "olmo2": _Kind("olmo2", "Olmo2ForCausalLM", _LLAMA_MODULES, _LLAMA_WORDS, {"hidden_act": "silu"}),
    "stablelm": _Kind(
        "stablelm",
        "StableLmForCausalLM",
        _LLAMA_MODULES,
        _SIZES | _ROTARY | _LAYER_NORM,
        {"hidden_act": "silu"},
        finish=_finish_stablelm,
    ),
    "command-r": _Kind(
        "cohere",
        "CohereForCausalLM",
        _LLAMA_MODULES,
        _SIZES | _ROTARY | _LAYER_NORM,
        {"hidden_act": "silu"},
        finish=_finish_cohere,
    ),
    "granite": _Kind(
        "granite",
        "GraniteForCausalLM",
        _LLAMA_MODULES,
        _LLAMA_WORDS,
        {"hidden_act": "silu"},
        _QK_HALVES,
        _finish_granite,
    ),
}

# What BLOOM and Falcon call otherwise than gguf-py's table, or where it knows a name for other models only.
_BESIDES: dict[str, dict[str, str]] = {
    "bloom": {
        "token_embd_norm": "transformer.word_embeddings_layernorm",
        "blk.0.ffn_norm": "transformer.h.0.post_attention_layernorm",
    },
    "falcon": {"blk.0.attn_norm_2": "transformer.h.0.ln_attn"},
}
_COUNTS = {*_SIZES.values(), *_GPT2_WORDS.values(), "n_layer", "n_head", "head_dim", "sliding_window"} - {
    "layer_norm_epsilon"
}
_OPTIONAL = {"num_key_value_heads", "rope_theta", "head_dim", "sliding_window", "max_position_embeddings"}
_SPLIT = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")
_BLOCK = re.compile(r"blk\.([0-9]{1,5})\.(.+)")


# -- a file -----------------------------------------------------------------------------------------------------------------


def open_gguf(file: Path) -> Foreign:
    """A GGUF file in Hugging Face's terms.

    Raises:
        CircuitsError: it is damaged, of an architecture outside the table, or the gguf package is not installed.
    """
    metadata = _Metadata(_readers(file), file)
    kind = metadata.kind()
    config = _config(kind, metadata)
    recipes = _recipes(kind, config, metadata)
    unembed = "embed_out.weight" if kind.model_type == "gpt_neox" else "lm_head.weight"
    config["tie_word_embeddings"] = unembed not in recipes
    if kind.modules is _LLAMA_MODULES:
        config["attention_bias"] = any(name.endswith("o_proj.bias") for name in recipes) or (
            kind.model_type == "llama" and any(name.endswith("_proj.bias") for name in recipes)
        )
    return Foreign(config, RecipeStore(recipes), tokenizer=file, cannot_run=metadata.cannot_run())


def _readers(file: Path) -> dict[Path, Any]:
    """gguf-py's reader of a file, or of all parts of one that llama.cpp split, the one with the metadata first."""
    reader = _reader(file)
    field = reader.get_field("split.count")
    count = 1 if field is None else field.contents()
    if count in (0, 1):
        return {file: reader}
    match = _SPLIT.fullmatch(file.name)
    if match is None or int(match[3]) != count:
        raise CircuitsError(
            f"{file} is one of {count} parts, which are named like x-00001-of-{int(count):05d}.gguf: give it its name back"
        )
    files = [file.with_name(f"{match[1]}-{i + 1:05d}-of-{match[3]}.gguf") for i in range(count)]
    absent = next((part for part in files if not is_file(part)), None)
    if absent is not None:
        raise CircuitsError(f"{file} is one of {count} parts, and {absent.name} is missing beside it: copy it there")
    return {part: reader if part == file else _reader(part) for part in files}


def _reader(file: Path) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise CircuitsError(f"reading {file} needs the gguf package: pip install 'ov-circuits[gguf]'") from error
    check_header(file)
    try:
        return gguf.GGUFReader(str(file))
    except Exception as error:  # which of its numpy calls a damaged file breaks is the reader's own affair
        raise CircuitsError(f"{file} is not a readable GGUF file ({error}): copy or download it again") from error


class _Metadata:
    """What a GGUF file says of itself.

    Attributes:
        file: the file that was named.
        tensors: GGUF's name -> the reader's tensor.
        places: GGUF's name -> the file it lies in.
    """

    def __init__(self, readers: Mapping[Path, Any], file: Path) -> None:
        self._reader, self.file = next(iter(readers.values())), file
        self.tensors: dict[str, Any] = {}
        self.places: dict[str, Path] = {}
        for part, reader in readers.items():
            for tensor in reader.tensors:
                self.tensors[tensor.name], self.places[tensor.name] = tensor, part
        self.architecture = self._contents("general.architecture")

    def _contents(self, key: str) -> Any:
        field = self._reader.get_field(key)
        try:
            return None if field is None else field.contents()
        except Exception as error:  # bytes that are no UTF-8, a type that is none
            raise CircuitsError(
                f"{self.file} has an unreadable {key} in its metadata ({error}): copy it again"
            ) from error

    def kind(self) -> _Kind:
        """The table's row.

        Raises:
            CircuitsError: there is none.
        """
        if not isinstance(self.architecture, str) or self.architecture not in _KINDS:
            raise CircuitsError(
                f"{self.file} holds a {self.architecture!r} model; of GGUF files these are read: {', '.join(_KINDS)}. "
                "Use the safetensors checkpoint of this model"
            )
        return _KINDS[self.architecture]

    def value(self, word: str) -> Any:
        """What stands under the architecture's own key."""
        return self._contents(f"{self.architecture}.{word}")

    def number(self, word: str) -> Any:
        """A number under the architecture's own key, or None."""
        found = self.value(word)
        if found is not None and (isinstance(found, bool) or not isinstance(found, (int, float))):
            shown = "a list, different from layer to layer" if isinstance(found, list) else repr(found)[:80]
            raise CircuitsError(f"{self.file} says {self.architecture}.{word} is {shown}, where one number is read")
        return found

    def text(self, word: str) -> str | None:
        """A word under the architecture's own key, or None."""
        found = self.value(word)
        return found if isinstance(found, str) else None

    def flag(self, word: str) -> bool | None:
        """True or false under the architecture's own key, or None."""
        found = self.value(word)
        return found if isinstance(found, bool) else None

    def token(self, word: str) -> int | None:
        """A token id of the tokenizer, or None."""
        found = self._contents(f"tokenizer.ggml.{word}")
        return found if isinstance(found, int) else None

    def has(self, name: str) -> bool:
        """Whether the file holds a tensor, under GGUF's name."""
        return name in self.tensors

    def cannot_run(self) -> str | None:
        """Why no prompt can be run: what is known not to carry over."""
        scaling = self.text("rope.scaling.type")
        carried = scaling in (None, "none") or (self.architecture == "gemma3" and scaling == "linear")
        if not carried or any(name.startswith("rope_f") for name in self.tensors):
            return "this GGUF file scales its rotary frequencies, which is not carried over: run its safetensors checkpoint"
        if self.number("expert_count"):
            return "this GGUF file holds a mixture of experts, of which the attention alone is read"
        return None


def _config(kind: _Kind, metadata: _Metadata) -> Config:
    config: Config = {"model_type": kind.model_type, "architectures": [kind.class_name], **kind.always}
    for word, key in kind.words.items():
        found = metadata.number(word)
        if found is None:
            if key in _OPTIONAL:
                continue
            raise CircuitsError(
                f"{metadata.file} has no {metadata.architecture}.{word} in its metadata: the file is incomplete"
            )
        if key in _COUNTS and (not isinstance(found, int) or not 0 < found <= 10**8):
            raise CircuitsError(f"{metadata.file} says {metadata.architecture}.{word} is {found}, which makes no sense")
        config[key] = found
    heads = config.get("num_attention_heads")
    if heads is not None and "attention.head_count_kv" in kind.words:
        config.setdefault("num_key_value_heads", heads)
    if "head_dim" in kind.words.values() and heads is not None:
        config.setdefault("head_dim", max(config["hidden_size"] // heads, 1))
    if "rope_theta" in kind.words.values():
        config.setdefault("rope_theta", 10000.0)  # llama.cpp's own default
    for word in ("bos_token_id", "eos_token_id"):
        config[word] = metadata.token(word)
    kind.finish(config, metadata)
    vocabulary, embedding = metadata.number("vocab_size"), metadata.tensors.get("token_embd.weight")
    if vocabulary is None and embedding is not None and len(embedding.shape) == 2:
        vocabulary = int(embedding.shape[1])
    return config | {"vocab_size": vocabulary}


def _recipes(kind: _Kind, config: Config, metadata: _Metadata) -> dict[str, Recipe]:
    """Every tensor that has a name of Hugging Face's."""
    names = _names(kind, metadata.architecture)
    if config.get("num_ln_in_parallel_attn") == 2:
        names["blk.0.attn_norm"] = "transformer.h.0.ln_mlp"
    recipes: dict[str, Recipe] = {}
    for name, tensor in metadata.tensors.items():
        stem, dot, suffix = name.rpartition(".")
        block = _BLOCK.fullmatch(stem)
        module = names.get(f"blk.0.{block[2]}" if block else stem)
        if module is None or suffix not in ("weight", "bias"):
            continue
        recipe = _stored(tensor, metadata.places[name])
        for end, change in kind.changes.items():
            if module.endswith(end):
                recipe = change(recipe, config, str(metadata.file))
        recipes[f"{module.replace('.0.', f'.{int(block[1])}.', 1) if block else module}{dot}{suffix}"] = recipe
    return recipes


def _names(kind: _Kind, architecture: str) -> dict[str, str]:
    """GGUF's name of a tensor (in block 0) -> Hugging Face's module (in layer 0), by gguf-py's own table."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(number, 1)
    found = {table.get_name(module): module for module in kind.modules}
    return {name: module for name, module in found.items() if name} | _BESIDES.get(architecture, {})


def _stored(tensor: Any, file: Path) -> Recipe:
    """A tensor as llama.cpp stores it, dequantised when it is read."""
    shape = tuple(int(n) for n in reversed(tensor.shape))
    kind = tensor.tensor_type.name

    def read() -> Tensor:
        from gguf import quants

        try:
            values = quants.dequantize(tensor.data, tensor.tensor_type)
            return torch.from_numpy(values.copy()).reshape(shape)
        except (NotImplementedError, ValueError, TypeError, RuntimeError) as error:
            raise CircuitsError(
                f"tensor {tensor.name} in {file} is stored as {kind}, "
                f"which the gguf package cannot dequantise ({error}); use a Q4_0 to Q8_0, K-quant, f16 or f32 file"
            ) from error

    return Recipe(shape, kind, str(file), read)


# -- a header that lies -------------------------------------------------------------------------------------------------------

# GGUF's value types by number: bytes of a plain one. 8 is a string, 9 a list.
_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _LIST = 8, 9
_LARGEST_HEADER = 256 * 2**20


def check_header(file: Path) -> None:
    """Walk through a GGUF header and refuse one whose counts its own file cannot hold.

    gguf-py's reader believes what a header says: a list of 2^60 numbers would keep it busy for ever.

    Raises:
        CircuitsError: the header is damaged or larger than any header is.
    """
    size = min(file.stat().st_size, _LARGEST_HEADER)
    try:
        with file.open("rb") as opened:
            _Header(opened, size).check()
    except (_Lie, struct.error, OSError) as error:
        raise CircuitsError(f"{file} is not a readable GGUF file ({error}): copy or download it again") from error


class _Lie(Exception):
    """A header says what its file cannot hold."""


class _Header:
    def __init__(self, opened: BinaryIO, size: int) -> None:
        self._opened, self._size = opened, size
        self._order = "<"

    def check(self) -> None:
        if self._opened.read(4) != b"GGUF":
            raise _Lie("it does not begin with GGUF")
        (version,) = struct.unpack("<I", self._take(4))
        if version & 0xFFFF == 0:
            self._order, version = ">", int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in (2, 3):
            raise _Lie(f"version {version}; 2 and 3 are read")
        tensors, keys = self._number(), self._number()
        for _ in range(self._fits(keys, 12)):
            self._text()
            self._value(self._word(), depth=0)
        for _ in range(self._fits(tensors, 24)):
            self._text()
            self._tensor()

    def _tensor(self) -> None:
        dimensions = self._word()
        if dimensions > 8:
            raise _Lie(f"a tensor of {dimensions} dimensions")
        total = 1
        for _ in range(dimensions):
            total *= self._number()
        if total >= 2**48:
            raise _Lie(f"a tensor of {total:,} numbers")
        self._take(12)

    def _value(self, kind: int, depth: int) -> None:
        if kind in _BYTES:
            self._take(_BYTES[kind])
        elif kind == _STRING:
            self._text()
        elif kind == _LIST and depth < 4:
            inner, n = self._word(), self._number()
            if inner in _BYTES:
                self._skip(self._fits(n, _BYTES[inner]) * _BYTES[inner])
            else:
                for _ in range(self._fits(n, 8)):
                    self._value(inner, depth + 1)
        else:
            raise _Lie(f"a value of unknown type {kind}")

    def _text(self) -> None:
        self._skip(self._fits(self._number(), 1))

    def _fits(self, n: int, each: int) -> int:
        """``n`` items of at least ``each`` bytes must fit into what is left."""
        if n * each > self._size - self._opened.tell():
            raise _Lie(f"it announces {n:,} items, more than it can hold")
        return n

    def _skip(self, n: int) -> None:
        self._opened.seek(n, 1)

    def _take(self, n: int) -> bytes:
        found = self._opened.read(n)
        if len(found) < n:
            raise _Lie("it ends within its header")
        return found

    def _word(self) -> int:
        return int(struct.unpack(f"{self._order}I", self._take(4))[0])

    def _number(self) -> int:
        return int(struct.unpack(f"{self._order}Q", self._take(8))[0])

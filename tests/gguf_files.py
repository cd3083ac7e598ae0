"""Tiny transformers models as GGUF files, converted as llama.cpp's convert_hf_to_gguf.py does (its model classes are named).

None of the package's code is used. Names come from gguf-py's own table, as in the converter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Convert = Callable[[str, Tensor, Any], Tensor]


def _plain(name: str, tensor: Tensor, config: Any) -> Tensor:
    return tensor


def _permuted(name: str, tensor: Tensor, config: Any) -> Tensor:
    """LlamaModel.permute."""
    for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        if f"{part}." in name:
            return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    return tensor


def _plus_one(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Gemma2Model.modify_tensors."""
    return tensor + 1 if name.endswith("norm.weight") else tensor


def _gpt2(name: str, tensor: Tensor, config: Any) -> Tensor:
    """GPT2Model.modify_tensors."""
    return tensor.T if name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")) else tensor


def _heads_of_three(name: str, tensor: Tensor, config: Any) -> Tensor:
    """BloomModel and GPTNeoXModel: [head, (q k v), d_head] -> q, k, v."""
    if "query_key_value" not in name:
        return tensor
    heads = config.num_attention_heads
    fused = tensor.reshape(heads, 3, -1, *tensor.shape[1:])
    return torch.cat([fused[:, i].reshape(-1, *tensor.shape[1:]) for i in range(3)])


def _falcon(name: str, tensor: Tensor, config: Any) -> Tensor:
    """FalconModel.modify_tensors."""
    if "query_key_value" not in name:
        return tensor
    heads, groups = config.num_attention_heads, config.num_kv_heads if config.new_decoder_architecture else 1
    d_head = config.hidden_size // heads
    qkv = tensor.view(groups, heads // groups + 2, d_head, d_head * heads)
    parts = qkv[:, :-2].reshape(-1, d_head * heads), qkv[:, -2].reshape(-1, d_head * heads), qkv[:, -1]
    return torch.cat([*parts[:2], parts[2].reshape(-1, d_head * heads)]).reshape(tensor.shape)


@dataclass(frozen=True)
class Sample:
    """A tiny model of one architecture.

    Attributes:
        name: GGUF's.
        config: the transformers config's class.
        settings: its arguments.
        convert: what the converter does to a tensor.
        metadata: what it writes besides sizes; values may look into the config.
        renamed: GGUF names that gguf-py's table does not give.
    """

    name: str
    config: str
    settings: dict[str, Any]
    convert: Convert = _plain
    metadata: dict[str, Any] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)


_SIZES = dict(
    hidden_size=32,
    num_attention_heads=4,
    num_hidden_layers=2,
    intermediate_size=48,
    vocab_size=64,
    max_position_embeddings=40,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,
)
_GROUPED = _SIZES | dict(num_key_value_heads=2)
_RMS = {"attention.layer_norm_rms_epsilon": lambda c: c.rms_norm_eps}
_WIDE = {"attention.key_length": lambda c: c.head_dim, "attention.value_length": lambda c: c.head_dim}
_GPT2 = dict(n_embd=32, n_head=4, n_layer=2, n_positions=40, vocab_size=64, bos_token_id=1, eos_token_id=2)


def _rope(c: Any) -> float:
    parameters = c.rope_parameters
    return parameters["rope_theta"] if "rope_theta" in parameters else parameters["full_attention"]["rope_theta"]


_ROPE = {"rope.freq_base": _rope}

SAMPLES = {
    sample.name + note: sample
    for note, sample in [
        ("", Sample("llama", "Llama", _GROUPED | dict(head_dim=12), _permuted, _RMS | _WIDE | _ROPE)),
        ("-biases", Sample("llama", "Llama", _GROUPED | dict(attention_bias=True), _permuted, _RMS | _WIDE | _ROPE)),
        ("", Sample("gpt2", "GPT2", _GPT2, _gpt2, {"attention.layer_norm_epsilon": lambda c: c.layer_norm_epsilon})),
        (
            "",
            Sample(
                "starcoder",
                "GPTBigCode",
                _GPT2 | dict(multi_query=True),
                metadata={"attention.layer_norm_epsilon": lambda c: c.layer_norm_epsilon},
            ),
        ),
        (
            "",
            Sample(
                "starcoder2",
                "Starcoder2",
                _GROUPED | dict(sliding_window=8, norm_epsilon=2e-5, tie_word_embeddings=True),
                metadata=_ROPE
                | {"attention.layer_norm_epsilon": lambda c: c.norm_epsilon, "attention.sliding_window": lambda c: 8},
            ),
        ),
        ("", Sample("qwen2", "Qwen2", _GROUPED, metadata=_RMS | _ROPE)),
        ("", Sample("qwen3", "Qwen3", _GROUPED | dict(head_dim=12), metadata=_RMS | _WIDE | _ROPE)),
        ("", Sample("gemma", "Gemma", _GROUPED | dict(head_dim=16), _plus_one, _RMS | _WIDE)),
        (
            "",
            Sample(
                "gemma2",
                "Gemma2",
                _GROUPED | dict(head_dim=16, sliding_window=6, query_pre_attn_scalar=16),
                _plus_one,
                _RMS
                | _WIDE
                | {
                    "attention.sliding_window": lambda c: 6,
                    "attn_logit_softcapping": lambda c: c.attn_logit_softcapping,
                    "final_logit_softcapping": lambda c: c.final_logit_softcapping,
                },
            ),
        ),
        (
            "",
            Sample(
                "gemma3",
                "Gemma3Text",
                _GROUPED
                | dict(head_dim=16, sliding_window=6, query_pre_attn_scalar=16, num_hidden_layers=6)
                | dict(
                    rope_parameters={
                        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    }
                ),
                _plus_one,
                _RMS
                | _WIDE
                | _ROPE
                | {
                    "attention.sliding_window": lambda c: 6,
                    "rope.scaling.type": lambda c: "linear",
                    "rope.scaling.factor": lambda c: 8.0,
                },
            ),
        ),
        (
            "",
            Sample(
                "phi2",
                "Phi",
                _SIZES | dict(partial_rotary_factor=0.5),
                metadata={
                    "attention.layer_norm_epsilon": lambda c: c.layer_norm_eps,
                    "rope.dimension_count": lambda c: 4,
                },
            ),
        ),
        (
            "",
            Sample(
                "phi3",
                "Phi3",
                _GROUPED | dict(sliding_window=8),
                metadata=_RMS | _ROPE | {"attention.sliding_window": lambda c: 8, "rope.dimension_count": lambda c: 8},
            ),
        ),
        (
            "",
            Sample(
                "gptneox",
                "GPTNeoX",
                _SIZES | dict(rotary_pct=0.25, use_parallel_residual=True),
                _heads_of_three,
                {
                    "attention.layer_norm_epsilon": lambda c: c.layer_norm_eps,
                    "rope.dimension_count": lambda c: 2,
                    "use_parallel_residual": lambda c: c.use_parallel_residual,
                },
            ),
        ),
        (
            "-serial",
            Sample(
                "gptneox",
                "GPTNeoX",
                _SIZES | dict(rotary_pct=0.5, use_parallel_residual=False),
                _heads_of_three,
                {
                    "attention.layer_norm_epsilon": lambda c: c.layer_norm_eps,
                    "rope.dimension_count": lambda c: 4,
                    "use_parallel_residual": lambda c: c.use_parallel_residual,
                },
            ),
        ),
        (
            "",
            Sample(
                "bloom",
                "Bloom",
                dict(
                    hidden_size=32, n_head=4, n_layer=2, vocab_size=64, bos_token_id=1, eos_token_id=2, pad_token_id=3
                ),
                _heads_of_three,
                {"attention.layer_norm_epsilon": lambda c: c.layer_norm_epsilon},
                {"transformer.word_embeddings_layernorm": "token_embd_norm", "post_attention_layernorm": "ffn_norm"},
            ),
        ),
        (
            "-7b",
            Sample(
                "falcon",
                "Falcon",
                _SIZES | dict(multi_query=True, ffn_hidden_size=128),
                _falcon,
                {"attention.layer_norm_epsilon": lambda c: c.layer_norm_epsilon, "feed_forward_length": lambda c: 128}
                | {"attention.head_count_kv": lambda c: 1},
            ),
        ),
        (
            "-40b",
            Sample(
                "falcon",
                "Falcon",
                _SIZES | dict(new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=128),
                _falcon,
                {"attention.layer_norm_epsilon": lambda c: c.layer_norm_epsilon, "feed_forward_length": lambda c: 128}
                | {"attention.head_count_kv": lambda c: 2},
                # The converter calls the attention's norm the second one here.
                {"ln_attn": "attn_norm_2", "ln_mlp": "attn_norm"},
            ),
        ),
        (
            "",
            Sample(
                "olmo", "Olmo", _GROUPED | dict(clip_qkv=0.5), _permuted, _ROPE | {"attention.clamp_kqv": lambda c: 0.5}
            ),
        ),
        ("", Sample("olmo2", "Olmo2", _GROUPED, metadata=_RMS | _ROPE)),
        (
            "",
            Sample(
                "stablelm",
                "StableLm",
                _GROUPED | dict(partial_rotary_factor=0.25, use_qkv_bias=True),
                metadata={
                    "attention.layer_norm_epsilon": lambda c: c.layer_norm_eps,
                    "rope.dimension_count": lambda c: 2,
                },
            ),
        ),
        (
            "",
            Sample(
                "command-r",
                "Cohere",
                _GROUPED,
                metadata=_ROPE
                | {
                    "attention.layer_norm_epsilon": lambda c: c.layer_norm_eps,
                    "logit_scale": lambda c: c.logit_scale,
                    "rope.scaling.type": lambda c: "none",
                },
            ),
        ),
        (
            "",
            Sample(
                "granite",
                "Granite",
                _GROUPED
                | dict(
                    embedding_multiplier=12.0, logits_scaling=6.0, residual_multiplier=0.25, attention_multiplier=0.2
                ),
                _permuted,
                _RMS
                | _ROPE
                | {
                    "attention.scale": lambda c: c.attention_multiplier,
                    "embedding_scale": lambda c: c.embedding_multiplier,
                    "residual_scale": lambda c: c.residual_multiplier,
                    "logit_scale": lambda c: c.logits_scaling,
                },
            ),
        ),
    ]
}

# The largest models of two families, which llama.cpp knows by their number of layers, scale scores by d_model / n_heads.
for _name, _changes in {
    "gemma2": dict(num_hidden_layers=46),
    "gemma3": dict(
        num_hidden_layers=62,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
}.items():
    _small = SAMPLES[_name]
    SAMPLES[f"{_name}-27b"] = replace(
        _small,
        settings=_small.settings | _changes | dict(query_pre_attn_scalar=8),
        metadata=_small.metadata | ({"rope.freq_base_swa": lambda c: 50.0} if _name == "gemma3" else {}),
    )


def sample_model(sample: Sample, seed: int = 0) -> Any:
    """A tiny random transformers model: no gain is one, no bias zero."""
    import transformers

    config = getattr(transformers, f"{sample.config}Config")(**sample.settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_((0.3 * noise).exp() if parameter.ndim == 1 and name.endswith("weight") else 0.3 * noise)
    return model


def write_sample(sample: Sample, model: Any, file: Path, kind: str = "F32", parts_of: int = 0) -> Path:
    """The model as a GGUF file."""
    import gguf
    from gguf import GGMLQuantizationType as Kind
    from gguf import quants

    config = model.config
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == sample.name)
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    writer = gguf.GGUFWriter(str(file), sample.name, split_max_tensors=parts_of)
    sizes = {
        "context_length": getattr(config, "max_position_embeddings", 40),
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "intermediate_size", 4 * config.hidden_size),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
    } | {key: value(config) for key, value in sample.metadata.items()}
    for key, value in sizes.items():
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        kinds[type(value)](f"{sample.name}.{key}", value)
    writer.add_vocab_size(config.vocab_size)
    writer.add_bos_token_id(1)
    tied = getattr(config, "tie_word_embeddings", False)
    for name, tensor in model.state_dict().items():
        if tied and name in ("lm_head.weight", "embed_out.weight"):
            continue
        module, _, end = name.rpartition(".")
        target = table.get_name(module)
        for part, renamed in sample.renamed.items():
            if module.endswith(part):
                layer = next((piece for piece in module.split(".") if piece.isdigit()), None)
                target = renamed if layer is None else f"blk.{layer}.{renamed}"
        if target is None:
            assert name.endswith(("inv_freq", ".bias")) and ("rotary" in name or "attn.bias" in name), name
            continue
        values = sample.convert(name, tensor, config).contiguous().float().numpy()
        stored = Kind[kind] if values.ndim == 2 else Kind.F32
        writer.add_tensor(f"{target}.{end}", quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file

"""Tiny random transformers models of every family, nothing left at its default: random gains, biases away from zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# model_type -> (config class, model class); sizes are small and no two of them are equal where they may differ.
_MODERN = dict(
    hidden_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=2,
    intermediate_size=36,
    vocab_size=23,
    max_position_embeddings=32,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=None,
)
_OLD = dict(n_embd=24, n_head=4, n_layer=2, n_inner=36, n_positions=19, vocab_size=23, bos_token_id=0, eos_token_id=0)
_WITHOUT_GROUPS = {key: value for key, value in _MODERN.items() if key != "num_key_value_heads"}
_WIDE = _MODERN | {"head_dim": 8}

BASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _OLD),
    "gpt_bigcode": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", _OLD),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", _OLD | {"rotary_dim": 4}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", _WIDE),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", _MODERN | {"num_hidden_layers": 4}),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", _MODERN),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", _MODERN),
    "mistral": ("MistralConfig", "MistralForCausalLM", _WIDE | {"sliding_window": 4}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", _WIDE | {"num_local_experts": 3}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _MODERN),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _WIDE),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", _WIDE),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", _WIDE | {"query_pre_attn_scalar": 5, "sliding_window": 4}),
    "gemma3_text": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        _WIDE | {"query_pre_attn_scalar": 5, "sliding_window": 4, "num_hidden_layers": 3, "sliding_window_pattern": 2},
    ),
    "phi": ("PhiConfig", "PhiForCausalLM", _MODERN | {"hidden_size": 32}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", _MODERN),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _WITHOUT_GROUPS | {"hidden_size": 32}),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        dict(hidden_size=24, num_attention_heads=4, num_hidden_layers=2, ffn_dim=36, vocab_size=23, max_position_embeddings=19)
        | {"word_embed_proj_dim": 24, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "activation_function": "relu"},
    ),
    "bloom": (
        "BloomConfig",
        "BloomForCausalLM",
        dict(hidden_size=24, n_head=4, n_layer=2, vocab_size=23, bos_token_id=0, eos_token_id=0),
    ),
    "falcon": ("FalconConfig", "FalconForCausalLM", _WITHOUT_GROUPS | {"ffn_hidden_size": 36, "bias": True}),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", _MODERN | {"hidden_size": 32}),
    "cohere": ("CohereConfig", "CohereForCausalLM", _MODERN | {"logit_scale": 0.7}),
    "granite": (
        "GraniteConfig",
        "GraniteForCausalLM",
        _MODERN | dict(embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.3, logits_scaling=5.0),
    ),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", _MODERN),
}  # fmt: skip

_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0, "original_max_position_embeddings": 8}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 2.5, 3.0],
}
_NO_POSITIONS = {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]}

# What each variant changes of its family's base.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in BASES} | {
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True}),
    "gpt_bigcode-every-head": ("gpt_bigcode", {"multi_query": False, "n_inner": None}),
    "gptj-tied": ("gptj", {"tie_word_embeddings": True, "rotary_dim": 6}),
    "llama-biased-tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama3": ("llama", {"rope_parameters": _LLAMA3 | {"original_max_position_embeddings": 8}}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}}),
    "llama-yarn": ("llama", {"rope_parameters": _YARN}),
    "smollm3-windows": ("smollm3", _NO_POSITIONS | {"use_sliding_window": True, "sliding_window": 3, "attention_bias": True}),
    "olmo-clipped": ("olmo", {"clip_qkv": 0.8, "attention_bias": True}),
    "olmo2-biased": ("olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    "mistral-whole": ("mistral", {"sliding_window": None}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    "qwen3-biased": ("qwen3", {"attention_bias": True, "num_key_value_heads": 1}),
    "gemma2-uncapped": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3-scaled": ("gemma3_text", {"rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    }}),
    "phi-normed": ("phi", {"qk_layernorm": True}),
    "phi3-long": ("phi3", {
        "hidden_size": 32,
        "original_max_position_embeddings": 8,
        "sliding_window": 5,
        "rope_parameters": _LONG,
    }),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True}),
    "opt-without-parameters": ("opt", {"layer_norm_elementwise_affine": False, "enable_bias": False, "tie_word_embeddings": False}),
    "bloom-five-heads": ("bloom", {"hidden_size": 40, "n_head": 5}),
    "falcon-grouped": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-grouped-one-norm": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    "falcon-every-head": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": False}),
    "stablelm-parallel-normed": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True}),
    "cohere-normed": ("cohere", {"use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False}),
    "granite-biased": ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "starcoder2-windows": ("starcoder2", {"sliding_window": 3, "use_bias": False, "tie_word_embeddings": False}),
}  # fmt: skip


def settings(variant: str, **overrides: Any) -> tuple[str, dict[str, Any]]:
    """A variant's model type and the keywords of its config."""
    base, changes = VARIANTS[variant]
    return base, BASES[base][2] | changes | overrides


def tiny(variant: str, seed: int = 0, *, implementation: str = "eager", **overrides: Any) -> Any:
    """transformers' own model of a variant, by default in eager attention."""
    import transformers

    base, keywords = settings(variant, **overrides)
    config = getattr(transformers, BASES[base][0])(**keywords)
    config._attn_implementation = implementation
    torch.manual_seed(seed)
    network = getattr(transformers, BASES[base][1])(config).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_gain = name.endswith("weight") and ("norm" in name or ".ln_" in name)
            parameter.copy_((0.5 * noise).exp() if is_gain else 0.3 * noise)
    return network


def with_images(base: str, kind: str) -> Any:
    """transformers' model of images and text around a language model of the table."""
    import transformers

    text = getattr(transformers, BASES[base][0])(**settings(base)[1])
    vision = dict(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=8, patch_size=4
    )
    seen = transformers.SiglipVisionConfig if kind == "Gemma3" else transformers.PixtralVisionConfig
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=seen(**vision), image_token_index=22
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()


def module(network: Any, family: Any, name: str, layer: int = 0) -> torch.nn.Module:
    return network.base_model.get_submodule(family.within + name.format(layer=layer))


@contextmanager
def reading(attention: torch.nn.Module, rows: Tensor) -> Iterator[None]:
    """Let an attention module read these rows [batch, pos, d_model] whatever it is given."""

    def change(_: Any, args: Any, kwargs: Any) -> Any:
        if "hidden_states" in kwargs:
            return args, kwargs | {"hidden_states": rows}
        return (rows, *args[1:]), kwargs

    handle = attention.register_forward_pre_hook(change, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def attended(found: dict[int, dict[str, Any]]) -> Iterator[None]:
    """Note what transformers' attention functions are given, by layer: ``query``, ``key``, ``value``, ``scaling``."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    functions = type(ALL_ATTENTION_FUNCTIONS)
    get = functions.get_interface

    def watched(self: Any, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = get(self, implementation, default)

        def call(owner: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            found[owner.layer_idx] = {"query": query, "key": key, "value": value, "scaling": kwargs.get("scaling")}
            return function(owner, query, key, value, *args, **kwargs)

        return call

    functions.get_interface = watched
    try:
        yield
    finally:
        functions.get_interface = get

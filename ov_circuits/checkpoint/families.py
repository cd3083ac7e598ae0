"""A table: how each architecture names and lays out its tensors. Adding a family is adding a row.

Rows are made of :mod:`ov_circuits.checkpoint.layout`. What is near but outside is refused by name, with the reason.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from ov_circuits.checkpoint.config import MOST_LAYERS, Config, RopeSettings
from ov_circuits.checkpoint.layout import Architecture, Family, MLPRole, Part, Projection, Role, Rotary, Shapes
from ov_circuits.errors import CircuitsError

__all__ = [
    "FAMILIES",
    "Architecture",
    "Family",
    "MLPRole",
    "Part",
    "Projection",
    "Role",
    "Rotary",
    "Shapes",
    "family_of",
    "language_part",
    "model_type_of",
]

# -- from a config to numbers -----------------------------------------------------------------------------------------

_QKV = ("Q", "K", "V")
_ATTENTION = (*_QKV, "O")
_PLAIN_MLP = ("in", "out")
_GATED_MLP = ("gate", *_PLAIN_MLP)

# Our name of a number -> the config's key.
_KEYS = {
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "d_model": "hidden_size",
    "d_head": "head_dim",
    "d_mlp": "intermediate_size",
    "n_ctx": "max_position_embeddings",
}
_GPT2_KEYS = _KEYS | {
    "n_layers": "n_layer",
    "n_heads": "n_head",
    "d_model": "n_embd",
    "d_mlp": "n_inner",
    "n_ctx": "n_positions",
}


def _numbers(
    get: Config,
    norm: Literal["LayerNorm", "RMSNorm"],
    eps: tuple[str, float],
    *,
    keys: Mapping[str, str] = _KEYS,
    n_kv_heads: int | None = None,
    kv_default: int | None = None,
    d_head: int | None = None,
    square: bool = False,
    d_mlp: int | None = None,
    n_ctx: Any = 2048,
    tied: bool = False,
    **facts: Any,
) -> Architecture:
    """What every config says.

    Args:
        norm, eps: kind of norm, and the key and default of its epsilon.
        keys: our names of numbers -> the config's.
        n_kv_heads: their number where the config does not say it under the usual key; ``kv_default``: where it may leave it out.
        d_head: default width of a head, instead of d_model / n_heads; ``square``: it is always d_model / n_heads.
        d_mlp: the MLP's width where the config may leave it out.
        n_ctx, tied: defaults.
        facts: further fields of the architecture.
    """
    n_layers = get.count(keys["n_layers"], largest=MOST_LAYERS)
    d_model, n_heads = get.count(keys["d_model"]), get.count(keys["n_heads"])
    if n_kv_heads is None:
        n_kv_heads = get.count(keys["n_kv_heads"], kv_default or n_heads)
    if n_heads % n_kv_heads:
        raise CircuitsError(
            f"the config says {n_heads} query heads on {n_kv_heads} key/value heads: groups would not be equal"
        )
    stated = None if square else get.raw(keys["d_head"])
    if stated is None and d_head is None and d_model % n_heads:
        which = f"{keys['d_model']} = {d_model} and {keys['n_heads']} = {n_heads}"
        raise CircuitsError(
            f"the config says {which}: heads do not divide the width"
            if square
            else f"the config says {which}, which do not divide, and gives no {keys['d_head']}"
        )
    width = d_head or d_model // n_heads
    return Architecture(
        family=get.family,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_model=d_model,
        d_head=width if square else get.count(keys["d_head"], width),
        d_mlp=get.count(keys["d_mlp"], d_mlp),
        n_vocab=get.count("vocab_size"),
        n_ctx=get.count(keys["n_ctx"], n_ctx),
        norm=norm,
        norm_eps=get.number(*eps),
        tied=get.flag("tie_word_embeddings", tied),
        **{"positions": "rotary"} | facts,
    )


def _with_rotary(a: Architecture, rope: RopeSettings, *, interleaved: bool = False) -> Architecture:
    """The same rotary positions in every layer."""
    return replace(a, rotary=(_rotary(a, rope, interleaved),) * a.n_layers)


def _rotary(a: Architecture, rope: RopeSettings, interleaved: bool = False) -> Rotary:
    dim = int(a.d_head * rope.factor)
    return Rotary(dim + dim % 2, interleaved, rope.theta, rope.kind, rope.group)


def _if(condition: bool, roles: tuple[str, ...]) -> tuple[str, ...]:
    return roles if condition else ()


def _windows(a: Architecture, get: Config, window: int | None, sliding: list[bool]) -> tuple[int | None, ...]:
    """A window for the layers that ``layer_types`` calls sliding; ``sliding`` counts where the config has no such list."""
    kinds = get.per_layer("layer_types", a.n_layers)
    if kinds is not None:
        unknown = next((kind for kind in kinds if kind not in ("full_attention", "sliding_attention")), None)
        if unknown is not None:
            raise get.refusal(
                "layer_types", f"names {reprlib.repr(unknown)}, which is no kind of attention that is split here"
            )
        sliding = [kind == "sliding_attention" for kind in kinds]
    return tuple(window if slides else None for slides in sliding)


# -- GPT-2 and what has its layout ------------------------------------------------------------------------------------


def _gpt2_numbers(get: Config) -> Architecture:
    width = get.raw("n_embd")
    return _numbers(
        get,
        "LayerNorm",
        ("layer_norm_epsilon", 1e-5),
        keys=_GPT2_KEYS,
        n_kv_heads=get.count("n_head"),
        square=True,
        d_mlp=4 * width if isinstance(width, int) else None,
        n_ctx=get.raw("n_ctx"),
        tied=True,
        positions="learned",
        norm_bias=True,
        biases=_ATTENTION + _PLAIN_MLP,
        scale_by_layer=get.flag("scale_attn_by_inverse_layer_idx", False),
        scale_scores=get.flag("scale_attn_weights", True),
    )


GPT2 = Family(
    name="gpt2",
    numbers=_gpt2_numbers,
    prefix="transformer.",
    projections={
        "Q": Projection("h.{layer}.attn.c_attn", stored_in_out=True, part=Part(0, "flat")),
        "K": Projection("h.{layer}.attn.c_attn", stored_in_out=True, part=Part(1, "flat")),
        "V": Projection("h.{layer}.attn.c_attn", stored_in_out=True, part=Part(2, "flat")),
        "O": Projection("h.{layer}.attn.c_proj", stored_in_out=True),
    },
    mlp={
        "in": Projection("h.{layer}.mlp.c_fc", stored_in_out=True),
        "out": Projection("h.{layer}.mlp.c_proj", stored_in_out=True),
    },
    activation=("activation_function", "gelu_new"),
    embed="wte",
    unembed="lm_head",
    positions="wpe",
    attention_norm="h.{layer}.ln_1",
    mlp_norm="h.{layer}.ln_2",
    final_norm="ln_f",
    block="h.{layer}",
    attention="h.{layer}.attn",
    mlp_module="h.{layer}.mlp",
)


def _fused(name: str, layout: Literal["flat", "grouped"]) -> dict[Role, Projection]:
    """Q, K and V as parts of one projection, (out, in)."""
    return {role: Projection(name, part=Part(index, layout)) for index, role in enumerate(("Q", "K", "V"))}  # type: ignore[misc]


def _bigcode_numbers(get: Config) -> Architecture:
    a = _gpt2_numbers(get)
    return replace(a, n_kv_heads=1 if get.flag("multi_query", True) else a.n_heads, scale_by_layer=False)


# One key/value head for all (flat and grouped are the same then), or q, k, v of one head after another.
BIGCODE = replace(
    GPT2,
    name="gpt_bigcode",
    numbers=_bigcode_numbers,
    projections=_fused("h.{layer}.attn.c_attn", "grouped") | {"O": Projection("h.{layer}.attn.c_proj")},
    mlp={"in": Projection("h.{layer}.mlp.c_fc"), "out": Projection("h.{layer}.mlp.c_proj")},
    activation=("activation_function", "gelu_pytorch_tanh"),
)


def _gptj_numbers(get: Config) -> Architecture:
    a = replace(
        _gpt2_numbers(get),
        positions="rotary",
        tied=get.flag("tie_word_embeddings", False),
        biases=_PLAIN_MLP,
        unembed_bias=True,
        parallel=True,
        scale_by_layer=False,
        scale_scores=True,
    )
    dim = get.count("rotary_dim", 64)
    if dim > a.d_head or dim % 2:
        raise get.refusal("rotary_dim", f"is {dim}: an even number up to a head's width, {a.d_head}, is needed")
    return replace(a, rotary=(Rotary(dim, True, 10000.0),) * a.n_layers)


GPTJ = replace(
    GPT2,
    name="gptj",
    numbers=_gptj_numbers,
    projections={
        "Q": Projection("h.{layer}.attn.q_proj"),
        "K": Projection("h.{layer}.attn.k_proj"),
        "V": Projection("h.{layer}.attn.v_proj"),
        "O": Projection("h.{layer}.attn.out_proj"),
    },
    mlp={"in": Projection("h.{layer}.mlp.fc_in"), "out": Projection("h.{layer}.mlp.fc_out")},
    positions=None,
    mlp_norm="h.{layer}.ln_1",
)

# -- Llama and what has its layout ------------------------------------------------------------------------------------

_LLAMA_EPS = ("rms_norm_eps", 1e-6)


def _llama_numbers(get: Config) -> Architecture:
    biases = _if(get.flag("attention_bias", False), _ATTENTION) + _if(get.flag("mlp_bias", False), _GATED_MLP)
    return _with_rotary(_numbers(get, "RMSNorm", _LLAMA_EPS, biases=biases), get.rope(10000.0))


LLAMA = Family(
    name="llama",
    numbers=_llama_numbers,
    prefix="model.",
    projections={
        "Q": Projection("layers.{layer}.self_attn.q_proj"),
        "K": Projection("layers.{layer}.self_attn.k_proj"),
        "V": Projection("layers.{layer}.self_attn.v_proj"),
        "O": Projection("layers.{layer}.self_attn.o_proj"),
    },
    mlp={
        "gate": Projection("layers.{layer}.mlp.gate_proj"),
        "in": Projection("layers.{layer}.mlp.up_proj"),
        "out": Projection("layers.{layer}.mlp.down_proj"),
    },
    activation=("hidden_act", "silu"),
    embed="embed_tokens",
    unembed="lm_head",
    positions=None,
    attention_norm="layers.{layer}.input_layernorm",
    mlp_norm="layers.{layer}.post_attention_layernorm",
    final_norm="norm",
    block="layers.{layer}",
    attention="layers.{layer}.self_attn",
    mlp_module="layers.{layer}.mlp",
)


def _smollm3_numbers(get: Config) -> Architecture:
    """Every fourth layer has no positions (NoPE)."""
    biases = _if(get.flag("attention_bias", False), _ATTENTION) + _if(get.flag("mlp_bias", False), _GATED_MLP)
    a = _numbers(get, "RMSNorm", _LLAMA_EPS, kv_default=4, n_ctx=32768, tied=True, biases=biases)
    rotary = _rotary(a, get.rope(2e6))
    every = get.count("no_rope_layer_interval", 4)
    rotates = get.per_layer("no_rope_layers", a.n_layers)
    if rotates is None:
        rotates = [(layer + 1) % every != 0 for layer in range(a.n_layers)]
    window = get.optional_count("sliding_window") if get.flag("use_sliding_window", False) else None
    return replace(
        a,
        rotary=tuple(rotary if rotate else None for rotate in rotates),
        windows=_windows(a, get, window, [not rotate for rotate in rotates]),
    )


SMOLLM3 = replace(LLAMA, name="smollm3", numbers=_smollm3_numbers)


def _olmo_numbers(get: Config) -> Architecture:
    """Norms without parameters."""
    a = _numbers(
        get,
        "LayerNorm",
        ("no key: OLMo's is fixed", 1e-5),
        norm_gain="none",
        biases=_if(get.flag("attention_bias", False), _ATTENTION),
        qkv_clip=get.optional_number("clip_qkv"),
    )
    return _with_rotary(a, get.rope(10000.0))


OLMO = replace(LLAMA, name="olmo", numbers=_olmo_numbers)


def _olmo2_numbers(get: Config) -> Architecture:
    a = _numbers(
        get,
        "RMSNorm",
        ("rms_norm_eps", 1e-5),
        biases=_if(get.flag("attention_bias", False), _ATTENTION),
        qk_norm="projection",
    )
    return _with_rotary(a, get.rope(10000.0))


# The stream is read as it is; norms stand after attention and MLP.
OLMO2 = replace(
    LLAMA,
    name="olmo2",
    numbers=_olmo2_numbers,
    attention_norm=None,
    mlp_norm=None,
    attention_post_norm="layers.{layer}.post_attention_layernorm",
    mlp_post_norm="layers.{layer}.post_feedforward_layernorm",
    q_norm="layers.{layer}.self_attn.q_norm",
    k_norm="layers.{layer}.self_attn.k_norm",
)


def _mistral_numbers(get: Config) -> Architecture:
    a = _with_rotary(_numbers(get, "RMSNorm", _LLAMA_EPS, kv_default=8, n_ctx=4096 * 32), get.rope(10000.0))
    return replace(a, windows=(get.optional_count("sliding_window", 4096),) * a.n_layers)


MISTRAL = replace(LLAMA, name="mistral", numbers=_mistral_numbers)


def _mixtral_numbers(get: Config) -> Architecture:
    a = _numbers(get, "RMSNorm", ("rms_norm_eps", 1e-5), kv_default=8, n_ctx=4096 * 32)
    return replace(_with_rotary(a, get.rope(1e6)), windows=(get.optional_count("sliding_window"),) * a.n_layers)


def _mixtral_experts(a: Architecture, get: Config) -> dict[str, tuple[int, ...]]:
    experts = get.count("num_local_experts", 8, largest=MOST_LAYERS)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(a.n_layers):
        block = f"layers.{layer}.block_sparse_moe"
        shapes[f"{block}.gate.weight"] = (experts, a.d_model)
        for expert in range(experts):
            for name, shape in (
                ("w1", (a.d_mlp, a.d_model)),
                ("w2", (a.d_model, a.d_mlp)),
                ("w3", (a.d_mlp, a.d_model)),
            ):
                shapes[f"{block}.experts.{expert}.{name}.weight"] = shape
    return shapes


def _merged_experts(a: Architecture, get: Config) -> dict[str, tuple[int, ...]]:
    """As transformers keeps them from version 5 on: a layer's experts in one tensor, gate and what is gated side by side."""
    experts = get.count("num_local_experts", 8, largest=MOST_LAYERS)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(a.n_layers):
        shapes[f"layers.{layer}.mlp.gate.weight"] = (experts, a.d_model)
        shapes[f"layers.{layer}.mlp.experts.gate_up_proj"] = (experts, 2 * a.d_mlp, a.d_model)
        shapes[f"layers.{layer}.mlp.experts.down_proj"] = (experts, a.d_model, a.d_mlp)
    return shapes


MIXTRAL = replace(
    LLAMA,
    name="mixtral",
    numbers=_mixtral_numbers,
    mlp={},
    no_mlp="its layers choose among experts for every token, so no single MLP stands for layer 0",
    more=_mixtral_experts,
    merged=_merged_experts,
)


def _qwen_windows(a: Architecture, get: Config) -> tuple[int | None, ...]:
    window = get.optional_count("sliding_window", 4096) if get.flag("use_sliding_window", False) else None
    first = int(get.number("max_window_layers", 28.0))
    return _windows(a, get, window, [layer >= first for layer in range(a.n_layers)])


def _qwen2_numbers(get: Config) -> Architecture:
    a = _with_rotary(_numbers(get, "RMSNorm", _LLAMA_EPS, kv_default=32, n_ctx=32768, biases=_QKV), get.rope(10000.0))
    return replace(a, windows=_qwen_windows(a, get))


QWEN2 = replace(LLAMA, name="qwen2", numbers=_qwen2_numbers)


def _qwen3_numbers(get: Config) -> Architecture:
    a = _numbers(
        get,
        "RMSNorm",
        _LLAMA_EPS,
        kv_default=32,
        d_head=128,
        n_ctx=32768,
        biases=_if(get.flag("attention_bias", False), _ATTENTION),
        qk_norm="head",
    )
    return replace(_with_rotary(a, get.rope(10000.0)), windows=_qwen_windows(a, get))


QWEN3 = replace(
    LLAMA,
    name="qwen3",
    numbers=_qwen3_numbers,
    q_norm="layers.{layer}.self_attn.q_norm",
    k_norm="layers.{layer}.self_attn.k_norm",
)


def _gemma_base(get: Config, **facts: Any) -> Architecture:
    """Gains are 1 + w, embeddings times sqrt(d_model), heads of 256 whatever d_model."""
    if get.raw("use_bidirectional_attention"):
        raise get.refusal("use_bidirectional_attention", "is true: its heads look both ways, as an encoder's")
    return _numbers(
        get,
        "RMSNorm",
        _LLAMA_EPS,
        d_head=256,
        tied=True,
        norm_gain="offset",
        embed_scale=get.count("hidden_size") ** 0.5,
        biases=_if(get.flag("attention_bias", False), _ATTENTION),
        **{"n_ctx": 8192} | facts,
    )


def _gemma_numbers(get: Config) -> Architecture:
    return _with_rotary(_gemma_base(get, kv_default=16), get.rope(10000.0))


GEMMA = replace(
    LLAMA,
    name="gemma",
    numbers=_gemma_numbers,
    activation=("hidden_act", "gelu_pytorch_tanh"),
    legacy_activations={"gelu": "gelu_pytorch_tanh"},
)


def _gemma2_numbers(get: Config) -> Architecture:
    a = _gemma_base(
        get,
        kv_default=4,
        score_multiplier=get.count("query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=get.optional_number("attn_logit_softcapping", 50.0),
        logit_softcap=get.optional_number("final_logit_softcapping", 30.0),
    )
    sliding = [layer % 2 == 0 for layer in range(a.n_layers)]
    windows = _windows(a, get, get.optional_count("sliding_window", 4096), sliding)
    return replace(_with_rotary(a, get.rope(10000.0)), windows=windows)


GEMMA2 = replace(
    LLAMA,
    name="gemma2",
    numbers=_gemma2_numbers,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    mlp_norm="layers.{layer}.pre_feedforward_layernorm",
    attention_post_norm="layers.{layer}.post_attention_layernorm",
    mlp_post_norm="layers.{layer}.post_feedforward_layernorm",
)


def _gemma3_numbers(get: Config) -> Architecture:
    """Local layers, with a base of their own, between global ones. (Its config has an attention softcap that its model ignores.)"""
    a = _gemma_base(
        get,
        kv_default=4,
        n_ctx=131072,
        score_multiplier=get.count("query_pre_attn_scalar", 256) ** -0.5,
        logit_softcap=get.optional_number("final_logit_softcapping"),
        qk_norm="head",
    )
    every = get.count("sliding_window_pattern", 6)
    sliding = [(layer + 1) % every != 0 for layer in range(a.n_layers)]
    windows = _windows(a, get, get.optional_count("sliding_window", 4096), sliding)
    local = get.rope(10000.0, layer_type="sliding_attention", theta_key="rope_local_base_freq", shared=False)
    whole = get.rope(1e6, layer_type="full_attention")
    kinds = get.per_layer("layer_types", a.n_layers)
    if kinds is not None:
        sliding = [kind == "sliding_attention" for kind in kinds]
    rotary = {
        True: replace(_rotary(a, local), settings="sliding_attention"),
        False: replace(_rotary(a, whole), settings="full_attention"),
    }
    return replace(a, windows=windows, rotary=tuple(rotary[slides] for slides in sliding))


GEMMA3 = replace(
    GEMMA2,
    name="gemma3_text",
    numbers=_gemma3_numbers,
    q_norm="layers.{layer}.self_attn.q_norm",
    k_norm="layers.{layer}.self_attn.k_norm",
)


def _phi3_numbers(get: Config) -> Architecture:
    a = _numbers(get, "RMSNorm", ("rms_norm_eps", 1e-5), n_ctx=4096)
    rope = get.rope(10000.0, default_factor=1.0)
    return replace(_with_rotary(a, rope), windows=(get.optional_count("sliding_window"),) * a.n_layers)


PHI3 = replace(
    LLAMA,
    name="phi3",
    numbers=_phi3_numbers,
    projections=_fused("layers.{layer}.self_attn.qkv_proj", "flat") | {"O": LLAMA.projections["O"]},
    mlp={
        "gate": Projection("layers.{layer}.mlp.gate_up_proj", part=Part(0, "halves")),
        "in": Projection("layers.{layer}.mlp.gate_up_proj", part=Part(1, "halves")),
        "out": Projection("layers.{layer}.mlp.down_proj"),
    },
)


def _phi_numbers(get: Config) -> Architecture:
    normed = get.flag("qk_layernorm", False)
    a = _numbers(
        get,
        "LayerNorm",
        ("layer_norm_eps", 1e-5),
        norm_bias=True,
        biases=_ATTENTION + _PLAIN_MLP,
        unembed_bias=True,
        parallel=True,
        qk_norm="head" if normed else None,
        qk_norm_bias=normed,
    )
    return _with_rotary(a, get.rope(10000.0, default_factor=0.5))


PHI = replace(
    LLAMA,
    name="phi",
    numbers=_phi_numbers,
    projections=LLAMA.projections | {"O": Projection("layers.{layer}.self_attn.dense")},  # type: ignore[operator]
    mlp={"in": Projection("layers.{layer}.mlp.fc1"), "out": Projection("layers.{layer}.mlp.fc2")},
    activation=("hidden_act", "gelu_new"),
    mlp_norm="layers.{layer}.input_layernorm",
    final_norm="final_layernorm",
    q_norm="layers.{layer}.self_attn.q_layernorm",
    k_norm="layers.{layer}.self_attn.k_layernorm",
)


def _stablelm_numbers(get: Config) -> Architecture:
    a = _numbers(
        get,
        "LayerNorm",
        ("layer_norm_eps", 1e-5),
        kv_default=32,
        square=True,
        n_ctx=4096,
        norm_bias=True,
        biases=_if(get.flag("use_qkv_bias", False), _QKV),
        parallel=get.flag("use_parallel_residual", False),
        qk_norm="own head" if get.flag("qk_layernorm", False) else None,
    )
    return _with_rotary(a, get.rope(10000.0, default_factor=0.25))


STABLELM = replace(
    LLAMA,
    name="stablelm",
    numbers=_stablelm_numbers,
    q_norm="layers.{layer}.self_attn.q_layernorm.norms.{head}",
    k_norm="layers.{layer}.self_attn.k_layernorm.norms.{head}",
    variant=lambda get: {"mlp_norm": LLAMA.attention_norm} if get.flag("use_parallel_residual", False) else {},
)


def _cohere_numbers(get: Config) -> Architecture:
    a = _numbers(
        get,
        "LayerNorm",
        ("layer_norm_eps", 1e-5),
        n_ctx=8192,
        tied=True,
        biases=_if(get.flag("attention_bias", False), _ATTENTION),
        parallel=True,
        qk_norm="own head" if get.flag("use_qk_norm", False) else None,
        logit_scale=get.number("logit_scale", 0.0625),
    )
    return _with_rotary(a, get.rope(500000.0), interleaved=True)


COHERE = replace(
    LLAMA,
    name="cohere",
    numbers=_cohere_numbers,
    mlp_norm="layers.{layer}.input_layernorm",
    q_norm="layers.{layer}.self_attn.q_norm",
    k_norm="layers.{layer}.self_attn.k_norm",
)


def _granite_numbers(get: Config) -> Architecture:
    divisor = get.number("logits_scaling", 1.0)
    if divisor == 0:
        raise get.refusal("logits_scaling", "is 0: logits are divided by it")
    return replace(
        _llama_numbers(get),
        score_multiplier=get.number("attention_multiplier", 1.0),
        embed_scale=get.number("embedding_multiplier", 1.0),
        residual_scale=get.number("residual_multiplier", 1.0),
        logit_scale=1 / divisor,
    )


GRANITE = replace(LLAMA, name="granite", numbers=_granite_numbers)


def _starcoder2_numbers(get: Config) -> Architecture:
    a = _numbers(
        get,
        "LayerNorm",
        ("norm_epsilon", 1e-5),
        kv_default=2,
        n_ctx=4096,
        tied=True,
        norm_bias=True,
        biases=_if(get.flag("use_bias", True), _ATTENTION + _PLAIN_MLP),
    )
    return replace(_with_rotary(a, get.rope(10000.0)), windows=(get.optional_count("sliding_window"),) * a.n_layers)


STARCODER2 = replace(
    LLAMA,
    name="starcoder2",
    numbers=_starcoder2_numbers,
    mlp={"in": Projection("layers.{layer}.mlp.c_fc"), "out": Projection("layers.{layer}.mlp.c_proj")},
    activation=("hidden_act", "gelu_pytorch_tanh"),
)

# -- NeoX, BLOOM, Falcon, OPT -----------------------------------------------------------------------------------------


def _neox_numbers(get: Config) -> Architecture:
    a = _numbers(
        get,
        "LayerNorm",
        ("layer_norm_eps", 1e-5),
        n_kv_heads=get.count("num_attention_heads"),
        square=True,
        norm_bias=True,
        biases=_if(get.flag("attention_bias", True), _ATTENTION) + _PLAIN_MLP,
        parallel=get.flag("use_parallel_residual", True),
    )
    rope = get.rope(10000.0, theta_key="rotary_emb_base", factor_key="rotary_pct", default_factor=0.25)
    return _with_rotary(a, rope)


NEOX = Family(
    name="gpt_neox",
    numbers=_neox_numbers,
    prefix="gpt_neox.",
    projections=_fused("layers.{layer}.attention.query_key_value", "grouped")
    | {"O": Projection("layers.{layer}.attention.dense")},
    mlp={
        "in": Projection("layers.{layer}.mlp.dense_h_to_4h"),
        "out": Projection("layers.{layer}.mlp.dense_4h_to_h"),
    },
    activation=("hidden_act", "gelu"),
    embed="embed_in",
    unembed="lm_head",
    positions=None,
    attention_norm="layers.{layer}.input_layernorm",
    mlp_norm="layers.{layer}.post_attention_layernorm",
    final_norm="final_layer_norm",
    block="layers.{layer}",
    attention="layers.{layer}.attention",
    mlp_module="layers.{layer}.mlp",
    aliases={"embed_out.weight": "lm_head.weight"},
)


def _bloom_numbers(get: Config) -> Architecture:
    if get.flag("apply_residual_connection_post_layernorm", False):
        key = "apply_residual_connection_post_layernorm"
        raise get.refusal(
            key, "is true: its stream is normalised between layers, so it is no sum of what components write"
        )
    keys = {
        "n_layers": get.first("n_layer", "num_hidden_layers"),
        "n_heads": get.first("n_head", "num_attention_heads"),
        "d_model": get.first("n_embed", "hidden_size"),
        "d_mlp": "no key: always 4 d_model",
        "n_ctx": "seq_length",
    }
    return _numbers(
        get,
        "LayerNorm",
        ("layer_norm_epsilon", 1e-5),
        keys=_KEYS | keys,
        n_kv_heads=get.count(keys["n_heads"]),
        square=True,
        d_mlp=4 * get.count(keys["d_model"]),
        tied=True,
        positions="alibi",
        norm_bias=True,
        biases=_ATTENTION + _PLAIN_MLP,
    )


# The output projection's module and the MLP's last one: what stands around them adds the stream to their output.
BLOOM = Family(
    name="bloom",
    numbers=_bloom_numbers,
    prefix="transformer.",
    projections=_fused("h.{layer}.self_attention.query_key_value", "grouped")
    | {"O": Projection("h.{layer}.self_attention.dense")},
    mlp={"in": Projection("h.{layer}.mlp.dense_h_to_4h"), "out": Projection("h.{layer}.mlp.dense_4h_to_h")},
    activation=("no key: always the same", "gelu_pytorch_tanh"),
    embed="word_embeddings",
    unembed="lm_head",
    positions=None,
    embed_norm="word_embeddings_layernorm",
    attention_norm="h.{layer}.input_layernorm",
    mlp_norm="h.{layer}.post_attention_layernorm",
    final_norm="ln_f",
    block="h.{layer}",
    attention="h.{layer}.self_attention",
    mlp_module="h.{layer}.mlp.dense_4h_to_h",
)


def _falcon_numbers(get: Config) -> Architecture:
    new, alibi = get.flag("new_decoder_architecture", False), get.flag("alibi", False)
    width_key = get.first("n_embed", "hidden_size")
    n_heads = get.count("num_attention_heads")
    a = _numbers(
        get,
        "LayerNorm",
        ("layer_norm_epsilon", 1e-5),
        keys=_KEYS | {"d_model": width_key, "d_mlp": "ffn_hidden_size"},
        n_kv_heads=get.count("num_kv_heads", n_heads) if new else 1 if get.flag("multi_query", True) else n_heads,
        square=True,
        d_mlp=4 * get.count(width_key),
        tied=True,
        norm_bias=True,
        biases=_if(get.flag("bias", False), _ATTENTION + _PLAIN_MLP),
        parallel=new or get.flag("parallel_attn", True),
    )
    if not alibi:
        return _with_rotary(a, get.rope(10000.0))
    reason = (
        "transformers adds Falcon's alibi twice when it keeps attention patterns, so its run would be another model's"
    )
    return replace(a, positions="alibi", cannot_run=reason)


def _falcon_norms(get: Config) -> dict[str, Any]:
    """One norm for both, one each, or the usual two in sequence."""
    if not get.flag("parallel_attn", True):
        if get.flag("new_decoder_architecture", False):
            raise get.refusal(
                "parallel_attn", "is false although new_decoder_architecture is true: transformers cannot run that"
            )
        return {"mlp_norm": "h.{layer}.post_attention_layernorm"}
    if get.flag("new_decoder_architecture", False) and get.count("num_ln_in_parallel_attn", 2) == 2:
        return {"attention_norm": "h.{layer}.ln_attn", "mlp_norm": "h.{layer}.ln_mlp"}
    return {}


FALCON = replace(
    BLOOM,
    name="falcon",
    numbers=_falcon_numbers,
    activation=("activation", "gelu"),
    embed_norm=None,
    mlp_norm="h.{layer}.input_layernorm",
    mlp_module="h.{layer}.mlp",
    variant=_falcon_norms,
)


def _opt_numbers(get: Config) -> Architecture:
    if not get.flag("do_layer_norm_before", True):
        problem = (
            "is false (OPT-350m): norms stand behind the additions, so the stream is no sum of what components write"
        )
        raise get.refusal("do_layer_norm_before", problem)
    width = get.count("hidden_size")
    if get.count("word_embed_proj_dim", width) != width:
        raise get.refusal(
            "word_embed_proj_dim", f"is not hidden_size ({width}): a projection stands between embedding and stream"
        )
    if get.flag("_remove_final_layer_norm", False):
        raise get.refusal("_remove_final_layer_norm", "is true: logits would be read without a final norm")
    return _numbers(
        get,
        "LayerNorm",
        ("no key: OPT's is fixed", 1e-5),
        keys=_KEYS | {"d_mlp": "ffn_dim"},
        n_kv_heads=get.count("num_attention_heads"),
        square=True,
        tied=True,
        positions="learned",
        norm_gain="stored" if get.flag("layer_norm_elementwise_affine", True) else "none",
        norm_bias=True,
        biases=_if(get.flag("enable_bias", True), _ATTENTION + _PLAIN_MLP),
    )


OPT = replace(
    LLAMA,
    name="opt",
    numbers=_opt_numbers,
    prefix="model.decoder.",
    within="decoder.",
    projections=LLAMA.projections | {"O": Projection("layers.{layer}.self_attn.out_proj")},  # type: ignore[operator]
    mlp={"in": Projection("layers.{layer}.fc1"), "out": Projection("layers.{layer}.fc2")},
    activation=("activation_function", "relu"),
    positions="embed_positions",
    position_offset=2,
    attention_norm="layers.{layer}.self_attn_layer_norm",
    mlp_norm="layers.{layer}.final_layer_norm",
    final_norm="final_layer_norm",
    mlp_module="layers.{layer}.fc2",
)

# -- the table --------------------------------------------------------------------------------------------------------

_ROWS = (
    GPT2,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN3,
    GEMMA,
    GEMMA2,
    GEMMA3,
    SMOLLM3,
    OLMO,
    OLMO2,
    PHI,
    PHI3,
    NEOX,
    GPTJ,
    BIGCODE,
    OPT,
    BLOOM,
    FALCON,
    STABLELM,
    COHERE,
    GRANITE,
    STARCODER2,
)
FAMILIES: dict[str, Family] = {row.name: row for row in _ROWS}

# Which family's layout a model class has, for configs that name no model_type.
_CLASSES = {
    "GPT2LMHeadModel": "gpt2",
    "GPTBigCodeForCausalLM": "gpt_bigcode",
    "GPTJForCausalLM": "gptj",
    "GPTNeoXForCausalLM": "gpt_neox",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "SmolLM3ForCausalLM": "smollm3",
    "OlmoForCausalLM": "olmo",
    "Olmo2ForCausalLM": "olmo2",
    "PhiForCausalLM": "phi",
    "Phi3ForCausalLM": "phi3",
    "OPTForCausalLM": "opt",
    "BloomForCausalLM": "bloom",
    "FalconForCausalLM": "falcon",
    "StableLmForCausalLM": "stablelm",
    "CohereForCausalLM": "cohere",
    "GraniteForCausalLM": "granite",
    "Starcoder2ForCausalLM": "starcoder2",
}

# What is near but outside, and why: refused by name.
_REASONS: dict[str, tuple[str, ...]] = {
    "an encoder: its heads look both ways and there is no next-token logit to account for": (
        "bert",
        "roberta",
        "distilbert",
        "albert",
        "electra",
        "deberta",
        "deberta-v2",
        "xlm-roberta",
        "mpnet",
        "modernbert",
        "big_bird",
        "camembert",
        "convbert",
        "data2vec-text",
        "ernie",
        "esm",
        "eurobert",
        "flaubert",
        "gte",
        "ibert",
        "jina_embeddings_v3",
        "layoutlm",
        "longformer",
        "luke",
        "megatron-bert",
        "mobilebert",
        "nomic_bert",
        "nystromformer",
        "rembert",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "squeezebert",
        "xlm",
        "xlm-roberta-xl",
        "xmod",
    ),
    "an encoder-decoder: its heads do not share one causal residual stream": (
        "t5",
        "bart",
        "mt5",
        "mbart",
        "pegasus",
        "marian",
        "whisper",
        "t5gemma",
        "t5gemma2",
        "bigbird_pegasus",
        "blenderbot",
        "blenderbot-small",
        "encoder-decoder",
        "fsmt",
        "led",
        "longt5",
        "m2m_100",
        "mvp",
        "nllb-moe",
        "pegasus_x",
        "plbart",
        "prophetnet",
        "switch_transformers",
        "umt5",
    ),
    "no attention model: it has no heads to split": ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"),
    "a hybrid: some of its layers mix tokens by a recurrence, a convolution or linear attention, which have no attention pattern": (
        "jamba",
        "bamba",
        "zamba",
        "zamba2",
        "nemotron_h",
        "falcon_h1",
        "granitemoehybrid",
        "recurrent_gemma",
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_text",
        "minimax",
        "lfm2",
        "olmo_hybrid",
        "kimi_linear",
        "lfm2_moe",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "bailing_hybrid",
    ),
    "built on multi-head latent attention: its values pass through a shared compression, so W_V W_O per head is not defined": (
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "glm_moe_dsa",
        "mistral4",
        "youtu",
        "kimi_k2",
        "longcat_flash",
        "minicpm3",
        "glm4_moe_lite",
    ),
    "built so that its stream is several and layers share keys and values, so there is no one sum of head writes": (
        "gemma3n",
        "gemma3n_text",
    ),
    "built with attention sinks: a learned score takes part of every softmax, so its patterns do not sum to one": (
        "gpt_oss",
        "mimo_v2_flash",
    ),
    "a model of images or sound and text: save its language model alone and open that": (
        "llava",
        "llava_next",
        "mllama",
        "paligemma",
        "idefics2",
        "idefics3",
        "smolvlm",
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_vl",
        "llama4",
        "pixtral",
        "qwen2_audio",
        "phi4_multimodal",
    ),
}
# Models of images and text whose language model is a row of the table, which is what is read of them; and the numbers that
# transformers takes where the config of that part is silent.
_LANGUAGE_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        dict(
            hidden_size=2304,
            num_hidden_layers=26,
            num_attention_heads=8,
            intermediate_size=9216,
            vocab_size=262208,
            bos_token_id=2,
            eos_token_id=1,
        ),
    ),
    "mistral3": ("mistral", dict(bos_token_id=1, eos_token_id=2)),
}
_OUTSIDE = {name: reason for reason, names in _REASONS.items() for name in names}


def language_part(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A config; of a model of images and text that is split here (Gemma 3 of 4B and more, Mistral 3) its language model's.

    Raises:
        CircuitsError: that part is not there, or of another family.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _LANGUAGE_PARTS:
        return dict(config)
    family, defaults = _LANGUAGE_PARTS[kind]
    text = config.get("text_config")
    if not isinstance(text, Mapping) or text.get("model_type", family) != family:
        raise CircuitsError(f"{where} is a {kind!r} model whose text_config is none of a {family!r} model: correct it")
    whole = {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if config.get(key) is not None}
    return defaults | dict(text) | whole | {"model_type": family}


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The table's row for a config.

    Raises:
        CircuitsError: the architecture is not in the table; the message says why, or which ones are.
    """
    model_type = model_type_of(config, where)
    if model_type in FAMILIES:
        return FAMILIES[model_type].of(config)
    known = ", ".join(FAMILIES)
    if model_type in _OUTSIDE:
        raise CircuitsError(f"{where} is a {model_type!r} model, {_OUTSIDE[model_type]}. Supported: {known}")
    raise CircuitsError(
        f"{where} is a {model_type!r} model, whose tensor layout is not in the table. Supported: {known}"
    )


def model_type_of(config: Mapping[str, Any], where: str) -> str:
    """The model type that a config names, or that the class in its ``architectures`` has.

    Raises:
        CircuitsError: it names neither.
    """
    model_type, architectures = config.get("model_type"), config.get("architectures")
    if model_type is None and isinstance(architectures, list):
        model_type = next((_CLASSES[str(name)] for name in architectures if str(name) in _CLASSES), None)
    if model_type is None:
        raise CircuitsError(f"{where} names no model_type: add one of {', '.join(FAMILIES)} to its config.json")
    if not isinstance(model_type, str):
        shown = reprlib.repr(model_type)
        raise CircuitsError(f"{where} cannot be used: model_type in its config.json is {shown}, not a name")
    return model_type

"""A table: how each architecture names and lays out its tensors. Adding a family is adding a row.

A layout says how to get from a stored tensor to the canonical (in, out) matrix whose columns (for Q, K, V) or rows (for O)
are in head-major order. What a head is, is decided in :mod:`ov_circuits.model` and nowhere else.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from ov_circuits.checkpoint.stores import RenamedStore, TensorStore
from ov_circuits.errors import CircuitsError

Role = Literal["Q", "K", "V", "O"]
MLPRole = Literal["gate", "in", "out"]


@dataclass(frozen=True)
class Architecture:
    """The numbers of a checkpoint's config, under one set of names."""

    family: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_model: int
    d_head: int
    d_mlp: int
    n_vocab: int
    n_ctx: int
    norm: Literal["LayerNorm", "RMSNorm"]
    norm_eps: float
    positions: Literal["learned", "rotary"]
    tied: bool
    rope_theta: float | None = None
    scale_by_layer: bool = False
    scale_scores: bool = True
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.n_heads // self.n_kv_heads

    def score_scale(self, layer: int) -> float:
        """What a layer's raw query-key products are multiplied by before the softmax."""
        scale = self.d_head**-0.5 if self.scale_scores else 1.0
        return scale / (layer + 1) if self.scale_by_layer else scale


@dataclass(frozen=True)
class Projection:
    """One of Q, K, V, O in the file.

    Attributes:
        name: the module's name with ``{layer}``; ``.weight`` and ``.bias`` hang below it.
        stored_in_out: the weight is (in, out) as in GPT-2's Conv1D; otherwise (out, in) as in torch's Linear.
        part: in a fused projection, which of the equal parts along the outputs; None when the tensor is its own.
    """

    name: str
    stored_in_out: bool = False
    part: int | None = None

    def weight(self, store: TensorStore, layer: int) -> Tensor:
        """The (in, out) matrix, head-major along its heads."""
        stored = store.read(f"{self.name.format(layer=layer)}.weight")
        matrix = stored if self.stored_in_out else stored.mT
        return matrix if self.part is None else matrix.chunk(3, dim=1)[self.part]

    def bias(self, store: TensorStore, layer: int) -> Tensor | None:
        """The bias along the outputs; None when the file has none."""
        name = f"{self.name.format(layer=layer)}.bias"
        if name not in store:
            return None
        bias = store.read(name)
        return bias if self.part is None else bias.chunk(3)[self.part]


@dataclass(frozen=True)
class Family:
    """A row of the table.

    Attributes:
        name: what pages call it.
        architecture: config -> :class:`Architecture`.
        prefix: what some files put before every name but the unembedding's.
        projections: Q, K, V, O.
        mlp: the MLP's matrices; without ``gate`` it is ``out(f(in x))``, with it ``out(f(gate x) * in x)``.
        activation: the config's key for f, and what it is where the config does not say.
        embed, unembed, positions: embedding tensors' names; ``positions`` is None without learned positions.
        norms: names of the attention's and the MLP's reading norm (with ``{layer}``), and of the final one.
        block, attention, mlp_module: where a running transformers model keeps a layer, its attention (whose second output
            is the pattern) and its MLP (whose output is what it adds), by module name. The output projection's module is
            the one that ``projections["O"]`` names.
        shapes: all tensors of the model with the shapes that the config implies, by group.
        attention_post_norm, mlp_post_norm: norms that the attention's and the MLP's output pass before they are added to
            the stream (Gemma 2, OLMo 2); None where there are none.
    """

    name: str
    architecture: Callable[[Mapping[str, Any]], Architecture]
    prefix: str
    projections: Mapping[Role, Projection]
    mlp: Mapping[MLPRole, Projection]
    activation: tuple[str, str]
    embed: str
    unembed: str
    positions: str | None
    attention_norm: str
    mlp_norm: str
    final_norm: str
    block: str
    attention: str
    mlp_module: str
    shapes: Callable[[Architecture, Mapping[str, Any]], Shapes]
    attention_post_norm: str | None = None
    mlp_post_norm: str | None = None


@dataclass(frozen=True)
class Shapes:
    """Expected shapes by group: attention must be there, embeddings and MLPs may be absent as a whole."""

    attention: dict[str, tuple[int, ...]]
    embeddings: dict[str, tuple[int, ...]]
    mlps: dict[str, tuple[int, ...]]


# -- GPT-2 ------------------------------------------------------------------------------------------------------------


def _gpt2_architecture(config: Mapping[str, Any]) -> Architecture:
    get = _Config(config, "gpt2")
    d_model, n_heads = get.count("n_embd"), get.count("n_head")
    if d_model % n_heads:
        raise CircuitsError(f"the config says n_embd = {d_model} and n_head = {n_heads}: heads do not divide the width")
    return Architecture(
        family="gpt2",
        n_layers=get.count("n_layer", largest=_MOST_LAYERS),
        n_heads=n_heads,
        n_kv_heads=n_heads,
        d_model=d_model,
        d_head=d_model // n_heads,
        d_mlp=get.count("n_inner", 4 * d_model),
        n_vocab=get.count("vocab_size"),
        n_ctx=get.count("n_positions", config.get("n_ctx")),
        norm="LayerNorm",
        norm_eps=get.number("layer_norm_epsilon", 1e-5),
        positions="learned",
        tied=get.flag("tie_word_embeddings", True),
        scale_by_layer=get.flag("scale_attn_by_inverse_layer_idx", False),
        scale_scores=get.flag("scale_attn_weights", True),
    )


def _gpt2_shapes(a: Architecture, config: Mapping[str, Any]) -> Shapes:
    attention: dict[str, tuple[int, ...]] = {}
    mlps: dict[str, tuple[int, ...]] = {}
    for i in range(a.n_layers):
        attention |= {
            f"h.{i}.ln_1.weight": (a.d_model,),
            f"h.{i}.ln_1.bias": (a.d_model,),
            f"h.{i}.attn.c_attn.weight": (a.d_model, 3 * a.d_model),
            f"h.{i}.attn.c_attn.bias": (3 * a.d_model,),
            f"h.{i}.attn.c_proj.weight": (a.d_model, a.d_model),
            f"h.{i}.attn.c_proj.bias": (a.d_model,),
        }
        mlps |= {
            f"h.{i}.ln_2.weight": (a.d_model,),
            f"h.{i}.ln_2.bias": (a.d_model,),
            f"h.{i}.mlp.c_fc.weight": (a.d_model, a.d_mlp),
            f"h.{i}.mlp.c_fc.bias": (a.d_mlp,),
            f"h.{i}.mlp.c_proj.weight": (a.d_mlp, a.d_model),
            f"h.{i}.mlp.c_proj.bias": (a.d_model,),
        }
    embeddings: dict[str, tuple[int, ...]] = {
        "wte.weight": (a.n_vocab, a.d_model),
        "wpe.weight": (a.n_ctx, a.d_model),
        "ln_f.weight": (a.d_model,),
        "ln_f.bias": (a.d_model,),
    }
    if not a.tied:
        embeddings["lm_head.weight"] = (a.n_vocab, a.d_model)
    return Shapes(attention, embeddings, mlps)


GPT2 = Family(
    name="gpt2",
    architecture=_gpt2_architecture,
    prefix="transformer.",
    projections={
        "Q": Projection("h.{layer}.attn.c_attn", stored_in_out=True, part=0),
        "K": Projection("h.{layer}.attn.c_attn", stored_in_out=True, part=1),
        "V": Projection("h.{layer}.attn.c_attn", stored_in_out=True, part=2),
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
    shapes=_gpt2_shapes,
)

# -- Llama and what has its layout ------------------------------------------------------------------------------------


def _llama_architecture(config: Mapping[str, Any]) -> Architecture:
    get = _Config(config, "llama")
    d_model, n_heads = get.count("hidden_size"), get.count("num_attention_heads")
    n_kv_heads = get.count("num_key_value_heads", n_heads)
    if n_heads % n_kv_heads:
        raise CircuitsError(
            f"the config says {n_heads} query heads on {n_kv_heads} key/value heads: groups would not be equal"
        )
    if config.get("head_dim") is None and d_model % n_heads:
        raise CircuitsError(
            f"the config says hidden_size = {d_model} and num_attention_heads = {n_heads}, which do not divide, "
            "and gives no head_dim"
        )
    return Architecture(
        family="llama",
        n_layers=get.count("num_hidden_layers", largest=_MOST_LAYERS),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_model=d_model,
        d_head=get.count("head_dim", d_model // n_heads),
        d_mlp=get.count("intermediate_size"),
        n_vocab=get.count("vocab_size"),
        n_ctx=get.count("max_position_embeddings", 2048),
        norm="RMSNorm",
        norm_eps=get.number("rms_norm_eps", 1e-6),
        positions="rotary",
        tied=get.flag("tie_word_embeddings", False),
        rope_theta=get.rope_theta(10000.0),
    )


def _llama_shapes(a: Architecture, config: Mapping[str, Any]) -> Shapes:
    get = _Config(config, "llama")
    attention_bias, mlp_bias = get.flag("attention_bias", False), get.flag("mlp_bias", False)
    query, kv = a.n_heads * a.d_head, a.n_kv_heads * a.d_head
    attention: dict[str, tuple[int, ...]] = {}
    mlps: dict[str, tuple[int, ...]] = {}
    for i in range(a.n_layers):
        attention |= {
            f"layers.{i}.input_layernorm.weight": (a.d_model,),
            f"layers.{i}.self_attn.q_proj.weight": (query, a.d_model),
            f"layers.{i}.self_attn.k_proj.weight": (kv, a.d_model),
            f"layers.{i}.self_attn.v_proj.weight": (kv, a.d_model),
            f"layers.{i}.self_attn.o_proj.weight": (a.d_model, query),
        }
        if attention_bias:
            attention |= {f"layers.{i}.self_attn.{p}_proj.bias": (n,) for p, n in (("q", query), ("k", kv), ("v", kv))}
            attention[f"layers.{i}.self_attn.o_proj.bias"] = (a.d_model,)
        mlps |= {
            f"layers.{i}.post_attention_layernorm.weight": (a.d_model,),
            f"layers.{i}.mlp.gate_proj.weight": (a.d_mlp, a.d_model),
            f"layers.{i}.mlp.up_proj.weight": (a.d_mlp, a.d_model),
            f"layers.{i}.mlp.down_proj.weight": (a.d_model, a.d_mlp),
        }
        if mlp_bias:
            mlps |= {
                f"layers.{i}.mlp.{p}_proj.bias": (n,)
                for p, n in (("gate", a.d_mlp), ("up", a.d_mlp), ("down", a.d_model))
            }
    embeddings: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (a.n_vocab, a.d_model),
        "norm.weight": (a.d_model,),
    }
    if not a.tied:
        embeddings["lm_head.weight"] = (a.n_vocab, a.d_model)
    return Shapes(attention, embeddings, mlps)


LLAMA = Family(
    name="llama",
    architecture=_llama_architecture,
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
    shapes=_llama_shapes,
)

FAMILIES: dict[str, Family] = {"gpt2": GPT2, "llama": LLAMA, "mistral": LLAMA}

# Which family's layout a model class has, for configs that name no model_type.
_CLASSES = {"GPT2LMHeadModel": "gpt2", "LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral"}

# What is near but outside, and why: refused by name.
_ENCODERS = (
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
)
_ENCODER_DECODERS = ("t5", "bart", "mt5", "mbart", "pegasus", "marian", "whisper")
_OUTSIDE: dict[str, str] = {
    **dict.fromkeys(_ENCODERS, "an encoder: its heads look both ways and there is no next-token logit to account for"),
    **dict.fromkeys(_ENCODER_DECODERS, "an encoder-decoder: its heads do not share one causal residual stream"),
    **dict.fromkeys(("mamba", "mamba2", "rwkv"), "no attention model: it has no heads to split"),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3"),
        "built on multi-head latent attention: its values pass through a shared compression, so W_V W_O per head is not defined",
    ),
}


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The table's row for a config.

    Raises:
        CircuitsError: the architecture is not in the table; the message says why, or which ones are.
    """
    model_type = model_type_of(config, where)
    known = ", ".join(FAMILIES)
    if model_type in FAMILIES:
        return FAMILIES[model_type]
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


def canonical_store(store: TensorStore, family: Family, wanted: Collection[str]) -> TensorStore:
    """The wanted tensors of a store, the family's optional prefix taken off their names.

    Whatever else lies in the file is hidden, as transformers ignores it: mask buffers, or biases that the config rules out.

    Raises:
        CircuitsError: a tensor is there under both of its names.
    """
    names: dict[str, str] = {}
    for name in store.names():
        short = name.removeprefix(family.prefix)
        if short not in wanted:
            continue
        if short in names:
            raise CircuitsError(
                f"{store.origin(name)} holds both {names[short]} and {name}, which are names of the same tensor: "
                "two checkpoints were merged into one; write it again from one of them"
            )
        names[short] = name
    return RenamedStore(store, names)


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds beyond attention weights."""

    embeddings: bool
    mlps: bool
    missing: tuple[str, ...]


def check_contents(
    store: TensorStore, family: Family, architecture: Architecture, config: Mapping[str, Any], where: str
) -> tuple[TensorStore, Contents]:
    """Compare the headers with the config: every attention tensor must be there, all that is there must have its shape.

    Returns:
        The tensors of this architecture under their canonical names, and what they amount to.

    Raises:
        CircuitsError: an attention tensor is missing, or a shape contradicts the config.
    """
    shapes = family.shapes(architecture, config)
    # Some files store an unembedding though the config ties it.
    unembedding = {f"{family.unembed}.weight": (architecture.n_vocab, architecture.d_model)}
    wanted = shapes.attention | shapes.embeddings | shapes.mlps | unembedding
    store = canonical_store(store, family, wanted)
    for name, expected in wanted.items():
        if name in store and store.shape(name) != expected:
            raise CircuitsError(
                f"tensor {name} in {store.origin(name)} has shape {list(store.shape(name))}, but the config of {where} "
                f"implies {list(expected)}: the config and the weights belong to different models"
            )
    absent = [name for name in shapes.attention if name not in store]
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise CircuitsError(
            f"{where} lacks the tensor {absent[0]}{more}, which a {family.name} attention layer needs: "
            "the checkpoint is incomplete, or config.json says more layers than there are"
        )
    lacking_embeddings = [name for name in shapes.embeddings if name not in store]
    lacking_mlps = [name for name in shapes.mlps if name not in store]
    contents = Contents(not lacking_embeddings, not lacking_mlps, tuple(lacking_embeddings + lacking_mlps))
    return store, contents


# Beyond these a number is a slip of the pen. Tensors are listed layer by layer, so layers are what fills the memory.
_LARGEST = 10**8
_MOST_LAYERS = 10**4


class _Config:
    """A config's values, with the sentence to say when one is missing or makes no sense."""

    def __init__(self, config: Mapping[str, Any], family: str) -> None:
        self._config, self._family = config, family

    def _refusal(self, key: str, problem: str) -> CircuitsError:
        return CircuitsError(f"the config of this {self._family} model cannot be used: {key} {problem}")

    def count(self, key: str, default: Any = None, *, largest: int = _LARGEST) -> int:
        """A positive whole number."""
        value = self._config.get(key)
        value = default if value is None else value
        if value is None:
            raise self._refusal(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._refusal(key, f"is {reprlib.repr(value)}, not a positive whole number")
        if value > largest:
            raise self._refusal(
                key, f"is {reprlib.repr(value)}, more than any model has (at most {largest:,} are taken)"
            )
        return value

    def number(self, key: str, default: float) -> float:
        """A finite number from 0 on."""
        value = self._config.get(key, default)
        # Compared before it is converted: JSON's whole numbers have no bound. NaN is not between anything.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= sys.float_info.max:
            raise self._refusal(key, f"is {reprlib.repr(value)}, not a finite number from 0 on")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false; ``"false"`` in quotes would count as true."""
        value = self._config.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self._refusal(key, f"is {reprlib.repr(value)}, not true or false")
        return value

    def rope_theta(self, default: float) -> float:
        """The rotary base, looked for where transformers does: its groups of rotary settings first, a key of its own last."""
        for group in ("rope_scaling", "rope_parameters"):
            settings = self._config.get(group)
            if settings is not None and not isinstance(settings, Mapping):
                raise self._refusal(group, f"is {reprlib.repr(settings)}, not an object")
        settings = self._config.get("rope_scaling") or self._config.get("rope_parameters") or {}
        for values in (settings, self._config):
            if values.get("rope_theta") is not None:
                theta = _Config(values, self._family).number("rope_theta", default)
                if theta == 0:
                    raise self._refusal("rope_theta", "is 0: rotary positions need a base above 0")
                return theta
        return default

"""What a row of the family table is made of: a config's numbers under one set of names, and where each tensor lies.

A layout says how to get from a stored tensor to the canonical (in, out) matrix whose columns (for Q, K, V) or rows (for O)
are in head-major order. What a head is, is decided in :mod:`ov_circuits.source` and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from ov_circuits.checkpoint.config import Config
from ov_circuits.checkpoint.stores import TensorStore

Role = Literal["Q", "K", "V", "O"]
MLPRole = Literal["gate", "in", "out"]
QKNormOver = Literal["head", "own head", "projection"]


@dataclass(frozen=True)
class Rotary:
    """How one layer turns queries and keys (Su et al. 2021).

    Attributes:
        dim: how many of a head's coordinates are turned, from the first on; the others pass as they are.
        interleaved: pairs are neighbours (GPT-J, Cohere); otherwise the two halves of the turned coordinates.
        theta: base of the frequencies.
        kind: ``default``, or the name under which transformers rescales the frequencies (``linear``, ``llama3``, ``yarn``, ..).
        settings: the name of this layer's group in the config's ``rope_parameters``, where it has several (Gemma 3).
    """

    dim: int
    interleaved: bool
    theta: float
    kind: str = "default"
    settings: str | None = None


@dataclass(frozen=True)
class Architecture:
    """The numbers of a checkpoint's config, under one set of names.

    Attributes:
        norm, norm_eps: kind of all norms.
        norm_gain: ``stored`` as it counts, ``offset`` (the gain is 1 + w, Gemma), ``none``: no parameters (OLMo).
        norm_bias: whether norms have one.
        positions: ``learned`` vectors in the stream, ``rotary``, ``alibi`` (a slope a head), or ``none``.
        rotary: each layer's; None where a layer has none (NoPE). Empty without rotary positions.
        windows: how many of the latest positions a layer's queries see, themselves included; None for all. Empty: all, everywhere.
        biases: which matrices have one.
        unembed_bias: whether the unembedding has one.
        scale_by_layer, scale_scores, score_multiplier: see :meth:`score_scale`.
        attention_softcap: scores become ``cap * tanh(scores / cap)`` (Gemma 2).
        qk_norm: queries and keys pass a norm of the same kind before they meet: over a head's coordinates with one gain for all
            heads (``head``) or one each (``own head``), or over all heads' at once (``projection``, OLMo 2).
        qk_norm_bias: whether that norm has a bias.
        qkv_clip: queries, keys and values are clamped to plus or minus this (some OLMo).
        parallel: attention and MLP read the same stream (GPT-J, NeoX, Phi, ..); otherwise the MLP comes after.
        embed_scale: what token embeddings are multiplied by before they enter the stream.
        residual_scale: what attention and MLP outputs are multiplied by before they are added (Granite).
        logit_scale: what the unembedded stream is multiplied by.
        logit_softcap: logits become ``cap * tanh(logits / cap)`` (Gemma 2).
        cannot_run: why no prompt can be run whatever the file, as the end of a sentence.
    """

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
    positions: Literal["learned", "rotary", "alibi", "none"]
    tied: bool
    norm_gain: Literal["stored", "offset", "none"] = "stored"
    norm_bias: bool = False
    rotary: tuple[Rotary | None, ...] = ()
    windows: tuple[int | None, ...] = ()
    biases: tuple[str, ...] = ()
    unembed_bias: bool = False
    scale_by_layer: bool = False
    scale_scores: bool = True
    score_multiplier: float | None = None
    attention_softcap: float | None = None
    qk_norm: QKNormOver | None = None
    qk_norm_bias: bool = False
    qkv_clip: float | None = None
    parallel: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    cannot_run: str | None = None

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.n_heads // self.n_kv_heads

    @property
    def rope_theta(self) -> float | None:
        """The rotary base of the last layer that has one (in Gemma 3 a global one); None without rotary positions."""
        return next((rotary.theta for rotary in reversed(self.rotary) if rotary is not None), None)

    def score_scale(self, layer: int) -> float:
        """What a layer's raw query-key products are multiplied by before the softmax."""
        scale = self.score_multiplier
        if scale is None:
            scale = self.d_head**-0.5 if self.scale_scores else 1.0
        return scale / (layer + 1) if self.scale_by_layer else scale

    def rotary_of(self, layer: int) -> Rotary | None:
        """A layer's rotary positions, if it has them."""
        return self.rotary[layer] if self.rotary else None

    def window_of(self, layer: int) -> int | None:
        """How many of the latest positions a layer's queries see; None for all."""
        return self.windows[layer] if self.windows else None


@dataclass(frozen=True)
class Part:
    """One projection's place in a fused one: its outputs are blocks of slots, each slot one head wide.

    Attributes:
        index: which kind of slot.
        layout: ``flat``: all query heads, then all key heads, then all value heads. ``grouped``: a block for each key/value
            head, made of the query heads that share it, its keys, its values (with as many key/value heads as query heads:
            q, k, v of one head after another). ``halves``: an MLP's gate and input, one after the other.
    """

    index: int
    layout: Literal["flat", "grouped", "halves"]

    def _slots(self, a: Architecture) -> tuple[int, tuple[int, ...], int]:
        """Number of blocks, slots of each kind in a block, a slot's width."""
        if self.layout == "halves":
            return 1, (1, 1), a.d_mlp
        blocks = a.n_kv_heads if self.layout == "grouped" else 1
        return blocks, (a.n_heads // blocks, a.n_kv_heads // blocks, a.n_kv_heads // blocks), a.d_head

    def take(self, fused: Tensor, a: Architecture) -> Tensor:
        """[..., outputs of the fused projection] -> [..., outputs of this one]."""
        blocks, kinds, width = self._slots(a)
        slots = fused.unflatten(-1, (blocks, sum(kinds), width))
        return slots.split(kinds, dim=-2)[self.index].flatten(-3)

    def width(self, a: Architecture) -> int:
        """Outputs of the fused projection."""
        blocks, kinds, width = self._slots(a)
        return blocks * sum(kinds) * width


@dataclass(frozen=True)
class Projection:
    """A matrix in the file: one of Q, K, V, O, or of an MLP.

    Attributes:
        name: the module's name with ``{layer}``; ``.weight`` and ``.bias`` hang below it.
        stored_in_out: the weight is (in, out) as in GPT-2's Conv1D; otherwise (out, in) as in torch's Linear.
        part: its place when it is fused with others; None when the tensor is its own.
    """

    name: str
    stored_in_out: bool = False
    part: Part | None = None

    def weight(self, store: TensorStore, layer: int, a: Architecture) -> Tensor:
        """The (in, out) matrix, head-major along its heads."""
        stored = store.read(f"{self.name.format(layer=layer)}.weight")
        matrix = stored if self.stored_in_out else stored.mT
        return matrix if self.part is None else self.part.take(matrix, a)

    def part_of_weight(
        self,
        store: TensorStore,
        layer: int,
        a: Architecture,
        inputs: slice = slice(None),
        outputs: slice = slice(None),
    ) -> Tensor:
        """Some rows and columns of :meth:`weight`. Where the projection is a tensor of its own, only they are read."""
        if self.part is not None:
            return self.weight(store, layer, a)[inputs, outputs]
        matrix = store.read(
            f"{self.name.format(layer=layer)}.weight", (inputs, outputs) if self.stored_in_out else (outputs, inputs)
        )
        return matrix if self.stored_in_out else matrix.mT

    def bias(self, store: TensorStore, layer: int, a: Architecture) -> Tensor | None:
        """The bias along the outputs; None when the file has none."""
        name = f"{self.name.format(layer=layer)}.bias"
        if name not in store:
            return None
        bias = store.read(name)
        return bias if self.part is None else self.part.take(bias, a)

    def shape(self, n_in: int, n_out: int) -> tuple[int, int]:
        """The stored weight's."""
        return (n_in, n_out) if self.stored_in_out else (n_out, n_in)


@dataclass(frozen=True)
class Shapes:
    """Expected shapes by group: attention must be there, embeddings and MLPs may be absent as a whole."""

    attention: dict[str, tuple[int, ...]]
    embeddings: dict[str, tuple[int, ...]]
    mlps: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Family:
    """A row of the table. Names of tensors and modules are without ``prefix``; ``{layer}`` stands for a layer's number.

    Attributes:
        name: what pages call it.
        numbers: config -> :class:`Architecture`.
        prefix: what some files put before every name but the unembedding's.
        within: what a running base model puts before every module's name.
        projections: Q, K, V, O.
        mlp: the MLP's matrices; without ``gate`` it is ``out(f(in x))``, with it ``out(f(gate x) * in x)``. Empty where a
            layer has no single MLP: ``no_mlp`` says why.
        activation: the config's key for f, and what it is where the config does not say.
        legacy_activations: names of f that mean another one in this family.
        embed, unembed, positions: embedding tensors' names; ``positions`` is None without learned positions.
        position_offset: rows of the position embedding before position 0's (OPT).
        embed_norm: a norm that token embeddings pass before they enter the stream (BLOOM).
        attention_norm, mlp_norm: the reading norms; None where the stream is read as it is (OLMo 2).
        attention_post_norm, mlp_post_norm: norms that the attention's and the MLP's output pass before they are added to
            the stream (Gemma 2, OLMo 2); None where there are none.
        q_norm, k_norm: norms of queries and keys; with ``{head}`` where each head's is a tensor of its own.
        block, attention, mlp_module: where a running transformers model keeps a layer, its attention (whose second output
            is the pattern) and what gives the MLP's output before it is added to anything, by module name. The output
            projection's module is the one that ``projections["O"]`` names.
        aliases: older names of tensors -> the names used here.
        more: shapes of MLP tensors that are not in ``mlp`` (experts).
        merged: the same under the names of transformers' running model, which keeps them otherwise than the files.
        variant: config -> fields of this row that it changes.
    """

    name: str
    numbers: Callable[[Config], Architecture]
    prefix: str
    projections: Mapping[Role, Projection]
    mlp: Mapping[MLPRole, Projection]
    activation: tuple[str, str]
    embed: str
    unembed: str
    positions: str | None
    attention_norm: str | None
    mlp_norm: str | None
    final_norm: str
    block: str
    attention: str
    mlp_module: str
    within: str = ""
    legacy_activations: Mapping[str, str] = field(default_factory=dict)
    no_mlp: str | None = None
    position_offset: int = 0
    embed_norm: str | None = None
    attention_post_norm: str | None = None
    mlp_post_norm: str | None = None
    q_norm: str | None = None
    k_norm: str | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    more: Callable[[Architecture, Config], dict[str, tuple[int, ...]]] | None = None
    merged: Callable[[Architecture, Config], dict[str, tuple[int, ...]]] | None = None
    variant: Callable[[Config], Mapping[str, Any]] | None = None

    def of(self, config: Mapping[str, Any]) -> Family:
        """The row as this config wants it."""
        return self if self.variant is None else replace(self, **self.variant(Config(config, self.name)))

    def short_name(self, name: str) -> str:
        """A tensor's name in a file -> its name in this table."""
        short = name.removeprefix(self.prefix)
        return self.aliases.get(short, short)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """The config's numbers.

        Raises:
            CircuitsError: a number is missing or makes no sense, or the config asks for what is not supported.
        """
        return self.numbers(Config(config, self.name))

    def shapes(self, a: Architecture, config: Mapping[str, Any], held: Collection[str] = ()) -> Shapes:
        """All tensors of the model with the shapes that the config implies, by group.

        Where the names that are ``held`` have merged experts among them, those are the ones.
        """
        attention: dict[str, tuple[int, ...]] = {}
        mlps: dict[str, tuple[int, ...]] = {}
        for layer in range(a.n_layers):
            attention |= dict(self._attention_shapes(a, layer))
            mlps |= dict(self._mlp_shapes(a, layer))
        if self.more is not None:
            settings = Config(config, self.name)
            merged = {} if self.merged is None else self.merged(a, settings)
            mlps |= self.more(a, settings) if merged.keys().isdisjoint(held) else merged
        return Shapes(attention, dict(self._embedding_shapes(a)), mlps)

    def _attention_shapes(self, a: Architecture, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        query, kv = a.n_heads * a.d_head, a.n_kv_heads * a.d_head
        yield from _norm_shapes(self.attention_norm, a, layer)
        outputs: dict[Role, int] = {"Q": query, "K": kv, "V": kv}
        for role, n_out in outputs.items():
            yield from _projection_shapes(self.projections[role], a, layer, a.d_model, n_out, role in a.biases)
        yield from _projection_shapes(self.projections["O"], a, layer, query, a.d_model, "O" in a.biases)
        if a.qk_norm is not None:
            for name, heads in ((self.q_norm, a.n_heads), (self.k_norm, a.n_kv_heads)):
                assert name is not None
                for tensor, shape in qk_norm_shapes(name, a, layer, heads):
                    yield f"{tensor}.weight", shape
                    if a.qk_norm_bias:
                        yield f"{tensor}.bias", shape
        yield from _norm_shapes(self.attention_post_norm, a, layer)

    def _mlp_shapes(self, a: Architecture, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        if self.mlp_norm != self.attention_norm:
            yield from _norm_shapes(self.mlp_norm, a, layer)
        for role, projection in self.mlp.items():
            n_in, n_out = (a.d_mlp, a.d_model) if role == "out" else (a.d_model, a.d_mlp)
            yield from _projection_shapes(projection, a, layer, n_in, n_out, role in a.biases)
        yield from _norm_shapes(self.mlp_post_norm, a, layer)

    def _embedding_shapes(self, a: Architecture) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{self.embed}.weight", (a.n_vocab, a.d_model)
        if self.positions is not None:
            yield f"{self.positions}.weight", (a.n_ctx + self.position_offset, a.d_model)
        yield from _norm_shapes(self.embed_norm, a)
        yield from _norm_shapes(self.final_norm, a)
        if not a.tied:
            yield f"{self.unembed}.weight", (a.n_vocab, a.d_model)
        if a.unembed_bias:
            yield f"{self.unembed}.bias", (a.n_vocab,)


def qk_norm_shapes(name: str, a: Architecture, layer: int, heads: int) -> list[tuple[str, tuple[int, ...]]]:
    """The tensors (without ``.weight``) of a norm of queries or keys, and their shapes."""
    module = name.replace("{layer}", str(layer))
    if "{head}" in module:
        return [(module.format(head=head), (a.d_head,)) for head in range(heads)]
    shape = {"head": (a.d_head,), "own head": (heads, a.d_head), "projection": (heads * a.d_head,)}
    return [(module, shape[a.qk_norm or "head"])]


def _norm_shapes(name: str | None, a: Architecture, layer: int = 0) -> Iterator[tuple[str, tuple[int, ...]]]:
    if name is None or a.norm_gain == "none":
        return
    yield f"{name.format(layer=layer)}.weight", (a.d_model,)
    if a.norm_bias:
        yield f"{name.format(layer=layer)}.bias", (a.d_model,)


def _projection_shapes(
    projection: Projection, a: Architecture, layer: int, n_in: int, n_out: int, biased: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    name, n_out = projection.name.format(layer=layer), n_out if projection.part is None else projection.part.width(a)
    yield f"{name}.weight", projection.shape(n_in, n_out)
    if biased:
        yield f"{name}.bias", (n_out,)

"""Model, Layer, Head: the only place where a tensor becomes "a head".

Row convention, activations are rows: ``x @ W``. Concatenated heads times W_O is a sum of blocks,

    concat(z_1 .. z_n) W_O + b_O = sum_i z_i W_O[i] + b_O,

where W_O[i] is the i-th block of d_head *rows* of the (in, out) matrix. All heads are query heads; head h uses key/value head
``h // (n_heads // n_kv_heads)`` (consecutive query heads share one, as repeat_interleave lays them out).
"""

from __future__ import annotations

import hashlib
import operator
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float
from torch import Tensor

from ov_circuits.checkpoint.contents import Contents, check_contents
from ov_circuits.checkpoint.families import family_of
from ov_circuits.checkpoint.layout import Architecture, Family, Role
from ov_circuits.checkpoint.locate import Checkpoint
from ov_circuits.checkpoint.lora import Adapter, Update
from ov_circuits.checkpoint.norms import Norm, QKNorm
from ov_circuits.checkpoint.stores import MemoryStore, ReadOnce, TensorStore
from ov_circuits.checkpoint.tokenizer import MissingTokenizer, Tokenizer
from ov_circuits.errors import CircuitsError
from ov_circuits.folding import (
    VIEW_NOTES,
    View,
    check_view,
    default_view,
    fold_qk_norm,
    fold_reader,
    fold_reader_bias,
    fold_writer,
)
from ov_circuits.linalg.lowrank import Grams, LowRank, Sandwich, gram
from ov_circuits.linalg.rows import Rows
from ov_circuits.shown import notebook_html

if TYPE_CHECKING:
    import pandas as pd

    from ov_circuits.certificate import Certificate
    from ov_circuits.trace.shards import Shard
    from ov_circuits.trace.trace import Trace

# How many layers' attention weights stay in memory, as float32.
_CACHED_LAYERS = 3
# Embeddings up to this size in float32 are kept in memory; larger ones are read anew, in blocks, by whoever needs them.
HELD_EMBEDDING_BYTES = 512 * 2**20

_LABEL = re.compile(r"(?:L([0-9]{1,6})H([0-9]{1,6})|([0-9]{1,6})\.([0-9]{1,6}))", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer's attention, split into heads, in one weight view. Absent biases are None, not zeros.

    Attributes:
        index: the layer, from 0.
        W_Q: [n_heads, d_model, d_head].
        W_K: [n_kv_heads, d_model, d_head].
        W_V: [n_kv_heads, d_model, d_head].
        W_O: [n_heads, d_head, d_model].
        b_Q: [n_heads, d_head] or None.
        b_K: [n_kv_heads, d_head] or None.
        b_V: [n_kv_heads, d_head] or None.
        b_O: [d_model] or None; belongs to no head.
        score_scale: what query-key products are multiplied by before the softmax (1 / sqrt(d_head) as a rule).
        q_norm, k_norm: norms that queries and keys pass before they meet (Qwen 3, OLMo 2), in the raw view; None as a rule. In the
            other views their gains are in W_Q and W_K. What they divide by is each token's own: a static QK leaves it out.
        qkv_clip: what queries, keys and values are clamped to (some OLMo); None as a rule. No matrix has it.
    """

    index: int
    W_Q: Float[Tensor, "head d_model d_head"]
    W_K: Float[Tensor, "kv_head d_model d_head"]
    W_V: Float[Tensor, "kv_head d_model d_head"]
    W_O: Float[Tensor, "head d_head d_model"]
    b_Q: Float[Tensor, "head d_head"] | None
    b_K: Float[Tensor, "kv_head d_head"] | None
    b_V: Float[Tensor, "kv_head d_head"] | None
    b_O: Float[Tensor, " d_model"] | None
    score_scale: float
    q_norm: QKNorm | None = None
    k_norm: QKNorm | None = None
    qkv_clip: float | None = None

    def queries(self, x: Float[Tensor, "pos d_model"], head: int | None = None) -> Float[Tensor, "*head pos d_head"]:
        """Queries of rows x that the reading norm gave, before positions turn them: of all heads, or [pos, d_head] of one.

        Of a raw layer; float64.
        """
        return self._project(x, self.W_Q, self.b_Q, self.q_norm, head)

    def keys(self, x: Float[Tensor, "pos d_model"], kv_head: int | None = None) -> Float[Tensor, "*kv_head pos d_head"]:
        """Keys, likewise."""
        return self._project(x, self.W_K, self.b_K, self.k_norm, kv_head)

    def values(
        self, x: Float[Tensor, "pos d_model"], kv_head: int | None = None
    ) -> Float[Tensor, "*kv_head pos d_head"]:
        """Values with their bias, likewise."""
        return self._project(x, self.W_V, self.b_V, None, kv_head)

    def _project(self, x: Tensor, W: Tensor, b: Tensor | None, norm: QKNorm | None, head: int | None) -> Tensor:
        one = head is not None and (norm is None or not norm.whole)  # otherwise the norm needs all heads
        heads = slice(head, head + 1) if head is not None and one else slice(None)
        out = torch.einsum("tm,hmd->htd", x.double(), W[heads].double())
        out = out if b is None else out + b[heads].double().unsqueeze(1)
        out = out if norm is None else norm.of(heads)(out)
        out = out if self.qkv_clip is None else out.clamp(-self.qkv_clip, self.qkv_clip)
        return out if head is None else out[0 if one else head]

    def per_query_head(self, tensor: Tensor) -> Tensor:
        """[n_kv_heads, ...] -> [n_heads, ...]: each query head gets its group's key/value head (repeat_interleave, not tile)."""
        group = self.W_Q.shape[0] // tensor.shape[0]
        return tensor if group == 1 else repeat(tensor, "kv ... -> (kv group) ...", group=group)

    @cached_property
    def finite_heads(self) -> Bool[Tensor, " head"]:
        """Which query heads have no NaN or infinity in W_Q, W_K, W_V, W_O or their biases."""
        found = torch.ones(self.W_O.shape[0], dtype=torch.bool)
        for tensor in (self.W_Q, self.W_K, self.W_V, self.W_O, self.b_Q, self.b_K, self.b_V):
            if tensor is not None:
                found &= self.per_query_head(tensor.isfinite().flatten(1).all(1))
        return found

    @property
    def finite_part(self) -> Layer:
        """The layer with all that is not finite set to zero, so that decompositions do not fail for the other heads."""
        # Not cached where it is the layer itself: a layer that holds itself stays until Python looks for cycles.
        return self if bool(self.finite_heads.all()) else self._zeroed

    @cached_property
    def _zeroed(self) -> Layer:
        names = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V")
        tensors = {name: getattr(self, name) for name in names}
        zeroed = {n: t.nan_to_num(0.0, 0.0, 0.0) for n, t in tensors.items() if t is not None}
        return replace(self, **zeroed)

    @cached_property
    def ov(self) -> LowRank:
        """All heads' W_V W_O, [n_heads, d_model, d_model] of rank d_head."""
        return LowRank(self.per_query_head(self.W_V), self.W_O, repeats=self.W_O.shape[0] // self.W_V.shape[0])

    @cached_property
    def qk(self) -> LowRank:
        """All heads' W_Q W_K^T times the score scale, [n_heads, d_model, d_model]; for rotary models this is offset 0."""
        return LowRank(self.W_Q * self.score_scale, self.per_query_head(self.W_K).mT)


class Model:
    """A checkpoint seen as heads, in one weight view. Nothing is read until it is asked for.

    Made by :func:`ov_circuits.load`. ``model.in_view("raw")`` gives the same checkpoint in another view; both share what
    has been read.

    Attributes:
        name: what it is called on pages.
        view: ``raw``, ``folded`` or ``centred`` (see :mod:`ov_circuits.folding`).
        architecture: the config's numbers under one set of names.
    """

    def __init__(self, source: Source, view: View) -> None:
        self._source, self.view = source, view
        self.name = source.checkpoint.name
        self.architecture = source.architecture

    # -- what it is ---------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        a = self.architecture
        groups = "" if a.group_size == 1 else f" on {a.n_kv_heads} key/value heads"
        return (
            f"Model({self.name!r}: {a.family}, {a.n_layers} layers x {a.n_heads} heads{groups}, "
            f"d_model {a.d_model}, d_head {a.d_head}, vocabulary {a.n_vocab:,}, view {self.view!r})"
        )

    @property
    def n_layers(self) -> int:
        return self.architecture.n_layers

    @property
    def n_heads(self) -> int:
        return self.architecture.n_heads

    @property
    def view_note(self) -> str:
        """What the view means, in a sentence or two."""
        family, a = self._source.family, self.architecture
        folded = "" if self.view == "raw" else ", its gain is folded in"
        notes = [VIEW_NOTES[self.view]]
        if family.attention_post_norm is not None:
            notes.append(
                f"What heads write passes a norm before it is added{folded}; its scale, a token's own, is left out."
            )
        if a.qk_norm is not None:
            notes.append(
                f"Queries and keys pass a norm before they meet{folded}; its scale, a token's own, is left out."
            )
        return " ".join(notes)

    @property
    def source(self) -> Source:
        """The open checkpoint: its files, config, and what they hold."""
        return self._source

    @property
    def has_embeddings(self) -> bool:
        """Whether circuits can be read through embedding and unembedding."""
        return self.why_no_vocabulary is None

    @property
    def why_no_vocabulary(self) -> str | None:
        """Why not: they are absent (attention-only files), or hold NaN or infinity; None when they can be used."""
        return self._source.why_no_vocabulary

    @property
    def can_run(self) -> bool:
        """Whether a prompt can be run."""
        return self.why_not_run is None

    @property
    def why_not_run(self) -> str | None:
        """Why no prompt can be run, as the end of a sentence; None when one can."""
        missing = self._source.contents.missing
        if missing and self._source.network is None:
            more = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
            return f"the checkpoint lacks {missing[0]}{more}"
        if self._source.from_bridge and not self.architecture.scale_scores:
            return "its config says scale_attn_weights = false, which a TransformerBridge ignores when it runs"
        return self.architecture.cannot_run or self._source.checkpoint.cannot_run

    def in_view(self, view: str) -> Model:
        """The same checkpoint in another weight view.

        Raises:
            CircuitsError: unknown view, or ``centred`` for an RMSNorm model.
        """
        return Model(self._source, check_view(view, self.architecture))

    # -- heads --------------------------------------------------------------------------------------------------------

    def layer(self, index: int) -> Layer:
        """A layer's attention in this view; the three most recent layers are kept.

        Raises:
            CircuitsError: the model has no such layer.
        """
        if isinstance(index, bool) or not hasattr(index, "__index__") or not 0 <= index < self.n_layers:
            raise CircuitsError(f"{self.name} has no layer {index!r}: it has layers 0 to {self.n_layers - 1}")
        return self._source.layer(operator.index(index), self.view)

    def layer_part(self, index: int, heads: range) -> Layer:
        """Some query heads of a layer, and the key/value heads they use. Only their rows and columns are read; nothing is kept.

        Args:
            index: the layer.
            heads: consecutive query heads: whole groups, or part of one.
        """
        return self._source.read_layer(index, self.view, heads)

    def layers(self) -> Iterator[Layer]:
        """All layers in order, one at a time."""
        return (self.layer(index) for index in range(self.n_layers))

    def head(self, label: str | int | tuple[int, int], head: int | None = None) -> Head:
        """A head by label (``"9.9"``, ``"L9H9"``), by pair, or by two numbers ``head(9, 9)``.

        Raises:
            CircuitsError: no head of that name.
        """
        layer, index = _parse_label(label, head)
        a = self.architecture
        if not (0 <= layer < a.n_layers and 0 <= index < a.n_heads):
            raise CircuitsError(
                f"{self.name} has no head {layer}.{index}: it has layers 0 to {a.n_layers - 1} "
                f"with heads 0 to {a.n_heads - 1} each"
            )
        return Head(self, layer, index)

    def heads(self) -> Iterator[Head]:
        """All heads, layer by layer."""
        return (Head(self, layer, index) for layer in range(self.n_layers) for index in range(self.n_heads))

    @property
    def head_labels(self) -> list[str]:
        """``"0.0", "0.1", ..``: the row order of every per-head result."""
        return [f"{layer}.{index}" for layer in range(self.n_layers) for index in range(self.n_heads)]

    def split_W_O(self, layer: int) -> Float[Tensor, "head d_head d_model"]:
        """A layer's attention output projection as one block a head, [n_heads, d_head, d_model], in this view."""
        return self.layer(layer).W_O

    # -- embedding and unembedding ------------------------------------------------------------------------------------

    @cached_property
    def embedding(self) -> Rows:
        """W_E [n_vocab, d_model], met in blocks of rows: what scores use, whatever the size of the vocabulary."""
        return self._source.embedding_rows.map(lambda rows: fold_writer(rows, self.view))

    @cached_property
    def unembedding(self) -> Rows:
        """W_U^T [n_vocab, d_model], met in blocks of rows; ``model.unembedding.mT`` stands for W_U in products."""
        gain = self._source.final_gain
        return self._source.unembedding_rows.map(lambda rows: fold_reader(rows.mT, gain, self.view).mT)

    @cached_property
    def W_E(self) -> Float[Tensor, "n_vocab d_model"]:
        """W_E whole in memory, [n_vocab, d_model]: times Gemma's or Granite's factor, after BLOOM's norm."""
        return self.embedding.tensor()

    @cached_property
    def W_pos(self) -> Float[Tensor, "n_ctx d_model"] | None:
        """Learned position embedding [n_ctx, d_model], row 0 that of position 0; None where positions are not learned."""
        positions = self._source.position_embedding
        return None if positions is None else fold_writer(positions, self.view)

    @cached_property
    def W_U(self) -> Float[Tensor, "d_model n_vocab"]:
        """Unembedding [d_model, n_vocab], whole in memory; a factor on all logits (Cohere, Granite) is not in it."""
        return self.unembedding.tensor().mT

    @cached_property
    def b_U(self) -> Float[Tensor, " n_vocab"] | None:
        """The unembedding's bias (Phi, GPT-J) and, unless raw, the final norm's seen through it, [n_vocab]; None without either."""
        s = self._source
        if self.view == "raw" or s.final_bias is None:
            return s.unembedding_bias
        added = s.unembedding_rows @ s.final_bias.double()
        return (added if s.unembedding_bias is None else s.unembedding_bias + added).to(s.final_bias)

    @cached_property
    def grams(self) -> Grams:
        """W_E^T W_E, W_U W_U^T and W_U W_E in this view, float64 [d_model, d_model]: shared by all heads' full circuits."""
        raw = self._source.raw_grams
        if self.view == "raw":
            return raw
        gain = self._source.final_gain.double()
        write = gain[:, None] * raw.write * gain
        cross = gain[:, None] * raw.cross
        if self.view == "folded":
            return Grams(raw.read, write, cross)
        return Grams(_centre_both(raw.read), _centre_both(write), _centre_both(cross))

    def ov_update(self, layer: int) -> LowRank:
        """What a LoRA adapter adds to a layer's OV circuits, [n_heads, d_model, d_model] of rank at most 2 r.

        ``(W_V + dV)(W_O + dO) - W_V W_O = dV (W_O + dO) + W_V dO``, dV and dO of rank r each, never formed.

        Raises:
            CircuitsError: the model has no adapter, or one that replaces weights as a whole.
        """
        self.layer(layer)  # that there is such a layer
        return self._source.ov_update(operator.index(layer), self.view)

    def full_ov(self, layer: int) -> Sandwich:
        """A layer's full OV circuits W_E W_V W_O W_U, [n_heads, n_vocab, n_vocab], never formed."""
        return Sandwich(self.embedding, self.layer(layer).ov, self.unembedding.mT, self.grams)

    # -- text -----------------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer.

        Raises:
            CircuitsError: it has none.
        """
        return self._source.tokenizer

    @property
    def has_tokenizer(self) -> bool:
        return self._source.has_tokenizer

    # -- the next rooms -------------------------------------------------------------------------------------------------

    @overload
    def trace(  # type: ignore[overload-overlap]  # a text is a sequence of texts, and comes first
        self, prompt: str | Sequence[int] | Tensor, *, bos: bool | None = None, last_logits: bool = False
    ) -> Trace: ...

    @overload
    def trace(
        self, prompt: Sequence[str] | Sequence[Sequence[int]], *, bos: bool | None = None, last_logits: bool = False
    ) -> list[Trace]: ...

    def trace(self, prompt: Any, *, bos: bool | None = None, last_logits: bool = False) -> Trace | list[Trace]:
        """Run the model on a prompt, or on several; see :func:`ov_circuits.trace.trace.trace`."""
        from ov_circuits.trace.trace import trace

        return trace(self, prompt, bos=bos, last_logits=last_logits)

    def verify(self) -> Certificate:
        """Check the split on this very checkpoint; see :func:`ov_circuits.certificate.verify`."""
        from ov_circuits.certificate import verify

        return verify(self)


@dataclass(frozen=True)
class Head:
    """One query head of a model, in the model's weight view."""

    model: Model
    layer: int
    index: int

    @property
    def label(self) -> str:
        """``"9.9"``: layer and head."""
        return f"{self.layer}.{self.index}"

    @property
    def kv_head(self) -> int:
        """The key/value head it reads with."""
        return self.index // self.model.architecture.group_size

    def __repr__(self) -> str:
        return f"Head({self.label} of {self.model.name!r}, view {self.model.view!r})"

    def _repr_html_(self) -> str | None:
        return notebook_html("head_html", self)

    @property
    def _layer(self) -> Layer:
        return self.model.layer(self.layer)

    @property
    def W_Q(self) -> Float[Tensor, "d_model d_head"]:
        """[d_model, d_head]."""
        return self._layer.W_Q[self.index]

    @property
    def W_K(self) -> Float[Tensor, "d_model d_head"]:
        """[d_model, d_head], of its key/value head."""
        return self._layer.W_K[self.kv_head]

    @property
    def W_V(self) -> Float[Tensor, "d_model d_head"]:
        """[d_model, d_head], of its key/value head."""
        return self._layer.W_V[self.kv_head]

    @property
    def W_O(self) -> Float[Tensor, "d_head d_model"]:
        """[d_head, d_model]: rows ``index * d_head`` to ``(index + 1) * d_head`` of the (in, out) output projection."""
        return self._layer.W_O[self.index]

    @property
    def b_Q(self) -> Float[Tensor, " d_head"] | None:
        """[d_head] or None."""
        return None if self._layer.b_Q is None else self._layer.b_Q[self.index]

    @property
    def b_K(self) -> Float[Tensor, " d_head"] | None:
        """[d_head] or None."""
        return None if self._layer.b_K is None else self._layer.b_K[self.kv_head]

    @property
    def b_V(self) -> Float[Tensor, " d_head"] | None:
        """[d_head] or None; ``b_V @ W_O`` is written at every position, whatever is attended to."""
        return None if self._layer.b_V is None else self._layer.b_V[self.kv_head]

    @property
    def ov(self) -> LowRank:
        """W_V W_O, [d_model, d_model]: what is written for what is read (Elhage et al. 2021)."""
        return self._layer.ov[self.index]

    @property
    def ov_update(self) -> LowRank:
        """What a LoRA adapter adds to :attr:`ov`, [d_model, d_model] of rank at most 2 r; see :meth:`Model.ov_update`."""
        return self.model.ov_update(self.layer)[self.index]

    @property
    def qk(self) -> LowRank:
        """W_Q W_K^T times the score scale, [d_model, d_model]; rows are queries. For rotary models: at offset 0, one of many."""
        return self._layer.qk[self.index]

    @property
    def full_ov(self) -> LowRank:
        """W_E W_V W_O W_U, [n_vocab, n_vocab], never formed: row = token attended to, column = token whose logit moves."""
        return self.model.full_ov(self.layer)[self.index]

    def writes(self, token: str | int, k: int = 10) -> pd.DataFrame:
        """What it writes when it attends to a token; see :func:`ov_circuits.scores.directions.writes`."""
        from ov_circuits.scores.directions import writes

        return writes(self, token, k)

    def reads(self, k: int = 10, direction: int = 0) -> pd.DataFrame:
        """Which tokens excite a singular direction; see :func:`ov_circuits.scores.directions.reads`."""
        from ov_circuits.scores.directions import reads

        return reads(self, k, direction)


class Source:
    """An open checkpoint and the parts of it that have been read. Shared by all views of a model."""

    def __init__(self, checkpoint: Checkpoint, *, bridge: Any = None, network: Any = None) -> None:
        self.checkpoint = checkpoint
        # The user's own transformers model, or the one that trace.engines makes when a prompt is first run.
        self.network: Any = network if bridge is None else bridge.original_model
        self.shard: Shard | None = None  # which heads the network holds here; None: all of them
        self.from_bridge = bridge is not None
        self._bridge_tokenizer = None if bridge is None else bridge.tokenizer
        self.family: Family = family_of(checkpoint.config, checkpoint.where)
        self.architecture: Architecture = self.family.architecture(checkpoint.config)
        self.store: TensorStore
        self.contents: Contents
        self.store, self.contents = check_contents(
            checkpoint.store, self.family, self.architecture, checkpoint.config, checkpoint.where
        )
        self._layers: OrderedDict[tuple[int, View], Layer] = OrderedDict()
        self._held: dict[str, Tensor] = {}
        self._lock = threading.Lock()

    def layer(self, index: int, view: View) -> Layer:
        """A layer in a view, from the cache of recent ones."""
        key = (index, view)
        with self._lock:  # layers are scored side by side
            if key not in self._layers:
                self._layers[key] = self.read_layer(index, view, range(self.architecture.n_heads))
                while len(self._layers) > _CACHED_LAYERS:
                    self._layers.popitem(last=False)
            self._layers.move_to_end(key)
            return self._layers[key]

    def read_layer(self, index: int, view: View, heads: range) -> Layer:
        """A layer with some of its query heads, in a view; see :meth:`Model.layer_part`."""
        a, family = self.architecture, self.family
        kv_heads = range(heads.start // a.group_size, (heads.stop - 1) // a.group_size + 1)
        if len(heads) % len(kv_heads) or (len(kv_heads) > 1 and len(heads) != len(kv_heads) * a.group_size):
            raise ValueError(f"heads {heads} are neither whole groups of {a.group_size} nor part of one")
        store = ReadOnce(self.store)  # a fused qkv is one tensor for three projections
        norm = self.norm(family.attention_norm, index)
        q_norm, k_norm = (
            self._qk_norm(family.q_norm, index, a.n_heads),
            self._qk_norm(family.k_norm, index, a.n_kv_heads),
        )

        q_norm, k_norm = _part_of_norm(q_norm, heads), _part_of_norm(k_norm, kv_heads)

        def slots(heads: range) -> slice:
            """Where these heads lie among the concatenated ones."""
            return slice(heads.start * a.d_head, heads.stop * a.d_head)

        def reader(role: Role, heads: range, qk_norm: QKNorm | None = None) -> tuple[Tensor, Tensor | None]:
            """A reading matrix split into heads, its norms folded in as the view says."""
            projection = family.projections[role]
            matrix = projection.part_of_weight(store, index, a, outputs=slots(heads))
            bias = projection.bias(store, index, a)
            W = rearrange(matrix, "d_model (head d_head) -> head d_model d_head", head=len(heads))
            b = None if bias is None else rearrange(bias[slots(heads)], "(head d_head) -> head d_head", head=len(heads))
            b = fold_reader_bias(b, W, norm.bias, view)
            W = fold_qk_norm(fold_reader(W, norm.gain, view), qk_norm, view)
            return W, None if b is None else fold_qk_norm(b, qk_norm, view)

        W_Q, b_Q = reader("Q", heads, q_norm)
        W_K, b_K = reader("K", kv_heads, k_norm)
        W_V, b_V = reader("V", kv_heads)
        output, post_gain = family.projections["O"], None
        if family.attention_post_norm is not None:
            post_gain = self.norm(family.attention_post_norm, index).gain
        matrix, b_O = output.part_of_weight(store, index, a, inputs=slots(heads)), output.bias(store, index, a)
        if a.residual_scale != 1:
            matrix, b_O = matrix * a.residual_scale, None if b_O is None else b_O * a.residual_scale
        W_O = rearrange(matrix, "(head d_head) d_model -> head d_head d_model", head=len(heads))
        return Layer(
            index=index,
            W_Q=W_Q,
            W_K=W_K,
            W_V=W_V,
            W_O=fold_writer(W_O, view, post_gain),
            b_Q=b_Q,
            b_K=b_K,
            b_V=b_V,
            b_O=None if b_O is None else fold_writer(b_O, view, post_gain),
            score_scale=a.score_scale(index),
            q_norm=q_norm if view == "raw" else None,
            k_norm=k_norm if view == "raw" else None,
            qkv_clip=a.qkv_clip,
        )

    def attention_norm(self, layer: int) -> Norm:
        """The norm that a layer's attention reads through; where it reads the stream as it is (OLMo 2), one that does nothing."""
        return self.norm(self.family.attention_norm, layer)

    def attention_post_norm(self, layer: int) -> Norm | None:
        """The norm that a layer's attention output passes before it is added to the stream, where there is one."""
        name = self.family.attention_post_norm
        return None if name is None else self.norm(name, layer)

    def norm(self, name: str | None, layer: int = 0) -> Norm:
        """A norm of the family's table by its name, with ``{layer}``; None names the one that does nothing."""
        name = None if name is None else name.format(layer=layer)
        if name is not None and self.architecture.norm_gain != "none":
            self._need(f"{name}.weight")
        return Norm.read(self.store, name, self.architecture)

    def _qk_norm(self, name: str | None, layer: int, heads: int) -> QKNorm | None:
        a = self.architecture
        return None if name is None or a.qk_norm is None else QKNorm.read(self.store, name, a, layer, heads)

    def ov_update(self, index: int, view: View) -> LowRank:
        """See :meth:`Model.ov_update`."""
        adapter, a = self.checkpoint.adapter, self.architecture
        if adapter is None or self.base is None:
            raise CircuitsError(
                f"{self.checkpoint.name} has no adapter: open a base with one (adapter=) to see its update"
            )
        adapted, base = self.layer(index, view), self.base.layer(index, view)
        gain = self.attention_norm(index).gain
        post_norm = self.attention_post_norm(index)
        post_gain = None if post_norm is None else post_norm.gain
        self._check_only_updated(adapter, index)

        def factors(role: Role) -> tuple[Tensor, Tensor]:
            """dV as [d_model, r] and [n_heads, r, d_head], or dO as [n_heads, d_head, r] and [r, d_model]."""
            projection = self.family.projections[role]
            module = projection.name.format(layer=index)
            found = map(adapter.update, (module, f"{self.family.prefix}{module}"))
            update = next((update for update in found if update is not None), None)
            if update is None:
                shape = self.store.shape(f"{module}.weight")
                n_out, n_in = shape[::-1] if projection.stored_in_out else shape
                update = Update(torch.zeros(0, n_in), torch.zeros(n_out, 0))
            # The side that heads share stays; the other one is laid out as the weight itself, by the table.
            shared, own = (update.B.T, update.A) if role == "O" else (update.A.T, update.B)
            stored = own.T if projection.stored_in_out else own
            laid_out = projection.weight(MemoryStore({f"{module}.weight": stored}), index, a)
            if role == "O":
                heads = rearrange(laid_out, "(head d_head) r -> head d_head r", head=a.n_heads)
                return heads, fold_writer(shared * a.residual_scale, view, post_gain)
            heads = rearrange(laid_out, "r (head d_head) -> head r d_head", head=a.n_kv_heads)
            return fold_reader(shared, gain, view), adapted.per_query_head(heads)

        read, values = factors("V")
        outputs, write = factors("O")
        left = torch.cat([read.expand(a.n_heads, -1, -1), base.per_query_head(base.W_V) @ outputs], dim=-1)
        right = torch.cat([values @ adapted.W_O, write.expand(a.n_heads, -1, -1)], dim=-2)
        return LowRank(left, right)

    @cached_property
    def base(self) -> Source | None:
        """The checkpoint that an adapter was put on."""
        return None if self.checkpoint.base is None else Source(self.checkpoint.base)

    def _check_only_updated(self, adapter: Adapter, index: int) -> None:
        """Raise a CircuitsError if the adapter replaces as a whole what a layer's OV circuits are made of."""
        modules = [self.family.projections[role].name.format(layer=index) for role in ("V", "O")]
        if self.family.attention_norm is not None:
            modules.append(self.family.attention_norm.format(layer=index))
        for name in adapter.replaced():
            if name.removeprefix(self.family.prefix) in {f"{module}.weight" for module in modules}:
                raise CircuitsError(f"the adapter replaces {name} as a whole: its change of OV has no low rank")

    def _need(self, name: str) -> Tensor:
        if name not in self.store:
            raise CircuitsError(
                f"{self.checkpoint.where} has no tensor {name} (it holds attention weights only), "
                "so what passes through embedding or unembedding cannot be computed; use the full checkpoint"
            )
        return self.store.read(name)

    @cached_property
    def why_no_vocabulary(self) -> str | None:
        """See :attr:`Model.why_no_vocabulary`."""
        if not self.contents.embeddings:
            return f"{self.checkpoint.where} holds attention weights only, no embeddings"
        f = self.family
        parts = [part for part in (f.embed, f.unembed, f.final_norm, f.embed_norm) if part is not None]
        for name in [f"{part}.{kind}" for part in parts for kind in ("weight", "bias")]:
            if name in self.store and not self._is_finite(name):
                return f"tensor {name} in {self.store.origin(name)} holds NaN or infinity"
        return None

    def _is_finite(self, name: str) -> bool:
        if len(self.store.shape(name)) == 1:
            return bool(self.store.read(name).isfinite().all())
        return all(bool(block.isfinite().all()) for _, block in self._rows(name).blocks())

    def _rows(self, name: str) -> Rows:
        """A matrix of the file in blocks of rows; a small one is read once and kept."""
        if name in self._held:
            return Rows.of(self._held[name])
        if name not in self.store:
            self._need(name)
        n, d = self.store.shape(name)
        if 4 * n * d > HELD_EMBEDDING_BYTES and self.store.reads_parts:
            return Rows((n, d), lambda rows: self.store.read(name, (rows,)))
        return Rows.of(self._held.setdefault(name, self.store.read(name)))

    @cached_property
    def embedding_rows(self) -> Rows:
        """W_E [n_vocab, d_model], what enters the stream, in blocks: stored rows times the family's factor, or after its norm."""
        stored, scale = self._rows(f"{self.family.embed}.weight"), self.architecture.embed_scale
        if self.family.embed_norm is not None:
            stored = stored.map(self.norm(self.family.embed_norm))
        return stored if scale == 1 else stored.map(lambda rows: rows * scale)

    @cached_property
    def unembedding_rows(self) -> Rows:
        """W_U^T [n_vocab, d_model] as stored, in blocks of rows; with tied weights, the stored embedding."""
        return self._rows(f"{self.family.embed if self.tied else self.family.unembed}.weight")

    @cached_property
    def embedding(self) -> Tensor:
        """W_E [n_vocab, d_model], what enters the stream, whole in memory."""
        return self.embedding_rows.tensor()

    @cached_property
    def unembedding(self) -> Tensor:
        """W_U [d_model, n_vocab] as stored, whole in memory; with tied weights, the stored embedding transposed."""
        return self.unembedding_rows.tensor().mT

    @cached_property
    def unembedding_bias(self) -> Tensor | None:
        """The unembedding's own bias [n_vocab], or None."""
        return self._need(f"{self.family.unembed}.bias") if self.architecture.unembed_bias else None

    @cached_property
    def fingerprint(self) -> str:
        """What tells this checkpoint from others: a digest of its numbers, its tensors' shapes and a sample of their values."""
        digest = hashlib.sha256(repr(self.architecture).encode())
        for name in sorted(self.store.names()):
            digest.update(f"{name} {self.store.shape(name)}".encode())
        for layer in sorted({0, self.architecture.n_layers - 1}):
            digest.update(self.layer(layer, "raw").W_O[0].contiguous().numpy().tobytes())
        return digest.hexdigest()

    @cached_property
    def tied(self) -> bool:
        """Whether the unembedding is the embedding. Where a file ties by config but holds another one, that one counts.

        transformers 5 does the same: it ties only what is missing or equal.
        """
        name = f"{self.family.unembed}.weight"
        if not self.architecture.tied or name not in self.store:
            return self.architecture.tied
        stored = self._rows(f"{self.family.embed}.weight")
        return all(torch.equal(stored[rows], block) for rows, block in self._rows(name).blocks())

    @cached_property
    def position_embedding(self) -> Tensor | None:
        """W_pos [n_ctx, d_model] where positions are learned, from position 0 on."""
        name, first = self.family.positions, self.family.position_offset
        return None if name is None else self._need(f"{name}.weight")[first:]

    @cached_property
    def final_norm(self) -> Norm:
        """The norm before the unembedding."""
        return self.norm(self.family.final_norm)

    @property
    def final_gain(self) -> Tensor:
        """The final norm's gain [d_model]."""
        return self.final_norm.gain

    @property
    def final_bias(self) -> Tensor | None:
        """The final norm's bias [d_model], or None."""
        return self.final_norm.bias

    @cached_property
    def raw_grams(self) -> Grams:
        """The three Gram matrices of embedding and unembedding; one product when one is a multiple of the other."""
        return self.gram_part(0, self.architecture.n_vocab)

    def gram_part(self, start: int, stop: int) -> Grams:
        """What tokens ``start`` to ``stop`` add to :attr:`raw_grams`; in one pass over their rows for each of the three."""
        U = self.unembedding_rows.part(start, stop)
        write = gram(U)
        if self.tied and self.family.embed_norm is None:
            scale = self.architecture.embed_scale
            return Grams(write, write, write) if scale == 1 else Grams(write * scale**2, write, write * scale)
        E = self.embedding_rows.part(start, stop)
        return Grams(gram(E), write, gram(U, E))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        if self._bridge_tokenizer is not None:
            return Tokenizer.of_transformers(self._bridge_tokenizer, self.checkpoint.config)
        return Tokenizer.open(self.checkpoint.folder, self.checkpoint.tokenizer_file, self.checkpoint.config)

    @cached_property
    def has_tokenizer(self) -> bool:
        try:
            return self.tokenizer is not None
        except MissingTokenizer:  # a broken one is said
            return False


def _part_of_norm(norm: QKNorm | None, heads: range) -> QKNorm | None:
    """Some heads' part of a norm of queries or keys; all that folding needs."""
    if norm is None or len(heads) == len(norm.gain):
        return norm
    part = slice(heads.start, heads.stop)
    return replace(norm, gain=norm.gain[part], bias=None if norm.bias is None else norm.bias[part])


def _centre_both(matrix: Tensor) -> Tensor:
    """(I - 11^T/d) matrix (I - 11^T/d)."""
    matrix = matrix - matrix.mean(dim=0, keepdim=True)
    return matrix - matrix.mean(dim=1, keepdim=True)


def _parse_label(label: str | int | tuple[int, int], head: int | None) -> tuple[int, int]:
    pair = label if isinstance(label, tuple) and head is None else (label, head)
    if len(pair) == 2 and all(hasattr(part, "__index__") and not isinstance(part, bool) for part in pair):
        return operator.index(pair[0]), operator.index(pair[1])  # type: ignore[arg-type]
    match = _LABEL.fullmatch(label.strip()) if isinstance(label, str) and head is None else None
    if match is None:
        shown = str(label if head is None else f"{label}, {head}")[:80]
        raise CircuitsError(f"{shown!r} names no head: write '9.9', 'L9H9' or two numbers, layer and head")
    layer, index = (int(part) for part in match.groups() if part is not None)
    return layer, index


def load(
    x: Any = None,
    *,
    config: Any = None,
    view: str | None = None,
    revision: str | None = None,
    adapter: str | os.PathLike[str] | None = None,
) -> Model:
    """Open a checkpoint. Only headers are read: milliseconds, no weight memory.

    Args:
        x: nothing (the model that comes with the package), a folder, a ``.safetensors``, ``.bin``, ``.pt``, ``.pth`` or
            ``.gguf`` file, ``"smollm2"`` (after ``ov-circuits fetch smollm2``), or a hub name such as ``"gpt2"`` or
            ``"gpt2@main"``. Or what is in memory already: a transformers model, a TransformerLens ``TransformerBridge``, a
            state dict (with ``config``). Its weights are used without a copy; half precision becomes float32 layer by layer,
            when a layer is read. Prompts are run on the model or bridge itself.
        config: of a state dict: the content of its ``config.json`` or a transformers config.
        view: weight view; by default ``centred`` for LayerNorm and ``folded`` for RMSNorm models.
        revision: branch, tag or commit of a hub model.
        adapter: a folder with a LoRA adapter of PEFT, put on top of it. Such a folder may also be ``x``; then its own
            config says which base it belongs to.

    Returns:
        The model; weights are read when they are asked for.

    Raises:
        CircuitsError: nothing is there, or it is not a checkpoint of a family in the table.
    """
    source = _open(x, config, revision, adapter)
    chosen = default_view(source.architecture) if view is None else check_view(view, source.architecture)
    return Model(source, chosen)


def _open(x: Any, config: Any, revision: str | None, adapter: str | os.PathLike[str] | None) -> Source:
    from ov_circuits.checkpoint.in_memory import from_bridge, from_network, from_tensors, is_bridge, is_network
    from ov_circuits.checkpoint.locate import open_checkpoint

    if adapter is not None and not (x is None or isinstance(x, (str, os.PathLike))):
        raise CircuitsError(f"an adapter is put on a checkpoint by name or path, not on a {type(x).__name__} in memory")
    if isinstance(x, Mapping):
        return Source(from_tensors(x, config))
    if config is not None:
        raise CircuitsError("a config belongs to a dictionary of tensors: files and models have their own")
    if is_bridge(x):
        return Source(from_bridge(x), bridge=x)
    if is_network(x):
        return Source(from_network(x), network=x if x.get_output_embeddings() is not None else None)
    if x is None or isinstance(x, (str, os.PathLike)):
        return Source(open_checkpoint(x, revision, adapter))
    raise CircuitsError(
        f"cannot open a {type(x).__name__}: give a name, a path, a transformers model, a TransformerBridge or a state dict, "
        "or nothing for the embedded model"
    )

"""Model and Head: a checkpoint as its reader sees it.

A :class:`Model` is an open checkpoint (:mod:`ov_circuits.source`) in one weight view; its layers (:mod:`ov_circuits.layer`) hold
all heads' blocks as tensors, its heads one head's each. Nothing is read until it is asked for.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from jaxtyping import Float
from torch import Tensor

from ov_circuits.arguments import checked
from ov_circuits.checkpoint.tokenizer import Tokenizer
from ov_circuits.devices import device_of
from ov_circuits.errors import CircuitsError, is_whole
from ov_circuits.folding import (
    VIEW_NOTES,
    View,
    check_view,
    default_view,
    fold_reader,
    fold_writer,
)
from ov_circuits.layer import Layer
from ov_circuits.linalg.lowrank import Grams, LowRank, Sandwich
from ov_circuits.linalg.rows import Rows
from ov_circuits.modes import ordinary_class
from ov_circuits.shown import notebook_html
from ov_circuits.source import Source

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedModel

    from ov_circuits.certificate import Certificate
    from ov_circuits.trace.trace import Trace

__all__ = ["Head", "Layer", "Model", "load"]

_LABEL = re.compile(r"(?:L([0-9]{1,6})H([0-9]{1,6})|([0-9]{1,6})\.([0-9]{1,6}))", re.IGNORECASE)


@ordinary_class
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

    def __reduce__(self) -> tuple[type[Model], tuple[Source, View]]:
        return Model, (self._source, self.view)

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
    def device(self) -> torch.device:
        """Where weights and what a prompt leaves behind are, and where scores are worked out. Frames are in ordinary memory."""
        return self._source.device

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

    def without(self, heads: Head | str | Sequence[Head | str]) -> Model:
        """The same checkpoint with heads taken out: their blocks of W_O are zero, so they write nothing, their value bias included.

        What it gives is a model like any other: to be traced, measured on probes, scored, put on a page. Its accounts close, and
        :attr:`network` is one of its own, with memory of its own. It is a zero ablation that stays; :func:`ov_circuits.ablate`
        has others, beside the ledger's entries.

        Args:
            heads: a head, or several; none of them leaves the model as it is.

        Raises:
            CircuitsError: no head of that name, or a tensor-parallel model.
        """
        several = [heads] if isinstance(heads, (Head, str)) else list(heads)
        found = {self.head(head) for head in several}
        return Model(self._source.without({(head.layer, head.index) for head in found}), self.view) if found else self

    def in_view(self, view: str) -> Model:
        """The same checkpoint in another weight view.

        Raises:
            CircuitsError: unknown view, or ``centred`` for an RMSNorm model.
        """
        return Model(self._source, check_view(view, self.architecture))

    # -- heads --------------------------------------------------------------------------------------------------------

    def layer(self, index: int) -> Layer:
        """A layer's attention in this view; the three most recent layers are kept, and read anew once torch has written into one.

        Raises:
            CircuitsError: the model has no such layer.
        """
        if not is_whole(index) or not 0 <= index < self.n_layers:
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

    def head(self, label: str | int | tuple[int, int] | Head, head: int | None = None) -> Head:
        """A head by label (``"9.9"``, ``"L9H9"``), by pair, or by two numbers ``head(9, 9)``; of a Head, its like in this model.

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
        return self.layer(layer).W_O.clone()

    # -- embedding and unembedding ------------------------------------------------------------------------------------

    @cached_property
    def embedding(self) -> Rows:
        """W_E [n_vocab, d_model], met in blocks of rows: what scores use, whatever the size of the vocabulary."""
        view = self.view  # by itself: a model that its own rows hold stays until Python looks for cycles
        return self._source.embedding_rows.map(lambda rows: fold_writer(rows, view))

    @cached_property
    def unembedding(self) -> Rows:
        """W_U^T [n_vocab, d_model], met in blocks of rows; ``model.unembedding.mT`` stands for W_U in products."""
        gain, view = self._source.final_gain, self.view
        return self._source.unembedding_rows.map(lambda rows: fold_reader(rows.mT, gain, view).mT)

    @cached_property
    def W_E(self) -> Float[Tensor, "n_vocab d_model"]:
        """W_E whole in memory, [n_vocab, d_model]: times Gemma's or Granite's factor, after BLOOM's norm."""
        return self.embedding.copy()

    @cached_property
    def W_pos(self) -> Float[Tensor, "n_ctx d_model"] | None:
        """Learned position embedding [n_ctx, d_model], row 0 that of position 0; None where positions are not learned."""
        positions = self._source.position_embedding
        return None if positions is None else fold_writer(positions, self.view).clone()

    @cached_property
    def W_U(self) -> Float[Tensor, "d_model n_vocab"]:
        """Unembedding [d_model, n_vocab], whole in memory; a factor on all logits (Cohere, Granite) is not in it."""
        return self.unembedding.copy().mT

    @cached_property
    def b_U(self) -> Float[Tensor, " n_vocab"] | None:
        """The unembedding's bias (Phi, GPT-J) and, unless raw, the final norm's seen through it, [n_vocab]; None without either."""
        s = self._source
        if self.view == "raw" or s.final_bias is None:
            return None if s.unembedding_bias is None else s.unembedding_bias.clone()
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

    @property
    def network(self) -> PreTrainedModel:
        """The transformers model that prompts run through, for hooks and edits of your own.

        It is the one that you gave, or one built on first use from the tensors that are read here: float32, on the model's
        device, weights as stored whatever the view. All views share it, and what is done to it holds for every trace that follows.

        Raises:
            CircuitsError: the checkpoint cannot run.
        """
        from ov_circuits.trace.engines import check_runs, network_of

        check_runs(self)
        return network_of(self)

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


@ordinary_class
@dataclass(frozen=True)
class Head:
    """One query head of a model, in the model's weight view. Its tensors are copies: what is written into them stays there."""

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
        return self._layer.W_Q[self.index].clone()

    @property
    def W_K(self) -> Float[Tensor, "d_model d_head"]:
        """[d_model, d_head], of its key/value head."""
        return self._layer.W_K[self.kv_head].clone()

    @property
    def W_V(self) -> Float[Tensor, "d_model d_head"]:
        """[d_model, d_head], of its key/value head."""
        return self._layer.W_V[self.kv_head].clone()

    @property
    def W_O(self) -> Float[Tensor, "d_head d_model"]:
        """[d_head, d_model]: rows ``index * d_head`` to ``(index + 1) * d_head`` of the (in, out) output projection."""
        return self._layer.W_O[self.index].clone()

    @property
    def b_Q(self) -> Float[Tensor, " d_head"] | None:
        """[d_head] or None."""
        return None if self._layer.b_Q is None else self._layer.b_Q[self.index].clone()

    @property
    def b_K(self) -> Float[Tensor, " d_head"] | None:
        """[d_head] or None."""
        return None if self._layer.b_K is None else self._layer.b_K[self.kv_head].clone()

    @property
    def b_V(self) -> Float[Tensor, " d_head"] | None:
        """[d_head] or None; ``b_V @ W_O`` is written at every position, whatever is attended to."""
        return None if self._layer.b_V is None else self._layer.b_V[self.kv_head].clone()

    @property
    def ov(self) -> LowRank:
        """W_V W_O, [d_model, d_model]: what is written for what is read (Elhage et al. 2021)."""
        return self._layer.ov[self.index].copy()

    @property
    def ov_update(self) -> LowRank:
        """What a LoRA adapter adds to :attr:`ov`, [d_model, d_model] of rank at most 2 r; see :meth:`Model.ov_update`."""
        return self.model.ov_update(self.layer)[self.index]

    @property
    def qk(self) -> LowRank:
        """W_Q W_K^T times the score scale, [d_model, d_model]; rows are queries. For rotary models: at offset 0, one of many."""
        return self._layer.qk[self.index].copy()

    @property
    def full_ov(self) -> LowRank:
        """W_E W_V W_O W_U, [n_vocab, n_vocab], never formed: row = token attended to, column = token whose logit moves."""
        return self.model.full_ov(self.layer)[self.index]

    @checked
    def writes(self, token: str | int, k: int = 10) -> pd.DataFrame:
        """What it writes when it attends to a token; see :func:`ov_circuits.scores.directions.writes`."""
        from ov_circuits.scores.directions import writes

        return writes(self, token, k)

    @checked
    def reads(self, k: int = 10, direction: int = 0) -> pd.DataFrame:
        """Which tokens excite a singular direction; see :func:`ov_circuits.scores.directions.reads`."""
        from ov_circuits.scores.directions import reads

        return reads(self, k, direction)


def _centre_both(matrix: Tensor) -> Tensor:
    """(I - 11^T/d) matrix (I - 11^T/d)."""
    matrix = matrix - matrix.mean(dim=0, keepdim=True)
    return matrix - matrix.mean(dim=1, keepdim=True)


def _parse_label(label: str | int | tuple[int, int] | Head, head: int | None) -> tuple[int, int]:
    if isinstance(label, Head) and head is None:
        return label.layer, label.index
    pair = label if isinstance(label, tuple) and head is None else (label, head)
    if len(pair) == 2 and all(is_whole(part) for part in pair):
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
    device: str | torch.device | None = None,
) -> Model:
    """Open a checkpoint. Only headers are read: milliseconds, no weight memory.

    Args:
        x: nothing or ``"embedded"`` (the model that comes with the package), a folder, a ``.safetensors``, ``.bin``, ``.pt``,
            ``.pth``, ``.ckpt`` or ``.gguf`` file, ``"smollm2"`` (after ``ov-circuits fetch smollm2``), or a hub name such as
            ``"gpt2"`` or ``"gpt2@main"``. Or what is in memory already: a transformers model (also compiled or data parallel), a
            TransformerLens ``TransformerBridge``, a state dict (with ``config``; tensors or numpy arrays). Its weights are used
            without a copy: open it again after you change them. Half precision becomes float32 layer by layer, when a layer
            is read. Prompts are run on the model or bridge itself.
        config: of a state dict: the content of its ``config.json`` or a transformers config.
        view: weight view; by default ``centred`` for LayerNorm and ``folded`` for RMSNorm models.
        revision: branch, tag or commit of a hub model.
        adapter: a folder with a LoRA adapter of PEFT, put on top of it. Such a folder may also be ``x``; then its own
            config says which base it belongs to.
        device: ``"cuda"`` or ``"cuda:1"``: weights go there as they are read, and prompts run there; by default the CPU. Under
            torchrun ``"cuda"`` is the process's own GPU. A model in memory runs its prompts where it is.

    Returns:
        The model; weights are read when they are asked for. It may be used from several threads, whose prompts run one after
        another. Pickled or copied (for multiprocessing, joblib, ..), it is what opens it again: name or full path, view, device,
        adapter, heads taken out; of a model in memory, that model or its tensors. A copy that would not be the same one is
        refused: the checkpoint there is another by then, :attr:`Model.network` was changed, or it is in a TransformerBridge.

    Raises:
        CircuitsError: nothing is there, it is not a checkpoint of a family in the table, or there is no such device.
    """
    source = _opened(x, config, revision, adapter, device_of(device))
    chosen = default_view(source.architecture) if view is None else check_view(view, source.architecture)
    return Model(source, chosen)


def _opened(x: Any, *how: Any) -> Source:
    """A source that knows how to open itself again."""
    from ov_circuits.checkpoint.locate import lasting

    source = _open(x, *how)
    config, revision, adapter, device = how
    if isinstance(x, Mapping):
        x = dict(x)  # what is put in a tensor's place later is not part of this model
    elif x is None or isinstance(x, (str, os.PathLike)):
        x, adapter = lasting(x), None if adapter is None else lasting(Path(adapter))
    source.reopen = partial(_opened, x, config, revision, adapter, device)
    return source


def _open(
    x: Any, config: Any, revision: str | None, adapter: str | os.PathLike[str] | None, device: torch.device
) -> Source:
    from ov_circuits.checkpoint.in_memory import (
        UNMERGED,
        from_bridge,
        from_network,
        from_tensors,
        is_bridge,
        is_language_model,
        is_network,
        is_peft,
        unwrapped,
    )
    from ov_circuits.checkpoint.locate import open_checkpoint

    if adapter is not None and not (x is None or isinstance(x, (str, os.PathLike))):
        raise CircuitsError(f"an adapter is put on a checkpoint by name or path, not on a {type(x).__name__} in memory")
    if revision is not None and not (x is None or isinstance(x, (str, os.PathLike))):
        raise CircuitsError(f"a revision belongs to a hub name, not to a {type(x).__name__} in memory")
    if isinstance(x, Mapping):
        return Source(from_tensors(x, config), device)
    if config is not None:
        raise CircuitsError("a config belongs to a dictionary of tensors: files and models have their own")
    x = unwrapped(x)
    if is_peft(x):
        raise CircuitsError(f"this {type(x).__name__} {UNMERGED}")
    if is_bridge(x):
        return Source(from_bridge(x), device, bridge=x)
    if is_network(x):
        return Source(from_network(x), device, network=x if is_language_model(x) else None)
    if x is None or isinstance(x, (str, os.PathLike)):
        return Source(open_checkpoint(x, revision, adapter), device)
    raise CircuitsError(
        f"cannot open a {type(x).__name__}: give a name, a path, a transformers model, a TransformerBridge or a state dict, "
        "or nothing for the embedded model"
    )

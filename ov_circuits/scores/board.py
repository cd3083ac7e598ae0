"""The scoreboard: one row a head, every score under its published name.

``SCORES`` (spectra, layer by layer) and :func:`ov_circuits.scores.vocabulary.vocabulary_scores` (over the whole vocabulary) are
the one list of per-head scores: tables, the command line and the pages take names, labels, ranges and sources from it. Each is
also a function of its name in :mod:`ov_circuits.scores`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from ov_circuits.errors import CircuitsError
from ov_circuits.linalg.lowrank import LowRank, Sandwich, Spectrum
from ov_circuits.linalg.memory import give_back
from ov_circuits.linalg.nulls import Null, eigenvalue_copying_null
from ov_circuits.linalg.threads import side_by_side
from ov_circuits.model import Head, Layer, Model
from ov_circuits.modes import ordinary
from ov_circuits.progress import track
from ov_circuits.scores import spectra
from ov_circuits.scores.broken import notes_on
from ov_circuits.scores.chance import NULL_NOTES, Circuits, Draws, LayerDraws, NullKind
from ov_circuits.scores.circuits import NULL_NOTE
from ov_circuits.scores.directions import token_ends
from ov_circuits.scores.papers import ELHAGE
from ov_circuits.scores.pieces import Piece, chunks, most_side_by_side, piece_bytes, pieces
from ov_circuits.scores.saved import SavedPieces, forget
from ov_circuits.scores.vocabulary import VocabularyColumns, VocabularyScore, vocabulary_scores
from ov_circuits.shown import notebook_html
from ov_circuits.words import token_list

# Of a smaller piece the allocator may keep what it has, for the next one: taking fresh memory takes longer than its work.
_KEPT_BYTES = 64 * 2**20


class LayerCircuits:
    """One layer's circuits (or some heads' of it), each built once for all scores that ask for it.

    Heads that are not finite stand as zeros.
    """

    def __init__(self, model: Model, layer: int, heads: range | None = None) -> None:
        self.model = model
        weights = model.layer(layer) if heads is None else model.layer_part(layer, heads)
        self.finite = weights.finite_heads
        self.weights: Layer = weights.finite_part
        self.ov: LowRank = self.weights.ov
        self.qk: LowRank = self.weights.qk

    @cached_property
    def full_ov(self) -> LowRank:
        return Sandwich(self.model.embedding, self.ov, self.model.unembedding.mT, self.model.grams)

    @property
    def value_bias(self) -> Tensor:
        """||b_V W_O|| of each head, zero where there is no bias."""
        layer = self.weights
        if layer.b_V is None:
            return layer.W_O.new_zeros(layer.W_O.shape[0])
        written = torch.einsum("hd,hdm->hm", layer.per_query_head(layer.b_V), layer.W_O)
        return written.double().norm(dim=-1)  # squares of float32 would vanish below 1e-19


@dataclass(frozen=True)
class Score:
    """What a column of the scoreboard is.

    Attributes:
        key: the column's name.
        label: what pages call it.
        group: where pages list it.
        source: the paper or definition.
        note: range, units, pitfalls.
        compute: the layer's circuits -> one number a head, [n_heads].
        needs_embeddings: whether the checkpoint must hold W_E and W_U.
        null: what the number is compared with (:mod:`ov_circuits.scores.chance`), or a function of the layer's circuits and
            a seed.
        diverging: whether zero is the middle of the scale; such scores are odd, and 0 by chance.
        range: the values it can take, where that is a fixed interval.
    """

    key: str
    label: str
    group: str
    source: str
    note: str
    compute: Callable[[Circuits], Tensor]
    null: NullKind | Callable[[LayerCircuits, int], Null] = "factors"
    needs_embeddings: bool = False
    diverging: bool = False
    range: tuple[float, float] | None = None


def _residual_copying_null(circuits: LayerCircuits, seed: int) -> Null:
    """Of eigenvalue copying in residual space."""
    return eigenvalue_copying_null(circuits.ov.singular_values, circuits.weights.W_O.shape[-1], seed=seed)


def _of_spectrum(
    name: str, matrix: str, circuit: Callable[[Circuits], Spectrum], *notes: str, scale: str = "", **more: Any
) -> Iterator[Score]:
    """Norms and effective ranks of one of a head's circuits, with a note each; norms need no singular values if asked alone."""
    numbers: dict[str, tuple[str, Callable[[Spectrum], Tensor]]] = {
        "Frobenius norm": (f"‖{matrix}‖_F{scale}", lambda m: m.frobenius_norm),
        "spectral norm": (f"‖{matrix}‖_2{scale}", lambda m: m.spectral_norm),
        "stable rank": ("‖M‖_F² / ‖M‖_2²", lambda m: spectra.stable_rank(m.singular_values)),
        "participation ratio": ("(Σ s²)² / Σ s⁴", lambda m: spectra.participation_ratio(m.singular_values)),
        "entropy rank": (
            "Roy & Vetterli 2007, The effective rank",
            lambda m: spectra.entropy_rank(m.singular_values),
        ),
    }
    for (kind, (source, number)), note in zip(numbers.items(), notes, strict=True):
        label = f"{name} {kind}"
        key = label.lower().replace(" ", "_")
        yield Score(key, label, f"{name} spectrum", source, note, _of(circuit, number), **more)


def _of(circuit: Callable[[Circuits], Spectrum], number: Callable[[Spectrum], Tensor]) -> Callable[[Circuits], Tensor]:
    return lambda circuits: number(circuit(circuits))


_ONE_OFFSET = "For rotary models at offset 0, one of many."
_NORMAL = "OV is not normal: a large eigenvalue need not mean a large effect, and the score does not say which tokens."

SCORES: dict[str, Score] = {
    score.key: score
    for score in (
        Score(
            "eigen_copying_full",
            "Eigenvalue copying, vocabulary",
            "Copying",
            ELHAGE,
            f"sum λ / sum |λ| over the d_head non-zero eigenvalues of W_E W_V W_O W_U. {_NORMAL} "
            "A shift that all logits share counts here, though no softmax sees it: read it beside its null.",
            lambda c: spectra.eigenvalue_copying(c.full_ov.eigenvalues),
            null="rotation",
            needs_embeddings=True,
            diverging=True,
            range=(-1.0, 1.0),
        ),
        Score(
            "eigen_copying_ov",
            "Eigenvalue copying, residual space",
            "Copying",
            f"after {ELHAGE}, whose score is of the full circuit",
            f"sum λ / sum |λ| over the d_head non-zero eigenvalues of W_V W_O. {_NORMAL}",
            lambda c: spectra.eigenvalue_copying(c.ov.eigenvalues),
            null=_residual_copying_null,
            diverging=True,
            range=(-1.0, 1.0),
        ),
        *_of_spectrum(
            "OV",
            "W_V W_O",
            lambda c: c.ov,
            "Size of what the head can move through the residual stream, in the result's weight view.",
            "The largest singular value of W_V W_O.",
            "Between 1 and d_head: how many directions carry W_V W_O.",
            "Between 1 and d_head: how many directions share the energy of W_V W_O.",
            "exp of the entropy of the normalised singular values; between 1 and d_head.",
        ),
        *_of_spectrum(
            "Full OV",
            "W_E W_V W_O W_U",
            lambda c: c.full_ov,
            "Over the whole vocabulary, exact, from the Gram matrices of W_E and W_U.",
            "The largest singular value over the whole vocabulary.",
            "Between 1 and d_head. Values near 1 often mean that one direction all tokens share dominates.",
            "Between 1 and d_head: how many directions share the energy over the whole vocabulary.",
            "exp of the entropy of the normalised singular values over the whole vocabulary; between 1 and d_head.",
            null="rotation",
            needs_embeddings=True,
        ),
        *_of_spectrum(
            "QK",
            "W_Q W_Kᵀ",
            lambda c: c.qk,
            f"Times 1/√d_head. {_ONE_OFFSET}",
            f"The largest singular value, times 1/√d_head. {_ONE_OFFSET}",
            *[f"Between 1 and d_head. {_ONE_OFFSET}"] * 3,
            scale=" · score scale",
        ),
        Score(
            "value_bias_norm",
            "Value bias written",
            "Biases",
            "‖b_V W_O‖",
            "What the head writes at every position whatever it attends to, as attention rows sum to one.",
            lambda c: c.value_bias,
        ),
    )
}


class Scoreboard(pd.DataFrame):
    """A plain frame that a notebook shows with its map of heads; what is cut out of it stays one."""

    @property
    def _constructor(self) -> type[Scoreboard]:
        return Scoreboard

    def _repr_html_(self) -> str | None:
        shown = notebook_html("board_html", self)
        return super()._repr_html_() if shown is None else shown  # type: ignore[misc]


TOKEN_COLUMNS = ("reads_plus", "writes_plus", "reads_minus", "writes_minus")


class Board:
    """The scoreboard of weights: in pieces, each computed on its own, in any order, in any process, today or tomorrow.

    Args:
        model: the checkpoint, in the weight view that the scores are to have.
        scores: names from ``SCORES`` (spectra: milliseconds a head) and from
            :func:`ov_circuits.scores.vocabulary.vocabulary_scores` (over the whole vocabulary: up to a second a head);
            ``"all"`` for both; None for all of ``SCORES`` that the checkpoint allows.
        tokens, nulls, source, seed: as of :func:`ov_circuits.scoreboard`.

    Raises:
        CircuitsError: an unknown score or source, a source that no score reads, or a named score that the checkpoint does
            not allow: all that can be refused is refused here.
    """

    def __init__(
        self,
        model: Model,
        scores: Sequence[str] | str | None = None,
        tokens: int = 5,
        *,
        nulls: bool = True,
        source: str = "embed",
        seed: int = 0,
    ) -> None:
        self.model, self.nulls, self.source, self.seed = model, nulls, source, seed
        self.tokens = tokens if model.has_embeddings else 0
        self.by_layer, self.over_vocabulary = _chosen(model, scores)
        self._check_source()
        self.left_out = _left_out(model) if scores is None or scores == "all" else {}
        self._vocabulary = None
        if self.over_vocabulary:
            self._vocabulary = VocabularyColumns(model, self.over_vocabulary, source, nulls)
            why_not = self._vocabulary.why_not
            if why_not and scores != "all":
                raise CircuitsError(next(iter(why_not.values())))
            self.left_out |= why_not

    def _check_source(self) -> None:
        """A source embedding that no score reads is refused, not passed over."""
        known = vocabulary_scores()
        if self.source != "embed" and not any(known[key].family == "rank_copying" for key in self.over_vocabulary):
            raise CircuitsError(
                f"the source {self.source!r} is that of rank copying, which is not among the scores: ask for rank_copying_1 "
                "or another of its family, or for all"
            )

    @cached_property
    def _draws(self) -> Draws | None:
        """The nulls' rotations; with them, what all pieces share is made before they run side by side."""
        if self.needs_grams:
            _ = self.model.grams.read_half, self.model.grams.write_half
        wanted = self.nulls and self.by_layer
        return Draws(self.model, seed=self.seed, vocabulary=self.needs_grams) if wanted else None

    @property
    def needs_grams(self) -> bool:
        """Whether the Gram matrices of the embeddings are asked for."""
        return any(score.needs_embeddings for score in self.by_layer)

    @property
    def most_side_by_side(self) -> int:
        """How many pieces may be worked on at a time, for their memory; makes what they share."""
        _ = self._draws
        if self.model.device.type != "cpu":  # one piece fills it
            return 1
        return most_side_by_side(self.model.architecture, self._piece_bytes)

    @cached_property
    def _piece_bytes(self) -> int:
        return piece_bytes(self.model.architecture, self.tokens > 0, self._vocabulary is not None)

    def computed(self, resume: str | os.PathLike[str] | None = None, *, keep: bool = False) -> Scoreboard:
        """All pieces in this process, as a frame; arguments and errors as of :func:`ov_circuits.scoreboard`."""
        work = pieces(self.model.architecture)
        saved = None if resume is None else self.saved(resume)
        if saved is not None:
            saved.announce(work)
        frame = self.frame(self.parts(work, saved))
        if resume is not None and not keep:
            forget(resume)
        return frame

    def saved(self, target: str | os.PathLike[str]) -> SavedPieces:
        """The pieces of this very board that an earlier run has finished; see :mod:`ov_circuits.scores.saved`."""
        scores = [score.key for score in self.by_layer]
        arguments = dict(
            scores=scores,
            over_vocabulary=self.over_vocabulary,
            tokens=self.tokens,
            nulls=self.nulls,
            source=self.source,
        )
        return SavedPieces(target, self.model, arguments | {"seed": self.seed})

    def parts(self, work: list[Piece], saved: SavedPieces | None = None) -> Iterator[pd.DataFrame]:
        """The rows of each piece in order, computed side by side, or read where an earlier run has saved them."""
        compute = self.rows if saved is None else partial(saved.rows, compute=self.rows)
        finished = 0 if saved is None else len(saved.finished(work))
        # What all pieces share is made before they run side by side, unless nothing is left to do.
        most = self.most_side_by_side if finished < len(work) else None
        yield from track(side_by_side(compute, work, most), "Scoring heads", total=len(work))

    def rows(self, piece: Piece) -> pd.DataFrame:
        """One row a head of a piece, and ``finite``: whether its weights are."""
        found = [self._spectra(piece.layer, heads) for heads in chunks(self.model.architecture, piece.heads)]
        frame = pd.concat([part.columns for part in found], ignore_index=True)
        if self.tokens:
            U, V = (torch.cat([getattr(part, side) for part in found]) for side in ("U", "V"))
            ends = token_ends(self.model, U, V, self.tokens)
            sides = (ends[0].plus, ends[1].plus, ends[0].minus, ends[1].minus)
            for name, ids in zip(TOKEN_COLUMNS, sides, strict=True):
                frame[name] = [
                    token_list(self.model, row) if ok else []
                    for row, ok in zip(ids[:, 0].tolist(), frame["finite"], strict=True)
                ]
        if self._vocabulary is not None:
            frame = pd.concat([frame, self._vocabulary.of(piece.layer, piece.heads)], axis=1)
        del found
        if self._piece_bytes > _KEPT_BYTES:
            give_back()
        return frame

    def frame(self, parts: Iterable[pd.DataFrame]) -> Scoreboard:
        """The board, from the rows of all pieces in order."""
        together = pd.concat(list(parts), ignore_index=True)
        not_finite = list(together.loc[~together["finite"], "head"])
        frame = Scoreboard(together.drop(columns="finite"))
        known = all_scores()
        shown = [key for key in known if key in frame]
        frame.attrs = {
            "model": self.model.name,
            "view": self.model.view,
            "source_embedding": self.source,
            "sources": {key: known[key].source for key in shown},
            "nulls": {key: null_note(key) for key in shown} if self.nulls else {},
            "not_finite": not_finite,
            "notes": notes_on(self.model, not_finite),
            "left_out": self.left_out,
        }
        return frame

    def _spectra(self, layer: int, heads: range) -> _Spectra:
        """The layer-by-layer scores of a few heads."""
        circuits = LayerCircuits(self.model, layer, heads)
        finite, draws, a = circuits.finite, self._draws, self.model.architecture
        columns: dict[str, object] = {
            "head": [f"{layer}.{index}" for index in heads],
            "layer": layer,
            "index": heads,
            "kv_head": [index // a.group_size for index in heads],
            "finite": finite.tolist(),
        }
        chance = None if draws is None else LayerDraws(draws, circuits.weights, circuits.ov, circuits.qk)
        for score in self.by_layer:
            value = score.compute(circuits).double().where(finite, torch.nan)
            columns[score.key] = value.numpy(force=True)
            if draws is not None and chance is not None:
                kind = score.null
                null = (
                    chance.null(kind, score.compute, odd=score.diverging)
                    if isinstance(kind, str)
                    else kind(circuits, draws.seed)
                )
                columns[f"{score.key}_null_mean"] = null.mean.where(finite, torch.nan).numpy(force=True)
                columns[f"{score.key}_z"] = null.z(value).numpy(force=True)
        leading = circuits.ov.singular_pairs(1) if self.tokens else None
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        return _Spectra(pd.DataFrame(columns), *((leading.U, leading.V) if leading else (nothing, nothing)))


@dataclass(frozen=True, eq=False)
class _Spectra:
    """Rows of a few heads, and their leading singular vectors [head, d_model, 1] where tokens are to be shown."""

    columns: pd.DataFrame
    U: Tensor
    V: Tensor


def all_scores() -> dict[str, Score | VocabularyScore]:
    """Every column that the board can have, by name."""
    return {**SCORES, **vocabulary_scores()}


def null_note(key: str) -> str:
    """What a score is compared with, in words."""
    if key not in SCORES:
        return NULL_NOTE
    kind = SCORES[key].null
    return NULL_NOTES[kind if isinstance(kind, str) else "rotation"]


def head_scores(head: Head, seed: int = 0) -> pd.Series:
    """One head's row of the board: the spectra, each with its null and z."""
    rows = Board(head.model, tokens=0, seed=seed).rows(Piece(head.layer, range(head.index, head.index + 1)))
    return rows.drop(columns="finite").iloc[0]


@ordinary
def score_frame(key: str, model: Model, **options: Any) -> pd.DataFrame:
    """One score for every head: ``head, layer, index, kv_head``, the score, its null and z; options as of :class:`Board`."""
    return Board(model, [key], tokens=0, **options).computed()


def _chosen(model: Model, names: Sequence[str] | str | None) -> tuple[list[Score], list[str]]:
    """The asked scores: those computed layer by layer, and the names of those over the vocabulary."""
    possible = [score for score in SCORES.values() if model.has_embeddings or not score.needs_embeddings]
    if names is None:
        return possible, []
    known = all_scores()
    if names == "all":
        return possible, list(vocabulary_scores()) if model.has_embeddings else []
    asked = [names] if isinstance(names, str) else list(names)
    for name in asked:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise CircuitsError(f"there is no score {name!r}{hint} The scores are: {', '.join(known)}, or all")
        if known[name].needs_embeddings and not model.has_embeddings:
            raise CircuitsError(f"the score {name} needs embeddings: {model.why_no_vocabulary}")
    return [SCORES[name] for name in asked if name in SCORES], [name for name in asked if name not in SCORES]


def _left_out(model: Model) -> dict[str, str]:
    """The scores that a checkpoint without embeddings does not allow."""
    reason = model.why_no_vocabulary
    if reason is None:
        return {}
    return {key: reason for key, score in all_scores().items() if score.needs_embeddings}

"""What the weights say about where a head looks: spectra of QK, its strongest token pairs, and what positions alone do.

QK is W_Q W_K^T times the score scale; rows are queries. Rotary models have one QK matrix for each distance ``offset`` between
query and key, W_Q R(offset) W_K^T (the query stands ``offset`` positions after the key): every result names its own.
Biases are left out of matrices and pairs, and put in where positions are concerned. Where queries and keys pass a norm before
they meet (Qwen 3, OLMo 2), matrices hold its gain (unless raw) and not its scale, which is a token's own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Complex, Float
from torch import Tensor

from ov_circuits.checkpoint.norms import normalised
from ov_circuits.checkpoint.positions import Turn, turn
from ov_circuits.errors import CircuitsError
from ov_circuits.linalg.lowrank import LowRank
from ov_circuits.linalg.nulls import Null, eigenvalue_copying_null
from ov_circuits.linalg.rotary import rotate
from ov_circuits.model import Head, Layer, Model
from ov_circuits.scores import spectra
from ov_circuits.scores.broken import broken_tensors, need_finite
from ov_circuits.scores.chance import Draws, LayerDraws
from ov_circuits.scores.pairs import need_embeddings, pair_frame
from ov_circuits.scores.papers import ELHAGE, ROFORMER

# Rows at a time: a norm of queries may need those of all heads.
_BLOCK = 2048


_OF_SINGULAR_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "qk_frobenius_norm": lambda S: S.square().sum(-1).sqrt(),
    "qk_spectral_norm": lambda S: S[..., 0],
    "qk_stable_rank": spectra.stable_rank,
    "qk_participation_ratio": spectra.participation_ratio,
    "qk_entropy_rank": spectra.entropy_rank,
}


@dataclass(frozen=True)
class QKSpectra:
    """Spectra of all heads' QK matrices.

    Attributes:
        model: the model's name.
        labels: head names, the order of rows.
        view: weight view.
        offset: distance of query and key for rotary models, else None.
        singular_values: [head, k], falling.
        eigenvalues: [head, d_head], by falling magnitude.
        nulls: what each column of :meth:`frame` would be by chance, by name, [head].
        notes: what a reader must know.
    """

    model: str
    labels: list[str]
    view: str
    offset: int | None
    singular_values: Float[Tensor, "head k"]
    eigenvalues: Complex[Tensor, "head d_head"]
    nulls: dict[str, Null]
    notes: list[str]

    def frame(self) -> pd.DataFrame:
        """One row a head: norms, ranks, and the eigenvalue score in [-1, 1] (Elhage et al. 2021, "Summarizing OV/QK Matrices").

        ``qk_eigen_matching`` = sum(lambda) / sum(|lambda|): near 1, a residual stream attends to others that hold the same.
        Each column is followed by ``.._null_mean`` and ``.._z``: norms and ranks where W_Q and W_K keep their singular values
        and meet inside the head at random, the eigenvalue score where the head's own singular values read random directions.
        """
        values = {name: of(self.singular_values) for name, of in _OF_SINGULAR_VALUES.items()}
        values["qk_eigen_matching"] = spectra.eigenvalue_copying(self.eigenvalues)
        columns: dict[str, Tensor] = {}
        for name, value in values.items():
            null = self.nulls[name]
            columns |= {name: value, f"{name}_null_mean": null.mean.where(value.isfinite(), torch.nan)}
            columns[f"{name}_z"] = null.z(value)
        frame = pd.DataFrame({"head": self.labels} | {name: column.numpy() for name, column in columns.items()})
        frame.attrs = {
            "model": self.model,
            "view": self.view,
            "offset": self.offset,
            "source": ELHAGE,
            "notes": self.notes,
        }
        return frame


def qk_spectra(model: Model, offset: int = 0, seed: int = 0) -> QKSpectra:
    """Singular values and eigenvalues of every head's QK, at a distance of query and key for rotary models (Elhage et al. 2021).

    Args:
        model: in the weight view that the circuits are to have.
        offset: for rotary models, how many positions the query stands after the key.
        seed: of the nulls' random rotations.

    Returns:
        Spectra of all heads; ``.frame()`` is one row a head. Heads with weights that are not finite have NaN, and their
        tensors are named in ``notes``.

    Raises:
        CircuitsError: an offset for a model without rotary positions, or a negative one.
    """
    singular, eigen, notes = [], [], []
    draws, nulls = Draws(model, seed=seed, vocabulary=False), defaultdict(list)
    for layer in model.layers():
        qk = _qk(model, layer, offset)
        finite = (qk.left.isfinite().all(-1).all(-1) & qk.right.isfinite().all(-1).all(-1))[:, None]
        if not finite.all():
            notes += broken_tensors(model, layer.index, biases=False)
            qk = LowRank(torch.where(finite[..., None], qk.left, 0.0), torch.where(finite[..., None], qk.right, 0.0))
        for name, null in _by_chance(draws, layer, qk).items():
            nulls[name].append(null)
        singular.append(torch.where(finite, qk.singular_values, torch.nan))
        eigen.append(torch.where(finite, qk.eigenvalues, torch.nan))
    return QKSpectra(
        model=model.name,
        labels=model.head_labels,
        view=model.view,
        offset=_named_offset(model, offset),
        singular_values=torch.cat(singular).cpu(),
        eigenvalues=torch.cat(eigen).cpu(),
        nulls={
            name: Null(torch.cat([n.mean for n in parts]).cpu(), torch.cat([n.std for n in parts]).cpu())
            for name, parts in nulls.items()
        },
        notes=notes,
    )


def _by_chance(draws: Draws, layer: Layer, qk: LowRank) -> dict[str, Null]:
    """A layer's nulls. Turning queries by an offset before a Haar rotation turns them leaves its distribution as it is."""
    chance, S = LayerDraws(draws, layer.finite_part, layer.finite_part.ov, qk), qk.singular_values
    found = {
        name: chance.null("factors", lambda c, of=of: of(c.qk.singular_values), odd=False)  # type: ignore[misc]
        for name, of in _OF_SINGULAR_VALUES.items()
    }
    found["qk_eigen_matching"] = eigenvalue_copying_null(S, layer.W_O.shape[-1], seed=draws.seed)
    return found


def largest_query_key_pairs(model: Model, head: str | Head, k: int = 20, offset: int = 0) -> pd.DataFrame:
    """The ``k`` largest and ``k`` smallest entries of W_E W_QK(offset) W_E^T, exact over all pairs of tokens.

    Pre-softmax scores of a query token for a key token, up to the scale that the reading norm gives each of them
    (Elhage et al. 2021).

    Args:
        model: in the weight view that the circuit is to have.
        head: label or head.
        k: pairs at each end.
        offset: for rotary models, how many positions the query stands after the key.

    Returns:
        Columns ``end`` (``positive`` or ``negative``), ``query``, ``query_id``, ``key``, ``key_id``, ``value``. ``attrs``:
        model, head, view, circuit, offset (None without rotary positions), visited.

    Raises:
        CircuitsError: unknown head, no embeddings, an offset where there are no rotary positions, weights not finite.
    """
    chosen = model.head(head)
    need_embeddings(model, "query-key token pairs")
    need_finite(chosen, "token pairs")
    qk = _qk(model, model.layer(chosen.layer), offset)[chosen.index]
    queries, keys = model.embedding @ qk.left.float(), model.embedding @ qk.right.mT.float()
    frame = pair_frame(model, queries, keys.mT, k, ("query", "key"))
    frame.attrs |= {
        "head": chosen.label,
        "circuit": "W_E W_QK W_E^T",
        "offset": _named_offset(model, offset),
        "source": ELHAGE,
    }
    return frame


def position_pattern(model: Model, head: str | Head) -> Float[Tensor, "query key"]:
    """The attention pattern of a head from learned positions alone, [n_ctx, n_ctx], causal, rows sum to one. float64.

    The residual stream is taken to hold W_pos and nothing else: each row is normalised as LayerNorm would normalise it (its
    own mean and variance, the config's epsilon, gain and bias), then queries and keys with their biases, the score scale and
    the causal softmax. The same in every weight view.

    Args:
        model: a model with learned positions, any view.
        head: label or head.

    Returns:
        Attention from each position (row) to each other, [n_ctx, n_ctx].

    Raises:
        CircuitsError: unknown head; rotary positions, which are no vectors in the residual stream; weights not finite.
    """
    chosen = model.head(head)
    if model.architecture.positions == "rotary":
        raise CircuitsError(
            f"{model.name} has rotary positions: no vectors in the residual stream stand for them, so there is no pattern from "
            "positions alone; use offset_profile, the mean score at each distance of query and key"
        )
    positions = model.in_view("raw").W_pos
    if positions is None:
        raise CircuitsError(f"{model.name} has no position embeddings")
    need_finite(chosen, "pattern")
    if not bool(positions.isfinite().all()):
        raise CircuitsError(f"the position embeddings of {model.name} hold NaN or infinity")
    q, k = _queries_and_keys(model, chosen, positions)
    scores = q @ k.mT
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1)


def offset_profile(model: Model, head: str | Head, offsets: Sequence[int] = tuple(range(65))) -> pd.DataFrame:
    """What rotary positions do: a head's mean pre-softmax score at each distance of query and key.

    Token embeddings stand for the residual stream, each normalised as the reading norm would, biases included; rotations as of
    Su et al. 2021, "RoFormer".

    Args:
        model: a model with rotary positions, any view.
        head: label or head.
        offsets: distances, 0 for a token that looks at itself.

    Returns:
        Columns ``offset`` (the query stands that many positions after the key), ``mean`` (over all pairs of vocabulary
        tokens), ``same_token`` (over pairs of equal tokens).

    Raises:
        CircuitsError: unknown head, no rotary positions, no embeddings, weights not finite.
    """
    chosen = model.head(head)
    need_embeddings(model, "offset profiles")
    turned_by = _turn(model, chosen.layer)
    if turned_by is None:
        why = (
            "position_pattern shows what its learned positions do"
            if model.W_pos is not None
            else "there is nothing to show"
        )
        raise CircuitsError(f"{model.name} has no rotary positions in layer {chosen.layer}; {why}")
    need_finite(chosen, "offset profile")
    q, k = _queries_and_keys(model, chosen, model.in_view("raw").W_E)
    same = q.mT @ k / len(q)  # trace of R(offset)^T (q^T k): the mean over tokens of a token's score for itself
    records = []
    for offset in offsets:
        turned = _turned(torch.eye(q.shape[-1], dtype=torch.float64, device=q.device), _distance(offset), turned_by)
        records.append((offset, float(q.mean(0) @ turned @ k.mean(0)), float((turned * same).sum())))
    frame = pd.DataFrame(records, columns=["offset", "mean", "same_token"])
    frame.attrs = {
        "model": model.name,
        "head": chosen.label,
        "view": "raw",
        "source_embedding": "embed, normalised; biases included",
        "source": ROFORMER,
    }
    return frame


def _queries_and_keys(model: Model, head: Head, stream: Tensor) -> tuple[Tensor, Tensor]:
    """Scaled queries and keys [n, d_head] of residual-stream rows [n, d_model], normalised by their own scale. float64."""
    layer = model.in_view("raw").layer(head.layer)
    norm = model.source.attention_norm(head.layer)
    queries, keys = [], []
    for rows in stream.split(_BLOCK):
        x = rows.double() if norm.kind is None else normalised(rows.double(), norm.kind, norm.eps, norm.gain, norm.bias)
        queries.append(layer.queries(x, head.index) * layer.score_scale)
        keys.append(layer.keys(x, head.kv_head))
    return torch.cat(queries), torch.cat(keys)


def _qk(model: Model, layer: Layer, offset: int) -> LowRank:
    """All heads' QK of a layer at a distance of query and key."""
    if model.architecture.positions != "rotary":
        if offset:
            raise CircuitsError(
                f"{model.name} has no rotary positions ({model.architecture.positions}): its QK matrix does not depend on an offset"
            )
        return layer.qk
    turned_by = _turn(model, layer.index)
    if turned_by is None or (offset == 0 and turned_by.scale == 1):
        return layer.qk
    return LowRank(_turned(layer.qk.left, _distance(offset), turned_by), layer.qk.right.double())


def _turned(queries: Tensor, offset: int, by: Turn) -> Tensor:
    """Queries [..., n, d_head] turned as much as they are beyond keys ``offset`` positions before them."""
    distance = torch.full((queries.shape[-2],), offset, device="cpu")
    return rotate(queries, distance, by.frequencies, interleaved=by.interleaved, scale=by.scale**2)


def _named_offset(model: Model, offset: int) -> int | None:
    return offset if model.architecture.positions == "rotary" else None


def _distance(offset: int) -> int:
    if offset < 0:
        raise CircuitsError(f"the offset is how far the query stands after the key: it cannot be {offset}")
    return offset


def _turn(model: Model, layer: int) -> Turn | None:
    """What a layer's rotary positions do; None where it has none."""
    rotary, checkpoint = model.architecture.rotary_of(layer), model.source.checkpoint
    return None if rotary is None else turn(rotary, checkpoint.config, checkpoint.where)

"""Singular directions read through the vocabulary (Millidge & Black 2022, "The Singular Value Decompositions of Transformer
Weight Matrices are Highly Interpretable").

W_V W_O = U diag(S) V^T. A left vector u is what the head reads: token t excites it by W_E[t] . u. The right vector v is what
it then writes: logits move along v^T W_U. The sign of a pair (u, v) is arbitrary, so both ends are read out: whatever excites
+u writes +v, whatever excites -u writes -v. Where neighbouring singular values are nearly equal, only their span means
something; such pairs are marked as not separable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ov_circuits.errors import CircuitsError, whole_number
from ov_circuits.linalg.rows import Rows
from ov_circuits.model import Head, Model
from ov_circuits.scores.broken import need_finite
from ov_circuits.scores.pairs import need_embeddings
from ov_circuits.scores.papers import ELHAGE
from ov_circuits.scores.papers import MILLIDGE as SOURCE
from ov_circuits.token_frame import TokenFrame
from ov_circuits.words import token_id, token_text

# Neighbouring singular values closer than this, relative to the larger, leave single vectors undetermined.
SEPARABLE_GAP = 1e-2


@dataclass(frozen=True)
class Ends:
    """The strongest tokens at both ends of directions: ids and projections, [..., n], strongest first at either end."""

    plus: Int[Tensor, "*direction n"]
    plus_values: Float[Tensor, "*direction n"]
    minus: Int[Tensor, "*direction n"]
    minus_values: Float[Tensor, "*direction n"]


@dataclass(frozen=True)
class Directions:
    """The leading singular directions of the heads of one layer, with tokens at both ends.

    Attributes:
        values: singular values of W_V W_O, [n_heads, k]; NaN for a head whose weights are not finite.
        energy: share of ||W_V W_O||_F^2 in each pair, [n_heads, k]; NaN for a head that is zero or not finite.
        separable: whether a pair stands apart from its neighbours, [n_heads, k].
        reads: tokens by W_E @ u; writes: tokens by v @ W_U; each [n_heads, k, n].
    """

    values: Float[Tensor, "head k"]
    energy: Float[Tensor, "head k"]
    separable: Bool[Tensor, "head k"]
    reads: Ends
    writes: Ends


def directions(model: Model, layer: int, k: int = 6, tokens: int = 8) -> Directions:
    """The ``k`` leading singular pairs of every head of a layer, each end with its ``tokens`` strongest tokens.

    A pair's sign is fixed so that the token with the largest projection on either end of the reading side is on the plus
    end; reading and writing sides are flipped together (Millidge & Black 2022).

    Args:
        model: in the weight view that the circuits are to have.
        layer: which layer's heads.
        k: how many singular pairs of each head, largest first.
        tokens: how many at each end.

    Returns:
        Singular values, shares of energy, which pairs stand apart, and token ids with projections, [n_heads, k, ..].

    Raises:
        CircuitsError: the checkpoint holds no embeddings.
    """
    need_embeddings(model, "singular directions read as tokens")
    k = whole_number("k", k, 1)
    finite = model.layer(layer).finite_heads.unsqueeze(-1)
    ov = model.layer(layer).finite_part.ov
    pairs = ov.singular_pairs(k)
    S = pairs.S
    reads, writes = token_ends(model, pairs.U, pairs.V, tokens)
    return Directions(
        values=S.where(finite, torch.nan),
        energy=S.square() / ov.frobenius_norm.square().unsqueeze(-1),
        separable=separable(ov.singular_values)[..., : S.shape[-1]],
        reads=reads,
        writes=writes,
    )


def token_ends(
    model: Model, U: Float[Tensor, "head d_model k"], V: Float[Tensor, "head d_model k"], tokens: int
) -> tuple[Ends, Ends]:
    """What singular pairs read and write: the strongest tokens at both ends, the signs of pairs as of :func:`directions`."""
    read = _project(model.embedding, U.float())
    write = _project(model.unembedding, V.float())
    flipped = read.amax(-1) < -read.amin(-1)
    sign = torch.where(flipped, -1.0, 1.0).unsqueeze(-1)
    return _ends(read * sign, tokens), _ends(write * sign, tokens)


def separable(singular_values: Float[Tensor, "*head k"]) -> Bool[Tensor, "*head k"]:
    """Whether each singular value is apart from both neighbours by more than ``SEPARABLE_GAP`` of the larger one."""
    gaps = singular_values[..., :-1] - singular_values[..., 1:] > SEPARABLE_GAP * singular_values[..., :-1]
    edge = torch.ones_like(gaps[..., :1]) if gaps.shape[-1] else torch.ones_like(singular_values, dtype=torch.bool)
    return (torch.cat([edge, gaps], -1) & torch.cat([gaps, edge], -1)) if gaps.shape[-1] else edge


def _project(vocabulary: Rows, vectors: Tensor) -> Tensor:
    """[n_vocab, d_model] and [head, d_model, k] -> [head, k, n_vocab], as one product."""
    heads, _, k = vectors.shape
    return (vectors.mT.flatten(0, 1) @ vocabulary.mT).unflatten(0, (heads, k))


def _ends(projections: Tensor, n: int) -> Ends:
    """[head, k, n_vocab] -> the ``n`` strongest tokens at both ends."""
    n = min(whole_number("the number of tokens", n, 1), projections.shape[-1])
    plus, minus = projections.topk(n, largest=True), projections.topk(n, largest=False)
    return Ends(plus.indices, plus.values, minus.indices, minus.values)


def writes(head: Head, token: str | int, k: int = 10) -> pd.DataFrame:
    """What a head writes when it attends to ``token``: the ``k`` most raised and ``k`` most lowered tokens.

    The row W_E[token] W_V W_O W_U of the full OV circuit, exact over the vocabulary. The norm's scale is left out: it
    multiplies the whole row.

    Returns:
        Columns ``end`` (``raised`` or ``lowered``), ``id``, ``token``, ``value``.

    Raises:
        CircuitsError: no such token, no embeddings, or weights that are not finite.
    """
    model = head.model
    need_embeddings(model, "logits that a head writes")
    need_finite(head, "row to show")
    index = token_id(model, token)
    row = (model.embedding[index] @ head.ov) @ model.unembedding.mT
    return _ends_frame(head, row, k, ("raised", "lowered"), index)


def reads(head: Head, k: int = 10, direction: int = 0) -> pd.DataFrame:
    """Which tokens excite one of a head's singular directions (the leading one by default), and what it then writes.

    Returns:
        Columns ``end`` (``+`` or ``-``), ``side`` (``read`` or ``write``), ``id``, ``token``, ``value`` (projection of the
        token's embedding or unembedding on the direction).

    Raises:
        CircuitsError: no such direction, no embeddings, or weights that are not finite.
    """
    direction = whole_number("a direction", direction, 0)
    need_finite(head, "singular directions")
    found = directions(head.model, head.layer, k=direction + 1, tokens=k)
    if direction >= found.values.shape[-1]:
        raise CircuitsError(f"head {head.label} has {found.values.shape[-1]} singular directions, not {direction + 1}")
    rows = []
    for side, ends in (("read", found.reads), ("write", found.writes)):
        for end, ids, values in (("+", ends.plus, ends.plus_values), ("-", ends.minus, ends.minus_values)):
            for token, value in zip(
                ids[head.index, direction].tolist(), values[head.index, direction].tolist(), strict=True
            ):
                rows.append((end, side, token, token_text(head.model, token), value))
    frame = TokenFrame(rows, columns=["end", "side", "id", "token", "value"])
    frame.attrs |= _attrs(head, SOURCE) | {"direction": direction}
    return frame


def inseparable_runs(singular_values: Float[Tensor, " k"]) -> list[range]:
    """Runs of pairs whose neighbouring singular values are nearly equal: within one, only the span means something."""
    close = (singular_values[:-1] - singular_values[1:] <= SEPARABLE_GAP * singular_values[:-1]).tolist()
    runs, start = [], 0
    for index, joined in enumerate([*close, False]):
        if not joined:
            if index > start:
                runs.append(range(start, index + 1))
            start = index + 1
    return runs


def span(head: Head, pairs: Sequence[int], k: int = 10) -> pd.DataFrame:
    """The tokens that lie most in the span of several singular pairs: what can be said where single vectors cannot.

    A token's place on the reading side is the length of W_E[t] projected onto the left vectors, on the writing side that of
    W_U[:, t] onto the right vectors. It does not depend on how the span's basis is chosen, and has no sign.

    Args:
        head: whose W_V W_O.
        pairs: which pairs, 0 for the largest singular value; :func:`inseparable_runs` finds runs that belong together.
        k: tokens a side.

    Returns:
        Columns ``side`` (``read`` or ``write``), ``id``, ``token``, ``value`` (length of the projection), ``share`` (of the
        token's own length).

    Raises:
        CircuitsError: no embeddings, no such pairs, or weights that are not finite.
    """
    model = head.model
    need_embeddings(model, "spans read as tokens")
    need_finite(head, "singular directions")
    vectors = head.ov.singular_pairs()
    chosen = sorted(set(pairs))
    if not chosen or not (0 <= chosen[0] and chosen[-1] < vectors.S.shape[-1]):
        raise CircuitsError(f"head {head.label} has singular pairs 0 to {vectors.S.shape[-1] - 1}, not {list(pairs)}")
    records = []
    for side, vocabulary, basis in (("read", model.embedding, vectors.U), ("write", model.unembedding, vectors.V)):
        lengths = (vocabulary @ basis[:, chosen].float()).norm(dim=-1)
        best = lengths.topk(min(whole_number("k", k, 1), lengths.numel()))
        shares = best.values / vocabulary[best.indices].norm(dim=-1)
        for token, value, share in zip(best.indices.tolist(), best.values.tolist(), shares.tolist(), strict=True):
            records.append((side, token, token_text(model, token), value, share))
    frame = TokenFrame(records, columns=["side", "id", "token", "value", "share"])
    frame.attrs |= _attrs(head, SOURCE) | {"pairs": chosen}
    return frame


def _attrs(head: Head, source: str) -> dict[str, Any]:
    return {"model": head.model.name, "view": head.model.view, "head": head.label, "source": source}


def _ends_frame(head: Head, row: Tensor, k: int, names: tuple[str, str], token: int) -> pd.DataFrame:
    model = head.model
    k = min(whole_number("k", k, 1), row.shape[-1])
    records = []
    for name, best in ((names[0], row.topk(k)), (names[1], row.topk(k, largest=False))):
        for token, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            records.append((name, token, token_text(model, token), value))
    frame = TokenFrame(records, columns=["end", "id", "token", "value"])
    frame.attrs |= _attrs(head, ELHAGE) | {"circuit": "W_E W_V W_O W_U", "source_token": token_text(model, token)}
    return frame

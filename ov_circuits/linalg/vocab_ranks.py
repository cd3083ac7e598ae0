"""Where each row's own logit stands among all logits of its row, for logits L = A B that are never formed.

Row i of L [n, m] has an own column t(i) (the token it came from). Its **rank** is the number of logits of the row that are
strictly larger than L[i, t(i)]; ties count for the own logit. "Among the k largest" means rank < k; "among the k smallest"
is the same for -L.

Few rows need the whole product. Membership (:func:`capped_ranks`) goes so:

1. A row's order does not change when all its logits move by one number. So one vector, their mean, is taken off all columns
   of B: what they share would hide which of them can win, and cost digits.
2. Screen: the columns that raise the rows in question most (mean logit plus four standard deviations over these rows) come
   first, 64, then 256, then 1024 of them, chosen anew for the rows that are left. A row with ``cap`` larger logits leaves.
3. The rows that stay, nearly all of them members, meet all columns in blocks; only the largest logit of a row and block is
   looked at, unless it comes near the own one.

Exact means: the order that the given numbers have. Products are float32 here, with a proved bound on their error (Higham 2002,
section 3.1); a logit counts as larger only beyond that bound, and each pair within it is decided by sums in float64. Logits
that are equal there are ties; copies of a column always are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Columns of the three screens. The first is small because it meets all rows; choosing columns costs as much as some rows do.
_SCREENS = (64, 256, 1024)
# Rows and columns of a block of logits: 1 MB in float32, so that it is still in the cache when it is looked at. (With 2 MB the
# allocator hands out fresh pages for each block, which takes as long as the product.)
_ROWS, _COLUMNS = 256, 1024
# Pairs that are decided in float64 at a time.
_PAIRS = 1 << 14


@dataclass(frozen=True)
class Ranks:
    """Where own logits stand, for each row: how many logits of the row are strictly larger, and strictly smaller, [n]."""

    larger: Int[Tensor, " n"]
    smaller: Int[Tensor, " n"]


def capped_ranks(A: Float[Tensor, "n r"], B: Float[Tensor, "r m"], own: Int[Tensor, " n"], cap: int) -> Ranks:
    """Ranks of each row's own logit in A B from either end, counted up to ``cap``. Exact.

    ``capped_ranks(A, B, own, cap).larger < k`` is membership in the k largest for every k up to ``cap``; ``.smaller < k`` in
    the k smallest.

    Args:
        A: rows [n, r], finite.
        B: columns [r, m], finite.
        own: each row's own column, [n].
        cap: where counting stops, at least 1.

    Returns:
        min(rank, cap) from both ends, [n]. A row of zeros ties everywhere: rank 0 from both.

    Raises:
        ValueError: a factor holds NaN or infinity.
    """
    logits = _Logits(A, B, own)
    return Ranks(_capped(logits, cap), _capped(logits.negated(), cap))


def full_ranks(A: Float[Tensor, "n r"], B: Float[Tensor, "r m"], own: Int[Tensor, " n"]) -> Ranks:
    """How many logits of each row of A B are strictly larger, and strictly smaller, than the row's own. Exact.

    This costs the whole product, 2 n m r operations in blocks: no bound tells a rank in the middle of the vocabulary.
    Arguments and errors as for :func:`capped_ranks`.
    """
    logits = _Logits(A, B, own)
    larger, smaller = torch.zeros_like(own), torch.zeros_like(own)
    for columns, block in logits.column_blocks():
        for rows in logits.open_rows.split(_ROWS):
            above = (logits.rows[rows] @ block).sub_(logits.own_logits[rows, None])
            margin = logits.margin[rows, None]
            raised, lowered = above > margin, above < -margin
            more, less = raised.sum(dim=1), lowered.sum(dim=1)
            larger[rows] += more
            smaller[rows] += less
            close = (more + less < above.shape[1]).nonzero().squeeze(1)
            near = logits.decide_near(rows[close], ~(raised[close] | lowered[close]), columns.start)
            larger.index_add_(0, near.rows, (near.signs > 0).long())
            smaller.index_add_(0, near.rows, (near.signs < 0).long())
    return Ranks(larger, smaller)


@dataclass(frozen=True)
class _Near:
    """Pairs decided in float64: rows, and the sign of (logit - own logit)."""

    rows: Tensor
    signs: Tensor


class _Logits:
    """A B with a common vector taken off all columns; the order within a row is that of A B.

    Attributes:
        rows: [n, r] and columns: [r, m], float32, the largest entry of each being one.
        own_logits: [n].
        margin: [n]; a row's float32 logits that differ from its own one by more than this are ordered rightly.
        open_rows: indices of the rows that are not all zero.
    """

    def __init__(self, A: Tensor, B: Tensor, own: Tensor) -> None:
        self._A, self._B, self._own = A, B, own
        self.rows = _to_unit_scale(A)
        self.columns = _to_unit_scale(B - B.mean(dim=1, keepdim=True))
        self.own_logits = torch.cat(
            [
                (self.rows[part] * self.columns[:, own[part]].mT).sum(dim=1)
                for part in torch.arange(len(own), device=own.device).split(_COLUMNS)
            ]
        )
        # |float32 a.b - a.b| <= (r + 8) u |a| |b|: r for the sum, 8 for scaling and shifting. Twice, for two logits, and
        # eps = 2 u. The last term is for rows so small that their squares or products underflow: float64 decides there.
        lengths = self.rows.norm(dim=1)
        longest = float(self.columns.square().sum(dim=0).max().sqrt())
        self.margin = lengths * (longest * (A.shape[1] + 8) * torch.finfo(torch.float32).eps) + 1e-20
        zero = lengths == 0
        zero[zero.clone()] = ~A[zero].any(dim=1)  # a length can underflow
        self.open_rows = (~zero).nonzero().squeeze(1)

    @cached_property
    def _reach(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each column's logits over all rows, [m]."""
        return _mean_and_deviation(self.rows, self.columns)

    def negated(self) -> _Logits:
        """The same for -A B, where small logits are large."""
        mean, deviation = self._reach
        other = copy.copy(self)
        other._A, other.rows, other.own_logits = -self._A, -self.rows, -self.own_logits
        other.__dict__["_reach"] = -mean, deviation
        return other

    def column_blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """All columns in blocks, each with where it lies."""
        for start in range(0, self.columns.shape[1], _COLUMNS):
            columns = slice(start, start + _COLUMNS)
            yield columns, self.columns[:, columns].contiguous()

    def strongest_columns(self, rows: Tensor, width: int) -> Tensor:
        """The ``width`` columns whose logits over these rows reach highest: mean plus four standard deviations."""
        everything = len(rows) == len(self.rows)
        mean, deviation = self._reach if everything else _mean_and_deviation(self.rows[rows], self.columns)
        return (mean + 4 * deviation).topk(width, sorted=False).indices

    def decide_near(self, rows: Tensor, near: Tensor, first_column: int) -> _Near:
        """Order pairs that float32 cannot: ``near`` [len(rows), block] marks them; own columns are left out."""
        at_row, at_column = near.nonzero(as_tuple=True)
        at_row, at_column = rows[at_row], at_column + first_column
        others = at_column != self._own[at_row]
        at_row, at_column = at_row[others], at_column[others]
        signs = [self._signs(*pair) for pair in zip(at_row.split(_PAIRS), at_column.split(_PAIRS), strict=True)]
        return _Near(at_row, torch.cat(signs))

    def _signs(self, rows: Tensor, columns: Tensor) -> Tensor:
        """sign(L[row, column] - L[row, own column]), both sums in float64 and in the same order."""
        left, right = self._A[rows].double(), self._B.mT
        logits = (left * right[columns].double()).sum(dim=1)
        return (logits - (left * right[self._own[rows]].double()).sum(dim=1)).sign()


def _capped(logits: _Logits, cap: int) -> Tensor:
    """min(rank, cap) of every row: the screens, then the whole product for the rows that stay."""
    ranks = torch.zeros(len(logits.rows), dtype=torch.long, device=logits.rows.device)
    open_rows = logits.open_rows
    for width in _SCREENS:
        if width >= logits.columns.shape[1] or len(open_rows) <= width:
            break
        counts = _count_on(logits, open_rows, logits.strongest_columns(open_rows, width))
        ranks[open_rows] = counts.clamp(max=cap)
        open_rows = open_rows[counts < cap]
    ranks[open_rows] = 0  # counted again from the start, so that no column has to be left out
    _count_all(logits, open_rows, cap, ranks)
    return ranks.clamp_(max=cap)


def _to_unit_scale(matrix: Tensor) -> Tensor:
    """The matrix over its largest absolute entry, as float32.

    Raises:
        ValueError: it holds NaN or infinity.
    """
    low, high = matrix.aminmax()
    top = torch.maximum(-low, high)
    if not bool(top.isfinite()):
        raise ValueError("a factor holds NaN or infinity: its logits have no order")
    return (matrix / top if top > 0 else matrix).float()


def _mean_and_deviation(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Of each column's logits over the rows, [m]; the deviation along the rows' sixteen main axes, which is enough to choose by."""
    mean = rows.mean(dim=0)
    covariance = rows.mT @ rows / len(rows) - mean[:, None] * mean
    variances, axes = torch.linalg.eigh(covariance)
    main = axes[:, -16:] * variances[-16:].clamp(min=0).sqrt()
    return mean @ columns, (main.mT @ columns).square_().sum(dim=0).sqrt_()


def _count_on(logits: _Logits, rows: Tensor, columns: Tensor) -> Tensor:
    """How many of the chosen columns are surely larger than the own logit of each row."""
    block = logits.columns[:, columns].contiguous()
    least = logits.own_logits + logits.margin
    parts = [
        (logits.rows[part] @ block > least[part, None]).sum(dim=1, dtype=torch.int32)
        for part in rows.split(max(1, _ROWS * _COLUMNS // len(columns)))
    ]
    return torch.cat(parts).long()


def _count_all(logits: _Logits, rows: Tensor, cap: int, counts: Tensor) -> None:
    """Add to ``counts`` the ranks of the given rows over all columns; a row that reaches ``cap`` may leave early."""
    left = logits.rows[rows]
    for columns, block in logits.column_blocks():
        for part, left_part in zip(rows.split(_ROWS), left.split(_ROWS), strict=True):
            _count_block(logits, part, left_part @ block, columns.start, counts)
        stay = counts[rows] < cap
        if not bool(stay.all()):
            rows, left = rows[stay], left[stay]


def _count_block(logits: _Logits, rows: Tensor, products: Tensor, first_column: int, counts: Tensor) -> None:
    """Add to ``counts`` what a block of logits holds above the own logits of its rows."""
    own, margin = logits.own_logits[rows], logits.margin[rows]
    # One look at the largest logit of a row settles most blocks; the own column makes each row pass once.
    close = (products.amax(dim=1) >= own - margin).nonzero().squeeze(1)
    if not len(close):
        return
    rows, margin, above = rows[close], margin[close, None], products[close] - own[close, None]
    counts[rows] += (above > margin).sum(dim=1)
    near = logits.decide_near(rows, above.abs_() <= margin, first_column)
    counts.index_add_(0, near.rows, (near.signs > 0).long())

"""The largest and smallest entries of A B over all rows and columns, exact, without visiting all of them.

1. In the basis of the singular vectors, half of each singular value on either side, rows a_i of A and columns b_j of B are
   short, and |M_ij| <= |a_i| |b_j| (Cauchy-Schwarz) is as tight as one scaling for all makes it.
2. The ends of every singular direction are paired first: their best entries give thresholds close to the final ones.
3. Rows and columns are taken by falling norm, in blocks. A block whose bound is below both thresholds is left out, and with
   it all blocks behind it.
4. Blocks are made in float32. Entries within rounding error of a threshold are worked out again in float64 before they
   compete: which entries are returned, and in what order, is decided in float64, ties by row, then column.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ov_circuits.errors import whole_number
from ov_circuits.linalg.lowrank import Entries

_BLOCK = 2048
_SEEDS = 64


@dataclass(frozen=True)
class TopEntries:
    """The ends of a matrix.

    Attributes:
        largest: the k largest entries, falling.
        smallest: the k smallest entries, rising.
        visited: the share of the matrix's blocks that was computed.
    """

    largest: Entries
    smallest: Entries
    visited: float


def top_entries(A: Float[Tensor, "n r"], B: Float[Tensor, "r m"], k: int) -> TopEntries:
    """The k largest and the k smallest entries of A B, exact in float64 arithmetic on the given factors.

    Memory is a few copies of the factors and one block of the product.

    Raises:
        CircuitsError: k is no whole number from 1 on.
        ValueError: a factor holds NaN or infinity.
    """
    k = whole_number("k", k, 1)
    if not (A.isfinite().all() and B.isfinite().all()):
        raise ValueError("the factors hold NaN or infinity: there are no largest entries")
    rows, columns = _balanced(A.double(), B.double())
    k = min(k, rows.shape[0] * columns.shape[0])
    if not (rows.any() and columns.any()):
        return _zeros(k, columns.shape[0])
    row_norms, row_order = rows.norm(dim=1).sort(descending=True)
    column_norms, column_order = columns.norm(dim=1).sort(descending=True)
    rows, columns = rows[row_order], columns[column_order]
    ends = [_End(rows, columns, row_order, column_order, k, sign) for sign in (1, -1)]
    for i, j in _seeds(rows, columns, k):
        for end in ends:
            end.offer(i.repeat_interleave(len(j)), j.repeat(len(i)))
    visited = _sweep(rows.float(), columns.float(), row_norms, column_norms, ends)
    return TopEntries(ends[0].entries(), ends[1].entries(), visited)


def _sweep(rows: Tensor, columns: Tensor, row_norms: Tensor, column_norms: Tensor, ends: list[_End]) -> float:
    """Offer every entry that can matter to an end; the share of blocks that was computed."""
    row_starts, column_starts = range(0, len(rows), _BLOCK), range(0, len(columns), _BLOCK)
    # A sum of r float32 products errs by at most about r eps |a| |b|, far more than is seen.
    slack = float(row_norms[0] * column_norms[0]) * (rows.shape[1] + 2) * torch.finfo(torch.float32).eps
    visited = 0
    for row in row_starts:
        for column in column_starts:
            bound = float(row_norms[row] * column_norms[column]) * (1 + 1e-9)
            if all(bound < end.threshold for end in ends):
                break  # columns further on are shorter still
            visited += 1
            block = rows[row : row + _BLOCK] @ columns[column : column + _BLOCK].T
            for end in ends:
                end.search(block, row, column, slack)
    return visited / (len(row_starts) * len(column_starts))


class _End:
    """The k best entries so far on one side (``sign`` -1: the smallest), values in float64."""

    def __init__(self, rows: Tensor, columns: Tensor, row_ids: Tensor, column_ids: Tensor, k: int, sign: int) -> None:
        self._rows, self._columns, self._k, self._sign = rows, columns, k, sign
        self._row_ids, self._column_ids = row_ids, column_ids
        self._i = self._j = torch.empty(0, dtype=torch.long, device=rows.device)
        self._values = torch.empty(0, dtype=torch.float64, device=rows.device)

    @property
    def threshold(self) -> float:
        """What an entry must reach, on this end's side, to matter."""
        return float(self._values[-1]) if len(self._values) == self._k else -torch.inf

    def search(self, block: Tensor, row: int, column: int, slack: float) -> None:
        """Offer what a block holds above the threshold; most rows are left out by their extreme alone."""
        floor = self.threshold - slack
        extremes = block.amax(1) if self._sign > 0 else -block.amin(1)
        chosen = (extremes >= floor).nonzero().flatten()
        for part in chosen.split(64):
            i, j = (self._sign * block[part] >= self.threshold - slack).nonzero(as_tuple=True)
            self.offer(part[i] + row, j + column)

    def offer(self, i: Tensor, j: Tensor) -> None:
        """Let entries compete, by sorted row and column; an entry offered twice counts once."""
        if not len(i):
            return
        values = self._sign * (self._rows[i] * self._columns[j]).sum(1)
        i, j, values = torch.cat([self._i, i]), torch.cat([self._j, j]), torch.cat([self._values, values])
        key = self._row_ids[i] * len(self._column_ids) + self._column_ids[j]
        by_key = key.argsort(stable=True)
        ordered = key[by_key]
        by_key = by_key[torch.cat([ordered.new_ones(1, dtype=torch.bool), ordered.diff() != 0])]
        best = by_key[values[by_key].argsort(descending=True, stable=True)[: self._k]]
        self._i, self._j, self._values = i[best], j[best], values[best]

    def entries(self) -> Entries:
        return Entries(self._row_ids[self._i], self._column_ids[self._j], self._sign * self._values)


def _zeros(k: int, m: int) -> TopEntries:
    """The ends of a zero matrix of m columns: all entries tie."""
    first = torch.arange(k, device="cpu")
    entries = Entries(first // m, first % m, torch.zeros(k, dtype=torch.float64, device="cpu"))
    return TopEntries(entries, entries, 0.0)


def _balanced(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Rows a_i [n, r'] and columns b_j [m, r'] with a_i . b_j = (A B)_ij and the singular values shared out evenly."""
    Q_A, R_A = torch.linalg.qr(A)
    Q_B, R_B = torch.linalg.qr(B.mT)
    X, S, Yh = torch.linalg.svd(R_A @ R_B.mT, full_matrices=False)
    return Q_A @ (X * S.sqrt()), Q_B @ (Yh.mT * S.sqrt())


def _seeds(rows: Tensor, columns: Tensor, k: int) -> list[tuple[Tensor, Tensor]]:
    """Rows and columns at the ends of each singular direction, and the longest ones."""
    n = min(max(_SEEDS, int(k**0.5) + 1), len(rows))
    m = min(max(_SEEDS, int(k**0.5) + 1), len(columns))
    pairs = [(torch.arange(n, device=rows.device), torch.arange(m, device=rows.device))]
    for direction in range(rows.shape[1]):
        i = torch.cat([rows[:, direction].topk(n // 2 or 1, largest=largest).indices for largest in (True, False)])
        j = torch.cat([columns[:, direction].topk(m // 2 or 1, largest=largest).indices for largest in (True, False)])
        pairs.append((i, j))
    return pairs

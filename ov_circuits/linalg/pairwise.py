"""||A_s B_t||_F for every pair of low-rank matrices, as one matmul.

With A_s^T A_s = P_s^T P_s and B_t B_t^T = Q_t^T Q_t for factors P_s, Q_t of r rows and d columns,

    ||A_s B_t||_F^2 = ||P_s Q_t^T||_F^2 = <P_s^T P_s, Q_t^T Q_t>,

an inner product of two symmetric [d, d] matrices. All pairs together are one product of a [senders, d^2] with a
[d^2, receivers] matrix: d^2 multiplications a pair (half of d^2, doubled, as both are symmetric), where the tiles P_s Q_t^T
take r^2 d. For heads, 2 r^2 / d times fewer: 11 at d = 768, r = 64. The [d, d] matrices are made tile by tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from ov_circuits.linalg.products import many_products, row_gram, times_transpose
from ov_circuits.linalg.threads import side_by_side

# Side of a tile of the [d, d] matrices: small, so that few float32 products are summed before float64 takes over.
_TILE = 96

# The inner product cancels where it is far below the product of the norms. Beyond this ratio a pair is worked out again
# from its own r x r tile, a sum of squares; up to it, float32 stays below 1e-6 relative (measured, see the tests). A tile's
# own float32 product cancels too, where the pair is yet smaller: then it is made in float64, at three times the cost.
_CANCELLATION = 80.0
_TILE_CANCELLATION = 2000.0


def pairwise_energy(
    left: Float[Tensor, "sender r d"],
    right: Float[Tensor, "receiver q d"],
    wanted: Sequence[tuple[slice, slice]],
    norms: tuple[Float[Tensor, " sender"], Float[Tensor, " receiver"]] | None = None,
) -> Float[Tensor, "sender receiver"]:
    """``||left_s right_t^T||_F^2`` for the wanted pairs, zero elsewhere.

    Args:
        left: factors of the senders.
        right: factors of the receivers.
        wanted: rectangles (senders, receivers) of pairs to compute.
        norms: :func:`gram_norm` of both sides, where it is known.

    Returns:
        A float64 matrix. Products are made in the factors' own precision, sums over tiles and pairs that cancel in float64:
        a norm from float32 factors is right within 1e-6. A NaN stays in its row or column.
    """
    d = left.shape[-1]
    edges = [slice(start, min(start + _TILE, d)) for start in range(0, d, _TILE)]
    tiles = [(rows, columns) for i, rows in enumerate(edges) for columns in edges[i:]]
    workers = torch.get_num_threads()
    shares = [tiles[first::workers] for first in range(workers)]
    total = torch.stack(list(side_by_side(partial(_over_tiles, left, right, wanted), shares))).sum(0)
    sent_norm, read_norm = norms or (gram_norm(left), gram_norm(right))
    sizes = sent_norm.outer(read_norm)
    _redo(total, sizes / _CANCELLATION, left, right, wanted)
    _redo(total, sizes / _TILE_CANCELLATION, left, right, wanted, torch.float64)
    return total


def _over_tiles(
    left: Tensor, right: Tensor, wanted: Sequence[tuple[slice, slice]], tiles: Sequence[tuple[slice, slice]]
) -> Tensor:
    """The part of <P^T P, Q^T Q> that lies in some tiles and their mirrored ones, of the wanted pairs."""
    total = left.new_zeros(len(left), len(right), dtype=torch.float64)
    sent, read = (factor.new_empty(len(factor), _TILE * _TILE) for factor in (left, right))  # the same memory for all
    for rows, columns in tiles:
        a, b = _tile(left, rows, columns, sent), _tile(right, rows, columns, read)
        weight = 1.0 if columns == rows else 2.0  # the mirrored tile holds the same numbers
        for senders, receivers in wanted:
            total[senders, receivers] += weight * times_transpose(a[senders], b[receivers])
    return total


def _tile(factor: Tensor, rows: slice, columns: slice, into: Tensor) -> Tensor:
    """A tile of every P^T P, flattened, [n, rows * columns], made in the first columns of ``into``."""
    height, width = rows.stop - rows.start, columns.stop - columns.start
    tile = into[:, : height * width]
    many_products(factor[..., rows].mT, factor[..., columns], out=tile.view(-1, height, width))
    return tile


def _redo(
    total: Tensor,
    least: Tensor,
    left: Tensor,
    right: Tensor,
    wanted: Sequence[tuple[slice, slice]],
    dtype: torch.dtype | None = None,
) -> None:
    """Replace what is below ``least``, and has lost digits, by the sum of squares of the pair's own tile, in place."""
    lost = torch.zeros_like(total, dtype=torch.bool)
    for senders, receivers in wanted:
        lost[senders, receivers] = True
    lost &= total < least

    def redo(sender: int) -> None:
        own = left[sender].to(dtype)
        for receivers in lost[sender].nonzero().flatten().split(32):
            tiles = times_transpose(own, right[receivers].to(dtype).flatten(0, 1)).unflatten(1, (len(receivers), -1))
            total[sender, receivers] = tiles.double().square().sum((0, 2))

    for _ in side_by_side(redo, lost.any(1).nonzero().flatten().tolist()):
        pass


def gram_norm(factor: Float[Tensor, "*batch r d"]) -> Float[Tensor, "*batch"]:
    """||P^T P||_F of each factor, float64: for a factor of norm one, the square root of 1 / participation ratio."""
    return torch.linalg.matrix_norm(row_gram(factor).double())


def gram_root(gram: Float[Tensor, "*batch r r"]) -> Float[Tensor, "*batch r r"]:
    """R with R^T R = gram, float64, for positive semi-definite matrices of any rank.

    A Cholesky factor after raising the diagonal by r times 1e-13 of itself, which moves norms by as much. (By a share of the
    trace, small dimensions would drown, though they count in full where what they meet is large: only W_V W_O has a scale,
    W_V's columns have none.) A matrix with NaN or infinity gives NaN and leaves the rest of the batch alone.
    """
    gram = gram.double()
    finite = gram.isfinite().all(-1).all(-1)[..., None, None]
    size = gram.diagonal(dim1=-2, dim2=-1).sqrt()[..., None, :]
    usable = torch.where(finite & (size > 0), size, torch.inf)
    correlation = torch.where(finite, gram, 0.0) / usable / usable.mT
    lift = 1e-13 * gram.shape[-1]
    correlation.diagonal(dim1=-2, dim2=-1)[:] = 1 + lift  # also where a dimension is zero: its column of R is
    root = torch.linalg.cholesky_ex(correlation).L.mT
    return torch.where(finite, root * torch.where(finite, size, 0.0), torch.nan)

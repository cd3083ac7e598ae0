"""A tall matrix met in blocks of rows, so that it need never be whole in memory: an embedding in a file.

``rows @ x`` and ``y @ rows.mT`` stream the blocks; ``rows[ids]`` reads only the rows asked for. Blocks are float32, products
have the precision of the small factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ov_circuits.linalg.products import times_transpose
from ov_circuits.modes import ordinary_class

# Of a block in float32. Small enough to lie in a cache, and in memory that the allocator has already: blocks of 16 MiB were
# asked from the system one by one, a tenth of a scoreboard's time. Yet products want a number of rows to run at full speed.
_BLOCK_BYTES, _LEAST_ROWS = 4 * 2**20, 512


@ordinary_class
class Rows:
    """A matrix [n, d] whose rows are read when they are met.

    Args:
        shape: (n, d).
        read: gives rows ``start`` to ``stop`` of a slice, [stop - start, d].
    """

    def __init__(self, shape: tuple[int, int], read: Callable[[slice], Tensor]) -> None:
        self._shape, self._read = torch.Size(shape), read

    @classmethod
    def of(cls, matrix: Tensor) -> Rows:
        """A matrix that is in memory already."""
        return cls((matrix.shape[0], matrix.shape[1]), matrix.__getitem__)

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @property
    def device(self) -> torch.device:
        return self[0:0].device

    @property
    def mT(self) -> Columns:
        """The transpose, [d, n]."""
        return Columns(self)

    def __len__(self) -> int:
        return self._shape[0]

    def __repr__(self) -> str:
        return f"Rows({list(self._shape)})"

    def tensor(self) -> Tensor:
        """The whole matrix; of one in memory, itself."""
        return self._read(slice(0, len(self)))

    def copy(self) -> Tensor:
        """The whole matrix in memory of its own."""
        whole = self[0:0].new_empty(self.shape)
        for rows, block in self.blocks():
            whole[rows] = block
        return whole

    def __reduce__(self) -> tuple[Callable[[Tensor], Rows], tuple[Tensor]]:
        return Rows.of, (self.copy(),)

    def map(self, change: Callable[[Tensor], Tensor]) -> Rows:
        """The same with every row changed as ``change`` does to a block of rows, when it is read."""
        return Rows((self._shape[0], self._shape[1]), lambda rows: change(self._read(rows)))

    def part(self, start: int, stop: int) -> Rows:
        """Rows ``start`` to ``stop``."""
        return Rows(
            (stop - start, self._shape[1]), lambda rows: self._read(slice(start + rows.start, start + rows.stop))
        )

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """All rows in order, each block with where it lies."""
        size = max(_LEAST_ROWS, _BLOCK_BYTES // (4 * self._shape[1]))
        for start in range(0, len(self), size):
            rows = slice(start, min(start + size, len(self)))
            yield rows, self._read(rows)

    def __getitem__(self, index: int | slice | Tensor | Sequence[int]) -> Tensor:
        """One row [d], or the chosen rows [k, d], as a copy."""
        if isinstance(index, slice):
            start, stop, _ = index.indices(len(self))
            return self._read(slice(start, max(start, stop))).clone()
        if isinstance(index, int):
            return self._row(index)[0].clone()
        return torch.cat([self[0:0], *(self._row(i) for i in torch.as_tensor(index, device="cpu").tolist())])

    def _row(self, index: int) -> Tensor:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of a matrix with {len(self)} rows")
        start = index % len(self)
        return self._read(slice(start, start + 1))

    def __matmul__(self, small: Tensor) -> Tensor:
        """The matrix times [..., d, k] or [d]: [..., n, k] or [n]."""
        if small.ndim == 1:
            return (self @ small.unsqueeze(-1)).squeeze(-1)
        product = small.new_empty(*small.shape[:-2], len(self), small.shape[-1])
        for rows, block in self.blocks():
            product[..., rows, :] = times_transpose(small.mT, block.to(small)).mT
        return product


@ordinary_class
class Columns:
    """The transpose of :class:`Rows`, [d, n]: what stands on the right of a product."""

    def __init__(self, rows: Rows) -> None:
        self.mT = rows

    @property
    def shape(self) -> torch.Size:
        return self.mT.shape[::-1]

    def __rmatmul__(self, small: Tensor) -> Tensor:
        """[..., k, d] or [d] times the matrix: [..., k, n] or [n]."""
        if small.ndim == 1:
            return (small.unsqueeze(0) @ self).squeeze(0)
        product = small.new_empty(*small.shape[:-1], len(self.mT))
        for columns, block in self.mT.blocks():
            product[..., columns] = times_transpose(small, block.to(small))
        return product

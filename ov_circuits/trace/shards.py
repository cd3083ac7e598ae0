"""Which heads this process holds: all of them, or under tensor parallelism a part.

A tensor-parallel attention layer runs exactly as the sum-of-heads view says (Shoeybi et al. 2019): each rank holds some heads
with the matching rows of the output projection, multiplies its own z with its own W_O block, and one all-reduce sums the partial
outputs. So a rank works out its own heads' contributions, and only numbers are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ov_circuits.errors import CircuitsError

if TYPE_CHECKING:
    from ov_circuits.processes import Ranks


@dataclass(frozen=True)
class Shard:
    """A run of consecutive heads, the same in every layer.

    Attributes:
        first: the first head held here.
        held: how many.
        total: how many a layer has.
        ranks: the processes that hold the others; None when there are none.
    """

    first: int
    held: int
    total: int
    ranks: Ranks | None = None

    @classmethod
    def whole_layer(cls, n_heads: int) -> Shard:
        """All heads, in one process."""
        return cls(0, n_heads, n_heads)

    @property
    def heads(self) -> slice:
        """Where this process's heads are among all."""
        return slice(self.first, self.first + self.held)

    def index(self, head: int) -> int:
        """A head's place among those held here.

        Raises:
            CircuitsError: another rank holds it.
        """
        if not self.first <= head < self.first + self.held:
            raise CircuitsError(
                f"head {head} of each layer lives on rank {head // self.held}, this rank holds heads {self.first} to "
                f"{self.first + self.held - 1}: ask for it there, or for frames, which are gathered"
            )
        return head - self.first

    def gather(self, own: Tensor, dim: int = 0) -> Tensor:
        """All heads' numbers on every rank, from each rank's own along ``dim``. Every rank must call this."""
        if self.ranks is None:
            return own
        shape = list(own.shape)
        shape[dim] = self.total
        everyone = own.new_zeros(shape)
        everyone.narrow(dim, self.first, self.held).copy_(own)
        return self.sum(everyone)

    def sum(self, own: Tensor) -> Tensor:
        """The sum over ranks, on every rank. Every rank must call this."""
        return own if self.ranks is None else self.ranks.sum(own)

"""How many threads small matrices get."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the block on one thread.

    Thousands of d_head x d_head decompositions gain nothing from a second thread, and where another program has the other
    core, each of them waits for it: ten times slower was seen.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""Many small decompositions on all cores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(work: Callable[[Item], Result], items: Iterable[Item], most: int | None = None) -> Iterator[Result]:
    """``work(item)`` for every item, in order, on as many threads as torch is set to use, each with one thread inside.

    With ``most``, no more than so many items at a time (they take memory), which then share torch's threads.

    A d_head x d_head decomposition gains nothing from a second thread, and where another program has the other core, each of
    thousands would wait for it (ten times slower was seen). Whole layers side by side do gain, and wait for nothing: torch
    lets go of the interpreter while it computes.
    """
    threads = torch.get_num_threads()
    workers = threads if most is None else max(1, min(threads, most))
    pool = ThreadPoolExecutor(workers, initializer=partial(torch.set_num_threads, threads // workers))
    try:
        yield from pool.map(work, items)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)

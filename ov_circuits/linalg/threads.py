"""Many small decompositions on all cores, with no more threads than torch is set to use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, TypeVar

import torch
from threadpoolctl import OpenBLASController, ThreadpoolController

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
    inside = threads // workers
    pool = ThreadPoolExecutor(workers, initializer=partial(_set_in_this_thread, inside))
    try:
        with numpy_threads(inside):
            yield from pool.map(work, items)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_setting = threading.Lock()


def _set_in_this_thread(threads: int) -> None:
    """How many threads torch uses when called from this thread, which must be new to torch.

    torch's setter also says what every thread that is yet to come begins with, the user's own ones (a web server's, those of
    ``asyncio.to_thread``). A thread that only does that puts it back.
    """
    with _setting:
        of_new_threads = torch.get_num_threads()
        torch.set_num_threads(threads)
        put_back = threading.Thread(target=torch.set_num_threads, args=(of_new_threads,))
        put_back.start()
        put_back.join()


class _Limit:
    """How many threads numpy's BLAS may use: one number a process, so the first block that asks sets it, the last resets it."""

    def __init__(self) -> None:
        self.lock, self.blocks = threading.Lock(), 0
        self.limit: Any = None


_numpy = _Limit()


@contextmanager
def numpy_threads(most: int) -> Iterator[None]:
    """numpy's products within take at most so many threads; blocks inside others, or beside them, keep the first one's number."""
    with _numpy.lock:
        if not _numpy.blocks:
            _let_any_thread_set()
            _numpy.limit = _controller().limit(limits=most, user_api="blas")
        _numpy.blocks += 1
    try:
        yield
    finally:
        with _numpy.lock:
            _numpy.blocks -= 1
            if not _numpy.blocks:
                _let_any_thread_set()
                _numpy.limit.restore_original_limits()


def _let_any_thread_set() -> None:
    """The last block to end may be in another thread than the first; threadpoolctl of today lets only one set the number."""
    release = getattr(OpenBLASController, "clear_controlling_thread", None)
    if release is not None:
        release(force=True)


@cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()

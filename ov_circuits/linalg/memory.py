"""Memory that is done with, given back."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache


def give_back() -> None:
    """Return freed memory to the system.

    glibc keeps freed blocks of up to 32 MiB, in an arena for each thread. Over many layers they add up to as much as the work
    itself takes. Elsewhere than on glibc this does nothing.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None

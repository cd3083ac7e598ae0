"""Progress of long work: rich, on standard error, silent when that is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def track(items: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]:
    """Yield the items, showing how far along they are when standard error is a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import track as rich_track

    yield from rich_track(items, description, total=total, console=Console(stderr=True), transient=True)


def say(text: str) -> None:
    """A sentence on standard error, for what a user must know of a long run."""
    print(text, file=sys.stderr, flush=True)

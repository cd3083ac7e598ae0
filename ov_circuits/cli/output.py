"""Where a command's result goes: a file that is complete or not there at all, JSON, or the screen."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ov_circuits.errors import CircuitsError
from ov_circuits.processes import is_first
from ov_circuits.terminal import note

if TYPE_CHECKING:
    import pandas as pd

    from ov_circuits.model import Model


@contextmanager
def target(output: Path | None, model: Model) -> Iterator[Path | None]:
    """A temporary path that becomes ``output`` when all went well. Opened first: an unwritable place costs no work.

    Of processes that work together the first one writes; that it can is known to all before they begin.

    Raises:
        CircuitsError: it cannot be written, or is one of the checkpoint's own files.
    """
    if output is None:
        yield None
        return
    from ov_circuits.files import atomic_path
    from ov_circuits.processes import together

    if os.path.realpath(output) in {os.path.realpath(file) for file in model.source.checkpoint.files()}:
        raise CircuitsError(f"cannot write {output}: it is a file of the checkpoint itself; choose another name")
    with ExitStack() as opened:
        yield together(lambda: opened.enter_context(atomic_path(output)) if is_first() else None)


@contextmanager
def table(output: Path | None, model: Model) -> Iterator[Callable[[pd.DataFrame], None]]:
    """What writes a command's frame to ``output``, or does nothing without one. Opened, and its format known, before the work."""
    from ov_circuits.report.tables import check_suffix, write_frame

    if output is not None:
        check_suffix(output)
    with target(output, model) as file:

        def write(frame: pd.DataFrame) -> None:
            if file is not None:
                write_frame(frame, file)

        yield write


def hand_out(
    frame: pd.DataFrame, output: Path | None, as_json: bool, show: Callable[[pd.DataFrame], None], what: str
) -> None:
    """A frame as JSON or, where it went into no file, on the screen; and a word on the file.

    Args:
        frame: what is shown; the file may hold more.
        output: the file that was written.
        as_json: whether standard output gets JSON.
        show: prints the frame.
        what: of the file's content, in words.
    """
    from ov_circuits.report.tables import to_json

    if as_json:
        print(to_json(frame))
    elif output is None:
        show(frame)
    if output is not None:
        note(f"{output}: {what}")

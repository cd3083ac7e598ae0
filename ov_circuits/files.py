"""Files out: complete, or not there at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ov_circuits.errors import CircuitsError


@contextmanager
def atomic_path(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside ``target``; rename it onto ``target`` when the block ends without an error.

    The temporary file keeps the target's suffix, so that writers which choose a format by suffix behave.

    Raises:
        CircuitsError: the folder does not exist or cannot be written to.
    """
    target = Path(target)
    if target.is_dir():
        raise CircuitsError(f"cannot write to {target}: it is a folder; name a file in it")
    if not target.parent.is_dir():
        raise CircuitsError(f"cannot write {target}: the folder {target.parent} does not exist; create it first")
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}-", suffix=target.suffix)
        os.close(handle)
    except OSError as error:
        raise CircuitsError(f"cannot write {target}: {error.strerror or error}; choose another place") from error
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(target)
    except OSError as error:
        raise CircuitsError(f"cannot write {target}: {error.strerror or error}; nothing was left there") from error
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    """The process's umask; the system can only tell it by setting it. mkstemp makes files private, ours should not be."""
    mask = os.umask(0)
    os.umask(mask)
    return mask

"""Files out: complete, or not there at all."""

from __future__ import annotations

import atexit
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ov_circuits.errors import CircuitsError

# Temporary files that are not yet renamed or taken away, and the process whose they are: a fork must leave them alone.
_unfinished: dict[Path, int] = {}


@contextmanager
def atomic_path(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside ``target``; rename it onto ``target`` when the block ends without an error.

    The temporary file keeps the target's suffix, so that writers which choose a format by suffix behave.

    Raises:
        CircuitsError: the folder does not exist or cannot be written to.
    """
    try:
        target = Path(os.path.realpath(target))  # a link stays a link: what it points to is written
        if target.is_dir():
            raise CircuitsError(f"cannot write to {target}: it is a folder; name a file in it")
        if target.exists() and not target.is_file():
            raise CircuitsError(
                f"cannot write to {target}: it is no regular file; name a file, or use --json for a stream"
            )
    except CircuitsError:  # which is a ValueError too
        raise
    except (OSError, ValueError) as error:
        raise _refused(target, error) from error
    # Its name is known before it is there: a signal may come at any time, and it is to be taken away.
    temporary = target.with_name(f".{target.stem}-{secrets.token_hex(4)}{target.suffix}")
    _unfinished[temporary] = os.getpid()
    try:
        try:
            temporary.touch(0o600, exist_ok=False)
        except OSError as error:
            folder = target.parent
            if not folder.is_dir():
                raise CircuitsError(
                    f"cannot write {target}: the folder {folder} does not exist; create it first"
                ) from error
            raise _refused(target, error) from error
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(target)
    except OSError as error:
        raise CircuitsError(f"cannot write {target}: {error.strerror or error}; nothing was left there") from error
    except CircuitsError as error:  # a writer inside may name the temporary file, which the user never sees
        raise CircuitsError(str(error).replace(str(temporary), str(target))) from error.__cause__ or error
    finally:
        temporary.unlink(missing_ok=True)
        del _unfinished[temporary]


@atexit.register
def _take_away_the_rest() -> None:
    """What is there still since a signal broke off the taking away itself, when an error and a signal came together."""
    for temporary, process in list(_unfinished.items()):
        if process == os.getpid():
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def _refused(target: str | os.PathLike[str], error: OSError | ValueError) -> CircuitsError:
    reason = getattr(error, "strerror", None) or error
    return CircuitsError(f"cannot write {str(target)[:200]}: {reason}; choose another place")


def drop_if_empty(folder: Path) -> None:
    """Take a folder away, unless something is in it."""
    with suppress(OSError):  # what others have written there stays
        folder.rmdir()


def _umask() -> int:
    """The process's umask; the system tells it by setting it. Temporary files are private; what they become should not be."""
    mask = os.umask(0)
    os.umask(mask)
    return mask

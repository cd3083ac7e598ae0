"""Finished pieces of a scoreboard on disk, so that a run that was stopped goes on where it was.

Beside the target ``heads.parquet`` lies a folder ``.heads.parquet.parts`` with one Parquet file a piece, each complete or not
there. Its name carries a key of everything that its numbers depend on: the checkpoint's files (name, size, time of change), the
weight view, scores, seed and version. Another checkpoint or other arguments have another key and find nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd

import ov_circuits
from ov_circuits.errors import CircuitsError
from ov_circuits.files import atomic_path, drop_if_empty
from ov_circuits.model import Model
from ov_circuits.progress import say
from ov_circuits.scores.pieces import Piece


class SavedPieces:
    """The finished pieces of one run.

    Args:
        target: the file that the run is to write in the end.
        model: the checkpoint.
        arguments: everything else that the numbers depend on; as JSON.

    Raises:
        CircuitsError: the model is in memory and cannot be known again.
    """

    def __init__(self, target: str | os.PathLike[str], model: Model, arguments: dict[str, object]) -> None:
        self._target, self._folder = target, _folder(target)
        self._key = _key(model, arguments)

    def finished(self, pieces: list[Piece]) -> list[Piece]:
        """Which of the pieces are there already."""
        return [piece for piece in pieces if self._file(piece).is_file()]

    def announce(self, pieces: list[Piece]) -> None:
        """Say that an earlier run is continued, where it is."""
        finished = len(self.finished(pieces))
        if finished:
            say(f"continuing: {finished} of {len(pieces)} layers (or parts of them) were finished by an earlier run")

    def rows(self, piece: Piece, compute: Callable[[Piece], pd.DataFrame]) -> pd.DataFrame:
        """A piece's rows: read back, or computed and written.

        Raises:
            CircuitsError: they cannot be written (a full disk); what was written before stays.
        """
        file = self._file(piece)
        if file.is_file():
            try:
                return _with_lists(pd.read_parquet(file))
            except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
                say(f"{file} is damaged ({str(error).splitlines()[0]}): its heads are scored again")
        rows = compute(piece)
        made = False
        try:
            self._folder.mkdir(exist_ok=True)
            made = True
            with atomic_path(file) as temporary:
                rows.to_parquet(temporary, index=False)
                with temporary.open("rb") as written:
                    os.fsync(written.fileno())  # a part that is there after a crash must hold its rows
        except (OSError, CircuitsError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            if made and (isinstance(cause, FileNotFoundError) or not self._folder.is_dir()):
                return rows  # another run has finished the same target, and taken away what lay there
            drop_if_empty(self._folder)
            raise CircuitsError(
                f"cannot keep finished layers beside {self._target}: {getattr(cause, 'strerror', None) or error}; "
                "make room there and start again: what is finished is kept"
            ) from error
        return rows

    def _file(self, piece: Piece) -> Path:
        return self._folder / f"{piece.name}-{self._key}.parquet"


def forget(target: str | os.PathLike[str]) -> None:
    """Take away the finished pieces beside ``target``: the run is complete."""
    shutil.rmtree(_folder(target), ignore_errors=True)


def _folder(target: str | os.PathLike[str]) -> Path:
    target = Path(os.path.realpath(target))
    return target.parent / f".{target.name}.parts"


def _with_lists(rows: pd.DataFrame) -> pd.DataFrame:
    """Parquet gives lists of texts back as arrays."""
    for name in rows:
        if pd.api.types.is_object_dtype(rows[name].dtype):
            rows[name] = rows[name].map(list)
    return rows


def _key(model: Model, arguments: dict[str, object]) -> str:
    """Of the checkpoint's files and all arguments, short enough for a file name."""
    files = []
    for file in sorted(model.source.checkpoint.files()):
        if file.is_file():
            found = file.stat()
            files.append((file.name, found.st_size, found.st_mtime_ns))
    if not files:
        raise CircuitsError(f"{model.name} is in memory: a later run could not know it again, so none can be continued")
    facts = {"version": ov_circuits.__version__, "view": model.view, "files": files, **arguments}
    if model.source.removed:
        facts["without"] = sorted(model.source.removed)
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

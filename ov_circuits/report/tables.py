"""Frames out: CSV, JSON or Parquet by the file's suffix, complete or not there at all."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ov_circuits.errors import CircuitsError
from ov_circuits.files import atomic_path

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = (".csv", ".json", ".parquet")


def check_suffix(path: str | os.PathLike[str]) -> Path:
    """The path, if its suffix names a format. Called before long work, so that a wrong name costs nothing.

    Raises:
        CircuitsError: the suffix is none of ``.csv``, ``.json``, ``.parquet``.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise CircuitsError(f"cannot tell a table's format from {path}: end the name in {', '.join(SUFFIXES)}")
    return path


def write_frame(frame: pd.DataFrame, path: str | os.PathLike[str]) -> Path:
    """Write a frame; JSON and Parquet keep ``frame.attrs``, CSV holds the rows alone.

    Raises:
        CircuitsError: unknown suffix, or the file cannot be written.
    """
    path = check_suffix(path)
    suffix = path.suffix.lower()
    with atomic_path(path) as temporary:
        if suffix == ".csv":
            frame.to_csv(temporary, index=False)
        elif suffix == ".json":
            temporary.write_text(to_json(frame) + "\n", encoding="utf-8")
        else:
            frame.to_parquet(temporary, index=False)
    return path


def to_json(frame: pd.DataFrame) -> str:
    """``{**attrs, "rows": [one object a row]}`` as JSON text; numbers that JSON lacks (NaN, infinity) become null."""
    return dumps({**frame.attrs, "rows": frame.to_dict("records")})


def dumps(value: Any) -> str:
    """Valid JSON for what results hold: numpy scalars, paths and tuples included."""
    return json.dumps(_plain(value), indent=1, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    """The value in JSON's own types."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if hasattr(value, "tolist"):  # numpy scalars and arrays, torch tensors
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return None if str(value) in ("NaT", "<NA>") else str(value)

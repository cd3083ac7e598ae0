"""What the weights say about each head.

Every column of the scoreboard is a function here, under its own name:

>>> ov.scores.eigen_copying_full(model)      # one row a head: the score, its mean by chance, z
>>> ov.scores.rank_copying_1(model, source="effective")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


def __getattr__(name: str) -> Callable[..., pd.DataFrame]:
    from functools import partial
    from importlib.util import find_spec

    # `from ov_circuits.scores import board` asks here first, while that module may be half made.
    if name.startswith("__") or find_spec(f"{__name__}.{name}") is not None:
        raise AttributeError(f"module 'ov_circuits.scores' has not imported {name!r}")
    from ov_circuits.scores.board import all_scores, null_note, score_frame

    found = all_scores().get(name)
    if found is None:
        raise AttributeError(f"module 'ov_circuits.scores' has no score {name!r}")
    function: Any = partial(score_frame, name)
    function.__doc__ = f"{found.label}. {found.note}\n\nSource: {found.source}. Null: {null_note(name)}."
    return function


def __dir__() -> list[str]:
    from ov_circuits.scores.board import all_scores

    return sorted([*globals(), *all_scores()])

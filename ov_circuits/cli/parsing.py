"""What a user types, as the library takes it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ov_circuits.errors import CircuitsError

# What looks like several words where one is asked for, and how it is written.
_ONE_WORD = {"HEAD": "a head is one word, as in 9.9", "HEADS": "join heads by commas, as in 9.9,10.0"}
_LIKE_A_HEAD = re.compile(r"L?\d+([.H]\d+)?,?", re.IGNORECASE)


def belong_to(what: str, options: Mapping[str, object]) -> None:
    """Refuse options that would do nothing, where ``what`` they go with was not asked for.

    Args:
        what: the option (or choice) that gives them a meaning.
        options: their values by name; None for those that were not given.

    Raises:
        CircuitsError: one of them was given.
    """
    given = [name for name, value in options.items() if value is not None]
    if given:
        names = " and ".join(filter(None, (", ".join(given[:-1]), given[-1])))
        goes, it = ("goes", "it") if len(given) == 1 else ("go", "they")
        raise CircuitsError(f"{names} {goes} with {what}: here {it} would do nothing")


def model_and(what: str, arguments: Sequence[str]) -> tuple[str | None, str]:
    """``[MODEL] WHAT``: the model first, as everywhere, and it may be left out."""
    one_word = _ONE_WORD.get(what, f"put quotes around a {what} with spaces")
    if len(arguments) > 2:
        raise CircuitsError(f"expected [MODEL] {what}, got {len(arguments)} words: {one_word}")
    if len(arguments) == 2 and what in _ONE_WORD and _LIKE_A_HEAD.fullmatch(arguments[0]):
        raise CircuitsError(f"{arguments[0]!r} stands where a model's name does: {one_word}")
    return (arguments[0] if len(arguments) == 2 else None), arguments[-1]


def parts_of(text: str) -> list[str]:
    """``"a, b"`` -> ``["a", "b"]``."""
    return [part.strip() for part in text.split(",") if part.strip()]


def score_names(scores: str | None) -> list[str] | str | None:
    """What ``--scores`` names, as the scoreboard takes it."""
    if scores is None or scores.strip() == "all":
        return None if scores is None else "all"
    names = parts_of(scores)
    if not names:
        raise CircuitsError("--scores names no score: leave it out for the spectra, or write all")
    return names


def prompt_of(text: str, ids: bool) -> str | list[int]:
    """A prompt as text or, with ``--ids``, as token ids."""
    return [_id(part) for part in text.replace(",", " ").split()] if ids else text


def word_of(text: str, ids: bool) -> str | int:
    """An answer as text or, with ``--ids``, as a token id."""
    return _id(text) if ids else text


def _id(text: str) -> int:
    if not is_count(text):
        raise CircuitsError(f"{text[:80]!r} is no token id; with --ids, prompt and answers are whole numbers")
    return int(text)


def is_position(text: str) -> bool:
    """Whether it is a position, of which negative ones count from the end."""
    return is_count(text.removeprefix("-"))


def is_count(text: str) -> bool:
    """Whether it is a whole number of sensible length, in plain digits."""
    return text.isascii() and text.isdecimal() and len(text) < 12

"""A token's text where nothing may vanish: in figures, and in what notebooks show."""

from __future__ import annotations

import unicodedata

_NAMED = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "CR", "\x7f": "DEL", "\u00a0": "NBSP"}


def visible(token: str) -> str:
    """The token with a mark for every character that does not show by itself; ``∅`` for the empty token.

    Spaces, line ends and tabs have signs of their own; control, format, private and unassigned characters, separators and
    lone bytes are written as their code.
    """
    return "".join(_mark(character) for character in token) or "∅"


def _mark(character: str) -> str:
    if character in _NAMED:
        return _NAMED[character]
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # Python's surrogateescape: a byte that is no text by itself
        return f"x{code - 0xDC00:02X}"
    if unicodedata.category(character)[0] in "CZ":
        return f"U+{code:04X}"
    return character

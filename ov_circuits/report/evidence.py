"""A head in a sentence or two, every clause on a number that is shown beside it.

A sentence is a list of parts: strings, ``{"token": place in the table of texts}`` and ``{"head": place in layer-major order}``,
so that a page can set tokens as tokens and heads as links. Words are tied to thresholds that are written here and nowhere
else; a number that does not reach one is told without a word for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

Part = str | dict[str, int]

# From here on a head "copies" or "suppresses": its own token is among the ten most raised (lowered) for half of all tokens.
_HALF = 0.5
# Eigenvalues are mostly of one sign from here on: three quarters of their sum of sizes.
_ONE_SIDED = 0.5
_LINKS = 2
_TOKENS = 3
# Of a head's attention on probes: from the first on it goes "mostly" to one place; this much above chance is worth a clause.
_MOSTLY, _ABOVE_CHANCE = 0.5, 0.2
_PLACES = {
    "induction": "the token after an earlier occurrence",
    "duplicate_token": "an earlier occurrence of the token",
    "previous_token": "the token before",
    "first_token": "the first token",
    "self_attention": "the token itself",
    "delimiter": "delimiters",
}


def sentence(
    row: pd.Series, card: dict[str, Any], incoming: pd.DataFrame | None, outgoing: pd.DataFrame | None
) -> list[Part]:
    """What a head does, from its row of the board, its card, and its flagged pairs by falling ``z_paired``.

    Pairs have columns ``kind``, ``other`` (the other head's place) and ``z_paired``.
    """
    parts = [*_attention(row), *_copying(row)]
    links = [*_links("reads from", incoming), *_links("feeds", outgoing)]
    if links:
        parts += ["It ", *links[0], *(["; it ", *links[1]] if len(links) > 1 else []), ". "]
    parts += _direction(card)
    return _joined(parts)


def prompt_clause(values: Sequence[float | None], head: int, quantity: list[Part]) -> list[Part]:
    """What a head moves on the prompt, and its place among all heads on that side."""
    value = values[head]
    if value is None:
        return []
    side = [other for other in values if other is not None and (other > value if value >= 0 else other < value)]
    place = "the most" if not side else f"number {len(side) + 1}"
    way = "for" if value >= 0 else "against"
    return [
        f" On the prompt it moves {_signed(value)} to the ",
        *quantity,
        f": {place} {way} it of {len(values)} heads.",
    ]


def _attention(row: pd.Series) -> list[Part]:
    """Where attention goes on probe prompts, if much of it goes to one place."""
    measured = [key for key in _PLACES if _known(row.get(key)) and _known(row.get(f"{key}_null_mean"))]
    above = {key: float(row[key] - row[f"{key}_null_mean"]) for key in measured}
    key = max(above, key=above.__getitem__, default=None)
    if key is None or above[key] < _ABOVE_CHANCE:
        return []
    degree = "mostly" if row[key] >= _MOSTLY else "in part"
    name = key.replace("_", " ").removesuffix(" attention")
    told = f"{name} {row[key]:.2f}, by chance {row[f'{key}_null_mean']:.2f}"
    return [f"On probe prompts it attends {degree} to {_PLACES[key]} ({told}). "]


def _copying(row: pd.Series) -> list[Part]:
    own = ""
    for key, word, way in (("rank_copying_10", "Copies", "raised"), ("rank_suppression_10", "Suppresses", "lowered")):
        if _known(row.get(key)) and float(row[key]) >= _HALF:
            own = f"{word}: its own token is among the 10 most {way} for {_percent(row[key])} of tokens"
            break
    spaces = {"eigen_copying_full": "over the vocabulary", "eigen_copying_ov": "in residual space"}
    key = next((name for name in spaces if _known(row.get(name))), "")
    if not key:
        return [f"{own}. "] if own else []
    value, z = row[key], row.get(f"{key}_z")
    word = "mostly positive" if value > _ONE_SIDED else "mostly negative" if value < -_ONE_SIDED else "of both signs"
    found = f"eigenvalues {spaces[key]} are {word} (copying {_signed(value)}{_z(z)})"
    return [f"{own}; its {found}. " if own else f"Its {found}. "]


def _links(verb: str, pairs: pd.DataFrame | None) -> list[list[Part]]:
    """One clause, or none: the strongest links in one direction, those of one kind together."""
    if pairs is None or pairs.empty:
        return []
    clause: list[Part] = [f"{verb} "]
    for n, (kind, rows) in enumerate(pairs.head(_LINKS).groupby("kind", sort=False)):
        clause.append(" and " if n else "")
        for k, other in enumerate(rows["other"]):
            clause += [" and " if k else "", {"head": int(other)}]
        clause.append(f" by {kind}-composition (z {', '.join(map(_two_digits, rows['z_paired']))})")
    return [clause]


def _direction(card: dict[str, Any]) -> list[Part]:
    if not card["directions"]:
        return []
    first = card["directions"][0]

    def tokens(side: str, end: str) -> list[Part]:
        listed: list[Part] = []
        for k, (token, _) in enumerate(first[side][end][:_TOKENS]):
            listed += [" " if k else "", {"token": int(token)}]
        return listed

    parts: list[Part] = [
        f"Its strongest direction ({_percent(first['energy'])} of the squared norm of OV) reads ",
        *tokens("reads", "plus"),
        " and writes ",
        *tokens("writes", "plus"),
        "; at its other end it reads ",
        *tokens("reads", "minus"),
        " and writes ",
        *tokens("writes", "minus"),
        ".",
    ]
    if not first["separable"]:
        parts.append(
            " That direction is not separable from the next: its tokens are one choice among many; read the span."
        )
    return parts


def _joined(parts: list[Part]) -> list[Part]:
    """Neighbouring strings as one; no space at the end."""
    out: list[Part] = []
    for part in parts:
        if isinstance(part, str) and out and isinstance(out[-1], str):
            out[-1] += part
        elif part != "":
            out.append(part)
    if out and isinstance(out[-1], str):
        out[-1] = out[-1].rstrip()
    return out


def _known(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def _signed(value: float) -> str:
    return (f"{value:+.2f}" if abs(value) >= 0.1 else f"{value:+.2g}").replace("-", "\N{MINUS SIGN}")


def _z(value: Any) -> str:
    return f", z {_two_digits(value)}" if _known(value) else ""


def _two_digits(value: float) -> str:
    return (f"{value:.2g}" if abs(value) < 99.5 else f"{value:.0f}").replace("-", "\N{MINUS SIGN}")


def _percent(share: float | None) -> str:
    if share is None:
        return "0 %"
    return "< 1 %" if 0 < share < 0.01 else f"{share * 100:.0f} %"

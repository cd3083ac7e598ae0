"""The payload of a head's card: spectrum beside its null, eigenvalues, directions and token pairs as tokens, and the sentence."""

from __future__ import annotations

from typing import Any

import pandas as pd
from torch import Tensor

from ov_circuits.model import Head, Model
from ov_circuits.report.numbers import complex_numbers, number, numbers, rounded
from ov_circuits.scores.board import LayerCircuits
from ov_circuits.scores.chance import DRAWS, Draws, LayerDraws
from ov_circuits.scores.directions import Directions, Ends, directions
from ov_circuits.words import token_text

_DIRECTIONS = 6
_TOKENS = 8
# So many tokens of each end are found by the page's search: most tokens of a vocabulary are among them somewhere.
_SEARCHED = 40

# The card of a head whose weights hold NaN or infinity: nothing of it can be decomposed.
NO_CARD: dict[str, Any] = {
    "singular_values": [],
    "null_low": [],
    "null_high": [],
    "eigenvalues_ov": [],
    "eigenvalues_full": None,
    "directions": None,
    "pairs": None,
}


class Texts:
    """The page's table of token texts: each token that is shown, once."""

    def __init__(self, model: Model) -> None:
        self._model, self._index = model, dict[int, int]()
        self.table: list[str] = []

    def index(self, token: int) -> int:
        """A token's place in the table."""
        if token not in self._index:
            self._index[token] = len(self.table)
            self.table.append(token_text(self._model, token))
        return self._index[token]


class Search:
    """What the page's search of tokens knows: for each head and direction the strongest tokens of each end, in order."""

    def __init__(self, model: Model) -> None:
        self._texts = Texts(model)
        self._places: list[list[dict[str, dict[str, list[int]]]]] = []

    def learn(self, found: Directions, finite: list[bool]) -> None:
        """The heads of the next layer; those that are not finite have no directions."""

        def ends(side: Ends, head: int, k: int) -> dict[str, list[int]]:
            return {
                name: [self._texts.index(token) for token in ids[head, k].tolist()]
                for name, ids in (("plus", side.plus), ("minus", side.minus))
            }

        for head, whole in enumerate(finite):
            count = found.values.shape[-1] if whole else 0
            self._places.append(
                [{"reads": ends(found.reads, head, k), "writes": ends(found.writes, head, k)} for k in range(count)]
            )

    def section(self) -> dict[str, Any] | None:
        """``places`` by head and direction in a table of ``tokens`` of their own; None without embeddings."""
        return {"tokens": self._texts.table, "places": self._places} if self._places else None


def spectrum_draws(model: Model, seed: int) -> Draws:
    """The random rotations behind every spectrum's band."""
    return Draws(model, DRAWS, seed, vocabulary=False)


def layer_cards(
    model: Model, layer: int, texts: Texts, draws: Draws, pairs: dict[str, pd.DataFrame], search: Search | None = None
) -> list[dict[str, Any]]:
    """The cards of one layer's heads; ``search`` learns their directions' tokens beyond those that a card shows."""
    circuits = LayerCircuits(model, layer)
    finite = model.layer(layer).finite_heads.tolist()
    ov = circuits.ov
    null = LayerDraws(draws, circuits.weights, ov, circuits.qk).singular_values
    full = circuits.full_ov.eigenvalues if model.has_embeddings else None
    tokens = _TOKENS if search is None else _SEARCHED
    found = directions(model, layer, k=_DIRECTIONS, tokens=tokens) if model.has_embeddings else None
    if search is not None and found is not None:
        search.learn(found, finite)
    return [
        {
            "singular_values": numbers(ov.singular_values[head]),
            "null_low": numbers(null[:, head].amin(0)),
            "null_high": numbers(null[:, head].amax(0)),
            "eigenvalues_ov": complex_numbers(ov.eigenvalues[head]),
            "eigenvalues_full": None if full is None else complex_numbers(full[head]),
            "directions": None if found is None else _direction_rows(found, head, texts),
            "pairs": _pair_rows(pairs.get(f"{layer}.{head}"), texts),
        }
        if finite[head]
        else dict(NO_CARD)
        for head in range(model.n_heads)
    ]


def _direction_rows(found: Directions, head: int, texts: Texts) -> list[dict[str, Any]]:
    return [
        {
            "value": number(found.values[head, k]),
            "energy": number(found.energy[head, k]),
            "separable": bool(found.separable[head, k]),
            "reads": _end_rows(found.reads, head, k, texts),
            "writes": _end_rows(found.writes, head, k, texts),
        }
        for k in range(found.values.shape[-1])
    ]


def _end_rows(ends: Ends, head: int, k: int, texts: Texts) -> dict[str, list[list[int | float]]]:
    def rows(ids: Tensor, values: Tensor) -> list[list[int | float]]:
        pairs = zip(ids[head, k, :_TOKENS].tolist(), values[head, k, :_TOKENS].tolist(), strict=True)
        return [[texts.index(token), rounded(value)] for token, value in pairs]

    return {"plus": rows(ends.plus, ends.plus_values), "minus": rows(ends.minus, ends.minus_values)}


def _pair_rows(frame: pd.DataFrame | None, texts: Texts) -> dict[str, list[list[int | float]]] | None:
    """``[source, output, value]`` at both ends, tokens as places in the table."""
    if frame is None:
        return None
    return {
        str(end): [
            [texts.index(source), texts.index(output), rounded(value)]
            for source, output, value in zip(rows["source_id"], rows["output_id"], rows["value"], strict=True)
        ]
        for end, rows in frame.groupby("end", sort=False)
    }


def head_card(head: Head, seed: int = 0) -> dict[str, Any]:
    """One head's spectrum and directions, as its card on the page has them (token texts instead of places in a table)."""
    texts = Texts(head.model)
    cards = layer_cards(head.model, head.layer, texts, spectrum_draws(head.model, seed), {})
    return with_texts(cards[head.index], texts.table)


def with_texts(card: dict[str, Any], table: list[str]) -> dict[str, Any]:
    """A card that needs no table: every token as its text."""

    def ends(rows_by_end: dict[str, Any], tokens: int) -> dict[str, Any]:
        return {
            end: [[*(table[int(place)] for place in row[:tokens]), *row[tokens:]] for row in rows]
            for end, rows in rows_by_end.items()
        }

    directions = card["directions"] and [
        {**direction, "reads": ends(direction["reads"], 1), "writes": ends(direction["writes"], 1)}
        for direction in card["directions"]
    ]
    return {**card, "directions": directions, "pairs": card["pairs"] and ends(card["pairs"], 2)}

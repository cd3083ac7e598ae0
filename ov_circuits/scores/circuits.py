"""Which OV circuits a score is asked for: every head, some of them, or the sum of some of them as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from ov_circuits.errors import CircuitsError
from ov_circuits.linalg.rows import Rows
from ov_circuits.model import Head, Layer, Model
from ov_circuits.progress import track


@dataclass(frozen=True, eq=False)
class Circuit:
    """W_V W_O of a head, or of several heads added up.

    Attributes:
        label: ``"1.4"``, or ``"1.4+1.10"`` for a sum.
        layer: the layer; None for a sum across layers.
        index: the head's index; None for a sum.
        reader: W_V [d_model, r]; of a sum, side by side.
        writer: W_O [r, d_model]; of a sum, one below the other.
        reads_as: equal for circuits with the same reader (heads that share a value head).
        finite: whether no weight of its heads is NaN or infinity.
    """

    label: str
    layer: int | None
    index: int | None
    reader: Float[Tensor, "d_model r"]
    writer: Float[Tensor, "r d_model"]
    reads_as: tuple[tuple[int, int], ...]
    finite: bool


def circuits(
    model: Model, heads: Head | str | Sequence[Head | str] | None = None, each: bool = False
) -> Iterator[Circuit]:
    """The circuits to score, one after the other.

    Args:
        model: the checkpoint, in the view that the weights are to have.
        heads: None for every head, one by one; or labels, whose circuits are added up to one.
        each: with labels: one circuit a head instead of their sum.

    A sum across layers takes the norms of all its layers to scale the stream alike.

    Raises:
        CircuitsError: a label names no head, one is named twice, or the list is empty.
    """
    if heads is None:
        return (_one(head) for head in track(list(model.heads()), "Scoring heads"))
    chosen = [model.head(one) for one in ([heads] if isinstance(heads, (str, Head)) else heads)]
    if not chosen or len({head.label for head in chosen}) < len(chosen):
        raise CircuitsError(f"heads = {heads!r} names no head, or one of them twice: give each label once")
    if each:
        return (_one(head) for head in chosen)
    return iter([_sum(chosen)])


def circuits_of(weights: Layer, heads: range) -> Iterator[Circuit]:
    """The circuits of some heads of a layer, from the part of the layer that holds just them."""
    group = len(heads) // weights.W_V.shape[0]
    for i, index in enumerate(heads):
        yield Circuit(
            f"{weights.index}.{index}",
            weights.index,
            index,
            weights.W_V[i // group],
            weights.W_O[i],
            ((weights.index, i // group),),
            bool(weights.finite_heads[i]),
        )


def _one(head: Head) -> Circuit:
    return Circuit(
        head.label, head.layer, head.index, head.W_V, head.W_O, ((head.layer, head.kv_head),), _is_finite(head)
    )


def _is_finite(head: Head) -> bool:
    return bool(head.model.layer(head.layer).finite_heads[head.index])


def _sum(heads: Sequence[Head]) -> Circuit:
    if len(heads) == 1:
        return _one(heads[0])
    layers = {head.layer for head in heads}
    return Circuit(
        label="+".join(head.label for head in heads),
        layer=layers.pop() if len(layers) == 1 else None,
        index=None,
        reader=torch.cat([head.W_V for head in heads], dim=1),
        writer=torch.cat([head.W_O for head in heads], dim=0),
        reads_as=tuple((head.layer, head.kv_head) for head in heads),
        finite=all(map(_is_finite, heads)),
    )


NULL_NOTE = "every order of the vocabulary alike: k / n_vocab, with binomial spread"


def share_by_chance(k: int, n_vocab: int, cases: int) -> tuple[float, float]:
    """Mean and standard deviation of the share of cases whose token is among the k first of an order of the vocabulary."""
    p = min(k / n_vocab, 1.0)
    return p, math.sqrt(p * (1 - p) / cases)


@dataclass(frozen=True, eq=False)
class TokenScore:
    """A score over tokens made ready for a model: it can be asked for one circuit after the other.

    Attributes:
        model: in the view that the weights are to have.
        X: what is read at each token, [n, d_model].
        score: from X W_V [n, r] and W_O [r, d_model] to numbers by name.
        by_chance: each number's mean and standard deviation where every order of the vocabulary is alike, by name, in order; None
            for what has none (an error).
        attrs: what it counts over, for the frame.
    """

    model: Model
    X: Float[Tensor, "n d_model"] | Rows
    score: Callable[[Tensor, Tensor], dict[str, float]]
    by_chance: dict[str, tuple[float, float] | None]
    attrs: dict[str, Any]

    def frame(self, circuits: Iterable[Circuit], nulls: bool = True) -> pd.DataFrame:
        """One row a circuit: ``head``, ``layer``, ``index`` and its numbers, NaN where a weight is not finite.

        With ``nulls``, each is followed by ``.._null_mean`` and ``.._z``.
        """
        readings, nothing = Readings(self.X), dict.fromkeys(self.by_chance, math.nan)
        found = pd.DataFrame(
            {"head": c.label, "layer": c.layer, "index": c.index}
            | (self.score(readings.of(c), c.writer) if c.finite else nothing)
            for c in circuits
        )
        columns = {name: found[name] for name in ("head", "layer", "index")}
        for name, chance in self.by_chance.items():
            column = columns[name] = found[name]
            if nulls and chance is not None:
                mean, std = chance
                columns[f"{name}_null_mean"] = column.where(column.isna(), mean)
                columns[f"{name}_z"] = (column - mean) / (std or math.nan)
        return pd.DataFrame(columns)


class Readings:
    """X W_V of the circuits that come by: kept while the reader stays the same, as heads of a group share it."""

    def __init__(self, X: Float[Tensor, "n d_model"] | Rows) -> None:
        self._X = X
        self._key: tuple[tuple[int, int], ...] | None = None
        self._values = torch.empty(len(X), 0, dtype=torch.float32, device="cpu")

    def of(self, circuit: Circuit) -> Float[Tensor, "n r"]:
        """X W_V [n, r]."""
        if circuit.reads_as != self._key:
            self._key, self._values = circuit.reads_as, self._X @ circuit.reader
        return self._values

"""Which OV circuits a score is asked for: every head, some of them, or the sum of some of them as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
    """

    label: str
    layer: int | None
    index: int | None
    reader: Float[Tensor, "d_model r"]
    writer: Float[Tensor, "r d_model"]
    reads_as: tuple[tuple[int, int], ...]

    @property
    def finite(self) -> bool:
        """Whether its weights hold neither NaN nor infinity."""
        return bool(self.reader.isfinite().all()) and bool(self.writer.isfinite().all())


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
        )


def _one(head: Head) -> Circuit:
    return Circuit(head.label, head.layer, head.index, head.W_V, head.W_O, ((head.layer, head.kv_head),))


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
    )


@dataclass(frozen=True, eq=False)
class TokenScore:
    """A score over tokens made ready for a model: it can be asked for one circuit after the other.

    Attributes:
        model: in the view that the weights are to have.
        X: what is read at each token, [n, d_model].
        score: from X W_V [n, r] and W_O [r, d_model] to numbers by name.
        attrs: what it counts over, for the frame.
    """

    model: Model
    X: Float[Tensor, "n d_model"] | Rows
    score: Callable[[Tensor, Tensor], dict[str, float]]
    attrs: dict[str, Any]

    def rows(self, circuits: Iterable[Circuit]) -> list[dict[str, Any]]:
        """One row a circuit: ``head``, ``layer``, ``index`` and its numbers."""
        readings = Readings(self.X)
        return [
            {"head": c.label, "layer": c.layer, "index": c.index} | self.score(readings.of(c), c.writer)
            for c in circuits
        ]


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

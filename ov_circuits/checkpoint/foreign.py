"""Files of other programs, opened under Hugging Face's names: what every such reader gives, and what several of them need.

Each reader makes a lazy store whose tensors have the names, shapes and row order of the Hugging Face checkpoint of the same
model, and a config in the words of its config.json. Nothing after this room knows where a model came from.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ov_circuits.checkpoint.stores import Recipe, TensorStore
from ov_circuits.errors import CircuitsError


@dataclass(frozen=True)
class Foreign:
    """A checkpoint of another program in Hugging Face's terms.

    Attributes:
        config: as a config.json says it.
        store: the tensors under Hugging Face's names.
        tokenizer: the file that holds the vocabulary, when there is one.
        cannot_run: why no prompt can be run, when something in the file is known not to carry over.
        files: what it was read from besides the tensors' files.
    """

    config: dict[str, Any]
    store: TensorStore = field(repr=False)
    tokenizer: Path | None = None
    cannot_run: str | None = None
    files: tuple[Path, ...] = ()


def unpermute_rotary(rows: Tensor, n_heads: int) -> Tensor:
    """Interleaved rotary pairs (x0 y0 x1 y1 ..) -> halves (x0 x1 .. y0 y1 ..), within each head of [n_heads * d_head, ..].

    Meta's and llama.cpp's Llama rotate neighbouring rows, transformers rotates the halves of a head.
    """
    return rows.unflatten(0, (n_heads, -1, 2)).transpose(1, 2).reshape(rows.shape)


def halves(recipe: Recipe, n_heads: int, where: str) -> Recipe:
    """A W_Q or W_K whose rows lie in interleaved rotary order, put into halves.

    Raises:
        CircuitsError: its rows are not pairs in each of ``n_heads`` heads.
    """
    if not recipe.shape or recipe.shape[0] % (2 * n_heads):
        raise CircuitsError(
            f"{where} has query or key weights of shape {list(recipe.shape)}, which are no rotary pairs in {n_heads} heads: "
            "the number of heads and the weights belong to different models"
        )
    return recipe.then(lambda rows: unpermute_rotary(rows, n_heads))


def joined(parts: Sequence[Recipe], axis: int | None) -> Recipe:
    """A tensor of which each tensor-parallel rank holds a block along ``axis``; None: all ranks hold it whole."""
    first = parts[0]
    if len(parts) == 1 or axis is None:
        return first
    shape = list(first.shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    return Recipe(tuple(shape), first.dtype, first.origin, lambda: torch.cat([part.make() for part in parts], dim=axis))


def zeros(shape: tuple[int, ...], origin: str) -> Recipe:
    """A bias that a file leaves out because it is zero, where Hugging Face's names have one."""
    return Recipe(shape, "float32", origin, lambda: torch.zeros(shape, dtype=torch.float32, device="cpu"))


_PLAIN = (bool, int, float, str, list, tuple, dict)


class Settings:
    """A foreign file's settings, with the sentence to say when one is missing or makes no sense."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        # What a pickle may hold besides (tensors, types) is no setting, and answers to == and bool() otherwise.
        self._values = {key: value for key, value in values.items() if isinstance(value, _PLAIN)}
        self._where = where

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 to 10^8."""
        value = self._values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= 10**8:
            raise self.refusal(key, "is missing" if value is None else f"is {reprlib.repr(value)}, no sensible number")
        return value

    def number(self, key: str, default: float) -> float:
        """A finite number from 0 on."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e30:
            raise self.refusal(key, f"is {reprlib.repr(value)}, no sensible number")
        return float(value)

    def get(self, key: str, default: Any = None) -> Any:
        """Any value; None counts as missing."""
        value = self._values.get(key)
        return default if value is None else value

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, f"is {reprlib.repr(value)}, not true or false")
        return value

    def refusal(self, key: str, problem: str) -> CircuitsError:
        """What to raise of one setting."""
        return CircuitsError(f"{self._where} cannot be used: its setting {key} {problem}")

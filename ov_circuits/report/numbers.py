"""Numbers and arrays as a page can hold them: rounded to what it can show, and None where there is none."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_DIGITS = 5  # significant digits of numbers on a page


def rounded(value: float) -> float:
    """Five significant digits."""
    return float(f"{value:.{_DIGITS}g}")


def number(value: Any) -> float | None:
    """A number for JSON: rounded, and None where there is none (JSON has no NaN)."""
    if value is None:
        return None
    value = float(value)
    return rounded(value) if np.isfinite(value) else None


def numbers(values: Tensor | Iterable[float]) -> list[float | None]:
    """The same for many."""
    return [number(value) for value in (values.tolist() if isinstance(values, Tensor) else values)]


def complex_numbers(values: Tensor) -> list[list[float | None]]:
    """Pairs of real and imaginary part."""
    return [[number(value.real), number(value.imag)] for value in values.tolist()]


def array(values: Tensor | NDArray[np.float32], dtype: str) -> dict[str, Any]:
    """A tensor as base64: ``u2`` is a fraction of the largest value in 65,535 steps, ``f2`` is scaled to keep half precision."""
    found = values.numpy(force=True) if isinstance(values, Tensor) else values
    data: NDArray[np.float32] = np.asarray(found, dtype=np.float32)
    largest = float(np.abs(data).max(initial=0.0)) or 1.0
    if dtype == "u2":
        scale = largest / 65535
        packed = np.rint(data / scale).astype("<u2").tobytes()
    elif dtype == "f2":
        scale, packed = largest, (data / largest).astype("<f2").tobytes()
    else:
        scale, packed = 1.0, data.astype("<f4").tobytes()
    return {"dtype": dtype, "shape": list(data.shape), "scale": scale, "data": base64.b64encode(packed).decode()}

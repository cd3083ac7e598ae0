"""torch's modes are the caller's: autocast, inference mode and reduced products end where this package begins.

Under autocast a product of float32 would be one of bfloat16, and nobody would be told; what is made in inference mode cannot be
written into outside of it, and is kept for calls that come later. Both belong to a thread, as a ``with`` does. After
``torch.set_float32_matmul_precision("high")``, a usual line in training, a GPU multiplies float32 with ten bits ("medium", and
some processors: eight). That is one setting for all threads.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property, partial, wraps
from inspect import isfunction
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

_DEVICES = ("cpu", "cuda", "mps", "xpu")
# What of a class is an operation, though its name begins and ends as a protocol's.
_OPERATIONS = ("__getitem__", "__matmul__", "__rmatmul__")


class _FullPrecision:
    """A context in which float32 products are float32: the first call that enters sets it, the last that leaves takes it back."""

    def __init__(self) -> None:
        self._lock, self._calls = threading.Lock(), 0
        self._put_back: Callable[[], None] = lambda: None

    def needed(self, torch: Any) -> bool:
        """Whether the user's setting is another, or would be if no call were running."""
        return bool(self._calls) or _products_of(torch) != "highest"

    def __enter__(self) -> None:
        import torch

        with self._lock:
            if not self._calls:
                self._put_back = _restorer(torch)
                torch.set_float32_matmul_precision("highest")
            self._calls += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._calls -= 1
            if not self._calls:
                self._put_back()


def _products_of(torch: Any) -> str | None:
    """``highest``, ``high`` or ``medium``; None where it was said by torch.backends, for some backends or all."""
    try:
        precision: str = torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
    return precision


def _restorer(torch: Any) -> Callable[[], None]:
    """What sets the precision of products to what it is now."""
    precision = _products_of(torch)
    if precision is not None:
        return partial(torch.set_float32_matmul_precision, precision)
    said = {backend: backend.fp32_precision for backend in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)}

    def restore() -> None:
        for backend, own in said.items():
            backend.fp32_precision = own

    return restore


_full_precision = _FullPrecision()


def ordinary(function: F) -> F:
    """The function, outside of any autocast and inference mode around its call, its float32 products in float32."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or not (
            torch.is_inference_mode_enabled()
            or any(map(torch.is_autocast_enabled, _DEVICES))
            or _full_precision.needed(torch)
        ):
            return function(*args, **kwargs)
        with ExitStack() as stack:
            stack.enter_context(_full_precision)
            stack.enter_context(torch.inference_mode(False))
            for device in filter(torch.is_autocast_enabled, _DEVICES):
                stack.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def ordinary_class(cls: C) -> C:
    """The class, its methods and properties as :func:`ordinary` gives them."""
    for name, member in list(vars(cls).items()):
        if name.startswith("_") and name not in _OPERATIONS:
            continue
        if isfunction(member):
            setattr(cls, name, ordinary(member))
        elif isinstance(member, property) and member.fget is not None:
            setattr(cls, name, property(ordinary(member.fget), doc=member.__doc__))
        elif isinstance(member, cached_property):
            member.func = ordinary(member.func)
    return cls

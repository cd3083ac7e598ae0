"""torch's modes are the caller's: autocast and inference mode end where this package begins.

Under autocast a product of float32 would be one of bfloat16, and nobody would be told; what is made in inference mode cannot be
written into outside of it, and is kept for calls that come later. Both belong to a thread, as a ``with`` does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property, wraps
from inspect import isfunction
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

_DEVICES = ("cpu", "cuda", "mps", "xpu")
# What of a class is an operation, though its name begins and ends as a protocol's.
_OPERATIONS = ("__getitem__", "__matmul__", "__rmatmul__")


def ordinary(function: F) -> F:
    """The function, outside of any autocast and inference mode around its call."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or not (torch.is_inference_mode_enabled() or any(map(torch.is_autocast_enabled, _DEVICES))):
            return function(*args, **kwargs)
        with ExitStack() as stack:
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

"""A device that is none: its tensors are kept in ordinary memory, and everything else is as on a GPU.

Tensors of the device ``pretend`` meet only one another (and single numbers on the CPU, as CUDA allows), must be fetched before
numpy sees them, and are made where ``device=`` says so. What runs on it without an error, and to the same numbers, runs on a real
device too, as far as where tensors lie can decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"


class _Module:
    """What torch.pretend is."""

    # Between its tests the machine has no such device: torch's DataParallel, for one, moves models to any that there is.
    present = False

    @classmethod
    def is_available(cls) -> bool:
        return cls.present

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def set_device(device: object) -> None:
        pass

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        pass

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


class Elsewhere(torch.Tensor):
    """A tensor on the pretended device; ``inside`` are its numbers."""

    inside: torch.Tensor

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> Elsewhere:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inside.shape,
            strides=inside.stride(),
            storage_offset=inside.storage_offset(),
            dtype=inside.dtype,
            device=torch.device(NAME, 0),
        )
        made.inside = inside
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{NAME} {self.inside!r}"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.numpy and not kwargs.get("force"):
            raise TypeError(f"can't convert {NAME} device type tensor to numpy. Use Tensor.cpu() first")
        if func in (torch.Tensor.tolist, torch.Tensor.numpy):
            return func(args[0].inside, *args[1:], **kwargs)
        if func in _PRODUCTS and args[0].ndim == 1 < args[1].ndim:
            # torch takes a dimension away in place here, which a tensor with its numbers elsewhere cannot.
            return (args[0].unsqueeze(0) @ args[1]).squeeze(-2)
        with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
_INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
_JOINED = ("aten::cat", "aten::stack", "aten::mm", "aten::bmm", "aten::dot", "aten::mv")


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation on the numbers themselves, after a look at where its tensors lie."""
    name = func._schema.name
    if func not in _COPIES:
        _look(name, args, kwargs)
    to = kwargs.get("device")
    if to is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    inside_args, inside_kwargs = pytree.tree_map_only(Elsewhere, lambda x: x.inside, (args, kwargs))
    found = func(*inside_args, **inside_kwargs)
    if name.endswith("_") and not name.endswith("__"):
        return args[0]
    if "out" in kwargs:
        return kwargs["out"]
    if to is not None and torch.device(to).type != NAME:
        return found
    return pytree.tree_map_only(torch.Tensor, Elsewhere, found)


def _look(name: str, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise a RuntimeError where CUDA would: tensors of both places, but for single numbers and indices on the CPU."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if name in _INDEXED:
        tensors = [x for x in pytree.tree_leaves((args[0], args[2:])) if isinstance(x, torch.Tensor)]
    changed = name.endswith("_") and not name.endswith("__")
    for i, x in enumerate(tensors):
        number = x.ndim == 0 and name not in _JOINED and not (changed and i == 0)
        if not isinstance(x, Elsewhere) and not number:
            raise RuntimeError(
                f"{name}: expected all tensors on the same device, but found {x.device} beside {NAME}: "
                f"shapes {[list(x.shape) for x in tensors]}"
            )


def _maker(make: Callable[..., torch.Tensor]) -> Callable[..., Elsewhere]:
    return lambda *args, dtype=None, **_: Elsewhere(make(*args, dtype=dtype))


def _copy(into: torch.Tensor, of: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    into, of = (x.inside if isinstance(x, Elsewhere) else x for x in (into, of))
    return into.copy_(of)


_library: list[Any] = []


@contextmanager
def pretended() -> Iterator[torch.device]:
    """The device is there. It is registered once a process."""
    if not _library:
        _setup_privateuseone_for_python_backend(NAME, _Module)
        library = torch.library.Library("_", "IMPL")
        library.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")
        made = torch.library.Library("aten", "IMPL")
        # Made of an empty tensor that grows, which a tensor with its numbers elsewhere cannot.
        for name in ("arange", "arange.start", "arange.start_step", "eye", "eye.m"):
            made.impl(name, _maker(getattr(torch, name.split(".")[0])), "PrivateUse1")
        made.impl("copy_", _copy, "PrivateUse1")  # torch.tensor(.., device=) comes here by another way
        _library.extend((library, made))
    _Module.present = True
    yield torch.device(NAME)
    _Module.present = False

"""The one exception a user's mistake or a faulty file raises."""

from __future__ import annotations

import operator
from typing import Any


class CircuitsError(ValueError):
    """What is wrong, in which file or tensor, and what to do: one or two sentences, no traceback on the command line.

    Everything that the user can mend (a missing file, a shape that contradicts the config, a head out of range)
    raises this. Any other exception that leaves the package is a fault of the package.
    """


def for_want_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no more memory: then no file and no setting is to blame."""
    # torch's CPU allocator has no error of its own, and the GPU's cannot be named without importing torch.
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or "DefaultCPUAllocator" in str(error)


# Twice a seed and one more still seeds torch's generators.
LARGEST_SEED = 2**63 - 1


def is_one_number(value: object) -> bool:
    """Whether a value is no list, array or tensor of numbers and neither True nor False."""
    return type(value).__name__ not in ("bool", "bool_") and getattr(value, "ndim", 0) == 0


def is_whole(value: Any) -> bool:
    """Whether a value is one whole number: an int, or one of numpy's or torch's; True and False are none."""
    if not is_one_number(value):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> int:
    """An argument as a whole number within bounds.

    Raises:
        CircuitsError: it is none.
    """
    number = operator.index(value) if is_whole(value) else None
    if number is None or number < least or (most is not None and number > most):
        to = "on" if most is None else f"to {most}"
        raise CircuitsError(f"{name} is a whole number from {least} {to}, not {str(value)[:80]}")
    return number


def check_seed(seed: object) -> int:
    """A seed that every generator takes; raises as :func:`whole_number`."""
    return whole_number("a seed", seed, 0, LARGEST_SEED)

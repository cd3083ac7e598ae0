"""Arguments of the public functions against their annotations: a value of the wrong kind is one sentence, wherever it is given.

Users have no type checks. What is looked at is the kind of value alone (text, number, model, list of heads); whether there is such
a head or score, the function itself says. Annotations are read as they are written, so that nothing is imported for them.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from typing import Any, TypeVar

from ov_circuits.errors import CircuitsError, is_one_number, is_whole
from ov_circuits.modes import ordinary

F = TypeVar("F", bound=Callable[..., Any])

# Names that stand for several kinds.
_ALIASES = {
    "Answer": "str | int | Mapping[str | int, float] | Tensor",
    "Claim": "Copies | Applies | Composes",
    "PathLike[str]": "Path",
}
_WORDS = {
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "True or False",
    "Path": "a path",
    "slice": "a slice",
    "DataFrame": "a frame",
    "Tensor": "a tensor",
    "None": "None",
    "Applies": "an Applies",
    "Model": "a Model as ov.load gives it",
    "Head": "a Head",
    "Trace": "a Trace",
}


def checked(function: F) -> F:
    """The function, which refuses arguments that are not of the kinds that its annotations name; see also :mod:`ov_circuits.modes`.

    Raises:
        CircuitsError: from the function that is given back: an argument is of another kind.
    """
    signature = inspect.signature(function)
    kinds = {name: p.annotation for name, p in signature.parameters.items() if isinstance(p.annotation, str)}

    @ordinary
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind_partial(*args, **kwargs).arguments
        except TypeError:
            given = {}  # Python's own words for what is unknown
        for name, value in given.items():
            if name in kinds and not is_a(value, kinds[name]):
                raise CircuitsError(f"{function.__name__}: {name} is {_words(kinds[name])}, not {_shown(value)}")
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def is_a(value: Any, annotation: str) -> bool:
    """Whether a value is of one of the kinds that an annotation names."""
    kinds = _kinds(annotation)
    if isinstance(value, str) and not value and ("Path", ()) in kinds:
        return False  # it would be the working folder, which nobody means
    return any(_is_one(value, kind, inner) for kind, inner in kinds)


def _is_one(value: Any, kind: str, inner: tuple[str, ...]) -> bool:
    if kind == "Any" or kind == "None":
        return kind == "Any" or value is None
    if kind == "bool":
        return type(value).__name__ in ("bool", "bool_")
    if kind == "int":
        return is_whole(value)
    if kind == "float":
        return is_whole(value) or (hasattr(value, "__float__") and is_one_number(value))
    if kind == "Path":
        return isinstance(value, os.PathLike)
    if kind == "Mapping":
        return isinstance(value, Mapping) and all(is_a(k, inner[0]) and is_a(v, inner[1]) for k, v in value.items())
    if kind == "Sequence":
        if isinstance(value, (str, bytes, bytearray, Mapping)) or not isinstance(value, Iterable):
            return False
        if getattr(value, "ndim", 1) != 1:  # arrays, tensors, frames
            return False
        entries = value.tolist() if hasattr(value, "tolist") else value if isinstance(value, Sequence) else ()
        return all(is_a(entry, inner[0]) for entry in entries)
    return any(base.__name__ == kind for base in type(value).__mro__)


@cache
def _kinds(annotation: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """``"Head | Sequence[str]"`` -> (("Head", ()), ("Sequence", ("str",)))."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for part in _split(annotation, "|"):
        name, _, inner = part.partition("[")
        name = name.rpartition(".")[2]
        inner = inner.removesuffix("]")
        whole = _ALIASES.get(f"{name}[{inner}]" if inner else name)
        if whole is not None:
            found += _kinds(whole)
        elif name in ("Float", "Int", "Bool"):  # of jaxtyping
            found.append(("Tensor", ()))
        else:
            found.append((name, tuple(_split(inner, ",")) if inner else ()))
    return tuple(found)


def _split(text: str, mark: str) -> list[str]:
    """Parts between marks that stand in no brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == mark and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _words(annotation: str) -> str:
    words = [_word(kind, inner) for kind, inner in _kinds(annotation) if kind != "None"]
    words += ["None"] if any(kind == "None" for kind, _ in _kinds(annotation)) else []
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _word(kind: str, inner: tuple[str, ...]) -> str:
    if kind == "Sequence":
        return f"a list (each entry {_words(inner[0])})"
    if kind == "Mapping":
        return f"a dictionary ({_words(inner[0])}: {_words(inner[1])})"
    return _WORDS.get(kind, f"a {kind}")


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return f"{text if len(text) <= 80 else text[:80] + '..'} ({type(value).__name__})"

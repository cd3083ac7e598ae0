"""torch's default precision, device and modes are the user's: whatever they are, the numbers are the same ones."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from inspect import isfunction
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import ov_circuits as ov
from ov_circuits.modes import ordinary as ordinary_function

TEXT = "the people of the United States and the people of the United"
PROMPTS = [
    {"prompt": TEXT, "answer": " States", "foil": " the"},
    {"prompt": f"{TEXT} States", "answer": " and", "foil": " of"},
]

# Each opens its own model: what is read and built once is read and built under the user's defaults too.
WORKS: dict[str, Callable[[], Any]] = {
    "scoreboard": lambda: ov.scoreboard(ov.load(), "all"),
    "composition": lambda: ov.composition(ov.load(), "all"),
    "subspace_overlap": lambda: ov.subspace_overlap(ov.load()),
    "copy_table": lambda: ov.copy_table(ov.load()),
    "space_map": lambda: ov.space_map(ov.load()),
    "token_pair": lambda: ov.token_pair(ov.load(), " people", " the"),
    "reads": lambda: ov.load().head("1.0").reads(2),
    "spectrum": lambda: ov.spectrum(ov.load().head("1.0")),
    "full_ov": lambda: ov.load().head("1.0").full_ov.singular_values,
    "rows": lambda: ov.load().head("1.0").ov.rows([3, 5]),
    "verify": lambda: ov.load().verify().frame(),
    "logits": lambda: ov.load().trace(TEXT).logits,
    "ledger": lambda: ov.load().trace(TEXT).ledger(" States", " the"),
    "ledger_into": lambda: ov.load().trace(TEXT).ledger_into("1.0", "K", source=2),
    "write_norms": lambda: ov.load().trace(TEXT).write_norms(),
    "behaviours": lambda: ov.behaviours(ov.load(), seeds=2, rows=2),
    "ablate": lambda: ov.ablate(ov.load(), ["1.0"], TEXT, answer=" States"),
    "ablation_sweep": lambda: ov.ablation_sweep(ov.load(), TEXT, "mean", answer=" States", reference=[f"{TEXT} of"]),
    "attribute": lambda: ov.attribute(ov.load(), PROMPTS),
    "generate": lambda: ov.generate(ov.load(), "the people", 3).frame(),
    "scan": lambda: ov.scan(ov.load(), [TEXT * 20], window=32, stride=16).heads,
}


@contextmanager
def precision(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def seed(number: int) -> Iterator[None]:
    """Of the process's own generators; nothing is drawn from them. (Not Python's: beartype picks with it what it looks at.)"""
    before = np.random.get_state(), torch.get_rng_state()
    np.random.seed(number)
    torch.manual_seed(number)
    try:
        yield
        assert (
            torch.initial_seed() == number
            and np.random.random_sample() == np.random.RandomState(number).random_sample()
        )
        assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(number).get_state())
    finally:
        np.random.set_state(before[0])
        torch.set_rng_state(before[1])


@contextmanager
def products(precision: str) -> Iterator[None]:
    torch.set_float32_matmul_precision(precision)
    try:
        yield
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")


@contextmanager
def products_of_onednn(precision: str) -> Iterator[None]:
    """As torch.backends says it; the older function then only raises."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    if matmul is None:
        pytest.skip("torch before 2.9 has one setting for all libraries")
    matmul.fp32_precision = precision
    try:
        yield
        assert matmul.fp32_precision == precision
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.fixture(scope="module")
def ordinary() -> Callable[[str], Any]:
    found: dict[str, Any] = {}
    return lambda name: found[name] if name in found else found.setdefault(name, WORKS[name]())


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "bfloat16": lambda: precision(torch.bfloat16),
    "float64": lambda: precision(torch.float64),
    "meta": lambda: device("meta"),  # a tensor there has no numbers: whatever meets one fails
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference": torch.inference_mode,
    "another seed": lambda: seed(7),
    # Both send torch's own products to another library here; on a processor with AMX, and on GPUs, they have fewer bits too.
    "medium products": lambda: products("medium"),
    "bfloat16 products of one library": lambda: products_of_onednn("bf16"),
}


@pytest.mark.parametrize("defaults", STATES)
@pytest.mark.parametrize("name", WORKS)
def test_numbers_do_not_depend_on_torchs_defaults(ordinary: Callable[[str], Any], name: str, defaults: str) -> None:
    right = ordinary(name)
    with STATES[defaults]():
        found = WORKS[name]()
    if isinstance(right, pd.DataFrame):
        pd.testing.assert_frame_equal(found, right, rtol=1e-12)
    else:
        torch.testing.assert_close(found, right, rtol=1e-12, atol=0, equal_nan=True)
        assert not found.is_inference() and not found.requires_grad


@pytest.mark.parametrize("kind", [ov.Model, ov.Layer, ov.Head, ov.LowRank, ov.Trace, ov.Generation])
def test_no_method_or_property_runs_in_a_mode_of_the_callers(kind: type) -> None:
    """Each would otherwise be one more of the works above."""
    inside = [name for name, member in vars(kind).items() if not name.startswith("_") and not _is_ordinary(member)]
    assert not inside


def _is_ordinary(member: Any) -> bool:
    function = getattr(member, "fget", None) or getattr(member, "func", None) or member
    # Whatever was wrapped for another reason: a class's decorator comes last, and is outermost.
    return not isfunction(function) or function.__code__ is ordinary_function(lambda: None).__code__  # type: ignore[attr-defined]


def test_the_modes_are_the_callers_again_afterwards() -> None:
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ov.CircuitsError, match="no head 99"):
            ov.load().head("99.0")
        assert torch.is_inference_mode_enabled() and torch.is_autocast_enabled("cpu")


def test_products_are_whole_until_the_last_of_many_calls_has_ended() -> None:
    """One setting for all threads: a call that ends must not take it from another, nor one that comes later keep it."""
    inside, first_gone, seen = Event(), Event(), []

    @ordinary_function
    def first() -> None:
        assert inside.wait(60)

    @ordinary_function
    def second() -> None:
        inside.set()
        assert first_gone.wait(60)
        seen.append(torch.get_float32_matmul_precision())

    with products("medium"):
        threads = [Thread(target=first), Thread(target=second)]
        threads[0].start()
        threads[1].start()
        threads[0].join()
        first_gone.set()
        threads[1].join()
    assert seen == ["highest"]


_DATA = {"tensor", "as_tensor", "asarray", "full"}  # what they are given says what they hold
_RANGES = {"arange", "randint", "randperm", "range", "tril_indices", "triu_indices"}
_FLOATS = {"empty", "empty_strided", "eye", "linspace", "logspace", "ones", "rand", "randn", "zeros"}


def test_every_tensor_that_is_made_says_where_and_of_what_kind() -> None:
    silent = []
    for file in sorted(Path(ov.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.")):
                continue
            name, given = ast.unparse(node.func).removeprefix("torch."), {word.arg for word in node.keywords}
            lacks_device = name in _DATA | _RANGES | _FLOATS and not given & {"device", "out"}
            if lacks_device or (name in _FLOATS and not given & {"dtype", "out"}):
                silent.append(f"{file.name}:{node.lineno}: {ast.unparse(node)}")
    assert not silent

"""Arguments of the wrong kind: every public function answers with one sentence that names the argument."""

from __future__ import annotations

import inspect
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from test_misuse import unchecked  # noqa: F401 (a fixture)

import ov_circuits as ov
from ov_circuits import CircuitsError
from ov_circuits.arguments import is_a


class Stranger:
    """Of no kind that anything here takes."""


STRANGERS = (Stranger(), Stranger, {1: Stranger()}, [Stranger()], b"x", pd.DataFrame({"a": [1]}))


def public_functions() -> dict[str, Any]:
    found = {name: getattr(ov, name) for name in ov.__all__ if inspect.isfunction(getattr(ov, name))}
    found |= {f"prompts.{name}": getattr(ov.prompts, name) for name in ("load", "read")}
    figures = vars(ov.figures).items()
    return found | {
        f"figures.{n}": f
        for n, f in figures
        if inspect.isfunction(f) and n[0] != "_" and f.__module__ == ov.figures.__name__
    }


@pytest.fixture(scope="module")
def model():
    return ov.load()


def arguments() -> list[tuple[str, str]]:
    """Every argument of every public function that is to be of a kind."""
    return [
        (name, parameter.name)
        for name, function in public_functions().items()
        for parameter in inspect.signature(function).parameters.values()
        if parameter.annotation not in ("Any", "bool")
    ]


def test_there_are_public_functions_and_all_that_they_take_has_a_kind():
    names = public_functions()
    assert {"ablate", "scoreboard", "load", "prompts.load", "figures.waterfall"} <= names.keys() and len(names) > 40
    for name, function in names.items():
        for parameter in inspect.signature(function).parameters.values():
            assert isinstance(parameter.annotation, str), f"{name}: {parameter} has no annotation"


@pytest.mark.parametrize(("name", "argument"), arguments())
def test_an_argument_of_no_kind_is_named_before_any_work(model, name, argument):
    function = public_functions()[name]
    rest: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == argument:
            break
        rest[parameter.name] = model if parameter.annotation == "Model" else parameter.default
    rest = {key: value for key, value in rest.items() if value is not inspect.Parameter.empty}
    for stranger in STRANGERS:
        if (
            isinstance(stranger, pd.DataFrame)
            and "DataFrame" in inspect.signature(function).parameters[argument].annotation
        ):
            continue
        with pytest.raises(CircuitsError) as refused:
            function(**rest, **{argument: stranger})
        assert f"{name.rpartition('.')[2]}: {argument} is " in str(refused.value)
        assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("value", "annotation", "right"),
    [
        (3, "int", True),
        (np.int64(3), "int", True),
        (torch.tensor(3), "int", True),
        (True, "int", False),
        (np.True_, "int", False),
        (3.0, "int", False),
        (np.array([3]), "int", False),
        (torch.tensor([3]), "int", False),
        (math.nan, "float", True),
        (3, "float", True),
        (True, "float", False),
        ("3", "float", False),
        (True, "bool | None", True),
        (np.True_, "bool", True),
        (1, "bool", False),
        (None, "bool | None", True),
        ("x", "Sequence[str]", False),
        (["x"], "Sequence[str]", True),
        (("x", "y"), "Sequence[str]", True),
        (pd.Series(["x"]), "Sequence[str]", True),
        (["x", 3], "Sequence[str]", False),
        (["x", 3], "Sequence[int | str]", True),
        (torch.tensor([1, 2]), "Sequence[int]", True),
        (torch.tensor([[1, 2]]), "Sequence[int]", False),
        (range(3), "Sequence[int]", True),
        ({"x": 1}, "Sequence[str]", False),
        ({"x": 1}, "Mapping[str, float]", True),
        ({"x": "y"}, "Mapping[str, float] | Mapping[int, float]", False),
        ({1: 0.5}, "Mapping[str, float] | Mapping[int, float]", True),
        (Path("x"), "str | os.PathLike[str]", True),
        (5, "str | os.PathLike[str]", False),
        ("", "str | os.PathLike[str] | None", False),
        ("", "str | None", True),
        (torch.zeros(2), 'Float[Tensor, "a b"]', True),
        (torch.nn.Parameter(torch.zeros(2)), "Tensor", True),
        (pd.DataFrame(), "pd.DataFrame | Float[Tensor, ' k']", True),
        (slice(1), "slice | None", True),
    ],
)
def test_kinds(value, annotation, right):
    assert is_a(value, annotation) is right


def test_the_public_functions_are_still_themselves():
    for name, function in public_functions().items():
        assert pickle.loads(pickle.dumps(function)) is function, name
        assert inspect.signature(function) == inspect.signature(function.__wrapped__)
        assert function.__doc__ == function.__wrapped__.__doc__


# -- values of the right kind that make no sense -------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, -1, -(10**30)])
def test_a_count_below_one_is_refused(model, k):
    head = model.head("1.0")
    for asked in (
        lambda: ov.directions(model, 0, k=k),
        lambda: ov.directions(model, 0, tokens=k),
        lambda: head.reads(k),
        lambda: head.writes(5, k),
        lambda: ov.span(head, [0], k),
        lambda: ov.strongest_token_pairs(model, head, k),
        lambda: ov.strongest_paths(model, k),
        lambda: ov.component_composition(model, "0.1", n=k),
        lambda: head.ov.top_entries(k),
    ):
        with pytest.raises(CircuitsError, match="whole number from 1"):
            asked()
    with pytest.raises(CircuitsError, match="a direction is a whole number from 0"):
        head.reads(direction=-1)


def test_a_count_beyond_the_vocabulary_is_the_vocabulary(model):
    assert len(model.head("1.0").writes(5, 10**30)) == 2 * model.architecture.n_vocab


@pytest.mark.usefixtures("unchecked")
def test_numbers_of_numpy_and_torch_are_numbers(model):
    head = model.head("1.0")
    for number in (np.int64(5), torch.tensor(5)):
        pd.testing.assert_frame_equal(head.writes(number, np.int64(3)), head.writes(5, 3))
    ids = [5, 6, 7]
    for prompt in (np.array(ids), torch.tensor(ids), [np.int32(i) for i in ids]):
        assert model.trace(prompt).tokens == tuple(ids)
        assert ov.ablate(model, "1.0", prompt).equals(ov.ablate(model, "1.0", [ids]))


def test_a_head_of_a_view_or_model_stands_for_its_label(model):
    raw = model.in_view("raw")
    right = ov.strongest_token_pairs(model, "1.0", 3)
    pd.testing.assert_frame_equal(ov.strongest_token_pairs(model, raw.head("1.0"), 3), right)
    pd.testing.assert_frame_equal(
        ov.rank_copying(model, heads=model.head("1.0")), ov.rank_copying(model, heads=["1.0"])
    )


@pytest.mark.parametrize("span", [slice("a", "b"), slice(None, None, 0), slice(0, 0), slice(0, 1), slice(99, None)])
def test_a_span_without_a_predicted_token_is_refused(model, span):
    with pytest.raises(CircuitsError, match="span"):
        ov.ablate(model, "1.0", [[5, 6, 7]], span=span)


@pytest.mark.parametrize("prompt", [0, np.int64(3), torch.tensor(3), [1.5], {1, 2}, torch.tensor([0.5])])
def test_what_is_no_prompt_is_not_ablated(model, prompt):
    with pytest.raises(CircuitsError, match="a prompt is a text"):
        ov.ablate(model, "1.0", prompt)


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_names_that_no_file_can_have(model, tmp_path, name):
    with pytest.raises(CircuitsError, match="cannot"):
        ov.ioi_copying(model, "1.0", names=name)
    scan = ov.scan(model, tokens=64, window=32)
    with pytest.raises(CircuitsError, match="cannot"):
        scan.save(tmp_path / name)


def test_no_name_at_all_is_not_the_working_folder(model):
    with pytest.raises(CircuitsError, match="a path, not ''"):
        ov.scan(model, tokens=64, window=32).save("")

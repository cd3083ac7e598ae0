"""Every notebook runs from top to bottom, and what is committed is such a run.

02, 04 and 06 use SmolLM2 where it was fetched (with ``CI=true`` or ``OV_CIRCUITS_TEST_FETCH=1`` it is), and run without it too.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ov_circuits as ov
from ov_circuits.checkpoint.fetch import fetch_smollm2

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
LIMIT_S = 120
LARGEST = 400_000  # bytes: GitHub shows larger ones slowly or not at all

pytestmark = pytest.mark.slow


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.fixture(scope="module")
def smollm2() -> None:
    """SmolLM2 in the user's cache, where tests may fetch it; elsewhere what is there is used."""
    if "CI" in os.environ or "OV_CIRCUITS_TEST_FETCH" in os.environ:
        fetch_smollm2(print)


@pytest.fixture
def execute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], list[Any]]:
    """``execute(notebook)`` -> its outputs, of a run in a folder and a kernel of its own."""

    def run_all(notebook: Path) -> list[Any]:
        import nbformat
        from nbclient import NotebookClient

        folder = tmp_path / "notebooks"
        shutil.copytree(notebook.parent, folder, ignore=shutil.ignore_patterns(".ipynb_checkpoints", "__pycache__"))
        # The kernel is another process: it gets this checkout, no hub, and one thread.
        root = str(notebook.parents[1])
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        run = nbformat.read(folder / notebook.name, as_version=4)
        for cell in run.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        client = NotebookClient(
            run, timeout=LIMIT_S, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
        )
        start = time.monotonic()
        client.execute()  # raises CellExecutionError, with the cell and its traceback, where one fails
        took = time.monotonic() - start
        assert took < LIMIT_S, f"{notebook.name} took {took:.0f} s"
        return [output for cell in run.cells if cell.cell_type == "code" for output in cell.outputs]

    return run_all


def check_outputs(outputs: list[Any]) -> None:
    assert not [output for output in outputs if output.output_type == "error"]
    assert [output for output in outputs if "application/vnd.plotly.v1+json" in output.get("data", {})], "no figure"


@pytest.mark.network
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(
    notebook: Path,
    smollm2: None,
    execute: Callable[[Path], list[Any]],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if notebook.stem.startswith("05"):
        monkeypatch.setenv("OV_CIRCUITS_TEST_MODELS", str(request.getfixturevalue("models_dir")))
    check_outputs(execute(notebook))


@pytest.mark.parametrize("name", ["02_atlas", "04_attribution", "06_tensor_parallel"])
def test_runs_without_smollm2_and_says_how_to_get_it(
    name: str, execute: Callable[[Path], list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OV_CIRCUITS_CACHE", str(tmp_path / "nothing"))
    outputs = execute(next(path for path in NOTEBOOKS if path.stem == name))
    check_outputs(outputs)
    assert "ov-circuits fetch smollm2" in "".join(output.get("text", "") for output in outputs)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_committed_with_outputs_and_pictures(notebook: Path) -> None:
    import nbformat

    committed = nbformat.read(notebook, as_version=4)
    nbformat.validate(committed)
    code = [cell for cell in committed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), (
        "run it from top to bottom, then save"
    )
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    figures = [output.data for output in outputs if "application/vnd.plotly.v1+json" in output.get("data", {})]
    assert figures and all("image/png" in data for data in figures), "GitHub shows the PNG only: run it with kaleido"
    assert notebook.stat().st_size < LARGEST


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_takes_public_names_alone(notebook: Path) -> None:
    import nbformat

    cells = nbformat.read(notebook, as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    assert not re.findall(r"(?:from|import) ov_circuits\..*", code)
    assert set(re.findall(r"(?<![.\w])ov\.(\w+)", code)) <= set(ov.__all__)

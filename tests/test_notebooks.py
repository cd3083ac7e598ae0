"""Every notebook runs from top to bottom on the embedded model, and what is committed is such a run."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
LIMIT_S = 120
LARGEST = 700_000  # bytes: GitHub shows larger ones slowly or not at all

pytestmark = pytest.mark.slow


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    client = NotebookClient(run, timeout=LIMIT_S, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    start = time.monotonic()
    client.execute()  # raises CellExecutionError, with the cell and its traceback, where one fails
    took = time.monotonic() - start
    outputs = [output for cell in run.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert took < LIMIT_S, f"{notebook.name} took {took:.0f} s"
    figures = [output for output in outputs if "application/vnd.plotly.v1+json" in output.get("data", {})]
    assert figures, "no figure was emitted"


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

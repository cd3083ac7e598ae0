"""Damaged, lying and hostile files, some thousands of them: each opens or is refused in a sentence; see fuzzing.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# How many of each kind at least, so that a kind cannot silently stop being tried.
_KINDS = {
    "safetensors": 100,
    "index": 200,
    "torch": 100,
    "old torch": 100,
    "config": 100,
    "gpt2 config": 100,
    "tokenizer": 100,
    "gguf": 100,
    "llama2c": 200,
    "nanogpt": 100,
    "meta": 300,
    "megatron": 200,
    "adapter": 200,
    "pickle": 150,
    "settings": 150,
    "archive": 14,
    "links": 90,
    "numbers": 500,
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run's report. A process of its own: its memory is limited, and nothing in it can harm the other tests."""
    work = tmp_path_factory.mktemp("fuzz")
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parent), str(here), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "OV_CIRCUITS_CACHE": str(work),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(here / "fuzzing.py"), str(work), "0.6"],
        env=environment,
        cwd=work,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    last = (work / "last").read_text() if (work / "last").exists() else "none"
    assert done.returncode == 0, f"the run ended with {done.returncode} at case {last}: {done.stderr[-3000:]}"
    found: dict[str, Any] = json.loads((work / "report.json").read_text())
    return found


def test_nothing_but_a_sentence_leaves_the_package(report):
    """No other exception, no crash, and none that took more than ten seconds."""
    shown = "\n".join(
        f"{failure['case']}: {failure['error']}\n{failure['trace']}" for failure in report["failures"][:5]
    )
    assert not report["failures"], f"{len(report['failures'])} cases failed\n{shown}"


def test_no_code_of_a_file_was_run(report):
    assert not report["canary"]
    assert report["counts"]["pickle"]["opened"] == 0, "a pickle that runs something was taken for a checkpoint"


def test_no_case_took_a_gigabyte(report):
    assert report["peak"] < 2**30


def test_there_were_enough_cases_of_every_kind(report):
    counts = {kind: sum(count.values()) for kind, count in report["counts"].items()}
    assert sum(counts.values()) >= 2000
    assert counts.keys() == _KINDS.keys()
    assert all(counts[kind] >= least for kind, least in _KINDS.items()), counts


def test_the_damage_does_damage(report):
    """Most of each kind is refused; what still opens is damaged where numbers lie, which nobody can see."""
    for kind, count in report["counts"].items():
        assert count["refused"] >= sum(count.values()) * (0.05 if kind == "llama2c" else 0.3) or kind == "links", (
            kind,
            count,
        )

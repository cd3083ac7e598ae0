"""A long run that is stopped, in whatever way, goes on where it was, and its result is that of a run that was not."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import ov_circuits as ov
from ov_circuits.errors import CircuitsError
from ov_circuits.scores.board import Board
from ov_circuits.scores.saved import forget

COPYING = "eigen_copying_full,ov_stable_rank,rank_copying_5"

# The command, stopped by what STOP says once some layers are done.
STOPPED = """
import os, signal, sys
from ov_circuits.scores.board import Board
score, done = Board.rows, []
def rows(self, piece):
    if len(done) == 2:
        {stop}
    done.append(piece)
    return score(self, piece)
Board.rows = rows
from ov_circuits.cli import main
main()
"""
STOPS = {
    "kill -9": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "Ctrl-C": ("os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(0.2)", 130),
    "terminated": ("os.kill(os.getpid(), signal.SIGTERM); import time; time.sleep(0.2)", 143),
}


def command(*arguments: str, script: str | None = None, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    start = ["-m", "ov_circuits"] if script is None else ["-c", script]
    return subprocess.run([sys.executable, *start, *arguments], capture_output=True, text=True, check=False, **kwargs)


def parts_of(target: Path) -> list[Path]:
    return sorted((target.parent / f".{target.name}.parts").glob("*"))


@pytest.mark.parametrize("stop", STOPS)
def test_a_stopped_run_goes_on_and_ends_as_if_it_had_not_been_stopped(
    stories260k: Path, tmp_path: Path, stop: str
) -> None:
    line, code = STOPS[stop]
    target, whole = tmp_path / "heads.parquet", tmp_path / "whole.parquet"
    arguments = ("heads", str(stories260k), "--scores", COPYING)
    # One layer at a time, so that two are finished when the third begins.
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    stopped = command(*arguments, "-o", str(target), script=STOPPED.format(stop=line), env=alone)
    assert stopped.returncode == code, stopped.stderr
    assert not target.exists()
    saved = parts_of(target)
    assert len(saved) >= 2 and all(file.suffix == ".parquet" for file in saved)
    times = [file.stat().st_mtime_ns for file in saved]

    again = command(*arguments, "-o", str(target))
    assert again.returncode == 0, again.stderr
    assert f"continuing: {len(saved)} of 5 layers" in again.stderr
    assert times, "the first run saved nothing"
    assert not parts_of(target), "finished layers were left behind"
    assert command(*arguments, "-o", str(whole)).returncode == 0
    pd.testing.assert_frame_equal(pd.read_parquet(target), pd.read_parquet(whole), check_exact=True)
    assert pd.read_parquet(target).attrs == pd.read_parquet(whole).attrs


def test_finished_layers_are_read_and_not_computed_again(
    stories260k: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, target = ov.load(stories260k), tmp_path / "heads.csv"
    expected = ov.scoreboard(model)
    pd.testing.assert_frame_equal(ov.scoreboard(model, resume=target, keep=True), expected)
    assert len(parts_of(target)) == model.n_layers and not target.exists()
    computed: list[int] = []
    rows = Board.rows
    monkeypatch.setattr(Board, "rows", lambda self, piece: computed.append(piece.layer) or rows(self, piece))
    parts_of(target)[3].unlink()
    again = ov.scoreboard(model, resume=target)
    assert computed == [3]
    pd.testing.assert_frame_equal(again, expected)
    assert isinstance(again["reads_plus"][0], list)
    assert not parts_of(target)


def test_a_full_disk_loses_nothing_that_was_finished(
    stories260k: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, target = ov.load(stories260k), tmp_path / "heads.parquet"
    write, written = pd.DataFrame.to_parquet, []

    def until_full(self: pd.DataFrame, path: Any, **kwargs: Any) -> None:
        if len(written) == 3:
            Path(path).write_bytes(b"half of a fi")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(path)
        write(self, path, **kwargs)

    monkeypatch.setattr(pd.DataFrame, "to_parquet", until_full)
    with pytest.raises(CircuitsError, match="No space left on device"):
        ov.scoreboard(model, resume=target)
    monkeypatch.undo()
    assert len(parts_of(target)) == 3
    pd.testing.assert_frame_equal(ov.scoreboard(model, resume=target), ov.scoreboard(model))


def test_a_full_disk_is_said_of_the_users_file(
    stories260k: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the name of a part nor the folder that was to hold it is the user's business."""

    def full(self: pd.DataFrame, path: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pd.DataFrame, "to_parquet", full)
    with pytest.raises(
        CircuitsError, match=r"finished layers beside .*heads\.parquet: No space left on device; "
    ) as caught:
        ov.scoreboard(ov.load(stories260k), resume=tmp_path / "heads.parquet")
    assert ".parts" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="no limit on file sizes there")
def test_a_result_that_cannot_be_written_costs_no_layer(stories260k: Path, tmp_path: Path) -> None:
    """The disk is too small for the last file only: every layer was finished, and the next run reads them all."""
    target = tmp_path / "heads.json"
    limited = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)); from ov_circuits.cli import main; main()"
    )
    failed = command("heads", str(stories260k), "-o", str(target), script=limited)
    assert failed.returncode == 2 and "cannot write" in failed.stderr, failed.stderr
    assert not target.exists() and len(parts_of(target)) == 5
    assert command("heads", str(stories260k), "-o", str(target)).stderr.count("continuing: 5 of 5") == 1
    assert target.exists() and not parts_of(target)


@pytest.mark.parametrize("when", ["before it writes", "before it renames", "and another piece made the folder anew"])
def test_a_run_beside_another_of_the_same_target_that_ends_first(
    when: str, stories260k: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, write = tmp_path / "heads.parquet", pd.DataFrame.to_parquet

    def taken_away(frame: pd.DataFrame, path: Path, **kwargs: Any) -> None:
        if when == "before it writes":
            forget(target)
        write(frame, path, **kwargs)
        if when != "before it writes":
            forget(target)
        if when == "and another piece made the folder anew":
            path.parent.mkdir(exist_ok=True)

    model = ov.load(stories260k)
    monkeypatch.setattr(pd.DataFrame, "to_parquet", taken_away)
    board = ov.scoreboard(model, ["ov_stable_rank"], nulls=False, resume=target)
    pd.testing.assert_frame_equal(board, ov.scoreboard(model, ["ov_stable_rank"], nulls=False))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CircuitsError, match="cannot keep"):
        ov.scoreboard(model, ["ov_stable_rank"], nulls=False, resume=tmp_path / "absent" / "heads.parquet")


def test_other_arguments_and_other_weights_find_nothing(
    stories260k: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, target = tmp_path / "model", tmp_path / "heads.parquet"
    shutil.copytree(stories260k, folder)
    scores = ["ov_stable_rank"]
    first = ov.scoreboard(ov.load(folder), scores, resume=target, keep=True)
    for change in (
        dict(scores=["ov_spectral_norm"]),
        dict(seed=1),
        dict(nulls=False),
        dict(tokens=0),
        dict(view="raw"),
    ):
        view = change.pop("view", None)
        asked = dict(scores=scores) | change
        ours = ov.scoreboard(ov.load(folder, view=view), resume=target, keep=True, **asked)
        pd.testing.assert_frame_equal(ours, ov.scoreboard(ov.load(folder, view=view), **asked))
    assert "continuing" not in capsys.readouterr().err
    other = folder / "model.safetensors"
    os.utime(other, ns=(1, 1))  # the same bytes, for all that is known other ones
    ov.scoreboard(ov.load(folder), scores, resume=target, keep=True)
    assert "continuing" not in capsys.readouterr().err
    again = ov.scoreboard(ov.load(folder), scores, resume=target)
    assert "continuing: 5 of 5" in capsys.readouterr().err
    pd.testing.assert_frame_equal(again, first)


def test_a_damaged_part_is_said_and_scored_again(
    stories260k: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, target = ov.load(stories260k), tmp_path / "heads.parquet"
    expected = ov.scoreboard(model, ["ov_stable_rank"], resume=target, keep=True)
    damaged = parts_of(target)[1]
    damaged.write_bytes(damaged.read_bytes()[:100])
    pd.testing.assert_frame_equal(ov.scoreboard(model, ["ov_stable_rank"], resume=target), expected)
    assert f"{damaged} is damaged" in capsys.readouterr().err


def test_a_model_in_memory_cannot_be_continued(tiny_gpt2_char: Path, bridge_of: Any, tmp_path: Path) -> None:
    with pytest.raises(CircuitsError, match="in memory"):
        ov.scoreboard(ov.load(bridge_of(tiny_gpt2_char)), resume=tmp_path / "heads.parquet")
    assert not list(tmp_path.iterdir())


def test_a_single_torch_file_is_no_model_in_memory(write_tiny: Any, tmp_path: Path) -> None:
    folder = write_tiny("llama")
    torch.save(load_file(folder / "model.safetensors"), folder / "weights.pt")
    model = ov.load(folder / "weights.pt")
    expected = ov.scoreboard(ov.load(folder), ["ov_stable_rank"])
    for _ in range(2):
        pd.testing.assert_frame_equal(
            ov.scoreboard(model, ["ov_stable_rank"], resume=tmp_path / "heads.parquet", keep=True), expected
        )

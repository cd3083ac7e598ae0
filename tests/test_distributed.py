"""One table from many processes: torchrun on loopback, gloo, tiny models."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import assert_same_table
from torchrun import torchrun

import ov_circuits as ov
from ov_circuits.errors import CircuitsError
from ov_circuits.scores.pieces import pieces

SCRIPT = Path(__file__).with_name("distributed_script.py")


# 2 layers of 4 heads on 2: two ranks share layers, three divide nothing, four share the heads inside of layers.
@pytest.mark.parametrize("n", [2, 3, 4])
def test_many_processes_make_the_table_of_one(tiny_folders: Callable[[str], Path], tmp_path: Path, n: int) -> None:
    folder = tiny_folders("llama-grouped")
    model = ov.load(folder)
    done = torchrun(n, str(SCRIPT), str(folder), str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert_same_table(pd.read_parquet(tmp_path / "whole.parquet"), ov.scoreboard(model))
    assert_same_table(pd.read_parquet(tmp_path / "mesh.parquet"), ov.scoreboard(model, "all"))
    assert not (tmp_path / ".heads.parquet.parts").exists()

    # Each number of attention weights is read by one rank: W_Q and W_O by whose heads they are, W_K and W_V by whose groups.
    a = model.architecture
    for role, kv in (("q", False), ("o", False), ("k", True), ("v", True)):
        for layer in range(a.n_layers):
            readers = np.zeros((a.n_kv_heads if kv else a.n_heads) * a.d_head, dtype=int)
            for rank in range(n):
                for name, part in json.loads((tmp_path / f"read-{rank}.json").read_text()):
                    if name.endswith(f"layers.{layer}.self_attn.{role}_proj.weight"):
                        span = (part[1] if role == "o" else part[0]) if part else [0, None]
                        readers[slice(*span)] += 1
            assert (readers >= 1).all(), (role, layer)
            if not kv or n == 2:  # the heads of a group that is shared out read the same W_K and W_V
                assert (readers == 1).all(), (role, layer, readers)
    for rank in range(n):
        assert "no score 'no_such_score'" in (tmp_path / f"error-{rank}.txt").read_text()


def test_the_command_prints_and_writes_once(tiny_folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder, target = tiny_folders("gpt2-tied"), tmp_path / "heads.parquet"
    done = torchrun(2, "-m", "ov_circuits", "heads", str(folder), "-o", str(target), "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["rows"]) == len(ov.load(folder).head_labels)
    assert_same_table(pd.read_parquet(target), ov.scoreboard(ov.load(folder)))
    assert [file.name for file in tmp_path.iterdir()] == ["heads.parquet"]


def test_what_is_wrong_is_said_once(tmp_path: Path) -> None:
    done = torchrun(3, "-m", "ov_circuits", "heads", str(tmp_path / "nothing"))
    assert done.returncode != 0
    assert done.stderr.count("does not exist") == 1, done.stderr
    assert "exitcode  : 2" in done.stderr or "exitcode: 2" in done.stderr, done.stderr


DIES = """
import os, signal, sys
from ov_circuits.scores.board import Board
rows = Board.rows
def dying(self, piece):
    if os.environ["RANK"] == "1":
        print("RANK 1 DIES", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return rows(self, piece)
Board.rows = dying
from ov_circuits.cli import main
main()
"""


def test_a_rank_that_dies_ends_all(tiny_folders: Callable[[str], Path], tmp_path: Path) -> None:
    script, target = tmp_path / "dies.py", tmp_path / "heads.parquet"
    script.write_text(DIES)
    start = time.monotonic()
    done = torchrun(2, str(script), "heads", str(tiny_folders("llama-grouped")), "-o", str(target))
    assert done.returncode != 0 and "RANK 1 DIES" in done.stderr
    assert "SIGKILL" in done.stderr or "Signal 9" in done.stderr, done.stderr
    assert not target.exists()
    assert time.monotonic() - start < 100, "the others waited"


LATE = """
import os, sys
import torch.distributed as dist
import ov_circuits as ov
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, [cores[int(os.environ["RANK"]) % len(cores)]])
mesh = dist.init_device_mesh("cpu", (2,))  # keeps gloo's threads when its group is destroyed
ov.distributed.scoreboard(ov.load(sys.argv[1]), ["ov_spectral_norm"], group=mesh)
for thread in os.listdir("/proc/self/task"):
    with open(f"/proc/self/task/{thread}/comm") as name:
        if name.read().startswith("pt_gloo"):
            os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))  # run when nothing else wants to
dist.all_gather_object([None, None], "the last exchange")
dist.destroy_process_group()
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="threads can be held back on Linux only")
def test_a_rank_leaves_after_its_threads_have_let_go(tiny_folders: Callable[[str], Path], tmp_path: Path) -> None:
    # A thread of gloo that comes to Python's lock when Python shuts down aborts the process.
    (script := tmp_path / "late.py").write_text(LATE)
    done = torchrun(2, str(script), str(tiny_folders("llama-grouped")))
    assert done.returncode == 0, done.stderr


def test_pieces_are_shared_fairly() -> None:
    a = ov.load().architecture
    for layers, heads, kv in ((2, 4, 2), (5, 9, 3), (80, 64, 8), (32, 32, 8), (3, 7, 1)):
        shape = _shaped(a, layers, heads, kv)
        for n in (1, 2, 3, 4, 7, 64):
            work = pieces(shape, n)
            covered = [(piece.layer, head) for piece in work for head in piece.heads]
            assert covered == [(layer, head) for layer in range(layers) for head in range(heads)]
            assert len({piece.name for piece in work}) == len(work)
            group = heads // kv
            for piece in work:
                whole = piece.heads.start % group == 0 and len(piece.heads) % group == 0
                assert whole or piece.heads.start // group == (piece.heads.stop - 1) // group
            loads = [
                sum(len(piece.heads) for piece in work[len(work) * r // n : len(work) * (r + 1) // n]) for r in range(n)
            ]
            if n <= layers * kv:
                assert max(loads) <= 1.1 * layers * heads / n + max(len(piece.heads) for piece in work)


def _shaped(a: Any, layers: int, heads: int, kv: int) -> Any:
    from dataclasses import replace

    return replace(a, n_layers=layers, n_heads=heads, n_kv_heads=kv)


def test_without_torchrun_it_says_what_to_do(tiny_folders: Callable[[str], Path]) -> None:
    with pytest.raises(CircuitsError, match="start the script with torchrun"):
        ov.distributed.scoreboard(ov.load(tiny_folders("llama-grouped")))

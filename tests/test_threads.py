"""Work on several threads gives what one thread gives, in order, and leaves nothing behind.

All other tests run on one thread (conftest.py says why), where no two pieces of work stand side by side.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import assert_same_table

import ov_circuits as ov
from ov_circuits.linalg.threads import side_by_side


@pytest.fixture(params=[2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def board(folder: Path) -> pd.DataFrame:
    return ov.scoreboard(ov.load(folder), "all")


def composition(folder: Path) -> pd.DataFrame:
    return ov.composition(ov.load(folder))


def rank_copying(folder: Path) -> pd.DataFrame:
    return ov.rank_copying(ov.load(folder))


def ledger(folder: Path) -> pd.DataFrame:
    return ov.load(folder).trace("Once upon a time").ledger(" little")


def scan(folder: Path) -> pd.DataFrame:
    return ov.scan(ov.load(folder), [list(range(3, 60))], window=20).heads


@pytest.fixture(scope="module")
def alone(stories260k: Path) -> dict[Any, pd.DataFrame]:
    """What one thread gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    found = {made: made(stories260k) for made in (board, composition, rank_copying, ledger, scan)}
    torch.set_num_threads(before)
    return found


@pytest.mark.parametrize("made", [board, composition, rank_copying], ids=lambda made: made.__name__)
def test_numbers_are_those_of_one_thread(made, threads, alone, stories260k):
    found = made(stories260k)
    assert torch.get_num_threads() == threads, "the user's number is left as it was"
    assert_same_table(found, alone[made], 1e-5)


@pytest.mark.parametrize("made", [ledger, scan], ids=lambda made: made.__name__)
def test_numbers_of_prompts_are_too(made, threads, alone, stories260k, assert_close):
    """The model's own float32 pass rounds as its largest numbers do, and so do the small ones of a column."""
    found, right = made(stories260k), alone[made]
    assert torch.get_num_threads() == threads
    for name, column in right.items():
        if column.dtype.kind == "f":
            assert found[name].isna().equals(column.isna()), name
            assert_close(torch.tensor(found[name].fillna(0)), torch.tensor(column.fillna(0)), 2e-6)
        else:
            assert found[name].equals(column), name


def test_finished_layers_are_those_of_one_thread(threads, alone, stories260k, tmp_path):
    model, target = ov.load(stories260k), tmp_path / "heads.parquet"
    assert_same_table(ov.scoreboard(model, "all", resume=target, keep=True), alone[board], 1e-5)
    parts = list((tmp_path / ".heads.parquet.parts").iterdir())
    assert len(parts) == model.n_layers
    parts[0].unlink()
    assert_same_table(ov.scoreboard(model, "all", resume=target), alone[board], 1e-5)


def test_as_many_as_torch_may_use_at_a_time_in_order(threads):
    at_work, most, lock = 0, 0, threading.Lock()

    def work(item: int) -> tuple[int, int]:
        nonlocal at_work, most
        with lock:
            at_work += 1
            most = max(most, at_work)
        time.sleep(0.02 * (item % 3))
        with lock:
            at_work -= 1
        return item, torch.get_num_threads()

    assert list(side_by_side(work, range(12))) == [(item, 1) for item in range(12)]
    assert most == threads
    most = 0
    assert list(side_by_side(work, range(4), most=1)) == [(item, threads) for item in range(4)]
    assert most == 1


def test_threads_to_come_begin_with_the_users_number(threads):
    """torch's setter speaks for them too: after a scoreboard, a web server's next request would run on one thread."""
    assert list(side_by_side(lambda _: torch.get_num_threads(), range(6))) == [1] * 6
    seen = []
    new = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    new.start()
    new.join()
    assert seen == [threads]


def test_an_error_ends_the_work_and_so_does_who_stops_listening(threads):
    began = []

    def work(item: int) -> int:
        began.append(item)
        time.sleep(0.01)
        if item == 1:
            raise ValueError("of item 1")
        return item

    running = threading.active_count()
    with pytest.raises(ValueError, match="of item 1"):
        list(side_by_side(work, range(100)))
    assert len(began) < 20
    began.clear()
    results = side_by_side(work, range(2, 100))
    assert next(results) == 2
    results.close()
    assert len(began) < 20
    assert threading.active_count() == running

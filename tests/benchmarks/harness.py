"""Times in one run, memory in separate processes, and a table of ratios."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

ROOT = Path(__file__).resolve().parents[2]
MODELS = Path(os.environ.get("OV_CIRCUITS_TEST_MODELS", ROOT.parent / "shared" / "models"))
SMOLLM2 = os.environ.get("OV_CIRCUITS_SMOLLM2")


@dataclass(frozen=True)
class Timed:
    """Seconds on the clock and of processor time (which other work on the machine hardly moves), and the last result."""

    seconds: float
    cpu: float
    result: Any

    def __str__(self) -> str:
        return f"{self.seconds:.2f} s ({self.cpu:.2f} cpu)"


def timed(work: Callable[[], Any], repeats: int = 1) -> Timed:
    """The best of some runs."""
    seconds, cpu, result = float("inf"), float("inf"), None
    for _ in range(repeats):
        start, start_cpu = time.perf_counter(), time.process_time()
        result = work()
        seconds, cpu = min(seconds, time.perf_counter() - start), min(cpu, time.process_time() - start_cpu)
    return Timed(seconds, cpu, result)


def interleaved(works: dict[str, Callable[[], Any]], repeats: int) -> dict[str, Timed]:
    """The best run of each, taking turns: other work on the machine then meets all of them."""
    best: dict[str, Timed] = {}
    for _ in range(repeats):
        for name, work in works.items():
            run = timed(work)
            seen = best.get(name, run)
            best[name] = Timed(min(seen.seconds, run.seconds), min(seen.cpu, run.cpu), run.result)
    return best


def ratio(rival: Timed, ours: Timed) -> str:
    """How many times faster ours is."""
    return f"{rival.seconds / ours.seconds:.1f}x ({rival.cpu / ours.cpu:.1f}x cpu)"


def peak_megabytes() -> float:
    """The most memory this process has held."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage counts what the parent held when it started this process
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


@contextmanager
def memory_above() -> Iterator[Callable[[], float]]:
    """Megabytes by which the process's peak within the block is above what it held before; Linux only."""
    status = Path("/proc/self/status")

    def held(key: str) -> float:
        return int(next(line for line in status.read_text().splitlines() if line.startswith(key)).split()[1]) / 1024

    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    before = held("VmRSS")
    yield lambda: held("VmHWM") - before


def in_process(script: str, step: str, *arguments: str) -> dict[str, Any]:
    """Run one step of a benchmark (``script --step STEP ..``) in a process of its own; it prints a JSON object last."""
    command = [sys.executable, script, "--step", step, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


Row = tuple[str, str, str, str, str]


def table(title: str, rows: list[Row]) -> None:
    """Print rows of (work, rival, ours, ratio, target); under ``run.py``, hand them on for its one table."""
    collected = os.environ.get("OV_CIRCUITS_BENCHMARK_ROWS")
    if collected:
        with open(collected, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    show(title, rows)


def show(title: str, rows: list[Row]) -> None:
    """Print a table."""
    from rich.console import Console
    from rich.table import Table

    out = Table(title=title)
    for column in ("work", "rival", "ours", "ratio", "must reach"):
        out.add_column(column, overflow="fold")
    for row in rows:
        out.add_row(*row)
    Console(width=120).print(out)

"""All benchmarks, one after the other, and one table of ratios at the end; both sides are measured in the same run.

ov-circuits fetch smollm2
python tests/benchmarks/run.py [--threads 1]

Times are seconds on the clock, with processor seconds beside them where one process ran both sides. Both sides get the same
number of threads; each script says below what it checks to be equal, and stops when it is not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import ROOT, show


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    threads = str(parser.parse_args().threads)
    here = Path(__file__).parent
    sys.path.insert(0, str(ROOT))
    from ov_circuits.checkpoint.locate import cache_folder

    smollm2 = os.environ.get("OV_CIRCUITS_SMOLLM2", str(cache_folder() / "smollm2"))
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows"
        rows.touch()
        environment = os.environ | {
            "OV_CIRCUITS_SMOLLM2": smollm2,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": threads,
            "OV_CIRCUITS_BENCHMARK_ROWS": str(rows),
        }
        for name in ("spectra", "command", "composition", "rank_copying", "ledger", "page", "scan"):
            command = [sys.executable, str(here / f"{name}.py"), "--threads", threads]
            if subprocess.run(command, env=environment, check=False).returncode:
                failed.append(name)
        show(
            f"All, {threads} thread(s) on each side, {os.cpu_count()} processors",
            [json.loads(line) for line in rows.read_text().splitlines()],
        )
    if failed:
        raise SystemExit(f"these did not finish: {', '.join(failed)}")


if __name__ == "__main__":
    main()

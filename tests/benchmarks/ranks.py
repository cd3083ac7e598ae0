"""The plan for many processes, simulated, against runs of 1, 2 and 3 on this machine.

    python tests/benchmarks/ranks.py [--layers 6] [--ranks 1,2,3]

Writes a checkpoint of random weights, small enough for three processes on a small machine, scores it under torchrun with so many
processes of one thread each, and prints what the plan says for this machine's speed and number of cores beside the clock. Where
processes are more than cores the plan lets them take turns. Starting the processes is timed on its own and taken off.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from big_models import config, write
from harness import ROOT

SCRIPT = """
import json, os, sys, time
import torch
import torch.distributed as dist
torch.set_num_threads(1)
import ov_circuits as ov
from ov_circuits.scores.board import Board
model = ov.load(sys.argv[1])
dist.init_process_group("gloo")
dist.barrier()
start, cpu = time.perf_counter(), time.process_time()
frame = ov.distributed.scoreboard(model)
mine = torch.tensor([time.process_time() - cpu])
dist.barrier()
clock = time.perf_counter() - start
dist.all_reduce(mine)
if dist.get_rank() == 0:
    frame.to_parquet(sys.argv[2])
    print(json.dumps({"seconds": clock, "cpu": float(mine)}), flush=True)
dist.destroy_process_group()
"""


def main() -> None:
    import pandas as pd

    import ov_circuits as ov
    from ov_circuits.scores.plan import Plan, machine_rate

    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--ranks", default="1,2,3")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        write(folder, config("8B", options.layers) | dict(hidden_size=1024, num_attention_heads=16, vocab_size=32000))
        (folder / "script.py").write_text(SCRIPT)
        model = ov.load(folder)
        plan, rate = Plan(model.architecture, model.view), machine_rate()
        print(
            f"{rate / 1e9:.0f} GFLOP/s a core, {cores} cores, load {os.getloadavg()[0]:.1f}; {len(model.head_labels)} heads"
        )
        print(
            "ranks  planned: clock, all ranks' cpu  measured: clock, all ranks' cpu  largest difference from one rank"
        )
        first = None
        for ranks in map(int, options.ranks.split(",")):
            out = folder / f"{ranks}.parquet"
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            command += [str(folder / "script.py"), str(folder), str(out)]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            found = json.loads(done.stdout.strip().splitlines()[-1])
            table = pd.read_parquet(out).select_dtypes("number")
            first = table if first is None else first
            apart = ((table - first).abs() / first.abs().clip(lower=1e-9)).max(axis=None)
            planned = plan.seconds(rate, 1, ranks, cores)
            print(
                f"{ranks:5d}  {planned:13.1f}  {found['seconds']:5.1f}  {found['cpu']:14.1f}  {apart:.0e}", flush=True
            )
            time.sleep(1)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

"""Starts several processes as a user would, and leaves none behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


def torchrun(n: int, *command: object, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    """``torchrun --nproc-per-node n command``, of one thread a process, in a session of its own that ends with this call."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", *map(str, command)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        start, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:  # a time-out, or whoever runs the tests has had enough
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(start, process.returncode, out, err)

"""Starts several processes as a user would, and leaves none behind."""

from __future__ import annotations

import os
import signal
import socket
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


def by_hand(n: int, *command: object, timeout: float = 200) -> list[subprocess.CompletedProcess[str]]:
    """``n`` processes of a group that nobody watches over: a script of one's own under some other launcher."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1]), "WORLD_SIZE": str(n)}
    places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | places | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(n)
    ]
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, out, err)
        for process, (out, err) in zip(processes, outputs, strict=True)
    ]

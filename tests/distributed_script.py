"""What every rank of tests/test_distributed.py runs: ``distributed_script.py FOLDER OUT`` under torchrun."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ov_circuits as ov
from ov_circuits.checkpoint.stores import SafetensorsStore


def main(folder: Path, out: Path) -> None:
    read: list[tuple[str, tuple[slice, ...]]] = []
    original = SafetensorsStore._read_part

    def recorded(self: SafetensorsStore, name: str, part: tuple[slice, ...]) -> object:
        read.append((name, part))
        return original(self, name, part)

    SafetensorsStore._read_part = recorded  # type: ignore[method-assign, assignment]
    # No group yet: it is made inside, and used from then on.
    whole = ov.distributed.scoreboard(ov.load(folder), resume=out / "heads.parquet")
    attention = [(name, [[s.start, s.stop] for s in part]) for name, part in read if "attn" in name]

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank = dist.get_rank()
    (out / f"read-{rank}.json").write_text(json.dumps(attention))
    over_mesh = ov.distributed.scoreboard(ov.load(folder), "all", group=mesh)
    try:
        ov.distributed.scoreboard(ov.load(folder), ["no_such_score"], group=dist.group.WORLD)
    except ov.CircuitsError as error:
        (out / f"error-{rank}.txt").write_text(str(error))
    if rank == 0:
        assert whole is not None and over_mesh is not None
        whole.to_parquet(out / "whole.parquet")
        over_mesh.to_parquet(out / "mesh.parquet")
    else:
        assert whole is None and over_mesh is None


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

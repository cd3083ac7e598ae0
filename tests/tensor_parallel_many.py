"""Started by test_tensor_parallel.py under torchrun: every rank traces some models, rank 0 writes what was gathered."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ov_circuits as ov
from ov_circuits.checkpoint.stores import TensorStore


def look_at(model: ov.Model, tokens: list[int]) -> dict[str, Any]:
    """Tensors and facts that must be those of one process."""
    trace = model.trace(tokens)
    account = trace.ledger(1, 2)
    into = trace.ledger_into(f"{model.n_layers - 1}.0", "V", source=1, answer=1, against=2)
    behaviours = ov.behaviours(model, seeds=2, rows=1).drop(columns="head").to_numpy(float)
    held: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(held, trace.record.layers[0].z.shape[0])
    return {
        "logits": trace.logits,
        "account": torch.tensor(account["value"].to_numpy()),
        "into": torch.tensor(into["value"].to_numpy()),
        "norms": trace.write_norms(),
        "weighted": trace.value_weighted_patterns(),
        "behaviours": torch.tensor(behaviours),
        "checks": model.verify().frame().to_dict("records"),
        "held": held,
        "residual": account.attrs["residual"],
    }


def main(folders: list[str], out: Path, tokens: list[int]) -> None:
    torch.set_num_threads(1)
    largest = [0]  # of what is read at once of a weight
    read = TensorStore.read

    def watched(self: TensorStore, name: str, part: tuple[slice, ...] = ()) -> torch.Tensor:
        tensor = read(self, name, part)
        if name.endswith(("q_proj.weight", "o_proj.weight")):
            largest[0] = max(largest[0], tensor.numel())
        return tensor

    TensorStore.read = watched  # type: ignore[method-assign]
    found: dict[str, Any] = {}
    for i, folder in enumerate(folders):
        # The group is made by the first call, and over it a mesh for the second model.
        mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if i == 1 else None
        largest[0] = 0
        try:
            model = ov.distributed.tensor_parallel(ov.load(folder), mesh)
        except ov.CircuitsError as error:
            found[folder] = str(error)
            continue
        of_building = largest[0]
        found[folder] = look_at(model, tokens) | {"largest_read": of_building}
    if len(folders) > 1:  # heads live on one rank; a mesh of several dimensions names none
        model = ov.distributed.tensor_parallel(ov.load(folders[0]))
        trace = model.trace(tokens)
        other = (1 - dist.get_rank()) * trace.record.shard.held
        flat = init_device_mesh("cpu", (1, dist.get_world_size()))
        for name, ask in (
            ("elsewhere", lambda: trace.write(f"0.{other}")),
            ("saved", lambda: trace.save(out.with_suffix(".trace"))),
            ("mesh", lambda: ov.distributed.tensor_parallel(ov.load(folders[0]), flat)),
            ("mesh of scores", lambda: ov.distributed.scoreboard(ov.load(folders[0]), group=flat)),
        ):
            try:
                found[name] = f"no error, but {ask()}"
            except ov.CircuitsError as error:
                found[name] = str(error)
    if dist.get_rank() == 0:
        torch.save(found, out)


if __name__ == "__main__":
    main(sys.argv[3:], Path(sys.argv[1]), json.loads(sys.argv[2]))

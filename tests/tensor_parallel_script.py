"""Started by test_tensor_parallel.py under torchrun: every rank traces, rank 0 writes what was gathered."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

import ov_circuits as ov

folder, out, tokens = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
torch.set_num_threads(1)
model = ov.distributed.tensor_parallel(ov.load(folder))
trace = model.trace(tokens)
account = trace.ledger(1, 2)
into = trace.ledger_into(f"{model.n_layers - 1}.0", "V", source=1, answer=1, against=2)
norms, weighted = trace.write_norms(), trace.value_weighted_patterns()
behaviours = torch.tensor(ov.behaviours(model, seeds=2, rows=1).drop(columns="head").to_numpy(float))
certificate = model.verify()
held = trace.record.layers[0].z.shape[0]
every: list[int] = [0] * dist.get_world_size()
dist.all_gather_object(every, held)
if dist.get_rank() == 0:
    torch.save({"logits": trace.logits, "account": torch.tensor(account["value"].to_numpy()), "into":
                torch.tensor(into["value"].to_numpy()), "norms": norms, "weighted": weighted,
                "behaviours": behaviours}, out)  # fmt: skip
    checks = certificate.frame().to_dict("records")
    print(json.dumps({"checks": checks, "held": every, "residual": account.attrs["residual"]}))
dist.destroy_process_group()

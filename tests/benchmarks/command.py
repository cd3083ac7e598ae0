"""From command to table: `ov-circuits heads` on SmolLM2-135M against a script with TransformerLens for the same columns.

    OV_CIRCUITS_SMOLLM2=folder python tests/benchmarks/command.py [--threads 1]

Each side is a fresh process, imports included, timed on the clock; memory is its peak in all. The rival gives both eigenvalue
copying scores, singular values and what follows from them, and the tokens of the leading singular pair; it has no nulls and no
full-OV norms. Then the same command on a bfloat16 copy of the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import ROOT, SMOLLM2, table

RIVAL = """
import sys, torch, pandas as pd
from transformer_lens import FactoredMatrix
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, out = sys.argv[1:]
hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(folder)
bridge = TransformerBridge.boot_transformers(folder, hf_model=hf, dtype=torch.float32, device="cpu")
with torch.no_grad():
    group = bridge.W_O.shape[1] // bridge.W_V.shape[1]
    ov = FactoredMatrix(bridge.W_V.repeat_interleave(group, dim=1), bridge.W_O)
    full = bridge.W_E @ ov @ bridge.W_U
    columns = {}
    for name, circuit in (("eigen_copying_ov", ov), ("eigen_copying_full", full)):
        values = circuit.eigenvalues
        columns[name] = (values.sum(-1).real / values.abs().sum(-1)).flatten()
    U, S, Vh = ov.svd()
    U, S, V = U.flatten(0, 1), S.flatten(0, 1), Vh.flatten(0, 1)
    V = V if V.shape[-1] == S.shape[-1] else V.mT
    squares = S.square()
    share = S / S.sum(-1, keepdim=True)
    columns["ov_frobenius_norm"] = squares.sum(-1).sqrt()
    columns["ov_spectral_norm"] = S[:, 0]
    columns["ov_stable_rank"] = squares.sum(-1) / squares[:, 0]
    columns["ov_participation_ratio"] = squares.sum(-1).square() / squares.square().sum(-1)
    columns["ov_entropy_rank"] = (-(share * share.log()).sum(-1)).exp()
    qk = FactoredMatrix(bridge.W_Q, bridge.W_K.repeat_interleave(group, dim=1).mT)
    s = qk.svd()[1].flatten(0, 1) / bridge.W_Q.shape[-1] ** 0.5
    columns["qk_frobenius_norm"] = s.square().sum(-1).sqrt()
    columns["qk_stable_rank"] = s.square().sum(-1) / s[:, 0].square()
    frame = pd.DataFrame({name: values.numpy() for name, values in columns.items()})
    read, write = bridge.W_E @ U[:, :, 0].T, bridge.W_U.T @ V[:, :, 0].T
    for name, projection in (("reads", read), ("writes", write)):
        for end, largest in (("plus", True), ("minus", False)):
            ids = projection.topk(5, dim=0, largest=largest).indices.T
            frame[f"{name}_{end}"] = [tokenizer.convert_ids_to_tokens(row) for row in ids.tolist()]
frame.to_parquet(out)
"""

# A child that runs a command and says how much memory it took at most.
MEASURE = """
import json, resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
print(json.dumps({"code": done.returncode, "peak": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1000}))
"""


def run(*command: str) -> tuple[float, float]:
    """Seconds and peak megabytes of a command in a fresh process."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *command], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    seconds = time.perf_counter() - start
    result = json.loads(done.stdout)
    if result["code"]:
        raise RuntimeError(f"{' '.join(command[:4])} failed")
    return seconds, result["peak"]


def best(n: int, *command: str) -> tuple[float, float]:
    """The fastest of n runs: other work on the machine only ever adds."""
    return min(run(*command) for _ in range(n))


def bfloat16_copy(folder: Path, target: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    for file in folder.iterdir():
        if file.suffix == ".json":
            (target / file.name).write_bytes(file.read_bytes())
    tensors = {name: t.to(torch.bfloat16) for name, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def check(ours: Path, theirs: Path) -> float:
    """The largest difference of the columns that both sides have, relative to the column's largest value."""
    import pandas as pd

    a, b = pd.read_parquet(ours), pd.read_parquet(theirs)
    shared = [name for name in b.columns if name in a.columns and b[name].dtype.kind == "f"]
    return max(float((a[name] - b[name]).abs().max() / b[name].abs().max()) for name in shared)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    threads = parser.parse_args().threads
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if not SMOLLM2:
        raise SystemExit("set OV_CIRCUITS_SMOLLM2 to a folder with SmolLM2-135M (see the README)")
    with tempfile.TemporaryDirectory() as work:
        out = Path(work)
        heads = [sys.executable, "-m", "ov_circuits", "heads"]
        # The raw view, in which the rival works.
        ours = best(2, *heads, SMOLLM2, "--view", "raw", "-o", str(out / "ours.parquet"))
        theirs = run(sys.executable, "-c", RIVAL, SMOLLM2, str(out / "theirs.parquet"))
        error = check(out / "ours.parquet", out / "theirs.parquet")
        assert error < 1e-3, error
        half = out / "bfloat16"
        half.mkdir()
        bfloat16_copy(Path(SMOLLM2), half)
        bf16 = best(2, *heads, str(half), "--view", "raw", "-o", str(out / "half.parquet"))
        table(
            f"From command to table, SmolLM2-135M, 270 heads, imports included, {threads} thread(s)",
            [
                (f"command to table; shared columns equal to {error:.0e}", f"{theirs[0]:.1f} s", f"{ours[0]:.1f} s",
                 f"{theirs[0] / ours[0]:.1f}x", ">= 5x"),
                ("its peak memory in all", f"{theirs[1]:.0f} MB", f"{ours[1]:.0f} MB", f"1/{theirs[1] / ours[1]:.1f}", "<= 1/8"),
                ("the same command on bfloat16, against float32", f"{ours[0]:.1f} s", f"{bf16[0]:.1f} s",
                 f"{bf16[0] / ours[0]:.2f}", "<= 1.2"),
            ],
        )  # fmt: skip


if __name__ == "__main__":
    main()

"""Tensor-parallel runs against one process: the same numbers, each rank with its own heads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ov_circuits as ov
from ov_circuits import CircuitsError
from ov_circuits.trace.tensor_parallel import tensor_parallel

SCRIPT = Path(__file__).with_name("tensor_parallel_script.py")
TOKENS = [1, 5, 9, 7, 2, 11, 3]


def torchrun(ranks, *args):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[1])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*command, *map(str, args)], env=environment, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.fixture(scope="session")
def spread(stories260k, tiny_folders, tmp_path_factory):
    """``spread(name, ranks)`` -> (what rank 0 printed, the tensors it gathered, the folder)."""
    made = {}

    def get(name, ranks):
        if (name, ranks) not in made:
            folder = stories260k if name == "stories260k" else tiny_folders(name)
            out = tmp_path_factory.mktemp("spread") / "out.pt"
            result = torchrun(ranks, SCRIPT, folder, out, json.dumps(TOKENS))
            assert result.returncode == 0, result.stderr[-2000:]
            made[name, ranks] = (json.loads(result.stdout.splitlines()[-1]), torch.load(out), folder)
        return made[name, ranks]

    return get


CASES = [("stories260k", 2), ("stories260k", 4), ("llama-wide-heads", 2)]


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_the_account_is_the_single_processs(spread, assert_close, name, ranks):
    facts, gathered, folder = spread(name, ranks)
    trace = ov.load(folder).trace(TOKENS)
    account = trace.ledger(1, 2)
    assert_close(gathered["account"], torch.tensor(account["value"].to_numpy()), 1e-5)
    last = f"{trace.model.n_layers - 1}.0"
    into = trace.ledger_into(last, "V", source=1, answer=1, against=2)
    assert_close(gathered["into"], torch.tensor(into["value"].to_numpy()), 1e-5)
    assert_close(gathered["logits"], trace.logits, 1e-5)
    assert_close(gathered["norms"], trace.write_norms(), 1e-5)
    assert_close(gathered["weighted"], trace.value_weighted_patterns(), 1e-5)
    behaviours = ov.behaviours(trace.model, seeds=2, rows=1).drop(columns="head").to_numpy(float)
    assert_close(gathered["behaviours"], torch.tensor(behaviours), 1e-5)
    assert abs(facts["residual"]) <= 1e-4 * float(trace.logits.abs().max())


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_each_rank_holds_its_share_and_the_certificate_says_so(spread, name, ranks):
    facts, _, folder = spread(name, ranks)
    a = ov.load(folder).architecture
    share = a.n_heads // ranks
    assert facts["held"] == [share] * ranks
    checks = {check["name"]: check for check in facts["checks"]}
    assert all(check["passed"] for check in checks.values())
    assert set(checks) == {c.name for c in ov.load(folder).verify().checks} | {"sum over ranks"}
    for rank in range(ranks):
        said = f"rank {rank}: heads {rank * share} to {rank * share + share - 1}, W_O block [{share * a.d_head}, {a.d_model}]"
        assert said in checks["sum over ranks"]["detail"]


def test_a_family_without_a_plan_and_ranks_that_do_not_divide_are_said(tiny_gpt2_char, stories260k, tmp_path):
    for folder, ranks, words in (
        (tiny_gpt2_char, 2, "no tensor-parallel plan for gpt2"),
        (stories260k, 3, "3 ranks do not divide the 8 query heads"),
    ):
        result = torchrun(ranks, SCRIPT, folder, tmp_path / "out.pt", json.dumps(TOKENS))
        assert result.returncode != 0 and words in result.stderr


def test_outside_torchrun_it_is_refused(stories260k):
    with pytest.raises(CircuitsError, match="torchrun"):
        tensor_parallel(ov.load(stories260k))

"""Tensor-parallel runs against one process: the same numbers, each rank with its own heads."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pandas as pd
import pytest
import torch
from tiny_families import tiny
from torchrun import by_hand, torchrun
from typer.testing import CliRunner

import ov_circuits as ov
from ov_circuits import CircuitsError
from ov_circuits.cli import app
from ov_circuits.report.tables import to_json

SCRIPT, MANY = (Path(__file__).with_name(f"tensor_parallel_{name}.py") for name in ("script", "many"))
TOKENS = [1, 5, 9, 7, 2, 11, 3]

# What stands between heads and their ranks: groups, biases, wide heads, norms of queries and keys, a norm and a factor behind the
# attention, fused and interleaved query-key-value rows, attention and MLP side by side, experts.
FAMILIES = {
    "llama-biased-tied": {},
    "qwen3": {},
    "gemma2": {},
    "granite": {},
    "gpt_neox": {},
    "gptj": {},
    # Its experts' products want rows of 16 bytes.
    "mixtral": {"hidden_size": 32, "intermediate_size": 64, "num_local_experts": 4},
}
REFUSED = ("olmo2", "phi3", "gpt2")


@pytest.fixture(scope="session")
def folders(stories260k, tmp_path_factory):
    """A name -> its folder."""
    root = tmp_path_factory.mktemp("families")
    for name in (*FAMILIES, *REFUSED):
        tiny(name, **FAMILIES.get(name, {})).save_pretrained(root / name)
    return {name: root / name for name in (*FAMILIES, *REFUSED)} | {"stories260k": stories260k}


@pytest.fixture(scope="session")
def on_two(folders, tmp_path_factory):
    """What two ranks found of every model, by name, and what they refused."""
    out = tmp_path_factory.mktemp("spread") / "out.pt"
    names = ("stories260k", *FAMILIES, *REFUSED)
    done = torchrun(2, MANY, out, json.dumps(TOKENS), *(folders[name] for name in names))
    assert done.returncode == 0, done.stderr[-2000:]
    found = torch.load(out, weights_only=False)
    return found | {name: found[str(folders[name])] for name in names}


def assert_same(found, model, assert_close):
    trace = model.trace(TOKENS)
    last = f"{model.n_layers - 1}.0"
    into = trace.ledger_into(last, "V", source=1, answer=1, against=2)
    assert_close(found["account"], torch.tensor(trace.ledger(1, 2)["value"].to_numpy()), 1e-5)
    assert_close(found["into"], torch.tensor(into["value"].to_numpy()), 1e-5)
    assert_close(found["logits"], trace.logits, 1e-5)
    assert_close(found["norms"], trace.write_norms(), 1e-5)
    assert_close(found["weighted"], trace.value_weighted_patterns(), 1e-5)
    behaviours = ov.behaviours(model, seeds=2, rows=1).drop(columns="head").to_numpy(float)
    assert_close(found["behaviours"], torch.tensor(behaviours), 1e-5)
    assert abs(found["residual"]) <= 1e-4 * float(trace.logits.abs().max())


def assert_shared(found, model, ranks):
    a = model.architecture
    share = a.n_heads // ranks
    assert found["held"] == [share] * ranks
    checks = {check["name"]: check for check in found["checks"]}
    assert all(check["passed"] for check in checks.values()), checks
    assert set(checks) == {check.name for check in model.verify().checks} | {"sum over ranks"}
    for rank in range(ranks):
        said = f"rank {rank}: heads {rank * share} to {rank * share + share - 1}, W_O block [{share * a.d_head}, {a.d_model}]"
        assert said in checks["sum over ranks"]["detail"]


@pytest.mark.parametrize("name", ["stories260k", *FAMILIES])
def test_two_ranks_find_what_one_process_finds(on_two, folders, assert_close, name):
    model = ov.load(folders[name])
    assert_same(on_two[name], model, assert_close)
    assert_shared(on_two[name], model, 2)


def test_four_ranks_do_too(stories260k, tmp_path, assert_close):
    done = torchrun(4, SCRIPT, stories260k, tmp_path / "out.pt", json.dumps(TOKENS))
    assert done.returncode == 0, done.stderr[-2000:]
    found = torch.load(tmp_path / "out.pt") | json.loads(done.stdout.splitlines()[-1])
    model = ov.load(stories260k)
    assert_same(found, model, assert_close)
    assert_shared(found, model, 4)


def test_a_rank_reads_its_own_part_of_a_weight(on_two, folders):
    a = ov.load(folders["stories260k"]).architecture
    assert on_two["stories260k"]["largest_read"] == a.d_model * a.d_head * a.n_heads // 2


@pytest.mark.parametrize(("name", "words"), [
    ("olmo2", "plan for olmo2 models does not leave each rank its own heads"),
    ("phi3", "plan for phi3 models does not leave each rank its own heads"),
    ("gpt2", "no tensor-parallel plan for gpt2 models"),
    ("elsewhere", "of each layer lives on rank 1, this rank holds heads 0 to 3"),
    ("saved", "spread over ranks and not saved"),
    ("mesh", "a mesh of 2 dimensions"),
    ("mesh of scores", "a mesh of 2 dimensions"),
])  # fmt: skip
def test_what_cannot_be_is_said(on_two, name, words):
    assert words in on_two[name]


def test_outside_torchrun_it_is_refused(stories260k):
    with pytest.raises(CircuitsError, match="torchrun"):
        ov.distributed.tensor_parallel(ov.load(stories260k))


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_and_writes_once(stories260k, tmp_path):
    target = tmp_path / "account.parquet"
    prompt = (str(stories260k), " ".join(map(str, TOKENS)), "--ids", "--answer", "1", "--against", "2")
    done = torchrun(2, "-m", "ov_circuits", "attribute", *prompt, "-o", target, "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    right = ov.load(stories260k).trace(TOKENS).ledger(1, 2)
    assert_rows(done.stdout, right)
    assert_rows(to_json(pd.read_parquet(target)), right)
    assert [file.name for file in tmp_path.iterdir()] == ["account.parquet"]
    assert done.stderr.count("running the prompt") == 1, done.stderr


def assert_rows(ours, right):
    """A JSON text with the same parts in the same order, numbers to 1e-5 of the largest."""
    found, wanted = (json.loads(text)["rows"] for text in (ours, to_json(right)))
    values = [[row.pop("value") for row in rows] for rows in (found, wanted)]
    assert found == wanted
    assert max(abs(a - b) for a, b in zip(*values, strict=True)) <= 1e-5 * max(map(abs, values[1]))


# Rank 1 dies in the middle of a prompt, between two layers, or before the account of one is gathered.
DIES = """
import os, signal, sys
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
import ov_circuits.trace.ledger
def dying(of, name, call):
    original, calls = getattr(of, name), [0]
    def replacement(*args, **kwargs):
        calls[0] += 1
        if os.environ["RANK"] == "1" and calls[0] == call:
            print("RANK 1 DIES", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)
    setattr(of, name, replacement)
if sys.argv.pop(1) == "prompt":
    dying(LlamaDecoderLayer, "forward", 8)  # 5 layers ran when the model was tried out
else:
    dying(ov_circuits.trace.ledger, "accounts", 1)
from ov_circuits.cli import main
main()
"""


@pytest.mark.parametrize("when", ["prompt", "account"])
def test_a_rank_that_dies_ends_all(stories260k, tmp_path, when):
    script, target = tmp_path / "dies.py", tmp_path / "account.csv"
    script.write_text(DIES)
    asked = (stories260k, "1 5 9", "--ids", "--answer", "1", "--against", "2", "-o", target)
    done = torchrun(2, script, when, "attribute", *asked)
    assert done.returncode != 0 and "RANK 1 DIES" in done.stderr
    assert "exitcode  : -9" in done.stderr and str(SCRIPT.parents[1] / "ov_circuits") not in done.stderr, done.stderr
    assert not list(tmp_path.glob("*account*"))


@pytest.mark.parametrize("when", ["prompt", "account"])
def test_whoever_stays_says_so(stories260k, tmp_path, when):
    """Without torchrun nobody ends the others: each finds out by itself."""
    script = tmp_path / "dies.py"
    script.write_text(DIES)
    asked = (str(stories260k), "1 5 9", "--ids", "--answer", "1", "--against", "2")
    done = by_hand(2, script, when, "attribute", *asked)
    assert [process.returncode for process in done] == [2, -signal.SIGKILL]
    (said,) = [line for line in done[0].stderr.splitlines() if "another process" in line]
    assert said.startswith("error: another process of the group ended before the results were gathered"), done[0].stderr
    assert "Traceback" not in done[0].stderr


@pytest.mark.parametrize(("ranks", "command", "words"), [
    (3, ("verify", "STORIES"), "3 ranks do not divide the 8 query heads of stories260k"),
    (2, ("attribute", "STORIES", "1 2", "--ids", "--answer", "1", "-o", "FOLDER/nowhere/a.csv"), "nowhere does not exist"),
])  # fmt: skip
def test_what_is_wrong_is_said_once(stories260k, tmp_path, ranks, command, words):
    command = [str(word).replace("STORIES", str(stories260k)).replace("FOLDER", str(tmp_path)) for word in command]
    done = torchrun(ranks, "-m", "ov_circuits", *command)
    assert done.returncode != 0
    # torchrun itself adds a traceback of its own.
    assert done.stderr.count(words) == 1 and str(SCRIPT.parents[1] / "ov_circuits") not in done.stderr, done.stderr
    assert "exitcode  : 2" in done.stderr and done.stdout == "", done.stderr


def test_other_commands_are_not_for_many_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    result = CliRunner().invoke(app, ["inspect"])
    assert result.exit_code == 2 and "inspect is the work of one process: start it without torchrun" in result.stderr


@pytest.mark.slow
@pytest.mark.network
def test_three_ranks_share_the_nine_heads_of_smollm2(smollm2):
    prompt, answer, against = "The capital of France is", " Paris", " Rome"
    asked = ("smollm2", prompt, "--answer", answer, "--against", against, "--json")
    done = torchrun(3, "-m", "ov_circuits", "attribute", *asked, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    assert_rows(done.stdout, smollm2.trace(prompt).ledger(answer, against))
    done = torchrun(3, "-m", "ov_circuits", "verify", "smollm2", "--json", timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert "rank 2: heads 6 to 8, W_O block [192, 576]" in checks["sum over ranks"]["detail"]
    assert all(check["passed"] for check in checks.values())

"""Models on a device: everything follows the weights there, and the numbers are those of the CPU.

Where there is a GPU, all of it runs on it as well; where there is none, those tests say that they did not run. The device that
is always there, ``pretend`` (see pretend_device.py), shows where tensors lie, not what a GPU's arithmetic does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from pretend_device import pretended
from safetensors.torch import load_file, save_file
from torchrun import torchrun
from typer.testing import CliRunner

import ov_circuits as ov
from ov_circuits.cli import app
from ov_circuits.devices import device_of
from ov_circuits.errors import CircuitsError

NO_GPU = "not run: torch finds no CUDA GPU on this machine"
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU))
TOKENS = [1, 5, 9, 7, 2, 11, 3, 5, 9, 7]


@pytest.fixture(params=["pretend", CUDA])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with pretended() if request.param == "pretend" else nullcontext():
        yield request.param


def assert_same(found: Any, right: Any, name: str = "") -> None:
    """Frames, tensors, numbers, and dictionaries, lists and tuples of them, to 1e-4."""
    if isinstance(right, pd.DataFrame):
        assert list(found.columns) == list(right.columns)
        assert_same(found.to_dict("list"), right.to_dict("list"))
        assert_same(found.attrs, right.attrs)
    elif isinstance(right, torch.Tensor):
        np.testing.assert_allclose(found.numpy(force=True), right.numpy(), rtol=1e-4, atol=1e-5, err_msg=name)
    elif isinstance(right, dict):
        assert found.keys() == right.keys(), name
        for key in right:
            assert_same(found[key], right[key], f"{name} {key}")
    elif isinstance(right, (list, tuple)):
        assert len(found) == len(right), name
        for one, other in zip(found, right, strict=True):
            assert_same(one, other, name)
    elif isinstance(right, float):
        assert found == pytest.approx(right, rel=1e-4, abs=2e-5, nan_ok=True), name
    elif right is not None and not isinstance(right, (str, int, bool)):
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5, err_msg=name)
    else:
        assert found == right or (pd.isna(found) and pd.isna(right)), name


def head_facts(model: ov.Model) -> dict[str, Any]:
    head = model.head("1.1")
    return {
        "singular": head.ov.singular_values,
        "eigenvalues": head.full_ov.eigenvalues.real,
        "writes": head.writes(3, 4),
        "reads": head.reads(4),
        "spectrum": ov.spectrum(head),
    }


WEIGHTS: dict[str, Callable[[ov.Model], Any]] = {
    "scoreboard": lambda m: ov.scoreboard(m),
    "vocabulary": lambda m: ov.scoreboard(m, ["rank_copying_10", "rank_suppression_5"]),
    "rank copying": lambda m: ov.rank_copying(m, ["1.0", "1.1"], "embed_plus_mlp0", ranks=8),
    "effective": lambda m: ov.rank_copying(m, source="effective"),
    "head": head_facts,
    "composition": lambda m: ov.composition(m, "all"),
    "components": lambda m: ov.component_composition(m, "0.1"),
    "overlap": lambda m: ov.subspace_overlap(m),
    "space map": lambda m: ov.space_map(m).attrs["shares"],
    "qk": lambda m: ov.qk_spectra(m, 0).frame(),
    "pairs": lambda m: [ov.strongest_token_pairs(m, "1.1", 5), ov.largest_query_key_pairs(m, "1.1", 5)],
    "compare": lambda m: ov.compare(m, m),
    "without": lambda m: ov.scoreboard(m.without("0.1"), ["ov_frobenius_norm"]),
    "token pair": lambda m: ov.token_pair(m, 3, 4),
    "positions": lambda m: ov.offset_profile(m, "1.1", range(3)) if m.W_pos is None else ov.position_pattern(m, "1.1"),
}

PROMPTS: dict[str, Callable[[ov.Model], Any]] = {
    "ledger": lambda m: m.trace(TOKENS).ledger(1, 2),
    "into": lambda m: m.trace(TOKENS).ledger_into("1.1", "Q", source=2),
    "stream": lambda m: m.trace(TOKENS).stream_ledger(1, torch.ones(m.architecture.d_model)),
    "writes": lambda m: [m.trace(TOKENS).write_norms(), m.trace(TOKENS).value_weighted_patterns()],
    "head": lambda m: [m.trace(TOKENS).head_writes("1.1"), m.trace(TOKENS).value_bias_write("1.1"), m.trace(TOKENS).values("0.1")],
    "ablate": lambda m: ov.ablate(m, ["0.1", "1.0"], [TOKENS, TOKENS[:6]], answer=1),
    "ablate mean": lambda m: ov.ablate(m, "0.1", [TOKENS], "mean", answer=1, against=2, freeze=True),
    "ablate source": lambda m: ov.ablate(m, ["0.1", "1.1"], [TOKENS], "source", sources=[1], direction=0),
    "sweep": lambda m: ov.ablation_sweep(m, [TOKENS], answer=1),
    "behaviours": lambda m: ov.behaviours(m, seeds=2, rows=1),
    "generate": lambda m: [ov.generate(m, TOKENS[:5], 2).tokens(), ov.generate(m, TOKENS[:5], 2).heads()],
    "certificate": lambda m: [check.passed for check in m.verify().checks],
}  # fmt: skip


# Of the model that comes with the package: what needs a tokenizer.
EMBEDDED: dict[str, Callable[[ov.Model], Any]] = {
    "names": lambda m: ov.ioi_copying(m, ["1.0"], each=True, names=["the", "people", "state"]),
    "relations": lambda m: ov.relation_scores(m, heads=["1.0", "1.1"]),
    "copy table": lambda m: ov.copy_table(m),
    "attribute": lambda m: ov.attribute(m, "repeated_tokens", n=3, samples=20),
    "check": lambda m: ov.check(m, "1.0 copies", prompts=2).frame(),
    "scan": lambda m: ov.scan(m, tokens=120, window=40).heads,
    "evidence": lambda m: ov.scoreboard(m, ["ov_stable_rank", "induction"], tokens=2),
    "span": lambda m: ov.span(m.head("1.0"), [0, 1]),
}


@pytest.mark.parametrize("what", EMBEDDED)
def test_what_needs_a_tokenizer(device: str, what: str) -> None:
    assert_same(EMBEDDED[what](ov.load(device=device)), EMBEDDED[what](ov.load()))


def test_weights_in_memory_that_change_are_noticed_on_a_device_too(device: str) -> None:
    checkpoint = ov.load().source.checkpoint
    tensors = load_file(Path(checkpoint.where) / "model.safetensors")
    model = ov.load(tensors, config=checkpoint.config, device=device)
    opened = (model, model.without("0.0"))
    for each in opened:
        each.layer(1)  # is kept
    next(iter(tensors.values())).mul_(2)
    for each in opened:
        with pytest.raises(CircuitsError, match="changed after they were opened"):
            each.layer(1)


def test_a_page(device: str, tmp_path: Path) -> None:
    model = ov.load(device=device)
    ov.dashboard(model, model.trace("the people of the")).save(tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size > 100_000


def test_all_of_it_is_there(tiny_folders: Callable[[str], Path], device: str, tmp_path: Path) -> None:
    """Weights, the running model and what it leaves behind; and a saved trace comes back to the device."""
    model = ov.load(tiny_folders("gpt2-tied"), device=device)
    trace = model.trace(TOKENS)
    trace.save(tmp_path / "trace.safetensors")
    again = ov.open_trace(tmp_path / "trace.safetensors", model)
    layer, record, head = model.layer(1), trace.record, model.head("0.1")
    tensors = {
        "weights": (layer.W_Q, layer.W_K, layer.W_V, layer.W_O, layer.b_Q, layer.b_V, layer.b_O, model.W_E, model.W_pos, model.b_U),
        "circuits": (head.ov.singular_values, head.full_ov.eigenvalues, model.grams.cross),
        "record": (record.final, record.logits, record.position, *vars(record.layers[1]).values(), again.record.logits),
        "network": tuple(model.source.network.parameters()),
    }  # fmt: skip
    for name, of in tensors.items():
        assert all(tensor.device.type == device for tensor in of), name
    assert again.ledger(1, 2).equals(trace.ledger(1, 2))


def test_half_precision_travels_as_such(write_tiny: Callable[..., Path], device: str) -> None:
    """What a file holds as bfloat16 becomes float32 on the device, a tensor at a time."""
    folder = write_tiny("llama")
    file = folder / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    model, plain = ov.load(folder, device=device), ov.load(folder)
    assert model.head("0.0").W_O.dtype == torch.float32 and model.grams.read.dtype == torch.float64
    assert_same(model.head("0.0").W_O, plain.head("0.0").W_O)


@pytest.mark.parametrize(("name", "words"), [
    ("cuda", "finds no cuda device"),
    ("mps", "float64"),
    ("gpu", "there is no device 'gpu'"),
    ("meta", "finds no meta device"),
])  # fmt: skip
def test_what_is_not_there_is_said(name: str, words: str) -> None:
    if name == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(CircuitsError, match=words):
        ov.load(device=name)


COMMANDS = {
    "heads": (), "head": ("1.0",), "paths": (), "pairs": ("1.0",), "compare": ("-", "-"), "verify": (),
    "behaviours": ("--seeds", "1"),
    "attribute": ("the people of", "--answer", " the"), "generate": ("the people of", "-n", "1"),
    "ablate": ("1.0", "--prompt", "the people of", "--answer", " the"), "check": ("1.0 copies", "--prompts", "2"),
    "scan": ("--tokens", "80", "--window", "40"), "report": ("-o", "report.html"),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_a_device(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It reaches the model: what torch does not find is refused, in a sentence, before anything is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(app, [command, *COMMANDS[command], "--device", "cuda"])
    assert done.exit_code == 2, done.output
    assert "finds no cuda device on this machine" in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_command_runs_there(tiny_folders: Callable[[str], Path], device: str, tmp_path: Path) -> None:
    found = []
    for name in (device, "cpu"):
        file = tmp_path / f"{name}.parquet"
        arguments = ["attribute", str(tiny_folders("gpt2-tied")), "1 5 9", "--ids", "--answer", "1", "-o", str(file)]
        done = CliRunner().invoke(app, [*arguments, "--device", name])
        assert done.exit_code == 0, done.output
        found.append(pd.read_parquet(file)["value"].tolist())
    assert_same(*found)


def test_a_process_takes_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended():
        assert device_of("pretend") == torch.device("pretend", 0)
        monkeypatch.setenv("LOCAL_RANK", "1")
        with pytest.raises(CircuitsError, match="there is no pretend:1: this machine has 1 such device; with torchrun"):
            device_of("pretend")
    with pytest.raises(CircuitsError, match="no pretend device on this machine"):
        device_of("pretend")
    assert device_of("cpu") == device_of(None) == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"{NO_GPU}, or only one: tensor-parallel runs take two")
def test_two_gpus_find_what_one_process_finds(stories260k: Path, tmp_path: Path) -> None:
    """nccl: the attribution, and the scoreboard, of two processes with a GPU each."""
    right = ov.load(stories260k).trace(TOKENS).ledger(1, 2)
    asked = (stories260k, " ".join(map(str, TOKENS)), "--ids", "--answer", "1", "--against", "2", "--device", "cuda")
    done = torchrun(2, "-m", "ov_circuits", "attribute", *asked, "-o", tmp_path / "account.parquet")
    assert done.returncode == 0, done.stderr[-2000:]
    assert_same(pd.read_parquet(tmp_path / "account.parquet")["value"].tolist(), right["value"].tolist())
    done = torchrun(2, "-m", "ov_circuits", "heads", stories260k, "--device", "cuda", "-o", tmp_path / "heads.parquet")
    assert done.returncode == 0, done.stderr[-2000:]
    numbers = pd.read_parquet(tmp_path / "heads.parquet").select_dtypes("number")
    assert_same(numbers, ov.scoreboard(ov.load(stories260k)).select_dtypes("number"))


@pytest.mark.parametrize("family", ["llama-grouped", "gpt2-tied"])
@pytest.mark.parametrize("what", WEIGHTS)
def test_scores_of_weights(tiny_folders: Callable[[str], Path], device: str, family: str, what: str) -> None:
    folder = tiny_folders(family)
    assert_same(WEIGHTS[what](ov.load(folder, device=device)), WEIGHTS[what](ov.load(folder)))


@pytest.mark.parametrize("family", ["llama-grouped", "gpt2-tied"])
@pytest.mark.parametrize("what", PROMPTS)
def test_prompts(tiny_folders: Callable[[str], Path], device: str, family: str, what: str) -> None:
    folder = tiny_folders(family)
    assert_same(PROMPTS[what](ov.load(folder, device=device)), PROMPTS[what](ov.load(folder)))

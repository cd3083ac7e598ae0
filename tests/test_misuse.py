"""Faults that were found by attack: files overwritten, memory eaten, numbers made up, tracebacks."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from test_cli import run, run_json

import ov_circuits as ov
from ov_circuits import CircuitsError, files
from ov_circuits.files import atomic_path

# -- nothing is destroyed or left -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "name"), [
    (["split"], "model.safetensors"), (["heads"], "config.json"), (["pairs", "1.0"], "tokenizer.json"),
])  # fmt: skip
def test_a_checkpoints_own_files_are_never_written_over(tiny_gpt2_char, copy_of, command, name):
    folder = copy_of(tiny_gpt2_char)
    before = (folder / name).read_bytes()
    arguments = [command[0], folder, *command[1:]] if command[0] == "pairs" else [*command, folder]
    result = run(*arguments, "-o", folder / name, code=2)
    assert "file of the checkpoint itself" in result.stderr
    assert (folder / name).read_bytes() == before


def test_a_link_stays_a_link_and_its_file_is_written(tmp_path):
    real, link = tmp_path / "real.txt", tmp_path / "link.txt"
    real.write_text("old")
    link.symlink_to(real)
    with atomic_path(link) as temporary:
        temporary.write_text("new")
    assert link.is_symlink() and real.read_text() == "new"


def test_a_written_file_has_the_rights_that_the_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        with atomic_path(tmp_path / "table.csv") as temporary:
            assert temporary.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)
    assert (tmp_path / "table.csv").stat().st_mode & 0o777 == 0o640


def test_a_forked_process_leaves_its_parents_unfinished_files_alone(tmp_path, monkeypatch):
    own, parents = tmp_path / "own", tmp_path / "parents"
    for file in (own, parents):
        file.touch()
    monkeypatch.setattr(files, "_unfinished", {own: os.getpid(), parents: os.getppid()})
    files._take_away_the_rest()
    assert not own.exists() and parents.exists()


def test_devices_and_names_too_long_are_refused_in_a_sentence(tmp_path):
    for target in ("/dev/full", tmp_path / ("x" * 300), tmp_path / "a\0b"):
        with pytest.raises(CircuitsError, match="cannot write"), atomic_path(target):
            pass


def test_a_termination_leaves_no_temporary_file(tmp_path, tiny_gpt2_char):
    script = (
        "import os, signal, sys; from unittest.mock import patch; from ov_circuits import cli\n"
        "def stop(*args, **kwargs): os.kill(os.getpid(), signal.SIGTERM)\n"
        f"sys.argv = ['ov-circuits', 'heads', {str(tiny_gpt2_char)!r}, '-o', {str(tmp_path / 'heads.csv')!r}]\n"
        "with patch('ov_circuits.scores.board.Board.computed', stop): cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 143, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layers", ["0-99999999999", "9" * 5000, "0-", "٣"])
def test_layer_lists_out_of_range_cost_nothing(tiny_gpt2_char, tmp_path, layers):
    assert "layer" in run("split", tiny_gpt2_char, "-o", tmp_path / "x.safetensors", "--layers", layers, code=2).stderr


# -- what is not finite ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["transformer.wte.weight", "lm_head.weight", "transformer.ln_f.weight"])
def test_a_broken_embedding_costs_the_vocabulary_scores_and_no_more(tiny_gpt2_char, copy_of, name):
    def change(tensors):
        tensors[name].view(-1)[5] = math.nan

    model, whole = ov.load(copy_of(tiny_gpt2_char, change), view="raw"), ov.load(tiny_gpt2_char, view="raw")
    board, right = ov.scoreboard(model), ov.scoreboard(whole)
    assert board["ov_stable_rank"].equals(right["ov_stable_rank"])
    assert name.removeprefix("transformer.") in board.attrs["left_out"]["eigen_copying_full"]
    assert any(name.removeprefix("transformer.") in note for note in ov.dashboard(model).payload["meta"]["notes"])
    with pytest.raises(CircuitsError, match="NaN or infinity"):
        ov.strongest_token_pairs(model, "1.0")


def test_a_head_that_is_not_finite_has_no_numbers_anywhere(tiny_gpt2_char, copy_of):
    def change(tensors):
        tensors["transformer.h.0.attn.c_attn.weight"][3, 2] = math.inf  # W_Q of head 0.0

    folder = copy_of(tiny_gpt2_char, change)
    facts = run_json("head", folder, "0.0")
    assert set(facts["scores"].values()) == {None} and facts["singular_values"] == [] and "NaN" in facts["note"]
    assert run_json("head", folder, "0.1")["scores"]["ov_stable_rank"] is not None
    assert "NaN or infinity on this prompt" in run("attribute", folder, "ab", "--answer", "c", code=2).stderr
    run("report", folder, "-o", folder.parent / "page.html")


@pytest.fixture
def unchecked():
    """Users have no type checks: the annotations' hook, which would refuse first, is off."""
    from jaxtyping import config

    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


# -- nothing is read out of the wrong thing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        [0.7, 1.9],
        torch.tensor([1.7]),
        [True, False],
        ["12", 3],
        bytearray(b"!"),
        {3, 1},
        {1: 2},
        None,
        5,
        torch.zeros(2, 2),
    ],
)
def test_a_prompt_is_text_or_whole_numbers(unchecked, stories260k, prompt):
    with pytest.raises(CircuitsError, match="whole numbers"):
        ov.load(stories260k).trace(prompt)


def test_tensors_and_arrays_of_whole_numbers_are_prompts_and_labels(unchecked, stories260k):
    model = ov.load(stories260k)
    assert model.trace(torch.tensor([1, 5])).tokens == model.trace([np.int64(1), np.int64(5)]).tokens == (1, 5)
    assert model.head(np.int64(1), np.int64(2)).label == "1.2"


@pytest.mark.parametrize("answer", [5.0, True, None, [5], b"a"])
def test_an_answer_is_a_word_or_an_id(unchecked, stories260k, answer):
    with pytest.raises(CircuitsError, match="answer is a text, a whole number"):
        ov.load(stories260k).trace([1, 5]).ledger(answer)


@pytest.mark.parametrize("position", [0.5, "x", None, True])
def test_a_position_is_a_whole_number(unchecked, stories260k, position):
    with pytest.raises(CircuitsError, match="whole number"):
        ov.load(stories260k).trace([1, 5]).ledger(3, position=position)


@pytest.mark.parametrize(
    "label", [("a", "b"), (1,), (0, 1, 2), (None, None), (True, True), (0.0, 1.0), "0." + "9" * 5000]
)
def test_what_is_no_head_is_refused(unchecked, stories260k, label):
    with pytest.raises(CircuitsError, match="names no head"):
        ov.load(stories260k).head(label)


@pytest.mark.parametrize("layer", ["0", None, 0.5, True])
def test_what_is_no_layer_is_refused(unchecked, stories260k, layer):
    with pytest.raises(CircuitsError, match="no layer"):
        ov.load(stories260k).layer(layer)


@pytest.mark.parametrize("x", [5, [], b"x", torch.nn.Linear(2, 2)])
def test_what_is_no_model_is_refused(unchecked, x):
    with pytest.raises(CircuitsError, match="cannot open"):
        ov.load(x)


# -- the command line's smaller things -------------------------------------------------------------------------------------


def test_a_sort_that_cannot_be_made_is_refused_before_the_work(gpt2_small_attention, tiny_gpt2_char, monkeypatch):
    monkeypatch.setattr("ov_circuits.scores.board.Board.computed", lambda *_, **__: pytest.fail("scores were computed"))
    refused = run("heads", gpt2_small_attention, "--sort", "eigen_copying_full", code=2).stderr
    assert "attention weights only" in refused
    assert "did you mean 'ov_stable_rank'" in run("heads", tiny_gpt2_char, "--sort", "ov stabel rank", code=2).stderr
    assert "names no score" in run("heads", tiny_gpt2_char, "--scores", ",", code=2).stderr


def test_a_heading_of_the_table_is_a_key_to_sort_by(tiny_gpt2_char):
    rows = run_json("heads", tiny_gpt2_char, "--sort", "eigen copying full z")["rows"]
    values = [row["eigen_copying_full_z"] for row in rows]
    assert values == sorted(values, reverse=True)
    assert "eigen_copying_full_z" not in run_json("heads", tiny_gpt2_char, "--no-nulls")["rows"][0]


@pytest.mark.parametrize("ids", ["1_0 2", "٣", "1.5"])
def test_ids_are_plain_digits(gpt_nano_sort, ids):
    assert "no token id" in run("attribute", gpt_nano_sort, ids, "--ids", "--answer", "0", code=2).stderr


def test_heads_of_an_account_show_path_and_bias_apart(gpt_nano_sort):
    text = run("attribute", gpt_nano_sort, "0 2 1 1 0 2", "--ids", "--answer", "0", "--against", "1").stdout
    account = ov.load(gpt_nano_sort).trace([0, 2, 1, 1, 0, 2]).ledger(0, 1)
    head = account[account["head"] == "2.1"]
    for kind in ("value_path", "value_bias"):
        assert f"{head.loc[head['kind'] == kind, 'value'].sum():+.4f}" in text
    assert f"{head['value'].sum():+.4f}" in text


def test_full_disks_and_narrow_encodings_are_no_traceback(tiny_gpt2_char):
    command = [sys.executable, "-m", "ov_circuits", "heads", str(tiny_gpt2_char), "--no-nulls"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2 and "No space left" in done.stderr and "Traceback" not in done.stderr
    environment = {"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin", "HOME": "/tmp"}
    done = subprocess.run([*command, "--json"], capture_output=True, env=environment, check=False)
    assert done.returncode == 0 and b"Traceback" not in done.stderr


def test_a_broken_tokenizer_is_said_and_a_missing_one_is_lived_without(tiny_gpt2_char, copy_of):
    folder = copy_of(tiny_gpt2_char)
    (folder / "tokenizer.json").write_text('{"version": ')
    assert "tokenizer.json" in run("heads", folder, code=2).stderr
    (folder / "tokenizer.json").unlink()
    assert run_json("heads", folder)["rows"][0]["reads_plus"][0].startswith("⟨id ")


def test_a_bos_outside_the_vocabulary_is_none_and_named_when_asked_for(tiny_gpt2_char, copy_of):
    folder = copy_of(tiny_gpt2_char)
    config = (folder / "config.json").read_text().replace('"bos_token_id": 0', '"bos_token_id": 50256')
    (folder / "config.json").write_text(config)
    assert ov.load(folder).verify().passed
    with pytest.raises(CircuitsError, match="bos_token_id"):
        ov.load(folder).trace([5, 6], bos=True)


def test_a_home_that_does_not_exist_is_a_sentence():
    assert "nobody_of_this_name" in run("inspect", "~nobody_of_this_name/x", code=2).stderr


# -- seeds, weightings, traces of the last logits ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedded():
    return ov.load()


@pytest.mark.parametrize("seed", [-1, 2**63, 10**30, True])
def test_a_seed_that_no_generator_takes_is_refused(embedded, tmp_path, seed):
    file = tmp_path / "set.jsonl"
    file.write_text('{"prompt": "the people of", "answer": " the"}\n')
    for asked in (
        lambda: ov.check(embedded, "1.0 copies", prompts=2, seed=seed),
        lambda: ov.behaviours(embedded, seeds=[seed]),
        lambda: ov.attribute(embedded, file, seed=seed),
        lambda: ov.scoreboard(embedded, seed=seed),
    ):
        with pytest.raises(CircuitsError, match=r"seeds? is a whole number"):
            asked()


def test_a_number_of_thousands_of_digits_names_its_line(embedded, tmp_path):
    file = tmp_path / "set.jsonl"
    file.write_text('{"text": "x"}\n{"prompt": "x", "text": "x", "n": ' + "1" * 6000 + "}\n")
    for asked in (lambda: ov.scan(embedded, file), lambda: ov.prompts.read(file)):
        with pytest.raises(CircuitsError, match=r"set\.jsonl, line [12] "):
            asked()


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_a_weighting_that_is_not_finite_is_refused(embedded, weight):
    with pytest.raises(CircuitsError, match="finite weights"):
        embedded.trace("the people").ledger({" the": weight})


def test_a_trace_of_the_last_logits_shows_a_page_and_is_not_ablated(embedded):
    last, whole = (embedded.trace("the people of the", last_logits=only) for only in (True, False))
    with pytest.raises(CircuitsError, match="last_logits"):
        ov.ablate(embedded, "1.0", last)
    top = whole.logits[-1].argmax().item()
    assert last.logits[last.row(len(last) - 1)].argmax().item() == top
    ov.dashboard(embedded, last)


def test_an_ablation_says_that_a_prompt_set_put_bos_first(embedded, tmp_path):
    file = tmp_path / "set.jsonl"
    file.write_text('{"prompt": "the people of", "answer": " the"}\n')
    for bos in (True, False):
        found = ov.ablate(embedded, "1.0", ov.prompts.load(file, embedded, bos=bos))
        assert found.attrs["bos_added"] is bos

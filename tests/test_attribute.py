"""Attribution over many prompts, against each prompt's own ledger, the plain transformers model, and a bootstrap by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import hf_model
from test_cli import run, run_json

import ov_circuits as ov
from ov_circuits import prompts
from ov_circuits.errors import CircuitsError
from ov_circuits.trace import attribution as module
from ov_circuits.trace.attribution import Bootstrap

CASES = [("embedded", "repeated_tokens"), ("embedded", "successors"), ("stories260k", "pronouns"),
         ("stories260k", "greater_than_digit"), ("tiny-gpt2-char", "repeated_tokens")]  # fmt: skip


@pytest.fixture(scope="module")
def opened(models_dir):
    return lambda name: ov.load(None if name == "embedded" else models_dir / name)


def by_hand(model: ov.Model, found: prompts.PromptSet, roles: list[str]) -> pd.DataFrame:
    """A row a head: mean and spread, and the part from each role, from one prompt's ledger after the other."""
    rows = []
    for prompt in found:
        ledger = model.trace(list(prompt.tokens)).ledger(dict(prompt.weights))
        where = {place: role for role in roles for place in prompt.roles[role]}
        heads = ledger[ledger["component"] == "head"]
        for head, entries in heads.groupby("head"):
            row = {"head": head, "mean": entries["value"].sum()}
            path = entries[entries["kind"] == "value_path"]
            sources = path["source"].map({s: where.get(s, "other") for s in range(len(prompt.tokens))})
            row |= {f"from_{role}": path.loc[sources == role, "value"].sum() for role in (*roles, "other")}
            rows.append(row | {"value_path": path["value"].sum()})
    by_head = pd.DataFrame(rows).groupby("head")
    return by_head.mean().assign(spread=by_head["mean"].std())


@pytest.mark.parametrize(("folder", "name"), CASES)
def test_means_are_those_of_the_prompts_own_ledgers(opened, folder, name):
    model = opened(folder)
    found = prompts.load(name, model, n=12)
    frame = ov.attribute(model, found, samples=50)
    roles = frame.attrs["roles"]
    assert len(roles) >= 2
    right = by_hand(model, found, roles)
    heads = frame[frame["component"] == "head"].set_index("head")
    assert list(heads.index) == model.head_labels
    for column in right.columns:
        np.testing.assert_allclose(heads[column], right.loc[heads.index, column], atol=1e-6)
    np.testing.assert_allclose(heads["value_path"] + heads["value_bias"], heads["mean"], atol=1e-9)
    parts = heads[[f"from_{role}" for role in (*roles, "other")]].sum(axis=1)
    np.testing.assert_allclose(parts, heads["value_path"], atol=1e-9)


@pytest.mark.parametrize(("folder", "name"), CASES)
def test_the_account_closes_on_the_plain_models_mean_difference(opened, models_dir, folder, name):
    model = opened(folder)
    found = prompts.load(name, model, n=12)
    frame = ov.attribute(model, found, samples=50)
    path = Path(__file__).resolve().parents[1] / "data/model" if folder == "embedded" else models_dir / folder
    network, differences = hf_model(path), []
    for prompt in found:
        with torch.no_grad():
            logits = network(torch.tensor([prompt.tokens])).logits[0, -1].double()
        differences.append(float(logits[list(prompt.answer)].mean() - logits[list(prompt.foil)].mean()))
    scale = np.abs(differences).max() + 1
    assert frame.attrs["difference"] == pytest.approx(np.mean(differences), abs=1e-5 * scale)
    assert frame["mean"].sum() == pytest.approx(np.mean(differences), abs=1e-5 * scale)
    assert frame.attrs["largest_residual"] <= 1e-5 * scale
    assert frame.attrs["residual"] == pytest.approx(frame.attrs["difference"] - frame["mean"].sum(), abs=1e-12)
    assert frame.attrs["share_right"] == np.mean(np.array(differences) > 0)


def test_the_largest_residual_is_that_of_the_prompt_that_does_not_close(monkeypatch):
    inner, seen = module.logit_reading, []

    def off(trace, weights):
        seen.append(trace)
        reading = inner(trace, weights)
        return replace(reading, actual=reading.actual - 6 * (len(seen) == 2))

    monkeypatch.setattr(module, "logit_reading", off)
    attrs = ov.attribute(ov.load(), "successors", n=3, samples=5).attrs
    assert attrs["largest_residual"] == pytest.approx(6, abs=1e-3) and attrs["residual"] == pytest.approx(-2, abs=1e-3)


def test_how_prompts_are_batched_changes_nothing(monkeypatch):
    model = ov.load()
    found = prompts.load("repeated_tokens", model, n=10)
    together = ov.attribute(model, found, samples=20)
    monkeypatch.setattr(module, "_CHUNK_TOKENS", 1)
    alone = ov.attribute(model, found, samples=20)
    np.testing.assert_allclose(together["mean"], alone["mean"], atol=1e-5)
    np.testing.assert_allclose(together["high"], alone["high"], atol=1e-5)


def test_the_order_of_prompts_changes_no_mean():
    model = ov.load()
    found = prompts.load("successors", model)
    reversed_set = prompts.PromptSet("reversed", found.prompts[::-1], {}, {})
    one, other = ov.attribute(model, found, samples=1), ov.attribute(model, reversed_set, samples=1)
    np.testing.assert_allclose(one["mean"], other["mean"], atol=1e-6)


# -- intervals --------------------------------------------------------------------------------------------------------


def test_the_bootstrap_draws_rows_with_replacement_and_all_columns_together():
    values = np.random.default_rng(0).normal(size=(30, 3)) * [1, 2, 3] + [0, 5, -5]
    found = Bootstrap(30, samples=400, level=0.9, seed=11)(values)
    counts = np.random.default_rng(11).multinomial(30, np.full(30, 1 / 30), size=400)
    means = np.array([np.repeat(values, count, axis=0).mean(0) for count in counts])
    np.testing.assert_allclose(found.mean, values.mean(0))
    np.testing.assert_allclose(found.low, np.quantile(means, 0.05, axis=0))
    np.testing.assert_allclose(found.high, np.quantile(means, 0.95, axis=0))


def test_the_interval_holds_the_true_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    held = [
        bool(((found := Bootstrap(60, 300, 0.9, seed)(rng.exponential(size=(60, 1)))).low <= 1) & (found.high >= 1))
        for seed in range(400)
    ]
    assert 0.84 <= np.mean(held) <= 0.94  # .90, a little less for skewed data


def test_one_prompt_has_no_interval():
    frame = ov.attribute(ov.load(), "repeated_tokens", n=1)
    assert frame["low"].isna().all() and frame["spread"].isna().all() and frame["mean"].notna().all()
    assert np.isnan(frame.attrs["difference_low"])


def test_the_same_seed_gives_the_same_interval():
    model = ov.load()
    one, same, other = (ov.attribute(model, prompts.load("successors", model), seed=seed) for seed in (1, 1, 2))
    pd.testing.assert_frame_equal(one, same)
    assert not one["low"].equals(other["low"])


# -- what is found ----------------------------------------------------------------------------------------------------


def test_induction_heads_carry_repeated_tokens_from_after_the_earlier_occurrence():
    frame = ov.attribute(ov.load(), "repeated_tokens", n=40)
    heads = frame[frame["component"] == "head"].set_index("head")
    strongest = heads["mean"].nlargest(3)
    assert set(strongest.index) == {"1.0", "1.1", "1.2"}
    for head in strongest.index:
        row = heads.loc[head]
        assert row["low"] > 1
        assert row["from_after_earlier"] == pytest.approx(row["value_path"], abs=0.05)
    assert frame.attrs["share_right"] == 1.0


# -- questions that have no answer ------------------------------------------------------------------------------------


def write(folder: Path, *lines: dict) -> Path:
    path = folder / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


ONE = {"prompt": "the people of the United", "answer": " States", "foil": " people", "roles": {"name": "United"}}


def test_roles_must_be_known_and_shared(tmp_path):
    model = ov.load()
    other = {**ONE, "roles": {"whom": "people"}}
    found = prompts.load(write(tmp_path, ONE, other), model)
    frame = ov.attribute(model, found, samples=5)
    assert frame.attrs["roles"] == ["start"]
    assert frame.attrs["roles_not_shared"] == ["name", "whom", "end"]
    with pytest.raises(CircuitsError, match="did you mean 'name'"):
        ov.attribute(model, found, roles=["nam"])
    with pytest.raises(CircuitsError, match="1 of 2 prompts of mine have no role name"):
        ov.attribute(model, found, roles=["name"])
    with pytest.raises(CircuitsError, match="some prompts of mine have a foil and some have none"):
        ov.attribute(model, write(tmp_path, ONE, {**ONE, "foil": None}))
    with pytest.raises(CircuitsError, match="level = 95"):
        ov.attribute(model, found, level=95.0)
    with pytest.raises(CircuitsError, match=r"give them to prompts\.load"):
        ov.attribute(model, found, n=3)


def test_without_foils_it_is_the_logit(tmp_path):
    model = ov.load()
    frame = ov.attribute(model, write(tmp_path, {**ONE, "foil": None}))
    trace = model.trace(ONE["prompt"])
    assert frame.attrs["quantity"] == "logit of the answer"
    right = float(trace.logits[-1, model.tokenizer.single(" States")])
    assert frame.attrs["difference"] == pytest.approx(right, rel=1e-5)


def test_several_answers_count_as_their_mean(tmp_path):
    model = ov.load()
    line = {**ONE, "answer": [" States", " Nations"] if model.tokenizer.find(" Nations") else [" States", " world"]}
    frame = ov.attribute(model, write(tmp_path, line))
    logits = model.trace(ONE["prompt"]).logits[-1].double()
    answers = [model.tokenizer.single(word) for word in line["answer"]]
    right = float(logits[answers].mean() - logits[model.tokenizer.single(" people")])
    assert frame.attrs["difference"] == pytest.approx(right, abs=1e-4)


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_what_the_library_computes(tmp_path):
    result = run_json("attribute", "--prompts", "repeated_tokens", "-n", "6", "--roles", "after_earlier")
    right = ov.attribute(ov.load(), "repeated_tokens", n=6, roles=["after_earlier"])
    assert [row["mean"] for row in result["rows"]] == pytest.approx(list(right["mean"]), abs=1e-5)
    assert result["roles"] == ["after_earlier"] and result["prompts"] == 6
    text = run("attribute", "-", "--prompts", "repeated_tokens", "-n", "6").stdout
    assert "repeated_tokens: 6 prompts" in text and "from after earlier" in text
    for suffix in ("csv", "parquet", "json"):
        run("attribute", "--prompts", write(tmp_path, ONE, ONE), "-o", tmp_path / f"out.{suffix}")
    stored = pd.read_parquet(tmp_path / "out.parquet")
    assert stored["mean"].sum() == pytest.approx(
        json.loads((tmp_path / "out.json").read_text())["difference"], abs=1e-5
    )
    assert len(pd.read_csv(tmp_path / "out.csv")) == len(stored)


@pytest.mark.parametrize(("arguments", "message"), [
    (["the people"], "--answer is missing: the token to account for, as in --answer ' States'"),
    (["--answer", " States"], "give a PROMPT and --answer"),
    (["the people", "--answer", " of", "-n", "3"], "-n goes with --prompts: here it would do nothing"),
    (["--prompts", "successors", "--answer", " of"], "--answer goes with one PROMPT"),
    (["-", "the people", "--prompts", "successors"], "leave one of them out"),
    (["--prompts", "sucessors"], "did you mean 'successors'"),
    (["--prompts", "successors", "--roles", "frist"], "did you mean 'first'"),
    (["--prompts", "ioi"], "no prompt of ioi fits embedded"),
])  # fmt: skip
def test_a_faulty_call_is_one_sentence(arguments, message):
    assert message in " ".join(run("attribute", *arguments, code=2).stderr.split())


def test_attention_weights_alone_cannot_be_asked(gpt2_small_attention, tmp_path):
    result = run("attribute", gpt2_small_attention, "--prompts", "ioi", "-o", tmp_path / "out.csv", code=2)
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())

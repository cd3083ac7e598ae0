"""Continuations against transformers' own greedy generation, and each step's account against the ledger of its prefix."""

from __future__ import annotations

import pytest
import torch
from conftest import hf_model
from test_cli import run, run_json
from test_trace import prompt_for

import ov_circuits as ov
from ov_circuits import CircuitsError


def test_greedy_tokens_are_those_of_transformers(running_folder):
    model = ov.load(running_folder)
    prompt = prompt_for(model, 5)
    found = ov.generate(model, prompt, 6)
    network = hf_model(running_folder)
    ids = torch.tensor([prompt])
    theirs = network.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6, pad_token_id=0
    )
    assert list(found.trace.tokens) == theirs[0].tolist()
    assert found.start == 5 and found.greedy and found.ended == (theirs.shape[1] < 11)


def test_a_steps_probabilities_and_account_are_those_of_its_prefix_alone(runnable_model):
    model = ov.load(runnable_model)
    prompt = prompt_for(model, 4)
    found = ov.generate(model, prompt, 4)
    network, tokens = hf_model(runnable_model), found.tokens()
    frame = found.frame()
    for number, step in enumerate(found.steps):
        prefix = list(found.trace.tokens[: found.start + number])
        with torch.no_grad():
            logits = network(torch.tensor([prefix])).logits[0, -1].double()
        chosen, runner_up = logits.topk(2).indices.tolist()
        assert (step.token, step.runner_up) == (chosen, runner_up)
        assert step.probability == pytest.approx(float(logits.softmax(-1)[chosen]), abs=1e-5)
        assert step.runner_up_probability == pytest.approx(float(logits.softmax(-1)[runner_up]), abs=1e-5)
        rows = frame[frame["step"] == number]
        scale = float(logits.abs().max())
        assert rows["value"].sum() == pytest.approx(float(logits[chosen] - logits[runner_up]), abs=1e-4 * scale)
        alone = model.trace(prefix).ledger(chosen, runner_up)
        assert (rows["value"].to_numpy() - alone["value"].to_numpy()) == pytest.approx(0, abs=1e-5 * scale)
        entries = rows[rows["component"] == "head"].groupby("head", sort=False)["value"].sum()
        heads = found.heads().query("step == @number").set_index("head")["value"]
        assert heads.to_numpy() == pytest.approx(entries[heads.index].to_numpy(), abs=1e-9)
        sizes = rows[rows["kind"] == "value_path"].assign(size=rows["value"].abs())
        largest = sizes.loc[sizes.groupby("head")["size"].idxmax()].set_index("head")["source"]
        sources = found.heads().query("step == @number").set_index("head")["source"]
        assert sources.tolist() == largest[sources.index].tolist()
    assert list(tokens["text"]) == list(found.trace.texts[found.start :]) and tokens["residual"].abs().max() < 1e-3


def test_a_given_continuation_is_accounted_for_against_what_is_likelier(stories260k):
    model = ov.load(stories260k)
    found = ov.generate(model, "Once upon a", continuation=" little girl")
    assert found.text == " little girl" and not found.greedy and not found.ended and found.trace.bos_added
    first = found.steps[0]
    assert first.runner_up_text == " time" and first.account.reading.actual < 0
    assert first.account.reading.facts["answer"] == first.token


def test_a_model_that_ends_the_text_stops(write_tiny):
    folder = write_tiny("gpt2", seed=3)
    model = ov.load(folder)
    likeliest = ov.generate(model, [1, 2], 1).steps[0].token
    network = hf_model(folder)
    network.config.eos_token_id = network.generation_config.eos_token_id = likeliest
    network.save_pretrained(folder)
    found = ov.generate(ov.load(folder), [1, 2], 5)
    assert len(found.steps) == 1 and found.ended


def test_a_continuation_may_fill_the_context(tiny_gpt2_char):
    found = ov.generate(ov.load(tiny_gpt2_char), [1] * 60, 4)
    assert len(found.trace) == 64 and len(found.steps) == 4 and not found.ended


@pytest.mark.parametrize(("call", "message"), [
    (lambda m: ov.generate(m, [1], 0), "at least one token"),
    (lambda m: ov.generate(m, [1] * 60, 5), "60 tokens of prompt and 5 more are beyond the 64"),
    (lambda m: ov.generate(m, [], 5), "prompt is empty"),
    (lambda m: ov.generate(m, [1], continuation=""), "continuation is empty"),
    (lambda m: ov.generate(ov.load(), "the people of the Uni", continuation="ted"), "joins the continuation"),
    (lambda m: ov.generate(m, [1], continuation=[97]), "outside the vocabulary"),
])  # fmt: skip
def test_faulty_requests_are_said_in_a_sentence(tiny_gpt2_char, call, message):
    with pytest.raises(CircuitsError, match=message):
        call(ov.load(tiny_gpt2_char))


def test_logits_of_the_last_position_alone_are_those_of_a_whole_trace(running_folder):
    model = ov.load(running_folder)
    prompts = [prompt_for(model, 7), prompt_for(model, 4)]
    for prompt, last in zip(prompts, model.trace(prompts, last_logits=True), strict=True):
        whole = model.trace(prompt)
        assert last.logits.shape == (1, model.architecture.n_vocab)
        assert (last.logits[0] - whole.logits[-1]).abs().max() <= 1e-5 * whole.logits.abs().max()
        pair = whole.logits[-1].topk(2).indices.tolist()
        difference = last.ledger(*pair)["value"] - whole.ledger(*pair)["value"]
        assert difference.abs().max() <= 1e-5 * whole.logits.abs().max()
        assert abs(last.ledger(*pair).attrs["residual"]) <= 1e-4 * whole.logits.abs().max()
        with pytest.raises(CircuitsError, match="logits of its last position only, not of 1"):
            last.ledger(*pair, position=1)


def test_the_command_prints_the_steps(stories260k):
    rows = run_json("generate", stories260k, "Once upon a", "-n", "3", "--json")["rows"]
    found = ov.generate(ov.load(stories260k), "Once upon a", 3)
    assert [row["value"] for row in rows] == pytest.approx(found.frame()["value"].tolist(), abs=1e-6)
    shown = run("generate", stories260k, "Once upon a", "-n", "3").stdout
    assert all(repr(step.text).replace(" ", "·") in shown for step in found.steps)

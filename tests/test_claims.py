"""Claims against numbers worked out from the definition, and against what is known of real models."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from test_ablation import logits_edited
from test_cli import run, run_json
from tiny_families import tiny

import ov_circuits as ov
from ov_circuits import CircuitsError, claims
from ov_circuits.claims import Applies, Composes, Copies, parse_claim


def by_name(finding):
    return {effect.name: effect for effect in finding.effects}


@pytest.fixture
def probes(monkeypatch):
    """The traces that a check was made on."""
    seen = []
    inner = claims._repeated

    def spy(*arguments):
        seen.extend(inner(*arguments))
        return seen

    monkeypatch.setattr(claims, "_repeated", spy)
    return seen


def norm(ref, x, scale_of, gain, bias):
    """A norm's rows of x at the scale of other rows, float64."""
    eps = ref.config.get("layer_norm_epsilon", ref.config.get("rms_norm_eps"))
    if bias is not None:
        x, scale_of = x - x.mean(-1, keepdim=True), scale_of - scale_of.mean(-1, keepdim=True)
    normed = x / (scale_of.square().mean(-1, keepdim=True) + eps).sqrt() * gain
    return normed if bias is None else normed + bias


@pytest.mark.parametrize("name", ["tiny-gpt2-char", "stories260k"])
def test_copying_is_the_attended_tokens_own_logit_over_the_mean(models_dir, reference, probes, name):
    folder = models_dir / name
    model, ref = ov.load(folder), reference(folder)
    layer, index = model.n_layers - 2, 1
    effects = by_name(ov.check(model, f"{layer}.{index} copies", prompts=2, others=1))
    gain, bias = ref.final_norm()
    no_bias = None if bias is None else 0 * bias  # the norm's bias is no head's
    columns = ref.W_U - ref.W_U.mean(1, keepdim=True)
    direct, attention, ablation = [], [], []
    for trace in probes:
        record, kv, n = trace.record.layers[layer], ref.kv_head(index), len(trace)
        moved = record.attention_input.double() @ ref.reader(layer, "V", kv) @ ref.W_O(layer, index)
        final, pattern = trace.record.final.double(), record.pattern[index].double()

        def zero(where, z, pattern, values):
            if where == layer:
                z[:, index] = 0
            return z

        without = logits_edited(folder, list(trace.tokens), zero)
        lost = trace.logits.double() - without
        lost = lost - lost.mean(-1, keepdim=True)
        for t in range(n - n // 2, n):
            lifts = [norm(ref, moved[s], final[t], gain, no_bias) @ columns[:, trace.tokens[s]] for s in range(t + 1)]
            direct.append(float(sum(pattern[t, s] * lifts[s] for s in range(1, t + 1))))
            attention.append(float(pattern[t, 1:].sum()))
            ablation.append(float(sum(pattern[t, s] * lost[t, trace.tokens[s]] for s in range(1, t + 1))))
    for effect, right in (("direct", direct), ("attention", attention), ("ablation", ablation)):
        assert effects[effect].value == pytest.approx(sum(right) / len(right), abs=1e-4), effect


def rotated(x, theta):
    """Rotary positions in Llama's layout: the two halves are the pairs' coordinates, pair i turns by t theta^(-2 i / d)."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x)).double()[:, None] * theta ** (-torch.arange(half).double() / half)
    turned = torch.complex(*x.split(half, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


def scores_of(ref, model, head, queries, keys, part=None):
    """A head's scores from what its queries and keys read, float64; the side that reads a ``part`` of it has no bias."""
    theta = model.architecture.rope_theta

    def project(x, role, which):
        bias = None if role == part else ref.bias(head.layer, role, which)
        out = x @ ref.reader(head.layer, role, which) + (0 if bias is None else bias)
        return out if theta is None else rotated(out, theta)

    return project(queries, "Q", head.index) @ project(keys, "K", ref.kv_head(head.index)).T / ref.d_head**0.5


def pattern_without(folder, tokens, sender, receiver):
    """The plain model's attention of one head when another one writes nothing."""
    seen = {}

    def edit(where, z, pattern, values):
        if where == sender.layer:
            z[:, sender.index] = 0
        if where == receiver.layer:
            seen["pattern"] = pattern[receiver.index].double()
        return z

    logits_edited(folder, tokens, edit)
    return seen["pattern"]


def pattern_of(scores):
    return scores.masked_fill(torch.ones(scores.shape, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)


@pytest.mark.parametrize(("name", "sender", "side", "receiver"), [
    ("tiny-gpt2-char", "0.1", "K", "1.2"),
    ("tiny-gpt2-char", "0.3", "Q", "1.2"),
    ("stories260k", "1.3", "K", "3.6"),
    ("stories260k", "0.2", "Q", "2.1"),
])  # fmt: skip
def test_path_patching_is_the_receivers_pattern_from_edited_keys_or_queries(
    models_dir, reference, probes, name, sender, side, receiver
):
    folder = models_dir / name
    model, ref = ov.load(folder), reference(folder)
    effects = by_name(ov.check(model, f"{sender} {side}-composes with {receiver}", prompts=2, others=1))
    head = model.head(receiver)
    layer = head.layer
    gain, bias = ref.norm(layer)
    lost, moved, entries, gone = [], [], [], []
    for trace in probes:
        stream, n = trace.record.layers[layer].stream.double(), len(trace)
        write = trace.write(sender).double()
        clean = norm(ref, stream, stream, gain, bias)
        edited = norm(ref, stream - write, stream, gain, bias)
        part = norm(ref, write, stream, gain, None if bias is None else 0 * bias)

        before = pattern_of(scores_of(ref, model, head, clean, clean))
        after = pattern_of(scores_of(ref, model, head, *((edited, clean) if side == "Q" else (clean, edited))))
        entry = scores_of(ref, model, head, *((part, clean) if side == "Q" else (clean, part)), part=side)
        ablated = pattern_without(folder, list(trace.tokens), model.head(sender), head)
        for t in range(n - n // 2, n):
            favourite = int(before[t, 1:].argmax()) + 1
            others = [s for s in range(1, t + 1) if s != favourite]
            lost.append(float(before[t, favourite] - after[t, favourite]))
            moved.append(float((before[t] - after[t]).abs().sum() / 2))
            entries.append(float(entry[t, favourite] - entry[t, others].mean()))
            gone.append(float(before[t, favourite] - ablated[t, favourite]))
    assert effects["score"].value == pytest.approx(sum(entries) / len(entries), abs=1e-4)
    assert effects["ablation"].value == pytest.approx(sum(gone) / len(gone), abs=1e-5)
    assert effects["path"].value == pytest.approx(sum(lost) / len(lost), abs=1e-5)
    assert effects["pattern"].value == pytest.approx(sum(moved) / len(moved), abs=1e-5)


def test_a_relation_is_measured_from_its_source_word_on_the_answers_of_others(stories260k, tmp_path, monkeypatch):
    model = ov.load(stories260k)
    words = [word for word in model.tokenizer._by_text if word.strip().isalpha() and word.startswith(" ")][:16]
    pairs = [(words[i].strip(), words[i + 1].strip()) for i in range(0, 16, 2)]
    file = tmp_path / "made_up.csv"
    file.write_text("# a relation\nsource,target\n" + "".join(f"{a},{b}\n" for a, b in pairs))
    asked, targets = [], {f" {b}": f" {a}" for a, b in pairs}
    inner = claims.logit_reading
    monkeypatch.setattr(
        claims, "logit_reading", lambda trace, weights: asked.append((trace, weights)) or inner(trace, weights)
    )
    effects = by_name(ov.check(model, Applies("3.1", str(file)), prompts=3, others=2))
    direct, attention = [], []
    for trace, weights in asked:
        target = max(weights, key=weights.get)
        source = max(p for p, text in enumerate(trace.texts) if text.strip().isalpha())
        assert trace.texts[source] == targets[model.tokenizer.text(target)]
        assert sum(weights.values()) == pytest.approx(0) and len(weights) == 8
        account = trace.ledger(weights)
        row = account[(account["head"] == "3.1") & (account["source"] == source)]
        direct.append(row["value"].item())
        attention.append(float(trace.pattern("3.1")[-1, source]))
    assert len(direct) == 3
    assert effects["direct"].value == pytest.approx(sum(direct) / 3, abs=1e-6)
    assert effects["attention"].value == pytest.approx(sum(attention) / 3, abs=1e-6)


# -- what is known ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("receiver", ["1.0", "1.1", "1.2", "1.3"])
def test_the_previous_token_head_composes_with_every_induction_head(tiny_gpt2_char, receiver):
    model = ov.load(tiny_gpt2_char)
    finding = ov.check(model, f"0.1 K-composes with {receiver}", prompts=8)
    effects = by_name(finding)
    assert finding.verdict == "supported" and finding.others == ("0.0", "0.2", "0.3") and finding.prompts == 8
    assert effects["path"].value > 0.3 and effects["path"].at_least_as_strong == 0
    assert effects["path"].difference_low > 0.2 and effects["ablation"].low > 0.2
    assert ov.check(model, f"0.2 K-composes with {receiver}", prompts=8).verdict == "not supported"


@pytest.mark.parametrize(("claim", "direct", "verdict", "reason"), [
    ("1.0 copies", (2.0, 0.5, 0.6), "supported", "other heads of its layer"),
    ("1.0 copies", (0.8, 0.7, 0.75), "not supported", "no more than other heads"),
    ("1.0 copies", (0.01, -2.0, -2.0), "not supported", "which is not above zero"),
    ("1.0 copies", (2.0, 3.0, -3.0), "supported", "other heads of its layer"),
    ("1.0 suppresses", (-2.0, -0.5, 0.6), "supported", "other heads of its layer"),
    ("1.0 suppresses", (2.0, 0.5, 0.6), "not supported", "which is not below zero"),
    ("1.0 suppresses", (-0.15, 2.0, 2.0), "not supported", "which is not below zero"),
    ("1.0 suppresses", (-2.0, -1.9, -1.9), "not supported", "no more than other heads"),
])  # fmt: skip
def test_a_verdict_is_that_of_intervals_by_hand(tiny_gpt2_char, monkeypatch, claim, direct, verdict, reason):
    """Numbers made up; intervals by a bootstrap of numpy's, prompts drawn for the head and the others together."""
    rng, n = np.random.default_rng(3), 14
    made = {name: rng.normal(size=(3, n)) for name in ("attention", "write", "ablation")}
    made["direct"] = np.array(direct)[:, None] + rng.normal(size=n) * 0.4 + 0.4 * rng.normal(size=(3, n))
    measured = {name: torch.tensor(numbers) for name, numbers in made.items()}
    monkeypatch.setattr(claims, "_measure_copying", lambda *_: (measured, dict.fromkeys(measured, "it"), ""))
    finding = ov.check(ov.load(tiny_gpt2_char), claim, prompts=n, others=2)
    assert finding.verdict == verdict and reason in finding.reason
    drawn = rng.integers(n, size=(20000, n))
    for effect in finding.effects:
        own, beyond = made[effect.name][0], made[effect.name][0] - made[effect.name][1:].mean(0)
        for values, found in ((own, (effect.value, effect.low, effect.high)),
                              (beyond, (effect.difference, effect.difference_low, effect.difference_high))):  # fmt: skip
            assert found[0] == pytest.approx(values.mean())
            # A quantile of 2,000 draws is uncertain by a tenth of the error of the mean.
            right = np.quantile(values[drawn].mean(1), (0.025, 0.975))
            np.testing.assert_allclose(found[1:], right, atol=0.3 * values.std() / n**0.5)
        sign = -1 if "suppresses" in claim and effect.name != "attention" else 1
        means = sign * made[effect.name].mean(1)
        assert effect.at_least_as_strong == sum(means[1:] >= means[0])
        if effect.decides and verdict == "supported":
            assert ("on average, 1 of 2 as strong" in finding.reason) == (effect.at_least_as_strong == 1)


@pytest.mark.parametrize("name", ["tiny-gpt2-char", "stories260k", "gpt-nano-sort"])
def test_claims_are_put_to_distinct_ordinary_tokens_after_bos(models_dir, name):
    """What may be drawn is read from the files: all ids, but for those that tokenizer.json calls special."""
    folder = models_dir / name
    config, file = json.loads((folder / "config.json").read_text()), folder / "tokenizer.json"
    added = json.loads(file.read_text())["added_tokens"] if file.is_file() else []
    special = {token["id"] for token in added if token["special"]}
    ordinary, bos = set(range(config["vocab_size"])) - special, config["bos_token_id"]
    traces = claims._repeated(ov.load(folder), 200, torch.Generator().manual_seed(0))
    half, drawn = min(12, (ov.load(folder).architecture.n_ctx - 1) // 2, len(ordinary) - 1), set()
    for trace in traces:
        first, segment, again = trace.tokens[0], trace.tokens[1 : 1 + half], trace.tokens[1 + half :]
        assert segment == again and len(set(segment)) == half and set(segment) <= ordinary
        assert first == bos if bos is not None else first in ordinary - set(segment)
        drawn.update(segment)
    assert len(drawn) >= 0.97 * len(ordinary)  # any of them may be: of 509, 2,400 draws leave out four or five


def test_induction_heads_copy_and_do_not_suppress(tiny_gpt2_char):
    model = ov.load(tiny_gpt2_char)
    copies = ov.check(model, "1.2 copies", prompts=8, among="model")
    assert copies.verdict == "supported" and by_name(copies)["direct"].low > 1
    suppresses = ov.check(model, "1.2 suppresses", prompts=8, among="model")
    assert suppresses.verdict == "not supported" and "not below zero" in suppresses.reason
    beside_its_kind = ov.check(model, "1.0 copies", prompts=8)
    assert (
        beside_its_kind.verdict == "not supported" and "no more than other heads of its layer" in beside_its_kind.reason
    )


def test_the_same_seed_gives_the_same_finding(tiny_gpt2_char):
    model = ov.load(tiny_gpt2_char)
    first, second = (ov.check(model, "1.2 copies", prompts=3, seed=5) for _ in range(2))
    assert first == second and first != ov.check(model, "1.2 copies", prompts=3, seed=6)
    frame = first.frame()
    assert (
        list(frame["name"]) == ["attention", "write", "direct", "ablation"] and frame.attrs["verdict"] == first.verdict
    )
    for effect in first.effects:
        assert effect.low <= effect.value <= effect.high
        assert effect.difference == pytest.approx(effect.value - effect.others, abs=1e-9)


def test_what_cannot_be_tested_says_why(tiny_gpt2_char):
    finding = ov.check(ov.load(tiny_gpt2_char), "1.2 applies country_capital")
    assert finding.verdict == "not testable" and "are single tokens" in finding.reason and finding.effects == ()
    assert len(finding.frame()) == 0


@pytest.mark.parametrize(("variant", "reason"), [
    ("gemma2", "caps its attention scores"),
    ("olmo-clipped", "clamps queries and keys"),
])  # fmt: skip
def test_scores_that_are_no_sum_of_what_was_written_are_not_taken_apart(tmp_path, variant, reason):
    tiny(variant).save_pretrained(tmp_path)
    finding = ov.check(ov.load(tmp_path), "0.0 K-composes with 1.0", prompts=2)
    assert finding.verdict == "not testable" and reason in finding.reason and finding.effects == ()


# -- claims as sentences ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "claim"), [
    ("1.4 copies", Copies("1.4")),
    (" L10H7 Suppresses.", Copies("L10H7", -1)),
    ("9.3 applies country_capital", Applies("9.3", "country_capital")),
    ("4.11 K-composes with 5.5", Composes("4.11", "K", "5.5")),
    ("4.11 q-composes  with 5.5", Composes("4.11", "Q", "5.5")),
])  # fmt: skip
def test_a_sentence_is_a_claim(text, claim):
    assert parse_claim(text) == claim
    assert parse_claim(str(claim)) == claim


@pytest.mark.parametrize(("claim", "message"), [
    ("1.4 flies", "is no claim"),
    ("4.11 V-composes with 5.5", "is no claim"),
    ("1.9 copies", "has no head 1.9"),
    ("1.0 applies captial", "no relation 'captial'"),
    ("1.0 K-composes with 1.1", "does not come after"),
    ("0.0 K-composes with 7.1", "has no head 7.1"),
])  # fmt: skip
def test_faulty_claims_are_said_in_a_sentence(tiny_gpt2_char, claim, message):
    with pytest.raises(CircuitsError, match=message):
        ov.check(ov.load(tiny_gpt2_char), claim)


def test_other_faulty_questions(tiny_gpt2_char, gpt2_small_attention, gpt_nano_sort):
    model = ov.load(tiny_gpt2_char)
    with pytest.raises(CircuitsError, match="choose layer or model"):
        ov.check(model, "1.0 copies", among="room")
    with pytest.raises(CircuitsError, match="whole number from 2"):
        ov.check(model, "1.0 copies", prompts=1)
    with pytest.raises(CircuitsError, match="cannot run a prompt"):
        ov.check(ov.load(gpt2_small_attention), "9.9 copies")
    with pytest.raises(CircuitsError, match="tokenizer"):
        ov.check(ov.load(gpt_nano_sort), "0.1 applies country_capital")


def test_the_command_gives_the_verdict(tiny_gpt2_char):
    arguments = ("check", tiny_gpt2_char, "0.1 K-composes with 1.0", "--prompts", "4")
    told = run_json(*arguments, "--json")
    finding = ov.check(ov.load(tiny_gpt2_char), "0.1 K-composes with 1.0", prompts=4)
    assert told["verdict"] == finding.verdict == "supported" and told["reason"] == finding.reason
    assert [row["value"] for row in told["rows"]] == pytest.approx([effect.value for effect in finding.effects])
    assert "0.1 K-composes with 1.0: supported" in run(*arguments).stdout

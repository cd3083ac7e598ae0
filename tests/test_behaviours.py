"""Behaviours of heads, against explicit loops over plain transformers' attention, TransformerLens, and heads built by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY_MODELS, hf_model
from test_cli import run, run_json
from tiny_families import tiny

import ov_circuits as ov
from ov_circuits.errors import CircuitsError
from ov_circuits.trace import behaviours as module
from ov_circuits.trace.behaviours import BEHAVIOURS, _Probe

ATTENTION = tuple(key for key in BEHAVIOURS if key != "random_copying")


@pytest.fixture
def folder_of(models_dir, tiny_folders):
    """A checkpoint's folder by name, real or tiny random."""
    return lambda name: tiny_folders(name) if name in TINY_MODELS else models_dir / name


def rows_of(model: ov.Model, seeds: tuple[int, ...], length: int | None = None, rows: int = 2) -> list[Any]:
    """The very prompts that a call runs."""
    probe = _Probe.of(model, seeds, length, rows)
    return list(probe.prompts([key for key in BEHAVIOURS if probe.why_not(key) is None]))


def attention(network: Any, tokens: tuple[int, ...]) -> np.ndarray:
    """[layer, head, destination, source] of plain transformers."""
    with torch.no_grad():
        out = network(torch.tensor([tokens]), output_attentions=True)
    return torch.stack(out.attentions)[:, 0].double().numpy()


def targets_by_tokens(model: ov.Model, key: str, tokens: tuple[int, ...], delimited: bool) -> dict[int, list[int]]:
    """Destination -> where it is to attend, found from the tokens alone."""
    found: dict[int, list[int]] = {}
    if delimited != (key == "delimiter"):
        return found
    if delimited:
        is_delimiter = [i > 0 and model.tokenizer.text(token) in ".,;:!?()[]\n" for i, token in enumerate(tokens)]
        half = range(len(tokens) // 2, len(tokens))
        return {t: [s for s in range(t) if is_delimiter[s]] for t in half if not is_delimiter[t]}
    for t, token in enumerate(tokens):
        if token in tokens[1:t]:  # the second copy; what comes first may be a random token
            earlier = tokens.index(token, 1)
            at = {"induction": earlier + 1, "duplicate_token": earlier, "previous_token": t - 1, "first_token": 0,
                  "self_attention": t}[key]  # fmt: skip
            found[t] = [at]
    return found


@pytest.mark.parametrize("folder", ["tiny-gpt2-char", "stories260k", "llama-grouped", "gpt2-untied"])
def test_every_behaviour_is_a_mean_over_second_copies_of_plain_transformers_attention(folder, folder_of, monkeypatch):
    path = folder_of(folder)
    model, network = ov.load(path), hf_model(path, attn_implementation="eager")
    monkeypatch.setattr(module, "_BATCH_NUMBERS", 1)
    alone = ov.behaviours(model, seeds=[3, 5], rows=2)
    monkeypatch.undo()
    frame = ov.behaviours(model, seeds=[3, 5], rows=2)
    np.testing.assert_allclose(
        alone.drop(columns="head").to_numpy(float), frame.drop(columns="head").to_numpy(float), atol=1e-5, rtol=1e-3
    )
    rows = rows_of(model, (3, 5))
    keys = [key for key in ATTENTION if key not in frame.attrs["left_out"]]
    assert set(keys) >= {"induction", "duplicate_token", "previous_token", "first_token", "self_attention"}
    patterns = [attention(network, row.tokens) for row in rows]
    for key in keys:
        by_seed: dict[int, list[np.ndarray]] = {0: [], 1: []}
        null, variance = [], []
        for row, pattern in zip(rows, patterns, strict=True):
            for t, sources in targets_by_tokens(model, key, row.tokens, "delimiter" in row.targets).items():
                seen = pattern[:, :, t, : t + 1]
                by_seed[row.seed].append(sum(seen[:, :, s] for s in sources))
                m, n = len(sources), t + 1
                null.append(m / n)
                variance.append(m * (n - m) / (n - 1) * seen.var(-1))
        every = np.array(by_seed[0] + by_seed[1])
        right = every.mean(0).flatten()
        spread = np.std([np.mean(values, 0) for values in by_seed.values()], axis=0, ddof=1).flatten()
        np.testing.assert_allclose(frame[key], right, atol=1e-6)
        np.testing.assert_allclose(frame[f"{key}_spread"], spread, atol=1e-6)
        np.testing.assert_allclose(frame[f"{key}_null_mean"], np.mean(null), rtol=1e-5)
        std = np.sqrt(np.sum(variance, 0)).flatten() / len(every)
        np.testing.assert_allclose(frame[f"{key}_z"], (right - np.mean(null)) / std, rtol=1e-3, atol=1e-3)


def test_the_null_is_attention_in_a_random_order(tiny_gpt2_char):
    model = ov.load(tiny_gpt2_char)
    network, rng = hf_model(tiny_gpt2_char, attn_implementation="eager"), np.random.default_rng(0)
    (row,) = [row for row in rows_of(model, (0,), rows=1) if "induction" in row.targets]
    pattern = attention(network, row.tokens)[1, 1]
    queries = np.flatnonzero(row.queries.numpy())
    target = {t: int(row.targets["induction"][t].nonzero()) for t in queries}
    draws = [np.mean([rng.permutation(pattern[t, : t + 1])[target[t]] for t in queries]) for _ in range(4000)]
    frame = ov.behaviours(model, "induction", seeds=1, rows=1).set_index("head").loc["1.1"]
    std = (frame["induction"] - frame["induction_null_mean"]) / frame["induction_z"]
    assert np.mean(draws) == pytest.approx(frame["induction_null_mean"], abs=4 * std / math.sqrt(4000))
    assert np.std(draws) == pytest.approx(std, rel=0.06)


@pytest.mark.parametrize("folder", ["tiny-gpt2-char", "llama-wide-heads", "gpt2-tied"])
def test_random_copying_is_the_share_of_raised_logits_on_attended_tokens(folder, folder_of):
    model = ov.load(folder_of(folder))
    frame = ov.behaviours(model, "random_copying", seeds=[4], rows=2).set_index("head")
    rows = [row for row in rows_of(model, (4,)) if row.segment]
    gain, W_U = model.source.final_gain.double(), model.source.unembedding.double()
    for head in model.heads():
        own = total = chance = 0.0
        by_source: dict[tuple[int, int], torch.Tensor] = {}
        for number, row in enumerate(rows):
            m, trace = row.segment, model.trace(list(row.tokens))
            writes, final = trace.head_writes(head).double(), trace.record.final.double()
            for t in range(1, m + 1):
                x = final[t] - final[t].mean() if model.architecture.norm == "LayerNorm" else final[t]
                sigma = (x.square().mean() + model.architecture.norm_eps).sqrt()
                for s in range(1, t + 1):
                    c = writes[s, t] - writes[s, t].mean() if model.architecture.norm == "LayerNorm" else writes[s, t]
                    logits = (c / sigma * gain) @ W_U[:, list(row.tokens[1 : m + 1])]
                    raised = (logits - logits.mean()).clamp(min=0)
                    own, total = own + float(raised[s - 1]), total + float(raised.sum())
                    chance += float(raised.sum()) / m
                    by_source[number, s] = by_source.get((number, s), 0) + raised
        assert frame.loc[head.label, "random_copying"] == pytest.approx(2 * own / total - 1, abs=1e-4)
        assert frame.loc[head.label, "random_copying_null_mean"] == pytest.approx(2 * chance / total - 1, abs=1e-4)
        # The null: each source holds any token of its segment, the same one wherever it is attended from.
        std = 2 * sum(float(raised.var(correction=0)) for raised in by_source.values()) ** 0.5 / total
        assert frame.loc[head.label, "random_copying_z"] == pytest.approx(
            2 * (own - chance) / total / std, rel=1e-3, abs=1e-3
        )


@pytest.mark.parametrize("variant", ["gemma2", "olmo2", "cohere", "granite", "falcon-grouped"])
def test_random_copying_of_other_families_is_their_ledgers(variant):
    """Post-norms, norms without gain, logit scales and softcaps: the ledger has them, entry by entry."""
    model = ov.load(tiny(variant))
    frame = ov.behaviours(model, "random_copying", seeds=[4], rows=1, length=5).set_index("head")
    (row,) = [row for row in rows_of(model, (4,), length=5, rows=1) if row.segment]
    segment, trace = row.tokens[1 : row.segment + 1], model.trace(list(row.tokens))
    moved: dict[tuple[str, int, int], list[float]] = {}
    for t in range(1, len(segment) + 1):
        for token in segment:
            ledger = trace.ledger(token, position=t)
            paths = ledger[ledger["kind"] == "value_path"]
            for head, s, value in zip(paths["head"], paths["source"], paths["value"], strict=True):
                moved.setdefault((head, t, int(s)), []).append(value)
    for head in model.head_labels:
        own = total = 0.0
        for (label, _, s), values in moved.items():
            if label == head and s > 0:
                raised = (np.array(values) - np.mean(values)).clip(min=0)
                own, total = own + raised[s - 1], total + raised.sum()
        assert frame.loc[head, "random_copying"] == pytest.approx(2 * own / total - 1, abs=1e-4)


def test_transformer_lens_finds_the_same_heads(tiny_gpt2_char):
    """Its detector divides by all of a prompt's attention, ours by that of the second copy; the sums are the same."""
    from transformer_lens.head_detector import detect_head

    model, network = ov.load(tiny_gpt2_char), hf_model(tiny_gpt2_char, attn_implementation="eager")
    frame = ov.behaviours(model, ["induction", "duplicate_token"], seeds=[7], rows=1)
    (row,) = [row for row in rows_of(model, (7,), rows=1) if "induction" in row.targets]
    pattern = torch.tensor(attention(network, row.tokens), dtype=torch.float32)
    a = model.architecture
    shell = SimpleNamespace(
        cfg=SimpleNamespace(device="cpu", n_layers=a.n_layers, n_heads=a.n_heads, n_ctx=a.n_ctx, dtype=torch.float32),
        to_tokens=lambda _: torch.tensor([row.tokens]),
    )
    cache = {("pattern", layer, "attn"): pattern[layer] for layer in range(a.n_layers)}
    share = float(row.queries.sum()) / len(row.tokens)
    for key, name in (("induction", "induction_head"), ("duplicate_token", "duplicate_token_head")):
        theirs = detect_head(shell, "", name, cache=cache).flatten().numpy()
        np.testing.assert_allclose(frame[key] * share, theirs, atol=1e-6)


# -- two ways to predict repeats --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fixed_offset(tmp_path_factory):
    """A GPT-2 whose head 0.0 attends eleven positions back and copies: perfect on repeats of period 12, and no induction."""
    from transformers import GPT2Config, GPT2LMHeadModel

    n, offset = 64, 11
    network = GPT2LMHeadModel(
        GPT2Config(
            n_embd=2 * n,
            n_head=2,
            n_layer=1,
            n_positions=n,
            vocab_size=n,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.fill_(1.0 if "ln_" in name and name.endswith("weight") else 0.0)
        network.transformer.wte.weight[:, n:] = torch.eye(n)
        network.transformer.wpe.weight[:, :n] = torch.eye(n)
        attn, one = network.transformer.h[0].attn, torch.eye(n)
        attn.c_attn.weight[:n, :n] = 4 * torch.roll(one, -offset, dims=1)  # query of t: key of t - 11
        attn.c_attn.weight[:n, 2 * n : 3 * n] = one
        attn.c_attn.weight[n:, 4 * n : 5 * n] = one
        attn.c_proj.weight[:n, n:] = 8 * one
        network.lm_head.weight[:, n:] = 4 * one
    folder = tmp_path_factory.mktemp("offset")
    network.eval().save_pretrained(folder)
    return folder


def test_a_head_at_a_fixed_offset_predicts_periodic_repeats_and_is_no_induction_head(fixed_offset, tiny_gpt2_char):
    network = hf_model(fixed_offset, attn_implementation="eager")
    segment = (torch.randperm(63, generator=torch.Generator().manual_seed(0))[:12] + 1).tolist()
    tokens = [0, *segment, *segment]
    with torch.no_grad():
        logits = network(torch.tensor([tokens])).logits[0]
    loss = torch.nn.functional.cross_entropy(logits[12:-1], torch.tensor(tokens[13:]))
    assert loss < 0.01  # it falls to nothing ..
    pattern = attention(network, tuple(tokens))[0, 0]
    assert np.mean([pattern[t, t - 11] for t in range(13, 25)]) > 0.99  # .. and at one period the usual score is full
    ours = ov.behaviours(ov.load(fixed_offset), ["induction"], length=24).set_index("head")["induction"]
    assert ours["0.0"] < 0.15
    real = ov.behaviours(ov.load(tiny_gpt2_char), ["induction"], length=24).set_index("head")["induction"]
    assert real["1.1"] > 0.7


@pytest.mark.parametrize("size", [0, 3e-4])  # scores of zero, and of a ten-millionth: no more than float32's rounding
def test_attention_that_goes_everywhere_is_chance(tmp_path, write_tiny, size):
    from safetensors.torch import load_file, save_file

    folder = write_tiny("gpt2", seed=3)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if "c_attn" in name:
            width = tensors[name].shape[-1] // 3
            tensors[name][..., : 2 * width] *= size
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    frame = ov.behaviours(ov.load(folder), seeds=2)
    for key in ATTENTION[:-1]:
        np.testing.assert_allclose(frame[key], frame[f"{key}_null_mean"], atol=1e-6)
        assert frame[f"{key}_z"].isna().all()  # no order of it is another


# -- real models ------------------------------------------------------------------------------------------------------


def test_the_real_character_model_has_its_induction_circuit(tiny_gpt2_char):
    frame = ov.behaviours(ov.load(tiny_gpt2_char)).set_index("head")
    assert frame["previous_token"].idxmax() == "0.1"
    assert frame.loc["0.1", "previous_token"] > 0.9
    induction = {"1.0", "1.1", "1.2", "1.3"}
    assert set(frame.index[frame["induction"] > 0.7]) == induction
    assert (frame.loc[~frame.index.isin(induction), "induction"] < 0.01).all()
    assert set(frame["random_copying"].nlargest(4).index) == induction


def test_stories260k_has_previous_token_heads_and_no_induction(stories260k):
    frame = ov.behaviours(ov.load(stories260k)).set_index("head")
    assert list(frame["previous_token"].nlargest(2).index) == ["3.6", "1.3"]
    assert frame["induction"].max() < 0.06


def test_the_embedded_model_reads_as_its_card_says():
    frame = ov.behaviours(ov.load()).set_index("head")
    assert set(frame.index[frame["induction"] > 0.9]) == {"1.0", "1.1", "1.2"}
    assert set(frame.index[frame["previous_token"] > 0.9]) == {"0.0", "0.1"}
    assert frame["duplicate_token"].max() < 0.05
    assert set(frame["random_copying"].nlargest(3).index) == {"1.0", "1.1", "1.2"}


@pytest.mark.slow
@pytest.mark.network
def test_smollm2s_heads(smollm2):
    names = ["induction", "previous_token", "random_copying"]
    frame = ov.behaviours(smollm2, names, seeds=4).set_index("head")
    assert frame["induction"].idxmax() == "18.6"
    assert {"18.6", "17.3", "17.4", "18.7", "23.2"} <= set(frame["induction"].nlargest(6).index)
    assert list(frame["previous_token"].nlargest(2).index) == ["16.0", "11.1"]
    # Two heads raise the logit of what they attend to least of all; the strongest induction head copies no more than many others.
    assert set(frame["random_copying"].nsmallest(2).index) == {"23.3", "24.4"}
    assert frame["random_copying"].rank(ascending=False)["18.6"] > 25


def test_a_model_that_cannot_repeat_says_so(gpt_nano_sort):
    frame = ov.behaviours(ov.load(gpt_nano_sort))
    assert set(frame.attrs["left_out"]) == {"induction", "duplicate_token", "random_copying", "delimiter"}
    assert "3 ordinary tokens and 11 positions" in frame.attrs["left_out"]["induction"]
    assert "induction" not in frame
    network = hf_model(gpt_nano_sort, attn_implementation="eager")
    rows = list(_Probe.of(ov.load(gpt_nano_sort), tuple(range(8)), None, 4).prompts(["previous_token"]))
    right = np.mean([attention(network, row.tokens)[:, :, t, t - 1] for row in rows for t in range(6, 11)], 0)
    np.testing.assert_allclose(frame["previous_token"], right.flatten(), atol=1e-6)


def test_what_one_behaviour_reads_does_not_depend_on_the_others(stories260k):
    model = ov.load(stories260k)
    together = ov.behaviours(model, seeds=2)
    for key in BEHAVIOURS:
        alone = ov.behaviours(model, key, seeds=2)
        np.testing.assert_allclose(alone[key], together[key], atol=1e-5)


def test_probes_have_no_special_token_and_no_token_twice(stories260k):
    model = ov.load(stories260k)
    for row in rows_of(model, (0, 1), rows=8):
        assert row.tokens[0] == model.tokenizer.bos_id
        assert not {0, 1, 2} & set(row.tokens[1:])
        if row.segment:
            first, second = row.tokens[1 : row.segment + 1], row.tokens[row.segment + 1 :]
            assert first == second and len(set(first)) == row.segment
    periods = [row.segment for row in rows_of(model, (0,), rows=20) if row.segment]
    assert len(set(periods)) == 20  # none comes again before all have been


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"names": "inductoin"}, "did you mean 'induction'"),
        ({"seeds": 0}, "number of seeds"),
        ({"seeds": [-1]}, "whole number from 0"),
        ({"length": 40}, r"periods of 4 to 31 tokens \(64 positions"),
        ({"length": 3}, "periods of 4 to 31"),
        ({"rows": 0}, "rows is a whole number from 1"),
    ],
)
def test_faulty_questions_are_said_in_a_sentence(tiny_gpt2_char, arguments, message):
    with pytest.raises(CircuitsError, match=message):
        ov.behaviours(ov.load(tiny_gpt2_char), **arguments)


def test_a_behaviour_that_is_named_and_cannot_be_had_is_an_error(gpt_nano_sort, gpt2_small_attention):
    with pytest.raises(CircuitsError, match="cannot be asked for induction: it takes 4 distinct tokens"):
        ov.behaviours(ov.load(gpt_nano_sort), "induction")
    with pytest.raises(CircuitsError, match="cannot run a prompt"):
        ov.behaviours(ov.load(gpt2_small_attention))


# -- beside the scores ------------------------------------------------------------------------------------------------


def test_the_scoreboard_has_behaviours_beside_the_scores(tiny_gpt2_char):
    model = ov.load(tiny_gpt2_char)
    plain, both = ov.scoreboard(model), ov.scoreboard(model, behaviours=True)
    seen = ov.behaviours(model)
    for column in plain.columns:
        assert (both[column] == plain[column]).all() or both[column].equals(plain[column])
    for column in seen.columns[3:]:
        np.testing.assert_array_equal(both[column], seen[column])
    assert both.attrs["sources"]["induction"].startswith("prefix matching")
    assert set(both.attrs["nulls"]) >= {"induction", "eigen_copying_full"}
    named = ov.scoreboard(model, ["eigen_copying_full", "induction"], nulls=False, tokens=0)
    assert list(named.columns[4:]) == ["eigen_copying_full", "induction", "induction_spread"]
    with pytest.raises(CircuitsError, match="did you mean 'induction'"):
        ov.scoreboard(model, ["inductio"])


def test_heads_are_sorted_by_a_behaviour(tiny_gpt2_char, gpt2_small_attention):
    rows = run_json("heads", tiny_gpt2_char, "--scores", "eigen_copying_full", "--sort", "induction")["rows"]
    values = [row["induction"] for row in rows]
    assert values == sorted(values, reverse=True)
    assert rows[0]["head"].startswith("1.") and "eigen_copying_full_z" in rows[0]
    assert run_json("heads", tiny_gpt2_char, "--sort", "induction")["rows"][0]["head"] == rows[0]["head"]
    assert "cannot run a prompt" in run("heads", gpt2_small_attention, "--scores", "induction", code=2).stderr


def test_the_command_prints_what_the_library_computes(tiny_gpt2_char, gpt_nano_sort, tmp_path):
    result = run_json(
        "behaviours", tiny_gpt2_char, "--seeds", "2", "--length", "20", "--sort", "induction", "--top", "3"
    )
    right = ov.behaviours(ov.load(tiny_gpt2_char), seeds=2, length=20).sort_values("induction", ascending=False)
    assert [row["head"] for row in result["rows"]] == list(right["head"][:3])
    assert result["rows"][0]["induction_z"] == pytest.approx(right["induction_z"].iloc[0])
    assert "induction" in run("behaviours", tiny_gpt2_char, "--seeds", "1").stdout
    run("behaviours", gpt_nano_sort, "-o", tmp_path / "b.csv")
    assert len((tmp_path / "b.csv").read_text().splitlines()) == 10
    assert "no induction: it takes" in run("behaviours", gpt_nano_sort).stderr
    assert "did you mean" in run("behaviours", tiny_gpt2_char, "--sort", "inducton", code=2).stderr

"""A scan against a computation of the whole corpus at once: plain transformers in float64, every write formed, nothing sampled."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import captured, hf_model, listed
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_families import BASES, tiny
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

import ov_circuits as ov
from ov_circuits import CircuitsError
from ov_circuits.checkpoint.norms import Norm
from ov_circuits.cli import app
from ov_circuits.report.examples import examples_payload
from ov_circuits.report.tables import write_frame
from ov_circuits.trace import scan as scanning
from ov_circuits.trace.corpus import open_corpus
from ov_circuits.trace.engines import Edits
from ov_circuits.trace.scan import SOURCE_KINDS, Settings

ROOT = Path(__file__).resolve().parents[1]
EVERYTHING = Settings(examples=6, per_decile=3, sample=10**6, loss_sample=10**6)


def documents(n_vocab, lengths=(40, 1, 7, 23, 2), seed=5):
    """Random ids in which tokens recur, so that every kind of source occurs."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(min(n_vocab, 9), (n,), generator=generator).tolist() for n in lengths]


# -- the oracle -------------------------------------------------------------------------------------------------------


def windows_by_definition(docs, length, stride, bos):
    """(document, start, ids, [(index of ids, next token)]): each position that has a next token, in the first window with it."""
    for number, doc in enumerate(docs):
        seen = set()
        for start in range(0, len(doc), stride):
            inside = range(start, min(start + length, len(doc) - 1))
            new = [p for p in inside if p not in seen]
            if new:
                front = [] if bos is None else [bos]
                ids = front + [doc[p] for p in inside]
                yield number, start, ids, [(p - start + len(front), doc[p + 1]) for p in new]
            seen |= set(inside)


def kind_by_definition(ids, t, s, is_punctuation):
    if s == 0:
        return "first"
    if s == t:
        return "self"
    if s == t - 1:
        return "previous"
    if ids[s] == ids[t]:
        return "same_token"
    if ids[s - 1] == ids[t]:
        return "after_same_token"
    return "punctuation" if is_punctuation(ids[s]) else "other"


def brute_force(ref, windows, is_punctuation=lambda token: False):
    """Every head at every counted position, one at a time: a frame of positions, and one of (destination, source) pairs."""
    network = hf_model(ref.folder, attn_implementation="eager").double()
    final_norm = network.transformer.ln_f if ref.is_gpt2 else network.model.norm
    rows, pairs, losses = [], [], []
    for number, start, ids, counted in windows:
        with ExitStack() as stack:
            end = stack.enter_context(captured(final_norm))
            layers = [
                [stack.enter_context(captured(module)) for module in parts] for parts in attention_parts(ref, network)
            ]
            with torch.no_grad():
                result = network(torch.tensor([ids]), output_attentions=True)
        final, logits = end["args"][0][0], result.logits[0]
        for layer, head in product(range(ref.n_layers), range(ref.n_heads)):
            x, z = layers[layer][0]["output"][0], layers[layer][1]["args"][0][0]
            W_O = ref.W_O(layer, head)
            writes = z[:, [head * ref.d_head + i for i in range(ref.d_head)]] @ W_O
            moved = x @ ref.reader(layer, "V", ref.kv_head(head)) @ W_O
            pattern = result.attentions[layer][0, head]
            for t, following in counted:
                onto_logits = final_norm_at(ref, network, final[t])
                delta, target, A = onto_logits(writes[t]), torch.tensor(following), pattern[t, : t + 1]
                loss = cross_entropy(logits[t], target)
                share = torch.ones((), dtype=torch.float64, requires_grad=True)
                cross_entropy(logits[t] - (1 - share) * delta, target).backward()
                sizes = A * moved[: t + 1].norm(dim=-1)
                parts = A * onto_logits(moved[: t + 1])[:, following]
                toward = (parts if delta[following] >= 0 else -parts).argmax()
                rows.append(
                    {
                        "head": f"{layer}.{head}",
                        "document": number,
                        "window": start,
                        "index": t,
                        "next": following,
                        "write": float(writes[t].norm()),
                        "logit": float(delta[following]),
                        "saved": float(cross_entropy(logits[t] - delta, target) - loss),
                        "linear": -float(share.grad),
                        "entropy": -sum(float(a) * math.log(a) for a in A if a > 0),
                        "sources": {"write": int(sizes.argmax()), "logit": int(toward)},
                        "parts": {"write": sizes.tolist(), "logit": parts.tolist()},
                        "attention": A.tolist(),
                    }
                )
                losses.append(float(loss))
                for s in range(t + 1):
                    kind = kind_by_definition(ids, t, s, is_punctuation)
                    pairs.append((f"{layer}.{head}", kind, t - s, float(A[s]), float(sizes[s])))
    return SimpleNamespace(
        rows=pd.DataFrame(rows),
        pairs=pd.DataFrame(pairs, columns=["head", "kind", "distance", "attention", "moved"]),
        loss=float(np.mean(losses)),
    )


def attention_parts(ref, network):
    """Of each layer: the norm that its attention reads through, and its output projection."""
    if ref.is_gpt2:
        return [(block.ln_1, block.attn.c_proj) for block in network.transformer.h]
    return [(block.input_layernorm, block.self_attn.o_proj) for block in network.model.layers]


def final_norm_at(ref, network, stream):
    """What a part of this stream adds to the logits, the norm's scale held at the stream's own."""
    gain, bias = ref.final_norm()
    eps = network.config.layer_norm_epsilon if ref.is_gpt2 else network.config.rms_norm_eps
    centre = ref.centre if bias is not None else torch.eye(ref.d_model, dtype=torch.float64)
    sigma = ((stream @ centre).square().mean() + eps).sqrt()
    return lambda part: (part @ centre / sigma * gain) @ ref.W_U


# -- against the oracle -----------------------------------------------------------------------------------------------

# Folder of a tiny or real model, window, stride (None: windows side by side), BOS.
CASES = [
    ("gpt2-untied", 12, None, True),
    ("gpt2-scaled-by-layer", 9, 5, False),
    ("llama-grouped", 8, None, False),
    ("llama-wide-heads", 10, 4, False),
    ("stories260k", 12, 6, True),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case[0])
def scanned(request, tiny_folders, models_dir, reference):
    """A scan in which every position is in the sample, and the oracle's account of the same corpus."""
    name, window, stride, bos = request.param
    folder = models_dir / name if (models_dir / name).exists() else tiny_folders(name)
    model, ref = ov.load(folder), reference(folder)
    docs = documents(model.architecture.n_vocab)
    found = ov.scan(model, docs, window=window, stride=stride, bos=bos, settings=EVERYTHING)
    bos_id = ref.config["bos_token_id"] if bos else None
    length = window - bos
    windows = list(windows_by_definition(docs, length, stride or length, bos_id))

    def is_punctuation(token):
        return model.has_tokenizer and not any(c.isalnum() for c in model.tokenizer.text(token))

    return SimpleNamespace(scan=found, right=brute_force(ref, windows, is_punctuation), bos=bos, docs=docs, model=model)


def column(frame, name):
    return torch.tensor(frame[name].to_numpy(dtype=float))


def by_head(scanned, frame, work):
    """``work`` on each head's rows, in the scan's order of heads."""
    groups = dict(list(frame.groupby("head", sort=False)))
    return torch.tensor([work(groups[head]) for head in scanned.scan.heads["head"]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("write", "write"),
        ("logit", "logit"),
        ("loss_saved", "saved"),
        ("loss_saved_linear", "linear"),
        ("entropy", "entropy"),
    ],
)
def test_a_heads_means_are_those_of_all_positions(scanned, assert_close, name, theirs):
    ours = column(scanned.scan.heads, name)
    assert_close(ours, by_head(scanned, scanned.right.rows, lambda rows: rows[theirs].mean()), 1e-4)


def test_a_sample_of_all_positions_has_no_error(scanned):
    assert (scanned.scan.heads["loss_saved_se"] == 0).all()
    assert scanned.scan.facts["positions"] == len(scanned.right.rows) / len(scanned.scan.heads)
    assert scanned.scan.facts["loss"] == pytest.approx(scanned.right.loss, rel=1e-5)


@pytest.mark.parametrize(("prefix", "weight"), [("attention", "attention"), ("write", "moved")])
def test_shares_by_kind_of_source(scanned, assert_close, prefix, weight):
    total = by_head(scanned, scanned.right.pairs, lambda pairs: pairs[weight].sum())
    sums = []
    for kind in SOURCE_KINDS:
        right = by_head(scanned, scanned.right.pairs, lambda p, k=kind: p[weight][p["kind"] == k].sum()) / total
        sums.append(column(scanned.scan.heads, f"{prefix}_{kind}"))
        assert float((sums[-1] - right).abs().max()) <= 1e-5, kind
    assert_close(sum(sums), torch.ones(len(sums[0])), 1e-6)
    found = [k for k in SOURCE_KINDS if k != "punctuation"]  # only a model with a tokenizer has that
    assert all(column(scanned.scan.heads, f"attention_{kind}").max() > 0 for kind in found)


def test_mean_distance_leaves_the_first_token_out(scanned, assert_close):
    pairs = scanned.right.pairs[scanned.right.pairs["kind"] != "first"]
    right = by_head(scanned, pairs, lambda p: (p["attention"] * p["distance"]).sum() / p["attention"].sum())
    assert_close(column(scanned.scan.heads, "distance"), right, 1e-4)


def test_distributions_of_distance_and_entropy(scanned):
    pairs, rows = scanned.right.pairs, scanned.right.rows
    for head, frame in scanned.scan.distributions.groupby("head", sort=False):
        mine = pairs[pairs["head"] == head]
        for row in frame[frame["of"] == "distance"].itertuples():
            inside = (mine["kind"] != "first") & mine["distance"].between(row.low, row.high)
            inside = mine["kind"] == "first" if row.bin == "first token" else inside
            right = mine["attention"][inside].sum() / mine["attention"].sum()
            assert row.share == pytest.approx(right, abs=1e-5), (head, row.bin)
        entropies = rows["entropy"][rows["head"] == head].to_numpy()
        assert np.abs(entropies / 0.5 - np.round(entropies / 0.5))[entropies > 1e-6].min() > 1e-6  # none on an edge
        for row in frame[frame["of"] == "entropy"].itertuples():
            inside = ((entropies >= row.low) | (row.low == 0)) & (entropies < row.high)
            assert row.share == pytest.approx(inside.mean(), abs=1e-9), (head, row.bin)
        for _, part in frame.groupby("of"):
            assert part["share"].sum() == pytest.approx(1, abs=1e-6)


def at(scanned, example):
    """The oracle's row of an example, and where its source is among the window's ids."""
    rows = scanned.right.rows
    rows = rows[(rows["head"] == example.head) & (rows["document"] == example.document)]
    position = rows["window"] + rows["index"] - scanned.bos
    (row,) = rows[position == example.position].itertuples()
    source = 0 if pd.isna(example.source_position) else int(example.source_position) - row.window + scanned.bos
    return row, source


def test_examples_say_what_the_model_does_there(scanned):
    scales = scanned.right.rows.groupby("head")[["write", "logit"]].agg(lambda values: values.abs().max())
    for example in scanned.scan.examples.itertuples():
        row, source = at(scanned, example)
        close = 1e-4 * scales.loc[example.head, example.measure]
        assert example.value == pytest.approx(getattr(row, example.measure), abs=close)
        assert example.attention == pytest.approx(row.attention[source], abs=1e-4)
        assert example.part == pytest.approx(row.parts[example.measure][source], abs=close)
        best = row.parts[example.measure][row.sources[example.measure]]
        assert example.part == pytest.approx(best, abs=close), "another source has a larger part"


ATTENDED = ["attended_position", "attended", "attended_attention", "attended_part"]


def test_examples_carry_the_sources_they_attend_to_most(scanned):
    texts = scanned.model.tokenizer.text if scanned.model.has_tokenizer else "⟨id {}⟩".format
    scales = scanned.right.rows.groupby("head")[["write", "logit"]].agg(lambda values: values.abs().max())
    short, parts = 0, set()
    for example in scanned.scan.examples.itertuples():
        row, _ = at(scanned, example)
        close = 1e-4 * scales.loc[example.head, example.measure]
        shown = list(zip(*(getattr(example, name) for name in ATTENDED), strict=True))
        sources = [0 if position is None else position - row.window + scanned.bos for position, *_ in shown]
        most, least = (min(5, sum(a > edge for a in row.attention)) for edge in (1e-46, 1e-30))
        assert least <= len(shown) <= most  # what float32 takes for no attention is none
        assert len(set(sources)) == len(shown)
        for source, (position, text, attention, part) in zip(sources, shown, strict=True):
            assert (position is None) == (scanned.bos and source == 0)
            assert position is None or text == texts(scanned.docs[example.document][position])
            assert attention == pytest.approx(row.attention[source], abs=1e-4)
            assert part == pytest.approx(row.parts[example.measure][source], abs=close)
            parts.add(part)
        left = [a for source, a in enumerate(row.attention) if source not in sources]
        assert example.attended_attention == sorted(example.attended_attention, reverse=True)
        assert example.attended_attention[-1] >= max(left, default=0) - 1e-4
        if not left:
            assert sum(example.attended_attention) == pytest.approx(1, abs=1e-5)
        short += len(shown) < 5
    assert short and min(parts) < 0 < max(parts)


def test_of_equal_attention_the_earlier_source_comes_first():
    """By hand: sources that no attention reaches are none, and destinations with fewer have fewer."""
    pattern = torch.tensor([[[0.2, 0.4, 0.4, 0, 0, 0, 0], [0.1, 0.2, 0.2, 0.1, 0.2, 0.1, 0.1]]] * 2)
    moved, parts = pattern * 3, pattern * torch.tensor([1.0, -1, 1, -1, 1, -1, 1])
    found = scanning._attended(pattern, (moved, parts), torch.tensor([[1, 0, 1], [0, 0, 1]]))
    by_row = [[1, 2, 0, -1, -1], [1, 2, 4, 0, 3]]
    assert found[..., 0].tolist() == [[by_row[r] for r in rows] for rows in ([1, 0, 1], [0, 0, 1])]
    for row, (sources, numbers) in enumerate(zip(by_row, found[0, [1, 0]], strict=True)):
        for source, (_, *values) in zip(sources, numbers.tolist(), strict=True):
            if source >= 0:
                assert values == [pytest.approx(float(t[0, row, source])) for t in (pattern, moved, parts)]
    few = scanning._attended(pattern[:1, :, :3], (moved[:1, :, :3], parts[:1, :, :3]), torch.tensor([[0]]))
    assert few[0, 0, :, 0].tolist() == [1, 2, 0, -1, -1]


def test_the_strongest_are_the_strongest_of_all(scanned):
    examples, rows = scanned.scan.examples, scanned.right.rows
    for head in scanned.scan.heads["head"]:
        for measure, kind, sign in (
            ("write", "strongest", 1),
            ("logit", "strongest", 1),
            ("logit", "most negative", -1),
        ):
            chosen = examples[
                (examples["head"] == head) & (examples["measure"] == measure) & (examples["kind"] == kind)
            ]
            right = sorted(sign * rows[measure][rows["head"] == head], reverse=True)[: EVERYTHING.examples]
            scale = rows[measure][rows["head"] == head].abs().max()
            assert np.allclose(sign * chosen["value"], right, rtol=0, atol=1e-4 * scale)
            assert list(chosen["rank"]) == list(range(1, 1 + EVERYTHING.examples))
            assert not chosen.duplicated(["document", "position"]).any()


def test_decile_examples_lie_in_their_tenth(scanned):
    examples, rows = scanned.scan.examples, scanned.right.rows
    for (head, measure), chosen in examples[examples["kind"] == "decile"].groupby(["head", "measure"]):
        values = np.sort(rows[measure][rows["head"] == head].to_numpy())
        tenths = [values[[i * 10 // len(values) == k for i in range(len(values))]] for k in range(10)]
        slack = 1e-4 * np.abs(values).max()
        for example in chosen.itertuples():
            tenth = tenths[example.decile - 1]
            assert tenth[0] - slack <= example.value <= tenth[-1] + slack
        counts = chosen.groupby("decile").size()
        assert list(counts) == [min(EVERYTHING.per_decile, len(tenth)) for tenth in tenths]
        edges = scanned.scan.distributions.query("head == @head and of == @measure")
        assert np.allclose(edges["low"], [tenth[0] for tenth in tenths], rtol=0, atol=slack)
        assert np.allclose(edges["high"], [tenth[-1] for tenth in tenths], rtol=0, atol=slack)


def test_the_text_of_an_example(scanned):
    def text(ids):
        return "".join(scanned.model.tokenizer.text(i) if scanned.model.has_tokenizer else f"⟨id {i}⟩" for i in ids)

    for example in scanned.scan.examples.itertuples():
        doc, t = scanned.docs[example.document], example.position
        assert example.destination == text([doc[t]])
        assert example.next == text([doc[t + 1]])
        assert example.after.startswith(example.next)
        assert example.after in text(doc)
        if pd.isna(example.source_position):
            assert scanned.bos
        else:
            assert example.source == text([doc[example.source_position]])
            assert example.source_position <= t


def test_a_source_is_never_a_later_token():
    """Where the value bias outweighs all sources, the one that pulls least against the whole is named, not the unseen zeros."""
    by_source, pattern = torch.tensor([[[0.5, 0.2, 0.0, 0.0]]]), torch.tensor([[[0.6, 0.4, 0.0, 0.0]]])
    values, sources = scanning._with_source(torch.tensor([[-1.0]]), by_source, pattern, 1)
    assert sources.tolist() == [[1]]
    assert values.tolist() == [[[-1.0, pytest.approx(0.4), pytest.approx(0.2)]]]


# -- the sample -------------------------------------------------------------------------------------------------------

TEXT = 2500  # tokens of the packaged text


@pytest.fixture(scope="module")
def embedded():
    return ov.load()


@pytest.fixture(scope="module")
def whole(embedded):
    """The embedded model, every position in the sample: what the oracle above was held against."""
    return ov.scan(embedded, tokens=TEXT, settings=Settings(sample=TEXT, loss_sample=TEXT))


@pytest.fixture(scope="module")
def sampled(embedded):
    return ov.scan(embedded, tokens=TEXT, settings=Settings(sample=300, loss_sample=300, per_decile=30))


def test_what_needs_no_sample_does_not_depend_on_it(whole, sampled):
    estimated = ["loss_saved", "loss_saved_se"]
    pd.testing.assert_frame_equal(
        whole.heads.drop(columns=estimated), sampled.heads.drop(columns=estimated), check_exact=True
    )
    strongest = [scan.examples.query("kind != 'decile'").reset_index(drop=True) for scan in (whole, sampled)]
    pd.testing.assert_frame_equal(*strongest, check_exact=True)


def test_loss_saved_is_estimated_within_its_error(whole, sampled):
    error = (whole.heads["loss_saved"] - sampled.heads["loss_saved"]) / sampled.heads["loss_saved_se"]
    assert error.abs().max() < 5
    assert error.std() > 0.3  # an error that is stated far too large tells nothing
    # The derivative alone is far off what the estimate finds.
    gap = (whole.heads["loss_saved"] - whole.heads["loss_saved_linear"]) / sampled.heads["loss_saved_se"]
    assert gap.max() > 10


def test_the_derivative_never_exceeds_the_loss_saved(whole):
    assert (whole.heads["loss_saved"] >= whole.heads["loss_saved_linear"] - 1e-6).all()


def test_sampled_tenths_are_the_true_tenths_within_their_error(sampled, embedded):
    """Each decile example's true rank is near its tenth, and tenths are filled evenly from end to end."""
    everything = ov.scan(embedded, tokens=TEXT, settings=Settings(sample=TEXT, per_decile=TEXT, loss_sample=2)).examples
    true = everything[everything["kind"] == "decile"].groupby(["head", "measure"])["value"].agg(np.sort)
    off = []
    for key, chosen in sampled.examples.query("kind == 'decile'").groupby(["head", "measure"]):
        assert (chosen.groupby("decile").size() == 30).all()
        rank = np.searchsorted(true[key], chosen["value"]) / len(true[key])
        assert (np.abs(rank - (chosen["decile"].astype(float) - 0.5) / 10) < 0.05 + 5 * 0.5 / 300**0.5).all()
        off.append(rank.mean() - 0.5)
    assert np.abs(off).max() < 5 * (1 / 12 / 300) ** 0.5


def test_every_tenth_has_examples_where_values_are_equal(embedded):
    """A head that writes nothing: its tenths are no different, and each is told of all the same."""
    settings = Settings(sample=TEXT, per_decile=1, loss_sample=2)
    found = ov.scan(embedded.without(["1.1"]), tokens=TEXT, settings=settings)
    assert found.facts["sample"] > 4 * scanning._DRAWN
    examples = found.examples[found.examples["kind"] == "decile"]
    assert (examples["value"][examples["head"] == "1.1"] == 0).all()
    tenths = examples.groupby(["head", "measure"])["decile"].agg(list)
    assert len(tenths) == 2 * 24 and all(decile == list(range(1, 11)) for decile in tenths)


def test_another_seed_draws_other_positions(embedded, sampled):
    again = ov.scan(embedded, tokens=TEXT, settings=Settings(sample=300, loss_sample=2, per_decile=30, seed=1))
    same = ov.scan(embedded, tokens=TEXT, settings=Settings(sample=300, loss_sample=300, per_decile=30))
    pd.testing.assert_frame_equal(same.examples, sampled.examples, check_exact=True)
    assert not again.examples.query("kind == 'decile'")["position"].equals(
        sampled.examples.query("kind == 'decile'")["position"]
    )


# -- interrupted ------------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
import ov_circuits as ov
from ov_circuits.report.examples import examples_payload
from ov_circuits.trace import scan as scanning
scanning._BATCHES_A_SAVE = 2
run, calls = scanning.run, 0
def dying(*args, **kwargs):
    global calls
    calls += 1
    if calls == 4:  # in the middle of the fourth batch, one after the last save
        os.kill(os.getpid(), signal.SIGKILL)
    return run(*args, **kwargs)
scanning.run = dying
ov.scan(ov.load(), tokens=2500, state=sys.argv[1])
"""


@pytest.fixture(scope="module")
def uninterrupted(embedded):
    return ov.scan(embedded, tokens=TEXT)


def same_scan(ours, right):
    for name in ("heads", "examples", "distributions"):
        pd.testing.assert_frame_equal(getattr(ours, name), getattr(right, name), check_exact=True)
        assert getattr(ours, name).attrs == getattr(right, name).attrs


def batches_run(monkeypatch):
    """Counts the batches that a scan runs from now on."""
    calls = []
    run = scanning.run
    monkeypatch.setattr(scanning, "run", lambda *a, **k: (calls.append(1), run(*a, **k))[1])
    return calls


def test_a_killed_scan_goes_on_to_the_same_result(tmp_path, embedded, uninterrupted, monkeypatch):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], env=environment, capture_output=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    (state,) = tmp_path.iterdir()
    assert state.name == f"{uninterrupted.facts['scan']}.safetensors"
    calls = batches_run(monkeypatch)
    same_scan(ov.scan(embedded, tokens=TEXT, state=tmp_path), uninterrupted)
    assert len(calls) == math.ceil(uninterrupted.facts["windows"] / 4) - 2  # two batches were on disk
    calls.clear()
    same_scan(ov.scan(embedded, tokens=TEXT, state=tmp_path), uninterrupted)
    assert not calls  # it was done


def test_ctrl_c_keeps_every_complete_batch(tmp_path, embedded, uninterrupted, monkeypatch):
    run, calls = scanning.run, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return run(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(scanning, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ov.scan(embedded, tokens=TEXT, state=tmp_path)
    calls = batches_run(monkeypatch)
    same_scan(ov.scan(embedded, tokens=TEXT, state=tmp_path), uninterrupted)
    assert len(calls) == math.ceil(uninterrupted.facts["windows"] / 4) - 3


def test_the_state_of_another_scan_is_not_taken(tmp_path, embedded, uninterrupted):
    ov.scan(embedded, tokens=600, state=tmp_path)
    ov.scan(embedded, tokens=600, window=64, state=tmp_path)
    ov.scan(embedded, tokens=600, settings=Settings(seed=1), state=tmp_path)
    ov.scan(embedded.without("0.0"), tokens=600, state=tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    for state in tmp_path.iterdir():
        state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(CircuitsError, match="delete it to begin anew"):
        ov.scan(embedded, tokens=600, state=tmp_path)


@pytest.mark.parametrize("damage", [
    lambda tally: tally.pop("means"),
    lambda tally: tally.update(top=tally["top"][:, :1].contiguous()),
    lambda tally: tally.update(sample=tally["sample"].half()),
    lambda tally: tally.update(batches=torch.tensor(-3)),
    lambda tally: tally.update(batches=torch.tensor(10**6)),
])  # fmt: skip
def test_a_damaged_state_is_not_gone_on_from(tmp_path, embedded, damage):
    ov.scan(embedded, tokens=600, state=tmp_path)
    (file,) = tmp_path.iterdir()
    with safe_open(file, "pt") as stored:
        metadata, tally = stored.metadata(), {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    damage(tally)
    save_file(tally, file, metadata)
    with pytest.raises(CircuitsError, match=r"is damaged.*delete it to begin anew"):
        ov.scan(embedded, tokens=600, state=tmp_path)


def test_memory_does_not_grow_with_the_corpus(tmp_path, embedded):
    sizes = set()
    for tokens in (600, 2000):
        folder = tmp_path / str(tokens)
        ov.scan(embedded, tokens=tokens, state=folder, settings=Settings(sample=100, loss_sample=10))
        sizes |= {file.stat().st_size for file in folder.iterdir()}
    assert len(sizes) == 1


# -- windows and files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [None, 1, 3, 7])
@pytest.mark.parametrize("bos", [True, False])
def test_windows(tiny_folders, stride, bos):
    model = ov.load(tiny_folders("gpt2-untied"))
    docs = documents(23, lengths=(30, 1, 2, 8, 9, 7))
    length = 7
    corpus = open_corpus(model, docs, window=length + bos, stride=stride, bos=bos)
    found = [
        (w.document, w.start, list(w.ids), [(w.first + i, token) for i, token in enumerate(w.targets)]) for w in corpus
    ]
    assert found == list(windows_by_definition(docs, length, stride or length, 0 if bos else None))
    counted = [(w.document, w.position(w.first + i)) for w in corpus for i in range(len(w.targets))]
    assert counted == [(d, p) for d, doc in enumerate(docs) for p in range(len(doc) - 1)]


def test_the_same_windows_of_other_documents_are_another_corpus(embedded):
    """One document of two windows, or two documents whose windows hold the same ids: examples say which document they are of."""
    ids = list(range(5, 21))
    one, two = (open_corpus(embedded, docs, window=8, bos=False) for docs in ([ids], [ids[:9], ids[8:]]))
    assert [(w.ids, w.targets) for w in one] == [(w.ids, w.targets) for w in two]
    assert one.survey.digest != two.survey.digest


def test_a_long_text_is_read_in_pieces_without_a_trace_of_the_seams(tmp_path, embedded, monkeypatch):
    text = " ".join(f"the people of state {i}\n\nand the whale" for i in range(300))
    file = tmp_path / "long.txt"
    file.write_text(text)
    whole = list(open_corpus(embedded, file))
    assert list(open_corpus(embedded, [text])) == whole
    monkeypatch.setattr("ov_circuits.trace.corpus._PIECE", 97)
    assert list(open_corpus(embedded, file)) == whole


def test_json_lines_are_documents(tmp_path, embedded):
    file = tmp_path / "two.jsonl"
    file.write_text(
        '{"text": "the people of the United States", "year": 1}\n\n"and the whale and the sea"\n', "utf-8-sig"
    )
    texts = ["the people of the United States", "and the whale and the sea"]
    assert list(open_corpus(embedded, file, window=6)) == list(open_corpus(embedded, texts, window=6))


def test_a_limit_of_tokens(embedded):
    docs = ["the people of the United States", "and the whale and the sea"]
    first, second = (embedded.tokenizer.encode(doc) for doc in docs)
    n = len(first) + 3
    assert list(open_corpus(embedded, docs, window=4, tokens=n)) == list(
        open_corpus(embedded, [first, second[:3]], window=4)
    )


def test_the_packaged_text_is_what_its_card_says(embedded):
    folder = ROOT / "data" / "corpus"
    lines = [json.loads(line) for line in (folder / "text.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {line["source"] for line in lines} == {"State of the Union address", "Moby-Dick"}
    assert len(lines) == 16 and max(len(line["text"]) for line in lines) <= 45_000
    assert (folder / "text.jsonl").stat().st_size < 300_000
    assert embedded.tokenizer.encode(lines[0]["text"])


# -- results ----------------------------------------------------------------------------------------------------------


def test_a_scan_is_saved_and_opened(tmp_path, sampled, whole):
    sampled.save(tmp_path / "scan")
    opened = ov.open_scan(tmp_path / "scan")
    same_scan(opened, sampled)
    kinds = {name: {type(value) for row in opened.examples[name] for value in row} for name in ATTENDED}
    right = {"attended": {str}, "attended_attention": {float}, "attended_part": {float}}
    assert kinds == {"attended_position": {int, type(None)}, **right}
    write_frame(sampled.examples, tmp_path / "examples.json")
    for theirs, row in zip(
        json.loads((tmp_path / "examples.json").read_text())["rows"], opened.examples.to_dict("records"), strict=True
    ):
        assert [theirs[name] for name in ATTENDED] == [row[name] for name in ATTENDED]
    whole.heads.to_parquet(tmp_path / "scan" / "heads.parquet")
    with pytest.raises(CircuitsError, match="not of one scan"):
        ov.open_scan(tmp_path / "scan")
    with pytest.raises(CircuitsError, match=r"cannot read the scan's .*heads\.parquet"):
        ov.open_scan(tmp_path)


@pytest.mark.parametrize(("name", "damage", "what"), [
    ("heads", lambda frame: frame.drop(columns="loss_saved"), "loss_saved"),
    ("heads", lambda frame: frame.assign(entropy="high"), "entropy"),
    ("heads", lambda frame: frame.head(0), "its rows"),
    ("examples", lambda frame: frame.assign(source=7), "source"),
    ("examples", lambda frame: frame.assign(attended_part=7), "attended"),
    ("examples", lambda frame: frame.assign(attended_position=frame["attended"]), "attended"),
    ("examples", lambda frame: frame.assign(attended=frame["attended"].map(lambda texts: texts[:2])), "attended"),
    ("distributions", lambda frame: frame.attrs.update(positions="many") or frame, "positions"),
])  # fmt: skip
def test_a_damaged_scan_is_not_opened(tmp_path, sampled, name, damage, what):
    folder = tmp_path / "scan"
    sampled.save(folder)
    frame = damage(pd.read_parquet(folder / f"{name}.parquet"))
    frame.attrs = frame.attrs or sampled.facts
    frame.to_parquet(folder / f"{name}.parquet")
    with pytest.raises(CircuitsError, match=rf"{name}\.parquet is damaged \(look at {what}\)"):
        ov.open_scan(folder)


def test_a_scan_of_an_earlier_version_is_made_again(tmp_path, sampled):
    ov.Scan(sampled.heads, sampled.examples.drop(columns=ATTENDED), sampled.distributions).save(tmp_path)
    with pytest.raises(
        CircuitsError, match=r"attend to \(no column 'attended'\), as those of earlier versions: make it"
    ):
        ov.open_scan(tmp_path)


@pytest.mark.parametrize("there", [False, True])
def test_a_scan_that_cannot_be_saved_leaves_nothing(tmp_path, sampled, monkeypatch, there):
    folder = tmp_path / "scan"
    if there:
        sampled.save(folder)
    write, calls = pd.DataFrame.to_parquet, []

    def until_full(self, path, **kwargs):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, path, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(pd.DataFrame, "to_parquet", until_full)
        with pytest.raises(CircuitsError, match=r"cannot write .*examples\.parquet: No space left on device"):
            ov.Scan(sampled.heads.head(1), sampled.examples, sampled.distributions).save(folder)
    if there:
        same_scan(ov.open_scan(folder), sampled)  # the one before, whole
        assert len(list(folder.iterdir())) == 3
    else:
        assert not folder.exists()


def test_one_heads_examples(sampled):
    assert set(sampled.of("1.0")["head"]) == {"1.0"}
    with pytest.raises(CircuitsError, match=r"no head '9\.9'"):
        sampled.of("9.9")
    assert "24 heads" in repr(sampled)


def test_what_a_page_gets_of_a_scan(sampled):
    payload = json.loads(json.dumps(examples_payload(sampled, strongest=3, per_decile=2), allow_nan=False))
    assert list(payload["heads"]) == sampled.heads["head"].tolist()
    assert payload["facts"]["positions"] == sampled.facts["positions"]
    for row in sampled.heads.to_dict("records"):
        shown = payload["heads"][row["head"]]
        assert shown["numbers"]["loss_saved"] == pytest.approx(row["loss_saved"], rel=1e-4)
        assert sum(shown["attention"]) == pytest.approx(1, abs=1e-3)
        assert sum(share for _, share in shown["distance"]) == pytest.approx(1, abs=1e-3)
        assert len(shown["examples"]) == 3 * 3 + 2 * 10 * 2
        best = sampled.of(row["head"]).query("measure == 'logit' and kind == 'strongest'").iloc[0]
        first = next(e for e in shown["examples"] if (e["measure"], e["kind"]) == ("logit", "strongest"))
        assert first["value"] == pytest.approx(best["value"], rel=1e-4)
        assert (first["source"], first["destination"]) == (best["source"], best["destination"])
        for n, (text, attention, part, back) in enumerate(first["attended"]):
            assert [text, None if back is None else best["position"] - back] == [
                best["attended"][n],
                best["attended_position"][n],
            ]
            assert attention == pytest.approx(best["attended_attention"][n], abs=5.01e-4)
            assert part == pytest.approx(best["attended_part"][n], rel=5.01e-3)
        assert len(first["attended"]) == sum(attention >= 0.01 for attention in best["attended_attention"]) > 0
        assert first["decile"] is None


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_a_norm_at_a_held_scale_is_linear_and_read_back(kind, assert_close):
    generator = torch.Generator().manual_seed(0)
    x, part, direction, gain, bias = (torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(5))
    shift = bias[0] if kind == "LayerNorm" else None
    norm = Norm(kind, gain[0], shift, 1e-3)
    assert_close(norm.carry(x, x) + (0 if shift is None else shift), norm(x), 1e-12)
    assert_close((norm.carry(x, part) * direction).sum(-1), (part * norm.read_back(x, direction)).sum(-1), 1e-12)
    for row in range(4):
        frozen = norm.frozen(x[row], direction[row])
        assert frozen.scale == pytest.approx(float(norm.scale(x)[row]))
        assert_close(frozen.direction, norm.read_back(x, direction)[row], 1e-12)


def test_an_induction_head_is_found_on_text(embedded):
    """What the card says of random tokens holds on text that repeats itself: they attend to the token after the earlier one."""
    doc = torch.randperm(1900, generator=torch.Generator().manual_seed(0))[:60].tolist()
    heads = ov.scan(embedded, [[i + 1 for i in doc] * 2], window=121, tokens=120).heads.set_index("head")
    strongest = heads["attention_after_same_token"].nlargest(3)
    assert set(strongest.index) == {"1.0", "1.1", "1.2"} and strongest.min() > 0.4


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path, monkeypatch):
    """``command(*words, code=0)`` runs ``ov-circuits scan`` in an empty folder of its own cache."""
    monkeypatch.setenv("OV_CIRCUITS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def run(*words, code=0):
        result = CliRunner().invoke(app, ["scan", *map(str, words)])
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return run


def test_the_command_writes_what_the_library_finds(command, embedded, tmp_path):
    right = ov.scan(embedded, tokens=600)
    facts = json.loads(command("--tokens", 600, "--json").stdout)
    assert facts["scan"] == right.facts["scan"]
    assert [row["loss_saved"] for row in facts["rows"]] == right.heads["loss_saved"].tolist()
    command("--tokens", 600, "-o", "heads.csv", "--examples", "examples.parquet", "--save", "kept")
    pd.testing.assert_frame_equal(pd.read_csv("heads.csv", dtype={"head": str}), right.heads)
    pd.testing.assert_frame_equal(listed(pd.read_parquet("examples.parquet")), right.examples)
    same_scan(ov.open_scan("kept"), right)
    assert list((tmp_path / "cache" / "scans").iterdir()) == []  # what was kept meanwhile is gone


def test_the_command_shows_heads_and_examples(command, embedded):
    right = ov.scan(embedded, tokens=600)
    shown = command("--tokens", 600, "--head", "L1H1", "--top", 3).stdout
    best = right.heads.sort_values("loss_saved", ascending=False).iloc[0]
    assert f"{best['head']}" in shown and f"{best['loss_saved']:+.4f}" in shown
    top = right.of("1.1").query("kind == 'strongest' and measure == 'write'").iloc[0]
    assert f"⟦{top['destination']}⟧" in shown and "tenth 10" in shown


def test_an_interrupted_command_says_that_it_resumes(command, monkeypatch, tmp_path, embedded):
    with monkeypatch.context() as patch:
        run, calls = scanning.run, []

        def interrupted(*args, **kwargs):
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return run(*args, **kwargs)

        patch.setattr(scanning, "run", interrupted)
        stopped = command("--tokens", 1200, "-o", "heads.parquet", code=130)
    assert "goes on from there" in stopped.stderr
    assert not Path("heads.parquet").exists()
    calls = batches_run(monkeypatch)
    command("--tokens", 1200, "-o", "heads.parquet")
    right = ov.scan(embedded, tokens=1200)
    assert len(calls) < 2 * math.ceil(right.facts["windows"] / 4)  # both, the second from the start
    pd.testing.assert_frame_equal(pd.read_parquet("heads.parquet"), right.heads)


def test_scans_that_nobody_went_on_with_are_taken_away(command, tmp_path):
    folder, now = tmp_path / "cache" / "scans", time.time()
    folder.mkdir(parents=True)
    days = {f"{number:02}": float(number) for number in range(25)} | {"old": 31.0, "ancient": 300.0}
    for name, age in days.items():
        (folder / f"{name}.safetensors").touch()
        os.utime(folder / f"{name}.safetensors", (now - age * 24 * 3600,) * 2)
    (folder / "notes.txt").touch()
    command("--tokens", 600)
    assert sorted(file.stem for file in folder.iterdir()) == [*(f"{number:02}" for number in range(20)), "notes"]
    os.utime(folder / "03.safetensors", (now - 31 * 24 * 3600,) * 2)
    command("--tokens", 600)
    assert not (folder / "03.safetensors").exists() and (folder / "19.safetensors").exists()


BAD = {
    "absent.txt": (None, "there is no file absent.txt"),
    "empty.txt": (b"", "empty"),
    "blank.jsonl": (b"\n\n", "empty"),
    "short.txt": (b"the people", "fewer than one window"),
    "junk.txt": (bytes(range(256)) * 20, "no UTF-8"),
    "zeros.txt": (b"the people\0of the" * 100, "zero bytes"),
    "bad.jsonl": (b'{"text": "the people"}\n{"text": \n', "bad.jsonl, line 2 is no JSON"),
    "other.jsonl": (b'"the people"\n{"words": "of the"}\n', "other.jsonl, line 2 has no text"),
    "number.jsonl": (b"3\n", "number.jsonl, line 1 has no text"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_corpus_is_one_sentence(command, name, tmp_path):
    content, sentence = BAD[name]
    if content is not None:
        Path(name).write_bytes(content)
    refused = command("-", name, "-o", "heads.csv", code=2)
    assert sentence in refused.stderr and refused.stderr.count("\n") <= 2, refused.stderr
    assert "Traceback" not in refused.stderr
    assert {file.name for file in tmp_path.iterdir()} <= {name}


def test_other_bad_requests(command, tmp_path, tiny_folders, gpt2_small_attention):
    Path("text.txt").write_text("the people of the United States " * 100)
    for words, sentence in [
        (("-", tmp_path), "is a folder"),
        (("-", "text.txt", "--window", 500), "longer than the 128 tokens"),
        (("-", "text.txt", "--window", 2), "make it longer"),
        (("-", "text.txt", "--stride", 200), "leave text out"),
        (("-", "text.txt", "--tokens", 1), "take two or more"),
        (("-", "text.txt", "-o", "heads.txt"), "cannot tell a table's format"),
        (("-", "text.csv", "-o", "text.csv"), "it is the corpus itself"),
        (("-", "text.txt", "--head", "9.9"), "has no head 9.9"),
        ((tiny_folders("llama-grouped"), "text.txt"), "has no tokenizer to read text.txt with"),
        ((gpt2_small_attention, "text.txt"), "cannot run a prompt"),
    ]:
        assert sentence in command(*words, code=2).stderr, words
    assert {file.name for file in tmp_path.iterdir()} == {"text.txt"}
    for corpus, sentence in [
        (3, "a corpus is a file, or a list"),
        ([[1, 2, 99]], "document 0 of the corpus: token id 99 is outside"),
        ([[1, 2.5]], "document 0 of the corpus: 2.5 is no token id"),
        ([3], "a document of a corpus is"),
        ([], "is empty"),
    ]:
        with pytest.raises(CircuitsError, match=sentence):
            ov.scan(ov.load(tiny_folders("llama-grouped")), corpus)
    with pytest.raises(CircuitsError, match="sample is a whole number from 1 on"):
        Settings(sample=0)


def test_a_model_that_gives_no_numbers_is_refused(tiny_folders, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "broken"
    folder.mkdir()
    good = tiny_folders("gpt2-untied")
    tensors = load_file(good / "model.safetensors")
    tensors["transformer.h.1.mlp.c_proj.weight"][0, 0] = torch.inf
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((good / "config.json").read_text())
    with pytest.raises(CircuitsError, match="NaN or infinity on document 0"):
        ov.scan(ov.load(folder), documents(23), window=9)


# -- every family: norms after attention, softcaps, scales ------------------------------------------------------------


def through(norm, at, write):
    """A write through a norm at the scale that it has on ``at``, one coordinate at a time."""
    rows = torch.stack([norm.frozen(at, unit).direction for unit in torch.eye(len(at), dtype=torch.float64)])
    return rows @ write.double()


@pytest.mark.parametrize(
    ("variant", "reach"), [("gemma2", 4), ("olmo2", 5), ("mistral", 4), ("gpt2", 5), ("cohere", 5)]
)
def test_every_familys_attended_sources(variant, reach):
    """Parts of the logit are the ledger's, through norms after attention too; beyond a sliding window nothing is attended to.

    In float64: a float32 forward pass of these random models is 1.4e-6 of attention away from it, in transformers too.
    """
    model = ov.load(tiny(variant).double(), view="raw")
    (doc,) = documents(9, lengths=(12,))
    examples = ov.scan(model, [doc], window=12, bos=False, settings=EVERYTHING).examples
    trace = model.trace(doc, bos=False)
    accounts = [trace.ledger(following, position=t) for t, following in enumerate(doc[1:])]
    accounts = [rows[(rows["component"] == "head") & (rows["kind"] == "value_path")] for rows in accounts]
    longest = {}
    for row in examples.to_dict("records"):
        t, pattern = row["position"], trace.pattern(row["head"])[row["position"]]
        order = sorted(range(t + 1), key=lambda s: -pattern[s])[:5]
        assert row["attended_attention"] == pytest.approx(
            [float(pattern[s]) for s in order if pattern[s] > 0], abs=1e-6
        )
        longest[model.head(row["head"]).layer] = max(
            len(row["attended"]), longest.get(model.head(row["head"]).layer, 0)
        )
        if row["measure"] == "write":
            sizes = trace.head_writes(row["head"])[:, t].norm(dim=-1)
            right = [float(sizes[s]) for s in row["attended_position"]]
        else:
            values = accounts[t][accounts[t]["head"] == row["head"]].set_index("source")["value"]
            right = [values[s] for s in row["attended_position"]]
        assert row["attended_part"] == pytest.approx(right, rel=2e-6, abs=1e-6)
    assert min(longest.values()) == reach


@pytest.mark.parametrize("variant", BASES)
def test_every_familys_logits_and_losses(variant, tmp_path, assert_close):
    """Contributions are the ledger's; the loss saved is what the model itself gives without the write before its unembedding.

    Its derivative is autograd's, through the softcap.
    """
    tiny(variant).save_pretrained(tmp_path)
    model = ov.load(tmp_path, view="raw")
    if not model.can_run:
        with pytest.raises(CircuitsError, match="cannot run a prompt"):
            ov.scan(model, documents(9))
        return
    (doc,) = documents(9, lengths=(6,))
    heads = ov.scan(model, [doc], window=6, bos=False, settings=EVERYTHING).heads
    trace = model.trace(doc, bos=False)
    logits, saved, linear = torch.zeros(3, len(heads), dtype=torch.float64)
    cap, scale, W_U = (
        model.architecture.logit_softcap,
        model.architecture.logit_scale,
        model.source.unembedding.double(),
    )
    for t, following in enumerate(doc[1:]):
        entries = (
            trace.ledger(following, position=t).query("component == 'head'").groupby("head", sort=False)["value"].sum()
        )
        logits += torch.tensor(entries[heads["head"]].to_numpy())
        loss = cross_entropy(trace.logits[t].double(), torch.tensor(following))
        for i, label in enumerate(heads["head"]):
            layer = model.head(label).layer
            write, post = trace.write(label)[t], model.source.attention_post_norm(layer)
            if post is not None:
                write = through(post, trace.record.layers[layer].attention_output[t], write)
            carried = through(model.source.final_norm, trace.record.final[t], write)

            def without(_, normalised, carried=carried, t=t):
                changed = normalised.clone()
                changed[0, t] -= carried.to(changed.dtype)
                return changed

            there = scanning.run(model, torch.tensor([doc]), edits=Edits(final=without)).logits[0, t].double()
            saved[i] += cross_entropy(there, torch.tensor(following)) - loss
            share, given = torch.ones((), dtype=torch.float64, requires_grad=True), trace.logits[t].double()
            uncapped = given if cap is None else cap * (given / cap).atanh()
            left = uncapped - (1 - share) * scale * (carried.double() @ W_U)
            cross_entropy(left if cap is None else cap * (left / cap).tanh(), torch.tensor(following)).backward()
            linear[i] -= share.grad
    assert_close(column(heads, "logit"), logits / (len(doc) - 1), 1e-4)
    assert_close(column(heads, "loss_saved"), saved / (len(doc) - 1), 1e-4)
    assert_close(column(heads, "loss_saved_linear"), linear / (len(doc) - 1), 1e-4)

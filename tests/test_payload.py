"""What the page is given: the same numbers as the scoreboard, the trace and the ledger, rounded but not changed."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import ov_circuits as ov
from ov_circuits import CircuitsError
from ov_circuits.report import budget, results
from ov_circuits.report.cards import head_card
from ov_circuits.report.examples import examples_payload
from ov_circuits.scores.board import SCORES
from ov_circuits.scores.directions import directions
from ov_circuits.trace.behaviours import BEHAVIOURS
from ov_circuits.words import token_text

# What takes seconds, where a test is about something else.
BARE = {"behaviours": False, "scan": 0, "ablation": 0}


def unpack(array):
    values = np.frombuffer(base64.b64decode(array["data"]), dtype=f"<{array['dtype']}").reshape(array["shape"])
    return torch.from_numpy(values.astype(np.float64)) * array["scale"]


@pytest.fixture(scope="module")
def story(stories260k):
    model = ov.load(stories260k)
    trace = model.trace("Once upon a time there was a")
    return model, trace, ov.dashboard(model, trace, " little", " big").payload


def test_a_payload_is_plain_json_without_nan(story):
    json.loads(json.dumps(story[2], allow_nan=False))


def test_scores_are_the_boards(story):
    model, trace, payload = story
    board = ov.scoreboard(model, tokens=0)
    keys = [score["key"] for score in payload["scores"]]
    behaviours = [key for key in BEHAVIOURS if key in ov.behaviours(model, seeds=1, rows=1)]
    assert keys == [*(key for key in board.columns if key in SCORES), *behaviours, "write_norm", "total_effect"]
    for key in board.columns:
        if key in SCORES:
            assert payload["values"][key] == pytest.approx(board[key].tolist(), rel=1e-4)
    assert payload["values"]["write_norm"] == pytest.approx(trace.write_norms()[:, :, -1].flatten().tolist(), rel=1e-4)


def test_cards_hold_spectra_and_both_ends_of_directions(story):
    model, _, payload = story
    assert len(payload["cards"]) == model.n_layers * model.n_heads
    card, head = payload["cards"][3 * model.n_heads + 6], model.head("3.6")
    assert card["singular_values"] == pytest.approx(head.ov.singular_values.tolist(), rel=1e-4)
    assert len(card["eigenvalues_ov"]) == len(card["eigenvalues_full"]) == model.architecture.d_head
    found = directions(model, 3, k=1, tokens=8)
    texts = [payload["tokens"][index] for index, _ in card["directions"][0]["writes"]["minus"]]
    assert texts == [model.tokenizer.text(t) for t in found.writes.minus[6, 0].tolist()]
    assert head_card(head)["directions"][0]["writes"]["minus"][0][0] == texts[0]


def test_the_search_knows_more_tokens_of_an_end_than_a_card_shows(story):
    model, _, payload = story
    section, card = payload["search"], payload["cards"][3 * model.n_heads + 6]
    assert len(section["places"]) == model.n_layers * model.n_heads
    U, _, Vh = torch.linalg.svd((model.head("3.6").W_V @ model.head("3.6").W_O).double())
    dense = {
        "reads": model.embedding.tensor().double() @ U[:, 0],
        "writes": Vh[0] @ model.unembedding.tensor().double().mT,
    }
    known = section["places"][3 * model.n_heads + 6][0]
    for side, along in dense.items():
        for end in ("plus", "minus"):
            texts = [section["tokens"][place] for place in known[side][end]]
            assert len(texts) == 40 and len(set(known[side][end])) == 40
            assert texts[:8] == [payload["tokens"][place] for place, _ in card["directions"][0][side][end]]
        # The sign of a pair is free: both ends together are the dense ones.
        extremes = {frozenset(along.topk(40, largest=largest).indices.tolist()) for largest in (True, False)}
        named = {
            frozenset(
                i
                for i in range(len(along))
                if model.tokenizer.text(i) in {section["tokens"][p] for p in known[side][end]}
            )
            for end in ("plus", "minus")
        }
        assert all(any(wanted <= found for found in named) for wanted in extremes)


def test_the_prompt_part_is_the_trace_and_its_ledger(story):
    _, trace, payload = story
    prompt, account = payload["prompt"], trace.ledger(" little", " big")
    assert prompt["tokens"] == list(trace.texts) and prompt["bos_added"]
    assert prompt["quantity"] == "logit difference ' little' - ' big'"
    assert prompt["residual"] == account.attrs["residual"]
    assert sum(c["value"] for c in prompt["components"]) == pytest.approx(account.attrs["total"])
    heads = account[account["kind"] == "value_path"]
    assert prompt["head_value"] == pytest.approx(heads.groupby("head", sort=False)["value"].sum().tolist(), rel=1e-4)
    by_source = unpack(prompt["head_source"])
    assert by_source.shape == (40, len(trace))
    entry = heads[(heads["head"] == "3.6") & (heads["source"] == 2)]["value"].item()
    assert float(by_source[3 * 8 + 6, 2]) == pytest.approx(entry, rel=1e-5)
    patterns = torch.stack([layer.pattern for layer in trace.record.layers]).flatten(0, 1)
    assert (unpack(prompt["pattern"]) - patterns).abs().max() <= 1 / 65535
    weighted = trace.value_weighted_patterns().flatten(0, 1)
    assert (unpack(prompt["value_weighted"]) - weighted).abs().max() <= 1e-3 * weighted.max()


def test_without_an_answer_the_likeliest_token_is_explained_against_the_runner_up(story):
    model, trace, _ = story
    prompt = ov.dashboard(model, trace, **BARE).payload["prompt"]
    top = trace.logits[-1].topk(2).indices.tolist()
    assert [prompt["answer"]["id"], prompt["against"]["id"]] == top


def test_attention_weights_alone_make_a_page_that_says_what_is_left_out(gpt2_small_attention):
    payload = ov.dashboard(ov.load(gpt2_small_attention)).payload
    assert payload["cards"][0]["eigenvalues_full"] is None and payload["cards"][0]["directions"] is None
    assert "eigen_copying_full" not in payload["values"]
    assert any("no embeddings" in note for note in payload["meta"]["notes"])
    assert [check["passed"] for check in payload["meta"]["certificate"]["checks"]].count(None) == 4


def test_a_page_is_one_file_written_whole(story, tmp_path):
    page = ov.dashboard(*story[:2], **BARE)
    page.save(tmp_path / "report.html")
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert text.lower().startswith("<!doctype html>") and "</html>" in text
    allowed = re.search("script-src([^;]*);", text)[1].split()
    run = re.findall("<script>(.*?)</script>", text, re.DOTALL)
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in run}
    assert len(run) == 2 and hashes < set(allowed) and len(allowed) == 3  # plotly is inflated before it runs
    shown = replace(page, payload=page.payload | {"title": '<b> & "'})._repr_html_()
    assert 'title="&lt;b&gt; &amp; &quot;"' in shown and "<b>&lt;b&gt; &amp; &quot;</b>" in shown
    with pytest.raises(CircuitsError, match="does not exist"):
        page.save(tmp_path / "nowhere" / "report.html")


@pytest.mark.parametrize(("kwargs", "message"), [
    ({"answer": " little"}, "needs a prompt"),
    ({"against": " little"}, "needs an answer"),
])  # fmt: skip
def test_an_answer_without_a_prompt_is_refused(story, kwargs, message):
    with pytest.raises(CircuitsError, match=message):
        ov.dashboard(story[0], **kwargs)


def test_a_trace_of_another_model_is_refused(story, gpt_nano_sort):
    with pytest.raises(CircuitsError, match="another model"):
        ov.dashboard(ov.load(gpt_nano_sort), story[1])


def test_composition_holds_the_strongest_and_every_heads_own(story):
    model, _, payload = story
    section, frame = payload["composition"], ov.composition(model, "all")
    labels = model.head_labels
    rows = {
        (labels[s], labels[r], k): i
        for i, (s, r, k) in enumerate(zip(section["sender"], section["receiver"], section["kind"], strict=True))
    }
    assert section["z_paired"] == sorted(section["z_paired"], reverse=True)
    for kind in "QKV":
        of_kind = frame[frame["kind"] == kind]
        assert section["pairs"] == len(of_kind)
        assert section["floor"][kind] == pytest.approx(of_kind["z_paired"].nlargest(400).min(), rel=1e-4)
        flagged = of_kind[of_kind["flag_paired"]]["z_paired"]
        assert section["fdr"][kind] == (pytest.approx(flagged.min(), rel=1e-4) if len(flagged) else None)
        for wanted in (
            of_kind.nlargest(400, "z_paired"),
            of_kind[of_kind["receiver"] == "3.6"].nlargest(5, "z_paired"),
        ):
            for row in wanted.itertuples():
                place = rows[row.sender, row.receiver, kind]
                assert section["value"][place] == pytest.approx(row.value, rel=1e-4)
                assert section["z_paired"][place] == pytest.approx(row.z_paired, rel=1e-4)


def test_neighbours_share_most_write_directions(story):
    model, _, payload = story
    overlap = ov.subspace_overlap(model, read="O")
    mine = overlap[(overlap["writer"] == "3.6") | (overlap["reader"] == "3.6")].nlargest(6, "z")
    others = [row.reader if row.writer == "3.6" else row.writer for row in mine.itertuples()]
    found = payload["spaces"]["neighbours"][3 * 8 + 6]
    assert [model.head_labels[row[0]] for row in found] == others
    assert [row[1] for row in found] == pytest.approx(mine["value"].tolist(), rel=1e-4)


def test_which_heads_have_their_pairs_read(story):
    model, trace, _ = story

    def read(**options):
        cards = ov.dashboard(model, paths=False, **BARE, **options).payload["cards"]
        return [label for label, card in zip(model.head_labels, cards, strict=True) if card["pairs"]]

    board = ov.scoreboard(model).set_index("head")["eigen_copying_full"].abs()
    assert set(read(pairs=3)) == set(board.nlargest(3).index)
    assert read(pairs=0) == [] and len(read()) == len(read(pairs="all")) == 40
    account = trace.ledger(" little", " big")
    size = account[account["component"] == "head"].groupby("head")["value"].sum().abs()
    mixed = set(read(pairs=2, trace=trace, answer=" little", against=" big"))
    assert mixed == {board.idxmax(), size.idxmax()}
    with pytest.raises(CircuitsError, match="a number or 'all'"):
        ov.dashboard(model, pairs="many")


def test_scores_over_the_vocabulary_come_beside_the_spectra_with_z(story):
    model = story[0]
    payload = ov.dashboard(model, scores=["rank_copying_10"], paths=False, pairs=0, **BARE).payload
    alone = ov.rank_copying(model)["rank_copying_10"]
    assert payload["values"]["rank_copying_10"] == pytest.approx(alone.tolist(), rel=1e-4)
    assert len(payload["chance"]["rank_copying_10"]["z"]) == 40 and "eigen_copying_full" in payload["values"]
    assert payload["composition"] is None and payload["spaces"]["neighbours"] is None
    copying = [i for i, share in enumerate(alone) if share >= 0.5]
    said = [i for i, card in enumerate(payload["cards"]) if card["evidence"][0].startswith("Copies: ")]
    assert said == copying


def test_pairs_of_tokens_that_are_asked_for_are_on_the_map(story):
    model = story[0]
    page = ov.dashboard(model, token_pairs=[(" a", " little"), (1, 2)], paths=False, pairs=0, **BARE).payload
    keys = {score["key"]: score["label"] for score in page["scores"] if score["group"] == "Token pairs"}
    assert list(keys) == ["entry_1", "entry_1_rank", "entry_2", "entry_2_rank"]
    assert keys["entry_1"] == "Entry ·a → ·little"
    assert [score["pair"] for score in page["scores"] if "pair" in score] == [
        [" a", " little"],
        [token_text(model, 1), token_text(model, 2)],
    ]
    frame = ov.token_pair(model, " a", " little")
    assert page["values"]["entry_1"] == pytest.approx(frame["above_mean"].tolist(), rel=1e-4)
    assert page["values"]["entry_1_rank"] == frame["rank"].tolist()
    with pytest.raises(CircuitsError, match="not one token"):
        ov.dashboard(model, token_pairs=[(" a", " unimaginable words")], paths=False, pairs=0, **BARE)


def test_every_check_of_the_certificate_is_explained(story):
    assert all(check["meaning"] for check in story[2]["meta"]["certificate"]["checks"])


def test_behaviours_stand_beside_the_scores_with_chance_and_spread(story):
    model, _, payload = story
    alone = ov.behaviours(model)
    for key in alone.attrs["sources"]:
        assert payload["values"][key] == pytest.approx(alone[key].tolist(), rel=1e-4)
        chance = payload["chance"][key]
        for name, column in (("mean", "null_mean"), ("z", "z"), ("spread", "spread")):
            assert chance[name] == pytest.approx(alone[f"{key}_{column}"].tolist(), rel=1e-4, abs=1e-12)
        assert next(score for score in payload["scores"] if score["key"] == key)["source"] == BEHAVIOURS[key].source
    assert any("8 seeds of 4 prompts" in note for note in payload["meta"]["notes"])


def test_a_small_models_page_has_examples_of_the_packages_text(story):
    model, _, payload = story
    assert payload["examples"] == examples_payload(ov.scan(model, tokens=4000))
    few = ov.scan(model, tokens=600)
    assert ov.dashboard(model, scan=few, behaviours=False, paths=False).payload["examples"] == examples_payload(few)
    with pytest.raises(CircuitsError, match="scan is of"):
        ov.dashboard(ov.load(), scan=few)


def test_ablations_stand_beside_the_account(story):
    model, trace, payload = story
    sweep = ov.ablation_sweep(model, trace, answer=" little", against=" big")
    found = payload["prompt"]["ablation"]
    assert found["head"] == list(range(40)) and found["method"] == "zero"
    for name in ("direct_effect", "total_effect", "answer_loss_change", "kl"):
        assert found[name] == pytest.approx(sweep[name].tolist(), rel=1e-4)
    assert payload["values"]["total_effect"] == found["total_effect"]
    options = BARE | {"ablation": 2}
    few = ov.dashboard(model, trace, " little", " big", paths=False, pairs=0, **options).payload
    strongest = sweep["direct_effect"].abs().nlargest(2).index
    assert set(few["prompt"]["ablation"]["head"]) == set(strongest)
    assert [i for i, value in enumerate(few["values"]["total_effect"]) if value is not None] == sorted(strongest)


def test_a_prompt_set_comes_with_its_means_and_intervals():
    model = ov.load()
    chosen = ov.prompts.load("greater_than_digit", model, n=5)
    page = ov.dashboard(model, prompts=chosen, paths=False, pairs=0, **BARE).payload
    section, frame = page["prompt_set"], ov.attribute(model, chosen)
    heads = frame[frame["component"] == "head"]
    assert [*heads["head"]] == model.head_labels
    for name in ("mean", "low", "high"):
        assert section["heads"][name] == pytest.approx(heads[name].tolist(), rel=1e-4)
        suffix = "" if name == "mean" else f"_{name}"
        assert section["roles"]["decade"][name] == pytest.approx(heads[f"from_decade{suffix}"].tolist(), rel=1e-4)
    assert page["values"]["set_mean"] == section["heads"]["mean"]
    summed = sum(section["heads"]["mean"]) + sum(row["mean"] for row in section["others"])
    assert summed == pytest.approx(section["difference"], abs=1e-4)
    first, prompt = section["examples"][0], chosen.prompts[0]
    assert first["tokens"] == [model.tokenizer.text(token) for token in prompt.tokens]
    assert [k for k, role in enumerate(first["roles"]) if role == "decade"] == list(prompt.roles["decade"])


def test_a_continuation_comes_step_by_step():
    model = ov.load()
    made = ov.generate(model, "the people of the", 3)
    section = ov.dashboard(model, generation=made, paths=False, pairs=0, **BARE).payload["generation"]
    heads, frame = made.heads(), made.frame()
    assert unpack(section["head_value"]).flatten().tolist() == pytest.approx(heads["value"].tolist(), rel=1e-5)
    assert np.ravel(section["head_source"]).tolist() == heads["source"].tolist()
    for number, (row, step) in enumerate(zip(section["steps"], made.steps, strict=True)):
        assert (row["token"], row["runner_up"]) == (step.text, step.runner_up_text)
        account = frame[(frame["step"] == number) & (frame["kind"] == "value_path")]
        by_source = account.groupby("source")["value"].sum().tolist()
        assert row["sources"][: step.position + 1] == pytest.approx(by_source, rel=1e-4, abs=1e-9)
        assert row["sources"][step.position + 1 :] == [None] * (len(made.trace) - step.position - 1)
        parts = sum(part["value"] for part in row["components"])
        assert parts == pytest.approx(row["total"], abs=1e-4) == pytest.approx(row["difference"], abs=1e-4)
    with pytest.raises(CircuitsError, match="generation was made with another model"):
        ov.dashboard(ov.load(), generation=made)


def test_what_would_take_long_is_left_out_by_itself_and_said(story, monkeypatch):
    monkeypatch.setattr(budget, "_RUNS", 1)
    model, trace, _ = story
    page = ov.dashboard(model, trace, paths=False, pairs=0).payload
    assert page["examples"] is None and "ablation" not in page["prompt"] and "induction" not in page["values"]
    for option in ("--behaviours", "--scan N", "--ablate N"):
        assert any(option in note for note in page["meta"]["notes"])
    embedded = ov.load()
    page = ov.dashboard(embedded, prompts="greater_than_digit", paths=False, pairs=0, **BARE).payload
    assert page["prompt_set"]["prompts"] == 16


def test_what_cannot_be_done_is_a_note_unless_it_was_asked_for(story, monkeypatch):
    def refuse(*_, **__):
        raise CircuitsError("this text cannot be read")

    monkeypatch.setattr(results, "run_scan", refuse)
    options = {"behaviours": False, "paths": False, "pairs": 0}
    page = ov.dashboard(story[0], **options).payload
    assert page["examples"] is None
    assert "Examples from a text are left out: this text cannot be read" in page["meta"]["notes"]
    with pytest.raises(CircuitsError, match="cannot be read"):
        ov.dashboard(story[0], scan=100, **options)
    with pytest.raises(CircuitsError, match="needs a prompt"):
        ov.dashboard(story[0], ablation=3)

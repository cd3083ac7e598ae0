"""What the page is given: the same numbers as the scoreboard, the trace and the ledger, rounded but not changed."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
import torch

import ov_circuits as ov
from ov_circuits import CircuitsError
from ov_circuits.report.cards import head_card
from ov_circuits.scores.board import SCORES
from ov_circuits.scores.directions import directions


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
    assert keys == [*(key for key in board.columns if key in SCORES), "write_norm"]
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
    prompt = ov.dashboard(model, trace).payload["prompt"]
    top = trace.logits[-1].topk(2).indices.tolist()
    assert [prompt["answer"]["id"], prompt["against"]["id"]] == top


def test_attention_weights_alone_make_a_page_that_says_what_is_left_out(gpt2_small_attention):
    payload = ov.dashboard(ov.load(gpt2_small_attention)).payload
    assert payload["cards"][0]["eigenvalues_full"] is None and payload["cards"][0]["directions"] is None
    assert "eigen_copying_full" not in payload["values"]
    assert any("no embeddings" in note for note in payload["meta"]["notes"])
    assert [check["passed"] for check in payload["meta"]["certificate"]["checks"]].count(None) == 4


def test_a_page_is_one_file_written_whole(story, tmp_path):
    model, trace, _ = story
    ov.dashboard(model, trace).save(tmp_path / "report.html")
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert text.lower().startswith("<!doctype html>") and "</html>" in text
    with pytest.raises(CircuitsError, match="does not exist"):
        ov.dashboard(model, trace).save(tmp_path / "nowhere" / "report.html")


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
        cards = ov.dashboard(model, paths=False, **options).payload["cards"]
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
    payload = ov.dashboard(model, scores=["rank_copying_10"], paths=False, pairs=0).payload
    alone = ov.rank_copying(model)["rank_copying_10"]
    assert payload["values"]["rank_copying_10"] == pytest.approx(alone.tolist(), rel=1e-4)
    assert len(payload["chance"]["rank_copying_10"]["z"]) == 40 and "eigen_copying_full" in payload["values"]
    assert payload["composition"] is None and payload["spaces"]["neighbours"] is None
    copying = [i for i, share in enumerate(alone) if share >= 0.5]
    said = [i for i, card in enumerate(payload["cards"]) if card["evidence"][0].startswith("Copies: ")]
    assert said == copying


def test_every_check_of_the_certificate_is_explained(story):
    assert all(check["meaning"] for check in story[2]["meta"]["certificate"]["checks"])

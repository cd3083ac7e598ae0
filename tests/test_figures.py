"""Figures show the numbers they are given, can be restyled, and take no text for markup."""

from __future__ import annotations

import re
import struct

import numpy as np
import pandas as pd
import pytest
import torch
from test_bundle import needs_browser

import ov_circuits as ov
from ov_circuits import CircuitsError
from ov_circuits.report.text import visible

F = ov.figures


@pytest.fixture(scope="module")
def story(stories260k):
    model = ov.load(stories260k)
    trace = model.trace("Once upon a time there was a")
    return model, trace, ov.scoreboard(model), trace.ledger(" little", " big")


def test_a_map_is_the_column_centred_on_zero(story):
    board = story[2]
    figure = F.head_map(board, "eigen_copying_full")
    (heat,) = figure.data
    assert np.asarray(heat.z) == pytest.approx(board["eigen_copying_full"].to_numpy().reshape(5, 8))
    assert heat.zmin == -heat.zmax and heat.zmax == pytest.approx(board["eigen_copying_full"].abs().max())
    sizes = F.head_map(board, "ov_frobenius_norm").data[0]
    assert sizes.zmin == 0
    # Rows in any order, and numbers from elsewhere.
    shuffled = board.sample(frac=1, random_state=0).assign(mine=range(40))
    assert np.asarray(F.head_map(shuffled, "mine").data[0].z)[4, 7] == shuffled.set_index("head")["mine"]["4.7"]


def test_a_scatter_is_two_columns(story):
    board = story[2]
    (points,) = F.score_scatter(board, "ov_stable_rank", "eigen_copying_ov", colour="qk_stable_rank").data
    assert list(points.x) == board["ov_stable_rank"].tolist() and list(points.y) == board["eigen_copying_ov"].tolist()
    assert list(points.marker.color) == board["qk_stable_rank"].tolist() and list(points.text) == board["head"].tolist()
    assert points.marker.cmin is None
    (signed,) = F.score_scatter(board, "ov_stable_rank", "qk_stable_rank", colour="eigen_copying_full").data
    assert -signed.marker.cmin == signed.marker.cmax == pytest.approx(board["eigen_copying_full"].abs().max())


def test_a_spectrum_has_its_band_where_the_frame_has_one(story):
    head = story[0].head("3.6")
    frame = ov.spectrum(head)
    bars, low, high = F.spectrum(frame).data
    assert list(bars.y) == frame["value"].tolist()
    assert list(low.y) == frame["null_low"].tolist() and list(high.y) == frame["null_high"].tolist()
    assert "range of 8 draws" in F.spectrum(frame).layout.title.text
    (alone,) = F.spectrum(head.ov.singular_values).data
    assert list(alone.y) == pytest.approx(head.ov.singular_values.tolist())


def test_eigenvalues_lie_where_they_are(story):
    values = story[0].head("3.6").ov.eigenvalues
    figure = F.eigenvalues(values)
    (points,) = figure.data
    assert np.asarray(points.x) + 1j * np.asarray(points.y) == pytest.approx(values.numpy())
    assert figure.layout.yaxis.scaleanchor == "x"
    reach = figure.layout.xaxis.range
    assert reach[0] == -reach[1] and reach[1] > float(values.abs().max())


def test_a_direction_shows_both_ends_of_both_sides(story):
    frame = story[0].head("3.6").reads(5)
    read, write = F.singular_directions(frame).data
    for bars, side in ((read, "read"), (write, "write")):
        rows = frame[frame["side"] == side]
        assert sorted(bars.x) == pytest.approx(sorted(rows["value"]))
        assert len(bars.x) == 10


def test_the_graph_holds_the_strongest_paths(story):
    frame = ov.composition(story[0], "all")
    figure = F.composition_graph(frame, 15)
    wanted = frame.nlargest(15, "z_paired")
    drawn = sum(sum(x is None for x in line.x) for line in figure.data[:-1])
    assert drawn == 15
    assert {line.name[0] for line in figure.data[:-1]} == set(wanted["kind"])
    assert set(figure.data[-1].text) == {*wanted["sender"], *wanted["receiver"]}
    with pytest.raises(CircuitsError, match="no path"):
        F.composition_graph(frame.head(0))


def test_a_pattern_leaves_the_future_empty(story):
    trace = story[1]
    (heat,) = F.attention_pattern(trace.pattern("3.6"), trace.texts).data
    z = np.asarray(heat.z, dtype=float)
    assert np.isnan(z[0, 1]) and not np.isnan(np.tril(z)).any()
    assert np.tril(z) == pytest.approx(trace.pattern("3.6").tril().numpy())
    with pytest.raises(CircuitsError, match="does not fit"):
        F.attention_pattern(trace.pattern("3.6"), trace.texts[1:])


def test_the_account_closes_in_its_figures(story):
    account = story[3]
    for by, count in (("kind", None), ("layer", None)):
        (steps,) = F.waterfall(account, by).data
        assert steps.measure[-1] == "total" and steps.x[-1] == account.attrs["total"]
        assert sum(steps.x[:-1]) == pytest.approx(account.attrs["total"]), (by, count)
    (heat,) = F.attribution_map(account).data
    heads = account[account["component"] == "head"].groupby("head", sort=False)["value"].sum()
    assert np.asarray(heat.z) == pytest.approx(heads.to_numpy().reshape(5, 8))
    with pytest.raises(CircuitsError, match="by 'kind' or by 'layer'"):
        F.waterfall(account, "head")


def test_effects_are_the_sweeps_with_the_line_of_equals(story):
    model, trace = story[:2]
    sweep = ov.ablation_sweep(model, trace, answer=" little", against=" big")
    line, points = F.effects(sweep, named=3).data
    assert list(points.x) == sweep["direct_effect"].tolist() and list(points.y) == sweep["total_effect"].tolist()
    size = sweep["direct_effect"].abs() + sweep["total_effect"].abs()
    assert {text for text in points.text if text} == set(sweep.loc[size.nlargest(3).index, "head"])
    assert list(line.x) == list(line.y) and min(line.x) <= min(points.x) and max(line.x) >= max(points.y)


def test_means_have_their_intervals():
    model = ov.load()
    frame = ov.attribute(model, ov.prompts.load("repeated_tokens", model, n=6))
    (bars,) = F.means(frame, n=7).data
    wanted = frame.loc[frame["mean"].abs().nlargest(7).index]
    assert list(bars.x) == wanted["mean"].tolist()
    assert np.asarray(bars.x) + np.asarray(bars.error_x.array) == pytest.approx(wanted["high"].to_numpy())
    assert np.asarray(bars.x) - np.asarray(bars.error_x.arrayminus) == pytest.approx(wanted["low"].to_numpy())
    heads = [f"head {head}" for head in wanted["head"].dropna()]
    assert [name for name in bars.customdata if name.startswith("head")] == heads
    assert "95 % intervals" in F.means(frame).layout.title.text


def test_a_continuation_is_heads_by_steps():
    model = ov.load()
    heads = ov.generate(model, "the people of the", 3).heads()
    figure = F.continuation(heads, n=5)
    (heat,) = figure.data
    z, labels = np.asarray(heat.z), [row[0] for row in heat.customdata]
    values = heads.set_index(["head", "step"])["value"]
    assert z == pytest.approx(np.array([[values[label, step] for step in range(3)] for label in labels]))
    assert set(labels) == set(heads.groupby("head")["value"].apply(lambda v: v.abs().max()).nlargest(5).index)
    assert labels == sorted(labels, key=lambda label: [int(part) for part in label.split(".")])
    assert [text.split(": ")[1] for text in figure.layout.xaxis.ticktext] == [
        visible(token) for token in heads.drop_duplicates("step")["token"]
    ]


def test_distances_are_shares_that_sum_to_one():
    scan = ov.scan(ov.load(), tokens=300, window=64)
    figure = F.distances(scan.distributions, "0.0")
    (bars,) = figure.data
    assert sum(bars.y) == pytest.approx(1, abs=1e-5)
    assert bars.y[figure.layout.xaxis.ticktext.index("1")] > 0.9, "0.0 attends to the token before"
    with pytest.raises(CircuitsError, match="no distances of head"):
        F.distances(scan.distributions, "9.9")


def test_the_map_of_heads(story):
    frame = ov.space_map(story[0])
    for space in ("write", "read"):
        (points,) = F.space_map(frame, space).data
        assert list(points.x) == frame[f"{space}_x"].tolist() and list(points.y) == frame[f"{space}_y"].tolist()
        share = frame.attrs["shares"][space][0]
        assert f"{100 * share:.1f} % of the variance" in F.space_map(frame, space).layout.xaxis.title.text
    with pytest.raises(CircuitsError, match="choose write or read"):
        F.space_map(frame, "sideways")


@pytest.mark.parametrize("name", [
    "composition_graph", "singular_directions", "attribution_map", "waterfall", "effects", "continuation", "means",
])  # fmt: skip
def test_a_frame_of_another_origin_is_refused_in_a_sentence(name):
    frame = pd.DataFrame({"a": [1.0, 2.0]})
    with pytest.raises(CircuitsError, match=f"figures.{name} draws another frame: this one has no"):
        getattr(ov.figures, name)(frame)


def test_distances_and_maps_of_another_frame_too():
    frame = pd.DataFrame({"a": [1.0, 2.0]})
    for draw in (lambda: ov.figures.distances(frame, "0.0"), lambda: ov.figures.space_map(frame, "write"),
                 lambda: ov.figures.spectrum(frame), lambda: ov.figures.head_map(frame, "a")):  # fmt: skip
        with pytest.raises(CircuitsError):
            draw()


def test_a_column_that_is_not_there_is_named(story):
    with pytest.raises(CircuitsError, match="no column 'copyng'"):
        F.head_map(story[2], "copyng")
    with pytest.raises(CircuitsError, match="no column 'layer'"):
        F.head_map(pd.DataFrame({"a": [1.0, 2.0]}), "a")


@pytest.mark.parametrize(
    "draw",
    [
        lambda board: F.head_map(board, "head"),
        lambda board: F.score_scatter(board, "ov_stable_rank", "reads_plus"),
        lambda board: F.score_scatter(board, "ov_stable_rank", "ov_stable_rank", colour="head"),
    ],
)
def test_a_column_of_words_is_no_score(story, draw):
    with pytest.raises(CircuitsError, match=r"holds no numbers: draw one of layer, index, .*ov_stable_rank"):
        draw(story[2])


def test_figures_can_be_restyled(story):
    figure = F.head_map(story[2], "ov_frobenius_norm").update_layout(title="Mine", template="plotly_dark", width=300)
    assert figure.layout.title.text == "Mine" and figure.layout.width == 300


NASTY = ["<b>x</b>", "</script><img src=x>", "&lt;", " a", "\n", "\udce2", "\u202e", ""]


@needs_browser
def test_a_saved_figure_is_the_figure(story, tmp_path):
    figure = F.head_map(story[2], "eigen_copying_full").update_layout(width=360, height=280)
    for ending in (".svg", ".png", ".html"):
        F.save(figure, tmp_path / f"a{ending}")
    svg = (tmp_path / "a.svg").read_text()
    assert re.search(r'<svg[^>]* width="360" height="280"', svg) and "Eigenvalue copying, vocabulary" in svg
    png = (tmp_path / "a.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", png[16:24]) == (720, 560)
    assert "Plotly.newPlot" in (tmp_path / "a.html").read_text()


def test_a_figure_is_not_saved_as_what_it_is_not_nor_where_nothing_draws(story, tmp_path, monkeypatch):
    figure = F.head_map(story[2], "eigen_copying_full")
    with pytest.raises(CircuitsError, match=r"as \.svg, \.png or \.html, not as '.*a\.pdf'"):
        F.save(figure, tmp_path / "a.pdf")
    monkeypatch.setattr("ov_circuits.report.stills._has_kaleido", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CircuitsError, match="install Chromium, or kaleido"):
        F.save(figure, tmp_path / "a.svg")
    assert not list(tmp_path.iterdir())


def test_token_text_is_no_markup():
    pattern = F.attention_pattern(torch.eye(len(NASTY)), NASTY)
    shown = pattern.layout.xaxis.ticktext
    assert shown[0] == "&lt;b&gt;x&lt;/b&gt;" and shown[2] == "&amp;lt;"
    assert shown[3:] == ("·a", "↵", "xE2", "U+202E", "∅")
    rows = [
        ("+", side, k, token, 1.0 + k)
        for side in ("read", "write")
        for k, token in enumerate(NASTY)
        if token != "\udce2"
    ]
    frame = pd.DataFrame(rows, columns=["end", "side", "id", "token", "value"])
    text = F.singular_directions(frame).to_json()
    assert "<b>" not in text and "<img" not in text


@pytest.mark.parametrize(("token", "shown"), [
    (" Paris", "·Paris"),
    ("\tx", "⇥x"), ("\x00", "U+0000"), ("a\u00a0b", "aNBSPb"), ("é", "é"), ("שלום", "שלום"), ("\u2028", "U+2028"),
])  # fmt: skip
def test_what_does_not_show_gets_a_mark(token, shown):
    assert visible(token) == shown

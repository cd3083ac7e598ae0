"""Weights that are not finite: the tensor is named, the head's scores are NaN, the rest of the table stands."""

from __future__ import annotations

import math

import pandas as pd
import pytest

import ov_circuits as ov
from ov_circuits import CircuitsError
from ov_circuits.scores.board import all_scores

ALL = ["0.0", "0.1", "0.2", "0.3"]
CASES = {
    "h.0.attn.c_attn.weight": ((3, 33), ["0.1"]),  # W_Q
    "h.0.attn.c_attn.bias": ((2 * 128 + 65,), ["0.2"]),  # b_V
    "h.0.attn.c_proj.weight": ((100, 4), ["0.3"]),
    "h.0.ln_1.weight": ((5,), ALL),
    "h.0.ln_1.bias": ((5,), ALL),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_tensor_is_named_and_only_its_heads_have_no_scores(tiny_gpt2_char, copy_of, name, value):
    where, heads = CASES[name]

    def change(tensors):
        tensors[f"transformer.{name}"][where] = value

    model, whole = ov.load(copy_of(tiny_gpt2_char, change)), ov.load(tiny_gpt2_char)
    scores = ["ov_entropy_rank", "qk_stable_rank", "rank_copying_10"]
    frames = {
        "board": (ov.scoreboard(model, scores, tokens=0), ov.scoreboard(whole, scores, tokens=0)),
        "ranks": (ov.rank_copying(model), ov.rank_copying(whole)),
        "names": (ov.ioi_copying(model, names=["a", "b"]), ov.ioi_copying(whole, names=["a", "b"])),
    }
    for what, (found, right) in frames.items():
        broken = found["head"].isin(heads)
        columns = [column for column in found if column not in ("head", "layer", "index", "kv_head")]
        assert found.loc[broken, columns].isna().all(axis=None), what
        pd.testing.assert_frame_equal(
            found[~broken], right[~broken], rtol=1e-9
        )  # heads of a layer share a road to their roots
        (note,) = found.attrs["notes"]
        assert note.startswith(name) and "NaN or infinity" in note, what
    assert frames["ranks"][1].attrs["notes"] == []


@pytest.mark.parametrize(
    "ask",
    [
        lambda head: head.reads(),
        lambda head: head.writes("a"),
        lambda head: ov.span(head, [0]),
        lambda head: ov.spectrum(head),
        lambda head: ov.component_composition(head.model, head.label),
        lambda head: ov.strongest_token_pairs(head.model, head),
        lambda head: ov.largest_query_key_pairs(head.model, head),
        lambda head: ov.position_pattern(head.model, head),
    ],
)
def test_a_head_alone_is_refused_by_the_tensors_name(tiny_gpt2_char, copy_of, ask):
    def change(tensors):
        tensors["transformer.h.0.attn.c_attn.weight"][3, [32, 128 + 32, 2 * 128 + 32]] = math.nan

    with pytest.raises(CircuitsError, match=r"h\.0\.attn\.c_attn\.weight \(W_Q\) holds NaN"):
        ask(ov.load(copy_of(tiny_gpt2_char, change)).head("0.1"))


@pytest.mark.parametrize("name", ["h.0.mlp.c_fc.weight", "h.0.ln_2.bias", "h.0.mlp.c_proj.bias"])
def test_a_broken_first_mlp_costs_the_scores_that_read_through_it(tiny_gpt2_char, copy_of, name):
    def change(tensors):
        tensors[f"transformer.{name}"].view(-1)[7] = math.nan

    model = ov.load(copy_of(tiny_gpt2_char, change))
    for source in ("embed_mlp0", "embed_plus_mlp0", "effective"):
        with pytest.raises(CircuitsError, match=f"{name} holds NaN or infinity"):
            ov.rank_copying(model, source=source)
    assert ov.rank_copying(model)["rank_copying_1"].notna().all()
    board = ov.scoreboard(model, "all", tokens=0)
    assert name in board.attrs["left_out"]["relation_number_successor"]
    assert board[[key for key in all_scores() if key in board]].notna().all(axis=None)


def test_an_effective_source_with_a_broken_head_names_it(tiny_gpt2_char, copy_of):
    def change(tensors):
        tensors["transformer.h.0.attn.c_proj.weight"][100, 4] = math.inf

    with pytest.raises(
        CircuitsError, match=r"c_proj\.weight \(W_O\) holds NaN or infinity: heads 0\.3 .*use source 'embed'"
    ):
        ov.rank_copying(ov.load(copy_of(tiny_gpt2_char, change)), source="effective")

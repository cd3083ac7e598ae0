"""The sentence of a card: every clause on a number, no word that a number does not carry."""

from __future__ import annotations

import pandas as pd
import pytest

from ov_circuits.report.evidence import prompt_clause, sentence

VOCABULARY = "Its eigenvalues over the vocabulary are "
END = {"plus": [[0, 2.0], [1, 1.0]], "minus": [[2, 2.0], [3, 1.0]]}
CARD = {"directions": [{"value": 3.0, "energy": 0.123, "separable": True, "reads": END, "writes": END}]}
BARE = {"directions": None}


def flat(parts):
    return "".join(
        part if isinstance(part, str) else f"[{'t' if 'token' in part else 'h'}{next(iter(part.values()))}]"
        for part in parts
    )


def pairs(*rows):
    return pd.DataFrame(rows, columns=["kind", "other", "z_paired"])


@pytest.mark.parametrize(("row", "said"), [
    ({"eigen_copying_full": 0.97, "eigen_copying_full_z": 12.3}, VOCABULARY + "mostly positive (copying +0.97, z 12)."),
    ({"eigen_copying_full": -0.7, "eigen_copying_full_z": -3.0}, VOCABULARY + "mostly negative (copying −0.70, z −3)."),
    ({"eigen_copying_full": 0.97, "eigen_copying_full_z": 123.4}, VOCABULARY + "mostly positive (copying +0.97, z 123)."),
    ({"eigen_copying_full": 0.4}, VOCABULARY + "of both signs (copying +0.40)."),
    ({"eigen_copying_full": float("nan"), "eigen_copying_ov": 0.9},
     "Its eigenvalues in residual space are mostly positive (copying +0.90)."),
    ({"rank_copying_10": 0.84, "eigen_copying_full": 0.9},
     "Copies: its own token is among the 10 most raised for 84 % of tokens; "
     "its eigenvalues over the vocabulary are mostly positive (copying +0.90)."),
    ({"rank_suppression_10": 0.6}, "Suppresses: its own token is among the 10 most lowered for 60 % of tokens."),
    ({"rank_copying_10": 0.49}, ""),
    ({}, ""),
])  # fmt: skip
def test_copying_is_said_where_tokens_are_copied(row, said):
    assert flat(sentence(pd.Series(row, dtype=float), BARE, None, None)) == said


@pytest.mark.parametrize(("row", "said"), [
    ({"induction": 0.94, "induction_null_mean": 0.03, "first_token": 0.02, "first_token_null_mean": 0.02},
     "On probe prompts it attends mostly to the token after an earlier occurrence (induction 0.94, by chance 0.03)."),
    ({"self_attention": 0.3, "self_attention_null_mean": 0.02},
     "On probe prompts it attends in part to the token itself (self 0.30, by chance 0.02)."),
    # More attention in all, less above chance.
    ({"delimiter": 0.5, "delimiter_null_mean": 0.4, "previous_token": 0.45, "previous_token_null_mean": 0.05},
     "On probe prompts it attends in part to the token before (previous token 0.45, by chance 0.05)."),
    ({"delimiter": 0.5, "delimiter_null_mean": 0.4}, ""),
    ({"induction": float("nan"), "induction_null_mean": float("nan")}, ""),
    # Not a share of attention.
    ({"random_copying": 0.9, "random_copying_null_mean": -0.9}, ""),
])  # fmt: skip
def test_attention_is_said_where_much_of_it_goes_to_one_place(row, said):
    assert flat(sentence(pd.Series(row, dtype=float), BARE, None, None)) == said


def test_links_of_one_kind_stand_together_and_none_are_invented():
    incoming = pairs(("K", 7, 9.04), ("K", 3, 4.5), ("V", 2, 4.0))
    outgoing = pairs(("Q", 11, 5.0), ("V", 12, 3.3))
    said = flat(sentence(pd.Series(dtype=float), BARE, incoming, outgoing))
    assert said == (
        "It reads from [h7] and [h3] by K-composition (z 9, 4.5); "
        "it feeds [h11] by Q-composition (z 5) and [h12] by V-composition (z 3.3)."
    )
    assert flat(sentence(pd.Series(dtype=float), BARE, None, outgoing)).startswith("It feeds [h11]")
    assert sentence(pd.Series(dtype=float), BARE, pairs(), pairs()) == []


def test_both_ends_are_read_and_an_unsettled_direction_is_said():
    said = flat(sentence(pd.Series(dtype=float), CARD, None, None))
    assert said == (
        "Its strongest direction (12 % of the squared norm of OV) reads [t0] [t1] and writes [t0] [t1]; "
        "at its other end it reads [t2] [t3] and writes [t2] [t3]."
    )
    loose = {"directions": [{**CARD["directions"][0], "separable": False}]}
    assert "not separable" in flat(sentence(pd.Series(dtype=float), loose, None, None))
    for energy, share in ((0.004, "< 1 %"), (0.0, "0 %"), (None, "0 %")):
        weak = {"directions": [{**CARD["directions"][0], "energy": energy}]}
        assert f"direction ({share} of the squared norm" in flat(sentence(pd.Series(dtype=float), weak, None, None))


@pytest.mark.parametrize(("head", "said"), [
    (0, " On the prompt it moves +0.50 to the logit: number 2 for it of 4 heads."),
    (1, " On the prompt it moves +2.00 to the logit: the most for it of 4 heads."),
    (2, " On the prompt it moves −0.0012 to the logit: number 2 against it of 4 heads."),
    (3, " On the prompt it moves −1.00 to the logit: the most against it of 4 heads."),
])  # fmt: skip
def test_the_prompts_clause_counts_on_its_own_side(head, said):
    assert flat(prompt_clause([0.5, 2.0, -0.0012, -1.0], head, ["logit"])) == said


def test_an_unknown_attribution_says_nothing():
    assert prompt_clause([None, 1.0], 0, ["logit"]) == []

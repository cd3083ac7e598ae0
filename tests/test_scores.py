"""Every score of the board against dense float64 straight from its definition, and directions against a dense SVD."""

from __future__ import annotations

import math

import pandas as pd
import pytest
import torch

import ov_circuits as ov
from ov_circuits import CircuitsError
from ov_circuits.scores import spectra
from ov_circuits.scores.board import SCORES, all_scores
from ov_circuits.scores.directions import directions, inseparable_runs, separable


def dense_scores(model, head):
    """Each score from dense float64 matrices, with none of the package's algebra."""
    W_V, W_O = head.W_V.double(), head.W_O.double()
    ov_matrix = W_V @ W_O
    scale = model.architecture.d_head**-0.5 if model.architecture.scale_scores else 1.0
    scale = scale / (head.layer + 1) if model.architecture.scale_by_layer else scale
    qk = head.W_Q.double() @ head.W_K.double().T * scale
    s, s_qk = torch.linalg.svdvals(ov_matrix), torch.linalg.svdvals(qk)
    values = {
        "eigen_copying_ov": copying(ov_matrix),
        "ov_frobenius_norm": ov_matrix.square().sum().sqrt(),
        "ov_spectral_norm": s[0],
        "ov_stable_rank": s.square().sum() / s[0] ** 2,
        "ov_participation_ratio": s.square().sum() ** 2 / s.pow(4).sum(),
        "ov_entropy_rank": entropy_rank(s),
        "qk_frobenius_norm": qk.square().sum().sqrt(),
        "qk_spectral_norm": s_qk[0],
        "qk_stable_rank": s_qk.square().sum() / s_qk[0] ** 2,
        "qk_participation_ratio": s_qk.square().sum() ** 2 / s_qk.pow(4).sum(),
        "qk_entropy_rank": entropy_rank(s_qk),
        "value_bias_norm": 0.0 if head.b_V is None else (head.b_V.double() @ W_O).norm(),
    }
    if model.has_embeddings:
        full = model.W_E.double() @ ov_matrix @ model.W_U.double()
        s_full = torch.linalg.svdvals(full)
        values |= {
            "eigen_copying_full": copying(full),
            "full_ov_frobenius_norm": full.square().sum().sqrt(),
            "full_ov_spectral_norm": s_full[0],
            "full_ov_stable_rank": s_full.square().sum() / s_full[0] ** 2,
            "full_ov_participation_ratio": s_full.square().sum() ** 2 / s_full.pow(4).sum(),
            "full_ov_entropy_rank": entropy_rank(s_full),
        }
    return {key: float(value) for key, value in values.items()}


def copying(matrix):
    eigenvalues = torch.linalg.eigvals(matrix)
    return eigenvalues.real.sum() / eigenvalues.abs().sum()


def entropy_rank(s):
    return math.exp(-sum(float(p) * math.log(float(p)) for p in s / s.sum() if p > 1e-15))


def views(model):
    return ("raw", "folded", "centred") if model.architecture.norm == "LayerNorm" else ("raw", "folded")


def test_every_score_is_the_dense_float64_one_in_every_view(any_folder):
    for view in views(ov.load(any_folder)):
        model = ov.load(any_folder, view=view)
        board = ov.scoreboard(model, tokens=0).set_index("head")
        heads = list(model.heads())
        for head in heads if len(heads) <= 40 else heads[:: len(heads) // 6]:
            for key, expected in dense_scores(model, head).items():
                # The dense matrices' own zero eigenvalues are noise of about 1e-16 n each: it bounds what the oracle can say.
                tolerance = 1e-5 if "copying" in key else 1e-6
                assert board.loc[head.label, key] == pytest.approx(expected, rel=tolerance, abs=tolerance), (view, key)


def test_the_board_has_one_row_a_head_in_order_and_says_its_view(any_folder):
    model = ov.load(any_folder)
    board = ov.scoreboard(model, tokens=0)
    assert list(board["head"]) == model.head_labels
    group = model.n_heads // model.architecture.n_kv_heads
    assert list(board["kv_head"]) == [head.index // group for head in model.heads()]
    assert board.attrs["view"] == model.view
    expected = [key for key, score in SCORES.items() if model.has_embeddings or not score.needs_embeddings]
    assert [column for column in board.columns if column in SCORES] == expected
    assert set(board.attrs["left_out"]) >= {key for key in SCORES if key not in expected}
    assert set(board.attrs["sources"]) == set(expected)


def test_scores_stay_within_their_stated_range(any_folder):
    board = ov.scoreboard(ov.load(any_folder), tokens=0)
    for key, score in SCORES.items():
        if score.range is not None and key in board:
            assert board[key].between(*score.range).all(), key


def test_known_heads_of_real_models_score_as_known(tiny_gpt2_char, gpt_nano_sort):
    """../shared/models: induction heads 1.0 to 1.3 copy at +.98; heads 0.0, 0.1, 0.2 of the sorter above .98."""
    char = ov.scoreboard(ov.load(tiny_gpt2_char), ["eigen_copying_full"]).set_index("head")["eigen_copying_full"]
    assert char["1.0":"1.3"].between(0.97, 0.99).all() and char["0.0":"0.3"].lt(0.9).all()
    sort = ov.scoreboard(ov.load(gpt_nano_sort), ["eigen_copying_full"]).set_index("head")["eigen_copying_full"]
    assert sort["0.0":"0.2"].gt(0.98).all()


def test_scores_can_be_chosen_and_unknown_ones_name_the_nearest(tiny_gpt2_char, gpt2_small_attention):
    board = ov.scoreboard(ov.load(tiny_gpt2_char), ["ov_stable_rank"], tokens=0, nulls=False)
    assert list(board.columns) == ["head", "layer", "index", "kv_head", "ov_stable_rank"]
    with pytest.raises(CircuitsError, match="did you mean 'ov_stable_rank'"):
        ov.scoreboard(ov.load(tiny_gpt2_char), ["ov_stabel_rank"])
    with pytest.raises(CircuitsError, match="needs embeddings"):
        ov.scoreboard(ov.load(gpt2_small_attention), ["eigen_copying_full"])


def test_a_zero_head_has_rank_zero_and_no_copying_score():
    zero = torch.zeros(3, 5, dtype=torch.float64)
    for rank in (spectra.stable_rank, spectra.participation_ratio, spectra.entropy_rank):
        assert torch.equal(rank(zero), torch.zeros(3, dtype=torch.float64))
    assert spectra.eigenvalue_copying(zero.to(torch.complex128)).isnan().all()


def test_a_spectrum_that_is_not_finite_has_no_rank():
    S = torch.tensor([[2.0, 1.0], [math.nan, math.nan]])
    for of in (spectra.stable_rank, spectra.participation_ratio, spectra.entropy_rank):
        found = of(S)
        assert found[0] > 1 and found[1].isnan(), of


def test_singular_values_are_not_eigenvalues(tiny_gpt2_char):
    """The trap: read as eigenvalues, singular values are all positive and every head copies."""
    head = ov.load(tiny_gpt2_char).head("0.0")
    fake = head.ov.singular_values.sum() / head.ov.singular_values.abs().sum()
    assert fake == 1.0 and abs(float(spectra.eigenvalue_copying(head.ov.eigenvalues))) < 0.9


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_head_that_is_not_finite_has_no_scores_and_the_rest_stands(models_dir, tmp_path, value):
    """One number of W_V of key/value head 1 in layer 2: query heads 2 and 3 read through it."""
    from safetensors.torch import load_file, save_file

    for file in (models_dir / "stories260k").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.2.self_attn.v_proj.weight"][9, 3] = value
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    board = ov.scoreboard(ov.load(tmp_path)).set_index("head")
    right = ov.scoreboard(ov.load(models_dir / "stories260k")).set_index("head")
    assert board.attrs["not_finite"] == ["2.2", "2.3"]
    scores = [column for column in board if column in SCORES]
    assert board.loc[["2.2", "2.3"], scores].isna().all(axis=None)
    assert board.loc["2.2", "reads_plus"] == []
    pd.testing.assert_frame_equal(board.drop(["2.2", "2.3"]), right.drop(["2.2", "2.3"]))


# -- directions ---------------------------------------------------------------------------------------------------------


def test_directions_are_those_of_a_dense_svd_read_through_the_vocabulary_at_both_ends(running_folder):
    model = ov.load(running_folder)
    n = min(4, model.architecture.n_vocab)
    for layer in range(model.n_layers):
        found = directions(model, layer, k=2, tokens=n)
        for index in range(model.n_heads):
            head = model.head(layer, index)
            U, S, Vh = torch.linalg.svd(head.W_V.double() @ head.W_O.double())
            for k in range(2):
                assert float(found.values[index, k]) == pytest.approx(float(S[k]), rel=1e-6)
                assert float(found.energy[index, k]) == pytest.approx(float(S[k] ** 2 / S.square().sum()), rel=1e-5)
                if not found.separable[index, k]:
                    continue
                read, write = model.W_E.double() @ U[:, k], Vh[k] @ model.W_U.double()
                sign = 1.0 if read.max() >= -read.min() else -1.0
                ends = [
                    (sign * read, found.reads.plus_values, found.reads.minus_values),
                    (sign * write, found.writes.plus_values, found.writes.minus_values),
                ]
                for projections, plus, minus in ends:
                    ordered = projections.sort(descending=True).values
                    size = float(projections.abs().max())
                    assert (plus[index, k] - ordered[:n]).abs().max() <= 1e-4 * size
                    assert (minus[index, k] - ordered.flip(0)[:n]).abs().max() <= 1e-4 * size


def test_board_tokens_are_the_ends_of_the_leading_direction(stories260k):
    model = ov.load(stories260k)
    board = ov.scoreboard(model, ["ov_stable_rank"], tokens=3).set_index("head")
    found = directions(model, 2, k=1, tokens=3)
    text = model.tokenizer.text
    assert board.loc["2.5", "reads_plus"] == [text(t) for t in found.reads.plus[5, 0].tolist()]
    assert board.loc["2.5", "writes_minus"] == [text(t) for t in found.writes.minus[5, 0].tolist()]


def test_what_a_head_writes_for_a_token_is_the_row_of_the_full_circuit(stories260k):
    model = ov.load(stories260k)
    head = model.head("3.6")
    token = model.tokenizer.single(" Lily")
    row = model.W_E[token].double() @ head.W_V.double() @ head.W_O.double() @ model.W_U.double()
    frame = head.writes(" Lily", k=4)
    assert list(frame.loc[frame["end"] == "raised", "id"]) == row.topk(4).indices.tolist()
    assert list(frame.loc[frame["end"] == "lowered", "id"]) == row.topk(4, largest=False).indices.tolist()
    assert frame["value"].iloc[0] == pytest.approx(float(row.max()), rel=1e-5)
    pd.testing.assert_frame_equal(frame, head.writes(token, k=4))


def test_near_equal_singular_values_are_flagged():
    values = torch.tensor([10.0, 9.95, 5.0, 4.0, 3.98])
    assert separable(values).tolist() == [False, False, True, False, False]
    assert separable(torch.tensor([2.0])).tolist() == [True]


def test_runs_of_near_equal_values_belong_together():
    values = torch.tensor([10.0, 9.95, 5.0, 4.0, 3.98, 3.97, 1.0])
    assert inseparable_runs(values) == [range(2), range(3, 6)]
    assert inseparable_runs(torch.tensor([3.0, 3.0])) == [range(2)]
    assert inseparable_runs(torch.tensor([3.0])) == []


def test_a_span_does_not_depend_on_its_basis_and_is_that_of_a_dense_svd(stories260k):
    model = ov.load(stories260k)
    head = model.head("3.6")
    U, _, Vh = torch.linalg.svd(head.W_V.double() @ head.W_O.double())
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    frame = ov.span(head, [1, 2, 4], k=5)
    for side, vocabulary, basis in (("read", model.W_E, U[:, [1, 2, 4]]), ("write", model.W_U.T, Vh[[1, 2, 4]].T)):
        lengths = (vocabulary.double() @ (basis @ turn)).norm(dim=1)
        rows = frame[frame["side"] == side]
        assert rows["id"].tolist() == lengths.topk(5).indices.tolist()
        assert rows["value"].tolist() == pytest.approx(lengths.topk(5).values.tolist(), rel=1e-5)
        assert rows["share"].between(0, 1).all()
    with pytest.raises(CircuitsError, match="pairs 0 to 7"):
        ov.span(head, [8])


def test_spectra_are_those_of_transformer_lens_factored_matrices(tiny_gpt2_char):
    from transformer_lens import FactoredMatrix

    model = ov.load(tiny_gpt2_char)
    for head in model.heads():
        theirs = FactoredMatrix(head.W_V, head.W_O)
        full = model.W_E @ theirs @ model.W_U
        for ours, right in ((head.ov, theirs), (head.full_ov, full)):
            assert torch.allclose(ours.singular_values.float(), right.svd()[1], rtol=1e-4, atol=1e-4)
            assert ours.frobenius_norm == pytest.approx(float(right.norm()), rel=1e-5)
            values = right.eigenvalues
            assert copying_of(ours.eigenvalues) == pytest.approx(copying_of(values), abs=1e-3)


def copying_of(eigenvalues):
    return float(eigenvalues.real.sum() / eigenvalues.abs().sum())


def test_directions_without_embeddings_are_refused(gpt2_small_attention):
    with pytest.raises(CircuitsError, match="no embeddings"):
        directions(ov.load(gpt2_small_attention), 0)


# -- scores over the vocabulary as columns, and one call a score ---------------------------------------------------------


def test_all_scores_stand_side_by_side_each_with_its_chance(stories260k):
    model = ov.load(stories260k)
    board = ov.scoreboard(model, "all", tokens=0)
    expected = [key for key in all_scores() if key not in board.attrs["left_out"]]
    assert [column for column in board if column in all_scores()] == expected
    assert {"rank_copying_1", "ioi_copying", "relation_verb_past"} <= set(expected) | set(board.attrs["left_out"])
    ranks = ov.rank_copying(model)
    for k in (1, 5, 10):
        assert board[f"rank_copying_{k}"].equals(ranks[f"rank_copying_{k}"])
        p = k / model.architecture.n_vocab
        assert (board[f"rank_copying_{k}_null_mean"] == p).all()
        z = (ranks[f"rank_copying_{k}"] - p) / math.sqrt(p * (1 - p) / model.architecture.n_vocab)
        assert (board[f"rank_copying_{k}_z"] - z).abs().max() < 1e-9
    assert board.attrs["nulls"]["rank_copying_1"].startswith("every order of the vocabulary alike")


def test_what_a_checkpoint_does_not_allow_is_left_out_of_all_and_refused_by_name(tiny_gpt2_char, gpt2_small_attention):
    """The character model has no token for any first name."""
    model = ov.load(tiny_gpt2_char)
    board = ov.scoreboard(model, "all", tokens=0)
    assert "ioi_copying" not in board and "name" in board.attrs["left_out"]["ioi_copying"]
    with pytest.raises(CircuitsError, match="single token"):
        ov.scoreboard(model, ["ioi_copying"])
    left_out = ov.scoreboard(ov.load(gpt2_small_attention), "all").attrs["left_out"]
    assert {"rank_copying_1", "eigen_copying_full", "relation_verb_past"} <= set(left_out)


def test_every_score_is_a_function_of_its_name(stories260k):
    model = ov.load(stories260k)
    board = ov.scoreboard(model, tokens=0)
    for key in ("ov_stable_rank", "eigen_copying_full"):
        frame = getattr(ov.scores, key)(model)
        assert list(frame.columns) == ["head", "layer", "index", "kv_head", key, f"{key}_null_mean", f"{key}_z"]
        assert frame[key].equals(board[key])
        assert SCORES[key].source in getattr(ov.scores, key).__doc__
    effective = ov.scores.rank_copying_1(model, source="effective")
    assert effective.attrs["source_embedding"] == "effective"
    assert effective["rank_copying_1"].equals(ov.rank_copying(model, source="effective")["rank_copying_1"])
    with pytest.raises(AttributeError, match="no score 'eigen_copying'"):
        ov.scores.eigen_copying  # noqa: B018


def test_public_names_are_what_they_say_even_after_their_modules_were_imported(tiny_gpt2_char):
    """A submodule of the same name would take a function's place in the package."""
    ov.load(tiny_gpt2_char).verify()
    for name in ov.__all__:
        value = getattr(ov, name)
        assert name in ("__version__", "distributed", "prompts", "scores", "figures") or callable(value), name


def test_every_result_says_its_view_and_where_its_definition_is_from(stories260k, tmp_path):
    model = ov.load(stories260k, view="folded")
    head, names = model.head("1.0"), ["Lily", "Tim"]
    pairs = tmp_path / "pairs.csv"
    pairs.write_text("source,target\nthe,a\n")
    over_tokens = {
        "embed": ov.rank_copying(model, "1.0"),
        "embed_plus_mlp0": ov.ioi_copying(model, "1.0", names=names),
        "embed_mlp0": ov.relation_scores(model, [pairs], heads="1.0"),
    }
    results = [
        *over_tokens.values(),
        ov.ioi_negative_copying(model, "1.0", names=names),
        ov.copy_table(model),
        ov.disagreements(ov.copy_table(model)),
        ov.composition(model),
        ov.strongest_paths(model, 3),
        ov.component_composition(model, "0.1"),
        ov.subspace_overlap(model),
        ov.space_map(model),
        ov.spectrum(head),
        ov.span(head, [0, 1]),
        head.reads(),
        head.writes(300),
        ov.strongest_token_pairs(model, head),
        ov.token_pair(model, 300, 301),
        ov.qk_spectra(model, 2).frame(),
        ov.largest_query_key_pairs(model, head, offset=2),
        ov.offset_profile(model, head, [0]),
    ]
    for frame in results:
        assert frame.attrs["model"] == model.name and frame.attrs["view"] in ("folded", "raw"), frame.attrs
        assert any(year in frame.attrs["source"] for year in ("19", "20", "sources")), frame.attrs
    for source, frame in over_tokens.items():
        assert frame.attrs["source_embedding"] == source
    table = ov.copy_table(model, nulls=True)
    assert set(table.attrs["sources"]) <= set(table) and "rank_copying_5_z" in table and "eigen_copying_ov_z" in table

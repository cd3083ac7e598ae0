"""The pruned search for extreme entries against the whole matrix, and the token pairs of OV circuits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ov_circuits as ov
from ov_circuits import CircuitsError
from ov_circuits.linalg import top_entries as module
from ov_circuits.linalg.top_entries import top_entries
from ov_circuits.scores.pairs import strongest_token_pairs, token_pair


def check_against_dense(A, B, k):
    """Same values, in order; the entries named hold them; none named twice."""
    M = A.double() @ B.double()
    found = top_entries(A, B, k)
    k = min(k, M.numel())
    tolerance = 1e-10 * max(float(A.double().norm() * B.double().norm()), 1e-300)
    for entries, largest in ((found.largest, True), (found.smallest, False)):
        right = M.flatten().topk(k, largest=largest).values
        assert len(entries.values) == k
        assert (entries.values - right).abs().max() <= tolerance
        assert (M[entries.rows, entries.columns] - entries.values).abs().max() <= tolerance
        assert len(set(zip(entries.rows.tolist(), entries.columns.tolist(), strict=True))) == k
    return found


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 90), m=st.integers(1, 90), r=st.integers(1, 12), k=st.integers(1, 200),
    seed=st.integers(0, 2**16), spread=st.sampled_from([0.0, 1.0, 3.0]), rank=st.integers(0, 12),
)  # fmt: skip
def test_top_entries_are_those_of_the_dense_matrix(n, m, r, k, seed, spread, rank):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    A = draw(n, r) * (spread * draw(n, 1)).exp()
    B = draw(r, min(rank, r)) @ draw(min(rank, r), m)
    block, module._BLOCK = module._BLOCK, 16
    try:
        check_against_dense(A, B, k)
    finally:
        module._BLOCK = block


def test_norms_prune_most_blocks():
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(3000, 8, generator=generator) * torch.randn(3000, 1, generator=generator).exp()
    B = torch.randn(8, 3000, generator=generator) * torch.randn(1, 3000, generator=generator).exp()
    block, module._BLOCK = module._BLOCK, 128
    try:
        assert check_against_dense(A, B, 30).visited < 0.1
    finally:
        module._BLOCK = block


def test_rounding_decides_no_rank():
    """Entries that differ by less than float32 can tell: float64 decides, ties go by row, then column."""
    A = torch.ones(40, 2, dtype=torch.float64)
    A[:, 1] = torch.arange(40) * 1e-12
    B = torch.ones(2, 3, dtype=torch.float64)
    found = top_entries(A, B, 3)
    assert found.largest.rows.tolist() == [39, 39, 39]
    assert found.smallest.rows.tolist() == [0, 0, 0]
    A[:, 1] = 0
    A[5] = A[9] = torch.tensor([2.0, 0.0])
    found = top_entries(A, B * torch.tensor([1.0, 0.5, 1.0]), 3)
    assert sorted(zip(found.largest.rows.tolist(), found.largest.columns.tolist(), strict=True))[:2] == [(5, 0), (5, 2)]


def test_zero_matrix_and_bad_input():
    found = top_entries(torch.zeros(3, 2), torch.ones(2, 4), 5)
    assert found.largest.values.tolist() == [0] * 5
    assert list(zip(found.largest.rows.tolist(), found.largest.columns.tolist(), strict=True))[-1] == (1, 0)
    with pytest.raises(ValueError, match="NaN or infinity"):
        top_entries(torch.full((3, 2), torch.nan), torch.ones(2, 4), 5)
    with pytest.raises(ValueError, match="from 1 on"):
        top_entries(torch.ones(3, 2), torch.ones(2, 4), 0)


def test_token_pairs_of_every_checkpoint_are_those_of_the_dense_circuit(running_folder, reference):
    model = ov.load(running_folder, view="raw")
    dense = reference(running_folder)
    layer, head = model.n_layers - 1, model.n_heads - 1
    V = dense.reader(layer, "V", dense.kv_head(head))
    full = dense.W_E @ V @ dense.W_O(layer, head) @ dense.W_U
    frame = strongest_token_pairs(model, f"{layer}.{head}", k=7)
    scale = float(full.abs().max())
    for end, largest in (("positive", True), ("negative", False)):
        part = frame[frame.end == end]
        right = full.flatten().topk(7, largest=largest).values
        assert part.value.tolist() == pytest.approx(right.tolist(), abs=1e-5 * scale)
        named = full[part.source_id.tolist(), part.output_id.tolist()].tolist()
        assert part.value.tolist() == pytest.approx(named, abs=1e-5 * scale)
    assert frame.attrs["view"] == "raw"
    assert frame.attrs["head"] == f"{layer}.{head}"


def test_a_token_pair_of_every_checkpoint_is_an_entry_of_each_dense_circuit(running_folder, reference):
    model = ov.load(running_folder, view="raw")
    dense = reference(running_folder)
    source, output = 1, model.architecture.n_vocab - 1
    frame = token_pair(model, source, output).set_index("head")
    for label in model.head_labels:
        layer, head = (int(part) for part in label.split("."))
        V = dense.reader(layer, "V", dense.kv_head(head))
        row = dense.W_E[source] @ V @ dense.W_O(layer, head) @ dense.W_U
        scale = float(row.abs().max())
        assert frame["value"][label] == pytest.approx(float(row[output]), abs=1e-5 * scale)
        assert frame["above_mean"][label] == pytest.approx(float(row[output] - row.mean()), abs=1e-5 * scale)
        # Where others are as near as rounding, either rank is right.
        low, high = (int((row > row[output] + d * scale).sum()) + 1 for d in (1e-6, -1e-6))
        assert low <= frame["rank"][label] <= high


def test_the_largest_entry_of_a_head_is_the_first_of_its_row(tiny_gpt2_char, gpt2_small_attention):
    model = ov.load(tiny_gpt2_char)
    first = strongest_token_pairs(model, "1.0", k=1).iloc[0]
    frame = token_pair(model, first["source"], first["output"])
    row = frame.set_index("head").loc["1.0"]
    assert row["rank"] == 1 and row["value"] == pytest.approx(first["value"], rel=1e-5)
    assert (frame.attrs["source_token"], frame.attrs["output_token"]) == (first["source"], first["output"])
    with pytest.raises(CircuitsError, match="no embeddings"):
        token_pair(ov.load(gpt2_small_attention), 1, 2)


def test_copying_heads_pair_tokens_with_themselves(tiny_gpt2_char):
    frame = strongest_token_pairs(ov.load(tiny_gpt2_char), "1.0", k=5)
    positive = frame[frame.end == "positive"]
    assert (positive.source_id == positive.output_id).all()
    assert (positive.source == positive.output).all()


def test_token_pairs_need_embeddings_and_finite_weights(gpt2_small_attention, tiny_gpt2_char):
    with pytest.raises(CircuitsError, match="no embeddings"):
        strongest_token_pairs(ov.load(gpt2_small_attention), "0.0")
    with pytest.raises(CircuitsError, match="from 1 on"):
        strongest_token_pairs(ov.load(tiny_gpt2_char), "0.0", k=0)


def test_entries_that_tie_go_by_row_then_column_of_the_matrix_and_not_of_the_sorted_factors():
    """[[1, 2], [2, 4]], its rows and columns by falling norm."""
    factor, ids = torch.tensor([[2.0], [1.0]], dtype=torch.float64), torch.tensor([1, 0])
    end = module._End(factor, factor, ids, ids, 2, 1)
    end.offer(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]))
    found = end.entries()
    assert found.rows.tolist() == [1, 0] and found.columns.tolist() == [1, 1] and found.values.tolist() == [4, 2]

"""Ranks over the vocabulary against the dense product in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ov_circuits as ov
from ov_circuits.linalg.vocab_ranks import capped_ranks, full_ranks


def dense_ranks(A: Tensor, B: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Strictly larger and strictly smaller logits, row by row, from the whole float64 product.

    Entry by entry, so that equal columns give equal logits (a matrix product may sum them in different orders).
    """
    larger, smaller = [], []
    for a, t in zip(A.double(), own.tolist(), strict=True):
        logits = (B.double().T * a).sum(dim=1)
        larger.append(int((logits > logits[t]).sum()))
        smaller.append(int((logits < logits[t]).sum()))
    return torch.tensor(larger), torch.tensor(smaller)


def check(A: Tensor, B: Tensor, own: Tensor, caps: tuple[int, ...] = (1, 5, 10)) -> None:
    larger, smaller = dense_ranks(A, B, own)
    full = full_ranks(A, B, own)
    assert torch.equal(full.larger, larger)
    assert torch.equal(full.smaller, smaller)
    for cap in caps:
        capped = capped_ranks(A, B, own, cap)
        assert torch.equal(capped.larger, larger.clamp(max=cap))
        assert torch.equal(capped.smaller, smaller.clamp(max=cap))


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 6),
    st.integers(0, 10**6),
    st.sampled_from([1, 2, 5, 100]),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_small_whole_numbers_full_of_ties(n: int, m: int, r: int, seed: int, cap: int, double: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if double else torch.float32
    A = torch.randint(-2, 3, (n, r), generator=generator).to(dtype)
    B = torch.randint(-2, 3, (r, m), generator=generator).to(dtype)
    check(A, B, torch.randint(0, m, (n,), generator=generator), caps=(cap,))


@pytest.mark.parametrize(("n", "r"), [(300, 16), (700, 3), (50, 64)])
def test_many_columns(n: int, r: int) -> None:
    """Enough columns for every screen and several blocks."""
    check(normal(n, r), normal(r, 5000, seed=1), torch.arange(n) * 7)


@pytest.mark.parametrize("noise", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_heads_that_copy_and_heads_that_suppress(noise: float, sign: int) -> None:
    """Most rows stay to the end: their own column is where they point."""
    B = normal(24, 4500)
    A = sign * (B.T + noise * normal(4500, 24, seed=1))[:900]
    own = torch.arange(900)
    members = capped_ranks(A, B, own, 10)
    ours = members.larger if sign > 0 else members.smaller
    if noise < 1:
        assert (ours < 10).float().mean() > 0.5
    check(A, B, own)


def test_copies_of_a_column_are_ties() -> None:
    base = normal(16, 40)
    B = base.repeat(1, 100)
    A = base.T.repeat(3, 1)
    own = torch.arange(120) + 40 * 7
    check(A, B, own)
    assert int(capped_ranks(A, B, own, 10).larger.max()) < 10, "99 equal logits are not larger"


@pytest.mark.parametrize("gap", [1e-6, 1e-8, 1e-10])
def test_gaps_below_float32_are_decided_in_float64(gap: float) -> None:
    """Columns that differ by less than float32 can tell, given in float64."""
    base = normal(12, 1, dtype=torch.float64)
    B = base + gap * normal(12, 2500, seed=1, dtype=torch.float64)
    A = base.T + 0.1 * normal(60, 12, seed=2, dtype=torch.float64)
    check(A, B, torch.arange(60) * 11)


def test_a_large_common_vector_does_not_hide_the_order() -> None:
    B = normal(20, 3000) + 1000 * normal(20, 1, seed=1)
    check(normal(200, 20, seed=2), B, torch.arange(200))


@pytest.mark.parametrize("scale", [1e-36, 1e-26, 1e-21, 1e-18, 1e30])
def test_scales_that_overflow_or_vanish_when_squared(scale: float) -> None:
    A = normal(50, 8)
    A[::2] *= scale
    check(A, normal(8, 60, seed=1), torch.arange(50))
    check(A, normal(8, 60, seed=1) * 1e-30, torch.arange(50))


def test_a_head_that_writes_nothing_ties_everywhere() -> None:
    A, B, own = normal(40, 4), torch.zeros(4, 3000), torch.arange(40)
    for left, right in ((A, B), (torch.zeros_like(A), normal(4, 3000)), (A, torch.ones(4, 3000))):
        check(left, right, own)
        assert int(capped_ranks(left, right, own, 10).larger.sum()) == 0


def test_some_rows_of_zeros() -> None:
    A = normal(60, 8)
    A[10:20] = 0
    check(A, normal(8, 2100, seed=3), torch.arange(60))


def test_more_places_than_columns() -> None:
    A, B, own = normal(7, 3), normal(3, 4), torch.tensor([0, 1, 2, 3, 0, 1, 2])
    check(A, B, own, caps=(4, 50))
    assert int(capped_ranks(A, B, own, 50).larger.max()) <= 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_without_an_order_are_refused(bad: float) -> None:
    A, B = normal(5, 3), normal(3, 5)
    for which in (A, B):
        broken = which.clone()
        broken[1, 2] = bad
        factors = (broken, B) if which is A else (A, broken)
        for ranks in (full_ranks, lambda *x: capped_ranks(*x, 3)):
            with pytest.raises(ValueError, match="NaN or infinity"):
                ranks(*factors, torch.arange(5))


def test_every_head_of_the_real_models(runnable_model: Path, reference: Callable[[Path], Any]) -> None:
    model, right = ov.load(runnable_model, view="raw"), reference(runnable_model)
    own = torch.arange(model.architecture.n_vocab)
    for head in model.heads():
        A = right.W_E @ right.reader(head.layer, "V", right.kv_head(head.index))
        B = right.W_O(head.layer, head.index) @ right.W_U
        larger, smaller = dense_ranks(A, B, own)
        ranks = capped_ranks(model.W_E @ head.W_V, head.W_O @ model.W_U, own, 10)
        # A and B are rounded to float32 on our side: a row may differ only where the tenth place is that close.
        assert int((ranks.larger != larger.clamp(max=10)).sum()) <= 1
        assert int((ranks.smaller != smaller.clamp(max=10)).sum()) <= 1
        check((model.W_E @ head.W_V)[:40], head.W_O @ model.W_U, own[:40])

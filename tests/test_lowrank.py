"""LowRank and Sandwich against dense float64, on shapes and kinds that hypothesis makes."""

from __future__ import annotations

from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from conftest import relative_error
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ov_circuits.linalg.lowrank import Grams, LowRank, Sandwich, gram

TOLERANCE = 1e-6
EPS = torch.finfo(torch.float64).eps

settings.register_profile(
    "ov", deadline=None, max_examples=80, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("ov")

KINDS = (
    "random",
    "zero",
    "zero left",
    "rank-deficient",
    "repeated columns",
    "badly scaled",
    "ill-conditioned",
    "orthogonal",
)


@dataclass(frozen=True)
class Case:
    """What hypothesis draws; small enough to be read in a failure report."""

    n: int
    m: int
    r: int
    batch: tuple[int, ...] = ()
    kind: str = "random"
    seed: int = 0
    dtype: torch.dtype = torch.float64

    def factors(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*self.batch, *shape, generator=generator, dtype=torch.float64)

        left, right = draw(self.n, self.r), draw(self.r, self.m)
        if self.kind == "zero":
            left, right = left * 0, right * 0
        elif self.kind == "zero left":
            left = left * 0
        elif self.kind == "rank-deficient":
            inner = max(1, self.r // 2)
            left = draw(self.n, inner) @ draw(inner, self.r)
        elif self.kind == "repeated columns":
            left = left[..., :1].expand(left.shape).clone()
        elif self.kind == "badly scaled":
            left, right = left * 1e6, right * 1e-6
        elif self.kind == "ill-conditioned":
            left = left * torch.logspace(-6, 6, self.r, dtype=torch.float64)
            right = right * torch.logspace(3, -3, self.r, dtype=torch.float64).unsqueeze(-1)
        elif self.kind == "orthogonal":  # all singular values of a factor are equal
            left = torch.linalg.qr(left).Q if self.n >= self.r else torch.linalg.qr(left.mT).Q.mT
        return left.to(self.dtype), right.to(self.dtype)


sizes = st.integers(1, 9)
cases = st.builds(
    Case,
    n=sizes,
    m=sizes,
    r=st.integers(1, 11),
    batch=st.sampled_from([(), (1,), (3,), (2, 2)]),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
square_cases = st.builds(
    lambda case: Case(case.n, case.n, *(case.r, case.batch, case.kind, case.seed, case.dtype)), cases
)
one_matrix = st.builds(lambda case: Case(case.n, case.m, case.r, (), case.kind, case.seed, case.dtype), cases)


def edge_cases(test):
    """The cases that must never be left to chance."""
    for case in (
        Case(7, 5, 3),
        Case(2, 5, 4),  # n < r
        Case(5, 2, 4),  # m < r
        Case(2, 2, 9),  # both
        Case(6, 6, 1),
        Case(1, 1, 1),
        Case(5, 5, 3, kind="zero"),
        Case(5, 5, 4, kind="rank-deficient", dtype=torch.float32),
        Case(6, 6, 4, (3,), "ill-conditioned"),
    ):
        test = example(case)(test)
    return test


def made(case: Case) -> tuple[LowRank, Tensor]:
    """The product and its dense float64 value, from the same (perhaps float32) factors."""
    left, right = case.factors()
    return LowRank(left, right), left.double() @ right.double()


def factor_scale(product: LowRank) -> Tensor:
    """||A||_F ||B||_F: what rounding in the stored precision is relative to where the factors cancel."""
    return torch.linalg.matrix_norm(product.left.double()) * torch.linalg.matrix_norm(product.right.double())


def assert_same(ours: Tensor, right: Tensor, tolerance: float = TOLERANCE) -> None:
    error = relative_error(ours, right)
    assert error <= tolerance, f"off by {error:.2e} of the largest entry"


def assert_product(ours: Tensor, right: Tensor, scale: Tensor | float) -> None:
    """For results in the factors' own precision: 1e-6 of the size of the factors (see factor_scale)."""
    assert ours.shape == right.shape
    assert float((ours.double() - right).abs().max()) <= TOLERANCE * float(torch.as_tensor(scale).max())


# -- products ---------------------------------------------------------------------------------------------------------


@given(cases)
@edge_cases
def test_dense_is_the_product_in_the_precision_of_its_factors(case):
    product, dense = made(case)
    assert product.dense().dtype == case.dtype
    assert product.shape == dense.shape
    assert product.rank == case.r
    assert_product(product.dense(), dense, factor_scale(product))


@given(cases)
@edge_cases
def test_transpose_is_the_transposed_product_and_twice_is_the_product(case):
    product, dense = made(case)
    assert product.T.shape == dense.mT.shape
    assert_product(product.T.dense(), dense.mT, factor_scale(product))
    assert torch.equal(product.T.T.dense(), product.dense())
    assert_same(product.T.singular_values, product.singular_values)


@given(cases, st.integers(1, 4))
def test_matmul_with_a_tensor_is_the_dense_matmul_from_both_sides(case, width):
    product, dense = made(case)
    generator = torch.Generator().manual_seed(case.seed + 1)
    right = torch.randn(*case.batch, case.m, width, generator=generator, dtype=torch.float64).to(case.dtype)
    left = torch.randn(*case.batch, width, case.n, generator=generator, dtype=torch.float64).to(case.dtype)
    scale = factor_scale(product)
    assert_product(product @ right, dense @ right.double(), scale.max() * right.double().norm())
    assert_product(left @ product, left.double() @ dense, scale.max() * left.double().norm())


@given(cases)
@edge_cases
def test_matmul_with_a_vector_is_the_dense_matmul_from_both_sides(case):
    product, dense = made(case)
    generator = torch.Generator().manual_seed(case.seed + 2)
    column = torch.randn(case.m, generator=generator, dtype=torch.float64).to(case.dtype)
    row = torch.randn(case.n, generator=generator, dtype=torch.float64).to(case.dtype)
    scale = factor_scale(product).max()
    assert_product(product @ column, dense @ column.double(), scale * column.double().norm())
    assert_product(row @ product, row.double() @ dense, scale * row.double().norm())


@given(cases, sizes, st.integers(1, 11))
def test_matmul_of_two_products_stays_low_rank_in_the_smaller_inner_dimension(case, k, r):
    first, dense = made(case)
    second, other = made(Case(case.m, k, r, case.batch, "random", case.seed + 3, case.dtype))
    both = first @ second
    assert isinstance(both, LowRank)
    assert both.rank == min(first.rank, second.rank)
    assert_product(both.dense(), dense @ other, factor_scale(first).max() * factor_scale(second).max())


@given(cases, st.data())
def test_rows_are_the_chosen_rows_of_the_product(case, data):
    product, dense = made(case)
    index = data.draw(st.lists(st.integers(0, case.n - 1), min_size=1, max_size=5))
    assert_product(product.rows(index), dense[..., index, :], factor_scale(product))
    assert torch.equal(product.rows(torch.tensor(index)), product.rows(index))


# -- norms and spectra ------------------------------------------------------------------------------------------------


@given(cases)
@edge_cases
def test_norms_are_those_of_the_dense_matrix(case):
    product, dense = made(case)
    assert product.frobenius_norm.dtype == torch.float64
    assert_product(product.frobenius_norm, torch.linalg.matrix_norm(dense), torch.linalg.matrix_norm(dense))
    assert_product(product.spectral_norm, torch.linalg.matrix_norm(dense, 2), torch.linalg.matrix_norm(dense))


@given(cases)
@edge_cases
def test_singular_values_are_those_of_the_dense_matrix(case):
    product, dense = made(case)
    right = torch.linalg.svdvals(dense)
    k = min(case.n, case.m, case.r)
    assert product.singular_values.shape == (*case.batch, k)
    assert_product(product.singular_values, right[..., :k], right.max())
    assert (product.singular_values.diff(dim=-1) <= 0).all()


def test_singular_values_of_factors_too_uneven_for_their_gram_matrices():
    """Factors of condition 1e7 whose product is a rotation: a Gram matrix's root has lost the small directions."""
    generator = torch.Generator().manual_seed(0)
    outer, inner = (torch.linalg.qr(torch.randn(n, 4, generator=generator, dtype=torch.float64)).Q for n in (50, 4))
    sizes = torch.logspace(0, -7, 4, dtype=torch.float64)
    product = LowRank((outer * sizes) @ inner.T, (inner / sizes) @ outer.T)
    assert float((product.singular_values - 1).abs().max()) < 1e-6


@given(cases, st.integers(1, 12))
@example(Case(6, 6, 4, kind="zero"), 4)
@example(Case(2, 5, 4), 9)
@example(Case(8, 8, 6, (3,), "rank-deficient"), 6)
def test_singular_pairs_rebuild_the_matrix_and_are_orthonormal_where_the_value_is_not_zero(case, k):
    product, dense = made(case)
    every = product.singular_pairs()
    assert every.S.shape[-1] == min(case.n, case.m, case.r)
    top = float(every.S.max())
    rebuilt = every.U @ torch.diag_embed(every.S) @ every.V.mT
    assert_product(rebuilt, dense, top)

    is_pair = every.S[..., :1] * max(case.n, case.m) * EPS < every.S
    for vectors in (every.U, every.V):
        assert (vectors.norm(dim=-2)[~is_pair] == 0).all(), "a direction was made up for a zero singular value"
    # A pair's vectors are as exact as its value stands out of rounding: orthonormality is asked above 1e-6 of the top.
    stands_out = every.S[..., :1] * 1e-6 < every.S
    expected = torch.diag_embed(stands_out.double())
    for vectors in (every.U, every.V):
        kept = vectors * stands_out.unsqueeze(-2)
        assert float((kept.mT @ kept - expected).abs().max()) <= TOLERANCE

    leading = product.singular_pairs(k)
    kept = min(k, every.S.shape[-1])
    assert leading.U.shape == (*case.batch, case.n, kept)
    assert leading.V.shape == (*case.batch, case.m, kept)
    assert torch.equal(leading.S, every.S[..., :kept])


@given(square_cases)
@edge_cases
def test_eigenvalues_have_the_power_sums_of_the_dense_matrix(case):
    assume(case.n == case.m)
    product, dense = made(case)
    values = product.eigenvalues
    assert values.shape == (*case.batch, case.r)
    assert (values.abs().diff(dim=-1) <= 1e-12 * values.abs().max()).all(), "not in falling order of magnitude"
    # tr(M^k) = sum lambda^k whatever the conditioning; zeros, of which B A has r - n more or fewer, add nothing.
    size = torch.linalg.matrix_norm(dense)
    power, unit = dense, torch.ones_like(size)
    for k in range(1, min(case.r, 6) + 1):
        unit = unit * size
        right = power.diagonal(dim1=-2, dim2=-1).sum(-1)
        ours = (values**k).sum(-1)
        assert (((ours - right).abs()) <= TOLERANCE * unit.clamp(min=1e-300)).all()
        power = power @ dense


@given(st.integers(2, 8), st.integers(1, 6), st.integers(0, 10_000), st.sampled_from([torch.float32, torch.float64]))
def test_eigenvalues_match_one_by_one_where_they_are_well_conditioned(n, r, seed, dtype):
    """Symmetric products: eigenvalues move no further than the matrix does (Weyl), so they can be matched in order."""
    left = Case(n, n, r, (), "random", seed, dtype).factors()[0]
    signs = torch.where(torch.arange(r) % 2 == 0, 1.0, -1.0).to(dtype)
    product = LowRank(left, (left * signs).mT)
    right = torch.linalg.eigvalsh(left.double() @ (left.double() * signs).mT)
    padded = torch.zeros(max(n, r), dtype=torch.float64)
    padded[:n] = right
    ours = torch.zeros(max(n, r), dtype=torch.float64)
    ours[:r] = product.eigenvalues.real
    scale = float(factor_scale(product))
    assert float(product.eigenvalues.imag.abs().max()) <= 1e-6 * scale
    assert float((ours.sort().values - padded.sort().values).abs().max()) <= TOLERANCE * scale


@given(square_cases)
@edge_cases
def test_trace_is_the_trace_of_the_dense_matrix(case):
    assume(case.n == case.m)
    product, dense = made(case)
    right = dense.diagonal(dim1=-2, dim2=-1).sum(-1)
    assert_product(product.trace, right, torch.linalg.matrix_norm(dense))


def blocks_of(size):
    """Blocks of the pruned search as small as the test's matrices, so that their seams are crossed."""
    return patch("ov_circuits.linalg.top_entries._BLOCK", size)


# -- entries ----------------------------------------------------------------------------------------------------------


@given(one_matrix, st.integers(1, 100), st.booleans(), st.integers(1, 4))
@example(Case(5, 5, 3, kind="zero"), 7, True, 2)  # all entries tie
@example(Case(6, 4, 2, kind="repeated columns"), 24, False, 4)
def test_top_entries_are_the_dense_ones_in_order(case, k, largest, block):
    product, _ = made(case)
    dense = product.dense()
    with blocks_of(block):
        found = product.top_entries(k, largest=largest)
    right = dense.flatten().sort(descending=largest).values[: min(k, dense.numel())]
    assert_product(found.values, right.double(), factor_scale(product))
    assert_product(dense[found.rows, found.columns], found.values.double(), factor_scale(product))
    places = set(zip(found.rows.tolist(), found.columns.tolist(), strict=True))
    assert len(places) == len(found.values) == min(k, case.n * case.m), "an entry was named twice"
    steps = found.values.double().diff()
    assert (steps <= 0).all() if largest else (steps >= 0).all()


def test_top_entries_of_whole_numbers_with_ties_are_exact_at_every_block_size():
    left = torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0], [0.0, 3.0]])
    right = torch.tensor([[1.0, 2.0, 1.0], [2.0, 1.0, 2.0]])
    product = LowRank(left, right)
    dense = product.dense()
    for largest in (True, False):
        for k in range(1, 13):
            right_values = dense.flatten().sort(descending=largest).values[:k]
            for block in (1, 2, 3, 4, 100):
                with blocks_of(block):
                    found = product.top_entries(k, largest=largest)
                assert_product(found.values, right_values.double(), 1.0)
                assert torch.equal(dense[found.rows, found.columns], right_values)
                assert len(set(zip(found.rows.tolist(), found.columns.tolist(), strict=True))) == k


# -- sandwiches -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vocabulary:
    """E (A B) U with E [n, d], U [d, m], by the same factors in both forms."""

    n: int = 17
    d: int = 6
    r: int = 3
    batch: tuple[int, ...] = ()
    kind: str = "random"
    seed: int = 0
    dtype: torch.dtype = torch.float64
    m: int = 17

    def made(self) -> tuple[Sandwich, Tensor, Tensor]:
        """The sandwich, the dense float64 product, and the size of its factors."""
        generator = torch.Generator().manual_seed(self.seed + 7)
        E = torch.randn(self.n, self.d, generator=generator, dtype=torch.float64).to(self.dtype)
        U = torch.randn(self.d, self.m, generator=generator, dtype=torch.float64).to(self.dtype)
        left, right = Case(self.d, self.d, self.r, self.batch, self.kind, self.seed, self.dtype).factors()
        cross = gram(U.mT, E) if self.n == self.m else torch.zeros(self.d, self.d, dtype=torch.float64)
        grams = Grams(gram(E), gram(U.mT), cross)
        dense = E.double() @ left.double() @ right.double() @ U.double()
        size = factor_scale(LowRank(left, right)) * E.double().norm() * U.double().norm()
        return Sandwich(E, LowRank(left, right), U, grams), dense, size


vocabularies = st.builds(
    Vocabulary,
    n=st.integers(1, 20),
    d=st.integers(1, 7),
    r=st.integers(1, 8),
    batch=st.sampled_from([(), (3,)]),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    m=st.integers(1, 20),
)


@given(vocabularies)
@example(Vocabulary())
@example(Vocabulary(n=2, m=17))  # fewer tokens than the rank: the Gram roots are larger than the matrix
@example(Vocabulary(kind="zero"))
@example(Vocabulary(kind="rank-deficient", batch=(3,)))
def test_sandwich_has_the_norms_and_singular_values_of_the_dense_circuit(vocabulary):
    sandwich, dense, _ = vocabulary.made()
    k = min(vocabulary.n, vocabulary.m, vocabulary.r, vocabulary.d)
    right = torch.linalg.svdvals(dense)
    right = torch.nn.functional.pad(right, (0, max(0, k - right.shape[-1])))[..., :k]
    assert sandwich.shape == dense.shape
    assert sandwich.singular_values.shape == (*vocabulary.batch, k)
    assert_product(sandwich.singular_values, right, right.max())
    assert_product(sandwich.frobenius_norm, torch.linalg.matrix_norm(dense), torch.linalg.matrix_norm(dense).max())
    assert_product(sandwich.spectral_norm, right[..., 0], right.max())


@given(vocabularies)
@example(Vocabulary(n=2, m=17))
@example(Vocabulary(kind="zero"))
@example(Vocabulary(kind="rank-deficient"))
def test_sandwich_singular_pairs_rebuild_the_dense_circuit(vocabulary):
    sandwich, dense, _ = vocabulary.made()
    pairs = sandwich.singular_pairs()
    assert_product(pairs.U @ torch.diag_embed(pairs.S) @ pairs.V.mT, dense, dense.norm())
    stands_out = pairs.S[..., :1] * 1e-4 < pairs.S
    expected = torch.diag_embed(stands_out.double())
    for vectors in (pairs.U, pairs.V):
        kept = vectors * stands_out.unsqueeze(-2)
        assert float((kept.mT @ kept - expected).abs().max()) <= TOLERANCE


@given(vocabularies)
@example(Vocabulary())
def test_sandwich_has_the_eigenvalues_and_trace_of_the_dense_circuit(vocabulary):
    assume(vocabulary.n == vocabulary.m)
    sandwich, dense, _ = vocabulary.made()
    size = torch.linalg.matrix_norm(dense)
    values = sandwich.eigenvalues
    power, unit = dense, torch.ones_like(size)
    for k in range(1, min(vocabulary.r, 5) + 1):
        unit = unit * size
        right = power.diagonal(dim1=-2, dim2=-1).sum(-1)
        assert (((values**k).sum(-1) - right).abs() <= TOLERANCE * unit.clamp(min=1e-300)).all()
        power = power @ dense
    assert_product(sandwich.trace, dense.diagonal(dim1=-2, dim2=-1).sum(-1), size)


@given(vocabularies, st.data())
def test_sandwich_products_rows_and_entries_are_those_of_the_dense_circuit(vocabulary, data):
    sandwich, dense, size = vocabulary.made()
    index = data.draw(st.lists(st.integers(0, vocabulary.n - 1), min_size=1, max_size=4))
    assert_product(sandwich.dense(), dense, size)
    assert_product(sandwich.T.dense(), dense.mT, size)
    assert_product(sandwich.rows(index), dense[..., index, :], size)
    x = torch.ones(vocabulary.m, dtype=vocabulary.dtype)
    assert_product(sandwich @ x, dense.sum(-1), size * vocabulary.m)
    if vocabulary.batch:
        one = sandwich[1]
        assert isinstance(one, Sandwich)
        assert_product(one.dense(), dense[1], size)
        assert_product(one.singular_values, sandwich.singular_values[1], sandwich.singular_values.max())
    else:
        with blocks_of(2):
            found = sandwich.top_entries(3)
        assert_product(found.values, dense.flatten().sort(descending=True).values[:3], size)


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 5), st.integers(1, 9))
def test_gram_is_the_product_over_the_long_dimension_at_every_block_size(n, d, k, block):
    generator = torch.Generator().manual_seed(n)
    X, Y = torch.randn(n, d, generator=generator), torch.randn(n, k, generator=generator)
    assert_product(gram(X, block=block), X.double().mT @ X.double(), X.double().norm() ** 2 * 1e-6)
    assert_product(gram(X, Y, block=block), X.double().mT @ Y.double(), X.double().norm() * Y.double().norm() * 1e-6)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_factors_that_do_not_meet_are_refused_with_both_shapes():
    with pytest.raises(ValueError, match=r"\[4, 3\] and \[2, 5\]"):
        LowRank(torch.zeros(4, 3), torch.zeros(2, 5))
    with pytest.raises(ValueError, match="same leading dimensions"):
        LowRank(torch.zeros(2, 4, 3), torch.zeros(3, 3, 5))


def test_eigenvalues_and_trace_of_a_product_that_is_not_square_are_refused():
    product = LowRank(torch.ones(4, 2), torch.ones(2, 5))
    for attribute in ("eigenvalues", "trace"):
        with pytest.raises(ValueError, match=r"\[4, 5\]"):
            getattr(product, attribute)


def test_indexing_a_single_matrix_and_entries_of_a_batch_are_refused():
    with pytest.raises(IndexError, match="batch"):
        LowRank(torch.ones(4, 2), torch.ones(2, 5))[0]
    with pytest.raises(ValueError, match="one matrix"):
        LowRank(torch.ones(3, 4, 2), torch.ones(3, 2, 5)).top_entries(1)


def test_indexing_takes_a_head_out_of_a_layer():
    product, dense = made(Case(6, 5, 3, (4,)))
    assert_same(product[2].dense(), dense[2])
    assert_same(product[1:3].singular_values, torch.linalg.svdvals(dense[1:3])[..., :3])
    assert repr(product[2]) == "LowRank([6, 5], rank <= 3)"

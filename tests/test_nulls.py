"""Analytic nulls against sampling, tails against what they claim, and false-discovery control."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ov_circuits.linalg.nulls import (
    Null,
    benjamini_hochberg,
    eigenvalue_copying_null,
    empirical_null,
    gaussian_concentration,
    haar_corner,
    isotropic_null,
    normal_tail,
    rotation_null,
    subspace_null,
)


def rotations(n, d, seed=0):
    """Haar rotations by QR with the signs put right, [n, d, d]."""
    generator = torch.Generator().manual_seed(seed)
    Q, R = torch.linalg.qr(torch.randn(n, d, d, generator=generator, dtype=torch.float64))
    return Q * R.diagonal(dim1=-2, dim2=-1).sign()[:, None]


@pytest.mark.parametrize(
    ("left", "right", "d"),
    [([3.0, 1, 1], [2.0, 2], 6), ([1.0], [1.0], 6), ([5.0, 0.1, 0.1, 0.1], [1.0, 2, 3], 6), ([2.0, 1], [1.0, 3], 2)],
)
def test_rotation_null_has_the_moments_of_samples(left, right, d):
    n = 60_000
    A, B = torch.zeros(d, dtype=torch.float64), torch.zeros(d, dtype=torch.float64)
    A[: len(left)], B[: len(right)] = torch.tensor(left), torch.tensor(right)
    M = A[:, None] * rotations(n, d) * B
    sampled = M.square().sum((1, 2)) / (A.square().sum() * B.square().sum())
    concentration = [x.pow(4).sum() / x.square().sum() ** 2 for x in (A, B)]
    cubes = [x.pow(6).sum() / x.square().sum() ** 3 for x in (A, B)]
    null = rotation_null(*concentration, d, tuple(cubes))
    assert float(null.mean) == pytest.approx(1 / d)
    assert float(sampled.mean()) == pytest.approx(1 / d, abs=4 * float(null.std) / n**0.5)
    assert float(sampled.std()) == pytest.approx(float(null.std), rel=0.03)
    assert float(null.z(sampled).pow(3).mean()) == pytest.approx(float(null.skew), rel=0.1, abs=0.05)


def test_subspace_null_has_the_moments_of_samples_and_is_the_rotation_null_of_projections():
    d, p, q, n = 7, 3, 2, 60_000
    sampled = rotations(n, d)[:, :p, :q].square().sum((1, 2))
    null = subspace_null(torch.tensor(float(p)), torch.tensor(float(q)), d)
    assert float(sampled.mean()) == pytest.approx(float(null.mean), rel=0.01)
    assert float(sampled.std()) == pytest.approx(float(null.std), rel=0.03)
    assert float(null.z(sampled).pow(3).mean()) == pytest.approx(float(null.skew), abs=0.05)
    same = rotation_null(torch.tensor(1 / p), torch.tensor(1 / q), d)
    assert float(same.std) * p * q == pytest.approx(float(null.std), rel=1e-6)


def test_whole_space_and_a_line_have_no_spread():
    assert float(subspace_null(torch.tensor(5.0), torch.tensor(2.0), 5).std) == 0
    assert torch.isnan(rotation_null(torch.tensor(1.0), torch.tensor(1.0), 1).z(torch.tensor([1.0, 2.0]))).all()


@pytest.mark.parametrize(("d", "r"), [(32, 4), (24, 24), (128, 16)])
def test_isotropic_null_has_the_moments_of_gaussian_factors(d, r):
    generator = torch.Generator().manual_seed(d)
    n = 3000 if d < 100 else 600

    def product():
        shapes = ((n, d, r), (n, r, d))
        return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]

    (A, B), (C, D) = product(), product()
    core = (A.mT @ A, B @ C, D @ D.mT)  # of A B C D
    energy = (core[0] @ core[1] @ core[2] @ core[1].mT).diagonal(dim1=-2, dim2=-1).sum(-1)
    norms = [(x.mT @ x * (y @ y.mT)).sum((1, 2)) for x, y in ((A, B), (C, D))]
    sampled = energy / (norms[0] * norms[1])
    null = isotropic_null(d, r)
    assert float(sampled.mean()) == pytest.approx(1 / d, abs=4 * float(null.std) / n**0.5)
    assert float(sampled.std()) == pytest.approx(float(null.std), rel=0.1)
    square = (A.mT @ A) @ (B @ B.mT)
    fourth = (square @ square).diagonal(dim1=-2, dim2=-1).sum(-1)
    assert float(fourth.mean() / norms[0].mean() ** 2) == pytest.approx(gaussian_concentration(d, r), rel=0.03)


@pytest.mark.parametrize("decay", [0.5, 1.5, 4.0, 30.0])
def test_gamma_tail_is_uniform_under_the_null(decay):
    """For spectra that fall fast and slowly; far out too, where two moments say several times too little."""
    d, n = 48, 60_000
    energy = torch.exp(-2 * torch.arange(12, dtype=torch.float64) / decay)
    energy = energy / energy.sum()
    corner = haar_corner(12, d, n, np.random.default_rng(0))
    sampled = torch.einsum("i,nij,j->n", energy, corner.square(), energy)
    moments = [energy.pow(k).sum() for k in (2, 3)]
    p = rotation_null(moments[0], moments[0], d, (moments[1], moments[1])).gamma_tail(sampled)
    for level in (0.5, 0.2, 0.05):
        assert float((p <= level).double().mean()) == pytest.approx(level, rel=0.1)
    assert 0.008 < float((p <= 0.01).double().mean()) < 0.0125
    assert 0.0005 < float((p <= 0.001).double().mean()) < 0.0017
    if decay == 4.0:
        two = rotation_null(moments[0], moments[0], d).gamma_tail(sampled)
        assert float((two <= 0.001).double().mean()) > 0.002


def test_gamma_tail_of_projections_and_of_any_skewness():
    d, n = 24, 20_000
    sampled = rotations(n, d)[:, :4, :3].square().sum((1, 2))
    p = subspace_null(torch.tensor(4.0, dtype=torch.float64), torch.tensor(3.0, dtype=torch.float64), d).gamma_tail(
        sampled
    )
    for level in (0.5, 0.1):
        assert float((p <= level).double().mean()) == pytest.approx(level, rel=0.1)
    assert 0.007 < float((p <= 0.01).double().mean()) < 0.013

    zero, one = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    z = torch.tensor([-1.0, 0.5, 3.0], dtype=torch.float64)
    assert torch.allclose(Null(zero, one, zero).gamma_tail(z), normal_tail(z), rtol=1e-3)
    # A chi square of 8 degrees of freedom has skewness 1: (X - 8) / 4; and turned round, -1.
    upper = torch.special.gammaincc(4 * one, (8 + 4 * z) / 2)
    assert torch.allclose(Null(zero, one, one).gamma_tail(z), upper)
    assert torch.allclose(Null(zero, one, -one).gamma_tail(-z), 1 - upper)
    assert torch.isnan(Null(zero, one, one).gamma_tail(torch.nan * one)).all()


@pytest.mark.parametrize(("r", "d"), [(3, 5), (3, 6), (4, 4), (1, 1), (4, 40)])
def test_haar_corner_is_the_corner_of_a_rotation(r, d):
    n = 40_000
    ours, right = haar_corner(r, d, n, np.random.default_rng(0)), rotations(n, d, seed=1)[:, :r, :r]
    for statistic in (
        lambda C: C.square().sum((1, 2)),
        lambda C: C.diagonal(dim1=1, dim2=2).sum(1),
        lambda C: torch.linalg.svdvals(C)[:, -1],
        lambda C: C[:, 0, 0] ** 4,
        lambda C: torch.linalg.eigvals(C).abs().sum(1),
    ):
        a, b = statistic(ours), statistic(right)
        spread = float(b.std()) + 1e-9
        assert float(a.mean()) == pytest.approx(float(b.mean()), abs=5 * spread * (2 / n) ** 0.5)
        assert float(a.std()) == pytest.approx(float(b.std()), rel=0.05, abs=1e-9)
    with pytest.raises(ValueError, match="does not fit"):
        haar_corner(3, 2, 1, np.random.default_rng(0))


@pytest.mark.parametrize(("r", "d"), [(8, 64), (16, 64), (16, 20)])
def test_eigenvalue_copying_null_has_the_moments_of_samples(r, d):
    generator = torch.Generator().manual_seed(r)
    S = torch.rand(2, r, generator=generator, dtype=torch.float64) + 0.05
    null = eigenvalue_copying_null(S, d, samples=32)
    corners = rotations(4000, d)[:, :r, :r]
    for s, mean, std in zip(S, null.mean, null.std, strict=True):
        values = torch.linalg.eigvals(s[:, None] * corners)
        scores = values.sum(-1).real / values.abs().sum(-1)
        assert abs(float(scores.mean() - mean)) < 4 * float(std) / 4000**0.5
        assert float(std) == pytest.approx(float(scores.std()), rel=0.12)


def test_eigenvalue_copying_null_is_seeded_and_leaves_nan_with_its_head():
    S = torch.tensor([[2.0, 1.0, 0.5], [torch.nan, 1.0, 1.0]])
    once, again = eigenvalue_copying_null(S, 9, seed=5), eigenvalue_copying_null(S, 9, seed=5)
    assert float(once.std[0]) == float(again.std[0]) > 0
    assert torch.isnan(once.std[1])


def test_benjamini_hochberg_is_the_textbook_procedure():
    """The fifteen p-values of Benjamini & Hochberg 1995, section 3.2: four are rejected at 0.05."""
    p = [
        0.0001,
        0.0004,
        0.0019,
        0.0095,
        0.0201,
        0.0278,
        0.0298,
        0.0344,
        0.0459,
        0.3240,
        0.4262,
        0.5719,
        0.6528,
        0.7590,
        1.0,
    ]
    order = torch.randperm(15, generator=torch.Generator().manual_seed(0))
    flags = benjamini_hochberg(torch.tensor(p)[order])
    assert sorted(torch.tensor(p)[order][flags].tolist()) == pytest.approx(p[:4])
    assert not benjamini_hochberg(torch.tensor([torch.nan, 0.9])).any()
    assert benjamini_hochberg(torch.tensor([torch.nan, 0.04])).tolist() == [False, True]  # NaN is not counted
    assert benjamini_hochberg(torch.empty(0)).tolist() == []


def test_benjamini_hochberg_keeps_the_rate():
    generator = torch.Generator().manual_seed(0)
    shares = []
    for _ in range(400):
        z = torch.randn(200, generator=generator)
        z[:40] += 3
        flags = benjamini_hochberg(normal_tail(z), 0.1)
        shares.append(float(flags[40:].sum()) / max(int(flags.sum()), 1))
    assert np.mean(shares) < 0.1


def test_empirical_null_is_the_bulk():
    generator = torch.Generator().manual_seed(0)
    values = 3 + 2 * torch.randn(5000, generator=generator)
    values[:100] = 50
    values[-1] = torch.nan
    null = empirical_null(values)
    assert float(null.mean) == pytest.approx(3, abs=0.15)
    assert float(null.std) == pytest.approx(2, abs=0.15)
    assert torch.isnan(empirical_null(torch.tensor([torch.nan])).mean)
    even = empirical_null(torch.tensor([1.0, 2.0, 4.0, 9.0]))  # deviations from 3: 1, 1, 2, 6
    assert (float(even.mean), float(even.std)) == (3, pytest.approx(1.4826 * 1.5))


def test_normal_tail_and_z():
    assert float(normal_tail(torch.tensor(1.959964))) == pytest.approx(0.025, rel=1e-5)
    assert 0 < float(normal_tail(torch.tensor(30.0))) < 1e-190
    assert float(Null(torch.tensor(1.0), torch.tensor(2.0)).z(torch.tensor(5.0))) == 2


def test_a_null_without_spread_has_no_z():
    null = Null(torch.zeros(3, dtype=torch.float64), torch.tensor([0.0, 2.0, 0.0], dtype=torch.float64))
    z = null.z(torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))
    assert z.isnan().tolist() == [True, False, True] and z[1] == 0.5

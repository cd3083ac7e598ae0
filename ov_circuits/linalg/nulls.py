"""What a number would be by chance. Knows matrices, not models.

Random rotations (Haar measure on the orthogonal group of R^d). For symmetric G, H and a Haar rotation O the Weingarten
calculus (Collins & Sniady 2006, "Integration with respect to the Haar measure on unitary, orthogonal and symplectic group",
section 3) needs at second order three pairings of four indices, with weights (d + 1) / D on the diagonal and -1 / D off it,
D = d (d - 1) (d + 2). On one pairing G contributes (tr G)^2, on the two others tr G^2. With tr G = tr H = 1:

    E   tr(G O H O^T) = 1 / d
    Var tr(G O H O^T) = 2 (d tr G^2 - 1) (d tr H^2 - 1) / (d^2 (d - 1) (d + 2))

For matrices A, B of Frobenius norm 1, G = A^T A and H = B B^T, this is the null of ||A O B||_F^2: the same singular values,
directions at random. tr G^2 = sum s^4 / (sum s^2)^2 is one over the participation ratio of A's singular values. Orthogonal
projections of ranks p and q are the case tr G^2 = 1/p, tr H^2 = 1/q, with everything times (p q)^2: subspace overlap.

Tails hang on the third moment too. It follows from zonal polynomials (James 1964, "Distributions of matrix variates and latent
roots derived from normal samples", section 4): (tr X)^3 is the sum of C_k(X) over the three partitions k of 3, and

    E C_k(G O H O^T) = C_k(G) C_k(H) / C_k(I)

with C_k polynomials in tr X, tr X^2 and tr X^3; tr G^3 = sum s^6 / (sum s^2)^3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class Null:
    """A number's distribution by chance.

    Attributes:
        mean, std: its moments; tensors broadcast against the numbers they are for.
        skew: its third central moment over std^3; where None, that of a gamma distribution from 0, 2 std / mean.
    """

    mean: Tensor
    std: Tensor
    skew: Tensor | None = None

    def z(self, value: Tensor) -> Tensor:
        """How many standard deviations a value lies above the mean; NaN where the null has no spread."""
        return (value - self.mean) / torch.where(self.std > 0, self.std, torch.nan)

    def at(self, *index: Tensor) -> Null:
        """Of some of the numbers."""
        return Null(self.mean[index], self.std[index], None if self.skew is None else self.skew[index])

    def gamma_tail(self, value: Tensor) -> Tensor:
        """P(X >= value) for the shifted gamma distribution with these moments.

        A sum of squares under a random rotation is close to a weighted sum of squared Gaussians, whose usual approximation
        by three moments this is (Pearson 1959). Two moments fit equal weights; a spectrum that falls fast has several times
        the tail that they say. NaN where value or null is.
        """
        skew = 2 * self.std / self.mean if self.skew is None else self.skew
        skew = torch.where(skew.abs() < _LEAST_SKEW, _LEAST_SKEW, skew)
        shape, z = 4 / skew.square(), self.z(value)
        usable = shape.isfinite() & z.isfinite()
        shape = torch.where(usable, shape, 1.0)
        # (Y - shape) / sqrt(shape) for a gamma variable Y has mean 0, spread 1 and this skewness; turned where it is negative.
        cut = torch.where(usable, shape + skew.sign() * z * shape.sqrt(), 0.0).clamp(min=0)
        tail = torch.where(skew > 0, torch.special.gammaincc(shape, cut), torch.special.gammainc(shape, cut))
        return torch.where(usable, tail, torch.nan)


_LEAST_SKEW = 1e-4  # below it a gamma distribution is a normal one


def rotation_null(left: Tensor, right: Tensor, d: int, cubes: tuple[Tensor, Tensor] | None = None) -> Null:
    """||A O B||_F^2 / (||A||_F ||B||_F)^2 for a Haar rotation O of R^d: exact moments (see the module's text).

    Args:
        left: sum s^4 / (sum s^2)^2 of A's singular values.
        right: the same of B; broadcast against ``left``.
        d: the dimension that A and B share.
        cubes: sum s^6 / (sum s^2)^3 of A's and of B's, for the skewness, which tails need and z does not.
    """
    variance = 2 * (d * left - 1).clamp(min=0) * (d * right - 1).clamp(min=0) / (d * d * max(d - 1, 1) * (d + 2))
    mean = torch.full_like(variance, 1 / d)
    if cubes is None:
        return Null(mean, variance.sqrt())
    third = _mean_cube((left, cubes[0]), (right, cubes[1]), d) - 3 * variance / d - 1 / d**3
    return Null(mean, variance.sqrt(), third / variance**1.5)


def _mean_cube(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], d: int) -> Tensor:
    """E (tr G O H O^T)^3 from tr G^2 and tr G^3, and those of H, with tr G = tr H = 1."""
    whole = _zonal(float(d), float(d), float(d))
    terms = [g * h / c for g, h, c in zip(_zonal(1.0, *left), _zonal(1.0, *right), whole, strict=True) if c > 0]
    return torch.stack(torch.broadcast_tensors(*terms)).sum(0)  # C_k is zero where d is less than k has parts


def _zonal(first: float, second: Any, third: Any) -> tuple[Any, Any, Any]:
    """The zonal polynomials of degree 3 from tr X, tr X^2, tr X^3: of the partitions 3, 2 + 1 and 1 + 1 + 1."""
    return (
        (first**3 + 6 * first * second + 8 * third) / 15,
        3 * (first**3 + first * second - 2 * third) / 5,
        (first**3 - 3 * first * second + 2 * third) / 3,
    )


def gaussian_concentration(d: int, r: int) -> float:
    """sum s^4 / (sum s^2)^2 of a product of independent Gaussian [d, r] and [r, d] factors: ratio of expectations.

    With X, Y independent real Wishart matrices of r dimensions and d degrees of freedom and E[Y M Y] = d (d + 1) M + d tr(M) I:
    E tr(X Y) = d^2 r and E tr(X Y X Y) = d^2 r ((d + 1)(d + 1 + r) + d r + 2). Close to 1/r + 2/d.
    """
    return ((d + 1) * (d + 1 + r) + d * r + 2) / (d * d * r)


def isotropic_null(d: int, r: int) -> Null:
    """||A B||_F^2 / (||A||_F ||B||_F)^2 for products A and B of independent Gaussian factors of inner dimension r.

    The mean is 1/d whatever r, so that the norm ratio is about 1/sqrt(d) (0.0361 at 768). Singular values of such products
    hardly vary, so the spread is that of random rotations at their expected concentration.
    """
    concentration = torch.tensor(gaussian_concentration(d, r), dtype=torch.float64, device="cpu")
    return rotation_null(concentration, concentration, d)


def subspace_null(p: Tensor, q: Tensor, d: int) -> Null:
    """||U^T V||_F^2 for random subspaces of R^d of dimensions p and q.

    Mean p q / d; variance 2 p (d - p) q (d - q) / (d^2 (d - 1) (d + 2)), which is 2 r^2 (d - r)^2 / .. for p = q = r.
    """
    variance = 2 * p * (d - p) * q * (d - q) / (d * d * max(d - 1, 1) * (d + 2))
    skew = rotation_null(1 / p, 1 / q, d, (p**-2, q**-2)).skew  # that of projections, whatever their trace
    return Null(p * q / d, variance.sqrt(), skew)


def empirical_null(values: Tensor) -> Null:
    """The bulk of the values themselves as a normal distribution: median, and 1.4826 times the median deviation from it.

    An empirical null (Efron 2004, "Large-scale simultaneous hypothesis testing: the choice of a null hypothesis"): most cases
    are taken to be uninteresting, and interesting is what stands out from them. NaN values are left out.
    """
    finite = values[values.isfinite()].double()
    if finite.numel() == 0:
        nothing = torch.tensor(math.nan, dtype=torch.float64, device="cpu")
        return Null(nothing, nothing)
    centre = _median(finite)
    return Null(centre, 1.4826 * _median((finite - centre).abs()))


def _median(values: Tensor) -> Tensor:
    """Of an even number the mean of the two in the middle; of more than torch's quantile takes, the lower one."""
    return values.quantile(0.5) if values.numel() < 1 << 24 else values.median()


def normal_tail(z: Tensor) -> Tensor:
    """P(Z >= z) for a standard normal Z, accurate far out."""
    return 0.5 * torch.special.erfc(z.double() / math.sqrt(2))


def benjamini_hochberg(p: Float[Tensor, " n"], rate: float = 0.05) -> Bool[Tensor, " n"]:
    """Which of n hypotheses to flag so that at most ``rate`` of the flags are expected to be false.

    Benjamini & Hochberg 1995: with p-values sorted, all up to the last one below ``rate * rank / n``. Holds for independent
    and for positively dependent values. NaN is never flagged and not counted.
    """
    known = p.isfinite()
    tested = p[known]
    ranks = torch.arange(1, tested.numel() + 1, dtype=torch.float64, device="cpu")
    ordered = tested.double().sort().values
    below = (ordered <= rate * ranks / max(tested.numel(), 1)).nonzero().flatten()
    flags = torch.zeros_like(p, dtype=torch.bool)
    if below.numel():
        flags[known] = tested <= ordered[below[-1]]
    return flags


def haar_corner(r: int, d: int, samples: int, rng: np.random.Generator) -> Float[Tensor, "samples r r"]:
    """The leading r x r corner of Haar rotations of R^d, in O(r^3) each: no d x d matrix, no d x r matrix.

    The first r columns of a rotation are Z R^-1 for a Gaussian Z [d, r] with QR factor R. Of the d - r rows of Z below the
    corner only their own triangular factor enters R, and Bartlett's decomposition (1933) says how that is distributed:
    chi on the diagonal with d - r, d - r - 1, .. degrees of freedom, standard normal above.
    """
    if not 0 < r <= d:
        raise ValueError(f"a corner of {r} x {r} does not fit into {d} x {d}")
    rest, rows = d - r, min(r, d - r)
    top = torch.from_numpy(rng.standard_normal((samples, r, r)))
    below = torch.from_numpy(rng.standard_normal((samples, rows, r))).triu(1)
    if rows:
        freedom = rest - np.arange(rows)
        below.diagonal(dim1=-2, dim2=-1).copy_(torch.from_numpy(rng.chisquare(freedom, (samples, rows))).sqrt())
    Q, R = torch.linalg.qr(torch.cat([top, below], dim=-2))
    return Q[:, :r] * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)


def eigenvalue_copying_null(
    singular_values: Float[Tensor, "*head r"], d: int, samples: int | None = None, seed: int = 0
) -> Null:
    """sum(lambda) / sum(|lambda|) of U diag(S) V^T for the given S and independent Haar rotations U, V of R^d.

    The non-zero eigenvalues are those of diag(S) C with C = V^T U, the r x r corner of a Haar rotation. The numerator
    tr(diag(S) C) has mean 0 and variance sum S^2 / d, exactly (entries of a rotation are uncorrelated, of variance 1/d), and
    the score is odd in C: its mean is 0, exactly. The denominator hardly varies between draws, so the spread is the
    numerator's over the sampled mean of sum |lambda|: a few draws give it within a few percent at r = 64 and within a tenth
    at r = 8 (see the tests), where the spread of as many scores would be off by a third.

    Args:
        singular_values: of each matrix; heads are leading dimensions.
        d: the dimension of the rotations (d_model, or the vocabulary for full circuits).
        samples: corners drawn, the same for all heads; by default two at least, and more for small heads, whose denominators
            vary more.
        seed: of the generator.
    """
    S = singular_values.double()
    samples = samples or max(2, 128 // S.shape[-1])
    rng = np.random.default_rng(seed)
    total = S.new_zeros(S.shape[:-1])
    finite = S.isfinite().all(-1, keepdim=True)
    usable = torch.where(finite, S, 0.0)
    for corner in haar_corner(S.shape[-1], d, samples, rng):
        total += torch.linalg.eigvals(usable.unsqueeze(-1) * corner.to(S.device)).abs().sum(-1)
    numerator = S.square().sum(-1).div(d).sqrt()
    std = numerator / (total / samples)
    return Null(torch.zeros_like(std), std)

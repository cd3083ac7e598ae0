"""A @ B without forming it.

A head's circuits are products of a tall and a wide matrix: W_V W_O is [d_model, d_model] of rank d_head. Everything a
score asks of such a product M = A B, with A [n, r] and B [r, m], follows from three r x r matrices:

1. R_A with R_A^T R_A = A^T A (a QR factor, or a root of the Gram matrix),
2. R_B with R_B^T R_B = B B^T,
3. B A, when n == m,

because the singular values of M are those of R_A R_B^T, its non-zero eigenvalues are those of B A (Sylvester),
||M||_F = ||R_A R_B^T||_F and tr M = tr B A. All small algebra is float64. A Gram matrix squares the condition number: its
root is used where that is proved to move no singular value by more than 1e-7 of itself, a QR elsewhere (see :func:`_root`).

Leading dimensions are batches (one layer's heads, say): every method works on [..., n, r] and [..., r, m].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ov_circuits.arguments import checked
from ov_circuits.linalg.products import product, row_gram
from ov_circuits.linalg.rows import Columns, Rows
from ov_circuits.modes import ordinary_class


@dataclass(frozen=True)
class Entries:
    """The largest entries of a matrix: ``rows[i], columns[i]`` holds ``values[i]``, in falling order."""

    rows: Tensor
    columns: Tensor
    values: Tensor


@dataclass(frozen=True)
class SingularPairs:
    """The leading k singular triples of M = U diag(S) V^T.

    Attributes:
        U: left vectors in the columns, [..., n, k]: what is read.
        S: singular values, [..., k], in falling order.
        V: right vectors in the columns, [..., m, k]: what is written.

    A pair whose singular value is zero has zero vectors: no direction is made up. The sign of a pair is arbitrary.
    """

    U: Tensor
    S: Tensor
    V: Tensor


@ordinary_class
class Spectrum:
    """The numbers of a matrix M that follow from two small ones.

    Args:
        core: [..., r', r''], with the singular values of M.
        cross: [..., r, r], with the non-zero eigenvalues of M.
    """

    def __init__(self, core: Tensor, cross: Tensor) -> None:
        self._small = core, cross

    @property
    def _core(self) -> Tensor:
        return self._small[0]

    @property
    def _cross(self) -> Tensor:
        return self._small[1]

    @property
    def _n_singular(self) -> int:
        return min(self._core.shape[-2:])

    @cached_property
    def singular_values(self) -> Tensor:
        """The min(n, r, m) leading singular values, [..., k], float64, in falling order; all others are zero."""
        return torch.linalg.svdvals(self._core)[..., : self._n_singular]

    @cached_property
    def eigenvalues(self) -> Tensor:
        """The r eigenvalues of B A, [..., r], complex128: M's own eigenvalues apart from zeros.

        In falling order of magnitude. With r > n some of them are zeros that M need not have.
        """
        values = torch.linalg.eigvals(self._cross)
        return values.gather(-1, values.abs().argsort(dim=-1, descending=True, stable=True))

    @cached_property
    def trace(self) -> Tensor:
        """tr M, [...], float64."""
        return self._cross.diagonal(dim1=-2, dim2=-1).sum(-1)

    @cached_property
    def frobenius_norm(self) -> Tensor:
        """||M||_F, [...], float64."""
        return torch.linalg.matrix_norm(self._core)

    @cached_property
    def spectral_norm(self) -> Tensor:
        """||M||_2, the largest singular value, [...], float64."""
        return self.singular_values[..., 0]


@ordinary_class
class LowRank(Spectrum):
    """The product ``left @ right``, never formed unless :meth:`dense` is called.

    Args:
        left: [..., n, r].
        right: [..., r, m].
        repeats: how many consecutive matrices of ``left`` along its first batch dimension are the same one (heads of a
            group, which share a value head): what follows from ``left`` alone is worked out once for them.
    """

    def __init__(self, left: Tensor, right: Tensor, repeats: int = 1) -> None:
        if left.shape[-1] != right.shape[-2] or left.shape[:-2] != right.shape[:-2]:
            raise ValueError(
                f"LowRank takes left [..., n, r] and right [..., r, m] with the same leading dimensions, "
                f"got {list(left.shape)} and {list(right.shape)}"
            )
        self._left, self._right, self._repeats = left, right, repeats

    # -- shape and parts ------------------------------------------------------------------------------------------

    @property
    def left(self) -> Tensor:
        """The factor A, [..., n, r]."""
        return self._left

    @property
    def right(self) -> Tensor:
        """The factor B, [..., r, m]."""
        return self._right

    @property
    def shape(self) -> torch.Size:
        """The shape of the product, [..., n, m]."""
        return torch.Size((*self.left.shape[:-1], self.right.shape[-1]))

    @property
    def rank(self) -> int:
        """The inner dimension r: an upper bound of the rank."""
        return self.left.shape[-1]

    def copy(self) -> LowRank:
        """The same with factors of its own."""
        return LowRank(self.left.clone(), self.right.clone())

    @property
    def T(self) -> LowRank:
        """The transpose, [..., m, n]."""
        return LowRank(self.right.mT, self.left.mT)

    def __getitem__(self, index: int | slice) -> LowRank:
        """Select along the first batch dimension (a head of a layer)."""
        if self.left.ndim < 3:
            raise IndexError("this LowRank has no batch dimension; use .rows(), .left or .right to take a part")
        return LowRank(self.left[index], self.right[index])

    def __repr__(self) -> str:
        return f"LowRank({list(self.shape)}, rank <= {self.rank})"

    # -- products ----------------------------------------------------------------------------------------------------

    def __matmul__(self, other: LowRank | Tensor) -> LowRank | Tensor:
        """M @ x for a tensor [..., m, k] or vector [m]; M @ N for another LowRank, kept in the smaller inner dimension."""
        if isinstance(other, LowRank):
            middle = self.right @ other.left
            if self.rank <= other.rank:
                return LowRank(self.left, middle @ other.right)
            return LowRank(self.left @ middle, other.right)
        if other.ndim == 1:  # a column for every matrix of the batch
            return (self.left @ (self.right @ other).unsqueeze(-1)).squeeze(-1)
        return self.left @ (self.right @ other)

    def __rmatmul__(self, other: Tensor) -> Tensor:
        """x @ M for rows x [..., k, n] or a vector [n]: what the circuit makes of residual-stream rows."""
        if other.ndim == 1:  # a row for every matrix of the batch
            return ((other @ self.left).unsqueeze(-2) @ self.right).squeeze(-2)
        return (other @ self.left) @ self.right

    def rows(self, index: Tensor | list[int]) -> Tensor:
        """The chosen rows of M, [..., k, m]."""
        return self.left[..., torch.as_tensor(index, device="cpu"), :] @ self.right

    def dense(self) -> Tensor:
        """The product itself, [..., n, m]."""
        return self.left @ self.right

    # -- the three small matrices ---------------------------------------------------------------------------------

    @cached_property
    def root_left(self) -> Tensor:
        """R_A [..., r', r] with R_A^T R_A = A^T A, float64."""
        A = self._distinct(self.left).double()
        return self._repeated(_root(row_gram(A.mT), lambda: A, A.shape[-2]))

    def _distinct(self, repeated: Tensor) -> Tensor:
        return repeated[:: self._repeats] if self._repeats > 1 else repeated

    def _repeated(self, distinct: Tensor) -> Tensor:
        return distinct.repeat_interleave(self._repeats, dim=0) if self._repeats > 1 else distinct

    @cached_property
    def root_right(self) -> Tensor:
        """R_B [..., r', r] with R_B^T R_B = B B^T, float64."""
        B = self.right.double()
        return _root(row_gram(B), lambda: B.mT, B.shape[-1])

    @cached_property
    def _core(self) -> Tensor:
        """R_A R_B^T, which has the singular values of M."""
        return self.root_left @ self.root_right.mT

    @cached_property
    def _cross(self) -> Tensor:
        """B A [..., r, r], which has the non-zero eigenvalues of M."""
        if self.shape[-1] != self.shape[-2]:
            raise ValueError(f"eigenvalues and trace need a square product; this one is {list(self.shape)}")
        return self.right.double() @ self.left.double()

    @property
    def _n_singular(self) -> int:
        """How many singular values can differ from zero: min(n, r, m). Gram roots are r x r even where n or m is smaller."""
        return min(*self.shape[-2:], self.rank)

    @checked
    def singular_pairs(self, k: int | None = None) -> SingularPairs:
        """The leading ``k`` singular triples (all of the min(n, r, m) when None), as float64.

        With M V = U S and B = R_B^T Q_B^T: U = A (R_B^T Y) / S and V = B^T (R_A^T X) / S, where X S Y^T is the
        decomposition of R_A R_B^T. Only products with [r, k] matrices touch the long dimensions.
        """
        X, S, Yh = torch.linalg.svd(self._core, full_matrices=False)
        k = self._n_singular if k is None else min(k, self._n_singular)
        X, S, Y = X[..., :k], S[..., :k], Yh.mT[..., :k]
        # Below this a singular value is rounding noise, and so would its vectors be.
        floor = S[..., :1] * max(self.shape[-2:]) * torch.finfo(S.dtype).eps
        scale = torch.where(floor < S, S, torch.inf).unsqueeze(-2)
        U = self._times_left(self.root_right.mT @ Y / scale)
        V = self._times_right(self.root_left.mT @ X / scale)
        return SingularPairs(U, S, V)

    def _times_left(self, coefficients: Tensor) -> Tensor:
        """A @ coefficients, [..., n, k]."""
        return self.left.double() @ coefficients

    def _times_right(self, coefficients: Tensor) -> Tensor:
        """B^T @ coefficients, [..., m, k]."""
        return self.right.double().mT @ coefficients

    @checked
    def top_entries(self, k: int, *, largest: bool = True) -> Entries:
        """The ``k`` largest (or smallest) entries of M; see :func:`ov_circuits.linalg.top_entries.top_entries`."""
        from ov_circuits.linalg.top_entries import top_entries

        if len(self.shape) != 2:
            raise ValueError("top_entries takes one matrix: select a head first")
        found = top_entries(self.left, self.right, k)
        return found.largest if largest else found.smallest


@ordinary_class
@dataclass(frozen=True)
class Grams:
    """What all heads of a model share when their circuits are seen from the vocabulary: three [d_model, d_model] matrices.

    Attributes:
        read: E^T E, E the source embedding [n_vocab, d_model].
        write: U U^T, U the unembedding [d_model, n_vocab].
        cross: U E.
    """

    read: Tensor
    write: Tensor
    cross: Tensor

    @cached_property
    def read_half(self) -> Tensor:
        """T, upper triangular, with T + T^T = E^T E."""
        return _half(self.read)

    @cached_property
    def write_half(self) -> Tensor:
        """T, upper triangular, with T + T^T = U U^T."""
        return _half(self.write)

    @cached_property
    def read_root(self) -> Tensor:
        """R with R^T R = E^T E."""
        return root_of_gram(self.read)

    @cached_property
    def write_root(self) -> Tensor:
        """R with R^T R = U U^T."""
        return root_of_gram(self.write)

    def changed(self, change: Callable[[Tensor], Tensor]) -> Grams:
        """The same with every matrix changed; one that stands for several is changed once."""
        distinct = {id(matrix): matrix for matrix in (self.read, self.write, self.cross)}
        done = {key: change(matrix) for key, matrix in distinct.items()}
        return Grams(*(done[id(matrix)] for matrix in (self.read, self.write, self.cross)))


@ordinary_class
class Sandwich(LowRank):
    """E (A B) U for long E [n, d] and U [d, m] whose Gram matrices are known: a full OV circuit.

    Spectra cost d x d products with the shared :class:`Grams`; neither E A nor B U is formed for them.
    """

    def __init__(self, outer_left: Tensor | Rows, inner: LowRank, outer_right: Tensor | Columns, grams: Grams) -> None:
        self._outer_left, self._inner, self._outer_right, self._grams = outer_left, inner, outer_right, grams
        self._repeats = inner._repeats

    @cached_property
    def left(self) -> Tensor:
        """E A, [..., n, r], formed on first use."""
        return self._outer_left @ self._inner.left

    @cached_property
    def right(self) -> Tensor:
        """B U, [..., r, m], formed on first use."""
        return self._inner.right @ self._outer_right

    @property
    def shape(self) -> torch.Size:
        """The shape of the product, [..., n, m]."""
        batch = self._inner.shape[:-2]
        return torch.Size((*batch, self._outer_left.shape[0], self._outer_right.shape[1]))

    @property
    def rank(self) -> int:
        """The inner dimension r: an upper bound of the rank."""
        return self._inner.rank

    def __getitem__(self, index: int | slice) -> LowRank:
        """Select along the first batch dimension (a head of a layer)."""
        return Sandwich(self._outer_left, self._inner[index], self._outer_right, self._grams)

    def rows(self, index: Tensor | list[int]) -> Tensor:
        """The chosen rows of the full circuit, [..., k, m]: the only part of E A that is computed."""
        rows = self._outer_left[torch.as_tensor(index, device="cpu")] @ self._inner.left
        return (rows @ self._inner.right) @ self._outer_right

    @cached_property
    def root_left(self) -> Tensor:
        """Of E A, by way of E^T E: the Gram matrix squares E's condition number, but not A's."""
        A = self._distinct(self._inner.left).double()
        gram = _congruence(A.mT, self._grams.read_half)
        return self._repeated(_root(gram, lambda: self._grams.read_root @ A, self._outer_left.shape[0]))

    @cached_property
    def root_right(self) -> Tensor:
        """Of B U, by way of U U^T."""
        B = self._inner.right.double()
        return _root(
            _congruence(B, self._grams.write_half), lambda: self._grams.write_root @ B.mT, self._outer_right.shape[1]
        )

    @cached_property
    def _cross(self) -> Tensor:
        A = self._distinct(self._inner.left).double()
        return self._inner.right.double() @ self._repeated(product(self._grams.cross, A))

    def _times_left(self, coefficients: Tensor) -> Tensor:
        return _blocked_product(self._outer_left, self._inner.left.double() @ coefficients)

    def _times_right(self, coefficients: Tensor) -> Tensor:
        return _blocked_product(self._outer_right.mT, self._inner.right.double().mT @ coefficients)


# The largest ||R||_F ||R^-1||_F at which a Gram matrix's root may stand for a QR.
_WELL_CONDITIONED = 1.5e3


def _root(gram: Tensor, factor: Callable[[], Tensor], n: int) -> Tensor:
    """R [..., r', r] with R^T R = X^T X, float64: the Cholesky factor of ``gram`` = X^T X, or from a QR of X itself.

    A computed Gram matrix is off by at most n u ||X||_F^2 (u = 1.1e-16), so whatever X is multiplied by, no singular value
    moves by more than n u k^2 / 2 of itself with k = ||R||_F ||R^-1||_F (Ostrowski 1959): 7e-8 for n = 576 and k = 1.5e3, the
    rounding of float32 weights; 1e-14 was seen. Where k is larger a QR is made, at twice the cost. Trained heads are near 100.

    Args:
        gram: X^T X, [..., r, r].
        factor: gives X [..., n, r], or another matrix with the same Gram matrix.
        n: how many terms each sum in ``gram`` has.
    """
    if n >= gram.shape[-1]:
        root = torch.linalg.cholesky_ex(gram, upper=True).L
        eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        inverse = torch.linalg.solve_triangular(root, eye.expand_as(root), upper=True)
        condition = torch.linalg.matrix_norm(root) * torch.linalg.matrix_norm(inverse)
        if bool((condition <= _WELL_CONDITIONED).all()):  # not so where Cholesky failed and left zeros or NaN
            return root
    return torch.linalg.qr(factor(), mode="r").R


def _half(G: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix, with half the diagonal: T with T + T^T = G."""
    T = G.triu()
    T.diagonal().div_(2)
    return T


def _congruence(F: Tensor, T: Tensor, blocks: int = 8) -> Tensor:
    """F G F^T for F [..., r, d] and symmetric G = T + T^T [d, d]: X + X^T with X = F T F^T, T upper triangular.

    T is gone through in blocks of columns, down to the diagonal: with eight of them, 9/16 of the work.
    """
    rows = F.reshape(-1, F.shape[-1])
    half = F.new_zeros(*F.shape[:-1], F.shape[-2])
    width = -(-F.shape[-1] // blocks)
    for start in range(0, F.shape[-1], width):
        part = slice(start, start + width)
        half += product(rows[:, : part.stop], T[: part.stop, part]).unflatten(0, F.shape[:-1]) @ F[..., part].mT
    return half + half.mT


def root_of_gram(gram: Tensor) -> Tensor:
    """R with R^T R = gram, for a positive semi-definite [..., r, r] matrix of any rank."""
    values, vectors = torch.linalg.eigh(gram)
    return values.clamp(min=0).sqrt().unsqueeze(-1) * vectors.mT


def _blocked_product(long: Tensor | Rows, small: Tensor, block: int = 1024) -> Tensor:
    """``long @ small`` in float64 without a float64 copy of ``long``."""
    parts = [long[start : start + block].double() @ small for start in range(0, long.shape[0], block)]
    return torch.cat(parts, dim=-2)


def gram(matrix: Tensor | Rows, other: Tensor | Rows | None = None, block: int = 1024) -> Tensor:
    """``matrix^T other`` (``other`` defaults to ``matrix``) over the long first dimension, accumulated in float64 by blocks."""
    symmetric = other is None or other is matrix
    other = matrix if other is None else other
    total = torch.zeros(matrix.shape[1], other.shape[1], dtype=torch.float64, device=matrix.device)
    # Of a symmetric product an eighth of the columns at a time, down to the diagonal: 9/16 of the work.
    width = -(-total.shape[1] // 8) if symmetric else total.shape[1]
    for start in range(0, matrix.shape[0], block):
        left = matrix[start : start + block].double()
        right = left if symmetric else other[start : start + block].double()
        for first in range(0, total.shape[1], max(width, 1)):
            columns = slice(first, first + width)
            rows = slice(0, first + width) if symmetric else slice(None)
            total[rows, columns] += product(left[:, rows].mT, right[:, columns])
    return total.triu() + total.triu(1).mT if symmetric else total

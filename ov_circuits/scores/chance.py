"""A layer's circuits as they would be by chance: the same spectra, directions at random.

A score is computed on these in place of the layer's own circuits, so every score has a null by the same road that gives its
value. (Eigenvalue copying in residual space needs no draws of its own road:
:func:`ov_circuits.linalg.nulls.eigenvalue_copying_null` knows its numerator exactly.) There are two kinds, because a kind that
keeps a number fixed says nothing about it:

``factors``
    W_V R W_O and W_Q R W_K^T with a Haar rotation R of the d_head dimensions: both factors keep their singular values and the
    directions they share with the stream; how they meet inside the head is random. For norms and ranks of OV and QK.
``rotation``
    U diag(S) V^T with the head's own singular values S and independent Haar frames U, V of the residual stream: what the head
    reads and writes has nothing to do with each other or with the vocabulary. For eigenvalue copying, which is odd in U (its
    mean is exactly 0), and for everything of the full OV circuit.

Only d_head x d_head matrices are drawn; for full circuits the frames meet the model's Gram matrices once a draw, not once a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from ov_circuits.errors import CircuitsError, check_seed
from ov_circuits.linalg.lowrank import LowRank, Spectrum, root_of_gram
from ov_circuits.linalg.nulls import Null
from ov_circuits.linalg.products import row_gram
from ov_circuits.model import Head, Layer, Model
from ov_circuits.scores.broken import need_finite

NullKind = Literal["factors", "rotation"]

NULL_NOTES: dict[NullKind, str] = {
    "factors": "W_V and W_O (W_Q and W_K) with their own singular values, meeting inside the head at random",
    "rotation": "the head's own singular values, reading and writing random directions of the stream",
}

SPECTRUM_NULL = "W_V and W_O with their own singular values, meeting inside the head at random"

# Spread over so few draws is known to about 25 %: enough to tell 2 from 10 standard deviations.
DRAWS = 8


class Circuits(Protocol):
    """What a score may ask for."""

    @property
    def ov(self) -> Spectrum: ...
    @property
    def qk(self) -> Spectrum: ...
    @property
    def full_ov(self) -> Spectrum: ...
    @property
    def value_bias(self) -> Tensor: ...


class _Drawn(Spectrum):
    """A draw: its singular values are right to 1e-8 of the largest one, which is plenty, at two thirds of the cost."""

    @cached_property
    def singular_values(self) -> Tensor:
        squares = torch.linalg.eigvalsh(row_gram(self._core))
        return squares.clamp(min=0).sqrt().flip(-1)[..., : self._n_singular]


@dataclass(frozen=True)
class _Chance:
    """One draw for one layer."""

    ov: Spectrum
    qk: Spectrum
    full_ov: Spectrum
    value_bias: Tensor


@dataclass(frozen=True)
class _Frames:
    """Two random frames U, V [d, r] of the stream, as a circuit U diag(S) V^T meets them: small matrices only.

    Attributes:
        read: R with R^T R = U^T G U, G the Gram matrix of what is read from (the stream itself, or the vocabulary).
        write: the same of V and what is written to.
        cross: V^T X U, X the way back from what is written to what is read.
    """

    read: Tensor
    write: Tensor
    cross: Tensor

    def spectrum(self, singular_values: Tensor) -> Spectrum:
        """Of U diag(S) V^T seen through these frames, for S [..., r]; eigenvalues in float32, which is plenty for a draw."""
        S = singular_values.unsqueeze(-1)
        return _Drawn(core=self.read @ (S * self.write.mT), cross=(S * self.cross).float())


class Draws:
    """The random rotations of a model, drawn once and used for every layer.

    Attributes:
        inside: Haar rotations R of the d_head dimensions.
        vocabulary: random frames of the stream, as full OV circuits meet them through embedding and unembedding; none
            where the checkpoint holds no embeddings.

    Args:
        model: the checkpoint, in the scores' view.
        draws: how many.
        seed: of the generator.
        vocabulary: whether full circuits will be asked for; the Gram matrices of the embeddings are read for them.
    """

    def __init__(self, model: Model, draws: int = DRAWS, seed: int = 0, *, vocabulary: bool = True) -> None:
        a = model.architecture
        self.seed, self._device = seed, model.device
        self._generator = torch.Generator().manual_seed(check_seed(seed))
        rank = min(a.d_head, a.d_model)
        self.inside = [self._haar(a.d_head, a.d_head) for _ in range(draws)]
        self.vocabulary: list[_Frames] = []
        if vocabulary and model.has_embeddings:
            g = model.grams
            for U, V in ((self._haar(a.d_model, rank), self._haar(a.d_model, rank)) for _ in range(draws)):
                read, write = root_of_gram(U.mT @ g.read @ U), root_of_gram(V.mT @ g.write @ V)
                self.vocabulary.append(_Frames(read, write, V.mT @ g.cross @ U))

    def _haar(self, n: int, k: int) -> Tensor:
        """The first k columns of a Haar rotation of R^n, float64: the same ones on every device."""
        Q, R = torch.linalg.qr(torch.randn(n, k, generator=self._generator, dtype=torch.float64, device="cpu"))
        return (Q * R.diagonal().sign()).to(self._device)


class LayerDraws:
    """A layer's circuits by chance, each draw decomposed once for all scores that ask.

    Args:
        draws: the model's rotations.
        layer, ov, qk: the layer and its own circuits.
    """

    def __init__(self, draws: Draws, layer: Layer, ov: LowRank, qk: LowRank) -> None:
        self._draws, self._layer, self._ov, self._qk = draws, layer, ov, qk

    def null(self, kind: NullKind, compute: Callable[[Circuits], Tensor], odd: bool) -> Null:
        """A score's distribution over the draws, for every head of the layer.

        Args:
            kind: see the module's text.
            compute: the score.
            odd: the score changes sign with U, so its mean is known to be 0.
        """
        chances = self._factors if kind == "factors" else self._rotations
        values = torch.stack([compute(chance).double() for chance in chances])
        if odd:
            return Null(torch.zeros_like(values[0]), values.square().mean(0).sqrt())
        return Null(values.mean(0), values.std(0))

    @property
    def singular_values(self) -> Float[Tensor, "draw head r"]:
        """Of W_V R W_O, largest first, for every draw: the null of a whole spectrum."""
        return torch.stack([chance.ov.singular_values for chance in self._factors])

    @cached_property
    def _factors(self) -> list[_Chance]:
        return [self._turned(R) for R in self._draws.inside]

    def _turned(self, R: Tensor) -> _Chance:
        """W_V R W_O and W_Q R W_K^T. Only norms and ranks are asked of them: where eigenvalues are zero is not worked out."""
        ov, qk = (_Drawn(core=m.root_left @ R @ m.root_right.mT, cross=R.new_zeros(0, 0)) for m in (self._ov, self._qk))
        layer = self._layer
        bias = layer.W_O.new_zeros(layer.W_O.shape[0])
        if layer.b_V is not None:
            b = layer.per_query_head(layer.b_V).double() @ R
            bias = torch.einsum("hd,hde->he", b, self._ov.root_right.mT).norm(dim=-1)
        return _Chance(ov, qk, ov, bias)

    @cached_property
    def _rotations(self) -> list[_Chance]:
        S = self._ov.singular_values
        nothing = S.new_zeros(S.shape[0])
        # Of U diag(S) V^T itself the norms are the head's own, so only the full circuit is asked for.
        return [_Chance(self._ov, self._qk, frames.spectrum(S), nothing) for frames in self._draws.vocabulary]


def spectrum(head: Head, draws: int = DRAWS, seed: int = 0) -> pd.DataFrame:
    """A head's singular values of W_V W_O beside what they would be by chance (``factors``, see the module's text).

    Where the values start above the band, W_V and W_O meet better than their own spectra alone would make them.

    Args:
        head: whose W_V W_O, in its model's weight view.
        draws: how many random rotations the band is the range of.
        seed: of these.

    Returns:
        One row a singular value, largest first: ``index`` (from 0, as ``direction`` everywhere), ``value``, ``null_low``,
        ``null_high`` (the range of the draws, value by value). ``attrs``: model, view, head, ``null`` in words.

    Raises:
        CircuitsError: weights that are not finite, or fewer than two draws.
    """
    if draws < 2:
        raise CircuitsError(f"a band needs at least 2 draws, got {draws}")
    model, layer = head.model, head.model.layer(head.layer)
    need_finite(head, "spectrum")
    weights = layer.finite_part
    ov = weights.ov
    null = LayerDraws(Draws(model, draws, seed, vocabulary=False), weights, ov, weights.qk).singular_values
    values = ov.singular_values[head.index]
    band = null[:, head.index]
    frame = pd.DataFrame(
        {
            "index": range(len(values)),
            "value": values.numpy(force=True),
            "null_low": band.amin(0).numpy(force=True),
            "null_high": band.amax(0).numpy(force=True),
        }
    )
    frame.attrs = {
        "model": model.name,
        "view": model.view,
        "head": head.label,
        "source": "singular values of W_V W_O (Elhage et al. 2021)",
        "null": f"range of {draws} draws of {SPECTRUM_NULL}",
    }
    return frame

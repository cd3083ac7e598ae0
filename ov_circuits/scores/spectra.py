"""Spectra of a head: norms, effective ranks and eigenvalue copying, each from singular values or eigenvalues.

All functions take the last dimension as the spectrum and keep leading ones (heads). A zero matrix has effective rank 0 and
an undefined copying score (NaN), never a made-up one; of a spectrum that is not finite every number is NaN.
"""

from __future__ import annotations

import torch
from jaxtyping import Complex, Float
from torch import Tensor


def stable_rank(singular_values: Float[Tensor, "*head k"]) -> Float[Tensor, "*head"]:
    """||M||_F^2 / ||M||_2^2, between 1 and the rank."""
    squares = singular_values.square()
    return _ratio_or_zero(squares.sum(-1), squares.amax(-1))


def participation_ratio(singular_values: Float[Tensor, "*head k"]) -> Float[Tensor, "*head"]:
    """(sum s^2)^2 / sum s^4: how many directions share the energy, between 1 and the rank."""
    squares = singular_values.square()
    return _ratio_or_zero(squares.sum(-1).square(), squares.square().sum(-1))


def entropy_rank(singular_values: Float[Tensor, "*head k"]) -> Float[Tensor, "*head"]:
    """exp of the entropy of s / sum s (Roy & Vetterli 2007, "The effective rank"), between 1 and the rank."""
    total = singular_values.sum(-1, keepdim=True)
    share = _ratio_or_zero(singular_values, total)
    entropy = -torch.special.xlogy(share, share).sum(-1)
    return torch.where(total.squeeze(-1) == 0, torch.zeros_like(entropy), entropy.exp())


def eigenvalue_copying(eigenvalues: Complex[Tensor, "*head r"]) -> Float[Tensor, "*head"]:
    """sum(lambda) / sum(|lambda|), in [-1, 1] (Elhage et al. 2021, "Summarizing OV/QK matrices").

    OV is not normal: a large eigenvalue does not imply a large effect, and the score does not say which tokens are copied.
    """
    return eigenvalues.real.sum(-1) / eigenvalues.abs().sum(-1)


def _ratio_or_zero(numerator: Tensor, denominator: Tensor) -> Tensor:
    return torch.where(denominator == 0, torch.zeros_like(numerator), numerator / denominator)  # of NaN, NaN

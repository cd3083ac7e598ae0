"""Rotary position embedding (Su et al. 2021) in transformers' layout: the two halves of a head are the pairs' coordinates."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate [..., pos, d_head] vectors by their positions [pos]: pair i turns by ``position * theta^(-2 i / d_head)``."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = positions.double().unsqueeze(-1) * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = x.double().split(half, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

"""Rotary position embedding (Su et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(
    x: Tensor, positions: Tensor, frequencies: Tensor, *, interleaved: bool = False, scale: float = 1.0
) -> Tensor:
    """Turn [..., pos, d_head] vectors by their positions [pos]: pair i turns by ``position * frequencies[i]`` radians.

    Args:
        x: only the first ``2 * len(frequencies)`` coordinates are turned; the others pass.
        positions: [pos].
        frequencies: [pairs].
        interleaved: a pair is two neighbours; otherwise coordinate i of the first and of the second half.
        scale: what turned coordinates are multiplied by.

    Returns:
        float64.
    """
    angles = (positions.double().unsqueeze(-1) * frequencies.double()).to(x.device)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    turned, passed = x.double().split([2 * len(frequencies), x.shape[-1] - 2 * len(frequencies)], dim=-1)
    pairs = turned.unflatten(-1, (-1, 2)) if interleaved else turned.unflatten(-1, (2, -1)).transpose(-1, -2)
    first, second = pairs.unbind(-1)
    pairs = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
    turned = pairs.flatten(-2) if interleaved else pairs.transpose(-1, -2).flatten(-2)
    return torch.cat([turned, passed], dim=-1)

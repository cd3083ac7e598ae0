"""All heads on one map, by what they read and by what they write.

A head writes into the row space of W_O and reads from the column space of W_V. With the orthogonal projections P_a onto them,

    ||P_a - P_b||_F^2 = rank_a + rank_b - 2 ||U_a^T U_b||_F^2,

so subspace overlaps are inner products of projections. The map is the principal component analysis of the projections
(classical scaling of these distances, Torgerson 1952): centred overlaps, the two leading eigenvectors, each times the root of its
eigenvalue. No [d_model, d_model] matrix is formed. Two axes hold a small share of so many dimensions; the frame says how much.
"""

from __future__ import annotations

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from ov_circuits.linalg.pairwise import pairwise_energy
from ov_circuits.model import Model
from ov_circuits.scores.composition import space_basis
from ov_circuits.scores.papers import TORGERSON

_ROLES = {"read": "V", "write": "O"}


def space_map(model: Model) -> pd.DataFrame:
    """Principal components of the heads' read and write spaces (Torgerson 1952).

    Args:
        model: in the weight view that the spaces are to have.

    Returns:
        One row a head: ``head``, ``layer``, ``index``, ``kv_head``, ``read_x``, ``read_y``, ``write_x``, ``write_y`` (NaN for a
        head whose weights are not finite). Heads of a group read with one W_V, so they share a place on the map of reads.
        ``attrs``: model, view, ``shares`` (of the variance on each axis), ``not_finite``.
    """
    a = model.architecture
    columns: dict[str, object] = {
        "head": model.head_labels,
        "layer": [layer for layer in range(a.n_layers) for _ in range(a.n_heads)],
        "index": list(range(a.n_heads)) * a.n_layers,
        "kv_head": [index // a.group_size for index in range(a.n_heads)] * a.n_layers,
    }
    shares = {}
    finite = torch.ones(a.n_layers * a.n_heads, dtype=torch.bool, device="cpu")
    for name, role in _ROLES.items():
        overlap = space_overlaps(model, role)
        finite &= overlap.diagonal().isfinite()
        places, found = principal_components(overlap)
        shares[name] = list(found)  # as it is read again from a file
        columns[f"{name}_x"], columns[f"{name}_y"] = places.T.numpy()
    frame = pd.DataFrame(columns)
    broken = [label for label, ok in zip(model.head_labels, finite.tolist(), strict=True) if not ok]
    frame.attrs = {
        "model": model.name,
        "view": model.view,
        "source": TORGERSON,
        "shares": shares,
        "not_finite": broken,
    }
    return frame


def space_overlaps(model: Model, role: str) -> Float[Tensor, "head head"]:
    """``||U_a^T U_b||_F^2`` of one space of every two heads: ``O`` writes, ``Q``, ``K``, ``V`` read; ranks on the diagonal."""
    bases = torch.cat([space_basis(layer, role).float() for layer in model.layers()])
    everything = (slice(None), slice(None))
    return pairwise_energy(bases, bases, [everything]).cpu()


def principal_components(
    inner: Float[Tensor, "n n"],
) -> tuple[Float[Tensor, "n 2"], tuple[float, float]]:
    """Places on the two leading axes from inner products, and the share of the variance that each axis holds.

    Each axis points to where its largest place is. A row that is not finite gets NaN and is left out of the rest.
    """
    known = inner.diagonal().isfinite()
    chosen = inner[known][:, known].double()
    n = len(chosen)
    places = torch.full((len(inner), 2), torch.nan, dtype=torch.float64, device="cpu")
    if n == 0:
        return places, (0.0, 0.0)
    centred = chosen - chosen.mean(0) - chosen.mean(1, keepdim=True) + chosen.mean()
    values, vectors = torch.linalg.eigh((centred + centred.mT) / 2)
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    found = torch.zeros(n, 2, dtype=torch.float64, device="cpu")
    k = min(2, n)
    leading = vectors[:, :k] * values[:k].sqrt()
    furthest = leading.gather(0, leading.abs().argmax(0, keepdim=True)).sign()
    found[:, :k] = leading * torch.where(furthest == 0, 1.0, furthest)
    places[known] = found
    total = float(values.sum()) or 1.0
    first, second = (float(values[i]) / total if i < k else 0.0 for i in range(2))
    return places, (first, second)

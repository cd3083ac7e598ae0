"""Two checkpoints head by head: what training on from a to b changed.

Circuits are compared in the residual stream's own coordinates, so the two must share them: a model and its fine-tune, or two
checkpoints of one training run. Between models that were trained apart, the stream's bases differ and every head looks changed.
Within a head nothing depends on how W_V and W_O, or W_Q and W_K, divide the circuit between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from ov_circuits.errors import CircuitsError
from ov_circuits.linalg.lowrank import LowRank
from ov_circuits.model import Model
from ov_circuits.progress import track
from ov_circuits.scores.board import LayerCircuits
from ov_circuits.scores.spectra import eigenvalue_copying

if TYPE_CHECKING:
    import pandas as pd

# What must agree, and what it is called in the message.
_SAME = {"n_layers": "layers", "n_heads": "heads", "d_model": "d_model", "d_head": "d_head", "norm": "norm"}


def compare(a: Model, b: Model) -> pd.DataFrame:
    """Each head's circuits in b against those in a.

    Args:
        a: the base.
        b: what became of it; of the same shape and in the same weight view.

    Returns:
        One row a head. ``ov_change``, ``qk_change``: ``||M_b - M_a||_F / ||M_a||_F`` of OV and QK (rotary models: offset 0).
        ``ov_cosine``, ``qk_cosine``: ``<M_a, M_b>_F / (||M_a||_F ||M_b||_F)``. ``ov_norm_ratio``: ``||OV_b||_F / ||OV_a||_F``.
        ``write_angle``, ``read_angle``: the largest principal angle between the spaces that W_O writes into and W_V reads
        from, in degrees; ``write_overlap``, ``read_overlap``: the mean squared cosine of all principal angles, 1 for the
        same space. ``eigen_copying_ov_a``, ``.._b``, ``.._change`` (Elhage et al. 2021), and the same for
        ``eigen_copying_full`` where both checkpoints have embeddings. A head with NaN or infinity in either has NaN.

    Raises:
        CircuitsError: the two differ in layers, heads, sizes, norm or view.
    """
    import pandas as pd

    _check_alike(a, b)
    full = a.has_embeddings and b.has_embeddings
    layers = [
        _layer_rows(a, b, index, full) for index in track(range(a.n_layers), "comparing layers", total=a.n_layers)
    ]
    columns = {name: torch.cat([layer[name] for layer in layers]).numpy(force=True) for name in layers[0]}
    heads = list(a.heads())
    frame = pd.DataFrame(
        {
            "head": a.head_labels,
            "layer": [head.layer for head in heads],
            "index": [head.index for head in heads],
            **columns,
        }
    )
    frame.attrs = {"model": a.name, "other": b.name, "view": a.view}
    return frame


def _check_alike(a: Model, b: Model) -> None:
    for field, name in _SAME.items():
        first, second = getattr(a.architecture, field), getattr(b.architecture, field)
        if first != second:
            raise CircuitsError(
                f"{a.name} and {b.name} cannot be compared head by head: {name} {first} and {second}; "
                "give two checkpoints of one architecture"
            )
    if a.view != b.view:
        raise CircuitsError(f"{a.name} is in the view {a.view!r} and {b.name} in {b.view!r}: use the same view")


def _layer_rows(a: Model, b: Model, index: int, full: bool) -> dict[str, Float[Tensor, " head"]]:
    one, two = LayerCircuits(a, index), LayerCircuits(b, index)
    columns: dict[str, Any] = {}
    columns["ov_change"], columns["ov_cosine"], columns["ov_norm_ratio"] = _circuits(one.ov, two.ov)
    columns["qk_change"], columns["qk_cosine"], _ = _circuits(one.qk, two.qk)
    columns["write_angle"], columns["write_overlap"] = _spaces(one.ov.right.mT, two.ov.right.mT)
    columns["read_angle"], columns["read_overlap"] = _spaces(one.ov.left, two.ov.left)
    columns |= _copying("eigen_copying_ov", one.ov.eigenvalues, two.ov.eigenvalues)
    if full:
        columns |= _copying("eigen_copying_full", one.full_ov.eigenvalues, two.full_ov.eigenvalues)
    finite = a.layer(index).finite_heads & b.layer(index).finite_heads
    return {name: torch.where(finite, column.double(), torch.nan) for name, column in columns.items()}


def _circuits(a: LowRank, b: LowRank) -> tuple[Tensor, Tensor, Tensor]:
    """Relative change, cosine and ratio of norms of two stacks of circuits, each [head]."""
    left_a, right_a, left_b, right_b = (x.double() for x in (a.left, a.right, b.left, b.right))
    # The difference as one product: a small change is not the difference of two large numbers.
    difference = LowRank(
        torch.cat([left_b - left_a, left_a], dim=-1), torch.cat([right_b, right_b - right_a], dim=-2)
    ).frobenius_norm
    product = ((left_a.mT @ left_b) * (right_a @ right_b.mT)).sum((-2, -1))
    norm_a, norm_b = a.frobenius_norm, b.frobenius_norm
    return difference / norm_a, product / (norm_a * norm_b), norm_b / norm_a


def _spaces(a: Float[Tensor, "head d_model r"], b: Float[Tensor, "head d_model r"]) -> tuple[Tensor, Tensor]:
    """Largest principal angle in degrees, and mean squared cosine, of two column spaces a head."""
    bases = [torch.linalg.qr(x.double()).Q for x in (a, b)]
    cosines = torch.linalg.svdvals(bases[0].mT @ bases[1]).clamp(max=1)
    # Of small angles the cosine keeps half the digits; their sine is what the other basis has outside the space.
    outside = bases[1] - bases[0] @ (bases[0].mT @ bases[1])
    sine = torch.linalg.matrix_norm(outside, ord=2).clamp(max=1)
    return torch.rad2deg(torch.atan2(sine, cosines.amin(-1))), cosines.square().mean(-1)


def _copying(name: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    before, after = eigenvalue_copying(a), eigenvalue_copying(b)
    return {f"{name}_a": before, f"{name}_b": after, f"{name}_change": after - before}

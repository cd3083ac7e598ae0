"""Composition: which later heads read what an earlier head writes (Elhage et al. 2021, "Three Kinds of Composition").

    ||W_A W_B||_F / (||W_A||_F ||W_B||_F)

A is the earlier head's OV circuit. B is the later head's W_QK for Q-composition, W_QK^T for K-, W_OV for V-composition: the
write side of A meets the read side of B, and the whole circuit B counts, not W_Q or W_K alone. Every pair of heads of
different layers is worked out at once (:func:`ov_circuits.linalg.pairwise.pairwise_energy`).

A value means little by itself, so each comes with three nulls:

- ``rotation``: the same singular values, directions at random. Exact mean and variance of the squared value; ``null_mean``,
  ``z``, ``p`` and ``flag`` are of this one;
- ``isotropic``: Gaussian factors of the same shapes, about 1/sqrt(d_model) whatever d_head; ``z_isotropic``;
- ``paired``: the same heads paired at random, that is, the bulk of all pairs of this kind; ``z_paired``, ``p_paired``,
  ``flag_paired``. Trained heads share directions, so nearly all stand out from a random rotation; few stand out from this.

z-scores of the first two are of the squared value, whose moments are known; that of the third is of the logarithm. p-values
are one-sided (more than by chance); flags keep the expected share of false ones at 5 % within a kind (Benjamini & Hochberg).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, get_args

import numpy as np
import pandas as pd
import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from ov_circuits.errors import CircuitsError, whole_number
from ov_circuits.linalg.nulls import (
    Null,
    benjamini_hochberg,
    empirical_null,
    isotropic_null,
    normal_tail,
    rotation_null,
    subspace_null,
)
from ov_circuits.linalg.pairwise import gram_root, pairwise_energy
from ov_circuits.linalg.products import many_products, row_gram
from ov_circuits.linalg.threads import side_by_side
from ov_circuits.model import Head, Layer, Model
from ov_circuits.scores.broken import broken_tensors, need_finite
from ov_circuits.scores.papers import ELHAGE as SOURCE
from ov_circuits.scores.papers import MERULLO, SUBSPACES

Kind = Literal["Q", "K", "V"]
KINDS: tuple[Kind, ...] = get_args(Kind)

FALSE_DISCOVERY_RATE = 0.05

# How many senders, at least, meet later heads in one product: more would compute more pairs in the wrong order, fewer would
# be slower a pair.
_SENDERS = 48
# Of the heads' factors, how much is held at a time: 8 GB is what all of an 8B model's take.
FACTOR_BYTES = 3 * 2**30


@dataclass(frozen=True)
class Composition:
    """One kind of composition between all heads of a model.

    Attributes:
        kind: ``Q``, ``K`` or ``V``.
        view: weight view.
        labels: head names, the order of rows (senders) and columns (receivers).
        layers: each head's layer.
        matrix: values in [0, 1]; NaN where the sender is not in an earlier layer, or a weight is not finite.
        sender_concentration: sum s^4 / (sum s^2)^2 of each sender's OV.
        receiver_concentration: the same of each receiver's circuit.
        sender_cubes, receiver_cubes: sum s^6 / (sum s^2)^3.
        d_model, d_head: of the model.
        notes: what a reader must know.
    """

    kind: Kind
    view: str
    labels: list[str]
    layers: Tensor
    matrix: Float[Tensor, "sender receiver"]
    sender_concentration: Float[Tensor, " sender"]
    receiver_concentration: Float[Tensor, " receiver"]
    sender_cubes: Float[Tensor, " sender"]
    receiver_cubes: Float[Tensor, " receiver"]
    d_model: int
    d_head: int
    notes: list[str]

    @cached_property
    def rotation(self) -> Null:
        """Of the squared values: the same singular values, random directions, [sender, receiver]."""
        return rotation_null(
            self.sender_concentration[:, None],
            self.receiver_concentration[None],
            self.d_model,
            (self.sender_cubes[:, None], self.receiver_cubes[None]),
        )

    @property
    def isotropic(self) -> Null:
        """Of the squared values: independent Gaussian factors; one distribution for all pairs."""
        return isotropic_null(self.d_model, self.d_head)

    @cached_property
    def paired(self) -> Null:
        """Of the logarithm of the values: the bulk of all pairs of this kind."""
        return empirical_null(self.matrix.log())

    def frame(self) -> pd.DataFrame:
        """One row a pair with the sender in an earlier layer, senders in order; see the module's text for the nulls."""
        rows, columns = (self.layers[:, None] < self.layers[None]).nonzero(as_tuple=True)
        value = self.matrix[rows, columns]
        squared = value.square()
        rotation = self.rotation.at(rows, columns)
        p = rotation.gamma_tail(squared)
        z_paired = self.paired.z(value.log())
        p_paired = normal_tail(z_paired)
        names = np.array(self.labels)
        frame = pd.DataFrame(
            {
                "sender": names[rows],
                "receiver": names[columns],
                "kind": self.kind,
                "value": value.numpy(),
                "null_mean": rotation.mean.sqrt().numpy(),
                "z": rotation.z(squared).numpy(),
                "p": p.numpy(),
                "flag": benjamini_hochberg(p, FALSE_DISCOVERY_RATE).numpy(),
                "z_isotropic": self.isotropic.z(squared).numpy(),
                "z_paired": z_paired.numpy(),
                "p_paired": p_paired.numpy(),
                "flag_paired": benjamini_hochberg(p_paired, FALSE_DISCOVERY_RATE).numpy(),
            }
        )
        frame.attrs = {"view": self.view, "source": SOURCE, "notes": self.notes}
        return frame


def composition(model: Model, kind: str = "K") -> pd.DataFrame:
    """Composition scores of all pairs of heads, each with its nulls (Elhage et al. 2021, "Three Kinds of Composition").

    Args:
        model: in the weight view that the scores are to have.
        kind: ``Q``, ``K``, ``V``, or ``all``.

    Returns:
        Columns ``sender``, ``receiver``, ``kind``, ``value``, ``null_mean``, ``z``, ``p``, ``flag`` (random rotation),
        ``z_isotropic``, and ``z_paired``, ``p_paired``, ``flag_paired`` (all pairs of the kind). ``attrs`` holds model,
        view, source and notes.

    Raises:
        CircuitsError: unknown kind.
    """
    found = compositions(model, KINDS if kind == "all" else (_checked(kind),))
    frame = pd.concat([part.frame() for part in found.values()], ignore_index=True)
    notes = list(dict.fromkeys(note for part in found.values() for note in part.notes))
    frame.attrs = {"model": model.name, "view": model.view, "source": SOURCE, "notes": notes}
    return frame


def compositions(model: Model, kinds: Sequence[Kind] = KINDS) -> dict[Kind, Composition]:
    """Composition of the given kinds as [sender, receiver] matrices; senders' products are shared by the kinds."""
    a = model.architecture
    pairs = _pairs(model, _LayerSides.writer, [partial(_LayerSides.reader, kind=kind) for kind in kinds], True)
    layers = torch.arange(a.n_layers, device="cpu").repeat_interleave(a.n_heads)
    later = layers[:, None] < layers[None]
    return {
        kind: Composition(
            kind=kind,
            view=model.view,
            labels=model.head_labels,
            layers=layers,
            matrix=torch.where(later, pairs.energy[i].sqrt(), torch.nan),
            sender_concentration=pairs.sent[:, 0].square(),
            receiver_concentration=pairs.read[i, :, 0].square(),
            sender_cubes=pairs.sent[:, 1],
            receiver_cubes=pairs.read[i, :, 1],
            d_model=a.d_model,
            d_head=a.d_head,
            notes=_notes(model, kind) + pairs.notes,
        )
        for i, kind in enumerate(kinds)
    }


def strongest_paths(model: Model, n: int = 50, kind: str = "all") -> pd.DataFrame:
    """The pairs that stand out most from all pairs of their kind.

    Args:
        model: in the weight view that the scores are to have.
        n: how many.
        kind: ``Q``, ``K``, ``V``, or ``all``.

    Returns:
        The first ``n`` rows of :func:`composition` by falling ``z_paired``.

    Raises:
        CircuitsError: unknown kind.
    """
    return strongest(composition(model, kind), n)


def strongest(frame: pd.DataFrame, n: int) -> pd.DataFrame:
    """The ``n`` first rows of a frame of :func:`composition` by falling ``z_paired``."""
    found = frame.nlargest(whole_number("n", n, 1), "z_paired").reset_index(drop=True)
    found.attrs = frame.attrs
    return found


def component_composition(
    model: Model, sender: str, receiver: str | None = None, kind: str = "K", n: int | None = None
) -> pd.DataFrame:
    """One rank-one piece of the sender at a time (Merullo et al. 2024, "Talking Heads").

    The sender's OV is sum_k s_k u_k v_k^T. A piece composes with B as ``||v_k^T B|| / ||B||_F``, whatever s_k. Weighted by the
    shares of energy s_k^2 / sum s^2, the squares add up to the square of the whole score; ``share`` is a piece's part of it.

    Args:
        model: in the weight view that the scores are to have.
        sender: head whose OV is taken apart.
        receiver: one later head, or all of them when None.
        kind: ``Q``, ``K`` or ``V``.
        n: only the ``n`` largest values.

    Returns:
        Columns ``sender``, ``component`` (0 has the largest singular value), ``singular_value``, ``energy``, ``receiver``,
        ``kind``, ``value``, ``null_mean``, ``z`` (rotation null), ``share``; by falling value.

    Raises:
        CircuitsError: unknown head or kind, no later head, or a sender with weights that are not finite.
    """
    chosen, first = _checked(kind), model.head(sender)
    receivers = _receivers(model, first, receiver)
    need_finite(first, "singular components")
    pairs = first.ov.singular_pairs()
    energy = pairs.S.square() / pairs.S.square().sum()
    parts = []
    for later in receivers:
        side = _LayerSides(model.layer(later.layer)).reader(chosen)
        squared = (side.factors[later.index].double() @ pairs.V).square().sum(0)
        null = rotation_null(torch.ones_like(squared), side.norms[later.index].square(), model.architecture.d_model)
        parts.append(
            pd.DataFrame(
                {
                    "sender": first.label,
                    "component": range(len(squared)),
                    "singular_value": pairs.S.numpy(force=True),
                    "energy": energy.numpy(force=True),
                    "receiver": later.label,
                    "kind": chosen,
                    "value": squared.sqrt().numpy(force=True),
                    "null_mean": null.mean.sqrt().numpy(force=True),
                    "z": null.z(squared).numpy(force=True),
                    "share": (energy * squared / (energy * squared).sum()).numpy(force=True),
                }
            )
        )
    frame = pd.concat(parts).sort_values("value", ascending=False, kind="stable", ignore_index=True)
    frame = frame if n is None else frame.head(whole_number("n", n, 1))
    frame.attrs = {
        "model": model.name,
        "view": model.view,
        "source": MERULLO,
        "notes": _notes(model, chosen),
    }
    return frame


def subspace_overlap(model: Model, write: str = "O", read: str = "Q") -> pd.DataFrame:
    """``||U^T V||_F^2`` of the heads' write spaces and read spaces: how many directions they share, between 0 and d_head.

    Args:
        model: in the weight view that the spaces are to have.
        write: ``O``, the row space of W_O.
        read: ``Q``, ``K`` or ``V``, the column space of W_Q, W_K or W_V, of heads in later layers; or ``O``, the write spaces
            of all other heads, each pair once.

    Returns:
        Columns ``writer``, ``reader``, ``value``, ``share`` (of the smaller dimension), ``null_mean``, ``z``, ``p``, ``flag``
        (random subspaces). Under grouped-query attention the heads of a group read with one W_K and W_V: their rows agree.

    Raises:
        CircuitsError: unknown space.
    """
    if write != "O" or read not in ("Q", "K", "V", "O"):
        raise CircuitsError(f"there is no overlap of {write!r} with {read!r}: write is 'O', read one of Q, K, V, O")
    a = model.architecture
    spaces = [partial(_LayerSides.space, role=role) for role in (write, read)]
    pairs = _pairs(model, spaces[0], spaces[1:], later_layers=read != "O")
    (overlap,) = pairs.energy
    heads = torch.arange(overlap.shape[0], device="cpu")
    order = heads if read == "O" else heads // a.n_heads  # each pair of writers once; readers in later layers
    rows, columns = (order[:, None] < order[None]).nonzero(as_tuple=True)
    p, q = (
        norms.square().round()[index] for norms, index in ((pairs.sent[:, 0], rows), (pairs.read[0, :, 0], columns))
    )
    value, null = overlap[rows, columns], subspace_null(p, q, a.d_model)
    tail = null.gamma_tail(value)
    names = np.array(model.head_labels)
    frame = pd.DataFrame(
        {
            "writer": names[rows],
            "reader": names[columns],
            "value": value.numpy(),
            "share": (value / torch.minimum(p, q)).numpy(),
            "null_mean": null.mean.numpy(),
            "z": null.z(value).numpy(),
            "p": tail.numpy(),
            "flag": benjamini_hochberg(tail, FALSE_DISCOVERY_RATE).numpy(),
        }
    )
    frame.attrs = {
        "model": model.name,
        "view": model.view,
        "source": SUBSPACES,
        "write": write,
        "read": read,
        "notes": pairs.notes,
    }
    return frame


# -- factors ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sides:
    """One side of many heads' circuits.

    Attributes:
        factors: P [.., r, d_model] with P^T P the circuit's Gram matrix on this side, over its trace.
        moments: ||P^T P||_F and tr (P^T P)^3, [.., 2], float64.
    """

    factors: Tensor
    moments: Tensor

    @property
    def norms(self) -> Tensor:
        """||P^T P||_F, [..]."""
        return self.moments[..., 0]

    def __getitem__(self, layers: slice) -> _Sides:
        return _Sides(self.factors[layers], self.moments[layers])

    def flatten(self, dims: int) -> _Sides:
        """The leading dimensions as one."""
        return _Sides(self.factors.flatten(0, dims - 1), self.moments.flatten(0, dims - 1))


class _LayerSides:
    """What the heads of a layer write into and read from. Each [r, r] Gram matrix is worked out once for all kinds."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer

    def writer(self) -> _Sides:
        """The write side of OV, weighted by what the read side lets through."""
        return self._side(self._gram_V, self._gram_O, self.layer.W_O)

    def reader(self, kind: Kind) -> _Sides:
        """The read side of the circuit of a kind, weighted by the rest."""
        layer = self.layer
        if kind == "Q":
            return self._side(self._gram_K, self._gram_Q, layer.W_Q.mT)
        if kind == "K":
            return self._side(self._gram_Q, self._gram_K, layer.per_query_head(layer.W_K).mT)
        return self._side(self._gram_O, self._gram_V, layer.per_query_head(layer.W_V).mT)

    def space(self, role: str) -> _Sides:
        """An orthonormal basis of what a head writes into or reads from; zero rows where rank lacks. Not over its trace."""
        layer = self.layer
        W = {"O": layer.W_O.mT, "Q": layer.W_Q, "K": layer.W_K, "V": layer.W_V}[role].double()
        finite = W.isfinite().all(-1).all(-1)[:, None, None]
        U, S, _ = torch.linalg.svd(torch.where(finite, W, 0.0), full_matrices=False)
        independent = S > S[:, :1] * max(W.shape[-2:]) * torch.finfo(torch.float32).eps
        basis = U.mT * independent.unsqueeze(-1)
        basis = torch.nn.functional.pad(basis, (0, 0, 0, W.shape[-1] - basis.shape[-2]))  # where d_head > d_model
        basis = torch.where(finite, basis, torch.nan)
        rank = independent.double().sum(-1)
        return _Sides(layer.per_query_head(basis), layer.per_query_head(torch.stack([rank.sqrt(), rank], -1)))

    @staticmethod
    def _side(rest: Tensor, own: Tensor, W: Tensor) -> _Sides:
        """The circuit ``X W`` with X^T X = ``rest`` and ``own`` = W W^T, seen from W's side [head, r, d_model].

        NaN where a circuit is zero or not finite: composition with nothing is undefined.
        """
        product = rest @ own  # its eigenvalues are the circuit's squared singular values
        energy = product.diagonal(dim1=-2, dim2=-1).sum(-1)
        energy = torch.where((energy > 0) & energy.isfinite(), energy, torch.nan)
        root = gram_root(rest) / energy.sqrt()[:, None, None]
        # The roots are exact; one float32 product of r terms moves a norm by less than 1e-7, as its errors average out.
        norm, cube = (product * product.mT).sum((-2, -1)).sqrt(), (product @ product * product.mT).sum((-2, -1))
        return _Sides(
            many_products(root.to(W.dtype), W, out=torch.empty_like(W, memory_format=torch.contiguous_format)),
            torch.stack([norm / energy, cube / energy**3], -1),
        )

    @cached_property
    def _gram_Q(self) -> Tensor:
        return self._gram(self.layer.W_Q.mT)

    @cached_property
    def _gram_K(self) -> Tensor:
        return self._gram(self.layer.W_K.mT)

    @cached_property
    def _gram_V(self) -> Tensor:
        return self._gram(self.layer.W_V.mT)

    @cached_property
    def _gram_O(self) -> Tensor:
        return self._gram(self.layer.W_O)

    def _gram(self, W: Tensor) -> Tensor:
        """W W^T for W [head, r, d_model], for every query head; float64."""
        W = W.double()
        return self.layer.per_query_head(row_gram(W))


def space_basis(layer: Layer, role: str) -> Float[Tensor, "head r d_model"]:
    """Orthonormal bases of what a layer's heads write into (``O``) or read from (``Q``, ``K``, ``V``); NaN where not finite."""
    return _LayerSides(layer).space(role).factors


def _sides(
    model: Model, groups: Sequence[Sequence[Callable[[_LayerSides], _Sides]]], layers: range
) -> tuple[list[_Sides], dict[int, list[str]]]:
    """Sides of some layers' heads, [layer, side, head, ..] for each group of sides, and notes on broken tensors by layer."""
    a = model.architecture
    found = [_empty_sides(model.device, len(layers), len(group), a.n_heads, a.d_head, a.d_model) for group in groups]

    def work(i: int) -> list[str]:
        layer = model.layer(layers[i])
        sides = _LayerSides(layer)
        for into, group in zip(found, groups, strict=True):
            for j, side in enumerate(group):
                made = side(sides)
                into.factors[i, j], into.moments[i, j] = made.factors, made.moments
        sound = all(bool(into.norms[i].isfinite().all()) for into in found)
        return [] if sound else broken_tensors(model, layer.index, biases=False)

    notes = list(side_by_side(work, range(len(layers))))
    return found, dict(zip(layers, notes, strict=True))


def _empty_sides(device: torch.device, *shape: int) -> _Sides:
    """Room for sides whose factors are float32: rounding entries once costs a norm 1e-7."""
    return _Sides(
        torch.empty(*shape, device=device, dtype=torch.float32),
        torch.empty(*shape[:-2], 2, dtype=torch.float64, device=device),
    )


# -- pairs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pairs:
    """All heads against all, in ordinary memory whatever the model's device.

    Attributes:
        energy: [kind, sender, receiver], float64; zero or anything where the receiver had to be in a later layer and is not.
        sent: the senders' moments, [sender, 2]; see :class:`_Sides`.
        read: the receivers', [kind, receiver, 2].
        notes: on broken tensors.
    """

    energy: Tensor
    sent: Tensor
    read: Tensor
    notes: list[str]


def _pairs(
    model: Model,
    write: Callable[[_LayerSides], _Sides],
    reads: Sequence[Callable[[_LayerSides], _Sides]],
    later_layers: bool,
) -> _Pairs:
    """Energies of all pairs, or at least of those with the receiver in a later layer (few others are computed then).

    All factors are held at a time where they fit into :data:`FACTOR_BYTES`. Where not, some layers' senders meet some layers'
    receivers after the other, which are made anew for each.
    """
    a, kinds = model.architecture, len(reads)
    energy = torch.zeros(a.n_layers, a.n_heads, a.n_layers, kinds, a.n_heads, dtype=torch.float64, device="cpu")
    sent = torch.empty(a.n_layers, a.n_heads, 2, dtype=torch.float64, device="cpu")
    read = torch.empty(a.n_layers, kinds, a.n_heads, 2, dtype=torch.float64, device="cpu")
    notes: dict[int, list[str]] = {}

    def meet(left: _Sides, senders: range, right: _Sides, receivers: range) -> None:
        sent[senders.start : senders.stop] = left.moments[:, 0]
        read[receivers.start : receivers.stop] = right.moments
        _meet(energy, left, senders, right, receivers, later_layers)

    room = FACTOR_BYTES // (4 * a.n_heads * a.d_head * a.d_model)
    everything = range(a.n_layers)
    if a.n_layers * (1 + kinds) <= room:
        (left, right), notes = _sides(model, [[write], reads], everything)
        meet(left, everything, right, everything)
    else:
        for senders in _cut(everything, max(1, room // 2)):
            (left,), of_senders = _sides(model, [[write]], senders)
            notes |= {layer: found for layer, found in of_senders.items() if found}
            first = senders.start if later_layers else 0  # the first senders meet all: every receiver is looked at once
            for receivers in _cut(range(first, a.n_layers), max(1, room // 2 // kinds)):
                (right,), of_receivers = _sides(model, [reads], receivers)
                notes |= {layer: found for layer, found in of_receivers.items() if found}
                meet(left, senders, right, receivers)
    return _Pairs(
        rearrange(energy, "s i r kind j -> kind (s i) (r j)"),
        sent.flatten(0, 1),
        rearrange(read, "r kind j moment -> kind (r j) moment"),
        [note for layer in sorted(notes) for note in notes[layer]],
    )


def _cut(layers: range, size: int) -> Iterator[range]:
    return (layers[start : start + size] for start in range(0, len(layers), size))


def _meet(energy: Tensor, left: _Sides, senders: range, right: _Sides, receivers: range, later_layers: bool) -> None:
    """Some layers' senders [layer, 1, head, ..] and some layers' receivers [layer, kind, head, ..], into ``energy``."""
    _, kinds, n_heads = right.norms.shape
    if later_layers:  # the last layer has no receivers, the first no senders
        end, start = min(senders.stop, receivers.stop - 1), max(receivers.start, senders.start + 1)
        if senders.start >= end:
            return
        left, senders = left[: end - senders.start], range(senders.start, end)
        right, receivers = right[start - receivers.start :], range(start, receivers.stop)
    step = -(-_SENDERS // n_heads) if later_layers else len(senders)
    wanted = []
    for layer in senders[::step]:
        first = max(0, layer + 1 - receivers.start) if later_layers else 0
        at = layer - senders.start
        wanted.append((slice(at * n_heads, (at + step) * n_heads), slice(first * kinds * n_heads, None)))
    sent, read = left.flatten(3), right.flatten(3)
    energy[senders.start : senders.stop, :, receivers.start : receivers.stop] = (
        pairwise_energy(sent.factors, read.factors, wanted, (sent.norms, read.norms))
        .unflatten(0, (-1, n_heads))
        .unflatten(2, (-1, kinds, n_heads))
    )


def _receivers(model: Model, sender: Head, receiver: str | None) -> list[Head]:
    if receiver is None:
        later = [head for head in model.heads() if head.layer > sender.layer]
        if not later:
            raise CircuitsError(
                f"head {sender.label} is in the last layer of {model.name}: no head reads what it writes"
            )
        return later
    head = model.head(receiver)
    if head.layer <= sender.layer:
        raise CircuitsError(
            f"head {head.label} does not read what {sender.label} writes: the sender must be in an earlier layer"
        )
    return [head]


def _checked(kind: str) -> Kind:
    if kind not in KINDS:
        raise CircuitsError(f"there is no composition of kind {kind!r}; choose Q, K, V or all")
    return kind


def _notes(model: Model, kind: Kind) -> list[str]:
    if model.architecture.positions == "rotary" and kind != "V":
        return [
            "Rotary positions: W_QK depends on the distance of query and key; Q- and K-composition are those of distance 0, "
            "an approximation."
        ]
    return []

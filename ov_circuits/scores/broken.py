"""Weights that are not finite: which tensors of the checkpoint hold NaN or infinity, and which heads have no scores for it."""

from __future__ import annotations

from collections.abc import Iterable

from ov_circuits.checkpoint.layout import qk_norm_shapes
from ov_circuits.errors import CircuitsError
from ov_circuits.model import Head, Model


def broken_tensors(model: Model, layer: int, *, biases: bool = True) -> list[str]:
    """A sentence for every tensor that a layer's heads are made of and that holds NaN or infinity: the tensor and the heads.

    Args:
        model: the checkpoint, in any view.
        layer: which layer.
        biases: also those of Q, K and V, and the reading norm's, which circuits without biases do not hold.
    """
    source, weights = model.source, model.in_view("raw").layer(layer)
    projections = source.family.projections
    kinds = {"weight": {role: getattr(weights, f"W_{role}") for role in ("Q", "K", "V", "O")}}
    if biases:
        kinds["bias"] = {role: getattr(weights, f"b_{role}") for role in ("Q", "K", "V")}
    notes = []
    for kind, tensors in kinds.items():
        for role, tensor in tensors.items():
            if tensor is None:
                continue
            bad = weights.per_query_head(~tensor.isfinite().flatten(1).all(1)).nonzero().flatten().tolist()
            if bad:
                name = projections[role].name.format(layer=layer)  # type: ignore[index]
                heads = ", ".join(f"{layer}.{index}" for index in bad)
                notes.append(
                    f"{name}.{kind} ({'W' if kind == 'weight' else 'b'}_{role}) holds NaN or infinity: heads {heads} have no scores"
                )
    for name in _norms(model, layer, biases):
        if not bool(source.store.read(name).isfinite().all()):
            notes.append(f"{name} holds NaN or infinity: the heads of layer {layer} have no scores")
    return notes


def notes_on(model: Model, heads: Iterable[str]) -> list[str]:
    """:func:`broken_tensors` of the layers of these heads, in order."""
    layers = sorted({model.head(label).layer for label in heads})
    return [note for layer in layers for note in broken_tensors(model, layer)]


def need_finite(head: Head, what: str) -> None:
    """Refuse a head whose weights hold NaN or infinity.

    Raises:
        CircuitsError: it has no ``what``; the tensors are named.
    """
    if not bool(head.model.layer(head.layer).finite_heads[head.index]):
        why = "; ".join(broken_tensors(head.model, head.layer))
        raise CircuitsError(f"head {head.label} of {head.model.name} has no {what}: {why}")


def _norms(model: Model, layer: int, biases: bool) -> list[str]:
    """The tensors of the norms that a layer's heads hold in this view, as the store has them."""
    family, store = model.source.family, model.source.store
    if model.view == "raw":
        return []
    a, of_stream = model.architecture, (family.attention_norm, family.attention_post_norm)
    modules = [name.format(layer=layer) for name in of_stream if name is not None]
    for norm, heads in ((family.q_norm, a.n_heads), (family.k_norm, a.n_kv_heads)):
        if norm is not None and a.qk_norm is not None:
            modules += [module for module, _ in qk_norm_shapes(norm, a, layer, heads)]
    kinds = ("weight", "bias") if biases else ("weight",)
    return [name for module in modules for kind in kinds if (name := f"{module}.{kind}") in store]

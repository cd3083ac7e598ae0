"""Direct logit attribution as a closed account (Elhage et al. 2021; nostalgebraist 2020).

The residual stream at a position is a sum of what every component wrote there, and the final norm, at the scale sigma it
actually has at that position, is linear:

    logit(a) - logit(b) = sum_c ((c - mean(c)) / sigma) * gamma . (W_U[:, a] - W_U[:, b])  +  beta . (W_U[:, a] - W_U[:, b])

(RMSNorm has no mean and no beta.) No part is ever normalised by its own scale. Components are the embedding, the position,
every head x source token (value path), every head's value bias, every b_O and every MLP. The model's own logits come from a
different computation, so the residual is a check of everything: of the split, the group map, the biases, the norms.

It is a *direct* effect: removing a head may change less than its entry says, because later heads make up for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor

from ov_circuits.errors import CircuitsError
from ov_circuits.trace.trace import unbiased_values, value_bias_writes
from ov_circuits.words import token_id, token_text

if TYPE_CHECKING:
    from ov_circuits.trace.trace import Trace


@dataclass(frozen=True, eq=False)
class Reading:
    """What is accounted for: a direction of the final stream at one position.

    Attributes:
        quantity: its name, "logit of ..." or "logit difference ...".
        direction: [d_model], float64; a component c contributes ``c . direction`` (mean, gain and scale are in it).
        constant: what the final norm's bias contributes.
        actual: the model's own logit (difference).
        position: the position whose next token is explained.
        scale: the final norm's sigma there.
    """

    quantity: str
    direction: Tensor
    constant: float
    actual: float
    position: int
    scale: float


def ledger(trace: Trace, answer: str | int, against: str | int | None = None, position: int = -1) -> pd.DataFrame:
    """Account for the logit of ``answer``, or its difference to ``against``, at ``position``.

    Args:
        trace: a trace.
        answer: a word that is one token (a leading space is part of it), or a token id.
        against: the other word of a difference, or None.
        position: whose next-token logit is explained; the last by default.

    Returns:
        Rows ``component`` (embedding, position, head, attention_bias, mlp, final_norm), ``layer``, ``head`` (label),
        ``source`` (source position), ``kind`` (embedding, position, value_path, value_bias, b_O, mlp, norm_bias), ``value``.
        Values sum to the logit (difference). ``attrs``: ``quantity``, ``logit`` (the model's own), ``total``,
        ``residual`` = logit - total, ``scale``, ``position``, ``bos_added``, ``answer``, ``against`` (ids).

    Raises:
        CircuitsError: a word of several tokens, answer equal to against, or no such position.
    """
    answer_id, against_id = token_id(trace.model, answer), None if against is None else token_id(trace.model, against)
    if answer_id == against_id:
        raise CircuitsError(f"answer and against are the same token {token_text(trace.model, answer_id)!r}")
    reading = _reading(trace, answer_id, against_id, trace.position(position))
    frame = pd.DataFrame(_rows(trace, reading), columns=["component", "layer", "head", "source", "kind", "value"])
    frame = frame.astype({"layer": "Int64", "source": "Int64"})
    total = float(frame["value"].sum())
    frame.attrs = {
        "model": trace.model.name,
        "quantity": reading.quantity,
        "logit": reading.actual,
        "total": total,
        "residual": reading.actual - total,
        "scale": reading.scale,
        "position": reading.position,
        "bos_added": trace.bos_added,
        "answer": answer_id,
        "against": against_id,
    }
    return frame


def _reading(trace: Trace, answer: int, against: int | None, position: int) -> Reading:
    model, source = trace.model, trace.model.source
    column = source.unembedding[:, answer].double()
    actual = trace.logits[position, answer].double()
    quantity = f"logit of {token_text(model, answer)!r}"
    if against is not None:
        column = column - source.unembedding[:, against].double()
        actual = actual - trace.logits[position, against].double()
        quantity = f"logit difference {token_text(model, answer)!r} - {token_text(model, against)!r}"
    final = trace.record.final[position].double()
    direction = source.final_gain.double() * column
    if model.architecture.norm == "LayerNorm":
        final = final - final.mean()
        direction = direction - direction.mean()
    scale = float((final.square().mean() + model.architecture.norm_eps).sqrt())
    bias = source.final_bias
    constant = 0.0 if bias is None else float(bias.double() @ column)
    return Reading(quantity, direction / scale, constant, float(actual), position, scale)


def _rows(trace: Trace, reading: Reading) -> list[tuple[Any, ...]]:
    """Every component's entry, in the order of the stream."""
    at, d = reading.position, reading.direction
    record = trace.record
    rows: list[tuple[Any, ...]] = [("embedding", None, None, at, "embedding", float(record.embedding[at].double() @ d))]
    if record.position is not None:
        rows.append(("position", None, None, at, "position", float(record.position[at].double() @ d)))
    for index, layer in enumerate(record.layers):
        weights = trace.model.layer(index)
        read_out = weights.W_O.double() @ d
        per_source = torch.einsum("hsd,hd->hs", unbiased_values(layer, weights).double(), read_out)
        per_source = per_source * layer.pattern[:, at].double()
        for head, values in enumerate(per_source.tolist()):
            label = f"{index}.{head}"
            rows += [("head", index, label, s, "value_path", values[s]) for s in range(at + 1)]
        if weights.b_V is not None:
            biases = (value_bias_writes(weights).double() @ d) * layer.pattern[:, at].double().sum(-1)
            rows += [("head", index, f"{index}.{h}", None, "value_bias", b) for h, b in enumerate(biases.tolist())]
        if weights.b_O is not None:
            rows.append(("attention_bias", index, None, None, "b_O", float(weights.b_O.double() @ d)))
        rows.append(("mlp", index, None, None, "mlp", float(layer.mlp_output[at].double() @ d)))
    if trace.model.source.final_bias is not None:
        rows.append(("final_norm", None, None, None, "norm_bias", reading.constant))
    return rows

"""Closed accounts: direct logit attribution and who wrote what is read elsewhere (Elhage et al. 2021; nostalgebraist 2020).

The residual stream at a position is a sum of what every component wrote there, and a norm, at the scale sigma it actually has
at that position, is linear. So what the unembedding reads of the final stream is a sum over components c,

    logit(a) - logit(b) = sum_c ((c - mean(c)) / sigma) * gamma . (W_U[:, a] - W_U[:, b])  +  beta . (W_U[:, a] - W_U[:, b])

(RMSNorm has no mean and no beta), and so is what any head's query, key or value reads of the stream before it. No part is ever
normalised by its own scale; an attention output that passes a norm before it is added (Gemma 2, OLMo 2) goes through that norm
at its own actual scale. Components are the embedding, the position, every head x source token (value path), every head's value
bias, every b_O and every MLP. The quantity itself comes from the model's own run, so the residual is a check of everything: of
the split, the group map, the biases, the norms.

A ledger is of *direct* effects: removing a head may change less than its entry says, because later heads make up for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ov_circuits.checkpoint.norms import FrozenNorm
from ov_circuits.checkpoint.positions import turn
from ov_circuits.errors import CircuitsError
from ov_circuits.linalg.rotary import rotate
from ov_circuits.trace.trace import unbiased_values, value_bias_writes
from ov_circuits.words import token_id, token_text

if TYPE_CHECKING:
    import pandas as pd

    from ov_circuits.model import Head, Layer, Model
    from ov_circuits.trace.engines import LayerRecord
    from ov_circuits.trace.trace import Trace

# A word or token id, a weighting of several, or a direction [d_model] of the final norm's output.
Answer: TypeAlias = "str | int | Mapping[str, float] | Mapping[int, float] | Tensor"


@dataclass(frozen=True, eq=False)
class Reading:
    """What is accounted for: a direction of the stream at one position, before one layer.

    Attributes:
        quantity: its name, "logit of ..." or the like.
        layer: the stream that enters this layer is read; ``n_layers`` for the final one.
        position: the position whose stream is read.
        direction: [d_model], float64; a component c contributes ``c . direction`` (mean, gain and scale are in it).
        constants: what biases on the way contribute, as (component, kind, value).
        actual: the model's own number.
        scale: the sigma of the norm on the way, None without one.
        facts: what else the result should say.
    """

    quantity: str
    layer: int
    position: int
    direction: Float[Tensor, " d_model"]
    constants: tuple[tuple[str, str, float], ...]
    actual: float
    scale: float | None
    facts: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Account:
    """A reading, component by component; float64, in ordinary memory. Layers are those before the reading.

    Attributes:
        reading: what is accounted for.
        embedding, position: contributions of the embedding and of the learned position (None without).
        value_path: [layer, head, source].
        value_bias: [layer, head], or None without value biases.
        b_O: [layer], or None without.
        mlp: [layer].
    """

    reading: Reading
    embedding: float
    position: float | None
    value_path: Float[Tensor, "layer head source"]
    value_bias: Float[Tensor, "layer head"] | None
    b_O: Float[Tensor, " layer"] | None
    mlp: Float[Tensor, " layer"]

    @property
    def heads(self) -> Float[Tensor, "layer head"]:
        """Each head's whole contribution, its value bias included."""
        path = self.value_path.sum(-1)
        return path if self.value_bias is None else path + self.value_bias

    @property
    def total(self) -> float:
        """The sum of everything."""
        parts = [self.heads.sum(), self.mlp.sum(), 0.0 if self.b_O is None else self.b_O.sum()]
        ends = self.embedding + (self.position or 0.0) + sum(value for _, _, value in self.reading.constants)
        return float(sum(parts)) + ends

    @property
    def residual(self) -> float:
        """The model's own number minus the sum."""
        return self.reading.actual - self.total

    def frame(self) -> pd.DataFrame:
        """Rows ``component, layer, head, source, kind, value`` in the order of the stream; see :func:`ledger`."""
        import pandas as pd

        at = self.reading.position
        rows: list[tuple[Any, ...]] = [("embedding", None, None, at, "embedding", self.embedding)]
        if self.position is not None:
            rows.append(("position", None, None, at, "position", self.position))
        for layer, (paths, mlp) in enumerate(zip(self.value_path.tolist(), self.mlp.tolist(), strict=True)):
            for head, values in enumerate(paths):
                rows += [("head", layer, f"{layer}.{head}", s, "value_path", value) for s, value in enumerate(values)]
            if self.value_bias is not None:
                biases = enumerate(self.value_bias[layer].tolist())
                rows += [("head", layer, f"{layer}.{h}", None, "value_bias", value) for h, value in biases]
            if self.b_O is not None:
                rows.append(("attention_bias", layer, None, None, "b_O", float(self.b_O[layer])))
            rows.append(("mlp", layer, None, None, "mlp", mlp))
        rows += [(component, None, None, None, kind, value) for component, kind, value in self.reading.constants]
        frame = pd.DataFrame(rows, columns=["component", "layer", "head", "source", "kind", "value"])
        frame = frame.astype({"layer": "Int64", "source": "Int64"})
        facts: dict[Any, Any] = {
            "quantity": self.reading.quantity,
            "logit": self.reading.actual,
            "total": self.total,
            "residual": self.residual,
            "scale": self.reading.scale,
            "position": at,
        }
        frame.attrs = facts | dict(self.reading.facts)
        return frame


# -- what can be asked ------------------------------------------------------------------------------------------------


def ledger(trace: Trace, answer: Answer, against: str | int | None = None, position: int = -1) -> pd.DataFrame:
    """Account for the logit of ``answer``, or its difference to ``against``, at ``position``.

    Args:
        trace: a trace.
        answer: a word that is one token (a leading space is part of it), or a token id; a mapping of words or ids to weights,
            for a weighted sum of logits (probabilities, say); or a direction [d_model] of the final norm's output.
        against: the other word of a difference, or None.
        position: whose next-token logit is explained; the last by default.

    Returns:
        Rows ``component`` (embedding, position, head, attention_bias, mlp, final_norm, unembedding), ``layer``, ``head``
        (label), ``source`` (source position), ``kind`` (embedding, position, value_path, value_bias, b_O, mlp, norm_bias,
        unembedding_bias), ``value``. Values sum to the logit (difference), before the softcap where the model has one.
        ``attrs``: ``quantity``, ``logit`` (the model's own), ``total``, ``residual`` = logit - total, ``scale``,
        ``position``, ``bos_added``, ``answer``, ``against`` (ids; None for weights and directions), ``model``.

    Raises:
        CircuitsError: a word of several tokens, answer equal to against, no such position, or a direction of another size.
    """
    return accounts([trace], [logit_reading(trace, answer, against, position)])[0].frame()


def ledger_into(
    trace: Trace,
    head: Head | str,
    side: str,
    *,
    source: int,
    destination: int = -1,
    answer: Answer | None = None,
    against: str | int | None = None,
) -> pd.DataFrame:
    """Who wrote what a head's query, key or value reads: composition on this prompt.

    ``Q``: the attention score of ``destination`` for ``source`` (scaled, before softcap and alibi) as a sum over what was
    written at the destination, the key held as it is; ``K``: the same score over what was written at the source, the query held.
    ``V``: what the head carries from source to destination, over what was written at the source, attention held: along the
    answer's direction of the final norm, or without an answer along its own write, so that it sums to the write's norm.

    Returns:
        As :func:`ledger`, of the components before the head's layer; ``reader_bias`` rows are b_Q or b_K, held factors'
        own. ``attrs["logit"]`` is the score (or the write's size) from the recorded attention input.

    Raises:
        CircuitsError: an unknown side, head or position, a source after the destination, or an answer where none counts.
    """
    return accounts([trace], [input_reading(trace, head, side, source, destination, answer, against)])[0].frame()


def stream_ledger(trace: Trace, layer: int, direction: Tensor, position: int = -1) -> pd.DataFrame:
    """Who wrote a direction [d_model] of the residual stream that enters a layer (``n_layers``: the final stream).

    Returns:
        As :func:`ledger`; the quantity is ``stream . direction``, without any norm.

    Raises:
        CircuitsError: no such layer or position, or a direction of another size.
    """
    n_layers, at = trace.model.n_layers, trace.position(position)
    if isinstance(layer, bool) or not hasattr(layer, "__index__") or not 0 <= layer <= n_layers:
        raise CircuitsError(f"there is no stream before layer {layer!r}: give 0 to {n_layers} (the final stream)")
    direction = _direction(trace.model, direction)
    stream = trace.record.final if layer == n_layers else trace.record.layers[layer].stream
    actual = float(stream[at].double() @ direction)
    reading = Reading(f"stream before layer {layer}", layer, at, direction, (), actual, None, _facts(trace))
    return accounts([trace], [reading])[0].frame()


# -- readings ---------------------------------------------------------------------------------------------------------


def logit_reading(trace: Trace, answer: Answer, against: str | int | None = None, position: int = -1) -> Reading:
    """What :func:`ledger` accounts for.

    Raises:
        CircuitsError: as there.
    """
    model, at = trace.model, trace.position(position)
    source, scale = model.source, model.architecture.logit_scale
    weights, quantity, facts = _asked(model, answer, against)
    if weights is None:
        assert isinstance(answer, Tensor)
        column = _direction(model, answer)
        frozen = _final(trace, at, column)
        actual = float(source.final_norm(trace.record.final[at]).double() @ column)
        constants = _bias("final_norm", "norm_bias", frozen.constant, source.final_norm.bias)
    else:
        tokens = list(weights)
        amounts = torch.tensor(list(weights.values()), dtype=torch.float64, device=model.device)
        column = scale * (source.unembedding[:, tokens].double() @ amounts)
        frozen = _final(trace, at, column)
        actual = float(trace.record.uncapped[trace.row(at), tokens].double() @ amounts)
        constants = _bias("final_norm", "norm_bias", frozen.constant, source.final_norm.bias)
        if source.unembedding_bias is not None:
            shift = scale * float(source.unembedding_bias[tokens].double() @ amounts)
            constants += (("unembedding", "unembedding_bias", shift),)
    facts = _facts(trace) | facts
    return Reading(quantity, model.n_layers, at, frozen.direction, constants, actual, frozen.scale, facts)


def _asked(
    model: Model, answer: Answer, against: str | int | None
) -> tuple[dict[int, float] | None, str, dict[str, Any]]:
    """Weights of the logits that are asked for (None for a direction), what they are called, and the ids."""
    if isinstance(answer, (Tensor, Mapping)) and against is not None:
        raise CircuitsError("'against' goes with one word; give a weighting its own negative weights")
    if isinstance(answer, Tensor):
        return None, "a direction of the final norm's output", {"answer": None, "against": None}
    if isinstance(answer, Mapping):
        weights = {token_id(model, word): float(weight) for word, weight in answer.items()}
        if len(weights) < len(answer):
            raise CircuitsError("two words of the weighting are the same token: give each token one weight")
        if not weights or not all(map(math.isfinite, weights.values())):
            raise CircuitsError("a weighting of logits holds at least one word, and finite weights")
        named = " ".join(f"{weight:+.3g} {token_text(model, token)!r}" for token, weight in list(weights.items())[:4])
        more = " .." if len(weights) > 4 else ""
        return weights, f"weighted logits {named}{more}", {"answer": None, "against": None}
    answer_id, against_id = token_id(model, answer), None if against is None else token_id(model, against)
    facts = {"answer": answer_id, "against": against_id}
    if against_id is None:
        return {answer_id: 1.0}, f"logit of {token_text(model, answer_id)!r}", facts
    if answer_id == against_id:
        raise CircuitsError(f"answer and against are the same token {token_text(model, answer_id)!r}")
    named = f"{token_text(model, answer_id)!r} - {token_text(model, against_id)!r}"
    return {answer_id: 1.0, against_id: -1.0}, f"logit difference {named}", facts


def input_reading(
    trace: Trace,
    head: Head | str,
    side: str,
    source: int,
    destination: int = -1,
    answer: Answer | None = None,
    against: str | int | None = None,
) -> Reading:
    """What :func:`ledger_into` accounts for.

    Raises:
        CircuitsError: as there.
    """
    if side not in ("Q", "K", "V"):
        raise CircuitsError(f"a head has no {side!r} input: choose Q, K or V")
    record, index, weights = trace.parts(head)
    if side != "V" and (answer is not None or against is not None):
        raise CircuitsError(
            f"what a {_SIDES[side]} reads goes into a score and into no answer: leave it out, or ask for side V"
        )
    if answer is None and against is not None:
        raise CircuitsError("'against' needs an answer beside it")
    t, s = trace.position(destination), trace.position(source)
    if s > t:
        raise CircuitsError(f"position {t} cannot attend to {s}, which comes after it")
    label, model = f"{weights.index}.{index}", trace.model
    if weights.qkv_clip is not None:
        raise CircuitsError(
            f"{model.name} clamps queries, keys and values: what a head reads is no sum of what was written"
        )
    norm = model.source.attention_norm(weights.index)
    if side == "V":
        at, read, bias, quantity = s, *_value_side(trace, record, weights, index, s, t, answer, against)
    else:
        at, read, bias = _score_side(trace, record, weights, index, side, s, t)
        quantity = f"attention score of {label}, position {t} for {s}, over its {_SIDES[side]}"
    frozen = norm.frozen(record.stream[at], read)
    constants = _bias("attention_norm", "norm_bias", frozen.constant, norm.bias)
    if bias is not None:
        constants += (("head", "reader_bias", bias),)
    actual = float(record.attention_input[at].double() @ read) + (bias or 0.0)
    facts = _facts(trace) | {"into": label, "side": side, "source": s, "destination": t}
    return Reading(quantity, weights.index, at, frozen.direction, constants, actual, frozen.scale, facts)


_SIDES = {"Q": "query", "K": "key", "V": "value"}


def _score_side(
    trace: Trace, record: LayerRecord, weights: Layer, index: int, side: str, s: int, t: int
) -> tuple[int, Tensor, float | None]:
    """Position, direction of the attention input, and the bias's part, of a score with its other side held.

    Norms of queries and keys are held at the scales that they have; positions are in the direction; a softcap comes after.
    """
    a, checkpoint, x = trace.model.architecture, trace.model.source.checkpoint, record.attention_input
    kv = index // a.group_size
    at, own_head, W, b, norm = t, index, weights.W_Q, weights.b_Q, weights.q_norm
    other, held = weights.keys(x[s : s + 1], kv)[0], s
    if side == "K":
        at, own_head, W, b, norm = s, kv, weights.W_K, weights.b_K, weights.k_norm
        other, held = weights.queries(x[t : t + 1], index)[0], t
    rotary = a.rotary_of(weights.index)
    if rotary is not None:
        by = turn(rotary, checkpoint.config, checkpoint.where, len(trace))
        # R_t q . R_s k depends on the offset alone, so the held side is turned by it.
        offset = torch.tensor([held - at], device="cpu")
        other = rotate(other[None], offset, by.frequencies, interleaved=by.interleaved, scale=by.scale**2)[0]
    other = other * weights.score_scale
    constant = 0.0
    if norm is None:
        read, W, b = other[None], W[own_head, None], None if b is None else b[own_head, None]
    else:
        before = torch.einsum("m,hmd->hd", x[at].double(), W.double())
        read, constant = norm.frozen(before if b is None else before + b.double(), own_head, other)
    if b is not None:
        constant += float((b.double() * read).sum())
    biased = b is not None or (norm is not None and norm.bias is not None)
    return at, torch.einsum("hmd,hd->m", W.double(), read), constant if biased else None


def _value_side(
    trace: Trace,
    record: LayerRecord,
    weights: Layer,
    index: int,
    s: int,
    t: int,
    answer: Answer | None,
    against: str | int | None,
) -> tuple[Tensor, None, str]:
    """Direction of the attention input along which a head's value is read, at the attention it has."""
    W_V, W_O = weights.per_query_head(weights.W_V)[index].double(), weights.W_O[index].double()
    attention = float(trace.record.shard.gather(record.pattern[:, t, s])[index])
    label = f"{weights.index}.{index}"
    if answer is None:
        write = attention * (record.attention_input[s].double() @ W_V @ W_O)
        direction = write / write.norm().clamp(min=1e-300)
        what = f"size of what {label} writes from {s} to {t}"
    else:
        reading = logit_reading(trace, answer, against, t)
        direction = _through_post_norm(trace, weights.index, t, reading.direction).direction
        what = f"{label}'s part, from {s} to {t}, in the {reading.quantity}"
    return attention * (W_V @ (W_O @ direction)), None, what


# -- the sum ----------------------------------------------------------------------------------------------------------


def accounts(traces: Sequence[Trace], readings: Sequence[Reading]) -> list[Account]:
    """One account a trace; all traces are of one model. Each layer's weights are read out once for all of them."""
    layers: list[list[_LayerEntries]] = [[] for _ in readings]
    for index in range(max((reading.layer for reading in readings), default=0)):
        before = [number for number, reading in enumerate(readings) if index < reading.layer]
        found = _layer_entries([traces[number] for number in before], [readings[number] for number in before], index)
        for number, entries in zip(before, found, strict=True):
            layers[number].append(entries)
    return [_account(*parts) for parts in zip(traces, readings, layers, strict=True)]


@dataclass(frozen=True, eq=False)
class _LayerEntries:
    """One layer's part of an account: of the heads that this process holds."""

    value_path: Float[Tensor, "head source"]
    value_bias: Float[Tensor, " head"] | None
    b_O: float | None
    mlp: float


def _layer_entries(traces: Sequence[Trace], readings: Sequence[Reading], index: int) -> list[_LayerEntries]:
    weights, own = traces[0].model.layer(index), traces[0].record.shard.heads
    through = torch.stack([write_direction(*pair, index) for pair in zip(traces, readings, strict=True)])
    read_out = torch.einsum("hdm,rm->rhd", weights.W_O[own].double(), through)
    read_in = None  # clamped values are no linear function of what they read
    if weights.qkv_clip is None:
        read_in = torch.einsum("hmd,rhd->rhm", weights.per_query_head(weights.W_V)[own].double(), read_out)
    value_bias = None if weights.b_V is None else through @ value_bias_writes(weights)[own].double().mT
    b_O = None if weights.b_O is None else (through @ weights.b_O.double()).tolist()
    found = []
    for row, (trace, reading) in enumerate(zip(traces, readings, strict=True)):
        layer, at = trace.record.layers[index], reading.position
        if read_in is None:
            values = unbiased_values(layer, weights)[own, : at + 1].double()
            per_source = torch.einsum("hsd,hd->hs", values, read_out[row])
        else:
            per_source = read_in[row] @ layer.attention_input[: at + 1].double().mT
        pattern = layer.pattern[:, at, : at + 1].double()
        entries = _LayerEntries(
            value_path=pattern * per_source,
            value_bias=None if value_bias is None else value_bias[row] * pattern.sum(-1),
            b_O=None if b_O is None else b_O[row],
            mlp=float(layer.mlp_output[at].double() @ reading.direction),
        )
        found.append(entries)
    return found


def _account(trace: Trace, reading: Reading, found: Sequence[_LayerEntries]) -> Account:
    at, d, record, a = reading.position, reading.direction, trace.record, trace.model.architecture
    biases = [layer.value_bias for layer in found if layer.value_bias is not None]
    b_O = [layer.b_O for layer in found if layer.b_O is not None]
    empty = torch.zeros(0, a.n_heads, at + 1, dtype=torch.float64, device="cpu")
    gather = record.shard.gather
    return Account(
        reading=reading,
        embedding=float(record.embedding[at].double() @ d),
        position=None if record.position is None else float(record.position[at].double() @ d),
        value_path=gather(torch.stack([layer.value_path for layer in found]), 1).cpu() if found else empty,
        value_bias=gather(torch.stack(biases), 1).cpu() if biases else None,
        b_O=torch.tensor(b_O, dtype=torch.float64, device="cpu") if b_O else None,
        mlp=torch.tensor([layer.mlp for layer in found], dtype=torch.float64, device="cpu"),
    )


def write_direction(trace: Trace, reading: Reading, layer: int) -> Float[Tensor, " d_model"]:
    """Along which a reading sees what a layer's heads write at its position: a head's entry is its write times this."""
    return _through_post_norm(trace, layer, reading.position, reading.direction).direction


def _through_post_norm(trace: Trace, layer: int, at: int, direction: Tensor) -> FrozenNorm:
    """A direction of the stream as the attention output sees it, at the actual scale of the norm between, if any."""
    norm = trace.model.source.attention_post_norm(layer)
    if norm is None:
        return FrozenNorm(direction, 0.0, 1.0)
    return norm.frozen(trace.record.layers[layer].attention_output[at], direction)


def _final(trace: Trace, at: int, column: Tensor) -> FrozenNorm:
    return trace.model.source.final_norm.frozen(trace.record.final[at], column)


def _bias(component: str, kind: str, value: float, bias: Tensor | None) -> tuple[tuple[str, str, float], ...]:
    return () if bias is None else ((component, kind, value),)


def _direction(model: Model, direction: Tensor) -> Tensor:
    """A direction of the stream, float64, checked."""
    d_model = model.architecture.d_model
    if not isinstance(direction, Tensor) or tuple(direction.shape) != (d_model,) or direction.is_complex():
        shown = list(direction.shape) if isinstance(direction, Tensor) else type(direction).__name__
        raise CircuitsError(f"a direction of {model.name} is a real tensor [{d_model}], not {shown}")
    if not bool(direction.isfinite().all()):
        raise CircuitsError("the direction holds NaN or infinity")
    return direction.detach().double().to(model.device)


def _facts(trace: Trace) -> dict[str, Any]:
    return {"model": trace.model.name, "bos_added": trace.bos_added}

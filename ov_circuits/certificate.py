"""The certificate: is the split right on this very checkpoint?

A wrong split has the right shapes and plausible numbers, so only numbers prove it. The model runs once on a probe (through
transformers, which knows nothing of our split) and four identities must hold:

1. sum of heads: ``sum_h z_h W_O[h] + b_O`` is the attention layer's own output, at every layer and position. Finds a W_O split
   along the wrong axis, a missing b_O. It takes z from the run, so it does not see W_V.
2. one token: at the first position attention can only look at itself, so the output is ``sum_h (x W_V[g(h)] + b_V) W_O[h] + b_O``.
   Finds a wrong group map, a wrong layout of fused or grouped W_V, a value bias left out or added twice.
3. query-key pattern: the softmax of our own ``x W_Q (x W_K)^T`` is the model's attention pattern, with all that stands between
   them: norms of queries and keys, rotary positions (whole or in part, neighbours or halves, rescaled), alibi, softcap, windows.
   Finds wrong Q or K layouts and permuted rotary rows, which leave OV right.
4. ledger: the direct-logit account of the two likeliest next tokens sums to the model's own logit difference, and what enters the
   stream is W_E's rows. Finds a wrong final norm, unembedding or embedding, or a factor that one of them lacks.

And, from the weights alone: low-rank spectra against the dense matrices of sampled heads.

What it cannot see: the model that runs has its tensors from this package's reading of the file. Hugging Face's files are read as
they stand; where a file keeps tensors otherwise (GGUF, llama2.c, Meta's, Megatron's), a fault in undoing that would be in both.
Those readers have tests of their own. And a key bias where positions do not turn keys: it moves all scores of a query alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch
from einops import rearrange
from torch import Tensor

from ov_circuits.checkpoint.positions import alibi_slopes, turn
from ov_circuits.checkpoint.tokenizer import bos_in_vocabulary
from ov_circuits.errors import CircuitsError
from ov_circuits.linalg.rotary import rotate
from ov_circuits.model import Layer, Model
from ov_circuits.shown import counted
from ov_circuits.trace.tensor_parallel import rank_facts

if TYPE_CHECKING:
    import pandas as pd

    from ov_circuits.trace.trace import Trace

# Relative to the size of what is compared: float32 runs differ by a few 1e-7 a layer.
_OUTPUT_LIMIT = 1e-5
_PATTERN_LIMIT = 1e-4
_LEDGER_LIMIT = 1e-4
_SPECTRUM_LIMIT = 1e-6

_PROBE_LENGTH = 16


@dataclass(frozen=True)
class Check:
    """One identity.

    Attributes:
        name: what was checked.
        passed: whether it holds; None when it could not be checked.
        value: the largest relative error found.
        limit: what it must stay below.
        detail: where the largest error is, or why nothing could be checked.
    """

    name: str
    passed: bool | None
    value: float | None
    limit: float | None
    detail: str


# What the checks say, for readers who meet their names on a page.
MEANINGS = {
    "low-rank against dense": "Singular values, norm and trace, found without forming W_V W_O, are those of the matrix itself.",
    "sum of heads": "What the heads write, added up with b_O, is the attention layer's own output: the split into heads is right.",
    "one token": "A position that sees only itself writes its own value: each query head is paired with its right key/value head.",
    "query-key pattern": "W_Q, W_K, biases and positions give the attention that the model itself computes.",
    "ledger": "The parts of a logit add up to the model's own logit: nothing is left out or counted twice.",
}


@dataclass(frozen=True)
class Certificate:
    """All checks of one checkpoint."""

    model: str
    checks: tuple[Check, ...]

    def __repr__(self) -> str:
        return f"Certificate(of {self.model!r}: {self.summary})"

    def _repr_html_(self) -> str | None:
        from ov_circuits.shown import notebook_html

        return notebook_html("certificate_html", self)

    @property
    def passed(self) -> bool:
        """Whether no check failed. Checks that could not be made are listed, not counted as passed."""
        return all(check.passed is not False for check in self.checks)

    @property
    def summary(self) -> str:
        """``4 of 5 checks passed, 1 not possible``."""
        made = [check for check in self.checks if check.passed is not None]
        text = f"{sum(bool(check.passed) for check in made)} of {len(self.checks)} checks passed"
        skipped = len(self.checks) - len(made)
        return text + (f", {skipped} not possible" if skipped else "")

    def frame(self) -> pd.DataFrame:
        """Columns ``name``, ``passed``, ``value``, ``limit``, ``detail``."""
        import pandas as pd

        return pd.DataFrame([asdict(check) for check in self.checks])


def verify(model: Model, prompt: str | Sequence[int] | None = None) -> Certificate:
    """Check the split on this checkpoint.

    Args:
        model: any view; the identities are about the raw weights.
        prompt: what to run; by default BOS (where there is one) and seeded random tokens.

    Returns:
        The checks, each with the largest relative error found and the limit that it must stay below.

    Raises:
        CircuitsError: the prompt cannot be run, or not in float32.
    """
    raw = model.in_view("raw")
    checks = [_check_spectra(model)]
    try:
        _need_float32(raw)
        trace = raw.trace(_probe(raw) if prompt is None else prompt)
    except CircuitsError as error:
        if prompt is not None:
            raise
        names = ("sum of heads", "one token", "query-key pattern", "ledger")
        why = raw.why_not_run or str(error)
        checks += [Check(name, None, None, None, f"no prompt can be run: {why}") for name in names]
        return Certificate(model.name, tuple(checks))
    checks += [_check_sum(trace), _check_one_token(trace), _check_pattern(trace), _check_ledger(trace)]
    if trace.record.shard.ranks is not None:
        checks.append(_check_ranks(trace))
    return Certificate(model.name, tuple(checks))


def _need_float32(model: Model) -> None:
    """A model in memory runs in its own precision, and half precision proves nothing to five digits.

    Raises:
        CircuitsError: the model's weights are of less than 32 bits.
    """
    dtype = getattr(model.source.network, "dtype", torch.float32)
    if dtype.itemsize < 4:
        name = str(dtype).removeprefix("torch.")
        raise CircuitsError(f"{model.name} runs in {name}: give it in float32 (network.float()), or its checkpoint")


def _probe(model: Model) -> list[int]:
    a = model.architecture
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(a.n_vocab, (min(_PROBE_LENGTH, a.n_ctx),), generator=generator, device="cpu").tolist()
    config = model.source.checkpoint.config
    bos = bos_in_vocabulary(config.get("bos_token_id"), config)
    return tokens if bos is None else [bos, *tokens[1:]]


def _check_sum(trace: Trace) -> Check:
    def error(index: int, layer: Layer) -> Tensor:
        record = trace.record.layers[index]
        shard = trace.record.shard
        total = shard.sum(torch.einsum("htd,hdm->tm", record.z.double(), layer.W_O[shard.heads].double()))
        return _relative(_with_bias(total, layer.b_O), record.attention_output)

    return _worst("sum of heads", trace, error, _OUTPUT_LIMIT)


def _check_ranks(trace: Trace) -> Check:
    """Tensor parallelism: each rank's z through the very block it runs with, summed over ranks, is the layer's output."""
    shard, scale, partials = trace.record.shard, trace.model.architecture.residual_scale, []

    def error(index: int, layer: Layer) -> Tensor:
        record = trace.record.layers[index]
        z = rearrange(record.z.double(), "head pos d_head -> pos (head d_head)")
        partial = z @ rank_facts(trace.model, index)["block"].double().to(z.device) * scale
        partials.append(float(partial.norm()))
        return _relative(_with_bias(shard.sum(partial), layer.b_O), record.attention_output)

    check = _worst("sum over ranks", trace, error, _OUTPUT_LIMIT)
    facts = rank_facts(trace.model, 0)
    first, last = facts["heads"]
    shape = list(facts["block"].shape)
    own = f"rank {facts['rank']}: heads {first} to {last}, W_O block {shape}, partial output of norm {partials[-1]:.4g}"
    assert shard.ranks is not None
    every = shard.ranks.gather_on_all(own)
    return replace(check, detail=f"{check.detail}; last layer: {'; '.join(every)}")


def _check_one_token(trace: Trace) -> Check:
    def error(index: int, layer: Layer) -> Tensor:
        record = trace.record.layers[index]
        v = layer.per_query_head(layer.values(record.attention_input[:1]))
        total = torch.einsum("htd,hdm->m", v, layer.W_O.double())
        return _relative(_with_bias(total, layer.b_O), record.attention_output[0])

    return _worst("one token", trace, error, _OUTPUT_LIMIT)


def _check_pattern(trace: Trace) -> Check:
    a, checkpoint = trace.model.architecture, trace.model.source.checkpoint
    positions = torch.arange(len(trace), device="cpu")
    distance = (positions.unsqueeze(1) - positions.unsqueeze(0)).to(trace.model.device)
    slopes = alibi_slopes(a).to(distance.device)[:, None, None] if a.positions == "alibi" else None

    def error(index: int, layer: Layer) -> Tensor:
        record, rotary, window = trace.record.layers[index], a.rotary_of(index), a.window_of(index)
        q, k = layer.queries(record.attention_input), layer.keys(record.attention_input)
        if rotary is not None:
            by = turn(rotary, checkpoint.config, checkpoint.where, len(trace))
            q, k = (rotate(x, positions, by.frequencies, interleaved=by.interleaved, scale=by.scale) for x in (q, k))
        scores = q @ layer.per_query_head(k).mT * layer.score_scale
        if slopes is not None:
            scores = scores - slopes * distance
        if a.attention_softcap is not None:
            scores = a.attention_softcap * (scores / a.attention_softcap).tanh()
        hidden = (distance < 0) | (distance >= (len(trace) if window is None else window))
        pattern = scores.masked_fill(hidden, -math.inf).softmax(-1)
        shard = trace.record.shard
        return shard.gather((pattern[shard.heads] - record.pattern).abs().flatten(1).amax(1)).amax()

    return _worst("query-key pattern", trace, error, _PATTERN_LIMIT)


def _check_ledger(trace: Trace) -> Check:
    top = trace.record.logits[-1].topk(min(2, trace.record.logits.shape[-1])).indices.tolist()
    frame = trace.ledger(*top)
    scale = max(float(trace.record.logits[-1].abs().max()), 1e-12)
    detail = f"{frame.attrs['quantity']}: {frame.attrs['logit']:.6g}, account {frame.attrs['total']:.6g}"
    # The account takes the embedding from the run: that it is the checkpoint's W_E is compared by itself.
    embedding = float(_relative(trace.model.embedding[list(trace.tokens)].double(), trace.record.embedding))
    value = max(abs(frame.attrs["residual"]) / scale, embedding)
    if not embedding <= _LEDGER_LIMIT:
        detail = f"what enters the stream is not W_E's rows, but {embedding:.2g} of their size away from them"
    return Check("ledger", value <= _LEDGER_LIMIT, value, _LEDGER_LIMIT, detail)


def _check_spectra(model: Model) -> Check:
    """Norm, trace and singular values of one head in each of the first, middle and last layer, against the dense matrix."""
    value, where = 0.0, ""
    for layer in sorted({0, model.n_layers // 2, model.n_layers - 1}):
        head = model.head(layer, (layer * 7 + 1) % model.n_heads)
        ov = head.ov
        if not (ov.left.isfinite().all() and ov.right.isfinite().all()):
            detail = f"W_V or W_O of head {head.label} holds NaN or infinite numbers"
            return Check("low-rank against dense", False, math.nan, _SPECTRUM_LIMIT, detail)
        dense = ov.left.double() @ ov.right.double()
        expected = torch.linalg.svdvals(dense)[: len(ov.singular_values)]
        norm = float(expected.square().sum().sqrt()) or 1.0
        errors = (
            float((ov.singular_values - expected).abs().max()),
            abs(float(ov.frobenius_norm - torch.linalg.matrix_norm(dense))),
            abs(float(ov.trace - dense.trace())),
        )
        worst = max(errors) / norm
        if worst > value:
            value, where = worst, head.label
    return Check(
        "low-rank against dense",
        value <= _SPECTRUM_LIMIT,
        value,
        _SPECTRUM_LIMIT,
        f"singular values, norm and trace of W_V W_O; largest error at head {where}" if where else "exact",
    )


def _worst(name: str, trace: Trace, error: Callable[[int, Layer], Tensor], limit: float) -> Check:
    """The largest error over layers; NaN counts as the largest."""
    errors = torch.stack([error(index, trace.model.layer(index)) for index in range(trace.model.n_layers)])
    layer = int(torch.nan_to_num(errors, nan=math.inf).argmax())
    value = float(errors[layer])
    return Check(
        name,
        value <= limit,
        value,
        limit,
        f"{counted(len(errors), 'layer')}, {counted(len(trace), 'position')}; largest error at layer {layer}",
    )


def _with_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


def _relative(ours: Tensor, theirs: Tensor) -> Tensor:
    """The largest distance between rows, relative to the row's norm."""
    theirs = theirs.double()
    return ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-30)).amax()

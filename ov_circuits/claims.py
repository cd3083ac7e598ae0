"""Does a head do what its weights say? A claim is put to the test on prompts, beside random heads of the same layer.

A score of weights is a claim about behaviour that nobody has seen. Here it is seen: on prompts that are built for the claim, how
far the head attends to what the claim is about, what it writes there (:mod:`ov_circuits.trace.ledger`), and what the model loses
without it (:mod:`ov_circuits.trace.ablation`). Each number has a bootstrap interval over prompts, and the same number of other
heads of its layer beside it: many heads raise what they attend to a little.

    "1.4 copies"                    on repeated random tokens: the logit of each attended token, over the vocabulary's mean
    "10.7 suppresses"               the same, lowered
    "9.3 applies country_capital"   after a few examples of the relation: the target's logit over the other targets'
    "4.11 K-composes with 5.5"      on repeated random tokens: how far the later head's attention hangs on what the earlier
                                    one wrote into its keys (or queries), by path patching (Goldowsky-Dill et al. 2023)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ov_circuits.errors import CircuitsError, check_seed, whole_number
from ov_circuits.model import Head, Model
from ov_circuits.scores.copying import single_token
from ov_circuits.scores.relations import read_relation
from ov_circuits.trace.ablation import Job, Removal, ablated_runs
from ov_circuits.trace.ledger import input_reading, logit_reading, write_direction
from ov_circuits.trace.trace import Trace, unbiased_values
from ov_circuits.words import bos_id, ordinary_tokens

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Copies:
    """A head raises the logit of the tokens that it attends to; with ``sign`` -1, it lowers it."""

    head: str
    sign: Literal[1, -1] = 1

    def __str__(self) -> str:
        return f"{self.head} {'copies' if self.sign == 1 else 'suppresses'}"


@dataclass(frozen=True)
class Applies:
    """A head that attends to a source word of a relation raises its target."""

    head: str
    relation: str

    def __str__(self) -> str:
        return f"{self.head} applies {self.relation}"


@dataclass(frozen=True)
class Composes:
    """What one head writes steers a later head's attention, through its queries (``Q``) or keys (``K``)."""

    head: str
    side: Literal["Q", "K"]
    receiver: str

    def __str__(self) -> str:
        return f"{self.head} {self.side}-composes with {self.receiver}"


Claim: TypeAlias = "Copies | Applies | Composes"

_CLAIMS = re.compile(
    r"(?P<head>\S+)\s+(?:(?P<copies>copies|suppresses)|applies\s+(?P<relation>\S+)|"
    r"(?P<side>[QK])-composes\s+with\s+(?P<receiver>\S+))\.?",
    re.IGNORECASE,
)


def parse_claim(text: str) -> Claim:
    """A claim from its sentence.

    Raises:
        CircuitsError: it is none of the four kinds.
    """
    match = _CLAIMS.fullmatch(text.strip())
    if match is None:
        raise CircuitsError(
            f"{text[:80]!r} is no claim that can be checked: write '9.9 copies', '10.7 suppresses', "
            "'9.3 applies country_capital' or '4.11 K-composes with 5.5'"
        )
    found = match.groupdict()
    if found["copies"]:
        return Copies(found["head"], 1 if found["copies"].lower() == "copies" else -1)
    if found["relation"]:
        return Applies(found["head"], found["relation"])
    return Composes(found["head"], "Q" if found["side"].upper() == "Q" else "K", found["receiver"])


@dataclass(frozen=True)
class Effect:
    """One measured number, a mean over prompts.

    Attributes:
        name: ``attention``, ``write``, ``direct``, ``ablation``, or for composition ``score``, ``path``, ``pattern``.
        what: in words, with the unit.
        value, low, high: the head's, with a 95 % bootstrap interval over prompts.
        others: the mean of the heads that it is compared with.
        difference, difference_low, difference_high: the head's less theirs, with its interval.
        at_least_as_strong: how many of them have it at least as strongly, in the claim's sense.
        decides: whether the verdict is about this number.
    """

    name: str
    what: str
    value: float
    low: float
    high: float
    others: float
    difference: float
    difference_low: float
    difference_high: float
    at_least_as_strong: int
    decides: bool


@dataclass(frozen=True)
class Finding:
    """What came of a claim.

    Attributes:
        model: the checkpoint's name.
        claim: as a sentence.
        verdict: ``supported``, ``not supported`` or ``not testable``.
        reason: why, in a sentence.
        effects: what was measured; empty when nothing could be.
        others: the heads that it was compared with.
        prompts: how many prompts.
        seed: of prompts, heads and intervals.
    """

    model: str
    claim: str
    verdict: Literal["supported", "not supported", "not testable"]
    reason: str
    effects: tuple[Effect, ...]
    others: tuple[str, ...]
    prompts: int
    seed: int

    def __repr__(self) -> str:
        return f"Finding(of {self.model!r}, {self.claim!r}: {self.verdict}; {self.reason})"

    def _repr_html_(self) -> str | None:
        from ov_circuits.shown import notebook_html

        return notebook_html("finding_html", self)

    def frame(self) -> pd.DataFrame:
        """One row an effect; ``attrs`` hold the rest."""
        import pandas as pd

        frame = pd.DataFrame([asdict(effect) for effect in self.effects], columns=list(Effect.__dataclass_fields__))
        rest = {name: getattr(self, name) for name in Finding.__dataclass_fields__ if name != "effects"}
        frame.attrs = {str(name): list(value) if isinstance(value, tuple) else value for name, value in rest.items()}
        return frame


def check(
    model: Model,
    claim: str | Claim,
    *,
    prompts: int = 24,
    others: int = 8,
    among: str = "layer",
    seed: int = 0,
) -> Finding:
    """Put a claim about a head to the test.

    Supported is what the deciding number says: the head's own is on the claim's side of zero, and further than that of the
    other heads, both by their 95 % intervals. What ablation says is reported beside, and named when it disagrees.

    Args:
        model: any view.
        claim: a sentence (see :mod:`ov_circuits.claims`) or a claim.
        prompts: how many to build.
        others: how many other heads to compare with, drawn at random.
        among: ``layer``, the head's own (for composition the earlier head's), or ``model``, all layers that qualify.
        seed: of prompts, heads and intervals.

    Returns:
        The verdict, why, and every number that was measured beside the other heads' own; ``.frame()`` is one row an effect.

    Raises:
        CircuitsError: no such claim, head or relation, or a checkpoint that cannot run or has no tokenizer for a relation.
    """
    claim = parse_claim(claim) if isinstance(claim, str) else claim
    prompts, others = (
        whole_number("the number of prompts", prompts, 2, 10**6),
        whole_number("that of others", others, 1),
    )
    head = model.head(claim.head)
    generator = torch.Generator().manual_seed(check_seed(seed))
    compared = _others(model, claim, head, others, among, generator)
    try:
        measured, words, note = _measure(model, claim, [head, *compared], prompts, generator)
    except _NotTestable as reason:
        return Finding(model.name, str(claim), "not testable", str(reason), (), (), 0, seed)
    effects = tuple(_effects(measured, words, _sign(claim), generator))
    verdict, reason_why = _judge(claim, effects, len(compared), "its layer" if among == "layer" else "the model")
    reason_why += f"; {note}" if note else ""
    names = tuple(other.label for other in compared)
    return Finding(
        model.name, str(claim), verdict, reason_why, effects, names, next(iter(measured.values())).shape[1], seed
    )


class _NotTestable(Exception):
    """Why prompts for a claim cannot be built, or do not make the head do anything."""


def _sign(claim: Claim) -> int:
    return claim.sign if isinstance(claim, Copies) else 1


def _others(model: Model, claim: Claim, head: Head, number: int, among: str, generator: torch.Generator) -> list[Head]:
    """Random other heads, in order: of the layer, or of all layers (that come before the receiver)."""
    if among not in ("layer", "model"):
        raise CircuitsError(f"heads cannot be drawn from {among!r}: choose layer or model")
    last = model.n_layers
    if isinstance(claim, Composes):
        last = model.head(claim.receiver).layer
        if head.layer >= last:
            raise CircuitsError(
                f"head {claim.receiver} does not come after {head.label}: it cannot read what that writes"
            )
    layers = [head.layer] if among == "layer" else range(last)
    pool = [model.head(layer, index) for layer in layers for index in range(model.n_heads)]
    pool = [other for other in pool if other.label != head.label]
    if not pool:
        raise CircuitsError(f"head {head.label} is the only one of its layer: compare it with heads of the model")
    drawn = torch.randperm(len(pool), generator=generator, device="cpu")[:number].sort().values
    return [pool[i] for i in drawn.tolist()]


# Numbers of each effect: [head, prompt], the claim's own head first.
_Measured: TypeAlias = "dict[str, Tensor]"
_Words: TypeAlias = "dict[str, str]"


def _measure(
    model: Model, claim: Claim, heads: Sequence[Head], prompts: int, generator: torch.Generator
) -> tuple[_Measured, _Words, str]:
    if isinstance(claim, Copies):
        return _measure_copying(model, heads, prompts, generator)
    if isinstance(claim, Applies):
        return _measure_relation(model, claim, heads, prompts, generator)
    return _measure_composition(model, claim, heads, prompts, generator)


def _without(
    model: Model, traces: Sequence[Trace], heads: Sequence[Head], keep: Sequence[str] = ()
) -> Iterator[tuple[int, Trace, Head, Tensor, Mapping[int, Tensor]]]:
    """Each head zeroed on each prompt: (prompt, trace, head, uncapped logits, each kept pattern [head, pos, pos])."""
    jobs = [Job(trace, (head,)) for trace in traces for head in heads]
    numbers = [index for index in range(len(traces)) for _ in heads]
    for number, job, (batch, row) in zip(
        numbers, jobs, ablated_runs(jobs, Removal(model, "zero"), keep=keep), strict=True
    ):
        n = len(job.trace)
        patterns = {i: layer["pattern"][row, :, :n, :n] for i, layer in enumerate(batch.layers) if "pattern" in layer}
        yield number, job.trace, job.heads[0], batch.uncapped[row, :n], patterns


# -- copying on repeated random tokens --------------------------------------------------------------------------------

_HALF = 12


def _repeated(model: Model, prompts: int, generator: torch.Generator) -> list[Trace]:
    """BOS, or a random token where there is none, and distinct random tokens twice over; special tokens are never drawn."""
    pool, n_ctx = torch.tensor(ordinary_tokens(model), device="cpu"), model.architecture.n_ctx
    half = min(_HALF, (n_ctx - 1) // 2, len(pool) - 1)  # a first token that is not in the segment
    if half < 2:
        raise _NotTestable(
            f"{model.name} reads {n_ctx} tokens and has {len(pool)} ordinary ones, too few to repeat any"
        )
    drawn = [
        pool[torch.randperm(len(pool), generator=generator, device="cpu")[: half + 1]].tolist() for _ in range(prompts)
    ]
    return model.trace([[*(_bos(model) or first[:1]), *first[1:], *first[1:]] for first in drawn])


def _measure_copying(
    model: Model, heads: Sequence[Head], prompts: int, generator: torch.Generator
) -> tuple[_Measured, _Words, str]:
    traces = _repeated(model, prompts, generator)
    names = ("attention", "write", "direct", "ablation")
    found = {name: torch.zeros(len(heads), len(traces), dtype=torch.float64, device="cpu") for name in names}
    U = model.source.unembedding
    mean = U.mean(1)
    for column, trace in enumerate(traces):
        own = (U[:, list(trace.tokens[1:])].mT - mean) * model.architecture.logit_scale
        readers = {layer: _readers(trace, layer, own) for layer in {head.layer for head in heads}}
        for row, head in enumerate(heads):
            record, index, weights = trace.parts(head)
            moved = (unbiased_values(record, weights)[index] @ weights.W_O[index]).double()[1:]
            pattern, lift = _second_half(trace, head), torch.einsum("sm,tsm->ts", moved, readers[head.layer])
            found["attention"][row, column] = pattern.sum(-1).mean()
            found["write"][row, column] = lift.mean()
            found["direct"][row, column] = (pattern * lift).sum(-1).mean()
    rows = {head.label: row for row, head in enumerate(heads)}
    for column, trace, head, logits, _ in _without(model, traces, heads):
        lost = _centred(trace.record.uncapped) - _centred(logits)
        own = lost[:, list(trace.tokens[1:])][-_destinations(trace) :]  # [destination, source]
        found["ablation"][rows[head.label], column] = (_second_half(trace, head) * own).sum(-1).mean()
    words = {
        "attention": "attention to tokens after the first",
        "write": "what it would add to an attended token's own logit (over the vocabulary's mean) at full attention",
        "direct": "what it adds to attended tokens' own logits, in the ledger",
        "ablation": "what attended tokens' own logits lose without the head",
    }
    return found, words, ""


def _destinations(trace: Trace) -> int:
    """How many positions the second copy has."""
    return len(trace) // 2


def _second_half(trace: Trace, head: Head) -> Float[Tensor, "destination source"]:
    """Attention from the second copy to all but the first position, float64."""
    return trace.pattern(head)[-_destinations(trace) :, 1:].double()


def _readers(
    trace: Trace, layer: int, columns: Float[Tensor, "source d_model"]
) -> Float[Tensor, "destination source d_model"]:
    """What a layer's heads have to write at each destination for each column of the unembedding to see it."""
    return torch.stack(
        [
            torch.stack(
                [write_direction(trace, logit_reading(trace, column, position=at), layer) for column in columns]
            )
            for at in range(len(trace) - _destinations(trace), len(trace))
        ]
    )


def _centred(logits: Tensor) -> Tensor:
    logits = logits.double()
    return logits - logits.mean(-1, keepdim=True)


# -- a relation after examples of it ------------------------------------------------------------------------------------

_EXAMPLES = 4
_FEWEST_PAIRS = _EXAMPLES + 2


def _measure_relation(
    model: Model, claim: Applies, heads: Sequence[Head], prompts: int, generator: torch.Generator
) -> tuple[_Measured, _Words, str]:
    pairs = _single_tokens(model, claim.relation)
    is_to, end = model.tokenizer.encode(" ->"), model.tokenizer.encode("\n")
    asked: list[list[int]] = []
    targets: list[int] = []
    for _ in range(prompts):
        drawn = [
            pairs[i] for i in torch.randperm(len(pairs), generator=generator, device="cpu")[: _EXAMPLES + 1].tolist()
        ]
        examples = [token for source, target in drawn[:-1] for token in (*end, source, *is_to, target)]
        asked.append([*_bos(model), *examples[len(end) :], *end, drawn[-1][0], *is_to])
        targets.append(drawn[-1][1])
    if len(asked[0]) > model.architecture.n_ctx:
        raise _NotTestable(f"{model.name} reads {model.architecture.n_ctx} tokens, too few for examples of a relation")
    traces, source = model.trace(asked), -1 - len(is_to)
    foils = sorted({target for _, target in pairs})
    names = ("attention", "write", "direct", "ablation")
    found = {name: torch.zeros(len(heads), prompts, dtype=torch.float64, device="cpu") for name in names}
    weightings: list[tuple[list[int], Tensor]] = []
    right = 0
    for column, (trace, target) in enumerate(zip(traces, targets, strict=True)):
        weighting = {foil: -1.0 / (len(foils) - 1) for foil in foils if foil != target} | {target: 1.0}
        weightings.append((list(weighting), torch.tensor(list(weighting.values()), dtype=torch.float64, device="cpu")))
        right += int(trace.record.logits[-1, foils].argmax()) == foils.index(target)
        reading, s = logit_reading(trace, weighting), trace.position(source)
        for row, head in enumerate(heads):
            record, index, weights = trace.parts(head)
            moved = unbiased_values(record, weights)[index, s].double() @ weights.W_O[index].double()
            write, attention = (
                moved @ write_direction(trace, reading, head.layer),
                record.pattern[index, -1, s].double(),
            )
            found["attention"][row, column], found["write"][row, column] = attention, write
            found["direct"][row, column] = attention * write
    rows = {head.label: row for row, head in enumerate(heads)}
    for column, trace, head, logits, _ in _without(model, traces, heads):
        tokens, amounts = weightings[column]
        lost = (trace.record.uncapped[-1, tokens] - logits[-1, tokens]).double()
        found["ablation"][rows[head.label], column] = lost @ amounts
    words = {
        "attention": "attention to the source word",
        "write": "what it would add to the target's logit (over the other targets') at full attention to the source word",
        "direct": "what it adds to the target's logit from the source word, in the ledger",
        "ablation": "what the target's logit (over the other targets') loses without the head",
    }
    note = f"the model itself puts the target first of {len(foils)} on {right} of {prompts} prompts"
    return found, words, note


def _bos(model: Model) -> list[int]:
    bos = bos_id(model)
    return [] if bos is None else [bos]


def _single_tokens(model: Model, relation: str) -> list[tuple[int, int]]:
    """A relation's pairs as ids, those that a tokenizer can say in one token each."""
    named = read_relation(relation)
    ids = [(single_token(model, source), single_token(model, target)) for source, target in named.pairs]
    pairs = [(source, target) for source, target in ids if source is not None and target is not None]
    if len(pairs) < _FEWEST_PAIRS or len({target for _, target in pairs}) < 2:
        raise _NotTestable(
            f"only {len(pairs)} of {len(ids)} pairs of {named.name} are single tokens of {model.name}, "
            f"and {_FEWEST_PAIRS} are needed"
        )
    return pairs


# -- composition on repeated random tokens ----------------------------------------------------------------------------


def _measure_composition(
    model: Model, claim: Composes, heads: Sequence[Head], prompts: int, generator: torch.Generator
) -> tuple[_Measured, _Words, str]:
    a = model.architecture
    if a.attention_softcap is not None or a.qkv_clip is not None:
        does = "clamps queries and keys" if a.attention_softcap is None else "caps its attention scores"
        raise _NotTestable(f"{model.name} {does}: a change of a score is no sum of what was written")
    traces, receiver = _repeated(model, prompts, generator), model.head(claim.receiver)
    names = ("score", "path", "pattern", "ablation")
    found = {name: torch.zeros(len(heads), len(traces), dtype=torch.float64, device="cpu") for name in names}
    favourites = [_second_half(trace, receiver).argmax(-1, keepdim=True) for trace in traces]
    for column, (trace, favourite) in enumerate(zip(traces, favourites, strict=True)):
        given = _score_entries(trace, claim.side, receiver, heads)  # [head, destination, source]
        clean = trace.pattern(receiver)[-_destinations(trace) :].double()
        # Softmax of (score - entry) from the pattern alone, whatever else is in the score.
        without = (clean.log() - given).softmax(-1)
        others = _mean_of_others(given[..., 1:], favourite, clean[:, 1:] > 0)
        chosen = favourite.expand(len(heads), -1, -1)
        found["score"][:, column] = (given[..., 1:].gather(-1, chosen).squeeze(-1) - others).mean(-1)
        found["path"][:, column] = (clean - without)[..., 1:].gather(-1, chosen).squeeze(-1).mean(-1)
        found["pattern"][:, column] = (clean - without).abs().sum(-1).mean(-1) / 2
    rows = {head.label: row for row, head in enumerate(heads)}
    for column, trace, head, _, patterns in _without(model, traces, heads, keep=("pattern",)):
        ablated = patterns[receiver.layer][receiver.index, -_destinations(trace) :, 1:].double()
        lost = (_second_half(trace, receiver) - ablated).gather(-1, favourites[column])
        found["ablation"][rows[head.label], column] = lost.mean()
    side = "queries" if claim.side == "Q" else "keys"
    words = {
        "score": f"its part, through {receiver.label}'s {side}, in the score of the favourite source over other sources",
        "path": f"attention of {receiver.label} to its favourite source that is lost without it in the {side} alone",
        "pattern": f"share of {receiver.label}'s attention that moves without it in the {side} (total variation)",
        "ablation": f"attention of {receiver.label} to its favourite source that is lost without the head",
    }
    attention = float(torch.cat([_second_half(t, receiver).amax(-1) for t in traces]).mean())
    return found, words, f"{receiver.label} pays {attention:.2f} to its favourite source after the first"


def _score_entries(
    trace: Trace, side: str, receiver: Head, heads: Sequence[Head]
) -> Float[Tensor, "head destination source"]:
    """Each head's part in every score of the receiver's second half, through one side; zero for sources that are not seen."""
    start = len(trace) - _destinations(trace)
    entries = torch.zeros(len(heads), len(trace) - start, len(trace), dtype=torch.float64, device="cpu")
    writes = [trace.write(head).double() for head in heads]
    for t in range(start, len(trace)):
        for s in range(t + 1):
            reading = input_reading(trace, receiver, side, s, t)
            directions = {layer: write_direction(trace, reading, layer) for layer in {head.layer for head in heads}}
            for row, head in enumerate(heads):
                entries[row, t - start, s] = writes[row][reading.position] @ directions[head.layer]
    return entries


def _mean_of_others(values: Tensor, favourite: Tensor, seen: Tensor) -> Tensor:
    """Mean of [.., destination, source] over the seen sources but the favourite."""
    rest = seen.scatter(-1, favourite, False)
    return (values * rest).sum(-1) / rest.sum(-1).clamp(min=1)


# -- the verdict --------------------------------------------------------------------------------------------------------

_DRAWS = 2000
_DECIDING = ("direct", "path")


def _effects(measured: _Measured, words: _Words, sign: int, generator: torch.Generator) -> Iterator[Effect]:
    for name, numbers in measured.items():
        own, others = numbers[0], numbers[1:]
        beyond = own - others.mean(0)
        low, high = _interval(own, generator)
        difference_low, difference_high = _interval(beyond, generator)
        # Attention, and how much of it moves, are sizes: a claim of lowering says nothing of them.
        towards = 1 if name in ("attention", "pattern") else sign
        yield Effect(
            name=name,
            what=words[name],
            value=float(own.mean()),
            low=low,
            high=high,
            others=float(others.mean()),
            difference=float(beyond.mean()),
            difference_low=difference_low,
            difference_high=difference_high,
            at_least_as_strong=int((towards * others.mean(1) >= towards * own.mean()).sum()),
            decides=name in _DECIDING,
        )


def _interval(values: Float[Tensor, " prompt"], generator: torch.Generator) -> tuple[float, float]:
    """95 % percentile bootstrap of the mean over prompts."""
    drawn = torch.randint(len(values), (_DRAWS, len(values)), generator=generator, device="cpu")
    low, high = values[drawn].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=values.dtype, device="cpu")).tolist()
    return low, high


def _judge(
    claim: Claim, effects: Sequence[Effect], n_others: int, whose: str
) -> tuple[Literal["supported", "not supported"], str]:
    sign = _sign(claim)
    deciding = next(effect for effect in effects if effect.decides)
    ablation = next(effect for effect in effects if effect.name == "ablation")

    def beyond_zero(low: float, high: float) -> bool:
        return low > 0 if sign == 1 else high < 0

    measured = f"{deciding.what}: {deciding.value:+.3g} ({deciding.low:+.3g} to {deciding.high:+.3g})"
    if not beyond_zero(deciding.low, deciding.high):
        why = f"{measured}, which is not {'above' if sign == 1 else 'below'} zero"
        attention = next((effect for effect in effects if effect.name == "attention"), None)
        write = next((effect for effect in effects if effect.name == "write"), None)
        if (
            attention is not None
            and write is not None
            and beyond_zero(write.low, write.high)
            and attention.value < 0.05
        ):
            why += f"; its write would be ({write.value:+.3g}), but it attends there with {attention.value:.3f} only"
        return "not supported", why
    if not beyond_zero(deciding.difference_low, deciding.difference_high):
        return "not supported", f"{measured}, but no more than other heads of {whose} ({deciding.others:+.3g})"
    why = f"{measured}, other heads of {whose} {deciding.others:+.3g}"
    if deciding.at_least_as_strong:  # the verdict is about their mean
        why += f" on average, {deciding.at_least_as_strong} of {n_others} as strong"
    if not beyond_zero(ablation.low, ablation.high):
        why += f"; removing it does not show that ({ablation.value:+.3g}, {ablation.low:+.3g} to {ablation.high:+.3g})"
    return "supported", why

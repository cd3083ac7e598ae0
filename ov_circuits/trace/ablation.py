"""Ablation: what a model loses without some heads, beside what their entries in the ledger say.

An ablation takes a part r out of a head's z, the input of its block of W_O, and lets the model run on:

    zero              r = z                              nothing is left of the head
    mean              r = z - mean of z                  over all positions of the reference prompts
    mean_by_position  r = z - mean of z at that position over reference prompts of one length (Wang et al. 2022)
    source            r = sum over named s of A[t, s] v_s   what comes from these source tokens, b_V aside

With a singular direction, only r's part along it goes: with M = W_V W_O = sum_k s_k u_k v_k^T, the row w_k = u_k^T W_V / s_k has
w_k W_O = v_k, so that z - (r W_O . v_k) w_k is the z whose write lacks just that.

The *direct effect* is the ledger's entry of what was removed: what its own write no longer adds to the logit. The *total effect*
is what the logit in fact lost. They differ by what later components make of its absence, self-repair above all (McGrath et al.
2023; Rushing & Nanda 2024). With ``freeze`` everything else is held as it was, and they are the same number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from ov_circuits.errors import CircuitsError, is_whole
from ov_circuits.model import Head, Model
from ov_circuits.progress import track
from ov_circuits.prompts import PromptSet, load
from ov_circuits.trace.engines import Batch, Edits, batches, pad, run
from ov_circuits.trace.ledger import Reading, logit_reading, write_direction
from ov_circuits.trace.trace import Trace, unbiased_values, whole_ids
from ov_circuits.words import token_id, token_list

if TYPE_CHECKING:
    import pandas as pd

METHODS = ("zero", "mean", "mean_by_position", "source")

# Below this share of the largest singular value a direction is rounding noise.
_NO_DIRECTION = 1e-10


def ablate(
    model: Model,
    heads: Head | str | Sequence[Head | str],
    prompts: Any,
    method: str = "zero",
    *,
    answer: str | int | Mapping[str, float] | Mapping[int, float] | None = None,
    against: str | int | None = None,
    position: int = -1,
    reference: Any = None,
    sources: int | str | Sequence[int | str] | None = None,
    direction: int | None = None,
    span: slice | None = None,
    freeze: bool = False,
    bos: bool | None = None,
) -> pd.DataFrame:
    """Remove heads, all together, and see what each prompt loses.

    Args:
        model: the checkpoint; singular directions are those of its weight view, nothing else depends on the view.
        heads: a head, or several.
        prompts: a prompt (text, ids or a trace), a list of them, a list of tuples (prompt, answer) or
            (prompt, answer, foil), where an answer may be a weighting {word or id: weight}; or a set of
            :func:`ov_circuits.prompts.load`, or the list of dictionaries that it takes.
        method: ``zero``, ``mean``, ``mean_by_position`` or ``source``; see :mod:`ov_circuits.trace.ablation`.
        answer, against: the logit (difference) that is watched, where prompts do not bring their own. Without an answer: each
            prompt's likeliest next token against the runner-up.
        position: whose next token it is; the last by default.
        reference: of the means, prompts as above; the prompts themselves by default.
        sources: of ``source``: positions (numbers), or tokens (texts), at all places where they stand.
        direction: which singular direction of each head's W_V W_O to remove, from 0; the whole write by default.
        span: which tokens of the prompt count in the loss and in ``mean_kl``; all but the first by default.
        freeze: hold everything else (patterns, other heads, MLPs, the scales of norms) as it was: the direct path alone.
        bos: as for :meth:`ov_circuits.Model.trace`; of a trace or a set it is settled.

    Returns:
        One row a prompt: ``prompt`` (its number), ``position``, ``answer``, ``against`` (texts), ``clean``, ``ablated`` (the logit
        or logit difference, before a softcap), ``total_effect`` = clean - ablated, ``direct_effect`` (the ledger's entry of
        what was removed), ``clean_loss``, ``ablated_loss`` (mean cross-entropy of the span's tokens, nats), ``clean_answer_loss``,
        ``ablated_answer_loss`` (of the answer), ``kl`` (of clean to ablated next-token probabilities at the position, nats),
        ``mean_kl`` (over the span). ``attrs``: ``model``, ``heads``, ``method``, ``direction``, ``view``, ``sources``, ``freeze``,
        ``mean`` (of each number over the prompts).

    Raises:
        CircuitsError: no such head, method, position, source or direction, no prompt, a foil on some prompts and none on
            others, bos for what was read before, or a checkpoint that cannot run.
    """
    import pandas as pd

    found = _heads(model, heads)
    check_method(method, sources)
    asked = _comparable(cases(model, prompts, answer, against, position, bos))
    removal = Removal.of(model, method, [case.trace for case in asked], reference, sources, direction, bos)
    rows = []
    for index, outcome in _outcomes(asked, [(index, found) for index in range(len(asked))], removal, span, freeze):
        case = asked[index]
        rows.append({"prompt": index, "position": case.reading.position} | case.words | outcome)
    frame = pd.DataFrame(rows)
    numbers = frame.drop(columns=["prompt", "position", "answer", "against"])
    means = {str(name): float(value) for name, value in numbers.mean().items()}
    frame.attrs = _facts(removal, asked, freeze) | {"heads": [head.label for head in found], "mean": means}
    return frame


def ablation_sweep(
    model: Model,
    prompts: Any,
    method: str = "zero",
    *,
    heads: Sequence[Head | str] | None = None,
    answer: str | int | Mapping[str, float] | Mapping[int, float] | None = None,
    against: str | int | None = None,
    position: int = -1,
    reference: Any = None,
    sources: int | str | Sequence[int | str] | None = None,
    direction: int | None = None,
    span: slice | None = None,
    freeze: bool = False,
    bos: bool | None = None,
) -> pd.DataFrame:
    """Remove each head alone: its direct effect beside what removing it does.

    Args:
        heads: which; all by default. Everything else is as for :func:`ablate`.

    Returns:
        One row a head, means over the prompts: ``head, layer, index, direct_effect, total_effect, loss_change,
        answer_loss_change`` (ablated - clean, nats), ``kl, mean_kl``; and ``total_effect_sd`` over the prompts (NaN with one).
        ``attrs`` as for :func:`ablate`, and ``prompts``, their number.

    Raises:
        CircuitsError: as :func:`ablate`.
    """
    import pandas as pd

    found = tuple(model.heads()) if heads is None else _heads(model, heads)
    check_method(method, sources)
    asked = _comparable(cases(model, prompts, answer, against, position, bos))
    removal = Removal.of(model, method, [case.trace for case in asked], reference, sources, direction, bos)
    jobs = [(index, (head,)) for index in range(len(asked)) for head in found]
    outcomes = track(_outcomes(asked, jobs, removal, span, freeze), "Ablating heads", total=len(jobs))
    # Jobs come prompt by prompt, each with all heads in their order.
    rows = [{"place": job % len(found)} | outcome for job, (_, outcome) in enumerate(outcomes)]
    every = pd.DataFrame(rows)
    every["loss_change"] = every["ablated_loss"] - every["clean_loss"]
    every["answer_loss_change"] = every["ablated_answer_loss"] - every["clean_answer_loss"]
    grouped = every.groupby("place")
    numbers = ["direct_effect", "total_effect", "loss_change", "answer_loss_change", "kl", "mean_kl"]
    places = {"head": [h.label for h in found], "layer": [h.layer for h in found], "index": [h.index for h in found]}
    frame = pd.concat([pd.DataFrame(places), grouped[numbers].mean().reset_index(drop=True)], axis=1)
    frame["total_effect_sd"] = grouped["total_effect"].std().to_numpy()
    frame.attrs = _facts(removal, asked, freeze) | {"prompts": len(asked)}
    return frame


# -- what is watched --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Case:
    """A prompt that was run, and the logit, difference or weighting of logits (token: weight) that is watched on it."""

    trace: Trace
    reading: Reading
    weights: Mapping[int, float]

    @property
    def answers(self) -> list[int]:
        """The tokens that count for the answer."""
        return [token for token, weight in self.weights.items() if weight > 0]

    @property
    def words(self) -> dict[str, str]:
        """Both sides as texts."""
        foils = [token for token, weight in self.weights.items() if weight < 0]
        sides = {"answer": self.answers, "against": foils}
        return {side: ", ".join(token_list(self.trace.model, tokens)) for side, tokens in sides.items()}

    def watched(self, logits: Float[Tensor, "pos n_vocab"]) -> float:
        """The watched number in some logits."""
        amounts = torch.tensor(list(self.weights.values()), dtype=torch.float64, device=logits.device)
        return float(logits[self.reading.position, list(self.weights)].double() @ amounts)

    def answer_loss(self, log_probabilities: Float[Tensor, "pos n_vocab"]) -> float:
        """-log p of the answer, or of any of several."""
        return -float(log_probabilities[self.reading.position, self.answers].double().logsumexp(-1))

    @cached_property
    def log_probabilities(self) -> Float[Tensor, "pos n_vocab"]:
        """What the model said before anything was removed."""
        return self.trace.record.logits.log_softmax(-1)


def cases(
    model: Model,
    prompts: Any,
    answer: str | int | Mapping[str, float] | Mapping[int, float] | None = None,
    against: str | int | None = None,
    position: int = -1,
    bos: bool | None = None,
) -> list[Case]:
    """Prompts in any form that :func:`ablate` takes, run.

    Raises:
        CircuitsError: none, one that is no prompt, or a faulty answer.
    """
    if model.source.shard is not None:
        raise CircuitsError("ablations need all heads in one process: run them without tensor parallelism")
    if bos is not None and _were_read(prompts):
        raise CircuitsError(
            "bos says how prompts are read, and a trace or a set was read before: give it to model.trace or prompts.load"
        )
    if isinstance(prompts, list) and prompts and isinstance(prompts[0], Mapping):
        prompts = load(prompts, model, bos=bos)
    if isinstance(prompts, PromptSet):
        prompts = _questions(model, prompts)
    asked = prompts if isinstance(prompts, list) and not _is_ids(prompts) else [prompts]
    if not asked:
        raise CircuitsError("there is no prompt: give at least one")
    split = [_question(one, answer, against) for one in asked]
    given: list[Any] = [
        prompt if isinstance(prompt, str) else whole_ids(prompt)
        for prompt, _, _ in split
        if not isinstance(prompt, Trace)
    ]
    fresh = iter(model.trace(given, bos=bos) if given else [])
    found = []
    for prompt, wanted, other in split:
        trace = prompt if isinstance(prompt, Trace) else next(fresh)
        if trace.model.source is not model.source:
            raise CircuitsError(f"a trace of {trace.model.name} was given beside the model {model.name}: use its own")
        if len(trace.record.logits) < len(trace):
            raise CircuitsError(
                "a trace with the logits of its last position alone has no loss: trace it without last_logits"
            )
        at = trace.position(position)
        if wanted is None:
            if other is not None:
                raise CircuitsError("'against' needs an answer beside it")
            wanted, other = trace.record.logits[trace.row(at)].topk(2).indices.tolist()
        weights = {token_id(model, word): float(weight) for word, weight in _weighting(wanted, other).items()}
        found.append(Case(trace, logit_reading(trace, wanted, other, at), weights))
    return found


def _comparable(asked: list[Case]) -> list[Case]:
    """The cases, if what is watched on them has a mean: logits on all of them, or differences on all.

    Raises:
        CircuitsError: logits on some and differences on others.
    """
    if len({any(weight < 0 for weight in case.weights.values()) for case in asked}) > 1:
        raise CircuitsError(
            "some prompts have a foil and some have none: a logit and a difference have no mean; "
            "give all a foil, or none (a prompt without an answer is asked for its likeliest token over the runner-up)"
        )
    return asked


def _questions(model: Model, found: PromptSet) -> list[tuple[Trace, Mapping[int, float]]]:
    """A set's prompts as traces that say of BOS what the set does, which has put it there already."""
    traces = model.trace([list(prompt.tokens) for prompt in found])
    return [
        (replace(trace, bos_added=prompt.bos_added), prompt.weights)
        for trace, prompt in zip(traces, found, strict=True)
    ]


def _weighting(answer: Any, against: Any) -> Mapping[Any, float]:
    if isinstance(answer, Mapping):
        if not any(weight > 0 for weight in answer.values()):
            raise CircuitsError("no word of the answer's weighting has a weight above 0: there is no answer in it")
        return answer
    return {answer: 1.0} if against is None else {answer: 1.0, against: -1.0}


def _were_read(prompts: Any) -> bool:
    """Whether some of the prompts are ids already, BOS or not, that came from a text."""
    several = prompts if isinstance(prompts, list) else [prompts]
    return any(isinstance(one[0] if isinstance(one, tuple) and one else one, (PromptSet, Trace)) for one in several)


def _is_ids(prompts: Sequence[Any]) -> bool:
    return bool(prompts) and all(is_whole(token) for token in prompts)


def _question(one: Any, answer: Any, against: str | int | None) -> tuple[Any, Any, Any]:
    """(prompt, answer, against) of one entry: a tuple that is not itself a prompt of ids brings its own."""
    if not isinstance(one, tuple) or _is_ids(one):
        return one, answer, against
    if not 2 <= len(one) <= 3:
        raise CircuitsError(
            f"a prompt with its answer is (prompt, answer) or (prompt, answer, foil), not {str(one)[:80]}"
        )
    return one[0], one[1], one[2] if len(one) == 3 else None


def _heads(model: Model, heads: Head | str | Sequence[Head | str]) -> tuple[Head, ...]:
    several = [heads] if isinstance(heads, (Head, str)) else list(heads)
    if not several:
        raise CircuitsError("there is no head to ablate: name at least one")
    found = tuple(model.head(head) for head in several)
    twice = {head.label for head in found if found.count(head) > 1}
    if twice:
        raise CircuitsError(f"head {min(twice)} is named twice: name each head once")
    return found


# -- what is removed --------------------------------------------------------------------------------------------------


def check_method(method: str, sources: Any = None) -> None:
    """Raise a CircuitsError unless there is such an ablation, and sources where it needs them."""
    if method not in METHODS:
        raise CircuitsError(f"there is no ablation {method!r}: choose {', '.join(METHODS)}")
    if method == "source" and (sources is None or (isinstance(sources, (list, tuple)) and not sources)):
        raise CircuitsError("the ablation 'source' needs sources: name positions or tokens of the prompt")
    if method != "source" and sources is not None:
        raise CircuitsError(f"the ablation {method!r} takes no sources: choose 'source'")


@dataclass(frozen=True, eq=False)
class Removal:
    """What an ablation takes out of a head's z.

    Attributes:
        model: in the view whose singular directions count.
        method: one of :data:`METHODS`.
        means: of the mean ablations, a layer: [head, d_head], or by position [head, pos, d_head].
        sources: of ``source``, positions and tokens.
        direction: a number of a singular direction, or None for everything.
    """

    model: Model
    method: str
    means: tuple[Tensor, ...] = ()
    sources: tuple[int | str, ...] = ()
    direction: int | None = None
    _lines: dict[Head, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: Model,
        method: str,
        traces: Sequence[Trace],
        reference: Any,
        sources: Any,
        direction: int | None,
        bos: Any,
    ) -> Removal:
        """As :func:`ablate` is asked for it; ``traces`` are the reference where none is given."""
        if reference is not None and not method.startswith("mean"):
            raise CircuitsError(f"the ablation {method!r} takes no reference: choose 'mean' or 'mean_by_position'")
        d_head = model.architecture.d_head
        if direction is not None and (isinstance(direction, bool) or not 0 <= direction < d_head):
            raise CircuitsError(f"a head of {model.name} has singular directions 0 to {d_head - 1}, not {direction}")
        named = () if sources is None else (sources,) if isinstance(sources, (int, str)) else tuple(sources)
        means: tuple[Tensor, ...] = ()
        if method.startswith("mean"):
            told = None if _were_read(reference) else bos
            over = traces if reference is None else [case.trace for case in cases(model, reference, bos=told)]
            means = _means(over, max(len(t) for t in traces), by_position=method == "mean_by_position")
        return cls(model, method, means, named, direction)

    def at(self, trace: Trace) -> list[int]:
        """The source positions that are named, on a prompt.

        Raises:
            CircuitsError: it has no such position or token.
        """
        found: set[int] = set()
        for source in self.sources:
            if isinstance(source, str):
                token = token_id(self.model, source)
                places = {place for place, there in enumerate(trace.tokens) if there == token}
                if not places:
                    raise CircuitsError(f"the prompt {''.join(trace.texts)[:60]!r} has no token {source!r} to remove")
                found |= places
            else:
                found.add(trace.position(source))
        return sorted(found)

    def part(self, trace: Trace, head: Head, z: Tensor, moved: Tensor | None) -> Float[Tensor, "pos d_head"]:
        """What goes out of z [pos, d_head]; ``moved`` is what came from the named sources, where the method asks for it."""
        if self.method == "source":
            assert moved is not None
            part = moved
        elif self.method == "zero":
            part = z
        else:
            mean = self.means[head.layer][head.index]
            part = z - (mean[: len(z)] if self.method == "mean_by_position" else mean)
        return part if self.direction is None else self._along(head, part)

    def _along(self, head: Head, part: Tensor) -> Tensor:
        """The part whose write is along the singular direction."""
        if head not in self._lines:
            assert self.direction is not None
            pairs = head.ov.singular_pairs(self.direction + 1)
            largest, value = float(pairs.S[0]), float(pairs.S[self.direction])
            if value <= _NO_DIRECTION * largest or largest == 0:
                raise CircuitsError(
                    f"W_V W_O of head {head.label} has no singular direction {self.direction}: its value is zero"
                )
            read = head.W_O.double() @ pairs.V[:, self.direction]
            line = pairs.U[:, self.direction] @ head.W_V.double() / value
            self._lines[head] = read, line
        read, line = self._lines[head]
        return ((part.double() @ read).unsqueeze(-1) * line).to(part.dtype)


def _means(traces: Sequence[Trace], longest: int, *, by_position: bool) -> tuple[Tensor, ...]:
    """Mean z of every head, a layer: over all positions of all traces, or position by position."""
    lengths = {len(trace) for trace in traces}
    if by_position and (len(lengths) > 1 or min(lengths) < longest):
        raise CircuitsError(
            "a mean by position needs reference prompts that are all of one length, at least that of the longest prompt, "
            f"and these have {min(lengths)} to {max(lengths)} tokens: choose 'mean'"
        )
    means = []
    for layer in range(traces[0].model.n_layers):
        z = [trace.record.layers[layer].z.double() for trace in traces]
        mean = torch.stack(z).mean(0) if by_position else torch.cat(z, dim=1).mean(1)
        means.append(mean.float())
    return tuple(means)


# -- runs -------------------------------------------------------------------------------------------------------------

# What the model looked like in a layer when it came to remove something there: the run's pattern and attention input.
_Seen = Mapping[int, Mapping[str, Tensor]]


@dataclass(frozen=True, eq=False)
class Job:
    """One run of a prompt without some heads."""

    trace: Trace
    heads: tuple[Head, ...]

    @cached_property
    def by_layer(self) -> dict[int, list[Head]]:
        """The heads of each layer that has some."""
        found: dict[int, list[Head]] = {}
        for head in self.heads:
            found.setdefault(head.layer, []).append(head)
        return found


def ablated_runs(
    jobs: Sequence[Job], removal: Removal, *, freeze: bool = False, keep: Sequence[str] = ()
) -> Iterator[tuple[Batch, int]]:
    """Run each job, as many side by side as fit: the batch it was in, and its row there, in the order of the jobs."""
    start = 0
    for tokens in batches(removal.model, [job.trace.tokens for job in jobs]):
        part = jobs[start : start + len(tokens)]
        start += len(tokens)
        seen: dict[int, Mapping[str, Tensor]] = {}
        if removal.method == "source" and not freeze:
            # What a later head moves from a source depends on what was removed before it: layer by layer.
            for layer in sorted({layer for job in part for layer in job.by_layer})[1:]:
                before = run(
                    removal.model,
                    pad(tokens),
                    keep=("pattern", "attention_input"),
                    edits=_edits(part, removal, seen, freeze),
                )
                seen[layer] = before.layers[layer]
        batch = run(removal.model, pad(tokens), keep=keep, edits=_edits(part, removal, seen, freeze))
        yield from ((batch, row) for row in range(len(part)))


def _edits(jobs: Sequence[Job], removal: Removal, seen: _Seen, freeze: bool) -> Edits:
    """Removal from z; with ``freeze``, everything else is put back to what the traces have."""
    source, records = removal.model.source, [job.trace.record for job in jobs]

    def z(layer: int, z: Tensor) -> Tensor:
        z = z.clone()
        for row, job in enumerate(jobs):
            n = len(job.trace)
            if freeze:
                z[row, :n] = records[row].layers[layer].z.transpose(0, 1).to(z)
            heads = job.by_layer.get(layer, [])
            moved = _moved(job, removal, layer, seen, row) if heads else None
            for head in heads:
                own = z[row, :n, head.index]
                kept = own.detach().float().to(source.device)
                part = removal.part(job.trace, head, kept, None if moved is None else moved[head.index])
                z[row, :n, head.index] = (kept - part).to(z)
        return z

    if not freeze:
        return Edits(z=z)

    def restored(output: Tensor, clean: Sequence[Tensor]) -> Tensor:
        output = output.clone()
        for row, rows in enumerate(clean):
            output[row, : len(rows)] = rows.to(output)
        return output

    def mlp(layer: int, output: Tensor) -> Tensor:
        return restored(output, [record.layers[layer].mlp_output for record in records])

    def held(norm: Any, stream: Tensor, normalised: Tensor, clean: Sequence[Tensor]) -> Tensor:
        moved = [stream[row, : len(at)].to(at) - at for row, at in enumerate(clean)]
        at_scale = [norm(at) + norm.carry(at, part) for at, part in zip(clean, moved, strict=True)]
        return restored(normalised, at_scale)

    def post_norm(layer: int, stream: Tensor, normalised: Tensor) -> Tensor:
        clean = [record.layers[layer].attention_output for record in records]
        return held(source.attention_post_norm(layer), stream, normalised, clean)

    def final(stream: Tensor, normalised: Tensor) -> Tensor:
        return held(source.final_norm, stream, normalised, [record.final for record in records])

    return Edits(z=z, post_norm=post_norm, mlp=mlp, final=final)


def _moved(job: Job, removal: Removal, layer: int, seen: _Seen, row: int) -> Float[Tensor, "head pos d_head"] | None:
    """What a layer's heads move from the named sources, in the run at hand; None where the method does not ask."""
    if removal.method != "source":
        return None
    n, record = len(job.trace), job.trace.record.layers[layer]
    pattern = record.pattern
    if layer in seen:
        pattern = seen[layer]["pattern"][row, :, :n, :n]
        record = replace(record, attention_input=seen[layer]["attention_input"][row, :n])
    places = removal.at(job.trace)
    values = unbiased_values(record, job.trace.model.layer(layer))
    return pattern[:, :, places] @ values[:, places]


# -- what came of it --------------------------------------------------------------------------------------------------


def _outcomes(
    asked: Sequence[Case],
    jobs: Sequence[tuple[int, tuple[Head, ...]]],
    removal: Removal,
    span: slice | None,
    freeze: bool,
) -> Iterator[tuple[int, dict[str, float]]]:
    """(case, what its job came to), in the order of the jobs."""
    plan = [Job(asked[index].trace, heads) for index, heads in jobs]
    for (index, heads), job, (batch, row) in zip(jobs, plan, ablated_runs(plan, removal, freeze=freeze), strict=True):
        case, n = asked[index], len(job.trace)
        clean, ablated = case.reading.actual, case.watched(batch.uncapped[row, :n])
        numbers = {"clean": clean, "ablated": ablated, "total_effect": clean - ablated}
        numbers["direct_effect"] = sum(_direct(case, head, removal) for head in heads)
        yield index, numbers | _losses(case, batch.logits[row, :n].log_softmax(-1), span)


def _direct(case: Case, head: Head, removal: Removal) -> float:
    """The ledger's entry of what is removed from a head."""
    trace, at = case.trace, case.reading.position
    record, index, weights = trace.parts(head)
    moved = _moved(Job(trace, (head,)), removal, head.layer, {}, 0)
    part = removal.part(trace, head, record.z[index], None if moved is None else moved[index])[at]
    return float(part.double() @ (weights.W_O[index].double() @ write_direction(trace, case.reading, head.layer)))


def _losses(case: Case, ablated: Float[Tensor, "pos n_vocab"], span: slice | None) -> dict[str, float]:
    """Cross-entropies and divergences of log-probabilities."""
    clean, at = case.log_probabilities, case.reading.position
    tokens = torch.tensor(case.trace.tokens, device="cpu")
    try:
        asked = range(1, len(tokens)) if span is None else range(len(tokens))[span]
        predicted = torch.tensor([at for at in asked if at > 0], dtype=torch.long, device="cpu")
    except (TypeError, ValueError) as error:
        raise CircuitsError(f"span is a slice of positions, such as slice(3, None), not {str(span)[:80]}") from error
    if span is not None and not len(predicted):
        raise CircuitsError(f"span = {span} holds none of the {len(tokens) - 1} tokens that are predicted")
    before = predicted - 1
    divergence = _kl(clean[before], ablated[before])
    return {
        "clean_loss": -float(clean[before, tokens[predicted]].double().mean()),
        "ablated_loss": -float(ablated[before, tokens[predicted]].double().mean()),
        "clean_answer_loss": case.answer_loss(clean),
        "ablated_answer_loss": case.answer_loss(ablated),
        "kl": float(_kl(clean[at], ablated[at])),
        "mean_kl": float(divergence.mean()),
    }


def _kl(clean: Tensor, ablated: Tensor) -> Tensor:
    """KL(clean || ablated) of log-probabilities, nats, float64."""
    return (clean.exp() * (clean - ablated)).double().sum(-1)


def _facts(removal: Removal, asked: Sequence[Case], freeze: bool) -> dict[Any, Any]:
    return {
        "model": removal.model.name,
        "method": removal.method,
        "direction": removal.direction,
        "view": removal.model.view,
        "sources": list(removal.sources),
        "freeze": freeze,
        "bos_added": asked[0].trace.bos_added,
    }

"""What heads attend to on probe prompts, and whether they copy there: one number a head and behaviour, and its null.

The probe is BOS (a random token where the model has none) and then a segment of distinct random tokens, twice; special tokens
are never drawn. With period p, a destination t of the second copy has its token's earlier occurrence at t - p, and

    induction        attention to t - p + 1, the token after the earlier occurrence
    duplicate_token  attention to t - p
    previous_token   attention to t - 1
    first_token      attention to 0
    self_attention   attention to t

averaged over all destinations of second copies. Periods differ from row to row: a head that attends to a fixed offset, which
predicts periodic text as well as an induction head does, meets t - p + 1 in one row out of many. ``delimiter`` has a probe of
its own: random tokens without punctuation, one in eight of which is then a delimiter (``. , ; : ! ?``, brackets, line ends);
it is the attention from other tokens of the second half to the delimiters before them. This asks for the delimiters
themselves, not for what they do in sentences.

Null: each row of attention in a random order over the positions it can see. Its mean is that of uniform attention, the number
of targets over the number of visible positions; its variance is exact, m (n - m) / (n - 1) times the row's own variance for m
targets among n. So z says how far the mean is from what this very head's attention would give if it went anywhere.

``random_copying`` is the copying score of Olsson et al. 2022 ("In-context Learning and Induction Heads"), on first copies,
which are plain random tokens: what a head moves from source s to destination t, through the final norm at the scale it has at
t, changes the logits of the sequence's own m tokens (their mean taken out: a softmax does not see it). Of the positive part of
that, summed over sources and destinations, the share on the token that was attended to, times two minus one. By chance (any
of the m tokens alike) the share is 1/m, so most heads are near -1 + 2/m. The value bias is left out, and so is what comes from
position 0.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ov_circuits.errors import CircuitsError, check_seed, whole_number
from ov_circuits.linalg.nulls import Null
from ov_circuits.progress import track
from ov_circuits.trace.engines import Batch, check_tokens, pad, run
from ov_circuits.trace.shards import Shard
from ov_circuits.trace.trace import values_without_bias
from ov_circuits.words import bos_id, ordinary_tokens

if TYPE_CHECKING:
    import pandas as pd

    from ov_circuits.model import Layer, Model


@dataclass(frozen=True)
class Behaviour:
    """What a column is; the fields that :class:`ov_circuits.scores.board.Score` has too mean the same."""

    key: str
    label: str
    source: str
    note: str
    range: tuple[float, float] = (0.0, 1.0)
    diverging: bool = False
    group: str = "Behaviour on probes"


_OLSSON = "Olsson et al. 2022, In-context Learning and Induction Heads"
_PROBE = (
    "on random tokens repeated with varied periods, mean over second copies (second halves, where none can repeat)."
)

BEHAVIOURS: dict[str, Behaviour] = {
    behaviour.key: behaviour
    for behaviour in (
        Behaviour(
            "induction",
            "Induction",
            f"prefix matching, {_OLSSON}",
            f"Attention to the token after the earlier occurrence of the current one, {_PROBE}",
        ),
        Behaviour(
            "duplicate_token",
            "Duplicate token",
            "Wang et al. 2022, Interpretability in the Wild",
            f"Attention to the earlier occurrence of the current token, {_PROBE}",
        ),
        Behaviour(
            "previous_token",
            "Previous token",
            "Elhage et al. 2021, A Mathematical Framework for Transformer Circuits",
            f"Attention to the position before, {_PROBE}",
        ),
        Behaviour(
            "first_token",
            "First token",
            "attention sinks, Xiao et al. 2023, Efficient Streaming Language Models",
            f"Attention to position 0 (BOS where there is one), {_PROBE}",
        ),
        Behaviour("self_attention", "Self", "attention to the own position", f"Attention to itself, {_PROBE}"),
        Behaviour(
            "delimiter",
            "Delimiters",
            "Clark et al. 2019, What Does BERT Look At?",
            "Attention to earlier delimiters, from other tokens, on random tokens of which one in eight is a delimiter.",
        ),
        Behaviour(
            "random_copying",
            "Copying, random tokens",
            _OLSSON,
            "Of the positive part of the head's direct effect on the logits of random tokens in context, the share on the "
            "token attended to, rescaled to [-1, 1]. By chance near -1, not 0.",
            range=(-1.0, 1.0),
        ),
    )
}

NULL_NOTES = {
    key: "attention in a random order over visible positions; exact mean and variance"
    if key != "random_copying"
    else "any token of the sequence in place of the one attended to; exact mean and variance"
    for key in BEHAVIOURS
}

# The columns of one behaviour, by what follows its key.
SUFFIXES = ("", "_spread", "_null_mean", "_z")

# Shorter periods would make two behaviours one: the token after the earlier occurrence, the one before, and the token itself.
_LEAST_PERIOD = 4
_DEFAULT_PERIOD = 50
_ROWS = 4
_DELIMITERS = ".,;:!?()[]\n"
_ONE_DELIMITER_IN = 8
# Relative, of attention that is uniform but for float32.
_ROUNDING = 1e-5
# Patterns that are in memory at a time, in numbers.
_BATCH_NUMBERS = 2**24


def behaviours(
    model: Model,
    names: Sequence[str] | str | None = None,
    *,
    seeds: int | Sequence[int] = 8,
    length: int | None = None,
    rows: int = _ROWS,
) -> pd.DataFrame:
    """What every head attends to on probes, and whether it copies there; see the module's text for each definition.

    Args:
        model: any view; behaviours do not depend on it.
        names: from ``BEHAVIOURS``; all that the model allows when None.
        seeds: how many (0, 1, ..), or which. ``_spread`` is over them.
        length: the longest period, in tokens; periods are drawn from half of it upwards. Default: 50, or what the context
            and the vocabulary allow.
        rows: prompts a seed.

    Returns:
        One row a head: ``head, layer, index`` and for each behaviour its mean over all destinations, ``.._spread`` (standard
        deviation of the seeds' means; NaN for one seed), ``.._null_mean`` and ``.._z``. ``attrs``: ``model``, ``seeds``,
        ``rows``, ``probe``, ``starts_with``, ``sources``, ``notes``, ``nulls``, ``delimiters`` and, for each behaviour that the
        model has no vocabulary or context for, why it was ``left_out``.

    Raises:
        CircuitsError: an unknown behaviour, or a named one that the model does not allow; a checkpoint that cannot run; no
            seeds; a length that does not fit.
    """
    asked = _asked(names)
    probe = _Probe.of(model, _seeds(seeds), length, rows)
    refused = {key: why for key in asked if (why := probe.why_not(key)) is not None}
    if names is not None and refused:
        raise CircuitsError(f"{model.name} cannot be asked for {next(iter(refused))}: {next(iter(refused.values()))}")
    wanted = [key for key in asked if key not in refused]
    tallies = _measure(model.in_view("raw"), probe, wanted)
    return _frame(model, probe, {key: tallies[key] for key in wanted}, refused)


def check_behaviour(name: str) -> str:
    """The name, if it is one of a behaviour.

    Raises:
        CircuitsError: it is not; the message gives the choices and the nearest.
    """
    if name not in BEHAVIOURS:
        near = difflib.get_close_matches(name, BEHAVIOURS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise CircuitsError(f"there is no behaviour {name!r}{hint} The behaviours are: {', '.join(BEHAVIOURS)}")
    return name


def _asked(names: Sequence[str] | str | None) -> list[str]:
    if names is None:
        return list(BEHAVIOURS)
    return [check_behaviour(name) for name in ([names] if isinstance(names, str) else dict.fromkeys(names))]


def _seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(seeds, Sequence) and seeds:
        return tuple(check_seed(seed) for seed in seeds)
    return tuple(range(whole_number("the number of seeds", seeds, 1, 10**6)))


# -- probes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Row:
    """One prompt of a probe.

    Attributes:
        seed: which seed it belongs to, counted from 0.
        tokens: its ids.
        queries: the destinations that are averaged over.
        targets: by behaviour, [destination, source]: where it is to attend.
        segment: how many distinct random tokens follow the first one; 0 where copying is not asked of this row.
    """

    seed: int
    tokens: tuple[int, ...]
    queries: Bool[Tensor, " pos"]
    targets: dict[str, Bool[Tensor, "pos pos"]]
    segment: int = 0


@dataclass(frozen=True, eq=False)
class _Probe:
    """What prompts are made of, and which behaviours they cannot show.

    Attributes:
        length: the longest period.
        first: the BOS id, or None: then a random token.
        pool: ids to draw from.
        fillers, delimiters: ids of tokens without punctuation, and of delimiters.
        obstacles: behaviour -> why it cannot be measured.
    """

    seeds: tuple[int, ...]
    rows: int
    length: int
    n_ctx: int
    first: int | None
    pool: tuple[int, ...]
    fillers: tuple[int, ...]
    delimiters: dict[str, int]
    obstacles: dict[str, str]

    @classmethod
    def of(cls, model: Model, seeds: tuple[int, ...], length: int | None, rows: int) -> _Probe:
        whole_number("rows", rows, 1, 10**6)
        pool, n_ctx = ordinary_tokens(model), model.architecture.n_ctx
        if not pool:
            raise CircuitsError(f"{model.name} has no token but special ones: nothing to draw probes from")
        check_tokens(model, pool[:1])
        most = min((n_ctx - 1) // 2, len(pool) - 1)  # a first token that is not in the segment
        if length is not None and not _LEAST_PERIOD <= length <= most:
            raise CircuitsError(
                f"length = {length}: {model.name} takes periods of {_LEAST_PERIOD} to {most} tokens "
                f"({n_ctx} positions hold BOS and two copies, and {len(pool)} tokens can be told apart)"
                if most >= _LEAST_PERIOD
                else f"length = {length}: {model.name} has too few tokens ({len(pool)}) or positions ({n_ctx}) to repeat any"
            )
        obstacles = {}
        if most < _LEAST_PERIOD:
            reason = (
                f"it takes {_LEAST_PERIOD} distinct tokens and a first one, twice, "
                f"and there are {len(pool)} ordinary tokens and {n_ctx} positions"
            )
            obstacles = dict.fromkeys(("induction", "duplicate_token", "random_copying"), reason)
        delimiters, fillers = _delimiters(model, pool)
        if not model.has_tokenizer:
            obstacles["delimiter"] = "without a tokenizer no token is known to be a delimiter"
        elif not delimiters or not fillers:
            obstacles["delimiter"] = "no token of its vocabulary is a delimiter, or all are"
        elif n_ctx < 2 * _ONE_DELIMITER_IN:
            obstacles["delimiter"] = f"it takes {2 * _ONE_DELIMITER_IN} positions, and there are {n_ctx}"
        chosen = min(_DEFAULT_PERIOD, max(most, 1)) if length is None else length
        return cls(seeds, rows, chosen, n_ctx, bos_id(model), tuple(pool), fillers, delimiters, obstacles)

    def why_not(self, key: str) -> str | None:
        return self.obstacles.get(key)

    @property
    def periods(self) -> range:
        return range(max(_LEAST_PERIOD, self.length // 2), self.length + 1)

    def prompts(self, wanted: Sequence[str]) -> Iterator[Row]:
        """All rows: for each seed those of both probes."""
        for place, seed in enumerate(self.seeds):
            # A generator for each probe: what one behaviour reads does not depend on which others are asked for.
            if set(wanted) - {"delimiter"}:
                rng = torch.Generator().manual_seed(2 * seed)
                yield from self._plain(place, rng) if "induction" in self.obstacles else self._repeats(place, rng)
            if "delimiter" in wanted:
                rng = torch.Generator().manual_seed(2 * seed + 1)
                yield from [self._delimited(place, rng) for _ in range(self.rows)]

    def _repeats(self, seed: int, rng: torch.Generator) -> Iterator[Row]:
        """Random tokens twice; within a seed no period comes again before all have been."""
        order = [p for _ in range(-(-self.rows // len(self.periods))) for p in _shuffled(self.periods, rng)]
        for period in order[: self.rows]:
            drawn = _shuffled(self.pool, rng)[: period + 1]
            tokens = (drawn[-1] if self.first is None else self.first, *drawn[:-1], *drawn[:-1])
            targets = {"induction": period - 1, "duplicate_token": period, "previous_token": 1, "self_attention": 0}
            queries = torch.arange(len(tokens), device="cpu") > period
            yield Row(seed, tokens, queries, _offsets(len(tokens), targets), period)

    def _plain(self, seed: int, rng: torch.Generator) -> Iterator[Row]:
        """Random tokens that cannot be repeated: too few of them, or too short a context. Drawn with replacement."""
        n = min(self.n_ctx, 2 * _DEFAULT_PERIOD)
        for _ in range(self.rows):
            drawn = torch.randint(len(self.pool), (n,), generator=rng, device="cpu").tolist()
            tokens = [self.pool[index] for index in drawn]
            if self.first is not None:
                tokens[0] = self.first
            targets = _offsets(n, {"previous_token": 1, "self_attention": 0})
            yield Row(seed, tuple(tokens), torch.arange(n, device="cpu") >= (n + 1) // 2, targets)

    def _delimited(self, seed: int, rng: torch.Generator) -> Row:
        n = min(self.n_ctx, max(2 * self.length + 1, 2 * _ONE_DELIMITER_IN))
        known = list(self.delimiters.values())
        tokens = [self.fillers[i] for i in torch.randint(len(self.fillers), (n,), generator=rng, device="cpu").tolist()]
        if self.first is not None:
            tokens[0] = self.first
        # One in each half at least, so that every row has something to attend to.
        half = n // 2
        places = set(_shuffled(range(1, n), rng)[: n // _ONE_DELIMITER_IN]) | {1 + _shuffled(range(half - 1), rng)[0]}
        for place in places:
            tokens[place] = known[int(torch.randint(len(known), (1,), generator=rng, device="cpu"))]
        is_delimiter = torch.zeros(n, dtype=torch.bool, device="cpu")
        is_delimiter[sorted(places)] = True
        queries = (torch.arange(n, device="cpu") >= half) & ~is_delimiter
        earlier = torch.ones(n, n, dtype=torch.bool, device="cpu").tril(-1)
        return Row(seed, tuple(tokens), queries, {"delimiter": earlier & is_delimiter})


def _shuffled(items: Sequence[int], rng: torch.Generator) -> list[int]:
    return [items[index] for index in torch.randperm(len(items), generator=rng, device="cpu").tolist()]


def _offsets(n: int, offsets: dict[str, int]) -> dict[str, Tensor]:
    """Targets at fixed distances, and the first position."""
    distance = torch.arange(n, device="cpu")[:, None] - torch.arange(n, device="cpu")
    first = (torch.arange(n, device="cpu") == 0).expand(n, n)
    return {name: distance == offset for name, offset in offsets.items()} | {"first_token": first}


def _delimiters(model: Model, pool: Sequence[int]) -> tuple[dict[str, int], tuple[int, ...]]:
    """Delimiters that are tokens, by their text; and tokens that hold letters or digits."""
    if not model.has_tokenizer:
        return {}, ()
    found = {text: token for text in _DELIMITERS if (token := model.tokenizer.find(text)) in set(pool)}
    fillers = tuple(token for token in pool if any(c.isalnum() for c in model.tokenizer.text(token)))
    return {text: token for text, token in found.items() if token is not None}, fillers


# -- running and reducing ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Tally:
    """Sums over destinations, float64: by seed, what was measured and out of how much; over all, the null's mean and variance."""

    value: Float[Tensor, "seed layer head"]
    weight: Float[Tensor, "seed layer head"]
    null: Float[Tensor, "layer head"]
    variance: Float[Tensor, "layer head"]

    @classmethod
    def empty(cls, seeds: int, layers: int, heads: int) -> _Tally:
        each = torch.zeros(seeds, layers, heads, dtype=torch.float64, device="cpu")
        return cls(each, each.clone(), each[0].clone(), each[0].clone())

    def gather(self, shard: Shard) -> None:
        """Add what other ranks found of their heads; every rank must call this."""
        for tensor in (self.value, self.weight, self.null, self.variance):
            tensor.copy_(shard.sum(tensor))

    @property
    def mean(self) -> Float[Tensor, "layer head"]:
        return self.value.sum(0) / self.weight.sum(0)

    @property
    def spread(self) -> Float[Tensor, "layer head"]:
        by_seed = self.value / self.weight
        return by_seed.std(0) if len(by_seed) > 1 else torch.full_like(self.mean, torch.nan)

    @property
    def chance(self) -> Null:
        total = self.weight.sum(0)
        return Null(self.null / total, self.variance.sqrt() / total)


def _measure(model: Model, probe: _Probe, wanted: Sequence[str]) -> dict[str, _Tally]:
    """Every wanted behaviour's sums, row by row; a batch's patterns are gone before the next one runs."""
    a = model.architecture
    tallies = {key: _Tally.empty(len(probe.seeds), a.n_layers, a.n_heads) for key in wanted}
    copying = "random_copying" in tallies
    keep = ("pattern", "attention_input", "attention_output") if copying else ("pattern",)
    rows = list(probe.prompts(wanted))
    shard = Shard.whole_layer(a.n_heads)
    for rows_of_batch in track(_batches(rows, a.n_layers * a.n_heads), "Running probes"):
        batch = run(model, pad([row.tokens for row in rows_of_batch]), keep=keep)
        shard = batch.shard
        if not bool(batch.final.isfinite().all()):
            raise CircuitsError(
                f"{model.name} gives NaN or infinity on random tokens, so attention means nothing: "
                "its weights or the numbers in its config are not finite or out of range"
            )
        for layer in range(a.n_layers):
            weights = model.layer(layer) if copying else None
            for index, row in enumerate(rows_of_batch):
                n = len(row.tokens)
                pattern = batch.layers[layer]["pattern"][index, :, :n, :n].double().cpu()
                _tally_attention(tallies, pattern, row, layer, shard.heads)
                if weights is not None and row.segment:
                    _tally_copying(tallies["random_copying"], model, weights, batch, index, row)
    for tally in tallies.values():
        tally.gather(shard)
    return tallies


def _batches(rows: Sequence[Row], heads: int) -> list[list[Row]]:
    """Rows in their order, as many at a time as keep all patterns of a batch within bounds."""
    found: list[list[Row]] = []
    for row in rows:
        longest = max(len(other.tokens) for other in (*(found[-1] if found else ()), row))
        if found and (len(found[-1]) + 1) * heads * longest**2 <= _BATCH_NUMBERS:
            found[-1].append(row)
        else:
            found.append([row])
    return found


def _tally_attention(
    tallies: dict[str, _Tally], pattern: Float[Tensor, "head destination source"], row: Row, layer: int, own: slice
) -> None:
    """Add one row's attention to its targets, and what its own rows of attention would give in a random order."""
    A = pattern[:, row.queries]
    n = torch.arange(1, len(row.tokens) + 1, dtype=torch.float64, device="cpu")[
        row.queries
    ]  # positions that each destination can see
    mean = A.sum(-1) / n
    variance = A.square().sum(-1) / n - mean.square()
    # Attention that is the same everywhere has no other order; what is left is the rounding of float32.
    variance = variance.where(variance > (_ROUNDING * mean).square(), 0.0)
    for key, targets in row.targets.items():
        if key not in tallies:
            continue
        tally, m = tallies[key], targets[row.queries].sum(-1).double()
        tally.value[row.seed, layer, own] += (A * targets[row.queries]).sum((-1, -2))
        tally.weight[row.seed, layer, own] += len(n)
        tally.null[layer, own] += (m * mean).sum(-1)
        tally.variance[layer, own] += (m * (n - m) / (n - 1).clamp(min=1) * variance).sum(-1)


def _tally_copying(tally: _Tally, model: Model, weights: Layer, batch: Batch, index: int, row: Row) -> None:
    """Add one row's raised logits, those of the attended tokens and all."""
    layer, kept, source, own = weights.index, batch.layers[weights.index], model.source, batch.shard.heads
    here = slice(1, row.segment + 1)
    scale = source.final_norm.scale(batch.final[index, here].double())[:, 0]
    read = source.final_norm.read_unscaled(source.unembedding[:, list(row.tokens[here])].mT.double())
    post = source.attention_post_norm(layer)
    if post is not None:
        scale = scale * post.scale(kept["attention_output"][index, here].double())[:, 0]
        read = post.read_unscaled(read)
    values = values_without_bias(kept["attention_input"][index, here], weights)[own].double()
    moved = values @ (weights.W_O[own].double() @ read.mT)
    raised = (moved - moved.mean(-1, keepdim=True)).clamp(min=0)
    # What a head moves from s to t is A[t, s] / scale[t] times one row of logits, which depends on s alone.
    amount = (kept["pattern"][index, :, here, here].double() / scale[:, None]).sum(1)
    total, m = raised.sum(-1), row.segment
    # Rescaled: 2 share - 1 = (2 own - total) / total.
    tally.value[row.seed, layer, own] += (amount * (2 * raised.diagonal(dim1=-2, dim2=-1) - total)).sum(-1).cpu()
    tally.weight[row.seed, layer, own] += (amount * total).sum(-1).cpu()
    tally.null[layer, own] += (amount * (2 / m - 1) * total).sum(-1).cpu()
    tally.variance[layer, own] += (4 * amount.square() * raised.var(-1, correction=0)).sum(-1).cpu()


# -- the frame --------------------------------------------------------------------------------------------------------


def _frame(model: Model, probe: _Probe, tallies: dict[str, _Tally], refused: dict[str, str]) -> pd.DataFrame:
    import pandas as pd

    columns: dict[str, Any] = {
        "head": model.head_labels,
        "layer": [layer for layer in range(model.n_layers) for _ in range(model.n_heads)],
        "index": [index for _ in range(model.n_layers) for index in range(model.n_heads)],
    }
    for key, tally in tallies.items():
        null = tally.chance
        numbers = (tally.mean, tally.spread, null.mean, null.z(tally.mean))
        columns |= {key + suffix: x.flatten().numpy() for suffix, x in zip(SUFFIXES, numbers, strict=True)}
    frame = pd.DataFrame(columns)
    frame.attrs = {
        "model": model.name,
        "seeds": list(probe.seeds),
        "probe": "random tokens"
        if "induction" in probe.obstacles
        else f"random tokens repeated, periods of {probe.periods[0]} to {probe.periods[-1]}",
        "rows": probe.rows,
        "starts_with": "a random token" if probe.first is None else "BOS",
        "sources": {key: BEHAVIOURS[key].source for key in tallies},
        "notes": {key: BEHAVIOURS[key].note for key in tallies},
        "nulls": {key: NULL_NOTES[key] for key in tallies},
        "delimiters": list(probe.delimiters) if "delimiter" in tallies else [],
        "left_out": refused,
    }
    return frame

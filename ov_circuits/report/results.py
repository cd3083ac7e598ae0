"""Everything that a report is made of, computed once; the page, the bundle and the figures are ways to write it down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pandas as pd

from ov_circuits import prompts as prompt_sets
from ov_circuits.certificate import Certificate, verify
from ov_circuits.errors import CircuitsError
from ov_circuits.evidence import scoreboard
from ov_circuits.model import Model
from ov_circuits.progress import track
from ov_circuits.prompts import PromptSet
from ov_circuits.report import budget
from ov_circuits.report.dashboard import Dashboard
from ov_circuits.report.payload import payload
from ov_circuits.scores.board import SCORES
from ov_circuits.scores.composition import composition, subspace_overlap
from ov_circuits.scores.pairs import strongest_token_pairs, token_pair
from ov_circuits.scores.spaces import space_map
from ov_circuits.trace.ablation import ablation_sweep
from ov_circuits.trace.attribution import attribute
from ov_circuits.trace.behaviours import BEHAVIOURS
from ov_circuits.trace.scan import Scan
from ov_circuits.trace.scan import scan as run_scan

if TYPE_CHECKING:
    from ov_circuits.trace.generation import Generation
    from ov_circuits.trace.trace import Trace

_Found = TypeVar("_Found")

PAIRS_AN_END = 6
# Token pairs are exact over all pairs of tokens and cost about 0.2 microseconds for every token and dimension of a head. By
# default as many heads are read as take some twenty seconds: all of a small model, 28 of SmolLM2's 270.
_PAIR_BUDGET = 90_000_000
_FEWEST_PAIR_HEADS = 4
# Fewer heads than this are not worth ablating without being asked, nor fewer prompts than this a mean.
_FEWEST_ABLATED = 8
_FEWEST_PROMPTS = 16


@dataclass(frozen=True, eq=False)
class Results:
    """What was found out about a model, and about a prompt if there is one.

    Attributes:
        model: in the weight view of all scores.
        certificate: the checks of :func:`ov_circuits.verify`.
        board: the scoreboard, with behaviours where the model was probed.
        composition: all pairs of heads, Q, K and V; None where it was not asked for, or there is one layer.
        overlap: shared write directions of every two heads; None with ``composition``.
        spaces: the map of heads by read and write space.
        pairs: strongest token pairs, by head label, of the heads that were read.
        token_pairs: every head's entry for each pair of tokens that was asked for.
        trace: the prompt.
        account: the ledger of the prompt's answer.
        sweep: the same answer without each head, as of :func:`ov_circuits.ablation_sweep`.
        scan: the heads over a text.
        prompts: a prompt set, and
        attribution: its accounts, as of :func:`ov_circuits.attribute`.
        generation: a continuation, step by step.
        notes: what was left out by itself, and why.
        seed: of every random draw.
    """

    model: Model
    certificate: Certificate
    board: pd.DataFrame
    composition: pd.DataFrame | None
    overlap: pd.DataFrame | None
    spaces: pd.DataFrame
    pairs: dict[str, pd.DataFrame]
    token_pairs: list[pd.DataFrame]
    trace: Trace | None
    account: pd.DataFrame | None
    sweep: pd.DataFrame | None
    scan: Scan | None
    prompts: PromptSet | None
    attribution: pd.DataFrame | None
    generation: Generation | None
    notes: tuple[str, ...]
    seed: int


def dashboard(
    model: Model,
    trace: Trace | None = None,
    answer: str | int | None = None,
    against: str | int | None = None,
    *,
    position: int = -1,
    certificate: Certificate | None = None,
    scores: Sequence[str] | str | None = None,
    pairs: int | str | None = None,
    paths: bool = True,
    behaviours: bool | None = None,
    scan: Scan | int | None = None,
    ablation: int | str | None = None,
    prompts: PromptSet | str | Path | None = None,
    generation: Generation | None = None,
    token_pairs: Sequence[tuple[str | int, str | int]] = (),
    seed: int = 0,
) -> Dashboard:
    """The offline page of a model, with a prompt's trace if one is given.

    Args:
        model: in the weight view that scores and directions are to have.
        trace: a trace of the same checkpoint.
        answer, against: with a trace, whose logit (difference) to account for; without ``answer`` the likeliest next token
            against the runner-up.
        position: whose next token is explained.
        certificate: from :func:`ov_circuits.verify`; made now when None.
        scores: scores over the vocabulary to show beside the spectra, by name, or ``"all"``, which takes minutes on a large
            vocabulary.
        pairs: how many heads have their strongest token pairs read (the most one-sided, and those that move the answer
            most), or ``"all"``; about a second a head at 50,000 tokens. None: what fits into some twenty seconds.
        paths: whether to work out composition and write-space overlap of all pairs of heads.
        behaviours: whether to probe what heads attend to (:func:`ov_circuits.behaviours`). None: where the model can run and
            it takes some ten seconds, with fewer seeds on larger models.
        scan: examples from a text: a scan, or how many tokens of the text that comes with the package to scan; 0 for none.
            None: 4000 tokens for small models, none for others.
        ablation: with a trace, how many heads to ablate one at a time (those that move the answer most), or ``"all"``. None:
            what fits into some ten seconds.
        prompts: a prompt set (:func:`ov_circuits.prompts.load`), its name or file; of a name or file as many prompts as fit into
            some ten seconds.
        generation: a continuation of :func:`ov_circuits.generate`.
        token_pairs: pairs (source, output), each word one token or an id: every head's entry of its full OV circuit for them
            (:func:`ov_circuits.token_pair`) is on the map like a score.
        seed: of every random draw.

    Returns:
        The page: ``.save(file)`` writes it, ``.html`` is its text, and a notebook shows it as a cell's last line.

    Raises:
        CircuitsError: an answer without a trace, a trace, scan or continuation of another checkpoint, a word of several tokens,
            an unknown score or set; or what was asked for cannot be done with this checkpoint. What is only default and cannot
            be done is a note on the page.
    """
    if trace is None and answer is not None:
        raise CircuitsError("an answer needs a prompt: pass trace as well")
    if answer is None and against is not None:
        raise CircuitsError("a logit difference needs an answer: pass answer as well")
    for what, other in (("trace", trace), ("generation", None if generation is None else generation.trace)):
        if other is not None and other.model.source is not model.source:
            raise CircuitsError(f"the {what} was made with another model: make it with this one")
    _check_number(pairs, "pairs is how many heads have their token pairs read")
    _check_number(ablation, "ablation is how many heads are ablated")
    if ablation and trace is None:
        raise CircuitsError("an ablation needs a prompt: pass trace as well")
    if isinstance(scan, Scan) and (scan.facts["model"], list(scan.heads["head"])) != (model.name, model.head_labels):
        raise CircuitsError(f"the scan is of {scan.facts['model']}, not of {model.name}: scan with this model")
    # Before the scores: a faulty prompt, answer or set is said at once, not after minutes.
    account = None if trace is None else _account(trace, answer, against, position)
    chosen = None if prompts is None else _prompt_set(model, prompts, seed)
    entries = [token_pair(model, source, output) for source, output in token_pairs]
    certificate = verify(model) if certificate is None else certificate
    notes: list[str] = []
    board = _board(model, _with_spectra(model, scores), behaviours, seed, notes)
    paths = paths and model.n_layers > 1
    results = Results(
        model=model,
        certificate=certificate,
        board=board,
        composition=composition(model, "all") if paths else None,
        overlap=subspace_overlap(model, read="O") if paths else None,
        spaces=space_map(model),
        pairs={
            label: strongest_token_pairs(model, label, PAIRS_AN_END)
            for label in track(_pair_heads(model, board, account, pairs), "Reading token pairs")
        },
        token_pairs=entries,
        trace=trace,
        account=account,
        sweep=None if trace is None or account is None else _sweep(model, trace, account, ablation, notes),
        scan=_scan(model, scan, notes),
        prompts=chosen,
        attribution=None if chosen is None else attribute(model, chosen, seed=seed),
        generation=generation,
        notes=tuple(notes),
        seed=seed,
    )
    return Dashboard(payload(results), results)


def _check_number(wanted: int | str | None, what: str) -> None:
    if not (wanted is None or wanted == "all" or (isinstance(wanted, int) and wanted >= 0)):
        raise CircuitsError(f"{what}: a number or 'all', not {wanted!r}")


def _unless_refused(work: Callable[[], _Found], what: str, asked: bool, notes: list[str]) -> _Found | None:
    """What nobody asked for may be refused: the page then says why, and shows the rest."""
    try:
        return work()
    except CircuitsError as error:
        if asked:
            raise
        notes.append(f"{what} left out: {error}")
        return None


def _board(
    model: Model, scores: Sequence[str] | str | None, behaviours: bool | None, seed: int, notes: list[str]
) -> pd.DataFrame:
    """The scoreboard; with behaviours where they are asked for, or the model runs and they are affordable."""
    seeds = 8 if behaviours else budget.probe_seeds(model)
    named = isinstance(scores, (list, tuple)) and any(name in BEHAVIOURS for name in scores)
    wanted = behaviours or (behaviours is None and not named and model.why_not_run is None)
    if wanted and seeds:
        probed = _unless_refused(
            lambda: scoreboard(model, scores, tokens=0, behaviours=True, seeds=seeds, seed=seed),
            "Behaviours on probe prompts are",
            bool(behaviours),
            notes,
        )
        if probed is not None:
            return probed
    elif wanted:
        notes.append("Behaviours on probe prompts take a while on this model: `report --behaviours` measures them.")
    return scoreboard(model, scores, tokens=0, seed=seed)


def _sweep(
    model: Model, trace: Trace, account: pd.DataFrame, wanted: int | str | None, notes: list[str]
) -> pd.DataFrame | None:
    """Each head's ablation on the prompt: by default of as many as are affordable, those that move the answer most."""
    facts, every = account.attrs, model.head_labels
    fit = budget.runs(model, len(trace))
    if wanted is None and fit < min(_FEWEST_ABLATED, len(every)):
        notes.append("Ablation runs the prompt once a head: `report --ablate N` does it for the N strongest.")
        return None
    count = len(every) if wanted == "all" else fit if wanted is None else int(wanted)
    if count == 0:
        return None
    strongest = set(_by_attribution(account)[:count])
    return _unless_refused(
        lambda: ablation_sweep(
            model,
            trace,
            heads=[label for label in every if label in strongest],
            answer=facts["answer"],
            against=facts["against"],
            position=facts["position"],
        ),
        "Ablations are",
        wanted is not None,
        notes,
    )


def _scan(model: Model, wanted: Scan | int | None, notes: list[str]) -> Scan | None:
    """The text that comes with the package, as far as it is asked for; by default some of it, where that is affordable."""
    if isinstance(wanted, Scan):
        return wanted
    if wanted is None and (model.why_not_run is not None or not model.has_tokenizer or model.source.shard is not None):
        return None
    tokens = budget.scan_tokens(model) if wanted is None else wanted
    if wanted is None and not tokens:
        notes.append("Examples from a text are left out: `report --scan N` takes them from N tokens.")
    if not tokens:
        return None
    return _unless_refused(
        lambda: run_scan(model, tokens=tokens), "Examples from a text are", wanted is not None, notes
    )


def _prompt_set(model: Model, wanted: PromptSet | str | Path, seed: int) -> PromptSet:
    """A set, or of a name or file as many prompts as are affordable."""
    if isinstance(wanted, PromptSet):
        return wanted
    found = prompt_sets.load(wanted, model)
    longest = max(len(prompt.tokens) for prompt in found)
    fit = max(_FEWEST_PROMPTS, budget.runs(model, longest))
    return found if fit >= len(found) else prompt_sets.load(wanted, model, n=fit, seed=seed)


def _by_attribution(account: pd.DataFrame) -> list[str]:
    """Head labels, those that move the answer most first."""
    by_head = account[account["component"] == "head"].groupby("head", sort=False)["value"].sum()
    labels: list[str] = by_head.abs().sort_values(ascending=False, kind="stable").index.tolist()
    return labels


def _with_spectra(model: Model, scores: Sequence[str] | str | None) -> Sequence[str] | str | None:
    """Named scores come beside the spectra, which every page shows."""
    if scores is None or scores == "all":
        return scores
    spectra = [key for key, score in SCORES.items() if model.has_embeddings or not score.needs_embeddings]
    return list(dict.fromkeys([*spectra, *([scores] if isinstance(scores, str) else scores)]))


def _account(trace: Trace, answer: str | int | None, against: str | int | None, position: int) -> pd.DataFrame:
    if answer is None:
        answer, against = trace.record.logits[trace.row(trace.position(position))].topk(2).indices.tolist()
    return trace.ledger(answer, against, position)


def _pair_heads(model: Model, board: pd.DataFrame, account: pd.DataFrame | None, wanted: int | str | None) -> list[str]:
    """Which heads have their token pairs read, in layer order.

    The heads that a reader opens first: those with the most one-sided eigenvalues, and with a prompt, taking turns with these,
    those that move the answer most.
    """
    if not model.has_embeddings:
        return []
    a = model.architecture
    broken = set(board.attrs["not_finite"])
    possible = [label for label in model.head_labels if label not in broken]
    if wanted is None:
        wanted = max(_FEWEST_PAIR_HEADS, _PAIR_BUDGET // (a.n_vocab * a.d_head))
    if wanted == "all" or int(wanted) >= len(possible):
        return possible
    orders = []
    key = next((name for name in ("eigen_copying_full", "eigen_copying_ov") if name in board), None)
    if key is not None:
        orders.append(board.set_index("head")[key].abs().sort_values(ascending=False, kind="stable").index.tolist())
    if account is not None:
        orders.append(_by_attribution(account))
    turns = [label for turn in zip(*orders, strict=False) for label in turn] if orders else possible
    chosen = list(dict.fromkeys(label for label in turns if label not in broken))[: int(wanted)]
    return [label for label in possible if label in set(chosen)]

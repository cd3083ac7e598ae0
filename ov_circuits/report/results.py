"""Everything that a report is made of, computed once: the page, the bundle and the figures are ways to write it down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from ov_circuits.certificate import Certificate, verify
from ov_circuits.errors import CircuitsError
from ov_circuits.model import Model
from ov_circuits.progress import track
from ov_circuits.scores.board import SCORES, scoreboard
from ov_circuits.scores.composition import composition, subspace_overlap
from ov_circuits.scores.pairs import strongest_token_pairs
from ov_circuits.scores.spaces import space_map

if TYPE_CHECKING:
    from ov_circuits.trace.trace import Trace

PAIRS_AN_END = 6
# Token pairs are exact over all pairs of tokens and cost about 0.2 microseconds for every token and dimension of a head. By
# default as many heads are read as take some twenty seconds: all of a small model, 28 of SmolLM2's 270.
_PAIR_BUDGET = 90_000_000
_FEWEST_PAIR_HEADS = 4


@dataclass(frozen=True, eq=False)
class Results:
    """What was found out about a model, and about a prompt if there is one.

    Attributes:
        model: in the weight view of all scores.
        certificate: the checks of :func:`ov_circuits.verify`.
        board: the scoreboard.
        composition: all pairs of heads, Q, K and V; None where it was not asked for, or there is one layer.
        overlap: shared write directions of every two heads; None with ``composition``.
        spaces: the map of heads by read and write space.
        pairs: strongest token pairs, by head label, of the heads that were read.
        trace: the prompt.
        account: the ledger of the prompt's answer.
        seed: of every random draw.
    """

    model: Model
    certificate: Certificate
    board: pd.DataFrame
    composition: pd.DataFrame | None
    overlap: pd.DataFrame | None
    spaces: pd.DataFrame
    pairs: dict[str, pd.DataFrame]
    trace: Trace | None
    account: pd.DataFrame | None
    seed: int


def gather(
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
    seed: int = 0,
) -> Results:
    """Compute all that a report shows; arguments as of :func:`ov_circuits.dashboard`.

    Raises:
        CircuitsError: an answer without a trace, a trace of another checkpoint, a word of several tokens, or an unknown score.
    """
    if trace is None and answer is not None:
        raise CircuitsError("an answer needs a prompt: pass trace as well (on the command line: --prompt)")
    if answer is None and against is not None:
        raise CircuitsError("a logit difference needs an answer: pass answer as well (on the command line: --answer)")
    if trace is not None and trace.model.source is not model.source:
        raise CircuitsError("the trace was made with another model: trace the prompt with this one")
    if not (pairs is None or pairs == "all" or (isinstance(pairs, int) and pairs >= 0)):
        raise CircuitsError(f"pairs is how many heads have their token pairs read: a number or 'all', not {pairs!r}")
    # Before the scores: a faulty prompt or answer is said at once, not after minutes.
    account = None if trace is None else _account(trace, answer, against, position)
    certificate = verify(model) if certificate is None else certificate
    board = scoreboard(model, _with_spectra(model, scores), tokens=0, seed=seed)
    paths = paths and model.n_layers > 1
    return Results(
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
        trace=trace,
        account=account,
        seed=seed,
    )


def _with_spectra(model: Model, scores: Sequence[str] | str | None) -> Sequence[str] | str | None:
    """Named scores come beside the spectra, which every page shows."""
    if scores is None or scores == "all":
        return scores
    spectra = [key for key, score in SCORES.items() if model.has_embeddings or not score.needs_embeddings]
    return list(dict.fromkeys([*spectra, *([scores] if isinstance(scores, str) else scores)]))


def _account(trace: Trace, answer: str | int | None, against: str | int | None, position: int) -> pd.DataFrame:
    if answer is None:
        answer, against = trace.logits[trace.row(trace.position(position))].topk(2).indices.tolist()
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
        by_head = account[account["component"] == "head"].groupby("head", sort=False)["value"].sum()
        orders.append(by_head.abs().sort_values(ascending=False, kind="stable").index.tolist())
    turns = [label for turn in zip(*orders, strict=False) for label in turn] if orders else possible
    chosen = list(dict.fromkeys(label for label in turns if label not in broken))[: int(wanted)]
    return [label for label in possible if label in set(chosen)]

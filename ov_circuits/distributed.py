"""Work on many processes: each reads and scores, or runs, its own heads, and only frames are gathered.

Under ``torchrun --standalone --nproc-per-node N -m ov_circuits heads MODEL`` (or ``attribute``, ``verify``), or in a script of
one's own that torchrun starts::

    frame = ov.distributed.scoreboard(ov.load(folder))          # on every rank; the frame on rank 0, None on the others
    model = ov.distributed.tensor_parallel(ov.load(folder))     # on every rank; its prompts run on all of them together
    account = model.trace(prompt).ledger(" Paris", " Rome")     # on every rank, the same frame on each

Scores: ranks share the layers, and the heads inside of layers where there are too few; the Gram matrices of the embeddings are
summed up from a share of the vocabulary each. Only attention weights of a rank's own heads are read on it, and only frames travel.
Prompts: :mod:`ov_circuits.trace.tensor_parallel`. Both take a process group's or a ``DeviceMesh``'s ranks; without one the group
is made from torchrun's environment, and ended with the process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ov_circuits.processes import Ranks, ranks_of

if TYPE_CHECKING:
    import pandas as pd
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ov_circuits.linalg.lowrank import Grams
    from ov_circuits.model import Model


def scoreboard(
    model: Model,
    scores: Sequence[str] | str | None = None,
    tokens: int = 5,
    *,
    nulls: bool = True,
    source: str = "embed",
    seed: int = 0,
    resume: str | os.PathLike[str] | None = None,
    keep: bool = False,
    group: ProcessGroup | DeviceMesh | None = None,
) -> pd.DataFrame | None:
    """:func:`ov_circuits.scoreboard` on all processes of a group; call it on each of them, with the same arguments.

    Args:
        model: the checkpoint, opened on every rank (opening reads headers only).
        scores, tokens, nulls, source, seed, resume, keep: as of :func:`ov_circuits.scoreboard`. Each rank saves what it has
            finished; a run goes on when it is started with as many processes.
        group: a process group, or a one-dimensional ``DeviceMesh``; None for the default group, which is made from
            torchrun's environment where there is none, and ended with the process.

    Returns:
        The frame on the group's first rank, equal to that of a single process; None on the others.

    Raises:
        CircuitsError: on all ranks, whatever one of them cannot do; or a rank has died.
    """
    from ov_circuits.scores.board import Board
    from ov_circuits.scores.pieces import pieces
    from ov_circuits.scores.saved import forget

    ranks = ranks_of(group)
    _share_look(model, ranks)
    board = ranks.all_do(lambda: Board(model, scores, tokens, nulls=nulls, source=source, seed=seed))
    saved = None if resume is None else ranks.all_do(lambda: board.saved(resume))
    work = pieces(model.architecture, ranks.size)
    own = work[len(work) * ranks.rank // ranks.size : len(work) * (ranks.rank + 1) // ranks.size]
    if saved is not None and ranks.rank == 0:
        saved.announce(work)
    unfinished = ranks.gather_on_all(len(own) if saved is None else len(own) - len(saved.finished(own)))
    if board.needs_grams and any(unfinished):
        _share_grams(model, ranks)
    rows = ranks.all_do(lambda: list(board.parts(own, saved)))
    gathered = ranks.gather_on_first(rows)
    if gathered is None:
        return None
    if resume is not None and not keep:
        forget(resume)
    return board.frame(part for parts in gathered for part in parts)


def tensor_parallel(model: Model, mesh: ProcessGroup | DeviceMesh | None = None) -> Model:
    """Let a model's prompts run on all ranks together; see :func:`ov_circuits.trace.tensor_parallel.tensor_parallel`."""
    from ov_circuits.trace.tensor_parallel import tensor_parallel

    return tensor_parallel(model, mesh)


def rank_facts(model: Model, layer: int) -> dict[str, Any]:
    """What this rank holds of a layer of a tensor-parallel model.

    Args:
        model: what :func:`tensor_parallel` gave.
        layer: which layer.

    Returns:
        ``rank``; ``heads``, the first and the last one here; ``block``, their rows of W_O as (in, out), [heads * d_head, d_model].

    Raises:
        CircuitsError: the model is not distributed.
    """
    from ov_circuits.trace.tensor_parallel import rank_facts

    return rank_facts(model, layer)


def _share_look(model: Model, ranks: Ranks) -> None:
    """Whether the embeddings can be used, each rank having looked at a share of the vocabulary."""
    source = model.source
    if source.contents.embeddings:
        found = ranks.all_do(lambda: source.not_finite(*_share(model, ranks)))
        source.why_no_vocabulary = next((text for text in ranks.gather_on_all(found) if text is not None), None)


def _share(model: Model, ranks: Ranks) -> tuple[int, int]:
    """A rank's part of the vocabulary."""
    n_vocab = model.architecture.n_vocab
    return n_vocab * ranks.rank // ranks.size, n_vocab * (ranks.rank + 1) // ranks.size


def _share_grams(model: Model, ranks: Ranks) -> None:
    """The model's Gram matrices, summed up from a share of the vocabulary each."""
    source = model.source
    part: Grams = ranks.all_do(lambda: source.gram_part(*_share(model, ranks)))
    source.raw_grams = part.changed(ranks.sum)

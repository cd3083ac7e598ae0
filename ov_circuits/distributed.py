"""The scoreboard on many processes: each reads and scores its own heads, one of them has the table.

Under ``torchrun --nproc-per-node N -m ov_circuits heads MODEL``, or in a script of one's own that torchrun starts::

    frame = ov.distributed.scoreboard(ov.load(folder))     # on every rank; the frame on rank 0, None on the others

Ranks share the layers, and the heads inside of layers where there are too few; the Gram matrices of the embeddings are summed up
from a share of the vocabulary each. Only attention weights of a rank's own heads are read on it, and only frames travel. The
group is gloo's on CPUs, or whichever the script has made.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from ov_circuits.errors import CircuitsError

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ov_circuits.linalg.lowrank import Grams
    from ov_circuits.model import Model

# A rank that has finished waits for the slowest one. Of one that has died the connection breaks at once.
_PATIENCE = timedelta(days=7)

Result = TypeVar("Result")


def launched() -> bool:
    """Whether torchrun has started this process together with others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    return not launched() or os.environ["RANK"] == "0"


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

    ranks = _ranks(group)
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


def first_to_speak() -> bool:
    """Whether no other process started with this one has said yet what is wrong: then this one should."""
    if not launched() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=10))
        return store.add(f"ov_circuits/refused/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", 1) == 1
    except (KeyError, RuntimeError):  # torchrun itself is gone
        return True


class _Ranks:
    """A group of processes and what they do together. A failure of one is everyone's, in the same words."""

    def __init__(self, group: ProcessGroup | None) -> None:
        import torch
        import torch.distributed as dist

        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._device = torch.device("cpu")
        if dist.get_backend(group) == "nccl":  # which moves nothing that is not on a GPU
            self._device = torch.device("cuda", torch.cuda.current_device())

    def all_do(self, work: Callable[[], Result]) -> Result:
        """``work()`` on every rank.

        Raises:
            CircuitsError: on every rank, what the first of them could not do.
        """
        done: list[Result] = []
        problem = None
        try:
            done.append(work())
        except CircuitsError as error:
            problem = str(error)
        problem = next((text for text in self.gather_on_all(problem) if text is not None), None)
        if problem is not None:
            raise CircuitsError(problem)
        return done[0]

    def gather_on_all(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        import torch.distributed as dist

        gathered: list[Any] = [None] * self.size
        with _lost():
            dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def gather_on_first(self, value: Any) -> list[Any] | None:
        """Every rank's value, on the first rank."""
        import torch.distributed as dist

        gathered: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with _lost():
            dist.gather_object(value, gathered, dst=self._of(0), group=self._group)
        return gathered

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors, on every rank."""
        import torch.distributed as dist

        total = tensor.clone().to(self._device)
        with _lost():
            dist.all_reduce(total, group=self._group)
        return total.to(tensor.device)

    def _of(self, rank: int) -> int:
        """The rank among all processes of a rank of the group."""
        import torch.distributed as dist

        return rank if self._group is None else dist.get_global_rank(self._group, rank)


@contextmanager
def _lost() -> Iterator[None]:
    """Says in a sentence that another process has gone."""
    try:
        yield
    except RuntimeError as error:  # torch's DistError among them
        raise CircuitsError(
            f"another process of the group ended before the scores were gathered; its own message says why "
            f"({str(error).splitlines()[0][:200]})"
        ) from error


def _ranks(group: ProcessGroup | DeviceMesh | None) -> _Ranks:
    """The processes of a group or mesh, or of the default group, which is made where there is none."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise CircuitsError(
                f"a mesh of {group.ndim} dimensions does not say which ranks share the heads: give one of them, mesh[name]"
            )
        group = group.get_group()
    if group is None and not dist.is_initialized():
        if not launched():
            raise CircuitsError(
                "there is no process group: start the script with torchrun, or call torch.distributed.init_process_group "
                "first"
            )
        dist.init_process_group("gloo", timeout=_PATIENCE)
        atexit.register(_leave)  # not sooner: a group that is made anew finds the addresses of the one before
    return _Ranks(group)


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _share_grams(model: Model, ranks: _Ranks) -> None:
    """The model's Gram matrices, summed up from a share of the vocabulary each."""
    source, n_vocab = model.source, model.architecture.n_vocab
    start, stop = (n_vocab * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1))
    part: Grams = ranks.all_do(lambda: source.gram_part(start, stop))
    source.raw_grams = part.changed(ranks.sum)

"""Several processes as one: who is first, what all do together, and what one of them says for all.

The processes are those that torchrun starts, or that a script has joined in a torch.distributed group. Nothing here knows of
models: :mod:`ov_circuits.distributed` shares weights' scores among processes, :mod:`ov_circuits.trace.tensor_parallel` prompts.
"""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from ov_circuits.errors import CircuitsError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# A rank that has finished waits for the slowest one. Of one that has died the connection breaks at once.
_PATIENCE = timedelta(days=7)
_LETTING_GO = 0.2  # seconds; a thread that is ready to run waits for a few hundredths of them on a busy machine

Result = TypeVar("Result")


def launched() -> bool:
    """Whether torchrun has started this process together with others.

    Raises:
        CircuitsError: its environment says so in words that are no numbers.
    """
    if "RANK" not in os.environ:
        return False
    numbers = {name: os.environ.get(name, "1") for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    for name, value in numbers.items():
        if not value.isdecimal():
            raise CircuitsError(
                f"{name} is {value!r} in the environment, not a number: unset it, or start with torchrun"
            )
    return int(numbers["WORLD_SIZE"]) > 1


def is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    return not launched() or os.environ["RANK"] == "0"


def first_to_speak() -> bool:
    """Whether no other process started with this one has said yet what is wrong: then this one should."""
    try:
        if not launched() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return True
    except CircuitsError:  # what is wrong is the environment that would tell
        return True
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=10))
        return store.add(f"ov_circuits/refused/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", 1) == 1
    except (KeyError, RuntimeError):  # torchrun itself is gone
        return True


class Ranks:
    """A group of processes and what they do together. A failure of one is everyone's, in the same words."""

    def __init__(self, group: ProcessGroup | None) -> None:
        import torch.distributed as dist

        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._backends = dist.get_backend_config(group)  # as in "cpu:gloo,cuda:nccl"

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
        with lost():
            dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def gather_on_first(self, value: Any) -> list[Any] | None:
        """Every rank's value, on the first rank."""
        import torch.distributed as dist

        gathered: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with lost():
            dist.gather_object(value, gathered, dst=self._of(0), group=self.group)
        return gathered

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors, on every rank."""
        import torch.distributed as dist

        total = tensor.to(self._reach(tensor.device), copy=True)
        with lost():
            dist.all_reduce(total, group=self.group)
        return total.to(tensor.device)

    def _reach(self, device: torch.device) -> torch.device:
        """Where the group can add up tensors of a device: there, if it can (nccl moves nothing that is not on a GPU)."""
        import torch

        if f"{device.type}:" in self._backends:
            return device
        return torch.device("cpu") if "cpu:" in self._backends else torch.device("cuda", torch.cuda.current_device())

    def _of(self, rank: int) -> int:
        """The rank among all processes of a rank of the group."""
        import torch.distributed as dist

        return rank if self.group is None else dist.get_global_rank(self.group, rank)


@contextmanager
def lost() -> Iterator[None]:
    """Says in a sentence that another process has gone, whoever waits for it: ours, or a model that runs on several.

    Raises:
        CircuitsError: it has.
    """
    try:
        yield
    except RuntimeError as error:
        if not _of_a_connection(error):
            raise
        raise CircuitsError(
            f"another process of the group ended before the results were gathered; its own message says why "
            f"({str(error).splitlines()[0][:200]})"
        ) from error


def _of_a_connection(error: RuntimeError) -> bool:
    import torch.distributed as dist

    # gloo's own errors come as plain RuntimeErrors that begin with the place in its source.
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def ranks_of(group: ProcessGroup | DeviceMesh | None) -> Ranks:
    """The processes of a group or mesh, or of the default group, which is made where there is none.

    Raises:
        CircuitsError: a mesh of several dimensions, or no group and none that can be made.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise CircuitsError(
                f"a mesh of {group.ndim} dimensions does not say which ranks share the heads: give one of them, mesh[name]"
            )
        group = group.get_group()
    if group is None and not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise CircuitsError(
                "there is no process group: start the script with torchrun, or call torch.distributed.init_process_group "
                "first"
            )
        # gloo for what is on CPUs; transformers distributes a model over GPUs where there are some.
        try:
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=_PATIENCE)
        # A variable is missing, nobody answers at the address, its port is taken.
        except (ValueError, dist.DistError) as error:
            raise CircuitsError(
                f"the processes could not be joined ({str(error).splitlines()[0][:200]}): start them with torchrun"
            ) from error
        atexit.register(_leave)  # not sooner: a group that is made anew finds the addresses of the one before
    _let_go_at_exit()
    return Ranks(group)


def together(work: Callable[[], Result]) -> Result:
    """``work()``, and under torchrun on every process: if one of them cannot do it, all say so."""
    return ranks_of(None).all_do(work) if launched() else work()


@cache
def _let_go_at_exit() -> None:
    atexit.register(_let_go)


def _let_go() -> None:
    # gloo's threads take Python's lock to let go of the tensors of the last exchange. One that has not come to it when
    # Python shuts down ends the process with an abort, and a mesh keeps these threads even when its group is destroyed.
    _end_quietly()
    time.sleep(_LETTING_GO)


def _leave() -> None:
    import torch.distributed as dist

    _end_quietly()
    if dist.is_initialized():
        dist.destroy_process_group()


def _end_quietly() -> None:
    # torchrun ends the others when one has died. Whom that meets on its way out has said what there was to say.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

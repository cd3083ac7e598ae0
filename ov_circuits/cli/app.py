"""All commands as one program: what it says without one, how it refuses, and with which exit code."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ov_circuits import __version__
from ov_circuits.cli import checkpoints, pages, prompts, weights
from ov_circuits.cli.opening import keep_libraries_quiet
from ov_circuits.errors import CircuitsError, for_want_of_memory
from ov_circuits.processes import launched
from ov_circuits.terminal import stderr

# How --help lists the commands.
_PARTS = {
    "A page": pages.commands,
    "Heads from their weights": weights.commands,
    "Heads on prompts": prompts.commands,
    "The checkpoint": checkpoints.commands,
}
# The system's words on standard output that takes no more.
_FULL = (errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT)
_PIPE_CLOSED = 141  # as a shell says of a process that SIGPIPE ended
# What stops a command from without. Windows has no SIGHUP.
_STOPS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
_AT_ONCE, _SOON = 1.0, 0.05  # seconds
# The exception that a signal was made into.
_stopped: list[BaseException] = []
# What processes that torchrun starts do together; anything else each would do for itself, and write over the others.
_TOGETHER = ("heads", "attribute", "verify")


_START = f"""\
ov_circuits {__version__}: what attention heads read and write. First:

  ov-circuits report                 a page about the small model that comes with the package: open report.html

Then:

  ov-circuits report gpt2            the same for a model of the Hugging Face hub, or a folder
  ov-circuits heads gpt2             scores of its heads; --sort SCORE puts the largest first
  ov-circuits verify gpt2            whether heads sum to its own attention
  ov-circuits heads --help           what a command takes, with examples
  ov-circuits --help                 all commands
  ov-circuits --install-completion   commands and options complete with Tab"""


class _Commands(TyperGroup):
    """Ends in a sentence and an exit code whatever the user or the surroundings did."""

    def make_context(self, *args: Any, **more: Any) -> Any:
        with _ended_in_a_sentence():  # --help and --version print here
            return super().make_context(*args, **more)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:  # a shell that completes words parses an empty line as well
            print(_START)
            raise typer.Exit
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if launched() and name not in _TOGETHER:
            raise CircuitsError(
                f"{name} is the work of one process: start it without torchrun, which is for {', '.join(_TOGETHER)}"
            )
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        keep_libraries_quiet()
        with _ended_in_a_sentence():
            _check_working_directory()
            return super().invoke(ctx)


@contextmanager
def _ended_in_a_sentence() -> Iterator[None]:
    """Turns a CircuitsError, and what the system refuses, into one sentence and exit code 2, Ctrl-C into a word and 130."""
    try:
        try:
            yield
        except Exception:
            if _stopped:  # a library has made an error of its own of it
                raise _stopped[0] from None
            raise
        finally:
            sys.stdout.flush()  # a closed pipe shows here, and not at the interpreter's end
    except CircuitsError as error:
        raise _refusal(str(error)) from None
    except (BrokenPipeError, SystemExit) as error:  # rich makes an exit of the one
        if BrokenPipeError not in (type(error), type(error.__context__)):
            raise
        _say_no_more()  # the reader, such as `head`, has what it wants
        raise typer.Exit(_PIPE_CLOSED) from None
    except OSError as error:
        if error.filename is not None or error.errno not in _FULL:
            raise _refusal(f"the system refuses: {error}") from None
        _say_no_more()
        raise _refusal(f"the result cannot be written to standard output: {error.strerror}") from None
    except (MemoryError, RuntimeError) as error:
        if not for_want_of_memory(error):
            raise
        reason = (str(error) or "the system gives no more").splitlines()[0][:200]
        raise _refusal(
            f"there is not enough memory ({reason}): free some; `ov-circuits inspect --plan` says what scores take"
        ) from None
    except KeyboardInterrupt:
        stderr().print("stopped")
        raise typer.Exit(130) from None


def _say_no_more() -> None:
    """What still waits to be written to standard output goes nowhere, or the interpreter would try again at its end."""
    with suppress(io.UnsupportedOperation), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _check_working_directory() -> None:
    try:
        os.getcwd()
    except OSError as error:  # MKL would end the process, with words of its own
        raise CircuitsError(
            f"the working directory cannot be found ({error.strerror}): change to another one"
        ) from error


def _refusal(text: str) -> typer.Exit:
    """Says what is wrong, in one sentence."""
    from rich.text import Text

    from ov_circuits.processes import first_to_speak

    if first_to_speak():
        stderr().print(Text.assemble(("error: ", "bold red"), " ".join(text.splitlines())), soft_wrap=True)
    return typer.Exit(2)


app = typer.Typer(
    cls=_Commands,
    help="What does this attention head read, and what does it write?",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _part, _commands in _PARTS.items():
    for _command in _commands.registered_commands:
        _command.rich_help_panel = _part
    app.add_typer(_commands)


def main() -> None:
    """Entry point of ``ov-circuits``."""
    _open_standard_streams()
    with _stoppable():
        app()


def _open_standard_streams() -> None:
    """Those that the caller has closed lead nowhere; else a file that is opened later would take their number, and their text."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    # A token that the terminal's encoding lacks is shown escaped, not refused.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    encoding = getattr(sys.stderr, "encoding", "utf-8")
    words = open(2, "wb", closefd=False)  # noqa: SIM115
    sys.stderr = _Words(words, encoding, "backslashreplace", line_buffering=True)


class _Words(io.TextIOWrapper):
    """Standard error: words that it does not take (a full disk, a closed pipe) are no reason to stop."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


@contextmanager
def _stoppable() -> Iterator[None]:
    """Signals within are exceptions, so that temporary files are taken away; later ones end the process without a word."""
    heard = [number for number in _STOPS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup's stay unheard

    def all_to(handler: Any) -> None:
        for number in heard:
            signal.signal(number, handler)

    last = -_AT_ONCE

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal last
        if _importing(frame):  # torch would abort, others would make an error of their own of it
            later = threading.Timer(_SOON, _send, [number])
            later.daemon = True
            later.start()
            return
        since, last = time.monotonic() - last, time.monotonic()
        if since < _AT_ONCE:  # a terminal and a parent both send it: the second one would break off the taking away
            return
        _stopped.append(KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number))
        raise _stopped[-1]

    all_to(stop)
    try:
        yield
    except KeyboardInterrupt:  # no command has begun
        raise SystemExit(130) from None
    finally:
        all_to(signal.SIG_DFL)


def _send(number: int) -> None:
    """A signal to the main thread, which wakes up for it even where it waits for something else."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    else:
        signal.raise_signal(number)


def _importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported by what :func:`main` called."""
    while frame is not None and frame.f_code is not main.__code__:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _print_version(asked: bool) -> bool:
    if asked:
        print(__version__)
        raise typer.Exit
    return asked


@app.callback()
def start(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """What does this attention head read, and what does it write?"""

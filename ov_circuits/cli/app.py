"""All commands as one program: what it says without one, how it refuses, and with which exit code."""

from __future__ import annotations

import errno
import os
import signal
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ov_circuits import __version__
from ov_circuits.cli import checkpoints, pages, prompts, weights
from ov_circuits.cli.opening import keep_libraries_quiet
from ov_circuits.errors import CircuitsError
from ov_circuits.processes import launched
from ov_circuits.terminal import stderr

# How --help lists the commands.
_PARTS = {
    "A page": pages.commands,
    "Heads from their weights": weights.commands,
    "Heads on prompts": prompts.commands,
    "The checkpoint": checkpoints.commands,
}
# What processes that torchrun starts do together; anything else each would do for itself, and write over the others.
_TOGETHER = ("heads", "attribute", "verify")


_START = f"""\
ov_circuits {__version__}: what attention heads read and write. First:

  ov-circuits report                 a page about the small model that comes with the package: open report.html

Then:

  ov-circuits report gpt2            the same for a model of the Hugging Face hub, or a folder
  ov-circuits heads gpt2 --top 20    scores of its heads
  ov-circuits verify gpt2            whether heads sum to its own attention
  ov-circuits heads --help           what a command takes, with examples
  ov-circuits --help                 all commands
  ov-circuits --install-completion   commands and options complete with Tab"""


class _Commands(TyperGroup):
    """Turns a CircuitsError into one sentence and exit code 2, and Ctrl-C into a word and 130."""

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
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # a closed pipe shows here, where typer ends quietly, and not at the interpreter's end
            return result
        except CircuitsError as error:
            raise _refusal(str(error)) from None
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EIO):
                raise
            raise _refusal(f"the result cannot be written to standard output: {error.strerror}") from None
        except KeyboardInterrupt:
            stderr().print("stopped")
            raise typer.Exit(130) from None


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
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        # A token that the terminal's encoding lacks is shown escaped, not refused.
        getattr(sys, name).reconfigure(errors="backslashreplace")
    # As an exception, so that temporary files are taken away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    app()


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

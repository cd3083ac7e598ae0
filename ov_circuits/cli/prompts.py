"""Heads on prompts: probes, accounts, ablations, claims, continuations, and a whole text."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ov_circuits.cli.completion import AMONG, METHODS, behaviour_names, first_name, one_of, table_files
from ov_circuits.cli.opening import open_model, running
from ov_circuits.cli.options import (
    AdapterOption,
    AgainstOption,
    AscendingOption,
    BosOption,
    DeviceOption,
    DropOption,
    FirstRowsOption,
    IdsOption,
    JsonOption,
    ModelArgument,
    ModelFirst,
    NumberOption,
    PromptOption,
    PromptsOption,
    RevisionOption,
    TableOption,
    ViewOption,
    examples,
)
from ov_circuits.cli.output import hand_out, table
from ov_circuits.cli.parsing import belong_to, is_position, model_and, parts_of, prompt_of, word_of
from ov_circuits.errors import CircuitsError
from ov_circuits.processes import is_first, launched
from ov_circuits.shown import counted
from ov_circuits.terminal import (
    note,
    print_ablation,
    print_account,
    print_attribution,
    print_behaviours,
    print_finding,
    print_generation,
    print_scan,
    score_of,
    sort_heads,
)

if TYPE_CHECKING:
    import pandas as pd

    from ov_circuits.model import Model
    from ov_circuits.trace.trace import Trace

commands = typer.Typer()


@commands.command(
    epilog=examples("ov-circuits behaviours --sort induction", "ov-circuits behaviours smollm2 -o behaviours.csv")
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
        typer.Option(
            "--sort",
            metavar="BEHAVIOUR",
            show_default=False,
            help="Largest first. Default: by layer.",
            autocompletion=behaviour_names,
        ),
    ] = None,
    ascending: AscendingOption = False,
    top: FirstRowsOption = None,
    output: TableOption = None,
    revision: RevisionOption = None,
    adapter: AdapterOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """What heads attend to on random tokens, repeated: induction, previous token, first token, .., and by chance."""
    from ov_circuits.trace.behaviours import behaviours as measure
    from ov_circuits.trace.behaviours import check_behaviour

    if sort is None:
        belong_to("--sort", {"--ascending": ascending or None})
    opened = open_model(model, None, revision, adapter, device)
    column = None if sort is None else sort.strip().replace(" ", "_")
    if column is not None and column not in ("layer", "index"):
        check_behaviour(score_of(column))
    with table(output, opened) as write:
        frame = sort_heads(measure(opened, seeds=seeds, length=length), column, ascending)
        frame = frame if top is None else frame.head(top)
        write(frame)
    said = f"{counted(len(frame), 'head')}, {counted(len(frame.columns), 'column')}"
    hand_out(frame, output, as_json, lambda rows: print_behaviours(rows, opened, column), said)


@commands.command(
    cls=ModelFirst,
    epilog=examples(
        'ov-circuits attribute gpt2 "John gave a drink to" --answer " Mary" --json',
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
            autocompletion=first_name,
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
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """What every head adds to an answer's logit directly: an account that closes. Of one prompt, or the mean over many.

    Under torchrun one prompt runs tensor-parallel.
    """
    from ov_circuits.prompts import load
    from ov_circuits.trace.attribution import attribute as mean_attribution

    given = arguments or []
    if prompts is None:
        if not given:
            raise CircuitsError("give a PROMPT and --answer, or many prompts with --prompts")
        if answer is None:
            raise CircuitsError("--answer is missing: the token to account for, as in --answer ' States'")
        belong_to("--prompts", {"-n": n, "--roles": roles, "--drop/--no-drop": drop})
        name, prompt = model_and("PROMPT", given)
        opened = open_model(name, None, revision, adapter, device)
        words = [word_of(word, ids) for word in (answer, against) if word is not None]
        with table(output, opened) as write:
            frame, trace = _account(opened, prompt_of(prompt, ids), words, bos)
            write(frame)
        if is_first():
            said = counted(len(frame), "entry", "entries")
            hand_out(frame, output, as_json, lambda rows: print_account(rows, trace, top), said)
    else:
        if launched():
            raise CircuitsError("--prompts is the work of one process: one prompt runs under torchrun")
        belong_to("one PROMPT", {"--answer": answer, "--against": against, "--ids": ids or None})
        if len(given) > 1:
            raise CircuitsError(f"--prompts takes the place of the prompt {given[-1][:80]!r}: leave one of them out")
        opened = open_model(given[0] if given else None, None, revision, adapter, device)
        found = load(prompts, opened, n=n, bos=bos, drop=drop)
        with table(output, opened) as write:
            note(f"running {counted(len(found), 'prompt')}")
            frame = mean_attribution(opened, found, roles=None if roles is None else parts_of(roles))
            write(frame)
        said = f"{counted(len(frame), 'component')}, {counted(len(frame.columns), 'column')}"
        hand_out(frame, output, as_json, lambda rows: print_attribution(rows, top), said)


def _account(
    model: Model, prompt: str | list[int], words: Sequence[str | int], bos: bool | None
) -> tuple[pd.DataFrame, Trace]:
    """The ledger of an answer, against another one if there are two, and the trace that it is of."""
    from ov_circuits.words import token_id

    tokens = [token_id(model, word) for word in words]  # before the model is built and run
    note("running the prompt")
    trace = running(model).trace(prompt, bos=bos)
    frame = trace.ledger(*tokens)
    frame.attrs["tokens"] = list(trace.texts)
    return frame, trace


@commands.command(
    cls=ModelFirst,
    epilog=examples(
        'ov-circuits ablate smollm2 23.4 --prompt "Capital of Italy:" --answer " Rome"',
        "ov-circuits ablate gpt2 each --prompts ioi -o ablation.csv",
    ),
)
def ablate(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] HEADS",
            help="A model (see `heads --help`), and heads to remove together, as in 9.9,10.0; or the word each: each alone.",
            autocompletion=first_name,
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
        str,
        typer.Option(
            "--method",
            metavar="METHOD",
            help="zero, mean, mean_by_position or source.",
            autocompletion=one_of(METHODS),
        ),
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
    adapter: AdapterOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove heads: what the model loses, beside what they add directly."""
    from ov_circuits.prompts import load
    from ov_circuits.trace.ablation import ablate as remove
    from ov_circuits.trace.ablation import ablation_sweep, check_method

    name, heads = model_and("HEADS", arguments)
    if heads.strip() == "all":
        raise CircuitsError("write each to remove every head, one at a time, or name heads, as in 9.9,10.0")
    if (prompt is None) == (prompts is None):
        raise CircuitsError("name what to run: either --prompt with a text, or --prompts with a set or a .jsonl file")
    if prompts is None:
        belong_to("--prompts", {"-n": n, "--drop/--no-drop": drop})
    else:
        belong_to("--prompt", {"--answer": answer, "--against": against, "--ids": ids or None})
    sources = None if source is None else [int(part) if is_position(part) else part for part in source]
    check_method(method, sources)
    opened = open_model(name, view, revision, adapter, device)
    asked: Any = [prompt_of(str(prompt), ids)] if prompts is None else load(prompts, opened, n=n, bos=bos, drop=drop)
    options: dict[str, Any] = {"sources": sources, "direction": direction, "freeze": freeze}
    options["bos"] = bos if prompts is None else None  # a set has it from load
    options |= {
        key: None if word is None else word_of(word, ids) for key, word in (("answer", answer), ("against", against))
    }
    chosen = parts_of(heads)
    with table(output, opened) as write:
        note("running the model")
        if chosen == ["each"]:
            frame = ablation_sweep(opened, asked, method, **options)
        else:
            frame = remove(opened, chosen, asked, method, **options)
        write(frame)
    hand_out(frame, output, as_json, lambda rows: print_ablation(rows, top), counted(len(frame), "row"))


@commands.command(
    cls=ModelFirst,
    epilog=examples(
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
            autocompletion=first_name,
        ),
    ],
    prompts: Annotated[int, typer.Option("--prompts", min=2, help="How many prompts to build.")] = 24,
    others: Annotated[int, typer.Option("--others", min=1, help="How many other heads to compare with.")] = 8,
    among: Annotated[
        str,
        typer.Option(
            "--among",
            metavar="layer|model",
            help="Where these heads are from: the same layer, or all.",
            autocompletion=one_of(AMONG),
        ),
    ] = "layer",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of prompts, heads and intervals.")] = 0,
    output: TableOption = None,
    revision: RevisionOption = None,
    adapter: AdapterOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Does a head do what its weights say? A claim on prompts that are built for it, beside random other heads."""
    from ov_circuits.claims import check as put_to_test
    from ov_circuits.claims import parse_claim
    from ov_circuits.report.tables import to_json

    name, text = model_and("CLAIM", arguments)
    claim = parse_claim(text)
    opened = open_model(name, None, revision, adapter, device)
    with table(output, opened) as write:
        note("running the model on probes")
        finding = put_to_test(opened, claim, prompts=prompts, others=others, among=among, seed=seed)
        write(finding.frame())
    if as_json:
        print(to_json(finding.frame()))
    else:
        print_finding(finding)


@commands.command(
    cls=ModelFirst,
    epilog=examples(
        'ov-circuits generate "the people of the" -n 5', 'ov-circuits generate smollm2 "Once" -o steps.csv'
    ),
)
def generate(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] PROMPT", help="A model (see `heads --help`), and a prompt.", autocompletion=first_name
        ),
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
    adapter: AdapterOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a prompt with its likeliest tokens: which heads chose each of them over its runner-up."""
    from ov_circuits.trace.generation import generate as continue_prompt

    name, prompt = model_and("PROMPT", arguments)
    opened = open_model(name, None, revision, adapter, device)
    given = None if continuation is None else prompt_of(continuation, ids)
    with table(output, opened) as write:
        note("running the prompt")
        found = continue_prompt(opened, prompt_of(prompt, ids), n, continuation=given, bos=bos)
        frame = found.frame()
        write(frame)
    hand_out(frame, output, as_json, lambda _: print_generation(found, top), counted(len(found.steps), "step"))


def _check_no_text(model: str | None) -> None:
    """A text alone would be taken for a model's name."""
    if model is not None and Path(model).suffix.lower() in (".txt", ".jsonl"):
        raise CircuitsError(
            f"{model} stands where the model's name does: 'ov-circuits scan embedded {model}' scans it with the model "
            "that comes with the package"
        )


@commands.command(
    epilog=examples(
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
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Of the random sample that tenths and loss saved are measured on.")
    ] = 0,
    label: Annotated[
        str | None, typer.Option("--head", metavar="HEAD", show_default=False, help="Also show one head's examples.")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Heads to list, by loss saved.")] = 20,
    output: TableOption = None,
    examples: Annotated[
        Path | None,
        typer.Option(
            "--examples",
            show_default=False,
            help="Write every head's examples: .csv, .json or .parquet.",
            autocompletion=table_files,
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="FOLDER", show_default=False, help="Keep everything, for ov.open_scan(FOLDER)."),
    ] = None,
    revision: RevisionOption = None,
    adapter: AdapterOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """What every head does over a text: its strongest and typical examples, and the loss that it saves. Interrupted, it resumes."""
    from ov_circuits.checkpoint.locate import cache_folder
    from ov_circuits.report.tables import to_json
    from ov_circuits.trace.scan import Settings, forget_stopped, state_file
    from ov_circuits.trace.scan import scan as run_scan

    if as_json:
        belong_to("what the screen shows, not with --json", {"--head": label})
    if corpus is None:
        _check_no_text(model)
    opened = open_model(model, None, revision, adapter, device)
    shown = None if label is None else opened.head(label).label
    for file in (output, examples):
        if file is not None and corpus is not None and os.path.realpath(file) == os.path.realpath(corpus):
            raise CircuitsError(f"cannot write {file}: it is the corpus itself; choose another name")
    if output is not None and examples is not None and os.path.realpath(output) == os.path.realpath(examples):
        raise CircuitsError(f"heads and examples cannot both be {output}: give --examples a name of its own")
    folder = cache_folder() / "scans"
    forget_stopped(folder)
    with table(output, opened) as write, table(examples, opened) as write_examples:
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
            note(f"{path}: {what} over {counted(found.facts['positions'], 'position')}")

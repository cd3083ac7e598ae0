"""Heads from their weights: the scoreboard, one head, pairs of heads, pairs of tokens, two checkpoints."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ov_circuits.cli.completion import CIRCUITS, KINDS, SOURCES, model_names, one_of, score_columns, score_list
from ov_circuits.cli.opening import open_model
from ov_circuits.cli.options import (
    AdapterOption,
    AscendingOption,
    DeviceOption,
    FirstRowsOption,
    HeadArgument,
    JsonOption,
    ModelArgument,
    ModelFirst,
    RevisionOption,
    TableOption,
    ViewOption,
    examples,
)
from ov_circuits.cli.output import hand_out, table
from ov_circuits.cli.parsing import belong_to, model_and, score_names
from ov_circuits.errors import CircuitsError
from ov_circuits.processes import launched
from ov_circuits.shown import counted
from ov_circuits.terminal import (
    head_facts,
    print_changes,
    print_head,
    print_heads,
    print_json,
    print_pairs,
    print_paths,
    score_of,
    sort_column,
    sort_heads,
)

commands = typer.Typer()


@commands.command(
    epilog=examples(
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
            autocompletion=score_list,
        ),
    ] = None,
    source: Annotated[
        str,
        typer.Option(
            "--source",
            help="Source embedding of rank copying: embed, embed_mlp0, embed_plus_mlp0, effective.",
            autocompletion=one_of(SOURCES),
        ),
    ] = "embed",
    sort: Annotated[
        str | None,
        typer.Option(
            "--sort",
            metavar="SCORE",
            show_default=False,
            help="Largest first. Default: by layer.",
            autocompletion=score_columns,
        ),
    ] = None,
    nulls: Annotated[
        bool, typer.Option("--nulls/--no-nulls", help="Whether to say what each score would be by chance.")
    ] = True,
    ascending: AscendingOption = False,
    top: FirstRowsOption = None,
    output: TableOption = None,
    view: ViewOption = None,
    revision: RevisionOption = None,
    adapter: AdapterOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """The scoreboard: one row a head, from the weights alone unless a behaviour is asked for.

    With -o, a run that was stopped goes on where it was.
    """
    from ov_circuits import distributed
    from ov_circuits.evidence import scoreboard
    from ov_circuits.scores.saved import forget
    from ov_circuits.trace.behaviours import BEHAVIOURS

    if sort is None:
        belong_to("--sort", {"--ascending": ascending or None})
    opened = open_model(model, view, revision, adapter, device)
    chosen = score_names(scores)
    names = chosen if isinstance(chosen, list) else None
    sort = None if sort is None else sort_column(sort, opened)
    if names is not None and sort is not None and score_of(sort) not in (*names, "layer", "index", "kv_head"):
        names.append(score_of(sort))
    acts = names is None and sort is not None and score_of(sort) in BEHAVIOURS
    options: dict[str, Any] = {"nulls": nulls, "source": source, "resume": output, "keep": True}
    with table(output, opened) as write:
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
    if output is not None:
        forget(output)  # only now: the file is written
    hand_out(
        frame,
        output,
        as_json,
        lambda rows: print_heads(rows, opened, names, sort),
        f"{counted(len(frame), 'head')}, {counted(len(frame.columns), 'column')}, view {opened.view}",
    )


@commands.command(cls=ModelFirst, epilog=examples("ov-circuits head 1.0", "ov-circuits head gpt2 9.9 --directions 3"))
def head(
    arguments: HeadArgument,
    directions: Annotated[int, typer.Option("--directions", min=1, help="Singular directions to read out.")] = 4,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens at each end of a direction.")] = 6,
    view: ViewOption = None,
    revision: RevisionOption = None,
    adapter: AdapterOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """One head: shapes, scores, singular values, and the tokens its singular directions read and write."""
    name, label = model_and("HEAD", arguments)
    opened = open_model(name, view, revision, adapter, device)
    found = opened.head(label)
    facts = head_facts(found, directions, tokens)
    if as_json:
        print_json(facts)
    else:
        print_head(facts)


@commands.command(
    epilog=examples(
        "ov-circuits paths --kind K --receiver 1.0", "ov-circuits paths gpt2 --kind all -o gpt2-composition.parquet"
    ),
)
def paths(
    model: ModelArgument = None,
    kind: Annotated[
        str,
        typer.Option(
            "--kind", metavar="Q|K|V|all", help="Which input of the later head.", autocompletion=one_of(KINDS)
        ),
    ] = "all",
    sender: Annotated[
        str | None,
        typer.Option("--sender", metavar="HEAD", show_default=False, help="Only the later heads that read this one."),
    ] = None,
    receiver: Annotated[
        str | None,
        typer.Option(
            "--receiver", metavar="HEAD", show_default=False, help="Only the earlier heads that feed this one."
        ),
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Pairs to list.")] = 20,
    output: TableOption = None,
    view: ViewOption = None,
    revision: RevisionOption = None,
    adapter: AdapterOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Composition: which later heads read what an earlier head writes. A file gets every pair, the screen the strongest.

    Chance is of all pairs of the model, whichever are listed.
    """
    from ov_circuits.scores.composition import composition, strongest

    opened = open_model(model, view, revision, adapter, device)
    ends = {"sender": sender, "receiver": receiver}
    asked = {end: opened.head(label).label for end, label in ends.items() if label is not None}
    with table(output, opened) as write:
        frame = composition(opened, kind)
        for end, label in asked.items():
            frame = frame[frame[end] == label]
        if frame.empty:
            named = " and ".join(f"{end} {label}" for end, label in asked.items())
            raise CircuitsError(f"there is no pair with {named}: the sender's layer comes before the receiver's")
        write(frame)
    said = f"{counted(len(frame), 'pair')}, view {opened.view}"
    hand_out(strongest(frame, top), output, as_json, lambda rows: print_paths(rows, opened, len(frame)), said)


@commands.command(
    cls=ModelFirst, epilog=examples("ov-circuits pairs 1.1", "ov-circuits pairs smollm2 17.3 --circuit qk --offset 1")
)
def pairs(
    arguments: HeadArgument,
    circuit: Annotated[
        str,
        typer.Option(
            "--circuit",
            metavar="ov|qk",
            help="Token to output, or query to key.",
            autocompletion=one_of(CIRCUITS),
        ),
    ] = "ov",
    offset: Annotated[
        int, typer.Option("--offset", help="With qk and rotary positions: query minus key position.")
    ] = 0,
    top: Annotated[int, typer.Option("--top", min=1, help="Pairs at each end.")] = 10,
    output: TableOption = None,
    view: ViewOption = None,
    revision: RevisionOption = None,
    adapter: AdapterOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """The strongest token pairs of a head, exact over the whole vocabulary: what it writes for what, or attends to from what."""
    from ov_circuits.scores.pairs import strongest_token_pairs
    from ov_circuits.scores.qk import largest_query_key_pairs

    if circuit not in ("ov", "qk"):
        raise CircuitsError(f"there is no circuit {circuit!r}: choose ov (token to output) or qk (query to key)")
    if circuit == "ov":
        belong_to("--circuit qk", {"--offset": offset or None})
    name, label = model_and("HEAD", arguments)
    opened = open_model(name, view, revision, adapter, device)
    with table(output, opened) as write:
        if circuit == "ov":
            frame = strongest_token_pairs(opened, label, top)
        else:
            frame = largest_query_key_pairs(opened, label, top, offset)
        write(frame)
    said = f"{counted(len(frame), 'pair')}, view {opened.view}"
    hand_out(frame, output, as_json, lambda rows: print_pairs(rows, opened), said)


@commands.command(
    epilog=examples("ov-circuits compare ./base ./fine-tuned --top 20", "ov-circuits compare ./a ./b -o changes.csv")
)
def compare(
    base: Annotated[
        str, typer.Argument(metavar="BASE", help="A model (see `heads --help`).", autocompletion=model_names)
    ],
    other: Annotated[
        str,
        typer.Argument(
            metavar="OTHER", help="What became of it: a fine-tune, a later checkpoint.", autocompletion=model_names
        ),
    ],
    sort: Annotated[str, typer.Option("--sort", metavar="COLUMN", help="Largest first, by this column.")] = "ov_change",
    top: Annotated[int, typer.Option("--top", min=1, help="How many heads to print.")] = 20,
    output: TableOption = None,
    view: ViewOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Two checkpoints of one architecture, head by head: how far training on from BASE to OTHER moved each circuit."""
    from ov_circuits.scores.compare import compare as compare_heads

    first, second = (open_model(name, view, None, device=device) for name in (base, other))
    with table(output, first) as write:
        frame = compare_heads(first, second)
        if sort not in frame:
            raise CircuitsError(f"there is no column {sort!r}: choose one of {', '.join(frame.columns[3:])}")
        frame = sort_heads(frame, sort, ascending=False)
        write(frame)
    said = f"{counted(len(frame), 'head')}, view {first.view}"
    hand_out(frame.head(top), output, as_json, lambda rows: print_changes(rows, len(frame)), said)

"""The page: everything about a model in one file, or in a folder of frames, figures and cards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ov_circuits.cli.completion import prompt_sets, score_list
from ov_circuits.cli.opening import open_model
from ov_circuits.cli.options import (
    AdapterOption,
    AgainstOption,
    BosOption,
    DeviceOption,
    IdsOption,
    ModelArgument,
    PromptOption,
    RevisionOption,
    ViewOption,
    examples,
)
from ov_circuits.cli.output import target
from ov_circuits.cli.parsing import belong_to, is_count, prompt_of, score_names, word_of
from ov_circuits.errors import CircuitsError
from ov_circuits.shown import counted
from ov_circuits.terminal import note

if TYPE_CHECKING:
    from ov_circuits.trace.scan import Scan

commands = typer.Typer()


@commands.command(
    epilog=examples(
        'ov-circuits report gpt2 --prompt "John gave a drink to" --answer " Mary"',
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
            autocompletion=score_list,
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
    token_pair: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--token-pair",
            metavar="SOURCE OUTPUT",
            show_default=False,
            help="Who writes OUTPUT when it sees SOURCE? Every head's entry of the full OV circuit, and its rank.",
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
        typer.Option(
            "--prompts",
            metavar="SET|FILE",
            show_default=False,
            help="Mean attribution over a prompt set.",
            autocompletion=prompt_sets,
        ),
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
    device: DeviceOption = None,
) -> None:
    """A page about every head: one file that works without a network."""
    from ov_circuits.report.bundle import check_folder, write_bundle
    from ov_circuits.report.results import dashboard
    from ov_circuits.trace.generation import generate as run_on
    from ov_circuits.words import token_id

    if prompt is None:
        needless = {"--answer": answer, "--against": against, "--ids": ids or None, "--bos/--no-bos": bos}
        belong_to("--prompt", needless | {"--generate": generate, "--ablate": None if ablate == "0" else ablate})
    if answer is None:
        belong_to("--answer", {"--against": against})
    if bundle is not None:
        check_folder(bundle)
    elif output is None:
        output = Path("report.html")
    if output is not None and output.suffix.lower() not in (".html", ".htm"):
        raise CircuitsError(f"cannot write {output}: a page's name ends in .html")
    opened = open_model(model, view, revision, adapter, device)
    chosen, other = (None if word is None else token_id(opened, word_of(word, ids)) for word in (answer, against))
    with target(output, opened) as file:
        trace = generation = None
        if prompt is not None:
            note("running the prompt")
            trace = opened.trace(prompt_of(prompt, ids), bos=bos)
            if generate is not None:
                generation = run_on(opened, prompt_of(prompt, ids), generate, bos=bos)
        page = dashboard(
            opened,
            trace,
            chosen,
            other,
            scores=score_names(scores),
            pairs=_count_or_all(pairs, "--pairs"),
            paths=paths,
            behaviours=behaviours,
            scan=_tokens_or_scan(scan),
            ablation=_count_or_all(ablate, "--ablate"),
            prompts=prompts,
            generation=generation,
            token_pairs=[token_pair] if token_pair else (),
        )
        if file is not None:
            page.save(file)
            note(f"{output}: {file.stat().st_size / 1e6:.1f} MB, {opened.name}, view {opened.view}")
        if bundle is not None:
            manifest = write_bundle(page, bundle)
            note(f"{bundle}: {counted(len(manifest['files']) + 1, 'file')}, {opened.name}, view {opened.view}")
            for what, why in manifest["left_out"].items():
                note(f"no {what}: {why}")


def _count_or_all(text: str | None, option: str) -> int | str | None:
    if text is None or text == "all":
        return text
    if not is_count(text):
        raise CircuitsError(f"{option} takes a number of heads or all, not {text!r}")
    return int(text)


def _tokens_or_scan(text: str | None) -> int | Scan | None:
    from ov_circuits.trace.scan import open_scan

    if text is None:
        return None
    return int(text) if is_count(text) else open_scan(text)

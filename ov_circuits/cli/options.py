"""What several commands take, each declared once: the arguments and options that mean the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ov_circuits.cli.completion import VIEWS, first_name, model_names, one_of, prompt_sets, table_files


class ModelFirst(TyperCommand):
    """A command whose arguments are ``[MODEL] WHAT``: click would spell this ``{[MODEL] WHAT}...`` or ``[[MODEL] WHAT]...``."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece[1:-4] if piece.endswith("...") else piece for piece in super().collect_usage_pieces(ctx)]


def examples(*lines: str) -> str:
    """A help page's last paragraph."""
    return "\n\n".join(("[bold]Examples[/bold]", *(f"[cyan]{line}[/cyan]" for line in lines)))


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="A folder, a .safetensors, .bin, .pt, .pth, .ckpt or .gguf file, smollm2, or a hub name: gpt2, gpt2@main. "
        "Left out (or '-', or 'embedded'): the model that comes with the package.",
        autocompletion=model_names,
    ),
]
ViewOption = Annotated[
    str | None,
    typer.Option(
        "--view",
        metavar="VIEW",
        show_default=False,
        help="Weight view: raw, folded or centred. Default: centred for LayerNorm, folded for RMSNorm models.",
        autocompletion=one_of(VIEWS),
    ),
]
RevisionOption = Annotated[
    str | None, typer.Option("--revision", show_default=False, help="Branch, tag or commit of a hub model.")
]
AdapterOption = Annotated[
    Path | None,
    typer.Option("--adapter", show_default=False, help="A folder with a LoRA adapter, put on top of the model."),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="cpu|cuda",
        show_default=False,
        help="Where to compute: cuda, or cuda:1, for a GPU. Default: cpu. Under torchrun each process takes its own GPU.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on standard output, and nothing else there.")]
TableOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        show_default=False,
        help="Write the table with all columns: .csv, .json or .parquet.",
        autocompletion=table_files,
    ),
]
BosOption = Annotated[
    bool | None,
    typer.Option("--bos/--no-bos", show_default=False, help="Put BOS first. Default: yes for text, no for ids."),
]
IdsOption = Annotated[bool, typer.Option("--ids", help="Prompt and answers are token ids, as in '0 2 1'.")]
PromptOption = Annotated[str | None, typer.Option("--prompt", show_default=False, help="Text to run the model on.")]
HeadArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="[MODEL] HEAD",
        help="A model (see `heads --help`), and a head: 9.9 or L9H9.",
        autocompletion=first_name,
    ),
]
AscendingOption = Annotated[bool, typer.Option("--ascending", help="With --sort: smallest first.")]
FirstRowsOption = Annotated[int | None, typer.Option("--top", min=1, show_default=False, help="Only the first N rows.")]
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
        autocompletion=prompt_sets,
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

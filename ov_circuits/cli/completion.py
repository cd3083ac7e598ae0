"""What Tab offers in place of a value: the words of closed sets, and the names of models that are on this machine.

Short sets are written here, so that Tab does not wait for torch; the tests hold them against the library's own. Where nothing
here fits, the shell completes file names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Words = Callable[[str], list[str]]

VIEWS = ("raw", "folded", "centred")
KINDS = ("Q", "K", "V", "all")
CIRCUITS = ("ov", "qk")
AMONG = ("layer", "model")
METHODS = ("zero", "mean", "mean_by_position", "source")
SOURCES = ("embed", "embed_mlp0", "embed_plus_mlp0", "effective")
FORMATS = (".csv", ".json", ".parquet")
FETCHED = ("smollm2",)


def one_of(words: Iterable[str]) -> Words:
    """Completes one word of a set."""
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


def model_names(incomplete: str) -> list[str]:
    """Models by name: the package's own, fetched ones, and those that the Hugging Face cache holds."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from ov_circuits.checkpoint.locate import cache_folder

    fetched = [name for name in FETCHED if (cache_folder() / name / "config.json").is_file()]
    cached = sorted(folder.name.removeprefix("models--") for folder in Path(HF_HUB_CACHE).glob("models--*"))
    return one_of(("embedded", *fetched, *(name.replace("--", "/") for name in cached)))(incomplete)


def first_name(ctx: Any, incomplete: str) -> list[str]:
    """The model of ``[MODEL] WHAT``."""
    return [] if ctx.params.get("arguments") else model_names(incomplete)


def table_files(incomplete: str) -> list[str]:
    """The endings of a table's file, once its name has a dot."""
    stem, dot, _ = incomplete.rpartition(".")
    return [f"{stem}{ending}" for ending in FORMATS if f"{stem}{ending}".startswith(incomplete)] if stem and dot else []


def score_list(incomplete: str) -> list[str]:
    """``A,B,..``: the last one of several scores or behaviours, or the word all."""
    from ov_circuits.evidence import columns

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{word}" for word in one_of(columns() if comma else ("all", *columns()))(last)]


def score_columns(incomplete: str) -> list[str]:
    """What the scoreboard can be sorted by."""
    from ov_circuits.evidence import columns

    return one_of((*columns(), "layer", "index", "kv_head"))(incomplete)


def behaviour_names(incomplete: str) -> list[str]:
    """What the probes measure."""
    from ov_circuits.trace.behaviours import BEHAVIOURS

    return one_of(BEHAVIOURS)(incomplete)


def prompt_sets(incomplete: str) -> list[str]:
    """The prompt sets that come with the package."""
    from ov_circuits.prompts import names as sets

    return one_of(sets())(incomplete)

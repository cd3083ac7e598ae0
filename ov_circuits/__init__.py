"""What does this attention head read, and what does it write?

>>> import ov_circuits as ov
>>> model = ov.load()                  # the embedded model; or "gpt2", a folder, a .safetensors or .gguf file
>>> head = model.head("1.0")
>>> head.ov.singular_values            # of W_V W_O, without forming it
>>> ov.scoreboard(model)               # one row a head
>>> trace = model.trace("the people of the United States")
>>> ov.dashboard(model, trace).save("report.html")

Names are resolved on first use, so that ``import ov_circuits`` and ``ov-circuits --help`` answer at once.
"""

from __future__ import annotations

from importlib import import_module
from inspect import isfunction
from typing import TYPE_CHECKING, Any

from ov_circuits.arguments import checked

__version__ = "0.2.0.dev0"

if TYPE_CHECKING:
    from ov_circuits import distributed, prompts, scores
    from ov_circuits.certificate import verify
    from ov_circuits.checkpoint.census import census
    from ov_circuits.claims import check
    from ov_circuits.errors import CircuitsError
    from ov_circuits.evidence import scoreboard
    from ov_circuits.linalg.lowrank import LowRank
    from ov_circuits.model import Head, Layer, Model, load
    from ov_circuits.report import figures
    from ov_circuits.report.results import dashboard
    from ov_circuits.scores.chance import spectrum
    from ov_circuits.scores.compare import compare
    from ov_circuits.scores.composition import component_composition, composition, strongest_paths, subspace_overlap
    from ov_circuits.scores.copy_table import copy_table, disagreements
    from ov_circuits.scores.copying import ioi_copying, ioi_negative_copying, rank_copying
    from ov_circuits.scores.directions import directions, span
    from ov_circuits.scores.pairs import strongest_token_pairs, token_pair
    from ov_circuits.scores.qk import largest_query_key_pairs, offset_profile, position_pattern, qk_spectra
    from ov_circuits.scores.relations import relation_scores
    from ov_circuits.scores.spaces import space_map
    from ov_circuits.trace.ablation import ablate, ablation_sweep
    from ov_circuits.trace.attribution import attribute
    from ov_circuits.trace.behaviours import behaviours
    from ov_circuits.trace.generation import Generation, generate
    from ov_circuits.trace.scan import Scan, open_scan, scan
    from ov_circuits.trace.trace import Trace, open_trace

_HOMES = {
    "load": "model",
    "Model": "model",
    "Layer": "model",
    "Head": "model",
    "LowRank": "linalg.lowrank",
    "census": "checkpoint.census",
    "Trace": "trace.trace",
    "open_trace": "trace.trace",
    "Generation": "trace.generation",
    "attribute": "trace.attribution",
    "behaviours": "trace.behaviours",
    "scan": "trace.scan",
    "Scan": "trace.scan",
    "ablate": "trace.ablation",
    "ablation_sweep": "trace.ablation",
    "generate": "trace.generation",
    "open_scan": "trace.scan",
    "compare": "scores.compare",
    "scoreboard": "evidence",
    "composition": "scores.composition",
    "strongest_paths": "scores.composition",
    "component_composition": "scores.composition",
    "subspace_overlap": "scores.composition",
    "rank_copying": "scores.copying",
    "ioi_copying": "scores.copying",
    "ioi_negative_copying": "scores.copying",
    "copy_table": "scores.copy_table",
    "disagreements": "scores.copy_table",
    "relation_scores": "scores.relations",
    "directions": "scores.directions",
    "span": "scores.directions",
    "strongest_token_pairs": "scores.pairs",
    "token_pair": "scores.pairs",
    "qk_spectra": "scores.qk",
    "largest_query_key_pairs": "scores.qk",
    "offset_profile": "scores.qk",
    "position_pattern": "scores.qk",
    "spectrum": "scores.chance",
    "space_map": "scores.spaces",
    "dashboard": "report.results",
    "check": "claims",
    "verify": "certificate",
    "CircuitsError": "errors",
}

_MODULES = {
    "distributed": "ov_circuits.distributed",
    "prompts": "ov_circuits.prompts",
    "scores": "ov_circuits.scores",
    "figures": "ov_circuits.report.figures",
}

__all__ = [
    "CircuitsError",
    "Generation",
    "Head",
    "Layer",
    "LowRank",
    "Model",
    "Scan",
    "Trace",
    "__version__",
    "ablate",
    "ablation_sweep",
    "attribute",
    "behaviours",
    "census",
    "check",
    "compare",
    "component_composition",
    "composition",
    "copy_table",
    "dashboard",
    "directions",
    "disagreements",
    "distributed",
    "figures",
    "generate",
    "ioi_copying",
    "ioi_negative_copying",
    "largest_query_key_pairs",
    "load",
    "offset_profile",
    "open_scan",
    "open_trace",
    "position_pattern",
    "prompts",
    "qk_spectra",
    "rank_copying",
    "relation_scores",
    "scan",
    "scoreboard",
    "scores",
    "space_map",
    "span",
    "spectrum",
    "strongest_paths",
    "strongest_token_pairs",
    "subspace_overlap",
    "token_pair",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'ov_circuits' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")
    value = getattr(import_module(f"ov_circuits.{_HOMES[name]}"), name)
    if isfunction(value):
        value = checked(value)
        value.__module__ = __name__  # where pickle finds it
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

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
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ov_circuits.errors import CircuitsError
    from ov_circuits.linalg.lowrank import LowRank
    from ov_circuits.model import Head, Layer, Model, load
    from ov_circuits.report.payload import dashboard
    from ov_circuits.scores.board import scoreboard
    from ov_circuits.trace.trace import Trace, trace
    from ov_circuits.verify import verify

_HOMES = {
    "load": "model",
    "Model": "model",
    "Layer": "model",
    "Head": "model",
    "LowRank": "linalg.lowrank",
    "Trace": "trace.trace",
    "trace": "trace.trace",
    "scoreboard": "scores.board",
    "dashboard": "report.payload",
    "verify": "verify",
    "CircuitsError": "errors",
}

__all__ = [
    "CircuitsError",
    "Head",
    "Layer",
    "LowRank",
    "Model",
    "Trace",
    "__version__",
    "dashboard",
    "load",
    "scoreboard",
    "trace",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ov_circuits' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")
    value = getattr(import_module(f"ov_circuits.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

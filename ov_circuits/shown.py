"""How things say what they are: a count with its noun, and a head, a trace and a scoreboard in a notebook.

Imports run downwards only, but a notebook asks the object itself, which lies below the pages. This is the one place that
reaches up, by name, and only when a notebook asks.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def notebook_html(view: str, value: Any) -> str | None:
    """``value`` as HTML by the function ``view`` of :mod:`ov_circuits.report.notebook`."""
    shown: str | None = getattr(import_module("ov_circuits.report.notebook"), view)(value)
    return shown


def counted(n: int, noun: str, plural: str | None = None) -> str:
    """``1 prompt``, ``2,000 prompts``."""
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"

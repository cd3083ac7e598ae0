"""What a page shows of a scan: for each head its examples, where it attends, and the loss that it saves, as JSON-able data."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from ov_circuits.trace.scan import SOURCE_KINDS, Scan

_DIGITS = 5  # significant digits of numbers on a page
_FEWER = 3  # of the many parts that are told on hovering
_LEAST = 0.01  # attention that is told of

_FACTS = ("corpus", "positions", "window", "bos_added", "loss", "sample", "loss_sample", "seed")
_NUMBERS = ("write", "logit", "loss_saved", "loss_saved_se", "loss_saved_linear", "entropy", "distance")
_VALUES = ("value", "part", "attention")
_TEXTS = ("source_before", "source", "source_after", "before", "destination", "after")
_ATTENDED = ("attended", "attended_attention", "attended_part", "attended_position")


def examples_payload(scan: Scan, strongest: int = 5, per_decile: int = 1) -> dict[str, Any]:
    """A scan for a page.

    Args:
        scan: a scan.
        strongest: how many strongest (and most negative) examples a head and measure.
        per_decile: how many of each tenth.

    Returns:
        ``facts`` of the corpus, and ``heads`` by label: ``numbers``; ``attention`` and ``moved``, shares by kind of source in the
        order of ``facts["kinds"]``; ``distance`` as [bin, share]; ``examples`` with measure, kind, decile, values, where they
        are, plain texts (nothing is escaped), and ``attended``, of sources with a hundredth of
        attention or more: [text, attention, part, tokens back (None: BOS)].
    """
    limits = {"decile": per_decile}
    examples: dict[str, list[dict[str, Any]]] = {}
    for row in _records(scan.examples):
        if row["rank"] <= limits.get(row["kind"], strongest):
            examples.setdefault(row["head"], []).append(_example(row))
    distances: dict[str, list[list[Any]]] = {}
    for row in _records(scan.distributions[scan.distributions["of"] == "distance"]):
        distances.setdefault(row["head"], []).append([row["bin"], _rounded(row["share"])])
    heads = {
        row["head"]: {
            "numbers": {name: _rounded(row[name]) for name in _NUMBERS},
            "attention": [_rounded(row[f"attention_{kind}"]) for kind in SOURCE_KINDS],
            "moved": [_rounded(row[f"write_{kind}"]) for kind in SOURCE_KINDS],
            "distance": distances[row["head"]],
            "examples": examples[row["head"]],
        }
        for row in _records(scan.heads)
    }
    facts = {name: scan.facts[name] for name in _FACTS}
    return {"facts": facts | {"loss": _rounded(facts["loss"]), "kinds": list(SOURCE_KINDS)}, "heads": heads}


def _example(row: dict[Hashable, Any]) -> dict[str, Any]:
    places = ("decile", "document", "position", "source_position")
    return {
        "measure": row["measure"],
        "kind": row["kind"],
        **{name: None if row[name] is None else int(row[name]) for name in places},
        **{name: _rounded(row[name]) for name in _VALUES},
        **{name: row[name] for name in _TEXTS},
        "attended": [
            [text, round(attention, 3), _rounded(part, _FEWER), None if at is None else int(row["position"]) - at]
            for text, attention, part, at in zip(*(row[name] for name in _ATTENDED), strict=True)
            if attention is not None and attention >= _LEAST
        ],
    }


def _records(frame: Any) -> Iterable[dict[Hashable, Any]]:
    """Rows, with None for what is not there."""
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


def _rounded(value: float | None, digits: int = _DIGITS) -> float | None:
    """A number as a page shows it; None where there is none."""
    return None if value is None or value != value else float(f"{value:.{digits}g}")

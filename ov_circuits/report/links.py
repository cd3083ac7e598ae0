"""The payload of what heads have to do with each other: composition, shared write spaces, and the map of all heads."""

from __future__ import annotations

from typing import Any

import pandas as pd

from ov_circuits.model import Model
from ov_circuits.report.numbers import number, numbers

# What the page keeps of the pairs of heads: the strongest of each kind for the graph, and some of every head for its card.
_STRONGEST = 400
_A_HEAD = 5
_NEIGHBOURS = 6


def composition_section(model: Model, frame: pd.DataFrame | None) -> dict[str, Any] | None:
    """The pairs that stand out from all pairs of their kind, as parallel lists by falling ``z_paired``.

    Kept are the strongest of each kind, and every head's strongest in and out. ``floor`` is the weakest of the first sort:
    above it the list of a kind is complete. ``fdr`` is where the pairs begin that are flagged at a false discovery rate of 5 %.
    None where no pair has a z.
    """
    if frame is None or not frame["z_paired"].notna().any():
        return None
    known = frame[frame["z_paired"].notna()]
    strength = known["z_paired"]
    by_kind = strength.groupby(known["kind"]).rank(ascending=False, method="first")
    out = strength.groupby([known["kind"], known["sender"]]).rank(ascending=False, method="first")
    into = strength.groupby([known["kind"], known["receiver"]]).rank(ascending=False, method="first")
    top = by_kind <= _STRONGEST
    kept = known[top | (out <= _A_HEAD) | (into <= _A_HEAD)].sort_values("z_paired", ascending=False, kind="stable")
    place = {label: i for i, label in enumerate(model.head_labels)}
    kinds = [str(kind) for kind in known["kind"].unique()]
    flagged = known[known["flag_paired"]]
    return {
        "kinds": kinds,
        "pairs": len(frame) // max(1, len(kinds)),
        "floor": {kind: number(known[top & (known["kind"] == kind)]["z_paired"].min()) for kind in kinds},
        "fdr": {kind: number(flagged[flagged["kind"] == kind]["z_paired"].min()) for kind in kinds},
        "sender": kept["sender"].map(place).tolist(),
        "receiver": kept["receiver"].map(place).tolist(),
        "kind": "".join(kept["kind"]),
        "value": numbers(kept["value"]),
        "null_mean": numbers(kept["null_mean"]),
        "z": numbers(kept["z"]),
        "z_paired": numbers(kept["z_paired"]),
        "notes": list(frame.attrs["notes"]),
        "source": frame.attrs["source"],
    }


def spaces_section(model: Model, spaces: pd.DataFrame, overlap: pd.DataFrame | None) -> dict[str, Any]:
    """The map of heads, and for every head the others that share most write directions with it, by falling z."""
    section = {
        "read": [numbers(row) for row in spaces[["read_x", "read_y"]].to_numpy()],
        "write": [numbers(row) for row in spaces[["write_x", "write_y"]].to_numpy()],
        "shares": {name: numbers(shares) for name, shares in spaces.attrs["shares"].items()},
        "neighbours": None,
    }
    if overlap is None:
        return section
    swapped = overlap.rename(columns={"writer": "reader", "reader": "writer"})
    both = pd.concat([overlap, swapped], ignore_index=True)
    both = both[both["z"].notna()].sort_values(["z", "reader"], ascending=[False, True], kind="stable")
    nearest = both.groupby("writer", sort=False).head(_NEIGHBOURS).groupby("writer", sort=False)
    place = {label: i for i, label in enumerate(model.head_labels)}
    by_head = {
        str(label): [
            [place[other], number(value), number(share), number(z)]
            for other, value, share, z in rows[["reader", "value", "share", "z"]].itertuples(index=False)
        ]
        for label, rows in nearest
    }
    return {**section, "neighbours": [by_head.get(label, []) for label in model.head_labels]}

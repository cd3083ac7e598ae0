"""The copy table: every published copying score side by side, and where they disagree."""

from __future__ import annotations

import pandas as pd

from ov_circuits.errors import CircuitsError
from ov_circuits.model import Model
from ov_circuits.scores.board import Board, all_scores
from ov_circuits.scores.copying import IOI_SIGNS, ioi_scores, rank_copying
from ov_circuits.scores.relations import relation_scores

_WHICH = ["head", "layer", "index"]


def copy_table(model: Model, source: str = "embed", *, nulls: bool = False) -> pd.DataFrame:
    """All copying scores side by side, one row a head.

    Args:
        model: the checkpoint, in the view that eigenvalues, ranks and IOI scores are to have; relations have raw weights.
        source: the source embedding of rank copying; see :mod:`ov_circuits.scores.sources`.
        nulls: whether ``.._null_mean`` and ``.._z`` follow each score, as on the scoreboard.

    Returns:
        ``head, layer, index``, ``eigen_copying_ov``, ``eigen_copying_full``, ``rank_copying_*`` and
        ``rank_suppression_*`` (for ``source``), ``ioi_copying``, ``ioi_negative_copying`` (for their own source),
        ``relation_copying_names`` and ``relation_copying_names_suppression`` (raw weights, MLP_0 alone). What the checkpoint does
        not allow (no MLPs, no tokenizer, names of several tokens) is left out, and ``attrs["left_out"]`` says why.

    Raises:
        CircuitsError: the checkpoint holds no embeddings, or there is no such source.
    """
    table = rank_copying(model, source=source, nulls=nulls)
    eigen = Board(model, ["eigen_copying_ov", "eigen_copying_full"], tokens=0, nulls=nulls).computed()
    left_out: dict[str, str] = {}
    parts = [table, eigen.drop(columns=[*_WHICH, "kv_head"])]
    try:
        ioi = ioi_scores(model, None, "embed_plus_mlp0", False, None, IOI_SIGNS, nulls)
        parts.append(ioi.drop(columns=_WHICH))
    except CircuitsError as error:
        left_out["ioi_copying"] = str(error)
    try:
        names = relation_scores(model, ["copying_names"], nulls=nulls).drop(columns=_WHICH)
        parts.append(names.add_prefix("relation_"))
    except CircuitsError as error:
        left_out["relation_copying_names"] = str(error)
    attrs = table.attrs
    for part in parts:
        part.attrs = {}  # pandas compares them when it joins
    joined = pd.concat(parts, axis=1)
    known = all_scores()
    joined.attrs = attrs | {
        "source": "of each score its own, in sources",
        "sources": {name: known[name].source for name in joined if name in known},
        "definition": "every copying score under its own name",
        "left_out": left_out,
    }
    return joined


# What each score looks at, in words that complete its name.
_LOOKS_AT = {
    "eigen_copying_ov": "weighs directions of the residual stream, embedding and unembedding aside",
    "eigen_copying_full": "weighs directions as embedding and unembedding stretch them, a few large ones above all",
    "rank_copying_10": "counts tokens of the whole vocabulary, each alike, that reach the ten largest logits of their row",
    "ioi_copying": "counts first names only, after the first MLP, through the final norm with its bias",
    "relation_copying_names": "counts first names only, by the first MLP's output alone, with unfolded weights",
}


def disagreements(table: pd.DataFrame) -> pd.DataFrame:
    """Where copying scores disagree most: heads by the spread of their places in each score's own order.

    Each score of ``table`` (from :func:`copy_table`) is turned into the head's place among all heads, 0 for the lowest and 1
    for the highest (equal scores share the mean place); ``spread`` is the largest difference of two places. Scores that are
    equal for all heads say nothing and are left out, as are missing values.

    Args:
        table: of :func:`copy_table`, or any frame with ``head, layer, index`` and columns that it has.

    Returns:
        Columns ``head, layer, index, spread, high, low`` (the scores that place it highest and lowest), ``reason`` (what the
        two look at) and ``place_*`` of each score, largest spread first.

    Raises:
        CircuitsError: fewer than two scores tell heads apart.
    """
    scores = [name for name in _LOOKS_AT if name in table and table[name].nunique() > 1]
    if len(scores) < 2:
        raise CircuitsError(
            f"disagreement takes two scores that differ between heads; the table has {scores or 'none'}"
        )
    places = (table[scores].rank() - 1) / (table[scores].count() - 1)
    known = places.dropna(how="all")
    high, low = known.idxmax(axis=1).astype(str), known.idxmin(axis=1).astype(str)
    frame = table.loc[known.index, ["head", "layer", "index"]].copy()
    frame["spread"] = known.max(axis=1) - known.min(axis=1)
    frame["high"], frame["low"] = high, low
    frame["reason"] = [
        f"{h} {_LOOKS_AT[h]}; {w} {_LOOKS_AT[w]}" for h, w in zip(high.tolist(), low.tolist(), strict=True)
    ]
    frame = frame.join(known.add_prefix("place_"))
    frame.attrs = dict(table.attrs)
    return frame.sort_values("spread", ascending=False, kind="stable", ignore_index=True)

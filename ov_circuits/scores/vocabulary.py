"""Scores over the whole vocabulary, as columns of the scoreboard: rank copying, IOI copying, relations.

They take seconds to minutes where spectra take milliseconds, so the board has them when they are asked for by name or with
``"all"``. By chance every order of the vocabulary is alike: a token is among the k first with probability k / n_vocab, and a
share of N tokens has the binomial spread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import pandas as pd

from ov_circuits.errors import CircuitsError
from ov_circuits.model import Model
from ov_circuits.scores.circuits import TokenScore, circuits_of
from ov_circuits.scores.copying import IOI_SIGNS, IOI_TOP, KS, ioi_score, rank_score
from ov_circuits.scores.papers import MAPS, MCDOUGALL, WANG
from ov_circuits.scores.relations import relation_names, relation_score


@dataclass(frozen=True)
class VocabularyScore:
    """What a column is; fields as of :class:`ov_circuits.scores.board.Score`.

    Attributes:
        family: the function that gives it, together with its siblings.
        relation: the relation's name, where it is of one.
    """

    key: str
    label: str
    group: str
    source: str
    note: str
    family: str
    relation: str | None = None
    needs_embeddings: bool = True
    diverging: bool = False
    range: tuple[float, float] = (0.0, 1.0)


@lru_cache(maxsize=1)
def vocabulary_scores() -> dict[str, VocabularyScore]:
    """All columns of this kind by name."""
    found = []
    for k in KS:
        place = "its own largest logit" if k == 1 else f"among the {k} largest of its row"
        found.append(
            VocabularyScore(
                f"rank_copying_{k}",
                f"Rank copying, k = {k}",
                "Copying over tokens",
                MCDOUGALL,
                f"Share of tokens whose own logit is {place} of X W_V W_O W_U. Exact; ties count for the token.",
                "rank_copying",
            )
        )
        found.append(
            VocabularyScore(
                f"rank_suppression_{k}",
                f"Rank suppression, k = {k}",
                "Copying over tokens",
                MCDOUGALL,
                f"Share of tokens whose own logit is among the {k} smallest of its row of X W_V W_O W_U.",
                "rank_copying",
            )
        )
    for key, factor in IOI_SIGNS.items():
        sign = "" if factor > 0 else "-"
        found.append(
            VocabularyScore(
                key,
                "IOI negative copy score" if sign else "IOI copy score",
                "Copying over tokens",
                WANG,
                f"Share of first names among the {IOI_TOP} largest logits after the first MLP and {sign}W_V W_O.",
                "ioi",
            )
        )
    for name in relation_names():
        for suffix, word in (("", "largest"), ("_suppression", "smallest")):
            found.append(
                VocabularyScore(
                    f"relation_{name}{suffix}",
                    f"{name.replace('_', ' ')}{' (suppression)' if suffix else ''}",
                    "Relations",
                    MAPS,
                    f"Share of pairs whose target is among the {word} logits of the source's row; raw weights, MLP_0 alone.",
                    "relations",
                    relation=name,
                )
            )
    return {score.key: score for score in found}


class VocabularyColumns:
    """The asked columns, made ready once for a model; then a few heads at a time.

    Attributes:
        why_not: for each column that cannot be had, why.

    Args:
        model: the checkpoint.
        keys: names from :func:`vocabulary_scores`.
        source: the source embedding of rank copying; the others have their papers' own.
        nulls: whether ``.._null_mean`` and ``.._z`` follow each column.
    """

    def __init__(self, model: Model, keys: Sequence[str], source: str, nulls: bool) -> None:
        self._keys, self._nulls = keys, nulls
        self._ready: dict[str, TokenScore] = {}
        self.why_not: dict[str, str] = {}
        scores = vocabulary_scores()
        for family, make in _families(model, source).items():
            wanted = [key for key in keys if scores[key].family == family]
            if not wanted:
                continue
            try:
                ready = self._ready[family] = make(wanted)
            except CircuitsError as error:
                self.why_not |= dict.fromkeys(wanted, str(error))
                continue
            left_out = ready.attrs.get("left_out", {})
            self.why_not |= {key: left_out[r] for key in wanted if (r := scores[key].relation) in left_out}

    def of(self, layer: int, heads: range) -> pd.DataFrame:
        """The columns for some heads of a layer, in order."""
        frames = {
            family: ready.frame(circuits_of(ready.model.layer_part(layer, heads), heads), self._nulls)
            for family, ready in self._ready.items()
        }
        columns: dict[str, pd.Series] = {}
        for key in self._keys:
            if key in self.why_not:
                continue
            short, frame = key.removeprefix("relation_"), frames[vocabulary_scores()[key].family]
            for suffix in ("", "_null_mean", "_z") if self._nulls else ("",):
                columns[f"{key}{suffix}"] = frame[f"{short}{suffix}"]
        return pd.DataFrame(columns)


def _families(model: Model, source: str) -> dict[str, Callable[[list[str]], TokenScore]]:
    """How each family is made ready, all its columns at once."""

    def relations(keys: list[str]) -> TokenScore:
        names = dict.fromkeys(name for key in keys if (name := vocabulary_scores()[key].relation) is not None)
        every = len(names) == len(relation_names())
        return relation_score(model, None if every else list(names))

    return {
        "rank_copying": lambda keys: rank_score(model, source),
        "ioi": lambda keys: ioi_score(model, "embed_plus_mlp0", None, IOI_SIGNS),
        "relations": relations,
    }

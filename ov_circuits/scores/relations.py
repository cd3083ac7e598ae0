"""Token relations read from the weights (Elhelou & Geva 2025, "Inferring Functionality of Attention Heads from their Parameters").

A relation is a list of pairs (source word, target word): country and capital, verb and past tense. A head implements it as
far as, for a source s, the target is among the k largest logits of row s of X W_V W_O W_U. Relations are CSV files in
``data/relations``; users' own have the same format:

    # what it is and where it comes from
    source,target
    France,Paris
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from ov_circuits.checkpoint.locate import data_file
from ov_circuits.errors import CircuitsError
from ov_circuits.linalg.vocab_ranks import Ranks, capped_ranks
from ov_circuits.model import Head, Model
from ov_circuits.scores.circuits import TokenScore, circuits, share_by_chance
from ov_circuits.scores.copying import frame_of, read_csv, share_below, single_token
from ov_circuits.scores.papers import MAPS
from ov_circuits.scores.sources import check_source, source_embedding

# Of a relation whose targets are its sources (copying), the target must come first.
_COPYING_K = 1


@dataclass(frozen=True)
class Relation:
    """A relation's name and word pairs, in natural case and without leading spaces."""

    name: str
    pairs: tuple[tuple[str, str], ...]

    @property
    def distinct(self) -> list[tuple[str, str]]:
        """The pairs, one that stands there twice counted once."""
        return list(dict.fromkeys(self.pairs))

    @property
    def is_copying(self) -> bool:
        """Whether every target is its source."""
        return all(source == target for source, target in self.pairs)


def relation_names() -> list[str]:
    """The relations that come with the package."""
    return sorted(file.stem for file in data_file("relations").glob("*.csv"))


def read_relation(relation: str | Path) -> Relation:
    """A relation by name, or from a CSV file with the columns ``source,target``.

    Raises:
        CircuitsError: no such relation (the message gives the choices and the nearest), or the file has another format.
    """
    path = Path(relation)
    if not (isinstance(relation, Path) or path.suffix.lower() == ".csv"):
        known = relation_names()
        if relation not in known:
            near = difflib.get_close_matches(relation, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise CircuitsError(
                f"there is no relation {relation!r}{hint} The relations are: {', '.join(known)}; or name a .csv file"
            )
        path = data_file(f"relations/{relation}.csv")
    rows = read_csv(path)
    if not rows or rows[0] != ["source", "target"]:
        raise CircuitsError(f"{path} is no relation: its first line must name the columns, source,target")
    for number, row in enumerate(rows[1:], start=1):
        if len(row) != 2 or not all(row):
            raise CircuitsError(
                f"{path} is no relation: pair {number} is {','.join(row)!r}, not one source and one target"
            )
    if len(rows) == 1:
        raise CircuitsError(f"{path} holds no pairs: write one a line, source,target")
    return Relation(path.stem, tuple((row[0], row[1]) for row in rows[1:]))


def relation_scores(
    model: Model,
    relations: Sequence[str | Path] | None = None,
    k: int = 10,
    source: str = "embed_mlp0",
    *,
    heads: Head | str | Sequence[Head | str] | None = None,
    each: bool = False,
    view: str = "raw",
    nulls: bool = True,
) -> pd.DataFrame:
    """How far heads implement relations: the share of pairs whose target is among the k largest logits of the source's row.

    As in the paper: k = 10, but 1 for relations whose targets are their sources (for larger models the paper takes 25 and 3);
    weights as stored; the source is the first MLP's output alone. Suppression is the same with the sign flipped. A target
    counts when fewer than k logits are strictly larger.

    A word is looked up with a leading space, as inside a sentence, and without where that is no single token; pairs with a
    word of several tokens either way are dropped and counted.

    Args:
        model: the checkpoint.
        relations: names from :func:`relation_names`, or CSV files; all that come with the package when None.
        k: for relations other than copying.
        source: the source embedding; see :mod:`ov_circuits.scores.sources`.
        heads, each: as for :func:`ov_circuits.scores.copying.rank_copying`.
        view: the weight view, whatever the model's own.
        nulls: whether to say what each share would be if every order of the vocabulary were alike.

    Returns:
        One row a head: ``head, layer, index`` and for each relation ``<name>`` and ``<name>_suppression``, in [0, 1], each
        followed with ``nulls`` by ``.._null_mean`` and ``.._z``.
        ``attrs``: ``k``, ``pairs`` and ``dropped`` (words of several tokens) by relation, ``left_out``.

    Raises:
        CircuitsError: unknown relation; a named relation without a single-token pair (with None it is left out, unless all
            are); no tokenizer, embeddings or first MLP.
    """
    ready = relation_score(model, relations, k, source, view)
    definition = "share of pairs with the target among the k largest logits of the source's row"
    return frame_of(ready, circuits(ready.model, heads, each), nulls, source, MAPS, definition)


def relation_score(
    model: Model,
    relations: Sequence[str | Path] | None = None,
    k: int = 10,
    source: str = "embed_mlp0",
    view: str = "raw",
) -> TokenScore:
    """:func:`relation_scores`, made ready."""
    model = model.in_view(view)
    if k < 1:
        raise CircuitsError(f"k = {k}: at least the first place must count")
    check_source(model, source)
    asked, left_out = _asked(model, relations, k)
    sources, targets = (torch.cat([getattr(a, side) for a in asked]) for side in ("sources", "targets"))
    W_U, cap = model.unembedding.mT, max(a.k for a in asked)
    by_chance: dict[str, tuple[float, float] | None] = {
        name: share_by_chance(a.k, model.architecture.n_vocab, len(a.sources)) for a in asked for name in a.columns
    }

    def score(read: Tensor, W_O: Tensor) -> dict[str, float]:
        written = W_O @ W_U
        finite = bool(read.isfinite().all()) and bool(written.isfinite().all())
        return (
            _shares(asked, capped_ranks(read, written, targets, cap)) if finite else dict.fromkeys(by_chance, math.nan)
        )

    attrs = {
        "k": {a.name: a.k for a in asked},
        "pairs": {a.name: len(a.sources) for a in asked},
        "dropped": {a.name: a.dropped for a in asked},
        "left_out": left_out,
    }
    return TokenScore(model, source_embedding(model, source, sources), score, by_chance, attrs)


@dataclass(frozen=True, eq=False)
class _Asked:
    """A relation as one tokenizer sees it: ids of sources and targets [n], and the words it cannot say in one token."""

    name: str
    k: int
    sources: Tensor
    targets: Tensor
    dropped: list[str]

    @property
    def columns(self) -> tuple[str, str]:
        """What its two scores are called."""
        return self.name, f"{self.name}_suppression"


def _asked(model: Model, relations: Sequence[str | Path] | None, k: int) -> tuple[list[_Asked], dict[str, str]]:
    asked: list[_Asked] = []
    left_out: dict[str, str] = {}
    given = [relations] if isinstance(relations, (str, Path)) else relations
    if given is not None and len(given) == 0:
        raise CircuitsError(f"no relation is asked for. The relations are: {', '.join(relation_names())}")
    for name in relation_names() if given is None else given:
        try:
            asked.append(_tokenized(model, read_relation(name), k))
        except _NoPair as error:
            if given is not None:
                raise
            left_out[str(name)] = str(error)
    _check_names(asked)
    if not asked:
        raise CircuitsError(f"no relation has a pair of single tokens of {model.name}. {next(iter(left_out.values()))}")
    return asked, left_out


def _check_names(asked: Sequence[_Asked]) -> None:
    """Refuse relations whose columns would take each other's place, or that of what says which head it is."""
    taken = {"head", "layer", "index"}
    for name in (column for a in asked for column in a.columns):
        if name in taken:
            raise CircuitsError(
                f"two columns would be called {name}: a relation is named after its file, so give each file another name"
            )
        taken.add(name)


class _NoPair(CircuitsError):
    """A relation that a tokenizer cannot say."""


def _tokenized(model: Model, relation: Relation, k: int) -> _Asked:
    ids = {word: single_token(model, word) for pair in relation.pairs for word in pair}
    kept = [(ids[s], ids[t]) for s, t in relation.distinct if ids[s] is not None and ids[t] is not None]
    dropped = [word for word, token in ids.items() if token is None]
    if not kept:
        raise _NoPair(
            f"the relation {relation.name} has no pair of which both words are single tokens of {model.name}; "
            f"of several tokens are: {', '.join(map(repr, dropped))}"
        )
    pairs = torch.tensor(kept, device=model.device)
    return _Asked(relation.name, _COPYING_K if relation.is_copying else k, pairs[:, 0], pairs[:, 1], dropped)


def _shares(asked: Sequence[_Asked], ranks: Ranks) -> dict[str, float]:
    shares: dict[str, float] = {}
    start = 0
    for a in asked:
        part = slice(start, start + len(a.sources))
        start = part.stop
        for name, end in zip(a.columns, (ranks.larger, ranks.smaller), strict=True):
            shares[name] = share_below(end[part], a.k)
    return shares

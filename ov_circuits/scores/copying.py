"""Every published copying score over tokens, each under its own name. None is "the" copying score.

- :func:`rank_copying` (and suppression): whose own logit is among the k largest (smallest) of the whole vocabulary;
- :func:`ioi_copying`, :func:`ioi_negative_copying`: Wang et al. 2022, "Interpretability in the Wild";
- eigenvalue copying (Elhage et al. 2021) is in :mod:`ov_circuits.scores.board`, relations (Elhelou & Geva 2025) in
  :mod:`ov_circuits.scores.relations`; :mod:`ov_circuits.scores.copy_table` puts all side by side.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from ov_circuits.checkpoint.locate import data_file
from ov_circuits.checkpoint.norms import Norm
from ov_circuits.errors import CircuitsError, check_seed
from ov_circuits.linalg.rows import Rows
from ov_circuits.linalg.vocab_ranks import capped_ranks, full_ranks
from ov_circuits.model import Head, Model
from ov_circuits.scores.broken import notes_on
from ov_circuits.scores.circuits import NULL_NOTE, Circuit, TokenScore, circuits, share_by_chance
from ov_circuits.scores.papers import MCDOUGALL, WANG
from ov_circuits.scores.sources import SOURCES, check_source, source_embedding, source_rows

KS = (1, 5, 10)
# Both signs of the IOI score.
IOI_SIGNS = {"ioi_copying": 1.0, "ioi_negative_copying": -1.0}
# How many of the largest logits a name must be among (Wang et al. 2022).
IOI_TOP = 5


def rank_copying(
    model: Model,
    heads: Head | str | Sequence[Head | str] | None = None,
    source: str = "embed",
    *,
    each: bool = False,
    ranks: bool | int = False,
    seed: int = 0,
    nulls: bool = True,
) -> pd.DataFrame:
    """Rank copying and suppression over the whole vocabulary (McDougall et al. 2023, "Copy Suppression").

    Exact for the float32 factors X W_V and W_O W_U (logits nearer to each other than these are rounded, some 1e-8 of a row's
    largest, may change places); :mod:`ov_circuits.linalg.vocab_ranks` says how nearly all logits are spared.

    ``rank_copying_k``: the share of tokens t whose own logit is among the k largest of row t of X W_V W_O W_U, that is, fewer
    than k logits of the row are strictly larger. ``rank_suppression_k``: among the k smallest. Both in [0, 1]; by chance
    k / n_vocab. Ties count for the token: a head that writes nothing scores 1 on both sides. A norm's scale multiplies a
    whole row and drops out; biases (b_V, b_U) are left out.

    Args:
        model: the checkpoint, in the view that the weights are to have.
        heads: every head when None; labels such as ``["1.4", "1.10"]`` score the **sum** of their circuits as one.
        source: the source embedding X; see :mod:`ov_circuits.scores.sources`.
        each: with ``heads``: one row a head instead of their sum.
        ranks: also the mean and median rank from both ends, 0 for the first place. True takes every token, which costs the
            whole product; a number takes that many tokens at random and adds the standard error of the means.
        seed: which tokens those are.
        nulls: whether to say what each number would be if every order of the vocabulary were alike.

    Returns:
        One row a head: ``head, layer, index`` (missing for sums), ``rank_copying_1/5/10``, ``rank_suppression_1/5/10`` and,
        with ``ranks``, ``mean_rank, median_rank, suppression_mean_rank, suppression_median_rank`` and, for a sample,
        ``mean_rank_error, suppression_mean_rank_error``; with ``nulls``, each followed by ``.._null_mean`` and ``.._z``. A head
        whose weights hold NaN or infinity has NaN. ``attrs``: model, view, source_embedding, source and definition of the
        score, null, and in ``notes`` which tensors are not finite.

    Raises:
        CircuitsError: no such head or source, or the checkpoint lacks embeddings (or the first MLP).
    """
    ready = rank_score(model, source, ranks, seed)
    definition = "share of tokens whose own logit is among the k largest (smallest) of its row"
    return frame_of(ready, circuits(model, heads, each), nulls, source, MCDOUGALL, definition)


def ioi_copying(
    model: Model,
    heads: Head | str | Sequence[Head | str] | None = None,
    source: str = "embed_plus_mlp0",
    *,
    each: bool = False,
    names: Sequence[str] | str | Path | None = None,
    nulls: bool = True,
) -> pd.DataFrame:
    """Copy score of Wang et al. 2022: the share of names among the top 5 of their own row.

    The residual stream after the first MLP at the name (without position), at the scale that the head's norm gives it, goes
    through W_V W_O, through the final norm at its own scale (gain, bias and all), and through W_U. Biases of the head are
    left out.

    Args:
        model: the checkpoint, in the view that the weights are to have.
        heads, each: as for :func:`rank_copying`.
        source: the residual stream at the name; by default W_E + MLP_0(ln_2(W_E)).
        names: a list, or a CSV file with one column ``name``; by default the list that comes with the package. A name is
            looked up with a leading space, and without where that is no single token.
        nulls: whether to say what the score would be if every order of the vocabulary were alike.

    Returns:
        One row a head: ``head, layer, index, ioi_copying`` in [0, 1] and, with ``nulls``, ``ioi_copying_null_mean`` and
        ``ioi_copying_z``. ``attrs`` counts the names used and lists the dropped.

    Raises:
        CircuitsError: as for :func:`rank_copying`; no tokenizer; or no name is a single token.
    """
    return ioi_scores(model, heads, source, each, names, {"ioi_copying": 1.0}, nulls)


def ioi_negative_copying(
    model: Model,
    heads: Head | str | Sequence[Head | str] | None = None,
    source: str = "embed_plus_mlp0",
    *,
    each: bool = False,
    names: Sequence[str] | str | Path | None = None,
    nulls: bool = True,
) -> pd.DataFrame:
    """Negative copy score of Wang et al. 2022: :func:`ioi_copying` with -W_V W_O.

    Args:
        model, heads, source, each, names, nulls: as of :func:`ioi_copying`.

    Returns:
        One row a head: ``head, layer, index, ioi_negative_copying`` in [0, 1] and, with ``nulls``, its null mean and z.

    Raises:
        CircuitsError: as :func:`ioi_copying`.
    """
    return ioi_scores(model, heads, source, each, names, {"ioi_negative_copying": -1.0}, nulls)


def rank_score(model: Model, source: str, ranks: bool | int = False, seed: int = 0) -> TokenScore:
    """:func:`rank_copying`, made ready."""
    X, W_U = source_rows(model, source), model.unembedding.mT
    sample = _sample(len(X), ranks, seed)
    return TokenScore(
        model, X, lambda read, W_O: _rank_scores(read, W_O @ W_U, sample), _ranks_by_chance(X, sample), {}
    )


# -- ranks ------------------------------------------------------------------------------------------------------------


def _sample(n: int, ranks: bool | int, seed: int) -> Tensor | None:
    """The tokens whose full ranks are wanted: all, some, or none."""
    if ranks is False:
        return None
    if ranks is True or ranks >= n:
        return torch.arange(n, device="cpu")
    if ranks < 2:
        raise CircuitsError(f"ranks = {ranks}: a sample takes at least 2 tokens (True takes all of them)")
    drawn = torch.randperm(n, generator=torch.Generator().manual_seed(check_seed(seed)), device="cpu")
    return drawn[:ranks].sort().values


def _ranks_by_chance(X: Rows, sample: Tensor | None) -> dict[str, tuple[float, float] | None]:
    """Ranks are uniform on 0 .. n - 1 where every order is alike; the median of m of them spreads as a Beta distribution."""
    n, ends = len(X), ("rank_copying", "rank_suppression")
    found: dict[str, tuple[float, float] | None] = {f"{end}_{k}": share_by_chance(k, n, n) for end in ends for k in KS}
    if sample is None:
        return found
    m, middle = len(sample), (n - 1) / 2
    for prefix in ("", "suppression_"):
        found[f"{prefix}mean_rank"] = middle, math.sqrt((n * n - 1) / 12 / m)
        found[f"{prefix}median_rank"] = middle, n / 2 / math.sqrt(m + 2)
    if m < n:
        found |= {"mean_rank_error": None, "suppression_mean_rank_error": None}
    return found


def _rank_scores(A: Tensor, B: Tensor, sample: Tensor | None) -> dict[str, float]:
    names = [f"{end}_{k}" for end in ("rank_copying", "rank_suppression") for k in KS]
    sampled = sample is not None and len(sample) < len(A)
    if sample is not None:
        names += ["mean_rank", "median_rank", "suppression_mean_rank", "suppression_median_rank"]
    if sampled:
        names += ["mean_rank_error", "suppression_mean_rank_error"]
    if not (bool(A.isfinite().all()) and bool(B.isfinite().all())):
        return dict.fromkeys(names, math.nan)
    own = torch.arange(len(A), device=A.device)
    full = None if sample is None else full_ranks(A[sample], B, own[sample])
    members = full if full is not None and not sampled else capped_ranks(A, B, own, max(KS))
    values = [share_below(end, k) for end in (members.larger, members.smaller) for k in KS]
    if full is not None:
        values += [number for end in (full.larger, full.smaller) for number in _mean_and_median(end)]
    if sampled and full is not None:
        values += [_standard_error(end, len(A)) for end in (full.larger, full.smaller)]
    return dict(zip(names, values, strict=True))


def share_below(ranks: Tensor, k: int) -> float:
    """The share of ranks below k: of rows whose own logit is among the k first."""
    return float((ranks < k).double().mean())


def _mean_and_median(ranks: Tensor) -> tuple[float, float]:
    return float(ranks.double().mean()), float(ranks.double().quantile(0.5))


def _standard_error(ranks: Tensor, population: int) -> float:
    """Of the mean of a sample drawn without replacement."""
    return float(ranks.double().std()) * math.sqrt((1 - len(ranks) / population) / len(ranks))


# -- names ------------------------------------------------------------------------------------------------------------


def ioi_scores(
    model: Model,
    heads: Head | str | Sequence[Head | str] | None,
    source: str,
    each: bool,
    names: Sequence[str] | str | Path | None,
    signs: dict[str, float],
    nulls: bool,
) -> pd.DataFrame:
    """One column for each sign of W_V W_O, in one pass; arguments as for :func:`ioi_copying`."""
    ready = ioi_score(model, source, names, signs)
    definition = "share of names among the top 5 of their own row"
    return frame_of(ready, circuits(model, heads, each), nulls, source, WANG, definition)


def ioi_score(
    model: Model, source: str, names: Sequence[str] | str | Path | None, signs: dict[str, float]
) -> TokenScore:
    """:func:`ioi_scores`, made ready."""
    check_source(model, source)  # before the words: a checkpoint without embeddings has no use for a tokenizer
    ids, dropped = _name_ids(model, names)
    unembed = _FinalLayer(model)

    def score(read: Tensor, W_O: Tensor) -> dict[str, float]:
        logits = unembed(read @ W_O)
        return {name: _share_of_top(sign * logits + unembed.constant, ids) for name, sign in signs.items()}

    X = _Unscaled(model)(source_embedding(model, source, ids))
    by_chance = share_by_chance(IOI_TOP, model.architecture.n_vocab, len(ids))
    return TokenScore(model, X, score, dict.fromkeys(signs, by_chance), {"names": len(ids), "dropped": dropped})


def _share_of_top(logits: Tensor, ids: Tensor) -> float:
    """Of rows whose token ``ids[i]`` is among the five largest logits; NaN when one is not finite."""
    if not bool(logits.isfinite().all()):
        return math.nan
    larger = (logits > logits.gather(1, ids[:, None])).sum(dim=1)
    return share_below(larger, IOI_TOP)


class _Unscaled:
    """The attention norm (where there is one) without its gain and bias, which the weight view carries or leaves out."""

    def __init__(self, model: Model) -> None:
        a, name = model.architecture, model.source.family.attention_norm
        self._norm = Norm(
            None if name is None else a.norm,
            torch.ones(a.d_model, device=model.device, dtype=torch.float32),
            None,
            a.norm_eps,
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x)


class _FinalLayer:
    """The final norm and W_U as stored: what a written vector would do to the logits if it stood alone."""

    def __init__(self, model: Model) -> None:
        s = model.source
        self._norm = Norm(s.architecture.norm, s.final_gain, None, s.architecture.norm_eps)
        self._W_U = s.unembedding_rows.mT
        #: The norm's bias through W_U and the unembedding's own, [n_vocab], or zero: what does not change sign with the vector.
        self.constant = (
            torch.zeros((), dtype=torch.float32, device="cpu") if s.final_bias is None else s.final_bias @ self._W_U
        )
        if s.unembedding_bias is not None:
            self.constant = self.constant + s.unembedding_bias

    def __call__(self, written: Tensor) -> Tensor:
        """Logits [n, n_vocab], the constant left out."""
        return self._norm(written) @ self._W_U


def _name_ids(model: Model, names: Sequence[str] | str | Path | None) -> tuple[Tensor, list[str]]:
    words = _read_names(data_file("names.csv") if names is None else names)
    if not words:
        raise CircuitsError(
            f"the list of names is empty: give names, one at least that is a single token of {model.name}"
        )
    found = {word: single_token(model, word) for word in dict.fromkeys(word.strip() for word in words)}
    ids = [token for token in found.values() if token is not None]
    dropped = [word for word, token in found.items() if token is None]
    if not ids:
        more = ", .." if len(dropped) > 10 else ""
        raise CircuitsError(f"none of the names is a single token of {model.name}: {', '.join(dropped[:10])}{more}")
    return torch.tensor(ids, device=model.device), dropped


def _read_names(names: Sequence[str] | str | Path) -> Sequence[str]:
    if not isinstance(names, (str, Path)):
        return names
    rows = read_csv(Path(names))
    if not rows or rows[0] != ["name"]:
        raise CircuitsError(f"{names} is no list of names: its first line must be the column's name, name")
    return [row[0] for row in rows[1:]]


def read_csv(file: Path) -> list[list[str]]:
    """The rows of a CSV file, stripped, without ``#`` comments and empty lines.

    Raises:
        CircuitsError: it cannot be read.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
        kept = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
        return [[cell.strip() for cell in row] for row in csv.reader(kept, skipinitialspace=True)]
    except (OSError, ValueError, csv.Error) as error:
        raise CircuitsError(f"{file} cannot be read: {error}") from error


def single_token(model: Model, word: str) -> int | None:
    """The id of a word as one token: with a leading space, as inside a sentence, or else without; None when neither is one.

    A token that does not read as the word (an unknown-token id, say) is none.
    """
    found = (model.tokenizer.find(spelling) for spelling in (f" {word}", word))
    return next((token for token in found if token is not None and token < model.architecture.n_vocab), None)


# -- frames -----------------------------------------------------------------------------------------------------------


def frame_of(
    ready: TokenScore, circuits: Iterable[Circuit], nulls: bool, source: str, paper: str, definition: str
) -> pd.DataFrame:
    """One row a circuit, with what the numbers are in ``attrs``."""
    model = ready.model
    frame = ready.frame(circuits, nulls).astype({"layer": "Int64", "index": "Int64"})
    if frame[["layer", "index"]].notna().all(axis=None):
        frame = frame.astype({"layer": "int64", "index": "int64"})  # only sums lack one
    missing = frame.loc[frame[next(iter(ready.by_chance))].isna(), "head"]
    said: dict[str, Any] = {
        "model": model.name,
        "view": model.view,
        "source_embedding": source,
        "source_embedding_definition": SOURCES[source],
        "source": paper,
        "definition": definition,
        "null": NULL_NOTE,
        "notes": notes_on(model, (label for sum_of in missing for label in sum_of.split("+"))),
    }
    frame.attrs |= said | ready.attrs
    return frame

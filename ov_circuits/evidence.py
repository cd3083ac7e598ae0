"""What weights say and what attention does, side by side: the scoreboard with behaviours as columns of it.

Scores and traces know nothing of each other; this is the one place above both where a head's two sides meet.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from ov_circuits.errors import CircuitsError
from ov_circuits.model import Model
from ov_circuits.scores.board import Board, Score, all_scores
from ov_circuits.scores.vocabulary import VocabularyScore
from ov_circuits.trace.behaviours import BEHAVIOURS, SUFFIXES, Behaviour
from ov_circuits.trace.behaviours import behaviours as measure

if TYPE_CHECKING:
    import pandas as pd

Column: TypeAlias = "Score | VocabularyScore | Behaviour"


def columns() -> Mapping[str, Column]:
    """Every column that a head can have, by name."""
    return {**all_scores(), **BEHAVIOURS}


def scoreboard(
    model: Model,
    scores: Sequence[str] | str | None = None,
    tokens: int = 5,
    *,
    behaviours: bool = False,
    nulls: bool = True,
    source: str = "embed",
    seed: int = 0,
    seeds: int | Sequence[int] = 8,
    resume: str | os.PathLike[str] | None = None,
    keep: bool = False,
) -> pd.DataFrame:
    """One row a head: scores of its weights and, where they are asked for, its behaviours on probe prompts.

    Args:
        model: the checkpoint, in the weight view that the scores are to have; behaviours do not depend on it.
        scores: names of scores and of behaviours (:data:`ov_circuits.trace.behaviours.BEHAVIOURS`), which run the model.
            Spectra take milliseconds a head, scores over the whole vocabulary up to a second. ``"all"`` for every score of
            weights; None for the spectra that the checkpoint allows.
        tokens: how many tokens the leading singular pair is shown with at each end (0 leaves these columns out).
        behaviours: all behaviours that the model allows, beside the scores.
        nulls: whether to say what each score would be by chance.
        source: the source embedding of rank copying (:mod:`ov_circuits.scores.sources`), which has to be among the scores if
            it is another than ``embed``; IOI and relation scores have their papers' own.
        seed: of the nulls' random rotations.
        seeds: of the probes, as of :func:`ov_circuits.trace.behaviours.behaviours`.
        resume: the file that the board is meant for. Finished layers are kept beside it (in ``.NAME.parts``) until
            all are done: stopped in whatever way and started again with the same arguments, the run goes on. The file
            itself is not written.
        keep: with ``resume``: keep finished layers even when all are done, until :func:`ov_circuits.scores.saved.forget`.

    Returns:
        One row a head in layer-major order: ``head``, ``layer``, ``index``, ``kv_head``, the scores, each followed by
        ``.._null_mean`` and ``.._z`` (standard deviations above it; :mod:`ov_circuits.scores.chance`), and, where there are
        embeddings, ``reads_plus``, ``writes_plus``, ``reads_minus``, ``writes_minus`` (lists of token texts: what excites
        either end of the leading singular direction of W_V W_O, and what is then written). Last, each behaviour with its
        ``.._spread`` over seeds and, with ``nulls``, ``.._null_mean`` and ``.._z``. ``attrs``: ``model``, ``view``,
        ``source_embedding``, each column's ``sources`` and ``nulls``, which were ``left_out`` and why, which heads are
        ``not_finite`` (their weights hold NaN or infinity, so their scores are NaN; ``notes`` names the tensors), and in
        ``probes`` what behaviours were measured on.

    Raises:
        CircuitsError: an unknown name; a source that no score reads; a named score or behaviour that the checkpoint does not
            allow; with ``resume``: finished layers cannot be written there.
    """
    weights, acts = _split(scores)
    frame = Board(model, weights, tokens, nulls=nulls, source=source, seed=seed).computed(resume, keep=keep)
    if not acts and not behaviours:
        return frame
    import pandas as pd

    seen = measure(model, None if behaviours else acts, seeds=seeds)
    suffixes = SUFFIXES if nulls else SUFFIXES[:2]
    wanted = [key + suffix for key in seen.attrs["sources"] for suffix in suffixes]
    joined = pd.concat([frame, seen[wanted]], axis=1)
    joined.attrs = frame.attrs | {
        "sources": frame.attrs["sources"] | seen.attrs["sources"],
        "nulls": frame.attrs["nulls"] | (seen.attrs["nulls"] if nulls else {}),
        "left_out": frame.attrs["left_out"] | seen.attrs["left_out"],
        "probes": {key: seen.attrs[key] for key in ("seeds", "rows", "probe", "starts_with", "delimiters")},
    }
    return joined


def _split(scores: Sequence[str] | str | None) -> tuple[Sequence[str] | str | None, list[str]]:
    """Names of weight scores, and those of behaviours."""
    if scores is None or scores == "all":
        return scores, []
    asked = [scores] if isinstance(scores, str) else list(scores)
    known = columns()
    for name in asked:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise CircuitsError(f"there is no score {name!r}{hint} The scores are: {', '.join(known)}, or all")
    return [name for name in asked if name not in BEHAVIOURS], [name for name in asked if name in BEHAVIOURS]

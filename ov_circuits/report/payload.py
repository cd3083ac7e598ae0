"""What a page shows, as one JSON-able dictionary: the only bridge between results and the page.

Scores come from the scoreboard, cards from spectra and singular directions, the prompt part from a trace and its ledger.
Everything is rounded to what a page can show and keyed so that the page needs no knowledge of models.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

import ov_circuits
from ov_circuits.certificate import Certificate, verify
from ov_circuits.checkpoint.census import census
from ov_circuits.errors import CircuitsError
from ov_circuits.model import Head, Model
from ov_circuits.progress import track
from ov_circuits.report.dashboard import Dashboard
from ov_circuits.scores.board import SCORES, LayerCircuits, scoreboard
from ov_circuits.scores.directions import Directions, Ends, directions
from ov_circuits.trace.ledger import ledger
from ov_circuits.trace.trace import Trace
from ov_circuits.words import token_text

_DIRECTIONS = 6
_TOKENS = 8
_DIGITS = 5  # significant digits of numbers on a page

# The prompt's own column in the map; attribution the page offers by itself, from the prompt part.
_WRITE_NORM = {
    "key": "write_norm",
    "label": "Size of the write on this prompt",
    "group": "Prompt",
    "diverging": False,
    "range": None,
    "source": "‖z W_O‖",
    "note": "Norm of what the head writes into the residual stream at the explained position of this prompt.",
}


def dashboard(
    model: Model,
    trace: Trace | None = None,
    answer: str | int | None = None,
    against: str | int | None = None,
    *,
    position: int = -1,
    certificate: Certificate | None = None,
) -> Dashboard:
    """The offline page of a model, with a prompt's trace if one is given.

    Args:
        model: in the weight view that scores and directions are to have.
        trace: a trace of the same checkpoint.
        answer, against: with a trace, whose logit (difference) to account for; without ``answer`` the likeliest next token
            against the runner-up.
        position: whose next token is explained.
        certificate: from :func:`ov_circuits.verify`; made now when None.

    Raises:
        CircuitsError: an answer without a trace, a trace of another checkpoint, or a word of several tokens.
    """
    if trace is None and answer is not None:
        raise CircuitsError("an answer needs a prompt: pass a trace (on the command line: --prompt)")
    if answer is None and against is not None:
        raise CircuitsError("a logit difference needs an answer: pass answer as well (on the command line: --answer)")
    if trace is not None and trace.model.source is not model.source:
        raise CircuitsError("the trace was made with another model: trace the prompt with this one")
    # Before the scores: a faulty prompt or answer is said at once, not after minutes.
    prompt = None if trace is None else _prompt(trace, answer, against, position)
    certificate = verify(model) if certificate is None else certificate
    board = scoreboard(model, tokens=0)
    keys = [key for key in board.columns if key in SCORES]
    scores = [_score(key) for key in keys]
    values = {key: [_number(v) for v in board[key]] for key in keys}
    if prompt is not None:
        scores.append(_WRITE_NORM)
        values["write_norm"] = prompt.pop("write_norm_there")
    texts = _Texts(model)
    cards = [card for layer in track(range(model.n_layers), "Reading heads") for card in _cards(model, layer, texts)]
    return Dashboard(
        {
            "format": 1,
            "title": model.name,
            "meta": _meta(model, certificate, board.attrs["not_finite"]),
            "scores": scores,
            "values": values,
            "chance": {key: _chance(board, key) for key in keys if f"{key}_z" in board},
            "cards": cards,
            "tokens": texts.table,
            "prompt": prompt,
        }
    )


def _meta(model: Model, certificate: Certificate, not_finite: Sequence[str]) -> dict[str, Any]:
    a, source = model.architecture, model.source
    notes = []
    if not_finite:
        notes.append(f"Weights of these heads hold NaN or infinity, so they have no scores: {', '.join(not_finite)}.")
    if not model.has_embeddings:
        notes.append(f"Scores and tokens that pass through the vocabulary are left out: {model.why_no_vocabulary}.")
    if a.positions == "rotary":
        notes.append("Rotary positions: QK numbers are those of offset 0, one of many.")
    return {
        "model": model.name,
        "source": Path(source.checkpoint.where).name,  # pages are shared; where it lay is nobody's business
        "family": a.family,
        "n_layers": a.n_layers,
        "n_heads": a.n_heads,
        "n_kv_heads": a.n_kv_heads,
        "d_model": a.d_model,
        "d_head": a.d_head,
        "n_vocab": a.n_vocab,
        "norm": a.norm,
        "positions": a.positions,
        "tied": source.tied if source.contents.embeddings else a.tied,
        "n_parameters": census(source.checkpoint.config, source.checkpoint.where).n_parameters,
        "view": model.view,
        "view_note": model.view_note,
        "version": ov_circuits.__version__,
        "certificate": {
            "passed": certificate.passed,
            "checks": [{**asdict(check), "value": _number(check.value)} for check in certificate.checks],
        },
        "notes": notes,
    }


def _score(key: str) -> dict[str, Any]:
    score = SCORES[key]
    return {
        "key": key,
        "label": score.label,
        "group": score.group,
        "diverging": score.diverging,
        "range": score.range,
        "source": score.source,
        "note": score.note,
    }


def _chance(board: pd.DataFrame, key: str) -> dict[str, Any]:
    """What a score would be by chance: its mean and the head's distance from it, one a head."""
    return {
        "note": board.attrs["nulls"][key],
        "mean": [_number(v) for v in board[f"{key}_null_mean"]],
        "z": [_number(v) for v in board[f"{key}_z"]],
    }


# -- cards ------------------------------------------------------------------------------------------------------------


# The card of a head whose weights hold NaN or infinity: nothing of it can be decomposed.
_NO_CARD: dict[str, Any] = {"singular_values": [], "eigenvalues_ov": [], "eigenvalues_full": None, "directions": None}


class _Texts:
    """The page's table of token texts: each token that is shown, once."""

    def __init__(self, model: Model) -> None:
        self._model, self._index = model, dict[int, int]()
        self.table: list[str] = []

    def index(self, token: int) -> int:
        if token not in self._index:
            self._index[token] = len(self.table)
            self.table.append(token_text(self._model, token))
        return self._index[token]


def _cards(model: Model, layer: int, texts: _Texts) -> list[dict[str, Any]]:
    circuits = LayerCircuits(model, layer)
    finite = model.layer(layer).finite_heads.tolist()
    ov = circuits.ov
    full = circuits.full_ov.eigenvalues if model.has_embeddings else None
    found = directions(model, layer, k=_DIRECTIONS, tokens=_TOKENS) if model.has_embeddings else None
    return [
        {
            "singular_values": _numbers(ov.singular_values[head]),
            "eigenvalues_ov": _complex(ov.eigenvalues[head]),
            "eigenvalues_full": None if full is None else _complex(full[head]),
            "directions": None if found is None else _direction_rows(found, head, texts),
        }
        if finite[head]
        else _NO_CARD
        for head in range(model.n_heads)
    ]


def _direction_rows(found: Directions, head: int, texts: _Texts) -> list[dict[str, Any]]:
    return [
        {
            "value": _number(found.values[head, k]),
            "energy": _number(found.energy[head, k]),
            "separable": bool(found.separable[head, k]),
            "reads": _end_rows(found.reads, head, k, texts),
            "writes": _end_rows(found.writes, head, k, texts),
        }
        for k in range(found.values.shape[-1])
    ]


def _end_rows(ends: Ends, head: int, k: int, texts: _Texts) -> dict[str, list[list[int | float]]]:
    def rows(ids: Tensor, values: Tensor) -> list[list[int | float]]:
        pairs = zip(ids[head, k].tolist(), values[head, k].tolist(), strict=True)
        return [[texts.index(token), _rounded(value)] for token, value in pairs]

    return {"plus": rows(ends.plus, ends.plus_values), "minus": rows(ends.minus, ends.minus_values)}


# -- a prompt ---------------------------------------------------------------------------------------------------------


def _prompt(trace: Trace, answer: str | int | None, against: str | int | None, position: int) -> dict[str, Any]:
    at = trace.position(position)
    if answer is None:
        answer, against = trace.logits[at].topk(2).indices.tolist()
    account = ledger(trace, answer, against, position)
    heads = account[account["kind"] == "value_path"]
    labels = trace.model.head_labels
    by_source = heads.pivot(index="head", columns="source", values="value").reindex(labels)
    norms = trace.write_norms().flatten(0, 1)
    facts = account.attrs
    return {
        "tokens": list(trace.texts),
        "ids": list(trace.tokens),
        "bos_added": trace.bos_added,
        "answer": _token(trace, facts["answer"]),
        "against": None if facts["against"] is None else _token(trace, facts["against"]),
        "position": at,
        "quantity": facts["quantity"],
        "logit": facts["logit"],
        "total": facts["total"],
        "residual": facts["residual"],
        "components": _components(account),
        "head_value": [_number(v) for v in by_source.sum(axis=1)],
        "head_source": _array(_padded(by_source, len(trace)), "f4"),
        "pattern": _array(torch.stack([layer.pattern for layer in trace.record.layers]).flatten(0, 1), "u2"),
        "value_weighted": _array(trace.value_weighted_patterns().flatten(0, 1), "f2"),
        "write_norm": _array(norms, "f2"),
        "write_norm_there": _numbers(norms[:, at]),
    }


def _padded(by_source: pd.DataFrame, n: int) -> NDArray[np.float32]:
    """Attribution by source, with zeros for the sources after the explained position."""
    return by_source.reindex(columns=range(n), fill_value=0.0).to_numpy(dtype=np.float32)


def _components(account: pd.DataFrame) -> list[dict[str, Any]]:
    """The account, heads and sources summed, in the order of the stream."""
    named = account.assign(component=account["component"].where(account["kind"] != "value_bias", "value_bias"))
    named = named.assign(component=named["component"].replace({"attention_bias": "b_O", "final_norm": "norm_bias"}))
    summed = named.groupby(["layer", "component"], dropna=False, sort=False)["value"].sum().reset_index()
    return [
        {"component": component, "layer": None if pd.isna(layer) else int(layer), "value": float(value)}
        for layer, component, value in summed.itertuples(index=False)
    ]


def _token(trace: Trace, token: int) -> dict[str, Any]:
    return {"id": token, "token": token_text(trace.model, token)}


# -- numbers ------------------------------------------------------------------------------------------------------------


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _number(value: Any) -> float | None:
    """A number for JSON: rounded, and None where there is none (JSON has no NaN)."""
    if value is None:
        return None
    value = float(value)
    return _rounded(value) if np.isfinite(value) else None


def _numbers(values: Tensor | Sequence[float]) -> list[float | None]:
    return [_number(value) for value in values]


def _complex(values: Tensor) -> list[list[float | None]]:
    return [[_number(value.real), _number(value.imag)] for value in values.tolist()]


def _array(values: Tensor | NDArray[np.float32], dtype: str) -> dict[str, Any]:
    """A tensor as base64: ``u2`` is a fraction of the largest value in 65,535 steps, ``f2`` is scaled to keep half precision."""
    data: NDArray[np.float32] = np.asarray(values, dtype=np.float32)
    largest = float(np.abs(data).max(initial=0.0)) or 1.0
    if dtype == "u2":
        scale = largest / 65535
        packed = np.rint(data / scale).astype("<u2").tobytes()
    elif dtype == "f2":
        scale, packed = largest, (data / largest).astype("<f2").tobytes()
    else:
        scale, packed = 1.0, data.astype("<f4").tobytes()
    return {"dtype": dtype, "shape": list(data.shape), "scale": scale, "data": base64.b64encode(packed).decode()}


def head_card(head: Head) -> dict[str, Any]:
    """One head's spectrum and directions, as its card on the page has them (token texts instead of indices)."""
    texts = _Texts(head.model)
    card = _cards(head.model, head.layer, texts)[head.index]
    for direction in card["directions"] or []:
        for side in ("reads", "writes"):
            direction[side] = {
                end: [[texts.table[int(index)], value] for index, value in rows]
                for end, rows in direction[side].items()
            }
    return card

"""What a page shows, as one JSON-able dictionary: the only bridge between results and the page.

One section a topic, each made by a module of its own: cards (`cards.py`), composition and spaces (`links.py`), the prompt and
its ablations (`prompt.py`), a prompt set (`sets.py`), a continuation (`continuation.py`), examples from a text (`examples.py`).
Everything is rounded to what a page can show and keyed so that the page needs no knowledge of models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

import ov_circuits
from ov_circuits.certificate import MEANINGS
from ov_circuits.checkpoint.census import census
from ov_circuits.evidence import columns
from ov_circuits.progress import track
from ov_circuits.report.cards import Search, Texts, layer_cards, spectrum_draws
from ov_circuits.report.continuation import continuation_section
from ov_circuits.report.evidence import Part, prompt_clause, sentence
from ov_circuits.report.examples import examples_payload
from ov_circuits.report.links import composition_section, spaces_section
from ov_circuits.report.numbers import number, numbers
from ov_circuits.report.prompt import TOTAL_EFFECT, WRITE_NORM, ablation_section, prompt_section
from ov_circuits.report.sets import SET_MEAN, set_section
from ov_circuits.report.text import visible
from ov_circuits.scores.chance import DRAWS, SPECTRUM_NULL
from ov_circuits.shown import counted

if TYPE_CHECKING:
    from ov_circuits.report.results import Results


def payload(results: Results) -> dict[str, Any]:
    """All sections of the page."""
    model, board = results.model, results.board
    known = columns()
    keys = [key for key in board.columns if key in known]
    scores = [_score(key) for key in keys]
    values = {key: [number(v) for v in board[key]] for key in keys}
    prompt = None
    if results.trace is not None and results.account is not None:
        prompt, values["write_norm"] = prompt_section(results.trace, results.account)
        scores.append(WRITE_NORM)
        if results.sweep is not None:
            prompt["ablation"], values["total_effect"] = ablation_section(results.sweep, model.head_labels)
            scores.append(TOTAL_EFFECT)
    prompt_set = None
    if results.prompts is not None and results.attribution is not None:
        prompt_set, values["set_mean"] = set_section(model, results.prompts, results.attribution)
        scores.append(SET_MEAN)
    for place, frame in enumerate(results.token_pairs, start=1):
        for score, column in _entry_scores(place, frame):
            scores.append(score)
            values[score["key"]] = numbers(frame[column])
    texts = Texts(model)
    search = Search(model)
    draws = spectrum_draws(model, results.seed)
    cards = [
        card
        for layer in track(range(model.n_layers), "Reading heads")
        for card in layer_cards(model, layer, texts, draws, results.pairs, search)
    ]
    _write_sentences(results, cards, prompt, texts)
    return {
        "format": 2,
        "title": model.name,
        "meta": _meta(results),
        "scores": scores,
        "values": values,
        "chance": {key: _chance(board, key) for key in keys if f"{key}_z" in board},
        "cards": cards,
        "tokens": texts.table,
        "search": search.section(),
        "composition": composition_section(model, results.composition),
        "spaces": spaces_section(model, results.spaces, results.overlap),
        "prompt": prompt,
        "prompt_set": prompt_set,
        "generation": None if results.generation is None else continuation_section(results.generation),
        "examples": None if results.scan is None else examples_payload(results.scan),
    }


def _write_sentences(
    results: Results, cards: list[dict[str, Any]], prompt: dict[str, Any] | None, texts: Texts
) -> None:
    """Every card's ``evidence``."""
    labels = results.model.head_labels
    place = {label: i for i, label in enumerate(labels)}
    incoming, outgoing = _flagged(results.composition, place)
    quantity: list[Part] = []
    if prompt is not None:
        quantity = ["logit of ", {"token": texts.index(prompt["answer"]["id"])}]
        if prompt["against"] is not None:
            against: Part = {"token": texts.index(prompt["against"]["id"])}
            quantity = ["logit difference ", quantity[1], " \N{MINUS SIGN} ", against]
    rows = results.board.to_dict("index")
    for i, (label, card) in enumerate(zip(labels, cards, strict=True)):
        if not card["singular_values"]:
            card["evidence"] = []
            continue
        card["evidence"] = sentence(pd.Series(rows[i]), card, incoming.get(label), outgoing.get(label))
        if prompt is not None:
            card["evidence"] += prompt_clause(prompt["head_value"], i, quantity)


def _flagged(
    frame: pd.DataFrame | None, place: dict[str, int]
) -> tuple[dict[str, pd.DataFrame], dict[str, pd.DataFrame]]:
    """Each head's pairs that stand out at a false discovery rate of 5 %, strongest first: as receiver, as sender."""
    if frame is None:
        return {}, {}
    flagged = frame[frame["flag_paired"]].sort_values("z_paired", ascending=False, kind="stable")
    sides = []
    for own, other in (("receiver", "sender"), ("sender", "receiver")):
        named = flagged.assign(other=flagged[other].map(place))[["kind", "other", "z_paired", own]]
        sides.append({str(label): rows for label, rows in named.groupby(own, sort=False)})
    return sides[0], sides[1]


def _meta(results: Results) -> dict[str, Any]:
    model, certificate = results.model, results.certificate
    not_finite, heads_with_pairs = results.board.attrs["not_finite"], len(results.pairs)
    a, source = model.architecture, model.source
    notes = []
    if not_finite:
        notes.append(f"Weights of these heads hold NaN or infinity, so they have no scores: {', '.join(not_finite)}.")
        notes += [f"{note}." for note in results.board.attrs["notes"]]
    if not model.has_embeddings:
        notes.append(f"Scores and tokens that pass through the vocabulary are left out: {model.why_no_vocabulary}.")
    elif heads_with_pairs < model.n_layers * model.n_heads - len(not_finite):
        notes.append(
            f"Token pairs, exact over the whole vocabulary, were read for {counted(heads_with_pairs, 'head')}: the most "
            "one-sided ones and, with a prompt, those that move the answer most. `report --pairs all` reads all of them."
        )
    if a.positions == "rotary":
        notes.append("Rotary positions: QK numbers are those of offset 0, one of many.")
    if probes := results.board.attrs.get("probes"):
        notes.append(
            f"Behaviours are measured on {probes['probe']}: {counted(len(probes['seeds']), 'seed')} of "
            f"{counted(probes['rows'], 'prompt')}, each after {probes['starts_with']}."
        )
    notes += results.notes
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
        "spectrum_null": f"range of {DRAWS} draws of {SPECTRUM_NULL}",
        "certificate": {
            "passed": certificate.passed,
            "checks": [
                {**asdict(check), "value": number(check.value), "meaning": MEANINGS.get(check.name)}
                for check in certificate.checks
            ],
        },
        "notes": notes,
    }


def _score(key: str) -> dict[str, Any]:
    score = columns()[key]
    return {
        "key": key,
        "label": score.label,
        "group": score.group,
        "diverging": score.diverging,
        "range": score.range,
        "source": score.source,
        "note": score.note,
    }


def _entry_scores(place: int, frame: pd.DataFrame) -> Iterator[tuple[dict[str, Any], str]]:
    """The scores that a pair of tokens makes, each with its column."""
    tokens = [frame.attrs[side] for side in ("source_token", "output_token")]
    pair = " \N{RIGHTWARDS ARROW} ".join(map(visible, tokens))
    common = {"group": "Token pairs", "range": None, "source": "full OV circuit, Elhage et al. 2021"}
    yield (
        common
        | {
            "key": f"entry_{place}",
            "pair": tokens,  # the page's search of tokens finds it by these
            "label": f"Entry {pair}",
            "diverging": True,
            "note": f"What full attention to the first token does to the logit of the second, {pair}, less what it does to the "
            "average token: an entry of W_E W_V W_O W_U less the mean of its row, up to the norms' scales.",
        },
        "above_mean",
    )
    yield (
        common
        | {
            "key": f"entry_{place}_rank",
            "label": f"Rank {pair}",
            "diverging": False,
            "note": f"Place of the second token among all that the first raises, {pair}; 1 is the most raised.",
        },
        "rank",
    )


def _chance(board: pd.DataFrame, key: str) -> dict[str, Any]:
    """What a score would be by chance: its mean and the head's distance from it, one a head; and how far seeds spread."""
    spread = {"spread": [number(v) for v in board[f"{key}_spread"]]} if f"{key}_spread" in board else {}
    return spread | {
        "note": board.attrs["nulls"][key],
        "mean": [number(v) for v in board[f"{key}_null_mean"]],
        "z": [number(v) for v in board[f"{key}_z"]],
    }

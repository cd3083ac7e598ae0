"""The payload of a prompt: patterns, writes, and the account of its answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from ov_circuits.report.numbers import array, number, numbers
from ov_circuits.trace.trace import Trace
from ov_circuits.words import token_text

# The prompt's own column in the map; attribution the page offers by itself, from the prompt part.
WRITE_NORM = {
    "key": "write_norm",
    "label": "Size of the write on this prompt",
    "group": "Prompt",
    "diverging": False,
    "range": None,
    "source": "‖z W_O‖",
    "note": "Norm of what the head writes into the residual stream at the explained position of this prompt.",
}

TOTAL_EFFECT = {
    "key": "total_effect",
    "label": "Total effect on this prompt",
    "group": "Prompt",
    "diverging": True,
    "range": None,
    "source": "zero ablation of the head alone",
    "note": "What the answer in fact loses when the head writes nothing and all that follows runs on without it.",
}

# What the account's components are called where they are read; the page has these names from the payload.
COMPONENT_NAMES = {
    "embedding": "Token embedding",
    "position": "Position embedding",
    "head": "Attention heads",
    "value_bias": "Value biases",
    "b_O": "Attention output biases",
    "mlp": "MLPs",
    "norm_bias": "Final norm bias",
    "unembedding": "Unembedding bias",
}


def prompt_section(trace: Trace, account: pd.DataFrame) -> tuple[dict[str, Any], list[float | None]]:
    """The section, and every head's write norm at the explained position, which is a score of its own."""
    by_source = value_paths(account, trace.model.head_labels)
    norms = trace.write_norms().flatten(0, 1)
    facts = account.attrs
    section = {
        "tokens": list(trace.texts),
        "ids": list(trace.tokens),
        "bos_added": trace.bos_added,
        "answer": _token(trace, facts["answer"]),
        "against": None if facts["against"] is None else _token(trace, facts["against"]),
        "position": facts["position"],
        "quantity": facts["quantity"],
        "logit": facts["logit"],
        "total": facts["total"],
        "residual": facts["residual"],
        "components": components(account),
        "component_names": COMPONENT_NAMES,
        "head_value": [number(v) for v in by_source.sum(axis=1)],
        "head_source": array(_padded(by_source, len(trace)), "f4"),
        "pattern": array(torch.stack([layer.pattern for layer in trace.record.layers]).flatten(0, 1), "u2"),
        "value_weighted": array(trace.value_weighted_patterns().flatten(0, 1), "f2"),
        "write_norm": array(norms, "f2"),
    }
    return section, numbers(norms[:, facts["position"]])


def ablation_section(sweep: pd.DataFrame, labels: list[str]) -> tuple[dict[str, Any], list[float | None]]:
    """Each ablated head by its place, and all heads' total effects, which are a score of their own."""
    place = {label: i for i, label in enumerate(labels)}
    total = dict(zip(sweep["head"], sweep["total_effect"], strict=True))
    names = ("direct_effect", "total_effect", "answer_loss_change", "kl")
    section = {
        "method": sweep.attrs["method"],
        "head": [place[label] for label in sweep["head"]],
        **{name: numbers(sweep[name]) for name in names},
    }
    return section, [number(total.get(label)) for label in labels]


def value_paths(account: pd.DataFrame, labels: list[str]) -> pd.DataFrame:
    """What each head moves from each source token to the answer: heads down, source positions across."""
    heads = account[account["kind"] == "value_path"]
    return heads.pivot(index="head", columns="source", values="value").reindex(labels)


def components(account: pd.DataFrame) -> list[dict[str, Any]]:
    """The account, heads and sources summed, in the order of the stream."""
    named = account.assign(component=account["component"].where(account["kind"] != "value_bias", "value_bias"))
    named = named.assign(component=named["component"].replace({"attention_bias": "b_O", "final_norm": "norm_bias"}))
    summed = named.groupby(["layer", "component"], dropna=False, sort=False)["value"].sum().reset_index()
    return [
        {"component": component, "layer": None if pd.isna(layer) else int(layer), "value": float(value)}
        for layer, component, value in summed.itertuples(index=False)
    ]


def _padded(by_source: pd.DataFrame, n: int) -> NDArray[np.float32]:
    """Attribution by source, with zeros for the sources after the explained position."""
    return by_source.reindex(columns=range(n), fill_value=0.0).to_numpy(dtype=np.float32)


def _token(trace: Trace, token: int) -> dict[str, Any]:
    return {"id": token, "token": token_text(trace.model, token)}

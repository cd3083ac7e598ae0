"""The payload of a prompt set: each component's mean with its interval, and where heads take it from."""

from __future__ import annotations

from typing import Any

import pandas as pd

from ov_circuits.model import Model
from ov_circuits.prompts import OTHER, Prompt, PromptSet
from ov_circuits.report.numbers import number, numbers
from ov_circuits.words import token_list

# Prompts that are shown as they are.
_SHOWN = 4

SET_MEAN = {
    "key": "set_mean",
    "label": "Mean attribution on the prompt set",
    "group": "Prompt set",
    "diverging": True,
    "range": None,
    "source": "direct logit attribution, mean over prompts",
    "note": "What the head adds, value bias included, on average over the prompts of the set.",
}

_FACTS = (
    "set",
    "quantity",
    "prompts",
    "dropped",
    "difference",
    "difference_low",
    "difference_high",
    "residual",
    "share_right",
    "bos_added",
    "interval",
    "level",
    "samples",
)
# A component by itself, or one a layer.
_NAMES = {
    "embedding": "Token embedding",
    "position": "Position embedding",
    "attention_bias": "Attention output bias",
    "mlp": "MLP",
    "final_norm": "Final norm bias",
    "unembedding": "Unembedding bias",
}


def set_section(model: Model, found: PromptSet, frame: pd.DataFrame) -> tuple[dict[str, Any], list[float | None]]:
    """The section, and every head's mean, which is a score of its own.

    ``heads`` has for every head in layer-major order its mean with ``low`` and ``high``, and in ``roles`` the same of what it
    moves from each named position; ``others`` are the components that are no heads.
    """
    heads, others = (frame[(frame["component"] == "head") == is_head] for is_head in (True, False))
    heads = heads.set_index("head").reindex(model.head_labels)
    facts = {name: frame.attrs[name] for name in _FACTS}
    roles = {
        role: {"mean": numbers(heads[f"from_{role}"]), **_ends(heads, f"from_{role}_")}
        for role in (*frame.attrs["roles"], OTHER)
    }
    means = numbers(heads["mean"])
    section = facts | {
        **{name: number(facts[name]) for name in ("difference", "difference_low", "difference_high", "residual")},
        "heads": {"mean": means, **_ends(heads, "")},
        "roles": roles,
        "others": [
            {
                "name": component_name(row),
                "mean": number(row["mean"]),
                "low": number(row["low"]),
                "high": number(row["high"]),
            }
            for row in others.to_dict("records")
        ],
        "examples": [_example(model, prompt) for prompt in found.prompts[:_SHOWN]],
    }
    return section, means


def _ends(heads: pd.DataFrame, prefix: str) -> dict[str, list[float | None]]:
    return {end: numbers(heads[f"{prefix}{end}"]) for end in ("low", "high")}


def component_name(row: dict[Any, Any]) -> str:
    """What a component that is no head is called where it is read."""
    name = _NAMES.get(row["component"], row["component"])
    return name if pd.isna(row["layer"]) else f"{name} {row['layer']}"


def _example(model: Model, prompt: Prompt) -> dict[str, Any]:
    """A prompt as the model reads it: each token, and which role it has."""
    roles: list[str | None] = [None] * len(prompt.tokens)
    for role, positions in prompt.roles.items():
        for position in positions:
            roles[position] = role
    return {
        "tokens": token_list(model, list(prompt.tokens)),
        "roles": roles,
        "answer": token_list(model, list(prompt.answer)),
        "foil": token_list(model, list(prompt.foil)),
    }

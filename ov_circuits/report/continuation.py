"""The payload of a continuation: each step's token beside its runner-up, and who moved the model from the one to the other."""

from __future__ import annotations

from typing import Any

import torch

from ov_circuits.report.numbers import array, number, numbers
from ov_circuits.report.prompt import COMPONENT_NAMES
from ov_circuits.trace.generation import Generation, Step
from ov_circuits.trace.ledger import Account


def continuation_section(generation: Generation) -> dict[str, Any]:
    """Steps in order; ``head_value`` is [step, head], ``head_source`` the position that a head takes most from, by step."""
    trace, steps = generation.trace, generation.steps
    return {
        "tokens": list(trace.texts),
        "start": generation.start,
        "bos_added": trace.bos_added,
        "greedy": generation.greedy,
        "ended": generation.ended,
        "steps": [_step(step, len(trace)) for step in steps],
        "component_names": COMPONENT_NAMES,
        "head_value": array(torch.stack([step.account.heads.flatten() for step in steps]).float(), "f4"),
        "head_source": [step.account.value_path.abs().argmax(-1).flatten().tolist() for step in steps],
    }


def _step(step: Step, n: int) -> dict[str, Any]:
    account = step.account
    sources = account.value_path.sum((0, 1)).tolist()
    return {
        "position": step.position,
        "token": step.text,
        "probability": number(step.probability),
        "runner_up": step.runner_up_text,
        "runner_up_probability": number(step.runner_up_probability),
        "difference": number(account.reading.actual),
        "total": number(account.total),
        "residual": account.residual,
        # From each token through all heads; none from those after the position that predicts.
        "sources": [*numbers(sources[: step.position + 1]), *[None] * (n - step.position - 1)],
        "components": [{"component": name, "value": number(value)} for name, value in _kinds(account)],
    }


def _kinds(account: Account) -> list[tuple[str, float]]:
    """The account by kind, in the order of the stream."""
    parts = [
        ("embedding", account.embedding),
        ("position", account.position),
        ("head", float(account.value_path.sum())),
        ("value_bias", None if account.value_bias is None else float(account.value_bias.sum())),
        ("b_O", None if account.b_O is None else float(account.b_O.sum())),
        ("mlp", float(account.mlp.sum())),
        *[("norm_bias" if name == "final_norm" else name, value) for name, _, value in account.reading.constants],
    ]
    return [(name, value) for name, value in parts if value is not None]

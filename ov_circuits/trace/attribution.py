"""Direct logit attribution over many prompts: means with intervals, by component and by where a head reads.

Each prompt's account (:mod:`ov_circuits.trace.ledger`) sums to its own logit difference, answer minus foil, so the means over
prompts sum to the mean difference. A head's value path is a sum over source tokens, and where the prompts share named positions
(:mod:`ov_circuits.prompts`) it is split by them: what the head moves from the subject, from the repeated name, from the rest.

Intervals are percentile bootstrap intervals: prompts are drawn again with replacement, all columns of a draw together. They say
how far a mean would move with other prompts of the same kind, not with prompts of another kind.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ov_circuits import prompts as prompt_sets
from ov_circuits.errors import CircuitsError, check_seed
from ov_circuits.progress import track
from ov_circuits.prompts import OTHER, Prompt, PromptSet
from ov_circuits.trace.ledger import Account, accounts, logit_reading

if TYPE_CHECKING:
    import pandas as pd

    from ov_circuits.model import Model

# Tokens whose records, logits over the whole vocabulary included, are in memory at a time.
_CHUNK_TOKENS = 512


def attribute(
    model: Model,
    dataset: PromptSet | str | Path | Sequence[Mapping[str, Any]],
    *,
    n: int | None = None,
    roles: Sequence[str] | None = None,
    bos: bool | None = None,
    drop: bool | None = None,
    samples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> pd.DataFrame:
    """Who makes the answer's logit larger than the foil's, on average over a set of prompts, and from which tokens.

    Args:
        model: any view; accounts use weights as stored.
        dataset: a set from :func:`ov_circuits.prompts.load`, or what it takes: a set's name, a .jsonl file, or a list of
            dictionaries.
        n, bos, drop: as of :func:`ov_circuits.prompts.load`, where it is no set yet.
        roles: named positions to split heads' value paths by; all that every prompt has when None.
        samples: bootstrap draws.
        level: of the intervals.
        seed: of the draws, and of which ``n`` prompts are taken.

    Returns:
        One row a component: ``component`` (embedding, position, head, attention_bias, mlp, final_norm, unembedding),
        ``layer``, ``head`` (label), ``mean``, ``low``, ``high``, ``spread`` (standard deviation over prompts), and for heads
        ``value_path``, ``value_bias`` (means; together ``mean``) and for each role, and for ``other`` positions,
        ``from_<role>``, ``from_<role>_low``, ``from_<role>_high`` (together ``value_path``). ``mean`` sums to the mean logit
        difference. ``attrs``: ``model``, ``set``, ``quantity``, ``prompts``, ``dropped``, ``difference`` (the model's own mean)
        with its ``difference_low`` and ``difference_high``, ``total``, ``residual`` = difference - total, ``largest_residual``
        of a prompt, ``share_right`` (prompts with a positive difference), ``roles``, ``roles_not_shared``, ``bos_added``,
        ``interval``, ``level``, ``samples``, ``seed``.

    Raises:
        CircuitsError: as :func:`ov_circuits.prompts.load`; a role that no prompt has, or not all; some prompts with a foil and
            some without; a level outside (0, 1).
    """
    found = (
        dataset
        if isinstance(dataset, PromptSet)
        else prompt_sets.load(dataset, model, n=n, seed=seed, bos=bos, drop=drop)
    )
    if isinstance(dataset, PromptSet) and (n, bos, drop) != (None, None, None):
        raise CircuitsError("n, bos and drop choose among a file's prompts: give them to prompts.load, or give a name")
    check_seed(seed)
    if not 0 < level < 1 or samples < 1:
        raise CircuitsError(
            f"level = {level}, samples = {samples}: a level lies between 0 and 1, and one draw is the least"
        )
    quantity = "logit of the answer minus logit of the foil" if found.compares else "logit of the answer"
    chosen = _roles(found, roles)
    table = _Table(chosen)
    for account, prompt in _accounts(model, found.prompts):
        table.add(account, prompt)
    return _frame(model, found, quantity, table, samples, level, seed)


def _roles(found: PromptSet, asked: Sequence[str] | None) -> tuple[str, ...]:
    if asked is None:
        return found.shared_roles
    for role in asked:
        if role not in found.roles:
            near = difflib.get_close_matches(role, found.roles, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise CircuitsError(f"{found.name} has no role {role!r}{hint} Its roles are: {', '.join(found.roles)}")
        if role not in found.shared_roles:
            without = sum(role not in prompt.roles for prompt in found)
            raise CircuitsError(f"{without} of {len(found)} prompts of {found.name} have no role {role}: leave it out")
    return tuple(dict.fromkeys(asked))


def _accounts(model: Model, prompts: Sequence[Prompt]) -> Iterator[tuple[Account, Prompt]]:
    """Each prompt's account; only one chunk's records are in memory."""
    for chunk in track(_chunks(prompts), "Running prompts"):
        traces = model.trace([list(prompt.tokens) for prompt in chunk])
        readings = [logit_reading(trace, prompt.weights) for trace, prompt in zip(traces, chunk, strict=True)]
        yield from zip(accounts(traces, readings), chunk, strict=True)


def _chunks(prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    chunks: list[list[Prompt]] = []
    longest = 0
    for prompt in prompts:
        longest = max(longest, len(prompt.tokens))
        if chunks and longest * (len(chunks[-1]) + 1) <= _CHUNK_TOKENS:
            chunks[-1].append(prompt)
        else:
            chunks.append([prompt])
            longest = len(prompt.tokens)
    return chunks


class _Table:
    """All prompts' accounts side by side: a row a prompt, a column a component, and for heads their parts."""

    def __init__(self, roles: tuple[str, ...]) -> None:
        self.roles = roles
        self.places: list[tuple[str, int | None, str | None]] = []
        self._components: list[list[float]] = []
        self._parts: list[Tensor] = []
        self._actual: list[float] = []

    def add(self, account: Account, prompt: Prompt) -> None:
        places, values = zip(*_components(account), strict=True)
        self.places = list(places)
        self._components.append(list(values))
        by_role = [account.value_path[..., list(prompt.roles[role])].sum(-1) for role in self.roles]
        path = account.value_path.sum(-1)
        bias = torch.zeros_like(path) if account.value_bias is None else account.value_bias
        # The rest is a difference, so that the parts sum to the path.
        rest = path - sum(by_role, torch.zeros_like(path))
        self._parts.append(torch.stack([path, bias, *by_role, rest]).flatten(1))
        self._actual.append(account.reading.actual)

    @property
    def components(self) -> Float[np.ndarray, "prompt component"]:
        return np.array(self._components)

    @property
    def parts(self) -> Float[np.ndarray, "prompt part head"]:
        """Value path, value bias, each role, other."""
        return torch.stack(self._parts).numpy()

    @property
    def actual(self) -> Float[np.ndarray, " prompt"]:
        return np.array(self._actual)


def _components(account: Account) -> Iterator[tuple[tuple[str, int | None, str | None], float]]:
    """Component, layer and head, in the order of the stream, and what it contributes."""
    yield ("embedding", None, None), account.embedding
    if account.position is not None:
        yield ("position", None, None), account.position
    for layer, heads in enumerate(account.heads.tolist()):
        yield from ((("head", layer, f"{layer}.{index}"), value) for index, value in enumerate(heads))
        if account.b_O is not None:
            yield ("attention_bias", layer, None), float(account.b_O[layer])
        yield ("mlp", layer, None), float(account.mlp[layer])
    for component, _, value in account.reading.constants:
        yield (component, None, None), value


# -- means and intervals ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Interval:
    """Means of columns, and between which values they lie."""

    mean: Float[np.ndarray, " column"]
    low: Float[np.ndarray, " column"]
    high: Float[np.ndarray, " column"]


class Bootstrap:
    """Percentile bootstrap of means over rows (Efron & Tibshirani 1993): one set of draws for all columns.

    Args:
        rows: how many there are.
        samples: draws.
        level: of the intervals, in (0, 1).
        seed: of the generator.
    """

    def __init__(self, rows: int, samples: int, level: float, seed: int) -> None:
        drawn = np.random.default_rng(seed).multinomial(rows, np.full(rows, 1 / rows), size=samples)
        self._weights = drawn / rows
        self._ends = ((1 - level) / 2, (1 + level) / 2)

    def __call__(self, values: Float[np.ndarray, "row column"]) -> Interval:
        """Each column's mean over rows with its interval; NaN ends for a single row, which says nothing of others."""
        mean = values.mean(0)
        if len(values) == 1:
            nothing = np.full_like(mean, np.nan)
            return Interval(mean, nothing, nothing)
        low, high = np.quantile(self._weights @ values, self._ends, axis=0)
        return Interval(mean, low, high)


def _frame(
    model: Model, found: PromptSet, quantity: str, table: _Table, samples: int, level: float, seed: int
) -> pd.DataFrame:
    import pandas as pd

    components, parts, actual = table.components, table.parts, table.actual
    bootstrap = Bootstrap(len(found), samples, level, seed)
    whole = bootstrap(components)
    frame = pd.DataFrame(table.places, columns=["component", "layer", "head"]).astype({"layer": "Int64"})
    spread = components.std(0, ddof=1) if len(found) > 1 else np.full(components.shape[1], np.nan)
    frame = frame.assign(mean=whole.mean, low=whole.low, high=whole.high, spread=spread)
    is_head = frame["component"] == "head"
    for name, values in zip(("value_path", "value_bias"), parts.transpose(1, 0, 2), strict=False):
        frame.loc[is_head, name] = values.mean(0)
    for role, values in zip((*table.roles, OTHER), parts.transpose(1, 0, 2)[2:], strict=True):
        moved = bootstrap(values)
        for suffix, numbers in (("", moved.mean), ("_low", moved.low), ("_high", moved.high)):
            frame.loc[is_head, f"from_{role}{suffix}"] = numbers
    difference = bootstrap(actual[:, None])
    residuals = actual - components.sum(1)
    facts: dict[Any, Any] = {
        "model": model.name,
        "set": found.name,
        "quantity": quantity,
        "prompts": len(found),
        "dropped": dict(found.dropped),
        "difference": float(difference.mean[0]),
        "difference_low": float(difference.low[0]),
        "difference_high": float(difference.high[0]),
        "total": float(whole.mean.sum()),
        "residual": float(difference.mean[0] - whole.mean.sum()),
        "largest_residual": float(np.abs(residuals).max()),
        "share_right": float((actual > 0).mean()),
        "roles": list(table.roles),
        "roles_not_shared": [role for role in found.roles if role not in found.shared_roles],
        "bos_added": sum(prompt.bos_added for prompt in found),
        "interval": "percentile bootstrap over prompts",
        "level": level,
        "samples": samples,
        "seed": seed,
    }
    frame.attrs = facts
    return frame

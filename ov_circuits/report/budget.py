"""What a page affords by itself: as many runs of the model as take some ten seconds. More is for the asking.

Counted, never timed, so that a page of the same checkpoint is the same on every machine.
"""

from __future__ import annotations

from ov_circuits.checkpoint.census import census
from ov_circuits.model import Model

# Parameters times tokens that run; about ten seconds on two cores.
_RUNS = 400_000_000_000
# The account that a scan makes of every position costs about ten runs of it.
_SCAN = 10
# Tokens that a seed of the probes runs, and how many seeds are enough, or the least that have a spread.
_TOKENS_A_SEED, _SEEDS, _FEWEST_SEEDS = 800, 8, 2

SCAN_TOKENS = 4000


def runs(model: Model, tokens: int) -> int:
    """How many prompts of so many tokens."""
    parameters = census(model.source.checkpoint.config, model.source.checkpoint.where).n_parameters
    return _RUNS // (max(1, parameters * tokens))


def probe_seeds(model: Model) -> int:
    """How many seeds of the probes; 0 where not even the fewest fit."""
    seeds = min(_SEEDS, runs(model, _TOKENS_A_SEED))
    return seeds if seeds >= _FEWEST_SEEDS else 0


def scan_tokens(model: Model) -> int:
    """How many tokens of text; 0 where they do not fit."""
    return SCAN_TOKENS if runs(model, SCAN_TOKENS * _SCAN) else 0

"""What positions do to a layer's attention: how far queries and keys are turned, and what is added to their scores."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ov_circuits.checkpoint.families import model_type_of
from ov_circuits.checkpoint.layout import Architecture, Rotary
from ov_circuits.errors import CircuitsError


@dataclass(frozen=True, eq=False)
class Turn:
    """How much a layer turns queries and keys.

    Attributes:
        frequencies: radians a position for each pair of coordinates, float64.
        scale: what turned coordinates are multiplied by (1 unless the frequencies are rescaled).
        interleaved: pairs are neighbours; otherwise the two halves of the turned coordinates.
    """

    frequencies: Float[Tensor, " pair"]
    scale: float
    interleaved: bool


def turn(rotary: Rotary, config: Mapping[str, Any], where: str, length: int | None = None) -> Turn:
    """A layer's rotary positions in numbers.

    Args:
        rotary: the layer's.
        config: the content of ``config.json``: rescaled frequencies are worked out from it by transformers.
        where: the file or folder, for messages.
        length: how many positions are run; some rescalings depend on it. None: at most as many as the model was trained on.

    Raises:
        CircuitsError: transformers does not know how to rescale them.
    """
    if rotary.kind == "default":
        pairs = torch.arange(0, rotary.dim, 2, dtype=torch.float64, device="cpu") / rotary.dim
        return Turn(rotary.theta**-pairs, 1.0, rotary.interleaved)
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = copy.deepcopy(dict(config)) | {"model_type": model_type_of(config, where)}
    try:
        theirs: Any = AutoConfig.for_model(**settings)
        group = theirs.rope_parameters if rotary.settings is None else theirs.rope_parameters[rotary.settings]
        given = {} if rotary.settings is None else {"layer_type": rotary.settings}
        frequencies, scale = ROPE_INIT_FUNCTIONS[group["rope_type"]](theirs, seq_len=length, **given)
    except Exception as error:  # what a setting breaks there, and with which error, is transformers' own affair
        raise CircuitsError(
            f"transformers cannot work out rotary positions of kind {rotary.kind!r} from the config of {where} "
            f"({type(error).__name__}: {error}): correct its rope settings"
        ) from error
    return Turn(frequencies.double(), float(scale), rotary.interleaved)


def alibi_slopes(architecture: Architecture) -> Float[Tensor, " head"]:
    """How much a head's scores fall with each position between query and key (Press et al. 2022), float64."""
    n = architecture.n_heads
    whole = 2 ** math.floor(math.log2(n))

    def powers(count: int) -> list[float]:
        return [2 ** (-8 * (i + 1) / count) for i in range(count)]

    # Where the number of heads is no power of two, every second slope of twice as many fills up.
    slopes = powers(whole) + powers(2 * whole)[::2][: n - whole]
    return torch.tensor(slopes, dtype=torch.float64, device="cpu")

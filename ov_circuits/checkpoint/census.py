"""How many numbers a model has, and how many of them are attention output projections. From the config alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ov_circuits.checkpoint.families import family_of, language_part
from ov_circuits.checkpoint.layout import Architecture
from ov_circuits.checkpoint.locate import FOREIGN_FILES, WEIGHT_FILES, read_config
from ov_circuits.checkpoint.stores import exists, read_json


@dataclass(frozen=True)
class Census:
    """What a config implies; made by :func:`ov_circuits.census`.

    Attributes:
        architecture: the config's numbers.
        biases: which of Q, K, V, O have one.
        n_parameters: all parameters of the model; tied embeddings count once.
        output_per_layer: numbers in one layer's W_O.
        output_total: numbers in all layers' W_O.
    """

    architecture: Architecture
    biases: tuple[str, ...]
    n_parameters: int
    output_per_layer: int
    output_total: int

    @property
    def output_share(self) -> float:
        """W_O's part of all parameters, in [0, 1]."""
        return self.output_total / self.n_parameters


def census(config: Mapping[str, Any], where: str = "this config") -> Census:
    """Count the parameters that a config implies, tensor by tensor of its family's table: no weights are needed.

    Args:
        config: the content of a ``config.json``.
        where: the file or folder, for messages.

    Returns:
        Numbers of all parameters and of W_O's, and the architecture.

    Raises:
        CircuitsError: the architecture is not in the table, or the config contradicts itself.
    """
    config = language_part(config, where)
    family = family_of(config, where)
    a = family.architecture(config)
    shapes = family.shapes(a, config)
    tensors = shapes.attention | shapes.embeddings | shapes.mlps
    per_layer = a.n_heads * a.d_head * a.d_model
    biased = (role for role in family.projections if role in a.biases)
    return Census(a, tuple(biased), sum(map(math.prod, tensors.values())), per_layer, per_layer * a.n_layers)


def config_alone(path: Path) -> dict[str, Any] | None:
    """The config when ``path`` is a ``config.json``, or a folder that has one and no weights; otherwise None.

    Raises:
        CircuitsError: the config is there and cannot be read, or the path cannot be looked up.
    """
    if not exists(path):
        return None
    if path.is_file() and path.suffix == ".json":
        return language_part(read_json(path), str(path))
    weights = (*WEIGHT_FILES, *FOREIGN_FILES, "*.gguf")
    if (path / "config.json").is_file() and not any(next(path.glob(name), None) for name in weights):
        return read_config(path)
    return None

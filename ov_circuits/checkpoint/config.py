"""A config's values, checked: whatever a ``config.json`` holds, a number is a number or a sentence says what is wrong with it."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ov_circuits.errors import CircuitsError

# Beyond these a number is a slip of the pen. Tensors are listed layer by layer, so layers are what fills the memory.
_LARGEST = 10**8
MOST_LAYERS = 10**4


@dataclass(frozen=True)
class RopeSettings:
    """What a config says of rotary positions.

    Attributes:
        theta: base of the frequencies.
        kind: how they are rescaled; ``default`` where they are not.
        factor: which part of a head's coordinates is turned.
        group: the layer type under whose name these settings lie; None where all layers share them.
    """

    theta: float
    kind: str
    factor: float
    group: str | None


class Config:
    """A config's values, with the sentence to say when one is missing or makes no sense.

    Args:
        config: the content of a ``config.json``.
        family: the model's family, for messages.
    """

    def __init__(self, config: Mapping[str, Any], family: str) -> None:
        self._config, self.family = config, family

    def refusal(self, key: str, problem: str) -> CircuitsError:
        """The sentence about a key."""
        return CircuitsError(f"the config of this {self.family} model cannot be used: {key} {problem}")

    def raw(self, key: str) -> Any:
        """A value as it stands; None when it is missing."""
        return self._config.get(key)

    def first(self, *keys: str) -> str:
        """The first of these keys that is there; the last where none is."""
        return next((key for key in keys if self._config.get(key) is not None), keys[-1])

    def count(self, key: str, default: Any = None, *, largest: int = _LARGEST) -> int:
        """A positive whole number."""
        value = self._config.get(key)
        value = default if value is None else value
        if value is None:
            raise self.refusal(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refusal(key, f"is {reprlib.repr(value)}, not a positive whole number")
        if value > largest:
            raise self.refusal(
                key, f"is {reprlib.repr(value)}, more than any model has (at most {largest:,} are taken)"
            )
        return value

    def optional_count(self, key: str, default: int | None = None) -> int | None:
        """A positive whole number; None where the config says null, the default where it says nothing."""
        if key not in self._config:
            return default
        return None if self._config[key] is None else self.count(key)

    def number(self, key: str, default: float) -> float:
        """A finite number from 0 on."""
        value = self._config.get(key, default)
        # Compared before it is converted: JSON's whole numbers have no bound. NaN is not between anything.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= sys.float_info.max:
            raise self.refusal(key, f"is {reprlib.repr(value)}, not a finite number from 0 on")
        return float(value)

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """A finite number above 0; None where the config says null, the default where it says nothing."""
        if key not in self._config:
            return default
        if self._config[key] is None:
            return None
        value = self.number(key, 0.0)
        if value == 0:
            raise self.refusal(key, "is 0: it must be above 0, or null")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false; ``"false"`` in quotes would count as true."""
        value = self._config.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.refusal(key, f"is {reprlib.repr(value)}, not true or false")
        return value

    def per_layer(self, key: str, n_layers: int) -> list[Any] | None:
        """A list with an entry a layer; None when it is missing."""
        value = self._config.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != n_layers:
            raise self.refusal(key, f"is {reprlib.repr(value)}, not a list with an entry for each of {n_layers} layers")
        return value

    def rope(
        self,
        default_theta: float,
        *,
        layer_type: str | None = None,
        theta_key: str = "rope_theta",
        factor_key: str = "partial_rotary_factor",
        default_factor: float | None = None,
        shared: bool = True,
    ) -> RopeSettings:
        """Rotary settings, looked for where transformers does: its groups of rotary settings first, keys of their own last.

        Args:
            default_theta, default_factor: what counts where the config says nothing. Without a default factor heads are turned
                whole whatever the config says, as transformers' model of the family turns them.
            layer_type: the name of a group within the groups, which counts where it is there.
            theta_key, factor_key: the keys of their own.
            shared: whether settings that name no layer type are for this one too.
        """
        settings: Mapping[str, Any] = {}
        group = None
        for key in ("rope_scaling", "rope_parameters"):
            found = self._config.get(key)
            if found is not None and not isinstance(found, Mapping):
                raise self.refusal(key, f"is {reprlib.repr(found)}, not an object")
            if not found or settings:
                continue
            if layer_type is not None and isinstance(found.get(layer_type), Mapping):
                settings, group = found[layer_type], layer_type
            elif shared:
                settings = found
        theta = self._rope_number("rope_theta", theta_key, settings, default_theta)
        if theta == 0:
            raise self.refusal(theta_key, "is 0: rotary positions need a base above 0")
        factor = 1.0
        if default_factor is not None:
            factor = self._rope_number("partial_rotary_factor", factor_key, settings, default_factor)
        if not 0 < factor <= 1:
            raise self.refusal(factor_key, f"is {factor}: the part of a head that is rotated is above 0 and at most 1")
        return RopeSettings(theta, str(settings.get("rope_type", settings.get("type", "default"))), factor, group)

    def _rope_number(self, group_key: str, own_key: str, settings: Mapping[str, Any], default: float) -> float:
        for key, values in ((group_key, settings), (own_key, self._config)):
            if values.get(key) is not None:
                return Config(values, self.family).number(key, default)
        return default

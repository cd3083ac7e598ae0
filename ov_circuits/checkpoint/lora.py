"""LoRA adapters of the PEFT library on top of a base checkpoint (Hu et al. 2021).

An adapter adds ``scale * B A`` to a weight [n_out, n_in], A [r, n_in] and B [n_out, r], scale = alpha / r (alpha / sqrt(r) for
rsLoRA). The adapted checkpoint reads the sum; the update itself keeps its factors, so that what it does to a head stays of
low rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ov_circuits.checkpoint.contents import bare_store
from ov_circuits.checkpoint.families import family_of
from ov_circuits.checkpoint.foreign import Settings
from ov_circuits.checkpoint.layout import Family
from ov_circuits.checkpoint.stores import (
    Recipe,
    RecipeStore,
    SafetensorsStore,
    TensorStore,
    TorchStore,
    is_file,
    read_json,
)
from ov_circuits.errors import CircuitsError

CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
_LANGUAGE_MODEL = "language_model."  # in names of a model of images and text
_FACTOR = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.default)?(?:\.weight)?")

# Settings under which the update is not scale * B A on top of the base as it is, and what they mean.
_OUTSIDE = {
    "use_dora": "scales the columns of the sum as well (DoRA)",
    "use_qalora": "pools what A reads (QALoRA)",
    "use_bdlora": "splits A and B into blocks (BD-LoRA)",
    "lora_bias": "has a bias of its own in B",
    "layer_replication": "builds a model with other layers",
    "target_parameters": "adapts bare parameters and no modules",
    "trainable_token_indices": "replaces single tokens' embeddings",
    "alora_invocation_tokens": "is switched on by the prompt (aLoRA)",
    "arrow_config": "is mixed from several adapters by the prompt (Arrow)",
    "ensure_weight_tying": "ties what it replaces",
    "megatron_config": "was made for Megatron's layers",
}
# Initialisations that take the update's start out of the base weights.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class Update:
    """What an adapter adds to one weight, ``B A`` in the order of torch's Linear; the scale is in B.

    Attributes:
        A: [r, n_in].
        B: [n_out, r].
    """

    A: Tensor
    B: Tensor


class Adapter:
    """A LoRA adapter's folder. Only headers are read on opening.

    Attributes:
        folder: where it lies.
        base: the base checkpoint that it names, or None.
        revision: the base's revision, or None.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._where = str(folder / CONFIG)
        if not (folder / CONFIG).is_file():
            raise CircuitsError(f"{folder} holds no adapter: name the folder with PEFT's {CONFIG}")
        self._config = read_json(folder / CONFIG)
        self._settings = Settings(self._config, self._where)
        self._check()
        self.base = self._text("base_model_name_or_path") or None
        self.revision = self._text("revision")
        self._store = _weights(folder)
        self._factors, self._replaced = self._sort()

    @property
    def files(self) -> tuple[Path, ...]:
        """The files it is made of."""
        return tuple(self.folder / name for name in (CONFIG, *_WEIGHTS))

    def modules(self) -> list[str]:
        """The adapted modules, by the base model's names."""
        return list(self._factors)

    def replaced(self) -> list[str]:
        """The tensors that it replaces as a whole (``modules_to_save``, biases)."""
        return list(self._replaced)

    def update(self, module: str) -> Update | None:
        """What is added to a module's weight; None when nothing is.

        Raises:
            CircuitsError: its factors do not fit each other.
        """
        names = self._factors.get(module)
        if names is None:
            return None
        a, b = self._store.read(names["A"]), self._store.read(names["B"])
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise CircuitsError(
                f"the factors of {module} in {self._store.origin(names['A'])} have shapes {list(a.shape)} and {list(b.shape)}, "
                "which are no A [r, in] and B [out, r]: the adapter is damaged"
            )
        return Update(a, b * self._scale(module, a.shape[0]))

    def adapt(self, base: TensorStore, config: Mapping[str, Any], where: str) -> TensorStore:
        """The base's tensors with the adapter's updates in them.

        Raises:
            CircuitsError: it adapts what the base does not have, or in another shape.
        """
        family = family_of(config, where)
        base = bare_store(base, family)
        names = {name.removeprefix(family.prefix): name for name in base.names()}
        recipes = {name: Recipe.of(base, name) for name in base.names()}
        # First what is replaced: PEFT saves an adapted embedding's base along with its factors.
        for tensor in self._replaced:
            name = self._target(names, tensor, family, missing=f"{family.unembed}.weight")
            new = Recipe.of(self._store, self._replaced[tensor])
            if name in recipes and recipes[name].shape != new.shape:
                raise CircuitsError(
                    f"{new.origin} replaces {name} with a tensor of shape {list(new.shape)}, the base has "
                    f"{list(recipes[name].shape)}: adapter and base belong to different models"
                )
            recipes[name] = new
        embed, unembed = names.get(f"{family.embed}.weight"), f"{family.unembed}.weight"
        for module in self._factors:
            if module == family.unembed and unembed not in recipes and embed is not None:  # tied: the embedding stays
                recipes[unembed] = Recipe.of(base, embed)
            name = self._target(names, f"{module}.weight", family, missing=unembed if unembed in recipes else None)
            turned = "embedding" in self._factors[module] or _stored_in_out(family, module)
            recipes[name] = self._added(recipes[name], module, turned)
        return RecipeStore(recipes | self._untied(base, names, family, recipes))

    # -- what it says -----------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        kind = self._settings.get("peft_type")
        if kind != "LORA":
            raise self._settings.refusal("peft_type", f"is {str(kind)[:80]!r}; of adapters LORA is read")
        for key, meaning in _OUTSIDE.items():
            if self._settings.get(key):
                raise self._settings.refusal(key, f"is set: the adapter {meaning}, which is not read")
        start = str(self._settings.get("init_lora_weights", "")).lower()
        if start.startswith(_CHANGES_BASE):
            raise self._settings.refusal(
                "init_lora_weights",
                f"is {start[:80]!r}, which changes the base weights as well: save it with path_initial_model_for_weight_conversion",
            )

    def _text(self, key: str) -> str | None:
        value = self._settings.get(key)
        if value is not None and not isinstance(value, str):
            raise self._settings.refusal(key, "is no text")
        return value

    def _number(self, key: str, default: Any, module: str) -> float:
        """A setting of a module: its pattern's, else the adapter's."""
        pattern_key = {"r": "rank_pattern", "lora_alpha": "alpha_pattern"}[key]
        patterns = self._settings.get(pattern_key, {})
        if not isinstance(patterns, Mapping):
            raise self._settings.refusal(pattern_key, "is no object")
        value = self._settings.get(key, default)
        for pattern, special in patterns.items():
            if _matches(str(pattern), module, self._where):
                value = special
                break
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e9:
            raise self._settings.refusal(key, f"is {str(value)[:80]} for {module}, no sensible number")
        return float(value)

    def _scale(self, module: str, rank: int) -> float:
        said = self._number("r", rank, module)
        if said != rank:
            raise self._settings.refusal("r", f"is {said:g} for {module}, whose factors have rank {rank}")
        alpha = self._number("lora_alpha", 8, module)
        return alpha / (math.sqrt(rank) if self._settings.flag("use_rslora") else max(rank, 1))

    # -- what it holds ----------------------------------------------------------------------------------------------------

    def _sort(self) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
        """Stored names by module and factor, and of tensors that are replaced."""
        factors: dict[str, dict[str, str]] = {}
        replaced: dict[str, str] = {}
        for name in self._store.names():
            short = name.removeprefix(_PREFIX).replace(_LANGUAGE_MODEL, "", 1)
            match = _FACTOR.fullmatch(short)
            if match is not None:
                factors.setdefault(match[1], {})[match[3]] = name
                if match[2]:
                    factors[match[1]]["embedding"] = name
            elif "lora_" in short:
                raise CircuitsError(
                    f"{self._store.origin(name)} holds {name}, which is neither A nor B of a LoRA: this kind of adapter is not read"
                )
            else:
                replaced[short.replace(".modules_to_save.default", "").replace(".base_layer", "")] = name
        for module, found in factors.items():
            if not {"A", "B"} <= found.keys():
                raise CircuitsError(f"{self.folder} holds only one factor of {module}: the adapter is incomplete")
        if not factors and not replaced:
            raise CircuitsError(f"{self.folder} holds an adapter without a tensor: copy it again")
        return factors, replaced

    def _target(self, names: Mapping[str, str], wanted: str, family: Family, missing: str | None = None) -> str:
        short = wanted.removeprefix(family.prefix)
        if short not in names and short != missing:
            raise CircuitsError(
                f"the adapter in {self.folder} changes {wanted}, which the base does not have: they belong to different models"
            )
        return names.get(short, short)

    def _added(self, base: Recipe, module: str, turned: bool) -> Recipe:
        a, b = (self._store.shape(self._factors[module][factor]) for factor in "AB")
        shape = (b[0], a[1]) if len(a) == len(b) == 2 else ()
        if base.shape != (shape[::-1] if turned else shape):
            raise CircuitsError(
                f"the adapter in {self.folder} adds {list(b)} times {list(a)} to {module}, whose weight is {list(base.shape)}: "
                "adapter and base belong to different models"
            )

        def add(weight: Tensor) -> Tensor:
            update = self.update(module)
            assert update is not None
            delta = update.B @ update.A
            return weight.float() + (delta.T if turned else delta)

        return base.then(add)

    def _untied(
        self, base: TensorStore, names: Mapping[str, str], family: Family, recipes: Mapping[str, Recipe]
    ) -> dict[str, Recipe]:
        """The unembedding of a base that ties it: PEFT changes the embedding alone, the unembedding stays what it was."""
        embed, unembed = f"{family.embed}.weight", f"{family.unembed}.weight"
        changed = {f"{module}.weight" for module in self._factors} | self._replaced.keys()
        if (
            embed in {name.removeprefix(family.prefix) for name in changed}
            and embed in names
            and unembed not in recipes
        ):
            return {unembed: Recipe.of(base, names[embed])}
        return {}


def _weights(folder: Path) -> TensorStore:
    for name in _WEIGHTS:
        if is_file(folder / name):
            return SafetensorsStore([folder / name]) if name.endswith(".safetensors") else TorchStore([folder / name])
    raise CircuitsError(
        f"{folder} has an {CONFIG} but neither {' nor '.join(_WEIGHTS)}: copy the adapter's weights there"
    )


def _matches(pattern: str, module: str, where: str) -> bool:
    """Whether a rank or alpha pattern means a module, as PEFT decides it. Patterns are names; other expressions could hang."""
    if not re.fullmatch(r"[\w.*^$|()\[\]\\+-]{1,200}", pattern) or re.search(r"[*+)]\s*[*+{]", pattern):
        raise CircuitsError(f"{where} has the pattern {pattern[:80]!r}, which is no module's name")
    try:
        return re.match(rf"(.*\.)?({pattern})$", module) is not None
    except re.error as error:
        raise CircuitsError(f"{where} has the pattern {pattern[:80]!r}, which is no expression ({error})") from error


def _stored_in_out(family: Family, module: str) -> bool:
    """Whether the base keeps this module's weight (in, out), as GPT-2's Conv1D does."""
    short = module.removeprefix(family.prefix)
    for projection in (*family.projections.values(), *family.mlp.values()):
        before, _, after = projection.name.partition("{layer}")
        if re.fullmatch(rf"{re.escape(before)}[0-9]+{re.escape(after)}", short):
            return projection.stored_in_out
    return False


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and no model of its own."""
    return is_file(folder / CONFIG)


__all__ = ["CONFIG", "Adapter", "Update", "is_adapter"]

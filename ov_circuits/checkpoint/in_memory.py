"""Models that are in memory already: transformers models, TransformerLens bridges, state dicts. Weights are used without a copy."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ov_circuits.checkpoint.locate import Checkpoint
from ov_circuits.checkpoint.stores import MemoryStore
from ov_circuits.errors import CircuitsError


def is_bridge(x: Any) -> bool:
    """Whether ``x`` is a TransformerBridge, without importing TransformerLens: if nobody has, it is none."""
    return _is_a(x, "transformer_lens.model_bridge.transformer_bridge", "TransformerBridge")


def is_network(x: Any) -> bool:
    """Whether ``x`` is a transformers model, without importing transformers."""
    return _is_a(x, "transformers.modeling_utils", "PreTrainedModel")


def _is_a(x: Any, module: str, name: str) -> bool:
    found = sys.modules.get(module)
    return found is not None and isinstance(x, getattr(found, name))


def from_bridge(bridge: Any) -> Checkpoint:
    """The Hugging Face weights that a bridge runs on.

    Raises:
        CircuitsError: the bridge's weights were processed (``enable_compatibility_mode``): they are no longer the
            checkpoint's, and a second folding would be wrong.
    """
    if getattr(bridge, "compatibility_mode", False) or getattr(bridge.cfg, "layer_norm_folding", False):
        raise CircuitsError(
            "this TransformerBridge is in compatibility mode: its weights are folded and centred already. "
            "Pass a bridge before enable_compatibility_mode(), and choose a view here"
        )
    model = bridge.original_model
    prefix = "_original_component."
    tensors = {name.replace(prefix, ""): value for name, value in model.state_dict().items()}
    return Checkpoint(
        name=str(bridge.cfg.model_name),
        where="the TransformerBridge",
        config=model.config.to_dict(),
        store=MemoryStore(tensors, origin="the TransformerBridge"),
    )


def from_network(network: Any) -> Checkpoint:
    """The weights and the config of a transformers model.

    Raises:
        CircuitsError: its weights are not there (on the device ``meta``).
    """
    where = f"this {type(network).__name__}"
    name = str(network.config.name_or_path or type(network).__name__)
    return _checkpoint(network.state_dict(), network.config.to_dict(), name, where)


def from_tensors(tensors: Mapping[str, Any], config: Any) -> Checkpoint:
    """A state dict, or any dictionary of tensors under the names of a checkpoint.

    Args:
        tensors: names to tensors; what is no tensor is passed over.
        config: what its ``config.json`` would hold, or a transformers config.

    Raises:
        CircuitsError: no config, or nothing in it that could be one; no tensors, or tensors without data.
    """
    if config is None:
        raise CircuitsError(
            "a dictionary of tensors does not say how many heads there are: give its config too, "
            "ov.load(tensors, config=...), as a dictionary or a transformers config"
        )
    settings = config if isinstance(config, Mapping) else getattr(config, "to_dict", dict)()
    if not settings:
        raise CircuitsError(f"a config is a dictionary or a transformers config, not a {type(config).__name__}")
    plain = {str(name): tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    if not plain:
        raise CircuitsError("the dictionary holds no tensors: give a model's state_dict()")
    return _checkpoint(
        plain, dict(settings), str(settings.get("_name_or_path") or "tensors"), "the dictionary of tensors"
    )


def _checkpoint(tensors: Mapping[str, Tensor], config: dict[str, Any], name: str, where: str) -> Checkpoint:
    absent = next((key for key, tensor in tensors.items() if tensor.device.type == "meta"), None)
    if absent is not None:
        raise CircuitsError(f"tensor {absent} of {where} is on the device 'meta', without data: load its weights first")
    return Checkpoint(name=name, where=where, config=config, store=MemoryStore(tensors, origin=where))

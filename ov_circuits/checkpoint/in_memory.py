"""Models that are in memory already: transformers models, TransformerLens bridges, state dicts. Weights are used without a copy."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ov_circuits.checkpoint.families import language_part
from ov_circuits.checkpoint.locate import Checkpoint, refuse_packed
from ov_circuits.checkpoint.stores import MemoryStore, no_warnings
from ov_circuits.errors import CircuitsError


def is_bridge(x: Any) -> bool:
    """Whether ``x`` is a TransformerBridge, without importing TransformerLens: if nobody has, it is none."""
    return _is_a(x, "transformer_lens.model_bridge.transformer_bridge", "TransformerBridge")


def is_network(x: Any) -> bool:
    """Whether ``x`` is a transformers model, without importing transformers."""
    return _is_a(x, "transformers.modeling_utils", "PreTrainedModel")


def is_language_model(network: Any) -> bool:
    """Whether a transformers model is the very one that is split: with a head, and not one of images that has it inside."""
    return network.get_output_embeddings() is not None and _is_language_alone(network)


def _is_language_alone(network: Any) -> bool:
    return network.config.get_text_config() is network.config


def unwrapped(x: Any) -> Any:
    """The model inside what ``torch.compile`` and data parallelism put around it."""
    while True:
        if _is_a(x, "torch._dynamo.eval_frame", "OptimizedModule"):
            x = x._orig_mod
        elif isinstance(x, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            x = x.module
        else:
            return x


def is_peft(x: Any) -> bool:
    """Whether ``x`` is a model inside the PEFT library's, without importing that."""
    return _is_a(x, "peft.peft_model", "PeftModel") or _is_a(x, "peft.tuners.tuners_utils", "BaseTuner")


def _is_a(x: Any, module: str, name: str) -> bool:
    found = sys.modules.get(module)
    return found is not None and isinstance(x, getattr(found, name))


# How a model with an adapter is to be given; its own weights are the base's.
UNMERGED = (
    "has an adapter beside its weights: give adapted.merge_and_unload(), or save the adapter and open its folder, "
    "which keeps the low rank of what it adds"
)


def from_bridge(bridge: Any) -> Checkpoint:
    """The Hugging Face weights that a bridge runs on.

    Raises:
        CircuitsError: the bridge's weights were processed (``enable_compatibility_mode``, ``process_weights``): they are no
            longer the checkpoint's, and a second folding would be wrong. Or it runs a model of images and text.
    """
    processed = (getattr(bridge, name, False) for name in ("compatibility_mode", "_weights_processed"))
    if any(processed) or getattr(bridge.cfg, "layer_norm_folding", False):
        raise CircuitsError(
            "this TransformerBridge is in compatibility mode, or its weights were processed: they are folded and centred "
            "already. Pass a bridge before enable_compatibility_mode() or process_weights(), and choose a view here"
        )
    model = bridge.original_model
    if not _is_language_alone(model):
        raise CircuitsError(
            "this TransformerBridge runs a model of images and text: give its original_model, whose language part is read"
        )
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
        tensors: names to tensors, arrays of numpy are taken as well; what is neither is passed over.
        config: what its ``config.json`` would hold, or a transformers config.

    Raises:
        CircuitsError: no config, or nothing in it that could be one; no tensors, or tensors without data.
    """
    if config is None:
        raise CircuitsError(
            "a dictionary of tensors does not say how many heads there are: give its config too, "
            "ov.load(tensors, config=...), as a dictionary or a transformers config"
        )
    made = not isinstance(config, type) and hasattr(config, "to_dict")
    settings = config if isinstance(config, Mapping) else config.to_dict() if made else {}
    if not settings:
        raise CircuitsError(f"a config is a dictionary or a transformers config, not a {type(config).__name__}")
    plain = {str(name): _as_tensor(str(name), x) for name, x in tensors.items() if isinstance(x, (Tensor, np.ndarray))}
    if not plain:
        inside = next((f" as tensors[{name!r}]" for name, x in tensors.items() if isinstance(x, Mapping) and x), "")
        raise CircuitsError(f"the dictionary holds no tensors: give a model's state_dict(){inside}")
    return _checkpoint(
        plain, dict(settings), str(settings.get("_name_or_path") or "tensors"), "the dictionary of tensors"
    )


def _as_tensor(name: str, x: Tensor | np.ndarray[Any, np.dtype[Any]]) -> Tensor:
    """A tensor, or an array as one without a copy."""
    if isinstance(x, Tensor):
        return x
    try:
        with no_warnings():  # of an array that may not be written to; nothing here writes
            return torch.from_numpy(x)
    except (TypeError, ValueError) as error:
        raise CircuitsError(
            f"the array {name} is none that torch takes ({error}): give np.ascontiguousarray(..)"
        ) from error


# What stands in a tensor's name when the weight is made while the model runs, and how to have it as one tensor.
_MADE_WHEN_RUN = {
    ".base_layer.": UNMERGED,
    ".parametrizations.": "is parametrized: call torch.nn.utils.parametrize.remove_parametrizations first",
    "_original_component.": "is inside a TransformerBridge: give the bridge itself",
    "weight_orig.": "is pruned by a mask: call torch.nn.utils.prune.remove first",
}


def _checkpoint(tensors: Mapping[str, Any], config: dict[str, Any], name: str, where: str) -> Checkpoint:
    for key, tensor in tensors.items():
        made = next((how for part, how in _MADE_WHEN_RUN.items() if part in f"{key}."), None)
        if made is not None:
            raise CircuitsError(f"{where} {made} (its tensor {key})")
        if not isinstance(tensor, Tensor):
            raise CircuitsError(f"{where} holds a {type(tensor).__name__} as {key}: quantised models are not read")
        if tensor.layout != torch.strided or tensor.is_nested:
            raise CircuitsError(f"tensor {key} of {where} is sparse or nested: give tensor.to_dense()")
    absent = next((key for key, tensor in tensors.items() if tensor.device.type == "meta"), None)
    if absent is not None:
        raise CircuitsError(f"tensor {absent} of {where} is on the device 'meta', without data: load its weights first")
    store = MemoryStore(tensors, origin=where)
    refuse_packed(store, where)
    return Checkpoint(name=name, where=where, config=language_part(config, where), store=store)

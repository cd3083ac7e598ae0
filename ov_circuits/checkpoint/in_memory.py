"""Models that are in memory already: TransformerLens bridges, their weights used without a copy."""

from __future__ import annotations

import sys
from typing import Any

from ov_circuits.checkpoint.locate import Checkpoint
from ov_circuits.checkpoint.stores import MemoryStore
from ov_circuits.errors import CircuitsError


def is_bridge(x: Any) -> bool:
    """Whether ``x`` is a TransformerBridge, without importing TransformerLens: if nobody has, it is none."""
    module = sys.modules.get("transformer_lens.model_bridge.transformer_bridge")
    return module is not None and isinstance(x, module.TransformerBridge)


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

"""Runs the model tensor-parallel: transformers' own plan distributes it, each rank's heads are recorded where they live.

Start a script under torchrun, one process a rank::

    model = tensor_parallel(ov.load("my-llama"))
    trace = model.trace(prompt)          # on every rank: each records its own heads
    trace.ledger(" Paris", " Rome")      # on every rank: the whole account, gathered by one all-reduce

Collective: what gathers (ledgers, norms of all heads, the certificate) must be called on every rank.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ov_circuits.errors import CircuitsError
from ov_circuits.trace.engines import build
from ov_circuits.trace.shards import Shard

if TYPE_CHECKING:
    from ov_circuits.model import Model


def tensor_parallel(model: Model, mesh: Any = None) -> Model:
    """Let a model's prompts run on all ranks of this process group, each with a part of the heads.

    Args:
        model: a checkpoint whose family has a tensor-parallel plan in transformers (Llama and its relatives; not GPT-2).
        mesh: a one-dimensional ``DeviceMesh`` over all ranks, or None for the default process group, which is started from
            torchrun's environment where it is not there yet.

    Returns:
        The model; its checkpoint now runs distributed, in whatever view it is looked at.

    Raises:
        CircuitsError: not under torchrun, the ranks do not divide the heads, no plan, a mesh that does not cover the ranks,
            or the model was run in one process before.
    """
    group = _group(mesh)
    source, a = model.source, model.architecture
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if source.shard is not None:
        return model
    if source.network is not None:
        raise CircuitsError(
            f"{model.name} runs in this process already: open it anew, then distribute it before a prompt"
        )
    for name, count in (("query heads", a.n_heads), ("key/value heads", a.n_kv_heads)):
        if count % ranks:
            raise CircuitsError(
                f"{ranks} ranks do not divide the {count} {name} of {model.name}: start as many as divide both "
                f"{a.n_heads} and {a.n_kv_heads}"
            )
    if ranks > 1:
        source.network = build(source, **_plan(model, ranks))
        held = a.n_heads // ranks
        source.shard = Shard(rank * held, held, a.n_heads, group)
    return model


def _group(mesh: Any) -> Any:
    """The process group that shares the heads."""
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise CircuitsError("tensor parallelism needs several processes: start the script with torchrun")
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if mesh is None:
        return dist.group.WORLD
    if mesh.ndim != 1 or mesh.size() != dist.get_world_size():
        raise CircuitsError(
            f"the mesh has the shape {tuple(mesh.shape)}, but {dist.get_world_size()} ranks run: give one dimension over all"
        )
    return mesh.get_group()


def _plan(model: Model, ranks: int) -> dict[str, Any]:
    from transformers import AutoConfig
    from transformers.distributed import DistributedConfig

    config = AutoConfig.for_model(**model.source.checkpoint.config)
    if not getattr(config, "base_model_tp_plan", None):
        raise CircuitsError(
            f"transformers has no tensor-parallel plan for {config.model_type} models: run it in one process"
        )
    return {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=ranks)}


def rank_facts(model: Model, layer: int) -> dict[str, Any]:
    """What this rank holds of a layer: ``rank``, ``heads`` (first and last), ``block``: its rows of the (in, out) W_O."""
    source = model.source
    shard = source.shard
    if shard is None:
        raise CircuitsError(f"{model.name} is not distributed: call tensor_parallel first")
    name = source.family.within + source.family.projections["O"].name.format(layer=layer)
    weight = source.network.base_model.get_submodule(name).weight
    block = weight.to_local().mT  # transformers' linear layers store (out, in)
    return {"rank": dist.get_rank(shard.group), "heads": (shard.first, shard.first + shard.held - 1), "block": block}

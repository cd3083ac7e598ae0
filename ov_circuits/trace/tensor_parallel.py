"""Runs the model tensor-parallel: transformers' own plan distributes it, each rank's heads are recorded where they live.

Start a script under torchrun, one process a rank::

    model = ov.distributed.tensor_parallel(ov.load("my-llama"))
    trace = model.trace(prompt)          # on every rank: each records its own heads
    trace.ledger(" Paris", " Rome")      # on every rank: the whole account, gathered by one all-reduce

Collective: what gathers (ledgers, norms of all heads, the certificate) must be called on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ov_circuits.errors import CircuitsError
from ov_circuits.processes import ranks_of
from ov_circuits.trace.engines import build, config_of
from ov_circuits.trace.shards import Shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ov_circuits.model import Model


def tensor_parallel(model: Model, mesh: ProcessGroup | DeviceMesh | None = None) -> Model:
    """Let a model's prompts run on all ranks of this process group, each with a part of the heads.

    Args:
        model: a checkpoint whose family has a tensor-parallel plan in transformers (Llama and its relatives; not GPT-2).
        mesh: a one-dimensional ``DeviceMesh`` or a process group over all ranks, or None for the default group, which is made
            from torchrun's environment where there is none, and ended with the process.

    Returns:
        The model; its checkpoint now runs distributed, in whatever view it is looked at.

    Raises:
        CircuitsError: not under torchrun, the ranks do not divide the heads, no plan, a mesh that does not cover the ranks,
            a checkpoint that cannot run, or one that was run in one process before.
    """
    source, a = model.source, model.architecture
    group = ranks_of(mesh)
    ranks = group.size
    if ranks != dist.get_world_size():
        raise CircuitsError(
            f"{dist.get_world_size()} processes run and the mesh or group has {ranks} of them: a prompt runs on all"
        )
    if source.shard is not None:
        return model
    if model.why_not_run is not None:
        raise CircuitsError(f"{model.name} cannot run a prompt: {model.why_not_run}")
    if source.network is not None:
        raise CircuitsError(
            f"{model.name} runs in this process already: open it anew, then distribute it before a prompt"
        )
    distribution = _plan(model, ranks)
    for name, count in (("query heads", a.n_heads), ("key/value heads", a.n_kv_heads)):
        if count % ranks:
            raise CircuitsError(
                f"{ranks} ranks do not divide the {count} {name} of {model.name}: start as many as divide both "
                f"{a.n_heads} and {a.n_kv_heads}"
            )
    if ranks > 1:
        source.network = build(source, **distribution)
        held = a.n_heads // ranks
        source.shard = Shard(dist.get_rank() * held, held, a.n_heads, group)  # transformers counts all processes
    return model


def _plan(model: Model, ranks: int) -> dict[str, Any]:
    """How :func:`~ov_circuits.trace.engines.build` is to distribute the model.

    Raises:
        CircuitsError: transformers does not run the family so that a rank has its own heads and their block of W_O.
    """
    from transformers.distributed import DistributedConfig

    config, family = config_of(model.source), model.source.family
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise CircuitsError(
            f"transformers has no tensor-parallel plan for {config.model_type} models: run it in one process"
        )
    output = (family.within + family.projections["O"].name).format(layer="*")
    if plan.get(output) != "rowwise":  # OLMo 2 and Phi 3 gather all heads on every rank before they go on
        raise CircuitsError(
            f"transformers' tensor-parallel plan for {config.model_type} models does not leave each rank its own heads: "
            "run it in one process"
        )
    return {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=ranks)}


def rank_facts(model: Model, layer: int) -> dict[str, Any]:
    """What this rank holds of a layer: ``rank``, ``heads`` (first and last), ``block``: its rows of the (in, out) W_O."""
    source = model.source
    shard = source.shard
    if shard is None or shard.ranks is None:
        raise CircuitsError(f"{model.name} is not distributed: call tensor_parallel first")
    name = source.family.within + source.family.projections["O"].name.format(layer=layer)
    weight = source.network.base_model.get_submodule(name).weight
    block = weight.detach().to_local().mT  # transformers' linear layers store (out, in)
    return {"rank": shard.ranks.rank, "heads": (shard.first, shard.first + shard.held - 1), "block": block}

"""What a checkpoint holds, its headers compared with its config."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ov_circuits.checkpoint.layout import Architecture, Family
from ov_circuits.checkpoint.stores import RenamedStore, TensorStore
from ov_circuits.errors import CircuitsError

# What wrappers put into the names of the modules inside them: torch.compile, FSDP, activation checkpointing.
_WRAPPER = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def bare_store(store: TensorStore, family: Family) -> TensorStore:
    """A store without what was put around the model when it was saved; see :func:`bare_names`."""
    names = bare_names(store.names(), family)
    return store if list(names) == list(store.names()) else RenamedStore(store, names)


def bare_names(stored: Iterable[str], family: Family) -> dict[str, str]:
    """Names without what was put around the model when it was saved, wrappers' and whatever stands before all -> those stored.

    Data parallelism writes ``module.model.layers..``, Lightning ``net.model.layers..``. What stands in front is found by the
    first layer's output projection; where several models lie in one file, nothing is taken off.
    """
    short = {name: _WRAPPER.sub("", name) for name in stored}
    sign = f"{family.projections['O'].name.format(layer=0)}.weight"
    fronts = {
        name.removesuffix(sign).removesuffix(family.prefix) for name in short.values() if name.endswith(f".{sign}")
    }
    front = fronts.pop() if len(fronts) == 1 else ""
    names = {short[name].removeprefix(front): name for name in short}
    return {name: name for name in short} if len(names) < len(short) else names


def canonical_store(store: TensorStore, family: Family, wanted: Collection[str]) -> TensorStore:
    """The wanted tensors of a store, the family's optional prefix taken off their names.

    Whatever else lies in the file is hidden, as transformers ignores it: mask buffers, or biases that the config rules out.

    Raises:
        CircuitsError: a tensor is there under both of its names.
    """
    names: dict[str, str] = {}
    for name in store.names():
        short = family.short_name(name)
        if short not in wanted:
            continue
        if short in names:
            raise CircuitsError(
                f"{store.origin(name)} holds both {names[short]} and {name}, which are names of the same tensor: "
                "two checkpoints were merged into one; write it again from one of them"
            )
        names[short] = name
    return RenamedStore(store, names)


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds beyond attention weights."""

    embeddings: bool
    mlps: bool
    missing: tuple[str, ...]


def check_contents(
    store: TensorStore, family: Family, architecture: Architecture, config: Mapping[str, Any], where: str
) -> tuple[TensorStore, Contents]:
    """Compare the headers with the config: every attention tensor must be there, all that is there must have its shape.

    Returns:
        The tensors of this architecture under their canonical names, and what they amount to.

    Raises:
        CircuitsError: an attention tensor is missing, or a shape contradicts the config.
    """
    shapes = family.shapes(architecture, config, {name.removeprefix(family.prefix) for name in store.names()})
    # Some files store an unembedding though the config ties it.
    unembedding = {f"{family.unembed}.weight": (architecture.n_vocab, architecture.d_model)}
    wanted = shapes.attention | shapes.embeddings | shapes.mlps | unembedding
    store = canonical_store(store, family, wanted)
    for name, expected in wanted.items():
        if name in store and store.shape(name) != expected:
            raise CircuitsError(
                f"tensor {name} in {store.origin(name)} has shape {list(store.shape(name))}, but the config of {where} "
                f"implies {list(expected)}: the config and the weights belong to different models"
            )
    absent = [name for name in shapes.attention if name not in store]
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise CircuitsError(
            f"{where} lacks the tensor {absent[0]}{more}, which a {family.name} attention layer needs: "
            "the checkpoint is incomplete, or config.json says more layers than there are"
        )
    lacking_embeddings = [name for name in shapes.embeddings if name not in store]
    lacking_mlps = [name for name in shapes.mlps if name not in store]
    contents = Contents(not lacking_embeddings, not lacking_mlps, tuple(lacking_embeddings + lacking_mlps))
    return store, contents

"""Models that are the same function, or the same circuits under other names, have the same numbers: all of them, nulls too.

A model is rewritten in ways that the definitions cannot see: heads' bases turned and scaled, heads and tokens in another order,
the stream turned, gains folded, constants that LayerNorm takes off. What is compared needs no number worked out beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import tiny_model
from torch import Tensor

import ov_circuits as ov

PROMPT, ANSWER, AGAINST = [1, 5, 7, 5, 7, 3], 4, 9
N_HEADS, D_HEAD, D_MODEL, N_VOCAB = 4, 8, 32, 23


def network(family: str) -> Any:
    return tiny_model(family, seed=3, **({"tie_word_embeddings": False} if family == "gpt2" else {}))


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotation(n: int, seed: int) -> Tensor:
    return torch.linalg.qr(noise(n, n, seed=seed)).Q


# -- how a model is rewritten -----------------------------------------------------------------------------------------


def edit_heads(net: Any, role: str, change: Callable[[Tensor], Tensor]) -> None:
    """Change a layer's projection of one role, as [in, head, d_head] for Q, K, V (with biases) and [head, d_head, out] for O."""

    def changed(W: Tensor) -> Tensor:
        by_head = W.unflatten(0, (-1, D_HEAD)) if role == "O" else W.unflatten(-1, (-1, D_HEAD))
        return change(by_head.double()).to(W).flatten(*((0, 1) if role == "O" else (-2, -1)))

    layers = net.model.layers if hasattr(net, "model") else net.transformer.h
    for layer in layers:
        if hasattr(net, "model"):  # Linear: (out, in)
            W = getattr(layer.self_attn, f"{role.lower()}_proj").weight
            W.copy_(changed(W.mT).mT)
        elif role == "O":
            layer.attn.c_proj.weight.copy_(changed(layer.attn.c_proj.weight))
        else:
            part = slice("QKV".index(role) * D_MODEL, ("QKV".index(role) + 1) * D_MODEL)
            for tensor in (layer.attn.c_attn.weight, layer.attn.c_attn.bias.unsqueeze(0)):
                tensor[:, part] = changed(tensor[:, part])


def scale_values(factor: float | Tensor) -> Callable[[Any], None]:
    """W_V times a factor, for each of a head's dimensions where it is a tensor, and W_O over it."""

    def edit(net: Any) -> None:
        edit_heads(net, "V", lambda W: W * factor)
        edit_heads(net, "O", lambda W: W / torch.as_tensor(factor).unsqueeze(-1))

    return edit


def turn_values(net: Any) -> None:
    Q = rotation(D_HEAD, 0)
    edit_heads(net, "V", lambda W: W @ Q)
    edit_heads(net, "O", lambda W: Q.mT @ W)


def scale_queries(net: Any) -> None:
    edit_heads(net, "Q", lambda W: W * 1e-4)
    edit_heads(net, "K", lambda W: W * 1e4)


def turn_queries(net: Any) -> None:
    """By any rotation; for rotary models by one of each pair of dimensions, which commutes with theirs."""
    Q = rotation(D_HEAD, 1)
    if hasattr(net, "model"):
        angles = noise(D_HEAD // 2, seed=2)
        cosine, sine = angles.cos().diag(), angles.sin().diag()
        Q = torch.cat([torch.cat([cosine, sine], 1), torch.cat([-sine, cosine], 1)])
    for role in "QK":
        edit_heads(net, role, lambda W: W @ Q)


def reverse_heads(net: Any) -> None:
    for role in "QKV":
        edit_heads(net, role, lambda W: W.flip(1))
    edit_heads(net, "O", lambda W: W.flip(0))


TOKENS = torch.randperm(N_VOCAB, generator=torch.Generator().manual_seed(4))  # old id -> new id


def permute_tokens(net: Any) -> None:
    for embedding in (net.get_input_embeddings(), net.get_output_embeddings()):
        embedding.weight[TOKENS] = embedding.weight.clone()


def turn_stream(net: Any, Q: Tensor | None = None) -> None:
    """Of an RMSNorm model: the gains go into the readers, then all directions of the stream turn."""
    Q = (rotation(D_MODEL, 5) if Q is None else Q).float()

    def read(module: Any, gain: Tensor) -> None:
        module.weight.copy_((module.weight * gain) @ Q)

    for layer in net.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for module in (attention.q_proj, attention.k_proj, attention.v_proj):
            read(module, layer.input_layernorm.weight)
        for module in (mlp.gate_proj, mlp.up_proj):
            read(module, layer.post_attention_layernorm.weight)
        for module in (attention.o_proj, mlp.down_proj):
            module.weight.copy_(Q.mT @ module.weight)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.fill_(1)
    net.model.embed_tokens.weight.copy_(net.model.embed_tokens.weight @ Q)
    read(net.lm_head, net.model.norm.weight)
    net.model.norm.weight.fill_(1)


def fold_gains(net: Any) -> None:
    turn_stream(net, torch.eye(D_MODEL))


def add_means(net: Any) -> None:
    """What every writer of a LayerNorm model adds to all dimensions alike is taken off by all readers."""
    body = net.transformer
    for embedding in (body.wte, body.wpe):
        embedding.weight.add_(noise(len(embedding.weight), 1, seed=6))
    for layer in body.h:
        for module in (layer.attn.c_proj, layer.mlp.c_proj):
            module.weight.add_(noise(len(module.weight), 1, seed=7))
            module.bias.add_(0.7)


# -- what is compared -------------------------------------------------------------------------------------------------


def directions(model: ov.Model) -> pd.DataFrame:
    """Both ends of the leading direction of every head."""
    rows = []
    for layer in range(model.n_layers):
        found = ov.directions(model, layer, k=1, tokens=3)
        for side in ("reads", "writes"):
            for end in ("plus", "minus"):
                ids, values = (getattr(getattr(found, side), name)[:, 0] for name in (end, f"{end}_values"))
                for head in range(model.n_heads):
                    place = {"head": f"{layer}.{head}", "side": side, "end": end}
                    rows += [
                        place | {"token": int(ids[head, i]), "value": float(values[head, i])}
                        | {"singular_value": float(found.values[head, 0]), "energy": float(found.energy[head, 0])}
                        for i in range(3)
                    ]  # fmt: skip
    return pd.DataFrame(rows)


def ledger(model: ov.Model, tokens: Tensor) -> pd.DataFrame:
    renamed = tokens.tolist()
    trace = model.trace([renamed[token] for token in PROMPT])
    return trace.ledger(renamed[ANSWER], renamed[AGAINST])


TABLES: dict[str, tuple[list[str], Callable[[ov.Model, Tensor], pd.DataFrame]]] = {
    "scoreboard": (["head"], lambda model, _: ov.scoreboard(model, "all")),
    "composition": (["sender", "receiver", "kind"], lambda model, _: ov.composition(model, "all")),
    "rank_copying": (["head"], lambda model, _: ov.rank_copying(model, ranks=True)),
    "qk_spectra": (["head"], lambda model, _: ov.qk_spectra(model).frame()),
    "space_map": (["head"], lambda model, _: ov.space_map(model)),
    "overlap_of_queries": (["writer", "reader"], lambda model, _: ov.subspace_overlap(model, read="Q")),
    "overlap_of_keys": (["writer", "reader"], lambda model, _: ov.subspace_overlap(model, read="K")),
    "overlap_of_values": (["writer", "reader"], lambda model, _: ov.subspace_overlap(model, read="V")),
    "directions": (["head", "side", "end", "token"], lambda model, _: directions(model)),
    "ledger": (["component", "layer", "head", "source", "kind"], ledger),
}
NO_TOKENS_MOVED = torch.arange(N_VOCAB)


@dataclass(frozen=True)
class Change:
    """How a model is rewritten.

    Attributes:
        edit: does it, in place.
        families: what it can be done to.
        nulls: whether the draws by chance meet the same matrices; where not, they have the same distribution, as others.
        heads: their new names.
        tokens: their new ids.
    """

    edit: Callable[[Any], None]
    families: tuple[str, ...] = ("gpt2", "llama")
    nulls: bool = True
    heads: Callable[[int], int] = lambda index: index
    tokens: Tensor = NO_TOKENS_MOVED


CHANGES = {
    "values times 1e-6": Change(scale_values(1e-6)),
    "values times 1e6": Change(scale_values(1e6)),
    "each dimension of values times its own": Change(scale_values(torch.logspace(-2, 2, D_HEAD)), nulls=False),
    "values turned": Change(turn_values, nulls=False),
    "queries times 1e-4": Change(scale_queries),
    "queries and keys turned": Change(turn_queries, nulls=False),
    "heads in reverse": Change(reverse_heads, heads=lambda index: N_HEADS - 1 - index),
    "tokens in another order": Change(permute_tokens, tokens=TOKENS),
    "stream turned": Change(turn_stream, ("llama",), nulls=False),
    "gains folded": Change(fold_gains, ("llama",)),
    "means added": Change(add_means, ("gpt2",)),
}
CASES = [(name, family) for name, change in CHANGES.items() for family in change.families]


def rewritten(family: str, edit: Callable[[Any], None]) -> ov.Model:
    net = network(family)
    with torch.no_grad():
        edit(net)
    return ov.load(net)


@cache
def right(family: str, table: str) -> pd.DataFrame:
    return TABLES[table][1](ov.load(network(family)), NO_TOKENS_MOVED)


def named(frame: pd.DataFrame, keys: list[str], change: Change) -> pd.DataFrame:
    """The rows under their new names, in the order of these; of numbers those that must be the same ones."""
    frame = frame.copy()
    heads = {f"{i}.{j}": f"{i}.{change.heads(j)}" for i in range(2) for j in range(N_HEADS)}
    for name in {"head", "sender", "receiver", "writer", "reader"} & set(frame.columns):
        frame[name] = frame[name].map(heads)
    if "token" in frame:
        frame["token"] = frame["token"].map(lambda token: int(change.tokens[token]))
    random = [name for name in frame if name.endswith(("_null_mean", "_z")) and not change.nulls]
    of_pairs = [name for name in ("z_isotropic", "z_paired") if name in frame]  # known exactly
    places = ["layer", "index", "kv_head", *(name for name in frame if "_plus" in name or "_minus" in name)]
    gone = {*random, *(name for name in places if name not in keys)} - set(of_pairs)
    frame = frame.drop(columns=[name for name in gone if name in frame])
    return frame.assign(**{key: frame[key].astype(str) for key in keys}).set_index(keys).sort_index()


def deviation(ours: pd.DataFrame, theirs: pd.DataFrame) -> float:
    """The largest one of any column, over the column's largest number; infinite where rows, columns or NaN differ."""
    if not (ours.index.equals(theirs.index) and list(ours) == list(theirs)):
        return float("inf")
    worst = 0.0
    for name in ours:
        a, b = ours[name].to_numpy(float), theirs[name].to_numpy(float)
        if (np.isnan(a) != np.isnan(b)).any():
            return float("inf")
        size = np.abs(np.nan_to_num(b)).max(initial=0.0)
        worst = max(worst, np.abs(np.nan_to_num(a - b)).max(initial=0.0) / (size or 1.0))
    return worst


@pytest.mark.parametrize(("name", "family"), CASES)
def test_numbers_do_not_depend_on_how_a_model_is_written(name: str, family: str) -> None:
    change = CHANGES[name]
    model = rewritten(family, change.edit)
    found = {}
    for table, (keys, make) in TABLES.items():
        ours = named(make(model, change.tokens), keys, Change(change.edit, nulls=change.nulls))
        theirs = named(right(family, table), keys, change)
        found[table] = deviation(ours, theirs)
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("table", TABLES)
def test_every_table_would_see_a_change_that_is_none_of_these(table: str) -> None:
    """One head's W_Q, W_K, W_V and W_O a little longer in one direction, or one token's vectors."""

    def bend(net: Any) -> None:
        for role in "QKV":
            edit_heads(net, role, lambda W: torch.cat([W[..., :1] * 1.01 + 0.01, W[..., 1:]], -1))
        net.get_output_embeddings().weight[2] *= 1.01

    keys, make = TABLES[table]
    plain = Change(bend)
    ours = named(make(rewritten("gpt2", bend), NO_TOKENS_MOVED), keys, plain)
    assert deviation(ours, named(right("gpt2", table), keys, plain)) > 1e-4

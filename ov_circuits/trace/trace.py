"""A prompt's trace: what each head writes, at each position and from each source token.

z_i[t] = sum_s A_i[t, s] (xhat_s W_V + b_V), and head i writes z_i[t] W_O[i] at destination t. Split by source token:

    write = sum_s A[t, s] (xhat_s W_V) W_O  +  (sum_s A[t, s]) b_V W_O
            value path, from source s          value bias, a term of its own

Writes are in the model's own residual stream, so they use the raw weights whatever view the model is in. Where a norm stands
between attention and stream (Gemma 2, OLMo 2), they are what enters that norm; ledgers go through it at its actual scale.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from ov_circuits.arguments import checked
from ov_circuits.checkpoint.tokenizer import why_no_bos
from ov_circuits.errors import CircuitsError, is_whole
from ov_circuits.files import atomic_path
from ov_circuits.model import Head, Layer, Model
from ov_circuits.modes import ordinary_class
from ov_circuits.shown import counted, notebook_html
from ov_circuits.trace.engines import LAYER_FIELDS, LayerRecord, Record, check_tokens, record
from ov_circuits.trace.shards import Shard
from ov_circuits.words import bos_id, token_list

if TYPE_CHECKING:
    import pandas as pd

    from ov_circuits.trace.ledger import Answer


@ordinary_class
@dataclass(frozen=True, eq=False)
class Trace:
    """One prompt through the model.

    Attributes:
        model: the model, in its raw view: writes are in the stream's own coordinates.
        tokens: the ids that were run, BOS included where it was added.
        texts: their texts.
        bos_added: whether a BOS token was put in front.
        record: what the run left behind.
    """

    model: Model
    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    bos_added: bool
    record: Record

    def __repr__(self) -> str:
        bos = "BOS added" if self.bos_added else "no BOS added"
        return f"Trace of {self.model.name!r} on {counted(len(self), 'token')} ({bos})"

    def _repr_html_(self) -> str | None:
        return notebook_html("trace_html", self)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def logits(self) -> Float[Tensor, "kept n_vocab"]:
        """The model's own logits: of all positions, or of the last one where only those were asked for; a copy."""
        return self.record.logits.clone()

    @checked
    def row(self, position: int) -> int:
        """Where a position's logits are among those that were kept.

        Raises:
            CircuitsError: they were not.
        """
        row = position - len(self) + len(self.record.logits)
        if row < 0:
            raise CircuitsError(f"the trace kept the logits of its last position only, not of {position}")
        return row

    def position(self, index: int) -> int:
        """A position counted from the start; negative ones count from the end.

        Raises:
            CircuitsError: the prompt has no such position.
        """
        n = len(self)
        if isinstance(index, bool) or not hasattr(index, "__index__"):
            raise CircuitsError(f"a position is a whole number, not {index!r}")
        if not -n <= index < n:
            raise CircuitsError(f"the prompt has positions 0 to {n - 1}, not {index}")
        return index % n

    # -- one head -------------------------------------------------------------------------------------------------------

    @checked
    def pattern(self, head: Head | str) -> Float[Tensor, "destination source"]:
        """Attention of a head, a copy."""
        layer, index, _ = self.parts(head)
        return layer.pattern[self.record.shard.index(index)].clone()

    @checked
    def values(self, head: Head | str) -> Float[Tensor, "source d_head"]:
        """Values that a head can move, b_V included."""
        layer, index, weights = self.parts(head)
        values = unbiased_values(layer, weights)[index]
        return values if weights.b_V is None else values + weights.per_query_head(weights.b_V)[index]

    @checked
    def head_writes(self, head: Head | str) -> Float[Tensor, "source destination d_model"]:
        """The value path: what a head moves from each source token to each destination, without the value bias.

        Summed over sources, plus :meth:`value_bias_write`, it is :meth:`write`.
        """
        layer, index, weights = self.parts(head)
        moved = unbiased_values(layer, weights)[index] @ weights.W_O[index]
        return self.pattern(head).mT.unsqueeze(-1) * moved.unsqueeze(1)

    @checked
    def value_bias_write(self, head: Head | str) -> Float[Tensor, "destination d_model"]:
        """What the head writes because of b_V, whatever it attends to: (sum_s A[t, s]) b_V W_O; zero without a bias."""
        _, index, weights = self.parts(head)
        return self.pattern(head).sum(-1, keepdim=True) * value_bias_writes(weights)[index]

    @checked
    def write(self, head: Head | str) -> Float[Tensor, "destination d_model"]:
        """All that a head writes at each position: z W_O."""
        layer, index, weights = self.parts(head)
        return layer.z[self.record.shard.index(index)] @ weights.W_O[index]

    # -- all heads, without the big tensor ----------------------------------------------------------------------------

    def write_norms(self) -> Float[Tensor, "layer head destination"]:
        """||z W_O|| of every head at every position."""
        shard = self.record.shard
        norms = [norms_through(layer.z, write_gram(weights.W_O[shard.heads])) for layer, weights in self._layers()]
        return shard.gather(torch.stack(norms), 1)

    def value_weighted_patterns(self) -> Float[Tensor, "layer head destination source"]:
        """A[t, s] ||xhat_s W_V W_O||: attention weighted by the size of what it moves (Kobayashi et al. 2020)."""
        shard, weighted = self.record.shard, []
        for layer, weights in self._layers():
            sizes = norms_through(unbiased_values(layer, weights), write_gram(weights.W_O))[shard.heads]
            weighted.append(layer.pattern * sizes.unsqueeze(1))
        return shard.gather(torch.stack(weighted), 1)

    @checked
    def ledger(self, answer: Answer, against: str | int | None = None, position: int = -1) -> pd.DataFrame:
        """The closed account of a logit or a logit difference; see :func:`ov_circuits.trace.ledger.ledger`."""
        from ov_circuits.trace.ledger import ledger

        return ledger(self, answer, against, position)

    @checked
    def ledger_into(
        self,
        head: Head | str,
        side: str,
        *,
        source: int,
        destination: int = -1,
        answer: Answer | None = None,
        against: str | int | None = None,
    ) -> pd.DataFrame:
        """Who wrote what a head's query, key or value reads; see :func:`ov_circuits.trace.ledger.ledger_into`."""
        from ov_circuits.trace.ledger import ledger_into

        return ledger_into(self, head, side, source=source, destination=destination, answer=answer, against=against)

    @checked
    def stream_ledger(self, layer: int, direction: Tensor, position: int = -1) -> pd.DataFrame:
        """Who wrote a direction of the stream before a layer; see :func:`ov_circuits.trace.ledger.stream_ledger`."""
        from ov_circuits.trace.ledger import stream_ledger

        return stream_ledger(self, layer, direction, position)

    # -- files ------------------------------------------------------------------------------------------------------------

    @checked
    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the trace as safetensors: no pickle, no code. :func:`open_trace` reads it again, with the same checkpoint.

        Raises:
            CircuitsError: the file cannot be written, or this process holds a part of the heads only.
        """
        from safetensors.torch import save_file

        r = self.record
        if r.shard.ranks is not None:
            raise CircuitsError("a tensor-parallel trace is spread over ranks and not saved: save frames made from it")
        tensors = {
            f"layers.{i}.{name}": getattr(layer, name) for i, layer in enumerate(r.layers) for name in LAYER_FIELDS
        }
        tensors |= {"final": r.final, "logits": r.logits}
        if r.uncapped is not r.logits:
            tensors["uncapped"] = r.uncapped
        if r.position is not None:
            tensors["position"] = r.position
        facts = {"tokens": self.tokens, "texts": self.texts, "bos_added": self.bos_added}
        metadata = {_KIND: json.dumps(facts), "checkpoint": self.model.source.fingerprint, "model": self.model.name}
        # Copies: without a norm between them (OLMo 2), the stream is the very tensor that attention reads.
        own = {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
        with atomic_path(file) as temporary:
            save_file(own, temporary, metadata)

    def _layers(self) -> Sequence[tuple[LayerRecord, Layer]]:
        return [(layer, self.model.layer(index)) for index, layer in enumerate(self.record.layers)]

    def parts(self, head: Head | str) -> tuple[LayerRecord, int, Layer]:
        """A head's layer as recorded, the head's index in it, and the layer's raw weights."""
        found = self.model.head(head.label if isinstance(head, Head) else head)
        return self.record.layers[found.layer], found.index, self.model.layer(found.layer)


def trace(model: Model, prompt: Any, *, bos: bool | None = None, last_logits: bool = False) -> Trace | list[Trace]:
    """Run a model on a prompt and keep what its heads are made of.

    Args:
        model: any view; the run itself does not depend on it.
        prompt: text, or token ids, which are run as they are unless ``bos`` is True; or a list of prompts, which run side by
            side, padded where nothing can see it.
        bos: whether to put the BOS token in front. None: yes for text where the model has one (as TransformerLens does and
            most papers), no for ids. It is never put before a prompt that begins with it already. The trace says what was done.
        last_logits: compute and keep the logits of the last position alone: for many prompts of which only the next token is
            asked, a fifth of the time of a small model and most of the memory.

    Returns:
        A trace, or for a list of prompts a list of them.

    Raises:
        CircuitsError: an empty or too long prompt, ids outside the vocabulary, text without a tokenizer, BOS asked for
            where there is none, or a checkpoint that cannot run.
    """
    several = _is_several(prompt)
    asked = [prompt_ids(model, one, bos) for one in (prompt if several else [prompt])]
    if not asked:
        raise CircuitsError("there is no prompt in the list: give at least one")
    raw = model.in_view("raw")
    traces = []
    for (tokens, added), found in zip(
        asked, record(model, [tokens for tokens, _ in asked], last_logits=last_logits), strict=True
    ):
        if not bool(found.logits.isfinite().all() and found.final.isfinite().all()):
            raise CircuitsError(
                f"{model.name} gives NaN or infinity on this prompt, so nothing can be accounted for: "
                "its weights or the numbers in its config are not finite or out of range"
            )
        traces.append(Trace(raw, tuple(tokens), tuple(token_list(model, tokens)), added, found))
    return traces if several else traces[0]


def _is_several(prompt: Any) -> bool:
    """Whether it is a list of prompts: texts, or lists or arrays of ids."""
    if hasattr(prompt, "ndim"):  # a tensor, an array
        return bool(prompt.ndim == 2)
    if not isinstance(prompt, Sequence) or isinstance(prompt, (str, bytes, bytearray)):
        return False
    return any(isinstance(one, (str, Sequence)) or getattr(one, "ndim", 0) == 1 for one in prompt)


def prompt_ids(model: Model, prompt: Any, bos: bool | None = None) -> tuple[list[int], bool]:
    """The ids of one prompt, and whether BOS was put before them; see :func:`trace`.

    Raises:
        CircuitsError: as :func:`trace`.
    """
    tokens = list(model.tokenizer.encode(prompt)) if isinstance(prompt, str) else whole_ids(prompt)
    if not tokens:
        raise CircuitsError("the prompt is empty: give it at least one token")
    front = bos_id(model)
    wanted = (isinstance(prompt, str) and front is not None) if bos is None else bos
    if wanted and front is None:
        raise CircuitsError(f"{model.name} {why_no_bos(model.source.checkpoint.config)}: run the prompt without one")
    added = wanted and tokens[0] != front
    if added:
        assert front is not None
        tokens = [front, *tokens]
    check_tokens(model, tokens)
    return tokens, added


# The metadata key by which a file is known as a trace.
_KIND = "ov_circuits.trace"


def open_trace(file: str | os.PathLike[str], model: Model) -> Trace:
    """A trace that :meth:`Trace.save` wrote.

    Args:
        file: the .safetensors file.
        model: the checkpoint that was traced, in any view: writes need its weights.

    Returns:
        The trace as it was saved.

    Raises:
        CircuitsError: no such file, not a trace, a damaged one, or one of another checkpoint.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as stored:
            metadata = stored.metadata() or {}
            if _KIND not in metadata:
                raise CircuitsError(f"{file} is a safetensors file but no trace: give one that Trace.save wrote")
            tensors = {name: stored.get_tensor(name).to(model.device) for name in stored.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CircuitsError(f"cannot read the trace {file}: {error}") from error
    if metadata.get("checkpoint") != model.source.fingerprint:
        raise CircuitsError(
            f"{file} is a trace of another checkpoint ({metadata.get('model')!r}) than {model.name}: open it with that one"
        )
    try:
        return _trace_of(model, json.loads(metadata[_KIND]), tensors)
    except (KeyError, TypeError, ValueError, RecursionError) as error:  # a CircuitsError is a ValueError
        raise CircuitsError(f"the trace {file} is damaged ({str(error)[:200]}): make it again") from error


def _trace_of(model: Model, facts: Any, tensors: dict[str, Tensor]) -> Trace:
    """A trace from what a file says, which is believed once every part of it fits the model and the others.

    Raises:
        KeyError, TypeError, ValueError, RecursionError: some part does not.
    """
    tokens, texts, bos_added = whole_ids(facts["tokens"]), facts["texts"], facts["bos_added"]
    check_tokens(model, tokens)
    if not isinstance(texts, list) or [type(text) for text in texts] != [str] * len(tokens):
        raise ValueError(f"not one text for each of {counted(len(tokens), 'token')}")
    if not isinstance(bos_added, bool):
        raise ValueError(f"bos_added is {bos_added!r}")
    kept = 1 if len(tensors["logits"]) == 1 else len(tokens)
    shapes = _shapes(model, len(tokens), kept)
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tensor.shape != shape or tensor.dtype != torch.float32:
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)} instead of float32 {list(shape)}")
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} holds NaN or infinity")
    layers = tuple(
        LayerRecord(**{name: tensors[f"layers.{index}.{name}"] for name in LAYER_FIELDS})
        for index in range(model.n_layers)
    )
    whole, logits = Shard.whole_layer(model.n_heads), tensors["logits"]
    position, uncapped = (tensors[name] if name in shapes else None for name in ("position", "uncapped"))
    found = Record(whole, position, layers, tensors["final"], logits, logits if uncapped is None else uncapped)
    return Trace(model.in_view("raw"), tuple(tokens), tuple(texts), bos_added, found)


def _shapes(model: Model, n: int, kept: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a trace of ``n`` tokens with ``kept`` rows of logits."""
    a = model.architecture
    of_layer: dict[str, tuple[int, ...]] = dict.fromkeys(LAYER_FIELDS, (n, a.d_model))
    of_layer |= {"pattern": (a.n_heads, n, n), "z": (a.n_heads, n, a.d_head)}
    shapes = {f"layers.{i}.{name}": shape for i in range(model.n_layers) for name, shape in of_layer.items()}
    shapes |= {"final": (n, a.d_model), "logits": (kept, a.n_vocab)}
    if a.logit_softcap is not None:
        shapes["uncapped"] = shapes["logits"]
    if model.source.family.positions is not None:
        shapes["position"] = (n, a.d_model)
    return shapes


def whole_ids(prompt: Any) -> list[int]:
    """Whole numbers of a sequence or a one-dimensional tensor; nothing is rounded or read out of text."""
    if hasattr(prompt, "tolist"):  # a tensor, an array
        prompt = prompt.tolist()
    wrong = not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray))
    if wrong or not all(is_whole(token) for token in prompt):
        raise CircuitsError(f"a prompt is a text or a list of token ids (whole numbers), not {str(prompt)[:80]}")
    return [operator.index(token) for token in prompt]


def unbiased_values(layer: LayerRecord, weights: Layer) -> Float[Tensor, "head source d_head"]:
    """xhat W_V for every query head: values without their bias."""
    return values_without_bias(layer.attention_input, weights)


def values_without_bias(x: Float[Tensor, "source d_model"], weights: Layer) -> Float[Tensor, "head source d_head"]:
    """:func:`unbiased_values` of an attention input."""
    if weights.qkv_clip is not None:  # clamped with their bias
        values = weights.values(x)
        values = values if weights.b_V is None else values - weights.b_V.double().unsqueeze(1)
        return weights.per_query_head(values.float())
    return weights.per_query_head(torch.einsum("sm,kmd->ksd", x, weights.W_V))


def value_bias_writes(weights: Layer) -> Float[Tensor, "head d_model"]:
    """b_V W_O of every query head; zero without a bias."""
    if weights.b_V is None:
        return weights.W_O.new_zeros(weights.W_O.shape[0], weights.W_O.shape[2])
    return torch.einsum("hd,hdm->hm", weights.per_query_head(weights.b_V), weights.W_O)


def write_gram(W_O: Float[Tensor, "head d_head d_model"]) -> Float[Tensor, "head d_head d_head"]:
    """W_O W_O^T, float64: by it a write's size is known without the write."""
    return W_O.double() @ W_O.double().mT


def norms_through(
    vectors: Float[Tensor, "head pos d_head"], gram: Float[Tensor, "head d_head d_head"]
) -> Float[Tensor, "head pos"]:
    """||x W_O||, by way of W_O's :func:`write_gram`."""
    vectors = vectors.double()
    return ((vectors @ gram) * vectors).sum(-1).clamp(min=0).sqrt().float()

"""A prompt's trace: what each head writes, at each position and from each source token.

z_i[t] = sum_s A_i[t, s] (xhat_s W_V + b_V), and head i writes z_i[t] W_O[i] at destination t. Split by source token:

    write = sum_s A[t, s] (xhat_s W_V) W_O  +  (sum_s A[t, s]) b_V W_O
            value path, from source s          value bias, a term of its own

Writes are in the model's own residual stream, so they use the raw weights whatever view the model is in.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from ov_circuits.checkpoint.tokenizer import bos_in_vocabulary, why_no_bos
from ov_circuits.errors import CircuitsError
from ov_circuits.model import Head, Layer, Model
from ov_circuits.trace.engines import LayerRecord, Record, check_tokens, record
from ov_circuits.words import token_list

if TYPE_CHECKING:
    import pandas as pd


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
        return f"Trace of {self.model.name!r} on {len(self.tokens)} tokens ({bos})"

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def logits(self) -> Float[Tensor, "pos n_vocab"]:
        """The model's own logits."""
        return self.record.logits

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

    def pattern(self, head: Head | str) -> Float[Tensor, "destination source"]:
        """Attention of a head."""
        layer, index, _ = self._parts(head)
        return layer.pattern[index]

    def values(self, head: Head | str) -> Float[Tensor, "source d_head"]:
        """Values that a head can move, b_V included."""
        layer, index, weights = self._parts(head)
        return weights.per_query_head(layer.v)[index]

    def head_writes(self, head: Head | str) -> Float[Tensor, "source destination d_model"]:
        """The value path: what a head moves from each source token to each destination, without the value bias.

        Summed over sources, plus :meth:`value_bias_write`, it is :meth:`write`.
        """
        layer, index, weights = self._parts(head)
        moved = unbiased_values(layer, weights)[index] @ weights.W_O[index]
        return layer.pattern[index].mT.unsqueeze(-1) * moved.unsqueeze(1)

    def value_bias_write(self, head: Head | str) -> Float[Tensor, "destination d_model"]:
        """What the head writes because of b_V, whatever it attends to: (sum_s A[t, s]) b_V W_O; zero without a bias."""
        layer, index, weights = self._parts(head)
        return layer.pattern[index].sum(-1, keepdim=True) * value_bias_writes(weights)[index]

    def write(self, head: Head | str) -> Float[Tensor, "destination d_model"]:
        """All that a head writes at each position: z W_O."""
        layer, index, weights = self._parts(head)
        return layer.z[index] @ weights.W_O[index]

    # -- all heads, without the big tensor ----------------------------------------------------------------------------

    def write_norms(self) -> Float[Tensor, "layer head destination"]:
        """||z W_O|| of every head at every position."""
        return torch.stack([_norms_through(layer.z, weights.W_O) for layer, weights in self._layers()])

    def value_weighted_patterns(self) -> Float[Tensor, "layer head destination source"]:
        """A[t, s] ||xhat_s W_V W_O||: attention weighted by the size of what it moves (Kobayashi et al. 2020)."""
        weighted = []
        for layer, weights in self._layers():
            sizes = _norms_through(unbiased_values(layer, weights), weights.W_O)
            weighted.append(layer.pattern * sizes.unsqueeze(1))
        return torch.stack(weighted)

    def ledger(self, answer: str | int, against: str | int | None = None, position: int = -1) -> pd.DataFrame:
        """The closed account of a logit or a logit difference; see :func:`ov_circuits.trace.ledger.ledger`."""
        from ov_circuits.trace.ledger import ledger

        return ledger(self, answer, against, position)

    def _layers(self) -> Sequence[tuple[LayerRecord, Layer]]:
        return [(layer, self.model.layer(index)) for index, layer in enumerate(self.record.layers)]

    def _parts(self, head: Head | str) -> tuple[LayerRecord, int, Layer]:
        found = self.model.head(head.label if isinstance(head, Head) else head)
        return self.record.layers[found.layer], found.index, self.model.layer(found.layer)


def trace(model: Model, prompt: str | Sequence[int], *, bos: bool | None = None) -> Trace:
    """Run a model on a prompt and keep what its heads are made of.

    Args:
        model: any view; the run itself does not depend on it.
        prompt: text, or token ids, which are run as they are unless ``bos`` is True.
        bos: whether to put the BOS token in front. None: yes for text where the model has one (as TransformerLens does and
            most papers), no for ids. It is never put before a prompt that begins with it already. The trace says what was done.

    Raises:
        CircuitsError: an empty or too long prompt, ids outside the vocabulary, text without a tokenizer, BOS asked for
            where there is none, or a checkpoint that cannot run.
    """
    tokens = list(model.tokenizer.encode(prompt)) if isinstance(prompt, str) else _ids(prompt)
    if not tokens:
        raise CircuitsError("the prompt is empty: give it at least one token")
    config = model.source.checkpoint.config
    bos_id = model.tokenizer.bos_id if model.has_tokenizer else bos_in_vocabulary(config.get("bos_token_id"), config)
    wanted = (isinstance(prompt, str) and bos_id is not None) if bos is None else bos
    if wanted and bos_id is None:
        raise CircuitsError(f"{model.name} {why_no_bos(config)}: run the prompt without one")
    added = wanted and tokens[0] != bos_id
    if added:
        assert bos_id is not None
        tokens = [bos_id, *tokens]
    check_tokens(model, tokens)
    found = record(model, tokens)
    if not bool(found.logits.isfinite().all()):
        raise CircuitsError(
            f"{model.name} gives NaN or infinity on this prompt, so nothing can be accounted for: "
            "its weights or the numbers in its config are not finite or out of range"
        )
    return Trace(
        model=model.in_view("raw"),
        tokens=tuple(tokens),
        texts=tuple(token_list(model, tokens)),
        bos_added=added,
        record=found,
    )


def _ids(prompt: Any) -> list[int]:
    """Whole numbers of a sequence or a one-dimensional tensor; nothing is rounded or read out of text."""
    if isinstance(prompt, Tensor):
        prompt = prompt.tolist()
    wrong = not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray))
    if wrong or any(isinstance(token, bool) or not hasattr(token, "__index__") for token in prompt):
        raise CircuitsError(f"a prompt is a text or a list of token ids (whole numbers), not {str(prompt)[:80]}")
    return [operator.index(token) for token in prompt]


def unbiased_values(layer: LayerRecord, weights: Layer) -> Float[Tensor, "head source d_head"]:
    """xhat W_V for every query head: the recorded values without their bias."""
    v = layer.v if weights.b_V is None else layer.v - weights.b_V.unsqueeze(1)
    return weights.per_query_head(v)


def value_bias_writes(weights: Layer) -> Float[Tensor, "head d_model"]:
    """b_V W_O of every query head; zero without a bias."""
    if weights.b_V is None:
        return torch.zeros(weights.W_O.shape[0], weights.W_O.shape[2])
    return torch.einsum("hd,hdm->hm", weights.per_query_head(weights.b_V), weights.W_O)


def _norms_through(vectors: Tensor, W_O: Tensor) -> Tensor:
    """||x W_O|| for [head, pos, d_head] and [head, d_head, d_model], by way of W_O W_O^T [head, d_head, d_head]."""
    gram = W_O.double() @ W_O.double().mT
    vectors = vectors.double()
    return ((vectors @ gram) * vectors).sum(-1).clamp(min=0).sqrt().float()

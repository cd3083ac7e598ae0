"""Layer: one layer's attention as heads.

Row convention, activations are rows: ``x @ W``. Concatenated heads times W_O is a sum of blocks,

    concat(z_1 .. z_n) W_O + b_O = sum_i z_i W_O[i] + b_O,

where W_O[i] is the i-th block of d_head *rows* of the (in, out) matrix. All heads are query heads; head h uses key/value head
``h // (n_heads // n_kv_heads)`` (consecutive query heads share one, as repeat_interleave lays them out).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from einops import repeat
from jaxtyping import Bool, Float
from torch import Tensor

from ov_circuits.checkpoint.norms import QKNorm
from ov_circuits.linalg.lowrank import LowRank
from ov_circuits.modes import ordinary_class


@ordinary_class
@dataclass(frozen=True, eq=False)
class Layer:
    """One layer's attention, split into heads, in one weight view. Absent biases are None, not zeros.

    Attributes:
        index: the layer, from 0.
        W_Q: [n_heads, d_model, d_head].
        W_K: [n_kv_heads, d_model, d_head].
        W_V: [n_kv_heads, d_model, d_head].
        W_O: [n_heads, d_head, d_model].
        b_Q: [n_heads, d_head] or None.
        b_K: [n_kv_heads, d_head] or None.
        b_V: [n_kv_heads, d_head] or None.
        b_O: [d_model] or None; belongs to no head.
        score_scale: what query-key products are multiplied by before the softmax (1 / sqrt(d_head) as a rule).
        q_norm, k_norm: norms that queries and keys pass before they meet (Qwen 3, OLMo 2), in the raw view; None as a rule. In the
            other views their gains are in W_Q and W_K. What they divide by is each token's own: a static QK leaves it out.
        qkv_clip: what queries, keys and values are clamped to (some OLMo); None as a rule. No matrix has it.
    """

    index: int
    W_Q: Float[Tensor, "head d_model d_head"]
    W_K: Float[Tensor, "kv_head d_model d_head"]
    W_V: Float[Tensor, "kv_head d_model d_head"]
    W_O: Float[Tensor, "head d_head d_model"]
    b_Q: Float[Tensor, "head d_head"] | None
    b_K: Float[Tensor, "kv_head d_head"] | None
    b_V: Float[Tensor, "kv_head d_head"] | None
    b_O: Float[Tensor, " d_model"] | None
    score_scale: float
    q_norm: QKNorm | None = None
    k_norm: QKNorm | None = None
    qkv_clip: float | None = None

    def queries(self, x: Float[Tensor, "pos d_model"], head: int | None = None) -> Float[Tensor, "*head pos d_head"]:
        """Queries of rows x that the reading norm gave, before positions turn them: of all heads, or [pos, d_head] of one.

        Of a raw layer; float64.
        """
        return self._project(x, self.W_Q, self.b_Q, self.q_norm, head)

    def keys(self, x: Float[Tensor, "pos d_model"], kv_head: int | None = None) -> Float[Tensor, "*kv_head pos d_head"]:
        """Keys, likewise."""
        return self._project(x, self.W_K, self.b_K, self.k_norm, kv_head)

    def values(
        self, x: Float[Tensor, "pos d_model"], kv_head: int | None = None
    ) -> Float[Tensor, "*kv_head pos d_head"]:
        """Values with their bias, likewise."""
        return self._project(x, self.W_V, self.b_V, None, kv_head)

    def _project(self, x: Tensor, W: Tensor, b: Tensor | None, norm: QKNorm | None, head: int | None) -> Tensor:
        one = head is not None and (norm is None or not norm.whole)  # otherwise the norm needs all heads
        heads = slice(head, head + 1) if head is not None and one else slice(None)
        out = torch.einsum("tm,hmd->htd", x.double(), W[heads].double())
        out = out if b is None else out + b[heads].double().unsqueeze(1)
        out = out if norm is None else norm.of(heads)(out)
        out = out if self.qkv_clip is None else out.clamp(-self.qkv_clip, self.qkv_clip)
        return out if head is None else out[0 if one else head]

    def per_query_head(self, tensor: Tensor) -> Tensor:
        """[n_kv_heads, ...] -> [n_heads, ...]: each query head gets its group's key/value head (repeat_interleave, not tile)."""
        group = self.W_Q.shape[0] // tensor.shape[0]
        return tensor if group == 1 else repeat(tensor, "kv ... -> (kv group) ...", group=group)

    def tensors(self) -> dict[str, Tensor]:
        """The weights and biases that there are, by name."""
        names = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    @cached_property
    def finite_heads(self) -> Bool[Tensor, " head"]:
        """Which query heads have no NaN or infinity in W_Q, W_K, W_V, W_O or their biases."""
        found = self.W_O.new_ones(self.W_O.shape[0], dtype=torch.bool)
        for tensor in (self.W_Q, self.W_K, self.W_V, self.W_O, self.b_Q, self.b_K, self.b_V):
            if tensor is not None:
                found &= self.per_query_head(tensor.isfinite().flatten(1).all(1))
        return found

    @property
    def finite_part(self) -> Layer:
        """The layer with all that is not finite set to zero, so that decompositions do not fail for the other heads."""
        # Not cached where it is the layer itself: a layer that holds itself stays until Python looks for cycles.
        return self if bool(self.finite_heads.all()) else self._zeroed

    @cached_property
    def _zeroed(self) -> Layer:
        zeroed: dict[str, Any] = {n: t.nan_to_num(0.0, 0.0, 0.0) for n, t in self.tensors().items() if n != "b_O"}
        return replace(self, **zeroed)

    @cached_property
    def ov(self) -> LowRank:
        """All heads' W_V W_O, [n_heads, d_model, d_model] of rank d_head."""
        return LowRank(self.per_query_head(self.W_V), self.W_O, repeats=self.W_O.shape[0] // self.W_V.shape[0])

    @cached_property
    def qk(self) -> LowRank:
        """All heads' W_Q W_K^T times the score scale, [n_heads, d_model, d_model]; for rotary models this is offset 0."""
        return LowRank(self.W_Q * self.score_scale, self.per_query_head(self.W_K).mT)

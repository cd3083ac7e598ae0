"""Weight views: what the reading norm does, moved into the weights. One place for all of it.

A head reads ``xhat = (x - mean) / sigma * gain + bias`` (LayerNorm; RMSNorm has neither mean nor bias), so for a reader W

- ``raw``: W as stored;
- ``folded``: ``diag(gain) W``, with ``bias W`` added to its own bias. The unembedding is a reader too, of the final norm;
  A norm that queries and keys pass (Qwen 3, OLMo 2) folds its gain into W_Q and W_K, a norm that the attention's output passes
  (Gemma 2, OLMo 2) into W_O. Their scales are a token's own and absent from weights;
- ``centred``: folded, then ``(I - 11^T/d)`` on every side that meets the residual stream of a LayerNorm model: readers lose
  what a LayerNorm subtracts before they see it, writers lose what every later LayerNorm will subtract. Exact for all that a
  LayerNorm reads. RMSNorm subtracts no mean, so there it is refused.

Centring the unembedding here is over d_model. Over the vocabulary it would shift all logits of a position and is not done.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from ov_circuits.checkpoint.layout import Architecture
from ov_circuits.checkpoint.norms import QKNorm
from ov_circuits.errors import CircuitsError

View = Literal["raw", "folded", "centred"]

VIEW_NOTES: dict[View, str] = {
    "raw": "Weights as stored in the checkpoint.",
    "folded": "Gains and biases of the reading norms are folded into W_Q, W_K, W_V and W_U.",
    "centred": "Gains and biases of the reading norms are folded into W_Q, W_K, W_V and W_U, and the mean over d_model, "
    "which every LayerNorm subtracts, is removed from readers and writers.",
}


def default_view(architecture: Architecture) -> View:
    """``centred`` for LayerNorm models, ``folded`` for RMSNorm models."""
    return "centred" if architecture.norm == "LayerNorm" else "folded"


def check_view(view: str, architecture: Architecture) -> View:
    """The view, if it exists for this architecture.

    Raises:
        CircuitsError: unknown view, or ``centred`` for an RMSNorm model.
    """
    if view not in get_args(View):
        raise CircuitsError(f"there is no weight view {view!r}; choose one of {', '.join(get_args(View))}")
    if view == "centred" and architecture.norm == "RMSNorm":
        raise CircuitsError(
            f"the view 'centred' does not exist for {architecture.family} models: RMSNorm subtracts no mean, "
            "centred circuits would be wrong. Use 'folded'"
        )
    return view  # type: ignore[return-value]


def fold_reader(W: Tensor, gain: Tensor, view: View) -> Tensor:
    """A reading matrix [..., d_model, k] in the given view."""
    if view == "raw":
        return W
    W = gain.unsqueeze(-1) * W
    return W - W.mean(dim=-2, keepdim=True) if view == "centred" else W


def fold_reader_bias(b: Tensor | None, W: Tensor, norm_bias: Tensor | None, view: View) -> Tensor | None:
    """A reader's bias [..., k] in the given view; ``W`` is the raw matrix. None stays None when nothing is added."""
    if view == "raw" or norm_bias is None:
        return b
    # Hundreds of terms that cancel: summed in float64, in parts because W may be an unembedding.
    parts = [norm_bias.double() @ part.double() for part in W.split(8192, dim=-1)]
    added = torch.cat(parts, dim=-1)
    return (added if b is None else b + added).to(W.dtype)


def fold_qk_norm(W: Tensor, norm: QKNorm | None, view: View) -> Tensor:
    """W_Q or W_K [head, d_model, d_head], or its bias [head, d_head], with the gain of the norm that queries or keys pass.

    Such a norm's own bias, which no scale of a token multiplies, is left out.
    """
    if norm is None or view == "raw":
        return W
    if norm.kind == "LayerNorm" and view == "centred":
        W = W - W.mean(dim=-1, keepdim=True)
    return W * (norm.gain if W.ndim == 2 else norm.gain.unsqueeze(1))


def fold_writer(W: Tensor, view: View, post_gain: Tensor | None = None) -> Tensor:
    """A writing matrix [..., k, d_model], or a written vector [d_model], in the given view.

    ``post_gain`` [d_model] is that of a norm which stands between it and the stream.
    """
    if post_gain is not None and view != "raw":
        W = W * post_gain
    return W - W.mean(dim=-1, keepdim=True) if view == "centred" else W

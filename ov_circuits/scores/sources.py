"""Source embeddings: what a head is taken to find in the residual stream at a token. Always named.

Later layers do not read W_E: the first MLP (and, in models that tie embeddings, the first layer's heads) rewrites it. Scores
over tokens therefore say which of these X [n_vocab, d_model] they used:

- ``embed``: W_E;
- ``embed_mlp0``: MLP_0(ln_2(W_E)), without W_E (Elhelou & Geva 2025);
- ``embed_plus_mlp0``: W_E + MLP_0(ln_2(W_E));
- ``effective``: m + MLP_0(ln_2(m)), m = W_E + sum over layer-0 heads of ln_1(W_E) W_V W_O (each token attends to itself, no
  positions; McDougall et al. 2023, "Copy Suppression"). As in the authors' code, the heads' writes are those of the folded
  weights without biases: no ln_1 bias, no b_V, no b_O. The MLP has all of its own. Where attention and MLP stand side by side
  (GPT-J, NeoX, Phi, ..), the MLP reads W_E, not m.

Norms after attention and MLP (Gemma 2, OLMo 2) are applied at the scale that each token has here.

All are rows of the *raw* residual stream put through the raw norms and the raw MLP, whatever the weight view: folding changes
what is done to the stream, not the stream. In the ``centred`` view their mean over d_model is taken off at the end, as from
everything that is written.
"""

from __future__ import annotations

import difflib

import torch
from jaxtyping import Float
from torch import Tensor

from ov_circuits.checkpoint.mlp import MLP
from ov_circuits.checkpoint.norms import Norm
from ov_circuits.errors import CircuitsError
from ov_circuits.folding import fold_writer
from ov_circuits.linalg.rows import Rows
from ov_circuits.model import Layer, Model
from ov_circuits.scores.broken import broken_tensors

SOURCES: dict[str, str] = {
    "embed": "W_E",
    "embed_mlp0": "MLP_0(ln_2(W_E))",
    "embed_plus_mlp0": "W_E + MLP_0(ln_2(W_E))",
    "effective": "m + MLP_0(ln_2(m)), m = W_E + sum_h ln_1(W_E) W_V W_O over the heads of layer 0 (McDougall et al. 2023)",
}

# Tokens at a time: the MLP's hidden rows [block, d_mlp] are what takes memory.
_BLOCK = 2048


def check_source(model: Model, source: str) -> str:
    """The source's name, if it exists and the checkpoint holds what it needs.

    Raises:
        CircuitsError: unknown source, no embeddings, or no MLPs where they are needed.
    """
    if source not in SOURCES:
        near = difflib.get_close_matches(source, SOURCES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise CircuitsError(f"there is no source embedding {source!r}{hint} The sources are: {', '.join(SOURCES)}")
    if not model.has_embeddings:
        raise CircuitsError(f"scores over tokens need embeddings: {model.why_no_vocabulary}")
    return source


def source_embedding(
    model: Model, source: str = "embed", tokens: Tensor | None = None
) -> Float[Tensor, "n_token d_model"]:
    """Rows of the residual stream at tokens, in the model's view.

    Args:
        model: the checkpoint.
        source: one of ``SOURCES``.
        tokens: ids [n]; the whole vocabulary when None.

    Returns:
        X [n, d_model].

    Raises:
        CircuitsError: see :func:`check_source`; or the first MLP is not in the checkpoint, or not finite.
    """
    check_source(model, source)
    if source == "embed":
        return model.W_E if tokens is None else model.embedding[tokens]
    embedding = model.source.embedding_rows
    rows = embedding if tokens is None else Rows.of(embedding[tokens])
    mlp = _first_mlp(model)
    attention = _FirstAttention(model) if source == "effective" else None
    parts = []
    for start in range(0, len(rows), _BLOCK):
        part = rows[start : start + _BLOCK]
        stream = part if attention is None else part + attention(part)
        written = mlp(part if model.architecture.parallel else stream)
        parts.append(written if source == "embed_mlp0" else stream + written)
    found = torch.cat(parts)
    if not bool(found.isfinite().all()):
        raise CircuitsError(f"the source embedding {source} of {model.name} is not finite: {_why(model, source)}")
    return fold_writer(found, model.view)


def _why(model: Model, source: str) -> str:
    """Which tensors of the first layer hold NaN or infinity."""
    family, store = model.source.family, model.source.store
    modules = [family.mlp_norm, family.mlp_post_norm, *(projection.name for projection in family.mlp.values())]
    names = [f"{module}.{kind}".format(layer=0) for module in modules if module for kind in ("weight", "bias")]
    why = [f"{name} holds NaN or infinity" for name in names if name in store and not store.read(name).isfinite().all()]
    if source == "effective":
        why += broken_tensors(model, 0)
    return f"{'; '.join(why) or 'its numbers overflow float32'}; use source 'embed'"


def source_rows(model: Model, source: str = "embed") -> Rows:
    """:func:`source_embedding` of the whole vocabulary, in blocks of rows. Only ``embed`` is not whole in memory."""
    if check_source(model, source) == "embed":
        return model.embedding
    return Rows.of(source_embedding(model, source))


def _first_mlp(model: Model) -> MLP:
    s = model.source
    return MLP.read(s.store, s.family, s.architecture, s.checkpoint.config, layer=0)


class _FirstAttention:
    """Layer 0's heads when each token attends to itself: sum_h xhat W_V W_O, without biases."""

    def __init__(self, model: Model) -> None:
        s = model.source
        norm = s.attention_norm(0)
        self._norm, self._post_norm = Norm(norm.kind, norm.gain, None, norm.eps), s.norm(s.family.attention_post_norm)
        layer: Layer = model.in_view("raw").layer(0)
        # Key/value heads are shared: their W_O are added up first.
        self._W_V = layer.W_V
        self._W_O = layer.W_O.unflatten(0, (layer.W_V.shape[0], -1)).sum(dim=1)

    def __call__(self, x: Tensor) -> Tensor:
        """[n, d_model] -> [n, d_model]."""
        values = torch.einsum("nm,hmd->nhd", self._norm(x), self._W_V)
        return self._post_norm(torch.einsum("nhd,hdm->nm", values, self._W_O))

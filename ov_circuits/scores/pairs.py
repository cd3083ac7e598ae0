"""The strongest token pairs of a circuit: the largest entries of a [n_vocab, n_vocab] matrix that is never formed.

For the full OV circuit W_E W_V W_O W_U (Elhage et al. 2021): which token, attended to, moves which token's logit most. The
query-key counterpart is in :mod:`ov_circuits.scores.qk`; both share :func:`pair_frame`.
"""

from __future__ import annotations

import pandas as pd
import torch
from torch import Tensor

from ov_circuits.errors import CircuitsError
from ov_circuits.linalg.lowrank import Entries
from ov_circuits.linalg.top_entries import top_entries
from ov_circuits.model import Head, Model
from ov_circuits.scores.broken import need_finite
from ov_circuits.scores.papers import ELHAGE
from ov_circuits.token_frame import TokenFrame
from ov_circuits.words import token_id, token_list, token_text


def strongest_token_pairs(model: Model, head: str | Head, k: int = 20) -> pd.DataFrame:
    """The ``k`` largest and ``k`` smallest entries of a head's full OV circuit, exact over all pairs of tokens.

    Rows of W_E are taken as they are: the scale that the reading norm would give each token is left out (Elhage et al. 2021).

    Args:
        model: in the weight view that the circuit is to have.
        head: label or head.
        k: pairs at each end.

    Returns:
        Columns ``end`` (``positive``: largest first, ``negative``: smallest first), ``source``, ``source_id``, ``output``,
        ``output_id``, ``value`` (logit moved by full attention, up to the norms' scales). ``attrs``: model, head, view,
        circuit, source (the definition's), visited (share of the matrix that had to be computed).

    Raises:
        CircuitsError: unknown head, no embeddings, weights that are not finite.
    """
    chosen = model.head(head)
    need_embeddings(model, "token pairs of the OV circuit")
    need_finite(chosen, "token pairs")
    full = chosen.full_ov
    frame = pair_frame(model, full.left, full.right, k, ("source", "output"))
    frame.attrs |= {"head": chosen.label, "circuit": "W_E W_V W_O W_U", "source": ELHAGE}
    return frame


def token_pair(model: Model, source: str | int, output: str | int) -> pd.DataFrame:
    """One entry of every head's full OV circuit: who writes ``output`` when it sees ``source``?

    Rows of W_E are taken as they are, as in :func:`strongest_token_pairs`; a row's scale moves no rank.

    Args:
        model: in the weight view that the circuits are to have.
        source, output: words of one token, or ids.

    Returns:
        One row a head: ``head, layer, index``; ``value``, the entry (logit moved by full attention, up to the norms' scales);
        ``above_mean``, the entry less the mean of its row, all that a softmax sees of it; ``rank`` of ``output`` in the row of
        ``source``, 1 for the largest. NaN for heads whose weights are not finite. ``attrs``: model, view, circuit, source
        (the definition's), source_token, output_token.

    Raises:
        CircuitsError: no embeddings, a word that is not one token, an id outside the vocabulary.
    """
    need_embeddings(model, "token pairs of the OV circuit")
    read, wanted = token_id(model, source), token_id(model, output)
    x = model.embedding[read].double()
    written = torch.cat(
        [
            torch.einsum("d,hdk,hkm->hm", x, layer.per_query_head(layer.W_V).double(), layer.W_O.double())
            for layer in map(model.layer, range(model.n_layers))
        ]
    )
    value = written @ model.unembedding[wanted].double()
    total, larger = torch.zeros_like(value), torch.zeros_like(value)
    for columns, block in model.unembedding.blocks():
        logits = written @ block.double().mT
        total += logits.sum(-1)
        if columns.start <= wanted < columns.stop:  # the entry itself, however it is rounded here, is not above itself
            logits[:, wanted - columns.start] = -torch.inf
        larger += (logits > value[:, None]).sum(-1)
    rank = torch.where(value.isfinite(), larger + 1, torch.nan)
    frame = pd.DataFrame(
        {
            "head": model.head_labels,
            "layer": [layer for layer in range(model.n_layers) for _ in range(model.n_heads)],
            "index": list(range(model.n_heads)) * model.n_layers,
            "value": value.numpy(force=True),
            "above_mean": (value - total / len(model.unembedding)).numpy(force=True),
            "rank": rank.numpy(force=True),
        }
    )
    texts = {"source_token": token_text(model, read), "output_token": token_text(model, wanted)}
    frame.attrs |= {"model": model.name, "view": model.view, "circuit": "W_E W_V W_O W_U", "source": ELHAGE} | texts
    return frame


def pair_frame(model: Model, A: Tensor, B: Tensor, k: int, sides: tuple[str, str]) -> pd.DataFrame:
    """Both ends of A [n_vocab, r] @ B [r, n_vocab] as a frame: ``end``, each side's text and ``_id``, ``value``.

    Raises:
        CircuitsError: the factors hold NaN or infinity, or k is no count.
    """
    try:
        found = top_entries(A, B, k)
    except ValueError as error:
        raise CircuitsError(f"{model.name}: {error}") from error
    frame = pd.concat(
        [_end(model, "positive", found.largest, sides), _end(model, "negative", found.smallest, sides)],
        ignore_index=True,
    )
    frame.attrs = {"model": model.name, "view": model.view, "visited": found.visited}
    return frame


def need_embeddings(model: Model, what: str) -> None:
    """Refuse checkpoints that hold attention weights only.

    Raises:
        CircuitsError: no embeddings.
    """
    if not model.has_embeddings:
        raise CircuitsError(f"{what} need embeddings: {model.why_no_vocabulary}")


def _end(model: Model, name: str, entries: Entries, sides: tuple[str, str]) -> pd.DataFrame:
    rows, columns = entries.rows.tolist(), entries.columns.tolist()
    return TokenFrame(
        {
            "end": name,
            sides[0]: token_list(model, rows),
            f"{sides[0]}_id": rows,
            sides[1]: token_list(model, columns),
            f"{sides[1]}_id": columns,
            "value": entries.values.numpy(force=True),
        }
    )

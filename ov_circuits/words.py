"""A model's tokens as words and words as tokens: what both scores and traces need of a tokenizer."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from ov_circuits.checkpoint.tokenizer import bos_in_vocabulary
from ov_circuits.errors import CircuitsError, is_whole
from ov_circuits.model import Model


def token_id(model: Model, word: str | int) -> int:
    """The id of a one-token word (a leading space is part of it), or a checked id.

    Raises:
        CircuitsError: a word that is not one token, text without a tokenizer, or an id outside the vocabulary.
    """
    if isinstance(word, str):
        return model.tokenizer.single(word)
    if not is_whole(word):
        raise CircuitsError(f"{word!r} is no token: give a word or a token id")
    if not 0 <= word < model.architecture.n_vocab:
        raise CircuitsError(
            f"token id {word} is outside the vocabulary of {model.name} (0 to {model.architecture.n_vocab - 1})"
        )
    return operator.index(word)


def token_text(model: Model, token: int) -> str:
    """A token's text, or its id where the checkpoint has no tokenizer."""
    return model.tokenizer.text(token) if model.has_tokenizer else f"⟨id {token}⟩"


def token_list(model: Model, ids: Sequence[int]) -> list[str]:
    """Texts of several tokens."""
    return [token_text(model, token) for token in ids]


def ordinary_tokens(model: Model) -> list[int]:
    """Ids that stand for text, from which random prompts are drawn: none that are special, none that the model lacks."""
    n_vocab, config = model.architecture.n_vocab, model.source.checkpoint.config
    if model.has_tokenizer:
        return [token for token in model.tokenizer.ordinary if token < n_vocab]
    special = {config.get("bos_token_id"), config.get("eos_token_id")}
    return [token for token in range(n_vocab) if token not in special]


def bos_id(model: Model) -> int | None:
    """The BOS token that may be put before a prompt; None where the model has none."""
    if model.has_tokenizer:
        return model.tokenizer.bos_id
    config = model.source.checkpoint.config
    return bos_in_vocabulary(config.get("bos_token_id"), config)

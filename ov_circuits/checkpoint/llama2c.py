"""llama2.c's ``.bin`` files: a header of numbers, then every matrix of one kind after the other, no names.

Three forms (llama2.c, export.py): the first one (seven int32, float32 numbers), version 1 (magic "ak42", 256 bytes of header,
float32) and version 2 (the same with 8-bit groups, each with a float32 scale). Rows of W_Q and W_K lie in interleaved rotary
order. Everything is memory mapped.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ov_circuits.checkpoint.foreign import Foreign, halves
from ov_circuits.checkpoint.stores import Recipe, RecipeStore, first_bytes
from ov_circuits.errors import CircuitsError

_MAGIC = 0x616B3432
_HEADER = 256
_MOST_LAYERS = 10**4


@dataclass(frozen=True)
class _Header:
    dim: int
    d_mlp: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    n_vocab: int
    n_ctx: int
    version: int
    tied: bool
    group: int = 0

    @property
    def d_head(self) -> int:
        return self.dim // self.n_heads

    def fits(self) -> bool:
        """Whether these can be a Llama's numbers: what is no such file at all has others."""
        return (
            min(self.dim, self.d_mlp, self.n_layers, self.n_heads, self.n_kv_heads, self.n_vocab, self.n_ctx) > 0
            and self.n_layers <= _MOST_LAYERS
            and self.dim % (2 * self.n_heads) == 0
            and self.n_heads % self.n_kv_heads == 0
        )


def is_llama2c(file: Path) -> bool:
    """Whether a file begins as llama2.c's do."""
    start = first_bytes(file, _HEADER)
    if start[:4] == struct.pack("<I", _MAGIC):
        return True
    return len(start) >= 28 and _legacy(start).fits()


def open_llama2c(file: Path) -> Foreign:
    """A llama2.c checkpoint; its tokenizer is the ``tokenizer.bin`` or ``tok*.bin`` beside it that has as many tokens.

    Raises:
        CircuitsError: the file is shorter or longer than its header says, or of an unknown version.
    """
    from ov_circuits.checkpoint.vocabularies import find_tokenizer

    start = first_bytes(file, _HEADER)
    header = _versioned(start, file) if start[:4] == struct.pack("<I", _MAGIC) else _legacy(start)
    if not header.fits():
        raise CircuitsError(f"{file} is no llama2.c checkpoint: its header's numbers make no sense ({header})")
    recipes = _Layout(file, header).recipes()
    for name, recipe in recipes.items():
        for part, n in (("q_proj", header.n_heads), ("k_proj", header.n_kv_heads)):
            if f"self_attn.{part}." in name:
                recipes[name] = halves(recipe, n, str(file))
    config: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": header.dim,
        "intermediate_size": header.d_mlp,
        "num_hidden_layers": header.n_layers,
        "num_attention_heads": header.n_heads,
        "num_key_value_heads": header.n_kv_heads,
        "head_dim": header.d_head,
        "vocab_size": header.n_vocab,
        "max_position_embeddings": header.n_ctx,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": header.tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return Foreign(config, RecipeStore(recipes), tokenizer=find_tokenizer(file, header.n_vocab))


def _legacy(start: bytes) -> _Header:
    dim, d_mlp, layers, heads, kv, vocab, ctx = struct.unpack("<7i", start[:28])
    return _Header(dim, d_mlp, layers, heads, kv, abs(vocab), ctx, version=0, tied=vocab > 0)


def _versioned(start: bytes, file: Path) -> _Header:
    if len(start) < _HEADER:
        raise CircuitsError(f"{file} ends within its header: copy it again")
    version, dim, d_mlp, layers, heads, kv, vocab, ctx, shared = struct.unpack("<i7iB", start[4:37])
    if version not in (1, 2):
        raise CircuitsError(f"{file} is a llama2.c checkpoint of version {version}; versions 0, 1 and 2 are read")
    (group,) = struct.unpack("<i", start[37:41]) if version == 2 else (0,)
    header = _Header(dim, d_mlp, layers, heads, kv, vocab, ctx, version, bool(shared), group)
    if version == 2 and group < 1:
        raise CircuitsError(f"{file} says that {group} numbers share a scale: the header is damaged, copy it again")
    return header


class _Layout:
    """Walks through the file in its own order and notes where each tensor lies."""

    def __init__(self, file: Path, header: _Header) -> None:
        self._file, self._h = file, header
        self._at = 28 if header.version == 0 else _HEADER
        self._found: dict[str, Recipe] = {}

    def recipes(self) -> dict[str, Recipe]:
        h = self._h
        queries, kv = h.dim, h.n_kv_heads * h.d_head
        norms = {"input_layernorm": (h.dim,)}
        attention = {
            "self_attn.q_proj": (queries, h.dim),
            "self_attn.k_proj": (kv, h.dim),
            "self_attn.v_proj": (kv, h.dim),
            "self_attn.o_proj": (h.dim, queries),
        }
        mlp = {"mlp.gate_proj": (h.d_mlp, h.dim), "mlp.down_proj": (h.dim, h.d_mlp), "mlp.up_proj": (h.d_mlp, h.dim)}
        post = {"post_attention_layernorm": (h.dim,)}
        embedding, final = {"model.embed_tokens": (h.n_vocab, h.dim)}, {"model.norm": (h.dim,)}
        unembedding = {} if h.tied else {"lm_head": (h.n_vocab, h.dim)}
        if h.version == 0:
            self._once(embedding)
            for kinds in (norms, attention, post, mlp):
                self._every_layer(kinds)
            self._once(final)
            self._at += 4 * h.n_ctx * h.d_head  # cosines and sines of the rotation
            self._once(unembedding)
        else:
            for kinds in (norms, post):
                self._every_layer(kinds, exact=True)
            self._once(final, exact=True)
            self._once(embedding)
            for kinds in (attention, mlp):
                self._every_layer(kinds)
            self._once(unembedding)
        size = self._file.stat().st_size
        if size != self._at:
            raise CircuitsError(
                f"{self._file} has {size:,} bytes where its llama2.c header asks for {self._at:,}: "
                "it is cut short or no llama2.c checkpoint; copy it again"
            )
        return self._found

    def _every_layer(self, kinds: Mapping[str, tuple[int, ...]], *, exact: bool = False) -> None:
        for kind, shape in kinds.items():
            for layer in range(self._h.n_layers):
                self._note(f"model.layers.{layer}.{kind}.weight", shape, exact)

    def _once(self, kinds: Mapping[str, tuple[int, ...]], *, exact: bool = False) -> None:
        for kind, shape in kinds.items():
            self._note(f"{kind}.weight", shape, exact)

    def _note(self, name: str, shape: tuple[int, ...], exact: bool) -> None:
        n, group = math.prod(shape), self._h.group
        quantised = self._h.version == 2 and not exact
        if quantised and n % group:
            raise CircuitsError(
                f"{self._file}: tensor {name} does not divide into groups of {group}: the header is damaged"
            )
        read = self._quantised(self._at, n, group, shape) if quantised else self._plain(self._at, n, shape)
        self._found[name] = Recipe(shape, "int8" if quantised else "float32", str(self._file), read)
        self._at += n + 4 * (n // group) if quantised else 4 * n

    def _plain(self, at: int, n: int, shape: tuple[int, ...]) -> Callable[[], torch.Tensor]:
        return lambda: torch.from_numpy(np.array(self._map("<f4", at, n))).reshape(shape)

    def _quantised(self, at: int, n: int, group: int, shape: tuple[int, ...]) -> Callable[[], torch.Tensor]:
        def read() -> torch.Tensor:
            values = torch.from_numpy(np.array(self._map("i1", at, n))).reshape(-1, group)
            scales = torch.from_numpy(np.array(self._map("<f4", at + n, n // group)))
            return (values.float() * scales[:, None]).reshape(shape)

        return read

    def _map(self, dtype: str, at: int, n: int) -> Any:
        try:
            return np.memmap(self._file, dtype=dtype, mode="r", offset=at, shape=(n,))
        except (OSError, ValueError) as error:
            raise CircuitsError(
                f"{self._file} cannot be read any more ({error}): it changed since it was opened"
            ) from error

"""GGUF files: dequantised one tensor at a time, under Hugging Face's names, rotary row order undone.

llama.cpp stores the rows of W_Q and W_K of Llama models in interleaved pair order (it rotates neighbours, transformers
rotates halves). Read as they lie, OV is right and QK is wrong; :func:`unpermute_rotary` puts them back.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ov_circuits.checkpoint.stores import TensorStore
from ov_circuits.errors import CircuitsError

# GGUF's own name of an architecture -> the model_type whose config and tensor names it is given.
_MODEL_TYPES = {"llama": "llama"}

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFStore(TensorStore):
    """A GGUF file of a Llama-style model.

    Attributes:
        config: what the metadata says, under the keys of a Hugging Face ``config.json``.
        cannot_run: set when the file scales rotary frequencies: the weights are right, a run would attend otherwise.
    """

    def __init__(self, file: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise CircuitsError(f"reading {file} needs the gguf package: pip install 'ov-circuits[gguf]'") from error
        self._file = file
        try:
            reader = gguf.GGUFReader(str(file))
        except (ValueError, KeyError, IndexError, OSError, TypeError, OverflowError, UnicodeDecodeError) as error:
            raise CircuitsError(f"{file} is not a readable GGUF file ({error}): copy or download it again") from error
        self._tensors: dict[str, Any] = {}
        for tensor in reader.tensors:
            name = _hugging_face_name(tensor.name)
            if name is not None:
                self._tensors[name] = tensor
        self.cannot_run = _scaled_rotary(reader)
        self.config = _config(reader, file, tied="lm_head.weight" not in self._tensors)
        self.config["attention_bias"] = any(name.endswith("_proj.bias") for name in self._tensors)

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(n) for n in reversed(self._tensors[name].shape))

    def dtype(self, name: str) -> str:
        return str(self._tensors[name].tensor_type.name)

    def origin(self, name: str) -> str:
        return str(self._file)

    def _read(self, name: str) -> Tensor:
        from gguf import quants

        tensor = self._tensors[name]
        try:
            values = quants.dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise CircuitsError(
                f"tensor {name} in {self._file} is stored as {tensor.tensor_type.name}, "
                f"which the gguf package cannot dequantise ({error}); use a Q4_0 to Q8_0, K-quant, f16 or f32 file"
            ) from error
        values = torch.from_numpy(values.copy()).reshape(self.shape(name))
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if f"self_attn.{part}." in name:
                return unpermute_rotary(values, self.config[heads])
        return values


def unpermute_rotary(rows: Tensor, n_heads: int) -> Tensor:
    """Interleaved rotary pairs (x0 y0 x1 y1 ..) -> halves (x0 x1 .. y0 y1 ..), within each head of [n_heads * d_head, ..]."""
    return rows.unflatten(0, (n_heads, -1, 2)).transpose(1, 2).reshape(rows.shape)


def _hugging_face_name(name: str) -> str | None:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _BLOCK_NAMES:
        return f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}.{parts[3]}"
    return None


def _scaled_rotary(reader: Any) -> str | None:
    scaling = next((f for name, f in reader.fields.items() if name.endswith(".rope.scaling.type")), None)
    scaled = scaling is not None and scaling.contents() != "none"
    if scaled or any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors):
        return "this GGUF file scales its rotary frequencies, which is not carried over: run its safetensors checkpoint"
    return None


def _config(reader: Any, file: Path, *, tied: bool) -> dict[str, Any]:
    def value(key: str, default: Any = None) -> Any:
        field = reader.get_field(key)
        return default if field is None else field.contents()

    architecture = value("general.architecture")
    if architecture not in _MODEL_TYPES:
        raise CircuitsError(
            f"{file} holds a {architecture!r} model; of GGUF files only Llama-style ones ('llama') are read. "
            "Use the safetensors checkpoint of this model"
        )

    def need(key: str) -> Any:
        found = value(f"{architecture}.{key}")
        if found is None:
            raise CircuitsError(f"{file} has no {architecture}.{key} in its metadata: the file is incomplete")
        return found

    heads = need("attention.head_count")
    config = {
        "model_type": _MODEL_TYPES[architecture],
        "hidden_size": need("embedding_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value(f"{architecture}.attention.head_count_kv", heads),
        "intermediate_size": need("feed_forward_length"),
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "rope_theta": value(f"{architecture}.rope.freq_base", 10000.0),
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
    }
    optional = {
        "head_dim": f"{architecture}.attention.key_length",
        "bos_token_id": "tokenizer.ggml.bos_token_id",
        "eos_token_id": "tokenizer.ggml.eos_token_id",
    }
    config |= {name: value(key) for name, key in optional.items() if value(key) is not None}
    vocabulary = value(f"{architecture}.vocab_size")
    if vocabulary is None:
        embedding = next((t for t in reader.tensors if t.name == "token_embd.weight"), None)
        vocabulary = None if embedding is None else int(embedding.shape[1])
    return config | {"vocab_size": vocabulary}

"""Heads: split, views, laziness, against an independent float64 derivation, transformers and TransformerLens."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import captured, hf_model, transformer_bridge
from torch import Tensor

import ov_circuits as ov
from ov_circuits.checkpoint.stores import TensorStore
from ov_circuits.source import _CACHED_LAYERS

CircuitsError = ov.CircuitsError
READERS = ("Q", "K", "V")


def views_of(folder: Path) -> tuple[str, ...]:
    return ("raw", "folded", "centred") if "gpt2" in (folder / "config.json").read_text() else ("raw", "folded")


# -- shapes and names -------------------------------------------------------------------------------------------------


def test_every_tensor_has_its_canonical_shape(any_folder, reference):
    ref, model = reference(any_folder), ov.load(any_folder)
    assert (model.n_layers, model.n_heads) == (ref.n_layers, ref.n_heads)
    for layer in (model.layer(index) for index in {0, ref.n_layers - 1}):
        assert layer.W_Q.shape == (ref.n_heads, ref.d_model, ref.d_head)
        assert layer.W_K.shape == layer.W_V.shape == (ref.n_kv_heads, ref.d_model, ref.d_head)
        assert layer.W_O.shape == (ref.n_heads, ref.d_head, ref.d_model)
        assert layer.ov.shape == layer.qk.shape == (ref.n_heads, ref.d_model, ref.d_model)
        assert layer.ov.rank == ref.d_head
        assert all(t.dtype == torch.float32 for t in (layer.W_Q, layer.W_K, layer.W_V, layer.W_O))
    head = model.head(0, ref.n_heads - 1)
    assert head.W_Q.shape == head.W_K.shape == head.W_V.shape == (ref.d_model, ref.d_head)
    assert head.W_O.shape == (ref.d_head, ref.d_model)
    assert head.kv_head == ref.n_kv_heads - 1


def test_embedding_and_unembedding_are_those_of_the_file(running_folder, reference, assert_close):
    ref, model = reference(running_folder), ov.load(running_folder, view="raw")
    assert model.has_embeddings
    assert_close(model.W_E, ref.W_E, 0)
    assert_close(model.W_U, ref.W_U, 0)
    assert model.b_U is None
    if ref.is_gpt2:
        assert_close(model.W_pos, ref.tensors["wpe.weight"], 0)
    else:
        assert model.W_pos is None


def test_a_file_of_attention_weights_alone_says_what_it_cannot_do(gpt2_small_attention):
    model = ov.load(gpt2_small_attention)
    assert not model.has_embeddings and not model.can_run
    for ask in (lambda: model.W_E, lambda: model.W_U, lambda: model.head("9.9").full_ov, lambda: model.grams):
        with pytest.raises(CircuitsError, match=r"wte\.weight .*attention weights only"):
            ask()
    assert model.W_pos.shape == (1024, 768)


@pytest.mark.parametrize("label", ["1.3", "L1H3", "l1h3", " 1.3 ", (1, 3)])
def test_a_head_is_found_by_every_spelling_of_its_label(tiny_gpt2_char, label):
    model = ov.load(tiny_gpt2_char)
    assert (model.head(label).layer, model.head(label).index) == (1, 3)
    assert model.head(1, 3).label == "1.3"


def test_head_labels_come_layer_by_layer_in_the_order_of_heads(tiny_gpt2_char):
    model = ov.load(tiny_gpt2_char)
    assert model.head_labels == ["0.0", "0.1", "0.2", "0.3", "1.0", "1.1", "1.2", "1.3"]
    assert [head.label for head in model.heads()] == model.head_labels
    assert [layer.index for layer in model.layers()] == [0, 1]


@pytest.mark.parametrize("label", ["2.0", "0.4", (5, 0), (-1, 0), (0, -1), "99.99"])
def test_a_head_out_of_range_is_refused_with_the_range(tiny_gpt2_char, label):
    with pytest.raises(CircuitsError, match=r"no head .*layers 0 to 1 with heads 0 to 3"):
        ov.load(tiny_gpt2_char).head(label)


@pytest.mark.parametrize("label", ["", "1", "1.", "1.2.3", "a.b", "L1", "1,2", "-1.0", 3, "²."])
def test_what_names_no_head_is_refused_with_the_spelling(tiny_gpt2_char, label):
    with pytest.raises(CircuitsError, match=r"'9.9', 'L9H9'"):
        ov.load(tiny_gpt2_char).head(label)


@pytest.mark.parametrize("layer", [-1, 2, 100])
def test_a_layer_out_of_range_is_refused_with_the_range(tiny_gpt2_char, layer):
    with pytest.raises(CircuitsError, match="layers 0 to 1"):
        ov.load(tiny_gpt2_char).layer(layer)
    with pytest.raises(CircuitsError, match="layers 0 to 1"):
        ov.load(tiny_gpt2_char).split_W_O(layer)


# -- the split, against an independent derivation ---------------------------------------------------------------------


def test_every_projection_is_the_independently_derived_one_in_every_view(any_folder, reference, assert_close):
    ref = reference(any_folder)
    for view in views_of(any_folder):
        model = ov.load(any_folder, view=view)
        exact = 0 if view == "raw" else 1e-6
        # Dense [d_model, d_model] products are slow at 768: there folded views are checked on two layers of twelve.
        for index in range(ref.n_layers) if view == "raw" or ref.d_model < 768 else (0, 7):
            layer = model.layer(index)
            gain, norm_bias = ref.norm(index)
            for role in READERS:
                heads = ref.n_heads if role == "Q" else ref.n_kv_heads
                stored = [ref.reader(index, role, h) for h in range(heads)]
                right = torch.stack([ref.view_reader(W, gain, view) for W in stored])
                assert_close(getattr(layer, f"W_{role}"), right, exact)

                biases = [ref.bias(index, role, h) for h in range(heads)]
                if view != "raw" and norm_bias is not None:
                    biases = [norm_bias @ W + (0 if b is None else b) for W, b in zip(stored, biases, strict=True)]
                ours = getattr(layer, f"b_{role}")
                if biases[0] is None:
                    assert ours is None
                else:
                    assert_close(ours, torch.stack(biases), exact)
            blocks = torch.stack([ref.view_writer(ref.W_O(index, h), view) for h in range(ref.n_heads)])
            assert_close(layer.W_O, blocks, exact)
            assert torch.equal(model.split_W_O(index), layer.W_O)
            b_O = ref.bias(index, "O")
            if b_O is None:
                assert layer.b_O is None
            else:
                assert_close(layer.b_O, ref.view_writer(b_O, view), exact)


def test_a_grouped_query_head_reads_with_the_key_value_head_of_its_group(any_folder, reference, assert_close):
    ref, model = reference(any_folder), ov.load(any_folder, view="raw")
    layer = ref.n_layers - 1
    for h in range(ref.n_heads):
        head = model.head(layer, h)
        assert head.kv_head == ref.kv_head(h)
        W_V, W_K = (ref.reader(layer, role, ref.kv_head(h)) for role in "VK")
        W_Q = ref.reader(layer, "Q", h)
        assert_close(head.W_V, W_V, 0)
        assert_close(head.ov.dense(), W_V @ ref.W_O(layer, h))
        scale = model.architecture.score_scale(layer)
        assert_close(head.qk.dense(), W_Q @ W_K.T * scale)
        for role, index in (("Q", h), ("K", ref.kv_head(h)), ("V", ref.kv_head(h))):
            bias, ours = ref.bias(layer, role, index), getattr(head, f"b_{role}")
            assert (bias is None) == (ours is None)
            if bias is not None:
                assert_close(ours, bias, 0)


def test_unembedding_and_its_bias_are_the_independently_derived_ones(running_folder, reference, assert_close):
    ref = reference(running_folder)
    gain, bias = ref.final_norm()
    for view in views_of(running_folder)[1:]:
        model = ov.load(running_folder, view=view)
        assert_close(model.W_U, ref.view_reader(ref.W_U, gain, view))
        assert_close(model.W_E, ref.view_writer(ref.W_E, view))
        if bias is None:
            assert model.b_U is None
        else:
            assert_close(model.b_U, bias @ ref.W_U)


def test_the_full_circuit_has_the_spectra_of_the_dense_one_in_every_view(running_folder, reference, assert_close):
    ref = reference(running_folder)
    layer, gain, final = ref.n_layers - 1, ref.norm(ref.n_layers - 1)[0], ref.final_norm()[0]
    for view in views_of(running_folder):
        model = ov.load(running_folder, view=view)
        for h in {0, ref.n_heads - 1}:
            W_V = ref.view_reader(ref.reader(layer, "V", ref.kv_head(h)), gain, view)
            W_O = ref.view_writer(ref.W_O(layer, h), view)
            W_E = ref.view_writer(ref.W_E, view)
            W_U = ref.view_reader(ref.W_U, final, view)
            dense = W_E @ W_V @ W_O @ W_U
            full = model.head(layer, h).full_ov
            k = min(full.singular_values.shape[-1], 10)
            scale = torch.linalg.matrix_norm(dense)
            assert full.shape == dense.shape
            assert_close(full.singular_values[:k], torch.linalg.svdvals(dense)[:k])
            assert_close(full.frobenius_norm, scale)
            assert abs(full.trace - dense.trace()) <= 1e-6 * scale
            for power in (2, 3):
                right = torch.linalg.matrix_power(dense, power).trace()
                assert abs((full.eigenvalues**power).sum() - right) <= 1e-6 * scale**power
            assert_close(full.rows([0, 2]), dense[[0, 2]], 1e-5)  # a float32 product of four factors
            top = full.top_entries(3)
            assert_close(top.values, dense.flatten().sort(descending=True).values[:3], 1e-5)


def test_the_shared_gram_matrices_are_those_of_the_viewed_embeddings(running_folder, assert_close):
    for view in views_of(running_folder):
        model = ov.load(running_folder, view=view)
        E, U = model.W_E.double(), model.W_U.double()
        assert_close(model.grams.read, E.T @ E)
        assert_close(model.grams.write, U @ U.T)
        assert_close(model.grams.cross, U @ E)


# -- what the views are for: the attention's own numbers --------------------------------------------------------------


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding on halves, [.., position, d_head]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def attention_by_hand(layer: ov.Layer, xhat: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    """[position, d_model]: the sum of all heads' writes and b_O, from the definition, one head at a time in float64."""
    n_heads, group = layer.W_Q.shape[0], layer.W_Q.shape[0] // layer.W_V.shape[0]
    hidden = torch.full((len(xhat), len(xhat)), -torch.inf, dtype=torch.float64).triu(1)

    def project(W: Tensor, b: Tensor | None, head: int) -> Tensor:
        return xhat @ W[head].double() + (0 if b is None else b[head].double())

    total = torch.zeros_like(xhat) if layer.b_O is None else layer.b_O.double().expand(xhat.shape).clone()
    for h in range(n_heads):
        q, k = project(layer.W_Q, layer.b_Q, h), project(layer.W_K, layer.b_K, h // group)
        if rotary is not None:
            q, k = rotated(q, *rotary), rotated(k, *rotary)
        pattern = (q @ k.T * layer.score_scale + hidden).softmax(dim=-1)
        total += pattern @ project(layer.W_V, layer.b_V, h // group) @ layer.W_O[h].double()
    return total


def layer_modules(hf: Any, index: int) -> tuple[Any, Any]:
    """(reading norm, attention) of a layer of a transformers model."""
    if hasattr(hf, "transformer"):
        block = hf.transformer.h[index]
        return block.ln_1, block.attn
    block = hf.model.layers[index]
    return block.input_layernorm, block.self_attn


def run(hf: Any, index: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None, Any]:
    """(residual stream, attention output, rotary tables, norm) of a layer on eight tokens, in float64."""
    norm, attention = layer_modules(hf, index)
    tokens = torch.arange(8).remainder(hf.config.vocab_size).unsqueeze(0)
    with torch.no_grad(), captured(norm) as read, captured(attention) as wrote:
        hf(tokens)
    tables = wrote["kwargs"].get("position_embeddings")
    rotary = None if tables is None else (tables[0][0].double(), tables[1][0].double())
    return read["args"][0][0], wrote["output"][0][0], rotary, norm


def test_heads_in_every_view_add_up_to_the_attention_output_of_transformers(
    any_folder, reference, float64_model, assert_close
):
    ref, hf = reference(any_folder), float64_model(any_folder)
    for index in {0, ref.n_layers - 1}:
        stream, output, rotary, norm = run(hf, index)
        mean = stream.mean(-1, keepdim=True) if ref.is_gpt2 else 0.0
        eps = norm.eps if ref.is_gpt2 else norm.variance_epsilon
        normalised = (stream - mean) / ((stream - mean).pow(2).mean(-1, keepdim=True) + eps).sqrt()
        gain, bias = ref.norm(index)
        read = normalised * gain + (0 if bias is None else bias)

        raw = attention_by_hand(ov.load(any_folder, view="raw").layer(index), read, rotary)
        assert_close(raw, output, 1e-6)  # Llama's own norm and softmax run in float32
        folded = attention_by_hand(ov.load(any_folder, view="folded").layer(index), normalised, rotary)
        assert_close(folded, output, 1e-5)
        if ref.is_gpt2:
            layer = ov.load(any_folder, view="centred").layer(index)
            removed = output - output.mean(-1, keepdim=True)
            assert_close(attention_by_hand(layer, normalised, rotary), removed, 1e-5)
            # Readers are blind to the mean of the stream: it needs not even be subtracted.
            assert_close(attention_by_hand(layer, normalised + 3.0, rotary), removed, 1e-5)


def test_the_final_norm_without_gain_and_the_viewed_unembedding_give_the_models_logits(
    running_folder, float64_model, assert_close
):
    hf = float64_model(running_folder)
    final = hf.transformer.ln_f if hasattr(hf, "transformer") else hf.model.norm
    tokens = torch.arange(7).remainder(hf.config.vocab_size).unsqueeze(0)
    with torch.no_grad(), captured(final) as seen:
        logits = hf(tokens).logits[0]
    x = seen["args"][0][0]
    if hasattr(hf, "transformer"):
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.pow(2).mean(-1, keepdim=True) + final.eps).sqrt()
    else:
        x = x / (x.pow(2).mean(-1, keepdim=True) + final.variance_epsilon).sqrt()
    for view in views_of(running_folder)[1:]:
        model = ov.load(running_folder, view=view)
        ours = x @ model.W_U.double() + (0 if model.b_U is None else model.b_U.double())
        assert_close(ours, logits, 1e-5)


def test_the_default_view_is_centred_for_layernorm_and_folded_for_rmsnorm(any_folder):
    model = ov.load(any_folder)
    assert model.view == ("centred" if model.architecture.norm == "LayerNorm" else "folded")
    assert model.in_view("raw").view == "raw"
    assert model.in_view("raw").view_note != model.view_note


def test_centred_is_refused_for_rmsnorm_and_unknown_views_everywhere(stories260k, tiny_gpt2_char):
    for refused in (lambda: ov.load(stories260k, view="centred"), lambda: ov.load(stories260k).in_view("centred")):
        with pytest.raises(CircuitsError, match=r"RMSNorm subtracts no mean.*'folded'"):
            refused()
    for refused in (lambda: ov.load(tiny_gpt2_char, view="centered"), lambda: ov.load(tiny_gpt2_char).in_view("")):
        with pytest.raises(CircuitsError, match="choose one of raw, folded, centred"):
            refused()


# -- TransformerLens --------------------------------------------------------------------------------------------------


def test_raw_heads_are_those_of_transformer_lens(any_folder, bridge_of):
    bridge, model = bridge_of(any_folder), ov.load(any_folder, view="raw")
    for index in range(model.n_layers):
        layer, attention = model.layer(index), bridge.blocks[index].attn
        for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"):
            theirs, ours = getattr(attention, name), getattr(layer, name)
            if theirs is None:
                assert ours is None, name
            else:
                assert torch.equal(ours, theirs), f"{name} of layer {index}"
    if model.has_embeddings:
        assert torch.equal(model.W_E, bridge.W_E)
        assert torch.equal(model.W_U, bridge.W_U)


def test_a_bridge_in_memory_gives_the_same_heads_and_shares_their_memory(running_folder):
    bridge = transformer_bridge(running_folder)
    ours, right = ov.load(bridge, view="raw"), ov.load(running_folder, view="raw")
    assert ours.has_embeddings
    for index in range(right.n_layers):
        for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"):
            value, expected = getattr(ours.layer(index), name), getattr(right.layer(index), name)
            assert (value is None and expected is None) or torch.equal(value, expected), name
    assert torch.equal(ours.W_U, right.W_U)
    storages = {parameter.untyped_storage().data_ptr() for parameter in bridge.original_model.parameters()}
    layer = ours.layer(0)
    for tensor in (layer.W_Q, layer.W_K, layer.W_V, layer.W_O, ours.source.embedding, ours.source.unembedding):
        assert tensor.untyped_storage().data_ptr() in storages, "a weight was copied"


def test_a_bridge_in_compatibility_mode_is_refused(tiny_gpt2_char):
    bridge = transformer_bridge(tiny_gpt2_char)
    bridge.enable_compatibility_mode(disable_warnings=True)
    with pytest.raises(CircuitsError, match=r"compatibility mode.*folded and centred already"):
        ov.load(bridge)


@pytest.mark.parametrize("name", ["tiny-gpt2-char", "stories260k"])
def test_weights_edited_on_a_bridge_are_the_weights_that_are_read(models_dir, name):
    bridge = transformer_bridge(models_dir / name)
    attention = bridge.blocks[1].attn
    with torch.no_grad():
        for module in (attention.q, attention.k, attention.v, attention.o):
            module.weight.mul_(2.0)
    layer = ov.load(bridge, view="raw").layer(1)
    for role in "QKVO":
        assert torch.equal(getattr(layer, f"W_{role}"), getattr(attention, f"W_{role}")), role


# -- laziness ---------------------------------------------------------------------------------------------------------


class CountingStore(TensorStore):
    """Another store, with a count of every read."""

    def __init__(self, inner: TensorStore) -> None:
        self.inner, self.reads = inner, Counter()

    def names(self) -> Sequence[str]:
        return self.inner.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.inner.shape(name)

    def dtype(self, name: str) -> str:
        return self.inner.dtype(name)

    def origin(self, name: str) -> str:
        return self.inner.origin(name)

    def _read(self, name: str) -> Tensor:
        self.reads[name] += 1
        return self.inner._read(name)


@pytest.fixture
def counted() -> Callable[..., tuple[ov.Model, Counter]]:
    def load(folder: Path, view: str | None = None) -> tuple[ov.Model, Counter]:
        model = ov.load(folder, view=view)
        store = CountingStore(model.source.store)
        model.source.store = store
        return model, store.reads

    return load


def test_opening_and_naming_heads_reads_no_tensor(any_folder, monkeypatch):
    def refuse(self: TensorStore, name: str) -> Tensor:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(TensorStore, "read", refuse)
    model = ov.load(any_folder)
    assert len(list(model.heads())) == len(model.head_labels) == model.n_layers * model.n_heads
    assert repr(model) and repr(model.head("0.0")) and model.head("0.1").kv_head >= 0 and model.view_note


def test_one_heads_W_O_reads_that_layers_attention_and_nothing_else(any_folder, counted):
    model, reads = counted(any_folder)
    last = model.n_layers - 1
    assert model.head(last, 0).W_O.numel() > 0
    assert reads
    parts = (f"h.{last}.attn.", f"h.{last}.ln_1.", f"layers.{last}.self_attn.", f"layers.{last}.input_layernorm.")
    assert all(name.startswith(parts) for name in reads), sorted(reads)


def test_a_layer_is_read_once_for_all_its_heads(tiny_gpt2_char, counted):
    model, reads = counted(tiny_gpt2_char)
    for h in range(model.n_heads):
        assert model.head(1, h).ov.rank == 32
    first = dict(reads)
    for h in range(model.n_heads):
        assert model.head(1, h).qk.rank == 32
    assert reads == first
    assert model.layer(1) is model.layer(1)


def test_only_the_most_recent_layers_are_kept(gpt2_small_attention, counted):
    model, reads = counted(gpt2_small_attention, "raw")

    def misses(index: int) -> bool:
        before = sum(reads.values())
        model.layer(index)
        return sum(reads.values()) > before

    first = list(range(_CACHED_LAYERS))
    assert all(misses(index) for index in first)
    assert not any(misses(index) for index in first)
    assert misses(_CACHED_LAYERS)  # pushes out layer 0, the least recently asked for
    assert not misses(1)
    assert misses(0)  # pushes out layer 2; layer 1 was used since
    assert not misses(1)
    assert misses(2)
    for index in range(model.n_layers):
        model.layer(index)
    assert len(model.source._layers) == _CACHED_LAYERS


def test_views_share_what_was_read_and_do_not_mix(tiny_gpt2_char, assert_close, reference):
    model = ov.load(tiny_gpt2_char)
    raw = model.in_view("raw")
    assert raw.source is model.source
    assert not torch.equal(raw.head("0.0").W_V, model.head("0.0").W_V)
    assert_close(raw.head("0.0").W_V, reference(tiny_gpt2_char).reader(0, "V", 0), 0)


# -- GGUF -------------------------------------------------------------------------------------------------------------


def llama_cpp_permute(weights: np.ndarray, n_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q_proj and k_proj (convert_hf_to_gguf.py, LlamaModel.permute)."""
    rows = weights.shape[0]
    split = weights.reshape(n_heads, 2, rows // n_heads // 2, *weights.shape[1:])
    return split.swapaxes(1, 2).reshape(weights.shape)


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write_gguf(folder: Path, file: Path, kind: str) -> Path:
    """A Llama folder as a GGUF file, as llama.cpp's converter would write it; vectors stay f32, as there."""
    import gguf
    from gguf import GGMLQuantizationType as Kind
    from gguf import quants
    from safetensors.numpy import load_file

    from ov_circuits.checkpoint.stores import read_json

    config = read_json(folder / "config.json")
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_key_length(config["head_dim"])
    for name, values in load_file(folder / "model.safetensors").items():
        module, _, end = name.rpartition(".")
        if module.startswith("model.layers."):
            number, part = module.removeprefix("model.layers.").split(".", 1)
            target = f"blk.{number}.{GGUF_NAMES[part]}.{end}"
        else:
            target = f"{GGUF_NAMES[module]}.{end}"
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name:
                values = llama_cpp_permute(values, config[heads])
        values = np.ascontiguousarray(values)
        stored = Kind.F32 if values.ndim == 1 else Kind[kind]
        writer.add_tensor(target, quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def quantisation_bound(weights: Tensor, kind: str) -> Tensor:
    """How far a value may lie from its stored one: half a step of its block of 32, and half precision."""
    if kind == "F32":
        return torch.zeros_like(weights)
    if kind == "F16":
        return weights.abs() * 2.0**-11 + 2.0**-25
    blocks = weights.unflatten(-1, (-1, 32))
    low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    largest = torch.maximum(low.abs(), high.abs())
    step = largest / 127 if kind == "Q8_0" else (high - low) / 15
    return (step / 2 + (largest + (high - low)) * 2.0**-10).expand(blocks.shape).flatten(-2)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("variant", ["grouped", "biases", "tied"])
def test_a_gguf_file_holds_the_heads_of_the_safetensors_checkpoint(write_tiny, tmp_path, kind, variant):
    config = {"head_dim": 8, "num_key_value_heads": 2, "intermediate_size": 64}
    varied = {"biases": {"attention_bias": True, "head_dim": 16}, "tied": {"tie_word_embeddings": True}}
    config |= varied.get(variant, {})
    folder = write_tiny("llama", seed=5, **config)
    file = write_gguf(folder, tmp_path / "tiny.gguf", kind)
    ours, right = ov.load(file, view="raw"), ov.load(folder, view="raw")
    single = float(np.float32(right.architecture.norm_eps))  # GGUF keeps it in single precision
    assert ours.architecture == replace(right.architecture, norm_eps=single)
    assert ours.can_run
    assert sorted(ours.source.store.names()) == sorted(right.source.store.names())
    for name in right.source.store.names():
        value, expected = ours.source.store.read(name), right.source.store.read(name)
        allowed = quantisation_bound(expected, kind) if expected.ndim == 2 else torch.zeros_like(expected)
        excess = (value - expected).abs() - allowed
        assert excess.max() <= 0, f"{name} is {float(excess.max()):.2e} further off than {kind} may be"
    if kind == "F32":
        for index in range(right.n_layers):
            for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"):
                value, expected = getattr(ours.layer(index), name), getattr(right.layer(index), name)
                assert (value is None and expected is None) or torch.equal(value, expected), name


def test_a_gguf_file_without_a_vocabulary_size_takes_it_from_the_embedding(write_tiny, tmp_path, monkeypatch):
    import gguf

    monkeypatch.setattr(gguf.GGUFWriter, "add_vocab_size", lambda self, size: None)
    folder = write_tiny("llama", head_dim=8)
    assert ov.load(write_gguf(folder, tmp_path / "tiny.gguf", "F32")).architecture.n_vocab == 23


# -- a tie that the file contradicts ----------------------------------------------------------------------------------


def test_an_unembedding_that_differs_from_the_tied_embedding_is_used_as_transformers_does(tiny_folders, tmp_path):
    from safetensors.torch import load_file, save_file

    for name in ("gpt2-tied", "llama-tied"):
        folder = shutil.copytree(tiny_folders(name), tmp_path / name)
        state = load_file(folder / "model.safetensors")
        same = next(t for key, t in state.items() if "wte" in key or "embed_tokens" in key)
        for stored in (same.clone(), same + 1.0):
            save_file(state | {"lm_head.weight": stored}, folder / "model.safetensors", metadata={"format": "pt"})
            model = ov.load(folder, view="raw")
            assert torch.equal(model.W_U, hf_model(folder).lm_head.weight.detach().T)
            E, U = model.W_E.double(), model.W_U.double()
            assert torch.allclose(model.grams.cross, U @ E)
            assert torch.allclose(model.grams.write, U @ U.T)


def test_positions_are_centred_as_other_writers_are(tiny_gpt2_char):
    raw, centred = (ov.load(tiny_gpt2_char, view=view).W_pos for view in ("raw", "centred"))
    assert float(raw.mean(1).abs().max()) > 1e-4
    torch.testing.assert_close(centred, raw - raw.mean(1, keepdim=True), rtol=0, atol=1e-6)

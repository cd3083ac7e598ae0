"""Wrong answers that tools of this field have shipped (those about weights), one a test.

Each test works the wrong way out too, on a real model wherever one shows it, and demands that it differ: a trap that
nobody can fall into proves nothing. Right values come from the definition in float64, from running the model, or from
TransformerLens, never from the code under test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REAL_MODELS, captured, hf_model, relative_error
from torch import Tensor

import ov_circuits as ov
from ov_circuits.checkpoint.gguf_store import unpermute_rotary
from ov_circuits.checkpoint.stores import MemoryStore

CircuitsError = ov.CircuitsError
PLAINLY_WRONG = 0.1  # relative to the largest entry: far beyond rounding


@pytest.fixture(scope="module", params=REAL_MODELS)
def runs(request, models_dir: Path, float64_model) -> tuple[Path, Any]:
    """Each real model in transformers, in float64 (GPT-2 small's attention with small random MLPs and vocabulary)."""
    return models_dir / request.param, float64_model(models_dir / request.param)


@pytest.fixture(scope="module", params=[name for name in REAL_MODELS if name != "stories260k"])
def gpt2_runs(request, models_dir: Path, float64_model) -> tuple[Path, Any]:
    """The GPT-2-style ones: biases, LayerNorm, a fused projection."""
    return models_dir / request.param, float64_model(models_dir / request.param)


def output_projections(model: Any) -> list[torch.nn.Module]:
    if hasattr(model, "transformer"):
        return [block.attn.c_proj for block in model.transformer.h]
    return [layer.self_attn.o_proj for layer in model.model.layers]


def projected(model: Any, layer: int) -> tuple[Tensor, Tensor]:
    """The output projection's input (all heads' z side by side) and output on a few tokens."""
    tokens = torch.arange(9).remainder(model.config.vocab_size).unsqueeze(0)
    with torch.no_grad(), captured(output_projections(model)[layer]) as seen:
        model(tokens)
    return seen["args"][0][0], seen["output"][0]


def layers_to_check(folder: Path) -> range:
    n = ov.load(folder).n_layers
    return range(0, n, 5) if n > 5 else range(n)


# -- the split of W_O -------------------------------------------------------------------------------------------------


def test_heads_are_the_input_of_the_output_projection_not_slices_of_its_output(runs):
    folder, hf = runs
    model = ov.load(folder, view="raw")
    for index in layers_to_check(folder):
        z, output = projected(hf, index)
        layer, d_head = model.layer(index), model.architecture.d_head
        bias = 0 if layer.b_O is None else layer.b_O.double()
        slots = [slice(h * d_head, (h + 1) * d_head) for h in range(model.n_heads)]
        writes = torch.stack([z[:, slots[h]] @ layer.W_O[h].double() for h in range(model.n_heads)])
        assert relative_error(writes.sum(0) + bias, output) < 1e-6

        # The wrong way has the shape of z, and its slices even add up to the output: only the numbers are of no head.
        sliced = torch.stack([torch.zeros_like(output) for _ in slots])
        for h, slot in enumerate(slots):
            sliced[h, :, slot] = output[:, slot]
        assert torch.equal(sliced.sum(0), output)
        assert relative_error(sliced, writes) > PLAINLY_WRONG


def test_a_square_W_O_split_on_the_wrong_axis_fails_the_sum_of_heads(runs, reference):
    folder, hf = runs
    ref = reference(folder)
    assert ref.n_heads * ref.d_head == ref.d_model, "square: both splits have the same shapes"
    model = ov.load(folder, view="raw")
    for index in layers_to_check(folder):
        z, output = projected(hf, index)
        heads = z.unflatten(-1, (ref.n_heads, ref.d_head))
        layer = model.layer(index)
        bias = 0 if layer.b_O is None else layer.b_O.double()
        right = layer.W_O.double()
        in_out = right.flatten(0, 1)  # the (in, out) matrix
        wrong = in_out.T.unflatten(0, (ref.n_heads, ref.d_head))
        assert wrong.shape == right.shape
        assert relative_error(torch.einsum("thk,hkd->td", heads, right) + bias, output) < 1e-6
        assert relative_error(torch.einsum("thk,hkd->td", heads, wrong) + bias, output) > PLAINLY_WRONG


@pytest.mark.parametrize("name", ["llama-narrow-heads", "llama-wide-heads"])
def test_heads_whose_width_is_not_d_model_over_n_heads_are_cut_at_their_own_width(tiny_folders, name):
    folder = tiny_folders(name)
    hf, model = hf_model(folder).double(), ov.load(folder, view="raw")
    d_head = model.architecture.d_head
    assert d_head * model.n_heads != model.architecture.d_model
    for index in range(model.n_layers):
        z, output = projected(hf, index)
        layer = model.layer(index)
        bias = 0 if layer.b_O is None else layer.b_O.double()
        right = torch.einsum("thk,hkd->td", z.unflatten(-1, (model.n_heads, d_head)), layer.W_O.double()) + bias
        assert relative_error(right, output) < 1e-6


# -- which head reads -------------------------------------------------------------------------------------------------


def one_token_output(hf: Any, index: int) -> tuple[Tensor, Tensor]:
    """(what the attention reads, what it writes) on a single token: attention is 1 on itself, so patterns drop out."""
    attention = hf.model.layers[index].self_attn
    with torch.no_grad(), captured(attention) as seen:
        hf(torch.tensor([[5]]))
    return seen["kwargs"]["hidden_states"][0], seen["output"][0][0]


def test_query_heads_share_key_value_heads_in_consecutive_groups_not_tiled(stories260k):
    hf, model = hf_model(stories260k).double(), ov.load(stories260k, view="raw")
    for index in range(model.n_layers):
        read, wrote = one_token_output(hf, index)
        layer = model.layer(index)
        assert (layer.W_V.shape[0], layer.W_O.shape[0]) == (4, 8)
        group = 2
        values = torch.einsum("td,gdk->gtk", read, layer.W_V.double())

        def output(of_head: Tensor, W_O: Tensor = layer.W_O) -> Tensor:
            return torch.einsum("htk,hkd->td", of_head, W_O.double())

        assert relative_error(output(values.repeat_interleave(group, 0)), wrote) < 1e-6
        assert relative_error(output(values.repeat(group, 1, 1)), wrote) > PLAINLY_WRONG
        # Ours, head by head: the full circuit of each query head already carries its group.
        ours = sum(read @ model.head(index, h).W_V.double() @ model.head(index, h).W_O.double() for h in range(8))
        assert relative_error(ours, wrote) < 1e-6
        dense = layer.ov.dense().double().sum(0)
        assert relative_error(read @ dense, wrote) < 1e-5


def test_a_query_heads_index_is_no_index_of_its_values(stories260k):
    model = ov.load(stories260k, view="raw")
    W_V = model.layer(0).W_V
    for h in range(model.n_heads):
        assert torch.equal(model.head(0, h).W_V, W_V[h // 2])
    assert not torch.equal(model.head(0, 2).W_V, W_V[2])  # silently another head's
    with pytest.raises(IndexError):  # and for most heads a crash
        _ = W_V[7]


def test_the_fused_projection_of_gpt2_is_cut_into_thirds_and_not_by_head(gpt2_runs):
    folder, hf = gpt2_runs
    model = ov.load(folder, view="raw")
    for index in layers_to_check(folder):
        attention = hf.transformer.h[index].attn
        tokens = torch.arange(1).unsqueeze(0)
        with torch.no_grad(), captured(attention) as seen:
            hf(tokens)
        read, wrote = (seen["args"] or (seen["kwargs"]["hidden_states"],))[0][0], seen["output"][0][0]
        layer = model.layer(index)

        def output(W_V: Tensor, b_V: Tensor, read: Tensor = read, layer: ov.Layer = layer) -> Tensor:
            values = torch.einsum("td,hdk->htk", read, W_V.double()) + b_V.double().unsqueeze(1)
            return torch.einsum("htk,hkd->td", values, layer.W_O.double()) + layer.b_O.double()

        assert relative_error(output(layer.W_V, layer.b_V), wrote) < 1e-6
        # Interleaved by head, as NeoX stores it: [q k v] of head 0, then of head 1. Same shapes.
        weight, bias = attention.c_attn.weight.detach(), attention.c_attn.bias.detach()
        by_head = weight.unflatten(1, (model.n_heads, 3, -1))[:, :, 2].movedim(1, 0)
        assert by_head.shape == layer.W_V.shape
        assert relative_error(output(by_head, bias.unflatten(0, (model.n_heads, 3, -1))[:, 2]), wrote) > PLAINLY_WRONG


# -- GGUF -------------------------------------------------------------------------------------------------------------


def permute(W: Tensor, n_heads: int) -> Tensor:
    """llama.cpp's row order: the two rotary halves of each head interleaved."""
    return W.unflatten(0, (n_heads, 2, -1)).transpose(1, 2).reshape(W.shape)


def test_permuted_query_and_key_rows_leave_OV_right_and_patterns_wrong(stories260k):
    hf = hf_model(stories260k, attn_implementation="eager").double()
    tokens = torch.tensor([[1, 403, 407, 261, 378, 432, 399, 410]])
    with torch.no_grad():
        right = hf(tokens, output_attentions=True).attentions
    model = ov.load(stories260k, view="raw")
    state = {name: t.detach().clone() for name, t in hf.state_dict().items()}
    for name in state:
        for part, heads in (("q_proj", 8), ("k_proj", 4)):
            if part in name:
                stored = permute(state[name], heads)
                assert not torch.equal(stored, state[name])
                assert torch.equal(unpermute_rotary(stored, heads), state[name]), "our reading undoes it"
                state[name] = stored
    hf.load_state_dict(state)
    with torch.no_grad():
        wrong = hf(tokens, output_attentions=True).attentions
    assert max(relative_error(w, r) for w, r in zip(wrong, right, strict=True)) > PLAINLY_WRONG
    # OV, and even Q K^T at offset 0, do not see the permutation: they cannot be the check.
    q, k = (state[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qk")
    at_offset_zero = q[:8].T @ k[:8] / 8**0.5
    assert relative_error(model.head("0.0").qk.dense(), at_offset_zero) < 1e-6


# -- norms ------------------------------------------------------------------------------------------------------------


def test_centring_an_rmsnorm_model_changes_its_circuits_and_is_refused(stories260k, reference):
    ref = reference(stories260k)
    folded = ref.view_reader(ref.reader(3, "V", 0), ref.norm(3)[0], "folded")
    centred = ref.view_reader(ref.reader(3, "V", 0), ref.norm(3)[0], "centred")
    right = torch.linalg.svdvals(folded @ ref.W_O(3, 0))
    wrong = torch.linalg.svdvals(centred @ ref.view_writer(ref.W_O(3, 0), "centred"))
    assert relative_error(wrong[:8], right[:8]) > 1e-3
    with pytest.raises(CircuitsError, match="RMSNorm"):
        ov.load(stories260k, view="centred")
    ours = ov.load(stories260k).head("3.0").ov.singular_values
    assert relative_error(ours, right[:8]) < 1e-6


def test_a_forgotten_gain_of_the_reading_norm_changes_the_order_of_heads(gpt2_small_attention, reference):
    """GPT-2 small, layer 8: without the gain the heads' OV norms come in another order."""
    ref = reference(gpt2_small_attention)
    gain, _ = ref.norm(8)

    def norms(view: str) -> Tensor:
        readers = [ref.view_reader(ref.reader(8, "V", h), gain, view) for h in range(12)]
        return torch.stack([torch.linalg.matrix_norm(readers[h] @ ref.W_O(8, h)) for h in range(12)])

    right, wrong = norms("folded"), norms("raw")
    assert relative_error(wrong, right) > PLAINLY_WRONG
    assert right.argsort().tolist() != wrong.argsort().tolist()
    ours = ov.load(gpt2_small_attention, view="folded").layer(8).ov.frobenius_norm
    assert relative_error(ours, right) < 1e-6


def test_a_forgotten_gain_of_the_final_norm_changes_logits_and_their_order(tiny_gpt2_char, reference):
    ref, model = reference(tiny_gpt2_char), ov.load(tiny_gpt2_char)
    hf = hf_model(tiny_gpt2_char).double()
    tokens = torch.arange(1, 40).unsqueeze(0)
    with torch.no_grad(), captured(hf.transformer.ln_f) as seen:
        logits = hf(tokens).logits[0]
    x = seen["args"][0][0]
    x = x - x.mean(-1, keepdim=True)
    x = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    assert relative_error(x @ model.W_U.double() + model.b_U.double(), logits) < 1e-5
    _, bias = ref.final_norm()
    without_gain = x @ ref.W_U + bias @ ref.W_U
    assert relative_error(without_gain, logits) > PLAINLY_WRONG
    assert (without_gain.argsort(-1) != logits.argsort(-1)).any()


def test_the_reading_norms_bias_reaches_the_value_bias(gpt2_runs, reference):
    """Folded readers without ``beta W`` write another constant at every position."""
    folder, hf = gpt2_runs
    ref = reference(folder)
    index = 0
    layer = ov.load(folder, view="folded").layer(index)
    stream = torch.zeros(1, ref.d_model, dtype=torch.float64)  # LayerNorm of zeros is its bias
    right = sum(
        ((ref.norm(index)[1] @ ref.reader(index, "V", h)) + ref.bias(index, "V", h)) @ ref.W_O(index, h)
        for h in range(ref.n_heads)
    )
    block = hf.transformer.h[index]
    with torch.no_grad():
        output = block.attn(block.ln_1(stream).unsqueeze(0))[0][0]
    assert relative_error((right + ref.bias(index, "O")).unsqueeze(0), output) < 1e-6
    ours = torch.einsum("hk,hkd->d", layer.b_V.double(), layer.W_O.double())
    assert relative_error(ours, right) < 1e-5
    raw = ov.load(folder, view="raw").layer(index)
    forgotten = torch.einsum("hk,hkd->d", raw.b_V.double(), raw.W_O.double())
    assert relative_error(forgotten, right) > PLAINLY_WRONG


def test_the_value_bias_is_a_term_of_its_own_and_no_part_of_b_O(gpt2_runs):
    folder, hf = gpt2_runs
    model = ov.load(folder, view="raw")
    layer = model.layer(0)
    z, output = projected(hf, 0)
    values_only = z.unflatten(-1, (model.n_heads, -1)) - layer.b_V.double()  # rows of the pattern sum to one
    parts = torch.einsum("thk,hkd->td", values_only, layer.W_O.double())
    bias = torch.einsum("hk,hkd->d", layer.b_V.double(), layer.W_O.double())
    assert relative_error(parts + bias + layer.b_O.double(), output) < 1e-6
    forgotten, twice = parts + layer.b_O.double(), parts + 2 * bias + layer.b_O.double()
    for wrong in (forgotten, twice):
        off = wrong - output
        assert float(off.abs().max()) > 1e-3 * float(output.abs().max())
        assert relative_error(off, off[:1].expand_as(off)) < 1e-6, "off by the same constant at every position"


# -- spectra ----------------------------------------------------------------------------------------------------------


def test_singular_values_say_that_every_head_copies_and_eigenvalues_do_not(gpt2_small_attention, reference):
    ref, model = reference(gpt2_small_attention), ov.load(gpt2_small_attention)
    from_eigenvalues, from_singular_values = [], []
    for h in range(model.n_heads):
        ov_circuit = model.head(1, h).ov
        values = ov_circuit.eigenvalues
        from_eigenvalues.append(float(values.sum().real / values.abs().sum()))
        from_singular_values.append(float(ov_circuit.singular_values.sum() / ov_circuit.singular_values.abs().sum()))
    assert from_singular_values == [1.0] * 12
    assert sum(score < -0.4 for score in from_eigenvalues) == 10, "most heads of layer 1 write against what they read"
    gain, _ = ref.norm(1)
    dense = ref.view_reader(ref.reader(1, "V", 11), gain, "centred") @ ref.view_writer(ref.W_O(1, 11), "centred")
    right = torch.linalg.eigvals(dense)
    score = float(right.sum().real / right.abs().sum())
    assert score < -0.99
    assert abs(from_eigenvalues[11] - score) < 1e-6


def test_a_singular_pair_has_two_ends_and_reading_one_tells_half(tiny_gpt2_char):
    """The sign of a pair is arbitrary: (u, v) and (-u, -v) are the same circuit, with other tokens on top."""
    model = ov.load(tiny_gpt2_char)
    pairs = model.head("1.0").ov.singular_pairs(4)
    logits = (pairs.V.mT @ model.W_U.double()) * pairs.S.unsqueeze(-1)
    high, low = logits.topk(5).indices, (-logits).topk(5).indices
    for i in range(4):
        assert not set(high[i].tolist()) & set(low[i].tolist())
    # Both ends carry weight: for a direction, the bottom is not noise beside the top.
    ends = torch.stack([logits.amax(-1), -logits.amin(-1)])
    assert (ends.amin(0) > 0.25 * ends.amax(0)).all()
    every = model.head("1.0").ov.singular_pairs()
    turned = (-every.U) @ torch.diag(every.S) @ (-every.V).mT
    assert relative_error(turned, model.head("1.0").ov.dense().double()) < 1e-6


def test_a_copying_score_by_trace_over_norm_cannot_reach_its_threshold(gpt2_small_attention):
    """``tr M / (||M||_F sqrt(d_model))`` is at most sqrt(d_head / d_model) = 0.29: nothing is ever above 0.3."""
    model = ov.load(gpt2_small_attention)
    scores, bounded = [], []
    for index in (5, 9, 10):
        circuits = model.layer(index).ov
        scores.append(circuits.trace / (circuits.frobenius_norm * 768**0.5))
        bounded.append(circuits.eigenvalues.sum(-1).real / circuits.eigenvalues.abs().sum(-1))
    assert torch.cat(scores).abs().max() <= (64 / 768) ** 0.5
    assert torch.cat(bounded).max() > 0.9, "the score of Elhage et al. does reach its range"
    assert torch.cat(bounded).abs().max() <= 1


def test_composition_needs_the_senders_write_side_and_the_receivers_whole_QK(
    gpt2_small_attention,
):
    """DEFINITIONS 9: K-composition out of 4.11 ranks 6.9 5.1 5.5 7.10 5.0 7.2 first."""
    model = ov.load(gpt2_small_attention)
    sender = model.head("4.11").ov
    names, right, read_side, key_only = [], [], [], []
    A = sender.left.double() @ sender.right.double()
    for index in range(5, 8):
        for h in range(model.n_heads):
            head = model.head(index, h)
            W_Q, W_K = head.W_Q.double(), head.W_K.double()
            W_QK = W_Q @ W_K.T
            names.append(head.label)
            size = torch.linalg.matrix_norm(A) * torch.linalg.matrix_norm(W_QK)
            right.append(float(torch.linalg.matrix_norm(A @ W_K @ W_Q.T) / size))
            read_side.append(float(torch.linalg.matrix_norm(A.T @ W_K @ W_Q.T) / size))
            key_only.append(float(torch.linalg.matrix_norm(A @ W_K)))  # W_K alone, not divided by norms
            # Ours, without forming any [d_model, d_model] matrix; sender @ receiver multiplies in float32.
            ours = (sender @ head.qk.T).frobenius_norm / (sender.frobenius_norm * head.qk.frobenius_norm)
            assert abs(float(ours) - right[-1]) < 1e-5 * right[-1]

    def first(values: list[float], n: int = 6) -> list[str]:
        return [names[i] for i in torch.tensor(values).argsort(descending=True)[:n]]

    assert first(right) == ["6.9", "5.1", "5.5", "7.10", "5.0", "7.2"]
    assert [round(v, 3) for v in sorted(right, reverse=True)[:6]] == [0.103, 0.102, 0.097, 0.090, 0.089, 0.087]
    assert first(read_side) != first(right)
    assert first(key_only) != first(right)


# -- precision and files ----------------------------------------------------------------------------------------------


def test_spectra_of_a_bfloat16_checkpoint_are_those_of_its_numbers_in_float64(tiny_gpt2_char, reference):
    ref = reference(tiny_gpt2_char)
    W_V, W_O = ref.reader(1, "V", 0).bfloat16(), ref.W_O(1, 0).bfloat16()
    store = MemoryStore({"v": W_V, "o": W_O})
    assert store.read("v").dtype == torch.float32
    from ov_circuits.linalg.lowrank import LowRank

    ours = LowRank(store.read("v"), store.read("o")).singular_values
    right = torch.linalg.svdvals(W_V.double() @ W_O.double())[:32]
    noise = torch.linalg.svdvals((W_V @ W_O).float())[:32]
    assert relative_error(ours, right) < 1e-6
    assert relative_error(noise, right) > 1e-4


def test_a_full_circuits_spectrum_never_forms_its_long_factors(tiny_gpt2_char):
    full = ov.load(tiny_gpt2_char).full_ov(1)
    for number in (full.singular_values, full.eigenvalues, full.frobenius_norm, full.trace, full.spectral_norm):
        assert number.shape[0] == 4
    full.singular_pairs(2)
    full.rows([3])
    formed = {name for name in ("left", "right") if name in vars(full)}
    assert not formed, f"[heads, n_vocab, d_head] was formed: {formed}"
    _ = full.left
    assert "left" in vars(full), "the test looks in the wrong place"

"""A trace against transformers itself: patterns, values and writes from forward hooks, not from the bridge it was recorded with."""

from __future__ import annotations

import pytest
import torch
from conftest import hf_model

import ov_circuits as ov
from ov_circuits import CircuitsError


def prompt_for(model, length=9):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(model.architecture.n_vocab, (length,), generator=generator).tolist()


@pytest.fixture(scope="session")
def traced(reference):
    """``traced(folder)`` -> (model, trace, what transformers gives on the same ids), one a folder and session."""
    made = {}

    def get(folder):
        if folder not in made:
            model = ov.load(folder)
            tokens = prompt_for(model)
            made[folder] = (model, model.trace(tokens), run_transformers(folder, tokens))
        return made[folder]

    return get


def run_transformers(folder, tokens):
    """Patterns, each attention layer's output and what its output projection was fed, and logits, by forward hooks."""
    network = hf_model(folder, attn_implementation="eager")
    fed, wrote = [], []
    projections = [m for name, m in network.named_modules() if name.endswith(("attn.c_proj", "self_attn.o_proj"))]

    def note(module, args, output):
        fed.append(args[0][0])
        wrote.append(output[0])

    hooks = [module.register_forward_hook(note) for module in projections]
    with torch.no_grad():
        result = network(torch.tensor([tokens]), output_attentions=True)
    for hook in hooks:
        hook.remove()
    return {"patterns": [a[0] for a in result.attentions], "fed": fed, "wrote": wrote, "logits": result.logits[0]}


def test_patterns_and_logits_are_those_of_transformers(traceable_folder, traced, assert_close):
    model, trace, theirs = traced(traceable_folder)
    for head in model.heads():
        assert_close(trace.pattern(head), theirs["patterns"][head.layer][head.index], 1e-5)
    assert_close(trace.logits, theirs["logits"], 1e-5)


def test_heads_writes_and_b_O_add_up_to_transformers_attention_output(traceable_folder, traced):
    model, trace, theirs = traced(traceable_folder)
    for layer in range(model.n_layers):
        total = sum(trace.write(f"{layer}.{h}").double() for h in range(model.n_heads))
        b_O = model.in_view("raw").layer(layer).b_O
        total = total if b_O is None else total + b_O
        expected = theirs["wrote"][layer].double()
        error = (total - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() <= 1e-5, f"layer {layer}"


def test_a_write_is_the_heads_slots_of_the_projections_input_through_its_block(
    traceable_folder, traced, reference, assert_close
):
    model, trace, theirs = traced(traceable_folder)
    ref = reference(traceable_folder)
    for head in model.heads():
        slots = [head.index * ref.d_head + i for i in range(ref.d_head)]
        z = theirs["fed"][head.layer][:, slots].double()
        assert_close(trace.write(head), z @ ref.W_O(head.layer, head.index), 1e-5)


def test_source_writes_and_the_value_bias_add_up_to_the_write(traceable_folder, traced, assert_close):
    model, trace, _ = traced(traceable_folder)
    for head in model.heads():
        parts = trace.head_writes(head)
        assert parts.shape == (len(trace), len(trace), model.architecture.d_model)
        assert_close(parts.sum(0) + trace.value_bias_write(head), trace.write(head), 1e-5)


def test_a_source_write_is_attention_times_that_sources_value_without_its_bias(
    traceable_folder, traced, reference, assert_close
):
    model, trace, theirs = traced(traceable_folder)
    ref = reference(traceable_folder)
    for head in model.heads():
        kv = ref.kv_head(head.index)
        x = trace.record.layers[head.layer].attention_input.double()
        moved = x @ ref.reader(head.layer, "V", kv) @ ref.W_O(head.layer, head.index)
        attention = theirs["patterns"][head.layer][head.index].double()
        expected = torch.stack([attention[:, s, None] * moved[s] for s in range(len(trace))])
        assert_close(trace.head_writes(head), expected, 1e-5)


def test_the_value_bias_is_written_at_every_position_whatever_is_attended(
    traceable_folder, traced, reference, assert_close
):
    model, trace, _ = traced(traceable_folder)
    ref = reference(traceable_folder)
    for head in model.heads():
        bias = ref.bias(head.layer, "V", ref.kv_head(head.index))
        constant = torch.zeros(ref.d_model) if bias is None else bias @ ref.W_O(head.layer, head.index)
        assert_close(trace.value_bias_write(head), constant.expand(len(trace), -1), 1e-5)


def test_norms_for_all_heads_are_those_of_the_writes(traceable_folder, traced, assert_close):
    model, trace, _ = traced(traceable_folder)
    norms, weighted = trace.write_norms(), trace.value_weighted_patterns()
    for head in model.heads():
        assert_close(norms[head.layer, head.index], trace.write(head).norm(dim=-1), 1e-5)
        assert_close(weighted[head.layer, head.index], trace.head_writes(head).norm(dim=-1).T, 1e-5)


def test_the_view_of_the_model_does_not_change_a_trace(tiny_gpt2_char):
    model = ov.load(tiny_gpt2_char)
    tokens = prompt_for(model)
    traces = [model.in_view(view).trace(tokens) for view in ("raw", "folded", "centred")]
    assert all(torch.equal(t.write("1.2"), traces[0].write("1.2")) for t in traces)


def test_a_bridge_in_memory_is_run_as_it_is_and_its_hooks_stay(stories260k, bridge_of, assert_close):
    bridge = bridge_of(stories260k)
    calls = []
    bridge.add_hook("blocks.0.hook_attn_out", lambda value, hook: calls.append(hook.name))
    try:
        model = ov.load(bridge)
        trace = model.trace([1, 5, 9])
        assert calls, "the user's own hook did not fire"
        assert_close(trace.logits, ov.load(stories260k).trace([1, 5, 9]).logits, 1e-5)
        calls.clear()
        bridge(torch.tensor([[1, 5, 9]]))
        assert len(calls) == 1, "the user's hook was removed, or ours were left"
    finally:
        bridge.reset_hooks()


# -- BOS ------------------------------------------------------------------------------------------------------------------


def test_bos_is_put_before_text_and_said(stories260k):
    model = ov.load(stories260k)
    trace = model.trace("Once upon")
    assert trace.bos_added and trace.tokens[0] == 1 and trace.texts[0] == "<s>" and "BOS added" in repr(trace)
    without = model.trace("Once upon", bos=False)
    assert not without.bos_added and without.tokens == trace.tokens[1:]


def test_ids_are_run_as_they_are_and_bos_is_never_doubled(stories260k):
    model = ov.load(stories260k)
    assert model.trace([5, 9]).tokens == (5, 9)
    assert model.trace([5, 9], bos=True).tokens == (1, 5, 9)
    assert model.trace([1, 5], bos=True).tokens == (1, 5)


def test_bos_where_there_is_none_is_refused(gpt_nano_sort):
    with pytest.raises(CircuitsError, match="BOS"):
        ov.load(gpt_nano_sort).trace([0, 1], bos=True)


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(stories260k, prompt):
    with pytest.raises(CircuitsError, match="empty"):
        ov.load(stories260k).trace(prompt)


def test_a_prompt_past_the_context_is_refused_with_both_lengths(gpt_nano_sort):
    with pytest.raises(CircuitsError, match=r"12 tokens.*at most 11"):
        ov.load(gpt_nano_sort).trace([0] * 12)


def test_ids_outside_the_vocabulary_are_refused(gpt_nano_sort):
    with pytest.raises(CircuitsError, match="token id 3"):
        ov.load(gpt_nano_sort).trace([0, 3])


def test_text_without_a_tokenizer_is_refused(gpt_nano_sort):
    with pytest.raises(CircuitsError, match="tokenizer"):
        ov.load(gpt_nano_sort).trace("ABC")


def test_a_config_that_transformer_lens_ignores_is_refused_not_run_as_another_model(tiny_folders):
    with pytest.raises(CircuitsError, match="scale_attn_weights"):
        ov.load(tiny_folders("gpt2-unscaled")).trace([1, 2])


def test_attention_weights_alone_cannot_run_and_say_so(gpt2_small_attention):
    with pytest.raises(CircuitsError, match=r"wte\.weight"):
        ov.load(gpt2_small_attention).trace([1, 2])

"""A trace against transformers itself: patterns, values and writes from forward hooks of the test's own."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import hf_model, transformer_bridge
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_families import tiny

import ov_circuits as ov
from ov_circuits import CircuitsError
from ov_circuits.trace import engines


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


def test_patterns_and_logits_are_those_of_transformers(running_folder, traced, assert_close):
    model, trace, theirs = traced(running_folder)
    for head in model.heads():
        assert_close(trace.pattern(head), theirs["patterns"][head.layer][head.index], 1e-5)
    assert_close(trace.logits, theirs["logits"], 1e-5)


def test_heads_writes_and_b_O_add_up_to_transformers_attention_output(running_folder, traced):
    model, trace, theirs = traced(running_folder)
    for layer in range(model.n_layers):
        total = sum(trace.write(f"{layer}.{h}").double() for h in range(model.n_heads))
        b_O = model.in_view("raw").layer(layer).b_O
        total = total if b_O is None else total + b_O
        expected = theirs["wrote"][layer].double()
        error = (total - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() <= 1e-5, f"layer {layer}"


def test_a_write_is_the_heads_slots_of_the_projections_input_through_its_block(
    running_folder, traced, reference, assert_close
):
    model, trace, theirs = traced(running_folder)
    ref = reference(running_folder)
    for head in model.heads():
        slots = [head.index * ref.d_head + i for i in range(ref.d_head)]
        z = theirs["fed"][head.layer][:, slots].double()
        assert_close(trace.write(head), z @ ref.W_O(head.layer, head.index), 1e-5)


def test_source_writes_and_the_value_bias_add_up_to_the_write(running_folder, traced, assert_close):
    model, trace, _ = traced(running_folder)
    for head in model.heads():
        parts = trace.head_writes(head)
        assert parts.shape == (len(trace), len(trace), model.architecture.d_model)
        assert_close(parts.sum(0) + trace.value_bias_write(head), trace.write(head), 1e-5)


def test_a_source_write_is_attention_times_that_sources_value_without_its_bias(
    running_folder, traced, reference, assert_close
):
    model, trace, theirs = traced(running_folder)
    ref = reference(running_folder)
    for head in model.heads():
        kv = ref.kv_head(head.index)
        x = trace.record.layers[head.layer].attention_input.double()
        moved = x @ ref.reader(head.layer, "V", kv) @ ref.W_O(head.layer, head.index)
        attention = theirs["patterns"][head.layer][head.index].double()
        expected = torch.stack([attention[:, s, None] * moved[s] for s in range(len(trace))])
        assert_close(trace.head_writes(head), expected, 1e-5)


def test_the_value_bias_is_written_at_every_position_whatever_is_attended(
    running_folder, traced, reference, assert_close
):
    model, trace, _ = traced(running_folder)
    ref = reference(running_folder)
    for head in model.heads():
        bias = ref.bias(head.layer, "V", ref.kv_head(head.index))
        constant = torch.zeros(ref.d_model) if bias is None else bias @ ref.W_O(head.layer, head.index)
        assert_close(trace.value_bias_write(head), constant.expand(len(trace), -1), 1e-5)


def test_norms_for_all_heads_are_those_of_the_writes(running_folder, traced, assert_close):
    model, trace, _ = traced(running_folder)
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


def test_a_bridge_whose_config_it_ignores_is_refused_not_run_as_another_model(tiny_folders):
    with pytest.raises(CircuitsError, match="scale_attn_weights"):
        ov.load(transformer_bridge(tiny_folders("gpt2-unscaled"))).trace([1, 2])


# -- several prompts ------------------------------------------------------------------------------------------------------


def test_prompts_side_by_side_give_what_each_gives_alone(running_folder, assert_close):
    model = ov.load(running_folder)
    # In float64, so that what the shape of a batch does to float32 sums cannot hide what padding might do.
    model.source.network = hf_model(running_folder, attn_implementation="eager").double()
    prompts = [prompt_for(model, length) for length in (9, 2, 5, 1)]
    together = model.trace(prompts)
    assert [len(trace) for trace in together] == [9, 2, 5, 1]
    for prompt, trace in zip(prompts, together, strict=True):
        alone = model.trace(prompt)
        assert trace.tokens == alone.tokens
        assert_close(trace.logits, alone.logits, 1e-6)
        for head in model.heads():
            assert_close(trace.pattern(head), alone.pattern(head), 1e-6)
            assert_close(trace.write(head), alone.write(head), 1e-6)
            assert_close(trace.values(head), alone.values(head), 1e-6)


def test_more_prompts_than_a_batch_holds_come_back_in_order(gpt_nano_sort, monkeypatch):
    from ov_circuits.trace import engines

    monkeypatch.setattr(engines, "_BATCH_TOKENS", 8)
    prompts = [[0, 1], [2], [1, 1, 2], [0] * 11, [2, 2]]
    traces = ov.load(gpt_nano_sort).trace(prompts)
    assert [list(trace.tokens) for trace in traces] == prompts


def test_texts_side_by_side_each_get_their_bos(stories260k):
    first, second = ov.load(stories260k).trace(["Once upon", "The dog"])
    assert first.bos_added and second.bos_added and first.tokens[0] == second.tokens[0] == 1


@pytest.mark.parametrize("of", [torch.tensor, np.array])
def test_arrays_of_ids_are_prompts_as_lists_are(stories260k, of):
    model = ov.load(stories260k)
    assert model.trace(of([1, 5, 9])).tokens == (1, 5, 9)
    for several in (of([[1, 5], [9, 2]]), [of([1, 5]), of([9, 2])]):
        assert [trace.tokens for trace in model.trace(several)] == [(1, 5), (9, 2)]


@pytest.mark.parametrize(("prompts", "message"), [
    ([[1, 2], []], "empty"),
    ([[1], [9999]], "9999"),
    (["Once", [1, 2.5]], "whole numbers"),
])  # fmt: skip
def test_one_faulty_prompt_of_several_is_said(stories260k, prompts, message):
    with pytest.raises(CircuitsError, match=message):
        ov.load(stories260k).trace(prompts)


def test_a_network_is_left_as_it_was(stories260k, bridge_of):
    bridge = transformer_bridge(stories260k)
    network = bridge.original_model
    network.train()
    network.set_attn_implementation("sdpa")
    ov.load(bridge).trace([1, 5, 9])
    assert network.training and all(module.training for module in network.modules())
    assert network.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in _plain(network))


def _plain(network):
    """Modules that are no hook points of TransformerLens."""
    return [module for module in network.modules() if not type(module).__module__.startswith("transformer_lens")]


# -- files ----------------------------------------------------------------------------------------------------------------


def test_a_saved_trace_opens_as_it_was(running_folder, assert_close, tmp_path):
    model = ov.load(running_folder)
    trace = model.trace(prompt_for(model))
    trace.save(tmp_path / "trace.safetensors")
    again = ov.open_trace(tmp_path / "trace.safetensors", ov.load(running_folder))
    assert (again.tokens, again.texts, again.bos_added) == (trace.tokens, trace.texts, trace.bos_added)
    assert torch.equal(again.logits, trace.logits)
    pd.testing.assert_frame_equal(again.ledger(1, 2), trace.ledger(1, 2), rtol=1e-9)
    assert_close(again.head_writes("1.0"), trace.head_writes("1.0"), 1e-6)


def test_a_trace_of_another_checkpoint_is_refused(stories260k, tiny_gpt2_char, tiny_folders, tmp_path):
    ov.load(stories260k).trace([1, 5]).save(tmp_path / "trace.safetensors")
    with pytest.raises(CircuitsError, match="another checkpoint"):
        ov.open_trace(tmp_path / "trace.safetensors", ov.load(tiny_gpt2_char))
    with pytest.raises(CircuitsError, match="no trace"):
        ov.open_trace(stories260k / "model.safetensors", ov.load(stories260k))
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "trace.safetensors").read_bytes()[:5000])
    for name in ("cut.safetensors", "absent.safetensors"):
        with pytest.raises(CircuitsError, match=name):
            ov.open_trace(tmp_path / name, ov.load(stories260k))


@pytest.mark.parametrize("variant", ["olmo2", "gemma2", "gpt2"])  # no norm before attention; a softcap; positions
def test_a_trace_of_any_family_is_saved_and_opened(variant, tmp_path):
    model = ov.load(tiny(variant))
    trace = model.trace([3, 7, 1, 7])
    trace.save(tmp_path / "trace.safetensors")
    again = ov.open_trace(tmp_path / "trace.safetensors", model)
    pd.testing.assert_frame_equal(again.ledger(1, 2), trace.ledger(1, 2), rtol=1e-12)
    pd.testing.assert_frame_equal(
        again.ledger_into("1.0", "K", source=1), trace.ledger_into("1.0", "K", source=1), rtol=1e-12
    )


def _stored(file):
    with safe_open(file, "pt") as stored:
        return stored.metadata(), {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118


def _cut(name):
    return lambda tensors, facts: tensors.update({name: tensors[name][:1].clone()})


@pytest.mark.parametrize(("change", "message"), [
    (_cut("final"), r"final .*\[1, 24\] instead of .*\[4, 24\]"),
    (_cut("layers.1.pattern"), r"layers\.1\.pattern"),
    (lambda tensors, facts: tensors.pop("position"), "position"),
    (lambda tensors, facts: tensors["layers.0.z"].fill_(torch.nan), r"layers\.0\.z holds NaN"),
    (lambda tensors, facts: tensors.update(logits=tensors["logits"].half()), "float16"),
    (lambda tensors, facts: facts.update(tokens=facts["tokens"][:2]), "one text"),
    (lambda tensors, facts: facts.update(tokens=[999] * 4), "999"),
    (lambda tensors, facts: facts.update(texts=[1, 2, 3, 4]), "one text"),
    (lambda tensors, facts: facts.update(bos_added="no"), "bos_added"),
])  # fmt: skip
def test_a_damaged_trace_is_refused_not_read_as_another(tmp_path, change, message):
    model, file = ov.load(tiny("gpt2")), tmp_path / "trace.safetensors"
    model.trace([3, 7, 1, 7]).save(file)
    metadata, tensors = _stored(file)
    facts = json.loads(metadata["ov_circuits.trace"])
    change(tensors, facts)
    save_file(tensors, file, metadata | {"ov_circuits.trace": json.dumps(facts)})
    with pytest.raises(CircuitsError, match=rf"trace\.safetensors is damaged.*{message}"):
        ov.open_trace(file, model)


@pytest.mark.parametrize("facts", ["[" * 100_000, '{"tokens": [' + "9" * 5000 + "]}", "[1]", "no JSON"])
def test_a_trace_with_senseless_facts_is_refused(tmp_path, facts):
    model, file = ov.load(tiny("gpt2")), tmp_path / "trace.safetensors"
    model.trace([3, 7, 1, 7]).save(file)
    metadata, tensors = _stored(file)
    save_file(tensors, file, metadata | {"ov_circuits.trace": facts})
    with pytest.raises(CircuitsError, match="damaged"):
        ov.open_trace(file, model)


def test_attention_weights_alone_cannot_run_and_say_so(gpt2_small_attention):
    with pytest.raises(CircuitsError, match=r"wte\.weight"):
        ov.load(gpt2_small_attention).trace([1, 2])


def test_a_batch_is_never_larger_than_it_may_be(stories260k, monkeypatch):
    """Its positions, padding included; a prompt that is too long by itself runs alone."""
    monkeypatch.setattr(engines, "_BATCH_TOKENS", 12)
    prompts = [[1] * n for n in (4, 4, 4, 4, 6, 6, 1, 13, 2)]
    found = [[len(tokens) for tokens in batch] for batch in engines.batches(ov.load(stories260k), prompts)]
    assert found == [[4, 4, 4], [4, 6], [6, 1], [13], [2]]

"""What is in memory already: wrappers, dtypes and dictionaries that people have; opened right or refused, and left as they were."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from tiny_families import tiny
from torch import nn

import ov_circuits as ov
from ov_circuits import CircuitsError

IDS = [1, 5, 7, 2]


def plain_logits(network: Any) -> torch.Tensor:
    with torch.no_grad():
        return network(torch.tensor([IDS])).logits[0]


def assert_runs_as(model: Any, right: torch.Tensor) -> None:
    torch.testing.assert_close(model.trace(IDS).logits, right, rtol=1e-4, atol=1e-4)
    certificate = model.verify()
    assert [check.name for check in certificate.checks if not check.passed] == []


def facts(network: Any) -> dict[str, Any]:
    """All of a network that a reader could change."""
    modules = dict(network.named_modules())
    return {
        "hooks": {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in modules.items()},
        "training": {n: m.training for n, m in modules.items()},
        "parameters": {n: (p.data_ptr(), p.requires_grad, p._version) for n, p in network.named_parameters()},
        "config": copy.deepcopy(network.config.to_dict()),
        "attention": network.config._attn_implementation,
    }


# -- networks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "mixtral", "falcon"])
def test_a_network_in_training_is_run_without_dropout_and_left_as_it_was(family):
    network = tiny(family, implementation="eager" if family == "gemma2" else "sdpa")
    right = plain_logits(network)
    for number, module in enumerate(network.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.5
        module.training = number % 3 != 0
    before = facts(network)
    assert_runs_as(ov.load(network), right)
    assert facts(network) == before


@pytest.mark.parametrize("how", ["compile in place", "compile", "compile a part", "data parallel"])
def test_wrappers_are_looked_into_and_nothing_is_compiled(how):
    network = tiny("llama")
    right = plain_logits(network)
    wrapped: Any = network
    if how == "compile in place":
        network.compile(backend=_never)
    elif how == "compile":
        wrapped = torch.compile(network, backend=_never)
    elif how == "compile a part":
        network.model.layers[1].self_attn = torch.compile(network.model.layers[1].self_attn, backend=_never)
    else:
        wrapped = nn.DataParallel(network)
    model = ov.load(wrapped, view="raw")
    assert model.source.network is network
    assert model.layer(1).W_V.data_ptr() == network.model.layers[1].self_attn.v_proj.weight.data_ptr()
    assert_runs_as(model, right)


def _never(*_: Any) -> Any:
    raise AssertionError("the model was compiled, where hooks are not seen")


def test_an_autocast_around_the_call_does_not_reach_the_run():
    network = tiny("llama")
    right = plain_logits(network)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_runs_as(ov.load(network), right)


def adapted(**settings: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(tiny("llama"), LoraConfig(r=2, **settings))


@pytest.mark.parametrize("target", ["v_proj", "down_proj", "lm_head"])
@pytest.mark.parametrize("depth", ["PeftModel", "LoraModel", "network", "merged"])
def test_a_network_with_an_adapter_is_not_taken_for_its_base(target, depth):
    model = adapted(target_modules=[target])
    if depth == "merged":
        model.merge_adapter()
    given = {"PeftModel": model, "LoraModel": model.base_model}.get(depth, model.base_model.model)
    with pytest.raises(CircuitsError, match="merge_and_unload"):
        ov.load(given)
    merged = model.merge_and_unload()
    assert_runs_as(ov.load(merged), plain_logits(merged))


def test_weights_that_are_made_while_the_model_runs_are_refused():
    import torch.nn.utils.prune as prune

    pruned, parametrized, quantised = tiny("llama"), tiny("llama"), tiny("llama")
    prune.random_unstructured(pruned.model.layers[0].mlp.up_proj, "weight", 0.3)
    nn.utils.parametrizations.weight_norm(parametrized.model.layers[0].mlp.up_proj)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.ao.quantization.quantize_dynamic(quantised, {nn.Linear}, inplace=True)
    for network, words in (
        (pruned, "prune.remove"),
        (parametrized, "remove_parametrizations"),
        (quantised, "quantised models are not read"),
    ):
        with pytest.raises(CircuitsError, match=words):
            ov.load(network)


@pytest.mark.parametrize("part", ["lm_head", "model.layers.1"])
def test_a_network_that_does_not_run_by_itself_is_one_sentence(part):
    network = tiny("llama")
    network.get_submodule(part).bfloat16()
    model = ov.load(network)
    with pytest.raises(CircuitsError, match="does not run on this prompt"):
        model.trace(IDS)
    with pytest.raises(CircuitsError, match="does not run on this prompt"):
        ov.generate(model, IDS, 1)
    assert [check.passed for check in model.verify().checks] == [True, None, None, None, None]


def test_a_hook_that_fails_is_one_sentence_and_leaves_no_hook_of_ours():
    network = tiny("llama").train()

    def fail(*_: Any) -> None:
        raise RuntimeError("mine")

    network.model.layers[1].register_forward_hook(fail)
    before = facts(network)
    with pytest.raises(CircuitsError, match="RuntimeError: mine"):
        ov.load(network).trace(IDS)
    assert facts(network) == before


def test_a_hook_of_the_users_that_changes_the_run_is_found_by_the_certificate():
    network = tiny("llama")
    network.model.layers[1].self_attn.o_proj.register_forward_hook(lambda _, args, output: 2 * output)
    failed = [check.name for check in ov.load(network).verify().checks if not check.passed]
    assert failed == ["sum of heads", "one token", "ledger"]


def test_a_config_that_was_changed_after_the_model_was_made_is_refused():
    network = tiny("llama")
    network.config.update({"num_attention_heads": 2, "head_dim": 16, "num_key_value_heads": 1})
    with pytest.raises(CircuitsError, match="runs 4 heads where its config says 2"):
        ov.load(network).trace(IDS)


def test_weights_that_change_after_opening_are_not_mixed_with_older_ones():
    network = tiny("gpt2")
    model = ov.load(network)
    model.head("1.0").ov.frobenius_norm  # noqa: B018 (kept in the model's cache)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    network(torch.tensor([IDS]), labels=torch.tensor([IDS])).loss.backward()
    optimizer.step()
    for use in (lambda: model.head("1.0").W_V, lambda: model.trace(IDS), lambda: ov.scoreboard(model)):
        with pytest.raises(CircuitsError, match="changed after they were opened"):
            use()
    assert_runs_as(ov.load(network), plain_logits(network))
    with torch.inference_mode():  # tensors without a count of their changes
        ov.load(tiny("gpt2")).head("0.0").W_V  # noqa: B018


# -- bridges ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases"])
def test_a_bridge_whose_weights_were_processed_is_refused(tiny_folders, how):
    from conftest import transformer_bridge

    bridge = transformer_bridge(tiny_folders("gpt2-tied"))
    choices = dict.fromkeys(("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases"), False)
    bridge.process_weights(**choices | {how: True})
    with pytest.raises(CircuitsError, match="before enable_compatibility_mode"):
        ov.load(bridge)


def test_a_network_taken_out_of_its_bridge_is_sent_back_to_it(tiny_folders, bridge_of):
    bridge = bridge_of(tiny_folders("llama-tied"))
    with pytest.raises(CircuitsError, match="give the bridge itself"):
        ov.load(bridge.original_model)


# -- dictionaries -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox"])
@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "module._orig_mod.", "net.", "base_model.model.", "model."]
)
def test_what_a_wrapper_put_before_all_names_is_taken_off(family, prefix):
    network = tiny(family)
    tensors = {f"{prefix}{name}": tensor for name, tensor in network.state_dict().items()}
    model = ov.load(tensors, config=network.config, view="raw")
    own = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    assert model.layer(0).W_O.untyped_storage().data_ptr() in own
    assert_runs_as(model, plain_logits(network))


def test_two_models_in_one_dictionary_are_not_mixed():
    network = tiny("llama")
    state = network.state_dict()
    both = {f"{who}.{name}": tensor for who in ("student", "teacher") for name, tensor in state.items()}
    with pytest.raises(CircuitsError, match="lacks the tensor"):
        ov.load(both, config=network.config)


def test_a_checkpoint_saved_through_a_wrapper_opens_as_a_file_too(tmp_path):
    network = tiny("llama")
    network.config.save_pretrained(tmp_path)
    state = {f"module.{name}": tensor for name, tensor in network.state_dict().items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert_runs_as(ov.load(tmp_path), plain_logits(network))


def test_arrays_are_tensors_without_a_copy():
    network = tiny("llama")
    arrays = {name: tensor.numpy() for name, tensor in network.state_dict().items()}
    arrays["model.norm.weight"].flags.writeable = False
    model = ov.load(arrays, config=network.config, view="raw")
    assert np.shares_memory(model.layer(0).W_O.numpy(), arrays["model.layers.0.self_attn.o_proj.weight"])
    assert_runs_as(model, plain_logits(network))
    with pytest.raises(CircuitsError, match="ascontiguousarray"):
        ov.load(arrays | {"model.norm.weight": arrays["model.norm.weight"][::-1]}, config=network.config)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.to("meta"), "without data"),
        (lambda t: t.to_sparse(), "to_dense"),
        (lambda t: t[:3], "has shape"),
        (lambda t: torch.tensor(1.0), "has shape"),
        (lambda t: t.to(torch.float8_e4m3fn), "dequantised first"),
        (lambda t: t.to(torch.int8), "dequantised first"),
        (lambda t: t.tolist(), "lacks the tensor"),
    ],
)
def test_a_tensor_that_is_none_is_named(change, words):
    network, name = tiny("llama"), "model.layers.0.self_attn.o_proj.weight"
    tensors = network.state_dict()
    with pytest.raises(CircuitsError, match=words) as refused:
        ov.load(tensors | {name: change(tensors[name])}, config=network.config).head("0.0").W_O  # noqa: B018
    assert "o_proj" in str(refused.value)


@pytest.mark.parametrize(
    "change", [torch.Tensor.double, torch.Tensor.half, lambda t: t.T.contiguous().T if t.ndim == 2 else t]
)
def test_dtypes_and_strides_do_not_matter(change):
    network = tiny("llama").half().float()
    tensors = {name: change(tensor).requires_grad_() for name, tensor in network.state_dict().items()}
    assert_runs_as(ov.load(tensors, config=network.config.to_dict()), plain_logits(network))


@pytest.mark.parametrize("config", ["gpt2", [1], 5, {}, "class"])
def test_what_is_no_config_is_refused(config):
    network = tiny("llama")
    with pytest.raises(CircuitsError, match="a config is a dictionary or a transformers config"):
        ov.load(network.state_dict(), config=type(network.config) if config == "class" else config)


def test_a_dictionary_one_level_too_high_says_which_is_meant():
    network = tiny("llama")
    with pytest.raises(CircuitsError, match=r"tensors\['state_dict'\]"):
        ov.load({"epoch": 3, "state_dict": network.state_dict()}, config=network.config)


def test_a_revision_or_adapter_of_what_has_none_is_refused():
    network = tiny("llama")
    with pytest.raises(CircuitsError, match="revision belongs to a hub name"):
        ov.load(network, revision="main")
    with pytest.raises(CircuitsError, match="adapter is put on a checkpoint by name"):
        ov.load(network, adapter="x")

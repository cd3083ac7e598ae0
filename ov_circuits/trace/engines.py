"""Runs the model once on one prompt and records what attention heads are made of.

The model is transformers' own, given the very tensors that :mod:`ov_circuits.checkpoint` reads, under TransformerLens's
TransformerBridge. Recorded are the patterns, values and z of every head and the outputs of every component: what a head
writes is computed from them on demand, so nothing of size [heads, positions, d_model] is ever kept.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from ov_circuits.checkpoint.families import model_type_of
from ov_circuits.errors import CircuitsError

if TYPE_CHECKING:
    from ov_circuits.model import Model


@dataclass(frozen=True, eq=False)
class LayerRecord:
    """One layer on one prompt.

    Attributes:
        attention_input: the normalised stream that W_Q, W_K and W_V read (gain and bias applied), [pos, d_model].
        pattern: attention, [n_heads, destination, source]; rows sum to one.
        v: values with their bias, [n_kv_heads, source, d_head].
        z: pattern-weighted values, [n_heads, destination, d_head]: the *input* of the output projection.
        attention_output: what the attention layer writes, b_O included, [pos, d_model].
        mlp_output: [pos, d_model].
    """

    attention_input: Float[Tensor, "pos d_model"]
    pattern: Float[Tensor, "head destination source"]
    v: Float[Tensor, "kv_head source d_head"]
    z: Float[Tensor, "head destination d_head"]
    attention_output: Float[Tensor, "pos d_model"]
    mlp_output: Float[Tensor, "pos d_model"]


@dataclass(frozen=True, eq=False)
class Record:
    """A whole model on one prompt.

    Attributes:
        embedding: token embeddings as they enter the stream, [pos, d_model].
        position: learned position embeddings, [pos, d_model], or None.
        layers: one :class:`LayerRecord` a layer.
        final: the residual stream that the final norm reads, [pos, d_model].
        logits: the model's own logits, [pos, n_vocab].
    """

    embedding: Float[Tensor, "pos d_model"]
    position: Float[Tensor, "pos d_model"] | None
    layers: tuple[LayerRecord, ...]
    final: Float[Tensor, "pos d_model"]
    logits: Float[Tensor, "pos n_vocab"]


# Record field -> the bridge's hook point.
_LAYER_HOOKS = {
    "attention_input": "ln1.hook_out",
    "pattern": "attn.hook_pattern",
    "v": "attn.hook_v",
    "z": "attn.hook_z",
    "attention_output": "hook_attn_out",
    "mlp_output": "hook_mlp_out",
}


def record(model: Model, tokens: Sequence[int]) -> Record:
    """Run the model on token ids.

    Raises:
        CircuitsError: the checkpoint cannot run (attention weights only), or the ids do not fit it.
    """
    check_tokens(model, tokens)
    bridge = bridge_of(model)
    layers = range(model.n_layers)
    hooks = {f"blocks.{layer}.{hook}" for layer in layers for hook in _LAYER_HOOKS.values()}
    hooks |= {"hook_embed", "ln_final.hook_in"} | (
        {"hook_pos_embed"} if model.architecture.positions == "learned" else set()
    )
    device = next(bridge.original_model.parameters()).device
    with torch.inference_mode():
        logits, cache = bridge.run_with_cache(torch.tensor([list(tokens)], device=device), names_filter=sorted(hooks))

    def get(name: str) -> Tensor:
        if name not in cache:
            raise RuntimeError(f"TransformerLens recorded no {name} for {model.name}: this version names it otherwise")
        return cache[name][0].detach().float().cpu()

    def layer_record(layer: int) -> LayerRecord:
        parts = {field: get(f"blocks.{layer}.{hook}") for field, hook in _LAYER_HOOKS.items()}
        parts["v"], parts["z"] = parts["v"].transpose(0, 1), parts["z"].transpose(0, 1)
        return LayerRecord(**parts)

    position = None
    if "hook_pos_embed" in hooks:
        position = get("hook_pos_embed")
    return Record(
        embedding=get("hook_embed"),
        position=position,
        layers=tuple(layer_record(layer) for layer in layers),
        final=get("ln_final.hook_in"),
        logits=logits[0].detach().float().cpu(),
    )


def check_tokens(model: Model, tokens: Sequence[int]) -> None:
    """Raise a CircuitsError unless these ids can be run."""
    a = model.architecture
    if model.why_not_run is not None:
        raise CircuitsError(
            f"{model.name} cannot run a prompt: {model.why_not_run}. "
            "Weight-only commands (heads, head, split, report without --prompt) work"
        )
    if len(tokens) == 0:
        raise CircuitsError("the prompt is empty: give it at least one token")
    if len(tokens) > a.n_ctx:
        raise CircuitsError(
            f"the prompt is {len(tokens)} tokens long and {model.name} reads at most {a.n_ctx}: shorten it"
        )
    outside = [token for token in tokens if not 0 <= token < a.n_vocab]
    if outside:
        raise CircuitsError(f"token id {outside[0]} is outside the vocabulary of {model.name} (0 to {a.n_vocab - 1})")


def bridge_of(model: Model) -> Any:
    """The checkpoint's TransformerBridge: the user's own, or one built once from the tensors this package reads."""
    source = model.source
    if source.bridge is None:
        source.bridge = _build_bridge(model)
    return source.bridge


def _build_bridge(model: Model) -> Any:
    checkpoint = model.source.checkpoint
    tensors = {name: checkpoint.store.read(name) for name in checkpoint.store.names()}
    if checkpoint.config.get("quantization_config") is not None:
        raise CircuitsError(
            f"the config of {checkpoint.where} has a quantization_config, but its weights are plain floating-point numbers: "
            "take the key out of config.json to run it; weight-only commands work"
        )
    with _quiet(), _blame_config(checkpoint.where):
        return _boot(model, tensors)


def _boot(model: Model, tensors: dict[str, Tensor]) -> Any:
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = model.source.checkpoint
    # transformers writes into the settings that it is given.
    settings = copy.deepcopy(checkpoint.config) | {"model_type": model_type_of(checkpoint.config, checkpoint.where)}
    config = AutoConfig.for_model(**settings)
    _compare(config, model)
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    network = model_class.from_pretrained(
        None, config=config, state_dict=tensors, dtype=torch.float32, attn_implementation="eager"
    )
    network.eval()
    bridge = TransformerBridge.boot_transformers(
        model.name, hf_model=network, tokenizer=_placeholder_tokenizer(), dtype=torch.float32, device="cpu"
    )
    with torch.inference_mode():
        bridge(torch.tensor([[0]]))  # some settings that make no sense are found out by running only
    return bridge


@contextmanager
def _blame_config(where: str) -> Iterator[None]:
    """Whatever transformers or TransformerLens raise while they build a model is said of the config they build it from."""
    try:
        yield
    except CircuitsError:
        raise
    # What a setting breaks, and with which error, is those libraries' own affair: TypeError, KeyError, ImportError, ...
    except Exception as error:
        text = " ".join(str(error).split())
        reason = f"{type(error).__name__}: {text if len(text) <= 200 else text[:200] + '..'}"
        raise CircuitsError(
            f"transformers cannot build a model from the config of {where} ({reason}): correct config.json; "
            "weight-only commands work"
        ) from error


# transformers' name of a number -> ours. A config may hold a number under two names, and not twice the same one.
_COMPARED = {
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "d_head",
    "hidden_size": "d_model",
    "vocab_size": "n_vocab",
    "max_position_embeddings": "n_ctx",
    "tie_word_embeddings": "tied",
    "layer_norm_epsilon": "norm_eps",
    "rms_norm_eps": "norm_eps",
}


def _compare(config: Any, model: Model) -> None:
    """Raise a CircuitsError where transformers reads another number out of the config than this package does."""
    a = model.architecture
    pairs = [(key, getattr(config, key, None), getattr(a, field)) for key, field in _COMPARED.items()]
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict):
        pairs.append(("rope_theta", rope.get("rope_theta"), a.rope_theta))
    for key, theirs, ours in pairs:
        if theirs is not None and theirs != ours:
            raise CircuitsError(
                f"the config of {model.source.checkpoint.where} contradicts itself: transformers reads {key} = {theirs} "
                f"from it, and this package {ours}; keep one name of this number in config.json"
            )


def _placeholder_tokenizer() -> Any:
    """A tokenizer of one word: without any, the bridge would look for one elsewhere. Prompts reach it as ids."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"?": 0}, unk_token="?")), unk_token="?")


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back the progress bars and notices of the libraries while they build a model."""
    from transformers.utils import logging as transformers_logging

    had_bar = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(disabled)
        transformers_logging.set_verbosity(verbosity)
        if had_bar:
            transformers_logging.enable_progress_bar()

"""Runs the model on prompts and records what attention heads are made of.

The model is transformers' own: the user's (also inside a TransformerBridge), or one given the very tensors that
:mod:`ov_circuits.checkpoint` reads. Forward hooks on its modules, whose names are in the family's row, record patterns, z and
what every component adds to the stream, all before and after which nothing of ours runs. What a head writes is computed from
them on demand, so nothing of size [heads, positions, d_model] is ever kept.

Prompts of different lengths run side by side, padded on the right: attention is causal, so what stands before the padding
cannot see it, and what is recorded is cut to each prompt's own length.
"""

from __future__ import annotations

import copy
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from ov_circuits.checkpoint.families import model_type_of
from ov_circuits.checkpoint.stores import TensorStore, Watch
from ov_circuits.errors import CircuitsError, for_want_of_memory
from ov_circuits.linalg.products import FastLinears
from ov_circuits.processes import lost
from ov_circuits.trace.shards import Shard

if TYPE_CHECKING:
    from ov_circuits.model import Model
    from ov_circuits.source import Source


@dataclass(frozen=True, eq=False)
class LayerRecord:
    """One layer on one prompt.

    Attributes:
        stream: the residual stream that enters the layer, [pos, d_model].
        attention_input: what W_Q, W_K and W_V read: the normalised stream, gain and bias applied, [pos, d_model].
        pattern: attention, [n_heads, destination, source]; rows sum to one.
        z: pattern-weighted values, [n_heads, destination, d_head]: the *input* of the output projection.
        attention_output: what the output projection gives, b_O and the family's factor (Granite) included, before any norm that
            follows it, [pos, d_model].
        mlp_output: what the MLP adds to the stream, [pos, d_model].
    """

    stream: Float[Tensor, "pos d_model"]
    attention_input: Float[Tensor, "pos d_model"]
    pattern: Float[Tensor, "head destination source"]
    z: Float[Tensor, "head destination d_head"]
    attention_output: Float[Tensor, "pos d_model"]
    mlp_output: Float[Tensor, "pos d_model"]


@dataclass(frozen=True, eq=False)
class Record:
    """A whole model on one prompt.

    Attributes:
        shard: which heads the patterns and z are of: all of them, but for a tensor-parallel run.
        position: learned position embeddings, [pos, d_model], or None.
        layers: one :class:`LayerRecord` a layer.
        final: the residual stream that the final norm reads, [pos, d_model].
        logits: the model's own logits, [kept, n_vocab]: of all positions, or of the last one alone.
        uncapped: the logits before a softcap, [kept, n_vocab]; the very logits where the model has none.
    """

    shard: Shard
    position: Float[Tensor, "pos d_model"] | None
    layers: tuple[LayerRecord, ...]
    final: Float[Tensor, "pos d_model"]
    logits: Float[Tensor, "kept n_vocab"]
    uncapped: Float[Tensor, "kept n_vocab"]

    @property
    def embedding(self) -> Float[Tensor, "pos d_model"]:
        """Token embeddings as they enter the stream."""
        stream = self.layers[0].stream
        return stream if self.position is None else stream - self.position


# Hooks are on modules, and how transformers logs is one setting a process: threads run prompts one after another.
_ALONE = threading.RLock()

# What can be kept of a layer.
LAYER_FIELDS = tuple(field.name for field in fields(LayerRecord))

# Tokens that run side by side: enough to keep matrix products busy, few enough to keep a batch's record small; and how many
# logits those may have, which is what fills the memory of a model with a large vocabulary.
_BATCH_TOKENS = 4096
_BATCH_LOGITS = 1 << 26


@dataclass(frozen=True)
class Edits:
    """What to change while the model runs. Each function gets a batch's tensor and returns what takes its place.

    Attributes:
        z: (layer, z [batch, pos, head, d_head]) -> z: before the output projection reads it.
        post_norm: (layer, attention output [batch, pos, d_model], normalised) -> normalised: instead of the norm's output that
            some families put between the attention and the stream.
        mlp: (layer, output [batch, pos, d_model]) -> output: before it is added to the stream.
        final: (stream [batch, pos, d_model], normalised) -> normalised: instead of the final norm's output.
    """

    z: Callable[[int, Tensor], Tensor] | None = None
    post_norm: Callable[[int, Tensor, Tensor], Tensor] | None = None
    mlp: Callable[[int, Tensor], Tensor] | None = None
    final: Callable[[Tensor, Tensor], Tensor] | None = None


@dataclass(frozen=True, eq=False)
class Batch:
    """What a run of prompts of one (padded) length left behind; [batch, ...] each, float32 on the model's device.

    ``layers`` holds, for each layer, the fields of :class:`LayerRecord` that were asked for, and ``logits_at`` the positions that
    have logits, None for all.
    """

    shard: Shard
    position: Float[Tensor, "batch pos d_model"] | None
    layers: tuple[dict[str, Tensor], ...]
    final: Float[Tensor, "batch pos d_model"]
    logits: Float[Tensor, "batch kept n_vocab"]
    uncapped: Float[Tensor, "batch kept n_vocab"]
    logits_at: tuple[int, ...] | None = None

    def prompt(self, index: int, length: int) -> Record:
        """One prompt's record, its padding cut off."""

        def cut(tensor: Tensor) -> Tensor:
            return tensor[index, :length]

        def layer_record(kept: dict[str, Tensor]) -> LayerRecord:
            by_head = {"pattern": kept["pattern"][index, :, :length, :length], "z": kept["z"][index, :, :length]}
            return LayerRecord(**{name: cut(kept[name]) for name in LAYER_FIELDS if name not in by_head}, **by_head)

        if self.logits_at is None:
            kept_rows = slice(length)
        else:
            last = self.logits_at.index(length - 1)
            kept_rows = slice(last, last + 1)
        logits = self.logits[index, kept_rows]
        return Record(
            shard=self.shard,
            position=None if self.position is None else cut(self.position),
            layers=tuple(layer_record(kept) for kept in self.layers),
            final=cut(self.final),
            logits=logits,
            uncapped=logits if self.uncapped is self.logits else self.uncapped[index, kept_rows],
        )


def record(model: Model, prompts: Sequence[Sequence[int]], *, last_logits: bool = False) -> list[Record]:
    """Run the model on prompts and keep everything; of logits, where asked, those of each prompt's last position alone.

    Raises:
        CircuitsError: the checkpoint cannot run (attention weights only), or some ids do not fit it.
    """
    found: list[Record] = []
    for batch in batches(model, prompts):
        ends = tuple(sorted({len(prompt) - 1 for prompt in batch})) if last_logits else None
        observed = run(model, pad(batch), keep=LAYER_FIELDS, logits_at=ends)
        found += [observed.prompt(index, len(prompt)) for index, prompt in enumerate(batch)]
    return found


def batches(model: Model, prompts: Sequence[Sequence[int]]) -> Iterator[Sequence[Sequence[int]]]:
    """Prompts in their order, as many at a time as fit a batch; checked before the first one runs.

    Raises:
        CircuitsError: as :func:`record`.
    """
    for tokens in prompts:
        check_tokens(model, tokens)
    start, limit = 0, min(_BATCH_TOKENS, _BATCH_LOGITS // model.architecture.n_vocab)
    while start < len(prompts):
        stop, longest = start, 0
        while stop < len(prompts):
            longest = max(longest, len(prompts[stop]))
            if stop > start and longest * (stop + 1 - start) > limit:
                break
            stop += 1
        yield prompts[start:stop]
        start = stop


def pad(prompts: Sequence[Sequence[int]]) -> Int[Tensor, "batch pos"]:
    """Ids side by side, filled up on the right with id 0, which nothing before it can see."""
    longest = max(len(tokens) for tokens in prompts)
    return torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in prompts], device="cpu")


def run(
    model: Model,
    tokens: Int[Tensor, "batch pos"],
    *,
    keep: Collection[str] = (),
    edits: Edits | None = None,
    logits_at: tuple[int, ...] | None = None,
) -> Batch:
    """Run ids that were checked, and keep the named fields of every layer.

    Args:
        model: any view; the run does not depend on it.
        tokens: ids, padded on the right.
        keep: names among :data:`LAYER_FIELDS`.
        edits: what to change on the way; what is kept is what was there after the change.
        logits_at: the positions whose logits are wanted; all when None.
    """
    network = network_of(model)
    parts = _Parts(network, model, len(tokens))
    kept: tuple[dict[str, Tensor], ...] = tuple({} for _ in range(model.n_layers))
    ends: dict[str, Tensor] = {}
    with _ALONE, ExitStack() as stack:
        stack.enter_context(_ready(network))
        for handle in (*parts.edit(edits or Edits()), *parts.watch(kept, frozenset(keep), ends)):
            stack.callback(handle.remove)
        stack.enter_context(torch.no_grad())
        stack.enter_context(FastLinears())
        tokens = tokens.to(_device(network))
        # Unembedding is a fifth of a small model's work, and most of what it leaves behind.
        wanted = {} if logits_at is None else {"logits_to_keep": torch.tensor(logits_at, device=tokens.device)}
        logits = _forward(network, model, tokens, **wanted)
    position = ends.get("position")
    if position is not None:
        position = position.expand(len(tokens), -1, -1)
    logits = _own(logits, model.device)
    uncapped = (
        logits if model.architecture.logit_softcap is None else ends["unembedded"] * model.architecture.logit_scale
    )
    return Batch(parts.shard, position, kept, ends["final"], logits, uncapped, logits_at)


def likeliest_continuation(model: Model, tokens: Sequence[int], n: int) -> list[int]:
    """The likeliest next token n times over, from ids that were checked; fewer where the model ends the text itself."""
    network = network_of(model)
    end = network.generation_config.eos_token_id
    ends = end if isinstance(end, list) else [end]
    found: list[int] = []
    with _ALONE, _ready(network), torch.no_grad():
        while len(found) < n and not (found and found[-1] in ends):
            logits = _forward(network, model, torch.tensor([[*tokens, *found]], device="cpu").to(_device(network)))
            found.append(int(logits[0, -1].argmax()))
    return found


def _forward(network: Any, model: Model, tokens: Tensor, **wanted: Any) -> Tensor:
    """The network's logits.

    Raises:
        CircuitsError: it does not run: weights of two precisions, a hook of the user's that fails, memory that is not there; or
            it runs on several processes, and one of them has gone.
    """
    try:
        with lost():
            logits: Tensor = network(tokens, use_cache=False, **wanted).logits
    except CircuitsError:
        raise
    # What a network that is not ours raises, and with which error, is its own affair.
    except Exception as error:
        raise CircuitsError(
            f"{model.name} does not run on this prompt ({_reason(error)}): weight-only scores work. Look whether "
            "model(input_ids) runs by itself"
        ) from error
    return logits


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 200 else text[:200] + '..'}"


class _Parts:
    """Where a running transformers model keeps what is recorded: hooks on its modules."""

    def __init__(self, network: Any, model: Model, n_prompts: int) -> None:
        self._family, self._network, self._n_prompts = model.source.family, network, n_prompts
        self._a, self._where, self._device = model.architecture, model.source.checkpoint.where, model.device
        self.shard = model.source.shard or Shard.whole_layer(model.n_heads)

    def _module(self, name: str, layer: int | None = None) -> nn.Module:
        name = name if layer is None else name.format(layer=layer)
        try:
            return self._network.base_model.get_submodule(self._family.within + name)
        except AttributeError as error:
            raise CircuitsError(
                f"the running model of {self._where} has no module {name!r} where a {self._family.name} model has it: "
                "give a model as transformers builds it"
            ) from error

    def _own(self, tensor: Tensor) -> Tensor:
        return _own(tensor, self._device)

    def _keep_output(self, into: dict[str, Tensor], name: str) -> Callable[..., None]:
        return lambda _, args, output: into.update({name: self._own(_first(output))})

    def _mlp(self, layer: int) -> nn.Module:
        """The module whose output is what the MLP adds to the stream."""
        return self._module(self._family.mlp_post_norm or self._family.mlp_module, layer)

    def edit(self, edits: Edits) -> Iterator[Any]:
        """Hooks that change values on their way."""
        for layer in range(self._a.n_layers):
            if edits.z is not None:
                projection = self._module(self._family.projections["O"].name, layer)
                yield projection.register_forward_pre_hook(self._edit_z(edits.z, layer))
            if edits.post_norm is not None and self._family.attention_post_norm is not None:
                norm = self._module(self._family.attention_post_norm, layer)
                yield norm.register_forward_hook(_edit_norm(partial(edits.post_norm, layer)))
            if edits.mlp is not None:
                yield self._mlp(layer).register_forward_hook(self._edit_mlp(edits.mlp, layer))
        if edits.final is not None:
            yield self._module(self._family.final_norm).register_forward_hook(_edit_norm(edits.final))

    def _edit_z(self, change: Callable[[int, Tensor], Tensor], layer: int) -> Callable[..., Any]:
        def hook(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            z = rearrange(args[0], "batch pos (head d_head) -> batch pos head d_head", head=self.shard.held)
            changed = change(layer, z).to(z.dtype)
            return (rearrange(changed, "batch pos head d_head -> batch pos (head d_head)"), *args[1:])

        return hook

    def _edit_mlp(self, change: Callable[[int, Tensor], Tensor], layer: int) -> Callable[..., Any]:
        def hook(_: Any, args: Any, output: Any) -> Any:
            found, scale = _first(output), self._a.residual_scale
            changed = (change(layer, self._by_prompt(found) * scale) / scale).to(found.dtype).view_as(found)
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        return hook

    def _by_prompt(self, output: Tensor) -> Tensor:
        """[batch, pos, d_model]: some modules run on the rows of all prompts in one (OPT's MLP)."""
        return output if output.ndim == 3 else output.unflatten(0, (self._n_prompts, -1))

    def _added(self, output: Any) -> Tensor:
        """A component's output as it is added to the stream; a copy, for some models add to it in place (Falcon)."""
        added = self._by_prompt(self._own(_first(output)))
        return added * self._a.residual_scale if self._a.residual_scale != 1 else added.clone()

    def _of_all_heads(self, pattern: Tensor) -> Tensor:
        if pattern.shape[1] != self.shard.held:
            raise CircuitsError(
                f"{self._where} runs {pattern.shape[1]} heads where its config says {self.shard.held}: "
                "the config was changed after the model was made"
            )
        return pattern

    def watch(self, kept: Sequence[dict[str, Tensor]], keep: frozenset[str], ends: dict[str, Tensor]) -> Iterator[Any]:
        """Hooks that write down what passes, into ``kept`` by layer and into ``ends``."""
        for layer, into in enumerate(kept):
            yield from self._watch_layer(layer, into, keep)
        if self._family.positions is not None:
            yield self._module(self._family.positions).register_forward_hook(self._keep_output(ends, "position"))
        final = self._module(self._family.final_norm)
        yield final.register_forward_hook(lambda _, args, output: ends.update(final=self._own(args[0])))
        if self._a.logit_softcap is not None:
            yield self._network.get_output_embeddings().register_forward_hook(self._keep_output(ends, "unembedded"))

    def _watch_layer(self, layer: int, into: dict[str, Tensor], keep: frozenset[str]) -> Iterator[Any]:
        def stream(_: Any, args: Any, kwargs: Any) -> None:
            into["stream"] = self._own(_hidden(args, kwargs))

        def attention(_: Any, args: Any, kwargs: Any, output: Any) -> None:
            if "attention_input" in keep:
                into["attention_input"] = self._own(_hidden(args, kwargs))
            if "pattern" in keep:
                into["pattern"] = self._of_all_heads(self._own(output[1]))

        def projection(_: Any, args: Any, output: Tensor) -> None:
            if "z" in keep:
                into["z"] = rearrange(
                    self._own(args[0]), "batch pos (head d) -> batch head pos d", head=self.shard.held
                )
            if "attention_output" in keep:
                into["attention_output"] = self._added(output)

        def mlp(_: Any, args: Any, output: Any) -> None:
            into["mlp_output"] = self._added(output)

        if "stream" in keep:
            yield self._module(self._family.block, layer).register_forward_pre_hook(stream, with_kwargs=True)
        if keep & {"attention_input", "pattern"}:
            yield self._module(self._family.attention, layer).register_forward_hook(attention, with_kwargs=True)
        if keep & {"z", "attention_output"}:
            yield self._module(self._family.projections["O"].name, layer).register_forward_hook(projection)
        if "mlp_output" in keep:
            yield self._mlp(layer).register_forward_hook(mlp)


def _hidden(args: Any, kwargs: Any) -> Tensor:
    """A block's or an attention's input: transformers passes it first, or by name."""
    return args[0] if args else kwargs["hidden_states"]


def _edit_norm(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda _, args, output: change(args[0], output).to(output.dtype)


def _first(output: Any) -> Tensor:
    """A module's output, without what some modules return beside it (a mixture's router)."""
    return output[0] if isinstance(output, tuple) else output


def _own(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the run, as float32 on the model's device, which a user's own network need not be on."""
    return tensor.detach().float().to(device)


def _device(network: Any) -> torch.device:
    return network.get_input_embeddings().weight.device


@contextmanager
def _ready(network: Any) -> Iterator[None]:
    """A network that gives its patterns, drops nothing out and runs as it was written, put back as it was afterwards.

    As it was written: not as ``torch.compile`` made it, which does not see our hooks, nor in an ``autocast`` around the call.
    """
    training = [module for module in network.modules() if module.training]
    implementation = network.config._attn_implementation
    network.eval()
    _set_attention(network, "eager")
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.autocast(_device(network).type, enabled=False))
            if "torch._dynamo" in sys.modules:  # otherwise nobody has compiled anything
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
    finally:
        for module in training:
            module.training = True
        _set_attention(network, implementation)


def _set_attention(network: Any, implementation: str) -> None:
    if network.config._attn_implementation != implementation:
        network.set_attn_implementation(implementation)
    if network.config._attn_implementation != implementation:
        # It declines for models that do not call the common attention functions (Falcon); these look into their config.
        network.config._attn_implementation = implementation


def check_runs(model: Model) -> None:
    """Raise a CircuitsError unless prompts can be run."""
    if model.why_not_run is not None:
        raise CircuitsError(
            f"{model.name} cannot run a prompt: {model.why_not_run}. "
            "Weight-only commands (heads, head, split, report without --prompt) work"
        )


def check_tokens(model: Model, tokens: Sequence[int]) -> None:
    """Raise a CircuitsError unless these ids can be run."""
    check_runs(model)
    a = model.architecture
    if len(tokens) == 0:
        raise CircuitsError("the prompt is empty: give it at least one token")
    if len(tokens) > a.n_ctx:
        raise CircuitsError(
            f"the prompt is {len(tokens)} tokens long and {model.name} reads at most {a.n_ctx}: shorten it"
        )
    outside = [token for token in tokens if not 0 <= token < a.n_vocab]
    if outside:
        raise CircuitsError(f"token id {outside[0]} is outside the vocabulary of {model.name} (0 to {a.n_vocab - 1})")


def network_of(model: Model) -> Any:
    """The checkpoint's transformers model: the user's own, or one built once from the tensors this package reads."""
    source = model.source
    source.store.check_unchanged()
    with _ALONE:
        if source.network is None:
            source.network = build(source)
            source.built = Watch(source.network.parameters())
    return source.network


def build(source: Source, **distribution: Any) -> Any:
    """transformers' model with the checkpoint's tensors.

    Args:
        source: the checkpoint.
        distribution: how transformers is to distribute it over processes.

    Raises:
        CircuitsError: transformers cannot build it from this config.
    """
    from transformers import AutoModelForCausalLM

    checkpoint = source.checkpoint
    if checkpoint.config.get("quantization_config") is not None:
        raise CircuitsError(
            f"the config of {checkpoint.where} has a quantization_config, but its weights are plain floating-point numbers: "
            "take the key out of config.json to run it; weight-only commands work"
        )
    config = config_of(source)
    tensors = {name: _Stored(checkpoint.store, name) for name in checkpoint.store.names()}
    # What transformers makes by itself belongs where the model is, whatever torch's default device.
    here = nullcontext() if distribution else torch.device(source.device)
    with _quiet(), _blame_config(checkpoint.where), lost(), here:
        network = AutoModelForCausalLM._model_mapping[type(config)].from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=torch.float32,
            attn_implementation="eager",
            **(distribution or _placement(source.device)),
        )
        network.eval()
        with torch.no_grad():
            network(torch.tensor([[0]], device=_device(network)))  # some senseless settings show when it runs only
    return network


def _placement(device: torch.device) -> dict[str, Any]:
    """How transformers is to put a model on a device: tensor by tensor, as they are read."""
    return {} if device.type == "cpu" else {"device_map": {"": device}}


def config_of(source: Source) -> Any:
    """transformers' config of a checkpoint.

    Raises:
        CircuitsError: transformers does not take it, or reads other numbers out of it than this package.
    """
    from transformers import AutoConfig

    checkpoint = source.checkpoint
    with _quiet(), _blame_config(checkpoint.where):
        # transformers writes into the settings that it is given.
        settings = copy.deepcopy(checkpoint.config) | {"model_type": model_type_of(checkpoint.config, checkpoint.where)}
        config = AutoConfig.for_model(**settings)
        _compare(config, source)
    return config


@dataclass(frozen=True)
class _Stored:
    """A tensor of the checkpoint as transformers takes one of a file: read when it is its turn, and only the asked-for part.

    A tensor-parallel rank asks for its own rows or columns.
    """

    store: TensorStore
    name: str

    def get_shape(self) -> list[int]:
        return list(self.store.shape(self.name))

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, part: Any) -> Tensor:
        return self.store.read(self.name, () if part is ... else part)


@contextmanager
def _blame_config(where: str) -> Iterator[None]:
    """Whatever transformers raises while it builds a model is said of the config that it builds it from."""
    try:
        yield
    except CircuitsError:
        raise
    # What a setting breaks, and with which error, is the library's own affair: TypeError, KeyError, ImportError, ...
    except Exception as error:
        if for_want_of_memory(error):
            raise
        if sys.flags.optimize > 1:
            raise CircuitsError(
                "transformers builds its models with the help of docstrings, which python -OO (PYTHONOPTIMIZE=2) takes away: "
                "run prompts without it; weight-only commands work"
            ) from error
        raise CircuitsError(
            f"transformers cannot build a model from the config of {where} ({_reason(error)}): correct config.json; "
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
    "layer_norm_eps": "norm_eps",
    "norm_epsilon": "norm_eps",
    "rms_norm_eps": "norm_eps",
}


def _compare(config: Any, source: Source) -> None:
    """Raise a CircuitsError where transformers reads another number out of the config than this package does."""
    a = source.architecture
    pairs = [(key, getattr(config, key, None), getattr(a, field)) for key, field in _COMPARED.items()]
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict):
        pairs.append(("rope_theta", rope.get("rope_theta"), a.rope_theta))
    for key, theirs, ours in pairs:
        if theirs is not None and theirs != ours:
            raise CircuitsError(
                f"the config of {source.checkpoint.where} contradicts itself: transformers reads {key} = {theirs} "
                f"from it, and this package {ours}; keep one name of this number in config.json"
            )


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

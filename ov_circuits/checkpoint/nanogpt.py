"""GPT-2s of nanoGPT and minGPT: torch's Linear where Hugging Face's GPT-2 has Conv1D, biases that may be left out.

- nanoGPT's ``ckpt.pt``: a dictionary with ``model`` (names begin with ``_orig_mod.`` when it was compiled) and ``model_args``;
- minGPT's ``model.pt``: a state dict alone; how many heads it has stands in the ``config.json`` beside it, under ``model``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ov_circuits.checkpoint.foreign import Foreign, Settings, zeros
from ov_circuits.checkpoint.stores import MemoryStore, Recipe, RecipeStore, state_dict
from ov_circuits.errors import CircuitsError

_COMPILED = "_orig_mod."
_LINEAR = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_FIRST = "transformer.h.0.attn.c_attn.weight"


def is_nanogpt(loaded: Any) -> bool:
    """Whether a torch file's content is nanoGPT's ``ckpt.pt``."""
    return isinstance(loaded, Mapping) and isinstance(loaded.get("model_args"), Mapping) and "model" in loaded


def is_mingpt(loaded: Any) -> bool:
    """Whether it is a state dict with torch's Linear where Hugging Face's GPT-2 has Conv1D."""
    tensor = loaded.get(_FIRST) if isinstance(loaded, Mapping) else None
    shape = tuple(getattr(tensor, "shape", ()))
    return len(shape) == 2 and shape[0] == 3 * shape[1]


def open_nanogpt(loaded: Mapping[str, Any], file: Path) -> Foreign:
    """nanoGPT's ``ckpt.pt``.

    Raises:
        CircuitsError: settings are missing, or ``model`` holds no tensors.
    """
    return _open(loaded["model"], loaded["model_args"], file, activation="gelu", where=f"{file} (model_args)")


def open_mingpt(loaded: Mapping[str, Any], settings: Any, file: Path) -> Foreign:
    """A state dict of minGPT; ``settings`` is what its ``config.json`` has under ``model``.

    Raises:
        CircuitsError: there are no settings, or the number of heads is not among them.
    """
    if not isinstance(settings, Mapping):
        raise CircuitsError(
            f"{file} is a minGPT state dict, which does not say how many heads there are: put a config.json beside it "
            'with {"model": {"n_head": .., "n_layer": .., "n_embd": .., "vocab_size": .., "block_size": ..}}'
        )
    return _open(loaded, settings, file, activation="gelu_new", where=f"{file.parent / 'config.json'} (model)")


def _open(tensors: Any, settings: Mapping[str, Any], file: Path, *, activation: str, where: str) -> Foreign:
    get = Settings(settings, where)
    source = MemoryStore(
        {name.removeprefix(_COMPILED): t for name, t in state_dict(tensors, file).items()}, origin=str(file)
    )
    recipes = {}
    for name in source.names():
        recipe = Recipe.of(source, name)
        recipes[name] = recipe.transposed() if name.endswith(_LINEAR) and len(recipe.shape) == 2 else recipe
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": get.count("n_layer"),
        "n_head": get.count("n_head"),
        "n_embd": get.count("n_embd"),
        "n_positions": get.count("block_size"),
        "vocab_size": get.count("vocab_size"),
        "layer_norm_epsilon": 1e-5,
        "activation_function": activation,
        "tie_word_embeddings": _tied(source),
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return Foreign(config, RecipeStore(recipes | _absent_biases(recipes, file)), files=(file.parent / "config.json",))


def _absent_biases(recipes: Mapping[str, Recipe], file: Path) -> dict[str, Recipe]:
    """Zeros for each bias that ``bias=False`` left out; Hugging Face's GPT-2 has them all."""
    shapes = {
        f"{name.removesuffix('.weight')}.bias": recipe.shape[-1:]
        for name, recipe in recipes.items()
        if name.endswith((*_LINEAR, "ln_1.weight", "ln_2.weight", "ln_f.weight"))
    }
    return {name: zeros(shape, str(file)) for name, shape in shapes.items() if name not in recipes}


def _tied(source: MemoryStore) -> bool:
    """nanoGPT stores one tensor under two names; minGPT's unembedding is its own."""
    embed, unembed = "transformer.wte.weight", "lm_head.weight"
    if embed not in source or unembed not in source:
        return unembed not in source
    return source._read(embed).data_ptr() == source._read(unembed).data_ptr()

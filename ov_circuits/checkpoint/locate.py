"""A name or a path -> an open checkpoint.

1. nothing, ``-`` or ``embedded``: the small model that comes with the package;
2. a path (a folder, a file, or anything that looks like one): read there, and the network is never touched;
3. ``smollm2``: the folder that ``ov-circuits fetch smollm2`` made;
4. any other name: the Hugging Face cache first, then the hub, unless offline mode forbids it.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ov_circuits.checkpoint.families import language_part
from ov_circuits.checkpoint.foreign import Foreign
from ov_circuits.checkpoint.lora import Adapter, is_adapter
from ov_circuits.checkpoint.stores import (
    MemoryStore,
    SafetensorsStore,
    TensorStore,
    TorchStore,
    exists,
    is_file,
    is_torch,
    load_torch,
    read_json,
    read_shard_index,
    state_dict,
)
from ov_circuits.errors import CircuitsError

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# What else makes a folder a checkpoint, by the programs that wrote it.
FOREIGN_FILES = (
    "adapter_config.json",
    "ckpt.pt",
    "model.pt",
    "consolidated.*",
    "mp_rank_*",
    "latest_checkpointed_iteration.txt",
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json")
_HUB_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?)(@(?P<revision>[\w./-]+))?")
_LIKE_A_HEAD = re.compile(r"\d+\.\d+|L\d+H\d+", re.IGNORECASE)


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: its config, its tensors, and where a tokenizer would lie.

    Attributes:
        name: what to call it.
        where: the file or folder, for messages.
        config: the content of config.json (or what a GGUF file's metadata says, under the same keys).
        store: the tensors, under the names of the file.
        folder: the folder in which a tokenizer may lie.
        tokenizer_file: the file that holds the vocabulary, where it is none of Hugging Face's.
        others: files it was read from besides the tensors' and Hugging Face's own.
        base: the checkpoint that the adapter was put on; None without one.
        adapter: the LoRA adapter whose updates are in the tensors.
        cannot_run: why no prompt can be run on it, when something in the file is known not to carry over.
    """

    name: str
    where: str
    config: dict[str, Any]
    store: TensorStore = field(repr=False)
    folder: Path | None = None
    tokenizer_file: Path | None = None
    others: tuple[Path, ...] = ()
    base: Checkpoint | None = None
    adapter: Adapter | None = None
    cannot_run: str | None = None

    def files(self) -> set[Path]:
        """The files that it is made of: nothing may be written over them."""
        found = {Path(self.store.origin(name)) for name in self.store.names()} | {*self.others}
        if self.tokenizer_file is not None:
            found.add(self.tokenizer_file)
        if self.folder is not None:
            names = ("config.json", "generation_config.json", *WEIGHT_FILES, *_TOKENIZER_FILES)
            found |= {self.folder / name for name in names}
        return found


def open_checkpoint(
    name: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    adapter: str | os.PathLike[str] | None = None,
) -> Checkpoint:
    """Open a checkpoint by name or path; only headers are read.

    Args:
        name: see the module's text. None opens the embedded default.
        revision: a branch, tag or commit on the hub, which may also stand in the name (``gpt2@main``); refused for paths.
        adapter: a folder with a LoRA adapter, put on top of it.

    Raises:
        CircuitsError: nothing is there, or what is there cannot be read.
    """
    opened = _open_named(name, revision)
    if adapter is None:
        return opened
    if opened.base is not None:
        raise CircuitsError(f"{opened.where} is an adapter itself: name its base, or leave the other adapter out")
    return adapted(opened, Adapter(user_path(adapter)))


def adapted(base: Checkpoint, adapter: Adapter) -> Checkpoint:
    """A checkpoint with a LoRA adapter on top.

    Raises:
        CircuitsError: the adapter was made for another model.
    """
    folder = adapter.folder
    return replace(
        base,
        name=f"{base.name} + {folder.resolve().name}",
        store=adapter.adapt(base.store, base.config, base.where),
        folder=folder if is_file(folder / "tokenizer.json") else base.folder,
        others=(*base.others, *adapter.files, *base.files()),
        base=base,
        adapter=adapter,
    )


def _open_named(name: str | os.PathLike[str] | None, revision: str | None) -> Checkpoint:
    if name in (None, "-", "embedded"):
        return open_path(embedded_model(), name="embedded")
    if not os.fspath(name):
        raise CircuitsError(
            "the checkpoint's name is empty: name a folder, a file or a hub model, or leave the name out for the model that "
            "comes with the package"
        )
    path = user_path(name)
    if _is_path(name):
        if revision is not None:
            raise CircuitsError(f"{path} is a path; a revision ({revision}) belongs to a hub name")
        return open_path(path)
    if name == "smollm2":
        return open_path(_fetched("smollm2"), name="smollm2")
    if _LIKE_A_HEAD.fullmatch(str(name)):
        raise CircuitsError(
            f"{name!r} is written like a head, and a model's name is asked for: 'ov-circuits head {name}' shows a head"
        )
    match = _HUB_NAME.fullmatch(str(name))
    if match is None:
        raise CircuitsError(
            f"{name!r} is neither a path that exists nor a hub name such as 'gpt2', 'org/model' or 'gpt2@main'"
        )
    if revision is not None and match["revision"] not in (None, revision):
        raise CircuitsError(
            f"{name} names the revision {match['revision']}, and {revision} is asked for: leave one out"
        )
    return _open_hub(match["repo"], revision or match["revision"], str(name))


def _open_hub(repo: str, revision: str | None, name: str, *, cache_only: bool = False) -> Checkpoint:
    from ov_circuits.checkpoint.hub import hub_model

    try:
        found = hub_model(repo, revision, WEIGHT_FILES, _TOKENIZER_FILES, cache_only=cache_only)
    except CircuitsError as error:
        near = difflib.get_close_matches(repo.lower(), ("embedded", "smollm2"), n=1, cutoff=0.75)
        if near:
            raise CircuitsError(f"{error}. Or did you mean {near[0]!r}?") from None
        raise
    if found.shards is None:
        return open_path(found.folder, name=name)
    return _hugging_face(name, found.folder, found.folder, found.shards)


def open_path(path: Path, name: str | None = None) -> Checkpoint:
    """Open a folder or a single ``.safetensors``, ``.bin`` or ``.gguf`` file.

    Raises:
        CircuitsError: it does not exist or holds no checkpoint.
    """
    if not exists(path):
        raise CircuitsError(f"{path} does not exist; name a folder with config.json and weights, or a weight file")
    if path.is_file():
        return _open_file(path, name)
    if not path.is_dir():
        raise CircuitsError(
            f"{path} is no regular file (a pipe, socket or device): copy the checkpoint into a file first"
        )
    called = name or path.resolve().name
    if not has_weights(path):
        if is_adapter(path):
            return _open_adapter(path)
        foreign = _open_foreign_folder(path, called)
        if foreign is not None:
            return foreign
    files, opener = _weight_files(path)
    read_config(path)  # said before the weights are opened, which may take a while
    return _hugging_face(called, path, path, opener(files))


def _open_adapter(folder: Path) -> Checkpoint:
    """An adapter's folder: its base is a path, or a hub model in the cache (a path never touches the network)."""
    adapter = Adapter(folder)
    if adapter.base is None:
        raise CircuitsError(
            f"{folder} holds an adapter that names no base model: give the base, and this folder as its adapter"
        )
    beside = folder / user_path(adapter.base)
    base = user_path(adapter.base) if exists(user_path(adapter.base)) else beside
    if exists(base):
        if is_adapter(base) and not has_weights(base):
            raise CircuitsError(f"{folder} names {base} as its base model, which is an adapter itself: give the base")
        return adapted(open_path(base), adapter)
    if not _HUB_NAME.fullmatch(adapter.base):
        raise CircuitsError(
            f"{folder} names the base model {adapter.base!r}, which is not there: give the base by its path"
        )
    try:
        return adapted(_open_hub(adapter.base, adapter.revision, adapter.base, cache_only=True), adapter)
    except CircuitsError as error:
        raise CircuitsError(
            f"{folder} names the base model {adapter.base!r}, and {error}; or open the base with this folder as its adapter"
        ) from error


def has_weights(folder: Path) -> bool:
    """Whether Hugging Face's own weight files lie in a folder."""
    return any(is_file(folder / name) for name in WEIGHT_FILES)


def user_path(name: str | os.PathLike[str]) -> Path:
    """A path with ``~`` and ``~user`` written out.

    Raises:
        CircuitsError: it is no path, or no UTF-8, or there is no such user.
    """
    if not isinstance(name, (str, os.PathLike)):
        raise CircuitsError(f"a path is a text or a Path, not a {type(name).__name__}")
    try:
        str(name).encode()
    except UnicodeEncodeError as error:
        raise CircuitsError(
            f"the name {str(name)!a} is no UTF-8, as the libraries that read checkpoints need it: rename it, or link to it"
        ) from error
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise CircuitsError(
            f"{os.fspath(name)} names a home folder that is not there: write the path in full"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder (of a multimodal model: its text part)."""
    file = folder / "config.json"
    if not is_file(file):
        raise CircuitsError(
            f"{folder} has no config.json, which says how many heads there are: copy it beside the weights"
        )
    return language_part(read_json(file), str(folder))


def embedded_model() -> Path:
    """The folder of the model that comes with the package."""
    return data_file("model/config.json").parent


def data_file(name: str) -> Path:
    """A file or folder that comes with the package: in the wheel's ``_data/``, or in the checkout's ``data/``.

    Raises:
        CircuitsError: it is not there.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "_data", package.parent / "data"):
        if (folder / name).exists():
            return folder / name
    raise CircuitsError(f"{name} is missing from this installation's data: reinstall ov-circuits")


def cache_folder() -> Path:
    """Where fetched models are kept: ``$OV_CIRCUITS_CACHE`` or the user's cache folder."""
    import platformdirs

    given = os.environ.get("OV_CIRCUITS_CACHE")
    return user_path(given) if given else Path(platformdirs.user_cache_dir("ov_circuits"))


def _fetched(name: str) -> Path:
    folder = cache_folder() / name
    if not (folder / "config.json").is_file():
        raise CircuitsError(f"{name} is not on this machine yet; run once: ov-circuits fetch {name}")
    return folder


def lasting(name: str | os.PathLike[str] | None) -> str | Path | None:
    """What names the same checkpoint from any working folder."""
    if name is None:
        return None
    return user_path(name).absolute() if _is_path(name) else os.fspath(name)


def _is_path(name: str | os.PathLike[str]) -> bool:
    return isinstance(name, os.PathLike) or _looks_like_path(str(name)) or exists(user_path(name))


def _looks_like_path(name: str) -> bool:
    return (
        name.startswith((".", "~", os.sep))
        or "\\" in name
        or name.partition("@")[0].count("/") > 1
        or name.endswith(("/", ".safetensors", ".gguf", ".bin", ".json", ".pt", ".pth", ".ckpt"))
    )


def _open_file(file: Path, name: str | None) -> Checkpoint:
    name = name or file.stem
    if file.suffix == ".gguf":
        from ov_circuits.checkpoint.gguf_store import open_gguf

        return _foreign(open_gguf(file), name, file)
    if file.suffix == ".safetensors":
        return _hugging_face(name, file, file.parent, SafetensorsStore([file]))
    if file.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        return _open_torch_file(file, name)
    if file.name in WEIGHT_FILES:
        raise CircuitsError(f"{file} is the index of weights in several files: name its folder {file.parent}")
    if file.name == "config.json":
        raise CircuitsError(
            f"{file} is a config without weights: name its folder {file.parent}, which must hold them; "
            "a config alone is enough for `ov-circuits inspect`"
        )
    raise CircuitsError(
        f"{file} is not a checkpoint this package reads: .safetensors, .gguf, .bin, .pt, .pth, .ckpt, or a folder"
    )


def _open_torch_file(file: Path, name: str) -> Checkpoint:
    """A ``.bin``, ``.pt``, ``.pth`` or ``.ckpt`` file: whose it is, its content says."""
    from ov_circuits.checkpoint import llama2c, meta_llama, nanogpt, vocabularies

    if meta_llama.shard_files(file.parent)[:1] == [file] and is_file(file.parent / "params.json"):
        return _foreign(meta_llama.open_meta(file.parent), name, file)
    if not is_torch(file) and llama2c.is_llama2c(file):
        return _foreign(llama2c.open_llama2c(file), name, file)
    if not is_torch(file) and vocabularies.is_llama2c(file):
        raise CircuitsError(f"{file} is a llama2.c tokenizer: name the model beside it, which takes it along")
    loaded = load_torch(file)
    if nanogpt.is_nanogpt(loaded):
        training = meta_llama.is_llama2c_training(loaded)
        opener = meta_llama.open_llama2c_training if training else nanogpt.open_nanogpt
        return _foreign(opener(loaded, file), name, file)
    beside = file.parent / "config.json"
    if nanogpt.is_mingpt(loaded):
        settings = read_json(beside).get("model") if is_file(beside) else None
        return _foreign(nanogpt.open_mingpt(loaded, settings, file), name, file)
    read_config(file.parent)
    return _hugging_face(name, file, file.parent, MemoryStore(state_dict(loaded, file), str(file)))


# What a quantised checkpoint keeps in place of a weight, by the end of its name.
_PACKED = {
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".weight.absmax": "bitsandbytes, 4 bits",
    ".SCB": "bitsandbytes, 8 bits",
    ".weight_scale": "8-bit floating point",
    ".weight_scale_inv": "8-bit floating point",
}


def _hugging_face(name: str, where: Path, folder: Path, store: TensorStore) -> Checkpoint:
    """A checkpoint in Hugging Face's own files.

    Raises:
        CircuitsError: there is no config, or the weights are quantised.
    """
    config = read_config(folder)
    refuse_packed(store, str(where))
    return Checkpoint(name, str(where), config, store, folder=folder)


def refuse_packed(store: TensorStore, where: str) -> None:
    """Raise a CircuitsError if a tensor stands for a weight that is packed."""
    for tensor in store.names():
        kind = next((kind for end, kind in _PACKED.items() if tensor.endswith(end)), None)
        if kind is not None:
            raise CircuitsError(
                f"{where} is quantised ({kind}): {tensor} in {store.origin(tensor)} stands for a weight that only its own "
                "library unpacks. Use the checkpoint that it was made from, or dequantise it with that library and save it"
            )


def _foreign(opened: Foreign, name: str, where: Path) -> Checkpoint:
    """A checkpoint of another program; where it has no vocabulary of its own, a Hugging Face tokenizer beside it is taken."""
    folder = where if where.is_dir() else where.parent
    return Checkpoint(
        name,
        str(where),
        opened.config,
        opened.store,
        folder=folder,
        tokenizer_file=opened.tokenizer,
        cannot_run=opened.cannot_run,
        others=opened.files,
    )


def _open_foreign_folder(folder: Path, name: str) -> Checkpoint | None:
    """A folder that another program wrote; None when it is none."""
    from ov_circuits.checkpoint import megatron, meta_llama

    if meta_llama.shard_files(folder):
        return _foreign(meta_llama.open_meta(folder), name, folder)
    ranks = megatron.rank_folder(folder)
    if ranks is not None:
        return _foreign(megatron.open_megatron(ranks), name, folder)
    training = next((folder / file for file in ("ckpt.pt", "model.pt") if is_file(folder / file)), None)
    return None if training is None else replace(_open_torch_file(training, name), where=str(folder))


def _weight_files(folder: Path) -> tuple[list[Path], Callable[[list[Path]], TensorStore]]:
    for name in WEIGHT_FILES:
        file = folder / name
        if not is_file(file):
            continue
        files = read_shard_index(file) if name.endswith(".json") else [file]
        return files, SafetensorsStore if "safetensors" in name else TorchStore
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        raise CircuitsError(f"{folder} holds GGUF files; name one of them, for example {ggufs[0]}")
    raise CircuitsError(f"{folder} holds no weights: none of {', '.join((*WEIGHT_FILES, *FOREIGN_FILES))} is there")

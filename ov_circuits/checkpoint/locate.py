"""A name or a path -> an open checkpoint.

1. nothing named: the small model that comes with the package;
2. a path (a folder, a file, or anything that looks like one): read there, and the network is never touched;
3. ``smollm2``: the folder that ``ov-circuits fetch smollm2`` made;
4. any other name: the Hugging Face cache first, then the hub, unless offline mode forbids it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ov_circuits.checkpoint.stores import (
    SafetensorsStore,
    TensorStore,
    TorchStore,
    exists,
    is_file,
    read_json,
    read_shard_index,
    shard_names,
)
from ov_circuits.errors import CircuitsError

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: its config, its tensors, and where a tokenizer would lie.

    Attributes:
        name: what to call it.
        where: the file or folder, for messages.
        config: the content of config.json (or what a GGUF file's metadata says, under the same keys).
        store: the tensors, under the names of the file.
        folder: the folder that transformers can open, when there is one.
        gguf: the GGUF file, when it is one.
        cannot_run: why no prompt can be run on it, when something in the file is known not to carry over.
    """

    name: str
    where: str
    config: dict[str, Any]
    store: TensorStore = field(repr=False)
    folder: Path | None = None
    gguf: Path | None = None
    cannot_run: str | None = None

    def files(self) -> set[Path]:
        """The files that it is made of: nothing may be written over them."""
        found = {Path(self.store.origin(name)) for name in self.store.names()}
        if self.folder is not None:
            names = ("config.json", "generation_config.json", *WEIGHT_FILES, *_TOKENIZER_FILES)
            found |= {self.folder / name for name in names}
        return found


def open_checkpoint(name: str | os.PathLike[str] | None = None, revision: str | None = None) -> Checkpoint:
    """Open a checkpoint by name or path; only headers are read.

    Args:
        name: see the module's text. None opens the embedded default.
        revision: a branch, tag or commit on the hub; refused for paths.

    Raises:
        CircuitsError: nothing is there, or what is there cannot be read.
    """
    if name is None:
        return open_path(embedded_model(), name="embedded")
    if not os.fspath(name):
        raise CircuitsError(
            "the checkpoint's name is empty: name a folder, a file or a hub model, or leave the name out for the model that "
            "comes with the package"
        )
    path = user_path(name)
    if isinstance(name, os.PathLike) or _looks_like_path(str(name)) or exists(path):
        if revision is not None:
            raise CircuitsError(f"{path} is a path; a revision ({revision}) belongs to a hub name")
        return open_path(path)
    if name == "smollm2":
        return open_path(_fetched("smollm2"), name="smollm2")
    if not _HUB_NAME.fullmatch(str(name)):
        raise CircuitsError(f"{name!r} is neither a path that exists nor a hub name such as 'gpt2' or 'org/model'")
    return open_path(_hub_folder(str(name), revision), name=str(name))


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
    files, opener = _weight_files(path)
    config = read_config(path)
    return Checkpoint(name or path.resolve().name, str(path), config, opener(files), folder=path)


def user_path(name: str | os.PathLike[str]) -> Path:
    """A path with ``~`` and ``~user`` written out.

    Raises:
        CircuitsError: there is no such user.
    """
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
    return read_json(file)


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


def _looks_like_path(name: str) -> bool:
    return (
        name.startswith((".", "~", os.sep))
        or "\\" in name
        or name.count("/") > 1
        or name.endswith(("/", ".safetensors", ".gguf", ".bin", ".json", ".pt", ".pth"))
    )


def _open_file(file: Path, name: str | None) -> Checkpoint:
    name = name or file.stem
    if file.suffix == ".gguf":
        from ov_circuits.checkpoint.gguf_store import GGUFStore

        store = GGUFStore(file)
        return Checkpoint(name, str(file), store.config, store, gguf=file, cannot_run=store.cannot_run)
    if file.suffix == ".safetensors":
        return Checkpoint(name, str(file), read_config(file.parent), SafetensorsStore([file]), folder=file.parent)
    if file.suffix in (".bin", ".pt", ".pth"):
        return Checkpoint(name, str(file), read_config(file.parent), TorchStore([file]), folder=file.parent)
    raise CircuitsError(f"{file} is not a checkpoint this package reads: .safetensors, .gguf, .bin, or a folder")


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
    raise CircuitsError(f"{folder} holds no weights: none of {', '.join(WEIGHT_FILES)} is there")


def _hub_folder(repo: str, revision: str | None) -> Path:
    """The snapshot folder of a hub model: config, tokenizer and the first kind of weight file it has."""
    from huggingface_hub import constants

    try:
        return _download(repo, revision, local_files_only=True)
    except _NotFound as missing:
        if constants.HF_HUB_OFFLINE:
            raise CircuitsError(
                f"{repo} is not complete in the Hugging Face cache ({missing}) and offline mode is on "
                "(HF_HUB_OFFLINE): fetch it where there is a network, or name a folder"
            ) from missing
    try:
        return _download(repo, revision, local_files_only=False)
    except _NotFound as missing:
        raise CircuitsError(
            f"{repo} could not be had from the Hugging Face hub ({missing}). "
            "Check the name and the network, or name a folder that holds the checkpoint"
        ) from missing


class _NotFound(Exception):
    """A file of a hub model is in reach neither here nor there; the text says which and why."""


def _download(repo: str, revision: str | None, *, local_files_only: bool) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    def get(name: str) -> Path | None:
        try:
            if local_files_only:
                # hf_hub_download(local_files_only=True) would ask the hub who is calling before it looks into the cache.
                cached = try_to_load_from_cache(repo, name, revision=revision)
                return Path(cached) if isinstance(cached, str) else None
            return Path(hf_hub_download(repo, name, revision=revision))
        except LocalEntryNotFoundError as error:
            raise _NotFound(f"no connection: {_first_line(error)}") from error
        except EntryNotFoundError:
            return None
        except Exception as error:  # which HTTP library fails, and how, is huggingface_hub's own affair
            raise _NotFound(_first_line(error)) from error

    config = get("config.json")
    if config is None:
        raise _NotFound("config.json is not there")
    weights = next((file for file in map(get, WEIGHT_FILES) if file is not None), None)
    if weights is None:
        raise _NotFound("no weight file is there")
    if weights.name.endswith(".json"):
        for shard in shard_names(weights):
            if get(shard) is None:
                raise _NotFound(f"the shard {shard} is not there")
    for name in _TOKENIZER_FILES:
        get(name)
    return config.parent


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__

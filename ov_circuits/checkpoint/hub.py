"""Models of the Hugging Face hub: the cache first, then the hub, and of it no more than is needed.

Scores of weights need the shards that hold attention, embedding and norm tensors. A shard of MLP tensors alone is announced by
the index and its header, and brought when a prompt is run. Everything of one model is taken from one commit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ov_circuits.checkpoint.contents import bare_names
from ov_circuits.checkpoint.families import family_of, language_part
from ov_circuits.checkpoint.stores import SafetensorsStore, TensorStore, read_json, weight_map
from ov_circuits.errors import CircuitsError

if TYPE_CHECKING:
    from collections.abc import Iterator

# Seconds to wait for the hub's first answer, where the user has set no other time (HF_HUB_ETAG_TIMEOUT).
_PATIENCE = 5.0


@dataclass(frozen=True)
class HubModel:
    """A model of the hub, as far as it is on this machine.

    Attributes:
        folder: the snapshot's folder in the cache.
        shards: a store for shards that come when they are needed; None where every file is there.
    """

    folder: Path
    shards: TensorStore | None = None


class ShardedStore(TensorStore):
    """Shards of a safetensors index, each opened (and brought, if need be) when a tensor in it is asked for.

    Args:
        shards: tensor -> shard, as the index says.
        folder: where the shards lie, or will.
        bring: makes a shard be there.
        header: tensor -> (dtype, shape) of a shard that is not there.
    """

    def __init__(
        self,
        shards: Mapping[str, str],
        folder: Path,
        bring: Callable[[str], Path],
        header: Callable[[str], Mapping[str, tuple[str, tuple[int, ...]]]],
    ) -> None:
        self._shards, self._folder, self._bring, self._header = dict(shards), folder, bring, header
        self._open: dict[str, SafetensorsStore] = {}
        self._headers: dict[str, Mapping[str, tuple[str, tuple[int, ...]]]] = {}

    def names(self) -> Sequence[str]:
        return list(self._shards)

    def shape(self, name: str) -> tuple[int, ...]:
        store = self._here(name)
        return self._announced(name)[1] if store is None else store.shape(name)

    def dtype(self, name: str) -> str:
        store = self._here(name)
        return self._announced(name)[0] if store is None else store.dtype(name)

    def origin(self, name: str) -> str:
        return str(self._folder / self._shards[name])

    def _read(self, name: str) -> Tensor:
        return self._read_part(name, ())

    def _read_part(self, name: str, part: tuple[slice, ...]) -> Tensor:
        shard = self._shards[name]
        if self._here(name) is None:
            self._bring(shard)
        store = self._here(name)
        if store is None:
            raise CircuitsError(f"the shard {shard} is not in {self._folder}, though it was just brought: try again")
        return store._read_part(name, part) if part else store._read(name)

    def _here(self, name: str) -> SafetensorsStore | None:
        """The open shard of a tensor, if it is on this machine."""
        shard = self._shards[name]
        file = self._folder / shard
        if shard not in self._open and file.is_file():
            self._open[shard] = SafetensorsStore([file])
        store = self._open.get(shard)
        if store is not None and name not in store:
            raise CircuitsError(f"{file} does not hold the tensor {name}, though the index says so: fetch it again")
        return store

    def _announced(self, name: str) -> tuple[str, tuple[int, ...]]:
        shard = self._shards[name]
        if shard not in self._headers:
            self._headers[shard] = self._header(shard)
        if name not in self._headers[shard]:
            raise CircuitsError(f"the shard {shard} does not hold the tensor {name}, though the index says so")
        return self._headers[shard][name]


# -- a model ----------------------------------------------------------------------------------------------------------------


def hub_model(
    repo: str, revision: str | None, weights: Sequence[str], tokenizer: Sequence[str], *, cache_only: bool = False
) -> HubModel:
    """A hub model by name: from the cache where it is whole, else from the hub, else the attention layers that the cache has.

    Args:
        repo: ``gpt2`` or ``org/model``.
        revision: branch, tag or commit; None is the main branch.
        weights: names of weight files, the best first.
        tokenizer: names of tokenizer files.
        cache_only: whether the network is left alone, as in offline mode.

    Raises:
        CircuitsError: it cannot be had; the message says why and what to do.
    """
    from huggingface_hub import constants

    def find(source: _Cache | _Hub) -> HubModel:
        return _Repository(repo, source).model(weights, tokenizer)

    offline = constants.HF_HUB_OFFLINE
    try:
        return find(_Cache(repo, revision, whole=not (offline or cache_only)))
    except _NotFound as missing:
        if offline or cache_only:
            mode = " and offline mode is on (HF_HUB_OFFLINE)" if offline else ""
            raise CircuitsError(
                f"{repo} is not complete in the Hugging Face cache ({missing}){mode}: "
                "fetch it where there is a network, or name a folder"
            ) from None  # what failed is in the sentence; pages of the network library's own would follow
    try:
        return find(_Hub(repo, revision))
    except _NotFound as missing:
        try:
            return find(_Cache(repo, revision, whole=False))
        except _NotFound:
            raise CircuitsError(
                f"{repo} could not be had from the Hugging Face hub ({missing}). "
                "Check the name and the network, or name a folder that holds the checkpoint"
            ) from None


class _NotFound(Exception):
    """A file of a hub model is in reach neither here nor there; the text says which and why."""


class _Cache:
    """What the Hugging Face cache holds of a model. hf_hub_download would ask the hub who is calling before it looks there."""

    def __init__(self, repo: str, revision: str | None, *, whole: bool) -> None:
        self._repo, self._revision, self.whole = repo, revision, whole

    def get(self, name: str) -> Path | None:
        """A file, if it is in the cache."""
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(self._repo, name, revision=self._revision)
        return Path(cached) if isinstance(cached, str) else None

    def header(self, shard: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Nothing is known of a shard that is not here."""
        return {}


class _Hub:
    """A model on the hub. All its files are taken from the commit that the first answer named."""

    def __init__(self, repo: str, revision: str | None) -> None:
        from huggingface_hub import HfApi, constants

        self._repo, self._revision, self._api = repo, revision, HfApi()
        chosen = constants.HF_HUB_ETAG_TIMEOUT != constants.DEFAULT_ETAG_TIMEOUT
        with _as_not_found(repo):
            # Asked first, once and without patience: each download would try five times before it says that there is no network.
            info = self._api.model_info(
                repo, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT if chosen else _PATIENCE
            )
        self._names = {file.rfilename for file in info.siblings or ()}
        self._commit: str | None = None

    def get(self, name: str) -> Path | None:
        """A file, brought into the cache; None when the model has none of that name."""
        from huggingface_hub import hf_hub_download

        if name not in self._names:
            return None
        with _as_not_found(self._repo):
            # The first by the name of the revision, so that the cache notes which commit it means.
            found = Path(hf_hub_download(self._repo, name, revision=self._commit or self._revision))
        self._commit = found.parent.name
        return found

    def header(self, shard: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """What a shard on the hub holds: its first bytes are asked for."""
        try:
            with _as_not_found(self._repo):
                found = self._api.parse_safetensors_file_metadata(self._repo, shard, revision=self._commit)
        except _NotFound as missing:
            raise CircuitsError(
                f"the header of {shard} of {self._repo} cannot be read ({missing}): try again"
            ) from missing
        return {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in found.tensors.items()}


class _Repository:
    """Which files of a model are needed, wherever they come from."""

    def __init__(self, repo: str, source: _Cache | _Hub) -> None:
        self._repo, self._source = repo, source

    def model(self, weights: Sequence[str], tokenizer: Sequence[str]) -> HubModel:
        adapter = self._source.get("adapter_config.json")
        config = self._source.get("config.json")
        if config is None and adapter is None:
            raise _NotFound("config.json is not there")
        if config is None:
            assert adapter is not None
            return self._adapter(adapter.parent, tokenizer)
        found = next((file for file in map(self._source.get, weights) if file is not None), None)
        if found is None:
            raise _NotFound("no weight file is there")
        shards = None
        if found.name.endswith(".json"):
            shards = self._shards(found, read_json(config))
        for name in tokenizer:
            self._source.get(name)
        return HubModel(config.parent, shards)

    def _adapter(self, folder: Path, tokenizer: Sequence[str]) -> HubModel:
        names = ("adapter_model.safetensors", "adapter_model.bin")
        if all(self._source.get(name) is None for name in names):
            raise _NotFound(f"it is an adapter, and neither {' nor '.join(names)} is there")
        for name in tokenizer:
            self._source.get(name)
        return HubModel(folder)

    def _shards(self, index: Path, config: Mapping[str, Any]) -> TensorStore | None:
        """Bring the shards that scores of weights need; a store for the others, if there are any."""
        shards = weight_map(index)
        needed = set(shards.values())
        if index.name.startswith("model.safetensors"):
            needed = _needed(shards, config, self._repo)
        for shard in sorted(needed):
            self._need(shard)
        others = set(shards.values()) - needed
        if isinstance(self._source, _Cache):
            missing = {shard for shard in others if self._source.get(shard) is None}
            if missing and self._source.whole:
                raise _NotFound(f"the shard {min(missing)} is not there")
            # As long as the hub may not be asked, what is not here does not exist; the weights that are here can be scored.
            shards = {name: shard for name, shard in shards.items() if shard not in missing}
            others = missing
        return ShardedStore(shards, index.parent, self._bring, self._source.header) if others else None

    def _need(self, shard: str) -> Path:
        found = self._source.get(shard)
        if found is None:
            raise _NotFound(f"the shard {shard} is not there")
        return found

    def _bring(self, shard: str) -> Path:
        try:
            return self._need(shard)
        except _NotFound as missing:
            raise CircuitsError(
                f"the shard {shard} of {self._repo}, which a prompt needs, could not be had ({missing}): check the network"
            ) from missing


def _needed(shards: Mapping[str, str], config: Mapping[str, Any], repo: str) -> set[str]:
    """The shards with a tensor that scores of weights read: any that is none of an MLP."""
    config = language_part(config, repo)
    family = family_of(config, repo)
    mlps = family.shapes(family.architecture(config), config).mlps
    return {shards[name] for short, name in bare_names(shards, family).items() if family.short_name(short) not in mlps}


@contextmanager
def _as_not_found(repo: str) -> Iterator[None]:
    """Whatever the hub's library raises, as one sentence."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        raise CircuitsError(
            f"{repo} is gated: ask for access at {constants.ENDPOINT}/{repo}, then log in with `hf auth login` "
            "(or set HF_TOKEN) and try again"
        ) from error
    except RevisionNotFoundError as error:
        raise CircuitsError(
            f"{repo} has no such revision on the hub: name a branch, a tag or a commit of it"
        ) from error
    except RepositoryNotFoundError as error:
        raise CircuitsError(
            f"the Hugging Face hub has no model {repo}, or it is private: check the name, or log in with `hf auth login`"
        ) from error
    except LocalEntryNotFoundError as error:
        raise _NotFound(f"no connection: {_first_line(error)}") from error
    except CircuitsError:
        raise
    except Exception as error:  # which HTTP library fails, and how, is huggingface_hub's own affair
        raise _NotFound(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__

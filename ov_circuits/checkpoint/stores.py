"""Lazy named tensors: opening reads headers, :meth:`TensorStore.read` reads one tensor, as float32.

safetensors files are memory mapped; torch files are mapped with ``weights_only=True`` (no code runs); GGUF tensors are
mapped and dequantised one at a time. Half precision becomes float32 here and nowhere else: processors without such units
multiply bfloat16 hundreds of times slower.
"""

from __future__ import annotations

import json
import math
import pickle
import threading
import warnings
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ov_circuits.errors import CircuitsError, for_want_of_memory

# A checkpoint's pickle and JSON hold names and numbers; what is larger is no such thing, and would fill the memory.
_LARGEST_PICKLE = 64 * 2**20
_LARGEST_JSON = 32 * 2**20


class TensorStore(ABC):
    """Named tensors that are read one at a time."""

    @property
    def reads_parts(self) -> bool:
        """Whether reading a part of a tensor costs no more than that part."""
        return True

    @property
    def device(self) -> torch.device:
        """Where its tensors are read to."""
        return torch.device("cpu")

    @abstractmethod
    def names(self) -> Sequence[str]:
        """The tensors' names, in the file's order."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from the header: its data is not read."""

    @abstractmethod
    def dtype(self, name: str) -> str:
        """The stored type, as the file names it."""

    @abstractmethod
    def origin(self, name: str) -> str:
        """The file a tensor lies in, for messages."""

    @abstractmethod
    def _read(self, name: str) -> Tensor:
        """The tensor as stored."""

    def check_unchanged(self) -> None:
        """Raise a CircuitsError if the tensors are no longer those that were opened; files are taken to stay as they are."""
        return None

    def _read_part(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """Some rows (and columns) of the tensor as stored; stores that can read them alone do."""
        return self._read(name)[part]

    def read(self, name: str, part: tuple[slice, ...] = ()) -> Tensor:
        """The tensor as float32, or the part of it that a slice for each leading dimension chooses.

        Raises:
            CircuitsError: the tensor is not of a plain floating type, or its data is damaged.
        """
        tensor = self._read_part(name, part) if part else self._read(name)
        # float8 numbers mean nothing without the scales that lie beside them under other names.
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise CircuitsError(
                f"tensor {name} in {self.origin(name)} holds {tensor.dtype}, not plain floating-point "
                "numbers: quantised checkpoints (AWQ, GPTQ, bitsandbytes, FP8) must be dequantised first"
            )
        return tensor.detach().float()

    def __contains__(self, name: str) -> bool:
        return name in self._name_set

    @cached_property
    def _name_set(self) -> frozenset[str]:
        return frozenset(self.names())

    @cached_property
    def n_parameters(self) -> int:
        """The number of stored floating-point numbers (from the headers)."""
        return sum(math.prod(self.shape(name)) for name in self.names())


class SafetensorsStore(TensorStore):
    """One or several safetensors files.

    Args:
        files: the files; each tensor is looked up in the file whose header names it.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        from safetensors import SafetensorError, safe_open

        self._handles: dict[str, tuple[Any, Path]] = {}
        for file in files:
            try:
                handle = safe_open(str(file), framework="pt")
            except (SafetensorError, OSError) as error:
                raise CircuitsError(
                    f"{file} is not a readable safetensors file ({error}); it may be cut short or damaged: "
                    "copy or download it again"
                ) from error
            for name in handle.keys():  # noqa: SIM118 (safe_open is not a mapping)
                if name in self._handles:
                    raise CircuitsError(
                        f"tensor {name} is in both {self._handles[name][1]} and {file}: "
                        "shards of two checkpoints are mixed in one folder"
                    )
                self._handles[name] = (handle, file)

    def names(self) -> Sequence[str]:
        return list(self._handles)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handles[name][0].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        return str(self._handles[name][0].get_slice(name).get_dtype())

    def origin(self, name: str) -> str:
        return str(self._handles[name][1])

    def _read(self, name: str) -> Tensor:
        return self._read_part(name, ())

    def _read_part(self, name: str, part: tuple[slice, ...]) -> Tensor:
        from safetensors import SafetensorError, safe_open

        file = self._handles[name][1]
        try:
            # Mapped anew for each tensor: what a mapping has read counts as this process's memory for as long as it lives.
            handle = safe_open(str(file), framework="pt")
            with torch.device("cpu"):  # a slice would go to torch's default device, which is the user's
                return handle.get_slice(name)[part] if part else handle.get_tensor(name)
        except (SafetensorError, RuntimeError, OSError) as error:
            if for_want_of_memory(error):
                raise
            raise CircuitsError(f"tensor {name} in {file} cannot be read ({error}): copy the file again") from error


class _OpenTensors(TensorStore):
    """Tensors that torch has in hand already, mapped or in memory."""

    _tensors: dict[str, Tensor]

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> str:
        return str(self._tensors[name].dtype).removeprefix("torch.")


class TorchStore(_OpenTensors):
    """One or several ``pytorch_model.bin`` files, opened with ``weights_only=True`` and memory mapped."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._tensors = {}
        self._files: dict[str, Path] = {}
        for file in files:
            for name, tensor in state_dict(load_torch(file), file).items():
                if name in self._tensors:
                    raise CircuitsError(
                        f"tensor {name} is in both {self._files[name]} and {file}: "
                        "shards of two checkpoints are mixed in one folder"
                    )
                self._tensors[name] = tensor
                self._files[name] = file

    def origin(self, name: str) -> str:
        return str(self._files[name])

    def _read(self, name: str) -> Tensor:
        return self._tensors[name]


def load_torch(file: Path, allowed: Sequence[Any] = ()) -> Any:
    """What a torch file holds, its tensors memory mapped. Only tensors and plain containers are built: no code runs.

    Args:
        file: a zip archive, or a pickle from before torch 1.6.
        allowed: further classes that may be built; each must do nothing but hold data.

    Raises:
        CircuitsError: it is damaged, unpacks into more than it is, or holds something else.
    """
    try:
        if not is_torch(file):
            raise ValueError("it does not begin as one")
        _check_archive(file)
        # torch warns of its own TypedStorage while reading old files.
        with no_warnings(), torch.serialization.safe_globals(list(allowed)):
            return _torch_load(file)
    except CircuitsError:
        raise
    # A damaged pickle sends its reader anywhere: IndexError, AssertionError, MemoryError, struct.error have been seen.
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, pickle.UnpicklingError) and "weights_only" in str(error).lower():
            raise CircuitsError(
                f"{file} was refused: it holds more than tensors (a pickle can run code when opened). "
                "Convert it to safetensors on a machine where you trust the file"
            ) from error
        raise CircuitsError(
            f"{file} is not a readable torch checkpoint ({reason}): copy or download it again"
        ) from error


# Where programs that train keep a model's tensors, beside an optimizer's and the like.
_MODEL_KEYS = ("state_dict", "model_state_dict", "model")


def state_dict(loaded: Any, file: Path) -> dict[str, Tensor]:
    """The tensors of a dictionary that a torch file holds, or of the model's inside it; other values are left out.

    Raises:
        CircuitsError: it is no dictionary, or a tensor in it is no plain array.
    """
    if not isinstance(loaded, Mapping):
        raise CircuitsError(f"{file} holds a {type(loaded).__name__}, not a dictionary of tensors")
    loaded = next((loaded[key] for key in _MODEL_KEYS if isinstance(loaded.get(key), Mapping)), loaded)
    tensors = {str(name): value for name, value in loaded.items() if isinstance(value, Tensor)}
    for name, tensor in tensors.items():
        _check_plain(name, tensor, file)
    return tensors


_WARNINGS = threading.RLock()


@contextmanager
def no_warnings() -> Iterator[None]:
    """No warnings within. How they are filtered is one list a process: of two threads, the later one would put back the other's."""
    with _WARNINGS, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """What the system says while a file is read, as one sentence.

    Raises:
        CircuitsError: it cannot be read.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise CircuitsError(f"{file} cannot be read ({reason}): look at its permissions, or copy it again") from error


def first_bytes(file: Path, n: int) -> bytes:
    """The first ``n`` bytes of a file, or as many as it has.

    Raises:
        CircuitsError: it cannot be read.
    """
    with reading(file), file.open("rb") as opened:
        return opened.read(n)


def is_torch(file: Path) -> bool:
    """Whether a file begins as torch writes them: a zip archive, or a pickle from before torch 1.6."""
    start = first_bytes(file, 2)
    return start == b"PK" or start[:1] == b"\x80"


def _check_archive(file: Path) -> None:
    """Refuse an archive that unpacks into more than it is: torch compresses no tensors, and their pickle is small.

    Files from before torch 1.6 are no archives and pass.
    """
    if first_bytes(file, 4) != b"PK\x03\x04":
        return
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise CircuitsError(
                    f"{file} was refused: its entry {entry.filename} is compressed, which no file of tensors "
                    "needs and which may unpack into more than memory holds. Convert it to safetensors where you trust the file"
                )
            if "/data/" not in entry.filename and entry.file_size > _LARGEST_PICKLE:
                raise CircuitsError(
                    f"{file} was refused: its entry {entry.filename} has {entry.file_size:,} bytes, far more than the names "
                    "and shapes of tensors take. Convert it to safetensors where you trust the file"
                )


def _check_plain(name: str, tensor: Tensor, file: Path) -> None:
    """Refuse what is no array of numbers in memory: sparse, nested, without data, or few numbers repeated into many."""
    kind = None
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
    elif tensor.device.type != "cpu":
        kind = f"on the device {tensor.device.type!r}, without data,"
    elif tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
        kind = "a view that repeats its numbers,"
    if kind is not None:
        raise CircuitsError(
            f"tensor {name} in {file} is {kind} and not a plain array: save it again from tensor.to_dense().contiguous()"
        )


def _torch_load(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        # Files from before torch 1.6 are no zip archives and cannot be mapped.
        return torch.load(file, map_location="cpu", weights_only=True)


class Watch:
    """Whether torch has written into tensors since they were first seen; what numpy writes into them is not noticed."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        self._seen = self._count()

    def _count(self) -> int:
        # torch counts what is written into a tensor (an optimizer's step, load_state_dict), whoever holds it.
        return sum([tensor._version for tensor in self._tensors])

    @property
    def written(self) -> bool:
        return self._count() != self._seen


class MemoryStore(_OpenTensors):
    """Tensors that are in memory already (a state dict); only what must become float32 or lies on a device is copied."""

    def __init__(self, tensors: Mapping[str, Tensor], origin: str = "memory") -> None:
        self._tensors, self._origin = dict(tensors), origin
        self._watch = Watch(self._tensors.values())

    def check_unchanged(self) -> None:
        if self._watch.written:
            raise CircuitsError(
                f"the weights of {self._origin} were changed after they were opened, and some that were read before are "
                "still in use: open them again with ov.load, which costs nothing"
            )

    def origin(self, name: str) -> str:
        return self._origin

    def _read(self, name: str) -> Tensor:
        return self._tensors[name].cpu()


@dataclass(frozen=True)
class Recipe:
    """A tensor that is made when it is read: transposed, joined, dequantised, .. from what a file holds.

    Attributes:
        shape: what ``make`` gives.
        dtype: the stored type, as the file names it.
        origin: the file, for messages.
        make: reads and makes it.
    """

    shape: tuple[int, ...]
    dtype: str
    origin: str
    make: Callable[[], Tensor]

    @classmethod
    def of(cls, store: TensorStore, name: str) -> Recipe:
        """A stored tensor as it is."""
        return cls(store.shape(name), store.dtype(name), store.origin(name), lambda: store._read(name))

    def then(self, change: Callable[[Tensor], Tensor], shape: tuple[int, ...] | None = None) -> Recipe:
        """The same, changed; with another shape where that changes too."""
        return replace(self, shape=self.shape if shape is None else shape, make=lambda: change(self.make()))

    def transposed(self) -> Recipe:
        """A matrix on its other side."""
        return self.then(lambda matrix: matrix.mT, self.shape[::-1])


class RecipeStore(TensorStore):
    """Tensors that are made when they are read."""

    @property
    def reads_parts(self) -> bool:
        return False

    def __init__(self, recipes: Mapping[str, Recipe]) -> None:
        self._recipes = dict(recipes)

    def names(self) -> Sequence[str]:
        return list(self._recipes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._recipes[name].shape

    def dtype(self, name: str) -> str:
        return self._recipes[name].dtype

    def origin(self, name: str) -> str:
        return self._recipes[name].origin

    def _read(self, name: str) -> Tensor:
        return self._recipes[name].make()


class _StoreOver(TensorStore):
    """A store on top of another one, which answers whatever this one does not change."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store

    @property
    def reads_parts(self) -> bool:
        return self._store.reads_parts

    @property
    def device(self) -> torch.device:
        return self._store.device

    def names(self) -> Sequence[str]:
        return self._store.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._store.shape(name)

    def dtype(self, name: str) -> str:
        return self._store.dtype(name)

    def origin(self, name: str) -> str:
        return self._store.origin(name)

    def check_unchanged(self) -> None:
        self._store.check_unchanged()


class PlacedStore(_StoreOver):
    """A store whose tensors are put on a device as they are read: in the file's precision, which is what travels."""

    def __init__(self, store: TensorStore, device: torch.device) -> None:
        super().__init__(store)
        self._device = device

    @property
    def device(self) -> torch.device:
        return self._device

    def _read(self, name: str) -> Tensor:
        return self._store._read(name).to(self._device)

    def _read_part(self, name: str, part: tuple[slice, ...]) -> Tensor:
        return self._store._read_part(name, part).to(self._device)


class RenamedStore(_StoreOver):
    """A store under other names: a common prefix (``transformer.``) taken off, aliases given, everything else hidden."""

    def __init__(self, store: TensorStore, names: Mapping[str, str]) -> None:
        super().__init__(store)
        self._map = dict(names)

    def names(self) -> Sequence[str]:
        return list(self._map)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._store.shape(self._map[name])

    def dtype(self, name: str) -> str:
        return self._store.dtype(self._map[name])

    def origin(self, name: str) -> str:
        return self._store.origin(self._map[name])

    def _read(self, name: str) -> Tensor:
        return self._store._read(self._map[name])

    def _read_part(self, name: str, part: tuple[slice, ...]) -> Tensor:
        return self._store._read_part(self._map[name], part)


class SilencedStore(_StoreOver):
    """A store in which some rows or columns of some tensors read as zero.

    Args:
        store: all tensors.
        silent: a tensor's name -> the dimension, and which of its indices are zero.
    """

    def __init__(self, store: TensorStore, silent: Mapping[str, tuple[int, Tensor]]) -> None:
        super().__init__(store)
        self._silent = dict(silent)

    def _read(self, name: str) -> Tensor:
        return self._read_part(name, ())

    def _read_part(self, name: str, part: tuple[slice, ...]) -> Tensor:
        tensor = self._store._read_part(name, part) if part else self._store._read(name)
        if name not in self._silent:
            return tensor
        dim, silent = self._silent[name]
        silent = silent[part[dim]] if dim < len(part) else silent
        return tensor.masked_fill(silent.view(-1, *[1] * (tensor.ndim - 1 - dim)), 0.0)


class ReadOnce(_StoreOver):
    """A store that reads each tensor once, for as long as this object lives."""

    def __init__(self, store: TensorStore) -> None:
        super().__init__(store)
        self._read_tensors: dict[str, Tensor] = {}

    def _read(self, name: str) -> Tensor:
        if name not in self._read_tensors:
            self._read_tensors[name] = self._store.read(name)
        return self._read_tensors[name]

    def _read_part(self, name: str, part: tuple[slice, ...]) -> Tensor:
        return self._read_tensors[name][part] if name in self._read_tensors else self._store.read(name, part)


def read_shard_index(index: Path) -> list[Path]:
    """The shard files that a ``*.index.json`` names, each of which must lie beside it.

    Raises:
        CircuitsError: the index is no valid JSON, names a file outside its folder, or one that is missing.
    """
    files = [index.parent / name for name in shard_names(index)]
    for file in files:
        if not is_file(file):
            raise CircuitsError(
                f"{index} names the shard {file.name}, which is missing from {index.parent}: copy it there"
            )
    return files


def shard_names(index: Path) -> list[str]:
    """The shards that a ``*.index.json`` names; whether they are there is not looked at.

    Raises:
        CircuitsError: the index is no valid JSON, or names a file outside its folder.
    """
    return sorted(set(weight_map(index).values()))


def weight_map(index: Path) -> dict[str, str]:
    """Tensor -> shard, as a ``*.index.json`` says.

    Raises:
        CircuitsError: the index is no valid JSON, or names a file outside its folder.
    """
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CircuitsError(f"{index} has no weight_map: it is not the index of a sharded checkpoint")
    for name in sorted({str(value) for value in found.values()}):
        if Path(name).name != name or name == "..":
            raise CircuitsError(f"{index} names the shard {name!r}, which is not a file beside it: refused")
    return {str(tensor): str(shard) for tensor, shard in found.items()}


def exists(path: Path) -> bool:
    """Whether something lies at a path.

    Raises:
        CircuitsError: the system cannot even look it up: the name is too long, or the folder closed.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL or half a character in the name
        return False
    except OSError as error:
        name = str(path)
        shown = name if len(name) <= 120 else f"{name[:80]}.. ({len(name)} characters)"
        raise CircuitsError(f"{shown} cannot be looked up ({error.strerror}): check the name") from error
    return True


def is_file(path: Path) -> bool:
    """Whether a regular file lies at a path; raises as :func:`exists` does."""
    return exists(path) and path.is_file()


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CircuitsError: the file cannot be read or holds something else.
    """
    try:
        if file.stat().st_size > _LARGEST_JSON:
            raise CircuitsError(
                f"{file} is larger than {_LARGEST_JSON:,} bytes: it is no file of settings; copy it again"
            )
        value = json.loads(file.read_text(encoding="utf-8"))
    except CircuitsError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CircuitsError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise CircuitsError(f"{file} holds a JSON {type(value).__name__}, not an object")
    return value

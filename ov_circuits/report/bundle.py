"""A report as a folder: the page, and beside it all that it was made from, for other programs and for the record.

    report.html           the page
    heads.parquet         the scoreboard; composition, overlap, spaces, pairs, account and certificate likewise, and
                          what else was asked for: ablation, attribution, examples, generation
    cards/9.9.json        one card a head
    figures/*.svg, *.png  the main figures
    manifest.json         versions, threads, the checkpoint's hashes, view, seed, prompt, and the hash of every file above

The same checkpoint, options, versions and threads give the same bytes: nothing in it knows the time or the place. Another number
of threads sums in another order, and last digits differ.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

import ov_circuits
from ov_circuits.errors import CircuitsError
from ov_circuits.report import figures
from ov_circuits.report.cards import with_texts
from ov_circuits.report.dashboard import Dashboard
from ov_circuits.report.results import Results
from ov_circuits.report.stills import stills, why_no_stills
from ov_circuits.report.tables import dumps, write_frame
from ov_circuits.scores.board import SCORES
from ov_circuits.scores.chance import DRAWS, spectrum
from ov_circuits.trace.behaviours import BEHAVIOURS

if TYPE_CHECKING:
    import plotly.graph_objects as go

_MANIFEST = "manifest.json"
_PACKAGES = (
    "torch",
    "numpy",
    "pandas",
    "pyarrow",
    "plotly",
    "transformers",
    "transformer-lens",
    "tokenizers",
    "safetensors",
)


def check_folder(folder: str | os.PathLike[str]) -> Path:
    """The folder, if a bundle may be written there: it is new, empty, or holds a bundle, which is then replaced.

    Raises:
        CircuitsError: it is a file, holds something else, or its parent does not exist.
    """
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise CircuitsError(f"cannot write a bundle to {path}: it is a file; name a folder")
    if path.is_dir() and any(path.iterdir()) and not (path / _MANIFEST).is_file():
        raise CircuitsError(f"cannot write a bundle to {path}: it holds files that are no bundle; name a new folder")
    if not path.parent.is_dir():
        raise CircuitsError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")
    return path


def write_bundle(page: Dashboard, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Write the bundle, whole or not at all, and return its manifest.

    Raises:
        CircuitsError: the folder may not be written (:func:`check_folder`), or the figures could not be drawn.
    """
    target = check_folder(folder)
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as made:
            manifest = _fill(page, Path(made))
            _move(Path(made), target)
    except OSError as error:
        raise CircuitsError(f"cannot write the bundle {target}: {error.strerror or error}") from error
    return manifest


def _fill(page: Dashboard, folder: Path) -> dict[str, Any]:
    results, content = page.results, page.payload
    if results is None:
        raise ValueError("only a page that ov.dashboard made has frames and figures")
    page.save(folder / "report.html")
    for name, frame in _frames(results).items():
        write_frame(frame, folder / f"{name}.parquet")
    (folder / "cards").mkdir()
    for label, card in zip(results.model.head_labels, content["cards"], strict=True):
        _write(folder / "cards" / f"{label}.json", dumps(_card(results, content, label, card)) + "\n")
    left_out = why_no_stills()
    if left_out is None:
        (folder / "figures").mkdir()
        for name, data in stills(main_figures(results)).items():
            (folder / "figures" / name).write_bytes(data)
    manifest = _manifest(results, folder, left_out)
    _write(folder / _MANIFEST, dumps(manifest) + "\n")
    return manifest


def _write(path: Path, text: str) -> None:
    # Lone bytes of a vocabulary are lone surrogates in text; as escapes they are valid JSON and survive.
    path.write_bytes(text.encode("utf-8", "backslashreplace"))


def _move(made: Path, target: Path) -> None:
    """Put the new files in place of an older bundle's; its other files are the older bundle's own and go."""
    if target.is_dir():
        for old in sorted(target.rglob("*"), reverse=True):
            if old.is_file() and _belongs(old.relative_to(target)) and not (made / old.relative_to(target)).exists():
                old.unlink()
    for file in sorted(made.rglob("*")):
        if file.is_file():
            place = target / file.relative_to(made)
            place.parent.mkdir(parents=True, exist_ok=True)
            file.replace(place)


def _belongs(path: Path) -> bool:
    """Whether a file's place is one that bundles write to."""
    if len(path.parts) == 2:
        return path.parts[0] in ("cards", "figures") and path.suffix in (".json", ".svg", ".png")
    return len(path.parts) == 1 and path.suffix == ".parquet"


def _frames(results: Results) -> dict[str, pd.DataFrame]:
    frames = {
        "heads": results.board,
        "spaces": results.spaces,
        "certificate": results.certificate.frame(),
        "composition": results.composition,
        "overlap": results.overlap,
        "account": results.account,
        "ablation": results.sweep,
        "attribution": results.attribution,
    }
    if results.scan is not None:
        frames["examples"] = results.scan.examples
        frames["scan"] = results.scan.heads
        frames["distributions"] = results.scan.distributions
    if results.generation is not None:
        frames["generation"] = results.generation.tokens()
        frames["generation-account"] = results.generation.frame()
    for place, frame in enumerate(results.token_pairs, start=1):
        frames[f"entry-{place}"] = frame
    if results.pairs:
        parts = [frame.assign(head=label) for label, frame in results.pairs.items()]
        frames["pairs"] = pd.concat(parts, ignore_index=True)
    return {name: frame for name, frame in frames.items() if frame is not None}


def _card(results: Results, content: dict[str, Any], label: str, card: dict[str, Any]) -> dict[str, Any]:
    labels, table = results.model.head_labels, content["tokens"]
    place = labels.index(label)
    said = [
        part if isinstance(part, str) else table[part["token"]] if "token" in part else labels[part["head"]]
        for part in card["evidence"]
    ]
    return {
        "model": results.model.name,
        "view": results.model.view,
        "head": label,
        "scores": {score["key"]: content["values"][score["key"]][place] for score in content["scores"]},
        "z": {key: chance["z"][place] for key, chance in content["chance"].items()},
        **with_texts(card, table),
        **({} if content["examples"] is None else {"text": content["examples"]["heads"][label]}),
        "evidence": "".join(said),
    }


def main_figures(results: Results) -> dict[str, go.Figure]:
    """The figures of a report by name: the model's, the prompt's and the text's, and those of the head that stands out most."""
    board, model = results.board, results.model
    keys = [key for key in SCORES if key in board]
    found = {
        f"map-{key}": figures.head_map(board, key) for key in [*keys[:1], *(key for key in BEHAVIOURS if key in board)]
    }
    if {"ov_frobenius_norm"} < set(keys):
        found["scatter"] = figures.score_scatter(board, "ov_frobenius_norm", keys[0])
    for space in ("write", "read"):
        found[f"spaces-{space}"] = figures.space_map(results.spaces, space)
    if results.composition is not None and results.composition["z_paired"].notna().any():
        found["composition"] = figures.composition_graph(results.composition)
    if results.account is not None:
        found["attribution-map"] = figures.attribution_map(results.account)
        found["waterfall-kind"] = figures.waterfall(results.account, "kind")
        found["waterfall-layer"] = figures.waterfall(results.account, "layer")
    if results.sweep is not None:
        found["ablation"] = figures.effects(results.sweep)
    if results.attribution is not None:
        found["prompt-set"] = figures.means(results.attribution)
    if results.generation is not None:
        found["continuation"] = figures.continuation(results.generation.heads())
    if results.scan is not None:
        found["scan-loss"] = figures.head_map(results.scan.heads, "loss_saved")
    label = _outstanding(results)
    if label is not None:
        head = model.head(label)
        found[f"head-{label}-spectrum"] = figures.spectrum(spectrum(head, seed=results.seed))
        found[f"head-{label}-eigenvalues-ov"] = figures.eigenvalues(head.ov.eigenvalues, f"OV, head {label}")
        if model.has_embeddings:
            full = head.full_ov.eigenvalues
            found[f"head-{label}-eigenvalues-full"] = figures.eigenvalues(full, f"the full OV circuit, head {label}")
            found[f"head-{label}-direction"] = figures.singular_directions(head.reads(8))
        if results.trace is not None:
            pattern = results.trace.pattern(label)
            name = f"attention of head {label}"
            found[f"head-{label}-attention"] = figures.attention_pattern(pattern, results.trace.texts, name)
        if results.scan is not None:
            found[f"head-{label}-distances"] = figures.distances(results.scan.distributions, label)
    return found


def _outstanding(results: Results) -> str | None:
    """The head that moves the answer most, or without a prompt the one with the most one-sided eigenvalues."""
    board = results.board.set_index("head")
    broken = results.board.attrs["not_finite"]
    if results.account is not None:
        heads = results.account[results.account["component"] == "head"]
        size = heads.groupby("head", sort=False)["value"].sum().abs()
    else:
        key = next((key for key in ("eigen_copying_full", "eigen_copying_ov") if key in board), None)
        if key is None:
            return None
        size = board[key].abs()
    size = size.drop(index=[label for label in broken if label in size.index]).dropna()
    return None if size.empty else str(size.idxmax())


def _manifest(results: Results, folder: Path, left_out: str | None) -> dict[str, Any]:
    model, trace = results.model, results.trace
    checkpoint = model.source.checkpoint
    files = sorted(file for file in checkpoint.files() if file.is_file())
    attrs = {} if results.account is None else results.account.attrs
    return {
        "format": 1,
        "model": model.name,
        "view": model.view,
        "checkpoint": {file.name: _sha256(file) for file in files},
        "versions": {
            "ov_circuits": ov_circuits.__version__,
            "python": platform.python_version(),
            **{name: found for name in _PACKAGES if (found := _version(name))},
        },
        "threads": torch.get_num_threads(),
        "seeds": {"nulls": results.seed, "probes": results.board.attrs.get("probes", {}).get("seeds", [])},
        "draws": DRAWS,
        "scores": [key for key in results.board.columns if key in results.board.attrs["sources"]],
        "source_embedding": results.board.attrs["source_embedding"],
        "heads_with_pairs": list(results.pairs),
        "prompt": None
        if trace is None
        else {
            "ids": list(trace.tokens),
            "bos_added": trace.bos_added,
            "quantity": attrs["quantity"],
            "answer": attrs["answer"],
            "against": attrs["against"],
            "position": attrs["position"],
        },
        "certificate": results.certificate.summary,
        "left_out": {} if left_out is None else {"figures": left_out},
        "files": {
            file.relative_to(folder).as_posix(): _sha256(file) for file in sorted(folder.rglob("*")) if file.is_file()
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()

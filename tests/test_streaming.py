"""Embeddings met in blocks, layers read in parts: the same numbers, and never the whole in memory."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assert_same_table

import ov_circuits as ov
from ov_circuits import source as source_module
from ov_circuits.checkpoint.stores import SafetensorsStore, TensorStore
from ov_circuits.linalg import rows as rows_module
from ov_circuits.linalg.lowrank import gram
from ov_circuits.linalg.rows import Rows
from ov_circuits.scores import pieces as pieces_module


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every embedding counts as too large to be kept, and blocks are a few rows."""
    monkeypatch.setattr(source_module, "HELD_EMBEDDING_BYTES", 0)
    blocks_of(monkeypatch, 2000, 1)


def blocks_of(monkeypatch: pytest.MonkeyPatch, size: int, rows: int) -> None:
    """Blocks of so many bytes, and at least so many rows."""
    monkeypatch.setattr(rows_module, "_BLOCK_BYTES", size)
    monkeypatch.setattr(rows_module, "_LEAST_ROWS", rows)


@pytest.mark.parametrize(("size", "least"), [(4 * 5 * 3, 1), (1, 3)])
def test_rows_are_the_matrix_they_stand_for(monkeypatch: pytest.MonkeyPatch, size: int, least: int) -> None:
    blocks_of(monkeypatch, size, least)  # three rows either way
    M = torch.randn(11, 5, generator=torch.Generator().manual_seed(0))
    read: list[slice] = []

    def reader(rows: slice) -> torch.Tensor:
        read.append(rows)
        return M[rows]

    rows = Rows((11, 5), reader)
    assert rows.shape == M.shape and len(rows) == 11 and rows.mT.shape == M.mT.shape
    for small in (torch.randn(5), torch.randn(5, 2), torch.randn(3, 5, 2), torch.randn(3, 5, 2, dtype=torch.float64)):
        assert torch.allclose(rows @ small, M.to(small) @ small, atol=1e-6)
        assert (rows @ small).dtype == small.dtype
    for small in (torch.randn(5), torch.randn(2, 5), torch.randn(3, 2, 5).double()):
        assert torch.allclose(small @ rows.mT, small @ M.to(small).mT, atol=1e-6)
    assert max(part.stop - part.start for part in read) == 3, "more than a block was read"
    read.clear()
    assert (
        torch.equal(rows[[7, 0, 7]], M[[7, 0, 7]]) and torch.equal(rows[-1], M[-1]) and torch.equal(rows[2:4], M[2:4])
    )
    assert sum(part.stop - part.start for part in read) == 6, "more rows were read than asked for"
    assert torch.equal(rows[torch.tensor([], dtype=torch.long)], M[:0])
    with pytest.raises(IndexError):
        rows[11]
    doubled = rows.map(lambda block: 2 * block).part(3, 9)
    assert torch.equal(doubled.tensor(), 2 * M[3:9]) and torch.equal(
        torch.cat([b for _, b in doubled.blocks()]), 2 * M[3:9]
    )
    assert torch.equal(doubled[1], 2 * M[4])
    assert torch.allclose(gram(rows), M.double().mT @ M.double())
    assert torch.allclose(gram(rows.part(3, 9), doubled), 2 * M[3:9].double().mT @ M[3:9].double())


def test_scores_of_streamed_embeddings(running_folder: Path, request: pytest.FixtureRequest) -> None:
    kept = ov.scoreboard(ov.load(running_folder), "all")
    request.getfixturevalue("streamed")
    model = ov.load(running_folder)
    assert_same_table(ov.scoreboard(model, "all"), kept, tolerance=2e-6)
    assert not model.source._held


def test_no_embedding_is_read_whole(
    write_tiny: Callable[..., Path], streamed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ov.load(write_tiny("llama", vocab_size=3000, num_key_value_heads=2))
    names = {f"{model.source.family.embed}.weight", f"{model.source.family.unembed}.weight"}
    largest = [0]
    read = TensorStore.read

    def watched(self: TensorStore, name: str, part: tuple[slice, ...] = ()) -> torch.Tensor:
        tensor = read(self, name, part)
        if name in names:
            largest[0] = max(largest[0], tensor.shape[0])
        return tensor

    monkeypatch.setattr(TensorStore, "read", watched)
    ov.scoreboard(model, "all")
    ov.copy_table(model)
    model.head("1.0").reads()
    model.head("1.0").writes(5)
    ov.span(model.head("1.0"), [0, 1])
    assert 0 < largest[0] <= 1024 < model.architecture.n_vocab


def test_gram_matrices_of_a_share_of_the_vocabulary_add_up(any_folder: Path, reference: Any, assert_close: Any) -> None:
    model = ov.load(any_folder)
    if not model.has_embeddings:
        pytest.skip("attention alone")
    source, n, right = model.source, model.architecture.n_vocab, reference(any_folder)
    parts = [source.gram_part(start, stop) for start, stop in ((0, n // 3), (n // 3, n // 2), (n // 2, n))]
    for name, dense in (
        ("read", right.W_E.T @ right.W_E),
        ("write", right.W_U @ right.W_U.T),
        ("cross", right.W_U @ right.W_E),
    ):
        assert_close(sum(getattr(part, name) for part in parts), dense, 1e-12)


def _ranges(model: ov.Model) -> Iterator[range]:
    a = model.architecture
    for groups in range(1, a.n_kv_heads + 1):
        for start in range(a.n_kv_heads - groups + 1):
            yield range(start * a.group_size, (start + groups) * a.group_size)
    for head in range(a.n_heads):  # part of a group
        yield range(head, head + 1)


def test_a_part_of_a_layer_is_that_part(any_folder: Path) -> None:
    for view in ("raw", None):
        model = ov.load(any_folder, view=view)
        a = model.architecture
        layer = model.layer(a.n_layers - 1)
        for heads in _ranges(model):
            part = model.layer_part(a.n_layers - 1, heads)
            kv = range(heads.start // a.group_size, (heads.stop - 1) // a.group_size + 1)
            for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V"):
                whole, found = getattr(layer, name), getattr(part, name)
                chosen = heads if name[-1] in "QO" else kv
                if whole is None:
                    assert found is None
                else:
                    assert torch.allclose(found, whole[chosen.start : chosen.stop], rtol=1e-6, atol=1e-7), (name, heads)
    if a.group_size > 1:
        with pytest.raises(ValueError, match="neither whole groups"):
            model.layer_part(0, range(1, a.group_size + 1))


def test_only_the_part_is_read(tiny_folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model = ov.load(tiny_folders("llama-grouped"))
    a = model.architecture
    numbers: dict[str, int] = {}
    read = SafetensorsStore._read_part

    def counted(self: SafetensorsStore, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        tensor = read(self, name, part)
        numbers[name.split(".")[-2]] = tensor.numel()
        return tensor

    monkeypatch.setattr(SafetensorsStore, "_read_part", counted)
    model.layer_part(0, range(2, 4))
    one = a.d_model * a.d_head
    assert {n: numbers[f"{n}_proj"] for n in "qkvo"} == {"q": 2 * one, "k": one, "v": one, "o": 2 * one}


@pytest.mark.parametrize("name", ["llama-grouped", "llama-wide-heads", "gpt2-untied"])
def test_heads_taken_a_group_at_a_time(
    tiny_folders: Callable[[str], Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = ov.scoreboard(ov.load(tiny_folders(name)), "all")
    monkeypatch.setattr(pieces_module, "_CHUNK_BYTES", 1)
    a = ov.load(tiny_folders(name)).architecture
    assert [len(heads) for heads in pieces_module.chunks(a, range(a.n_heads))] == [a.group_size] * a.n_kv_heads
    # Biases are folded in float64 and rounded to float32: the last digit depends on how their sums are laid out.
    assert_same_table(ov.scoreboard(ov.load(tiny_folders(name)), "all"), together, tolerance=1e-6)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_file_is_mapped_no_longer_than_its_tensor_lives(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    file = tmp_path / "model.safetensors"
    save_file({"w": torch.randn(64, 8).bfloat16()}, file)
    store = SafetensorsStore([file])
    maps = Path("/proc/self/maps")
    opened = maps.read_text().count(str(file))  # the headers' own, of which nothing else is read
    assert store.read("w").shape == (64, 8) and store.read("w", (slice(3, 5), slice(1, 2))).shape == (2, 1)
    assert maps.read_text().count(str(file)) == opened


def test_nothing_of_a_finished_layer_waits_for_the_collector_of_cycles(tiny_folders: Callable[[str], Path]) -> None:
    model = ov.load(tiny_folders("gpt2-tied"))
    gc.collect()
    before = _layers_alive()
    gc.disable()
    try:
        ov.scoreboard(model, "all")
        assert _layers_alive() == before
        for _ in range(3):
            for view in ("raw", "folded", "centred"):
                for index in range(model.n_layers):
                    _ = model.in_view(view).layer(index).finite_part.ov.singular_values
        assert _layers_alive() - before <= 3
    finally:
        gc.enable()


def _layers_alive() -> int:
    return sum(type(thing) is ov.Layer for thing in gc.get_objects())


PEAK = """
import json, sys, torch
torch.set_num_threads(1)
import ov_circuits as ov
from ov_circuits.scores.board import Board
def peak():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
before = peak()
Board(ov.load(sys.argv[1])).computed()
print(json.dumps([before, peak()]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_memory_does_not_grow_with_layers(tmp_path: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
    from big_models import config, write

    peaks = {}
    for layers in (4, 16):
        folder = tmp_path / str(layers)
        folder.mkdir()
        write(folder, config("8B", layers) | dict(hidden_size=1024, num_attention_heads=16, vocab_size=2000))
        # One arena, and blocks go back to the system at once: what the allocator keeps for later is not what is asked about.
        malloc = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "100000", "MALLOC_TRIM_THRESHOLD_": "100000"}
        environment = os.environ | malloc | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
        command = [sys.executable, "-c", PEAK, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        before, after = json.loads(done.stdout)
        peaks[layers] = after - before
    layer = 4 * 2 * (1024 * 1024 + 1024 * 8 * 64)
    # Twelve more layers: half of what they take in the file. Allocators move it by less.
    assert peaks[16] - peaks[4] < 12 * (layer / 2) / 2, peaks

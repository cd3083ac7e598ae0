"""The plan counts what the scores do: its products against torch's own count of them, its memory against what is held."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import ov_circuits as ov
from ov_circuits import source as source_module
from ov_circuits.cli import app
from ov_circuits.linalg import products
from ov_circuits.scores.board import SCORES, Board
from ov_circuits.scores.pieces import Piece, chunk_bytes, chunks, layer_bytes, most_side_by_side, piece_bytes, pieces
from ov_circuits.scores.plan import Plan, machine_rate

CONFIG = dict(
    model_type="llama",
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    tie_word_embeddings=False,
)


def test_every_score_of_the_board_has_a_plan() -> None:
    assert Plan(ov.load().architecture, "folded").scores == list(SCORES)


@contextmanager
def _all_by_torch() -> Iterator[None]:
    """No products by numpy and oneDNN: nobody counts those."""
    with pytest.MonkeyPatch.context() as patch:
        for library in ("numpy", "onednn"):
            patch.setattr(products, f"_for_{library}", lambda *factors: False)
        yield


def _counted(work: Callable[[], object]) -> float:
    counter = FlopCounterMode(display=False)
    with _all_by_torch(), counter:
        work()
    return float(counter.get_total_flops())


@pytest.mark.parametrize("tied", [True, False])
def test_products_of_the_gram_matrices(write_tiny: Callable[..., Path], tied: bool) -> None:
    folder = write_tiny("llama", hidden_size=64, head_dim=16, vocab_size=500, tie_word_embeddings=tied)
    model = ov.load(folder)
    counted = _counted(lambda: model.source.raw_grams)
    assert counted == pytest.approx(Plan(model.architecture, model.view).once["grams"].products, rel=1e-6)


@pytest.mark.parametrize(
    "score", [None, "eigen_copying_full", "full_ov_spectral_norm", "qk_stable_rank", "ov_stable_rank"]
)
def test_products_of_a_layer(write_tiny: Callable[..., Path], score: str | None) -> None:
    """Heads of a size at which what the plan leaves out (a few products with vectors) is small."""
    folder = write_tiny(
        "llama", hidden_size=256, head_dim=32, num_attention_heads=4, num_key_value_heads=2, vocab_size=400
    )
    model = ov.load(folder)
    board = Board(model, None if score is None else [score], tokens=5 if score is None else 0)
    _ = board.most_side_by_side  # what is made once
    counted = _counted(lambda: board.rows(Piece(0, range(4))))
    plan = Plan(model.architecture, model.view)
    steps = plan.per_head
    planned = sum(steps[step].products for step in plan.asked(score) if step in steps) * 4
    if score is None:  # its products are float32, which count half
        planned += steps["token ends"].products * 4
    assert counted == pytest.approx(planned, rel=0.03)


def test_what_several_scores_need_is_counted_once() -> None:
    plan = Plan(ov.load().architecture, "folded")
    once, per_head = plan.work()
    alone = [plan.work(score) for score in plan.scores]
    assert max(work.total for work, _ in alone) <= once.total <= sum(work.total for work, _ in alone)
    assert max(work.total for _, work in alone) < per_head.total < sum(work.total for _, work in alone)


def test_time_is_linear_in_layers_and_shared_by_ranks() -> None:
    a = ov.load().architecture
    plans = [Plan(replace(a, n_layers=layers), "folded") for layers in (8, 16, 24)]
    first, second, third = (plan.seconds(1e9) for plan in plans)
    assert third - second == pytest.approx(second - first) and second > first
    alone = plans[0].seconds(1e9)
    assert alone / 8 <= plans[0].seconds(1e9, ranks=8) < alone / 2
    # Three ranks on two cores are no faster than two, whatever they share.
    assert plans[0].seconds(1e9, ranks=3, cores=2) >= plans[0].seconds(1e9, ranks=2, cores=2)


def test_memory_does_not_grow_with_layers_and_names_what_is_held(stories260k: Path) -> None:
    a = ov.load(stories260k).architecture
    assert Plan(a, "folded").bytes(2) == Plan(replace(a, n_layers=1000), "folded").bytes(2)
    for view in ("raw", "folded"):
        model = ov.load(stories260k, view=view)
        board = Board(model)
        _ = board.most_side_by_side
        grams, raw = model.grams, model.source.raw_grams
        matrices = [grams.read, grams.write, grams.cross, grams.read_half, grams.write_half]
        matrices += [raw.read, raw.write, raw.cross, *model.source._held.values()]
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in matrices}
        tensor_bytes = sum(held.values())
        assert Plan(model.architecture, view).bytes(1)["held"] == pytest.approx(tensor_bytes, rel=0.01), view


# Groups of several heads, one for all, a head each; heads narrow and wide beside the model.
@pytest.mark.parametrize(("d", "heads", "kv"), [(512, 8, 2), (512, 16, 4), (512, 8, 8), (512, 4, 1), (256, 4, 2)])
def test_a_piece_takes_the_tensors_that_torch_allocates(
    write_tiny: Callable[..., Path], d: int, heads: int, kv: int
) -> None:
    folder = write_tiny("llama", hidden_size=d, num_attention_heads=heads, num_key_value_heads=kv, vocab_size=2000)
    file = folder / "model.safetensors"
    plain = {name: torch.ones_like(t) if t.ndim == 1 else t for name, t in load_file(file).items()}
    save_file(
        plain, file
    )  # gains that differ would make heads so ill conditioned that roots of Gram matrices are needed
    model = ov.load(folder)
    board, piece = Board(model), pieces(model.architecture)[0]
    _ = board.most_side_by_side  # what is made once
    board.rows(piece)
    with _all_by_torch(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        board.rows(piece)
    found = profiled.profiler.kineto_results.events()
    sizes = [e.nbytes() for e in sorted(found, key=lambda e: e.start_ns()) if e.name() == "[memory]"]
    mapped = file.stat().st_size  # the whole file counts as allocated while a tensor of it is read
    held = accumulate(size for size in sizes if abs(size) != mapped)
    assert max(held) == pytest.approx(chunk_bytes(model.architecture), rel=0.12)


def test_pieces_fit_into_three_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    from ov_circuits.checkpoint.families import family_of

    for d, heads in ((4096, 32), (8192, 64), (16384, 128)):
        config = CONFIG | dict(hidden_size=d, num_attention_heads=heads)
        a = family_of(config, "config.json").architecture(config)
        assert layer_bytes(a) == 4 * 2 * (d * d + d * 8 * 128)
        one = piece_bytes(a, True, False)
        assert most_side_by_side(a, one) * one <= max(3 * layer_bytes(a), 512 * 2**20)
        assert most_side_by_side(a, one) >= 2
        assert [h for piece in pieces(a)[:1] for part in chunks(a, piece.heads) for h in part] == list(range(heads))
        assert 4 * a.n_vocab * a.d_model > source_module.HELD_EMBEDDING_BYTES


def test_inspect_plan_takes_a_config_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    arguments = ["inspect", str(tmp_path / "config.json"), "--plan", "--gflops", "50"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)["plan"]
    assert plan["heads"] == 1024 and set(plan["scores"]) == set(SCORES)
    # By hand: 2 (9/16 + 9/16 + 1) n d^2 for the Gram matrices.
    assert plan["scores"]["eigen_copying_full"]["once"] > 4.25 * 128256 * 4096**2
    assert plan["memory"]["peak"] < 4e9
    total = plan["all_spectra_together"]
    assert total["cpu_seconds"] == pytest.approx(total["operations"] / 50e9)
    text = CliRunner().invoke(app, arguments)
    assert text.exit_code == 0 and "Memory above the imports: 1." in text.stdout
    assert CliRunner().invoke(app, ["inspect", str(tmp_path), "--plan", "--gflops", "0"]).exit_code == 2


def test_attention_alone_is_planned_without_embeddings(gpt2_small_attention: Path) -> None:
    done = CliRunner().invoke(app, ["inspect", str(gpt2_small_attention), "--plan", "--gflops", "50", "--json"])
    plan = json.loads(done.stdout)["plan"]
    assert "eigen_copying_full" not in plan["scores"] and not plan["over_vocabulary"]
    assert plan["all_spectra_together"]["once"] == 0


def test_the_probe_measures_this_machine() -> None:
    threads = torch.get_num_threads()
    assert 1e8 < machine_rate() < 1e13
    assert torch.get_num_threads() == threads

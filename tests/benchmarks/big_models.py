"""Models larger than the machine: time and memory of the scoreboard at the true shapes of Llama 3, against its plan.

    python tests/benchmarks/big_models.py [--shape 8B|70B|405B] [--layers N] [--threads 2] [--folder /tmp]

Writes a checkpoint of bfloat16 shards with random attention, norms and embeddings (no MLPs) of the first N layers, scores every
head's spectra in a process of its own, and takes the checkpoint away again. The plan's prediction for these layers, and for all
of them, stands beside what was measured: processor time, because other work on the machine hardly moves it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import in_process, peak_megabytes

SHAPES: dict[str, dict[str, int]] = {
    "8B": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32),
    "70B": dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64),
    "405B": dict(hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128),
}


def config(shape: str, layers: int | None = None) -> dict[str, Any]:
    """A config.json of Llama 3's shape."""
    given = SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers})
    return given | dict(
        model_type="llama",
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        tie_word_embeddings=False,
    )


def write(folder: Path, settings: dict[str, Any]) -> None:
    """Shards of one layer each, and one for each embedding, so that writing takes little memory."""
    import torch
    from safetensors.torch import save_file

    d, n_vocab, layers = settings["hidden_size"], settings["vocab_size"], settings["num_hidden_layers"]
    kv = d // settings["num_attention_heads"] * settings["num_key_value_heads"]
    (folder / "config.json").write_text(json.dumps(settings))
    generator = torch.Generator().manual_seed(0)
    where: dict[str, str] = {}

    def shard(name: str, shapes: dict[str, tuple[int, ...]]) -> None:
        tensors = {
            key: torch.empty(shape, dtype=torch.bfloat16).normal_(generator=generator)
            * (0.02 if len(shape) > 1 else 1.0)
            for key, shape in shapes.items()
        }
        save_file(tensors, folder / name)
        where.update(dict.fromkeys(tensors, name))

    for i in range(layers):
        attention = {"q_proj": (d, d), "k_proj": (kv, d), "v_proj": (kv, d), "o_proj": (d, d)}
        shapes: dict[str, tuple[int, ...]] = {
            f"model.layers.{i}.self_attn.{name}.weight": size for name, size in attention.items()
        }
        shard(f"layer-{i}.safetensors", shapes | {f"model.layers.{i}.input_layernorm.weight": (d,)})
    shard("embedding.safetensors", {"model.embed_tokens.weight": (n_vocab, d), "model.norm.weight": (d,)})
    shard("unembedding.safetensors", {"lm_head.weight": (n_vocab, d)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def step(folder: Path, threads: int) -> None:
    """Child process: the scoreboard, with its time and memory."""
    import torch

    import ov_circuits as ov
    from ov_circuits.scores.board import Board
    from ov_circuits.scores.pieces import pieces

    torch.set_num_threads(threads)
    torch.randn(64, 64) @ torch.randn(64, 64)
    base, start, cpu = peak_megabytes(), time.perf_counter(), time.process_time()
    model = ov.load(folder)
    board = Board(model)
    _ = board.most_side_by_side  # what all pieces share
    shared, shared_cpu, peak = time.perf_counter() - start, time.process_time() - cpu, peak_megabytes()
    frame = ov.scoreboard(model)
    assert len(frame) == len(model.head_labels) and frame[["eigen_copying_full_z", "qk_stable_rank_z"]].notna().all(
        axis=None
    )
    found = {
        "heads": len(frame),
        "layers": len(pieces(model.architecture)),
        "seconds": time.perf_counter() - start,
        "cpu": time.process_time() - cpu,
        "shared_seconds": shared,
        "shared_cpu": shared_cpu,
        "imports_megabytes": base,
        "shared_megabytes": peak,
        "megabytes": peak_megabytes(),
    }
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="8B")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--step")
    options = parser.parse_args()
    if options.step:
        step(Path(options.step), options.threads)
        return
    settings = config(options.shape, options.layers)
    folder = Path(tempfile.mkdtemp(prefix="big-model-", dir=options.folder))
    try:
        write(folder, settings)
        found = in_process(__file__, str(folder), "--threads", str(options.threads))
    finally:
        shutil.rmtree(folder)
    print(json.dumps(found), flush=True)
    compare(options.shape, settings, found, options.threads)


def compare(shape: str, measured: dict[str, Any], found: dict[str, Any], threads: int) -> None:
    """What was measured and its extrapolation to all layers, beside the plan's prediction of both.

    The measured memory includes what the C library's allocator keeps for later, which the plan does not know.
    """
    from ov_circuits.checkpoint.families import family_of
    from ov_circuits.scores.plan import Plan, machine_rate

    rate = machine_rate()
    plans = [
        Plan(family_of(c, "config.json").architecture(c), "folded", tokens=True) for c in (measured, config(shape))
    ]
    layer = (found["cpu"] - found["shared_cpu"]) / found["layers"]
    extrapolated = found["shared_cpu"] + layer * plans[1].architecture.n_layers
    print(f"{shape}: {found['heads']} heads of {found['layers']} layers, {rate / 1e9:.0f} GFLOP/s a core")
    print("                         measured   planned")
    for name, ours, planned in (
        ("cpu seconds, once", found["shared_cpu"], plans[0].work()[0].total / rate),
        ("cpu seconds a head", layer / plans[0].architecture.n_heads, plans[0].work()[1].total / rate),
        ("cpu seconds, these", found["cpu"], plans[0].seconds(rate)),
        ("cpu seconds, all layers", extrapolated, plans[1].seconds(rate)),
        (
            "GB above the imports",
            (found["megabytes"] - found["imports_megabytes"]) / 1e3,
            plans[0].bytes(threads)["peak"] / 1e9,
        ),
    ):
        print(f"{name:24} {ours:9.3g} {planned:9.3g}")


if __name__ == "__main__":
    main()

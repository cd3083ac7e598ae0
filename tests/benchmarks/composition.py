"""All Q-, K- and V-composition scores: against TransformerLens, against one matmul of the same work, and in memory.

    python tests/benchmarks/composition.py [--threads 1]

Both sides run in one process on GPT-2 small's real attention weights; the GPT-2 medium shape has processes of its own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from harness import MODELS, Timed, in_process, interleaved, peak_megabytes, ratio, table, timed

MEDIUM = {"n_layer": 24, "n_head": 16, "n_embd": 1024}


def bridge(folder: Path) -> Any:
    """GPT-2 small's attention in a TransformerLens bridge; vocabulary and MLPs, which no score touches, are small."""
    import torch
    from safetensors.torch import load_file
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_inner=8, bos_token_id=0, eos_token_id=0)).eval()
    state = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if "mlp" not in name}
    model.load_state_dict(state, strict=False)
    return TransformerBridge.boot_transformers(str(folder), device="cpu", dtype=torch.float32, hf_model=model)


def small(threads: int) -> list[tuple[str, str, str, str, str]]:
    import torch

    import ov_circuits as ov
    from ov_circuits.scores.composition import KINDS, compositions

    torch.set_num_threads(threads)
    rival = bridge(MODELS / "gpt2-small-attention")
    n = 144
    # The work of the straightforward way: of each kind, the r x r tile of every pair, as one product of stacked factors;
    # half of it, since only later heads receive.
    writes, reads = torch.randn(n * 64 // 2, 768), torch.randn(768, n * 64)
    flops_tiles = 3 * 2 * (n * 64 // 2) * 768 * n * 64
    # Our own: [d_model, d_model] Gram matrices of 11 layers' senders and three kinds of receivers, half of each as they are
    # symmetric; the inner products of all pairs; small Gram matrices and factors.
    pairs = 3 * 66 * 12**2
    flops_ours = 4 * 132 * 64 * 768**2 + pairs * 768**2 + 4 * n * 4 * 64**2 * 768
    side = round((flops_ours / 2) ** (1 / 3))
    square = torch.randn(side, side)
    with torch.no_grad():
        runs = interleaved(
            {
                "ours": lambda: compositions(ov.load(rival, view="raw")),
                **{kind: lambda kind=kind: rival.all_composition_scores(kind) for kind in KINDS},
                "tiles": lambda: [writes @ reads for _ in KINDS],
                "square": lambda: square @ square,
            },
            3,
        )
    ours, one, same = runs["ours"], runs["tiles"], runs["square"]
    worst = 0.0
    for kind in KINDS:
        matrix = ours.result[kind].matrix
        later = matrix.isfinite()
        reference = runs[kind].result.scores.reshape(n, n).double()[later]
        worst = max(worst, float((matrix[later] / reference - 1).abs().max()))
    assert worst < 1e-4, worst
    total = Timed(sum(runs[kind].seconds for kind in KINDS), sum(runs[kind].cpu for kind in KINDS), None)
    return [
        (
            f"GPT-2 small, 144 heads, Q + K + V, weights in memory; equal to {worst:.0e}",
            f"all_composition_scores {total}",
            str(ours),
            ratio(total, ours),
            ">= 50x",
        ),
        (
            f"composition: one matmul of the tiles' work ({flops_tiles / 1e9:.0f} GFLOP)",
            str(one),
            str(ours),
            f"{ours.seconds / one.seconds:.2f} of its time ({ours.cpu / one.cpu:.2f} cpu)",
            "<= 2",
        ),
        (
            f"composition: one square matmul of our own work ({flops_ours / 1e9:.0f} GFLOP)",
            str(same),
            str(ours),
            f"{ours.seconds / same.seconds:.2f} of its time ({ours.cpu / same.cpu:.2f} cpu)",
            "",
        ),
    ]


def write_medium(folder: Path) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=50, n_inner=8, bos_token_id=0, eos_token_id=0, **MEDIUM)).save_pretrained(
        folder
    )


def medium(folder: str, threads: int) -> None:
    """Child process: peak memory of imports alone, then of everything."""
    import torch

    import ov_circuits as ov
    from ov_circuits.scores.composition import compositions

    torch.set_num_threads(threads)
    torch.randn(64, 64) @ torch.randn(64, 64)
    imports = peak_megabytes()
    run = timed(lambda: compositions(ov.load(folder)))
    file = (Path(folder) / "model.safetensors").stat().st_size / (1 << 20)
    print(json.dumps({"seconds": run.seconds, "imports": imports, "peak": peak_megabytes(), "file": file}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--step")
    parser.add_argument("--folder", default="")
    options = parser.parse_args()
    if options.step == "medium":
        medium(options.folder, options.threads)
        return
    rows = small(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        write_medium(Path(folder))
        seen = in_process(__file__, "medium", "--folder", folder, "--threads", str(options.threads))
    rows.append(
        (
            f"GPT-2 medium shape, 384 heads, Q + K + V ({seen['seconds']:.1f} s)",
            "asks 38 GB",
            f"{seen['peak'] - seen['imports']:.0f} MB above the imports, of which {seen['file']:.0f} MB the mapped checkpoint",
            f"1/{38000 / (seen['peak'] - seen['imports']):.0f}",
            "< 1 GB",
        )
    )
    table(f"Composition, {options.threads} thread(s)", rows)


if __name__ == "__main__":
    main()

"""Eigenvalue copying scores and singular values of every head of SmolLM2-135M: against TransformerLens, time and memory.

    OV_CIRCUITS_SMOLLM2=folder python tests/benchmarks/spectra.py [--threads 1]

Times are taken in one process, both sides from the same weights in memory (but for eigenvalue copying, where our side reads
the file); memory, above the imports, in one process for each side.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from harness import SMOLLM2, in_process, interleaved, peak_megabytes, ratio, table, timed


def rival_model() -> Any:
    import torch
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32).eval()
    return TransformerBridge.boot_transformers(SMOLLM2, device="cpu", dtype=torch.float32, hf_model=model)


def rival_circuits(bridge: Any) -> Any:
    """All heads' OV as a FactoredMatrix, value heads repeated for their groups."""
    from transformer_lens import FactoredMatrix

    group = bridge.W_O.shape[1] // bridge.W_V.shape[1]
    return FactoredMatrix(bridge.W_V.repeat_interleave(group, dim=1), bridge.W_O)


def rival_copying(bridge: Any) -> Any:
    import torch

    with torch.no_grad():
        ov = rival_circuits(bridge)
        scores = []
        for circuit in (ov, bridge.W_E @ ov @ bridge.W_U):
            values = circuit.eigenvalues
            scores.append((values.sum(-1).real / values.abs().sum(-1)).flatten())
    return torch.stack(scores)


def rival_singular(bridge: Any) -> Any:
    import torch

    with torch.no_grad():
        return rival_circuits(bridge).svd()[1].flatten(0, 1)


def our_copying() -> Any:
    import torch

    import ov_circuits as ov
    from ov_circuits.scores.spectra import eigenvalue_copying

    model = ov.load(SMOLLM2, view="raw")
    layers = range(model.n_layers)
    return torch.stack(
        [
            torch.cat([eigenvalue_copying(of(index).eigenvalues) for index in layers])
            for of in (lambda index: model.layer(index).ov, model.full_ov)
        ]
    )


def our_singular(bridge: Any, full: bool) -> Any:
    import torch

    import ov_circuits as ov
    from ov_circuits.linalg.threads import side_by_side

    model = ov.load(bridge, view="raw")
    if full:
        _ = model.grams, model.W_E, model.W_U  # shared by all layers: made before they run side by side
    of = model.full_ov if full else lambda index: model.layer(index).ov
    return torch.cat(list(side_by_side(lambda index: of(index).singular_values, range(model.n_layers))))


def check_full(bridge: Any, found: Any) -> float:
    """Every 37th head against QRs of W_E W_V and (W_O W_U)^T in float64, relative to the head's largest value."""
    import torch

    worst, n = 0.0, bridge.W_O.shape[1]
    group = n // bridge.W_V.shape[1]
    for head in range(0, len(found), 37):
        layer, index = divmod(head, n)
        left = bridge.W_E.detach().double() @ bridge.W_V[layer, index // group].detach().double()
        right = (bridge.W_O[layer, index].detach().double() @ bridge.W_U.detach().double()).mT
        R, S = (torch.linalg.qr(factor, mode="r").R for factor in (left, right))
        values = torch.linalg.svdvals(R @ S.mT)
        worst = max(worst, float((found[head] - values).abs().max() / values[0]))
    return worst


def step(name: str) -> None:
    """Child process: peak memory above the imports of one side."""
    import torch

    if name == "ours":
        import pandas  # noqa: F401

        import ov_circuits.scores.board  # noqa: F401

        torch.randn(64, 64) @ torch.randn(64, 64)
        base = peak_megabytes()
        our_copying()
    else:
        import transformers.models.llama.modeling_llama  # noqa: F401
        from transformer_lens.model_bridge import TransformerBridge  # noqa: F401

        torch.randn(64, 64) @ torch.randn(64, 64)
        base = peak_megabytes()
        rival_copying(rival_model())
    print(json.dumps({"megabytes": peak_megabytes() - base}))


def main() -> None:
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--step")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if not SMOLLM2:
        raise SystemExit("set OV_CIRCUITS_SMOLLM2 to a folder with SmolLM2-135M (see the README)")
    if options.step:
        step(options.step)
        return
    threads = ("--threads", str(options.threads))
    memory = {side: in_process(__file__, side, *threads)["megabytes"] for side in ("ours", "rival")}
    bridge = rival_model()
    theirs, ours = timed(lambda: rival_copying(bridge)), timed(our_copying, 3)
    error = float((theirs.result - ours.result).abs().max())
    assert error < 1e-3, error
    runs = interleaved(
        {
            "rival": lambda: rival_singular(bridge),
            "ours": lambda: our_singular(bridge, full=False),
            "full": lambda: our_singular(bridge, full=True),
        },
        3,
    )
    singular_theirs, singular_ours, full = runs["rival"], runs["ours"], runs["full"]
    top = singular_ours.result[:, :1]
    singular_error = float(((singular_theirs.result - singular_ours.result) / top).abs().max())
    assert singular_error < 1e-4, singular_error
    full_error = check_full(bridge, full.result)
    assert full_error < 1e-6, full_error
    rows = [
        (
            f"both eigenvalue copying scores, 270 heads, weights read; equal to {error:.0e}",
            str(theirs),
            str(ours),
            ratio(theirs, ours),
            ">= 20x",
        ),
        (
            "their memory above the imports",
            f"{memory['rival']:.0f} MB",
            f"{memory['ours']:.0f} MB",
            f"1/{memory['rival'] / memory['ours']:.0f}",
            "<= 1/20",
        ),
        (
            f"singular values of OV, 270 heads; equal to {singular_error:.0e}",
            str(singular_theirs),
            str(singular_ours),
            ratio(singular_theirs, singular_ours),
            ">= 5x",
        ),
        (
            f"singular values of full OV; eight heads equal to {full_error:.0e}",
            "cannot hold it",
            str(full),
            ratio(singular_theirs, full),
            "as OV",
        ),
    ]
    table(f"Spectra, SmolLM2-135M, {options.threads} thread(s)", rows)


if __name__ == "__main__":
    main()

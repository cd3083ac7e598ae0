"""A corpus through SmolLM2-135M: processor time a token, what 200,000 tokens come to, and memory above the loaded model.

    OV_CIRCUITS_SMOLLM2=folder python tests/benchmarks/scan.py

There is no rival to compare with: the target is 200,000 tokens in 30 minutes on two cores. Scans of two lengths and with two
samples of exact losses tell what a token and what a sampled position cost; processor time is counted on one thread, since the
clock also counts what others do on the machine. The plain forward pass over the same windows stands beside it.
"""

from __future__ import annotations

import json
import sys

from harness import SMOLLM2, in_process, peak_megabytes, table, timed

TOKENS, SHORT, LONG, LOSSES = 200_000, 1020, 3060, 66


def measure() -> dict[str, float]:
    import torch

    torch.set_num_threads(1)

    import ov_circuits as ov
    from ov_circuits.trace.corpus import open_corpus
    from ov_circuits.trace.engines import network_of, pad, run
    from ov_circuits.trace.scan import Settings

    model = ov.load(SMOLLM2)
    network_of(model)
    windows = list(open_corpus(model, tokens=SHORT))
    run(model, pad([window.ids for window in windows[:2]]))
    loaded = peak_megabytes()

    def scan(tokens: int, losses: int) -> float:
        return timed(lambda: ov.scan(model, tokens=tokens, settings=Settings(loss_sample=losses))).cpu

    def forward() -> None:
        for first in range(0, len(windows), 2):
            run(model, pad([window.ids for window in windows[first : first + 2]]))

    short, long, losses = scan(SHORT, 2), scan(LONG, 2), scan(SHORT, LOSSES)
    token, position = (long - short) / (LONG - SHORT), (losses - short) / (LOSSES - 2)
    return {
        "forward": timed(forward).cpu / SHORT,
        "token": token,
        "position": position,
        "total": TOKENS * token + Settings().loss_sample * position,
        "losses": Settings().loss_sample,
        "memory": peak_megabytes() - loaded,
    }


def main() -> None:
    if not SMOLLM2:
        raise SystemExit("set OV_CIRCUITS_SMOLLM2 to a folder with SmolLM2-135M (see the README)")
    found = in_process(__file__, "measure")
    minutes = found["total"] / 60
    table(
        "A corpus through SmolLM2-135M, 270 heads, processor time of one thread",
        [
            ("a token, against the forward pass alone", f"{1000 * found['forward']:.1f} ms", f"{1000 * found['token']:.1f} ms",
             f"1/{found['token'] / found['forward']:.1f}", "-"),
            ("a position's exact loss saved, all heads", "-", f"{1000 * found['position']:.0f} ms", "-", "-"),
            (f"{TOKENS:,} tokens and {found['losses']} exact losses", "-",
             f"{minutes:.0f} min ({minutes / 2:.0f} on two cores)", "-", "<= 60 min (30)"),
            ("memory above the loaded model", "-", f"{found['memory']:.0f} MB", "-", "-"),
        ],
    )  # fmt: skip


if __name__ == "__main__":
    if "--step" in sys.argv:
        print(json.dumps(measure()))
    else:
        main()

"""Trace and ledger for all heads and all sources, against TransformerLens, each in a process of its own.

    python tests/benchmarks/ledger.py [MODEL] [--prompts 64] [--length 32] [--threads 1]

MODEL is $OV_CIRCUITS_SMOLLM2 by default: a folder. The rival is run_with_cache, stack_head_results and logit_attrs of a bridge
whose norms are folded, at the last position; it gives heads, not sources. Ours gives both, and its heads are compared with the
rival's. Memory is the peak above the loaded model, with a first run of one token behind it. Both sides run twice: the first run,
in which a process still asks the system for its memory, has a row of its own. Times are processor seconds too, which other work
on the machine moves less.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import SMOLLM2, Timed, in_process, memory_above, ratio, table, timed
from safetensors.torch import load_file, save_file
from torch import Tensor


def questions(n_vocab: int, prompts: int, length: int) -> tuple[Tensor, Tensor]:
    """Random ids [prompt, pos], and two tokens each [prompt, 2]."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(n_vocab, (prompts, length), generator=generator)
    return tokens, torch.stack([torch.randperm(n_vocab, generator=generator)[:2] for _ in range(prompts)])


def ours(folder: str, prompts: int, length: int) -> Callable[[], Tensor]:
    """Each head's entry, [prompt, layer, head], summed over the sources of its account."""
    import ov_circuits as ov
    from ov_circuits.trace.ledger import accounts, logit_reading

    model = ov.load(folder)
    model.trace([0])
    tokens, asked = questions(model.architecture.n_vocab, prompts, length)

    def work() -> Tensor:
        traces = model.trace(tokens.tolist(), last_logits=True)
        readings = [logit_reading(trace, *pair) for trace, pair in zip(traces, asked.tolist(), strict=True)]
        return torch.stack([account.heads for account in accounts(traces, readings)])

    return work


def theirs(folder: str, prompts: int, length: int) -> Callable[[], Tensor]:
    """The same of TransformerLens."""
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    bridge = TransformerBridge.boot_transformers(folder, device="cpu", dtype=torch.float32, hf_model=network)
    bridge.enable_compatibility_mode(fold_value_biases=False)
    tokens, asked = questions(bridge.cfg.d_vocab, prompts, length)

    @torch.no_grad()
    def of(tokens: Tensor, asked: Tensor) -> Tensor:
        _, cache = bridge.run_with_cache(tokens)
        heads = cache.stack_head_results(layer=-1, pos_slice=-1)
        found = cache.logit_attrs(heads, asked[:, 0], asked[:, 1], pos_slice=-1)
        return found.reshape(bridge.cfg.n_layers, bridge.cfg.n_heads, len(tokens)).permute(2, 0, 1)

    of(tokens[:1, :1], asked[:1])
    return lambda: of(tokens, asked)


def step(options: argparse.Namespace) -> None:
    """One side: seconds and megabytes as JSON, its result into a file."""
    build = {"ours": ours, "theirs": theirs}[options.step]
    work = build(options.model, options.prompts, options.length)
    with memory_above() as grown:
        first = timed(work)
        done = timed(work)
    save_file({"heads": done.result.double().contiguous()}, options.into)
    times = {"first": [first.seconds, first.cpu], "again": [done.seconds, done.cpu]}
    print(json.dumps({"megabytes": grown()} | times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=SMOLLM2)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--step", choices=("ours", "theirs"))
    parser.add_argument("--into")
    options = parser.parse_args()
    if options.model is None:
        parser.error("name a model, or set OV_CIRCUITS_SMOLLM2")
    torch.set_num_threads(options.threads)
    if options.step:
        step(options)
        return
    sizes = [f"--{name}={getattr(options, name)}" for name in ("prompts", "length", "threads")]
    sides: dict[str, tuple[Timed, Timed, float, Tensor]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for side in ("theirs", "ours"):
            file = str(Path(folder) / f"{side}.safetensors")
            found: dict[str, Any] = in_process(__file__, side, options.model, *sizes, "--into", file)
            heads = load_file(file)["heads"]
            sides[side] = *(Timed(*found[name], None) for name in ("again", "first")), found["megabytes"], heads
    (their_time, their_first, their_memory, their_heads), (time, first, memory, heads) = sides["theirs"], sides["ours"]
    table(
        f"Trace and ledger, all heads, {options.prompts} prompts of {options.length} tokens, {options.threads} thread",
        [
            ("trace and ledger", str(their_time), str(time), ratio(their_time, time), "2x"),
            ("the first time in a process", str(their_first), str(first), ratio(their_first, first), ""),
            (
                "peak above the loaded model",
                f"{their_memory:.0f} MB",
                f"{memory:.0f} MB",
                f"{their_memory / memory:.1f}x",
                "3x",
            ),
        ],
    )
    apart = float((heads - their_heads).abs().max() / their_heads.abs().max())
    print(f"largest difference of a head's entry: {apart:.1e} of the largest entry")
    if apart > 1e-4:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

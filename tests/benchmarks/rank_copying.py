"""Rank copying, exact over the full vocabulary: ov_circuits against the straightforward exact way, in one run.

    python tests/benchmarks/rank_copying.py [MODEL] [--every 10] [--threads 1]

MODEL is $OV_CIRCUITS_SMOLLM2 by default. The straightforward way multiplies blocks of rows in float32 and counts the logits
above and below the own one. Both sides get the same factors X W_V and W_O W_U, whose own cost is shown beside, and both give
copying and suppression at k = 1, 5, 10. Times are processor seconds, which other work on the machine moves less.

Every head's memberships are compared. Float32 counts cannot tell logits apart that differ by less than their rounding: a row
that differs is judged by its float64 sums, and counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from harness import SMOLLM2, peak_megabytes, table
from torch import Tensor

import ov_circuits as ov
from ov_circuits.linalg.vocab_ranks import capped_ranks

KS = (1, 5, 10)
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Row:
    """One head: seconds for the factors and for either way, memberships of both ends [2, k, n], rows decided in float64."""

    head: str
    factors: float
    blocked: float
    pruned: float
    members: Tensor
    settled: int
    wrong: int


def straightforward(A: Tensor, B: Tensor, block: int = 64) -> Pair:
    """Counts of larger and smaller logits; 64 rows a block were faster than 256 and 1024 on the machine seen."""
    larger, smaller = torch.empty(len(A), dtype=torch.long), torch.empty(len(A), dtype=torch.long)
    for start in range(0, len(A), block):
        part = slice(start, start + block)
        logits = A[part] @ B
        own = logits.gather(1, torch.arange(len(A))[part, None])
        larger[part] = (logits > own).sum(1)
        smaller[part] = (logits < own).sum(1)
    return larger, smaller


def pruned(A: Tensor, B: Tensor) -> Pair:
    ranks = capped_ranks(A, B, torch.arange(len(A)), max(KS))
    return ranks.larger, ranks.smaller


def timed(work: Callable[[], Pair]) -> tuple[float, Pair]:
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def members(ends: Pair) -> Tensor:
    """[2, k, n]: among the k first from either end."""
    return torch.stack([torch.stack([end < k for k in KS]) for end in ends])


def float64_ranks(A: Tensor, B: Tensor, row: int) -> Pair:
    """One row's counts from its float64 sums, entry by entry."""
    logits = (B.double().T * A[row].double()).sum(1)
    return (logits > logits[row]).sum()[None], (logits < logits[row]).sum()[None]


def compare(model: ov.Model, label: str) -> Row:
    head = model.head(label)
    W_V, W_O = head.W_V, head.W_O
    factors, (A, B) = timed(lambda: (model.W_E @ W_V, W_O @ model.W_U))
    ours, found = timed(lambda: pruned(A, B))
    theirs, right = timed(lambda: straightforward(A, B))
    mine = members(found)
    apart = (mine != members(right)).flatten(0, 1).any(0).nonzero().flatten().tolist()
    settled = sum(torch.equal(mine[..., row], members(float64_ranks(A, B, row))[..., 0]) for row in apart)
    return Row(label, factors, theirs, ours, mine, settled, len(apart) - settled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=SMOLLM2)
    parser.add_argument("--every", type=int, default=10, help="every n-th head (default 10)")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.model is None:
        parser.error("name a model, or set OV_CIRCUITS_SMOLLM2")
    torch.set_num_threads(options.threads)
    model = ov.load(options.model)
    straightforward(torch.ones(64, 8), torch.ones(8, 64))  # what only the first call costs
    pruned(torch.ones(64, 8), torch.ones(8, 64))
    print(model)
    print("  head  factors  blocked   pruned   ratio   copying@10  suppression@10  rows settled in float64")
    rows = []
    for label in model.head_labels[:: options.every]:
        row = compare(model, label)
        rows.append(row)
        copying, suppression = row.members[:, -1].double().mean(-1).tolist()
        print(
            f"{label:>6} {row.factors:8.2f} {row.blocked:8.2f} {row.pruned:8.2f} {row.blocked / row.pruned:7.1f} "
            f"{copying:12.4f} {suppression:15.4f}  {row.settled}",
            flush=True,
        )
    factors, blocked, ours = (sum(getattr(row, part) for row in rows) for part in ("factors", "blocked", "pruned"))
    worst = min(rows, key=lambda row: row.blocked / row.pruned)

    def line(work: str, rival: float, own: float, target: str) -> tuple[str, str, str, str, str]:
        return work, f"{rival:.1f} s", f"{own:.2f} s", f"{rival / own:.1f}", target

    table(
        f"Rank copying and suppression, k = 1, 5, 10, {len(rows)} heads of {model.name}, {options.threads} thread(s)",
        [
            line(f"rank copying, every {options.every}th head", blocked, ours, "30"),
            line(f"rank copying, worst head, {worst.head}", worst.blocked, worst.pruned, "5"),
            line("rank copying, factors counted on both sides", blocked + factors, ours + factors, ""),
        ],
    )
    settled, wrong = sum(row.settled for row in rows), sum(row.wrong for row in rows)
    print(f"memberships identical but for {settled} rows, where float64 sums agree with the pruned way; wrong: {wrong}")
    print(f"peak memory of both ways, with torch and the model: {peak_megabytes():.0f} MB")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""What the scoreboard will cost, before it is run: operations, time and memory, from a config alone.

Operations are counted by what the algorithms do (d = d_model, r = d_head, n = vocabulary, g = query heads a key/value head):
products of matrices by their shapes, decompositions as so many times r^3 (or d r^2, d^3) of product work that takes the same
time. These factors were measured (docs/large-models.md); they hardly differ between machines, whose speed is one number: float64
product work a second and core. float32 products run twice as fast and count half.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ov_circuits.checkpoint.families import Architecture
from ov_circuits.folding import View
from ov_circuits.scores.chance import DRAWS
from ov_circuits.scores.pieces import Piece, chunks, layer_bytes, most_side_by_side, piece_bytes, pieces

# Product work that takes as long, measured with one thread: a Cholesky root of [r, r] with its condition number in r^3, a QR of
# [d, r] in d r^2, eigenvectors of a symmetric [d, d] in d^3.
CHOLESKY, QR, EIGH = 7.0, 5.0, 9.5
# Of a product known to be symmetric, by blocks (see linalg/lowrank.py), and in less time by BLAS's own (linalg/products.py).
_SYMMETRIC, _ROW_GRAM = 9 / 16, 0.75
# In product work a number: turning one of the file into float32 where the block is used again, reading a weight and folding a norm
# into it, turning a number into float64 (fresh memory is what takes the time of both), looking for the largest of a column.
_READ, _FOLD, _DOUBLE, _LARGEST = 30.0, 600.0, 180.0, 400.0
# How often the numbers of a head's factors are turned into float64.
_COPIES = 8
# What Python and many small operations take for the heads that are worked on at a time.
_CHUNK = 2e9
# A product of [d, d] with a few heads' [d, r], one after the other, takes so much longer than a large one.
_NARROW = 0.15
# What libraries keep for a thread: packed blocks of products, and the allocator's arena, which is not full.
_THREAD_BYTES = 64 * 2**20


@dataclass(frozen=True)
class _Decomposition:
    """Product work that takes as long as a decomposition of [r, r]: so many times r^3, and r^2 for what is done row by row."""

    cubes: int
    squares: int

    def __call__(self, r: int) -> int:
        return self.cubes * r**3 + self.squares * r**2


# Measured with one thread at r = 64 and 128: eigenvalues, also of draws, in float32; singular values, and of draws by the
# eigenvalues of a Gram matrix; a full SVD.
EIGVALS, EIGVALS32 = _Decomposition(68, 2900), _Decomposition(36, 2900)
SVDVALS, EIGVALSH, SVD = _Decomposition(8, 1400), _Decomposition(3, 1040), _Decomposition(13, 4600)


@dataclass(frozen=True)
class Work:
    """Operations that take the time of so many float64 multiplications and additions in products.

    Attributes:
        products: of products themselves; of float32 products, half of what they are.
        other: everything else, in the same unit.
    """

    products: int | float = 0
    other: int | float = 0

    @property
    def total(self) -> int | float:
        return self.products + self.other

    def __add__(self, more: Work) -> Work:
        return Work(self.products + more.products, self.other + more.other)


# What each score of the board asks for, and what its null asks for besides. What several ask for is done once.
_ASKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "eigen_copying_full": (("grams", "full cross", "full eigenvalues"), ("draws", "ov values", "rotation eigenvalues")),
    "eigen_copying_ov": (("ov eigenvalues",), ("ov values", "corner eigenvalues")),
    "ov_frobenius_norm": (("ov roots",), ("factors",)),
    "ov_spectral_norm": (("ov values",), ("factors", "ov factor values")),
    "ov_stable_rank": (("ov values",), ("factors", "ov factor values")),
    "ov_participation_ratio": (("ov values",), ("factors", "ov factor values")),
    "ov_entropy_rank": (("ov values",), ("factors", "ov factor values")),
    "full_ov_frobenius_norm": (("grams", "full roots"), ("draws", "ov values", "rotations")),
    "full_ov_spectral_norm": (("grams", "full values"), ("draws", "ov values", "rotation values")),
    "full_ov_stable_rank": (("grams", "full values"), ("draws", "ov values", "rotation values")),
    "full_ov_participation_ratio": (("grams", "full values"), ("draws", "ov values", "rotation values")),
    "full_ov_entropy_rank": (("grams", "full values"), ("draws", "ov values", "rotation values")),
    "qk_frobenius_norm": (("qk roots",), ("factors",)),
    "qk_spectral_norm": (("qk values",), ("factors", "qk factor values")),
    "qk_stable_rank": (("qk values",), ("factors", "qk factor values")),
    "qk_participation_ratio": (("qk values",), ("factors", "qk factor values")),
    "qk_entropy_rank": (("qk values",), ("factors", "qk factor values")),
    "value_bias_norm": ((), ("ov roots",)),
}
_TOKENS = ("ov pairs", "token ends")
# What one thing takes for granted.
_NEEDS: dict[str, tuple[str, ...]] = {
    "draws": ("grams",),
    "ov values": ("ov roots",),
    "ov pairs": ("ov roots",),
    "full roots": ("grams",),
    "full values": ("full roots",),
    "qk values": ("qk roots",),
    "factors": ("ov roots", "qk roots"),  # a draw turns both circuits
    "ov factor values": ("factors",),
    "qk factor values": ("factors",),
    "rotations": ("ov values", "draws"),
    "rotation values": ("rotations",),
    "rotation eigenvalues": ("rotations",),
}


@dataclass(frozen=True)
class Plan:
    """The cost of a scoreboard.

    Attributes:
        architecture: of the model.
        view: the weight view.
        tokens: whether the leading singular directions are shown with tokens.
        nulls: whether scores come with what they would be by chance.
        embeddings: whether the checkpoint holds them; without, what needs them is left out.
    """

    architecture: Architecture
    view: View
    tokens: bool = True
    nulls: bool = True
    embeddings: bool = True

    @property
    def scores(self) -> list[str]:
        """The board's scores that the checkpoint allows."""
        return [key for key, (steps, _) in _ASKS.items() if self.embeddings or "grams" not in steps]

    @property
    def once(self) -> dict[str, Work]:
        """What a model costs however many heads it has."""
        a, n = self.architecture, self.architecture.n_vocab
        d, r = a.d_model, min(a.d_head, a.d_model)
        products = 2 * n * d * d * (_SYMMETRIC if a.tied else 2 * _SYMMETRIC + 1)
        read = n * d * (1 if a.tied else 4)
        look = n * d * (1 if a.tied else 2)  # whether all numbers are finite
        frames = 2 * 2 * d * d * r * 3 / 2 + 3 * 2 * d * r * r
        return {
            "grams": Work(products, (_READ + _DOUBLE) * read + _READ * look),
            "draws": Work(DRAWS * frames, DRAWS * (2 * QR * d * r * r + 2 * SVD(r))),
        }

    @property
    def per_head(self) -> dict[str, Work]:
        """What each head costs; what heads of a group share is a part of it."""
        a, n = self.architecture, self.architecture.n_vocab
        d, r, g = a.d_model, a.d_head, a.group_size
        shared = 1 + 1 / g  # the reading side of OV is worked out once a group
        core, small, square = 2 * r**3, 2 * d * r * r, 2 * d * d * r
        samples = max(2, 128 // min(r, d))
        drawn_values = Work(DRAWS * core, DRAWS * (EIGVALSH(r) - (1 - _ROW_GRAM) * core))
        return {
            "weights": Work(
                0, (_COPIES * _DOUBLE + 2 * shared * _FOLD) * d * r + _CHUNK / len(next(chunks(a, range(a.n_heads))))
            ),
            "ov roots": Work(shared * small + core, shared * (CHOLESKY * r**3 - (1 - _ROW_GRAM) * small)),
            "ov values": Work(0, SVDVALS(r)),
            "ov eigenvalues": Work(small, EIGVALS(r)),
            "ov pairs": Work(4 * (r + d) * r, SVD(r)),
            "full roots": Work(shared * (_SYMMETRIC * square + small) + core, shared * CHOLESKY * r**3),
            "full values": Work(0, SVDVALS(r)),
            "full cross": Work(square / g + small, _NARROW * square / g),
            "full eigenvalues": Work(0, EIGVALS(r)),
            "qk roots": Work(2 * small + core, 2 * (CHOLESKY * r**3 - (1 - _ROW_GRAM) * small)),
            "qk values": Work(0, SVDVALS(r)),
            "factors": Work(DRAWS * 2 * 2 * core),
            "ov factor values": drawn_values,
            "qk factor values": drawn_values,
            "rotations": Work(DRAWS * core),
            "rotation values": drawn_values,
            "rotation eigenvalues": Work(0, DRAWS * EIGVALS32(r)),
            "corner eigenvalues": Work(0, samples * EIGVALS(r)),
            "token ends": Work(2 * n * d, 2 * _READ * n * d / a.n_heads + _LARGEST * n),
        }

    def asked(self, score: str | None = None) -> list[str]:
        """The steps that a score takes, or all of them together."""
        keys = self.scores if score is None else [score]
        wanted = [step for key in keys for step in (*_ASKS[key][0], *(_ASKS[key][1] if self.nulls else ()))]
        wanted += _TOKENS if score is None and self.tokens and self.embeddings else ()
        steps: dict[str, None] = {"weights": None}
        while wanted:
            step = wanted.pop()
            steps[step] = None
            wanted += _NEEDS.get(step, ())
        return sorted(steps)

    @property
    def over_vocabulary(self) -> dict[str, tuple[Work, Work]]:
        """Scores over tokens, a head: the least, and the most they can take. float32 throughout.

        Rank copying forms both factors and meets 64 columns with every row, from both ends; how many rows meet the whole
        vocabulary depends on the weights: those whose own token is among the first, so none or all of them. The others look
        at a few hundred tokens (300 is taken).
        """
        a, n, some = self.architecture, self.architecture.n_vocab, 300
        d, r, g = a.d_model, a.d_head, a.group_size
        factors = Work((2 * n * d * r * (1 + 1 / g)) / 2, _READ * n * d * (1 + 1 / g))
        screen, whole = Work(2 * 2 * n * 64 * r / 2), Work(2 * 2 * n * n * r / 2)
        ioi = Work(2 * some * n * d / 2, _READ * n * d)
        relations = Work((2 * n * d * r + 2 * 2 * some * n * r) / 2, _READ * n * d)
        return {
            "rank_copying": (factors + screen, factors + screen + whole),
            "ioi_copying": (ioi, ioi),
            "relations": (relations, relations),
        }

    def work(self, score: str | None = None) -> tuple[Work, Work]:
        """Of a score alone, or of the whole board: once a model, and once a head."""
        once, per_head = self.once, self.per_head
        steps = self.asked(score)
        return (
            sum((once[step] for step in steps if step in once), Work()),
            sum((per_head[step] for step in steps if step in per_head), Work()),
        )

    def seconds(self, rate: int | float, threads: int = 1, ranks: int = 1, cores: int | None = None) -> int | float:
        """How long the whole board takes.

        Args:
            rate: float64 operations a second and core.
            threads: of each process.
            ranks: processes that share the work (:mod:`ov_circuits.distributed`).
            cores: how many there are, where ranks times threads are more: then each waits for its turn.
        """
        a = self.architecture
        once, per_head = self.work()
        draws = self.once["draws"].total if "draws" in self.asked() else 0.0  # every rank makes them
        work = pieces(a, ranks)
        shares = [work[len(work) * i // ranks : len(work) * (i + 1) // ranks] for i in range(ranks)]
        # Tokens are looked for a piece at a time, and a part of a layer reads the embeddings as a whole one does.
        reading = 2 * _READ * a.n_vocab * a.d_model if self.tokens and self.embeddings else 0.0

        def of(share: list[Piece]) -> int | float:
            heads = sum(len(piece.heads) for piece in share)
            return per_head.total * heads + reading * (len(share) - heads / a.n_heads)

        turns = 1.0 if cores is None else max(1.0, ranks * threads / cores)
        return ((once.total - draws) / ranks + draws + max(map(of, shares))) * turns / (rate * threads)

    @property
    def roots(self) -> Work:
        """What comes on top where a head is so ill conditioned that roots of the Gram matrices are needed (rare)."""
        a = self.architecture
        return Work(0, (1 if a.tied and self.view == "raw" else 2) * EIGH * a.d_model**3)

    @property
    def memory_formula(self) -> str:
        """Above the imports, in bytes."""
        from ov_circuits.source import HELD_EMBEDDING_BYTES

        a = self.architecture
        squares = self._squares
        embedding = f"4 n_vocab d_model = {4 * a.n_vocab * a.d_model:,}"
        kept = "kept" if 4 * a.n_vocab * a.d_model <= HELD_EMBEDDING_BYTES else "read in blocks, not kept"
        return (
            f"Held, in bytes: {squares} Gram matrices and halves of them, 8 d_model^2 = {8 * a.d_model**2:,} each; embeddings, "
            f"{embedding}, are {kept}. At work: the heads worked on, all threads' together at most 3 layers of "
            f"{layer_bytes(a):,} (or 512 MiB where that is more), and for each thread the mapped file of one matrix and "
            f"{_THREAD_BYTES:,} for libraries. A head so ill conditioned that roots of the Gram matrices are needed takes 5 "
            "more of them (rare). More layers take no more"
        )

    @property
    def _squares(self) -> int:
        """How many d_model x d_model matrices are held: raw ones, those in the view where they differ, and two halves."""
        raw = 1 if self.architecture.tied else 3
        return raw + {"raw": 0, "folded": 2, "centred": 3}[self.view] + 2

    def bytes(self, threads: int = 1) -> dict[str, int]:
        """Memory above the imports: what is held throughout, the most that comes on top, and both."""
        from ov_circuits.source import HELD_EMBEDDING_BYTES

        a = self.architecture
        square, embedding = 8 * a.d_model**2, 4 * a.n_vocab * a.d_model
        if not self.embeddings:
            square = embedding = 0
        kept = (1 if a.tied else 2) * embedding if embedding <= HELD_EMBEDDING_BYTES else 0
        held = kept + self._squares * square
        one = piece_bytes(a, self.tokens and self.embeddings, False)
        mapped = (
            2 * a.d_model * a.d_head * a.n_heads
        )  # of the matrix that is read, as the file holds it: in half precision
        top = min(threads, most_side_by_side(a, one)) * (one + mapped + _THREAD_BYTES)
        return {"held": held, "three_layers": 3 * layer_bytes(a), "work": top, "peak": held + top}


def plan_facts(plan: Plan, rate: int | float, threads: int) -> dict[str, Any]:
    """What a plan says, ready for JSON. Seconds are processor time: on several cores, so many times less."""
    heads = plan.architecture.n_layers * plan.architecture.n_heads

    def cost(once: Work, per_head: Work) -> dict[str, int | float]:
        total = once.total + heads * per_head.total
        return {"once": once.total, "per_head": per_head.total, "operations": total, "cpu_seconds": total / rate}

    over_vocabulary = {
        f"{name} ({end} it can take)" if low != high else name: cost(Work(), work)
        for name, (low, high) in plan.over_vocabulary.items()
        for end, work in (("least", low), ("most", high))
    }
    return {
        "view": plan.view,
        "gflops_per_core": rate / 1e9,
        "threads": threads,
        "heads": heads,
        "scores": {score: cost(*plan.work(score)) for score in plan.scores},
        "over_vocabulary": over_vocabulary if plan.embeddings else {},
        "roots_if_needed": {"operations": plan.roots.total, "cpu_seconds": plan.roots.total / rate},
        "all_spectra_together": cost(*plan.work()) | {"seconds": plan.seconds(rate, threads)},
        "memory": plan.bytes(threads),
        "memory_formula": plan.memory_formula,
    }


def machine_rate() -> float:
    """float64 product operations a second of one core, from a product of a quarter of a second or so."""
    import torch

    from ov_circuits.linalg.products import product

    left = right = torch.full((1024, 1024), 0.5, dtype=torch.float64, device="cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        best = float("inf")
        for _ in range(4):  # the first one also wakes the library up
            start = time.thread_time()
            _ = product(left, right)
            best = min(best, time.thread_time() - start)
    finally:
        torch.set_num_threads(threads)
    return 2 * 1024**3 / best

"""Work cut into pieces that fit into memory, can be saved one by one, and can be shared among processes.

A piece is some heads of one layer: a whole layer as a rule, fewer where there are more processes than layers. Inside, its heads
are taken a few at a time, because the float64 copies of their factors are what takes memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ov_circuits.checkpoint.families import Architecture

# Of the float64 copies of one factor of the heads that are worked on at a time, in one thread.
_CHUNK_BYTES = 32 * 2**20
# Matrices of [d_head, d_head] that a head has at once, in float64: its own roots and cores, and those of all draws of its nulls.
_SMALL_MATRICES = 36
# Of [n_vocab, n_heads] projections and [n_vocab, d_head] factors, how many are held at a time.
TOKEN_COPIES, RANK_COPIES = 5, 10
# What pieces side by side may always take, however small the model's layers are.
_WORK_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Piece:
    """Some heads of a layer.

    Attributes:
        layer: the layer.
        heads: consecutive query heads: whole groups, or part of one.
    """

    layer: int
    heads: range

    @property
    def name(self) -> str:
        """For files: sorted by name, pieces are in order."""
        return f"layer-{self.layer:05}-heads-{self.heads.start:05}-{self.heads.stop:05}"


def pieces(a: Architecture, processes: int = 1) -> list[Piece]:
    """All heads in order: whole layers, or parts of them where that lets processes have about as many heads each.

    Args:
        a: the model.
        processes: how many share the work, each taking consecutive pieces.
    """
    fair = 1.1 * a.n_layers * a.n_heads / processes
    # The most heads that a process gets, by the size of parts: whole layers if that is fair, otherwise what is fairest.
    most = {size: -(-a.n_layers * -(-a.n_heads // size) // processes) * size for size in _part_sizes(a)}
    size = next((size for size, heads in most.items() if heads <= fair), min(most, key=lambda size: most[size]))
    return [Piece(layer, heads) for layer in range(a.n_layers) for heads in _cut(range(a.n_heads), size)]


def chunks(a: Architecture, heads: range) -> Iterator[range]:
    """The heads of a piece, a few at a time."""
    # At least a group: what its heads share is worked out once.
    wanted = max(a.group_size, _CHUNK_BYTES // (8 * a.d_model * a.d_head))
    size = next(size for size in _part_sizes(a) if size <= wanted)
    # A piece smaller than a chunk, or one that is part of a group, is its own chunk.
    return _cut(heads, min(size, len(heads)))


def chunk_bytes(a: Architecture) -> int:
    """What the largest chunk takes while it is worked on.

    In float32 the factors as they are read and as both circuits hold them, in float64 one factor and the blocks of its product
    with a Gram matrix; and small matrices. tests/test_plan.py holds this against what torch allocates.
    """
    heads, factor = len(next(chunks(a, range(a.n_heads)))), a.d_model * a.d_head
    read = 4 * factor * (3 + 2 / a.group_size)  # W_Q as it is and scaled, W_O; W_K and W_V
    repeated = 4 * factor * 2 if 1 < a.group_size < a.n_heads else 0  # of a single group, repeating copies nothing
    return int(heads * (read + repeated + 1.6 * 8 * factor + _SMALL_MATRICES * 8 * a.d_head**2))


def piece_bytes(a: Architecture, tokens: bool, vocabulary: bool) -> int:
    """What a piece takes while it is worked on.

    Args:
        a: the model.
        tokens: whether leading singular directions are read through the vocabulary.
        vocabulary: whether ranks over the vocabulary are asked for.
    """
    spectra = chunk_bytes(a)
    projections = 4 * a.n_vocab * a.n_heads * TOKEN_COPIES if tokens else 0
    ranks = 4 * a.n_vocab * a.d_head * RANK_COPIES if vocabulary else 0
    return max(spectra, projections, ranks)


def layer_bytes(a: Architecture) -> int:
    """One layer's attention matrices in float32."""
    return 4 * a.d_model * a.d_head * 2 * (a.n_heads + a.n_kv_heads)


def most_side_by_side(a: Architecture, piece_bytes: int) -> int:
    """How many pieces may be worked on at a time: as many as fit into the room of three layers' weights."""
    return max(1, max(3 * layer_bytes(a), _WORK_BYTES) // piece_bytes)


def _part_sizes(a: Architecture) -> list[int]:
    """How many heads a part of a layer can have, falling: whole groups, or an equal share of one."""
    groups = [n * a.group_size for n in range(a.n_kv_heads, 0, -1) if a.n_kv_heads % n == 0]
    return groups + [n for n in range(a.group_size - 1, 0, -1) if a.group_size % n == 0]


def _cut(heads: range, size: int) -> Iterator[range]:
    return (range(start, min(start + size, heads.stop)) for start in range(heads.start, heads.stop, size))

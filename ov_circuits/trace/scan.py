"""What every head does over a corpus, in one pass and bounded memory.

A head on the whole distribution rarely does only what a narrow task suggests, so examples are taken from all of it: the
strongest ones and a few from every tenth of all positions (Luger et al. 2026). The unit is a *destination*, a position of the
text that has a next token, and each is measured twice:

    write   ||z W_O||, the size of what the head writes there;
    logit   z W_O . d, what it adds directly to the logit of the true next token, at the final norm's actual scale.

Beside each value stands the source token with the largest part of it: A[t, s] ||x_s W_V W_O|| for the write, and for the logit
A[t, s] (x_s W_V W_O) . d in the direction of the whole. The value bias belongs to no source. With it stand the sources that
the destination attends to most, largest attention first (of equal ones the earlier), each with its part; what is left to one
of their attention is elsewhere. They are taken only where an example may come of it: of the strongest in a window, and of the
first of the sample, as many as tenths draw their examples from.

Loss saved is what the head's direct write takes off the loss of the true next token, the final scale and everything else held:
L(logits - delta) - L(logits), delta the head's write through the final norm and W_U. That needs the whole vocabulary for each
head, so it is worked out on a seeded sample of positions. Its derivative, sum_v (1[v = next] - p_v) delta_v, costs one
direction a position and is taken on all of them. The mean over the corpus is the derivative's mean over all positions plus the
difference's mean over the sample: unbiased, and with a far smaller standard error than the sample alone, since the two move
together. The difference is skewed, a few positions carry much of it: a small sample may miss them, and then both the mean and
its error come out too small. Without a softcap the loss is convex in the logits, so the derivative never exceeds the loss saved.
All this is of *direct* effects: later heads see the same stream as before.

The number of positions is known before the first one runs, so the sample is drawn up front, uniformly and without replacement;
its tenths estimate those of all positions (a tenth's edge lies within 0.5 / sqrt(sample) of its rank, one standard error).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ov_circuits.arguments import checked
from ov_circuits.checkpoint.norms import Norm
from ov_circuits.errors import LARGEST_SEED, CircuitsError, whole_number
from ov_circuits.files import atomic_path, drop_if_empty
from ov_circuits.model import Layer, Model
from ov_circuits.progress import track
from ov_circuits.shown import counted, notebook_html
from ov_circuits.trace.corpus import Corpus, Window, open_corpus
from ov_circuits.trace.engines import Batch, check_tokens, pad, run
from ov_circuits.trace.trace import norms_through, values_without_bias, write_gram
from ov_circuits.words import token_text

if TYPE_CHECKING:
    import pandas as pd

MEASURES = ("write", "logit")

# Where a source token stands; the first that fits counts, so that shares sum to one.
SOURCE_KINDS = ("first", "self", "previous", "same_token", "after_same_token", "punctuation", "other")

# Tokens that run side by side, and after how many batches the state is written.
_BATCH_TOKENS = 512
_BATCHES_A_SAVE = 16

# The lists of strongest examples: a measure, and the sign by which its values are ordered.
_ENDS = (("write", 0, 1.0, "strongest"), ("logit", 1, 1.0, "strongest"), ("logit", 1, -1.0, "most negative"))

_ATTENDED = 5  # sources told of an example
# Positions of the sample, for each example of a tenth, from which it is drawn: fewer than one tenth in 10^12 goes short of one.
_DRAWN = 300

_ENTROPY_BIN = 0.5  # nats
_BEFORE, _AFTER, _AROUND_SOURCE = 16, 8, 4  # tokens shown of an example's text


@dataclass(frozen=True)
class Settings:
    """What a scan's result depends on, beside model and corpus.

    Attributes:
        examples: how many strongest examples a head, measure and end.
        per_decile: how many examples of each tenth.
        sample: positions from which tenths are told and their examples taken.
        loss_sample: positions, among these, on which the loss saved is worked out exactly.
        seed: of the sample.
    """

    examples: int = 10
    per_decile: int = 2
    sample: int = 2048
    loss_sample: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = {"seed": 0, "loss_sample": 2}.get(name, 1)
            whole_number(name, value, least, LARGEST_SEED if name == "seed" else None)


@dataclass(frozen=True, eq=False)
class Scan:
    """Every head over a corpus, as frames; see :func:`scan`. Their ``attrs`` say of what, and how it was scanned."""

    heads: pd.DataFrame
    examples: pd.DataFrame
    distributions: pd.DataFrame

    def __repr__(self) -> str:
        f = self.facts
        return (
            f"Scan of {f['model']!r} over {f['corpus']}: {counted(f['positions'], 'position')}, "
            f"{counted(len(self.heads), 'head')}, {counted(len(self.examples), 'example')}"
        )

    def _repr_html_(self) -> str | None:
        return notebook_html("scan_html", self)

    @property
    def facts(self) -> dict[str, Any]:
        """Model, corpus, window, BOS, seed, the model's own mean loss."""
        return {str(key): value for key, value in self.heads.attrs.items()}

    @checked
    def of(self, head: str) -> pd.DataFrame:
        """One head's examples.

        Raises:
            CircuitsError: there is no such head.
        """
        if head not in set(self.heads["head"]):
            raise CircuitsError(f"the scan has no head {str(head)[:80]!r}: write it as {self.heads['head'].iloc[0]!r}")
        return self.examples[self.examples["head"] == head]

    @checked
    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the frames as Parquet into a folder, which is made where it is not there; :func:`open_scan` reads them again.

        Raises:
            CircuitsError: the folder cannot be written to; then no frame is, and no folder made.
        """
        folder = Path(folder)
        made = not folder.exists()
        try:
            folder.mkdir(exist_ok=True)
        except (OSError, ValueError) as error:
            raise CircuitsError(f"cannot make the folder {folder}: {getattr(error, 'strerror', error)}") from error
        try:
            with ExitStack() as files:  # renamed when all are written
                for name in _FRAMES:
                    file = files.enter_context(atomic_path(folder / f"{name}.parquet"))
                    getattr(self, name).to_parquet(file, index=False)
        finally:
            if made:
                drop_if_empty(folder)


# What the frames hold, for scans that are read back: texts, and numbers (which is which decides what a page does with them).
_TEXTS = {
    "heads": ("head",),
    "examples": (
        *("head", "measure", "kind", "source", "destination", "next"),
        *("before", "after", "source_before", "source_after"),
    ),
    "distributions": ("head", "of", "bin"),
}
_NUMBERS = {
    "heads": (
        *("layer", "index", "write", "logit", "loss_saved", "loss_saved_se", "loss_saved_linear", "entropy"),
        *("distance", *(f"{of}_{kind}" for of in ("attention", "write") for kind in SOURCE_KINDS)),
    ),
    "examples": ("decile", "rank", "value", "part", "attention", "document", "position", "source_position"),
    "distributions": ("low", "high", "share"),
}
_FACTS = {"scan": str, "model": str, "corpus": str, "positions": int, "window": int, "bos_added": bool, "loss": float}
_LISTS = {"attended": str, "attended_position": int, "attended_attention": float, "attended_part": float}
_FRAMES = tuple(_TEXTS)


def open_scan(folder: str | os.PathLike[str]) -> Scan:
    """A scan that :meth:`Scan.save` wrote.

    Args:
        folder: where.

    Returns:
        The scan as it was saved; no model is needed.

    Raises:
        CircuitsError: no scan is there, its files are damaged, or of several scans.
    """
    import pandas as pd

    frames = {}
    for name in _FRAMES:
        file = Path(folder) / f"{name}.parquet"
        try:
            frames[name] = pd.read_parquet(file)
        except (OSError, ValueError) as error:
            raise CircuitsError(f"cannot read the scan's {file}: {error}") from error
    if (
        len({json.dumps(frame.attrs.get("scan")) for frame in frames.values()}) != 1
        or "scan" not in frames["heads"].attrs
    ):
        raise CircuitsError(f"the files in {folder} are not of one scan: make it again")
    for name, frame in frames.items():
        _check_frame(frame, name, folder)
    frames["examples"] = _with_lists(frames["examples"], folder)
    return Scan(**frames)


def _check_frame(frame: pd.DataFrame, name: str, folder: str | os.PathLike[str]) -> None:
    """Raise a CircuitsError unless a frame that was read back is what a scan gives."""
    from pandas.api.types import is_numeric_dtype

    texts, numbers = _TEXTS[name], _NUMBERS[name]
    missing = [column for column in (*texts, *numbers) if column not in frame.columns]
    other = [column for column in numbers if column not in missing and not is_numeric_dtype(frame[column])]
    other += [column for column in texts if column not in missing and is_numeric_dtype(frame[column])]
    facts = [fact for fact, kind in _FACTS.items() if not isinstance(frame.attrs.get(fact), kind)]
    if missing or other or facts or frame.empty:
        what = ", ".join([*missing, *other, *facts]) or "its rows"
        raise CircuitsError(f"the scan's {Path(folder) / name}.parquet is damaged (look at {what[:80]}): make it again")


def _with_lists(examples: pd.DataFrame, folder: str | os.PathLike[str]) -> pd.DataFrame:
    """Examples whose lists, which Parquet gives back as arrays, with NaN where there is no number, are lists again.

    Raises:
        CircuitsError: a column is not there, or rows of these columns do not fit each other.
    """
    try:
        lists: dict[str, Any] = {name: [_listed(row, kind) for row in examples[name]] for name, kind in _LISTS.items()}
        for row in zip(*lists.values(), strict=True):
            if len({len(values) for values in row}) != 1:
                raise ValueError("lists of a row are not of one length")
    except KeyError as error:
        raise CircuitsError(
            f"the scan in {folder} does not say what its examples attend to (no column {error}), as those of earlier versions: "
            "make it again"
        ) from error
    except (TypeError, ValueError) as error:
        raise CircuitsError(
            f"the scan's {Path(folder) / 'examples'}.parquet is damaged (look at attended): make it again"
        ) from error
    return examples.assign(**lists)


def _listed(row: Any, kind: type) -> list[Any]:
    return [None if value is None or value != value else kind(value) for value in row]


def scan(
    model: Model,
    corpus: Any = None,
    *,
    window: int | None = None,
    stride: int | None = None,
    bos: bool | None = None,
    tokens: int | None = None,
    settings: Settings | None = None,
    state: str | os.PathLike[str] | None = None,
) -> Scan:
    """Run a corpus and keep, for each head, what it does there.

    Args:
        model: any view; the run does not depend on it.
        corpus: a text file, a .jsonl file (a string or an object with a "text" a line), documents in memory (texts or lists of
            ids), or None: the small public-domain text that comes with the package.
        window: ids that run together, BOS included; by default 256, or what the model reads.
        stride: tokens between the beginnings of windows; by default none overlap.
        bos: whether BOS goes before each window; by default where the model has one.
        tokens: document tokens after which to stop.
        settings: how many examples are kept, the sample and its seed.
        state: a folder that keeps what is done so far, in a file named by the scan's key (``facts["scan"]``): written now and
            then, and when the work is interrupted. Where the same scan was begun already, it goes on from there, to the same
            result. The file stays when the scan is done; without a folder nothing is kept.

    Returns:
        Frames. ``heads``, one row a head: ``write`` (mean ||z W_O||), ``logit`` (mean contribution to the true next token's
        logit), ``loss_saved`` (mean, nats) with the standard error ``loss_saved_se`` of sampling, ``loss_saved_linear`` (its
        derivative), ``entropy`` of attention (mean, nats), ``distance`` (mean of t - s over attention
        that is not on a window's first token), and the shares ``attention_*`` by kind of source (:data:`SOURCE_KINDS`) and
        ``write_*``, the same of attention weighted by what it moves. ``examples``: head, measure, kind (strongest, most
        negative, decile), decile, rank, value, ``part`` (the source's), attention, where it is, the text around both, and as
        lists the sources attended to most, 5 or fewer: ``attended`` (texts), ``attended_position`` (in the document; None for
        BOS), ``attended_attention``, and ``attended_part``, of the value: their sizes do not sum to that of a write.
        ``distributions``: head, of (distance, entropy, source, write, logit), bin with its edges ``low`` and ``high``, share.

    Raises:
        CircuitsError: a corpus that is not there, empty, no text, no JSON at some line, or shorter than one window; a model
            that has no tokenizer (for text), cannot run or is split over ranks; a state file that is damaged or cannot be written.
    """
    chosen = settings or Settings()
    check_tokens(model, [0])
    if model.source.shard is not None:
        raise CircuitsError(
            f"{model.name} is split over several ranks, and a corpus is scanned in one process: load it whole"
        )
    opened = open_corpus(model, corpus, window=window, stride=stride, bos=bos, tokens=tokens)
    return _Run(model.in_view("raw"), opened, chosen).finish(None if state is None else Path(state))


# -- the run ----------------------------------------------------------------------------------------------------------

# What is known so far, by name: sums over positions, the strongest examples, and the sample.
_Tally = dict[str, Tensor]


class _Run:
    """One scan: its input, and the way from batch to tally to frames."""

    def __init__(self, model: Model, corpus: Corpus, settings: Settings) -> None:
        self.model, self.corpus, self.settings = model, corpus, settings
        self.survey = corpus.survey
        self.bins = _Bins(self.survey.longest)
        rng = np.random.default_rng(settings.seed)
        n = self.survey.positions
        # In random order: any first few of it are a uniform sample as well.
        self.sample = torch.from_numpy(rng.choice(n, size=min(settings.sample, n), replace=False))
        self.drawn = min(len(self.sample), _DRAWN * settings.per_decile)  # so many of its first become examples

    @cached_property
    def key(self) -> str:
        """What tells this scan from others."""
        parts = [_STATE, self.model.source.fingerprint, self.survey.digest, self.corpus.stride, asdict(self.settings)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def finish(self, folder: Path | None) -> Scan:
        """Go on from the state in the folder, if there is one, to the end."""
        state = None if folder is None else state_file(folder, self.key)
        a_batch = max(1, _BATCH_TOKENS // self.survey.longest)
        n_batches, tally = -(-self.survey.windows // a_batch), self._begin()
        if state is not None and state.exists():
            tally = _read_state(state, self.key, tally, n_batches)
        done = int(tally["batches"])
        meter = _Meter(self.model, self.bins, self.settings.examples)
        pending = islice(_batched(iter(self.corpus), a_batch), done, None)
        try:
            for batch in track(pending, "Scanning the corpus", total=n_batches - done):
                # The tally is replaced, never changed: whenever an interruption comes, it is whole.
                tally = self._add(tally, meter, batch)
                if state is not None and int(tally["batches"]) % _BATCHES_A_SAVE == 0:
                    _write_state(state, self.key, tally)
        finally:
            if state is not None:
                _write_state(state, self.key, tally)
        return _Frames(self, tally).scan()

    def _begin(self) -> _Tally:
        a, s = self.model.architecture, self.settings
        heads, n = a.n_layers * a.n_heads, len(self.sample)
        signs = torch.tensor([sign for _, _, sign, _ in _ENDS], device="cpu")[:, None, None, None]
        return {
            "batches": torch.tensor(0, device="cpu"),
            "positions": torch.tensor(0, device="cpu"),
            "loss": torch.tensor(0.0, dtype=torch.float64, device="cpu"),
            "attention": torch.zeros(heads, self.bins.n_features, dtype=torch.float64, device="cpu"),
            "moved": torch.zeros(heads, self.bins.n_features, dtype=torch.float64, device="cpu"),
            "means": torch.zeros(4, heads, dtype=torch.float64, device="cpu"),
            "entropy": torch.zeros(heads, self.bins.n_entropy, dtype=torch.int64, device="cpu"),
            "top": (-torch.inf * signs).expand(-1, heads, s.examples, 3).clone(),
            "top_at": torch.full((len(_ENDS), heads, s.examples, 2), -1, device="cpu"),
            "top_attended": torch.full((len(_ENDS), heads, s.examples, _ATTENDED, 4), -1.0, device="cpu"),
            "sample": torch.zeros(len(MEASURES), heads, n, 3, dtype=torch.float32, device="cpu"),
            "sample_source": torch.zeros(len(MEASURES), heads, n, dtype=torch.int32, device="cpu"),
            "sample_attended": torch.zeros(heads, self.drawn, _ATTENDED, 4, dtype=torch.float32, device="cpu"),
            "curvature": torch.zeros(heads, min(s.loss_sample, n), dtype=torch.float32, device="cpu"),
        }

    def _add(self, tally: _Tally, meter: _Meter, windows: Sequence[Window]) -> _Tally:
        """The tally with a batch of windows in it."""
        new = {name: tensor.clone() for name, tensor in tally.items()}
        batch = run(self.model, pad([window.ids for window in windows]), keep=meter.fields)
        if not bool(batch.logits.isfinite().all()):
            raise CircuitsError(
                f"{self.model.name} gives NaN or infinity on document {windows[0].document} of the corpus: "
                "its weights or the numbers in its config are not finite or out of range"
            )
        for index, window in enumerate(windows):
            base, n = int(new["positions"]), len(window.targets)
            slots = ((self.sample >= base) & (self.sample < base + n)).nonzero()[:, 0]
            exact = slots[slots < new["curvature"].shape[1]]
            drawn = slots[slots < self.drawn]
            found = meter.measure(batch, index, window, self.sample[exact] - base, self.sample[drawn] - base)
            at = self.sample[slots] - base
            new["sample"][:, :, slots] = found.values[:, :, at]
            new["sample_source"][:, :, slots] = found.sources[:, :, at].int()
            new["sample_attended"][:, drawn] = found.attended
            new["curvature"][:, exact] = found.curvature
            for name in ("loss", "attention", "moved"):
                new[name] += getattr(found, name)
            new["means"] += torch.stack([*found.values[..., 0], found.linear, found.entropy]).double().sum(-1)
            new["entropy"] += self.bins.entropy_counts(found.entropy)
            for end in range(len(_ENDS)):
                _keep_strongest(new["top"][end], new["top_at"][end], new["top_attended"][end], found, end, base)
            new["positions"] += n
        new["batches"] += 1
        return new


def _keep_strongest(
    top: Float[Tensor, "head k 3"],
    at: Int[Tensor, "head k 2"],
    attended: Float[Tensor, "head k attended 4"],
    found: _Measured,
    end: int,
    base: int,
) -> None:
    """Put what is stronger than the strongest so far in their place."""
    _, measure, sign, _ = _ENDS[end]
    best = found.best[end]
    sources = found.sources[measure].take_along_dim(best, 1)
    values = torch.cat([top, found.values[measure].take_along_dim(best.unsqueeze(-1), 1)], 1)
    where = torch.cat([at, torch.stack([base + best, sources], -1)], 1)
    rows = torch.cat([attended, found.best_attended[end]], 1)
    chosen = (sign * values[..., 0]).topk(top.shape[1], dim=1).indices.unsqueeze(-1)
    top.copy_(values.take_along_dim(chosen, 1))
    at.copy_(where.take_along_dim(chosen, 1))
    attended.copy_(rows.take_along_dim(chosen.unsqueeze(-1), 1))


def _batched(windows: Iterator[Window], n: int) -> Iterator[list[Window]]:
    while batch := list(islice(windows, n)):
        yield batch


# -- the state --------------------------------------------------------------------------------------------------------

# The metadata key by which a file is known as a scan's state; the number changes when a tally means something else.
_STATE = "ov_circuits.scan.2"
# What the command line keeps of scans that were stopped: a state holds a few numbers for each head and sampled position.
_MOST_STOPPED, _OLDEST_STOPPED = 20, 30 * 24 * 3600.0


def state_file(folder: Path, key: str) -> Path:
    """Where a folder keeps what is done of a scan.

    Raises:
        CircuitsError: the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CircuitsError(
            f"cannot keep the scan's state in {folder}: {error.strerror}; name another folder "
            "(for commands: OV_CIRCUITS_CACHE)"
        ) from error
    return folder / f"{key}.safetensors"


def forget_stopped(folder: Path) -> None:
    """Take away what stopped scans left in a folder: all but the 20 youngest, and what is older than 30 days."""
    written = {}
    for file in folder.glob("*.safetensors"):
        with suppress(FileNotFoundError):  # another scan has just ended
            written[file] = file.stat().st_mtime
    youngest = sorted(written, key=lambda file: written[file], reverse=True)
    for place, file in enumerate(youngest):
        if place >= _MOST_STOPPED or time.time() - written[file] > _OLDEST_STOPPED:
            file.unlink(missing_ok=True)


def _write_state(file: Path, key: str, tally: _Tally) -> None:
    from safetensors.torch import save_file

    with atomic_path(file) as temporary:
        save_file(tally, temporary, metadata={_STATE: key})


def _read_state(file: Path, key: str, like: _Tally, n_batches: int) -> _Tally:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as stored:
            if (stored.metadata() or {}).get(_STATE) != key:
                raise CircuitsError(f"{file} is not the state of this scan: delete it")
            tally = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CircuitsError(f"cannot go on from {file} ({error}): delete it to begin anew") from error
    kinds, wanted = ({name: (t.shape, t.dtype) for name, t in tensors.items()} for tensors in (tally, like))
    if kinds != wanted or not 0 <= int(tally["batches"]) <= n_batches:
        raise CircuitsError(f"cannot go on from {file} (it is damaged): delete it to begin anew")
    return tally


# -- a window ---------------------------------------------------------------------------------------------------------


class _Bins:
    """Bins of distance and entropy, and what kinds of source there are; they depend on the longest window alone."""

    def __init__(self, longest: int) -> None:
        self.distances = [0, 1, 2]  # upper edges
        while self.distances[-1] < longest - 1:
            self.distances.append(2 * self.distances[-1])
        self.n_entropy = int(math.log(longest) / _ENTROPY_BIN) + 1
        self.n_kinds, self.n_distances = len(SOURCE_KINDS), 1 + len(self.distances)
        self.n_features = self.n_kinds + self.n_distances + 1

    def features(
        self, ids: Int[Tensor, " source"], first: int, punctuation: Tensor
    ) -> Float[Tensor, "destination source feature"]:
        """Of each pair: its kind and its distance bin, one-hot (bin 0: the window's first token), and t - s past that token."""
        s, t = torch.arange(len(ids), device="cpu"), torch.arange(first, len(ids), device="cpu")[:, None]
        # the token before each source; none before the first
        before = torch.cat([torch.tensor([-1], device="cpu"), ids[:-1]])
        conditions = {
            "first": (s == 0).expand(len(t), -1),
            "self": s == t,
            "previous": s == t - 1,
            "same_token": ids == ids[first:, None],
            "after_same_token": before == ids[first:, None],
            "punctuation": punctuation.expand(len(t), -1),
        }
        kind = torch.full((len(t), len(ids)), SOURCE_KINDS.index("other"), device="cpu")
        for name in reversed(conditions):  # the first that fits is written last
            kind[conditions[name]] = SOURCE_KINDS.index(name)
        distance = (t - s).clamp(min=0)  # nothing is attended to that comes after
        bins = torch.where(s == 0, 0, 1 + torch.bucketize(distance, torch.tensor(self.distances, device="cpu")))
        one_hot = [F.one_hot(kind, self.n_kinds), F.one_hot(bins, self.n_distances), (distance * (s > 0)).unsqueeze(-1)]
        return torch.cat(one_hot, -1).float()

    def entropy_counts(self, entropy: Float[Tensor, "head destination"]) -> Int[Tensor, "head bin"]:
        """How many positions of each head fall into each bin."""
        bins = (entropy / _ENTROPY_BIN).long().clamp(0, self.n_entropy - 1)
        return torch.zeros(len(bins), self.n_entropy, dtype=torch.int64, device="cpu").scatter_add_(
            1, bins, torch.ones_like(bins)
        )

    def distance_edges(self) -> list[tuple[str, int | None, int | None]]:
        """Labels and edges, both included."""
        lows = [0, *(high + 1 for high in self.distances[:-1])]
        edges = zip(lows, self.distances, strict=True)
        return [("first token", None, None), *((str(a) if a == b else f"{a}-{b}", a, b) for a, b in edges)]


@dataclass(frozen=True, eq=False)
class _LayerMeasured:
    """One window, one layer's heads; destinations are the window's counted positions.

    Attributes:
        values: by measure: the value, the attention to its strongest source, and that source's part of it.
        sources: by measure: the strongest source, an index of the window's ids.
        best: by end (:data:`_ENDS`): the strongest destinations, at most as many as there are examples.
        best_attended, attended: the sources that these and the drawn destinations attend to most, in order: the source (-1: no
            more have any attention), attention, and its part by measure.
        linear: the derivative of the loss saved.
        entropy: of attention, nats.
        attention, moved: attention, and attention weighted by what it moves, summed over pairs, by feature.
    """

    values: Float[Tensor, "measure head destination 3"]
    sources: Int[Tensor, "measure head destination"]
    best: Int[Tensor, "end head best"]
    best_attended: Float[Tensor, "end head best attended 4"]
    attended: Float[Tensor, "head drawn attended 4"]
    linear: Float[Tensor, "head destination"]
    entropy: Float[Tensor, "head destination"]
    attention: Float[Tensor, "head feature"]
    moved: Float[Tensor, "head feature"]

    @staticmethod
    def joined(layers: Sequence[_LayerMeasured]) -> dict[str, Tensor]:
        """Each field of all layers' heads, in the order of their labels."""
        later = ("values", "sources", "best", "best_attended")  # heads are not their first axis
        return {
            field.name: torch.cat([getattr(layer, field.name) for layer in layers], int(field.name in later))
            for field in fields(_LayerMeasured)
        }


@dataclass(frozen=True, eq=False)
class _Measured(_LayerMeasured):
    """One window, all heads.

    Attributes:
        loss: the model's own loss, summed.
        curvature: loss saved, less its derivative, at the positions that were asked for.
    """

    loss: Float[Tensor, ""]
    curvature: Float[Tensor, "head asked"]


@dataclass(frozen=True, eq=False)
class _Weights:
    """What a layer's writes are computed with."""

    layer: Layer
    gram: Float[Tensor, "head d_head d_head"]
    post_norm: Norm | None


class _Meter:
    """Measures windows of one model."""

    def __init__(self, model: Model, bins: _Bins, examples: int) -> None:
        source, a = model.source, model.architecture
        self._model, self._bins, self._examples = model, bins, examples
        self._weights = [
            _Weights(layer, write_gram(layer.W_O), source.attention_post_norm(layer.index)) for layer in model.layers()
        ]
        self._norm, self._W_U, self._scale, self._cap = (
            source.final_norm, source.unembedding, a.logit_scale, a.logit_softcap
        )  # fmt: skip
        self._punctuation: dict[int, bool] = {}
        post = any(weights.post_norm is not None for weights in self._weights)
        self.fields = ("pattern", "attention_input", "z", *(("attention_output",) if post else ()))

    def measure(
        self, batch: Batch, index: int, window: Window, asked: Int[Tensor, " asked"], drawn: Int[Tensor, " drawn"]
    ) -> _Measured:
        """A window of a batch. Offsets of counted positions: ``asked``, at which the loss saved is worked out exactly; ``drawn``,
        which may become examples of their tenth.
        """
        counted = slice(window.first, len(window.ids))
        final, logits = batch.final[index, counted], batch.logits[index, counted]
        device = self._model.device
        targets = torch.tensor(window.targets, device=device)
        directions = self._norm.read_back(final, self._directions(logits, targets))
        ids = torch.tensor(window.ids, device="cpu")
        punctuation = torch.tensor([self._is_punctuation(i) for i in window.ids], device="cpu")
        features = self._bins.features(ids, window.first, punctuation).to(device)
        layers, writes = [], []
        for weights, kept in zip(self._weights, batch.layers, strict=True):
            part = {name: tensor[index] for name, tensor in kept.items()}
            layers.append(self._layer(weights, part, counted, directions, features, drawn.to(device)))
            if len(asked):
                writes.append(self._writes(weights, part, window.first + asked))
        joined = _LayerMeasured.joined(layers)
        linear = joined["linear"]
        curvature = linear.new_zeros(len(linear), 0)
        if len(asked):
            uncapped = batch.uncapped[index, counted][asked]
            curvature = self._loss_saved(torch.cat(writes), final[asked], uncapped, targets[asked]) - linear[:, asked]
        loss = F.cross_entropy(logits, targets, reduction="sum")
        found = joined | {"loss": loss, "curvature": curvature}
        return _Measured(**{name: tensor.cpu() for name, tensor in found.items()})

    def _directions(
        self, logits: Float[Tensor, "destination n_vocab"], targets: Int[Tensor, " destination"]
    ) -> Float[Tensor, "2 destination d_model"]:
        """Of the final norm's output: towards the true next token's logit, and down its loss."""
        toward = self._W_U.mT[targets]
        descent = -logits.softmax(-1)
        descent[torch.arange(len(targets), device="cpu"), targets] += 1
        if self._cap is not None:
            descent *= 1 - (logits / self._cap).square()
        return self._scale * torch.stack([toward, descent @ self._W_U.mT])

    def _layer(
        self,
        weights: _Weights,
        kept: dict[str, Tensor],
        counted: slice,
        directions: Float[Tensor, "2 destination d_model"],
        features: Float[Tensor, "destination source feature"],
        drawn: Int[Tensor, " drawn"],
    ) -> _LayerMeasured:
        if weights.post_norm is not None:
            directions = weights.post_norm.read_back(kept["attention_output"][counted], directions)
        layer = weights.layer
        pattern, z = kept["pattern"][:, counted, : counted.stop], kept["z"][:, counted]
        x = kept["attention_input"][: counted.stop]
        values = values_without_bias(x, layer)
        reads = torch.einsum("qtm,hdm->qhtd", directions, layer.W_O)
        write, (logit, linear) = norms_through(z, weights.gram), (z * reads).sum(-1)
        moved = pattern * norms_through(values, weights.gram).unsqueeze(1)
        parts = pattern * (reads[0] @ values.mT)
        found = [
            _with_source(value, by_source, pattern, counted.start)
            for value, by_source in ((write, moved), (logit, parts))
        ]
        n = min(self._examples, pattern.shape[1])
        best = torch.stack([(sign * found[measure][0][..., 0]).topk(n).indices for _, measure, sign, _ in _ENDS])
        pairs = features.flatten(0, 1)
        return _LayerMeasured(
            values=torch.stack([values for values, _ in found]),
            sources=torch.stack([sources for _, sources in found]),
            best=best,
            best_attended=torch.stack([_attended(pattern, (moved, parts), rows) for rows in best]),
            attended=_attended(pattern, (moved, parts), drawn.expand(len(pattern), -1)),
            linear=linear,
            entropy=torch.special.entr(pattern).sum(-1),
            attention=pattern.flatten(1) @ pairs,
            moved=moved.flatten(1) @ pairs,
        )

    def _writes(
        self, weights: _Weights, kept: dict[str, Tensor], at: Int[Tensor, " asked"]
    ) -> Float[Tensor, "head asked d_model"]:
        """What a layer's heads add to the stream at some positions."""
        writes = kept["z"][:, at] @ weights.layer.W_O
        return writes if weights.post_norm is None else weights.post_norm.carry(kept["attention_output"][at], writes)

    def _loss_saved(
        self,
        writes: Float[Tensor, "head asked d_model"],
        final: Float[Tensor, "asked d_model"],
        uncapped: Float[Tensor, "asked n_vocab"],
        targets: Int[Tensor, " asked"],
    ) -> Float[Tensor, "head asked"]:
        """How much larger the loss is without each head's direct write."""
        carried = self._scale * self._norm.carry(final, writes)
        saved = carried.new_empty(carried.shape[:2])
        rows = max(1, _LOGITS_AT_A_TIME // uncapped.shape[1])
        for i, target in enumerate(targets):
            with_all = F.cross_entropy(self._capped(uncapped[i]), target)
            for block in torch.arange(len(carried), device="cpu").split(rows):
                without = self._capped(uncapped[i] - carried[block, i] @ self._W_U)
                saved[block, i] = F.cross_entropy(without, target.expand(len(block)), reduction="none") - with_all
        return saved

    def _capped(self, logits: Tensor) -> Tensor:
        return logits if self._cap is None else self._cap * (logits / self._cap).tanh()

    def _is_punctuation(self, token: int) -> bool:
        """Whether a token's text has no letter and no digit in it: punctuation and white space."""
        if token not in self._punctuation:
            self._punctuation[token] = not any(c.isalnum() for c in token_text(self._model, token))
        return self._punctuation[token]


# Logits in memory while loss saved is worked out: 64 MB.
_LOGITS_AT_A_TIME = 1 << 24


def _with_source(
    value: Float[Tensor, "head destination"],
    by_source: Float[Tensor, "head destination source"],
    pattern: Float[Tensor, "head destination source"],
    first: int,
) -> tuple[Float[Tensor, "head destination 3"], Int[Tensor, "head destination"]]:
    """A value with the source that has the largest part of it, in the value's own sign: attention to it, and its part."""
    after = torch.ones_like(pattern[0], dtype=torch.bool).triu(first + 1)
    ranked = (by_source * torch.where(value < 0, -1, 1).unsqueeze(-1)).masked_fill(after, -torch.inf)
    source = ranked.argmax(-1, keepdim=True)
    attention, part = (tensor.take_along_dim(source, -1).squeeze(-1) for tensor in (pattern, by_source))
    return torch.stack([value, attention, part], -1), source.squeeze(-1)


def _attended(
    pattern: Float[Tensor, "head destination source"],
    by_source: Sequence[Float[Tensor, "head destination source"]],
    rows: Int[Tensor, "head row"],
) -> Float[Tensor, "head row attended 4"]:
    """The sources that some destinations of each head attend to most: source, attention, and the source's part of each measure."""
    heads, rows = torch.arange(len(pattern), device=pattern.device)[:, None], rows.to(pattern.device)
    left, found = pattern[heads, rows], []
    for _ in range(min(_ATTENDED, left.shape[-1])):
        found.append(left.argmax(-1, keepdim=True))  # of equal ones the first, which topk does not promise; and faster
        left.scatter_(-1, found[-1], -1)
    source = torch.cat(found, -1)
    chosen = [tensor[heads[..., None], rows[..., None], source] for tensor in (pattern, *by_source)]
    attended = torch.stack([torch.where(chosen[0] > 0, source, -1).to(pattern.dtype), *chosen], -1)
    return F.pad(attended, (0, 0, 0, _ATTENDED - source.shape[-1]), value=-1)


# -- frames -----------------------------------------------------------------------------------------------------------


class _Frames:
    """A finished tally as frames."""

    def __init__(self, run: _Run, tally: _Tally) -> None:
        self._run, self._tally, self._model = run, tally, run.model
        self._labels, self._n = run.model.head_labels, int(tally["positions"])
        self._decile = self._deciles()
        self._texts: dict[int, str] = {}

    def scan(self) -> Scan:
        run, corpus = self._run, self._run.corpus
        facts: dict[Any, Any] = {
            "scan": run.key,
            "model": self._model.name,
            "corpus": corpus.name,
            "positions": self._n,
            "windows": run.survey.windows,
            "window": corpus.length + (corpus.bos is not None),
            "stride": corpus.stride,
            "bos_added": corpus.bos is not None,
            "loss": float(self._tally["loss"]) / self._n,
            **asdict(run.settings),
            "sample": len(run.sample),
            "loss_sample": self._tally["curvature"].shape[1],
        }
        frames = {"heads": self._heads(), "examples": self._examples(), "distributions": self._distributions()}
        for frame in frames.values():
            frame.attrs = facts
        return Scan(**frames)

    def _heads(self) -> pd.DataFrame:
        import pandas as pd

        t = self._tally
        write, logit, linear, entropy = (t["means"] / self._n).numpy()
        curvature = t["curvature"].double()
        n = curvature.shape[1]
        error = curvature.std(dim=1) * ((1 / n - 1 / self._n) ** 0.5)  # none where every position is in the sample
        beyond = t["attention"][:, : len(SOURCE_KINDS)].sum(1) - t["attention"][:, 0]
        layers, indices = zip(*((h.layer, h.index) for h in self._model.heads()), strict=True)
        columns: dict[str, Any] = {
            "head": self._labels,
            "layer": layers,
            "index": indices,
            "write": write,
            "logit": logit,
            "loss_saved": linear + curvature.mean(1).numpy(),
            "loss_saved_se": error.numpy(),
            "loss_saved_linear": linear,
            "entropy": entropy,
            "distance": (t["attention"][:, -1] / beyond).numpy(),
        }
        for prefix, name in (("attention", "attention"), ("write", "moved")):
            shares = _shares(t[name][:, : len(SOURCE_KINDS)])
            columns |= {f"{prefix}_{kind}": shares[:, i].numpy() for i, kind in enumerate(SOURCE_KINDS)}
        return pd.DataFrame(columns)

    def _deciles(self) -> Int[Tensor, "measure head sampled"]:
        """In which tenth, from 0, each sampled value of a head lies."""
        values = self._tally["sample"][..., 0]
        n = values.shape[-1]
        # Equal values (a head that writes the same wherever it attends to the first token) are dealt out among their tenths in
        # turns: were they given in the sample's order, the last tenth would have none of its beginning, which examples are from.
        turns = (torch.arange(n, device="cpu") % 10).argsort(stable=True)
        ranks = values[..., turns].argsort(dim=-1, stable=True).argsort(dim=-1)
        deciles = torch.empty_like(ranks)
        deciles[..., turns] = ranks * 10 // n
        return deciles

    def _distributions(self) -> pd.DataFrame:
        import pandas as pd

        t, bins = self._tally, self._run.bins
        rows: list[tuple[Any, ...]] = []
        kinds, edges = len(SOURCE_KINDS), bins.distance_edges()
        sources, distances, entropies = (
            _shares(sums).tolist()
            for sums in (t["attention"][:, :kinds], t["attention"][:, kinds:-1], t["entropy"].double())
        )
        for i, head in enumerate(self._labels):
            rows += [(head, "source", kind, None, None, sources[i][k]) for k, kind in enumerate(SOURCE_KINDS)]
            rows += [(head, "distance", *edge, distances[i][k]) for k, edge in enumerate(edges)]
            for k, share in enumerate(entropies[i]):
                low, high = k * _ENTROPY_BIN, (k + 1) * _ENTROPY_BIN
                rows.append((head, "entropy", f"{low:g}-{high:g}", low, high, share))
            for m, measure in enumerate(MEASURES):
                values, decile = t["sample"][m, i, :, 0], self._decile[m, i]
                for k in range(10):
                    inside = values[decile == k]
                    if len(inside):
                        low, high, share = float(inside.min()), float(inside.max()), len(inside) / len(values)
                        rows.append((head, measure, f"decile {k + 1}", low, high, share))
        frame = pd.DataFrame(rows, columns=["head", "of", "bin", "low", "high", "share"])
        return frame.astype({"low": float, "high": float})

    def _examples(self) -> pd.DataFrame:
        import pandas as pd

        rows = [*self._strongest(), *self._by_decile()]
        rows.sort(key=lambda row: row[0])  # by head; within one, in the order they came
        places = self._windows({row[-3] for row in rows})
        records = []
        for head, measure, kind, decile, rank, (value, attention, part), place, source, attended in rows:
            shown = self._shown(*places[place], source) | self._sources(places[place][0], attended, measure)
            numbers = {"decile": decile, "rank": rank, "value": value, "part": part, "attention": attention}
            records.append({"head": self._labels[head], "measure": measure, "kind": kind, **numbers, **shown})
        frame = pd.DataFrame(records)
        return frame.astype({"decile": "Int64", "source_position": "Int64"})

    def _strongest(self) -> Iterator[tuple[Any, ...]]:
        """(head, measure, kind, decile, rank, (value, attention, part), place, source, attended)."""
        for end, (measure, _, _, kind) in enumerate(_ENDS):
            kept = [self._tally[name][end].tolist() for name in ("top", "top_at", "top_attended")]
            for head, (values, at, attended) in enumerate(zip(*kept, strict=True)):
                for rank, (numbers, (place, source), sources) in enumerate(zip(values, at, attended, strict=True), 1):
                    if place >= 0:  # fewer positions than examples leave some unfilled
                        yield head, measure, kind, None, rank, numbers, place, source, sources

    def _by_decile(self) -> Iterator[tuple[Any, ...]]:
        """The first of the sample in each tenth: its order is random."""
        places, t = self._run.sample.tolist(), self._tally
        for m, measure in enumerate(MEASURES):
            for head in range(len(self._labels)):
                ranked = self._first_of_tenths(self._decile[m, head, : self._run.drawn].tolist())
                slots = torch.tensor([slot for _, _, slot in ranked], device="cpu")
                kept = (t["sample"][m, head], t["sample_source"][m, head], t["sample_attended"][head])
                rows = zip(*(tensor[slots].tolist() for tensor in kept), strict=True)
                for (decile, rank, slot), (numbers, source, attended) in zip(ranked, rows, strict=True):
                    yield head, measure, "decile", decile, rank, numbers, places[slot], source, attended

    def _first_of_tenths(self, deciles: list[int]) -> list[tuple[int, int, int]]:
        """(decile from 1, rank from 1, slot), in this order, of the first slots in each tenth."""
        slots: list[list[int]] = [[] for _ in range(10)]
        for slot, decile in enumerate(deciles):
            slots[decile].append(slot)
        per = self._run.settings.per_decile
        return [(k, rank, slot) for k, found in enumerate(slots, 1) for rank, slot in enumerate(found[:per], 1)]

    def _windows(self, places: set[int]) -> dict[int, tuple[Window, int]]:
        """Where places are, read out of the corpus again: a window, and the index of its ids."""
        found: dict[int, tuple[Window, int]] = {}
        base = 0
        for window in self._run.corpus:
            inside = range(base, base + len(window.targets))
            found |= {place: (window, window.first + place - base) for place in inside if place in places}
            base = inside.stop
        return found

    def _shown(self, window: Window, t: int, s: int) -> dict[str, Any]:
        """Where an example is and what stands around it."""
        ids, following = window.ids, window.targets[t - window.first :]
        return {
            "document": window.document,
            "position": window.position(t),
            "source_position": window.position(s),
            "source": self._text(ids[s : s + 1]),
            "destination": self._text(ids[t : t + 1]),
            "next": self._text(following[:1]),
            "before": self._text(ids[max(0, t - _BEFORE) : t]),
            "after": self._text(following[:_AFTER]),
            "source_before": self._text(ids[max(0, s - _AROUND_SOURCE) : s]),
            "source_after": self._text(ids[s + 1 : s + 1 + _AROUND_SOURCE]),
        }

    def _sources(self, window: Window, attended: list[list[float]], measure: str) -> dict[str, list[Any]]:
        """The sources that an example attends to most, with their parts of its measure."""
        rows = [(int(source), attention, parts) for source, attention, *parts in attended if source >= 0]
        return {
            "attended": [self._token(window.ids[source]) for source, _, _ in rows],
            "attended_position": [window.position(source) for source, _, _ in rows],
            "attended_attention": [attention for _, attention, _ in rows],
            "attended_part": [parts[MEASURES.index(measure)] for _, _, parts in rows],
        }

    def _text(self, ids: Sequence[int]) -> str:
        return "".join(map(self._token, ids))

    def _token(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = token_text(self._model, token)
        return self._texts[token]


def _shares(sums: Float[Tensor, "head bin"]) -> Float[Tensor, "head bin"]:
    """Each row divided by its sum."""
    return sums / sums.sum(1, keepdim=True)

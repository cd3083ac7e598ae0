"""A corpus as windows of token ids: what a scan runs, read as a stream.

A text file is one document; a .jsonl file has one a line, a string or an object with a "text". A document is cut into windows
of equal length, the last one shorter; BOS stands before each where it is wanted. Counted is every position of the document
that has a next token in it, once: where windows overlap, a position counts in the first window that holds it, and what an
earlier window counted is context only. The token after a window's last one is known too, so no prediction is lost at a seam.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

from ov_circuits.checkpoint.locate import data_file
from ov_circuits.checkpoint.tokenizer import why_no_bos
from ov_circuits.errors import CircuitsError
from ov_circuits.model import Model
from ov_circuits.words import bos_id, token_id

# Characters that are tokenised at a time, cut before a space: a text of this length is tokenised as a whole.
_PIECE = 1 << 20
_JSON_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Window:
    """Ids that are run together.

    Attributes:
        document: which document, from 0.
        start: the index in the document of the first id that is the document's own (BOS is not).
        ids: what is run, BOS included.
        bos: whether the first id is a BOS put there.
        targets: the true next tokens of the counted positions, which are the last ``len(targets)`` of ``ids``.
    """

    document: int
    start: int
    ids: tuple[int, ...]
    bos: bool
    targets: tuple[int, ...]

    @property
    def first(self) -> int:
        """The first counted position of ``ids``."""
        return len(self.ids) - len(self.targets)

    def position(self, index: int) -> int | None:
        """Where in the document an index of ``ids`` is; None for BOS."""
        return None if self.bos and index == 0 else self.start + index - self.bos


@dataclass(frozen=True, eq=False)
class Corpus:
    """Windows over documents; iterating reads them anew each time.

    Attributes:
        name: what it is called.
        model: whose tokenizer reads it.
        what: the file, or the documents: texts or lists of ids.
        length: ids of a window that are the document's own.
        stride: how far apart windows begin.
        bos: the id put before each window, or None.
        limit: document tokens after which it ends, or None.
    """

    name: str
    model: Model
    what: Path | Sequence[Any]
    length: int
    stride: int
    bos: int | None
    limit: int | None

    def __iter__(self) -> Iterator[Window]:
        left = self.limit
        for number, pieces in enumerate(self._documents()):
            if left == 0:
                return
            read = 0

            def cut(pieces: Iterable[list[int]] = pieces, left: int | None = left) -> Iterator[list[int]]:
                nonlocal read
                for piece in pieces:
                    piece = piece if left is None else piece[: left - read]
                    read += len(piece)
                    yield piece
                    if read == left:
                        return

            yield from self._windows(number, cut())
            left = None if left is None else left - read

    def _windows(self, document: int, pieces: Iterable[list[int]]) -> Iterator[Window]:
        """A document's windows; ``ids`` holds its tokens from index ``dropped`` on."""
        ids: list[int] = []
        dropped = start = counted = 0
        front = () if self.bos is None else (self.bos,)

        def window(stop: int) -> Window:
            inside = ids[start - dropped : stop - dropped]
            targets = ids[counted + 1 - dropped : stop + 1 - dropped]
            return Window(document, start, (*front, *inside), self.bos is not None, tuple(targets))

        for piece in pieces:
            ids, dropped = ids[start - dropped :] + piece, start
            while dropped + len(ids) > start + self.length:  # the token after the window is there
                yield window(start + self.length)
                counted, start = start + self.length, start + self.stride
        if dropped + len(ids) - 1 > counted:
            yield window(dropped + len(ids) - 1)

    def _documents(self) -> Iterator[Iterable[list[int]]]:
        if not isinstance(self.what, Path):
            for number, document in enumerate(self.what):
                yield [self._ids(document, f"document {number} of the corpus")]
        elif self.what.suffix.lower() in _JSON_LINES:
            for number, text in _json_lines(self.what):
                yield [self._ids(text, f"{self.what}, line {number}")]
        else:
            yield (self._ids(text, str(self.what)) for text in _pieces(self.what))

    def _ids(self, document: Any, where: str) -> list[int]:
        try:
            if isinstance(document, str):
                return self.model.tokenizer.encode(document)
            wrong = [token for token in document if isinstance(token, bool) or not hasattr(token, "__index__")]
            if wrong:
                raise CircuitsError(f"{str(wrong[0])[:80]} is no token id: give whole numbers")
            return [token_id(self.model, operator.index(token)) for token in document]
        except CircuitsError as error:
            raise CircuitsError(f"{where}: {error}") from error

    @cached_property
    def survey(self) -> Survey:
        """The whole corpus read once, without running anything: every fault of the file is found before hours of work."""
        digest = hashlib.sha256()
        windows = positions = 0
        longest = 0
        for window in self:
            windows, positions = windows + 1, positions + len(window.targets)
            longest = max(longest, len(window.ids))
            for part in ((window.document, window.start), window.ids, window.targets[-1:]):
                digest.update(array("q", part).tobytes())
        return Survey(windows, positions, longest, digest.hexdigest())


@dataclass(frozen=True)
class Survey:
    """What a corpus amounts to.

    Attributes:
        windows: how many.
        positions: counted positions: tokens that have a next one.
        longest: ids of the longest window.
        digest: of all ids and where windows begin.
    """

    windows: int
    positions: int
    longest: int
    digest: str


def open_corpus(
    model: Model,
    corpus: Any = None,
    *,
    window: int | None = None,
    stride: int | None = None,
    bos: bool | None = None,
    tokens: int | None = None,
) -> Corpus:
    """A corpus (see :func:`ov_circuits.trace.scan.scan`) as windows, its settings and its file checked from beginning to end.

    Raises:
        CircuitsError: as there.
    """
    a = model.architecture
    front = _bos(model, bos)
    size = _count(min(256, a.n_ctx) if window is None else window, "the window")
    if size > a.n_ctx:
        raise CircuitsError(
            f"a window of {size} is longer than the {a.n_ctx} tokens that {model.name} reads: shorten it"
        )
    length = size - (front is not None)
    if length < 2:
        raise CircuitsError(f"a window of {size} leaves {length} of the text's tokens in it: make it longer")
    step = length if stride is None else _count(stride, "the stride")
    if step > length:
        raise CircuitsError(f"a stride of {step} would leave text out between windows of {length} tokens: shorten it")
    limit = None if tokens is None else _count(tokens, "the number of tokens")
    name, what = _what(corpus)
    is_text = isinstance(what, Path) or any(isinstance(document, str) for document in what)
    if is_text and not model.has_tokenizer:
        raise CircuitsError(
            f"{model.name} has no tokenizer to read {name} with: use one that has, or lists of token ids"
        )
    opened = Corpus(name, model, what, length, step, front, limit)
    survey = opened.survey
    if survey.positions == 0 and limit == 1:
        raise CircuitsError("the first token alone predicts nothing of the text: take two or more")
    if survey.positions == 0:
        raise CircuitsError(f"{name} is empty: there is no token in it that another one follows")
    if survey.positions + 1 < length:
        raise CircuitsError(
            f"{name} has {survey.positions} tokens that another one follows, fewer than one window of {length}: "
            "give a longer text or a shorter window"
        )
    return opened


def _what(corpus: Any) -> tuple[str, Path | Sequence[Any]]:
    """What a corpus is called, and its file or documents."""
    if corpus is None:
        return "the text that comes with the package", data_file("corpus/text.jsonl")
    if isinstance(corpus, (str, os.PathLike)):
        path = Path(corpus).expanduser()
        if path.is_dir():
            raise CircuitsError(f"{path} is a folder: name a text or .jsonl file in it")
        if not path.is_file():
            raise CircuitsError(f"there is no file {str(path)[:200]}: name a text or .jsonl file")
        return str(path), path
    if not isinstance(corpus, Sequence) or isinstance(corpus, (bytes, bytearray)):
        raise CircuitsError(
            f"a corpus is a file, or a list of texts or of lists of token ids, not {type(corpus).__name__}"
        )
    wrong = [d for d in corpus if not isinstance(d, Sequence) or isinstance(d, (bytes, bytearray))]
    if wrong:
        raise CircuitsError(f"a document of a corpus is a text or a list of token ids, not {str(wrong[0])[:80]}")
    return f"{len(corpus)} documents in memory", corpus


def _bos(model: Model, wanted: bool | None) -> int | None:
    """The BOS id that goes before each window: by default where the model has one."""
    found = bos_id(model)
    if wanted and found is None:
        raise CircuitsError(f"{model.name} {why_no_bos(model.source.checkpoint.config)}: scan without one")
    return None if wanted is False else found


def _count(value: Any, what: str) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
        raise CircuitsError(f"{what} is a whole number from 1 on, not {str(value)[:80]}")
    return int(value)


# -- files ------------------------------------------------------------------------------------------------------------


def _pieces(path: Path) -> Iterator[str]:
    """A text file's content, a piece at a time."""
    rest = ""
    with _text(path) as file:
        while block := file.read(_PIECE):
            _check_text(block, str(path))
            rest += block
            if len(rest) > _PIECE:
                # Before a space: tokenizers of words take a space into the word after it.
                at = rest.rfind(" ", 1)
                at = at if at > 0 else len(rest)
                yield rest[:at]
                rest = rest[at:]
    yield rest


def _json_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers, from 1, and texts; empty lines are passed over."""
    with _text(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                found = json.loads(line)
            except (ValueError, RecursionError) as error:  # a number of thousands of digits is a plain ValueError
                raise CircuitsError(f"{where} is no JSON ({error}): write a string or an object with a text") from error
            text = found.get("text") if isinstance(found, dict) else found
            if not isinstance(text, str):
                raise CircuitsError(f'{where} has no text: write a string, or an object with a "text" that is one')
            _check_text(text, where)
            yield number, text


@contextmanager
def _text(path: Path) -> Iterator[TextIO]:
    """A file open as UTF-8; what is no text is said of the file."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            yield file
    except UnicodeDecodeError as error:
        raise CircuitsError(f"{path} is no UTF-8 text ({error.reason}): save it as UTF-8") from error
    except OSError as error:
        raise CircuitsError(f"cannot read {path}: {error.strerror}") from error


def _check_text(text: str, where: str) -> None:
    if "\0" in text:
        raise CircuitsError(f"{where} holds zero bytes, so it is no text: give a text file")

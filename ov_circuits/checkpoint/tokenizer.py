"""Text in, ids out, and every token as text that can be shown.

The weights-only road reads ``tokenizer.json`` with the tokenizers package alone. transformers is imported only for
checkpoints that lack this file (older vocabularies, GGUF).
"""

from __future__ import annotations

import codecs
import re
import reprlib
from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from ov_circuits.checkpoint.stores import read_json
from ov_circuits.errors import CircuitsError

_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class MissingTokenizer(CircuitsError):
    """A checkpoint has no tokenizer at all; one that is there and damaged raises a plain CircuitsError."""


def bos_in_vocabulary(bos: object, config: Mapping[str, Any]) -> int | None:
    """``bos`` where it is a token id of the config's vocabulary, else None: 50256 is a common leftover in small GPT-2s."""
    size = config.get("vocab_size")
    if isinstance(bos, bool) or not isinstance(bos, int) or bos < 0 or (isinstance(size, int) and bos >= size):
        return None
    return bos


def why_no_bos(config: Mapping[str, Any]) -> str:
    """Why there is no BOS token to put before a prompt, as the end of "MODEL .."."""
    bos = config.get("bos_token_id")
    if bos is None:
        return "names no BOS token (bos_token_id in its config.json)"
    return (
        f"has no BOS token: bos_token_id in its config.json is {reprlib.repr(bos)}, which is no token of its vocabulary"
    )


class Tokenizer:
    """A checkpoint's tokenizer.

    Attributes:
        bos_id: the id put before a prompt when asked for, or None when the model has none (or names one that is no token).
    """

    def __init__(self, backend: Any, bos_id: int | None) -> None:
        self._backend = backend
        known = bos_id is not None and bos_id < 2**32 and backend.id_to_token(bos_id) is not None
        self.bos_id = bos_id if known else None

    @classmethod
    def open(cls, folder: Path | None, vocabulary: Path | None, config: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer of a checkpoint: in a file of its own kind (``vocabulary``), or Hugging Face's in its folder.

        Raises:
            MissingTokenizer: there is none.
            CircuitsError: it cannot be read.
        """
        if vocabulary is not None:
            return cls._of_file(vocabulary, config)
        if folder is None:
            raise MissingTokenizer("this checkpoint is in memory and came without a tokenizer: use token ids")
        file = folder / "tokenizer.json"
        if file.is_file():
            return cls(_read_backend(file), _bos_id(folder, config, file))
        if any((folder / name).is_file() for name in ("vocab.json", "tokenizer.model")):
            return cls.of_transformers(_auto_tokenizer(folder), config)
        raise MissingTokenizer(
            f"{folder} has no tokenizer (no tokenizer.json): use token ids, or copy the tokenizer there"
        )

    @classmethod
    def _of_file(cls, vocabulary: Path, config: Mapping[str, Any]) -> Tokenizer:
        if vocabulary.suffix == ".gguf":
            return cls.of_transformers(_gguf_tokenizer(vocabulary), config)
        from ov_circuits.checkpoint import vocabularies

        read = vocabularies.read_llama2c if vocabulary.suffix == ".bin" else vocabularies.read_tokenizer_model
        return cls(read(vocabulary), bos_in_vocabulary(config.get("bos_token_id"), config))

    @classmethod
    def of_transformers(cls, tokenizer: Any, config: Mapping[str, Any]) -> Tokenizer:
        """From a transformers tokenizer in memory (a fast one)."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise CircuitsError(
                f"{type(tokenizer).__name__} is no fast tokenizer: convert it to a tokenizer.json first"
            )
        bos = tokenizer.bos_token_id
        return cls(backend, bos_in_vocabulary(config.get("bos_token_id") if bos is None else bos, config))

    def encode(self, text: str, *, unknown: bool = False) -> list[int]:
        """The ids of a text, without any special token added.

        Args:
            text: what to encode.
            unknown: let what the vocabulary cannot spell become its unknown token.

        Raises:
            CircuitsError: the text is no Unicode, or cannot be spelled; the message names the characters.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise CircuitsError(
                f"the text {text[:40]!r} cannot be encoded: character {error.start} is {text[error.start]!r}, half of one "
                "(it was no UTF-8): write the text again"
            ) from error
        encoding = self._backend.encode(text, add_special_tokens=False)
        if not unknown:
            self._check_spelled(text, encoding)
        return list(encoding.ids)

    def _check_spelled(self, text: str, encoding: Any) -> None:
        """Refuse a text of which a part became the unknown token, which would be run as if it had been meant."""
        if self._unknown is None or self._unknown not in encoding.ids:
            return
        name = self._backend.id_to_token(self._unknown)
        parts = (
            text[a:b] for token, (a, b) in zip(encoding.ids, encoding.offsets, strict=True) if token == self._unknown
        )
        lost = list(dict.fromkeys(part for part in parts if part.strip() != name))
        if lost:
            shown = ", ".join(map(repr, lost[:5])) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
            raise CircuitsError(
                f"the tokenizer has no token for {shown}: it would read {name!r} instead; leave that out, or give token ids"
            )

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Where in the text each of its tokens comes from, [start, end) in characters; a leading space may belong to it.

        Raises:
            CircuitsError: as :meth:`encode`.
        """
        self.encode(text)
        return [(int(a), int(b)) for a, b in self._backend.encode(text, add_special_tokens=False).offsets]

    @cached_property
    def ordinary(self) -> tuple[int, ...]:
        """The ids of tokens that stand for text: all but added ones (BOS, chat marks, ..) and the unknown token."""
        ids = set(self._backend.get_vocab(with_added_tokens=True).values())
        return tuple(sorted(ids - self._added - {self._unknown, self.bos_id}))

    @cached_property
    def _unknown(self) -> int | None:
        """The id that stands for all that the vocabulary cannot spell; None where everything can be spelled."""
        model = self._backend.model
        token = getattr(model, "unk_token", None)
        if token is not None:
            return self._backend.token_to_id(token)
        found = re.match(r"Unigram\(unk_id=(\d+)", repr(model))  # this model does not tell otherwise
        return int(found.group(1)) if found else None

    def text(self, token: int) -> str:
        """A token as text; bytes that are no UTF-8 on their own come as ``⟨E2⟩``, ids past the vocabulary as ``⟨id 50300⟩``."""
        piece = self._backend.id_to_token(int(token))
        if piece is None:
            return f"⟨id {int(token)}⟩"
        if token in self._added:
            return str(piece)
        return self._to_bytes(piece).decode("utf-8", errors="ov_circuits_visible")

    def find(self, text: str) -> int | None:
        """The id of the token whose text is exactly this, or None."""
        return self._by_text.get(text)

    def single(self, word: str | int) -> int:
        """The id of the token whose text is exactly ``word``; ids pass through.

        A leading space is part of the word: ``" Paris"`` and ``"Paris"`` are different tokens.

        Raises:
            CircuitsError: there is no such token; the message names the pieces, and the other spelling if that is a token.
        """
        if isinstance(word, int):
            if not 0 <= word < self.size:
                raise CircuitsError(f"token id {word} is outside the vocabulary of {self.size:,}")
            return word
        if word in self._by_text:
            return self._by_text[word]
        other = word[1:] if word.startswith(" ") else f" {word}"
        hint = f"; {other!r} is one token" if other in self._by_text else ""
        pieces = [self.text(token) for token in self.encode(word)]
        if not pieces:
            raise CircuitsError(f"{word!r} is no token at all{hint}")
        if len(pieces) == 1:
            raise CircuitsError(f"{word!r} is no token of its own: the tokenizer reads it as {pieces[0]!r}{hint}")
        parts = ", ".join(map(repr, pieces))
        what = hint or "; name a word that is one token, or one of these pieces"
        raise CircuitsError(f"{word!r} is not one token but {len(pieces)} ({parts}){what}")

    @cached_property
    def _by_text(self) -> dict[str, int]:
        """Token texts to ids. Where several tokens show as one text, the one that encoding the text yields, else the first.

        SentencePiece's byte pieces come last: <0x61> shows as "a" but is never produced where the piece "a" exists.
        """
        found: dict[str, int] = {}
        doubled = set()
        ids = set(self._backend.get_vocab(with_added_tokens=True).values())  # some vocabularies have gaps
        for token in sorted(sorted(ids), key=self._is_byte_piece):
            text = self.text(token)
            if found.setdefault(text, token) != token:
                doubled.add(text)
        for text in doubled:
            encoded = self.encode(text, unknown=True)
            if len(encoded) == 1 and self.text(encoded[0]) == text:
                found[text] = encoded[0]
        return found

    @property
    def size(self) -> int:
        """The number of tokens, added ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._backend.get_added_tokens_decoder())

    @cached_property
    def _byte_level(self) -> bool:
        """Whether pieces are spelled in GPT-2's byte alphabet (and not SentencePiece's ▁ and <0xE2>)."""
        return "ByteLevel" in repr(self._backend.decoder) or "ByteLevel" in repr(self._backend.pre_tokenizer)

    def _is_byte_piece(self, token: int) -> bool:
        """Whether a token is SentencePiece's <0xE2>."""
        return not self._byte_level and _BYTE_PIECE.fullmatch(self._backend.id_to_token(token) or "") is not None

    def _to_bytes(self, piece: str) -> bytes:
        if self._byte_level:
            alphabet = byte_alphabet()
            return b"".join(bytes([alphabet[c]]) if c in alphabet else c.encode() for c in piece)
        if _BYTE_PIECE.fullmatch(piece):
            return bytes.fromhex(piece[3:5])
        return piece.replace("▁", " ").encode()


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable spelling of bytes: printable Latin-1 stands for itself, the rest is moved to U+0100 and after."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable}
    return spelled | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _visible_bytes(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "".join(f"⟨{byte:02X}⟩" for byte in error.object[error.start : error.end]), error.end


codecs.register_error("ov_circuits_visible", _visible_bytes)


def _read_backend(file: Path) -> Any:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(file))
    # The Rust library raises bare Exception for every fault of the file, and no Exception at all where it panics.
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CircuitsError(f"{file} is not a readable tokenizer ({error}): copy it again") from error


def _bos_id(folder: Path, config: Mapping[str, Any], tokenizer_file: Path) -> int | None:
    """The config's bos_token_id, else the id of tokenizer_config.json's bos_token."""
    if config.get("bos_token_id") is not None:
        return bos_in_vocabulary(config["bos_token_id"], config)
    settings = folder / "tokenizer_config.json"
    token = read_json(settings).get("bos_token") if settings.is_file() else None
    if isinstance(token, dict):
        token = token.get("content")
    return _read_backend(tokenizer_file).token_to_id(token) if isinstance(token, str) else None


def _gguf_tokenizer(file: Path) -> Any:
    """What transformers makes of a GGUF file's vocabulary. What it makes nothing of (or is not there) counts as missing."""
    try:
        return _auto_tokenizer(file.parent, gguf_file=file.name)
    except CircuitsError as error:
        raise MissingTokenizer(str(error)) from error


def _auto_tokenizer(folder: Path, **kwargs: Any) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, **kwargs)
    except Exception as error:  # which of its parsers fails on a damaged file, and how, is transformers' own affair
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CircuitsError(f"the tokenizer in {folder} cannot be read by transformers: {reason}") from error

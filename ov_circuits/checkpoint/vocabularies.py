"""Vocabularies of other programs, as tokenizers of the tokenizers package.

- llama2.c's ``tokenizer.bin``: the longest piece's length (int32), then for each token its score (float32), its length (int32)
  and its bytes. llama2.c merges the neighbouring pair whose union has the best score, first: that is byte-pair encoding with
  its merges in the order of scores;
- Meta's ``tokenizer.model``: SentencePiece (Llama 1 and 2), or tiktoken's ranks (Llama 3).
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ov_circuits.checkpoint.stores import first_bytes
from ov_circuits.errors import CircuitsError

_UNKNOWN, _BOS, _EOS = "<unk>", "<s>", "</s>"
_LARGEST = 64 * 2**20
_RANK = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\s*")


def find_tokenizer(file: Path, n_vocab: int) -> Path | None:
    """The one ``tokenizer.bin`` or ``tok*.bin`` beside a checkpoint that has as many tokens; None when none or several do."""
    beside = [other for other in sorted(file.parent.glob("tok*.bin")) if other != file and other.is_file()]
    fitting = [other for other in beside if len(_read(other) or ()) == n_vocab]
    return fitting[0] if len(fitting) == 1 else None


def is_llama2c(file: Path) -> bool:
    """Whether a file is a llama2.c tokenizer."""
    return len(_read(file) or ()) > 2


def read_llama2c(file: Path) -> Any:
    """The tokenizer of a ``tokenizer.bin``.

    Raises:
        CircuitsError: the file is damaged.
    """
    pieces = _read(file)
    if pieces is None or len(pieces) < 3:
        raise CircuitsError(f"{file} is no llama2.c tokenizer, or is damaged: copy it again")
    names = [_UNKNOWN, _BOS, _EOS, *(piece.replace(" ", "▁") for piece, _ in pieces[3:])]
    scores = {name: score for name, (_, score) in zip(names, pieces, strict=True)}
    return byte_pairs({name: i for i, name in enumerate(names)}, scores)


def byte_pairs(ids: Mapping[str, int], scores: Mapping[str, float]) -> Any:
    """SentencePiece's byte-pair encoding from pieces and scores, as transformers makes it of Llama's ``tokenizer.model``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    merges = [
        (-scores[name], ids[name[:cut]], ids[name[cut:]], name[:cut], name[cut:])
        for name in ids
        for cut in range(1, len(name))
        if name[:cut] in ids and name[cut:] in ids
    ]
    pairs = [(left, right) for *_, left, right in sorted(merges)]
    backend = Tokenizer(
        models.BPE(vocab=dict(ids), merges=pairs, unk_token=_UNKNOWN, fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(
        [AddedToken(name, normalized=False, special=True) for name in (_UNKNOWN, _BOS, _EOS) if name in ids]
    )
    return backend


def read_tokenizer_model(file: Path) -> Any:
    """The tokenizer of a ``tokenizer.model`` as Meta publishes it.

    Raises:
        CircuitsError: it is neither SentencePiece's nor tiktoken's, or is damaged.
    """
    data = first_bytes(file, _LARGEST + 1)
    if len(data) > _LARGEST:
        raise CircuitsError(f"{file} has more than {_LARGEST:,} bytes: it is no vocabulary")
    try:
        return _tiktoken(data) if _RANK.match(data[:1000]) else _sentencepiece(data, file)
    except CircuitsError:
        raise
    except ImportError as error:
        raise CircuitsError(f"reading {file} needs the sentencepiece package: pip install sentencepiece") from error
    except Exception as error:  # which of the libraries' parsers fails, and how, is their own affair
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CircuitsError(f"{file} is not a readable tokenizer ({reason}): copy it again") from error


def _sentencepiece(data: bytes, file: Path) -> Any:
    from transformers.convert_slow_tokenizer import import_protobuf

    model = import_protobuf().ModelProto.FromString(data)
    pieces = [piece.piece for piece in model.pieces]
    if model.trainer_spec.model_type != 2 or pieces[:3] != [_UNKNOWN, _BOS, _EOS]:
        raise CircuitsError(
            f"{file} is a SentencePiece model, but not of Llama's kind (byte pairs after {_UNKNOWN}, {_BOS}, {_EOS}): "
            "use token ids, or put the tokenizer.json of the Hugging Face checkpoint beside it"
        )
    scores = {piece.piece: piece.score for piece in model.pieces}
    return byte_pairs({piece: i for i, piece in enumerate(pieces)}, scores)


def _tiktoken(data: bytes) -> Any:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    ranks = {}
    for line in data.splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token, validate=True)] = int(rank)

    class Converter(TikTokenConverter):  # type: ignore[misc]
        @staticmethod
        def load_tiktoken_bpe(_: Any) -> dict[bytes, int]:
            return ranks

    return Converter(extra_special_tokens=_llama3_specials()).converted()


def _llama3_specials() -> list[str]:
    """The 256 tokens that Llama 3's own code puts after its ranks."""
    names = ["begin_of_text", "end_of_text", *(f"reserved_special_token_{i}" for i in range(4))]
    names += ["start_header_id", "end_header_id", "reserved_special_token_4", "eot_id"]
    names += [f"reserved_special_token_{i}" for i in range(5, 251)]
    return [f"<|{name}|>" for name in names]


def _read(file: Path) -> list[tuple[str, float]] | None:
    """Pieces and scores; None when the file is none of this kind."""
    data = first_bytes(file, _LARGEST)
    pieces, at = [], 4
    while at + 8 <= len(data):
        score, length = struct.unpack_from("<fi", data, at)
        at += 8
        if not 0 <= length <= len(data) - at:
            return None
        pieces.append((data[at : at + length].decode("utf-8", errors="replace"), score))
        at += length
    return pieces if at == len(data) else None

"""SentencePiece BPE in llama.cpp's terms: spaces as ▁ and bytes as <0x..>.

`tokenizer.model` is SentencePiece's own file (protobuf ModelProto), the only one with the scores of the pieces.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distill.errors import DataError
from distill.models.gguf.special_tokens import BYTE, NORMAL, UNKNOWN
from distill.vocabulary.byte_map import SPACE
from distill.vocabulary.tokenizer_files import merge_pairs

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PIECES, TEXT, SCORE, KIND = 1, 1, 2, 3  # field numbers of ModelProto and of ModelProto.SentencePiece
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
HINT = "supported: SentencePiece BPE that writes spaces as ▁ and leaves the rest of a text as it is"


class Piece(NamedTuple):
    """A token of a vocabulary: text, score, and its kind as gguf.TokenType numbers it (SentencePiece's numbers too)."""

    text: str
    score: float
    kind: int


def space_prefix(path: Path, content: Mapping[str, Any], tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer puts a space before a text; DataError where it changes a text in other ways."""
    model = content["model"]
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges"):
        if model.get(key):
            raise DataError(f"{path}: BPE with {key} = {model[key]!r} cannot be exported", hint=HINT)
    normalizers = _parts_of(content.get("normalizer"), "normalizers")
    splits = _parts_of(content.get("pre_tokenizer"), "pretokenizers")
    for part in normalizers:
        replaces = part.get("type") == "Replace" and part.get("pattern") == {"String": " "}
        if not (replaces and part.get("content") == SPACE) and part != {"type": "Prepend", "prepend": SPACE}:
            raise DataError(f"{path}: normalizer {part.get('type')!r} cannot be exported", hint=HINT)
    for part in splits:
        spaces = part.get("type") == "Split" and part.get("pattern") == {"String": " "}
        whole = part.get("type") == "Metaspace" and not part.get("split", True)
        if not whole and not (spaces and normalizers):  # no space is left to split at
            raise DataError(f"{path}: pre-tokenizer {part.get('type')!r} cannot be exported", hint=HINT)
    if not normalizers and not splits:
        raise DataError(f"{path}: spaces are not written as {SPACE}, which llama.cpp would do", hint=HINT)
    return tokenizer.encode("a", add_special_tokens=False).tokens[0].startswith(SPACE)


def _parts_of(part: Any, key: str) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as the list of its steps; `key` is where a sequence holds them."""
    if part is None:
        return []
    return [inner for step in part[key] for inner in _parts_of(step, key)] if part.get("type") == "Sequence" else [part]


def pieces_of_merges(content: Mapping[str, Any]) -> dict[int, Piece]:
    """The pieces of a tokenizer.json without a `tokenizer.model`: a token's score is minus the rank of its first merge.

    llama.cpp merges the pair whose token has the highest score, Hugging Face the pair of the lowest rank.
    """
    model = content["model"]
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merge_pairs(model)):
        ranks.setdefault(left + right, rank)
    pieces = {}
    for token, number in model["vocab"].items():
        if BYTE_TOKEN.fullmatch(token):
            pieces[number] = Piece(token, 0.0, BYTE)
        elif token == (model.get("unk_token") or "<unk>"):
            pieces[number] = Piece(token, 0.0, UNKNOWN)
        else:  # a token that nothing merges into is a single character, found without a score
            pieces[number] = Piece(token, float(-ranks.get(token, len(ranks))), NORMAL)
    return pieces


def read_pieces(path: Path, vocabulary: Mapping[str, int]) -> dict[int, Piece] | None:
    """The pieces of a `tokenizer.model` by id; None where there is no such file.

    Raises DataError for a damaged file, and for one whose pieces are not those of tokenizer.json's `vocabulary`.
    """
    if not path.is_file():
        return None
    data = path.read_bytes()
    try:
        bodies = [value for number, kind, value in _fields(data) if (number, kind) == (PIECES, 2)]
        pieces = {number: _piece(bytes(body)) for number, body in enumerate(bodies)}
    except (ValueError, IndexError, struct.error, UnicodeDecodeError) as error:
        raise DataError(f"{path} is no SentencePiece model: {error}", "copy the tokenizer again") from None
    texts = {number: token for token, number in vocabulary.items()}
    for number, piece in pieces.items():
        if texts.get(number, piece.text) != piece.text:
            raise DataError(
                f"{path} has {piece.text!r} as token {number}, tokenizer.json {texts[number]!r}",
                "the two files are of different tokenizers: delete the one that is not the model's",
            )
    missing = sorted(set(texts) - set(pieces))
    pieces |= {number: Piece(texts[number], 0.0, NORMAL) for number in missing}
    return pieces


def _piece(body: bytes) -> Piece:
    text, score, kind = "", 0.0, NORMAL
    for number, _, value in _fields(body):
        if number == TEXT and isinstance(value, bytes):
            text = value.decode()
        elif number == SCORE and isinstance(value, bytes):
            score = struct.unpack("<f", value)[0]
        elif number == KIND and isinstance(value, int):
            kind = value
    return Piece(text, score, kind)


def _fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Number, wire type and value of each field: an integer for varints, else its bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield tag >> 3, kind, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind} at byte {at}")
        if at + size > len(data):
            raise ValueError("it is cut short")
        yield tag >> 3, kind, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError(f"a number at byte {at} is too long")

"""SentencePiece's own file, `tokenizer.model`, which alone holds the scores of pieces (protobuf ModelProto)."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from distill.errors import DataError
from distill.faults import reading

PIECES, TEXT, SCORE, KIND = 1, 1, 2, 3  # field numbers of ModelProto and of ModelProto.SentencePiece


class Piece(NamedTuple):
    """A token of a vocabulary: text, score, and its kind as gguf.TokenType numbers it (SentencePiece's numbers too)."""

    text: str
    score: float
    kind: int


def read_pieces(path: Path, vocabulary: Mapping[str, int]) -> dict[int, Piece] | None:
    """The pieces of a `tokenizer.model` by id; None where there is no such file.

    Raises DataError for a damaged file, and for one whose pieces are not those of tokenizer.json's `vocabulary`.
    """
    if not path.is_file():
        return None
    with reading(path):
        data = path.read_bytes()
    try:
        found = {number: _piece(body) for number, body in enumerate(_bodies(data))}
    except (ValueError, IndexError, struct.error, UnicodeDecodeError) as error:
        raise DataError(f"{path} is no SentencePiece model: {error}", "copy the tokenizer again") from None
    texts = {number: token for token, number in vocabulary.items()}
    for number, piece in found.items():
        if texts.get(number, piece.text) != piece.text:
            raise DataError(
                f"{path} has {piece.text!r} as token {number}, tokenizer.json {texts[number]!r}",
                "the two files are of different tokenizers: delete the one that is not the model's",
            )
    missing = sorted(set(texts) - set(found))
    found |= {number: Piece(texts[number], 0.0, 1) for number in missing}
    return found


def _bodies(data: bytes) -> Iterator[bytes]:
    for number, kind, value in _fields(data):
        if number == PIECES and kind == 2:
            yield bytes(value) if isinstance(value, bytes) else b""


def _piece(body: bytes) -> Piece:
    text, score, kind = "", 0.0, 1
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

"""SentencePiece BPE from tokenizer.json: spaces as ▁, bytes as <0x..>, and scores in place of merges."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.errors import DataError
from distill.export.tokens.pieces_file import Piece
from distill.vocabulary.byte_map import SPACE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL, UNKNOWN, BYTE = 1, 2, 6
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
HINT = "supported: SentencePiece BPE that writes spaces as ▁ and leaves the rest of a text as it is"


def space_prefix(path: Path, content: Mapping[str, Any], tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer puts a space before a text; DataError where it changes a text in other ways."""
    model = content["model"]
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges"):
        if model.get(key):
            raise DataError(f"{path}: BPE with {key} = {model[key]!r} cannot be exported", hint=HINT)
    normalizers = parts_of(content.get("normalizer"), "normalizers")
    splits = parts_of(content.get("pre_tokenizer"), "pretokenizers")
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


def parts_of(part: Any, key: str) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as the list of its steps; `key` is where a sequence holds them."""
    if part is None:
        return []
    return [inner for one in part[key] for inner in parts_of(one, key)] if part.get("type") == "Sequence" else [part]


def pieces_of_merges(content: Mapping[str, Any]) -> dict[int, Piece]:
    """The pieces of a tokenizer.json without a `tokenizer.model`: a token's score is minus the rank of its first merge.

    llama.cpp merges the pair whose token has the highest score, Hugging Face the pair of the lowest rank.
    """
    model = content["model"]
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model.get("merges") or []):
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        ranks.setdefault(left + right, rank)
    found = {}
    for token, number in model["vocab"].items():
        if BYTE_TOKEN.fullmatch(token):
            found[number] = Piece(token, 0.0, BYTE)
        elif token == (model.get("unk_token") or "<unk>"):
            found[number] = Piece(token, 0.0, UNKNOWN)
        else:  # a token that nothing merges into is a single character, found without a score
            found[number] = Piece(token, float(-ranks.get(token, len(ranks))), NORMAL)
    return found

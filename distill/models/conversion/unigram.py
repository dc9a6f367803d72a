"""Unigram SentencePiece (T5, ALBERT, XLNet) as llama.cpp's `t5` tokenizer: scores, normalisation, spaces.

llama.cpp has the same Viterbi search, and a normalisation of its own: a table of replacements (precompiled_charsmap),
spaces merged or not, a space before the text or not. Which of these is the tokenizer's own is found by what they do.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.errors import DataError
from distill.models.conversion.llama_tokenizer import GgufTokenizer, Spacing, same_ids
from distill.models.conversion.pieces import Piece, parts_of
from distill.models.gguf.special_tokens import NORMAL, UNKNOWN
from distill.vocabulary.tokenizer_files import table_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HINT = "supported: Unigram without byte fallback, with its spaces as ▁ and no normaliser but a table of replacements"
NORMALIZERS = ("Precompiled", "Replace", "Strip", "Prepend")  # what they do to spaces is found out
SPLITS = ("Metaspace", "WhitespaceSplit")


def unigram_pieces(path: Path, model: Mapping[str, Any]) -> dict[int, Piece]:
    """The pieces of a Unigram model by id, with their scores.

    Raises DataError for a model with byte fallback, or without an unknown token: llama.cpp would give a character
    without a token the unknown token's id.
    """
    if model.get("byte_fallback"):
        raise DataError(
            f"{path}: Unigram with byte fallback cannot be exported: llama.cpp's Unigram has none, and would give "
            "every character without a token of its own the unknown token",
            hint=HINT,
        )
    unknown, vocabulary = model.get("unk_id"), model.get("vocab") or []
    if not isinstance(unknown, int) or not 0 <= unknown < len(vocabulary):
        raise DataError(f"{path}: Unigram without an unknown token cannot be exported", hint=HINT)
    found = {}
    for number, entry in enumerate(vocabulary):
        if len(entry) != 2 or isinstance(entry[1], bool) or not isinstance(entry[1], int | float):
            raise DataError(f"{path} is damaged: token {number} has no score", "copy the tokenizer again")
        if "\0" in entry[0]:
            raise DataError(f"{path}: token {number} holds a NUL, which llama.cpp's Unigram cannot hold", hint=HINT)
        found[number] = Piece(entry[0], float(entry[1]), UNKNOWN if number == unknown else NORMAL)
    return found


def find_spacing(path: Path, content: Mapping[str, Any], tokenizer: Tokenizer, found: GgufTokenizer) -> Spacing:
    """How the tokenizer treats spaces, in llama.cpp's words: the first that gives its ids for all probe texts.

    Raises DataError where none does, or llama-cpp-python is not installed.
    """
    normalizers = parts_of(content.get("normalizer"), "normalizers")
    splits = parts_of(content.get("pre_tokenizer"), "pretokenizers")
    for kind, parts, known in (("normalizer", normalizers, NORMALIZERS), ("pre-tokenizer", splits, SPLITS)):
        for part in parts:
            if part.get("type") not in known:
                raise DataError(f"{path}: {kind} {part.get('type')!r} cannot be exported", hint=HINT)
    charsmap = _charsmap(path, normalizers)
    for prefix, merge in itertools.product((True, False), repeat=2):
        spacing = Spacing(prefix, merge, charsmap)
        if same_ids(tokenizer, replace(found, spacing=spacing)):
            return spacing
    raise DataError(f"{path}: llama.cpp's Unigram gives other ids on every treatment of spaces that it has", hint=HINT)


def _charsmap(path: Path, normalizers: list[dict[str, Any]]) -> bytes:
    """The table of replacements, b"" where there is none."""
    tables = [table_of(path, part) for part in normalizers if part.get("type") == "Precompiled"]
    if len(tables) > 1:
        raise DataError(f"{path}: a tokenizer with {len(tables)} tables of replacements cannot be exported", hint=HINT)
    return tables[0] if tables else b""

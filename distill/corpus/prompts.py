"""Prompts as token ids: the beginnings of documents, then later parts of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from distill.corpus.sources import Document
from distill.texts import Prompt

CHARACTERS_PER_TOKEN = 8  # more than any prompt needs; it bounds the text that is encoded for a prompt


def cut_prompts(
    documents: list[Document], encode: Callable[[str], list[int]], count: int, tokens: int, stride: int, seed: int
) -> list[Prompt]:
    """At most `count` prompts of exactly `tokens` ids each.

    All beginnings come before all second parts, and so on, each round in an order drawn from the seed, so that few
    prompts already cover many documents. A later part starts at a line, at least `stride` characters after the last.
    """
    candidates: list[tuple[int, bytes, Document, int]] = []
    for document in documents:
        offset, piece = 0, 0
        while offset < len(document.text):
            rank = hashlib.sha256(f"{seed}/{document.name}/{piece}".encode()).digest()
            candidates.append((piece, rank, document, offset))
            line = document.text.find("\n", offset + stride)
            if line < 0:
                break
            offset, piece = line + 1, piece + 1
    candidates.sort(key=lambda candidate: candidate[:2])
    prompts: list[Prompt] = []
    for _, _, document, offset in candidates:
        if len(prompts) == count:
            break
        ids = encode(document.text[offset : offset + tokens * CHARACTERS_PER_TOKEN])[:tokens]
        if len(ids) == tokens:
            prompts.append(Prompt(f"{document.name}@{offset}", ids, document.source))
    return prompts

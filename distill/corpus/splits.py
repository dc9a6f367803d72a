"""The split of a document, a function of its name alone."""

from __future__ import annotations

import hashlib
from typing import Literal

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


def split_of(name: str, validation: float, test: float) -> Split:
    """Split of the document called `name`, the same on every machine and in every version of the corpus.

    `validation` and `test` are the fractions of names (0 to 1) that go to those splits. Only the name is
    hashed, never the text or its rank, so a document that changes or moves among others keeps its split.
    """
    point = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
    if point < test:
        return "test"
    return "validation" if point < test + validation else "train"

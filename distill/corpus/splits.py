"""Which split a document belongs to, decided by its name alone."""

from __future__ import annotations

import hashlib
from typing import Literal

Split = Literal["train", "selection", "report"]
SPLITS: tuple[Split, ...] = ("train", "selection", "report")


def split_of(name: str, selection: float, report: float) -> Split:
    """Split of the document called `name`, the same on every machine and in every version of the corpus.

    `selection` and `report` are the fractions of names (0 to 1) that go to those splits. Only the name is
    hashed, never the text or its rank, so a document that changes or moves among others keeps its split.
    """
    point = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
    if point < report:
        return "report"
    return "selection" if point < report + selection else "train"

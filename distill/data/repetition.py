"""Which tokens of a text repeat what stood in it before: what a lookup can draft, and what a shallow draft forgets."""

from __future__ import annotations

from collections.abc import Sequence

REPEATED = 3  # tokens in a row that stood in the text before: the last of them is repeated
NEW, SEEN = "new", "repeated"


def repetition(ids: Sequence[int]) -> list[str]:
    """Whether each token ends REPEATED tokens that stood in the text before."""
    known: set[tuple[int, ...]] = set()
    found = []
    for place in range(len(ids)):
        last = tuple(ids[max(0, place - REPEATED + 1) : place + 1])
        found.append(SEEN if last in known else NEW)
        if len(last) == REPEATED:
            known.add(last)
    return found

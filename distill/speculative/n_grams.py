"""What stood earlier in the same text: whether the draft's best token is what followed the last tokens before.

Legend: n tokens of a match.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 6


class Earlier:
    """The places of every run of 1..LONGEST tokens in a context that only grows; `begin` forgets it."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], int] = {}
        self._read = 0

    def begin(self) -> None:
        """A new context."""
        self._next, self._read = {}, 0

    def read(self, context: Sequence[int]) -> None:
        """Note what follows every run of the context, later places over earlier ones."""
        for end in range(max(self._read, 1), len(context)):
            for size in range(1, min(LONGEST, end) + 1):
                self._next[tuple(context[end - size : end])] = context[end]
        self._read = len(context)

    def match(self, tail: Sequence[int], token: int) -> int:
        """Length of the longest run at the end of `tail` that was read before: positive where `token` followed it then,
        negative where another did, 0 where none was."""
        for size in range(min(LONGEST, len(tail)), 0, -1):
            followed = self._next.get(tuple(tail[-size:]))
            if followed is not None:
                return size if followed == token else -size
        return 0

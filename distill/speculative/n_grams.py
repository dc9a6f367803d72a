"""N-grams of one text: where the last tokens occurred before in it, and which tokens followed them there."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 6  # tokens of an n-gram that features look for


class NGramIndex:
    """The latest place of every n-gram of `shortest`..`longest` tokens in a text that only grows."""

    def __init__(self, longest: int = LONGEST, shortest: int = 1) -> None:
        self.longest, self.shortest = longest, shortest
        self._text: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}  # index of the token after the n-gram

    def begin(self) -> None:
        """Forget the text."""
        self._text, self._places = [], {}

    def read(self, text: Sequence[int]) -> None:
        """Index what `text` has beyond the part read before; later places replace older ones.

        The n-grams that end the text are left out, because no token follows them yet.
        """
        known = len(self._text)
        self._text += text[known:]
        for place in range(max(known, 1), len(self._text)):
            for size in range(self.shortest, min(self.longest, place) + 1):
                self._places[tuple(self._text[place - size : place])] = place

    def find(self, tail: Sequence[int]) -> tuple[int, int] | None:
        """(length, place after it) of the longest indexed n-gram that ends `tail`; None where none does."""
        for size in range(min(self.longest, len(tail)), self.shortest - 1, -1):
            place = self._places.get(tuple(tail[-size:]))
            if place is not None:
                return size, place
        return None

    def continuation(self, tail: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that followed the longest indexed n-gram at the end of `tail`."""
        found = self.find(tail)
        return [] if found is None else self._text[found[1] : found[1] + count]

    def match(self, tail: Sequence[int], token: int) -> int:
        """Length of the longest indexed n-gram that ends `tail`: positive where `token` followed it, negative where
        another token did; 0 where none is indexed."""
        found = self.find(tail)
        if found is None:
            return 0
        size, place = found
        return size if self._text[place] == token else -size

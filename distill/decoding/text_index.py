"""An index of a text that grows: its longest ending that occurred before, and which tokens followed short contexts."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 4  # Tokens of the longest context whose followers are counted.


class TextIndex:
    """A suffix automaton (Blumer et al. 1985) whose states count the tokens that followed them.

    A state stands for strings that end at the same places of the text, so that the same tokens follow them. The
    automaton has at most two states a token, and reading a token takes O(1) amortised steps and at most LONGEST counts.

    `match` is the length of the longest ending of the text that occurred before, 0 if none did. `place` is the index
    of the token after that occurrence. If there are several, it is the one where the ending was found last, or else the
    first.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget the text."""
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length = [-1], [0]
        self._end = [0]  # Index of the token after a state's strings.
        self._counts: list[dict[int, int]] = [{}]  # Tokens that followed a state's strings, in order of appearance.
        self._last = self.match = self.place = 0
        self._short, self._short_length = 0, 0  # State and length of the text's ending of at most LONGEST tokens.

    def read(self, text: Sequence[int]) -> None:
        """Read the part of `text` that was not read before."""
        for token in text[len(self.text) :]:
            self._add(token)

    def _add(self, token: int) -> None:
        self._count(token)
        self.text.append(token)
        new = self._state({}, self._length[self._last] + 1, 0, len(self.text), {})
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state >= 0:
            shorter = self._next[state][token]
            if self._length[shorter] > self._length[state] + 1:
                shorter = self._split(shorter, state, token)
            self._link[new] = shorter
        self._last, longest = new, self._link[new]
        self.match, self.place = self._length[longest], self._end[longest]
        self._end[longest] = len(self.text)
        self._short = self._next[self._short][token]
        self._short_length = min(self._short_length + 1, LONGEST)
        while self._short_length <= self._length[self._link[self._short]] and self._short:
            self._short = self._link[self._short]

    def _split(self, whole: int, state: int, token: int) -> int:
        """Part the strings of a state: the shorter ones end at the text's new end too, and become a state of their own.

        `state` leads to `whole` by `token`. Returns the new state.
        """
        following, counts = dict(self._next[whole]), dict(self._counts[whole])
        parted = self._state(following, self._length[state] + 1, self._link[whole], self._end[whole], counts)
        while state >= 0 and self._next[state].get(token) == whole:
            self._next[state][token] = parted
            state = self._link[state]
        self._link[whole] = parted
        return parted

    def _state(self, following: dict[int, int], length: int, link: int, end: int, counts: dict[int, int]) -> int:
        self._next.append(following)
        self._length.append(length)
        self._link.append(link)
        self._end.append(end)
        self._counts.append(counts)
        return len(self._next) - 1

    def _count(self, token: int) -> None:
        """Count a token for each ending of up to LONGEST tokens that it follows."""
        state = self._short
        while state:
            counts = self._counts[state]
            counts[token] = counts.get(token, 0) + 1
            state = self._link[state]

    def continuation(self, count: int) -> list[int]:
        """`count` tokens from `place` on. Beyond the text's end they repeat, as they would if all were right."""
        following = self.text[self.place : self.place + count]
        return [following[i % len(following)] for i in range(count)] if following else []

    def followers(self, tail: Sequence[int]) -> list[dict[int, int]]:
        """Counts of the tokens that followed the last 1, 2, … tokens of `tail`, up to LONGEST, as far as any did."""
        state = length = 0
        for token in tail[-LONGEST:]:
            while state and token not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if token in self._next[state]:
                state, length = self._next[state][token], length + 1
        counts: list[dict[int, int]] = []
        while state:
            shorter = self._length[self._link[state]]
            if self._counts[state]:  # Else this ending occurs at the text's end alone.
                counts += [self._counts[state]] * (length - shorter)
            state, length = self._link[state], shorter
        return counts[::-1]

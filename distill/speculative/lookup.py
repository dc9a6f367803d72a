"""Prompt lookup: the tokens that followed the context's last ones before in the same text; no model.

Legend: m length of a match, E expected tokens of a round, T target, λ tokens per second in the long run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from distill.speculative.costs.curve import StepCosts
from distill.speculative.proposal import Proposal


class SuffixIndex:
    """The longest ending of a growing text that occurred before in it: a suffix automaton (Blumer et al. 1985).

    `match` is its length, 0 where none did, and `place` the index of the token after it: of several places the one
    where it was found last, or else the first. A token is read in O(1) amortised, whatever the text; the automaton has
    at most two states a token.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget the text."""
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._end = [-1], [0], [0]  # _end: index of the token after the state's strings
        self._last = self.match = self.place = 0

    def read(self, text: Sequence[int]) -> None:
        """Read what `text` has beyond the part read before."""
        for token in text[len(self.text) :]:
            self._add(token)

    def _add(self, token: int) -> None:
        self.text.append(token)
        new = self._state({}, self._length[self._last] + 1, 0, len(self.text))
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state >= 0:
            found = self._next[state][token]
            if self._length[found] > self._length[state] + 1:
                # Its shorter strings end here too, the longer ones do not: they part.
                found, whole = self._state(dict(self._next[found]), self._length[state] + 1, self._link[found]), found
                self._end[found] = self._end[whole]
                while state >= 0 and self._next[state].get(token) == whole:
                    self._next[state][token] = found
                    state = self._link[state]
                self._link[whole] = found
            self._link[new] = found
        self._last, longest = new, self._link[new]
        self.match, self.place = self._length[longest], self._end[longest]
        self._end[longest] = len(self.text)

    def _state(self, following: dict[int, int], length: int, link: int, end: int = 0) -> int:
        self._next.append(following)
        self._length.append(length)
        self._link.append(link)
        self._end.append(end)
        return len(self._next) - 1

    def continuation(self, count: int) -> list[int]:
        """`count` tokens from `place` on; behind the text's end they repeat, as they would if all were right."""
        following = self.text[self.place : self.place + count]
        return [following[i % len(following)] for i in range(count)] if following else []


# How often a looked-up token was right behind a match of m tokens, m = 1.. and longer: 583 answers of SmolLM2, sampled.
USUAL = (0.20, 0.45, 0.56, 0.59, 0.65, 0.73, 0.81, 0.88)
WEIGHT = 8.0  # tokens that USUAL counts for, beside those of the text
KEEP = 0.995  # of earlier counts, with each new one
MEMORY = 400.0  # tokens after which a token counts half in λ


class LookupPrice:
    """How many looked-up tokens are worth verifying: those of greatest E − λ·T(n + 1), from measured costs.

    The token behind a match of m, if it is right, makes a match of m + 1. The probability of each length is counted in
    this session, beginning with USUAL. `rival` is what the drafter gives in a mean round that is asked where this one
    proposes nothing; plain decoding gives 1 − λ·T(1).
    """

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self.rival = float("-inf")
        self._right = [WEIGHT * usual for usual in USUAL]
        self._judged = [WEIGHT] * len(USUAL)
        self._tokens, self._seconds = 16.0, 16.0 * costs.target[0]

    @property
    def rate(self) -> float:
        """λ."""
        return self._tokens / self._seconds

    def chance(self, match: int) -> float:
        """The probability that the token behind a match of this length is right."""
        place = min(match, len(USUAL)) - 1
        return self._right[place] / self._judged[place]

    def best(self, match: int, limit: int) -> int:
        """How many of `limit` tokens behind a match are verified; 0: none is worth it."""
        target, rate = self.costs.target, self.rate
        best, count = max(1 - rate * target[0], self.rival), 0
        expected = survival = 1.0
        for n in range(1, min(limit, len(target) - 1) + 1):
            survival *= self.chance(match + n - 1)
            expected += survival
            if expected - rate * target[n] > best:
                best, count = expected - rate * target[n], n
        return count

    def observe(self, match: int, drafted: int, accepted: int, seconds: float) -> None:
        """A round of this drafter."""
        for place in range(min(drafted, accepted + 1)):
            row = min(match + place, len(USUAL)) - 1
            self._right[row] = KEEP * self._right[row] + (place < accepted)
            self._judged[row] = KEEP * self._judged[row] + 1
        self._learn(accepted + 1, seconds)

    def passed(self, accepted: int, seconds: float) -> None:
        """A round of the other drafter."""
        self._learn(accepted + 1, seconds)
        value = accepted + 1 - self.rate * seconds
        self.rival = value if self.rival == float("-inf") else self.rival + 0.05 * (value - self.rival)

    def _learn(self, tokens: int, seconds: float) -> None:
        keep = 0.5 ** (tokens / MEMORY)
        self._tokens, self._seconds = keep * self._tokens + tokens, keep * self._seconds + seconds


class LookupDrafter:
    """What followed the longest match before (Saxena 2023), at most `length` tokens behind at least `shortest`; with a
    `price` as many as pay."""

    kind = "deterministic"
    tree = False

    def __init__(self, length: int = 8, shortest: int = 1, price: LookupPrice | None = None) -> None:
        self.length, self.shortest, self.price = length, shortest, price
        self._index = SuffixIndex()

    def begin(self, prompt: Sequence[int]) -> None:
        """Forget the last context."""
        self._index.begin()

    def room(self, length: int) -> int:
        """Always the full length: there is no context that could be full."""
        return self.length

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """The tokens that followed last time, up to an end token."""
        self._index.read(context)
        match = self._index.match
        count = min(limit, self.length) if match >= self.shortest else 0
        if count > 0 and self.price is not None:
            count = self.price.best(match, count)
        tokens = self._index.continuation(count) if count > 0 else []
        stop = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
        return Proposal.chain(tokens[:stop])

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """Learn what rounds pay; the index reads accepted tokens with the next proposal."""
        if self.price is not None:
            self.price.observe(self._index.match, len(proposal.tokens), count, seconds)

    def passed(self, count: int, seconds: float) -> None:
        """Learn what a round gave whose tokens another drafter proposed."""
        if self.price is not None:
            self.price.passed(count, seconds)

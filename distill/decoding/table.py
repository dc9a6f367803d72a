"""Drafting from a table of n-grams: a tree of the likeliest tokens by counts of the target's own texts and of this one.

No model runs, so that drafting costs less than a millisecond a round. Legend: n nodes, T target, E expected tokens of a
round, λ tokens per second in the long run.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from distill.decoding.calibration import Calibration, Recorded
from distill.decoding.drafters import NOTHING, LookupPrice, Worth
from distill.decoding.lengths import ROOT, Features, Proposal
from distill.decoding.ngrams import ORDER, Guess, Mixture, NGramTable
from distill.decoding.trees import Leaves, calibrated
from distill.engines.model import SPARE_NODES

BRANCHING = 8  # children of a node that are looked at


def features_of_guess(guess: Guess) -> Features:
    """What a calibration reads of a guess."""
    top, second = (*guess.chances[:2], 0.0, 0.0)[:2]
    return Features(top, second, 0.0, guess.known, guess.count)


@dataclass(frozen=True)
class TableCalibration:
    """The chance that a node's likeliest token is right, and where it is wrong, that one of the others looked at is.

    Without `others` these share the rest as in the mixture, which promises too much: often none of them is right.
    """

    first: Calibration
    others: Calibration | None = None

    def chances(self, guess: Guess, position: int) -> list[float]:
        """The chance of each token of a guess, `position` nodes below the root."""
        features, rest = features_of_guess(guess), sum(guess.chances[1:])
        if self.others is None or not rest:
            return calibrated(guess.chances, features, position, self.first)
        first = self.first.accept(position, features)
        scale = (1 - first) * self.others.accept(position, features) / rest
        return [first, *[chance * scale for chance in guess.chances[1:]]]


def names_of_fits(sampled: bool) -> tuple[str, str]:
    """What a table's two calibrations are called among the others: fitted on drawn texts, or on greedy ones."""
    return ("table, sampled", "table, others, sampled") if sampled else ("table", "table, others")


class _Children(NamedTuple):
    """The children of a node, best first, and what is needed to grow the tree below them."""

    parent: int  # the node's number in the tree
    depth: int  # of the children
    value: float  # the chance that the node and all above it are accepted
    tokens: list[int]
    chances: Sequence[float]
    tail: tuple[int, ...]  # the last tokens before them
    place: Sequence[int]  # theirs in the table

    def entry(self, rank: int, number: int) -> _Entry:
        return -self.value * self.chances[rank], rank, number, self


# A node that may join the tree, best first: minus its value; its rank and the number of the entry break ties.
_Entry = tuple[float, int, int, _Children]


class TableDrafter:
    """The `nodes` likeliest nodes by a mixture of counts, at most `depth` deep.

    With a `price` as many of them as are worth verifying: those of greatest E − λ·T(n + 1). `max_leaves` 1 makes
    chains, for models that take no trees.
    """

    kind = "deterministic"

    def __init__(
        self,
        table: NGramTable | None,
        nodes: int,
        depth: int,
        *,
        calibration: TableCalibration | None = None,
        price: LookupPrice | None = None,
        max_leaves: int = sys.maxsize,
    ) -> None:
        self.mixture, self.nodes, self.depth = Mixture(table), nodes, depth
        self.calibration, self.price, self.max_leaves = calibration, price, max_leaves
        self.tree = max_leaves > 1

    def begin(self, prompt: Sequence[int]) -> None:
        """Forget the last text; the prompt is read with the first proposal."""
        self.mixture.begin()

    def room(self, length: int) -> int:
        """Always the full depth: there is no context that could be full."""
        return self.depth

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """The likeliest nodes, parents first; an end token has no children."""
        self.mixture.read(context)
        # The target holds a path of limit + 1 nodes and SPARE_NODES beside it; the context's last token is one of them.
        most = min(self.nodes, limit + SPARE_NODES - 2) if self.tree else min(self.nodes, limit)
        if self.price is not None:
            most = min(most, len(self.price.costs.target) - 1)
        depth = min(self.depth, limit)
        if most <= 0 or depth <= 0:
            return NOTHING
        leaves, value = Leaves(self.max_leaves), Worth(self.price, most)
        tokens, parents = list[int](), list[int]()
        root = self._children(ROOT, 1, 1.0, self.mixture.tail, self.mixture.place)
        pool, entries = [root.entry(0, 0)] if root.tokens else [], 1
        while pool and len(tokens) < most and value.may_rise(len(tokens), -pool[0][0]):
            loss, rank, _, among = heapq.heappop(pool)
            if rank + 1 < len(among.tokens):
                heapq.heappush(pool, among.entry(rank + 1, entries))
                entries += 1
            token = among.tokens[rank]
            if not leaves.take(among.parent):
                continue
            tokens.append(token)
            parents.append(among.parent)
            value.add(len(tokens), -loss)
            if len(tokens) == most or not value.may_rise(len(tokens), -loss):
                break  # no node that is left has a better chance than this one
            if among.depth < depth and token not in ends:
                place = self.mixture.after(among.place, token)
                below = (*among.tail, token)[-ORDER:]
                children = self._children(len(tokens) - 1, among.depth + 1, -loss, below, place)
                if children.tokens:
                    heapq.heappush(pool, children.entry(0, entries))
                    entries += 1
        return Proposal(tokens[: value.count], parents[: value.count])

    def _children(
        self, parent: int, depth: int, value: float, tail: tuple[int, ...], place: Sequence[int]
    ) -> _Children:
        guess = self.mixture.guess(tail, place, BRANCHING)
        tokens, chances = guess.tokens, guess.chances
        if self.calibration is not None and tokens:
            chances = self.calibration.chances(guess, depth - 1)
            if chances[0] < max(chances):
                ranks = sorted(range(len(tokens)), key=lambda rank: -chances[rank])
                tokens, chances = [tokens[rank] for rank in ranks], [chances[rank] for rank in ranks]
        return _Children(parent, depth, value, tokens, chances, tail, place)

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """The round's tokens are counted with the next proposal; what rounds give the price is told by its owner."""


def guesses(
    table: NGramTable | None, prompt: Sequence[int], new: Sequence[int]
) -> tuple[list[Recorded], list[Recorded]]:
    """What the counts made of each token `new` that the target wrote after a prompt.

    Rounds in which the likeliest token was drafted, and the likeliest after it; and for those in which the first was
    wrong, whether another one that is looked at was right.
    """
    first, others = list[Recorded](), list[Recorded]()
    mixture, text = Mixture(table), [*prompt, *new]
    for end in range(len(prompt), len(text)):
        mixture.read(text[:end])
        tail, place = mixture.tail, mixture.place
        guess = mixture.guess(tail, place, BRANCHING)
        if not guess.tokens:
            continue
        features, right = [features_of_guess(guess)], int(guess.tokens[0] == text[end])
        if not right and len(guess.tokens) > 1:
            others.append(Recorded(features, int(text[end] in guess.tokens)))
        if right and end + 1 < len(text):
            after = mixture.guess((*tail, text[end])[-ORDER:], mixture.after(place, text[end]), BRANCHING)
            features += [features_of_guess(after)] if after.tokens else []
            right += after.tokens[:1] == [text[end + 1]]
        first.append(Recorded(features, right))
    return first, others

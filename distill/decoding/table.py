"""Drafting from a table of n-grams: a tree of the likeliest tokens by counts of the target's own texts and of this one.

No model runs, so that drafting costs less than a millisecond a round. Legend: n nodes, T target, E expected tokens of a
round, λ tokens per second in the long run.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from distill.decoding.calibration import Calibration, Recorded
from distill.decoding.drafters import NOTHING, LookupPrice
from distill.decoding.lengths import ROOT, Features, Proposal
from distill.decoding.ngrams import ORDER, Guess, Mixture, NGramTable
from distill.decoding.trees import calibrated
from distill.engines.model import SPARE_NODES

TABLE = "table"  # its calibration among the others
BRANCHING = 8  # children of a node that are looked at


def features_of_guess(guess: Guess) -> Features:
    """What a calibration reads of a guess."""
    top, second = (*guess.chances[:2], 0.0, 0.0)[:2]
    return Features(top, second, 0.0, guess.known, guess.count)


@dataclass(frozen=True, order=True)
class _Node:
    """A node that may join the tree, best first; `number` breaks ties by the order of finding."""

    loss: float  # minus the chance that it and all above it are accepted
    number: int
    parent: int = field(compare=False)
    depth: int = field(compare=False)
    token: int = field(compare=False)
    tail: tuple[int, ...] = field(compare=False)  # the last tokens before it
    place: list[int] = field(compare=False)  # theirs in the table


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
        calibration: Calibration | None = None,
        price: LookupPrice | None = None,
        max_leaves: int = sys.maxsize,
    ) -> None:
        self.mixture, self.nodes, self.depth = Mixture(table), nodes, depth
        self.calibration, self.price, self.max_leaves = calibration, price, max_leaves

    @property
    def tree(self) -> bool:
        """Whether its proposals branch."""
        return self.max_leaves > 1

    def begin(self, prompt: Sequence[int]) -> None:
        """Forget the last text; the prompt is read with the first proposal."""
        self.mixture.begin()

    def room(self, length: int) -> int:
        """Always the full depth: there is no context that could be full."""
        return self.depth

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """The likeliest nodes, parents first; an end token has no children."""
        self.mixture.own.read(context)
        # The target holds a path of limit + 1 nodes and SPARE_NODES beside it; the context's last token is one of them.
        most = min(self.nodes, limit + SPARE_NODES - 2) if self.tree else min(self.nodes, limit)
        if self.price is not None:
            most = min(most, len(self.price.costs.target) - 1)
        depth = min(self.depth, limit)
        if most <= 0 or depth <= 0:
            return NOTHING
        tail = tuple(context[-ORDER:])
        table = self.mixture.table
        pool = self._children(
            _Node(-1.0, 0, ROOT, 0, -1, (), []), ROOT, tail, [] if table is None else table.place(tail)
        )
        grown = _Tree(self.max_leaves)
        value = _Value(self.price, most)
        heapq.heapify(pool)
        while pool and len(grown.tokens) < most and value.may_rise(len(grown.tokens), -pool[0].loss):
            node = heapq.heappop(pool)
            if not grown.join(node):
                continue
            value.add(len(grown.tokens), -node.loss)
            if node.depth < depth and node.token not in ends:
                after = (*node.tail, node.token)[-ORDER:]
                place = [] if table is None else table.after(node.place, node.token)
                for child in self._children(node, len(grown.tokens) - 1, after, place):
                    heapq.heappush(pool, child)
        return Proposal(grown.tokens[: value.count], grown.parents[: value.count])

    def _children(self, node: _Node, own: int, tail: tuple[int, ...], place: list[int]) -> list[_Node]:
        """The likeliest children of a node that is number `own` of the tree."""
        guess = self.mixture.guess(tail, place, BRANCHING)
        if not guess.tokens:
            return []
        chances: Sequence[float] = guess.chances
        if self.calibration is not None:
            chances = calibrated(chances, features_of_guess(guess), node.depth, self.calibration)
        return [
            _Node(node.loss * chance, rank, own, node.depth + 1, token, tail, place)
            for rank, (token, chance) in enumerate(zip(guess.tokens, chances, strict=True))
        ]

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """The round's tokens are counted with the next proposal; what rounds give the price is told by its owner."""


class _Tree:
    """The nodes that joined, parents first, with at most `max_leaves` leaves."""

    def __init__(self, max_leaves: int) -> None:
        self._max_leaves, self._leaves, self._inner = max_leaves, 0, set[int]()
        self.tokens: list[int] = []
        self.parents: list[int] = []

    def join(self, node: _Node) -> bool:
        """Add a node, unless it makes a leaf too many."""
        more = node.parent == ROOT or node.parent in self._inner
        if self._leaves + more > self._max_leaves:
            return False
        self._leaves += more
        self._inner.add(node.parent)
        self.tokens.append(node.token)
        self.parents.append(node.parent)
        return True


class _Value:
    """How many of the nodes found so far are worth verifying; without a price, all."""

    def __init__(self, price: LookupPrice | None, most: int) -> None:
        self._price, self._most = price, most
        self._expected, self.count = 1.0, 0
        self._best = float("-inf")
        if price is not None:
            self._best = max(1 - price.rate * price.costs.target[0], price.rival)

    def _of(self, nodes: int, expected: float) -> float:
        assert self._price is not None
        return expected - self._price.rate * self._price.costs.target[nodes]

    def may_rise(self, nodes: int, chance: float) -> bool:
        """Whether more than `nodes` nodes could be worth more, if each had the chance of the next one."""
        if self._price is None:
            return True
        return any(
            self._of(n, self._expected + (n - nodes) * chance) > self._best for n in range(nodes + 1, self._most + 1)
        )

    def add(self, nodes: int, chance: float) -> None:
        """Another node is there, `nodes` in all."""
        self._expected += chance
        if self._price is None:
            self.count = nodes
        elif (value := self._of(nodes, self._expected)) > self._best:
            self._best, self.count = value, nodes


def guesses(table: NGramTable | None, prompt: Sequence[int], new: Sequence[int]) -> list[Recorded]:
    """A round for each token `new` that the target wrote after a prompt: whether it was the likeliest by the counts."""
    rounds: list[Recorded] = []
    mixture, text = Mixture(table), [*prompt, *new]
    for end in range(len(prompt), len(text)):
        mixture.own.read(text[:end])
        tail = text[max(end - ORDER, 0) : end]
        guess = mixture.guess(tail, [] if table is None else table.place(tail), 2)
        if guess.tokens:
            rounds.append(Recorded((features_of_guess(guess),), int(guess.tokens[0] == text[end])))
    return rounds

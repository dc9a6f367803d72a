"""The drafter that reads a table of n-grams: a tree of the likeliest tokens by counts of the target's own texts and of
this one. No model runs, so that drafting costs less than a millisecond a round.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import NamedTuple

from distill.decoding.drafters import NOTHING
from distill.decoding.lengths import Drafting, Fixed, LengthRule, Mean
from distill.decoding.ngrams import ORDER, Mixture, NGramTable
from distill.decoding.proposals import Proposal
from distill.decoding.trees import NO_CHOICES, Choices, best_first, by_chance, corrected
from distill.engines.model import SPARE_NODES

BRANCHING = 8  # children of a node that are looked at


class _Place(NamedTuple):
    """Where a tree of a table has come: the last tokens, their place in the table, and how many nodes are above."""

    tail: tuple[int, ...]
    place: Sequence[int]
    depth: int


class TableDrafter:
    """The likeliest nodes by a mixture of counts: at most `nodes`, on paths of at most `longest` tokens, and as many as
    the rule verifies. The text tells the rule how often they are right, drafted or not.

    `max_leaves` 1 makes chains, for models that take no trees.
    """

    def __init__(
        self,
        table: NGramTable | None,
        nodes: int,
        longest: int,
        *,
        rule: LengthRule | None = None,
        max_leaves: int = sys.maxsize,
    ) -> None:
        self.mixture, self.nodes, self.longest = Mixture(table), nodes, longest
        self.rule, self.max_leaves = rule or Fixed(longest), max_leaves
        self.tree = max_leaves > 1
        # Of the nodes looked at behind `_length` tokens, by depth and last tokens.
        self._guessed: dict[tuple[int, tuple[int, ...]], Choices] = {}
        self._length = 0
        self._drafting = Drafting()
        self._others = Mean(0.5)  # how often one of the others looked at is right if the likeliest is not

    def begin(self, prompt: Sequence[int]) -> None:
        """Forget the last text; the prompt is read with the first proposal."""
        self.mixture.begin()
        self._guessed, self._length = {}, len(prompt)

    def room(self, length: int) -> int:
        """Always the full length: there is no context that could be full."""
        return self.longest

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """The likeliest nodes, parents first; an end token has no children."""
        self._drafting = Drafting(left=limit)
        self._judge(context)
        self.mixture.read(context)
        # The target holds a path of limit + 1 nodes and SPARE_NODES beside it; the context's last token is one of them.
        most = min(self.nodes, limit + SPARE_NODES - 2) if self.tree else min(self.nodes, limit)
        longest = min(self.longest, limit)
        if most <= 0 or longest <= 0:
            return NOTHING

        def below(place: _Place, token: int) -> Choices:
            if token in ends:
                return NO_CHOICES
            tail = (*place.tail, token)[-ORDER:]
            return self._choices(_Place(tail, self.mixture.after(place.place, token), place.depth + 1))

        root = self._choices(_Place(self.mixture.tail, self.mixture.place, 0))
        grown = best_first(root, below, most, longest, self.rule, self._drafting, self.max_leaves)
        self._drafting.chances = grown.chances
        grown.size = self.rule.size(self._drafting)
        return grown.proposal()

    def _choices(self, place: _Place) -> Choices:
        guess = self.mixture.guess(place.tail, place.place, BRANCHING)
        first = self.rule.chance(place.depth, guess.chances[0]) if guess.chances else 0.0
        chances = corrected(guess.chances, first, (1 - first) * self._others.value)
        choices = by_chance(guess.tokens, chances, place, guess.chances)
        self._guessed[place.depth, place.tail] = choices
        return choices

    def _judge(self, context: Sequence[int]) -> None:
        """Note how good the counts were for the text since the last round, drafted or not, as far as was looked."""
        for depth, end in enumerate(range(self._length, len(context))):
            choices = self._guessed.get((depth, tuple(context[max(end - ORDER, 0) : end])))
            if choices is None or not choices.tokens:
                break
            right = choices.best == context[end]
            self._drafting.judged.append((depth, choices.probability, float(right)))
            if not right:
                self._others.add(float(context[end] in choices.tokens))
        self._guessed, self._length = {}, len(context)

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """Let the rule learn; accepted tokens are counted with the next proposal."""
        drafting, self._drafting = self._drafting, Drafting()  # A round without room drafts nothing to observe again.
        self.rule.observe(drafting, len(proposal.tokens), count, seconds)

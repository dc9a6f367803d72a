"""The drafter that reads a table of n-grams: a tree of the likeliest tokens by counts of the target's own texts and of
this one. No model runs, so that drafting costs less than a millisecond a round.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from distill.decoding.calibration import Calibration, Correction, Recorded
from distill.decoding.drafters import NOTHING
from distill.decoding.lengths import Features, Proposal
from distill.decoding.ngrams import ORDER, Guess, Mixture, NGramTable
from distill.decoding.trees import Choices, best_first, by_chance, calibrated
from distill.decoding.worth import WITH_CALIBRATION, WITHOUT_CALIBRATION, Losses, Size, Worth
from distill.engines.model import SPARE_NODES
from distill.sampler import Sampler

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


class _Place(NamedTuple):
    """Where a tree of a table has come: the last tokens, their place in the table, and how many nodes are above."""

    tail: tuple[int, ...]
    place: Sequence[int]
    depth: int


class TableDrafter:
    """The `nodes` likeliest nodes by a mixture of counts, of at most `longest` tokens on a path.

    By its `worth` as many of them as are worth verifying, at chances that this session's text corrects, drafted or not,
    and none where that has lost more than `Losses` allows. `max_leaves` 1 makes chains, for models that take no trees.
    """

    def __init__(
        self,
        table: NGramTable | None,
        nodes: int,
        longest: int,
        *,
        calibration: TableCalibration | None = None,
        worth: Worth | None = None,
        max_leaves: int = sys.maxsize,
    ) -> None:
        self.mixture, self.nodes, self.longest = Mixture(table), nodes, longest
        self.calibration, self.worth, self.max_leaves = calibration, worth, max_leaves
        self.tree = max_leaves > 1
        self._losses = Losses()
        self._correction = Correction(WITHOUT_CALIBRATION if calibration is None else WITH_CALIBRATION)
        # Of the nodes looked at behind `_length` tokens, by depth and last tokens: the likeliest next one, its chance.
        self._guessed: dict[tuple[int, tuple[int, ...]], tuple[int, float]] = {}
        self._length = 0

    def begin(self, prompt: Sequence[int]) -> None:
        """Forget the last text; the prompt is read with the first proposal."""
        self.mixture.begin()
        self._guessed, self._length = {}, len(prompt)

    def room(self, length: int) -> int:
        """Always the full length: there is no context that could be full."""
        return self.longest

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """The likeliest nodes, parents first; an end token has no children."""
        if self.worth is not None:
            self._judge(context)
        self.mixture.read(context)
        # The target holds a path of limit + 1 nodes and SPARE_NODES beside it; the context's last token is one of them.
        most = min(self.nodes, limit + SPARE_NODES - 2) if self.tree else min(self.nodes, limit)
        if self.worth is not None:
            most = min(most, len(self.worth.costs.undrafted) - 1)
        longest = min(self.longest, limit)
        if most <= 0 or longest <= 0:
            return NOTHING
        if not self._losses.affordable():
            most = 0  # the tree is grown all the same: its nodes tell how good the counts are

        def below(place: _Place, token: int) -> Choices:
            if token in ends:
                return Choices([], [])
            tail = (*place.tail, token)[-ORDER:]
            return self._choices(_Place(tail, self.mixture.after(place.place, token), place.depth + 1))

        root = self._choices(_Place(self.mixture.tail, self.mixture.place, 0))
        return best_first(root, below, most, longest, Size(self.worth, most), self.max_leaves).proposal()

    def _choices(self, place: _Place) -> Choices:
        guess = self.mixture.guess(place.tail, place.place, BRANCHING)
        chances = guess.chances
        if self.calibration is not None and guess.tokens:
            chances = self.calibration.chances(guess, place.depth)
        if self.worth is not None and guess.tokens:
            first = chances[0]
            self._guessed[place.depth, place.tail] = guess.tokens[0], first
            corrected = self._correction.probability(first)
            scale = (1 - corrected) / (1 - first) if first < 1 else 0.0
            chances = [corrected, *[chance * scale for chance in chances[1:]]]
        return by_chance(guess.tokens, chances, place)

    def _judge(self, context: Sequence[int]) -> None:
        """Learn from the text since the last round, drafted or not, as far as its nodes were looked at."""
        new = range(self._length, len(context))
        for depth, end in enumerate(new):
            found = self._guessed.get((depth, tuple(context[max(end - ORDER, 0) : end])))
            if found is None:
                break
            token, chance = found
            self._correction.learn(chance, token == context[end])
        self._correction.age(len(new))
        self._losses.age(len(new))
        self._guessed, self._length = {}, len(context)

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """Learn what rounds give; their tokens are counted with the next proposal."""
        if self.worth is not None:
            self._losses.learn(self.worth, len(proposal.tokens), count + 1, seconds)


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


def table_calibration(calibrations: Mapping[str, Calibration], sampler: Sampler) -> TableCalibration | None:
    """A table's calibration on texts of this sampler; on greedy ones where there is no other, None without both."""
    for sampled in (True, False) if sampler.temperature else (False,):
        first, others = (calibrations.get(name) for name in names_of_fits(sampled))
        if first is not None:
            return TableCalibration(first, others)
    return None

"""Roughly the best a length rule can do with calibrated acceptances: optimal stopping, solved backwards on a grid.

A yardstick for `lengths.py`, and no strict bound: the chain is a model. Of a round the rule knows how many
tokens are drafted, how probable it is that all of them stand, and how probable the last one was; the next position's
acceptance then follows a Markov chain, counted on validation rounds. Drafting stops where no continuation is worth its
steps at λ tokens per second, λ being that of the very text.

Legend: S survival (all drafted tokens stand), a acceptance of one token, B bins of a, G grid points of S.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy
from numpy.typing import NDArray

from distill.speculative.calibration import Calibration, Recorded
from distill.speculative.costs.curve import StepCosts
from distill.speculative.lengths import LengthRule
from distill.speculative.proposal import Features

Array = NDArray[numpy.float64]
EDGES = (0.3, 0.5, 0.7, 0.85, 0.93, 0.97, 0.99)  # of the bins of a
SEEN = 0.3  # what each transition counts for before any was seen
POINTS, LEAST = 40, 0.01  # of S, log-spaced from 1


@dataclass(frozen=True)
class Chain:
    """`moves` [B + 1, B]: from a token's bin (the last row: from the start) to the next one's; `accept` [B]: its a."""

    moves: Array
    accept: Array

    @classmethod
    def of(cls, rounds: Sequence[Recorded], calibration: Calibration) -> Chain:
        """Counted on the positions that were drafted and reached."""
        bins = len(EDGES) + 1
        moves, total, count = numpy.full((bins + 1, bins), SEEN), numpy.zeros(bins), numpy.zeros(bins)
        for found in rounds:
            before = bins
            for position, features, _ in found.judged():
                a = calibration.accept(position, features)
                here = bin_of(a)
                moves[before, here] += 1
                total[here] += a
                count[here] += 1
                before = here
        middle = (numpy.array([0.0, *EDGES]) + numpy.array([*EDGES, 1.0])) / 2
        return cls(moves / moves.sum(1, keepdims=True), (total + middle) / (count + 1))

    def values(self, costs: StepCosts, rate: float) -> list[Array]:
        """For n = 0.. drafted tokens, [G, B + 1]: the most E − λ·seconds still to come, the target's step counted."""
        survival = numpy.exp(numpy.linspace(0.0, math.log(LEAST), POINTS))
        at = numpy.log(survival[:, None] * self.accept) / math.log(LEAST) * (POINTS - 1)  # where S·a lies on the grid
        low = numpy.minimum(at.astype(int), POINTS - 1)
        high, part = numpy.minimum(low + 1, POINTS - 1), numpy.clip(at - low, 0.0, 1.0)
        most = len(costs.target) - 1
        found = [numpy.full((POINTS, len(self.accept) + 1), -rate * costs.target[most])]
        for n in range(most - 1, -1, -1):
            stop = -rate * costs.target[n]
            bins = numpy.arange(len(self.accept))
            taken = (1 - part) * found[0][low, bins] + part * found[0][high, bins]
            onward = numpy.maximum(survival[:, None] * self.accept + taken, stop)
            step = rate * (costs.draft + (costs.overhead if n == 0 else 0.0))
            found.insert(0, numpy.maximum(onward @ self.moves.T - step, stop))
        return found


def bin_of(accept: float) -> int:
    """The bin of an acceptance."""
    return int(numpy.searchsorted(EDGES, accept))


@dataclass
class OptimalStopping(LengthRule):
    """Drafts while it pays at λ = `rate`, by the chain."""

    chain: Chain
    calibration: Calibration
    costs: StepCosts
    rate: float
    _values: list[Array] = field(init=False)
    _survival: float = field(default=1.0, init=False)
    _bin: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._values = self.chain.values(self.costs, self.rate)

    def limit(self) -> int:
        """The longest draft that the curve covers."""
        return len(self.costs.target) - 1

    def _coming(self, drafted: int, survival: float, last: int) -> float:
        at = min(math.log(max(survival, LEAST)) / math.log(LEAST), 1.0) * (POINTS - 1)
        low = int(at)
        high = min(low + 1, POINTS - 1)
        row = self._values[drafted]
        return float((1 - at + low) * row[low, last] + (at - low) * row[high, last])

    def _stop(self, drafted: int) -> float:
        return -self.rate * self.costs.target[drafted]

    def step_on(self, position: int) -> bool:
        """Whether the step pays before its features are seen."""
        if position == 0:
            self._survival, self._bin = 1.0, len(self.chain.accept)
        return self._coming(position, self._survival, self._bin) > self._stop(position) + 1e-12

    def go_on(self, position: int, features: Features) -> bool:
        """Whether the token is worth verifying, alone or with more."""
        a = self.calibration.accept(position, features)
        survival, here = self._survival * a, bin_of(a)
        if survival + self._coming(position + 1, survival, here) <= self._stop(position):
            return False
        self._survival, self._bin = survival, here
        return True


def stopping_speed(
    chain: Chain, calibration: Calibration, costs: StepCosts, speed: Callable[[LengthRule], float]
) -> float:
    """The rule's speed (plain decoding = 1) at its own long-run rate λ, found by iteration."""
    best = 1.0
    for _ in range(6):
        found = speed(OptimalStopping(chain, calibration, costs, best / costs.target[0]))
        if found - best < 1e-4:
            break
        best = found
    return best

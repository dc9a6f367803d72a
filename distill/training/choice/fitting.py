"""A curve through acceptance against tokens, α(x) = a − b·x^−c, with intervals that resample prompts and residuals.

Prompts are drawn alike for all points. Residuals stand for what the weights vary from step to step, which the prompts
do not show: at the peak rate that is as much as a few hundred steps gain.

Legend: P points, U prompts, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from distill.intervals import Numbers, resampled_means

EXPONENTS = numpy.geomspace(0.05, 4, 60)  # the least is nearly a straight line in log x
FEWEST = 5  # points of a fit
OLDEST = 16.0  # points with less than this share of the last one's x are left out
SPAN = 4.0  # least ratio of the last to the first point's x


@dataclass(frozen=True)
class Figures:
    """P points [P] with their tokens. For each of U prompts the sum of acceptances [P, U] over its positions [U]."""

    tokens: Numbers
    expected: Numbers
    positions: Numbers

    @classmethod
    def of(cls, points: Sequence[dict[str, Any]], positions: Sequence[int]) -> Figures:
        """From the points in a training's state."""
        tokens = numpy.array([one["tokens"] for one in points], float)
        expected = numpy.array([one["expected"] for one in points], float).reshape(len(points), len(positions))
        return cls(tokens, expected, numpy.array(positions, float))

    def means(self, resamples: int) -> Numbers:
        """The mean acceptance at each point, over all prompts and over R draws of them [1 + R, P]."""
        whole = self.expected.sum(1) / self.positions.sum()
        return numpy.concatenate([whole[None], resampled_means(self.expected, self.positions, resamples)])


@dataclass(frozen=True)
class Curves:
    """R curves."""

    a: Numbers
    b: Numbers
    c: Numbers

    def at(self, x: Numbers) -> Numbers:
        """Acceptance of each curve [R, P] at points [P]."""
        a, b, c = (part[:, None] for part in (self.a, self.b, self.c))
        found: Numbers = a - b * x**-c
        return found

    def rise(self, first: float, last: float) -> Numbers:
        """What each curve [R] rises from one x to another."""
        found: Numbers = self.b * (first**-self.c - last**-self.c)
        return found


def fit(x: Numbers, values: Numbers, weights: Numbers) -> Curves:
    """The curve of least squares through each row of values [R, P] at x [P], weights [P]; it never falls (b ≥ 0)."""
    root = numpy.sqrt(weights / weights.mean())
    best, found = numpy.full(len(values), numpy.inf), numpy.zeros((3, len(values)))
    for exponent in (*EXPONENTS, None):  # None: no rise
        columns = [numpy.ones_like(x)] if exponent is None else [numpy.ones_like(x), -(x**-exponent)]
        design = numpy.stack(columns, 1) * root[:, None]
        solved = (values * root) @ numpy.linalg.pinv(design).T  # [R, 1 or 2]
        left = ((values * root - solved @ design.T) ** 2).sum(1)
        better = (left < best) & (solved[:, 1:] >= 0).all(1)
        best[better] = left[better]
        found[0, better] = solved[better, 0]
        found[1, better] = 0.0 if exponent is None else solved[better, -1]
        found[2, better] = exponent or 1.0
    return Curves(*found)


def curves_of(figures: Figures, resamples: int) -> Curves | None:
    """The curve through the points, then those of R resamples; x is relative to the last point's tokens.

    None for fewer than FEWEST points or a span of less than SPAN between them.
    """
    used = figures.tokens * OLDEST >= figures.tokens.max(initial=0)
    x, count = figures.tokens[used], int(used.sum())
    if count < FEWEST or x[-1] < SPAN * x[0]:
        return None
    x = x / x[-1]
    values = figures.means(resamples)[:, used]
    weights = 1 / numpy.maximum(values[1:].var(0), 1e-12)
    whole = fit(x, values[:1], weights)
    residuals = (values[:1] - whole.at(x))[0] * math.sqrt(count / (count - 3))
    drawn = numpy.random.default_rng(0).integers(0, count, size=values.shape)
    drawn_residuals = residuals[drawn]
    drawn_residuals[0] = 0
    return fit(x, values + drawn_residuals, weights)

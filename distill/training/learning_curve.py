"""The learning curve: expected acceptance against tokens, and what twice the tokens would give.

Through its points goes α(x) = a − b·x^−c, with intervals that resample prompts and residuals. Prompts are drawn alike
for all points. Residuals stand for what the weights vary from step to step, which the prompts do not show: at the peak
rate that is as much as a few hundred steps gain. All follows from the state of the training alone, from no clock and no
chance, so that a resumed training has the same curve.

Legend: P points, U prompts, R resamples.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy

from distill.intervals import CONFIDENCE, RESAMPLES, Interval, Numbers, percentiles, ratio_interval, resampled_means
from distill.results.training_results import CURVE_STAGE, CurvePoint, LearningCurve
from distill.training.memory import evaluating, memory_explained
from distill.training.plan import warm_steps
from distill.training.setup import Training
from distill.training.validation import expected_acceptance

PER_DOUBLING, DOUBLINGS = 2, 4  # points of the curve, besides the evaluations
WIDEST = 0.06  # an interval of the fitted curve at twice the tokens; a wider one says nothing
# Two trainings that differ in their seed alone end with a standard deviation of .004 each (demo pair, 150 steps, two
# optimizers of three seeds); 0.01 covers 95 % of the differences on one side. No curve of one training shows it.
SEEDS = 0.01
LINE = 9  # points of the drawn line
EXPONENTS = numpy.geomspace(0.05, 4, 60)  # the least is nearly a straight line in log x
FEWEST = 5  # points of a fit
OLDEST = 16.0  # points with less than this share of the last one's x are left out
SPAN = 4.0  # least ratio of the last to the first point's x


def curve_steps(steps: int) -> set[int]:
    """The steps after which the curve has points: even in log, with the last one."""
    return {round(steps * 2 ** (-number / PER_DOUBLING)) for number in range(PER_DOUBLING * DOUBLINGS + 1)} - {0}


def add_point(work: Training, evaluated: bool) -> None:
    """Measure the expected acceptance of the last weights where the curve has a point, and after each evaluation."""
    state, step = work.state, work.state["step"]
    if state["texts"] is None or not (evaluated or step in curve_steps(work.settings.steps)):
        return
    began = time.monotonic()
    with memory_explained(evaluating, work):
        expected = expected_acceptance(work)
    seconds = time.monotonic() - began
    state["curve"].append({"step": step, "tokens": state["tokens"], "expected": expected})
    rate = sum(expected) / max(1, sum(map(len, state["texts"])))
    work.run.record(CURVE_STAGE, step=step, tokens=state["tokens"], expected_acceptance=rate, seconds=seconds)
    work.accelerator.log({"validation/expected_acceptance": rate}, step=step)


def points_of(work: Training) -> CurvePoints:
    """The points so far, without those of the warm-up and of the steps that trained embeddings alone."""
    settings = work.settings
    first = max(warm_steps(settings.steps, settings.warmup), settings.embedding_steps)
    points = [point for point in work.state["curve"] if point["step"] > first]
    tokens = numpy.array([point["tokens"] for point in points], float)
    positions = numpy.array([len(text) for text in work.state["texts"] or []], float)
    expected = numpy.array([point["expected"] for point in points], float).reshape(len(points), len(positions))
    return CurvePoints(tokens, expected, positions)


def learning_curve(work: Training) -> LearningCurve | None:
    """The points, and what twice the tokens would give; None without points."""
    points = points_of(work)
    if not len(points.tokens):
        return None
    shown = [
        CurvePoint(int(tokens), ratio_interval(row, points.positions))
        for tokens, row in zip(points.tokens, points.expected, strict=True)
    ]
    curve = LearningCurve(CONFIDENCE, shown)
    if work.state["curve"][-1]["step"] < work.settings.steps:
        return replace(curve, unknown="the training ended before its schedule did")
    if work.settings.schedule == "wsd":
        return replace(curve, unknown="schedule wsd gains much in its last steps, which these points do not show")
    return predicted(curve, points, RESAMPLES)


def predicted(curve: LearningCurve, points: CurvePoints, resamples: int) -> LearningCurve:
    """The curve with an upper bound of what twice the tokens would give; with the reason where that cannot be said.

    The last point is that of the finished training. Later points have a lower rate and gain from that too, so that the
    curve through all points rises faster than finished trainings do. docs/training.md holds trials.
    """
    curves = curves_of(points, resamples)
    if curves is None:
        return replace(curve, unknown="there are too few points of the learning curve, or they lie too close together")
    now, whole = curve.points[-1].acceptance.mean, points.tokens[-1]

    def after(tokens: float) -> Interval:
        values = now + curves.rise(1, tokens / whole)  # on the same prompts, so that their own spread is left out
        inner = percentiles(values[0], values[1:], curve.confidence)
        return Interval(inner.mean, inner.low - SEEDS, inner.high + SEEDS)

    doubled = after(2 * whole)
    if doubled.high - doubled.low > WIDEST + 2 * SEEDS:
        return replace(curve, unknown=f"the interval is too wide, [{doubled.low:.2f}, {doubled.high:.2f}]")
    line = [CurvePoint(int(tokens), after(tokens)) for tokens in numpy.geomspace(whole, 2 * whole, LINE)]
    return replace(curve, line=line, doubled=doubled)


# ── the fit ──


@dataclass(frozen=True)
class CurvePoints:
    """P points [P] with their tokens. For each of U prompts the sum of acceptances [P, U] over its positions [U]."""

    tokens: Numbers
    expected: Numbers
    positions: Numbers

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
        values: Numbers = a - b * x**-c
        return values

    def rise(self, first: float, last: float) -> Numbers:
        """What each curve [R] rises from one x to another."""
        rises: Numbers = self.b * (first**-self.c - last**-self.c)
        return rises


def fit(x: Numbers, values: Numbers, weights: Numbers) -> Curves:
    """The curve of least squares through each row of values [R, P] at x [P], weights [P]; it never falls (b ≥ 0)."""
    root = numpy.sqrt(weights / weights.mean())
    least, curves = numpy.full(len(values), numpy.inf), numpy.zeros((3, len(values)))
    for exponent in (*EXPONENTS, None):  # None: no rise
        columns = [numpy.ones_like(x)] if exponent is None else [numpy.ones_like(x), -(x**-exponent)]
        design = numpy.stack(columns, 1) * root[:, None]
        solved = (values * root) @ numpy.linalg.pinv(design).T  # [R, 1 or 2]
        left = ((values * root - solved @ design.T) ** 2).sum(1)
        better = (left < least) & (solved[:, 1:] >= 0).all(1)
        least[better] = left[better]
        curves[0, better] = solved[better, 0]
        curves[1, better] = 0.0 if exponent is None else solved[better, -1]
        curves[2, better] = exponent or 1.0
    return Curves(*curves)


def curves_of(figures: CurvePoints, resamples: int) -> Curves | None:
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

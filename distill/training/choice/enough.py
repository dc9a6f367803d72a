"""How much is enough: points of the learning curve, and what twice the tokens would give.

Both follow from the state of the training alone, from no clock and no chance, so that a resumed training has the same.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy

from distill.intervals import Interval, percentiles, ratio_interval
from distill.results.training_results import CURVE_STAGE, CurvePoint, LearningCurve
from distill.training.choice.fitting import Figures, curves_of
from distill.training.memory import choosing, memory_explained
from distill.training.plan import REPLAY, PlannedPart, last_step
from distill.training.rate import warm_steps
from distill.training.setup import Training

PER_DOUBLING, DOUBLINGS = 2, 4  # points of the curve, besides the evaluations
WIDEST = 0.06  # an interval of the fitted curve at twice the tokens; a wider one says nothing
# Two trainings that differ in their seed alone end with a standard deviation of .004 each (demo pair, 150 steps, two
# optimizers of three seeds); 0.01 covers 95 % of the differences on one side. No curve of one training shows it.
SEEDS = 0.01
LINE = 9  # points of the drawn line


def curve_steps(steps: int) -> set[int]:
    """The steps after which the curve has points: even in log, with the last one."""
    return {round(steps * 2 ** (-number / PER_DOUBLING)) for number in range(PER_DOUBLING * DOUBLINGS + 1)} - {0}


def add_point(work: Training, part: PlannedPart, evaluated: bool) -> None:
    """Measure the expected acceptance of the last weights where the curve has a point, and after each evaluation."""
    state, step = work.state, work.state["step"]
    if part.name == REPLAY or state["texts"] is None or not (evaluated or step in curve_steps(last_step(work.parts))):
        return
    began = time.monotonic()
    with memory_explained(lambda: choosing(work)):
        expected = work.expected()
    seconds = time.monotonic() - began
    so_far = {name: state[name] for name in ("step", "tokens")}
    state["curve"].append({**so_far, "part": part.name, "expected": expected})
    rate = sum(expected) / max(1, sum(map(len, state["texts"])))
    work.run.record(CURVE_STAGE, step=step, tokens=state["tokens"], expected_acceptance=rate, seconds=seconds)
    work.accelerator.log({"validation/expected_acceptance": rate}, step=step)


def points_of(work: Training, part: PlannedPart) -> Figures:
    """The points so far of a part, without those of the warm-up and of the steps that trained embeddings alone."""
    settings = work.settings
    first = max(warm_steps(last_step(work.parts), settings.warmup), settings.embedding_steps)
    points = [point for point in work.state["curve"] if point["part"] == part.name and point["step"] > first]
    return Figures.of(points, [len(text) for text in work.state["texts"] or []])


def learning_curve(work: Training) -> LearningCurve | None:
    """The points of the last part before a replay, and what twice the tokens would give; None without points."""
    part = [part for part in work.parts if part.name != REPLAY][-1]
    points, evaluation = points_of(work, part), work.recipe.eval
    if not len(points.tokens):
        return None
    resamples, confidence = evaluation.resamples, evaluation.confidence
    shown = [
        CurvePoint(int(tokens), ratio_interval(row, points.positions, resamples, confidence))
        for tokens, row in zip(points.tokens, points.expected, strict=True)
    ]
    if work.state["curve"][-1]["step"] < part.end:
        return LearningCurve(confidence, shown, unknown="the training ended before its schedule did")
    return predicted(LearningCurve(confidence, shown), points, resamples)


def predicted(curve: LearningCurve, points: Figures, resamples: int) -> LearningCurve:
    """The curve with an upper bound of what twice the tokens would give; with the reason where that cannot be said.

    The last point is that of the finished training. Later points have a lower rate and gain from that too, so that the
    curve through all points rises faster than finished trainings do. docs/training.md holds trials.
    """
    curves = curves_of(points, resamples)
    if curves is None:
        return replace(curve, unknown="there are too few points of the learning curve, or they lie too close together")
    now, whole = curve.points[-1].acceptance.mean, points.tokens[-1]

    def after(tokens: float) -> Interval:
        found = now + curves.rise(1, tokens / whole)  # on the same prompts, so that their own spread is left out
        inner = percentiles(found[0], found[1:], curve.confidence)
        return Interval(inner.mean, inner.low - SEEDS, inner.high + SEEDS)

    doubled = after(2 * whole)
    if doubled.high - doubled.low > WIDEST + 2 * SEEDS:
        return replace(curve, unknown=f"the interval is too wide, [{doubled.low:.2f}, {doubled.high:.2f}]")
    line = [CurvePoint(int(tokens), after(tokens)) for tokens in numpy.geomspace(whole, 2 * whole, LINE)]
    return replace(curve, line=line, doubled=doubled)

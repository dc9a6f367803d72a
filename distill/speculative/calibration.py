"""Calibrations: the probability that a drafted token is accepted, from features of the draft's distribution.

`accept(position, features, survival)` is the probability that the token at `position` (from 0) is accepted given that
all before it were; `survival` is the product of those probabilities so far. A calibration is fitted on recorded rounds
of validation text. Only positions that were drafted and reached count: positions behind the first rejection were never
judged. Legend: N judged positions, F terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy
from numpy.typing import NDArray

from distill.errors import DataError
from distill.speculative.proposal import Features

Array = NDArray[numpy.float64]
LEAST = 1e-6  # no probability is closer than this to 0 or 1: a single surprise must not cost infinite log loss
MOST_MARGIN = 20.0  # of the logit margin: the second best may have probability 0 after top-k or at temperature 0


@dataclass(frozen=True)
class Recorded:
    """One round: features of the drafted positions, and how many of their tokens were accepted from the first on."""

    features: Sequence[Features]
    accepted: int

    def judged(self) -> list[tuple[int, Features, bool]]:
        """(position, features, accepted) of the positions that were drafted and reached."""
        return [(j, self.features[j], j < self.accepted) for j in range(min(len(self.features), self.accepted + 1))]


class Calibration(Protocol):
    """From features to the probability of acceptance."""

    def accept(self, position: int, features: Features, survival: float) -> float:
        """The probability that the token at `position` is accepted, given that all before it are."""
        ...

    def observe(self, accepted: int, features: Sequence[Features]) -> None:
        """Learn from one round; a calibration without online learning does nothing."""
        ...


def clamp(probability: float) -> float:
    """A probability kept away from 0 and 1 by LEAST."""
    return min(max(probability, LEAST), 1 - LEAST)


def sigmoid(x: float) -> float:
    """1 / (1 + e^−x) without overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def logit(probability: float) -> float:
    """ln(p / (1 − p)) of a clamped probability."""
    p = clamp(probability)
    return math.log(p) - math.log1p(-p)


def margin(features: Features) -> float:
    """The two largest logits' distance, ln(top / second), at most MOST_MARGIN."""
    top = max(features.top, 1e-30)
    return min(math.log(top / features.second), MOST_MARGIN) if features.second > 0 else MOST_MARGIN


@dataclass
class Power:
    """q^k of the largest probability q; k < 1 for a draft that is accepted more often than q.

    `rate` > 0 lets observe() follow the gradient of the log likelihood in ln k.
    """

    exponent: float = 1.0
    rate: float = 0.0

    def accept(self, position: int, features: Features, survival: float) -> float:
        """q^k."""
        return clamp(features.top**self.exponent)

    def observe(self, accepted: int, features: Sequence[Features]) -> None:
        """One gradient step per judged position."""
        if not self.rate:
            return
        for _, seen, hit in Recorded(features, accepted).judged():
            log_p = self.exponent * math.log(clamp(seen.top))
            p = math.exp(log_p)
            # d/d ln k of y·ln p + (1 − y)·ln(1 − p), with p = q^k
            slope = log_p if hit else -log_p * p / max(1 - p, LEAST)
            self.exponent *= math.exp(max(min(self.rate * slope, 0.5), -0.5))


def fit_power(rounds: Sequence[Recorded], steps: int = 50) -> Power:
    """The exponent of greatest likelihood, by Newton's method in ln k; raises DataError without both outcomes."""
    judged = _judged(rounds)
    log_q = numpy.log(numpy.array([clamp(f.top) for _, f, _ in judged]))
    hits = numpy.array([y for _, _, y in judged])
    log_k = 0.0
    for _ in range(steps):
        log_p = math.exp(log_k) * log_q
        p = numpy.exp(log_p)
        odds = p / numpy.maximum(1 - p, LEAST)
        slope = float(numpy.where(hits, log_p, -log_p * odds).sum())
        # −d²/d(ln k)²; where the likelihood is not concave, the step goes uphill by one
        bend = float(numpy.where(hits, -log_p, log_p * odds * (1 + log_p * (1 + odds))).sum())
        step = max(min(slope / bend, 1.0), -1.0) if bend > 0 else math.copysign(1.0, slope)
        log_k += step
        if abs(step) < 1e-10:
            break
    return Power(math.exp(log_k))


TERMS: dict[str, Callable[[int, Features], float]] = {
    "margin": lambda position, f: margin(f),
    "log_top": lambda position, f: math.log(max(f.top, 1e-30)),
    "logit_top": lambda position, f: logit(f.top),
    "entropy": lambda position, f: f.entropy,
    "first": lambda position, f: float(position == 0),
    "log_position": lambda position, f: math.log1p(position),
    "agrees": lambda position, f: float(f.match > 0),
    "differs": lambda position, f: float(f.match < 0),
    "agreed_length": lambda position, f: max(f.match, 0) / 6,
    "differed_length": lambda position, f: max(-f.match, 0) / 6,
}
CONTEXT_TERMS = ("agrees", "differs", "agreed_length", "differed_length")  # of the best token, from the text before it
FEATURE_TERMS = ("margin", "logit_top", "entropy", "first", "log_position")  # of the distribution and its position


@dataclass
class Logistic:
    """σ(bias + Σ weight·term) of terms of the features, the logit margin of the two best unless others are named.

    `rate` > 0 lets observe() move the bias along the gradient, for texts that the draft predicts better or worse than
    the fitted ones.
    """

    bias: float = 0.0
    weights: tuple[float, ...] = (1.0,)
    terms: tuple[str, ...] = ("margin",)
    rate: float = 0.0
    forget: float = 0.02  # the share of the learned shift that each round takes away
    shift: float = field(default=0.0, init=False)

    def accept(self, position: int, features: Features, survival: float) -> float:
        """σ(bias + shift + Σ weight·term)."""
        total = sum(w * TERMS[name](position, features) for w, name in zip(self.weights, self.terms, strict=True))
        return clamp(sigmoid(self.bias + self.shift + total))

    def observe(self, accepted: int, features: Sequence[Features]) -> None:
        """One gradient step of the bias per judged position."""
        if not self.rate:
            return
        self.shift *= 1 - self.forget
        for position, seen, hit in Recorded(features, accepted).judged():
            self.shift += self.rate * (hit - self.accept(position, seen, 1.0))


def fit_logistic(
    rounds: Sequence[Recorded], terms: Sequence[str] = ("margin",), ridge: float = 1e-3, steps: int = 50
) -> Logistic:
    """Weights of greatest likelihood by Newton's method; raises DataError without both outcomes.

    `ridge` times half the squared weights (the bias is free) is subtracted, so that separable rows have an optimum.
    """
    judged = _judged(rounds)
    x = numpy.array([[1.0, *(TERMS[name](j, f) for name in terms)] for j, f, _ in judged])  # [N, 1 + F]
    y = numpy.array([float(hit) for _, _, hit in judged])  # [N]
    penalty = numpy.diag([1e-9, *([ridge] * len(terms))])
    weights = numpy.zeros(x.shape[1])

    def loss(w: Array) -> float:
        return float(numpy.logaddexp(0, x @ w).sum() - y @ (x @ w) + w @ penalty @ w / 2)

    for _ in range(steps):
        p = 1 / (1 + numpy.exp(-numpy.clip(x @ weights, -500, 500)))
        slope = x.T @ (y - p) - penalty @ weights
        step = numpy.linalg.solve((x * (p * (1 - p))[:, None]).T @ x + penalty, slope)
        size = 1.0
        while loss(weights + size * step) > loss(weights) + 1e-12 and size > 1e-6:
            size /= 2
        weights = weights + size * step
        if float(numpy.abs(step).max()) < 1e-9:
            break
    return Logistic(float(weights[0]), tuple(float(w) for w in weights[1:]), tuple(terms))


@dataclass
class Sequential:
    """Temperatures of the cumulative product, one per position: c_j = σ(logit(c_{j−1}·q_j) / τ_j), with c_0 = 1.

    `accept` is c_j / c_{j−1}, at most 1; positions beyond the last temperature use the last.
    """

    temperatures: tuple[float, ...] = (1.0,)

    def accept(self, position: int, features: Features, survival: float) -> float:
        """c_j / c_{j−1}."""
        temperature = self.temperatures[min(position, len(self.temperatures) - 1)]
        survival = max(survival, LEAST)
        return clamp(sigmoid(logit(survival * features.top) / temperature) / survival)

    def observe(self, accepted: int, features: Sequence[Features]) -> None:
        """Nothing: there is no online learning."""


def fit_sequential(rounds: Sequence[Recorded], least: int = 30) -> Sequential:
    """Temperatures fitted one position after the other, each of greatest likelihood given those before.

    The first position judged fewer than `least` times, and all after it, use the last temperature. Raises DataError
    without both outcomes.
    """
    _judged(rounds)
    found: list[float] = []
    rows = [(round_, 1.0) for round_ in rounds if round_.features]  # with the survival c_{j−1} of each
    for position in range(max(len(round_.features) for round_, _ in rows)):
        rows = [(r, c) for r, c in rows if position < len(r.features) and position <= r.accepted]
        if len(rows) < least:
            break

        survival = numpy.array([max(c, LEAST) for _, c in rows])
        product = numpy.clip(survival * [r.features[position].top for r, _ in rows], LEAST, 1 - LEAST)
        odds = numpy.log(product) - numpy.log1p(-product)
        hits = [position < r.accepted for r, _ in rows]

        def loss(log_t: float, odds: Array = odds, survival: Array = survival, hits: list[bool] = hits) -> float:
            return log_loss(1 / (1 + numpy.exp(-odds / math.exp(log_t))) / survival, hits)

        found.append(math.exp(_least(loss, -3.0, 3.0)))
        model = Sequential(tuple(found))
        rows = [(r, c * model.accept(position, r.features[position], c)) for r, c in rows]
    if not found:
        raise DataError(f"no draft position was judged {least} times", "record more rounds on the validation split")
    return Sequential(tuple(found))


def _least(function: Callable[[float], float], low: float, high: float) -> float:
    """The minimum of a function with one valley: a coarse grid, then golden sections to 1e-5."""
    grid = numpy.linspace(low, high, 25)
    best = int(numpy.argmin([function(float(x)) for x in grid]))
    low, high = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, 24)])
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > 1e-5:
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return (low + high) / 2


def _judged(rounds: Sequence[Recorded]) -> list[tuple[int, Features, bool]]:
    found = [row for round_ in rounds for row in round_.judged()]
    outcomes = {accepted for _, _, accepted in found}
    if len(outcomes) < 2:
        what = "no judged position" if not found else f"only {'accepted' if True in outcomes else 'rejected'} positions"
        raise DataError(f"calibration: {what} in {len(rounds)} rounds", "record more rounds on the validation split")
    return found


def predicted(calibration: Calibration, rounds: Sequence[Recorded]) -> tuple[list[float], list[bool]]:
    """The calibrated probability of every judged position, and whether its token was accepted."""
    probabilities, outcomes = [], []
    for round_ in rounds:
        survival = 1.0
        for position, features, accepted in round_.judged():
            probabilities.append(calibration.accept(position, features, survival))
            outcomes.append(accepted)
            survival *= probabilities[-1]
    return probabilities, outcomes


def log_loss(probabilities: Sequence[float] | Array, outcomes: Sequence[bool]) -> float:
    """Mean −ln of the probability of the actual outcome, in nats."""
    p = numpy.clip(numpy.asarray(probabilities), LEAST, 1 - LEAST)
    return float(-numpy.where(numpy.asarray(outcomes), numpy.log(p), numpy.log1p(-p)).mean())


def expected_calibration_error(probabilities: Sequence[float], outcomes: Sequence[bool], bins: int = 10) -> float:
    """Mean |predicted − observed rate| over bins of equal width, weighted by their counts (Guo et al. 2017, eq. 3)."""
    p, y = numpy.asarray(probabilities), numpy.asarray(outcomes, float)
    index = numpy.minimum((p * bins).astype(int), bins - 1)
    gaps = [abs(float((p[index == b] - y[index == b]).sum())) for b in range(bins)]
    return sum(gaps) / len(p)

"""Calibrations: the probability that a drafted token is accepted.

A calibration is fitted on recorded rounds of validation text. Only positions that were drafted and reached count:
positions after the first rejection were never judged. Legend: N judged positions, F terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy
from numpy.typing import NDArray

from distill.decoding.lengths import Features, Fixed
from distill.errors import DataError

Array = NDArray[numpy.float64]
LEAST = 1e-6  # no probability is closer than this to 0 or 1: a single surprise must not cost infinite log loss
STEPS = 50  # of Newton's method, at most
MOST_MARGIN = 20.0  # of the logit margin: the second best may have probability 0 after top-k or at temperature 0


@dataclass(frozen=True)
class Recorded:
    """One round: features of the drafted positions, and how many of their tokens were accepted from the first on."""

    features: Sequence[Features]
    accepted: int

    @property
    def drafted(self) -> int:
        """How many positions were drafted."""
        return len(self.features)

    def judged(self) -> list[tuple[int, Features, bool]]:
        """(position, features, accepted) of the positions that were drafted and reached."""
        return [(j, self.features[j], j < self.accepted) for j in range(min(len(self.features), self.accepted + 1))]


@dataclass
class Recorder(Fixed):
    """Drafts a fixed length and keeps what was seen of every round."""

    reads_features = True
    rounds: list[Recorded] = field(default_factory=list)

    def observe(self, drafted: int, accepted: int, features: Sequence[Features], seconds: float) -> None:
        """Keep the round."""
        self.rounds.append(Recorded(tuple(features[:drafted]), accepted))


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


TERMS: dict[str, Callable[[int, Features], float]] = {
    "margin": lambda position, f: margin(f),
    "logit_top": lambda position, f: logit(f.top),
    "entropy": lambda position, f: f.entropy,
    "first": lambda position, f: float(position == 0),
    "log_position": lambda position, f: math.log1p(position),
    "agrees": lambda position, f: float(f.match > 0),
    "differs": lambda position, f: float(f.match < 0),
    "agreed_length": lambda position, f: max(f.match, 0) / 6,
    "differed_length": lambda position, f: max(-f.match, 0) / 6,
    "known": lambda position, f: f.match / 4,
    "log_count": lambda position, f: math.log1p(f.count),
}
FEATURE_TERMS = ("margin", "logit_top", "entropy", "first", "log_position")  # of the distribution and its position
CONTEXT_TERMS = ("agrees", "differs", "agreed_length", "differed_length")  # of the best token, from the text before it
TABLE_TERMS = ("logit_top", "margin", "known", "log_count")  # of a guess by counts of n-grams
# By a configuration's `calibration`.
FITTED_TERMS = {"features": FEATURE_TERMS, "context": FEATURE_TERMS + CONTEXT_TERMS}


@dataclass(frozen=True)
class Calibration:
    """σ(bias + Σ weight·term) of terms of the features; unless fitted, the draft's own largest probability.

    It was fitted on `judged` positions, of which `accepted` were accepted.
    """

    bias: float = 0.0
    weights: tuple[float, ...] = (1.0,)
    terms: tuple[str, ...] = ("logit_top",)
    accepted: int = 0
    judged: int = 0

    def accept(self, position: int, features: Features) -> float:
        """The probability that the token at `position` (from 0) is accepted, given that all before it are."""
        total = self.bias
        for weight, name in zip(self.weights, self.terms, strict=True):
            total += weight * TERMS[name](position, features)
        return clamp(sigmoid(total))


UNFITTED = Calibration()


def fit_calibration(rounds: Sequence[Recorded], terms: Sequence[str], ridge: float = 1e-3) -> Calibration:
    """Weights of greatest likelihood by Newton's method; raises DataError without a judged position.

    `ridge` times half the squared weights (the bias is free) is subtracted, so that separable rows have an optimum.
    Positions that all had the same outcome say nothing about the terms: the draft's own probability gets a bias alone,
    whose prior has a variance of 1.
    """
    judged = _judged(rounds)
    if not judged:
        what = f"calibration: no judged position in {len(rounds)} rounds"
        raise DataError(what, "record more rounds on the validation split")
    x = numpy.array([[1.0, *(TERMS[name](j, f) for name in terms)] for j, f, _ in judged])  # [N, 1 + F]
    y = numpy.array([float(hit) for _, _, hit in judged])  # [N]
    accepted, centre = int(y.sum()), numpy.zeros(x.shape[1])
    penalty = numpy.diag([1e-9, *([ridge] * len(terms))])
    if accepted in (0, len(y)):
        penalty = numpy.diag([1.0, *([1e9] * len(terms))])
        if terms:
            centre[1 + terms.index("logit_top")] = 1.0
    weights = centre

    def loss(w: Array) -> float:
        return float((numpy.logaddexp(0, x @ w) - y * (x @ w)).sum() + (w - centre) @ penalty @ (w - centre) / 2)

    for _ in range(STEPS):
        p = 1 / (1 + numpy.exp(-numpy.clip(x @ weights, -500, 500)))
        slope = x.T @ (y - p) - penalty @ (weights - centre)
        step = numpy.linalg.solve((x * (p * (1 - p))[:, None]).T @ x + penalty, slope)
        size = 1.0
        while loss(weights + size * step) > loss(weights) + 1e-12 and size > 1e-6:
            size /= 2
        weights = weights + size * step
        if float(numpy.abs(step).max()) < 1e-9:
            break
    return Calibration(float(weights[0]), tuple(map(float, weights[1:])), tuple(terms), accepted, len(judged))


class Correction:
    """What a session's own rounds add to a calibration: σ(bias + slope·logit c) of calibrated probabilities c.

    A logistic regression whose prior, bias 0 and slope 1, counts for as many positions as the two `strengths` say, and
    to which it returns as evidence ages: a position counts `KEEP` times less with every token after it.
    """

    KEEP = 0.997
    FARTHEST = 5.0  # logits are taken to be no larger: one surprise must not turn the line

    def __init__(self, strengths: tuple[float, float]) -> None:
        self._prior = strengths[0] / 4, 0.0, strengths[1] / 2  # information: of the bias, of both, of the slope
        self._information, self.bias, self.slope = self._prior, 0.0, 1.0

    def _logit(self, probability: float) -> float:
        return max(-self.FARTHEST, min(logit(probability), self.FARTHEST))

    def probability(self, calibrated: float, deviations: float = 0.0) -> float:
        """The corrected probability, its logit raised by that many of its standard deviations."""
        x, raised = self._logit(calibrated), 0.0
        if deviations:
            bias, slope = self._solved(1.0, x)
            raised = deviations * (bias + slope * x) ** 0.5
        return clamp(sigmoid(self.bias + self.slope * x + raised))

    def _solved(self, bias: float, slope: float) -> tuple[float, float]:
        """The information's inverse times a vector."""
        first, both, second = self._information
        determinant = first * second - both * both
        return (second * bias - both * slope) / determinant, (first * slope - both * bias) / determinant

    def age(self, tokens: int) -> None:
        """So many tokens were decoded: a step back to the prior."""
        keep = self.KEEP**tokens
        first, both, second = self._information
        bias = keep * (first * self.bias + both * self.slope)
        slope = keep * (both * self.bias + second * self.slope) + (1 - keep) * self._prior[2]
        old = zip(self._information, self._prior, strict=True)
        first, both, second = (keep * own + (1 - keep) * prior for own, prior in old)
        self._information = first, both, second
        self.bias, self.slope = self._solved(bias, slope)

    def learn(self, calibrated: float, accepted: bool) -> None:
        """A position with this calibrated probability was judged: one step of Newton's method, of half a logit at
        most."""
        x = self._logit(calibrated)
        p = sigmoid(self.bias + self.slope * x)
        information, error = max(p * (1 - p), 0.05), accepted - p
        first, both, second = self._information
        self._information = first + information, both + information * x, second + information * x * x
        bias, slope = self._solved(error, error * x)
        shorter = max(abs(bias), 2 * abs(slope), 0.5) / 0.5
        self.bias += bias / shorter
        self.slope = min(max(self.slope + slope / shorter, 0.0), 2.0)


def _judged(rounds: Sequence[Recorded]) -> list[tuple[int, Features, bool]]:
    return [row for round_ in rounds for row in round_.judged()]


def predicted(calibration: Calibration, rounds: Sequence[Recorded]) -> tuple[list[float], list[bool]]:
    """The calibrated probability of every judged position, and whether its token was accepted."""
    judged = _judged(rounds)
    return [calibration.accept(j, f) for j, f, _ in judged], [accepted for _, _, accepted in judged]


def log_loss(probabilities: Sequence[float] | Array, outcomes: Sequence[bool]) -> float:
    """Mean −ln of the probability of the actual outcome, in nats."""
    p = numpy.clip(numpy.asarray(probabilities), LEAST, 1 - LEAST)
    return float(-numpy.where(numpy.asarray(outcomes), numpy.log(p), numpy.log1p(-p)).mean())

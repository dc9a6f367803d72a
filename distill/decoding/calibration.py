"""Calibrations: the probability that a drafted token is accepted; and the length rule that reads it with costs.

A calibration is fitted on recorded rounds of validation text. Only positions that were drafted and reached count:
positions after the first rejection were never judged. Legend: N judged positions, F terms; n tokens drafted, E
expected tokens of a round, T target, λ tokens per second in the long run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
from numpy.typing import NDArray

from distill.decoding.costs import Pace, StepCosts
from distill.decoding.lengths import Features, Fixed, LengthRule
from distill.errors import DataError

Array = NDArray[numpy.float64]
LEAST = 1e-6  # no probability is closer than this to 0 or 1: a single surprise must not cost infinite log loss
BINS = 10  # of equal width, by which promised probabilities are compared with outcomes
STEPS = 50  # of Newton's method, at most
MOST_MARGIN = 20.0  # of the logit margin: the second best may have probability 0 after top-k or at temperature 0


@dataclass(frozen=True)
class Recorded:
    """One round: features of the drafted positions, and how many of their tokens were accepted from the first on."""

    features: Sequence[Features]
    accepted: int

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
FITTED = {"features": FEATURE_TERMS, "context": FEATURE_TERMS + CONTEXT_TERMS}  # by a configuration's `calibration`


@dataclass(frozen=True)
class Calibration:
    """σ(bias + Σ weight·term) of terms of the features; unless fitted, the draft's own largest probability."""

    bias: float = 0.0
    weights: tuple[float, ...] = (1.0,)
    terms: tuple[str, ...] = ("logit_top",)

    def accept(self, position: int, features: Features) -> float:
        """The probability that the token at `position` (from 0) is accepted, given that all before it are."""
        total = self.bias
        for weight, name in zip(self.weights, self.terms, strict=True):
            total += weight * TERMS[name](position, features)
        return clamp(sigmoid(total))


def fit_calibration(rounds: Sequence[Recorded], terms: Sequence[str], ridge: float = 1e-3) -> Calibration:
    """Weights of greatest likelihood by Newton's method; raises DataError without both outcomes.

    `ridge` times half the squared weights (the bias is free) is subtracted, so that separable rows have an optimum.
    """
    judged = _judged(rounds)
    outcomes = {accepted for _, _, accepted in judged}
    if len(outcomes) < 2:
        what = f"only {'accepted' if True in outcomes else 'rejected'} positions" if judged else "no judged position"
        raise DataError(f"calibration: {what} in {len(rounds)} rounds", "record more rounds on the validation split")
    x = numpy.array([[1.0, *(TERMS[name](j, f) for name in terms)] for j, f, _ in judged])  # [N, 1 + F]
    y = numpy.array([float(hit) for _, _, hit in judged])  # [N]
    penalty = numpy.diag([1e-9, *([ridge] * len(terms))])
    weights = numpy.zeros(x.shape[1])

    def loss(w: Array) -> float:
        return float(numpy.logaddexp(0, x @ w).sum() - y @ (x @ w) + w @ penalty @ w / 2)

    for _ in range(STEPS):
        p = 1 / (1 + numpy.exp(-numpy.clip(x @ weights, -500, 500)))
        slope = x.T @ (y - p) - penalty @ weights
        step = numpy.linalg.solve((x * (p * (1 - p))[:, None]).T @ x + penalty, slope)
        size = 1.0
        while loss(weights + size * step) > loss(weights) + 1e-12 and size > 1e-6:
            size /= 2
        weights = weights + size * step
        if float(numpy.abs(step).max()) < 1e-9:
            break
    return Calibration(float(weights[0]), tuple(float(w) for w in weights[1:]), tuple(terms))


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


def expected_calibration_error(
    probabilities: Sequence[float] | Array, outcomes: Sequence[bool] | NDArray[Any]
) -> float:
    """Mean |predicted − observed rate| over BINS of equal width, weighted by their counts (Guo et al. 2017, eq. 3)."""
    p, y = numpy.asarray(probabilities), numpy.asarray(outcomes, float)
    index = numpy.minimum((p * BINS).astype(int), BINS - 1)
    gaps = [abs(float((p[index == b] - y[index == b]).sum())) for b in range(BINS)]
    return sum(gaps) / len(p)


# ── The length rule of greatest expected value ──

LONGEST_REST = 1024  # tokens of plain decoding before another try
PRIOR = 2.0  # tokens that the usual acceptance counts for, in addition to those of the round


@dataclass
class ExpectedValue(LengthRule):
    """The length of greatest E − λ·seconds, from measured costs and calibrated features (profile-guided lengths).

    Drafting goes on while up to `look_ahead` + 1 more tokens could beat the best length so far, if each were accepted
    with probability `optimism` + (1 − optimism)·(the mean so far). look_ahead 0 is the myopic rule. optimism 1 gives an
    upper bound of the gain, and drafts too much where drafting costs. All drafted tokens are submitted. λ is a moving
    average in which a token counts half after `memory` more; it starts at 1/T(1). The mean acceptance starts at
    `usual`.

    The rule decodes plainly for `probe` tokens after `patience` rounds in which nothing was worth submitting, or when
    the rounds together lost `allowance` tokens' time against plain decoding, and more than chance explains: `doubt`
    times the root of the sum of their squared losses. Then it tries again. It gives up after `tries` rounds or a
    quarter of the allowance, unless a round drafts something or the loss is made up for. While drafting has lost more
    than it gained in the whole text, each loss doubles the time of plain decoding. `usual`, `allowance` and `doubt`
    were chosen on validation traces: with 24 tokens and no doubt, pairs that cannot gain lost up to a tenth.
    """

    costs: StepCosts
    calibration: Calibration = field(default_factory=Calibration)
    longest: int = 15
    look_ahead: int = 15
    optimism: float = 0.3
    memory: float = 400.0
    patience: int = 8
    tries: int = 4
    probe: int = 32
    allowance: float = 3.0
    doubt: float = 2.5
    usual: float = 0.6

    def __post_init__(self) -> None:
        self.pace, self._usual = Pace(self.costs.target[0], self.memory), self.usual
        self._start(0)
        self._whole = False  # the last round was accepted whole
        # Tokens' time that rounds lost, the squares since there was no loss, and the time that drafting gained in all.
        self._loss, self._squares, self._gained = 0.0, 0.0, 0.0
        # Rounds without a draft in a row; tokens of plain decoding left, and after the next time it gives up.
        self._idle, self._plain, self._rest = 0, 0, self.probe

    def limit(self) -> int:
        """`longest`, as far as the curve reaches; 0 while decoding plainly."""
        return 0 if self._plain > 0 else min(self.longest, len(self.costs.target) - 1)

    def _start(self, position: int) -> None:
        if position == 0:  # n so far in this round, E of the round as it stands, and the chance of all so far
            self._drafted, self._expected, self._survival = 0, 1.0, 1.0

    def _value(self, drafted: int, expected: float) -> float:
        """E − λ·T(n + 1); the time of drafting is spent already."""
        return expected - self.pace.rate * self.costs.target[drafted]

    def _beatable(self, drafted: int, expected: float, survival: float, best: float, ahead: int) -> bool:
        """Whether 1..`ahead` tokens after `drafted` ones could beat the value `best`, with the time of their steps."""
        # Predict the next tokens from this round: its geometric mean, with the usual acceptance as PRIOR more tokens.
        mean = (self._usual**PRIOR * survival) ** (1 / (PRIOR + drafted))
        hoped = self.optimism + (1 - self.optimism) * mean
        step = self.pace.rate * self.costs.draft
        if drafted == 0:  # the round's overhead, and a first step of two tokens, are still to be paid
            extra = self.costs.draft_two - self.costs.draft if self._whole else 0.0
            expected -= self.pace.rate * (self.costs.overhead + extra)
        for n in range(drafted + 1, min(drafted + ahead, len(self.costs.target) - 1, self.longest) + 1):
            survival *= hoped
            expected += survival - step
            if self._value(n, expected) > best:
                return True
        return False

    def step_on(self, position: int) -> bool:
        """Whether drafting more could beat the tokens drafted so far."""
        self._start(position)
        best = self._value(self._drafted, self._expected)
        return self._beatable(self._drafted, self._expected, self._survival, best, self.look_ahead + 1)

    def go_on(self, position: int, features: Features) -> bool:
        """Whether this token, alone or with more, could beat the tokens drafted so far."""
        self._start(position)
        best = self._value(self._drafted, self._expected)
        drafted, survival = self._drafted + 1, self._survival * self.calibration.accept(position, features)
        expected = self._expected + survival
        if self._value(drafted, expected) <= best and not self._beatable(
            drafted, expected, survival, best, self.look_ahead
        ):
            return False
        self._drafted, self._expected, self._survival = drafted, expected, survival
        return True

    def caught_up(self, seconds: float) -> None:
        """Reading what was decoded without the draft has to be made up for, too."""
        self._loss += seconds / self.costs.target[0]
        self._gained -= seconds / self.costs.target[0]

    def resting(self) -> int:
        """The tokens of plain decoding left."""
        return self._plain

    def rested(self, tokens: int, seconds: float) -> None:
        """Learn λ, as from so many rounds of a token each that took equally long."""
        each = 0.5 ** (1 / self.memory)
        self.pace.learn(tokens, seconds, (1 - each**tokens) / ((1 - each) * max(tokens, 1)))
        self._whole = False
        self._plain -= tokens

    def observe(self, drafted: int, accepted: int, features: Sequence[Features], seconds: float) -> None:
        """Learn λ and the usual acceptance; switch to plain decoding, or back from it."""
        tokens = accepted + 1
        self._whole = accepted == drafted > 0
        self.pace.learn(tokens, seconds)
        if self._plain > 0:
            self._plain -= tokens
            return
        for position in range(min(drafted, accepted + 1)):
            self._usual += 0.02 * ((position < accepted) - self._usual)
        self._idle = 0 if drafted else self._idle + 1
        lost = seconds / self.costs.target[0] - tokens
        self._loss, self._squares = max(self._loss + lost, 0.0), self._squares + lost * lost
        self._gained -= lost
        if self._loss == 0:
            self._squares = 0.0
        if self._gained > 0:
            self._rest = self.probe
        lossy = self._loss >= max(self.allowance, self.doubt * self._squares**0.5)
        if lossy or self._idle >= self.patience:
            self._plain, self._idle = self._rest if lossy else self.probe, max(self.patience - self.tries, 0)
            self._rest = min(2 * self._rest, LONGEST_REST) if lossy else self._rest
            self._loss, self._squares = 0.75 * self.allowance, 0.0

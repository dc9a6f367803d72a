"""How many tokens to draft: the length rules. Each is a small state; time comes in as numbers, chance not at all.

A round asks `limit()`, then for each position `step_on(position)` before the draft's step is paid and
`go_on(position, features)` after it, before the token is drawn; then `submit(features)`; and at the end it tells
`observe(drafted, accepted, features, seconds)`.

Whether a position is verified must be settled before its token is drawn, or the output no longer follows the target's
distribution: a rule that drops tokens after their draw `anticipates`, and a draft that samples with it is refused
wherever that shows (`verify.refusal`). Legend: n tokens drafted, E expected tokens of a round, λ tokens per second in
the long run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from distill.speculative.calibration import Calibration, Power
from distill.speculative.cost import StepCosts
from distill.speculative.proposal import Features

PRIOR = 2.0  # tokens that the usual acceptance counts for, beside those of the round


class LengthRule(Protocol):
    """What the decoder asks of every rule. Positions count from 0 within a round."""

    @property
    def anticipates(self) -> bool:
        """Whether it ever drops a token after its draw."""
        ...

    def limit(self) -> int:
        """The most tokens to draft this round; 0 decodes plainly."""
        ...

    def step_on(self, position: int) -> bool:
        """Whether the draft's step for `position` is worth its time; optional to ask."""
        ...

    def go_on(self, position: int, features: Features) -> bool:
        """Whether `position` is drafted, asked before its token is drawn."""
        ...

    def submit(self, features: Sequence[Features]) -> int:
        """How many of the drafted tokens to verify: all, unless the rule anticipates."""
        ...

    def observe(self, drafted: int, accepted: int, features: Sequence[Features], seconds: float) -> None:
        """The round's end: tokens submitted and accepted, the submitted positions' features, the round's seconds."""
        ...


class Rule:
    """A rule that drafts up to a limit and learns nothing; the others change what they must."""

    anticipates: bool = False

    def step_on(self, position: int) -> bool:
        """Always."""
        return True

    def go_on(self, position: int, features: Features) -> bool:
        """Always."""
        return True

    def submit(self, features: Sequence[Features]) -> int:
        """All."""
        return len(features)

    def observe(self, drafted: int, accepted: int, features: Sequence[Features], seconds: float) -> None:
        """Nothing to learn."""


@dataclass
class Fixed(Rule):
    """Always the same length; 0 is plain decoding."""

    length: int

    def limit(self) -> int:
        """The length."""
        return self.length


@dataclass
class ProbabilityFloor(Fixed):
    """Draft while the draft's largest probability is at least p_min, seen before the draw: lossless for every draft."""

    p_min: float

    def go_on(self, position: int, features: Features) -> bool:
        """Top probability ≥ p_min."""
        return features.top >= self.p_min


@dataclass
class LossyProbabilityFloor(Fixed):
    """Drop a drawn token whose own probability is below p_min, as llama.cpp does: changes the distribution of sampled
    drafts."""

    p_min: float
    anticipates = True

    def keeps(self, probability: float) -> bool:
        """Whether a token stays, asked after its draw with its own probability; one that goes ends the draft."""
        return probability >= self.p_min

    def submit(self, features: Sequence[Features]) -> int:
        """Up to the first position below p_min: a deterministic draft's token is the top one."""
        return next((i for i, seen in enumerate(features) if not self.keeps(seen.top)), len(features))


@dataclass
class StartContinue(Fixed):
    """Two floors on the top probability: `start` for the first position, `more` for the later ones."""

    start: float
    more: float

    def go_on(self, position: int, features: Features) -> bool:
        """Top probability ≥ the position's floor."""
        return features.top >= (self.more if position else self.start)


@dataclass
class PlusMinus(Rule):
    """Two longer after a draft that was accepted whole, one shorter after any other (transformers' heuristic)."""

    length: int = 5
    least: int = 1
    most: int = 16

    def limit(self) -> int:
        """The length as it stands."""
        return self.length

    def observe(self, drafted: int, accepted: int, features: Sequence[Features], seconds: float) -> None:
        """+2 or −1 within [least, most]; a round without drafted tokens says nothing."""
        if drafted:
            self.length = min(max(self.length + (2 if accepted == drafted else -1), self.least), self.most)


@dataclass
class AcceptedRatio(Rule):
    """One longer while accepted ÷ drafted is at least a floor that rises with the length, else one shorter.

    The ratio is of the last rounds, `keep` of each round's weight left after the next; the floor is
    `base + rise·length`, at most 0.95.
    """

    length: int = 4
    base: float = 0.4
    rise: float = 0.03
    keep: float = 0.9
    least: int = 1
    most: int = 16
    _drafted: float = field(default=0.0, init=False)
    _accepted: float = field(default=0.0, init=False)

    def limit(self) -> int:
        """The length as it stands."""
        return self.length

    def observe(self, drafted: int, accepted: int, features: Sequence[Features], seconds: float) -> None:
        """Update the ratio, then step the length within [least, most]."""
        if not drafted:
            return
        self._drafted = self.keep * self._drafted + drafted
        self._accepted = self.keep * self._accepted + accepted
        floor = min(self.base + self.rise * self.length, 0.95)
        step = 1 if self._accepted >= floor * self._drafted else -1
        self.length = min(max(self.length + step, self.least), self.most)


@dataclass
class Entropy(Fixed):
    """Draft while 1 − √(scale·H) ≥ floor, H the entropy of the draft's distribution: a lower bound of acceptance
    (AdaEDL).

    arXiv 2410.18351: the floor moves by `step` so that the share accepted approaches `wanted`, both smoothed.
    """

    floor: float = 0.4
    scale: float = 0.2
    wanted: float = 0.9
    step: float = 0.01
    smooth_share: float = 0.5
    smooth_floor: float = 0.9
    _share: float | None = field(default=None, init=False)

    def go_on(self, position: int, features: Features) -> bool:
        """The bound against the floor."""
        return 1 - math.sqrt(self.scale * max(features.entropy, 0.0)) >= self.floor

    def observe(self, drafted: int, accepted: int, features: Sequence[Features], seconds: float) -> None:
        """Too little accepted raises the floor, too much lowers it."""
        if not drafted:
            return
        share = accepted / drafted
        before = share if self._share is None else self._share
        self._share = self.smooth_share * before + (1 - self.smooth_share) * share
        moved = self.floor + (self.step if self._share < self.wanted else -self.step)
        self.floor = min(max(self.smooth_floor * self.floor + (1 - self.smooth_floor) * moved, 0.0), 1.0)


@dataclass
class BetaFilter(Fixed):
    """Acceptance counted per (position, confidence bin); draft while the product of its means is at least `floor`.

    A cell starts as a Beta prior worth `weight` observations at the bin's middle, and forgets: each judged token
    leaves `keep` of the counts before it. Position j is judged only if it was drafted and reached.
    """

    floor: float = 0.3
    bins: int = 8
    weight: float = 4.0
    keep: float = 0.98
    counts: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict, init=False)  # accepted, judged
    _survival: float = field(default=1.0, init=False)

    def cell(self, position: int, features: Features) -> tuple[int, int]:
        """Where a position with these features is counted."""
        return position, min(int(features.top * self.bins), self.bins - 1)

    def accept(self, position: int, features: Features, survival: float) -> float:
        """The cell's posterior mean."""
        cell = self.cell(position, features)
        accepted, judged = self.counts.get(cell, (0.0, 0.0))
        return (accepted + self.weight * (cell[1] + 0.5) / self.bins) / (judged + self.weight)

    def go_on(self, position: int, features: Features) -> bool:
        """Whether this and all before it are expected to be accepted with probability ≥ floor."""
        self._survival = (self._survival if position else 1.0) * self.accept(position, features, 1.0)
        return self._survival >= self.floor

    def observe(self, drafted: int, accepted: int, features: Sequence[Features], seconds: float) -> None:
        """Count the judged positions."""
        for position in range(min(drafted, accepted + 1)):
            cell = self.cell(position, features[position])
            stood, judged = self.counts.get(cell, (0.0, 0.0))
            self.counts[cell] = (self.keep * stood + (position < accepted), self.keep * judged + 1)


@dataclass
class ExpectedValue(Rule):
    """Profile-guided expected value: the length of greatest E − λ·seconds, from measured costs and calibrated features.

    Drafting goes on while up to `look_ahead` + 1 more tokens could beat the best length so far, if each were accepted
    with probability `hope` + (1 − hope)·(the mean so far); look_ahead 0 is the myopic rule, hope 1 the bound that no
    luck can break, which drafts too much where drafting costs. What is drafted is submitted; with `truncate`, which is
    lossless for deterministic drafts alone, only the n of greatest E − λ·T(n + 1) is (on validation traces it gained on
    no curve, docs/benchmarks.md). λ is a moving average in which a token counts half after `memory` more, and starts at
    1/T(1).

    It decodes plainly for `probe` tokens after `patience` rounds in which nothing was worth submitting, or when the
    rounds together lost `allowance` tokens' time against plain decoding. Then it tries again, and gives up after
    `tries` rounds or a quarter of the allowance, until one drafts something or the loss is made up for.
    """

    costs: StepCosts
    calibration: Calibration = field(default_factory=Power)
    most: int = 15
    look_ahead: int = 15
    hope: float = 0.3
    truncate: bool = False
    memory: float = 400.0
    patience: int = 8
    tries: int = 4
    probe: int = 32
    allowance: float = 24.0
    rate: float = field(default=0.0, init=False)  # λ, tokens per second
    _expected: list[float] = field(default_factory=lambda: [1.0], init=False)  # E after n = 0.. drafted tokens
    _survival: float = field(default=1.0, init=False)
    _tokens: float = field(default=0.0, init=False)
    _seconds: float = field(default=0.0, init=False)
    _usual: float = field(default=0.8, init=False)
    _idle: int = field(default=0, init=False)
    _loss: float = field(default=0.0, init=False)
    _whole: bool = field(default=False, init=False)  # the last round was accepted whole
    _plain: int = field(default=0, init=False)  # tokens of plain decoding left

    def __post_init__(self) -> None:
        self._tokens, self._seconds = 16.0, 16.0 * self.costs.target[0]
        self.rate = self._tokens / self._seconds

    @property
    def anticipates(self) -> bool:  # type: ignore[override]
        """Only when it truncates."""
        return self.truncate

    def limit(self) -> int:
        """`most`, as far as the curve reaches; 0 while decoding plainly."""
        return 0 if self._plain > 0 else min(self.most, len(self.costs.target) - 1)

    def _start(self, position: int) -> None:
        if position == 0:
            self._expected, self._survival = [1.0], 1.0

    def _value(self, drafted: int, expected: float) -> float:
        """E − λ·T(n + 1): the drafting is paid for."""
        return expected - self.rate * self.costs.target[drafted]

    def _best(self) -> float:
        """The best that can be had without drafting more."""
        first = 0 if self.truncate else len(self._expected) - 1
        return max(self._value(n, self._expected[n]) for n in range(first, len(self._expected)))

    def _beatable(self, best: float, ahead: int) -> bool:
        """Whether 1..`ahead` more tokens could beat `best`, their draft steps counted."""
        drafted, expected, survival = len(self._expected) - 1, self._expected[-1], self._survival
        # What comes will be like what came: this round's geometric mean, the usual acceptance counting as PRIOR tokens.
        mean = (self._usual**PRIOR * survival) ** (1 / (PRIOR + drafted))
        hoped = self.hope + (1 - self.hope) * mean
        step = self.rate * self.costs.draft
        if drafted == 0:  # nothing is paid yet: the round's overhead, and a first step of two tokens
            extra = self.costs.draft_two - self.costs.draft if self._whole else 0.0
            expected -= self.rate * (self.costs.overhead + extra)
        for n in range(drafted + 1, min(drafted + ahead, len(self.costs.target) - 1, self.most) + 1):
            survival *= hoped
            expected += survival - step
            if self._value(n, expected) > best:
                return True
        return False

    def step_on(self, position: int) -> bool:
        """Whether drafting more could beat what is drafted."""
        self._start(position)
        return self._beatable(self._best(), self.look_ahead + 1)

    def go_on(self, position: int, features: Features) -> bool:
        """Whether this token, or this and more, could beat what is drafted."""
        self._start(position)
        best = self._best()
        self._survival *= self.calibration.accept(position, features, self._survival)
        self._expected.append(self._expected[-1] + self._survival)
        go = self._value(position + 1, self._expected[-1]) > best or self._beatable(best, self.look_ahead)
        if not go:
            self._expected.pop()
        return go

    def submit(self, features: Sequence[Features]) -> int:
        """The n of greatest E − λ·T(n + 1): the drafting is paid for."""
        if not self.truncate:
            return len(features)
        return max(range(len(features) + 1), key=lambda n: self._value(n, self._expected[n]))

    def observe(self, drafted: int, accepted: int, features: Sequence[Features], seconds: float) -> None:
        """Learn λ, the usual acceptance and the calibration; fall back to plain decoding, or come back from it."""
        tokens = accepted + 1
        self._whole = accepted == drafted > 0
        keep = 0.5 ** (tokens / self.memory)
        self._tokens, self._seconds = keep * self._tokens + tokens, keep * self._seconds + seconds
        self.rate = self._tokens / self._seconds
        if self._plain > 0:
            self._plain -= tokens
            return
        for position in range(min(drafted, accepted + 1)):
            self._usual += 0.02 * ((position < accepted) - self._usual)
        self.calibration.observe(accepted, features[:drafted])
        self._idle = 0 if drafted else self._idle + 1
        self._loss = max(self._loss + seconds / self.costs.target[0] - tokens, 0.0)
        if self._idle >= self.patience or self._loss >= self.allowance:
            self._plain, self._idle = self.probe, max(self.patience - self.tries, 0)
            self._loss = 0.75 * self.allowance

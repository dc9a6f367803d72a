"""How many tokens to draft: the length rules. Each is a small state that reads no clock and draws no numbers.

A round calls `limit()`, then for each position `step_on(position)` before the draft's step is paid and
`go_on(position, features)` after it, before the token is drawn; then `submit(features)`; and at its end
`observe(drafted, accepted, features, seconds)`.

Whether a position is verified must be decided before its token is drawn, or the output no longer follows the target's
distribution. A rule that drops tokens after their draw `anticipates`; a draft that samples under such a rule is refused
wherever that would change the output (`verify.refusal`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from distill.speculative.proposal import Features

PRIOR = 2.0  # tokens that the usual acceptance counts for, beside those of the round


class LengthRule(Protocol):
    """What every rule decides for the decoder. Positions count from 0 within a round."""

    @property
    def anticipates(self) -> bool:
        """Whether it ever drops a token after its draw."""
        ...

    @property
    def reads_features(self) -> bool:
        """Whether `go_on`, `submit` or `observe` read features; making the distribution they come from takes time."""
        ...

    def limit(self) -> int:
        """The most tokens to draft this round; 0 decodes plainly."""
        ...

    def step_on(self, position: int) -> bool:
        """Whether the draft's step for `position` is worth its time; callers may skip this question."""
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

    def caught_up(self, seconds: float) -> None:
        """The draft has read text that was decoded without it; `observe` is not told of these seconds."""
        ...

    def resting(self) -> int:
        """How many tokens will be decoded plainly before the rule has anything to decide; 0 where it has now."""
        ...

    def rested(self, tokens: int, seconds: float) -> None:
        """That many tokens, at most `resting()`, were decoded plainly; in place of `observe` of each."""
        ...


class Rule:
    """A rule that drafts up to a limit and learns nothing; the other rules override what differs."""

    anticipates: bool = False
    reads_features: bool = True

    def step_on(self, position: int) -> bool:
        """Always true."""
        return True

    def go_on(self, position: int, features: Features) -> bool:
        """Always true."""
        return True

    def submit(self, features: Sequence[Features]) -> int:
        """All of them."""
        return len(features)

    def observe(self, drafted: int, accepted: int, features: Sequence[Features], seconds: float) -> None:
        """Nothing to learn."""

    def caught_up(self, seconds: float) -> None:
        """Nothing to learn."""

    def resting(self) -> int:
        """0: it is asked every round."""
        return 0

    def rested(self, tokens: int, seconds: float) -> None:
        """Nothing to learn."""


@dataclass
class Fixed(Rule):
    """Always the same length; 0 is plain decoding."""

    length: int

    @property
    def reads_features(self) -> bool:  # type: ignore[override]
        """False; a rule made from this one is taken to read them."""
        return type(self) is not Fixed

    def limit(self) -> int:
        """The length."""
        return self.length


@dataclass
class ProbabilityFloor(Fixed):
    """Draft while the draft's largest probability is at least p_min, read before the draw: lossless for every draft."""

    p_min: float

    def go_on(self, position: int, features: Features) -> bool:
        """Top probability ≥ p_min."""
        return features.top >= self.p_min


@dataclass
class LossyProbabilityFloor(Fixed):
    """Drop a drawn token whose own probability is below p_min, as llama.cpp does: lossy for sampled drafts."""

    p_min: float
    anticipates = True

    def keeps(self, probability: float) -> bool:
        """Whether a drawn token of this probability is kept; the first one that is not ends the draft."""
        return probability >= self.p_min

    def submit(self, features: Sequence[Features]) -> int:
        """Up to the first position below p_min: a deterministic draft's token is the top one."""
        return next((i for i, one in enumerate(features) if not self.keeps(one.top)), len(features))


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

    @property
    def reads_features(self) -> bool:  # type: ignore[override]
        """False; a rule made from this one is taken to read them."""
        return type(self) is not PlusMinus

    def limit(self) -> int:
        """The length as it stands."""
        return self.length

    def observe(self, drafted: int, accepted: int, features: Sequence[Features], seconds: float) -> None:
        """+2 or −1 within [least, most]; a round without drafted tokens changes nothing."""
        if drafted:
            self.length = min(max(self.length + (2 if accepted == drafted else -1), self.least), self.most)


@dataclass
class AcceptedRatio(Rule):
    """One longer while accepted ÷ drafted is at least a floor that rises with the length, else one shorter.

    The ratio is over the last rounds: each new round multiplies the weight of those before by `keep`. The floor is
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

    @property
    def reads_features(self) -> bool:  # type: ignore[override]
        """False; a rule made from this one is taken to read them."""
        return type(self) is not AcceptedRatio

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
    """AdaEDL: draft while 1 − √(scale·H) ≥ floor, a lower bound of acceptance; H is the distribution's entropy.

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
        """Whether the bound reaches the floor."""
        return 1 - math.sqrt(self.scale * max(features.entropy, 0.0)) >= self.floor

    def observe(self, drafted: int, accepted: int, features: Sequence[Features], seconds: float) -> None:
        """Raise the floor when too few tokens were accepted, lower it when too many were."""
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

    A cell starts as a Beta prior worth `weight` observations at the bin's middle. Each judged token multiplies the
    cell's older counts by `keep`. Position j is judged only if it was drafted and reached.
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
            old, judged = self.counts.get(cell, (0.0, 0.0))
            self.counts[cell] = (self.keep * old + (position < accepted), self.keep * judged + 1)

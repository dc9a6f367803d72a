"""How many tokens to draft: the length rules. Each is a small state that reads no clock and draws no numbers.

A round calls `limit()`, then for each position `step_on(position)` before the draft's step is paid and
`go_on(position, features)` after it, before the token is drawn; and at its end
`observe(drafted, accepted, features, seconds)`. Positions count from 0 within a round.

Whether a position is verified must be decided before its token is drawn, or the output no longer follows the target's
distribution. `n_min` drops drafts after their draw, as llama.cpp does; a draft that samples under it is refused
wherever that would change the output (`verify.refusal`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from distill.speculative.proposal import Features


@dataclass(kw_only=True)
class LengthRule:
    """What every rule decides for the decoder: here without a limit of its own, drafting everything, learning nothing.

    `n_min`: a draft of fewer tokens is dropped whole. `reads_features`: the rule reads features; making the
    distribution that they come from takes time.
    """

    n_min: int = 0
    reads_features: ClassVar[bool] = True

    def limit(self) -> int:
        """The most tokens to draft this round; 0 decodes plainly."""
        raise NotImplementedError

    def step_on(self, position: int) -> bool:
        """Whether the draft's step for `position` is worth its time; callers may skip this question."""
        return True

    def go_on(self, position: int, features: Features) -> bool:
        """Whether `position` is drafted, asked before its token is drawn."""
        return True

    def observe(self, drafted: int, accepted: int, features: Sequence[Features], seconds: float) -> None:
        """The round's end: tokens verified and accepted, the verified positions' features, the round's seconds."""

    def caught_up(self, seconds: float) -> None:
        """The draft has read text that was decoded without it; `observe` is not told of these seconds."""

    def resting(self) -> int:
        """How many tokens will be decoded plainly before the rule has anything to decide; 0 where it has now."""
        return 0

    def rested(self, tokens: int, seconds: float) -> None:
        """That many tokens, at most `resting()`, were decoded plainly; in place of `observe` of each."""


@dataclass
class Fixed(LengthRule):
    """Always the same length; 0 is plain decoding."""

    length: int
    reads_features = False

    def limit(self) -> int:
        """The length."""
        return self.length


@dataclass
class ProbabilityFloor(Fixed):
    """Draft while the draft's largest probability is at least a floor, read before the draw: lossless for every draft.

    `later` is the floor behind the first position, where it is another than `p_min`.
    """

    p_min: float
    later: float | None = None
    reads_features = True

    def go_on(self, position: int, features: Features) -> bool:
        """Top probability ≥ the position's floor."""
        return features.top >= (self.p_min if not position or self.later is None else self.later)


@dataclass
class AcceptedRatio(LengthRule):
    """One longer while accepted ÷ drafted is at least a floor that rises with the length, else one shorter.

    The ratio is over the last rounds: each new round multiplies the weight of those before by `keep`. The floor is
    `base + rise·length`, at most 0.95.
    """

    length: int = 4
    base: float = 0.4
    rise: float = 0.03
    keep: float = 0.9
    shortest: int = 1
    longest: int = 16
    reads_features = False
    _drafted: float = field(default=0.0, init=False)
    _accepted: float = field(default=0.0, init=False)

    def limit(self) -> int:
        """The length as it stands."""
        return self.length

    def observe(self, drafted: int, accepted: int, features: Sequence[Features], seconds: float) -> None:
        """Update the ratio, then step the length within [shortest, longest]."""
        if not drafted:
            return
        self._drafted = self.keep * self._drafted + drafted
        self._accepted = self.keep * self._accepted + accepted
        floor = min(self.base + self.rise * self.length, 0.95)
        step = 1 if self._accepted >= floor * self._drafted else -1
        self.length = min(max(self.length + step, self.shortest), self.longest)


@dataclass
class BetaFilter(Fixed):
    """Acceptance counted per (position, confidence bin); draft while the product of its means is at least `floor`.

    Drafting begins where the first position's mean is at least `start`; None: `floor`, too.

    A cell starts as a Beta prior worth `weight` observations at the bin's middle. Each judged token multiplies the
    cell's older counts by `keep`. Position j is judged only if it was drafted and reached.
    """

    floor: float = 0.3
    bins: int = 8
    weight: float = 4.0
    keep: float = 0.98
    start: float | None = None
    reads_features = True
    counts: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict, init=False)  # accepted, judged
    _survival: float = field(default=1.0, init=False)

    def cell(self, position: int, features: Features) -> tuple[int, int]:
        """Where a position with these features is counted."""
        return position, min(int(features.top * self.bins), self.bins - 1)

    def accept(self, position: int, features: Features) -> float:
        """The cell's posterior mean."""
        cell = self.cell(position, features)
        accepted, judged = self.counts.get(cell, (0.0, 0.0))
        return (accepted + self.weight * (cell[1] + 0.5) / self.bins) / (judged + self.weight)

    def go_on(self, position: int, features: Features) -> bool:
        """Whether this and all before it are expected to be accepted with probability ≥ the position's threshold."""
        self._survival = (self._survival if position else 1.0) * self.accept(position, features)
        return self._survival >= (self.floor if position or self.start is None else self.start)

    def observe(self, drafted: int, accepted: int, features: Sequence[Features], seconds: float) -> None:
        """Count the judged positions."""
        for position in range(min(drafted, accepted + 1)):
            cell = self.cell(position, features[position])
            old, judged = self.counts.get(cell, (0.0, 0.0))
            self.counts[cell] = (self.keep * old + (position < accepted), self.keep * judged + 1)

"""What drafted tokens are worth: expected tokens less λ × seconds, the one sum that sizes chains, lookups and trees;
and the length rule that drafts by it.

Legend: n tokens drafted, E expected tokens of a round, T target, λ tokens per second in the long run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from distill.decoding.calibration import Calibration
from distill.decoding.costs import Costs
from distill.decoding.lengths import Features, LengthRule


class Line(NamedTuple):
    """What a draft goes on from: `nodes` drafted so far, E of them, and the chance that one of the last `width` of them
    is reached, below each of which every further level has a node."""

    nodes: int
    expected: float
    chance: float
    width: int = 1


class Worth:
    """E − λ·seconds of a round, from measured costs and from λ, which all rounds of a session tell.

    λ is a moving average in which a token counts half after `memory` more; it starts at 1/T(1).
    """

    def __init__(self, costs: Costs, memory: float = 400.0) -> None:
        self.costs, self._memory = costs, memory
        self._tokens, self._seconds = 16.0, 16.0 * costs.target[0]
        self.rate = self._tokens / self._seconds

    def learn(self, tokens: int, seconds: float, weight: float = 1.0) -> None:
        """So many tokens took so many seconds."""
        keep = 0.5 ** (tokens / self._memory)
        self._tokens = keep * self._tokens + weight * tokens
        self._seconds = keep * self._seconds + weight * seconds
        self.rate = self._tokens / self._seconds

    def learn_plain(self, tokens: int, seconds: float) -> None:
        """The same as of so many rounds of a token each that took equally long."""
        each = 0.5 ** (1 / self._memory)
        self.learn(tokens, seconds, (1 - each**tokens) / ((1 - each) * max(tokens, 1)))

    def value(self, expected: float, seconds: float) -> float:
        """The worth of a round."""
        return expected - self.rate * seconds

    def beatable(self, best: float, lines: Iterable[Line], hoped: float, levels: int, most: int) -> bool:
        """Whether up to `levels` more levels of a draft, each at its step's price, could be worth more than `best`.

        A node is taken to be accepted with probability `hoped` where the one above it is. No more than `most` nodes are
        verified.
        """
        step, target = self.rate * self.costs.draft, self.costs.target
        most = min(most, len(target) - 1)
        for nodes, expected, chance, width in lines:
            for n in range(nodes + width, min(nodes + levels * width, most) + 1, width):
                chance *= hoped
                expected += chance - step
                if expected - self.rate * target[n] > best:
                    return True
        return False


class Size:
    """How many of the nodes found so far are worth verifying: those of greatest E − λ·T(n + 1), where that is more than
    what plain decoding and a `rival` give; without a worth, all.

    `by_model`: a model drafted them, whose steps are paid already.
    """

    def __init__(self, worth: Worth | None, most: int, rival: float = float("-inf"), by_model: bool = False) -> None:
        self.expected, self.count, self.best, self.most = 1.0, 0, rival, most
        self._worth, self._by_model = worth, by_model
        self._costs: list[float] = []  # λ·T(n + 1)
        if worth is not None:
            curve = worth.costs.target if by_model else worth.costs.undrafted
            self._costs = [worth.rate * seconds for seconds in curve[: most + 1]]
            self.best = max(rival, self._value(0, 1.0))

    def _value(self, nodes: int, chance: float) -> float:
        assert self._worth is not None
        value = self.expected - self._costs[nodes]
        if self._by_model:
            return value
        # Only chains are computed again, and the chance of a chain's last node is that of the whole.
        return value - self._worth.rate * self._worth.costs.again(nodes, self.expected, chance)

    def may_rise(self, nodes: int, chance: float) -> bool:
        """Whether more than `nodes` nodes could be worth more, if each had the chance of the next one."""
        if self._worth is None:
            return True
        expected = self.expected
        for cost in self._costs[nodes + 1 :]:
            expected += chance
            if expected - cost > self.best:
                return True
        return False

    def add(self, nodes: int, chance: float) -> None:
        """Another node is there, `nodes` in all."""
        self.expected += chance
        if self._worth is None:
            self.count = nodes
        elif (value := self._value(nodes, chance)) > self.best:
            self.best, self.count = value, nodes


# ── The length rule of greatest expected value ──

LONGEST_REST = 1024  # tokens of plain decoding before another try
PRIOR = 2.0  # tokens that the usual acceptance counts for, in addition to those of the round


@dataclass
class ExpectedValue(LengthRule):
    """The length of greatest E − λ·seconds, from measured costs and calibrated features (profile-guided lengths).

    Drafting goes on while up to `look_ahead` + 1 more tokens could beat the best length so far, if each were accepted
    with probability `optimism` + (1 − optimism)·(the mean so far). look_ahead 0 is the myopic rule. optimism 1 gives an
    upper bound of the gain, and drafts too much where drafting costs. All drafted tokens are submitted. The mean
    acceptance starts at `usual`.

    The rule decodes plainly for `probe` tokens after `patience` rounds in which nothing was worth submitting, or when
    the rounds together lost `allowance` tokens' time against plain decoding, and more than chance explains: `doubt`
    times the root of the sum of their squared losses. Then it tries again. It gives up after `tries` rounds or a
    quarter of the allowance, unless a round drafts something or the loss is made up for. While drafting has lost more
    than it gained in the whole text, each loss doubles the time of plain decoding. `usual`, `allowance` and `doubt`
    were chosen on validation traces: with 24 tokens and no doubt, pairs that cannot gain lost up to a tenth.
    """

    worth: Worth
    calibration: Calibration = field(default_factory=Calibration)
    longest: int = 15
    look_ahead: int = 15
    optimism: float = 0.3
    patience: int = 8
    tries: int = 4
    probe: int = 32
    allowance: float = 3.0
    doubt: float = 2.5
    usual: float = 0.6

    def __post_init__(self) -> None:
        self.costs, self._usual = self.worth.costs, self.usual
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
        return self.worth.value(expected, self.costs.target[drafted])

    def hoped(self, drafted: int, survival: float) -> float:
        """The acceptance of the next tokens, predicted from this round's `drafted` ones, all accepted with chance
        `survival`: their geometric mean, with the usual acceptance as PRIOR more tokens."""
        mean = (self._usual**PRIOR * survival) ** (1 / (PRIOR + drafted))
        return self.optimism + (1 - self.optimism) * mean

    def _beatable(self, drafted: int, expected: float, survival: float, best: float, ahead: int) -> bool:
        """Whether 1..`ahead` tokens after `drafted` ones could beat the value `best`, with the time of their steps."""
        if drafted == 0:  # the round's overhead, and a first step of two tokens, are still to be paid
            extra = self.costs.draft_two - self.costs.draft if self._whole else 0.0
            expected -= self.worth.rate * (self.costs.overhead + extra)
        line = Line(drafted, expected, survival)
        return self.worth.beatable(best, [line], self.hoped(drafted, survival), ahead, self.longest)

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

    def opens(self, size: Size, chances: Sequence[float], level: Sequence[int], depth: int) -> bool:
        """Whether a draft's tree, of nodes with these `chances`, is worth a step for a level below some of its nodes,
        which are `depth` deep."""
        expected, chance, lines = list(accumulate(chances, initial=1.0)), 0.0, list[Line]()
        for width, node in enumerate(level, start=1):
            chance += chances[node]
            nodes = max(size.count, node + 1)
            lines.append(Line(nodes, expected[nodes], chance, width))
        levels = min(self.look_ahead + 1, self.longest - depth)
        return self.worth.beatable(size.best, lines, self.hoped(depth, min(chance, 1.0)), levels, size.most)

    def caught_up(self, seconds: float) -> None:
        """Catching up counts as a loss."""
        self._loss += seconds / self.costs.target[0]
        self._gained -= seconds / self.costs.target[0]

    def resting(self) -> int:
        """The tokens of plain decoding left."""
        return self._plain

    def rested(self, tokens: int, seconds: float) -> None:
        """Learn λ."""
        self.worth.learn_plain(tokens, seconds)
        self._whole = False
        self._plain -= tokens

    def observe(self, drafted: int, accepted: int, features: Sequence[Features], seconds: float) -> None:
        """Learn λ and the usual acceptance; switch to plain decoding, or back from it."""
        tokens = accepted + 1
        self._whole = accepted == drafted > 0
        self.worth.learn(tokens, seconds)
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

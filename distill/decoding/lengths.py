"""Length rules: how many tokens a round drafts.

A drafter asks its rule through five calls. Four of them decide and change nothing: `limit`, `chance`, `steps` and
`size`. They may be called in any order and repeatedly. The fifth call, `observe`, ends the round, and the rule learns
from the round. A `Drafting` holds what a round has drafted so far. The drafter keeps it and gives it to every call.

A rule decides whether a position is verified before the position's token is drawn. Otherwise the output would not
follow the target's distribution. A rule sees the draft's probabilities, never a drawn token, and it reads no clock.
`n_min` drops drafts after their draw, as llama.cpp does. `verify.refusal` refuses a sampled draft under `n_min` if that
would change the output.

Legend: n drafted tokens of a round, T(m) seconds of a target's step of m tokens, D seconds of a draft's step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar

from distill.decoding.costs import Costs


@dataclass
class Drafting:
    """A round while it is drafted.

    - The draft's first step reads `unread` tokens of the context. At most `left` tokens will be decoded in this text.
      At most `most` drafted tokens are verified.
    - `steps` are the tokens that each of the draft's steps has read. It is empty if no model drafts.
    - `chances` has a probability for each token found: that this token and all before it on its path are accepted. The
      probabilities fall along a chain. A tree has its best nodes first.
    - The first `kept` tokens of a chain are drawn already, so they must be verified. A tree has no such tokens.
    - `leaves` are the tokens below which the draft can continue, the likeliest first. The first is `depth` tokens deep.
    - `judged` are positions that the target has judged. Each has the position, the probability that the drafter gave to
      its best token, and 1 if that token was right or 0 if it was wrong.
    - The draft read `read` tokens of text before the round, in `reading` seconds.
    """

    unread: int = 1
    left: float = math.inf
    most: int = 63
    steps: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    kept: int = 0
    leaves: Sequence[int] = ()
    depth: int = 0
    judged: list[tuple[int, float, float]] = field(default_factory=list)
    read: int = 0
    reading: float = 0.0

    def append(self, chance: float) -> None:
        """Add a token to the end of a chain, accepted with this probability if all tokens before it are."""
        self.depth = len(self.chances) + 1
        self.chances.append(chance * (self.chances[-1] if self.chances else 1.0))
        self.leaves = (self.depth - 1,)


@dataclass(kw_only=True)
class LengthRule:
    """The five calls of a rule. This base class verifies everything found and learns nothing.

    A draft of fewer than `n_min` tokens is dropped. `reads_probability` says that the rule reads the draft's
    probabilities, whose distribution takes time to compute. `weighs_reading` says that the rule decides whether the
    draft reads a prompt at all.
    """

    n_min: int = 0
    reads_probability: ClassVar[bool] = True
    weighs_reading: ClassVar[bool] = False

    def limit(self) -> int:
        """Return the maximum tokens of a chain, or of a path of a tree. 0 means plain decoding."""
        raise NotImplementedError

    def chance(self, position: int, probability: float) -> float:
        """Return the probability that the token at `position` (from 0) is accepted if all tokens before it are.

        `probability` is the draft's probability of its best token there.
        """
        return probability

    def steps(self, drafting: Drafting) -> int:
        """Return the number of leaves that the draft's next step extends. A chain has one leaf. 0 ends drafting."""
        return max(len(drafting.leaves), 1) if self.size(drafting) == len(drafting.chances) else 0

    def size(self, drafting: Drafting, rival: Drafting | None = None) -> int:
        """Return how many of the tokens found are verified. They are the first ones.

        For a chain that no model drafted, 0 rejects the chain. The round then goes to `rival`, a draft that has not
        begun. Without a rival it is plain.
        """
        return len(drafting.chances)

    def observe(self, drafting: Drafting, nodes: int, accepted: int, seconds: float) -> None:
        """End the round: `nodes` tokens were verified, and `accepted` accepted, in `seconds` without `reading`."""


@dataclass
class Fixed(LengthRule):
    """Always draft the same length. 0 means plain decoding."""

    length: int
    reads_probability = False

    def limit(self) -> int:
        """Return the length."""
        return self.length


@dataclass
class ProbabilityFloor(Fixed):
    """Draft while the draft's largest probability is at least a floor.

    The probability is read before the draw, so that the rule is lossless for every draft. `later` is the floor after
    the first position. None stands for `p_min`.
    """

    p_min: float
    later: float | None = None
    reads_probability = True

    def chance(self, position: int, probability: float) -> float:
        """Return 1 if the probability reaches the position's floor, and 0 if not."""
        return float(probability >= (self.p_min if not position or self.later is None else self.later))

    def size(self, drafting: Drafting, rival: Drafting | None = None) -> int:
        """Return the number of tokens before the first one below the floor."""
        return sum(chance > 0 for chance in drafting.chances)


@dataclass
class AcceptedRatio(Fixed):
    """Draft one token more after each round if accepted ÷ drafted is at least a floor, and one token fewer if not.

    The ratio covers the last rounds, because each new round multiplies the weight of the rounds before by `keep`. The
    floor is `base + rise·length`, at most 0.95.
    """

    length: int = 4
    base: float = 0.4
    rise: float = 0.03
    keep: float = 0.9
    shortest: int = 1
    longest: int = 16
    _drafted: float = field(default=0.0, init=False)
    _accepted: float = field(default=0.0, init=False)

    def observe(self, drafting: Drafting, nodes: int, accepted: int, seconds: float) -> None:
        """Update the ratio, then step the length within [shortest, longest]."""
        if not nodes:
            return
        self._drafted = self.keep * self._drafted + nodes
        self._accepted = self.keep * self._accepted + accepted
        floor = min(self.base + self.rise * self.length, 0.95)
        step = 1 if self._accepted >= floor * self._drafted else -1
        self.length = min(max(self.length + step, self.shortest), self.longest)


@dataclass
class BetaFilter(Fixed):
    """Count acceptance per (position, confidence bin), and draft while the product of its means is at least `floor`.

    Drafting begins if the first position's mean is at least `start`. None stands for `floor`.

    A cell starts as a Beta prior worth `weight` observations at the bin's middle. Each judged token multiplies the
    cell's older counts by `keep`. Position j is judged only if it was drafted and reached.
    """

    floor: float = 0.3
    bins: int = 8
    weight: float = 4.0
    keep: float = 0.98
    start: float | None = None
    reads_probability = True
    counts: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict, init=False)  # (accepted, judged)

    def cell(self, position: int, probability: float) -> tuple[int, int]:
        """Return the cell that counts a position with this probability."""
        return position, min(int(probability * self.bins), self.bins - 1)

    def chance(self, position: int, probability: float) -> float:
        """Return the cell's posterior mean."""
        cell = self.cell(position, probability)
        accepted, judged = self.counts.get(cell, (0.0, 0.0))
        return (accepted + self.weight * (cell[1] + 0.5) / self.bins) / (judged + self.weight)

    def size(self, drafting: Drafting, rival: Drafting | None = None) -> int:
        """Return the number of tokens that reach their position's threshold with all tokens before them accepted."""
        first = self.floor if self.start is None else self.start
        return sum(chance >= (self.floor if at else first) for at, chance in enumerate(drafting.chances))

    def observe(self, drafting: Drafting, nodes: int, accepted: int, seconds: float) -> None:
        """Count the judged positions."""
        for position, probability, right in drafting.judged:
            if position < nodes:
                cell = self.cell(position, probability)
                old, judged = self.counts.get(cell, (0.0, 0.0))
                self.counts[cell] = (self.keep * old + right, self.keep * judged + 1)


# ── The adaptive length ──

# `scripts/benchmarks/rules.py --constants` halves and doubles each constant. For constants that must stay below 1, it
# halves and doubles the distance to 1. The figures are mean speeds after 64 (400) rounds, relative to the best fixed
# length. With the values below the mean speed is 1.003 (1.009). The simulated rounds take exactly the timed seconds, so
# that the last two constants have no effect there.

# The rule assumes this acceptance of an unknown draft, so that the draft is tried. 0.9 gives 0.997 (1.012), 0.6 gives
# 0.990 (1.006).
START_ACCEPTANCE = 0.8
# The assumption counts as much as this many judged tokens. 2 gives 0.999 (1.011), 8 gives 1.001 (1.012).
START_TOKENS = 4.0
# Each judged token multiplies the weight of the tokens before it by this factor, so that some 50 tokens count. 0.99
# gives 1.003 (1.012). 0.96 gives 1.001 (1.008), and 0.875 instead of 0.957 in the worst of 56 cells.
MEMORY = 0.98
# The logit of the draft's probability is rounded to −5, …, 5. 2 gives 1.001 (1.012), 10 gives 1.003 (1.009).
CONFIDENCES = 5
# Trials may cost this share of the time of all decoded tokens. 0.0025 gives 1.002 (1.011), 0.01 gives 0.997 (1.007).
SHARE = 0.005
# A kind of round may lose the time of this many tokens to plain decoding, in addition to its SHARE. 2 gives 1.000
# (1.009), and 0.884 in the worst cell. 8 changes nothing, because the estimates are good by then.
BUDGET = 4.0
# The latest rounds of a kind, up to this number, correct its timed seconds.
RATIO_ROUNDS = 16
# If a round takes more than this many times its expected seconds, another program delayed the round.
MOST_DELAY = 2.0

PLAIN, DRAFT, TEXT, READING = "plain", "draft", "text", "reading"  # kinds of rounds, and the draft's reading of prompts


class Mean:
    """A mean that starts as START_TOKENS values of `start`. Each new value multiplies the old weight by MEMORY."""

    def __init__(self, start: float) -> None:
        self._sum, self._weight = START_TOKENS * start, START_TOKENS

    @property
    def value(self) -> float:
        """Return the mean."""
        return self._sum / self._weight

    def add(self, value: float) -> None:
        """Count one more value."""
        self._sum = MEMORY * self._sum + value
        self._weight = MEMORY * self._weight + 1


@dataclass
class Adaptive(LengthRule):
    """Draft the number of tokens with the most expected tokens per second.

    The rule estimates the acceptance of each position and of each confidence of the draft, as means over the latest
    judged tokens. The confidence is the draft's probability of its best token. A few timed steps give the seconds of a
    round, T(n + 1) + n·D. A ratio of measured to expected seconds corrects them for each kind of round: plain, of a
    draft, and of text (lookups and tables).

    Before a round the rule compares all lengths by the acceptance of their positions. After each step of the draft it
    compares the tokens found, by their confidence, with all longer rounds. It ends drafting if no longer round promises
    more tokens per second.

    A slower kind is tried again when its expected loss is at most SHARE of the tokens decoded since its last round. If
    a kind has lost more to plain decoding than the time of BUDGET tokens plus SHARE of all tokens, it stops until that
    share has grown. For each kind, a session loses to plain decoding little more than BUDGET and SHARE of its tokens.
    """

    costs: Costs
    longest: int = 15
    weighs_reading = True

    def __post_init__(self) -> None:
        self._positions = [Mean(START_ACCEPTANCE)]  # those judged so far; later ones are taken to be like the last
        self._confidences = [Mean(1 / (1 + math.exp(-logit))) for logit in range(-CONFIDENCES, CONFIDENCES + 1)]
        self._ratios = dict.fromkeys((PLAIN, DRAFT, TEXT, READING), (1.0, 1))  # and over how many rounds
        self._lost = {DRAFT: 0.0, TEXT: 0.0}  # tokens' time
        self._since = {PLAIN: 0, DRAFT: 0, TEXT: 0}  # tokens decoded since the last round of a kind
        self._tokens, self._looked_up = 0, Mean(0.0)  # and the share of them that lookups found
        self._unpaid, self._instalment = 0.0, 0.0  # of a prompt that was read: tokens' time, in all and for each token

    def limit(self) -> int:
        """Return `longest`, or the last length that the cost curve covers."""
        return min(self.longest, len(self.costs.target) - 1)

    # What is expected.

    def _confidence(self, probability: float) -> Mean:
        if not 0 < probability < 1:
            return self._confidences[-1 if probability else 0]
        logit = round(math.log(probability) - math.log1p(-probability))
        return self._confidences[max(-CONFIDENCES, min(logit, CONFIDENCES)) + CONFIDENCES]

    def chance(self, position: int, probability: float) -> float:
        """Return the mean acceptance at this confidence."""
        return self._confidence(probability).value

    def _seconds(self, kind: str, nodes: int, steps: float = 0.0, again: float = 0.0) -> float:
        """Return the expected seconds of the draft's steps, the target's step, and what the target recomputes."""
        return self._ratios[kind][0] * (steps + self.costs.target[nodes] + again)

    def _plain_rate(self) -> float:
        return 1 / self._seconds(PLAIN, 0, again=self.costs.again(0, 1.0, 1.0))

    def _reading(self, drafting: Drafting) -> float:
        """Return the expected seconds of reading a prompt before the draft's first step, which reads a short text."""
        if drafting.steps or drafting.unread < len(self.costs.target):
            return 0.0
        return self._ratios[READING][0] * self.costs.draft_prompt * drafting.unread

    def _found(self, drafting: Drafting, least: int = 0) -> tuple[int, float, float]:
        """Return the best number, at least `least`, of found tokens to verify, with expected tokens and seconds."""
        kind = DRAFT if drafting.steps else TEXT
        costs, steps = self.costs, sum(map(self.costs.draft_step, drafting.steps))
        best, expected, whole = (0, 1.0, math.inf), 1.0, 1.0
        for nodes in range(min(len(drafting.chances), len(costs.target) - 1) + 1):
            if nodes:
                whole = drafting.chances[nodes - 1]
                expected += whole
            if nodes >= least:
                seconds = self._seconds(kind, nodes, steps, costs.again(nodes, expected, whole))
                if expected * best[2] > best[1] * seconds:
                    best = nodes, expected, seconds
        return best

    def _ahead(self, drafting: Drafting) -> tuple[int, float, float]:
        """Return the best number of leaves for one or more further steps, with the round's expected tokens and seconds.

        Every step finds one more token below each of the leaves. The token is accepted with its position's mean. The
        new tokens replace the last tokens found if more than `most` would be verified. The time of reading an unread
        prompt is spread over all tokens left in the text, except those that lookups are expected to find.
        """
        costs, chances = self.costs, drafting.chances
        most = min(drafting.most, len(costs.target) - 1)
        count = self._found(drafting, drafting.kept)[0]
        sums = [*accumulate(chances, initial=1.0)]
        reading = self._reading(drafting)
        first, left = 1 if reading else drafting.unread, max(drafting.left * (1 - self._looked_up.value), 1.0)
        before = sum(map(costs.draft_step, drafting.steps))
        best, reached = (0, 1.0, math.inf), 0.0
        for width, leaf in enumerate(drafting.leaves or (-1,), start=1):
            reached += chances[leaf] if leaf >= 0 else 1.0
            steps, chance, more = before, reached, 0.0
            for level in range(self.limit() - drafting.depth):
                steps += costs.draft_step(first if not (drafting.steps or level) else width)
                chance *= self._positions[min(drafting.depth + level, len(self._positions) - 1)].value
                more += chance
                added = (level + 1) * width
                nodes = max(min(count, most - added), leaf + 1)
                if nodes + added > most:
                    break
                expected = sums[nodes] + more
                seconds = self._seconds(DRAFT, nodes + added, steps, costs.again(nodes + added, expected, chance))
                seconds += reading * expected / left
                if expected * best[2] > best[1] * seconds:
                    best = width, expected, seconds
        return best

    # What is decided.

    def _chosen(self, kind: str, expected: float, seconds: float, reading: float = 0.0) -> bool:
        """Whether this kind of round, which is faster or due for a trial, takes the place of a plain round."""
        if self._lost[kind] > BUDGET + SHARE * self._tokens:
            return False
        plain, rate = self._plain_rate(), expected / seconds
        if rate > plain:
            return rate / plain - 1 > SHARE * self._since[PLAIN]  # if not, a plain round is due
        return (seconds + reading) * plain - expected <= SHARE * self._since[kind]

    def steps(self, drafting: Drafting) -> int:
        """Return the number of leaves to extend, or 0 if verifying the tokens found promises more."""
        width, expected, seconds = self._ahead(drafting)
        if not width:
            return 0
        if not drafting.steps:
            return width if self._chosen(DRAFT, expected, seconds, self._reading(drafting)) else 0
        _, now, now_seconds = self._found(drafting, drafting.kept)
        return width if expected / seconds > now / now_seconds else 0

    def size(self, drafting: Drafting, rival: Drafting | None = None) -> int:
        """Return the number of tokens with the most expected tokens per second."""
        if drafting.steps:
            return self._found(drafting, drafting.kept or self._least(drafting))[0]
        nodes, expected, seconds = self._found(drafting, 1)
        if nodes and rival is not None and self.steps(rival):
            _, other, other_seconds = self._ahead(rival)
            if other / other_seconds > expected / seconds:
                return 0
        return nodes if nodes and self._chosen(TEXT, expected, seconds) else 0

    def _least(self, drafting: Drafting) -> int:
        """Return 1 in a trial, and 0 in other rounds. A trial teaches nothing unless it verifies a token."""
        _, expected, seconds = self._ahead(Drafting(left=drafting.left, most=drafting.most))
        return int(bool(drafting.chances) and expected / seconds <= self._plain_rate())

    # What is learnt.

    def observe(self, drafting: Drafting, nodes: int, accepted: int, seconds: float) -> None:
        """Learn the acceptance, the seconds of this kind of round, and what the kind has lost."""
        kind, tokens = DRAFT if drafting.steps else TEXT if nodes else PLAIN, accepted + 1
        for position, probability, right in drafting.judged:
            self._confidence(probability).add(right)
            if position == len(self._positions):
                self._positions.append(Mean(self._positions[-1].value))
            self._positions[min(position, len(self._positions) - 1)].add(right)
        steps = sum(map(self.costs.draft_step, drafting.steps))
        seconds = self._correct(kind, seconds, self._seconds(kind, min(nodes, len(self.costs.target) - 1), steps))
        self._tokens += tokens
        for number in range(tokens):
            self._looked_up.add(float(kind == TEXT and number < accepted))
        self._since = {other: 0 if other == kind else since + tokens for other, since in self._since.items()}
        if kind != PLAIN:
            self._lost[kind] += seconds * self._plain_rate() - tokens
        if drafting.read:
            expected = self._ratios[READING][0] * self.costs.draft_prompt * drafting.read
            reading = self._correct(READING, drafting.reading, expected) if expected else drafting.reading
            self._lost[DRAFT] += self._unpaid  # of a text that ended early
            self._unpaid = reading * self._plain_rate()
            self._instalment = self._unpaid / max(drafting.left, 1.0)
        paid = min(self._unpaid, tokens * self._instalment)
        self._unpaid -= paid
        self._lost[DRAFT] += paid

    def _correct(self, kind: str, seconds: float, expected: float) -> float:
        """Count the seconds of a round in its kind's ratio. Return them within MOST_DELAY times the expected ones."""
        seconds = min(max(seconds, expected / MOST_DELAY), expected * MOST_DELAY)
        ratio, rounds = self._ratios[kind]
        rounds = min(rounds + 1, RATIO_ROUNDS)
        self._ratios[kind] = ratio + (seconds / expected - 1) * ratio / rounds, rounds
        return seconds

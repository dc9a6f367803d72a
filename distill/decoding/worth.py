"""What drafted tokens are worth: expected tokens less λ × seconds, the one sum that sizes chains, lookups and trees;
and the length rule that drafts by it.

Legend: n tokens drafted, E expected tokens of a round, T target, λ tokens per second in the long run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean

from distill.decoding.calibration import UNFITTED, Calibration, Correction
from distill.decoding.costs import Costs
from distill.decoding.lengths import Features, LengthRule

HELD_UP = 4.0  # times its costs: what took longer was held up by something else, and counts as this much
KEPT = 0.98  # of what rounds told about costs, with each round
# Rounds that the costs timed before the session count for, and that one kind of round learns from the others.
TIMED = 2.0
PLAIN_AGAIN, OTHER = 1.5, 0.08  # plain rounds that are asked for, where others took this many times exp(±OTHER)
NEWS = 0.02  # a smaller change of costs waits
TEXTS = 16  # whose lengths are remembered


class Worth:
    """E − λ·seconds of a round, from measured costs and from λ, which all rounds of a session tell.

    λ is a moving average in which a token counts half after `memory` more; it starts at 1/T(1). The session's rounds
    correct the costs, too, by a factor for each kind of round (plain, of a draft, of text or counts): these may have
    been timed while the machine was busy, or behind other texts.
    """

    def __init__(self, costs: Costs, memory: float = 400.0) -> None:
        self.costs, self._memory = costs, memory
        self._timed, self._factors = costs, (0.0, 0.0, 0.0)  # logarithms
        self._told = [[0.0, 0.0] for _ in self._factors]  # sums of logarithms of measured ÷ timed, and of weights
        self._tokens, self._seconds = 16.0, 16.0 * costs.target[0]
        self.rate = self._tokens / self._seconds
        self.shared, self._undrafted = False, 0.0  # of these tokens, those of rounds of text or counts
        self._made, self._lasted = 0, list[int]()  # tokens of this text, and of those before

    def begin(self, rate: float) -> None:
        """λ at the start of a session in which drafting is expected to bring this rate."""
        self._seconds, self.rate = self._tokens / rate, rate

    def next_text(self) -> None:
        """A text begins."""
        self._lasted = [*self._lasted, self._made][-TEXTS:] if self._made else self._lasted
        self._made = 0

    def shares(self) -> None:
        """A lookup comes before the draft: the texts are taken to be its by half, until they tell."""
        self.shared, self._undrafted = True, self._tokens / 2

    def left(self, limit: float) -> float:
        """How many of at most `limit` further tokens of this text are expected, and not in rounds of text or counts.

        Texts last as those before that had lasted longer than this one has; beyond all of them, as long again. Without
        any, to the limit.
        """
        longer = [min(lasted - self._made, limit) for lasted in self._lasted if lasted > self._made]
        left = fmean(longer) if longer else min(self._made, limit) if self._lasted else limit
        return left * (1 - self._undrafted / self._tokens)

    def read(self, tokens: int, seconds: float) -> None:
        """A draft has read so many tokens of a prompt, which tells the price of the next one."""
        timed = self._timed.draft_prompt
        seconds = min(seconds / tokens, HELD_UP * timed) if timed else seconds / tokens
        price = (max(seconds, 0.0) + timed) / 2
        self._timed = replace(self._timed, draft_prompt=price)
        self.costs = replace(self.costs, draft_prompt=price)

    def learn(self, tokens: int, seconds: float, drafted: int = 0, paid: float = 0.0, by_model: bool = False) -> float:
        """A round of `drafted` nodes gave this many tokens; returns its seconds as far as they count.

        `paid`: what its draft's steps cost by `costs`. `by_model`: a model drafted, or was asked.
        """
        curve = self.costs.target if by_model or not drafted else self.costs.undrafted
        priced = curve[min(drafted, len(curve) - 1)] + paid
        seconds = min(max(seconds, 0.0), HELD_UP * priced)
        keep = 0.5 ** (tokens / self._memory)
        kind = 1 if by_model and (drafted or paid) else 2 if drafted else 0
        self._tokens = keep * self._tokens + tokens
        self._seconds = keep * self._seconds + seconds
        self._undrafted = keep * self._undrafted + tokens * (kind == 2)
        self._made += tokens
        self.rate = self._tokens / self._seconds
        if seconds > 0:
            self._correct(kind, math.log(seconds / priced) + self._factors[kind])
        return seconds

    def asks_for_plain(self) -> bool:
        """Whether a plain round is due: rounds of a draft took other times than timed, and no plain one has told yet
        whether the machine is as much slower or faster."""
        (_, plain), (_, drafted), _ = self._told
        return plain < PLAIN_AGAIN and drafted > PLAIN_AGAIN and abs(self._factors[1]) > OTHER

    def _correct(self, kind: int, told: float) -> None:
        """A round of a kind took exp(`told`) times what was timed before the session."""
        self._told = [[KEPT * part for part in sums] for sums in self._told]
        self._told[kind][0] += told
        self._told[kind][1] += 1
        mean = sum(own for own, _ in self._told) / (TIMED + sum(weight for _, weight in self._told))
        factors = [(own + TIMED * mean) / (weight + TIMED) for own, weight in self._told]
        if max(abs(new - old) for new, old in zip(factors, self._factors, strict=True)) > NEWS:
            self._factors = factors[0], factors[1], factors[2]
            self.costs = self._timed.scaled(*map(math.exp, factors))

    def value(self, expected: float, seconds: float) -> float:
        """The worth of a round."""
        return expected - self.rate * seconds

    def best(self, offers: Sequence[tuple[float, float]]) -> int:
        """Which of some rounds, (E, seconds) each, to begin; of equal ones the first.

        Where none of them brings λ, the text is slow here, and the next rounds will be, too: the fastest of them is
        begun. By λ that would be the shortest.
        """
        rate = min(self.rate, max(expected / seconds for expected, seconds in offers))
        return max(range(len(offers)), key=lambda number: offers[number][0] - rate * offers[number][1])

    def reach(
        self, nodes: int, expected: float, chance: float, hoped: float, levels: int, most: int, width: int = 1
    ) -> float:
        """The greatest worth that one to `levels` more levels of a draft, each at its step's price, are expected to
        have; −∞ where there is no room.

        Drafted are `nodes` so far, of E = `expected`; below the last `width` of them, of which one is reached with the
        chance `chance`, every further level has a node. It is taken to be accepted with probability `hoped` where the
        one above it is. No more than `most` nodes are verified.
        """
        target, best = self.costs.target, float("-inf")
        step = self.rate * self.costs.draft_step(width)
        for n in range(nodes + width, min(nodes + levels * width, most, len(target) - 1) + 1, width):
            chance *= hoped
            expected += chance - step
            best = max(best, expected - self.rate * target[n])
        return best


class Losses:
    """What drafting has lost against plain decoding, in tokens' time, and whether it may go on.

    It may lose `allowance` in all, or what chance explains (`doubt` times the root of the sum of squared losses), a
    hundredth of a token more with each token decoded, and half of the most that it has gained in this session.
    """

    def __init__(self, allowance: float = 2.5, doubt: float = 1.5) -> None:
        self._allowance, self._doubt = allowance, doubt
        # What was gained in all, the most that it ever was, and the squares of losses since then.
        self._gained, self._most, self._squares, self._tokens = 0.0, 0.0, 0.0, 0

    def affordable(self) -> bool:
        """Whether drafting has not lost more than it may."""
        lost, most = self._most - self._gained, max(self._allowance, self._doubt * self._squares**0.5)
        return lost < most + 0.01 * self._tokens + 0.5 * self._most

    def age(self, tokens: int) -> None:
        """So many tokens were decoded."""
        self._tokens += tokens
        self._squares *= 0.5 ** (tokens / 400)

    def lose(self, lost: float) -> None:
        """A cost that no round has."""
        self._gained -= lost

    def learn(self, worth: Worth, drafted: int, tokens: int, seconds: float) -> None:
        """A round without a model gave this many tokens: tell `worth`, and count it if some were drafted."""
        seconds = worth.learn(tokens, seconds, drafted)
        if drafted:
            self.count(seconds / worth.costs.target[0] - tokens)

    def count(self, lost: float) -> None:
        """A round with drafted tokens, or with a draft's steps."""
        self._gained -= lost
        self._squares += lost * lost
        if self._gained >= self._most:
            self._most, self._squares = self._gained, 0.0


class Size:
    """How many of the nodes found so far are worth verifying: those of greatest E − λ·T(n + 1), where that is more than
    what plain decoding gives; without a worth, all.

    `by_model`: a model drafted them, whose steps are paid already.
    """

    def __init__(self, worth: Worth | None, most: int, by_model: bool = False) -> None:
        self.expected, self.count, self.best, self.most = 1.0, 0, float("-inf"), most
        self._worth, self._by_model = worth, by_model
        self._costs: list[float] = []  # λ·T(n + 1)
        if worth is not None:
            curve = worth.costs.target if by_model else worth.costs.undrafted
            self._costs = [worth.rate * seconds for seconds in curve[: most + 1]]
            self.best = self._value(0, 1.0)

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

UNKNOWN = 2.1, 0.9  # accepted and rejected tokens that stand for a draft of which nothing is known
MOST_KNOWN = 16.0  # tokens that the positions of a calibration count for at most
# Strengths of a calibration against a session's own rounds.
WITH_CALIBRATION, WITHOUT_CALIBRATION = (16.0, 24.0), (4.0, 12.0)


@dataclass
class ExpectedValue(LengthRule):
    """The length of greatest E − λ·seconds, from measured costs and calibrated features (profile-guided lengths).

    Drafting goes on while more tokens could beat the best length so far. They are taken to be accepted with the
    geometric mean of this round's probabilities and of the mean acceptance, which counts for `own` tokens. That mean
    has a Beta distribution: it begins with the positions of the calibration, or with UNKNOWN, and a position counts
    `forget` times less with every token after it. Whether a round drafts at all is asked of the mean and `optimism`
    standard deviations of it, so that a draft of which little is known is tried, and likewise whether its first token
    is verified. Probabilities are corrected by the session's own rounds.

    Where rounds with a draft have lost more than `Losses` allows, the rule decodes plainly.
    """

    worth: Worth
    calibration: Calibration = UNFITTED
    longest: int = 15
    optimism: float = 0.5
    allowance: float = 2.5
    doubt: float = 1.5
    forget: float = 0.99
    own: float = 2.0

    def __post_init__(self) -> None:
        costs, calibration = self.costs, self.calibration
        self._prior, strengths = UNKNOWN, WITHOUT_CALIBRATION
        if calibration.judged:
            count, strengths = min(MOST_KNOWN / calibration.judged, 1.0), WITH_CALIBRATION
            rejected = calibration.judged - calibration.accepted
            self._prior = 0.5 + count * calibration.accepted, 0.5 + count * rejected
        self._correction = Correction(strengths)
        self._seen = [0.0, 0.0]  # accepted and rejected tokens of this session, as far as they count
        if calibration.judged:  # λ is that of the best length at this acceptance
            expected = accumulate(accumulate([1.0] + [self._mean()] * self.limit(), lambda a, b: a * b))
            rounds = enumerate(zip(expected, costs.target, strict=False))
            self.worth.begin(max(e / (t + n * costs.draft + (n > 0) * costs.overhead) for n, (e, t) in rounds))
        self._start()
        self._nodes = 0  # of the round's tree
        # Tokens of the context that the round's first step reads, and that are left of the text at most.
        self._unread, self._left = 1, math.inf
        # Rounds with a draft, and those of them that began with what was decoded without it.
        self._rounds, self._interrupted = 8.0, 1.0
        self._losses = Losses(self.allowance, self.doubt)

    @property
    def costs(self) -> Costs:
        """The costs as the session's rounds have corrected them."""
        return self.worth.costs

    def _mean(self, deviations: float = 0.0) -> float:
        """The mean acceptance, and this many standard deviations of it more."""
        accepted, rejected = (prior + seen for prior, seen in zip(self._prior, self._seen, strict=True))
        mean = accepted / (accepted + rejected)
        if not deviations:
            return mean
        return min(mean + deviations * (mean * (1 - mean) / (accepted + rejected + 1)) ** 0.5, 0.995)

    def limit(self) -> int:
        """`longest`, as far as the curve reaches."""
        return min(self.longest, len(self.costs.target) - 1)

    def _start(self) -> None:
        # n so far in this round, E of the round as it stands, the chance of all so far; seconds of its draft's steps
        self._drafted, self._expected, self._survival, self._paid = 0, 1.0, 1.0, 0.0
        self._declined: float | None = None  # the probability of a position that was looked at and not drafted

    def _value(self, drafted: int, expected: float) -> float:
        """E − λ·T(n + 1); the time of drafting is spent already."""
        return self.worth.value(expected, self.costs.target[drafted])

    def hoped(self, drafted: int, survival: float) -> float:
        """The acceptance of the next tokens, predicted from this round's `drafted` ones, all accepted with chance
        `survival`."""
        if not drafted:
            return self._mean(self.optimism)
        return float((self._mean() ** self.own * survival) ** (1 / (self.own + drafted)))

    def _beatable(self, drafted: int, expected: float, survival: float, best: float) -> bool:
        """Whether tokens after `drafted` ones could beat the value `best`, with the time of their steps."""
        hoped = self.hoped(drafted, survival)
        return self.worth.reach(drafted, expected, survival, hoped, self.longest, self.longest) > best

    def begin(self) -> None:
        """A text begins."""
        self.worth.next_text()

    def behind(self, unread: int, left: float = math.inf) -> None:
        """Note what the first step reads, and how many tokens are left."""
        self._unread, self._left = unread, left

    def _first_step(self) -> tuple[float, float]:
        """What a round must earn for its first step, and each of its tokens for reading a long text, such as a prompt.

        What was decoded without the draft is read for the rounds to come as well. Of a few tokens this one pays the
        share of rounds that begin so; a long text is paid by all tokens that are left of the text. A draft alone of
        which nothing is known reads one to be tried.
        """
        if self._unread <= len(self.costs.target):
            alone = self.costs.draft_step(min(self._unread, 2))
            late = (self.costs.draft_step(self._unread) - alone) * self._interrupted / self._rounds
            return alone + late, 0.0
        known = self.calibration.judged or any(self._seen) or self.worth.shared
        long = self.costs.draft_prompt * self._unread / max(self.worth.left(self._left), 1.0)
        return self.costs.draft, long if known else 0.0

    def offers(self) -> list[tuple[float, float]]:
        """(E, seconds) of the rounds of 0, 1, … tokens that are expected before the first step; beyond plain ones none
        where drafting has lost too much."""
        found = [(1.0, self.costs.target[0])]
        if self._losses.affordable():
            first, each = self._first_step()
            # No prompt is read on the hope alone that a draft of which nothing is known is better than usual.
            hoping = self.calibration.judged or not each
            mean, survival, expected = self.hoped(0, 1.0) if hoping else self._mean(), 1.0, 1.0
            paid = self.costs.overhead + first
            for n in range(1, self.limit() + 1):
                survival *= mean
                expected += survival
                found.append((expected, self.costs.target[n] + paid + each * expected))
                paid += self.costs.draft
        return found

    def step_on(self, position: int) -> bool:
        """Whether drafting more could beat the tokens drafted so far."""
        if position == 0:
            self._start()
            if self.worth.asks_for_plain() or not self.worth.best(self.offers()):
                return False
            self._paid = self.costs.draft_step(self._unread) + self.costs.overhead
            return True
        best = self._value(self._drafted, self._expected)
        if not self._beatable(self._drafted, self._expected, self._survival, best):
            return False
        self._paid += self.costs.draft
        return True

    def accept(self, position: int, features: Features, deviations: float = 0.0) -> float:
        """The corrected probability that the best token at `position` is accepted, given that all before it are; its
        logit raised by that many of its standard deviations."""
        return self._correction.probability(self.calibration.accept(position, features), deviations)

    def judged(self, position: int, features: Features, accepted: bool) -> None:
        """The target has judged the best token at a position."""
        self._correction.learn(self.calibration.accept(position, features), accepted)

    def go_on(self, position: int, features: Features) -> bool:
        """Whether this token, alone or with more, could beat the tokens drafted so far."""
        best = self._value(self._drafted, self._expected)
        probability = self.accept(position, features)
        # A step whose token is never judged teaches nothing: the first is verified where a draft as much better than
        # its rounds so far as `optimism` would be worth it.
        hoped = probability if position else self.accept(position, features, self.optimism)
        drafted, survival = self._drafted + 1, self._survival * hoped
        expected = self._expected + survival
        if self._value(drafted, expected) <= best and not self._beatable(drafted, expected, survival, best):
            self._declined = probability
            return False
        self._drafted, self._survival = drafted, self._survival * probability
        self._expected += self._survival
        return True

    def opens(self, size: Size, chances: Sequence[float], leaves: Sequence[int], depth: int) -> int:
        """Below how many of its `leaves`, the likeliest first, a draft's tree of nodes with these `chances` is worth a
        step for further nodes; 0: no step. The first one is `depth` deep."""
        expected, chance, best, count = list(accumulate(chances, initial=1.0)), 0.0, size.best, 0
        hoped = self.hoped(depth, chances[leaves[0]])
        for width, node in enumerate(leaves, start=1):
            chance += chances[node]
            # Nodes of one, two or four more levels may take the place of the least likely ones, of the tree as it is
            # worth most so far and of a full one.
            kept = {most - levels * width for most in (size.count, size.most) for levels in (1, 2, 4)}
            for nodes in {max(nodes, node + 1) for nodes in (size.count, *kept)}:
                own = expected[min(nodes, len(chances))]
                worth = self.worth.reach(nodes, own, chance, hoped, self.longest - depth, size.most, width)
                if worth > best:
                    best, count = worth, width
        self._paid += self.costs.draft_step(count) if count else 0.0
        return count

    def verified(self, nodes: int) -> None:
        """Note how many nodes a tree has that is to be observed by its levels."""
        self._nodes = nodes

    def caught_up(self, seconds: float) -> None:
        """Catching up counts as a loss; the first step of this round read one token after it."""
        self._paid -= self.costs.draft_step(self._unread) - self.costs.draft
        self._losses.lose(seconds / self.costs.target[0])

    def read(self, seconds: float) -> None:
        """The draft has read the prompt, which no round pays for; the first step reads one token after it."""
        self.caught_up(0.0)
        self.worth.read(self._unread - 1, seconds)
        self._unread = 1

    def _age(self, tokens: int) -> None:
        self._losses.age(tokens)
        self._correction.age(tokens)
        self._seen = [self.forget**tokens * seen for seen in self._seen]

    def observe(self, drafted: int, accepted: int, features: Sequence[Features], seconds: float) -> None:
        """Learn λ, the costs and the acceptance."""
        tokens, plain = accepted + 1, self.costs.target[0]
        nodes, self._nodes = self._nodes or drafted, 0
        seconds = self.worth.learn(tokens, seconds, nodes, self._paid, by_model=True)
        self._age(tokens)
        for position in range(min(drafted, accepted + 1)):
            self._seen[position == accepted] += 1
            if position < len(features):
                self.judged(position, features[position], position < accepted)
        if self._declined is not None and accepted == drafted:  # it would have been judged, and counts as half a token
            self._seen[0] += self._declined / 2
            self._seen[1] += (1 - self._declined) / 2
        if self._paid:
            self._rounds += 1
            self._interrupted += self._unread > 2
        if drafted or self._paid:
            self._losses.count(seconds / plain - tokens)
        self._start()

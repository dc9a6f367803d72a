"""Drafters of chains: a model (greedy or sampled), a lookup in the same text, or the lookup before another drafter.

A drafter is asked once a round. Afterwards it learns how much of the context is committed and forgets the rest.
Legend: V vocabulary, n tokens of a chain, m length of a match, T target, λ tokens per second in the long run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from distill.decoding.lengths import Features, LengthRule, Proposal, features_of
from distill.decoding.text_index import LONGEST, TextIndex
from distill.decoding.verify import Random, draw_token
from distill.decoding.worth import ExpectedValue, Losses, Worth
from distill.engines.model import Model
from distill.sampler import Sampler

NONE = -1  # no token: the draft's logits are −∞ everywhere
NOTHING = Proposal.chain([])  # shared by all rounds: nobody changes a proposal once it is made


class Drafter(Protocol):
    """Proposes chains, or trees, for a context that only grows between `begin`s."""

    @property
    def tree(self) -> bool:
        """Whether its proposals branch."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a new context with this prompt; the time of reading it belongs to the prefill."""

    def room(self, length: int) -> int:
        """How many tokens can be drafted after a context of `length`; below 1 `propose` is not called."""

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """Tokens after `context`, at most `limit` on a path; an end token of a chain is the last one proposed."""

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """End the round: `count` tokens of the proposal were accepted, the committed context is `length` long."""


class NoDrafter:
    """Plain decoding."""

    tree = False

    def begin(self, prompt: Sequence[int]) -> None:
        """Nothing is read."""

    def room(self, length: int) -> int:
        """None."""
        return 0

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """Nothing; there is never room for it."""
        return NOTHING

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """There is nothing to learn."""


def distribution_sampler(sampler: Sampler) -> Sampler:
    """The sampler of a draft's distributions: the served one, or temperature 1 where the served one is greedy."""
    return sampler if sampler.temperature else Sampler(1.0, repetition_penalty=sampler.repetition_penalty)


def largest_logit_decides(argmax: bool, sampler: Sampler, rule: LengthRule) -> bool:
    """Whether the draft's largest logit alone decides: nothing reads its distribution, which takes longer to make."""
    return argmax and sampler.repetition_penalty == 1 and not rule.reads_features


class ChainDraft:
    """The chain of one text in one round: when it stops, and which tokens it takes.

    With `argmax` the best token is taken, else one is drawn. It has at most `limit` tokens and at most as many as the
    rule allows; a token of `ends` is the last one.
    """

    def __init__(self, rule: LengthRule, random: Random, argmax: bool, limit: int, ends: Collection[int]) -> None:
        self.random, self._rule, self._argmax, self._ends = random, rule, argmax, ends
        self.limit = min(limit, rule.limit()) if limit > 0 else 0
        self._stopped = False
        self._asked = -1, False  # the position that the rule was last asked about, and its answer
        self.tokens: list[int] = []
        self._distributions: list[Tensor] = []  # [V] each; none where tokens are chosen without chance
        self._features: list[Features] = []  # none where the largest logit alone decides

    def goes_on(self) -> bool:
        """Whether the draft takes another step. The rule is asked once about each position."""
        position = len(self.tokens)
        if self._stopped or position >= self.limit or (position and self.tokens[-1] in self._ends):
            return False
        if self._asked[0] != position:
            self._asked = position, self._rule.step_on(position)
        return self._asked[1]

    def unread(self, context: Sequence[int], read: int) -> list[int]:
        """The tokens that the draft takes in this step, of which it has read the first `read` of the context.

        One token, or in a round's first step all that it has not read: two after a round that was accepted whole.
        """
        return self.tokens[-1:] or list(context[read:])

    def add(self, token: int) -> None:
        """Take the token of largest logit, or stop where there is NONE."""
        if token == NONE:
            self._stopped = True
        else:
            self.tokens.append(token)

    def add_from(self, distribution: Tensor, index: TextIndex, context: Sequence[int]) -> None:
        """Take a token of the draft's distribution [V] after `context` and this chain, or stop before the draw.

        `index` has read `context`. An empty distribution stops the chain.
        """
        features, best = features_of(distribution)
        if not self.decides(features, best, index, context):
            return
        if self._argmax:
            self.tokens.append(best)
        else:
            self.tokens.append(draw_token(distribution, self.random))
            self._distributions.append(distribution)

    def decides(self, features: Features, best: int, index: TextIndex, context: Sequence[int]) -> bool:
        """Whether the next position gets a token, given its distribution's features and best token; if not, stop."""
        if features.top:
            tail = [*context[-LONGEST:], *self.tokens][-LONGEST:]
            features = replace(features, match=index.agreement(tail, best))
        if not features.top or not self._rule.go_on(len(self.tokens), features):
            self._stopped = True
            return False
        self._features.append(features)
        return True

    def proposal(self) -> Proposal:
        """The tokens, unless they are fewer than the rule's `n_min`: dropping drawn ones is lossy, and refused."""
        if len(self.tokens) < max(self._rule.n_min, 1):
            return NOTHING
        distributions = torch.stack(self._distributions) if self._distributions else None
        return Proposal.chain(self.tokens, distributions, self._features)


# Tokens that a draft's first step reads at most. Shapes of steps on a device are fixed.
TOGETHER, TOGETHER_ON_DEVICE = 48, 2


class Asking:
    """A drafter that asks a model; here what that reads of a text.

    A rule that knows costs weighs what reading the prompt takes: it is read in the first round that wants the draft,
    and never if plain decoding or a lookup stays faster. Else it is read at the start.
    """

    def __init__(self, model: Model, rule: LengthRule | None) -> None:
        self.model, self.rule = model, rule
        self._late = 0.0  # seconds of this round in which the draft read what was decoded without it

    def start(self, prompt: Sequence[int], drafts: bool = True) -> None:
        """Begin a text; a draft that `drafts`, has room and whose rule does not weigh it reads the prompt but for its
        last token, which goes in with the first step."""
        self.model.rollback([0])
        if isinstance(self.rule, ExpectedValue):
            self.rule.begin()
        elif drafts and 1 < len(prompt) < self.model.capacity:
            self.model.extend(prompt[:-1], want=[len(prompt) - 2])

    def room(self, length: int) -> int:
        """The room left in the draft's context, which holds every node that the draft takes; the last token of a chain
        is never read."""
        return self.model.capacity - length

    def unread(self, context: Sequence[int]) -> int:
        """Tokens of the context that the draft has not read."""
        return len(context) - self.model.lengths[0]

    def catch_up(self, context: Sequence[int], together: int = TOGETHER) -> float:
        """Read all but the last token of the context, where more than `together` are not read, or nothing is.

        Returns the seconds of a prompt that the rule had weighed; those of other text are this round's.
        """
        unread, read = self.unread(context), self.model.lengths[0]
        weighed = isinstance(self.rule, ExpectedValue) and not read
        if unread <= (1 if weighed else together):
            return 0.0
        started = time.perf_counter()
        self.model.extend(context[read:-1], want=[unread - 2]).argmax(NONE)  # which a device is waited for
        seconds = time.perf_counter() - started
        if not weighed:
            self._late = seconds
            return 0.0
        assert isinstance(self.rule, ExpectedValue)
        self.rule.read(seconds)
        return seconds


class ModelDrafter(Asking):
    """A model that continues the context for as long as its length rule allows.

    With `sampler` temperature 0, or with `argmax`, its best token is taken; else tokens are drawn from its distribution
    after the sampler, which the proposal then holds. A repetition penalty reads the context as the target's does.
    """

    tree = False

    def __init__(self, model: Model, rule: LengthRule, sampler: Sampler, random: Random, argmax: bool = False) -> None:
        super().__init__(model, rule)
        self.rule: LengthRule
        self.sampler, self.random = sampler, random
        self.argmax = argmax or sampler.temperature == 0
        self.index = TextIndex()
        # Drafts a chain on the model's device. `on_device.device_verifier` sets it for each text.
        self.on_device: Callable[[Sequence[int], ChainDraft], Proposal] | None = None

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a text, see `start`."""
        self.index.begin()
        self.start(prompt, self.rule.limit() > 0)

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """A chain, one step of the model for each token."""
        self.rule.behind(self.unread(context), limit)
        chain = ChainDraft(self.rule, self.random, self.argmax, limit, ends)
        if not chain.goes_on():
            return NOTHING
        by_argmax = largest_logit_decides(self.argmax, self.sampler, self.rule)
        if not by_argmax:
            self.index.read(context)
        if self.on_device is not None:
            reading = self.catch_up(context, TOGETHER_ON_DEVICE)
            return self.on_device(context, chain).after(reading)
        reading, read = self.catch_up(context), self.model.lengths[0]
        while chain.goes_on():
            fresh = chain.unread(context, read)
            logits = self.model.extend(fresh, want=[len(fresh) - 1])
            if by_argmax:
                chain.add(logits.argmax(NONE)[0])
                continue
            sampler, history = distribution_sampler(self.sampler), [*context, *chain.tokens]
            chain.add_from(sampler.distributions(logits, [history], empty=True)[0], self.index, context)
        return chain.proposal().after(reading)

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """Forget the rejected tokens (the last drafted one was never read) and let the rule learn."""
        if proposal.tokens or self.model.lengths[0] >= length:  # tokens that were read may have been dropped
            self.model.rollback([min(self.model.lengths[0], length - 1)])
        if self._late:
            self.rule.caught_up(self._late)
        self.rule.observe(len(proposal.tokens), count, proposal.features, seconds - self._late)
        self._late = 0.0


# ── Prompt lookup: the tokens that followed the context's last ones before in the same text; no model ──


# How often a looked-up token was right after a match of m tokens, m = 1.. and longer: 583 answers of SmolLM2, sampled.
USUAL = (0.20, 0.45, 0.56, 0.59, 0.65, 0.73, 0.81, 0.88)
WEIGHT = 8.0  # tokens that USUAL counts for, in addition to those of the text
KEEP = 0.995  # of earlier counts, with each new one


class LookupDrafter:
    """What followed the longest match before (Saxena 2023), at most `length` tokens after at least `shortest`; by its
    `worth` as many as are worth verifying, and none where that has lost more than `Losses` allows.

    The token after a match of m, if it is right, makes a match of m + 1. The probability of each length is counted in
    this session, in every round, beginning with USUAL. `rival`: expected tokens and seconds of a round of the fallback
    drafter, if there is one.
    """

    tree = False

    def __init__(self, length: int = 8, shortest: int = 1, worth: Worth | None = None) -> None:
        self.length, self.shortest, self.worth = length, shortest, worth
        self.rival: tuple[float, float] | None = None
        self._right = [WEIGHT * usual for usual in USUAL]
        self._judged = [WEIGHT] * len(USUAL)
        self._index, self._losses = TextIndex(), Losses()
        self._expected: list[int] = []  # what would follow the last context, if it went on as before

    def begin(self, prompt: Sequence[int]) -> None:
        """Forget the last context."""
        self._index.begin()

    def room(self, length: int) -> int:
        """Always the full length: there is no context that could be full."""
        return self.length

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """The tokens that followed last time, up to an end token."""
        if self.worth is not None and self._index.text:
            self._judge(context[len(self._index.text) :])
        self._index.read(context)
        match = self._index.match
        self._expected = self._index.continuation(self.length) if match >= self.shortest else []
        count = min(limit, len(self._expected))
        if count > 0 and self.worth is not None:
            count = self.best(match, count)
        tokens = self._expected[: max(count, 0)]
        stop = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
        return Proposal.chain(tokens[:stop])

    def _judge(self, new: Sequence[int]) -> None:
        """Count which of the expected tokens the text went on with, verified or not, up to the first that was wrong."""
        self._losses.age(len(new))
        for place, (token, expected) in enumerate(zip(new, self._expected, strict=False)):
            row = min(self._index.match + place, len(USUAL)) - 1
            self._right[row] = KEEP * self._right[row] + (token == expected)
            self._judged[row] = KEEP * self._judged[row] + 1
            if token != expected:
                break

    def chance(self, match: int) -> float:
        """The probability that the token after a match of this length is right."""
        place = min(match, len(USUAL)) - 1
        return self._right[place] / self._judged[place]

    def best(self, match: int, limit: int) -> int:
        """How many of `limit` tokens after a match are verified; 0: none is worth it."""
        assert self.worth is not None
        if not self._losses.affordable():
            return 0
        curve, costs = self.worth.costs.undrafted, self.worth.costs
        survival, expected = 1.0, 1.0
        offers = [(1.0, curve[0] + costs.again(0, 1.0, 1.0))]
        for n in range(1, min(limit, len(curve) - 1) + 1):
            survival *= self.chance(match + n - 1)
            expected += survival
            offers.append((expected, curve[n] + costs.again(n, expected, survival)))
        count = len(offers)
        best = self.worth.best(offers if self.rival is None else [*offers, self.rival])
        return best if best < count else 0

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """Learn what rounds give; the index reads accepted tokens with the next proposal."""
        if self.worth is not None:
            self._losses.learn(self.worth, len(proposal.tokens), count + 1, seconds)

    def passed(self, accepted: int, seconds: float) -> None:
        """A round of the fallback drafter, which learns from it itself."""
        if self.worth is not None:
            tokens, before = self.rival or (accepted + 1.0, seconds)
            self.rival = tokens + 0.05 * (accepted + 1 - tokens), before + 0.05 * (seconds - before)


class FallbackDrafter:
    """A lookup's proposal, or the second drafter's where that is empty.

    A match is taken where it is worth more than the second one's round: what a model's rule promises, or else the mean
    of its rounds.
    """

    def __init__(self, first: LookupDrafter, second: Drafter) -> None:
        self.first, self.second = first, second
        self._rule = getattr(second, "rule", None)  # none where the second one counts n-grams
        if isinstance(self._rule, ExpectedValue):
            self._rule.worth.shares()
        self.tree = second.tree
        self._last: Drafter = second

    def begin(self, prompt: Sequence[int]) -> None:
        """Both read the prompt."""
        self.first.begin(prompt)
        self.second.begin(prompt)

    def room(self, length: int) -> int:
        """The larger of both."""
        return max(self.first.room(length), self.second.room(length))

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """The first one's proposal, or the second one's if that is empty."""
        left = min(limit, self.second.room(len(context)))
        if isinstance(self._rule, ExpectedValue):
            assert isinstance(self.second, Asking)
            self._rule.behind(self.second.unread(context), left)
            offers = self._rule.offers()
            self.first.rival = offers[self._rule.worth.best(offers)]
        proposal = self.first.propose(context, min(limit, self.first.room(len(context))), ends)
        self._last = self.first if proposal.tokens else self.second
        return proposal if proposal.tokens else self.second.propose(context, left, ends)

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """The drafter that proposed learns; the other reads the new tokens with its next proposal, and a lookup learns
        what the second one's rounds give."""
        self._last.accepted(proposal, count, length, seconds)
        if self._last is self.second and not isinstance(self._rule, ExpectedValue):
            self.first.passed(count, seconds)

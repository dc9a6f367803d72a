"""Drafters of chains: a model (greedy or sampled), a lookup in the same text, or the lookup before another drafter.

A drafter is asked once a round. Afterwards it learns how much of the context is committed and forgets the rest.
Legend: V vocabulary, n tokens of a chain, m length of a match.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from distill.decoding.lengths import Drafting, Fixed, LengthRule, Mean
from distill.decoding.proposals import Proposal, likeliest
from distill.decoding.text_index import TextIndex
from distill.decoding.verify import Random, draw_token
from distill.engines.model import Model
from distill.recipe import Sampler
from distill.sampler import distributions_of

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
    return sampler if sampler.temperature else Sampler(temperature=1.0).penalised(sampler.repetition_penalty)


def largest_logit_decides(argmax: bool, sampler: Sampler, rule: LengthRule) -> bool:
    """Whether the draft's largest logit alone decides: nothing reads its distribution, which takes longer to make."""
    return argmax and sampler.repetition_penalty == 1 and not rule.reads_probability


class ChainDraft:
    """The chain of one text in one round: when it stops, and which tokens it takes.

    With `argmax` the best token is taken, else one is drawn. It has at most `limit` tokens and at most as many as the
    rule allows; a token of `ends` is the last one. `drafting` is the round as the rule sees it.
    """

    def __init__(
        self,
        rule: LengthRule,
        random: Random,
        argmax: bool,
        limit: int,
        ends: Collection[int],
        drafting: Drafting | None = None,
    ) -> None:
        self.random, self._rule, self._argmax, self._ends = random, rule, argmax, ends
        self.limit = min(limit, rule.limit()) if limit > 0 else 0
        self.drafting = drafting or Drafting(left=limit)
        self.drafting.most = self.limit
        self._stopped = False
        self.tokens: list[int] = []
        self._distributions: list[Tensor] = []  # [V] each; none if tokens are chosen without chance
        # The draft's probability of its best token at each position, and the rule's of acceptance; the last position
        # may have no token. None if the largest logit alone decides.
        self._seen: list[tuple[float, float]] = []

    def goes_on(self) -> bool:
        """Whether the draft takes another step."""
        position = len(self.tokens)
        if self._stopped or position >= self.limit or (position and self.tokens[-1] in self._ends):
            return False
        return self._rule.steps(self.drafting) > 0

    def reads(self, context: Sequence[int], read: int) -> list[int]:
        """The tokens that the draft takes in its next step, if it has read the first `read` of the context.

        One token, or in a round's first step all that it has not read: two after a round that was accepted whole.
        """
        fresh = self.tokens[-1:] or list(context[read:])
        self.drafting.steps.append(len(fresh))
        return fresh

    def add(self, token: int) -> None:
        """Take the token of largest logit, or stop where there is NONE."""
        if token == NONE:
            self._stopped = True
        else:
            self.tokens.append(token)

    def add_from(self, distribution: Tensor) -> None:
        """Take a token of the draft's distribution [V], or stop before the draw; an empty one stops the chain."""
        best, probability = likeliest(distribution)
        if not self.decides(probability):
            return
        if self._argmax:
            self.tokens.append(best)
        else:
            self.tokens.append(draw_token(distribution, self.random))
            self._distributions.append(distribution)

    def decides(self, probability: float) -> bool:
        """Whether the next position gets a token, given the probability of its best token; if not, stop."""
        position, drafting = len(self.tokens), self.drafting
        if probability:
            chance = self._rule.chance(position, probability)
            self._seen.append((probability, chance))
            drafting.append(chance)
            if self._rule.size(drafting) > position or self._rule.steps(drafting):
                drafting.kept = position + 1
                return True
        self._stopped = True
        return False

    def proposal(self) -> Proposal:
        """The tokens, unless they are fewer than the rule's `n_min`: dropping drawn ones is lossy, and refused."""
        if len(self.tokens) < max(self._rule.n_min, 1):
            return NOTHING
        distributions = torch.stack(self._distributions) if self._distributions else None
        return Proposal.chain(self.tokens, distributions)

    def judge(self, verified: int, accepted: int) -> None:
        """Note which of the `verified` tokens the target judged.

        A position that was seen and got no token would have been judged, too, if all before it were accepted. It counts
        with its own chance. Else only good positions would count, and the next rounds would hope for too much.
        """
        for position, (probability, chance) in enumerate(self._seen[: accepted + 1]):
            if position < verified:
                self.drafting.judged.append((position, probability, float(position < accepted)))
            elif position == len(self.tokens):
                self.drafting.judged.append((position, probability, chance))


# Tokens that a draft's first step reads at most. Shapes of steps on a device are fixed.
TOGETHER, TOGETHER_ON_DEVICE = 48, 2


class ModelBackedDrafter:
    """A drafter that asks a model; here what the model reads of a text.

    A rule may weigh what reading a prompt takes. The prompt is then read in the first round that wants the draft, and
    never if plain decoding or a lookup stays faster. Else it is read at the start.
    """

    def __init__(self, model: Model, rule: LengthRule) -> None:
        self.model, self.rule = model, rule
        self._drafting = Drafting()  # of this round

    def start(self, prompt: Sequence[int], drafts: bool = True) -> None:
        """Begin a text; a draft that `drafts`, has room and whose rule does not weigh it reads the prompt but for its
        last token, which goes in with the first step."""
        self.model.rollback([0])
        if not self.rule.weighs_reading and drafts and 1 < len(prompt) < self.model.capacity:
            self.model.extend(prompt[:-1], want=[len(prompt) - 2])

    def room(self, length: int) -> int:
        """The room left in the draft's context, which holds every node that the draft takes; the last token of a chain
        is never read."""
        return self.model.capacity - length

    def open(self, context: Sequence[int], limit: int) -> Drafting:
        """The round after this context as the rule sees it, before the draft's first step."""
        self._drafting = Drafting(len(context) - self.model.lengths[0], limit)
        return self._drafting

    def catch_up(self, context: Sequence[int], together: int = TOGETHER) -> float:
        """Read all but the last token of the context, where more than `together` are not read, or nothing is.

        Returns the seconds of a prompt that the rule had weighed; those of other text are this round's.
        """
        read, drafting = self.model.lengths[0], self._drafting
        weighed = self.rule.weighs_reading and not read
        if len(context) - read <= (1 if weighed else together):
            return 0.0
        started = time.perf_counter()
        self.model.extend(context[read:-1], want=[len(context) - read - 2]).argmax(NONE)  # which a device is waited for
        drafting.reading = time.perf_counter() - started
        drafting.read, drafting.unread = len(context) - read - 1, 1
        return drafting.reading if weighed else 0.0

    def observe(self, proposal: Proposal, count: int, seconds: float) -> None:
        """End the round for the rule, which counts all reading apart; of a prompt it is not among the `seconds`."""
        drafting, self._drafting = self._drafting, Drafting()
        seconds -= drafting.reading - proposal.reading
        self.rule.observe(drafting, len(proposal.tokens), count, seconds)


class ModelDrafter(ModelBackedDrafter):
    """A model that continues the context for as long as its length rule allows.

    With `sampler` temperature 0, or with `argmax`, its best token is taken; else tokens are drawn from its distribution
    after the sampler, which the proposal then holds. A repetition penalty reads the context as the target's does.
    """

    tree = False

    def __init__(self, model: Model, rule: LengthRule, sampler: Sampler, random: Random, argmax: bool = False) -> None:
        super().__init__(model, rule)
        self.sampler, self.random = sampler, random
        self.argmax = argmax or sampler.temperature == 0
        self._chain: ChainDraft | None = None  # of this round
        # Drafts a chain on the model's device. `on_device.device_verifier` sets it for each text.
        self.on_device: Callable[[Sequence[int], ChainDraft], Proposal] | None = None

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a text, see `start`."""
        self._chain = None
        self.start(prompt, self.rule.limit() > 0)

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """A chain, one step of the model for each token."""
        drafting = self.open(context, limit)
        chain = self._chain = ChainDraft(self.rule, self.random, self.argmax, limit, ends, drafting)
        if not chain.goes_on():
            return NOTHING
        if self.on_device is not None:
            reading = self.catch_up(context, TOGETHER_ON_DEVICE)
            return self.on_device(context, chain).after(reading)
        by_argmax = largest_logit_decides(self.argmax, self.sampler, self.rule)
        reading, read = self.catch_up(context), self.model.lengths[0]
        while chain.goes_on():
            fresh = chain.reads(context, read)
            logits = self.model.extend(fresh, want=[len(fresh) - 1])
            if by_argmax:
                chain.add(logits.argmax(NONE)[0])
                continue
            sampler, history = distribution_sampler(self.sampler), [*context, *chain.tokens]
            chain.add_from(distributions_of(sampler, logits, [history], empty=True)[0])
        return chain.proposal().after(reading)

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """Forget the rejected tokens (the last drafted one was never read) and let the rule learn."""
        if proposal.tokens or self.model.lengths[0] >= length:  # tokens that were read may have been dropped
            self.model.rollback([min(self.model.lengths[0], length - 1)])
        if self._chain is not None:
            self._chain.judge(len(proposal.tokens), count)
            self._chain = None
        self.observe(proposal, count, seconds)


# ── Prompt lookup: the tokens that followed the context's last ones before in the same text; no model ──


# How often a looked-up token was right after a match of m tokens, m = 1.. and longer: 583 answers of SmolLM2, sampled.
USUAL = (0.20, 0.45, 0.56, 0.59, 0.65, 0.73, 0.81, 0.88)


class LookupDrafter:
    """Draft the tokens that followed the longest earlier match of the text's end (Saxena 2023).

    A match has at least `shortest` tokens, and a draft at most `length`. The rule decides how many are verified.

    The token after a match of m, if it is right, makes a match of m + 1. The acceptance after each length of a match is
    counted in this session, in every round, beginning with USUAL.
    """

    tree = False

    def __init__(self, length: int = 8, shortest: int = 1, rule: LengthRule | None = None) -> None:
        self.length, self.shortest, self.rule = length, shortest, rule or Fixed(length)
        self._right = [Mean(usual) for usual in USUAL]
        self._index = TextIndex()
        self._expected: list[int] = []  # what would follow the last context, if it went on as before
        self._drafting = Drafting()

    def begin(self, prompt: Sequence[int]) -> None:
        """Forget the last context."""
        self._index.begin()

    def room(self, length: int) -> int:
        """Always the full length: there is no context that could be full."""
        return self.length

    def propose(
        self, context: Sequence[int], limit: int, ends: Collection[int], rival: Drafting | None = None
    ) -> Proposal:
        """The tokens that followed last time, up to an end token; none if a round of the `rival` promises more."""
        if self._index.text:
            self._judge(context[len(self._index.text) :])
        self._index.read(context)
        self._expected = self._index.continuation(self.length) if self._index.match >= self.shortest else []
        self._drafting = Drafting(left=limit, most=limit)
        for place in range(min(limit, len(self._expected))):
            self._drafting.append(self._mean(place).value)
        tokens = self._expected[: self.rule.size(self._drafting, rival)]
        stop = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
        return Proposal.chain(tokens[:stop])

    def _mean(self, place: int) -> Mean:
        """Of the expected token at this place: that of its match."""
        return self._right[min(self._index.match + place, len(USUAL)) - 1]

    def _judge(self, new: Sequence[int]) -> None:
        """Count which of the expected tokens the text went on with, verified or not, up to the first that was wrong."""
        for place, (token, expected) in enumerate(zip(new, self._expected, strict=False)):
            self._mean(place).add(float(token == expected))
            if token != expected:
                break

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """Let the rule learn; the index reads accepted tokens with the next proposal."""
        self.rule.observe(self._drafting, len(proposal.tokens), count, seconds)


class FallbackDrafter:
    """A lookup's proposal, or the second drafter's where that is empty.

    Both have one rule. If it compares them, a match is taken if it promises more tokens per second than a round of the
    second drafter's model.
    """

    def __init__(self, first: LookupDrafter, second: Drafter) -> None:
        self.first, self.second = first, second
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
        left, rival = min(limit, self.second.room(len(context))), None
        if isinstance(self.second, ModelBackedDrafter) and left > 0:
            rival = self.second.open(context, left)
        proposal = self.first.propose(context, min(limit, self.first.room(len(context))), ends, rival)
        self._last = self.first if proposal.tokens else self.second
        return proposal if proposal.tokens else self.second.propose(context, left, ends)

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """The drafter that proposed learns; the other reads the new tokens with its next proposal."""
        self._last.accepted(proposal, count, length, seconds)

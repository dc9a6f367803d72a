"""Drafters of chains: a model (greedy or sampled), a lookup in the same text, or the lookup before another drafter.

A drafter proposes tokens once a round. After the round it learns how much of the context is committed, and forgets
the rest.
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

NONE = -1  # It stands for no token, if all logits of the draft are −∞.
NOTHING = Proposal.chain([])  # All rounds share this empty proposal, because no code changes a proposal.


class Drafter(Protocol):
    """Proposes chains, or trees, for a context that only grows between `begin`s."""

    @property
    def tree(self) -> bool:
        """Whether its proposals branch."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a new context with this prompt. If a model reads the prompt here, the time belongs to the prefill."""

    def room(self, length: int) -> int:
        """Return how many tokens can be drafted after a context of `length`. Below 1, `propose` is not called."""

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """Propose tokens after `context`, at most `limit` on a path. A chain stops after an end token."""

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """End the round. `count` tokens of the proposal were accepted. The committed context has `length` tokens."""


class NoDrafter:
    """The drafter of plain decoding, which proposes nothing."""

    tree = False

    def begin(self, prompt: Sequence[int]) -> None:
        """Read nothing."""

    def room(self, length: int) -> int:
        """Return 0."""
        return 0

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """Return the empty proposal. `decode` never asks, because there is no room."""
        return NOTHING

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """Learn nothing."""


def distribution_sampler(sampler: Sampler) -> Sampler:
    """Return the sampler of a draft's distributions: the served sampler, or temperature 1 if that is greedy."""
    return sampler if sampler.temperature else Sampler(temperature=1.0).penalised(sampler.repetition_penalty)


def largest_logit_decides(argmax: bool, sampler: Sampler, rule: LengthRule) -> bool:
    """Whether the draft's largest logit alone decides, so that its slower distribution need not be computed."""
    return argmax and sampler.repetition_penalty == 1 and not rule.reads_probability


class ChainDraft:
    """The chain of one text in one round. It decides when the chain stops and which tokens it takes.

    With `argmax` the chain takes the draft's best tokens. Without it, tokens are drawn. The chain has at most `limit`
    tokens and at most as many as the rule allows. It ends after a token of `ends`. `drafting` is the round as the rule
    sees it.
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
        self._distributions: list[Tensor] = []  # [V] each. The list is empty if tokens are chosen without chance.
        # For each position: the draft's probability of its best token, and the rule's estimate of its acceptance. The
        # last position may have no token. The list is empty if the largest logit alone decides.
        self._seen: list[tuple[float, float]] = []

    def goes_on(self) -> bool:
        """Whether the draft takes another step."""
        position = len(self.tokens)
        if self._stopped or position >= self.limit or (position and self.tokens[-1] in self._ends):
            return False
        return self._rule.steps(self.drafting) > 0

    def reads(self, context: Sequence[int], read: int) -> list[int]:
        """Return the tokens of the draft's next step. The draft has read the first `read` tokens of the context.

        The first step of a round takes all unread tokens. These are two if the round before was fully accepted. Later
        steps take one token.
        """
        unread = self.tokens[-1:] or list(context[read:])
        self.drafting.steps.append(len(unread))
        return unread

    def add(self, token: int) -> None:
        """Take the token of the largest logit. NONE stops the chain."""
        if token == NONE:
            self._stopped = True
        else:
            self.tokens.append(token)

    def add_from(self, distribution: Tensor) -> None:
        """Take a token from the draft's distribution [V], or stop before the draw. An empty one stops the chain."""
        best, probability = likeliest(distribution)
        if not self.decides(probability):
            return
        if self._argmax:
            self.tokens.append(best)
        else:
            self.tokens.append(draw_token(distribution, self.random))
            self._distributions.append(distribution)

    def decides(self, probability: float) -> bool:
        """Whether the next position gets a token, given the probability of its best token. If not, the chain stops."""
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
        """Return the tokens as a proposal, or NOTHING if they are fewer than the rule's `n_min`.

        Dropping drawn tokens changes the distribution, so `verify.refusal` refuses it.
        """
        if len(self.tokens) < max(self._rule.n_min, 1):
            return NOTHING
        distributions = torch.stack(self._distributions) if self._distributions else None
        return Proposal.chain(self.tokens, distributions)

    def judge(self, verified: int, accepted: int) -> None:
        """Note which of the `verified` tokens the target judged.

        The chain may have stopped at a position that it saw. If all tokens before that position were accepted, the
        position counts with its estimated chance. Without it, only likely positions would count, and the
        estimates would rise too high.
        """
        for position, (probability, chance) in enumerate(self._seen[: accepted + 1]):
            if position < verified:
                self.drafting.judged.append((position, probability, float(position < accepted)))
            elif position == len(self.tokens):
                self.drafting.judged.append((position, probability, chance))


# The first step of a draft reads at most this many tokens. On a device, the shapes of steps are fixed.
TOGETHER, TOGETHER_ON_DEVICE = 48, 2


class ModelBackedDrafter:
    """A drafter that runs a model. This class decides when the model reads the text.

    The draft reads a prompt at the start of the text. If the rule weighs the time of this reading, the draft reads the
    prompt in the first round that uses the draft. It never reads the prompt if plain decoding or a lookup stays faster.
    """

    def __init__(self, model: Model, rule: LengthRule) -> None:
        self.model, self.rule = model, rule
        self._drafting = Drafting()  # It describes this round.

    def start(self, prompt: Sequence[int], drafts: bool = True) -> None:
        """Begin a text, and read the prompt without its last token. The first step reads the last token.

        Nothing is read if the draft never `drafts`, if the prompt leaves no room, or if the rule weighs the reading.
        """
        self.model.rollback([0])
        if not self.rule.weighs_reading and drafts and 1 < len(prompt) < self.model.capacity:
            self.model.extend(prompt[:-1], want=[len(prompt) - 2])

    def room(self, length: int) -> int:
        """Return the room in the draft's context. Every drafted token counts, though a chain's last is never read."""
        return self.model.capacity - length

    def open(self, context: Sequence[int], limit: int) -> Drafting:
        """Begin the round after this context, and return it as the rule sees it before the draft's first step."""
        self._drafting = Drafting(len(context) - self.model.lengths[0], limit)
        return self._drafting

    def catch_up(self, context: Sequence[int], together: int = TOGETHER) -> float:
        """Read all but the last token of the context if more than `together` tokens are unread.

        A prompt that the rule weighs is always read here. Returns the seconds of such a prompt. The seconds of other
        text belong to this round, and 0 is returned.
        """
        read, drafting = self.model.lengths[0], self._drafting
        weighed = self.rule.weighs_reading and not read
        if len(context) - read <= (1 if weighed else together):
            return 0.0
        started = time.perf_counter()
        self.model.extend(context[read:-1], want=[len(context) - read - 2]).argmax(NONE)  # This waits for a device.
        drafting.reading = time.perf_counter() - started
        drafting.read, drafting.unread = len(context) - read - 1, 1
        return drafting.reading if weighed else 0.0

    def observe(self, proposal: Proposal, count: int, seconds: float) -> None:
        """Report the round to the rule without the seconds of reading. `seconds` already excludes a prompt's."""
        drafting, self._drafting = self._drafting, Drafting()
        seconds -= drafting.reading - proposal.reading
        self.rule.observe(drafting, len(proposal.tokens), count, seconds)


class ModelDrafter(ModelBackedDrafter):
    """A model that continues the context for as long as its length rule allows.

    With `argmax`, or if the temperature of `sampler` is 0, the chain takes the model's best tokens. In other cases
    tokens are drawn from the model's distributions after the sampler, and the proposal holds these distributions. A
    repetition penalty applies to the context as it does for the target.
    """

    tree = False

    def __init__(self, model: Model, rule: LengthRule, sampler: Sampler, random: Random, argmax: bool = False) -> None:
        super().__init__(model, rule)
        self.sampler, self.random = sampler, random
        self.argmax = argmax or sampler.temperature == 0
        self._chain: ChainDraft | None = None  # It belongs to this round.
        # Drafts a chain on the model's device. `on_device.device_verifier` sets it for each text.
        self.on_device: Callable[[Sequence[int], ChainDraft], Proposal] | None = None

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a text. See `start`."""
        self._chain = None
        self.start(prompt, self.rule.limit() > 0)

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """Draft a chain with one step of the model for each token."""
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
            unread = chain.reads(context, read)
            logits = self.model.extend(unread, want=[len(unread) - 1])
            if by_argmax:
                chain.add(logits.argmax(NONE)[0])
                continue
            sampler, history = distribution_sampler(self.sampler), [*context, *chain.tokens]
            chain.add_from(distributions_of(sampler, logits, [history], empty=True)[0])
        return chain.proposal().after(reading)

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """Forget the rejected tokens and let the rule learn. The draft never read the last drafted token."""
        if proposal.tokens or self.model.lengths[0] >= length:  # Dropped tokens may have been read.
            self.model.rollback([min(self.model.lengths[0], length - 1)])
        if self._chain is not None:
            self._chain.judge(len(proposal.tokens), count)
            self._chain = None
        self.observe(proposal, count, seconds)


# ── Prompt lookup: no model, the text's end is searched for in the earlier text ──


# Share of looked-up tokens that were right after a match of m = 1, 2, … tokens, in 583 sampled answers of SmolLM2. The
# last share counts all longer matches too.
USUAL = (0.20, 0.45, 0.56, 0.59, 0.65, 0.73, 0.81, 0.88)


class LookupDrafter:
    """Draft the tokens that followed the longest earlier match of the text's end (Saxena 2023).

    A match has at least `shortest` tokens, and a draft has at most `length` tokens. The rule decides how many tokens
    are verified.

    If the token after a match of m tokens is right, it makes a match of m + 1. The acceptance after each length of a
    match starts at USUAL. Every round of the session updates it.
    """

    tree = False

    def __init__(self, length: int = 8, shortest: int = 1, rule: LengthRule | None = None) -> None:
        self.length, self.shortest, self.rule = length, shortest, rule or Fixed(length)
        self._right = [Mean(usual) for usual in USUAL]
        self._index = TextIndex()
        self._expected: list[int] = []  # These tokens followed the match of the last context.
        self._drafting = Drafting()

    def begin(self, prompt: Sequence[int]) -> None:
        """Forget the last context."""
        self._index.begin()

    def room(self, length: int) -> int:
        """Return the full length, because a lookup has no context that could be full."""
        return self.length

    def propose(
        self, context: Sequence[int], limit: int, ends: Collection[int], rival: Drafting | None = None
    ) -> Proposal:
        """Propose the tokens that followed last time, up to an end token. Propose none if the `rival` promises more."""
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
        """Return the acceptance of the expected token at this place, which depends on the length of its match."""
        return self._right[min(self._index.match + place, len(USUAL)) - 1]

    def _judge(self, new: Sequence[int]) -> None:
        """Count the expected tokens that the text continued with, verified or not, up to the first wrong token."""
        for place, (token, expected) in enumerate(zip(new, self._expected, strict=False)):
            self._mean(place).add(float(token == expected))
            if token != expected:
                break

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """Let the rule learn. The index reads accepted tokens with the next proposal."""
        self.rule.observe(self._drafting, len(proposal.tokens), count, seconds)


class FallbackDrafter:
    """A lookup before a second drafter, which proposes if the lookup finds nothing.

    Both drafters share one rule. A rule that compares them takes a match if the match promises more tokens per second
    than a round of the second drafter's model.
    """

    def __init__(self, first: LookupDrafter, second: Drafter) -> None:
        self.first, self.second = first, second
        self.tree = second.tree
        self._last: Drafter = second

    def begin(self, prompt: Sequence[int]) -> None:
        """Give the prompt to both drafters."""
        self.first.begin(prompt)
        self.second.begin(prompt)

    def room(self, length: int) -> int:
        """Return the larger room of the two."""
        return max(self.first.room(length), self.second.room(length))

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """Return the lookup's proposal, or that of the second drafter if the lookup's is empty."""
        left, rival = min(limit, self.second.room(len(context))), None
        if isinstance(self.second, ModelBackedDrafter) and left > 0:
            rival = self.second.open(context, left)
        proposal = self.first.propose(context, min(limit, self.first.room(len(context))), ends, rival)
        self._last = self.first if proposal.tokens else self.second
        return proposal if proposal.tokens else self.second.propose(context, left, ends)

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """Let the drafter that proposed learn. The other reads the new tokens with its next proposal."""
        self._last.accepted(proposal, count, length, seconds)

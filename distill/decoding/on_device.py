"""A round that stays on the device: the draft's chain, the target's step, the verdict, and one transfer of its result.

The host learns the drafted tokens, how many were accepted and the token after them together, at the round's end. A
length rule that reads the draft's distribution is asked after each of the draft's steps: one transfer for each.

Chance: at the beginning of a round, numbers are taken from `random()`, whatever becomes of them: γ to draw the drafted
tokens with (none where they are the draft's best, or another drafter's), γ for their acceptance, and one for the token
after them, where γ is the most that may be drafted. Greedy rounds take none. Each position has numbers of its own,
independent of all else, so the output follows the target's distribution exactly as in rounds on the host, which draw
only what they need.

Legend: γ drafted tokens of a round, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distill.decoding import verify
from distill.decoding.drafters import (
    NONE,
    NOTHING,
    ChainDraft,
    Drafter,
    FallbackDrafter,
    ModelDrafter,
    NoDrafter,
    distribution_sampler,
)
from distill.decoding.lengths import Features, Proposal, entropies
from distill.decoding.rules import Rules
from distill.devices import has_float64
from distill.engines.model import Model
from distill.engines.torch.model import TorchModel, fetch, model_name, send
from distill.errors import DataError
from distill.sampler import place_of, require_finite, shrunk

Stepped = TorchModel  # one whose `steps_on_device`
KNOWN = (*verify.CHAINS, "distinct")


@dataclass(frozen=True)
class Drafted:
    """A chain on the device: tokens [γ] (NONE where there is none), what they were drawn from, the largest logits [γ].

    `model` drafted them, and has read `read` tokens before the first of them.
    """

    tokens: Tensor
    distributions: Tensor | None  # [γ, V]; None: each is 1 at its token
    largest: Tensor
    model: Stepped
    read: int


class DeviceDraft:
    """A drafter whose model drafts on the device; `looks` where its length rule reads the distributions, one transfer a
    token."""

    def __init__(self, drafter: ModelDrafter, rules: Rules) -> None:
        model: Any = drafter.model
        self.model: Stepped = model
        self.drafter, self.sampler = drafter, distribution_sampler(rules.sampler)
        self._ends = send(sorted(rules.ends), self.model.device)

    @property
    def looks(self) -> bool:
        """Whether the length rule is asked after each step."""
        return self.drafter.rule.reads_features

    def drafted(self, context: Sequence[int], chain: ChainDraft) -> Drafted | None:
        """The tokens of this chain, the best ones or drawn ones; None where its rule wants no first step."""
        uniforms = [] if self.drafter.argmax else [chain.random() for _ in range(chain.limit)]
        if not chain.goes_on():
            return None
        model, device = self.model, self.model.device
        (length,) = model.lengths
        unread = chain.unread(context, length)
        read = length + len(unread)
        sent = send([*unread, len(unread), length], device)
        ids, counts, starts = sent[:-2], sent[-2:-1], sent[-1:]
        chances = send(uniforms, device, torch.float64) if uniforms else None
        end = read + chain.limit
        last = model.step(ids[None], counts, starts, end, 1)[0, -1]
        starts, one = starts + counts, torch.ones_like(counts)
        alive = torch.ones((), dtype=torch.bool, device=device)
        tokens: list[Tensor] = []
        largest: list[Tensor] = []
        distributions: list[Tensor] = []
        while True:
            token, distribution, peak = self._chosen(last, None if chances is None else chances[len(tokens)])
            if distribution is not None and self.looks:
                alive = alive & self._asked(context, chain, token, distribution, peak)
            if distribution is not None and chances is not None:
                distributions.append(distribution)
            tokens.append(token.masked_fill(~alive, NONE))
            largest.append(peak)
            if len(tokens) == chain.limit or (self.looks and not chain.goes_on()):
                break
            alive = alive & (token >= 0) & ~(token == self._ends).any()
            last = model.step(tokens[-1].clamp(min=0)[None, None], one, starts, end, 1)[0, -1]
            starts = starts + 1
        drawn_from = torch.stack(distributions) if distributions else None
        return Drafted(torch.stack(tokens), drawn_from, torch.stack(largest), model, read)

    def _chosen(self, logits: Tensor, uniform: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """A token of logits [V], NONE where all are −∞; its distribution if asked; the largest logit."""
        if self.drafter.argmax and not self.looks:
            best = logits.argmax(-1)
            peak = logits.gather(-1, best[None])[0].float()
            return best.masked_fill(peak == -math.inf, NONE), None, peak
        distribution, peak = self.sampler.unchecked(logits)
        token = distribution.argmax(-1) if uniform is None else verify.unchecked_transform(distribution, uniform)
        return token.masked_fill(peak == -math.inf, NONE), distribution, peak.float()

    def _asked(
        self, context: Sequence[int], chain: ChainDraft, token: Tensor, distribution: Tensor, peak: Tensor
    ) -> bool:
        """Whether the length rule takes this token, which was drawn, but is not shown to it."""
        two = distribution.topk(min(2, distribution.shape[-1])).values
        shown = fetch(token.int(), distribution.argmax(-1).int(), shrunk(peak), two, entropies(distribution))
        numbers: list[Any] = [part.tolist() for part in shown]
        drawn, best, largest, top, entropy = numbers
        place = place_of(model_name(self.model.model), [len(context) + len(chain.tokens)])
        require_finite([largest], place, empty=True)
        features = Features(top[0], top[1] if len(top) > 1 else 0.0, entropy)
        if not chain.decides(features, best, self.drafter.index, context):
            return False
        chain.tokens.append(drawn)
        return True


class DeviceRounds:
    """The rounds of a text; `draft` is None where no model drafts on the device."""

    def __init__(self, target: Stepped, rules: Rules, draft: DeviceDraft | None) -> None:
        self.target, self.draft, self.rules = target, draft, rules
        # Without siblings, distinct and token are the same.
        self.verifier = verify.CHAINS["token" if rules.verifier == "distinct" else rules.verifier]

    @torch.inference_mode()
    def run(
        self, context: Sequence[int], proposed: Proposal = NOTHING, chain: ChainDraft | None = None
    ) -> tuple[Proposal, int, int]:
        """One round, of another drafter's proposal or of a chain of the draft: what was proposed, how many of its
        tokens were accepted, and the token after them.

        The target is left with everything committed but that token. The draft is left with what it has read, of which
        the caller drops what was rejected.
        """
        drafted = None if chain is None or self.draft is None else self.draft.drafted(context, chain)
        limit = len(proposed.tokens) if chain is None else chain.limit
        uniforms = [] if self.rules.by_argmax else [self.rules.random() for _ in range(limit + 1)]
        results = self._verified(context, proposed, drafted, uniforms)
        if drafted is not None:
            results += [drafted.tokens.to(self.target.device).int(), shrunk(drafted.largest.to(self.target.device))]
        fetched: list[Any] = [part.tolist() for part in fetch(*results)]
        accepted, following, largest, *drawn = fetched
        tokens = [token for token in drawn[0] if token != NONE] if drawn else proposed.tokens
        (length,) = self.target.lengths
        depths = range(length + 1, length + 2 + len(tokens))
        try:
            if drafted is not None:
                place = place_of(model_name(drafted.model.model), depths)
                require_finite(drawn[1][: len(tokens)], place, empty=True)
            require_finite(largest[: len(tokens) + 1], place_of(model_name(self.target.model), depths))
        except DataError:
            self.target.commit([length])  # nothing of this round
            raise
        self.target.commit([length + 1 + accepted])
        if drafted is not None:
            drafted.model.commit([drafted.read + max(len(tokens) - 1, 0)])
        if chain is not None:
            chain.tokens = tokens
            proposed = chain.proposal()
        return proposed, accepted, following

    def _verified(
        self, context: Sequence[int], proposed: Proposal, drafted: Drafted | None, uniforms: Sequence[float]
    ) -> list[Tensor]:
        """How many tokens are accepted, the token after them, and the target's largest logits [γ + 1]."""
        target, device = self.target, self.target.device
        (length,) = target.lengths
        sent = send([length, context[-1], *proposed.tokens], device)
        starts, ids = sent[:1], sent[1:]
        tokens, q = ids[1:], proposed.distributions
        if drafted is not None:
            tokens, q = drafted.tokens.to(device), drafted.distributions
            ids = torch.cat([ids, tokens.clamp(min=0)])
        counts = 1 + (tokens >= 0).sum(-1, keepdim=True)
        logits = target.step(ids[None], counts, starts, length + len(ids))[0]  # [γ + 1, V]
        if self.rules.by_argmax:
            choices = logits.argmax(-1)
            largest = logits.gather(-1, choices[:, None])[:, 0].float()
            accepted = (choices[:-1] == tokens).long().cumprod(-1).sum(-1)
            following = choices.gather(-1, accepted[None])[0]
        else:
            p, largest = self.rules.sampler.unchecked(logits)
            used = send([*uniforms[: len(tokens)], uniforms[-1]], device, torch.float64)
            verdict = self.verifier(p, None if q is None else q.to(p), tokens)
            accepted, following = verify.draw_on_device(verdict, used)
        return [accepted.to(torch.int8), following.int(), shrunk(largest)]


def rounds_on_device(target: Model, rules: Rules, drafter: ModelDrafter | None) -> DeviceRounds | None:
    """The rounds of this target on its device, with a model that drafts there or without one; None where the host takes
    part.

    That is for models on a CPU with a growing cache and those of other engines, under a grammar or a repetition
    penalty, which read the text, with n_min, and on a device without fp64.
    """
    models: list[Any] = [target] if drafter is None else [target, drafter.model]
    counted = drafter is not None and drafter.rule.n_min > 1  # on the host, before drafts are verified
    if counted or not driven(models, rules):
        return None
    return DeviceRounds(models[0], rules, None if drafter is None else DeviceDraft(drafter, rules))


def driven(models: Sequence[Any], rules: Rules) -> bool:
    """Whether these models take steps of tokens that lie on a device, and nothing in the rules reads the text."""
    reads_text = rules.constraint is not None or rules.sampler.repetition_penalty != 1
    if reads_text or rules.verifier not in KNOWN:
        return False
    return all(getattr(model, "steps_on_device", False) and has_float64(model.device) for model in models)


def rounds_of_text(target: Model, drafter: Drafter, rules: Rules) -> DeviceRounds | None:
    """The rounds of this text on the target's device, the draft's part too where it is there; None on the host, which
    grows trees."""
    if isinstance(drafter, NoDrafter) and rules.by_argmax:
        return None  # the largest logit is read from the device as it is; a distribution would be copied whole
    own = drafter.second if isinstance(drafter, FallbackDrafter) else drafter
    chains = rounds_on_device(target, rules, own) if type(own) is ModelDrafter else None
    return chains or (None if own.tree else rounds_on_device(target, rules, None))


def play(rounds: DeviceRounds, drafter: Drafter, context: Sequence[int], limit: int) -> tuple[Proposal, list[int], int]:
    """A round: the proposal, its accepted tokens, and the token after them. Chains of a drafter whose model is not
    driven on the device come from the host."""
    own, ends, proposed, chain, reading = drafter, rounds.rules.ends, NOTHING, None, 0.0
    if isinstance(drafter, FallbackDrafter):
        own = drafter.second
        proposed = drafter.look_up(context, limit, ends) if limit > 0 else NOTHING
    if not proposed.tokens and (limit := min(limit, own.room(len(context)))) > 0:
        if rounds.draft is None:
            proposed = own.propose(context, limit, ends)
        else:
            assert isinstance(own, ModelDrafter)
            if rounds.draft.looks:
                own.index.read(context)
            chain = ChainDraft(own.rule, own.random, own.argmax, limit, ends)
            own.rule.behind(own.unread(context), limit)
            if own.unread(context) > 1 and chain.goes_on():
                reading = own.catch_up(context, together=2)
    proposed, accepted, token = rounds.run(context, proposed, chain)
    return proposed.after(reading), list(range(accepted)), token

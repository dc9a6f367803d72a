"""A round that stays on the device: the draft's chain, the target's step, the verdict, and one transfer of its result.

`ModelDrafter.propose` then returns a `DeviceChain`, whose tokens the host does not know, and `DeviceVerifier.verify`
fetches them together with how many were accepted and the token after them. A length rule that reads the draft's
distribution is asked after each of the draft's steps, which takes one transfer for each.

Chance: numbers are taken from `random()` before they are needed, whatever becomes of them: γ before a chain is drawn
(none if its tokens are the draft's best), then γ for the acceptance and one for the token after it, where γ is the most
that may be drafted. Greedy rounds take none. Each position has numbers of its own, independent of all else, so the
output follows the target's distribution exactly as in rounds on the host, which draw only what they need.

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
    ChainDraft,
    Drafter,
    FallbackDrafter,
    ModelDrafter,
    NoDrafter,
    distribution_sampler,
)
from distill.decoding.proposals import Proposal
from distill.decoding.rules import Rules
from distill.devices import has_float64
from distill.engines.model import Model
from distill.engines.torch.model import TorchModel, fetch, model_name, send
from distill.errors import DataError
from distill.sampler import place_of, require_finite, shrunk, unchecked_probabilities

Stepped = TorchModel  # one whose `steps_on_device`
KNOWN = (*verify.CHAINS, "distinct")


@dataclass(frozen=True, kw_only=True)
class DeviceChain(Proposal):
    """A chain on the device: ids [γ] (NONE for no token), what they were drawn from, the largest logits [γ].

    `model` drafted them, and has read `read` tokens before the first of them. `draft` learns the tokens once they are
    verified.
    """

    draft: ChainDraft
    ids: Tensor
    drawn_from: Tensor | None  # [γ, V]; None: each is 1 at its token
    largest: Tensor
    model: Stepped
    read: int

    def fetched(self, tokens: list[int]) -> Proposal:
        """The chain as the host knows it from now on."""
        self.draft.tokens = tokens
        return self.draft.proposal().after(self.reading)


class DeviceDraft:
    """A drafter whose model drafts on the device.

    If its length rule reads the distributions, it `looks`, which takes one transfer a token.
    """

    def __init__(self, drafter: ModelDrafter, rules: Rules) -> None:
        model: Any = drafter.model
        self.model: Stepped = model
        self.drafter, self.sampler = drafter, distribution_sampler(rules.sampler)
        self._ends = send(sorted(rules.ends), self.model.device)

    @property
    def looks(self) -> bool:
        """Whether the length rule is asked after each step."""
        return self.drafter.rule.reads_probability

    @torch.inference_mode()
    def drafted(self, context: Sequence[int], chain: ChainDraft) -> DeviceChain:
        """The tokens of a chain that takes a first step, the best ones or drawn ones."""
        uniforms = [] if self.drafter.argmax else [chain.random() for _ in range(chain.limit)]
        model, device = self.model, self.model.device
        (length,) = model.lengths
        unread = chain.reads(context, length)
        read = length + len(unread)
        sent = send([*unread, len(unread), length], device)
        ids, counts, starts = sent[:-2], sent[-2:-1], sent[-1:]
        chances = send(uniforms, device, torch.float64) if uniforms else None
        end = read + chain.limit
        last = model.step(ids[None], counts, starts, end, 1)[0, -1]
        starts, single = starts + counts, torch.ones_like(counts)
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
            chain.drafting.steps.append(1)
            last = model.step(tokens[-1].clamp(min=0)[None, None], single, starts, end, 1)[0, -1]
            starts = starts + 1
        return DeviceChain(
            [],
            [],
            draft=chain,
            ids=torch.stack(tokens),
            drawn_from=torch.stack(distributions) if distributions else None,
            largest=torch.stack(largest),
            model=model,
            read=read,
        )

    def _chosen(self, logits: Tensor, uniform: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """A token of logits [V], NONE if all are −∞; its distribution if asked; the largest logit."""
        if self.drafter.argmax and not self.looks:
            best = logits.argmax(-1)
            peak = logits.gather(-1, best[None])[0].float()
            return best.masked_fill(peak == -math.inf, NONE), None, peak
        distribution, peak = unchecked_probabilities(self.sampler, logits)
        token = distribution.argmax(-1) if uniform is None else verify.unchecked_transform(distribution, uniform)
        return token.masked_fill(peak == -math.inf, NONE), distribution, peak.float()

    def _asked(
        self, context: Sequence[int], chain: ChainDraft, token: Tensor, distribution: Tensor, peak: Tensor
    ) -> bool:
        """Whether the length rule takes this token, which was drawn, but is not shown to it."""
        shown = fetch(token.int(), shrunk(peak), distribution.max(-1).values)
        numbers: list[Any] = [part.tolist() for part in shown]
        drawn, largest, probability = numbers
        place = place_of(model_name(self.model.model), [len(context) + len(chain.tokens)])
        require_finite([largest], place, empty=True)
        if not chain.decides(probability):
            return False
        chain.tokens.append(drawn)
        return True


class DeviceVerifier:
    """Verifies the chains of a text on the target's device."""

    def __init__(self, target: Stepped, rules: Rules) -> None:
        self.target, self.rules = target, rules
        # Without siblings, distinct and token are the same.
        self.verifier = verify.CHAINS["token" if rules.verifier == "distinct" else rules.verifier]

    @torch.inference_mode()
    def verify(self, context: Sequence[int], proposal: Proposal) -> tuple[Proposal, list[int], int]:
        """One target step over the last token and a chain: the chain, its accepted nodes, and the token after them.

        The target is left with everything committed but that token. The draft is left with what it has read, of which
        its drafter drops what was rejected.
        """
        drafted = proposal if isinstance(proposal, DeviceChain) else None
        limit = len(proposal.tokens) if drafted is None else drafted.draft.limit
        uniforms = [] if self.rules.by_argmax else [self.rules.random() for _ in range(limit + 1)]
        results = self._verified(context, proposal, uniforms)
        if drafted is not None:
            results += [drafted.ids.to(self.target.device).int(), shrunk(drafted.largest.to(self.target.device))]
        fetched: list[Any] = [part.tolist() for part in fetch(*results)]
        accepted, following, largest, *drawn = fetched
        tokens = [token for token in drawn[0] if token != NONE] if drawn else proposal.tokens
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
            proposal = drafted.fetched(tokens)
        return proposal, list(range(accepted)), following

    def _verified(self, context: Sequence[int], proposal: Proposal, uniforms: Sequence[float]) -> list[Tensor]:
        """The number of accepted tokens, the token after them, and the target's largest logits [γ + 1]."""
        target, device = self.target, self.target.device
        (length,) = target.lengths
        sent = send([length, context[-1], *proposal.tokens], device)
        starts, ids = sent[:1], sent[1:]
        tokens, q = ids[1:], proposal.distributions
        if isinstance(proposal, DeviceChain):
            tokens, q = proposal.ids.to(device), proposal.drawn_from
            ids = torch.cat([ids, tokens.clamp(min=0)])
        counts = 1 + (tokens >= 0).sum(-1, keepdim=True)
        logits = target.step(ids[None], counts, starts, length + len(ids))[0]  # [γ + 1, V]
        if self.rules.by_argmax:
            choices = logits.argmax(-1)
            largest = logits.gather(-1, choices[:, None])[:, 0].float()
            accepted = (choices[:-1] == tokens).long().cumprod(-1).sum(-1)
            following = choices.gather(-1, accepted[None])[0]
        else:
            p, largest = unchecked_probabilities(self.rules.sampler, logits)
            used = send([*uniforms[: len(tokens)], uniforms[-1]], device, torch.float64)
            verdict = self.verifier(p, None if q is None else q.to(p), tokens)
            accepted, following = verify.draw_on_device(verdict, used)
        return [accepted.to(torch.int8), following.int(), shrunk(largest)]


def device_verifier(target: Model, drafter: Drafter, rules: Rules) -> DeviceVerifier | None:
    """The verifier of a text on the target's device; None if the host takes part in every round.

    A model that drafts chains, alone or after a lookup, then drafts on its device too, if it can. The host takes part
    for models on a CPU with a growing cache and those of other engines, for trees, and on a device without fp64. So it
    does under a grammar or a repetition penalty, which read the text. n_min is counted on the host before a draft is
    verified.
    """
    chains = drafter.second if isinstance(drafter, FallbackDrafter) else drafter
    if isinstance(chains, ModelDrafter):
        chains.on_device = None
    if isinstance(drafter, NoDrafter) and rules.by_argmax:
        return None  # The largest logit is read from the device as it is. A distribution would be copied whole.
    stepped: Any = target
    if chains.tree or not _driven(stepped, rules):
        return None
    if isinstance(chains, ModelDrafter) and chains.rule.n_min <= 1 and _driven(chains.model, rules):
        chains.on_device = DeviceDraft(chains, rules).drafted
    return DeviceVerifier(stepped, rules)


def _driven(model: Any, rules: Rules) -> bool:
    """Whether a model takes steps of tokens that lie on a device, and nothing in the rules reads the text."""
    reads_text = rules.constraint is not None or rules.sampler.repetition_penalty != 1
    known = rules.verifier in KNOWN and not reads_text
    return known and getattr(model, "steps_on_device", False) and has_float64(model.device)

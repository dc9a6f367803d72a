"""The decoded evaluation on validation prompts that chooses weights: drafts are verified as they will be served.

Legend: B prompts, γ draft length, S positions, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distill import divergences
from distill.models.batched import BatchedTorchModel
from distill.models.kept import KeptHead
from distill.sampler import Sampler
from distill.speculative.batch import decode_batch
from distill.speculative.decode import Decoded
from distill.speculative.rules import Rules
from distill.texts import Prompt, prompt_seed
from distill.training.plan import Verifying

VERIFIERS: dict[Verifying, str] = {"sampling": "token", "match": "match", "greedy": "greedy"}


@dataclass(frozen=True)
class Judge:
    """A target and how its drafts are verified; `vocabulary` real tokens, `ends` end a text."""

    target: Any
    vocabulary: int
    ends: Sequence[int]
    sampler: Sampler
    protocol: Verifying
    seed: int

    def decode(self, draft: Any, prompts: Sequence[Prompt], new_tokens: int, length: int) -> list[Decoded]:
        """Decode B prompts together with γ = `length`; each has random numbers of its own, the same at every call."""
        rules = Rules(self.sampler, VERIFIERS[self.protocol], self.ends)
        randoms = [random.Random(prompt_seed(self.seed, prompt.id)).random for prompt in prompts]
        target = BatchedTorchModel(self.target, len(prompts), self.vocabulary)
        small = BatchedTorchModel(draft, len(prompts), self.vocabulary)
        ids = [prompt.ids for prompt in prompts]
        return decode_batch(target, small, ids, new_tokens, rules, length, randoms, argmax=self.protocol == "match")

    @torch.inference_mode()
    def expected(self, draft: Any, prompts: Sequence[Prompt], texts: Sequence[Sequence[int]]) -> list[float]:
        """Sums [B] of the probability to be accepted at each position of these texts, which follow the prompts.

        On the same texts at each call and without chance, so that two drafts are compared far more sharply than by
        decoding as many tokens with each.
        """
        sums = []
        for prompt, text in zip(prompts, texts, strict=True):
            ids = torch.tensor([[*prompt.ids, *text]], device=self.target.device)
            own, drafts = (self._logits(model, ids, len(text)) for model in (self.target, draft))
            if self.protocol == "greedy":
                found = divergences.acceptance_greedy(own, drafts)
            elif self.protocol == "match":
                found = divergences.acceptance_match(self.sampler.probabilities(own), drafts)
            else:
                found = divergences.acceptance_sampling(*map(self.sampler.probabilities, (own, drafts)))
            sums.append(round(float(found.double().sum()), 6))
        return sums

    def _logits(self, model: Any, ids: Tensor, count: int) -> Tensor:
        """The logits [count, V] that predict the last `count` of ids [1, S]."""
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, -count - 1 : -1, : self.vocabulary]
        return logits.float()


def judge_for(
    target: Any, vocabulary: int, ends: Sequence[int], sampler: Sampler, protocol: Verifying, seed: int
) -> Judge:
    """A judge of a protocol: greedy verification decodes greedily, whatever the sampler."""
    served = Sampler(temperature=0) if protocol == "greedy" else sampler
    return Judge(target.eval(), vocabulary, tuple(ends), served, protocol, seed)


def rates(texts: Sequence[Decoded]) -> dict[str, float]:
    """Acceptance (accepted of the drafted tokens that were verified) and tokens per round of some decoded texts."""
    rounds = [one for text in texts for one in text.rounds]
    accepted = sum(one.accepted for one in rounds)
    reached = accepted + sum(one.accepted < one.drafted for one in rounds)
    return {
        "acceptance": accepted / max(1, reached),
        "tokens_per_round": (accepted + len(rounds)) / max(1, len(rounds)),
        "rounds": len(rounds),
    }


def counts(texts: Sequence[Decoded]) -> dict[str, list[int]]:
    """Of each text, the drafted tokens that were accepted and those that were reached, from which intervals follow."""
    accepted = [sum(one.accepted for one in text.rounds) for text in texts]
    missed = [sum(one.accepted < one.drafted for one in text.rounds) for text in texts]
    return {"accepted": accepted, "reached": [hit + miss for hit, miss in zip(accepted, missed, strict=True)]}


@contextmanager
def speaking(draft: Any, kept: Sequence[int] | None) -> Iterator[Any]:
    """Within the block, the draft as it is served: in evaluation mode, and a trimmed one with the kept head alone."""
    training, head = draft.training, draft.lm_head
    caching = draft.config.use_cache
    draft.eval()
    if kept is not None:
        draft.lm_head = KeptHead(head, torch.tensor(kept))
    try:
        yield draft
    finally:
        draft.lm_head = head
        draft.config.use_cache = caching
        draft.train(training)

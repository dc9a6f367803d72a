"""The decoded evaluation on validation prompts that chooses weights: drafts are verified as they will be served.

Legend: B prompts, γ draft length.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from distill.models.batched import BatchedTorchModel
from distill.models.kept import KeptHead
from distill.sampler import Sampler
from distill.speculative.batch import decode_batch
from distill.speculative.decode import Decoded, Rules
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

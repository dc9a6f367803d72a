"""The acceptance of a draft's tokens at stored positions, under the served sampler and each verifier.

A compact store has a position's likeliest tokens and the mass of all others, at temperature 1. Temperature, top-k,
top-p and min-p apply to these entries. The result is exact if the sampler draws from stored tokens only. If not, the
result has two bounds. Whole distributions give exact figures.

Legend: c positions, K entries of a position, V vocabulary. a = 1 / temperature; the weight of a token is p ** a, in
multiples of that of the likeliest token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from distill import divergences
from distill.recipe import Sampler
from distill.recipe.training import Protocol
from distill.sampler import probabilities_of
from distill.teacher.distributions import EMPTY, TeacherChunk

HALF, SMALLEST = 2.0**-11, 2.0**-25  # relative and absolute rounding of a logarithm to fp16


@dataclass(frozen=True)
class ServedEntries:
    """The bounds of a sampler's distribution at c positions, from stored entries.

    `least` and `most` [c, K] are bounds of the probabilities of `ids` [c, K]. An id of V or more stands for no token.
    `tail` [c] is the upper bound of the mass of all other tokens, and `single` [c] of the mass of one of them.
    """

    ids: Tensor
    least: Tensor
    most: Tensor
    tail: Tensor
    single: Tensor

    @property
    def exact(self) -> Tensor:
        """Whether the sampler draws from stored tokens only at each position [c]; these are known up to rounding."""
        certain = (self.least > 0) | (self.most == 0)
        return (self.tail == 0) & certain.all(-1)

    def mass_on(self, allowed: Tensor) -> tuple[Tensor, Tensor]:
        """The bounds of the mass [c] on the `allowed` [c, V] tokens."""
        size = allowed.shape[-1]
        here = allowed.gather(-1, self.ids.clamp(max=size - 1)) & (self.ids < size)
        return (self.least * here).sum(-1), ((self.most * here).sum(-1) + self.tail).clamp(max=1)


def served_entries(chunk: TeacherChunk, sampler: Sampler, vocabulary: int) -> ServedEntries:
    """The bounds of a sampler's distribution from stored entries, including the rounding of the stored logarithms."""
    ids, logs, log_tail = chunk.ids, chunk.log_probabilities, chunk.log_tail
    assert ids is not None, "a whole distribution needs no bounds"
    present = ids < vocabulary
    if sampler.temperature == 0:
        first = torch.zeros_like(logs)
        first[:, 0] = 1
        nothing = torch.zeros_like(log_tail)
        return ServedEntries(ids, first, first, nothing, nothing)
    power = 1 / sampler.temperature
    error = (logs.abs() * HALF + SMALLEST).masked_fill(~present, 0)
    top = logs[:, :1]
    low, high = ((power * (logs + side * error - top)).exp() * present for side in (-1, 1))
    tail_low, tail_high, single = _tail_weights(chunk, power, present, vocabulary)
    entries = present.sum(-1)
    stays, maybe = present.clone(), present.clone()  # entries that the sampler certainly keeps, and may keep
    if sampler.top_k:
        within = torch.arange(ids.shape[-1], device=ids.device) < sampler.top_k
        stays, maybe = stays & within, maybe & within
        tail_high = tail_high * (entries < sampler.top_k)
        tail_low = torch.zeros_like(tail_low)  # The share of the tail among the k likeliest is unknown.
    if sampler.top_p < 1:
        low_sum, high_sum = (low * stays).sum(-1, keepdim=True), (high * maybe).sum(-1, keepdim=True)
        whole_low, whole_high = low_sum + tail_low.unsqueeze(-1), high_sum + tail_high.unsqueeze(-1)
        before_low, before_high = _before(low * maybe), _before(high * maybe)
        stays &= before_high < sampler.top_p * whole_low
        maybe &= before_low < sampler.top_p * whole_high
        stays[:, 0] = maybe[:, 0] = True  # The likeliest token always stays.
        # All entries are likelier than the tokens of the tail.
        tail_high = tail_high * (low_sum < sampler.top_p * whole_high).squeeze(-1)
        tail_low = torch.zeros_like(tail_low)
    if sampler.min_p:
        stays &= low >= sampler.min_p
        maybe &= high >= sampler.min_p
        stays[:, 0] = maybe[:, 0] = True
        tail_high = tail_high * (single >= sampler.min_p)
        tail_low = torch.zeros_like(tail_low)
    single = torch.minimum(single, tail_high)
    sure = (low * stays).sum(-1)
    fewest, most = sure + tail_low, (high * maybe).sum(-1) + tail_high
    least = low * stays / most.unsqueeze(-1)
    largest = (high * maybe / fewest.unsqueeze(-1)).clamp(max=1)
    return ServedEntries(ids, least, largest, tail_high / (sure + tail_high), single / (sure + single))


def _before(weights: Tensor) -> Tensor:
    """The sum of the weights before each weight [c, K]."""
    return weights.cumsum(-1) - weights


def _tail_weights(chunk: TeacherChunk, power: float, present: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """The bounds of the weight [c] of all tokens outside the entries, and the upper bound of one token's weight.

    None of these tokens is likelier than the last entry, or than their whole mass t. Σ p ** a with Σ p = t is extreme
    if the mass is spread evenly, or if as few tokens as possible have it.
    """
    logs, log_tail = chunk.log_probabilities, chunk.log_tail
    top = logs[:, 0]
    last = logs.masked_fill(~present, math.inf).amin(-1)
    largest = torch.minimum(last + last.abs() * HALF + SMALLEST, log_tail)
    others = (vocabulary - present.sum(-1)).clamp(min=1).log()
    narrow = log_tail + (power - 1) * largest - power * top
    even = power * log_tail + (1 - power) * others - power * top
    none = (log_tail <= EMPTY) | (present.sum(-1) >= vocabulary)
    narrow, even, single = (weight.exp().masked_fill(none, 0) for weight in (narrow, even, power * (largest - top)))
    return torch.minimum(narrow, even), torch.maximum(narrow, even), single


# ── The chance that a drafted token is accepted ──


def acceptance_chances(
    chunk: TeacherChunk, draft_logits: Tensor, sampler: Sampler, protocol: Protocol
) -> tuple[Tensor, Tensor]:
    """The bounds of the chance [c] that the target accepts a drafted token, from draft logits [c, V].

    protocol: `sampling` (rejection sampling), `match` (the draft's argmax against a sampled token) or `greedy` (argmax
    against argmax). Both bounds are equal for whole distributions, and under `greedy`.
    """
    if protocol == "greedy":
        best = chunk.log_probabilities.argmax(-1) if chunk.ids is None else chunk.ids[:, 0]
        same = (best == draft_logits.argmax(-1)).to(torch.float32)
        return same, same
    if chunk.ids is None:
        p = probabilities_of(sampler, chunk.log_probabilities)
        if protocol == "match":
            exact = divergences.acceptance_match(p, draft_logits)
        else:
            exact = divergences.acceptance_sampling(p, probabilities_of(sampler, draft_logits))
        return exact, exact
    served = served_entries(chunk, sampler, draft_logits.shape[-1])
    if protocol == "match":
        return match_bounds(served, draft_logits)
    return sampling_bounds(served, probabilities_of(sampler, draft_logits))


def sampling_bounds(served: ServedEntries, draft: Tensor) -> tuple[Tensor, Tensor]:
    """The bounds of Σ min(p, q) [c] from the draft's distribution [c, V]."""
    size = draft.shape[-1]
    q = draft.gather(-1, served.ids.clamp(max=size - 1)) * (served.ids < size)
    outside = (1 - q.sum(-1)).clamp(min=0)
    most = torch.minimum(served.most, q).sum(-1) + torch.minimum(served.tail, outside)
    return torch.minimum(served.least, q).sum(-1), most.clamp(max=1)


def match_bounds(served: ServedEntries, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
    """The bounds of p(argmax q) [c] from the draft's logits [c, V]."""
    hit = served.ids == draft_logits.argmax(-1, keepdim=True)
    least, most = ((side * hit).sum(-1) for side in (served.least, served.most))
    return least, torch.where(hit.any(-1), most, served.single)

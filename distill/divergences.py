"""Every divergence and acceptance formula once, plain and in the dtype given: the oracle for all faster versions.

Legend: N positions, V vocabulary, K stored entries. p is the target's law, q the draft's; logarithms are natural,
results are in nats or probabilities, one per position [N]. Formulas: Leviathan et al. 2023 (acceptance), Kullback and
Leibler.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _weighted_log_ratio(weight: Tensor, log_a: Tensor, log_b: Tensor) -> Tensor:
    """Σ weight · (log a − log b) with 0 · anything = 0."""
    terms = torch.where(weight > 0, weight * (log_a - log_b), torch.zeros_like(weight))
    return terms.sum(-1)


def forward_kl(target_log_probabilities: Tensor, draft_log_probabilities: Tensor) -> Tensor:
    """KL(p ‖ q) [N] from log-laws [N, V]."""
    return _weighted_log_ratio(target_log_probabilities.exp(), target_log_probabilities, draft_log_probabilities)


def reverse_kl(target_log_probabilities: Tensor, draft_log_probabilities: Tensor) -> Tensor:
    """KL(q ‖ p) [N] from log-laws [N, V]."""
    return _weighted_log_ratio(draft_log_probabilities.exp(), draft_log_probabilities, target_log_probabilities)


def total_variation(target: Tensor, draft: Tensor) -> Tensor:
    """½ Σ |p − q| [N] from laws [N, V]."""
    return 0.5 * (target - draft).abs().sum(-1)


def acceptance_sampling(target: Tensor, draft: Tensor) -> Tensor:
    """Σ min(p, q) [N]: how often rejection sampling accepts a token drawn from q."""
    return torch.minimum(target, draft).sum(-1)


def acceptance_match(target: Tensor, draft_logits: Tensor) -> Tensor:
    """p(argmax q) [N]: how often a sampled target token equals the draft's greedy one."""
    return target.gather(-1, draft_logits.argmax(-1, keepdim=True)).squeeze(-1)


def acceptance_greedy(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """1 where both argmaxes agree, else 0 [N]; it is also the top-1 agreement."""
    return (target_logits.argmax(-1) == draft_logits.argmax(-1)).to(target_logits.dtype)


def cross_entropy(draft_logits: Tensor, tokens: Tensor) -> Tensor:
    """−log q(token) [N] from logits [N, V] and tokens [N]."""
    return draft_logits.logsumexp(-1) - draft_logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def bucketed_forward_kl(ids: Tensor, log_probabilities: Tensor, log_tail: Tensor, draft_logits: Tensor) -> Tensor:
    """KL [N] between the laws in which every token outside the K stored ones is one bucket.

    ids, log_probabilities [N, K]; log_tail [N], the log of the target's mass outside them; draft_logits [N, V].
    It is a lower bound of the full forward KL (data processing), and equal to it at K = V.
    """
    normaliser = draft_logits.logsumexp(-1, keepdim=True)
    stored = draft_logits.gather(-1, ids) - normaliser
    outside = draft_logits.scatter(-1, ids, float("-inf"))
    # At K = V nothing is outside and the bucket is empty on both sides.
    draft_tail = outside.logsumexp(-1) - normaliser.squeeze(-1)
    probabilities = log_probabilities.exp()
    tail = log_tail.exp()
    bucket = torch.where(tail > 0, tail * (log_tail - draft_tail), torch.zeros_like(tail))
    return _weighted_log_ratio(probabilities, log_probabilities, stored) + bucket

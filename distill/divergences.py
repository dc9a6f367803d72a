"""Every divergence, acceptance and loss formula once, plainly and in the given dtype: the oracle for faster versions.

Legend: N positions, V vocabulary, K stored entries. p is the target's distribution, q the draft's. Logarithms are
natural. Results are in nats or probabilities, one per position [N]. Every loss is differentiable in the draft's
arguments. Sources: Leviathan et al. 2023 (acceptance), Kullback and Leibler, Lin 1991 (Jensen-Shannon), LK (arXiv
2602.23881).

For a trimmed head, the columns are the tokens that the draft can generate. q sums to 1 and p to less, and each sum runs
over these columns only. The KL then lacks its infinite part. The JSD lacks its constant −β log β · (p's missing mass).
The total variation includes the missing mass, as 1 − Σ min(p, q).
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST_ACCEPTANCE = 1e-5  # An acceptance is clamped to this before its logarithm is taken.
LK_DECAY = 3.0  # decay of forward KL's weight in lk_hybrid, as published


def _weighted_log_ratio(weight: Tensor, log_a: Tensor, log_b: Tensor) -> Tensor:
    """Σ weight · (log a − log b), where 0 · anything = 0."""
    # The ratio is masked instead of the product, because the gradient of 0 · inf would be NaN.
    return (weight * torch.where(weight > 0, log_a - log_b, torch.zeros_like(log_a))).sum(-1)


def forward_kl(target_log_probabilities: Tensor, draft_log_probabilities: Tensor) -> Tensor:
    """KL(p ‖ q) [N] from log-distributions [N, V]."""
    return _weighted_log_ratio(target_log_probabilities.exp(), target_log_probabilities, draft_log_probabilities)


def reverse_kl(target_log_probabilities: Tensor, draft_log_probabilities: Tensor) -> Tensor:
    """KL(q ‖ p) [N] from log-distributions [N, V]. Raises ValueError if it is infinite (p = 0 < q)."""
    draft = draft_log_probabilities.exp()
    impossible = (draft > 0) & torch.isneginf(target_log_probabilities)
    if bool(impossible.any()):
        rows = int(impossible.any(-1).sum())
        raise ValueError(
            f"the reverse KL is infinite at {rows} positions, because the target gives no mass to some of the draft's "
            "tokens; compare untruncated distributions, or use the forward KL or the JSD"
        )
    return _weighted_log_ratio(draft, draft_log_probabilities, target_log_probabilities)


def jsd(target_log_probabilities: Tensor, draft_log_probabilities: Tensor, beta: float = 0.5) -> Tensor:
    """β KL(p ‖ m) + (1 − β) KL(q ‖ m) [N] with m = βp + (1 − β)q, 0 < β < 1, from log-distributions [N, V]."""
    p, q = target_log_probabilities.exp(), draft_log_probabilities.exp()
    mass = beta * p + (1 - beta) * q
    mixed = mass.masked_fill(mass == 0, 1).log()  # The logarithm of 0 would have no gradient.
    forward = _weighted_log_ratio(p, target_log_probabilities, mixed)
    return beta * forward + (1 - beta) * _weighted_log_ratio(q, draft_log_probabilities, mixed)


def total_variation(target: Tensor, draft: Tensor) -> Tensor:
    """1 − Σ min(p, q) [N] from distributions [N, V]. It equals ½ Σ |p − q| if both sum to 1."""
    # Σ (q − p)⁺ is equal if q sums to 1, and exact if the distributions are close.
    return (draft - target).relu().sum(-1)


def acceptance_sampling(target: Tensor, draft: Tensor) -> Tensor:
    """Σ min(p, q) [N]: the probability that rejection sampling accepts a token drawn from q."""
    return torch.minimum(target, draft).sum(-1)


def likeliest(logits: Tensor, count: int) -> Tensor:
    """Logits [..., V] with −∞ outside the `count` largest of each row. Ties with the last of these stay."""
    if count >= logits.shape[-1]:
        return logits
    return logits.masked_fill(logits < logits.topk(count, dim=-1).values[..., -1:], -torch.inf)


def acceptance_match(target: Tensor, draft_logits: Tensor) -> Tensor:
    """p(argmax q) [N]: the probability that a sampled target token equals the draft's greedy token."""
    return target.gather(-1, draft_logits.argmax(-1, keepdim=True)).squeeze(-1)


def acceptance_greedy(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """1 if both argmaxes agree, otherwise 0 [N]. This is also the top-1 agreement."""
    return (target_logits.argmax(-1) == draft_logits.argmax(-1)).to(target_logits.dtype)


def nla(target: Tensor, draft: Tensor) -> Tensor:
    """−log max(Σ min(p, q), 1e-5) [N], the negative log acceptance, from distributions [N, V]."""
    # torch.minimum would split its gradient at ties.
    acceptance = torch.where(draft > target, target, draft).sum(-1)
    return -acceptance.clamp(min=LEAST_ACCEPTANCE).log()


def lk_hybrid(target_log_probabilities: Tensor, draft_log_probabilities: Tensor, decay: float = LK_DECAY) -> Tensor:
    """λ KL(p ‖ q) + (1 − λ) TV [N] from log-distributions [N, V].

    λ = exp(−decay · Σ min(p, q)) per position, without gradient.
    """
    p, q = target_log_probabilities.exp(), draft_log_probabilities.exp()
    share = (-decay * acceptance_sampling(p, q).detach()).exp()
    kl = forward_kl(target_log_probabilities, draft_log_probabilities)
    return share * kl + (1 - share) * total_variation(p, q)


def cross_entropy(draft_logits: Tensor, tokens: Tensor) -> Tensor:
    """−log q(token) [N] from logits [N, V] and tokens [N]."""
    return draft_logits.logsumexp(-1) - draft_logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def bucketed_forward_kl(ids: Tensor, log_probabilities: Tensor, log_tail: Tensor, draft_logits: Tensor) -> Tensor:
    """KL [N] between the distributions in which all tokens outside the K stored ones are one bucket.

    ids and log_probabilities [N, K], likeliest first. log_tail [N] is the log of the target's mass outside them.
    draft_logits [N, V]. An id of V or more is no token, and its probability is 0. The first id of each row is a token.
    The result is a lower bound of the full forward KL (data processing inequality) and equals it at K = V.
    """
    # At K = V nothing is outside, and the bucket is empty on both sides.
    stored, draft_tail = _draft_outcomes(ids, draft_logits)
    probabilities = log_probabilities.exp()
    tail = log_tail.exp()
    bucket = torch.where(tail > 0, tail * (log_tail - draft_tail), torch.zeros_like(tail))
    return _weighted_log_ratio(probabilities, log_probabilities, stored) + bucket


def acceptance_bounds(
    ids: Tensor, log_probabilities: Tensor, log_tail: Tensor, draft_logits: Tensor
) -> tuple[Tensor, Tensor]:
    """The lower and upper bound of Σ min(p, q) [N], given K stored entries and the tail's mass.

    Arguments as for `bucketed_forward_kl`. The tail adds between 0 and min(p_tail, q_tail).
    """
    stored, draft_tail = _draft_outcomes(ids, draft_logits)
    least = torch.minimum(log_probabilities.exp(), stored.exp()).sum(-1)
    return least, least + torch.minimum(log_tail.exp(), draft_tail.exp())


def forward_kl_bounds(
    ids: Tensor, log_probabilities: Tensor, log_tail: Tensor, draft_logits: Tensor
) -> tuple[Tensor, Tensor]:
    """The lower and upper bound of KL(p ‖ q) [N], given the K likeliest entries and the tail's mass.

    Arguments as for `bucketed_forward_kl`, which is the lower bound. No token of the tail is likelier than the last
    entry or than the whole tail. In the worst case, all of the tail's mass is on the tokens that the draft gives least.
    """
    least = bucketed_forward_kl(ids, log_probabilities, log_tail, draft_logits)
    stored, _ = _draft_outcomes(ids, draft_logits)
    log_q = draft_logits.log_softmax(-1)
    rarest = log_q.scatter(-1, _tokens(ids, draft_logits), torch.inf).amin(-1)
    likeliest = torch.minimum(_last_stored(ids, log_probabilities, draft_logits), log_tail)
    tail = log_tail.exp()
    outside = torch.where(rarest.isfinite(), tail * (likeliest - rarest), torch.zeros_like(tail))
    most = _weighted_log_ratio(log_probabilities.exp(), log_probabilities, stored) + outside
    return least, torch.maximum(least, most)


def _tokens(ids: Tensor, draft_logits: Tensor) -> Tensor:
    """The ids [N, K]. The first id of a row replaces ids that are no tokens."""
    return torch.where(ids < draft_logits.shape[-1], ids, ids[:, :1])


def _last_stored(ids: Tensor, log_probabilities: Tensor, draft_logits: Tensor) -> Tensor:
    """The smallest log-probability [N] among a row's entries that are tokens."""
    return log_probabilities.masked_fill(ids >= draft_logits.shape[-1], torch.inf).amin(-1)


def _draft_outcomes(ids: Tensor, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
    """log q of the stored tokens [N, K], and of all other tokens together [N], from logits [N, V]."""
    tokens = _tokens(ids, draft_logits)
    normaliser = draft_logits.logsumexp(-1, keepdim=True)
    outside = draft_logits.scatter(-1, tokens, float("-inf")).logsumexp(-1)
    stored = (draft_logits.gather(-1, tokens) - normaliser).masked_fill(ids >= draft_logits.shape[-1], float("-inf"))
    return stored, outside - normaliser.squeeze(-1)

"""Losses over the head in chunks: logits of at most `chunk` positions exist at once, gradients are taken on the way.

Legend: N scored positions, H hidden, V vocabulary (head rows), K stored entries. Both losses are convex in z, so a
chunk's gradient with respect to z is known in closed form (FKL: q − p; bucketed: q − p on stored ids, q(1 − p_t/q_t)
outside) and never needs a graph; the oracle is distill/divergences.py.

Ids from `vocabulary` on are padding: no law gives them mass. A stored entry that names one must hold no mass (a trimmed
draft's teacher has moved it to the tail), and a label that names one has no cross-entropy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _HeadLoss(torch.autograd.Function):
    """Sum over positions of weighted bucketed forward KL and cross-entropy; also two sums for the log."""

    @staticmethod
    def forward(
        context: Any,
        hidden: Tensor,
        head: Tensor,
        ids: Tensor,
        log_probabilities: Tensor,
        log_tail: Tensor,
        labels: Tensor,
        kl_weight: float,
        ce_weight: float,
        vocabulary: int,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        d_hidden = torch.empty_like(hidden)
        d_head = torch.zeros_like(head)
        sums = torch.zeros(3, dtype=torch.float64, device=hidden.device)  # KL, CE, agreement
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = (hidden[rows] @ head.T).float()
            if vocabulary < logits.shape[-1]:
                logits[:, vocabulary:] = -torch.inf
            gradient, kl, ce, agreement = _chunk_terms(
                logits,
                ids[rows].long(),
                log_probabilities[rows].float(),
                log_tail[rows],
                labels[rows],
                kl_weight,
                ce_weight,
                vocabulary,
            )
            sums += torch.stack([kl, ce, agreement]).double()
            gradient = gradient.to(hidden.dtype)
            d_hidden[rows] = gradient @ head
            d_head.addmm_(gradient.T, hidden[rows])
        context.save_for_backward(d_hidden, d_head)
        loss = (kl_weight * sums[0] + ce_weight * sums[1]).float()
        context.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_head = context.saved_tensors
        return (d_hidden * gradients[0], d_head * gradients[0], *([None] * 8))


def _chunk_terms(
    logits: Tensor,
    ids: Tensor,
    log_p: Tensor,
    log_tail: Tensor,
    labels: Tensor,
    kl_weight: float,
    ce_weight: float,
    vocabulary: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradient [c, V] of the weighted loss with respect to a chunk's logits, and the sums of its terms."""
    log_q = logits - logits.logsumexp(-1, keepdim=True)
    agreement = (logits.argmax(-1) == ids[:, 0]).sum()
    stored = log_q.gather(-1, ids)
    spoken = labels < vocabulary
    ce = torch.where(spoken, -log_q.gather(-1, labels.unsqueeze(-1)).squeeze(-1), torch.zeros_like(log_tail))
    ce_weights = torch.where(spoken, ce_weight, 0.0).to(log_q.dtype)  # [c]
    p, tail = log_p.exp(), log_tail.exp()
    # log of q's mass outside the stored ids, summed over those logits and not as 1 minus the rest
    log_q_tail = log_q.scatter(-1, ids, -torch.inf).logsumexp(-1)
    bucket = torch.where(tail > 0, tail * (log_tail - log_q_tail), torch.zeros_like(tail))
    kl = torch.where(p > 0, p * (log_p - stored), torch.zeros_like(p)).sum(-1) + bucket
    q = log_q.exp()
    # The stored p and tail sum to 1 only within fp16's rounding; with total mass m the gradient's constant is m.
    mass = p.sum(-1) + tail
    gradient = q * (kl_weight * mass + ce_weights).unsqueeze(-1)
    if kl_weight:
        # q · p_t/q_t in one exponent: apart, the ratio overflows where the draft leaves next to nothing outside.
        shift = torch.where(tail > 0, log_tail - log_q_tail, torch.full_like(tail, -torch.inf))
        gradient -= kl_weight * (log_q + shift.unsqueeze(-1)).exp_()
    inside = kl_weight * (q.gather(-1, ids) * mass.unsqueeze(-1) - p) + ce_weights.unsqueeze(-1) * q.gather(-1, ids)
    gradient.scatter_(-1, ids, inside)
    gradient.scatter_add_(-1, labels.unsqueeze(-1), -ce_weights.unsqueeze(-1))
    return gradient, kl.sum(), ce.sum(), agreement


def head_loss(
    hidden: Tensor,
    head: Tensor,
    ids: Tensor,
    log_probabilities: Tensor,
    log_tail: Tensor,
    labels: Tensor,
    weights: dict[str, float],
    vocabulary: int,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Summed loss and, detached in fp64, the sums of forward KL (nats), cross-entropy (nats) and top-1 agreement.

    hidden [N, H] (after the final norm), head [V, H], compact teacher ids [N, K], log_probabilities [N, K] and
    log_tail [N], labels [N]; columns from `vocabulary` on are padding and masked. Gradients reach hidden and head.
    """
    return _HeadLoss.apply(
        hidden,
        head,
        ids,
        log_probabilities,
        log_tail,
        labels,
        weights.get("forward_kl", 0.0),
        weights.get("cross_entropy", 0.0),
        vocabulary,
        chunk,
    )

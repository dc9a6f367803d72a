"""How much each token counts: by the value of its acceptance, or only where draft and target differ most.

Legend: b blocks, S positions, γ draft length, N scored positions. Weights are detached; a loss is Σ w ℓ / Σ w.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

TokenWeights = Literal["uniform", "block-acceptance", "top-fraction"]


def block_acceptance(alpha: Tensor, length: int) -> Tensor:
    """∂/∂α_i of the expected tokens of a round, summed over the rounds that may start at each position; [b, S].

    alpha [b, S] is the acceptance at each position, 0 where none is scored, which no round crosses. A round that starts
    at s brings 1 + Σ_{k ≤ γ} Π_{j < k} α_{s+j} tokens; γ = `length`.
    """
    after = torch.ones_like(alpha)  # 1 + α_{i+1} + α_{i+1} α_{i+2} + …, with the terms that the round has left
    values = [after]
    following = torch.nn.functional.pad(alpha, (0, 1))[:, 1:]  # α_{i+1}
    for _ in range(length - 1):
        after = 1 + following * torch.nn.functional.pad(after, (0, 1))[:, 1:]
        values.append(after)
    reach = torch.ones_like(alpha)  # Π of the d positions before i: how often a round that started there reaches i
    total = torch.zeros_like(alpha)
    for back in range(length):
        total += reach * values[length - 1 - back]
        reach = torch.nn.functional.pad(reach * alpha, (1, 0))[:, :-1]
    return total


def top_fraction(divergence: Tensor, scored: Tensor, fraction: float) -> Tensor:
    """1 at the ⌈fraction · n⌉ scored positions of each block with the largest divergence [b, S], else 0; [b, S].

    The choice is made within a block, so that it does not depend on how blocks are put together.
    """
    ranked = divergence.masked_fill(~scored, -math.inf).argsort(dim=1, descending=True, stable=True)
    wanted = (scored.sum(1, keepdim=True) * fraction - 1e-9).ceil()  # [b, 1]
    chosen = torch.arange(ranked.shape[1], device=ranked.device) < wanted
    return torch.zeros_like(divergence).scatter(1, ranked, chosen.to(divergence.dtype)) * scored


def token_weights(
    rule: TokenWeights, alpha: Tensor, divergence: Tensor, scored: Tensor, length: int, fraction: float
) -> Tensor:
    """Weights [N] of the scored positions, in the order of `scored` [b, S]; alpha and divergence [N] belong to them."""
    if rule == "uniform":
        return torch.ones_like(alpha)
    place = torch.zeros(scored.shape, dtype=alpha.dtype, device=alpha.device)
    if rule == "block-acceptance":
        return block_acceptance(place.masked_scatter(scored, alpha), length)[scored]
    return top_fraction(place.masked_scatter(scored, divergence), scored, fraction)[scored]

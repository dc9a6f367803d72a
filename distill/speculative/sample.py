"""Plain sampling of many prompts at once, each with random numbers of its own.

Legend: B prompts of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distill.models.finite import place_of
from distill.models.torch_model import model_name
from distill.sampler import Sampler
from distill.speculative.verify import unchecked_transform


def uniform_numbers(seed: int, count: int) -> torch.Tensor:
    """The first `count` uniform numbers [count], fp64, that a text with this seed is drawn with, one for each token."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@torch.inference_mode()
def continue_prompts(
    model: Any,
    prompts: Sequence[Sequence[int]],
    sampler: Sampler,
    limit: int,
    seeds: Sequence[int],
    ends: Sequence[int],
    vocabulary: int | None = None,
) -> list[list[int]]:
    """Continue B prompts (of any lengths) together, each with random numbers of its own.

    Returns up to `limit` new ids per prompt; a text that ends keeps its end id as the last. Row b's draws depend on
    seeds[b] and on its own distributions alone (the other rows affect it only through rounding). Ids from `vocabulary`
    on are padding and never drawn.
    """
    from transformers import DynamicCache

    device = next(model.parameters()).device
    longest = max(len(prompt) for prompt in prompts)
    rows = len(prompts)
    ids = torch.zeros(rows, longest, dtype=torch.long)
    mask = torch.zeros(rows, longest + limit, dtype=torch.long)
    draws = torch.empty(rows, limit, dtype=torch.float64)
    for row, prompt in enumerate(prompts):  # left-padded, so that every row's last token is in the last column
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
        draws[row] = uniform_numbers(seeds[row], limit)
    mask, draws = mask.to(device), draws.to(device)
    positions = (mask[:, :longest].cumsum(-1) - 1).clamp(min=0)
    padded = bool((mask[:, :longest] == 0).any())
    stop = torch.tensor(list(ends), device=device)
    finished = torch.zeros(rows, dtype=torch.bool, device=device)
    cache = DynamicCache()
    step_ids, step_positions = ids.to(device), positions
    chosen: list[torch.Tensor] = []
    for step in range(limit):
        logits = model(
            input_ids=step_ids,
            attention_mask=mask[:, : longest + step] if padded else None,
            position_ids=step_positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1, :vocabulary]
        place = place_of(model_name(model), [len(prompt) + step for prompt in prompts])
        token = unchecked_transform(sampler.probabilities(logits, place=place), draws[:, step]).unsqueeze(-1)
        chosen.append(token)
        finished |= torch.isin(token.squeeze(-1), stop)
        if bool(finished.all()):
            break
        step_ids, step_positions = token, step_positions[:, -1:] + 1
    table = torch.cat(chosen, dim=1).tolist()
    end_set = set(ends)
    return [row[: next((i + 1 for i, token in enumerate(row) if token in end_set), len(row))] for row in table]

"""Fewer attention heads: whole groups of one KV head and the query heads that share it.

Legend: T tokens, H hidden, g KV heads, r query heads per KV head, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distill.errors import RecipeError
from distill.packing import Packed
from distill.surgery.change import decoder_layers, require_supported
from distill.surgery.cuts.width import take
from distill.surgery.observe import observe


def head_size(config: Any) -> int:
    """Dimensions of one head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def check_kv_heads(config: Any, keep: int) -> None:
    """Raise RecipeError when attention of this configuration cannot keep `keep` KV heads with their query heads."""
    require_supported(config.model_type)
    count = config.num_key_value_heads
    shared = config.num_attention_heads // count
    possible = [n for n in range(1, count + 1) if _loads(config, n * shared)]
    if keep not in possible:
        why = "" if len(possible) == count else " (transformers loads a llama only if its hidden size / heads is whole)"
        raise RecipeError(
            f"{keep} KV heads are to be kept of the donor's {count}, each with its {shared} query heads",
            f"possible: {', '.join(map(str, possible))}{why}",
        )


def _loads(config: Any, heads: int) -> bool:
    return config.model_type != "llama" or config.hidden_size % heads == 0


def group_scores(model: Any, blocks: Packed, batch: int = 4) -> list[list[float]]:
    """The mean square that each KV group adds to the residual stream: E‖W_o[:, group] x_group‖², [g] per layer.

    x is the input of o_proj. One pass over the blocks. Raises DataError when they hold no token.
    """
    layers, count = decoder_layers(model), model.config.num_key_value_heads
    sums = torch.zeros(len(layers), count, dtype=torch.float64)

    def watch(index: int, weight: Tensor) -> Callable[[Tensor], None]:
        columns = weight.detach().float().chunk(count, dim=1)  # [H, r·d] each

        def see(x: Tensor) -> None:
            for group, (own, part) in enumerate(zip(columns, x.chunk(count, dim=1), strict=True)):
                sums[index, group] += float((part @ own.T).square().sum())

        return see

    watches = [(layer.self_attn.o_proj, watch(i, layer.self_attn.o_proj.weight)) for i, layer in enumerate(layers)]
    total = observe(model, blocks, watches, batch)
    return (sums / total).tolist()


def drop_kv_groups(model: Any, blocks: Packed, keep: int, batch: int = 4) -> dict[str, Any]:
    """Keep in every layer the `keep` KV groups of highest `group_scores`, in their order; the model changes in place.

    Returns the groups kept per layer, all scores, and the share of them kept. Raises RecipeError as check_kv_heads.
    """
    check_kv_heads(model.config, keep)
    scores = group_scores(model, blocks, batch)
    groups = [sorted(sorted(range(len(own)), key=lambda i: -own[i])[:keep]) for own in scores]
    kept_share = [
        sum(own[i] for i in kept) / sum(own) if sum(own) else 1.0 for own, kept in zip(scores, groups, strict=True)
    ]
    keep_kv_groups(model, groups)
    return {"groups": groups, "scores": scores, "score_kept": kept_share}


@torch.no_grad()
def keep_kv_groups(model: Any, groups: Sequence[Sequence[int]]) -> None:
    """Keep those KV groups of each layer (equally many, ascending), with their query heads and columns of o_proj.

    Biases go with their heads (o_proj's stays), norms over a head are untouched, and the head size stays and is written
    into the configuration. Raises RecipeError as check_kv_heads does, and for groups that do not exist.
    """
    config, layers = model.config, decoder_layers(model)
    count, size = config.num_key_value_heads, head_size(config)
    shared = config.num_attention_heads // count
    if len(groups) != len(layers) or len({len(own) for own in groups}) != 1:
        raise RecipeError("every layer must keep equally many KV groups", f"give {len(layers)} lists of one length")
    check_kv_heads(config, len(groups[0]))
    for own in groups:
        if list(own) != sorted(set(own)) or own[0] < 0 or own[-1] >= count:
            raise RecipeError(f"KV groups {list(own)} cannot be kept", f"name some of 0 to {count - 1}, ascending")
    for layer, own in zip(layers, groups, strict=True):
        attention = layer.self_attn
        device = attention.q_proj.weight.device
        keys = torch.arange(count * size, device=device).view(count, -1)[list(own)].flatten()
        queries = torch.arange(count * shared * size, device=device).view(count, -1)[list(own)].flatten()
        take(attention.q_proj, queries, 0)
        take(attention.k_proj, keys, 0)
        take(attention.v_proj, keys, 0)
        take(attention.o_proj, queries, 1)
    config.head_dim = size
    config.num_key_value_heads = len(groups[0])
    config.num_attention_heads = len(groups[0]) * shared

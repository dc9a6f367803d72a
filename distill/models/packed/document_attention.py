"""Attention over packed documents without a mask of S × S cells, for blocks so long that it would fill the memory.

A mask costs S² cells, and torch keeps a copy in fp32 per layer for the backward pass. Here the place of the mask is
taken by a list of segments, and each document attends to itself alone: memory grows with S. transformers hands the
list to its attention function as it hands over a mask; under the name `sdpa` stands ours, which takes both. Any other
attention function refuses a mask of integers, so that no model can read it as a mask by mistake.

Legend: n blocks, S positions per block, h heads, d their size, L positions of a document, W of a window.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

LONG = 2048  # positions of a block from which on documents attend one by one; below, one masked product is quicker


def document_segments(documents: Tensor, window: int | None) -> Tensor:
    """The documents of blocks [n, S] in the place of a mask: int32 [1, 1, K, 4] of block, first position, end, window.

    A window of 0 is none; otherwise a position attends to that many, itself included. Padding is in no segment.
    """
    rows = []
    for block, row in enumerate(documents.tolist()):
        start = 0
        for end in range(1, len(row) + 1):
            if end == len(row) or row[end] != row[start]:
                if row[start] >= 0:
                    rows.append([block, start, end, window or 0])
                start = end
    return torch.tensor(rows, dtype=torch.int32).view(1, 1, -1, 4)


@cache
def register() -> None:
    """Let the attention function that transformers calls `sdpa` take segments in the place of a mask."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Any:
        if isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.int32:
            scaling, dropout = options.get("scaling"), options.get("dropout", 0.0)
            return attend_within(query, key, value, attention_mask, scaling, dropout), None
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    AttentionInterface.register("sdpa", attention)


def attend_within(
    query: Tensor, key: Tensor, value: Tensor, segments: Tensor, scaling: float | None = None, dropout: float = 0.0
) -> Tensor:
    """Causal attention [n, S, h, d] within each segment; query [n, h, S, d], key and value [n, fewer heads, S, d].

    Zeros outside all segments.
    """
    shared = query.shape[1] // key.shape[1]
    if shared > 1 and query.device.type != "cpu":
        # Not on every device and for every type has torch a kernel for fewer key heads that needs no S × S scores.
        key, value, shared = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1), 1
    options: dict[str, Any] = {"scale": scaling, "dropout_p": dropout, "enable_gqa": shared > 1}
    rows: list[list[Tensor]] = [[] for _ in range(len(query))]
    ends = [0] * len(query)
    for block, start, end, window in segments.flatten(0, 2).tolist():
        if start > ends[block]:
            rows[block].append(_zeros(query, value, start - ends[block]))
        here = (slice(block, block + 1), slice(None))
        if window == 0 or end - start <= window:
            part = (*here, slice(start, end))
            rows[block].append(
                scaled_dot_product_attention(query[part], key[part], value[part], is_causal=True, **options)
            )
        else:
            rows[block] += _windowed(query[here], key[here], value[here], range(start, end), window, options)
        ends[block] = end
    for block, end in enumerate(ends):
        if end < query.shape[2]:
            rows[block].append(_zeros(query, value, query.shape[2] - end))
    return torch.cat([torch.cat(parts, 2) for parts in rows]).transpose(1, 2).contiguous()


def _zeros(query: Tensor, value: Tensor, count: int) -> Tensor:
    """The output [1, h, count, d] of positions that attend to nothing."""
    return query.new_zeros(1, query.shape[1], count, value.shape[-1])


def _windowed(
    query: Tensor, key: Tensor, value: Tensor, positions: range, window: int, options: dict[str, Any]
) -> list[Tensor]:
    """A document longer than the window, W queries at a time: masks of W × 2 W cells, as many as the document has W."""
    found = []
    for start in range(positions.start, positions.stop, window):
        end, first = min(start + window, positions.stop), max(positions.start, start - window + 1)
        at, of = torch.arange(start, end).unsqueeze(1), torch.arange(first, end).unsqueeze(0)
        near = ((of <= at) & (of > at - window)).to(query.device)
        keys = (slice(None), slice(None), slice(first, end))
        part = query[:, :, start:end]
        found.append(scaled_dot_product_attention(part, key[keys], value[keys], attn_mask=near, **options))
    return found

"""What each architecture takes as the attention mask of packed documents.

Legend: n blocks, S positions per block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distill.errors import DataError
from distill.packing import attention_mask


def document_masks(model: Any, documents: Tensor) -> Any:
    """The mask(s) with which a model looks at no other document: [n, 1, S, S], or one per kind of layer.

    `documents` [n, S] as in Packed. An explicit mask stands for itself in transformers, so the sliding windows of the
    configuration are drawn here. True is to be seen; for eager attention, which adds its mask, 0 is. Raises DataError
    for layers that no mask keeps apart (recurrent ones, chunks shorter than a block).
    """
    config = model.config.get_text_config()
    mask = attention_mask(documents)
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or [])
    if not kinds:
        kinds = {"sliding_attention" if window else "full_attention"}
    found = {kind: _shaped(model, _mask_of(kind, config, mask)) for kind in sorted(kinds)}
    return found if len(found) > 1 else next(iter(found.values()))


def _mask_of(kind: str, config: Any, mask: Tensor) -> Tensor:
    width = mask.shape[-1]
    if kind == "full_attention":
        return mask
    if kind == "sliding_attention":
        near = torch.ones(width, width, dtype=torch.bool, device=mask.device).triu(1 - config.sliding_window)
        return mask & near
    if kind == "chunked_attention" and width <= config.attention_chunk_size:
        return mask
    raise DataError(
        f"documents packed into one block cannot be kept apart in the {kind} layers of {config.model_type}",
        "lower corpus.block to the layers' chunk" if kind == "chunked_attention" else "choose another target",
    )


def _shaped(model: Any, mask: Tensor) -> Tensor:
    if model.config._attn_implementation != "eager":
        return mask
    added = torch.zeros(mask.shape, dtype=model.dtype, device=mask.device)
    return added.masked_fill_(~mask, torch.finfo(model.dtype).min)

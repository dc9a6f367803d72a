"""The forward pass of a model over packed blocks, in which no document attends to another.

Legend: n blocks, S positions per block, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distill.errors import DataError
from distill.models.packed.document_attention import LONG, document_segments, register
from distill.packing import Packed, attention_mask


def packed_inputs(model: Any, blocks: Packed) -> dict[str, Any]:
    """The keyword arguments of a forward pass over blocks, on the model's device; positions start at 0 in each
    document. Raises DataError as document_masks does."""
    device = model.get_input_embeddings().weight.device
    return {
        "input_ids": blocks.ids.long().to(device),
        "position_ids": blocks.positions.long().to(device),
        "attention_mask": separation(model, blocks.documents, device),
        "use_cache": False,
    }


def separation(model: Any, documents: Tensor, device: torch.device) -> Any:
    """What keeps the documents [n, S] apart, in the place of an attention mask: masks, or in long blocks lists of
    segments (see document_attention); a dict where kinds of layers differ."""
    config = model.config.get_text_config()
    kinds = _kinds(config)
    compiled = getattr(model.base_model, "_compiled_call_impl", None) is not None  # lists of segments break its graphs
    plain = config._attn_implementation == "sdpa" and kinds <= {"full_attention", "sliding_attention"} and not compiled
    if documents.shape[1] < LONG or not plain:
        return document_masks(model, documents.to(device))
    register()
    found = {
        kind: document_segments(documents, config.sliding_window if kind == "sliding_attention" else None)
        for kind in sorted(kinds)
    }
    return found if len(found) > 1 else next(iter(found.values()))


def _kinds(config: Any) -> set[str]:
    """The kinds of a model's attention layers, as transformers names them."""
    window = getattr(config, "sliding_window", None)
    return set(getattr(config, "layer_types", None) or []) or {"sliding_attention" if window else "full_attention"}


def hidden_states(model: Any, blocks: Packed) -> Tensor:
    """The hidden states [n, S, H] after the final norm, on the device of the model's last layer."""
    states: Tensor = model.base_model(**packed_inputs(model, blocks)).last_hidden_state
    return states


def document_masks(model: Any, documents: Tensor) -> Any:
    """The attention mask [n, 1, S, S] that keeps documents apart; a dict of masks where kinds of layers differ.

    `documents` [n, S] as in Packed. transformers applies an explicit mask as it is, so the configuration's sliding
    windows are put into the mask here. The mask is boolean, true where a position may attend; for eager attention,
    which adds the mask to its scores, it is 0 there. Raises DataError for layers that no mask keeps apart (recurrent
    ones, chunks shorter than a block).
    """
    config = model.config.get_text_config()
    mask = attention_mask(documents)
    found = {kind: _shaped(model, _mask_of(kind, config, mask)) for kind in sorted(_kinds(config))}
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

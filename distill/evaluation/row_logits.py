"""Logits of blocks, some rows at a time: of a vocabulary of 150,000 tokens, those of whole blocks fill gigabytes.

Legend: n blocks, S positions, c rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from distill.models.packed_forward import hidden_states, packed_inputs
from distill.packing import Packed
from distill.teacher.distributions import logit_form

TRIED = 16  # positions on which a model's head is compared with its own logits
Rows = Callable[[int, Tensor], Tensor]  # a block's index and its positions [c] → logits [c, V]


class RowLogits:
    """A model of transformers whose head multiplies the rows that are asked for.

    Where that does not give the model's own logits, which is tried on the first blocks, whole blocks are computed.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._by_rows: bool | None = None

    def of(self, blocks: Packed) -> Rows:
        """The logits of these blocks; their hidden states [n, S, H] are held."""
        if self._by_rows is None:
            self._by_rows = self._own(blocks)
        if not self._by_rows:
            logits = self.model(**packed_inputs(self.model, blocks)).logits
            return lambda block, rows: logits[block][rows.to(logits.device)]
        states = hidden_states(self.model, blocks)
        return lambda block, rows: self._head(states[block][rows.to(states.device)])

    def _head(self, hidden: Tensor) -> Tensor:
        return logit_form(self.model.config).apply(self.model.get_output_embeddings()(hidden))

    def _own(self, blocks: Packed) -> bool:
        """Whether the head gives the model's own logits at the first positions of the first block."""
        size = min(TRIED, blocks.ids.shape[1])
        parts = {name: getattr(blocks, name)[:1, :size] for name in ("ids", "documents", "positions", "mask")}
        few = replace(blocks.take(slice(0, 1)), **parts)
        own = self.model(**packed_inputs(self.model, few)).logits.float()
        found = self._head(hidden_states(self.model, few))
        if found.shape != own.shape:
            return False
        known = own.isfinite() & found.isfinite()
        scale = own[known].abs().max().clamp(min=1e-12) if bool(known.any()) else torch.tensor(1.0)
        same = bool((own.isfinite() == found.isfinite()).all())
        error = (found[known] - own[known]).abs().max() / scale if bool(known.any()) else torch.tensor(0.0)
        return same and bool(error <= max(1e-4, 4 * torch.finfo(self.model.dtype).eps))

"""The online teacher: the target runs beside the draft, and its distributions are not stored.

Legend: b blocks of a batch, N scored positions of them, S positions, H the target's hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distill.models.packed_forward import hidden_states
from distill.packing import Packed
from distill.target.distributions import Teacher
from distill.target.head import Head, require_head


class OnlineTarget:
    """A loaded target on packed blocks; raises DataError where its head and hidden states do not give its logits."""

    def __init__(self, model: Any, packed: Packed, manifest: dict[str, Any], batch: int) -> None:
        self.model, self.packed, self.manifest, self.batch = model, packed, manifest, batch
        self.blocks = len(packed)
        self.vocabulary: int = manifest["vocabulary"]
        self._head = Head.of(model, self.vocabulary)
        require_head(model, self._head, packed)

    @torch.no_grad()
    def teacher(self, index: Tensor, device: torch.device) -> Teacher:
        """The distributions of the N scored positions of the blocks at `index` [b], block by block, on a device.

        The target takes `batch` blocks at once; its logits exist only chunk by chunk.
        """
        states = []
        for start in range(0, len(index), self.batch):
            part = self.packed.take(index[start : start + self.batch])
            found = hidden_states(self.model, part)
            states.append(found[part.mask.to(found.device)].to(device))
        if self._head.weight.device != device:
            self._head = self._head.to(device)
        return self._head.teacher(torch.cat(states))

"""Logits that torch computed: those of Hugging Face models, and of models that wrap another model.

Legend: n rows, V vocabulary, k candidates.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor


class TorchLogits:
    """Logits [n, V] where they were computed; see `distill.models.base.Logits`."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __len__(self) -> int:
        return self.values.shape[0]

    def argmax(self) -> list[int]:
        """The best id of each row, the smallest id on ties."""
        ids: list[int] = self.values.argmax(-1).tolist()
        return ids

    def top(self, k: int) -> tuple[NDArray[numpy.int64], NDArray[numpy.float32]]:
        """The k best ids [n, k] and their logits [n, k], best first, smaller ids first on ties."""
        values, ids = self.values.sort(dim=-1, descending=True, stable=True)  # topk leaves the order of ties open
        return ids[:, :k].cpu().numpy(), values[:, :k].float().cpu().numpy()

    def gather(self, ids: Any) -> NDArray[numpy.float32]:
        """The logits of `ids` [n] or [n, k], row by row, in the same shape."""
        index = torch.as_tensor(ids, dtype=torch.long, device=self.values.device)
        found: NDArray[numpy.float32] = self.values.gather(-1, index.view(len(self), -1)).float().cpu().numpy()
        return found.reshape(index.shape)

    def full(self) -> Tensor:
        """A copy [n, V] on the CPU, in fp64 where they were computed so, else in fp32."""
        values = self.values if self.values.dtype == torch.float64 else self.values.float()
        return values.cpu().clone()

"""Logits that torch computed: those of Hugging Face models, and of models that wrap another model.

Legend: n rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distill.models.finite import Place, finite_argmax
from distill.models.static.transfers import fetch


class TorchLogits:
    """Logits [n, V] where they were computed; see `distill.models.base.Logits`."""

    def __init__(self, values: Tensor, place: Place | None = None) -> None:
        self.values, self.place = values, place

    def __len__(self) -> int:
        return self.values.shape[0]

    def argmax(self, empty: int | None = None) -> list[int]:
        """The best id of each row, the smallest id on ties; `empty` where a row is −∞ everywhere."""
        best = self.values.argmax(-1)
        ids, largest = fetch(best, self.values.gather(-1, best.unsqueeze(-1)).squeeze(-1))
        return finite_argmax(ids.tolist(), largest.tolist(), self.place, empty)

    def full(self) -> Tensor:
        """A copy [n, V] on the CPU, in fp64 where they were computed so, else in fp32."""
        values = self.values if self.values.dtype == torch.float64 else self.values.float()
        return fetch(values)[0].clone()

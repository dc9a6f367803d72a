"""Random tables behind the interface of a model with slots: rounds on the device run on them, by enumeration.

Legend: m columns of a step, S slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from branches import Branches
from table_model import TableModel
from torch import Tensor

from distill.decoding import verify
from distill.engines.model import Ints
from distill.engines.torch.model import TorchLogits
from distill.engines.torch.static import StaticTorchModel

SLOTS = 96


class StaticTable(StaticTorchModel):
    """A text of a table; what a step writes stays in its slots until another step overwrites it, as in a cache."""

    def __init__(self, table: TableModel) -> None:
        self.table, self.rows, self.device = table, 1, torch.device("cpu")
        self.vocabulary_size, self.capacity, self.max_leaves = table.vocabulary_size, table.capacity, 0
        self.steps_on_device = True
        self.model: Any = SimpleNamespace(config=SimpleNamespace(_name_or_path="table"))
        self.slots = torch.zeros(SLOTS, dtype=torch.long)
        self._lengths = [0]

    def step(
        self, ids: Tensor, counts: Tensor, starts: Tensor, most: int, keep: Tensor | int = 0, prompt: bool = False
    ) -> Tensor:
        (row,), (start,) = ids, starts.tolist()
        assert start + len(row) <= most <= SLOTS
        self.slots[start : start + len(row)] = row
        texts = [self.slots[: start + i + 1].tolist() for i in range(len(row))]
        logits = self.table.table[[self.table.place(text) for text in texts]][None]
        return logits[:, -keep:] if isinstance(keep, int) and keep else logits

    def extend(
        self, tokens: Ints, counts: Ints | None = None, parents: Ints | None = None, want: Ints | None = None
    ) -> TorchLogits:
        (length,) = self._lengths
        starts = torch.tensor([length])
        self._lengths = [length + len(tokens)]
        (found,) = self.step(torch.tensor([list(tokens)]), starts, starts, *self._lengths)
        return TorchLogits(found if want is None else found[list(want)])

    def rollback(self, lengths: Sequence[int]) -> None:
        assert all(0 <= new <= old for new, old in zip(lengths, self._lengths, strict=True))
        self._lengths = list(lengths)


def every_draw(branches: Branches) -> Any:
    """Both ways in which rounds on the device draw, taken in every way."""

    def below(uniforms: Tensor, chances: Tensor) -> Tensor:
        assert uniforms.shape == chances.shape
        turns = [branches.choose([chance, 1 - chance]) == 0 for chance in chances.tolist()]
        return torch.tensor(turns, dtype=torch.bool)

    def drawn(distribution: Tensor, uniform: Tensor) -> Tensor:
        assert distribution.ndim == 1 and not uniform.ndim
        chances = distribution.double()
        return torch.tensor(branches.choose((chances / chances.sum()).tolist()) if chances.sum() > 0 else 0)

    return mock.patch.multiple(verify, below=below, unchecked_transform=drawn)

"""Random tables behind the interface of a model with slots: rounds on the device run on them, by enumeration.

Legend: R rows, m columns of a step, S slots, V vocabulary.
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
    """Rows of one table; what a step writes stays in its slots until another step overwrites it, as in a cache."""

    def __init__(self, table: TableModel, rows: int = 1) -> None:
        self.table, self.rows, self.device = table, rows, torch.device("cpu")
        self.vocabulary_size, self.capacity, self.max_leaves = table.vocabulary_size, table.capacity, 0
        self.steps_on_device = True
        self.model: Any = SimpleNamespace(config=SimpleNamespace(_name_or_path="table"))
        self.slots = torch.zeros(rows, SLOTS, dtype=torch.long)
        self._lengths = [0] * rows

    def step(
        self, ids: Tensor, counts: Tensor, starts: Tensor, most: int, keep: Tensor | int = 0, prompt: bool = False
    ) -> Tensor:
        columns, found = ids.shape[1], []
        assert most <= SLOTS and bool((starts + columns <= most).all())
        for row, start in enumerate(starts.tolist()):
            self.slots[row, start : start + columns] = ids[row]
            texts = [self.slots[row, : start + i + 1].tolist() for i in range(columns)]
            found.append(self.table.table[[self.table.place(text) for text in texts]])
        logits = torch.stack(found)
        return logits[:, -keep:] if isinstance(keep, int) and keep else logits

    def extend(
        self, tokens: Ints, counts: Ints | None = None, parents: Ints | None = None, want: Ints | None = None
    ) -> TorchLogits:
        counts, left, logits = counts or [len(tokens)], list(tokens), []
        for row, count in enumerate(counts):
            for _ in range(count):
                self.slots[row, self._lengths[row]] = left.pop(0)
                self._lengths[row] += 1
                text = self.slots[row, : self._lengths[row]].tolist()
                logits.append(self.table.table[self.table.place(text)])
        found = torch.stack(logits)
        return TorchLogits(found if want is None else found[list(want)])

    def rollback(self, lengths: Sequence[int]) -> None:
        assert all(0 <= new <= old for new, old in zip(lengths, self._lengths, strict=True))
        self._lengths = list(lengths)


def every_draw(branches: Branches, rows: int = 1) -> Any:
    """Both ways in which rounds on the device draw, taken in every way for the first of the rows; the others' numbers
    are what they are."""
    true_below, true_draw = verify.below, verify.unchecked_transform

    def below(uniforms: Tensor, chances: Tensor) -> Tensor:
        own = chances.flatten()[: chances.numel() // rows].tolist()
        turns = torch.tensor([branches.choose([chance, 1 - chance]) == 0 for chance in own], dtype=torch.bool)
        others = true_below(uniforms.flatten()[len(own) :], chances.flatten()[len(own) :])
        return torch.cat([turns, others]).view(chances.shape)

    def drawn(distributions: Tensor, uniforms: Tensor) -> Tensor:
        assert distributions.shape[:-1] == uniforms.shape
        flat = distributions.reshape(-1, distributions.shape[-1]).double()
        own = flat[: len(flat) // rows]
        turns = [branches.choose((row / row.sum()).tolist()) if row.sum() > 0 else 0 for row in own]
        others = true_draw(flat[len(own) :], uniforms.flatten()[len(own) :])
        return torch.cat([torch.tensor(turns), others]).view(uniforms.shape)

    return mock.patch.multiple(verify, below=below, unchecked_transform=drawn)

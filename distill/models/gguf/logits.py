"""Logits in llama.cpp's own buffer, which the next call overwrites.

Legend: n rows, V vocabulary, k candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from distill.models.finite import Place, place_of, require_finite
from distill.models.gguf.context import GgufContext


class GgufLogits:
    """Logits [n, V] as a view of llama.cpp's own buffer; see `distill.models.base.Logits`."""

    def __init__(self, context: GgufContext, rows: NDArray[np.float32], lengths: Sequence[int]) -> None:
        self._context = context
        self._generation = context.generation
        self._array = rows
        self._lengths = lengths  # of the texts that the rows follow

    def __len__(self) -> int:
        return len(self._array)

    @property
    def place(self) -> Place:
        """The file and the position of each row; made when a message needs it."""
        return place_of(str(self._context.path), self._lengths)

    def _rows(self) -> NDArray[np.float32]:
        if self._generation != self._context.generation:
            raise ValueError("these logits were overwritten: read them before the next extend or close")
        return self._array

    def argmax(self, empty: int | None = None) -> list[int]:
        """The best id of each row, the smallest id on ties; `empty` where a row is −∞ everywhere."""
        rows = self._array
        if len(rows) == 1 and self._generation == self._context.generation:
            # As few calls as can be: between the steps of a large model each is fetched from memory again.
            best = int(rows.argmax())
            if -math.inf < rows.item(best) < math.inf:
                return [best]
        rows = self._rows()
        ids: list[int] = rows.argmax(axis=1).tolist()
        largest: list[float] = [rows.item(row, token) for row, token in enumerate(ids)]
        require_finite(largest, self.place, empty is not None)
        if empty is None:
            return ids
        return [token if value > -math.inf else empty for token, value in zip(ids, largest, strict=True)]

    def top(self, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The k best ids [n, k] and their logits [n, k], best first, smaller ids first on ties; 1 <= k <= V."""
        rows = self._rows()
        size = rows.shape[1]
        if not 1 <= k <= size:
            raise ValueError(f"k must lie in 1..{size}, got {k}")
        require_finite(rows.max(axis=1).tolist(), self.place)
        ids = np.argsort(-rows, axis=1, kind="stable")[:, :k]
        return ids, np.take_along_axis(rows, ids, axis=1)

    def full(self) -> torch.Tensor:
        """All logits [n, V] as an fp32 copy."""
        return torch.from_numpy(self._rows().copy())

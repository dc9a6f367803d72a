"""What every backend of a model offers.

Legend: n rows of logits (one per wanted token), V vocabulary, k candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray


class Logits(Protocol):
    """Logits [n, V] where they were computed, rows in the order of `want`; valid until the model's next extend."""

    def __len__(self) -> int:
        """How many rows n there are."""
        ...

    def argmax(self) -> list[int]:
        """The best id of each row, the smallest id on ties."""
        ...

    def top(self, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The k best ids [n, k] and their logits [n, k], best first, smaller ids first on ties."""
        ...

    def gather(self, ids: NDArray[Any] | Sequence[int] | Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """The logits of `ids` [n] or [n, k], row by row, in the same shape."""
        ...

    def full(self) -> torch.Tensor:
        """All logits [n, V] as an fp32 copy on the CPU."""
        ...


class Model(Protocol):
    """A language model with a cache that grows, is rolled back, and is asked for logits."""

    @property
    def vocabulary_size(self) -> int:
        """How many ids V the logits cover."""
        ...

    @property
    def capacity(self) -> int:
        """The most tokens a row can hold."""
        ...

    @property
    def rows(self) -> int:
        """How many sequences are kept at once."""
        ...

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row."""
        ...

    def extend(
        self,
        tokens: Sequence[int],
        counts: Sequence[int] | None = None,
        parents: Sequence[int] | None = None,
        want: Sequence[int] | None = None,
    ) -> Logits:
        """Commit `tokens` (all rows flat, `counts` per row) and return the logits after those that `want` indexes."""
        ...

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget the tokens of each row beyond `lengths`."""
        ...

    def reset(self) -> None:
        """Forget all tokens."""
        ...

    def close(self) -> None:
        """Give back what the model holds; it cannot be used afterwards."""
        ...

"""Rows of a matrix as weighted sums of rows of another.

Legend: R rows made, P entries of all rows together.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy
from numpy.typing import ArrayLike, NDArray

Entries = tuple[NDArray[numpy.int32], NDArray[numpy.float32]]  # donor ids and weights of one row


def offsets_of(counts: ArrayLike) -> NDArray[numpy.int64]:
    """Where the entries of each row begin, and the end of the last: [R + 1] from the counts [R]."""
    return numpy.concatenate([[0], numpy.cumsum(counts, dtype=numpy.int64)]).astype(numpy.int64)


@dataclass(frozen=True)
class Mixture:
    """Every new row as a weighted sum of donor rows: row r has entries offsets[r] to offsets[r + 1] of ids, weights.

    offsets [R + 1], ids [P], weights [P]; a row without entries is zero.
    """

    offsets: NDArray[numpy.int64]
    ids: NDArray[numpy.int32]
    weights: NDArray[numpy.float32]

    def replaced(self, rows: Mapping[int, Entries]) -> Mixture:
        """The mixture with other entries for some rows."""
        entries = [
            rows.get(row) or (self.ids[first:last], self.weights[first:last])
            for row, (first, last) in enumerate(itertools.pairwise(self.offsets))
        ]
        return Mixture(
            offsets_of([len(ids) for ids, _ in entries]),
            numpy.concatenate([ids for ids, _ in entries]).astype(numpy.int32),
            numpy.concatenate([weights for _, weights in entries]).astype(numpy.float32),
        )

    def same_as(self, other: Mixture) -> bool:
        """Whether both make the same rows of the same matrix."""
        return all(
            numpy.array_equal(getattr(self, part), getattr(other, part)) for part in ("offsets", "ids", "weights")
        )

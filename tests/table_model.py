"""A language model that is a random table: the exact tests of verifiers and length rules run on it.

Legend: n tokens of one call, V vocabulary, k tokens of context that the next one depends on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from distill.engines.model import ROOT, Ints, PendingTree, check_call, check_lengths
from distill.engines.torch.model import TorchLogits


class TableModel:
    """One sequence whose next token's logits are a fixed random function of the last k tokens (fewer at the start).

    `sharpness` is the logits' standard deviation. `table` [(V + 1)^k, V] is indexed by `place`.
    """

    rows = 1
    max_leaves = sys.maxsize

    def __init__(
        self, vocabulary: int, seed: int = 0, memory: int = 2, sharpness: float = 2.0, capacity: int = 4096
    ) -> None:
        self.vocabulary_size, self.memory, self.capacity = vocabulary, memory, capacity
        generator = torch.Generator().manual_seed(seed)
        size = ((vocabulary + 1) ** memory, vocabulary)
        self.table = sharpness * torch.randn(size, generator=generator, dtype=torch.float64)
        self._context: list[int] = []
        self._tree = PendingTree()
        self._tokens: list[int] = []  # of the tree's nodes

    def near(self, distance: float, seed: int, capacity: int | None = None) -> TableModel:
        """A draft for this target: its logits are these plus noise of standard deviation `distance`."""
        other = TableModel(self.vocabulary_size, seed, self.memory, distance, capacity or self.capacity)
        other.table += self.table
        return other

    def place(self, context: Sequence[int]) -> int:
        """The row of the table for a context: its last k tokens as digits, V where there is none."""
        index = 0
        for token in ([self.vocabulary_size] * self.memory + list(context[-self.memory :]))[-self.memory :]:
            index = index * (self.vocabulary_size + 1) + token
        return index

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of the one row."""
        return [len(self._context)]

    def extend(
        self, tokens: Ints, counts: Ints | None = None, parents: Ints | None = None, want: Ints | None = None
    ) -> TorchLogits:
        """Commit a chain, or hang nodes into the tree below `parents`; logits after the tokens in `want` (all if None).

        ValueError, with nothing changed, for no tokens, ids outside [0, V), a path past the capacity, `want` outside
        the tokens, parents that are no earlier nodes, or a chain while a tree is pending.
        """
        count, depth = len(tokens), len(self._context)
        above = range(ROOT, count - 1) if parents is None else parents
        check_call(tokens, counts, above, want, self.vocabulary_size)
        if parents is None and len(self._tree):
            raise ValueError("a tree is pending: keep a path of it or roll back first")
        first = len(self._tree)
        self._tree = self._tree.grown(above, depth, self.capacity)
        self._tokens += [int(token) for token in tokens]
        ends = [self._ending(first + i) for i in (range(count) if want is None else want)]
        if parents is None:
            self.keep([list(range(count))])
        return TorchLogits(self.table[torch.tensor([self.place(end) for end in ends], dtype=torch.long)])

    def _ending(self, node: int) -> list[int]:
        """The last k tokens up to a node of the tree."""
        found: list[int] = []
        while node != ROOT and len(found) < self.memory:
            found.append(self._tokens[node])
            node = self._tree.parents[node]
        missing = self.memory - len(found)
        return (self._context[-missing:] if missing else []) + found[::-1]

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Commit one path of the pending tree and drop its other nodes; ValueError for what is no path from ROOT."""
        self._context += [self._tokens[node] for node in self._tree.only_path(paths)]
        self._drop_tree()

    def _drop_tree(self) -> None:
        self._tokens, self._tree = [], PendingTree()

    def rollback(self, lengths: Sequence[int]) -> None:
        """Drop the tree and the tokens after the first `lengths[0]`; ValueError outside 0..the committed length."""
        (length,) = check_lengths(lengths, [len(self._context)])
        del self._context[length:]
        self._drop_tree()

    def close(self) -> None:
        """Forget all tokens; there is nothing to free."""
        self.rollback([0])

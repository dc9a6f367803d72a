"""A pending tree in the sequences of one llama.cpp cache.

Sequence 0 is the committed row, the others are branches. A branch owns the cells of its path from the first token to
its leaf, and every node belongs to all branches through it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from distill.models.base import ROOT, PendingTree
from distill.models.gguf.context import GgufContext


class Branches:
    """The nodes of the pending tree, and up to `max_branches` sequences that they lie in, below a committed row.

    `length` is always the number of committed tokens.
    """

    def __init__(self, context: GgufContext, max_branches: int) -> None:
        self._context, self._max_branches = context, max_branches
        self.tree = PendingTree()
        self._through: list[list[int]] = []  # of each node: the sequences through it
        self._shared = [0] * (max_branches + 1)  # of each sequence but 0: committed tokens that it owns too

    def __len__(self) -> int:
        return len(self.tree)

    @contextmanager
    def growing(self, tree: PendingTree, length: int) -> Iterator[list[list[int]]]:
        """In the block, `tree`'s new nodes are decoded, each into the sequences through it; then it is the pending one.

        Where the block fails, everything is as it was before. ValueError for more than `max_branches` branches.
        """
        through, sources = self._grown(tree, length)
        try:
            for sequence, (source, end) in sources.items():
                # It may own a beginning of the committed row already, from an earlier tree.
                self._context.share(source, sequence, self._shared[sequence], end)
            yield through[len(self.tree) :]
        except BaseException:
            for sequence in {sequence for sequences in through for sequence in sequences}:
                pending = zip(self.tree.depths, self._through, strict=True)
                decoded = max((depth for depth, sequences in pending if sequence in sequences), default=0)
                end = self._shared[sequence] if sequence in sources else length + decoded
                self._context.withdraw(sequence, end)
            raise
        self._shared = [length if sequence in sources else shared for sequence, shared in enumerate(self._shared)]
        self.tree, self._through = tree, through

    def _grown(self, tree: PendingTree, length: int) -> tuple[list[list[int]], dict[int, tuple[int, int]]]:
        """The sequences through each node of `tree`, and the beginning that each new sequence copies.

        A first child continues its parent's sequence, any other child starts a new one. A copy is (source, end): the
        source's cells before position `end`, which hold the committed row and the decoded part of the path.
        """
        old, through = len(self.tree), [list(sequences) for sequences in self._through]
        used = {sequence for sequences in through for sequence in sequences}
        free = [sequence for sequence in range(1, self._max_branches + 1) if sequence not in used]
        inner = {parent for parent in tree.parents[:old] if parent != ROOT}
        sources: dict[int, tuple[int, int]] = {}
        for node in range(old, len(tree)):
            parent = tree.parents[node]
            if parent != ROOT and parent not in inner:
                inner.add(parent)
                through.append([through[parent][0]])
                continue
            if not free:
                raise ValueError(f"more than {self._max_branches} branches: open the model with a larger max_leaves")
            sequence, source = free.pop(0), (0, length)
            while parent != ROOT:
                if parent < old and source[0] == 0:
                    source = (through[parent][0], length + tree.depths[parent])
                through[parent].append(sequence)
                parent = tree.parents[parent]
            through.append([sequence])
            sources[sequence] = source
        return through, sources

    def commit(self, paths: Sequence[Sequence[int]], length: int) -> int:
        """Give sequence 0 the one path in `paths` and drop the tree; the path's length. ValueError for no such path."""
        path = self.tree.only_path(paths)
        if path:
            self._context.share(self._through[path[-1]][0], 0, length, length + len(path))
        self.drop(length)
        return len(path)

    def drop(self, length: int) -> None:
        """Cut every branch back to the committed tokens, which it still owns, so that the next tree copies less."""
        for sequence in {sequence for sequences in self._through for sequence in sequences}:
            self._context.remove(sequence, length)
        self.tree, self._through = PendingTree(), []

    def shorten(self, length: int) -> None:
        """Remove every branch from committed tokens beyond `length`, which were rolled back."""
        for sequence, shared in enumerate(self._shared):
            if shared > length:
                self._context.remove(sequence, length)
                self._shared[sequence] = length

"""Trees without tokens: their shapes, the tokens to expect from one, and the best ones for an acceptance by rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from distill.speculative.proposal import ROOT, Proposal


@dataclass(frozen=True)
class Shape:
    """A tree without tokens: the parent of each node (ROOT or an earlier node); siblings are ranked in order."""

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        assert all(ROOT <= parent < node for node, parent in enumerate(self.parents)), self.parents

    def __len__(self) -> int:
        return len(self.parents)

    @classmethod
    def of_widths(cls, widths: Sequence[int]) -> Shape:
        """The shape in which every node of level i has widths[i] children; (1, 1, …) is a chain."""
        parents: list[int] = []
        level = [ROOT]
        for width in widths:
            start = len(parents)
            parents += [parent for parent in level for _ in range(width)]
            level = list(range(start, len(parents)))
        return cls(tuple(parents))

    @property
    def ranks(self) -> list[int]:
        """Each node's place among its siblings, from 0."""
        return [self.parents[:node].count(parent) for node, parent in enumerate(self.parents)]

    @property
    def depths(self) -> list[int]:
        """Each node's level, 1 below the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    def within(self, levels: int) -> Shape:
        """The shape without the nodes that are deeper than `levels`."""
        places: dict[int, int] = {ROOT: ROOT}
        parents: list[int] = []
        for node, (parent, depth) in enumerate(zip(self.parents, self.depths, strict=True)):
            if depth <= levels:
                places[node] = len(parents)
                parents.append(places[parent])
        return Shape(tuple(parents))


def expected_accepted(shape: Shape, acceptance: Sequence[float]) -> float:
    """Expected accepted tokens: a node's child of rank r is accepted with acceptance[r], given that the node is.

    Ranks beyond the list are never accepted.
    """
    reached: list[float] = []
    for parent, rank in zip(shape.parents, shape.ranks, strict=True):
        chance = acceptance[rank] if rank < len(acceptance) else 0.0
        reached.append(chance * (1.0 if parent == ROOT else reached[parent]))
    return sum(reached)


@dataclass
class RankTally:
    """Acceptance by rank as measured: of the nodes that were reached and had a child of rank r, how many took it."""

    tried: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)

    def observe(self, proposal: Proposal, path: Sequence[int]) -> None:
        """Count one round of which the nodes of `path` were accepted."""
        children = proposal.children()
        for here, after in zip([ROOT, *path], [*path, None], strict=True):
            below = children.get(here, [])
            missing = len(below) - len(self.tried)
            self.tried += [0] * missing
            self.taken += [0] * missing
            for rank, child in enumerate(below):
                self.tried[rank] += 1
                self.taken[rank] += child == after

    def rates(self) -> list[float]:
        """taken / tried by rank."""
        return [taken / tried for taken, tried in zip(self.taken, self.tried, strict=True)]


class ShapeTable:
    """The best shapes of every size and depth for an acceptance by rank (Sequoia, 2402.12374, section 3.1).

    `expected[d, n]` is the most expected accepted tokens of exactly n nodes in at most d levels, −inf where none fit:
    F_d(n) = H_0(n), H_r(n) = max_s a_r·(1 + F_{d−1}(s − 1)) + H_{r+1}(n − s), s the size of the child's own tree.
    """

    def __init__(self, acceptance: Sequence[float], nodes: int, depth: int) -> None:
        ranks = len(acceptance)
        self.expected = np.full((depth + 1, nodes + 1), -np.inf)
        self.expected[:, 0] = 0
        self._sizes = np.zeros((depth + 1, ranks, nodes + 1), dtype=np.int64)
        for d in range(1, depth + 1):
            rest = self.expected[0].copy()  # H of the ranks after r: at first there are none, so n is 0
            for r in reversed(range(ranks)):
                fits = np.isfinite(self.expected[d - 1])
                child = np.full(nodes + 1, -np.inf)
                child[fits] = acceptance[r] * (1 + self.expected[d - 1, fits])
                here = rest.copy()
                here[1:] = -np.inf
                for n in range(1, nodes + 1):
                    found = child[:n] + rest[n - 1 :: -1]
                    best = int(found.argmax())
                    self._sizes[d, r, n], here[n] = best + 1, found[best]
                rest = here
            self.expected[d] = rest

    def shape(self, nodes: int, depth: int) -> Shape:
        """The best shape of this size and depth, level by level; some fits (see `expected`)."""
        assert np.isfinite(self.expected[depth, nodes])
        parents: list[int] = []
        level = [(ROOT, nodes)]
        for d in range(depth, 0, -1):
            below: list[tuple[int, int]] = []
            for parent, size in level:
                rank = 0
                while size:
                    own = int(self._sizes[d, rank, size])
                    parents.append(parent)
                    below.append((len(parents) - 1, own - 1))
                    size, rank = size - own, rank + 1
            level = below
        return Shape(tuple(parents))


def choose_shape(
    acceptance: Sequence[float], nodes: int, depth: int, target: Mapping[int, float], draft: Callable[[int], float]
) -> Shape:
    """The shape of at most `nodes` nodes and `depth` levels with the most tokens per second; empty: decode plainly.

    Argmax of (1 + expected accepted) / (T(n + 1) + draft(d)) over sizes n and depths d, smaller ones on ties; `target`
    maps m to T(m) seconds, `draft` gives the seconds of drafting d levels.
    """
    table = ShapeTable(acceptance, nodes, depth)
    best, chosen = -np.inf, (0, 0)
    for n in range(nodes + 1):
        for d in range(min(n, 1), min(n, depth) + 1):
            if n + 1 in target and np.isfinite(table.expected[d, n]):
                speed = (1 + table.expected[d, n]) / (target[n + 1] + draft(d))
                if speed > best:
                    best, chosen = speed, (n, d)
    return table.shape(*chosen)

"""Trees of drafted tokens: grown best-first, or filled in a shape fixed beforehand.

There are two kinds of children. Deterministic ones are the best tokens of the draft's distribution; the choice of nodes
to keep may depend on anything. Sampled ones are drawn from the distribution, in a shape that was fixed before the draw:
a drawn node is never removed, or the draft would no longer follow its distribution. Legend: n nodes, m nodes of one
call, V vocabulary, k children.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distill.decoding.calibration import Calibration
from distill.decoding.drafters import distribution_sampler, read_prompt
from distill.decoding.lengths import ROOT, Features, Proposal, best_of_each, best_tokens, children_of, features_from
from distill.decoding.verify import Random, draw_token
from distill.engines.model import SPARE_NODES, Model
from distill.engines.torch.model import for_sampler
from distill.sampler import Logits, Sampler

# ── Shapes: trees without tokens ──


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


# ── Trees of drafted tokens ──

# Feeds the draft these tokens below these parents (numbers of tokens fed before, or ROOT) and returns the distributions
# [m, V] after them, after the sampler. `extend(tokens, parents=parents)` of a model numbers its nodes in the same way.
Expand = Callable[[list[int], list[int]], Tensor]


@dataclass(frozen=True, order=True)
class _Node:
    """A node that could be in the tree, in order of preference: parents before their children, ties by rank."""

    loss: float  # minus the product of probabilities down to it
    depth: int
    ranks: tuple[int, ...]  # of the nodes on the path to it among their siblings
    token: int = field(compare=False)

    @property
    def parent(self) -> tuple[int, ...]:
        return self.ranks[:-1]


class Leaves:
    """The leaves of a tree that grows below `root`: at most `most`. Each child but a node's first makes one more."""

    def __init__(self, most: int, root: Hashable = ROOT) -> None:
        self._left, self._inner = most, {root}

    def take(self, parent: Hashable) -> bool:
        """Count a child of `parent`, unless it makes a leaf too many."""
        more = parent in self._inner
        if more > self._left:
            return False
        self._left -= more
        self._inner.add(parent)
        return True


class _JoinedNodes:
    """The nodes that joined a tree, parents first, with at most `max_leaves` leaves; () is the root."""

    def __init__(self, max_leaves: int) -> None:
        self._leaves = Leaves(max_leaves, ())
        self.numbers: dict[tuple[int, ...], int] = {(): ROOT}

    def join(self, node: _Node) -> bool:
        """Add the node, unless its parent is missing or it makes a leaf too many."""
        if node.parent not in self.numbers or not self._leaves.take(node.parent):
            return False
        self.numbers[node.ranks] = len(self.numbers) - 1
        return True


def best_first(
    root: Tensor,
    expand: Expand,
    nodes: int,
    *,
    branching: int = 8,
    depth: int = 16,
    calibration: Calibration | None = None,
    max_leaves: int = sys.maxsize,
) -> tuple[Proposal, list[float]]:
    """The tree of at most `nodes` nodes with the largest sum of values, and the values, largest first.

    A node's value is the product of its path's probabilities of acceptance: the draft's, or those that `calibration`
    makes of them. `root` [V] is the distribution after the context; children are the `branching` best tokens. The first
    nodes are always the best tree of fewer. The draft is called once per level, and takes some nodes that the tree then
    leaves out. `max_leaves` bounds the branches of the tree and of the nodes that the draft takes; where it binds, the
    tree is the greedy one, not the best.
    """
    if nodes <= 0 or depth <= 0 or branching <= 0:
        return Proposal.chain([]), []
    (pool,) = _children([None], root[None], branching, calibration)
    drafted = _JoinedNodes(max_leaves)  # nodes that the draft took
    tried: set[tuple[int, ...]] = set()
    while True:
        picked = _pick(pool, nodes, max_leaves)
        # A node in the last place has no children in the tree: they would come after it.
        open_nodes = [node for node in picked[: nodes - 1] if node.depth < depth and node.ranks not in tried]
        if not open_nodes:
            places = {node.ranks: place for place, node in enumerate(picked)}
            parents = [places.get(node.parent, ROOT) for node in picked]
            return Proposal([node.token for node in picked], parents), [-node.loss for node in picked]
        level = min(node.depth for node in open_nodes)
        open_nodes = [node for node in open_nodes if node.depth == level]
        tried.update(node.ranks for node in open_nodes)
        open_nodes = [node for node in open_nodes if drafted.join(node)]
        if not open_nodes:
            continue
        above = [drafted.numbers[node.parent] for node in open_nodes]
        distributions = expand([node.token for node in open_nodes], above)
        for children in _children(open_nodes, distributions, branching, calibration):
            pool += children


def _children(
    nodes: Sequence[_Node | None], distributions: Tensor, branching: int, calibration: Calibration | None
) -> Iterator[list[_Node]]:
    """The `branching` best children of each node (None: the root), with distributions [m, V]."""
    best = best_of_each(distributions, max(branching, 2))
    for node, distribution, (tokens, chances) in zip(nodes, distributions, best, strict=True):
        value, depth, ranks = (1.0, 0, ()) if node is None else (-node.loss, node.depth, node.ranks)
        if calibration is not None and tokens:
            chances = calibrated(chances, features_from(distribution, chances), depth, calibration)
        ranked = enumerate(zip(tokens[:branching], chances[:branching], strict=True))
        yield [_Node(-value * chance, depth + 1, (*ranks, rank), token) for rank, (token, chance) in ranked]


def calibrated(chances: Sequence[float], features: Features, position: int, calibration: Calibration) -> list[float]:
    """The probability that each child is accepted, from the draft's probabilities of a node's children, best first.

    A chain's calibration tells that of the best child; the others share the rest as in the distribution.
    """
    first = calibration.accept(position, features)
    scale = (1 - first) / (1 - features.top) if features.top < 1 else 0.0
    return [first, *[min(chance * scale, 1.0) for chance in chances[1:]]]


def _pick(pool: Sequence[_Node], nodes: int, max_leaves: int) -> list[_Node]:
    """The best `nodes` nodes of the pool that make a tree of at most `max_leaves` leaves."""
    joined = _JoinedNodes(max_leaves)
    return [node for node in sorted(pool) if len(joined.numbers) <= nodes and joined.join(node)]


def top_tree(shape: Shape, root: Tensor, expand: Expand) -> Proposal:
    """Fill a shape with the best tokens of the draft's distributions: a child of rank r is the (r + 1)-th best.

    Children beyond a distribution's possible tokens are left out, with all nodes below them. `root` [V] is the
    distribution after the context.
    """

    def best(distribution: Tensor, count: int) -> list[tuple[int, None]]:
        return [(token, None) for token in best_tokens(distribution, count)[0]]

    return _fill(shape, root, expand, best)


def sampled_tree(
    shape: Shape, root: Tensor, expand: Expand, random: Callable[[], float], replacement: bool
) -> Proposal:
    """Fill a shape with draws from the draft's distributions, which the proposal holds.

    Without replacement a token is drawn from what the siblings before it left of the distribution, and no more children
    are drawn once no possible token is left: their number depends on the distribution alone, never on the drawn tokens.
    With replacement siblings may be equal. `root` [V] is the distribution after the context.
    """

    def draw(distribution: Tensor, count: int) -> list[tuple[int, Tensor]]:
        drawn: list[tuple[int, Tensor]] = []
        possible = int((distribution > 0).sum())
        if not replacement or not possible:
            count = min(count, possible)
        for _ in range(count):
            token = draw_token(distribution, random)
            drawn.append((token, distribution))
            if not replacement:
                # Scaled by the mass left, not by 1 − q: that difference can round to 0.
                distribution = distribution.double().clone()
                distribution[token] = 0
                distribution = distribution / distribution.sum().clamp(min=torch.finfo(distribution.dtype).tiny)
        return drawn

    return _fill(shape, root, expand, draw)


def _fill(
    shape: Shape, root: Tensor, expand: Expand, children: Callable[[Tensor, int], Sequence[tuple[int, Tensor | None]]]
) -> Proposal:
    """Fill a shape with one call of the draft per level.

    `children` gives up to so many tokens below a distribution, each with the distribution that it was drawn from, None
    where it was chosen without chance.
    """
    below = children_of(shape.parents)
    tokens: list[int] = []
    parents: list[int] = []
    distributions: list[Tensor] = []
    number: dict[int, int] = {}  # from a node of the shape to its number among the nodes that the draft took
    level = [(ROOT, ROOT, root)]  # node of the shape, node of the proposal, the distribution after it
    while level:
        made: list[tuple[int, int]] = []
        for node, place, distribution in level:
            for child, (token, own) in zip(below[node], children(distribution, len(below[node])), strict=False):
                made.append((child, len(tokens)))
                tokens.append(token)
                parents.append(place)
                if own is not None:
                    distributions.append(own.double())
        inner = [(child, place) for child, place in made if child in below]
        if not inner:
            break
        above = [number.get(shape.parents[child], ROOT) for child, _ in inner]
        number.update({child: len(number) + i for i, (child, _) in enumerate(inner)})
        after = expand([tokens[place] for _, place in inner], above)
        level = [(child, place, distribution) for (child, place), distribution in zip(inner, after, strict=True)]
    return Proposal(tokens, parents, torch.stack(distributions) if distributions else None)


class TreeDrafter:
    """A model that proposes trees: of the nodes of greatest value, or in a fixed shape.

    Without a `shape` the tree has the `nodes` nodes of greatest value (deterministic children). With one, children are
    the best tokens where `best`, else drawn from the draft's distribution, without replacement where `distinct`.
    """

    tree = True

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        random: Random,
        nodes: int,
        *,
        shape: Shape | None = None,
        best: bool = False,
        distinct: bool = False,
        branching: int = 16,
        depth: int = 8,
        calibration: Calibration | None = None,
    ) -> None:
        if sampler.repetition_penalty != 1:
            raise ValueError("trees are not drafted under a repetition penalty: branches have different histories")
        if shape is not None and not best and sampler.temperature == 0:
            raise ValueError("a greedy sampler draws nothing: ask for trees of the best tokens")
        self.model, self.sampler, self.random, self.nodes = model, distribution_sampler(sampler), random, nodes
        self.shape, self.best, self.distinct = shape, best, distinct
        self.kind = "deterministic" if shape is None or best else "distinct" if distinct else "sampled"
        self.branching, self.depth, self.calibration = branching, depth, calibration

    def begin(self, prompt: Sequence[int]) -> None:
        """Read the prompt but for its last token; nothing where it has no room, or where no tree is worth its steps."""
        read_prompt(self.model, prompt, self.nodes > 0)

    def room(self, length: int) -> int:
        """The room left in the draft's context, which holds every node that the draft takes."""
        return self.model.capacity - length

    def size(self, limit: int) -> tuple[Shape | None, int]:
        """The shape and the most nodes of a tree of at most `limit` levels: a shape loses its deeper ones. It is
        settled before any draw; 0 where nothing is drafted."""
        shape = None if self.shape is None else self.shape.within(limit)
        # The target holds a path of limit + 1 nodes and SPARE_NODES beside it; the context's last token is one of them.
        room = limit + SPARE_NODES - 2
        if limit <= 0:
            return None, 0
        if shape is None:
            return None, min(self.nodes, room)
        return shape, len(shape) if len(shape) <= room else 0

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """A tree of at most `limit` levels, of `size`."""
        shape, nodes = self.size(limit)
        if nodes == 0:
            return Proposal.chain([])

        def distributions(logits: Logits) -> Tensor:
            return self.sampler.probabilities(for_sampler(logits), place=logits.place, empty=True)

        def expand(tokens: list[int], parents: list[int]) -> Tensor:
            return distributions(self.model.extend(tokens, parents=parents))

        fresh = list(context[self.model.lengths[0] :])
        root = distributions(self.model.extend(fresh, want=[len(fresh) - 1]))[0]

        if shape is not None and self.best:
            return top_tree(shape, root, expand)
        if shape is not None:
            return sampled_tree(shape, root, expand, self.random, not self.distinct)
        return best_first(
            root,
            expand,
            nodes,
            branching=self.branching,
            depth=min(self.depth, limit),
            calibration=self.calibration,
            max_leaves=self.model.max_leaves,
        )[0]

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """Drop the tree; the accepted path is read again together with the next token."""
        self.model.rollback([min(self.model.lengths[0], length - 1)])

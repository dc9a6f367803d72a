"""Trees of drafted tokens: grown best-first, or filled in a shape fixed beforehand, and how large they should grow.

Two kinds of children. Deterministic ones are the best tokens of the draft's distribution; which nodes are kept may
depend on everything. Sampled ones are drawn from it, in a shape that was fixed before the draw: a node that was drawn
is never removed, else the draft no longer follows its distribution. Legend: n nodes, m nodes of one call, V vocabulary,
k children.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from distill.speculative.calibration import Calibration
from distill.speculative.proposal import ROOT, Features, Proposal
from distill.speculative.trees.shape import Shape
from distill.speculative.verify import draw_token

# The draft takes these tokens below these parents (numbers of tokens it took before, or ROOT) and gives the
# distributions [m, V] after them, through the sampler; `extend(tokens, parents=parents)` of a model numbers its nodes
# in the same way.
Expand = Callable[[list[int], list[int]], Tensor]
# From the draft's probabilities of a node's children, best first, the features of their distribution, their position
# (from 0) and the value of the node above: the probability of each child to stand, given that the node does.
Calibrate = Callable[[list[float], Features, int, float], list[float]]


def features_of(distribution: Tensor) -> Features:
    """Features of a distribution [V]."""
    return _features(distribution, best_tokens(distribution, 2)[1])


def _features(distribution: Tensor, best: Sequence[float]) -> Features:
    # −Σ p ln p; special.entr takes twice the time.
    entropy = -(distribution * distribution.clamp(min=torch.finfo(distribution.dtype).tiny).log()).sum()
    return Features(best[0], best[1] if len(best) > 1 else 0.0, float(entropy))


def best_tokens(distribution: Tensor, count: int) -> tuple[list[int], list[float]]:
    """Up to `count` possible tokens of a distribution [V] and their probabilities, best first, the smaller id first on
    ties."""
    values, ids = distribution.topk(min(count + 1, distribution.shape[-1]))
    found = list(zip(values.tolist(), ids.tolist(), strict=True))
    if len(found) > count and found[count][0] == found[count - 1][0] > 0:
        # A tie at the last place leaves topk a choice: look at all that are as good.
        ids = torch.nonzero(distribution >= values[-1]).flatten()
        found = list(zip(distribution[ids].tolist(), ids.tolist(), strict=True))
    found = sorted(((p, i) for p, i in found if p > 0), key=lambda pair: (-pair[0], pair[1]))[:count]
    return [i for _, i in found], [p for p, _ in found]


def spread(calibration: Calibration) -> Calibrate:
    """A chain's calibration for trees: it judges the best child; the others share what that leaves as in the
    distribution."""

    def calibrate(chances: list[float], features: Features, position: int, survival: float) -> list[float]:
        first = calibration.accept(position, features, survival)
        scale = (1 - first) / (1 - features.top) if features.top < 1 else 0.0
        return [first, *(chance * scale for chance in chances[1:])]

    return calibrate


@dataclass(frozen=True, order=True)
class _Node:
    """A node that could be in the tree, in order of preference: parents before their children, ties by rank."""

    loss: float  # minus the product of probabilities down to it
    depth: int
    ranks: tuple[int, ...]  # of the nodes on the path to it among their siblings
    token: int = field(compare=False)
    features: Features = field(compare=False)

    @property
    def parent(self) -> tuple[int, ...]:
        return self.ranks[:-1]


class _Leaves:
    """Counts the leaves of a tree as nodes join it, parents first; () is the root."""

    def __init__(self, most: int | None) -> None:
        self.most, self.count = most, 0
        self.members: dict[tuple[int, ...], int] = {(): 0}
        self._inner: set[tuple[int, ...]] = set()

    def join(self, node: _Node) -> bool:
        """Take the node unless its parent is missing or it makes a leaf too many."""
        more = node.parent == () or node.parent in self._inner
        if node.parent not in self.members or (self.most is not None and self.count + more > self.most):
            return False
        self.count += more
        self._inner.add(node.parent)
        self.members[node.ranks] = len(self.members) - 1
        return True


def best_first(
    root: Tensor,
    expand: Expand,
    nodes: int,
    *,
    branching: int = 8,
    depth: int = 16,
    calibrate: Calibrate | None = None,
    by_level: bool = True,
    max_leaves: int | None = None,
) -> tuple[Proposal, list[float]]:
    """The tree of at most `nodes` nodes with the largest sum of values, and the values, largest first.

    A node's value is the product of its path's probabilities of acceptance: the draft's, or what `calibrate` makes of
    them. `root` [V] is the distribution after the context; children are the `branching` best tokens. The first nodes
    are always the best tree of fewer, see `choose_budget`. Level by level the draft is called once per level and takes
    some nodes too many; else it is called once per node (but the last), with the same tree for the outcome.
    `max_leaves` bounds the branches of the tree and of what the draft takes; where it binds, the tree is the greedy
    one, not the best.
    """
    if nodes <= 0 or depth <= 0 or branching <= 0:
        return Proposal.chain([]), []
    pool = _children(None, root, branching, calibrate)
    taken = _Leaves(max_leaves)  # nodes whose distributions the draft was asked for
    seen: set[tuple[int, ...]] = set()
    while True:
        picked = _pick(pool, nodes, max_leaves)
        # The last place is no parent: a child comes after it.
        open_nodes = [node for node in picked[: nodes - 1] if node.depth < depth and node.ranks not in seen]
        if by_level:
            least = min((node.depth for node in open_nodes), default=0)
            open_nodes = [node for node in open_nodes if node.depth == least]
        else:
            open_nodes = open_nodes[:1]
        if not open_nodes:
            break
        seen.update(node.ranks for node in open_nodes)
        open_nodes = [node for node in open_nodes if taken.join(node)]
        if open_nodes:
            above = [taken.members[node.parent] if node.parent else ROOT for node in open_nodes]
            distributions = expand([node.token for node in open_nodes], above)
            pool = picked if max_leaves is None else pool
            for node, distribution in zip(open_nodes, distributions, strict=True):
                pool = [*pool, *_children(node, distribution, branching, calibrate)]
    places = {node.ranks: place for place, node in enumerate(picked)}
    parents = [places.get(node.parent, ROOT) for node in picked]
    return (
        Proposal([node.token for node in picked], parents, None, [node.features for node in picked]),
        [-node.loss for node in picked],
    )


def _children(node: _Node | None, distribution: Tensor, branching: int, calibrate: Calibrate | None) -> list[_Node]:
    value, depth, ranks = (1.0, 0, ()) if node is None else (-node.loss, node.depth, node.ranks)
    tokens, chances = best_tokens(distribution, max(branching, 2))
    features = _features(distribution, chances)
    tokens, chances = tokens[:branching], chances[:branching]
    if calibrate is not None:
        chances = [min(max(chance, 0.0), 1.0) for chance in calibrate(chances, features, depth, value)]
    return [
        _Node(-value * chance, depth + 1, (*ranks, rank), token, features)
        for rank, (token, chance) in enumerate(zip(tokens, chances, strict=True))
    ]


def _pick(pool: Sequence[_Node], nodes: int, max_leaves: int | None) -> list[_Node]:
    if max_leaves is None:
        return heapq.nsmallest(nodes, pool)
    leaves = _Leaves(max_leaves)
    return [node for node in sorted(pool) if len(leaves.members) <= nodes and leaves.join(node)]


def choose_budget(values: Sequence[float], target: Mapping[int, float], draft: Callable[[int], float]) -> int:
    """How many of the first nodes to verify: argmax of (1 + Σ values) / (T(n + 1) + draft(n)) over n, least on ties.

    `target` maps m to T(m) seconds, never smoothed; sizes that it lacks are not chosen. `draft` gives the seconds spent
    on drafting a tree of n nodes (a constant where that is sunk). 0 is plain decoding.
    """
    expected = 1 + np.cumsum([0.0, *values])
    sizes = [n for n in range(len(values) + 1) if n + 1 in target]
    return max(sizes, key=lambda n: (expected[n] / (target[n + 1] + draft(n)), -n), default=0)


def top_tree(shape: Shape, root: Tensor, expand: Expand) -> Proposal:
    """Fill a shape with the best tokens of the draft's distributions, a node's child of rank r being its (r + 1)-th
    best.

    Children beyond a distribution's possible tokens are left out, with all below them. `root` [V] is the distribution
    after the context.
    """
    return _fill(
        shape,
        root,
        expand,
        lambda distribution, count: [(token, distribution) for token in best_tokens(distribution, count)[0]],
        False,
    )


def sampled_tree(
    shape: Shape, root: Tensor, expand: Expand, random: Callable[[], float], replacement: bool
) -> Proposal:
    """Fill a shape with draws from the draft's distributions; `distributions` are those that each token was drawn from.

    Without replacement a token's distribution is what its earlier siblings left, and once a distribution has no
    possible token left, no more children are drawn: their number depends on the distribution alone, never on what was
    drawn. With it siblings may be equal. `root` [V] is the distribution after the context.
    """

    def draw(distribution: Tensor, count: int) -> list[tuple[int, Tensor]]:
        drawn: list[tuple[int, Tensor]] = []
        if not replacement:
            count = min(count, int((distribution > 0).sum()))
        for _ in range(count):
            token = draw_token(distribution, random)
            drawn.append((token, distribution))
            if not replacement:
                # Scaled by what is left, not by 1 − q: that difference can round to nothing.
                distribution = distribution.double().index_fill(
                    0, torch.tensor([token], device=distribution.device), 0.0
                )
                distribution = distribution / distribution.sum().clamp(min=torch.finfo(distribution.dtype).tiny)
        return drawn

    return _fill(shape, root, expand, draw, True)


def _fill(
    shape: Shape,
    root: Tensor,
    expand: Expand,
    choose: Callable[[Tensor, int], list[tuple[int, Tensor]]],
    keep_distributions: bool,
) -> Proposal:
    """Level by level, one call of the draft for each: `choose` gives up to count tokens and the distribution of
    each."""
    below: dict[int, list[int]] = {}
    for node, parent in enumerate(shape.parents):
        below.setdefault(parent, []).append(node)
    tokens: list[int] = []
    parents: list[int] = []
    distributions: list[Tensor] = []
    features: list[Features] = []
    number: dict[int, int] = {}  # of a node of the shape in what the draft took
    level = [(ROOT, ROOT, root)]  # in the shape, in the proposal, the distribution below
    while level:
        made: list[tuple[int, int]] = []
        for node, place, distribution in level:
            known = features_of(distribution)
            for child, (token, own) in zip(below[node], choose(distribution, len(below[node])), strict=False):
                made.append((child, len(tokens)))
                tokens.append(token)
                parents.append(place)
                if keep_distributions:
                    distributions.append(own.double())
                features.append(known)
        inner = [(child, place) for child, place in made if child in below]
        if not inner:
            break
        above = [number.get(shape.parents[child], ROOT) for child, _ in inner]
        number.update({child: len(number) + i for i, (child, _) in enumerate(inner)})
        after = expand([tokens[place] for _, place in inner], above)
        level = [(child, place, distribution) for (child, place), distribution in zip(inner, after, strict=True)]
    return Proposal(tokens, parents, torch.stack(distributions) if distributions else None, features)

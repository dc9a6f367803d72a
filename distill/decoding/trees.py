"""Trees of drafted tokens: grown best-first, or drawn in a shape fixed beforehand.

There are two kinds of children. Deterministic ones are the best tokens of the draft's distribution; the choice of nodes
to keep may depend on anything. Sampled ones are drawn from the distribution, in a shape that was fixed before the draw:
a drawn node is never removed, or the draft would no longer follow its distribution. Legend: n nodes, m nodes of one
call, V vocabulary, k children.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distill.decoding.calibration import UNFITTED, Calibration
from distill.decoding.drafters import NOTHING, Asking, distribution_sampler
from distill.decoding.lengths import ROOT, Features, Proposal, best_tokens, children_of, entropies
from distill.decoding.verify import Random, draw_token
from distill.decoding.worth import ExpectedValue, Size
from distill.engines.model import SPARE_NODES, Model
from distill.engines.torch.model import for_sampler
from distill.sampler import Logits, Sampler

# ── Shapes: trees without tokens ──


@dataclass(frozen=True)
class Shape:
    """A tree without tokens: the parent of each node (ROOT or an earlier node)."""

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


class Choices(NamedTuple):
    """What may follow a node: tokens and their chances, best first, and where their drafter finds the node again."""

    tokens: Sequence[int]
    chances: Sequence[float]
    place: Any = ()
    judged: tuple[Features, int] | None = None  # of a draft's: the features of its distribution, and its best token


@dataclass
class Grown:
    """A tree of the nodes of greatest value, best first, of which the first `size.count` are proposed.

    `chances` are their values: the chance that a node and all above it are accepted. Nothing is known of what follows
    the nodes in `unread`.
    """

    size: Size
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)
    known: dict[tuple[int, ...], Choices] = field(default_factory=dict)  # of a draft, by the path before them
    read: dict[tuple[int, ...], int] = field(default_factory=dict)  # nodes that a draft read, by number

    def path(self, node: int) -> tuple[int, ...]:
        """The tokens down to a node."""
        return () if node == ROOT else (*self.path(self.parents[node]), self.tokens[node])

    def proposal(self) -> Proposal:
        """The nodes that are worth verifying."""
        return Proposal(self.tokens[: self.size.count], self.parents[: self.size.count])


# A node that may join the tree, best first: minus its value; its rank and the number of the entry break ties; then its
# parent, the parent's value, and all choices below the parent.
_Entry = tuple[float, int, int, int, float, Choices]


def best_first(
    root: Choices,
    below: Callable[[Any, int], Choices | None],
    nodes: int,
    longest: int,
    size: Size,
    max_leaves: int = sys.maxsize,
) -> Grown:
    """The tree of at most `nodes` nodes, `longest` on a path, with the largest sum of values, or of fewer where no
    other can be worth more.

    `below` gives the choices after a token at a place, None where they are not known yet. The first nodes are always
    the best tree of fewer. Where `max_leaves` binds, the tree is the greedy one, not the best.
    """
    grown, leaves, pool, numbers = Grown(size), Leaves(max_leaves), list[_Entry](), count()

    def offer(rank: int, parent: int, value: float, choices: Choices) -> None:
        if rank < len(choices.tokens):
            heapq.heappush(pool, (-value * choices.chances[rank], rank, next(numbers), parent, value, choices))

    offer(0, ROOT, 1.0, root)
    while pool and len(grown.tokens) < nodes and size.may_rise(len(grown.tokens), -pool[0][0]):
        loss, rank, _, parent, value, among = heapq.heappop(pool)
        offer(rank + 1, parent, value, among)
        if not leaves.take(parent):
            continue
        node, level = len(grown.tokens), 1 if parent == ROOT else grown.depths[parent] + 1
        grown.tokens.append(among.tokens[rank])
        grown.parents.append(parent)
        grown.depths.append(level)
        grown.chances.append(-loss)
        size.add(node + 1, -loss)
        # A node in the last place has no children in the tree: they would come after it.
        if level < longest and node + 1 < nodes and size.may_rise(node + 1, -loss):
            following = below(among.place, among.tokens[rank])
            if following is None:
                grown.unread.append(node)
            else:
                offer(0, node, -loss, following)
    return grown


def draft_tree(
    root: Tensor,
    expand: Expand,
    nodes: int,
    *,
    branching: int = 8,
    longest: int = 16,
    calibration: Calibration = UNFITTED,
    max_leaves: int = sys.maxsize,
    rule: ExpectedValue | None = None,
) -> Grown:
    """The best-first tree of a draft, which is called once a level, and takes some nodes that the tree then leaves out.

    A node's value is the product of its path's probabilities of acceptance: those that the rule, or else `calibration`
    makes of the draft's. `root` [V] is the distribution after the context; children are the `branching` best tokens.
    `max_leaves` bounds the branches of the tree and of the nodes that the draft takes. With a `rule` the tree gets as
    many nodes as are worth verifying, and as many levels as may be worth their steps.
    """
    judge = calibration if rule is None else rule
    (first,) = _choices([()], root[None], branching, judge)
    known: dict[tuple[int, ...], Choices] = {(): first}
    read: dict[tuple[int, ...], int] = {(): ROOT}  # numbers of the nodes that the draft took
    leaves = Leaves(max_leaves, ())

    def below(path: tuple[int, ...], token: int) -> Choices | None:
        return known.get((*path, token))

    while True:
        size = Size(None if rule is None else rule.worth, nodes, by_model=True)
        grown = best_first(first, below, nodes, longest, size, max_leaves)
        unread, paths = grown.unread, {node: grown.path(node) for node in grown.unread}
        if unread and rule is not None:
            unread = unread[: rule.opens(size, grown.chances, unread, grown.depths[unread[0]])]
        if not unread:
            grown.known, grown.read = known, read
            return grown
        taken = [node for node in unread if leaves.take(paths[node][:-1])]
        known |= {paths[node]: Choices([], []) for node in unread if node not in taken}
        if taken:
            above = [read[paths[node][:-1]] for node in taken]
            distributions = expand([grown.tokens[node] for node in taken], above)
            opened = [paths[node] for node in taken]
            known |= zip(opened, _choices(opened, distributions, branching, judge), strict=True)
            read |= {path: len(read) - 1 + number for number, path in enumerate(opened)}


def _choices(
    paths: Sequence[tuple[int, ...]], distributions: Tensor, branching: int, judge: Calibration | ExpectedValue
) -> Iterator[Choices]:
    """The `branching` best tokens after each path, from the draft's distributions [m, V] there."""
    asked = "entropy" in (judge.calibration if isinstance(judge, ExpectedValue) else judge).terms
    every = entropies(distributions).tolist() if asked else [0.0] * len(distributions)
    best = best_tokens(distributions, max(branching, 2))
    for path, entropy, (tokens, found) in zip(paths, every, best, strict=True):
        top, second = (*found[:2], 0.0, 0.0)[:2]
        features = Features(top, second, entropy)
        chances = calibrated(found, features, len(path), judge)
        choices = by_chance(tokens[:branching], chances[:branching], path)
        yield choices._replace(judged=(features, tokens[0])) if tokens else choices


def by_chance(tokens: Sequence[int], chances: Sequence[float], place: Any) -> Choices:
    """Choices in the order of their chances; calibrated ones may be in another."""
    if any(after > before for before, after in pairwise(chances)):
        ranks = sorted(range(len(tokens)), key=lambda rank: -chances[rank])
        tokens, chances = [tokens[rank] for rank in ranks], [chances[rank] for rank in ranks]
    return Choices(tokens, chances, place)


def calibrated(
    chances: Sequence[float], features: Features, position: int, calibration: Calibration | ExpectedValue
) -> list[float]:
    """The probability that each child is accepted, from the draft's probabilities of a node's children, best first.

    A chain's calibration tells that of the best child; the others share the rest as in the distribution.
    """
    if not chances:
        return []
    first = calibration.accept(position, features)
    scale = (1 - first) / (1 - features.top) if features.top < 1 else 0.0
    return [first, *[min(chance * scale, 1.0) for chance in chances[1:]]]


def sampled_tree(shape: Shape, root: Tensor, expand: Expand, random: Random, replacement: bool) -> Proposal:
    """Fill a shape with draws from the draft's distributions, which the proposal holds.

    Without replacement a token is drawn from what the siblings before it left of the distribution, and no more children
    are drawn once no possible token is left: their number depends on the distribution alone, never on the drawn tokens.
    With replacement siblings may be equal. `root` [V] is the distribution after the context.
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
            drawn = _siblings(distribution, len(below[node]), random, replacement)
            for child, (token, own) in zip(below[node], drawn, strict=False):
                made.append((child, len(tokens)))
                tokens.append(token)
                parents.append(place)
                distributions.append(own.double())
        inner = [(child, place) for child, place in made if child in below]
        if not inner:
            break
        above = [number.get(shape.parents[child], ROOT) for child, _ in inner]
        number.update({child: len(number) + i for i, (child, _) in enumerate(inner)})
        after = expand([tokens[place] for _, place in inner], above)
        level = [(child, place, distribution) for (child, place), distribution in zip(inner, after, strict=True)]
    return Proposal(tokens, parents, torch.stack(distributions) if distributions else None)


def _siblings(distribution: Tensor, count: int, random: Random, replacement: bool) -> Iterator[tuple[int, Tensor]]:
    """Tokens drawn below a distribution [V], each with the distribution that it was drawn from."""
    possible = int((distribution > 0).sum())
    for _ in range(min(count, possible) if not replacement or not possible else count):
        token = draw_token(distribution, random)
        yield token, distribution
        if not replacement:
            # Scaled by the mass left, not by 1 − q: that difference can round to 0.
            distribution = distribution.double().clone()
            distribution[token] = 0
            distribution = distribution / distribution.sum().clamp(min=torch.finfo(distribution.dtype).tiny)


def require_tree_sampler(sampler: Sampler, drawn: bool) -> None:
    """Raise ValueError for a sampler under which no tree, or no `drawn` tree, is drafted."""
    if sampler.repetition_penalty != 1:
        raise ValueError("trees are not drafted under a repetition penalty: branches have different histories")
    if drawn and sampler.temperature == 0:
        raise ValueError("a greedy sampler draws nothing: ask for a tree of the best tokens, without widths")


class TreeDrafter(Asking):
    """A model that proposes trees: of the nodes of greatest value, or in a fixed shape.

    Without a `shape` the tree has the `nodes` nodes of greatest value (deterministic children), with a `rule` as many
    of them as are worth drafting and verifying. With a shape, children are drawn from the draft's distribution, without
    replacement where `distinct`.
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
        distinct: bool = False,
        branching: int = 16,
        longest: int = 8,
        calibration: Calibration = UNFITTED,
        rule: ExpectedValue | None = None,
    ) -> None:
        require_tree_sampler(sampler, shape is not None)
        super().__init__(model, rule)
        self.rule: ExpectedValue | None
        self.sampler, self.random, self.nodes = distribution_sampler(sampler), random, nodes
        self.shape, self.distinct = shape, distinct
        self.branching, self.longest, self.calibration = branching, longest, calibration
        self._tree: Grown | None = None  # of the last round, behind this many tokens
        self._length = 0

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a text, see `start`."""
        self._tree = None
        self.start(prompt, self.nodes > 0)

    def size(self, limit: int) -> tuple[Shape | None, int]:
        """The shape and the most nodes of a tree of at most `limit` levels: a shape loses its deeper ones. It is
        settled before any draw; 0 where nothing is drafted."""
        shape = None if self.shape is None else self.shape.within(limit)
        # The target holds a path of limit + 1 nodes and SPARE_NODES beside it; the context's last token is one of them.
        room = limit + SPARE_NODES - 2
        if limit <= 0:
            return None, 0
        if shape is None:
            known = room if self.rule is None else len(self.rule.costs.target) - 1
            return None, min(self.nodes, room, known)
        return shape, len(shape) if len(shape) <= room else 0

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """A tree of at most `limit` levels, of `size`."""
        unread = self.unread(context)
        if self.rule is not None:
            self.rule.behind(unread, limit)
        shape, nodes = self.size(limit)
        if nodes == 0 or not (self.rule is None or (self.rule.limit() > 0 and self.rule.step_on(0))):
            return NOTHING

        def distributions(logits: Logits) -> Tensor:
            return self.sampler.probabilities(for_sampler(logits), place=logits.place, empty=True)

        def expand(tokens: list[int], parents: list[int]) -> Tensor:
            return distributions(self.model.extend(tokens, parents=parents))

        reading = self.catch_up(context)
        fresh = list(context[self.model.lengths[0] :])
        root = distributions(self.model.extend(fresh, want=[len(fresh) - 1]))[0]
        if shape is not None:
            return sampled_tree(shape, root, expand, self.random, not self.distinct).after(reading)
        grown = draft_tree(
            root,
            expand,
            nodes,
            branching=self.branching,
            longest=min(self.longest, limit),
            calibration=self.calibration,
            max_leaves=self.model.max_leaves,
            rule=self.rule,
        )
        self._tree, self._length = grown, len(context)
        return grown.proposal().after(reading)

    def unread(self, context: Sequence[int]) -> int:
        """Tokens of the context that the draft has not read, once it has kept what it read of them in the last tree;
        they judge the draft's best tokens there."""
        if (tree := self._tree) is not None:
            path: tuple[int, ...] = ()
            new, kept = context[self._length :], list[int]()
            for place, token in enumerate(new):
                choices = tree.known.get(path)
                if self.rule is not None and choices is not None and choices.judged is not None:
                    features, best = choices.judged
                    self.rule.judged(place, features, token == best)
                path = (*path, token)
                if path not in tree.read:
                    break
                if place < len(new) - 1:  # the context's last token is read in the next step
                    kept.append(tree.read[path])
            self.model.keep([kept])
            self._tree = None
        return super().unread(context)

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """Let the rule learn. A grown tree stays until the next context tells which of its nodes to keep."""
        if self._tree is None:
            self.model.rollback([min(self.model.lengths[0], length - 1)])
        if self.rule is not None:
            if self._late:
                self.rule.caught_up(self._late)
            self.rule.verified(len(proposal.tokens))
            levels = max(Shape(tuple(proposal.parents)).depths, default=0)
            self.rule.observe(levels, count, (), seconds - self._late)
        self._late = 0.0

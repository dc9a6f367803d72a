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
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distill.decoding.drafters import NOTHING, ModelBackedDrafter, distribution_sampler
from distill.decoding.lengths import Drafting, Fixed, LengthRule
from distill.decoding.proposals import ROOT, Proposal, best_tokens, children_of
from distill.decoding.verify import Random, draw_token
from distill.engines.model import SPARE_NODES, Model
from distill.engines.torch.model import for_sampler
from distill.recipe import Sampler
from distill.sampler import Logits, probabilities_of

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
    """What may follow a node: tokens and their chances, best first, and where their drafter finds the node again.

    `best` is the drafter's best token, `probability` its probability.
    """

    tokens: Sequence[int]
    chances: Sequence[float]
    place: Any = ()
    best: int = -1
    probability: float = 0.0


NO_CHOICES = Choices([], [])


@dataclass
class Grown:
    """A tree of the nodes of greatest chance, best first, of which the first `size` are proposed.

    `chances` are the probabilities that a node and all above it are accepted. Nothing is known of what follows the
    nodes in `unread`.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)
    size: int = 0
    known: dict[tuple[int, ...], Choices] = field(default_factory=dict)  # of a draft, by the path before them
    read: dict[tuple[int, ...], int] = field(default_factory=dict)  # nodes that a draft read, by number

    def path(self, node: int) -> tuple[int, ...]:
        """The tokens down to a node."""
        return () if node == ROOT else (*self.path(self.parents[node]), self.tokens[node])

    def proposal(self) -> Proposal:
        """The nodes that are worth verifying."""
        return Proposal(self.tokens[: self.size], self.parents[: self.size])


# A node that may join the tree, best first: minus its chance; its rank and the number of the entry break ties; then its
# parent, the parent's chance, and all choices below the parent.
_Entry = tuple[float, int, int, int, float, Choices]


def best_first(
    root: Choices,
    below: Callable[[Any, int], Choices | None],
    nodes: int,
    longest: int,
    rule: LengthRule,
    drafting: Drafting,
    max_leaves: int = sys.maxsize,
) -> Grown:
    """The tree of at most `nodes` nodes, `longest` on a path, with the largest sum of chances, or of fewer if the rule
    would not verify more, whatever was found.

    `below` gives the choices after a token at a place, None where they are not known yet. The first nodes are always
    the best tree of fewer. Where `max_leaves` binds, the tree is the greedy one, not the best.
    """
    grown, leaves, pool, numbers = Grown(), Leaves(max_leaves), list[_Entry](), count()

    def offer(rank: int, parent: int, value: float, choices: Choices) -> None:
        if rank < len(choices.tokens):
            heapq.heappush(pool, (-value * choices.chances[rank], rank, next(numbers), parent, value, choices))

    def may_grow(chance: float) -> bool:
        """Whether more nodes would be verified if each had the chance of the next one."""
        size = len(grown.chances)
        hoped = [*grown.chances, *[chance] * (nodes - size)]
        return size < nodes and rule.size(replace(drafting, chances=hoped)) > size

    offer(0, ROOT, 1.0, root)
    while pool and may_grow(-pool[0][0]):
        loss, rank, _, parent, value, among = heapq.heappop(pool)
        offer(rank + 1, parent, value, among)
        if not leaves.take(parent):
            continue
        node, level = len(grown.tokens), 1 if parent == ROOT else grown.depths[parent] + 1
        grown.tokens.append(among.tokens[rank])
        grown.parents.append(parent)
        grown.depths.append(level)
        grown.chances.append(-loss)
        # A node in the last place has no children in the tree: they would come after it.
        if level < longest and may_grow(-loss):
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
    rule: LengthRule,
    drafting: Drafting,
    *,
    branching: int = 8,
    longest: int = 16,
    max_leaves: int = sys.maxsize,
) -> Grown:
    """The best-first tree of a draft, which is called once a level, and takes some nodes that the tree then leaves out.

    A node's chance is the product of its path's probabilities of acceptance, those that the rule makes of the draft's.
    `root` [V] is the distribution after the context; children are the `branching` best tokens. `max_leaves` bounds the
    branches of the tree and of the nodes that the draft takes. The rule decides how many levels are drafted and how
    many nodes verified.
    """
    drafting.most = nodes
    (first,) = _choices([()], root[None], branching, rule)
    known: dict[tuple[int, ...], Choices] = {(): first}
    read: dict[tuple[int, ...], int] = {(): ROOT}  # numbers of the nodes that the draft took
    leaves = Leaves(max_leaves, ())

    def below(path: tuple[int, ...], token: int) -> Choices | None:
        return known.get((*path, token))

    while True:
        grown = best_first(first, below, nodes, longest, rule, drafting, max_leaves)
        drafting.chances, drafting.leaves = grown.chances, grown.unread
        drafting.depth = grown.depths[grown.unread[0]] if grown.unread else 0
        unread = grown.unread[: rule.steps(drafting)] if grown.unread else []
        if not unread:
            grown.size, grown.known, grown.read = rule.size(drafting), known, read
            return grown
        paths = {node: grown.path(node) for node in unread}
        taken = [node for node in unread if leaves.take(paths[node][:-1])]
        known |= {paths[node]: NO_CHOICES for node in unread if node not in taken}
        if taken:
            drafting.steps.append(len(taken))
            above = [read[paths[node][:-1]] for node in taken]
            distributions = expand([grown.tokens[node] for node in taken], above)
            opened = [paths[node] for node in taken]
            known |= zip(opened, _choices(opened, distributions, branching, rule), strict=True)
            read |= {path: len(read) - 1 + number for number, path in enumerate(opened)}


def _choices(
    paths: Sequence[tuple[int, ...]], distributions: Tensor, branching: int, rule: LengthRule
) -> Iterator[Choices]:
    """The `branching` best tokens after each path, from the draft's distributions [m, V] there."""
    for path, (tokens, found) in zip(paths, best_tokens(distributions, branching), strict=True):
        top = found[0] if found else 0.0
        first = rule.chance(len(path), top) if found else 0.0
        # Where the best child is wrong, the draft's other tokens are as likely as in its distribution.
        rest = (1 - first) * sum(found[1:]) / (1 - top) if top < 1 else 0.0
        yield by_chance(tokens, corrected(found, first, min(rest, 1.0)), path, found)


def by_chance(tokens: Sequence[int], chances: Sequence[float], place: Any, probabilities: Sequence[float]) -> Choices:
    """Choices in the order of their chances, which may be another than that of the drafter's `probabilities`."""
    best, probability = (tokens[0], probabilities[0]) if tokens else (-1, 0.0)
    if any(after > before for before, after in pairwise(chances)):
        ranks = sorted(range(len(tokens)), key=lambda rank: -chances[rank])
        tokens, chances = [tokens[rank] for rank in ranks], [chances[rank] for rank in ranks]
    return Choices(tokens, chances, place, best, probability)


def corrected(probabilities: Sequence[float], first: float, rest: float) -> list[float]:
    """The chances of a node's children, from the drafter's probabilities of them, the best child's first.

    `first` is the chance of the best child. The others share the chance `rest` by their probabilities.
    """
    total = sum(probabilities[1:])
    return [first, *[rest * probability / total for probability in probabilities[1:]]] if probabilities else []


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


class TreeDrafter(ModelBackedDrafter):
    """A model that proposes trees: of the nodes of greatest chance, or in a fixed shape.

    Without a `shape` the tree has at most `nodes` nodes of greatest chance (deterministic children), as many of them as
    the rule wants. With a shape, children are drawn from the draft's distribution, without replacement if `distinct`.
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
        rule: LengthRule | None = None,
    ) -> None:
        require_tree_sampler(sampler, shape is not None)
        super().__init__(model, rule or Fixed(nodes))
        self.sampler, self.random, self.nodes = distribution_sampler(sampler), random, nodes
        self.shape, self.distinct, self.branching = shape, distinct, branching
        self._tree: Grown | None = None  # of the last round, behind this many tokens
        self._length = 0
        self._judged: list[tuple[int, float, float]] = []  # of the last round, for the rule

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a text, see `start`."""
        self._tree, self._judged = None, []
        self.start(prompt, self.nodes > 0)

    def room_for(self, limit: int) -> tuple[Shape | None, int]:
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

    def open(self, context: Sequence[int], limit: int) -> Drafting:
        """The round after this context. The draft first keeps what it read of the context in the last tree."""
        self._keep(context)
        drafting = super().open(context, limit)
        drafting.most = max(self.room_for(limit)[1], 0)
        drafting.judged = self._judged
        return drafting

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """A tree of at most `limit` levels, of the `room_for` them."""
        drafting, (shape, nodes) = self.open(context, limit), self.room_for(limit)
        longest = min(self.rule.limit(), limit)
        if nodes == 0 or longest == 0 or not self.rule.steps(drafting):
            return NOTHING

        def distributions(logits: Logits) -> Tensor:
            return probabilities_of(self.sampler, for_sampler(logits), place=logits.place, empty=True)

        def expand(tokens: list[int], parents: list[int]) -> Tensor:
            return distributions(self.model.extend(tokens, parents=parents))

        reading = self.catch_up(context)
        fresh = list(context[self.model.lengths[0] :])
        drafting.steps.append(len(fresh))
        root = distributions(self.model.extend(fresh, want=[len(fresh) - 1]))[0]
        if shape is not None:
            return sampled_tree(shape, root, expand, self.random, not self.distinct).after(reading)
        self._tree = draft_tree(
            root,
            expand,
            nodes,
            self.rule,
            drafting,
            branching=self.branching,
            longest=longest,
            max_leaves=self.model.max_leaves,
        )
        self._length = len(context)
        return self._tree.proposal().after(reading)

    def _keep(self, context: Sequence[int]) -> None:
        """Keep what the draft has read of the context in the last tree, and note if its best tokens were right."""
        if (tree := self._tree) is None:
            return
        path: tuple[int, ...] = ()
        new, kept = context[self._length :], list[int]()
        for place, token in enumerate(new):
            choices = tree.known.get(path)
            if choices is not None and choices.tokens:
                self._judged.append((place, choices.probability, float(token == choices.best)))
            path = (*path, token)
            if path not in tree.read:
                break
            if place < len(new) - 1:  # the context's last token is read in the next step
                kept.append(tree.read[path])
        self.model.keep([kept])
        self._tree = None

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """Let the rule learn. A grown tree stays until the next context tells which of its nodes to keep."""
        if self._tree is None:
            self.model.rollback([min(self.model.lengths[0], length - 1)])
        self.observe(proposal, count, seconds)
        self._judged = []

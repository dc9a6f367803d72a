"""Trees against brute force: best-first growth, the budget, their worth, and how shapes are drawn."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table_model import TableModel

from distill.decoding.costs import Costs
from distill.decoding.drafters import ChainDraft
from distill.decoding.lengths import Adaptive, Drafting, Fixed, LengthRule
from distill.decoding.proposals import ROOT, Proposal, best_tokens, likeliest
from distill.decoding.trees import Grown, Shape, TreeDrafter, corrected, draft_tree, sampled_tree
from distill.decoding.verify import TREES, walk, walk_greedy
from distill.recipe import Sampler

torch.set_num_threads(1)

V = 5


class Draft:
    """A table model after a context, with what `expand` was asked."""

    def __init__(self, seed: int, vocabulary: int = V, sharpness: float = 2.0) -> None:
        self.model = TableModel(vocabulary, seed, memory=2, sharpness=sharpness)
        self.root = self.model.extend([0, 1], want=[1]).full().softmax(-1)[0]
        self.calls: list[tuple[list[int], list[int]]] = []

    def expand(self, tokens: list[int], parents: list[int]) -> torch.Tensor:
        self.calls.append((tokens, parents))
        return self.model.extend(tokens, parents=parents).full().softmax(-1)

    def distribution(self, path: Sequence[int]) -> torch.Tensor:
        """The distribution after the tokens of a path, from the table itself."""
        return self.model.table[self.model.place([0, 1, *path])].softmax(-1)

    def chance(self, path: Sequence[int]) -> float:
        """The product of probabilities down a path."""
        return math.prod(self.distribution(path[:i])[token].item() for i, token in enumerate(path))


def grow(draft: Draft, nodes: int, rule: LengthRule | None = None, longest: int = 16, **settings: int) -> Grown:
    """The tree of a draft after its first step, whole unless a rule sizes it."""
    begun = Drafting(most=nodes, steps=[1])
    return draft_tree(draft.root, draft.expand, nodes, rule or Fixed(longest), begun, longest=longest, **settings)


def paths_of(proposal: Proposal) -> list[tuple[int, ...]]:
    """The tokens from the root down to each node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        found.append((*(found[parent] if parent != ROOT else ()), token))
    return found


def leaves(parents: Sequence[int]) -> int:
    return len(parents) - len(set(parents) - {ROOT})


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 24), st.integers(1, 6), st.integers(1, V), st.sampled_from([0.3, 2.0, 4.0])
)
def test_best_first_takes_the_likeliest_nodes(
    seed: int, nodes: int, longest: int, branching: int, sharpness: float
) -> None:
    """No node that could have been taken is likelier than one that was: no tree of as many nodes accepts more."""
    draft = Draft(seed, sharpness=sharpness)
    options = {"branching": branching, "longest": longest}
    grown = grow(draft, nodes, **options)
    proposal, values = grown.proposal(), grown.chances
    paths = paths_of(proposal)
    assert len(set(paths)) == len(paths) == min(nodes, sum(branching**d for d in range(1, longest + 1)))
    assert values == sorted(values, reverse=True)
    assert values == pytest.approx([draft.chance(path) for path in paths], abs=1e-12)
    inner = [path for path in ((), *paths) if len(path) < longest]
    open_ones = {(*p, token) for p in inner for token in draft.distribution(p).topk(branching).indices.tolist()}
    assert set(paths) <= open_ones
    assert all(draft.chance(path) <= values[-1] + 1e-12 for path in open_ones - set(paths))
    assert len(draft.calls) < longest and proposal.distributions is None
    # A smaller budget is a beginning of a larger one, so that it can be chosen afterwards.
    fewer = Draft(seed, sharpness=sharpness)
    small = grow(fewer, max(1, nodes // 2), **options).proposal()
    size = len(small.tokens)
    assert (proposal.tokens[:size], proposal.parents[:size]) == (small.tokens, small.parents)


class Believing(Fixed):
    """Takes every best token to be accepted with one chance."""

    def __init__(self, chance: float) -> None:
        super().__init__(16)
        self.known = chance

    def chance(self, position: int, probability: float) -> float:
        return self.known


def test_the_rule_says_how_likely_a_best_token_is() -> None:
    """Not the draft's own probability; its other tokens share the rest."""
    grown = grow(Draft(3), 6, Believing(0.999))
    assert grown.proposal().is_chain and grown.chances == pytest.approx([0.999**n for n in range(1, 7)])
    other = Draft(3)
    flat = grow(other, V, Believing(1e-9)).proposal()
    assert flat.tokens[0] == best_tokens(other.root[None], 2)[0][0][1]  # the second best is likelier
    assert flat.parents.count(ROOT) > 1
    assert corrected([0.6, 0.3, 0.1], 0.2, 0.8) == pytest.approx([0.2, 0.6, 0.2])
    assert corrected([1.0], 0.9, 0.0) == [0.9] and corrected([], 0.9, 0.1) == []


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 20), st.integers(1, 6))
def test_best_first_with_few_branches(seed: int, nodes: int, most: int) -> None:
    draft = Draft(seed)
    draft.model.max_leaves = most
    proposal = grow(draft, nodes, branching=3, longest=5, max_leaves=most).proposal()
    assert leaves(proposal.parents) <= most and 1 <= len(proposal.tokens) <= nodes
    asked = [parent for _, parents in draft.calls for parent in parents]
    assert leaves(asked) <= most
    if most == 1:
        assert proposal.is_chain
    free = Draft(seed)
    unlimited = grow(free, nodes, branching=3, longest=5).proposal()
    if leaves(unlimited.parents) <= most and leaves(asked) < most:
        assert proposal == unlimited


FLAT, STEEP = [1 + 0.01 * m for m in range(21)], [1 + 0.4 * m for m in range(21)]
UNEVEN = [1 + 0.3 * (m // 4) for m in range(21)]


def own_probabilities(costs: Costs, longest: int) -> Adaptive:
    """A rule that takes the draft's own probabilities as they are."""
    rule = Adaptive(costs, longest)
    rule.chance = lambda position, probability: probability  # type: ignore[method-assign]
    return rule


@pytest.mark.parametrize("target", [FLAT, STEEP, UNEVEN])
@pytest.mark.parametrize("step", [0.0, 0.1, 0.4, 9.0])
def test_a_tree_is_as_large_as_is_worth_it(target: list[float], step: float) -> None:
    """The number of nodes with the most expected tokens per second, of the likeliest nodes below those that the draft
    read; one step where none can be worth it, nearly the whole tree where steps are free."""
    for seed in range(8):
        draft, read = Draft(seed), [()]
        rule = own_probabilities(Costs(tuple(target), step, step), 5)
        rule._positions[0]._sum = 0.99 * rule._positions[0]._weight  # a good draft: no round is a trial
        grown = grow(draft, 20, rule, 5)
        spent = step + sum(rule.costs.draft_step(len(tokens)) for tokens, _ in draft.calls)
        reached = [1.0, *itertools.accumulate(grown.chances, initial=1.0)][1:]
        rates = [expected / (spent + target[n]) for n, expected in enumerate(reached)]
        assert rates[grown.size] == pytest.approx(max(rates[step == 9.0 :]), abs=1e-12)
        for tokens, parents in draft.calls:
            read += [(*read[parent + 1], token) for token, parent in zip(tokens, parents, strict=True)]
        likeliest_nodes = sorted((draft.chance((*path, token)) for path in read for token in range(V)), reverse=True)
        assert grown.chances == pytest.approx(likeliest_nodes[: len(grown.chances)], abs=1e-9)
        if step == 9.0:
            assert len(draft.calls) <= 4  # a level of sure tokens is worth nine plain ones at most
        if step == 0.0 and target is FLAT:
            full = grow(Draft(seed), 20, longest=5)
            assert sum(grown.chances[: grown.size]) > 0.95 * sum(full.chances)


def test_a_tree_of_one_branch_is_the_chain() -> None:
    """Of the draft's best tokens, as long as the chain is worth it."""
    for seed in range(20):
        draft, rule = Draft(seed, sharpness=4.0), own_probabilities(Costs(tuple(FLAT), 0.1, 0.1), 8)
        found = grow(draft, 8, rule, 8, branching=1).proposal()
        chain, path = ChainDraft(rule, random.random, True, 8, ()), list[int]()
        while chain.goes_on():
            chain.drafting.steps.append(1)
            chain.add_from(draft.distribution(path))
            path = chain.tokens
        assert found.is_chain and found.tokens == chain.tokens[: len(found.tokens)]
        assert len(chain.tokens) - len(found.tokens) <= 1  # the chain keeps what it drafted in hope


def test_best_first_at_temperature_zero_is_a_chain() -> None:
    draft = Draft(1)

    def greedy(distribution: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(distribution.argmax(-1), V).double()

    expand = draft.expand
    draft.root, draft.expand = greedy(draft.root), lambda t, p: greedy(expand(t, p))  # type: ignore[method-assign]
    grown = grow(draft, 7, longest=5)
    assert grown.proposal().is_chain and grown.chances == pytest.approx([1.0] * 5, abs=1e-4)
    assert grow(draft, 0).tokens == []


def test_best_tokens_by_hand() -> None:
    distribution = torch.tensor([0.0, 0.2, 0.4, 0.2, 0.2, 0.0])
    assert [best_tokens(distribution[None], k)[0][0] for k in (1, 2, 3, 4, 6, 9)] == [
        [2],
        [2, 1],
        [2, 1, 3],
        *[[2, 1, 3, 4]] * 3,
    ]
    assert likeliest(torch.tensor([0.0, 0.5, 0.5], dtype=torch.float64)) == (1, 0.5)
    assert likeliest(torch.ones(1)) == (0, 1.0)
    assert likeliest(torch.zeros(3)) == (0, 0.0)  # a draft under a grammar that it cannot follow


def test_shapes_by_hand() -> None:
    wide = Shape.of_widths([2, 3])
    assert wide.parents == (-1, -1, 0, 0, 0, 1, 1, 1) and wide.depths == [1, 1, *[2] * 6] and leaves(wide.parents) == 6
    assert leaves(()) == 0
    for bad in ((0,), (-2,), (-1, 1), (-1, 2, 0)):
        with pytest.raises(AssertionError):
            Shape(bad)


# Filling shapes.


def shapes(draws: random.Random) -> Shape:
    return Shape(tuple(draws.randrange(-1, node) for node in range(draws.randint(1, 12))))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.integers(1, V))
def test_sampled_tree_says_what_it_drew_from(seed: int, replacement: bool, possible: int) -> None:
    draws = random.Random(seed)
    draft, shape = Draft(seed), shapes(draws)

    def cut(distribution: torch.Tensor) -> torch.Tensor:
        kept = torch.where(distribution >= distribution.topk(possible).values[..., -1:], distribution, 0)
        return kept / kept.sum(-1, keepdim=True)

    proposal = sampled_tree(
        shape, cut(draft.root), lambda t, p: cut(draft.expand(t, p)), random.Random(seed).random, replacement
    )
    paths = paths_of(proposal)
    assert proposal.distributions is not None and proposal.distributions.shape == (len(paths), V)
    below = proposal.children()
    for node, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents, strict=True)):
        distribution = cut(draft.distribution(() if parent == ROOT else paths[parent]))
        earlier = [proposal.tokens[child] for child in below[parent] if child < node]
        if not replacement:
            assert token not in earlier
            distribution[earlier] = 0
            distribution /= distribution.sum()
        torch.testing.assert_close(proposal.distributions[node], distribution, rtol=0, atol=1e-12)
        assert proposal.distributions[node][token] > 0
    # Nothing was removed: how many children there are follows from the shape and the distribution alone.
    if replacement or (possible == V and max(Counter(shape.parents).values()) <= V):
        assert len(paths) == len(shape)
    counts = Counter(shape.parents)
    first = len(below.get(ROOT, []))
    assert first == (counts[ROOT] if replacement else min(counts[ROOT], possible))


def test_a_distribution_with_almost_all_mass_on_one_token() -> None:
    """What is left after the sure token is below rounding, and still a distribution over the others."""
    distribution = torch.tensor([1.0, 1e-30, 3e-30], dtype=torch.float32)
    drawn = sampled_tree(Shape.of_widths([3]), distribution, lambda t, p: distribution, random.Random(1).random, False)
    assert drawn.tokens[0] == 0 and sorted(drawn.tokens) == [0, 1, 2]
    assert drawn.distributions is not None
    torch.testing.assert_close(drawn.distributions[1], torch.tensor([0, 0.25, 0.75], dtype=torch.float64))


def test_greedy_walks_need_no_distributions() -> None:
    """Nodes and token are those of `walk` with the greedy verifier; of siblings that are the same, the first counts."""
    draws, lengths = random.Random(1), set()
    for seed in range(200):
        count, vocabulary = draws.randint(0, 12), 3
        proposal = Proposal(
            [draws.randrange(vocabulary) for _ in range(count)], [draws.randrange(-1, node) for node in range(count)]
        )
        logits = torch.randn(count + 1, vocabulary, generator=torch.Generator().manual_seed(seed))
        found = walk_greedy(logits.argmax(-1).tolist(), proposal)
        assert found == walk(TREES["greedy"], logits.softmax(-1), proposal, lambda: 0.0)
        lengths.add(len(found[0]))
    assert max(lengths) > 2


def test_trees_and_penalties_do_not_meet() -> None:
    """Branches have different histories."""
    for shape in (None, Shape((-1, -1))):
        with pytest.raises(ValueError, match="repetition penalty"):
            TreeDrafter(Draft(1).model, Sampler(temperature=0.9).penalised(1.5), random.random, 2, shape=shape)

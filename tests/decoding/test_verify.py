"""Every verifier of trees by enumeration: what comes out of two rounds follows the target's distribution. Those of
chains, with every length rule: test_exact_decoding.py.

Legend: C contexts, D outcomes of drafting, γ drafted, n nodes, V vocabulary. A sequence of l tokens after the prompt is
a number of l digits in base V; the digits of a draft outcome are its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table_model import TableModel
from tables import accepted_counts, digits, distance, target_distributions
from torch import Tensor

from distill.decoding.proposals import Proposal
from distill.decoding.trees import Shape
from distill.decoding.verify import (
    CHAINS,
    HOW_CHOSEN,
    TREES,
    NodeVerifier,
    block,
    draw,
    draw_on_device,
    draw_token,
    greedy,
    inverse_transform,
    match,
    node_token,
    refusal,
    token,
    walk,
)
from distill.recipe import Sampler

torch.set_num_threads(1)

PROMPT = [0, 1]
EXACT, SEEN = 1e-12, 1e-3
GREEDY = [Sampler(temperature=0.0), Sampler(temperature=0.0).penalised(1.6)]
SHAPES = {
    "chain": [-1, 0],
    "fork": [-1, -1],
    "fan": [-1, -1, -1, 0],
    "binary": [-1, -1, 0, 0, 1, 1],
    "comb": [-1, -1, 0, 0, 2],
    "seven": [-1, -1, 0, 0, 1, 2, 2],
}


@dataclass(frozen=True, eq=False)
class World:
    """Distributions [V^l, V] of target and draft after every sequence of l tokens behind the prompt."""

    p: list[Tensor]
    q: list[Tensor]
    vocabulary: int


@cache
def world(vocabulary: int, depth: int, sampler: Sampler, seed: int, noise: float = 1.5, **draft: float) -> World:
    target = TableModel(vocabulary, seed, sharpness=1.5)
    both = (target, sampler), (target.near(noise, seed + 1000), sampler.model_copy(update=draft))
    return World(*(target_distributions(model, own, PROMPT, depth) for model, own in both), vocabulary)


Round = Callable[[int], list[Tensor]]  # start → masses [V^start, V^(i + 1)] of outputs of i + 1 tokens


def tree_round(
    distributions: World,
    parents: Sequence[int],
    verify: NodeVerifier,
    kind: str,
) -> Round:
    """Sum over all draws of a tree's tokens."""
    vocabulary, drafts = distributions.vocabulary, digits(distributions.vocabulary, len(parents))
    below = Proposal([0] * len(parents), list(parents)).children()

    def run(start: int) -> list[Tensor]:
        size, outcomes = vocabulary**start, len(drafts)
        masses: dict[int, Tensor] = {}
        chance = torch.ones(size, outcomes, dtype=torch.float64)
        visits = []

        def visit(node: int, depth: int, context: Tensor, relative: Tensor, reach: Tensor) -> None:
            nonlocal chance
            distribution, nodes = (
                distributions.q[start + depth][context] if node in below else None,
                below.get(node, []),
            )
            left, shown, taken = torch.ones(size, outcomes, dtype=torch.float64), [], []
            for k, child in enumerate(nodes):
                x = drafts[:, child].expand(size, outcomes)
                likely = distribution.gather(-1, x.unsqueeze(-1)).squeeze(-1)
                shown.append(x.masked_fill(likely <= 0.3, -1) if kind == "cut" else x)
                if kind == "deterministic":
                    likely = (distribution.sort(dim=-1, descending=True, stable=True).indices[..., k] == x).double()
                if kind == "distinct":
                    repeated = torch.stack([t == x for t in taken]).any(0) if taken else torch.zeros_like(x).bool()
                    likely = torch.where(repeated, 0, likely / left.masked_fill(left <= 1e-9, 1))
                    left = left - distribution.gather(-1, x.unsqueeze(-1)).squeeze(-1)
                chance = chance * likely
                taken.append(x)
            tokens = torch.stack(shown, -1) if shown else torch.zeros(size, outcomes, 0, dtype=torch.long)
            blind = distribution is None or kind == "deterministic"
            rows = None if blind else distribution.unsqueeze(-2).expand(*tokens.shape, vocabulary)
            verdict = verify(distributions.p[start + depth][context], rows, tokens)
            for k, child in enumerate(nodes):
                x = drafts[:, child]
                here = reach * verdict.acceptance[..., k]
                visit(child, depth + 1, context * vocabulary + x, relative * vocabulary + x, here)
                reach = reach * (1 - verdict.acceptance[..., k])
            visits.append((depth, relative, reach, verdict.residual))

        everywhere = torch.arange(size).unsqueeze(-1).expand(size, outcomes)
        visit(-1, 0, everywhere, torch.zeros(outcomes, dtype=torch.long), torch.ones_like(chance))
        torch.testing.assert_close(chance.sum(-1), torch.ones(size, dtype=torch.float64))
        for depth, relative, reach, residual in visits:
            empty = torch.zeros(size, vocabulary**depth, vocabulary, dtype=torch.float64)
            mass = (chance * reach).unsqueeze(-1) * residual
            masses[depth] = masses.get(depth, empty).index_add(1, relative, mass)
        return [masses[depth].view(size, -1) for depth in sorted(masses)]

    return run


def difference(distributions: World, one_round: Round) -> float:
    """How far the distribution of two rounds' output, continued by the target to a fixed length, is from the
    target's."""
    vocabulary = distributions.vocabulary
    output = [torch.zeros(vocabulary**length, dtype=torch.float64) for length in range(len(distributions.p) + 1)]
    for i, first in enumerate(one_round(0)):
        for j, second in enumerate(one_round(i + 1)):
            output[i + j + 2] += (first.view(-1, 1) * second).flatten()
    return distance(output, distributions.p)


def tree_difference(verifier: NodeVerifier, kind: str, sampler: Sampler, shape: str, seed: int = 1) -> float:
    parents = SHAPES[shape]
    longest = max(Shape(tuple(parents)).depths) + 1  # tokens of a round
    vocabulary = {2: 4, 4: 4, 7: 2}.get(len(parents), 3)
    distributions = world(vocabulary, 2 * longest - 1, sampler, seed)
    return difference(distributions, tree_round(distributions, parents, verifier, kind))


# Lossless pairs, exactly.


TREE_PAIRS = [("token", "sampled"), ("distinct", "distinct"), ("match", "deterministic"), ("token", "deterministic")]
TREE_PAIRS += [("distinct", "deterministic"), ("match", "sampled"), ("match", "distinct"), ("match", "cut")]


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize(("name", "kind"), TREE_PAIRS)
def test_trees_follow_the_target(name: str, kind: str, shape: str) -> None:
    binary = max(SHAPES[shape].count(parent) for parent in SHAPES[shape]) < 3
    if shape == "seven" and kind == "distinct":
        samplers = [Sampler(), Sampler(temperature=0.7).penalised(1.5)]
    elif kind == "distinct":  # siblings can only be distinct where the draft's distribution has room for them
        samplers = [Sampler(), Sampler(temperature=0.7).penalised(1.5)] + [Sampler(temperature=1.2, top_k=2)] * binary
    else:
        samplers = [Sampler(temperature=0.8, top_k=3, top_p=0.9, min_p=0.05).penalised(1.3), Sampler(top_k=2)]
    for sampler in samplers:
        assert tree_difference(TREES[name], kind, sampler, shape) < EXACT


@pytest.mark.parametrize("sampler", GREEDY, ids=str)
@pytest.mark.parametrize("kind", ["sampled", "deterministic"])
@pytest.mark.parametrize("name", list(TREES))
def test_trees_follow_a_greedy_target(name: str, kind: str, sampler: Sampler) -> None:
    for shape in ("fork", "comb"):
        assert tree_difference(TREES[name], kind, sampler, shape) < EXACT


# What is refused: enumeration shows the difference.


def test_refusals_are_those_that_enumeration_shows() -> None:
    for kind in HOW_CHOSEN:
        for name, node in TREES.items():
            found = max(tree_difference(node, kind, Sampler(), shape) for shape in ("fork", "comb"))
            lossless = refusal(name, kind, 1.0, tree=True) is None
            assert found < EXACT if lossless else found > SEEN, (name, kind, found)
    assert refusal("greedy", "sampled", 0.0) is None and refusal("token", "distinct", 1.0) is None
    assert "temperature 0.5" in str(refusal("greedy", "deterministic", 0.5))
    with pytest.raises(ValueError, match="for trees"):
        refusal("block", "sampled", 1.0, tree=True)
    with pytest.raises(ValueError, match="for chains"):
        refusal("distinct", "sampled", 1.0)
    with pytest.raises(AssertionError, match="guessed"):
        refusal("token", "guessed", 1.0)


# What single verdicts must be.


def random_distributions(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(shape, generator=generator, dtype=torch.float64)).softmax(-1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draft_equal_to_target_is_accepted_whole(dtype: torch.dtype) -> None:
    p = random_distributions(1, 2000, 5, 9, dtype=dtype)
    tokens = inverse_transform(p[:, :-1], torch.rand(2000, 4, generator=torch.Generator().manual_seed(2)))
    for verify in (token, block):
        assert bool((verify(p, p[:, :-1], tokens).acceptance == 1).all())
    assert bool((node_token(p[:, 0], p[:, :1], tokens[:, :1]).acceptance == 1).all())
    best = p[:, :-1].argmax(-1)
    assert bool((greedy(p, p[:, :-1], best).acceptance == 1).all())
    assert torch.equal(match(p, None, best).acceptance, p[:, :-1].max(-1).values)


def test_disjoint_supports_accept_nothing() -> None:
    p, q = random_distributions(1, 40, 4, 8), random_distributions(2, 40, 3, 8)
    p[..., 4:] = 0
    q[..., :4] = 0
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    tokens = inverse_transform(q, torch.rand(40, 3, generator=torch.Generator().manual_seed(3)))
    for verify in CHAINS.values():
        verdict = verify(p, q, tokens)
        assert bool((verdict.acceptance == 0).all())
        # Not even with the smallest of uniforms.
        for row in range(40):
            accepted, emitted = draw_on_device(verify(p[row], q[row], tokens[row]), torch.zeros(4))
            assert int(accepted) == 0 and float(p[row, 0, emitted]) > 0
    for node in TREES.values():
        assert bool((node(p[:, 0], q, tokens).acceptance == 0).all())


def test_block_accepts_no_fewer_than_token() -> None:
    """On average over all drafts of three tokens."""
    gains, drafts = [], digits(3, 3)
    for seed in range(60):
        distributions = world(3, 3, Sampler(), seed, noise=2.0)
        place, chance = torch.zeros(27, dtype=torch.long), torch.ones(27, dtype=torch.float64)
        p, q = [distributions.p[0][place]], []
        for i in range(3):
            q.append(distributions.q[i][place])
            chance = chance * q[-1].gather(-1, drafts[:, i : i + 1])[:, 0]
            place = place * 3 + drafts[:, i]
            p.append(distributions.p[i + 1][place])
        counts = [accepted_counts(verify(torch.stack(p, -2), torch.stack(q, -2), drafts)) for verify in (block, token)]
        gains.append(float(chance @ ((counts[0] - counts[1]) @ torch.arange(4.0, dtype=torch.float64))))
    assert min(gains) > -1e-12 and max(gains) > 0.01 and sum(gain > 1e-6 for gain in gains) > 30


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 4), st.sampled_from([torch.float32, torch.float64]))
def test_one_draw_is_a_row_of_many(seed: int, length: int, dtype: torch.dtype) -> None:
    rows, generator = 8, torch.Generator().manual_seed(seed)
    p = random_distributions(seed, rows, length + 1, 6, dtype=dtype)
    q = random_distributions(seed + 1, rows, length, 6, dtype=dtype)
    tokens = inverse_transform(q, torch.rand(rows, length, generator=generator))
    ends = torch.randint(length + 1, (rows, 1), generator=generator)  # rows of different lengths
    tokens = tokens.masked_fill(torch.arange(length) >= ends, -1)
    uniforms = torch.rand(rows, length + 1, generator=generator, dtype=torch.float64)
    for verify in CHAINS.values():
        together = verify(p, q, tokens)
        torch.testing.assert_close(accepted_counts(together).sum(-1), torch.ones(rows, dtype=dtype))
        for row in range(rows):
            alone = verify(p[row], q[row], tokens[row])
            assert torch.equal(alone.acceptance, together.acceptance[row])
            accepted, emitted = (int(number) for number in draw_on_device(alone, uniforms[row]))
            # A chain that stops at its first miss asks for no more numbers.
            used = length if alone.last_hit else min(length, accepted + 1)
            numbers = iter([*uniforms[row, :used].tolist(), float(uniforms[row, -1])])
            assert draw(alone, lambda numbers=numbers: next(numbers)) == (accepted, emitted)
            assert next(numbers, None) is None


def test_a_residual_that_rounds_to_nothing_is_the_target() -> None:
    p = random_distributions(1, 3, 5)
    verdict = token(p, p[:2], torch.tensor([0, 1]))
    assert torch.equal(verdict.residual(0), p[0]) and torch.equal(verdict.residual(2), p[2])
    assert torch.equal(node_token(p[0], p[:1], torch.tensor([2])).residual, p[0])
    sure = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    assert match(sure, None, torch.tensor([1])).residual(0).tolist() == [0, 1]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1e-300, 1e-30, 1e-7, 0.1, 0.3, 1.0, 3.0]), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.1, 0.5, 0.999, 1 - 2.0**-53]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_no_impossible_token(weights: list[float], uniform: float, dtype: torch.dtype) -> None:
    distribution = torch.tensor(weights, dtype=dtype)
    if float(distribution.sum()) == 0:
        distribution[0] = 1
    drawn = draw_token(distribution, lambda: uniform)
    assert distribution[drawn] > 0
    below, total = float(distribution[:drawn].double().sum()), float(distribution.double().sum())
    assert below <= uniform * total * (1 + 1e-12)
    assert uniform * total <= (below + float(distribution[drawn])) * (1 + 1e-12)


def test_the_walk_down_nothing() -> None:
    p = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    assert walk(node_token, p[:1], Proposal([], []), lambda: 0.0) == ([], 1)
    assert walk(TREES["match"], p, Proposal([1], [-1]), lambda: 0.0) == ([0], 2)
    assert walk(TREES["match"], p, Proposal([0], [-1]), lambda: 0.0) == ([], 1)
    assert draw(token(p[:1], None, torch.zeros(0, dtype=torch.long)), lambda: 0.0) == (0, 1)

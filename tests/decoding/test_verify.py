"""Every verifier by enumeration: what comes out of two rounds follows the target's distribution.

Legend: C contexts, D outcomes of drafting, γ drafted, n nodes, V vocabulary. A sequence of l tokens after the prompt is
a number of l digits in base V; the digits of a draft outcome are its tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table_model import TableModel
from tables import accepted_counts, digits, distance, goodness, target_distributions
from torch import Tensor

from distill.decoding.lengths import Proposal
from distill.decoding.verify import (
    CHAINS,
    KINDS,
    TREES,
    ChainVerifier,
    NodeVerdict,
    NodeVerifier,
    Verdict,
    block,
    draw,
    draw_rows,
    draw_token,
    greedy,
    inverse_transform,
    match,
    node_token,
    refusal,
    token,
    walk,
)
from distill.sampler import Sampler

torch.set_num_threads(1)

PROMPT = [0, 1]
EXACT, SEEN = 1e-12, 1e-3
SAMPLERS = [
    Sampler(),
    Sampler(0.6),
    Sampler(top_k=2),
    Sampler(top_p=0.8),
    Sampler(min_p=0.25),
    Sampler(repetition_penalty=1.6),
    Sampler(0.8, 3, 0.9, 0.05, 1.3),
]
GREEDY = [Sampler(0.0), Sampler(0.0, repetition_penalty=1.6)]
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
    both = (target, sampler), (target.near(noise, seed + 1000), replace(sampler, **draft))
    return World(*(target_distributions(model, own, PROMPT, depth) for model, own in both), vocabulary)


Round = Callable[[int], list[Tensor]]  # start → masses [V^start, V^(i + 1)] of outputs of i + 1 tokens


def chain_round(
    distributions: World, length: int, verify: ChainVerifier, kind: str, given_q: list[Tensor] | None = None
) -> Round:
    """Sum over all drafts of γ = `length`. `given_q` are the draft distributions shown to the verifier, where it is
    deceived."""
    drafts = digits(distributions.vocabulary, length)

    def run(start: int) -> list[Tensor]:
        size, outcomes = distributions.vocabulary**start, len(drafts)
        context = torch.arange(size).unsqueeze(-1).expand(size, outcomes)
        p, q, shown, chance = [distributions.p[start][context]], [], [], torch.ones(size, outcomes, dtype=torch.float64)
        alive = torch.ones(size, outcomes, dtype=torch.bool)
        for i in range(length):
            distribution, x = distributions.q[start + i][context], drafts[:, i].expand(size, outcomes)
            q.append(distribution if given_q is None else given_q[start + i][context])
            likely = distribution.gather(-1, x.unsqueeze(-1)).squeeze(-1)
            chance = chance * ((distribution.argmax(-1) == x).double() if kind == "deterministic" else likely)
            if kind == "cut":
                alive = alive & (likely > 0.3)  # the bug: a token that was seen decides whether it is verified
            if kind == "stopped":
                alive = alive & (distribution.max(-1).values > 0.5)  # lossless: decided before the token is drawn
            shown.append(x.masked_fill(~alive, -1))
            context = context * distributions.vocabulary + x
            p.append(distributions.p[start + i + 1][context])
        torch.testing.assert_close(chance.sum(-1), torch.ones(size, dtype=torch.float64))
        drawn_from = None if kind == "deterministic" and given_q is None else torch.stack(q, -2)
        verdict = verify(torch.stack(p, -2), drawn_from, torch.stack(shown, -1))
        counts = chance.unsqueeze(-1) * accepted_counts(verdict)
        masses = []
        for i in range(length + 1):
            mass = counts[..., i, None] * verdict.residual(i)  # [C, D, V]; later digits have no say
            masses.append(
                mass.view(size, distributions.vocabulary**i, -1, distributions.vocabulary).sum(-2).view(size, -1)
            )
        return masses

    return run


def tree_round(
    distributions: World,
    parents: Sequence[int],
    verify: NodeVerifier,
    kind: str,
    given_q: list[Tensor] | None = None,
    memory: int | None = None,
) -> Round:
    """Sum over all draws of a tree's tokens. Contexts that share their last `memory` tokens are worked out once."""
    vocabulary, drafts = distributions.vocabulary, digits(distributions.vocabulary, len(parents))
    below = Proposal([0] * len(parents), list(parents)).children()

    def run(start: int) -> list[Tensor]:
        size, outcomes = vocabulary ** min(start, start if memory is None else memory), len(drafts)
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
            q = distribution if given_q is None or distribution is None else given_q[start + depth][context]
            blind = distribution is None or (kind == "deterministic" and given_q is None)
            tokens = torch.stack(shown, -1) if shown else torch.zeros(size, outcomes, 0, dtype=torch.long)
            rows = None if blind or q is None else q.unsqueeze(-2).expand(*tokens.shape, vocabulary)
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
        return [masses[depth].view(size, -1).repeat(vocabulary**start // size, 1) for depth in sorted(masses)]

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


def chain_difference(verifier: ChainVerifier, kind: str, sampler: Sampler, seed: int = 1, **draft: float) -> float:
    worst = 0.0
    for vocabulary, length in ((3, 3), (4, 2)):
        distributions = world(vocabulary, 2 * length + 1, sampler, seed + length, **draft)
        worst = max(worst, difference(distributions, chain_round(distributions, length, verifier, kind)))
    return worst


def tree_difference(verifier: NodeVerifier, kind: str, sampler: Sampler, shape: str, seed: int = 1) -> float:
    parents = SHAPES[shape]
    depth = len(tree_round(world(2, 4, Sampler(), 0), parents, TREES["match"], "sampled")(0))
    vocabulary = 2 if len(parents) == 7 else 4 if len(parents) == 2 else 3
    distributions = world(vocabulary, 2 * depth - 1, sampler, seed)
    return difference(distributions, tree_round(distributions, parents, verifier, kind))


# Lossless pairs, exactly.


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize("kind", ["sampled", "deterministic", "stopped"])
@pytest.mark.parametrize("name", ["match", "token", "block"])
def test_chains_follow_the_target(name: str, kind: str, sampler: Sampler) -> None:
    assert chain_difference(CHAINS[name], kind, sampler) < EXACT


@pytest.mark.parametrize("sampler", GREEDY, ids=str)
@pytest.mark.parametrize("kind", ["sampled", "deterministic", "cut"])
@pytest.mark.parametrize("name", list(CHAINS))
def test_chains_follow_a_greedy_target(name: str, kind: str, sampler: Sampler) -> None:
    assert chain_difference(CHAINS[name], kind, sampler) < EXACT
    if name in ("greedy", "match"):  # a draft that is not greedy does no harm
        assert chain_difference(CHAINS[name], kind, sampler, temperature=1.0) < EXACT


TREE_PAIRS = [("token", "sampled"), ("distinct", "distinct"), ("match", "deterministic"), ("token", "deterministic")]
TREE_PAIRS += [("distinct", "deterministic"), ("match", "sampled"), ("match", "distinct"), ("match", "cut")]


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize(("name", "kind"), TREE_PAIRS)
def test_trees_follow_the_target(name: str, kind: str, shape: str) -> None:
    binary = max(SHAPES[shape].count(parent) for parent in SHAPES[shape]) < 3
    if shape == "seven" and kind == "distinct":
        samplers = [Sampler(), Sampler(0.7, repetition_penalty=1.5)]
    elif kind == "distinct":  # siblings can only be distinct where the draft's distribution has room for them
        samplers = [Sampler(), Sampler(0.7, repetition_penalty=1.5)] + [Sampler(1.2, top_k=2)] * binary
    else:
        samplers = [Sampler(0.8, 3, 0.9, 0.05, 1.3), Sampler(top_k=2)]
    for sampler in samplers:
        assert tree_difference(TREES[name], kind, sampler, shape) < EXACT


EVERY_DAY = [("token", "sampled"), ("distinct", "distinct"), ("token", "distinct")]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(*pair, marks=[pytest.mark.slow] * (pair not in EVERY_DAY))
        for pair in (*TREE_PAIRS, ("token", "distinct"), ("distinct", "sampled"))
    ],
)
def test_seven_nodes_of_four_tokens(name: str, kind: str) -> None:
    """Where siblings do not exhaust the vocabulary; 4^7 draws of a tree."""
    sampler = Sampler()
    target = TableModel(4, 6, sharpness=1.5)
    distributions = World(
        *(target_distributions(model, sampler, PROMPT, 7) for model in (target, target.near(1.5, 1006))), 4
    )
    found = difference(
        distributions, tree_round(distributions, SHAPES["seven"], TREES[name], kind, memory=target.memory)
    )
    assert found < EXACT if refusal(name, kind, 1.0, tree=True) is None else found > SEEN


@pytest.mark.parametrize("sampler", GREEDY, ids=str)
@pytest.mark.parametrize("kind", ["sampled", "deterministic"])
@pytest.mark.parametrize("name", list(TREES))
def test_trees_follow_a_greedy_target(name: str, kind: str, sampler: Sampler) -> None:
    for shape in ("fork", "comb"):
        assert tree_difference(TREES[name], kind, sampler, shape) < EXACT


# What is refused, and other mistakes: enumeration shows the difference.


def test_refusals_are_those_that_enumeration_shows() -> None:
    for kind in set(KINDS) - {"distinct"}:
        for name, verify in CHAINS.items():
            found = max(chain_difference(verify, kind, Sampler(), seed) for seed in (1, 2))
            assert found < EXACT if refusal(name, kind, 1.0) is None else found > SEEN, (name, kind, found)
    for kind in KINDS:
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


class EmitsTarget(Verdict):
    """Draws from p where the residual should be."""

    def residual(self, accepted: Tensor | int) -> Tensor:
        index = torch.as_tensor(accepted).expand(self.p.shape[:-2])[..., None, None]
        return self.p.take_along_dim(index, -2).squeeze(-2)


class NotRenormalised(Verdict):
    """Draws from (p − q)+ as it is: what is missing to 1 falls on the last token."""

    def residual(self, accepted: Tensor | int) -> Tensor:
        right = super().residual(accepted)
        p = EmitsTarget(**vars(self)).residual(accepted)
        index = torch.as_tensor(accepted).expand(self.p.shape[:-2])
        last = index.clamp(max=self.acceptance.shape[-1] - 1)
        x = self.tokens.take_along_dim(last.unsqueeze(-1), -1)
        q = (
            torch.zeros_like(p).scatter(-1, x, 1)
            if self.q is None
            else self.q.take_along_dim(last[..., None, None], -2).squeeze(-2)
        )
        r = self.scale.take_along_dim(last.unsqueeze(-1), -1)
        excess = (r * p - q).clamp(min=0)
        excess[..., -1] += 1 - excess.sum(-1)
        return torch.where((index == self.acceptance.shape[-1]).unsqueeze(-1), right, excess)


def turned(verify: ChainVerifier, twin: type[Verdict]) -> ChainVerifier:
    return lambda p, q, tokens: twin(**vars(verify(p, q, tokens)))


def stops_at_a_miss(p: Tensor, q: Tensor | None, tokens: Tensor) -> Verdict:
    return replace(block(p, q, tokens), last_hit=False)


def forgets_refusals(p: Tensor, q: Tensor | None, tokens: Tensor) -> NodeVerdict:
    """Every sibling judged by the first p."""
    chances = [node_token(p, q[..., k : k + 1, :], tokens[..., k : k + 1]).acceptance for k in range(tokens.shape[-1])]
    return NodeVerdict(torch.cat([p[..., :0], *chances], -1), node_token(p, q, tokens).residual)


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.8, 3, 0.9, 0.05, 1.3)], ids=str)
def test_mistakes_show(sampler: Sampler) -> None:
    for name in ("token", "block"):
        assert chain_difference(turned(CHAINS[name], EmitsTarget), "sampled", sampler) > SEEN
        assert chain_difference(turned(CHAINS[name], NotRenormalised), "sampled", sampler) > SEEN
        assert chain_difference(CHAINS[name], "cut", sampler) > SEEN
        distributions = world(3, 7, sampler, 1)
        warmer = world(3, 7, sampler, 1, temperature=sampler.temperature * 1.5)
        assert difference(distributions, chain_round(distributions, 3, CHAINS[name], "sampled", warmer.q)) > SEEN
        assert (
            difference(distributions, chain_round(distributions, 3, CHAINS[name], "deterministic", distributions.q))
            > SEEN
        )
    assert chain_difference(turned(match, EmitsTarget), "deterministic", sampler) > SEEN
    assert chain_difference(stops_at_a_miss, "sampled", sampler) > SEEN
    distributions = world(3, 5, sampler, 1)
    warmer = world(3, 5, sampler, 1, temperature=sampler.temperature * 1.5)
    for given_q, kind, verify in (
        (warmer.q, "sampled", node_token),
        (distributions.q, "deterministic", node_token),  # the k best, told to be draws
        (None, "cut", node_token),  # a sampled node removed
        (None, "sampled", forgets_refusals),
    ):
        assert difference(distributions, tree_round(distributions, SHAPES["binary"], verify, kind, given_q)) > SEEN


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
    chances = match(p, None, best).acceptance
    assert torch.equal(chances, p[:, :-1].max(-1).values)
    accepted, _ = draw_rows(match(p, None, best), torch.rand(2000, 5, generator=torch.Generator().manual_seed(3)))
    first = float(chances[:, 0].mean())
    assert abs(float((accepted > 0).double().mean()) - first) < 4 * (first * (1 - first) / 2000) ** 0.5


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
        accepted, emitted = draw_rows(verdict, torch.zeros(40, 4))
        assert bool((accepted == 0).all()) and bool((p[:, 0].gather(-1, emitted.unsqueeze(-1)) > 0).all())
    for node in TREES.values():
        assert bool((node(p[:, 0], q, tokens).acceptance == 0).all())


def test_block_accepts_no_fewer_than_token() -> None:
    gains = []
    for seed in range(60):
        distributions = world(3, 4, Sampler(), seed, noise=2.0)
        means = []
        for verify in (token, block):
            masses = chain_round(distributions, 3, verify, "sampled")(0)
            means.append(sum(i * float(mass.sum()) for i, mass in enumerate(masses)))
        gains.append(means[1] - means[0])
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
        accepted, emitted = draw_rows(together, uniforms)
        for row in range(rows):
            alone = verify(p[row], q[row], tokens[row])
            assert torch.equal(alone.acceptance, together.acceptance[row])
            # A chain that stops at its first miss asks for no more numbers.
            used = length if alone.last_hit else min(length, int(accepted[row]) + 1)
            numbers = iter([*uniforms[row, :used].tolist(), float(uniforms[row, -1])])
            assert draw(alone, lambda numbers=numbers: next(numbers)) == (int(accepted[row]), int(emitted[row]))
            assert next(numbers, None) is None


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 3), st.booleans())
def test_padding_a_row_changes_nothing(seed: int, length: int, sampled: bool) -> None:
    p, q = random_distributions(seed, 5, 6), random_distributions(seed + 1, 4, 6)
    tokens = inverse_transform(q, torch.rand(4, generator=torch.Generator().manual_seed(seed)))
    tokens[length:] = -1
    for verify in CHAINS.values():
        long = verify(p, q if sampled else None, tokens)
        short = verify(p[: length + 1], q[:length] if sampled else None, tokens[:length])
        torch.testing.assert_close(accepted_counts(long)[: length + 1], accepted_counts(short), rtol=1e-12, atol=1e-15)
        assert float(accepted_counts(long)[length + 1 :].sum()) == 0
        for i in range(length + 1):
            if accepted_counts(short)[i] > 1e-9:
                torch.testing.assert_close(long.residual(i), short.residual(i), rtol=1e-9, atol=1e-12)


def test_struck_distributions_may_be_struck_already() -> None:
    p, q = random_distributions(1, 50, 7), random_distributions(2, 50, 7)
    tokens = torch.stack([torch.randperm(7, generator=torch.Generator().manual_seed(i))[:3] for i in range(50)])
    parent = q.unsqueeze(1).repeat(1, 3, 1)
    struck = parent.clone()
    for k in (1, 2):
        struck[:, k] = struck[:, k - 1].scatter(-1, tokens[:, k - 1 : k], 0)
        struck[:, k] /= struck[:, k].sum(-1, keepdim=True)
    ways = [TREES["distinct"](p, parent, tokens), TREES["distinct"](p, struck, tokens), node_token(p, struck, tokens)]
    for way in ways[1:]:
        torch.testing.assert_close(way.acceptance, ways[0].acceptance)
        torch.testing.assert_close(way.residual, ways[0].residual)


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


# The decisions that are drawn from the verdicts; through the decoder: test_samples.py.


@pytest.mark.parametrize(("name", "kind"), [("token", "sampled"), ("distinct", "distinct"), ("match", "deterministic")])
def test_the_walk_is_what_was_enumerated(name: str, kind: str) -> None:
    """`walk` on proposals as a drafter makes them: how often each output of one round comes out."""
    generator = random.Random(3)
    distributions, parents, walks = world(3, 5, Sampler(), 4), SHAPES["comb"], 700
    masses = tree_round(distributions, parents, TREES[name], kind)(0)
    starts = [sum(mass.numel() for mass in masses[:i]) for i in range(len(masses))]
    cells = []
    for _ in range(walks):
        numbers, depths, tokens, rows, left = [0], [0], [], [], {}
        for parent in parents:  # number: the sequence down to a node, as index of its distributions
            q = distributions.q[depths[parent + 1]][numbers[parent + 1]]
            rest = left.get(parent, q)
            tokens.append(int(rest.argmax()) if kind == "deterministic" else draw_token(rest, generator.random))
            if kind != "sampled":
                left[parent] = rest.scatter(-1, torch.tensor([tokens[-1]]), 0)
            rows.append(q)
            numbers.append(numbers[parent + 1] * 3 + tokens[-1])
            depths.append(depths[parent + 1] + 1)
        p = torch.stack([distributions.p[depth][number] for depth, number in zip(depths, numbers, strict=True)])
        proposal = Proposal(tokens, parents, None if kind == "deterministic" else torch.stack(rows))
        path, last = walk(TREES[name], p, proposal, generator.random)
        assert all(parents[node] == above for node, above in zip(path, [-1, *path], strict=False))
        number = numbers[path[-1] + 1] if path else 0
        cells.append(starts[len(path)] + number * 3 + last)
    distribution = torch.cat([mass.flatten() for mass in masses])[None]
    counts = torch.bincount(torch.tensor(cells), minlength=distribution.shape[-1]).double()[None]
    assert goodness(counts, distribution) > 1e-3
    assert goodness(counts, distribution.flip(-1)) < 1e-6


def test_the_walk_down_nothing() -> None:
    p = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    assert walk(node_token, p[:1], Proposal([], []), lambda: 0.0) == ([], 1)
    assert walk(TREES["match"], p, Proposal([1], [-1]), lambda: 0.0) == ([0], 2)
    assert walk(TREES["match"], p, Proposal([0], [-1]), lambda: 0.0) == ([], 1)
    assert draw(token(p[:1], None, torch.zeros(0, dtype=torch.long)), lambda: 0.0) == (0, 1)

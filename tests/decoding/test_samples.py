"""Next tokens sampled through `decode` and `decode_batch` by every drafter, against the target's distribution: χ², V =
50.

The everyday suite takes some hundred tokens of each kind of drafter and verifier; the slow tests take 100 000 of each,
alone and under each sampler chain. A token's distribution hangs on the one before it, so that each is a draw from a
known distribution; a repetition penalty looks at all tokens, so there each text's first two tokens are counted. Legend:
V vocabulary, R rows of distributions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from table_model import TableModel
from tables import TableRows, goodness
from test_exact_decoding import Dropping, Lying, not_renormalised
from test_verify import NotRenormalised, turned

from distill.decoding.batch import decode_batch
from distill.decoding.decode import Decoded, decode
from distill.decoding.drafters import Drafter, FallbackDrafter, LookupDrafter, ModelDrafter
from distill.decoding.lengths import Fixed, LengthRule, ProbabilityFloor, Proposal
from distill.decoding.rules import Rules
from distill.decoding.trees import Shape, TreeDrafter
from distill.decoding.verify import CHAINS, TREES, Random
from distill.sampler import Sampler

torch.set_num_threads(1)

SIZE, CLASSES = 50, 4
FIRST = SIZE - 1  # ends the prompt
TEXT = 250  # tokens of a text, and
ROOM = 40  # how many more it may have: a tree must fit
ROWS = 25
Make = Callable[[TableModel, Sampler, Random], Drafter]
SHAPE, WIDE = Shape((-1, -1, -1, 0, 0, 1)), Shape((-1, -1, -1))


def chain(rule: LengthRule, argmax: bool = False) -> Make:
    return lambda draft, sampler, draws: ModelDrafter(draft, rule, sampler, draws, argmax)


def lookup(length: int, before: Make | None = None) -> Make:
    if before is None:
        return lambda *_: LookupDrafter(length)
    return lambda *given: FallbackDrafter(LookupDrafter(length, 2), before(*given))


def tree(nodes: int, kind: type[TreeDrafter] = TreeDrafter, **settings: Any) -> Make:
    return lambda draft, sampler, draws: kind(draft, sampler, draws, nodes, **settings)


KINDS: dict[str, tuple[str, Make]] = {
    "token": ("token", chain(Fixed(3))),
    "token, floor": ("token", chain(ProbabilityFloor(3, 0.15))),
    "block": ("block", chain(Fixed(3))),
    "match": ("match", chain(Fixed(2))),
    "match, best": ("match", chain(Fixed(2), True)),
    "lookup": ("match", lookup(3)),
    "lookup, token": ("token", lookup(2)),
    "lookup, then draft": ("block", lookup(2, chain(Fixed(2)))),
    "tree of draws": ("token", tree(6, shape=SHAPE)),
    "tree of distinct": ("distinct", tree(6, shape=SHAPE, distinct=True)),
    "tree of the best": ("match", tree(5, branching=3)),
    "static tree": ("token", tree(6, shape=SHAPE, best=True)),
}
BATCHES = {"batch, token": ("token", False), "batch, block": ("block", False), "batch, match": ("match", True)}
SAMPLERS = {
    "top-k": Sampler(0.9, top_k=8),
    "top-p": Sampler(1.2, top_p=0.8),
    "min-p": Sampler(min_p=0.1),
    "penalty": Sampler(0.9, repetition_penalty=1.5),
}
CROSS = [(kind, chain) for kind in [*KINDS, *BATCHES] for chain in SAMPLERS if "tree" not in kind or chain != "penalty"]
WARM = Sampler(0.8)
TESTS = len(CROSS) + len(KINDS) + len(BATCHES)


def pair() -> tuple[TableModel, TableModel]:
    """A target that says 0 after the prompt, for sure; other tokens have one of four distributions after them."""
    target = TableModel(SIZE, 1, memory=1, sharpness=1.5)
    draft = target.near(1.0, 2)
    for model in (target, draft):
        model.table = model.table[torch.arange(SIZE + 1) % CLASSES].clone()
    target.table[FIRST] = -math.inf
    target.table[FIRST, 0] = 0
    target.table[:FIRST, FIRST] = -math.inf  # nor does it come back to the prompt
    return target, draft


def prompt(target: TableModel) -> list[int]:
    """What is likely after 0, so that a lookup finds it again, and then the token that 0 follows for sure."""
    second = int(target.table[0].argmax())
    return [0, second, int(target.table[second].argmax()), FIRST]


@dataclass
class Drafted:
    """What was drafted for some texts."""

    nodes: int = 0
    accepted: int = 0
    branched: int = 0  # proposals in which two nodes have one parent


class Watched:
    """A drafter whose proposals are counted."""

    def __init__(self, drafter: Drafter, drafted: Drafted) -> None:
        self._drafter, self._drafted = drafter, drafted
        self.tree, self.kind = drafter.tree, drafter.kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        made = self._drafter.propose(context, limit, ends)
        self._drafted.nodes += len(made.tokens)
        self._drafted.branched += len(set(made.parents)) < len(made.parents)
        return made

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        self._drafted.accepted += count
        self._drafter.accepted(proposal, count, length, seconds)


Texts = list[list[int]]


def texts(make: Make, verifier: str, sampler: Sampler, count: int, length: int, seed: int) -> tuple[Texts, Drafted]:
    """The first `length` tokens or a few more, but for the prefill's, of so many texts."""
    draws = random.Random(seed).random
    target, draft = pair()
    drafted = Drafted()
    found: Texts = []
    drafter = Watched(make(draft, sampler, draws), drafted)
    rules = Rules(sampler, verifier, random=draws)
    for _ in range(count):
        result = Decoded()
        for _ in decode(target, drafter, prompt(target), length + ROOM, rules, result, lossy=True):
            if len(result.tokens) > length:
                break
        found.append(result.tokens)
    return found, drafted


def batches(verifier: str, argmax: bool, sampler: Sampler, count: int, length: int, seed: int) -> tuple[Texts, Drafted]:
    """The same, ROWS texts at once; each row has random numbers of its own."""
    target, draft = pair()
    rows, drafted = (TableRows(target, ROWS), TableRows(draft, ROWS)), Drafted()
    found: Texts = []
    for batch in range(-(-count // ROWS)):
        draws = [random.Random(f"{seed}/{batch}/{row}").random for row in range(ROWS)]
        rules = Rules(sampler, verifier)
        results = decode_batch(*rows, [prompt(target)] * ROWS, length + 1, rules, 3, draws, argmax)
        for result in results:
            drafted.nodes += sum(r.drafted for r in result.rounds)
            drafted.accepted += sum(r.accepted for r in result.rounds)
            found.append(result.tokens)
    return found, drafted


def p_value(found: Texts, sampler: Sampler) -> float:
    """Of every token of a text but its first, which the prefill said, given what was before it."""
    target, _ = pair()
    if sampler.repetition_penalty == 1:
        counts = torch.zeros(CLASSES, SIZE, dtype=torch.float64)
        for text in found:
            before = torch.tensor(text[:-1]) % CLASSES
            counts.view(-1).index_add_(0, before * SIZE + torch.tensor(text[1:]), torch.ones(len(text) - 1).double())
        return goodness(counts, sampler.probabilities(target.table[:CLASSES]))
    counts = torch.zeros(SIZE, SIZE, dtype=torch.float64)
    for text in found:
        counts[text[1], text[2]] += 1
    before = [*prompt(target), 0]
    first = sampler.probabilities(target.table[:1], [before])
    later = sampler.probabilities(target.table[:SIZE], [[*before, second] for second in range(SIZE)])
    # One test of both: the second token, and the third given it where that one came often.
    often = counts.sum(-1) >= 30
    pair_of = [goodness(counts.sum(-1).unsqueeze(0), first), goodness(counts[often], later[often])]
    return min(1.0, 2 * min(pair_of))


def sampled(kind: str, sampler: Sampler, tokens: int) -> float:
    """p of about so many tokens of a kind."""
    short = sampler.repetition_penalty != 1
    count, length = (tokens // 2, 2) if short else (max(1, tokens // TEXT), min(tokens, TEXT))
    if kind in BATCHES:
        verifier, argmax = BATCHES[kind]
        if not short:
            count, length = max(1, -(-tokens // (ROWS * TEXT))) * ROWS, min(TEXT, tokens // ROWS)
        found, drafted = batches(verifier, argmax, sampler, count, length if not short else 6, len(kind))
    else:
        verifier, make = KINDS[kind]
        found, drafted = texts(make, verifier, sampler, count, length, len(kind))
        assert (drafted.branched > 0.5 * len(found)) == ("tree" in kind)
    least = 0.05 if "lookup" in kind else 0.3  # a lookup that finds nothing drafts nothing
    assert drafted.nodes > least * tokens and drafted.accepted > 0.02 * tokens
    return p_value(found, sampler)


AT_LENGTH = pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])


@pytest.mark.parametrize("kind", [*KINDS, *BATCHES])
@pytest.mark.parametrize("tokens", [800, AT_LENGTH])
def test_every_kind(kind: str, tokens: int) -> None:
    assert sampled(kind, WARM, tokens) > 1e-3 / TESTS


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "chain"), CROSS)
@pytest.mark.parametrize("tokens", [200, AT_LENGTH])
def test_every_kind_under_every_sampler(kind: str, chain: str, tokens: int) -> None:
    assert sampled(kind, SAMPLERS[chain], tokens) > 1e-3 / TESTS


def test_trees_and_penalties_do_not_meet() -> None:
    for _, make in (KINDS[kind] for kind in KINDS if "tree" in kind):
        with pytest.raises(ValueError, match="repetition penalty"):
            make(pair()[1], SAMPLERS["penalty"], random.random)


# What must be rejected, by the same test.


class LyingChain(ModelDrafter):
    """Says that it drew from a flatter distribution."""

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        whole = super().propose(context, limit, ends)
        assert whole.distributions is not None
        flat = whole.distributions**0.6
        return Proposal.chain(whole.tokens, flat / flat.sum(-1, keepdim=True), whole.features)


def lying_chain(*given: Any) -> LyingChain:
    draft, sampler, draws = given
    return LyingChain(draft, Fixed(2), sampler, draws)


DROPPING = chain(ProbabilityFloor(2, 0.0, 0.3, n_min=2))
LOSSY: dict[str, tuple[str, Make]] = {
    "token, drafts dropped": ("token", DROPPING),
    "block, drafts dropped": ("block", DROPPING),
    "token, another q": ("token", lying_chain),
    "block, another q": ("block", lying_chain),
    "tree, a node dropped": ("token", tree(3, Dropping, shape=WIDE)),
    "distinct tree, a node dropped": ("distinct", tree(3, Dropping, shape=WIDE, distinct=True)),
    "tree, another q": ("token", tree(3, Lying, shape=WIDE)),
    "distinct tree, another q": ("distinct", tree(3, Lying, shape=WIDE, distinct=True)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * name.endswith("tree, another q")) for name in LOSSY]
)
def test_lossy_drafts_are_rejected(name: str) -> None:
    verifier, make = LOSSY[name]
    # What a tree drew first is accepted most often, whatever it says it was drawn from.
    count = 30 if "tree, another q" in name else 8
    found, drafted = texts(make, verifier, WARM, count, TEXT, 3)
    assert drafted.nodes > 500 and p_value(found, WARM) < 1e-6


@pytest.mark.parametrize("kind", ["token", "block", "tree of draws"])
def test_residuals_that_are_not_renormalised_are_rejected(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("token", "block"):
        monkeypatch.setitem(CHAINS, name, turned(CHAINS[name], NotRenormalised))
    monkeypatch.setitem(TREES, "token", not_renormalised)
    verifier, make = KINDS[kind]
    found, _ = texts(make, verifier, WARM, 6, TEXT, 3)
    assert p_value(found, WARM) < 1e-6

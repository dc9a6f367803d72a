"""`decode` and `decode_batch` whole, by enumeration: two rounds of every drafter and verifier follow the target's
distribution.

Every run is production code from the prompt on, chance and time apart; a prompt is followed by one token for sure, so
that the prefill's own draw adds no ways. Drawn trees of 7 nodes with V = 4 have too many ways for that: test_verify.py
enumerates their verifiers, test_tree.py how they are drawn. Legend: V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from branches import every
from table_model import TableModel
from tables import TableRows, distance, number, target_distributions
from test_rounds import RECIPE
from torch import Tensor

from distill.decoding import batch as batch_module
from distill.decoding import decode as decode_module
from distill.decoding.batch import decode_batch
from distill.decoding.calibration import Calibration
from distill.decoding.configured import TableDrafter, make_drafter
from distill.decoding.decode import Decoded, decode
from distill.decoding.drafters import Drafter, FallbackDrafter, LookupDrafter, ModelDrafter
from distill.decoding.lengths import ROOT, Fixed, LengthRule, Proposal
from distill.decoding.ngrams import NGramTable, count_ngrams
from distill.decoding.rules import Rules
from distill.decoding.trees import Shape, TreeDrafter
from distill.decoding.verify import TREES, NodeVerdict, Random, _remainder, node_token, refusal
from distill.recipe import Configuration
from distill.sampler import Sampler

torch.set_num_threads(1)

PROMPT = [0, 1]
EXACT, SEEN = 1e-12, 1e-6
TEXT = 40  # new tokens that a run may bring: more than two rounds and their trees need
Make = Callable[[TableModel, Sampler, Random], Drafter]


@pytest.fixture(autouse=True)
def _a_round_takes_one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (decode_module, batch_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=itertools.count().__next__))


def pair(vocabulary: int, seed: int) -> tuple[TableModel, TableModel]:
    """A target that says 1 after the prompt, and a draft like it."""
    target = TableModel(vocabulary, seed, sharpness=1.5)
    draft = target.near(1.2, seed + 1000)
    target.table[target.place(PROMPT)] = -math.inf
    target.table[target.place(PROMPT), 1] = 0
    return target, draft


class Seen:
    """What the runs did, so that a test can ask whether anything was tried at all."""

    def __init__(self) -> None:
        self.drafted, self.accepted = 0, 0

    def add(self, result: Decoded) -> None:
        self.drafted = max(self.drafted, *(r.drafted for r in result.rounds))
        self.accepted = max(self.accepted, *(r.accepted for r in result.rounds))


def output_distribution(target: TableModel, sampler: Sampler, texts: list[tuple[float, list[int]]]) -> float:
    """How far weighted texts are from the target's distribution."""
    longest = max(len(text) for _, text in texts)
    output = [torch.zeros(target.vocabulary_size**length, dtype=torch.float64) for length in range(longest + 1)]
    for weight, text in texts:
        output[len(text)][number(text, target.vocabulary_size)] += weight
    assert abs(float(sum(mass.sum() for mass in output)) - 1) < EXACT
    return distance(output, target_distributions(target, sampler, PROMPT, longest - 1))


def decoded(
    vocabulary: int, make: Make, verifier: str, sampler: Sampler, seed: int = 1, seen: Seen | None = None
) -> float:
    """How far the prefill's token and two rounds of `decode` are from the target's distribution."""
    target, draft = pair(vocabulary, seed)

    def run(random: Random) -> Decoded:
        rules, result = Rules(sampler, verifier, random=random), Decoded()
        rounds = decode(target, make(draft, sampler, random), PROMPT, TEXT, rules, result, lossy=True)
        for _ in itertools.islice(rounds, 3):
            pass
        return result

    results = list(every(run))
    for _, result in results:
        assert len(result.rounds) == 2
        if seen is not None:
            seen.add(result)
    return output_distribution(target, sampler, [(weight, result.tokens) for weight, result in results])


def batched(rule: Callable[[], LengthRule], verifier: str, sampler: Sampler, argmax: bool, rows: int = 1) -> float:
    """The same of `decode_batch`, of the first row; the others draw nothing, because their random numbers are fixed."""
    target, draft = pair(2, 1)

    def run(random: Random) -> list[int]:
        rules = Rules(sampler, verifier)
        randoms = [random, *[lambda: 0.25] * (rows - 1)]
        prompts = [PROMPT, *[[1, 0, 1]] * (rows - 1)]
        some = TableRows(target, rows), TableRows(draft, rows)
        return decode_batch(*some, prompts, 5, rules, rule, randoms, argmax)[0].tokens

    return output_distribution(target, sampler, list(every(run)))


# Chains.


def chains(name: str, argmax: bool) -> Make:
    def make(draft: TableModel, sampler: Sampler, random: Random) -> ModelDrafter:
        rule: Any = RECIPE[name]()
        # Two drafted tokens of two: three would be ten times as many ways.
        rule.length, rule.longest = min(getattr(rule, "length", 2), 2), 2
        return ModelDrafter(draft, rule, sampler, random, argmax)

    return make


@pytest.mark.parametrize("name", RECIPE)
def test_rules(name: str) -> None:
    seen = Seen()
    for verifier, argmax in (("token", False), ("block", False), ("match", True)):
        kind = chains(name, argmax)(TableModel(2), Sampler(), lambda: 0.0).kind
        lossless = refusal(verifier, kind, 1.0) is None
        found = decoded(2, chains(name, argmax), verifier, Sampler(), 1, seen)
        assert found < EXACT if lossless else found > SEEN, (verifier, kind, found)
    assert seen.drafted == 2 == seen.accepted


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_drafts_drawn_from_the_likeliest_tokens(verifier: str) -> None:
    """As llama-server draws them: from the draft's two likeliest of three, whatever else the served sampler does."""
    served = Sampler(0.8, top_p=0.95)

    def make(draft: TableModel, sampler: Sampler, random: Random) -> ModelDrafter:
        drafter = make_drafter(
            Configuration(length=2, sampler="recipe", verifier=verifier, draft_top_k=2), draft, sampler, random
        )
        assert isinstance(drafter, ModelDrafter) and drafter.sampler == Sampler(0.8, top_k=2)
        return drafter

    seen = Seen()
    assert decoded(3, make, verifier, served, 1, seen) < EXACT
    assert seen.drafted == 2 == seen.accepted


@pytest.mark.parametrize(
    ("name", "verifier", "argmax"),
    [
        ("fixed", "token", False),
        ("ratio", "block", False),
        ("p_min", "match", True),
        ("expected-value, fitted", "block", False),
    ],
)
def test_batches(name: str, verifier: str, argmax: bool) -> None:
    """Texts of five tokens: of one row, and of one among two whose lengths differ."""
    maker = chains(name, argmax)

    def rule() -> LengthRule:
        made = maker(TableModel(2), Sampler(), lambda: 0.0)
        assert isinstance(made, ModelDrafter)
        return made.rule

    sampler = Sampler(1.2, repetition_penalty=1.5) if name == "fixed" else Sampler()
    assert batched(rule, verifier, sampler, argmax, rows=1 if name == "expected-value, fitted" else 2) < EXACT


@pytest.mark.parametrize("sampler", [Sampler(0.0), Sampler(1.1, 3), Sampler(1.0, repetition_penalty=1.5)], ids=str)
@pytest.mark.parametrize("verifier", ["greedy", "match", "token", "block"])
def test_lookup_and_lookup_before_a_draft(verifier: str, sampler: Sampler) -> None:
    lookup = LookupDrafter(3)
    # What follows 0 1 is 1: the two tokens that repeat are found.
    for make in (
        lambda draft, sampler, random: lookup,
        lambda draft, sampler, random: FallbackDrafter(
            LookupDrafter(2), ModelDrafter(draft, Fixed(1), sampler, random)
        ),
    ):
        seen = Seen()
        found = decoded(3, make, verifier, sampler, 1, seen)
        lossless = refusal(verifier, make(TableModel(3), sampler, lambda: 0.0).kind, sampler.temperature) is None
        assert found < EXACT if lossless else found > SEEN
        assert seen.drafted > 0


# Trees.

# N-grams of other texts, and of the target's own greedy one.
COUNTED = NGramTable(
    count_ngrams(
        [
            [*PROMPT, *decode_module.plain(pair(4, 3)[0], PROMPT, 12).tokens],
            *([i * i * factor % 7 % 4 for i in range(30)] for factor in range(1, 5)),
        ]
    ),
    {},
)
SEVEN = Shape((-1, -1, 0, 0, 1, 2, 2))


def tree(nodes: int, **settings: Any) -> Make:
    return lambda draft, sampler, random: TreeDrafter(draft, sampler, random, nodes, **settings)


BEST: dict[str, Make] = {
    "best-first": tree(7, branching=3, depth=3),
    "best-first, calibrated": tree(7, branching=3, depth=4, calibration=Calibration(-0.5, (0.4,), ("margin",))),
    "static": tree(7, shape=SEVEN, best=True),
    "table": lambda *_: TableDrafter(COUNTED, 7, 3),
}
FORKS: dict[str, tuple[int, Make]] = {
    "fork of draws": (3, tree(2, shape=Shape((-1, -1)))),
    "fork of distinct": (3, tree(2, shape=Shape((-1, -1)), distinct=True)),
    "two levels of draws": (2, tree(3, shape=Shape((-1, -1, 0)))),
    "two levels of distinct": (2, tree(3, shape=Shape((-1, -1, 0)), distinct=True)),
    "chain of distinct": (3, tree(2, shape=Shape((-1, 0)), distinct=True)),
}


@pytest.mark.parametrize(
    ("name", "verifier", "sampler"),
    [
        ("best-first", "match", Sampler()),
        ("best-first, calibrated", "match", Sampler(0.8, 3, 0.9, 0.05)),
        ("static", "match", Sampler(1.2, min_p=0.1)),
        ("static", "token", Sampler()),
        ("best-first", "distinct", Sampler(1.3, top_p=0.9)),
        ("table", "match", Sampler(0.9, top_p=0.95)),
        ("table", "token", Sampler()),
        ("best-first", "greedy", Sampler()),
        *[
            pytest.param(name, verifier, Sampler(0.0), marks=[pytest.mark.slow] * bool((a + b) % 3))
            for a, name in enumerate(BEST)
            for b, verifier in enumerate(TREES)
        ],
    ],
    ids=str,
)
def test_trees_of_the_best_tokens(name: str, verifier: str, sampler: Sampler) -> None:
    """Seven nodes, V = 4."""
    seen = Seen()
    found = decoded(4, BEST[name], verifier, sampler, 3, seen)
    lossless = refusal(verifier, "deterministic", sampler.temperature, tree=True) is None
    assert found < EXACT if lossless else found > SEEN
    assert seen.drafted == 7 and seen.accepted > 1


@pytest.mark.parametrize("name", FORKS)
def test_trees_of_drawn_tokens(name: str) -> None:
    """Each with the verifier that is made for it."""
    vocabulary, make = FORKS[name]
    verifier = "distinct" if "distinct" in name else "token"
    seen = Seen()
    assert decoded(vocabulary, make, verifier, Sampler(), 4, seen) < EXACT
    assert seen.drafted > 1 and seen.accepted > 0


# What must not pass: trees with a node dropped, told another q, or with a residual that is not scaled up.


class Dropping(TreeDrafter):
    """Removes drawn nodes that its own distribution thought improbable."""

    def propose(self, context: Sequence[int], limit: int, ends: Any) -> Proposal:
        whole = super().propose(context, limit, ends)
        assert whole.distributions is not None and set(whole.parents) == {ROOT}
        stays = [i for i, token in enumerate(whole.tokens) if whole.distributions[i, token] > 0.3]
        return Proposal([whole.tokens[i] for i in stays], [ROOT] * len(stays), whole.distributions[stays])


class Lying(TreeDrafter):
    """Says that it drew from a flatter distribution."""

    def propose(self, context: Sequence[int], limit: int, ends: Any) -> Proposal:
        whole = super().propose(context, limit, ends)
        assert whole.distributions is not None
        flat = whole.distributions**0.7
        return Proposal(whole.tokens, whole.parents, flat / flat.sum(-1, keepdim=True))


def not_renormalised(p: Tensor, q: Tensor | None, tokens: Tensor) -> NodeVerdict:
    """(p − q)+ as it is for the siblings that come after; what a draw is made from scales itself."""
    chances, whole = [], p
    for k in range(tokens.shape[-1]):
        own = torch.nn.functional.one_hot(tokens[..., k], p.shape[-1]).to(p) if q is None else q[..., k, :]
        chances.append(node_token(p, own.unsqueeze(-2), tokens[..., k : k + 1]).acceptance)
        p = (p - own).clamp(min=0)
    return NodeVerdict(torch.cat([p[..., :0], *chances], -1), _remainder(p, torch.zeros_like(p), whole))


@pytest.mark.slow
def test_mistakes_in_trees_show(monkeypatch: pytest.MonkeyPatch) -> None:
    fork = Shape((-1, -1))
    assert decoded(3, lambda *given: Dropping(*given, 2, shape=fork), "token", Sampler(), 4) > SEEN
    assert decoded(3, lambda *given: Lying(*given, 2, shape=fork, distinct=True), "distinct", Sampler(), 4) > SEEN
    monkeypatch.setitem(TREES, "token", not_renormalised)
    assert decoded(3, FORKS["fork of draws"][1], "token", Sampler(), 4) > SEEN

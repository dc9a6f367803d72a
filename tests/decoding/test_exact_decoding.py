"""`decode` and `at_once` whole, by enumeration: two rounds of every drafter and verifier follow the target's
distribution.

Every run is production code from the prompt on, chance and time apart; a prompt is followed by one token for sure, so
that the prefill's own draw adds no ways. Drawn trees of 7 nodes with V = 4 have too many ways for that: test_verify.py
enumerates their verifiers, test_tree.py how they are drawn. Legend: V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from branches import every
from static_table import StaticTable, every_draw
from table_model import TableModel
from tables import TableRows, distance, number, target_distributions
from toys import decode_at_once

from distill.decoding import decode as decode_module
from distill.decoding.configured import DrafterInputs, make_rule
from distill.decoding.costs import Costs
from distill.decoding.decode import Decoded, decode
from distill.decoding.drafters import Drafter, FallbackDrafter, LookupDrafter, ModelDrafter
from distill.decoding.lengths import AcceptedRatio, Adaptive, BetaFilter, Fixed, LengthRule
from distill.decoding.ngrams import NGramTable, count_ngrams
from distill.decoding.rules import Rules
from distill.decoding.table_drafter import TableDrafter
from distill.decoding.trees import Shape, TreeDrafter
from distill.decoding.verify import CHAINS, TREES, Random, refusal
from distill.recipe import Configuration, Sampler
from distill.recipe.configuration import RULES

torch.set_num_threads(1)

PROMPT = [0, 1]
EXACT, SEEN = 1e-12, 1e-6
COSTS = Costs((1.0, 1.15, 1.3, 1.4), 0.08, 0.12)
FLAT = Costs(tuple(1 + m / 100 for m in range(9)), 0.01, 0.01)  # all nodes of a tree are worth verifying
TRUNCATED, PENALTY = Sampler(temperature=0.8, top_k=3, top_p=0.9, min_p=0.05), Sampler(temperature=1.1).penalised(1.6)
TEXT = 40  # new tokens that a run may bring: more than two rounds and their trees need
Make = Callable[[Any, Sampler, Random], Drafter]


@pytest.fixture(autouse=True)
def _a_round_takes_one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_module, "time", SimpleNamespace(perf_counter=itertools.count().__next__))


def pair(vocabulary: int, seed: int) -> tuple[TableModel, TableModel]:
    """A target that says 1 after the prompt, and a draft like it."""
    target = TableModel(vocabulary, seed, sharpness=1.5)
    draft = target.near(1.2, seed + 1000)
    target.table[target.place(PROMPT)] = -math.inf
    target.table[target.place(PROMPT), 1] = 0
    return target, draft


def output_distribution(target: TableModel, sampler: Sampler, texts: list[tuple[float, list[int]]]) -> float:
    """How far weighted texts are from the target's distribution."""
    longest = max(len(text) for _, text in texts)
    output = [torch.zeros(target.vocabulary_size**length, dtype=torch.float64) for length in range(longest + 1)]
    for weight, text in texts:
        output[len(text)][number(text, target.vocabulary_size)] += weight
    assert abs(float(sum(mass.sum() for mass in output)) - 1) < EXACT
    return distance(output, target_distributions(target, sampler, PROMPT, longest - 1))


def decoded(
    vocabulary: int,
    make: Make,
    verifier: str,
    sampler: Sampler,
    seed: int = 1,
    rounds: int = 2,
    on_device: bool = False,
) -> tuple[float, int, int]:
    """How far the prefill's token and some rounds of `decode` are from the target's distribution; the most tokens that
    a round drafted, and accepted."""
    target, draft = pair(vocabulary, seed)

    def run(random: Random) -> Decoded:
        rules, result = Rules(sampler, verifier, random=random), Decoded()
        models = (StaticTable(target), StaticTable(draft)) if on_device else (target, draft)
        with every_draw(random.__self__) if on_device else nullcontext():  # type: ignore[attr-defined]
            played = decode(models[0], make(models[1], sampler, random), PROMPT, TEXT, rules, result)
            for _ in itertools.islice(played, rounds + 1):
                pass
        return result

    results = list(every(run))
    assert all(len(result.rounds) == rounds for _, result in results)
    played = [one for _, result in results for one in result.rounds]
    found = output_distribution(target, sampler, [(weight, result.tokens) for weight, result in results])
    return found, max(one.drafted for one in played), max(one.accepted for one in played)


def batched(
    rule: int | Callable[[], LengthRule],
    verifier: str,
    sampler: Sampler,
    argmax: bool = False,
    rows: int = 1,
) -> float:
    """The same of `at_once`, of the first row; the others draw nothing, because their random numbers are fixed."""
    target, draft = pair(2, 1)

    def run(random: Random) -> list[int]:
        randoms = [random, *[lambda: 0.25] * (rows - 1)]
        prompts = [PROMPT, *[[1, 0, 1]] * (rows - 1)]
        some, rules = (TableRows(target, rows), TableRows(draft, rows)), Rules(sampler, verifier)
        return decode_at_once(*some, prompts, 4, rules, rule, randoms, argmax)[0].tokens

    return output_distribution(target, sampler, list(every(run)))


# Chains.


def named(rule: str, **settings: Any) -> Callable[[], LengthRule]:
    """A rule as a recipe names it, drafting up to 3 tokens."""
    configuration = Configuration(rule=rule, length=3, **settings)
    return lambda: make_rule(configuration, DrafterInputs(COSTS))


RECIPE: dict[str, Callable[[], LengthRule]] = {
    "fixed": named("fixed"),
    "p_min": named("p_min", p_min=0.45),
    "p_min, n_min": named("p_min", p_min=0.7, n_min=2),
    "start-continue": named("start-continue", start=0.4, more=0.5),
    "ratio": named("ratio"),
    "beta": named("beta"),
    "beta, start": named("beta", start=0.6, floor=0.2),
    "expected-value": named("expected-value"),
}


def forgetting() -> LengthRule:
    """An adaptive rule whose estimates begin with little weight, so that one judged token changes the next round."""
    rule = Adaptive(COSTS, 3)
    for mean in (*rule._positions, *rule._confidences):
        mean._sum, mean._weight = 0.3 * mean.value, 0.3
    return rule


# Rules that learn so fast that the second round shows it, and what no recipe names.
EAGER: dict[str, Callable[[], LengthRule]] = {
    "ratio, forgetting": lambda: AcceptedRatio(2, 0.3, 0.1, 0.1, 1, 3),
    "beta, forgetting": lambda: BetaFilter(3, 0.35, 4, 0.5, 0.2),
    "expected-value, forgetting": forgetting,
}


def test_no_rule_of_a_recipe_is_forgotten() -> None:
    assert {name.split(",")[0] for name in RECIPE} == set(RULES)


def short(name: str, longest: int = 2) -> LengthRule:
    """Of two drafted tokens: three would be ten times as many ways."""
    rule: Any = (RECIPE | EAGER)[name]()
    rule.length, rule.longest = min(getattr(rule, "length", longest), longest), longest
    return rule


def chains(name: str, argmax: bool, longest: int = 2) -> Make:
    return lambda draft, sampler, random: ModelDrafter(draft, short(name, longest), sampler, random, argmax)


def kind_of(drafter: Drafter) -> str:
    """How a drafter of chains makes its tokens."""
    model = drafter.second if isinstance(drafter, FallbackDrafter) else drafter
    if not isinstance(model, ModelDrafter) or model.argmax:
        return "deterministic"
    return "cut" if model.rule.n_min > 1 else "sampled"


def check_chains(name: str, argmax: bool, verifier: str, sampler: Sampler, *size: int) -> tuple[int, int]:
    """A pair that is refused shows in two rounds; `size`: V, γ, rounds. The most drafted and accepted tokens."""
    vocabulary, longest, rounds = size
    make = chains(name, argmax, longest)
    kind = kind_of(make(TableModel(2), sampler, lambda: 0.0))
    found, *counts = decoded(vocabulary, make, verifier, sampler, rounds=rounds)
    lossless = refusal(verifier, kind, sampler.temperature) is None
    assert found < EXACT if lossless else rounds == 1 or found > SEEN, (verifier, kind, sampler, found)
    return counts[0], counts[1]


@pytest.mark.parametrize("name", (*RECIPE, *EAGER))
def test_rules(name: str) -> None:
    """Two rounds, so that what a rule learns from the first shows in the second; and one of longer drafts."""
    ways = (("token", False), ("block", False), ("match", True), ("greedy", True))
    assert (2, 2) in {check_chains(name, argmax, verifier, Sampler(), 2, 2, 2) for verifier, argmax in ways}
    for verifier in CHAINS:
        check_chains(name, True, verifier, Sampler(temperature=0.0), 4, 3, 3)
    for verifier, sampler in itertools.product(("token", "block"), (TRUNCATED, PENALTY)):
        check_chains(name, False, verifier, sampler, 3, 3, 1)


@pytest.mark.parametrize(
    ("name", "verifier", "argmax", "sampler", "rows"),
    [
        ("fixed", "token", False, Sampler(temperature=1.2).penalised(1.5), 2),
        ("ratio", "block", False, Sampler(), 2),
        ("p_min", "match", True, Sampler(), 2),
        ("expected-value", "block", False, Sampler(), 1),
    ],
)
def test_batches(name: str, verifier: str, argmax: bool, sampler: Sampler, rows: int) -> None:
    """Texts of four tokens: of one row, and of one among two whose lengths differ."""
    assert batched(lambda: short(name), verifier, sampler, argmax, rows) < EXACT


@pytest.mark.parametrize(
    "sampler",
    [Sampler(temperature=0.0), Sampler(temperature=1.1, top_k=3), Sampler(temperature=1.0).penalised(1.5)],
    ids=str,
)
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
        found, drafted, _ = decoded(3, make, verifier, sampler)
        lossless = refusal(verifier, kind_of(make(TableModel(3), sampler, lambda: 0.0)), sampler.temperature) is None
        assert drafted and (found < EXACT if lossless else found > SEEN)


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


def tree(nodes: int, **settings: Any) -> Make:
    return lambda draft, sampler, random: TreeDrafter(draft, sampler, random, nodes, **settings)


BEST: dict[str, Make] = {
    "best-first": tree(7, branching=3, rule=Fixed(3)),
    "best-first, adaptive": lambda *given: tree(7, branching=3, rule=Adaptive(FLAT, 4))(*given),  # one that is new
    "table": lambda *_: TableDrafter(COUNTED, 7, 3),
}
FORKS: dict[str, tuple[int, Make]] = {
    "fork of draws": (3, tree(2, shape=Shape((-1, -1)))),
    "fork of distinct": (3, tree(2, shape=Shape((-1, -1)), distinct=True)),
    "two levels of draws": (2, tree(3, shape=Shape((-1, -1, 0)))),
    "two levels of distinct": (2, tree(3, shape=Shape((-1, -1, 0)), distinct=True)),
    "chain of distinct": (2, tree(2, shape=Shape((-1, 0)), distinct=True)),
}


@pytest.mark.parametrize(
    ("name", "verifier", "sampler"),
    [
        ("best-first", "match", Sampler()),
        ("best-first, adaptive", "match", Sampler(temperature=0.8, top_k=3, top_p=0.9, min_p=0.05)),
        ("best-first", "token", Sampler(temperature=1.2, min_p=0.1)),
        ("best-first", "distinct", Sampler(temperature=1.3, top_p=0.9)),
        ("table", "match", Sampler(temperature=0.9, top_p=0.95)),
        ("table", "token", Sampler()),
        ("best-first", "greedy", Sampler()),
        *((name, verifier, Sampler(temperature=0.0)) for name in BEST for verifier in TREES),
    ],
    ids=str,
)
def test_trees_of_the_best_tokens(name: str, verifier: str, sampler: Sampler) -> None:
    """Seven nodes, V = 4."""
    found, drafted, accepted = decoded(4, BEST[name], verifier, sampler, 3)
    lossless = refusal(verifier, "deterministic", sampler.temperature, tree=True) is None
    assert found < EXACT if lossless else found > SEEN
    assert drafted == 7 and accepted > 1


PAIRS = [(name, "distinct" if "distinct" in name else "token") for name in FORKS]


@pytest.mark.parametrize(("name", "verifier"), PAIRS)
def test_trees_of_drawn_tokens(name: str, verifier: str) -> None:
    vocabulary, make = FORKS[name]
    found, drafted, accepted = decoded(vocabulary, make, verifier, Sampler(), 4)
    assert found < EXACT and drafted > 1 and accepted > 0


def test_mistakes_in_trees_show() -> None:
    assert decoded(3, FORKS["fork of draws"][1], "distinct", Sampler(), 4, rounds=1)[0] > SEEN

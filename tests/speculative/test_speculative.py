"""The decoding loop with every drafter and lossless verifier: greedy texts are plain texts, sampled follow the
distribution."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch
from table_model import TableModel
from toys import blurred, random_prompts, toy

from distill.errors import DataError
from distill.models.torch_logits import TorchLogits
from distill.models.torch_model import TorchModel
from distill.sampler import Sampler
from distill.speculative.costs.curve import StepCosts
from distill.speculative.decode import Decoded, decode, decode_text, plain
from distill.speculative.draft import Drafter, FirstThen, ModelDrafter
from distill.speculative.lengths import Fixed, LossyProbabilityFloor, ProbabilityFloor
from distill.speculative.lookup import LookupDrafter, LookupPrice, SuffixIndex
from distill.speculative.rules import Rules
from distill.speculative.trees.shape import Shape
from distill.speculative.trees.tree_drafter import TreeDrafter
from distill.speculative.verify import Random

torch.set_num_threads(1)
V = 4
SHAPE, CHAIN = Shape.of_widths([2, 2]), Shape.of_widths([1, 1])
SAMPLES = 1200


def text(target: TableModel, drafter: Drafter, rules: Rules, limit: int, lossy: bool = False) -> tuple[int, ...]:
    result = decode_text(target, drafter, [1, 2], limit, rules, lossy)
    return tuple(result.tokens)


def beginning(target: TableModel, drafter: Drafter, rules: Rules, length: int) -> tuple[tuple[int, ...], int]:
    """The first `length` tokens of a text with room for whole drafts, and how many nodes were drafted."""
    result = Decoded()
    for _ in decode(target, drafter, [1, 2], length + 12, rules, result):
        if len(result.tokens) >= length:
            break
    return tuple(result.tokens[:length]), sum(one.drafted for one in result.rounds)


def exact_distribution(target: TableModel, sampler: Sampler, length: int) -> dict[tuple[int, ...], float]:
    """The distribution of the first `length` tokens, by walking every text through the target alone."""
    found = {}
    for tokens in itertools.product(range(V), repeat=length):
        chance = 1.0
        for i in range(length):
            target.rollback([0])
            history = [1, 2, *tokens[:i]]
            distribution = sampler.probabilities(target.extend(history, want=[len(history) - 1]).full(), [history])[0]
            chance *= float(distribution[tokens[i]])
        found[tokens] = chance
    return found


def p_value(counts: Counter[tuple[int, ...]], distribution: dict[tuple[int, ...], float]) -> float:
    """χ² of counts against the distribution, cells with an expectation below 5 pooled; impossible texts count as −1."""
    total = sum(counts.values())
    if any(distribution[tokens] == 0 for tokens in counts):
        return -1.0
    cells: list[tuple[float, float]] = []
    rest = [0.0, 0.0]
    for tokens, chance in distribution.items():
        pair = (float(counts[tokens]), chance * total)
        if pair[1] >= 5:
            cells.append(pair)
        else:
            rest = [rest[0] + pair[0], rest[1] + pair[1]]
    if rest[1] >= 1:
        cells.append((rest[0], rest[1]))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    half = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, torch.tensor(statistic / 2, dtype=torch.float64)))


Make = Callable[[TableModel, Sampler, Random], Drafter]
CASES: dict[str, tuple[str, Make]] = {
    "token": ("token", lambda draft, sampler, draws: ModelDrafter(draft, Fixed(3), sampler, draws)),
    "block": ("block", lambda draft, sampler, draws: ModelDrafter(draft, Fixed(3), sampler, draws)),
    "match, argmax": (
        "match",
        lambda draft, sampler, draws: ModelDrafter(draft, Fixed(3), sampler, draws, argmax=True),
    ),
    "match, sampled": ("match", lambda draft, sampler, draws: ModelDrafter(draft, Fixed(2), sampler, draws)),
    "token, floor before the draw": (
        "token",
        lambda draft, sampler, draws: ModelDrafter(draft, ProbabilityFloor(3, 0.4), sampler, draws),
    ),
    "lookup": ("match", lambda draft, sampler, draws: LookupDrafter(3)),
    "lookup, then token": (
        "token",
        lambda draft, sampler, draws: FirstThen(LookupDrafter(2, 2), ModelDrafter(draft, Fixed(2), sampler, draws)),
    ),
    "tree of the best": ("match", lambda draft, sampler, draws: TreeDrafter(draft, sampler, draws, 5, branching=2)),
    "tree with replacement": (
        "token",
        lambda draft, sampler, draws: TreeDrafter(draft, sampler, draws, 6, shape=SHAPE),
    ),
    "tree without replacement": (
        "distinct",
        lambda draft, sampler, draws: TreeDrafter(draft, sampler, draws, 6, shape=SHAPE, distinct=True),
    ),
    "chain without replacement": (
        "distinct",
        lambda draft, sampler, draws: TreeDrafter(draft, sampler, draws, 2, shape=CHAIN, distinct=True),
    ),
}
CHAINED = ("chain without replacement",)


class Treeless(TableModel):
    """A target that takes chains alone, as one with a sliding window does."""

    max_leaves = 0

    def extend(self, *given: Any, parents: Sequence[int] | None = None, **named: Any) -> TorchLogits:
        if parents is not None:
            raise ValueError("no trees")
        return super().extend(*given, **named)


SAMPLERS = {
    "temperature": Sampler(0.9),
    "truncated": Sampler(1.2, top_k=3, top_p=0.9),
    "penalty": Sampler(1.0, repetition_penalty=1.5),
}


# All drafters under one sampler, and those whose code differs under the others.
SAMPLED = [
    *[(case, "temperature") for case in CASES],
    *[(case, "truncated") for case in ("token", "block", "tree without replacement")],
    *[(case, "penalty") for case in ("token", "lookup, then token")],
]
# The rounds themselves are enumerated every day (test_verify.py, test_rounds.py, test_exact_decoding.py).
EVERY_DAY = [
    pytest.param(*pair, marks=[pytest.mark.slow] * (pair != ("tree without replacement", "truncated")))
    for pair in SAMPLED
]


@pytest.mark.parametrize(("case", "sampler"), EVERY_DAY)
def test_samples_follow_the_distribution(case: str, sampler: str) -> None:
    verifier, make = CASES[case]
    served = SAMPLERS[sampler]
    draws = random.Random(f"{case}/{sampler}").random
    target, draft = (Treeless if case in CHAINED else TableModel)(V, 11), TableModel(V, 12)
    drafter = make(draft, served, draws)
    rules = Rules(served, verifier, random=draws)
    found = [beginning(target, drafter, rules, 3) for _ in range(SAMPLES)]
    assert p_value(Counter(tokens for tokens, _ in found), exact_distribution(target, served, 3)) > 1e-3 / 30
    assert sum(drafted for _, drafted in found) > SAMPLES * (0.1 if case == "lookup" else 1)


def test_a_token_dropped_after_its_draw_is_refused() -> None:
    """What it would do to the distribution: test_samples.py and test_exact_decoding.py."""
    served, target, draft = Sampler(1.0), TableModel(V, 11), TableModel(V, 12)
    drafter = ModelDrafter(draft, LossyProbabilityFloor(3, 0.3), served, random.random)
    with pytest.raises(DataError, match="dropped after the draw"):
        text(target, drafter, Rules(served, "token"), 3)
    assert len(text(target, drafter, Rules(served, "token", random=random.random), 3, lossy=True)) == 3


@pytest.mark.slow
def test_a_token_dropped_after_its_draw_changes_the_distribution() -> None:
    """The lossy twin is seen by the test above when it is asked for."""
    served, draws = Sampler(1.0), random.Random(3).random
    target, draft = TableModel(V, 11), TableModel(V, 12)
    drafter = ModelDrafter(draft, LossyProbabilityFloor(3, 0.3), served, draws)
    rules = Rules(served, "token", random=draws)
    counts = Counter(text(target, drafter, rules, 3, lossy=True) for _ in range(3 * SAMPLES))
    assert p_value(counts, exact_distribution(target, served, 3)) < 1e-6


def test_pairs_that_cannot_be() -> None:
    target, draft = TableModel(V, 1), TableModel(V, 2)
    sampled = ModelDrafter(draft, Fixed(2), Sampler(1.0), random.random)
    with pytest.raises(DataError, match="greedy emits"):
        text(target, sampled, Rules(Sampler(1.0), "greedy"), 3)
    with pytest.raises(ValueError, match="no verifier"):
        text(target, sampled, Rules(Sampler(1.0), "distinct"), 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda draft: ModelDrafter(draft, Fixed(4), Sampler(0), random.random),
        lambda draft: ModelDrafter(draft, ProbabilityFloor(6, 0.3), Sampler(0), random.random),
        lambda draft: LookupDrafter(),
        lambda draft: FirstThen(LookupDrafter(), ModelDrafter(draft, Fixed(3), Sampler(0), random.random)),
        lambda draft: TreeDrafter(draft, Sampler(0), random.random, 7, branching=3),
    ],
)
def test_greedy_text_is_the_targets(make: Callable[[TorchModel], Drafter]) -> None:
    hugging_face = toy(vocabulary=61, seed=3)
    target, drafter = TorchModel(hugging_face), make(TorchModel(blurred(hugging_face, 1, 0.1)))
    accepted = 0
    for prompt in random_prompts(5, 61, seed=4):
        # The prompt twice, so that there is something to look up.
        wanted = plain(target, prompt * 2, 30).tokens
        result = decode_text(target, drafter, prompt * 2, 30, Rules())
        assert result.tokens == wanted
        assert sum(r.accepted for r in result.rounds) == sum(result.from_draft)
        accepted += sum(result.from_draft)
    assert accepted > 0


def test_the_target_as_its_own_draft() -> None:
    """Everything is accepted under greedy, token and block; under match a position with p(argmax)."""
    for verifier, argmax in (("token", False), ("block", False), ("match", True)):
        draws = random.Random(0).random
        target, draft = TableModel(V, 5), TableModel(V, 5)
        rules = Rules(Sampler(1.0), verifier, random=draws)
        drafter = ModelDrafter(draft, Fixed(3), rules.sampler, draws, argmax=argmax)
        result = Decoded()
        for _ in range(50):
            for _ in decode(target, drafter, [0, 3], 12, rules, result):
                pass
            drafted, accepted = (sum(getattr(r, name) for r in result.rounds) for name in ("drafted", "accepted"))
            result.tokens.clear()
        assert (accepted == drafted) == (verifier != "match") and accepted > 0


def copied(text: list[int], place: int, count: int) -> list[int]:
    """What follows a place, copied token by token, so that a copy may read what it wrote."""
    whole = list(text)
    for i in range(count):
        whole.append(whole[place + i])
    return whole[len(text) :]


def test_lookup_finds_the_longest_ending() -> None:
    drafter = LookupDrafter(3)
    drafter.begin([])
    assert drafter.propose([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], 8, ()).tokens == [4, 9, 1]  # where 1, 2 was found last
    assert drafter.propose([1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 7, 7, 3], 2, ()).tokens == [9, 1]
    assert drafter.propose([1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 7, 7, 3, 8], 2, ()).tokens == []
    drafter.begin([])
    assert drafter.propose([5, 6, 7, 5], 8, (6,)).tokens == [6]
    assert LookupDrafter(4, shortest=2).propose([5, 6, 7, 5], 8, ()).tokens == []
    draws = numpy.random.default_rng(0)
    for _ in range(200):
        text = draws.integers(0, 3, size=draws.integers(1, 40)).tolist()
        index = SuffixIndex()
        for end in range(1, len(text) + 1):
            index.read(text[:end])
            size = next((n for n in range(end - 1, 0, -1) if text[end - n : end] in _windows(text[: end - 1], n)), 0)
            assert index.match == size
            if size:  # by hand: an earlier place of this very ending, with a token after it
                assert 0 < index.place < end and text[index.place - size : index.place] == text[end - size : end]
                assert index.continuation(5) == copied(text[:end], index.place, 5)


def _windows(text: list[int], size: int) -> list[list[int]]:
    return [text[i : i + size] for i in range(len(text) - size + 1)]


def test_a_lookup_takes_constant_time_a_token() -> None:
    """Steps of the automaton, counted: texts on which a search of the text would take quadratic time."""
    fibonacci = [1, 0]
    while len(fibonacci) < 20_000:
        fibonacci = fibonacci + fibonacci[: max(1, round(len(fibonacci) / 1.618))]
    for text in ([7] * 20_000, fibonacci[:20_000], [i * i % 97 for i in range(20_000)]):
        index = SuffixIndex()
        index.read(text)
        assert len(index._next) <= 2 * len(text) and sum(map(len, index._next)) <= 3 * len(text)
        assert index.match > 1000


def test_a_lookup_learns_what_the_other_drafter_gives() -> None:
    costs = StepCosts(tuple(1 + 0.01 * m for m in range(9)), 0.0, 0.0)
    lookup = LookupDrafter(4, 1, LookupPrice(costs))
    other = FirstThen(lookup, LookupDrafter(3))
    assert lookup.price is not None
    other.begin([])
    seen = [1, 2, 3, 9, 9, 1, 2]
    assert other.propose(seen, 8, ()).tokens == [3, 9, 9, 1]  # its own: a match of two tokens pays at these costs
    other.accepted(other.propose(seen, 8, ()), 0, 8, 1.0)
    assert lookup.price.rival == -math.inf
    for _ in range(40):  # rounds of the other drafter that give four tokens in the time of one
        found = other.propose([4, 5, 6, 7, 8], 8, ())
        other.accepted(found, 3, 9, 1.0)
        other.begin([])
    assert lookup.price.rival > 0 and other.propose(seen, 8, ()).tokens == [3, 9, 9]  # the other one's


def test_a_priced_lookup_drafts_what_pays() -> None:
    """Exact choices at given chances: by enumeration of every length."""
    flat, steep = StepCosts(tuple(1 + 0.01 * m for m in range(9)), 0.0, 0.0), StepCosts(tuple(range(1, 10)), 0.0, 0.0)
    for costs, rate in itertools.product((flat, steep), (0.5, 1.0, 1.4)):
        price = LookupPrice(costs)
        price._tokens, price._seconds = rate, 1.0
        for match in (1, 2, 5, 12):
            values = [
                1
                + sum(math.prod(price.chance(match + j) for j in range(i + 1)) for i in range(n))
                - rate * costs.target[n]
                for n in range(9)
            ]
            assert price.best(match, 8) == values.index(max(values))
            price.rival = max(values) + 0.1
            assert price.best(match, 8) == 0  # the other drafter gives more
            price.rival = -math.inf
    price = LookupPrice(flat)
    before = price.chance(3)
    for _ in range(200):
        price.observe(3, 2, 0, 1.0)
    assert price.chance(3) < 0.05 < before and price.chance(4) == pytest.approx(0.59)  # never reached
    assert (
        price.rate == pytest.approx(1.0, rel=0.01) and price.best(3, 1) == 1
    )  # a token of 1 % costs less than it gives

"""The decoding loop with every drafter and lossless verifier: greedy texts are plain texts, sampled follow the
distribution."""

from __future__ import annotations

import itertools
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
from distill.speculative.decode import Decoded, decode, decode_text, plain
from distill.speculative.draft import Drafter, FirstThen, LookupDrafter, ModelDrafter
from distill.speculative.lengths import Fixed, LossyProbabilityFloor, ProbabilityFloor
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
    "lookup": ("match", lambda draft, sampler, draws: LookupDrafter(3, 2)),
    "lookup, then token": (
        "token",
        lambda draft, sampler, draws: FirstThen(LookupDrafter(2, 2, 2), ModelDrafter(draft, Fixed(2), sampler, draws)),
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


def test_lookup_finds_the_longest_and_latest() -> None:
    drafter = LookupDrafter(length=3, longest=2, shortest=1)
    drafter.begin([])
    assert drafter.propose([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], 8, ()).tokens == [4, 9, 1]
    assert drafter.propose([1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 7, 7, 3], 2, ()).tokens == [9, 1]
    assert drafter.propose([1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 7, 7, 3, 8], 2, ()).tokens == []
    drafter.begin([])
    assert drafter.propose([5, 6, 7, 5], 8, (6,)).tokens == [6]
    draws = numpy.random.default_rng(0)
    for _ in range(50):
        context = draws.integers(0, 3, size=draws.integers(2, 30)).tolist()
        drafter.begin([])
        found = drafter.propose(context, 3, ()).tokens
        # By hand: the longest suffix that stood before with something after it, where it stood last.
        wanted: list[int] = []
        for size in (2, 1):
            places = [i + size for i in range(len(context) - size) if context[i : i + size] == context[-size:]]
            if size <= len(context) and places:
                wanted = context[places[-1] : places[-1] + 3]
                break
        assert found == wanted

"""Costs as rounds pay them, on models whose every step takes a known time of a clock that only they move."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.optimize import isotonic_regression
from table_model import TableModel

from distill.errors import DataError
from distill.speculative.costs.cheapest import CheapestSteps, cheapest_sizes
from distill.speculative.costs.paid import measure_paid, rising
from distill.speculative.decode import Decoded, Rules, decode, plain
from distill.speculative.draft import ModelDrafter
from distill.speculative.expected_value import ExpectedValue
from distill.speculative.lengths import Fixed, Rule

MODULES = ("costs.paid", "decode", "draft")


class Clocked:
    """A model whose step of m tokens takes `first` + `more`·(m − 1) seconds of the clock."""

    rows = 1
    max_leaves = 0

    def __init__(self, model: TableModel, clock: list[float], first: float, more: float) -> None:
        self._model, self._clock, self._first, self._more = model, clock, first, more
        self.steps: list[int] = []
        self.vocabulary_size, self.capacity = model.vocabulary_size, model.capacity

    @property
    def lengths(self) -> list[int]:
        return self._model.lengths

    def extend(self, tokens: Sequence[int], *rest: Any, **named: Any) -> Any:
        self._clock[0] += self._first + self._more * (len(tokens) - 1)
        self.steps.append(len(tokens))
        return self._model.extend(tokens, *rest, **named)

    def rollback(self, lengths: Sequence[int]) -> None:
        self._model.rollback(lengths)

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        self._model.keep(paths)

    def reset(self) -> None:
        self._model.reset()

    def close(self) -> None:
        self._model.close()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> tuple[Clocked, Clocked]:
    clock = [0.0]
    for module in MODULES:
        monkeypatch.setattr(f"distill.speculative.{module}.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    target = TableModel(7, seed=3, capacity=400)
    return Clocked(target, clock, 10.0, 1.5), Clocked(target.near(0.4, seed=5), clock, 2.0, 0.25)


def test_each_part_of_a_round_is_found(pair: tuple[Any, Any]) -> None:
    prompts = [[1, 2, 3, 4, 5], [6, 5, 4, 3, 2]]
    paid = measure_paid(*pair, prompts, [3, 5], repeats=4)
    assert paid.token == pytest.approx(10)
    assert dict(paid.verify) == pytest.approx({n: 10 + 1.5 * n for n in (1, 2, 3, 5)})
    for steps in (paid.by_argmax, paid.by_distribution):
        assert (steps.first, steps.first_two, steps.later) == pytest.approx((2, 2.25, 2))
    assert paid.target_prompt == pytest.approx((10 + 4 * 1.5) / 5) and paid.draft_prompt == pytest.approx(2.75 / 5)
    costs = paid.step_costs()
    assert costs.target == pytest.approx((10, 11.5, 13, 14.5)) and costs.overhead == 0  # 4 was not timed
    assert (costs.draft, costs.draft_two) == pytest.approx((2, 2.25))


class Building(Clocked):
    """A model that takes 3 seconds more for a step of another size than the last one had."""

    def extend(self, tokens: Sequence[int], *rest: Any, **named: Any) -> Any:
        self._clock[0] += 3.0 * (len(tokens) != (self.steps or [0])[-1])
        return super().extend(tokens, *rest, **named)


def test_a_round_like_the_last_one_is_cheaper(pair: tuple[Any, Any]) -> None:
    plainly, draft = pair
    target = Building(plainly._model, plainly._clock, 10.0, 1.5)
    paid = measure_paid(target, draft, [[1, 2, 3, 4, 5], [6, 5, 4, 3, 2]], [2, 4], repeats=6)
    assert dict(paid.settled) == pytest.approx({n: 10 + 1.5 * n for n in (1, 2, 3, 4)})
    assert dict(paid.verify) == pytest.approx({n: 13 + 1.5 * n for n in (1, 2, 3, 4)})
    # Fixed lengths are predicted from the one, rules reckon with the other.
    assert paid.round_seconds(4, 0.0) == pytest.approx(16 + 4 * 2)
    assert paid.step_costs().target[4] == pytest.approx(19)


@pytest.mark.parametrize("length", [1, 3, 5])
def test_the_prediction_is_what_a_request_takes(pair: tuple[Any, Any], length: int) -> None:
    target, draft = pair
    paid = measure_paid(target, draft, [[1, 2, 3, 4, 5]], [length], repeats=3)
    prompt, new = [2, 4, 6, 1, 3, 5], 300
    alone, result = plain(target, prompt, new), Decoded()
    for _ in decode(
        target, ModelDrafter(draft, Fixed(length), Rules().sampler, Rules().random), prompt, new, Rules(), result
    ):
        pass
    measured = (alone.prefill_seconds + alone.seconds) / (result.prefill_seconds + result.seconds)
    rounds = [one for one in result.rounds if one.drafted == length]
    reached = [[one for one in rounds if one.accepted >= position] for position in range(length + 1)]
    accepted = [len(after) / len(before) for before, after in itertools.pairwise(reached)]
    assert paid.predicted_speedup(length, accepted, len(prompt), new) == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_pooled_as_scipy_pools_it(seed: int) -> None:
    chance = random.Random(seed)
    values = [chance.choice([1.0, 2.0, chance.random()]) + place * chance.random() for place in range(1 + seed)]
    assert rising(values) == pytest.approx(isotonic_regression(values).x)


def test_contexts_without_room_are_refused(pair: tuple[Any, Any]) -> None:
    with pytest.raises(DataError, match="a context of 400 tokens has no room to time rounds of 397"):
        measure_paid(*pair, [[1, 2]], [397], repeats=1)
    long = [1 + i % 6 for i in range(399)]
    assert measure_paid(*pair, [long], [2], repeats=2).verify[2] == pytest.approx(13)  # the prompt is shortened


def test_a_draft_that_is_not_asked_reads_nothing(pair: tuple[Any, Any]) -> None:
    """Where drafting costs more than it can bring, the draft takes no step; where it is asked late, it catches up."""
    target, draft = pair
    costs = measure_paid(target, draft, [[1, 2, 3]], range(1, 6), repeats=3).step_costs()
    dear = ExpectedValue(costs=type(costs)(costs.target, 50.0, 50.0))
    draft.steps.clear()
    result = Decoded()
    for _ in decode(target, ModelDrafter(draft, dear, Rules().sampler, Rules().random), [1, 2, 3], 40, Rules(), result):
        pass
    assert not draft.steps and result.tokens == plain(target, [1, 2, 3], 40).tokens

    class Late(Rule):
        """Drafts one token from the fourth round on."""

        told: float | None = None

        def __init__(self) -> None:
            self.rounds: list[float] = []

        def limit(self) -> int:
            return int(len(self.rounds) >= 3)

        def caught_up(self, seconds: float) -> None:
            assert self.told is None
            self.told = seconds

        def observe(self, drafted: int, accepted: int, features: Any, seconds: float) -> None:
            self.rounds.append(seconds)

    late = Late()
    result = Decoded()
    for _ in decode(target, ModelDrafter(draft, late, Rules().sampler, Rules().random), [1, 2, 3], 12, Rules(), result):
        pass
    assert draft.steps[:2] == [6, 1] and late.told == pytest.approx(2 + 5 * 0.25)
    assert late.rounds[:4] == pytest.approx([10, 10, 10, 2 + 11.5])
    assert result.rounds[3].seconds == pytest.approx(2 + 5 * 0.25 + 2 + 11.5)
    assert result.tokens == plain(target, [1, 2, 3], 12).tokens


def test_the_cheapest_sizes_by_hand() -> None:
    jagged = {1: 25.0, 2: 58.0, 3: 59.0, 4: 40.0, 5: 41.0}
    assert cheapest_sizes(jagged, whole=True) == {2: (4,), 3: (4,)}
    assert cheapest_sizes(jagged, whole=False) == {2: (4,), 3: (4,)}  # 25 + 25 = 50 > 40
    assert cheapest_sizes({1: 25.0, 2: 58.0, 4: 60.0}, whole=False) == {2: (1, 1)}
    assert cheapest_sizes({1: 25.0, 2: 26.0, 3: 27.0}, whole=True) == {}
    assert cheapest_sizes({1: 25.0, 2: 40.0, 3: 37.0}, whole=True) == {}  # nothing worth a tenth
    assert cheapest_sizes({}, whole=True) == {}


def test_steps_of_other_sizes_change_no_text(pair: tuple[Any, Any]) -> None:
    """Splits and padding, at random, give the logits of a fresh prefill; the models' lengths stay the same."""
    target, draft = pair
    jagged = {1: 1.0, 2: 9.0, 3: 9.0, 4: 3.0, 5: 9.0, 6: 9.0, 7: 5.0}
    cheap = CheapestSteps(target, jagged)
    assert cheap.padded == {2: 4, 3: 4, 5: 7, 6: 7} and cheap.last_only[2] == (1, 1) and cheap.last_only[5] == (1, 4)
    chance, text = random.Random(0), [3]
    cheap.extend(text)
    for _ in range(60):
        new = [chance.randrange(7) for _ in range(chance.randint(1, 8))]
        want = chance.choice([None, [len(new) - 1], [0], []])
        found = cheap.extend(new, want=want).full()
        fresh = TableModel(7, seed=3).extend([*text, *new]).full()[len(text) :]
        torch.testing.assert_close(found, fresh if want is None else fresh[want])
        keep = chance.randint(0, len(new))
        text += new[:keep]
        cheap.rollback([len(text)])
        assert cheap.lengths == [len(text)]
        if len(text) > 300:
            text = text[:5]
            cheap.rollback([5])
    for length in (1, 2, 4):
        both, single = Decoded(), Decoded()
        for models, result in (((cheap, CheapestSteps(draft, jagged)), both), ((target, draft), single)):
            drafter = ModelDrafter(models[1], Fixed(length), Rules().sampler, Rules().random)
            for _ in decode(models[0], drafter, [1, 2, 3], 60, Rules(), result):
                pass
        assert both.tokens == single.tokens
        assert [(r.depth, r.drafted, r.accepted) for r in both.rounds] == [
            (r.depth, r.drafted, r.accepted) for r in single.rounds
        ]
    full = CheapestSteps(TableModel(7, seed=3, capacity=10), jagged)
    full.extend([1] * 8)
    assert len(full.extend([2, 3])) == 2 and full.lengths == [10]  # no room to pad
    assert "steps of 2 padded to 4" in cheap.describe("target")
    assert CheapestSteps(target, {1: 1.0, 2: 1.1}).describe("target") == ""
    lucky = CheapestSteps(target, jagged, {m: 9.0 if m != 7 else 5.0 for m in jagged})  # 4 was fast once, 7 always
    assert lucky.padded == {5: 7, 6: 7} and lucky.last_only == {6: (7,)}


def test_small_contexts_and_drafts_without_tokens_end(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A context with room for one long round a text; a draft whose logits are empty has none."""
    clock = [0.0]
    for module in MODULES:
        monkeypatch.setattr(f"distill.speculative.{module}.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    small = TableModel(7, seed=3, capacity=12)
    target, draft = Clocked(small, clock, 10.0, 1.5), Clocked(small.near(0.4, seed=5), clock, 2.0, 0.25)
    paid = measure_paid(target, draft, [[1, 2, 3]], range(1, 9), repeats=2)
    assert dict(paid.verify) == pytest.approx({n: 10 + 1.5 * n for n in range(1, 9)})
    empty = TableModel(7, seed=3, capacity=400)
    empty.table[:] = -torch.inf
    with pytest.raises(DataError, match="proposes fewer tokens than it is asked for"):
        measure_paid(pair[0], Clocked(empty, clock, 2.0, 0.25), [[1, 2, 3]], [2], repeats=1)

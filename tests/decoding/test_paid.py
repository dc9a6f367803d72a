"""Costs as rounds pay them, on models whose every step takes a known time of a clock that only they move."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from scipy.optimize import isotonic_regression
from table_model import TableModel
from test_configurations import settings_with
from toys import speculative

from distill.decoding.configured import DrafterInputs
from distill.decoding.costs import PROMPT_STEP, Costs, accepted_by_position, measure_costs, rising
from distill.decoding.decode import decode_text, plain
from distill.decoding.drafters import ModelDrafter
from distill.decoding.lengths import Adaptive, Drafting, LengthRule
from distill.decoding.rules import GREEDY, Rules
from distill.decoding.trees import TreeDrafter
from distill.engines.model import Watch
from distill.errors import DataError
from distill.measuring.compare import predicted_speedup, prepare_all, time_steps, time_texts, totals
from distill.recipe import Configuration

CLOCKED = [f"decoding.{name}" for name in ("costs", "decode", "drafters")]
CLOCKED += ["measuring.compare", "engines.model"]


class Clocked:
    """A model whose step of m tokens takes `first` + `more`·(m − 1) seconds of the clock, and `deeper` for each token
    that is cached."""

    deeper = 0.0

    def __init__(self, model: TableModel, clock: list[float], first: float, more: float) -> None:
        self.model, self._clock, self._first, self._more = model, clock, first, more
        self.steps: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def extend(self, tokens: Sequence[int], *rest: Any, **named: Any) -> Any:
        self._clock[0] += self._first + self._more * (len(tokens) - 1) + self.deeper * self.lengths[0]
        self.steps.append(len(tokens))
        return self.model.extend(tokens, *rest, **named)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> tuple[Clocked, Clocked]:
    clock = [0.0]
    for module in CLOCKED:
        monkeypatch.setattr(f"distill.{module}.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    target = TableModel(7, seed=3, capacity=400)
    return Clocked(target, clock, 10.0, 1.5), Clocked(target.near(0.4, seed=5), clock, 2.0, 0.25)


def test_every_step_is_found(pair: tuple[Any, Any]) -> None:
    costs = measure_costs(*pair, 5)
    assert costs.target == pytest.approx([10 + 1.5 * n for n in range(6)])
    assert (costs.draft, costs.draft_two) == pytest.approx((2, 2.25))
    assert (costs.target_prompt, costs.draft_prompt) == pytest.approx((1.5, 0.25))  # the price of a token more
    alone = measure_costs(pair[0], pair[0], 5)  # a lookup has no draft: the target stands in its place
    assert alone.target == costs.target and alone.draft == alone.draft_prompt == 0
    assert {*pair[1].steps} == {1, 2, PROMPT_STEP, 128}
    assert replace(costs, resent=lambda: 2).again(1, 1.5, 0.5) == pytest.approx((2 + 1.5 + 2 - 4 * 0.5) * 1.5)


@pytest.mark.parametrize("length", [1, 3, 5])
def test_the_prediction_is_what_a_request_takes(pair: tuple[Any, Any], length: int) -> None:
    target, draft = pair
    costs = replace(measure_costs(target, draft, length), target_prompt=(10 + 5 * 1.5) / 6, draft_prompt=3 / 6)
    prompt, new = [2, 4, 6, 1, 3, 5], 300
    alone, result = plain(target, prompt, new), speculative(target, draft, prompt, new, length)
    measured = (alone.prefill_seconds + alone.seconds) / (result.prefill_seconds + result.seconds)
    rounds = [one for one in result.rounds if one.drafted == length]
    reached = [[one for one in rounds if one.accepted >= position] for position in range(length + 1)]
    accepted = [len(after) / len(before) for before, after in itertools.pairwise(reached)]
    assert costs.predicted_speedup(length, accepted, len(prompt), new) == pytest.approx(measured, rel=0.02)


def test_fixed_lengths_are_predicted_by_steps_and_acceptance(pair: tuple[Any, Any]) -> None:
    """What is no chain of the sweep of lengths is not predicted."""
    watch = Watch()
    target, draft = watch.models(*pair)
    lookup = Configuration(drafter="lookup", length=3)
    settings = settings_with([Configuration(rule="p_min", length=3), lookup], [3])
    prepared = prepare_all(settings, [(target, draft)], (), DrafterInputs())
    prompts = [[2, 4, 6, 1, 3, 5], [1, 2, 3, 4, 5, 6], [3, 3, 3, 1, 1, 2]]
    time_texts(target, draft, prompts, 300, prepared, "prompts", [watch])
    assert all(step.depth >= 6 for text in prepared[0].texts for step in text.target)
    steps = time_steps(prepared, *pair, 3)
    assert steps.target[4] == pytest.approx(14.5) and steps.draft[1] == pytest.approx(2)
    plainly, drafted = (totals(one.texts)[1].sum() for one in prepared[:2])
    found = [predicted_speedup(one, steps) for one in prepared]
    assert found == [None, pytest.approx(plainly / drafted, rel=0.02), None, None]


def test_acceptance_is_counted_where_a_position_was_reached() -> None:
    # The last round was cut short: it says nothing of the second position.
    assert accepted_by_position([(3, 3), (3, 1), (3, 0), (1, 1)]) == pytest.approx([3 / 4, 1 / 2, 1.0])
    assert accepted_by_position([(2, 0)]) == [0.0] and accepted_by_position([]) == []


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_pooled_as_scipy_pools_it(seed: int) -> None:
    chance = random.Random(seed)
    values = [chance.choice([1.0, 2.0, chance.random()]) + place * chance.random() for place in range(1 + seed)]
    assert rising(values) == pytest.approx(isotonic_regression(values).x)


def test_contexts_without_room_are_refused(pair: tuple[Any, Any]) -> None:
    target, draft = pair
    assert len(measure_costs(*pair, 500).target) == 399  # as long as a context of 400 allows
    small = TableModel(7, seed=3, capacity=5)
    target.model, draft.model = small, small.near(0.4, seed=5)
    assert measure_costs(*pair, 8).target == pytest.approx([10, 11.5, 13, 14.5])
    small.capacity = 2
    with pytest.raises(DataError, match="a context of 2 tokens has no room for a drafted token"):
        measure_costs(*pair, 8)


def test_a_draft_that_is_not_asked_reads_nothing(pair: tuple[Any, Any]) -> None:
    """Where drafting costs more than it can bring, the draft takes no step; where it is asked late, it catches up."""
    target, draft = pair
    costs = measure_costs(target, draft, 5)
    dear = Adaptive(Costs(costs.target, 50.0, 50.0))
    draft.steps.clear()
    result = decode_text(target, ModelDrafter(draft, dear, Rules().sampler, Rules().random), [1, 2, 3], 40, Rules())
    assert not draft.steps and result.tokens == plain(target, [1, 2, 3], 40).tokens

    # It reads the prompt apart from the rounds, where enough tokens are left.
    prompt = [1 + i % 6 for i in range(60)]
    drafter = ModelDrafter(draft, Adaptive(replace(costs, draft_prompt=0.5)), Rules().sampler, Rules().random)
    few, many = (decode_text(target, drafter, prompt, tokens, Rules()) for tokens in (4, 300))
    assert not few.reading and draft.steps[0] == 60 and many.reading == pytest.approx(2 + 59 * 0.25)
    assert many.prefill_seconds - many.reading == few.prefill_seconds == pytest.approx(10 + 59 * 1.5)
    assert many.seconds == pytest.approx(sum(one.seconds for one in many.rounds))
    assert many.tokens == plain(target, prompt, 300).tokens
    draft.steps.clear()

    class Late(LengthRule):
        """Drafts one token after so many rounds."""

        def __init__(self, plain: int) -> None:
            self.plain, self.rounds = plain, list[tuple[float, float]]()

        def limit(self) -> int:
            return int(len(self.rounds) >= self.plain)

        def observe(self, drafting: Drafting, nodes: int, accepted: int, seconds: float) -> None:
            self.rounds.append((drafting.reading, seconds))

    late = Late(3)
    decode_text(target, ModelDrafter(draft, late, Rules().sampler, Rules().random), [1, 2, 3], 12, Rules())
    assert draft.steps[0] == 7 and not any(reading for reading, _ in late.rounds)  # together with its first step
    draft.steps.clear()
    late = Late(60)
    result = decode_text(target, ModelDrafter(draft, late, Rules().sampler, Rules().random), [1, 2, 3], 70, Rules())
    assert draft.steps[:2] == [63, 1] and late.rounds[59] == pytest.approx((0, 10))
    assert late.rounds[60] == pytest.approx((2 + 62 * 0.25, 2 + 11.5))
    assert result.rounds[60].seconds == pytest.approx(2 + 62 * 0.25 + 2 + 11.5)
    assert result.tokens == plain(target, [1, 2, 3], 70).tokens


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize(("room", "draft_room"), [(40, 400), (400, 40), (41, 41), (42, 41)])
def test_a_context_that_ends_inside_a_round(pair: tuple[Any, Any], room: int, draft_room: int, branches: bool) -> None:
    """Of the target the text ends there; after the draft's it is plain. Shorter rounds teach no other costs."""
    target, draft = pair
    target.model = TableModel(7, seed=3, capacity=room)
    draft.model = TableModel(7, seed=3, capacity=draft_room).near(0.05, seed=5)
    rule = Adaptive(Costs(tuple(10 + 1.5 * m for m in range(20)), 2.0, 2.25), 8)
    chain, tree = ModelDrafter(draft, rule, GREEDY, float), TreeDrafter(draft, GREEDY, float, 12, rule=rule)
    result = decode_text(target, tree if branches else chain, [1, 2, 3], 100, Rules())
    assert result.tokens == plain(target, [1, 2, 3], 100).tokens and len(result.tokens) == min(room - 2, 100)
    drafted = [one.drafted for one in result.rounds]
    assert max(drafted) > 2  # it drafts where there is room
    places = list(itertools.accumulate((one.accepted + 1 for one in result.rounds), initial=3))
    assert all(
        place + count <= min(room, draft_room + 1) for place, count in zip(places, drafted, strict=False) if count
    )
    seconds = [one.seconds for one in result.rounds if not one.drafted and one.accepted == 0]
    assert all(one == pytest.approx(10) for one in seconds[1:])


@pytest.mark.parametrize(("unlike", "more", "gain"), [(0.3, 0.05, 0.93), (0.6, 0.05, 1.05), (0.6, 1.5, 0.93)])
def test_a_tree_is_as_fast_as_the_chain_that_it_contains(
    pair: tuple[Any, Any], unlike: float, more: float, gain: float
) -> None:
    """A level costs a step of the chain: where the draft knows less and steps are flat, trees are faster."""
    clock, table, speeds = pair[0]._clock, TableModel(40, 3, memory=3, sharpness=2.0, capacity=400), []
    target, draft = Clocked(table, clock, 10.0, more), Clocked(table.near(unlike, 4), clock, 2.0, 0.0)
    costs = Costs(tuple(10 + more * m for m in range(20)), 2.0, 2.0)
    for branches in (False, True):
        rule = Adaptive(costs, 8)
        chain, tree = ModelDrafter(draft, rule, GREEDY, float), TreeDrafter(draft, GREEDY, float, 12, rule=rule)
        speeds.append(decode_text(target, tree if branches else chain, [1, 2, 3], 300, Rules()).tokens_per_second())
    assert speeds[1] > gain * speeds[0] > gain * 0.1

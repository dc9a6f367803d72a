"""Whether a draft will pay, before there is one: speedups by draft length and conditional acceptance, from costs.

A round of n drafted tokens gives E = 1 + Σ_i Π_{j ≤ i} a_j tokens in T(n + 1) + n·D seconds (Leviathan et al. 2023,
eq. 1, with measured times; `Costs.predicted_speedup`). Greedy, n fixed, the acceptance a_j at position j the same in
every round.

Legend: n drafted tokens of a round, T target, D draft; costs are in T(1), the time of a token of plain decoding.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from distill.decoding.costs import Costs, tokens_per_round
from distill.errors import DataError
from distill.tables import Block, Cell, Columns, Interval, Row, Table, Value, shown, table_of

RATES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
ALL = "all accepted"
NEGLIGIBLE = 0.005  # T(1) that a draft step may cost: shown as 0.00
GOOD_SPEEDUP = 1.5  # a speedup worth the effort of a draft, in the verdict
HALVINGS = 40  # of the range in which an acceptance is looked for

MODEL = (
    "Predicted, not measured: greedy decoding with n drafted tokens in every round. A round gives 1 + a1 + a1·a2 + … "
    "tokens, where a1, a2, … are the conditional acceptance at each position (accepted ÷ reached; the last holds "
    "behind it). It costs T(n + 1) + n·D."
)


@dataclass(frozen=True)
class PlannedLength:
    """n tokens drafted a round: what verifying them costs, the draft's steps and the rest of the round apart from it.

    `break_even` is the conditional acceptance, the same at every position, from which it is faster than plain
    decoding; None where none is enough. `upper_bound` is the speedup with every drafted token accepted.
    """

    length: int
    verify_cost: float
    break_even: float | None
    upper_bound: float


@dataclass(frozen=True)
class Scenario:
    """Speedups at conditional acceptances by position, the last of which holds behind it, by the forecast's lengths.

    An interval is the lowest and highest of repeated timings, NaN where there was one. `best` is the fastest length, 0
    where plain decoding is faster. `largest_cost` of a draft step still pays, below 0 where not even a free one does.
    """

    title: str
    acceptance: list[float]
    speedups: list[Interval]
    best: int
    largest_cost: float


@dataclass(frozen=True)
class SpeedupForecast:
    """The prediction from one set of costs, with a verdict in sentences.

    Both models read `prompt` tokens (0: the prompt is left out), and `new` tokens follow.
    """

    title: str
    prompt: int
    new: int
    token_seconds: float
    draft_cost: float
    lengths: list[PlannedLength]
    scenarios: list[Scenario]
    sentences: list[str]


@dataclass(frozen=True)
class SpeedupPlan:
    """All forecasts, each by its own costs, and llama.cpp's settings where a curve and an acceptance were given.

    `decision` says what to try first (`order.decide`).
    """

    command: str
    machine: dict[str, Any]
    forecasts: list[SpeedupForecast]
    settings: list[str] = field(default_factory=list)
    decision: list[str] = field(default_factory=list)
    version: Literal[1] = 1


def step_costs(target: Sequence[float], draft: float, draft_two: float, lengths: Sequence[int]) -> Costs:
    """Costs from T(1..), D(1) and D(2) of each model alone: no prompt.

    Raises DataError where T reaches none of the lengths.
    """
    if min(lengths) >= len(target):
        what = f"the target's curve ends at m = {len(target)}, no drafted length of {list(lengths)} can be verified"
        raise DataError(what, "measure a longer one (`distill profile --max-tokens 17`), or give smaller --lengths")
    return Costs(tuple(target), draft, max(draft, draft_two))


@dataclass(frozen=True)
class Case:
    """Costs to be judged, of one or several timings, for requests of `new` tokens after `prompt` ones.

    `note` is a caveat about the costs.
    """

    title: str
    timings: Sequence[Costs]
    lengths: Sequence[int]
    prompt: int = 0
    new: int = 2
    note: str = ""

    def speedup(self, costs: Costs, length: int, rates: Sequence[float]) -> float:
        """Over plain decoding, at an acceptance by position whose last rate holds behind it."""
        return costs.predicted_speedup(length, by_position(rates, length), self.prompt, self.new)

    def median(self, figure: Callable[[Costs], float]) -> float:
        """The median over the timings of a figure."""
        return statistics.median(figure(costs) for costs in self.timings)

    def needed(self, costs: Costs, length: int, speedup: float = 1.0) -> float:
        """The conditional acceptance, the same everywhere, from which `length` gives this speedup; else infinite."""
        if self.speedup(costs, length, [1.0]) < speedup:
            return math.inf
        low, high = 0.0, 1.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.speedup(costs, length, [middle]) < speedup else (low, middle)
        return high

    def largest_cost(self, costs: Costs, rates: Sequence[float]) -> float:
        """The cost of a draft step, in T(1), at which the best length is just as fast as plain decoding."""
        plain = self.prompt * costs.target_prompt + (self.new - 1) * costs.target[0]
        affordable = []
        for n in self.lengths:
            rounds = (self.new - 1) / tokens_per_round(by_position(rates, n))
            saved = plain * (1 - 1 / self.speedup(costs, n, rates))  # of a request
            affordable.append(costs.draft + saved / rounds / n)
        return max(affordable) / costs.target[0]


def by_position(rates: Sequence[float], length: int) -> list[float]:
    """Conditional acceptance at `length` positions; the last rate holds for all behind it."""
    return [rates[min(position, len(rates) - 1)] for position in range(length)]


def forecast(case: Case, given: Mapping[str, Sequence[float]]) -> SpeedupForecast:
    """Predict speedups at the usual acceptances, at those `given` by title, and with everything accepted."""
    cost = case.median(lambda costs: costs.draft / costs.target[0])
    lengths = []
    for n in case.lengths:
        even = case.median(lambda costs, n=n: case.needed(costs, n))  # type: ignore[misc]
        verify = case.median(lambda costs, n=n: costs.target[n] / costs.target[0])  # type: ignore[misc]
        upper_bound = case.median(lambda costs, n=n: case.speedup(costs, n, [1.0]))  # type: ignore[misc]
        lengths.append(PlannedLength(n, verify, None if math.isinf(even) else even, upper_bound))
    usual: dict[str, Sequence[float]] = {f"{rate:.2f}": [rate] for rate in RATES}
    scenarios = [_scenario(case, title, rates) for title, rates in (usual | {ALL: [1.0]} | dict(given)).items()]
    sentences = [_verdict(case, cost, lengths, scenarios)]
    sentences += [describe(case, one) for one in scenarios if one.title in given] + [case.note] * bool(case.note)
    token = case.median(lambda costs: costs.target[0])
    return SpeedupForecast(case.title, case.prompt, case.new, token, cost, lengths, scenarios, sentences)


def _scenario(case: Case, title: str, rates: Sequence[float]) -> Scenario:
    speeds = []
    for n in case.lengths:
        timed = [case.speedup(costs, n, rates) for costs in case.timings]
        bounds = (min(timed), max(timed)) if len(timed) > 1 else (math.nan, math.nan)
        speeds.append(Interval(statistics.median(timed), *bounds))
    best = max(range(len(speeds)), key=lambda place: speeds[place].mean)
    largest = case.median(lambda costs: case.largest_cost(costs, rates))
    length = case.lengths[best] if speeds[best].mean > 1 else 0
    return Scenario(title, list(rates), speeds, length, largest)


def _verdict(case: Case, cost: float, lengths: Sequence[PlannedLength], scenarios: Sequence[Scenario]) -> str:
    """Return the conditional acceptance that the draft needs and its maximum speedup, or why it cannot pay."""
    top = max(lengths, key=lambda one: one.upper_bound)
    free = next(one for one in scenarios if one.title == ALL).largest_cost
    if top.upper_bound <= 1 and free < NEGLIGIBLE:
        cheapest = min(lengths, key=lambda one: one.verify_cost / (one.length + 1))
        return (
            f"No draft can pay here, because verifying {cheapest.length + 1} tokens costs {cheapest.verify_cost:.2f} "
            f"T(1): with every token accepted this one gives at most {top.upper_bound:.2f}×, and a free one no speedup "
            "either."
        )
    if top.upper_bound <= 1:
        return (
            f"This draft cannot pay: its step costs {cost:.2f} T(1), and with every token accepted it gives at most "
            f"{top.upper_bound:.2f}× ({top.length} drafted). A draft whose step costs less than {free:.2f} T(1) could."
        )
    even = min((one for one in lengths if one.break_even is not None), key=lambda one: one.break_even or 0.0)
    needed = {n: case.median(lambda costs, n=n: case.needed(costs, n, GOOD_SPEEDUP)) for n in case.lengths}  # type: ignore[misc]
    length = min(needed, key=lambda n: needed[n])
    good = f"{GOOD_SPEEDUP}× from {needed[length]:.2f} on ({length} drafted)"
    if math.isinf(needed[length]):
        good = f"{GOOD_SPEEDUP}× at none"
    step = f"A draft step costs {cost:.2f} T(1)." if cost else "A draft that costs nothing is assumed."
    return (
        f"{step} It pays from a conditional acceptance of {even.break_even:.2f} on "
        f"({even.length} drafted), gives {good}, and with every token accepted at most {top.upper_bound:.2f}× "
        f"({top.length} drafted)."
    )


def describe(case: Case, one: Scenario) -> str:
    place = max(range(len(one.speedups)), key=lambda place: one.speedups[place].mean)
    verdict = "it pays" if one.best else "it does not pay"
    rates = ", ".join(f"{rate:.2f}" for rate in one.acceptance)
    speed = f"{shown(one.speedups[place])} at best, {case.lengths[place]} drafted"
    return f"At the conditional acceptance of {one.title} ({rates}) {verdict}: {speed}."


# ── tables ──


def plan_blocks(plan: SpeedupPlan) -> list[Block]:
    """The tables of all forecasts, side by side where there are several, and the verdicts."""
    blocks: list[Block] = [MODEL]
    for one in plan.forecasts:
        blocks += _forecast_blocks(one)
    if len(plan.forecasts) > 1:
        rows: list[Row] = [
            [one.title, 1 / one.token_seconds, *(_fastest(one, found) for found in one.scenarios)]
            for one in plan.forecasts
        ]
        titles = [found.title for found in plan.forecasts[0].scenarios]
        words = (
            "Tokens per second without the prompt, by conditional acceptance, and the drafted tokens that give them."
        )
        blocks.append(Table(["", "plain tokens/s", *titles], rows, title="side by side", note=words))
    first: list[Block] = ["What to try first:", plan.decision] if plan.decision else []
    return [*blocks, *first, "\n".join(plan.settings)]


def _forecast_blocks(one: SpeedupForecast) -> list[Block]:
    """Speedups by conditional acceptance and drafted tokens, when drafting pays, and the verdicts."""
    columns: Columns[Scenario] = {
        "conditional acceptance": lambda found: found.title,
        **{f"n = {length.length}": partial(_speedup, place) for place, length in enumerate(one.lengths)},
        "best n": lambda found: found.best or "none",
        "largest D that pays, T(1)": lambda found: found.largest_cost if found.largest_cost >= NEGLIGIBLE else "none",
    }
    even: list[Value] = ["none" if length.break_even is None else length.break_even for length in one.lengths]
    verify: list[Value] = [length.verify_cost for length in one.lengths]
    heads = ["", *(f"n = {length.length}" for length in one.lengths)]
    reading = f", {one.new} tokens after a prompt of {one.prompt} that both models read" if one.prompt else ""
    return [
        table_of(one.scenarios, columns, title=one.title, note=f"Predicted speedup over plain decoding{reading}."),
        Table(heads, [["pays from", *even], ["T(n + 1)", *verify]], title=f"{one.title}: what drafting takes"),
        one.sentences,
    ]


def _fastest(one: SpeedupForecast, found: Scenario) -> str:
    """Tokens per second of the best length, plain decoding with 0, and that length."""
    speed = max((speed.mean for speed in found.speedups), default=1.0) if found.best else 1.0
    return f"{speed / one.token_seconds:.1f} ({found.best})"


def _speedup(place: int, found: Scenario) -> Cell:
    return Cell(found.speedups[place], "×")

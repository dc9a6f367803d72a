"""The price of a cut: predictions against a simulation of rounds, fronts against brute force."""

from __future__ import annotations

import random

import pytest

from distill.results.cut_results import Priced, SearchReport
from distill.speculative.costs.curve import tokens_per_round
from distill.surgery.price import as_markdown, explain, pareto, price

CURVE = [1.0 + 0.05 * m for m in range(17)]  # T(1) to T(17)


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("length", [0, 1, 5])
def test_tokens_per_round_are_those_of_simulated_rounds(acceptance: float, length: int) -> None:
    draw = random.Random(0)
    rounds = 40_000
    tokens = 0
    for _ in range(rounds):
        tokens += 1
        for _ in range(length):
            if draw.random() >= acceptance:
                break
            tokens += 1
    assert tokens_per_round([acceptance] * length) == pytest.approx(tokens / rounds, rel=0.02)


def test_best_length_is_the_best() -> None:
    for acceptance in (0.0, 0.2, 0.6, 0.9, 1.0):
        for cost in (0.02, 0.2, 0.9):
            found = price("x", {}, 1, None, acceptance, CURVE, cost)
            rates = [sum(acceptance**i for i in range(n + 1)) / (CURVE[n] + n * cost) for n in range(17)]
            assert found.tokens_per_second == pytest.approx(max(rates)) == pytest.approx(rates[found.length])
            assert found.drafting == pytest.approx(max(rates[1:])) and found.speedup == found.tokens_per_second
    plain = price("x", {}, 1, None, 0.0, CURVE, 0.9)  # nothing is accepted
    assert (plain.length, plain.tokens_per_second) == (0, 1.0)


def points() -> list[Priced]:
    draw = random.Random(1)
    return [
        price(f"cut {i}", {"layers": i}, 1000 * i, 0.5, draw.random(), CURVE, 0.02 + 0.5 * draw.random())
        for i in range(30)
    ]


def test_pareto_front() -> None:
    found = points()
    front = {p.name for p in pareto(found)}
    for p in found:
        beaten = any(o.draft_seconds <= p.draft_seconds and o.acceptance >= p.acceptance and o != p for o in found)
        assert (p.name in front) == (not beaten)


def test_the_chosen_one_is_explained_with_its_neighbours() -> None:
    found = points()
    chosen = max(found, key=lambda p: p.tokens_per_second)
    assert chosen in pareto(found)
    report = SearchReport(
        backend="pytorch",
        heal_steps=5,
        target_seconds=CURVE,
        points=found,
        front=[p.name for p in pareto(found)],
        chosen=chosen.name,
        explanations=explain(found, chosen, CURVE[0]),
        command="distill train x",
    )
    table = as_markdown(report)
    assert f"| {chosen.name} |" in table and "chosen, front" in table and table.count("chosen") == 1
    front = pareto(found)
    place = front.index(chosen)
    for neighbour in (front[place - 1 : place] if place else []) + front[place + 1 : place + 2]:
        assert any(neighbour.name in sentence for sentence in report.explanations)


def test_nothing_pays() -> None:
    hopeless = price("slow", {}, 1, None, 0.1, CURVE, 0.95)
    assert hopeless.length == 0 and hopeless.speedup == pytest.approx(1.0)
    assert "No cut tried pays" in " ".join(explain([hopeless], hopeless, CURVE[0]))

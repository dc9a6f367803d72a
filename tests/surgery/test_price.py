"""The price of a cut: predictions against a simulation of rounds, and lengths against all others."""

from __future__ import annotations

import random

import pytest

from distill.decoding.costs import tokens_per_round
from distill.surgery.stage import price

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
            found = price("x", 1, None, acceptance, CURVE, cost)
            rates = [sum(acceptance**i for i in range(n + 1)) / (CURVE[n] + n * cost) for n in range(17)]
            assert found.tokens_per_second == pytest.approx(max(rates)) == pytest.approx(rates[found.length])
            assert found.speedup == found.tokens_per_second
    plain = price("x", 1, None, 0.0, CURVE, 0.9)  # nothing is accepted
    assert (plain.length, plain.tokens_per_second) == (0, 1.0)

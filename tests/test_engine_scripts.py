"""The engine's scripts on a tiny run: identity of every way and its resuming, and the gap that comes apart exactly."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import tiny

from distill.files import read_json, write_json
from distill.speculative.calibration import Power, Recorded
from distill.speculative.costs.curve import StepCosts
from distill.speculative.lengths import Fixed
from distill.speculative.proposal import Features

SCRIPTS = tiny.ROOT / "scripts"
SEEN = Features(0.5, 0.2, 1.0)


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module(name)


def test_identity_of_every_configuration_and_its_resuming(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = script("check_identity", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["check_identity", str(copied), "--prompts", "2", "--tokens", "6"])
    check.main()
    first = capsys.readouterr().out
    cells = re.findall(r"^\| (.+) \| (\d+) \| (\d+) \| (\d+) \|$", first, flags=re.M)
    assert len(cells) == len(check.CONFIGURATIONS) + len(check.BATCHED) + 1 and cells[-1][0] == "all"
    assert int(cells[-1][3]) == 0 and int(cells[-1][1]) + int(cells[-1][2]) == 2 * (len(cells) - 1)
    # Everything is kept: nothing is decoded again, and a text that differs is called so.
    path = copied / "identity-pytorch.json"
    kept = read_json(path)
    kept["texts"]["draft, γ = 3"]["1"][2] ^= 1
    write_json(path, kept)
    monkeypatch.setattr(check, "decode", None)
    monkeypatch.setattr(check, "plain", None)
    monkeypatch.setattr(check, "TORCH_NOISE", -1.0)  # no tie excuses
    check.main()
    again = re.findall(r"^\| (.+) \| (\d+) \| (\d+) \| (\d+) \|$", capsys.readouterr().out, flags=re.M)
    assert [row for row in again if row[0] == "draft, γ = 3"] == [("draft, γ = 3", "1", "0", "1")]


def test_the_gap_comes_apart_into_its_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = script("measure_lengths", monkeypatch)
    costs = StepCosts((1.0, 1.2, 1.4, 1.6), 0.1, 0.1, 0.05)
    trace = [(run, [SEEN] * 16) for run in (3, 0, 1, 2, 0, 4, 1, 1)]
    texts = [measured.Text(kind, [1], trace) for kind in measured.simulation.CLASSES]
    simulated = measured.simulate(texts, costs, lambda: Fixed(2))
    # By hand: from position 0 on, two tokens a round: 2 + 1, then run 2 at position 3: 2 + 1, then run 1: 1 + 1.
    assert [(c.tokens, c.rounds) for c in simulated] == [(8, 3)] * 3
    assert simulated[0].seconds == pytest.approx(3 * (1.4 + 0.2 + 0.05))
    plain = [measured.Clock(8, 9.0, 8) for _ in texts]
    mine = [measured.Clock(8, 7.0 + i, 4, 4 * 1.65) for i in range(3)]
    rules = {"γ = 4": mine, "expected value": mine}
    told = measured.report("a pair", texts, costs, {"plain": plain, **rules}, dict.fromkeys(rules, simulated))
    row = next(line for line in told.splitlines() if line.startswith("| γ = 4"))
    speed, expected = 27 / 24, 8 / (3 * 1.65)
    gap, *parts = (float(x) for x in re.findall(r"×([\d.]+)", row))
    assert f"| {speed:.2f} [" in row and f"| {expected:.2f} |" in row
    assert gap == pytest.approx(speed / expected, abs=0.01)
    assert parts[0] * parts[1] * parts[2] == pytest.approx(gap, abs=0.03)
    assert parts == pytest.approx([(8 / 4) / (8 / 3), 9 / 8, 1.65 / 2], abs=0.01)
    assert "A plain step took 1.12 of the curve's T(1)" in told or "A plain step took 1.13" in told


def test_optimal_stopping_solves_its_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    stopping = script("optimal_stopping", monkeypatch)
    bins = len(stopping.EDGES) + 1
    draws = numpy.random.default_rng(0)
    chain = stopping.Chain(draws.dirichlet(numpy.ones(bins), bins + 1), draws.uniform(0.05, 1.0, bins))
    costs, rate = StepCosts((1.0, 1.2, 1.3, 1.6), 0.05, 0.05, overhead=0.03), 1.4

    def coming(drafted: int, survival: float, last: int) -> float:
        """The same value by trying everything, without a grid."""
        stop = -rate * costs.target[drafted]
        if drafted == len(costs.target) - 1:
            return stop
        onward = -rate * (costs.draft + (costs.overhead if drafted == 0 else 0.0))
        for here, chance in enumerate(chain.moves[last]):
            stands = survival * chain.accept[here]
            onward += chance * max(stands + coming(drafted + 1, stands, here), stop)
        return max(stop, onward)

    exact = coming(0, 1.0, bins)
    assert exact > -rate * costs.target[0]  # drafting pays here
    assert float(chain.values(costs, rate)[0][0, bins]) == pytest.approx(exact, abs=2e-3)
    rule = stopping.OptimalStopping(chain, Power(), costs, rate)
    assert rule.limit() == 3 and rule.step_on(0) and not rule.go_on(0, Features(1e-6, 1e-7, 9.0))


def test_optimal_stopping_counts_its_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    stopping = script("optimal_stopping", monkeypatch)
    sure, unsure = Features(0.995, 0.001, 0.1), Features(0.2, 0.1, 3.0)
    chain = stopping.Chain.of([Recorded([sure, unsure, sure], 1)] * 1000, Power())
    top = len(stopping.EDGES)
    assert chain.moves.sum(1) == pytest.approx(1) and chain.accept[top] == pytest.approx(0.995, abs=1e-3)
    assert chain.moves[-1, top] > 0.99 and chain.moves[top, 0] > 0.99  # the third position was never reached
    assert chain.moves[0] == pytest.approx(1 / (top + 1))

"""The engine's scripts on a tiny run: identity of every way and its resuming, and the gap that comes apart exactly."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
from test_scripts import script

from distill.benchmark.watch import Step
from distill.files import read_json, write_json
from distill.speculative.calibration import Calibration, Recorded
from distill.speculative.costs.curve import StepCosts
from distill.speculative.decode import Decoded, Round, decode
from distill.speculative.lengths import Fixed
from distill.speculative.proposal import Features

SEEN = Features(0.5, 0.2, 1.0)


def test_identity_of_every_configuration_and_its_resuming(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = script("benchmarks/identity", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["identity", str(copied), "--prompts", "2", "--tokens", "6"])
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
    monkeypatch.setattr(check, "decode_text", None)
    monkeypatch.setattr(check, "plain", None)
    monkeypatch.setattr(check, "TORCH_NOISE", -1.0)  # no tie excuses
    check.main()
    again = re.findall(r"^\| (.+) \| (\d+) \| (\d+) \| (\d+) \|$", capsys.readouterr().out, flags=re.M)
    assert [row for row in again if row[0] == "draft, γ = 3"] == [("draft, γ = 3", "1", "0", "1")]


def test_the_gap_comes_apart_into_its_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = script("benchmarks/measured_lengths", monkeypatch)
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
    stopping = script("benchmarks/optimal_stopping", monkeypatch)
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
    rule = stopping.OptimalStopping(chain, Calibration(), costs, rate)
    assert rule.limit() == 3 and rule.step_on(0) and not rule.go_on(0, Features(1e-6, 1e-7, 9.0))


def test_optimal_stopping_counts_its_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    stopping = script("benchmarks/optimal_stopping", monkeypatch)
    sure, unsure = Features(0.995, 0.001, 0.1), Features(0.2, 0.1, 3.0)
    chain = stopping.Chain.of([Recorded([sure, unsure, sure], 1)] * 1000, Calibration())
    top = len(stopping.EDGES)
    assert chain.moves.sum(1) == pytest.approx(1) and chain.accept[top] == pytest.approx(0.995, abs=1e-3)
    assert chain.moves[-1, top] > 0.99 and chain.moves[top, 0] > 0.99  # the third position was never reached
    assert chain.moves[0] == pytest.approx(1 / (top + 1))


def test_shares_of_the_bound_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = script("benchmarks/engine", monkeypatch)
    # Three rounds of two and a last one that the limit cut short; the first is accepted whole.
    rounds = [Round(8, 2, 2, 10.0), Round(11, 2, 1, 8.0), Round(13, 2, 0, 8.0), Round(14, 1, 1, 5.0)]
    result = Decoded([0] * 9, [], rounds, prefill_seconds=4.0, seconds=31.0)
    steps = [Step(8, 3, 0.0, 20.0), Step(8, 1, 0.0, 7.0)]
    found = engine.text_shares(steps, result, (6.0, 7.5), 2, 5.0)
    assert found["share"] == 18 / 26 and found["with_two"] == 19.5 / 26 and found["alone"] == 15 / 26
    assert found["tokens_per_round"] == 6 / 3 and found["round"] == 26 / 3
    assert found["overhead"] == 31 / 4 - 27 / 4
    assert found["rate"] == 8 / 31 and found["whole_rate"] == 9 / 35


def test_shares_of_a_tiny_run_and_their_resuming(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = script("benchmarks/engine", monkeypatch)
    monkeypatch.setattr(engine, "CAPACITY", 64)
    cases = "--case pytorch-own-demo --case gguf-own-same --lengths 1,2 --repeats 1 --peer-repeats 1 --tokens 10"
    rest = "--prompt-tokens 6 --threads 1 --rule-tokens 9 --rule-repeats 1"
    arguments = f"{cases} {rest}".split()
    monkeypatch.setattr(sys, "argv", ["x", str(copied), "--to", str(tmp_path / "engine.json"), *arguments])
    engine.main()
    printed = capsys.readouterr().out
    rows = [line.split(" | ") for line in printed.splitlines() if line.startswith(("| pytorch", "| gguf"))]
    assert [row[3] for row in rows if not row[3].startswith("rule")] == ["1", "2", "1", "2"]
    assert [row[3].endswith("1 texts of 9") for row in rows] == [False, False, True, False, False, True]
    same = [float(row[4]) for row in rows[3:5]]
    assert same == [2.0, 3.0]  # the target drafting for itself is accepted whole
    lengths = [row for row in rows if not row[3].startswith("rule")]
    assert all(0 < float(row[5]) <= float(row[6]) for row in lengths)
    # transformers' assisted generation is the peer of the one; of the other none was asked for.
    assert [float(row[9]) > 0 if row[0].endswith("pytorch") else row[9] == "\u2013" for row in lengths] == [True] * 4
    kept = read_json(tmp_path / "engine.json")
    del kept["cases"]["gguf-own-same"]["rule"]
    write_json(tmp_path / "engine.json", kept)
    monkeypatch.setattr(engine, "PARTS", engine.PARTS | {"rows": None, "peers": None})  # finished parts are kept
    engine.main()
    again = capsys.readouterr().out.splitlines()
    assert again[:-1] == printed.splitlines()[:-1] and "1 texts of 9" in again[-1]


@pytest.mark.parametrize("backend", ["pytorch", pytest.param("static", marks=pytest.mark.slow), "gguf"])
def test_the_soak_goes_on_where_it_stopped_and_finds_faults(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    soak = script("fuzz/soak", monkeypatch)
    monkeypatch.setattr(soak, "NOTED", 5)
    monkeypatch.setattr(soak, "LOOKED_AT", 2)
    arguments = ["soak", "--backend", backend, "--to", str(tmp_path / "soak.json"), "--prompts"]
    monkeypatch.setattr(sys, "argv", [*arguments, "10"])
    soak.main()
    kept = read_json(tmp_path / "soak.json")
    assert kept["next"] == 10 and len(kept["memory"]) == 1 and kept["counts"]["looked at"] > 0
    monkeypatch.setattr(sys, "argv", [*arguments, "15"])
    soak.main()
    assert f"{backend}: 15 prompts" in capsys.readouterr().out
    kept = read_json(tmp_path / "soak.json")
    assert kept["next"] == 15 and [len(one) for one in kept["memory"]] == [2, 1]

    # A decoder that loses the last token of a text, and a cache that holds another text than it says, are found.
    def shorter(*given: Any) -> Any:
        yield from decode(*given)
        given[5].tokens.pop()

    monkeypatch.setattr(soak, "decode", shorter)
    monkeypatch.setattr(sys, "argv", [*arguments, "20"])
    with pytest.raises(AssertionError, match="tokens instead of"):
        soak.main()

    def other(target: Any, *given: Any) -> Any:
        yield from decode(target, *given)
        held = target.lengths[0]
        target.rollback([0])
        target.extend([7] * held, want=[held - 1])

    monkeypatch.setattr(soak, "decode", other)
    with pytest.raises(AssertionError, match="the cache has drifted"):
        soak.main()

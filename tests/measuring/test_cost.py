"""Cost curves: measuring, saving, predictions."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import Scripted

from distill.decoding.costs import (
    CostCurve,
    Costs,
    doubt,
    measure_curve,
    predicted_speedups,
    save_cost_curve,
    step_seconds,
    tokens_per_round,
)
from distill.errors import DataError
from distill.files import from_json
from distill.planning.cases import llama_settings, look_ahead, probability_floor

GLM = (1, 1.027, 0.712, 0.544, 0.459, 0.389, 0.347, 0.315, 0.281, 0.256, 0.233, 0.214, 0.199, 0.186, 0.178, 0.166)
TARGET = CostCurve("big", "gguf", (64, 512), ((4.0, 5.0, 6.5), (6.0, 7.0, 9.0)), 5, machine={"cpu": "x"})


def counting(context: tuple[int, ...]) -> int:
    return (context[-1] + 1) % 10


def test_curve_is_measured_at_the_depths_that_fit() -> None:
    model = Scripted(counting, 100, 10)
    curve = measure_curve(model, "m", "x", (90, 8, 30), limit=12, repeats=5)
    assert curve.depths == (8, 30) and [len(row) for row in curve.seconds] == [12, 12] and curve.repeats == 5
    assert curve.machine["cores"] >= 1
    assert model.calls == [8, *list(range(1, 13)) * 6, 30, *list(range(1, 13)) * 6]  # one pass of each is a warm-up
    with pytest.raises(DataError, match="no room"):
        measure_curve(model, "m", "x", (90,), limit=12, repeats=5)


def test_steps_are_timed_at_their_depth() -> None:
    model = Scripted(counting, 64, 10)
    found = step_seconds(model, [1, 3], 20, 5)
    assert model.lengths == [20] and model.calls == [20, *[1, 3] * 6]  # one round is thrown away
    assert [len(seconds) for seconds in found.values()] == [5, 5]


def test_curves_measured_beside_other_work_are_doubted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second step takes ten times as long; the step sizes, 3 of them, meet it in turn."""
    fastest = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7]
    steady = [[seconds, seconds] for seconds in fastest]
    spikes = [[seconds, 9.0, 9.0] for seconds in fastest]
    assert doubt(steady) == ""
    assert doubt([*spikes[:1], *steady[1:]]) == ""  # one spike is no reason
    words = doubt([*spikes[:2], *steady[2:]])
    assert words.startswith("2 of 8 step sizes") and "measure again" in words
    readings = itertools.accumulate(itertools.cycle([0.0, 0.1, 0.0, 0.01]))
    monkeypatch.setattr("distill.decoding.costs.time", SimpleNamespace(perf_counter=lambda: next(readings)))
    curve = measure_curve(Scripted(counting, 100, 10), "m", "x", (8,), limit=3, repeats=5)
    assert "other programs" in curve.note


def test_relative_costs_and_the_bucket_below() -> None:
    assert [TARGET.at(depth)[0] for depth in (0, 64, 511, 512, 9999)] == [4.0, 4.0, 4.0, 6.0, 6.0]
    assert TARGET.relative(64) == pytest.approx([1.0, 5 / 8, 6.5 / 12])


def test_saved(tmp_path: Path) -> None:
    save_cost_curve(TARGET, tmp_path / "curve.json")
    fields = json.loads((tmp_path / "curve.json").read_text())
    assert fields.pop("format") == 1
    assert from_json(fields, CostCurve, "curve.json") == TARGET


@pytest.mark.parametrize(
    ("depths", "seconds", "message"),
    [
        ((512, 64), TARGET.seconds, "depths"),
        ((), (), "depths"),
        ((64, 512), ((1.0, 0.0), (1.0, 1.0)), "positive"),
    ],
)
def test_impossible_curves_are_refused(depths: Any, seconds: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        CostCurve("m", "x", depths, seconds)


def enumerated(accepted: Sequence[float]) -> float:
    """The mean tokens of a round, over every outcome of independent coins of which the first miss ends the round."""
    mean = 0.0
    for coins in itertools.product([True, False], repeat=len(accepted)):
        chance = math.prod(rate if coin else 1 - rate for rate, coin in zip(accepted, coins, strict=True))
        mean += chance * (1 + len([*itertools.takewhile(bool, coins)]))
    return mean


@hypothesis.settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), max_size=6), st.floats(0.01, 2))
def test_speedups_are_predicted_as_far_as_costs_and_acceptance_reach(accepted: list[float], draft: float) -> None:
    costs = [1.0 + 0.2 * m * m for m in range(1, 8)]
    assert tokens_per_round(accepted) == pytest.approx(enumerated(accepted))
    speeds = [enumerated(accepted[:n]) / (costs[n] + n * draft) * costs[0] for n in range(len(accepted) + 1)]
    assert predicted_speedups(costs, draft, accepted) == pytest.approx(speeds)
    assert predicted_speedups(costs[:2], draft, accepted) == pytest.approx(speeds[:2])


def glm() -> CostCurve:
    return CostCurve("GLM", "rpc", (0,), (tuple(m * c for m, c in enumerate(GLM, start=1)),), unit="T(1)")


def test_settings_follow_from_the_curve() -> None:
    costs, ahead, length, floor = llama_settings(glm(), [0.8] * 15, 0.05, 0)
    assert costs == "GGML_BATCH_COSTS=" + ",".join(f"{c:g}" for c in GLM)
    assert ahead == "GGML_MAX_LOOK_AHEAD=2"  # T(2) = 2.054: one accepted token never pays, two do
    assert length == "--spec-draft-n-max 11"  # 1.49×, as published
    assert max(predicted_speedups(glm().at(0), 0.05, [0.8] * 15)) == pytest.approx(1.4934, abs=1e-4)
    survivors = [0.8**i for i in range(11)]
    name, value = floor.split()
    assert name == "--spec-draft-p-min"
    assert float(value) == pytest.approx(1.4934 * (12 * 0.214 - 1) / sum(survivors), abs=0.006)
    # Where nothing pays, no draft is the advice.
    assert llama_settings(glm(), [0.3] * 15, 0.1, 0)[2:] == ["--spec-type none"]


def test_look_ahead_and_floor_by_hand() -> None:
    assert look_ahead(Costs((1.0, 1.5, 2.0), 0.1, 0.1)) == 1
    assert look_ahead(Costs((1.0, 2.2, 3.2, 3.3), 0.1, 0.1)) == 3  # 3 > 2.3 + .3; neither 1 nor 2 tokens pay
    assert look_ahead(Costs((1.0, 3.0, 5.0), 0.0, 0.0)) == 1  # nothing ever pays
    flat_end = Costs((1.0, 1.5, 2.0, 2.1), 0.1, 0.1)
    assert look_ahead(flat_end) == 1  # each token saves 1 and costs .6
    assert look_ahead(flat_end, 2.0) == 3  # it saves .5: .6 and 1.2 are too dear for one and two, 1.4 is not for three
    assert probability_floor(Costs((1.0, 1.2, 1.4), 0, 0), [1.0, 1.0], 2, 2.0) == pytest.approx(0.4)
    assert probability_floor(Costs((1.0, 3.0), 0, 0), [1.0], 1, 2.0) == 0.95

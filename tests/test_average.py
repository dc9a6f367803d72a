"""Averages of weights: the formula, the exchange in place, the choice between both candidates, and interruptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from trainings import EMA, REPLAY, interrupted_after, largest_difference, last_average, last_weights, metrics, trained
from trainings import weights as weights_of

from distill.errors import RecipeError
from distill.recipe import Average, Train, parse_section
from distill.results.training_results import evaluated_weights
from distill.run import Run
from distill.training.average import WeightAverage
from distill.training.setup import Training

TAIL = "train.average={kind: tail, share: 0.5}"
ALWAYS = "train.acceptance.every=2"


@pytest.mark.parametrize(
    "settings", [{"kind": "ema", "decay": 0.8}, {"kind": "tail", "share": 0.3}, {"kind": "tail", "share": 1.0}]
)
def test_an_average_by_hand(settings: dict[str, Any]) -> None:
    """Of 20 steps, against the same sums in fp64; the weights come back bit for bit, frozen ones are left out."""
    layer = torch.nn.Linear(5, 3)
    layer.bias.requires_grad_(False)
    average = WeightAverage(layer, parse_section(Average, settings), 20)
    history = []
    for step in range(1, 21):
        with torch.no_grad():
            layer.weight.normal_(generator=torch.Generator().manual_seed(step))
        history.append(layer.weight.detach().clone().double())
        average.update(step)
        if step == 1:
            assert not average.is_candidate
    if settings["kind"] == "ema":
        expected = sum(history[:5]) / 5  # the plain mean of 1 / (1 - decay) weights, then exponential
        for value in history[5:]:
            expected = 0.8 * expected + 0.2 * value
        assert average.count == 20
    else:
        taken = history[-round(settings["share"] * 20) :]
        expected = sum(taken) / len(taken)
        assert average.count == len(taken)
    assert average.is_candidate and list(average.values) == ["weight"]
    torch.testing.assert_close(average.values["weight"].double(), expected, rtol=1e-6, atol=1e-6)
    kept, mean = layer.weight.detach().clone(), average.values["weight"].clone()
    with pytest.raises(KeyboardInterrupt), average.in_place():
        assert torch.equal(layer.weight, mean)
        raise KeyboardInterrupt
    assert torch.equal(layer.weight, kept) and torch.equal(average.values["weight"], mean)


@pytest.fixture(scope="module", params=[EMA, TAIL])
def whole(world: Path, ready: Path, tmp_path_factory: pytest.TempPathFactory, request: Any) -> tuple[str, Path]:
    """An average and a training with it and a replay, in one piece."""
    code, run = trained(world, ready, tmp_path_factory.mktemp("whole"), request.param, ALWAYS, *REPLAY)
    assert code == 0
    return request.param, run


@pytest.mark.parametrize("killed_at", [pytest.param(7, marks=pytest.mark.slow), 9])
def test_resumed_is_uninterrupted_bit_for_bit(
    world: Path, ready: Path, whole: tuple[str, Path], tmp_path: Path, killed_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the tail, and in a replay, which starts from what was taken and is not averaged."""
    average, expected = whole
    with interrupted_after(killed_at, monkeypatch):
        assert trained(world, ready, tmp_path, average, ALWAYS, *REPLAY)[0] == 130
    code, run = trained(world, ready, tmp_path, average, ALWAYS, *REPLAY)
    assert code == 0 and largest_difference(run, expected) == 0
    one, other = last_average(run), last_average(expected)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert (run / "training.json").read_text() == (expected / "training.json").read_text()
    figures = [
        {(f.step, f.averaged): f.acceptance for f in evaluated_weights(Run(folder, None).metrics())}  # type: ignore[arg-type]
        for folder in (run, expected)
    ]
    assert figures[0] == figures[1]
    first = 2 if average == EMA else 6  # the second step that is in it
    candidates = [(step, averaged) for step in (0, 2, 4, 6, 8) for averaged in (False, True)]
    assert sorted(figures[0]) == [(step, averaged) for step, averaged in candidates if not averaged or step >= first]


@pytest.mark.parametrize("best", [True, False])
def test_the_better_of_both_is_taken(
    world: Path, ready: Path, tmp_path: Path, best: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Candidates at steps 0, 4 and 8: the last weights, and from step 4 on the average, which each see their own."""
    told = iter([0.1, 0.2, 0.3, 0.4, 0.5 if best else 0.35])
    seen = []

    def acceptance(self: Training) -> dict[str, float]:
        seen.append({name: value.detach().clone() for name, value in self.learner.named_parameters()})
        return {"acceptance": next(told), "tokens_per_round": 1.0, "rounds": 1}

    monkeypatch.setattr(Training, "acceptance", acceptance)
    code, run = trained(world, ready, tmp_path, EMA)
    assert code == 0 and next(told, None) is None
    record = json.loads((run / "training.json").read_text())
    assert record["best"]["step"] == 8 and record["best"]["averaged"] is best and record["averaged"] is best
    own, last, average = weights_of(run), last_weights(run), last_average(run)
    for name, value in own.items():
        name = f"draft.{name}"
        assert torch.equal(value, (average if best else last)[name]), name
        assert torch.equal(seen[-2][name], last[name]) and torch.equal(seen[-1][name], average[name])
    assert any(not torch.equal(last[name], value) for name, value in average.items())
    kind = "averaged weights" if best else "weights"
    assert f"the {kind} of step 8 are taken" in capsys.readouterr().err
    assert [line["step"] for line in metrics(run, "acceptance")] == [0, 4, 8]
    assert [line["step"] for line in metrics(run, "average")] == [4, 8]


@pytest.mark.parametrize("adapter", [(), ("train.adapter={rank: 4}",)])
def test_without_evaluations_the_average_is_taken(
    world: Path, ready: Path, tmp_path: Path, adapter: tuple[str, ...]
) -> None:
    code, run = trained(world, ready, tmp_path, TAIL, "train.acceptance=null", *adapter)
    record = json.loads((run / "training.json").read_text())
    assert code == 0 and record["best"] is None and record["averaged"] is True
    average, last = last_average(run), last_weights(run)
    assert average.keys() == last.keys() - {"draft.lm_head.weight"}  # tied; of adapters, nothing of the frozen base
    if not adapter:
        assert all(torch.equal(value, average[f"draft.{name}"]) for name, value in weights_of(run).items())


def test_a_damaged_average_is_named(
    world: Path, ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    with interrupted_after(5, monkeypatch):
        assert trained(world, ready, tmp_path, EMA)[0] == 130
    path = tmp_path / "tiny" / "checkpoints" / "step-000004" / "average.pt"
    path.write_bytes(path.read_bytes()[:-9] + b"otherwise")
    capsys.readouterr()
    assert trained(world, ready, tmp_path, EMA)[0] == 2
    said = capsys.readouterr().err
    assert "average.pt has not the checksum" in said and "to go on from the one before" in said


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "ema"}, "kind ema needs decay and no share"),
        ({"kind": "ema", "decay": 0.9, "share": 0.1}, "kind ema needs decay and no share"),
        ({"kind": "tail", "decay": 0.9}, "kind tail needs share and no decay"),
        ({"kind": "mean", "share": 0.9}, "known: ema, tail"),
        ({"share": 0.9}, "average.kind: is missing"),
        ({"kind": "ema", "decay": 1.0}, "decay"),
    ],
)
def test_averages_that_cannot_be_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        parse_section(Train, {"average": values})


def test_an_average_would_fill_the_zeros_of_sparsity() -> None:
    with pytest.raises(RecipeError, match="whose zeros an average would fill"):
        parse_section(Train, {"average": {"kind": "ema", "decay": 0.9}, "sparsity": {"mlp_width": 32}})

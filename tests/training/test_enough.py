"""How much is enough: curves through known points, intervals that cover, and expected acceptance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
import toys
from trainings import Trainer, metrics

from distill.commands.train import say_outcome
from distill.intervals import Interval, percentiles
from distill.recipe import Train, load_recipe
from distill.results.serialise import read_result, write_result
from distill.results.training_results import CurvePoint, LearningCurve, TrainingSummary
from distill.run import Run
from distill.sampler import Sampler
from distill.texts import Prompt
from distill.training.learning_curve import CurvePoints, curves_of, fit, predicted
from distill.training.plan import rate_share
from distill.training.validation import ServedTarget

STEPS = numpy.array([12, 18, 25, 35, 50, 71, 100, 141, 160, 200])  # of 200
COSINE = numpy.array([rate_share(step - 1, 200, Train()) for step in STEPS])


def measured(values: Any, seed: int | None = None, prompts: int = 40, scatter: float = 0.0) -> CurvePoints:
    """Points at STEPS of these acceptances; with a seed, prompts of unequal level, length and noise, and a scatter of
    the points that all prompts share."""
    random = numpy.random.default_rng(seed)
    positions = random.integers(20, 60, prompts).astype(float) if seed is not None else numpy.full(prompts, 40.0)
    points = numpy.asarray(values)[:, None] + numpy.zeros(prompts)
    if seed is not None:
        points = points + random.normal(0, 0.08, prompts) + random.normal(0, 0.03, points.shape)
        points = points + scatter * random.standard_t(5, len(points))[:, None]
    return CurvePoints(1000.0 * STEPS, points * positions, positions)


def outlook(points: CurvePoints, resamples: int = 200) -> LearningCurve:
    now = float(points.expected[-1].sum() / points.positions.sum())
    curve = LearningCurve(0.95, [CurvePoint(int(points.tokens[-1]), Interval(now, now, now))])
    return predicted(curve, points, resamples)


# ── the curve ──


@pytest.mark.parametrize(("a", "b", "c"), [(0.8, 0.2, 0.3), (0.65, 0.03, 1.1), (0.6, 0.001, 2.5), (0.5, 0.0, 1.0)])
def test_a_known_curve_is_found(a: float, b: float, c: float) -> None:
    x = STEPS / STEPS[-1]
    values = a - b * x**-c
    found = fit(x, values[None], numpy.ones(len(x)))
    assert found.at(x)[0] == pytest.approx(values, abs=0.01 * numpy.ptp(values) + 1e-9)
    assert found.rise(1, 2)[0] == pytest.approx(b * (1 - 2**-c), abs=2e-3)


def test_a_curve_never_falls() -> None:
    x = STEPS / STEPS[-1]
    found = fit(x, numpy.stack([0.6 - 0.1 * x, 0.5 + 0.1 * x]), numpy.ones(len(x)))
    assert found.rise(1, 2)[0] == 0 and found.rise(1, 2)[1] > 0


def test_too_few_points_or_a_small_span_give_no_curve() -> None:
    points = measured(0.6 - 0.05 * (STEPS / 200) ** -0.5)
    assert curves_of(points, 10) is not None
    few = CurvePoints(points.tokens[-4:], points.expected[-4:], points.positions)
    near = CurvePoints(points.tokens[4:9], points.expected[4:9], points.positions)  # 50 to 160
    assert curves_of(few, 10) is None and curves_of(near, 10) is None
    found = outlook(few)
    assert found.doubled is None and found.line == [] and "too few points" in found.sentence


def finished(steps: Any, c: float, fall: float, rate: Any) -> Any:
    """Acceptance under a curve of slope c, with what a fall of the rate adds."""
    return 0.75 - 0.15 * (numpy.asarray(steps) / 200) ** -c + fall * (1 - numpy.asarray(rate))


def bounds(c: float, fall: float, scatter: float) -> list[float]:
    """Of simulated trainings of 200 steps, by how much the bound lies above what 400 steps with another seed gave."""
    truth = finished(400, c, 0, 1) - finished(200, c, 0, 1)
    found = []
    for seed in range(40):
        curve = outlook(measured(finished(STEPS, c, fall, COSINE), seed, scatter=scatter))
        if curve.doubled is not None:
            assert f"at most {curve.doubled.high:.3f}" in curve.sentence
            of_seeds = float(numpy.random.default_rng(1000 + seed).normal(0, 0.0057))
            found.append(curve.doubled.high - curve.points[-1].acceptance.mean - truth - of_seeds)
    assert len(found) >= 30
    return found


def before_the_end(points: CurvePoints) -> CurvePoints:
    """Without the last point: the steps 12 to 160."""
    return CurvePoints(points.tokens[:-1], points.expected[:-1], points.positions)


@pytest.mark.parametrize(("c", "scatter"), [(0.15, 0.002), (0.5, 0.004)])
def test_the_interval_of_the_rise_covers(c: float, scatter: float) -> None:
    """Both ends of the 95 % interval of what twice the tokens add at the same rate."""
    truth, hits, widths = finished(320, c, 0, 1) - finished(160, c, 0, 1), 0, []
    for seed in range(50):
        curves = curves_of(before_the_end(measured(finished(STEPS, c, 0.03, 1), seed, scatter=scatter)), 200)
        assert curves is not None
        rise = curves.rise(1, 2)
        found = percentiles(rise[0], rise[1:], 0.95)
        hits += found.low <= truth <= found.high
        widths.append(found.high - found.low)
    assert hits >= 43 and numpy.median(widths) < 0.045


def test_a_cosine_gives_an_upper_bound_that_holds() -> None:
    for c, fall in ((0.15, 0.0), (0.15, 0.04), (0.5, 0.03)):
        found = bounds(c, fall, 0.002)
        assert numpy.mean(numpy.array(found) >= 0) >= 0.92 and numpy.median(found) < 0.05


def test_an_interval_that_says_nothing_is_not_printed() -> None:
    points = measured(finished(STEPS, 0.3, 0, 1), seed=1, prompts=6, scatter=0.15)
    found = outlook(before_the_end(points))
    assert found.doubled is None and "too wide" in found.sentence


# ── expected acceptance ──


@pytest.mark.parametrize("protocol", ["sampling", "match", "greedy"])
def test_expected_acceptance_by_hand(protocol: Any) -> None:
    target, draft = toys.toy(seed=1), toys.toy(seed=2)
    sampler = Sampler(temperature=0.7, top_k=20)
    served = ServedTarget(target, 60, (), sampler, protocol, 0)  # of 61 columns, the last is padding
    prompts = [Prompt(str(i), ids) for i, ids in enumerate(toys.random_prompts(3, 60, 5))]
    texts = toys.random_prompts(3, 60, 7)
    found = served.expected(draft, prompts, texts)
    for prompt, text, value in zip(prompts, texts, found, strict=True):
        total = 0.0
        for at in range(len(text)):
            ids = torch.tensor([[*prompt.ids, *text[:at]]])
            with torch.no_grad():
                own, other = (model(input_ids=ids).logits[:, -1, :60].float() for model in (target, draft))
            p, q = sampler.probabilities(own)[0], sampler.probabilities(other)[0]
            if protocol == "sampling":
                total += sum(min(float(a), float(b)) for a, b in zip(p, q, strict=True))
            elif protocol == "match":
                total += float(p[int(other.argmax())])
            else:
                total += float(own.argmax() == other.argmax())
        assert value == pytest.approx(total, abs=1e-4)
    if protocol != "match":
        assert served.expected(target, prompts, texts) == pytest.approx([len(text) for text in texts], abs=1e-4)


# ── trainings ──


def test_the_command_says_what_twice_the_tokens_would_give(train: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    """Real figures of a tiny training: the points, and the sentence at the end where it can be said."""
    run = train()
    curve = read_result(run / "training.json", TrainingSummary).curve
    assert curve is not None and len(curve.points) == 5
    said = capsys.readouterr().err
    assert (curve.sentence in said) == (curve.doubled is not None) and "wice the tokens would give" in curve.sentence
    summary = read_result(run / "training.json", TrainingSummary)
    known = replace(curve, doubled=Interval(0.6, 0.58, 0.62), unknown=None)
    write_result(run / "training.json", replace(summary, curve=known))
    say_outcome(Run(run, load_recipe(run / "config.yaml")))
    assert "Twice the tokens would give at most 0.620 expected acceptance" in capsys.readouterr().err
    points = {line["step"]: line["expected_acceptance"] for line in metrics(run, "curve")}
    assert sorted(points) == [1, 2, 3, 4, 6, 8]
    assert [point.acceptance.mean for point in curve.points] == pytest.approx(
        [points[step] for step in (2, 3, 4, 6, 8)]
    )

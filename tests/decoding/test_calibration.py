"""Calibrations: judged positions, fits that recover what data was made with, the two scores."""

from __future__ import annotations

import math
import random

import numpy
import pytest

from distill.decoding.calibration import (
    FITTED_TERMS,
    MOST_MARGIN,
    Calibration,
    Correction,
    Recorded,
    fit_calibration,
    log_loss,
    margin,
    predicted,
)
from distill.decoding.lengths import Features
from distill.errors import DataError

MARGIN = ("margin",)
SURE = Features(1.0, 0.0, 0.0)


def look(draw: random.Random) -> Features:
    top = 0.02 + 0.96 * draw.random()
    second = min(top, 1 - top) * (0.1 + 0.9 * draw.random())
    return Features(top, second, -math.log(top))


def rounds_from(truth: Calibration, count: int, seed: int = 0, longest: int = 6) -> list[Recorded]:
    """Rounds of 1..longest drafted positions whose tokens are accepted as `truth` says."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        features = [look(draw) for _ in range(draw.randint(1, longest))]
        accepted = 0
        for position, seen in enumerate(features):
            if draw.random() >= truth.accept(position, seen):
                break
            accepted += 1
        made.append(Recorded(features, accepted))
    return made


def test_only_drafted_and_reached_positions_are_judged() -> None:
    features = [Features(0.1 * i, 0.01, 1.0) for i in range(1, 5)]
    assert Recorded(features, 0).judged() == [(0, features[0], False)]
    assert Recorded(features, 2).judged() == [(0, features[0], True), (1, features[1], True), (2, features[2], False)]
    assert [y for _, _, y in Recorded(features, 4).judged()] == [True] * 4
    assert Recorded([], 0).judged() == []


def test_margin_is_the_distance_of_the_logits() -> None:
    assert margin(Features(0.6, 0.3, 1.0)) == pytest.approx(math.log(2))
    assert margin(Features(1.0, 0.0, 0.0)) == MOST_MARGIN == margin(Features(1.0, 1e-30, 0.0))


def test_logistic_is_recovered() -> None:
    truth = Calibration(-0.7, (1.3, 0.4), ("margin", "log_position"))
    fitted = fit_calibration(rounds_from(truth, 8000), truth.terms)
    assert (fitted.bias, *fitted.weights) == pytest.approx((-0.7, 1.3, 0.4), abs=0.12)
    steep = Calibration(-1.0, (2.0,), MARGIN)
    assert fit_calibration(rounds_from(steep, 6000), MARGIN).weights == pytest.approx((2.0,), abs=0.15)


def test_the_drafts_own_probability_is_the_default() -> None:
    assert Calibration().accept(3, Features(0.37, 0.2, 1.0)) == pytest.approx(0.37, rel=1e-12)
    assert 0 < Calibration().accept(0, Features(0.0, 0.0, 0.0)) < 1e-5 < 1 - 1e-5 < Calibration().accept(0, SURE) < 1


def test_logistic_fit_has_no_slope_left() -> None:
    rounds = rounds_from(Calibration(0.8), 500)
    fitted = fit_calibration(rounds, MARGIN, ridge=0.0)
    probabilities, outcomes = predicted(fitted, rounds)
    gaps = numpy.array(outcomes, float) - numpy.array(probabilities)
    margins = [margin(seen) for r in rounds for _, seen, _ in r.judged()]
    assert abs(gaps.sum()) < 1e-3 and abs((gaps * margins).sum()) < 1e-3  # the score equations


def test_separable_rows_stay_finite() -> None:
    sure, lost = Features(0.9, 0.05, 0.1), Features(0.3, 0.29, 2.0)
    fitted = fit_calibration([Recorded([sure], 1)] * 20 + [Recorded([lost], 0)] * 20, MARGIN)
    assert math.isfinite(fitted.weights[0]) and fitted.accept(0, sure) > 0.95 > 0.05 > fitted.accept(0, lost)


def test_fitting_lowers_both_scores() -> None:
    rounds = rounds_from(Calibration(2.0, (0.5,)), 4000)
    before, after = (
        predicted(one, rounds) for one in (Calibration(), fit_calibration(rounds, FITTED_TERMS["features"]))
    )
    assert log_loss(*after) < log_loss(*before) - 0.1


def test_scores_by_hand() -> None:
    assert log_loss([0.5, 0.25], [True, False]) == pytest.approx(-(math.log(0.5) + math.log(0.75)) / 2)
    assert math.isfinite(log_loss([0.0], [True]))


@pytest.mark.parametrize("name", FITTED_TERMS)
def test_no_judged_position_is_refused(name: str) -> None:
    with pytest.raises(DataError, match="no judged position"):
        fit_calibration([], FITTED_TERMS[name])


def test_a_correction_is_learnt_and_forgotten() -> None:
    """An overconfident calibration, whose .9 is .5: the correction finds it, and returns to it as its evidence ages."""
    correction, draw = Correction((4.0, 12.0)), random.Random(1)
    assert correction.probability(0.9) == pytest.approx(0.9)
    for _ in range(400):
        correction.learn(0.9, draw.random() < 0.5)
        correction.age(1)
    assert correction.probability(0.9) == pytest.approx(0.5, abs=0.08)
    correction.age(4_000)
    assert correction.probability(0.9) == pytest.approx(0.9, abs=0.01)
    correction.learn(1.0, False)  # one surprise turns nothing
    assert correction.probability(0.9) > 0.75

"""Calibrations: judged positions, fits that recover what data was made with, online learning, the two scores."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy
import pytest

from distill.errors import DataError
from distill.speculative.calibration import (
    MOST_MARGIN,
    Calibration,
    Logistic,
    Power,
    Recorded,
    Sequential,
    expected_calibration_error,
    fit_logistic,
    fit_power,
    fit_sequential,
    log_loss,
    margin,
    predicted,
)
from distill.speculative.proposal import Features


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
        survival, accepted = 1.0, 0
        for position, seen in enumerate(features):
            p = truth.accept(position, seen, survival)
            survival *= p
            if draw.random() >= p:
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


def test_power_is_recovered_and_is_the_maximum() -> None:
    for exponent in (0.3, 2.5):
        rounds = rounds_from(Power(exponent), 8000)
        fitted = fit_power(rounds)
        assert fitted.exponent == pytest.approx(exponent, rel=0.06)
        losses = [log_loss(*predicted(Power(fitted.exponent * f), rounds)) for f in (0.99, 1.0, 1.01)]
        assert losses[1] == min(losses)


def test_logistic_is_recovered() -> None:
    truth = Logistic(-0.7, (1.3, 0.4), ("margin", "log_position"))
    fitted = fit_logistic(rounds_from(truth, 8000), truth.terms)
    assert (fitted.bias, *fitted.weights) == pytest.approx((-0.7, 1.3, 0.4), abs=0.12)
    assert fit_logistic(rounds_from(Logistic(-1.0, (2.0,)), 6000)).weights == pytest.approx((2.0,), abs=0.15)


def test_logistic_fit_has_no_slope_left() -> None:
    rounds = rounds_from(Power(0.5), 500)
    fitted = fit_logistic(rounds, ridge=0.0)
    probabilities, outcomes = predicted(fitted, rounds)
    gaps = numpy.array(outcomes, float) - numpy.array(probabilities)
    margins = [margin(seen) for r in rounds for _, seen, _ in r.judged()]
    assert abs(gaps.sum()) < 1e-3 and abs((gaps * margins).sum()) < 1e-3  # the score equations


def test_separable_rows_stay_finite() -> None:
    sure, lost = Features(0.9, 0.05, 0.1), Features(0.3, 0.29, 2.0)
    fitted = fit_logistic([Recorded([sure], 1)] * 20 + [Recorded([lost], 0)] * 20)
    assert math.isfinite(fitted.weights[0]) and fitted.accept(0, sure, 1) > 0.95 > 0.05 > fitted.accept(0, lost, 1)


def test_sequential_temperatures_are_recovered() -> None:
    truth = Sequential((0.6, 1.4, 1.2))
    fitted = fit_sequential(rounds_from(truth, 12000, longest=3))
    assert fitted.temperatures == pytest.approx(truth.temperatures, rel=0.15)


def test_sequential_answers_multiply_to_the_cumulative() -> None:
    model, survival, q = Sequential((2.0, 0.5)), 1.0, (0.9, 0.8, 0.7)
    c = 1.0
    for j, top in enumerate(q):
        t = (2.0, 0.5, 0.5)[j]
        product = c * top
        expected = 1 / (1 + ((1 - product) / product) ** (1 / t))
        survival *= model.accept(j, Features(top, 0.01, 0.3), survival)
        c = min(expected, c)
        assert survival == pytest.approx(c, rel=1e-5)


def test_online_power_walks_to_the_truth() -> None:
    model = Power(1.0, rate=0.02)
    for r in rounds_from(Power(0.3), 6000, seed=3):
        model.observe(r.accepted, r.features)
    assert model.exponent == pytest.approx(0.3, rel=0.2)


def test_online_logistic_follows_a_harder_text() -> None:
    model = Logistic(0.0, (1.0,), rate=0.05, forget=0.0)
    for r in rounds_from(Logistic(-1.5, (1.0,)), 4000, seed=4):
        model.observe(r.accepted, r.features)
    assert model.shift == pytest.approx(-1.5, abs=0.35)
    still = Logistic(0.0, (1.0,))
    still.observe(0, [Features(0.9, 0.05, 0.2)])
    assert still.shift == 0.0


def test_fitting_lowers_both_scores() -> None:
    rounds = rounds_from(Power(0.25), 4000)
    before, after = predicted(Power(), rounds), predicted(fit_power(rounds), rounds)
    assert log_loss(*after) < log_loss(*before) - 0.1
    assert expected_calibration_error(*after) < 0.03 < 0.1 < expected_calibration_error(*before)


def test_scores_by_hand() -> None:
    assert log_loss([0.5, 0.25], [True, False]) == pytest.approx(-(math.log(0.5) + math.log(0.75)) / 2)
    assert math.isfinite(log_loss([0.0], [True]))
    # bins [.1, .2) and [.9, 1]: |.1 + .15 − 1| and |.95 + 1 − 2|, over 4
    assert expected_calibration_error([0.1, 0.15, 0.95, 1.0], [False, True, True, True]) == pytest.approx(0.8 / 4)


@pytest.mark.parametrize("fit", [fit_power, fit_logistic, fit_sequential])
@pytest.mark.parametrize("rounds", [[], [Recorded([Features(0.5, 0.2, 1.0)], 1)] * 50])
def test_one_outcome_alone_is_refused(fit: Callable[[list[Recorded]], Calibration], rounds: list[Recorded]) -> None:
    with pytest.raises(DataError, match="calibration"):
        fit(rounds)


def test_too_few_rounds_for_a_temperature() -> None:
    seen = Features(0.5, 0.2, 1.0)
    with pytest.raises(DataError, match="30 times"):
        fit_sequential([Recorded([seen], 1), Recorded([seen], 0)])

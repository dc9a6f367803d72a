"""Length rules on scripted features and rounds, against expectations worked out by hand and by brute force."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from distill.decoding.calibration import Calibration, Recorded, fit_calibration
from distill.decoding.costs import Costs
from distill.decoding.lengths import AcceptedRatio, BetaFilter, Features, Fixed, LengthRule, ProbabilityFloor
from distill.decoding.worth import ExpectedValue, Worth

GLM = (1, 1.027, 0.712, 0.544, 0.459, 0.389, 0.347, 0.315, 0.281, 0.256, 0.233, 0.214, 0.199, 0.186, 0.178, 0.166)
GLM_SECONDS = tuple(m * cost for m, cost in enumerate(GLM, start=1))


def look(top: float, entropy: float = 1.0) -> Features:
    return Features(top, (1 - top) / 2, entropy)


def draft(rule: LengthRule, tops: Sequence[float]) -> int:
    """How many of these positions a rule drafts, asked in the decoder's order."""
    for position in range(min(rule.limit(), len(tops))):
        if not rule.step_on(position) or not rule.go_on(position, look(tops[position])):
            return position
    return min(rule.limit(), len(tops))


def tell(rule: LengthRule, drafted: int, accepted: int, seconds: float = 1.0, top: float = 0.9) -> None:
    rule.observe(drafted, accepted, [look(top)] * drafted, seconds)


@pytest.mark.parametrize(
    ("rule", "tops", "drafted"),
    [
        (Fixed(4), [0.0] * 9, 4),
        (Fixed(0), [1.0], 0),
        (ProbabilityFloor(5, 0.6), [0.9, 0.6, 0.59, 0.9], 2),
        (ProbabilityFloor(5, 0.6), [0.5], 0),
        (ProbabilityFloor(5, 0.6), [0.9] * 9, 5),
        (ProbabilityFloor(5, 0.3, 0.7), [0.3, 0.7, 0.69, 0.9], 2),
        (ProbabilityFloor(5, 0.3, 0.7), [0.29, 0.9], 0),
    ],
)
def test_rules_without_memory(rule: LengthRule, tops: list[float], drafted: int) -> None:
    assert draft(rule, tops) == drafted


def test_accepted_ratio_needs_more_for_longer_drafts() -> None:
    rule = AcceptedRatio(length=4, base=0.2, rise=0.1, keep=0.5, longest=6)
    tell(rule, 4, 3)  # .75 ≥ .6
    assert rule.limit() == 5
    tell(rule, 5, 3)  # (1.5 + 3) / (2 + 5) = .643 < .7
    assert rule.limit() == 4
    tell(rule, 4, 4)  # (2.25 + 4) / (3.5 + 4) = .83 ≥ .6
    tell(rule, 5, 5)  # (3.125 + 5) / (3.75 + 5) = .929 ≥ .7
    tell(rule, 6, 6)
    assert rule.limit() == 6  # never above `longest`
    for _ in range(20):
        tell(rule, rule.limit(), 0)
    tell(rule, 0, 0)
    assert rule.limit() == 1


def test_beta_filter_counts_only_judged_positions() -> None:
    rule = BetaFilter(8, floor=0.3, bins=4, weight=2.0, keep=0.5)
    seen = [look(0.9), look(0.6), look(0.1), look(0.9)]
    rule.observe(4, 1, seen, 1.0)
    assert rule.counts == {(0, 3): (1.0, 1.0), (1, 2): (0.0, 1.0)}  # positions 2 and 3 were never reached
    rule.observe(1, 1, seen[:1], 1.0)
    assert rule.counts == {(0, 3): (1.5, 1.5), (1, 2): (0.0, 1.0)}  # position 1 was not drafted
    assert rule.accept(0, seen[0]) == pytest.approx((1.5 + 2 * 0.875) / 3.5)
    assert rule.accept(1, seen[1]) == pytest.approx((0.0 + 2 * 0.625) / 3.0)
    assert rule.accept(2, look(1.0)) == pytest.approx(0.875)  # nothing seen: the bin's middle
    # .929 · .417 = .387 ≥ .3; · .125 is below
    assert [rule.go_on(j, f) for j, f in enumerate(seen[:3])] == [True, True, False]
    assert rule.go_on(0, seen[0])  # a new round starts from 1


def test_beta_filter_with_a_threshold_to_begin() -> None:
    """Bins of the same middle, 7/8: survival is .875, .766, .670, .586 …"""
    tops = [0.9] * 9
    assert [draft(BetaFilter(8, 0.6, bins=4, start=start), tops) for start in (0.88, 0.87, 0.1)] == [0, 3, 3]
    assert draft(BetaFilter(8, 0.88, bins=4, start=0.87), tops) == 1  # begun, and not gone on
    assert draft(BetaFilter(8, 0.6, bins=4), tops) == 3 and draft(BetaFilter(8, 0.88, bins=4), tops) == 0


# ── expected value ──


def random_costs(draw: random.Random, most: int, draft_cost: float) -> Costs:
    steps = [1.0]
    for _ in range(most):
        steps.append(max(0.5, steps[-1] + draw.choice([-0.4, 0.0, 0.02, 0.3, 1.2])))  # jagged, sometimes falling
    return Costs(tuple(steps), draft_cost, draft_cost)


def values(costs: Costs, tops: Sequence[float], rate: float, sunk: bool) -> list[float]:
    expected = [1 + sum(math.prod(tops[:i]) for i in range(1, n + 1)) for n in range(len(tops) + 1)]
    return [e - rate * (costs.target[n] + (0 if sunk else n * costs.draft)) for n, e in enumerate(expected)]


class Lucky(ExpectedValue):
    """Takes every token to come to be accepted."""

    def hoped(self, drafted: int, survival: float) -> float:
        return 1.0


@pytest.mark.parametrize("seed", range(40))
def test_drafting_stops_only_where_perfect_luck_would_not_pay(seed: int) -> None:
    draw = random.Random(1000 + seed)
    costs = random_costs(draw, 9, 0.08)
    tops = [0.2 + 0.79 * draw.random() for _ in range(9)]
    rule = Lucky(Worth(costs), Calibration(), longest=9)
    stopped = draft(rule, tops)
    for n in range(10):  # before the first position where it stopped, perfect luck pays; there, it does not
        known = values(costs, tops[:n], rule.worth.rate, sunk=True)
        lucky = values(costs, [*tops[:n], *[1.0] * (9 - n)], rule.worth.rate, sunk=True)
        later = [lucky[k] - rule.worth.rate * (k - n) * costs.draft for k in range(n + 1, 10)]
        pays = bool(later) and max(later) > known[-1]
        if n < stopped:
            assert pays
    if stopped < 9:
        # Either the step was not begun, or its distribution showed that neither it nor luck after it pays.
        known = values(costs, tops[:stopped], rule.worth.rate, sunk=True)
        one = values(costs, tops[: stopped + 1], rule.worth.rate, sunk=True)
        lucky = values(costs, [*tops[: stopped + 1], *[1.0] * (8 - stopped)], rule.worth.rate, sunk=True)
        later = [lucky[k] - rule.worth.rate * (k - stopped - 1) * costs.draft for k in range(stopped + 2, 10)]
        assert max([one[-1], *later]) <= known[-1] + 1e-12 or rule.step_on(stopped) is False


def decode(
    rule: LengthRule, alpha: float, costs: Costs, tokens: int, seed: int, believed: float | None = None
) -> tuple[float, set[int]]:
    """Speed against plain decoding on positions accepted independently with probability α, of which the draft may
    believe something else, and the lengths used."""
    draw, seconds, made, used = random.Random(seed), 0.0, 0, set()
    top = alpha if believed is None else believed
    while made < tokens:
        n = draft(rule, [top] * (len(costs.target) - 1))
        steps = n + (n < rule.limit() and rule.step_on(n))
        accepted = next((i for i in range(n) if draw.random() >= alpha), n)
        taken = costs.target[n] + steps * costs.draft
        tell(rule, n, accepted, taken, top)
        seconds, made = seconds + taken, made + accepted + 1
        used.add(n)
    return made * costs.target[0] / seconds, used


@pytest.mark.parametrize(("draft_cost", "published"), [(0.0, 1.84), (0.05, 1.49)])
def test_published_speed_on_the_glm_curve(draft_cost: float, published: float) -> None:
    costs = Costs(GLM_SECONDS, draft_cost, draft_cost)
    best = max(decode(Fixed(n), 0.8, costs, 20_000, 1)[0] for n in (11, 13))
    assert best == pytest.approx(published, rel=0.02)
    found, used = decode(ExpectedValue(Worth(costs)), 0.8, costs, 20_000, 2)
    assert found == pytest.approx(published, rel=0.02), used


def test_nothing_to_win_costs_little() -> None:
    costs = Costs(GLM_SECONDS, 0.1, 0.1)
    for alpha in (0.05, 0.3, 0.5):
        assert decode(ExpectedValue(Worth(costs)), alpha, costs, 8_000, 3)[0] > 0.97


def test_overconfident_draft_costs_little() -> None:
    """Its distribution says .95, a tenth is accepted: losses are noticed and bounded."""
    costs = Costs(GLM_SECONDS, 0.05, 0.05)
    assert decode(ExpectedValue(Worth(costs)), 0.1, costs, 20_000, 5, believed=0.95)[0] > 0.9


def test_plain_decoding_until_a_draft_may_be_worth_it() -> None:
    """Rounds that lose too much end drafting; it is tried again as what is known of it ages."""
    rule = ExpectedValue(Worth(Costs((1.0, 1.1, 1.2), 0.3, 0.3)))
    assert rule.step_on(0) and rule.go_on(0, look(0.9)) and rule.step_on(1)  # nothing is known: it is tried
    for _ in range(6):
        tell(rule, 2, 0, 1.8)
    tokens = 0
    while not rule.step_on(0):
        tell(rule, 0, 0, 1.0)
        tokens += 1
    assert 20 < tokens < 400


def test_a_calibration_accepted_whole_is_evidence() -> None:
    """Where drafting a token costs half a plain step and nearly all are accepted, the first round drafts: in
    ik_llama.cpp a draft of .49 T(1), whose rounds of calibration had all been accepted, was never asked."""
    costs = Costs(tuple(t / 108 for t in (108, 140, 146, 145, 144, 147, 158, 171)), 53 / 108, 53 / 108)
    whole = fit_calibration([Recorded([look(0.6)] * 8, 8)] * 20, ("logit_top",))
    none = fit_calibration([Recorded([look(0.6)] * 8, 0)] * 20, ("logit_top",))
    assert (whole.accepted, whole.judged, none.accepted, none.judged) == (160, 160, 0, 20)
    assert whole.accept(0, look(0.6)) > 0.97 and none.accept(0, look(0.6)) < 0.12
    # A bias alone: the slope of the likelihood is that of its prior, of variance 1.
    assert 160 * (1 - whole.accept(0, look(0.6))) == pytest.approx(whole.bias)
    assert 20 * none.accept(0, look(0.6)) == pytest.approx(-none.bias)
    for alpha, best in ((0.95, 1.37), (0.9, 1.2)):
        assert decode(ExpectedValue(Worth(costs), whole, longest=7), alpha, costs, 4_000, 1, 0.6)[0] > 0.97 * best
    assert decode(ExpectedValue(Worth(costs), none, longest=7), 0.05, costs, 4_000, 1, 0.6)[0] > 0.98


@pytest.mark.parametrize("top", [0.0, 1e-6, 1.0])
@pytest.mark.parametrize(
    ("target", "step"),
    [((1.0, 0.9, 0.8, 0.7), 0.1), ((1.0, 1.5, 2.0, 2.5), 3.0), ((1.0,), 0.1), ((1.0, 1.0), 0.0)],
    ids=["T(m) falls", "a draft slower than the target", "no room", "free"],
)
def test_odd_drafts_and_clocks_lose_little(target: tuple[float, ...], step: float, top: float) -> None:
    """One-hot or uniform distributions, of which one token in ten is right; and a clock that jumps."""
    costs = Costs(target, step, step)
    rule = ExpectedValue(Worth(costs))
    assert decode(rule, 0.1, costs, 4_000, 3, believed=top)[0] > 0.97
    rate = rule.worth.rate
    for seconds in (1e9, -5.0, float("inf")):
        tell(rule, 0, 0, seconds)
    assert rate / 2 < rule.worth.rate < 2 * rate


def test_overhead_and_the_two_token_step_are_weighed_before_drafting() -> None:
    def starts(draft_two: float, overhead: float, whole: bool) -> bool:
        rule = Lucky(Worth(Costs((1.0, 1.5), 0.2, draft_two, overhead), 1e9), Calibration())
        tell(rule, 1, 1 if whole else 0, 1.5)  # as priced
        rule.worth.begin(1.0)
        rule.behind(2 if whole else 1)
        return rule.step_on(0)

    # one lucky token brings 1 and costs .5 + .2
    assert starts(0.2, 0.0, False) and starts(0.2, 0.29, False) and not starts(0.2, 0.31, False)
    assert starts(0.6, 0.0, False) and not starts(0.6, 0.0, True) and starts(0.45, 0.0, True)


def test_text_that_is_read_apart_is_no_price_of_the_round() -> None:
    """A round's seconds are told without it, so that rounds which take what they cost correct no cost."""
    costs = Costs((1.0, 1.0, 1.0), 0.1, 0.1, draft_prompt=0.01)
    rule = ExpectedValue(Worth(costs))
    for _ in range(20):
        rule.behind(300)
        assert rule.step_on(0) and rule.go_on(0, look(0.99))
        rule.caught_up(0.01)
        rule.observe(1, 1, [look(0.99)], 1.0 + 0.1)
    assert rule.costs == costs


def test_a_prompt_is_read_where_the_text_left_earns_it_back() -> None:
    """A length of 2 whose tokens are all right saves a second in three tokens; the prompt takes .9 seconds more."""
    costs = Costs((1.0, 1.1, 1.2), 0.2, 0.2, draft_prompt=0.01)

    def starts(left: float, *lasted: int, by_text: int = 0) -> bool:
        rule = Lucky(Worth(costs, 1e9), Calibration(judged=1))
        for tokens in lasted:
            rule.begin()
            for _ in range(tokens):
                rule.observe(0, 0, (), 1.0)
        rule.begin()
        for _ in range(by_text):
            rule.worth.learn(1, 1.0, 1)
        rule.worth.begin(1.0)
        rule.behind(90, left)
        assert by_text or Lucky(Worth(costs)).step_on(0)  # of which nothing is known is tried
        return rule.step_on(0)

    # Three tokens in 1.6 seconds: .4667 saved a token, and the prompt takes .9.
    earned = 0.9 / (1.4 / 3)
    assert starts(earned + 0.01) and not starts(earned - 0.01)
    assert starts(50, 2) and starts(50, 1, 3) and not starts(50, 1)  # texts before tell how long they last
    assert starts(2.2) and not starts(2.2, by_text=4)  # of which text and counts draft a fifth


def test_rate_is_a_moving_average() -> None:
    rule = ExpectedValue(Worth(Costs((2.0, 2.0), 0.0, 0.0), 1e9))
    assert rule.worth.rate == pytest.approx(0.5)
    tell(rule, 1, 1, 1.0)
    assert rule.worth.rate == pytest.approx((16 + 2) / (32 + 1))
    short = ExpectedValue(Worth(Costs((2.0, 2.0), 0.0, 0.0), 1.0))
    for _ in range(40):
        tell(short, 1, 1, 1.0)
    assert short.worth.rate == pytest.approx(2.0)


def test_calibration_is_used() -> None:
    for bias, drafts in ((-1.0, True), (-9.0, False)):
        rule = ExpectedValue(Worth(Costs((1.0, 1.05, 1.1, 1.15), 0.0, 0.0)), Calibration(bias))
        rule.limit()
        assert rule.go_on(0, look(0.8)) == drafts

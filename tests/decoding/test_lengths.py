"""Length rules on scripted features and rounds, against expectations worked out by hand and by brute force."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from distill.decoding.costs import Costs, tokens_per_round
from distill.decoding.drafters import ChainDraft
from distill.decoding.lengths import (
    BUDGET,
    SHARE,
    AcceptedRatio,
    Adaptive,
    BetaFilter,
    Drafting,
    Fixed,
    LengthRule,
    ProbabilityFloor,
)

GLM = (1, 1.027, 0.712, 0.544, 0.459, 0.389, 0.347, 0.315, 0.281, 0.256, 0.233, 0.214, 0.199, 0.186, 0.178, 0.166)
GLM_SECONDS = tuple(m * cost for m, cost in enumerate(GLM, start=1))


def drafted(rule: LengthRule, tops: Sequence[float], unread: int = 1, left: float = math.inf) -> ChainDraft:
    """The chain that a rule drafts if these are the draft's probabilities, asked as the decoder asks."""
    chain = ChainDraft(rule, random.random, True, len(tops), (), Drafting(unread, left))
    while chain.goes_on():
        chain.drafting.steps.append(1 if chain.drafting.steps else unread)
        if chain.decides(tops[len(chain.tokens)]):
            chain.tokens.append(0)
    return chain


def draft(rule: LengthRule, tops: Sequence[float]) -> int:
    """How many of these positions a rule drafts."""
    return len(drafted(rule, tops).tokens)


def tell(rule: LengthRule, nodes: int, accepted: int, seconds: float = 1.0) -> None:
    rule.observe(Drafting(), nodes, accepted, seconds)


@pytest.mark.parametrize(
    ("rule", "tops", "drafted"),
    [
        (Fixed(4), [0.01] * 9, 4),
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
    judged = [(0, 0.9, 1.0), (1, 0.6, 0.0)]
    rule.observe(Drafting(judged=judged), 4, 1, 1.0)
    assert rule.counts == {(0, 3): (1.0, 1.0), (1, 2): (0.0, 1.0)}  # positions 2 and 3 were never reached
    rule.observe(Drafting(judged=judged[:1]), 1, 1, 1.0)
    assert rule.counts == {(0, 3): (1.5, 1.5), (1, 2): (0.0, 1.0)}  # position 1 was not drafted
    assert rule.chance(0, 0.9) == pytest.approx((1.5 + 2 * 0.875) / 3.5)
    assert rule.chance(1, 0.6) == pytest.approx((0.0 + 2 * 0.625) / 3.0)
    assert rule.chance(2, 1.0) == pytest.approx(0.875)  # nothing seen: the bin's middle
    assert draft(rule, [0.9, 0.6, 0.1, 0.9]) == 2  # .929 · .417 = .387 ≥ .3; · .125 is below


def test_beta_filter_with_a_threshold_to_begin() -> None:
    """Bins of the same middle, 7/8: survival is .875, .766, .670, .586 …"""
    tops = [0.9] * 9
    assert [draft(BetaFilter(8, 0.6, bins=4, start=start), tops) for start in (0.88, 0.87, 0.1)] == [0, 3, 3]
    assert draft(BetaFilter(8, 0.88, bins=4, start=0.87), tops) == 1  # begun, and not gone on
    assert draft(BetaFilter(8, 0.6, bins=4), tops) == 3 and draft(BetaFilter(8, 0.88, bins=4), tops) == 0


# ── The adaptive length ──


def knowing(costs: Costs, acceptance: float, longest: int = 15) -> Adaptive:
    """A rule that has judged so many tokens that its acceptance is this at every position and confidence."""
    rule = Adaptive(costs, longest)
    for mean in (*rule._positions, *rule._confidences):
        mean._sum, mean._weight = 1e9 * acceptance, 1e9
    return rule


def rates(costs: Costs, acceptance: float, longest: int) -> list[float]:
    """Expected tokens per second of every length, by the formula."""
    tokens = [tokens_per_round([acceptance] * n) for n in range(longest + 1)]
    return [expected / (costs.target[n] + n * costs.draft) for n, expected in enumerate(tokens)]


@pytest.mark.parametrize("seed", range(40))
def test_the_length_of_most_expected_tokens_per_second_is_drafted(seed: int) -> None:
    """By brute force, on jagged curves, which may fall; plain decoding is one of the lengths."""
    draw, steps = random.Random(seed), [1.0]
    for _ in range(9):
        steps.append(max(0.5, steps[-1] + draw.choice([-0.4, 0.0, 0.02, 0.3, 1.2])))
    costs, acceptance = Costs(tuple(steps), draw.choice([0.02, 0.2, 0.5]), 0.0), draw.uniform(0.1, 0.99)
    every = rates(costs, acceptance, 9)
    assert draft(knowing(costs, acceptance), [0.7] * 9) == every.index(max(every))


def test_unlikely_tokens_end_a_chain_and_likely_ones_lengthen_it() -> None:
    """What a step has shown is compared with all that may follow, the seconds of the step included."""
    rule = knowing(Costs((1.0, 1.2, 1.4, 1.6, 1.8), 0.3, 0.3), 0.6)
    rule._confidences[0]._sum, rule._confidences[-1]._sum = 0.0, 1e9  # never right, always right
    # Of .6 each, one: 1.6 / 1.5 is more than 1 and than 1.96 / 2. After a sure one: 2.6 / 2 is more than 2 / 1.5.
    assert draft(rule, [0.6] * 4) == 1 and draft(rule, [0.999, 0.6, 0.6, 0.6]) == 1
    assert draft(rule, [0.999, 0.999, 0.999, 0.6]) == 1  # 2 / 1.5 = 1.33: a step costs 0.3, and promises 0.6 more
    flat = knowing(Costs((1.0, 1.0, 1.0, 1.0, 1.0), 0.3, 0.3), 0.6)
    flat._confidences[0]._sum, flat._confidences[-1]._sum = 0.0, 1e9
    assert [draft(flat, [top] * 4) for top in (0.001, 0.6, 0.999)] == [0, 1, 3]


def decode(rule: LengthRule, alpha: float, costs: Costs, tokens: int, seed: int, top: float | None = None) -> float:
    """Speed against plain decoding if tokens are accepted independently with probability α; the draft may show another
    probability."""
    draw, seconds, made = random.Random(seed), 0.0, 0
    while made < tokens:
        chain = drafted(rule, [alpha if top is None else top] * (len(costs.target) - 1))
        n = len(chain.tokens)
        accepted = next((i for i in range(n) if draw.random() >= alpha), n)
        chain.judge(n, accepted)
        taken = costs.target[n] + len(chain.drafting.steps) * costs.draft
        rule.observe(chain.drafting, n, accepted, taken)
        seconds, made = seconds + taken, made + accepted + 1
    return made * costs.target[0] / seconds


@pytest.mark.parametrize(("draft_cost", "published"), [(0.0, 1.84), (0.05, 1.49)])
def test_published_speed_on_the_glm_curve(draft_cost: float, published: float) -> None:
    costs = Costs(GLM_SECONDS, draft_cost, draft_cost)
    assert max(rates(costs, 0.8, 15)) == pytest.approx(published, abs=0.01)
    assert decode(Adaptive(costs), 0.8, costs, 8_000, 2) > 0.98 * published


def test_a_draft_that_is_nearly_always_right_is_asked_for_long_chains() -> None:
    """T(5) is 1.5 T(1) and 24 of 25 tokens are right: 1.86 tokens a round were drafted on such a pair."""
    costs = Costs(tuple(1 + m / 8 for m in range(9)), 0.15, 0.15)
    best = max(rates(costs, 0.96, 8))
    assert rates(costs, 0.96, 8).index(best) == 8
    rule, right, lengths = Adaptive(costs, 8), 0, []
    for _ in range(40):
        chain = drafted(rule, [0.96] * 8)
        n = len(chain.tokens)
        accepted = min(n, 24 - right % 25)
        right += accepted + (accepted < n)
        chain.judge(n, accepted)
        rule.observe(chain.drafting, n, accepted, costs.target[n] + n * 0.15)
        lengths.append(n)
    assert lengths[0] >= 4 and {*lengths[10:]} <= {0, 8} and lengths.count(0) <= 1, lengths  # a plain round may be due


@pytest.mark.parametrize("top", [0.0, 1e-6, 0.5, 0.95, 1.0])
@pytest.mark.parametrize(
    ("target", "step"),
    [(GLM_SECONDS, 0.05), ((1.0, 1.5, 2.0, 2.5), 3.0), ((1.0, 1.3, 1.4, 1.5), 0.45), ((1.0,), 0.1), ((1.0, 1.0), 0.0)],
    ids=["GLM", "a draft slower than the target", "half a step", "no room", "free"],
)
def test_a_session_loses_no_more_than_its_budget_and_share(target: tuple[float, ...], step: float, top: float) -> None:
    """Of a draft that is never right, whatever it shows; and clocks that jump change little."""
    costs, tokens = Costs(target, step, step), 2_000
    rule = Adaptive(costs)
    lost = tokens / decode(rule, 0.0, costs, tokens, 3, top) - tokens
    assert lost <= BUDGET + SHARE * tokens + (target[-1] + len(target) * step)
    for seconds in (1e9, -5.0, math.inf):
        tell(rule, 0, 0, seconds)
    assert 0.5 < rule._seconds("plain", 0) < 2


def test_a_kind_of_round_that_is_slower_is_tried_again() -> None:
    """Each trial is expected to lose .5 tokens' time: one in 100 tokens. Its token is verified, however unlikely."""
    costs = Costs((1.0, 1.2), 0.3, 0.3)
    rule, tokens, tried = knowing(costs, 0.0, 1), 0, []
    while tokens < 500:
        chain = drafted(rule, [0.5])
        if chain.tokens:
            tried.append(tokens)
        rule.observe(chain.drafting, len(chain.tokens), 0, 1.5 if chain.tokens else 1.0)
        tokens += 1
    assert tried == [100, 201, 302, 403]
    rule, tokens, plain = knowing(costs, 1.0, 1), 0, []  # 2 tokens in 1.5: a plain round loses a third of a token
    for number in range(200):
        n = draft(rule, [0.999])
        if not n:
            plain.append(number)
        rule.observe(Drafting(steps=[1] * n), n, n, 1.5 if n else 1.0)
    assert plain == [34, 69, 104, 139, 174]


def test_the_rounds_of_a_session_correct_what_was_timed() -> None:
    """Rounds of the draft take 1.6 times what was timed, so that they are slower than plain ones."""
    costs = Costs((1.0, 1.1, 1.2, 1.3), 0.2, 0.2)
    rule = knowing(costs, 0.5)
    assert draft(rule, [0.5] * 3) == 1
    for _ in range(20):
        rule.observe(Drafting(steps=[1]), 1, 1, 1.6 * 1.3)
    assert draft(rule, [0.5] * 3) == 0 and rule._seconds("draft", 1, 0.2) == pytest.approx(1.6 * 1.3, rel=0.06)
    for _ in range(20):  # the machine is as much slower
        tell(rule, 0, 0, 1.6)
    assert draft(rule, [0.5] * 3) == 1


def test_a_first_step_of_two_tokens_is_weighed() -> None:
    rule = knowing(Costs((1.0, 1.3), 0.2, 0.8), 1.0)
    assert [len(drafted(rule, [0.99], unread).tokens) for unread in (1, 2)] == [1, 0]  # 2 / 1.5 and 2 / 2.1


def test_a_prompt_is_read_if_the_text_left_earns_it_back() -> None:
    """Three tokens in 1.6 seconds and a third of a prompt's 0.9 for each of the tokens left."""
    rule = knowing(Costs((1.0, 1.1, 1.2), 0.2, 0.2, draft_prompt=0.01), 1.0)
    enough = 3 * 0.9 / (3 - 1.6)
    assert [len(drafted(rule, [0.99] * 2, 90, enough + more).tokens) for more in (-0.01, 0.01)] == [0, 2]
    # What it took is lost as the text goes on, or when the next one begins.
    rule.observe(Drafting(steps=[1, 1], read=90, reading=0.9, left=10), 2, 2, 1.6)
    assert rule._lost["draft"] == pytest.approx(-1.4 + 0.27)
    rule.observe(Drafting(steps=[1, 1], read=90, reading=0.9, left=30), 2, 2, 1.6)
    assert rule._lost["draft"] == pytest.approx(-2.8 + 0.9 + 0.09)


def test_text_is_taken_if_it_promises_more_than_the_draft() -> None:
    """The lookup's tokens against a round of the draft, of the same rule, and against plain decoding."""
    costs = Costs((1.0, 1.1, 1.2, 1.3, 1.4), 0.2, 0.2)
    best, by_text = max(rates(costs, 0.8, 4)), []
    for chance in (0.05, 0.5, 0.7, 0.9, 1.0):
        rule, found = knowing(costs, 0.8), Drafting(most=4)
        for _ in range(4):
            found.append(chance)
        offers = rates(Costs(costs.target, 0.0, 0.0), chance, 4)
        length = max(range(1, 5), key=offers.__getitem__)
        assert rule.size(found) == (length if offers[length] > 1 else 0)
        size = rule.size(found, Drafting(most=4))
        assert size == (length if offers[length] > best else 0)
        by_text.append(size)
    assert by_text[0] == 0 and by_text[-1] == 4

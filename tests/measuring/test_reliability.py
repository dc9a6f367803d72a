"""distill/measuring/acceptance.py: by hand, against enumerated rounds, and on draws that keep their promise."""

from __future__ import annotations

import math
from random import Random

import pytest
from table_model import TableModel
from toys import random_prompts, speculative

from distill.decoding.calibration import Recorded
from distill.decoding.lengths import Features
from distill.measuring.acceptance import reliability
from distill.measuring.evaluation_results import Reliability
from distill.measuring.measure import decode_rounds
from distill.recipe import Evaluate


def recorded(accepted: int, *tops: float) -> Recorded:
    return Recorded(tuple(Features(top, (1 - top) / 2, 1.0) for top in tops), accepted)


def test_by_hand() -> None:
    """Tokens behind a rejection were not judged, but the running product there did not come true."""
    token, product = reliability([[recorded(1, 0.9, 0.8, 0.5)], [recorded(2, 0.95, 0.85), recorded(0, 0.3)], []])
    assert (token.of, product.of) == ("token", "product")
    # judged: .9 ✓ .8 ✗; .95 ✓ .85 ✓; .3 ✗
    assert token.tokens == 5 and token.promised == pytest.approx((0.9 + 0.8 + 0.95 + 0.85 + 0.3) / 5)
    assert token.accepted.mean == 3 / 5
    assert [(one.low, one.tokens, one.accepted.mean) for one in token.bins] == [(0.3, 1, 0), (0.8, 2, 0.5), (0.9, 2, 1)]
    assert [one.promised for one in token.bins] == pytest.approx([0.3, 0.825, 0.925])
    assert token.error == pytest.approx((0.3 + 2 * (0.825 - 0.5) + 2 * (1 - 0.925)) / 5)
    # products: .9 ✓ .72 ✗ .36 ✗; .95 ✓ .8075 ✓; .3 ✗
    assert product.tokens == 6 and product.accepted.mean == 3 / 6
    assert [(one.tokens, one.promised, one.accepted.mean) for one in product.bins] == [
        (2, pytest.approx(0.33), 0),
        (1, pytest.approx(0.72), 0),
        (1, pytest.approx(0.8075), 1),
        (2, pytest.approx(0.925), 1),
    ]
    assert reliability([[]]) == reliability([[Recorded((), 0)]]) == []


def promising(count: int, bias: float, seed: int) -> list[Reliability]:
    """Drafts of up to three tokens, accepted with the probability that they promise, raised to a power."""
    random, prompts = Random(seed), []
    for _ in range(40):
        own = []
        for _ in range(count):
            tops = [random.random() for _ in range(3)]
            accepted = next((at for at, top in enumerate(tops) if random.random() >= top**bias), 3)
            own.append(recorded(accepted, *tops))
        prompts.append(own)
    return reliability(prompts)


def test_kept_promises_have_the_error_of_chance() -> None:
    for one in promising(100, 1, seed=0):
        assert one.error_of_chance / 3 < one.error < 2 * one.error_of_chance < 0.03, one.of
        inside = sum(low_high.low <= row.promised <= low_high.high for row in one.bins for low_high in [row.accepted])
        assert inside >= 7, one.of  # of ten 90 % intervals
    token, _ = promising(100, 3, seed=0)  # promises p, keeps p³: ∫ p − p³ over judged tokens
    assert token.error > 0.1 > 5 * token.error_of_chance and token.promised > token.accepted.high


def test_decoded_rounds_carry_the_draft_s_probabilities() -> None:
    """Recomputed from the draft's table at each place of the text; the rounds are as without features."""
    target = TableModel(11, seed=1)
    draft = target.near(1.0, seed=2)
    prompts = random_prompts(3, 11, seed=4)
    found = decode_rounds(target, draft, prompts, Evaluate(new_tokens=24, length=3), (), "rounds")
    judged = []
    for prompt, rounds, seen in zip(prompts, found.rounds, found.seen, strict=True):
        text = [*prompt, *speculative(target, draft, prompt, 24, 3).tokens]
        assert [one.accepted for one in rounds] == [one.accepted for one in seen]
        for round_, own in zip(rounds, seen, strict=True):
            assert len(own.features) == round_.drafted
            for position, features, accepted in own.judged():
                place = round_.depth + 1 + position  # the newest token is read with the drafted ones
                row = draft.table[draft.place(text[:place])].softmax(-1)
                assert features.top == pytest.approx(float(row.max()), rel=1e-5)
                assert accepted == (int(row.argmax()) == text[place])
                judged.append((features.top, accepted))
    token, product = reliability(found.seen)
    assert token.tokens == len(judged) and product.tokens == sum(len(one.features) for own in found.seen for one in own)
    bins: dict[int, list[tuple[float, bool]]] = {}
    for top, accepted in judged:
        bins.setdefault(min(int(10 * top), 9), []).append((top, accepted))
    by_loops = math.fsum(abs(math.fsum(top - accepted for top, accepted in own)) for own in bins.values()) / len(judged)
    assert token.error == pytest.approx(by_loops)

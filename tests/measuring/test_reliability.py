"""The calibration error of `eval`: by hand, against enumerated rounds, and on draws that keep their promise."""

from __future__ import annotations

import math

import pytest
from table_model import TableModel
from toys import random_prompts, speculative

from distill.decoding.calibration import Recorded
from distill.decoding.lengths import Features
from distill.decoding.rules import Rules
from distill.measuring.evaluation import calibration_error
from distill.measuring.measure import decode_rounds


def recorded(accepted: int, *tops: float) -> Recorded:
    return Recorded(tuple(Features(top, (1 - top) / 2, 1.0) for top in tops), accepted)


def test_by_hand() -> None:
    """Tokens behind a rejection were not judged."""
    found = calibration_error([[recorded(1, 0.9, 0.8, 0.5)], [recorded(2, 0.95, 0.85), recorded(0, 0.3)], []])
    assert found is not None
    # .9 ✓ .8 ✗; .95 ✓ .85 ✓; .3 ✗
    assert found.tokens == 5 and found.promised == pytest.approx((0.9 + 0.8 + 0.95 + 0.85 + 0.3) / 5)
    assert found.accepted.mean == 3 / 5
    assert found.error == pytest.approx((0.3 + 2 * (0.825 - 0.5) + 2 * (1 - 0.925)) / 5)
    assert calibration_error([[]]) is calibration_error([[Recorded((), 0)]]) is None


def test_decoded_rounds_carry_the_draft_s_probabilities() -> None:
    """Recomputed from the draft's table at each place of the text; the rounds are as without features."""
    target = TableModel(11, seed=1)
    draft = target.near(1.0, seed=2)
    prompts = random_prompts(3, 11, seed=4)
    found = decode_rounds(target, draft, prompts, 3, 24, Rules(), "rounds")
    judged = []
    for prompt, seen in zip(prompts, found, strict=True):
        decoded = speculative(target, draft, prompt, 24, 3)
        text = [*prompt, *decoded.tokens]
        for round_, own in zip(decoded.rounds, seen, strict=True):
            assert (own.drafted, own.accepted) == (round_.drafted, round_.accepted)
            for position, features, accepted in own.judged():
                place = round_.depth + 1 + position  # the newest token is read with the drafted ones
                row = draft.table[draft.place(text[:place])].softmax(-1)
                assert features.top == pytest.approx(float(row.max()), rel=1e-5)
                assert accepted == (int(row.argmax()) == text[place])
                judged.append((features.top, accepted))
    token = calibration_error(found)
    assert token is not None and token.tokens == len(judged)
    bins: dict[int, list[tuple[float, bool]]] = {}
    for top, accepted in judged:
        bins.setdefault(min(int(10 * top), 9), []).append((top, accepted))
    by_loops = math.fsum(abs(math.fsum(top - accepted for top, accepted in own)) for own in bins.values()) / len(judged)
    assert token.error == pytest.approx(by_loops)

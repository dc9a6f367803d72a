"""A draft that reads the last tokens of a text: its logits are those of a model that was given these alone."""

from __future__ import annotations

import random

import pytest
import torch
from table_model import TableModel
from toys import toy

from distill.decoding.configured import make_drafter
from distill.decoding.decode import Decoded, decode, plain
from distill.decoding.rules import Rules
from distill.engines.model import Model, RecentContext
from distill.engines.torch.model import TorchModel
from distill.recipe import Configuration
from distill.sampler import Sampler

V, MOST = 61, 12


class Fresh(TorchModel):
    """Keeps what it was given since it was last empty."""

    given: list[int]

    def extend(self, tokens, counts=None, parents=None, want=None):  # type: ignore[no-untyped-def]
        held = self.lengths[0]
        self.given = [*(self.given[:held] if held else []), *tokens]
        return super().extend(tokens, counts, parents, want)


def test_logits_are_those_of_the_last_tokens() -> None:
    """After any calls, of the text as it is then; of at least half as many as are allowed, less what a round takes
    back."""
    model, draws = toy(vocabulary=V), random.Random(0)
    inner = Fresh(model)
    recent, text, begun = RecentContext(inner, MOST), list[int](), 0
    for turn in range(150):
        deep = turn < 100
        if draws.random() < 0.3 and text:
            del text[draws.choice([0, draws.randrange(len(text))]) if deep else len(text) - 2 :]
            recent.rollback([len(text)])
        fresh = [draws.randrange(V) for _ in range(draws.choice([1, 1, 2, 30 if deep else 3]))]
        text += fresh
        logits = recent.extend(fresh, want=[len(fresh) - 1]).full()
        assert recent.lengths == [len(text)] and recent.capacity > 10**9
        held = inner.lengths[0]
        begun += held == MOST // 2
        assert inner.given == text[-held:] and (1 if turn < 110 else MOST // 2 - 2) <= held <= MOST
        with torch.inference_mode():
            expected = model(input_ids=torch.tensor([text[-held:]])).logits[0, -1:]
        torch.testing.assert_close(logits, expected.float(), atol=1e-4, rtol=1e-4)
    assert begun > 10 and len(text) > MOST
    with pytest.raises(ValueError, match="last 13 tokens are wanted, and 12 are read"):
        recent.extend([1] * 13)
    with pytest.raises(ValueError, match="chains, not trees"):
        recent.extend([1], parents=[-1])
    with pytest.raises(ValueError, match="needs two"):
        RecentContext(inner, 1)


@pytest.mark.parametrize("verifier", ["greedy", "token"])
def test_a_draft_with_a_short_context_goes_on(verifier: str) -> None:
    """Beyond its context, too, with the target's text; a table that knows two tokens drafts as if it read all."""
    target = TableModel(5)
    draft, short = target.near(0.5, 1), target.near(0.5, 1, capacity=70)
    sampler = Sampler(0) if verifier == "greedy" else Sampler()
    settings = {"length": 3, "sampler": "greedy" if verifier == "greedy" else "recipe", "verifier": verifier}

    def text(model: Model, **more: int) -> Decoded:
        chance, result = random.Random(3).random, Decoded()
        drafter = make_drafter(Configuration.model_validate(settings | more), model, sampler, chance)
        for _ in decode(target, drafter, [1, 2] * 60, 80, Rules(sampler, verifier, random=chance), result):
            pass
        return result

    whole, part = text(draft), text(short, draft_context=64)
    assert part.tokens == whole.tokens
    assert [one.accepted for one in part.rounds] == [one.accepted for one in whole.rounds] and short.lengths[0] <= 64
    if verifier == "greedy":
        assert part.tokens == plain(target, [1, 2] * 60, 80, rules=Rules(sampler, verifier)).tokens
        assert sum(one.drafted for one in text(short).rounds) == 0  # nothing, where it would read all

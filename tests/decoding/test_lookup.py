"""What a lookup proposes.

That sampled texts follow the target's distribution: test_exact_decoding.py."""

from __future__ import annotations

import itertools
import operator
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from distill.decoding.costs import Costs
from distill.decoding.drafters import USUAL, FallbackDrafter, LookupDrafter, ModelDrafter
from distill.decoding.lengths import MEMORY, Adaptive, Drafting, Fixed
from distill.decoding.table_drafter import TableDrafter
from distill.decoding.text_index import LONGEST, TextIndex
from distill.engines.torch.model import TorchLogits
from distill.recipe import Sampler


def copied(text: list[int], place: int, count: int) -> list[int]:
    """What follows a place, copied token by token, so that a copy may read what it wrote."""
    whole = list(text)
    for i in range(count):
        whole.append(whole[place + i])
    return whole[len(text) :]


def test_lookup_finds_the_longest_ending() -> None:
    drafter = LookupDrafter(3)
    drafter.begin([])
    assert drafter.propose([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], 8, ()).tokens == [4, 9, 1]  # where 1, 2 was found last
    assert drafter.propose([1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 7, 7, 3], 2, ()).tokens == [9, 1]
    assert drafter.propose([1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 7, 7, 3, 8], 2, ()).tokens == []
    drafter.begin([])
    assert drafter.propose([5, 6, 7, 5], 8, (6,)).tokens == [6]
    assert LookupDrafter(4, shortest=2).propose([5, 6, 7, 5], 8, ()).tokens == []


def followed_by(text: list[int], context: list[int]) -> list[int]:
    """The tokens that followed a context in a text, one after the other."""
    return [text[end] for end in range(len(context), len(text)) if text[end - len(context) : end] == context]


@pytest.mark.parametrize("seed", range(60))
def test_the_index_by_enumeration(seed: int) -> None:
    """Whatever the text and however it is read: its longest repeated ending, what followed there, and all counts."""
    draws = random.Random(seed)
    text, index, end = draws.choices(range(draws.randint(1, 5)), k=draws.randint(1, 60)), TextIndex(), 0
    while end < len(text):
        end += draws.randint(1, 3)
        known = text[:end]
        index.read(known)
        windows = range(len(known) - 1, 0, -1)
        assert index.match == next((n for n in windows if known[-n:] in _windows(known[:-1], n)), 0)
        if size := index.match:  # an earlier place of this ending, with a token after it
            assert 0 < index.place < len(known) and known[index.place - size : index.place] == known[-size:]
            assert index.continuation(5) == copied(known, index.place, 5)
        tail = [*known[len(known) - draws.randint(0, 6) :], *draws.choices(range(6), k=draws.randint(0, 3))]
        after = [followed_by(known, tail[-n:]) for n in range(1, min(len(tail), LONGEST) + 1)]
        followed = [Counter(tokens) for tokens in itertools.takewhile(bool, after)]
        assert index.followers(tail) == followed
    index.begin()
    assert index.followers(text) == []


def _windows(text: list[int], size: int) -> list[list[int]]:
    return [text[i : i + size] for i in range(len(text) - size + 1)]


def test_a_lookup_takes_constant_time_a_token() -> None:
    """Steps of the automaton, counted: texts on which a search of the text would take quadratic time."""
    fibonacci = [1, 0]
    while len(fibonacci) < 20_000:
        fibonacci = fibonacci + fibonacci[: max(1, round(len(fibonacci) / 1.618))]
    for text in ([7] * 20_000, fibonacci[:20_000], [i * i % 97 for i in range(20_000)]):
        index = TextIndex()
        index.read(text)
        assert len(index._next) <= 2 * len(text) and sum(map(len, index._next)) <= 3 * len(text)
        assert index.match > 1000


def test_a_lookup_drafts_what_its_rule_verifies() -> None:
    """Its chances grow with the length of the match; the rule compares their rounds with plain ones."""
    asked = list[list[float]]()

    class Asked(Fixed):
        def size(self, drafting: Drafting, rival: Drafting | None = None) -> int:
            asked.append(drafting.chances)
            return len(asked)

    lookup = LookupDrafter(4, rule=Asked(4))
    lookup.begin([])
    assert lookup.propose([1, 2, 3, 9, 9, 1, 2], 8, ()).tokens == [3]
    assert lookup.propose([1, 2, 3, 9, 9, 1, 2, 3], 8, ()).tokens == [9, 9]
    assert asked[0] == pytest.approx([*itertools.accumulate(USUAL[1:5], operator.mul)])
    hit = (4 * MEMORY * USUAL[1] + 1) / (4 * MEMORY + 1)  # the token after a match of two was right
    assert lookup._right[1].value == pytest.approx(hit)


def test_a_lookup_learns_from_what_it_did_not_draft() -> None:
    """After 1, 2, 3 the text never goes on as before; what is seen of a match of three says nothing of longer ones."""
    text = [token for other in range(100) for token in (1, 2, 3, 100 + other)]
    for steep in (0.01, 1.0):
        costs = Costs(tuple(1 + steep * m for m in range(9)), 0.0, 0.0)
        lookup, drafted = LookupDrafter(rule=Adaptive(costs, 8)), 0
        before = lookup._right[2].value
        lookup.begin(text[:8])
        for end in range(8, len(text)):
            drafted += len(lookup.propose(text[:end], 8, ()).tokens)
        assert lookup._right[2].value < 0.08 < before and lookup._right[0].value > 0.9
        assert lookup._right[3].value == pytest.approx(0.59)  # never reached
        assert (drafted > 0) == (steep < 1)


def test_lookups_and_counts_that_lose_stop() -> None:
    """Rounds that take twice a plain step's time and give one token: soon they are tried at the rate of trials."""
    costs = Costs((1.0, *[1.01] * 8), 0.0, 0.0)
    for table in (False, True):
        rule = Adaptive(costs, 8)
        drafter = TableDrafter(None, 8, 8, rule=rule) if table else LookupDrafter(rule=rule)
        drafted, text = list[int](), [1, 2, 3, 4] * 20
        drafter.begin(text)
        for _ in range(400):
            proposal = drafter.propose(text, 8, ())
            drafted.append(len(proposal.tokens))
            drafter.accepted(proposal, 0, len(text), 2.0 if proposal.tokens else 1.0)
            text = [*text, text[-4]]
        tried = [sum(count > 0 for count in drafted[start : start + 100]) for start in range(0, 400, 100)]
        assert drafted[0] == 8 and tried[0] <= 8 and all(one <= 1 for one in tried[1:]) and sum(tried[1:]), tried


def test_a_draft_is_asked_where_it_is_better_than_what_is_found() -> None:
    """Text with few matches behind a draft that is nearly always right: matches were followed, and it was not asked."""

    class Right:
        """A draft that continues with the text, for a step of 0.25."""

        capacity, lengths, steps = 400, [0], 0

        def extend(self, tokens: Sequence[int], want: Any = None) -> TorchLogits:
            self.lengths, self.steps = [self.lengths[0] + len(tokens)], self.steps + 1
            logits = torch.zeros(1, 200)
            logits[0, text[self.lengths[0]]] = 9.0
            return TorchLogits(logits)

        def rollback(self, lengths: Sequence[int]) -> None:
            self.lengths = [min(self.lengths[0], lengths[0])]

    draws = random.Random(1)
    text, costs = draws.choices(range(200), k=300), Costs(tuple(1 + m / 20 for m in range(9)), 0.25, 0.25, 0.01, 0.02)
    text[150:170] = text[20:40]  # all that repeats on purpose
    draft: Any = Right()
    rule = Adaptive(costs, 8)
    joined = FallbackDrafter(
        LookupDrafter(8, 1, rule), ModelDrafter(draft, rule, Sampler(temperature=0), random.random)
    )
    joined.begin(text[:60])
    place, rounds = 60, list[tuple[int, int]]()
    while place < 250:
        before = draft.steps
        proposal = joined.propose(text[:place], 250 - place, ())
        right = next((i for i, token in enumerate(proposal.tokens) if token != text[place + i]), len(proposal.tokens))
        steps = draft.steps - before
        place += right + 1
        joined.accepted(proposal, right, place, costs.target[len(proposal.tokens)] + steps * costs.draft)
        rounds.append((len(proposal.tokens), steps))
    assert rounds[0][0] >= 4 and rounds[0][1] == rounds[0][0] + 1  # the prompt, and a step for each token
    by_draft, copied = [one for one in rounds if one[1]], [one for one in rounds if one[0] and not one[1]]
    assert len(by_draft) > 0.8 * len(rounds) and copied and all(drafted == 8 for drafted, _ in by_draft[3:-1])

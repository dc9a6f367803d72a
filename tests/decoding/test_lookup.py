"""What a lookup proposes.

That sampled texts follow the target's distribution: test_exact_decoding.py."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest

from distill.decoding.costs import Costs
from distill.decoding.drafters import FallbackDrafter, LookupDrafter
from distill.decoding.table_drafter import TableDrafter
from distill.decoding.text_index import LONGEST, TextIndex
from distill.decoding.worth import Worth


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
        token, length = draws.randrange(6), len(followed)
        assert index.agreement(tail, token) == (length if length and after[length - 1][-1] == token else -length)
    index.begin()
    assert index.followers(text) == [] and index.agreement(text, 0) == 0


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


def test_a_lookup_learns_what_the_other_drafter_gives() -> None:
    costs = Costs(tuple(1 + 0.01 * m for m in range(9)), 0.0, 0.0)
    lookup = LookupDrafter(4, 1, Worth(costs))
    other = FallbackDrafter(lookup, LookupDrafter(3))
    other.begin([])
    seen = [1, 2, 3, 9, 9, 1, 2]
    assert other.propose(seen, 8, ()).tokens == [3, 9, 9, 1]  # its own: a match of two tokens pays at these costs
    other.accepted(other.propose(seen, 8, ()), 0, 8, 1.0)
    assert lookup.rival is None
    for _ in range(40):  # rounds of the other drafter that give four tokens in the time of one
        found = other.propose([4, 5, 6, 7, 8], 8, ())
        other.accepted(found, 3, 9, 1.0)
        other.begin([])
    assert lookup.rival == pytest.approx((4, 1.0)) and other.propose(seen, 8, ()).tokens == [3, 9, 9]  # the other one's


def test_a_priced_lookup_drafts_what_pays() -> None:
    """Exact choices at given chances, by enumeration of every length: the greatest E − λ·t, or where none reaches λ the
    fastest; none where the other drafter's round is better."""
    flat, steep = Costs(tuple(1 + 0.01 * m for m in range(9)), 0.0, 0.0), Costs(tuple(range(1, 10)), 0.0, 0.0)
    chosen = set()
    for costs, rate in itertools.product((flat, steep), (0.5, 1.0, 1.4, 9.0)):
        lookup = LookupDrafter(worth=Worth(costs))
        lookup.worth.rate = rate
        for match in (1, 2, 5, 12):
            tokens = [
                1 + sum(math.prod(lookup.chance(match + j) for j in range(i + 1)) for i in range(n)) for n in range(9)
            ]
            local = min(rate, max(e / t for e, t in zip(tokens, costs.target, strict=True)))
            values = [e - local * t for e, t in zip(tokens, costs.target, strict=True)]
            best = values.index(max(values))
            assert lookup.best(match, 8) == best
            chosen.add((rate > local, best))
            lookup.rival = tokens[best] + 0.1, costs.target[best]
            assert lookup.best(match, 8) == 0  # the other drafter gives more
            lookup.rival = tokens[best] - 0.1, costs.target[best]
            assert lookup.best(match, 8) == best
            lookup.rival = None
    assert {(False, 8), (True, 8), (True, 0)} <= chosen


def test_a_lookup_learns_from_what_it_did_not_draft() -> None:
    """After 1, 2, 3 the text never goes on as before; what is seen of a match of three says nothing of longer ones."""
    text = [token for other in range(100) for token in (1, 2, 3, 100 + other)]
    for steep in (0.01, 1.0):
        lookup = LookupDrafter(worth=Worth(Costs(tuple(1 + steep * m for m in range(9)), 0.0, 0.0)))
        before, drafted = lookup.chance(3), 0
        lookup.begin(text[:8])
        for end in range(8, len(text)):
            drafted += len(lookup.propose(text[:end], 8, ()).tokens)
        assert lookup.chance(3) < 0.08 < before and lookup.chance(1) > 0.9
        assert lookup.chance(4) == pytest.approx(0.59)  # never reached
        assert (drafted > 0) == (steep < 1)


def test_lookups_and_counts_that_lose_stop() -> None:
    """Rounds that take twice a plain step's time and give one token: soon none but one in a hundred is tried again."""
    costs = Costs((1.0, *[1.01] * 8), 0.0, 0.0)
    for make in (lambda: LookupDrafter(worth=Worth(costs)), lambda: TableDrafter(None, 8, 8, worth=Worth(costs))):
        drafter, drafted, text = make(), list[int](), [1, 2, 3, 4] * 20
        drafter.begin(text)
        for _ in range(400):
            proposal = drafter.propose(text, 8, ())
            drafted.append(len(proposal.tokens))
            drafter.accepted(proposal, 0, len(text), 2.0 if proposal.tokens else 1.0)
            text = [*text, text[-4]]
        tried = [sum(count > 0 for count in drafted[start : start + 100]) for start in range(0, 400, 100)]
        assert drafted[0] == 8 and tried[0] <= 12 and all(1 <= count <= 2 for count in tried[1:]), tried

"""A table of n-grams: its counts, its file, the mixture with the text so far, and the trees drafted from both.

That texts drafted from it follow the target's distribution: test_exact_decoding.py."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy
import pytest
from test_tree import paths_of

from distill.decoding import ngrams
from distill.decoding.costs import Costs
from distill.decoding.drafters import NOTHING
from distill.decoding.lengths import Adaptive, Drafting
from distill.decoding.ngrams import ORDER, OWN_WEIGHT, Expected, Mixture, NGramTable, count_ngrams, write_table
from distill.decoding.table_drafter import TableDrafter
from distill.decoding.trees import corrected
from distill.errors import DataError

V = 6
WEIGHT = int(OWN_WEIGHT)


def some_texts(seed: int, count: int, longest: int = 40) -> list[list[int]]:
    draws = random.Random(seed)
    weights = [2**-i for i in range(V)]
    return [draws.choices(range(V), weights, k=draws.randint(0, longest)) for _ in range(count)]


TEXTS = some_texts(0, 30)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> NGramTable:
    path = tmp_path_factory.mktemp("table") / "ngrams.safetensors"
    write_table(path, count_ngrams(TEXTS), {"tokenizer": "ours"})
    return NGramTable.open(path, "ours")


def place_in(table: NGramTable, context: Sequence[int]) -> list[int]:
    """The place at the end of a text."""
    place: list[int] = []
    for token in context[-ORDER:]:
        place = table.after(place, token)
    return place


def counts_after(texts: Sequence[Sequence[int]], context: tuple[int, ...]) -> dict[int, int]:
    size = len(context)
    return dict(Counter(t[i + size] for t in texts for i in range(len(t) - size) if tuple(t[i : i + size]) == context))


@pytest.mark.parametrize("singles_up_to", [10**6, 0])
@pytest.mark.parametrize("expects", [False, True])
def test_counts_are_those_of_the_texts(expects: bool, singles_up_to: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against counting place by place; none crosses from one text to the next.

    Of the last tokens of each text, likely tokens may count by their probabilities beside the drawn one. A large table
    loses what counts once or less, from three tokens on, and what continues it."""
    draws, expected, counts = random.Random(3), [], Counter[tuple[int, ...]]()
    for text in TEXTS:
        n = len(text) - min(len(text), 2)
        rows = [draws.sample(range(V), 3) for _ in range(n)]
        chances = [[draws.uniform(0.3, 0.7), draws.uniform(0.01, 0.3), 0.001] for _ in range(n)]
        expected.append(Expected(numpy.array(rows, int).reshape(n, 3), numpy.array(chances).reshape(n, 3)))
        for place, drawn in enumerate(text):
            counted = {drawn: 1.0}
            if expects and place >= 2:
                likely = dict(zip(rows[place - 2], chances[place - 2], strict=True))
                counted = {drawn: 0.01} | {t: max(p, 0.01) for t, p in likely.items() if p >= 0.01 or t == drawn}
            for size in range(min(place, ORDER) + 1):
                for token, weight in counted.items():
                    counts[(*text[place - size : place], token)] += weight
    kept = {ngram for ngram, count in counts.items() if len(ngram) < 3 or singles_up_to or count > 1}
    kept = {one for one in kept if all(one[:n] in kept for n in range(3, len(one)))}
    assert singles_up_to or not expects or any(counts[one] > 1 for one in counts.keys() - kept)
    monkeypatch.setattr(ngrams, "SINGLES_UP_TO", singles_up_to)
    table = NGramTable(count_ngrams(TEXTS, expected if expects else None), {})
    assert sum(len(level.tokens) for level in table.levels) == len(kept)
    for size in range(1, ORDER + 1):
        for context in itertools.product(range(V), repeat=size):
            place = place_in(table, context)
            assert (len(place) == size) == (context in kept)
            if context in kept:
                best = {one[-1]: counts[one] for one in ((*context, token) for token in range(V)) if one in kept}
                following = table.following(size, place[-1])
                assert following.best == pytest.approx(best, rel=1e-5)
                assert following.total == pytest.approx(sum(best.values()), rel=1e-5)
                assert following.different == len(best)


def chance(own: Sequence[int], context: tuple[int, ...], token: int) -> Fraction:
    """Witten–Bell by its definition, exactly: the counts of the texts, and WEIGHT times those of the text so far."""
    if not context:
        return Fraction(0)
    table, text = counts_after(TEXTS, context), counts_after([own], context)
    counts = {t: table.get(t, 0) + WEIGHT * text.get(t, 0) for t in {*table, *text}}
    shorter = chance(own, context[1:], token)
    if not counts:
        return shorter
    total, different = sum(counts.values()), len(counts)
    return Fraction(counts.get(token, 0) + different * shorter, total + different)


def test_the_mixture_is_witten_bell(table: NGramTable) -> None:
    mixture, own = Mixture(table), some_texts(1, 1, 200)[0]
    assert len(own) > 20
    mixture.read(own[:7])
    mixture.read(own)
    for context in itertools.islice(itertools.product(range(V), repeat=ORDER), 0, None, 5):  # every fifth of them
        guess = mixture.guess(context, place_in(table, context), V)
        expected = {token: chance(own, context, token) for token in range(V)}
        best = sorted((t for t in expected if expected[t]), key=lambda t: (-expected[t], t))
        assert [round(c, 12) for c in guess.chances] == [round(float(expected[t]), 12) for t in best]
        assert len(guess.tokens) == len(best) and sum(guess.chances) < 1
    mixture.begin()
    assert Mixture(None).guess((1, 2), [], V).tokens == []


def all_values(table: NGramTable, context: list[int], depth: int) -> dict[tuple[int, ...], float]:
    """The chance of every path of up to `depth` tokens after a context."""
    mixture = Mixture(table)
    mixture.read(context)
    values: dict[tuple[int, ...], float] = {(): 1.0}
    for level in range(depth):
        for path in [path for path in values if len(path) == level]:
            whole = [*context, *path]
            guess = mixture.guess(tuple(whole[-ORDER:]), place_in(table, whole), V)
            others = (1 - guess.chances[0]) * 0.5  # as often as not one of the others is right where the first is not
            chances = corrected(guess.chances, guess.chances[0], others)
            values |= {(*path, t): values[path] * c for t, c in zip(guess.tokens, chances, strict=True)}
    del values[()]
    return values


def test_the_tree_has_the_likeliest_paths(table: NGramTable) -> None:
    """Against all paths; an end token has no children; a chain of the likeliest where a model takes no trees."""
    for context in ([0, 1, 0], [2, 0, 0, 1, 3], some_texts(5, 1)[0]):
        values = all_values(table, context, 4)
        drafter = TableDrafter(table, 9, 4)
        drafter.begin(context)
        made = drafter.propose(context, 8, ())
        paths = paths_of(made)
        assert len(set(paths)) == 9 and drafter.tree
        best = sorted(values.values(), reverse=True)[:9]
        assert sorted((values[path] for path in paths), reverse=True) == pytest.approx(best, abs=1e-12)
        assert all(len(path) <= 2 for path in paths_of(drafter.propose(context, 2, ())))
        ended = paths_of(drafter.propose(context, 8, {made.tokens[0]}))
        assert (made.tokens[0],) in ended and not any(made.tokens[0] in path[:-1] for path in ended)
        chain = TableDrafter(table, 9, 4, max_leaves=1)
        chain.begin(context)
        assert chain.propose(context, 8, ()).is_chain and not chain.tree
        assert len(chain.propose(context, 3, ()).tokens) <= 3


def test_the_rule_tells_how_much_of_a_tree_is_verified(table: NGramTable) -> None:
    """The number of nodes with the most expected tokens per second, against all numbers, at three kinds of costs."""
    context = [2, 0, 0, 1, 3, 0]
    flat, steep = [1 + 0.02 * m for m in range(14)], [1 + 1.5 * m for m in range(14)]
    uneven, chosen = [1 + 0.3 * (m // 4) for m in range(14)], set()
    for target in (flat, steep, uneven):
        rule = Adaptive(Costs(tuple(target), 0.0, 0.0), 4)
        nodes = TableDrafter(table, 12, 4, rule=rule)
        nodes.begin(context)
        nodes.propose(context, 8, ())
        chances = nodes._drafting.chances
        rates = [(1 + sum(chances[:n])) / target[n] for n in range(len(chances) + 1)]
        count = len(nodes.propose(context, 8, ()).tokens)
        assert rates[count] == max(rates)
        chosen.add(count)
    assert 0 in chosen and max(chosen) > 5


def test_the_text_corrects_the_chances_of_what_is_not_drafted(table: NGramTable) -> None:
    """At costs that draft nothing, promises become the share that is right."""
    draws = random.Random(11)
    text = draws.choices(range(V), [2**-i for i in range(V)], k=600)
    rule = Adaptive(Costs(tuple(range(1, 40, 3)), 0.0, 0.0), 4)
    for mean in rule._confidences:  # far too much is promised
        mean._sum, mean._weight = 4 * 0.98, 4
    drafter, told = TableDrafter(table, 12, 4, rule=rule), []
    drafter.begin(text[:20])
    for end in range(20, len(text)):
        proposal = drafter.propose(text[:end], 8, ())
        drafter.accepted(proposal, 0, end + 1, 1.0)
        choices = drafter._guessed[0, tuple(text[end - ORDER : end])]
        told.append((rule.chance(0, choices.probability), choices.best == text[end]))
    promised, right = (sum(each) / 400 for each in zip(*told[-400:], strict=True))
    assert promised == pytest.approx(right, abs=0.05) and 0.3 < right < 0.7


def test_a_round_without_room_is_not_observed_again(table: NGramTable) -> None:
    """The decoder tells the drafter of rounds in which it was asked for nothing."""
    told: list[int] = []

    class Told(Adaptive):
        def observe(self, drafting: Drafting, drafted: int, accepted: int, seconds: float) -> None:
            told.append(len(drafting.judged))

    drafter = TableDrafter(table, 9, 4, rule=Told(Costs(tuple(1 + 0.02 * m for m in range(14)), 0.0, 0.0), 4))
    drafter.begin([2, 0, 0, 1])
    drafter.accepted(drafter.propose([2, 0, 0, 1], 4, ()), 0, 5, 1.0)
    drafter.accepted(drafter.propose([2, 0, 0, 1, 0], 4, ()), 0, 6, 1.0)  # which judges what the first had guessed
    drafter.accepted(NOTHING, 0, 7, 1.0)
    assert told[1] > 0 and told[2] == 0


def test_one_token_again_and_again(table: NGramTable) -> None:
    """A text of a single token makes a chain of it, not a wide tree."""
    drafter = TableDrafter(None, 8, 8)
    drafter.begin([3] * 50)
    assert drafter.propose([3] * 50, 8, ()).tokens == [3] * 8
    drafter.begin([])
    assert drafter.propose([3], 8, ()).tokens == []  # nothing is known yet


def test_files_that_are_no_table_of_this_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ngrams.safetensors"
    write_table(path, count_ngrams(TEXTS), {"tokenizer": "ours", "target": "small-model"})
    with pytest.raises(DataError, match="another vocabulary, that of small-model: ours, this target's is theirs"):
        NGramTable.open(path, "theirs")
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(DataError, match="cut short"):
        NGramTable.open(path, "ours")
    write_table(path, count_ngrams(TEXTS)[:-1], {"tokenizer": "ours"})
    with pytest.raises(DataError, match="not a table of n-grams"):
        NGramTable.open(path, "ours")
    for place in (len(whole) - 40, len(whole) // 2, len(whole) // 3):  # one bit of the counts or their places
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(DataError, match=r"damaged: its counts are not those"):
            NGramTable.open(path, "ours")
    # A large one is not read to be checked; its parts must belong together all the same.
    monkeypatch.setattr(ngrams, "CHECKED", 0)
    levels = count_ngrams(TEXTS)
    for shortened in (replace(levels[1], counts=levels[1].counts[:-1]), replace(levels[1], first=levels[1].first[:-1])):
        write_table(path, [levels[0], shortened, *levels[2:]], {"tokenizer": "ours"})
        with pytest.raises(DataError, match=r"damaged: its counts are not those"):
            NGramTable.open(path, "ours")
    write_table(path, count_ngrams([]), {"tokenizer": "ours"})
    assert place_in(NGramTable.open(path, "ours"), [1, 2]) == []

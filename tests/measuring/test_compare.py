"""Plain beside speculative: interleaved texts, speedups with paired intervals, and greedy identity."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy
import pytest
import torch
from table_model import TableModel
from test_configurations import settings_with
from test_cost import counting
from test_measure import rounds_of
from toys import Scripted, blurred, random_prompts, speculative, toy

from distill.data.samples import first_difference
from distill.decoding.configured import DrafterInputs
from distill.decoding.decode import Decoded, Round, plain
from distill.engines.loaded import LoadedPair
from distill.engines.torch.model import TorchLogits, TorchModel
from distill.errors import DataError
from distill.measuring.compare import (
    PairTexts,
    TimedConfiguration,
    TimedText,
    clearly_slower,
    judge_identity,
    measure_pair,
    measurement,
    prepare_all,
    repeated_share,
    time_texts,
)
from distill.measuring.identity import (
    TORCH_NOISE,
    Identity,
    OwnDistributions,
    Rounding,
    judged,
    measured_rounding,
    ties,
)
from distill.measuring.speedup_results import PairMeasured, StepFigures
from distill.measuring.speedup_tables import measurement_table
from distill.recipe import Configuration, Sampler, Target
from distill.recipe.measuring import fixed_length
from distill.tables import document, speed_ratio

PAIR, NOT_TIMED = PairMeasured("a pair", "pytorch"), StepFigures(1, {}, {})


def timed(tokens: int, seconds: float, rounds: list[Round] | None = None, prompt: int = 0) -> TimedText:
    return TimedText(prompt, seconds, Decoded(list(range(tokens)), [False] * tokens, rounds or []))


def fixed(length: int, *texts: TimedText, base: TimedConfiguration | None = None) -> TimedConfiguration:
    """A fixed length that wrote these texts, beside plain decoding."""
    return TimedConfiguration(fixed_length(length), Sampler(temperature=0), length=length, base=base, texts=[*texts])


def test_measurements_by_hand() -> None:
    plainly = fixed(0, timed(10, 2.0), timed(30, 4.0))
    both = [
        fixed(2, timed(10, 1.0, rounds_of((2, 2), (2, 1))), timed(30, 3.0, rounds_of((2, 0), (1, 1))), base=plainly),
        fixed(5, timed(10, 4.0, rounds_of((0, 0))), timed(30, 8.0, rounds_of((0, 0))), base=plainly),
    ]
    plain_row, two, five = (measurement(one, None, NOT_TIMED, PAIR, PairTexts([[], []])) for one in (plainly, *both))
    assert plain_row.length == 0 and plain_row.tokens_per_second == pytest.approx(40 / 6)
    assert plain_row.tokens_per_round is None and plain_row.acceptance is None
    assert (plain_row.speedup, plain_row.speedup_low, plain_row.speedup_high) == (1, 1, 1)
    assert two.tokens_per_second == 10 and two.speedup == pytest.approx(1.5)
    assert two.tokens_per_round == (3 + 2 + 1 + 2) / 4 and two.acceptance == 4 / 7
    # resamples of two prompts: twice the first (2.0), twice the second (4/3), or one each (1.5)
    assert two.speedup_low == pytest.approx(4 / 3) and two.speedup_high == pytest.approx(2)
    assert five.acceptance is None and five.tokens_per_round == 1 and five.speedup == 0.5


def test_the_share_that_repeats() -> None:
    """Against a search for the last three tokens in all of the text before, prompt included."""
    draws = random.Random(0)
    texts = [([1] * 4, [1] * 36), ([], []), ([], [*range(50)]), ([*range(20)], [*range(18), 7, *range(2, 19)])]
    texts += [(draws.choices(range(4), k=9), draws.choices(range(4), (9, 1, 1, 1), k=100)) for _ in range(5)]
    for prompt, new in texts:
        text = prompt + new
        ends = range(max(len(prompt), 2), len(text))
        seen = [any(text[i : i + 3] == text[end - 2 : end + 1] for i in range(end - 2)) for end in ends]
        assert repeated_share([(prompt, new)]) == (sum(seen) / len(new) if new else 0)
    assert repeated_share(texts[:3]) == 36 / 86 and repeated_share([]) == 0
    assert repeated_share(texts[3:4]) == (16 + 15) / 36


def test_speed_ratio_is_paired() -> None:
    """Prompts differ a hundredfold, each gains exactly a half: a paired interval has no width."""
    base = numpy.array([0.1, 1.0, 10.0, 3.0])
    tokens = numpy.array([5.0, 50.0, 500.0, 150.0])
    found = speed_ratio(tokens, base / 1.5, tokens, base)
    assert (found.mean, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))
    # another number of tokens counts, not seconds alone
    assert speed_ratio(2 * tokens, base, tokens, base).mean == pytest.approx(2)
    assert speed_ratio([10, 10], [1, 2], [10, 10], [2, 4]).mean == pytest.approx(2)
    assert math.isnan(speed_ratio([], [], [], []).mean)


@pytest.mark.parametrize(
    ("left", "right", "where"),
    [([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [1, 5, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [], None), ([], [4], 0)],
)
def test_first_difference(left: list[int], right: list[int], where: int | None) -> None:
    assert first_difference(left, right) == first_difference(right, left) == where


def test_verdicts_on_texts() -> None:
    """A text that differs where the two best logits are far apart is different, and excused only below the noise."""
    target = TorchModel(toy())
    prompts = random_prompts(2, 61, seed=8)
    texts = [plain(target, p, 12).tokens for p in prompts]
    wrong = [*texts[0][:5], (texts[0][5] + 1) % 61, *texts[0][6:]]
    plainly = fixed(0, *(TimedText(i, 1.0, Decoded(text)) for i, text in enumerate(texts)))
    three = fixed(3, TimedText(0, 1.0, Decoded(wrong)), TimedText(1, 1.0, Decoded(texts[1])), base=plainly)
    with torch.inference_mode():
        best = target.model(torch.tensor([[*prompts[0], *texts[0][:5]]])).logits[0, -1].topk(2).values
    gap = float(best[0] - best[1])
    assert gap > 1e-3

    def judged(noise: float, sizes: tuple[int, ...] = ()) -> Identity | None:
        return judge_identity(target, prompts, [plainly, three], Rounding(noise, sizes))[1]

    assert judged(gap * 0.9) == Identity(1, 0, 1)
    # Taken in other pieces the fp32 target says the same: that excuses nothing.
    assert judged(gap * 0.9, (2, 3, 4)) == Identity(1, 0, 1)
    pieces = Rounding(gap * 0.9, (2, 3, 4))
    assert ties(target, prompts[0], wrong, [(texts[0], 5)], pieces) == [False]  # nor a text that is not the plain one
    assert judged(gap * 1.1) == Identity(1, 1, 0)


def reordered(logits: Any, shift: Any) -> TorchLogits:
    """The two best tokens of each row, the second this much above the first or below it."""
    values = logits.full()
    best = values.topk(2, -1).indices
    return TorchLogits(values.scatter(-1, best[:, 1:], values.gather(-1, best[:, :1]) + shift))


class Rounded(TableModel):
    """Two best tokens within rounding, ordered by how many tokens are taken at once: what a shorter type may do."""

    def extend(self, tokens, *args, **named):  # type: ignore[no-untyped-def]
        return reordered(super().extend(tokens, *args, **named), 1e-2 if len(tokens) > 1 else -1e-2)


class Remembering(TableModel):
    """Two best tokens whose order hangs on how tokens were taken long before, which a cache keeps."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.together: list[int] = []  # for each token of the context: how many it was taken with

    def extend(self, tokens, *args, **named):  # type: ignore[no-untyped-def]
        start = self.lengths[0]
        self.together = self.together[:start] + [len(tokens)] * len(tokens)
        asked = range(len(tokens)) if named.get("want") is None else named["want"]
        long_ago = [max(self.together[4 : max(start + at - 8, 4)], default=1) > 1 for at in asked]
        shift = torch.tensor([1e-2 if together else -1e-2 for together in long_ago]).reshape(-1, 1)
        return reordered(super().extend(tokens, *args, **named), shift)


@pytest.mark.parametrize("kind", [Rounded, Remembering])
def test_a_rounding_tie_of_a_shorter_type_is_excused(kind: type[TableModel]) -> None:
    target, draft = kind(5, 1), TableModel(5, 2)
    for sizes, expected in (((), Identity(0, 0, 2)), ((2, 3, 4, 5), Identity(0, 2, 0))):  # fp32 is not as coarse
        found = Counter[str]()
        for prompt in ([0, 1], [3, 4, 2]):
            other, alone = speculative(target, draft, prompt, 48, 4).tokens, plain(target, prompt, 48).tokens
            found.update(judged(target, prompt, alone, [other], Rounding(TORCH_NOISE, sizes)))
        assert Identity(**found) == expected


class Reordered(TableModel):
    """Two best tokens whose order hangs on whether a tree has left the text in another order in the cache."""

    def __init__(self, *args: object, gaps: bool = False) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.always = self.gaps = gaps

    def keep(self, paths):  # type: ignore[no-untyped-def]
        self.gaps |= paths[0] != list(range(len(paths[0])))
        super().keep(paths)

    def rollback(self, lengths):  # type: ignore[no-untyped-def]
        self.gaps = self.always or (self.gaps and lengths != [0])
        super().rollback(lengths)

    def extend(self, tokens, *args, **named):  # type: ignore[no-untyped-def]
        shift = 1e-2 if self.gaps and self.lengths[0] > 10 else -1e-2
        return reordered(super().extend(tokens, *args, **named), shift)


def test_a_tie_of_the_order_that_trees_leave_is_excused_where_trees_were_drafted() -> None:
    target, prompt = Reordered(5, 1), [3, 4, 2]
    other = plain(Reordered(5, 1, gaps=True), prompt, 48).tokens
    for trees in (False, True):
        rounding = Rounding(TORCH_NOISE, (2, 3), trees)
        found = judged(target, prompt, plain(target, prompt, 48).tokens, [other], rounding)
        assert found == ["excused" if trees else "different"]


def test_ties_are_judged_by_the_sizes_of_all_greedy_configurations() -> None:
    """Rounding differs by how many tokens a step takes: of chains, lookups and trees."""
    others = (
        Configuration(drafter="tree", length=1),
        Configuration(drafter="lookup+tree", length=4, nodes=6),
        Configuration(length=9, sampler="recipe"),
    )
    half = Target(model="target", dtype="bfloat16")
    target = TorchModel(toy())
    prompt, text = [1, 2], [*range(20)]
    sizes = [
        measured_rounding(half, "pytorch", target, prompt, text, some).sizes
        for some in (others, [fixed_length(1), fixed_length(3)], others[2:])
    ]
    assert sizes == [(5, 7, 13), (2, 3, 4), ()]
    fp32 = measured_rounding(Target(model="target", dtype="float32"), "pytorch", target, prompt, text, others)
    assert fp32 == Rounding(TORCH_NOISE)


def noted(written: list[Any], one: Any, decode: Any, *arguments: Any) -> Decoded:
    written.append(one)
    found: Decoded = decode(*arguments)
    return found


def test_every_configuration_decodes_every_prompt() -> None:
    target, draft = Scripted(counting, 40, 10), Scripted(counting, 30, 10)
    prompts = [[1, 2], [3], [4, 5, 6] * 8]
    prepared = prepare_all(settings_with((), (1, 4)), [(target, draft)], (), DrafterInputs())
    written: list[TimedConfiguration] = []
    for one in prepared:
        (session,) = one.sessions
        session.text = partial(noted, written, one, session.text)  # type: ignore[method-assign]
    time_texts(target, draft, prompts, 9, prepared, "x")
    assert written[3:6] == [*prepared[1:], prepared[0]]  # after the first prompt: the order turns
    assert [[t.prompt for t in one.texts] for one in prepared] == [[0, 1, 2]] * 3
    for t in (text for one in prepared for text in one.texts):
        room = min(9, 30 - len(prompts[t.prompt]))
        assert t.decoded.tokens == [(prompts[t.prompt][-1] + 1 + i) % 10 for i in range(room)] and t.seconds > 0
        ends = accumulate((r.accepted + 1 for r in t.decoded.rounds), initial=len(prompts[t.prompt]))
        assert [r.depth for r in t.decoded.rounds] == [*ends][:-1]  # by which positions are found in the text
    four = measurement(prepared[2], None, NOT_TIMED, PAIR, PairTexts(prompts))
    rounds = [r.drafted for r in prepared[2].rounds]
    for position in range(4):  # all that is drafted is accepted
        found = [four.positions[kind][position] for kind in ("new", "repeated")]
        assert sum(one.accepted for one in found) == sum(drafted > position for drafted in rounds)
    assert not measurement(prepared[0], None, NOT_TIMED, PAIR, PairTexts(prompts)).positions
    prepared[0].texts[:] = [
        replace(text, seconds=seconds, decoded=replace(text.decoded, prefill_seconds=first))
        for text, (seconds, first) in zip(prepared[0].texts, ((2.0, 1.0), (4.0, 1.0), (10.0, 2.0)), strict=True)
    ]
    row = measurement(prepared[0], None, NOT_TIMED, PAIR, PairTexts(prompts))
    assert row.prompt_share == 0.25  # of all seconds; the mean of the texts' shares is 0.317
    assert "Prompts, of the whole time: 25 % (plain, PyTorch)." in measurement_table([row], "command").note
    named = PairTexts(prompts, ["a", "b", "a"])
    assert [one.group for one in measurement(prepared[0], None, NOT_TIMED, PAIR, named).by_class] == ["a", "b"]
    # Texts that were decoded at once share their seconds, whatever their classes.
    together = measurement(prepared[0], None, NOT_TIMED, PAIR, named, at_once=3)
    assert math.isnan(together.prompt_share) and not together.by_class


@pytest.mark.parametrize("sampler", ["greedy", "recipe"])
def test_texts_at_once_are_those_alone(sampler: str) -> None:
    """Seven prompts, three at once: greedily the same texts and rounds. A model of one row is refused."""
    models = toy(seed=3).double(), blurred(toy(seed=3).double(), 6, 0.03)
    sampled = Configuration(drafter="draft", length=3, sampler=sampler)  # type: ignore[arg-type]
    others = (sampled, Configuration(drafter="lookup", length=3), Configuration(drafter="lookup+draft", length=3))
    prompts = random_prompts(7, 61, seed=1, shortest=3)
    given = PairTexts(prompts), PairMeasured("p", "pytorch")
    found = []
    for count in (1, 3):
        pair = LoadedPair("pytorch", "p", *map(TorchModel, models), [7])
        settings = replace(settings_with(others, (2,), new_tokens=12), at_once=count)
        part = measure_pair(settings, pair, given[1], given[0])
        assert all(one.identical in (None, 7) and one.tokens_per_second > 0 for one in part.measurements)
        found.append([(one.configuration, one.rounds.verified, one.tokens_per_round) for one in part.measurements])
    if sampler == "greedy":
        assert found[0] == found[1]
    with pytest.raises(DataError, match="decodes one text at a time, and 2 at once"):
        pair = LoadedPair("gguf", "p", TableModel(5), TableModel(5), [])
        measure_pair(replace(settings, at_once=2), pair, given[1], given[0])


def test_what_is_clearly_slower_is_stopped() -> None:
    """By its interval over the fastest of its sampler, where that saves time; figures are over the same prompts."""

    def ran(seconds: float, base: TimedConfiguration | None = None, spread: float = 0.0) -> TimedConfiguration:
        return fixed(2, *(timed(10, seconds + spread * (n % 2), prompt=n) for n in range(4)), base=base)

    plainly = fixed(0, *(timed(10, 4.0 + n, prompt=n) for n in range(6)))
    quick, near, slow, unsure = ran(1, plainly), ran(1.2, plainly), ran(2, plainly), ran(1.1, plainly, spread=3)
    running = [plainly, quick, near, slow, unsure]
    assert [clearly_slower(one, running, 4) for one in running] == [False, False, False, True, False]
    assert not clearly_slower(slow, running, 2) and not clearly_slower(slow, [plainly, slow, unsure], 4)
    found = measurement(slow, None, NOT_TIMED, PAIR, PairTexts([[]] * 6, classes=["a", "a", "a", "a", "b", "b"]))
    assert (found.stopped, found.speedup, [one.group for one in found.by_class]) == (4, (4 + 5 + 6 + 7) / 8, ["a"])
    shown = document([measurement_table([measurement(plainly, None, NOT_TIMED, PAIR, PairTexts([[]] * 6)), found], "")])
    assert f"Stopped, clearly slower than the fastest: {found.configuration} after 4 prompts." in shown


def test_the_kl_of_another_engine_is_that_of_the_tokens_it_would_choose_after() -> None:
    """On greedy texts of the target's own, as long as the other's context takes."""
    target = TableModel(7)
    other, prompts = target.near(0.5, 3), [[1, 2], [3]]
    expected = []
    for prompt in prompts:
        text = [*prompt, *plain(target, prompt, 64).tokens]
        for end in range(len(prompt), len(text)):
            p, q = (model.table[target.place(text[:end])].log_softmax(-1) for model in (target, other))
            expected.append(float((p.exp() * (p - q)).sum()))
    assert len(expected) == 2 * 64
    own = OwnDistributions(target, prompts)
    assert own.kl(other) == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    assert own.kl(target) == pytest.approx(0, abs=1e-9)
    short = target.near(0.5, 3, capacity=12)
    kept = expected[: 12 - 2 + 1] + expected[64 : 64 + 12 - 1 + 1]
    assert own.kl(short) == pytest.approx(sum(kept) / len(kept), rel=1e-5)

"""Metrics against loops in fp64, intervals, and the arithmetic of trials and speedups by hand."""

from __future__ import annotations

import itertools
import math

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import Scripted, random_prompts, toy

from distill.benchmark.compare import (
    Trial,
    choose_length,
    first_difference,
    is_tie,
    judge_identity,
    run_trials,
    speed_ratio,
    summarise_trials,
)
from distill.benchmark.profile import profile_entry
from distill.evaluation.measure import (
    METRICS,
    measure_blocks,
    position_acceptance,
    position_metrics,
    summarise,
    tokens_per_round,
)
from distill.intervals import ratio_interval
from distill.models.torch_model import TorchModel
from distill.packing import pack
from distill.recipe import Profile
from distill.sampler import Sampler
from distill.speculative.cost import measure_steps, predicted_speedup
from distill.speculative.decode import Decoded, Round, plain

torch.set_num_threads(1)


def by_loops(target: list[float], draft: list[float], sampler: Sampler) -> list[float]:
    """The eight metrics of one position with math only (truncation by top_k alone)."""

    def distribution(logits: list[float], temperature: float = 1.0, top_k: int = 0) -> list[float]:
        kept = set(sorted(range(len(logits)), key=lambda i: -logits[i])[: top_k or None])
        best = max(logits)
        terms = [math.exp((x - best) / temperature) if i in kept else 0.0 for i, x in enumerate(logits)]
        return [t / math.fsum(terms) for t in terms]

    p, q = distribution(target), distribution(draft)
    served = [distribution(x, sampler.temperature, sampler.top_k) for x in (target, draft)]
    best = draft.index(max(draft))
    same = float(target.index(max(target)) == best)
    return [
        math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True)),
        math.fsum(b * math.log(b / a) for a, b in zip(p, q, strict=True)),
        math.fsum(max(a - b, 0) for a, b in zip(p, q, strict=True)),
        same,
        math.fsum(min(a, b) for a, b in zip(*served, strict=True)),
        served[0][best],
        same,
        math.fsum(served[0]),
    ]


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.6, 5), Sampler(1.7, 3)])
def test_position_metrics(sampler: Sampler) -> None:
    generator = torch.Generator().manual_seed(1)
    target, draft = (3 * torch.randn(40, 22, generator=generator) for _ in range(2))
    draft[20:] = target[20:] + 0.5 * torch.randn(20, 22, generator=generator)
    wide = torch.cat([target, torch.full((40, 3), 50.0)], dim=1)  # padding rows, of which the draft has fewer
    got = position_metrics(wide, torch.cat([draft, torch.full((40, 1), 60.0)], dim=1), sampler, 22)
    assert got.shape == (40, len(METRICS)) and got.dtype == torch.float32
    expected = torch.tensor([by_loops(a, b, sampler) for a, b in zip(target.tolist(), draft.tolist(), strict=True)])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert 0 < float(got[:, 3].mean()) < 1


def test_greedy_sampler_makes_all_acceptances_one() -> None:
    generator = torch.Generator().manual_seed(2)
    target, draft = torch.randn(200, 5, generator=generator), torch.randn(200, 5, generator=generator)
    table = dict(zip(METRICS, position_metrics(target, draft, Sampler(0.0), 5).T, strict=True))
    for name in ("acceptance_sampling", "acceptance_match", "acceptance_greedy"):
        assert torch.equal(table[name], table["top1_agreement"])


def test_blocks_are_measured_by_document() -> None:
    target, draft = toy(seed=1), toy(seed=2, layers=1)
    prompts = random_prompts(9, 61, seed=3)
    blocks = pack([(p, 2) for p in prompts], 24, split_long=False)
    sampler = Sampler(0.8, 10)
    sums, counts = measure_blocks(target, {"d": draft}, blocks, sampler, 61, batch=2)["d"]
    assert counts.tolist() == [len(p) - 2 for p in prompts]
    with torch.inference_mode():
        for row, prompt in enumerate(prompts):  # alone, without packing
            logits = [m(torch.tensor([prompt])).logits[0, 1:-1] for m in (target, draft)]
            expected = position_metrics(*logits, sampler, 61).double().sum(0)
            assert sums[row] == pytest.approx(expected.numpy(), rel=1e-4, abs=1e-4)
    table = summarise(sums, counts, 200, 0.95)
    assert table["tokens"] == counts.sum() and table["prompts"] == 9
    assert table["forward_kl"]["mean"] == pytest.approx(sums[:, 0].sum() / counts.sum())  # type: ignore[index]
    same = measure_blocks(target, {"d": target}, blocks, sampler, 61)["d"]
    assert same[0][:, :3] == pytest.approx(0, abs=1e-6)
    assert same[0][:, [3, 4, 6]] == pytest.approx(numpy.stack([counts] * 3, 1))


def rounds_of(*pairs: tuple[int, int]) -> list[Round]:
    return [Round(10 * i, drafted, accepted, 0.1) for i, (drafted, accepted) in enumerate(pairs)]


def test_position_acceptance_by_hand() -> None:
    rounds = [rounds_of((3, 3), (3, 0), (3, 1)), rounds_of((2, 2), (0, 0)), rounds_of((3, 2))]
    table = position_acceptance(rounds, 4, 200, 0.95)
    # position 1: all but the round that drafted nothing; 2: where 1 stood; 3: not where only two were drafted
    assert [(r["position"], r["drafted"], r["accepted"]) for r in table] == [(1, 5, 4), (2, 4, 3), (3, 2, 1), (4, 0, 0)]
    assert [r["rate"] for r in table[:3]] == [4 / 5, 3 / 4, 1 / 2] and math.isnan(table[3]["rate"])
    assert all(r["low"] <= r["rate"] <= r["high"] for r in table[:3])
    assert tokens_per_round(rounds, 200, 0.95)["mean"] == (4 + 1 + 2 + 3 + 1 + 3) / 6


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.integers(0, 6).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d))), max_size=6),
        min_size=1,
        max_size=5,
    )
)
def test_position_acceptance_by_walking_the_drafts(pairs: list[list[tuple[int, int]]]) -> None:
    walked = {i: [0, 0] for i in range(1, 7)}
    for drafted, accepted in itertools.chain(*pairs):
        for position in range(1, drafted + 1):
            walked[position][0] += 1
            if position > accepted:
                break
            walked[position][1] += 1
    table = position_acceptance([rounds_of(*own) for own in pairs], 6, 100, 0.9)
    assert {r["position"]: [r["drafted"], r["accepted"]] for r in table} == walked


def test_interval_covers_the_mean_about_as_often_as_it_says() -> None:
    generator = numpy.random.default_rng(5)
    hits = 0
    for trial in range(300):
        counts = generator.integers(1, 9, size=40).astype(float)
        rates = generator.beta(4, 2, size=40)  # prompts differ, and their tokens with them
        found = ratio_interval(generator.binomial(counts.astype(int), rates), counts, 400, 0.9, seed=trial)
        assert found["low"] <= found["mean"] <= found["high"]
        hits += found["low"] <= 4 / 6 <= found["high"]
    assert 0.83 <= hits / 300 <= 0.95


def test_interval_edges() -> None:
    assert ratio_interval([2, 4, 6], [2, 4, 6], 100, 0.95) == {"mean": 1, "low": 1, "high": 1}
    assert ratio_interval([3], [4], 100, 0.95) == {"mean": 0.75, "low": 0.75, "high": 0.75}
    for empty in ([], [0, 0]):
        assert all(math.isnan(x) for x in ratio_interval(empty, empty, 100, 0.95).values())
    found = ratio_interval([1, 0, 0, 0], [1, 0, 0, 0], 500, 0.95)  # most resamples count nothing
    assert found == {"mean": 1, "low": 1, "high": 1}
    sums, counts = [1, 5, 0, 9, 4], [10, 9, 3, 9, 7]
    assert ratio_interval(sums, counts, 300, 0.9, seed=3) == ratio_interval(sums, counts, 300, 0.9, seed=3)
    narrow, wide = (ratio_interval(sums, counts, 2000, c) for c in (0.6, 0.99))
    assert wide["low"] < narrow["low"] < narrow["high"] < wide["high"]


def trial(prompt: int, length: int, tokens: int, seconds: float, rounds: list[Round] | None = None) -> Trial:
    return Trial(prompt, length, seconds, Decoded(list(range(tokens)), [False] * tokens, rounds or []))


def test_trials_by_hand() -> None:
    trials = [
        trial(0, 0, 10, 2.0),
        trial(1, 0, 30, 4.0),
        trial(0, 2, 10, 1.0, rounds_of((2, 2), (2, 1))),
        trial(1, 2, 30, 3.0, rounds_of((2, 0), (1, 1))),
        trial(0, 5, 10, 4.0, rounds_of((0, 0))),
        trial(1, 5, 30, 8.0, rounds_of((0, 0))),
    ]
    plain_row, two, five = summarise_trials(trials, [2, 5], 500, 0.95)
    assert (plain_row["length"], plain_row["tokens"], plain_row["seconds"]) == (0, 40, 6.0)
    assert plain_row["tokens_per_round"] is None and plain_row["acceptance"] is None
    assert (plain_row["speedup"], plain_row["speedup_low"], plain_row["speedup_high"]) == (1, 1, 1)
    assert two["tokens_per_second"] == 10 and two["speedup"] == pytest.approx(1.5)
    assert two["tokens_per_round"] == (3 + 2 + 1 + 2) / 4 and two["acceptance"] == 4 / 7
    # resamples of two prompts: twice the first (2.0), twice the second (4/3), or one each (1.5)
    assert two["speedup_low"] == pytest.approx(4 / 3) and two["speedup_high"] == pytest.approx(2)
    assert five["acceptance"] is None and five["tokens_per_round"] == 1 and five["speedup"] == 0.5


def test_speed_ratio_is_paired() -> None:
    """Prompts differ a hundredfold, each gains exactly a half: a paired interval has no width."""
    base = numpy.array([0.1, 1.0, 10.0, 3.0])
    tokens = numpy.array([5.0, 50.0, 500.0, 150.0])
    assert speed_ratio(tokens, base / 1.5, tokens, base, 300, 0.95) == pytest.approx((1.5, 1.5, 1.5))
    # another number of tokens counts, not seconds alone
    assert speed_ratio(2 * tokens, base, tokens, base, 300, 0.95)[0] == pytest.approx(2)


def test_length_is_chosen_on_even_prompts_and_reported_on_odd_ones() -> None:
    trials = []
    for prompt in range(8):
        even = prompt % 2 == 0
        trials += [
            trial(prompt, 0, 10, 1.0),
            trial(prompt, 2, 10, 0.5 if even else 0.8),
            trial(prompt, 4, 10, 0.6 if even else 0.1),
        ]
    found = choose_length(trials, [2, 4], 300, 0.95)
    assert found["length"] == 2 and found["speedup"] == pytest.approx(1.25)
    assert found["speedup_low"] == pytest.approx(1.25) == found["speedup_high"]
    slow = [Trial(t.prompt, t.way, t.seconds * (3 if t.way else 1), t.decoded) for t in trials]
    found = choose_length(slow, [2, 4], 300, 0.95)
    assert (found["length"], found["speedup"]) == (0, 1)
    # Uneven prompts only: no resample may be made of prompts that have no trial.
    for count in (2, 3, 4, 5):
        assert choose_length([t for t in trials if t.prompt < count], [2, 4], 300, 0.95)["length"] == 2


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.lists(st.floats(0, 1), min_size=6, max_size=6), st.floats(0.01, 2))
def test_prediction_by_enumeration(length: int, accepted: list[float], draft: float) -> None:
    costs = {m: 1.0 + 0.2 * m * m for m in range(1, 8)}
    expected = 0.0
    for outcome in itertools.product([True, False], repeat=length):
        chance = math.prod(a if ok else 1 - a for a, ok in zip(accepted, outcome, strict=False))
        expected += chance * (1 + len(list(itertools.takewhile(bool, outcome))))
    round_seconds = costs[length + 1] + sum(draft for _ in range(length))
    plain_seconds = expected * costs[1]
    assert predicted_speedup(costs, draft, length, accepted) == pytest.approx(plain_seconds / round_seconds)


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2 == first_difference([1, 2, 3], [1, 2])
    assert first_difference([], []) is None and first_difference([], [4]) == 0


def test_verdicts_on_texts() -> None:
    """A text that differs where the two best logits are far apart is different, and excused only below the noise."""
    target = TorchModel(toy())
    prompts = random_prompts(2, 61, seed=8)
    texts = [plain(target, p, 12).tokens for p in prompts]
    wrong = [*texts[0][:5], (texts[0][5] + 1) % 61, *texts[0][6:]]
    trials = [Trial(i, 0, 1.0, Decoded(texts[i])) for i in range(2)]
    trials += [Trial(0, 3, 1.0, Decoded(wrong)), Trial(1, 3, 1.0, Decoded(texts[1]))]
    with torch.inference_mode():
        best = target.model(torch.tensor([[*prompts[0], *texts[0][:5]]])).logits[0, -1].topk(2).values
    gap = float(best[0] - best[1])
    assert gap > 1e-3
    assert judge_identity(target, prompts, trials, gap * 0.9) == {3: {"identical": 1, "excused": 0, "different": 1}}
    # Taken in other pieces the fp32 target says the same: that excuses nothing.
    assert judge_identity(target, prompts, trials, gap * 0.9, 4) == {3: {"identical": 1, "excused": 0, "different": 1}}
    assert not is_tie(target, prompts[0], wrong, texts[0], 5, gap * 0.9, 4)  # nor a text that is not the plain one
    assert judge_identity(target, prompts, trials, gap * 1.1) == {3: {"identical": 1, "excused": 1, "different": 0}}


def counting(context: tuple[int, ...]) -> int:
    return (context[-1] + 1) % 10


def test_trials_decode_every_prompt_in_every_arm() -> None:
    target, draft = Scripted(counting, 40, 10), Scripted(counting, 30, 10)
    prompts = [[1, 2], [3], [4, 5, 6] * 8]
    trials = run_trials(target, draft, prompts, [1, 4], 9, (), "x")
    assert sorted((t.prompt, t.way) for t in trials) == sorted(itertools.product(range(3), [0, 1, 4]))
    assert [t.way for t in trials if t.prompt == 1] == [1, 4, 0]  # the order turns
    for t in trials:
        room = min(9, 30 - len(prompts[t.prompt]))
        assert t.decoded.tokens == [(prompts[t.prompt][-1] + 1 + i) % 10 for i in range(room)] and t.seconds > 0


def test_steps_are_timed_at_their_depth() -> None:
    model = Scripted(counting, 64, 10)
    found = measure_steps(model, [1, 3], 20, 5, 10)
    assert model.lengths == [20] and model.calls == [20, *[1, 3] * 6]  # one round is thrown away
    assert all(low <= middle <= high for middle, low, high in found.values())
    curve = profile_entry(model, "m", "pytorch", "float32", Profile(max_tokens=16, depth=128, repeats=5))
    assert curve["depth"] == 48 and curve["tokens"] == list(range(1, 17)) and len(curve["seconds"]) == 16

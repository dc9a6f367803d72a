"""The target's own text (batched sampling) and the compact form of its distributions."""

from __future__ import annotations

import math

import pytest
import torch
from tables import goodness
from torch import Tensor
from toys import KINDS, random_prompts, toy

from distill.data.texts import is_looping
from distill.decoding.batch import continue_prompts
from distill.sampler import Sampler
from distill.teacher.store import EMPTY, compress

torch.set_num_threads(1)

V = 61


def generated(model: object, prompts: list[list[int]], limit: int, ends: list[int], pad: int = 0) -> list[list[int]]:
    """transformers' greedy generation of left-padded prompts, cut after the first end token."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    made = model.generate(  # type: ignore[attr-defined]
        ids, attention_mask=mask, max_new_tokens=limit, do_sample=False, eos_token_id=ends or None, pad_token_id=pad
    )[:, longest:].tolist()
    return [row[: next((i + 1 for i, t in enumerate(row) if t in ends), len(row))] for row in made]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_generate(kind: str) -> None:
    model = toy(kind)
    prompts = random_prompts(9, V, seed=1)
    free = continue_prompts(model, prompts, Sampler(0.0), 24, list(range(9)), [])
    assert free == generated(model, prompts, 24, [])
    assert all(len(text) == 24 for text in free)
    ends = [free[0][5], free[1][3]]  # tokens that do come up
    stopped = continue_prompts(model, prompts, Sampler(0.0), 24, list(range(9)), ends)
    assert stopped == generated(model, prompts, 24, ends)
    assert stopped[0][-1] in ends and len(stopped[0]) <= 6
    for cut, whole in zip(stopped, free, strict=True):
        assert whole[: len(cut)] == cut and not set(cut[:-1]) & set(ends)
        assert len(cut) == 24 or cut[-1] in ends


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_equals_each_row_alone(kind: str) -> None:
    model = toy(kind)
    prompts = random_prompts(8, V, seed=2)
    seeds = [7 * i for i in range(8)]
    sampler = Sampler(1.0, 20, 0.95, 0.01)
    together = continue_prompts(model, prompts, sampler, 20, seeds, [3])
    for row, prompt in enumerate(prompts):
        assert continue_prompts(model, [prompt], sampler, 20, [seeds[row]], [3]) == [together[row]]
    backwards = continue_prompts(model, prompts[::-1], sampler, 20, seeds[::-1], [3])
    assert backwards[::-1] == together
    shorter = continue_prompts(model, prompts, sampler, 11, seeds, [3])
    # A longer limit draws more numbers, and the first ones are the same.
    assert shorter == [text[:11] for text in together]
    assert continue_prompts(model, prompts, sampler, 20, [s + 1 for s in seeds], [3]) != together


def p_value(counts: Tensor, distribution: Tensor) -> float:
    """Of Pearson's χ², cells expected fewer than 8 times pooled."""
    return goodness(counts.double()[None], distribution.double()[None], rare=8)


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.7, 12), Sampler(1.2, 0, 0.8, 0.02)])
def test_frequencies_follow_the_distribution(sampler: Sampler) -> None:
    model = toy(initializer_range=0.15)
    prompt = [5, 17, 3, 40]
    drawn = torch.tensor(continue_prompts(model, [prompt] * 4000, sampler, 1, list(range(4000)), []))
    counts = torch.bincount(drawn.flatten(), minlength=V)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[:, -1]
    distribution = sampler.probabilities(logits)[0]
    assert not bool(counts[distribution == 0].any())
    assert p_value(counts, distribution) > 1e-3
    # The same test rejects a distribution that is a little off.
    wrong = Sampler(sampler.temperature * 1.2, sampler.top_k, sampler.top_p, sampler.min_p).probabilities(logits)[0]
    wrong = (wrong + 1e-6) / (wrong + 1e-6).sum()
    assert p_value(counts, wrong) < 1e-3


def test_second_step_follows_the_distribution_given_the_first() -> None:
    model = toy(vocabulary=6, initializer_range=0.15)
    drawn = torch.tensor(continue_prompts(model, [[1, 2]] * 4000, Sampler(), 2, list(range(9000, 13000)), []))
    counts = torch.bincount(drawn[:, 0] * 6 + drawn[:, 1], minlength=36)
    with torch.inference_mode():
        first = model(torch.tensor([[1, 2]])).logits[0, -1].softmax(-1)
        second = model(torch.tensor([[1, 2, t] for t in range(6)])).logits[:, -1].softmax(-1)
    assert p_value(counts, (first.unsqueeze(-1) * second).flatten()) > 1e-3
    assert p_value(counts, (first.unsqueeze(-1) * first.unsqueeze(0)).flatten()) < 1e-3


def test_looping() -> None:
    assert not is_looping([]) and not is_looping([1] * 5) and is_looping([1] * 6)
    assert is_looping([9, 8, 7] + [1] * 6)
    assert not is_looping([1] * 6 + [2])  # it got out
    assert is_looping([4, 1, 2, 3] * 6) and not is_looping([4, 1, 2, 3] * 5 + [4, 1, 2])
    assert is_looping([0] + [4, 1, 2, 3] * 6 + [4, 1])  # the last repetition may be cut anywhere
    assert is_looping(list(range(16)) * 6) and not is_looping(list(range(17)) * 6)
    assert not is_looping(list(range(200)))


def exact(logits: Tensor, k: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Sorted log-probabilities and log of the tail's mass in fp64, by loops."""
    tops, tails = [], []
    for row in logits.double()[:, :vocabulary].tolist():
        best = max(row)
        terms = sorted((math.exp(x - best) for x in row), reverse=True)
        total = math.fsum(terms)
        tops.append([x - best - math.log(total) for x in sorted(row, reverse=True)[:k]])
        rest = math.fsum(sorted(terms[k:]))
        tails.append(math.log(rest / total) if rest else EMPTY)
    return torch.tensor(tops), torch.tensor(tails)


@pytest.mark.parametrize("k", [1, 4, 39, 40])
def test_compact_distribution(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    logits = 4 * torch.randn(50, 47, generator=generator)
    logits[:, 40:] += 30  # padding that would win
    before = logits.clone()
    chunk = compress(logits, k, 40)
    assert torch.equal(logits, before)
    assert chunk.ids.dtype == torch.int32 and chunk.ids.shape == (50, k) and int(chunk.ids.max()) < 40
    assert all(len(set(row)) == k for row in chunk.ids.tolist())
    tops, tails = exact(logits, k, 40)
    torch.testing.assert_close(chunk.log_probabilities, tops, rtol=1e-5, atol=3e-6)
    torch.testing.assert_close(chunk.log_tail, tails, rtol=1e-5, atol=3e-6)
    gathered = logits.gather(-1, chunk.ids.long()) - logits[:, :40].logsumexp(-1, keepdim=True)
    torch.testing.assert_close(chunk.log_probabilities, gathered, rtol=1e-5, atol=3e-6)
    mass = chunk.log_probabilities.double().exp().sum(-1) + chunk.log_tail.double().exp()
    torch.testing.assert_close(mass, torch.ones(50).double(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("depth", [20.0, 40.0, 80.0, 300.0])
def test_small_tails_are_summed_and_not_subtracted(depth: float) -> None:
    """One token is e^depth times as likely as each of 9 others: 1 − Σ would give 0 in fp32."""
    logits = torch.zeros(2, 12)
    logits[:, 4] = depth
    logits[:, 10:] = 1000  # padding
    chunk = compress(logits, 1, 10)
    assert float(1 - chunk.log_probabilities.exp().sum(-1)[0]) == 0
    assert chunk.ids.tolist() == [[4], [4]]
    torch.testing.assert_close(chunk.log_tail, torch.full((2,), math.log(9) - depth), rtol=1e-6, atol=1e-5)


def test_empty_tail_is_finite() -> None:
    logits = torch.full((1, 5), -math.inf)
    logits[0, 3] = 2.0
    chunk = compress(logits, 1, 5)
    assert chunk.log_tail.item() == EMPTY and math.exp(EMPTY) == 0
    assert chunk.log_probabilities.item() == 0

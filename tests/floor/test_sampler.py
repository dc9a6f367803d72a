"""The sampled distribution against transformers' own processors, and its properties."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from distill.errors import DataError
from distill.recipe import Sampler
from distill.sampler import NUCLEUS, _outside, largest, probabilities_of, unchecked_probabilities

torch.set_num_threads(1)


def logits(rows: int, columns: int, seed: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


samplers = st.builds(
    Sampler,
    temperature=st.one_of(st.just(0.0), st.floats(0.05, 5)),
    top_k=st.integers(0, 40),
    top_p=st.one_of(st.just(1.0), st.floats(0.001, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 0.99)),
)


@settings(max_examples=150, deadline=None)
@given(samplers, st.integers(0, 2**31), st.integers(1, 50), st.floats(0.01, 20))
def test_is_a_distribution_that_keeps_the_best(sampler: Sampler, seed: int, columns: int, scale: float) -> None:
    values = logits(4, columns, seed, scale)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        distribution = probabilities_of(sampler, values.to(dtype))
        assert distribution.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert distribution.shape == values.shape and bool((distribution >= 0).all())
        torch.testing.assert_close(distribution.sum(-1), torch.ones(4, dtype=distribution.dtype), rtol=1e-5, atol=1e-5)
        best = values.to(dtype).argmax(-1, keepdim=True)
        assert bool((distribution.gather(-1, best).squeeze(-1) == distribution.max(-1).values).all())


@settings(max_examples=200, deadline=None)
@given(samplers, st.integers(0, 2**31), st.integers(2, 50), st.floats(0.1, 5))
def test_equals_transformers(sampler: Sampler, seed: int, columns: int, scale: float) -> None:
    assume(sampler.temperature > 0)
    values = logits(3, columns, seed, scale)
    expected = TemperatureLogitsWarper(sampler.temperature)(None, values)
    if sampler.top_k > 0:
        expected = TopKLogitsWarper(sampler.top_k)(None, expected)
    if sampler.top_p < 1:
        running = expected.softmax(-1).sort(descending=True).values.cumsum(-1)
        assume(float((running - sampler.top_p).abs().min()) > 1e-6)
        expected = TopPLogitsWarper(sampler.top_p)(None, expected)
    if sampler.min_p > 0:
        distribution = expected.softmax(-1)
        assume(float((distribution / distribution.max(-1, keepdim=True).values - sampler.min_p).abs().min()) > 1e-6)
        expected = MinPLogitsWarper(sampler.min_p)(None, expected)
    torch.testing.assert_close(probabilities_of(sampler, values), expected.softmax(-1), rtol=1e-10, atol=1e-12)


def test_greedy_takes_the_first_best_and_ignores_the_rest() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0, 0.0], [-5.0, -1.0, -2.0, -torch.inf]])
    for sampler in (Sampler(temperature=0.0), Sampler(temperature=0.0, top_k=1, top_p=0.1, min_p=0.9)):
        assert probabilities_of(sampler, values).tolist() == [[0, 1, 0, 0], [0, 1, 0, 0]]


def test_ties_with_the_last_of_top_k_stay() -> None:
    distribution = probabilities_of(Sampler(top_k=2), torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.0]]))
    assert (distribution[0] > 0).tolist() == [True, True, True, True, False]
    assert distribution[0, 0] == distribution[0, 2] == distribution[0, 3]


def test_padding_gets_no_mass() -> None:
    values = torch.nn.functional.pad(logits(5, 10, 3), (0, 4), value=-torch.inf)
    for sampler in (
        Sampler(),
        Sampler(temperature=0.7, top_k=12, top_p=0.9, min_p=0.01),
        Sampler(temperature=0.0),
        Sampler(top_k=13),
    ):
        distribution = probabilities_of(sampler, values)
        assert bool((distribution[:, 10:] == 0).all())
        torch.testing.assert_close(
            distribution[:, :10], probabilities_of(sampler, values[:, :10]), rtol=1e-12, atol=1e-14
        )


def test_settings_of_a_recipe() -> None:
    stated = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05}
    assert Sampler(**stated).describe() == stated


@settings(max_examples=100, deadline=None)
@given(samplers, st.floats(0.2, 5), st.integers(0, 2**31), st.integers(2, 20), st.integers(1, 12))
def test_penalty_equals_transformers(sampler: Sampler, penalty: float, seed: int, columns: int, length: int) -> None:
    values = logits(3, columns, seed)
    history = torch.randint(0, columns, (3, length), generator=torch.Generator().manual_seed(seed))
    expected = probabilities_of(sampler, RepetitionPenaltyLogitsProcessor(penalty)(history, values))
    penalised = sampler.penalised(penalty)
    torch.testing.assert_close(probabilities_of(penalised, values, history), expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(
        probabilities_of(penalised, values, history.tolist()), probabilities_of(penalised, values, history)
    )
    # Order and number of repetitions have no say.
    again = [row[::-1] + row for row in history.tolist()]
    assert torch.equal(probabilities_of(penalised, values, again), probabilities_of(penalised, values, history))


def test_penalty_by_hand() -> None:
    values = torch.tensor([[2.0, -1.0, 0.0, 1.5], [2.0, -1.0, 0.0, 1.5], [2.0, -1.0, 0.0, -torch.inf]])
    penalty = Sampler().penalised(2.0)
    # Rows differ in length; ids without a logit and −1 are nobody's.
    found = probabilities_of(penalty, values, [[0, 1, 2, 0], [], [3, 9, -1, 4]])
    expected = torch.tensor([[1.0, -2.0, 0.0, 1.5], [2.0, -1.0, 0.0, 1.5], [2.0, -1.0, 0.0, -torch.inf]]).softmax(-1)
    assert torch.equal(found, expected)
    assert torch.equal(probabilities_of(penalty, values, [[], [], []]), probabilities_of(Sampler(), values))
    assert (
        probabilities_of(penalty, values[:0], []).shape
        == probabilities_of(penalty, values[:0], torch.zeros(0, 3).long()).shape
        == (0, 4)
    )
    # It comes before the temperature, and greedy sees it.
    assert probabilities_of(Sampler(temperature=0.0).penalised(2.0), values[:1], [[0]]).tolist() == [[0, 0, 0, 1]]
    halved = probabilities_of(Sampler(temperature=0.5).penalised(2.0), values[:1], [[0]])
    torch.testing.assert_close(halved, (torch.tensor([[1.0, -1.0, 0.0, 1.5]]) / 0.5).softmax(-1))


def test_penalty_needs_histories() -> None:
    values = logits(2, 5, 1)
    for histories in (None, [[1]], [[1], [2], [3]]):
        with pytest.raises(ValueError, match="pass histories"):
            probabilities_of(Sampler().penalised(1.1), values, histories)
        assert torch.equal(probabilities_of(Sampler(), values, histories), probabilities_of(Sampler(), values))
    assert Sampler().penalised(1.1).describe()["repetition_penalty"] == 1.1


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([5, 127, 128, 129, 700, 5000]),
    spread=st.sampled_from([0.0, 0.3, 2.0, 8.0]),
    levels=st.sampled_from([1, 3, 40, 10**6]),
    top_p=st.floats(0.001, 0.999),
)
def test_top_p_of_the_likeliest_is_that_of_all(seed: int, size: int, spread: float, levels: int, top_p: float) -> None:
    """Against sorting the whole vocabulary, bit for bit, with many ties (few `levels`) and flat rows too."""
    generator = torch.Generator().manual_seed(seed)
    logits = (spread * torch.randn(4, size, generator=generator) * levels).round() / levels
    logits[3, : size // 2] = -math.inf
    probabilities = logits.softmax(-1)
    values, order = probabilities.sort(dim=-1, descending=True, stable=True)
    dropped = values.cumsum(-1) - values >= top_p
    expected = torch.zeros_like(dropped).scatter(-1, order, dropped)
    assert torch.equal(_outside(probabilities, top_p, looks=True), expected)
    assert torch.equal(_outside(probabilities, top_p, looks=False), expected)
    assert torch.equal(
        probabilities_of(Sampler(top_p=top_p), logits), logits.masked_fill(expected, -math.inf).softmax(-1)
    )


def test_top_p_sorts_no_vocabulary_that_it_need_not(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = 4 * torch.randn(9, 150_000, generator=torch.Generator().manual_seed(0))
    widths: list[int] = []
    sort = numpy.sort

    def noting(values: numpy.ndarray, axis: int) -> numpy.ndarray:
        widths.append(values.shape[axis])
        return sort(values, axis=axis)

    monkeypatch.setattr("distill.sampler.np.sort", noting)
    monkeypatch.setattr(torch.Tensor, "sort", None)
    kept = probabilities_of(Sampler(top_p=0.9), logits) > 0
    assert int(kept.sum(-1).max()) > NUCLEUS  # the likeliest that are looked at first do not tell
    assert len(widths) == len(logits) and max(widths) < 150_000 / 4


def test_top_p_on_a_device_is_that_of_a_processor(pretend: Any) -> None:
    """Rows whose likeliest tell, rows that need all, and ties."""
    generator = torch.Generator().manual_seed(1)
    spread = torch.tensor([8.0, 0.3, 2.0, 0.0])[:, None]
    probabilities = (spread * torch.randn(4, 700, generator=generator)).bfloat16().float().softmax(-1)
    expected = _outside(probabilities, 0.9, looks=True)
    assert int(expected.sum(-1).min()) > 0 and int((~expected).sum(-1).max()) > NUCLEUS
    assert torch.equal(_outside(probabilities.to("pretend"), 0.9, looks=True).cpu(), expected)


@pytest.mark.parametrize("size", [700, 4096, 5003])
def test_the_largest_numbers_of_a_large_row_are_those_of_topk(size):
    """Chunks that are not looked at hold none of them; the end of a row that fills no chunk counts, too."""
    rows = torch.randn(3, size, generator=torch.Generator().manual_seed(size))
    rows[1, -2], rows[2, 64:128] = 9.0, 5.0
    for count in (1, 3, 20):
        values, ids = largest(rows, count)
        assert torch.equal(values, rows.topk(count).values)
        assert torch.equal(rows.gather(1, ids), values) and all(len(set(row)) == count for row in ids.tolist())


@pytest.mark.parametrize("kind", ["distinct", "ties", "few"])
def test_top_k_alone_is_computed_among_its_tokens(kind):
    """On a CPU the other settings see only the likeliest k; what is dropped is what all tokens together say."""
    logits = 3 * torch.randn(4, 5003, generator=torch.Generator().manual_seed(1))
    if kind == "ties":
        logits = (4 * logits).round() / 4
    if kind == "few":
        logits[:, 12:] = -torch.inf
    for sampler in (
        Sampler(temperature=0.7, top_k=20, top_p=0.8),
        Sampler(temperature=0.7, top_k=20, top_p=1.0, min_p=0.1),
        Sampler(temperature=1.3, top_k=5, top_p=0.5, min_p=0.05),
        Sampler(temperature=1.0, top_k=50),
    ):
        found, expected = probabilities_of(sampler, logits), unchecked_probabilities(sampler, logits)[0]
        assert torch.equal(found > 0, expected > 0)
        torch.testing.assert_close(found, expected)
    with pytest.raises(DataError, match="not finite"):
        probabilities_of(
            Sampler(temperature=0.7, top_k=20, top_p=0.8), logits.index_fill(1, torch.tensor([9]), torch.nan)
        )

"""Acceptance from stored distributions: exact where the served sampler draws from stored tokens, bounds elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from distill import divergences
from distill.recipe import Sampler
from distill.recipe.training import Protocol
from distill.sampler import probabilities_of
from distill.teacher.acceptance import acceptance_chances, served_entries
from distill.teacher.distributions import CompactTeacher, TeacherChunk, compress
from distill.teacher.store import compact_distributions, padded_entries

VOCABULARY = 90
SAMPLERS = {
    "as it is": Sampler(),
    "colder": Sampler(temperature=0.6),
    "hotter": Sampler(temperature=1.7),
    "top-k": Sampler(temperature=0.8, top_k=5),
    "top-p": Sampler(temperature=0.7, top_p=0.8),
    "Qwen's": Sampler(temperature=0.7, top_k=20, top_p=0.8),
    "min-p": Sampler(temperature=1.2, min_p=0.1),
    "all": Sampler(temperature=0.9, top_k=12, top_p=0.95, min_p=0.02),
    "greedy": Sampler(temperature=0),
}


def pairs(seed: int, count: int = 150) -> tuple[Tensor, Tensor]:
    """Logits of targets and drafts [N, V], near and far, sharp and flat."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(count, VOCABULARY, generator=generator) * torch.rand(count, 1, generator=generator) * 9
    return target, target + torch.randn(count, VOCABULARY, generator=generator) * torch.rand(
        count, 1, generator=generator
    ) * 3


def stored(logits: Tensor, cap: int, mass: float | None) -> TeacherChunk:
    """What a ragged store gives back."""
    found = compress(logits.clone(), cap, VOCABULARY)
    assert found.ids is not None
    kept = compact_distributions((found.ids, found.log_probabilities, found.log_tail), mass)
    ids, logs = padded_entries(kept["top_ids"], kept["top_log_probabilities"], kept["entries"], VOCABULARY)
    return CompactTeacher(ids, logs, kept["log_tails"], VOCABULARY).chunk(slice(None))


def exact(target: Tensor, draft: Tensor, sampler: Sampler, protocol: Protocol) -> Tensor:
    """In fp64, from whole distributions."""
    if protocol == "greedy":
        return divergences.acceptance_greedy(target.double(), draft)
    p = probabilities_of(sampler, target.double())
    if protocol == "match":
        return divergences.acceptance_match(p, draft)
    return divergences.acceptance_sampling(p, probabilities_of(sampler, draft.double()))


@pytest.mark.parametrize("protocol", ["sampling", "match", "greedy"])
@pytest.mark.parametrize(("cap", "mass"), [(1, None), (4, 0.9), (30, 0.99), (64, None), (VOCABULARY - 1, None)])
@pytest.mark.parametrize("name", SAMPLERS)
def test_the_bounds_hold_the_exact_chance(name: str, cap: int, mass: float | None, protocol: Protocol) -> None:
    """Under every sampler, and they say something: they do not hold just any value."""
    sampler, (target, draft) = SAMPLERS[name], pairs(cap)
    chunk = stored(target, cap, mass)
    least, most = acceptance_chances(chunk, draft, sampler, protocol)
    value = exact(target, draft, sampler, protocol)
    # A token at the border of a nucleus may fall out of it by the rounding of a stored logarithm.
    noise = 2e-5
    outside = (least.double() > value + noise) | (value > most.double() + noise)
    assert not bool(outside.any()), (int(outside.sum()), (least, value, most))
    assert bool((least <= most + 1e-6).all()) and bool((least >= 0).all()) and bool((most <= 1).all())
    other = value.roll(1)
    assert protocol == "greedy" or bool(((other < least - 1e-4) | (other > most + 1e-4)).any())


@pytest.mark.parametrize("name", ["top-p", "Qwen's", "all", "greedy"])
def test_exact_where_the_nucleus_is_stored(name: str) -> None:
    """Nearly everywhere with as many entries as hold 0.99 of the mass; there both bounds are the exact chance."""
    sampler, (target, draft) = SAMPLERS[name], pairs(7)
    target, draft = 3 * target, 3 * draft  # language models are sharp
    chunk = stored(target, 60, 0.99)
    known = served_entries(chunk, sampler, VOCABULARY).exact
    assert float(known.double().mean()) > 0.9
    for protocol in ("sampling", "match"):
        least, most = acceptance_chances(chunk, draft, sampler, protocol)  # type: ignore[arg-type]
        value = exact(target, draft, sampler, protocol)  # type: ignore[arg-type]
        width = (most - least)[known]
        assert float(width.max()) < 2e-2 and float(width.mean()) < 2e-3, "the rounding of logarithms to fp16"
        torch.testing.assert_close(((least + most) / 2)[known].double(), value[known], rtol=0, atol=1e-2)


def test_whole_distributions_need_no_bounds() -> None:
    target, draft = pairs(3)
    whole = TeacherChunk(None, target.log_softmax(-1), target.new_full((len(target),), -1e4))
    for name, sampler in SAMPLERS.items():
        for protocol in ("sampling", "match", "greedy"):
            least, most = acceptance_chances(whole, draft, sampler, protocol)  # type: ignore[arg-type]
            value = exact(target, draft, sampler, protocol)  # type: ignore[arg-type]
            assert torch.equal(least, most), name
            torch.testing.assert_close(least.double(), value, rtol=0, atol=2e-5)

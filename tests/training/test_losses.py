"""Every loss over the head, in chunks and in closed form, against autograd through the plain formulas in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from distributions import KINDS, Distributions, H, N, Problem, V, fused, near
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from distill import divergences
from distill.errors import DataError
from distill.teacher.distributions import LogitForm
from distill.training import losses as bucket
from distill.training.losses import LOSSES, LossSettings, head_loss

torch.set_num_threads(1)

STORED = [None, 1, 6, V - 1, V]  # None: the whole distribution
MIXTURE = {"forward_kl": 0.6, "cross_entropy": 0.1, "lk_hybrid": 0.3}


def agrees(problem: Problem, settings: LossSettings, chunk: int = 7) -> None:
    """In fp64 to rounding, so that the formulas are the same; in fp32 to what fp32 can hold.

    That is, values to its rounding of the terms of order 1 that they are the small difference of where distributions
    are alike, and gradients to that of their largest entry, however small: where distributions are alike it is about
    0.01.
    """
    total, losses, *gradients = problem.expected(settings)
    for kind, tolerance, least, slope in ((torch.float64, 1e-9, 1e-6, 1e-9), (torch.float32, 1e-5, 1.0, 1e-4)):
        got, sums, *own = fused(problem, settings, chunk, kind)
        near(got, total, tolerance, least)
        assert all(one.dtype == torch.float64 and not one.requires_grad for one in sums.values())
        for name, values in losses.items():
            near(sums[f"loss/{name}"], values.sum(), tolerance, least * N)
        for left, right in zip(own, gradients, strict=True):
            near(left, right, slope, 1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", STORED)
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradients(name: str, k: int | None, kind: str) -> None:
    for seed, temperature in ((1, 1.0), (2, 1.7)):
        problem = Problem(k, kind, seed=seed)
        agrees(problem, LossSettings({name: 1.5}, temperature=temperature))


@pytest.mark.parametrize("trimmed", [None, 19])
@pytest.mark.parametrize("left", [1, 5])
@pytest.mark.parametrize("k", STORED)
@pytest.mark.parametrize("name", LOSSES)
def test_targets_without_mass_on_most_tokens(name: str, k: int | None, left: int, trimmed: int | None) -> None:
    """p = 0 exactly, as of a sampler that cuts: one token is certain, or five are all there are."""
    problem = Problem(k, seed=15, trimmed=trimmed)
    logits = problem.teacher.logits
    problem.teacher.logits = logits.masked_fill(logits < logits.topk(left).values[:, -1:], -math.inf)
    settings = LossSettings({name: 1.0}, temperature=1.3)
    if name == "reverse_kl" and (k, left) != (1, 5):  # there the bucket holds four of the five
        with pytest.raises(DataError, match="infinite"):
            fused(problem, settings)
    else:
        agrees(problem, settings)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", STORED)
@pytest.mark.parametrize("name", LOSSES)
def test_trimmed_and_padded(name: str, k: int | None, kind: str) -> None:
    for trimmed, padding, temperature in ((None, 5, 1.0), (19, 0, 1.0), (19, 4, 0.6)):
        problem = Problem(k, kind, seed=3, padding=padding, trimmed=trimmed)
        agrees(problem, LossSettings({name: 1.0}, temperature=temperature))
        d_head = fused(problem, LossSettings({name: 1.0}))[3]
        assert torch.equal(d_head[problem.columns :], torch.zeros(padding, H, dtype=torch.float64))


@pytest.mark.parametrize("k", STORED)
def test_mixtures_add_up(k: int | None) -> None:
    for temperature in (0.5, 1.0, 2.0):
        problem = Problem(k, seed=4, padding=2, trimmed=25)
        agrees(problem, LossSettings(MIXTURE, temperature=temperature))
        agrees(problem, LossSettings({**dict.fromkeys(LOSSES, 0.0), "jsd": 1.0}, temperature=temperature))


@examples(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from(KINDS),
    st.one_of(st.none(), st.integers(1, V)),
    st.one_of(st.none(), st.integers(3, V - 1)),
    st.integers(0, 4),
    st.dictionaries(st.sampled_from(LOSSES), st.floats(0.1, 2), min_size=1, max_size=4),
    st.floats(0.4, 3),
    st.integers(1, N + 2),
    st.sampled_from([LogitForm(), LogitForm(0.3), LogitForm(2.0, 5.0)]),
)
def test_any_mixture(
    seed: int,
    kind: str,
    k: int | None,
    trimmed: int | None,
    padding: int,
    losses: dict[str, float],
    t: float,
    c: int,
    form: LogitForm,
) -> None:
    problem = Problem(k, kind, seed, padding, trimmed)
    settings = LossSettings(losses, temperature=t)
    total, _, *gradients = problem.expected(settings, form)
    got, _, *own = fused(problem, settings, c, form=form)
    near(got, total, 1e-8, 1e-6)
    for left, right in zip(own, gradients, strict=True):
        near(left, right, 1e-8, 1e-6)


def test_chunks_and_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(6, seed=5, padding=3)
    settings = LossSettings(MIXTURE)
    whole = fused(problem, settings, N)
    for chunk, cached in ((1, 2**20), (5, 2**20), (16, V), (N, 3 * V), (1000, 5 * V)):
        monkeypatch.setattr("distill.training.losses.CACHED", cached)
        problem.teacher.asked.clear()
        part = fused(problem, settings, chunk)
        near(torch.stack([*part[1].values()]), torch.stack([*whole[1].values()]), 1e-13)
        for left, right in zip(part[2:], whole[2:], strict=True):
            near(left, right, 1e-13)
        assert all(min(rows.stop, N) - rows.start <= chunk for rows, _ in problem.teacher.asked)
        assert sum(rows.stop - rows.start for rows, _ in problem.teacher.asked) == N


@pytest.mark.parametrize("trimmed", [None, 19])
@pytest.mark.parametrize("k", STORED)
def test_statistics(k: int | None, trimmed: int | None) -> None:
    for kind, temperature in (("random", 1.0), ("aligned", 1.3)):
        problem = Problem(k, kind, seed=7, trimmed=trimmed, padding=2)
        settings = LossSettings({"jsd": 1.0}, temperature=temperature)
        logits = (problem.hidden @ problem.head.T)[:, : problem.columns]
        log_p, log_q = problem.outcomes(logits, temperature)
        named = problem.named(temperature)
        expected = {
            "positions": torch.tensor(N),
            "forward_kl": divergences.forward_kl(log_p, log_q).sum(),
            "cross_entropy": problem.oracle("cross_entropy", settings, logits).sum(),
            "acceptance": divergences.acceptance_sampling(log_p.exp(), log_q.exp()).sum(),
            "agreement": (divergences.acceptance_greedy(named, logits) * (named.amax(-1) > 0)).sum(),
            "match": divergences.acceptance_match(named, logits).sum(),
        }
        sums = fused(problem, settings)[1]
        for name, value in expected.items():
            assert sums[name].item() == pytest.approx(value.item(), rel=1e-9, abs=1e-9), name


def test_the_stored_acceptance_is_an_upper_end() -> None:
    problem = Problem(4, seed=8)
    gains = []
    for at in range(N):
        row = slice(at, at + 1)
        stored, whole = (
            head_loss(problem.hidden[row], problem.head, teacher, problem.labels[row], LossSettings({"jsd": 1.0}), 1)
            for teacher in (Distributions(problem.teacher.logits[row], k) for k in (4, None))
        )
        gains.append(float(stored[1]["acceptance"] - whole[1]["acceptance"]))
        assert gains[-1] >= -1e-12 and stored[1]["forward_kl"] <= whole[1]["forward_kl"] + 1e-12
    assert max(gains) > 1e-3


def test_equal_distributions_have_no_gradient() -> None:
    """p = q exactly, where the masks of TV, NLA and LK would flip with rounding."""
    generator = torch.Generator().manual_seed(0)
    log_p = torch.randn(9, V, generator=generator).log_softmax(-1)
    distributions = bucket.Distributions(log_p, log_p)
    for name in ("forward_kl", "total_variation", "nla", "lk_hybrid"):
        value, gradient = bucket.DIVERGENCES[name](distributions)
        assert float(value.abs().max()) < 1e-6 and float(gradient().abs().max()) < 1e-6


def test_bfloat16_and_autocast() -> None:
    """Products in bf16, the rest in fp32: near the truth of the rounded inputs, gradients in their own types."""
    problem = Problem(6, seed=9, padding=2)
    problem.hidden, problem.head = (x.bfloat16().double() for x in (problem.hidden, problem.head))
    settings = LossSettings({"forward_kl": 0.9, "cross_entropy": 0.1})
    total, _, e_hidden, e_head, _ = problem.expected(settings)
    problem.teacher.kind = torch.float32
    bf16, fp32 = torch.bfloat16, torch.float32
    for kinds, autocast in (((bf16, fp32), False), ((fp32, fp32), True), ((bf16, fp32), True)):
        hidden, head = (
            x.to(kind).requires_grad_() for x, kind in zip((problem.hidden, problem.head), kinds, strict=True)
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss, sums = head_loss(hidden, head, problem.teacher, problem.labels, settings, 5)
        loss.backward()
        assert hidden.grad is not None and head.grad is not None
        assert (hidden.grad.dtype, head.grad.dtype) == kinds and loss.dtype == fp32
        near(loss.detach(), total, 5e-3)
        near(hidden.grad, e_hidden, 3e-2)
        near(head.grad, e_head, 3e-2)
        near(sums["loss/forward_kl"] * 0.9 + sums["loss/cross_entropy"] * 0.1, loss.detach().double(), 1e-6)


def test_gradients_only_where_they_are_wanted() -> None:
    problem = Problem(6, seed=10)
    settings = LossSettings({"nla": 1.0})
    everything = fused(problem, settings)
    for wants in ((True, False), (False, True)):
        hidden, head = (x.clone().requires_grad_(w) for x, w in zip((problem.hidden, problem.head), wants, strict=True))
        total, _ = head_loss(hidden, head, problem.teacher, problem.labels, settings, 4)
        total.backward()
        for own, expected in zip((hidden.grad, head.grad), everything[2:4], strict=True):
            if own is not None:
                near(own, expected, 1e-12)
        assert [hidden.grad is not None, head.grad is not None] == [*wants]
    with torch.no_grad():
        hidden, head = problem.hidden.clone().requires_grad_(), problem.head.clone().requires_grad_()
        total, sums = head_loss(hidden, head, problem.teacher, problem.labels, settings, 4)
    assert not total.requires_grad and total.grad_fn is None
    near(torch.stack([*sums.values()]), torch.stack([*everything[1].values()]), 1e-12)


def test_the_heads_gradient_is_handed_on_without_a_copy() -> None:
    problem = Problem(6, seed=11)
    head = problem.head.clone().requires_grad_()
    total, _ = head_loss(problem.hidden, head, problem.teacher, problem.labels, LossSettings(MIXTURE), 7)
    node: Any = total.grad_fn
    place = node.gradients[1].data_ptr()
    (total / 8).backward()
    assert head.grad is not None and head.grad.data_ptr() == place
    near(head.grad, problem.expected(LossSettings(MIXTURE))[3] / 8, 1e-9)
    with pytest.raises(RuntimeError, match="backward ran a second time"):
        node.apply(torch.ones(()), torch.ones(()))


def test_no_positions() -> None:
    problem = Problem(6, seed=12)
    hidden, head = problem.hidden[:0].clone().requires_grad_(), problem.head.clone().requires_grad_()
    empty = Distributions(problem.teacher.logits[:0], 6)
    total, sums = head_loss(hidden, head, empty, problem.labels[:0], LossSettings(MIXTURE), 7)
    total.backward()
    assert total.item() == 0 and not any(map(float, sums.values()))
    assert head.grad is not None and float(head.grad.abs().max()) == 0


@pytest.mark.parametrize("k", [None, 5])
def test_an_infinite_reverse_kl_is_refused(k: int | None) -> None:
    problem = Problem(k, seed=13)
    problem.teacher.logits[4] = torch.full((V,), -math.inf).scatter(-1, torch.arange(5), 1.0)
    for losses in ({"reverse_kl": 1.0}, {"forward_kl": 1.0, "reverse_kl": 0.0}):
        with pytest.raises(DataError, match="infinite at 1 of 17 positions"):
            fused(problem, LossSettings(losses))
    assert bool(fused(problem, LossSettings({"jsd": 1.0}))[0].isfinite())

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
from distill.teacher.distributions import CompactTeacher, DenseTeacher, Head, LogitForm, Teacher, compress
from distill.training import losses as bucket
from distill.training.losses import LOSSES, Mixture, head_loss

torch.set_num_threads(1)

STORED = [None, 1, 6, V - 1, V]  # None: the whole distribution
MIXTURE = {"forward_kl": 0.6, "cross_entropy": 0.1, "lk_hybrid": 0.3}


def agrees(
    problem: Problem, settings: Mixture, chunk: int = 7, teacher: Teacher | None = None, least: float = 1e-6
) -> None:
    """In fp64 to rounding, so that the formulas are the same; in fp32, in which a teacher of the product says its
    probabilities, to what that can hold.

    That is, values to its rounding of the terms of order 1 that they are the small difference of where distributions
    are alike, and gradients to that of their largest entry, however small: where distributions are alike it is about
    0.01.
    """
    total, losses, d_hidden, d_head, _ = problem.expected(settings)
    for kind, value, slope in ((torch.float64, (1e-9, 1e-6), 1e-9), (torch.float32, (1e-5, 1.0), 1e-4)):
        if teacher is not None:
            value, slope = (1e-5, 1.0), 1e-4
        got, sums, *own = fused(problem, settings, chunk, kind, teacher)
        near(got, total, *value)
        assert all(one.dtype == torch.float64 and not one.requires_grad for one in sums.values())
        for name, values in losses.items():
            near(sums[f"loss/{name}"], values.sum(), value[0], value[1] * N)
        near(own[0], d_hidden, slope, least)
        near(own[1], d_head, slope, least)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", STORED)
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradients(name: str, k: int | None, kind: str) -> None:
    """Of whole heads, of trimmed ones, and of those with padding, which learns nothing."""
    for trimmed, padding in ((None, 0), (None, 5), (19, 0), (19, 4)):
        problem = Problem(k, kind, seed=3, padding=padding, trimmed=trimmed)
        agrees(problem, {name: 1.5})
        d_head = fused(problem, {name: 1.0})[3]
        assert torch.equal(d_head[problem.columns :], torch.zeros(padding, H, dtype=torch.float64))


@pytest.mark.parametrize("trimmed", [None, 19])
@pytest.mark.parametrize("left", [1, 5])
@pytest.mark.parametrize("k", STORED)
@pytest.mark.parametrize("name", LOSSES)
def test_targets_without_mass_on_most_tokens(name: str, k: int | None, left: int, trimmed: int | None) -> None:
    """p = 0 exactly, as of a sampler that cuts: one token is certain, or five are all there are."""
    problem = Problem(k, seed=15, trimmed=trimmed)
    logits = problem.teacher.logits
    problem.teacher.logits = logits.masked_fill(logits < logits.topk(left).values[:, -1:], -math.inf)
    settings = {name: 1.0}
    agrees(problem, settings)


@examples(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from(KINDS),
    st.one_of(st.none(), st.integers(1, V)),
    st.one_of(st.none(), st.integers(3, V - 1)),
    st.integers(0, 4),
    st.dictionaries(st.sampled_from(LOSSES), st.floats(0.1, 2), min_size=1, max_size=4),
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
    c: int,
    form: LogitForm,
) -> None:
    problem = Problem(k, kind, seed, padding, trimmed)
    total, _, *gradients = problem.expected(losses, form)
    got, _, *own = fused(problem, losses, c, form=form)
    near(got, total, 1e-8, 1e-6)
    for left, right in zip(own, gradients, strict=True):
        near(left, right, 1e-8, 1e-6)


def test_chunks_and_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(6, seed=5, padding=3)
    settings = MIXTURE
    whole = fused(problem, settings, N)
    for chunk, cached in ((1, 2**20), (5, 2**20), (16, V), (N, 3 * V), (1000, 5 * V)):
        monkeypatch.setattr("distill.training.losses.CACHED", cached)
        problem.teacher.asked.clear()
        part = fused(problem, settings, chunk)
        near(torch.stack([*part[1].values()]), torch.stack([*whole[1].values()]), 1e-13)
        for left, right in zip(part[2:], whole[2:], strict=True):
            near(left, right, 1e-13)
        assert all(min(rows.stop, N) - rows.start <= chunk for rows in problem.teacher.asked)
        assert sum(rows.stop - rows.start for rows in problem.teacher.asked) == N


@pytest.mark.parametrize("trimmed", [None, 19])
@pytest.mark.parametrize("k", STORED)
def test_statistics(k: int | None, trimmed: int | None) -> None:
    for kind in ("random", "aligned"):
        problem = Problem(k, kind, seed=7, trimmed=trimmed, padding=2)
        settings = {"jsd": 1.0}
        logits = (problem.hidden @ problem.head.T)[:, : problem.columns]
        log_p, log_q = problem.outcomes(logits)
        named = problem.named()
        expected = {
            "positions": torch.tensor(N),
            "forward_kl": divergences.forward_kl(log_p, log_q).sum(),
            "cross_entropy": problem.oracle("cross_entropy", logits).sum(),
            "acceptance": divergences.acceptance_sampling(log_p.exp(), log_q.exp()).sum(),
            "agreement": (divergences.acceptance_greedy(named, logits) * (named.amax(-1) > 0)).sum(),
            "match": divergences.acceptance_match(named, logits).sum(),
        }
        sums = fused(problem, settings)[1]
        for name, value in expected.items():
            assert sums[name].item() == pytest.approx(value.item(), rel=1e-9, abs=1e-9), name


def test_equal_distributions_have_no_gradient() -> None:
    """p = q exactly, where the masks of TV, NLA and LK would flip with rounding."""
    generator = torch.Generator().manual_seed(0)
    log_p = torch.randn(9, V, generator=generator).log_softmax(-1)
    distributions = bucket.Distributions(log_p, log_p)
    for loss in bucket.DIVERGENCES.values():
        value, gradient = loss(distributions)
        assert float(value.abs().max()) < 1e-6 and float(gradient().abs().max()) < 1e-6


def test_bfloat16_and_autocast() -> None:
    """Products in bf16, the rest in fp32: near the truth of the rounded inputs, gradients in their own types."""
    problem = Problem(6, seed=9, padding=2)
    problem.hidden, problem.head = (x.bfloat16().double() for x in (problem.hidden, problem.head))
    settings = {"forward_kl": 0.9, "cross_entropy": 0.1}
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
    settings = {"nla": 1.0}
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
    total, _ = head_loss(problem.hidden, head, problem.teacher, problem.labels, MIXTURE, 7)
    node: Any = total.grad_fn
    place = node.gradients[1].data_ptr()
    (total / 8).backward()
    assert head.grad is not None and head.grad.data_ptr() == place
    near(head.grad, problem.expected(MIXTURE)[3] / 8, 1e-9)
    with pytest.raises(RuntimeError, match="backward ran a second time"):
        node.apply(torch.ones(()), torch.ones(()))


def test_no_positions() -> None:
    problem = Problem(6, seed=12)
    hidden, head = problem.hidden[:0].clone().requires_grad_(), problem.head.clone().requires_grad_()
    empty = Distributions(problem.teacher.logits[:0], 6)
    total, sums = head_loss(hidden, head, empty, problem.labels[:0], MIXTURE, 7)
    total.backward()
    assert total.item() == 0 and not any(map(float, sums.values()))
    assert head.grad is not None and float(head.grad.abs().max()) == 0


# ── what is really stored: fp16 entries, teachers of teacher/distributions.py, drafts that are sure ──


def compact(problem: Problem, k: int) -> CompactTeacher:
    """What a store keeps of the distributions over all tokens."""
    logits = problem.teacher.logits
    found = compress(logits, k, V)
    ids = found.ids.long()
    distribution = logits.log_softmax(-1).scatter(-1, ids, -math.inf)
    return CompactTeacher(found.ids, found.log_probabilities, distribution.logsumexp(-1).float(), V)


@pytest.mark.parametrize("trimmed", [None, 19])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LOSSES)
def test_teachers_of_the_house(name: str, kind: str, trimmed: int | None) -> None:
    """A compact store, and hidden states times a head; whole and trimmed."""
    for k in (5, V, None, "with log_sums"):
        problem = Problem(k if isinstance(k, int) else None, kind, seed=20, padding=2, trimmed=trimmed)
        teacher: CompactTeacher | DenseTeacher
        if not isinstance(k, int):  # the target's hidden states are its logits, and its head one row per token
            head, logits = Head(torch.eye(V)), problem.teacher.logits.float()
            sums = logits.logsumexp(-1)
            teacher = DenseTeacher(logits, head, log_sums=None if k is None else lambda sums=sums: sums)
        else:
            teacher = compact(problem, k)
        if problem.teacher.kept is not None:
            teacher = teacher.restrict(torch.tensor(problem.teacher.kept))
        agrees(problem, {name: 1.0}, teacher=teacher)


def test_masses_rounded_to_half_precision() -> None:
    """Stored entries and tail sum to 1 only within fp16's rounding: the gradient's constant is their sum."""
    problem = Problem(5, seed=22)
    teacher = compact(problem, 5)
    rounded = CompactTeacher(teacher.ids, teacher.log_probabilities.half(), teacher.log_tail, V)
    p, tail = rounded.log_probabilities.double().exp(), rounded.log_tail.double().exp()
    assert float((p.sum(-1) + tail - 1).abs().max()) > 1e-5
    problem.teacher.chunk = rounded.chunk  # type: ignore[method-assign]
    problem.named = lambda: torch.zeros(N, V).double().scatter(-1, rounded.ids.long(), p)  # type: ignore
    for name in LOSSES:
        agrees(problem, {name: 1.0}, teacher=rounded)


@pytest.mark.parametrize("name", LOSSES)
def test_sure_draft_gives_finite_gradients(name: str) -> None:
    """A draft with less than e^-88 of its mass outside the stored tokens: q_t is 0 in fp32 and p_t / q_t infinite."""
    problem = Problem(2, seed=23)
    problem.hidden *= 60
    logits = problem.hidden @ problem.head.T
    top = logits.argmax(-1)
    # The target stores what the draft is sure of, so that all of the rest is far below.
    problem.teacher.logits = (0.1 * problem.random(N, V)).scatter(-1, top.unsqueeze(-1), 3.0)
    teacher = compact(problem, 2)
    outside = logits.log_softmax(-1).scatter(-1, teacher.ids.long(), -math.inf).logsumexp(-1)
    assert float(outside.min()) < -110  # else this tests nothing
    agrees(problem, {name: 1.0}, teacher=teacher, least=1.0)

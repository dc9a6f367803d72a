"""The head's loss on what is really stored: fp16 entries, teachers of teacher/distributions.py, trims, drafts that are
sure."""

from __future__ import annotations

import math

import pytest
import torch
from distributions import KINDS, N, Problem, V, fused, near

from distill.teacher.distributions import CompactTeacher, DenseTeacher, Head, Teacher
from distill.teacher.store import compress
from distill.training.losses import LOSSES, LossSettings

torch.set_num_threads(1)


def compact(problem: Problem, k: int, temperatures: tuple[float, ...] = (1.0,)) -> CompactTeacher:
    """What a store keeps of the distributions over all tokens."""
    logits = problem.teacher.logits
    found = compress(logits, k, V)
    ids = found.ids.long()
    distribution = logits.log_softmax(-1).scatter(-1, ids, -math.inf)
    tails = {t: (distribution / t).logsumexp(-1).float() for t in temperatures}
    return CompactTeacher(found.ids, found.log_probabilities, tails, V)


def agrees(problem: Problem, teacher: Teacher, settings: LossSettings, least: float = 1e-6) -> None:
    """Values to fp32's rounding of terms of order 1, gradients to that of their largest entry, however small."""
    total, _, d_hidden, d_head, _ = problem.expected(settings)
    for kind in (torch.float64, torch.float32):
        loss, _, *own = fused(problem, settings, 5, kind, teacher)
        near(loss, total, 1e-5, 1.0)
        near(own[0], d_hidden, 1e-4, least)
        near(own[1], d_head, 1e-4, least)


@pytest.mark.parametrize("trimmed", [None, 19])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LOSSES)
def test_teachers_of_the_house(name: str, kind: str, trimmed: int | None) -> None:
    """A compact store, at the temperature it holds, and hidden states times a head, at any; whole and trimmed."""
    for temperature in (1.0, 0.7):
        settings = LossSettings({name: 1.0}, temperature=temperature)
        for k in (5, V, None, "with log_sums"):
            problem = Problem(k if isinstance(k, int) else None, kind, seed=20, padding=2, trimmed=trimmed)
            teacher: CompactTeacher | DenseTeacher
            if not isinstance(k, int):  # the target's hidden states are its logits, and its head one row per token
                head, logits = Head(torch.eye(V)), problem.teacher.logits.float()
                sums = logits.logsumexp(-1)
                teacher = DenseTeacher(logits, head, log_sums=None if k is None else lambda sums=sums: sums)
            else:
                teacher = compact(problem, k, (1.0, 0.7))
            if problem.teacher.kept is not None:
                teacher = teacher.restrict(torch.tensor(problem.teacher.kept))
            agrees(problem, teacher, settings)


def test_masses_rounded_to_half_precision() -> None:
    """Stored entries and tail sum to 1 only within fp16's rounding: the gradient's constant is their sum."""
    problem = Problem(5, seed=22)
    teacher = compact(problem, 5)
    rounded = CompactTeacher(teacher.ids, teacher.log_probabilities.half(), teacher.log_tails, V)
    p, tail = rounded.log_probabilities.double().exp(), rounded.log_tails[1.0].double().exp()
    assert float((p.sum(-1) + tail - 1).abs().max()) > 1e-5
    problem.teacher.chunk = rounded.chunk  # type: ignore[method-assign]
    problem.named = lambda temperature: torch.zeros(N, V).double().scatter(-1, rounded.ids.long(), p)  # type: ignore
    for name in LOSSES:
        agrees(problem, rounded, LossSettings({name: 1.0}))


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
    agrees(problem, teacher, LossSettings({name: 1.0}), 1.0)

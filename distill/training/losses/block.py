"""One block of a chunk: losses, statistics and the gradient of the logits, in closed form.

Legend: r positions of the block, C columns of the distributions, M outcomes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from distill.teacher.distributions import TeacherChunk
from distill.training.losses import bucket
from distill.training.losses.settings import LossSettings


@dataclass(frozen=True)
class _Labels:
    """The labels of a block: whether a position has one [r], its column and that column's logit (both [r, 1])."""

    known: Tensor
    column: Tensor
    logit: Tensor


@dataclass(frozen=True)
class _Outcomes:
    """Both distributions of a block over its M outcomes."""

    draft: bucket.Draft
    pair: bucket.Distributions  # at the temperature of the settings
    log_q: Tensor  # [r, M] at temperature 1
    q: Tensor  # [r, M] at temperature 1
    named: Tensor  # p [r, M] at the temperature of the settings, 0 for the bucket, which has no name
    best: Tensor  # [r], the likeliest named outcome
    known: Tensor  # [r], whether a named outcome has mass


def score_block(
    logits: Tensor, target: TeacherChunk, labels: Tensor, settings: LossSettings, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """STATISTICS and losses [r, 5 + L] of a block, and where wanted dz [r, C]; the logits [r, C] are overwritten."""
    label = _labels(logits, labels)
    outcomes = _outcomes(logits, target, settings)
    entropy = -outcomes.draft.log_probability(outcomes.log_q, label.column, label.logit) * label.known
    losses = {}
    parts: dict[float, Tensor] = {}  # gradients with respect to outcome logits, by temperature
    for name, t, (loss, gradient_of) in _terms(outcomes, entropy, label.known, settings):
        losses[name] = loss * settings.scale(name)
        share = settings.losses[name] * settings.scale(name)
        if wanted and share:
            _add_part(parts, t, gradient_of().mul_(share))
    columns = [*_statistics(outcomes, entropy), *(losses[name] for name in settings.losses)]
    values = torch.stack([column.to(logits.dtype) for column in columns], -1)
    return values, _gradient(outcomes, label, parts, settings) if wanted else None


def _labels(logits: Tensor, labels: Tensor) -> _Labels:
    """Labels [r] among the columns of logits [r, C]; others are unknown and stand at column 0."""
    known = (labels >= 0) & (labels < logits.shape[-1])
    column = labels.masked_fill(~known, 0).unsqueeze(-1)
    return _Labels(known, column, logits.gather(-1, column))


def _outcomes(logits: Tensor, target: TeacherChunk, settings: LossSettings) -> _Outcomes:
    """The distributions of target and draft over the outcomes; the logits [r, C] are overwritten."""
    draft = bucket.Draft(logits, target.ids)
    log_p = bucket.target_distribution(target, None if target.ids is None else draft.full)
    pair = bucket.Distributions(log_p, draft.distribution(settings.temperature))
    log_q = pair.log_q if settings.temperature == 1 else draft.distribution(1.0)
    q = pair.q if log_q is pair.log_q else log_q.exp()
    named = pair.p
    if target.ids is not None:
        named = named.clone()
        named[:, -1] = 0
    likeliest, best = named.max(-1)
    return _Outcomes(draft, pair, log_q, q, named, best, likeliest > 0)


def _terms(
    outcomes: _Outcomes, entropy: Tensor, labelled: Tensor, settings: LossSettings
) -> Iterator[tuple[str, float, bucket.Term]]:
    """Name, temperature and term of every loss of the mixture, one at a time to save memory."""
    for name, divergence in bucket.DIVERGENCES.items():
        if name in settings.losses:
            yield name, settings.temperature, divergence(outcomes.pair, settings)
    if "cross_entropy" in settings.losses:  # its gradient at the label's column is added in _gradient
        yield "cross_entropy", 1.0, (entropy, lambda: outcomes.q * labelled.unsqueeze(-1))


def _statistics(outcomes: _Outcomes, entropy: Tensor) -> list[Tensor]:
    """The STATISTICS, [r] each."""
    top = outcomes.draft.top
    return [
        outcomes.pair.forward_kl,
        entropy,
        outcomes.pair.acceptance,
        outcomes.known & (top == outcomes.best),
        outcomes.named.gather(-1, top.unsqueeze(-1)).squeeze(-1),
    ]


def _gradient(outcomes: _Outcomes, label: _Labels, parts: dict[float, Tensor], settings: LossSettings) -> Tensor:
    """dz [r, C] of the mixture from the gradients at the outcomes and the labels."""
    gradient = outcomes.draft.gradient(parts)
    if "cross_entropy" in settings.losses:
        pull = -settings.losses["cross_entropy"] * label.known.to(gradient.dtype)
        gradient.scatter_add_(-1, label.column, pull.unsqueeze(-1))
    return gradient


def _add_part(parts: dict[float, Tensor], t: float, part: Tensor) -> None:
    parts[t] = parts[t].add_(part) if t in parts else part

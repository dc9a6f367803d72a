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
    logits: Tensor, target: TeacherChunk, labels: Tensor, weights: Tensor, settings: LossSettings, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """STATISTICS and losses [r, 5 + L] of a block, and where wanted dz [r, C]; the logits [r, C] are overwritten."""
    label = _labels(logits, labels)
    hinge = _hinge(logits, target, settings)  # before _outcomes takes the stored logits out
    outcomes = _outcomes(logits, target, settings)
    entropy = -outcomes.draft.log_probability(outcomes.log_q, label.column, label.logit) * label.known
    losses = {} if hinge is None else {"top_k_hinge": hinge.loss}
    parts: dict[float, Tensor] = {}  # gradients with respect to outcome logits, by temperature
    for name, t, (loss, gradient_of) in _terms(outcomes, entropy, label.known, settings):
        losses[name] = loss * settings.scale(name)
        share = settings.losses[name] * settings.scale(name)
        if wanted and share:
            _add_part(parts, t, gradient_of().mul_((share * weights).unsqueeze(-1)))
    columns = [*_statistics(outcomes, entropy), *(losses[name] for name in settings.losses)]
    values = torch.stack([column.to(logits.dtype) for column in columns], -1)
    return values, _gradient(outcomes, label, hinge, parts, weights, settings) if wanted else None


def _labels(logits: Tensor, labels: Tensor) -> _Labels:
    """Labels [r] among the columns of logits [r, C]; others are unknown and stand at column 0."""
    known = (labels >= 0) & (labels < logits.shape[-1])
    column = labels.masked_fill(~known, 0).unsqueeze(-1)
    return _Labels(known, column, logits.gather(-1, column))


def _hinge(logits: Tensor, target: TeacherChunk, settings: LossSettings) -> bucket.Hinge | None:
    """The hinge of logits [r, C] with every column in them; None where it is no loss of the mixture."""
    if "top_k_hinge" not in settings.losses:
        return None
    return bucket.top_k_hinge(logits, target.ids, target.log_probabilities, settings.hinge_k, settings.hinge_margin)


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
    """Name, temperature and term of every loss of the mixture but the hinge, one at a time to save memory."""
    pair, log_q, q = outcomes.pair, outcomes.log_q, outcomes.q
    for name, divergence in bucket.DIVERGENCES.items():
        if name in settings.losses:
            yield name, settings.temperature, divergence(pair, settings)
    if "match" in settings.losses:
        t = settings.match_temperature
        same = {settings.temperature: pair.log_q, 1.0: log_q}
        yield "match", t, bucket.match(outcomes.named, same[t] if t in same else outcomes.draft.distribution(t))
    if "argmax_cross_entropy" in settings.losses:
        yield "argmax_cross_entropy", 1.0, bucket.argmax_cross_entropy(outcomes.best, outcomes.known, log_q, q)
    if "cross_entropy" in settings.losses:  # its gradient at the label's column is added in _gradient
        yield "cross_entropy", 1.0, (entropy, lambda: q * labelled.unsqueeze(-1))


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


def _gradient(
    outcomes: _Outcomes,
    label: _Labels,
    hinge: bucket.Hinge | None,
    parts: dict[float, Tensor],
    weights: Tensor,
    settings: LossSettings,
) -> Tensor:
    """dz [r, C] of the weighted mixture from the gradients at the outcomes, the hinge and the labels."""
    if hinge is not None:
        share = (settings.losses["top_k_hinge"] * weights).unsqueeze(-1)
        at_named = hinge.at_named * share
        if outcomes.draft.ids is not None:
            at_named = torch.nn.functional.pad(at_named, (0, 1))
        _add_part(parts, 1.0, at_named)
    gradient = outcomes.draft.gradient(parts)
    if hinge is not None:
        gradient.scatter_add_(-1, hinge.rivals, hinge.at_rivals * share)
    if "cross_entropy" in settings.losses:
        pull = -settings.losses["cross_entropy"] * weights * label.known
        gradient.scatter_add_(-1, label.column, pull.unsqueeze(-1).to(gradient.dtype))
    return gradient


def _add_part(parts: dict[float, Tensor], t: float, part: Tensor) -> None:
    parts[t] = parts[t].add_(part) if t in parts else part

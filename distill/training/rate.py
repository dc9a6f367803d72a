"""The learning rate of each step."""

from __future__ import annotations

import math

from distill.recipe import Train


def rate_at(step: int, steps: int, rate: float, settings: Train) -> float:
    """The rate of step `step` of `steps` (from 0) whose peak is `rate`, by the recipe's warm-up and cosine."""
    return cosine(step, steps, rate, settings.warmup, settings.final_rate_share)


def cosine(step: int, steps: int, rate: float, warmup: float, final: float) -> float:
    """The rate of step `step` of `steps` (from 0): linear over the share `warmup`, then a cosine to `final` · rate."""
    warm = warm_steps(steps, warmup)
    if step < warm:
        return rate * (step + 1) / warm
    progress = (step - warm) / max(1, steps - warm)
    return rate * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))


def warm_steps(steps: int, warmup: float) -> int:
    """The steps of the warm-up."""
    return max(1, round(warmup * steps))


def body_share(step: int, steps: int, settings: Train) -> float:
    """The share of the rate for the body (all but embeddings and head): 0 at first, then a warm-up of its own.

    Adam's first steps have full size whatever the gradient; without the warm-up they undo the embeddings' progress.
    """
    if step < settings.embedding_steps:
        return 0.0
    if not settings.embedding_steps:
        return 1.0
    warm = max(10, round(settings.warmup * steps))
    return min(1.0, (step - settings.embedding_steps + 1) / warm)

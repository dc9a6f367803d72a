"""The learning rate of each step."""

from __future__ import annotations

import math

from distill.recipe import Train


def rate_at(step: int, settings: Train) -> float:
    """Learning rate of optimizer step `step` (from 0): linear warm-up, then a cosine down to `final` of the peak."""
    warm = max(1, round(settings.warmup * settings.steps))
    if step < warm:
        return settings.rate * (step + 1) / warm
    progress = (step - warm) / max(1, settings.steps - warm)
    return settings.rate * (settings.final + (1 - settings.final) * 0.5 * (1 + math.cos(math.pi * progress)))


def body_share(step: int, settings: Train) -> float:
    """The part of the rate that the body (all but embeddings and head) gets: 0 at first, then a warm-up of its own.

    Adam's first steps are of full size whatever the gradient: without the warm-up they undo what the embeddings learnt.
    """
    if step < settings.embedding_steps:
        return 0.0
    if not settings.embedding_steps:
        return 1.0
    warm = max(10, round(settings.warmup * settings.steps))
    return min(1.0, (step - settings.embedding_steps + 1) / warm)

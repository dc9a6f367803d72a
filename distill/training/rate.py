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

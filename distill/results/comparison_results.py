"""Drafts compared on the same prompts, as `distill eval` with several drafts or targets measures them."""

from __future__ import annotations

from dataclasses import dataclass

from distill.intervals import Interval


@dataclass(frozen=True)
class Stretch:
    """A stretch of a target's own text, with the mean acceptance of its tokens."""

    text: str
    acceptance: float


@dataclass(frozen=True)
class ComparedDraft:
    """A draft on its target's own text behind the prompts.

    `difference` is its acceptance less that of the first row, paired by prompt; None for the first. `worst` are the
    stretches that it is accepted least on.
    """

    target: str
    draft: str
    tokens: int
    forward_kl: Interval
    acceptance: Interval
    difference: Interval | None
    worst: list[Stretch]


@dataclass(frozen=True)
class DraftComparison:
    """All rows, on `prompts` prompts; `measure` is the acceptance that fits the sampler."""

    command: str
    sampler: dict[str, int | float]
    measure: str
    prompts: int
    rows: list[ComparedDraft]

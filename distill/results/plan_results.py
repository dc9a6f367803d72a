"""What `distill plan` predicts, as dataclasses: tables and JSON are made from it. Nothing here was measured end to end.

Legend: n drafted tokens of a round, T target, D draft; costs are in T(1), the time of a token of plain decoding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from distill.intervals import Interval


@dataclass(frozen=True)
class PlannedLength:
    """n tokens drafted a round: what verifying them costs, the draft's steps and the rest of the round apart from it.

    `break_even` is the acceptance, the same at every position, from which it is faster than plain decoding; None where
    no acceptance is enough. `most` is the speedup with every drafted token accepted.
    """

    length: int
    verify_cost: float
    break_even: float | None
    most: float


@dataclass(frozen=True)
class Scenario:
    """Speedups at an acceptance by position, whose last rate holds behind it, for each of the outlook's lengths.

    An interval is the lowest and highest of repeated timings, NaN where there was one. `best` is the fastest length, 0
    where plain decoding is faster. `largest_cost` of a draft step still pays, below 0 where not even a free one does;
    `layers` are those of a draft of that cost, None where the layers of the models are not known.
    """

    title: str
    acceptance: list[float]
    speedups: list[Interval]
    best: int
    largest_cost: float
    layers: int | None


@dataclass(frozen=True)
class Outlook:
    """What one set of costs promises; `sentences` are its verdict. `prompt` tokens are read by both models (0: the
    prompt is left out) and `new` follow."""

    title: str
    prompt: int
    new: int
    token_seconds: float
    draft_cost: float
    lengths: list[PlannedLength]
    scenarios: list[Scenario]
    sentences: list[str]


@dataclass(frozen=True)
class Plan:
    """All outlooks, each by its own costs, and llama.cpp's settings where a curve and an acceptance were given."""

    command: str
    machine: dict[str, Any]
    outlooks: list[Outlook]
    settings: list[str] = field(default_factory=list)

"""What the profile measures: profile.json as dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MeasuredCurve:
    """Seconds of a step of m tokens at one depth, for each m of `tokens`: median, lowest and highest of the repeats.

    `doubt` says why the curve may not be the machine's own; it is empty for a steady one. `options` are llama.cpp's
    where they differ from their defaults.
    """

    model: str
    backend: str
    dtype: str
    depth: int
    repeats: int
    tokens: list[int]
    seconds: list[float]
    low: list[float]
    high: list[float]
    doubt: str = ""
    options: str = ""


@dataclass(frozen=True)
class ProfileReport:
    """profile.json: the curves of target and draft by each backend, with the command and the machine."""

    command: str
    machine: dict[str, Any]
    curves: list[MeasuredCurve]

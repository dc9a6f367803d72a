"""When the requests of a load are sent: each after another, at random moments, or at the moments of a trace."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from distill.errors import DataError, RecipeError
from distill.files import has_form, parse_object
from distill.intervals import Numbers

PASSES = 2  # requests for each that is sent at once, and to each prompt where they arrive, at least
MAX_RATE = 1000.0  # requests a second
MAX_TRACE_SECONDS = 7 * 86400.0  # seconds of a trace


@dataclass(frozen=True)
class Load:
    """`concurrency` requests at once, each followed by the next.

    With 0 of them requests arrive: `rate` a second in the mean by a Poisson process, or at the `times` of a trace
    (seconds, rising).
    """

    concurrency: int = 0
    rate: float = math.nan
    times: tuple[float, ...] = ()

    @property
    def title(self) -> str:
        """In words."""
        if self.concurrency:
            return f"{self.concurrency} at once"
        return f"{self.rate:.3g} requests/s{', trace' if self.times else ''}"

    def count(self, prompts: int) -> int:
        """Requests of one replay."""
        if self.concurrency:
            return max(prompts, PASSES * self.concurrency)
        return len(self.times) or PASSES * prompts

    def due(self, count: int, seed: int) -> Numbers:
        """Seconds [count] from the beginning at which requests are sent; 0 where each follows another."""
        if self.concurrency:
            return numpy.zeros(count)
        if self.times:
            return numpy.array(self.times)
        return numpy.cumsum(numpy.random.default_rng(seed).exponential(1 / self.rate, count))


def arrivals(text: str) -> tuple[Load, ...]:
    """The loads of an option: rates separated by commas, or the file of a trace. RecipeError or DataError."""
    if Path(text).suffix in (".jsonl", ".json"):
        return (_trace(Path(text)),)
    try:
        rates = sorted({float(part) for part in text.split(",")})
    except ValueError:
        rates = []
    if not rates or not all(0 < rate <= MAX_RATE for rate in rates):
        raise RecipeError(
            f"--load {text}: requests per second, above 0 and up to {MAX_RATE:g}, or the .jsonl file of a trace",
            "for instance --load 0.5,1,2",
        )
    return tuple(Load(rate=rate) for rate in rates)


def _trace(path: Path) -> Load:
    """Requests at the `timestamp`s of JSON lines, in seconds, the first of them at 0."""
    try:
        lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise DataError(f"--load {path} cannot be read: {error.strerror}", "give the file of a trace") from None
    found: list[float] = []
    for number, line in enumerate(lines, 1):
        row = parse_object(line)
        moment: Any = None if isinstance(row, str) else row.get("timestamp")
        if not has_form(moment, (int, float)) or isinstance(moment, bool) or not abs(moment) < 1e18:
            raise DataError(f"{path}, line {number}, has no number `timestamp`", "seconds, one request a line")
        found.append(float(moment))
    found.sort()
    if len(found) < PASSES or not 0 < found[-1] - found[0] <= MAX_TRACE_SECONDS:
        raise DataError(
            f"{path} has {len(found)} requests, not at least {PASSES} within seven days", "are its times in seconds?"
        )
    return Load(rate=(len(found) - 1) / (found[-1] - found[0]), times=tuple(moment - found[0] for moment in found))

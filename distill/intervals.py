"""Bootstrap intervals that resample prompts or documents, never single tokens (which are not independent).

Legend: U units (prompts or documents), R resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from distill.files import Figure


@dataclass(frozen=True)
class Interval:
    """A mean with the bounds of its interval; NaN throughout where nothing was counted."""

    mean: Figure
    low: Figure
    high: Figure


Numbers = NDArray[numpy.float64]
Column = Sequence[float] | Numbers  # a number for each of U units
DRAWS = 2**22  # draws held in memory at once
RESAMPLES, CONFIDENCE = 2000, 0.95  # of every interval that is reported
UNKNOWN = Interval(float("nan"), float("nan"), float("nan"))


def ratio_interval(sums: Column, counts: Column) -> Interval:
    """Mean Σ sums / Σ counts over U units with its percentile interval.

    Units with count 0 take part in the resampling, because a new draw of prompts may contain such units too. Resamples
    whose counts sum to 0 are left out. NaN throughout where all counts are 0.
    """
    return _interval((sums, counts), [1], lambda s: s[0] / s[1])


def paired_ratio_interval(sums: Column, counts: Column, new_sums: Column, new_counts: Column) -> Interval:
    """The rise of Σ sums / Σ counts from one measurement of U units to another of the same units, with its interval.

    Both are resampled with the same draws. Resamples in which the counts of either sum to 0 are left out. NaN
    throughout where all counts of either are 0.
    """
    return _interval((sums, counts, new_sums, new_counts), [1, 3], lambda s: s[2] / s[3] - s[0] / s[1])


def speed_ratio(tokens: Column, seconds: Column, base_tokens: Column, base_seconds: Column) -> Interval:
    """Tokens per second over the base's on the same U prompts, which are resampled together.

    Resamples without tokens or seconds of either are left out. NaN throughout for no prompt.
    """
    columns = (tokens, seconds, base_tokens, base_seconds)
    return _interval(columns, range(4), lambda s: (s[0] / s[1]) / (s[2] / s[3]))


def _interval(columns: Sequence[Column], divisors: Sequence[int], figure: Callable[[Numbers], Any]) -> Interval:
    """A figure of the sums of C columns [U], computed from the sums [C] or [C, R], with its percentile interval.

    Resamples in which one of the `divisors`, columns by number, sums to 0 are left out; NaN throughout where all do.
    """
    arrays = [numpy.asarray(column, float) for column in columns]
    totals = numpy.array([array.sum() for array in arrays])
    if not all(totals[[*divisors]]):
        return UNKNOWN
    sums = numpy.stack(_resampled(arrays))  # [C, R]
    usable = (sums[[*divisors]] > 0).all(0)
    edge = (1 - CONFIDENCE) / 2
    low, high = numpy.quantile(figure(sums[:, usable]), [edge, 1 - edge])
    return Interval(float(figure(totals)), float(low), float(high))


def _resampled(columns: Sequence[Numbers]) -> list[Numbers]:
    """The sums [R] of each column [U] over the same R draws of U units, some draws at a time to bound the memory."""
    units, random = len(columns[0]), numpy.random.default_rng(0)
    sums = [numpy.empty(RESAMPLES) for _ in columns]
    at_once = max(1, DRAWS // units)
    for start in range(0, RESAMPLES, at_once):
        size = min(at_once, RESAMPLES - start)
        drawn = random.integers(0, units, size=(size, units))
        for column, own in zip(columns, sums, strict=True):
            own[start : start + size] = column[drawn].sum(1)
    return sums

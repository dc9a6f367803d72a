"""Bootstrap intervals that resample prompts or documents, never single tokens (which are not independent).

Legend: U units (prompts or documents), R resamples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from distill.results.serialise import Figure


@dataclass(frozen=True)
class Interval:
    """A mean with the bounds of its interval; NaN throughout where nothing was counted."""

    mean: Figure
    low: Figure
    high: Figure


Numbers = NDArray[numpy.float64]
DRAWS = 2**22  # draws held in memory at once
UNKNOWN = Interval(float("nan"), float("nan"), float("nan"))


def ratio_interval(
    sums: Sequence[float] | NDArray[numpy.float64],
    counts: Sequence[float] | NDArray[numpy.float64],
    resamples: int,
    confidence: float,
    seed: int = 0,
) -> Interval:
    """Mean Σ sums / Σ counts over U units with its percentile interval.

    Units with count 0 take part in the resampling, because a new draw of prompts may contain such units too. Resamples
    whose counts sum to 0 are left out. NaN throughout where all counts are 0.
    """
    total, weight = numpy.asarray(sums, float), numpy.asarray(counts, float)
    if weight.sum() == 0:
        return UNKNOWN
    sampled, weights = _resampled((total, weight), resamples, seed)
    means = sampled[weights > 0] / weights[weights > 0]
    return percentiles(total.sum() / weight.sum(), means, confidence)


def paired_ratio_interval(
    sums: Sequence[float],
    counts: Sequence[float],
    new_sums: Sequence[float],
    new_counts: Sequence[float],
    resamples: int,
    confidence: float,
    seed: int = 0,
) -> Interval:
    """The rise of Σ sums / Σ counts from one measurement of U units to another of the same units, with its interval.

    Both are resampled with the same draws. Resamples in which the counts of either sum to 0 are left out. NaN
    throughout where all counts of either are 0.
    """
    old, old_weight = numpy.asarray(sums, float), numpy.asarray(counts, float)
    new, new_weight = numpy.asarray(new_sums, float), numpy.asarray(new_counts, float)
    if not (old_weight.sum() and new_weight.sum()):
        return UNKNOWN
    olds, news, below, above = _resampled((old, new, old_weight, new_weight), resamples, seed)
    usable = (below > 0) & (above > 0)
    rises = news[usable] / above[usable] - olds[usable] / below[usable]
    return percentiles(new.sum() / new_weight.sum() - old.sum() / old_weight.sum(), rises, confidence)


def speed_ratio(
    tokens: Sequence[float] | Numbers,
    seconds: Sequence[float] | Numbers,
    base_tokens: Sequence[float] | Numbers,
    base_seconds: Sequence[float] | Numbers,
    resamples: int,
    confidence: float,
) -> Interval:
    """Tokens per second over the base's on the same U prompts, which are resampled together.

    Resamples without tokens or seconds of either are left out. NaN throughout for no prompt.
    """
    columns = [numpy.asarray(column, float) for column in (tokens, seconds, base_tokens, base_seconds)]
    if not all(column.sum() for column in columns):
        return UNKNOWN
    sums = numpy.stack(_resampled(columns, resamples, 0))  # [4, R]
    sums = sums[:, (sums > 0).all(0)]
    mean = [column.sum() for column in columns]
    ratio = (mean[0] / mean[1]) / (mean[2] / mean[3])
    return percentiles(ratio, (sums[0] / sums[1]) / (sums[2] / sums[3]), confidence)


def resampled_means(sums: Numbers, counts: Numbers, resamples: int, seed: int = 0) -> Numbers:
    """The means [R, P] of P measurements, Σ sums [P, U] / Σ counts [U], over the same R draws of U units.

    Resamples whose counts sum to 0 are left out.
    """
    weights, *rows = _resampled((counts, *sums), resamples, seed)
    return numpy.stack(rows, 1)[weights > 0] / weights[weights > 0, None]


def _resampled(columns: Sequence[Numbers], resamples: int, seed: int) -> list[Numbers]:
    """The sums [R] of each column [U] over the same R draws of U units, some draws at a time to bound the memory."""
    units, random = len(columns[0]), numpy.random.default_rng(seed)
    found = [numpy.empty(resamples) for _ in columns]
    at_once = max(1, DRAWS // units)
    for start in range(0, resamples, at_once):
        size = min(at_once, resamples - start)
        drawn = random.integers(0, units, size=(size, units))
        for column, sums in zip(columns, found, strict=True):
            sums[start : start + size] = column[drawn].sum(1)
    return found


def percentiles(mean: float, resampled: NDArray[numpy.float64], confidence: float) -> Interval:
    """A mean with the percentile interval of its resamples [R]."""
    edge = (1 - confidence) / 2
    low, high = numpy.quantile(resampled, [edge, 1 - edge])
    return Interval(float(mean), float(low), float(high))

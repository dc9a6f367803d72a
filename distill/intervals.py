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
    drawn = numpy.random.default_rng(seed).integers(0, len(total), size=(resamples, len(total)))
    weights = weight[drawn].sum(1)
    means = total[drawn].sum(1)[weights > 0] / weights[weights > 0]
    return _percentiles(total.sum() / weight.sum(), means, confidence)


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
    drawn = numpy.random.default_rng(seed).integers(0, len(old), size=(resamples, len(old)))
    below, above = old_weight[drawn].sum(1), new_weight[drawn].sum(1)
    usable = (below > 0) & (above > 0)
    rises = new[drawn].sum(1)[usable] / above[usable] - old[drawn].sum(1)[usable] / below[usable]
    return _percentiles(new.sum() / new_weight.sum() - old.sum() / old_weight.sum(), rises, confidence)


def _percentiles(mean: float, resampled: NDArray[numpy.float64], confidence: float) -> Interval:
    edge = (1 - confidence) / 2
    low, high = numpy.quantile(resampled, [edge, 1 - edge])
    return Interval(float(mean), float(low), float(high))

"""Bootstrap intervals that resample prompts or documents, never single tokens (which are not independent).

Legend: U units (prompts or documents), R resamples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

Interval = dict[str, float]


def ratio_interval(
    sums: Sequence[float] | NDArray[numpy.float64],
    counts: Sequence[float] | NDArray[numpy.float64],
    resamples: int,
    confidence: float,
    seed: int = 0,
) -> Interval:
    """Mean Σ sums / Σ counts over U units with its percentile interval: {"mean", "low", "high"}.

    Units with count 0 take part in the resampling, because a new draw of prompts may contain such units too. Resamples
    whose counts sum to 0 are left out. NaN throughout where all counts are 0.
    """
    total, weight = numpy.asarray(sums, float), numpy.asarray(counts, float)
    if weight.sum() == 0:
        return {"mean": float("nan"), "low": float("nan"), "high": float("nan")}
    drawn = numpy.random.default_rng(seed).integers(0, len(total), size=(resamples, len(total)))
    weights = weight[drawn].sum(1)
    means = total[drawn].sum(1)[weights > 0] / weights[weights > 0]
    edge = (1 - confidence) / 2
    low, high = numpy.quantile(means, [edge, 1 - edge])
    return {"mean": float(total.sum() / weight.sum()), "low": float(low), "high": float(high)}


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
        return {"mean": float("nan"), "low": float("nan"), "high": float("nan")}
    drawn = numpy.random.default_rng(seed).integers(0, len(old), size=(resamples, len(old)))
    below, above = old_weight[drawn].sum(1), new_weight[drawn].sum(1)
    usable = (below > 0) & (above > 0)
    rises = new[drawn].sum(1)[usable] / above[usable] - old[drawn].sum(1)[usable] / below[usable]
    edge = (1 - confidence) / 2
    low, high = numpy.quantile(rises, [edge, 1 - edge])
    mean = new.sum() / new_weight.sum() - old.sum() / old_weight.sum()
    return {"mean": float(mean), "low": float(low), "high": float(high)}

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

    Units without a count take part in the resampling (they are what a new draw of prompts may contain) but resamples in
    which nothing was counted are left out. No unit with a count gives NaN throughout.
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

"""Measure how often intervals of a few prompts contain the true value. Takes a minute.

    python scripts/benchmarks/intervals.py

The intervals are: percentiles of 95 % of resamples, percentiles widened to Student's t, BCa, and t on the logarithm of
the ratio.
"""

from __future__ import annotations

import math

import numpy
from scipy import stats

from distill import tables

TRUTH, TRIALS = 1.3, 2000


def drawn(units: int, random: numpy.random.Generator) -> list[numpy.ndarray]:
    """Return tokens and seconds of both decoders [units]. Prompts differ in length, speed and gain, and share speed."""
    tokens = random.integers(8, 97, units).astype(float)
    speed, gain = random.lognormal(3.5, 0.15, units), random.lognormal(0, 0.25, units)
    prompt = random.lognormal(-2.5, 0.5, units)
    return [tokens, prompt + tokens / (speed * gain * TRUTH), tokens, prompt + tokens / speed]


def ratio(sums: numpy.ndarray) -> numpy.ndarray:
    return (sums[0] / sums[1]) / (sums[2] / sums[3])


def intervals(columns: list[numpy.ndarray], random: numpy.random.Generator) -> dict[str, tuple[float, float]]:
    units = len(columns[0])
    stacked = numpy.stack(columns)
    resampled = ratio(stacked @ random.multinomial(units, numpy.full(units, 1 / units), 2000).T)
    estimate = float(ratio(stacked.sum(1)))
    jackknife = ratio(stacked.sum(1, keepdims=True) - stacked)
    apart = jackknife.mean() - jackknife
    acceleration = float((apart**3).sum() / (6 * (apart**2).sum() ** 1.5))
    bias = stats.norm.ppf((resampled < estimate).mean())
    adjusted = [bias + (bias + z) / (1 - acceleration * (bias + z)) for z in stats.norm.ppf([0.025, 0.975])]
    t = stats.t.ppf(0.975, units - 1)
    logs = numpy.log(jackknife)
    error = t * math.sqrt((units - 1) / units * ((logs - logs.mean()) ** 2).sum())
    edge = tables.edge_of(units)
    bounds = {
        "percentiles of 95 %": numpy.quantile(resampled, [0.025, 0.975]),
        "percentiles widened to t": numpy.quantile(resampled, [edge, 1 - edge]),
        "BCa": numpy.quantile(resampled, stats.norm.cdf(adjusted)),
        "t on the logarithm": estimate * numpy.exp([-error, error]),
    }
    return {name: (float(low), float(high)) for name, (low, high) in bounds.items()}


def main() -> None:
    print("| interval | " + " | ".join(f"{units} prompts" for units in (6, 12, 24, 64)) + " |\n|-|-|-|-|-|")
    shares: dict[str, list[str]] = {}
    for units in (6, 12, 24, 64):
        random = numpy.random.default_rng(units)
        large = [column for column in drawn(2**20, random)]
        truth = float(ratio(numpy.stack(large).sum(1)))
        hits: dict[str, int] = {}
        for _ in range(TRIALS):
            for name, (low, high) in intervals(drawn(units, random), random).items():
                hits[name] = hits.get(name, 0) + (low <= truth <= high)
        for name, count in hits.items():
            shares.setdefault(name, []).append(f"{count / TRIALS:.1%}")
    for name, row in shares.items():
        print(f"| {name} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()

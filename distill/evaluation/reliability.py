"""Reliability of the draft's own probabilities: what it promises of the tokens it drafts, beside what is accepted.

Length rules that stop at a probability (llama.cpp's p_min) or at a product of them take these numbers at their word.
Legend: N tokens, U prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import mul

import numpy
from numpy.typing import NDArray

from distill.intervals import ratio_interval
from distill.results.evaluation_results import Reliability, ReliabilityBin
from distill.speculative.calibration import Recorded, expected_calibration_error

BINS = 10  # of equal width
SIMULATED = 200  # outcomes drawn to see what error chance alone makes

Rows = list[tuple[float, bool]]  # promised probability, whether it came true


def reliability(rounds: Sequence[Sequence[Recorded]]) -> list[Reliability]:
    """Of the rounds of each prompt: the probability of each drafted token that was judged, and the running product.

    The product, at each drafted position, is of the probabilities up to there; it comes true where all these tokens
    are accepted. Nothing where no token was drafted.
    """
    found = []
    for of, rows_of in (("token", _tokens), ("product", _products)):
        rows = [[row for one in own for row in rows_of(one)] for own in rounds]
        if any(rows):
            found.append(_measured(of, rows))
    return found


def _tokens(one: Recorded) -> Iterator[tuple[float, bool]]:
    return ((features.top, accepted) for _, features, accepted in one.judged())


def _products(one: Recorded) -> Iterator[tuple[float, bool]]:
    products = accumulate((features.top for features in one.features), mul)
    return ((product, position < one.accepted) for position, product in enumerate(products))


def _measured(of: str, rows: Sequence[Rows]) -> Reliability:
    """The figures of promised probabilities and outcomes by prompt."""
    units = numpy.repeat(numpy.arange(len(rows)), [len(own) for own in rows])
    promised = numpy.array([p for own in rows for p, _ in own])
    true = numpy.array([y for own in rows for _, y in own], dtype=float)
    places = numpy.minimum((promised * BINS).astype(int), BINS - 1)

    def totals(values: NDArray[numpy.float64]) -> NDArray[numpy.float64]:
        return numpy.bincount(units, values, len(rows)).astype(float)

    bins = []
    for place in range(BINS):
        here = (places == place).astype(float)
        if here.any():
            rate = ratio_interval(totals(here * true), totals(here))
            mean = float((here * promised).sum() / here.sum())
            bins.append(ReliabilityBin(place / BINS, (place + 1) / BINS, int(here.sum()), mean, rate))
    draws = numpy.random.default_rng(0).random((SIMULATED, len(promised))) < promised
    return Reliability(
        of=of,
        tokens=len(promised),
        promised=float(promised.mean()),
        accepted=ratio_interval(totals(true), totals(numpy.ones_like(true))),
        error=expected_calibration_error(promised, true, BINS),
        error_of_chance=float(numpy.mean([expected_calibration_error(promised, drawn, BINS) for drawn in draws])),
        bins=bins,
    )

"""The load from which drafts stop paying, and the n_max that pays at each: predicted from steps of the plain server.

A step that verifies n drafted tokens of each of B texts is taken to cost what a plain step of B·(n + 1) texts costs.
The draft reads what the target reads and then makes n tokens of each text; its steps are taken to cost a share d of the
target's. What each drafted token costs by itself comes on top, b seconds: its place in the sampler, a draft whose steps
over many texts take longer in proportion. Both follow from the rounds of the smallest two loads above one; of a
single one d alone does. Rounds of one text are those that were measured: servers with a cache for each text verify a
single one more cheaply. Prompts are read one after the other, and each text waits for those of the others.

Legend: B requests at once, n drafted tokens of a round, T(m) seconds of a plain step of m texts, τ tokens per round.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy

from distill.intervals import Interval
from distill.results.serving_results import LoadRow, LoadTable, ServedAcceptance, ServedSpeed
from distill.serving.clients import DRAFT, PLAIN
from distill.speculative.costs.curve import predicted_speedups, tokens_per_round

MIN_SHARE = 0.1  # of the verification's plain step: noise may ask for less
SINGULAR = 1e-3  # of the product of the diagonal: two loads that cannot tell d from b


@dataclass(frozen=True)
class RoundModel:
    """T(m) by m; the acceptance a_1.. of each drafted position, given that it was reached; seconds until the first
    token of one request, plain and with the draft; tokens behind it; tokens drafted in a mean round for each of n_max;
    d and b (see above); a round of one text over what it would cost as those of several do."""

    steps: Mapping[int, float]
    accepted: Sequence[float]
    first: tuple[float, float]
    later: float
    filled: float = 1.0
    draft: float = 0.0
    each: float = 0.0
    alone: float = 1.0

    def seconds(self, texts: float) -> float:
        """T(m): between measured ones by straight lines, behind the last by the slope of the upper half."""
        known = list(self.steps)
        largest = known[-1]
        values = numpy.interp([texts, largest / 2, largest], known, list(self.steps.values()))
        slope = max(0.0, values[2] - values[1]) / (largest - max(largest / 2, known[0]))
        return float(values[0] + max(0.0, texts - largest) * slope)

    def parts(self, together: int, length: int) -> tuple[float, float, float]:
        """The seconds of a round of B texts and n drafted tokens are these three, times 1, d and b."""
        drafted = length * self.filled
        verified = self.seconds(together * (1 + drafted))
        return verified, verified + drafted * self.seconds(together), together * drafted

    def round(self, together: int, length: int) -> float:
        """Seconds of a round of B texts and n drafted tokens, of one text as if it were one of several."""
        verified, share, drafted = self.parts(together, length)
        return max(verified + self.draft * share + self.each * drafted, MIN_SHARE * verified)

    def fitted(self, rounds: Sequence[tuple[int, float]], alone: float) -> RoundModel:
        """With the d and b that give one or two measured rounds of (B texts, seconds), and what gives that of one.

        Two rounds that no d and b of at least 0 give are noise in part: then d alone or b alone is taken, which is
        nearer by least squares of the relative errors. Such a d may be below 0: drafted tokens are cheaper than texts.
        """
        length = len(self.accepted)
        parts = numpy.array([self.parts(together, length) for together, _ in rounds])
        # Relative to the seconds of the verification.
        over = numpy.array([seconds for _, seconds in rounds]) / parts[:, 0] - 1
        shares = parts[:, 1:] / parts[:, :1]
        by_itself = shares.T @ over / (shares**2).sum(axis=0)
        if len(rounds) == 1:
            found = numpy.array([max(0.0, by_itself[0]), 0.0])
        else:
            singular = abs(numpy.linalg.det(shares)) <= SINGULAR * abs(shares[0, 0] * shares[1, 1])
            found = numpy.full(2, -1.0) if singular else numpy.linalg.solve(shares, over)
            if found.min() < 0:
                either = numpy.diag(numpy.maximum(by_itself, [-1.0, 0.0]))
                found = min(either, key=lambda one: float(((shares @ one - over) ** 2).sum()))
        model = replace(self, draft=float(found[0]), each=float(found[1]))
        return replace(model, alone=max(0.0, alone) / model.round(1, length))

    def speedups(self, together: int) -> list[float]:
        """The speed of requests over the plain server's, B at once, by n_max from 0 on."""
        plain = self.seconds(together)
        rounds = [self.round(together, length) for length in range(1, len(self.accepted) + 1)]
        later = self.later * plain
        decoding = predicted_speedups([plain, *rounds], 0.0, self.accepted)
        reading, dearer = [together * one for one in self.first], self.alone if together == 1 else 1.0
        return [1.0, *((reading[0] + later) / (reading[1] + later * dearer / speed) for speed in decoding[1:])]


def conditional(own: ServedAcceptance, n_max: int) -> list[float]:
    """a_1.. of n_max positions whose τ is that of all rounds: in the proportions of the counted positions, or all equal
    where they were not counted."""
    extra = max(own.tokens_per_round.mean - 1, 1e-9)
    counts = [*(own.by_position or ()), *[0.0] * n_max][:n_max]
    total = sum(counts)
    if total:
        shares = [one * extra / total for one in counts]
        return [min(1.0, one / before) if before else 0.0 for before, one in itertools.pairwise([1.0, *shares])]
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_round([middle] * n_max) < 1 + extra else (low, middle)
    return [low] * n_max


def crossing(loads: Sequence[float], speedups: Sequence[float]) -> float:
    """The load behind which the speedup stays below 1, between two by their logarithms.

    0 where it is below 1 at every load, NaN where it is not at the last.
    """
    paying = [place for place, speedup in enumerate(speedups) if speedup >= 1]
    if not paying:
        return 0.0
    at = paying[-1]
    if at == len(loads) - 1:
        return math.nan
    share = (speedups[at] - 1) / (speedups[at] - speedups[at + 1])
    return float(loads[at] * (loads[at + 1] / loads[at]) ** share)


def load_table(
    speeds: Sequence[ServedSpeed], steps: Mapping[int, float], own: ServedAcceptance, n_max: int
) -> LoadTable | None:
    """Both crossings, and the best n_max at each load; None where the plain server's steps are not known, or no load is
    above 1."""
    pairs = [
        (base, one)
        for base, one in itertools.pairwise(speeds)
        if one.concurrency and (base.configuration, one.configuration) == (PLAIN, DRAFT)
    ]
    if 1 not in steps or len(steps) < 2 or len(pairs) < 2 or not n_max:
        return None
    first = [one.first_seconds[0] for one in pairs[0]]
    tau, later = own.tokens_per_round.mean, pairs[0][1].tokens / pairs[0][1].requests - 1
    filled = min(1.0, own.drafted * (tau - 1) / (own.accepted * n_max)) if own.accepted else 1.0
    model = RoundModel(steps, conditional(own, n_max), (first[0], first[1]), later, filled)
    # Seconds of a round that give the measured speedup: a slow spell of the machine met both servers.
    rounds = []
    for _, one in pairs[:3]:
        plain = one.concurrency * first[0] + later * model.seconds(one.concurrency)
        seconds = (plain / one.speedup.mean - one.concurrency * first[1]) * tau / later
        rounds.append((one.concurrency, seconds))
    model = model.fitted(rounds[1:], rounds[0][1])
    rows = []
    for base, one in pairs:
        found = model.speedups(one.concurrency)
        best = found.index(max(found))
        beyond = one.concurrency * (1 + n_max * filled) > max(steps)
        rate = base.requests_per_second
        rows.append(LoadRow(one.concurrency, rate, one.speedup, found[n_max], best, found[best], beyond))
    loads = [row.concurrency for row in rows]
    bounds = [crossing(loads, [getattr(row.measured, bound) for row in rows]) for bound in ("mean", "low", "high")]
    predicted = crossing(loads, [row.predicted for row in rows])
    return LoadTable(rows, Interval(*bounds), predicted, dict(steps), model.draft, model.each)

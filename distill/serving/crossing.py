"""The load from which drafts stop paying, and the n_max that pays at each: predicted from steps of the plain server.

A step that verifies n drafted tokens of each of B texts is taken to cost what a plain step of B·(n + 1) texts costs.
That leaves out attention, which reads B caches in place of B·(n + 1). The draft reads what the target reads and then
makes n tokens of each text; its steps are taken to cost a fixed share of the target's, which follows from the rounds of
the smallest load above one. Rounds of one text are those that were measured: many builds verify a single text more
cheaply. Prompts are read one after the other, and each text waits for those of the others.

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
from distill.serving.opening import DRAFT, PLAIN
from distill.speculative.costs.curve import predicted_speedups, tokens_per_round


@dataclass(frozen=True)
class RoundModel:
    """T(m) by m; the acceptance a_1.. of each drafted position, given that it was reached; seconds until the first
    token of one request, plain and with the draft; tokens behind it; tokens drafted in a mean round for each of n_max;
    the draft's step over the target's; a round of one text over what it would cost as those of several do."""

    steps: Mapping[int, float]
    accepted: Sequence[float]
    first: tuple[float, float]
    later: float
    filled: float = 1.0
    draft: float = 0.0
    alone: float = 1.0

    def seconds(self, texts: float) -> float:
        """T(m): between measured ones by straight lines, behind the last by the slope of the upper half."""
        known = list(self.steps)
        most = known[-1]
        values = numpy.interp([texts, most / 2, most], known, list(self.steps.values()))
        slope = max(0.0, values[2] - values[1]) / (most - max(most / 2, known[0]))
        return float(values[0] + max(0.0, texts - most) * slope)

    def fitted(self, together: int, round_seconds: float, alone: float) -> RoundModel:
        """With the draft's share and the cost of one text that give measured rounds: of B texts, and `alone` of one."""
        drafted = len(self.accepted) * self.filled
        verified = [self.seconds(texts * (1 + drafted)) for texts in (1, together)]
        both = [step + drafted * self.seconds(texts) for step, texts in zip(verified, (1, together), strict=True)]
        share = max(0.0, (round_seconds - verified[1]) / both[1])
        return replace(self, draft=share, alone=max(0.0, alone) / (verified[0] + share * both[0]))

    def speedups(self, together: int) -> list[float]:
        """The speed of requests over the plain server's, B at once, by n_max from 0 on."""
        plain = self.seconds(together)
        verified = [
            (1 + self.draft) * self.seconds(together * (1 + n * self.filled)) for n in range(1, len(self.accepted) + 1)
        ]
        later = self.later * plain
        decoding = predicted_speedups([plain, *verified], self.draft * self.filled * plain, self.accepted)
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
    for _, one in pairs[:2]:
        plain = one.concurrency * first[0] + later * model.seconds(one.concurrency)
        rounds.append((plain / one.speedup.mean - one.concurrency * first[1]) * tau / later)
    model = model.fitted(pairs[1][1].concurrency, rounds[1], rounds[0])
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
    return LoadTable(rows, Interval(*bounds), predicted, dict(steps), model.draft)

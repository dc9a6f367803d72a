"""What `distill serve-check` found on the user's own server, as dataclasses: tables and JSON are made from it.

Legend: τ tokens per round.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from distill.files import Figure
from distill.tables import UNKNOWN, Interval, paired_ratio_interval, ratio_interval

LEAST_LOSS = 0.01  # tokens per round: less is rounding


@dataclass(frozen=True)
class ServedAcceptance:
    """Drafted and accepted tokens of the same prompts, as `source` counts them.

    `rate` is accepted ÷ drafted. `tokens_per_round` counts all steps of the target behind the prompt, those without a
    draft too. Intervals resample prompts. `by_position` holds, of the rounds that drafted, the share that accepted the
    token at each position; None where the source does not say.
    """

    source: str
    drafted: int
    accepted: int
    rate: Interval
    tokens_per_round: Interval
    by_position: list[float] | None = None


@dataclass(frozen=True)
class ServedSpeed:
    """One configuration under one load: `concurrency` requests at once, each followed by the next.

    `in_flight` is the mean number of them. `first_seconds`, until the first token, and `token_seconds`, for each behind
    it, are the median and the 95th percentile over requests. The speedup is over the plain server, in tokens per second
    of a request's time; NaN for that itself.
    """

    configuration: str
    concurrency: int
    requests: int
    requests_per_second: float
    tokens_per_second: float
    in_flight: float
    first_seconds: tuple[float, float]
    token_seconds: tuple[Figure, Figure]
    speedup: Interval = UNKNOWN


@dataclass(frozen=True)
class Difference:
    """Something that differs from what the draft was made and measured for.

    `loss` are the tokens per round that it costs: measured with the difference and without, on the same prompts; NaN
    where it was not measured.
    """

    what: str
    found: str
    expected: str
    advice: str
    loss: Interval = UNKNOWN

    @property
    def explains(self) -> bool:
        """Whether the whole interval of the loss is more than rounding."""
        return self.loss.low > LEAST_LOSS


@dataclass
class ServeReport:
    """A pair on the user's server, with and without its draft, under `sampler` and from cold caches.

    `acceptance` holds the server's own counts first. `reference` is our decoder on the same prompts, with
    the run's own files where there is a run, and `short` the tokens per round that the server lacks.
    `predicted` is what the run measured for the same draft length on its own test prompts; NaN where there is no run,
    and of sampled requests. `same_texts` of `texts` have the tokens of the plain server.
    """

    command: str
    machine: dict[str, Any]
    server: str
    build: str
    served: str
    n_max: int
    sampler: dict[str, Any]
    prompts: int
    new_tokens: int
    left_out: dict[str, int]
    acceptance: list[ServedAcceptance]
    predicted: Figure
    speeds: list[ServedSpeed]
    same_texts: int
    texts: int
    differences: list[Difference] = field(default_factory=list)
    reference: ServedAcceptance | None = None
    short: Interval = UNKNOWN
    notes: list[str] = field(default_factory=list)


# ── What servers and our own decoder drafted and accepted: by text, by a server's counters, and the rates of both ──


@dataclass(frozen=True)
class Counts:
    """Rounds that drafted, drafted and accepted tokens, and those accepted at each drafted position where that is
    known: of a server since its start, or of texts, which have `later` tokens behind the first."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: tuple[int, ...] = ()
    later: int = 0

    @classmethod
    def of_text(cls, tokens: int, drafted: int = 0, accepted: int = 0, rounds: int | None = None) -> Counts:
        """Of one text of `tokens`. The first comes from the prompt's step. Where the rounds are not counted, as
        llama-server counts none for a request, they are the tokens that were not accepted: of every later step one
        token is the target's own. A text that ends within a round accepted more than it has."""
        later = max(0, tokens - 1)
        rounds = max(min(1, later), later - accepted) if rounds is None else rounds
        return cls(rounds, drafted, accepted, (), later)

    def __add__(self, other: Counts) -> Counts:
        return self._with(other, 1)

    def __sub__(self, other: Counts) -> Counts:
        return self._with(other, -1)

    def _with(self, other: Counts, sign: int) -> Counts:
        places = zip_longest(self.by_position, other.by_position, fillvalue=0)
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("rounds", "drafted", "accepted", "later"))
        rounds, drafted, accepted, later = (own + sign * one for own, one in pairs)
        return Counts(rounds, drafted, accepted, tuple(own + sign * one for own, one in places), later)


@dataclass(frozen=True)
class Text:
    """The tokens of a text (none where a server gives no ids), with its counts."""

    tokens: list[int]
    counts: Counts


def counts_of(texts: Sequence[Sequence[Text]]) -> list[Counts]:
    """The counts of texts, summed over those behind each prompt."""
    return [summed(text.counts for text in own) for own in texts]


def summed(counts: Iterable[Counts]) -> Counts:
    """All of them together."""
    return sum(counts, Counts())


def totals_of(text: str, prefix: str) -> Counts | None:
    """The counters of speculation in Prometheus text, summed over engines; None where one is missing.

    llama-server and vLLM name them alike but for their prefix.
    """
    metric = rf"^{prefix}:spec_decode_num_(\w+)_total(?:{{(.*)}})? +(\d+(?:\.\d+)?(?:e\+?\d\d?)?)(?= |$)"
    sums: dict[str, float] = defaultdict(float)
    places: dict[int, float] = defaultdict(float)
    for name, labels, value in re.findall(metric, text, re.MULTILINE):
        sums[name] += float(value)
        if name == "accepted_tokens_per_pos" and (place := re.search(r'position="(\d{1,4})"', labels)):
            places[int(place[1])] += float(value)
    if not {"drafts", "draft_tokens", "accepted_tokens"} <= set(sums):
        return None
    by_position = tuple(int(places.get(place, 0)) for place in range(max(places, default=-1) + 1))
    return Counts(int(sums["drafts"]), int(sums["draft_tokens"]), int(sums["accepted_tokens"]), by_position)


def acceptance(source: str, texts: Sequence[Counts], totals: Counts | None = None) -> ServedAcceptance:
    """Both rates with their intervals over prompts; `totals` of the same texts give the positions."""
    drafted, accepted = [text.drafted for text in texts], [text.accepted for text in texts]
    later, rounds = [text.later for text in texts], [text.rounds for text in texts]
    positions = None
    if totals is not None and totals.rounds and totals.by_position:
        positions = [accepted_there / totals.rounds for accepted_there in totals.by_position]
    return ServedAcceptance(
        source=source,
        drafted=sum(drafted),
        accepted=sum(accepted),
        rate=ratio_interval(accepted, drafted),
        tokens_per_round=ratio_interval(later, rounds),
        by_position=positions,
    )


def rise_of_tokens(before: Sequence[Counts], after: Sequence[Counts]) -> Interval:
    """τ of `after` less τ of `before`, of the same prompts."""
    sides = [([text.later for text in side], [text.rounds for text in side]) for side in (before, after)]
    return paired_ratio_interval(*sides[0], *sides[1])

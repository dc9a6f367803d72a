"""What servers and our own decoder drafted and accepted: by text, by a server's counters, and the rates of both.

Legend: τ tokens per round.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from distill.intervals import Interval, paired_ratio_interval, ratio_interval
from distill.results.serving_results import ServedAcceptance


class TextCounts(NamedTuple):
    """What was drafted and accepted in the texts behind one prompt, in `later` tokens and `rounds`."""

    later: int = 0
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0

    @classmethod
    def of(cls, tokens: int, drafted: int = 0, accepted: int = 0, rounds: int | None = None) -> TextCounts:
        """Of one text of `tokens`. The first comes from the prompt's step. Where the rounds are not counted, as
        llama-server counts none for a request, they are the tokens that were not accepted: of every later step one
        token is the target's own. A text that ends within a round accepted more than it has."""
        later = max(0, tokens - 1)
        return cls(later, drafted, accepted, max(min(1, later), later - accepted) if rounds is None else rounds)


@dataclass(frozen=True)
class Text:
    """The tokens of a text (none where a server gives no ids), with its counts."""

    tokens: list[int]
    counts: TextCounts


def counts_of(texts: Sequence[Sequence[Text]]) -> list[TextCounts]:
    """The counts of texts, summed over those behind each prompt."""
    return [TextCounts(*map(sum, zip(*(text.counts for text in own), strict=True))) for own in texts]


@dataclass(frozen=True)
class Totals:
    """A server's counters of speculation since its start: rounds that drafted, drafted and accepted tokens, and those
    accepted at each drafted position."""

    rounds: int
    drafted: int
    accepted: int
    by_position: tuple[int, ...] = ()

    def since(self, before: Totals) -> Totals:
        """What was counted after `before`."""
        known = [*before.by_position, *[0] * len(self.by_position)]
        return Totals(
            self.rounds - before.rounds,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            tuple(now - then for now, then in zip(self.by_position, known, strict=False)),
        )


def totals_of(text: str, prefix: str) -> Totals | None:
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
    return Totals(int(sums["drafts"]), int(sums["draft_tokens"]), int(sums["accepted_tokens"]), by_position)


def acceptance(source: str, texts: Sequence[TextCounts], totals: Totals | None = None) -> ServedAcceptance:
    """Both rates with their intervals over prompts; `totals` of the same texts give the positions."""
    drafted, accepted = [text.drafted for text in texts], [text.accepted for text in texts]
    later, rounds = [text.later for text in texts], [text.rounds for text in texts]
    positions = None
    if totals is not None and totals.rounds and totals.by_position:
        positions = [accepted_there / totals.rounds for accepted_there in totals.by_position]
    return ServedAcceptance(
        source=source,
        prompts=len(texts),
        drafted=sum(drafted),
        accepted=sum(accepted),
        rate=ratio_interval(accepted, drafted),
        tokens_per_round=ratio_interval(later, rounds),
        by_position=positions,
    )


def rise_of_tokens(before: Sequence[TextCounts], after: Sequence[TextCounts]) -> Interval:
    """τ of `after` less τ of `before`, of the same prompts."""
    sides = [([text.later for text in side], [text.rounds for text in side]) for side in (before, after)]
    return paired_ratio_interval(*sides[0], *sides[1])

"""Acceptance from counts by prompt, the same formulas for a server's counts and for our own decoder's.

Legend: τ tokens per round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distill.intervals import Interval, paired_ratio_interval, ratio_interval
from distill.results.serving_results import ServedAcceptance
from distill.serving.client import Reply, Totals

RESAMPLES, CONFIDENCE = 2000, 0.95


@dataclass(frozen=True)
class TextCounts:
    """One text: its tokens, and how many were drafted and accepted.

    The first token comes from the prompt's step. Of every later step one token is the target's own, so the steps are
    the tokens that were not accepted: llama-server shows no count of steps for a request.
    """

    tokens: int
    drafted: int
    accepted: int

    @property
    def later(self) -> int:
        """Tokens behind the first."""
        return max(0, self.tokens - 1)

    @property
    def rounds(self) -> int:
        """Steps of the target behind the prompt. A text that ends within a round accepted more than it has."""
        return max(min(1, self.later), self.later - self.accepted)


def counted(replies: Sequence[Reply]) -> list[TextCounts]:
    """The counts of replies that have them."""
    return [TextCounts(reply.count, reply.drafted or 0, reply.accepted or 0) for reply in replies]


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
        rate=ratio_interval(accepted, drafted, RESAMPLES, CONFIDENCE),
        tokens_per_round=ratio_interval(later, rounds, RESAMPLES, CONFIDENCE),
        by_position=positions,
    )


def rise_of_rate(before: Sequence[TextCounts], after: Sequence[TextCounts]) -> Interval:
    """Accepted ÷ drafted of `after` less that of `before`, of the same prompts."""
    sides = [([text.accepted for text in side], [text.drafted for text in side]) for side in (before, after)]
    return paired_ratio_interval(*sides[0], *sides[1], RESAMPLES, CONFIDENCE)


def rise_of_tokens(before: Sequence[TextCounts], after: Sequence[TextCounts]) -> Interval:
    """τ of `after` less τ of `before`, of the same prompts."""
    sides = [([text.later for text in side], [text.rounds for text in side]) for side in (before, after)]
    return paired_ratio_interval(*sides[0], *sides[1], RESAMPLES, CONFIDENCE)

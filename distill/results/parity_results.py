"""What `distill eval --parity` found: the same tokens scored in every way that a pair is run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from distill.results.serialise import Figure

ONE = 0.005  # acceptances no further apart count as one


@dataclass(frozen=True)
class ParityRow:
    """One way of scoring, compared with the way named `against` (None: with none).

    `acceptance` is the mean Σ min(p, q) at temperature 1, `acceptance_most` its upper bound where the target's rarest
    tokens are unknown, else the same; `agreement` is the share of equal argmaxes. `difference` is the acceptance minus
    that of `against`; `by_target` and `by_draft` are what remains of it with the other model as in `against`.
    `target_error` and `draft_error` are mean absolute differences of the log-probabilities of the text's tokens, in
    nats; `target_top` and `draft_top` the shares of equal argmaxes. NaN is what a way does not tell.
    """

    way: str
    models: str
    against: str | None
    acceptance: Figure
    acceptance_most: Figure
    agreement: Figure
    kl: Figure
    difference: Figure = math.nan
    by_target: Figure = math.nan
    by_draft: Figure = math.nan
    target_error: Figure = math.nan
    draft_error: Figure = math.nan
    target_top: Figure = math.nan
    draft_top: Figure = math.nan

    @property
    def gap(self) -> float:
        """How far the acceptance lies from that of `against`: 0 where that is within the bounds."""
        width = self.acceptance_most - self.acceptance
        return self.difference if self.difference > 0 else min(0.0, self.difference + width)


@dataclass(frozen=True)
class ParityTable:
    """Every way, on `tokens` tokens of `texts` texts; `missing` says which ways were not tried, and why."""

    command: str
    tokens: int
    texts: int
    rows: list[ParityRow]
    missing: list[str]

    @property
    def verdict(self) -> list[str]:
        """One α, or where the differences enter."""
        apart = [row for row in self.rows if row.against is not None and abs(row.gap) > ONE]
        compared = sum(row.against is not None for row in self.rows)
        if not apart:
            return [f"One acceptance: {compared} ways lie within {ONE:g} of the way that each is compared with."]
        return [_enters(row) for row in apart]


def _enters(row: ParityRow) -> str:
    found = f"{row.way} ({row.models}): {row.gap:+.4f} against {row.against}"
    if math.isnan(row.by_target):
        return f"{found}."
    return f"{found}; {row.by_target:+.4f} with its target alone, {row.by_draft:+.4f} with its draft alone."

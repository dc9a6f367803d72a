"""What the evaluation measures: eval.json as dataclasses, and one label for every measure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from distill.intervals import Interval

CEILING = "acceptance_ceiling"  # shown of trimmed drafts only

# The label of every measure, in the order of the tables and of the columns of `position_metrics`.
MEASURES = {
    "forward_kl": "KL(target ‖ draft), nats",
    "reverse_kl": "KL(draft ‖ target), nats",
    "total_variation": "total variation",
    "top1_agreement": "top-1 agreement",
    "acceptance_sampling": "acceptance, rejection sampling",
    "acceptance_match": "acceptance, draft's argmax = sampled token",
    "acceptance_greedy": "acceptance, greedy",
    CEILING: "ceiling of acceptance: the target's mass on tokens the draft can propose",
}
RATES = {"top1_agreement", "acceptance_sampling", "acceptance_match", "acceptance_greedy"}  # shown in per cent

SIDES = ("before", "after")  # the drafts of a run: as cut, and as trained


@dataclass(frozen=True)
class Divergences:
    """Every measure of one draft on the texts of one domain: means per token, whose intervals resample the units.

    `tokens` and `prompts` count what was measured; a unit is a prompt's text or a document (`prompts` counts either).
    """

    tokens: int
    prompts: int
    forward_kl: Interval
    reverse_kl: Interval
    total_variation: Interval
    top1_agreement: Interval
    acceptance_sampling: Interval
    acceptance_match: Interval
    acceptance_greedy: Interval
    acceptance_ceiling: Interval

    def measure(self, name: str) -> Interval:
        """One of MEASURES."""
        found: Interval = getattr(self, name)
        return found

    @property
    def trimmed(self) -> bool:
        """Whether the draft cannot propose every token of the target."""
        return self.acceptance_ceiling.mean < 1 - 1e-6


@dataclass(frozen=True)
class PositionAcceptance:
    """Acceptance at one drafted position, counted where the position was reached: `rate` is accepted ÷ drafted."""

    position: int
    drafted: int
    accepted: int
    rate: Interval


@dataclass(frozen=True)
class EvaluationReport:
    """eval.json. `length` is γ of the decoded rounds; the dictionaries without a domain are by draft.

    `domains` is empty where no divergences were asked for; `positions` and `tokens_per_round` where no rounds were.
    """

    command: str
    sampler: dict[str, int | float]
    length: int
    domains: dict[str, dict[str, Divergences]]
    positions: dict[str, list[PositionAcceptance]]
    tokens_per_round: dict[str, Interval]

    def __post_init__(self) -> None:
        if not all(self.domains.values()):
            raise ValueError("a domain without drafts")

    def accepted_by_position(self, draft: str = "after") -> list[float]:
        """Acceptance at positions 1.. of one draft, as far as positions were reached."""
        rates = []
        for row in self.positions.get(draft, []):
            if not row.drafted:
                break
            rates.append(row.rate.mean)
        return rates

    @property
    def acceptance_measure(self) -> str:
        """The acceptance that fits the sampler: greedy at temperature 0, otherwise that of rejection sampling."""
        return "acceptance_sampling" if self.sampler.get("temperature") else "acceptance_greedy"


def shown_measures(drafts: Iterable[Divergences]) -> list[str]:
    """The measures worth a row: the ceiling only where one of the drafts has a trimmed head."""
    trimmed = any(draft.trimmed for draft in drafts)
    return [name for name in MEASURES if trimmed or name != CEILING]


def flat_rows(report: EvaluationReport) -> list[dict[str, Any]]:
    """Every figure as a row with the same columns, for jsonl and csv."""

    def row(domain: str, draft: str, metric: str, found: Interval) -> dict[str, Any]:
        values = {"mean": found.mean, "low": found.low, "high": found.high}
        return {"domain": domain, "draft": draft, "metric": metric, **values}

    rows = [
        row(domain, draft, name, found.measure(name))
        for domain, drafts in report.domains.items()
        for draft, found in drafts.items()
        for name in MEASURES
    ]
    return rows + [
        row("rounds", draft, f"accepted at {one.position}", one.rate)
        for draft, positions in report.positions.items()
        for one in positions
    ]

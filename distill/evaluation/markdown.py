"""The tables of eval.md, which the terminal shows too."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from distill.intervals import Interval
from distill.results.evaluation_results import (
    MEASURES,
    Divergences,
    EvaluationReport,
    PositionAcceptance,
    shown_measures,
)


def as_markdown(report: EvaluationReport) -> str:
    """The tables of eval.md, which the terminal shows too."""
    lines = [f"Sampler: {report.sampler}. Intervals resample prompts or documents.", ""]
    for domain, drafts in report.domains.items():
        lines += [*_divergences(domain, drafts), ""]
    if report.positions:
        lines += [*_positions(report), ""]
    return "\n".join([*lines, f"`{report.command}`"]) + "\n"


def _divergences(domain: str, drafts: dict[str, Divergences]) -> list[str]:
    size = next(iter(drafts.values()))
    lines = [f"**{domain}**: {size.tokens} tokens, {size.prompts} units", "", *_head("", drafts)]
    for name in shown_measures(drafts.values()):
        lines.append(_row(MEASURES[name], [_cell(draft.measure(name)) for draft in drafts.values()]))
    if any(draft.trimmed for draft in drafts.values()):
        lines += [
            "",
            "A trimmed draft: KL(target ‖ draft) is between the distributions over the tokens it can propose.",
        ]
    return lines


def _positions(report: EvaluationReport) -> list[str]:
    names = list(report.positions)
    lines = [
        f"**Acceptance by draft position** (greedy, up to {report.length} drafted; given that it was reached)",
        "",
        *_head("position", [f"{name} (accepted / reached)" for name in names]),
    ]
    rounds = report.tokens_per_round
    for index in range(min(map(len, report.positions.values()), default=0)):
        lines.append(_row(str(index + 1), [_reached(report.positions[name][index]) for name in names]))
    return [*lines, _row("tokens per round", [_cell(rounds[name]) if name in rounds else "–" for name in names])]


def _head(first: str, names: Collection[str]) -> list[str]:
    return [_row(first, names).replace("|  |", "| |"), "|---|" + "---|" * len(names)]


def _row(first: str, cells: Iterable[str]) -> str:
    return f"| {first} | " + " | ".join(cells) + " |"


def _cell(found: Interval) -> str:
    if math.isnan(found.mean):
        return "not measured"
    return f"{found.mean:.4f} [{found.low:.4f}, {found.high:.4f}]"


def _reached(row: PositionAcceptance) -> str:
    if not row.drafted:
        return "never reached"
    rate = row.rate
    return f"{rate.mean:.3f} [{rate.low:.3f}, {rate.high:.3f}] ({row.accepted} / {row.drafted})"

"""The tables of eval.md, which the terminal shows too."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from distill.intervals import Interval
from distill.results.evaluation_results import (
    CEILING,
    FEW_PROMPTS,
    MEASURES,
    SAMPLED,
    SAMPLED_MEANS,
    SLICES,
    Bounds,
    Divergences,
    EvaluationReport,
    PositionAcceptance,
    StoredMeasures,
    shown_measures,
)


def as_markdown(report: EvaluationReport) -> str:
    """The tables of eval.md, which the terminal shows too."""
    lines = [f"Sampler: {report.sampler_words}. Intervals resample prompts or documents.", ""]
    if report.stored is not None:
        lines += [*(f"- {sentence}" for sentence in report.stored.sentences), ""]
    for domain, drafts in report.domains.items():
        lines += [*_divergences(domain, drafts), ""]
    if report.stored is not None:
        lines += [*_stored(report.stored), ""]
    if report.classes:
        lines += [*_classes(report), ""]
    if report.slices:
        lines += [*_slices(report), ""]
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


def _stored(stored: StoredMeasures) -> list[str]:
    """The bounds that the store gives, and what the sampled answers show."""
    lines: list[str] = []
    for domain, drafts in stored.bounds.items():
        lines += [f"**{domain}**: bounds of the means", "", *_head("", drafts)]
        names = [name for name in next(iter(drafts.values())) if name != CEILING]
        for name in names:
            lines.append(_row(MEASURES[name], [_bounds(measures[name]) for measures in drafts.values()]))
        lines.append("")
    lines += ["**sampled answers**", "", *_head("", stored.sampled)]
    return [*lines, _row(SAMPLED, map(_cell, stored.sampled.values())), "", SAMPLED_MEANS]


def _bounds(found: Bounds) -> str:
    return "not measured" if math.isnan(found.least) else f"{found.least:.4f} to {found.most:.4f}"


def _classes(report: EvaluationReport) -> list[str]:
    """A row for each class of prompts."""
    drafts = list(report.classes[0].acceptance)
    rounds = [draft for draft in drafts if draft in report.classes[0].tokens_per_round]
    heads = [*drafts, *(f"{draft}, tokens per round" for draft in rounds)]
    lines = [f"**By class of prompt**: {MEASURES[report.acceptance_measure]}", "", *_head("class (prompts)", heads)]
    for one in report.classes:
        figures = [*(one.acceptance[draft] for draft in drafts), *(one.tokens_per_round[draft] for draft in rounds)]
        cells = [_cell(found) if one.prompts >= FEW_PROMPTS else f"{found.mean:.4f}" for found in figures]
        lines.append(_row(f"{one.name or 'none'} ({one.prompts})", cells))
    few = any(one.prompts < FEW_PROMPTS for one in report.classes)
    return [*lines, *(["", f"Classes of fewer than {FEW_PROMPTS} prompts have no interval."] if few else [])]


def _slices(report: EvaluationReport) -> list[str]:
    """A row for each label of each slice of positions."""
    drafts = list(report.slices[0].acceptance)
    lines = [f"**By slice of positions**: {MEASURES[report.acceptance_measure]}", ""]
    lines += _head("", ["tokens", "share", *drafts])
    for one in report.slices:
        figures = [str(one.tokens), f"{one.share:.1%}", *(_cell(one.acceptance[draft]) for draft in drafts)]
        lines.append(_row(f"{SLICES[one.slice]}: {one.label}", figures))
    return lines


def _positions(report: EvaluationReport) -> list[str]:
    names = list(report.positions)
    lines = [
        f"**Acceptance by draft position** (greedy, up to {report.length} drafted; given that it was reached)",
        "",
        *_head("position", [f"{name} (accepted / reached)" for name in names]),
    ]
    for index in range(report.length):
        lines.append(_row(str(index + 1), [_reached(report.positions[name], index) for name in names]))
    return [*lines, _row("tokens per round", [_cell(report.tokens_per_round.get(name)) for name in names])]


def _head(first: str, names: Collection[str]) -> list[str]:
    return [_row(first, names).replace("|  |", "| |"), "|---|" + "---|" * len(names)]


def _row(first: str, cells: Iterable[str]) -> str:
    return f"| {first} | " + " | ".join(cells) + " |"


def _cell(found: Interval | None) -> str:
    if found is None or math.isnan(found.mean):
        return "not measured"
    return f"{found.mean:.4f} [{found.low:.4f}, {found.high:.4f}]"


def _reached(rows: Sequence[PositionAcceptance], index: int) -> str:
    if index >= len(rows) or not rows[index].drafted:
        return "never reached"
    row = rows[index]
    rate = row.rate
    return f"{rate.mean:.3f} [{rate.low:.3f}, {rate.high:.3f}] ({row.accepted} / {row.drafted})"

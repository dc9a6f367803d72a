"""The tables of eval.md, which the terminal shows too."""

from __future__ import annotations

import math
from collections.abc import Sequence

from distill.intervals import Interval
from distill.results.evaluation_results import (
    CEILING,
    FEW_PROMPTS,
    MEASURES,
    RELIABILITIES,
    SAMPLED,
    SAMPLED_MEANS,
    SLICES,
    Bounds,
    Divergences,
    EvaluationReport,
    PositionAcceptance,
    Reliability,
    StoredMeasures,
    shown_measures,
)
from distill.results.tables import markdown_table


def as_markdown(report: EvaluationReport) -> str:
    """The tables of eval.md, which the terminal shows too."""
    stored = report.stored
    blocks = [f"Sampler: {report.sampler_words}. Intervals resample prompts or documents."]
    if stored is not None:
        blocks.append("\n".join(f"- {sentence}" for sentence in stored.sentences))
    for domain, drafts in report.domains.items():
        blocks += _divergences(domain, drafts)
    blocks += _stored(stored) if stored is not None else []
    blocks += _classes(report) if report.classes else []
    blocks += _slices(report) if report.slices else []
    blocks += _positions(report) if report.positions else []
    for draft, found in report.reliability.items():
        blocks += _reliability(draft, found)
    return "\n\n".join([*blocks, f"`{report.command}`"]) + "\n"


def _divergences(domain: str, drafts: dict[str, Divergences]) -> list[str]:
    size = next(iter(drafts.values()))
    names = shown_measures(drafts.values())
    rows = [[MEASURES[name], *(_cell(draft.measure(name)) for draft in drafts.values())] for name in names]
    blocks = [f"**{domain}**: {size.tokens} tokens, {size.prompts} units", markdown_table(["", *drafts], rows)]
    if any(draft.trimmed for draft in drafts.values()):
        blocks.append(
            "A trimmed draft: KL(target ‖ draft) is between the distributions over the tokens it can propose."
        )
    return blocks


def _stored(stored: StoredMeasures) -> list[str]:
    """The bounds that the store gives, and what the sampled answers show."""
    blocks: list[str] = []
    for domain, drafts in stored.bounds.items():
        names = [name for name in next(iter(drafts.values())) if name != CEILING]
        rows = [[MEASURES[name], *(_bounds(measures[name]) for measures in drafts.values())] for name in names]
        blocks += [f"**{domain}**: bounds of the means", markdown_table(["", *drafts], rows)]
    row = [SAMPLED, *map(_cell, stored.sampled.values())]
    return [*blocks, "**sampled answers**", markdown_table(["", *stored.sampled], [row]), SAMPLED_MEANS]


def _bounds(bounds: Bounds) -> str:
    return "not measured" if math.isnan(bounds.least) else f"{bounds.least:.4f} to {bounds.most:.4f}"


def _classes(report: EvaluationReport) -> list[str]:
    """A row for each class of prompts."""
    drafts = list(report.classes[0].acceptance)
    decoded = [draft for draft in drafts if draft in report.classes[0].tokens_per_round]
    rows = []
    for one in report.classes:
        figures = [*(one.acceptance[draft] for draft in drafts), *(one.tokens_per_round[draft] for draft in decoded)]
        cells = [_cell(figure) if one.prompts >= FEW_PROMPTS else f"{figure.mean:.4f}" for figure in figures]
        rows.append([f"{one.name or 'none'} ({one.prompts})", *cells])
    heads = ["class (prompts)", *drafts, *(f"{draft}, tokens per round" for draft in decoded)]
    blocks = [f"**By class of prompt**: {MEASURES[report.acceptance_measure]}", markdown_table(heads, rows)]
    if any(one.prompts < FEW_PROMPTS for one in report.classes):
        blocks.append(f"Classes of fewer than {FEW_PROMPTS} prompts have no interval.")
    return blocks


def _slices(report: EvaluationReport) -> list[str]:
    """A row for each label of each slice of positions."""
    drafts = list(report.slices[0].acceptance)
    rows = []
    for row in report.slices:
        figures = [str(row.tokens), f"{row.share:.1%}", *(_cell(row.acceptance[draft]) for draft in drafts)]
        rows.append([f"{SLICES[row.slice]}: {row.label}", *figures])
    title = f"**By slice of positions**: {MEASURES[report.acceptance_measure]}"
    return [title, markdown_table(["", "tokens", "share", *drafts], rows)]


def _positions(report: EvaluationReport) -> list[str]:
    rows = [
        [str(index + 1), *(_reached(positions, index) for positions in report.positions.values())]
        for index in range(report.length)
    ]
    rows.append(["tokens per round", *(_cell(report.tokens_per_round.get(name)) for name in report.positions)])
    heads = ["position", *(f"{name} (accepted / reached)" for name in report.positions)]
    title = f"**Acceptance by draft position** (greedy, up to {report.length} drafted; given that it was reached)"
    return [title, markdown_table(heads, rows)]


def _reliability(draft: str, found: Sequence[Reliability]) -> list[str]:
    """What the draft promises of its tokens, and what is accepted, by bin."""
    bins = sorted({(one.low, one.high) for part in found for one in part.bins})
    rows = []
    for low, high in bins:
        own = [next((one for one in part.bins if one.low == low), None) for part in found]
        cells = ["none" if one is None else f"{one.promised:.3f}: {_cell(one.accepted)} ({one.tokens})" for one in own]
        rows.append([f"{low:.1f} to {high:.1f}", *cells])
    rows.append(["all", *(f"{part.promised:.3f}: {_cell(part.accepted)} ({part.tokens})" for part in found)])
    rows.append(
        ["calibration error", *(f"{part.error:.3f} (chance alone: {part.error_of_chance:.3f})" for part in found)]
    )
    title = f"**Can the draft's probabilities be trusted?** {draft}; promised: accepted (tokens)"
    return [title, markdown_table(["probability", *(RELIABILITIES[part.of] for part in found)], rows)]


def _cell(figure: Interval | None) -> str:
    if figure is None or math.isnan(figure.mean):
        return "not measured"
    return f"{figure.mean:.4f} [{figure.low:.4f}, {figure.high:.4f}]"


def _reached(positions: Sequence[PositionAcceptance], index: int) -> str:
    if index >= len(positions) or not positions[index].drafted:
        return "never reached"
    row = positions[index]
    return f"{row.rate.mean:.3f} [{row.rate.low:.3f}, {row.rate.high:.3f}] ({row.accepted} / {row.drafted})"

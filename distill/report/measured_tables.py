"""The tables on what was measured of a draft: acceptance, divergence, speed and files."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from distill.intervals import Interval
from distill.report.text import (
    NOTHING,
    byte_cell,
    interval,
    known,
    number,
    pair_cell,
    percent,
    significant,
    speedup_interval,
)
from distill.results.evaluation_results import (
    CEILING,
    FEW_PROMPTS,
    MEASURES,
    RATES,
    RELIABILITIES,
    SAMPLED,
    SAMPLED_MEANS,
    SIDES,
    SLICES,
    Bounds,
    ClassResult,
    Divergences,
    EvaluationReport,
    PositionAcceptance,
    Reliability,
    StoredMeasures,
)
from distill.results.export_results import ExportedFile, ExportReport, Parity
from distill.results.speedup_results import Measurement, SpeedupReport
from distill.results.tables import Cell, Columns, Row, Table, table_of

SHOWN_MEASURES = [name for name in MEASURES if name != CEILING]


# ── acceptance and divergence ──


def positions(rows: list[PositionAcceptance], command: str) -> Table:
    """Acceptance by drafted position."""
    columns: Columns[PositionAcceptance] = {
        "position": lambda one: str(one.position),
        "drafted": lambda one: number(one.drafted),
        "accepted": lambda one: number(one.accepted),
        "rate": lambda one: interval(one.rate, rate=True),
    }
    return table_of(rows, columns, command)


def reliability(found: list[Reliability], command: str) -> Table:
    """What the draft's probabilities promise, beside what was accepted."""
    columns: Columns[Reliability] = {
        "probability of": lambda one: RELIABILITIES[one.of],
        "tokens": lambda one: number(one.tokens),
        "promised": lambda one: percent(one.promised),
        "accepted": lambda one: interval(one.accepted, rate=True),
        "calibration error": lambda one: f"{one.error:.3f}",
        "by chance alone": lambda one: f"{one.error_of_chance:.3f}",
    }
    return replace(table_of(found, columns, command), title="the draft's own probabilities")


def divergences(evaluation: EvaluationReport) -> list[Table]:
    """Every measure by domain before and after the training; of a store also its bounds; acceptance by class."""
    tables = []
    for domain, drafts in evaluation.domains.items():
        before, after = sides = [drafts.get(side) for side in SIDES]
        rows = [_measure_row(name, before, after) for name in SHOWN_MEASURES]
        counts = [f"{number(side and side.tokens)} tokens, {number(side and side.prompts)} prompts" for side in sides]
        rows.append(["measured on", *counts, ""])
        tables.append(Table(["", *SIDES, "change"], rows, evaluation.command, title=domain))
    if evaluation.stored is not None:
        tables += _stored(evaluation.stored, evaluation.command)
    tables += [_classes(evaluation)] if evaluation.classes else []
    return tables + ([_slices(evaluation)] if evaluation.slices else [])


def _measure_row(name: str, before: Divergences | None, after: Divergences | None) -> list[str]:
    first, last = (side.measure(name) if side else None for side in (before, after))
    change, rate = NOTHING, name in RATES
    if first and last and known(first.mean) and known(last.mean):
        rise = last.mean - first.mean
        change = f"{100 * rise:+.1f} points" if rate else f"{rise:+.3f}"
    return [MEASURES[name], interval(first, rate), interval(last, rate), change]


def _stored(stored: StoredMeasures, command: str) -> list[Table]:
    """The bounds that the store gives for each mean, and what the sampled answers show."""
    tables = []
    for domain, drafts in stored.bounds.items():
        rows = [
            [MEASURES[name], *(_bounds(drafts.get(side, {}).get(name), name in RATES) for side in SIDES)]
            for name in SHOWN_MEASURES
        ]
        tables.append(Table(["bounds of the means", *SIDES], rows, command, title=f"{domain}, bounds"))
    row = [SAMPLED, *(interval(stored.sampled.get(side), rate=True) for side in SIDES)]
    return [*tables, Table(["", *SIDES], [row], command, title="sampled answers", note=SAMPLED_MEANS)]


def _bounds(found: Bounds | None, rate: bool) -> str:
    if found is None or not known(found.least):
        return NOTHING
    form = percent if rate else significant
    return f"{form(found.least)} to {form(found.most)}"


def _classes(evaluation: EvaluationReport) -> Table:
    """Acceptance and tokens per round by class of prompt, without intervals for a class of too few prompts."""

    def shown(one: ClassResult, found: Interval | None, rate: bool = False) -> str:
        if found is not None and one.prompts < FEW_PROMPTS:
            found = Interval(found.mean, math.nan, math.nan)
        return interval(found, rate)

    rows: list[Row] = [
        [
            Cell(one.name or NOTHING),
            number(one.prompts),
            number(one.tokens),
            *(shown(one, one.acceptance.get(side), rate=True) for side in SIDES),
            shown(one, one.tokens_per_round.get("after")),
        ]
        for one in evaluation.classes
    ]
    heads = ["class of prompt", "prompts", "tokens", *SIDES, "tokens per round after"]
    note = f"{MEASURES[evaluation.acceptance_measure]}, on the target's own text."
    return Table(heads, rows, evaluation.command, title="by class of prompt", note=note)


def _slices(evaluation: EvaluationReport) -> Table:
    """Acceptance by slice of positions."""
    rows: list[Row] = [
        [
            Cell(f"{SLICES[one.slice]}: {one.label}"),
            number(one.tokens),
            percent(one.share),
            *(interval(one.acceptance.get(side), rate=True) for side in SIDES),
        ]
        for one in evaluation.slices
    ]
    note = f"{MEASURES[evaluation.acceptance_measure]}, on the target's own text."
    return Table(["positions", "tokens", "share", *SIDES], rows, evaluation.command, title="by slice", note=note)


# ── speed ──


def curves(report: SpeedupReport) -> Table:
    """Milliseconds of a step of every number of tokens, of each model alone."""
    found = [(part, name, steps) for part in report.parts for name, steps in part.steps.by_model.items()]
    counts = sorted({count for _, _, steps in found for count in steps})
    rows: list[Row] = [
        [
            *(Cell(part.costs.pair), Cell(part.backend), Cell(name), number(part.steps.depth)),
            *(significant(1e3 * steps[count]) if count in steps else NOTHING for count in counts),
        ]
        for part, name, steps in found
    ]
    columns = ["pair", "backend", "model", "depth", *(f"T({count}), ms" for count in counts)]
    return Table(columns, rows, report.command, words=3)


# Columns that the tables of measurements share.
PAIR: Columns[Any] = {"pair": pair_cell, "backend": lambda one: Cell(one.backend)}
PLAIN_SPEED: Columns[Any] = {"plain, tokens/s": lambda one: number(one.plain_tokens_per_second)}
PACE: Columns[Measurement] = {
    "tokens/s": lambda one: number(one.tokens_per_second),
    "tokens per round": lambda one: number(one.tokens_per_round),
    "acceptance": lambda one: percent(one.acceptance),
}
SAME_TEXT: Columns[Measurement] = {
    "identical": lambda one: number(one.identical),
    "excused": lambda one: number(one.excused),
    "different": lambda one: number(one.different),
}


def sweep(report: SpeedupReport) -> Table:
    """Speculative beside plain decoding by draft length."""
    columns: Columns[Measurement] = {
        **PAIR,
        "γ": lambda one: str(one.length or "plain"),
        "speedup": speedup_interval,
        "predicted": lambda one: NOTHING if one.predicted is None else f"{number(one.predicted)}×",
        **PACE,
        "tokens": lambda one: number(one.tokens),
        "seconds": lambda one: number(one.seconds),
        **SAME_TEXT,
        "different": lambda one: Cell(str(one.different), "bad") if one.different else "0",
    }
    best = {id(one) for one in report.fastest}
    classes = ["plain" if one.is_plain else "best" if id(one) in best else "" for one in report.sweep]
    return table_of(report.sweep, columns, report.command, 2, classes)


def fastest(report: SpeedupReport) -> Table:
    """The fastest draft length of each pair and backend."""
    columns: Columns[Measurement] = {
        **PAIR,
        "γ": lambda one: str(one.length),
        **PLAIN_SPEED,
        "speculative, tokens/s": lambda one: number(one.tokens_per_second),
        "acceptance": lambda one: percent(one.acceptance),
        "tokens per round": lambda one: number(one.tokens_per_round),
        "speedup": speedup_interval,
        "": lambda one: one.verdict,
        " / ".join(SAME_TEXT): lambda one: " / ".join(str(cell(one)) for cell in SAME_TEXT.values()),
    }
    return table_of(report.fastest, columns, report.command, words=2)


def others(report: SpeedupReport, plain: bool = True) -> Table:
    """Every configuration beside the sweep, `plain` decoding under a sampler too; lossy ones are red."""
    columns: Columns[Measurement] = {
        **PAIR,
        "configuration": lambda one: Cell(one.configuration),
        "speedup": lambda one: "plain" if one.is_plain else speedup_interval(one),
        **PLAIN_SPEED,
        **PACE,
        **SAME_TEXT,
        "distribution": lambda one: Cell(one.distribution, "bad" if one.lossy else ""),
    }
    return table_of([one for one in report.others if plain or not one.is_plain], columns, report.command, words=3)


# ── files ──


def files(export: ExportReport) -> Table:
    """The GGUF files, and how closely llama.cpp reproduces their models' distributions and tokens."""

    def of_parity(shown: Callable[[Parity], Cell | str]) -> Callable[[ExportedFile], Cell | str]:
        return lambda one: NOTHING if one.parity is None else shown(one.parity)

    def mismatches(parity: Parity) -> Cell | str:
        wrong = len(parity.tokenizer_mismatches)
        return Cell(str(wrong), "bad") if wrong else "0"

    columns: Columns[ExportedFile] = {
        "file": lambda one: Cell(one.path, "code"),
        "model": lambda one: Cell(one.model),
        "type": lambda one: Cell(one.outtype),
        "bytes": lambda one: byte_cell(one.bytes),
        "positions": of_parity(lambda parity: number(parity.positions)),
        MEASURES["top1_agreement"]: of_parity(lambda parity: percent(parity.top1_agreement)),
        "mean |Δ log p|": of_parity(lambda parity: significant(parity.mean_abs_dlogprob)),
        "max |Δ log p|": of_parity(lambda parity: significant(parity.max_abs_dlogprob)),
        "tokenizer texts": of_parity(lambda parity: number(parity.tokenizer_texts)),
        "mismatches": of_parity(mismatches),
    }
    return table_of(export.files, columns, export.command, words=3)

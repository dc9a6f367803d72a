"""The tables of `distill speedup`: for the terminal, speedup.md, the report page and the model card."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from distill.files import Figure
from distill.intervals import Interval
from distill.measuring.speedup_results import (
    ChosenLength,
    Measurement,
    PairMeasured,
    RoundFigures,
    SpeedupReport,
    StepFigures,
)
from distill.tables import Block, Cell, Columns, Row, Table, Value, bullets, listed, table_of

# ── What `distill speedup --target A --draft B` measures, as dataclasses: tables, JSON and files are made from it
# ──


@dataclass(frozen=True)
class GroupFigures:
    """One configuration on the prompts of a class, or on the rounds at a range of depths.

    `group` is the class, or the tokens in the context (`from`–`to`). Figures of a class include the prompts, those of
    a depth do not. `count` is of prompts or rounds. The speedup is over plain decoding of the same prompts, or at the
    same depths; None where plain decoding made no text there. The interval is by prompt, NaN where there is one.
    """

    group: str
    configuration: str
    count: int
    tokens: int
    tokens_per_second: float
    tokens_per_round: float | None
    acceptance: float | None
    speedup: float | None
    speedup_low: Figure
    speedup_high: Figure


@dataclass(frozen=True)
class BatchFigures:
    """B texts at once, by plain and speculative decoding: tokens per second of all together, the prompts included."""

    batch: int
    configuration: str
    tokens: int
    tokens_per_second: float
    plain_tokens_per_second: float
    tokens_per_round: float
    acceptance: float | None
    speedup: float


@dataclass(frozen=True)
class PairSpeedup:
    """A pair that no recipe made, on the user's own prompts.

    `classes` counts prompts. `gguf`
    and `pytorch` name the engine's settings that are not the defaults. `dropped` are records left out, by reason.
    """

    command: str
    machine: dict[str, Any]
    target: str
    draft: str | None
    backend: str
    gguf: str
    sampler: dict[str, int | float]
    prompts: int
    classes: dict[str, int]
    new_tokens: int
    dropped: dict[str, int]
    measurements: list[Measurement]
    chosen: ChosenLength | None
    rounds: list[RoundFigures]
    steps: StepFigures
    by_class: list[GroupFigures]
    by_depth: list[GroupFigures]
    reasons: list[str]
    batches: list[BatchFigures] = field(default_factory=list)
    not_batched: list[str] = field(default_factory=list)
    calibration: dict[str, Any] | None = None
    pytorch: str = ""


# ── The tables of `distill speedup`: for the terminal, speedup.md, the report page and the model card ──

INTERLEAVED = (
    "distinct prompts, interleaved, cold caches; times include the prompt. Speedup over this decoder's own plain run "
    "of the same sampler, intervals by prompt."
)


def speedup_of(row: Measurement | GroupFigures) -> Value:
    """A speedup with its interval; None where it was not measured."""
    return None if row.speedup is None else Interval(row.speedup, row.speedup_low, row.speedup_high)


def measurement_table(rows: Sequence[Measurement], command: str, best: Iterable[Measurement] = ()) -> Table:
    """Configurations beside plain decoding; those of `best` are bold, lossy ones and texts that differ are red."""
    columns: Columns[Measurement] = {
        "pair": lambda one: one.pair,
        "backend": lambda one: one.backend,
        "configuration": lambda one: one.configuration,
        "tokens/s": lambda one: one.tokens_per_second,
        "plain tokens/s": lambda one: one.plain_tokens_per_second,
        "tokens per round": lambda one: one.tokens_per_round,
        "acceptance": lambda one: Cell(one.acceptance, "%"),
        "speedup": lambda one: Cell(1.0 if one.is_plain else speedup_of(one), "×"),
        "predicted": lambda one: Cell(one.predicted, "×"),
        "same text": lambda one: Cell(one.same_text, bad=bool(one.different)),
        "distribution": lambda one: Cell(one.distribution, bad=one.lossy is not None),
    }
    chosen = {id(one) for one in best}
    classes = ["best" if id(one) in chosen else "plain" if one.is_plain else "" for one in rows]
    return table_of(rows, columns, command, "configurations", classes=classes)


def round_table(rounds: Sequence[RoundFigures], command: str) -> Table:
    """What a round of each configuration gives and costs."""

    def milliseconds(seconds: float | None) -> Cell:
        return Cell(None if seconds is None else seconds * 1e3, ".3f")

    columns: Columns[RoundFigures] = {
        "configuration": lambda one: one.configuration,
        "tokens (τ)": lambda one: one.tokens,
        "verified": lambda one: one.verified,
        "draft steps": lambda one: one.draft_steps,
        "ms": lambda one: milliseconds(one.seconds),
        "target, ms": lambda one: milliseconds(one.target_seconds),
        "draft, ms": lambda one: milliseconds(one.draft_seconds),
        "the rest, ms": lambda one: milliseconds(one.overhead_seconds),
        "tokens/s": lambda one: one.tokens_per_second,
        "bound": lambda one: one.bound,
        "attained": lambda one: Cell(one.attained, "%"),
    }
    note = (
        "The prompt apart; of plain decoding, a step. Bound: τ ÷ the seconds of its steps, timed with one model alone."
    )
    return table_of(rounds, columns, command, "a round", note)


def step_table(pairs: Sequence[tuple[PairMeasured, StepFigures]], command: str) -> Table:
    """Milliseconds of a step of each number of tokens, with one model alone."""
    curves = [(pair, steps, name, curve) for pair, steps in pairs for name, curve in steps.by_model.items()]
    sizes = sorted({m for *_, curve in curves for m in curve})
    rows: list[Row] = [
        [
            pair.pair,
            pair.backend,
            name,
            steps.depth,
            *(Cell(1e3 * curve[m] if m in curve else None, ".3f") for m in sizes),
        ]
        for pair, steps, name, curve in curves
    ]
    heads = ["pair", "backend", "model", "depth", *(f"T({m}), ms" for m in sizes)]
    return Table(heads, rows, command, "a step of m tokens, T(m), with one model alone")


def group_table(groups: Sequence[GroupFigures], name: str, over: str, command: str) -> Table:
    """Speeds by class of prompt or by depth, as `name` says."""
    columns: Columns[GroupFigures] = {
        name: lambda one: one.group,
        "configuration": lambda one: one.configuration,
        "of": lambda one: one.count,
        "tokens/s": lambda one: one.tokens_per_second,
        "tokens per round": lambda one: one.tokens_per_round,
        "acceptance": lambda one: Cell(one.acceptance, "%"),
        "speedup": lambda one: Cell(speedup_of(one), "×"),
    }
    return table_of(groups, columns, command, f"by {name}, {over}")


def batch_table(batches: Sequence[BatchFigures], command: str) -> Table:
    """Several texts at once."""
    columns: Columns[BatchFigures] = {
        "batch": lambda one: one.batch,
        "configuration": lambda one: one.configuration,
        "tokens/s": lambda one: one.tokens_per_second,
        "plain tokens/s": lambda one: one.plain_tokens_per_second,
        "tokens per round": lambda one: one.tokens_per_round,
        "acceptance": lambda one: Cell(one.acceptance, "%"),
        "speedup": lambda one: Cell(one.speedup, "×"),
    }
    return table_of(batches, columns, command, "several texts at once")


def run_blocks(report: SpeedupReport) -> list[Block]:
    """A run's speedups: speedup.md, which the terminal shows too."""
    lines = [f"llama.cpp's options, where they are not the defaults: {report.gguf}."] if report.gguf else []
    calibration = report.calibration
    if calibration:
        none = "".join(f" No fit of {name}: {why}." for name, why in calibration["unfitted"].items())
        where = f"{calibration['rounds']} rounds of {calibration['prompts']} validation texts"
        lines.append(f"Draft probabilities were calibrated on {where}, costs measured on this machine.{none}")
    return [
        f"Up to {report.new_tokens} tokens after each of {report.prompts} {INTERLEAVED}",
        measurement_table(report.measurements, report.command, report.best),
        bullets(report.explanations),
        *lines,
    ]


def pair_blocks(report: PairSpeedup) -> list[Block]:
    """Everything that was measured of any pair."""
    command = report.command
    blocks: list[Block] = [*_head(report), measurement_table(report.measurements, command)]
    if any((row.length or row.nodes) and row.predicted is not None for row in report.measurements):
        blocks.append(
            "Predicted, for fixed lengths and chosen trees: from the acceptance counted in these texts, and from the "
            "costs of rounds, which were timed between them (of trees before them)."
        )
    blocks += [round_table(report.rounds, command), step_table([(report.measurements[0], report.steps)], command)]
    if report.by_class:
        blocks.append(group_table(report.by_class, "class of prompt", "with the prompts", command))
    if report.by_depth:
        blocks.append(group_table(report.by_depth, "tokens in the context", "rounds alone", command))
    if report.batches:
        blocks.append(batch_table(report.batches, command))
    return [*blocks, bullets([*report.reasons, *report.not_batched])]


def _head(report: PairSpeedup) -> list[str]:
    named = ", ".join(f"{name} {value:g}" for name, value in report.sampler.items())
    lines = [
        f"Target {report.target}, draft {report.draft or 'none'}, {report.backend}. Up to {report.new_tokens} tokens "
        f"after each of {report.prompts} {INTERLEAVED} Sampler of sampled configurations: {named}."
    ]
    notes = {
        "llama.cpp's options, where they are not the defaults": report.gguf,
        "PyTorch's settings, where they are not the defaults": report.pytorch,
        "Left out of the files": listed(report.dropped),
    }
    lines += [f"{name}: {note}." for name, note in notes.items() if note]
    if report.calibration is not None:
        lines.append(
            f"Draft probabilities were calibrated on {report.calibration['prompts']} other prompts of the same files."
        )
    return lines

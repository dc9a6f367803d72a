"""The tables of `distill speedup`, for the terminal, speedup.md, the report page and the model card."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from distill.data.samples import REPEATED
from distill.measuring.speedup_results import (
    GroupFigures,
    InTurns,
    Measurement,
    SpeedupPart,
    SpeedupReport,
    speedup_of,
    tokens_of,
)
from distill.measuring.verdict import explanations, next_steps
from distill.recipe.configuration import described
from distill.recipe.measuring import MOST_KL, engine_name
from distill.tables import Block, Cell, Code, Columns, Interval, Row, Table, listed, table_of

INTERLEAVED = (
    "distinct prompts, in turns, with cold caches. Times include the prompt. Speedups are over this decoder's own "
    "plain decoding with the same sampler. Intervals resample prompts."
)


def measurement_table(rows: Sequence[Measurement], command: str, best: Iterable[Measurement] = ()) -> Table:
    """Return the table of configurations. Those in `best` are bold. Lossy ones, and texts that differ, are red."""
    columns: Columns[Measurement] = {
        "pair": lambda row: row.pair,
        "backend": lambda row: row.backend,
        "configuration": lambda row: row.configuration,
        "tokens/s": lambda row: row.tokens_per_second,
        "plain tokens/s": lambda row: row.plain_tokens_per_second,
        "tokens per round": lambda row: row.tokens_per_round,
        "acceptance rate": lambda row: Cell(row.acceptance, "%"),
        "speedup": lambda row: Cell(1.0 if row.is_plain else speedup_of(row), "×"),
        "predicted": lambda row: Cell(row.predicted, "×"),
        "same text": lambda row: Cell(row.same_text, bad=bool(row.different)),
        "distribution": lambda row: Cell(row.distribution, bad=row.lossy is not None),
    }
    fastest = {id(row) for row in best}
    classes = ["best" if id(row) in fastest else "plain" if row.is_plain else "" for row in rows]

    def shares(value: Callable[[Measurement], float]) -> str:
        plain = [row for row in rows if row.is_plain and not math.isnan(value(row))]
        found = {f"{100 * value(row):.0f} % ({row.configuration}, {engine_name(row.backend)})" for row in plain}
        return ", ".join(sorted(found))

    note = ""
    if repeated := shares(lambda row: row.repeated):
        note = f"Repeated text (tokens that end {REPEATED} tokens which occurred earlier, prompt included): {repeated}."
    if prompts := shares(lambda row: row.prompt_share):
        note += f" Prompts, of the whole time: {prompts}."
    if stopped := [f"{row.configuration} after {row.stopped} prompts" for row in rows if row.stopped]:
        note += f" Stopped, clearly slower than the fastest: {', '.join(stopped)}."
    return table_of(rows, columns, command, "configurations", note.strip(), classes=classes)


def round_table(part: SpeedupPart, command: str) -> Table:
    """Return the table of what a round of each configuration gives and costs."""

    def milliseconds(seconds: float | None) -> Cell:
        return Cell(None if seconds is None else seconds * 1e3, ".3f")

    columns: Columns[Measurement] = {
        "configuration": lambda row: row.configuration,
        "tokens (τ)": lambda row: row.rounds.tokens,
        "verified": lambda row: row.rounds.verified,
        "draft steps": lambda row: row.rounds.draft_steps,
        "ms": lambda row: milliseconds(row.rounds.seconds),
        "target, ms": lambda row: milliseconds(row.rounds.target_seconds),
        "draft, ms": lambda row: milliseconds(row.rounds.draft_seconds),
        "the rest, ms": lambda row: milliseconds(row.rounds.overhead_seconds),
        "tokens/s": lambda row: row.rounds.tokens_per_second,
        "bound": lambda row: row.rounds.bound,
        "attained": lambda row: Cell(row.rounds.tokens_per_second / (row.rounds.bound or math.nan), "%"),
    }
    note = (
        "Without the prompt. For plain decoding, a round is a step. Bound: τ ÷ the seconds of its steps, timed with "
        "one model alone."
    )
    return table_of(part.measurements, columns, command, "a round", note)


def step_table(part: SpeedupPart, command: str) -> Table:
    """Return the table of milliseconds of a step for each number of tokens, with one model alone."""
    curves = part.steps.by_model
    sizes = sorted({m for curve in curves.values() for m in curve})
    rows: list[Row] = [
        [name, part.steps.depth, *(Cell(1e3 * curve[m] if m in curve else None, ".3f") for m in sizes)]
        for name, curve in curves.items()
    ]
    heads = ["model", "depth", *(f"T({m}), ms" for m in sizes)]
    return Table(heads, rows, command, "a step of m tokens, T(m), with one model alone")


VERIFIED = {"greedy": "the target's best token decides", "token": "rejection sampling", "match": "the draw decides"}
NEUTRAL = {"top_k": 0, "top_p": 1, "min_p": 0}  # settings of a sampler that change nothing


def suite_line(report: SpeedupReport) -> str:
    """Return a line with suite, questions, tokens and verifiers, as a paper prints it."""
    verifiers: dict[str, None] = {}
    for row in report.measurements:
        if row.drafter is not None:
            given = {name: value for name, value in (row.sampler or {}).items() if value != NEUTRAL.get(name)}
            sampler = ", ".join(f"{name} {value:g}" for name, value in (given or {"temperature": 0}).items())
            verifier = row.settings["verifier"]
            verifiers[f"{sampler}: verifier {verifier} ({VERIFIED.get(verifier, 'see below')})"] = None
    return (
        f"{report.suite}, up to {report.new_tokens} new tokens a turn. Later turns follow the target's own greedy "
        f"answers. {'; '.join(verifiers)}."
    )


def group_table(rows: Sequence[tuple[Measurement, GroupFigures]], command: str, suite: bool = False) -> Table:
    """Return speeds by class of prompt, or by category of a suite. Classes keep their first order of occurrence."""
    order = list(dict.fromkeys(group.group for _, group in rows))
    columns: Columns[tuple[Measurement, GroupFigures]] = {
        "category" if suite else "class of prompt": lambda row: row[1].group,
        "configuration": lambda row: row[0].configuration,
        "questions" if suite else "of": lambda row: row[1].count,
        "tokens/s": lambda row: row[1].tokens_per_second,
        "tokens per round": lambda row: tokens_of(row[1]),
        "acceptance rate": lambda row: Cell(row[1].acceptance, "%"),
        "speedup": lambda row: Cell(1.0 if row[0].is_plain else speedup_of(row[1]), "×"),
    }
    by_group = sorted(rows, key=lambda row: order.index(row[1].group))
    title = "by category, with the prompts" if suite else "by class of prompt, with the prompts"
    note = "Tokens per round: accepted + 1, the mean accepted tokens of papers." if suite else ""
    return table_of(by_group, columns, command, title, note)


def engine_table(report: SpeedupReport) -> Table:
    """Return the table of engines and file types: plain decoding and the fastest way, marked if that is slower."""
    best = {one.key: one for one in report.best}

    def fastest(part: SpeedupPart) -> Measurement:
        return best.get(part.key, part.plain)

    columns: Columns[SpeedupPart] = {
        "pair": lambda part: part.pair,
        "backend": lambda part: part.backend,
        "KL": lambda part: Cell(part.kl, ".4f"),
        "first token, ms": lambda part: Cell(1e3 * part.plain.prompt_seconds, ".0f"),
        "plain tokens/s": lambda part: part.plain.tokens_per_second,
        "fastest way": lambda part: fastest(part).configuration,
        "tokens/s": lambda part: fastest(part).tokens_per_second,
        "speedup": lambda part: Cell(
            1.0 if fastest(part).is_plain else speedup_of(fastest(part)), "×", bad=fastest(part).speedup_high < 1
        ),
    }
    note = "KL: mean nats of the target's own distributions to this engine's, on its greedy texts."
    return table_of(report.parts, columns, report.command, "engines", note)


def turn_table(report: SpeedupReport) -> Table:
    """Return the table of plain decoding and the fastest way of each engine, measured in the same minutes."""
    columns: Columns[InTurns] = {
        "pair": lambda row: row.pair,
        "backend": lambda row: row.backend,
        "configuration": lambda row: row.configuration,
        "tokens/s": lambda row: row.tokens_per_second,
        "over the fastest plain": lambda row: Cell(Interval(row.speedup, row.speedup_low, row.speedup_high), "×"),
    }
    note = "Plain decoding and the fastest way of each, timed again with the engines taking turns; prompts included."
    return table_of(report.in_turns, columns, report.command, "engines in turns", note)


def speedup_blocks(report: SpeedupReport) -> list[Block]:
    """Return the blocks of a report: speedup.md of a run, or the measurement of any pair."""
    blocks: list[Block] = [
        report.verdict,
        *([suite_line(report), *_categories(report)] if report.suite else []),
        *_head(report),
        *([engine_table(report)] if len(report.parts) > 1 else []),
        *([turn_table(report)] if report.in_turns else []),
        measurement_table(report.measurements, report.command, report.best),
    ]
    if any(row.length and row.predicted is not None for row in report.measurements):
        blocks.append("Predicted, for fixed lengths: from costs and conditional acceptance (docs/decoding.md).")
    blocks.append(explanations(report))
    for part in report.parts:
        if len(report.parts) > 1:
            blocks.append(f"{part.pair}, {part.backend}:")
        blocks += _part(part, report.command, bool(report.suite))
    return [*blocks, legend(report), *([Code(next_steps(report), "sh")] if report.plain else [])]


def legend(report: SpeedupReport) -> Table:
    """Return the table of everything that each configuration reads, by its name."""
    settings = {row.configuration: row.settings for row in report.measurements if row.drafter}
    return table_of(
        settings.items(),
        {"configuration": lambda row: row[0], "settings": lambda row: described(row[1])},
        report.command,
        "what the names stand for",
    )


def _part(part: SpeedupPart, command: str, suite: bool) -> list[Block]:
    blocks: list[Block] = [round_table(part, command), step_table(part, command)]
    by_class = [(row, group) for row in part.measurements for group in row.by_class]
    if by_class and not suite:
        blocks.append(group_table(by_class, command))
    return blocks


def _categories(report: SpeedupReport) -> list[Block]:
    """Return the table that papers print of a suite, if it has groups."""
    rows = [(row, group) for row in report.measurements for group in row.by_class]
    return [group_table(rows, report.command, suite=True)] if rows else []


def _head(report: SpeedupReport) -> list[str]:
    named = ", ".join(f"{name} {value:g}" for name, value in report.sampler.items())
    interleaved = INTERLEAVED.replace("resample prompts", "resample questions") if report.suite else INTERLEAVED
    pair = f"Target {report.target}, draft {report.draft or 'none'}. " if report.target else ""
    lines = [
        f"{pair}Up to {report.new_tokens} tokens after each of {report.prompts} {interleaved} Sampler of sampled "
        f"configurations: {named}."
    ]
    notes = {
        "llama.cpp's options, where they are not the defaults": report.gguf,
        "PyTorch's settings, where they are not the defaults": report.pytorch,
        "Prompts": report.asked,
        "Left out of the files": listed(report.dropped),
    }
    lines += [f"{name}: {note}." for name, note in notes.items() if note]
    lines += [
        f"{part.pair}, {engine_name(part.backend)}, does not count: its distributions are {part.kl:.2g} nats of KL "
        f"from the target's own, and the limit is {MOST_KL:g}."
        for part in report.parts
        if (part.kl or 0) > MOST_KL
    ]
    return lines

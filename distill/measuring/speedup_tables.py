"""The tables of `distill speedup`, for the terminal, speedup.md, the report page and the model card, and why a pair is
faster than plain decoding or not, in sentences whose every number was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from distill.measuring.speedup_results import (
    REPEATS,
    ChosenLength,
    GroupFigures,
    InTurns,
    Measurement,
    RoundFigures,
    SpeedupPart,
    SpeedupReport,
    StepFigures,
)
from distill.recipe.configuration import PLAIN, PLAIN_SAMPLED
from distill.recipe.measuring import engine_name
from distill.tables import Block, Cell, Columns, Interval, Row, Table, Value, listed, shown, table_of

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
        "acceptance rate": lambda one: Cell(one.acceptance, "%"),
        "speedup": lambda one: Cell(1.0 if one.is_plain else speedup_of(one), "×"),
        "predicted": lambda one: Cell(one.predicted, "×"),
        "same text": lambda one: Cell(one.same_text, bad=bool(one.different)),
        "distribution": lambda one: Cell(one.distribution, bad=one.lossy is not None),
    }
    chosen = {id(one) for one in best}
    classes = ["best" if id(one) in chosen else "plain" if one.is_plain else "" for one in rows]
    plain = {
        f"{100 * one.repeated:.0f} % ({one.configuration}, {engine_name(one.backend)})"
        for one in rows
        if one.is_plain and one.repeated is not None
    }
    note = f"Of the texts, so much lies in {REPEATS} tokens that the same text had before: {', '.join(sorted(plain))}."
    return table_of(rows, columns, command, "configurations", note if plain else "", classes=classes)


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


def step_table(parts: Sequence[SpeedupPart], command: str) -> Table:
    """Milliseconds of a step of each number of tokens, with one model alone."""
    curves = [(part, name, curve) for part in parts for name, curve in part.steps.by_model.items()]
    sizes = sorted({m for *_, curve in curves for m in curve})
    rows: list[Row] = [
        [
            part.pair,
            part.backend,
            name,
            part.steps.depth,
            *(Cell(1e3 * curve[m] if m in curve else None, ".3f") for m in sizes),
        ]
        for part, name, curve in curves
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
        "acceptance rate": lambda one: Cell(one.acceptance, "%"),
        "speedup": lambda one: Cell(speedup_of(one), "×"),
    }
    return table_of(groups, columns, command, f"by {name}, {over}")


def verdict(report: SpeedupReport) -> list[str]:
    """The fastest way to the target's greedy text over all engines that were measured, in tokens per second, and every
    engine whose best is slower than plain decoding in another one; empty where nothing was measured to compare."""
    if not report.rivals or not report.plain:
        return []
    best, (plain, *_) = report.fastest_way, report.plain
    way = f"{best.tokens_per_second:.1f} tokens/s, `{best.configuration}` in {engine_name(best.backend)}"
    own = f"{shown(speedup_of(best), '×')} plain decoding there"
    if best.is_plain:
        own = "nothing that drafts is faster"
    elif plain.key != best.key:
        ratio = best.tokens_per_second / plain.tokens_per_second
        own += f", {ratio:.2f}× the fastest plain decoding measured ({plain.tokens_per_second:.1f}, {plain.pair}, "
        own += f"{engine_name(plain.backend)}; one engine after the other)"
    kl = next((part.kl for part in report.parts if part.key == best.key), None)
    apart = "" if kl is None else f" (KL {kl:.2g} nats to the target's own)"
    lines = [f"Fastest here: {way}{apart}: {own}."]
    if report.in_turns:
        first = report.in_turns[0]
        base = next(one for one in report.in_turns if one.speedup == 1)
        over = shown(Interval(first.speedup, first.speedup_low, first.speedup_high), "×")
        lines.append(
            f"With the engines taking turns: {first.tokens_per_second:.1f} tokens/s, `{first.configuration}` in "
            f"{engine_name(first.backend)}, {over} the fastest plain decoding "
            f"({base.tokens_per_second:.1f}, {engine_name(base.backend)})."
        )
    lines += [
        f"{part.pair}, {engine_name(part.backend)}, does not count: its distributions are {part.kl:.2g} nats of KL "
        f"from the target's own, and speedup.most_kl accepts {report.most_kl:g}."
        for part in report.parts
        if (part.kl or 0) > report.most_kl
    ]
    for one in report.best:
        if one.key != plain.key and one.speedup > 1 and one.tokens_per_second < plain.tokens_per_second:
            lines.append(
                f"The {one.speedup:.2f}× of `{one.configuration}` ({one.pair}, {engine_name(one.backend)}) is "
                f"{one.tokens_per_second:.1f} tokens/s, slower than plain decoding in {engine_name(plain.backend)}."
            )
    return lines


def engine_table(report: SpeedupReport) -> Table:
    """What each engine and type of file gives: plain decoding, and its fastest way."""
    best = {one.key: one for one in report.best}
    rows: list[Row] = []
    for part in report.parts:
        plain = next(one for one in part.measurements if one.is_plain)
        fastest = best.get(part.key, plain)
        rows.append(
            [
                part.pair,
                part.backend,
                Cell(part.kl, ".4f"),
                Cell(None if part.prompt_seconds is None else 1e3 * part.prompt_seconds, ".0f"),
                plain.tokens_per_second,
                fastest.configuration,
                fastest.tokens_per_second,
                Cell(1.0 if fastest.is_plain else speedup_of(fastest), "×"),
            ]
        )
    heads = ["pair", "backend", "KL", "first token, ms", "plain tokens/s", "fastest way", "tokens/s", "speedup"]
    note = "KL: mean nats of the target's own distributions to this engine's, on its greedy texts."
    return Table(heads, rows, report.command, "engines", note)


def turn_table(report: SpeedupReport) -> Table:
    """Plain decoding and the fastest way of each engine, in the same minutes."""
    columns: Columns[InTurns] = {
        "pair": lambda one: one.pair,
        "backend": lambda one: one.backend,
        "configuration": lambda one: one.configuration,
        "tokens/s": lambda one: one.tokens_per_second,
        "over the fastest plain": lambda one: Cell(Interval(one.speedup, one.speedup_low, one.speedup_high), "×"),
    }
    note = "Plain decoding and the fastest way of each, timed again with the engines taking turns; prompts included."
    return table_of(report.in_turns, columns, report.command, "engines in turns", note)


def speedup_blocks(report: SpeedupReport) -> list[Block]:
    """Everything that was measured of a run, also its speedup.md, or of any pair."""
    blocks: list[Block] = [
        *verdict(report),
        *_head(report),
        *([engine_table(report)] if len(report.parts) > 1 else []),
        *([turn_table(report)] if report.in_turns else []),
        measurement_table(report.measurements, report.command, report.best),
    ]
    if any(row.length and row.predicted is not None for row in report.measurements):
        blocks.append("Predicted, for fixed lengths: from costs and conditional acceptance (docs/decoding.md).")
    blocks.append(report.explanations)
    for part in report.parts:
        if len(report.parts) > 1:
            blocks.append(f"{part.pair}, {part.backend}:")
        blocks += _part(part, report.command)
    return blocks


def _part(part: SpeedupPart, command: str) -> list[Block]:
    blocks: list[Block] = [round_table(part.rounds, command), step_table([part], command)]
    if part.by_class:
        blocks.append(group_table(part.by_class, "class of prompt", "with the prompts", command))
    if part.by_depth:
        blocks.append(group_table(part.by_depth, "tokens in the context", "rounds alone", command))
    return blocks


def _head(report: SpeedupReport) -> list[str]:
    named = ", ".join(f"{name} {value:g}" for name, value in report.sampler.items())
    pair = f"Target {report.target}, draft {report.draft or 'none'}. " if report.target else ""
    lines = [
        f"{pair}Up to {report.new_tokens} tokens after each of {report.prompts} {INTERLEAVED} Sampler of sampled "
        f"configurations: {named}."
    ]
    notes = {
        "llama.cpp's options, where they are not the defaults": report.gguf,
        "PyTorch's settings, where they are not the defaults": report.pytorch,
        "Left out of the files": listed(report.dropped),
    }
    lines += [f"{name}: {note}." for name, note in notes.items() if note]
    if report.calibration:
        none = "".join(f" No fit of {name}: {why}." for name, why in report.calibration["unfitted"].items())
        where = f"{report.calibration['rounds']} rounds of {report.calibration['prompts']} other prompts"
        lines.append(f"Draft probabilities were calibrated on {where}, costs measured on this machine.{none}")
    return lines


# ── Why a pair is faster than plain decoding, or not, and what to change ──
# Legend: a plain step is a token of plain decoding; what a round costs is told in plain steps.

HARDLY_DRAFTS = 0.2  # verified tokens of a round, less the one that plain decoding has: below, hardly any is drafted
LARGEST_ERROR = 1.25  # times the predicted speedup, or its inverse: predictions are within a tenth on a quiet machine
LEAST_GAIN = 1.02  # a change that raises the speedup by less is no advice

# What might change, what it would mean, and how to go about it.
ADVICE = {
    "acceptance": (
        "with every drafted token accepted",
        "train longer, or on answers to prompts like those that are served",
    ),
    "draft": (
        "with a draft that costs nothing",
        "take a smaller draft: fewer layers, q8_0 instead of f16, or, in PyTorch only, a trimmed head",
    ),
    "verification": (
        "if verifying cost no more than a plain step",
        "draft fewer tokens a round, or serve the target in a type or build whose steps over several tokens cost less "
        "(`distill profile`)",
    ),
    "rest": (
        "with nothing spent beside the models",
        "take a larger target, or more prompts at once: these models are too small for what surrounds them",
    ),
}


def explain(
    steps: StepFigures,
    rows: Sequence[Measurement],
    rounds: Sequence[RoundFigures],
    chosen: ChosenLength | None,
    prompts: Mapping[str, float],
) -> list[str]:
    """Sentences about the fastest configuration that drafts, and about the length that was chosen.

    `prompts` are the seconds of a prompt by configuration: a draft reads it too.
    """
    drafting = [row for row in rows if not row.is_plain]
    if not drafting:
        return ["Nothing was drafted."]
    by_title = {figures.configuration: figures for figures in rounds}
    best = max(drafting, key=lambda row: row.speedup)
    base = PLAIN_SAMPLED if best.sampler is not None and PLAIN_SAMPLED.title in by_title else PLAIN
    plain, figures = by_title[base.title].seconds, by_title[best.configuration]
    sentences = ["The texts end with their first token: no round was timed."]
    if plain and figures.seconds:
        sentences = [
            _costs(steps, best, figures, plain),
            *_verdict(best, figures, plain, prompts),
            *_advice(best, drafting, by_title, plain),
        ]
    if chosen is not None and chosen.length:
        # Of a single odd prompt there is no interval.
        interval = f" [{chosen.speedup_low:.2f}, {chosen.speedup_high:.2f}]"
        sentences.append(
            f"Cross-check: of the fixed lengths {chosen.length} is the fastest on every other prompt, and gives on the "
            f"rest {chosen.speedup:.2f}×{interval if chosen.speedup_low < chosen.speedup_high else ''}."
        )
    elif chosen is not None:
        sentences.append("Cross-check: plain decoding beats the fixed lengths on every other prompt.")
    return sentences


def _costs(steps: StepFigures, best: Measurement, figures: RoundFigures, plain: float) -> str:
    """What a step of each model and a round of the fastest configuration cost, and what the round gives."""
    alone, draft = steps.target[1], steps.draft.get(1)
    head = f"One token takes the target {alone * 1e3:.2f} ms at depth {steps.depth}"
    if draft is not None:
        head += f", the draft {draft / alone:.2f} of that"
    parts = "not told apart: the device computes on after a call returns"
    if (measured := _parts(figures, plain)) is not None:
        target, drafted, rest = measured
        parts = (
            f"the target's step over {figures.verified:.1f} tokens {target:.2f}, {figures.draft_steps:.1f} draft steps "
            f"{drafted:.2f}, the rest {rest:.2f}"
        )
    return (
        f"{head}. Fastest: `{best.configuration}`, {best.speedup:.2f}× over the whole request. A round costs "
        f"{figures.seconds / plain:.2f} plain steps ({parts}) and gives {figures.tokens:.2f} tokens."
    )


def _verdict(best: Measurement, figures: RoundFigures, plain: float, prompts: Mapping[str, float]) -> list[str]:
    """Whether the speed is far from its prediction, and why it is no gain where it is none."""
    sentences = []
    if best.predicted is not None and not 1 / LARGEST_ERROR < best.speedup / best.predicted < LARGEST_ERROR:
        sentences.append(
            f"Costs and conditional acceptance predict {best.predicted:.2f}×, which is far from it: another program "
            "used the machine (`distill doctor` shows the load), or the prompts are too few."
        )
    if best.speedup_low > 1:
        return sentences
    paid = figures.tokens >= figures.seconds / plain
    if paid and best.speedup >= 1:
        why = "It is faster, but not by more than these prompts vary: measure more of them (--count; in a recipe, "
        return [*sentences, why + "speedup.prompts)."]
    if _hardly_drafts(figures):
        rule = ": its rule expects no gain from more" if best.rule == "expected-value" else ""
        why = f"it verifies {figures.verified:.2f} tokens a round, so it hardly drafts{rule}"
    elif paid:
        why = (
            f"its rounds are fast enough, but reading the prompt takes {prompts[best.configuration] * 1e3:.1f} ms with "
            f"the draft, {prompts[PLAIN.title] * 1e3:.1f} ms without"
        )
    else:
        accepted = "" if best.acceptance is None else f" (acceptance rate {best.acceptance:.0%})"
        why = f"a round gives fewer tokens than the plain steps that it costs{accepted}"
    sentences.append(f"It is no faster than plain decoding: {why}.")
    whole = _all_accepted(figures, plain)
    if whole is not None and whole < 1 and not _hardly_drafts(figures):
        sentences.append(f"With every drafted token accepted it would give {whole:.2f}×: no draft is good enough.")
    return sentences


def _all_accepted(figures: RoundFigures, plain: float) -> float | None:
    """The speedup of the rounds if everything drafted were accepted; None where that is not known."""
    return None if figures.most is None else max(figures.most, figures.tokens) / (figures.seconds / plain)


def _parts(figures: RoundFigures, plain: float) -> tuple[float, float, float] | None:
    """What a round costs in the target, in the draft and beside them, in plain steps; None where that was not timed."""
    if figures.target_seconds is None:
        return None
    rest = figures.overhead_seconds or 0.0
    return figures.target_seconds / plain, (figures.draft_seconds or 0.0) / plain, rest / plain


def _hardly_drafts(figures: RoundFigures) -> bool:
    return figures.verified < 1 + HARDLY_DRAFTS and (figures.most or 0) < 1 + HARDLY_DRAFTS


def _advice(
    best: Measurement, drafting: Sequence[Measurement], by_title: Mapping[str, RoundFigures], plain: float
) -> list[str]:
    """The one change that raises the speedup of rounds most: of the fastest configuration or, where that hardly drafts
    and so has little to gain, of the fastest fixed length."""
    fixed = [one for one in drafting if one.length and one.sampler == best.sampler]
    hardly = _hardly_drafts(by_title[best.configuration])
    subject = max(fixed, key=lambda one: one.speedup) if hardly and fixed else best
    figures = by_title[subject.configuration]
    changes = _changed(subject, figures, plain)
    now = figures.tokens / (figures.seconds / plain) if figures.seconds else 0.0
    name = max(changes, key=lambda name: changes[name], default="")
    if not changes or changes[name] < LEAST_GAIN * now:
        return []
    change, todo = ADVICE[name]
    gain = f"would give {changes[name]:.2f}× instead of {now:.2f}×"
    if changes[name] < 1:
        return [
            f"No change of one thing makes drafting faster than plain decoding here. The most, {change}, {gain}. What "
            "to do: decode plainly here; `distill plan` says what another type, build or machine would have to cost."
        ]
    return [f"What to change: {change}, the rounds of `{subject.configuration}` {gain}. So {todo}."]


def _changed(measured: Measurement, figures: RoundFigures, plain: float) -> dict[str, float]:
    """The speedup of the rounds with one thing changed: everything accepted, a draft at no cost, verifying as cheap as
    a plain step, nothing spent beside the models. Without acceptance where tokens are looked up, which no training
    changes; empty where the parts of a round were not timed."""
    if (parts := _parts(figures, plain)) is None or sum(parts) <= 0:  # texts of one token have no rounds
        return {}
    (target, draft, rest), tokens, whole = parts, figures.tokens, _all_accepted(figures, plain)
    cost = target + draft + rest
    return ({} if whole is None or measured.drafter == "lookup" else {"acceptance": whole}) | {
        "draft": tokens / (cost - draft),
        "verification": tokens / (min(target, 1.0) + draft + rest),
        "rest": tokens / (cost - max(rest, 0.0)),
    }

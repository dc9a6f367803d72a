"""The tables of `distill speedup`: of a run, also in its speedup.md, and of any pair."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from distill.results.pair_results import GroupFigures, PairSpeedup
from distill.results.serialise import as_json
from distill.results.speedup_results import Measurement, SpeedupReport


def run_markdown(report: SpeedupReport) -> str:
    """The tables of speedup.md, which the terminal shows too."""
    lines = [
        f"Greedy decoding of up to {report.new_tokens} tokens, distinct test prompts, interleaved, cold caches; "
        "times include the prompt. Speedup over this decoder's own plain run, intervals by prompt.",
        "",
        "| pair | backend | drafted | tok/s | tokens/round | accepted | speedup | predicted | same text |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in report.sweep:
        lines.append(
            f"| {row.pair} | {row.backend} | {row.length or 'plain'} | {_figures(row)} "
            f"| {_number(row.predicted, '.2f')} | {'' if row.is_plain else row.same_text} |"
        )
    lines += _others(report)
    heads = "| pair | backend | plain tok/s | library | its tok/s | median of the prompts' ratios |"
    lines += ["", heads, "|---|---|--:|---|--:|--:|"]
    for part in report.parts:
        plain = part.plain_reference
        lines.append(
            f"| {plain.pair} | {plain.backend} | {plain.plain_tokens_per_second:.1f} | {plain.library} "
            f"| {plain.library_tokens_per_second:.1f} | {plain.ratio:.2f} |"
        )
    explanations = [f"- {sentence}" for part in report.parts for sentence in part.explanations]
    lines += ["", *explanations, "", *_footer(report)]
    return "\n".join(lines) + "\n"


def _others(report: SpeedupReport) -> list[str]:
    """The other configurations, each beside the plain run of its own sampler."""
    if not report.others:
        return []
    lines = [
        "",
        "Other configurations, interleaved with the ones above; speedup over the plain run of the same sampler.",
        "",
        "| pair | backend | configuration | plain tok/s | tok/s | tokens/round | accepted | speedup | same text "
        "| distribution |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in report.others:
        lines.append(
            f"| {row.pair} | {row.backend} | {row.configuration} | {row.plain_tokens_per_second:.1f} "
            f"| {_figures(row)} | {row.same_text} | {'LOSSY' if row.lossy else row.distribution} |"
        )
    return lines


def _footer(report: SpeedupReport) -> list[str]:
    """Where probabilities were calibrated, why configurations are lossy, and the command."""
    lines = [f"llama.cpp's options, where they are not the defaults: {report.gguf}.", ""] if report.gguf else []
    calibration = report.calibration
    if calibration:
        none = "".join(f" No fit of {name}: {why}." for name, why in calibration["unfitted"].items())
        where = f"{calibration['rounds']} rounds of {calibration['prompts']} validation texts"
        lines += [f"Draft probabilities were calibrated on {where}, costs measured on this machine.{none}", ""]
    for title, reason in {row.configuration: row.distribution for row in report.others if row.lossy}.items():
        lines += [f"`{title}` is {reason}", ""]
    return [*lines, f"`{report.command}`"]


def flat_run_rows(report: SpeedupReport) -> list[dict[str, Any]]:
    """Every measurement as a row with the same columns, for jsonl and csv."""
    return [as_json(row) | {"distribution": row.distribution} for row in report.measurements]


def pair_markdown(report: PairSpeedup) -> str:
    """Everything that was measured, as Markdown."""
    lines = [*_head(report), "", *_pair_rows(report), "", *_rounds(report), "", *_steps(report), ""]
    for groups, name, over in (
        (report.by_class, "class of prompt", "with the prompts"),
        (report.by_depth, "tokens in the context", "rounds alone"),
    ):
        if groups:
            lines += [*_groups(groups, name, over), ""]
    if report.batches:
        lines += [*_batches(report), ""]
    if report.library is not None:
        found = report.library
        lines += [
            f"Plain decoding here: {found.plain_tokens_per_second:.1f} tok/s; the library's own generation: "
            f"{found.library_tokens_per_second:.1f} tok/s (median ratio {found.ratio:.2f}).",
            "",
        ]
    lines += [*(f"- {sentence}" for sentence in (*report.reasons, *report.not_batched)), "", f"`{report.command}`"]
    return "\n".join(lines) + "\n"


def _head(report: PairSpeedup) -> list[str]:
    named = ", ".join(f"{name} {value:g}" for name, value in report.sampler.items())
    lines = [
        f"Target {report.target}, draft {report.draft or 'none'}, {report.backend}. {report.prompts} distinct prompts, "
        f"up to {report.new_tokens} tokens after each, interleaved, cold caches; times include the prompt. Sampler of "
        f"sampled configurations: {named}. Speedup over this decoder's own plain run, intervals by prompt."
    ]
    if report.synthetic is not None:
        rates = ", ".join(f"{rate:g}" for rate in report.synthetic)
        lines.append(
            f"**SYNTHETIC ACCEPTANCE {rates}** (by position; the last one holds for all behind): costs are real, "
            "acceptance and texts are not. No figure below says how well this draft predicts its target."
        )
    notes = {
        "llama.cpp's options, where they are not the defaults": report.gguf,
        "PyTorch's settings, where they are not the defaults": report.pytorch,
        "Steps padded or split, because that is cheaper": "; ".join(report.steps_given),
        "Left out of the files": ", ".join(f"{count} {reason}" for reason, count in report.dropped.items()),
    }
    lines += [f"{name}: {note}." for name, note in notes.items() if note]
    if report.calibration is not None:
        lines.append(
            f"Draft probabilities were calibrated on {report.calibration['prompts']} other prompts of the same files."
        )
    return [line for one in lines for line in (one, "")][:-1]


def _pair_rows(report: PairSpeedup) -> list[str]:
    lines = [
        "| configuration | tok/s | tokens/round | accepted | speedup | predicted | same text | distribution |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in report.measurements:
        text, distribution = row.same_text, row.distribution
        if report.synthetic is not None and not row.is_plain:
            text = distribution = "synthetic"
        lines.append(
            f"| {row.configuration} | {_figures(row)} | {_number(row.predicted, '.2f')} "
            f"| {'' if row.is_plain else text} | {distribution} |"
        )
    if any(row.length and row.predicted is not None for row in report.measurements):
        lines += [
            "",
            "Predicted, for fixed lengths: from costs timed between these texts and the acceptance counted in them.",
        ]
    return lines


def _rounds(report: PairSpeedup) -> list[str]:
    lines = [
        "A round, the prompt apart, in ms (of plain decoding, a step). Bound: τ ÷ (T(n+1) + nD), from steps timed "
        "with one model alone.",
        "",
        "| configuration | tokens (τ) | verified | draft steps | ms | target | draft | overhead | tok/s | bound "
        "| attained |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for one in report.rounds:
        parts = (one.target_seconds, one.draft_seconds, one.overhead_seconds)
        shown = " | ".join("" if part is None else f"{part * 1e3:.3f}" for part in parts)
        lines.append(
            f"| {one.configuration} | {one.tokens:.2f} | {one.verified:.1f} | {one.draft_steps:.1f} "
            f"| {one.seconds * 1e3:.3f} | {shown} | {one.tokens_per_second:.1f} | {one.bound:.1f} "
            f"| {one.attained:.0%} |"
        )
    return lines


def _steps(report: PairSpeedup) -> list[str]:
    def curve(name: str, seconds: dict[int, float]) -> str:
        return ", ".join(f"{name}({m}) {one * 1e3:.3f}" for m, one in sorted(seconds.items()))

    curves = [curve("T", report.steps.target), curve("D", report.steps.draft)]
    return [f"Steps alone, at depth {report.steps.depth}, ms: {'; '.join(filter(None, curves))}"]


def _groups(groups: Iterable[GroupFigures], name: str, over: str) -> list[str]:
    lines = [
        f"| {name} | configuration | of | tok/s | tokens/round | accepted | speedup, {over} |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for one in groups:
        gain = _number(one.speedup, ".2f")
        if not math.isnan(one.speedup_low):
            gain += f" [{one.speedup_low:.2f}, {one.speedup_high:.2f}]"
        lines.append(
            f"| {one.group} | {one.configuration} | {one.count} | {one.tokens_per_second:.1f} "
            f"| {_number(one.tokens_per_round, '.2f')} | {_number(one.acceptance, '.1%')} | {gain} |"
        )
    return lines


def _batches(report: PairSpeedup) -> list[str]:
    lines = [
        "| batch | configuration | plain tok/s | tok/s | tokens/round | accepted | speedup |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    for one in report.batches:
        lines.append(
            f"| {one.batch} | {one.configuration} | {one.plain_tokens_per_second:.1f} | {one.tokens_per_second:.1f} "
            f"| {one.tokens_per_round:.2f} | {_number(one.acceptance, '.1%')} | {one.speedup:.2f} |"
        )
    return lines


def flat_pair_rows(report: PairSpeedup) -> list[dict[str, Any]]:
    """Every measurement as a row with the same columns, for jsonl and csv, with its rounds' figures."""
    rounds: Sequence[dict[str, Any]] = [as_json(one) for one in report.rounds]
    rows = []
    for measured, own in zip(report.measurements, rounds, strict=True):
        named = {f"round_{name}": value for name, value in own.items() if name != "configuration"}
        rows.append(as_json(measured) | {"distribution": measured.distribution} | named)
    return rows


def _figures(row: Measurement) -> str:
    """The cells of every table of measurements: tokens per second, tokens per round, accepted, speedup."""
    gain = "1" if row.is_plain else f"{row.speedup:.2f} [{row.speedup_low:.2f}, {row.speedup_high:.2f}]"
    each, accepted = _number(row.tokens_per_round, ".2f"), _number(row.acceptance, ".1%")
    return f"{row.tokens_per_second:.1f} | {each} | {accepted} | {gain}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)

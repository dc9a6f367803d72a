"""The tables of speedup.md, which the terminal shows too."""

from __future__ import annotations

from typing import Any

from distill.results.serialise import as_json
from distill.results.speedup_results import Measurement, SpeedupReport


def as_markdown(report: SpeedupReport) -> str:
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
            f"| {row.pair} | {row.backend} | {row.length or 'plain'} | {row.tokens_per_second:.1f} "
            f"| {_number(row.tokens_per_round, '.2f')} | {_number(row.acceptance, '.1%')} | {_gain(row)} "
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
            f"| {row.tokens_per_second:.1f} | {_number(row.tokens_per_round, '.2f')} "
            f"| {_number(row.acceptance, '.1%')} | {_gain(row)} | {row.same_text} "
            f"| {'LOSSY' if row.lossy else row.distribution} |"
        )
    return lines


def _gain(row: Measurement) -> str:
    return "1" if row.is_plain else f"{row.speedup:.2f} [{row.speedup_low:.2f}, {row.speedup_high:.2f}]"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


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


def flat_rows(report: SpeedupReport) -> list[dict[str, Any]]:
    """Every measurement as a row with the same columns, for jsonl and csv."""
    return [as_json(row) | {"distribution": row.distribution} for row in report.measurements]

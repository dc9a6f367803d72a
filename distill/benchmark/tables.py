"""The tables of `distill speedup`: of a run, also in its speedup.md, and of any pair."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from distill.results.pair_results import GroupFigures, PairSpeedup
from distill.results.serialise import as_json
from distill.results.speedup_results import Measurement, SpeedupReport
from distill.results.tables import markdown_table


def run_markdown(report: SpeedupReport) -> str:
    """The tables of speedup.md, which the terminal shows too."""
    heads = ["pair", "backend", "drafted", "tok/s", "tokens/round", "accepted", "speedup", "predicted", "same text"]
    sweep = [
        [row.pair, row.backend, str(row.length or "plain"), *_figures(row), *_predicted(row)] for row in report.sweep
    ]
    library_heads = ["pair", "backend", "plain tok/s", "library", "its tok/s", "median of the prompts' ratios"]
    libraries = []
    for one in report.plain_references:
        ours, theirs = f"{one.plain_tokens_per_second:.1f}", f"{one.library_tokens_per_second:.1f}"
        libraries.append([one.pair, one.backend, ours, one.library, theirs, f"{one.ratio:.2f}"])
    blocks = [
        f"Greedy decoding of up to {report.new_tokens} tokens, distinct test prompts, interleaved, cold caches; "
        "times include the prompt. Speedup over this decoder's own plain run, intervals by prompt.",
        markdown_table(heads, sweep, "llr"),
        *_others(report),
        markdown_table(library_heads, libraries, "llrlr"),
        "\n".join(f"- {sentence}" for sentence in report.explanations),
        *_footer(report),
    ]
    return "\n\n".join(blocks) + "\n"


def _others(report: SpeedupReport) -> list[str]:
    """The other configurations, each beside the plain run of its own sampler."""
    if not report.others:
        return []
    heads = ["pair", "backend", "configuration", "plain tok/s", "tok/s", "tokens/round", "accepted", "speedup"]
    rows = []
    for row in report.others:
        names, plain = (row.pair, row.backend, row.configuration), f"{row.plain_tokens_per_second:.1f}"
        rows.append([*names, plain, *_figures(row), row.same_text, "LOSSY" if row.lossy else row.distribution])
    return [
        "Other configurations, interleaved with the ones above; speedup over the plain run of the same sampler.",
        markdown_table([*heads, "same text", "distribution"], rows, "lllrrrrrrl"),
    ]


def _footer(report: SpeedupReport) -> list[str]:
    """Where probabilities were calibrated, why configurations are lossy, and the command."""
    lines = [f"llama.cpp's options, where they are not the defaults: {report.gguf}."] if report.gguf else []
    calibration = report.calibration
    if calibration:
        none = "".join(f" No fit of {name}: {why}." for name, why in calibration["unfitted"].items())
        where = f"{calibration['rounds']} rounds of {calibration['prompts']} validation texts"
        lines.append(f"Draft probabilities were calibrated on {where}, costs measured on this machine.{none}")
    reasons = {row.configuration: row.distribution for row in report.others if row.lossy}
    return [*lines, *(f"`{title}` is {reason}" for title, reason in reasons.items()), f"`{report.command}`"]


def flat_run_rows(report: SpeedupReport) -> list[dict[str, Any]]:
    """Every measurement as a row with the same columns, for jsonl and csv."""
    return [as_json(row) | {"distribution": row.distribution} for row in report.measurements]


def pair_markdown(report: PairSpeedup) -> str:
    """Everything that was measured, as Markdown."""
    blocks = [*_head(report), *_pair_rows(report), *_rounds(report)]
    curves = {"T": report.steps.target, "D": report.steps.draft}
    shown = [
        ", ".join(f"{name}({m}) {seconds * 1e3:.3f}" for m, seconds in sorted(curve.items()))
        for name, curve in curves.items()
        if curve
    ]
    blocks.append(f"Steps alone, at depth {report.steps.depth}, ms: {'; '.join(shown)}")
    if report.by_class:
        blocks.append(_groups(report.by_class, "class of prompt", "with the prompts"))
    if report.by_depth:
        blocks.append(_groups(report.by_depth, "tokens in the context", "rounds alone"))
    if report.batches:
        blocks.append(_batches(report))
    if report.library is not None:
        blocks.append(
            f"Plain decoding here: {report.library.plain_tokens_per_second:.1f} tok/s; the library's own generation: "
            f"{report.library.library_tokens_per_second:.1f} tok/s (median ratio {report.library.ratio:.2f})."
        )
    blocks.append("\n".join(f"- {sentence}" for sentence in (*report.reasons, *report.not_batched)))
    return "\n\n".join([*blocks, f"`{report.command}`"]) + "\n"


def _head(report: PairSpeedup) -> list[str]:
    named = ", ".join(f"{name} {value:g}" for name, value in report.sampler.items())
    lines = [
        f"Target {report.target}, draft {report.draft or 'none'}, {report.backend}. {report.prompts} distinct prompts, "
        f"up to {report.new_tokens} tokens after each, interleaved, cold caches; times include the prompt. Sampler of "
        f"sampled configurations: {named}. Speedup over this decoder's own plain run, intervals by prompt."
    ]
    notes = {
        "llama.cpp's options, where they are not the defaults": report.gguf,
        "PyTorch's settings, where they are not the defaults": report.pytorch,
        "Left out of the files": ", ".join(f"{count} {reason}" for reason, count in report.dropped.items()),
    }
    lines += [f"{name}: {note}." for name, note in notes.items() if note]
    if report.calibration is not None:
        lines.append(
            f"Draft probabilities were calibrated on {report.calibration['prompts']} other prompts of the same files."
        )
    return lines


def _pair_rows(report: PairSpeedup) -> list[str]:
    heads = ["configuration", "tok/s", "tokens/round", "accepted", "speedup", "predicted", "same text", "distribution"]
    rows = []
    for row in report.measurements:
        rows.append([row.configuration, *_figures(row), *_predicted(row), row.distribution])
    blocks = [markdown_table(heads, rows, "lrrrrrrl")]
    if any((row.length or row.nodes) and row.predicted is not None for row in report.measurements):
        blocks.append(
            "Predicted, for fixed lengths and chosen trees: from the acceptance counted in these texts, and from the "
            "costs of rounds, which were timed between them (of trees before them)."
        )
    return blocks


def _rounds(report: PairSpeedup) -> list[str]:
    heads = ["configuration", "tokens (τ)", "verified", "draft steps", "ms", "target", "draft", "overhead", "tok/s"]
    rows = []
    for one in report.rounds:
        seconds = (one.seconds, one.target_seconds, one.draft_seconds, one.overhead_seconds)
        shown = ["" if part is None else f"{part * 1e3:.3f}" for part in seconds]
        counts = [f"{one.tokens:.2f}", f"{one.verified:.1f}", f"{one.draft_steps:.1f}"]
        speeds = [
            "" if math.isnan(value) else format(value, form)
            for value, form in ((one.tokens_per_second, ".1f"), (one.bound, ".1f"), (one.attained, ".0%"))
        ]
        rows.append([one.configuration, *counts, *shown, *speeds])
    return [
        "A round, the prompt apart, in ms (of plain decoding, a step). Bound: τ ÷ (T(n+1) + nD), from steps timed "
        "with one model alone.",
        markdown_table([*heads, "bound", "attained"], rows, "lr"),
    ]


def _groups(groups: Iterable[GroupFigures], name: str, over: str) -> str:
    heads = [name, "configuration", "of", "tok/s", "tokens/round", "accepted", f"speedup, {over}"]
    rows = []
    for one in groups:
        gain = _number(one.speedup, ".2f")
        if not math.isnan(one.speedup_low):
            gain += f" [{one.speedup_low:.2f}, {one.speedup_high:.2f}]"
        figures = [f"{one.tokens_per_second:.1f}", _number(one.tokens_per_round, ".2f"), _number(one.acceptance, ".1%")]
        rows.append([one.group, one.configuration, str(one.count), *figures, gain])
    return markdown_table(heads, rows, "llr")


def _batches(report: PairSpeedup) -> str:
    heads = ["batch", "configuration", "plain tok/s", "tok/s", "tokens/round", "accepted", "speedup"]
    rows = []
    for one in report.batches:
        speeds = [f"{one.plain_tokens_per_second:.1f}", f"{one.tokens_per_second:.1f}", f"{one.tokens_per_round:.2f}"]
        gain = [_number(one.acceptance, ".1%"), f"{one.speedup:.2f}"]
        rows.append([str(one.batch), one.configuration, *speeds, *gain])
    return markdown_table(heads, rows, "rlr")


def flat_pair_rows(report: PairSpeedup) -> list[dict[str, Any]]:
    """Every measurement as a row with the same columns, for jsonl and csv, with its rounds' figures."""
    rows = []
    for measured, own in zip(report.measurements, report.rounds, strict=True):
        named = {f"round_{name}": value for name, value in as_json(own).items() if name != "configuration"}
        rows.append(as_json(measured) | {"distribution": measured.distribution} | named)
    return rows


def _figures(row: Measurement) -> list[str]:
    """The cells of every table of measurements: tokens per second, tokens per round, accepted, speedup."""
    gain = "1" if row.is_plain else f"{row.speedup:.2f} [{row.speedup_low:.2f}, {row.speedup_high:.2f}]"
    each, accepted = _number(row.tokens_per_round, ".2f"), _number(row.acceptance, ".1%")
    return [f"{row.tokens_per_second:.1f}", each, accepted, gain]


def _predicted(row: Measurement) -> list[str]:
    """The cells behind these: the predicted speedup, and how many greedy texts are the plain ones."""
    return [_number(row.predicted, ".2f"), "" if row.is_plain else row.same_text]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)

"""A check of a server as sentences, tables and rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distill.intervals import Interval
from distill.results.serving_results import Difference, ServedAcceptance, ServeReport
from distill.results.tables import markdown_table
from distill.serving.choose import named
from distill.serving.differences import SMALLEST
from distill.serving.replaying import TextCounts

LARGE = 0.5  # of a shortfall: differences that explain less leave something to look for


@dataclass(frozen=True)
class Reference:
    """Our decoder with `files` on the same prompts; `short` are the tokens per round that the server lacks."""

    files: str
    acceptance: ServedAcceptance
    counts: Sequence[TextCounts]
    short: Interval


# ── sentences ──


def sentences(report: ServeReport, reference: Reference | None) -> list[str]:
    """About acceptance, differences, the texts and the speed, in order of weight."""
    found = [_beside(report, report.acceptance[0], reference)]
    found += [_explained(one) for one in report.differences if one.explains]
    found += [_unexplained(one) for one in report.differences if not one.explains]
    if reference is not None and reference.short.low > SMALLEST:
        short, explained = reference.short.mean, sum(one.loss.mean for one in report.differences if one.explains)
        if explained < LARGE * short:
            found.append(
                f"{short - explained:.2f} of the missing {short:.2f} tokens per round are not explained by "
                f"these differences. What is left is the build ({report.build}) and its back end: try it without a GPU "
                "(--n-gpu-layers 0 --n-gpu-layers-draft 0), then another build (scripts/build_llama_cpp.sh)."
            )
    if report.texts and report.same_texts < report.texts:
        found.append(
            f"With the draft, {report.texts - report.same_texts} of {report.texts} texts differ from the plain "
            "server's, as happens between nearly equal tokens: steps of several tokens round otherwise than of one."
        )
    return [*found, _speed(report), *([report.choice.sentence] if report.choice else [])]


def _beside(report: ServeReport, own: ServedAcceptance, reference: Reference | None) -> str:
    text = f"The server accepts {own.accepted} of {own.drafted} drafted tokens, {_both(own)}"
    if reference is not None:
        text += f"; our decoder with {reference.files} {_both(reference.acceptance)}"
        if reference.short.low > SMALLEST:
            text += f". It lacks {_shown(reference.short)} tokens per round"
        elif reference.short.high < -SMALLEST:
            text += f". It has {-reference.short.mean:.2f} tokens per round more"
        else:
            text += ": as predicted"
    if not math.isnan(report.predicted):
        text += f". The run measured {report.predicted:.1%} at this draft length"
    return text + "."


def _both(found: ServedAcceptance) -> str:
    return f"{_percent(found.rate)}, {_shown(found.tokens_per_round)} tokens per round"


def _explained(one: Difference) -> str:
    return (
        f"EXPLAINED: {one.what} is {one.found}, not {one.expected}: that costs {_shown(one.loss)} tokens per round. "
        f"To mend it, {one.advice}."
    )


def _unexplained(one: Difference) -> str:
    if math.isnan(one.loss.mean):
        return f"Not measured: {one.what} is {one.found}, not {one.expected}. If acceptance is low, {one.advice}."
    return f"No cause: {one.what} is {one.found}, not {one.expected}; it costs {_shown(one.loss)} tokens per round."


def _speed(report: ServeReport) -> str:
    rises = [one for one in report.speeds if not math.isnan(one.speedup.mean)]
    if not rises:
        return "Without a plain server beside it (--plain-url) no speedup was measured."
    parts = []
    for one in rises:
        bounds = "" if math.isnan(one.speedup.low) else f" [{one.speedup.low:.2f}, {one.speedup.high:.2f}]"
        parts.append(f"{one.speedup.mean:.2f}×{bounds} with {one.concurrency} at once")
    text = f"Speed over the plain server: {', '.join(parts)}."
    slower = [one for one in rises if one.speedup.mean < 1]
    if len(slower) == len(rises):
        return f"{text} The draft does not pay here."
    return f"{text} With many requests at once it does not pay." if slower and slower[0] is not rises[0] else text


# ── tables ──


def as_markdown(report: ServeReport) -> str:
    """The sentences, and tables of acceptance, speed, classes and settings."""
    parts = [
        f"{report.server}, build {report.build}: `{report.served}`. Greedy, {report.prompts} prompts × up to "
        f"{report.new_tokens} tokens, cold caches, servers in turn; intervals resample prompts.",
        "\n".join(f"- {sentence}" for sentence in report.sentences),
        _acceptance(report),
        _speeds(report),
    ]
    if report.classes:
        rows = [
            [one.name, str(one.prompts), _percent(one.rate), _shown(one.tokens_per_round), _shown(one.speedup)]
            for one in report.classes
        ]
        parts.append(markdown_table(["class", "prompts", "acceptance", "tokens per round", "speedup"], rows))
    if report.choice is not None:
        choice = report.choice
        rows = [
            [named((one.n_max, one.p_min)), f"{one.tokens_per_second:,.1f}", _shown(one.against)]
            for one in choice.confirmed
        ]
        parts += [
            f"{len(choice.tried)} settings were tried on validation prompts in {choice.seconds:.0f} s.",
            markdown_table(["settings, held-out prompts", "tokens/s", "speed of the chosen ones over these"], rows),
            f"```sh\n{choice.command}\n```",
        ]
    if report.left_out:
        parts.append("Left out: " + ", ".join(f"{count} {reason}" for reason, count in report.left_out.items()) + ".")
    parts += [*(f"Note: {line}." for line in report.notes), f"`{report.command}`"]
    return "\n\n".join(parts) + "\n"


def _acceptance(report: ServeReport) -> str:
    rows = [
        [
            one.source,
            f"{one.accepted} ÷ {one.drafted}",
            _percent(one.rate),
            _shown(one.tokens_per_round),
            ", ".join(f"{share:.2f}" for share in one.by_position or ()),
        ]
        for one in report.acceptance
    ]
    if not math.isnan(report.predicted):
        rows.append(["the run's own measurement", "", f"{report.predicted:.1%}", "", ""])
    positions = "rounds that accepted position 1, 2, …"
    return markdown_table(["counted by", "accepted ÷ drafted", "acceptance", "tokens per round", positions], rows)


def _speeds(report: ServeReport) -> str:
    rows = [
        [
            str(one.concurrency),
            one.configuration,
            f"{one.tokens_per_second:,.1f}",
            *(f"{seconds * 1e3:.1f}" for seconds in one.first_seconds),
            _shown(one.speedup),
        ]
        for one in report.speeds
    ]
    first = ["first token, ms (median)", "(90th percentile)"]
    return markdown_table(["requests at once", "configuration", "tokens/s", *first, "speedup"], rows)


def _shown(found: Interval) -> str:
    if math.isnan(found.mean):
        return ""
    return f"{found.mean:.2f}" if math.isnan(found.low) else f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}]"


def _percent(found: Interval) -> str:
    if math.isnan(found.mean):
        return ""
    return f"{found.mean:.1%}" if math.isnan(found.low) else f"{found.mean:.1%} [{found.low:.1%}, {found.high:.1%}]"


def flat_rows(report: ServeReport) -> list[dict[str, Any]]:
    """Every figure as a row with the same columns, for jsonl and csv."""
    found: list[tuple[str, str, int, str, Interval | float]] = []
    for one in report.acceptance:
        found.append(("acceptance", one.source, 1, "acceptance", one.rate))
        found.append(("acceptance", one.source, 1, "tokens per round", one.tokens_per_round))
    for speed in report.speeds:
        name, many = speed.configuration, speed.concurrency
        found.append(("speed", name, many, "tokens per second", speed.tokens_per_second))
        found.append(("speed", name, many, "first token, seconds", speed.first_seconds[0]))
        found.append(("speed", name, many, "speedup", speed.speedup))
    for one_class in report.classes:
        found.append(("class", one_class.name, 1, "acceptance", one_class.rate))
        found.append(("class", one_class.name, 1, "speedup", one_class.speedup))
    found += [("difference", one.what, 1, "tokens per round lost", one.loss) for one in report.differences]
    for settings in () if report.choice is None else report.choice.confirmed:
        name = named((settings.n_max, settings.p_min))
        found.append(("settings", name, 1, "tokens per second", settings.tokens_per_second))
        found.append(("settings", name, 1, "speed of the chosen over it", settings.against))
    return [_row(*figure) for figure in found]


def _row(kind: str, name: str, concurrency: int, metric: str, value: Interval | float) -> dict[str, Any]:
    found = value if isinstance(value, Interval) else Interval(value, math.nan, math.nan)
    values = {"mean": found.mean, "low": found.low, "high": found.high}
    known = {key: None if math.isnan(figure) else figure for key, figure in values.items()}
    return {"kind": kind, "name": name, "concurrency": concurrency, "metric": metric, **known}

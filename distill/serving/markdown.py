"""A check of a server as sentences, tables and rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distill.intervals import Interval
from distill.results.serving_results import Difference, ServedAcceptance, ServedSpeed, ServeReport
from distill.results.tables import markdown_table
from distill.serving.choose import settings_of
from distill.serving.differences import SMALLEST

LARGE = 0.5  # of a shortfall: differences that explain less leave something to look for


@dataclass(frozen=True)
class Reference:
    """Our decoder with `files` on the same prompts; `short` are the tokens per round that the server lacks."""

    files: str
    acceptance: ServedAcceptance
    short: Interval


# ── sentences ──


def sentences(report: ServeReport, reference: Reference | None) -> list[str]:
    """About acceptance, differences, the texts and the speed, in order of weight."""
    found = [_beside(report, report.acceptance[0], reference)]
    if not math.isnan(report.drawn.mean):
        found.append(
            f"At n_max {report.n_max}, drafts drawn from the draft (--spec-draft-sampling probabilistic) give "
            f"{shown(report.drawn)} tokens per round more than its best tokens."
        )
    found += [_difference(one) for one in sorted(report.differences, key=lambda one: not one.explains)]
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
    found.append(_speed(report))
    return [*found, *([report.choice.sentence] if report.choice else [])]


def _beside(report: ServeReport, own: ServedAcceptance, reference: Reference | None) -> str:
    text = f"The server accepts {own.accepted} of {own.drafted} drafted tokens, {_both(own)}"
    if reference is not None:
        text += f"; our decoder with {reference.files} {_both(reference.acceptance)}"
        if reference.short.low > SMALLEST:
            text += f". It lacks {shown(reference.short)} tokens per round"
        elif reference.short.high < -SMALLEST:
            text += f". It has {-reference.short.mean:.2f} tokens per round more"
        else:
            text += ": as predicted"
    if not math.isnan(report.predicted):
        text += f". The run measured {report.predicted:.1%} at this draft length"
    return text + "."


def _both(found: ServedAcceptance) -> str:
    return f"{shown(found.rate, '.1%')}, {shown(found.tokens_per_round)} tokens per round"


def _difference(one: Difference) -> str:
    what = f"{one.what} is {one.found}, not {one.expected}"
    if one.explains:
        return f"EXPLAINED: {what}: that costs {shown(one.loss)} tokens per round. To mend it, {one.advice}."
    if math.isnan(one.loss.mean):
        return f"Not measured: {what}. If acceptance is low, {one.advice}."
    return f"No cause: {what}; it costs {shown(one.loss)} tokens per round."


def _speed(report: ServeReport) -> str:
    rises = [one for one in report.speeds if not math.isnan(one.speedup.mean)]
    if not rises:
        return "Without a plain server beside it (--plain-url) no speedup was measured."
    text = f"Speed over the plain server: {', '.join(f'{shown(one.speedup)} with {_load(one)}' for one in rises)}."
    if any(one.speedup.mean >= 1 for one in rises):
        return text
    return f"{text} With n_max {report.n_max} the draft makes no load faster here."


# ── tables ──


def as_markdown(report: ServeReport) -> str:
    """The sentences, and tables of acceptance, speed, classes and settings."""
    parts = [
        f"{report.server}, build {report.build}: `{report.served}`. {_sampled(report)}, {report.prompts} prompts × "
        f"up to {report.new_tokens} tokens, cold caches, servers in turn; intervals resample prompts.",
        "\n".join(f"- {sentence}" for sentence in report.sentences),
        _acceptance(report),
        _speeds(report),
    ]
    if report.classes:
        rows = [
            [one.name, str(one.prompts), shown(one.rate, ".1%"), shown(one.tokens_per_round), shown(one.speedup)]
            for one in report.classes
        ]
        parts.append(markdown_table(["class", "prompts", "acceptance", "tokens per round", "speedup"], rows))
    if report.choice is not None:
        choice = report.choice
        rows = [
            [settings_of(one).title, f"{one.tokens_per_second:,.1f}", shown(one.against)] for one in choice.confirmed
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


def _sampled(report: ServeReport) -> str:
    sampler = report.sampler
    if not sampler["temperature"]:
        return "Greedy"
    off = {"top_k": 0, "top_p": 1, "min_p": 0}
    return ", ".join(f"{name} {value:g}" for name, value in sampler.items() if value != off.get(name))


def _acceptance(report: ServeReport) -> str:
    rows = [
        [
            one.source,
            f"{one.accepted} ÷ {one.drafted}",
            shown(one.rate, ".1%"),
            shown(one.tokens_per_round),
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
            _load(one),
            one.configuration,
            str(one.requests),
            f"{one.in_flight:.1f}",
            f"{one.requests_per_second:.3g}",
            f"{one.tokens_per_second:,.1f}",
            *(" / ".join(f"{one * 1e3:.1f}" for one in pair) for pair in (one.first_seconds, one.token_seconds)),
            shown(one.speedup),
        ]
        for one in report.speeds
    ]
    counts = ["load", "configuration", "requests", "in flight", "requests/s", "tokens/s"]
    return markdown_table([*counts, "first token, ms, p50 / p95", "per token, ms, p50 / p95", "speedup"], rows)


def _load(one: ServedSpeed) -> str:
    return f"{one.concurrency} at once" if one.concurrency else f"{one.offered:.3g} requests/s"


def shown(interval: Interval, form: str = ".2f") -> str:
    """A figure with its interval; empty where nothing was counted."""
    if math.isnan(interval.mean):
        return ""
    bounds = "" if math.isnan(interval.low) else f" [{interval.low:{form}}, {interval.high:{form}}]"
    return f"{interval.mean:{form}}{bounds}"


def flat_rows(report: ServeReport) -> list[dict[str, Any]]:
    """Every figure as a row with the same columns, for jsonl and csv."""
    rows: list[dict[str, Any]] = []

    def add(kind: str, name: str, figures: Mapping[str, Interval | float], concurrency: int = 1) -> None:
        for metric, figure in figures.items():
            values = vars(figure if isinstance(figure, Interval) else Interval(figure, math.nan, math.nan))
            known = {key: None if math.isnan(value) else value for key, value in values.items()}
            rows.append({"kind": kind, "name": name, "concurrency": concurrency, "metric": metric, **known})

    for own in report.acceptance:
        add("acceptance", own.source, {"acceptance": own.rate, "tokens per round": own.tokens_per_round})
    for speed in report.speeds:
        seconds = {
            f"{what}, seconds, {statistic}": value
            for what, pair in (("first token", speed.first_seconds), ("per token", speed.token_seconds))
            for statistic, value in zip(("median", "95th percentile"), pair, strict=True)
        }
        figures: dict[str, Interval | float] = {
            "requests": speed.requests,
            "requests per second": speed.requests_per_second,
            "tokens per second": speed.tokens_per_second,
            **seconds,
            "speedup": speed.speedup,
        }
        name = speed.configuration + ("" if speed.concurrency else f", {_load(speed)}")
        add("speed", name, figures, speed.concurrency)
    for prompts in report.classes:
        add("class", prompts.name, {"acceptance": prompts.rate, "speedup": prompts.speedup})
    for difference in report.differences:
        add("difference", difference.what, {"tokens per round lost": difference.loss})
    for settings in [] if report.choice is None else report.choice.confirmed:
        figures = {"tokens per second": settings.tokens_per_second, "speed of the chosen over it": settings.against}
        add("settings", settings_of(settings).title, figures)
    return rows

"""A check of a server as markdown, and its figures as rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from distill.intervals import Interval
from distill.results.serving_results import ServeReport
from distill.serving.choose import named


def as_markdown(report: ServeReport) -> str:
    """Tables of acceptance, speed, classes and settings, and the sentences about them."""
    parts = [
        f"{report.server}, build {report.build}: `{report.served}`. Greedy, {report.prompts} prompts × up to "
        f"{report.new_tokens} tokens, cold caches, servers in turn; intervals resample prompts.",
        *[f"- {sentence}" for sentence in report.sentences],
        _acceptance(report),
        _speeds(report),
    ]
    if report.classes:
        rows = [
            [one.name, str(one.prompts), _percent(one.rate), _shown(one.tokens_per_round), _shown(one.speedup)]
            for one in report.classes
        ]
        parts.append(_table(["class", "prompts", "acceptance", "tokens per round", "speedup"], rows))
    if report.choice is not None:
        parts.append(_settings(report))
    if report.left_out:
        parts.append("Left out: " + ", ".join(f"{count} {reason}" for reason, count in report.left_out.items()) + ".")
    parts += [f"Note: {line}." for line in report.notes]
    parts.append(f"`{report.command}`")
    # Sentences are one list; all else are paragraphs.
    text = "\n\n".join(parts)
    return text.replace("\n\n- ", "\n- ").replace(".\n- ", ".\n\n- ", 1) + "\n"


def _acceptance(report: ServeReport) -> str:
    rows = [
        [
            one.source,
            f"{one.accepted} ÷ {one.drafted}",
            _percent(one.rate),
            _shown(one.tokens_per_round),
            "" if one.by_position is None else ", ".join(f"{share:.2f}" for share in one.by_position),
        ]
        for one in report.acceptance
    ]
    if not math.isnan(report.predicted):
        rows.append(["the run's own measurement", "", f"{report.predicted:.1%}", "", ""])
    heads = [
        "counted by",
        "accepted ÷ drafted",
        "acceptance",
        "tokens per round",
        "rounds that accepted position 1, 2, …",
    ]
    return _table(heads, rows)


def _speeds(report: ServeReport) -> str:
    rows = [
        [
            str(one.concurrency),
            one.configuration,
            f"{one.tokens_per_second:,.1f}",
            f"{one.first_seconds[0] * 1e3:.1f}",
            f"{one.first_seconds[1] * 1e3:.1f}",
            _shown(one.speedup),
        ]
        for one in report.speeds
    ]
    heads = [
        "requests at once",
        "configuration",
        "tokens/s",
        "first token, ms (median)",
        "(90th percentile)",
        "speedup",
    ]
    return _table(heads, rows)


def _settings(report: ServeReport) -> str:
    assert report.choice is not None
    choice = report.choice
    rows = [
        [named((one.n_max, one.p_min)), f"{one.tokens_per_second:,.1f}", _shown(one.against)]
        for one in choice.confirmed
    ]
    heads = ["settings, held-out prompts", "tokens/s", "speed of the chosen ones over these"]
    tried = len(choice.tried)
    return (
        f"{tried} settings were tried on validation prompts in {choice.seconds:.0f} s.\n\n{_table(heads, rows)}\n\n"
        f"```sh\n{choice.command}\n```"
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _shown(found: Interval) -> str:
    if math.isnan(found.mean):
        return ""
    return f"{found.mean:.2f}" if math.isnan(found.low) else f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}]"


def _percent(found: Interval) -> str:
    if math.isnan(found.low) and not math.isnan(found.mean):
        return f"{found.mean:.1%}"
    return "" if math.isnan(found.mean) else f"{found.mean:.1%} [{found.low:.1%}, {found.high:.1%}]"


def flat_rows(report: ServeReport) -> list[dict[str, Any]]:
    """Every figure as a row with the same columns, for jsonl and csv."""

    def row(kind: str, name: str, concurrency: int | None, metric: str, found: Interval) -> dict[str, Any]:
        values = {"mean": found.mean, "low": found.low, "high": found.high}
        known = {key: None if math.isnan(value) else value for key, value in values.items()}
        return {"kind": kind, "name": name, "concurrency": concurrency, "metric": metric, **known}

    def exact(value: float) -> Interval:
        return Interval(value, math.nan, math.nan)

    rows = []
    for one in report.acceptance:
        rows.append(row("acceptance", one.source, 1, "acceptance", one.rate))
        rows.append(row("acceptance", one.source, 1, "tokens per round", one.tokens_per_round))
    for speed in report.speeds:
        name, many = speed.configuration, speed.concurrency
        rows.append(row("speed", name, many, "tokens per second", exact(speed.tokens_per_second)))
        rows.append(row("speed", name, many, "first token, seconds", exact(speed.first_seconds[0])))
        rows.append(row("speed", name, many, "speedup", speed.speedup))
    for one_class in report.classes:
        rows.append(row("class", one_class.name, 1, "acceptance", one_class.rate))
        rows.append(row("class", one_class.name, 1, "speedup", one_class.speedup))
    rows += [row("difference", one.what, 1, "tokens per round lost", one.loss) for one in report.differences]
    for settings in () if report.choice is None else report.choice.confirmed:
        name = named((settings.n_max, settings.p_min))
        rows.append(row("settings", name, 1, "tokens per second", exact(settings.tokens_per_second)))
        rows.append(row("settings", name, 1, "speed of the chosen over it", settings.against))
    return rows

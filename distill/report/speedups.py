"""The section on speedups: the sweep of draft lengths, then all other configurations."""

from __future__ import annotations

from collections.abc import Sequence

from distill.report import plots
from distill.report.html import Html, as_bad, as_plot, as_plots, as_table, as_text, badged
from distill.report.text import number, percent, speedup_interval
from distill.results.speedup_results import Measurement, SpeedupReport


def speedup(report: SpeedupReport) -> Html:
    """Speculative beside plain decoding by draft length, then the other configurations."""
    sweep, best = report.sweep, report.fastest
    words = "measured with intervals, predicted dashed; 1 is plain decoding of the same target."
    drawn = [_plot(sweep, backend, words) for backend in dict.fromkeys(one.backend for one in sweep)]
    rows = [_sweep_row(one, one.pair in report.grown_pairs) for one in sweep]
    classes = ["plain" if one.is_plain else "best" if any(one is other for other in best) else "" for one in sweep]
    heads = [
        "pair",
        "backend",
        "γ",
        "speedup",
        "predicted",
        "tokens/s",
        "tokens per round",
        "acceptance",
        "tokens",
        "seconds",
        "identical",
        "excused",
        "different",
    ]
    note = (
        f"{number(report.prompts)} prompts, up to {number(report.new_tokens)} new tokens each. The fastest row of each "
        "pair is bold. The last three columns compare each text with that of the plain run: excused texts diverge at "
        "a rounding tie."
    )
    table = as_table(heads, rows, report.command, 2, classes)
    return Html(as_plots(*drawn) + f"<p>{as_text(note)}</p>" + table + _others(report))


def _plot(sweep: Sequence[Measurement], backend: str, words: str) -> Html:
    return as_plot(lambda: plots.speedup_by_length(sweep, backend), f"{backend}: {words}")


def _sweep_row(one: Measurement, grown: bool) -> list[object]:
    return [
        badged(one.pair, grown),
        one.backend,
        one.length or "plain",
        speedup_interval(one),
        f"{number(one.predicted)}×" if one.predicted is not None else number(None),
        number(one.tokens_per_second),
        number(one.tokens_per_round),
        percent(one.acceptance),
        number(one.tokens),
        number(one.seconds),
        number(one.identical),
        number(one.excused),
        as_bad(one.different) if one.different else "0",
    ]


def _others(report: SpeedupReport) -> Html:
    """Every configuration beside the sweep; lossy ones are red, with the reason."""
    if not report.others:
        return Html("")
    heads = [
        "pair",
        "backend",
        "configuration",
        "speedup",
        "plain, tokens/s",
        "tokens/s",
        "tokens per round",
        "acceptance",
        "identical",
        "excused",
        "different",
        "distribution",
    ]
    words = (
        "Other configurations, interleaved with the draft lengths above, each beside the plain run of the same "
        "sampler. The distribution is the one that the text follows. Sampled texts differ by chance, so none is "
        "compared with the plain text."
    )
    rows = [_other_row(one, one.pair in report.grown_pairs) for one in report.others]
    return Html(f"<p>{as_text(words)}</p>" + as_table(heads, rows, report.command, 3))


def _other_row(one: Measurement, grown: bool) -> list[object]:
    return [
        badged(one.pair, grown),
        one.backend,
        one.configuration,
        "plain" if one.is_plain else speedup_interval(one),
        number(one.plain_tokens_per_second),
        number(one.tokens_per_second),
        number(one.tokens_per_round),
        percent(one.acceptance),
        number(one.identical),
        number(one.excused),
        number(one.different),
        as_bad(one.distribution) if one.lossy else one.distribution,
    ]

"""The sections on what was measured: acceptance, divergence, cost, plain decoding, files and samples."""

from __future__ import annotations

import math

from distill.intervals import Interval
from distill.recipe.recipe import REASON
from distill.report import plots
from distill.report.html import Html, as_bad, as_code, as_list, as_plot, as_plots, as_table, as_text, badged
from distill.report.text import (
    NOTHING,
    interval,
    is_grown,
    known,
    number,
    percent,
    placeless,
    significant,
    size,
)
from distill.results.evaluation_results import (
    CEILING,
    FEW_PROMPTS,
    MEASURES,
    RATES,
    SAMPLED,
    SAMPLED_MEANS,
    SIDES,
    Bounds,
    ClassResult,
    Divergences,
    EvaluationReport,
    StoredMeasures,
)
from distill.results.export_results import ExportedFile, ExportReport
from distill.results.profile_results import MeasuredCurve, ProfileReport
from distill.results.speedup_results import Sample, SpeedupReport


def positions(evaluation: EvaluationReport) -> Html:
    """Acceptance of the trained draft by position."""
    rows = evaluation.positions.get("after", [])
    if not rows and evaluation.stored is not None:
        return Html(f'<p class="notrun">No rounds were decoded: {as_text(REASON)}.</p>')
    if not rows:
        return Html('<p class="notrun">No acceptance by position was measured (<code>eval --acceptance</code>).</p>')
    plot = as_plot(
        lambda: plots.acceptance_by_position(rows),
        "The share accepted of the tokens drafted at each position; bars are intervals. A token behind a rejected "
        "one was never reached and is not counted.",
    )
    table = as_table(
        ["position", "drafted", "accepted", "rate"],
        [[row.position, number(row.drafted), number(row.accepted), interval(row.rate, rate=True)] for row in rows],
        evaluation.command,
    )
    return Html(as_plots(plot) + table)


def divergence(evaluation: EvaluationReport) -> Html:
    """Every measure by domain, before and after the training."""
    settings = as_text(evaluation.sampler_words)
    parts = [f"<p>Before is the draft as cut from the donor, after is the trained draft; {settings}.</p>"]
    if evaluation.stored is not None:
        parts.append(as_list(evaluation.stored.sentences))
    for domain, drafts in evaluation.domains.items():
        before, after = (drafts.get(side) for side in SIDES)
        rows = [_measure_row(name, before, after) for name in MEASURES if name != CEILING]
        counts = [
            f"{number(side and side.tokens)} tokens, {number(side and side.prompts)} prompts"
            for side in (before, after)
        ]
        rows.append(["measured on", *counts, ""])
        table = as_table(["", "before", "after", "change"], rows, evaluation.command)
        parts += [f"<h3>{as_text(domain)}</h3>", table]
    if evaluation.stored is not None:
        parts.append(_stored(evaluation.stored, evaluation.command))
    return Html("".join(parts) + _classes(evaluation))


def _stored(stored: StoredMeasures, command: str) -> Html:
    """The bounds that the store gives for each mean, and what the sampled answers show."""
    parts = []
    for domain, drafts in stored.bounds.items():
        rows = [
            [MEASURES[name], *(_bounds(drafts.get(side, {}).get(name), name in RATES) for side in SIDES)]
            for name in MEASURES
            if name != CEILING
        ]
        table = as_table(["bounds of the means", "before", "after"], rows, command)
        parts.append(f"<h3>{as_text(domain)}, bounds</h3>{table}")
    row = [SAMPLED, *(interval(stored.sampled.get(side), rate=True) for side in SIDES)]
    table = as_table(["", "before", "after"], [row], command)
    return Html("".join(parts) + f"<h3>sampled answers</h3><p>{as_text(SAMPLED_MEANS)}</p>{table}")


def _bounds(found: Bounds | None, rate: bool) -> str:
    if found is None or not known(found.least):
        return NOTHING
    form = percent if rate else significant
    return f"{form(found.least)} to {form(found.most)}"


def _classes(evaluation: EvaluationReport) -> Html:
    """Acceptance and tokens per round by class of prompt; nothing where there is one class."""
    if not evaluation.classes:
        return Html("")
    measure = MEASURES[evaluation.acceptance_measure]
    rows = [
        [
            one.name or NOTHING,
            number(one.prompts),
            number(one.tokens),
            *(_of_class(one, one.acceptance.get(side), rate=True) for side in SIDES),
            _of_class(one, one.tokens_per_round.get("after")),
        ]
        for one in evaluation.classes
    ]
    heads = ["class of prompt", "prompts", "tokens", "before", "after", "tokens per round after"]
    table = as_table(heads, rows, evaluation.command)
    return Html(f"<h3>by class of prompt</h3><p>{as_text(measure)}, on the target's own text.</p>{table}")


def _of_class(one: ClassResult, found: Interval | None, rate: bool = False) -> str:
    """A figure of a class; without its interval where the class has too few prompts for one."""
    if found is not None and one.prompts < FEW_PROMPTS:
        found = Interval(found.mean, math.nan, math.nan)
    return interval(found, rate)


def _measure_row(name: str, before: Divergences | None, after: Divergences | None) -> list[object]:
    first, last = (side.measure(name) if side else None for side in (before, after))
    change, rate = NOTHING, name in RATES
    if first and last and known(first.mean) and known(last.mean):
        rise = last.mean - first.mean
        change = f"{100 * rise:+.1f} points" if rate else f"{rise:+.3f}"
    return [MEASURES[name], interval(first, rate), interval(last, rate), change]


def cost(profile: ProfileReport) -> Html:
    """The measured cost curves of every model."""
    curves = profile.curves
    drawn = [plot for backend in dict.fromkeys(curve.backend for curve in curves) for plot in _plots(curves, backend)]
    counts = sorted({count for curve in curves for count in curve.tokens})
    table = as_table(
        ["model", "backend", "dtype", "depth", "repeats", *(f"T({count}), ms" for count in counts)],
        [_curve_row(curve, counts) for curve in curves],
        profile.command,
        words=3,
    )
    doubts = [
        f"{curve.model}, {curve.backend}: {curve.doubt} (distill train RECIPE --redo profile)."
        for curve in curves
        if curve.doubt
    ]
    return Html(as_plots(*drawn) + table + (as_list(doubts) if doubts else ""))


def _plots(curves: list[MeasuredCurve], backend: str) -> list[Html]:
    return [
        as_plot(
            lambda: plots.cost_curves(curves, backend),
            f"{backend}: time of one step of m tokens; the band spans the interval of the repeats.",
        ),
        as_plot(
            lambda: plots.cost_curves(curves, backend, relative=True),
            f"{backend}: the same relative to one token. The flatter the curve, the more drafting pays.",
        ),
    ]


def _curve_row(curve: MeasuredCurve, counts: list[int]) -> list[object]:
    at = {
        count: _milliseconds(*seconds)
        for count, *seconds in zip(curve.tokens, curve.seconds, curve.low, curve.high, strict=True)
    }
    return [
        badged(curve.model, is_grown(curve.model, set())),
        curve.backend,
        curve.dtype,
        number(curve.depth),
        number(curve.repeats),
        *(at.get(count, NOTHING) for count in counts),
    ]


def _milliseconds(middle: float, low: float, high: float) -> Html:
    return Html(f"{significant(1e3 * middle)}<br><small>[{significant(1e3 * low)}, {significant(1e3 * high)}]</small>")


def plain(speedup: SpeedupReport) -> Html:
    """The plain decoder beside the library's own generation."""
    rows = [
        [
            badged(line.pair, line.pair in speedup.grown_pairs),
            line.backend,
            line.library,
            number(line.library_tokens_per_second),
            number(line.plain_tokens_per_second),
            percent(line.ratio),
        ]
        for line in speedup.plain_references
    ]
    heads = ["pair", "backend", "library", "library, tokens/s", "plain, tokens/s", "ratio"]
    return Html(
        "<p>A speedup means something only beside a plain decoder that is itself fast: the plain run should be "
        "within 5 % of the library's own generation.</p>" + as_table(heads, rows, speedup.command, words=3)
    )


def explanations(speedup: SpeedupReport) -> Html:
    """The measured causes of the speedups, in sentences."""
    sentences = speedup.explanations
    return as_list(sentences) if sentences else Html('<p class="notrun">No explanation was recorded.</p>')


def gguf(export: ExportReport) -> Html:
    """The files, and how closely llama.cpp reproduces their models' distributions and tokens."""
    heads = [
        "file",
        "model",
        "type",
        "bytes",
        "positions",
        MEASURES["top1_agreement"],
        "mean |Δ log p|",
        "max |Δ log p|",
        "tokenizer texts",
        "mismatches",
    ]
    listed = "".join(
        f"<li><code>{as_text(file.path)}: text {text}, first different token {token}</code></li>"
        for file in export.files
        for text, token in (file.parity.tokenizer_mismatches if file.parity else [])
    )
    details = f"<details><summary>Tokenizer mismatches</summary><ul>{listed}</ul></details>" if listed else ""
    return Html(
        "<p>Each file in llama.cpp against its Hugging Face model on the same positions.</p>"
        + as_table(heads, [_file_row(file) for file in export.files], export.command, words=3)
        + details
    )


def _file_row(file: ExportedFile) -> list[object]:
    cells: list[object] = [
        as_code(file.path),
        badged(file.model, is_grown(file.model, set())),
        file.outtype,
        Html(f"{number(file.bytes)} <small>{size(file.bytes)}</small>"),
    ]
    parity = file.parity
    if parity is None:
        return cells + [NOTHING] * 6
    wrong = len(parity.tokenizer_mismatches)
    return [
        *cells,
        number(parity.positions),
        percent(parity.top1_agreement),
        significant(parity.mean_abs_dlogprob),
        significant(parity.max_abs_dlogprob),
        number(parity.tokenizer_texts),
        as_bad(wrong) if wrong else "0",
    ]


def samples(speedup: SpeedupReport) -> Html:
    """Decoded texts, with the draft's tokens marked."""
    if not speedup.samples:
        return Html('<p class="notrun">No samples were kept.</p>')
    legend = (
        "<p><mark>Marked and underlined</mark>: drafted and accepted. Unmarked: the target's own. Pale: the prompt.</p>"
    )
    parts = [_sample(sample, is_grown(sample.pair, speedup.grown_pairs)) for sample in speedup.samples]
    return Html(legend + "".join(parts) + f'<p class="command">{as_text(placeless(speedup.command))}</p>')


def _sample(sample: Sample, grown: bool) -> str:
    accepted = sum(len(part.text) for part in sample.segments if part.kind == "accepted")
    written = sum(len(part.text) for part in sample.segments)
    text = "".join(
        f"<mark>{as_text(part.text)}</mark>" if part.kind == "accepted" else as_text(part.text)
        for part in sample.segments
    )
    share = f", {percent(accepted / written)} of the characters from the draft" if written else ", nothing written"
    return (
        f"<h3>{badged(sample.pair, grown)}</h3>"
        f'<p class="soft">{as_text(sample.backend)}{share}</p>'
        f'<pre><span class="prompt">{as_text(sample.prompt)}</span>{text}</pre>'
    )

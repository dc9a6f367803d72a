"""The report of a run as one HTML page that needs no other file: no network, no scripts, no fonts."""

from __future__ import annotations

import json
from collections.abc import Callable
from html import escape
from typing import TypeVar

from distill.report import draft_tables, sections
from distill.report.html import (
    Html,
    as_code,
    as_command,
    as_details,
    as_list,
    as_paragraph,
    as_table,
    as_text,
    not_run,
)
from distill.report.limits import limits
from distill.report.style import CSS
from distill.report.usage import PLACES, uses
from distill.results.evaluation_results import MEASURES, SIDES, EvaluationReport
from distill.results.run_results import RunResults
from distill.results.speedup_results import FASTER, SLOWER, UNCLEAR, Measurement, SpeedupReport
from distill.results.speedup_tables import speedup_of
from distill.results.training_results import REMEDY
from distill.tables import number, percent, shown

Report = TypeVar("Report")

LEVEL = {FASTER: "good", SLOWER: "bad", UNCLEAR: "flat"}


def build_page(results: RunResults) -> str:
    """The whole page. Raises nothing for stages that have not run: each leaves one line that names it."""

    def of(stage: str, report: Report | None, draw: Callable[[Report], Html]) -> Html:
        return not_run(stage, results.left_out.get(stage)) if report is None else draw(report)

    evaluation, measured = results.evaluation, results.speedup
    parts: list[tuple[str, str, Html]] = [
        ("numbers", "In short", _headlines(results)),
        ("use", "How to use it", _use(results)),
        ("made", "Models", _made(results)),
        *([("texts", "Texts", sections.texts(results))] if results.corpus else []),
        *([("cuts", "From donor to draft", sections.cuts(results))] if results.cuts else []),
        ("training", "Training", sections.training(results)),
        *([("sparsity", "Sparsity", sections.sparsity(results))] if results.sparsity else []),
        ("positions", "Acceptance by position", of("eval", evaluation, sections.positions)),
        ("divergence", "Divergence and acceptance", of("eval", evaluation, sections.divergence)),
        ("cost", "Cost of a step", of("speedup", measured, sections.cost)),
        ("speedup", "Speedup", of("speedup", measured, sections.speedup)),
        ("gguf", "GGUF files and parity", of("export", results.export, sections.gguf)),
        ("samples", "Generated samples", of("speedup", measured, sections.samples)),
        ("limits", "Limits", as_list(limits(results))),
    ]
    links = " ".join(f'<a href="#{key}">{escape(title)}</a>' for key, title, _ in parts)
    body = "\n".join(f'<section id="{key}"><h2>{escape(title)}</h2>{inner}</section>' for key, title, inner in parts)
    name = as_text(results.name)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{name} · distill report</title>
<style>{CSS}</style>
</head>
<body>
<header><h1>{name}</h1><p class="soft">Draft model for speculative decoding, {as_text(results.date)}</p>
<nav aria-label="Sections">{links}</nav></header>
<main>
{body}
</main>
<footer><p>Made by <code>distill report</code>. Brackets hold intervals; a dash means not measured.</p></footer>
</body>
</html>
"""


def _made(results: RunResults) -> Html:
    """The models with their sizes, the run that made the draft, and the resolved recipe."""
    machine = results.machine
    listed = {
        "recipe": as_text(results.config.get("name") or results.name),
        "date": as_text(results.date),
        "command": as_code(results.command),
        "machine": as_text(f"{results.machine_words}, {machine['platform']}"),
        "GPU": as_text(machine["gpu"] or "none"),
        "software": as_text(results.software_words),
    }
    if parent := results.parent:
        words = f"{parent.generation}, started from the draft of {parent.run}, digest {parent.digest}"
        listed["generation"] = as_text(words)
    terms = "".join(f"<dt>{word}</dt><dd>{value}</dd>" for word, value in listed.items())
    config = json.dumps(results.config, indent=2, ensure_ascii=False, default=str)
    recipe = as_details("Resolved recipe", f"<pre>{as_text(config)}</pre>")
    return Html(as_table(draft_tables.models(results)) + f"<dl>{terms}</dl>" + recipe)


def _use(results: RunResults) -> Html:
    """A command for each server or library, and whether it pays."""
    parts = []
    for one in uses(results):
        parts += [f"<h3>{as_text(one.name)}</h3>", as_paragraph(one.verdict), f"<pre>{as_text(one.text)}</pre>"]
        parts += map(as_paragraph, one.notes)
    return Html("".join([*parts, as_paragraph(PLACES)]))


def _headlines(results: RunResults) -> Html:
    """The best speedups, those of a GGUF target as it is served first, and the acceptance of every domain, as cards."""
    measured, evaluation = results.speedup, results.evaluation
    served = "gguf" if results.target.path.endswith(".gguf") else ""
    cards = (
        [_speedup_card(measured, one) for one in sorted(measured.best, key=lambda one: one.backend != served)]
        if measured
        else []
    )
    cards += [_acceptance_card(evaluation, domain) for domain in evaluation.domains] if evaluation else []
    commands = dict.fromkeys(one.command for one in (measured, evaluation) if one)
    warning = results.training.warning if results.training else None
    missing = [name for name, one in (("speedup", measured), ("eval", evaluation)) if one is None]
    drawn = f'<div class="cards">{"".join(cards)}</div>' if cards else ""
    return Html(
        as_paragraph(_draft(results))
        + drawn
        + as_list([f"{warning} What to do: {REMEDY}."] if warning else [])
        + as_list(measured.explanations if measured else [])
        + "".join(map(as_command, commands))
        + "".join(not_run(name, results.left_out.get(name)) for name in missing)
    )


def _draft(results: RunResults) -> str:
    """The draft in one sentence: its size, what it was cut from, and for which target."""
    draft, donor, target = results.draft, results.donor, results.target
    sentence = f"A draft of {draft.parameters / 1e6:,.1f} million parameters"
    if donor is not None:
        same = donor.path == target.path
        kept = f"{draft.layers} of {donor.layers} layers" if draft.layers != donor.layers else "all layers"
        sentence += f", {kept} of {'the target' if same else donor.path},"
    return f"{sentence} for {target.path}."


def _speedup_card(report: SpeedupReport, one: Measurement) -> str:
    speedup, _, bounds = shown(speedup_of(one), "×").partition(" ")
    tried = sum(other.key == one.key for other in report.rivals)
    return (
        f'<div class="card"><div class="name">{as_text(one.pair)}</div>'
        f'<div class="figure">{speedup}{f" <small>{bounds}</small>" if bounds else ""}</div>'
        f'<p class="{LEVEL[one.verdict]}">{one.verdict}</p><p class="soft">fastest of the '
        f"{tried} ways tried, {as_text(one.configuration)}, {as_text(one.backend)}; "
        f"{number(one.plain_tokens_per_second, 1)} → {number(one.tokens_per_second, 1)} tokens/s</p></div>"
    )


def _acceptance_card(evaluation: EvaluationReport, domain: str) -> str:
    measure = evaluation.acceptance_measure
    sides = [evaluation.domains[domain].get(side) for side in SIDES]
    first, last = (side.measure(measure) if side else None for side in sides)
    after = sides[1]
    return (
        f'<div class="card"><div class="name">Acceptance, {as_text(domain)}</div>'
        f'<div class="figure"><small>{percent(first and first.mean)} →</small> {percent(last and last.mean)}</div>'
        f'<p class="soft">before: {shown(first, "%")}<br>after: {shown(last, "%")}</p>'
        f'<p class="soft">{as_text(MEASURES[measure].partition(", ")[2])}; {number(after and after.tokens)} tokens of '
        f"{number(after and after.prompts)} prompts</p></div>"
    )

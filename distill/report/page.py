"""The report of a run as one HTML page that needs no other file: no network, no scripts, no fonts."""

from __future__ import annotations

import json
from collections.abc import Callable
from html import escape
from typing import TypeVar

from distill.report import making, measured
from distill.report.html import Html, as_code, as_list, as_table, as_text, badged, not_run
from distill.report.limits import limits
from distill.report.speedups import speedup
from distill.report.style import CSS
from distill.report.text import (
    interval,
    machine_words,
    number,
    percent,
    placeless,
    size,
    software_words,
    speedup_bounds,
)
from distill.report.texts_read import texts
from distill.results.cut_results import ModelSizes
from distill.results.evaluation_results import MEASURES, SIDES, Divergences, EvaluationReport
from distill.results.run_results import RunResults
from distill.results.speedup_results import FASTER, SLOWER, UNCLEAR, Measurement, SpeedupReport

Report = TypeVar("Report")

LEVEL = {FASTER: "good", SLOWER: "bad", UNCLEAR: "flat"}
SIZES: dict[str, Callable[[ModelSizes], int]] = {
    "parameters": lambda model: model.parameters,
    "layers": lambda model: model.layers,
    "hidden width": lambda model: model.hidden,
    "MLP width": lambda model: model.mlp,
    "vocabulary": lambda model: model.vocabulary,
    "bytes": lambda model: model.bytes,
}


def build_page(results: RunResults) -> str:
    """The whole page. Raises nothing for stages that have not run: each leaves one line that names it."""
    sections: list[tuple[str, str, Html]] = [
        ("numbers", "In short", _headlines(results)),
        ("made", "Models", _made(results)),
        *([("texts", "Texts", texts(results))] if results.corpus else []),
        *([("cuts", "From donor to draft", making.cuts(results))] if results.cuts else []),
        ("training", "Training", making.training(results)),
        *([("sparsity", "Sparsity", making.sparsity(results))] if results.sparsity else []),
        ("positions", "Acceptance by position", _stage(results, "eval", results.evaluation, measured.positions)),
        ("divergence", "Divergence and acceptance", _stage(results, "eval", results.evaluation, measured.divergence)),
        ("cost", "Cost curves", _stage(results, "profile", results.profile, measured.cost)),
        ("speedup", "Speedup", _stage(results, "speedup", results.speedup, speedup)),
        (
            "plain",
            "The plain decoder beside the library's own",
            _stage(results, "speedup", results.speedup, measured.plain),
        ),
        ("why", "Why these speedups", _stage(results, "speedup", results.speedup, measured.explanations)),
        ("gguf", "GGUF files and parity", _stage(results, "export", results.export, measured.gguf)),
        ("samples", "Generated samples", _stage(results, "speedup", results.speedup, measured.samples)),
        ("limits", "Limits", as_list(limits(results))),
    ]
    links = " ".join(f'<a href="#{key}">{escape(title)}</a>' for key, title, _ in sections)
    body = "\n".join(f'<section id="{key}"><h2>{escape(title)}</h2>{inner}</section>' for key, title, inner in sections)
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


def _stage(results: RunResults, name: str, report: Report | None, draw: Callable[[Report], Html]) -> Html:
    """A section drawn from a stage's results, or one line if the stage has not run."""
    return not_run(name, results.left_out.get(name)) if report is None else draw(report)


def _made(results: RunResults) -> Html:
    """The models with their sizes, the run that made the draft, and the resolved recipe."""
    machine = results.machine
    listed = {
        "recipe": as_text(results.config.get("name") or results.name),
        "date": as_text(results.date),
        "command": as_code(results.command),
        "machine": as_text(f"{machine_words(machine)}, {machine.platform}"),
        "GPU": as_text(machine.gpu or "none"),
        "software": as_text(software_words(machine)),
    }
    if parent := results.parent:
        words = f"{parent.generation}, started from the draft of {parent.run}, digest {parent.digest}"
        listed["generation"] = as_text(words)
    terms = "".join(f"<dt>{word}</dt><dd>{value}</dd>" for word, value in listed.items())
    config = json.dumps(results.config, indent=2, ensure_ascii=False, default=str)
    return Html(
        _models(results) + f"<dl>{terms}</dl>"
        f"<details><summary>Resolved recipe</summary><pre>{as_text(config)}</pre></details>"
    )


def _models(results: RunResults) -> Html:
    """Target, donor and draft side by side, and how the draft differs from its donor."""
    found = {"target": results.target, "donor (before)": results.donor, "draft (after)": results.draft}
    models = {title: model for title, model in found.items() if model is not None}
    rows: list[list[object]] = [
        ["path", *(as_code(model.path) for model in models.values())],
        ["architecture", *(model.architecture for model in models.values())],
    ]
    for label, figure in SIZES.items():
        rows.append([label, *(_size_cell(label, figure(model)) for model in models.values())])
    heads = ["", *models]
    if results.donor:
        before, after = results.donor, results.draft
        heads.append("donor → draft")
        changes = ["", "same" if before.architecture == after.architecture else "changed"]
        changes += [_change(figure(before), figure(after)) for figure in SIZES.values()]
        rows = [[*row, change] for row, change in zip(rows, changes, strict=True)]
    return as_table(heads, rows, results.command)


def _size_cell(label: str, value: int) -> object:
    return Html(f"{number(value)} <small>{size(value)}</small>") if label == "bytes" else number(value)


def _change(before: int, after: int) -> str:
    return percent(after / before - 1) if before and after != before else "same"


def _headlines(results: RunResults) -> Html:
    """The best speedups and the acceptance of every domain, as cards."""
    cards, commands, missing = [], [], []
    if results.speedup:
        cards += [_speedup_card(results.speedup, one) for one in results.speedup.best]
        commands.append(results.speedup.command)
    else:
        missing.append("speedup")
    if results.evaluation:
        cards += [_acceptance_card(results.evaluation, domain) for domain in results.evaluation.domains]
        commands.append(results.evaluation.command)
    else:
        missing.append("eval")
    shown = f'<div class="cards">{"".join(cards)}</div>' if cards else ""
    listed = "".join(f'<p class="command">{as_text(placeless(command))}</p>' for command in dict.fromkeys(commands))
    return Html(shown + listed + "".join(not_run(name, results.left_out.get(name)) for name in missing))


def _speedup_card(report: SpeedupReport, one: Measurement) -> str:
    plain = report.plain_beside(one)
    rates = f"{number(plain.tokens_per_second, 1)} → " if plain else ""
    bounds = speedup_bounds(one)
    tried = sum((other.pair, other.backend) == (one.pair, one.backend) for other in report.rivals)
    return (
        f'<div class="card"><div class="name">{badged(one.pair, one.pair in report.grown_pairs)}</div>'
        f'<div class="figure">{one.speedup:.2f}×{f" <small>{bounds.strip()}</small>" if bounds else ""}</div>'
        f'<p class="{LEVEL[one.verdict]}">{one.verdict}</p><p class="soft">fastest of the '
        f"{tried} ways tried, {as_text(one.configuration)}, {as_text(one.backend)}; "
        f"{rates}{number(one.tokens_per_second, 1)} tokens/s</p></div>"
    )


def _acceptance_card(evaluation: EvaluationReport, domain: str) -> str:
    measure = evaluation.acceptance_measure
    sides: list[Divergences | None] = [evaluation.domains[domain].get(side) for side in SIDES]
    first, last = (side.measure(measure) if side else None for side in sides)
    after = sides[1]
    return (
        f'<div class="card"><div class="name">Acceptance, {as_text(domain)}</div>'
        f'<div class="figure"><small>{percent(first and first.mean)} →</small> {percent(last and last.mean)}</div>'
        f'<p class="soft">before: {interval(first, True)}<br>after: {interval(last, True)}</p>'
        f'<p class="soft">{as_text(MEASURES[measure].partition(", ")[2])}; {number(after and after.tokens)} tokens of '
        f"{number(after and after.prompts)} prompts</p></div>"
    )

"""The report of a run as one HTML page that needs nothing beside it: no network, no scripts, no fonts."""

from __future__ import annotations

import json
from collections.abc import Callable
from html import escape

from distill.report import making, measurements
from distill.report.html import Html, as_code, as_list, as_table, as_text, badged, not_run
from distill.report.style import CSS
from distill.report.text import (
    MEASURES,
    Results,
    acceptance_measure,
    best_rows,
    grown_pairs,
    interval,
    known,
    limits,
    number,
    percent,
    plain_row,
    size,
    verdict,
)

LEVEL = {"faster than plain": "good", "slower than plain": "bad", "not told apart from plain": "flat"}


def build_page(results: Results) -> str:
    """The whole page. Raises nothing for stages that have not run: each leaves one line that says so."""
    sections: list[tuple[str, str, Html]] = [
        ("made", "What was made", _made(results)),
        ("numbers", "In short", _headlines(results)),
        *([("cuts", "From donor to draft", making.cuts(results))] if results.get("cuts") else []),
        ("training", "Training", making.training(results)),
        *([("sparsity", "Sparsity", making.sparsity(results))] if results.get("sparsity") else []),
        ("positions", "Acceptance by position", _stage(results, "eval", measurements.positions)),
        ("divergence", "Divergence and acceptance", _stage(results, "eval", measurements.divergence)),
        ("cost", "Cost curves", _stage(results, "profile", measurements.cost)),
        ("speedup", "Speedup", _stage(results, "speedup", measurements.speedup)),
        ("plain", "The plain decoder beside the library's own", _stage(results, "speedup", measurements.plain)),
        ("why", "Why these speedups", _stage(results, "speedup", measurements.explanations)),
        ("gguf", "GGUF files and parity", _stage(results, "export", measurements.gguf)),
        ("samples", "Generated samples", _stage(results, "speedup", measurements.samples)),
        ("limits", "Limits", as_list(limits(results))),
    ]
    links = " ".join(f'<a href="#{key}">{escape(title)}</a>' for key, title, _ in sections)
    body = "\n".join(f'<section id="{key}"><h2>{escape(title)}</h2>{inner}</section>' for key, title, inner in sections)
    name = as_text(results["name"])
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
<header><h1>{name}</h1><p class="soft">Draft model for speculative decoding, {as_text(results["date"])}</p>
<nav aria-label="Sections">{links}</nav></header>
<main>
{body}
</main>
<footer><p>Made by <code>distill report</code>. Brackets hold intervals; a dash means not measured.</p></footer>
</body>
</html>
"""


def _stage(results: Results, stage: str, draw: Callable[[Results], Html]) -> Html:
    """A section drawn from a stage's figures, or one line saying that the stage has not run."""
    return draw(results) if results.get(stage) else not_run(stage)


def _made(results: Results) -> Html:
    models = {name: results[name] for name in ("target", "donor", "draft") if results.get(name)}
    heads = {"target": "target", "donor": "donor (before)", "draft": "draft (after)"}
    rows: list[list[object]] = [
        ["path", *(as_code(model["path"]) for model in models.values())],
        ["architecture", *(model["architecture"] for model in models.values())],
    ]
    for key, words in {
        "parameters": "parameters",
        "layers": "layers",
        "hidden": "hidden width",
        "mlp": "MLP width",
        "vocabulary": "vocabulary",
        "bytes": "bytes",
    }.items():
        values = [model[key] for model in models.values()]
        rows.append(
            [words, *(Html(f"{number(v)} <small>{size(v)}</small>") if key == "bytes" else number(v) for v in values)]
        )
        if {"donor", "draft"} <= models.keys():
            before, after = models["donor"][key], models["draft"][key]
            rows[-1].append(percent(after / before - 1) if before and after != before else "same")
    heading: list[object] = ["", *(badged(heads[name], bool(model.get("grown"))) for name, model in models.items())]
    if {"donor", "draft"} <= models.keys():
        heading.append("donor → draft")
        rows[0].append("")
        rows[1].append("same" if models["donor"]["architecture"] == models["draft"]["architecture"] else "changed")
    machine = results.get("machine") or {}
    told = {
        "recipe": as_text((results.get("config") or {}).get("name") or results["name"]),
        "date": as_text(results["date"]),
        "command": as_code(results["command"]),
        "machine": as_text(
            f"{machine.get('cpu')}, {machine.get('cores')} cores, "
            f"{size(machine.get('memory_bytes'))} memory, {machine.get('platform')}"
        ),
        "GPU": as_text(machine.get("gpu") or "none"),
        "software": as_text(
            f"Python {machine.get('python')}, torch {machine.get('torch')}, transformers {machine.get('transformers')}"
        ),
    }
    if parent := results.get("parent"):
        told["generation"] = as_text(f"{parent['generation']}, from the draft of {parent['run']}, {parent['digest']}")
    listed = "".join(f"<dt>{word}</dt><dd>{value}</dd>" for word, value in told.items())
    config = json.dumps(results.get("config") or {}, indent=2, ensure_ascii=False, default=str)
    return Html(
        as_table(heading, rows, results["command"]) + f"<dl>{listed}</dl>"
        f"<details><summary>Resolved recipe</summary><pre>{as_text(config)}</pre></details>"
    )


def _headlines(results: Results) -> Html:
    cards: list[str] = []
    speedup, evaluation, grown = results.get("speedup"), results.get("eval"), grown_pairs(results)
    for row in best_rows(speedup):
        plain = plain_row(speedup or {}, row)
        rates = f"{number(plain['tokens_per_second'], 1)} → " if plain else ""
        low, high = row.get("speedup_low"), row.get("speedup_high")
        bounds = f" <small>[{low:.2f}, {high:.2f}]</small>" if known(low) and known(high) else ""
        cards.append(
            f'<div class="card"><div class="name">{badged(row["pair"], row["pair"] in grown)}</div>'
            f'<div class="figure">{row["speedup"]:.2f}×{bounds}</div>'
            f'<p class="{LEVEL[verdict(row)]}">{verdict(row)}</p><p class="soft">best of the draft lengths tried, '
            f"γ = {row['length']}, {as_text(row['backend'])}; "
            f"{rates}{number(row['tokens_per_second'], 1)} tokens/s</p></div>"
        )
    measure = acceptance_measure(evaluation or {})
    for domain, sides in ((evaluation or {}).get("domains") or {}).items():
        before, after = (sides.get(side) or {} for side in ("before", "after"))
        first, last = before.get(measure) or {}, after.get(measure) or {}
        cards.append(
            f'<div class="card"><div class="name">Acceptance, {as_text(domain)}</div>'
            f'<div class="figure"><small>{percent(first.get("mean"))} →</small> {percent(last.get("mean"))}</div>'
            f'<p class="soft">before: {interval(first, True)}<br>after: {interval(last, True)}</p>'
            f'<p class="soft">{as_text(MEASURES[measure].partition(", ")[2])}; {number(after.get("tokens"))} tokens of '
            f"{number(after.get('prompts'))} prompts</p></div>"
        )
    shown = f'<div class="cards">{"".join(cards)}</div>' if cards else ""
    absent = [stage for stage in ("speedup", "eval") if not results.get(stage)]
    sources = [results[stage]["command"] for stage in ("speedup", "eval") if results.get(stage)]
    commands = "".join(f'<p class="command">{as_text(command)}</p>' for command in dict.fromkeys(sources))
    return Html(shown + commands + "".join(not_run(stage) for stage in absent))

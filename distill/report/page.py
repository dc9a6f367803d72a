"""The report of a run as one HTML page that needs no other file: no network, no scripts, no fonts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import TypeVar

from distill.engines.server_commands import LLAMA_SERVER, VLLM, llama_server, transformers, vllm
from distill.measuring.evaluation_results import MEASURES, SIDES, EvaluationReport
from distill.measuring.speedup_results import FASTER, SLOWER, UNCLEAR, Measurement, SpeedupReport
from distill.measuring.speedup_tables import speedup_of, verdict
from distill.recipe.measuring import engine_name
from distill.report import sections, tables
from distill.report.sections import (
    Html,
    absent,
    as_code,
    as_command,
    as_details,
    as_list,
    as_paragraph,
    as_table,
    as_text,
)
from distill.report.tables import RunResults
from distill.tables import NOTHING, clean, counted, known, number, percent, shown
from distill.training.saved import REMEDY

# ── The look of the report page: one style sheet, no fonts or pictures from elsewhere ──

CSS = """
:root { color-scheme: light dark; --paper: #f6f7f9; --card: #ffffff; --ink: #1b1f24; --soft: #59626e; --line: #dde1e7;
  --accent: #1f6fc5; --good: #1a7f4e; --bad: #b3363e; --flat: #8a6414; --mark: #c9efd9; --mark-line: #2f9e77;
  --code: #eef0f4; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #111418; --card: #1a1f25; --ink: #e4e8ee; --soft: #a0a9b5; --line: #303843; --accent: #74b3f2;
    --good: #5fcf9a; --bad: #f0868c; --flat: #e0b85c; --mark: #17492f; --mark-line: #4cc48d; --code: #242b33; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main, header, footer { max-width: 72rem; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 2.2rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 0 0 .7rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; }
a { color: var(--accent); }
.soft, figcaption, .command { color: var(--soft); }
nav { display: flex; flex-wrap: wrap; gap: .35rem .9rem; margin: 1rem 0 0; font-size: .92rem; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 1.2rem;
  margin: 1.1rem 0; }
code, pre, .command { font-family: ui-monospace, monospace; }
code { background: var(--code); border-radius: 4px; padding: .08em .35em; font-size: .88em; overflow-wrap: anywhere; }
pre { background: var(--code); border-radius: 8px; padding: .8rem 1rem; margin: .5rem 0; font-size: .82rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(15rem, 100%), 1fr)); gap: .9rem; }
.card { border: 1px solid var(--line); border-radius: 10px; padding: .9rem 1rem; min-width: 0; }
.card .figure { font-size: 2rem; font-weight: 650; line-height: 1.15; font-variant-numeric: tabular-nums; }
.card .figure small { font-size: .95rem; font-weight: 400; color: var(--soft); white-space: nowrap; }
.card .name { font-weight: 600; overflow-wrap: anywhere; }
.card p, figcaption { margin: .2rem 0 0; font-size: .9rem; }
.good { color: var(--good); } .bad { color: var(--bad); } .flat { color: var(--flat); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; max-width: 40rem; min-width: 0; }
figure svg { display: block; width: 100%; height: auto; color: var(--ink); }
figure svg text { font-family: inherit !important; }
.scroll { overflow-x: auto; margin: .6rem 0 .2rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { text-align: right; padding: .38rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th, td:first-child { white-space: normal; min-width: 3.4rem; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td.text, th.text { text-align: left; }
tr.plain td { color: var(--soft); }
tr.best td { font-weight: 650; }
.command { font-size: .78rem; margin: .2rem 0 1rem; overflow-wrap: anywhere; }
.command::before { content: "$ "; }
.notrun { color: var(--soft); font-style: italic; margin: 0; }
details { margin: .6rem 0; } summary { cursor: pointer; color: var(--accent); }
mark { background: var(--mark); color: inherit; border-bottom: 2px solid var(--mark-line); border-radius: 2px; }
.prompt { opacity: .65; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .25rem 1rem; margin: .9rem 0 0;
  font-size: .93rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
footer { color: var(--soft); font-size: .85rem; padding-bottom: 2.5rem; }
@media (max-width: 40rem) {
  main, header, footer { padding-left: .7rem; padding-right: .7rem; } th, td { padding: .35rem .4rem; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .5rem; }
}
"""


# ── The limits of a run's figures, in sentences for the report page and the model card ──

WIDE = 1.5  # an interval's upper end over its lower one, from which on the figure between them says little


def limits(results: RunResults) -> list[str]:
    """Everything a reader must know before quoting these figures, one sentence each."""
    machine = results.machine
    place = f"{machine['cpu']} ({machine['cores']} cores)" if machine["cpu"] else "one machine"
    sentences = [
        f"Every time and speedup was measured on {place}. Other hardware has other cost curves, so measure there "
        "before you rely on these figures."
    ]
    if not machine["gpu"]:
        sentences.append("No GPU took part: nothing here shows how the pair behaves on one.")
    missing = results.stages_not_run
    if missing:
        sentences.append(f"These stages have not run, so the report makes no claim about them: {', '.join(missing)}.")
    for stage, reason in results.left_out.items():
        sentences.append(f"Stage {stage} was not run: {reason}.")
    if results.speedup:
        sentences += _speedup_limits(results.speedup)
    if results.evaluation:
        sentences.append(_evaluation_limit(results.evaluation))
    if results.export:
        sentences += [f"{fault}." for fault in results.export.faults]
    return sentences


def _speedup_limits(speedup: SpeedupReport) -> list[str]:
    sentences = [
        f"Speedups come from {number(speedup.prompts)} prompts of up to {number(speedup.new_tokens)} new tokens each. "
        "The best draft length of a pair is read off the same runs, and its interval does not cover that choice."
    ]
    if speedup.gguf:
        sentences.append(f"GGUF files were decoded with these options of llama.cpp: {speedup.gguf}.")
    for best in speedup.best:
        if best.speedup_high > WIDE * best.speedup_low:
            sentences.append(
                f"{best.configuration} ({best.pair}, {best.backend}) lies between {best.speedup_low:.2f}× and "
                f"{best.speedup_high:.2f}×, which is wide: other programs took part of the machine, or "
                f"{number(speedup.prompts)} prompts are too few (speedup.prompts)."
            )
    for one in speedup.measurements:
        if not one.is_plain and one.acceptance is None and known(one.speedup):
            sentences.append(
                f"{one.configuration} ({one.pair}, {one.backend}) drafted nothing: its {one.speedup:.2f}× shows how "
                "much these timings vary."
            )
    different = sum(one.different or 0 for one in speedup.sweep)
    excused = sum(one.excused or 0 for one in speedup.sweep)
    if different:
        sentences.append(
            f"{different} outputs differ from the plain run without a rounding tie that would explain it: treat this "
            "pair as not shown to be lossless."
        )
    if excused:
        sentences.append(
            f"{excused} outputs diverge from the plain run at a rounding tie, where the logits of two tokens are equal "
            "within rounding; they count as excused, not as identical."
        )
    return sentences


def _evaluation_limit(evaluation: EvaluationReport) -> str:
    counts = ", ".join(
        f"{name}: {number(sides['after'].tokens)} tokens of {number(sides['after'].prompts)} prompts"
        for name, sides in evaluation.domains.items()
        if "after" in sides
    )
    return (
        f"Divergences and acceptance probabilities hold for the texts that were measured ({counts}) and this sampler "
        f"({evaluation.sampler_words})."
    )


# ── How a draft is used: one command for each server or library, and whether it pays there, as measured ──

FALLBACK_LENGTH = 4  # drafted where no length was measured
OTHER_ROWS = (
    "The heads have other numbers of rows, so vLLM is asked to draft among the tokens that both vocabularies have, "
    "which it does with the draft's best tokens alone. A transplant gives the draft the target's rows."
)
NO_FILE = "The run wrote no GGUF file of its draft: `distill export-gguf RUN` does."
PLACES = (
    "Paths of what the run made are relative to its folder; models of yours are named without their folders. "
    f"llama-server's options were run with {LLAMA_SERVER}, vLLM's "
    f"with its {VLLM} on a CPU; on several GPUs vLLM splits the draft as the target. The figures are of distill's own "
    "decoder on the run's machine: `distill serve-check RUN --server PATH` measures the pair on your server."
)


@dataclass(frozen=True)
class Use:
    """A command or program, in a language of code blocks, for one server or library; `verdict` says whether it pays,
    and `notes` what else there is to know."""

    name: str
    language: str
    text: str
    verdict: str
    notes: tuple[str, ...] = ()


def uses(results: RunResults) -> list[Use]:
    """llama.cpp, and where the target is a folder transformers and vLLM, each with the fixed draft length that was
    fastest in its engine, or else in the other."""
    target, draft = clean(results.target.path), clean(results.draft.path)
    same = results.target.vocabulary == results.draft.vocabulary
    fastest = results.speedup.fastest_of_backends if results.speedup else {}
    evaluation = results.evaluation
    drawn = evaluation.probabilistic if evaluation else None
    big, small = _file(results, "target"), _file(results, "draft")
    found = [
        Use(
            "llama.cpp",
            "sh",
            llama_server(
                big or (target if target.endswith(".gguf") else "target.gguf"),
                small or "draft.gguf",
                _length(fastest, "gguf"),
            ),
            _verdict(fastest, "gguf"),
            (*([drawn] if drawn else []), *([] if small else [NO_FILE])),
        )
    ]
    if target.endswith(".gguf"):
        return found
    sampled = evaluation is not None and evaluation.acceptance_measure == "acceptance_sampling"
    length, verdict = _length(fastest, "pytorch"), _verdict(fastest, "pytorch")
    served = vllm(target, draft, length, probabilistic=sampled, same_vocabulary=same)
    return [
        Use("transformers", "python", transformers(target, draft, length, same), verdict),
        *found,
        Use("vLLM", "sh", served, verdict, () if same else (OTHER_ROWS,)),
    ]


def _file(results: RunResults, model: str) -> str:
    """The GGUF file of a model, of the type that was timed where there is one; empty where there is none."""
    files = [file for file in (results.export.files if results.export else []) if file.model == model]
    timed = results.config.get("speedup", {}).get("outtype")
    return clean(next((file.path for file in sorted(files, key=lambda file: file.outtype != timed)), ""))


def _length(fastest: dict[str, Measurement], backend: str) -> int:
    one = fastest.get(backend) or next(iter(fastest.values()), None)
    return FALLBACK_LENGTH if one is None else one.length or FALLBACK_LENGTH


def _verdict(fastest: dict[str, Measurement], backend: str) -> str:
    """Whether a fixed length pays in an engine on the machine of the run."""
    one = fastest.get(backend)
    if one is None and fastest:
        return (
            f"It was not timed in {engine_name(backend)}: the length shown was the fastest in "
            f"{engine_name(next(iter(fastest)))}."
        )
    if one is None:
        return "No draft length was timed; the one shown is only a starting point."
    best = f"{one.length} drafted, {shown(speedup_of(one), '×')} over plain decoding in {engine_name(backend)}"
    if one.verdict == SLOWER:
        return (
            f"It does not pay on the run's machine: the best fixed length was slower than plain decoding ({best}). "
            "Serve without a draft there; the command is for other machines."
        )
    if one.verdict == FASTER:
        return f"It pays on the run's machine with the length shown, the fastest fixed one: {best}."
    return f"Whether it pays on the run's machine is not known. The fastest fixed length: {best}."


# ── The report of a run as one HTML page that needs no other file: no network, no scripts, no fonts ──

Report = TypeVar("Report")

LEVEL = {FASTER: "good", SLOWER: "bad", UNCLEAR: "flat"}


def build_page(results: RunResults) -> str:
    """The whole page. Raises nothing for stages that have not run: each leaves one line that names it."""

    def of(stage: str, report: Report | None, draw: Callable[[Report], Html]) -> Html:
        return absent(results.absence(stage)) if report is None else draw(report)

    evaluation, measured = results.evaluation, results.speedup
    parts: list[tuple[str, str, Html]] = [
        ("numbers", "In short", _headlines(results)),
        ("use", "How to use it", _use(results)),
        ("made", "Models", _made(results)),
        *([("texts", "Texts", sections.texts(results))] if results.corpus else []),
        *([("cuts", "From donor to draft", sections.cuts(results))] if results.cuts else []),
        ("training", "Training", sections.training(results)),
        *([("sparsity", "Sparsity", sections.sparsity(results))] if results.sparsity else []),
        ("positions", "Conditional acceptance by position", of("eval", evaluation, sections.positions)),
        ("divergence", "Divergence and acceptance probability", of("eval", evaluation, sections.divergence)),
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
    return Html(as_table(tables.models(results)) + f"<dl>{terms}</dl>" + recipe)


def _use(results: RunResults) -> Html:
    """A command for each server or library, and whether it pays."""
    parts = []
    for one in uses(results):
        parts += [f"<h3>{as_text(one.name)}</h3>", as_paragraph(one.verdict), f"<pre>{as_text(one.text)}</pre>"]
        parts += map(as_paragraph, one.notes)
    return Html("".join([*parts, as_paragraph(PLACES)]))


def _headlines(results: RunResults) -> Html:
    """Cards: the best speedups, a GGUF target's as it is served first, and each domain's acceptance probability."""
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
        + "".join(map(as_paragraph, verdict(measured) if measured else []))
        + drawn
        + as_list([f"{warning} What to do: {REMEDY}."] if warning else [])
        + as_list(measured.explanations if measured else [])
        + "".join(map(as_command, commands))
        + "".join(absent(results.absence(name)) for name in missing)
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
    texts = f"{counted(after.tokens, 'token')} of {counted(after.prompts, 'prompt')}" if after else NOTHING
    return (
        f'<div class="card"><div class="name">Acceptance probability, {as_text(domain)}</div>'
        f'<div class="figure"><small>{percent(first and first.mean)} →</small> {percent(last and last.mean)}</div>'
        f'<p class="soft">before: {shown(first, "%")}<br>after: {shown(last, "%")}</p>'
        f'<p class="soft">{as_text(MEASURES[measure].partition(", ")[2])}; {texts}</p></div>'
    )

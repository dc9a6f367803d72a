"""The model card of a draft: the README.md in its folder, Markdown under YAML front matter."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from distill.data.samples import AnswerTexts, CorpusTexts, QuestionTexts
from distill.export import ExportReport
from distill.files import from_json, read_json, read_result, write_text
from distill.folders import ModelSizes
from distill.machine import machine
from distill.measuring.evaluation_results import EvaluationReport, calibration_table, divergence_tables
from distill.measuring.speedup_results import SpeedupReport
from distill.measuring.speedup_tables import measurement_table
from distill.progress import command_line
from distill.recipe import Recipe
from distill.recipe.recipe import HELD_OUT, REASON, not_run
from distill.report import tables as draft_tables
from distill.report.page import PLACES, build_page, limits, uses
from distill.report.tables import Parent, RunResults
from distill.run import Run, now
from distill.surgery.results import CutReport, SparsityReport
from distill.tables import Table, bullets, clean, markdown, number, placeless, significant, size
from distill.training.saved import STORED, TrainingSummary, evaluated_weights, trained_tokens, training_steps

# ── The model card of a draft: the README.md in its folder, Markdown under YAML front matter ──

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def build_card(results: RunResults) -> str:
    """The whole card; a stage that has not run leaves one line that names it."""
    parts = [
        _front_matter(results),
        f"# {words(results.name)}",
        _purpose(results),
        "## How it was made",
        _making(results),
        "## Numbers",
        "### Acceptance probability and divergence",
        _acceptance(results.evaluation) if results.evaluation else results.absence("eval"),
        "### Speedup",
        _speedup(results.speedup) if results.speedup else results.absence("speedup"),
        "### GGUF files",
        table(draft_tables.files(results.export)) if results.export else results.absence("export"),
        "## How to use it",
        _usage(results),
        "## Limits",
        bullets(map(words, limits(results))),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(results: RunResults) -> str:
    head: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", "assisted-generation", "distill"],
    }
    donor = clean(results.donor.path) if results.donor else ""
    if HUB_NAME.fullmatch(donor):  # the hub refuses a base_model that is a path of this machine
        head["base_model"] = donor
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---"


def _purpose(results: RunResults) -> str:
    target, draft = results.target, results.draft
    return (
        f"A draft model for speculative decoding with the target {code(target.path)}. The draft proposes several "
        "tokens at a time, the target verifies them in one step, and every accepted token saves the target a step of "
        f"its own. The draft has {number(draft.parameters)} parameters ({size(draft.bytes)}), the target "
        f"{number(target.parameters)} ({size(target.bytes)}). On its own the draft is a weak language model: use it "
        "only together with its target."
    )


def _making(results: RunResults) -> str:
    start = "Cut from the donor"
    if parent := results.parent:
        start = (
            f"Generation {number(parent.generation)}: started from the draft of {code(parent.run)} "
            f"(digest {code(parent.digest)})"
        )
    steps = results.steps
    trained = results.absence("train") + " These are the weights as cut from the donor."
    if steps:
        trained = (
            f"Trained for {number(len(steps))} steps on {number(trained_tokens(steps))} tokens; the loss went "
            f"from {significant(steps[0].loss)} to {significant(steps[-1].loss)}."
        )
    if results.training and results.training.best and results.training.best.measure == STORED:
        trained += f" Its weights were chosen by {words(results.training.best.words)}: {REASON}."
    if results.training and results.training.warning:
        trained += f" **{words(results.training.warning)}**"
    machine, recipe = results.machine, results.config.get("name") or results.name
    place = f"{results.machine_words}, {machine['gpu'] or 'no GPU'}"
    return (
        f"{start} and trained to match the target with `distill`, recipe {code(recipe)}, finished "
        f"{words(results.date)}, on {words(place)}; {words(results.software_words)}.\n\n"
        f"{trained}\n\n{table(draft_tables.models(results))}"
    )


def _acceptance(evaluation: EvaluationReport) -> str:
    sampler = words(evaluation.sampler_words)
    parts = [f"Before is the draft as cut, after is this draft; brackets hold intervals; sampler: {sampler}."]
    if evaluation.stored is not None:
        parts.append(bullets(map(words, evaluation.stored.sentences)))
    tables = divergence_tables(evaluation)
    tables += [calibration_table(evaluation)] if evaluation.calibration_error else []
    return "\n\n".join([*parts, *map(table, tables)])


def _speedup(report: SpeedupReport) -> str:
    rows = [*report.fastest, *(one for one in report.measurements if not (one.in_sweep or one.is_plain))]
    return (
        "End to end, beside plain decoding of the same target under the same sampler: the fastest of the draft lengths "
        f"tried, and the other configurations.\n\n{table(measurement_table(rows, report.command))}"
    )


def _usage(results: RunResults) -> str:
    """One command for each server or library, with the draft length that was fastest, and whether it pays."""
    lines = []
    for one in uses(results):
        lines += [f"**{one.name}.** {words(one.verdict)}", block(one.language, one.text), *map(words, one.notes)]
    return "\n\n".join([*lines, PLACES])


# ── Markdown that foreign text cannot break out of ──


def words(text: object) -> str:
    """Foreign text as plain Markdown words on one line, with all markup escaped, HTML's too."""
    text = " ".join(clean(text).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]#|~$])", r"\\\1", text)


def code(text: object) -> str:
    """A code span whose fence is longer than any run of backticks inside; bars are safe for tables."""
    inner = " ".join(clean(text).split()).replace("|", "\\|")
    fence = "`" * (1 + _longest_fence(inner))
    space = " " if "`" in inner else ""
    return f"{fence}{space}{inner}{space}{fence}"


def block(language: str, text: str) -> str:
    """A code block whose fence is longer than any run of backticks inside."""
    fence = "`" * max(3, 1 + _longest_fence(text))
    return f"{fence}{language}\n{text}\n{fence}"


def table(table: Table) -> str:
    """A table under its title and note, with its command below."""
    return f"{markdown(table, words)}\n\n{block('sh', ' '.join(clean(placeless(table.command)).split()))}"


def _longest_fence(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


# ── Stage `report`: the page and the draft's model card ──

Report = TypeVar("Report")


def gather(recipe: Recipe, run: Run) -> RunResults:
    """All that the page and the card show, read from the run directory; None for stages that have not run, or not since
    the draft was made again.

    Raises DataError where the cut is missing, or a file has another form than this version writes.
    """

    def found(kind: type[Report], *parts: str, stage: str | None = None) -> Report | None:
        path = run.path(*parts)
        return read_result(path, kind) if path.exists() and not (stage and run.outdated(stage)) else None

    cut = read_result(run.path("cut", "cut.json"), CutReport)
    history = run.path("provenance.json")
    # The command that made the run, not the one that redraws its report.
    starts = read_json(history, [{"argv": [str]}]) if history.exists() else []
    parent, lines, target = run.parent(), run.metrics(), _target_sizes(recipe, cut)
    if (export := found(ExportReport, "gguf", "export.json", stage="export")) is not None:
        export = replace(export, files=[replace(file, path=placeless(file.path)) for file in export.files])
    # Models and files by their names alone: page and card are read elsewhere than they are made.
    return RunResults(
        name=recipe.name,
        date=now(),
        command=placeless(command_line(starts[0]["argv"] if starts else [])),
        machine=machine(),
        config=placeless(recipe.model_dump(mode="json")),
        target=replace(target, path=placeless(target.path)),
        donor=replace(cut.donor, path=placeless(cut.donor.path)),
        draft=replace(cut.draft, path="draft"),
        cuts=cut.changes,
        parent=None if parent is None else from_json(parent, Parent, "parent.json"),
        sparsity=found(SparsityReport, "draft", "sparsity.json"),
        steps=training_steps(lines),
        evaluated=evaluated_weights(lines),
        training=found(TrainingSummary, "training.json"),
        questions=found(QuestionTexts, "questions", "summary.json"),
        corpus=found(CorpusTexts, "corpus", "summary.json"),
        answers=found(AnswerTexts, "answers", "manifest.json"),
        evaluation=found(EvaluationReport, "eval.json", stage="eval"),
        export=export,
        speedup=found(SpeedupReport, "speedup.json", stage="speedup"),
        left_out=not_run(recipe),
        held_out={
            split: texts for split in HELD_OUT if (texts := found(AnswerTexts, split, "summary.json")) is not None
        },
    )


def _target_sizes(recipe: Recipe, cut: CutReport) -> ModelSizes:
    """Sizes of the target, read from its configuration on an empty model, so that no weights are loaded."""
    if cut.donor.path == recipe.target.model:
        return cut.donor
    from distill.engines.torch.described import empty_model
    from distill.engines.torch.hugging_face import describe_model, load_config

    return describe_model(recipe.target.model, empty_model(load_config(recipe.target.model)))


def report(recipe: Recipe, run: Run) -> list[Path]:
    """Write report.html and, beside the draft's weights, its model card."""
    results = gather(recipe, run)
    write_text(run.path("report.html"), build_page(results))
    write_text(run.path("draft", "README.md"), build_card(results))
    return [run.path("report.html"), run.path("draft", "README.md")]

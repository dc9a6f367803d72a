"""The model card of a draft: the README.md in its folder, Markdown under YAML front matter."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from distill.data.samples import AnswerTexts, CorpusTexts, QuestionTexts
from distill.export import ExportReport, licence_of
from distill.files import read_json, read_result, write_text
from distill.folders import ModelSizes
from distill.machine import machine
from distill.measuring.evaluation_results import EvaluationReport
from distill.measuring.speedup_results import SpeedupReport
from distill.progress import command_line
from distill.recipe import Recipe
from distill.recipe.recipe import not_run
from distill.report.page import build_page
from distill.report.sections import TEXTS, sections
from distill.report.tables import RunResults
from distill.run import Run, now
from distill.surgery.results import CutReport, SparsityReport
from distill.tables import clean, document, placeless, words
from distill.training.saved import TrainingSummary, evaluated_weights, training_steps

# ── The model card of a draft: the README.md in its folder, Markdown under YAML front matter ──

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def build_card(results: RunResults) -> str:
    """Return the whole card: the sections of the report, without the texts, which may be private."""
    purpose = (
        "A draft model for speculative decoding. It proposes several tokens at a time, the target verifies them in one "
        "step, and every accepted token saves the target a step of its own. On its own the draft is a weak language "
        "model: use it only together with its target."
    )
    parts = [_front_matter(results), f"# {words(results.name)}", purpose]
    for title, blocks in sections(results).items():
        if title != TEXTS:
            parts += [f"## {title}", document(blocks, escaped=True).rstrip("\n")]
    return "\n\n".join(parts) + "\n"


def _front_matter(results: RunResults) -> str:
    head: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", "assisted-generation", "distill"],
    }
    donor = clean(results.donor.path) if results.donor else ""
    if HUB_NAME.fullmatch(donor):  # The hub refuses a path of this machine as base_model.
        head |= {"base_model": donor, "base_model_relation": "finetune"}
    licences = {role: licence for role, licence in results.licences.items() if licence}
    if len(set(licences.values())) == 1:
        head["license"] = next(iter(licences.values()))
    elif licences:
        head |= {"license": "other", "license_name": ", ".join(f"{role}: {name}" for role, name in licences.items())}
    sources = results.config.get("corpus", {}).get("sources", [])
    if sets := sorted({source["path"] for source in sources if source.get("kind") == "hub"}):
        head["datasets"] = sets
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---"


# ── Stage `report`: the page and the draft's model card ──

Report = TypeVar("Report")


def gather(recipe: Recipe, run: Run) -> RunResults:
    """Read all that the page and the card show from the run directory.

    The result of a stage is None if the stage has not run since the draft was made. Raises DataError if the cut is
    missing, or if a file does not have the form that this version writes.
    """

    def read(kind: type[Report], *parts: str, stage: str | None = None) -> Report | None:
        path = run.path(*parts)
        return read_result(path, kind) if path.exists() and not (stage and run.outdated(stage)) else None

    cut = read_result(run.path("cut", "cut.json"), CutReport)
    history = run.path("provenance.json")
    # The first start is the command that made the run. The last one may only redraw its report.
    starts = read_json(history, [{"argv": [str], "machine": dict}]) if history.exists() else []
    timed = read(SpeedupReport, "speedup.json", stage="speedup")
    lines, target = run.metrics(), _target_sizes(recipe, cut)
    if (export := read(ExportReport, "gguf", "export.json", stage="export")) is not None:
        export = replace(export, files=[replace(file, path=placeless(file.path)) for file in export.files])
    # Models and files have only their names, because the page and the card are read on other machines.
    return RunResults(
        name=recipe.name,
        date=now(),
        command=placeless(command_line(starts[0]["argv"] if starts else [])),
        machine=timed.machine if timed is not None else starts[0]["machine"] if starts else machine(),
        config=placeless(recipe.model_dump(mode="json")),
        target=replace(target, path=placeless(target.path)),
        donor=replace(cut.donor, path=placeless(cut.donor.path)),
        draft=replace(cut.draft, path="draft"),
        cuts=cut.changes,
        parent=run.parent(),
        sparsity=read(SparsityReport, "draft", "sparsity.json"),
        steps=training_steps(lines),
        evaluated=evaluated_weights(lines),
        training=read(TrainingSummary, "training.json"),
        questions=read(QuestionTexts, "questions", "summary.json"),
        corpus=read(CorpusTexts, "corpus", "summary.json"),
        answers=read(AnswerTexts, "answers", "manifest.json"),
        evaluation=read(EvaluationReport, "eval.json", stage="eval"),
        export=export,
        speedup=timed,
        licences={"donor": licence_of(recipe.donor_model, run), "target": licence_of(recipe.target.model, run)},
        left_out=not_run(recipe) | ({} if recipe.train.steps else {"train": "train.steps is 0"}),
    )


def _target_sizes(recipe: Recipe, cut: CutReport) -> ModelSizes:
    """Return the sizes of the target. They are read from its configuration, without loading weights."""
    if cut.donor.path == recipe.target.model:
        return cut.donor
    from distill.engines.torch.hugging_face import describe_model, empty_model, load_config

    return describe_model(recipe.target.model, empty_model(load_config(recipe.target.model)))


def report(recipe: Recipe, run: Run) -> list[Path]:
    """Write report.html and, beside the draft's weights, its model card."""
    results = gather(recipe, run)
    write_text(run.path("report.html"), build_page(results))
    write_text(run.path("draft", "README.md"), build_card(results))
    return [run.path("report.html"), run.path("draft", "README.md")]

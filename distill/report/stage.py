"""Stage `report`: the page and the draft's model card."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from distill.files import read_json, write_text
from distill.machine import machine
from distill.models.model_files import ModelSizes
from distill.progress import command_line
from distill.recipe import Recipe
from distill.recipe.recipe import HELD_OUT, not_run
from distill.report.card import build_card
from distill.report.page import build_page
from distill.results.cut_results import Comparison, CutReport, SparsityReport
from distill.results.evaluation_results import EvaluationReport
from distill.results.export_results import ExportReport
from distill.results.run_results import Parent, RunResults
from distill.results.serialise import from_json, read_result
from distill.results.speedup_results import SpeedupReport
from distill.results.text_results import AnswerTexts, CorpusTexts, QuestionTexts
from distill.results.training_results import TrainingSummary, evaluated_weights, training_steps
from distill.run import Run, now
from distill.tables import placeless

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
        compared=found(Comparison, "compared", "compared.json"),
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
    import torch
    from transformers import AutoModelForCausalLM

    from distill.models.hugging_face import describe_model, load_config

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(load_config(recipe.target.model))
        return describe_model(recipe.target.model, empty)


def report(recipe: Recipe, run: Run) -> list[Path]:
    """Write report.html and, beside the draft's weights, its model card."""
    results = gather(recipe, run)
    write_text(run.path("report.html"), build_page(results))
    write_text(run.path("draft", "README.md"), build_card(results))
    return [run.path("report.html"), run.path("draft", "README.md")]

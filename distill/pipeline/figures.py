"""The one figure of each finished stage that matters, for its line on the terminal."""

from __future__ import annotations

from distill.data.samples import AnswerTexts, CorpusTexts, QuestionTexts
from distill.export import ExportReport
from distill.files import read_result
from distill.measuring.evaluation_results import EvaluationReport
from distill.measuring.speedup_results import SpeedupReport
from distill.measuring.verdict import leader
from distill.run import Run
from distill.surgery.results import CutReport
from distill.tables import counted, number, shown, size
from distill.training.saved import TrainingSummary, evaluated_weights


def stage_figure(stage: str, run: Run) -> str:
    """Return the figure of a finished stage in words. It is the bytes on disk if no other figure matters."""
    if stage == "questions":
        asked = read_result(run.path("questions", "summary.json"), QuestionTexts).sources
        return counted(sum(source.kept for source in asked), "question")
    if stage == "corpus":
        train = read_result(run.path("corpus", "summary.json"), CorpusTexts).train
        return f"{counted(train.documents, 'document')}, {counted(train.prompts, 'prompt')}"
    if stage == "answers":
        texts = read_result(run.path("answers", "manifest.json"), AnswerTexts)
        return f"{counted(texts.answers, 'answer')}, {counted(texts.answer_tokens, 'token')}"
    if stage == "cut":
        models = read_result(run.path("cut", "cut.json"), CutReport)
        return f"{models.donor.parameters / 1e6:,.1f} → {models.draft.parameters / 1e6:,.1f} million parameters"
    if stage == "train":
        summary, weights = read_result(run.path("training.json"), TrainingSummary), evaluated_weights(run.metrics())
        if summary.best is None or not weights:
            return counted(summary.steps, "step")
        return f"acceptance {number(weights[0].acceptance)} → {number(summary.best.acceptance)}"
    if stage == "eval":
        report = read_result(run.path("eval.json"), EvaluationReport)
        answers = report.domains.get("answers", {}).get("after")
        return f"acceptance {shown(answers.measure(report.acceptance_measure), '.2f')}" if answers else ""
    if stage == "export":
        return counted(len(read_result(run.path("gguf", "export.json"), ExportReport).files), "file")
    if stage == "speedup":
        measured = read_result(run.path("speedup.json"), SpeedupReport)
        if not measured.plain:
            return "nothing to compare"
        _, _, speed, base, _ = leader(measured)
        return f"{speed:.1f} tokens/s instead of {base:.1f}"
    artifacts = (run.done(stage) or {"artifacts": {}})["artifacts"].values()
    return size(sum(file["bytes"] for file in artifacts))

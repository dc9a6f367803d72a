"""The tables on how a draft came about, its models, cuts, training and texts, and on its files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from distill.data.samples import NEW, SEEN, AnswerTexts, CorpusTexts, QuestionTexts, SplitTexts
from distill.export import ExportedFile, ExportReport, Parity
from distill.folders import ModelSizes
from distill.measuring.evaluation_results import AGREEMENT, EvaluationReport
from distill.measuring.speedup_results import SpeedupReport
from distill.surgery.results import Change, SparsityReport
from distill.tables import Cell, Columns, Row, Table, Value, table_of
from distill.training.saved import Evaluation, TrainingStep, TrainingSummary

# ── Everything that a run has measured, gathered for the report page and the model card ──


@dataclass(frozen=True)
class RunResults:
    """All results of a run; None or empty for stages that have not run. `config` is the resolved recipe.

    `command` made the run; `machine` is the one that timed it, or began it; `steps` and `evaluated` are of
    its training. `donor` is what the draft was cut from. `left_out` are the stages that the recipe's run does not have,
    with the reason; `parent` is what parent.json says.
    """

    name: str
    date: str
    command: str
    machine: dict[str, Any]
    config: dict[str, Any]
    target: ModelSizes
    draft: ModelSizes
    donor: ModelSizes | None = None
    cuts: list[Change] = field(default_factory=list)
    parent: dict[str, Any] | None = None
    sparsity: SparsityReport | None = None
    steps: list[TrainingStep] = field(default_factory=list)
    evaluated: list[Evaluation] = field(default_factory=list)
    training: TrainingSummary | None = None
    questions: QuestionTexts | None = None
    corpus: CorpusTexts | None = None
    answers: AnswerTexts | None = None
    evaluation: EvaluationReport | None = None
    export: ExportReport | None = None
    speedup: SpeedupReport | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    licences: dict[str, str | None] = field(default_factory=dict)

    def absence(self, stage: str) -> str:
        """Why there are no results of a stage."""
        reason = self.left_out.get(stage)
        return f"The stage `{stage}` has not run." if reason is None else f"The stage `{stage}` was not run: {reason}."


# ── The tables on how a draft came about, its models, cuts, training and texts, and on its files ──

# Rows of the table of models, with their labels.
SIZES = dict.fromkeys(("path", "architecture", "parameters", "layers")) | {"hidden": "hidden width", "mlp": "MLP width"}
SIZES |= dict.fromkeys(("vocabulary", "bytes"))


def models(results: RunResults) -> Table:
    """Target, donor and draft side by side."""
    every = {"target": results.target, "donor (before)": results.donor, "draft (after)": results.draft}
    shown = {title: model for title, model in every.items() if model is not None}
    rows: list[Row] = [
        [label or name, *(Cell(getattr(model, name), "bytes" if name == "bytes" else "") for model in shown.values())]
        for name, label in SIZES.items()
    ]
    return Table(["", *shown], rows, results.command)


def cuts(results: RunResults) -> Table:
    """Sizes and KL after each operation on the donor."""
    columns: Columns[Change] = {
        "operation": lambda one: one.operation,
        "parameters": lambda one: one.after.parameters,
        "bytes per step": lambda one: Cell(one.after.bytes_per_step, "size"),
        "layers": lambda one: one.after.layers,
        "MLP": lambda one: max(one.after.mlp),
        "tokens in the head": lambda one: one.after.kept_vocabulary,
        "change": lambda one: Cell(one.after.parameters / one.before.parameters - 1, "%"),
        "KL before, nats": lambda one: Cell(one.close_before.kl if one.close_before else None, "significant"),
        "KL after": lambda one: Cell(one.close_after.kl if one.close_after else None, "significant"),
        "agreement, new text": lambda one: _agreement(one, NEW),
        "repeated": lambda one: _agreement(one, SEEN),
    }
    return table_of(results.cuts, columns, results.command)


def _agreement(change: Change, kind: str) -> Cell:
    return Cell(change.close_after.agreement.get(kind) if change.close_after else None, "%")


def texts(results: RunResults) -> list[Table]:
    """The splits of the corpus, and the prompts and answers by class."""
    corpus, answers = results.corpus, results.answers
    assert corpus is not None
    columns: Columns[tuple[str, SplitTexts]] = {
        "split": lambda one: one[0],
        "documents": lambda one: one[1].documents,
        "tokens of given text": lambda one: one[1].tokens,
        "prompts": lambda one: one[1].prompts,
    }
    splits = [("train", corpus.train), ("validation", corpus.validation), ("test", corpus.test)]
    asked, own = corpus.train.asked, {} if answers is None else answers.by_class
    rows: list[Row] = [
        [name or "all", *(getattr(of.get(name), what, None) for of in (asked, own) for what in ("texts", "tokens"))]
        for name in dict.fromkeys([*asked, *own])
    ]
    heads = ["train prompts", "prompts", "tokens of prompts", "answers kept", "tokens of answers"]
    return [table_of(splits, columns, results.command), *([Table(heads, rows, results.command)] if rows else [])]


def files(export: ExportReport) -> Table:
    """The GGUF files, and how closely llama.cpp reproduces their models' distributions and tokens."""

    def mismatches(parity: Parity) -> Cell:
        wrong = len(parity.tokenizer_mismatches)
        return Cell(wrong, bad=bool(wrong))

    def compared(value: Callable[[Parity], Cell | Value]) -> Callable[[ExportedFile], Cell | Value]:
        return lambda one: None if one.parity is None else value(one.parity)

    columns: Columns[ExportedFile] = {
        "file": lambda one: one.path,
        "model": lambda one: one.model,
        "type": lambda one: one.outtype,
        "bytes": lambda one: Cell(one.bytes, "bytes"),
        "positions": compared(lambda parity: parity.positions),
        AGREEMENT: compared(lambda parity: Cell(parity.top1_agreement, "%")),
        "mean |Δ log p|": compared(lambda parity: Cell(parity.mean_abs_dlogprob, "significant")),
        "max |Δ log p|": compared(lambda parity: Cell(parity.max_abs_dlogprob, "significant")),
        "tokenizer texts": compared(lambda parity: parity.tokenizer_texts),
        "mismatches": compared(mismatches),
    }
    note = (
        "Each file in llama.cpp against its Hugging Face model on the same positions; the user's own file is no copy."
    )
    return table_of(export.files, columns, export.command, note=note)

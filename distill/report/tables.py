"""Tables of a run's report on the models, cuts, texts and files."""

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
    """All results of a run. A result is None or empty if its stage has not run.

    `config` is the resolved recipe, and `command` the command that made the run. `machine` is the machine that timed
    the run, or that began it. `steps` and `evaluated` are records of the training. The draft was cut from `donor`.
    `left_out` gives the reason for each stage that the recipe leaves out. `parent` has the content of parent.json.
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
        """Return a sentence that says why a stage has no results."""
        reason = self.left_out.get(stage)
        return f"The stage `{stage}` has not run." if reason is None else f"The stage `{stage}` was not run: {reason}."


# ── Tables on the models, cuts, texts and files ──

# The rows of the table of models. A row without a label is labelled with its name.
SIZES = dict.fromkeys(("path", "architecture", "parameters", "layers")) | {"hidden": "hidden width", "mlp": "MLP width"}
SIZES |= dict.fromkeys(("vocabulary", "bytes"))


def models(results: RunResults) -> Table:
    """Return the table of sizes, with a column each for the target, the donor and the draft."""
    every = {"target": results.target, "donor (before)": results.donor, "draft (after)": results.draft}
    shown = {title: model for title, model in every.items() if model is not None}
    rows: list[Row] = [
        [label or name, *(Cell(getattr(model, name), "bytes" if name == "bytes" else "") for model in shown.values())]
        for name, label in SIZES.items()
    ]
    return Table(["", *shown], rows, results.command)


def cuts(results: RunResults) -> Table:
    """Return the table of sizes, KL in nats and top-1 agreement after each operation on the donor."""
    columns: Columns[Change] = {
        "operation": lambda cut: cut.operation,
        "parameters": lambda cut: cut.after.parameters,
        "bytes per step": lambda cut: Cell(cut.after.bytes_per_step, "size"),
        "layers": lambda cut: cut.after.layers,
        "MLP": lambda cut: max(cut.after.mlp),
        "tokens in the head": lambda cut: cut.after.kept_vocabulary,
        "change": lambda cut: Cell(cut.after.parameters / cut.before.parameters - 1, "%"),
        "KL before, nats": lambda cut: Cell(cut.close_before.kl if cut.close_before else None, "significant"),
        "KL after": lambda cut: Cell(cut.close_after.kl if cut.close_after else None, "significant"),
        "agreement, new text": lambda cut: _agreement(cut, NEW),
        "repeated": lambda cut: _agreement(cut, SEEN),
    }
    return table_of(results.cuts, columns, results.command)


def _agreement(change: Change, kind: str) -> Cell:
    return Cell(change.close_after.agreement.get(kind) if change.close_after else None, "%")


def texts(results: RunResults) -> list[Table]:
    """Return the table of the corpus's splits, and one of prompts and answers by class if there are prompts."""
    corpus, answers = results.corpus, results.answers
    assert corpus is not None
    columns: Columns[tuple[str, SplitTexts]] = {
        "split": lambda split: split[0],
        "documents": lambda split: split[1].documents,
        "tokens of given text": lambda split: split[1].tokens,
        "prompts": lambda split: split[1].prompts,
    }
    splits = [("train", corpus.train), ("validation", corpus.validation), ("test", corpus.test)]
    prompts, answered = corpus.train.asked, {} if answers is None else answers.by_class
    rows: list[Row] = []
    for name in dict.fromkeys([*prompts, *answered]):
        counts = prompts.get(name), answered.get(name)
        values = [getattr(count, value, None) for count in counts for value in ("texts", "tokens")]
        rows.append([name or "all", *values])
    heads = ["train prompts", "prompts", "tokens of prompts", "answers kept", "tokens of answers"]
    return [table_of(splits, columns, results.command), *([Table(heads, rows, results.command)] if rows else [])]


def files(export: ExportReport) -> Table:
    """Return the table of the GGUF files: how closely llama.cpp reproduces their models' distributions and tokens."""

    def mismatches(parity: Parity) -> Cell:
        wrong = len(parity.tokenizer_mismatches)
        return Cell(wrong, bad=bool(wrong))

    def compared(value: Callable[[Parity], Cell | Value]) -> Callable[[ExportedFile], Cell | Value]:
        return lambda file: None if file.parity is None else value(file.parity)

    columns: Columns[ExportedFile] = {
        "file": lambda file: file.path,
        "model": lambda file: file.model,
        "type": lambda file: file.outtype,
        "bytes": lambda file: Cell(file.bytes, "bytes"),
        "positions": compared(lambda parity: parity.positions),
        AGREEMENT: compared(lambda parity: Cell(parity.top1_agreement, "%")),
        "mean |Δ log p|": compared(lambda parity: Cell(parity.mean_abs_dlogprob, "significant")),
        "max |Δ log p|": compared(lambda parity: Cell(parity.max_abs_dlogprob, "significant")),
        "tokenizer texts": compared(lambda parity: parity.tokenizer_texts),
        "mismatches": compared(mismatches),
    }
    note = (
        "Each file in llama.cpp is compared with its Hugging Face model on the same positions. The user's own file of "
        "the target is the reference, so it has no figures."
    )
    return table_of(export.files, columns, export.command, note=note)

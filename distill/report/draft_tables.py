"""The tables on how a draft came about, its models, cuts, training and texts, and on its files."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from distill.models.model_files import ModelSizes
from distill.results.cut_results import Change, SparsityReport
from distill.results.evaluation_results import MEASURES
from distill.results.export_results import ExportedFile, ExportReport, Parity
from distill.results.run_results import RunResults
from distill.results.text_results import AskedQuestions, SplitTexts, TextCount
from distill.results.training_results import TrainedPart, TrainingStep, TrainingSummary
from distill.tables import Cell, Columns, Row, Table, Value, table_of

# Rows of the training table: the label, and the figure of a step.
TRAINED: dict[str, Callable[[TrainingStep], float]] = {
    "loss": lambda step: step.loss,
    MEASURES["forward_kl"]: lambda step: step.forward_kl,
    "cross-entropy, nats": lambda step: step.cross_entropy,
    MEASURES["top1_agreement"]: lambda step: step.agreement,
    "learning rate": lambda step: step.rate,
}
# Rows of the table of models: the label, and the size of a model.
SIZES: dict[str, Callable[[ModelSizes], int]] = {
    "parameters": lambda model: model.parameters,
    "layers": lambda model: model.layers,
    "hidden width": lambda model: model.hidden,
    "MLP width": lambda model: model.mlp,
    "vocabulary": lambda model: model.vocabulary,
    "bytes": lambda model: model.bytes,
}


def models(results: RunResults) -> Table:
    """Target, donor and draft side by side, and how the draft differs from its donor."""
    donor, draft = results.donor, results.draft
    every = {"target": results.target, "donor (before)": donor, "draft (after)": draft}
    shown = {title: model for title, model in every.items() if model is not None}
    rows: list[list[Cell | Value]] = [
        ["path", *(model.path for model in shown.values())],
        ["architecture", *(model.architecture for model in shown.values())],
    ]
    for label, of in SIZES.items():
        form = "bytes" if label == "bytes" else ""
        rows.append([label, *(Cell(of(model), form) for model in shown.values())])
    if donor is None:
        return Table(["", *shown], rows, results.command)
    same = "same" if donor.architecture == draft.architecture else "changed"
    sizes = [(of(donor), of(draft)) for of in SIZES.values()]
    changes: list[Cell | Value] = [Cell(new / old - 1, "%") if old and new != old else "same" for old, new in sizes]
    for row, change in zip(rows, ["", same, *changes], strict=True):
        row.append(change)
    return Table(["", *shown, "donor → draft"], rows, results.command)


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
        "KL before, nats": lambda one: Cell(one.kl_before, "significant"),
        "KL after": lambda one: Cell(one.kl_after, "significant"),
    }
    return table_of(results.cuts, columns, results.command)


def sparsity(report: SparsityReport, command: str) -> list[Table]:
    """How a penalty spread over the layers and, for single weights, over the tensors."""
    details = report.details
    if details.by_layer is not None:
        layers: list[Row] = [[layer, Cell(share, "%")] for layer, share in enumerate(details.by_layer)]
        tensors: list[Row] = [[name, Cell(share, "%")] for name, share in (details.by_tensor or {}).items()]
        return [Table(["layer", "zero weights"], layers, command), Table(["tensor", "zero weights"], tensors, command)]
    figures = zip(details.removed_zero_share or [], details.lambda_by_layer or [], strict=True)
    rows: list[Row] = [
        [layer, Cell(share, "%"), Cell(strength, "significant")] for layer, (share, strength) in enumerate(figures)
    ]
    return [Table(["layer", "removed neurons that were exactly zero", "mean λ of the ramp"], rows, command)]


def parts(training: TrainingSummary, command: str) -> Table:
    """The parts of the training."""
    columns: Columns[TrainedPart] = {
        "part": lambda one: one.name,
        "steps": lambda one: f"{one.first + 1}–{one.first + one.steps}",
        "peak rate": lambda one: Cell(one.rate, "significant"),
        "loss": lambda one: ", ".join(f"{weight:g} {name}" for name, weight in one.loss.items()),
    }
    return table_of(training.parts, columns, command)


def ends(steps: list[TrainingStep], command: str) -> Table:
    """The first and the last step of the training."""
    first, last = steps[0], steps[-1]
    rows: list[Row] = [
        [label, *(Cell(figure(step), "significant") for step in (first, last))] for label, figure in TRAINED.items()
    ]
    return Table(["", f"step {first.step}", f"step {last.step}"], rows, command)


def texts(results: RunResults) -> list[Table]:
    """The splits of the corpus, and the prompts and answers by class and mode."""
    corpus, answers = results.corpus, results.answers
    assert corpus is not None
    columns: Columns[tuple[str, SplitTexts]] = {
        "split": lambda one: one[0],
        "documents": lambda one: one[1].documents,
        "tokens of given text": lambda one: one[1].tokens,
        "prompts": lambda one: one[1].prompts,
    }
    splits = [("train", corpus.train), ("validation", corpus.validation), ("test", corpus.test)]
    asked, own = _by_class(corpus.train.asked), {} if answers is None else _by_class(answers.by_class)
    rows: list[Row] = [
        [name, *_counted(asked.get(name)), *_counted(own.get(name))] for name in dict.fromkeys([*asked, *own])
    ]
    heads = ["train prompts", "prompts", "their tokens", "answers kept", "their tokens"]
    return [table_of(splits, columns, results.command), *([Table(heads, rows, results.command)] if rows else [])]


def _by_class(counts: Iterable[TextCount]) -> dict[str, TextCount]:
    return {", ".join(part for part in (one.label, one.mode) if part) or "all": one for one in counts}


def _counted(count: TextCount | None) -> list[Value]:
    return [None, None] if count is None else [count.texts, count.tokens]


def questions(sources: list[AskedQuestions], command: str) -> Table:
    """The questions that the target wrote itself: how many, and how varied."""
    columns: Columns[AskedQuestions] = {
        "self-asked questions": lambda one: f"{one.file}, T {one.temperature:g}, top-p {one.top_p:g}",
        "wanted": lambda one: one.wanted,
        "texts written": lambda one: one.asked,
        "usable": lambda one: one.usable,
        "used": lambda one: one.kept,
        "median tokens": lambda one: Cell(one.median_tokens, ".1f"),
        "90th percentile": lambda one: Cell(one.most_tokens, ".1f"),
        "different words": lambda one: Cell(one.distinct[0], "%"),
        "2-grams": lambda one: Cell(one.distinct[1], "%"),
        "3-grams": lambda one: Cell(one.distinct[2], "%"),
        "repeats": lambda one: Cell(one.repeated, "%"),
    }
    return table_of(sources, columns, command)


def files(export: ExportReport) -> Table:
    """The GGUF files, and how closely llama.cpp reproduces their models' distributions and tokens."""

    def of_parity(of: Callable[[Parity], Value], form: str = "") -> Callable[[ExportedFile], Cell]:
        return lambda one: Cell(None if one.parity is None else of(one.parity), form)

    def mismatches(one: ExportedFile) -> Cell:
        wrong = None if one.parity is None else len(one.parity.tokenizer_mismatches)
        return Cell(wrong, bad=bool(wrong))

    columns: Columns[ExportedFile] = {
        "file": lambda one: one.path,
        "model": lambda one: one.model,
        "type": lambda one: one.outtype,
        "bytes": lambda one: Cell(one.bytes, "bytes"),
        "positions": of_parity(lambda parity: parity.positions),
        MEASURES["top1_agreement"]: of_parity(lambda parity: parity.top1_agreement, "%"),
        "mean |Δ log p|": of_parity(lambda parity: parity.mean_abs_dlogprob, "significant"),
        "max |Δ log p|": of_parity(lambda parity: parity.max_abs_dlogprob, "significant"),
        "tokenizer texts": of_parity(lambda parity: parity.tokenizer_texts),
        "mismatches": mismatches,
    }
    note = "Each file in llama.cpp against its Hugging Face model on the same positions."
    return table_of(export.files, columns, export.command, note=note)

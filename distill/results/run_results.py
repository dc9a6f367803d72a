"""Everything that a run has measured, gathered for the report page and the model card."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from distill.models.model_files import ModelSizes
from distill.results.cut_results import Change, Comparison, SparsityReport
from distill.results.evaluation_results import EvaluationReport
from distill.results.export_results import ExportReport
from distill.results.speedup_results import SpeedupReport
from distill.results.text_results import AnswerTexts, CorpusTexts, QuestionTexts
from distill.results.training_results import Evaluation, TrainingStep, TrainingSummary
from distill.tables import size


@dataclass(frozen=True)
class Parent:
    """The run whose draft a refreshed run went on from."""

    generation: int
    run: str
    digest: str


@dataclass(frozen=True)
class RunResults:
    """All results of a run; None or empty for stages that have not run. `config` is the resolved recipe.

    `command` made the run; `machine` is what `distill.machine.machine` says of this one; `steps` and `evaluated` are of
    its training. `donor` is what the draft was cut from. `left_out` are the stages that the recipe's run does not have,
    with the reason; `held_out` the answers of its held-out stages, by split.
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
    parent: Parent | None = None
    compared: Comparison | None = None
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
    held_out: dict[str, AnswerTexts] = field(default_factory=dict)

    @property
    def stages_not_run(self) -> list[str]:
        """The measuring stages that have not run, and `train` where no step is recorded; none of `left_out`."""
        stages = {
            "train": bool(self.steps),
            "eval": self.evaluation is not None,
            "export": self.export is not None,
            "speedup": self.speedup is not None,
        }
        return [name for name, there in stages.items() if not there and name not in self.left_out]

    @property
    def machine_words(self) -> str:
        """Processor, cores and memory."""
        machine = self.machine
        return f"{machine['cpu']}, {machine['cores']} cores, {size(machine['memory_bytes'])} memory"

    @property
    def software_words(self) -> str:
        """The versions that figures depend on."""
        machine = self.machine
        return f"Python {machine['python']}, torch {machine.get('torch')}, transformers {machine.get('transformers')}"

"""What a training records: lines of metrics.jsonl and training.json as dataclasses."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from distill.files import Figure, Result, from_json, has_form

# How the acceptance of weights was measured: by decoding, or on stored distributions.
DECODED, STORED = "decoded rounds", "acceptance probability on stored distributions"

ACCEPTANCE_STAGE = "acceptance"  # of the lines on evaluated weights


@dataclass(frozen=True)
class TrainingStep:
    """One training step: means per token of its batch, the pace so far and the peak memory."""

    step: int
    loss: Figure
    forward_kl: Figure = math.nan
    cross_entropy: Figure = math.nan
    agreement: Figure = math.nan
    rate: Figure = math.nan
    tokens: int = 0
    tokens_per_second: Figure = math.nan
    memory_bytes: int | None = None
    time: str | None = None


@dataclass(frozen=True)
class EvaluatedWeights:
    """Weights whose drafts were measured on validation prompts, as `measure` names: DECODED or STORED.

    Decoded: the conditional `acceptance`, accepted ÷ reached, in so many `rounds`, and `expected_acceptance` on
    texts that are the same for all weights of a training, which compares them more sharply. Stored: Σ min(p, q) at
    so many `positions` of the target's answers, at least `acceptance` and at most `most`, as a store holds likeliest
    tokens alone.
    """

    step: int
    acceptance: float
    tokens_per_round: Figure = math.nan
    rounds: int = 0
    expected_acceptance: Figure = math.nan
    measure: str = DECODED
    positions: int = 0
    most: Figure = math.nan

    @property
    def words(self) -> str:
        """Its figures."""
        if self.measure == STORED:
            return (
                f"acceptance probability on stored distributions between {self.acceptance:.3f} and {self.most:.3f} at "
                f"{self.positions} positions of validation answers, nothing decoded"
            )
        return (
            f"conditional acceptance {self.acceptance:.3f}, {self.tokens_per_round:.2f} tokens per round on validation "
            "prompts"
        )


@dataclass(frozen=True)
class Evaluation(EvaluatedWeights):
    """An evaluation with the tokens that had counted in the loss, and the drafted tokens that were accepted and reached
    in each prompt's text, from which an interval follows. Unknown in lines of older versions."""

    tokens: int | None = None
    accepted: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)


REMEDY = (  # for `TrainingSummary.warning`
    "train longer (train.steps) on more answers (answers.prompts), try half of train.rate, or judge on more "
    "validation prompts (train.acceptance.prompts, and as many questions or documents)"
)


@dataclass(frozen=True)
class TrainingSummary:
    """training.json: how many steps were trained, the peak rate, the losses with their weights, and the weights that
    were taken; `best` is None where none were chosen."""

    steps: int
    processes: int
    rate: float
    loss: dict[str, float]
    best: EvaluatedWeights | None

    @property
    def warning(self) -> str | None:
        """What to know where the weights from before the first step were taken; None where training helped."""
        if self.best is None or self.best.step != 0:
            return None
        on = "validation prompts" if self.best.measure == DECODED else "validation answers (stored distributions)"
        return (
            f"Training did not help: no weights that it made were accepted more often on {on} than those "
            f"before its first step, so the draft is the untrained cut ({self.best.words})."
        )


def _of(lines: Iterable[dict[str, Any]], stage: str, kind: type[Result]) -> list[Result]:
    """The lines of a stage that name a step, by step; the last line of a repeated step counts."""
    last = {line["step"]: line for line in lines if line.get("stage") == stage and has_form(line, {"step": int})}
    return [from_json(last[step], kind, "metrics.jsonl") for step in sorted(last)]


def training_steps(lines: Iterable[dict[str, Any]]) -> list[TrainingStep]:
    """The training steps among the lines of metrics.jsonl, in order."""
    return _of((line for line in lines if "loss" in line), "train", TrainingStep)


def evaluated_weights(lines: Iterable[dict[str, Any]]) -> list[Evaluation]:
    """The evaluations of weights among the lines of metrics.jsonl, in order."""
    return _of(lines, ACCEPTANCE_STAGE, Evaluation)


def trained_tokens(steps: Iterable[TrainingStep]) -> int:
    """Tokens that counted in the loss, over all steps."""
    return sum(step.tokens for step in steps)

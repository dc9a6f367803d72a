"""L1 while fine-tuning: MLP neurons (group lasso) or single weights shrink to exactly zero and then stay zero.

A run has three phases: dense (the first `start` of the steps), ramp (a proximal step after every optimizer step),
debias (λ = 0, zeros stay zero, the rest learns on). The proximal step is decoupled from the gradient as
weight decay is in AdamW, so its threshold is rate·λ·√|g|, in units of what Adam moves a group in a step.

Schedule of λ, one per layer (one for all single weights). Let d be the norm of the largest group that is still to be
removed, and r the ramp steps that remain, this one included: λ = d / (r·rate·√|g|).
The threshold is then d/r: undisturbed, d falls to zero in a straight line; where the loss holds neurons back, d stays
above that line and λ rises until d is zero. λ depends on the weights and the step alone, so a resume changes nothing,
and no learning rate is too small. Every layer reaches its count in the last step of the ramp, or earlier.

`group_lasso` and `unstructured` take these steps. Legend: |g| elements of a group.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch

from distill.errors import RecipeError

LEAST_RAMP = 10  # proximal steps; fewer would be pruning in one go
HAIR = 1 + 1e-6  # on λ, so that rounding does not leave the last group alive


def require_ramp(steps: int, embedding_steps: int, ramp: float) -> None:
    """Raise RecipeError where a training of so many steps has no room for a ramp behind those of its embeddings."""
    if embedding_steps > (1 - ramp) * steps:
        raise RecipeError(
            f"train.embedding_steps is {embedding_steps} of {steps} steps, and a ramp of {ramp:g} "
            "(train.sparsity.ramp) follows them",
            f"ask for at most {math.floor((1 - ramp) * steps)}, or for a shorter ramp",
        )
    if round(ramp * steps) < LEAST_RAMP:
        raise RecipeError(
            f"train.steps is {steps}, and a ramp of {ramp:g} (train.sparsity.ramp) needs {LEAST_RAMP} steps",
            f"train for at least {math.ceil(LEAST_RAMP / ramp)} steps, or ramp over a larger share of them",
        )


class Penalty(ABC):
    """The phases of a penalty over the steps of a training; `start` and `ramp` are shares of them.

    Raises RecipeError for a ramp of too few steps, or one that ends after the training.
    """

    def __init__(self, steps: int, start: float, ramp: float) -> None:
        if not 0 <= start <= 1 - ramp:
            raise RecipeError(
                f"sparsity: start is {start}; with a ramp of {ramp} it leaves no room", f"ask for 0 to {1 - ramp:g}"
            )
        self.ramp = round(ramp * steps)  # steps
        if self.ramp < LEAST_RAMP:
            raise RecipeError(
                f"sparsity: {steps} steps are too few: a ramp of {ramp} needs {LEAST_RAMP} proximal steps",
                f"train for at least {math.ceil(LEAST_RAMP / ramp)} steps, or ramp over a larger share of them",
            )
        self.dense = min(round(start * steps), steps - self.ramp)  # steps
        self.step = 0
        self.frozen = False

    @torch.no_grad()
    def after_step(self, step: int, rate: float) -> dict[str, Any]:
        """The proximal step that follows optimizer step `step` (from 0), taken at `rate`; figures for the log.

        phase: dense, ramp or debias; lambda: the mean over layers; and those of `_zero_shares`.
        """
        assert step == self.step, f"step {step} after {self.step} steps"
        self.step += 1
        left = 0 if self.step <= self.dense else max(0, self.dense + self.ramp + 1 - self.step)  # with this one
        strength = 0.0
        if self.frozen:
            self._hold()
        elif left:
            strength = self._press(left, rate)
        shares, reached = self._zero_shares()
        if left and not self.frozen and (left == 1 or reached):
            self._freeze()
        return {"phase": "debias" if self.frozen else "ramp" if left else "dense", "lambda": strength, **shares}

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The state beyond the model, for JSON."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`, after the model's weights."""

    @abstractmethod
    def _press(self, left: int, rate: float) -> float:
        """One proximal step, with `left` steps of the ramp to go; λ, the mean over layers."""

    @abstractmethod
    def _zero_shares(self) -> tuple[dict[str, float], bool]:
        """How much is zero, for the log, and whether that is all that is to go."""

    @abstractmethod
    def _freeze(self) -> None:
        """Fix what is removed."""

    @abstractmethod
    def _hold(self) -> None:
        """Put back to zero what the optimizer's moments have moved, although its gradient is zero."""

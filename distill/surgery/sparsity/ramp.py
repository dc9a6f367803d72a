"""L1 while fine-tuning: MLP neurons (group lasso) or single weights shrink to exactly zero and then stay zero.

A run has three phases: dense (the first `start` of the steps), ramp (a proximal step after every optimizer step),
debias (λ = 0, zeros stay zero, the rest learns on). The proximal step is decoupled from the gradient as
weight decay is in AdamW, so its threshold is rate·λ·√|g|, in units of what Adam moves a group in a step.

Schedule of λ, one per layer (one for all single weights). Let d be the norm of the largest group that is still to be
removed, that is of the wanted-th smallest, and r the ramp steps that remain, this one included: λ = d / (r·rate·√|g|).
The threshold is then d/r: undisturbed, d falls to zero in a straight line; where the loss holds neurons back, d stays
above that line and λ rises until d is zero. λ depends on the weights and the step alone, so a resume changes nothing,
and no learning rate is too small. Every layer reaches its count in the last step of the ramp, or earlier.

`group_lasso` and `unstructured` take these steps. Legend: |g| elements of a group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from distill.errors import RecipeError

LEAST_RAMP = 10  # proximal steps; fewer would be pruning in one go
HAIR = 1 + 1e-6  # on λ, so that rounding does not leave the last group alive


@dataclass(frozen=True)
class Schedule:
    """Steps of the dense phase and of the ramp."""

    dense: int
    ramp: int

    def left(self, done: int) -> int:
        """Ramp steps that remained before the last of `done` steps; 0 outside the ramp."""
        return max(0, self.dense + self.ramp + 1 - done) if done > self.dense else 0


def plan(steps: int, start: float, ramp: float) -> Schedule:
    """The phases of a run; `start` and `ramp` are shares of its steps. Raises RecipeError for impossible ones."""
    if not 0 < ramp <= 1:
        raise RecipeError(f"sparsity: ramp is {ramp}; it is a share of the steps", "ask for 0 < ramp <= 1, say 0.2")
    if not 0 <= start <= 1 - ramp:
        raise RecipeError(
            f"sparsity: start is {start}; with a ramp of {ramp} it leaves no room", f"ask for 0 to {1 - ramp:g}"
        )
    count = round(ramp * steps)
    if count < LEAST_RAMP:
        raise RecipeError(
            f"sparsity: {steps} steps are too few: a ramp of {ramp} needs {LEAST_RAMP} proximal steps",
            f"train for at least {math.ceil(LEAST_RAMP / ramp)} steps, or ramp over a larger share of them",
        )
    return Schedule(min(round(start * steps), steps - count), count)


def require_float32(parameters: Sequence[Tensor]) -> None:
    """Raise RecipeError unless all are fp32: shorter types round a ramp's small steps away."""
    wrong = {str(p.dtype) for p in parameters} - {"torch.float32"}
    if wrong:
        raise RecipeError(
            f"sparsity: proximal steps need float32 weights, these are {', '.join(sorted(wrong))}",
            "load the model in float32; mixed precision may still compute in bfloat16",
        )

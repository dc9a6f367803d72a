"""The steps of both models while texts are decoded, noted by models that stand before them.

Legend: m tokens of a step.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from torch import Tensor

from distill.engines.model import AroundModel, Ints, Logits, Model
from distill.engines.torch.model import TorchLogits
from distill.engines.torch.static import StaticTorchModel


class Step(NamedTuple):
    """One call of a model: tokens committed before it, tokens taken, when it began and how many seconds it took."""

    depth: int
    tokens: int
    started: float
    seconds: float


class WatchedModel(AroundModel):
    """A model of one row whose steps are noted in `steps`."""

    def __init__(self, model: Model, steps: list[Step]) -> None:
        super().__init__(model)
        self.steps = steps

    def extend(
        self, tokens: Ints, counts: Ints | None = None, parents: Ints | None = None, want: Ints | None = None
    ) -> Logits:
        """See `Model`."""
        # What watching takes is the model's time rather than the round's own: between steps it would show more.
        started, depth = time.perf_counter(), self.model.lengths[0]
        logits = self.model.extend(tokens, counts, parents, want)
        self.steps.append(Step(depth, len(tokens), started, time.perf_counter() - started))
        return logits


class WatchedStaticModel(StaticTorchModel):
    """A static model whose steps are noted. It shares its whole state with `model`: either can go on with a text.

    It is a static model itself, because rounds on a device drive those by `step`, past `extend`.
    """

    __slots__ = ("steps",)

    def __init__(self, model: StaticTorchModel, steps: list[Step]) -> None:
        self.__dict__ = model.__dict__
        self.steps = steps

    def step(
        self, ids: Tensor, counts: Tensor, starts: Tensor, most: int, keep: Tensor | int = 0, prompt: bool = False
    ) -> Tensor:
        """See `StaticTorchModel`."""
        started, depth = time.perf_counter(), self.lengths[0]
        logits = super().step(ids, counts, starts, most, keep, prompt)
        self.steps.append(Step(depth, ids.shape[1], started, time.perf_counter() - started))
        return logits

    def extend(
        self, tokens: Ints, counts: Ints | None = None, parents: Ints | None = None, want: Ints | None = None
    ) -> TorchLogits:
        """See `Model`; a chain is taken by `step`, a tree is not."""
        started, depth = time.perf_counter(), self.lengths[0]
        logits = super().extend(tokens, counts, parents, want)
        if parents is not None:
            self.steps.append(Step(depth, len(tokens), started, time.perf_counter() - started))
        return logits


class Watch:
    """The steps of a target and a draft since they were last `taken`."""

    def __init__(self) -> None:
        self.target: list[Step] = []
        self.draft: list[Step] = []

    def models(self, target: Model, draft: Model) -> tuple[Model, Model]:
        """Both models with their steps noted here; one that is both notes as the target."""
        watched = _watched(target, self.target)
        return watched, watched if draft is target else _watched(draft, self.draft)

    def take(self) -> tuple[list[Step], list[Step]]:
        """The steps of target and draft, but for those that read a prompt; they are forgotten here."""
        taken = tuple([step for step in steps if step.depth] for steps in (self.target, self.draft))
        self.target.clear()
        self.draft.clear()
        return taken[0], taken[1]


def _watched(model: Model, steps: list[Step]) -> Model:
    return WatchedStaticModel(model, steps) if isinstance(model, StaticTorchModel) else WatchedModel(model, steps)

"""The steps of both models while texts are decoded, noted by models that stand before them.

Legend: m tokens of a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from distill.engines.model import AroundModel, Ints, Logits, Model
from distill.engines.torch.model import TorchModel
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


class _Noting:
    """A model that notes its steps and shares its whole state with `model`: either can go on with a text.

    It is of the model's own class, because rounds on a device drive those by `step` and `grow`, past `extend`.
    """

    steps: list[Step]
    lengths: list[int]

    def __init__(self, model: Any, steps: list[Step]) -> None:
        self.__dict__ = model.__dict__
        self.steps = steps

    def _noted(self, tokens: int, call: Callable[[], Any]) -> Any:
        started, depth, noted = time.perf_counter(), self.lengths[0], len(self.steps)
        logits = call()
        if len(self.steps) == noted:  # `extend` may call `step` or `grow`
            self.steps.append(Step(depth, tokens, started, time.perf_counter() - started))
        return logits

    def step(self, ids: Tensor, *arguments: Any) -> Any:
        """See `StaticTorchModel`."""
        call = super().step  # type: ignore[misc]
        return self._noted(ids.shape[1], lambda: call(ids, *arguments))

    def grow(self, ids: Tensor, *arguments: Any) -> Any:
        """See `StaticTorchModel`."""
        call = super().grow  # type: ignore[misc]
        return self._noted(len(ids), lambda: call(ids, *arguments))

    def extend(
        self, tokens: Ints, counts: Ints | None = None, parents: Ints | None = None, want: Ints | None = None
    ) -> Any:
        """See `Model`."""
        call = super().extend  # type: ignore[misc]
        return self._noted(len(tokens), lambda: call(tokens, counts, parents, want))


class WatchedStaticModel(_Noting, StaticTorchModel):
    """A static model whose steps are noted."""

    __slots__ = ("steps",)


class WatchedGrowingModel(_Noting, TorchModel):
    """A model with a growing cache on an accelerator whose steps are noted."""

    __slots__ = ("steps",)


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
    if isinstance(model, StaticTorchModel):
        return WatchedStaticModel(model, steps)
    if isinstance(model, TorchModel) and model.steps_on_device:
        return WatchedGrowingModel(model, steps)
    return WatchedModel(model, steps)

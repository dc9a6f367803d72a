"""The steps of both models while texts are decoded, noted by models that stand before them.

Legend: m tokens of a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from distill.engines.model import Ints, Model


class Step(NamedTuple):
    """One call of a model: tokens committed before it, tokens taken, when it began and how many seconds it took."""

    depth: int
    tokens: int
    started: float
    seconds: float


class _Noting:
    """A model of one row that notes its steps and shares its whole state with `model`: either can go on with a text.

    It is made of the model's own class, because rounds on a device drive those by `step` and `grow`, past `extend`.
    """

    noted: list[Step]
    lengths: list[int]

    def __init__(self, model: Any, steps: list[Step]) -> None:
        self.__dict__ = model.__dict__
        self.noted = steps

    def _noted(self, tokens: int, call: Callable[[], Any]) -> Any:
        # What watching takes is the model's time rather than the round's own: between steps it would show more.
        started, depth, before = time.perf_counter(), self.lengths[0], len(self.noted)
        logits = call()
        if len(self.noted) == before:  # `extend` may call `step` or `grow`
            self.noted.append(Step(depth, tokens, started, time.perf_counter() - started))
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


def _watched(model: Any, steps: list[Step]) -> Any:
    kind = type(model)
    return type(f"Watched{kind.__name__}", (_Noting, kind), {"__slots__": ("noted",)})(model, steps)

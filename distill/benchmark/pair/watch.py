"""The steps of both models while texts are decoded: what each took, and what a round costs beside them.

Legend: m tokens of a step, n drafted tokens, T target, D draft.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from distill.benchmark.prepared import Prepared
from distill.models.base import Model
from distill.models.static.static_model import StaticTorchModel
from distill.speculative.decode import Decoded
from distill.speculative.draft import Drafter


class Step(NamedTuple):
    """One call of a model: tokens committed before it, tokens taken, when it began and how many seconds it took."""

    depth: int
    tokens: int
    started: float
    seconds: float


class Text(NamedTuple):
    """A decoded text with the steps that made it, those that read the prompt left out."""

    decoded: Decoded
    target: list[Step]
    draft: list[Step]


@dataclass
class Watch:
    """The steps of target and draft, and the texts of each configuration in the order of their prompts."""

    target: list[Step] = field(default_factory=list)
    draft: list[Step] = field(default_factory=list)
    texts: dict[str, list[Text]] = field(default_factory=dict)

    def note(self, title: str, decoded: Decoded) -> None:
        """Give the steps since the last text to this one."""
        kept = [[step for step in steps if step.depth] for steps in (self.target, self.draft)]
        self.texts.setdefault(title, []).append(Text(decoded, *kept))
        self.target.clear()
        self.draft.clear()


@contextmanager
def watched(target: Model, draft: Model) -> Iterator[Watch]:
    """Note every step of both models; one that is both notes as the target."""
    watch = Watch()
    models = [(target, watch.target)] + ([] if draft is target else [(draft, watch.draft)])
    for model, steps in models:
        _note_steps(model, steps)
    try:
        yield watch
    finally:
        for model, _ in models:
            del vars(model)[_calls(model)]


def _calls(model: Model) -> str:
    """The method through which all steps of a model go: rounds on a device drive static models past `extend`."""
    return "step" if isinstance(model, StaticTorchModel) else "extend"


def _note_steps(model: Any, steps: list[Step]) -> None:
    call = getattr(model, _calls(model))

    def noted(tokens: Any, *arguments: Any, **named: Any) -> Any:
        # What watching takes is the model's time rather than the round's own: between steps it would show more.
        started = time.perf_counter()
        depth, count = model.lengths[0], _count(tokens)
        found = call(tokens, *arguments, **named)
        steps.append(Step(depth, count, started, time.perf_counter() - started))
        return found

    setattr(model, _calls(model), noted)


def _count(tokens: Sequence[int] | Tensor) -> int:
    """Tokens of a step: a list of them, or columns [R, m] on a device."""
    return tokens.shape[1] if isinstance(tokens, Tensor) else len(tokens)


@dataclass(frozen=True)
class Watched(Prepared):
    """A configuration whose texts go to a watch, with their steps."""

    watch: Watch = field(default_factory=Watch)

    @classmethod
    def of(cls, one: Prepared, watch: Watch) -> Watched:
        """The configuration, watched."""
        return cls(one.configuration, one.rules, one.make, one.lossy, one.length, watch)

    def decode(self, target: Model, drafter: Drafter | None, prompt: Sequence[int], limit: int) -> Decoded:
        """As a prepared configuration's, with the steps noted."""
        found = super().decode(target, drafter, prompt, limit)
        self.watch.note(self.title, found)
        return found

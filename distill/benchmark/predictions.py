"""Speedups of fixed lengths, predicted from costs that are timed between the texts."""

from __future__ import annotations

from collections.abc import Sequence

from distill.benchmark.prepared import Prepared
from distill.errors import DataError
from distill.models.base import Model
from distill.speculative.costs.paid import PaidCosts, PaidMeter


class Predictions:
    """Times rounds of both models between the texts of those configurations whose speedup can be predicted.

    These are greedy chains of a fixed length, drafted by a model of the target's vocabulary. Rounds are timed behind
    `others`, prompts as long as `prompts`, in the minutes of the texts: the machine does not stay the same from one
    minute to the next. `refused` is why nothing is predicted, None where something is.
    """

    def __init__(
        self,
        target: Model,
        draft: Model,
        prompts: Sequence[Sequence[int]],
        others: Sequence[Sequence[int]],
        new_tokens: int,
        prepared: Sequence[Prepared],
    ) -> None:
        self.refused: str | None = None
        self._prompt = round(sum(map(len, prompts)) / len(prompts))
        chains = [one for one in prepared if one.configuration.drafter == "draft" and not one.sampled]
        fixed = [one for one in chains if one.configuration.length_rule == "fixed"]
        self._lengths = {one.title: one.length for one in fixed if one.length}
        self._costs: PaidCosts | None = None
        self._meter: PaidMeter | None = None
        if self._lengths:
            try:
                self._meter = PaidMeter(target, draft, others, [*self._lengths.values()], (False,), new_tokens)
            except DataError as error:
                self.refused = error.what

    def text(self) -> None:
        """Time one text."""
        if self._meter is not None:
            self._meter.text()

    def finish(self) -> None:
        """Time what is still missing."""
        if self._meter is None:
            return
        try:
            self._meter.until(1)
            self._costs = self._meter.costs()
        except DataError as error:
            self.refused = error.what

    def speedup(self, title: str, accepted: Sequence[float], tokens: float) -> float | None:
        """The speedup predicted for a configuration at an acceptance by position, for texts of so many tokens; None
        where nothing is predicted."""
        length = self._lengths.get(title)
        if length is None or self._costs is None or not accepted:
            return None
        return self._costs.predicted_speedup(length, accepted, self._prompt, tokens)

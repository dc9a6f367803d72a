"""Speedups of fixed lengths, predicted from costs that were timed between the texts and the acceptance in them.

They say whether the costs that length rules reckon with are those that the texts paid: acceptance is the texts' own.
"""

from __future__ import annotations

from collections.abc import Sequence

from distill.benchmark.pair.watch import Watch
from distill.benchmark.prepared import Prepared
from distill.errors import DataError
from distill.models.base import Model
from distill.speculative.costs.curve import accepted_by_position
from distill.speculative.costs.paid import PaidCosts, PaidMeter, prompts_as_long


class Predictions:
    """Times rounds of both models between the texts of those configurations whose speedup can be predicted.

    These are greedy chains of a fixed length, drafted by a model of the target's vocabulary. `rates` are synthetic
    acceptance rates, None where the texts' own counts. Rounds are timed behind `others`, made as long as the prompts.
    `refused` is why nothing is predicted, None where something is.
    """

    def __init__(
        self,
        target: Model,
        draft: Model,
        prompts: Sequence[Sequence[int]],
        others: Sequence[Sequence[int]],
        new_tokens: int,
        prepared: Sequence[Prepared],
        rates: Sequence[float] | None = None,
    ) -> None:
        self._new_tokens, self._rates = new_tokens, rates
        self.refused: str | None = None
        self._prompt = round(sum(map(len, prompts)) / len(prompts))
        self._wanted = {one.title: one.length or 0 for one in prepared if one.length and self._predicts(one)}
        self._costs: PaidCosts | None = None
        self._meter: PaidMeter | None = None
        if self._wanted:
            try:
                texts = prompts_as_long(others, [len(prompt) for prompt in prompts])
                self._meter = PaidMeter(target, draft, texts, [*self._wanted.values()], (False,), new_tokens)
            except DataError as error:
                self.refused = error.what

    @staticmethod
    def _predicts(one: Prepared) -> bool:
        configuration = one.configuration
        return configuration.drafter == "draft" and configuration.length_rule == "fixed" and not one.sampled

    def text(self, watch: Watch) -> None:
        """Time one text; the watch, which notes the steps of other texts, forgets its steps."""
        if self._meter is not None:
            self._meter.text()
            watch.target.clear()
            watch.draft.clear()

    def finish(self, watch: Watch) -> None:
        """Time what is still missing."""
        if self._meter is None:
            return
        try:
            self._meter.until(1)
            self._costs = self._meter.costs()
        except DataError as error:
            self.refused = error.what
        watch.target.clear()
        watch.draft.clear()

    def speedup(self, title: str, watch: Watch) -> float | None:
        """The speedup predicted for a configuration with the acceptance of its texts; None where there is none."""
        length = self._wanted.get(title)
        if length is None or self._costs is None:
            return None
        rounds = [(r.drafted, r.accepted) for text in watch.texts[title] for r in text.decoded.rounds]
        rates = accepted_by_position(rounds)
        if self._rates is not None:
            rates = [self._rates[min(position, len(self._rates) - 1)] for position in range(length)]
        return self._costs.predicted_speedup(length, rates, self._prompt, self._new_tokens)

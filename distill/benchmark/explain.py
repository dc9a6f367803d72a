"""Sentences that trace a measured speedup to the cost curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distill.results.speedup_results import ChosenLength, Measurement, PairMeasured, RoundCosts
from distill.speculative.cost import StepCosts


@dataclass(frozen=True)
class Costs:
    """Measured seconds: T(m) by m, D(1), and the costs of whole rounds where a configuration reads them."""

    target: Mapping[int, float]
    draft: float
    of_rounds: StepCosts | None

    def as_result(self, pair: PairMeasured) -> RoundCosts | None:
        """For speedup.json; None where no configuration read costs of rounds."""
        if self.of_rounds is None:
            return None
        costs = self.of_rounds
        return RoundCosts(
            pair.pair, pair.backend, pair.grown, list(costs.target), costs.draft, costs.draft_two, costs.overhead
        )


def explain(costs: Costs, sweep: Sequence[Measurement], chosen: ChosenLength) -> list[str]:
    """Sentences that trace the measured speedup to the cost curve, every number in them measured."""
    single = costs.target[1]
    best = max((row for row in sweep if row.length), key=lambda row: row.tokens_per_second)
    length = best.length or 0
    bound = (length + 1) / (costs.target[length + 1] / single + length * costs.draft / single)
    where = f"{chosen.pair}, {chosen.backend}"
    sentences = [
        f"{where}: T(1) = {single * 1e3:.2f} ms, T({length + 1}) = {costs.target[length + 1] / single:.2f} T(1), "
        f"a draft step costs {costs.draft / single:.2f} T(1). If every drafted token were accepted, {length} a round "
        f"would give {bound:.2f}x; with {best.tokens_per_round or 0:.2f} tokens a round it gave {best.speedup:.2f}x "
        "over the whole request, prompt included."
    ]
    if bound < 1:
        sentences.append(f"{where}: at this cost ratio no draft, however good, makes {length} drafted tokens pay.")
    if chosen.length == 0:
        sentences.append(
            f"{where}: on the prompts used for choosing, plain decoding was fastest: do not speculate here."
        )
    else:
        sentences.append(
            f"{where}: {chosen.length} drafted tokens a round were chosen on the even prompts; on the odd ones "
            f"they give {chosen.speedup:.2f}x [{chosen.speedup_low:.2f}, {chosen.speedup_high:.2f}]."
        )
    return sentences

"""Sentences that trace a measured speedup to the cost curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from distill.results.speedup_results import ChosenLength, Measurement, PairMeasured, RoundCosts
from distill.speculative.costs.curve import StepCosts
from distill.speculative.costs.paid import PaidCosts


@dataclass(frozen=True)
class Costs:
    """Measured seconds: T(m) by m and D(1) of one model's steps alone, and what rounds of both pay.

    `paid` was measured before any text was timed, for the rules and trees that read it; `during` between the texts that
    the prediction is compared with, of fixed lengths alone.
    """

    target: Mapping[int, float]
    draft: float
    paid: PaidCosts
    during: PaidCosts

    @property
    def of_rounds(self) -> StepCosts:
        """What length rules and trees reckon with."""
        return self.paid.step_costs()

    def as_result(self, pair: PairMeasured) -> RoundCosts:
        """For speedup.json."""
        paid = self.paid
        return RoundCosts(
            pair.pair,
            pair.backend,
            pair.grown,
            paid.token,
            list(paid.verify),
            list(paid.verify.values()),
            list(astuple(paid.by_argmax)),
            list(astuple(paid.by_distribution)),
            paid.target_prompt,
            paid.draft_prompt,
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
    alone, paid = costs.target[length + 1] + length * costs.draft, costs.during.round_seconds(length, 0.0)
    sentences.append(
        f"{where}: a round of {length} drafted tokens pays {paid * 1e3:.2f} ms; its steps, timed with one model "
        f"alone, take {alone * 1e3:.2f} ms. The rest goes to two models taking turns, reading logits and rolling back."
    )
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

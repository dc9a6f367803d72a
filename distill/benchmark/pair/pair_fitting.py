"""What configurations of any pair read from other prompts: costs, calibrations and chosen trees."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distill.benchmark.calibrate import (
    calibrate,
    load_calibrations,
    load_ranks,
    record_rounds,
    save_calibration,
    tally_ranks,
)
from distill.benchmark.pair.wanted import Wanted
from distill.benchmark.speedup import TREE_ROUNDS
from distill.benchmark.tree_choice import Choice, choose_trees
from distill.models.loaded import LoadedPair
from distill.recipe import Recipe
from distill.speculative.calibration import Calibration
from distill.speculative.configured import NO_COSTS
from distill.speculative.costs.curve import StepCosts
from distill.speculative.costs.paid import measure_paid, prompts_as_long
from distill.speculative.rules import Rules


@dataclass(frozen=True)
class Fitted:
    """What was measured on the other prompts."""

    costs: StepCosts = NO_COSTS
    calibrations: dict[str, Calibration] | None = None
    table: dict[str, object] | None = None
    choices: tuple[Choice, ...] = ()


def fit(recipe: Recipe, wanted: Wanted, pair: LoadedPair, prompts: list[list[int]], lengths: Sequence[int]) -> Fitted:
    """Costs, calibrations and trees, measured on prompts that no figure is of.

    Costs are taken behind prompts of `lengths` tokens, those of the prompts that are measured.
    """
    if not wanted.fitted:
        return Fitted()
    target, draft, new_tokens = pair.target, pair.draft, recipe.speedup.new_tokens
    most = max(recipe.profile.max_tokens - 1, *(one.most for one in wanted.configurations))
    texts_as_long = prompts_as_long(prompts, lengths)
    paid = measure_paid(target, draft, texts_as_long, range(1, most + 1), recipe.profile.repeats)
    costs = paid.step_costs()
    if not any(one.learns or one.chosen for one in wanted.configurations):
        return Fitted(costs)
    rules = Rules(ends=pair.ends)
    recorded = record_rounds(target, draft, prompts, new_tokens, rules)
    table = calibrate(recorded, wanted.command, tally_ranks(draft, prompts, recorded, rules))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calibration.json"
        save_calibration(path, table)
        calibrations, ranks = load_calibrations(path), load_ranks(path)
    texts = [(prompt, recorder.tokens) for prompt, recorder in zip(prompts, recorded, strict=True)]
    choices = choose_trees(
        recipe,
        wanted.others,
        target,
        draft,
        texts,
        TREE_ROUNDS,
        pair.ends,
        costs,
        calibrations,
        ranks.rates(),
    )
    return Fitted(costs, calibrations, table | {"split": "prompts of the same files"}, tuple(choices))

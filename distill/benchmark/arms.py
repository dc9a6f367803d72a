"""A recipe's trials as arms of the comparison: who decodes how, and the row that each leaves in the table."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from distill.benchmark.compare import PLAIN, Arm, Trial, Way, summarise_trials
from distill.models.base import Model
from distill.recipe import Recipe
from distill.recipe import Trial as Settings
from distill.sampler import Sampler
from distill.speculative.calibration import Calibration
from distill.speculative.configured import Tree, lossy_reason, make_drafter, trial_sampler
from distill.speculative.cost import StepCosts
from distill.speculative.decode import Rules

PLAIN_SAMPLED = "plain, sampled"


def make_arms(
    recipe: Recipe,
    ways: Sequence[Settings],
    draft: Model,
    ends: Sequence[int],
    costs: StepCosts,
    fitted: Mapping[str, Calibration],
    trees: Mapping[str, Tree] | None = None,
) -> list[Arm]:
    """An arm per trial and, where some are sampled, one that samples plainly, which their speed is compared with.

    `trees` are what was settled of those trials, by title, that leave it to be chosen.
    """
    arms = []

    def rules(title: str, sampler: Sampler, verifier: str) -> Rules:
        return Rules(sampler, verifier, ends, random.Random(f"{recipe.seed}/{title}").random)

    if any(way.sampler == "recipe" for way in ways):
        arms.append(Arm(PLAIN_SAMPLED, rules(PLAIN_SAMPLED, Sampler.of(recipe.sampler), "token")))
    for way in ways:
        sampler = trial_sampler(way, recipe.sampler)
        own = rules(way.title, sampler, way.verified_by)
        make = partial(make_drafter, way, draft, sampler, own.random, costs, fitted, (trees or {}).get(way.title))
        arms.append(Arm(way.title, own, make, lossy_reason(way, sampler) is not None))
    return arms


def trial_rows(
    recipe: Recipe,
    ways: Sequence[Settings],
    arms: Sequence[Arm],
    trials: Sequence[Trial],
    verdicts: Mapping[Way, Mapping[str, int]],
) -> list[dict[str, Any]]:
    """A row per arm: speed beside the plain run of the same sampler, τ, acceptance, and what distribution the text
    follows.

    `identical`, `excused` and `different` count texts against the greedy plain run; None where texts are sampled.
    """
    settings = {way.title: way for way in ways}
    rows = []
    for arm in arms:
        sampled = arm.rules.sampler.temperature > 0
        base: Way = PLAIN_SAMPLED if sampled and arm.title != PLAIN_SAMPLED else PLAIN
        both = summarise_trials(
            trials, [arm.title], recipe.eval.resamples, recipe.eval.confidence, arm.title if arm.make is None else base
        )
        row = both[-1]
        way = settings.get(arm.title)
        reason = None if way is None else lossy_reason(way, arm.rules.sampler)
        row |= {
            "plain_tokens_per_second": both[0]["tokens_per_second"],
            "drafter": None if way is None else way.drafter,
            "rule": None if way is None else way.rule,
            "verifier": None if way is None else way.verified_by,
            "sampler": arm.rules.sampler.describe() if sampled else "greedy",
            "lossy": reason is not None,
            "distribution": "the target's" if reason is None else f"LOSSY: {reason}",
        }
        told = {} if sampled else verdicts[arm.title]
        row |= {name: told.get(name) for name in ("identical", "excused", "different")}
        rows.append(row)
    return rows

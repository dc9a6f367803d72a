"""From a recipe's words to the drafter, the length rule and the verifier that they name, and whether they are lossless.

Legend: γ or n drafted tokens of a round.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from distill.errors import DataError, RecipeError
from distill.models.base import Model
from distill.models.hugging_face import load_config
from distill.models.torch_model import shortest_window
from distill.recipe import Recipe, SamplerSettings, Trial
from distill.sampler import Sampler
from distill.speculative.calibration import Calibration, Logistic, Power
from distill.speculative.cost import StepCosts
from distill.speculative.draft import Drafter, FirstThen, LookupDrafter, ModelDrafter
from distill.speculative.expected_value import ExpectedValue
from distill.speculative.lengths import (
    AcceptedRatio,
    BetaFilter,
    Entropy,
    Fixed,
    LengthRule,
    LossyProbabilityFloor,
    PlusMinus,
    ProbabilityFloor,
    StartContinue,
)
from distill.speculative.trees.shape import Shape
from distill.speculative.trees.tree import spread
from distill.speculative.trees.tree_drafter import TreeDrafter
from distill.speculative.verify import Random, refusal

ONLINE = {Power: 0.02, Logistic: 0.05}  # step of a calibration that goes on learning
NO_COSTS = StepCosts((1.0, 1.0), 0.0, 0.0)
CHAINS_ONLY = "draft chains: another drafter than tree"
Tree = int | Shape  # what is settled of a tree before it decodes: how many nodes, or its shape


def trial_sampler(trial: Trial, settings: SamplerSettings) -> Sampler:
    """What a trial decodes under: greedy, or the recipe's sampler."""
    return Sampler(temperature=0) if trial.sampler == "greedy" else Sampler.of(settings)


def calibration_of(trial: Trial, fitted: Mapping[str, Calibration]) -> Calibration:
    """A copy of its own of the calibration that a trial names; q itself where it was not fitted."""
    found = copy.deepcopy(fitted.get(trial.calibration, Power()))
    if trial.online and isinstance(found, Power | Logistic):
        found.rate = ONLINE[type(found)]
    return found


def make_rule(trial: Trial, costs: StepCosts, fitted: Mapping[str, Calibration]) -> LengthRule:
    """The length rule in its first state; only the expected-value rule reads `costs` and `fitted`."""
    most, floor = trial.length, trial.floor
    if trial.rule == "p_min":
        return ProbabilityFloor(most, trial.p_min)
    if trial.rule == "p_min-after":
        return LossyProbabilityFloor(most, trial.p_min)
    if trial.rule == "start-continue":
        return StartContinue(most, trial.start, trial.more)
    if trial.rule == "plus-minus":
        return PlusMinus(length=min(5, most), most=most)
    if trial.rule == "ratio":
        return AcceptedRatio(length=min(4, most), most=most)
    if trial.rule == "entropy":
        return Entropy(most) if floor is None else Entropy(most, floor)
    if trial.rule == "beta":
        return BetaFilter(most) if floor is None else BetaFilter(most, floor)
    if trial.rule == "expected-value":
        return ExpectedValue(costs, calibration_of(trial, fitted), most=most)
    return Fixed(most)


def make_drafter(
    trial: Trial,
    draft: Model,
    sampler: Sampler,
    random: Random,
    costs: StepCosts = NO_COSTS,
    fitted: Mapping[str, Calibration] | None = None,
    tree: Tree | None = None,
) -> Drafter:
    """The drafter that a trial names, as at the start of a session; under `match` a draft says its best token.

    `tree` is what was settled for a trial that leaves it to be `chosen`. ValueError for a tree under a repetition
    penalty.
    """
    fitted = fitted or {}
    if trial.drafter == "lookup":
        return LookupDrafter(trial.length)
    if trial.widths is not None:
        shape = Shape.of_widths(trial.widths)
        distinct = trial.verified_by == "distinct"
        return TreeDrafter(draft, sampler, random, len(shape), shape=shape, distinct=distinct)
    if trial.drafter == "tree":
        calibrate = spread(calibration_of(trial, fitted)) if trial.learns and fitted else None
        tree = trial.nodes if tree is None else tree
        assert tree is not None and isinstance(tree, Shape) == trial.ranked, f"nobody settled `{trial.title}`"
        if isinstance(tree, Shape):
            return TreeDrafter(draft, sampler, random, len(tree), shape=tree, best=True)
        return TreeDrafter(draft, sampler, random, tree, depth=trial.length, calibrate=calibrate)
    argmax = sampler.temperature == 0 or trial.verified_by == "match"
    model = ModelDrafter(draft, make_rule(trial, costs, fitted), sampler, random, argmax)
    return model if trial.drafter == "draft" else FirstThen(LookupDrafter(trial.length, shortest=2), model)


def lossy_reason(trial: Trial, sampler: Sampler) -> str | None:
    """Why this trial would change the target's distribution; None when it is lossless. ValueError for an impossible
    pair."""
    nobody: Any = None  # no model is asked: how tokens come about does not hang on it
    some = (Shape(()) if trial.ranked else 1) if trial.chosen else None  # nor on how large a tree is
    drafter = make_drafter(trial, nobody, sampler, lambda: 0.0, tree=some)
    return refusal(trial.verified_by, drafter.kind, sampler.temperature, drafter.tree)


def require_trees(target: Model, draft: Model) -> None:
    """Raise DataError where one of the models takes no trees: before any text is decoded with a tree."""
    for role, model in (("target", target), ("draft", draft)):
        if model.max_leaves < 1:
            raise DataError(
                f"the {role} takes no trees of drafted tokens: some of its layers do not see the whole context, or its "
                "attention takes no mask of ours (it is neither sdpa nor eager)",
                CHAINS_ONLY,
            )


def check_trees(recipe: Recipe, donor: str) -> None:
    """Raise RecipeError where a trial's trees are too much for the target or the donor in PyTorch, as configured.

    Reads configurations alone; `require_trees` asks the loaded models.
    """
    trial = next((trial for trial in _trials(recipe) if trial.drafter == "tree"), None)
    if trial is None or "pytorch" not in recipe.speedup.backends:
        return
    for role, reference in (("target", recipe.target.model), ("donor", donor)):
        config = load_config(reference).get_text_config()
        context, window = config.max_position_embeddings, shortest_window(config)
        if window < context:
            raise RecipeError(
                f"speedup.trials: `{trial.title}` cannot be decoded: the {role} {reference} takes no trees, some of "
                f"its layers see {window} tokens of a context of {context}",
                CHAINS_ONLY,
            )


def _trials(recipe: Recipe) -> list[Trial]:
    grown = recipe.speedup.grown_trials if recipe.speedup.grown is not None else ()
    return list(dict.fromkeys([*recipe.speedup.trials, *grown]))


def check_trials(recipe: Recipe) -> list[str]:
    """A line for each trial that is lossy and allowed to be; raises RecipeError where it is not allowed, or impossible.

    Loads nothing, so that a recipe is refused before hours are spent on it.
    """
    lines = []
    for trial in _trials(recipe):
        if trial.ranked and trial.nodes is not None and trial.nodes >= recipe.profile.max_tokens:
            raise RecipeError(
                f"speedup.trials: `{trial.title}` is shaped by costs of {trial.nodes + 1} tokens a step, and "
                f"profile.max_tokens is {recipe.profile.max_tokens}",
                f"profile.max_tokens={trial.nodes + 1}, or fewer nodes",
            )
        try:
            reason = lossy_reason(trial, trial_sampler(trial, recipe.sampler))
        except ValueError as error:
            raise RecipeError(f"speedup.trials: `{trial.title}` cannot be decoded: {error}", "change it") from None
        if reason is None:
            continue
        if not recipe.speedup.allow_lossy:
            raise RecipeError(
                f"speedup.trials: `{trial.title}` would change the target's distribution: {reason}",
                "change it, or ask for it as lossy: speedup.allow_lossy=true, or --allow-lossy",
            )
        lines.append(f"LOSSY trial `{trial.title}`: {reason}")
    return lines

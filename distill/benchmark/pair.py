"""The measurement of one pair by one backend: plain against speculative decoding on the same prompts.

Stage `speedup` makes it for each pair and backend of a run (speedup.py), `distill speedup --target A --draft B` for any
two models (any_pair.py). Legend: γ drafted tokens of a round, T target.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from distill.benchmark.calibrate import Calibrated, read_calibrations, read_ranks
from distill.benchmark.compare import TimedText, choose_length, judge_identity, measurements, time_texts
from distill.benchmark.explanations import explain
from distill.benchmark.identity import tie_noise
from distill.benchmark.predictions import Predictions
from distill.benchmark.prepared import Fitted, Prepared, prepare_all
from distill.benchmark.rounds import prompt_seconds, round_figures, time_steps
from distill.benchmark.tree_choice import Choice, choose_trees
from distill.benchmark.watch import Watch
from distill.errors import RecipeError
from distill.models.base import Model
from distill.models.loaded import LoadedPair
from distill.recipe import Configuration, Recipe
from distill.recipe.configuration import PLAIN
from distill.results.speedup_results import ChosenLength, Measurement, PairMeasured, RoundFigures, StepFigures
from distill.speculative.calibration import Calibration
from distill.speculative.configured import NO_COSTS, require_trees
from distill.speculative.costs.curve import accepted_by_position, shorter_rounds
from distill.speculative.costs.paid import PaidCosts, measure_paid, prompts_as_long
from distill.speculative.other_vocabulary.drafters import Reader

LONGEST_OF_NONE = 4  # tokens drafted, for which ties are judged where no length is swept


@dataclass(frozen=True)
class Comparison:
    """What is compared with plain decoding, and on which prompts.

    `sweep` are greedy configurations of fixed lengths, `others` any. `spare_prompts` are others than `prompts`: costs
    are timed behind them. `calibrated` is None where no configuration reads it. `evaluated` are rounds (drafted,
    accepted) of each prompt, in order, whose acceptance predicts speedups; None: that of the texts themselves.
    `reader` is a draft of another vocabulary. Of a run (`of_run`), rounds are timed beforehand even where no
    configuration reads their costs.
    """

    label: PairMeasured
    prompts: list[list[int]]
    spare_prompts: list[list[int]]
    sweep: tuple[Configuration, ...]
    others: tuple[Configuration, ...]
    calibrated: Calibrated | None = None
    evaluated: list[list[tuple[int, int]]] | None = None
    reader: Reader | None = None
    of_run: bool = False

    @property
    def configurations(self) -> tuple[Configuration, ...]:
        """All that draft."""
        return *self.sweep, *self.others


@dataclass(frozen=True)
class ComparedPair:
    """What a comparison gave: its figures, in the order of `prepared`, and all they were computed from.

    `noise` is the logit difference below which two tokens count as tied; `paid` are the costs that were timed
    beforehand.
    `explanations` are of the fastest configuration, of the trees that were chosen, and of what was not predicted.
    """

    measurements: list[Measurement]
    chosen: ChosenLength | None
    rounds: list[RoundFigures]
    steps: StepFigures
    noise: float
    paid: PaidCosts | None
    fitted: Fitted
    choices: dict[str, Choice]
    prepared: list[Prepared]
    texts: list[TimedText]
    explanations: list[str]


def measure_pair(recipe: Recipe, pair: LoadedPair, comparison: Comparison) -> ComparedPair:
    """Measure a loaded pair; `recipe` holds the settings: sampler, seed, speedup, profile and intervals.

    Raises RecipeError for a configuration that would change the target's distribution, unless the recipe allows that,
    and DataError for trees in models that take none and for contexts without room.
    """
    if any(one.branches for one in comparison.configurations):
        require_trees(pair.target, pair.draft)
    prompts, new_tokens, reader = comparison.prompts, recipe.speedup.new_tokens, comparison.reader
    spare = prompts_as_long(comparison.spare_prompts, [len(prompt) for prompt in prompts])
    paid, fitted, choices = _fit(recipe, pair, comparison, spare)
    small: Model = pair.draft if reader is None else reader.model
    watch = Watch()
    target, draft = watch.models(pair.target, small)
    drafting: Model | Reader = draft
    if reader is not None:
        drafting = copy.copy(reader)
        drafting.model = draft
    prepared = _prepared(recipe, comparison, pair.ends, drafting, fitted, choices)
    predictions = Predictions(pair.target, pair.draft, prompts, spare, new_tokens, prepared)
    texts = time_texts(
        target,
        draft if reader is None else target,  # a draft of another vocabulary checks its own room
        prompts,
        new_tokens,
        prepared,
        f"{pair.backend}, prompts",
        predictions.text,
        watch,
    )
    predictions.finish()
    plain = next(text.decoded.tokens for text in texts if text.title == PLAIN.title)
    lengths = [one.max_length for one in comparison.sweep] or [LONGEST_OF_NONE]
    others = _others_drafted(comparison.others, choices)
    noise, sizes = tie_noise(recipe, pair.backend, pair.target, prompts[0], plain, lengths, others)
    identities = judge_identity(pair.target, prompts, texts, prepared, noise, sizes)
    rows = measurements(texts, prepared, identities, comparison.label)
    rows = [
        with_prediction(row, one, comparison, texts, choices, paid, predictions)
        for row, one in zip(rows, prepared, strict=True)
    ]
    chosen = None
    if comparison.sweep:
        chosen = choose_length(texts, comparison.sweep, comparison.label)
    steps = time_steps(texts, pair.target, None if small is pair.target else small, recipe.speedup.repeats)
    waits = pair.hugging_face is None or pair.hugging_face[0].device.type == "cpu"
    rounds = [round_figures(one, texts, steps, waits) for one in prepared]
    explanations = explain(steps, rows, rounds, chosen, prompt_seconds(texts))
    if comparison.calibrated is not None:
        counted = {one.configuration.title: row.tokens_per_round for row, one in zip(rows, prepared, strict=True)}
        explanations += [
            choice.sentence(comparison.calibrated.of_texts, counted[title]) for title, choice in choices.items()
        ]
    if predictions.refused is not None:
        explanations.append(f"No speedup is predicted: {predictions.refused}.")
    return ComparedPair(
        measurements=rows,
        chosen=chosen,
        rounds=rounds,
        steps=steps,
        noise=noise,
        paid=paid,
        fitted=fitted,
        choices=choices,
        prepared=prepared,
        texts=texts,
        explanations=explanations,
    )


def largest_tree(recipe: Recipe, configurations: Sequence[Configuration]) -> int:
    """The most nodes of a tree that these configurations may verify; 0 without trees."""
    trees = [one for one in configurations if one.branches]
    return max((one.drawn_nodes or one.nodes or recipe.speedup.max_tokens - 1 for one in trees), default=0)


def _others_drafted(others: Sequence[Configuration], choices: Mapping[str, Choice]) -> list[int]:
    """The most tokens that each greedy configuration beside the sweep drafts in a round: of a tree, given or chosen,
    its nodes, and of a lookup before it, its length."""
    sizes: set[int] = set()
    for one in others:
        if one.sampler == "greedy":
            tree = one.drawn_nodes or one.nodes or (choices[one.title].nodes if one.title in choices else 0)
            sizes |= {tree} if one.drafter == "tree" else {tree, one.max_length}
    return sorted(sizes - {0})


def _fit(
    recipe: Recipe, pair: LoadedPair, comparison: Comparison, spare: Sequence[Sequence[int]]
) -> tuple[PaidCosts | None, Fitted, dict[str, Choice]]:
    """What configurations read that no measured prompt may decide: costs of rounds, calibrations, trees by title.

    Rounds are timed of the lengths that may be drafted, behind `spare` prompts.
    """
    configurations, calibrated = comparison.configurations, comparison.calibrated
    settings, chooses = recipe.speedup, any(one.needs_tree_choice for one in configurations)
    priced = [one.max_length for one in configurations if one.needs_costs]
    paid, costs = None, NO_COSTS
    if priced or comparison.of_run:
        lengths = [one.max_length for one in comparison.sweep]
        if priced:
            longest = max(*lengths, *priced, settings.max_tokens - 1 if chooses else 1)
            lengths = [*range(1, longest + 1)]
        paid = measure_paid(pair.target, pair.draft, spare, lengths, settings.repeats, recipe.speedup.new_tokens)
        costs = paid.step_costs()
    calibrations: Mapping[str, Calibration] = {}
    if calibrated is not None and any(one.needs_calibration for one in configurations):
        calibrations = read_calibrations(calibrated.table, calibrated.source)
    choices: dict[str, Choice] = {}
    if calibrated is not None and chooses:
        rates = read_ranks(calibrated.table, calibrated.source).rates()
        target, draft, texts = pair.target, pair.draft, calibrated.texts
        found = choose_trees(recipe, comparison.others, target, draft, texts, pair.ends, costs, calibrations, rates)
        choices = {choice.title: choice for choice in found}
    return paid, Fitted(costs, calibrations, {title: choice.tree for title, choice in choices.items()}), choices


def _prepared(
    recipe: Recipe,
    comparison: Comparison,
    ends: Sequence[int],
    draft: Model | Reader,
    fitted: Fitted,
    choices: Mapping[str, Choice],
) -> list[Prepared]:
    """Plain decoding, the sweep and all other configurations, under titles that name chosen trees."""
    prepared = prepare_all(recipe, comparison.sweep, comparison.others, draft, ends, fitted)
    refused = next((one for one in prepared if one.lossy is not None and not recipe.speedup.allow_lossy), None)
    if refused is not None:
        raise RecipeError(
            f"`{refused.title}` would change the target's distribution: {refused.lossy}", "change it, or --allow-lossy"
        )
    named = []
    for one in prepared:
        if one.title in choices:
            one = replace(one, name=choices[one.title].title_with_tree)
        named.append(one)
    return named


def with_prediction(
    row: Measurement,
    one: Prepared,
    comparison: Comparison,
    texts: Sequence[TimedText],
    choices: Mapping[str, Choice],
    paid: PaidCosts | None,
    predictions: Predictions,
) -> Measurement:
    """The measurement with its prediction, and the size of a chosen tree.

    A tree was chosen by what validation text accepts. Its prediction is, as those of fixed lengths, of the tokens that
    these rounds gave: it tells whether the costs are right, not whether the prompts are alike.
    """
    choice = choices.get(one.configuration.title)
    tokens = fmean(len(text.decoded.tokens) for text in texts if text.title == one.base)
    if choice is not None:
        row = replace(row, nodes=choice.nodes)
        if one.configuration.drafter != "tree" or paid is None:  # a lookup's rounds cost other than the tree's
            return row
        if not choice.nodes or row.tokens_per_round is None:
            return replace(row, predicted=1.0)
        prompt = round(fmean(map(len, comparison.prompts)))
        speedup = paid.speedup_of_rounds(choice.seconds, row.tokens_per_round, prompt, tokens)
        return replace(row, predicted=speedup)
    return replace(row, predicted=predictions.speedup(one.title, _accepted(comparison, one, texts), tokens))


def _accepted(comparison: Comparison, one: Prepared, texts: Sequence[TimedText]) -> list[float]:
    """The acceptance by position that predicts a configuration's speedup; empty where it is not known."""
    length = one.length or 0
    if comparison.evaluated is None:
        rounds = [(r.drafted, r.accepted) for t in texts if t.title == one.title for r in t.decoded.rounds]
        return accepted_by_position(rounds)
    rates = accepted_by_position([r for own in comparison.evaluated for r in shorter_rounds(own, length)])
    return rates if len(rates) >= length else []

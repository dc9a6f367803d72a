"""The measurement of one pair by one backend: plain against speculative decoding on the same prompts.

Stage `speedup` makes it for each pair and backend of a run (speedup.py), `distill speedup --target A --draft B` for any
two models (any_pair.py). Legend: γ drafted tokens of a round, T target.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from distill.decoding.calibration import Calibration
from distill.decoding.configured import NO_COSTS, require_trees
from distill.decoding.costs import accepted_by_position, shorter_rounds
from distill.decoding.other_vocabulary import Reader
from distill.decoding.round_costs import PaidCosts, PaidMeter, measure_paid, prompts_as_long
from distill.engines.loaded import LoadedPair
from distill.engines.model import Model
from distill.errors import DataError, RecipeError
from distill.measuring.calibrate import Calibrated, Choice, choose_trees, read_calibrations, read_ranks
from distill.measuring.compare import (
    Fitted,
    Prepared,
    TimedText,
    choose_length,
    judge_identity,
    measurements,
    prepare_all,
    prompt_seconds,
    round_figures,
    time_steps,
    time_texts,
)
from distill.measuring.identity import tie_noise
from distill.measuring.speedup_results import ChosenLength, Measurement, PairMeasured, RoundFigures, StepFigures
from distill.measuring.watch import Watch
from distill.recipe import Configuration, Recipe
from distill.recipe.configuration import PLAIN, PLAIN_SAMPLED

# ── Why a pair is faster than plain decoding, or not, and what to change: sentences whose every number was measured
# ──
# Legend: a round costs plain steps, the seconds of a token of plain decoding.

HARDLY_DRAFTS = 0.2  # verified tokens of a round, less the one that plain decoding has: below, hardly any is drafted
LARGEST_ERROR = 1.25  # times the predicted speedup, or its inverse: predictions are within a tenth on a quiet machine
LEAST_GAIN = 1.02  # a change that raises the speedup by less is no advice

# What might change, what it would mean, and how to go about it.
ADVICE = {
    "acceptance": (
        "with every drafted token accepted",
        "train longer, or on answers to prompts like those that are served",
    ),
    "draft": (
        "with a draft that costs nothing",
        "take a smaller draft: fewer layers, q8_0 instead of f16, or, in PyTorch only, a trimmed head",
    ),
    "verification": (
        "if verifying cost no more than a plain step",
        "draft fewer tokens a round, or serve the target in a type or build whose steps over several tokens cost less "
        "(`distill profile`)",
    ),
    "rest": (
        "with nothing spent beside the models",
        "take a larger target, or more prompts at once: these models are too small for what surrounds them",
    ),
}


def explain(
    steps: StepFigures,
    rows: Sequence[Measurement],
    rounds: Sequence[RoundFigures],
    chosen: ChosenLength | None,
    prompts: Mapping[str, float],
) -> list[str]:
    """Sentences about the fastest configuration that drafts, and about the length that was chosen.

    `prompts` are the seconds of a prompt by configuration: a draft reads it too.
    """
    drafting = [row for row in rows if not row.is_plain]
    if not drafting:
        return ["Nothing was drafted."]
    by_title = {figures.configuration: figures for figures in rounds}
    best = max(drafting, key=lambda row: row.speedup)
    base = PLAIN_SAMPLED if best.sampler is not None and PLAIN_SAMPLED.title in by_title else PLAIN
    plain, figures = by_title[base.title].seconds, by_title[best.configuration]
    sentences = ["The texts end with their first token: no round was timed."]
    if plain and figures.seconds:
        sentences = [
            _costs(steps, best, figures, plain),
            *_verdict(best, figures, plain, prompts),
            *_advice(best, drafting, by_title, plain),
        ]
    if chosen is not None and chosen.length:
        # Of a single odd prompt there is no interval.
        interval = f" [{chosen.speedup_low:.2f}, {chosen.speedup_high:.2f}]"
        sentences.append(
            f"Cross-check: of the fixed lengths {chosen.length} is the fastest on every other prompt, and gives on the "
            f"rest {chosen.speedup:.2f}×{interval if chosen.speedup_low < chosen.speedup_high else ''}."
        )
    elif chosen is not None:
        sentences.append("Cross-check: plain decoding beats the fixed lengths on every other prompt.")
    return sentences


def _costs(steps: StepFigures, best: Measurement, figures: RoundFigures, plain: float) -> str:
    """What a step of each model and a round of the fastest configuration cost, and what the round gives."""
    alone, draft = steps.target[1], steps.draft.get(1)
    head = f"One token takes the target {alone * 1e3:.2f} ms at depth {steps.depth}"
    if draft is not None:
        head += f", the draft {draft / alone:.2f} of that"
    parts = "not told apart: the device computes on after a call returns"
    if figures.target_seconds is not None:
        paid = (figures.target_seconds, figures.draft_seconds or 0.0, figures.overhead_seconds or 0.0)
        target, drafted, rest = (seconds / plain for seconds in paid)
        parts = (
            f"the target's step over {figures.verified:.1f} tokens {target:.2f}, {figures.draft_steps:.1f} draft steps "
            f"{drafted:.2f}, the rest {rest:.2f}"
        )
    return (
        f"{head}. Fastest: `{best.configuration}`, {best.speedup:.2f}× over the whole request. A round costs "
        f"{figures.seconds / plain:.2f} plain steps ({parts}) and gives {figures.tokens:.2f} tokens."
    )


def _verdict(best: Measurement, figures: RoundFigures, plain: float, prompts: Mapping[str, float]) -> list[str]:
    """Whether the speed is far from its prediction, and why it is no gain where it is none."""
    sentences = []
    if best.predicted is not None and not 1 / LARGEST_ERROR < best.speedup / best.predicted < LARGEST_ERROR:
        sentences.append(
            f"Costs and acceptance predict {best.predicted:.2f}×, which is far from it: another program used the "
            "machine (`distill doctor` names it), or the prompts are too few."
        )
    if best.speedup_low > 1:
        return sentences
    paid = figures.tokens >= figures.seconds / plain
    if paid and best.speedup >= 1:
        why = "It is faster, but not by more than these prompts vary: measure more of them (--count; in a recipe, "
        return [*sentences, why + "speedup.prompts)."]
    if _hardly_drafts(figures):
        rule = ": its rule expects no gain from more" if best.rule == "expected-value" else ""
        why = f"it verifies {figures.verified:.2f} tokens a round, so it hardly drafts{rule}"
    elif paid:
        why = (
            f"its rounds are fast enough, but reading the prompt takes {prompts[best.configuration] * 1e3:.1f} ms with "
            f"the draft, {prompts[PLAIN.title] * 1e3:.1f} ms without"
        )
    else:
        accepted = "" if best.acceptance is None else f" (accepted: {best.acceptance:.0%})"
        why = f"a round gives fewer tokens than the plain steps that it costs{accepted}"
    return [*sentences, f"It is no faster than plain decoding: {why}."]


def _hardly_drafts(figures: RoundFigures) -> bool:
    return figures.verified < 1 + HARDLY_DRAFTS and (figures.most or 0) < 1 + HARDLY_DRAFTS


def _advice(
    best: Measurement, drafting: Sequence[Measurement], by_title: Mapping[str, RoundFigures], plain: float
) -> list[str]:
    """The one change that raises the speedup of rounds most: of the fastest configuration or, where that hardly drafts
    and so has little to gain, of the fastest fixed length."""
    fixed = [one for one in drafting if one.length and one.sampler == best.sampler]
    hardly = _hardly_drafts(by_title[best.configuration])
    subject = max(fixed, key=lambda one: one.speedup) if hardly and fixed else best
    figures = by_title[subject.configuration]
    changes = _changed(subject, figures, plain)
    now = figures.tokens / (figures.seconds / plain) if figures.seconds else 0.0
    name = max(changes, key=lambda name: changes[name], default="")
    if not changes or changes[name] < LEAST_GAIN * now:
        return []
    change, todo = ADVICE[name]
    gain = f"would give {changes[name]:.2f}× instead of {now:.2f}×"
    if changes[name] < 1:
        return [
            f"No change of one thing makes drafting faster than plain decoding here. The most, {change}, {gain}. What "
            "to do: decode plainly here; `distill plan` says what another type, build or machine would have to cost."
        ]
    return [f"What to change: {change}, the rounds of `{subject.configuration}` {gain}. So {todo}."]


def _changed(measured: Measurement, figures: RoundFigures, plain: float) -> dict[str, float]:
    """The speedup of the rounds with one thing changed: everything accepted, a draft at no cost, verifying as cheap as
    a plain step, nothing spent beside the models. Without acceptance where tokens are looked up, which no training
    changes; empty where the parts of a round were not timed."""
    if figures.target_seconds is None:
        return {}
    paid = (figures.target_seconds, figures.draft_seconds or 0.0, figures.overhead_seconds or 0.0)
    target, draft, rest = (seconds / plain for seconds in paid)
    cost, tokens = target + draft + rest, figures.tokens
    if cost <= 0:  # texts of one token have no rounds
        return {}
    most = {} if figures.most is None else {"acceptance": max(figures.most, tokens) / cost}
    return (most if measured.drafter != "lookup" else {}) | {
        "draft": tokens / (cost - draft),
        "verification": tokens / (min(target, 1.0) + draft + rest),
        "rest": tokens / (cost - max(rest, 0.0)),
    }


# ── Speedups of fixed lengths, predicted from costs that are timed between the texts ──


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


# ── The measurement of one pair by one backend: plain against speculative decoding on the same prompts ──

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

"""The measurement of one pair by one backend: plain against speculative decoding on the same prompts.

Stage `speedup` makes it for each pair and backend of a run and `distill speedup TARGET DRAFT` for any two
models (speedup.py). Legend: γ drafted tokens of a round, T target.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import fmean

from distill.decoding.calibration import Calibration
from distill.decoding.configured import NO_COSTS, Fitted, require_trees
from distill.decoding.costs import ENOUGH, PaidCosts, accepted_by_position, shorter_rounds
from distill.decoding.ngrams import NGramTable
from distill.decoding.other_vocabulary import DraftReader
from distill.decoding.round_costs import PROMPTS, RoundCostMeter, keep_costs, measure_paid, prompts_as_long
from distill.decoding.rules import characters
from distill.engines.loaded import LoadedPair
from distill.engines.model import Model, Watch
from distill.errors import DataError
from distill.measuring.compare import (
    PairSettings,
    TimedConfiguration,
    TimedText,
    by_class,
    by_depth,
    choose_length,
    judge_identity,
    measurements,
    prepare_all,
    prompt_seconds,
    round_figures,
    rounds_of,
    time_steps,
    time_texts,
)
from distill.measuring.identity import measured_rounding
from distill.measuring.speedup_results import (
    Measurement,
    PairMeasured,
    Sample,
    Segment,
    SpeedupPart,
)
from distill.measuring.speedup_tables import explain
from distill.recipe import Configuration
from distill.recipe.configuration import PLAIN
from distill.recipe.measuring import fixed_length

SAMPLES = 3
LONGEST_OF_NONE = 4  # tokens drafted, for which ties are judged where no length is swept
EVERY = 3  # prompts, rounds are timed for predictions


@dataclass(frozen=True)
class PairTexts:
    """On which prompts a pair is measured, and what is known of them.

    Costs are timed behind `spare` prompts. `fits` are calibrations by name. `evaluated` are rounds (drafted, accepted)
    of each prompt, in order, whose acceptance predicts speedups; None: that of the texts themselves. `classes` are
    those of the prompts, where they are to be told apart. `written` gives the text of a prompt, where samples are
    wanted. `table` holds n-grams of the target's other texts, where there are any.
    """

    prompts: list[list[int]]
    spare: list[list[int]]
    fits: Mapping[str, Calibration] = field(default_factory=dict)
    evaluated: list[list[tuple[int, int]]] | None = None
    classes: Sequence[str] = ()
    written: Callable[[list[int]], str] | None = None
    table: NGramTable | None = None


def measure_pair(
    settings: PairSettings,
    pair: LoadedPair,
    label: PairMeasured,
    given: PairTexts,
    reader: DraftReader | None = None,
) -> SpeedupPart:
    """Measure a loaded pair; `reader` is a draft of another vocabulary.

    Raises RecipeError for a configuration that would change the target's distribution, unless the settings allow that,
    and DataError for trees in models that take none and for contexts without room.
    """
    if any(one.branches for one in settings.configurations):
        require_trees(pair.target, pair.draft)
    prompts, new_tokens = given.prompts, settings.speedup.new_tokens
    spare = prompts_as_long(given.spare, [len(prompt) for prompt in prompts])
    paid, fitted = _fit(settings, pair, given, spare)
    small: Model = pair.draft if reader is None else reader.model
    watch = Watch()
    target, draft = watch.models(pair.target, small)
    drafting: Model | DraftReader = draft
    if reader is not None:
        drafting = copy.copy(reader)
        drafting.model = draft
    prepared = prepare_all(settings, drafting, pair.ends, fitted)
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
    lengths = [one.max_length for one in settings.sweep] or [LONGEST_OF_NONE]
    others = _others_drafted(settings.others)
    trees = any(one.branches or one.counts_ngrams for one in settings.configurations)
    rounding = measured_rounding(settings.target, pair.backend, pair.target, prompts[0], plain, lengths, others, trees)
    identities = judge_identity(pair.target, prompts, texts, prepared, rounding)
    rows = [
        with_prediction(row, one, given, texts, predictions)
        for row, one in zip(measurements(texts, prepared, identities, label), prepared, strict=True)
    ]
    chosen = choose_length(texts, settings.sweep) if settings.sweep else None
    steps = time_steps(texts, pair.target, None if small is pair.target else small, settings.speedup.repeats)
    waits = pair.hugging_face is None or pair.hugging_face[0].device.type == "cpu"
    rounds = [round_figures(one, texts, steps, waits) for one in prepared]
    explanations = explain(steps, rows, rounds, chosen, prompt_seconds(texts))
    if predictions.refused is not None:
        explanations.append(f"No speedup is predicted: {predictions.refused}.")
    samples = []
    if chosen is not None and given.written is not None:  # of the chosen length; of the fastest where that is plain
        fastest = max((row for row in rows if row.length), key=lambda row: row.tokens_per_second)
        title = fixed_length(chosen.length or fastest.length or 0).title
        own = [text for text in texts if text.title == title]
        samples = sample_texts(given.written, pair.token_bytes, prompts, own)
    return SpeedupPart(
        *label.key,
        measurements=rows,
        chosen=chosen,
        noise=rounding.noise,
        costs=paid,
        steps=steps,
        rounds=rounds,
        explanations=explanations,
        samples=samples,
        by_class=by_class(texts, prepared, given.classes),
        by_depth=by_depth(texts, prepared),
        prompt_seconds=prompt_seconds(texts)[PLAIN.title],
    )


def time_again(
    settings: PairSettings, pair: LoadedPair, part: SpeedupPart, titles: Collection[str], given: PairTexts
) -> list[TimedText]:
    """Decode prompts by the configurations of these titles once more, with the costs that `part` measured."""
    fitted = _fitted(pair, given, part.costs)
    prepared = [one for one in prepare_all(settings, pair.draft, pair.ends, fitted) if one.title in titles]
    target, draft, title = pair.target, pair.draft, f"{part.backend}, prompts of a turn"
    return time_texts(target, draft, given.prompts, settings.speedup.new_tokens, prepared, title)


def _fitted(pair: LoadedPair, given: PairTexts, paid: PaidCosts | None) -> Fitted:
    """What configurations read, from the costs that were measured."""
    costs = NO_COSTS if paid is None else paid.step_costs().of_target(pair.target)
    return Fitted(costs, given.fits, given.table, pair.target.max_leaves)


def _fit(
    settings: PairSettings, pair: LoadedPair, given: PairTexts, spare: Sequence[Sequence[int]]
) -> tuple[PaidCosts | None, Fitted]:
    """The costs of rounds, where configurations read them, and all that they read.

    Rounds are timed of the lengths that may be drafted, behind `spare` prompts.
    """
    counts, paid = settings.speedup, None
    priced = [one.longest_round for one in settings.configurations if one.needs_costs]
    if priced:
        lengths = range(1, max([*(one.max_length for one in settings.sweep), *priced]) + 1)
        paid = measure_paid(pair.target, pair.draft, spare, lengths, counts.repeats, counts.new_tokens)
        keep_costs(pair, len(spare[len(spare) // 2]), paid.step_costs())
    return paid, _fitted(pair, given, paid)


def _others_drafted(others: Sequence[Configuration]) -> list[int]:
    """The most tokens that each greedy configuration beside the sweep drafts in a round: of a tree its nodes, and of a
    lookup before it, its length."""
    sizes: set[int] = set()
    for one in others:
        if one.sampler == "greedy":
            sizes |= {one.most_nodes} if one.drafter == "tree" else {one.most_nodes, one.max_length}
    return sorted(sizes - {0})


def sample_texts(
    written: Callable[[list[int]], str],
    token_bytes: Callable[[int], bytes],
    prompts: Sequence[Sequence[int]],
    texts: Sequence[TimedText],
) -> list[Sample]:
    """The first texts, cut into the draft's accepted tokens and the target's own, for the report.

    A character that several tokens share belongs to the segment of the last of them.
    """
    samples = []
    for text in texts[:SAMPLES]:
        tokens = list(zip(text.decoded.tokens, text.decoded.from_draft, strict=True))
        segments, decoder = [], characters()
        for from_draft, group in groupby(tokens, key=lambda pair: pair[1]):
            piece = "".join(decoder.decode(token_bytes(token)) for token, _ in group)
            segments.append(Segment(piece, "accepted" if from_draft else "target"))
        if segments:
            segments[-1] = Segment(segments[-1].text + decoder.decode(b"", final=True), segments[-1].kind)
        prompt = written(list(prompts[text.prompt]))
        samples.append(Sample(text.title, prompt, segments))
    return samples


# ── Speedups of fixed lengths, predicted from costs that are timed between the texts ──


class Predictions:
    """Times rounds of both models between the texts of those configurations whose speedup can be predicted.

    These are the chains of the greedy sweep, drafted by a model of the target's vocabulary. Rounds are timed behind
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
        prepared: Sequence[TimedConfiguration],
    ) -> None:
        self.refused: str | None = None
        self._prompt = round(sum(map(len, prompts)) / len(prompts))
        chains = [one for one in prepared if one.configuration.drafter == "draft"]
        self._lengths = {one.title: one.length for one in chains if one.length}
        self._costs: PaidCosts | None = None
        self._calls = 0
        self._meter: RoundCostMeter | None = None
        if self._lengths:
            try:
                self._meter = RoundCostMeter(target, draft, others, [*self._lengths.values()], False, new_tokens)
            except DataError as error:
                self.refused = error.what

    def text(self) -> None:
        """Time one text in EVERY calls."""
        if self._meter is not None and self._calls % EVERY == 0:
            self._meter.text()
        self._calls += 1

    def finish(self) -> None:
        """Time what is still missing."""
        if self._meter is None:
            return
        try:
            while self._meter.passes < PROMPTS:  # each is of another length
                self._meter.text()
            self._meter.until(ENOUGH)
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


def with_prediction(
    row: Measurement, one: TimedConfiguration, given: PairTexts, texts: Sequence[TimedText], predictions: Predictions
) -> Measurement:
    """The measurement with its prediction."""
    tokens = fmean(len(text.decoded.tokens) for text in texts if text.title == one.base)
    return replace(row, predicted=predictions.speedup(one.title, _accepted(given, one, texts), tokens))


def _accepted(given: PairTexts, one: TimedConfiguration, texts: Sequence[TimedText]) -> list[float]:
    """The acceptance by position that predicts a configuration's speedup; empty where it is not known."""
    length = one.length or 0
    if given.evaluated is None:
        return accepted_by_position([(r.drafted, r.accepted) for r in rounds_of(texts, one.title)])
    rates = accepted_by_position([r for own in given.evaluated for r in shorter_rounds(own, length)])
    return rates if len(rates) >= length else []

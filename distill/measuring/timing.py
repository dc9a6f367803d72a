"""The measurement of one pair by one backend: plain against speculative decoding on the same prompts.

Stage `speedup` makes it for each pair and backend of a run and `distill speedup --target A --draft B` for any two
models (speedup.py). Legend: γ drafted tokens of a round, T target.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from statistics import fmean

from distill.decoding.batch import decode_batch, plain_batch
from distill.decoding.calibration import Calibration
from distill.decoding.configured import NO_COSTS, Fitted, make_rule, require_trees
from distill.decoding.costs import ENOUGH, PaidCosts, accepted_by_position, shorter_rounds
from distill.decoding.decode import Decoded
from distill.decoding.ngrams import NGramTable
from distill.decoding.other_vocabulary import DraftReader
from distill.decoding.round_costs import PROMPTS, RoundCostMeter, keep_costs, measure_paid, prompts_as_long
from distill.decoding.rules import characters
from distill.decoding.verify import CHAINS, Random
from distill.devices import memory_explained
from distill.engines.loaded import LoadedPair, with_rows
from distill.engines.model import Model, Watch
from distill.engines.torch.model import TorchModel, mask_refusal, model_name, state_refusal
from distill.errors import DataError, RecipeError
from distill.measuring.compare import (
    PairSettings,
    TimedConfiguration,
    TimedText,
    accepted_per_drafted,
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
    BatchFigures,
    Measurement,
    PairMeasured,
    Sample,
    Segment,
    SpeedupPart,
)
from distill.measuring.speedup_tables import explain
from distill.progress import Progress
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
    batches: Sequence[int] = (),
) -> SpeedupPart:
    """Measure a loaded pair; `reader` is a draft of another vocabulary, `batches` are sizes to decode at once.

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
        batches=measure_batches(settings, pair, prompts, batches, prepared, fitted),
        not_batched=not_batched(prepared) if batches else [],
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


# ── Several texts at once, plain and speculative, in PyTorch ──
# Legend: B texts of a batch.

BatchRun = Callable[..., list[Decoded]]  # of prompts, at most so many new tokens, and `randoms`


def require_rows(pair: LoadedPair) -> None:
    """Raise RecipeError where a model cannot decode texts of different lengths at once."""
    for model in (pair.target, pair.draft):
        if isinstance(model, TorchModel) and with_rows(model, 2) is None:
            own, config = model.model, model.model.config
            reason = mask_refusal(config) or state_refusal(type(own), config) or "it does not take our cache of several"
            raise RecipeError(
                f"--batch: {model_name(own)} takes no texts of different lengths: {reason}",
                "leave --batch out",
            )


def not_batched(prepared: Sequence[TimedConfiguration]) -> list[str]:
    """A sentence for each configuration that cannot decode several texts at once."""
    return [
        f"`{one.configuration.title}`: {why}"
        for one in prepared
        if one.make is not None and (why := _refusal(one)) is not None
    ]


def _refusal(one: TimedConfiguration) -> str | None:
    configuration = one.configuration
    if configuration.drafter != "draft":
        return f"drafter {configuration.drafter} drafts for one text at a time"
    return None if configuration.verified_by in CHAINS else f"verifier {configuration.verified_by} is for trees"


def measure_batches(
    settings: PairSettings,
    pair: LoadedPair,
    prompts: Sequence[Sequence[int]],
    sizes: Sequence[int],
    prepared: Sequence[TimedConfiguration],
    fitted: Fitted,
) -> list[BatchFigures]:
    """Every configuration that can at each size B, over groups of B prompts; the last prompts that fill none are left.

    Each group is decoded plainly and by each configuration in turn.
    """
    able = [one for one in prepared if one.make is not None and _refusal(one) is None]
    new_tokens, figures = settings.speedup.new_tokens, list[BatchFigures]()
    for size in sizes if able else ():
        with memory_explained(_fewer_texts, size):
            groups = [prompts[start : start + size] for start in range(0, len(prompts) - size + 1, size)]
            target, draft = (with_rows(model, size, settings.pytorch.compile) for model in (pair.target, pair.draft))
            assert target is not None and draft is not None  # see `require_rows`
            bases = {one.base for one in able}
            plain = [one for one in prepared if one.make is None and one.title in bases]
            runs: dict[str, BatchRun] = {one.title: partial(plain_batch, target, rules=one.rules) for one in plain}
            for one in able:
                rule = partial(make_rule, one.configuration, fitted)
                argmax = one.rules.verifier == "match"
                runs[one.title] = partial(decode_batch, target, draft, rules=one.rules, length=rule, argmax=argmax)
            seconds: dict[str, float] = dict.fromkeys(runs, 0.0)
            texts: dict[str, list[Decoded]] = {title: [] for title in runs}
            for run in runs.values():  # a throw-away text each
                run(groups[0], min(8, new_tokens), randoms=_randoms(settings.seed, size))
            order = list(runs.items())
            progress = Progress(f"batches of {size}", len(groups))
            for index, group in enumerate(groups):
                turn = index % len(order)
                limit = min(new_tokens, min(target.capacity, draft.capacity) - max(map(len, group)))
                for title, run in order[turn:] + order[:turn]:
                    started = time.perf_counter()
                    texts[title] += run(group, limit, randoms=_randoms(settings.seed + index, size))
                    seconds[title] += time.perf_counter() - started
                progress.step()
            figures += [_figures(size, one, texts, seconds) for one in able]
            target.close()
            draft.close()
    return figures


def _fewer_texts(size: int) -> tuple[str, str]:
    return f"while {size} texts were decoded at once", "lower --batch, or hold the models in a smaller type (--dtype)"


def _randoms(seed: int, rows: int) -> list[Random]:
    return [random.Random(f"{seed}/{row}").random for row in range(rows)]


def _figures(
    size: int, one: TimedConfiguration, texts: dict[str, list[Decoded]], seconds: dict[str, float]
) -> BatchFigures:
    each, accepted = accepted_per_drafted([r for text in texts[one.title] for r in text.rounds])
    tokens, plain = (sum(len(text.tokens) for text in texts[title]) for title in (one.title, one.base))
    rate, plain_rate = tokens / seconds[one.title], plain / seconds[one.base]
    return BatchFigures(size, one.title, tokens, rate, plain_rate, each or 0.0, accepted, rate / plain_rate)

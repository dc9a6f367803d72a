"""Plain against speculative decoding of one pair by one backend: interleaved, cold caches, distinct prompts.

Legend: γ drafted tokens a round; plain decoding is γ = 0.
"""

from __future__ import annotations

import copy
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import partial

import numpy

from distill.data.samples import SEEN, repetition
from distill.decoding.batch import at_once, rows_of
from distill.decoding.calibration import Calibration
from distill.decoding.configured import (
    NO_COSTS,
    DrafterInputs,
    Session,
    configured_sampler,
    lossy_reason,
    make_drafter,
    require_trees,
)
from distill.decoding.costs import Costs, accepted_by_position, measure_steps, tokens_per_round
from distill.decoding.decode import Decoded, Round, room_for
from distill.decoding.ngrams import NGramTable
from distill.decoding.other_vocabulary import DraftReader
from distill.decoding.round_costs import PROMPTS, pair_costs
from distill.decoding.rules import Rules, Stop, stop_before
from distill.engines.loaded import LoadedPair, Opening, require_rows
from distill.engines.model import Model, Step, Watch
from distill.measuring.evaluation import judged_positions, positions_by_text
from distill.measuring.evaluation_results import ALL, ByText
from distill.measuring.identity import Identity, Rounding, judged, measured_rounding
from distill.measuring.speedup_results import (
    GroupFigures,
    Measurement,
    PairMeasured,
    RoundFigures,
    SpeedupPart,
    StepFigures,
)
from distill.progress import Progress
from distill.recipe import Configuration, SamplerSettings, Speedup
from distill.recipe.configuration import PLAIN, PLAIN_SAMPLED, names
from distill.recipe.measuring import fixed_length
from distill.sampler import Sampler
from distill.tables import ratio_interval, speed_ratio

# ── A configuration made ready for one pair: the rules it decodes under, and its drafter ──


@dataclass(frozen=True)
class PairSettings(Opening):
    """What is measured of a pair and how, whether it comes from a run or not."""

    speedup: Speedup = field(default_factory=Speedup)
    sampler: SamplerSettings = field(default_factory=partial(SamplerSettings, temperature=0))
    seed: int = 0
    at_once: int = 1  # Texts that are decoded at once.

    @property
    def configurations(self) -> tuple[Configuration, ...]:
        """All that draft."""
        return *map(fixed_length, self.speedup.lengths), *self.speedup.configurations

    @property
    def largest_tree(self) -> int:
        """The most nodes of a tree that may be verified; 0 without trees."""
        return max((one.most_nodes for one in self.speedup.configurations), default=0)


@dataclass(frozen=True)
class TimedText:
    """One prompt decoded once; `seconds` are those of prompt and tokens together, of texts at once an equal share.

    `target` and `draft` are the steps of both models behind the prompt, where they were watched.
    """

    prompt: int
    seconds: float
    decoded: Decoded
    target: Sequence[Step] = ()
    draft: Sequence[Step] = ()


@dataclass(eq=False)
class TimedConfiguration:
    """A configuration with the texts it wrote, in the order of the prompts.

    `sessions` write the texts that are decoded at once, one text each. `warm_up` has learnt nothing and teaches them
    nothing. `name` is what tables call it. `length` is γ of a configuration of the greedy sweep (0: plain), None for
    every other. `base` is plain decoding under the same sampler, over which its speedup is; None where this is it.
    """

    configuration: Configuration
    sampler: Sampler
    sessions: Sequence[Session] = ()
    warm_up: Session | None = None
    name: str = ""
    length: int | None = None
    base: TimedConfiguration | None = None
    texts: list[TimedText] = field(default_factory=list)

    @property
    def sampled(self) -> bool:
        """Whether its texts are drawn, so that they are no copies of the greedy text."""
        return self.sampler.temperature > 0

    @property
    def lossy(self) -> str | None:
        """Why its texts do not follow the target's distribution; None if they do."""
        return lossy_reason(self.configuration, self.sampler)

    @property
    def plain(self) -> TimedConfiguration:
        """Plain decoding under the same sampler."""
        return self.base or self

    @property
    def rounds(self) -> list[Round]:
        """The rounds of all its texts."""
        return [r for text in self.texts for r in text.decoded.rounds]


def prepare_all(
    settings: PairSettings,
    models: Sequence[tuple[Model, Model | DraftReader]],
    ends: Collection[int],
    inputs: DrafterInputs,
    stop: Stop | None = None,
) -> list[TimedConfiguration]:
    """Plain greedy decoding, the sweep (a configuration a length), and all others; a `DraftReader` has another
    vocabulary. `models` are target and draft of each text that is decoded at once.

    Where some of these are sampled, plain sampling stands before them, as their base.
    """

    def ready(configuration: Configuration, length: int | None = None) -> TimedConfiguration:
        sampler = configured_sampler(configuration, settings.sampler)
        seed = f"{settings.seed}/{configuration.described}"
        draws = [random.Random(f"{seed}/{row}" if row else seed).random for row in range(len(models))]

        def session(row: int) -> Session:
            target, draft = models[row]
            rules = Rules(sampler, configuration.verified_by, ends, draws[row], stop)
            return Session(target, make_drafter(configuration, draft, sampler, draws[row], inputs), rules)

        sessions = [session(row) for row in range(len(models))]
        return TimedConfiguration(configuration, sampler, sessions, session(0), length=length)

    greedy, drawn = ready(PLAIN, 0), ready(PLAIN_SAMPLED)
    sweep = [ready(fixed_length(length), length) for length in settings.speedup.lengths]
    others = [*map(ready, settings.speedup.configurations)]
    for one in (*sweep, *others):
        one.base = drawn if one.sampled else greedy
    found = [greedy, *sweep, *([drawn] if any(one.sampled for one in others) else []), *others]
    for one, name in zip(found, names([one.configuration for one in found]), strict=True):
        one.name = name
    return found


# ── Plain against speculative decoding of one pair by one backend: interleaved, cold caches, distinct prompts ──


def time_texts(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    prepared: Sequence[TimedConfiguration],
    progress_title: str,
    watches: Sequence[Watch] = (),
    stop: bool = False,
) -> None:
    """Decode every prompt by every configuration; their order turns from prompt to prompt.

    Models of several rows decode as many prompts at once. `watches` note the steps of both models, of each text. With
    `stop`, those that are `clearly_slower` take no more prompts.
    """
    running, models, size = [*prepared], (draft, target), len(prepared[0].sessions)
    watches = watches or [Watch() for _ in range(size)]
    # Decode one untimed text per configuration, because the first text creates buffers and kernels.
    for one in prepared:
        if one.warm_up is not None:
            decode_group([one.warm_up], prompts[:1], [min(8, new_tokens)], models)
    watches[0].take()
    progress = Progress(progress_title, len(prompts))
    for turn, index in enumerate(range(0, len(prompts), size)):
        group = prompts[index : index + size]
        if stop and index >= LEAST_TEXTS:
            running = [one for one in running if not clearly_slower(one, running, len(prompts) - index)]
        limits = [room_for(target, draft, len(prompt), new_tokens) for prompt in group]
        first = turn % len(running)
        for one in [*running[first:], *running[:first]]:
            started = time.perf_counter()
            texts = decode_group(one.sessions, group, limits, models)
            seconds = (time.perf_counter() - started) / len(group)
            for number, (decoded, watch) in enumerate(zip(texts, watches, strict=False), start=index):
                big, small = watch.take(decoded.prefilled)
                # A draft's first step may read the prompt, which is no part of a round.
                one.texts.append(TimedText(number, seconds, decoded, big, small[decoded.reading > 0 :]))
        progress.step(len(group))


def decode_group(
    sessions: Sequence[Session], prompts: Sequence[Sequence[int]], limits: Sequence[int], models: Sequence[Model]
) -> list[Decoded]:
    """The texts after some prompts, decoded at once, each by a session over its row of the models."""
    parts = zip(sessions, prompts, limits, strict=False)
    texts = [partial(session.text, prompt, limit) for session, prompt, limit in parts]
    return at_once(texts, models) if models[-1].rows > 1 else [text() for text in texts]


LEAST_TEXTS, SLOW, SAVED = 4, 0.8, 5.0  # texts to judge by; speed over the fastest; seconds that stopping must save


def clearly_slower(one: TimedConfiguration, running: Sequence[TimedConfiguration], left: int) -> bool:
    """Whether a configuration's interval over the fastest of its sampler lies below SLOW, and the prompts that are left
    would take long."""
    if one.base is None or left * statistics.fmean(text.seconds for text in one.texts) < SAVED:
        return False
    fastest = max((other for other in running if other.plain is one.plain), key=lambda other: rate(other.texts))
    return speed_ratio(*totals(one.texts), *totals(fastest.texts)).high < SLOW


def judge_identity(
    target: Model, prompts: Sequence[Sequence[int]], prepared: Sequence[TimedConfiguration], rounding: Rounding
) -> list[Identity | None]:
    """For each configuration how its texts stand to those of the first, plain greedy decoding; None: sampled texts."""
    greedy = [one for one in prepared if not one.sampled]
    counts = {id(one): Counter[str]() for one in greedy}
    for number, prompt in enumerate(prompts):
        timed = [one for one in greedy if number < len(one.texts)]
        texts = [one.texts[number].decoded.tokens for one in timed]
        for one, kind in zip(timed, judged(target, prompt, texts[0], texts, rounding), strict=True):
            counts[id(one)][kind] += 1
    return [Identity(**counts[id(one)]) if id(one) in counts else None for one in prepared]


def repeated_share(texts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> float:
    """The share of new tokens that end REPEATED tokens which stood before, in the prompt or the text; 0 without tokens.

    `texts` are pairs of a prompt and the new tokens after it. What a lookup can get right after a match of two.
    """
    places = [place for prompt, new in texts for place in repetition([*prompt, *new])[len(prompt) :]]
    return places.count(SEEN) / len(places) if places else 0.0


def accepted_per_drafted(rounds: Sequence[Round]) -> tuple[float | None, float | None]:
    """Tokens per round (accepted + 1), and accepted ÷ drafted; None where there is no round, or nothing was drafted."""
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    each = (accepted + len(rounds)) / len(rounds) if rounds else None
    return each, accepted / drafted if drafted else None


def totals(texts: Sequence[TimedText], units: Sequence[int] = ()) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Tokens and seconds [prompts] of each text; with `units`, the unit of each prompt, of each unit."""
    tokens = [len(text.decoded.tokens) for text in texts]
    return by_unit(texts, tokens, units), by_unit(texts, [text.seconds for text in texts], units)


def by_unit(texts: Sequence[TimedText], values: Sequence[float], units: Sequence[int]) -> numpy.ndarray:
    """Sums of the texts' values over the prompts of each unit that has a text; without `units` the values."""
    if not units:
        return numpy.array(values, float)
    _, places = numpy.unique([units[text.prompt] for text in texts], return_inverse=True)
    return numpy.bincount(places, values).astype(float)


def rate(texts: Sequence[TimedText]) -> float:
    """Tokens per second of all texts."""
    tokens, seconds = totals(texts)
    return float(tokens.sum() / seconds.sum())


# ── What a configuration gave: where the seconds of a round go, and speeds per class of prompt ──
# Legend: m tokens of a step, n drafted tokens, T target, D draft, τ tokens of a round.


def measurement(
    one: TimedConfiguration,
    identity: Identity | None,
    steps: StepFigures,
    pair: PairMeasured,
    given: PairTexts,
    synchronous: bool = True,
    at_once: int = 1,
) -> Measurement:
    """What a configuration gave on all prompts; its speedup is over the plain run of the same sampler."""
    each, accepted = accepted_per_drafted(one.rounds)
    base, prompts = one.plain.texts[: len(one.texts)], given.prompts
    # Texts that were decoded at once share their seconds, and are resampled together.
    units = [number // at_once for number in range(len(prompts))] if at_once > 1 else given.units
    ratio = speed_ratio(*totals(one.texts, units), *totals(base, units))
    counted = dict.fromkeys(("identical", "excused", "different")) if identity is None else asdict(identity)
    configuration = one.configuration
    return Measurement(
        **asdict(pair),
        **counted,
        configuration=one.name,
        settings=configuration.settings,
        length=one.length,
        drafter=configuration.drafter if configuration.drafts else None,
        rule=configuration.length_rule if configuration.drafts else None,
        sampler=one.sampler.describe() if one.sampled else None,
        tokens_per_second=rate(one.texts),
        plain_tokens_per_second=rate(base),
        tokens_per_round=each,
        acceptance=accepted,
        speedup=ratio.mean,
        speedup_low=ratio.low,
        speedup_high=ratio.high,
        predicted=predicted_speedup(one, steps),
        lossy=one.lossy,
        repeated=repeated_share((prompts[text.prompt], text.decoded.tokens) for text in one.texts),
        prompt_seconds=prompt_seconds(one),
        rounds=round_figures(one, steps, synchronous),
        by_class=by_class(one, given.classes, given.units),
        stopped=len(one.texts) if len(one.texts) < len(prompts) else None,
        positions=_positions(one, prompts) if configuration.drafter == "draft" else {},
    )


def _positions(one: TimedConfiguration, prompts: Sequence[Sequence[int]]) -> ByText:
    """Conditional acceptance by drafted position, of new and of repeated text."""
    texts = [(prompts[text.prompt], text.decoded.tokens) for text in one.texts]
    judged = judged_positions([text.decoded.rounds for text in one.texts], texts)
    return positions_by_text(judged, max((r.drafted for r in one.rounds), default=0))


def prompt_seconds(one: TimedConfiguration) -> float:
    """The mean seconds of a prompt and its first token."""
    return statistics.fmean(text.decoded.prefill_seconds for text in one.texts)


def predicted_speedup(one: TimedConfiguration, steps: StepFigures) -> float | None:
    """The speedup of a fixed length that drafts by the model, over whole requests, from T(m), D and the conditional
    acceptance: behind the prompt, rounds of τ tokens take T(γ + 1) + γ·D (Leviathan et al. 2023, eq. 1)."""
    length, chain = one.length or 0, one.configuration.drafter == "draft"
    accepted = accepted_by_position([(r.drafted, r.accepted) for r in one.rounds])
    if not length or not chain or not steps.draft or length + 1 not in steps.target or not accepted:
        return None
    tokens = tokens_per_round(accepted[:length])
    behind = statistics.fmean(len(text.decoded.tokens) - 1 for text in one.plain.texts)
    round_seconds = steps.target[length + 1] + length * steps.draft[1]
    plain_seconds = prompt_seconds(one.plain) + behind * steps.target[1]
    return plain_seconds / (prompt_seconds(one) + behind / tokens * round_seconds)


def by_class(one: TimedConfiguration, classes: Sequence[str], units: Sequence[int] = ()) -> list[GroupFigures]:
    """A configuration on the prompts of each class, none where there is one class only; with `units`, whose prompts are
    the turns of one question, on all of them, too."""
    names = [*dict.fromkeys(classes[t.prompt] for t in one.texts)] if len(set(classes)) > 1 else []
    groups = []
    for name in [*names, *([ALL] if units else [])]:
        texts = one.texts, one.plain.texts[: len(one.texts)]
        own, base = ([t for t in of if name == ALL or classes[t.prompt] == name] for of in texts)
        ratio = speed_ratio(*totals(own, units), *totals(base, units))
        emitted = [sum(r.accepted + 1 for r in text.decoded.rounds) for text in own]
        counts = by_unit(own, [len(text.decoded.rounds) for text in own], units)
        tokens = ratio_interval(by_unit(own, emitted, units), counts)
        if len(counts) == 1:
            ratio, tokens = (replace(found, low=math.nan, high=math.nan) for found in (ratio, tokens))
        accepted = accepted_per_drafted([r for text in own for r in text.decoded.rounds])
        figures = GroupFigures(name, len(counts), rate(own), *accepted, *astuple(ratio))
        groups.append(replace(figures, tokens_low=tokens.low, tokens_high=tokens.high))
    return groups


def _step_seconds(text: TimedText) -> list[float]:
    """Seconds of each plain step, until the next one begins."""
    ends = [step.started for step in text.target[1:]] + [step.started + step.seconds for step in text.target[-1:]]
    return [end - step.started for step, end in zip(text.target, ends, strict=True)]


def time_steps(prepared: Sequence[TimedConfiguration], target: Model, draft: Model | None, repeats: int) -> StepFigures:
    """T(m) and D(m) with one model alone, for every m that a round of the texts came to, at the median depth of their
    steps. Longer steps are no round's: they read again, or late, what a context did not hold.
    """
    longest = 1 + max(one.configuration.longest_round for one in prepared)
    texts = [text for one in prepared for text in one.texts]
    depths = [step.depth for text in texts for step in text.target]
    depth = int(statistics.median(depths)) if depths else 1

    def timed(model: Model, counts: set[int]) -> dict[int, float]:
        room = max(1, min(depth, model.capacity - max(counts)))
        return measure_steps(model, sorted(counts), room, repeats, until_steady=True)

    verified = {step.tokens for text in texts for step in text.target if step.tokens <= longest} | {1}
    drafted = {step.tokens for text in texts for step in text.draft if step.tokens <= longest} | {1, 2}
    return StepFigures(depth, timed(target, verified), {} if draft is None else timed(draft, drafted))


def round_figures(one: TimedConfiguration, steps: StepFigures, synchronous: bool) -> RoundFigures:
    """Where the seconds of a configuration's rounds went, and how near it came to the bound of its steps.

    A chain's draft step after a whole accepted round takes two tokens; the bound counts it as D(1), and steps that were
    not timed alone as they were paid.
    """
    trees, rounds = one.configuration.branches, one.rounds
    target = [step for text in one.texts for step in text.target]
    draft = [step for text in one.texts for step in text.draft]
    if rounds:
        count, tokens, seconds = len(rounds), sum(r.accepted + 1 for r in rounds), sum(r.seconds for r in rounds)
    else:
        count = tokens = max(len(target), 1)
        seconds = sum(sum(_step_seconds(text)) for text in one.texts)
    alone = sum(steps.target.get(step.tokens, step.seconds) for step in target)
    alone += sum(steps.draft.get(1 if step.tokens == 2 and not trees else step.tokens, step.seconds) for step in draft)
    paid = [sum(step.seconds for step in own) / count if synchronous else None for own in (target, draft)]
    return RoundFigures(
        tokens=tokens / count,
        verified=sum(step.tokens for step in target) / count,
        draft_steps=len(draft) / count,
        seconds=seconds / count,
        target_seconds=paid[0],
        draft_seconds=paid[1],
        bound=tokens / alone if alone else math.nan,
    )


# ── The measurement of one pair by one backend ──


STEP_REPEATS = 7  # of a timed step, at most: 3 where their median lies within 5 % of the fastest


@dataclass(frozen=True)
class PairTexts:
    """On which prompts a pair is measured, and what is known of them.

    Costs are timed behind `spare` prompts. `calibrations` by name. `classes` are those of the prompts, where
    they are to be told apart. `table` holds n-grams of the target's other texts, where there are any. `units` number
    the questions of a suite, whose turns are prompts: intervals resample questions.
    """

    prompts: list[list[int]]
    spare: list[list[int]]
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)
    classes: Sequence[str] = ()
    table: NGramTable | None = None
    units: Sequence[int] = ()


def measure_pair(
    settings: PairSettings, pair: LoadedPair, label: PairMeasured, given: PairTexts, reader: DraftReader | None = None
) -> SpeedupPart:
    """Measure a loaded pair; `reader` is a draft of another vocabulary.

    Raises DataError for trees in models that take none and for contexts without room.
    """
    if any(one.branches for one in settings.configurations):
        require_trees(pair.target, pair.draft)
    prompts, new_tokens = given.prompts, settings.speedup.new_tokens
    inputs = _inputs(pair, given, _timed_costs(settings, pair, given))
    inputs = inputs if settings.at_once == 1 else replace(inputs, max_leaves=0)
    small: Model = pair.draft if reader is None else reader.model
    target, together = pair.target, small
    if settings.at_once > 1:
        target, together = (require_rows(model, settings.at_once) for model in (pair.target, small))
    watches = [Watch() for _ in range(settings.at_once)]
    rows = [watch.models(*row) for watch, *row in zip(watches, rows_of(target), rows_of(together), strict=True)]
    models: list[tuple[Model, Model | DraftReader]] = [*rows]
    if reader is not None:
        noted = copy.copy(reader)
        noted.model = rows[0][1]
        models = [(rows[0][0], noted)]
    prepared = prepare_all(settings, models, pair.ends, inputs, stop_before(pair.token_bytes, pair.text_ends))
    with_room = together if reader is None else target  # a draft of another vocabulary checks its own room
    title = f"{pair.backend}, prompts"
    time_texts(target, with_room, prompts, new_tokens, prepared, title, watches, not given.units)
    plain = prepared[0].texts[0].decoded.tokens
    rounding = measured_rounding(settings.target, pair.backend, pair.target, prompts[0], plain, settings.configurations)
    identities = judge_identity(pair.target, prompts, prepared, rounding)
    steps = time_steps(prepared, pair.target, None if small is pair.target else small, STEP_REPEATS)
    waits = settings.at_once == 1 and (pair.hugging_face is None or pair.hugging_face[0].device.type == "cpu")
    measurements = [
        measurement(one, identity, steps, label, given, waits, settings.at_once)
        for one, identity in zip(prepared, identities, strict=True)
    ]
    return SpeedupPart(*label.key, measurements, steps, target=settings.target.model, draft=settings.draft)


def time_again(
    settings: PairSettings, pair: LoadedPair, places: Collection[int], given: PairTexts
) -> dict[int, list[TimedText]]:
    """Decode prompts by the configurations at these places of the table once more, with the costs that are kept of the
    pair."""
    longest = _longest_priced(settings)
    costs = pair_costs(pair, given.prompts[:1], longest) if longest else NO_COSTS
    stop = stop_before(pair.token_bytes, pair.text_ends)
    prepared = prepare_all(settings, [(pair.target, pair.draft)], pair.ends, _inputs(pair, given, costs), stop)
    wanted = {place: prepared[place] for place in places}
    new_tokens, title = settings.speedup.new_tokens, f"{pair.backend}, prompts of a turn"
    time_texts(pair.target, pair.draft, given.prompts, new_tokens, [*wanted.values()], title)
    return {place: one.texts for place, one in wanted.items()}


def _longest_priced(settings: PairSettings) -> int:
    """The longest round that a configuration reckons with; 0 where none reads costs."""
    return max((one.longest_round for one in settings.configurations if one.needs_costs), default=0)


def _timed_costs(settings: PairSettings, pair: LoadedPair, given: PairTexts) -> Costs:
    """The costs of rounds that configurations read, as they are kept, or timed behind `spare` prompts and kept."""
    longest = _longest_priced(settings)
    if not longest:
        return NO_COSTS
    ordered = sorted(given.spare, key=len)  # deeper rounds cost more
    spare = [ordered[len(ordered) * (2 * index + 1) // (2 * PROMPTS)] for index in range(PROMPTS)]
    return pair_costs(pair, spare, longest, settings.speedup.new_tokens)


def _inputs(pair: LoadedPair, given: PairTexts, costs: Costs) -> DrafterInputs:
    return DrafterInputs(costs.of_target(pair.target), given.calibrations, given.table, pair.target.max_leaves)

"""Plain and speculative decoding of one pair by one backend, timed in turns from cold caches on distinct prompts.

Legend: γ drafted tokens per round. Plain decoding is γ = 0.
"""

from __future__ import annotations

import copy
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import partial

import numpy

from distill.data.samples import SEEN, repetition
from distill.decoding.batch import at_once, rows_of
from distill.decoding.configured import (
    NO_COSTS,
    DrafterInputs,
    Session,
    configured_sampler,
    lossy_reason,
    make_drafter,
    pair_costs,
    require_trees,
)
from distill.decoding.costs import accepted_by_position, measure_steps, tokens_per_round
from distill.decoding.decode import Decoded, Round, room_for
from distill.decoding.ngrams import NGramTable
from distill.decoding.other_vocabulary import DraftReader
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
from distill.recipe import Configuration, Sampler, Speedup
from distill.recipe.configuration import PLAIN, PLAIN_SAMPLED, names
from distill.recipe.measuring import fixed_length
from distill.tables import ratio_interval, speed_ratio

# ── Configurations prepared for one pair: the rules under which they decode, and their drafters ──


@dataclass(frozen=True)
class PairSettings(Opening):
    """What is measured of a pair, and how. The pair may belong to a run."""

    speedup: Speedup = field(default_factory=Speedup)
    sampler: Sampler = field(default_factory=partial(Sampler, temperature=0))
    seed: int = 0
    at_once: int = 1  # Texts that are decoded at once.

    @property
    def configurations(self) -> tuple[Configuration, ...]:
        """All configurations that draft."""
        return *map(fixed_length, self.speedup.lengths), *self.speedup.configurations

    @property
    def largest_tree(self) -> int:
        """The most nodes that a tree may have for verification. 0 without trees."""
        return max((configuration.most_nodes for configuration in self.speedup.configurations), default=0)


@dataclass(frozen=True)
class TimedText:
    """One prompt, decoded once. `seconds` include the prompt and all tokens; texts decoded at once share them equally.

    `target` and `draft` are the steps of both models after the prompt, if they were watched.
    """

    prompt: int
    seconds: float
    decoded: Decoded
    target: Sequence[Step] = ()
    draft: Sequence[Step] = ()


@dataclass(eq=False)
class TimedConfiguration:
    """A configuration with the texts that it wrote, in the order of the prompts.

    `sessions` write the texts that are decoded at once, one text each. `warm_up` is a session apart for the untimed
    text, so that the others learn nothing from it. `name` is the name in tables. `length` is γ for configurations of
    the greedy sweep (0: plain) and None for others. `base` is plain decoding under the same sampler, the base of the
    speedup. It is None for plain decoding itself.
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
        """Whether its texts are drawn, so that they need not equal the greedy text."""
        return self.sampler.temperature > 0

    @property
    def lossy(self) -> str | None:
        """Why its texts do not follow the target's distribution. None if they do."""
        return lossy_reason(self.configuration, self.sampler)

    @property
    def plain(self) -> TimedConfiguration:
        """Plain decoding under the same sampler."""
        return self.base or self

    @property
    def rounds(self) -> list[Round]:
        """The rounds of all texts."""
        return [r for text in self.texts for r in text.decoded.rounds]


def prepare_all(
    settings: PairSettings,
    models: Sequence[tuple[Model, Model | DraftReader]],
    ends: Collection[int],
    inputs: DrafterInputs,
    stop: Stop | None = None,
) -> list[TimedConfiguration]:
    """Prepare plain greedy decoding, the sweep (one configuration per length), and the other configurations.

    `models` are the target and the draft of each text that is decoded at once.

    If some of these are sampled, plain sampling stands before them, as their base. A draft with another vocabulary is
    a `DraftReader`.
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

    greedy, sampled = ready(PLAIN, 0), ready(PLAIN_SAMPLED)
    sweep = [ready(fixed_length(length), length) for length in settings.speedup.lengths]
    others = [*map(ready, settings.speedup.configurations)]
    for timed in (*sweep, *others):
        timed.base = sampled if timed.sampled else greedy
    prepared = [greedy, *sweep, *([sampled] if any(timed.sampled for timed in others) else []), *others]
    for timed, name in zip(prepared, names([timed.configuration for timed in prepared]), strict=True):
        timed.name = name
    return prepared


# ── Timing: every prompt by every configuration ──


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
    """Decode every prompt with every configuration. Their order rotates from prompt to prompt.

    Models of several rows decode as many prompts at once. `watches` record the steps of both models, one for each text
    of a group. With `stop`, configurations that are `clearly_slower` get no more prompts.
    """
    running, models, size = [*prepared], (draft, target), len(prepared[0].sessions)
    watches = watches or [Watch() for _ in range(size)]
    # Decode one untimed text per configuration, because the first text creates buffers and kernels.
    for timed in prepared:
        if timed.warm_up is not None:
            decode_group([timed.warm_up], prompts[:1], [min(8, new_tokens)], models)
    watches[0].take()
    progress = Progress(progress_title, len(prompts))
    for turn, index in enumerate(range(0, len(prompts), size)):
        group = prompts[index : index + size]
        if stop and index >= MIN_TEXTS:
            running = [timed for timed in running if not clearly_slower(timed, running, len(prompts) - index)]
        limits = [room_for(target, draft, len(prompt), new_tokens) for prompt in group]
        first = turn % len(running)
        for timed in [*running[first:], *running[:first]]:
            started = time.perf_counter()
            texts = decode_group(timed.sessions, group, limits, models)
            seconds = (time.perf_counter() - started) / len(group)
            for number, (decoded, watch) in enumerate(zip(texts, watches, strict=False), start=index):
                big, small = watch.take(decoded.prefilled)
                # A draft's first step may read the prompt, which belongs to no round.
                timed.texts.append(TimedText(number, seconds, decoded, big, small[decoded.reading > 0 :]))
        progress.step(len(group))


def decode_group(
    sessions: Sequence[Session], prompts: Sequence[Sequence[int]], limits: Sequence[int], models: Sequence[Model]
) -> list[Decoded]:
    """Return the texts after some prompts, decoded at once, each by a session over its row of the models."""
    parts = zip(sessions, prompts, limits, strict=False)
    texts = [partial(session.text, prompt, limit) for session, prompt, limit in parts]
    return at_once(texts, models) if models[-1].rows > 1 else [text() for text in texts]


MIN_TEXTS = 4  # A configuration is judged on at least this many texts.
SLOW_RATIO = 0.8  # A slower configuration has an interval below this share of the fastest one's speed.
MIN_SECONDS_SAVED = 5.0


def clearly_slower(timed: TimedConfiguration, running: Sequence[TimedConfiguration], left: int) -> bool:
    """Whether a configuration is clearly slower than the fastest of its sampler, and `left` prompts would take long.

    Clearly slower: the whole interval of its speed over that of the fastest lies below SLOW_RATIO.
    """
    if timed.base is None or left * statistics.fmean(text.seconds for text in timed.texts) < MIN_SECONDS_SAVED:
        return False
    fastest = max((other for other in running if other.plain is timed.plain), key=lambda other: rate(other.texts))
    return speed_ratio(*totals(timed.texts), *totals(fastest.texts)).high < SLOW_RATIO


def judge_identity(
    target: Model, prompts: Sequence[Sequence[int]], prepared: Sequence[TimedConfiguration], rounding: Rounding
) -> list[Identity | None]:
    """Compare each configuration's texts with those of plain greedy decoding, the first one. None for sampled texts."""
    greedy = [timed for timed in prepared if not timed.sampled]
    counts = {id(timed): Counter[str]() for timed in greedy}
    for number, prompt in enumerate(prompts):
        reached = [timed for timed in greedy if number < len(timed.texts)]
        texts = [timed.texts[number].decoded.tokens for timed in reached]
        for timed, kind in zip(reached, judged(target, prompt, texts[0], texts, rounding), strict=True):
            counts[id(timed)][kind] += 1
    return [Identity(**counts[id(timed)]) if id(timed) in counts else None for timed in prepared]


def repeated_share(texts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> float:
    """Return the share of new tokens that end REPEATED tokens which stand earlier in the prompt or the text.

    A lookup can predict these tokens after a match of two. `texts` are pairs of a prompt and the new tokens after it.
    The share is 0 without tokens.
    """
    places = [place for prompt, new in texts for place in repetition([*prompt, *new])[len(prompt) :]]
    return places.count(SEEN) / len(places) if places else 0.0


def accepted_per_drafted(rounds: Sequence[Round]) -> tuple[float | None, float | None]:
    """Return tokens per round (accepted + 1), and accepted ÷ drafted. None without rounds or without drafted tokens."""
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    each = (accepted + len(rounds)) / len(rounds) if rounds else None
    return each, accepted / drafted if drafted else None


def totals(texts: Sequence[TimedText], units: Sequence[int] = ()) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return tokens and seconds of each text [prompts], or with `units` (the unit of each prompt) of each unit."""
    tokens = [len(text.decoded.tokens) for text in texts]
    return by_unit(texts, tokens, units), by_unit(texts, [text.seconds for text in texts], units)


def by_unit(texts: Sequence[TimedText], values: Sequence[float], units: Sequence[int]) -> numpy.ndarray:
    """Sum the texts' values over the prompts of each unit that has a text. Without `units`, return the values."""
    if not units:
        return numpy.array(values, float)
    _, places = numpy.unique([units[text.prompt] for text in texts], return_inverse=True)
    return numpy.bincount(places, values).astype(float)


def rate(texts: Sequence[TimedText]) -> float:
    """Return tokens per second over all texts."""
    tokens, seconds = totals(texts)
    return float(tokens.sum() / seconds.sum())


# ── Results of a configuration: where the seconds of a round go, and speeds by class of prompt ──
# Legend: m tokens of a step, n drafted tokens, T target, D draft, τ tokens of a round.


def measurement(
    timed: TimedConfiguration,
    identity: Identity | None,
    steps: StepFigures,
    pair: PairMeasured,
    given: PairTexts,
    synchronous: bool = True,
    at_once: int = 1,
) -> Measurement:
    """Return a configuration's results on all prompts. Its speedup is over plain decoding with the same sampler."""
    each, accepted = accepted_per_drafted(timed.rounds)
    base, prompts = timed.plain.texts[: len(timed.texts)], given.prompts
    # Texts that were decoded at once share their seconds, and are resampled together.
    units = [number // at_once for number in range(len(prompts))] if at_once > 1 else given.units
    ratio = speed_ratio(*totals(timed.texts, units), *totals(base, units))
    counted = dict.fromkeys(("identical", "excused", "different")) if identity is None else asdict(identity)
    configuration = timed.configuration
    return Measurement(
        **asdict(pair),
        **counted,
        configuration=timed.name,
        settings=configuration.settings,
        length=timed.length,
        drafter=configuration.drafter if configuration.drafts else None,
        rule=configuration.length_rule if configuration.drafts else None,
        sampler=timed.sampler.describe() if timed.sampled else None,
        tokens_per_second=rate(timed.texts),
        plain_tokens_per_second=rate(base),
        tokens_per_round=each,
        acceptance=accepted,
        speedup=ratio.mean,
        speedup_low=ratio.low,
        speedup_high=ratio.high,
        predicted=predicted_speedup(timed, steps),
        lossy=timed.lossy,
        repeated=repeated_share((prompts[text.prompt], text.decoded.tokens) for text in timed.texts),
        prompt_seconds=prompt_seconds(timed),
        rounds=round_figures(timed, steps, synchronous),
        by_class=[] if at_once > 1 else by_class(timed, given.classes, given.units),
        stopped=len(timed.texts) if len(timed.texts) < len(prompts) else None,
        positions=_positions(timed, prompts) if configuration.drafter == "draft" else {},
        prompt_share=math.nan if at_once > 1 else prompt_share(timed),
    )


def _positions(timed: TimedConfiguration, prompts: Sequence[Sequence[int]]) -> ByText:
    """Return the conditional acceptance by drafted position, in new and in repeated text."""
    texts = [(prompts[text.prompt], text.decoded.tokens) for text in timed.texts]
    positions = judged_positions([text.decoded.rounds for text in timed.texts], texts)
    return positions_by_text(positions, max((r.drafted for r in timed.rounds), default=0))


def prompt_seconds(timed: TimedConfiguration) -> float:
    """Return the mean seconds of a prompt and its first token."""
    return statistics.fmean(text.decoded.prefill_seconds for text in timed.texts)


def prompt_share(timed: TimedConfiguration) -> float:
    """Return the prompts' share of all seconds, first tokens included. NaN if no time passed."""
    seconds = sum(text.seconds for text in timed.texts)
    return sum(text.decoded.prefill_seconds for text in timed.texts) / seconds if seconds else math.nan


def predicted_speedup(timed: TimedConfiguration, steps: StepFigures) -> float | None:
    """Predict the speedup over whole requests for a fixed length that drafts with a model. None for other rules.

    The inputs are T(m), D and the conditional acceptance. After the prompt, a round of τ tokens takes T(γ + 1) + γ·D
    (Leviathan et al. 2023, eq. 1).
    """
    length, chain = timed.length or 0, timed.configuration.drafter == "draft"
    accepted = accepted_by_position([(r.drafted, r.accepted) for r in timed.rounds])
    if not length or not chain or not steps.draft or length + 1 not in steps.target or not accepted:
        return None
    tokens = tokens_per_round(accepted[:length])
    later_tokens = statistics.fmean(len(text.decoded.tokens) - 1 for text in timed.plain.texts)
    round_seconds = steps.target[length + 1] + length * steps.draft[1]
    plain_seconds = prompt_seconds(timed.plain) + later_tokens * steps.target[1]
    return plain_seconds / (prompt_seconds(timed) + later_tokens / tokens * round_seconds)


def by_class(timed: TimedConfiguration, classes: Sequence[str], units: Sequence[int] = ()) -> list[GroupFigures]:
    """Return a configuration's figures for each class of prompts, if there are several.

    With `units`, prompts are turns of questions, and the figures for all prompts are added.
    """
    names = [*dict.fromkeys(classes[t.prompt] for t in timed.texts)] if len(set(classes)) > 1 else []
    groups = []
    for name in [*names, *([ALL] if units else [])]:
        texts = timed.texts, timed.plain.texts[: len(timed.texts)]
        chosen, base = ([t for t in side if name == ALL or classes[t.prompt] == name] for side in texts)
        ratio = speed_ratio(*totals(chosen, units), *totals(base, units))
        emitted = [sum(r.accepted + 1 for r in text.decoded.rounds) for text in chosen]
        counts = by_unit(chosen, [len(text.decoded.rounds) for text in chosen], units)
        tokens = ratio_interval(by_unit(chosen, emitted, units), counts)
        if len(counts) == 1:
            ratio, tokens = (replace(interval, low=math.nan, high=math.nan) for interval in (ratio, tokens))
        accepted = accepted_per_drafted([r for text in chosen for r in text.decoded.rounds])
        figures = GroupFigures(name, len(counts), rate(chosen), *accepted, *astuple(ratio))
        groups.append(replace(figures, tokens_low=tokens.low, tokens_high=tokens.high))
    return groups


def _step_seconds(text: TimedText) -> list[float]:
    """Return the seconds of each plain step up to the start of the next one."""
    ends = [step.started for step in text.target[1:]] + [step.started + step.seconds for step in text.target[-1:]]
    return [end - step.started for step, end in zip(text.target, ends, strict=True)]


def time_steps(prepared: Sequence[TimedConfiguration], target: Model, draft: Model | None, repeats: int) -> StepFigures:
    """Time T(m) and D(m) with each model alone, for every m that occurred in a round.

    The depth is the median depth of the target's steps. Steps longer than any round are left out. They re-read, or
    read late, tokens that a context did not hold.
    """
    longest = 1 + max(timed.configuration.longest_round for timed in prepared)
    texts = [text for timed in prepared for text in timed.texts]
    depths = [step.depth for text in texts for step in text.target]
    depth = int(statistics.median(depths)) if depths else 1

    def seconds_by_tokens(model: Model, counts: set[int]) -> dict[int, float]:
        room = max(1, min(depth, model.capacity - max(counts)))
        return measure_steps(model, sorted(counts), room, repeats, until_steady=True)

    verified = {step.tokens for text in texts for step in text.target if step.tokens <= longest} | {1}
    drafted = {step.tokens for text in texts for step in text.draft if step.tokens <= longest} | {1, 2}
    draft_seconds = {} if draft is None else seconds_by_tokens(draft, drafted)
    return StepFigures(depth, seconds_by_tokens(target, verified), draft_seconds)


def round_figures(timed: TimedConfiguration, steps: StepFigures, synchronous: bool) -> RoundFigures:
    """Return where the seconds of a configuration's rounds went, and the bound that its steps set.

    After a fully accepted round, a chain's draft step takes two tokens. The bound counts it as D(1). Steps that were
    not timed alone count with the seconds that they took.
    """
    trees, rounds = timed.configuration.branches, timed.rounds
    target = [step for text in timed.texts for step in text.target]
    draft = [step for text in timed.texts for step in text.draft]
    if rounds:
        count, tokens, seconds = len(rounds), sum(r.accepted + 1 for r in rounds), sum(r.seconds for r in rounds)
    else:
        count = tokens = max(len(target), 1)
        seconds = sum(sum(_step_seconds(text)) for text in timed.texts)
    alone = sum(steps.target.get(step.tokens, step.seconds) for step in target)
    alone += sum(steps.draft.get(1 if step.tokens == 2 and not trees else step.tokens, step.seconds) for step in draft)
    paid = [sum(step.seconds for step in taken) / count if synchronous else None for taken in (target, draft)]
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


STEP_REPEATS = 7  # at most. Three suffice if their median is within 5 % of the fastest.


@dataclass(frozen=True)
class PairTexts:
    """The prompts on which a pair is measured, and what is known about them.

    `classes` are the prompts' classes, if results distinguish them. `table` holds n-grams of the target's other texts,
    if there are any. `units` number the questions of a suite, whose turns are prompts. Intervals then resample
    questions.
    """

    prompts: list[list[int]]
    classes: Sequence[str] = ()
    table: NGramTable | None = None
    units: Sequence[int] = ()


def measure_pair(
    settings: PairSettings, pair: LoadedPair, label: PairMeasured, given: PairTexts, reader: DraftReader | None = None
) -> SpeedupPart:
    """Measure a loaded pair. `reader` is a draft with another vocabulary.

    Raises DataError for trees if a model cannot take them, and for contexts without room.
    """
    if any(configuration.branches for configuration in settings.configurations):
        require_trees(pair.target, pair.draft)
    prompts, new_tokens = given.prompts, settings.speedup.new_tokens
    inputs = _inputs(settings, pair, given)
    inputs = inputs if settings.at_once == 1 else replace(inputs, max_leaves=0)
    small: Model = pair.draft if reader is None else reader.model
    target, together = pair.target, small
    if settings.at_once > 1:
        target, together = (require_rows(model, settings.at_once) for model in (pair.target, small))
    watches = [Watch() for _ in range(settings.at_once)]
    rows = [watch.models(*row) for watch, *row in zip(watches, rows_of(target), rows_of(together), strict=True)]
    models: list[tuple[Model, Model | DraftReader]] = [*rows]
    if reader is not None:
        drafting = copy.copy(reader)
        drafting.model = rows[0][1]
        models = [(rows[0][0], drafting)]
    prepared = prepare_all(settings, models, pair.ends, inputs, stop_before(pair.token_bytes, pair.text_ends))
    with_room = together if reader is None else target  # A draft with another vocabulary checks its own room.
    title = f"{pair.backend}, prompts"
    time_texts(target, with_room, prompts, new_tokens, prepared, title, watches, not given.units)
    plain = prepared[0].texts[0].decoded.tokens
    rounding = measured_rounding(settings.target, pair.backend, pair.target, prompts[0], plain, settings.configurations)
    identities = judge_identity(pair.target, prompts, prepared, rounding)
    steps = time_steps(prepared, pair.target, None if small is pair.target else small, STEP_REPEATS)
    waits = settings.at_once == 1 and (pair.hugging_face is None or pair.hugging_face[0].device.type == "cpu")
    measurements = [
        measurement(timed, identity, steps, label, given, waits, settings.at_once)
        for timed, identity in zip(prepared, identities, strict=True)
    ]
    return SpeedupPart(*label.key, measurements, steps, target=settings.target.model, draft=settings.draft)


def time_again(
    settings: PairSettings, pair: LoadedPair, places: Collection[int], given: PairTexts
) -> dict[int, list[TimedText]]:
    """Decode prompts once more with the configurations at these places of the table, using the pair's kept costs."""
    stop = stop_before(pair.token_bytes, pair.text_ends)
    prepared = prepare_all(settings, [(pair.target, pair.draft)], pair.ends, _inputs(settings, pair, given), stop)
    wanted = {place: prepared[place] for place in places}
    new_tokens, title = settings.speedup.new_tokens, f"{pair.backend}, prompts of a turn"
    time_texts(pair.target, pair.draft, given.prompts, new_tokens, [*wanted.values()], title)
    return {place: timed.texts for place, timed in wanted.items()}


def _inputs(settings: PairSettings, pair: LoadedPair, given: PairTexts) -> DrafterInputs:
    """Return what the configurations read. Costs reach the longest round of those that need costs."""
    priced = (configuration for configuration in settings.configurations if configuration.needs_costs)
    longest = max((configuration.longest_round for configuration in priced), default=0)
    costs = pair_costs(pair, longest) if longest else NO_COSTS
    return DrafterInputs(costs, given.table, pair.target.max_leaves)

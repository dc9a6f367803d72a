"""Plain against speculative decoding of one pair by one backend: interleaved, cold caches, distinct prompts.

Legend: γ drafted tokens a round; plain decoding is γ = 0.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import partial

import numpy

from distill.decoding.configured import Fitted, configured_sampler, lossy_reason, make_drafter
from distill.decoding.costs import measure_steps, range_start
from distill.decoding.decode import Decoded, Round, decode_text, plain, room_for
from distill.decoding.drafters import Drafter
from distill.decoding.other_vocabulary import DraftReader
from distill.decoding.rules import Rules
from distill.decoding.verify import refusal
from distill.engines.model import Model, Step, Watch
from distill.errors import RecipeError
from distill.measuring.identity import Identity, Rounding, judged
from distill.measuring.speedup_results import (
    REPEATS,
    ChosenLength,
    GroupFigures,
    Measurement,
    PairMeasured,
    RoundFigures,
    StepFigures,
)
from distill.progress import Progress
from distill.recipe import Configuration, Gguf, PyTorch, SamplerSettings, Speedup, Target
from distill.recipe.configuration import PLAIN, PLAIN_SAMPLED, TREES, DrafterName
from distill.sampler import Sampler
from distill.tables import speed_ratio

# ── A configuration made ready for one pair: the rules it decodes under, and its drafter ──


@dataclass(frozen=True)
class PairSettings:
    """What is measured of a pair and how, whether it comes from a run or not.

    `draft` is None where none is used. `sweep` are greedy configurations of fixed lengths, `others` any; `speedup`
    holds the counts. The engines' options are those with which the pair is loaded.
    """

    target: Target
    draft: str | None
    sweep: tuple[Configuration, ...]
    others: tuple[Configuration, ...]
    speedup: Speedup = field(default_factory=Speedup)
    sampler: SamplerSettings = field(default_factory=partial(SamplerSettings, temperature=0))
    seed: int = 0
    device: str = "auto"
    threads: int | None = None
    gguf: Gguf = field(default_factory=Gguf)
    pytorch: PyTorch = field(default_factory=PyTorch)

    @property
    def configurations(self) -> tuple[Configuration, ...]:
        """All that draft."""
        return *self.sweep, *self.others

    @property
    def largest_tree(self) -> int:
        """The most nodes of a tree that may be verified; 0 without trees."""
        return max((one.most_nodes for one in self.others), default=0)


@dataclass(frozen=True)
class TimedConfiguration:
    """A configuration with the rules it decodes under; `make` gives its drafter, None for plain decoding.

    The drafter is made as at the start of a session; what it learns it keeps from prompt to prompt. `lossy` is the
    reason why the text would not follow the target's distribution, None where it does. `length` is γ of a configuration
    of the greedy sweep (0: plain), None for every other.
    """

    configuration: Configuration
    rules: Rules
    make: Callable[[], Drafter] | None
    lossy: str | None = None
    length: int | None = None

    @property
    def title(self) -> str:
        """Its name in tables, and that of its texts."""
        return self.configuration.title

    @property
    def sampled(self) -> bool:
        """Whether its texts are drawn, so that they are no copies of the greedy text."""
        return self.rules.sampler.temperature > 0

    @property
    def base(self) -> str:
        """The title of plain decoding under the same sampler, over which its speedup is."""
        return PLAIN_SAMPLED.title if self.sampled else PLAIN.title

    def decode(self, target: Model, drafter: Drafter | None, prompt: Sequence[int], limit: int) -> Decoded:
        """Decode a prompt from cold caches, by a drafter that `make` gave; plainly without one."""
        if drafter is None:
            return plain(target, prompt, limit, rules=self.rules)
        return decode_text(target, drafter, prompt, limit, self.rules, self.lossy is not None)


def prepare(
    settings: PairSettings,
    configuration: Configuration,
    draft: Model | DraftReader,
    ends: Collection[int],
    fitted: Fitted,
) -> TimedConfiguration:
    """Make a configuration ready under the settings' seed and sampler; a `DraftReader` has another vocabulary."""
    sampler = configured_sampler(configuration, settings.sampler)
    draws = random.Random(f"{settings.seed}/{configuration.title}").random
    verifier = configuration.verified_by if configuration.drafts else "token" if sampler.temperature else "greedy"
    rules = Rules(sampler, verifier, ends, draws)
    if not configuration.drafts:
        return TimedConfiguration(configuration, rules, None)
    make = partial(make_drafter, configuration, draft, sampler, draws, fitted)
    if configuration.other_vocabulary:
        return TimedConfiguration(configuration, rules, make, refusal(rules.verifier, make().kind, sampler.temperature))
    return TimedConfiguration(configuration, rules, make, lossy_reason(configuration, sampler))


def prepare_all(
    settings: PairSettings, draft: Model | DraftReader, ends: Collection[int], fitted: Fitted
) -> list[TimedConfiguration]:
    """Plain greedy decoding, the sweep (a configuration a length), and all others.

    Where some of these are sampled, plain sampling stands before them, as their base. RecipeError for one that would
    change the target's distribution, unless the settings allow that.
    """
    ready = partial(prepare, settings, draft=draft, ends=ends, fitted=fitted)
    lengths = [replace(ready(PLAIN), length=0), *(replace(ready(one), length=one.max_length) for one in settings.sweep)]
    sampled = Sampler.of(settings.sampler).temperature > 0 and any(one.sampler == "recipe" for one in settings.others)
    prepared = [*lengths, *map(ready, [*([PLAIN_SAMPLED] if sampled else []), *settings.others])]
    refused = next((one for one in prepared if one.lossy is not None and not settings.speedup.allow_lossy), None)
    if refused is not None:
        title = refused.configuration.title
        raise RecipeError(
            f"`{title}` would change the target's distribution: {refused.lossy}", "change it, or --allow-lossy"
        )
    return prepared


# ── Plain against speculative decoding of one pair by one backend: interleaved, cold caches, distinct prompts ──


@dataclass(frozen=True)
class TimedText:
    """One prompt decoded once by a configuration, given by title; `seconds` are those of prompt and tokens together.

    `target` and `draft` are the steps of both models behind the prompt, where they were watched.
    """

    prompt: int
    title: str
    seconds: float
    decoded: Decoded
    target: Sequence[Step] = field(default=())
    draft: Sequence[Step] = field(default=())


def time_texts(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    prepared: Sequence[TimedConfiguration],
    progress_title: str,
    between: Callable[[], None] = lambda: None,
    watch: Watch | None = None,
) -> list[TimedText]:
    """Decode every prompt by every configuration; their order turns from prompt to prompt.

    `between` is called before each prompt and after the last. `watch` has the steps of both models noted.
    """
    watch = Watch() if watch is None else watch
    # One throw-away text each: lazily made buffers and kernels are not to be measured.
    for one in prepared:
        one.decode(target, one.make() if one.make else None, prompts[0], min(8, new_tokens))
    watch.take()
    drafters = [one.make() if one.make else None for one in prepared]
    order = list(zip(prepared, drafters, strict=True))
    texts: list[TimedText] = []
    progress = Progress(progress_title, len(prompts))
    for index, prompt in enumerate(prompts):
        between()
        limit = room_for(target, draft, len(prompt), new_tokens)
        turn = index % len(order)
        for one, drafter in order[turn:] + order[:turn]:
            started = time.perf_counter()
            decoded = one.decode(target, drafter, prompt, limit)
            seconds = time.perf_counter() - started
            texts.append(TimedText(index, one.title, seconds, decoded, *watch.take()))
        progress.step()
    between()
    return texts


def judge_identity(
    target: Model,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[TimedText],
    prepared: Sequence[TimedConfiguration],
    rounding: Rounding,
) -> dict[str, Identity]:
    """For each greedy configuration that drafts, by title, how its texts stand to the plain ones."""
    plain_texts = {text.prompt: text.decoded.tokens for text in texts if text.title == PLAIN.title}
    counts = {one.title: Counter[str]() for one in prepared if not one.sampled and one.title != PLAIN.title}
    for number, plain_text in plain_texts.items():
        own = [text for text in texts if text.prompt == number and text.title in counts]
        kinds = judged(target, prompts[number], plain_text, [text.decoded.tokens for text in own], rounding)
        for text, kind in zip(own, kinds, strict=True):
            counts[text.title][kind] += 1
    return {title: Identity(**own) for title, own in counts.items()}


def measurements(
    texts: Sequence[TimedText],
    prepared: Sequence[TimedConfiguration],
    identities: Mapping[str, Identity],
    pair: PairMeasured,
) -> list[Measurement]:
    """The measurement of each configuration, its speedup over the plain run of the same sampler."""
    rows = []
    for one in prepared:
        tokens, seconds = totals(texts, one.title)
        base_tokens, base_seconds = totals(texts, one.base)
        each, accepted = accepted_per_drafted(rounds_of(texts, one.title))
        ratio = speed_ratio(tokens, seconds, base_tokens, base_seconds)
        identity = Identity(identical=len(tokens)) if one.title == PLAIN.title else identities.get(one.title)
        counted = dict.fromkeys(("identical", "excused", "different")) if identity is None else asdict(identity)
        configuration = one.configuration
        row = Measurement(
            **asdict(pair),
            **counted,
            configuration=one.title,
            length=one.length,
            drafter=configuration.drafter if configuration.drafts else None,
            rule=configuration.length_rule if configuration.drafts else None,
            verifier=configuration.verified_by if configuration.drafts else None,
            sampler=one.rules.sampler.describe() if one.sampled else None,
            tokens=int(tokens.sum()),
            seconds=float(seconds.sum()),
            tokens_per_second=float(tokens.sum() / seconds.sum()),
            plain_tokens_per_second=float(base_tokens.sum() / base_seconds.sum()),
            tokens_per_round=each,
            acceptance=accepted,
            speedup=ratio.mean,
            speedup_low=ratio.low,
            speedup_high=ratio.high,
            predicted=None,
            lossy=one.lossy,
            repeated=repeated_share([text.decoded.tokens for text in texts if text.title == one.title]),
        )
        rows.append(row)
    return rows


def repeated_share(texts: Sequence[Sequence[int]]) -> float:
    """The share of all tokens that lie in REPEATS tokens which the same text had before; 0 without tokens."""
    total = repeated = 0
    for text in texts:
        seen, reached = set[tuple[int, ...]](), 0  # up to where tokens are counted
        for start in range(len(text) - REPEATS + 1):
            if (run := tuple(text[start : start + REPEATS])) in seen:
                repeated += start + REPEATS - max(start, reached)
                reached = start + REPEATS
            seen.add(run)
        total += len(text)
    return repeated / total if total else 0.0


def rounds_of(texts: Sequence[TimedText], title: str) -> list[Round]:
    """All rounds of a configuration."""
    return [r for text in texts if text.title == title for r in text.decoded.rounds]


def accepted_per_drafted(rounds: Sequence[Round]) -> tuple[float | None, float | None]:
    """Tokens per round (accepted + 1), and accepted ÷ drafted; None where there is no round, or nothing was drafted."""
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    each = (accepted + len(rounds)) / len(rounds) if rounds else None
    return each, accepted / drafted if drafted else None


def totals(texts: Sequence[TimedText], title: str) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Tokens and seconds [prompts] that a configuration took for each prompt."""
    count = 1 + max(text.prompt for text in texts)
    tokens, seconds = numpy.zeros(count), numpy.zeros(count)
    for text in texts:
        if text.title == title:
            tokens[text.prompt] += len(text.decoded.tokens)
            seconds[text.prompt] += text.seconds
    return tokens, seconds


def choose_length(texts: Sequence[TimedText], sweep: Sequence[Configuration]) -> ChosenLength:
    """The better of plain and speculative: γ chosen on the even prompts, its figures on the odd ones.

    `sweep` are the configurations of the lengths.
    """
    # Renumbered, so that no prompt is counted that has no text.
    even, odd = ([replace(t, prompt=t.prompt // 2) for t in texts if t.prompt % 2 == side] for side in (0, 1))

    def speed(configuration: Configuration) -> float:
        tokens, seconds = totals(even, configuration.title)
        return float(tokens.sum() / seconds.sum())

    chosen = max((PLAIN, *sweep), key=speed)
    tokens, seconds = totals(odd, chosen.title)
    ratio = speed_ratio(tokens, seconds, *totals(odd, PLAIN.title))
    length, rate = chosen.max_length if chosen.drafts else 0, float(tokens.sum() / seconds.sum())
    return ChosenLength(length, ratio.mean, ratio.low, ratio.high, rate)


# ── Figures of watched texts: where the seconds of a round go, and speeds per class of prompt and per depth ──
# Legend: m tokens of a step, n drafted tokens, T target, D draft, τ tokens of a round.

FIRST_DEPTH = 128  # tokens at which the second range of depths begins; each later range is twice as long


def by_class(
    texts: Sequence[TimedText], prepared: Sequence[TimedConfiguration], classes: Sequence[str]
) -> list[GroupFigures]:
    """Every configuration on the prompts of each class; none where there is one class only."""
    groups = []
    for name in dict.fromkeys(classes) if len(set(classes)) > 1 else ():
        numbers = {number: place for place, number in enumerate(n for n, one in enumerate(classes) if one == name)}
        own = [replace(t, prompt=numbers[t.prompt]) for t in texts if t.prompt in numbers]
        for one in prepared:
            tokens, seconds = totals(own, one.title)
            ratio = speed_ratio(tokens, seconds, *totals(own, one.base))
            if len(numbers) == 1:
                ratio = replace(ratio, low=math.nan, high=math.nan)
            accepted = accepted_per_drafted(rounds_of(own, one.title))
            size = (len(numbers), int(tokens.sum()), float(tokens.sum() / seconds.sum()))
            groups.append(GroupFigures(name, one.title, *size, *accepted, *astuple(ratio)))
    return groups


def _range(depth: int) -> tuple[int, int]:
    """The range of depths that a depth lies in, its end excluded."""
    start = range_start(depth, FIRST_DEPTH)
    return start, 2 * start or FIRST_DEPTH


def _step_seconds(text: TimedText) -> list[tuple[int, float]]:
    """Depth and seconds of each plain step, until the next one begins."""
    ends = [step.started for step in text.target[1:]] + [step.started + step.seconds for step in text.target[-1:]]
    return [(step.depth, end - step.started) for step, end in zip(text.target, ends, strict=True)]


def by_depth(texts: Sequence[TimedText], prepared: Sequence[TimedConfiguration]) -> list[GroupFigures]:
    """Every configuration that drafts, on its rounds at each range of depths, against plain steps there."""
    ranges = []
    plain: dict[tuple[str, tuple[int, int]], list[float]] = {}
    for text in texts:
        for depth, seconds in () if text.decoded.rounds else _step_seconds(text):
            plain.setdefault((text.title, _range(depth)), []).append(seconds)
    for one in prepared:
        rounds: dict[tuple[int, int], list[Round]] = {}
        for r in rounds_of(texts, one.title):
            rounds.setdefault(_range(r.depth), []).append(r)
        for span, own in sorted(rounds.items()):
            tokens, taken = sum(r.accepted + 1 for r in own), sum(r.seconds for r in own)
            steps = plain.get((one.base, span))
            gain = tokens / taken * statistics.fmean(steps) if steps else None
            size = (len(own), tokens, tokens / taken)
            group = f"{span[0]}–{span[1] - 1}"
            ranges.append(GroupFigures(group, one.title, *size, *accepted_per_drafted(own), gain, math.nan, math.nan))
    return sorted(ranges, key=lambda figures: int(figures.group.split("–")[0]))


def time_steps(texts: Sequence[TimedText], target: Model, draft: Model | None, repeats: int) -> StepFigures:
    """T(m) and D(m) with one model alone, for every m that the texts came to, at the median depth of their steps."""
    depths = [step.depth for text in texts for step in text.target]
    depth = int(statistics.median(depths)) if depths else 1

    def timed(model: Model, counts: set[int]) -> dict[int, float]:
        room = max(1, min(depth, model.capacity - max(counts)))
        return measure_steps(model, sorted(counts), room, repeats, until_steady=True)

    return StepFigures(
        depth,
        timed(target, {step.tokens for text in texts for step in text.target} | {1}),
        {} if draft is None else timed(draft, {step.tokens for text in texts for step in text.draft} | {1, 2}),
    )


def round_figures(
    one: TimedConfiguration, texts: Sequence[TimedText], steps: StepFigures, synchronous: bool
) -> RoundFigures:
    """Where the seconds of a configuration's rounds went, and how near it came to the bound of its steps.

    A chain's draft step after a whole accepted round takes two tokens; the bound counts it as D(1).
    """
    drafter, texts = one.configuration.drafter, [text for text in texts if text.title == one.title]
    rounds = [r for text in texts for r in text.decoded.rounds]
    target = [step for text in texts for step in text.target]
    draft = [step for text in texts for step in text.draft]
    if rounds:
        count, tokens, seconds = len(rounds), sum(r.accepted + 1 for r in rounds), sum(r.seconds for r in rounds)
    else:
        count = tokens = max(len(target), 1)
        seconds = sum(second for text in texts for _, second in _step_seconds(text))
    alone = sum(steps.target[step.tokens] for step in target)
    alone += sum(steps.draft[1 if step.tokens == 2 and drafter not in TREES else step.tokens] for step in draft)
    paid = [sum(step.seconds for step in own) / count for own in (target, draft)]
    measured, bound = tokens / seconds if seconds else math.nan, tokens / alone if alone else math.nan
    return RoundFigures(
        configuration=one.title,
        rounds=count,
        tokens=tokens / count,
        most=_all_accepted(rounds, len(draft), drafter),
        verified=sum(step.tokens for step in target) / count,
        draft_steps=len(draft) / count,
        seconds=seconds / count,
        target_seconds=paid[0] if synchronous else None,
        draft_seconds=paid[1] if synchronous else None,
        overhead_seconds=seconds / count - sum(paid) if synchronous else None,
        tokens_per_second=measured,
        bound=bound,
        attained=measured / bound,
    )


def prompt_seconds(texts: Sequence[TimedText]) -> dict[str, float]:
    """By configuration, the mean seconds of a prompt and its first token."""
    seconds: dict[str, list[float]] = {}
    for text in texts:
        seconds.setdefault(text.title, []).append(text.decoded.prefill_seconds)
    return {title: statistics.fmean(own) for title, own in seconds.items()}


def _all_accepted(rounds: Sequence[Round], steps: int, drafter: DrafterName) -> float | None:
    """Mean tokens of a round in which everything is accepted: of a tree, a node of each level, a draft step each."""
    if not rounds:
        return 1.0
    if drafter in ("lookup+tree", "table"):
        return None
    return 1 + (steps if drafter == "tree" else sum(r.drafted for r in rounds)) / len(rounds)

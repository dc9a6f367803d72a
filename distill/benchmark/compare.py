"""Plain against speculative decoding of one pair by one backend: interleaved, cold caches, distinct prompts.

Legend: γ drafted tokens a round; plain decoding is γ = 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy

from distill.benchmark.identity import Identity
from distill.benchmark.prepared import Prepared
from distill.models.base import Model
from distill.progress import Progress
from distill.recipe.configuration import PLAIN, PLAIN_SAMPLED
from distill.recipe.measuring import fixed_length
from distill.results.speedup_results import ChosenLength, Measurement, PairMeasured
from distill.speculative.decode import Decoded, plain, room_for

Pair = PairMeasured
Ratio = tuple[float, float, float]  # a ratio and its interval


@dataclass(frozen=True)
class TimedText:
    """One prompt decoded once by a configuration, given by title; `seconds` are those of prompt and tokens together."""

    prompt: int
    title: str
    seconds: float
    decoded: Decoded


def time_texts(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    prepared: Sequence[Prepared],
    progress_title: str,
    between: Callable[[], None] = lambda: None,
) -> list[TimedText]:
    """Decode every prompt by every configuration; their order turns from prompt to prompt.

    `between` is called before each prompt and after the last.
    """
    # One throw-away text each: lazily made buffers and kernels are not to be measured.
    for one in prepared:
        one.decode(target, one.make() if one.make else None, prompts[0], min(8, new_tokens))
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
            texts.append(TimedText(index, one.title, time.perf_counter() - started, decoded))
        progress.step()
    between()
    return texts


def judge_identity(
    target: Model,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[TimedText],
    prepared: Sequence[Prepared],
    noise: float,
    together: int = 0,
) -> dict[str, Identity]:
    """For each greedy configuration that drafts, by title, how its texts stand to the plain ones.

    `noise` is the measured or agreed rounding; `noise` and `together` tell a tie as in `is_tie`.
    """
    wanted = {text.prompt: text.decoded.tokens for text in texts if text.title == PLAIN.title}
    found = {one.title: Identity() for one in prepared if not one.sampled and one.title != PLAIN.title}
    for text in texts:
        if text.title in found:
            found[text.title].count(
                target, prompts[text.prompt], wanted[text.prompt], text.decoded.tokens, noise, together
            )
    return found


def measurements(
    texts: Sequence[TimedText],
    prepared: Sequence[Prepared],
    identities: Mapping[str, Identity],
    pair: Pair,
    resamples: int,
    confidence: float,
) -> list[Measurement]:
    """The measurement of each configuration, its speedup over the plain run of the same sampler."""
    titles = {one.title for one in prepared}
    found = []
    for one in prepared:
        base = PLAIN_SAMPLED if one.sampled and PLAIN_SAMPLED.title in titles else PLAIN
        found.append(_measurement(texts, one, base.title, identities.get(one.title), pair, resamples, confidence))
    return found


def _measurement(
    texts: Sequence[TimedText],
    one: Prepared,
    base: str,
    identity: Identity | None,
    pair: Pair,
    resamples: int,
    confidence: float,
) -> Measurement:
    tokens, seconds = totals(texts, one.title)
    base_tokens, base_seconds = totals(texts, base)
    rounds = [r for text in texts if text.title == one.title for r in text.decoded.rounds]
    drafted = sum(r.drafted for r in rounds)
    speedup, low, high = speed_ratio(tokens, seconds, base_tokens, base_seconds, resamples, confidence)
    configuration = one.configuration
    if identity is None and one.title == PLAIN.title:
        identity = Identity(identical=len(tokens))
    return Measurement(
        pair=pair.pair,
        backend=pair.backend,
        grown=pair.grown,
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
        tokens_per_round=sum(r.accepted + 1 for r in rounds) / len(rounds) if rounds else None,
        acceptance=sum(r.accepted for r in rounds) / drafted if drafted else None,
        speedup=speedup,
        speedup_low=low,
        speedup_high=high,
        predicted=None,
        identical=None if identity is None else identity.identical,
        excused=None if identity is None else identity.excused,
        different=None if identity is None else identity.different,
        lossy=one.lossy,
    )


def totals(texts: Sequence[TimedText], title: str) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Tokens and seconds [prompts] that a configuration took for each prompt."""
    count = 1 + max(text.prompt for text in texts)
    tokens, seconds = numpy.zeros(count), numpy.zeros(count)
    for text in texts:
        if text.title == title:
            tokens[text.prompt] += len(text.decoded.tokens)
            seconds[text.prompt] += text.seconds
    return tokens, seconds


def speed_ratio(
    tokens: numpy.ndarray,
    seconds: numpy.ndarray,
    base_tokens: numpy.ndarray,
    base_seconds: numpy.ndarray,
    resamples: int,
    confidence: float,
) -> Ratio:
    """Tokens per second over the base's, with a bootstrap interval that resamples prompts in pairs."""
    drawn = numpy.random.default_rng(0).integers(0, len(tokens), size=(resamples, len(tokens)))
    ratios = (tokens[drawn].sum(1) / seconds[drawn].sum(1)) / (base_tokens[drawn].sum(1) / base_seconds[drawn].sum(1))
    edge = (1 - confidence) / 2
    low, high = numpy.quantile(ratios, [edge, 1 - edge])
    value = (tokens.sum() / seconds.sum()) / (base_tokens.sum() / base_seconds.sum())
    return float(value), float(low), float(high)


def choose_length(
    texts: Sequence[TimedText],
    lengths: Sequence[int],
    pair: Pair,
    resamples: int,
    confidence: float,
    title: Callable[[int], str] = lambda length: fixed_length(length).title,
) -> ChosenLength:
    """The better of plain and speculative: γ chosen on the even prompts, its figures on the odd ones.

    `title` names the configuration that drafts γ tokens.
    """
    # Renumbered, so that no prompt is counted that has no text.
    even, odd = (
        [TimedText(t.prompt // 2, t.title, t.seconds, t.decoded) for t in texts if t.prompt % 2 == side]
        for side in (0, 1)
    )

    def speed(length: int) -> float:
        tokens, seconds = totals(even, title(length))
        return float(tokens.sum() / seconds.sum())

    chosen = max((0, *lengths), key=speed)
    tokens, seconds = totals(odd, title(chosen))
    speedup, low, high = speed_ratio(tokens, seconds, *totals(odd, PLAIN.title), resamples, confidence)
    rate = float(tokens.sum() / seconds.sum())
    return ChosenLength(pair.pair, pair.backend, pair.grown, chosen, speedup, low, high, rate)


@dataclass(frozen=True)
class LibraryTimes:
    """Tokens per second of our plain decoder and of a library's generation; `ratio` is the median over prompts."""

    ours: float
    library: float
    ratio: float


def compare_library(
    target: Model,
    library: Callable[[Sequence[int], int], int],
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    ends: Collection[int],
) -> LibraryTimes:
    """Our plain decoder and a library's greedy generation, in turn on the same prompts.

    The ratio is the median over prompts, each with the two orders, so that a slow spell of the machine does not decide.
    """
    library(prompts[0], 4)
    plain(target, prompts[0], 4)
    speeds: dict[str, list[float]] = {"ours": [], "library": []}
    ratios = []
    for index, prompt in enumerate(prompts):
        limit = min(new_tokens, target.capacity - len(prompt))
        pair = {}
        for who in ("ours", "library") if index % 2 else ("library", "ours"):
            started = time.perf_counter()
            made = len(plain(target, prompt, limit, ends).tokens) if who == "ours" else library(prompt, limit)
            pair[who] = made / (time.perf_counter() - started)
            speeds[who].append(pair[who])
        ratios.append(pair["ours"] / pair["library"])
    medians = (float(numpy.median(values)) for values in (speeds["ours"], speeds["library"], ratios))
    return LibraryTimes(*medians)

"""Plain against speculative decoding of one pair by one backend: interleaved, cold caches, distinct prompts.

Legend: γ drafted tokens a round; plain decoding is γ = 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy

from distill.benchmark.identity import Identity
from distill.benchmark.prepared import Prepared
from distill.benchmark.watch import Step, Watch
from distill.intervals import speed_ratio
from distill.models.base import Model
from distill.progress import Progress
from distill.recipe import Configuration
from distill.recipe.configuration import PLAIN
from distill.results.speedup_results import ChosenLength, Measurement, PairMeasured
from distill.speculative.decode import Decoded, Round, room_for


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
    prepared: Sequence[Prepared],
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
    prepared: Sequence[Prepared],
    noise: float,
    sizes: Sequence[int] = (),
) -> dict[str, Identity]:
    """For each greedy configuration that drafts, by title, how its texts stand to the plain ones.

    `noise` is the measured or agreed rounding; `noise` and `sizes` decide on ties as in `is_tie`.
    """
    plain_texts = {text.prompt: text.decoded.tokens for text in texts if text.title == PLAIN.title}
    identities = {one.title: Identity() for one in prepared if not one.sampled and one.title != PLAIN.title}
    for text in texts:
        if text.title in identities:
            identities[text.title].count(
                target, prompts[text.prompt], plain_texts[text.prompt], text.decoded.tokens, noise, sizes
            )
    return identities


def measurements(
    texts: Sequence[TimedText],
    prepared: Sequence[Prepared],
    identities: Mapping[str, Identity],
    pair: PairMeasured,
) -> list[Measurement]:
    """The measurement of each configuration, its speedup over the plain run of the same sampler."""
    rows = []
    for one in prepared:
        tokens, seconds = totals(texts, one.title)
        base_tokens, base_seconds = totals(texts, one.base)
        each, accepted = acceptance([r for text in texts if text.title == one.title for r in text.decoded.rounds])
        ratio = speed_ratio(tokens, seconds, base_tokens, base_seconds)
        own = Identity(identical=len(tokens)) if one.title == PLAIN.title else None
        identity = identities.get(one.title, own)
        counts: dict[str, Any] = dict.fromkeys(("identical", "excused", "different"))
        configuration = one.configuration
        row = Measurement(
            **asdict(pair),
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
            **(counts if identity is None else asdict(identity)),
            lossy=one.lossy,
        )
        rows.append(row)
    return rows


def acceptance(rounds: Sequence[Round]) -> tuple[float | None, float | None]:
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


def choose_length(texts: Sequence[TimedText], sweep: Sequence[Configuration], pair: PairMeasured) -> ChosenLength:
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
    return ChosenLength(*pair.key, length, ratio.mean, ratio.low, ratio.high, rate)

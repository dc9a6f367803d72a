"""Plain against speculative decoding of one pair by one backend: interleaved, cold caches, distinct prompts.

Legend: γ drafted tokens a round; plain decoding is γ = 0. A way to decode is named by its γ, or by a title.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from distill.models.base import Model
from distill.progress import Progress
from distill.speculative.decode import Decoded, Rules, decode, plain, room_for, speculative
from distill.speculative.draft import Drafter

TORCH_NOISE = 1e-4  # fp32: logit gaps below this are rounding ties


PLAIN = 0
Way = int | str


@dataclass(frozen=True)
class Trial:
    """One prompt decoded once; `seconds` are those of prompt and tokens together."""

    prompt: int
    way: Way
    seconds: float
    decoded: Decoded


@dataclass(frozen=True)
class Arm:
    """A way to decode that has a title: by a drafter (None: plainly) under `rules`, lossy ones too where they say so.

    `make` gives the drafter as at the start of a session; what it learns it keeps from prompt to prompt.
    """

    title: str
    rules: Rules
    make: Callable[[], Drafter] | None = None
    lossy: bool = False


def run_trials(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    new_tokens: int,
    ends: Collection[int],
    title: str,
    arms: Sequence[Arm] = (),
) -> list[Trial]:
    """Decode every prompt plainly and with each γ, greedily, and by each arm; the order turns from prompt to prompt."""
    named = {arm.title: arm for arm in arms}
    ways: list[Way] = [PLAIN, *lengths, *named]
    trials: list[Trial] = []

    def run(way: Way, drafter: Drafter | None, prompt: Sequence[int], limit: int) -> Decoded:
        if isinstance(way, int):
            return speculative(target, draft, prompt, limit, way, ends) if way else plain(target, prompt, limit, ends)
        arm = named[way]
        if drafter is None:
            return plain(target, prompt, limit, rules=arm.rules)
        result = Decoded()
        for _ in decode(target, drafter, prompt, limit, arm.rules, result, arm.lossy):
            pass
        return result

    def drafters() -> dict[Way, Drafter | None]:
        return {title: arm.make() if arm.make else None for title, arm in named.items()}

    # One throw-away decode per way: lazily made buffers and kernels are not what is measured.
    for way, drafter in [*((way, None) for way in (PLAIN, *lengths)), *drafters().items()]:
        run(way, drafter, prompts[0], min(8, new_tokens))
    kept, progress = drafters(), Progress(title, len(prompts))
    for index, prompt in enumerate(prompts):
        limit = room_for(target, draft, len(prompt), new_tokens)
        turn = index % len(ways)
        for way in ways[turn:] + ways[:turn]:
            started = time.perf_counter()
            decoded = run(way, kept.get(way), prompt, limit)
            trials.append(Trial(index, way, time.perf_counter() - started, decoded))
        progress.step()
    return trials


def rounding_noise(model: Model, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """Largest absolute logit difference between taking `tokens` one at a time and all at once, after `prompt`."""
    model.rollback([0])
    model.extend(prompt, want=[len(prompt) - 1])
    together = model.extend(tokens).full()
    model.rollback([len(prompt)])
    largest = 0.0
    for index, token in enumerate(tokens):
        largest = max(largest, float((model.extend([token]).full()[0] - together[index]).abs().max()))
    return largest


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Where two texts first differ, a shorter one ending early included; None when equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def top_gap(model: Model, context: Sequence[int]) -> float:
    """Difference of the two largest logits after `context`."""
    model.rollback([0])
    _, values = model.extend(context, want=[len(context) - 1]).top(2)
    return float(values[0, 0] - values[0, 1])


def is_tie(
    target: Model,
    prompt: Sequence[int],
    text: Sequence[int],
    other: Sequence[int],
    where: int,
    noise: float,
    together: int = 0,
) -> bool:
    """Whether rounding alone may make `other` differ from the plain `text` first at `where`.

    It may where the target's two best logits lie within `noise`. A type that rounds coarsely does so by how many tokens
    are taken at once, all along the text, which the cache keeps: for it the distance of the two tokens' logits is read
    with the text taken 1, 2, .. and up to `together` tokens at a time, and its spread is the rounding.
    """
    if top_gap(target, [*prompt, *text[:where]]) <= noise:
        return True
    if not together or where >= min(len(text), len(other)):
        return False
    ids, asked = [*prompt, *text], len(prompt) + where - 1
    apart = []
    for size in range(1, together + 1):
        # Plain decoding reads the whole prompt at once; a round reads its last token with what is drafted.
        begin = len(prompt) - (size > 1)
        target.rollback([0])
        if begin:
            logits = target.extend(ids[:begin], want=[begin - 1]).full()[0]
        for start in range(begin, asked + 1, size):
            piece = ids[start : start + size]
            logits = target.extend(piece, want=[min(asked - start, len(piece) - 1)]).full()[0]
        apart.append(float(logits[text[where]] - logits[other[where]]))
    return 0 <= apart[0] <= max(apart) - min(apart)


def judge_identity(
    target: Model, prompts: Sequence[Sequence[int]], trials: Sequence[Trial], noise: float, together: int = 0
) -> dict[Way, dict[str, int]]:
    """For each greedy way, how many prompts gave the plain text, differ first at a rounding tie, or differ otherwise.

    `noise` is the measured or agreed rounding; `noise` and `together` tell a tie as in `is_tie`.
    """
    plain_text = {trial.prompt: trial.decoded.tokens for trial in trials if trial.way == PLAIN}
    verdicts: dict[Way, dict[str, int]] = {}
    for trial in trials:
        if trial.way == PLAIN:
            continue
        verdict = verdicts.setdefault(trial.way, {"identical": 0, "excused": 0, "different": 0})
        text, other = plain_text[trial.prompt], trial.decoded.tokens
        where = first_difference(text, other)
        if where is None:
            verdict["identical"] += 1
        elif is_tie(target, prompts[trial.prompt], text, other, where, noise, together):
            verdict["excused"] += 1
        else:
            verdict["different"] += 1
    return verdicts


def summarise_trials(
    trials: Sequence[Trial], ways: Sequence[Way], resamples: int, confidence: float, base: Way = PLAIN
) -> list[dict[str, Any]]:
    """A row for `base` and one per way: tokens, seconds, tokens/s, speedup over the base, its interval by prompt."""
    count = 1 + max(trial.prompt for trial in trials)
    tokens = {way: numpy.zeros(count) for way in (base, *ways)}
    seconds = {way: numpy.zeros(count) for way in (base, *ways)}
    for trial in trials:
        if trial.way in tokens:
            tokens[trial.way][trial.prompt] += len(trial.decoded.tokens)
            seconds[trial.way][trial.prompt] += trial.seconds
    rows = []
    for way in (base, *ways):
        rounds = [r for trial in trials if trial.way == way for r in trial.decoded.rounds]
        drafted = sum(r.drafted for r in rounds)
        speedup, low, high = speed_ratio(tokens[way], seconds[way], tokens[base], seconds[base], resamples, confidence)
        rows.append(
            {
                "length" if isinstance(way, int) else "way": way,
                "tokens": int(tokens[way].sum()),
                "seconds": float(seconds[way].sum()),
                "tokens_per_second": float(tokens[way].sum() / seconds[way].sum()),
                "tokens_per_round": sum(r.accepted + 1 for r in rounds) / len(rounds) if rounds else None,
                "acceptance": sum(r.accepted for r in rounds) / drafted if drafted else None,
                "speedup": speedup,
                "speedup_low": low,
                "speedup_high": high,
            }
        )
    return rows


def speed_ratio(
    tokens: numpy.ndarray,
    seconds: numpy.ndarray,
    base_tokens: numpy.ndarray,
    base_seconds: numpy.ndarray,
    resamples: int,
    confidence: float,
) -> tuple[float, float, float]:
    """Tokens per second over the base's, with a bootstrap interval that resamples prompts in pairs."""
    drawn = numpy.random.default_rng(0).integers(0, len(tokens), size=(resamples, len(tokens)))
    ratios = (tokens[drawn].sum(1) / seconds[drawn].sum(1)) / (base_tokens[drawn].sum(1) / base_seconds[drawn].sum(1))
    edge = (1 - confidence) / 2
    low, high = numpy.quantile(ratios, [edge, 1 - edge])
    value = (tokens.sum() / seconds.sum()) / (base_tokens.sum() / base_seconds.sum())
    return float(value), float(low), float(high)


def choose_length(trials: Sequence[Trial], lengths: Sequence[int], resamples: int, confidence: float) -> dict[str, Any]:
    """The better of plain and speculative: γ chosen on the even prompts, its speedup on the odd ones."""
    # Renumbered, so that no prompt is counted that has no trial.
    even, odd = (
        [Trial(t.prompt // 2, t.way, t.seconds, t.decoded) for t in trials if t.prompt % 2 == side] for side in (0, 1)
    )
    chosen = max(summarise_trials(even, lengths, 100, confidence), key=lambda row: row["tokens_per_second"])["length"]
    row = next(r for r in summarise_trials(odd, lengths, resamples, confidence) if r["length"] == chosen)
    return {name: row[name] for name in ("length", "speedup", "speedup_low", "speedup_high", "tokens_per_second")}


def compare_library(
    target: Model,
    library: Callable[[Sequence[int], int], int],
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    ends: Collection[int],
) -> dict[str, float]:
    """Tokens per second of our plain decoder and of a library's greedy generation, in turn on the same prompts.

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
    return {
        "plain_tokens_per_second": float(numpy.median(speeds["ours"])),
        "library_tokens_per_second": float(numpy.median(speeds["library"])),
        "ratio": float(numpy.median(ratios)),
    }

"""Figures of watched texts: per class of prompt, per depth, and where the seconds of a round go.

Legend: m tokens of a step, n drafted tokens, T target, D draft, τ tokens of a round.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy

from distill.benchmark.compare import TimedText, speed_ratio, totals
from distill.benchmark.pair.watch import Text, Watch
from distill.benchmark.prepared import Prepared
from distill.models.base import Model
from distill.recipe.configuration import PLAIN, PLAIN_SAMPLED
from distill.results.pair_results import GroupFigures, RoundFigures, StepFigures
from distill.speculative.costs.curve import measure_steps
from distill.speculative.decode import Round

FIRST_DEPTH = 128  # tokens at which the second range of depths begins; each later range is twice as long


def base_title(one: Prepared, titles: Sequence[str]) -> str:
    """The plain configuration of the same sampler."""
    return PLAIN_SAMPLED.title if one.sampled and PLAIN_SAMPLED.title in titles else PLAIN.title


def by_class(
    texts: Sequence[TimedText],
    prepared: Sequence[Prepared],
    classes: Sequence[str],
    resamples: int,
    confidence: float,
) -> list[GroupFigures]:
    """Every configuration on the prompts of each class; none where there is one class only."""
    titles = [one.title for one in prepared]
    found = []
    for name in dict.fromkeys(classes) if len(set(classes)) > 1 else ():
        numbers = {number: place for place, number in enumerate(n for n, one in enumerate(classes) if one == name)}
        own = [TimedText(numbers[t.prompt], t.title, t.seconds, t.decoded) for t in texts if t.prompt in numbers]
        for one in prepared:
            tokens, seconds = totals(own, one.title)
            ratio = speed_ratio(tokens, seconds, *totals(own, base_title(one, titles)), resamples, confidence)
            low, high = ratio[1:] if len(numbers) > 1 else (math.nan, math.nan)
            rounds = [r for t in own if t.title == one.title for r in t.decoded.rounds]
            rate = float(tokens.sum() / seconds.sum())
            found.append(_group(name, one.title, len(numbers), int(tokens.sum()), rate, rounds, (ratio[0], low, high)))
    return found


def _group(
    group: str,
    title: str,
    count: int,
    tokens: int,
    rate: float,
    rounds: Sequence[Round],
    ratio: tuple[float, float, float] | None,
) -> GroupFigures:
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    each = (accepted + len(rounds)) / len(rounds) if rounds else None
    speedup, low, high = ratio or (None, math.nan, math.nan)
    share = accepted / drafted if drafted else None
    return GroupFigures(group, title, count, tokens, rate, each, share, speedup, low, high)


def _range(depth: int) -> tuple[int, int]:
    """The range of depths that a depth lies in, its end excluded."""
    if depth < FIRST_DEPTH:
        return 0, FIRST_DEPTH
    start = 2 ** int(math.log2(depth))
    return start, 2 * start


def _step_seconds(text: Text) -> list[tuple[int, float]]:
    """Depth and seconds of each plain step, until the next one begins."""
    ends = [step.started for step in text.target[1:]] + [step.started + step.seconds for step in text.target[-1:]]
    return [(step.depth, end - step.started) for step, end in zip(text.target, ends, strict=True)]


def by_depth(watch: Watch, prepared: Sequence[Prepared]) -> list[GroupFigures]:
    """Every configuration that drafts, on its rounds at each range of depths, against plain steps there."""
    titles, found = list(watch.texts), []
    plain: dict[str, dict[tuple[int, int], list[float]]] = {}
    for title in titles:
        for text in watch.texts[title]:
            for depth, seconds in () if text.decoded.rounds else _step_seconds(text):
                plain.setdefault(title, {}).setdefault(_range(depth), []).append(seconds)
    for one in prepared:
        rounds: dict[tuple[int, int], list[Round]] = {}
        for text in watch.texts[one.title]:
            for r in text.decoded.rounds:
                rounds.setdefault(_range(r.depth), []).append(r)
        for span, own in sorted(rounds.items()):
            tokens, seconds = sum(r.accepted + 1 for r in own), sum(r.seconds for r in own)
            steps = plain.get(base_title(one, titles), {}).get(span)
            ratio = None if not steps else (tokens / seconds * statistics.fmean(steps), math.nan, math.nan)
            found.append(_group(f"{span[0]}–{span[1] - 1}", one.title, len(own), tokens, tokens / seconds, own, ratio))
    return sorted(found, key=lambda figures: int(figures.group.split("–")[0]))


def typical_depth(watch: Watch) -> int:
    """The median depth of all steps of the target."""
    depths = [step.depth for texts in watch.texts.values() for text in texts for step in text.target]
    return int(statistics.median(depths)) if depths else 1


def time_steps(watch: Watch, target: Model, draft: Model | None, depth: int, repeats: int) -> StepFigures:
    """T(m) and D(m) with one model alone, for every m that the watched texts came to."""
    own = [text for texts in watch.texts.values() for text in texts]
    sizes = {step.tokens for text in own for step in text.target} | {1}
    drafting = {step.tokens for text in own for step in text.draft} | {1, 2}

    def timed(model: Model, counts: set[int]) -> dict[int, float]:
        room = max(1, min(depth, model.capacity - max(counts)))
        found = measure_steps(model, sorted(counts), room, repeats, model.vocabulary_size)
        return {m: seconds[0] for m, seconds in found.items()}

    return StepFigures(depth, timed(target, sizes), {} if draft is None else timed(draft, drafting))


def round_figures(title: str, texts: Sequence[Text], steps: StepFigures, tree: bool, synchronous: bool) -> RoundFigures:
    """Where the seconds of a configuration's rounds went, and how near it came to the bound of its steps.

    A chain's draft step after a whole accepted round takes two tokens; the bound counts it as D(1).
    """
    rounds = [r for text in texts for r in text.decoded.rounds]
    target = [step for text in texts for step in text.target]
    draft = [step for text in texts for step in text.draft]
    if rounds:
        count, tokens, seconds = len(rounds), sum(r.accepted + 1 for r in rounds), sum(r.seconds for r in rounds)
    else:
        count = tokens = max(len(target), 1)
        seconds = sum(second for text in texts for _, second in _step_seconds(text))
    alone = sum(steps.target[step.tokens] for step in target)
    alone += sum(steps.draft[1 if step.tokens == 2 and not tree else step.tokens] for step in draft)
    paid = [sum(step.seconds for step in own) / count for own in (target, draft)]
    measured, bound = tokens / seconds if seconds else math.nan, tokens / alone if alone else math.nan
    return RoundFigures(
        configuration=title,
        rounds=count,
        tokens=tokens / count,
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


def prompt_seconds(texts: Mapping[str, Sequence[Text]], title: str) -> float:
    """Mean seconds of a prompt and its first token."""
    return float(numpy.mean([text.decoded.prefill_seconds for text in texts[title]]))

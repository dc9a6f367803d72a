"""Figures of watched texts: where the seconds of a round go, and speeds per class of prompt and per depth.

Legend: m tokens of a step, n drafted tokens, T target, D draft, τ tokens of a round.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import astuple, replace

from distill.benchmark.compare import TimedText, acceptance, totals
from distill.benchmark.prepared import Prepared
from distill.intervals import speed_ratio
from distill.models.base import Model
from distill.recipe.configuration import TREES, DrafterName
from distill.results.pair_results import GroupFigures
from distill.results.speedup_results import RoundFigures, StepFigures
from distill.speculative.costs.curve import measure_steps
from distill.speculative.decode import Round

FIRST_DEPTH = 128  # tokens at which the second range of depths begins; each later range is twice as long


def by_class(texts: Sequence[TimedText], prepared: Sequence[Prepared], classes: Sequence[str]) -> list[GroupFigures]:
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
            accepted = acceptance([r for t in own if t.title == one.title for r in t.decoded.rounds])
            size = (len(numbers), int(tokens.sum()), float(tokens.sum() / seconds.sum()))
            groups.append(GroupFigures(name, one.title, *size, *accepted, *astuple(ratio)))
    return groups


def _range(depth: int) -> tuple[int, int]:
    """The range of depths that a depth lies in, its end excluded."""
    if depth < FIRST_DEPTH:
        return 0, FIRST_DEPTH
    start = 2 ** int(math.log2(depth))
    return start, 2 * start


def _step_seconds(text: TimedText) -> list[tuple[int, float]]:
    """Depth and seconds of each plain step, until the next one begins."""
    ends = [step.started for step in text.target[1:]] + [step.started + step.seconds for step in text.target[-1:]]
    return [(step.depth, end - step.started) for step, end in zip(text.target, ends, strict=True)]


def by_depth(texts: Sequence[TimedText], prepared: Sequence[Prepared]) -> list[GroupFigures]:
    """Every configuration that drafts, on its rounds at each range of depths, against plain steps there."""
    ranges = []
    plain: dict[tuple[str, tuple[int, int]], list[float]] = {}
    for text in texts:
        for depth, seconds in () if text.decoded.rounds else _step_seconds(text):
            plain.setdefault((text.title, _range(depth)), []).append(seconds)
    for one in prepared:
        rounds: dict[tuple[int, int], list[Round]] = {}
        for r in (r for text in texts if text.title == one.title for r in text.decoded.rounds):
            rounds.setdefault(_range(r.depth), []).append(r)
        for span, own in sorted(rounds.items()):
            tokens, taken = sum(r.accepted + 1 for r in own), sum(r.seconds for r in own)
            steps = plain.get((one.base, span))
            gain = tokens / taken * statistics.fmean(steps) if steps else None
            size = (len(own), tokens, tokens / taken)
            group = f"{span[0]}–{span[1] - 1}"
            ranges.append(GroupFigures(group, one.title, *size, *acceptance(own), gain, math.nan, math.nan))
    return sorted(ranges, key=lambda figures: int(figures.group.split("–")[0]))


def time_steps(texts: Sequence[TimedText], target: Model, draft: Model | None, repeats: int) -> StepFigures:
    """T(m) and D(m) with one model alone, for every m that the texts came to, at the median depth of their steps."""
    depths = [step.depth for text in texts for step in text.target]
    depth = int(statistics.median(depths)) if depths else 1

    def timed(model: Model, counts: set[int]) -> dict[int, float]:
        room = max(1, min(depth, model.capacity - max(counts)))
        medians = measure_steps(model, sorted(counts), room, repeats, model.vocabulary_size)
        return {m: seconds[0] for m, seconds in medians.items()}

    return StepFigures(
        depth,
        timed(target, {step.tokens for text in texts for step in text.target} | {1}),
        {} if draft is None else timed(draft, {step.tokens for text in texts for step in text.draft} | {1, 2}),
    )


def round_figures(one: Prepared, texts: Sequence[TimedText], steps: StepFigures, synchronous: bool) -> RoundFigures:
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
    if drafter == "lookup+tree":
        return None
    return 1 + (steps if drafter == "tree" else sum(r.drafted for r in rounds)) / len(rounds)

"""Why a pair is faster than plain decoding, or not, and what to change: sentences whose every number was measured.

Legend: a round costs plain steps, the seconds of a token of plain decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distill.recipe.configuration import PLAIN, PLAIN_SAMPLED
from distill.results.speedup_results import ChosenLength, Measurement, RoundFigures, StepFigures

HARDLY_DRAFTS = 0.2  # verified tokens of a round, less the one that plain decoding has: below, hardly any is drafted
LARGEST_ERROR = 1.25  # times the predicted speedup, or its inverse: predictions are within a tenth on a quiet machine
LEAST_GAIN = 1.02  # a change that raises the speedup by less is no advice

# What might change, what it would mean, and how to go about it.
ADVICE = {
    "acceptance": (
        "with every drafted token accepted",
        "train longer, or on answers to prompts like those that are served",
    ),
    "draft": (
        "with a draft that costs nothing",
        "take a smaller draft: fewer layers, q8_0 instead of f16, or, in PyTorch only, a trimmed head",
    ),
    "verification": (
        "if verifying cost no more than a plain step",
        "draft fewer tokens a round, or serve the target in a type or build whose steps over several tokens cost less "
        "(`distill profile`)",
    ),
    "rest": (
        "with nothing spent beside the models",
        "take a larger target, or more prompts at once: these models are too small for what surrounds them",
    ),
}


def explain(
    steps: StepFigures,
    rows: Sequence[Measurement],
    rounds: Sequence[RoundFigures],
    chosen: ChosenLength | None,
    prompts: Mapping[str, float],
) -> list[str]:
    """Sentences about the fastest configuration that drafts, and about the length that was chosen.

    `prompts` are the seconds of a prompt by configuration: a draft reads it too.
    """
    drafting = [row for row in rows if not row.is_plain]
    if not drafting:
        return ["Nothing was drafted."]
    by_title = {figures.configuration: figures for figures in rounds}
    best = max(drafting, key=lambda row: row.speedup)
    base = PLAIN_SAMPLED if best.sampler is not None and PLAIN_SAMPLED.title in by_title else PLAIN
    plain, figures = by_title[base.title].seconds, by_title[best.configuration]
    sentences = ["The texts end with their first token: no round was timed."]
    if plain and figures.seconds:
        sentences = [
            _costs(steps, best, figures, plain),
            *_verdict(best, figures, plain, prompts),
            *_advice(best, drafting, by_title, plain),
        ]
    if chosen is not None and chosen.length:
        # Of a single odd prompt there is no interval.
        interval = f" [{chosen.speedup_low:.2f}, {chosen.speedup_high:.2f}]"
        sentences.append(
            f"Cross-check: of the fixed lengths {chosen.length} is the fastest on every other prompt, and gives on the "
            f"rest {chosen.speedup:.2f}×{interval if chosen.speedup_low < chosen.speedup_high else ''}."
        )
    elif chosen is not None:
        sentences.append("Cross-check: plain decoding beats the fixed lengths on every other prompt.")
    return sentences


def _costs(steps: StepFigures, best: Measurement, figures: RoundFigures, plain: float) -> str:
    """What a step of each model and a round of the fastest configuration cost, and what the round gives."""
    alone, draft = steps.target[1], steps.draft.get(1)
    head = f"One token takes the target {alone * 1e3:.2f} ms at depth {steps.depth}"
    if draft is not None:
        head += f", the draft {draft / alone:.2f} of that"
    parts = "not told apart: the device computes on after a call returns"
    if figures.target_seconds is not None:
        paid = (figures.target_seconds, figures.draft_seconds or 0.0, figures.overhead_seconds or 0.0)
        target, drafted, rest = (seconds / plain for seconds in paid)
        parts = (
            f"the target's step over {figures.verified:.1f} tokens {target:.2f}, {figures.draft_steps:.1f} draft steps "
            f"{drafted:.2f}, the rest {rest:.2f}"
        )
    return (
        f"{head}. Fastest: `{best.configuration}`, {best.speedup:.2f}× over the whole request. A round costs "
        f"{figures.seconds / plain:.2f} plain steps ({parts}) and gives {figures.tokens:.2f} tokens."
    )


def _verdict(best: Measurement, figures: RoundFigures, plain: float, prompts: Mapping[str, float]) -> list[str]:
    """Whether the speed is far from its prediction, and why it is no gain where it is none."""
    sentences = []
    if best.predicted is not None and not 1 / LARGEST_ERROR < best.speedup / best.predicted < LARGEST_ERROR:
        sentences.append(
            f"Costs and acceptance predict {best.predicted:.2f}×, which is far from it: another program used the "
            "machine (`distill doctor` names it), or the prompts are too few."
        )
    if best.speedup_low > 1:
        return sentences
    paid = figures.tokens >= figures.seconds / plain
    if paid and best.speedup >= 1:
        why = "It is faster, but not by more than these prompts vary: measure more of them (--count; in a recipe, "
        return [*sentences, why + "speedup.prompts)."]
    if _hardly_drafts(figures):
        rule = ": its rule expects no gain from more" if best.rule == "expected-value" else ""
        why = f"it verifies {figures.verified:.2f} tokens a round, so it hardly drafts{rule}"
    elif paid:
        why = (
            f"its rounds are fast enough, but reading the prompt takes {prompts[best.configuration] * 1e3:.1f} ms with "
            f"the draft, {prompts[PLAIN.title] * 1e3:.1f} ms without"
        )
    else:
        accepted = "" if best.acceptance is None else f" (accepted: {best.acceptance:.0%})"
        why = f"a round gives fewer tokens than the plain steps that it costs{accepted}"
    return [*sentences, f"It is no faster than plain decoding: {why}."]


def _hardly_drafts(figures: RoundFigures) -> bool:
    return figures.verified < 1 + HARDLY_DRAFTS and (figures.most or 0) < 1 + HARDLY_DRAFTS


def _advice(
    best: Measurement, drafting: Sequence[Measurement], by_title: Mapping[str, RoundFigures], plain: float
) -> list[str]:
    """The one change that raises the speedup of rounds most: of the fastest configuration or, where that hardly drafts
    and so has little to gain, of the fastest fixed length."""
    fixed = [one for one in drafting if one.length and one.sampler == best.sampler]
    hardly = _hardly_drafts(by_title[best.configuration])
    subject = max(fixed, key=lambda one: one.speedup) if hardly and fixed else best
    figures = by_title[subject.configuration]
    changes = _changed(subject, figures, plain)
    now = figures.tokens / (figures.seconds / plain) if figures.seconds else 0.0
    name = max(changes, key=lambda name: changes[name], default="")
    if not changes or changes[name] < LEAST_GAIN * now:
        return []
    change, todo = ADVICE[name]
    gain = f"would give {changes[name]:.2f}× instead of {now:.2f}×"
    if changes[name] < 1:
        return [
            f"No change of one thing makes drafting faster than plain decoding here. The most, {change}, {gain}. What "
            "to do: decode plainly here; `distill plan` says what another type, build or machine would have to cost."
        ]
    return [f"What to change: {change}, the rounds of `{subject.configuration}` {gain}. So {todo}."]


def _changed(measured: Measurement, figures: RoundFigures, plain: float) -> dict[str, float]:
    """The speedup of the rounds with one thing changed: everything accepted, a draft at no cost, verifying as cheap as
    a plain step, nothing spent beside the models. Without acceptance where tokens are looked up, which no training
    changes; empty where the parts of a round were not timed."""
    if figures.target_seconds is None:
        return {}
    paid = (figures.target_seconds, figures.draft_seconds or 0.0, figures.overhead_seconds or 0.0)
    target, draft, rest = (seconds / plain for seconds in paid)
    cost, tokens = target + draft + rest, figures.tokens
    if cost <= 0:  # texts of one token have no rounds
        return {}
    most = {} if figures.most is None else {"acceptance": max(figures.most, tokens) / cost}
    return (most if measured.drafter != "lookup" else {}) | {
        "draft": tokens / (cost - draft),
        "verification": tokens / (min(target, 1.0) + draft + rest),
        "rest": tokens / (cost - max(rest, 0.0)),
    }

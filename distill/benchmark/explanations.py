"""Why a pair pays, or does not: sentences in which every number was measured.

Legend: n drafted tokens, T target, D draft, τ tokens of a round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distill.recipe.configuration import PLAIN, PLAIN_SAMPLED
from distill.results.speedup_results import ChosenLength, Measurement, RoundFigures, StepFigures

SMALL = 0.05  # of a plain step: what is less is not named as a reason
SPARING = 0.2  # verified tokens of a round beside the one that plain decoding has: below, hardly anything is drafted
FAR = 1.25  # times the predicted speedup, or its inverse: predictions are within a tenth on a quiet machine


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
    single, figures = by_title[base.title].seconds, by_title[best.configuration]
    sentences = ["The texts end with their first token: no round was timed."]
    if single and figures.seconds:
        sentences = _costs(steps, best, figures, single, prompts)
        sentences += _of_lengths(steps, best, drafting, by_title, single, prompts)
    if chosen is not None and chosen.length:
        # Of a single odd prompt there is no interval.
        interval = f" [{chosen.speedup_low:.2f}, {chosen.speedup_high:.2f}]"
        sentences.append(
            f"Cross-check: of the fixed lengths {chosen.length} is the fastest on every other prompt, and gives on the "
            f"rest {chosen.speedup:.2f}x{interval if chosen.speedup_low < chosen.speedup_high else ''}."
        )
    elif chosen is not None:
        sentences.append("Cross-check: plain decoding beats the fixed lengths on every other prompt.")
    return sentences


def _of_lengths(
    steps: StepFigures,
    best: Measurement,
    drafting: Sequence[Measurement],
    by_title: Mapping[str, RoundFigures],
    single: float,
    prompts: Mapping[str, float],
) -> list[str]:
    """Why the fastest fixed length does not pay, where the fastest configuration is one that hardly drafts."""
    if best.speedup_low > 1 or not _sparing(by_title[best.configuration]):
        return []
    lengths = [one for one in drafting if one.length and one.sampler == best.sampler and one.speedup > 0]
    if not lengths:
        return []
    fastest = max(lengths, key=lambda one: one.speedup)
    figures, draft = by_title[fastest.configuration], steps.draft.get(1, 0.0) / steps.target[1]
    paid = figures.tokens >= figures.seconds / single and fastest.speedup >= 1  # by chance, or it would be the best
    if not figures.seconds or fastest.speedup_low > 1 or paid:
        return []
    cause = _cause(fastest, figures, single, draft, prompts)
    return [f"The fastest fixed length is `{fastest.configuration}`, {fastest.speedup:.2f}x: {cause}."]


def _sparing(figures: RoundFigures) -> bool:
    return figures.verified < 1 + SPARING and (figures.most or 0) < 1 + SPARING


def _costs(
    steps: StepFigures, best: Measurement, figures: RoundFigures, single: float, prompts: Mapping[str, float]
) -> list[str]:
    """What a round of the fastest configuration costs and gives, and why that does not pay where it does not.

    `single` are the seconds of a plain step as it was paid.
    """
    round_steps = figures.seconds / single
    alone, draft = steps.target[1], steps.draft.get(1)
    head = f"T(1) = {alone * 1e3:.2f} ms at depth {steps.depth}"
    if draft is not None:
        head += f", D = {draft / alone:.2f} T(1)"
    bound = ""
    if figures.most is not None:
        bound = f"If every drafted token were accepted, such rounds would give {figures.most / round_steps:.2f}x. "
    sentences = [
        f"{head}. Fastest: `{best.configuration}`, {best.speedup:.2f}x over the whole request. A round costs "
        f"{round_steps:.2f} plain steps ({_parts(figures, single)}) and gives {figures.tokens:.2f} tokens.",
        f"{bound}A round takes {figures.seconds * 1e3:.2f} ms; its steps, timed with one model alone, take "
        f"{figures.attained * figures.seconds * 1e3:.2f} ms. The rest goes to "
        f"{'two models taking turns, ' if figures.draft_steps else ''}reading logits and rolling back.",
    ]
    if best.predicted is not None and not 1 / FAR < best.speedup / best.predicted < FAR:
        sentences.append(
            f"Costs and acceptance predict {best.predicted:.2f}x, which is far from it: another program used the "
            "machine (`distill doctor` names it), or the prompts are too few."
        )
    if best.speedup_low > 1:
        return sentences
    if figures.tokens >= round_steps and best.speedup >= 1:
        return [
            *sentences,
            "It is faster, but not by more than these prompts vary: measure more of them (--count; in a recipe, "
            "speedup.prompts).",
        ]
    cause = _cause(best, figures, single, (draft or 0.0) / alone, prompts)
    return [*sentences, f"It does not pay here: {cause}."]


def _parts(figures: RoundFigures, single: float) -> str:
    if figures.target_seconds is None or figures.draft_seconds is None or figures.overhead_seconds is None:
        return "not told apart: the device computes on after a call returns"
    return (
        f"the target's step over {figures.verified:.1f} tokens {figures.target_seconds / single:.2f}, "
        f"{figures.draft_steps:.1f} draft steps {figures.draft_seconds / single:.2f}, "
        f"the rest {figures.overhead_seconds / single:.2f}"
    )


def _cause(best: Measurement, figures: RoundFigures, single: float, draft: float, prompts: Mapping[str, float]) -> str:
    """The largest cause why the fastest configuration is not faster than plain decoding; `draft` is D ÷ T(1)."""
    round_steps = figures.seconds / single
    if _sparing(figures):
        why = ": its rule expects that more would not pay" if best.rule == "expected-value" else ""
        return f"it verifies {figures.verified:.2f} tokens a round, so it hardly drafts{why}"
    if draft >= 1 and figures.draft_steps:
        return f"the draft is no faster than its target: D is {draft:.2f} T(1)"
    if figures.most is not None and figures.most <= round_steps:
        causes = {
            "verifying several tokens is expensive": (figures.target_seconds or 0) / single - 1,
            "the draft is expensive": (figures.draft_seconds or 0) / single,
            "much is spent beside the models": (figures.overhead_seconds or 0) / single,
        }
        largest = max(causes, key=lambda name: causes[name])
        return (
            f"no acceptance would be enough: a round of {figures.most:.1f} tokens, all accepted, costs "
            f"{round_steps:.2f} plain steps"
            + (f"; above all, {largest} ({causes[largest]:.2f} plain steps)" if causes[largest] > SMALL else "")
        )
    if figures.tokens < round_steps:
        accepted = "" if best.acceptance is None else f" (accepted: {best.acceptance:.0%})"
        return f"{figures.tokens:.2f} tokens a round are fewer than the {round_steps:.2f} that pay for it{accepted}"
    return (
        f"the rounds pay, the prompt does not: reading it takes {prompts[best.configuration] * 1e3:.1f} ms with the "
        f"draft, {prompts[PLAIN.title] * 1e3:.1f} ms without"
    )

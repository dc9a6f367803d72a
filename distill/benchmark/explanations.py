"""Why a pair pays, or does not: sentences in which every number was measured.

Legend: n drafted tokens, T target, D draft, τ tokens of a round.
"""

from __future__ import annotations

from collections.abc import Sequence

from distill.recipe.configuration import PLAIN, PLAIN_SAMPLED
from distill.results.pair_results import StepFigures
from distill.results.speedup_results import ChosenLength, Measurement, RoundFigures

SMALL = 0.05  # of a plain step: what is less is not named as a reason


def explain(
    steps: StepFigures,
    rows: Sequence[Measurement],
    rounds: Sequence[RoundFigures],
    chosen: ChosenLength | None,
    prompts: tuple[float, float],
    synthetic: bool,
) -> list[str]:
    """Sentences about the fastest configuration that drafts, and about the length that was chosen.

    `prompts` are seconds of a prompt, plainly and with a draft that reads it too.
    """
    named = {figures.configuration: figures for figures in rounds}
    drafting = [row for row in rows if not row.is_plain]
    if not drafting:
        return ["Nothing was drafted."]
    best = max(drafting, key=lambda row: row.speedup)
    found = named[best.configuration]
    base = PLAIN_SAMPLED if best.sampler is not None and PLAIN_SAMPLED.title in named else PLAIN
    single = named[base.title].seconds  # a plain step as it was paid
    lines = []
    if single and found.seconds:
        lines += _costs(steps, best, found, single, prompts)
    else:
        lines.append("The texts end with their first token: no round was timed.")
    if synthetic:
        lines.append("Acceptance is synthetic: these speedups are of the costs alone, no text of this pair has them.")
    elif chosen is not None and chosen.length:
        lines.append(
            f"{chosen.length} drafted tokens a round were chosen on the even prompts; on the odd ones they give "
            f"{chosen.speedup:.2f}x [{chosen.speedup_low:.2f}, {chosen.speedup_high:.2f}]."
        )
    elif chosen is not None:
        lines.append("Of the lengths, plain decoding was fastest on the even prompts.")
    return lines


def _costs(
    steps: StepFigures, best: Measurement, found: RoundFigures, single: float, prompts: tuple[float, float]
) -> list[str]:
    """What a round of the fastest configuration costs and gives, and why that does not pay where it does not.

    `single` are the seconds of a plain step.
    """
    wanted = found.seconds / single
    alone, draft = steps.target[1], steps.draft.get(1)
    head = f"T(1) = {alone * 1e3:.2f} ms at depth {steps.depth}"
    if draft is not None:
        head += f", D = {draft / alone:.2f} T(1)"
    every = ""
    if found.most is not None:
        every = f"If every drafted token were accepted, such rounds would give {found.most / wanted:.2f}x. "
    lines = [
        f"{head}. Fastest: `{best.configuration}`, {best.speedup:.2f}x over the whole request. A round costs "
        f"{wanted:.2f} plain steps ({_parts(found, single)}) and gives {found.tokens:.2f} tokens.",
        f"{every}A round pays {found.seconds * 1e3:.2f} ms; its steps, timed with one model alone, take "
        f"{found.attained * found.seconds * 1e3:.2f} ms. The rest goes to "
        f"{'two models taking turns, ' if found.draft_steps else ''}reading logits and rolling back.",
    ]
    if best.speedup_low <= 1:
        lines.append(_against(best, found, wanted, single, (draft or 0.0) / alone, prompts))
    return lines


def _parts(found: RoundFigures, single: float) -> str:
    if found.target_seconds is None or found.draft_seconds is None or found.overhead_seconds is None:
        return "not told apart: the device computes on after a call returns"
    parts = (
        f"the target's step over {found.verified:.1f} tokens {found.target_seconds / single:.2f}",
        f"{found.draft_steps:.1f} draft steps {found.draft_seconds / single:.2f}",
        f"the rest {found.overhead_seconds / single:.2f}",
    )
    return ", ".join(parts)


def _against(
    best: Measurement,
    found: RoundFigures,
    wanted: float,
    single: float,
    draft: float,
    prompts: tuple[float, float],
) -> str:
    """Why the fastest configuration is not clearly faster than plain decoding: the largest cause first.

    `single` are the seconds of a plain step, `wanted` a round's in such steps, `draft` is D ÷ T(1).
    """
    if found.tokens >= wanted and best.speedup >= 1:
        return (
            "It is faster, but not by more than these prompts vary: measure more of them (--count; in a recipe, "
            "speedup.prompts)."
        )
    if draft >= 1 and found.draft_steps:
        cause = f"the draft is no faster than its target: D is {draft:.2f} T(1)"
    elif found.most is not None and found.most <= wanted:
        cause = (
            f"no acceptance would be enough: a round of {found.most:.1f} tokens, all accepted, costs {wanted:.2f} "
            "plain steps"
        )
        causes = {
            "verifying several tokens is expensive": (found.target_seconds or 0) / single - 1,
            "the draft is expensive": (found.draft_seconds or 0) / single,
            "much is spent beside the models": (found.overhead_seconds or 0) / single,
        }
        largest = max(causes, key=lambda name: causes[name])
        if causes[largest] > SMALL:
            cause += f"; above all, {largest} ({causes[largest]:.2f})"
    elif found.tokens < wanted:
        cause = f"{found.tokens:.2f} tokens a round are fewer than the {wanted:.2f} that pay for it"
        if best.acceptance is not None:
            cause += f" (accepted: {best.acceptance:.0%})"
    else:
        before, after = prompts
        cause = (
            f"the rounds pay, the prompt does not: reading it takes {after * 1e3:.1f} ms with the draft, "
            f"{before * 1e3:.1f} ms without"
        )
    return f"It does not pay here: {cause}."

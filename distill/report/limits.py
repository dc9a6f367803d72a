"""The limits of a run's figures, in sentences for the report page and the model card."""

from __future__ import annotations

from distill.results.evaluation_results import EvaluationReport
from distill.results.run_results import RunResults
from distill.results.speedup_results import FASTER, SpeedupReport
from distill.tables import known, number

WIDE = 1.5  # an interval's upper end over its lower one, from which on the figure between them says little


def limits(results: RunResults) -> list[str]:
    """Everything a reader must know before quoting these figures, one sentence each."""
    machine = results.machine
    place = f"{machine['cpu']} ({machine['cores']} cores)" if machine["cpu"] else "one machine"
    sentences = [
        f"Every time and speedup was measured on {place}. Other hardware has other cost curves, so measure there "
        "before you rely on these figures."
    ]
    if not machine["gpu"]:
        sentences.append("No GPU took part: nothing here shows how the pair behaves on one.")
    missing = results.stages_not_run
    if missing:
        sentences.append(f"These stages have not run, so the report makes no claim about them: {', '.join(missing)}.")
    for stage, reason in results.left_out.items():
        sentences.append(f"Stage {stage} was not run: {reason}.")
    if results.speedup:
        sentences += _speedup_limits(results.speedup)
    if results.evaluation:
        sentences.append(_evaluation_limit(results.evaluation))
    if results.export:
        sentences += [f"{fault}." for fault in results.export.faults]
    return sentences


def _speedup_limits(speedup: SpeedupReport) -> list[str]:
    sentences = [
        f"Speedups come from {number(speedup.prompts)} prompts of up to {number(speedup.new_tokens)} new tokens each. "
        "The best draft length of a pair is read off the same runs, and its interval does not cover that choice."
    ]
    if speedup.gguf:
        sentences.append(f"GGUF files were decoded with these options of llama.cpp: {speedup.gguf}.")
    for best in speedup.fastest:
        if best.verdict != FASTER:
            sentences.append(f"{best.pair} ({best.backend}) at its best draft length: {best.verdict}.")
    for best in speedup.best:
        if best.speedup_high > WIDE * best.speedup_low:
            sentences.append(
                f"{best.configuration} ({best.pair}, {best.backend}) lies between {best.speedup_low:.2f}× and "
                f"{best.speedup_high:.2f}×, which is wide: other programs took part of the machine, or "
                f"{number(speedup.prompts)} prompts are too few (speedup.prompts)."
            )
    for one in speedup.measurements:
        if not one.is_plain and one.acceptance is None and known(one.speedup):
            sentences.append(
                f"{one.configuration} ({one.pair}, {one.backend}) drafted nothing: its {one.speedup:.2f}× shows how "
                "much these timings vary."
            )
    different = sum(one.different or 0 for one in speedup.sweep)
    excused = sum(one.excused or 0 for one in speedup.sweep)
    if different:
        sentences.append(
            f"{different} outputs differ from the plain run without a rounding tie that would explain it: treat this "
            "pair as not shown to be lossless."
        )
    if excused:
        sentences.append(
            f"{excused} outputs diverge from the plain run at a rounding tie, where the logits of two tokens are equal "
            "within rounding; they count as excused, not as identical."
        )
    return sentences


def _evaluation_limit(evaluation: EvaluationReport) -> str:
    counts = ", ".join(
        f"{name}: {number(sides['after'].tokens)} tokens of {number(sides['after'].prompts)} prompts"
        for name, sides in evaluation.domains.items()
        if "after" in sides
    )
    return (
        f"Divergences and acceptance hold for the texts they were measured on ({counts}) and for this sampler "
        f"({evaluation.sampler_words})."
    )

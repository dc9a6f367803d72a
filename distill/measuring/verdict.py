"""The verdict of a measurement: the fastest lossless way, the commands that serve and try it, and the reasons.

Every number in these sentences was measured.
"""

from __future__ import annotations

import math
import shlex

from distill.engines.server_commands import served_name, serving
from distill.files import is_gguf
from distill.measuring.speedup_results import (
    Measurement,
    PairMeasured,
    RoundFigures,
    SpeedupPart,
    SpeedupReport,
    speedup_of,
)
from distill.recipe.configuration import USUAL_LENGTH
from distill.recipe.measuring import engine_name
from distill.tables import Interval, Value, counted, shown

# A drafter's name in sentences, the drafters that only use the draft, and those that do without it.
CALLED = {
    "draft": "the draft",
    "string": "the draft",
    "tree": "trees of the draft",
    "lookup": "lookup",
    "lookup+draft": "lookup, else the draft,",
    "lookup+tree": "lookup, else trees of the draft,",
    "table": "the table of n-grams",
}
ALONE, WITHOUT = ("draft", "tree", "string"), ("lookup", "table")


def leader(report: SpeedupReport) -> tuple[SpeedupPart, Measurement, float, float, Value]:
    """Return the part and measurement of the fastest lossless way, its speed, the plain speed, and their ratio.

    Speeds are tokens per second. Plain decoding is returned if nothing is clearly faster. If the engines took turns,
    the numbers come from the turns. Otherwise the ratio of two engines has no interval.
    """
    ratio: Value
    if report.in_turns:
        first, base = report.in_turns[0], next(timed for timed in report.in_turns if timed.speedup == 1)
        best, plain = (_part(report, timed).measurements[timed.place] for timed in (first, base))
        speeds = first.tokens_per_second, base.tokens_per_second
        low, ratio = first.speedup_low, Interval(first.speedup, first.speedup_low, first.speedup_high)
    else:
        best, plain = report.fastest_way, report.plain[0]
        speeds = best.tokens_per_second, plain.tokens_per_second
        low, ratio = best.speedup_low, speedup_of(best)
        if best.key != plain.key:
            low = ratio = speeds[0] / speeds[1]
    chosen = plain if low <= 1 else best
    return _part(report, chosen), chosen, *speeds, ratio


def engine_of(measured: PairMeasured) -> str:
    """Name the engine that was measured, with the type of its files if it differs from the run's."""
    kind = measured.backend.partition(":")[2]
    return engine_name(measured.backend) + (f" ({kind})" if kind else "")


def _part(report: SpeedupReport, measured: PairMeasured) -> SpeedupPart:
    return next(part for part in report.parts if part.key == measured.key)


def verdict(report: SpeedupReport) -> str:
    """State the fastest lossless way, the fastest plain decoding, and what the draft adds.

    If nothing gains, state what would have to change. The text is empty if there is no plain decoding to compare with.
    """
    if not report.plain:
        return ""
    part, best, speed, base, ratio = leader(report)
    texts = counted(report.prompts, "prompt") + (f" of {report.texts}" if report.texts else "")
    texts += "" if part.kl is None else f"; KL {part.kl:.2g} nats to the target's own"
    if best.is_plain:
        plain = f"Nothing is clearly faster than plain decoding in {engine_of(best)}: {base:.1f} tokens/s ({texts})."
        return f"{plain} {explain(part)}"
    called = CALLED[best.drafter or ""] + (f" ({best.configuration})" if best.configuration != best.drafter else "")
    gain = f"{speed:.1f} tokens/s instead of {base:.1f} ({shown(ratio, '×')}, {texts})."
    rivals = sorted((row for row in report.rivals if row.key == best.key), key=lambda row: -row.speedup)
    for words, drafters in (("The draft alone gives", ALONE), ("Without the draft it is", WITHOUT)):
        other = next((row for row in rivals if row.drafter in drafters), None)
        if other is not None and best.drafter not in drafters:
            gain += f" {words} {other.speedup:.2f}×."
    return f"Use {called} in {engine_of(best)}: {gain}"


def next_steps(report: SpeedupReport) -> str:
    """Return commands that serve the fastest way with the server of its engine, and that try it in the same engine."""
    part, best, *_ = leader(report)
    fixed = [row for row in report.rivals if row.key == best.key and row.length]
    length = best.length or max(fixed, key=lambda row: row.speedup, default=best).length or USUAL_LENGTH
    asks = best.drafter not in (None, *WITHOUT) and part.draft is not None
    words = [part.target, *([part.draft or ""] if asks else [])]
    words += ["--table", report.table] if best.drafter == "table" and report.table else []
    words += ["--llama", "library=ik"] if best.backend.startswith("ik") else []
    in_bits = best.backend == "pytorch" and is_gguf(part.target)
    words += ["--pytorch", "target_weights=file"] if in_bits else []
    given = [
        f"{name}={value}" for name, value in best.settings.items() if name not in ("verifier", "sampler", "widths")
    ]
    words += ["-C", ",".join(given)]
    target = served_name(part.target)
    served = serving(best.backend, best.drafter, target, part.draft, length, report.table)
    if in_bits:  # No other server decodes the file's own bits.
        served = shlex.join(["distill", "serve", *words])
    return f"# serve it\n{served}\n# try it\n{shlex.join(['distill', 'generate', 'def fib(n):', *words])}"


# ── Why a pair is faster than plain decoding, or not ──

HARDLY_DRAFTS = (
    0.2  # With fewer verified tokens per round beyond the one of plain decoding, hardly anything is drafted.
)
EXPENSIVE_STEP = 0.3  # plain steps of the target. A more expensive draft step should first become cheaper.


def explanations(report: SpeedupReport) -> list[str]:
    """Explain each pair and backend in a sentence. If a draft's steps are expensive, say how to make them cheaper."""
    many = len(report.parts) > 1
    sentences = [(f"{part.pair}, {part.backend}: " if many else "") + explain(part) for part in report.parts]
    for part in report.parts:
        share = part.steps.draft.get(1, 0.0) / part.steps.target.get(1, math.inf)
        if share <= EXPENSIVE_STEP:
            continue
        if (report.draft or "").endswith(".gguf"):
            sentences.append(
                f"A draft step takes {share:.2f} target steps. `distill profile {report.draft} --types q8_0,q4_0` "
                "measures the file in other types, and what they change."
            )
        if _on_device(part) and "compiled" not in part.pytorch:
            sentences.append(
                f"A draft step takes {share:.2f} target steps. On an accelerator, steps that are not compiled mostly "
                "wait for the processor. `distill serve-check` measures the pair on a server, and `--pytorch "
                "static=true,compile=true` compiles the steps here."
            )
    return sentences


def _on_device(part: SpeedupPart) -> bool:
    """Return whether an accelerator decoded: its steps have no seconds of their own."""
    return any(row.rounds.target_seconds is None for row in part.measurements if row.rounds.seconds)


def explain(part: SpeedupPart) -> str:
    """State what a round of the fastest drafting configuration gives and costs, and why it gains nothing, if so.

    The unit of costs is a plain step, which gives one token of plain decoding.
    """
    drafting = [row for row in part.measurements if row.acceptance is not None and math.isfinite(row.speedup)]
    drafting = [row for row in drafting if row.speedup > 1 or row.rounds.verified >= 1 + HARDLY_DRAFTS] or drafting
    if not drafting:
        return "Nothing was drafted."
    best = max(drafting, key=lambda row: (row.lossy is None, row.speedup))
    base = next(row for row in part.measurements if row.is_plain and row.sampler == best.sampler)
    rounds, plain = best.rounds, base.rounds.seconds
    if not plain or not rounds.seconds:
        return "The texts end with their first token, so no round was timed."
    cost, shares = rounds.seconds / plain, ""
    if (big := rounds.target_seconds) is not None and (small := rounds.draft_seconds) is not None:
        shares = f" ({big / plain:.2f} in the target, {small / plain:.2f} in the draft)"
    return (
        f"Fastest configuration that drafts: `{best.configuration}`, {best.speedup:.2f}× over the whole request. A "
        f"round gives {rounds.tokens:.2f} tokens and costs {cost:.2f} plain steps{shares}{_cause(best, base, cost)}."
    )


def _cause(best: Measurement, base: Measurement, cost: float) -> str:
    """State why a configuration whose rounds cost this many plain steps gains nothing. Empty if it gains."""
    if best.speedup_low > 1:
        return ""
    paid = best.rounds.tokens >= cost
    if best.speedup >= 1:
        return "; prompts vary by more than it gains, so measure more of them (--count; in a recipe, speedup.prompts)"
    if best.rounds.verified < 1 + HARDLY_DRAFTS:
        return f"; it gains nothing, because it hardly drafts ({best.rounds.verified:.2f} tokens verified per round)"
    if paid:
        both, alone = 1e3 * best.prompt_seconds, 1e3 * base.prompt_seconds
        return f"; it gains nothing, because reading the prompt takes {both:.1f} ms with the draft, {alone:.1f} without"
    return f"; it gains nothing, because a round costs more than it gives. {_needed(best.rounds, base.rounds, cost)}"


def _needed(rounds: RoundFigures, plain: RoundFigures, cost: float) -> str:
    """Name each single change that would let a round break even: acceptance, draft or engine."""
    drafted, excess = rounds.verified - 1, cost - rounds.tokens
    changes = []
    if (rate := (cost - 1) / drafted) <= 1:
        changes.append(f"{rate:.0%} of the drafted tokens accepted instead of {(rounds.tokens - 1) / drafted:.0%}")
    for seconds, least, words in (
        (rounds.draft_seconds, 0, "drafting that takes"),
        (rounds.target_seconds, 1, f"an engine whose steps of {rounds.verified:.1f} tokens cost"),
    ):
        if seconds and (need := seconds / plain.seconds - excess) > least:
            changes.append(f"{words} {need:.2f} instead of {seconds / plain.seconds:.2f} plain steps a round")
    return f"It would gain with {', or with '.join(changes)}" if changes else "No single change would make it gain"

"""What a measurement says first: the fastest lossless way in one sentence, the commands that serve and try it, and why
a pair is faster than plain decoding or not, in sentences whose every number was measured."""

from __future__ import annotations

import math
import shlex

from distill.engines.server_commands import serving
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

# By drafter, what a sentence calls it; and which ask the draft alone, or do without it.
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
    """The fastest lossless way with its part, plain decoding where nothing is clearly faster; the tokens per second of
    what is fastest and of the fastest plain decoding, and the ratio: of the engines' turns where they took any. Without
    turns the ratio of two engines has no interval."""
    ratio: Value
    if report.in_turns:
        first, base = report.in_turns[0], next(one for one in report.in_turns if one.speedup == 1)
        best, plain = (_part(report, one).measurements[one.place] for one in (first, base))
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


def engine_of(one: PairMeasured) -> str:
    """The engine that was measured, with the type of its files where that is another than the run's."""
    kind = one.backend.partition(":")[2]
    return engine_name(one.backend) + (f" ({kind})" if kind else "")


def _part(report: SpeedupReport, one: PairMeasured) -> SpeedupPart:
    return next(part for part in report.parts if part.key == one.key)


def verdict(report: SpeedupReport) -> str:
    """The fastest lossless way beside the fastest plain decoding, and what the draft adds; where nothing gains, what
    would have to change. Empty where nothing was measured to compare."""
    if not report.plain:
        return ""
    part, best, speed, base, ratio = leader(report)
    texts = counted(report.prompts, "prompt") + (f" of {report.texts}" if report.texts else "")
    texts += "" if part.kl is None else f"; KL {part.kl:.2g} nats to the target's own"
    if best.is_plain:
        said = f"Nothing is clearly faster than plain decoding in {engine_of(best)}: {base:.1f} tokens/s ({texts})."
        return f"{said} {explain(part)}"
    called = CALLED[best.drafter or ""] + (f" ({best.configuration})" if best.configuration != best.drafter else "")
    said = f"{speed:.1f} tokens/s instead of {base:.1f} ({shown(ratio, '×')}, {texts})."
    own = sorted((one for one in report.rivals if one.key == best.key), key=lambda one: -one.speedup)
    for words, drafters in (("The draft alone gives", ALONE), ("Without the draft it is", WITHOUT)):
        other = next((one for one in own if one.drafter in drafters), None)
        if other is not None and best.drafter not in drafters:
            said += f" {words} {other.speedup:.2f}×."
    return f"Use {called} in {engine_of(best)}: {said}"


def next_steps(report: SpeedupReport) -> str:
    """The commands that serve the fastest way, by the server of its engine, and that try it in the same engine."""
    part, best, *_ = leader(report)
    fixed = [one for one in report.rivals if one.key == best.key and one.length]
    length = best.length or max(fixed, key=lambda one: one.speedup, default=best).length or USUAL_LENGTH
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
    served = serving(best.backend, best.drafter, part.target, part.draft, length, report.table)
    if in_bits:  # no other server decodes so
        served = shlex.join(["distill", "serve", *words])
    return f"# serve it\n{served}\n# try it\n{shlex.join(['distill', 'generate', 'def fib(n):', *words])}"


# ── Why a pair is faster than plain decoding, or not ──

HARDLY_DRAFTS = 0.2  # verified tokens of a round, less the one that plain decoding has: below, hardly any is drafted
DEAR = 0.3  # plain steps of the target: a draft's step that costs more is worth making cheaper before anything else


def explanations(report: SpeedupReport) -> list[str]:
    """A sentence about each pair and backend; of a draft's GGUF file that is slow, how to find a faster type."""
    many = len(report.parts) > 1
    told = [(f"{part.pair}, {part.backend}: " if many else "") + explain(part) for part in report.parts]
    for steps in (part.steps for part in report.parts):
        share = steps.draft.get(1, 0.0) / steps.target.get(1, math.inf)
        if share > DEAR and (report.draft or "").endswith(".gguf"):
            told.append(
                f"A step of the draft takes {share:.2f} of the target's: `distill profile {report.draft} --types "
                "q8_0,q4_0` measures what its file takes in other types, and what they change."
            )
    return told


def explain(part: SpeedupPart) -> str:
    """What a round of the fastest configuration that drafts gives and costs, in plain steps, which are tokens of plain
    decoding; and why that is no gain, where it is none."""
    drafting = [row for row in part.measurements if row.acceptance is not None and math.isfinite(row.speedup)]
    drafting = [row for row in drafting if row.speedup > 1 or row.rounds.verified >= 1 + HARDLY_DRAFTS] or drafting
    if not drafting:
        return "Nothing was drafted."
    best = max(drafting, key=lambda row: (row.lossy is None, row.speedup))
    base = next(row for row in part.measurements if row.is_plain and row.sampler == best.sampler)
    rounds, plain = best.rounds, base.rounds.seconds
    if not plain or not rounds.seconds:
        return "The texts end with their first token: no round was timed."
    cost, shares = rounds.seconds / plain, ""
    if (big := rounds.target_seconds) is not None and (small := rounds.draft_seconds) is not None:
        shares = f" ({big / plain:.2f} in the target, {small / plain:.2f} in the draft)"
    return (
        f"Fastest that drafts: `{best.configuration}`, {best.speedup:.2f}× over the whole request: a round gives "
        f"{rounds.tokens:.2f} tokens and costs {cost:.2f} plain steps{shares}{_cause(best, base, cost)}."
    )


def _cause(best: Measurement, base: Measurement, cost: float) -> str:
    """Why a configuration whose rounds cost this many plain steps is no gain; empty where it is one."""
    if best.speedup_low > 1:
        return ""
    paid = best.rounds.tokens >= cost
    if best.speedup >= 1:
        return "; prompts vary by more than it gains: measure more of them (--count; in a recipe, speedup.prompts)"
    if best.rounds.verified < 1 + HARDLY_DRAFTS:
        return f"; it is no gain, because it hardly drafts: it verifies {best.rounds.verified:.2f} tokens a round"
    if paid:
        both, alone = 1e3 * best.prompt_seconds, 1e3 * base.prompt_seconds
        return f"; it is no gain, because reading the prompt takes {both:.1f} ms with the draft, {alone:.1f} without"
    return f"; it is no gain, because a round gives fewer tokens than that. {_needed(best.rounds, base.rounds, cost)}"


def _needed(rounds: RoundFigures, plain: RoundFigures, cost: float) -> str:
    """What alone would make a round give as many tokens as it costs plain steps: acceptance, draft or engine."""
    drafted, excess = rounds.verified - 1, cost - rounds.tokens
    found = []
    if (rate := (cost - 1) / drafted) <= 1:
        found.append(f"{rate:.0%} of the drafted tokens accepted instead of {(rounds.tokens - 1) / drafted:.0%}")
    for seconds, least, words in (
        (rounds.draft_seconds, 0, "drafting that takes"),
        (rounds.target_seconds, 1, f"an engine whose steps of {rounds.verified:.1f} tokens cost"),
    ):
        if seconds and (need := seconds / plain.seconds - excess) > least:
            found.append(f"{words} {need:.2f} instead of {seconds / plain.seconds:.2f} plain steps a round")
    return f"It would gain with {', or with '.join(found)}" if found else "No one change would make it a gain"

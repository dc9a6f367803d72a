"""What a check of a server found, in sentences, in order of weight."""

from __future__ import annotations

import math

from distill.intervals import Interval
from distill.results.serving_results import Difference, ServedAcceptance, ServeReport
from distill.serving.differences import SMALLEST

LARGE = 0.5  # of a shortfall: differences that explain less leave something to look for


def sentences(report: ServeReport, short: Interval | None) -> list[str]:
    """About acceptance, differences, the texts and the speed; `short` are the tokens per round that the server lacks
    beside our decoder, None where there was nothing to decode with."""
    own = report.acceptance[0]
    found = [_beside(report, own, short)]
    found += [_explained(one) for one in report.differences if one.explains]
    found += [_other(one) for one in report.differences if not one.explains]
    if short is not None and short.low > SMALLEST:
        explained = sum(one.loss.mean for one in report.differences if one.explains)
        if explained < LARGE * short.mean:
            found.append(
                f"{short.mean - explained:.2f} of the missing {short.mean:.2f} tokens per round are not explained by "
                f"these differences. What is left is the build ({report.build}) and its back end: try it without a GPU "
                "(--n-gpu-layers 0 --n-gpu-layers-draft 0), then another build (scripts/build_llama_cpp.sh)."
            )
    if report.texts and report.same_texts < report.texts:
        found.append(
            f"With the draft, {report.texts - report.same_texts} of {report.texts} texts differ from the plain "
            "server's, as happens between nearly equal tokens: steps of several tokens round otherwise than of one."
        )
    return found + _speed(report) + ([report.choice.sentence] if report.choice else [])


def _beside(report: ServeReport, own: ServedAcceptance, short: Interval | None) -> str:
    text = f"The server accepts {own.accepted} of {own.drafted} drafted tokens, {_rate(own.rate)}, {_each(own)}"
    reference = next((one for one in reversed(report.acceptance) if one.source.startswith("distill")), None)
    if reference is not None and short is not None:
        ours = reference.source.replace("distill, ", "our decoder with ")
        text += f"; {ours} {_rate(reference.rate)}, {_each(reference)}"
        if short.low > SMALLEST:
            text += f". It lacks {_interval(short)} tokens per round"
        elif short.high < -SMALLEST:
            text += f". It has {-short.mean:.2f} tokens per round more"
        else:
            text += ": as predicted"
    if not math.isnan(report.predicted):
        text += f". The run measured {report.predicted:.1%} at this draft length"
    return text + "."


def _explained(one: Difference) -> str:
    return (
        f"EXPLAINED: {one.what} is {one.found}, not {one.expected}: that costs {_interval(one.loss)} tokens per round. "
        f"To mend it, {one.advice}."
    )


def _other(one: Difference) -> str:
    if math.isnan(one.loss.mean):
        return f"Not measured: {one.what} is {one.found}, not {one.expected}. If acceptance is low, {one.advice}."
    return f"No cause: {one.what} is {one.found}, not {one.expected}; it costs {_interval(one.loss)} tokens per round."


def _speed(report: ServeReport) -> list[str]:
    rises = [one for one in report.speeds if not math.isnan(one.speedup.mean)]
    if not rises:
        return ["Without a plain server beside it (--plain-url) no speedup was measured."]
    parts = []
    for one in rises:
        bounds = "" if math.isnan(one.speedup.low) else f" [{one.speedup.low:.2f}, {one.speedup.high:.2f}]"
        parts.append(f"{one.speedup.mean:.2f}×{bounds} with {one.concurrency} at once")
    text = f"Speed over the plain server: {', '.join(parts)}."
    slower = [one for one in rises if one.speedup.mean < 1]
    if len(slower) == len(rises):
        return [f"{text} The draft does not pay here."]
    return [f"{text} With many requests at once it does not pay." if slower and slower[0] is not rises[0] else text]


def _rate(found: Interval) -> str:
    return f"{found.mean:.1%} [{found.low:.1%}, {found.high:.1%}]"


def _each(found: ServedAcceptance) -> str:
    each = found.tokens_per_round
    return f"{each.mean:.2f} [{each.low:.2f}, {each.high:.2f}] tokens per round"


def _interval(found: Interval) -> str:
    return f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}]"

"""A check of a server as sentences and tables."""

from __future__ import annotations

import math
from dataclasses import dataclass

from distill.intervals import Interval
from distill.results.serving_results import (
    ConfirmedSettings,
    Difference,
    ServedAcceptance,
    ServedClass,
    ServedSpeed,
    ServeReport,
)
from distill.serving.differences import SMALLEST
from distill.tables import Block, Cell, Columns, Row, Table, bullets, known, listed, shown, table_of

LARGE = 0.5  # of a shortfall: differences that explain less leave something to look for


@dataclass(frozen=True)
class Reference:
    """Our decoder with `files` on the same prompts; `short` are the tokens per round that the server lacks."""

    files: str
    acceptance: ServedAcceptance
    short: Interval


# ── sentences ──


def sentences(report: ServeReport, reference: Reference | None) -> list[str]:
    """About acceptance, differences, the texts and the speed, in order of weight."""
    found = [_beside(report, report.acceptance[0], reference)]
    if not math.isnan(report.drawn.mean):
        found.append(
            f"At n_max {report.n_max}, drafts drawn from the draft (--spec-draft-sampling probabilistic) give "
            f"{shown(report.drawn, '.2f')} tokens per round more than its best tokens."
        )
    found += [_difference(one) for one in sorted(report.differences, key=lambda one: not one.explains)]
    if reference is not None and reference.short.low > SMALLEST:
        short, explained = reference.short.mean, sum(one.loss.mean for one in report.differences if one.explains)
        if explained < LARGE * short:
            found.append(
                f"{short - explained:.2f} of the missing {short:.2f} tokens per round are not explained by "
                f"these differences. What is left is the build ({report.build}) and its back end: try it without a GPU "
                "(--n-gpu-layers 0 --n-gpu-layers-draft 0), then another build (scripts/build_llama_cpp.sh)."
            )
    if report.texts and report.same_texts < report.texts:
        found.append(
            f"With the draft, {report.texts - report.same_texts} of {report.texts} texts differ from the plain "
            "server's, as happens between nearly equal tokens: steps of several tokens round otherwise than of one."
        )
    found.append(_speed(report))
    return [*found, *([report.choice.sentence] if report.choice else [])]


def _beside(report: ServeReport, own: ServedAcceptance, reference: Reference | None) -> str:
    text = f"The server accepts {own.accepted} of {own.drafted} drafted tokens, {_both(own)}"
    if reference is not None:
        text += f"; our decoder with {reference.files} {_both(reference.acceptance)}"
        if reference.short.low > SMALLEST:
            text += f". It lacks {shown(reference.short)} tokens per round"
        elif reference.short.high < -SMALLEST:
            text += f". It has {-reference.short.mean:.2f} tokens per round more"
        else:
            text += ": as predicted"
    if not math.isnan(report.predicted):
        text += f". The run measured {shown(report.predicted, '%')} at this draft length"
    return text + "."


def _both(found: ServedAcceptance) -> str:
    return f"{shown(found.rate, '%')}, {shown(found.tokens_per_round)} tokens per round"


def _difference(one: Difference) -> str:
    what = f"{one.what} is {one.found}, not {one.expected}"
    if one.explains:
        return f"EXPLAINED: {what}: that costs {shown(one.loss)} tokens per round. To mend it, {one.advice}."
    if math.isnan(one.loss.mean):
        return f"Not measured: {what}. If acceptance is low, {one.advice}."
    return f"No cause: {what}; it costs {shown(one.loss)} tokens per round."


def _speed(report: ServeReport) -> str:
    rises = [one for one in report.speeds if not math.isnan(one.speedup.mean)]
    if not rises:
        return "Without a plain server beside it (--plain-url) no speedup was measured."
    text = f"Speed over the plain server: {', '.join(f'{shown(one.speedup)} with {_load(one)}' for one in rises)}."
    if any(one.speedup.mean >= 1 for one in rises):
        return text
    return f"{text} With n_max {report.n_max} the draft makes no load faster here."


# ── tables ──


def serving_blocks(report: ServeReport) -> list[Block]:
    """The sentences, and tables of acceptance, speed, classes and settings."""
    blocks: list[Block] = [
        f"{report.server}, build {report.build}: `{report.served}`. {_sampled(report)}, {report.prompts} prompts × "
        f"up to {report.new_tokens} tokens, cold caches, servers in turn; intervals resample prompts.",
        bullets(report.sentences),
        _acceptance(report),
        _speeds(report),
    ]
    if report.classes:
        of_classes: Columns[ServedClass] = {
            "class": lambda one: one.name,
            "prompts": lambda one: one.prompts,
            "acceptance": lambda one: Cell(one.rate, "%"),
            "tokens per round": lambda one: one.tokens_per_round,
            "speedup": lambda one: Cell(one.speedup, "×"),
        }
        blocks.append(table_of(report.classes, of_classes, report.command, "classes of prompts"))
    if report.differences:
        of_differences: Columns[Difference] = {
            "what differs": lambda one: one.what,
            "found": lambda one: one.found,
            "expected": lambda one: one.expected,
            "tokens per round lost": lambda one: one.loss,
        }
        blocks.append(table_of(report.differences, of_differences, report.command, "differences"))
    if report.choice is not None:
        choice = report.choice
        of_settings: Columns[ConfirmedSettings] = {
            "settings": lambda one: one.settings.title,
            "tokens/s": lambda one: one.tokens_per_second,
            "speed of the chosen ones over these": lambda one: Cell(one.against, "×"),
        }
        blocks += [
            f"{len(choice.tried)} settings were tried on validation prompts in {choice.seconds:.0f} s.",
            table_of(choice.confirmed, of_settings, report.command, "settings on held-out prompts"),
            f"```sh\n{choice.command}\n```",
        ]
    if report.left_out:
        blocks.append(f"Left out: {listed(report.left_out)}.")
    return [*blocks, *(f"Note: {line}." for line in report.notes)]


def _sampled(report: ServeReport) -> str:
    sampler = report.sampler
    if not sampler["temperature"]:
        return "Greedy"
    off = {"top_k": 0, "top_p": 1, "min_p": 0}
    return ", ".join(f"{name} {value:g}" for name, value in sampler.items() if value != off.get(name))


def _acceptance(report: ServeReport) -> Table:
    rows: list[Row] = [
        [
            one.source,
            one.accepted,
            one.drafted,
            Cell(one.rate, "%"),
            one.tokens_per_round,
            ", ".join(f"{share:.2f}" for share in one.by_position or ()),
        ]
        for one in report.acceptance
    ]
    if known(report.predicted):
        rows.append(["the run's own measurement", None, None, Cell(report.predicted, "%"), None, ""])
    heads = ["counted by", "accepted", "drafted", "acceptance", "tokens per round"]
    return Table([*heads, "rounds that accepted position 1, 2, …"], rows, report.command, "acceptance")


def _speeds(report: ServeReport) -> Table:
    def milliseconds(seconds: float) -> Cell:
        return Cell(seconds * 1e3, ".1f")

    columns: Columns[ServedSpeed] = {
        "load": _load,
        "configuration": lambda one: one.configuration,
        "requests": lambda one: one.requests,
        "in flight": lambda one: Cell(one.in_flight, ".1f"),
        "requests/s": lambda one: Cell(one.requests_per_second, ".3g"),
        "tokens/s": lambda one: one.tokens_per_second,
        "first token, ms, p50": lambda one: milliseconds(one.first_seconds[0]),
        "first token, ms, p95": lambda one: milliseconds(one.first_seconds[1]),
        "per token, ms, p50": lambda one: milliseconds(one.token_seconds[0]),
        "per token, ms, p95": lambda one: milliseconds(one.token_seconds[1]),
        "speedup": lambda one: Cell(one.speedup, "×"),
    }
    return table_of(report.speeds, columns, report.command, "speed")


def _load(one: ServedSpeed) -> str:
    return f"{one.concurrency} at once" if one.concurrency else f"{one.offered:.3g} requests/s"

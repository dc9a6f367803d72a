"""What a check of a server finds: differences from what the draft was made and measured for, and the report's sentences
and tables."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from distill.engines.pairs import compare_pair
from distill.serving.results import (
    LEAST_LOSS,
    Difference,
    ServedAcceptance,
    ServedSpeed,
    ServeReport,
)
from distill.serving.server import LlamaServer
from distill.tables import Block, Cell, Columns, Row, Table, known, listed, shown, table_of

# ── options: one of llama-server is undone by appending the server's own default, because the last one counts ──


class Option(NamedTuple):
    """An option of llama-server that changes the acceptance rate: its environment variable, default and names."""

    what: str
    variable: str
    default: str
    names: tuple[str, ...]


def _cached(model: str, variable: str, names: str) -> list[Option]:
    """The options of the types of a model's cached keys and values; a K in a name stands for either."""
    return [
        Option(
            f"the type of the {model}'s cached {part}",
            variable + k.upper(),
            "f16",
            tuple(names.replace("K", k).split()),
        )
        for k, part in (("k", "keys"), ("v", "values"))
    ]


OPTIONS = (
    *_cached("draft", "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_", "--spec-draft-type-K -ctKd --cache-type-K-draft"),
    Option(
        "p_min, the least probability of a drafted token",
        "LLAMA_ARG_SPEC_DRAFT_P_MIN",
        "0",
        ("--spec-draft-p-min", "--draft-p-min"),
    ),
    Option("n_min, below which a draft is dropped", "LLAMA_ARG_SPEC_DRAFT_N_MIN", "0", ("--spec-draft-n-min",)),
    *_cached("target", "LLAMA_ARG_CACHE_TYPE_", "--cache-type-K -ctK"),
)


def _same(option: Option, value: str) -> bool:
    try:
        return float(value) == float(option.default)
    except ValueError:
        return value == option.default


def option_differences(settings: LlamaServer, environment: Mapping[str, str]) -> list[tuple[Difference, LlamaServer]]:
    """Each option that differs from the server's default, with the server that lacks this difference alone."""
    found = []
    for option in OPTIONS:
        # The server takes the last value that was given, else the environment's, else its default.
        given = [value for name, value in itertools.pairwise(settings.served) if name in option.names]
        value = given[-1] if given else environment.get(option.variable, option.default)
        if not _same(option, value):
            undone = replace(settings, further=(*settings.further, option.names[0], option.default))
            found.append((Difference(option.what, value, option.default, f"leave {option.names[0]} out"), undone))
    return found


# ── files ──


def from_run(files: tuple[Path, Path], made: tuple[Path, Path] | None) -> list[Difference]:
    """Where the served target and draft are not those of the run (`made`)."""
    return [
        Difference(f"the {role}'s file", str(served), str(own), f"serve the run's {role}, or train on this pair")
        for role, served, own in zip(("target", "draft"), files, made or files, strict=True)
        if served.resolve() != own.resolve()
    ]


def in_pair(files: tuple[Path, Path]) -> list[Difference]:
    """Where the vocabularies of target and draft do not belong together."""
    fault = compare_pair(str(files[0]), str(files[1])).llama_cpp
    return [] if fault is None else [Difference("the vocabulary", fault[0], "that of the target", fault[1])]


# ── what a server says ──

PROBE = "distill asks"


def template_difference(ours: str, theirs: str) -> Difference | None:
    """Whether two templates render the probing conversation alike."""
    if ours == theirs:
        return None
    lost = "" if PROBE in theirs else ", which leaves the user's message out"
    advice = "serve with the target's own template: leave --chat-template out (it takes Jinja: a name is taken as text)"
    return Difference("the chat template", _shown(theirs) + lost, _shown(ours), advice)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 120 else text[:120] + "…")


# ── sentences ──

OURS = "distill, "  # before the files of our decoder, as a source of counts
EXPLAINED_SHARE = 0.5  # of a shortfall: differences that explain less leave something to look for


def sentences(report: ServeReport) -> list[str]:
    """About the acceptance rate, differences, the texts and the speed, in order of weight."""
    found = [_beside(report, report.acceptance[0])]
    found += [_difference(one) for one in sorted(report.differences, key=lambda one: not one.explains)]
    if report.short.low > LEAST_LOSS:
        short, explained = report.short.mean, sum(one.loss.mean for one in report.differences if one.explains)
        if explained < EXPLAINED_SHARE * short:
            found.append(
                f"{short - explained:.2f} of the missing {short:.2f} tokens per round are not explained by "
                f"these differences. What is left is the build ({report.build}) and its back end: try it without a GPU "
                "(--n-gpu-layers 0 --n-gpu-layers-draft 0), then another build (scripts/build_llama_cpp.sh)."
            )
    if report.same_texts < report.texts:
        found.append(
            f"With the draft, {report.texts - report.same_texts} of {report.texts} texts differ from the plain "
            "server's, as happens between nearly equal tokens: steps of several tokens round otherwise than of one."
        )
    return [*found, _speed(report)]


def _beside(report: ServeReport, own: ServedAcceptance) -> str:
    text = f"The server accepts {own.accepted} of {own.drafted} drafted tokens: {_both(own)}"
    if report.reference is not None:
        text += f"; our decoder with {report.reference.source.removeprefix(OURS)} {_both(report.reference)}"
        if report.short.low > LEAST_LOSS:
            text += f". It lacks {shown(report.short)} tokens per round"
        elif report.short.high < -LEAST_LOSS:
            text += f". It has {-report.short.mean:.2f} tokens per round more"
        else:
            text += ": as predicted"
    if known(report.predicted):
        text += f". The run measured an acceptance rate of {shown(report.predicted, '%')} at this draft length"
    return text + "."


def _both(found: ServedAcceptance) -> str:
    return f"acceptance rate {shown(found.rate, '%')}, {shown(found.tokens_per_round)} tokens per round"


def _difference(one: Difference) -> str:
    what = f"{one.what} is {one.found}, not {one.expected}"
    if one.explains:
        return f"EXPLAINED: {what}: that costs {shown(one.loss)} tokens per round. To mend it, {one.advice}."
    if math.isnan(one.loss.mean):
        return f"Not measured: {what}. If the acceptance rate is low, {one.advice}."
    return f"Not a cause: {what}: it costs {shown(one.loss)} tokens per round."


def _speed(report: ServeReport) -> str:
    rises = [one for one in report.speeds if not math.isnan(one.speedup.mean)]
    if not rises:
        return "Without a plain server beside it (--plain-url) no speedup was measured."
    parts = [f"{shown(one.speedup)} with {one.concurrency} at once" for one in rises]
    text = f"Speed over the plain server: {', '.join(parts)}."
    if any(one.speedup.mean >= 1 for one in rises):
        return text
    return f"{text} With n_max {report.n_max} the draft makes no load faster here."


# ── tables ──


def serving_blocks(report: ServeReport) -> list[Block]:
    """The sentences, and tables of acceptance rates, speed and differences."""
    blocks: list[Block] = [
        f"{report.server}, build {report.build}: `{report.served}`. {_sampled(report)}, {report.prompts} prompts × "
        f"up to {report.new_tokens} tokens, cold caches, servers in turn; intervals resample prompts.",
        sentences(report),
        _acceptance(report),
        _speeds(report),
    ]
    if report.differences:
        of_differences: Columns[Difference] = {
            "what differs": lambda one: one.what,
            "found": lambda one: one.found,
            "expected": lambda one: one.expected,
            "tokens per round lost": lambda one: one.loss,
        }
        blocks.append(table_of(report.differences, of_differences, report.command, "differences"))
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
    heads = ["counted by", "accepted", "drafted", "acceptance rate", "tokens per round"]
    return Table([*heads, "rounds that accepted position 1, 2, …"], rows, report.command, "acceptance rate")


def _speeds(report: ServeReport) -> Table:
    def milliseconds(seconds: float) -> Cell:
        return Cell(seconds * 1e3, ".1f")

    columns: Columns[ServedSpeed] = {
        "load": lambda one: f"{one.concurrency} at once",
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

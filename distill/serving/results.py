"""Results of `distill serve-check` as dataclasses, which are written as JSON; differences from the settings that the
draft was made and measured for; the report's sentences and tables.

Legend: τ tokens per round.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from distill.engines.pairs import compare_pair
from distill.files import Figure
from distill.measuring.evaluation_results import depth_label, measured_of
from distill.serving.server import LlamaServer
from distill.tables import (
    UNKNOWN,
    Block,
    Cell,
    Columns,
    Interval,
    Row,
    Table,
    known,
    listed,
    paired_ratio_interval,
    ratio_interval,
    shown,
    table_of,
)

MIN_LOSS = 0.01  # tokens per round. A smaller difference is rounding.


@dataclass(frozen=True)
class ServedAcceptance:
    """Drafted and accepted tokens of the same prompts, counted by `source`.

    `rate` is accepted ÷ drafted. `tokens_per_round` counts all steps of the target after the prompt, with and without a
    draft. Intervals resample prompts. `by_position` holds the share of the drafting rounds that accepted the token at
    each position. It is None if the source does not count that.
    """

    source: str
    drafted: int
    accepted: int
    rate: Interval
    tokens_per_round: Interval
    by_position: list[float] | None = None


@dataclass(frozen=True)
class ServedSpeed:
    """One configuration under one load: `concurrency` requests at once, each followed by the next.

    `in_flight` is the mean number of requests. `first_seconds` is the time to the first token. `token_seconds` is the
    time per later token. Both are the median and the 95th percentile over requests. The speedup is over the plain
    server, in tokens per second of a request's time. It is NaN for the plain server.
    """

    configuration: str
    concurrency: int
    requests: int
    requests_per_second: float
    tokens_per_second: float
    in_flight: float
    first_seconds: tuple[float, float]
    token_seconds: tuple[Figure, Figure]
    speedup: Interval = UNKNOWN


@dataclass(frozen=True)
class Difference:
    """A setting that differs from the setting that the draft was made and measured for.

    `loss` is the cost in tokens per round, measured with and without the difference on the same prompts. It is NaN if
    it was not measured.
    """

    what: str
    found: str
    expected: str
    advice: str
    loss: Interval = UNKNOWN

    @property
    def explains(self) -> bool:
        """Whether the whole interval of the loss is more than rounding."""
        return self.loss.low > MIN_LOSS


@dataclass(frozen=True)
class Change:
    """The acceptance rate on the same prompts in the last kept result (`before`, with time, build and flags) and now
    (`after`). The interval of `rise` resamples prompts."""

    time: str
    build: str
    served: str
    before: float
    after: float
    rise: Interval
    tokens_per_second: tuple[float, float]

    @property
    def fell(self) -> bool:
        """Whether acceptance fell by more than its interval."""
        return self.rise.high < 0


@dataclass
class ServeReport:
    """A pair on the user's server, with and without its draft, under `sampler` and from cold caches.

    `acceptance` holds the server's counts first. `reference` is distill's decoder on the same prompts, with the run's
    files if there is a run. `short` is the number of tokens per round that the server lacks. `predicted` is the run's
    acceptance rate for the same draft length on its test prompts. It is NaN without a run and for sampled requests.
    `same_texts` of `texts` have the tokens of the plain server. `digest` identifies the prompts, `lengths` are their
    tokens, and `by_prompt` has the server's counts after each prompt. `context` is the server's context in tokens, or
    None if unknown. `change` compares the last result on the same prompts.
    """

    command: str
    machine: dict[str, Any]
    server: str
    build: str
    served: str
    n_max: int
    sampler: dict[str, Any]
    prompts: int
    new_tokens: int
    left_out: dict[str, int]
    acceptance: list[ServedAcceptance]
    predicted: Figure
    speeds: list[ServedSpeed]
    same_texts: int
    texts: int
    differences: list[Difference] = field(default_factory=list)
    reference: ServedAcceptance | None = None
    short: Interval = UNKNOWN
    notes: list[str] = field(default_factory=list)
    digest: str = ""
    lengths: list[int] = field(default_factory=list)
    by_prompt: list[Counts] = field(default_factory=list)
    context: int | None = None
    change: Change | None = None


# ── Drafted and accepted tokens of servers and of distill's decoder: by text, by a server's counters, and rates ──


@dataclass(frozen=True)
class Counts:
    """Drafting rounds, drafted and accepted tokens, and accepted tokens at each drafted position if known, of a server
    since its start or of texts. Texts have `later` tokens after the first."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: tuple[int, ...] = ()
    later: int = 0

    @classmethod
    def of_text(cls, tokens: int, drafted: int = 0, accepted: int = 0, rounds: int | None = None) -> Counts:
        """The counts of one text of `tokens`.

        The prompt's step gives the first token. llama-server counts no rounds of a request. The rounds are then the
        tokens that were not accepted, because each later step adds one token of the target. A text that ends within a
        round accepted more tokens than it has.
        """
        later = max(0, tokens - 1)
        rounds = max(min(1, later), later - accepted) if rounds is None else rounds
        return cls(rounds, drafted, accepted, (), later)

    def __add__(self, other: Counts) -> Counts:
        return self._with(other, 1)

    def __sub__(self, other: Counts) -> Counts:
        return self._with(other, -1)

    def _with(self, other: Counts, sign: int) -> Counts:
        places = zip_longest(self.by_position, other.by_position, fillvalue=0)
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("rounds", "drafted", "accepted", "later"))
        rounds, drafted, accepted, later = (left + sign * right for left, right in pairs)
        return Counts(rounds, drafted, accepted, tuple(left + sign * right for left, right in places), later)


@dataclass(frozen=True)
class Text:
    """The tokens of a text, with its counts. A server that gives no ids leaves the tokens empty."""

    tokens: list[int]
    counts: Counts


def counts_of(texts: Sequence[Sequence[Text]]) -> list[Counts]:
    """The counts of texts, summed over the texts after each prompt."""
    return [summed(text.counts for text in after_prompt) for after_prompt in texts]


def summed(counts: Iterable[Counts]) -> Counts:
    """The sum of all counts."""
    return sum(counts, Counts())


def totals_of(text: str, prefix: str) -> Counts | None:
    """The counters of speculation in Prometheus text, summed over engines. None if a counter is missing.

    The counters of llama-server and vLLM differ in the prefix of their names.
    """
    metric = rf"^{prefix}:spec_decode_num_(\w+)_total(?:{{(.*)}})? +(\d+(?:\.\d+)?(?:e\+?\d\d?)?)(?= |$)"
    sums: dict[str, float] = defaultdict(float)
    places: dict[int, float] = defaultdict(float)
    for name, labels, value in re.findall(metric, text, re.MULTILINE):
        sums[name] += float(value)
        if name == "accepted_tokens_per_pos" and (place := re.search(r'position="(\d{1,4})"', labels)):
            places[int(place[1])] += float(value)
    if not {"drafts", "draft_tokens", "accepted_tokens"} <= set(sums):
        return None
    by_position = tuple(int(places.get(place, 0)) for place in range(max(places, default=-1) + 1))
    return Counts(int(sums["drafts"]), int(sums["draft_tokens"]), int(sums["accepted_tokens"]), by_position)


def acceptance(source: str, texts: Sequence[Counts], totals: Counts | None = None) -> ServedAcceptance:
    """Both rates with their intervals over prompts. `totals` of the same texts give the positions."""
    drafted, accepted = [text.drafted for text in texts], [text.accepted for text in texts]
    later, rounds = [text.later for text in texts], [text.rounds for text in texts]
    positions = None
    if totals is not None and totals.rounds and totals.by_position:
        positions = [accepted_there / totals.rounds for accepted_there in totals.by_position]
    return ServedAcceptance(
        source=source,
        drafted=sum(drafted),
        accepted=sum(accepted),
        rate=ratio_interval(accepted, drafted),
        tokens_per_round=ratio_interval(later, rounds),
        by_position=positions,
    )


def rise_of_tokens(before: Sequence[Counts], after: Sequence[Counts]) -> Interval:
    """τ of `after` minus τ of `before` on the same prompts."""
    sides = [([text.later for text in side], [text.rounds for text in side]) for side in (before, after)]
    return paired_ratio_interval(*sides[0], *sides[1])


# ── Differences: the last value of an option counts, so that appending llama-server's default undoes the option ──


class Option(NamedTuple):
    """An option of llama-server that changes the acceptance rate: its environment variable, default and names."""

    what: str
    variable: str
    default: str
    names: tuple[str, ...]


def _cached(model: str, variable: str, names: str) -> list[Option]:
    """The options of the types of a model's cached keys and values. A K in a name stands for either."""
    what, parts = f"the type of the {model}'s cached ", {"k": "keys", "v": "values"}
    spelt = {k: tuple(names.replace("K", k).split()) for k in parts}
    return [Option(what + part, variable + k.upper(), "f16", spelt[k]) for k, part in parts.items()]


P_MIN_NAMES = ("--spec-draft-p-min", "--draft-p-min")
OPTIONS = (
    *_cached("draft", "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_", "--spec-draft-type-K -ctKd --cache-type-K-draft"),
    Option("p_min, the least probability of a drafted token", "LLAMA_ARG_SPEC_DRAFT_P_MIN", "0", P_MIN_NAMES),
    Option("n_min, below which a draft is dropped", "LLAMA_ARG_SPEC_DRAFT_N_MIN", "0", ("--spec-draft-n-min",)),
    *_cached("target", "LLAMA_ARG_CACHE_TYPE_", "--cache-type-K -ctK"),
)


def _same(option: Option, value: str) -> bool:
    try:
        return float(value) == float(option.default)
    except ValueError:
        return value == option.default


def option_differences(settings: LlamaServer, environment: Mapping[str, str]) -> list[tuple[Difference, LlamaServer]]:
    """Each option that differs from the server's default, with the server that lacks only this difference."""
    differing = []
    for option in OPTIONS:
        # The server takes the last value of the command line, else the environment's value, else its default.
        given = [value for name, value in itertools.pairwise(settings.served) if name in option.names]
        value = given[-1] if given else environment.get(option.variable, option.default)
        if not _same(option, value):
            undone = replace(settings, further=(*settings.further, option.names[0], option.default))
            differing.append((Difference(option.what, value, option.default, f"leave {option.names[0]} out"), undone))
    return differing


# ── Files ──


def from_run(files: tuple[Path, Path], made: tuple[Path, Path] | None) -> list[Difference]:
    """The differences of the served target and draft from those of the run (`made`)."""
    return [
        Difference(f"the {role}'s file", str(served), str(of_run), f"serve the run's {role}, or train on this pair")
        for role, served, of_run in zip(("target", "draft"), files, made or files, strict=True)
        if served.resolve() != of_run.resolve()
    ]


def in_pair(files: tuple[Path, Path]) -> list[Difference]:
    """The difference of the vocabularies of target and draft, if they do not fit."""
    fault = compare_pair(str(files[0]), str(files[1])).llama_cpp
    return [] if fault is None else [Difference("the vocabulary", fault[0], "that of the target", fault[1])]


# ── The server's chat template ──

PROBE = "distill asks"


def template_difference(ours: str, theirs: str) -> Difference | None:
    """The difference of two templates in the probing conversation. None if they render it alike."""
    if ours == theirs:
        return None
    lost = "" if PROBE in theirs else ", which leaves the user's message out"
    advice = "serve with the target's template: leave --chat-template out (it takes Jinja, and reads a name as text)"
    return Difference("the chat template", _shown(theirs) + lost, _shown(ours), advice)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 120 else text[:120] + "…")


# ── Sentences ──

OURS = "distill, "  # The name of distill's decoder as a source of counts begins with this.
EXPLAINED_SHARE = 0.5  # If differences explain a smaller share of a shortfall, the user must look for more causes.


def sentences(report: ServeReport) -> list[str]:
    """Sentences about the acceptance rate, differences, texts and speed. The most important come first."""
    lines = [] if report.change is None else [_changed(report.change, report)]
    lines.append(_accepted(report, report.acceptance[0]))
    differences = sorted(report.differences, key=lambda difference: not difference.explains)
    lines += map(_difference, differences)
    if report.short.low > MIN_LOSS:
        short, explained = report.short.mean, sum(cause.loss.mean for cause in differences if cause.explains)
        if explained < EXPLAINED_SHARE * short:
            lines.append(
                f"{short - explained:.2f} of the missing {short:.2f} tokens per round are not explained by "
                f"these differences. The build ({report.build}) and its back end remain: try it without a GPU "
                "(--n-gpu-layers 0 --n-gpu-layers-draft 0), then another build (scripts/build_llama_cpp.sh)."
            )
    if report.same_texts < report.texts:
        lines.append(
            f"With the draft, {report.texts - report.same_texts} of {report.texts} texts differ from the plain "
            "server's. Steps of several tokens round differently, which decides between nearly equal tokens."
        )
    return [*lines, _speed(report)]


def _accepted(report: ServeReport, served: ServedAcceptance) -> str:
    text = f"The server accepts {served.accepted} of {served.drafted} drafted tokens: {_both(served)}"
    if report.reference is not None:
        text += f"; our decoder with {report.reference.source.removeprefix(OURS)} {_both(report.reference)}"
        if report.short.low > MIN_LOSS:
            text += f". It lacks {shown(report.short)} tokens per round"
        elif report.short.high < -MIN_LOSS:
            text += f". It has {-report.short.mean:.2f} tokens per round more"
        else:
            text += ": as predicted"
    if known(report.predicted):
        text += f". The run measured an acceptance rate of {shown(report.predicted, '%')} at this draft length"
    return text + "."


def _changed(change: Change, report: ServeReport) -> str:
    word = "FELL" if change.fell else "rose" if change.rise.low > 0 else "is the same within its interval"
    flags = "" if change.served == report.served else f" Its flags were `{change.served}`."
    speeds = " → ".join(f"{speed:.1f}" for speed in change.tokens_per_second)
    return (
        f"Acceptance {word}: {change.before:.2f} → {change.after:.2f} since build {change.build} of {change.time} "
        f"(interval of the difference {shown(change.rise, '+.3f')}, by prompt), {speeds} tokens/s.{flags}"
    )


def _both(rates: ServedAcceptance) -> str:
    return f"acceptance rate {shown(rates.rate, '%')}, {shown(rates.tokens_per_round)} tokens per round"


def _difference(cause: Difference) -> str:
    what = f"{cause.what} is {cause.found}, not {cause.expected}"
    if cause.explains:
        return f"EXPLAINED: {what}: that costs {shown(cause.loss)} tokens per round. To mend it, {cause.advice}."
    if math.isnan(cause.loss.mean):
        return f"Not measured: {what}. If the acceptance rate is low, {cause.advice}."
    return f"Not a cause: {what}: it costs {shown(cause.loss)} tokens per round."


def _speed(report: ServeReport) -> str:
    speeds = [speed for speed in report.speeds if not math.isnan(speed.speedup.mean)]
    if not speeds:
        return "No speedup was measured without a plain server (--plain-url)."
    parts = [f"{shown(speed.speedup)} with {speed.concurrency} at once" for speed in speeds]
    text = f"Speed over the plain server: {', '.join(parts)}."
    if any(speed.speedup.mean >= 1 for speed in speeds):
        return text
    return f"{text} With n_max {report.n_max} the draft makes no load faster here."


# ── Tables ──


def serving_blocks(report: ServeReport) -> list[Block]:
    """The sentences, and tables of acceptance rates, speed and differences."""
    blocks: list[Block] = [
        f"{report.server}, build {report.build}: `{report.served}`. {_sampled(report)}, {report.prompts} prompts × "
        f"up to {report.new_tokens} tokens, cold caches, servers in turn; intervals resample prompts.",
        sentences(report),
        _acceptance(report),
        *_by_context(report),
        _speeds(report),
    ]
    if report.differences:
        of_differences: Columns[Difference] = {
            "what differs": lambda cause: cause.what,
            "found": lambda cause: cause.found,
            "expected": lambda cause: cause.expected,
            "tokens per round lost": lambda cause: cause.loss,
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
            counted.source,
            counted.accepted,
            counted.drafted,
            Cell(counted.rate, "%"),
            counted.tokens_per_round,
            ", ".join(f"{share:.2f}" for share in counted.by_position or ()),
        ]
        for counted in report.acceptance
    ]
    if known(report.predicted):
        rows.append(["the run's own measurement", None, None, Cell(report.predicted, "%"), None, ""])
    heads = ["counted by", "accepted", "drafted", "acceptance rate", "tokens per round"]
    return Table([*heads, "rounds that accepted position 1, 2, …"], rows, report.command, "acceptance rate")


def _by_context(report: ServeReport) -> list[Block]:
    """The server's acceptance by the length of the prompt, and the part of the context that was measured."""
    groups: dict[str, list[Counts]] = {}
    longest = max(report.lengths, default=0)
    for length, counts in sorted(zip(report.lengths, report.by_prompt, strict=True), key=lambda pair: pair[0]):
        groups.setdefault(depth_label(length, longest), []).append(counts)
    columns: Columns[tuple[str, ServedAcceptance, int]] = {
        "tokens before the answer": lambda row: row[0],
        "prompts": lambda row: row[2],
        "acceptance rate": lambda row: Cell(row[1].rate, "%"),
        "tokens per round": lambda row: row[1].tokens_per_round,
    }
    rows = [(label, acceptance(label, texts), len(texts)) for label, texts in groups.items()]
    title = "by length of context"
    words = measured_of(longest + report.new_tokens, report.context, "the server takes", "--prompt-tokens sets lengths")
    table = [table_of(rows, columns, report.command, title)] if len(rows) > 1 else []
    return [*table, *([words] if words else [])]


def _speeds(report: ServeReport) -> Table:
    def milliseconds(seconds: float) -> Cell:
        return Cell(seconds * 1e3, ".1f")

    columns: Columns[ServedSpeed] = {
        "load": lambda speed: f"{speed.concurrency} at once",
        "configuration": lambda speed: speed.configuration,
        "requests": lambda speed: speed.requests,
        "in flight": lambda speed: Cell(speed.in_flight, ".1f"),
        "requests/s": lambda speed: Cell(speed.requests_per_second, ".3g"),
        "tokens/s": lambda speed: speed.tokens_per_second,
        "first token, ms, p50": lambda speed: milliseconds(speed.first_seconds[0]),
        "first token, ms, p95": lambda speed: milliseconds(speed.first_seconds[1]),
        "per token, ms, p50": lambda speed: milliseconds(speed.token_seconds[0]),
        "per token, ms, p95": lambda speed: milliseconds(speed.token_seconds[1]),
        "speedup": lambda speed: Cell(speed.speedup, "×"),
    }
    return table_of(report.speeds, columns, report.command, "speed")

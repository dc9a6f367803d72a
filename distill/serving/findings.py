"""What a check of a server finds: differences from what the draft was made and measured for, and the report's sentences
and tables."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distill.engines.pairs import compare_pair
from distill.engines.server_commands import vllm_lengths
from distill.gguf.head import open_head
from distill.serving.results import (
    Counts,
    Difference,
    ServedAcceptance,
    ServedClass,
    ServedSpeed,
    ServeReport,
    SettingsSpeed,
)
from distill.serving.server import LlamaServer
from distill.tables import Block, Cell, Columns, Interval, Row, Table, known, listed, shown, table_of

# ── options: one of llama-server is undone by appending the server's own default, because the last one counts ──

LEAST_LOSS = 0.01  # tokens per round: less is rounding
LEAST_FILLED = 0.9  # of n_max drafted in a mean round: below, something ends drafts before n_max


@dataclass(frozen=True)
class Option:
    """An option of llama-server that changes the acceptance rate: its names, environment variable and default."""

    what: str
    flags: tuple[str, ...]
    variable: str
    default: str
    advice: str


CACHED = {"k": "keys", "v": "values"}
OPTIONS = (
    *(
        Option(
            f"the type of the draft's cached {part}",
            (f"--spec-draft-type-{k}", f"-ct{k}d", f"--cache-type-{k}-draft"),
            f"LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_{k.upper()}",
            "f16",
            f"leave --spec-draft-type-{k} out: a draft's cache is small, and quantised {part} cost accepted tokens",
        )
        for k, part in CACHED.items()
    ),
    Option(
        "p_min, the least probability of a drafted token",
        ("--spec-draft-p-min", "--draft-p-min"),
        "LLAMA_ARG_SPEC_DRAFT_P_MIN",
        "0",
        "leave --spec-draft-p-min out, unless it is faster here: it ends drafts early, so that fewer tokens are "
        "drafted and more of these accepted",
    ),
    Option(
        "n_min, below which a draft is dropped",
        ("--spec-draft-n-min",),
        "LLAMA_ARG_SPEC_DRAFT_N_MIN",
        "0",
        "leave --spec-draft-n-min out",
    ),
    *(
        Option(
            f"the type of the target's cached {part}",
            (f"--cache-type-{k}", f"-ct{k}"),
            f"LLAMA_ARG_CACHE_TYPE_{k.upper()}",
            "f16",
            f"the draft learnt from the target with an f16 cache; leave --cache-type-{k} out where memory allows",
        )
        for k, part in CACHED.items()
    ),
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
        given = [value for name, value in itertools.pairwise(settings.served) if name in option.flags]
        value = given[-1] if given else environment.get(option.variable, option.default)
        if not _same(option, value):
            undone = replace(settings, further=(*settings.further, option.flags[0], option.default))
            found.append((Difference(option.what, value, option.default, option.advice), undone))
    return found


def measured(difference: Difference, loss: Interval) -> Difference:
    """The difference with the tokens per round that it costs."""
    return replace(difference, loss=loss, explains=loss.low > LEAST_LOSS)


# ── files ──


def head_text(path: Path, key: str) -> str | None:
    """What a GGUF file says about where it comes from: distill.recipe, general.name; None where it does not."""
    value = open_head(path).values.get(key)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else None


def from_run(files: tuple[Path, Path], made: tuple[Path, Path] | None) -> list[Difference]:
    """Where the served target and draft are not those of the run (`made`)."""
    if made is None:
        return []
    remedies = {
        "draft": "serve the run's own draft, or train this one on this target: a draft of another target has learnt "
        "other text",
        "target": "serve the run's target, or refresh the draft on this one: it has learnt the text of the run's",
    }
    return [
        Difference(
            f"the {role}'s file",
            f"{files[place]} ({_named(files[place])})",
            f"{made[place]} ({_named(made[place])})",
            remedies[role],
        )
        for place, role in ((1, "draft"), (0, "target"))
        if files[place].resolve() != made[place].resolve()
    ]


def in_pair(files: tuple[Path, Path], ask_recipes: bool) -> list[Difference]:
    """Where target and draft do not belong together: by the recipes that wrote them, where no run is known
    (`ask_recipes`), and by their vocabularies."""
    found = []
    target, draft = (head_text(path, "distill.recipe") for path in files)
    if ask_recipes and target and draft and target != draft:
        found.append(
            Difference(
                "the recipe that made the draft",
                f"{draft} ({_named(files[1])})",
                f"{target} ({_named(files[0])})",
                "serve a draft that was trained on this target: vocabularies may be equal, the text is not",
            )
        )
    report = compare_pair(str(files[0]), str(files[1]))
    if report.llama_cpp is not None:
        reason, advice = report.llama_cpp
        found.append(Difference("the vocabulary", reason, "that of the target", advice))
    return found


def _named(path: Path) -> str:
    return head_text(path, "general.name") or "no name"


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


def early_ends(totals: Counts | None, n_max: int) -> list[Difference]:
    """A server whose rounds draft fewer tokens than `n_max` (0: not known): it has a floor on their probability."""
    if totals is None or not totals.rounds or not n_max:
        return []
    mean = totals.drafted / totals.rounds
    if mean >= LEAST_FILLED * n_max - 1 / n_max:
        return []
    return [
        Difference(
            "p_min, by the drafted tokens of a mean round",
            f"above 0: {mean:.2f} of {n_max} are drafted",
            "0",
            "leave --spec-draft-p-min out of the server's command, unless it is faster here",
        )
    ]


# ── sentences ──

EXPLAINED_SHARE = 0.5  # of a shortfall: differences that explain less leave something to look for


@dataclass(frozen=True)
class Reference:
    """Our decoder with `files` on the same prompts; `short` are the tokens per round that the server lacks."""

    files: str
    acceptance: ServedAcceptance
    short: Interval


def sentences(report: ServeReport, reference: Reference | None) -> list[str]:
    """About the acceptance rate, differences, the texts and the speed, in order of weight."""
    found = [_beside(report, report.acceptance[0], reference)]
    if not math.isnan(report.drawn.mean):
        found.append(
            f"At n_max {report.n_max}, drafts drawn from the draft (--spec-draft-sampling probabilistic) give "
            f"{shown(report.drawn, '.2f')} tokens per round more than its best tokens."
        )
    found += [_difference(one) for one in sorted(report.differences, key=lambda one: not one.explains)]
    if reference is not None and reference.short.low > LEAST_LOSS:
        short, explained = reference.short.mean, sum(one.loss.mean for one in report.differences if one.explains)
        if explained < EXPLAINED_SHARE * short:
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
    if report.lengths:
        found.append(_lengths(report.lengths))
    return [*found, *([report.choice.sentence] if report.choice else [])]


def _beside(report: ServeReport, own: ServedAcceptance, reference: Reference | None) -> str:
    text = f"The server accepts {own.accepted} of {own.drafted} drafted tokens: {_both(own)}"
    if reference is not None:
        text += f"; our decoder with {reference.files} {_both(reference.acceptance)}"
        if reference.short.low > LEAST_LOSS:
            text += f". It lacks {shown(reference.short)} tokens per round"
        elif reference.short.high < -LEAST_LOSS:
            text += f". It has {-reference.short.mean:.2f} tokens per round more"
        else:
            text += ": as predicted"
    if not math.isnan(report.predicted):
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
    text = f"Speed over the plain server: {', '.join(f'{shown(one.speedup)} with {_load(one)}' for one in rises)}."
    if any(one.speedup.mean >= 1 for one in rises):
        return text
    return f"{text} With n_max {report.n_max} the draft makes no load faster here."


def _lengths(lengths: Sequence[Sequence[int]]) -> str:
    parts = [f"{length or 'none'} at {first}{f' to {last}' if last > first else ''}" for first, last, length in lengths]
    return (
        "By the measured loads, with a round's cost linear in its length, the fastest draft lengths for requests at "
        f"once are {', '.join(parts)}."
    )


# ── tables ──


def serving_blocks(report: ServeReport) -> list[Block]:
    """The sentences, and tables of acceptance rates, speed, classes and settings."""
    blocks: list[Block] = [
        f"{report.server}, build {report.build}: `{report.served}`. {_sampled(report)}, {report.prompts} prompts × "
        f"up to {report.new_tokens} tokens, cold caches, servers in turn; intervals resample prompts.",
        report.sentences,
        _acceptance(report),
        _speeds(report),
    ]
    if report.lengths and report.server == "vllm":
        blocks.append(f"For the server, not tried here:\n\n```sh\n{vllm_lengths(report.n_max, report.lengths)}\n```")
    if report.classes:
        of_classes: Columns[ServedClass] = {
            "class": lambda one: one.name,
            "prompts": lambda one: one.prompts,
            "acceptance rate": lambda one: Cell(one.rate, "%"),
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
        of_settings: Columns[SettingsSpeed] = {
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
    heads = ["counted by", "accepted", "drafted", "acceptance rate", "tokens per round"]
    return Table([*heads, "rounds that accepted position 1, 2, …"], rows, report.command, "acceptance rate")


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

"""Differences between a served draft and the one that was made and measured, each with its remedy.

An option of llama-server is undone by appending the server's own default: when an option is given twice, the last one
counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from distill.intervals import Interval
from distill.models.gguf.file_head import open_head
from distill.models.pairs import compare_pair
from distill.results.serving_results import Difference
from distill.serving.counts import Totals
from distill.serving.llama_server import LlamaServer

SMALLEST = 0.01  # tokens per round: less is rounding
FULL = 0.9  # of n_max drafted in a mean round: below, something ends drafts before n_max


@dataclass(frozen=True)
class Option:
    """An option of llama-server that changes acceptance: its names, its environment variable and its default."""

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
            f"leave --spec-draft-type-{k} out: a draft's cache is small, and quantised {part} cost it acceptance",
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
    return replace(difference, loss=loss, explains=loss.low > SMALLEST)


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
        advice = report.remedies.get("llama_cpp", "")
        found.append(Difference("the vocabulary", report.llama_cpp, "that of the target", advice))
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


def early_ends(totals: Totals | None, n_max: int) -> list[Difference]:
    """A server whose rounds draft fewer tokens than `n_max` (0: not known): it has a floor on their probability."""
    if totals is None or not totals.rounds or not n_max:
        return []
    mean = totals.drafted / totals.rounds
    if mean >= FULL * n_max - 1 / n_max:
        return []
    return [
        Difference(
            "p_min, by the drafted tokens of a mean round",
            f"above 0: {mean:.2f} of {n_max} are drafted",
            "0",
            "leave --spec-draft-p-min out of the server's command, unless it is faster here",
        )
    ]

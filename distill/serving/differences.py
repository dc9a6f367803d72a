"""What may differ between a served draft and the one that was made and measured, each with what to do about it.

An option of llama-server that makes a difference is undone by the server's own default behind it: of an option that is
given twice, the last one counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distill.intervals import UNKNOWN, Interval
from distill.models.gguf.file_head import open_head
from distill.models.pairs import compare_pair
from distill.results.serving_results import Difference
from distill.serving.llama_server import LlamaServer

SMALLEST = 0.01  # tokens per round: less is rounding


@dataclass(frozen=True)
class Option:
    """An option of llama-server that changes acceptance: its names, its environment variable and its default."""

    what: str
    flags: tuple[str, ...]
    variable: str
    default: str
    advice: str


OPTIONS = (
    Option(
        "the type of the draft's cached keys",
        ("--spec-draft-type-k", "-ctkd", "--cache-type-k-draft"),
        "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K",
        "f16",
        "leave --spec-draft-type-k out: a draft's cache is small, and quantised keys cost it acceptance",
    ),
    Option(
        "the type of the draft's cached values",
        ("--spec-draft-type-v", "-ctvd", "--cache-type-v-draft"),
        "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",
        "f16",
        "leave --spec-draft-type-v out: a draft's cache is small, and quantised values cost it acceptance",
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
    Option(
        "the type of the target's cached keys",
        ("--cache-type-k", "-ctk"),
        "LLAMA_ARG_CACHE_TYPE_K",
        "f16",
        "the draft learnt from the target with an f16 cache; leave --cache-type-k out where memory allows",
    ),
    Option(
        "the type of the target's cached values",
        ("--cache-type-v", "-ctv"),
        "LLAMA_ARG_CACHE_TYPE_V",
        "f16",
        "the draft learnt from the target with an f16 cache; leave --cache-type-v out where memory allows",
    ),
)
TEMPLATES = ("--chat-template", "--chat-template-file")


def option_value(arguments: list[str], environment: Mapping[str, str], option: Option) -> str:
    """The value that the server takes: the last one given, else the environment's, else its default."""
    found = environment.get(option.variable, option.default)
    for place, argument in enumerate(arguments[:-1]):
        if argument in option.flags:
            found = arguments[place + 1]
    return found


def _same(option: Option, value: str) -> bool:
    try:
        return float(value) == float(option.default)
    except ValueError:
        return value == option.default


def option_differences(settings: LlamaServer, environment: Mapping[str, str]) -> list[tuple[Difference, LlamaServer]]:
    """Each option that differs from the server's default, with the server that lacks this difference alone."""
    found = []
    for option in OPTIONS:
        value = option_value(settings.served, environment, option)
        if not _same(option, value):
            undone = replace(settings, further=(*settings.further, option.flags[0], option.default))
            found.append((Difference(option.what, value, option.default, option.advice), undone))
    return found


def measured(difference: Difference, loss: Interval) -> Difference:
    """The difference with the tokens per round that it costs."""
    return replace(difference, loss=loss, explains=loss.low > SMALLEST)


def without_effect(difference: Difference) -> bool:
    """Whether a difference was measured, and costs nothing that these prompts show."""
    return difference.loss is not UNKNOWN and not difference.explains


# ── files ──


def origin_of(path: Path) -> dict[str, str]:
    """What a GGUF file says about where it comes from: recipe, name, base model."""
    values = open_head(path).values
    keys = ("distill.recipe", "general.name", "general.base_model.0.repo_url")
    return {key: values[key].decode("utf-8", "replace") for key in keys if isinstance(values.get(key), bytes)}


def file_differences(target: Path, draft: Path, made: tuple[Path, Path] | None = None) -> list[Difference]:
    """Where the served files are not those that belong together: `made` are the run's target and draft.

    Without a run, the recipe that wrote each file says whether they belong together.
    """
    found = []
    theirs, ours = origin_of(draft), origin_of(target)
    if made is not None and draft.resolve() != made[1].resolve():
        found.append(
            Difference(
                "the draft's file",
                f"{draft} ({_named(theirs)})",
                f"{made[1]} ({_named(origin_of(made[1]))})",
                "serve the run's own draft, or train this one on this target: a draft of another target has learnt "
                "other text",
            )
        )
    if made is not None and target.resolve() != made[0].resolve():
        found.append(
            Difference(
                "the target's file",
                f"{target} ({_named(ours)})",
                f"{made[0]} ({_named(origin_of(made[0]))})",
                "serve the run's target, or refresh the draft on this one: it has learnt the text of the run's",
            )
        )
    recipes = [one.get("distill.recipe") for one in (theirs, ours)]
    if made is None and recipes[0] and recipes[1] and recipes[0] != recipes[1]:
        found.append(
            Difference(
                "the recipe that made the draft",
                f"{recipes[0]} ({_named(theirs)})",
                f"{recipes[1]} ({_named(ours)})",
                "serve a draft that was trained on this target: vocabularies may be equal, the text is not",
            )
        )
    report = compare_pair(str(target), str(draft))
    if report.llama_cpp is not None:
        advice = report.remedies.get("llama_cpp", "")
        found.append(Difference("the vocabulary", report.llama_cpp, "that of the target", advice))
    return found


def _named(origin: Mapping[str, str]) -> str:
    return origin.get("general.name") or "no name"


# ── what a server says ──

PROBE = "distill asks"


def template_parts(rendered: str) -> tuple[str, str] | None:
    """What a template writes before and behind a user's message, from the rendered PROBE; None without it."""
    before, found, behind = rendered.partition(PROBE)
    return (before, behind) if found else None


def template_difference(ours: str, theirs: str, advice: str) -> Difference | None:
    """Whether two templates render the probing conversation alike."""
    if ours == theirs:
        return None
    lost = "" if PROBE in theirs else ", which leaves the user's message out"
    return Difference("the chat template", _shown(theirs) + lost, _shown(ours), advice)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 120 else text[:120] + "…")


def build_of(properties: Mapping[str, Any]) -> str:
    """The build that llama-server names."""
    found = properties.get("build_info")
    return found if isinstance(found, str) else "a build that does not name itself"

"""`distill serve-check`: the files and prompts that are served, of a run or of any pair."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distill.commands import shared
from distill.errors import DataError, RecipeError, RunError
from distill.recipe import Chat, Corpus
from distill.results.serialise import read_result
from distill.run import Run

if TYPE_CHECKING:
    from distill.documents.chat_template import ChatTemplate
    from distill.texts import Prompt

LEAST = 2  # prompts


@dataclass(frozen=True)
class PairFiles:
    """What is served; of a run also its own files (`made`)."""

    target: Path | None
    draft: Path | None
    made: tuple[Path, Path] | None = None
    run: Run | None = None


def pair_files(
    name: str | None, runs: Path, target: Path | None, draft: Path | None, outtype: str | None, required: bool
) -> PairFiles:
    """The files of the pair; a run's own where none are named. RunError for a run without GGUF files."""
    given = [None if one is None else Path(_gguf(one)) for one in (target, draft)]
    if name is None and given[0] is not None and given[1] is not None:
        return PairFiles(given[0], given[1])
    from distill.results.export_results import ExportReport

    _, run = shared.find_run(name, runs)
    path = run.path("gguf", "export.json")
    if run.outdated("export") and required:
        state = "files of an earlier draft" if path.exists() else "no GGUF files yet"
        raise RunError(f"{run.folder} has {state}", f"`{run.again('--until', 'export')}`")
    files = [] if run.outdated("export") else read_result(path, ExportReport).files
    own: dict[str, Path] = {}
    for file in files:
        if outtype in (None, file.outtype) or Path(file.path).is_absolute():  # a target that is its own file
            own.setdefault(file.model, run.folder / file.path)
    if outtype is not None and files and "draft" not in own:
        kinds = ", ".join(dict.fromkeys(file.outtype for file in files))
        raise RecipeError(f"the run has no files of type {outtype}, but of {kinds}", "correct --outtype")
    files_of = {role: one or own.get(role) for role, one in zip(("target", "draft"), given, strict=True)}
    for role, one in files_of.items():
        if one is None and required:
            hint = f"name one: --{role}, or write it with `distill export-gguf`"
            raise RunError(f"{run.folder} holds no GGUF file of its {role}", hint)
    made = (own["target"], own["draft"]) if {"target", "draft"} <= own.keys() else None
    return PairFiles(files_of["target"], files_of["draft"], made, run)


def _gguf(path: Path) -> str:
    reference = shared.local_reference(str(path))
    if not reference.endswith(".gguf"):
        raise RecipeError(f"{path} is no GGUF file", "llama-server serves those: `distill export-gguf` writes them")
    return reference


def template_of(target: Path | None, stack: ExitStack) -> ChatTemplate | None:
    """The target's own chat template; None without one."""
    if target is None:
        return None
    from distill.documents.chat_template import ChatTemplate
    from distill.documents.user_prompts import GgufTokenizer

    tokenizer = GgufTokenizer(str(target), stack)
    return ChatTemplate(tokenizer, Chat()) if tokenizer.chat_template else None


def room(files: PairFiles, behind: int) -> int:
    """The most tokens of a prompt that leave room for `behind` more in the context of both models."""
    from distill.models.loaded import context_of

    contexts = [context_of(str(one)) for one in (files.target, files.draft) if one is not None]
    room = min((context for context in contexts if context is not None), default=2**31) - behind
    if room < LEAST:
        raise RecipeError(f"--tokens leave {max(room, 0)} tokens of the context for a prompt", "give fewer --tokens")
    return room


Prompts = tuple["list[Prompt]", "list[Prompt]", dict[str, int]]  # measured, for choosing settings; left out, by reason


def prompts_of_files(files: PairFiles, paths: list[Path], count: int, size: int, spare: int, room: int) -> Prompts:
    """Up to `count` prompts of files; texts are cut into prompts of `size` tokens."""
    from distill.documents.user_prompts import read_user_prompts, sources_of

    if files.target is None:
        raise RecipeError("--prompts are encoded with the target's tokenizer", "give its GGUF file: --target")
    read = read_user_prompts(str(files.target), Corpus(sources=sources_of(paths)), Chat(), count, spare, size, room)
    return read.measured, read.others, read.dropped


def prompts_of_run(files: PairFiles, count: int, spare: int, room: int) -> Prompts:
    """Up to `count` of the run's test prompts, and `spare` of its validation prompts."""
    from distill.texts import read_prompts

    assert files.run is not None
    fitting, left_out = {}, {}
    for split in ("test", "validation"):
        own = read_prompts(files.run, split)
        fitting[split] = [prompt for prompt in own if 1 < len(prompt.ids) <= room]
        if missing := len(own) - len(fitting[split]):
            left_out[f"{split} prompts of more than {room} tokens, which the context has no room for"] = missing
    measured, choosing = fitting["test"][:count], fitting["validation"][:spare]
    if len(measured) < LEAST:
        raise DataError(f"{len(measured)} of the run's test prompts fit into {room} tokens of the context")
    if spare and len(choosing) < LEAST:
        raise DataError(f"the run has {len(choosing)} validation prompts to choose settings on", "give --no-choose")
    return measured, choosing, left_out


def predicted_acceptance(run: Run | None, length: int | None) -> float:
    """The acceptance that the run measured at this draft length, with its own target; NaN where it did not."""
    if run is None or length is None or not run.path("speedup.json").exists():
        return math.nan
    from distill.results.speedup_results import SpeedupReport

    found = {
        one.backend: one.acceptance
        for one in read_result(run.path("speedup.json"), SpeedupReport).measurements
        if one.length == length and one.sampler is None and one.acceptance is not None
    }
    return found.get("gguf", found.get("pytorch", math.nan))

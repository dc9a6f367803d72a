"""What `distill serve-check` serves and asks: the files of a run or of a pair, and their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distill.commands.shared import find_run, local_reference
from distill.errors import DataError, RecipeError, RunError

if TYPE_CHECKING:
    from distill.recipe import Recipe
    from distill.run import Run
    from distill.serving.check import Conversation
    from distill.texts import Prompt

LEAST = 2  # prompts
SPARE = 12  # validation prompts, on which settings are chosen


@dataclass(frozen=True)
class PairFiles:
    """What is served; of a run also its recipe, and its own files (`made`)."""

    target: Path | None
    draft: Path | None
    made: tuple[Path, Path] | None = None
    recipe: Recipe | None = None
    run: Run | None = None


def pair_files(
    name: str | None,
    runs: Path,
    target: Path | None,
    draft: Path | None,
    prompts: Sequence[Path] | None,
    outtype: str | None,
    required: bool,
) -> PairFiles:
    """The files of the pair; a run's own where none are named. RunError for a run without GGUF files."""
    given = [None if one is None else Path(_gguf(one)) for one in (target, draft)]
    if name is None and given[0] is not None and given[1] is not None:
        return PairFiles(given[0], given[1])
    from distill.results.export_results import ExportReport
    from distill.results.serialise import read_result

    recipe, run = find_run(name, runs)
    path = run.path("gguf", "export.json")
    if not path.exists():
        if required:
            raise RunError(f"{run.folder} has no GGUF files yet", f"`distill train {run.folder} --until export`")
        return PairFiles(given[0], given[1], None, recipe, run)
    files = read_result(path, ExportReport).files
    own: dict[str, Path] = {}
    for file in files:
        if outtype in (None, file.outtype) or Path(file.path).is_absolute():  # a target that is its own file
            own.setdefault(file.model, run.folder / file.path)
    if outtype is not None and "draft" not in own:
        kinds = ", ".join(dict.fromkeys(file.outtype for file in files))
        raise RecipeError(f"the run has no files of type {outtype}, but of {kinds}", "correct --outtype")
    if "target" not in own and given[0] is None:
        raise RunError("the run wrote no file of its target, which it never loads", "give the target's file: --target")
    made = (own["target"], own["draft"]) if "target" in own else None
    return PairFiles(given[0] or own["target"], given[1] or own["draft"], made, recipe, run)


def _gguf(path: Path) -> str:
    reference = local_reference(str(path))
    if not reference.endswith(".gguf"):
        raise RecipeError(f"{path} is no GGUF file", "llama-server serves those: `distill export-gguf` writes them")
    return reference


@dataclass(frozen=True)
class AskedPrompts:
    measured: list[Prompt]
    choosing: list[list[int]]
    left_out: dict[str, int]
    conversation: Conversation | None


def pair_prompts(
    files: PairFiles,
    paths: list[Path] | None,
    count: int,
    size: int,
    behind: int,
    choosing: bool,
    stack: ExitStack,
) -> AskedPrompts:
    """Test prompts, and validation prompts where settings are chosen: the run's own, or those of files."""
    from distill.benchmark.prompts import GgufTokenizer, read_user_prompts, sources_of
    from distill.corpus.chat_template import ChatTemplate
    from distill.models.loaded import context_of
    from distill.recipe import Chat, Corpus
    from distill.serving.check import Conversation
    from distill.texts import read_prompts

    contexts = [one for one in (files.target, files.draft) if one is not None]
    known = [context for one in contexts if (context := context_of(str(one))) is not None]
    room = min(known, default=2**31) - behind
    if room < LEAST:
        raise RecipeError(f"--tokens leave {max(room, 0)} tokens of the context for a prompt", "give fewer --tokens")
    conversation = None
    if files.target is not None:
        tokenizer = GgufTokenizer(str(files.target), stack)
        if tokenizer.chat_template:
            template = ChatTemplate(tokenizer, Chat())
            conversation = Conversation(
                lambda messages: template.text(messages, None),
                lambda ids: tokenizer.file.detokenize(list(ids)).decode("utf-8", "replace"),
            )
    left_out: dict[str, int] = {}
    if paths:
        if files.target is None:
            raise RecipeError("--prompts are encoded with the target's tokenizer", "give its GGUF file: --target")
        corpus = Corpus(sources=sources_of(paths))
        asked = read_user_prompts(str(files.target), corpus, Chat(), count, SPARE if choosing else 0, size, room)
        return AskedPrompts(asked.measured, [one.ids for one in asked.others], asked.dropped, conversation)
    assert files.run is not None
    fitting = {}
    for split in ("test", "validation"):
        own = read_prompts(files.run, split)
        fitting[split] = [prompt for prompt in own if 1 < len(prompt.ids) <= room]
        if len(fitting[split]) < len(own):
            left_out[f"{split} prompts of more than {room} tokens, which the context has no room for"] = len(own) - len(
                fitting[split]
            )
    measured = fitting["test"][:count]
    if len(measured) < LEAST:
        raise DataError(
            f"{len(measured)} of the run's test prompts fit into {room} tokens of the context", "give fewer --tokens"
        )
    chosen = [prompt.ids for prompt in fitting["validation"][:SPARE]] if choosing else []
    if choosing and len(chosen) < LEAST:
        raise DataError(f"the run has {len(chosen)} validation prompts to choose settings on", "give --no-choose")
    return AskedPrompts(measured, chosen, left_out, conversation)


def predicted_acceptance(files: PairFiles, length: int | None) -> float:
    """The acceptance that the run measured at this draft length, with its own target; NaN where it did not."""
    if files.run is None or length is None or not files.run.path("speedup.json").exists():
        return float("nan")
    from distill.results.serialise import read_result
    from distill.results.speedup_results import SpeedupReport

    rows = read_result(files.run.path("speedup.json"), SpeedupReport).measurements
    found = {
        one.backend: one.acceptance
        for one in rows
        if one.length == length and not one.grown and one.sampler is None and one.acceptance is not None
    }
    return found.get("gguf", found.get("pytorch", float("nan")))

"""The stages, in order, with the inputs and outputs of each. running.py decides when a stage runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.data.sources import source_files, tree_files
from distill.data.traffic import PIN as TRAFFIC
from distill.data.traffic import pin_traffic
from distill.errors import RunError
from distill.files import digests_of, has_form, joint_digest, read_json, reference_digest
from distill.recipe import Recipe, Source
from distill.recipe.corpus import OF_TARGET
from distill.recipe.measuring import CHANGES_LOGITS
from distill.recipe.recipe import left_out
from distill.recipe.target import CONNECTION_KEYS
from distill.run import Run


@dataclass(frozen=True)
class Stage:
    """One stage: its function (imported when it runs), the parts of its key, and the files it writes.

    name: as in the recipe's sections and on the command line.
    function: `module:name`.
    settings: dotted recipe keys that are part of the key (`conditional_settings` adds those of some recipes).
    inputs: (stage, pattern of artifact names) whose digests are part of the key.
    writes: files and folders of the run directory.
    models: `target`, `donor`, `writer` and `gguf` (GGUF files of answers and teacher) and `sources`, whose contents are
        part of the key.
    precious: finished or begun work is expensive and never replaced without `--redo`.
    version: of the format of the artifacts.
    passing: prefixes of parts of the key that change nothing of what is learnt from. A change in these alone runs the
        stage again over its finished files, of which it makes anew what depends on the change.
    ignores: settings that change results by rounding at most and are left out of the key.
    pins: state outside the recipe, by name, which is recorded when the stage begins and does not change afterwards;
        None is left out of the key.
    together: all processes of the command take part; in other stages, the main process alone.
    """

    name: str
    function: str
    settings: tuple[str, ...]
    inputs: tuple[tuple[str, str], ...]
    writes: tuple[str, ...]
    models: tuple[str, ...] = ()
    precious: bool = False
    version: int = 1
    passing: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()
    pins: tuple[tuple[str, Callable[[Recipe, Run], Any]], ...] = ()
    together: bool = False

    def load(self) -> Callable[[Recipe, Run], list[Path]]:
        """The stage function `stage(recipe, run)`, which returns its artifacts."""
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(module), name)


def _stage(
    place: str, keys: str, reads: str, loads: str = "", ignores: str = "", name: str = "", writes: str = "", **more: Any
) -> Stage:
    """A stage from words with spaces between them; an input is STAGE:PATTERN. Its name is by default that of its
    function (MODULE:NAME), and it writes what is called so."""
    name = name or place.partition(":")[2]
    read = tuple((stage, pattern) for stage, _, pattern in (one.partition(":") for one in reads.split()))
    settings, written, asked = (tuple(words.split()) for words in (keys, writes or name, loads))
    return Stage(name, f"distill.{place}", settings, read, written, asked, ignores=tuple(ignores.split()), **more)


def _keys(section: str, names: str) -> str:
    """The dotted keys of a section."""
    return " ".join(f"{section}.{name}" for name in names.split())


CONNECTION = " ".join(CONNECTION_KEYS)
# Settings of a training that change rounding, speed and kept checkpoints, but nothing else.
ROUNDING = _keys("train", "micro_batch save_every checkpointing compile")
# How servers are reached changes none of their numbers; a GGUF file's content is part of the key.
OF_TEACHER = _keys("teacher.server", CONNECTION)
OF_WRITER = _keys("answers.writer", f"gguf missing {CONNECTION}")
TYPES = "target.dtype target.quantise"
# What is asked of held-out prompts and made of them. It changes nothing of what is learnt from.
HELD_OUT = f"train.acceptance.prompts {_keys('eval', 'prompts new_tokens file_blocks')} cut.score_blocks"
HELD_OUT_PROMPTS = "corpus:corpus/prompts-validation.arrow corpus:corpus/prompts-test.arrow"
HELD_OUT_ANSWERS = (
    "answers:answers/validation/* answers:answers/test/* answers:answers/prompts-validation.arrow "
    "answers:answers/prompts-test.arrow corpus:corpus/text-validation.safetensors corpus:corpus/text-test.safetensors"
)


def _parts(words: str) -> tuple[str, ...]:
    """Settings and inputs by the names that they have in a key."""
    return tuple(word.replace(":", ": ", 1) for word in words.split())


STAGES = (
    _stage(
        "teacher.answers:questions",
        f"seed {_keys('corpus.sources', ' '.join(OF_TARGET))} {_keys('answers', 'writer group')} {TYPES} "
        + _keys("chat", "system thinking thinking_argument arguments tools"),
        "",
        "target writer",
        OF_WRITER,
        precious=True,
        together=True,
        version=2,
    ),
    _stage(
        "data.corpus:corpus",
        f"seed corpus chat cut.score_blocks train.acceptance.prompts {_keys('eval', 'prompts file_blocks')} "
        f"speedup.prompts {_keys('answers', 'prompts prompt_tokens new_tokens')}",
        "questions:questions/target*.jsonl",
        "target sources",
        passing=("eval.", "speedup.", "cut.score_blocks", "train."),
        version=5,
    ),
    _stage(
        "teacher.answers:answers",
        f"seed answers sampler corpus.block {TYPES} {HELD_OUT}",  # a conversation of several turns ends with its block
        f"corpus:corpus/prompts-train.arrow {HELD_OUT_PROMPTS}",
        "target writer",
        f"{OF_WRITER} answers.batch",
        precious=True,
        passing=_parts(f"{HELD_OUT} {HELD_OUT_PROMPTS}"),
        pins=((TRAFFIC, pin_traffic),),
        together=True,
        version=2,
    ),
    _stage(
        "teacher.store:teacher",
        f"teacher corpus.block {TYPES} {HELD_OUT}",
        f"answers:answers/train/* corpus:corpus/text-train.safetensors {HELD_OUT_ANSWERS}",
        "target gguf",
        f"{OF_TEACHER} teacher.batch",
        precious=True,
        passing=_parts(f"{HELD_OUT} {HELD_OUT_ANSWERS}"),
        together=True,
        version=3,
    ),
    _stage("teacher.table:table", "corpus.block", "answers:answers/train/* teacher:teacher/train/*", "target"),
    _stage(
        "surgery.cutter:cut",
        "cut target.dtype",
        "answers:answers/train/* teacher:teacher/train/* teacher:teacher/validation/*",
        "target donor",
        f"{ROUNDING} cut.allow_full_size",
        version=3,
        pins=(("parent (content)", lambda recipe, run: run.parent()),),
    ),
    _stage(
        "training.loop:train",
        "seed train sampler target.dtype",
        "teacher:teacher/train/* cut:cut/* teacher:teacher/validation/*",
        "target",
        ROUNDING,
        writes="checkpoints draft training.json",
        precious=True,
        together=True,
        version=2,
    ),
    _stage(
        "measuring.evaluation:evaluate",
        f"seed eval sampler {TYPES}",
        "cut:cut/* train:draft/* answers:answers/test/* teacher:teacher/test/*",
        "target",
        name="eval",
        writes="eval.json eval.md",
        version=2,
    ),
    _stage("export:export", "export", "train:draft/* corpus:corpus/documents-test.json", "target", writes="gguf"),
    _stage(
        "measuring.speedup:speedup",
        f"speedup sampler seed threads device pytorch gguf {TYPES} answers.prompt_tokens",
        "train:draft/* corpus:corpus/text-validation.safetensors export:gguf/*.gguf corpus:corpus/prompts-test.arrow "
        "answers:answers/prompts-test.arrow table:table/*",
        "target",
        writes="speedup speedup.json speedup.md",
        version=2,
    ),
    _stage(
        "report.card:report",
        "name",
        "cut:* train:draft/*.safetensors train:training.json answers:answers/manifest.json eval:* export:* speedup:*",
        writes="report.html draft/README.md",
    ),
)
NAMES = tuple(stage.name for stage in STAGES)
LAST_TOGETHER = [stage.name for stage in STAGES if stage.together][-1]


def find_stage(name: str) -> Stage:
    """The stage called `name`; raises RunError with all names for another one."""
    for stage in STAGES:
        if stage.name == name:
            return stage
    raise RunError(f"there is no stage `{name}`", f"stages, in order: {', '.join(NAMES)}")


def require_part(recipe: Recipe, names: Sequence[str]) -> None:
    """Raise RunError for a stage that does not exist, or that the recipe's run does not have."""
    absent = left_out(recipe)
    for name in names:
        if find_stage(name).name in absent:
            has = ", ".join(other for other in NAMES if other not in absent)
            raise RunError(f"stage `{name}` is no part of this run: {absent[name]}", f"its stages: {has}")


def consumers(names: Sequence[str]) -> set[str]:
    """These stages and all stages that read their artifacts, directly or through others."""
    found = set(names)
    for stage in STAGES:
        if any(name in found for name, _ in stage.inputs):
            found.add(stage.name)
    return found


# ── The key of a stage: what it hashes, in words, and how it differs from the key that the stage last ran with ──

Parts = dict[str, Any]  # the settings and digests that a key is the hash of, by name


def begun_path(run: Run, stage: Stage) -> Path:
    """Where the key parts of a stage stand while it runs."""
    return run.path("stages", f"{stage.name}.begun.json")


def recorded_parts(run: Run, stage: Stage) -> Parts | None:
    """The key parts that a stage finished or began with; None for a stage that never ran."""
    record, begun = run.done(stage.name), begun_path(run, stage)
    if record is not None:
        return dict(record["inputs"])
    return dict(read_json(begun, {})) if begun.exists() else None


def key_parts(stage: Stage, recipe: Recipe, run: Run) -> Parts:
    """Everything that a stage's key is the hash of."""
    parts: Parts = {"version": stage.version}
    for name in dict.fromkeys((*stage.settings, *conditional_settings(recipe).get(stage.name, ()))):
        parts[name] = value_of(recipe, name, stage.ignores)
    began = recorded_parts(run, stage) or {}
    for name, look in stage.pins:
        found = began[name] if name in began else look(recipe, run)
        if found is not None:
            parts[name] = found
    for name in stage.models:
        label, value = _content(name, recipe)
        if value is not None:
            parts[label] = value
    absent = left_out(recipe)
    for name, pattern in stage.inputs:
        if name not in absent:
            parts[f"{name}: {pattern}"] = run.artifacts_digest(name, pattern)
    return parts


def difference(old: Parts, new: Parts) -> list[str]:
    """The changes between two sets of key parts, one line each; none for equal ones."""
    return _changes(old, new) or ["another version of distill made this run"] * (old != new)


def _changes(old: Parts, new: Parts, prefix: str = "") -> list[str]:
    lines = []
    for name in [*old, *(name for name in new if name not in old)]:
        values: list[Any] = [side.get(name) for side in (old, new)]
        before, after = values
        if before == after:
            continue
        if has_form(before, [{}]) and has_form(after, [{}]) and len(before) == len(after):
            before, after = dict(enumerate(before)), dict(enumerate(after))
        if isinstance(before, dict) and isinstance(after, dict):
            lines += _changes(before, after, f"{prefix}{name}.")
        elif "content" in str(name) or ":" in str(name) or name == "target.model":
            lines.append(f"{prefix}{name} has other content")
        else:
            lines.append(f"{prefix}{name}: {before!r} -> {after!r}")
    return lines


def value_of(recipe: Recipe, dotted: str, ignores: Sequence[str] = ()) -> Any:
    """The value of a recipe key, without the keys below it that `ignores` names; None below a section that is off.

    Below a list of sections, it is the list of the values in those that have the key.
    """
    value: Any = recipe.model_dump(mode="json")
    for part in dotted.split("."):
        if isinstance(value, list):  # of sections: the key in those that have it
            value = [item[part] for item in value if part in item]
        else:
            value = None if value is None else value[part]
    return _without(value, dotted, ignores)


def _without(value: Any, dotted: str, ignores: Sequence[str]) -> Any:
    """A value without the keys at any depth below it that `ignores` names."""
    if not isinstance(value, dict):
        return value
    kept = {name: inner for name, inner in value.items() if f"{dotted}.{name}" not in ignores}
    return {name: _without(inner, f"{dotted}.{name}", ignores) for name, inner in kept.items()}


def _content(name: str, recipe: Recipe) -> tuple[str, Any]:
    """Label and digest of the target, the donor, files of writer and teacher, or the sources; None without one."""
    if name == "sources":  # but for questions of the target's own, which are an input
        read = (source for source in recipe.corpus.sources if source.kind != "target")
        return "corpus.sources (content)", [_source_digest(source) for source in read]
    writer = recipe.answers.writer
    label, reference = {
        "target": ("target.model", recipe.target.model),
        "donor": ("cut.donor (content)", recipe.donor_model),
        "gguf": ("teacher.gguf (content)", recipe.teacher.gguf),
        "writer": ("answers.writer.gguf (content)", None if writer is None else writer.gguf),
    }[name]
    return label, None if reference is None else reference_digest(reference)


def _source_digest(source: Source) -> Any:
    if source.path == "python:stdlib":
        return sys.version.split()[0]
    if source.kind == "tree":
        return joint_digest(digests_of(tree_files(source)))
    if source.kind == "hub" or Path(source.path).exists():
        return reference_digest(source.path, "dataset" if source.kind == "hub" else "model")
    return [reference_digest(str(path)) for path in source_files(source)]


def conditional_settings(recipe: Recipe) -> dict[str, tuple[str, ...]]:
    """By stage, the settings that are part of its key for some recipes only.

    An option with its default is in no key. Of llama.cpp's options, those that change rounding alone are in the keys of
    stages that measure seconds, and in no others.
    """
    writer = recipe.answers.writer
    logits = tuple(f"gguf.target.{name}" for name in recipe.gguf.target.given() if name in CHANGES_LOGITS)
    written = logits if writer is not None and writer.gguf is not None else ()
    split = () if recipe.answers.traffic is None else ("corpus.validation", "corpus.test", "chat")
    return {
        "questions": written,
        "answers": written + split + (("teacher.top_k",) if recipe.writer_teaches else ()),
        "teacher": logits if recipe.teacher.gguf is not None else (),
        "eval": () if recipe.train.steps else ("train.steps",),
    }

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
from distill.files import digests_of, file_digests, has_form, joint_digest, parse_object, read_json, write_json
from distill.recipe import CONNECTION_KEYS, Recipe, Source
from distill.recipe.corpus import OF_TARGET
from distill.recipe.measuring import CHANGES_LOGITS
from distill.recipe.recipe import left_out
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
    passing: prefixes of settings that do not change anything that a precious stage reads.
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
        found: Callable[[Recipe, Run], list[Path]] = getattr(importlib.import_module(module), name)
        return found


def _keys(section: str, names: str | Sequence[str]) -> tuple[str, ...]:
    """The dotted keys of a section, from a list or from words with spaces between them."""
    return tuple(f"{section}.{name}" for name in (names.split() if isinstance(names, str) else names))


# Settings of a training that change rounding, speed and kept checkpoints, but nothing else.
ROUNDING = _keys("train", "micro_batch chunk save_every keep checkpointing compile trackers")
# How servers are reached changes none of their numbers; a GGUF file's content is part of the key.
TEACHER_CONNECTION = _keys("teacher.server", CONNECTION_KEYS)
WRITER_CONNECTION = _keys("answers.writer", ("gguf", "missing", *CONNECTION_KEYS))
# What a held-out text does not depend on: the count and the limits of the train answers, and how they are grouped.
TRAIN_ANSWERS = _keys("answers", "prompts prompt_tokens new_tokens batch group keep_truncated traffic")
TYPES = ("target.dtype", "target.quantise")


def _held_out(split: str, function: str, settings: tuple[str, ...]) -> Stage:
    """A stage that lets whatever holds the target answer the prompts of a split and give its distributions there."""
    return Stage(
        split,
        f"distill.teacher.answers:{function}",
        ("seed", "answers", "sampler", "teacher", "corpus.block", "target.dtype", *settings),
        (
            ("corpus", f"corpus/prompts-{split}.jsonl"),
            ("corpus", f"corpus/text-{split}.safetensors"),
            ("answers", f"answers/*-{split}*"),
        ),
        (split,),
        ("target", "writer", "gguf"),
        ignores=(*WRITER_CONNECTION, *TEACHER_CONNECTION, *TRAIN_ANSWERS, "teacher.mass"),
    )


STAGES = (
    Stage(
        "questions",
        "distill.teacher.questions:questions",
        (
            "seed",
            *_keys("corpus.sources", OF_TARGET),
            *_keys("chat", "system thinking thinking_argument arguments tools"),
            *_keys("answers", "writer batch group"),
            *TYPES,
        ),
        (),
        ("questions",),
        ("target", "writer"),
        precious=True,
        ignores=WRITER_CONNECTION,
        together=True,
    ),
    Stage(
        "corpus",
        "distill.data.corpus:corpus",
        (
            *("seed", "corpus", "chat", "cut.score_blocks"),
            "train.acceptance.prompts",
            *_keys("answers", "prompts prompt_tokens new_tokens"),
            *_keys("eval", "prompts file_blocks"),
            "speedup.prompts",
        ),
        (("questions", "questions/target*.jsonl"),),
        ("corpus",),
        ("target", "sources"),
        passing=("eval.", "speedup.", "cut.score_blocks", "train."),
        version=2,
    ),
    Stage(
        "answers",
        "distill.teacher.answers:answers",
        ("seed", "answers", "sampler", "corpus.block", *TYPES),  # a conversation of several turns ends with its block
        (("corpus", "corpus/prompts-train.jsonl"),),
        ("answers",),
        ("target", "writer"),
        precious=True,
        ignores=WRITER_CONNECTION,
        pins=((TRAFFIC, pin_traffic),),
        together=True,
    ),
    Stage(
        "teacher",
        "distill.teacher.stage:teacher",
        ("teacher", "corpus.block", *TYPES),
        (("answers", "answers/train-*"), ("corpus", "corpus/text-train.safetensors")),
        ("teacher",),
        ("target", "gguf"),
        precious=True,
        ignores=TEACHER_CONNECTION,
        together=True,
    ),
    Stage(
        "table",
        "distill.teacher.table:table",
        ("corpus.block",),
        (("answers", "answers/train-*"), ("teacher", "teacher/*")),
        ("table",),
        ("target",),
    ),
    _held_out(
        "validation",
        "hold_out_validation",
        ("train.acceptance.prompts", "train.acceptance.new_tokens", "cut.score_blocks"),
    ),
    _held_out("test", "hold_out_test", ("eval.prompts", "eval.new_tokens", "eval.file_blocks")),
    Stage(
        "cut",
        "distill.surgery.stage:cut",
        ("cut",),
        (
            ("corpus", "corpus/text-validation.safetensors"),
            ("answers", "answers/train-*"),
            ("teacher", "teacher/*"),
            ("validation", "validation/*"),
        ),
        ("cut", "compared"),
        ("target", "donor"),
        ignores=(*ROUNDING, "cut.allow_full_size"),
        pins=(("parent (content)", lambda recipe, run: run.parent()),),
    ),
    Stage(
        "train",
        "distill.training.loop:train",
        ("seed", "train", "sampler", "target.dtype"),
        (
            ("teacher", "teacher/*"),
            ("cut", "cut/*"),
            ("corpus", "corpus/prompts-validation.jsonl"),
            ("validation", "validation/*"),
        ),
        ("checkpoints", "draft", "training.json"),
        ("target",),
        precious=True,
        ignores=ROUNDING,
        together=True,
    ),
    Stage(
        "eval",
        "distill.measuring.evaluation:evaluate",
        ("seed", "eval", "sampler", *TYPES, "answers.batch"),
        (
            ("cut", "cut/*"),
            ("train", "draft/*"),
            ("corpus", "corpus/*-test.*"),
            ("answers", "answers/prompts-test.jsonl"),
            ("test", "test/*"),
        ),
        ("eval.json", "eval.md", "rounds.parquet"),
        ("target",),
    ),
    Stage(
        "export",
        "distill.export.parity:export",
        ("export",),
        (("train", "draft/*"), ("corpus", "corpus/documents-test.jsonl")),
        ("gguf",),
        ("target",),
    ),
    Stage(
        "speedup",
        "distill.measuring.speedup:speedup",
        (
            *("speedup", "sampler", "seed", "threads", "device", "pytorch", "gguf", *TYPES),
            "answers.prompt_tokens",
        ),
        (
            ("train", "draft/*"),
            ("corpus", "corpus/text-validation.safetensors"),
            ("export", "gguf/*.gguf"),
            ("corpus", "corpus/prompts-test.jsonl"),
            ("answers", "answers/prompts-test.jsonl"),
            ("eval", "rounds.parquet"),
            ("table", "table/*"),
        ),
        ("speedup", "speedup.json", "speedup.md"),
        ("target",),
    ),
    Stage(
        "report",
        "distill.report.card:report",
        ("name",),
        (
            ("cut", "*"),
            ("train", "draft/*.safetensors"),
            ("train", "training.json"),
            ("test", "test/summary.json"),
            *((name, "*") for name in ("eval", "export", "speedup")),
        ),
        ("report.html", "draft/README.md"),
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
CONTENTS = "contents.json"  # of a run: the files of each model whose digest stands in one
MOST_FILES = 1000  # of a reference whose files are remembered
NAMED = 5  # changed files named in a message


class Contents:
    """Digests of models and sources, each taken once, and the files behind each, so that a changed one can be named."""

    def __init__(self, run: Run) -> None:
        self._path = run.path(CONTENTS)
        found = parse_object(self._path.read_bytes()) if self._path.is_file() else {}
        whole = isinstance(found, dict) and has_form(found, {...: {...: str}})  # if not: it only helps messages
        self._files: dict[str, dict[str, str]] = found if isinstance(found, dict) and whole else {}
        self._known = dict(self._files)
        self._digests: dict[str, str] = {}

    def digest(self, reference: str) -> str:
        """The digest of a local model or source; for a hub name, the name itself."""
        if reference not in self._digests:
            files = file_digests(reference)
            self._digests[reference] = reference if files is None else self.joint(files)
        return self._digests[reference]

    def joint(self, files: dict[str, str]) -> str:
        """One digest of several files, given by their own."""
        found = joint_digest(files)
        if len(files) <= MOST_FILES:
            self._files[found] = files
        return found

    def changed(self, old: Any, new: Any) -> str:
        """The files in which two digests differ, for a message; empty where that is not known."""
        before, after = (self._files.get(one) if isinstance(one, str) else None for one in (old, new))
        if before is None or after is None:
            return ""
        names = sorted(name for name in {*before, *after} if name and before.get(name) != after.get(name))
        return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")

    def save(self) -> None:
        """Keep the files of all digests taken so far with the run."""
        if self._files != self._known:
            write_json(self._path, self._files)
            self._known = dict(self._files)


def begun_path(run: Run, stage: Stage) -> Path:
    """Where the key parts of a stage stand while it runs."""
    return run.path("stages", f"{stage.name}.begun.json")


def recorded_parts(run: Run, stage: Stage) -> Parts | None:
    """The key parts that a stage finished or began with; None for a stage that never ran."""
    record, begun = run.done(stage.name), begun_path(run, stage)
    if record is not None:
        return dict(record["inputs"])
    return dict(read_json(begun, {})) if begun.exists() else None


def key_parts(stage: Stage, recipe: Recipe, run: Run, contents: Contents) -> Parts:
    """Everything that a stage's key is the hash of."""
    parts: Parts = {"version": stage.version}
    for name in dict.fromkeys((*stage.settings, *conditional_settings(recipe).get(stage.name, ()))):
        parts[name] = _setting(recipe, name, stage.ignores)
    began = recorded_parts(run, stage) or {}
    for name, look in stage.pins:
        found = began[name] if name in began else look(recipe, run)
        if found is not None:
            parts[name] = found
    for name in stage.models:
        label, value = _content(name, recipe, contents)
        if value is not None:
            parts[label] = value
    absent = left_out(recipe)
    for name, pattern in stage.inputs:
        if name not in absent:
            parts[f"{name}: {pattern}"] = run.artifacts_digest(name, pattern)
    return parts


def difference(old: Parts, new: Parts, contents: Contents | None = None, recipe: Recipe | None = None) -> list[str]:
    """The changes between two sets of key parts, one line each; none for equal ones.

    Where one item of a list of the `recipe` differs, its name is the one that an override takes.
    """
    return _changes(old, new, contents, recipe) or ["another version of distill made this run"] * (old != new)


def _changes(old: Parts, new: Parts, contents: Contents | None, recipe: Recipe | None, prefix: str = "") -> list[str]:
    lines = []
    for name in [*old, *(name for name in new if name not in old)]:
        before, after = old.get(name), new.get(name)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            lines += _changes(before, after, contents, recipe, f"{prefix}{name}.")
        elif "content" in name or ":" in name or name == "target.model":
            files = "" if contents is None else contents.changed(before, after)
            lines.append(f"{prefix}{name} has other content" + (f": {files}" if files else ""))
        elif item := _changed_item(f"{prefix}{name}", before, after, recipe):
            lines += _changes({item[0]: item[1]}, {item[0]: item[2]}, contents, recipe)
        else:
            lines.append(f"{prefix}{name}: {before!r} -> {after!r}")
    return lines


def _changed_item(dotted: str, before: Any, after: Any, recipe: Recipe | None) -> tuple[str, Any, Any] | None:
    """Name and values of the only item in which two lists of sections differ, or in which the values of a key in those
    sections do (see `_setting`); None where there is no such item."""
    if not (isinstance(before, list) and isinstance(after, list) and len(before) == len(after)):
        return None
    changed = [index for index, value in enumerate(before) if value != after[index]]
    if len(changed) != 1:
        return None
    one, other = before[changed[0]], after[changed[0]]
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return f"{dotted}.{changed[0]}", one, other
    section, _, key = dotted.rpartition(".")
    if recipe is None or section != "corpus.sources":
        return None
    places = [index for index, source in enumerate(_setting(recipe, section)) if key in source]
    return (f"{section}.{places[changed[0]]}.{key}", one, other) if len(places) == len(after) else None


def _setting(recipe: Recipe, dotted: str, ignores: Sequence[str] = ()) -> Any:
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


def _content(name: str, recipe: Recipe, contents: Contents) -> tuple[str, Any]:
    """Label and digest of the target, the donor, files of writer and teacher, or the sources; None without one."""
    if name == "sources":  # but for questions of the target's own, which are an input
        read = (source for source in recipe.corpus.sources if source.kind != "target")
        return "corpus.sources (content)", [_source_digest(source, contents) for source in read]
    writer = recipe.answers.writer
    label, reference = {
        "target": ("target.model", recipe.target.model),
        "donor": ("cut.donor (content)", recipe.donor_model),
        "gguf": ("teacher.gguf (content)", recipe.teacher.gguf),
        "writer": ("answers.writer.gguf (content)", None if writer is None else writer.gguf),
    }[name]
    return label, None if reference is None else contents.digest(reference)


def _source_digest(source: Source, contents: Contents) -> Any:
    if source.path == "python:stdlib":
        return sys.version.split()[0]
    if source.kind == "tree":
        return contents.joint(digests_of(tree_files(source)))
    if source.kind == "hub" or Path(source.path).exists():
        return contents.digest(source.path)
    return [contents.digest(str(path)) for path in source_files(source)]


def conditional_settings(recipe: Recipe) -> dict[str, tuple[str, ...]]:
    """By stage, the settings that are part of its key for some recipes only.

    An option with its default is in no key. Of llama.cpp's options, those that change rounding alone are in the keys of
    stages that measure seconds, and in no others.
    """
    writer, trim = recipe.answers.writer, recipe.cut.trim
    pair = tuple(f"gguf.{role}.{name}" for role in ("target", "draft") for name in getattr(recipe.gguf, role).given())
    logits = tuple(f"gguf.target.{name}" for name in recipe.gguf.target.given() if name in CHANGES_LOGITS)
    written = logits if writer is not None and writer.gguf is not None else ()
    distributions = logits if recipe.teacher.gguf is not None else ()
    unloaded = () if recipe.target.load else ("target.load",)
    measured_cuts: tuple[str, ...] = ()
    if recipe.cut.compare or (trim is not None and trim.size is None and trim.by == "price"):
        measured_cuts = tuple(f"speedup.{name}" for name in ("backends", "outtype", "depth", "repeats"))
        measured_cuts += ("seed", "train", "sampler", "corpus.block", "threads", "target.dtype", "target.quantise")
        measured_cuts += pair
        measured_cuts += () if recipe.pytorch.prepack else ("pytorch.prepack",)
    if measured_cuts and recipe.device != "auto":
        measured_cuts += ("device",)
    turns: tuple[str, ...] = ()
    split = () if recipe.answers.traffic is None else ("corpus.validation", "corpus.test", "chat")
    if any(source.turns > 1 for source in recipe.corpus.asked):  # further turns are written behind the target's answers
        turns = ("sampler", "corpus.block", *_keys("answers", "new_tokens stop repetition_penalty keep_truncated"))
    return {
        "questions": written + turns,
        # Served texts hold held-out ones, too, which are kept where the target is not loaded.
        "answers": written + split + (() if recipe.answers.traffic is None else unloaded),
        "teacher": distributions,
        "validation": written + distributions,
        "test": written + distributions,
        "cut": measured_cuts,
        "export": unloaded,
    }

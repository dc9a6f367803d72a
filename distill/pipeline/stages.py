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
    """One stage: its function (imported when it runs), the parts of its key, and the files that it writes.

    name: as in the recipe's sections and on the command line.
    function: `module:name`.
    settings: dotted recipe keys that are part of the key (`conditional_settings` adds those of some recipes).
    inputs: (stage, pattern of artifact names). Their digests are part of the key.
    writes: files and folders of the run directory.
    models: `target`, `donor`, `writer` and `gguf` (GGUF files of answers and teacher) and `sources`. Their contents are
        part of the key.
    precious: finished or begun work is expensive and never replaced without `--redo`.
    version: version of the artifacts' format.
    passing: prefixes of parts of the key that do not affect what is learnt from. If only these change, the stage runs
        again over its finished files and makes what depends on the change again.
    ignores: settings that are not in the key, because they change results by rounding at most.
    pins: state outside the recipe, by name. It is recorded when the stage begins and then stays. None is in no key.
    together: all processes of the command take part. In other stages only the main process works.
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
        """Import and return the stage function `stage(recipe, run)`, which returns its artifacts."""
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(module), name)


def _stage(
    place: str, keys: str, reads: str, loads: str = "", ignores: str = "", name: str = "", writes: str = "", **more: Any
) -> Stage:
    """Make a stage from words separated by spaces. An input is STAGE:PATTERN.

    The name of the function (MODULE:NAME) is the default for `name`, and `name` is the default for `writes`.
    """
    name = name or place.partition(":")[2]
    read = tuple((stage, pattern) for stage, _, pattern in (word.partition(":") for word in reads.split()))
    settings, written, asked = (tuple(words.split()) for words in (keys, writes or name, loads))
    return Stage(name, f"distill.{place}", settings, read, written, asked, ignores=tuple(ignores.split()), **more)


def _keys(section: str, names: str) -> str:
    """Return the dotted keys of a section."""
    return " ".join(f"{section}.{name}" for name in names.split())


CONNECTION = " ".join(CONNECTION_KEYS)
# These training settings change only rounding, speed and kept checkpoints.
ROUNDING = _keys("train", "micro_batch save_every checkpointing compile")
# The way to reach a server changes none of its numbers. A GGUF file's content is part of the key.
OF_TEACHER = _keys("teacher.server", CONNECTION)
OF_WRITER = _keys("answers.writer", f"gguf missing {CONNECTION}")
TYPES = "target.dtype target.quantise"
# These settings concern held-out prompts only. They do not affect what is learnt from.
HELD_OUT = f"train.acceptance.prompts {_keys('eval', 'prompts new_tokens file_blocks')} cut.score_blocks"
HELD_OUT_PROMPTS = "corpus:corpus/prompts-validation.arrow corpus:corpus/prompts-test.arrow"
HELD_OUT_ANSWERS = (
    "answers:answers/validation/* answers:answers/test/* answers:answers/prompts-validation.arrow "
    "answers:answers/prompts-test.arrow corpus:corpus/text-validation.safetensors corpus:corpus/text-test.safetensors"
)


def _parts(words: str) -> tuple[str, ...]:
    """Return settings and inputs by the names that they have in a key."""
    return tuple(word.replace(":", ": ", 1) for word in words.split())


STAGES = (
    _stage(
        "teacher.answers:questions",
        f"seed {_keys('corpus.sources', ' '.join(OF_TARGET))} {_keys('answers', 'writer group')} {TYPES} "
        + _keys("chat", "system thinking arguments tools"),
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
        f"seed answers sampler corpus.block {TYPES} {HELD_OUT}",  # corpus.block limits conversations of several turns.
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
    """Return the stage called `name`. Raises RunError, with all names, for an unknown name."""
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
            raise RunError(f"stage `{name}` is not part of this run: {absent[name]}", f"its stages: {has}")


def consumers(names: Sequence[str]) -> set[str]:
    """Return these stages and all stages that read their artifacts, directly or through others."""
    reached = set(names)
    for stage in STAGES:
        if any(name in reached for name, _ in stage.inputs):
            reached.add(stage.name)
    return reached


# ── The key of a stage: what it hashes, in words, and its difference from the key of the last run ──

Parts = dict[str, Any]  # the settings and digests that a key is the hash of, by name


def begun_path(run: Run, stage: Stage) -> Path:
    """Return the path of a stage's key parts while it runs."""
    return run.path("stages", f"{stage.name}.begun.json")


def recorded_parts(run: Run, stage: Stage) -> Parts | None:
    """Return the key parts with which a stage finished or began, or None if it never ran."""
    record, begun = run.done(stage.name), begun_path(run, stage)
    if record is not None:
        return dict(record["inputs"])
    return dict(read_json(begun, {})) if begun.exists() else None


# Settings whose model is in the key by its content, so that a model which was only moved counts as the same one.
MOVABLE = {"teacher.gguf (content)": ("teacher", "gguf"), "cut.donor (content)": ("cut", "donor")}


def key_parts(stage: Stage, recipe: Recipe, run: Run) -> Parts:
    """Return everything that a stage's key hashes."""
    parts: Parts = {"version": stage.version}
    for name in dict.fromkeys((*stage.settings, *conditional_settings(recipe).get(stage.name, ()))):
        parts[name] = value_of(recipe, name, stage.ignores)
    began = recorded_parts(run, stage) or {}
    for name, look in stage.pins:
        state = began[name] if name in began else look(recipe, run)
        if state is not None:
            parts[name] = state
    for name in stage.models:
        label, value = _content(name, recipe)
        if value is not None:
            parts[label] = value
    for label, (section, name) in MOVABLE.items():
        if label in parts and began.get(label) == parts[label] and name in began.get(section, {}):
            parts[section] = parts[section] | {name: began[section][name]}
    absent = left_out(recipe)
    for name, pattern in stage.inputs:
        if name not in absent:
            parts[f"{name}: {pattern}"] = run.artifacts_digest(name, pattern)
    return parts


def difference(old: Parts, new: Parts) -> list[str]:
    """Return the changes between two sets of key parts, one line each. Empty for equal sets."""
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
    """Return the value of a recipe key, without the keys below it in `ignores`. None below a section that is off.

    For a key below a list of sections, return the list of its values in the sections that have the key.
    """
    value: Any = recipe.model_dump(mode="json")
    for part in dotted.split("."):
        if isinstance(value, list):  # a list of sections
            value = [item[part] for item in value if part in item]
        else:
            value = None if value is None else value[part]
    return _without(value, dotted, ignores)


def _without(value: Any, dotted: str, ignores: Sequence[str]) -> Any:
    """Return a value without the keys in `ignores`, at any depth."""
    if not isinstance(value, dict):
        return value
    kept = {name: inner for name, inner in value.items() if f"{dotted}.{name}" not in ignores}
    return {name: _without(inner, f"{dotted}.{name}", ignores) for name, inner in kept.items()}


def _content(name: str, recipe: Recipe) -> tuple[str, Any]:
    """Return label and digest of the target, the donor, files of writer and teacher, or sources. None if absent."""
    if name == "sources":  # Self-asked questions are an input, not a source.
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
    """Return, by stage, the settings that are part of its key for some recipes only.

    Options with their default value are in no key. llama.cpp's options that change only rounding are in the keys of
    stages that measure time, and in no others.
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

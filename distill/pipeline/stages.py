"""The stages, in order, with the inputs and outputs of each. running.py decides when a stage runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.errors import RunError
from distill.recipe import CONNECTION_KEYS, Recipe
from distill.recipe.corpus import OF_TARGET
from distill.recipe.recipe import left_out
from distill.run import Run
from distill.target.traffic import PIN as TRAFFIC
from distill.target.traffic import pin_traffic


@dataclass(frozen=True)
class Stage:
    """One stage: its function (imported when it runs), the parts of its key, and the files it writes.

    name: as in the recipe's sections and on the command line.
    function: `module:name`.
    settings: dotted recipe keys that are part of the key (keys.conditional_settings adds those of some recipes).
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
        f"distill.target.answers:{function}",
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
        "distill.target.questions.stage:questions",
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
        "distill.corpus.stage:corpus",
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
    ),
    Stage(
        "answers",
        "distill.target.answers:answers",
        ("seed", "answers", "sampler", *TYPES),
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
        "distill.target.teacher:teacher",
        ("teacher", "corpus.block", *TYPES),
        (("answers", "answers/train-*"), ("corpus", "corpus/text-train.safetensors")),
        ("teacher",),
        ("target", "gguf"),
        precious=True,
        ignores=TEACHER_CONNECTION,
        together=True,
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
        "distill.evaluation.stage:evaluate",
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
        "distill.export.stage:export",
        ("export",),
        (("train", "draft/*"), ("corpus", "corpus/documents-test.jsonl")),
        ("gguf",),
        ("target",),
    ),
    Stage(
        "speedup",
        "distill.benchmark.speedup:speedup",
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
        ),
        ("speedup", "speedup.json", "speedup.md"),
        ("target",),
    ),
    Stage(
        "report",
        "distill.report.stage:report",
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

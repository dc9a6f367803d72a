"""The key of a stage: what it hashes, in words, and how it differs from the key that the stage last ran with."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from distill.corpus.sources import source_files
from distill.files import digest, read_json, reference_digest
from distill.pipeline.stages import Stage
from distill.recipe import Recipe, Source
from distill.recipe.text.unloaded import left_out
from distill.run import Run

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


def key_parts(stage: Stage, recipe: Recipe, run: Run, cache: dict[str, str]) -> Parts:
    """Everything that a stage's key is the hash of; `cache` keeps the digests of models and sources, by reference."""
    parts: Parts = {"version": stage.version}
    for name in dict.fromkeys((*stage.settings, *stage.more(recipe))):
        parts[name] = _setting(recipe, name, stage.ignores)
    began = recorded_parts(run, stage) or {}
    for name, look in stage.pins:
        found = began[name] if name in began else look(recipe, run)
        if found is not None:
            parts[name] = found
    for name in stage.models:
        label, value = _content(name, recipe, cache)
        if value is not None:
            parts[label] = value
    absent = left_out(recipe)
    for name, pattern in stage.inputs:
        if name not in absent:
            parts[f"{name}: {pattern}"] = _artifacts_digest(run, name, pattern)
    return parts


def difference(old: Parts, new: Parts, prefix: str = "") -> list[str]:
    """The changes between two sets of key parts, one line each."""
    lines = []
    for name in [*old, *(name for name in new if name not in old)]:
        before, after = old.get(name), new.get(name)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            lines += difference(before, after, f"{prefix}{name}.")
        elif "content" in name or ":" in name or name == "target.model":
            lines.append(f"{prefix}{name} has other content")
        else:
            lines.append(f"{prefix}{name}: {before!r} -> {after!r}")
    return lines


def _setting(recipe: Recipe, dotted: str, ignores: Sequence[str] = ()) -> Any:
    """The value of a recipe key, without the keys below it that `ignores` names; None below a section that is off."""
    value: Any = recipe.model_dump(mode="json")
    for part in dotted.split("."):
        value = None if value is None else value[part]
    return _without(value, dotted, ignores)


def _without(value: Any, dotted: str, ignores: Sequence[str]) -> Any:
    """A value without the keys at any depth below it that `ignores` names."""
    if not isinstance(value, dict):
        return value
    kept = {name: inner for name, inner in value.items() if f"{dotted}.{name}" not in ignores}
    return {name: _without(inner, f"{dotted}.{name}", ignores) for name, inner in kept.items()}


def _content(name: str, recipe: Recipe, cache: dict[str, str]) -> tuple[str, Any]:
    """Label and digest of the target, the donor, files of writer and teacher, or the sources; None without one."""

    def model_digest(reference: str) -> str:
        if reference not in cache:
            cache[reference] = reference_digest(reference)
        return cache[reference]

    if name == "target":
        return "target.model", model_digest(recipe.target.model)
    if name == "gguf":
        return "teacher.gguf (content)", model_digest(recipe.teacher.gguf) if recipe.teacher.gguf else None
    if name == "donor":
        return "cut.donor (content)", model_digest(recipe.donor_model)
    if name == "writer":
        writer = recipe.answers.writer
        path = None if writer is None else writer.gguf
        return "answers.writer.gguf (content)", None if path is None else model_digest(path)

    def source_digest(source: Source) -> Any:
        if source.path == "python:stdlib":
            return sys.version.split()[0]
        if source.kind in ("hub", "tree") or Path(source.path).exists():
            return model_digest(source.path)
        return [model_digest(str(path)) for path in source_files(source)]

    return "corpus.sources (content)", [source_digest(source) for source in recipe.corpus.sources]


def _artifacts_digest(run: Run, stage: str, pattern: str) -> str | None:
    """Digest of a finished stage's artifacts whose names match `pattern`; None for an unfinished stage."""
    record = run.done(stage)
    if record is None:
        return None
    return digest({file: entry["sha256"] for file, entry in record["artifacts"].items() if fnmatch(file, pattern)})

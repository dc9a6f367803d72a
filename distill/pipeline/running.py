"""When a stage runs, resumes, is skipped or refused: keys, their differences, and the loop over the stages."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from distill.errors import RunError
from distill.files import digest, faults_explained, read_json, reference_digest, write_json
from distill.pipeline.stages import LAST_TOGETHER, NAMES, STAGES, Stage, consumers, find_stage
from distill.processes import agree, process_count
from distill.progress import duration
from distill.recipe import Recipe
from distill.run import Run


def _setting(recipe: Recipe, dotted: str, ignores: Sequence[str] = ()) -> Any:
    """A key's value, None below a section that is off, without what `ignores` names inside it."""
    value: Any = recipe.model_dump(mode="json")
    for part in dotted.split("."):
        value = None if value is None else value[part]
    if isinstance(value, dict):
        value = {name: inner for name, inner in value.items() if f"{dotted}.{name}" not in ignores}
    return value


def _record_of(run: Run, stage: Stage) -> dict[str, Any] | None:
    """The key parts that a stage finished or began with; None where it did neither."""
    record, begun = run.done(stage.name), _begun_path(run, stage)
    if record is not None:
        return dict(record["inputs"])
    return dict(read_json(begun)) if begun.exists() else None


def key_parts(stage: Stage, recipe: Recipe, run: Run, cache: dict[str, str]) -> dict[str, Any]:
    """Everything a stage's key is the hash of, readable, so that two keys can be told apart in words."""

    def model_digest(reference: str) -> str:
        if reference not in cache:
            cache[reference] = reference_digest(reference)
        return cache[reference]

    parts: dict[str, Any] = {"version": stage.version}
    for name in dict.fromkeys((*stage.settings, *stage.more(recipe))):
        parts[name] = _setting(recipe, name, stage.ignores)
    began = _record_of(run, stage) or {}
    for name, look in stage.pins:
        found = began[name] if name in began else look(recipe, run)
        if found is not None:
            parts[name] = found
    for name in stage.models:
        if name == "target":
            parts["target.model"] = model_digest(recipe.target.model)
        elif name == "donor":
            donor = recipe.cut.donor
            parts["cut.donor (content)"] = model_digest(recipe.target.model if donor == "target" else donor)
        else:
            parts["corpus.sources (content)"] = [
                sys.version.split()[0] if source.path == "python:stdlib" else model_digest(source.path)
                for source in recipe.corpus.sources
            ]
    for name, pattern in stage.inputs:
        record = run.done(name)
        parts[f"{name}: {pattern}"] = (
            None
            if record is None
            else digest(
                {file: entry["sha256"] for file, entry in record["artifacts"].items() if fnmatch(file, pattern)}
            )
        )
    return parts


def difference(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """What changed between two sets of key parts, one line each."""
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


def _begun_path(run: Run, stage: Stage) -> Path:
    return run.path("stages", f"{stage.name}.begun.json")


def _clear(run: Run, stage: Stage) -> None:
    """Remove what a stage has written, its records first."""
    with faults_explained(run.folder):
        run.done_path(stage.name).unlink(missing_ok=True)
        _begun_path(run, stage).unlink(missing_ok=True)
        for name in stage.writes:
            path = run.path(name)
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def state_of(stage: Stage, recipe: Recipe, run: Run, cache: dict[str, str]) -> tuple[str, list[str], dict[str, Any]]:
    """`done`, `damaged`, `changed`, `begun` or `new`, with reasons, and the key parts."""
    parts = key_parts(stage, recipe, run, cache)
    record = run.done(stage.name)
    if record is not None:
        if record["key"] != digest(parts):
            return "changed", difference(record["inputs"], parts), parts
        faults = list(run.damaged_artifacts(record).values())
        return ("damaged", faults, parts) if faults else ("done", [], parts)
    begun = _begun_path(run, stage)
    if begun.exists():
        old = read_json(begun)
        return ("begun", [], parts) if old == parts else ("changed", difference(old, parts), parts)
    return "new", [], parts


def _forget_damaged(run: Run, stage: Stage) -> None:
    """Remove the damaged artifacts of a precious stage and its record, so that it makes only those again."""
    with faults_explained(run.folder):
        for name in run.damaged_artifacts(run.done(stage.name) or {"artifacts": {}}):
            run.path(name).unlink(missing_ok=True)
        run.done_path(stage.name).unlink(missing_ok=True)


def _refusal(run: Run, stage: Stage, reasons: Sequence[str], kept: str, redo: str) -> RunError:
    return RunError(
        f"stage `{stage.name}` of {run.folder} was made with other settings{kept}:\n    " + "\n    ".join(reasons),
        f"keep it and use another run (name=…), or replace it (--redo {redo}), or move the whole run aside (--fresh)",
    )


def _asked(run: Run, redo: Sequence[str]) -> dict[str, list[str]]:
    """Stages to redo, those of an interrupted earlier command included, and which of them are already under way."""
    path = run.path("stages", "redo.json")
    found: dict[str, list[str]] = read_json(path) if path.exists() else {"asked": [], "started": []}
    return {"asked": sorted({*found["asked"], *redo}), "started": found["started"]}


def require_nothing_superseded(recipe: Recipe, run: Run, until: str | None = None, redo: Sequence[str] = ()) -> None:
    """Raise RunError when running up to `until` would supersede precious work without being asked; changes nothing."""
    last = NAMES.index(find_stage(until).name) if until else len(STAGES) - 1
    for name in redo:
        find_stage(name)
    allowed = consumers(_asked(run, redo)["asked"])
    cache: dict[str, str] = {}
    for stage in STAGES[: last + 1]:
        if stage.name in allowed:
            continue
        record, begun = run.done(stage.name), _begun_path(run, stage)
        if record is None and not begun.exists():
            continue
        old = record["inputs"] if record is not None else read_json(begun)
        new = key_parts(stage, recipe, run, cache)
        # What a stage before it has yet to make again cannot be compared before it is made.
        changed = {
            name
            for name in {*old, *new}
            if old.get(name) != new.get(name) and not (":" in name and None in (old.get(name), new.get(name)))
        }
        reasons = difference(
            {name: old.get(name) for name in old if name in changed},
            {name: new.get(name) for name in new if name in changed},
        )
        if stage.precious and changed:
            raise _refusal(run, stage, reasons, "", stage.name)
        rests = [
            other.name
            for other in STAGES
            if other.precious
            and other.name in consumers([stage.name])
            and other.name not in allowed
            and (run.done_path(other.name).exists() or _begun_path(run, other).exists())
        ]
        if rests and any(not name.startswith(stage.passing) for name in changed):
            raise _refusal(run, stage, reasons, f", and {', '.join(rests)} rest on it", stage.name)


def run_pipeline(
    recipe: Recipe, run: Run, until: str | None = None, redo: Sequence[str] = (), dry: bool = False
) -> None:
    """Run every stage up to `until` that is not done; `redo` names stages to run again with their consumers.

    Raises RunError, before touching anything, when finished or begun work of a precious stage would be superseded.
    """
    last = NAMES.index(find_stage(until).name) if until else len(STAGES) - 1
    require_nothing_superseded(recipe, run, until, redo)
    again = _asked(run, redo)
    allowed = consumers(again["asked"])
    cache: dict[str, str] = {}
    awaited = process_count() > 1  # by the processes in follow_main
    for stage in STAGES[: last + 1]:
        if awaited and NAMES.index(stage.name) > NAMES.index(LAST_TOGETHER):
            agree()  # the others can go
            awaited = False
        state, reasons, parts = state_of(stage, recipe, run, cache)
        forced = stage.name in again["asked"] and stage.name not in again["started"]
        if forced:
            state, reasons = "changed", ["asked for with --redo"]
        if state == "changed" and stage.precious and stage.name not in allowed and not dry:
            raise _refusal(run, stage, reasons, "", stage.name)
        if state == "done":
            if not dry:
                _begun_path(run, stage).unlink(missing_ok=True)  # a kill right after the record leaves it
            run.say(f"{stage.name}: up to date")
            continue
        if dry:
            run.say(f"{stage.name}: would run ({', '.join([state, *reasons])})")
            if stage.name != NAMES[last]:
                run.say("stages after it depend on what it writes")
            return
        why = f" ({'; '.join(reasons)})" if reasons else ""
        run.say(f"{stage.name}: {'resumes' if state == 'begun' else 'runs'}{why}")
        if state == "damaged" and stage.precious:
            _forget_damaged(run, stage)
        elif state != "begun":  # what stands there without a record is of unknown make
            _clear(run, stage)
            parts = key_parts(stage, recipe, run, cache)  # what was pinned is looked at anew
        if forced:
            again["started"].append(stage.name)
            write_json(run.path("stages", "redo.json"), again)
        write_json(_begun_path(run, stage), parts)
        started = time.time()
        if stage.together:
            agree(stage.name)
        artifacts = stage.load()(recipe, run)
        run.finish(stage.name, digest(parts), parts, artifacts, started)
        _begun_path(run, stage).unlink(missing_ok=True)
        run.say(f"{stage.name}: done in {duration(time.time() - started)}")
    if awaited:
        agree()
    if not dry:
        run.path("stages", "redo.json").unlink(missing_ok=True)


def follow_main(recipe: Recipe, run: Run) -> None:
    """What every process but the main one does: take part in the stages that the main one says, until it is done.

    Raises RunError, which names no cause, when another process ended: that one has said why.
    """
    try:
        while (name := agree()) is not None:
            find_stage(name).load()(recipe, run)
    except RuntimeError as error:  # what gloo and NCCL raise when the other end of a connection is gone
        if not any(word in str(error) for word in ("onnection closed", "onnection reset", "NCCL", "remote process")):
            raise
        raise RunError("this process ends because another one did", "see what that one said") from error

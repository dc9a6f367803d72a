"""Carries out the plan of a run, stage by stage, in one process or in several together."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from distill.errors import RunError
from distill.faults import faults_explained
from distill.files import digest, write_json
from distill.pipeline.keys import begun_path, key_parts
from distill.pipeline.planning import Action, Kind, Planner, Redo, require_allowed
from distill.pipeline.stages import LAST_TOGETHER, NAMES, Stage, find_stage
from distill.processes import agree, process_count
from distill.progress import duration
from distill.recipe import Recipe
from distill.run import Run

STARTING: dict[Kind, str] = {
    "run": "runs",
    "resume": "resumes",
    "redo": "runs again",
    "mend": "makes its damaged files again",
}


def plan_run(recipe: Recipe, run: Run, until: str | None = None, redo: Sequence[str] = ()) -> list[Action]:
    """An action for each stage up to `until`; changes nothing.

    Raises RunError for a stage that does not exist. `redo` names stages to run again with their consumers.
    """
    return Planner(recipe, run, Redo.read(run, redo)).plan(until)


def run_pipeline(
    recipe: Recipe,
    run: Run,
    until: str | None = None,
    redo: Sequence[str] = (),
    show: Callable[[str], None] = lambda stage: None,
) -> None:
    """Run every stage up to `until` that is not done; `redo` names stages to run again with their consumers.

    `show` is called with the name of each stage as soon as its artifacts are there, so that its tables need not wait
    for the stages after it. Raises RunError, before touching anything, when finished or begun work of a precious stage
    would be superseded.
    """
    planner = Planner(recipe, run, Redo.read(run, redo))
    actions = planner.plan(until)
    require_allowed(actions)
    if run.read_only:
        require_finished(run, actions)
    waiting = process_count() > 1  # the other processes are in follow_main
    for action in actions:
        if waiting and NAMES.index(action.stage.name) > NAMES.index(LAST_TOGETHER):
            agree()  # the others can go
            waiting = False
        if action.kind == "leave":
            run.say(action.line())
            continue
        if action.kind == "wait":
            action = planner.decide(action.stage)
            require_allowed([action])
        _carry_out(action, planner)
        show(action.stage.name)
    if waiting:
        agree()
    if not run.read_only:
        run.path("stages", "redo.json").unlink(missing_ok=True)


def require_finished(run: Run, actions: Sequence[Action]) -> None:
    """Raise RunError for the first stage that would have to write into a directory that cannot be written."""
    for action in actions:
        if action.kind not in ("skip", "leave"):
            why = f" ({'; '.join(action.reasons)})" if action.reasons else ""
            raise RunError(
                f"{run.folder} cannot be written, and stage `{action.stage.name}` would have to run{why}",
                "make the folder writable, or copy it to a disk that is, and name that one",
            )


def _carry_out(action: Action, planner: Planner) -> None:
    """Skip a stage, or remove what it must not keep, run it and record it as finished."""
    stage, run, recipe = action.stage, planner.run, planner.recipe
    if action.kind == "skip":
        if not run.read_only:
            begun_path(run, stage).unlink(missing_ok=True)  # a kill right after the record leaves it
        run.say(f"{stage.name}: up to date")
        return
    why = f" ({'; '.join(action.reasons)})" if action.reasons else ""
    run.say(f"{stage.name}: {STARTING[action.kind]}{why}")
    parts = action.parts
    if action.kind == "mend":  # the stage makes only its damaged files again
        with faults_explained(run.folder):
            for name in run.damaged_artifacts(run.done(stage.name) or {"artifacts": {}}):
                run.path(name).unlink(missing_ok=True)
            run.done_path(stage.name).unlink(missing_ok=True)
    elif action.kind != "resume":  # files without a record are of unknown origin
        _remove_all(run, stage)
        parts = key_parts(stage, recipe, run, planner.contents)  # without a record, pins are read again
    if action.asked:
        planner.redo.started.append(stage.name)
        write_json(run.path("stages", "redo.json"), asdict(planner.redo))
    planner.contents.save()
    write_json(begun_path(run, stage), parts)
    started = time.time()
    for name, pattern in stage.inputs:
        if name != "teacher":  # whose shards are compared one at a time, when they are read
            run.verify(name, pattern)
    if stage.together:
        agree(stage.name)
    artifacts = stage.load()(recipe, run)
    run.finish(stage.name, digest(parts), parts, artifacts, started)
    begun_path(run, stage).unlink(missing_ok=True)
    run.say(f"{stage.name}: done in {duration(time.time() - started)}")


def _remove_all(run: Run, stage: Stage) -> None:
    """Remove everything that a stage has written, its records first."""
    with faults_explained(run.folder):
        run.done_path(stage.name).unlink(missing_ok=True)
        begun_path(run, stage).unlink(missing_ok=True)
        for name in stage.writes:
            path = run.path(name)
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def follow_main(recipe: Recipe, run: Run) -> None:
    """Take part in each stage that the main process announces, until it announces the end.

    Every process but the main one calls this. Raises RunError when another process has ended; its own message has the
    cause.
    """
    try:
        while (name := agree()) is not None:
            find_stage(name).load()(recipe, run)
    except RuntimeError as error:  # what gloo and NCCL raise when the other end of a connection is gone
        if not any(word in str(error) for word in ("onnection closed", "onnection reset", "NCCL", "remote process")):
            raise
        raise RunError("this process ends because another one did", "see the message of that process") from error

"""The plan of a run, and its execution, stage by stage, in one process or in several together.

For each stage, the plan says whether it is skipped, runs, resumes or is refused, and why. Planning changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from distill.data.traffic import PIN, BadLine, Sorted, begins_with, pin_of, read_lines
from distill.devices import agree, memory_explained, process_count
from distill.errors import DataError, DistillError, RecipeError, RunError, faults_explained
from distill.files import digest, has_form, link_file, read_json, reference_digest, require_inside, write_json
from distill.pipeline.figures import stage_figure
from distill.pipeline.stages import (
    LAST_TOGETHER,
    NAMES,
    STAGES,
    Parts,
    Stage,
    begun_path,
    consumers,
    difference,
    find_stage,
    key_parts,
    recorded_parts,
    require_part,
    value_of,
)
from distill.progress import duration, note, one_line_per_stage, show_passing, shows_stages
from distill.recipe import Recipe, load_recipe
from distill.recipe.recipe import left_out, not_run, of_older_version
from distill.run import BEGIN, TRAFFIC_FORM, Run

if TYPE_CHECKING:
    from distill.planning.hours import StageEstimate  # which loads torch

Kind = Literal["skip", "take", "run", "resume", "update", "redo", "mend", "wait", "refuse", "leave"]
WORDS: dict[Kind, tuple[str, str]] = {  # words in a plan, and words when the stage begins
    "skip": ("up to date", "up to date"),
    "take": ("would be taken over", "taken over"),
    "run": ("would run", "runs"),
    "resume": ("would resume", "resumes"),
    "update": ("would make its held-out files again", "makes its held-out files again"),
    "redo": ("would run again", "runs again"),
    "mend": ("would make its damaged files again", "makes its damaged files again"),
    "wait": ("depends on the result of", ""),
    "refuse": ("refused", ""),
    "leave": ("not run", ""),
}


@dataclass(frozen=True)
class Action:
    """One stage and its part in a run.

    skip: the stage is finished with the same key. take: run `source` has finished it with this key. run: it never ran.
    resume: it was interrupted. update: only parts of the key changed that `passing` names, and the stage makes what
    depends on them again. redo: it runs again, and its files are removed first. mend: it is finished with the same key,
    but files are damaged, and it makes these again. wait: the decision comes after the stages in `reasons` have run.
    refuse: it would replace precious work, and `error` has the message. leave: the recipe's run has no such stage.
    """

    stage: Stage
    kind: Kind
    reasons: tuple[str, ...] = ()
    parts: Parts = field(default_factory=dict)  # the key parts. Empty for redo on request, wait and refuse.
    asked: bool = False  # whether --redo asked for a redo
    error: RunError | None = None
    source: Run | None = None

    def line(self) -> str:
        """Return the line that `--dry-run` prints."""
        reasons = ", ".join(self.reasons)
        more: dict[Kind, str] = {"wait": f" {reasons}", "leave": f": {reasons}", "run": " (new)", "refuse": ""}
        return f"{self.stage.name}: {WORDS[self.kind][0]}{more.get(self.kind, self.why)}"

    @property
    def why(self) -> str:
        """The reasons in brackets, for a message."""
        return f" ({'; '.join(self.reasons)})" if self.reasons else ""


class Planner:
    """State that all planning decisions of one command share.

    `asked` are the stages that `--redo` names, including those of an interrupted command. `started` are the asked
    stages that have begun again.
    """

    def __init__(self, recipe: Recipe, run: Run, redo: Sequence[str] = ()) -> None:
        self.recipe, self.run = recipe, run
        path = run.path("stages", "redo.json")
        redone: dict[str, list[str]] = {"asked": [], "started": []}
        if path.exists():
            redone = read_json(path, {"asked": [str], "started": [str]})
        self.asked: list[str] = sorted({*redone["asked"], *redo})
        self.started: list[str] = redone["started"]

    def redo_due(self, stage: Stage) -> bool:
        """Whether --redo names a stage that has not begun again."""
        return stage.name in self.asked and stage.name not in self.started

    def plan(self, until: str | None = None) -> list[Action]:
        """Return an action for each stage up to `until`. A refusal ends the list."""
        require_part(self.recipe, [*([until] if until else []), *self.asked])
        last = NAMES.index(until) if until else len(STAGES) - 1
        absent = left_out(self.recipe)
        if older := self._of_older_version():
            return [Action(older, "refuse", error=RunError(*of_older_version(self.run.folder)))]
        actions: list[Action] = []
        for stage in STAGES[: last + 1]:
            if stage.name in absent:
                if stage.name in not_run(self.recipe):  # Stages that only some recipes have are not mentioned.
                    actions.append(Action(stage, "leave", (absent[stage.name],)))
                continue
            # A stage waits if one of its inputs has not been written yet.
            unsettled = {action.stage.name for action in actions if action.kind not in ("skip", "leave")}
            read = tuple(dict.fromkeys(name for name, _ in stage.inputs if name in unsettled))
            waits = read and not self.redo_due(stage)
            action = self._look_ahead(stage) or (Action(stage, "wait", read) if waits else self.decide(stage))
            actions.append(action)
            if action.kind == "refuse":
                break
        return actions

    def _of_older_version(self) -> Stage | None:
        """Return the first precious stage whose finished files have the format of an older version, or None."""
        for stage in STAGES:
            record = self.run.done(stage.name) if stage.precious else None
            version = None if record is None else record["inputs"].get("version")
            if isinstance(version, int) and version < stage.version:
                return stage
        return None

    def decide(self, stage: Stage) -> Action:
        """Return the action for a stage whose inputs are written."""
        if self.redo_due(stage):
            return Action(stage, "redo", ("requested by --redo",), asked=True)
        parts = key_parts(stage, self.recipe, self.run)
        record, old = self.run.done(stage.name), recorded_parts(self.run, stage)
        if record is not None and record["key"] == digest(parts):
            faults = tuple(self.run.damaged_artifacts(record).values())
            return Action(stage, ("mend" if stage.precious else "redo") if faults else "skip", faults, parts)
        if old is None:
            return self._made(stage, "run", (), parts)
        if record is None and old == parts:
            return Action(stage, "resume", (), parts)
        reasons = tuple(difference(old, parts))
        if self.has_work(stage) and stage.name not in consumers(self.asked):
            changed = [name for name in {*old, *parts} if old.get(name) != parts.get(name)]
            if all(name.startswith(stage.passing) for name in changed):
                return Action(stage, "update", reasons, parts)
            return self._refuse(stage, reasons)
        return self._made(stage, "redo", reasons, parts)

    def _made(self, stage: Stage, kind: Kind, reasons: tuple[str, ...], parts: Parts) -> Action:
        """Return the action for a stage that has to be made: `take` if another run has finished it with this key.

        Pinned state may differ. One of the two runs must belong to a sweep. Names of sweep runs contain `=`.
        """
        sweep = "*" if "=" in self.run.folder.name else "*=*"
        for path in sorted(self.run.folder.parent.glob(f"{sweep}/stages/{stage.name}.json")):
            sibling = Run(path.parent.parent, self.recipe)
            with contextlib.suppress(DataError):  # The record or a file may be damaged.
                record = sibling.done(stage.name) or {}
                pinned = {name: record["inputs"].get(name) for name, _ in stage.pins if name in parts}
                if digest(parts | pinned) == record["key"]:
                    sibling.verify(stage.name)
                    return Action(stage, "take", (f"from {sibling.folder.name}",), source=sibling)
        return Action(stage, kind, reasons, parts)

    def has_work(self, stage: Stage) -> bool:
        """Whether a stage is precious and has written files that would be lost."""
        places = [self.run.path(name) for name in stage.writes]
        return stage.precious and any(path.is_file() or (path.is_dir() and any(path.iterdir())) for path in places)

    def _look_ahead(self, stage: Stage) -> Action | None:
        """Return a refusal if the stage would replace precious work, its own or that of a consumer. Otherwise None.

        An input that has not been written yet cannot be compared and counts as unchanged.
        """
        allowed = consumers(self.asked)
        old = recorded_parts(self.run, stage)
        if stage.name in allowed or old is None:
            return None
        new = key_parts(stage, self.recipe, self.run)
        sides = {name: (old.get(name), new.get(name)) for name in {*old, *new}}
        changed = {name for name, (a, b) in sides.items() if a != b and not (":" in name and None in (a, b))}
        reasons = difference(*({name: side[name] for name in side if name in changed} for side in (old, new)))
        lasting = any(not name.startswith(stage.passing) for name in changed)
        if lasting and self.has_work(stage):
            return self._refuse(stage, reasons)
        dependent = consumers([stage.name]) - allowed
        dependents = [other.name for other in STAGES if other.name in dependent and self.has_work(other)]
        if dependents and lasting:
            return self._refuse(stage, reasons, f", and {', '.join(dependents)} depend on it")
        return None

    def _refuse(self, stage: Stage, reasons: Sequence[str], kept: str = "") -> Action:
        error = RunError(
            f"stage `{stage.name}` of {self.run.folder} was made with other settings{kept}:\n    "
            + "\n    ".join(reasons),
            f"keep it and use another run (name=…), or replace it (--redo {stage.name}), or move the whole run aside "
            "(--fresh)",
        )
        return Action(stage, "refuse", tuple(reasons), error=error)


def require_allowed(actions: Sequence[Action]) -> None:
    """Raise the RunError of a plan that would replace precious work."""
    for action in actions:
        if action.error is not None:
            raise action.error


# ── The plan carried out ──


def plan_run(recipe: Recipe, run: Run, until: str | None = None, redo: Sequence[str] = ()) -> list[Action]:
    """Return an action for each stage up to `until`. Changes nothing.

    `redo` names stages to run again, with their consumers. Raises RunError for a stage that does not exist.
    """
    return Planner(recipe, run, redo).plan(until)


def run_pipeline(
    recipe: Recipe,
    run: Run,
    until: str | None = None,
    redo: Sequence[str] = (),
    show: Callable[[str], None] = lambda stage: None,
    expected: Sequence[StageEstimate] = (),
) -> None:
    """Run every stage up to `until` that is not done. `redo` names stages to run again, with their consumers.

    `show` is called with the name of each stage as soon as its artifacts exist, so that its tables can be shown before
    later stages run. The `expected` estimates give the remaining time. Raises RunError, before anything changes, if
    finished or begun work of a precious stage would be replaced.
    """
    planner = Planner(recipe, run, redo)
    actions = planner.plan(until)
    require_allowed(actions)
    due = next((action for action in actions if action.kind not in ("skip", "leave")), None)
    if run.read_only and due is not None:
        hint = "make the folder writable, or copy it to a writable disk and name the copy"
        raise RunError(f"{run.folder} is not writable, but stage `{due.stage.name}` would have to run{due.why}", hint)
    names = [action.stage.name for action in actions if action.kind != "leave"]
    waiting = process_count() > 1  # The other processes are in follow_main.
    with one_line_per_stage():
        for action in actions:
            if waiting and NAMES.index(action.stage.name) > NAMES.index(LAST_TOGETHER):
                agree()  # It ends the other processes.
                waiting = False
            if action.kind == "leave":
                run.say(action.line())
                continue
            if action.kind == "wait":
                action = planner.decide(action.stage)
                require_allowed([action])
            with _run_named(run):
                _carry_out(action, planner, partial(_time_left, run, names, expected))
            show(action.stage.name)
    if waiting:
        agree()
    if not run.read_only:
        run.path("stages", "redo.json").unlink(missing_ok=True)


@contextlib.contextmanager
def _run_named(run: Run) -> Iterator[None]:
    """Complete the hints of a stage's errors: the stage knows no recipe file, so its command is inserted here."""
    try:
        yield
    except DistillError as error:
        if error.hint is not None:
            error.hint = error.hint.replace("distill train RECIPE", run.again())
        raise


def _time_left(run: Run, names: Sequence[str], expected: Sequence[StageEstimate]) -> str:
    """The time that the stages of these names have left, in words; empty if nothing is expected."""
    if not expected:
        return ""
    from distill.planning.hours import time_left

    records = {name: run.done(name) for name in names}
    return time_left(expected, {name: record["seconds"] if record else None for name, record in records.items()})


def _carry_out(action: Action, planner: Planner, time_left: Callable[[], str]) -> None:
    """Skip a stage, or remove the files that it must not keep, run it, and record it as finished."""
    stage, run, recipe = action.stage, planner.run, planner.recipe
    run.say(f"{stage.name}: {WORDS[action.kind][1]}{action.why}")
    if action.kind == "skip":
        _show_done(stage.name, "", "up to date")
        if not run.read_only:
            begun_path(run, stage).unlink(missing_ok=True)  # It remains if the process is killed after the record.
        return
    parts = action.parts
    if action.kind in ("run", "take") and planner.has_work(stage):
        _set_aside(run, stage)
    if action.source is not None:
        return _take_over(stage, run, action.source)
    if action.kind in ("mend", "update"):
        write_json(begun_path(run, stage), parts)  # It must exist before the record goes. A kill may happen between.
    if action.kind == "mend":  # The stage makes only its damaged files again.
        with faults_explained(run.folder):
            for name in run.damaged_artifacts(run.done(stage.name) or {"artifacts": {}}):
                place = run.path(name)
                if not place.parent.resolve().is_relative_to(run.folder.resolve()):
                    raise RunError(f"{place} is damaged, and a link leads to another folder", "remove the link")
                place.unlink(missing_ok=True)
            run.done_path(stage.name).unlink(missing_ok=True)
    elif action.kind in ("resume", "update"):
        _remove_cut_off(run, stage)
        run.done_path(stage.name).unlink(missing_ok=True)
    else:
        _remove_all(run, stage)
        parts = key_parts(stage, recipe, run)  # Without a record, pinned state is read again.
    if action.asked:
        planner.started.append(stage.name)
        write_json(run.path("stages", "redo.json"), {"asked": planner.asked, "started": planner.started})
    write_json(begun_path(run, stage), parts)
    _show_begun(stage.name, run, time_left())
    started = time.time()
    for name, pattern in stage.inputs:
        if name != "teacher":  # The teacher's shards are compared one at a time, when they are read.
            run.verify(name, pattern)
    with with_others():
        if stage.together:
            agree(stage.name)
        with memory_explained(_less_memory, stage.name, recipe):
            artifacts = stage.load()(recipe, run)
    run.finish(stage.name, digest(parts), parts, artifacts, started)
    begun_path(run, stage).unlink(missing_ok=True)
    took, figure = duration(time.time() - started), stage_figure(stage.name, run)
    run.say(f"{stage.name}: done in {took}: {figure}")
    _show_done(stage.name, took, figure)


def _show_begun(stage: str, run: Run, left: str) -> None:
    """Say how long the run has left, and show the stage on a terminal until its own line comes."""
    if left:
        run.say(f"  the whole run: {left}")
    if shows_stages():
        show_passing(f"  {stage}{', the whole run: ' if left else ''}{left}")


def _show_done(stage: str, took: str, figure: str) -> None:
    """Show the line of a finished stage, on a terminal that shows one line for each."""
    if shows_stages():
        note(f"✓ {stage:<10}{took:>7}  {figure}")


def _take_over(stage: Stage, run: Run, source: Run) -> None:
    """Link a stage's artifacts from another run into this run. The record is written last."""
    _remove_all(run, stage)
    record = source.done(stage.name) or {"artifacts": {}}
    for name in record["artifacts"]:
        link_file(source.path(name), run.path(name))
    if stage.name == "train":
        run.record(BEGIN)
        for line in source.metrics():
            run.record(line.pop("stage"), **line)
    write_json(run.done_path(stage.name), record)


def _less_memory(name: str, recipe: Recipe) -> tuple[str, str]:
    """Return the parts of a message about memory: the stage in which it ran out, and what the user can lower."""
    from distill.training.validation import smaller_target

    sizes = {"answers": recipe.answers.batch, "questions": recipe.answers.batch, "teacher": recipe.teacher.batch}
    key = "teacher.batch" if name == "teacher" else "answers.batch"
    hint = smaller_target(recipe) if recipe.target_runs_here else "free memory that other programs hold"
    return f"in stage {name}", f"lower {key} (now {sizes[name]}), or {hint}" if sizes.get(name, 1) > 1 else hint


def _remove_cut_off(run: Run, stage: Stage) -> None:
    """Remove truncated tensor files of an unfinished stage, so that the stage makes them again.

    There is no record with their checksums yet.
    """
    from safetensors import SafetensorError, safe_open

    for path in [file for name in stage.writes for file in sorted(run.path(name).rglob("*.safetensors"))]:
        try:
            with safe_open(path, "numpy"):
                pass
        except SafetensorError as error:
            run.say(f"  {path} is damaged ({error}) and is made again", warning=True)
            path.unlink()


def forget_begun(run: Run) -> None:
    """Remove the files of stages that were killed, so that the stages begin again."""
    for stage in STAGES:
        if begun_path(run, stage).exists() and run.done(stage.name) is None:
            _remove_all(run, stage)


def _set_aside(run: Run, stage: Stage) -> None:
    """Rename the files of a stage that has no record and no begun record, as in a run copied without stages/.

    Their origin is unknown, and they may have taken hours.
    """
    with faults_explained(run.folder):
        for name in stage.writes:
            if not run.path(name).exists():
                continue
            number = 1
            while run.path(f"{name}.unrecorded-{number}").exists():
                number += 1
            aside = run.path(f"{name}.unrecorded-{number}")
            run.path(name).rename(aside)
            run.say(f"  {name} has no record in stages/: it is kept as {aside} and made again", warning=True)


def _remove_all(run: Run, stage: Stage) -> None:
    """Remove everything that a stage has written, and its records.

    Files get a hidden name first. If the process is killed, the rest is then not taken for work without a record.
    """
    with faults_explained(run.folder):
        hidden = []
        for name in stage.writes:
            path = run.path(name)
            hidden.append(path.with_name(f".{path.name}.removed"))
            if path.exists():
                _remove(hidden[-1])
                path.rename(hidden[-1])
        run.done_path(stage.name).unlink(missing_ok=True)
        begun_path(run, stage).unlink(missing_ok=True)
        for path in hidden:
            _remove(path)


def _remove(path: Path) -> None:
    """Remove a file or a folder if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def with_others() -> Iterator[None]:
    """Turn the error of gloo or NCCL after another process has ended into a RunError. The other error is the cause."""
    try:
        yield
    except RuntimeError as error:
        words = ("onnection closed", "onnection reset", "NCCL", "remote process")
        if process_count() == 1 or not any(word in str(error) for word in words):
            raise
        raise RunError(
            "this process stopped because another process of the command stopped", "see the message of that process"
        ) from error


def follow_main(recipe: Recipe, run: Run) -> None:
    """Take part in each stage that the main process announces, until it announces the end.

    Every process except the main one calls this. Raises RunError if another process has ended.
    """
    with with_others():
        while (name := agree()) is not None:
            find_stage(name).load()(recipe, run)


# ── `--refresh`: moves a finished run aside and starts a run of the same name from its draft ──


def _prepared(folder: Path) -> Path:
    """Return the folder of the new run before the old run is moved."""
    return folder.with_name(f".{folder.name}.refresh")


def finish_refresh(folder: Path) -> None:
    """Finish a refresh that was killed between its two renames. Otherwise do nothing."""
    prepared = _prepared(folder)
    if folder.exists() or not (prepared / "parent.json").exists():
        return
    aside = read_json(prepared / "parent.json", {"run": str})["run"]
    require_inside(aside, prepared / "parent.json", single=True)
    if folder.with_name(aside).exists():
        with faults_explained(folder):
            os.replace(prepared, folder)


def plan_refresh(recipe: Recipe, run: Run) -> dict[str, Any]:
    """Return the parent.json of a run that starts from the draft of `run`. Changes nothing.

    It has the generation, the next name of `run`, its train.rate, the files of its draft, and the part of the traffic
    file that it read. Raises RecipeError or RunError if there is nothing to learn (same target, no new traffic), if the
    cuts differ, if the run is unfinished, or if a traffic file was rotated.
    """
    settings = recipe.answers.traffic
    if recipe.train.sparsity is not None and recipe.train.sparsity.mlp_width is not None:
        raise RecipeError("--refresh makes no cuts, but train.sparsity does", "add train.sparsity=null")
    record = run.done("train")
    if record is None or run.damaged_artifacts(record):
        raise RunError(
            f"{run.folder} has no finished draft to start from", "finish it: run the command without --refresh"
        )
    old = load_recipe(run.path("config.yaml"))
    stage = find_stage("cut")
    if value_of(old, "cut", stage.ignores) != key_parts(stage, recipe, run)["cut"]:
        hint = "restore the section, or use another run (name=…)"
        raise RecipeError(f"section cut differs from that of {run.folder}, but --refresh makes no cuts", hint)
    read = (run.done("answers") or {"inputs": {}})["inputs"].get(PIN)
    if read is not None and not has_form(read, TRAFFIC_FORM):
        raise DataError(f"{run.done_path('answers')} is damaged: {PIN} has a wrong form", "copy the run again")
    asked = (run.done("answers") or {"inputs": {}})["inputs"].get("target.model")
    unchanged = asked == reference_digest(recipe.target.model)  # A changed target has new answers to learn.
    writer = recipe.answers.writer
    served = writer is not None and bool(writer.urls)  # Only the servers know whether its weights changed.
    if settings is None and unchanged and not served:
        hint = "tune the target, or set answers.traffic to a file with new lines (docs/recipes.md)"
        raise RecipeError("--refresh finds nothing new: the target is the same, and there is no traffic", hint)
    if settings is not None and (unchanged or recipe.answers.prompts == 0):
        require_growth(Path(settings), read)
    before = run.parent()
    number = 1
    while run.folder.with_name(f"{run.folder.name}.{number}").exists():
        number += 1
    return {
        "generation": (before["generation"] if before else 1) + 1,
        "run": f"{run.folder.name}.{number}",
        "digest": record["digest"],
        "rate": old.train.rate,
        "files": {
            name.removeprefix("draft/"): entry["sha256"]
            for name, entry in record["artifacts"].items()
            if name.startswith("draft/")
        },
        "traffic": read,
    }


def require_growth(path: Path, read: dict[str, Any] | None) -> None:
    """Raise RunError if a file was rotated since it was read, or has no usable line after the lines that were read."""
    now = pin_of(path, read)
    known = {part["path"]: part for part in read["parts"]} if read else {}
    for part in now[
        "parts"
    ]:  # A missing file of a folder was read completely. A file that was not there before is new.
        before = known.get(part["path"])
        if before is not None and not begins_with(Path(part["path"]), before):
            raise RunError(
                f"{part['path']} no longer begins with the {before['lines']} lines that were read from it; "
                "perhaps it was rotated",
                "put the new lines into a separate file: answers.traffic=…",
            )
    sorted_lines = Sorted()
    for line in read_lines(now):
        if not isinstance(line, BadLine):
            return
        sorted_lines.leave_out(line.place, line.reason)
    if not sorted_lines.bad:
        raise RunError(f"{path} has no new line after line {now['start_line']}", "refresh when it has new lines")
    total, reason = sum(count for count, _ in sorted_lines.bad.values()), next(iter(sorted_lines.bad))
    raise RunError(f"all {total} new lines of {path} are bad, first {sorted_lines.bad[reason][1]}: {reason}")


def start_refresh(run: Run, parent: dict[str, Any]) -> Path:
    """Move a run aside and put a new run in its place that starts from its draft. Return the old run's new folder."""
    prepared, aside = _prepared(run.folder), run.folder.with_name(parent["run"])
    with faults_explained(run.folder), run.locked():
        if prepared.exists():
            shutil.rmtree(prepared)
        prepared.mkdir()
        write_json(prepared / "parent.json", parent)
        os.replace(run.folder, aside)
        os.replace(prepared, run.folder)
    return aside

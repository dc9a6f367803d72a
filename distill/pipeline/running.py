"""The plan of a run: for each stage, whether it is skipped, runs, resumes or is refused, and why; and what carries the
plan out, stage by stage, in one process or in several together.

Planning changes nothing.
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
)
from distill.progress import duration
from distill.recipe import Recipe, load_recipe
from distill.recipe.recipe import left_out, not_run, of_older_version
from distill.run import BEGIN, READ, Run

if TYPE_CHECKING:
    from distill.planning.hours import StageEstimate  # which loads torch

Kind = Literal["skip", "take", "run", "resume", "update", "redo", "mend", "wait", "refuse", "leave"]
WORDS: dict[Kind, tuple[str, str]] = {  # of an action in a plan, and as it begins
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

    skip: finished with the same key. take: so it is in the run `source`. run: never ran. resume: interrupted. update:
    only parts of the key that `passing` names have changed; the stage makes anew what depends on them. redo: it runs
    again, its files removed first.
    mend: finished with the same key, but files are damaged; it makes those again. wait: decided after the stages in
    `reasons` have run. refuse: it would supersede precious work; `error` has the message. leave: the recipe's run has
    no such stage.
    """

    stage: Stage
    kind: Kind
    reasons: tuple[str, ...] = ()
    parts: Parts = field(default_factory=dict)  # the key parts; empty for redo on request, wait and refuse
    asked: bool = False  # for redo: with --redo
    error: RunError | None = None
    source: Run | None = None

    def line(self) -> str:
        """The line that `--dry-run` prints."""
        reasons = ", ".join(self.reasons)
        more: dict[Kind, str] = {"wait": f" {reasons}", "leave": f": {reasons}", "run": " (new)", "refuse": ""}
        return f"{self.stage.name}: {WORDS[self.kind][0]}{more.get(self.kind, self.why)}"

    @property
    def why(self) -> str:
        """The reasons in brackets, for a message."""
        return f" ({'; '.join(self.reasons)})" if self.reasons else ""


class Planner:
    """What the decisions about one command share.

    `asked` are the stages that `--redo` names, those of an interrupted command included; `started` of them have begun
    again.
    """

    def __init__(self, recipe: Recipe, run: Run, redo: Sequence[str] = ()) -> None:
        self.recipe, self.run = recipe, run
        path = run.path("stages", "redo.json")
        found = read_json(path, {"asked": [str], "started": [str]}) if path.exists() else {"asked": [], "started": []}
        self.asked: list[str] = sorted({*found["asked"], *redo})
        self.started: list[str] = found["started"]

    def redo_due(self, stage: Stage) -> bool:
        """Whether --redo names a stage that has not begun again."""
        return stage.name in self.asked and stage.name not in self.started

    def plan(self, until: str | None = None) -> list[Action]:
        """An action for each stage up to `until`; a refusal is the last."""
        require_part(self.recipe, [*([until] if until else []), *self.asked])
        last = NAMES.index(until) if until else len(STAGES) - 1
        absent = left_out(self.recipe)
        if older := self._of_older_version():
            return [Action(older, "refuse", error=RunError(*of_older_version(self.run.folder)))]
        actions: list[Action] = []
        for stage in STAGES[: last + 1]:
            if stage.name in absent:
                if stage.name in not_run(self.recipe):  # a run that has all usual stages need not hear of others
                    actions.append(Action(stage, "leave", (absent[stage.name],)))
                continue
            # A stage waits where one that it reads from has yet to write.
            unsettled = {action.stage.name for action in actions if action.kind not in ("skip", "leave")}
            read = tuple(dict.fromkeys(name for name, _ in stage.inputs if name in unsettled))
            waits = read and not self.redo_due(stage)
            action = self._look_ahead(stage) or (Action(stage, "wait", read) if waits else self.decide(stage))
            actions.append(action)
            if action.kind == "refuse":
                break
        return actions

    def _of_older_version(self) -> Stage | None:
        """The first precious stage whose finished files have the form of an older version; None without one."""
        for stage in STAGES:
            record = self.run.done(stage.name) if stage.precious else None
            version = None if record is None else record["inputs"].get("version")
            if isinstance(version, int) and version < stage.version:
                return stage
        return None

    def decide(self, stage: Stage) -> Action:
        """The action for a stage whose inputs are written."""
        if self.redo_due(stage):
            return Action(stage, "redo", ("asked for with --redo",), asked=True)
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
        """The action that makes a stage's files anew: taken over where a run beside has finished it with this key, or
        with another state of what it pins, and one of the two is of a sweep, as names with `=` are."""
        sweep = "*" if "=" in self.run.folder.name else "*=*"
        for path in sorted(self.run.folder.parent.glob(f"{sweep}/stages/{stage.name}.json")):
            brother = Run(path.parent.parent, self.recipe)
            with contextlib.suppress(DataError):  # of a damaged record or file
                record = brother.done(stage.name) or {}
                pinned = {name: record["inputs"].get(name) for name, _ in stage.pins if name in parts}
                if digest(parts | pinned) == record["key"]:
                    brother.verify(stage.name)
                    return Action(stage, "take", (f"from {brother.folder.name}",), source=brother)
        return Action(stage, kind, reasons, parts)

    def has_work(self, stage: Stage) -> bool:
        """Whether a stage is precious and has written something that would be lost."""
        places = [self.run.path(name) for name in stage.writes]
        return stage.precious and any(path.is_file() or (path.is_dir() and any(path.iterdir())) for path in places)

    def _look_ahead(self, stage: Stage) -> Action | None:
        """The refusal of a stage that would supersede precious work, its own or that of a consumer; else None.

        An input that has yet to be written cannot be compared and counts as unchanged.
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
        resting = consumers([stage.name]) - allowed
        rests = [other.name for other in STAGES if other.name in resting and self.has_work(other)]
        if rests and lasting:
            return self._refuse(stage, reasons, f", and {', '.join(rests)} rest on it")
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
    """Raise the RunError of a plan that would supersede precious work."""
    for action in actions:
        if action.error is not None:
            raise action.error


# ── the plan carried out ──


def plan_run(recipe: Recipe, run: Run, until: str | None = None, redo: Sequence[str] = ()) -> list[Action]:
    """An action for each stage up to `until`; changes nothing.

    Raises RunError for a stage that does not exist. `redo` names stages to run again with their consumers.
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
    """Run every stage up to `until` that is not done; `redo` names stages to run again with their consumers.

    `show` is called with the name of each stage as soon as its artifacts are there, so that its tables need not wait
    for the stages after it. By what is `expected` the run says how long it has left. Raises RunError, before touching
    anything, when finished or begun work of a precious stage would be superseded.
    """
    planner = Planner(recipe, run, redo)
    actions = planner.plan(until)
    require_allowed(actions)
    due = next((action for action in actions if action.kind not in ("skip", "leave")), None)
    if run.read_only and due is not None:
        hint = "make the folder writable, or copy it to a disk that is, and name that one"
        raise RunError(f"{run.folder} cannot be written, and stage `{due.stage.name}` would have to run{due.why}", hint)
    if not run.silent:
        from distill.report.card import draw_progress

        names = [action.stage.name for action in actions if action.kind != "leave"]
        run.redraw = partial(draw_progress, run, names, expected)
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
        with _run_named(run):
            _carry_out(action, planner)
        show(action.stage.name)
    if waiting:
        agree()
    if due is not None and actions[-1].stage.name != NAMES[-1]:
        run.redraw()
    if not run.read_only:
        run.path("stages", "redo.json").unlink(missing_ok=True)


@contextlib.contextmanager
def _run_named(run: Run) -> Iterator[None]:
    """Give the errors of a stage, which knows no recipe file, a command that can be copied."""
    try:
        yield
    except DistillError as error:
        if error.hint is not None:
            error.hint = error.hint.replace("distill train RECIPE", run.again())
        raise


def _carry_out(action: Action, planner: Planner) -> None:
    """Skip a stage, or remove what it must not keep, run it and record it as finished."""
    stage, run, recipe = action.stage, planner.run, planner.recipe
    run.say(f"{stage.name}: {WORDS[action.kind][1]}{action.why}")
    if action.kind == "skip":
        if not run.read_only:
            begun_path(run, stage).unlink(missing_ok=True)  # a kill right after the record leaves it
        return
    parts = action.parts
    if action.kind in ("run", "take") and planner.has_work(stage):
        _set_aside(run, stage)
    if action.source is not None:
        return _take_over(stage, run, action.source)
    if action.kind in ("mend", "update"):
        write_json(begun_path(run, stage), parts)  # before the record goes, so that a kill leaves no files without one
    if action.kind == "mend":  # the stage makes only its damaged files again
        with faults_explained(run.folder):
            for name in run.damaged_artifacts(run.done(stage.name) or {"artifacts": {}}):
                place = run.path(name)
                if not place.parent.resolve().is_relative_to(run.folder.resolve()):
                    raise RunError(f"{place} is damaged, and by a link in another folder", "remove the link")
                place.unlink(missing_ok=True)
            run.done_path(stage.name).unlink(missing_ok=True)
    elif action.kind in ("resume", "update"):
        _remove_cut_off(run, stage)
        run.done_path(stage.name).unlink(missing_ok=True)
    else:
        _remove_all(run, stage)
        parts = key_parts(stage, recipe, run)  # without a record, pins are read again
    if action.asked:
        planner.started.append(stage.name)
        write_json(run.path("stages", "redo.json"), {"asked": planner.asked, "started": planner.started})
    write_json(begun_path(run, stage), parts)
    if stage.name != NAMES[-1] and (left := run.redraw()):  # the last writes the page of the finished run
        run.say(f"  the whole run: {left}")
    started = time.time()
    for name, pattern in stage.inputs:
        if name != "teacher":  # whose shards are compared one at a time, when they are read
            run.verify(name, pattern)
    with with_others():
        if stage.together:
            agree(stage.name)
        with memory_explained(_less_memory, stage.name, recipe):
            artifacts = stage.load()(recipe, run)
    run.finish(stage.name, digest(parts), parts, artifacts, started)
    begun_path(run, stage).unlink(missing_ok=True)
    run.say(f"{stage.name}: done in {duration(time.time() - started)}")


def _take_over(stage: Stage, run: Run, source: Run) -> None:
    """Give this run what another has made in a stage, under names of its own and with the record, last of all."""
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
    """The parts of a message about memory: the stage in which it ran out, and what the user can lower."""
    from distill.training.validation import smaller_target

    sizes = {"answers": recipe.answers.batch, "questions": recipe.answers.batch, "teacher": recipe.teacher.batch}
    key = "teacher.batch" if name == "teacher" else "answers.batch"
    hint = smaller_target(recipe) if recipe.target_runs_here else "free memory that other programs hold"
    return f"in stage {name}", f"lower {key} (now {sizes[name]}), or {hint}" if sizes.get(name, 1) > 1 else hint


def _remove_cut_off(run: Run, stage: Stage) -> None:
    """Remove tensor files of an unfinished stage that a disk's fault has cut off, so that it makes them again: its
    record, with their checksums, has yet to be written."""
    from safetensors import SafetensorError, safe_open

    for path in [file for name in stage.writes for file in sorted(run.path(name).rglob("*.safetensors"))]:
        try:
            with safe_open(path, "numpy"):
                pass
        except SafetensorError as error:
            run.say(f"  {path} is damaged ({error}) and is made again", warning=True)
            path.unlink()


def forget_begun(run: Run) -> None:
    """Remove what stages that were killed have written, so that they begin anew."""
    for stage in STAGES:
        if begun_path(run, stage).exists() and run.done(stage.name) is None:
            _remove_all(run, stage)


def _set_aside(run: Run, stage: Stage) -> None:
    """Rename finished or begun work of a stage that has neither a record nor a begun one, as in a run that was copied
    without stages/: its origin is not known, and it may have taken hours."""
    with faults_explained(run.folder):
        for name in stage.writes:
            if not run.path(name).exists():
                continue
            number = 1
            while run.path(f"{name}.unrecorded-{number}").exists():
                number += 1
            aside = run.path(f"{name}.unrecorded-{number}")
            run.path(name).rename(aside)
            run.say(f"  {name} has no record in stages/: it is kept as {aside}, and made anew", warning=True)


def _remove_all(run: Run, stage: Stage) -> None:
    """Remove everything that a stage has written, and its records.

    Files get a hidden name first: what a kill leaves of them is not taken for work without a record.
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
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def with_others() -> Iterator[None]:
    """Turn what gloo and NCCL raise when another process of the command has ended into a RunError: its words count."""
    try:
        yield
    except RuntimeError as error:
        words = ("onnection closed", "onnection reset", "NCCL", "remote process")
        if process_count() == 1 or not any(word in str(error) for word in words):
            raise
        raise RunError("this process ends because another one did", "see the message of that process") from error


def follow_main(recipe: Recipe, run: Run) -> None:
    """Take part in each stage that the main process announces, until it announces the end.

    Every process but the main one calls this. Raises RunError when another process has ended.
    """
    with with_others():
        while (name := agree()) is not None:
            find_stage(name).load()(recipe, run)


# ── `--refresh`: moves a finished run aside and starts a run of its name from its draft ──


def _prepared(folder: Path) -> Path:
    """Folder of the new run until the old one has been moved."""
    return folder.with_name(f".{folder.name}.refresh")


def finish_refresh(folder: Path) -> None:
    """Finish a refresh that was killed between its two renames; do nothing otherwise."""
    prepared = _prepared(folder)
    if folder.exists() or not (prepared / "parent.json").exists():
        return
    aside = read_json(prepared / "parent.json", {"run": str})["run"]
    require_inside(aside, prepared / "parent.json", single=True)
    if folder.with_name(aside).exists():
        with faults_explained(folder):
            os.replace(prepared, folder)


def plan_refresh(recipe: Recipe, run: Run) -> dict[str, Any]:
    """The parent.json of a run that starts from the draft of `run`; changes nothing.

    It holds the generation, the next name of `run`, its train.rate, the files of its draft and the part of the traffic
    file that it read. Raises RecipeError or RunError for a recipe of which neither the target has changed nor the
    traffic grown, or with other cuts, an unfinished run and a rotated file.
    """
    settings = recipe.answers.traffic
    if recipe.train.sparsity is not None and recipe.train.sparsity.mlp_width is not None:
        raise RecipeError("--refresh makes no cuts, but train.sparsity does", "add train.sparsity=null")
    record = run.done("train")
    if record is None or run.damaged_artifacts(record):
        raise RunError(f"{run.folder} has no finished draft to start from", "finish it: the command without --refresh")
    old = load_recipe(run.path("config.yaml"))
    if old.cut != recipe.cut:
        hint = "restore the section, or use another run (name=…)"
        raise RecipeError(f"section cut differs from that of {run.folder}, and --refresh makes no cuts", hint)
    read = (run.done("answers") or {"inputs": {}})["inputs"].get(PIN)
    if read is not None and not has_form(read, READ):
        raise DataError(f"{run.done_path('answers')} is damaged: {PIN} is of another kind", "copy the run again")
    asked = (run.done("answers") or {"inputs": {}})["inputs"].get("target.model")
    if asked == reference_digest(recipe.target.model):  # else its new answers are what there is to learn
        if settings is None:
            hint = "tune the target, or set answers.traffic, a file with new lines (docs/recipes.md)"
            raise RecipeError("--refresh finds nothing new: the target is the same, and there is no traffic", hint)
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
    """Raise RunError when a file was rotated since it was read, or has no usable line after those that were read."""
    now = pin_of(path, read)
    known = {part["path"]: part for part in read["parts"]} if read else {}
    for part in now["parts"]:  # a file of a folder that is gone has been read; another file than before is new
        before = known.get(part["path"])
        if before is not None and not begins_with(Path(part["path"]), before):
            raise RunError(
                f"{part['path']} no longer begins with the {before['lines']} lines that were read from it; "
                "was it rotated?",
                "put the new lines into their own file: answers.traffic=…",
            )
    found = Sorted()
    for line in read_lines(now):
        if not isinstance(line, BadLine):
            return
        found.leave_out(line.place, line.reason)
    if not found.bad:
        raise RunError(f"{path} has no new line after line {now['start_line']}", "refresh when it has new lines")
    count, reason = sum(one for one, _ in found.bad.values()), next(iter(found.bad))
    raise RunError(f"all {count} new lines of {path} are bad, first {found.bad[reason][1]}: {reason}")


def start_refresh(run: Run, parent: dict[str, Any]) -> Path:
    """Move a run aside and put a new one in its place, which starts from its draft; returns the folder of the old."""
    prepared, aside = _prepared(run.folder), run.folder.with_name(parent["run"])
    with faults_explained(run.folder), run.locked():
        if prepared.exists():
            shutil.rmtree(prepared)
        prepared.mkdir()
        write_json(prepared / "parent.json", parent)
        os.replace(run.folder, aside)
        os.replace(prepared, run.folder)
    return aside

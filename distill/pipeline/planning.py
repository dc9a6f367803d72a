"""The plan of a run: for each stage, whether it is skipped, runs, resumes or is refused, and why. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from distill.errors import RunError
from distill.files import digest, read_json
from distill.pipeline.keys import Contents, Parts, begun_path, difference, key_parts, recorded_parts
from distill.pipeline.stages import NAMES, STAGES, Stage, consumers, require_part
from distill.recipe import Recipe
from distill.recipe.recipe import left_out, not_run
from distill.run import Run

Kind = Literal["skip", "run", "resume", "redo", "mend", "wait", "refuse", "leave"]
PLANNED: dict[Kind, str] = {
    "skip": "up to date",
    "run": "would run",
    "resume": "would resume",
    "redo": "would run again",
    "mend": "would make its damaged files again",
    "wait": "depends on the result of",
    "refuse": "refused",
    "leave": "not run",
}


@dataclass(frozen=True)
class Action:
    """One stage and its part in a run.

    skip: finished with the same key. run: never ran. resume: interrupted. redo: it runs again, its files removed first.
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

    def line(self) -> str:
        """The line that `--dry-run` prints."""
        if self.kind == "wait":
            return f"{self.stage.name}: {PLANNED[self.kind]} {', '.join(self.reasons)}"
        if self.kind == "leave":
            return f"{self.stage.name}: {PLANNED[self.kind]}: {self.reasons[0]}"
        reasons = ("new",) if self.kind == "run" else () if self.kind == "refuse" else self.reasons
        return f"{self.stage.name}: {PLANNED[self.kind]}" + (f" ({'; '.join(reasons)})" if reasons else "")


@dataclass
class Redo:
    """The stages that `--redo` names, those of an interrupted command included; `started` of them have begun again."""

    asked: list[str]
    started: list[str]

    @classmethod
    def read(cls, run: Run, more: Sequence[str] = ()) -> Redo:
        """Those that stages/redo.json remembers, and `more`."""
        path = run.path("stages", "redo.json")
        found = read_json(path, {"asked": [str], "started": [str]}) if path.exists() else {"asked": [], "started": []}
        return cls(sorted({*found["asked"], *more}), found["started"])

    def due(self, stage: Stage) -> bool:
        """Whether --redo names a stage that has not begun again."""
        return stage.name in self.asked and stage.name not in self.started


@dataclass
class Planner:
    """What the decisions about one command share."""

    recipe: Recipe
    run: Run
    redo: Redo
    contents: Contents = field(init=False)

    def __post_init__(self) -> None:
        self.contents = Contents(self.run)

    def plan(self, until: str | None = None) -> list[Action]:
        """An action for each stage up to `until`; a refusal is the last."""
        require_part(self.recipe, [*([until] if until else []), *self.redo.asked])
        last = NAMES.index(until) if until else len(STAGES) - 1
        absent = left_out(self.recipe)
        actions: list[Action] = []
        for stage in STAGES[: last + 1]:
            if stage.name in absent:
                if stage.name in not_run(self.recipe):  # a run that has all usual stages need not hear of others
                    actions.append(Action(stage, "leave", (absent[stage.name],)))
                continue
            action = self._look_ahead(stage) or self._decide_or_wait(stage, actions)
            actions.append(action)
            if action.kind == "refuse":
                break
        return actions

    def decide(self, stage: Stage) -> Action:
        """The action for a stage whose inputs are written."""
        if self.redo.due(stage):
            return Action(stage, "redo", ("asked for with --redo",), asked=True)
        parts = key_parts(stage, self.recipe, self.run, self.contents)
        record, begun = self.run.done(stage.name), begun_path(self.run, stage)
        if record is not None and record["key"] == digest(parts):
            faults = tuple(self.run.damaged_artifacts(record).values())
            return Action(stage, ("mend" if stage.precious else "redo") if faults else "skip", faults, parts)
        if record is None and not begun.exists():
            return Action(stage, "run", (), parts)
        old = record["inputs"] if record is not None else read_json(begun, {})
        if record is None and old == parts:
            return Action(stage, "resume", (), parts)
        reasons = tuple(difference(old, parts, self.contents))
        if stage.precious and stage.name not in consumers(self.redo.asked):
            return self._refuse(stage, reasons)
        return Action(stage, "redo", reasons, parts)

    def _decide_or_wait(self, stage: Stage, before: Sequence[Action]) -> Action:
        """The action for a stage, or `wait` where a stage that it reads from has yet to write."""
        unsettled = {action.stage.name for action in before if action.kind not in ("skip", "leave")}
        read = tuple(dict.fromkeys(name for name, _ in stage.inputs if name in unsettled))
        return Action(stage, "wait", read) if read and not self.redo.due(stage) else self.decide(stage)

    def _look_ahead(self, stage: Stage) -> Action | None:
        """The refusal of a stage that would supersede precious work, its own or that of a consumer; else None.

        An input that has yet to be written cannot be compared and counts as unchanged.
        """
        allowed = consumers(self.redo.asked)
        old = recorded_parts(self.run, stage)
        if stage.name in allowed or old is None:
            return None
        new = key_parts(stage, self.recipe, self.run, self.contents)
        changed = {
            name
            for name in {*old, *new}
            if old.get(name) != new.get(name) and not (":" in name and None in (old.get(name), new.get(name)))
        }
        before, after = ({name: value for name, value in parts.items() if name in changed} for parts in (old, new))
        reasons = difference(before, after, self.contents)
        if stage.precious and changed:
            return self._refuse(stage, reasons)
        rests = [
            other.name
            for other in STAGES
            if other.precious
            and other.name in consumers([stage.name])
            and other.name not in allowed
            and recorded_parts(self.run, other) is not None
        ]
        if rests and any(not name.startswith(stage.passing) for name in changed):
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

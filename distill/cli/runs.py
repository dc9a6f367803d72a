"""`distill train` runs every stage of a recipe; `distill runs` lists the runs and `distill cache` what is remembered;
`distill report` makes the page of a run, or shows several side by side; `distill schema`: the form of `-o json`."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from distill.cli import shared
from distill.devices import is_main, process_count
from distill.errors import DataError, DistillError, RecipeError, RunError, disk_fault, faults_explained
from distill.files import CacheKind, cache_folder, copy_file, read_result, read_utf8, require_new_folder, write_text
from distill.pipeline.stages import NAMES, find_stage
from distill.progress import announce, note, warn
from distill.recipe import Recipe, load_recipe
from distill.recipe.corpus import SourceKind
from distill.recipe.recipe import QUESTIONS, left_out
from distill.recipe.training import LossName
from distill.run import Run, now
from distill.tables import Cell, Columns, Row, Table, table_of

if TYPE_CHECKING:
    from distill.planning.hours import StageEstimate  # which loads torch

# ── `distill train` ──

OVERRIDES = (
    f"Override recipe keys: train.loss ({shared.values(LossName)}), corpus.sources.0.kind "
    f"({shared.values(SourceKind)}) and others; `distill schema recipe` and docs/recipes.md list all."
)


def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="a.b=c", help=OVERRIDES)] = None,
    runs: shared.RunsOption = shared.DEFAULT_RUNS,
    until: Annotated[str | None, typer.Option(help=f"Stop after this stage: {shared.values(NAMES)}.")] = None,
    redo: Annotated[list[str] | None, typer.Option(help="Run this stage again, and those that depend on it.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew; an old run of this name is moved aside.")] = False,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Continue from a finished run's draft, on new lines of its served logs.")
    ] = False,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V1,V2,...", help="A run for each value of this key; repeatable: each combination."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Sweep over more than 12 runs.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print which stages would run, and why.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read finished files whole; those that are damaged are made again.")
    ] = False,
    rehearsal: Annotated[
        bool, typer.Option("--rehearse", help="Stages on 4 prompts and 3 steps, as NAME-rehearsal; estimates the run.")
    ] = False,
) -> None:
    """Run every stage of a recipe, from corpus to report.

    Finished stages are skipped. After an interruption the same command resumes.
    """
    from distill.pipeline import running

    if sweep:
        if rehearsal or redo or fresh or refresh or verify:
            raise RecipeError("--sweep makes whole runs", "leave --rehearse, --redo, --fresh and others out")
        return _sweep(recipe, overrides or [], sweep, runs, until, yes, dry_run)
    if rehearsal and (redo or fresh or refresh or dry_run or verify):
        raise RecipeError("--rehearse runs stages, shortened, and nothing else", "leave out all but --until")
    if refresh and (redo or fresh or dry_run):
        raise RecipeError("--refresh starts a new run from a finished one", "leave --redo, --fresh and others out")
    begun = None if fresh else runs / load_recipe(recipe, overrides or []).name / "config.yaml"
    found = whole = shared.read_recipe(recipe, overrides or [], begun)
    if rehearsal:
        from distill.pipeline.preflight import shortened

        found = shortened(whole, runs)
    _require_reached(until, redo or ())
    folder = runs / found.name
    if not is_main():
        return None if dry_run else _make(Run(folder, found, silent=True), "", until)
    if rehearsal:
        _rehearse(whole, found, Run(folder, found), until)
        return
    run = Run(folder, found, whole=verify)
    running.finish_refresh(folder)  # one that was killed
    parent = running.plan_refresh(found, run) if refresh else None
    # --fresh begins in an empty folder.
    planned = Run(folder.with_name(f".{folder.name}.fresh"), found) if fresh else run
    plan = [] if parent is not None else running.plan_run(found, planned, until, redo or ())
    if dry_run:
        for action in plan:
            run.say(action.line())
    running.require_allowed(plan)
    if dry_run:
        return
    # Before the run folder is touched: a cut that cannot be made must not cost the answers.
    text = read_utf8(recipe)  # which may be the config.yaml of a run that is moved
    expected = _check(found, planned, until)
    if fresh:
        _move_aside(run)
    if parent is not None:
        print(f"the old run is now {running.start_refresh(run, parent)}", file=sys.stderr)
    _make(run, text, until, redo or (), expected)


def _require_reached(until: str | None, redo: Sequence[str]) -> None:
    """Raise an error for stages that do not exist, or that --until leaves out."""
    for name in [*([until] if until else []), *redo]:
        find_stage(name)
        if until and NAMES.index(name) > NAMES.index(until):
            raise RecipeError(f"--redo {name} does nothing: --until {until} ends before it", "leave one of them out")


def _make(
    run: Run, text: str, until: str | None, redo: Sequence[str] = (), expected: Sequence[StageEstimate] = ()
) -> None:
    """Carry a run out up to a stage, printing its tables as they come; in all processes but the main one, take part."""
    from distill.pipeline import running

    shared.prepare(run.recipe.threads)
    if not is_main():  # one of several that `accelerate launch` started
        return running.follow_main(run.recipe, run)
    with closing(run):
        run.open(text)
        running.run_pipeline(run.recipe, run, until, redo, partial(_print_stage, run.folder), expected)
        say_outcome(run)
        require_passed(run, until)


def _sweep(
    path: Path, overrides: list[str], options: list[str], runs: Path, until: str | None, yes: bool, dry_run: bool
) -> None:
    """Make a run of each combination, one after the other, and show them side by side. RunError at the end for those
    that failed, which the others did not wait for."""
    from distill.pipeline import running, sweep

    name, every = load_recipe(path, overrides).name, []
    for ending, own in sweep.combinations(options, None if yes else sweep.MAX_RUNS).items():
        folder = runs / f"{name}{ending}"
        found = shared.read_recipe(path, [*overrides, *own, f"name={folder.name}"], folder / "config.yaml")
        every.append(Run(folder, found, silent=not is_main()))
    sweep.require_alike(every)
    expected = {}
    for run in every if is_main() else ():
        plan = running.plan_run(run.recipe, run, until)
        running.require_allowed(plan)
        for action in plan if dry_run else ():
            run.say(f"{run.folder.name}: {action.line()}")
        if not dry_run:
            expected[run.folder] = _check(run.recipe, run, until)
    failed = []
    for run in every if not dry_run else ():
        note(f"run {run.folder.name}")
        try:
            _make(run, read_utf8(path), until, expected=expected.get(run.folder, ()))
        except DistillError as error:
            if disk_fault(error) or process_count() > 1:  # which the other runs meet, too
                raise
            failed.append(f"{run.folder.name}: {error}")
            warn(f"{failed[-1]}\nrun {run.folder.name} failed: the others go on")
    if is_main() and not dry_run:
        _beside([(run.recipe, run) for run in every], "md")
    if failed:
        what = f"{len(failed)} of {len(every)} runs failed: " + "; ".join(failed)
        raise RunError(what, "when that is mended, run the same command again: what is done is kept")


def _rehearse(whole: Recipe, short: Recipe, run: Run, until: str | None) -> None:
    """Check the whole recipe, rehearse it and print what it will take."""
    from distill.pipeline.preflight import rehearse

    _check(whole, run, until)
    shared.prepare(short.threads)
    with closing(run):
        table = rehearse(whole, short, run, until)
    print(table)
    print(
        f"{run.folder} holds the rehearsal, whose figures `check` and `train` show; delete it at any time",
        file=sys.stderr,
    )


def _move_aside(run: Run) -> None:
    if not run.folder.exists():
        return
    if json.dumps(f"{run.folder.resolve()}/")[:-1] in run.recipe.model_dump_json():
        hint = "give it another name (name=…)"
        raise RunError(f"the recipe reads from {run.folder}, which --fresh moves aside", hint)
    aside = run.folder.with_name(f"{run.folder.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    with run.locked(), faults_explained(run.folder):
        run.folder.rename(aside)
    print(f"the old run is now {aside}", file=sys.stderr)


def _check(recipe: Recipe, run: Run, until: str | None) -> list[StageEstimate]:
    """Print the warnings of a run's preflight and what its stages are expected to take, which is returned."""
    from distill.pipeline.preflight import expected_lines, expected_stages, preflight

    unread = run.done("teacher") is None
    found = preflight(recipe, run.done("corpus") is None, until=until, teacher=unread, folder=run.folder)
    if run.done("train") is None:
        from distill.planning.order import decide

        note("\n".join(decide(recipe.target.model, None)))
    for line in found.warnings:
        print(line, file=sys.stderr)
    expected, source = expected_stages(recipe, run.folder, found.prompts)
    for line in expected_lines([one for one in expected if run.done(one.stage) is None], source):
        note(line)
    return expected


def say_outcome(run: Run) -> None:
    """Write a line where the weights from before the first step are the draft."""
    from distill.training.saved import REMEDY, TrainingSummary

    if run.done("train") is None:
        return
    training = read_result(run.path("training.json"), TrainingSummary)
    if training.warning is not None:
        run.say(f"{training.warning}\n  {REMEDY}", warning=True)


def require_passed(run: Run, until: str | None) -> None:
    """Raise DataError, once all stages are done, where a GGUF file of the run did not pass its check."""
    from distill.export import ExportReport

    if run.done("export") is None or (until is not None and NAMES.index(until) < NAMES.index("export")):
        return
    faults = read_result(run.path("gguf", "export.json"), ExportReport).faults
    if faults:
        raise DataError("; ".join(faults), f"all stages are done; do not use what did not pass ({run.folder}/gguf)")


def _print_stage(folder: Path, stage: str) -> None:
    """Print the tables of a stage as soon as it is done, and after the last one where everything is."""
    table = folder / f"{stage}.md"  # eval.md, speedup.md
    if table.exists():
        print(read_utf8(table), flush=True)
    if stage == "report":
        for line in _best_of(folder):
            print(line)
        print(f"report: {folder / 'report.html'}\ndraft:  {folder / 'draft'}\ngguf:   {folder / 'gguf'}")


def _best_of(folder: Path) -> list[str]:
    """The verdict of a run's measurement and the commands that serve and try what is fastest; nothing without one."""
    if not (place := folder / "speedup.json").exists():
        return []
    from distill.measuring.speedup_results import SpeedupReport
    from distill.measuring.verdict import next_steps

    measured = read_result(place, SpeedupReport)
    return [measured.verdict, next_steps(measured)] if measured.plain else []


# ── `distill runs`, `distill cache` and `distill report` ──


KEPT: dict[CacheKind, str] = {
    "imported": "models imported from GGUF files",
    "merged": "models with an adapter merged into them",
    "batches": "checks of batches in llama.cpp",
    "weights": "which weights of a draft draft fastest",
    "digests": "digests of large files",
    "kernels": "compiled products of a file's own bits",
}


def cache(
    clear: Annotated[
        list[str] | None, typer.Option(help=f"Remove what is kept of this kind ({', '.join(KEPT)}, all).")
    ] = None,
    output: shared.FormatOption = "md",
) -> None:
    """List what is remembered between commands, or remove it: it is made or measured again when it is needed."""
    shared.require_known("--clear", clear, (*KEPT, "all"))
    rows: list[Row] = []
    for kind, what in KEPT.items():
        if (folder := cache_folder(kind)).is_dir():
            size, changed = _size_and_change(folder)
            removed = not {kind, "all"}.isdisjoint(clear or ())
            if removed:
                with faults_explained(folder):
                    shutil.rmtree(folder)
            rows.append([kind, what + (": removed" if removed else ""), changed, Cell(size / 1e6, ".1f")])
    place = cache_folder("imported").parent
    note = f"In {place}; DISTILL_CACHE names another folder." if rows else f"Nothing is kept in {place}."
    shared.print_blocks([Table(["kind", "what", "last change", "MB"], rows, note=note)], None, output)


def _size_and_change(folder: Path) -> tuple[int, str]:
    """Bytes of the files below a folder, and the minute of the last change there."""
    files = [folder, *folder.rglob("*")]
    changed = max(path.lstat().st_mtime for path in files)
    minute = time.strftime("%Y-%m-%d %H:%M", time.localtime(changed))
    return sum(path.stat().st_size for path in files if path.is_file()), minute


@dataclass(frozen=True)
class RunState:
    """A run: how many of its stages are done, the next one (None after the last), the minute of its last change."""

    name: str
    done: int
    stages: int
    next: str | None
    changed: str
    bytes: int


@dataclass(frozen=True)
class RunList:
    """What `distill runs` lists."""

    runs: list[RunState]
    version: Literal[1] = 1


def list_runs(runs: shared.RunsOption = shared.DEFAULT_RUNS, output: shared.FormatOption = "md") -> None:
    """List the runs with their finished stages, last change and size on disk."""
    found = []
    for config in sorted(runs.glob("*/config.yaml")):
        folder = config.parent
        names = _stages(config)
        missing = [name for name in names if not (folder / "stages" / f"{name}.json").exists()]
        size, changed = _size_and_change(folder)
        done = len(names) - len(missing)
        found.append(RunState(folder.name, done, len(names), missing[0] if missing else None, changed, size))
    if not found:
        raise RunError(f"there are no runs in {runs.resolve()}", "make one with `distill train RECIPE`")
    columns: Columns[RunState] = {
        "run": lambda one: one.name,
        "state": lambda one: f"{one.done} of {one.stages} stages, next {one.next}" if one.next else "finished",
        "changed": lambda one: one.changed,
        "MB": lambda one: Cell(one.bytes / 1e6, ".1f"),
    }
    shared.print_blocks([table_of(found, columns)], RunList(found), output)


def schema(
    name: Annotated[
        Literal["eval", "speedup", "plan", "runs", "recipe"],
        typer.Argument(
            metavar="NAME", help="eval, speedup, plan, runs: what `-o json` prints; recipe: a recipe's keys."
        ),
    ],
) -> None:
    """Print the JSON schema of a command's `-o json`, or of recipes.

    Its `version` grows when a field changes its meaning; fields may be added at any time.
    """
    from pydantic import TypeAdapter

    if name == "recipe":
        found = Recipe.model_json_schema()
    else:
        from distill.measuring.evaluation_results import EvaluationReport
        from distill.measuring.speedup_results import SpeedupReport
        from distill.planning.plan import SpeedupPlan

        kinds: dict[str, Any] = {"eval": EvaluationReport, "speedup": SpeedupReport, "plan": SpeedupPlan}
        found = TypeAdapter(kinds.get(name, RunList)).json_schema(mode="serialization")
    print(json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema"} | found, indent=1))


def _stages(config: Path) -> list[str]:
    """The stages of a run; the usual ones where its recipe cannot be read."""
    try:
        absent = set(left_out(load_recipe(config)))
    except DistillError:
        absent = {QUESTIONS}
    return [name for name in NAMES if name not in absent]


MEASURED = ("eval", "export", "speedup")


def report(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="Runs; by default the newest. Several give a table.")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False,
    to: Annotated[Path | None, typer.Option(help="New folder for copies of page, card, tables and commands.")] = None,
    runs: shared.RunsOption = shared.DEFAULT_RUNS,
    output: shared.FormatOption = "md",
) -> None:
    """Rebuild a run's report.html and model card from the measurements made so far.

    With several runs, compare their drafts instead: sizes, costs, acceptance and speeds, also in compared.html.
    """
    if names is not None and len(names) > 1:
        _beside([shared.find_run(name, runs) for name in names], output)
        return
    recipe, found = shared.find_run(names[0] if names else None, runs)
    shared.require_draft(found)
    if not found.path("draft").is_dir():
        raise RunError(f"{found.path('draft')} is missing", f"`{found.again()}` writes it again")
    page = found.path("report.html")
    if page.exists() and not found.can_be_written():
        note(f"{found.folder} is not writable: this is the page as it was made")
    else:
        from distill.report.card import report as write_report

        announce(found.folder)
        stale = [stage for stage in MEASURED if found.done(stage) is not None and found.outdated(stage)]
        if stale:
            warn(
                f"left out: {', '.join(stale)}, made from what has been replaced since: "
                f"`{found.again()}` makes them again"
            )
        write_report(recipe, found)
        for line in _best_of(found.folder) if "speedup" not in stale else ():
            note(line)
    if to is not None:
        require_new_folder(to)
        to.mkdir(parents=True, exist_ok=True)
        for name in ("report.html", "draft/README.md", "eval.md", "speedup.md"):  # the card has the commands
            if found.path(name).is_file():
                copy_file(found.path(name), to / Path(name).name)
    print(page if to is None else to)
    if show:
        typer.launch(str(page.resolve()))


def _beside(opened: Sequence[tuple[Recipe, Run]], output: str) -> None:
    """Print the runs side by side, and write the page that has the pictures, too."""
    from distill.report.beside import SHORT, beside_blocks
    from distill.report.page import fold, section, whole_page

    table, words, pictures = beside_blocks(opened)
    shared.print_blocks([table, *words], None, output)
    page = opened[0][1].folder.parent / "compared.html"
    if os.access(page.parent, os.W_OK):
        short = Table(table.heads[:SHORT], [row[:SHORT] for row in table.rows], classes=table.classes)
        first = f'<section class="first">{section([*words, short, *pictures[:1]])}</section>'
        body = first + fold("All figures", section([table, *pictures[1:]]))
        write_text(page, whole_page(f"{len(opened)} runs side by side", now(), body))
        note(f"page: {page}")

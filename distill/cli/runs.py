"""`distill train` runs every stage of a recipe, `distill runs` lists the runs, and `distill report` makes the page of a
run or compares several."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distill.cli import shared
from distill.devices import is_main, process_count
from distill.errors import DataError, DistillError, RecipeError, RunError, disk_fault, faults_explained
from distill.files import copy_file, read_result, read_utf8, require_new_folder, write_text
from distill.pipeline.stages import NAMES, find_stage
from distill.progress import announce, is_verbose, note, shows_stages, warn
from distill.recipe import Recipe, load_recipe
from distill.recipe.corpus import SourceKind
from distill.recipe.recipe import QUESTIONS, left_out
from distill.recipe.training import LossName
from distill.run import Run, now
from distill.tables import Block, Cell, Columns, Table, table_of

if TYPE_CHECKING:
    from distill.planning.hours import StageEstimate  # which loads torch

# ── `distill train` ──

OVERRIDES = (
    f"Override recipe keys: train.loss ({shared.values(LossName)}), corpus.sources.0.kind "
    f"({shared.values(SourceKind)}) and others. docs/recipes.md and `distill recipes --schema` list all."
)


def train(
    invocation: typer.Context,
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="a.b=c", help=OVERRIDES)] = None,
    runs: shared.RunsOption = shared.DEFAULT_RUNS,
    until: Annotated[str | None, typer.Option(help=f"Last stage to run: {shared.values(NAMES)}.")] = None,
    redo: Annotated[list[str] | None, typer.Option(help="Stage to run again, with its dependents. Repeatable.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start a new run; move an old one aside.")] = False,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Continue from a finished run's draft on new served logs.")
    ] = False,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V1,V2,...", help="Train a run for each value of a key. Repeatable: all combinations."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="With --sweep: allow more than 12 runs.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the stages that would run, and why.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read finished files whole, and make damaged ones again.")
    ] = False,
    rehearsal: Annotated[
        bool, typer.Option("--rehearse", help="Run shortened stages as NAME-rehearsal, to estimate the whole run.")
    ] = False,
) -> None:
    """Run every stage of a recipe, from corpus to report.

    Finished stages are skipped. After an interruption the same command resumes.
    """
    whole_runs = ("redo", "fresh", "refresh", "verify")
    if sweep:
        shared.refuse(invocation, "with --sweep, which makes whole runs", *whole_runs, "rehearsal")
        return _sweep(recipe, overrides or [], sweep, runs, until, yes, dry_run)
    shared.refuse(invocation, "without --sweep", "yes")
    if rehearsal:
        shared.refuse(invocation, "with --rehearse, which runs shortened stages", *whole_runs, "dry_run")
    if refresh:
        shared.refuse(invocation, "with --refresh, which starts a new run", "redo", "fresh", "dry_run")
    begun = None if fresh else runs / load_recipe(recipe, overrides or []).name / "config.yaml"
    found = whole = shared.read_recipe(recipe, overrides or [], begun)
    if rehearsal:
        from distill.pipeline.preflight import shortened

        found = shortened(whole, runs)
    _require_reached(until, redo or ())
    from distill.pipeline import running  # It loads torch, and a recipe that cannot be read is refused without it.

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
    """Raise an error for stages that do not exist, and for stages after --until."""
    for name in [*([until] if until else []), *redo]:
        find_stage(name)
        if until and NAMES.index(name) > NAMES.index(until):
            raise RecipeError(f"--redo {name} does nothing: --until {until} ends before it", "leave one of them out")


def _make(
    run: Run, text: str, until: str | None, redo: Sequence[str] = (), expected: Sequence[StageEstimate] = ()
) -> None:
    """Run the stages up to `until` and print their tables. Processes other than the main one take part."""
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
    """Make a run for each combination, one after the other, and compare them. A failed run does not stop the others.

    RunError at the end names the failed runs.
    """
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
        raise RunError(what, "fix the cause and run the same command again. Finished stages are kept")


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
    """Print the warnings of a run's preflight and the estimates of its stages. Returns the estimates."""
    from distill.pipeline.preflight import expected_lines, expected_stages, preflight
    from distill.planning.hours import bounds

    unread = run.done("teacher") is None
    found = preflight(recipe, run.done("corpus") is None, until=until, teacher=unread, folder=run.folder)
    if run.done("train") is None:
        from distill.planning.order import decide

        note("\n".join(decide(recipe.target.model, None)))
    for line in found.warnings:
        print(line, file=sys.stderr)
    expected, source = expected_stages(recipe, run.folder, found.prompts)
    due = [one for one in expected if run.done(one.stage) is None]
    if due and sys.stderr.isatty() and not is_verbose():
        note(f"expected: {bounds(sum(one.low for one in due), sum(one.high for one in due))}, {source}")
    else:
        for line in expected_lines(due, source):
            note(line)
    return expected


def say_outcome(run: Run) -> None:
    """Warn if training did not help, so that the draft has the weights from before the first step."""
    from distill.training.saved import REMEDY, TrainingSummary

    if run.done("train") is None:
        return
    training = read_result(run.path("training.json"), TrainingSummary)
    if training.warning is not None:
        run.say(f"{training.warning}\n  {REMEDY}", warning=True)


def require_passed(run: Run, until: str | None) -> None:
    """Raise DataError after the last stage if a GGUF file of the run did not pass its check."""
    from distill.export import ExportReport

    if run.done("export") is None or (until is not None and NAMES.index(until) < NAMES.index("export")):
        return
    faults = read_result(run.path("gguf", "export.json"), ExportReport).faults
    if faults:
        raise DataError("; ".join(faults), f"all stages are done; do not use what did not pass ({run.folder}/gguf)")


def _print_stage(folder: Path, stage: str) -> None:
    """Print the tables of a finished stage, and after the last stage the places of all results."""
    table = folder / f"{stage}.md"  # eval.md, speedup.md
    if table.exists() and not (shows_stages() and sys.stdout.isatty()):
        print(read_utf8(table), flush=True)
    if stage == "report":
        for line in _best_of(folder):
            print(line)
        print(f"report: {folder / 'report.html'}\ndraft:  {folder / 'draft'}\ngguf:   {folder / 'gguf'}")


def _best_of(folder: Path) -> list[str]:
    """Return the verdict of a run's measurement and the commands for its fastest way; nothing without a measurement."""
    if not (place := folder / "speedup.json").exists():
        return []
    from distill.measuring.speedup_results import SpeedupReport
    from distill.measuring.verdict import next_steps

    measured = read_result(place, SpeedupReport)
    return [measured.verdict, next_steps(measured)] if measured.plain else []


# ── `distill runs` and `distill report` ──


def list_runs(runs: shared.RunsOption = shared.DEFAULT_RUNS, output: shared.FormatOption = "md") -> None:
    """List the runs with their finished stages, last change and size on disk."""
    found = []
    for config in sorted(runs.glob("*/config.yaml")):
        folder = config.parent
        names = _stages(config)
        missing = [name for name in names if not (folder / "stages" / f"{name}.json").exists()]
        size, changed = shared.size_and_change(folder)
        done = len(names) - len(missing)
        found.append(shared.RunState(folder.name, done, len(names), missing[0] if missing else None, changed, size))
    if not found:
        raise RunError(f"there are no runs in {runs.resolve()}", "make one with `distill train RECIPE`")
    columns: Columns[shared.RunState] = {
        "run": lambda one: one.name,
        "state": lambda one: f"{one.done} of {one.stages} stages, next {one.next}" if one.next else "finished",
        "changed": lambda one: one.changed,
        "MB": lambda one: Cell(one.bytes / 1e6, ".1f"),
    }
    shared.print_blocks([table_of(found, columns)], shared.RunList(found), output)


def _stages(config: Path) -> list[str]:
    """Return the stages of a run, or the usual ones if its recipe cannot be read."""
    try:
        absent = set(left_out(load_recipe(config)))
    except DistillError:
        absent = {QUESTIONS}
    return [name for name in NAMES if name not in absent]


MEASURED = ("eval", "export", "speedup")


def report(
    invocation: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Runs (by default the newest). Several are compared."),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Show the page in a browser.")] = False,
    to: Annotated[Path | None, typer.Option(help="New folder for copies of page, card and tables.")] = None,
    runs: shared.RunsOption = shared.DEFAULT_RUNS,
    output: shared.FormatOption = "md",
) -> None:
    """Rebuild a run's report.html and model card from its measurements.

    Several runs are compared instead: sizes, costs, acceptance and speeds of their drafts, also in compared.html.
    """
    if names is not None and len(names) > 1:
        shared.refuse(invocation, "with several runs, which are compared", "show", "to")
        _beside([shared.find_run(name, runs) for name in names], output)
        return
    shared.refuse(invocation, "with one run, whose page is written", "output")
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
    """Print a comparison of the runs, and write the page that also has the pictures."""
    from distill.report.beside import SHORT, beside_blocks
    from distill.report.page import whole_page

    table, words, pictures = beside_blocks(opened)
    shared.print_blocks([table, *words], None, output)
    page = opened[0][1].folder.parent / "compared.html"
    if os.access(page.parent, os.W_OK):
        short = Table(table.heads[:SHORT], [row[:SHORT] for row in table.rows], classes=table.classes)
        sections: dict[str, list[Block]] = {"": [*words, short, *pictures[:1]], "All figures": [table, *pictures[1:]]}
        write_text(page, whole_page(f"{len(opened)} runs side by side", now(), sections))
        note(f"page: {page}")

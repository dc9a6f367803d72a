"""`distill runs` and `distill report`: the runs in a list, the page of one, several side by side."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from distill.cli import shared
from distill.errors import DistillError, RunError, faults_explained
from distill.files import require_path
from distill.progress import announce, note, signalled, warn
from distill.recipe import Recipe, load_recipe
from distill.recipe.recipe import HELD_OUT, QUESTIONS, left_out
from distill.run import Run
from distill.tables import Cell, Row, Table


def list_runs(
    context: typer.Context,
    runs: shared.RunsOption = shared.DEFAULT_RUNS,
    output: shared.FormatOption = "md",
    delete: Annotated[str | None, typer.Option(metavar="NAME", help="Delete this run and everything in it.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="With --delete: do not ask.")] = False,
) -> None:
    """List the runs with their finished stages, last change and size on disk; or delete one."""
    shared.refuse_idle(
        context,
        (delete is not None, "output", "is for the list, which --delete does not show"),
        (delete is None, "yes", "answers the question of --delete NAME"),
    )
    if delete is not None:
        _delete(runs, delete, yes)
        return
    rows: list[Row] = []
    for config in sorted(runs.glob("*/config.yaml")):
        folder = config.parent
        files = list(folder.rglob("*"))
        names = _stages(config)
        missing = [name for name in names if not (folder / "stages" / f"{name}.json").exists()]
        size = sum(path.stat().st_size for path in files if path.is_file())
        changed = time.strftime("%Y-%m-%d %H:%M", time.localtime(max(path.stat().st_mtime for path in files)))
        state = f"{len(names) - len(missing)} of {len(names)} stages, next {missing[0]}" if missing else "finished"
        rows.append([folder.name, state, changed, Cell(size / 1e6, ".1f")])
    if not rows:
        raise RunError(f"there are no runs in {runs.resolve()}", "make one with `distill train RECIPE`")
    shared.print_blocks([Table(["run", "state", "changed", "MB"], rows)], None, output)


def _stages(config: Path) -> list[str]:
    """The stages of a run; the usual ones where its recipe cannot be read."""
    from distill.pipeline.stages import NAMES

    try:
        absent = set(left_out(load_recipe(config)))
    except DistillError:
        absent = {*HELD_OUT, QUESTIONS}
    return [name for name in NAMES if name not in absent]


def _delete(runs: Path, name: str, yes: bool) -> None:
    """Delete the run of this name, and nothing else; raises RunError where there is none or a process works in it."""
    require_path(name, "the run")
    folder = runs / name
    if name.startswith(".") or Path(name).name != name or not (folder / "config.yaml").is_file():
        raise RunError(f"there is no run `{name}` in {runs.resolve()}", "`distill runs` lists the runs")
    if folder.is_symlink():
        raise RunError(f"{folder} is a link", "delete it by hand, and what it leads to")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    unread: Recipe = Recipe.model_construct()  # type: ignore[call-arg]  # a damaged run has no recipe to read
    with Run(folder, unread).locked():
        try:
            agreed = yes or typer.confirm(f"Delete {folder} ({size / 1e6:.1f} MB)?", err=True)
        except (UnicodeDecodeError, typer.Abort):
            if signalled():
                raise
            print(file=sys.stderr)  # ends the line of the question
            what = "--delete asks before it deletes, and stdin gave no answer; nothing was deleted"
            raise RunError(what, "answer y or n at a terminal, or give --yes") from None
        if not agreed:
            print("nothing was deleted", file=sys.stderr)
            return
        with faults_explained(folder):
            shutil.rmtree(folder)
    print(f"{folder} is deleted", file=sys.stderr)


MEASURED = ("eval", "export", "speedup")


def report(
    context: typer.Context,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="Runs; by default the newest. Several give a table.")
    ] = None,
    runs: shared.RunsOption = shared.DEFAULT_RUNS,
    output: shared.FormatOption = "md",
) -> None:
    """Rebuild a run's report.html and model card from the measurements made so far.

    With several runs, compare their drafts instead: sizes, acceptance probabilities and gains.
    """
    if names is not None and len(names) > 1:
        _beside(names, runs, output)
        return
    shared.refuse_idle(context, (True, "output", "is for several runs: of one, a page is written"))
    recipe, found = shared.find_run(names[0] if names else None, runs)
    shared.require_draft(found)
    if not found.path("draft").is_dir():
        raise RunError(f"{found.path('draft')} is missing", f"`{found.again()}` writes it again")
    page = found.path("report.html")
    if page.exists() and not found.can_be_written():
        note(f"{found.folder} cannot be written: this is the page as it was made")
    else:
        from distill.report.card import report as write_report

        announce(found.folder)
        if stale := [stage for stage in MEASURED if found.done(stage) is not None and found.outdated(stage)]:
            warn(
                f"left out: {', '.join(stale)}, made from what has been replaced since: "
                f"`{found.again()}` makes them again"
            )
        write_report(recipe, found)
    print(page)


def _beside(names: list[str], runs: Path, output: str) -> None:
    from distill.report.card import gather
    from distill.report.tables import beside_blocks

    opened = [shared.find_run(name, runs) for name in names]
    found = [replace(gather(recipe, run), name=run.folder.name) for recipe, run in opened]
    shared.print_blocks(beside_blocks(found), None, output)

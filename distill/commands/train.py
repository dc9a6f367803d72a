"""`distill train`: every stage of a recipe."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from distill.commands.shared import (
    DEFAULT_RUNS,
    RunsOption,
    prepare,
)
from distill.errors import RecipeError
from distill.pipeline.preflight import check_models


def train(
    recipe: Annotated[Path, typer.Argument(help="Recipe file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Overrides of recipe keys.")
    ] = None,
    runs: RunsOption = DEFAULT_RUNS,
    until: Annotated[str | None, typer.Option("--until", help="Stop after this stage.")] = None,
    redo: Annotated[
        list[str] | None, typer.Option("--redo", help="Run this stage and what depends on it again.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Move an old run of this name aside (never deleted).")] = False,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Go on from a finished run's draft, on the lines its traffic gained.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say which stage would run, and why; do nothing.")] = False,
) -> None:
    """Run every stage of a recipe, from corpus to report. The same command resumes after any interruption."""
    from distill.files import faults_explained
    from distill.pipeline.refresh import finish_refresh, plan_refresh
    from distill.pipeline.refresh import refresh as start_refresh
    from distill.pipeline.running import follow_main, require_nothing_superseded, run_pipeline
    from distill.pipeline.stages import find_stage
    from distill.processes import is_main
    from distill.recipe import load_recipe
    from distill.run import Run

    found = load_recipe(recipe, overrides or [])
    for name in [*([until] if until else []), *(redo or [])]:
        find_stage(name)
    folder = runs / found.name
    if not is_main():  # one of several that `accelerate launch` started
        if not dry_run:
            prepare(found.threads)
            follow_main(found, Run(folder, found, silent=True))
        return
    run = Run(folder, found)
    if refresh and (fresh or redo or dry_run):
        raise RecipeError("--refresh begins a new run: --fresh, --redo and --dry-run do not go with it")
    finish_refresh(folder)
    parent = plan_refresh(found, run) if refresh else None
    if dry_run:
        run_pipeline(found, run, until, redo or (), dry=True)
        return
    if fresh and folder.exists():
        aside = folder.with_name(f"{folder.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        with run.locked(), faults_explained(folder):
            folder.rename(aside)
        print(f"the old run is now {aside}", file=sys.stderr)
    if parent is None:
        require_nothing_superseded(found, run, until, redo or ())
    # Before the run folder is touched: a cut that cannot be made must not cost the answers.
    for line in check_models(found):
        if "does not fit" in line or "warning" in line or "LOSSY" in line:
            print(line, file=sys.stderr)
    if parent is not None:
        print(f"the run to go on from is now {start_refresh(run, parent)}", file=sys.stderr)
    try:
        run.open(recipe.read_text(encoding="utf-8"))
        prepare(found.threads)
        run_pipeline(found, run, until, redo or ())
    finally:
        run.close()
    for name in ("eval.md", "speedup.md"):
        if (folder / name).exists():
            print((folder / name).read_text(encoding="utf-8"))
    if (folder / "report.html").exists():
        print(f"report: {folder / 'report.html'}\ndraft:  {folder / 'draft'}\ngguf:   {folder / 'gguf'}")

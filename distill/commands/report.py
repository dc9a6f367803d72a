"""`distill report`: writes the report page and the model card again, or prints several runs side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from distill.commands.shared import (
    DEFAULT_RUNS,
    FormatOption,
    RunsOption,
    find_run,
    print_blocks,
    require_draft,
    require_format,
)
from distill.errors import RunError
from distill.progress import announce, note, warn

MEASURED = ("eval", "export", "speedup")


def report(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...", help="Run name or folder; by default the newest run. Several: side by side."
        ),
    ] = None,
    runs: RunsOption = DEFAULT_RUNS,
    output: FormatOption = "md",
) -> None:
    """Rebuild a run's report.html and model card from the measurements made so far.

    With several runs, compare their drafts instead: sizes, acceptance and gains.
    """
    require_format(output)
    if names is not None and len(names) > 1:
        _beside(names, runs, output)
        return
    recipe, found = find_run(names[0] if names else None, runs)
    require_draft(found)
    if not found.path("draft").is_dir():
        raise RunError(f"{found.path('draft')} is missing", f"`{found.again()}` writes it again")
    page = found.path("report.html")
    if page.exists() and not found.can_be_written():
        note(f"{found.folder} cannot be written: this is the page as it was made")
    else:
        from distill.report.stage import report as write_report

        announce(found.folder)
        if stale := [stage for stage in MEASURED if found.done(stage) is not None and found.outdated(stage)]:
            warn(
                f"left out: {', '.join(stale)}, made from what has been replaced since: "
                f"`{found.again()}` makes them again"
            )
        write_report(recipe, found)
    print(page)


def _beside(names: list[str], runs: Path, output: str) -> None:
    from distill.report.beside import beside_blocks
    from distill.report.stage import gather

    opened = [find_run(name, runs) for name in names]
    found = [replace(gather(recipe, run), name=run.folder.name) for recipe, run in opened]
    print_blocks(beside_blocks(found), None, output)

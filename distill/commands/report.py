"""`distill report`: the report page and the model card, drawn again."""

from __future__ import annotations

from distill.commands.shared import (
    DEFAULT_RUNS,
    RunArgument,
    RunsOption,
    find_run,
)
from distill.errors import RunError


def report(run: RunArgument = None, runs: RunsOption = DEFAULT_RUNS) -> None:
    """Draw report.html and the model card of a run again, from everything measured so far."""
    recipe, found = find_run(run, runs)
    if not found.path("draft").is_dir():
        raise RunError(f"{found.folder} has no trained draft yet", "run `distill train` on its recipe")
    from distill.report.stage import report as draw

    draw(recipe, found)
    print(found.path("report.html"))

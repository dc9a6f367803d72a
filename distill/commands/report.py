"""`distill report`: writes the report page and the model card again."""

from __future__ import annotations

from distill.commands.shared import DEFAULT_RUNS, RunArgument, RunsOption, find_run
from distill.errors import RunError
from distill.progress import announce, note


def report(run: RunArgument = None, runs: RunsOption = DEFAULT_RUNS) -> None:
    """Write a run's report.html and model card again, from the measurements made so far."""
    recipe, found = find_run(run, runs)
    if not found.path("draft").is_dir():
        raise RunError(f"{found.folder} has no trained draft yet", "run `distill train` on its recipe")
    page = found.path("report.html")
    if page.exists() and not found.can_be_written():
        note(f"{found.folder} cannot be written: this is the page as it was made")
    else:
        from distill.report.stage import report as write_report

        announce(found.folder)
        write_report(recipe, found)
    print(page)

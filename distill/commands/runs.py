"""`distill runs`: lists the runs."""

from __future__ import annotations

import time

from distill.commands.shared import (
    DEFAULT_RUNS,
    FormatOption,
    RunsOption,
    print_table,
)
from distill.errors import RunError


def list_runs(runs: RunsOption = DEFAULT_RUNS, output: FormatOption = "md") -> None:
    """List the runs with their finished stages, last change and size on disk."""
    from distill.pipeline.stages import NAMES

    rows = []
    for config in sorted(runs.glob("*/config.yaml")):
        folder = config.parent
        done = [name for name in NAMES if (folder / "stages" / f"{name}.json").exists()]
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        changed = time.strftime("%Y-%m-%d %H:%M", time.localtime(max(p.stat().st_mtime for p in folder.rglob("*"))))
        state = (
            "finished"
            if len(done) == len(NAMES)
            else f"{len(done)} of {len(NAMES)} stages" + (f", next {next(name for name in NAMES if name not in done)}")
        )
        rows.append({"run": folder.name, "state": state, "changed": changed, "megabytes": round(size / 1e6, 1)})
    if not rows:
        raise RunError(f"there are no runs in {runs.resolve()}", "make one with `distill train RECIPE`")
    lines = ["| run | state | changed | MB |", "|---|---|---|--:|"]
    lines += [f"| {r['run']} | {r['state']} | {r['changed']} | {r['megabytes']} |" for r in rows]
    print_table(rows, "\n".join(lines), rows, output)

"""`distill train RECIPE --refresh`: moves a finished run aside and starts a run of its name from its draft."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from distill.data.traffic import PIN, begins_with, parts_of, pin_of, read_lines
from distill.errors import DataError, RecipeError, RunError, faults_explained
from distill.files import read_json, write_json
from distill.recipe import Recipe, load_recipe
from distill.run import Run, is_read


def _prepared(folder: Path) -> Path:
    """Folder of the new run until the old one has been moved."""
    return folder.with_name(f".{folder.name}.refresh")


def finish_refresh(folder: Path) -> None:
    """Finish a refresh that was killed between its two renames; do nothing otherwise."""
    prepared = _prepared(folder)
    if folder.exists() or not (prepared / "parent.json").exists():
        return
    if folder.with_name(read_json(prepared / "parent.json", {"run": str})["run"]).exists():
        with faults_explained(folder):
            os.replace(prepared, folder)


def plan_refresh(recipe: Recipe, run: Run) -> dict[str, Any]:
    """The parent.json of a run that starts from the draft of `run`; changes nothing.

    It holds the generation, the next name of `run`, the files of its draft and the part of the traffic file that it
    read. Raises RecipeError or RunError for a recipe without traffic or with other cuts, an unfinished run, a rotated
    file and a file without new lines.
    """
    settings = recipe.answers.traffic
    if settings is None:
        raise RecipeError("--refresh needs answers.traffic, a file with new lines", "see docs/recipes.md")
    if recipe.train.sparsity is not None and recipe.train.sparsity.mlp_width is not None:
        raise RecipeError("--refresh makes no cuts, but train.sparsity does", "add train.sparsity=null")
    record = run.done("train")
    if record is None or run.damaged_artifacts(record):
        raise RunError(
            f"{run.folder} has no finished draft to start from", "finish it first: the same command without --refresh"
        )
    if load_recipe(run.path("config.yaml")).cut != recipe.cut:
        raise RecipeError(
            f"section cut differs from that of {run.folder}, and --refresh makes no cuts",
            "restore the section, or use another run (name=…)",
        )
    read = (run.done("answers") or {"inputs": {}})["inputs"].get(PIN)
    if read is not None and not is_read(read):
        raise DataError(f"{run.done_path('answers')} is damaged: {PIN} is of another kind", "copy the run again")
    require_growth(recipe, Path(settings.path), read)
    before = run.parent()
    number = 1
    while run.folder.with_name(f"{run.folder.name}.{number}").exists():
        number += 1
    return {
        "generation": (before["generation"] if before else 1) + 1,
        "run": f"{run.folder.name}.{number}",
        "digest": record["digest"],
        "files": {
            name.removeprefix("draft/"): entry["sha256"]
            for name, entry in record["artifacts"].items()
            if name.startswith("draft/")
        },
        "traffic": read,
    }


def require_growth(recipe: Recipe, path: Path, read: dict[str, Any] | None) -> None:
    """Raise RunError when a file was rotated since it was read, or has no usable line after those that were read."""
    settings = recipe.answers.traffic
    assert settings is not None
    now = pin_of(path, read)
    known = {part["path"]: part for part in parts_of(read)} if read else {}
    for part in parts_of(now):  # a file of a folder that is gone has been read; another file than before is new
        before = known.get(part["path"])
        if before is not None and not begins_with(Path(part["path"]), before):
            raise RunError(
                f"{part['path']} no longer begins with the {before['lines']} lines that were read from it; "
                "was it rotated?",
                "put the new lines into their own file: answers.traffic.path=…",
            )
    found = list(read_lines(now))
    if not found:
        raise RunError(f"{path} has no new line after line {now['start_line']}", "refresh when it has new lines")
    if all(isinstance(line, str) for line in found):
        raise RunError(f"all {len(found)} new lines of {path} are bad, first {found[0]}")


def refresh(run: Run, parent: dict[str, Any]) -> Path:
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

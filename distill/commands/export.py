"""`distill export-gguf`: GGUF files of a run, or of a Hugging Face folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from distill.commands.shared import (
    DEFAULT_RUNS,
    RunsOption,
    find_run,
    run_until,
)
from distill.errors import RecipeError
from distill.progress import announce
from distill.recipe.outtypes import OUTTYPES


def export_gguf(
    model: Annotated[str | None, typer.Argument(metavar="[RUN|MODEL]", help="Run, or Hugging Face folder.")] = None,
    outtype: Annotated[
        list[str] | None,
        typer.Option("--outtype", help=f"{', '.join(OUTTYPES[:-1])} or {OUTTYPES[-1]}; may be repeated."),
    ] = None,
    folder: Annotated[Path | None, typer.Option("--to", help="Folder for the files (a run: its gguf folder).")] = None,
    runs: RunsOption = DEFAULT_RUNS,
) -> None:
    """Write GGUF files of a run's draft and target, or of any qwen2, qwen3 or llama folder."""
    kinds = outtype or ["f16", "q8_0"]
    for kind in kinds:
        if kind not in OUTTYPES:
            raise RecipeError(f"outtype `{kind}` is unknown", f"use {', '.join(OUTTYPES)}")
    from distill.export.writer import export_gguf as write

    if model is not None and (Path(model) / "config.json").exists():
        sources, place = {Path(model).resolve().name: Path(model)}, folder or Path(".")
    else:
        from distill.models.hugging_face import local_folder
        from distill.recipe.text.unloaded import REASON

        recipe, run = find_run(model, runs)
        run_until(recipe, run, "train")
        run.verify("train", "draft/*")
        sources = {"draft": run.path("draft")}
        if recipe.target.load:
            sources["target"] = local_folder(recipe.target.model)
        else:
            print(f"no file of the target is written: {REASON}", file=sys.stderr)
        place = folder or run.path("gguf", "extra")
    announce(place)
    for name, source in sources.items():
        for kind in kinds:
            report = write(source, place / f"{name}-{kind}.gguf", kind)
            print(
                f"{report.path}  {report.bytes / 1e6:.1f} MB  {report.tensors} tensors"
                + (f", {report.fallback_tensors} kept in f16" if report.fallback_tensors else "")
            )

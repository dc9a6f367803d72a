"""What the commands share: options, finding runs, quiet libraries, tables on stdout."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distill.errors import DataError, RecipeError, RunError

if TYPE_CHECKING:
    from distill.recipe import Recipe
    from distill.run import Run

RunsOption = Annotated[Path, typer.Option("--runs", help="Folder that holds the run directories.")]
RunArgument = Annotated[
    str | None, typer.Argument(metavar="[RUN]", help="Run name or folder; the newest run if left out.")
]
FormatOption = Annotated[str, typer.Option("--output", "-o", help="md, json, jsonl or csv.")]
TargetOption = Annotated[
    str | None, typer.Option("--target", help="Without a run: the target's Hugging Face folder or hub name.")
]
DraftOption = Annotated[
    str | None, typer.Option("--draft", help="Without a run: the draft's Hugging Face folder or hub name.")
]
TextOption = Annotated[
    list[Path] | None,
    typer.Option("--text", help="Without a run: a text file or a folder of them to take prompts from."),
]
DEFAULT_RUNS = Path("runs")


def find_run(name: str | None, runs: Path) -> tuple[Recipe, Run]:
    """The run called `name` (or a folder), else the newest one, which is then named on stderr."""
    from distill.recipe import load_recipe
    from distill.run import Run

    if name is not None:
        folder = Path(name) if (Path(name) / "config.yaml").exists() else runs / name
        if not (folder / "config.yaml").exists():
            raise RunError(f"there is no run at {folder}", "`distill runs` lists those there are")
    else:
        found = sorted(runs.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise RunError(f"there are no runs in {runs.resolve()}", "make one with `distill train RECIPE`")
        folder = found[-1].parent
        print(f"run: {folder}", file=sys.stderr)
    recipe = load_recipe(folder / "config.yaml")
    return recipe, Run(folder, recipe)


def prepare(threads: int | None) -> None:
    """Thread count and quiet libraries, before the first heavy import."""
    from distill.machine import usable_cores

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    import torch
    import transformers

    torch.set_num_threads(threads or usable_cores())
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def run_until(recipe: Recipe, run: Run, stage: str, redo: Sequence[str] = ()) -> None:
    """Bring an existing run up to `stage`."""
    from distill.pipeline.running import run_pipeline

    prepare(recipe.threads)
    try:
        run.open((run.folder / "recipe.yaml").read_text(encoding="utf-8"))
        run_pipeline(recipe, run, until=stage, redo=redo)
    finally:
        run.close()


def print_table(rows: list[dict[str, Any]], markdown: str, value: Any, output: str) -> None:
    """Results on stdout in the format asked for."""
    if output == "md":
        print(markdown, end="" if markdown.endswith("\n") else "\n")
    elif output == "json":
        print(json.dumps(value, indent=1, ensure_ascii=False))
    elif output == "jsonl":
        for row in rows:
            print(json.dumps(row, ensure_ascii=False))
    elif output == "csv":
        text = io.StringIO()
        if rows:
            writer = csv.DictWriter(text, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        print(text.getvalue(), end="")
    else:
        raise RecipeError(f"output format `{output}` is unknown", "use -o md, json, jsonl or csv")


def read_texts(paths: list[Path]) -> list[str]:
    """The text of files and of all files below folders; raises DataError for one that is missing or not UTF-8."""
    found = []
    for path in paths:
        if not path.exists():
            raise DataError(f"text {path} does not exist", "correct --text")
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                try:
                    found.append(file.read_text(encoding="utf-8"))
                except UnicodeDecodeError as error:
                    if not path.is_dir():
                        raise DataError(f"{file} is not UTF-8: {error}", "convert it, or use another file") from error
    return found


def numbers(text: str, option: str, kind: type, example: str = "64,512") -> list[Any]:
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        raise RecipeError(f"{option} {text}: not numbers by commas", f"for instance {option} {example}") from None
    if not found or min(found) < 0:
        raise RecipeError(f"{option} {text}: numbers must not be negative", "correct them")
    return found


def local_reference(reference: str) -> str:
    """A model as the command line names it: an existing path made absolute, anything else a hub name."""
    return str(Path(reference).resolve()) if Path(reference).exists() else reference

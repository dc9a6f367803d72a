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
from distill.errors import DataError, RecipeError
from distill.files import read_utf8
from distill.progress import announce, warn
from distill.recipe.outtypes import OUTTYPES


def export_gguf(
    model: Annotated[str | None, typer.Argument(metavar="[RUN|MODEL]", help="Run, or Hugging Face folder.")] = None,
    outtype: Annotated[
        list[str] | None,
        typer.Option("--outtype", help=f"{', '.join(OUTTYPES[:-1])} or {OUTTYPES[-1]}; may be repeated."),
    ] = None,
    folder: Annotated[Path | None, typer.Option("--to", help="Folder for the files (a run: its gguf folder).")] = None,
    tensor_type: Annotated[
        list[str] | None,
        typer.Option("--tensor-type", help="PATTERN=TYPE, such as token_embd=q4_0: another type for some tensors."),
    ] = None,
    imatrix: Annotated[
        Path | None,
        typer.Option("--imatrix", help="Importance matrix of llama-imatrix (GGUF), or a text to measure one on."),
    ] = None,
    text: Annotated[Path | None, typer.Option("--text", help="Check on this text instead of built-in ones.")] = None,
    target: Annotated[
        Path | None, typer.Option("--target", help="The target's GGUF file, by which the draft will be served.")
    ] = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Compare each file with its source.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there.")] = False,
    runs: RunsOption = DEFAULT_RUNS,
) -> None:
    """Write GGUF files of a run's draft and target, or of any folder of a supported family (docs/export.md)."""
    kinds = outtype or ["f16", "q8_0"]
    for kind in kinds:
        if kind not in OUTTYPES:
            raise RecipeError(f"outtype `{kind}` is unknown", f"use {', '.join(OUTTYPES)}")
    overrides = tuple(_override(value) for value in tensor_type or ())
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
    outputs = {(name, kind): place / f"{name}-{kind}.gguf" for name in sources for kind in kinds}
    there = [path for path in outputs.values() if path.exists()]
    if there and not overwrite:
        raise DataError(f"{there[0]} exists already", "--overwrite replaces it; --to FOLDER writes elsewhere")
    announce(place)
    faults = []
    for (name, kind), path in outputs.items():
        report = write(sources[name], path, kind, tensor_types=overrides, importance=imatrix)
        line = f"{report.path}  {report.bytes / 1e6:.1f} MB  {report.tensors} tensors"
        if report.fallback_tensors:
            line += f", {report.fallback_tensors} in a larger type: their rows do not fit {kind}'s blocks"
        for left_out in report.notes:
            warn(f"{path.name}: {left_out}")
        if check:
            checked, wrong = _checked(sources[name], path, kind, text)
            line += f"  {checked}"
            faults += [f"{path}: {fault}" for fault in wrong]
        print(line if check else f"{line}  not checked")
        if target is not None and name != "target":
            faults += _served(target, path)
    if faults:
        raise DataError("; ".join(faults), "the file was written; do not use it for what it does not pass")


def _served(target: Path, draft: Path) -> list[str]:
    """Print the command that serves the pair, or return llama.cpp's reason against it."""
    from distill.models.pairs import compare_pair

    report = compare_pair(str(target), str(draft))
    if report.llama_cpp is not None:
        remedy = report.remedies.get("llama_cpp", "")
        return [f"{draft} does not fit {target} by llama.cpp's rule: {report.llama_cpp} ({remedy})"]
    print(f"llama-server -m {target} -md {draft} --spec-type draft-simple --spec-draft-n-max 4")
    return []


def _override(value: str) -> tuple[str, str]:
    pattern, equals, kind = value.rpartition("=")
    if not equals or not pattern or not kind:
        raise RecipeError(f"--tensor-type {value!r} is not PATTERN=TYPE", "write for example token_embd=q4_0")
    return pattern, kind


def _checked(source: Path, path: Path, kind: str, text: Path | None) -> tuple[str, list[str]]:
    """The words of a check, and the faults that it found."""
    from distill.export.check_texts import check_texts
    from distill.export.parity import compare, faults_of

    parity = compare(source, path, check_texts(source) if text is None else [read_utf8(text)], 512)
    words = (
        f"top-1 {parity.top1_agreement:.1%}, KL {parity.kl:.2g} over {parity.positions} positions, "
        f"{len(parity.tokenizer_mismatches)} of {parity.tokenizer_texts} texts with other ids"
    )
    return words, faults_of(parity, kind)

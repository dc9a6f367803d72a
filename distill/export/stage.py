"""Stage `export`: GGUF files of draft and target, read back and compared with Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distill.export.origin import origins
from distill.export.parity import Source, compare, faults_of
from distill.models.conversion.importing import file_type
from distill.models.conversion.writer import WrittenFile, export_files, own_file
from distill.models.gguf.file_head import open_head
from distill.models.hugging_face import local_folder
from distill.recipe import Recipe
from distill.recipe.recipe import REASON
from distill.results.export_results import ExportedFile, ExportReport
from distill.results.serialise import read_result, write_result
from distill.run import Run
from distill.texts import read_documents_of

POSITIONS = 2000  # of test texts, on which each file is compared with transformers in float32


def export(recipe: Recipe, run: Run) -> list[Path]:
    """Write gguf/MODEL-OUTTYPE.gguf for draft and target, and gguf/export.json with the parity of each file.

    Without `export.outtypes` no model is opened: GGUF may not hold it. A target that the recipe never loads is left
    out. One that is a GGUF file is not written again: its own file is compared with the folder that it is imported to.
    The files say nothing that was timed, so that their bytes depend on the models alone; `distill export-gguf RUN` adds
    the draft length.
    """
    folder = run.path("gguf")
    files: list[ExportedFile] = []
    if not recipe.export.outtypes:
        run.say("  no file is written: export.outtypes is empty")
        write_result(folder / "export.json", ExportReport(run.command, files))
        return [folder]
    texts = read_documents_of(run, "test")
    sources = {"draft": run.path("draft")}
    own = own_file(recipe)
    if recipe.target.load:
        sources["target"] = local_folder(recipe.target.model)
    else:
        run.say(f"  no file of the target is written: {REASON}")
    origin_of = origins(recipe, run)
    for name, folder_of_model in sources.items():
        if name == "target" and own is not None:
            tensors = len(open_head(own).shapes)
            reports = [WrittenFile(own, file_type(own), own.stat().st_size, tensors, 0)]
        else:
            outputs = {folder / f"{name}-{outtype}.gguf": outtype for outtype in recipe.export.outtypes}
            reports = export_files(folder_of_model, outputs, origin_of[name])
        source = Source.open(folder_of_model)
        for report in reports:
            path = report.path
            parity = compare(source, path, texts, POSITIONS)
            run.say(
                f"  {path.name}: {report.bytes / 1e6:.1f} MB, top-1 {parity.top1_agreement:.2%}, mean |d log p| "
                f"{parity.mean_abs_dlogprob:.5f} over {parity.positions} positions, "
                f"{len(parity.tokenizer_mismatches)} of {parity.tokenizer_texts} texts tokenized differently"
            )
            faults = faults_of(parity, report.outtype)
            for fault in (*report.notes, *faults):
                run.say(f"  {path.name}: {fault}", warning=True)
            place = str(path.relative_to(run.folder) if path != own else path)
            files.append(
                ExportedFile(place, name, report.outtype, report.bytes, report.fallback_tensors, parity, faults)
            )
    write_result(folder / "export.json", ExportReport(run.command, files))
    return [folder]


def record_extra(run: Run, files: Sequence[ExportedFile]) -> Path:
    """Add the files of `distill export-gguf RUN` to gguf/extra/export.json, in place of earlier ones at their paths.

    gguf/export.json is an artifact of the stage and stays as it is.
    """
    path = run.path("gguf", "extra", "export.json")
    new = {file.path for file in files}
    old = read_result(path, ExportReport).files if path.exists() else []
    write_result(path, ExportReport(run.command, [*(file for file in old if file.path not in new), *files]))
    return path

"""Stage `export`: GGUF files of draft and target, read back and compared with Hugging Face."""

from __future__ import annotations

from pathlib import Path

from distill.export.parity import compare, faults_of
from distill.export.writer import export_gguf
from distill.models.hugging_face import local_folder
from distill.recipe import Recipe
from distill.recipe.text.unloaded import REASON
from distill.results.export_results import ExportedFile, ExportReport
from distill.results.serialise import write_result
from distill.run import Run
from distill.texts import read_documents_of


def export(recipe: Recipe, run: Run) -> list[Path]:
    """Write gguf/MODEL-OUTTYPE.gguf for draft and target, and gguf/export.json with the parity of each file.

    A target that the recipe never loads is left out.
    """
    folder = run.path("gguf")
    texts = read_documents_of(run, "test")
    files: list[ExportedFile] = []
    sources = {"draft": run.path("draft")}
    if recipe.target.load:
        sources["target"] = local_folder(recipe.target.model)
    else:
        run.say(f"  no file of the target is written: {REASON}")
    for name, source in sources.items():
        for outtype in recipe.export.outtypes:
            path = folder / f"{name}-{outtype}.gguf"
            report = export_gguf(source, path, outtype, f"{recipe.name} {name}")
            parity = compare(source, path, texts, recipe.export.parity_positions)
            run.say(
                f"  {path.name}: {report.bytes / 1e6:.1f} MB, top-1 {parity.top1_agreement:.2%}, mean |d log p| "
                f"{parity.mean_abs_dlogprob:.5f} over {parity.positions} positions, "
                f"{len(parity.tokenizer_mismatches)} of {parity.tokenizer_texts} texts tokenized differently"
            )
            for fault in (*report.notes, *faults_of(parity, outtype)):
                run.say(f"  {path.name}: {fault}")
            place = str(path.relative_to(run.folder))
            files.append(ExportedFile(place, name, outtype, report.bytes, report.fallback_tensors, parity))
    write_result(folder / "export.json", ExportReport(run.command, files))
    return [folder]

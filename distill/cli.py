"""The commands. Heavy imports stay inside them, so that every --help answers at once."""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from distill.cli_decode import generate, profile
from distill.cli_recipe import check, train
from distill.cli_shared import (
    DEFAULT_RUNS,
    DraftOption,
    FormatOption,
    RunArgument,
    RunsOption,
    TargetOption,
    TextOption,
    bare_recipe,
    find_run,
    prepare,
    print_table,
    run_until,
)
from distill.cli_surgery import cut, transplant
from distill.errors import DataError, DistillError, RecipeError, RunError
from distill.processes import leave

app = typer.Typer(
    help="Make draft models for speculative decoding: cut from a donor, trained on a target, the speedup proven.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# Recent versions of typer raise the exceptions of a click of their own, older ones those of the package click.
ClickException: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


# ── commands ──


app.command()(transplant)
app.command()(cut)
app.command()(generate)
app.command()(profile)
app.command()(check)
app.command()(train)


@app.command("eval")
def evaluate(
    run: RunArgument = None,
    kl: Annotated[
        bool, typer.Option("--kl", help="KL both ways, total variation, agreement, the three acceptances.")
    ] = False,
    acceptance: Annotated[
        bool, typer.Option("--acceptance", help="Acceptance by position, from decoded rounds.")
    ] = False,
    target: TargetOption = None,
    draft: DraftOption = None,
    text: TextOption = None,
    temperature: Annotated[float, typer.Option(min=0, help="Bare pair: the sampler's temperature.")] = 1.0,
    prompts: Annotated[int, typer.Option(min=4, help="Bare pair: prompts taken from the text.")] = 32,
    runs: RunsOption = DEFAULT_RUNS,
    output: FormatOption = "md",
) -> None:
    """Measure a target and its draft: divergences and acceptance, with intervals. Both parts when neither is named."""
    kl, acceptance = (kl, acceptance) if kl or acceptance else (True, True)
    if target or draft:
        report = _evaluate_bare(target, draft, text, temperature, prompts, kl, acceptance)
    else:
        from distill.files import read_json

        recipe, found = find_run(run, runs)
        run_until(recipe, found, "eval")
        report = read_json(found.path("eval.json"))
    if not kl:
        report["domains"] = {}
    if not acceptance:
        report["positions"] = {}
    from distill.evaluation.stage import as_markdown

    rows = [
        {"domain": domain, "draft": name, "metric": metric, **value}
        for domain, drafts in report["domains"].items()
        for name, metrics in drafts.items()
        for metric, value in metrics.items()
        if isinstance(value, dict)
    ]
    rows += [
        {"domain": "rounds", "draft": name, "metric": f"accepted at {row['position']}", "mean": row["rate"],
         "low": row["low"], "high": row["high"]}
        for name, positions in report["positions"].items()
        for row in positions
    ]  # fmt: skip
    print_table(rows, as_markdown(report), report, output)


def _evaluate_bare(
    target: str | None,
    draft: str | None,
    text: list[Path] | None,
    temperature: float,
    prompts: int,
    kl: bool,
    acceptance: bool,
) -> dict[str, Any]:
    recipe = bare_recipe(target, draft, text)
    prepare(recipe)
    from distill.evaluation.bare import evaluate_bare
    from distill.models.pair import require_pair

    for reference in (recipe.target.model, recipe.draft.donor):
        if reference.endswith(".gguf"):
            raise DataError(f"{reference}: evaluation of GGUF files is not there yet", "give the Hugging Face folders")
    require_pair(recipe.target.model, recipe.draft.donor)
    from distill.corpus.prompts import cut_prompts
    from distill.corpus.sources import read_documents

    documents, _ = read_documents(recipe.corpus, needed=("report",))
    report = evaluate_bare(recipe, documents, cut_prompts, temperature, prompts, kl, acceptance)
    report["command"] = "distill " + " ".join(sys.argv[1:])
    from distill.files import without_nan

    found: dict[str, Any] = without_nan(report)
    return found


@app.command("export-gguf")
def export_gguf(
    model: Annotated[str | None, typer.Argument(metavar="[RUN|MODEL]", help="Run, or Hugging Face folder.")] = None,
    outtype: Annotated[
        list[str] | None, typer.Option("--outtype", help="f32, f16, bf16 or q8_0; may be repeated.")
    ] = None,
    folder: Annotated[Path | None, typer.Option("--to", help="Folder for the files (a run: its gguf folder).")] = None,
    runs: RunsOption = DEFAULT_RUNS,
) -> None:
    """Write GGUF files of a run's draft and target, or of any qwen2, qwen3 or llama folder."""
    kinds = outtype or ["f16", "q8_0"]
    known = ("f32", "f16", "bf16", "q8_0")
    for kind in kinds:
        if kind not in known:
            raise RecipeError(f"outtype `{kind}` is unknown", f"use {', '.join(known)}")
    from distill.export.writer import export_gguf as write

    if model is not None and (Path(model) / "config.json").exists():
        sources, place = {Path(model).resolve().name: Path(model)}, folder or Path(".")
    else:
        from distill.models.hugging_face import local_folder

        recipe, run = find_run(model, runs)
        run_until(recipe, run, "train")
        sources = {"draft": run.path("draft"), "target": local_folder(recipe.target.model)}
        place = folder or run.path("gguf", "extra")
    for name, source in sources.items():
        for kind in kinds:
            report = write(source, place / f"{name}-{kind}.gguf", kind)
            print(f"{report.path}  {report.bytes / 1e6:.1f} MB  {report.tensors} tensors"
                  + (f", {report.fallback_tensors} kept in f16" if report.fallback_tensors else ""))  # fmt: skip


@app.command()
def speedup(
    run: RunArgument = None,
    again: Annotated[bool, typer.Option("--again", help="Measure anew instead of showing what was measured.")] = False,
    verify_law: Annotated[
        bool, typer.Option("--verify-law", help="Instead: test that the decoder samples the target's own law.")
    ] = False,
    samples: Annotated[int, typer.Option(min=100, help="--verify-law: texts drawn per prompt and verifier.")] = 400,
    allow_lossy: Annotated[
        bool, typer.Option("--allow-lossy", help="Run the recipe's trials that change the target's law too (LOSSY).")
    ] = False,
    runs: RunsOption = DEFAULT_RUNS,
    output: FormatOption = "md",
) -> None:
    """Plain against speculative decoding, end to end, of a run's draft and target."""
    from distill.files import read_json
    from distill.run import Run

    recipe, found = find_run(run, runs)
    if verify_law:
        run_until(recipe, found, "train")
        from distill.benchmark.law import law_markdown, verify_run_law

        table = verify_run_law(recipe, found, samples)
        print_table(table["rows"], law_markdown(table), table, output)
        raise typer.Exit(0 if table["lawful"] else 1)
    if allow_lossy and not recipe.speedup.allow_lossy:
        recipe = recipe.model_copy(update={"speedup": recipe.speedup.model_copy(update={"allow_lossy": True})})
        found = Run(found.folder, recipe)
    run_until(recipe, found, "speedup", redo=["speedup"] if again else [])
    report = read_json(found.path("speedup.json"))
    from distill.benchmark.table import as_markdown, flat_rows

    print_table(flat_rows(report), as_markdown(report), report, output)


@app.command()
def report(run: RunArgument = None, runs: RunsOption = DEFAULT_RUNS) -> None:
    """Draw report.html and the model card of a run again, from what has been measured so far."""
    recipe, found = find_run(run, runs)
    if not found.path("draft").is_dir():
        raise RunError(f"{found.folder} has no trained draft yet", "run `distill train` on its recipe")
    from distill.report.stage import report as draw

    draw(recipe, found)
    print(found.path("report.html"))


@app.command("runs")
def list_runs(runs: RunsOption = DEFAULT_RUNS, output: FormatOption = "md") -> None:
    """List the runs: stages done, last change, size on disk."""
    from distill.pipeline import NAMES

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


def main() -> None:
    """Run a command: exit 0 done, 2 the user's to mend (one message), 1 a bug (with its traceback)."""
    try:
        result = app(standalone_mode=False)
        code = result if isinstance(result, int) else 0
        if code == 0:
            leave()
    except DistillError as error:
        print(f"distill: {error}", file=sys.stderr)
        code = 2
    except ClickException as error:
        error.show()
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        print("\ndistill: interrupted; the same command goes on from here", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception:
        traceback.print_exc()
        print("distill: this is a bug in distill; please report it with the lines above", file=sys.stderr)
        code = 1
    sys.exit(code)

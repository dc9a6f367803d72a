"""`distill eval`: divergences and acceptance of a run, or of any two models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from distill.commands.shared import (
    DEFAULT_RUNS,
    DraftOption,
    FormatOption,
    RunArgument,
    RunsOption,
    TargetOption,
    TextOption,
    find_run,
    prepare,
    print_table,
    run_until,
    standalone_recipe,
)
from distill.errors import DataError


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
    temperature: Annotated[float, typer.Option(min=0, help="Without a run: the sampler's temperature.")] = 1.0,
    prompts: Annotated[int, typer.Option(min=4, help="Without a run: prompts taken from the text.")] = 32,
    runs: RunsOption = DEFAULT_RUNS,
    output: FormatOption = "md",
) -> None:
    """Measure a target and its draft: divergences and acceptance, with intervals. Both parts when neither is named."""
    kl, acceptance = (kl, acceptance) if kl or acceptance else (True, True)
    if target or draft:
        report = _evaluate_standalone(target, draft, text, temperature, prompts, kl, acceptance)
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
        {
            "domain": "rounds",
            "draft": name,
            "metric": f"accepted at {row['position']}",
            "mean": row["rate"],
            "low": row["low"],
            "high": row["high"],
        }
        for name, positions in report["positions"].items()
        for row in positions
    ]
    print_table(rows, as_markdown(report), report, output)


def _evaluate_standalone(
    target: str | None,
    draft: str | None,
    text: list[Path] | None,
    temperature: float,
    prompts: int,
    kl: bool,
    acceptance: bool,
) -> dict[str, Any]:
    recipe = standalone_recipe(target, draft, text)
    prepare(recipe.threads)
    from distill.evaluation.standalone import evaluate_standalone
    from distill.models.pairs import require_pair

    for reference in (recipe.target.model, recipe.cut.donor):
        if reference.endswith(".gguf"):
            raise DataError(f"{reference}: evaluation of GGUF files is not there yet", "give the Hugging Face folders")
    require_pair(recipe.target.model, recipe.cut.donor)
    from distill.corpus.prompts import cut_prompts
    from distill.corpus.sources import read_documents

    documents, _ = read_documents(recipe.corpus, needed=("test",))
    report = evaluate_standalone(recipe, documents, cut_prompts, temperature, prompts, kl, acceptance)
    report["command"] = "distill " + " ".join(sys.argv[1:])
    from distill.files import without_nan

    found: dict[str, Any] = without_nan(report)
    return found

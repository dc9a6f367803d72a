"""`distill eval`: divergences and acceptance of a run, or of any two models."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from distill.results.evaluation_results import EvaluationReport


def evaluate(
    run: RunArgument = None,
    kl: Annotated[
        bool,
        typer.Option("--kl", help="KL in both directions, total variation, agreement, acceptance by each verifier."),
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
    """Measure a target and its draft: divergences and acceptance, with intervals. Both by default."""
    kl, acceptance = (kl, acceptance) if kl or acceptance else (True, True)
    from distill.evaluation.markdown import as_markdown
    from distill.files import without_nan
    from distill.results.evaluation_results import EvaluationReport, flat_rows
    from distill.results.serialise import as_json, read_result

    if target or draft:
        report = _evaluate_standalone(target, draft, text, temperature, prompts, kl, acceptance)
    else:
        recipe, found = find_run(run, runs)
        run_until(recipe, found, "eval")
        report = read_result(found.path("eval.json"), EvaluationReport)
    if not kl:
        report = replace(report, domains={})
    if not acceptance:
        report = replace(report, positions={}, tokens_per_round={})
    print_table(without_nan(flat_rows(report)), as_markdown(report), as_json(report), output)


def _evaluate_standalone(
    target: str | None,
    draft: str | None,
    text: list[Path] | None,
    temperature: float,
    prompts: int,
    kl: bool,
    acceptance: bool,
) -> EvaluationReport:
    recipe = standalone_recipe(target, draft, text)
    prepare(recipe.threads)
    from distill.evaluation.standalone import evaluate_standalone
    from distill.models.pairs import require_pair

    for reference in (recipe.target.model, recipe.cut.donor):
        if reference.endswith(".gguf"):
            raise DataError(f"{reference}: GGUF files cannot be evaluated yet", "give the Hugging Face folders")
    require_pair(recipe.target.model, recipe.cut.donor)
    from distill.corpus.prompts import cut_prompts
    from distill.corpus.sources import read_documents

    documents, _ = read_documents(recipe.corpus, needed=("test",))
    command = "distill " + " ".join(sys.argv[1:])
    return evaluate_standalone(recipe, documents, cut_prompts, temperature, prompts, kl, acceptance, command)

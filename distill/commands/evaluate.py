"""`distill eval`: divergences and acceptance of a run, or of any two models."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated

import typer

from distill.commands import shared
from distill.commands.gguf_options import require_used, takes_gguf_options
from distill.errors import RecipeError
from distill.files import without_nan
from distill.recipe import Gguf
from distill.results.serialise import as_json, read_result


@takes_gguf_options("target", "draft")
def evaluate(
    run: shared.RunArgument = None,
    kl: Annotated[
        bool,
        typer.Option("--kl", help="KL in both directions, total variation, agreement, acceptance by each verifier."),
    ] = False,
    acceptance: Annotated[
        bool, typer.Option("--acceptance", help="Acceptance by position, from decoded rounds.")
    ] = False,
    target: shared.TargetOption = None,
    draft: shared.DraftOption = None,
    text: shared.TextOption = None,
    temperature: Annotated[
        float, shared.number_option(min=0, max=100, help="Without a run: the sampler's temperature.")
    ] = 1.0,
    prompts: Annotated[int, typer.Option(min=4, help="Without a run: prompts taken from the text.")] = 32,
    threads: shared.ThreadsOption = None,
    runs: shared.RunsOption = shared.DEFAULT_RUNS,
    output: shared.FormatOption = "md",
    gguf: Gguf | None = None,
) -> None:
    """Measure a target and its draft: divergences and acceptance, with intervals. Both by default."""
    kl, acceptance = (kl, acceptance) if kl or acceptance else (True, True)
    from distill.evaluation.markdown import as_markdown
    from distill.results.evaluation_results import EvaluationReport, flat_rows

    if target or draft:
        if target is None or draft is None or not text:
            raise RecipeError(
                "a pair without a run needs --target, --draft and --text", "or name a run: `distill runs` lists them"
            )
        shared.prepare(threads)
        from distill import api
        from distill.models.conversion.importing import one_engine
        from distill.sampler import Sampler

        if gguf is not None:
            require_used(gguf, *one_engine(shared.local_reference(target), shared.local_reference(draft)))
        report = api.evaluate(
            target,
            draft,
            text,
            sampler=Sampler(temperature),
            prompts=prompts,
            kl=kl,
            acceptance=acceptance,
            threads=threads,
            gguf=gguf,
            command="distill " + " ".join(sys.argv[1:]),
        )
    else:
        if gguf is not None:
            raise RecipeError("a run is evaluated in PyTorch", "leave llama.cpp's options out, or give GGUF files")
        recipe, found = shared.find_run(run, runs)
        shared.run_until(recipe, found, "eval", threads=threads)
        report = read_result(found.path("eval.json"), EvaluationReport)
    if not kl:
        stored = None if report.stored is None else replace(report.stored, bounds={})
        report = replace(report, domains={}, stored=stored)
    if not acceptance:
        report = replace(report, positions={}, tokens_per_round={})
    shared.print_table(without_nan(flat_rows(report)), as_markdown(report), as_json(report), output)

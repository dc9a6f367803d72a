"""`distill eval`: divergences and acceptance of a run, or of any two models."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer

from distill.cli import shared
from distill.cli.shared import require_used, takes_gguf_options
from distill.errors import DataError, RecipeError
from distill.files import read_result
from distill.measuring.evaluation_results import SLICES, EvaluationReport
from distill.measuring.evaluation_tables import evaluation_blocks
from distill.progress import command_line
from distill.recipe import Gguf
from distill.recipe.measuring import CACHE_TYPES, OUTTYPES

CLASS = "class"  # of --by: of prompts rather than positions
OF_MODELS = ("temperature", "prompts", "text")  # a run has its own


@takes_gguf_options("target", "draft")
def evaluate(
    context: typer.Context,
    run: shared.RunArgument = None,
    kl: Annotated[bool, typer.Option("--kl", help="Divergences, and acceptance probability by verifier.")] = False,
    acceptance: Annotated[bool, typer.Option("--acceptance", help="Conditional acceptance of decoded rounds.")] = False,
    by: Annotated[list[str] | None, typer.Option(help="Acceptance probabilities by this slice or class alone.")] = None,
    outtype: Annotated[
        list[str] | None,
        typer.Option(help="Compare the draft in these GGUF types instead: acceptance, KL, size, speed."),
    ] = None,
    target_outtype: Annotated[list[str] | None, typer.Option(help="Types of a target that is a folder.")] = None,
    cache_type: Annotated[list[str] | None, typer.Option(help="Types of the draft's cache; by default f16.")] = None,
    target: Annotated[list[str] | None, typer.Option(help="Standalone pair: folder, hub name or GGUF file.")] = None,
    draft: Annotated[
        list[str] | None, typer.Option(help="Of the same kind; several are compared prompt by prompt.")
    ] = None,
    text: shared.TextOption = None,
    temperature: Annotated[float, shared.number_option(min=0, max=100, help="Standalone pair: of the sampler.")] = 1.0,
    prompts: Annotated[int, typer.Option(min=4, help="Without a run: prompts taken from the text.")] = 32,
    threads: shared.ThreadsOption = None,
    runs: shared.RunsOption = shared.DEFAULT_RUNS,
    output: shared.FormatOption = "md",
    gguf: Gguf | None = None,
) -> None:
    """Measure a target and its draft: divergences and acceptance, with intervals. Both by default; of several targets,
    drafts or types, divergences alone, and how they differ from the first by prompt."""
    shared.require_known("--by", by, [*SLICES, CLASS])
    shared.require_known("--outtype", outtype, OUTTYPES)
    shared.require_known("--target-outtype", target_outtype, OUTTYPES)
    shared.require_known("--cache-type", cache_type, CACHE_TYPES)
    shared.refuse_idle(
        context,
        (by, "kl acceptance", "does nothing beside --by, which shows acceptance by slice alone"),
        (target and draft, "runs", shared.NO_RUN),
    )
    typed = bool(target_outtype or outtype or cache_type)
    alone = not typed and len(target or ()) < 2 and len(draft or ()) < 2
    kl, acceptance = (kl, acceptance) if kl or acceptance else (True, alone)
    command = command_line(sys.argv)
    from distill.measuring.evaluation import Types, evaluate_types

    types = Types(target_outtype or (), outtype or (), cache_type or ())
    if target or draft:
        if run is not None or not (target and draft and text):
            what = "a pair without a run needs --target, --draft and --text"
            raise RecipeError(what, "or name a run alone: `distill runs` lists them")
        shared.prepare(threads)
        from distill import api
        from distill.gguf.importing import one_engine
        from distill.sampler import Sampler

        targets, drafts = ([shared.local_reference(model) for model in models] for models in (target, draft))
        if not typed:
            require_used(gguf, *one_engine(targets[0], drafts[0]))
        report = api.evaluate(
            targets,
            drafts,
            text,
            sampler=Sampler(temperature),
            prompts=prompts,
            kl=kl,
            acceptance=acceptance,
            types=types,
            threads=threads,
            gguf=gguf,
            command=command,
        )
    else:
        of_models = shared.first_given(context, OF_MODELS)
        if of_models is not None:
            raise RecipeError(
                f"{of_models} goes with --target and --draft; a run has its own sampler and test prompts",
                "leave it out, or give the run's models as a pair: --target TARGET --draft RUN/draft --text FILE",
            )
        if gguf is not None and not typed:
            raise RecipeError("a run is evaluated in PyTorch", "leave llama.cpp's options out, or give GGUF files")
        recipe, own_run = shared.find_run(run, runs)
        shared.run_until(recipe, own_run, "train" if typed else "eval", threads=threads)
        if typed:
            report = evaluate_types(recipe, own_run, types, threads, gguf, command, kl, acceptance)
        else:
            report = read_result(own_run.path("eval.json"), EvaluationReport)
    _print_report(report, kl, acceptance, by or [], output)


def _print_report(report: EvaluationReport, kl: bool, acceptance: bool, by: Sequence[str], output: str) -> None:
    """Print what was asked for of a report: some of its measures, or some slices alone.

    Raises DataError where none of these slices was measured.
    """
    if by:
        measured = {one.slice for one in report.slices} | ({CLASS} if report.classes else set())
        if not measured & {*by}:
            raise DataError(
                f"no acceptance probability by {' or '.join(by)} was measured: all positions are alike there",
                f"measured are {', '.join(sorted(measured)) or 'none'}",
            )
        report = replace(
            report,
            domains={},
            pairs={},
            positions={},
            tokens_per_round={},
            reliability={},
            classes=report.classes if CLASS in by else [],
            slices=[one for one in report.slices if one.slice in by],
        )
    if not kl:
        stored = None if report.stored is None else replace(report.stored, bounds={})
        report = replace(report, domains={}, pairs={}, stored=stored)
    if not acceptance:
        report = replace(report, positions={}, tokens_per_round={}, reliability={})
    shared.print_blocks(evaluation_blocks(report), report, output)

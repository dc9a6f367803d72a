"""`distill eval`: divergences and acceptance of a run, or of any two models."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distill.commands import shared
from distill.commands.gguf_options import require_used, takes_gguf_options
from distill.errors import DataError, RecipeError

if TYPE_CHECKING:
    from distill.recipe import Gguf
    from distill.results.evaluation_results import EvaluationReport


CLASS = "class"  # of --by: of prompts rather than positions


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
    by: Annotated[
        list[str] | None,
        typer.Option(
            "--by",
            metavar="SLICE",
            help="Show acceptance by this slice alone: token, depth, repetition, part, language, or class (of "
            "prompts); may be repeated.",
        ),
    ] = None,
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
    from distill.results.evaluation_results import SLICES

    unknown = next((name for name in by or () if name not in (CLASS, *SLICES)), None)
    if unknown is not None:
        raise RecipeError(f"--by {unknown} is no slice", f"use one of {', '.join([*SLICES, CLASS])}")
    from distill.evaluation.markdown import as_markdown
    from distill.files import without_nan
    from distill.results.evaluation_results import EvaluationReport, flat_rows
    from distill.results.serialise import as_json, read_result

    if target or draft:
        report = _evaluate_standalone(target, draft, text, temperature, prompts, kl, acceptance, threads, gguf)
    else:
        if gguf is not None:
            raise RecipeError("a run is evaluated in PyTorch", "leave llama.cpp's options out, or give GGUF files")
        recipe, found = shared.find_run(run, runs)
        shared.run_until(recipe, found, "eval", threads=threads)
        report = read_result(found.path("eval.json"), EvaluationReport)
    if by:
        _require_measured(report, by)
        report = replace(
            report,
            domains={},
            positions={},
            tokens_per_round={},
            classes=report.classes if CLASS in by else [],
            slices=[one for one in report.slices if one.slice in by],
        )
    if not kl:
        stored = None if report.stored is None else replace(report.stored, bounds={})
        report = replace(report, domains={}, stored=stored)
    if not acceptance:
        report = replace(report, positions={}, tokens_per_round={})
    shared.print_table(without_nan(flat_rows(report)), as_markdown(report), as_json(report), output)


def _require_measured(report: EvaluationReport, by: Sequence[str]) -> None:
    """Raise DataError where none of these slices was measured."""
    measured = {one.slice for one in report.slices} | ({CLASS} if report.classes else set())
    if not measured & {*by}:
        raise DataError(
            f"no acceptance by {' or '.join(by)} was measured: all positions are alike there, or the run was evaluated "
            f"before slices were; measured are {', '.join(sorted(measured)) or 'none'}",
            "evaluate the run again: distill train RECIPE --redo eval",
        )


def _evaluate_standalone(
    target: str | None,
    draft: str | None,
    text: list[Path] | None,
    temperature: float,
    prompts: int,
    kl: bool,
    acceptance: bool,
    threads: int | None,
    gguf: Gguf | None,
) -> EvaluationReport:
    if target is None or draft is None or not text:
        raise RecipeError(
            "a pair without a run needs --target, --draft and --text", "or name a run: `distill runs` lists them"
        )
    for path in text:
        if not path.exists():
            raise DataError(f"--text {path}: there is no such file or folder", "correct its path")
    shared.prepare(threads)
    from distill import api
    from distill.models.conversion.importing import one_engine
    from distill.sampler import Sampler

    if gguf is not None:
        require_used(gguf, *one_engine(shared.local_reference(target), shared.local_reference(draft)))
    command = "distill " + " ".join(sys.argv[1:])
    return api.evaluate(
        target,
        draft,
        text,
        sampler=Sampler(temperature=temperature),
        prompts=prompts,
        kl=kl,
        acceptance=acceptance,
        threads=threads,
        gguf=gguf,
        command=command,
    )

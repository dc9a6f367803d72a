"""`distill eval`: divergences and acceptance of a run, or of any two models."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distill.commands import shared
from distill.commands.gguf_options import require_used, takes_gguf_options
from distill.errors import DataError, RecipeError
from distill.progress import command_line
from distill.recipe import Gguf
from distill.recipe.gguf import CACHE_TYPES, OUTTYPES
from distill.results.evaluation_results import SLICES, EvaluationReport
from distill.results.evaluation_tables import evaluation_blocks
from distill.results.serialise import read_result

if TYPE_CHECKING:
    from distill.evaluation.standalone import PromptedPair

CLASS = "class"  # of --by: of prompts rather than positions
OF_MODELS = ("temperature", "prompts", "text")  # a run has its own


@takes_gguf_options("target", "draft")
def evaluate(
    context: typer.Context,
    run: shared.RunArgument = None,
    kl: Annotated[
        bool,
        typer.Option("--kl", help="KL in both directions, total variation, agreement, acceptance by each verifier."),
    ] = False,
    acceptance: Annotated[
        bool,
        typer.Option(
            "--acceptance",
            help="Acceptance by position, from decoded rounds, and whether the draft's probabilities can be trusted.",
        ),
    ] = False,
    by: Annotated[
        list[str] | None,
        typer.Option(
            "--by",
            metavar="SLICE",
            help="Show only acceptance by this slice: token, depth, repetition, part, language, or class (of "
            "prompts); may be repeated.",
        ),
    ] = None,
    outtype: Annotated[
        list[str] | None,
        typer.Option(
            "--outtype",
            help="Compare GGUF types instead: the draft as f16, q8_0, q4_0 …; acceptance, KL, size, milliseconds and "
            "predicted tokens per second. May be repeated.",
        ),
    ] = None,
    target_outtype: Annotated[
        list[str] | None,
        typer.Option("--target-outtype", help="With --outtype: types of the target; a GGUF file stays as it is."),
    ] = None,
    cache_type: Annotated[
        list[str] | None,
        typer.Option("--cache-type", help="With --outtype: types of the draft's cache; f16 if left out."),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            help="Standalone pair: target as Hugging Face folder, hub name or GGUF file. Several: does the draft serve "
            "each of them as well?",
        ),
    ] = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            "--draft", help="Standalone pair: draft, of the same kind as the target. Several are compared by prompt."
        ),
    ] = None,
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
    shared.require_format(output)
    kl, acceptance = (kl, acceptance) if kl or acceptance else (True, True)
    kinds = {"--outtype": outtype, "--target-outtype": target_outtype, "--cache-type": cache_type}
    _check_options(context, kinds, by or [], gguf)
    pairs = _named_pairs(target, draft, text) if target or draft else []
    command = command_line(sys.argv)
    if pairs or any(kinds.values()):
        shared.prepare(threads)
    if len(pairs) > 1:
        if by or any(kinds.values()):
            what = "several models are compared over all positions, as they are"
            raise RecipeError(what, "give one target and draft")
        from distill.evaluation import comparison
        from distill.sampler import Sampler

        compared = comparison.compare(pairs, text or (), Sampler(temperature), prompts, command, threads, gguf)
        shared.print_result(compared, comparison.as_markdown(compared), comparison.flat_rows(compared), output)
    elif any(kinds.values()):
        from distill.evaluation import types

        pair = _prompted_pair(pairs, text or [], temperature, prompts if pairs else None, run, runs, threads)
        table = types.measure_types(
            pair, outtype or (), target_outtype or (), cache_type or ("f16",), command, gguf or Gguf(), threads
        )
        shared.print_result(table, types.as_markdown(table), types.flat_rows(table), output)
    else:
        if pairs:
            from distill import api
            from distill.models.conversion.importing import one_engine
            from distill.sampler import Sampler

            if gguf is not None:
                require_used(gguf, *one_engine(*pairs[0]))
            report = api.evaluate(
                *pairs[0],
                text or (),
                sampler=Sampler(temperature),
                prompts=prompts,
                kl=kl,
                acceptance=acceptance,
                threads=threads,
                gguf=gguf,
                command=command,
            )
        else:
            if gguf is not None:
                raise RecipeError("a run is evaluated in PyTorch", "leave llama.cpp's options out, or give GGUF files")
            recipe, own_run = shared.find_run(run, runs)
            shared.run_until(recipe, own_run, "eval", threads=threads)
            report = read_result(own_run.path("eval.json"), EvaluationReport)
        _print_report(report, kl, acceptance, by or [], output)


def _check_options(
    context: typer.Context, kinds: Mapping[str, Sequence[str] | None], by: Sequence[str], gguf: Gguf | None
) -> None:
    """Raise RecipeError for names that do not exist, and for options that do not go together."""
    given = context.params
    unknown = next((name for name in by if name not in (CLASS, *SLICES)), None)
    if unknown is not None:
        raise RecipeError(f"--by {unknown} is no slice", f"use one of {', '.join([*SLICES, CLASS])}")
    of_models = None if given["target"] or given["draft"] else shared.first_given(context, OF_MODELS)
    if of_models is not None:
        raise RecipeError(
            f"{of_models} goes with --target and --draft; a run has its own sampler and test prompts",
            "leave it out, or give the run's models as a pair: --target TARGET --draft RUN/draft --text FILE",
        )
    if given["run"] is not None and (given["target"] or given["draft"]):
        raise RecipeError("a run was given beside --target or --draft", "name a run, or a pair of models")
    of_all = shared.first_given(context, ("kl", "acceptance", "by")) if any(kinds.values()) else None
    if of_all is not None:
        option = next(name for name, values in kinds.items() if values)
        raise RecipeError(f"{of_all} and {option} were given together", "compare types, or look at one draft closely")
    for option, names in kinds.items():
        known = CACHE_TYPES if option == "--cache-type" else OUTTYPES
        unknown = next((name for name in names or () if name not in known), None)
        if unknown is not None:
            raise RecipeError(f"{option} {unknown} is unknown", f"use one of {', '.join(known)}")


def _named_pairs(targets: list[str] | None, drafts: list[str] | None, text: list[Path] | None) -> list[tuple[str, str]]:
    """The pairs without a run: of one target with each draft, or of each target with one draft.

    RecipeError where a model or the text is missing, or several of both are given.
    """
    if not targets or not drafts or not text:
        raise RecipeError(
            "a pair without a run needs --target, --draft and --text", "or name a run: `distill runs` lists them"
        )
    if len(targets) > 1 and len(drafts) > 1:
        raise RecipeError(
            f"{len(targets)} targets and {len(drafts)} drafts were given", "give several of the one or of the other"
        )
    return [(shared.local_reference(big), shared.local_reference(small)) for big in targets for small in drafts]


def _prompted_pair(
    pairs: list[tuple[str, str]],
    text: list[Path],
    temperature: float,
    count: int | None,
    run: str | None,
    runs: Path,
    threads: int | None,
) -> PromptedPair:
    """The pair that is named, or that of a run, on `count` prompts (None: as many as
    the recipe says)."""
    from distill.evaluation.standalone import of_models, of_run
    from distill.sampler import Sampler

    if pairs:
        assert count is not None, "no recipe says how many"
        return of_models(*pairs[0], text, count, Sampler(temperature))
    recipe, own_run = shared.find_run(run, runs)
    shared.run_until(recipe, own_run, "train", threads=threads)
    return of_run(recipe, own_run, count or recipe.eval.prompts)


def _print_report(report: EvaluationReport, kl: bool, acceptance: bool, by: Sequence[str], output: str) -> None:
    """Print what was asked for of a report: some of its measures, or some slices alone.

    Raises DataError where none of these slices was measured.
    """
    if by:
        measured = {one.slice for one in report.slices} | ({CLASS} if report.classes else set())
        if not measured & {*by}:
            raise DataError(
                f"no acceptance by {' or '.join(by)} was measured: all positions are alike there, or the run was "
                f"evaluated before slices were; measured are {', '.join(sorted(measured)) or 'none'}",
                "evaluate the run again: distill train RECIPE --redo eval",
            )
        report = replace(
            report,
            domains={},
            positions={},
            tokens_per_round={},
            reliability={},
            classes=report.classes if CLASS in by else [],
            slices=[one for one in report.slices if one.slice in by],
        )
    if not kl:
        stored = None if report.stored is None else replace(report.stored, bounds={})
        report = replace(report, domains={}, stored=stored)
    if not acceptance:
        report = replace(report, positions={}, tokens_per_round={}, reliability={})
    shared.print_blocks(evaluation_blocks(report), report, output)

"""`distill eval`: divergences and acceptance of a run, or of any two models."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from distill.commands import shared
from distill.commands.gguf_options import require_used, takes_gguf_options
from distill.errors import DataError, RecipeError
from distill.files import without_nan
from distill.recipe import Evaluate, Gguf
from distill.recipe.gguf import CACHE_TYPES, OUTTYPES
from distill.results.evaluation_results import SLICES, EvaluationReport
from distill.results.serialise import as_json, read_result

CLASS = "class"  # of --by: of prompts rather than positions
OF_MODELS = ("temperature", "prompts", "text")  # a run has its own
NOT_OF_PARITY = ("kl", "acceptance", "by", "outtype", "target_outtype", "cache_type", "prompts")


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
    parity: Annotated[
        bool,
        typer.Option(
            "--parity",
            help="Score the same tokens in transformers, the training's loss, our decoder, llama.cpp and a server: one "
            "acceptance, or where it starts to differ.",
        ),
    ] = False,
    url: Annotated[
        str | None, typer.Option("--url", help="With --parity: a llama-server that serves the target.")
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
    kl, acceptance = (kl, acceptance) if kl or acceptance else (True, True)
    unknown = next((name for name in by or () if name not in (CLASS, *SLICES)), None)
    if unknown is not None:
        raise RecipeError(f"--by {unknown} is no slice", f"use one of {', '.join([*SLICES, CLASS])}")
    from distill.evaluation.markdown import as_markdown
    from distill.results.evaluation_results import flat_rows

    given = None if target or draft else shared.first_given(context, OF_MODELS)
    if given is not None:
        raise RecipeError(
            f"{given} goes with --target and --draft; a run has its own sampler and test prompts",
            "leave it out, or give the run's models as a pair: --target TARGET --draft RUN/draft --text FILE",
        )
    if parity or url is not None:
        if not parity or gguf is not None or shared.first_given(context, NOT_OF_PARITY) is not None:
            what = "--parity goes with a run or a pair, --url, --text, --temperature and --threads alone"
            raise RecipeError(what, "leave the other options out")
        _print_parity(run, runs, target, draft, text, temperature, threads, url, output)
        return
    if target and draft and len(target) + len(draft) > 2:
        if outtype or target_outtype or cache_type or by:
            raise RecipeError(
                "several models are compared over all positions, as they are", "give one target and draft"
            )
        _compare_drafts(target, draft, text, temperature, prompts, threads, gguf, output)
        return
    if outtype or target_outtype or cache_type:
        kinds = (outtype or [], target_outtype or [], cache_type or ["f16"])
        _compare_types(run, runs, target, draft, text, kinds, temperature, prompts, threads, gguf, output)
        return
    if target or draft:
        ((big, small),) = _named_pairs(target, draft, text)
        shared.prepare(threads)
        from distill import api
        from distill.models.conversion.importing import one_engine
        from distill.sampler import Sampler

        if gguf is not None:
            require_used(gguf, *one_engine(big, small))
        report = api.evaluate(
            big,
            small,
            text or (),
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
    if by:
        _require_measured(report, by)
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
    shared.print_table(without_nan(flat_rows(report)), as_markdown(report), as_json(report), output)


def _print_parity(
    run: str | None,
    runs: Path,
    target: list[str] | None,
    draft: list[str] | None,
    text: list[Path] | None,
    temperature: float,
    threads: int | None,
    url: str | None,
    output: str,
) -> None:
    """Print the ways in which a run's pair, or any pair, is scored."""
    shared.require_format(output)
    shared.prepare(threads)
    from distill.commands.parity import measure_parity, of_models, of_run
    from distill.evaluation.parity import as_markdown, flat_rows

    if target or draft:
        pairs = _named_pairs(target, draft, text)
        if len(pairs) > 1:
            raise RecipeError("--parity is of one pair", "give one target and draft")
        pair = of_models(*pairs[0], text or (), temperature, threads)
    else:
        recipe, own_run = shared.find_run(run, runs)
        shared.run_until(recipe, own_run, "train", threads=threads)
        pair = of_run(recipe, own_run, threads)
    table = measure_parity(pair, url)
    shared.print_table(without_nan(flat_rows(table)), as_markdown(table), as_json(table), output)


def _require_measured(report: EvaluationReport, by: Sequence[str]) -> None:
    """Raise DataError where none of these slices was measured."""
    measured = {one.slice for one in report.slices} | ({CLASS} if report.classes else set())
    if not measured & {*by}:
        raise DataError(
            f"no acceptance by {' or '.join(by)} was measured: all positions are alike there, or the run was evaluated "
            f"before slices were; measured are {', '.join(sorted(measured)) or 'none'}",
            "evaluate the run again: distill train RECIPE --redo eval",
        )


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


def _compare_drafts(
    targets: list[str],
    drafts: list[str],
    text: list[Path] | None,
    temperature: float,
    count: int,
    threads: int | None,
    gguf: Gguf | None,
    output: str,
) -> None:
    """Print the comparison of several drafts, or of one draft on several targets."""
    shared.require_format(output)
    pairs = _named_pairs(targets, drafts, text)
    shared.prepare(threads)
    from distill.evaluation.comparison import as_markdown, compare, flat_rows
    from distill.evaluation.standalone import corpus_of
    from distill.sampler import Sampler

    command = "distill " + " ".join(sys.argv[1:])
    found = compare(pairs, corpus_of(text or ()), Sampler(temperature), count, command, threads, gguf)
    shared.print_table(without_nan(flat_rows(found)), as_markdown(found), as_json(found), output)


def _compare_types(
    run: str | None,
    runs: Path,
    target: list[str] | None,
    draft: list[str] | None,
    text: list[Path] | None,
    kinds: tuple[list[str], list[str], list[str]],
    temperature: float,
    count: int,
    threads: int | None,
    gguf: Gguf | None,
    output: str,
) -> None:
    """Print the table of GGUF types, of a run or of any two models."""
    shared.require_format(output)
    outtypes, target_outtypes, caches = ([*dict.fromkeys(own)] for own in kinds)
    for name, own, known in (
        ("--outtype", outtypes, OUTTYPES),
        ("--target-outtype", target_outtypes, OUTTYPES),
        ("--cache-type", caches, CACHE_TYPES),
    ):
        unknown = next((kind for kind in own if kind not in known), None)
        if unknown is not None:
            raise RecipeError(f"{name} {unknown} is unknown", f"use one of {', '.join(known)}")
    shared.prepare(threads)
    from distill.evaluation.standalone import corpus_of, prompts_of
    from distill.evaluation.types import as_markdown, files_of_types, flat_rows, measure_types
    from distill.models.pairs import require_pair
    from distill.sampler import Sampler
    from distill.texts import read_prompts

    if target or draft:
        ((big, small),) = _named_pairs(target, draft, text)
        assert text is not None
        require_pair(big, small)
        settings, sampler, written = Evaluate(), Sampler(temperature=temperature), None
        corpus = corpus_of(text)
        found = prompts_of(big, corpus, count, corpus.block).measured
    else:
        recipe, own_run = shared.find_run(run, runs)
        shared.run_until(recipe, own_run, "train", threads=threads)
        big, small, written = recipe.target.model, str(own_run.path("draft")), own_run.path("gguf")
        settings, sampler = recipe.eval, Sampler.of(recipe.sampler)
        found = read_prompts(own_run, "test")[: settings.prompts]
    for model, own, name in ((big, target_outtypes, "--target-outtype"), (small, outtypes, "--outtype")):
        if model.endswith(".gguf") and own:
            raise RecipeError(f"{model} has its types already", f"leave {name} out, or give the folder")
    with tempfile.TemporaryDirectory() as scratch:
        targets = files_of_types(big, target_outtypes or ["f16"], Path(scratch), "target", written)
        drafts = files_of_types(small, outtypes or ["f16"], Path(scratch), "draft", written)
        prompts = {prompt.id: prompt.ids for prompt in found}
        command = "distill " + " ".join(sys.argv[1:])
        table = measure_types(targets, drafts, caches, prompts, sampler, settings, command, gguf, threads)
    shared.print_table(flat_rows(table), as_markdown(table), as_json(table), output)

"""`distill eval`: divergences and acceptance of a run, or of any two models."""

from __future__ import annotations

import sys
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
    if not kl:
        stored = None if report.stored is None else replace(report.stored, bounds={})
        report = replace(report, domains={}, stored=stored)
    if not acceptance:
        report = replace(report, positions={}, tokens_per_round={})
    shared.print_table(without_nan(flat_rows(report)), as_markdown(report), as_json(report), output)


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
    from distill.recipe import Corpus, PyTorch, Source, Target

    references = shared.local_reference(target), shared.local_reference(draft)
    for path in text:
        if not path.exists():
            raise DataError(f"--text {path}: there is no such file or folder", "correct its path")
    shared.prepare(threads)
    from distill.evaluation.standalone import evaluate_standalone
    from distill.models.conversion.importing import one_engine
    from distill.models.loaded import load_pair
    from distill.models.pairs import require_pair
    from distill.sampler import Sampler

    require_pair(*references)
    references = one_engine(*references)
    require_used(gguf, *references)
    sources = [
        Source(kind="tree", path=str(path.resolve()), pattern="**/*", split="test")
        if path.is_dir()
        else Source(kind="text", path=str(path.resolve()), split="test")
        for path in text
    ]
    command = "distill " + " ".join(sys.argv[1:])
    corpus, sampler = Corpus(sources=tuple(sources)), Sampler(temperature=temperature)
    in_torch = not references[0].endswith(".gguf")
    # The layers of the models that decode are laid out later: blocks are read without.
    pytorch = PyTorch(prepack=False) if in_torch else PyTorch()
    size = None if in_torch else corpus.block
    with load_pair(
        Target(model=references[0]), references[1], tokens=size, threads=threads, gguf=gguf, pytorch=pytorch
    ) as pair:
        return evaluate_standalone(pair, corpus, sampler, prompts, kl, acceptance, command)

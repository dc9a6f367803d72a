"""`distill eval`: divergences and acceptance; `distill speedup`: plain against speculative decoding. Of a run, or of
any two models."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from distill.cli import shared
from distill.errors import RecipeError
from distill.files import is_gguf, read_result
from distill.measuring.evaluation_results import EvaluationReport, evaluation_blocks
from distill.progress import command_line
from distill.recipe import Configuration, Gguf, PyTorch, Recipe
from distill.recipe.measuring import OUTTYPES
from distill.run import Run

# ── `distill eval` ──


def evaluate(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN | TARGET DRAFT...]",
            help="A run (by default the newest), or models: folders, hub names or GGUF files; drafts are compared.",
        ),
    ] = None,
    kl: Annotated[bool, typer.Option("--kl", help="Divergences, and acceptance probability by verifier.")] = False,
    acceptance: Annotated[bool, typer.Option("--acceptance", help="Conditional acceptance of decoded rounds.")] = False,
    types: Annotated[
        str | None,
        typer.Option(help=f"Compare the draft in these GGUF types, with commas: {shared.FILE_TYPES}."),
    ] = None,
    prompts: shared.PromptsOption = None,
    temperature: Annotated[
        float | None, shared.number_option(min=0, max=100, help="Models: of the sampler; by default 1.")
    ] = None,
    count: Annotated[int | None, typer.Option(min=4, help="Models: the number of prompts; by default 32.")] = None,
    threads: shared.ThreadsOption = None,
    runs: shared.RunsOption = shared.DEFAULT_RUNS,
    output: shared.FormatOption = "md",
    llama: shared.LlamaOption = None,
    llama_draft: shared.LlamaDraftOption = None,
) -> None:
    """Measure a target and its draft: divergences and acceptance, with intervals. Both by default; of several
    drafts or types, divergences alone, and how they differ from the first by prompt."""
    models = shared.models_of(words, runs, most=64)
    command = command_line(sys.argv)
    from distill.measuring.evaluation import evaluate_types

    kinds = () if types is None else tuple(part.strip() for part in types.split(","))
    shared.require_known("--types", kinds, OUTTYPES)
    alone = not kinds and len(models) < 3
    kl, acceptance = (kl, acceptance) if kl or acceptance else (True, alone)
    if models:
        if len(models) < 2 or not prompts:
            raise RecipeError(
                "models need TARGET, DRAFT and --prompts FILE", "or name a run: `distill runs` lists them"
            )
        shared.prepare(threads)
        from distill import api
        from distill.sampler import Sampler

        report = api.evaluate(
            models[0],
            models[1:],
            prompts,
            sampler=Sampler(1.0 if temperature is None else temperature),
            prompts=count or 32,
            kl=kl,
            acceptance=acceptance,
            types=kinds,
            threads=threads,
            gguf=shared.gguf_of([] if kinds else models[:2], llama, llama_draft),
            command=command,
        )
    else:
        if any(value is not None for value in (prompts, temperature, count)):
            raise RecipeError(
                "--prompts, --temperature and --count are for models: a run has its own prompts and sampler",
                "give the run's models: TARGET RUN/draft --prompts FILE",
            )
        gguf = shared.gguf_of([], llama, llama_draft)
        if gguf is not None and not kinds:
            raise RecipeError("a run is evaluated in PyTorch", "leave llama.cpp's options out, or give GGUF files")
        recipe, own_run = shared.find_run(words[0] if words else None, runs)
        shared.run_until(recipe, own_run, "train" if kinds else "eval", threads=threads)
        if kinds:
            report = evaluate_types(recipe, own_run, kinds, threads, gguf, command, kl, acceptance)
        else:
            report = read_result(own_run.path("eval.json"), EvaluationReport)
    _print_report(report, kl, acceptance, output)


def _print_report(report: EvaluationReport, kl: bool, acceptance: bool, output: str) -> None:
    """Print what was asked for of a report."""
    if not kl:
        stored = None if report.stored is None else replace(report.stored, bounds={})
        report = replace(report, domains={}, differences={}, stored=stored)
    if not acceptance:
        report = replace(report, positions={}, tokens_per_round={})
    shared.print_blocks(evaluation_blocks(report), report, output)


# ── `distill speedup` ──


def speedup(
    words: shared.PairArgument = None,
    prompts: shared.PromptsOption = None,
    count: Annotated[int | None, shared.number_option(min=2, help="Most prompts; by default 12.")] = None,
    prompt_tokens: Annotated[
        int | None, shared.number_option(min=2, help="Tokens of a prompt that is cut from text; by default 64.")
    ] = None,
    tokens: Annotated[int | None, shared.number_option(min=8, help="Most new tokens a prompt; by default 96.")] = None,
    lengths: Annotated[str | None, typer.Option(help="Fixed draft lengths; 0: none; by default 1,2,4,8.")] = None,
    configuration: Annotated[
        list[str] | None,
        typer.Option(
            "--configuration",
            "-C",
            metavar="K=V,...",
            help=f"Another, such as drafter=tree,nodes=12; may be repeated: {shared.CONFIGURED}",
        ),
    ] = None,
    sampler: shared.SamplerOption = None,
    seed: Annotated[int | None, shared.number_option(min=0, help="Seed of all draws; by default 0.")] = None,
    table: shared.TableOption = None,
    dtype: Annotated[str | None, typer.Option(help=shared.DTYPE_HELP)] = None,
    pytorch: shared.PyTorchOption = None,
    allow_lossy: shared.LossyOption = False,
    threads: shared.ThreadsOption = None,
    runs: shared.RunsOption = shared.DEFAULT_RUNS,
    output: shared.FormatOption = "md",
    llama: shared.LlamaOption = None,
    llama_draft: shared.LlamaDraftOption = None,
) -> None:
    """Plain against speculative decoding, end to end: of a run on its test prompts (RUN), of a run on your prompts (RUN
    --prompts FILE), or of any models (TARGET [DRAFT] --prompts FILE)."""
    models = shared.models_of(words, runs)
    name = words[0] if words and not models else None
    if not prompts:
        of_prompts = (count, prompt_tokens, tokens, lengths, configuration, sampler, seed, table, dtype, pytorch)
        options = (*of_prompts, threads, llama, llama_draft, allow_lossy or None)
        if models or any(value is not None for value in options):
            raise RecipeError(
                "nothing to measure on: --prompts is missing",
                "add --prompts FILE; of a run alone, its recipe sets what is measured (`distill train "
                "RUN/config.yaml KEY=VALUE --until speedup`)",
            )
        _of_run(name, runs, output)
        return
    swept = sorted({n for n in shared.numbers(lengths or "1,2,4,8", "--lengths", int, "1,2,4") if n})
    device, chat, own = "auto", None, PyTorch()
    if models:
        gguf = shared.gguf_of(models, llama, llama_draft)
    else:
        asked = shared.gguf_of([], llama, llama_draft)
        folders = any(value is not None for value in (dtype, pytorch))
        recipe, found, pair, type_of_run = _pair_of(name, runs, asked, folders)
        models, dtype, device, chat = list(pair), dtype or type_of_run, recipe.device, recipe.chat
        gguf = shared.merged(recipe.gguf, asked) if is_gguf(pair[0]) else None
        threads, own = threads or recipe.threads, PyTorch() if is_gguf(pair[0]) else recipe.pytorch
        table = table or (found.folder if found.path("table").is_dir() else None)
    shared.prepare(threads)
    from distill import api
    from distill.measuring.speedup_tables import speedup_blocks

    report = api.measure_speedup(
        models[0],
        models[1] if len(models) > 1 else None,
        prompts,
        lengths=swept,
        configurations=[shared.keys_of(Configuration, one, "--configuration") for one in configuration or ()],
        sampler=shared.sampler_of(sampler),
        count=12 if count is None else count,
        tokens=96 if tokens is None else tokens,
        prompt_tokens=64 if prompt_tokens is None else prompt_tokens,
        dtype=dtype or "float32",
        seed=seed or 0,
        device=device,
        threads=threads,
        gguf=gguf,
        pytorch=shared.pytorch_of(pytorch, own, models),
        chat=chat,
        table=table,
        allow_lossy=allow_lossy,
        command=command_line(sys.argv),
    )
    shared.print_blocks(speedup_blocks(report), report, output)


def _pair_of(
    name: str | None, runs: Path, gguf: Gguf | None, folders: bool
) -> tuple[Recipe, Run, tuple[str, str], str]:
    """A run's recipe, its target and trained draft, and the type to load them in: its GGUF files where llama.cpp's
    options are given, or where they are measured in it and its target is one, or PyTorch is not; else, and where
    options of `folders` are given, its folders. RunError for a run that lacks them.
    """
    recipe, found = shared.find_run(name, runs)
    shared.require_draft(found)
    measured = set(recipe.speedup.backends)
    served = is_gguf(recipe.target.model) and recipe.speedup.files and not found.outdated("export")
    if gguf is None and recipe.target.load and "pytorch" in measured and (folders or not served):
        return recipe, found, (recipe.target.model, str(found.path("draft"))), recipe.target.dtype
    from distill.cli.serve import files_of_run

    timed = recipe.speedup.outtype if recipe.target.load and recipe.speedup.files else None
    files = files_of_run(found, timed, required=True)
    return recipe, found, (str(files.target), str(files.draft)), "float32"


def _of_run(name: str | None, runs: Path, output: str) -> None:
    recipe, found = shared.find_run(name, runs)
    shared.run_until(recipe, found, "speedup")
    from distill.measuring.speedup_results import SpeedupReport
    from distill.measuring.speedup_tables import speedup_blocks

    report = read_result(found.path("speedup.json"), SpeedupReport)
    shared.print_blocks(speedup_blocks(report), report, output)

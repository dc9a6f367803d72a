"""`distill eval`: divergences and acceptance; `distill speedup`: plain against speculative decoding. Of a run, or of
any two models."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from distill.cli import shared
from distill.cli.shared import merged, require_used, section_options, takes, takes_gguf_options, takes_sampler
from distill.errors import RecipeError
from distill.files import read_result, write_result
from distill.measuring.evaluation_results import EvaluationReport, evaluation_blocks
from distill.progress import command_line
from distill.recipe import Configuration, Gguf, PyTorch, Recipe, SamplerSettings, parse_section
from distill.recipe.measuring import CACHE_TYPES, OUTTYPES
from distill.recipe.recipe import read_yaml
from distill.run import Run

# ── `distill eval` ──

OF_MODELS = ("temperature", "prompts", "text")  # a run has its own


@takes_gguf_options("target", "draft")
def evaluate(
    context: typer.Context,
    run: shared.RunArgument = None,
    kl: Annotated[bool, typer.Option("--kl", help="Divergences, and acceptance probability by verifier.")] = False,
    acceptance: Annotated[bool, typer.Option("--acceptance", help="Conditional acceptance of decoded rounds.")] = False,
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
    shared.require_known("--outtype", outtype, OUTTYPES)
    shared.require_known("--target-outtype", target_outtype, OUTTYPES)
    shared.require_known("--cache-type", cache_type, CACHE_TYPES)
    shared.refuse_idle(
        context,
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
    _print_report(report, kl, acceptance, output)


def _print_report(report: EvaluationReport, kl: bool, acceptance: bool, output: str) -> None:
    """Print what was asked for of a report."""
    if not kl:
        stored = None if report.stored is None else replace(report.stored, bounds={})
        report = replace(report, domains={}, pairs={}, stored=stored)
    if not acceptance:
        report = replace(report, positions={}, tokens_per_round={}, calibration_error={})
    shared.print_blocks(evaluation_blocks(report), report, output)


# ── `distill speedup` ──

PAIR = "Any pair, without a run"
OF_FOLDERS = "dtype static compile draft_device draft_weights prepack"  # options that PyTorch alone takes
# Options of pairs without a run, in a group of their own in the help; and those that take a finite number.
pair_option = partial(typer.Option, rich_help_panel=PAIR)
pair_number = partial(shared.number_option, rich_help_panel=PAIR)


@takes_gguf_options("target", "draft")
@takes(
    "pytorch", section_options(PyTorch, "static compile draft_device draft_weights prepack", panel=PAIR, defaults=False)
)
@takes("fixed", section_options(Configuration, "drafter verifier", panel=PAIR, words="For the fixed lengths: "))
@takes_sampler(PAIR)
def speedup(
    context: typer.Context,
    run: shared.RunArgument = None,
    allow_lossy: Annotated[
        bool, typer.Option("--allow-lossy", help="Also run what changes the target's distribution (LOSSY).")
    ] = False,
    target: Annotated[str | None, pair_option(help="Target: Hugging Face folder, hub name or GGUF file.")] = None,
    draft: Annotated[str | None, pair_option(help="Draft: of the same kind as the target.")] = None,
    prompts: Annotated[list[Path] | None, pair_option(help="Text or records (docs/prompts.md); repeatable.")] = None,
    count: Annotated[int, pair_number(min=2, help="Maximum number of prompts.")] = 12,
    prompt_tokens: Annotated[int, pair_number(min=2, help="Tokens of a prompt that is cut from text.")] = 64,
    tokens: Annotated[int, pair_number(min=8, help="Maximum new tokens after each prompt.")] = 96,
    lengths: Annotated[str, pair_option(help="Fixed draft lengths, separated by commas; 0: none.")] = "1,2,4,8",
    configuration: Annotated[
        list[str] | None,
        pair_option(help="Another configuration, in a recipe's words: '{drafter: tree, nodes: 12}'; may be repeated."),
    ] = None,
    dtype: Annotated[str, pair_option(help=shared.DTYPE_HELP)] = "float32",
    seed: Annotated[int, pair_number(min=0, help="Seed of all draws.")] = 0,
    table: Annotated[
        Path | None, pair_option(help="For drafter table: a run, or a file, with n-grams of the target.")
    ] = None,
    to: Annotated[Path | None, pair_option(help="Also write all that was measured to this file, as JSON.")] = None,
    threads: shared.ThreadsOption = None,
    runs: shared.RunsOption = shared.DEFAULT_RUNS,
    output: shared.FormatOption = "md",
    *,
    sampler: SamplerSettings,
    fixed: dict[str, Any],
    pytorch: dict[str, Any],
    gguf: Gguf | None,
) -> None:
    """Plain against speculative decoding, end to end: of a run on its test prompts (RUN), of a run on your prompts (RUN
    --prompts FILE), or of any pair (--target, --draft, --prompts)."""
    if target is None and draft is None and not prompts:
        of_pair = [str(one.name) for one in context.command.params if getattr(one, "rich_help_panel", None) == PAIR]
        if (given_option := shared.first_given(context, of_pair)) is not None:
            raise RecipeError(
                f"{given_option} was given without prompts",
                "add --prompts FILE; what is measured of a run alone is set by its recipe",
            )
        _of_run(run, runs, allow_lossy, threads, gguf, output)
        return
    swept = sorted({length for length in shared.numbers(lengths, "--lengths", int, "1,2,4") if length})
    shared.refuse_idle(
        context,
        (run is None, "runs", shared.NO_RUN),
        (not swept, "drafter verifier", "is for the fixed lengths, and --lengths names none"),
    )
    own: Recipe | None = None  # of a run, whose settings hold where no option says otherwise
    if run is not None:
        given_type = dtype if shared.first_given(context, ["dtype"]) else None
        folders = shared.first_given(context, OF_FOLDERS.split()) is not None
        own, *pair, dtype = _pair_of(run, runs, gguf, given_type, folders)
        target, draft = target or pair[0], draft or pair[1]
        if draft.endswith(".gguf"):
            gguf = own.gguf if gguf is None else merged(own.gguf, gguf)
        threads = threads or own.threads
    if target is None or not prompts:
        missing = [name for name, given in (("--target", target), ("--prompts", prompts)) if not given]
        hint = "and --draft, where a draft is used" if draft is None else None
        raise RecipeError(f"a pair without a run needs {' and '.join(missing)}", hint)
    shared.prepare(threads)
    from distill import api
    from distill.measuring.speedup import measure_any_pair
    from distill.measuring.speedup_tables import speedup_blocks

    settings = api.pair_settings(
        target,
        draft,
        lengths=swept,
        fixed=fixed,
        configurations=map(_configuration, configuration or ()),
        sampler=sampler,
        dtype=dtype,
        counts={"prompts": count, "new_tokens": tokens, "allow_lossy": allow_lossy},
        seed=seed,
        device="auto" if own is None else own.device,
        threads=threads,
        gguf=gguf or Gguf(),
    )
    big, small, every = settings.target.model, settings.draft, settings.configurations
    require_used(gguf, big, small)
    shared.require_place(to)
    shared.refuse_idle(
        context,
        (big.endswith(".gguf"), "dtype", shared.TYPES_OF_ITS_OWN),
        (small is None, "draft_device draft_weights", "is for a draft, and none is loaded"),
        (not any(one.counts_ngrams for one in every), "table", "is for configurations of drafter table"),
    )
    if any(one.counts_ngrams for one in every):
        table = shared.place_of_table(table, None if run is None else shared.find_run(run, runs)[1])
    engine = PyTorch() if own is None or big.endswith(".gguf") else own.pytorch
    report = measure_any_pair(
        replace(settings, pytorch=shared.pytorch_settings(engine, big, pytorch)),
        (target, draft),
        prompts,
        prompt_tokens=prompt_tokens,
        chat=None if own is None else own.chat,
        table=table,
        command=command_line(sys.argv),
    )
    if to is not None:
        write_result(to, report)
    shared.print_blocks(speedup_blocks(report), report, output)


def _configuration(text: str) -> Configuration:
    """What --configuration asks for."""
    raw, where = read_yaml(text, "--configuration"), f"--configuration {text[:60]}"
    if not isinstance(raw, dict):
        raise RecipeError(f"{where}: not a mapping", "such as '{rule: p_min, length: 8}'")
    return parse_section(Configuration, raw, where)


def _pair_of(
    name: str | None, runs: Path, gguf: Gguf | None, dtype: str | None, folders: bool
) -> tuple[Recipe, str, str, str]:
    """A run's recipe, target and trained draft, and the type to load them in (None: the run's): its GGUF files where
    llama.cpp's options are given, or where they are measured in it and its target is one, or PyTorch is not; else, and
    where options of `folders` are given, its folders. RunError for a run that lacks them.
    """
    recipe, found = shared.find_run(name, runs)
    shared.require_draft(found)
    measured = set(recipe.speedup.backends)
    served = recipe.target.model.endswith(".gguf") and recipe.speedup.files and not found.outdated("export")
    if gguf is None and recipe.target.load and "pytorch" in measured and (folders or not served):
        return recipe, recipe.target.model, str(found.path("draft")), dtype or recipe.target.dtype
    from distill.cli.serve import pair_files

    timed = recipe.speedup.outtype if recipe.target.load and recipe.speedup.files else None
    files = pair_files(str(found.folder), runs, None, None, timed, required=True)
    return recipe, str(files.target), str(files.draft), dtype or "float32"


def _of_run(
    name: str | None,
    runs: Path,
    allow_lossy: bool,
    threads: int | None,
    gguf: Gguf | None,
    output: str,
) -> None:
    recipe, found = shared.find_run(name, runs)
    if gguf is not None and not recipe.speedup.files:
        raise RecipeError("this run measures no GGUF files (speedup.backends)", "leave llama.cpp's options out")
    changes = {
        "speedup": recipe.speedup.model_copy(update={"allow_lossy": allow_lossy or recipe.speedup.allow_lossy}),
        "threads": threads or recipe.threads,
        "gguf": recipe.gguf if gguf is None else merged(recipe.gguf, gguf),
    }
    recipe = recipe.model_copy(update=changes)
    found = Run(found.folder, recipe)
    shared.run_until(recipe, found, "speedup")
    from distill.measuring.speedup_results import SpeedupReport
    from distill.measuring.speedup_tables import speedup_blocks

    report = read_result(found.path("speedup.json"), SpeedupReport)
    shared.print_blocks(speedup_blocks(report), report, output)

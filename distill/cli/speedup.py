"""`distill speedup`: plain against speculative decoding, of a run or of any two models."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from distill.cli import shared
from distill.cli.shared import merged, require_used, takes_gguf_options
from distill.errors import RecipeError
from distill.files import read_result, write_result
from distill.progress import command_line
from distill.recipe import Configuration, Gguf, PyTorch, Recipe, SamplerSettings, Speedup, parse_section
from distill.recipe.load import read_yaml
from distill.run import Run

PAIR = "Any pair, without a run"
OF_FOLDERS = [
    "batch",
    "dtype",
    "static",
    "compile",
    "draft_device",
    "draft_weights",
    "prepack",
]  # options that PyTorch alone takes
# Options of pairs without a run, in a group of their own in the help; and those that take a finite number.
pair_option = partial(typer.Option, rich_help_panel=PAIR)
pair_number = partial(shared.number_option, rich_help_panel=PAIR)


@takes_gguf_options("target", "draft")
def speedup(
    context: typer.Context,
    run: shared.RunArgument = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure again instead of showing the last measurement.")
    ] = False,
    allow_lossy: Annotated[
        bool,
        typer.Option("--allow-lossy", help="Run configurations that change the target's distribution too (LOSSY)."),
    ] = False,
    target: Annotated[str | None, pair_option(help="Target: Hugging Face folder, hub name or GGUF file.")] = None,
    draft: Annotated[str | None, pair_option(help="Draft: of the same kind as the target.")] = None,
    prompts: Annotated[
        list[Path] | None,
        pair_option(
            help="File or folder with prompts; may be repeated. jsonl, csv and parquet: records with text, or with a "
            "prompt or messages, which go through the target's chat template; other files: text, cut into prompts."
        ),
    ] = None,
    count: Annotated[int, pair_number(min=2, help="Maximum number of prompts.")] = 12,
    prompt_tokens: Annotated[int, pair_number(min=2, help="Tokens of a prompt that is cut from text.")] = 64,
    tokens: Annotated[int, pair_number(min=8, help="Maximum new tokens after each prompt.")] = 96,
    lengths: Annotated[str, pair_option(help="Fixed draft lengths, separated by commas; 0: none.")] = "1,2,4,8",
    drafter: Annotated[
        str,
        pair_option(
            help="For the fixed lengths: draft, lookup, lookup+draft; of another vocabulary: intersection, string."
        ),
    ] = "draft",
    verifier: Annotated[
        str | None, pair_option(help="For the fixed lengths: greedy; with --temperature match, token or block.")
    ] = None,
    configuration: Annotated[
        list[str] | None,
        pair_option(
            help="Another configuration, in the words of a recipe (docs/recipes.md), such as "
            "'{rule: expected-value, length: 8}' or '{drafter: tree, nodes: 12, calibration: none}'; may be repeated."
        ),
    ] = None,
    temperature: Annotated[float, pair_number(min=0, max=100, help="Above 0: the fixed lengths are sampled.")] = 0.0,
    top_k: Annotated[int, pair_number(min=0, help="0: off.")] = 0,
    top_p: Annotated[float, pair_number(min=0.0001, max=1, help="1: off.")] = 1.0,
    min_p: Annotated[float, pair_number(min=0, max=0.9999, help="0: off.")] = 0.0,
    batch: Annotated[
        str | None, pair_option(help="Also decode this many texts at once, separated by commas; folders only.")
    ] = None,
    dtype: Annotated[str, pair_option(help=shared.DTYPE_HELP)] = "float32",
    static: Annotated[bool | None, pair_option(help=shared.STATIC_HELP)] = None,
    compile: Annotated[bool | None, pair_option(help=shared.COMPILE_HELP)] = None,
    draft_device: Annotated[str | None, pair_option(help=shared.DRAFT_DEVICE_HELP)] = None,
    draft_weights: Annotated[str | None, pair_option(help=shared.DRAFT_WEIGHTS_HELP)] = None,
    prepack: Annotated[bool | None, pair_option(help=shared.PREPACK_HELP)] = None,
    seed: Annotated[int, pair_number(min=0, help="Seed of all draws.")] = 0,
    table: Annotated[
        Path | None,
        pair_option(help="For drafter table: a run, or a file, with n-grams of the target; a run's own if left out."),
    ] = None,
    to: Annotated[
        Path | None, pair_option(help="Also write everything that was measured to this file, as JSON.")
    ] = None,
    threads: shared.ThreadsOption = None,
    runs: shared.RunsOption = shared.DEFAULT_RUNS,
    output: shared.FormatOption = "md",
    gguf: Gguf | None = None,
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
        _of_run(run, runs, again, allow_lossy, threads, gguf, output)
        return
    fixed = any(shared.numbers(lengths, "--lengths", int, "1,2,4"))
    shared.refuse_idle(
        context,
        (True, "again", "shows a run's own measurement anew, and --prompts and pairs are always measured"),
        (run is None, "runs", shared.NO_RUN),
        (not fixed, "drafter verifier", "is for the fixed lengths, and --lengths names none"),
    )
    own: Recipe | None = None  # of a run, whose settings hold where no option says otherwise
    if run is not None:
        given_type = dtype if shared.first_given(context, ["dtype"]) else None
        folders = shared.first_given(context, OF_FOLDERS) is not None
        own, *pair, dtype = _pair_of(run, runs, gguf, given_type, folders)
        target, draft = target or pair[0], draft or pair[1]
        if draft.endswith(".gguf"):
            gguf = own.gguf if gguf is None else merged(own.gguf, gguf)
        threads = threads or own.threads
    if target is None or not prompts:
        missing = [name for name, given in (("--target", target), ("--prompts", prompts)) if not given]
        hint = "and --draft, where a draft is used" if draft is None else None
        raise RecipeError(f"a pair without a run needs {' and '.join(missing)}", hint)
    from distill.engines.pairs import pair_references

    sampler = SamplerSettings(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    shared.require_sampler_used(sampler)
    sweep, others = _configurations(lengths, drafter, verifier, configuration or (), temperature > 0)
    every = (*sweep, *others)
    big, small = pair_references(
        shared.local_reference(target), None if draft is None else shared.local_reference(draft), every
    )
    require_used(gguf, big, small)
    shared.require_place(to)
    shared.refuse_idle(
        context,
        (big.endswith(".gguf"), "dtype", shared.TYPES_OF_ITS_OWN),
        (small is None, "draft_device draft_weights", "is for a draft, and none is loaded"),
        (not any(one.counts_ngrams for one in every), "table", "is for configurations of drafter table"),
    )
    batches = _batch_sizes(batch, big)
    if any(one.counts_ngrams for one in every):
        table = shared.place_of_table(table, None if run is None else shared.find_run(run, runs)[1])
    shared.prepare(threads)
    from distill.decoding.configured import check_configurations
    from distill.measuring.compare import PairSettings
    from distill.measuring.speedup import measure_any_pair
    from distill.measuring.speedup_tables import speedup_blocks

    given = {"static": static, "compile": compile, "draft_device": draft_device}
    given |= {"draft_weights": draft_weights, "prepack": prepack}
    engine = PyTorch() if own is None or big.endswith(".gguf") else own.pytorch
    settings = PairSettings(
        target=shared.target_settings(big, dtype),
        draft=small,
        sweep=sweep,
        others=others,
        speedup=Speedup(prompts=count, new_tokens=tokens, configurations=(), allow_lossy=allow_lossy),
        sampler=sampler,
        seed=seed,
        device="auto" if own is None else own.device,
        threads=threads,
        gguf=gguf or Gguf(),
        pytorch=shared.pytorch_settings(engine, big, **given),
    )
    checked = [one for one in every if not one.other_vocabulary]
    for line in check_configurations(settings.speedup, sampler, checked, "the options"):
        print(line, file=sys.stderr)
    report = measure_any_pair(
        settings,
        (target, draft),
        prompts,
        prompt_tokens=prompt_tokens,
        chat=None if own is None else own.chat,
        batches=batches,
        table=table,
        command=command_line(sys.argv),
    )
    if to is not None:
        write_result(to, report)
    shared.print_blocks(speedup_blocks(report), report, output)


def _configurations(
    lengths: str, drafter: str, verifier: str | None, texts: Sequence[str], sampled: bool
) -> tuple[tuple[Configuration, ...], tuple[Configuration, ...]]:
    """The sweep of lengths and all other configurations, to which the sweep belongs under a sampler.

    RecipeError for configurations that are not possible, or that would not be measured.
    """
    fixed = {"drafter": drafter, "verifier": verifier, "sampler": "recipe" if sampled else "greedy"}
    swept = sorted({length for length in shared.numbers(lengths, "--lengths", int, "1,2,4") if length})
    sweep = tuple(parse_section(Configuration, fixed | {"length": length}, "--lengths") for length in swept)
    others = []
    for text in texts:
        raw, where = read_yaml(text, "--configuration"), f"--configuration {text[:60]}"
        if not isinstance(raw, dict):
            raise RecipeError(f"{where}: not a mapping", "such as '{rule: p_min, length: 8}'")
        others.append(parse_section(Configuration, raw, where))
    every = (*sweep, *others)
    titles = [one.title for one in every]
    for one in every:
        if titles.count(one.title) > 1:
            raise RecipeError(f"the configuration `{one.title}` is asked for twice", "leave one of them out")
        if one.sampler == "recipe" and not sampled:
            raise RecipeError(f"`{one.title}` is sampled", "give the sampler's --temperature")
        if not one.drafts:
            raise RecipeError(f"`{one.title}` is always measured", "leave it out")
    if not titles:
        raise RecipeError("nothing is to be measured but plain decoding", "give --lengths or --configuration")
    return ((), every) if sampled else (sweep, tuple(others))


def _batch_sizes(text: str | None, target: str) -> tuple[int, ...]:
    """The sizes of --batch in ascending order; RecipeError for sizes that are not possible."""
    if text is None:
        return ()
    sizes = sorted(set(shared.numbers(text, "--batch", int, "1,4,16")))
    if sizes[0] < 1:
        raise RecipeError(f"--batch {text}: at least 1 text", "for instance --batch 1,4")
    if target.endswith(".gguf"):
        raise RecipeError("GGUF files are decoded text by text: --batch is for folders", "leave --batch out")
    return tuple(sizes)


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
    from distill.cli.serve_check import pair_files

    timed = recipe.speedup.outtype if recipe.target.load and recipe.speedup.files else None
    files = pair_files(str(found.folder), runs, None, None, timed, required=True)
    return recipe, str(files.target), str(files.draft), dtype or "float32"


def _of_run(
    name: str | None,
    runs: Path,
    again: bool,
    allow_lossy: bool,
    threads: int | None,
    gguf: Gguf | None,
    output: str,
) -> None:
    from distill.measuring.speedup_results import SpeedupReport

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
    shared.run_until(recipe, found, "speedup", redo=["speedup"] if again else [])
    report = read_result(found.path("speedup.json"), SpeedupReport)
    from distill.measuring.speedup_tables import speedup_blocks

    shared.print_blocks(speedup_blocks(report), report, output)

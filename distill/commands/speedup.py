"""`distill speedup`: plain against speculative decoding, of a run or of any two models."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distill.commands.gguf_options import merged, require_used, takes_gguf_options
from distill.commands.shared import (
    COMPILE_HELP,
    DEFAULT_RUNS,
    DRAFT_DEVICE_HELP,
    DTYPE_HELP,
    PREPACK_HELP,
    STATIC_HELP,
    FormatOption,
    RunArgument,
    RunsOption,
    ThreadsOption,
    find_run,
    finite,
    local_reference,
    prepare,
    print_table,
    pytorch_settings,
    require_format,
    run_until,
)
from distill.errors import RecipeError

if TYPE_CHECKING:
    from distill.recipe import Gguf

PAIR = "Any pair, without a run"


def pair_option(*names: str, **settings: Any) -> Any:
    """An option of pairs without a run, in a group of its own in the help."""
    return typer.Option(*names, rich_help_panel=PAIR, **settings)


@takes_gguf_options("target", "draft")
def speedup(
    context: typer.Context,
    run: RunArgument = None,
    again: Annotated[bool, typer.Option("--again", help="Measure anew instead of showing what was measured.")] = False,
    verify_distribution: Annotated[
        bool,
        typer.Option(
            "--verify-distribution", help="Instead: test that the decoder samples the target's own distribution."
        ),
    ] = False,
    samples: Annotated[
        int, typer.Option(min=100, help="--verify-distribution: texts drawn per prompt and verifier.")
    ] = 400,
    allow_lossy: Annotated[
        bool,
        typer.Option("--allow-lossy", help="Run configurations that change the target's distribution too (LOSSY)."),
    ] = False,
    target: Annotated[
        str | None, pair_option("--target", help="Target: Hugging Face folder, hub name or GGUF file.")
    ] = None,
    draft: Annotated[str | None, pair_option("--draft", help="Draft: of the same kind as the target.")] = None,
    prompts: Annotated[
        list[Path] | None,
        pair_option(
            "--prompts",
            help="File or folder with prompts; may be repeated. jsonl, csv and parquet: records with text, or with a "
            "prompt or messages, which go through the target's chat template; other files: text, cut into prompts.",
        ),
    ] = None,
    count: Annotated[int, pair_option("--count", min=2, callback=finite, help="Prompts, at most.")] = 12,
    prompt_tokens: Annotated[
        int, pair_option("--prompt-tokens", min=2, callback=finite, help="Tokens of a prompt that is cut from text.")
    ] = 64,
    tokens: Annotated[
        int, pair_option("--tokens", min=8, callback=finite, help="New tokens after each prompt, at most.")
    ] = 96,
    lengths: Annotated[
        str, pair_option("--lengths", help="Draft lengths swept, separated by commas; 0: none.")
    ] = "1,2,4,8",
    drafter: Annotated[
        str,
        pair_option(
            "--drafter",
            help="Who drafts in the sweep: draft, lookup, lookup+draft; of another vocabulary: intersection, string.",
        ),
    ] = "draft",
    verifier: Annotated[
        str | None, pair_option("--verifier", help="Of the sweep: greedy; with --temperature match, token or block.")
    ] = None,
    configuration: Annotated[
        list[str] | None,
        pair_option(
            "--configuration",
            help="Another configuration, in the words of a recipe (docs/recipes.md), such as "
            "'{rule: expected-value, length: 8}' or '{drafter: tree, nodes: 12, calibration: none}'; may be repeated.",
        ),
    ] = None,
    temperature: Annotated[
        float, pair_option("--temperature", min=0, max=100, callback=finite, help="Above 0: the sweep is sampled.")
    ] = 0.0,
    top_k: Annotated[int, pair_option("--top-k", min=0, callback=finite, help="0: off.")] = 0,
    top_p: Annotated[float, pair_option("--top-p", min=0.0001, max=1, callback=finite, help="1: off.")] = 1.0,
    min_p: Annotated[float, pair_option("--min-p", min=0, max=0.9999, callback=finite, help="0: off.")] = 0.0,
    batch: Annotated[
        str | None, pair_option("--batch", help="Also so many texts at once, separated by commas; folders only.")
    ] = None,
    synthetic_acceptance: Annotated[
        str | None,
        pair_option(
            "--synthetic-acceptance",
            help="Test the costs alone: accept drafted tokens at this rate, or at these rates by position (0.8,0.7), "
            "whatever the target says.",
        ),
    ] = None,
    dtype: Annotated[str, pair_option("--dtype", help=DTYPE_HELP)] = "float32",
    static: Annotated[bool | None, pair_option("--static/--no-static", help=STATIC_HELP)] = None,
    compile: Annotated[bool | None, pair_option("--compile/--no-compile", help=COMPILE_HELP)] = None,
    draft_device: Annotated[str | None, pair_option("--draft-device", help=DRAFT_DEVICE_HELP)] = None,
    prepack: Annotated[bool | None, pair_option("--prepack/--no-prepack", help=PREPACK_HELP)] = None,
    library: Annotated[
        bool, pair_option("--library", help="Also time the library's own plain generation (a GGUF file loads twice).")
    ] = False,
    seed: Annotated[int, pair_option("--seed", min=0, callback=finite, help="Seed of all draws.")] = 0,
    to: Annotated[
        Path | None, pair_option("--to", help="Also write everything that was measured to this file, as JSON.")
    ] = None,
    threads: ThreadsOption = None,
    runs: RunsOption = DEFAULT_RUNS,
    output: FormatOption = "md",
    gguf: Gguf | None = None,
) -> None:
    """Plain against speculative decoding, end to end: of a run's draft and target, or of any pair on your prompts."""
    pair = target is not None or draft is not None or bool(prompts)
    _refuse_other_options(context, pair)
    if not pair:
        _of_run(run, runs, again, verify_distribution, samples, allow_lossy, threads, gguf, output)
        return
    require_format(output)
    if target is None or not prompts:
        raise RecipeError("a pair without a run needs --target and --prompts", "and --draft, where a draft is asked")
    from distill.commands import speedup_pair as options
    from distill.models.pairs import pair_references
    from distill.recipe import PyTorch, SamplerSettings

    sampler = SamplerSettings(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    options.require_sampler_used(sampler)
    asked = options.configurations(lengths, drafter, verifier, configuration or (), temperature > 0)
    big, small = pair_references(local_reference(target), None if draft is None else local_reference(draft), asked.all)
    require_used(gguf, big, small)
    options.require_folder(to)
    options.require_dtype_used(dtype, big)
    batches = options.batch_sizes(batch, big)
    prepare(threads)
    from distill.benchmark.any_pair import PairRequest, measure_any_pair, pair_settings
    from distill.benchmark.tables import flat_pair_rows, pair_markdown
    from distill.results.serialise import as_json, write_result
    from distill.speculative.configured import check_configurations

    pytorch = {"static": static, "compile": compile, "draft_device": draft_device, "prepack": prepack}
    recipe = pair_settings(
        big,
        prompts,
        sampler,
        dtype,
        count=count,
        tokens=tokens,
        seed=seed,
        threads=threads,
        gguf=gguf,
        pytorch=pytorch_settings(PyTorch(), big, **pytorch),
        allow_lossy=allow_lossy,
    )
    for line in check_configurations(recipe, [one for one in asked.all if not one.foreign], "the options"):
        print(line, file=sys.stderr)
    request = PairRequest(
        names=(target, draft),
        draft=small,
        sweep=asked.sweep,
        others=asked.others,
        prompt_tokens=prompt_tokens,
        batches=batches,
        rates=options.acceptance_rates(synthetic_acceptance),
        library=library,
        command=shlex.join(["distill", *sys.argv[1:]]),
    )
    options.require_meaning(request)
    report = measure_any_pair(recipe, request)
    if to is not None:
        write_result(to, report)
    print_table(flat_pair_rows(report), pair_markdown(report), as_json(report), output)


def _refuse_other_options(context: typer.Context, pair: bool) -> None:
    """Raise RecipeError where options of runs were given for a pair, or those of pairs for a run."""
    of_pair = [one.name for one in context.command.params if getattr(one, "rich_help_panel", None) == PAIR]
    of_run = ["run", "again", "verify_distribution", "samples", "runs"]
    for name in of_run if pair else of_pair:
        source = context.get_parameter_source(str(name))
        if source is not None and source.name == "COMMANDLINE":
            option = "a run" if name == "run" else "--" + str(name).replace("_", "-")
            raise RecipeError(
                f"{option} was given {'for' if pair else 'without'} a pair of models",
                "a pair is --target, --draft and --prompts; without them a run is measured",
            )


def _of_run(
    name: str | None,
    runs: Path,
    again: bool,
    verify_distribution: bool,
    samples: int,
    allow_lossy: bool,
    threads: int | None,
    gguf: Gguf | None,
    output: str,
) -> None:
    from distill.results.serialise import as_json, read_result
    from distill.results.speedup_results import SpeedupReport
    from distill.run import Run

    recipe, found = find_run(name, runs)
    if verify_distribution:
        if gguf is not None:
            raise RecipeError("--verify-distribution decodes in PyTorch", "leave llama.cpp's options out")
        run_until(recipe, found, "train", threads=threads)
        found.verify("train", "draft/*")
        from distill.benchmark.distribution_test import distribution_markdown, verify_run_distribution

        tested = verify_run_distribution(recipe, found, samples)
        rows = [as_json(test) for test in tested.tests]
        print_table(rows, distribution_markdown(tested), as_json(tested) | {"lossless": tested.lossless}, output)
        raise typer.Exit(0 if tested.lossless else 1)
    if allow_lossy and not recipe.speedup.allow_lossy:
        recipe = recipe.model_copy(update={"speedup": recipe.speedup.model_copy(update={"allow_lossy": True})})
    if threads is not None:
        recipe = recipe.model_copy(update={"threads": threads})
    if gguf is not None:
        if "gguf" not in recipe.speedup.backends:
            raise RecipeError("this run measures no GGUF files (speedup.backends)", "leave llama.cpp's options out")
        recipe = recipe.model_copy(update={"gguf": merged(recipe.gguf, gguf)})
    found = Run(found.folder, recipe)
    run_until(recipe, found, "speedup", redo=["speedup"] if again else [])
    report = read_result(found.path("speedup.json"), SpeedupReport)
    from distill.benchmark.tables import flat_run_rows, run_markdown

    print_table(flat_run_rows(report), run_markdown(report), as_json(report), output)

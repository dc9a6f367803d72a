"""`distill speedup`: plain against speculative decoding, of a run or of any two models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distill.commands import shared
from distill.commands.gguf_options import merged, takes_gguf_options
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
    run: shared.RunArgument = None,
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
    target: Annotated[str | None, pair_option(help="Target: Hugging Face folder, hub name or GGUF file.")] = None,
    draft: Annotated[str | None, pair_option(help="Draft: of the same kind as the target.")] = None,
    prompts: Annotated[
        list[Path] | None,
        pair_option(
            help="File or folder with prompts; may be repeated. jsonl, csv and parquet: records with text, or with a "
            "prompt or messages, which go through the target's chat template; other files: text, cut into prompts."
        ),
    ] = None,
    count: Annotated[int, pair_option(min=2, callback=shared.finite, help="Prompts, at most.")] = 12,
    prompt_tokens: Annotated[
        int, pair_option(min=2, callback=shared.finite, help="Tokens of a prompt that is cut from text.")
    ] = 64,
    tokens: Annotated[
        int, pair_option(min=8, callback=shared.finite, help="New tokens after each prompt, at most.")
    ] = 96,
    lengths: Annotated[str, pair_option(help="Draft lengths swept, separated by commas; 0: none.")] = "1,2,4,8",
    drafter: Annotated[
        str,
        pair_option(
            help="Who drafts in the sweep: draft, lookup, lookup+draft; of another vocabulary: intersection, string."
        ),
    ] = "draft",
    verifier: Annotated[
        str | None, pair_option(help="Of the sweep: greedy; with --temperature match, token or block.")
    ] = None,
    configuration: Annotated[
        list[str] | None,
        pair_option(
            help="Another configuration, in the words of a recipe (docs/recipes.md), such as "
            "'{rule: expected-value, length: 8}' or '{drafter: tree, nodes: 12, calibration: none}'; may be repeated."
        ),
    ] = None,
    temperature: Annotated[
        float, pair_option(min=0, max=100, callback=shared.finite, help="Above 0: the sweep is sampled.")
    ] = 0.0,
    top_k: Annotated[int, pair_option(min=0, callback=shared.finite, help="0: off.")] = 0,
    top_p: Annotated[float, pair_option(min=0.0001, max=1, callback=shared.finite, help="1: off.")] = 1.0,
    min_p: Annotated[float, pair_option(min=0, max=0.9999, callback=shared.finite, help="0: off.")] = 0.0,
    batch: Annotated[
        str | None, pair_option(help="Also so many texts at once, separated by commas; folders only.")
    ] = None,
    synthetic_acceptance: Annotated[
        str | None,
        pair_option(
            help="Test the costs alone: accept drafted tokens at this rate, or at these rates by position (0.8,0.7), "
            "whatever the target says."
        ),
    ] = None,
    dtype: Annotated[str, pair_option(help=shared.DTYPE_HELP)] = "float32",
    static: Annotated[bool | None, pair_option(help=shared.STATIC_HELP)] = None,
    compile: Annotated[bool | None, pair_option(help=shared.COMPILE_HELP)] = None,
    draft_device: Annotated[str | None, pair_option(help=shared.DRAFT_DEVICE_HELP)] = None,
    prepack: Annotated[bool | None, pair_option(help=shared.PREPACK_HELP)] = None,
    library: Annotated[
        bool, pair_option("--library", help="Also time the library's own plain generation (a GGUF file loads twice).")
    ] = False,
    seed: Annotated[int, pair_option(min=0, callback=shared.finite, help="Seed of all draws.")] = 0,
    to: Annotated[
        Path | None, pair_option(help="Also write everything that was measured to this file, as JSON.")
    ] = None,
    threads: shared.ThreadsOption = None,
    runs: shared.RunsOption = shared.DEFAULT_RUNS,
    output: shared.FormatOption = "md",
    gguf: Gguf | None = None,
) -> None:
    """Plain against speculative decoding, end to end: of a run's draft and target, or of any pair on your prompts."""
    pair = target is not None or draft is not None or bool(prompts)
    of_pair = _pair_options(context, pair)
    if pair:
        shared.require_format(output)
        from distill.commands.standalone.speedup_pair import measure

        options = {name: context.params[name] for name in of_pair} | {"allow_lossy": allow_lossy}
        measure(options, threads, gguf, output)
        return
    from distill.results.serialise import as_json, read_result
    from distill.results.speedup_results import SpeedupReport
    from distill.run import Run

    recipe, found = shared.find_run(run, runs)
    if verify_distribution:
        if gguf is not None:
            raise RecipeError("--verify-distribution decodes in PyTorch", "leave llama.cpp's options out")
        shared.run_until(recipe, found, "train", threads=threads)
        found.verify("train", "draft/*")
        from distill.benchmark.distribution_test import distribution_markdown, verify_run_distribution

        tested = verify_run_distribution(recipe, found, samples)
        rows = [as_json(test) for test in tested.tests]
        shared.print_table(rows, distribution_markdown(tested), as_json(tested) | {"lossless": tested.lossless}, output)
        raise typer.Exit(0 if tested.lossless else 1)
    changes: dict[str, Any] = {} if threads is None else {"threads": threads}
    if allow_lossy:
        changes["speedup"] = recipe.speedup.model_copy(update={"allow_lossy": True})
    if gguf is not None:
        if "gguf" not in recipe.speedup.backends:
            raise RecipeError("this run measures no GGUF files (speedup.backends)", "leave llama.cpp's options out")
        changes["gguf"] = merged(recipe.gguf, gguf)
    recipe = recipe.model_copy(update=changes)
    found = Run(found.folder, recipe)
    shared.run_until(recipe, found, "speedup", redo=["speedup"] if again else [])
    report = read_result(found.path("speedup.json"), SpeedupReport)
    from distill.benchmark.table import as_markdown, flat_rows

    shared.print_table(flat_rows(report), as_markdown(report), as_json(report), output)


def _pair_options(context: typer.Context, pair: bool) -> list[str]:
    """The options of pairs; RecipeError where some of the other kind were given."""
    of_pair = [str(one.name) for one in context.command.params if getattr(one, "rich_help_panel", None) == PAIR]
    for name in ["run", "again", "verify_distribution", "samples", "runs"] if pair else of_pair:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "a run" if name == "run" else "--" + name.replace("_", "-")
            raise RecipeError(
                f"{option} was given {'for' if pair else 'without'} a pair of models",
                "a pair is --target, --draft and --prompts; without them a run is measured",
            )
    return of_pair

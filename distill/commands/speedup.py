"""`distill speedup`: plain against speculative decoding."""

from __future__ import annotations

from typing import Annotated

import typer

from distill.commands.shared import (
    DEFAULT_RUNS,
    FormatOption,
    RunArgument,
    RunsOption,
    ThreadsOption,
    find_run,
    print_table,
    run_until,
)


def speedup(
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
    threads: ThreadsOption = None,
    runs: RunsOption = DEFAULT_RUNS,
    output: FormatOption = "md",
) -> None:
    """Plain against speculative decoding, end to end, of a run's draft and target."""
    from distill.results.serialise import as_json, read_result
    from distill.results.speedup_results import SpeedupReport
    from distill.run import Run

    recipe, found = find_run(run, runs)
    if verify_distribution:
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
    found = Run(found.folder, recipe)
    run_until(recipe, found, "speedup", redo=["speedup"] if again else [])
    report = read_result(found.path("speedup.json"), SpeedupReport)
    from distill.benchmark.table import as_markdown, flat_rows

    print_table(flat_rows(report), as_markdown(report), as_json(report), output)

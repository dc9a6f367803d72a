"""`distill generate`: continue a text, streamed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from distill.commands.shared import (
    DEFAULT_RUNS,
    RunsOption,
    find_run,
    numbers,
    prepare,
    standalone_recipe,
)
from distill.errors import DataError, RecipeError, RunError


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    run: Annotated[str | None, typer.Option("--run", help="Run name or folder; the newest run if left out.")] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="Without a run: Hugging Face folder, hub name or GGUF file.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option("--draft", help="Without a run: of the same kind; a GGUF pair runs in llama.cpp.")
    ] = None,
    length: Annotated[int, typer.Option(min=0, max=63, help="Tokens drafted per round; 0 decodes plainly.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="0: off.")] = 0,
    top_p: Annotated[float, typer.Option(min=0.0001, max=1, help="1: off.")] = 1.0,
    min_p: Annotated[float, typer.Option(min=0, max=0.9999, help="0: off.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(min=0.01, help="1: off.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn.")] = 0,
    verifier: Annotated[
        str | None, typer.Option("--verifier", help="greedy, match, token, block, or for drawn trees distinct.")
    ] = None,
    drafter: Annotated[
        str,
        typer.Option(
            "--drafter",
            help="model, lookup (earlier text), both, tree (of the best tokens, or drawn: --widths); for a draft of "
            "another vocabulary: intersection (the tokens both share) or string (its text).",
        ),
    ] = "model",
    widths: Annotated[
        str | None,
        typer.Option("--widths", help="--drafter tree: drawn, with so many children a node, level by level: 3,2,1."),
    ] = None,
    rule: Annotated[
        str,
        typer.Option(
            "--rule",
            help="How many tokens to draft, --length at most: fixed, p_min, p_min-after, start-continue, plus-minus, "
            "ratio, entropy, beta or expected-value (docs/recipes.md).",
        ),
    ] = "fixed",
    p_min: Annotated[
        float, typer.Option("--p-min", min=0.0001, max=1, help="--rule p_min, p_min-after: the floor.")
    ] = 0.5,
    allow_lossy: Annotated[
        bool,
        typer.Option("--allow-lossy", help="Also decode in ways that change the target's distribution; says LOSSY."),
    ] = False,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End before this text; may be repeated.")] = None,
    regex: Annotated[str | None, typer.Option("--regex", help="The new text must match this, whole.")] = None,
    json_schema: Annotated[
        Path | None, typer.Option("--json-schema", help="A file; the new text is JSON that follows it.")
    ] = None,
    grammar: Annotated[
        Path | None, typer.Option("--grammar", help="A file in GBNF or Lark; the new text follows it.")
    ] = None,
    runs: RunsOption = DEFAULT_RUNS,
) -> None:
    """Continue a prompt, streamed, with the accepted tokens marked (green on a terminal); losslessly or not at all."""
    text = sys.stdin.read() if prompt == "-" else prompt
    known = ("model", "lookup", "both", "tree", "intersection", "string")
    if drafter not in known:
        raise RecipeError(f"there is no drafter `{drafter}`", f"use one of {', '.join(known)}")
    wanted = _grammar(regex, json_schema, grammar)
    from distill.recipe.configuration import RULES

    if rule not in RULES:
        raise RecipeError(f"there is no length rule `{rule}`", f"use one of {', '.join(RULES)}")
    if p_min != 0.5 and rule not in ("p_min", "p_min-after"):
        raise RecipeError(f"--p-min is not read by --rule {rule}", "use --rule p_min, or leave it out")
    levels = None if widths is None else tuple(numbers(widths, "--widths", int, "3,2,1"))
    if levels is not None and drafter != "tree":
        raise RecipeError(f"--widths is not read by --drafter {drafter}", "use --drafter tree, or leave it out")
    if levels is not None and length != 4:
        raise RecipeError("--length is not read beside --widths, which says how deep the tree is", "leave one out")
    folder = None
    if target or draft:
        if not (target and draft):
            raise RecipeError("a standalone pair needs both --target and --draft")
        from distill.models.pairs import require_pair

        recipe = standalone_recipe(target, draft, [Path(".")])
        references = (recipe.target.model, recipe.cut.donor)
        prepare(recipe)
        if target.endswith(".gguf") != draft.endswith(".gguf"):
            raise RecipeError(
                f"{target} and {draft} would run in two engines", "give two GGUF files, or two Hugging Face folders"
            )
        if drafter not in ("intersection", "string"):
            require_pair(*references)
    else:
        recipe, found = find_run(run, runs)
        if not found.path("draft", "config.json").exists():
            raise RunError(f"{found.folder} has no trained draft yet", "run `distill train` on its recipe")
        references = (recipe.target.model, str(found.path("draft").resolve()))
        folder = found
        prepare(recipe)
    from distill.generate.stream import Way, stream
    from distill.sampler import Sampler

    sampler = Sampler(temperature, top_k, top_p, min_p, repetition_penalty)
    costs, fitted = None, {}
    if rule == "expected-value" and folder is not None:
        from distill.benchmark.calibrate import curve_costs, load_calibrations

        costs = curve_costs(folder, "pytorch") if "pytorch" in recipe.speedup.backends else None
        measured = folder.path("speedup", "calibration.json")
        fitted = load_calibrations(measured) if measured.exists() else {}
    stops = tuple(stop or ())
    way = Way(sampler, verifier, drafter, length, seed, stops, rule, p_min, costs, fitted, allow_lossy, wanted, levels)
    stream(recipe, references, text, tokens, way)


def _grammar(regex: str | None, json_schema: Path | None, grammar: Path | None) -> tuple[str, str] | None:
    """The kind and text of the one that was given; RecipeError for several, DataError for a file that is not there."""
    if sum(given is not None for given in (regex, json_schema, grammar)) > 1:
        raise RecipeError("--regex, --json-schema and --grammar were given together", "choose one of them")
    if regex is not None:
        return "regex", regex
    path = json_schema or grammar
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", "give a text file") from None
    return ("json" if json_schema else "gbnf" if "::=" in text else "lark"), text

"""`distill check`: checks a recipe, or any target and draft, without loading a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distill.errors import PairError, RecipeError


def check(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="RECIPE", help="Recipe file; omit it for a standalone pair.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="a.b=c", help="Override recipe keys.")] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Skip checks that need a model hub, and list them.")
    ] = False,
    target: Annotated[
        str | None, typer.Option("--target", help="Standalone pair: target as Hugging Face folder, hub name or GGUF.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option("--draft", help="Standalone pair: draft as Hugging Face folder, hub name or GGUF.")
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", min=1, help="Standalone pair: tokens of context to be served.")
    ] = None,
) -> None:
    """Check a recipe, or a target and a draft, in seconds.

    Checks keys, files, tokenizers, pair rules, cuts and disk space. Loads no weights and changes nothing.
    """
    if target or draft:
        if recipe is not None or target is None or draft is None:
            raise RecipeError(
                "a standalone pair is --target and --draft, without a recipe", "name both, or a recipe alone"
            )
        _check_standalone(target, draft, context)
        return
    if recipe is None:
        raise RecipeError("nothing to check", "`distill check RECIPE`, or `distill check --target A --draft B`")
    _check_recipe(recipe, overrides or [], offline)


def _check_standalone(target: str, draft: str, context: int | None) -> None:
    from distill.models.pairs import compare_pair

    pair = compare_pair(target, draft, context)
    print("\n".join(pair.lines()))
    if pair.distill is not None:
        raise PairError(f"{draft} cannot draft for {target}: {pair.distill}", pair.remedies.get("distill", ""))


def _check_recipe(path: Path, overrides: list[str], offline: bool) -> None:
    from distill.pipeline.preflight import preflight
    from distill.recipe import load_recipe

    recipe = load_recipe(path, overrides)
    print(f"recipe {recipe.name}: keys and values are valid")
    found = preflight(recipe, offline=offline)
    for line in found.lines:
        print(line)
    for item in found.skipped:
        print(f"not checked: {item}" + (" (--offline)" if offline else " (read by stage corpus)"))
    print("check passed" + (", apart from the items listed as not checked" if found.skipped else ""))

"""`distill check`: a recipe, or any target and draft, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distill.errors import PairError, RecipeError
from distill.pipeline.preflight import check_models


def check(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="Recipe file; left out for a standalone pair.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Overrides of recipe keys.")
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Skip what needs a model hub, and say what was skipped.")
    ] = False,
    target: Annotated[
        str | None, typer.Option("--target", help="Without a run: Hugging Face folder, hub name or GGUF file.")
    ] = None,
    draft: Annotated[str | None, typer.Option("--draft", help="Without a run: its draft, likewise.")] = None,
    context: Annotated[
        int | None, typer.Option("--context", min=1, help="Without a run: tokens of context that will be served.")
    ] = None,
) -> None:
    """Check a recipe, or any target and draft: keys, files, tokenizers, pair rules, sizes. Loads no weights."""
    from distill.recipe import is_path, load_recipe

    if target or draft:
        if recipe is not None or target is None or draft is None:
            raise RecipeError(
                "a standalone pair is --target and --draft, without a recipe", "name both, or a recipe alone"
            )
        from distill.models.pairs import compare_pair

        pair = compare_pair(target, draft, context)
        print("\n".join(pair.lines()))
        if pair.distill is not None:
            raise PairError(f"{draft} cannot draft for {target}: {pair.distill}", pair.remedies.get("distill", ""))
        return
    if recipe is None:
        raise RecipeError("nothing to check", "`distill check RECIPE`, or `distill check --target A --draft B`")
    found = load_recipe(recipe, overrides or [])
    print(f"recipe {found.name}: keys and values are fine")
    from distill.corpus.sources import source_path

    skipped = []
    for source in found.corpus.sources:
        if source.kind == "hub":
            skipped.append(f"data set {source.path}")
        else:
            print(f"corpus source {source.path}: {source_path(source)} is there")
    if found.answers.traffic is not None:
        from distill.target.traffic import measure

        print(f"traffic {found.answers.traffic.path}: {measure(Path(found.answers.traffic.path))['lines']} lines")
    donor = found.target.model if found.cut.donor == "target" else found.cut.donor
    models = dict.fromkeys([found.target.model, donor])
    remote = [model for model in models if not is_path(model)]
    if remote and offline:
        skipped += [f"model {model}" for model in remote]
        skipped.append("pair rules, sizes and the cut, which need those models' configurations")
    else:
        print("\n".join(check_models(found)))
    for item in skipped:
        print(f"not checked: {item}" + (" (--offline)" if offline else " (read when the corpus is made)"))
    print("check passed" + (", as far as it goes without a hub" if skipped else ""))

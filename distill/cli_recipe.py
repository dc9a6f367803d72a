"""The commands that take a recipe: `distill check` and `distill train`."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distill.cli_shared import DEFAULT_RUNS, RunsOption, prepare
from distill.errors import PairError, RecipeError, RunError

if TYPE_CHECKING:
    from distill.recipe import Recipe


def check(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="Recipe file; left out for a bare pair.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Overrides of recipe keys.")
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Skip what needs a model hub, and say what was skipped.")
    ] = False,
    target: Annotated[
        str | None, typer.Option("--target", help="Bare pair: Hugging Face folder, hub name or GGUF file.")
    ] = None,
    draft: Annotated[str | None, typer.Option("--draft", help="Bare pair: its draft, likewise.")] = None,
    context: Annotated[
        int | None, typer.Option("--context", min=1, help="Bare pair: tokens of context that will be served.")
    ] = None,
) -> None:
    """Check a recipe, or any target and draft: keys, files, tokenizers, pair rules, sizes. Loads no weights."""
    from distill.recipe import is_path, load_recipe

    if target or draft:
        if recipe is not None or target is None or draft is None:
            raise RecipeError("a bare pair is --target and --draft, without a recipe", "name both, or a recipe alone")
        from distill.models.pair import compare_pair

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
    donor = found.target.model if found.draft.donor == "target" else found.draft.donor
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


def check_models(recipe: Recipe) -> list[str]:
    """What the models' files allow, as lines to print; raises where the recipe asks for more. Loads no weights."""
    from distill.models.hugging_face import load_config
    from distill.models.pair import compare_pair
    from distill.speculative.trial import check_trees, check_trials
    from distill.surgery.stage import check_cut, donor_reference
    from distill.target.store import bytes_per_position
    from distill.training.plan import check_training

    lines = check_cut(recipe) + check_training(recipe) + check_trials(recipe)
    check_trees(recipe, donor_reference(recipe))
    # A transplanted draft has the target's own vocabulary and rows; of the donor only its context is left to compare.
    pair = compare_pair(recipe.target.model, donor_reference(recipe))
    lines += pair.lines() if recipe.draft.transplant is None else [f"context: {pair.context or 'fits'}"]
    config = load_config(recipe.target.model).get_text_config()
    context = config.max_position_embeddings
    if recipe.corpus.block > context:
        raise RecipeError(
            f"corpus.block is {recipe.corpus.block}, the target's context {context}", "lower corpus.block"
        )
    answer = recipe.answers.prompt_tokens + recipe.answers.new_tokens
    store = (recipe.corpus.tokens + recipe.answers.prompts * answer) * bytes_per_position(
        recipe.teacher, config.hidden_size, recipe.target.dtype
    )
    free = shutil.disk_usage(Path.cwd()).free
    lines.append(f"disk: the teacher store needs about {store / 1e6:.0f} MB, {free / 1e9:.0f} GB are free here")
    if store > free:
        raise RunError(
            "the teacher store does not fit the disk",
            "lower corpus.tokens, answers.prompts or teacher.top_k, or store nothing with teacher.kind: online",
        )
    return lines


def train(
    recipe: Annotated[Path, typer.Argument(help="Recipe file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Overrides of recipe keys.")
    ] = None,
    runs: RunsOption = DEFAULT_RUNS,
    until: Annotated[str | None, typer.Option("--until", help="Stop after this stage.")] = None,
    redo: Annotated[
        list[str] | None, typer.Option("--redo", help="Run this stage and what depends on it again.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Move an old run of this name aside (never deleted).")] = False,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Go on from a finished run's draft, on the lines its traffic gained.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say which stage would run, and why; do nothing.")] = False,
) -> None:
    """Run every stage of a recipe, from corpus to report. The same command resumes after any interruption."""
    from distill.files import faults_explained
    from distill.pipeline import find_stage
    from distill.processes import is_main
    from distill.recipe import load_recipe
    from distill.refresh import finish_refresh, plan_refresh
    from distill.refresh import refresh as start_refresh
    from distill.run import Run
    from distill.running import follow_main, require_nothing_superseded, run_pipeline

    found = load_recipe(recipe, overrides or [])
    for name in [*([until] if until else []), *(redo or [])]:
        find_stage(name)
    folder = runs / found.name
    if not is_main():  # one of several that `accelerate launch` started
        if not dry_run:
            prepare(found)
            follow_main(found, Run(folder, found, silent=True))
        return
    run = Run(folder, found)
    if refresh and (fresh or redo or dry_run):
        raise RecipeError("--refresh begins a new run: --fresh, --redo and --dry-run do not go with it")
    finish_refresh(folder)
    parent = plan_refresh(found, run) if refresh else None
    if dry_run:
        run_pipeline(found, run, until, redo or (), dry=True)
        return
    if fresh and folder.exists():
        aside = folder.with_name(f"{folder.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        with run.locked(), faults_explained(folder):
            folder.rename(aside)
        print(f"the old run is now {aside}", file=sys.stderr)
    if parent is None:
        require_nothing_superseded(found, run, until, redo or ())
    # Before the run folder is touched: a cut that cannot be made must not cost the answers.
    for line in check_models(found):
        if "does not fit" in line or "warning" in line or "LOSSY" in line:
            print(line, file=sys.stderr)
    if parent is not None:
        print(f"the run to go on from is now {start_refresh(run, parent)}", file=sys.stderr)
    try:
        run.open(recipe.read_text(encoding="utf-8"))
        prepare(found)
        run_pipeline(found, run, until, redo or ())
    finally:
        run.close()
    for name in ("eval.md", "speedup.md"):
        if (folder / name).exists():
            print((folder / name).read_text(encoding="utf-8"))
    if (folder / "report.html").exists():
        print(f"report: {folder / 'report.html'}\ndraft:  {folder / 'draft'}\ngguf:   {folder / 'gguf'}")

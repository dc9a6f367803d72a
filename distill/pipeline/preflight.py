"""Checks before the first stage: whatever a recipe asks for that its models, disk or machine cannot give."""

from __future__ import annotations

import shutil
from pathlib import Path

from distill.errors import RecipeError, RunError
from distill.recipe import Recipe


def check_models(recipe: Recipe) -> list[str]:
    """What the models' files allow, as lines to print; raises where the recipe asks for more. Loads no weights."""
    from distill.models.hugging_face import load_config
    from distill.models.pairs import compare_pair
    from distill.speculative.configured import check_configurations, check_trees
    from distill.surgery.stage import check_cut, donor_reference
    from distill.target.store import bytes_per_position
    from distill.training.plan import check_training

    lines = check_cut(recipe) + check_training(recipe) + check_configurations(recipe)
    check_trees(recipe, donor_reference(recipe))
    # A transplanted draft has the target's own vocabulary and rows; of the donor only its context is left to compare.
    pair = compare_pair(recipe.target.model, donor_reference(recipe))
    lines += pair.lines() if recipe.cut.transplant is None else [f"context: {pair.context or 'fits'}"]
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

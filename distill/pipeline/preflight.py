"""Preflight: every check before the first stage of what a recipe asks of its inputs, models and disk.

Each check returns lines to print and raises a DistillError where the recipe asks for more than there is. No check loads
weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from distill.errors import RecipeError, RunError
from distill.pipeline.later import (
    check_chat,
    check_corpus,
    check_device,
    check_draft,
    check_export,
    check_gguf,
    check_questions,
    check_static,
    check_teacher,
    check_trackers,
    check_traffic,
    check_writer,
)
from distill.pipeline.stages import NAMES, require_part
from distill.recipe import Recipe, is_path
from distill.recipe.text.unloaded import REASON, not_run


@dataclass
class Preflight:
    """Lines about the checks that passed, and the names of the checks that were not made."""

    lines: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def warnings(self) -> list[str]:
        """Those lines that a user should see even when everything passed."""
        return [line for line in self.lines if "does not fit" in line or "warning" in line or "LOSSY" in line]


def preflight(
    recipe: Recipe, inputs: bool = True, offline: bool = False, until: str | None = None, teacher: bool = True
) -> Preflight:
    """Check a recipe before its first stage, for the stages up to `until`.

    Without `inputs`, the corpus sources, the traffic file and the writer of answers are left out: a run that has read
    them does not need them any more; without `teacher`, the teacher's file or servers are. With `offline`, checks that
    need a model hub or a server are skipped and listed.
    """
    found = Preflight()
    if until is not None:
        require_part(recipe, [until])
    last = NAMES.index(until) if until is not None else len(NAMES)
    if inputs:
        lines, found.skipped, documents = check_corpus(recipe, offline)
        found.lines += lines
    if inputs and (last >= NAMES.index("answers") or recipe.corpus.asked):
        lines, unasked = check_writer(recipe, offline)
        found.lines += lines
        found.skipped += unasked
    remote = [model for model in dict.fromkeys([recipe.target.model, recipe.donor_model]) if not is_path(model)]
    if last >= NAMES.index("train"):
        found.lines += check_trackers(recipe)
    found.lines += check_device(recipe)
    found.lines += check_unloaded(recipe)
    if remote and offline:
        found.skipped += [f"model {model}" for model in remote]
        found.skipped.append("pair rules, sizes and the cut, which need those models' configurations")
        return found
    checks: list[Callable[[Recipe], list[str]]] = [
        check_stages,
        check_size,
        check_pair,
        check_weights_of_models,
        check_context,
        check_draft,
        check_static,
        check_disk,
    ]
    if inputs:
        checks += [check_traffic, check_questions, partial(check_chat, documents=documents)]
    if last >= NAMES.index("export"):
        checks.append(check_export)
    checks.append(check_gguf)
    for check in checks:
        found.lines += check(recipe)
    if teacher and last >= NAMES.index("teacher"):
        found.lines += check_teacher(recipe, offline)
    return found


def check_stages(recipe: Recipe) -> list[str]:
    """The settings of cut, training and speedup are possible with these models."""
    from distill.speculative.configured import check_configurations, check_trees
    from distill.surgery.stage import check_cut
    from distill.training.plan import check_training

    lines = check_cut(recipe) + check_training(recipe) + check_configurations(recipe)
    check_trees(recipe, recipe.donor_model)
    return lines


def check_unloaded(recipe: Recipe) -> list[str]:
    """What a run does and leaves out where it never loads the target."""
    if recipe.target.load:
        return []
    return [
        f"target: no weights of {recipe.target.model} are read or downloaded, only its tokenizer and config.json",
        f"not run: {', '.join(not_run(recipe))}, decoded rounds, the target's GGUF files: {REASON}",
    ]


def check_pair(recipe: Recipe) -> list[str]:
    """Target and donor as a pair.

    A transplanted draft has the target's own vocabulary and rows: only the context remains to be compared.
    """
    from distill.models.pairs import compare_pair

    pair = compare_pair(recipe.target.model, recipe.donor_model, same_rows=recipe.cut.rows == "target")
    return pair.lines() if recipe.cut.transplant is None else [f"context: {pair.context or 'fits'}"]


def check_size(recipe: Recipe) -> list[str]:
    """The draft costs less than its target, or is allowed to cost as much."""
    from distill.models.hugging_face import load_config
    from distill.surgery.size import check_smaller

    if not recipe.cut.allow_full_size:
        check_smaller(recipe, load_config(recipe.target.model), load_config(recipe.donor_model))
    return []


def check_weights_of_models(recipe: Recipe) -> list[str]:
    """The weights of target and donor hold the tensors that their config.json asks for; a target that is not loaded
    needs none."""
    from distill.models.weight_check import check_weights

    read = dict.fromkeys([*([recipe.target.model] if recipe.target.load else []), recipe.donor_model])
    return [check_weights(model) for model in read]


def check_context(recipe: Recipe) -> list[str]:
    """A block of the corpus fits the target's context."""
    from distill.models.loaded import context_of

    context = context_of(recipe.target.model)
    if context is not None and recipe.corpus.block > context:
        raise RecipeError(
            f"corpus.block is {recipe.corpus.block}, the target's context {context}", "lower corpus.block"
        )
    return []


def _held_out_positions(recipe: Recipe) -> int:
    """Positions of the held-out stores at most; 0 where the target itself is run on held-out texts."""
    acceptance, test = recipe.train.acceptance, recipe.eval
    if recipe.target.load or acceptance is None:
        return 0
    answers = acceptance.prompts * acceptance.new_tokens + test.prompts * test.new_tokens
    prompts = (acceptance.prompts + test.prompts) * recipe.answers.prompt_tokens
    return answers + prompts + (recipe.cut.score_blocks + test.file_blocks) * recipe.corpus.block


def check_disk(recipe: Recipe) -> list[str]:
    """The teacher's distributions fit the disk."""
    from distill.models.hugging_face import load_config
    from distill.target.store import bytes_per_position

    hidden = load_config(recipe.target.model).get_text_config().hidden_size
    answer = recipe.answers.prompt_tokens + recipe.answers.new_tokens
    positions = recipe.corpus.tokens + recipe.answers.prompts * answer + _held_out_positions(recipe)
    store = positions * bytes_per_position(recipe.teacher, hidden, recipe.target.dtype)
    free = shutil.disk_usage(Path.cwd()).free
    if store > free:
        raise RunError(
            "the teacher store does not fit the disk",
            "lower corpus.tokens, answers.prompts or teacher.top_k, or store nothing with teacher.kind: online",
        )
    return [f"disk: the teacher store needs about {store / 1e6:.0f} MB, {free / 1e9:.0f} GB are free here"]

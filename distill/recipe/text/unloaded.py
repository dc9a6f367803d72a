"""Runs that never load the target's weights (`target.load: false`): what a recipe must give and leave out for them;
and the stages that not every run has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distill.recipe.whole import Recipe

REASON = "the target's weights are not loaded (target.load: false)"
QUESTIONS = "questions"  # the stage in which the target writes questions
TIMED = ("profile", "speedup")  # stages that time the target
HELD_OUT = ("validation", "test")  # stages that take the place of the target where it would be run on held-out texts


def left_out(recipe: Recipe) -> dict[str, str]:
    """The stages that a recipe's run does not have, each with the reason."""
    unasked = {} if recipe.corpus.asked else {QUESTIONS: "its corpus has no source of kind target"}
    if recipe.target.load:
        return unasked | dict.fromkeys(HELD_OUT, "its target is loaded and runs on held-out texts itself")
    return unasked | not_run(recipe)


def not_run(recipe: Recipe) -> dict[str, str]:
    """Those of them that runs have as a rule, so that a user should hear of each."""
    return {} if recipe.target.load else dict.fromkeys(TIMED, REASON)


def faults(recipe: Recipe) -> Iterator[str]:
    """Everything in a recipe with `target.load: false` that needs the weights, each with the remedy."""
    answers, teacher, cut, train = recipe.answers, recipe.teacher, recipe.cut, recipe.train
    if recipe.target.quantise is not None or recipe.target.shard:
        yield "target.quantise and target.shard are for loaded weights: leave them out"
    if answers.prompts and answers.writer is None:
        yield "answers.writer must name a GGUF file or servers that write the answers"
    elif recipe.corpus.asked and answers.writer is None:
        yield "answers.writer must name a GGUF file or servers that write the questions of corpus.sources"
    if teacher.kind != "compact":
        yield f"teacher.kind {teacher.kind} needs the weights: use compact"
    elif teacher.gguf is None and teacher.server is None:
        yield "teacher.gguf or teacher.server must give the distributions"
    if recipe.donor_model == recipe.target.model:
        yield "cut.donor is the target itself: name another model"
    if cut.transplant is not None and cut.transplant.method == "pursuit":
        yield "cut.transplant.method pursuit reads the target's embeddings: use subtokens"
    if cut.search is not None:
        yield "cut.search times the target: give cut.layers and cut.mlp_width instead"
    if cut.trim is not None and cut.trim.size is None and cut.trim.by == "price":
        yield "cut.trim.by price times the target: use mass, or give a size"
    if train.acceptance is None:
        yield "train.acceptance is null: its validation prompts are those that cuts and weights are chosen on; give it"
    if train.replay is not None:
        yield "train.replay decodes with the target: leave it out"
    if train.hidden_states is not None:
        yield "train.hidden_states reads the target's hidden states: leave it out"

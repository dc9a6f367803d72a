"""Stages `validation` and `test` of a run that never loads the target: its answers to held-out prompts, and its
distributions on them and on held-out text, in stores like the teacher's.

They take the place of the target wherever it would be run on held-out texts: to compare cuts, to choose weights, and to
measure. Nothing in them is learnt from.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from distill.files import write_json
from distill.models.hugging_face import load_tokenizer
from distill.recipe import Recipe
from distill.run import Run
from distill.target.groups import rules_of, write_answers
from distill.target.teacher import write_store
from distill.teacher.held_out import ANSWERS, Split, held_out, served_answers, sizes
from distill.texts import Prompt, count_texts, read_prompts

SUMMARY = "summary.json"


def hold_out_validation(recipe: Recipe, run: Run) -> list[Path]:
    """Write validation/, on which cuts are compared and weights are chosen."""
    return _hold_out(recipe, run, "validation")


def hold_out_test(recipe: Recipe, run: Run) -> list[Path]:
    """Write test/, from which the printed figures come."""
    return _hold_out(recipe, run, "test")


def _asked(recipe: Recipe, run: Run, split: Split) -> list[Prompt]:
    """The prompts that the writer answers, beside the served answers; none without a writer."""
    if recipe.answers.writer is None:
        return []
    count, _ = sizes(recipe, split)
    served = {one.id for one in served_answers(run, split)}
    left = max(0, count - len(served))
    return [prompt for prompt in read_prompts(run, split) if prompt.id not in served][:left]


def _hold_out(recipe: Recipe, run: Run, split: Split) -> list[Path]:
    """Answer the prompts, then store the distributions; resumes by the reply and by the shard. One process does it."""
    _, new_tokens = sizes(recipe, split)
    prompts = _asked(recipe, run, split)
    if prompts:
        rules = rules_of(recipe, load_tokenizer(recipe.target.model))
        rules = replace(rules, new_tokens=new_tokens, keep_truncated=True)
        write_answers(recipe, run, prompts, rules, (0, 1), split, ANSWERS)
    texts = held_out(recipe, run, split)
    tokens = sum(len(one.answer) for one in texts.answers)
    listed = "".join(f", {count} dropped: {reason}" for reason, count in texts.dropped.items())
    run.say(
        f"  {len(texts.answers)} answers of {tokens} tokens to {split} prompts{listed}; "
        f"{int(texts.given.mask.sum())} positions of given text"
    )
    write_store(recipe, run, texts.blocks, (0, 1), split, all_entries=True)
    summary: dict[str, Any] = {
        "answers": len(texts.answers),
        "answer_tokens": tokens,
        "not_ended": sum(not one.ended for one in texts.answers),
        "dropped": texts.dropped,
        "by_class": count_texts((one.label, one.mode, len(one.answer)) for one in texts.answers),
    }
    write_json(run.path(split, SUMMARY), summary)
    return [run.path(split)]

"""Stages `validation` and `test` of a run that never loads the target: its answers to held-out prompts, and its
distributions on them and on held-out text, in stores like the teacher's.

They take the place of the target wherever it would be run on held-out texts: to compare cuts, to choose weights, and to
measure. Nothing in them is learnt from.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from distill.errors import DataError
from distill.files import write_json
from distill.models.hugging_face import load_tokenizer
from distill.packing import Packed, concatenate, pack
from distill.recipe import Recipe
from distill.run import Run
from distill.target.answers import rules_of, write_answers
from distill.target.teacher import write_store
from distill.texts import Answer, Prompt, count_texts, read_answers, read_prompts

Split = Literal["validation", "test"]
ANSWERS = "answers"  # the name of the files of answers
SUMMARY = "summary.json"
READABLE = ("", "truncated")  # reasons for which an answer is not learnt from, but says what the target wrote


def hold_out_validation(recipe: Recipe, run: Run) -> list[Path]:
    """Write validation/: what cuts are compared and weights are chosen on."""
    return _hold_out(recipe, run, "validation")


def hold_out_test(recipe: Recipe, run: Run) -> list[Path]:
    """Write test/: what the printed figures come from."""
    return _hold_out(recipe, run, "test")


@dataclass(frozen=True)
class HeldOut:
    """Held-out texts: the answers, and their blocks, one document each; the given text's blocks; what was left out."""

    answers: list[Answer]
    own: Packed
    given: Packed
    dropped: dict[str, int]

    @property
    def blocks(self) -> Packed:
        """All blocks, the answers' first; their documents are numbered where those of the given text are."""
        return concatenate([part for part in (self.own, self.given) if len(part)])


def held_out(recipe: Recipe, run: Run, split: Split) -> HeldOut:
    """The texts of a finished or begun held-out stage, a pure function of its files and those of stage `corpus`.

    An answer counts as the target wrote it, also where it ends in a loop or was cut short. Raises DataError where no
    answer is left.
    """
    count, _ = _sizes(recipe, split)
    found = _served(run, split)[:count] + read_answers(run, ANSWERS, split)
    left = [one for one in found if one.dropped in READABLE and one.answer]
    dropped = Counter(one.dropped or "empty" for one in found if not (one.dropped in READABLE and one.answer))
    if not left:
        listed = ", ".join(f"{number} × {reason}" for reason, number in dropped.items()) or "there was none"
        raise DataError(
            f"no answer to a {split} prompt is left: {listed}",
            f"correct answers.writer and use --redo {split}, or give more served lines (answers.traffic)",
        )
    own = pack(((one.prompt + one.answer, len(one.prompt)) for one in left), recipe.corpus.block, split_long=False)
    blocks = recipe.cut.score_blocks if split == "validation" else recipe.eval.file_blocks
    given = Packed.load(run.path("corpus", f"text-{split}.safetensors")).take(slice(0, blocks))
    return HeldOut(left, own, given, dict(sorted(dropped.items())))


def _sizes(recipe: Recipe, split: Split) -> tuple[int, int]:
    """How many prompts are answered, with at most how many tokens each."""
    if split == "test":
        return recipe.eval.prompts, recipe.eval.new_tokens
    assert recipe.train.acceptance is not None, "recipes without it are refused"
    return recipe.train.acceptance.prompts, recipe.train.acceptance.new_tokens


def _served(run: Run, split: Split) -> list[Answer]:
    """Held-out answers of served traffic: the target has written them already."""
    return read_answers(run, f"traffic-{split}")


def _asked(recipe: Recipe, run: Run, split: Split) -> list[Prompt]:
    """The prompts that the writer answers, beside the served answers; none without a writer."""
    if recipe.answers.writer is None:
        return []
    count, _ = _sizes(recipe, split)
    served = {one.id for one in _served(run, split)}
    left = max(0, count - len(served))
    return [prompt for prompt in read_prompts(run, split) if prompt.id not in served][:left]


def _hold_out(recipe: Recipe, run: Run, split: Split) -> list[Path]:
    """Answer the prompts, then store the distributions; resumes by the reply and by the shard. One process does it."""
    _, new_tokens = _sizes(recipe, split)
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

"""Held-out texts of a run that never loads the target, as stages `validation` and `test` have left them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from distill.errors import DataError
from distill.packing import Packed, concatenate, pack
from distill.recipe import Recipe
from distill.run import Run
from distill.texts import Answer, listed, read_answers

Split = Literal["validation", "test"]
ANSWERS = "answers"  # the name of the files of answers
READABLE = ("", "truncated")  # reasons for which an answer is not learnt from, but says what the target wrote


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
    count, _ = sizes(recipe, split)
    answers, dropped = [], Counter[str]()
    for one in served_answers(run, split)[:count] + read_answers(run, ANSWERS, split):
        if one.dropped in READABLE and one.answer:
            answers.append(one)
        else:
            dropped[one.dropped or "empty"] += 1
    if not answers:
        raise DataError(
            f"no answer to a {split} prompt is left: {listed(dropped, ' × ') or 'there was none'}",
            f"correct answers.writer and use --redo {split}, or give more served lines (answers.traffic)",
        )
    own = pack(((one.prompt + one.answer, len(one.prompt)) for one in answers), recipe.corpus.block, split_long=False)
    blocks = recipe.cut.score_blocks if split == "validation" else recipe.eval.file_blocks
    given = Packed.load(run.path("corpus", f"text-{split}.safetensors")).take(slice(0, blocks))
    return HeldOut(answers, own, given, dict(sorted(dropped.items())))


def sizes(recipe: Recipe, split: Split) -> tuple[int, int]:
    """How many prompts are answered, with at most how many tokens each."""
    if split == "test":
        return recipe.eval.prompts, recipe.eval.new_tokens
    assert recipe.train.acceptance is not None, "recipes without it are refused"
    return recipe.train.acceptance.prompts, recipe.train.acceptance.new_tokens


def served_answers(run: Run, split: Split) -> list[Answer]:
    """Held-out answers of served traffic: the target has written them already."""
    return read_answers(run, f"traffic-{split}")

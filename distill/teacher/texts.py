"""The texts of the three splits in blocks: the target's answers first, then given text.

Train answers are packed tightly, because their order does not matter. Held-out answers keep their order, with one
document each, so that figures can be paired by prompt.
"""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy

from distill.data.packing import Blocks, Deferred, concatenate, pack, planned
from distill.data.samples import (
    TEXT_FAULTS,
    Samples,
    Split,
    joined_samples,
    learnt_answers,
    listed,
    read_answers,
    read_prompts,
)
from distill.engines.torch.blocks import Packed
from distill.engines.torch.hugging_face import tokenizer_digest
from distill.errors import DataError
from distill.files import digest, read_json, reference_digest, write_json
from distill.recipe import Recipe
from distill.run import Run

# Held-out answers are measured as the target wrote them, also if training would drop them for these reasons.
READABLE = ("", "truncated", *TEXT_FAULTS)
ORIGIN = "origin.json"  # the digest of what the files of a split's folder were made from


def target_metadata(recipe: Recipe) -> dict[str, Any]:
    """The identity of a target: its content, its tokenizer's vocabulary, and its type."""
    return {
        "target": recipe.target.model,
        "target_digest": reference_digest(recipe.target.model),
        "tokenizer_digest": tokenizer_digest(recipe.target.model),
        "dtype": recipe.target.dtype,
        "quantise": recipe.target.quantise,
    }


@dataclass(frozen=True)
class HeldOutSizes:
    """The size of a held-out split: prompts, the most new tokens of an answer, and blocks of given text."""

    prompts: int
    new_tokens: int
    blocks: int


def held_out_sizes(recipe: Recipe, split: Split) -> HeldOutSizes:
    """The size that a recipe gives split `validation` or `test`, without given text if only answers are stored."""
    if split == "test":
        sizes = HeldOutSizes(recipe.eval.prompts, recipe.eval.new_tokens, recipe.eval.file_blocks)
    else:
        chosen = recipe.train.acceptance
        prompts = 0 if chosen is None else chosen.prompts
        sizes = HeldOutSizes(prompts, recipe.answers.new_tokens, recipe.cut.score_blocks)
    return replace(sizes, blocks=0) if recipe.writer_teaches else sizes


def answer_blocks(answers: Samples, recipe: Recipe) -> tuple[Deferred, list[list[list[int]]]]:
    """Train answers in blocks, and the numbers of the answers in each document of each block."""
    return planned(answers.ids, len(answers), recipe.corpus.block)


def packed_order(answers: Samples, recipe: Recipe) -> Samples:
    """The answers in the order of their blocks."""
    rows = answer_blocks(answers, recipe)[1]
    return answers.take([number for row in rows for document in row for number in document])


def served_answers(run: Run, split: Split) -> Samples:
    """Held-out answers of served traffic, which the target has written already."""
    prompts = read_prompts(run, split)
    return prompts.take(prompts.column("answer") > 0)


@dataclass(frozen=True)
class HeldOut:
    """Held-out texts: answers, their blocks (a document each), blocks of given text, and counts of dropped answers."""

    answers: Samples
    answered: Packed
    given: Packed
    dropped: dict[str, int]

    @property
    def blocks(self) -> Packed:
        """All blocks, those of answers first. Documents are numbered if those of the given text are."""
        parts = [part for part in (self.answered, self.given) if len(part)]
        return concatenate(parts) if parts else self.given


def held_out(recipe: Recipe, run: Run, split: Split) -> HeldOut:
    """The texts of split `validation` or `test`, a pure function of the files of stages `corpus` and `answers`.

    An answer that ends in a loop or was cut short counts, too. Raises DataError if answers were requested and none is
    left.
    """
    sizes = held_out_sizes(recipe, split)
    written = joined_samples([served_answers(run, split)[: sizes.prompts], read_answers(run, split)])
    reasons = written.column("dropped")
    readable = numpy.isin(reasons, READABLE) & (written.column("answer") > 0)
    answers, dropped = written.take(readable), Counter(reason or "empty" for reason in reasons[~readable])
    if len(written) and not answers:
        hint = "correct what wrote them (answers) and use --redo answers, or give more served lines (answers.traffic)"
        raise DataError(f"no answer to a {split} prompt is left: {listed(dropped, ' × ')}", hint)
    texts = [(numpy.concatenate(turn), len(turn[0])) for turn in map(answers.ids, range(len(answers)))]
    answered = pack(texts, recipe.corpus.block, split_long=False)
    given = Packed.load(run.path("corpus", f"text-{split}.safetensors")).take(slice(0, sizes.blocks))
    return HeldOut(answers, answered, given, dict(sorted(dropped.items())))


@dataclass(frozen=True)
class SplitBlocks:
    """The blocks of a split, those of answers first, with the number of blocks and scored positions of answers."""

    blocks: Blocks
    answer_blocks: int
    answer_positions: int
    answers: Samples
    documents: list[list[list[int]]]  # the numbers of the answers in each document of each block of answers


def split_blocks(recipe: Recipe, run: Run, split: Split) -> SplitBlocks:
    """The blocks on which a split's store holds the target's distributions."""
    if split == "train":
        answers = learnt_answers(run)
        blocks, documents = answer_blocks(answers, recipe)
        text = Packed.load(run.path("corpus", "text-train.safetensors"))
        return SplitBlocks(blocks.before(text), len(blocks), int(blocks.scored.sum()), answers, documents)
    texts = held_out(recipe, run, split)
    numbers = count()
    documents = [[[next(numbers)] for _ in range(int(block.max()) + 1)] for block in texts.answered.documents]
    return SplitBlocks(texts.blocks, len(texts.answered), int(texts.answered.mask.sum()), texts.answers, documents)


def renew(folder: Path, origin: dict[str, Any]) -> None:
    """Remove the files of a split's folder unless they were made from `origin`."""
    path = folder / ORIGIN
    if path.exists() and read_json(path, {"digest": str})["digest"] == digest(origin):
        return
    if folder.exists():
        shutil.rmtree(folder)
    write_json(path, {"digest": digest(origin)})

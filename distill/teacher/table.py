"""Stage `table`: n-grams of the target's own train answers, from which `drafter: table` drafts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from distill.data.texts import Answer, drop_reason, read_answers
from distill.decoding.ngrams import ORDER, Expected, NGramTable, count_ngrams, write_table
from distill.devices import doubled, pick_device
from distill.engines.torch.hugging_face import load_tokenizer
from distill.errors import DataError
from distill.files import digest
from distill.recipe import Recipe
from distill.run import Run
from distill.teacher.stage import packed_order
from distill.teacher.store import TeacherStore, read_manifest, redo

LIKELIEST = 12  # tokens of the target's distribution that may count
ROWS = 128  # distributions that are read at once
FILE = ("table", "ngrams.safetensors")  # in a run


def table(recipe: Recipe, run: Run) -> list[Path]:
    """Count n-grams of the run's train answers.

    Where the teacher store has the target's distributions, its likeliest tokens count in place of the drawn ones.
    """
    kept = packed_order(learnt_answers(run), recipe)
    expected = None
    if read_manifest(run)["kind"] != "online":
        expected = expected_tokens(TeacherStore(run), kept, pick_device(recipe.device))
    levels = count_ngrams([*map(counted_text, kept)], expected=expected)
    path = run.path(*FILE)
    about = {"target": recipe.target.model, "tokenizer": tokenizer_digest(recipe.target.model)}
    tokens = sum(len(answer.answer) for answer in kept)
    write_table(path, levels, about | {"texts": str(len(kept)), "tokens": str(tokens)})
    ngrams = sum(len(level.tokens) for level in levels)
    kind = "" if expected is None else ", by the teacher's probabilities"
    run.say(f"  {len(kept)} answers of {tokens} tokens: {ngrams} n-grams{kind}, {path.stat().st_size / 1e6:.1f} MB")
    return [path]


def learnt_answers(run: Run) -> list[Answer]:
    """The answers that training learns from, never held-out ones; DataError where all were dropped."""
    kept = [answer for answer in read_answers(run, "train") if not drop_reason(answer)]
    if not kept:
        raise DataError("no answer is left to count n-grams of: all were dropped", "answers/ says why")
    return kept


def counted_text(answer: Answer) -> list[int]:
    """The ids that n-grams are counted of: an answer behind the last tokens of its prompt."""
    return [*answer.prompt[-ORDER:], *answer.answer]


def expected_tokens(store: TeacherStore, answers: Sequence[Answer], device: torch.device) -> list[Expected]:
    """The target's likeliest tokens at each token of the answers, which a store holds in this order, before its text;
    DataError where it holds others."""
    scored = [one.answer if one.prompt else one.answer[1:] for one in answers]
    written = [*chain.from_iterable(scored)]
    if store.packed.labels()[store.packed.mask][: len(written)].tolist() != written:
        raise DataError(f"{store.folder} holds the distributions of other answers", redo("teacher"))
    ids, chances, read = list[Tensor](), list[Tensor](), 0
    for block in range(store.blocks):
        if read >= len(written):
            break
        teacher = store.teacher(torch.tensor([block]), device)
        for start in range(0, len(teacher), ROWS):
            chunk = teacher.chunk(slice(start, start + ROWS))
            best, columns = chunk.log_probabilities.topk(min(LIKELIEST, chunk.log_probabilities.shape[-1]))
            ids.append((columns if chunk.ids is None else chunk.ids.gather(-1, columns)).long().cpu())
            chances.append(doubled(best.exp()).cpu())
        read += len(teacher)
    lengths = [len(one) for one in scored]
    parts = (torch.cat(some)[: len(written)].split(lengths) for some in (ids, chances))
    return [Expected(tokens.numpy(), probabilities.numpy()) for tokens, probabilities in zip(*parts, strict=True)]


def tokenizer_digest(target: str) -> str:
    """Of the vocabulary that a target's texts are counted in."""
    return digest(load_tokenizer(target).get_vocab())


def open_table(path: Path, target: str) -> NGramTable:
    """The table in a file, or of a run's folder, for this target; DataError where it is of another vocabulary, or
    damaged."""
    if path.is_dir():
        path = path.joinpath(*FILE)
    return NGramTable.open(path, tokenizer_digest(target))

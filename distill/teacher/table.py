"""Stage `table`: n-grams of the target's own train answers, from which `drafter: table` drafts."""

from __future__ import annotations

from pathlib import Path

from distill.data.texts import Answer, drop_reason, read_answers
from distill.decoding.ngrams import ORDER, NGramTable, count_ngrams, write_table
from distill.engines.torch.hugging_face import load_tokenizer
from distill.errors import DataError
from distill.files import digest
from distill.recipe import Recipe
from distill.run import Run

FILE = ("table", "ngrams.safetensors")  # in a run


def table(recipe: Recipe, run: Run) -> list[Path]:
    """Count n-grams of the run's train answers."""
    kept = learnt_answers(run)
    levels = count_ngrams(map(counted_text, kept))
    path = run.path(*FILE)
    about = {"target": recipe.target.model, "tokenizer": tokenizer_digest(recipe.target.model)}
    tokens = sum(len(answer.answer) for answer in kept)
    write_table(path, levels, about | {"texts": str(len(kept)), "tokens": str(tokens)})
    ngrams = sum(len(level.tokens) for level in levels)
    size = path.stat().st_size
    run.say(f"  {len(kept)} answers of {tokens} tokens: {ngrams} n-grams, {size / 1e6:.1f} MB")
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


def tokenizer_digest(target: str) -> str:
    """Of the vocabulary that a target's texts are counted in."""
    return digest(load_tokenizer(target).get_vocab())


def open_table(path: Path, target: str) -> NGramTable:
    """The table in a file, or of a run's folder, for this target; DataError where it is of another vocabulary, or
    damaged."""
    if path.is_dir():
        path = path.joinpath(*FILE)
    return NGramTable.open(path, tokenizer_digest(target))

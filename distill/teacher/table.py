"""Stage `table`: n-grams of the target's answers, counted by its distributions."""

from __future__ import annotations

from pathlib import Path

import numpy
import torch
from torch import Tensor
from torch.nn.functional import pad

from distill.data.samples import Samples, how_to_redo, learnt_answers
from distill.decoding.lookup_files import counted_text
from distill.decoding.ngrams import TABLE_FILE, Expected, count_ngrams, write_table
from distill.devices import as_float64, pick_device
from distill.engines.torch.hugging_face import tokenizer_digest
from distill.errors import DataError
from distill.recipe import Recipe
from distill.run import Run
from distill.teacher.store import TeacherStore
from distill.teacher.texts import packed_order

LIKELIEST = 12  # tokens of the target's distribution that may count
AT_ONCE = 128  # positions whose distributions are read at once


def table(recipe: Recipe, run: Run) -> list[Path]:
    """Count the n-grams of the run's train answers. The target's likeliest tokens count in place of the drawn ones."""
    kept = packed_order(learnt_answers(run), recipe)
    expected = expected_tokens(TeacherStore(run), kept, pick_device(recipe.device))
    levels = count_ngrams([*map(counted_text, kept)], expected=expected)
    path = run.path(*TABLE_FILE)
    about = {"target": recipe.target.model, "tokenizer": tokenizer_digest(recipe.target.model)}
    tokens = sum(len(answer.answer) for answer in kept)
    write_table(path, levels, about | {"texts": str(len(kept)), "tokens": str(tokens)})
    ngrams = sum(len(level.tokens) for level in levels)
    size = f"{ngrams} n-grams, by the teacher's probabilities, {path.stat().st_size / 1e6:.1f} MB"
    run.say(f"  {len(kept)} answers of {tokens} tokens: {size}")
    return [path]


def expected_tokens(store: TeacherStore, answers: Samples, device: torch.device) -> list[Expected]:
    """The target's likeliest tokens at each token of the answers, which come first in the store and in this order.

    Raises DataError if the store holds other answers.
    """
    turns = map(answers.ids, range(len(answers)))
    scored = [answer if len(prompt) else answer[1:] for prompt, answer in turns]
    written = torch.from_numpy(numpy.concatenate(scored))
    labels, ids, chances, read = list[Tensor](), list[Tensor](), list[Tensor](), 0
    for block in range(store.blocks):
        if read >= len(written):
            break
        stored = store.read(torch.tensor([block]))
        labels.append(stored.blocks.labels())
        teacher = stored.distributions(device)
        for start in range(0, len(teacher), AT_ONCE):
            chunk = teacher.chunk(slice(start, start + AT_ONCE))
            missing = max(0, LIKELIEST - chunk.log_probabilities.shape[-1])
            logs = pad(chunk.log_probabilities, (0, missing), value=-torch.inf)
            best, tokens = logs.topk(LIKELIEST)
            if chunk.ids is not None:
                tokens = pad(chunk.ids, (0, missing), value=store.vocabulary).gather(-1, tokens)
            # An unused place gets the id -1, which no token has. Its probability is 0.
            ids.append(tokens.masked_fill(tokens >= store.vocabulary, -1).long().cpu())
            chances.append(as_float64(best.exp()).cpu())
        read += len(teacher)
    if not torch.equal(torch.cat(labels)[: len(written)], written):
        raise DataError(f"{store.folder} holds the distributions of other answers", how_to_redo("teacher"))
    lengths = [len(answer) for answer in scored]
    parts = (torch.cat(values)[: len(written)].split(lengths) for values in (ids, chances))
    return [Expected(tokens.numpy(), probabilities.numpy()) for tokens, probabilities in zip(*parts, strict=True)]

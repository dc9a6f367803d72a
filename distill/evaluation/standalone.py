"""Evaluation of any two Hugging Face models on given texts, without a recipe or a run."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

from distill.errors import DataError
from distill.evaluation.stage import continue_all, evaluate_pair
from distill.models.hugging_face import (
    encode,
    end_ids,
    load_model,
    load_target,
    load_tokenizer,
    pick_device,
    real_tokens,
)
from distill.packing import Packed, pack
from distill.recipe import Recipe
from distill.results.evaluation_results import EvaluationReport
from distill.sampler import Sampler
from distill.texts import prompt_seed


def evaluate_standalone(
    recipe: Recipe,
    documents: Sequence[Any],
    cut: Callable[..., list[Any]],
    temperature: float,
    prompts: int,
    divergence: bool,
    acceptance: bool,
    command: str,
) -> EvaluationReport:
    """The report of `evaluate_pair` for recipe.target and recipe.cut.donor on documents (with `name` and `text`).

    `cut` is the corpus room's `cut_prompts`. Raises DataError when the texts give fewer than 4 prompts.
    """
    device = pick_device(recipe.device)
    target = load_target(recipe.target, device)
    draft = load_model(recipe.cut.donor, recipe.target.dtype, device)
    tokenizer = load_tokenizer(recipe.target.model)
    ends = end_ids(target.config, tokenizer)
    vocabulary = min(real_tokens(target.config, tokenizer), draft.config.vocab_size)
    to_ids = functools.partial(encode, tokenizer)
    length, new = recipe.answers.prompt_tokens, recipe.eval.new_tokens
    found = cut(list(documents), to_ids, prompts, length, 4 * (length + new), recipe.seed)
    if len(found) < 4:
        raise DataError(
            f"the texts give {len(found)} prompts of {length} tokens", "give more or longer texts (4 at least)"
        )
    ids = [prompt.ids for prompt in found]
    sampler = Sampler(temperature=temperature)
    block = min(recipe.corpus.block, target.config.max_position_embeddings, draft.config.max_position_embeddings)
    domains: dict[str, Packed] = {}
    if divergence:
        seeds = [prompt_seed(recipe.seed, prompt.id) for prompt in found]
        room, batch = min(new, block - length), recipe.answers.batch
        texts = continue_all(target, ids, sampler, room, seeds, ends, batch, vocabulary)
        domains["answers"] = pack(((p + t, len(p)) for p, t in zip(ids, texts, strict=True)), block, False)
        order = list(documents)
        random.Random(recipe.seed).shuffle(order)
        domains["files"] = pack(((to_ids(d.text), 1) for d in order), block, True).take(
            slice(0, recipe.eval.file_blocks)
        )
    report, _ = evaluate_pair(
        target,
        {"draft": draft},
        domains,
        ids,
        sampler,
        recipe.eval,
        vocabulary,
        ends,
        command,
        acceptance,
    )
    return report

"""Stage `answers`: the target's own text, batch by batch.

Legend: B prompts of a batch, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from distill.errors import DataError
from distill.models.hugging_face import end_ids, load_model, load_tokenizer, pick_device, real_tokens
from distill.progress import Progress
from distill.recipe import Recipe
from distill.run import Run, write_text
from distill.sampler import Sampler
from distill.speculative.sample import continue_prompts
from distill.target.traffic import write_traffic
from distill.texts import Answer, Prompt, prompt_seed, read_prompts


def is_looping(ids: Sequence[int], longest_period: int = 16, repeats: int = 6) -> bool:
    """Whether a text ends in the same piece of at most `longest_period` tokens, `repeats` times over."""
    for period in range(1, longest_period + 1):
        tail = ids[-period * repeats :]
        if len(tail) == period * repeats and all(tail[i] == tail[i - period] for i in range(period, len(tail))):
            return True
    return False


def answers(recipe: Recipe, run: Run) -> list[Path]:
    """Let the target continue the train prompts; one file per batch in answers/, which is the unit of resuming.

    Served answers, where the recipe names a file of them, are taken first.
    """
    folder = run.path("answers")
    tokenizer = load_tokenizer(recipe.target.model)
    if recipe.answers.traffic is not None:
        write_traffic(recipe, run, tokenizer, tokenizer.eos_token_id)
    if recipe.answers.prompts == 0:
        return [folder]
    model = load_model(recipe.target.model, recipe.target.dtype, pick_device(recipe.device))
    ends = end_ids(model.config, tokenizer)
    vocabulary = real_tokens(model.config, tokenizer)
    sampler = Sampler.of(recipe.sampler)
    found = read_prompts(run, "train")
    size, limit = recipe.answers.batch, recipe.answers.new_tokens
    work: list[tuple[Path, list[Prompt]]] = [
        (folder / f"train-{number:05d}.jsonl", found[start : start + size])
        for number, start in enumerate(range(0, len(found), size))
    ]
    room = model.config.max_position_embeddings - recipe.answers.prompt_tokens
    if limit > room:
        raise DataError(
            f"the target's context leaves {room} tokens after a prompt of {recipe.answers.prompt_tokens}",
            "lower answers.new_tokens",
        )
    missing = [item for item in work if not item[0].exists()]
    if len(missing) < len(work):
        run.say(f"  resuming: {len(work) - len(missing)} of {len(work)} batches are there")
    progress = Progress("answers, batches", len(work), len(work) - len(missing))
    for path, prompts in missing:
        seeds = [prompt_seed(recipe.seed, prompt.id) for prompt in prompts]
        texts = continue_prompts(model, [prompt.ids for prompt in prompts], sampler, limit, seeds, ends, vocabulary)
        lines = (
            asdict(Answer(prompt.id, prompt.ids, text, is_looping(text), prompt.source))
            for prompt, text in zip(prompts, texts, strict=True)
        )
        write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
        progress.step()
    return [folder]

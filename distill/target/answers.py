"""Stage `answers`: the target's own text, batch by batch.

Legend: B prompts of a batch, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from distill.errors import DataError
from distill.models.hugging_face import end_ids, load_model, load_tokenizer, pick_device
from distill.progress import Progress
from distill.recipe import Recipe
from distill.run import Run, write_text
from distill.sampler import Sampler
from distill.texts import Prompt, prompt_seed, read_prompts


@torch.inference_mode()
def continue_prompts(
    model: Any, prompts: Sequence[Sequence[int]], sampler: Sampler, limit: int, seeds: Sequence[int], ends: Sequence[int]
) -> list[list[int]]:
    """Continue B prompts (of any lengths) together, each with random numbers of its own.

    Returns up to `limit` new ids per prompt; one that ends keeps its end id as the last. Row b's draws depend on seeds[b]
    and on its own laws alone (batch mates only reach it through rounding).
    """
    from transformers import DynamicCache

    device = next(model.parameters()).device
    longest = max(len(prompt) for prompt in prompts)
    rows = len(prompts)
    ids = torch.zeros(rows, longest, dtype=torch.long)
    mask = torch.zeros(rows, longest + limit, dtype=torch.long)
    draws = torch.empty(rows, limit, dtype=torch.float64)
    for row, prompt in enumerate(prompts):  # left-padded, so that every row's last token is in the last column
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
        draws[row] = torch.rand(limit, generator=torch.Generator().manual_seed(seeds[row]), dtype=torch.float64)
    mask, draws = mask.to(device), draws.to(device)
    positions = (mask[:, :longest].cumsum(-1) - 1).clamp(min=0)
    padded = bool((mask[:, :longest] == 0).any())
    stop = torch.tensor(list(ends), device=device)
    finished = torch.zeros(rows, dtype=torch.bool, device=device)
    cache = DynamicCache()
    step_ids, step_positions = ids.to(device), positions
    chosen: list[torch.Tensor] = []
    for step in range(limit):
        logits = model(
            input_ids=step_ids,
            attention_mask=mask[:, : longest + step] if padded else None,
            position_ids=step_positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        cumulative = sampler.law(logits).double().cumsum(-1)
        # Inverse transform on the total that rounding left, so that the draw always falls on a possible token.
        token = torch.searchsorted(cumulative, draws[:, step : step + 1] * cumulative[:, -1:], right=True)
        token = token.clamp(max=logits.shape[-1] - 1)
        chosen.append(token)
        finished |= torch.isin(token.squeeze(-1), stop)
        if bool(finished.all()):
            break
        step_ids, step_positions = token, step_positions[:, -1:] + 1
    table = torch.cat(chosen, dim=1).tolist()
    end_set = set(ends)
    return [row[: next((i + 1 for i, token in enumerate(row) if token in end_set), len(row))] for row in table]


def is_looping(ids: Sequence[int], longest_period: int = 16, repeats: int = 6) -> bool:
    """Whether a text ends in the same piece of at most `longest_period` tokens, `repeats` times over."""
    for period in range(1, longest_period + 1):
        tail = ids[-period * repeats :]
        if len(tail) == period * repeats and all(tail[i] == tail[i - period] for i in range(period, len(tail))):
            return True
    return False


def answers(recipe: Recipe, run: Run) -> list[Path]:
    """Let the target continue the train and report prompts; one file per batch in answers/, which is the unit of resuming."""
    folder = run.path("answers")
    tokenizer = load_tokenizer(recipe.target.model)
    model = load_model(recipe.target.model, recipe.target.dtype, pick_device(recipe.device))
    ends = end_ids(model.config, tokenizer)
    sampler = Sampler.of(recipe.sampler)
    work: list[tuple[Path, list[Prompt], int]] = []
    for split, limit in (("train", recipe.answers.new_tokens), ("report", recipe.eval.new_tokens)):
        prompts = read_prompts(run, split)
        size = recipe.answers.batch
        for number, start in enumerate(range(0, len(prompts), size)):
            work.append((folder / f"{split}-{number:05d}.jsonl", prompts[start : start + size], limit))
    room = model.config.max_position_embeddings - recipe.answers.prompt_tokens
    if max(limit for _, _, limit in work) > room:
        raise DataError(
            f"the target's context leaves {room} tokens after a prompt of {recipe.answers.prompt_tokens}",
            "lower answers.new_tokens or eval.new_tokens",
        )
    missing = [item for item in work if not item[0].exists()]
    if len(missing) < len(work):
        run.say(f"  resuming: {len(work) - len(missing)} of {len(work)} batches are there")
    progress = Progress("answers, batches", len(work), len(work) - len(missing))
    for path, prompts, limit in missing:
        seeds = [prompt_seed(recipe.seed, prompt.id) for prompt in prompts]
        texts = continue_prompts(model, [prompt.ids for prompt in prompts], sampler, limit, seeds, ends)
        lines = (
            {"id": prompt.id, "prompt": prompt.ids, "answer": text, "looping": is_looping(text)}
            for prompt, text in zip(prompts, texts, strict=True)
        )
        write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
        progress.step()
    return [folder]


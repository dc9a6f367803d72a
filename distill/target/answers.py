"""Stage `answers`: the target's own text, batch by batch.

Legend: B prompts of a batch, V vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from distill import processes
from distill.errors import DataError
from distill.files import write_json, write_text
from distill.models.hugging_face import end_ids, load_target, load_tokenizer, pick_device, real_tokens
from distill.progress import Progress
from distill.recipe import Recipe
from distill.run import Run
from distill.sampler import Sampler
from distill.speculative.sample import continue_prompts
from distill.target.source import target_metadata
from distill.target.traffic import write_traffic
from distill.texts import Answer, Prompt, is_looping, prompt_seed, read_prompts


def answers(recipe: Recipe, run: Run, share: tuple[int, int] | None = None) -> list[Path]:
    """Let the target continue the train prompts; each batch is one file in answers/, the unit of resuming.

    Served answers, where the recipe names a file of them, come first. With several processes, `share` = (index, count)
    makes this one write every count-th batch; the first process finishes the stage when all are done. None: the share
    of this process among those it was launched with.
    """
    share = share or (processes.process_index(), processes.process_count())
    folder = run.path("answers")
    tokenizer = load_tokenizer(recipe.target.model)
    if recipe.answers.traffic is not None and share[0] == 0:
        write_traffic(recipe, run, tokenizer, tokenizer.eos_token_id)
    if recipe.answers.prompts == 0:
        return _finish(recipe, run, share, 0)
    model = load_target(recipe.target, pick_device(recipe.device))
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
    mine = processes.share_of(work, share, "batches of prompts", "answers.batch")
    missing = [item for item in mine if not item[0].exists()]
    whose = f" of process {share[0]}" if share[1] > 1 else ""
    if len(missing) < len(mine):
        run.say(f"  resuming: {len(mine) - len(missing)} of {len(mine)} batches{whose} exist")
    progress = Progress(f"answers, batches{whose}", len(mine), len(mine) - len(missing))
    for path, prompts in missing:
        seeds = [prompt_seed(recipe.seed, prompt.id) for prompt in prompts]
        texts = continue_prompts(model, [prompt.ids for prompt in prompts], sampler, limit, seeds, ends, vocabulary)
        lines = (
            asdict(Answer(prompt.id, prompt.ids, text, is_looping(text), prompt.source))
            for prompt, text in zip(prompts, texts, strict=True)
        )
        write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
        progress.step()
    return _finish(recipe, run, share, len(work))


def _finish(recipe: Recipe, run: Run, share: tuple[int, int], batches: int) -> list[Path]:
    """Wait for all processes; the first one writes manifest.json with the target and sampler of the answers."""
    processes.barrier()
    folder = run.path("answers")
    if share[0] == 0:
        manifest = {"format": 1, **target_metadata(recipe), "sampler": recipe.sampler.model_dump(mode="json")}
        write_json(folder / "manifest.json", manifest | {"batches": batches})
    return [folder]

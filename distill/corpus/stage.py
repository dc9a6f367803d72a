"""Stage `corpus`: read the sources, split them, pack their text and cut prompts."""

from __future__ import annotations

import functools
import json
import random
from dataclasses import asdict
from pathlib import Path

from distill.corpus.prompts import cut_prompts
from distill.corpus.sources import read_documents
from distill.corpus.splits import SPLITS
from distill.errors import DataError
from distill.files import write_atomically, write_json, write_text
from distill.models.hugging_face import encode, end_ids, load_config, load_tokenizer
from distill.packing import pack
from distill.recipe import Recipe
from distill.run import Run


def validation_prompts(recipe: Recipe) -> int:
    """The number of prompts for decisions during training: the choice of weights and the judgement of a replay."""
    train = recipe.train
    return (train.acceptance.prompts if train.acceptance else 0) + (train.replay.judges if train.replay else 0)


def corpus(recipe: Recipe, run: Run) -> list[Path]:
    """Write text-SPLIT.safetensors (packed blocks), prompts-SPLIT.jsonl and summary.json to corpus/."""
    folder = run.path("corpus")
    tokenizer = load_tokenizer(recipe.target.model)
    ends = end_ids(load_config(recipe.target.model), tokenizer)
    documents, dropped = read_documents(recipe.corpus)
    to_ids = functools.partial(encode, tokenizer)
    test_prompts = max(recipe.eval.prompts, recipe.speedup.prompts, recipe.speedup.grown_prompts)
    wanted = {"train": recipe.answers.prompts, "validation": validation_prompts(recipe), "test": test_prompts}
    # Text is capped: train by corpus.tokens, the other splits by the most that scoring and evaluation use.
    limits = {
        "train": recipe.corpus.tokens,
        "validation": recipe.cut.score_blocks * recipe.corpus.block,
        "test": recipe.eval.file_blocks * recipe.corpus.block,
    }
    summary: dict[str, object] = {"dropped": dict(dropped)}
    for split in SPLITS:
        own = [document for document in documents if document.split == split]
        random.Random(recipe.seed).shuffle(own)
        sequences: list[tuple[list[int], int]] = []
        total = 0
        for document in own:
            if total >= limits[split]:
                break
            ids = (to_ids(document.text) + ends[:1])[: limits[split] - total]
            sequences.append((ids, 1))
            total += len(ids)
        packed = pack(sequences, recipe.corpus.block, split_long=True)
        # Intervals are by document, so the reported text numbers its documents across blocks.
        save = functools.partial(packed.save, numbered=split == "test")
        write_atomically(folder / f"text-{split}.safetensors", save)
        stride = 4 * (recipe.answers.prompt_tokens + recipe.answers.new_tokens)
        prompts = cut_prompts(own, to_ids, wanted[split], recipe.answers.prompt_tokens, stride, recipe.seed)
        if len(prompts) < min(wanted[split], 2):
            raise DataError(
                f"the {split} split gives {len(prompts)} prompts of {recipe.answers.prompt_tokens} tokens",
                "add documents, or lower answers.prompt_tokens"
                + (", or train without: train.acceptance=null, train.replay=null" if split == "validation" else ""),
            )
        write_text(
            folder / f"prompts-{split}.jsonl",
            "".join(json.dumps(asdict(prompt)) + "\n" for prompt in prompts),
        )
        summary[split] = {"documents": len(own), "tokens": total, "blocks": len(packed), "prompts": len(prompts)}
        if split == "validation" and recipe.answers.traffic is None:  # traffic brings prompts of its own
            recipe.train.require_judges(len(prompts))  # now, not after the expensive stages
        short = f" of {wanted[split]} asked for" if len(prompts) < wanted[split] else ""
        run.say(f"  {split}: {len(own)} documents, {total} tokens kept, {len(prompts)} prompts{short}")
    write_text(
        folder / "documents-test.jsonl",
        "".join(json.dumps({"name": d.name, "text": d.text}) + "\n" for d in documents if d.split == "test"),
    )
    if dropped:
        run.say("  dropped: " + ", ".join(f"{count} {reason}" for reason, count in dropped.items()))
    write_json(folder / "summary.json", summary)
    return [folder]

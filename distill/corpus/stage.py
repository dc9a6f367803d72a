"""Stage `corpus`: read the sources, split them, pack their text and cut prompts."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distill.documents.chat_template import ChatTemplate
from distill.documents.prompts import ChatPrompts, cut_prompts
from distill.documents.sources import SPLITS, Document, Split, read_documents, with_questions
from distill.errors import DataError
from distill.files import write_atomically, write_json
from distill.models.hugging_face import encode, end_ids, load_config, load_tokenizer
from distill.packing import Packed, concatenate, pack
from distill.recipe import Corpus, Recipe
from distill.run import Run
from distill.texts import Prompt, count_texts, write_lines

TOO_LONG = "given answers whose prompts fill corpus.block"


def corpus(recipe: Recipe, run: Run) -> list[Path]:
    """Write text-SPLIT.safetensors (packed blocks), prompts-SPLIT.jsonl and summary.json to corpus/."""
    folder = run.path("corpus")
    tokenizer = load_tokenizer(recipe.target.model)
    ends = end_ids(load_config(recipe.target.model), tokenizer)
    sources = with_questions(recipe.corpus, run.path("questions"))
    documents, dropped = read_documents(sources)
    to_ids = functools.partial(encode, tokenizer)
    chat = chat_prompts(recipe, tokenizer, documents)
    weights = weights_of(sources)
    # Text is capped: train by corpus.tokens, the other splits by the most that scoring and evaluation use.
    limits = {
        "train": recipe.corpus.tokens,
        "validation": recipe.cut.score_blocks * recipe.corpus.block,
        "test": recipe.eval.file_blocks * recipe.corpus.block,
    }
    train = recipe.train
    counts = {
        "train": recipe.answers.prompts,
        # The choice of weights, and the judgement of a replay.
        "validation": (train.acceptance.prompts if train.acceptance else 0)
        + (train.replay.judges if train.replay else 0),
        "test": max(recipe.eval.prompts, recipe.speedup.prompts),
    }
    summary: dict[str, Any] = {}
    for split in SPLITS:
        own = [document for document in documents if document.split == split]
        random.Random(recipe.seed).shuffle(own)
        packed, given = pack_given(own, recipe.corpus.block, limits[split], to_ids, ends[:1], chat, dropped)
        # Intervals are by document, so the reported text numbers its documents across blocks.
        save = functools.partial(packed.save, numbered=split == "test")
        write_atomically(folder / f"text-{split}.safetensors", save)
        stride = 4 * (recipe.answers.prompt_tokens + recipe.answers.new_tokens)
        length = recipe.answers.prompt_tokens
        prompts = cut_prompts(own, to_ids, counts[split], length, stride, recipe.seed, chat, weights)
        _require_prompts(recipe, split, prompts, counts[split])
        write_lines(folder / f"prompts-{split}.jsonl", (prompt.line() for prompt in prompts))
        total = sum(tokens.total() for tokens in given.values())
        summary[split] = {
            "documents": len(own),
            "tokens": total,
            "blocks": len(packed),
            "prompts": len(prompts),
            "given": {name: dict(tokens) for name, tokens in given.items()},
            "asked": count_texts((prompt.label, prompt.mode, len(prompt.ids)) for prompt in prompts),
        }
        short = f" of {counts[split]} asked for" if len(prompts) < counts[split] else ""
        run.say(f"  {split}: {len(own)} documents, {total} tokens kept, {len(prompts)} prompts{short}")
    write_lines(
        folder / "documents-test.jsonl",
        ({"name": one.name, "text": one.plain_text} for one in documents if one.split == "test"),
    )
    if chat is not None:
        dropped += chat.dropped
    if dropped:
        run.say("  dropped: " + ", ".join(f"{count} {reason}" for reason, count in dropped.items()))
    write_json(folder / "summary.json", {"dropped": dict(dropped), **summary})
    return [folder]


def chat_prompts(recipe: Recipe, tokenizer: Any, documents: list[Document]) -> ChatPrompts | None:
    """The renderer of conversations as prompts; None where the documents hold none."""
    if all(document.messages is None for document in documents):
        return None
    longest = recipe.corpus.block - recipe.answers.new_tokens
    return ChatPrompts(ChatTemplate(tokenizer, recipe.chat), longest, recipe.seed)


def weights_of(corpus: Corpus) -> dict[str, float] | None:
    """The sources' shares of the prompts by name; None where none has a weight."""
    weights: dict[str, float] = {}
    for source in corpus.sources:
        if source.weight is None:
            return None
        name = Path(source.path).name
        weights[name] = weights.get(name, 0) + source.weight
    return weights


def _require_prompts(recipe: Recipe, split: Split, prompts: list[Prompt], count: int) -> None:
    """Raise for too few prompts of a split, before the expensive stages."""
    if len(prompts) < min(count, 2):
        raise DataError(
            f"the {split} split gives {len(prompts)} prompts of {recipe.answers.prompt_tokens} tokens",
            "add documents, or lower answers.prompt_tokens"
            + (", or train without: train.acceptance=null, train.replay=null" if split == "validation" else ""),
        )
    if split == "validation" and recipe.answers.traffic is None:  # traffic brings prompts of its own
        recipe.train.require_judges(len(prompts))


def pack_given(
    documents: list[Document],
    block: int,
    limit: int,
    encode: Callable[[str], list[int]],
    ends: list[int],
    chat: ChatPrompts | None,
    dropped: Counter[str],
) -> tuple[Packed, dict[str, Counter[str]]]:
    """The given text in blocks of `block`, up to `limit` tokens in the order of the documents; the tokens by class.

    A text is scored whole. Of a conversation each answer is a sample of its own, which alone is scored, after its
    prompt as the template writes it. The counts are of all tokens, by label and by `text`, `prompt` and `answer`.
    """
    texts: list[tuple[list[int], int]] = []
    samples: list[tuple[list[int], int]] = []
    counts: dict[str, Counter[str]] = {}
    for document in documents:
        total = sum(count.total() for count in counts.values())
        if total >= limit:
            break
        count = counts.setdefault(document.label, Counter())
        if document.messages is None:
            ids = (encode(document.text) + ends)[: limit - total]
            texts.append((ids, 1))
            count["text"] += len(ids)
            continue
        assert chat is not None
        for prompt, answer in chat.given(document):
            if len(prompt) > block - 2:
                dropped[TOO_LONG] += 1
                continue
            answer = answer[: block - len(prompt)]
            samples.append((prompt + answer, len(prompt)))
            count["prompt"] += len(prompt)
            count["answer"] += len(answer)
    parts = [pack(texts, block, split_long=True), pack(samples, block, split_long=False)]
    return concatenate([part for part in parts if len(part)] or parts[:1]), {k: v for k, v in counts.items() if v}

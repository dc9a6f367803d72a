"""Stage `corpus`: read the sources, split them, pack their text and cut prompts. Checks of the sources before a run."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy

from distill.data.chat_template import ChatTemplate, reader_of
from distill.data.packing import Text, Turn, concatenate, joined_turns, pack, planned
from distill.data.prompts import ChatPrompts, cut_prompts
from distill.data.records import SPELLED_END
from distill.data.samples import (
    SPLITS,
    CorpusTexts,
    Split,
    SplitTexts,
    count_texts,
    last_tokens,
    read_samples,
    write_samples,
)
from distill.data.sources import UNREAD, Document, read_documents, require_splits, source_names, with_questions
from distill.engines.ends import target_ends
from distill.engines.torch.blocks import Packed
from distill.engines.torch.hugging_face import encode_text, load_tokenizer, stated_ends
from distill.errors import DataError
from distill.files import write_atomically, write_json, write_result
from distill.progress import Caution
from distill.recipe import Corpus, Recipe, is_path
from distill.run import Run
from distill.vocabulary.vocabulary import opening_of

CUT = "beginnings of given answers' prompts, to fit corpus.block"
ENDS_CUT = "ends of given answers, to fit corpus.block"
CHECKED_DOCUMENTS, CHECKED_RECORDS = 1000, 20  # A check reads so much of a local source, and of a hub data set.
FEW_DOCUMENTS = 8  # Intervals over fewer documents are too narrow.


def corpus(recipe: Recipe, run: Run) -> list[Path]:
    """Write text-SPLIT.safetensors (packed blocks), prompts-SPLIT.arrow, documents-test.json and summary.json."""
    folder = run.path("corpus")
    tokenizer = load_tokenizer(recipe.target.model)
    ends = sorted(
        {tokenizer.eos_token_id, *stated_ends(recipe.target.model)} - {None}
    )  # the ends of texts, not of turns
    sources = with_questions(recipe.corpus, run.path("questions"))
    documents, dropped = read_documents(sources, folder=folder, talk_of=reader_of(tokenizer))
    to_ids = functools.partial(encode_text, tokenizer)
    chat = chat_prompts(recipe, tokenizer, documents)
    weights = weights_of(sources)
    # Train text is capped by corpus.tokens, and the other splits by the use of scoring and evaluation.
    limits = {
        "train": recipe.corpus.tokens,
        "validation": recipe.cut.score_blocks * recipe.corpus.block,
        "test": recipe.eval.file_blocks * recipe.corpus.block,
    }
    train = recipe.train
    counts = {
        "train": recipe.answers.count(len(documents.shuffled("train", 0))),
        "validation": train.acceptance.prompts if train.acceptance else 0,
        "test": max(recipe.eval.prompts, recipe.speedup.prompts),
    }
    summary: dict[str, SplitTexts] = {}
    taken: set[bytes] = set()
    for split in reversed(SPLITS):  # Train comes last, so that train prompts equal to held-out ones are left out.
        texts = documents.shuffled(split, recipe.seed)
        around = opening_of(tokenizer), ends[:1]
        packed, total = pack_given(texts, recipe.corpus.block, limits[split], to_ids, around, chat, dropped)
        # Intervals resample documents, so that the test text numbers its documents across blocks.
        save = functools.partial(packed.save, numbered=split == "test")
        write_atomically(folder / f"text-{split}.safetensors", save)
        stride = 4 * (recipe.answers.prompt_tokens + recipe.answers.new_tokens)
        length = recipe.answers.prompt_tokens
        more: Any = (recipe.seed, chat, weights, taken, dropped)
        path = folder / f"prompts-{split}.arrow"
        write_samples(path, cut_prompts(texts, to_ids, counts[split], length, stride, *more))
        prompts = read_samples(path, "corpus")
        _require_prompts(recipe, split, prompts, counts[split])
        asked = count_texts(prompts.column("label"), prompts.column("prompt"))
        summary[split] = SplitTexts(len(texts), total, len(prompts), asked)
        asked_for = split != "train" or recipe.answers.prompts is not None
        short = f" of {counts[split]} asked for" if len(prompts) < counts[split] and asked_for else ""
        run.say(f"  {split}: {len(texts)} documents, {total} tokens kept, {len(prompts)} prompts{short}")
    write_json(
        folder / "documents-test.json", [document.plain_text for document in documents if document.split == "test"]
    )
    if chat is not None:
        dropped += chat.dropped
    if dropped:
        run.say("  dropped: " + ", ".join(f"{count} {reason}" for reason, count in dropped.items()))
    write_result(folder / "summary.json", CorpusTexts(dict(dropped), **summary))
    return [folder]


def chat_prompts(recipe: Recipe, tokenizer: Any, documents: Iterable[Document]) -> ChatPrompts | None:
    """The renderer of conversations as prompts; None if there are no conversations."""
    if all(document.messages is None for document in documents):
        return None
    longest = recipe.corpus.block - recipe.answers.new_tokens
    return ChatPrompts(ChatTemplate(tokenizer, recipe.chat), longest, recipe.seed)


def weights_of(corpus: Corpus) -> dict[str, float] | None:
    """The sources' shares of the prompts by name; None if a source has no weight."""
    weights: dict[str, float] = {}
    for source, name in zip(corpus.sources, source_names(corpus), strict=True):
        if source.weight is None:
            return None
        weights[name] = source.weight
    return weights


def _require_prompts(recipe: Recipe, split: Split, prompts: Sized, count: int) -> None:
    """Raise DataError for too few prompts of a split, before the expensive stages."""
    if len(prompts) < min(count, 2):
        raise DataError(
            f"the {split} split gives {len(prompts)} prompts of {recipe.answers.prompt_tokens} tokens",
            "add documents, or lower answers.prompt_tokens"
            + (
                ", or train without: train.acceptance=null" if split == "validation" and recipe.keeps_given_text else ""
            ),
        )


def pack_given(
    documents: Sequence[Document],
    block: int,
    limit: int,
    encode: Callable[[str], list[int]],
    around: tuple[list[int], list[int]],
    chat: ChatPrompts | None,
    dropped: Counter[str],
) -> tuple[Packed, int]:
    """Pack given text, up to `limit` tokens, into blocks of `block`. Returns the blocks and the number of tokens.

    A text is scored whole. In a conversation, the answers are scored after the prompts of the chat template. They share
    a text if the template keeps earlier turns unchanged. `around` are the ids before and after a text. `encode` adds
    the ids before.
    """
    texts: list[Text] = []
    turns: list[Turn] = []
    total = 0
    for document in documents:
        if total >= limit:
            break
        if document.messages is None:
            # The target's own text stopped at a limit, without an end.
            ids = (encode(document.text) + ([] if document.own else around[1]))[: limit - total]
            texts.append((numpy.array(ids, numpy.int32), 1))
            total += len(ids)
            continue
        assert chat is not None
        given: list[Turn] = []
        for prompt, answer in chat.given(document):
            if len(prompt) > block - 2:
                dropped[CUT] += 1
                prompt = last_tokens(prompt, max(block - len(answer), block // 2), chat.opening)
            if len(prompt) + len(answer) > block:
                dropped[ENDS_CUT] += 1
            given.append((numpy.array(prompt, numpy.int32), numpy.array(answer[: block - len(prompt)], numpy.int32)))
        total += sum(sum(map(len, given[text[-1]])) for text in joined_turns(len(given), given.__getitem__))
        turns += given
    answered = planned(turns.__getitem__, len(turns), block)[0].take(slice(None))
    parts = [pack(texts, block, True, around[0]), answered]
    return concatenate([part for part in parts if len(part)] or parts[:1]), total


# ── Checks before the first stage ──


def check_corpus(recipe: Recipe, offline: bool) -> tuple[list[str], list[str], list[Document]]:
    """Read the beginning of each source. Returns lines to print, the names of unread sources, and the documents.

    Raises DataError for a source that is missing, empty or without the field that it names. If all sources were read
    whole, also for a corpus that lacks a split.
    """
    corpus, lines, unread = recipe.corpus, [], []
    documents: list[Document] = []
    dropped: Counter[str] = Counter()
    here = not offline or is_path(recipe.target.model)
    read = functools.cache(lambda: reader_of(load_tokenizer(recipe.target.model)))
    talk_of = (lambda text: read()(text)) if here else None
    for source in corpus.sources:
        if source.kind == "target":
            continue  # teacher/answers.py checks these.
        if source.kind == "hub" and offline:
            unread.append(f"data set {source.path}")
            continue
        limit = min(corpus.max_documents, CHECKED_RECORDS if source.kind == "hub" else CHECKED_DOCUMENTS)
        part = corpus.model_copy(update={"sources": (source,), "max_documents": limit})
        read_part, left_out = read_documents(part, (), talk_of=talk_of)
        whole = not left_out.pop(UNREAD, 0) or limit == corpus.max_documents
        if not whole:
            unread.append(f"{source.path} beyond its first {limit} documents")
        documents += read_part
        dropped += left_out
        rest = "".join(f", {count} dropped: {reason}" for reason, count in left_out.items())
        lines.append(f"corpus source {source.path}: {len(read_part)} documents{'' if whole else ' and more'}{rest}")
    if not unread and not corpus.asked:
        require_splits(documents, dropped)
    if recipe.answers.traffic is None and (corpus.asked or not unread):
        lines += _few_documents(recipe, documents)
    return lines, unread, documents


def split_counts(recipe: Recipe, documents: list[Document]) -> dict[str, float]:
    """The documents of each split, with an estimate for the target's questions, which a hash divides."""
    corpus = recipe.corpus
    shares = {"train": 1 - corpus.validation - corpus.test, "validation": corpus.validation, "test": corpus.test}
    counts = {split: float(sum(document.split == split for document in documents)) for split in shares}
    for source in corpus.asked:
        for split in source.keep:
            share = shares[split] if source.split == "by-name" else source.split == split
            counts[split] += (source.questions or 0) * share
    return counts


def _few_documents(recipe: Recipe, documents: list[Document]) -> list[str]:
    """Warn about too few documents in the test split, or in any split if the target's questions are estimated."""
    counts = split_counts(recipe, documents)
    about = "about " if recipe.corpus.asked else ""
    return [
        Caution(
            f"warning: {about}{counts[split]:.0f} documents go to the {split} split, intervals need {FEW_DOCUMENTS}: "
            "add documents or questions" + (f", or raise corpus.{split}" if split != "train" else "")
        )
        for split in (SPLITS if recipe.corpus.asked else ("test",))
        if counts[split] < FEW_DOCUMENTS
    ]


def _fitting(lengths: list[int], longest: int, recipe: Recipe) -> str:
    """Describe the share of prompts that fit into a block, from their lengths in tokens."""
    whole, most, block = sum(length <= longest for length in lengths), max(lengths), recipe.corpus.block
    line = f"corpus.block {block} covers {whole / len(lengths):.1%} of {len(lengths)} prompts before answers.new_tokens"
    more = f"of longer ones the last {longest} tokens are read; corpus.block={block + most - longest} covers all"
    return line if most <= longest else Caution(f"warning: {line}: {more}")


def check_chat(recipe: Recipe, documents: list[Document]) -> list[str]:
    """Check that the target's chat template renders the conversations. Returns lines that show the first one.

    Raises DataError or RecipeError if it renders none of them.
    """
    tokenizer = load_tokenizer(recipe.target.model)
    chat = chat_prompts(recipe, tokenizer, documents)
    if chat is None:
        return []
    talks = [document for document in documents if document.messages is not None]
    prompts = [(talk, prompt) for talk in talks if (prompt := chat.prompt(talk)) is not None]
    if not prompts:
        reasons = ", ".join(f"{count} {reason}" for reason, count in chat.dropped.items())
        hint = "correct the sources, or section chat"
        raise DataError(f"no conversation of the corpus can be asked: {reasons}", hint)
    left_out, first, decode = dict(chat.dropped), prompts[0], tokenizer.decode
    lines, ids = [_fitting(chat.lengths, chat.longest, recipe)], first[1].prompt
    lines += [f"a prompt, as the target's template writes it ({len(ids)} tokens):", decode(ids)]
    if (given := next(chat.given(first[0]), None)) is not None:
        lines += [
            f"its last given answer, {len(given[1])} tokens that are scored between ⟦ and ⟧:",
            f"{decode(given[0])}⟦{decode(given[1])}⟧",
        ]
    lines += [Caution(f"warning: prompts: {count} {why}") for why, count in left_out.items()]
    chat.dropped.clear()  # The loop below counts each dropped answer once.
    for document in talks:
        for _ in chat.given(document):
            pass
    lines += [
        Caution(f"warning: {count} {why if why == SPELLED_END else f'given answers left out: {why}'}")
        for why, count in chat.dropped.items()
    ]
    if unnamed := target_ends(recipe.target.model, tokenizer).unnamed:
        what = f"the template ends a turn with {decode(unnamed)}, which no file of the target names as an end"
        lines += [Caution(f"warning: {what}: answers end there, and servers have to be told (generation_config.json)")]
    return lines

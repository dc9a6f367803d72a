"""Stage `corpus`: read the sources, split them, pack their text, cut prompts; and checks of the sources before it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy

from distill.data.chat_template import ChatTemplate, reader_of
from distill.data.packing import Text, Turn, concatenate, joined_turns, pack, planned
from distill.data.prompts import SPELLED_END, ChatPrompts, cut_prompts
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
from distill.data.sources import UNREAD, Document, read_documents, require_splits, with_questions
from distill.engines.torch.blocks import Packed
from distill.engines.torch.hugging_face import encode_text, load_tokenizer, stated_ends, turn_end
from distill.errors import DataError
from distill.files import write_atomically, write_json, write_result
from distill.progress import Caution
from distill.recipe import Corpus, Recipe, is_path
from distill.run import Run
from distill.vocabulary.vocabulary import opening_of

CUT = "beginnings of given answers' prompts, to fit corpus.block"
MOST_DOCUMENTS, MOST_RECORDS = 1000, 20  # that a check reads of a local source and of a hub data set
FEW_DOCUMENTS = 8  # an interval over fewer is too narrow


def corpus(recipe: Recipe, run: Run) -> list[Path]:
    """Write text-SPLIT.safetensors (packed blocks), prompts-SPLIT.arrow, documents-test.json and summary.json."""
    folder = run.path("corpus")
    tokenizer = load_tokenizer(recipe.target.model)
    ends = sorted({tokenizer.eos_token_id, *stated_ends(recipe.target.model)} - {None})  # of a text, not of a turn
    sources = with_questions(recipe.corpus, run.path("questions"))
    documents, dropped = read_documents(sources, folder=folder, talk_of=reader_of(tokenizer))
    to_ids = functools.partial(encode_text, tokenizer)
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
        "train": recipe.answers.count(len(documents.shuffled("train", 0))),
        "validation": train.acceptance.prompts if train.acceptance else 0,  # for the choice of weights
        "test": max(recipe.eval.prompts, recipe.speedup.prompts),
    }
    summary: dict[str, SplitTexts] = {}
    taken: set[bytes] = set()
    for split in reversed(SPLITS):  # what is measured first: train prompts equal to it are left out
        own = documents.shuffled(split, recipe.seed)
        around = opening_of(tokenizer), ends[:1]
        packed, total = pack_given(own, recipe.corpus.block, limits[split], to_ids, around, chat, dropped)
        # Intervals are by document, so the reported text numbers its documents across blocks.
        save = functools.partial(packed.save, numbered=split == "test")
        write_atomically(folder / f"text-{split}.safetensors", save)
        stride = 4 * (recipe.answers.prompt_tokens + recipe.answers.new_tokens)
        length = recipe.answers.prompt_tokens
        more: Any = (recipe.seed, chat, weights, taken, dropped)
        path = folder / f"prompts-{split}.arrow"
        write_samples(path, cut_prompts(own, to_ids, counts[split], length, stride, *more))
        prompts = read_samples(path, "corpus")
        _require_prompts(recipe, split, prompts, counts[split])
        asked = count_texts(prompts.column("label"), prompts.column("prompt"))
        summary[split] = SplitTexts(len(own), total, len(prompts), asked)
        asked_for = split != "train" or recipe.answers.prompts is not None
        short = f" of {counts[split]} asked for" if len(prompts) < counts[split] and asked_for else ""
        run.say(f"  {split}: {len(own)} documents, {total} tokens kept, {len(prompts)} prompts{short}")
    write_json(folder / "documents-test.json", [one.plain_text for one in documents if one.split == "test"])
    if chat is not None:
        dropped += chat.dropped
    if dropped:
        run.say("  dropped: " + ", ".join(f"{count} {reason}" for reason, count in dropped.items()))
    write_result(folder / "summary.json", CorpusTexts(dict(dropped), **summary))
    return [folder]


def chat_prompts(recipe: Recipe, tokenizer: Any, documents: Iterable[Document]) -> ChatPrompts | None:
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


def _require_prompts(recipe: Recipe, split: Split, prompts: Sized, count: int) -> None:
    """Raise for too few prompts of a split, before the expensive stages."""
    if len(prompts) < min(count, 2):
        raise DataError(
            f"the {split} split gives {len(prompts)} prompts of {recipe.answers.prompt_tokens} tokens",
            "add documents, or lower answers.prompt_tokens"
            + (", or train without: train.acceptance=null" if split == "validation" else ""),
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
    """The given text in blocks of `block`, up to `limit` tokens in the order of the documents; the number of tokens.

    A text is scored whole. Of a conversation its answers alone are, each behind its prompt as the template writes it:
    in one text where that keeps what was said, else in a text each. `around` are the ids before and after a text:
    `encode` has put the first ones in.
    """
    texts: list[Text] = []
    turns: list[Turn] = []
    total = 0
    for document in documents:
        if total >= limit:
            break
        if document.messages is None:
            # The target's own text was cut at its limit, not ended.
            ids = (encode(document.text) + ([] if document.own else around[1]))[: limit - total]
            texts.append((numpy.array(ids, numpy.int32), 1))
            total += len(ids)
            continue
        assert chat is not None
        own: list[Turn] = []
        for prompt, answer in chat.given(document):
            if len(prompt) > block - 2:
                dropped[CUT] += 1
                prompt = last_tokens(prompt, max(block - len(answer), block // 2), chat.opening)
            own.append((numpy.array(prompt, numpy.int32), numpy.array(answer[: block - len(prompt)], numpy.int32)))
        total += sum(sum(map(len, own[text[-1]])) for text in joined_turns(len(own), own.__getitem__))
        turns += own
    answered = planned(turns.__getitem__, len(turns), block)[0].take(slice(None))
    parts = [pack(texts, block, True, around[0]), answered]
    return concatenate([part for part in parts if len(part)] or parts[:1]), total


# ── Checks before the first stage ──


def check_corpus(recipe: Recipe, offline: bool) -> tuple[list[str], list[str], list[Document]]:
    """Read the beginning of each source of the corpus; lines to print, the names of sources that were not read, and
    the documents.

    Raises DataError for a source that is missing, empty or without the field that it names, and, once all sources were
    read completely, for a corpus that lacks a split.
    """
    corpus, lines, unread = recipe.corpus, [], []
    documents: list[Document] = []
    dropped: Counter[str] = Counter()
    here = not offline or is_path(recipe.target.model)
    read = functools.cache(lambda: reader_of(load_tokenizer(recipe.target.model)))
    talk_of = (lambda text: read()(text)) if here else None
    for source in corpus.sources:
        if source.kind == "target":
            continue  # see teacher/answers.py
        if source.kind == "hub" and offline:
            unread.append(f"data set {source.path}")
            continue
        limit = min(corpus.max_documents, MOST_RECORDS if source.kind == "hub" else MOST_DOCUMENTS)
        part = corpus.model_copy(update={"sources": (source,), "max_documents": limit})
        found, left_out = read_documents(part, (), talk_of=talk_of)
        whole = not left_out.pop(UNREAD, 0) or limit == corpus.max_documents
        if not whole:
            unread.append(f"{source.path} beyond its first {limit} documents")
        documents += found
        dropped += left_out
        rest = "".join(f", {count} dropped: {reason}" for reason, count in left_out.items())
        lines.append(f"corpus source {source.path}: {len(found)} documents{'' if whole else ' and more'}{rest}")
    if not unread and not corpus.asked:
        require_splits(documents, dropped)
    if recipe.answers.traffic is None and (corpus.asked or not unread):
        lines += _few_documents(recipe, documents)
    return lines, unread, documents


def split_counts(recipe: Recipe, documents: list[Document]) -> dict[str, float]:
    """The documents of each split, and those that the target's questions, which a hash divides, are estimated to be."""
    corpus = recipe.corpus
    shares = {"train": 1 - corpus.validation - corpus.test, "validation": corpus.validation, "test": corpus.test}
    counts = {split: float(sum(document.split == split for document in documents)) for split in shares}
    for source in corpus.asked:
        for split in source.keep:
            share = shares[split] if source.split == "by-name" else source.split == split
            counts[split] += (source.questions or 0) * share
    return counts


def _few_documents(recipe: Recipe, documents: list[Document]) -> list[str]:
    """A warning for each split with too few documents: the test split, or, where the target's questions, which a hash
    divides, are estimated, any."""
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
    """The share of prompts that a block covers, of these lengths in tokens."""
    whole, most, block = sum(length <= longest for length in lengths), max(lengths), recipe.corpus.block
    line = f"corpus.block {block} covers {whole / len(lengths):.1%} of {len(lengths)} prompts before answers.new_tokens"
    more = f"of longer ones the last {longest} tokens are read; corpus.block={block + most - longest} covers all"
    return line if most <= longest else Caution(f"warning: {line}: {more}")


def check_chat(recipe: Recipe, documents: list[Document]) -> list[str]:
    """The target's template takes the conversations; the first one as it is rendered, its scored answer marked.

    Raises DataError or RecipeError where it takes none of them.
    """
    tokenizer = load_tokenizer(recipe.target.model)
    chat = chat_prompts(recipe, tokenizer, documents)
    if chat is None:
        return []
    asked = [document for document in documents if document.messages is not None]
    prompts = [(one, prompt) for one in asked if (prompt := chat.prompt(one)) is not None]
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
    chat.dropped.clear()  # of the answers alone, each once
    for document in asked:
        for _ in chat.given(document):
            pass
    lines += [
        Caution(f"warning: {count} {why if why == SPELLED_END else f'given answers left out: {why}'}")
        for why, count in chat.dropped.items()
    ]
    if (end := turn_end(tokenizer)) and end[0] not in {tokenizer.eos_token_id, *stated_ends(recipe.target.model)}:
        what = f"the template ends a turn with {decode(end)}, which no file of the target names as an end"
        lines += [Caution(f"warning: {what}: answers end there, and servers have to be told (generation_config.json)")]
    return lines

"""Checks of a run's inputs before its first stage: sources, conversations, served logs, writers, teachers.

Each reads beginnings of files, configurations and tokenizers alone, and returns lines to print.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from distill.errors import DataError
from distill.progress import Caution
from distill.recipe import Recipe

if TYPE_CHECKING:
    from distill.documents.sources import Document

MOST_DOCUMENTS, MOST_RECORDS, MOST_LINES = 1000, 20, 1000  # read of a local source, a hub data set and a traffic file
SCORED = "⟦", "⟧"  # around the tokens that a draft learns from
FEW_DOCUMENTS = 8  # an interval over fewer is too narrow


def check_corpus(recipe: Recipe, offline: bool) -> tuple[list[str], list[str], list[Document]]:
    """Read the beginning of each source of the corpus; lines to print, the names of sources that were not read, and
    the documents.

    Raises DataError for a source that is missing, empty or without the field that it names, and, once all sources were
    read completely, for a corpus that lacks a split.
    """
    from distill.documents.sources import UNREAD, read_documents, require_splits

    corpus, lines, unread = recipe.corpus, [], []
    documents: list[Document] = []
    dropped: Counter[str] = Counter()
    for source in corpus.sources:
        if source.kind == "target":
            continue  # see check_questions
        if source.kind == "hub" and offline:
            unread.append(f"data set {source.path}")
            continue
        limit = min(corpus.max_documents, MOST_RECORDS if source.kind == "hub" else MOST_DOCUMENTS)
        found, left_out = read_documents(corpus.model_copy(update={"sources": (source,), "max_documents": limit}), ())
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


def _few_documents(recipe: Recipe, documents: list[Document]) -> list[str]:
    """A warning for each split with too few documents; those from the target's questions, which a hash divides, are
    estimated."""
    corpus = recipe.corpus
    shares = {"train": 1 - corpus.validation - corpus.test, "validation": corpus.validation, "test": corpus.test}
    counts = {split: float(sum(document.split == split for document in documents)) for split in shares}
    if not corpus.asked:
        few = f"warning: the test split has {counts['test']:.0f} documents; intervals over fewer than {FEW_DOCUMENTS}"
        return [] if counts["test"] >= FEW_DOCUMENTS else [Caution(f"{few} are too narrow to be believed")]
    for source in corpus.asked:
        for split in source.keep:
            share = shares[split] if source.split == "by-name" else source.split == split
            counts[split] += (source.questions or 0) * share
    return [
        Caution(
            f"warning: about {counts[split]:.1f} documents go to the {split} split; raise questions"
            + (f", or corpus.{split}" if split != "train" else "")
        )
        for split in shares
        if counts[split] < FEW_DOCUMENTS
    ]


def check_questions(recipe: Recipe) -> list[str]:
    """The target's template has a user header that questions can be written behind, and a block has room for them."""
    if not recipe.corpus.asked:
        return []
    from distill.target.questions.asking import describe

    return describe(recipe)


def check_chat(recipe: Recipe, documents: list[Document]) -> list[str]:
    """The target's template takes the conversations; the first one as it is rendered, its scored answer marked.

    Raises DataError or RecipeError where it takes none of them.
    """
    from distill.corpus.stage import chat_prompts
    from distill.models.hugging_face import load_tokenizer

    chat = chat_prompts(recipe, load_tokenizer(recipe.target.model), documents)
    if chat is None:
        return []
    for document in documents:
        prompt = None if document.messages is None else chat.prompt(document)
        if prompt is None:
            continue
        decode = chat.template.tokenizer.decode
        lines = [f"a prompt, as the target's template writes it ({len(prompt.ids)} tokens):", decode(prompt.ids)]
        given = next(chat.given(document), None)
        if given is not None:
            lines += [
                f"its last given answer, {len(given[1])} tokens that are scored between ⟦ and ⟧:",
                f"{decode(given[0])}{SCORED[0]}{decode(given[1])}{SCORED[1]}",
            ]
        return lines
    reasons = ", ".join(f"{count} {reason}" for reason, count in chat.dropped.items())
    raise DataError(f"no conversation of the corpus can be asked: {reasons}", "correct the sources, or section chat")


def check_traffic(recipe: Recipe) -> list[str]:
    """Sort the first lines of the traffic file; raises DataError where none of a whole file can be learnt from."""
    from distill.models.hugging_face import load_tokenizer
    from distill.target.traffic import pin_of, read_lines, require_answers, sort_lines

    settings = recipe.answers.traffic
    if settings is None:
        return []
    pin = pin_of(Path(settings.path))
    found = sort_lines(recipe, islice(read_lines(settings, pin), MOST_LINES), load_tokenizer(recipe.target.model))
    if pin["lines"] <= MOST_LINES:
        require_answers(found, pin, "the same command")
    return [
        f"traffic {settings.path}: {pin['lines']} lines; of the first {min(MOST_LINES, pin['lines'])}, "
        f"{len(found.train)} answers to learn from, {len(found.bad)} bad lines{found.first_fault}, "
        f"{found.too_long} too long"
    ]


def check_writer(recipe: Recipe, offline: bool) -> tuple[list[str], list[str]]:
    """The file is a GGUF of the target, or each server answers and serves its model; lines to print, and the servers
    that were not contacted."""
    settings = recipe.answers.writer
    if settings is None:
        return [], []
    if settings.gguf is not None:
        from distill.target.writers.local import require_gguf

        require_gguf(recipe.target.model, settings.gguf, "answers.writer.gguf")
        return [f"answers: written by {settings.gguf}, which has the target's tokens"], []
    if offline:
        return [], [f"server {url}" for url in settings.urls]
    from distill.target.endpoint import Endpoint

    with contextlib.closing(Endpoint(settings.model_copy(update={"retries": 0}), "answers.writer")) as endpoint:
        return [f"answers: {url} serves {model}" for url, model, _ in endpoint.served()], []


def check_teacher(recipe: Recipe, offline: bool) -> list[str]:
    """The teacher's GGUF file has the target's tokens, or its servers answer with log-probabilities of prompts."""
    settings = recipe.teacher
    if settings.gguf is not None:
        from distill.target.logprobs.readers import require_teacher_file

        return [require_teacher_file(settings.gguf, recipe.target.model, recipe.corpus.block)]
    if settings.server is None:
        return []
    at_one = "its distributions hold at temperature 1, whatever sampler it serves with"
    if offline:
        return [f"teacher: {settings.server.model} on {len(settings.server.urls)} server(s), not asked; {at_one}"]
    from distill.target.logprobs.server_reader import ServerReader

    with contextlib.closing(ServerReader(recipe)) as reader:
        return [
            f"teacher: {settings.server.model} answers on {len(settings.server.urls)} server(s), with "
            f"{reader.largest_request} log-probabilities a token; {at_one}"
        ]

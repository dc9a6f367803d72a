"""A pair opened to continue one text: from Hugging Face folders in PyTorch, or from GGUF files in llama.cpp."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from distill.errors import DataError
from distill.grammar.constraint import Constraint, constraint, llama_constraint
from distill.grammar.tokens import Tokens
from distill.models.base import Model
from distill.models.gguf.file import GgufFile
from distill.models.gguf.llama_grammar import ends_of
from distill.models.gguf.model import GgufModel
from distill.models.hugging_face import (
    encode,
    end_ids,
    load_model,
    load_tokenizer,
    local_folder,
    pick_device,
    real_tokens,
)
from distill.models.metadata import VocabularyMetadata
from distill.models.torch_model import TorchModel
from distill.recipe import Recipe
from distill.speculative.stop_strings import BytesOf, token_bytes
from distill.vocabulary import Vocabulary

BATCH = 512  # tokens that llama.cpp takes at once


@dataclass(frozen=True)
class Opened:
    """A target and a draft with the prompt's `ids`, `room` for new tokens, and the ids that end a text.

    The draft is the target itself where nobody asks it. `says` gives a token's bytes, none for those it is told are
    silent; `constrain` makes a constraint of a grammar's kind and text.
    """

    target: Model
    draft: Model
    ids: list[int]
    room: int
    ends: list[int]
    bytes_of: Callable[[Collection[int]], BytesOf]
    constrain: Callable[[str, str], Constraint]


def is_gguf(reference: str) -> bool:
    """Whether a model is named by a GGUF file."""
    return reference.endswith(".gguf")


@contextmanager
def open_pair(
    recipe: Recipe, references: tuple[str, str], text: str, limit: int, asked: bool, nodes: int, others: str
) -> Iterator[Opened]:
    """Open (target, draft) for `limit` tokens after `text`, and trees of so many `nodes` (0: chains alone).

    The draft is opened where it is `asked`; where its context is the shorter one, a line on stderr says that beyond it
    `others` go on. Raises DataError for a prompt that is empty or fills the target's context.
    """
    if is_gguf(references[0]):
        with ExitStack() as closing:
            yield _open_files(closing, recipe, references, text, limit, asked, nodes, others)
    else:
        yield _open_folders(recipe, references, text, limit, asked, others)


def _open_folders(
    recipe: Recipe, references: tuple[str, str], text: str, limit: int, asked: bool, others: str
) -> Opened:
    device = pick_device(recipe.device)
    tokenizer = load_tokenizer(references[0])
    tokens = Vocabulary.read(local_folder(references[0]))
    hugging_face = load_model(references[0], recipe.target.dtype, device)
    vocabulary = real_tokens(hugging_face.config, tokenizer)
    target = draft = TorchModel(hugging_face, vocabulary)
    ids = encode(tokenizer, text)
    room = _room(ids, limit, target.capacity)
    if asked:
        draft = TorchModel(load_model(references[1], recipe.target.dtype, device), vocabulary)
        _tell_shorter(references[1], draft.capacity, len(ids) + room, others)
    ends = end_ids(hugging_face.config, tokenizer)

    def constrain(kind: str, grammar: str) -> Constraint:
        return constraint(kind, grammar, Tokens.of(tokens, ends))

    return Opened(target, draft, ids, room, ends, lambda silent: token_bytes(tokens, silent), constrain)


def _open_files(
    closing: ExitStack,
    recipe: Recipe,
    references: tuple[str, str],
    text: str,
    limit: int,
    asked: bool,
    nodes: int,
    others: str,
) -> Opened:
    contexts = [VocabularyMetadata.read(reference).context for reference in references]
    file = GgufFile(Path(references[0]), vocabulary_only=True)
    try:
        ids = file.tokenize(text)  # before the weights are loaded: the cache is as long as the text
    finally:
        file.close()
    room = _room(ids, limit, contexts[0] or len(ids) + limit)

    def opened(reference: str, capacity: int) -> GgufModel:
        size = max(capacity, nodes + 2)
        return closing.enter_context(
            GgufModel(reference, context=size, batch=max(BATCH, nodes + 2), threads=recipe.threads, max_leaves=nodes)
        )

    target = draft = opened(references[0], len(ids) + room)
    if asked:
        capacity = min(len(ids) + room, contexts[1] or len(ids) + room)
        draft = opened(references[1], capacity)
        _tell_shorter(references[1], capacity, len(ids) + room, others)

    def bytes_of(silent: Collection[int]) -> BytesOf:
        return lambda token: b"" if token in silent else target.detokenize([token])

    def constrain(kind: str, grammar: str) -> Constraint:
        if kind == "gbnf":  # as llama.cpp itself reads it
            return llama_constraint(grammar, target)
        return constraint(kind, grammar, Tokens.of_gguf(target))

    return Opened(target, draft, ids, room, ends_of(target), bytes_of, constrain)


def _room(ids: Sequence[int], limit: int, context: int) -> int:
    """New tokens that fit, at most `limit`; stderr says where there are fewer."""
    if not ids:
        raise DataError("the prompt is empty", "give some text to continue")
    room = min(limit, context - len(ids))
    if room < 1:
        raise DataError(f"the prompt's {len(ids)} tokens fill the target's context of {context}", "shorten it")
    if room < limit:
        print(f"the target's context of {context} leaves room for {room} of {limit} tokens", file=sys.stderr)
    return room


def _tell_shorter(reference: str, context: int, needed: int, others: str) -> None:
    if context < needed:
        print(f"the draft {reference} has a context of {context}: beyond it {others}", file=sys.stderr)

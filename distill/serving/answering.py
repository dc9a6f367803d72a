"""Open a pair to continue texts for a request, or to answer prompts in turn."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from distill.data.chat_template import ChatTemplate
from distill.decoding.configured import (
    NO_COSTS,
    DrafterInputs,
    Session,
    lossy_reason,
    make_drafter,
    pair_costs,
    require_trees,
)
from distill.decoding.decode import Decoded
from distill.decoding.grammar import Constraint, Tokens, constraint
from distill.decoding.ngrams import NGramTable, open_table
from distill.decoding.other_vocabulary import DraftReader, read_with
from distill.decoding.rules import BytesOf, Constrained, Forced, Rules, characters, stop_before
from distill.engines.llama_cpp.model import GgufModel, token_bytes_of
from distill.engines.loaded import LoadedPair, Opening, context_of
from distill.engines.tokenizer import open_tokenizer
from distill.engines.torch.hugging_face import encode_text
from distill.errors import DataError
from distill.files import is_gguf
from distill.recipe import Chat, Configuration, Sampler


@dataclass(frozen=True)
class Continuation:
    """A request to continue a text: the configuration, the served sampler, the seed, and the strings that end the text.

    `lossy` allows a configuration that changes the target's distribution. The summary then says so. `grammar` holds the
    kind and the text of a grammar, see `grammar.constraint`. `table` holds n-grams of the target for drafter `table`.
    It is a file, or a run with such a file.
    """

    configuration: Configuration
    sampler: Sampler
    seed: int = 0
    stop: Sequence[str] = ()
    lossy: bool = False
    grammar: tuple[str, str] | None = None
    table: Path | None = None

    @property
    def lossy_reason(self) -> str | None:
        """Return why the text would not follow the target's distribution, or None. DataError if nothing can draft."""
        try:
            return lossy_reason(self.configuration, self.sampler)
        except ValueError as error:
            hint = "choose another drafter, verifier or temperature"
            raise DataError(f"this cannot be drafted: {error}", hint) from None

    def require_lossless(self) -> None:
        """Raise DataError for a lossy configuration that the request does not allow."""
        if self.lossy_reason is not None and not self.lossy:
            verifier = self.configuration.verified_by
            fault = f"verifier {verifier} would change the target's distribution: {self.lossy_reason}"
            raise DataError(fault, "or allow it as lossy")


@contextlib.contextmanager
def opened(opening: Opening, request: Continuation, tokens: int) -> Iterator[tuple[LoadedPair, DraftReader | None]]:
    """Open the pair with room for texts of this many tokens. Yield the pair and the reader of its draft.

    The reader is None unless the draft has another vocabulary. If the draft's context is shorter than the text,
    decoding goes on without the draft after its end. A line on stderr says so.
    """
    request.require_lossless()
    configuration, target = request.configuration, opening.target
    if configuration.other_vocabulary and is_gguf(target.model) and not opening.pytorch.in_bits:
        raise DataError(f"drafter {configuration.drafter} reads both tokenizers from Hugging Face folders")
    alone = not configuration.asks_the_draft
    with opening.load(tokens, configuration.most_nodes, alone) as pair:
        if opening.draft is not None and not alone and pair.draft.capacity < tokens:
            looks_up = configuration.drafter.startswith("lookup+")
            rest = "only the lookup drafts" if looks_up else "the target decodes plainly"
            shorter = f"the draft {opening.draft} has a context of {pair.draft.capacity}"
            print(f"{shorter} tokens. After that, {rest}", file=sys.stderr)
        reader = None
        if configuration.other_vocabulary and opening.draft is not None:
            reader = read_with(pair, target, opening.draft, opening.device)
        yield pair, reader


def begin(
    pair: LoadedPair,
    reader: DraftReader | None,
    request: Continuation,
    grammar: Constraint | None = None,
    table: NGramTable | None = None,
) -> Session:
    """Return a session that continues prompts. It is made in this order: models, costs, rule, drafter.

    No text is decoded yet. `grammar` and `table` are the request's, if they are open already. `reader` is a draft of
    another vocabulary, which obeys no grammar. Raises DataError for a configuration that cannot be drafted, such as
    trees in a model that takes none. A lossy configuration that the request does not allow raises DataError too.
    """
    request.require_lossless()
    configuration, draws = request.configuration, random.Random(request.seed).random
    if configuration.branches:
        require_trees(pair.target, pair.draft)
    if grammar is None and request.grammar is not None:
        grammar = constraint(*request.grammar, _tokens(pair))
        for warning in grammar.warnings:
            print(f"the grammar is not obeyed in this: {warning}", file=sys.stderr)
    verifier = (
        configuration.verified_by if configuration.drafts else "token" if request.sampler.temperature else "greedy"
    )
    shown = shown_bytes(pair, grammar)
    # An end token ends the text anyway, and a stop string inside it would leave its first letters in the answer.
    stop = stop_before(lambda token: b"" if token in pair.ends else shown(token), [*request.stop, *pair.text_ends])
    rules = Rules(request.sampler, verifier, pair.ends, draws, stop, grammar)
    costs = pair_costs(pair, configuration.longest_round) if configuration.needs_costs else NO_COSTS
    if table is None and request.table is not None and configuration.counts_ngrams:
        table = open_table(request.table, pair.reference)
    inputs = DrafterInputs(costs, table, pair.target.max_leaves)
    # The draft obeys a grammar too. If the grammar leaves no choice, `Forced` drafts the token without the model.
    draft: Any = reader or (pair.draft if grammar is None else Constrained(pair.draft, grammar))
    drafter = make_drafter(configuration, draft, rules.sampler, rules.random, inputs)
    if grammar is not None and reader is None:
        drafter = Forced(drafter, grammar)
    return Session(pair.target, drafter, rules)


def shown_bytes(pair: LoadedPair, grammar: Constraint | None) -> BytesOf:
    """Return a function for the bytes of tokens. The end tokens of a grammar have none, so that the text obeys it."""
    silent = () if grammar is None else grammar.ends
    return lambda token: b"" if token in silent else pair.token_bytes(token)


def _tokens(pair: LoadedPair) -> Tokens:
    """Return the pair's vocabulary in the form that grammars need."""
    if isinstance(pair.target, GgufModel):
        return Tokens.of_gguf(pair.target, pair.ends)
    return Tokens.of(pair.vocabulary, pair.ends)


def pieces(bytes_of: BytesOf, result: Decoded, rounds: Iterable[Sequence[int]]) -> Iterator[tuple[str, bool]]:
    """Yield the text of each certain token, and whether the token was drafted and accepted.

    If a stop string cuts a token, the last piece is the rest of that token.
    """
    shown, decoder = 0, characters()
    for new in rounds:
        for token in new:
            yield decoder.decode(bytes_of(token)), result.from_draft[shown]
            shown += 1
    yield decoder.decode(result.rest, final=True), False


MAX_SESSIONS = 8  # An `Answerer` keeps this many sessions, and as many grammars.


class Answerer:
    """A pair that answers prompts in turn. A prompt and its answer have at most `context` tokens.

    If a prompt begins like the last text, the target does not read the shared beginning again. Greedy requests that
    differ only in their prompt share a session, which goes on learning. Each drawn text has a new session, because its
    draws begin with the seed.
    """

    def __init__(self, pair: LoadedPair, reader: DraftReader | None, template: ChatTemplate, context: int) -> None:
        self.pair, self.reader, self.template = pair, reader, template
        self.capacity = min(context, pair.target.capacity)
        self._bytes_of = _visible(pair)
        self._constraints: dict[tuple[str, str], Constraint] = {}
        self._making = threading.Lock()
        self._sessions: list[tuple[Continuation, Session]] = []
        self._tables: dict[Path, NGramTable] = {}
        self._held: list[int] = []  # These tokens are in the target's cache.

    def session(self, request: Continuation) -> Session:
        """Return the session that decodes a request. Raises DataError like `begin`."""
        session = next((session for begun, session in self._sessions if begun == request), None)
        if session is None:
            costs = dict(self.pair.costs)
            grammar = None if request.grammar is None else self.constraint(*request.grammar)
            session = begin(self.pair, self.reader, request, grammar, self._table(request))
            if self.pair.costs != costs:  # The timed steps have overwritten the target's cache.
                self._held = []
        if not request.sampler.temperature:
            others = [(begun, other) for begun, other in self._sessions if begun != request]
            self._sessions = [(request, session), *others[: MAX_SESSIONS - 1]]
        return session

    def _table(self, request: Continuation) -> NGramTable | None:
        """Return the table from which a request drafts. It is opened and checked once, which takes a moment."""
        if request.table is None or not request.configuration.counts_ngrams:
            return None
        if request.table not in self._tables:
            self._tables[request.table] = open_table(request.table, self.pair.reference)
        return self._tables[request.table]

    @cached_property
    def _tokens(self) -> Tokens:
        return _tokens(self.pair)

    def constraint(self, kind: str, grammar: str) -> Constraint:
        """Return the constraint of a grammar, which is made once.

        Raises DataError for an invalid grammar, and for a grammar with a part that would have no effect.
        """
        with self._making:
            made = self._constraints.pop((kind, grammar), None) or constraint(kind, grammar, self._tokens)
            if made.warnings:
                raise DataError(f"the grammar would not be obeyed in this: {made.warnings[0]}", "leave that out")
            self._constraints = dict([*self._constraints.items()][1 - MAX_SESSIONS :]) | {(kind, grammar): made}
        return made

    def prompt(self, messages: Sequence[dict[str, Any]], arguments: dict[str, Any] | None = None) -> list[int]:
        """Return the token ids of messages up to the answer. DataError if the template refuses or omits a part."""
        template = self.template.with_arguments(arguments or {})
        try:
            text = template.text(messages)
        except ValueError as error:
            raise DataError(str(error)) from None
        calls = [call.get("function", call)["name"] for message in messages for call in message.get("tool_calls", ())]
        if missing := next((name for name in calls if name not in text), None):
            raise DataError(f"the target's chat template leaves out a call of the tool {missing}")
        return encode_text(template.tokenizer, text)

    def room(self, ids: Sequence[int]) -> int:
        """Return the number of new tokens that the context has room for after a prompt. DataError if it is 0."""
        room = self.capacity - len(ids)
        if room < 1 or not ids:
            hint = "shorten the prompt" if ids else "send a prompt"
            raise DataError(f"{len(ids)} tokens in a context of {self.capacity}", hint)
        return room

    def answer(
        self, request: Continuation, ids: Sequence[int], limit: int, result: Decoded
    ) -> Iterator[tuple[str, bool]]:
        """Return the pieces of an answer of at most `limit` tokens, and whether each was drafted and accepted.

        Special tokens have no text, as in other servers. Raises DataError like `begin`, before the first piece.
        """
        session, room = self.session(request), min(limit, self.room(ids))
        return self._pieces(session, ids, room, result)

    def _pieces(self, session: Session, ids: Sequence[int], limit: int, result: Decoded) -> Iterator[tuple[str, bool]]:
        pairs = enumerate(zip(ids[:-1], self._held, strict=False))
        shared = next((place for place, (token, held) in pairs if token != held), min(len(ids) - 1, len(self._held)))
        self._held = []
        yield from pieces(self._bytes_of, result, session.stream(ids, limit, result, shared))
        self._held = [*ids, *result.tokens][: self.pair.target.lengths[0]]


def _visible(pair: LoadedPair) -> BytesOf:
    """Return a function for the bytes of tokens. Special tokens and end tokens have none."""
    if isinstance(pair.target, GgufModel):
        bytes_of = token_bytes_of(pair.target)
        return lambda token: b"" if token in pair.ends else bytes_of[token]
    silent = {token for token, kind in enumerate(pair.vocabulary.kinds) if kind == "special"}.union(pair.ends)
    return lambda token: b"" if token in silent else pair.token_bytes(token)


@contextlib.contextmanager
def answering(opening: Opening, chat: Chat, request: Continuation, context: int) -> Iterator[Answerer]:
    """Load the pair and yield its `Answerer`. DataError for a target without a chat template, and like `begin`."""
    model = opening.target.model
    with open_tokenizer(model) as tokenizer:
        if not tokenizer.chat_template:
            raise DataError(f"{model} has no chat template, which a conversation needs", "take an instruct model")
        template = ChatTemplate(tokenizer, chat)
        with opened(opening, request, min(context, context_of(model) or context)) as (pair, reader):
            answerer = Answerer(pair, reader, template, context)
            answerer.session(request)
            yield answerer

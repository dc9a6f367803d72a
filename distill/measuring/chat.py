"""A pair that answers one prompt after the other, and `distill chat`: a conversation in a terminal, or line by line."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from distill.data.chat_template import ChatTemplate
from distill.data.prompts import open_tokenizer
from distill.decoding.configured import Session
from distill.decoding.decode import Decoded
from distill.decoding.other_vocabulary import DraftReader
from distill.engines.loaded import LoadedPair, context_of
from distill.errors import DataError, DistillError, RecipeError, faults_explained
from distill.files import is_utf8
from distill.measuring.stream import GREEN, RESET, Opening, Request, begin, opened, pieces, show
from distill.progress import note
from distill.recipe import Chat, Configuration

SESSIONS = 8  # that are kept


class Answerer:
    """A pair that answers prompts in turn. Its target does not read again what a prompt shares with the last text;
    greedy requests that are equal but for their prompt are one session, which goes on learning. `context` are the
    tokens of a prompt and its answer at most."""

    def __init__(self, pair: LoadedPair, reader: DraftReader | None, template: ChatTemplate, context: int) -> None:
        self.pair, self.reader, self.template = pair, reader, template
        self.capacity = min(context, pair.target.capacity)
        self._sessions: list[tuple[Request, Session]] = []
        self._held: list[int] = []  # tokens in the target's cache

    def session(self, request: Request, ids: Sequence[int]) -> Session:
        """What decodes a request; DataError as `begin`."""
        found = next((session for one, session in self._sessions if one == request), None)
        if found is None or request.sampler.temperature:  # its draws begin with the seed
            self._held = []  # steps are timed with the pair
            found = begin(self.pair, self.reader, request, ids)
            self._sessions = [(request, found), *self._sessions[: SESSIONS - 1]]
        return found

    def prompt(self, messages: Sequence[dict[str, Any]], arguments: dict[str, Any] | None = None) -> list[int]:
        """Token ids of messages up to their answer; DataError where the template refuses them."""
        try:
            return self.template.with_arguments(arguments or {}).prompt(messages)
        except ValueError as error:
            raise DataError(str(error)) from None

    def room(self, ids: Sequence[int]) -> int:
        """New tokens that the context has room for behind a prompt; DataError where there is none."""
        room = self.capacity - len(ids)
        if room < 1 or not ids:
            raise DataError(f"{len(ids)} tokens in a context of {self.capacity}", "send some, and fewer")
        return room

    def answer(self, request: Request, ids: Sequence[int], limit: int, result: Decoded) -> Iterator[tuple[str, bool]]:
        """The pieces of an answer of at most `limit` tokens, and whether each was drafted and accepted."""
        session, target = self.session(request, ids), self.pair.target
        same = (at for at, (one, held) in enumerate(zip(ids[:-1], self._held, strict=False)) if one != held)
        held = next(same, min(len(ids) - 1, len(self._held)))
        self._held = []
        rounds = session.stream(ids, min(limit, self.room(ids)), result, held)
        yield from pieces(
            lambda token: b"" if token in self.pair.ends else self.pair.token_bytes(token), result, rounds
        )
        self._held = [*ids, *result.tokens][: target.lengths[0]]


@contextlib.contextmanager
def answering(opening: Opening, chat: Chat, request: Request, context: int) -> Iterator[Answerer]:
    """The loaded pair; DataError for a target without a chat template and a configuration that cannot be drafted."""
    model = opening.target.model
    with open_tokenizer(model) as tokenizer:
        if not tokenizer.chat_template:
            raise DataError(f"{model} has no chat template, which a conversation needs", "take an instruct model")
        template = ChatTemplate(tokenizer, chat)
        with opened(opening, request, min(context, context_of(model) or context)) as (pair, reader):
            answerer = Answerer(pair, reader, template, context)
            answerer.session(request, answerer.prompt([{"role": "user", "content": "Hello"}]))
            yield answerer


# ── `distill chat` ──

HELP = "/plain: the last answer again without drafting; /save FILE; /new: another conversation; /quit"


def marks() -> tuple[str, str]:
    """What stands before and behind accepted tokens: colours on a terminal that has them, else signs."""
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        return GREEN, RESET
    try:
        "‹›".encode(sys.stdout.encoding or "ascii")
        return "‹", "›"
    except UnicodeEncodeError:
        return "<", ">"


def typed_lines() -> Iterator[str]:
    """What a user types, or the lines of standard input."""
    with contextlib.suppress(ImportError):
        __import__("readline")  # edits lines and keeps them
    with contextlib.suppress(EOFError):
        while True:
            yield input("> " if sys.stdin.isatty() else "")


class Conversation:
    """The messages so far, and what answers them; each line of a user is a question or a command."""

    def __init__(self, answerer: Answerer, request: Request, limit: int) -> None:
        self.answerer, self.request, self.limit = answerer, request, limit
        self.system = [{"role": "system", "content": one} for one in answerer.template.settings.system[:1]]
        self.messages, self.speed = self.system, 0.0

    def take(self, line: str) -> bool:
        """Answer a line; False where it ends the conversation. DistillError, with nothing changed, for a mistake."""
        command, _, rest = line.strip().partition(" ")
        asked = len(self.messages) > len(self.system)
        if not is_utf8(line):
            raise RecipeError("this line is not UTF-8", "write it in UTF-8")
        if command == "/quit":
            return False
        if command == "/new":
            self.messages = self.system
        elif command == "/plain" and asked:
            configuration = Configuration(drafter="none", sampler=self.request.configuration.sampler)
            text, speed = self.answer(self.messages[:-1], replace(self.request, configuration=configuration))
            same = "the same text" if text == self.messages[-1]["content"] else "another text"
            note(f"drafting: {self.speed / speed if speed else 0:.2f} times as fast; {same}")
        elif command == "/save" and asked and rest:
            with faults_explained(Path(rest)), Path(rest).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n")
            note(f"added to {rest}, for a source of a corpus: {{kind: jsonl, path: {rest}}}")
        elif command.startswith("/"):
            note(HELP)
        elif command:
            messages = [*self.messages, {"role": "user", "content": line}]
            text, self.speed = self.answer(messages, self.request)
            self.messages = [*messages, {"role": "assistant", "content": text}]
        return True

    def answer(self, messages: list[dict[str, Any]], request: Request) -> tuple[str, float]:
        """The text of an answer, which is printed, and its tokens a second."""
        ids, result, capacity = self.answerer.prompt(messages), Decoded(), self.answerer.capacity
        if len(ids) >= capacity:
            raise DataError(
                f"this takes {len(ids)} tokens, and the context holds {capacity}", "/new begins another one"
            )
        text = show(self.answerer.answer(request, ids, self.limit, result), marks())
        line = f"{len(result.tokens)} tokens, {result.tokens_per_second():.1f} tokens/s"
        if result.rounds:
            accepted, drafted = sum(result.from_draft), sum(one.drafted for one in result.rounds)
            line += f", {accepted / len(result.tokens):.0%} drafted ({accepted}/{drafted} accepted)"
        note(line)
        if len(ids) + len(result.tokens) >= capacity:
            note(f"the context of {capacity} tokens is full: /new begins another conversation")
        elif len(result.tokens) >= self.limit:
            note(f"cut after {self.limit} tokens (--tokens)")
        return text, result.tokens_per_second()


def converse(opening: Opening, chat: Chat, request: Request, context: int, limit: int) -> None:
    """Answer what is typed, until its end or /quit; a mistake is one message, and the conversation goes on."""
    with answering(opening, chat, request, context) as answerer:
        talk = Conversation(answerer, request, limit)
        note(HELP)
        for line in typed_lines():
            try:
                if not talk.take(line):
                    return
            except DistillError as error:
                print(f"distill: {error}", file=sys.stderr, flush=True)

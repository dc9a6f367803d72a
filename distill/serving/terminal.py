"""Decoding for a person at a terminal: one streamed text, and `distill chat`, a conversation in a terminal or line by
line. The draft's accepted tokens are marked."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from distill.decoding.decode import Decoded
from distill.engines.loaded import Opening, context_of, encode_prompt
from distill.errors import DataError, DistillError, RecipeError, faults_explained
from distill.files import is_utf8
from distill.progress import note
from distill.recipe import Chat, Configuration
from distill.serving.answering import Answerer, Continuation, answering, begin, opened, pieces, shown_bytes

GREEN, RESET = "\x1b[32m", "\x1b[0m"


def stream(
    opening: Opening, text: str, limit: int, request: Continuation, message: Sequence[int] | None = None
) -> None:
    """Continue `text` by at most `limit` tokens. Print it round by round, and a summary on stderr.

    `message` holds the token ids of a conversation up to its answer. Only the answer is then printed. Accepted tokens
    are green on a terminal. Raises DataError for a prompt that is empty or fills the target's context, for trees in a
    model that takes none, and for a configuration that would change the target's distribution.
    """
    model = opening.target.model
    ids = encode_prompt(model, text) if message is None else message
    room = _room(ids, limit, context_of(model))
    with opened(opening, request, len(ids) + room) as (pair, reader):
        session, result = begin(pair, reader, request), Decoded()
        # All faults of the request have shown before anything is printed.
        print(text if message is None else "", end="", flush=True)
        grammar = session.rules.constraint
        coloured = request.configuration.drafts and sys.stdout.isatty()
        rounds = session.stream(ids, room, result)
        show(pieces(shown_bytes(pair, grammar), result, rounds), (GREEN, RESET) if coloured else ("", ""))
        if grammar is not None and not grammar.satisfied(result.tokens):
            print("the text ends before the grammar is satisfied: give more --tokens", file=sys.stderr)
        note(_summary(result))
        if (reason := request.lossy_reason) is not None:
            print(f"LOSSY: this text does not follow the target's distribution: {reason}", file=sys.stderr)


def _room(ids: Sequence[int], limit: int, context: int | None) -> int:
    """New tokens that fit, at most `limit`; a line on stderr says if there are fewer."""
    room = limit if context is None else min(limit, context - len(ids))
    if room < 1:
        raise DataError(f"the prompt's {len(ids)} tokens fill the target's context of {context}", "shorten it")
    if room < limit:
        print(f"the target's context of {context} leaves room for {room} of {limit} tokens", file=sys.stderr)
    return room


def _summary(result: Decoded) -> str:
    """Tokens, speed and, if anything was drafted, the acceptance rate."""
    summary = f"{len(result.tokens)} tokens, {result.tokens_per_second():.1f} tok/s after the first"
    rounds = result.rounds
    if rounds:
        drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
        rate = f"{accepted / drafted:.1%}" if drafted else "none drafted"
        each = max(len(result.tokens) - 1, 0) / len(rounds)
        summary += f", {each:.2f} tokens/round, acceptance rate {rate} ({accepted}/{drafted})"
    return summary


def show(parts: Iterable[tuple[str, bool]], marks: tuple[str, str]) -> str:
    """Print the pieces of a text, with `marks` around drafted pieces. Return the text without marks."""
    drafted, text = False, ""
    try:
        for piece, accepted in parts:
            if piece and accepted != drafted:
                print(marks[drafted], end="")
                drafted = accepted
            print(piece, end="", flush=True)
            text += piece
    finally:
        print(marks[1] if drafted else "")
    return text


# ── `distill chat` ──

HELP = "/plain: the last answer again without drafting; /save FILE; /new: another conversation; /quit"


def marks() -> tuple[str, str]:
    """The marks before and after accepted tokens: colours on a terminal that has them, else signs."""
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        return GREEN, RESET
    try:
        "‹›".encode(sys.stdout.encoding or "ascii")
        return "‹", "›"
    except UnicodeEncodeError:
        return "<", ">"


def typed_lines() -> Iterator[str]:
    """The lines that a user types, or those of standard input."""
    with contextlib.suppress(ImportError):
        __import__("readline")  # edits lines and keeps them
    with contextlib.suppress(EOFError):
        while True:
            yield input("> " if sys.stdin.isatty() else "")


class Conversation:
    """The messages so far, and the pair that answers. Each line of a user is a question or a command."""

    def __init__(self, answerer: Answerer, request: Continuation, limit: int) -> None:
        self.answerer, self.request, self.limit = answerer, request, limit
        self.system = [{"role": "system", "content": text} for text in answerer.template.settings.system[:1]]
        self.messages, self.speed = self.system, 0.0

    def take(self, line: str) -> bool:
        """Answer a line; False if it ends the conversation. DistillError, with nothing changed, for a mistake."""
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

    def answer(self, messages: list[dict[str, Any]], request: Continuation) -> tuple[str, float]:
        """Print an answer. Return its text and its tokens per second."""
        ids, result, capacity = self.answerer.prompt(messages), Decoded(), self.answerer.capacity
        if len(ids) >= capacity:
            hint = "/new begins another conversation"
            raise DataError(f"this takes {len(ids)} tokens, and the context holds {capacity}", hint)
        text = show(self.answerer.answer(request, ids, self.limit, result), marks())
        line = f"{len(result.tokens)} tokens, {result.tokens_per_second():.1f} tokens/s"
        if result.rounds and result.tokens:
            accepted, drafted = sum(result.from_draft), sum(one.drafted for one in result.rounds)
            line += f", {accepted / len(result.tokens):.0%} drafted ({accepted}/{drafted} accepted)"
        note(line)
        if len(ids) + len(result.tokens) >= capacity:
            note(f"the context of {capacity} tokens is full: /new begins another conversation")
        elif len(result.tokens) >= self.limit:
            note(f"cut after {self.limit} tokens (--tokens)")
        return text, result.tokens_per_second()


def converse(opening: Opening, chat: Chat, request: Continuation, context: int, limit: int) -> None:
    """Answer typed lines until their end or /quit. A mistake gives one message, and the conversation goes on."""
    with answering(opening, chat, request, context) as answerer:
        talk = Conversation(answerer, request, limit)
        note(HELP)
        for line in typed_lines():
            try:
                if not talk.take(line):
                    return
            except DistillError as error:
                print(f"distill: {error}", file=sys.stderr, flush=True)

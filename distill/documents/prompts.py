"""Prompts as token ids: beginnings and later parts of documents, and first questions of conversations."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from distill.documents.chat_template import CLOSING, ChatTemplate
from distill.documents.sources import Document
from distill.texts import Prompt

Candidate = tuple[int, bytes, Document, int]  # number of the part, its rank by the seed, its document and offset

CHARACTERS_PER_TOKEN = 8  # more than any prompt needs; it bounds the text that is encoded for a prompt


def _rank(seed: int, *parts: object) -> bytes:
    return hashlib.sha256("/".join(str(part) for part in (seed, *parts)).encode()).digest()


def _share(seed: int, *parts: object) -> float:
    """A number from 0 to 1, drawn by the seed for these parts alone."""
    return int.from_bytes(_rank(seed, *parts)[:8], "big") / 2**64


class ChatPrompts:
    """Conversations as prompts, by the target's template and the recipe's section `chat`.

    A prompt of more than `longest` tokens is left out; `dropped` counts those and what the template refuses.
    """

    def __init__(self, template: ChatTemplate, longest: int, seed: int) -> None:
        self.template, self.longest, self.seed = template, longest, seed
        self.dropped: Counter[str] = Counter()

    def prompt(self, document: Document) -> Prompt | None:
        """The prompt of a conversation's first question, with the user's further turns; None for one left out."""
        chat = self.describe(document)
        try:
            ids = self.template.prompt(chat["messages"], chat["thinking"])
        except ValueError as error:
            self.dropped[str(error)] += 1
            return None
        if len(ids) > self.longest:
            self.dropped["prompts too long for corpus.block"] += 1
            return None
        return Prompt(document.name, ids, document.source, chat, document.label)

    def given(self, document: Document) -> Iterator[tuple[list[int], list[int]]]:
        """Prompt and answer of each of a conversation's answers, as token ids; of held-out text the last one alone,
        because intervals take samples for independent."""
        assert document.messages is not None
        places = [at for at, one in enumerate(document.messages) if one["role"] == "assistant"]
        for at in places if document.split == "train" else places[-1:]:
            messages = document.messages[: at + 1]
            try:
                prompt, answer = self.template.answered(messages, self._thought(messages[-1]))
            except ValueError as error:
                self.dropped[str(error)] += 1
                continue
            if len(answer) > 1:
                yield prompt, answer

    def _thought(self, answer: Mapping[str, Any]) -> bool | None:
        """Whether an answer was written with thinking on; None where the recipe does not say that it matters."""
        if self.template.settings.thinking is None:
            return None
        return bool(answer.get("reasoning_content")) or CLOSING in str(answer["content"])

    def system(self, name: str) -> list[dict[str, Any]]:
        """The system prompt of the recipe that the seed draws for a name, as messages: one, or none."""
        prompts = self.template.settings.system
        if not prompts:
            return []
        return [{"role": "system", "content": self.draw(name, "system", prompts)}]

    def draw(self, name: str, what: str, choices: Sequence[str]) -> str:
        """One of the texts, as the seed draws it for a name and a purpose."""
        return choices[int(_share(self.seed, name, what) * len(choices))]

    def thinking(self, name: str) -> bool | None:
        """Whether the seed draws thinking for a name; None where the recipe leaves it to the template."""
        share = self.template.settings.thinking
        return None if share is None else _share(self.seed, name, "thinking") < share

    def describe(self, document: Document) -> dict[str, Any]:
        """The parts of a conversation: messages up to the first question, further turns, arguments of the template."""
        assert document.messages is not None
        settings = self.template.settings
        roles = [one["role"] for one in document.messages]
        # Where the target wrote the answers itself, its last question is asked behind them; else it answers each.
        first = len(roles) - 1 - roles[::-1].index("user") if document.own else roles.index("user")
        head = list(document.messages[: first + 1])
        if "system" not in roles:
            head = [*self.system(document.name), *head]
        rest = document.messages[first + 1 :]
        # What a tool returned answers a call that this target may not make: the conversation ends before it.
        before_tools = takewhile(lambda message: message["role"] != "tool", rest)
        turns = [one["content"] for one in before_tools if one["role"] == "user"][: settings.turns - 1]
        thinking = self.thinking(document.name)
        return {
            "messages": head,
            "turns": turns,
            "thinking": thinking,
            "arguments": self.template.arguments(thinking),
        }


def cut_prompts(
    documents: list[Document],
    encode: Callable[[str], list[int]],
    count: int,
    tokens: int,
    stride: int,
    seed: int,
    chat: ChatPrompts | None = None,
    weights: Mapping[str, float] | None = None,
) -> list[Prompt]:
    """At most `count` prompts: of exactly `tokens` ids each from texts, of any length from conversations.

    All beginnings come before all second parts, and so on, each round in an order drawn from the seed, so that few
    prompts already cover many documents. A later part starts at a line, at least `stride` characters after the last.
    With `weights`, sources take turns in these proportions as long as each has some left.
    """
    candidates: list[Candidate] = []
    for document in documents:
        if document.messages is not None:
            candidates.append((0, _rank(seed, document.name, 0), document, 0))
            continue
        offset, piece = 0, 0
        while offset < len(document.text):
            candidates.append((piece, _rank(seed, document.name, piece), document, offset))
            line = document.text.find("\n", offset + stride)
            if line < 0:
                break
            offset, piece = line + 1, piece + 1
    candidates.sort(key=lambda candidate: candidate[:2])
    if weights is not None:
        candidates = _mixed(candidates, weights)
    prompts: list[Prompt] = []
    for _, _, document, offset in candidates:
        if len(prompts) == count:
            break
        if document.messages is not None:
            prompt = chat.prompt(document) if chat is not None else None
            prompts += [prompt] if prompt is not None else []
            continue
        ids = encode(document.text[offset : offset + tokens * CHARACTERS_PER_TOKEN])[:tokens]
        if len(ids) == tokens:
            prompts.append(Prompt(f"{document.name}@{offset}", ids, document.source, label=document.label))
    return prompts


def _mixed(candidates: list[Candidate], weights: Mapping[str, float]) -> list[Candidate]:
    """Candidates in an order in which each source has its share of every beginning; weight 0 leaves a source out."""
    waiting: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        if weights[candidate[2].source] > 0:
            waiting.setdefault(candidate[2].source, []).append(candidate)
    found = []
    taken = dict.fromkeys(waiting, 0)
    while waiting:
        name = min(waiting, key=lambda source: (taken[source] + 1) / weights[source])
        found.append(waiting[name][taken[name]])
        taken[name] += 1
        if taken[name] == len(waiting[name]):
            del waiting[name]
    return found

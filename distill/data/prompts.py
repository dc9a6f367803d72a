"""Prompts as token ids: cut from documents and conversations of the corpus, or read from files that a user gives."""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy

from distill.data.chat_template import ChatTemplate, Message, reader_of
from distill.data.records import CLOSING, LISTS, PROMPTS, RENDERED, SPELLED_END, THINKING
from distill.data.samples import Sample, last_tokens
from distill.data.sources import Document, holds_records, read_documents
from distill.engines.tokenizer import open_tokenizer
from distill.engines.torch.hugging_face import encode_behind, encode_text
from distill.errors import DataError
from distill.files import require_path
from distill.recipe import Chat, Corpus, Source
from distill.vocabulary.vocabulary import opening_of

ANY_ANSWER = "An answer."
CHARACTERS_PER_TOKEN = 8  # More than any prompt needs. It bounds the text that is encoded for a prompt.


def _rank(seed: int, *parts: object) -> bytes:
    return hashlib.sha256("/".join(str(part) for part in (seed, *parts)).encode()).digest()


def _drawn(seed: int, *parts: object) -> float:
    """A number from 0 to 1, drawn by the seed for these parts alone."""
    return int.from_bytes(_rank(seed, *parts)[:8], "big") / 2**64


class ChatPrompts:
    """Conversations as prompts, by the target's template and the recipe's section `chat`.

    A prompt of more than `longest` tokens keeps its last tokens. `dropped` counts cut prompts and refusals of the
    template. `lengths` are the tokens of all prompts before they are cut.
    """

    def __init__(self, template: ChatTemplate, longest: int, seed: int) -> None:
        self.template, self.longest, self.seed = template, longest, seed
        self.opening = opening_of(template.tokenizer)
        self.dropped: Counter[str] = Counter()
        self.lengths: list[int] = []
        self._counted: set[tuple[str, str]] = set()  # names of documents, and their arguments that are counted

    def prompt(self, document: Document) -> Sample | None:
        """The prompt of a conversation's first answer, with its further turns. None if it is left out."""
        assert document.messages is not None
        settings = self.template.settings
        try:
            rendered = self._rendered(document)
            template = self._template_of(document)
        except ValueError as error:
            self.dropped[str(error)] += 1
            return None
        if rendered:
            self.dropped["prompts that were rendered already: kept as they are"] += 1
            ids = self._shortened(encode_text(self.template.tokenizer, rendered))
            return Sample(document.name, ids, [], document.split, document.source, document.label)
        head, *further = _turns_asked(document.messages)
        if not any(one["role"] == "system" for one in document.messages):
            head = [*self.system(document.name), *head]
        # A tool's result answers a call that this target may not make, so that the conversation ends before it.
        asked = takewhile(lambda turn: "user" in turn and "tool" not in turn, map(_roles, further))
        turns, refused = further[: min(len([*asked]), settings.turns - 1)], ""
        thinking = document.arguments.get(template.switch, self.thinking(document.name))
        thinking = thinking if isinstance(thinking, bool) else None
        try:
            ids = template.prompt(head, thinking)
        except ValueError as error:
            self.dropped[str(error)] += 1
            return None
        ids = self._shortened(ids)
        messages = list(head)
        for at, turn in enumerate(turns):
            messages += [{"role": "assistant", "content": ANY_ANSWER}, *turn]
            try:
                template.text(messages, thinking)
            except ValueError as error:
                turns, refused = turns[:at], str(error)
                break
        if len(turns) < settings.turns - 1 and len(turns) < len(further):
            no_question = "tool" not in _roles(further[len(turns)])
            why = refused or ("an answer that no question follows" if no_question else "a tool's result")
            self.dropped[f"turns of conversations after {why}" if not refused else f"later turns: {why}"] += 1
        texts = [turn[0]["content"] if _roles(turn) == ["user"] and "parts" not in turn[0] else turn for turn in turns]
        chat = {"messages": head, "turns": texts, "thinking": thinking, "arguments": template.arguments(thinking)}
        if mark := RENDERED.search("".join(one["content"] for one in head if one["role"] == "user")):
            self.dropped[f"prompts that hold marks of a chat template (`{mark[0]}`): asked unchanged"] += 1
        mode = {None: "", True: "thinking", False: "no thinking"}[thinking]
        label = ", ".join(filter(None, (document.label, mode)))
        return Sample(document.name, ids, [], document.split, document.source, label, chat=chat)

    def _shortened(self, ids: list[int]) -> list[int]:
        """The ids of a prompt. A prompt that is too long keeps its last ids."""
        self.lengths.append(len(ids))
        if len(ids) > self.longest:
            self.dropped[f"beginnings of prompts of more than {self.longest} tokens"] += 1
        return last_tokens(ids, self.longest, self.opening)

    def given(self, document: Document) -> Iterator[tuple[list[int], list[int]]]:
        """The token ids of each answer of a conversation and of the prompt before it.

        A held-out conversation gives only its last answer, because intervals assume independent samples.
        """
        assert document.messages is not None
        learnt = [one["role"] == "assistant" and one.get("weight") != 0 for one in document.messages]
        places = [at for at, counts in enumerate(learnt) if counts]
        for at in places if document.split == "train" else places[-1:]:
            try:
                messages = list(map(self._ended_once, document.messages[: at + 1]))
                template = self._template_of(document)
                if rendered := self._rendered(document):
                    tokenizer, end = self.template.tokenizer, self.template.end
                    prompt, answer = encode_behind(tokenizer, rendered, messages[-1]["content"])
                    answer += end
                else:
                    prompt, answer = template.answered(messages, self._thought(document, messages[-1]))
            except ValueError as error:
                self.dropped[str(error)] += 1
                continue
            if self._ended_once(document.messages[at])["content"] != document.messages[at]["content"]:
                self.dropped[SPELLED_END] += 1
            if len(answer) > 1:
                yield prompt, answer
            else:
                self.dropped["empty answers"] += 1

    def _ended_once(self, message: Message) -> dict[str, Any]:
        """The message without its weight. An answer loses the end tokens that the template writes.

        ValueError for an answer that goes on after an end token.
        """
        kept = {name: value for name, value in message.items() if name != "weight"}
        if message["role"] == "assistant":
            kept["content"], rest = self.template.split_at_end(message["content"])
            if rest:
                raise ValueError("an answer that goes on after an end token")
        return kept

    def _rendered(self, document: Document) -> str:
        """The prompt of a document with one question, if the target's template has rendered it already. Else empty.

        ValueError for a rendered text that does not end with a question.
        """
        asked, *rest = [one for one in document.messages or () if one["role"] != "assistant"]
        text = asked["content"]
        if rest or self.template.is_rendered(text):
            return "" if rest else text
        if not self.template.looks_rendered(text):
            return ""
        messages = self.template.conversation_of(text)
        if messages is None:
            raise ValueError("a rendered prompt that differs from the rendering of the target's template")
        if messages[-1]["role"] != "user":
            raise ValueError("a rendered prompt that holds its answer")
        return self.template.text(messages)

    def _template_of(self, document: Document) -> ChatTemplate:
        """The template with the arguments of a conversation's record. ValueError as `of_conversation`."""
        template, lacking = self.template.of_conversation(document.arguments)
        for name in lacking:
            if (document.name, name) not in self._counted:
                self._counted.add((document.name, name))
                self.dropped[f"template argument `{name[:40]}` of a record, which the target's template lacks"] += 1
        return template

    def _thought(self, document: Document, answer: Mapping[str, Any]) -> bool | None:
        """Whether an answer was written with thinking on. None if the recipe does not set thinking."""
        if self.template.settings.thinking is None or self.template.switch in document.arguments:
            return None
        return any(answer.get(name) for name in THINKING) or CLOSING in str(answer["content"])

    def system(self, name: str) -> list[dict[str, Any]]:
        """The system prompt that the seed draws for a name, as a list of one message. Empty without system prompts."""
        prompts = self.template.settings.system
        if not prompts:
            return []
        return [{"role": "system", "content": self.draw(name, "system", prompts)}]

    def draw(self, name: str, what: str, choices: Sequence[str]) -> str:
        """The text that the seed draws for a name and a purpose."""
        return choices[int(_drawn(self.seed, name, what) * len(choices))]

    def thinking(self, name: str) -> bool | None:
        """Whether the seed draws thinking for a name. None if the recipe leaves it to the template."""
        share = self.template.settings.thinking
        return None if share is None else _drawn(self.seed, name, "thinking") < share


def _roles(turn: Sequence[Message]) -> list[str]:
    return [message["role"] for message in turn]


def _turns_asked(messages: Sequence[Message]) -> list[list[Message]]:
    """The messages before each answer and after the last answer, without the answers."""
    turns: list[list[Message]] = [[]]
    for before, message in zip([None, *messages], messages, strict=False):
        if before is not None and before["role"] == "assistant":
            turns.append([])
        if message["role"] != "assistant":
            turns[-1].append(message)
    return turns


def cut_prompts(
    documents: Sequence[Document],
    encode: Callable[[str], list[int]],
    count: int,
    tokens: int,
    stride: int,
    seed: int,
    chat: ChatPrompts | None = None,
    weights: Mapping[str, float] | None = None,
    taken: set[bytes] | None = None,
    dropped: Counter[str] | None = None,
) -> Iterator[Sample]:
    """At most `count` prompts: exactly `tokens` ids each from texts, and any number of ids from conversations.

    `taken` holds the digests of all prompts so far. An equal prompt is left out and counted in `dropped`, unless
    further questions to learn from follow it.

    All beginnings come before all second parts, and so on, each round in an order drawn from the seed, so that few
    prompts already cover many documents. A later part starts at a line, at least `stride` characters after the part
    before. With `weights`, sources alternate in these proportions until a source is exhausted.
    """
    # For each candidate: the numbers of its part, document and source, and its offset. `ranks` order by the seed.
    candidates, ranks = array("q"), bytearray()
    names: dict[str, int] = {}  # of the sources
    for number, document in enumerate(documents):
        source = names.setdefault(document.source, len(names))
        for part, offset in enumerate(_beginnings(document, stride)):
            candidates.extend((part, number, source, offset))
            ranks += _rank(seed, document.name, part)
    columns = numpy.asarray(candidates).reshape(-1, 4)
    order = numpy.lexsort((*numpy.frombuffer(ranks, ">u8").reshape(-1, 4).T[::-1], columns[:, 0]))
    if weights is not None:
        order = _mixed(order, columns[order, 2], [weights[name] for name in names])
    yielded, taken = 0, set() if taken is None else taken
    for place in order:
        if yielded == count:
            break
        document, offset = documents[int(columns[place, 1])], int(columns[place, 3])
        if document.messages is not None:
            prompt = chat.prompt(document) if chat is not None else None
        else:
            ids = encode(document.text[offset : offset + tokens * CHARACTERS_PER_TOKEN])[:tokens]
            cut = Sample(f"{document.name}@{offset}", ids, [], document.split, document.source, document.label)
            prompt = cut if len(ids) == tokens else None
        if prompt is None:
            continue
        goes_on = document.split == "train" and prompt.chat is not None and prompt.chat["turns"]
        digest = hashlib.sha256(array("i", prompt.prompt)).digest()
        if digest in taken and not goes_on:
            (Counter() if dropped is None else dropped)["prompts equal to another"] += 1
            continue
        taken.add(digest)
        yielded += 1
        yield prompt


def _beginnings(document: Document, stride: int) -> Iterator[int]:
    """The offsets at which prompts may begin: 0 for a conversation, lines at least `stride` apart for a text."""
    offset = 0
    while offset < len(document.text) or (not offset and document.messages is not None):
        yield offset
        line = document.text.find("\n", offset + stride) if document.messages is None else -1
        if line < 0:
            break
        offset = line + 1


def _mixed(order: Any, sources: Any, weights: Sequence[float]) -> Any:
    """The candidates [N] of `sources` [N] in an order with shares by weight. Weight 0 leaves a source out."""
    first, turns = numpy.zeros(len(order), int), numpy.zeros(len(order))
    for source, weight in enumerate(weights):
        places = numpy.flatnonzero(sources == source)
        if weight > 0 and len(places):
            first[places], turns[places] = places[0], numpy.arange(1, len(places) + 1) / weight
    mixed = numpy.lexsort((first, turns))  # Among equal turns, the source with the earlier first candidate comes first.
    return order[mixed[turns[mixed] > 0]]


# ── Prompts that a user gives for a pair ──

ENDINGS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    ".parquet": "parquet",
}  # Other files are text, unless they hold records in JSON.
FIELDS = ", ".join(("text", *PROMPTS)) + f" or {', '.join(LISTS)} (lists)"
SEED = 0  # of the order of pieces of texts


@dataclass(frozen=True)
class UserPrompts:
    """Prompts of a user's files.

    `dropped` counts what was left out by its reason. `texts` are the plain texts of the files. `asked` describes the
    form in which the prompts are asked.
    """

    measured: list[Sample]
    dropped: dict[str, int]
    texts: list[str]
    asked: str = ""

    @property
    def longest(self) -> int:
        """The tokens of the longest measured prompt."""
        return max(len(sample.prompt) for sample in self.measured)

    def classes(self) -> list[str]:
        """The class of each measured prompt: its label, or else its file."""
        return [prompt.label or prompt.source or "prompts" for prompt in self.measured]


def sources_of(paths: Sequence[Path], option: str = "--prompts") -> tuple[Source, ...]:
    """Files and folders as sources of the corpus, by their endings. DataError for a missing or empty file."""
    sources = []
    for path in paths:
        require_path(path, option)
        if not path.exists():
            raise DataError(f"there is no file {path}", f"correct {option}")
        if path.is_dir():
            sources.append(Source(kind="tree", path=str(path.resolve()), pattern="**/*", split="test"))
            continue
        if not path.stat().st_size:
            raise DataError(f"{path} is empty", "give a file with prompts: text, or jsonl, csv or parquet records")
        kind: Any = ENDINGS.get(path.suffix.lower()) or ("jsonl" if holds_records(path) else "text")
        sources.append(Source(kind=kind, path=str(path.resolve()), split="test"))
    return tuple(sources)


def read_user_prompts(
    target: str,
    corpus: Corpus,
    chat: Chat,
    count: int,
    tokens: int | Sequence[int],
    room: int,
    *,
    answer: int = 0,
    least: int = 2,
) -> UserPrompts:
    """Up to `count` prompts of the files.

    The target's chat template renders conversations up to the first question. Plain texts are cut into prompts of
    `tokens` tokens, with room for `answer` tokens between them. Several numbers of `tokens` share the prompts equally.
    A prompt has at most `room` tokens. Loads no weights. Raises DataError for fewer than `least` prompts, and if no
    text is long enough to be cut.
    """
    with open_tokenizer(target) as tokenizer:
        try:
            documents, dropped = read_documents(corpus, ("test",), talk_of=reader_of(tokenizer))
        except DataError as error:
            what, hint = error.what.replace("corpus source ", ""), error.hint or ""
            if "corpus" in hint:
                hint = f"records need a field {FIELDS}: rename theirs; JSON that is text has a name in .txt"
            raise DataError(what, hint) from error
        has_template = bool(tokenizer.chat_template)
        to_ids = functools.partial(encode_text, tokenizer)
        chats = None
        if any(document.messages is not None for document in documents):
            chats = ChatPrompts(ChatTemplate(tokenizer, chat), room, SEED)
        size, *longer = sorted({*tokens}) if isinstance(tokens, Sequence) else [min(tokens, room)]
        first = count // (1 + len(longer))
        cut = functools.partial(cut_prompts, encode=to_ids, seed=SEED, chat=chats, dropped=dropped)
        size = min(size, room)
        prompts = [*cut(documents, count=first, tokens=size, stride=4 * (size + answer))]
        texts = [document for document in documents if document.messages is None] if longer else []
        for number, further in enumerate(longer):
            wanted = (count - len(prompts)) // (len(longer) - number)
            more = [*cut(texts, count=wanted, tokens=further, stride=4 * further)] if further <= room else []
            if not more:
                what = f"no text gives a prompt of {further} tokens (the context has room for {room})"
                raise DataError(what, "give longer texts, more prompts (--count), or fewer --prompt-tokens")
            prompts += more
    dropped += Counter({} if chats is None else chats.dropped)
    if len(prompts) < least:
        left = "".join(f"; {number} left out: {reason}" for reason, number in dropped.items())
        raise DataError(
            f"the files give {len(prompts)} prompts{left}",
            f"give more or longer ones, {least} at least; plain texts are cut into prompts of {size} tokens "
            "(--prompt-tokens, if the command has it)",
        )
    measured = prompts[:count]
    plain = {document.name: document.text for document in documents if document.messages is None}
    cuts = sum(prompt.id.rpartition("@")[0] in plain for prompt in measured)
    asked = _how_asked(cuts, len(measured) - cuts, [size, *longer], has_template)
    return UserPrompts(measured, dict(dropped), [*plain.values()], asked)


def _how_asked(cuts: int, chats: int, sizes: Sequence[int], has_template: bool) -> str:
    """The form in which prompts are asked, and the way to ask them in the other form."""
    parts = []
    if cuts:
        other = '. To ask each line in the chat template, write it as {"prompt": "…"} into a .jsonl file'
        parts.append(
            f"{cuts} cuts of plain text of {', '.join(map(str, sizes))} tokens" + (other if has_template else "")
        )
    if chats:
        other = 'To continue them as plain text, write each as {"text": "…"} into a .jsonl file'
        parts.append(f"{chats} asked in the target's chat template. {other}")
    return "; ".join(parts)


def user_message(target: str, text: str, chat: Chat, required: bool) -> list[int] | None:
    """Token ids of a text as a user's message after the first system prompt of `chat`, up to the answer.

    None for a target without a chat template. DataError if a template is `required`, or refuses the message.
    """
    with open_tokenizer(target) as tokenizer:
        if not tokenizer.chat_template:
            if required:
                raise DataError(f"{target} has no chat template", "continue the text as it is: --no-chat")
            return None
        system = [{"role": "system", "content": one} for one in chat.system[:1]]
        try:
            return ChatTemplate(tokenizer, chat).prompt([*system, {"role": "user", "content": text}])
        except ValueError as error:
            raise DataError(str(error), "continue the text as it is: --no-chat") from error

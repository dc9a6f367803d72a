"""Prompts as token ids: cut from documents and conversations of the corpus, or read from files that a user gives."""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy

from distill.data.chat_template import ChatTemplate, Message, reader_of
from distill.data.records import CLOSING, LISTS, PROMPTS, RENDERED, THINKING
from distill.data.samples import Sample, last_tokens
from distill.data.sources import Document, holds_records, read_documents
from distill.engines.torch.hugging_face import encode_behind, encode_text, load_tokenizer
from distill.errors import DataError
from distill.files import is_gguf, require_path
from distill.gguf.head import open_head
from distill.gguf.library import GgufFile
from distill.gguf.tokenizer import chat_templates
from distill.recipe import Chat, Corpus, Source
from distill.vocabulary.vocabulary import opening_of

ANY_ANSWER = "An answer."
SPELLED_END = "answers that spell their end token: learnt with one"
CHARACTERS_PER_TOKEN = 8  # more than any prompt needs; it bounds the text that is encoded for a prompt


def _rank(seed: int, *parts: object) -> bytes:
    return hashlib.sha256("/".join(str(part) for part in (seed, *parts)).encode()).digest()


def _drawn(seed: int, *parts: object) -> float:
    """A number from 0 to 1, drawn by the seed for these parts alone."""
    return int.from_bytes(_rank(seed, *parts)[:8], "big") / 2**64


class ChatPrompts:
    """Conversations as prompts, by the target's template and the recipe's section `chat`.

    A prompt of more than `longest` tokens keeps its last ones; `dropped` counts those and what the template refuses,
    `lengths` are those of all prompts before that.
    """

    def __init__(self, template: ChatTemplate, longest: int, seed: int) -> None:
        self.template, self.longest, self.seed = template, longest, seed
        self.opening = opening_of(template.tokenizer)
        self.dropped: Counter[str] = Counter()
        self.lengths: list[int] = []
        self._told: set[tuple[str, str]] = set()  # names of documents, and the arguments that were counted

    def prompt(self, document: Document) -> Sample | None:
        """The prompt of a conversation's first answer, with what renders its further turns; None for one left out."""
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
        # What a tool returned answers a call that this target may not make: the conversation ends before it.
        asked = takewhile(lambda turn: "user" in turn and "tool" not in turn, map(_roles, further))
        turns, refused = further[: min(len([*asked]), settings.turns - 1)], ""
        thinking = document.arguments.get(settings.thinking_argument, self.thinking(document.name))
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
        said = [turn[0]["content"] if _roles(turn) == ["user"] and "parts" not in turn[0] else turn for turn in turns]
        chat = {"messages": head, "turns": said, "thinking": thinking, "arguments": template.arguments(thinking)}
        if mark := RENDERED.search("".join(one["content"] for one in head if one["role"] == "user")):
            self.dropped[f"prompts that hold marks of a chat template (`{mark[0]}`): asked as they stand"] += 1
        mode = {None: "", True: "thinking", False: "no thinking"}[thinking]
        label = ", ".join(filter(None, (document.label, mode)))
        return Sample(document.name, ids, [], document.split, document.source, label, chat=chat)

    def _shortened(self, ids: list[int]) -> list[int]:
        """The ids of a prompt, the last ones of one that is too long."""
        self.lengths.append(len(ids))
        if len(ids) > self.longest:
            self.dropped[f"beginnings of prompts of more than {self.longest} tokens"] += 1
        return last_tokens(ids, self.longest, self.opening)

    def given(self, document: Document) -> Iterator[tuple[list[int], list[int]]]:
        """Prompt and answer of each of a conversation's answers, as token ids; of held-out text the last one alone,
        because intervals take samples for independent."""
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
        """The message without its weight, and an answer without the end tokens that the template writes itself.

        ValueError for an answer that goes on behind one.
        """
        found = {name: value for name, value in message.items() if name != "weight"}
        if message["role"] == "assistant":
            found["content"], rest = self.template.split_at_end(message["content"])
            if rest:
                raise ValueError("an answer that goes on behind an end token")
        return found

    def _rendered(self, document: Document) -> str:
        """The prompt of a document of one question, if the target's template has written it already; else nothing.

        ValueError for a rendered text that is not one to answer.
        """
        asked, *rest = [one for one in document.messages or () if one["role"] != "assistant"]
        text = asked["content"]
        if rest or self.template.is_rendered(text):
            return "" if rest else text
        if not self.template.looks_rendered(text):
            return ""
        messages = self.template.conversation_of(text)
        if messages is None:
            raise ValueError("a prompt that is rendered, and otherwise than the target's template writes it")
        if messages[-1]["role"] != "user":
            raise ValueError("a rendered prompt that holds its answer")
        return self.template.text(messages)

    def _template_of(self, document: Document) -> ChatTemplate:
        """The template with what a conversation's record gives it; ValueError where it does not write that."""
        template, lacking = self.template.of_conversation(document.arguments)
        for name in lacking:
            if (document.name, name) not in self._told:
                self._told.add((document.name, name))
                self.dropped[f"template argument `{name[:40]}` of a record, which the target's template lacks"] += 1
        return template

    def _thought(self, document: Document, answer: Mapping[str, Any]) -> bool | None:
        """Whether an answer was written with thinking on; None where the recipe does not say that it matters."""
        settings = self.template.settings
        if settings.thinking is None or settings.thinking_argument in document.arguments:
            return None
        return any(answer.get(name) for name in THINKING) or CLOSING in str(answer["content"])

    def system(self, name: str) -> list[dict[str, Any]]:
        """The system prompt of the recipe that the seed draws for a name, as messages: one, or none."""
        prompts = self.template.settings.system
        if not prompts:
            return []
        return [{"role": "system", "content": self.draw(name, "system", prompts)}]

    def draw(self, name: str, what: str, choices: Sequence[str]) -> str:
        """One of the texts, as the seed draws it for a name and a purpose."""
        return choices[int(_drawn(self.seed, name, what) * len(choices))]

    def thinking(self, name: str) -> bool | None:
        """Whether the seed draws thinking for a name; None where the recipe leaves it to the template."""
        share = self.template.settings.thinking
        return None if share is None else _drawn(self.seed, name, "thinking") < share


def _roles(turn: Sequence[Message]) -> list[str]:
    return [one["role"] for one in turn]


def _turns_asked(messages: Sequence[Message]) -> list[list[Message]]:
    """The messages before each answer, without the answers; an open last question is one of them."""
    found: list[list[Message]] = [[]]
    for before, one in zip([None, *messages], messages, strict=False):
        if before is not None and before["role"] == "assistant":
            found.append([])
        if one["role"] != "assistant":
            found[-1].append(one)
    return found


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
    """At most `count` prompts: of exactly `tokens` ids each from texts, of any length from conversations.

    One whose ids' digest is in `taken`, where each is noted, is left out and counted in `dropped`, unless further
    questions to learn from follow it.

    All beginnings come before all second parts, and so on, each round in an order drawn from the seed, so that few
    prompts already cover many documents. A later part starts at a line, at least `stride` characters after the last.
    With `weights`, sources take turns in these proportions as long as each has some left.
    """
    # Of each candidate: the number of its part, its document's and its source's, and its offset; its rank by the seed.
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
    found, taken = 0, set() if taken is None else taken
    for place in order:
        if found == count:
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
        own = hashlib.sha256(array("i", prompt.prompt)).digest()
        if own in taken and not goes_on:
            (Counter() if dropped is None else dropped)["prompts equal to another"] += 1
            continue
        taken.add(own)
        found += 1
        yield prompt


def _beginnings(document: Document, stride: int) -> Iterator[int]:
    """The offsets at which prompts may begin: of a conversation one, of a text its lines, `stride` or more apart."""
    offset = 0
    while offset < len(document.text) or (not offset and document.messages is not None):
        yield offset
        line = document.text.find("\n", offset + stride) if document.messages is None else -1
        if line < 0:
            break
        offset = line + 1


def _mixed(order: Any, sources: Any, weights: Sequence[float]) -> Any:
    """Candidates [N], of these sources each, in an order in which each source has its share of every beginning, by its
    weight; weight 0 leaves a source out."""
    first, turns = numpy.zeros(len(order), int), numpy.zeros(len(order))
    for source, weight in enumerate(weights):
        own = numpy.flatnonzero(sources == source)
        if weight > 0 and len(own):
            first[own], turns[own] = own[0], numpy.arange(1, len(own) + 1) / weight
    mixed = numpy.lexsort((first, turns))  # of equal turns that source goes first whose first candidate does
    return order[mixed[turns[mixed] > 0]]


# ── Prompts that a user gives for a pair ──

ENDINGS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    ".parquet": "parquet",
}  # anything else is text, unless it holds records in JSON
FIELDS = ", ".join(("text", *PROMPTS)) + f" or {', '.join(LISTS)} (lists)"  # that are read
SEED = 0  # of the order in which pieces of texts are taken


@dataclass(frozen=True)
class UserPrompts:
    """Prompts that are measured, others of the same files for what has to be fitted, what was left out and why, the
    plain texts of the files, and how the prompts are asked."""

    measured: list[Sample]
    others: list[Sample]
    dropped: dict[str, int]
    texts: list[str]
    asked: str = ""

    @property
    def longest(self) -> int:
        """The tokens of the longest measured prompt."""
        return max(len(one.prompt) for one in self.measured)

    def classes(self) -> list[str]:
        """The class of each measured prompt: its label, else the file that it came from."""
        return [prompt.label or prompt.source or "prompts" for prompt in self.measured]


def sources_of(paths: Sequence[Path], option: str = "--prompts") -> tuple[Source, ...]:
    """Files and folders as sources of the corpus, by their endings; DataError for one that is missing or empty."""
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
    others: int,
    tokens: int | Sequence[int],
    room: int,
    *,
    answer: int = 0,
    least: int = 2,
) -> UserPrompts:
    """Up to `count` prompts, and `others` more of the same files where something has to be fitted.

    Conversations go through the target's chat template, up to the first question; plain texts are cut into prompts of
    `tokens` tokens, with room for `answer` tokens between them; of several numbers of tokens as many prompts each.
    `room` is the most tokens of a prompt. Loads no weights. Raises DataError for fewer than `least` prompts, or too few
    others, and where no text has so many tokens.
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
        first = (count + others) // (1 + len(longer))
        cut = functools.partial(cut_prompts, encode=to_ids, seed=SEED, chat=chats, dropped=dropped)
        size = min(size, room)
        prompts = [*cut(documents, count=first, tokens=size, stride=4 * (size + answer))]
        texts = [one for one in documents if one.messages is None] if longer else []
        for number, further in enumerate(longer):
            wanted = (count + others - len(prompts)) // (len(longer) - number)
            found = [*cut(texts, count=wanted, tokens=further, stride=4 * further)] if further <= room else []
            if not found:
                what = f"no text gives a prompt of {further} tokens (the context has room for {room})"
                raise DataError(what, "give longer texts, more prompts (--count), or fewer --prompt-tokens")
            prompts += found
    dropped += Counter({} if chats is None else chats.dropped)
    least += min(others, 2)
    if len(prompts) < least:
        left = "".join(f"; {number} left out: {reason}" for reason, number in dropped.items())
        raise DataError(
            f"the files give {len(prompts)} prompts{left}",
            f"give more or longer ones, {least} at least; plain texts are cut into prompts of {size} tokens "
            "(--prompt-tokens, where the command has it)",
        )
    spare = min(others, max(len(prompts) - count, len(prompts) // 2))
    measured, rest = prompts[: min(count, len(prompts) - spare)], prompts[len(prompts) - spare :]
    plain = {one.name: one.text for one in documents if one.messages is None}
    cuts = sum(prompt.id.rpartition("@")[0] in plain for prompt in measured)
    asked = _how_asked(cuts, len(measured) - cuts, [size, *longer], has_template)
    return UserPrompts(measured, rest, dict(dropped), [*plain.values()], asked)


def _how_asked(cuts: int, chats: int, sizes: Sequence[int], has_template: bool) -> str:
    """How prompts are asked, and how to ask them the other way."""
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


@contextmanager
def open_tokenizer(target: str) -> Iterator[Any]:
    """The tokenizer of a folder or a GGUF file, as `ChatTemplate` uses it; loads no weights."""
    with ExitStack() as stack:
        yield GgufTokenizer(target, stack) if is_gguf(target) else load_tokenizer(target)


def user_message(target: str, text: str, chat: Chat, required: bool) -> list[int] | None:
    """Token ids of a text as a user's message behind the first system prompt of `chat`, up to where the answer begins.

    None for a target without a chat template, DataError where one is `required`, or refuses the message.
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


class GgufTokenizer:
    """A GGUF file's own tokenizer and chat template, as `ChatTemplate` and `encode` use those of transformers."""

    def __init__(self, reference: str, stack: ExitStack) -> None:
        head = open_head(Path(reference))
        values, templates = head.values, chat_templates(head)
        self.chat_template: Any = (
            templates if len(templates) > 1 else templates.get("default")
        )  # as transformers has it
        self.file = GgufFile(Path(reference), vocabulary_only=True)
        stack.callback(self.file.close)
        self._special = {name: self._piece(values.get(f"tokenizer.ggml.{name}_token_id")) for name in ("bos", "eos")}

    def _piece(self, token: Any) -> str:
        return self.decode([token]) if isinstance(token, int) and 0 <= token < self.file.head_rows else ""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return self.file.detokenize(list(ids)).decode("utf-8", "replace")

    def apply_chat_template(
        self, messages: list[Any], *, tokenize: bool, add_generation_prompt: bool, tools: Any, **arguments: Any
    ) -> str:
        """The messages as text, rendered as transformers renders templates."""
        from transformers.utils.chat_template_utils import render_jinja_template

        special = {f"{name}_token": text for name, text in self._special.items()}
        template = self.chat_template
        if not isinstance(template, str):
            template = template["tool_use" if tools and "tool_use" in template else "default"]
        rendered: Any = render_jinja_template(
            [messages],
            tools=tools,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            **special,
            **arguments,
        )
        texts = rendered[0] if isinstance(rendered, tuple) else rendered
        return str(texts if isinstance(texts, str) else texts[0])

    def __call__(self, text: str, *, add_special_tokens: bool, **_: Any) -> dict[str, list[int]]:
        """Token ids of a text, its control tokens read as such."""
        return {"input_ids": self.file.tokenize(text, parse_special=True, add_special=add_special_tokens)}

"""The target's own chat template: conversations as prompts, and the tokens of an answer that a draft learns from.

An answer is what the target writes after a prompt: its content, then the token that ends a turn. It is tokenised where
it stands behind the prompt, whose tokens stay those of the prompt alone, as a server reads it. Templates that drop
earlier thinking therefore give each turn a prompt of its own.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import Any

from distill.data.records import BEGINNING, CLOSING, OPENING, THINKING, THOUGHT, Messages
from distill.data.samples import decoded
from distill.engines.torch.hugging_face import encode, encode_behind, encode_text, special_tokens, turn_end
from distill.errors import DataError, RecipeError
from distill.gguf.head import END_NAMES
from distill.recipe import Chat

Message = Mapping[str, Any]  # as records.normal gives it
# What opens a thinking in the prompts of a family, and what closes it.
THOUGHTS = {
    OPENING: CLOSING,
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
}
# Arguments of transformers' renderer, which no record and no request may set.
RENDERERS = (
    *("messages", "conversation", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    *("tokenizer_kwargs", "sanitize_control_tokens"),
)
MARKS = "MARKER of a message", "Other marker"  # in place of a user's message, to find what is written around it
TURNS = (
    "a system's mark",
    "a question's mark",
    "an answer's mark",
    "a further question's mark",
    "a further answer's mark",
)
BEGINNINGS = "How", "What", "a", "1", "\u00e9", "\u4f60", "-", '"'  # of messages


@lru_cache
def variables(source: str) -> frozenset[str]:
    """The variables of a template that a conversation may set: those that it reads, without the messages, special
    tokens and other arguments that are the renderer's own."""
    from jinja2 import meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    found: set[str] = set()
    with contextlib.suppress(Exception):  # a template of wrong form is refused where it is rendered
        found = meta.find_undeclared_variables(_compile_jinja_template(source).environment.parse(source))
    return frozenset(name for name in found - {*RENDERERS} if not name.endswith("_token"))


@dataclass(frozen=True)
class Frame:
    """The text that a template writes around the turns of a conversation without tools.

    `before` precedes the first question. `to_answer` stands between a question and its answer, `to_question` between
    an answer and the next question. `behind_question` and `behind_answer` end the text after its last turn.
    `around_system` precedes a system prompt and separates it from the first question. It is None if the template
    refuses a system prompt.
    """

    before: str
    to_answer: str
    to_question: str
    behind_question: str
    behind_answer: str
    around_system: tuple[str, str] | None

    def split(self, text: str) -> Iterator[list[Message]]:
        """The conversations that a text may be; the last message of each is a question or an answer."""
        begun = [(self.before, "")]
        if self.around_system is not None and text.startswith(self.around_system[0]):
            system, found, _ = text.removeprefix(self.around_system[0]).partition(self.around_system[1])
            begun += [("".join((self.around_system[0], system, self.around_system[1])), system)] if found else []
        for opening, system in begun:
            if not text.startswith(opening):
                continue
            messages: list[Message] = [{"role": "system", "content": system}] if system else []
            rest, more = text.removeprefix(opening), "…"
            while more and (rest.strip() or not messages):
                asks = not messages or messages[-1]["role"] != "user"
                part, more, rest = rest.partition(self.to_answer if asks else self.to_question)
                if not more:
                    end = self.behind_question if asks else self.behind_answer
                    part = part.rstrip().removesuffix(end.strip()) if end.strip() else part.rstrip()
                messages.append({"role": "user" if asks else "assistant", "content": part})
            yield messages


@dataclass(frozen=True)
class UserHeader:
    """What a template writes before a user's message, as text and as the token ids that every message leaves as they
    are; and the text behind the message that ends it, None where that is an end token of the model."""

    text: str
    ids: list[int]
    end: str | None


class ChatTemplate:
    """Renders conversations with a tokenizer's template and a recipe's section `chat`, whose tools it offers in each.

    Raises DataError for a tokenizer without a template and RecipeError for arguments that its template never reads.
    """

    def __init__(self, tokenizer: Any, settings: Chat) -> None:
        self.tokenizer, self.settings = tokenizer, settings
        if not tokenizer.chat_template:
            raise DataError(
                "conversations need the target's chat template, and its tokenizer has none",
                "take an instruct model, give its folder a chat_template.jinja, or use plain texts: text files, or "
                "records with the field `text`",
            )
        names = [*settings.arguments, *([settings.thinking_argument] if settings.thinking is not None else [])]
        if unread := [name for name in names if name not in self.variables(settings.tools)]:
            hint = "correct chat.arguments or chat.thinking_argument, or leave chat.thinking out"
            raise RecipeError(f"chat: the target's template does not read {', '.join(unread)}", hint)

    def variables(self, tools: Any) -> frozenset[str]:
        """The names that the template reads; where the tokenizer has several, that with which a server renders."""
        own = self.tokenizer.chat_template or ""
        if isinstance(own, dict):  # by name, as transformers chooses
            own = own.get("tool_use" if tools and "tool_use" in own else "default", "")
        own_tokens = getattr(self.tokenizer, "special_tokens_map", ())
        return variables(own).difference(own_tokens)

    def with_arguments(self, more: Mapping[str, Any]) -> ChatTemplate:
        """This template with further arguments, those of one conversation; `tools` among them replace the recipe's."""
        if not more:
            return self
        found = copy.copy(self)
        found.settings = self.settings.model_copy(update={"arguments": {**self.settings.arguments, **more}})
        return found

    def of_conversation(self, given: Mapping[str, Any]) -> tuple[ChatTemplate, list[str]]:
        """This template with the arguments that a record or a request gives it, and the names of those that it lacks.

        ValueError for `tools` and `documents` that it does not write: the target was asked something else.
        """
        known = self.variables(given.get("tools") or self.settings.arguments.get("tools") or self.settings.tools)
        lacking = [name for name in given if name not in known]
        if "reasoning_effort" in given and "enable_thinking" in lacking:  # which servers add to the effort
            lacking.remove("enable_thinking")
            given = {name: value for name, value in given.items() if name != "enable_thinking"}
        if lost := next((name for name in ("tools", "documents") if name in lacking), None):
            raise ValueError(f"`{lost}` that the target's chat template does not write")
        return self.with_arguments({name: given[name] for name in given if name not in lacking}), lacking

    def arguments(self, thinking: bool | None) -> dict[str, Any]:
        """The template's arguments with thinking on, off, or as it likes."""
        switch = {} if thinking is None else {self.settings.thinking_argument: thinking}
        return {**self.settings.arguments, **switch}

    def text(self, messages: Sequence[Message], thinking: bool | None = None, generate: bool = True) -> str:
        """The messages as text, with the beginning of an answer where one is to be generated.

        Raises ValueError if the template refuses the messages or leaves one out. The error gives the reason.
        """
        text = self._rendered(messages, thinking, generate)
        rest = text
        for at, one in enumerate(messages):
            content = one["content"].strip()
            forms = [content, json.dumps(content)[1:-1], json.dumps(content, ensure_ascii=False)[1:-1]]
            if one["role"] == "assistant" or not content:
                continue
            if (form := next((form for form in forms if form in rest), None)) is not None:
                rest = rest.replace(form, "", 1)
                continue
            # Some templates change a text, such as SmolLM3's, which takes its switches out of a system prompt.
            other = [*messages[:at], {**one, "content": MARKS[0]}, *messages[at + 1 :]]
            if MARKS[0] not in self._rendered(other, thinking, generate):
                raise ValueError(f"the target's chat template leaves out a message of the {one['role']}")
        return text

    def _rendered(self, messages: Sequence[Message], thinking: bool | None, generate: bool) -> str:
        own = list(map(self._as_read, messages))
        try:
            return self._applied(own, thinking, generate)
        except Exception as error:  # templates are foreign programs and raise any exception
            if any("tool_calls" in one for one in own):  # some, such as DeepSeek's, write arguments that are text
                with contextlib.suppress(Exception):
                    return self._applied(list(map(_with_text_arguments, own)), thinking, generate)
            raise ValueError(f"the target's chat template refuses it ({' '.join(str(error).split())[:200]})") from error

    def _as_read(self, message: Message) -> dict[str, Any]:
        """The message as the template reads it. Its thinking stands under every known name, because a template reads
        only one of them. Its parts are joined."""
        thought = dict.fromkeys(THINKING[:3], message[THOUGHT]) if THOUGHT in message else {}
        return {**self._in_one(message), **thought}

    def _in_one(self, message: Message) -> dict[str, Any]:
        """The message with its parts as the template joins them; ValueError where it takes no parts."""
        found = {name: value for name, value in message.items() if name != "parts"}
        if "parts" in message:
            if self._between_parts is None:
                raise ValueError("a message of several parts, which the target's chat template does not write as text")
            found["content"] = self._between_parts.join(message["parts"])
        return found

    @cached_property
    def _between_parts(self) -> str | None:
        """The text that the template writes between two parts of a message; None if it takes no list of parts."""
        parts = [{"type": "text", "text": mark} for mark in MARKS]
        try:
            text = self._applied([{"role": "user", "content": parts}], None, False)
        except Exception:  # see above
            return None
        between = text.partition(MARKS[0])[2].partition(MARKS[1])[0]
        return between if MARKS[1] in text and not between.strip() else None

    def _applied(self, messages: list[dict[str, Any]], thinking: bool | None, generate: bool) -> str:
        return self.tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=generate,
            **{"tools": list(self.settings.tools) or None, **self.arguments(thinking)},
        )

    @cached_property
    def around(self) -> tuple[str, str]:
        """The texts before and behind a first question, the beginning of an answer included; empty where it is not
        written as it is."""
        try:
            before, _, behind = self.text([{"role": "user", "content": MARKS[0]}]).partition(MARKS[0])
        except ValueError:
            return "", ""
        return before, behind

    def is_rendered(self, text: str) -> bool:
        """Whether this template has written a text already as a prompt: it ends with the beginning of an answer."""
        behind = self.around[1].strip()
        return bool(behind) and text.rstrip().endswith(behind)

    @cached_property
    def _frame(self) -> Frame | None:
        """What stands around turns; None where the template does not write turns as they are."""
        roles = ("system", "user", "assistant", "user", "assistant")
        turns = [{"role": role, "content": mark} for role, mark in zip(roles, TURNS, strict=True)]

        def around(messages: list[dict[str, str]]) -> list[str]:
            text, found = self.text(messages, None, False), []
            for one in messages:
                before, there, text = text.partition(one["content"])
                if not there:
                    raise ValueError("it does not write each turn once, in order")
                found.append(before)
            return [*found, text]

        try:
            before, to_answer, to_question, _, behind_answer = around(turns[1:])
            _, behind_question = around(turns[1:2])
        except ValueError:
            return None
        system = None
        with contextlib.suppress(ValueError):
            first, second, *_ = around(turns)
            system = self._without_bos(first + "x").removesuffix("x"), second
        before = self._without_bos(before + "x").removesuffix("x")
        return Frame(before, to_answer, to_question, behind_question, behind_answer, system)

    def conversation_of(self, text: str) -> Messages | None:
        """The conversation that this template has rendered as a text, as far as it has no tools; None for another text.

        The template writes this very text for it, but for the bos and white space at the ends.
        """
        frame, bare = self._frame, self._without_bos(text)
        if frame is None or not frame.to_answer.strip() or not self.looks_rendered(text):
            return None
        for found in frame.split(bare):
            with contextlib.suppress(ValueError):
                whole = not any(self.looks_rendered(one["content"]) or not one["content"].strip() for one in found)
                forms = (self._without_bos(self.text(found, None, begun)) for begun in (False, True))
                if whole and bare in forms:
                    return tuple(map(dict, found))
        return None

    def _without_bos(self, text: str) -> str:
        return text.strip().removeprefix(getattr(self.tokenizer, "bos_token", None) or "").strip()

    def looks_rendered(self, text: str) -> bool:
        """Whether a text holds what this template writes before an answer, or the tags before a question."""
        frame = self._frame
        if frame is None:
            return self.is_rendered(text)
        pairs = zip(frame.to_question, frame.behind_answer, strict=False)
        end = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))  # of the answer before
        header, begins_answer = frame.to_question[end:].strip(), frame.to_answer.strip()
        return bool(begins_answer and begins_answer in text) or bool(header[:1] in ("<", "[") and header in text)

    @cached_property
    def _ends(self) -> list[str]:
        """The texts of the tokens that end an answer, whatever wrote them."""
        own = [decoded(self.tokenizer, self.end), self.tokenizer.eos_token or ""]
        known = [name for name in END_NAMES if self.tokenizer.convert_tokens_to_ids(name) in self.special]
        return [text for text in dict.fromkeys([*own, *known]) if text.strip()]

    def split_at_end(self, answer: str) -> tuple[str, str]:
        """The text of an answer up to the first end token that is spelled out in it, and what follows that token, other
        end tokens left out. ValueError for one that ends with an end token of other models."""
        places = [at for end in self._ends if (at := answer.find(end)) >= 0]
        if not places:
            struck = "<s>" in answer  # out, in HTML: no end
            foreign = (name for name in END_NAMES if answer.rstrip().endswith(name) and not (struck and name == "</s>"))
            if (name := next(foreign, None)) is not None:
                raise ValueError(f"an answer that ends with `{name}`, which is no token of the target")
            return answer, ""
        rest = answer[min(places) :]
        for end in self._ends:
            rest = rest.replace(end, "")
        return answer[: min(places)], rest.strip()

    def first_question(self, prompt: str) -> str:
        """The first question of a rendered prompt, whatever stands behind it; all of another text."""
        before, behind = self.around
        return prompt.partition(behind)[0].removeprefix(before) if behind.strip() else prompt

    def prompt(self, messages: Sequence[Message], thinking: bool | None = None) -> list[int]:
        """Token ids of the messages and of the beginning of an answer."""
        return encode_text(self.tokenizer, self.text(messages, thinking))

    @cached_property
    def special(self) -> set[int]:
        """See special_tokens."""
        return special_tokens(self.tokenizer)

    def user_header(
        self, before: Sequence[Message], ends: Sequence[int], thinking: bool | None = None, opening: str = ""
    ) -> UserHeader:
        """The beginning of a user's message after these messages: a model that continues it writes a user's message.

        `ends` are the model's end tokens; `opening` is what the message begins with. Raises ValueError, with the
        reason, for a template that it cannot be found in.
        """
        surroundings = set()
        for mark in MARKS:
            text = self.text([*before, {"role": "user", "content": mark}], thinking)
            header, there, behind = text.partition(mark)
            if not there:
                raise ValueError("it does not write a user's message as it is")
            surroundings.add((header, behind))
        if len(surroundings) > 1:
            raise ValueError("what it writes around a user's message depends on the message")
        header, behind = surroundings.pop()
        if not header.replace(self.tokenizer.bos_token or "", "").strip():
            raise ValueError("it writes nothing before a user's message")
        # A header may end within what the tokenizer writes as one token, such as a space and a word; an opening goes on
        # as it stands, but for line ends, which some tokenizers write otherwise where a word follows.
        header += opening
        return UserHeader(header, self._begun(header, opening), self._end_of_user(behind, ends))

    def _begun(self, header: str, opening: str) -> list[int]:
        """The ids of a header, with the opening that it ends with, that every message leaves as they are."""
        texts = [header.rstrip(" "), *(header + word for word in BEGINNINGS)]
        if opening:
            texts = [header + word for word in BEGINNINGS[:2]] if opening[-1].isspace() else [header]
        columns = zip(*(encode_text(self.tokenizer, text) for text in texts), strict=False)
        return [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]

    def _end_of_user(self, behind: str, ends: Sequence[int]) -> str | None:
        """The text that ends a user's message, from the text behind it: a special token, or the rest of the line."""
        following = encode(self.tokenizer, behind.lstrip())[:1]
        if not following or following[0] in ends:
            return None
        if following[0] in self.special:
            return str(self.tokenizer.convert_ids_to_tokens(following)[0])
        return behind.strip().splitlines()[0]

    @cached_property
    def end(self) -> list[int]:
        """The token that ends an answer: the first after one as the template writes it; else the tokenizer's eos."""
        eos = self.tokenizer.eos_token_id
        return turn_end(self.tokenizer) or ([] if eos is None else [eos])

    def answered(
        self, messages: Sequence[Message], thinking: bool | None = None, ended: bool = True, served: bool = False
    ) -> tuple[list[int], list[int]]:
        """Token ids of the prompt before the last message, the assistant's, and of that answer, its end included
        where the target `ended` it. A `served` answer may hold the space that the template writes before it.

        Raises ValueError where the template does not say how the answer was written.
        """
        *before, last = map(self._in_one, messages)
        prompt = self.text(before, thinking)
        opening = next((one for one in THOUGHTS if prompt.rstrip().endswith(one)), "")
        if last.get("tool_calls") and not ended:
            raise ValueError("a tool call that was cut short")
        if opening and THOUGHT not in last:
            if (beginning := last["content"].lstrip()).startswith(opening):  # it repeats what its prompt opened
                last["content"] = beginning.removeprefix(opening).lstrip("\n")
            if THOUGHTS[opening] not in last["content"]:
                raise ValueError(f"an answer that never closes the {opening} that its prompt ends with")
        within, closing, behind = last["content"].partition(CLOSING)
        if closing and not opening and THOUGHT not in last and OPENING not in within:
            # Its server's template had opened the thinking.
            last |= {THOUGHT: within.strip("\n"), "content": behind.lstrip("\n")}
        end = self.end if ended else []
        if last.get("tool_calls"):
            answer, as_usual = self._written(prompt, before, last, thinking)
            if not as_usual and encode(self.tokenizer, answer)[-1] in self.special:
                end = []  # a family that ends a call by a token of its own, which is there
        elif THOUGHT not in last:
            answer = self._as_it_stands(prompt, before, last, thinking, served)
        else:
            answer = self._with_thinking(prompt, opening, before, last, thinking)
            if not ended and not last["content"].strip():
                thought = last[THOUGHT].strip()
                answer = answer[: answer.index(thought) + len(thought)]
        ids, found = encode_behind(self.tokenizer, prompt, answer + decoded(self.tokenizer, end))
        return (ids, found) if found[-1:] == end[-1:] else (ids, encode_behind(self.tokenizer, prompt, answer)[1] + end)

    def _as_it_stands(
        self, prompt: str, before: Sequence[Message], last: Message, thinking: bool | None, served: bool
    ) -> str:
        """The text of an answer's content as the template writes it behind the prompt, with the space before it once
        where a `served` one holds it; as it is where the template begins no answer so."""
        content = str(last["content"])
        try:
            written = self._written(prompt, before, last, thinking)[0]
        except ValueError:
            if not served and not prompt.rstrip().endswith((*THOUGHTS, *THOUGHTS.values())):
                raise
            return content  # as a server wrote it, or behind a thinking that the prompt opens or closes
        gap = written.partition(content)[0] if served and content in written else ""
        return content if gap and not gap.strip() and content.startswith(gap) else written

    def _with_thinking(
        self, prompt: str, opening: str, before: Sequence[Message], last: Message, thinking: bool | None
    ) -> str:
        """The text of an answer with its thinking, as the template writes it; as the target does where it drops it."""
        try:
            return self._written(prompt, before, last, thinking)[0]
        except ValueError:
            own = str(last[THOUGHT]).strip(), str(last["content"])
            if opening:
                gap = "\n" if prompt.endswith("\n") else ""
                return f"{own[0]}{gap}{THOUGHTS[opening]}{2 * gap}{own[1]}"
            if CLOSING in str(self.tokenizer.chat_template) and not prompt.rstrip().endswith(CLOSING):
                return f"{OPENING}\n{own[0]}\n{CLOSING}\n\n{own[1]}"
            raise

    def _written(
        self, prompt: str, before: Sequence[Message], last: Message, thinking: bool | None
    ) -> tuple[str, bool]:
        """The text of an answer after its prompt as the template writes it, without its end, and whether it had one."""
        whole = self.text([*before, last], thinking, generate=False)
        if not whole.startswith(prompt):
            raise ValueError("the template writes this answer otherwise than it begins one")
        end = self.tokenizer.decode(self.end) if self.end else ""
        written = whole[len(prompt) :]
        parts = [("thinking", last.get(THOUGHT, "")), ("text", last["content"])]
        parts += [("tool calls", call.get("function", call)["name"]) for call in last.get("tool_calls", ())]
        rest = written
        for what, part in parts:
            if part.strip() not in rest:
                raise ValueError(f"the target's chat template does not write the {what} of an answer")
            rest = rest.replace(part.strip(), "", 1)
        return (written.rpartition(end)[0], True) if end and end in written else (written.rstrip("\n"), False)


def reader_of(tokenizer: Any) -> Callable[[str], Messages | None]:
    """What finds the conversation that a tokenizer's template has rendered as a text; it raises ValueError for a text
    that looks rendered by this template, and is not."""
    if not tokenizer.chat_template:
        return lambda text: None
    template = ChatTemplate(tokenizer, Chat())

    def read(text: str) -> Messages | None:
        found = template.conversation_of(text)
        if found is None and template.looks_rendered(text[:BEGINNING]):
            raise ValueError("texts that look rendered by the target's chat template, and are not")
        return found

    return read


class PlainTexts(ChatTemplate):
    """In place of the template of a model that has none: a message is a text as it stands.

    RecipeError for settings of section `chat`, which nothing would read.
    """

    def __init__(self, tokenizer: Any, settings: Chat) -> None:
        if given := [name for name, value in settings if name != "turns" and value != getattr(Chat(), name)]:
            hint = "leave it out, or take an instruct model"
            raise RecipeError(f"chat.{given[0]}: the target has no chat template", hint)
        self.tokenizer, self.settings = tokenizer, settings

    def text(self, messages: Sequence[Message], thinking: bool | None = None, generate: bool = True) -> str:
        """The contents, one after the other."""
        return "".join(message["content"] for message in messages)

    def user_header(
        self, before: Sequence[Message], ends: Sequence[int], thinking: bool | None = None, opening: str = ""
    ) -> UserHeader:
        """The beginning of a text, whose last token leaves the next word as it is; ValueError where it has none."""
        ids = self._begun(opening, opening)
        if not ids:
            raise ValueError("its texts begin with no token of their own")
        return UserHeader(decoded(self.tokenizer, ids), ids, None)


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its tool calls as JSON text."""
    calls = []
    for call in message.get("tool_calls", ()):
        inner = call.get("function", call)
        inner = {**inner, "arguments": json.dumps(inner["arguments"], ensure_ascii=False)}
        calls.append({**call, "function": inner} if "function" in call else inner)
    return {**message, "tool_calls": calls} if calls else message


def messages_after(chat: Mapping[str, Any], answers: Sequence[str]) -> list[dict[str, Any]]:
    """The messages up to the question that follows this many answers; `chat` is a Sample's: messages before the first
    answer, further `turns` (a user's text, or messages), and `thinking`."""
    messages = list(chat["messages"])
    for answer, turn in zip(answers, chat.get("turns") or [], strict=False):
        asked = turn if isinstance(turn, list) else [{"role": "user", "content": turn}]
        messages += [{"role": "assistant", "content": answer}, *asked]
    return messages


def next_prompt(template: ChatTemplate, chat: Mapping[str, Any], answers: Sequence[str]) -> list[int] | None:
    """The prompt of the next turn after these answers; None after the last. ValueError for messages that the template
    refuses."""
    if len(answers) > len(chat["turns"]):
        return None
    own = template.with_arguments(chat.get("arguments") or {})
    return own.prompt(messages_after(chat, answers), chat.get("thinking"))

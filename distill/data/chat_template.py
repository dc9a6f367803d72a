"""The target's own chat template: conversations as prompts, and the tokens of an answer that a draft learns from.

An answer is the text that the target writes after a prompt: its content, then the token that ends a turn. The prompt
keeps the tokens that it has alone, because a server tokenises it alone. The answer is tokenised after the prompt. A
template may drop earlier thinking, so each turn has a separate prompt.
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
from distill.engines.ends import turn_end
from distill.engines.tokenizer import special_tokens
from distill.engines.torch.hugging_face import encode, encode_behind, encode_text
from distill.errors import DataError, RecipeError
from distill.files import has_form
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
    """The variables that a template reads and a conversation may set: all except the renderer's arguments."""
    from jinja2 import meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    names: set[str] = set()
    with contextlib.suppress(Exception):  # A template with a syntax error is refused when it is rendered.
        names = meta.find_undeclared_variables(_compile_jinja_template(source).environment.parse(source))
    return frozenset(name for name in names - {*RENDERERS} if not name.endswith("_token"))


@dataclass(frozen=True)
class Frame:
    """The text that a template writes around the turns of a conversation without tools.

    `before` precedes the first question. `to_answer` stands between a question and its answer, `to_question` between
    an answer and the next question. `after_question` and `after_answer` end the text after its last turn.
    `around_system` precedes a system prompt and separates it from the first question. It is None if the template
    refuses a system prompt.
    """

    before: str
    to_answer: str
    to_question: str
    after_question: str
    after_answer: str
    around_system: tuple[str, str] | None

    def split(self, text: str) -> Iterator[list[Message]]:
        """The conversations that a text may be; the last message of each is a question or an answer."""
        begun = [(self.before, "")]
        if self.around_system is not None and text.startswith(self.around_system[0]):
            system, separator, _ = text.removeprefix(self.around_system[0]).partition(self.around_system[1])
            begun += [("".join((self.around_system[0], system, self.around_system[1])), system)] if separator else []
        for opening, system in begun:
            if not text.startswith(opening):
                continue
            messages: list[Message] = [{"role": "system", "content": system}] if system else []
            rest, more = text.removeprefix(opening), "…"
            while more and (rest.strip() or not messages):
                asks = not messages or messages[-1]["role"] != "user"
                part, more, rest = rest.partition(self.to_answer if asks else self.to_question)
                if not more:
                    end = self.after_question if asks else self.after_answer
                    part = part.rstrip().removesuffix(end.strip()) if end.strip() else part.rstrip()
                messages.append({"role": "user" if asks else "assistant", "content": part})
            yield messages


@dataclass(frozen=True)
class UserHeader:
    """The text before a user's message, its ids before any message, and the text that ends the message.

    `end` is None if an end token of the model ends the message.
    """

    text: str
    ids: list[int]
    end: str | None


SWITCHES = ("enable_thinking", "thinking")  # arguments of templates that turn thinking on or off


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
        read = self.variables(settings.tools)
        self.switch = next((name for name in SWITCHES if name in read), SWITCHES[0])
        names = [*settings.arguments, *([self.switch] if settings.thinking is not None else [])]
        if unread := [name for name in names if name not in read]:
            hint = "correct chat.arguments, or leave chat.thinking out"
            raise RecipeError(f"chat: the target's template does not read {', '.join(unread)}", hint)

    def variables(self, tools: Any) -> frozenset[str]:
        """The names that the template reads. Of several templates, the one that renders with these `tools` counts."""
        source = self.tokenizer.chat_template or ""
        if isinstance(source, dict):  # transformers chooses by these names
            source = source.get("tool_use" if tools and "tool_use" in source else "default", "")
        return variables(source).difference(getattr(self.tokenizer, "special_tokens_map", ()))

    def with_arguments(self, more: Mapping[str, Any]) -> ChatTemplate:
        """This template with the further arguments of a conversation. Its `tools` replace the recipe's."""
        if not more:
            return self
        changed = copy.copy(self)
        changed.settings = self.settings.model_copy(update={"arguments": {**self.settings.arguments, **more}})
        return changed

    def of_conversation(self, given: Mapping[str, Any]) -> tuple[ChatTemplate, list[str]]:
        """This template with the arguments of a record or a request, and the names of those that it does not read.

        ValueError for `tools` and `documents` that it does not write, because the target read another prompt.
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
        """The template's arguments with thinking on or off. None leaves thinking to the template."""
        switch = {} if thinking is None else {self.switch: thinking}
        return {**self.settings.arguments, **switch}

    def text(self, messages: Sequence[Message], thinking: bool | None = None, generate: bool = True) -> str:
        """The messages as text. With `generate`, the beginning of an answer follows.

        Raises ValueError if the template refuses the messages or leaves one out. The error gives the reason.
        """
        text = self._rendered(messages, thinking, generate)
        documents: Any = self.settings.arguments.get("documents")
        for document in documents if has_form(documents, [{}]) else ():
            contents = [value for value in document.values() if isinstance(value, str)]
            if not any(form in text for value in contents if value.strip() for form in _forms(value.strip())):
                raise ValueError("`documents` that the target's chat template does not write")
        rest = text
        for at, message in enumerate(messages):
            content = message["content"].strip()
            if message["role"] == "assistant" or not content:
                continue
            if (form := next((form for form in _forms(content) if form in rest), None)) is not None:
                rest = rest.replace(form, "", 1)
                continue
            # Some templates change a text. SmolLM3's removes its switches from a system prompt.
            other = [*messages[:at], {**message, "content": MARKS[0]}, *messages[at + 1 :]]
            if MARKS[0] not in self._rendered(other, thinking, generate):
                raise ValueError(f"the target's chat template leaves out a message of the {message['role']}")
        return text

    def _rendered(self, messages: Sequence[Message], thinking: bool | None, generate: bool) -> str:
        read = list(map(self._as_read, messages))
        try:
            return self._applied(read, thinking, generate)
        except Exception as error:  # Templates are foreign programs and raise any exception.
            if any("tool_calls" in message for message in read):  # DeepSeek's, among others, takes arguments as text.
                with contextlib.suppress(Exception):
                    return self._applied(list(map(_with_text_arguments, read)), thinking, generate)
            raise ValueError(f"the target's chat template refuses it ({' '.join(str(error).split())[:200]})") from error

    def _as_read(self, message: Message) -> dict[str, Any]:
        """The message with joined parts, and with its thinking under every name, because a template reads only one."""
        thought = dict.fromkeys(THINKING[:3], message[THOUGHT]) if THOUGHT in message else {}
        return {**self._in_one(message), **thought}

    def _in_one(self, message: Message) -> dict[str, Any]:
        """The message with its parts joined as the template joins them. ValueError if the template takes no parts."""
        joined = {name: value for name, value in message.items() if name != "parts"}
        if "parts" in message:
            if self._between_parts is None:
                raise ValueError("a message of several parts, which the target's chat template does not write as text")
            joined["content"] = self._between_parts.join(message["parts"])
        return joined

    @cached_property
    def _between_parts(self) -> str | None:
        """The text that the template writes between two parts of a message; None if it takes no list of parts."""
        parts = [{"type": "text", "text": mark} for mark in MARKS]
        try:
            text = self._applied([{"role": "user", "content": parts}], None, False)
        except Exception:  # see `_rendered`
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
        """The texts before and after a first question, up to its answer. Empty if the template changes a question."""
        try:
            before, _, after = self.text([{"role": "user", "content": MARKS[0]}]).partition(MARKS[0])
        except ValueError:
            return "", ""
        return before, after

    def is_rendered(self, text: str) -> bool:
        """Whether a text is a prompt that this template has rendered: it ends with the beginning of an answer."""
        after = self.around[1].strip()
        return bool(after) and text.rstrip().endswith(after)

    @cached_property
    def _frame(self) -> Frame | None:
        """The texts around turns. None if the template changes turns."""
        roles = ("system", "user", "assistant", "user", "assistant")
        turns = [{"role": role, "content": mark} for role, mark in zip(roles, TURNS, strict=True)]

        def around(messages: list[dict[str, str]]) -> list[str]:
            text, parts = self.text(messages, None, False), []
            for message in messages:
                before, there, text = text.partition(message["content"])
                if not there:
                    raise ValueError("it does not write each turn once, in order")
                parts.append(before)
            return [*parts, text]

        try:
            before, to_answer, to_question, _, after_answer = around(turns[1:])
            _, after_question = around(turns[1:2])
        except ValueError:
            return None
        system = None
        with contextlib.suppress(ValueError):
            first, second, *_ = around(turns)
            system = self._without_bos(first + "x").removesuffix("x"), second
        before = self._without_bos(before + "x").removesuffix("x")
        return Frame(before, to_answer, to_question, after_question, after_answer, system)

    def conversation_of(self, text: str) -> Messages | None:
        """The conversation without tools that this template has rendered as a text. None for another text.

        The template renders the conversation as this text again, except for bos and white space at the ends.
        """
        frame, bare = self._frame, self._without_bos(text)
        if frame is None or not frame.to_answer.strip() or not self.looks_rendered(text):
            return None
        for messages in frame.split(bare):
            with contextlib.suppress(ValueError):
                contents = [message["content"] for message in messages]
                whole = not any(self.looks_rendered(content) or not content.strip() for content in contents)
                forms = (self._without_bos(self.text(messages, None, begun)) for begun in (False, True))
                if whole and bare in forms:
                    return tuple(map(dict, messages))
        return None

    def _without_bos(self, text: str) -> str:
        return text.strip().removeprefix(getattr(self.tokenizer, "bos_token", None) or "").strip()

    def looks_rendered(self, text: str) -> bool:
        """Whether a text holds what this template writes before an answer, or the tags before a question."""
        frame = self._frame
        if frame is None:
            return self.is_rendered(text)
        pairs = zip(frame.to_question, frame.after_answer, strict=False)
        end = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))  # of the answer before
        header, begins_answer = frame.to_question[end:].strip(), frame.to_answer.strip()
        return bool(begins_answer and begins_answer in text) or bool(header[:1] in ("<", "[") and header in text)

    @cached_property
    def _ends(self) -> list[str]:
        """The texts of the tokens that end an answer of any model with this vocabulary."""
        named = [decoded(self.tokenizer, self.end), self.tokenizer.eos_token or ""]
        known = [name for name in END_NAMES if self.tokenizer.convert_tokens_to_ids(name) in self.special]
        return [text for text in dict.fromkeys([*named, *known]) if text.strip()]

    def split_at_end(self, answer: str) -> tuple[str, str]:
        """The texts of an answer before and after the first end token that is spelled out in it, without end tokens.

        ValueError for an answer that ends with another model's end token.
        """
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
        """The first question of a rendered prompt. A text that is not rendered is returned whole."""
        before, after = self.around
        return prompt.partition(after)[0].removeprefix(before) if after.strip() else prompt

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
        """The beginning of a user's message after these messages. A model that continues it writes a user's message.

        `ends` are the model's end tokens. The message begins with `opening`. Raises ValueError, with the reason, if the
        template shows no such header.
        """
        surroundings = set()
        for mark in MARKS:
            text = self.text([*before, {"role": "user", "content": mark}], thinking)
            header, there, after = text.partition(mark)
            if not there:
                raise ValueError("it does not write a user's message as it is")
            surroundings.add((header, after))
        if len(surroundings) > 1:
            raise ValueError("what it writes around a user's message depends on the message")
        header, after = surroundings.pop()
        if not header.replace(self.tokenizer.bos_token or "", "").strip():
            raise ValueError("it writes nothing before a user's message")
        # A header may end within a token, such as a space and a word. An opening is continued unchanged. Some
        # tokenizers write a line end differently if a word follows.
        header += opening
        return UserHeader(header, self._begun(header, opening), self._end_of_user(after, ends))

    def _begun(self, header: str, opening: str) -> list[int]:
        """The ids that a header, which ends with `opening`, has before any message."""
        texts = [header.rstrip(" "), *(header + word for word in BEGINNINGS)]
        if opening:
            texts = [header + word for word in BEGINNINGS[:2]] if opening[-1].isspace() else [header]
        columns = zip(*(encode_text(self.tokenizer, text) for text in texts), strict=False)
        return [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]

    def _end_of_user(self, after: str, ends: Sequence[int]) -> str | None:
        """The end of a user's message, from the text after the message: a special token, or the rest of the line."""
        following = encode(self.tokenizer, after.lstrip())[:1]
        if not following or following[0] in ends:
            return None
        if following[0] in self.special:
            return str(self.tokenizer.convert_ids_to_tokens(following)[0])
        return after.strip().splitlines()[0]

    @cached_property
    def end(self) -> list[int]:
        """The token that the template writes after an answer, or else the tokenizer's eos, as a list."""
        eos = self.tokenizer.eos_token_id
        return turn_end(self.tokenizer)[0] or ([] if eos is None else [eos])

    def answered(
        self, messages: Sequence[Message], thinking: bool | None = None, ended: bool = True, served: bool = False
    ) -> tuple[list[int], list[int]]:
        """Token ids of the prompt before the last message, which is the assistant's, and of that answer.

        The answer includes its end if the target `ended` it. A `served` answer may include the space that the template
        writes before it. Raises ValueError if the template does not show the form of the answer.
        """
        *before, last = map(self._in_one, messages)
        prompt = self.text(before, thinking)
        opening = next((tag for tag in THOUGHTS if prompt.rstrip().endswith(tag)), "")
        if last.get("tool_calls") and not ended:
            raise ValueError("a tool call that was cut short")
        if opening and THOUGHT not in last:
            if (beginning := last["content"].lstrip()).startswith(opening):  # It repeats its prompt's tag.
                last["content"] = beginning.removeprefix(opening).lstrip("\n")
            if THOUGHTS[opening] not in last["content"]:
                raise ValueError(f"an answer that never closes the {opening} that its prompt ends with")
        within, closing, rest = last["content"].partition(CLOSING)
        if closing and not opening and THOUGHT not in last and OPENING not in within:
            # The template of its server opened the thinking.
            last |= {THOUGHT: within.strip("\n"), "content": rest.lstrip("\n")}
        end = self.end if ended else []
        if last.get("tool_calls"):
            answer, as_usual = self._written(prompt, before, last, thinking)
            if not as_usual and encode(self.tokenizer, answer)[-1] in self.special:
                end = []  # This family ends a call with another special token, which is there already.
        elif THOUGHT not in last:
            answer = self._as_it_stands(prompt, before, last, thinking, served)
        else:
            answer = self._with_thinking(prompt, opening, before, last, thinking)
            if not ended and not last["content"].strip():
                thought = last[THOUGHT].strip()
                answer = answer[: answer.index(thought) + len(thought)]
        ids, new = encode_behind(self.tokenizer, prompt, answer + decoded(self.tokenizer, end))
        return (ids, new) if new[-1:] == end[-1:] else (ids, encode_behind(self.tokenizer, prompt, answer)[1] + end)

    def _as_it_stands(
        self, prompt: str, before: Sequence[Message], last: Message, thinking: bool | None, served: bool
    ) -> str:
        """The text of an answer's content as the template writes it after the prompt.

        If a `served` answer includes the space before it, the space is written once. If the template refuses the
        answer, a served content is returned unchanged.
        """
        content = str(last["content"])
        try:
            written = self._written(prompt, before, last, thinking)[0]
        except ValueError:
            if not served and not prompt.rstrip().endswith((*THOUGHTS, *THOUGHTS.values())):
                raise
            return content  # A server wrote it, or it follows a thinking that the prompt opens or closes.
        gap = written.partition(content)[0] if served and content in written else ""
        return content if gap and not gap.strip() and content.startswith(gap) else written

    def _with_thinking(
        self, prompt: str, opening: str, before: Sequence[Message], last: Message, thinking: bool | None
    ) -> str:
        """The text of an answer with its thinking. If the template drops the thinking, the target's form is used."""
        try:
            return self._written(prompt, before, last, thinking)[0]
        except ValueError:
            thought, content = str(last[THOUGHT]).strip(), str(last["content"])
            if opening:
                gap = "\n" if prompt.endswith("\n") else ""
                return f"{thought}{gap}{THOUGHTS[opening]}{2 * gap}{content}"
            if CLOSING in str(self.tokenizer.chat_template) and not prompt.rstrip().endswith(CLOSING):
                return f"{OPENING}\n{thought}\n{CLOSING}\n\n{content}"
            raise

    def _written(
        self, prompt: str, before: Sequence[Message], last: Message, thinking: bool | None
    ) -> tuple[str, bool]:
        """The text that the template writes after the prompt for an answer, without its end, and whether it had an end.

        ValueError if the template begins the answer differently or leaves out a part.
        """
        whole = self.text([*before, last], thinking, generate=False)
        if not whole.startswith(prompt):
            raise ValueError("the template begins this answer differently from an answer to be generated")
        end = self.tokenizer.decode(self.end) if self.end else ""
        written = whole[len(prompt) :]
        parts = [("thinking", last.get(THOUGHT, "")), ("text", last["content"])]
        parts += [("tool calls", call.get("function", call)["name"]) for call in last.get("tool_calls", ())]
        rest = written
        for kind, part in parts:
            if part.strip() not in rest:
                raise ValueError(f"the target's chat template does not write the {kind} of an answer")
            rest = rest.replace(part.strip(), "", 1)
        return (written.rpartition(end)[0], True) if end and end in written else (written.rstrip("\n"), False)


def reader_of(tokenizer: Any) -> Callable[[str], Messages | None]:
    """Return a function for `conversation_of`, which raises ValueError for a text that only looks rendered."""
    if not tokenizer.chat_template:
        return lambda text: None
    template = ChatTemplate(tokenizer, Chat())

    def read(text: str) -> Messages | None:
        conversation = template.conversation_of(text)
        if conversation is None and template.looks_rendered(text[:BEGINNING]):
            raise ValueError("texts that look rendered by the target's chat template, and are not")
        return conversation

    return read


class PlainTexts(ChatTemplate):
    """Stands in for the template of a model without one. A message is written unchanged.

    RecipeError for settings of section `chat`, because nothing would read them.
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
        """The beginning of a text. Its last token does not change the next word. ValueError if a text has none."""
        ids = self._begun(opening, opening)
        if not ids:
            raise ValueError("its texts begin with no fixed token")
        return UserHeader(decoded(self.tokenizer, ids), ids, None)


def _forms(content: str) -> list[str]:
    """The forms in which a template may write a text: unchanged, or as JSON."""
    return [content, json.dumps(content)[1:-1], json.dumps(content, ensure_ascii=False)[1:-1]]


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its tool calls as JSON text."""
    calls = []
    for call in message.get("tool_calls", ()):
        inner = call.get("function", call)
        inner = {**inner, "arguments": json.dumps(inner["arguments"], ensure_ascii=False)}
        calls.append({**call, "function": inner} if "function" in call else inner)
    return {**message, "tool_calls": calls} if calls else message


def messages_after(chat: Mapping[str, Any], answers: Sequence[str]) -> list[dict[str, Any]]:
    """The messages up to the question after these answers.

    `chat` is a Sample's: messages before the first answer, further `turns` (a user's text, or messages) and `thinking`.
    """
    messages = list(chat["messages"])
    for answer, turn in zip(answers, chat.get("turns") or [], strict=False):
        asked = turn if isinstance(turn, list) else [{"role": "user", "content": turn}]
        messages += [{"role": "assistant", "content": answer}, *asked]
    return messages


def next_prompt(template: ChatTemplate, chat: Mapping[str, Any], answers: Sequence[str]) -> list[int] | None:
    """The prompt of the next turn after these answers. None after the last turn. ValueError as `ChatTemplate.text`."""
    if len(answers) > len(chat["turns"]):
        return None
    template = template.with_arguments(chat.get("arguments") or {})
    return template.prompt(messages_after(chat, answers), chat.get("thinking"))

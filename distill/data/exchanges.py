"""From the bodies of a request and its reply to lines that `answers.traffic` reads: one line for each answer.

What a line could not hold without loss is left out, with the reason: a prompt that is more than text or messages
(images, token ids), a tool call that the request forced. Thinking that the server parsed out has one name in a line,
whatever the server calls it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from distill.data.messages import THINKING, normal
from distill.files import has_form, parse_object

CHAT, TEXT = "chat", "text"  # messages, as of /v1/chat/completions; a prompt, as of /v1/completions and /completion
MARK = "[redacted]"
OF_MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", *THINKING)  # what a template reads of a message
OF_LINE = ("prompt", "messages", "answer", "finish_reason", "model", "chat_template_kwargs", "tools")
OF_TOOLS = ("id", "type", "function", "arguments", "description", "parameters", "properties", "required")
# What holds no text of a person: the names of a line's own fields, and the values that some of them usually have.
NAMES = frozenset((*OF_LINE, *OF_MESSAGE, *OF_TOOLS))
USUAL = {
    "role": ("system", "developer", "user", "assistant", "tool"),
    "type": ("function", "object", "string", "number", "integer", "boolean", "array"),
    "finish_reason": ("stop", "length", "stop_string", "tool_calls"),
}
LLAMA_ENDS = {"eos": "stop", "limit": "length", "word": "stop_string", None: None, "none": None}


class LeftOut(Exception):
    """The reason why an exchange gives no line."""


def read_exchange(kind: str, request: bytes, reply: bytes) -> Iterator[dict[str, Any] | str]:
    """A line for each answer of a successful exchange, or the reason why it is left out.

    `reply` is a JSON object or a stream of server-sent events.
    """
    try:
        asked = _object(request, "a request that is not a JSON object")
        line = _messages(asked) if kind == CHAT else _prompt(asked)
        choices = _choices(kind, _events(reply))
    except LeftOut as reason:
        yield str(reason)
        return
    except (AttributeError, KeyError, TypeError, ValueError):  # a foreign body has any form
        yield "a request or reply of another form"
        return
    for choice in choices:
        try:
            yield _fault(choice) or _with_answer(line, asked, choice)
        except ValueError as reason:
            yield str(reason)


def redacted(value: Any, patterns: Sequence[re.Pattern[str]]) -> Any:
    """A line with every text that a pattern matches replaced by MARK, one pattern after the other; a number that one
    matches, too."""
    if isinstance(value, dict):
        return {
            name if name in NAMES else redacted(name, patterns): one
            if one in USUAL.get(name, ())
            else redacted(one, patterns)
            for name, one in value.items()
        }
    if isinstance(value, list):
        return [redacted(one, patterns) for one in value]
    if value is None or isinstance(value, bool):
        return value
    text = str(value)
    for pattern in patterns:
        text = pattern.sub(MARK, text)
    return value if text == str(value) else text


def _object(raw: bytes, fault: str) -> dict[str, Any]:
    found = parse_object(raw)
    if isinstance(found, str):
        raise LeftOut(fault)
    return found


def _prompt(asked: dict[str, Any]) -> dict[str, Any]:
    prompt = asked["prompt"]
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if asked.get("echo") or asked.get("suffix"):
        raise LeftOut("a prompt that is echoed or has a suffix")
    if not isinstance(prompt, str):
        raise LeftOut("several prompts, or one of token ids")
    if not prompt:
        raise LeftOut("an empty prompt")
    return {"prompt": prompt}


def _messages(asked: dict[str, Any]) -> dict[str, Any]:
    if asked.get("chat_template") or asked.get("documents"):
        raise LeftOut("a chat template or documents of the request")
    tools = asked.get("tools")
    if asked.get("functions") or (tools and asked.get("tool_choice") not in (None, "auto")):
        raise LeftOut("functions, or a tool call that is forced or forbidden")
    if tools and not has_form(tools, [{}]):
        raise LeftOut("tools that are not a list of objects")
    try:
        messages = [normal({name: one[name] for name in OF_MESSAGE if name in one}) for one in asked["messages"]]
    except ValueError as error:
        raise LeftOut(str(error)) from None
    if not messages or messages[-1]["role"] == "assistant":
        raise LeftOut("no question at the end of the messages")
    line: dict[str, Any] = {"messages": messages}
    if arguments := asked.get("chat_template_kwargs"):
        line["chat_template_kwargs"] = dict(arguments)
    return line | ({"tools": tools} if tools else {})


def _events(reply: bytes) -> Iterator[dict[str, Any]]:
    """The objects of a reply: one of a whole reply, that of each event of a streamed one."""
    if reply.lstrip()[:1] == b"{":
        yield _object(reply, "a reply that is not a JSON object")
        return
    for raw in reply.splitlines():
        name, _, value = raw.partition(b":")
        if name == b"error":
            raise LeftOut("an error within the reply")
        if name == b"data" and value.strip() != b"[DONE]":
            yield _object(value, "an event that is not a JSON object")


def _choices(kind: str, events: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a reply in their order, put together from their events."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        if event.get("error"):
            raise LeftOut("an error within the reply")
        end = LLAMA_ENDS.get(event.get("stop_type"), "unknown")
        own = {"text": event.get("content"), "finish_reason": end}  # llama-server's own API has no choices
        if end == "stop":
            own["stop_reason"] = None  # an end token: stop strings have a type of their own
        for piece in event.get("choices", [own]):
            new: dict[str, Any] = {"texts": [], "more": {}, "calls": {}, "end": None, "fault": "", "model": ""}
            one = found.setdefault(piece.get("index", 0), new)
            part = piece if kind != CHAT else piece.get("message") or piece.get("delta") or {}
            if part.get("function_call"):
                one["fault"] = "a function_call"
            for name in THINKING if kind == CHAT else ():
                if value := part.get(name):
                    one["more"][name] = one["more"][name] + value if name in one["more"] else value
            for place, call in enumerate(part.get("tool_calls") or () if kind == CHAT else ()):
                _add_call(one["calls"].setdefault(call.get("index", place), {}), call)
            one["texts"].append(part.get("text" if kind != CHAT else "content") or "")
            one["end"] = piece.get("finish_reason") or one["end"]
            one["ended_by"] = piece.get("stop_reason", "unknown")  # vLLM: the stop string, None for an end token
            one["model"] = event.get("model") or one["model"]
    if not found:
        raise LeftOut("an empty answer")
    for one in found.values():
        one["text"] = "".join(one["texts"])
    return [found[index] for index in sorted(found)]


def _add_call(whole: dict[str, Any], piece: dict[str, Any]) -> None:
    """Add a piece of a tool call: its arguments come as text in pieces, the rest once."""
    function = whole.setdefault("function", {})
    whole |= {name: value for name, value in piece.items() if name not in ("index", "function") and value is not None}
    for name, value in (piece.get("function") or {}).items():
        joined = name == "arguments" and isinstance(value, str)
        function[name] = (
            function.get(name, "") + value if joined else value if value is not None else function.get(name)
        )


def _fault(choice: dict[str, Any]) -> str:
    if choice["fault"]:
        return str(choice["fault"])
    if choice["end"] is None:
        return "broken off"
    if choice["end"] not in USUAL["finish_reason"]:
        return "another finish reason than stop, length and tool_calls"
    if choice["calls"]:
        return "a tool call that was cut short" if choice["end"] == "length" else ""
    if not choice["text"] and (choice["end"] != "length" or not choice["more"]):
        return "an empty answer"
    return ""


def _with_answer(line: dict[str, Any], asked: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    """The line of one answer. Behind a stop string the target wrote no end token, so that the reason is not `stop`."""
    end = choice["end"]
    if end == "stop" and asked.get("stop") and choice["ended_by"] is not None:
        end = "stop_string"
    last = {"finish_reason": end, **({"model": choice["model"]} if choice["model"] else {})}
    if "messages" in line:
        calls = {"tool_calls": [choice["calls"][place] for place in sorted(choice["calls"])]} if choice["calls"] else {}
        answer = normal({"role": "assistant", "content": choice["text"], **choice["more"], **calls})
        return line | {"messages": [*line["messages"], answer], **last}
    return line | {"answer": choice["text"], **last}

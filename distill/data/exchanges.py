"""From the bodies of a request and its reply to lines that `answers.traffic` reads: one line for each answer.

What a line could not hold without loss is left out, with the reason: an answer that is more than its text (tool calls,
reasoning that the server has parsed out), a prompt that is more than text or messages (tools, images, token ids).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from distill.files import parse_object

CHAT, TEXT = "chat", "text"  # messages, as of /v1/chat/completions; a prompt, as of /v1/completions and /completion
MARK = "[redacted]"
OF_MESSAGE = ("role", "content", "name", "reasoning_content")  # what a template reads of a message
# What holds no text of a person: the names of a line's own fields, and the values that two of them usually have.
NAMES = frozenset(("prompt", "messages", "answer", "finish_reason", "model", "chat_template_kwargs", *OF_MESSAGE))
USUAL = {
    "role": ("system", "developer", "user", "assistant", "tool"),
    "finish_reason": ("stop", "length", "stop_string"),
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
        yield _fault(choice) or _with_answer(line, asked, choice)


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
    if asked.get("tools") or asked.get("functions") or any(one.get("tool_calls") for one in asked["messages"]):
        raise LeftOut("tools")
    messages = [{name: one[name] for name in OF_MESSAGE if name in one} for one in asked["messages"]]
    if asked.get("chat_template") or asked.get("documents"):
        raise LeftOut("a chat template or documents of the request")
    if not messages or messages[-1]["role"] == "assistant":
        raise LeftOut("no question at the end of the messages")
    for message in messages:
        content = message["content"]
        if isinstance(content, list) and len(content) == 1 and content[0].get("type") == "text":
            content = content[0]["text"]
        if not isinstance(content, str) or not isinstance(message["role"], str):
            raise LeftOut("a message that is not text, or has several parts")
        message["content"] = content
    arguments = asked.get("chat_template_kwargs")
    return {"messages": messages, **({"chat_template_kwargs": dict(arguments)} if arguments else {})}


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
            one = found.setdefault(piece.get("index", 0), {"texts": [], "end": None, "fault": "", "model": ""})
            part = piece if kind != CHAT else piece.get("message") or piece.get("delta") or {}
            if part.get("tool_calls") or part.get("function_call"):
                one["fault"] = "tool calls"
            elif part.get("reasoning_content") or part.get("reasoning"):
                one["fault"] = one["fault"] or "reasoning that the server parsed"
            one["texts"].append(part.get("text" if kind != CHAT else "content") or "")
            one["end"] = piece.get("finish_reason") or one["end"]
            one["ended_by"] = piece.get("stop_reason", "unknown")  # vLLM: the stop string, None for an end token
            one["model"] = event.get("model") or one["model"]
    if not found:
        raise LeftOut("an empty answer")
    for one in found.values():
        one["text"] = "".join(one["texts"])
    return [found[index] for index in sorted(found)]


def _fault(choice: dict[str, Any]) -> str:
    if choice["fault"]:
        return str(choice["fault"])
    if choice["end"] is None:
        return "broken off"
    if choice["end"] not in ("stop", "length", "stop_string"):
        return "another finish reason than stop and length"
    return "" if choice["text"] else "an empty answer"


def _with_answer(line: dict[str, Any], asked: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    """The line of one answer. Behind a stop string the target wrote no end token, so that the reason is not `stop`."""
    end = choice["end"]
    if end == "stop" and asked.get("stop") and choice["ended_by"] is not None:
        end = "stop_string"
    last = {"finish_reason": end, **({"model": choice["model"]} if choice["model"] else {})}
    if "messages" in line:
        answer = {"role": "assistant", "content": choice["text"]}
        return line | {"messages": [*line["messages"], answer], **last}
    return line | {"answer": choice["text"], **last}

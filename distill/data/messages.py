"""A message of a conversation in the forms that data sets, clients and servers write, read as one form. No torch here.

Its thinking is text in `reasoning_content`, its content is text, and the arguments of its tool calls are objects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# One thing: as DeepSeek, Qwen and llama-server name it; vLLM and OpenRouter; gpt-oss and Ollama; OpenRouter's list.
THINKING = ("reasoning_content", "reasoning", "thinking", "reasoning_details")
THOUGHT = THINKING[0]
ARGUMENTS = ("arguments", "parameters", "input")  # of a tool call: OpenAI, Llama, Anthropic
OPENING, CLOSING = "<think>", "</think>"


def normal(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its thinking, content and tool calls in one form; other fields as they are.

    Raises ValueError, with the reason, for one that cannot be put so without loss.
    """
    texts, thoughts = _parts(message.get("content"))
    thoughts += [text for name in THINKING if (text := _thought(message.get(name)))]
    if len({text.strip() for text in thoughts}) > 1:
        raise ValueError("a message whose thinking stands in two fields and differs")
    if len(texts) > 1 or not isinstance(message.get("role"), str):
        raise ValueError("a message of several parts" if len(texts) > 1 else "a message without a role")
    content = texts[0] if texts else ""
    if thoughts and CLOSING in content:
        within, _, behind = content.partition(CLOSING)
        if within.strip().removeprefix(OPENING).strip() != thoughts[0].strip():
            raise ValueError("a message whose thinking stands in two fields and differs")
        content = behind.lstrip("\n")
    calls = message.get("tool_calls")
    calls = _parsed(calls, "tool calls that are not JSON") if isinstance(calls, str) else calls
    if calls and not isinstance(calls, list):
        raise ValueError("tool calls that are not a list")
    if not texts and not thoughts and not calls:
        raise ValueError("a message without content")
    found = {name: value for name, value in message.items() if name not in (*THINKING, "tool_calls")}
    found |= {"content": content} | ({THOUGHT: thoughts[0]} if thoughts else {})
    return found | ({"tool_calls": [_call(one) for one in calls]} if calls else {})


def _parts(content: Any) -> tuple[list[str], list[str]]:
    """The texts of a content and those of its thinking: of a text itself, of a list its parts (Anthropic, Mistral)."""
    if content is None:
        return [], []
    if isinstance(content, str):
        return [content], []
    texts, thoughts = [], []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type", "text") if isinstance(part, dict) else None
        text = part.get("text") if kind == "text" else None
        if kind in ("thinking", "reasoning"):
            thoughts.append(_thought(part.get(kind, part.get("text"))))
        elif isinstance(text, str):
            texts.append(text)
        else:
            raise ValueError("a message whose content is not text")
    return texts, list(filter(None, thoughts))


def _thought(value: Any) -> str:
    """The text of a thinking field: a text, or a list with parts of text; empty where there is none."""
    if not value or isinstance(value, str):
        return value or ""
    parts = value if isinstance(value, list) else [value]
    texts = [one.get("text") for one in parts if isinstance(one, dict)]
    found = "".join(text for text in texts if isinstance(text, str))
    if not found:
        raise ValueError("a message whose thinking is not text (encrypted, or a summary)")
    return found


def _call(call: Any) -> dict[str, Any]:
    """A tool call, whose arguments may be JSON text, as on the wire, with an object in their place."""
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise ValueError("a tool call without a name")
    given = next((name for name in ARGUMENTS if name in inner), "arguments")
    arguments = inner.get(given) or {}
    if isinstance(arguments, str):
        arguments = _parsed(arguments, "tool-call arguments that are not JSON") if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise ValueError("tool-call arguments that are not a JSON object")
    found = {"arguments" if name == given else name: value for name, value in inner.items()} | {"arguments": arguments}
    return {**call, "function": found} if "function" in call else found


def _parsed(text: str, fault: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(fault) from None

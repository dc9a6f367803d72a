"""Chat replies as the text that the target wrote: thinking, content and tool calls, which servers take apart.

Servers may change white space when they take a reply apart, so a text counts as the target's own only where it has as
many tokens as the server says that it generated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

THINK, THOUGHT = "<think>", "</think>"  # as in Qwen3 and DeepSeek-R1
CALL, CALLED = "<tool_call>", "</tool_call>"  # Hermes, Qwen


def texts_of(message: dict[str, Any], prompt: str) -> Iterator[str]:
    """The texts that a server may have made this message of, the likeliest first; none for a message without text.

    `prompt` is the rendered prompt: where it opens the thinking itself, the text does not.
    """
    content = message.get("content") or ""
    thinking = message.get("reasoning_content") or message.get("reasoning") or ""
    calls = [_call(call) for call in message.get("tool_calls") or []]
    if not all(isinstance(part, str) for part in (content, thinking, *calls)):
        return
    called = "\n".join(f"{CALL}\n{call}\n{CALLED}" for call in calls if call is not None)
    if called:
        content = f"{content.rstrip()}\n{called}" if content.strip() else called
    if not thinking:
        if content:
            yield content
        return
    opened = THINK in prompt and prompt.rstrip().endswith(THINK)
    # Servers keep the line breaks around thinking and content, or strip them.
    for begin, end, rest in (
        ("", "", ""),
        ("\n", "\n", "\n\n"),
        ("", "\n", "\n\n"),
        ("\n", "\n", "\n"),
        ("", "", "\n\n"),
    ):
        before = "" if opened else f"{THINK}{begin}"
        yield f"{before}{thinking}{end}{THOUGHT}{rest if content else ''}{content}"


def _call(call: Any) -> str | None:
    """The JSON of a tool call as Hermes-style templates write it; None for one of another form."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    return json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)

"""Records of data sets as conversations: chat messages, ShareGPT, lists of turns, prompt and answer, plain prompts."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from distill.files import has_form
from distill.recipe import Source

Messages = tuple[dict[str, Any], ...]  # role, content, and whatever else the template reads

# The names under which data sets keep a speaker.
SPEAKERS = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
LISTS = ("messages", "conversations", "turns")
PROMPTS = ("prompt", "instruction", "question", "query")
ANSWERS = ("answer", "completion", "response", "output")
EXTRA = ("reasoning_content", "tool_calls", "tool_call_id", "name")  # of a message, kept for the template


def form_of(record: Mapping[str, Any], source: Source) -> str | None:
    """How a record holds its text: the source's `form`, or what its fields say; None where no field is known."""
    if source.form != "auto":
        return source.form
    names: Mapping[Any, str] = source.fields
    for form in LISTS:
        if isinstance(record.get(names.get(form, form)), list):
            return form
    if isinstance(record.get(source.field), str) and "prompt" not in names:
        return "text"
    return "prompt" if _first(record, names, "prompt", PROMPTS) is not None else None


def read_conversation(record: Mapping[str, Any], form: str, source: Source) -> Messages:
    """The messages of a record, ending with an answer or with a question; ValueError, with the reason, where it has
    none."""
    names: Mapping[Any, str] = source.fields
    if form == "prompt":
        prompt, answer = _first(record, names, "prompt", PROMPTS), _first(record, names, "answer", ANSWERS)
        if isinstance(prompt, list):  # messages before the answer, as preference data sets have them
            messages = _messages(prompt)
        elif isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]
        else:
            raise ValueError("no prompt that is text")
        if isinstance(answer, list):
            messages += _messages(answer)
        elif isinstance(answer, str) and answer:
            messages.append({"role": "assistant", "content": answer})
    elif form == "turns":
        turns: Any = record.get(names.get("turns", "turns"))
        if not has_form(turns, [str]):
            raise ValueError("turns that are no text")
        messages = [{"role": "user", "content": turn} for turn in turns]
    else:
        messages = _messages(record.get(names.get(form, form)))
    system = record.get(names.get("system", "system"))
    if isinstance(system, str) and system.strip() and not any(one["role"] == "system" for one in messages):
        messages.insert(0, {"role": "system", "content": system})
    return _usable(tuple(messages))


def _first(record: Mapping[str, Any], names: Mapping[Any, str], kind: str, known: tuple[str, ...]) -> Any:
    if kind in names:
        return record.get(names[kind])
    return next((record[name] for name in known if record.get(name) is not None), None)


def _messages(value: Any) -> list[dict[str, Any]]:
    """Messages of role and content, or of ShareGPT's from and value."""
    if isinstance(value, str):  # some data sets keep the list as JSON text
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value, list):
        raise ValueError("messages that are no list")
    messages = []
    for one in value:
        if not isinstance(one, dict):
            raise ValueError("a message that is no mapping")
        role = str(one.get("role", one.get("from")))
        if role.lower() not in SPEAKERS:
            raise ValueError(f"a message of the unknown role {role[:20]!r}")
        content = _text(one["content"] if "content" in one else one.get("value"))
        if content is None and not one.get("tool_calls"):
            raise ValueError("a message whose content is no text")
        extra = {name: one[name] for name in EXTRA if one.get(name)}
        messages.append({"role": SPEAKERS[role.lower()], "content": content or "", **extra})
    return messages


def _text(content: Any) -> str | None:
    """The text of a message: itself, or its parts of type text; None for anything else, such as images."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    return "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None


def _usable(messages: Messages) -> Messages:
    """The messages up to the last question or answer; ValueError where a model cannot be asked them."""
    roles = [one["role"] for one in messages]
    while roles and roles[-1] in ("system", "tool"):
        roles.pop()
    if "user" not in roles:
        raise ValueError("no user's turn")
    if "assistant" in roles and roles.index("assistant") < roles.index("user"):
        raise ValueError("an answer before the first question")
    if not all(one["content"].strip() for one in messages[: len(roles)] if one["role"] == "user"):
        raise ValueError("an empty question")
    return messages[: len(roles)]


def questions(messages: Messages) -> str:
    """The text that names a conversation and gives its split: all but answers, so that no question is in two splits."""
    return json.dumps([[one["role"], one["content"]] for one in messages if one["role"] != "assistant"])


def fingerprint(text: str) -> str:
    """A name for a text by its content."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]

"""From bodies to lines: what is put together, what is left out and why, and what is redacted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from distill.data.exchanges import CHAT, TEXT, read_exchange, redacted
from distill.data.traffic import Line, parse_line

USER = {"role": "user", "content": "2 + 2?"}
ASKED = {"model": "m", "messages": [USER]}


def chat(content: Any = "4", finish: str | None = "stop", **more: Any) -> dict[str, Any]:
    return {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": content} | more, "finish_reason": finish}]
    }


def text(content: str = "4", finish: str | None = "stop", **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": content, "finish_reason": finish} | more]}


def stream(*events: Any, done: bool = True) -> bytes:
    raw = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    return (": ping\r\n\r\n" + raw + ("data: [DONE]\n\n" if done else "")).encode()


def delta(content: str | None, finish: str | None = None, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"model": "m", "choices": [{"index": index, "delta": {"content": content} | more, "finish_reason": finish}]}


def found(kind: str, asked: Any, reply: Any) -> list[dict[str, Any] | str]:
    raw = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
    return list(read_exchange(kind, json.dumps(asked).encode(), raw))


def answer(content: str, finish: str = "stop", **more: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": content}], "finish_reason": finish} | more


def test_whole_and_streamed_replies_give_the_same_line() -> None:
    whole = found(CHAT, ASKED, chat("grün 👍") | {"model": "m"})
    usage = {"choices": [], "usage": {"completion_tokens": 3}}
    pieces = [delta("", role="assistant"), delta("grün"), delta(" 👍"), delta(None, "stop"), usage]
    assert whole == [answer("grün 👍", model="m")] == found(CHAT, ASKED | {"stream": True}, stream(*pieces))
    asked = {"prompt": "2 + 2 = "}
    expected = [{"prompt": "2 + 2 = ", "answer": "4.", "finish_reason": "length"}]
    assert found(TEXT, asked, text("4.", "length")) == expected
    assert found(TEXT, {"prompt": ["2 + 2 = "]}, stream(text("4", None), text(".", "length"))) == expected
    # llama-server's own API
    assert found(TEXT, asked, {"content": "4.", "stop": True, "stop_type": "limit"}) == expected
    own = [{"content": "4", "stop": False}, {"content": ".", "stop": False}]
    end = {"content": "", "stop": True, "stop_type": "eos"}
    assert found(TEXT, asked, stream(*own, end, done=False)) == [expected[0] | {"finish_reason": "stop"}]


def test_several_choices_are_lines_of_their_own() -> None:
    pieces = [delta("a"), delta("b", index=1), delta("a", "stop"), delta("b", "length", index=1)]
    expected = [answer("aa", model="m"), answer("bb", "length", model="m")]
    assert found(CHAT, ASKED | {"n": 2}, stream(*pieces)) == expected
    tool = [delta("a", "stop"), delta(None, "tool_calls", index=1, tool_calls=[{"index": 0}])]
    assert found(CHAT, ASKED | {"n": 2}, stream(*tool)) == [answer("a", model="m"), "tool calls"]


def test_messages_are_kept_as_the_template_reads_them() -> None:
    asked = {"messages": [{"role": "system", "content": "Be brief.", "name": "x"}, USER], "temperature": 0}
    asked["messages"][1] = {"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}
    asked["chat_template_kwargs"] = {"enable_thinking": False}
    (line,) = found(CHAT, asked, chat())
    assert isinstance(line, dict) and line["chat_template_kwargs"] == {"enable_thinking": False}
    assert line["messages"][:2] == [{"role": "system", "content": "Be brief.", "name": "x"}, USER]
    read = parse_line(json.dumps(line).encode(), 1)
    assert isinstance(read, Line) and read.prompt == line["messages"][:2]
    assert (read.answer, read.ended, read.arguments) == ("4", True, {"enable_thinking": False})


@pytest.mark.parametrize(
    ("more", "reply", "expected"),
    [
        ({}, text(), "stop"),
        ({"stop": ["\n"]}, text(), "stop_string"),  # llama-server does not say which it was here
        ({"stop": ["\n"]}, text(stop_reason=None), "stop"),  # vLLM: an end token
        ({"stop": ["\n"]}, text(stop_reason="\n"), "stop_string"),
        ({"stop": ["\n"]}, text(finish="length"), "length"),
        ({}, {"content": "4", "stop_type": "word"}, "stop_string"),
        ({"stop": ["\n"]}, {"content": "4", "stop_type": "word"}, "stop_string"),
        ({"stop": ["\n"]}, {"content": "4", "stop_type": "eos"}, "stop"),  # its own API does
    ],
)
def test_an_answer_ends_with_an_end_token_only_where_the_target_wrote_one(
    more: dict[str, Any], reply: dict[str, Any], expected: str
) -> None:
    (line,) = found(TEXT, {"prompt": "a", **more}, reply)
    assert isinstance(line, dict) and line["finish_reason"] == expected
    read = parse_line(json.dumps(line).encode(), 1)
    assert isinstance(read, Line) and (read.prompt, read.answer, read.ended) == ("a", "4", expected == "stop")


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}


@pytest.mark.parametrize(
    ("kind", "asked", "reply", "reason"),
    [
        (CHAT, ASKED | {"tools": [{}]}, chat(), "tools"),
        (CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": [{}]}, USER]}, chat(), "tools"),
        (CHAT, {"messages": [USER, {"role": "assistant", "content": "It"}]}, chat(), "no question at the end"),
        (CHAT, {"messages": [IMAGE]}, chat(), "a message that is not text"),
        (CHAT, ASKED | {"chat_template": "x"}, chat(), "a chat template or documents"),
        (CHAT, ASKED, chat(None, "tool_calls", tool_calls=[{}]), "tool calls"),
        (CHAT, ASKED, chat(reasoning_content="so"), "reasoning that the server parsed"),
        (CHAT, ASKED, stream(delta(None, reasoning="so"), delta("4", "stop")), "reasoning that the server parsed"),
        (CHAT, ASKED, chat(""), "an empty answer"),
        (CHAT, ASKED, chat(None), "an empty answer"),
        (CHAT, ASKED, chat(finish="content_filter"), "another finish reason"),
        (CHAT, ASKED, stream(delta("4")), "broken off"),
        (CHAT, ASKED, stream(delta("4"), {"error": {"message": "x"}}), "an error within the reply"),
        (CHAT, ASKED, b"data: {}\n\nerror: {}\n\n", "an error within the reply"),
        (CHAT, ASKED, b"data: {\n\n", "an event that is not a JSON object"),
        (CHAT, ASKED, b"", "an empty answer"),
        (CHAT, ASKED, b"{", "a reply that is not a JSON object"),
        (CHAT, ASKED, b'{"choices": 3}', "a request or reply of another form"),
        (CHAT, ASKED, b'{"choices": [{"message": {"content": 3}, "finish_reason": "stop"}]}', "of another form"),
        (CHAT, {"messages": 3}, chat(), "of another form"),
        (CHAT, [1], chat(), "a request that is not a JSON object"),
        (TEXT, {"prompt": [1, 2]}, text(), "token ids"),
        (TEXT, {"prompt": ["a", "b"]}, text(), "several prompts"),
        (TEXT, {"prompt": "a", "echo": True}, text("a4"), "echoed"),
        (TEXT, {"prompt": "a", "suffix": "b"}, text(), "suffix"),
        (TEXT, {"prompt": ""}, text(), "an empty prompt"),
        (TEXT, {}, text(), "of another form"),
        (TEXT, {"prompt": "a"}, {"content": "4", "stop_type": "none"}, "broken off"),
    ],
)
def test_what_is_left_out(kind: str, asked: Any, reply: Any, reason: str) -> None:
    (one,) = found(kind, asked, reply)
    assert isinstance(one, str) and reason in one


def variants(value: Any) -> Iterator[Any]:
    """The value with each of its parts replaced by values of other kinds, or missing."""
    yield from (None, 3, "x", [], {}, True, [None], {"a": 1})
    for name in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        rest = dict(value) if isinstance(value, dict) else list(value)
        del rest[name]
        yield rest
        for inner in variants(value[name]):
            other = dict(value) if isinstance(value, dict) else list(value)
            other[name] = inner
            yield other


def test_no_body_ends_the_recording() -> None:
    """Every line that comes of a damaged exchange is one that is read, or names what is wrong."""
    asked = ASKED | {"messages": [{"role": "system", "content": [{"type": "text", "text": "a"}]}, USER], "stop": ["a"]}
    asked |= {"chat_template_kwargs": {"a": 1}, "prompt": ["a"]}
    own = {"content": "4", "stop_type": "eos", "index": 0}
    kept = 0
    for kind, reply in ((CHAT, chat() | {"model": "m"}), (CHAT, delta("4", "stop")), (TEXT, text()), (TEXT, own)):
        pairs = [(one, reply) for one in variants(asked)] + [(asked, one) for one in variants(reply)]
        for request, answered in pairs:
            for raw in (json.dumps(answered).encode(), stream(answered)):
                for line in found(kind, request, raw):
                    if isinstance(line, dict):
                        read = parse_line(json.dumps(redacted(line, [re.compile("q")])).encode(), 1)
                        assert isinstance(read, Line), (line, read)
                        kept += 1
    assert kept > 500


def test_redaction_reaches_every_text() -> None:
    """Also one that came in two pieces, and one that JSON had escaped."""
    patterns = [re.compile(r"\S+@\S+"), re.compile("user|Jörg"), re.compile(r"\d{4}"), re.compile("messages|stop|None")]
    asked = {"messages": [{"role": "user", "content": "I am Jörg, j@x.de", "name": "Jörg"}]}
    asked["chat_template_kwargs"] = {"greet": ["user"], "role": "clerk j@x.de", "a@x.de": 1, "card": 4111, "none": None}
    (line,) = found(CHAT, asked, stream(delta("Write to j@"), delta("x.de, J"), delta("örg", "stop")))
    assert redacted(line, patterns) == {
        "messages": [
            {"role": "user", "content": "I am [redacted], [redacted]", "name": "[redacted]"},
            {"role": "assistant", "content": "Write to [redacted] [redacted]"},
        ],
        "chat_template_kwargs": {
            "greet": ["[redacted]"],
            "role": "clerk [redacted]",
            "[redacted]": 1,
            "card": "[redacted]",
            "none": None,
        },
        "finish_reason": "stop",
        "model": "m",
    }

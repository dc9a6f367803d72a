"""From bodies to lines: what is put together, what is left out and why, and what is redacted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from distill.data.recorder import CHAT, TEXT, read_exchange, redacted
from distill.data.records import THINKING
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
    assert whole == [answer("grün 👍", model="m")]
    streamed = answer("grün 👍", model="m", completion_tokens=3)
    assert found(CHAT, ASKED | {"stream": True}, stream(*pieces)) == [streamed]
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
    bad = [delta("a", "stop"), delta("b", "content_filter", index=1)]
    reason = "another finish reason than stop, length and tool_calls"
    assert found(CHAT, ASKED | {"n": 2}, stream(*bad)) == [answer("a", model="m"), reason]


@pytest.mark.parametrize(
    ("pieces", "whole"),
    [
        (["One", "One two", "One two three"], "One two three"),
        (["", "One", "One two", "One two three", "One two three"], "One two three"),
        (["One", " two", " three", "One two three"], "One two three"),
        (["ha", "ha", "!"], "haha!"),
        (["!", "!", "!"], "!!!"),
        (["I", " am", " I"], "I am I"),
        (["a ", "\ud83d", "\ude80", " b"], "a 🚀 b"),
        (["One", "One two"], "a stream of two pieces, of which the second may repeat the first"),
        (["a", "\ud83d", " b"], "half of a character"),
    ],
)
def test_pieces_of_a_stream(pieces: list[str], whole: str) -> None:
    (line,) = found(CHAT, ASKED, stream(*map(delta, pieces), delta(None, "stop")))
    (thought,) = found(CHAT, ASKED, stream(*(delta(None, reasoning=one) for one in pieces), delta("4", "stop")))
    if isinstance(line, str) or isinstance(thought, str):
        assert isinstance(line, str) and whole in line and line == thought
        return
    assert line == answer(whole, model="m") and thought["messages"][1]["reasoning_content"] == whole


def test_choices_without_an_index() -> None:
    choices = [{"message": {"content": text}, "finish_reason": "stop"} for text in ("a", "b")]
    assert found(CHAT, ASKED | {"n": 2}, {"choices": choices}) == [answer("a"), answer("b")]
    alone = [{"choices": [{"delta": {"content": text}, "finish_reason": "stop"}]} for text in ("a", "b")]
    assert found(CHAT, ASKED | {"n": 2}, stream(*alone)) == ["pieces of several choices without an index"]
    pieces = [{"delta": {"content": text}, "finish_reason": "stop"} for text in ("a", "b")]
    assert found(CHAT, ASKED | {"n": 2}, stream({"choices": pieces})) == [answer("a"), answer("b")]


@pytest.mark.parametrize(
    ("more", "arguments"),
    [
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"reasoning": {"effort": "none"}}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "low", "enable_thinking": False},
        ),
        ({"response_format": {"type": "text"}, "logit_bias": {}, "min_tokens": 0, "temperature": 0.3}, {}),
    ],
)
def test_how_much_a_request_wants_the_target_to_think(more: dict[str, Any], arguments: dict[str, Any]) -> None:
    """As vLLM and llama-server hand it to the template; what a request gives the template itself stands."""
    (line,) = found(CHAT, ASKED | more, chat())
    assert isinstance(line, dict) and line.get("chat_template_kwargs", {}) == arguments
    for raw in (line, {"messages": line["messages"], "finish_reason": "stop", **more}):
        read = parse_line(json.dumps(raw).encode(), 1)
        assert isinstance(read, Line) and read.arguments == arguments and not read.unread


SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}


@pytest.mark.parametrize(
    "more",
    [
        *({"response_format": one} for one in (SCHEMA, {"type": "json_object"})),
        *({name: {"regex": "The.*"}} for name in ("structured_outputs", "guided_json", "guided_decoding")),
        *({name: "root ::= x"} for name in ("grammar", "guided_grammar", "ebnf", "regex", "guided_regex", "prefill")),
        *({"logit_bias": {"12": 100}}, {"bad_words": ["x"]}, {"allowed_token_ids": [0]}, {"ignore_eos": True}),
        *({"min_tokens": 8}, {"continue_final_message": True}, {"add_generation_prompt": False}, {"echo": True}),
    ],
)
def test_requests_that_steer_an_answer(more: dict[str, Any]) -> None:
    (reason,) = found(CHAT, ASKED | more, chat())
    (name,) = more
    assert isinstance(reason, str) and f"`{name}`" in reason
    assert f"`{name}`" in str(parse_line(json.dumps(answer("4") | more).encode(), 1))
    assert found(TEXT, {"prompt": "a", **more}, text()) == [reason]


def test_unknown_fields_are_named() -> None:
    assert found(CHAT, ASKED | {"top_k": 3, "none": None, "trace_id": "x"}, chat()) == [answer("4")]
    for more, reason in (
        ({"mood": "sad"}, "a request with `mood`, a field that is not known"),
        ({"seed": True}, "a request with `seed` of another form"),
        ({"thinking": {"type": "adaptive"}}, "a request with `thinking` of another form"),
        ({"add_generation_prompt": 1}, "a request with `add_generation_prompt`, which steers its answer"),
    ):
        assert found(CHAT, ASKED | more, chat()) == [reason]
    read = parse_line(json.dumps(answer("4") | {"mood": "sad"}).encode(), 1)
    assert isinstance(read, Line) and read.unread == ("mood",)


DETAILS = [{"type": "reasoning.text", "text": "Two and "}, {"type": "reasoning.text", "text": "two."}]


@pytest.mark.parametrize(
    ("whole", "pieces"),
    [
        *(({name: "Two and two."}, [{name: "Two and "}, {name: "two."}]) for name in THINKING[:3]),
        ({"reasoning_details": DETAILS}, [{"reasoning_details": [one]} for one in DETAILS]),
        (  # vLLM and OpenRouter give one text under two names
            {"reasoning": "Two and two.", "reasoning_details": DETAILS},
            [{"reasoning": one["text"], "reasoning_content": one["text"]} for one in DETAILS],
        ),
    ],
)
def test_thinking_has_one_name(whole: dict[str, Any], pieces: list[dict[str, Any]]) -> None:
    thought = [USER, {"role": "assistant", "content": "4", "reasoning_content": "Two and two."}]
    expected = [{"messages": thought, "finish_reason": "stop"}]
    assert found(CHAT, ASKED, chat(**whole)) == expected
    streamed = stream(*(delta(None, **piece) for piece in pieces), delta("4", "stop"))
    assert found(CHAT, ASKED, streamed) == [expected[0] | {"model": "m"}]
    (short,) = found(CHAT, ASKED, chat("", "length", **whole))  # cut short while it was thinking
    read = parse_line(json.dumps(short).encode(), 1)
    assert isinstance(read, Line) and not read.ended and isinstance(read.answer, dict)
    assert (read.answer["content"], read.answer["reasoning_content"]) == ("", "Two and two.")


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}]


def test_tool_calls_are_kept_with_their_tools() -> None:
    """The arguments are an object in a line, whether they came whole, in pieces or as one: redaction leaves JSON."""
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "add", "arguments": {"a": n, "b": "2345"}}}
        for n in (0, 1)
    ]
    texts = [
        call | {"function": {"name": "add", "arguments": json.dumps(call["function"]["arguments"])}} for call in calls
    ]
    last = {"role": "assistant", "content": "I add.", "tool_calls": calls}
    expected = [{"messages": [USER, last], "tools": TOOLS, "finish_reason": "tool_calls"}]
    asked = ASKED | {"tools": TOOLS, "tool_choice": "auto"}
    assert found(CHAT, asked, chat("I add.", "tool_calls", tool_calls=texts)) == expected
    pieces = [delta("I add.")]
    for index, call in enumerate(texts):
        text = call["function"]["arguments"]
        pieces.append(delta(None, tool_calls=[call | {"index": index, "function": {"name": "add", "arguments": ""}}]))
        for part in (text[:5], text[5:]):
            pieces.append(delta(None, tool_calls=[{"index": index, "function": {"arguments": part}}]))
    assert found(CHAT, asked, stream(*pieces, delta(None, "tool_calls"))) == [expected[0] | {"model": "m"}]
    hidden = redacted(expected[0], [re.compile(r"\d{4}|function|object")])
    assert hidden["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"a": 0, "b": "[redacted]"}
    assert hidden["tools"] == TOOLS and isinstance(parse_line(json.dumps(hidden).encode(), 1), Line)
    # A call and its result in the question.
    more = [USER, last | {"content": None, "tool_calls": texts}, {"role": "tool", "tool_call_id": "c0", "content": "4"}]
    (line,) = found(CHAT, {"messages": more, "tools": TOOLS}, chat())
    assert isinstance(line, dict)
    assert line["messages"][:-1] == [USER, last | {"content": ""}, more[2]]


ROME, OSLO = '{"city": "Rome"}', '{"city": "Oslo"}'


def piece(arguments: Any, index: int | None = 0, name: str | None = "weather", **more: Any) -> dict[str, Any]:
    function = {key: value for key, value in {"name": name, "arguments": arguments}.items() if value is not None}
    return {"function": function, **({} if index is None else {"index": index}), **more}


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([[piece(ROME, id="a")], [piece(OSLO, 1, id="b")]], [ROME, OSLO]),
        ([[piece(ROME, id="a")], [piece(OSLO, id="b")]], [ROME, OSLO]),
        ([[piece(ROME, None, id="a")], [piece(OSLO, None, id="b")]], [ROME, OSLO]),
        ([[piece(json.loads(ROME), id="a")], [piece(json.loads(OSLO), id="b")]], [ROME, OSLO]),
        ([[piece("", id="a"), piece(OSLO, id="b")]], ["{}", OSLO]),
        ([[piece("", id="a")], [piece(ROME, name=None)], [piece(OSLO, id="b")]], [ROME, OSLO]),
        ([[piece(ROME[:5], id="a")], [piece(ROME[5:], id="a")]], [ROME]),  # id and name in each piece
        ([[piece(ROME[:5], id="a")], [piece(ROME[5:], name=None, id="")], [piece(OSLO, id="b")]], [ROME, OSLO]),
        ([[piece(ROME)], [piece(OSLO)]], None),  # one call or two
        ([[piece(ROME, id="a")], [piece(OSLO)]], None),
        ([[piece(ROME, id="a")], [piece(OSLO, name="other", id="a")]], None),
        ([[piece(ROME, id="a")], [piece("", name=None, id="b")]], None),
        ([[piece(json.loads(ROME), id="a")], [piece(json.loads(OSLO), name=None)]], None),
    ],
)
def test_ids_tell_tool_calls_of_one_index_apart(pieces: list[Any], expected: list[str] | None) -> None:
    events = [delta(None, tool_calls=calls) for calls in pieces]
    (line,) = found(CHAT, ASKED | {"tools": TOOLS}, stream(*events, delta(None, "tool_calls")))
    if expected is None:
        assert line == "pieces of tool calls that cannot be told apart"
        return
    assert isinstance(line, dict)
    calls = [one["function"] for one in line["messages"][-1]["tool_calls"]]
    assert [(one["name"], one["arguments"]) for one in calls] == [("weather", json.loads(one)) for one in expected]


def test_two_choices_with_one_index_are_not_mixed() -> None:
    two = [{"index": 0, "message": {"content": text}, "finish_reason": "stop"} for text in ("Yes", "No")]
    assert found(CHAT, ASKED | {"n": 2}, {"choices": two}) == [answer("Yes"), answer("No")]
    streams = [
        [delta("Y"), delta("N"), delta("es"), delta("o"), delta(None, "stop"), delta(None, "stop")],
        [{"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None} for text in ("Yes", "No")]}] * 2,
    ]
    for events in streams:
        assert found(CHAT, ASKED | {"n": 2}, stream(*events)) == ["several choices under one index"]


def test_messages_are_kept_as_the_template_reads_them() -> None:
    asked = {"messages": [{"role": "system", "content": "Be brief.", "name": "x"}, USER], "temperature": 0}
    asked["messages"][1] = {"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}
    asked["chat_template_kwargs"] = {"enable_thinking": False}
    (line,) = found(CHAT, asked, chat())
    assert isinstance(line, dict) and line["chat_template_kwargs"] == {"enable_thinking": False}
    assert line["messages"][:2] == [{"role": "system", "content": "Be brief.", "name": "x"}, USER]
    read = parse_line(json.dumps(line).encode(), 1)
    assert isinstance(read, Line) and read.prompt == line["messages"][:2]
    assert (read.answer, read.ended, read.arguments) == (line["messages"][2], True, {"enable_thinking": False})


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


CUT_CALL = {"function": {"name": "f", "arguments": '{"a": '}}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}


@pytest.mark.parametrize(
    ("kind", "asked", "reply", "reason"),
    [
        (CHAT, ASKED | {"tools": TOOLS, "tool_choice": "required"}, chat(), "a tool call that is forced"),
        (CHAT, ASKED | {"tools": TOOLS, "tool_choice": "none"}, chat(), "or forbidden"),
        (CHAT, ASKED | {"functions": [{}]}, chat(), "a request with `functions`"),
        (CHAT, ASKED | {"tools": [3]}, chat(), "tools that are not a list of objects"),
        (CHAT, {"messages": [USER, {"role": "assistant", "content": "It"}]}, chat(), "no question at the end"),
        (CHAT, {"messages": [IMAGE]}, chat(), "a message whose content is not text"),
        (CHAT, ASKED | {"chat_template": "x"}, chat(), "a request with `chat_template`, which steers"),
        (CHAT, {"messages": [USER | {"mood": "sad"}]}, chat(), "a message with `mood`, a field that is not known"),
        (CHAT, {"messages": [USER | {"role": "narrator"}]}, chat(), "unknown role 'narrator'"),
        (CHAT, ASKED, chat(None, "tool_calls", tool_calls=[{}]), "a tool call without a name"),
        (CHAT, ASKED, chat(None, "length", tool_calls=[CUT_CALL]), "a tool call that was cut short"),
        (CHAT, ASKED, chat(None, "stop", function_call={"name": "f"}), "an answer with `function_call`"),
        (CHAT, ASKED, chat(thinking_blocks=[{"text": "so"}]), "an answer with `thinking_blocks`, a field that is not"),
        (CHAT, ASKED, stream(delta("4", reasoning_text="so"), delta(None, "stop")), "an answer with `reasoning_text`"),
        (CHAT, ASKED, chat(reasoning="so", thinking="no"), "in two fields and differs"),
        (CHAT, ASKED, chat("", reasoning="so"), "an empty answer"),
        (CHAT, ASKED, chat("a\ufffdb"), "bytes that are no UTF-8"),
        (CHAT, ASKED, chat() | {"usage": {"completion_tokens_details": {"reasoning_tokens": 9}}}, "hides"),
        (CHAT, {"messages": [USER, {"role": "assistant", "content": "I", "prefix": True}]}, chat(), "only begins an"),
        (TEXT, {"prompt": "The keeper of the light"}, text("The keeper of the light is"), "with its whole prompt"),
        (TEXT, {"prompt": "a"}, text("b\ufffd"), "bytes that are no UTF-8"),
        (CHAT, ASKED, chat(None), "an empty answer"),
        (CHAT, ASKED, chat(finish="content_filter"), "another finish reason"),
        (CHAT, ASKED, stream(delta("4")), "broken off"),
        (CHAT, ASKED, stream(delta("4"), {"error": {"message": "x"}}), "an error within the reply"),
        (CHAT, ASKED, b"data: {}\n\nerror: {}\n\n", "an error within the reply"),
        (CHAT, ASKED, b'event: error\ndata: {"message": "x"}\n\n' + stream(delta("4", "stop")), "an error within"),
        (CHAT, ASKED, b"data: {\n\n", "an event that is not a JSON object"),
        (CHAT, ASKED, b"", "an empty answer"),
        (CHAT, ASKED, b"{", "a reply that is not a JSON object"),
        (CHAT, ASKED, b'{"choices": 3}', "a request or reply of another form"),
        (CHAT, {"messages": 3}, chat(), "of another form"),
        (CHAT, [1], chat(), "a request that is not a JSON object"),
        (TEXT, {"prompt": [1, 2]}, text(), "token ids"),
        (TEXT, {"prompt": ["a", "b"]}, text(), "several prompts"),
        (TEXT, {"prompt": "a", "echo": True}, text("a4"), "a request with `echo`"),
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
    asked |= {"chat_template_kwargs": {"a": 1}, "prompt": ["a"], "tools": [{"type": "function"}]}
    called = chat(None, "tool_calls", reasoning="so", tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])
    own = {"content": "4", "stop_type": "eos", "index": 0}
    kept = 0
    chats = [chat() | {"model": "m"}, called, delta("4", "stop")]
    for kind, reply in [*((CHAT, one) for one in chats), (TEXT, text()), (TEXT, own)]:
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
    question = {"role": "user", "content": "I am [redacted], [redacted]", "name": "[redacted]"}
    answered = {"role": "assistant", "content": "Write to [redacted] [redacted]"}
    arguments = {"greet": ["[redacted]"], "role": "clerk [redacted]", "[redacted]": 1, "card": "[redacted]"}
    hidden = redacted(line, patterns)
    assert hidden.pop("chat_template_kwargs") == arguments | {"none": None}
    assert hidden == {"messages": [question, answered], "finish_reason": "stop", "model": "m"}

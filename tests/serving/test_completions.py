"""`distill serve`: replies, refusals, grammars, limits and foreign pages, on a toy pair with a chat template."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tiny import Capture, Patch
from toys import blurred, save_toy, toy, toy_tokenizer

from distill.data.requests import CHAT, FIELDS, TEXT
from distill.decoding.decode import Decoded
from distill.decoding.ngrams import NGramTable, count_ngrams, open_table, tokenizer_digest, write_table
from distill.engines.loaded import Opening
from distill.errors import DataError, RecipeError
from distill.recipe import Chat, Configuration, Sampler, Target
from distill.serving.answering import Answerer, Continuation, answering

pytest.importorskip("starlette", reason="needs the extra serve")
from distill.serving import completions
from distill.serving.completions import Completions, Job

pytestmark = pytest.mark.usefixtures("one_thread")
# It drops system messages between turns, and reads whether to think.
TEMPLATE = (
    "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
    "{% for m in messages %}{% if m['role'] != 'system' or loop.first %}# {{ m['role'] }}: {{ m['content'] }}\n"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}# def{{ '' if enable_thinking else '!' }}: {% endif %}"
)
DRAFTING = Continuation(Configuration(length=3), Sampler(temperature=0))


@pytest.fixture(scope="module")
def answerer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answerer]:
    folder, tokenizer = tmp_path_factory.mktemp("served"), toy_tokenizer()
    model = toy(vocabulary=len(tokenizer), seed=3)
    model.config.max_position_embeddings = 256
    tokenizer.chat_template = TEMPLATE
    save_toy(model, tokenizer, folder / "target")
    save_toy(blurred(model, 4, 0.02), tokenizer, folder / "draft")
    opening = Opening(Target(model=str(folder / "target")), str(folder / "draft"), "cpu", 1)
    with answering(opening, Chat(), DRAFTING, 8192) as found:
        yield found


ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "a = b"}]}],
    "max_tokens": 9,
}


JSON = {"Content-Type": "application/json"}


def sent(server: Completions, path: str, body: Any, headers: dict[str, str] = JSON) -> httpx2.Response:
    async def send() -> httpx2.Response:
        transport = httpx2.ASGITransport(app=server.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://here") as client:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await client.post(path, content=content, headers=headers)

    return asyncio.run(send())


def test_a_table_is_opened_once(answerer: Answerer, tmp_path: Path, monkeypatch: Patch) -> None:
    """Drawn answers have sessions of their own, and all draft from the same table."""
    digest = tokenizer_digest(answerer.pair.reference)
    ids = answerer.prompt([{"role": "user", "content": "a = b"}])
    write_table(tmp_path / "table.safetensors", count_ngrams([ids] * 9), {"tokenizer": digest})
    opened: list[Path] = []

    def watched(path: Path, target: str) -> NGramTable:
        opened.append(path)
        return open_table(path, target)

    monkeypatch.setattr("distill.serving.answering.open_table", watched)
    request = Continuation(Configuration(drafter="table", length=3, sampler="recipe"), Sampler(temperature=0.7))
    request = replace(request, table=tmp_path / "table.safetensors")
    for _ in range(3):
        result = Decoded()
        assert list(answerer.answer(request, ids, 9, result)) and result.tokens
    assert opened == [tmp_path / "table.safetensors"]


def test_replies(answerer: Answerer) -> None:
    """Whole and streamed, of messages and of a prompt: the same text, which is the pair's own, with its counts."""
    server = Completions(answerer, DRAFTING, "toy", 4)
    ids, result = answerer.prompt([{"role": "user", "content": "a = b"}]), Decoded()
    text = "".join(piece for piece, _ in answerer.answer(DRAFTING, ids, 9, result))
    whole = sent(server, "/v1/chat/completions", ASKED).json()
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": text}
    assert whole["choices"][0]["finish_reason"] == ("length" if len(result.tokens) == 9 else "stop")
    assert whole["usage"] == {"prompt_tokens": len(ids), "completion_tokens": len(result.tokens)} | {
        "total_tokens": len(ids) + len(result.tokens)
    }
    drafted = sum(one.drafted for one in result.rounds), sum(result.from_draft)
    assert (whole["timings"]["draft_n"], whole["timings"]["draft_n_accepted"]) == drafted and drafted[1]
    streamed = sent(server, "/v1/chat/completions", ASKED | {"stream": True})
    *events, done = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
    found = [json.loads(event) for event in events]
    assert done == "[DONE]" and found[-1]["usage"] == whole["usage"]
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in found) == text
    assert found[-1]["timings"]["draft_n"] == drafted[0]
    plainly = {"prompt": ids, "max_tokens": 9}
    assert sent(server, "/v1/completions", plainly).json()["choices"][0]["text"] == text
    sign = next(sign for sign in text[1:] if sign.isascii())
    ended = sent(server, "/v1/completions", plainly | {"stop": [sign]}).json()["choices"][0]
    assert (ended["text"], ended["finish_reason"]) == (text[: text.index(sign)], "stop")
    drawn = [sent(server, "/v1/completions", plainly | {"temperature": 2, "seed": 5}).json() for _ in range(2)]
    assert drawn[0]["choices"] == drawn[1]["choices"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not a JSON object"),
        (ASKED | {"n": 2, "tools": [{}]}, "`n` is not supported with 2: leave it out, or give 1"),
        (ASKED | {"max_tokens": 0}, "`max_tokens` is 0: give 1 to"),
        ({"messages": []}, "`messages` is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content is not text"),
        ({"messages": [{"role": "user", "content": "value " * 300}]}, "in a context of 256"),
        (ASKED | {"stop": ""}, "`stop`: an empty stop string"),
        (ASKED | {"foo": 1}, "`foo` is no known field"),
        (ASKED | {"prompt": "a"}, "`prompt` is no known field of chat completions"),
    ],
)
def test_requests_that_are_refused(answerer: Answerer, body: Any, words: str) -> None:
    reply = sent(Completions(answerer, DRAFTING, "toy", 4), "/v1/chat/completions", body)
    assert reply.status_code == 400 and words in reply.json()["error"]["message"]


def test_a_full_queue_and_clients_that_leave(answerer: Answerer, monkeypatch: Patch) -> None:
    """The request under way ends with its round, one that waits does not begin; a place in the queue is free again."""
    server, goes_on, begun = Completions(answerer, DRAFTING, "toy", 1), threading.Event(), list[int]()

    def slowly(request: Continuation, ids: list[int], limit: int, result: Decoded) -> Iterator[tuple[str, bool]]:
        begun.append(len(begun))
        for _ in range(1000):
            yield "a", False
            goes_on.wait(0.5)  # a round, in which the server learns who has left

    async def ask() -> list[dict[str, Any]]:
        replies: list[dict[str, Any]] = []
        given = iter([{"type": "http.request", "body": json.dumps(ASKED).encode()}])

        async def receive() -> dict[str, Any]:
            if (first := next(given, None)) is not None:
                return first
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            replies.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "headers": [(b"content-type", b"application/json")],
            "query_string": b"",
        }
        await server.app({**scope, "http_version": "1.1", "asgi": {"version": "3.0"}}, receive, send)  # type: ignore[arg-type]
        return replies

    async def several() -> list[int]:
        found = await asyncio.wait_for(asyncio.gather(*(ask() for _ in range(3))), 20)
        while server.jobs:
            await asyncio.sleep(0.01)
        return [replies[0]["status"] for replies in found]

    monkeypatch.setattr(answerer, "answer", slowly)
    assert sorted(asyncio.run(several())) == [200, 200, 503] and begun == [0]
    monkeypatch.undo()
    assert sent(server, "/v1/chat/completions", ASKED).status_code == 200


# ── Every field ──


def job(answerer: Answerer, form: str = CHAT, **more: Any) -> Job:
    own: dict[str, Any] = {"prompt": [1, 2, 3]} if form == TEXT else {"messages": ASKED["messages"]}
    return Completions(answerer, DRAFTING, "toy", 4)._job(json.dumps(own | more).encode(), form)


def refused(answerer: Answerer, form: str, name: str, value: Any) -> None:
    with pytest.raises((RecipeError, DataError)) as error:
        job(answerer, form, **{name: value})
    assert f"`{name}" in str(error.value), (name, value, str(error.value))


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
# Of each honoured field: values that are not known, and one of another type.
STRANGE: dict[str, tuple[list[Any], Any]] = {
    "model": ([], 3),
    "stream": ([], 1),
    "stream_options": ([{"include_usage": 1}, {"continuous_usage_stats": True}, {"x": 1}], True),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), ([0, -1, 2**40], True)),
    "n_predict": ([0, -2], 1.0),
    "top_k": ([-2], True),
    "seed": ([-2, 2**70], False),
    "temperature": ([-0.1, 101, float("nan"), float("inf")], True),
    "top_p": ([0, 1.01, -1], False),
    "min_p": ([-0.5, 2], False),
    "repetition_penalty": ([0, -1.0], True),
    "stop": ([""], ["a", 1]),
    "response_format": (
        [
            *(
                {"type": "xml"},
                {"type": "structural_tag"},
                {},
                {"type": "json_schema"},
                {"type": "json_object", "x": 1},
            ),
            *({"type": "json_schema", "json_schema": one} for one in ({}, {"schema": "x"}, {"schema": {}, "x": 1})),
        ],
        "json",
    ),
    "structured_outputs": (
        [
            *({"x": 1}, {"json": {}, "regex": "a"}, {"structural_tag": "x"}, {"json_object": False}, {"regex": ["a"]}),
            *({"json": {}, "disable_additional_properties": True}, {"json": {}, "disable_fallback": 1}, {"choice": []}),
        ],
        [],
    ),
    **dict.fromkeys(("guided_json", "json_schema"), (["{", "[]", {"type": "what"}], [SCHEMA])),
    "guided_json_object": ([], 1),
    "guided_choice": ([[], [""]], "ab"),
    **dict.fromkeys(("guided_regex", "regex"), (["(", "(?=a)b"], 3)),
    **dict.fromkeys(("guided_grammar", "ebnf", "grammar"), (["root ::= x", "?"], {})),
    "chat_template_kwargs": ([{"chat_template": "{{ 1 }}"}, {"messages": []}, {"tokenize": True}, {"x": 1}], "x"),
    "documents": ([[{"text": "a"}]], [1]),
    "reasoning_effort": (["low", "what", 0.5], True),
    "reasoning": ([{"effort": "high"}, {"exclude": True}, {"effort": "none", "x": 1}, {}], "low"),
    "enable_thinking": ([], 1),
    "thinking": ([True, {"type": "x"}, {"type": "disabled", "budget_tokens": 3}], "on"),
    "messages": (
        [
            *([], [{"role": "user"}], [{"role": "owner", "content": "a"}], [{"role": "user", "content": "a", "x": 1}]),
            *([{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}], [{"content": "a"}]),
            [*ASKED["messages"], {"role": "system", "content": "Late."}, *ASKED["messages"]],
            [*ASKED["messages"], {"role": "tool", "content": "b", "tool_calls": [{"function": {"name": "unseen"}}]}],
        ],
        "a",
    ),
    "prompt": ([[], "", [[]], ["a", "b"], [9999], [-1]], [1, True]),
}
ODD = (True, False, 0, 1, -1, 7, 0.37, 1.0, "x", "", [], ["x"], [1], {}, {"x": 1})
# Of fields that are harmless whatever they say, by the kind of their value: those of ODD that are of that kind.
FREE: dict[str, tuple[Any, ...]] = {
    repr((bool,)): (True, False),
    repr((int,)): (0, 1, -1, 7),
    repr((int, float)): (0, 1, -1, 7, 0.37, 1.0),
    repr((str,)): ("x", ""),
    repr(([str],)): ([], ["x"]),
    repr(({},)): ({}, {"x": 1}),
}


@pytest.mark.parametrize("form", [CHAT, TEXT])
def test_no_field_is_passed_over(answerer: Answerer, form: str) -> None:
    """An unknown key, unknown values of each known key, and wrong types of each: refused by the field's name."""
    pytest.importorskip("llguidance")
    honoured = {name for name, field in FIELDS[form].items() if field.honoured}
    assert honoured <= STRANGE.keys()
    refused(answerer, form, "no_such_field", None)
    for name, field in FIELDS[form].items():
        values, wrong = STRANGE.get(name, ([], object))
        if name in honoured:
            for value in [*values, wrong]:
                refused(answerer, form, name, value)
            continue
        free = FREE.get(repr(field.kinds), ())
        assert field.neutral is not None or free, name
        for value in ODD:
            like = [one for one in field.neutral or () if isinstance(one, bool) == isinstance(value, bool)]
            whole = not isinstance(value, float) or float in field.kinds
            if (value in like and whole) or (field.neutral is None and repr(value) in map(repr, free)):
                assert job(answerer, form, **{name: value}).ids
            else:
                refused(answerer, form, name, value)
        assert job(answerer, form, **{name: None}).ids


def test_what_is_honoured_reaches_the_decoder(answerer: Answerer) -> None:
    more = {"temperature": 0.5, "top_k": -1, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.5, "seed": 5}
    found = job(answerer, **more, stop=["x", "y"], max_completion_tokens=7, max_tokens=7, stream=True, model="any")
    request = found.request
    assert (request.sampler, request.seed) == (
        Sampler(temperature=0.5, top_k=0, top_p=0.9, min_p=0.1).penalised(1.5),
        5,
    )
    assert request.configuration == Configuration(length=3, sampler="recipe")
    assert (request.stop, found.limit, found.stream) == (("x", "y"), 7, True)
    assert job(answerer, min_p=1).request.sampler.min_p == 1  # A recipe allows values below 1 only.
    assert job(answerer, n_predict=-1).limit == answerer.capacity - len(found.ids)
    for form, value in ((CHAT, 3), (TEXT, [[1, 2, 3]])):
        usual = job(answerer, form, seed=3)
        assert usual.request == DRAFTING if form == CHAT else job(answerer, form, prompt=value).ids == usual.ids
    thinking = [
        *(
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "none"},
            {"enable_thinking": False},
        ),
        *({"reasoning": {"effort": "none"}}, {"thinking": {"type": "disabled"}}),
    ]
    off = answerer.pair.encode("# user: a = b\n# def!: ")
    assert [job(answerer, **one).ids for one in thinking] == [off] * 5
    assert job(answerer, enable_thinking=True).ids == job(answerer).ids != off
    twice = {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}
    for two in ({"max_tokens": 3, "n_predict": 4}, {"reasoning_effort": "none", "enable_thinking": False}, twice):
        with pytest.raises(RecipeError, match=r"`(n_predict|enable_thinking)`"):
            job(answerer, **two)
    with pytest.raises(RecipeError, match="`grammar` are two grammars"):
        job(answerer, regex="a", grammar="root ::= [a]")


GRAMMARS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}}, "a"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "a"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}}, "a"),
    *(({name: SCHEMA}, "a") for name in ("guided_json", "json_schema")),
    *(({name: "a[.]b|a[.]bc"}, r"a\.bc?") for name in ("guided_regex", "regex")),
    *(({"structured_outputs": {"regex": "(a|b){3}"}}, "[ab]{3}"), ({"guided_choice": ["a.b", "(c\n"]}, r"a\.b|\(c\n")),
    *(({name: 'root ::= "a" [b-c]'}, "a[bc]") for name in ("guided_grammar", "ebnf", "grammar")),
    ({"guided_grammar": 'start: "a" ("b" | "c")'}, "a[bc]"),
]


@pytest.mark.parametrize(("more", "form"), GRAMMARS)
def test_grammars(answerer: Answerer, more: dict[str, Any], form: str) -> None:
    """The text follows the grammar, in chat and text completions, behind a prompt that is held, greedy and drawn."""
    pytest.importorskip("llguidance")
    server = Completions(answerer, DRAFTING, "toy", 4)
    for path, own in (("chat/completions", ASKED), ("completions", {"prompt": "a = b"})):
        for temperature in (0, 1.5):
            sampled = {"max_tokens": 60, "temperature": temperature, "seed": 1}
            reply = sent(server, f"/v1/{path}", {**own, **more, **sampled}).json()["choices"][0]
            text = reply["text"] if "text" in reply else reply["message"]["content"]
            assert reply["finish_reason"] == "stop"
            assert json.loads(text)["a"] in (1, 2) if form == "a" else re.fullmatch(form, text)


def test_grammars_without_their_library(answerer: Answerer, monkeypatch: Patch) -> None:
    monkeypatch.setattr("distill.serving.requests.importlib.util.find_spec", lambda name: None)
    refused(answerer, CHAT, "response_format", {"type": "json_object"})
    assert job(answerer, response_format={"type": "text"}).request.grammar is None


def test_json_objects_and_what_a_grammar_would_not_obey(answerer: Answerer) -> None:
    pytest.importorskip("llguidance")
    for one in ({"response_format": {"type": "json_object"}}, {"guided_json_object": True}):
        assert job(answerer, **one).request.grammar == ("json", '{"type": "object"}')
    lenient = {"type": "string", "format": "what", "x-guidance": {"lenient": True}}
    refused(answerer, CHAT, "guided_json", lenient)


# ── Limits, foreign pages, and faults of the server ──


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Content-Type": "text/plain"}, ASKED, 415),
        ({}, ASKED, 415),
        (JSON | {"Origin": "http://evil.example"}, ASKED, 403),
        (JSON | {"Origin": "null"}, ASKED, 403),
        (JSON | {"Host": "evil.example"}, ASKED, 403),
        (JSON | {"Host": "evil.example", "Origin": "http://evil.example"}, ASKED, 403),
        (JSON | {"Host": "[::1", "Origin": "http://[::1"}, ASKED, 403),
        (JSON | {"Host": "localhost:1", "Origin": "http://localhost:1"}, ASKED, 200),
        ({"Content-Type": "application/json; charset=utf-8"}, ASKED, 200),
        (JSON, b" " * 300, 413),
    ],
)
def test_what_a_web_page_can_send(
    answerer: Answerer, headers: dict[str, str], body: Any, status: int, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(completions, "MAX_BYTES", 256)
    server = Completions(answerer, DRAFTING, "toy", 4, {"localhost", "::1", "here"})
    reply = sent(server, "/v1/chat/completions", body, headers)
    assert reply.status_code == status, reply.text
    assert status == 200 or reply.json()["error"]["code"] == status


def test_a_client_cannot_hold_the_server(answerer: Answerer, monkeypatch: Patch) -> None:
    """Its own template is refused; one that takes long is ended, and other requests are answered meanwhile."""
    loop = "{% for i in range(9**9) %}{% for j in range(9**9) %}{% endfor %}{% endfor %}"
    refused(answerer, CHAT, "chat_template_kwargs", {"chat_template": loop})
    server, rendered = Completions(answerer, DRAFTING, "toy", 4), answerer.prompt
    monkeypatch.setattr(completions, "READ_SECONDS", 0.3)
    monkeypatch.setattr(answerer, "prompt", lambda *given: time.sleep(1.5) or rendered(*given))

    async def both() -> tuple[float, int, int]:
        transport = httpx2.ASGITransport(app=server.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://here") as client:
            asked = asyncio.create_task(client.post("/v1/chat/completions", content=json.dumps(ASKED), headers=JSON))
            await asyncio.sleep(0.05)
            started = time.monotonic()
            health = await client.get("/health")
            return time.monotonic() - started, health.status_code, (await asked).status_code

    seconds, health, status = asyncio.run(both())
    assert (health, status, server.reading) == (200, 408, 0) and seconds < 1


def test_our_faults_are_no_mistakes_of_the_client(answerer: Answerer, monkeypatch: Patch, capsys: Capture) -> None:
    server, path = Completions(answerer, DRAFTING, "toy", 4), "/v1/chat/completions"

    def failing(error: Exception) -> Any:
        def answer(*given: Any) -> Iterator[Any]:
            yield "a", False
            raise error

        return answer

    for error, words in ((KeyError("x"), "a bug in distill: KeyError"), (DataError("not finite"), "not finite")):
        monkeypatch.setattr(answerer, "answer", failing(error))
        reply = sent(server, path, ASKED)
        assert reply.status_code == 500 and reply.json()["error"] == {
            "message": words,
            "type": "server_error",
            "code": 500,
        }
        *_, last = sent(server, path, ASKED | {"stream": True}).text.strip().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == 500
    monkeypatch.setattr(answerer, "prompt", lambda *given: 1 / 0)
    reply = sent(server, path, ASKED)
    assert reply.status_code == 500 and "ZeroDivisionError" in reply.text and "Traceback" in capsys.readouterr().err


def test_usage_in_streams(answerer: Answerer) -> None:
    server = Completions(answerer, DRAFTING, "toy", 4)
    for options, usages in (({"include_usage": True}, [0, 1]), ({"include_usage": False}, [0, 0]), (None, [1])):
        asked = ASKED | {"stream": True, "stream_options": options}
        *events, _ = sent(server, "/v1/chat/completions", asked).text.strip().split("\n\n")
        found = [json.loads(event.removeprefix("data: ")) for event in events]
        assert [len(one["choices"]) for one in found[-2:]] == [1, 0 if options == {"include_usage": True} else 1]
        assert ["usage" in one for one in found[-len(usages) :]] == [*map(bool, usages)]


def test_special_tokens_have_no_text(answerer: Answerer) -> None:
    special = next(at for at, kind in enumerate(answerer.pair.vocabulary.kinds) if kind == "special")
    assert answerer._bytes_of(special) == b"" != answerer.pair.token_bytes(special)

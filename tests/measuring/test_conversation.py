"""`distill chat`, line by line, and `distill serve`'s replies, on a toy pair with a chat template."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import io
import json
import re
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx2
import pytest
import tiny
from tiny import Capture, Patch
from toys import blurred, save_toy, toy, toy_tokenizer

from distill.decoding.decode import Decoded, plain
from distill.engines.loaded import Opening, load_pair
from distill.measuring.stream import Answerer, Continuation, answering, begin
from distill.recipe import Chat, Configuration, Corpus, Target
from distill.sampler import Sampler

pytest.importorskip("starlette", reason="needs the extra serve")
from distill.serving.completions import Completions

pytestmark = pytest.mark.usefixtures("one_thread")
TEMPLATE = (
    "{% for m in messages %}# {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# def: {% endif %}"
)
DRAFTING = Continuation(Configuration(length=3), Sampler(0))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("chat"), toy_tokenizer()
    model = toy(vocabulary=len(tokenizer), seed=3)
    model.config.max_position_embeddings = 256
    save_toy(model, tokenizer, folder / "silent")  # without a template
    tokenizer.chat_template = TEMPLATE
    save_toy(model, tokenizer, folder / "target")
    save_toy(blurred(model, 4, 0.02), tokenizer, folder / "draft")
    return folder


@pytest.fixture
def answerer(folders: Path) -> Iterator[Answerer]:
    opening = Opening(Target(model=str(folders / "target")), str(folders / "draft"), "cpu", 1)
    with answering(opening, Chat(), DRAFTING, 8192) as found:
        yield found


def said_to(folders: Path, monkeypatch: Patch, capsys: Capture, lines: bytes, *options: object) -> tuple[str, str]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8", errors="surrogateescape"))
    capsys.readouterr()
    assert tiny.call("chat", folders / "target", folders / "draft", "-C", "length=3", *options) == 0
    found = capsys.readouterr()
    return found.out, found.err


def test_what_is_held_changes_no_answer(answerer: Answerer, folders: Path) -> None:
    """Turn by turn, with the beginning of each prompt held from the last one, also after a cut and another session."""
    with load_pair(Target(model=str(folders / "target"))) as fresh:
        messages: list[dict[str, Any]] = []
        for number, question in enumerate(("a = b", "import os, sys", "def f(self)", "other.value")):
            messages.append({"role": "user", "content": question})
            ids, result = answerer.prompt(messages), Decoded()
            request = Continuation(Configuration(drafter="none"), Sampler(0)) if number == 2 else DRAFTING
            text = "".join(piece for piece, _ in answerer.answer(request, ids, 12, result))
            assert result.tokens == plain(fresh.target, ids, 12, fresh.ends).tokens
            assert text == fresh.text(result.tokens) and (number == 0 or answerer._held[: len(ids)] == ids)
            messages.append({"role": "assistant", "content": text})


def test_drawn_answers_keep_what_is_held_and_the_greedy_sessions(
    answerer: Answerer, folders: Path, monkeypatch: Patch
) -> None:
    """Each turn reads what is new, under a grammar too, and no drawn one evicts a session that learns."""
    (kept,) = answerer._sessions
    drawn = Continuation(Configuration(length=3, sampler="recipe"), Sampler(0.9))
    grammar = ("regex", "[a-z]{9}") if importlib.util.find_spec("llguidance") else None
    read, extend = list[int](), answerer.pair.target.extend
    monkeypatch.setattr(
        answerer.pair.target, "extend", lambda ids, *a, **k: (read.append(len(ids)), extend(ids, *a, **k))[1]
    )
    messages: list[dict[str, Any]] = []
    for seed in range(5):
        messages.append({"role": "user", "content": f"a = {seed}"})
        ids, result, length = answerer.prompt(messages), Decoded(), len(answerer._held)
        request = replace(drawn, seed=seed, grammar=grammar if seed % 3 == 1 else None)
        read.clear()
        text = "".join(piece for piece, _ in answerer.answer(request, ids, 9, result))
        same = len([*takewhile(lambda pair: pair[0] == pair[1], zip(ids, answerer._held, strict=False))])
        assert same == len(ids) and (seed == 0 or read[0] < len(ids) - length // 2)
        with load_pair(Target(model=str(folders / "target")), str(folders / "draft")) as fresh:
            assert begin(fresh, None, request, ids).text(ids, 9).tokens == result.tokens
        assert request.grammar is None or re.fullmatch("[a-z]{1,9}", text)
        messages.append({"role": "assistant", "content": text})
    assert answerer._sessions == [kept]


def test_a_conversation(folders: Path, monkeypatch: Patch, capsys: Capture, tmp_path: Path) -> None:
    saved = tmp_path / "chats.jsonl"
    lines = f"a = b\n\nimport os\n/plain\n/save {saved}\n/what\n/new\n/save {saved}\na = b\n/quit\nno\n".encode()
    out, err = said_to(folders, monkeypatch, capsys, lines, "--tokens", 9)
    answers = [line.replace("‹", "").replace("›", "") for line in out.split("\n")]
    record = json.loads(saved.read_text())
    assert [one["role"] for one in record["messages"]] == ["user", "assistant"] * 2 and saved.read_text().count(
        "\n"
    ) == 1
    whole = "".join(f"{one['content']}\n" for one in record["messages"][1::2])
    assert "\n".join(answers).startswith(whole) and "‹" in out
    assert err.count("% drafted (") == 3 and err.count("the same text") == 1 and err.count("/plain: ") == 3
    assert all(len(line) <= 60 for line in err.splitlines() if "tokens/s" in line)
    from distill.data.sources import read_documents

    corpus = Corpus.model_validate({"sources": [{"kind": "jsonl", "path": str(saved), "split": "train"}]})
    (document,), _ = read_documents(corpus, ("train",))
    assert document.messages is not None and [dict(one) for one in document.messages] == record["messages"]


def test_bad_lines_of_a_conversation(folders: Path, monkeypatch: Patch, capsys: Capture, tmp_path: Path) -> None:
    """One message each, and the conversation goes on."""
    lines = b"a\n\xff\n" + b"value " * 300 + b"\n/save " + bytes(tmp_path) + b"\n/new\na\n"
    out, err = said_to(folders, monkeypatch, capsys, lines, "--tokens", 2)
    assert out.count("\n") == 2 and err.count("distill: ") == 3
    for words in ("this line is not UTF-8", "and the context holds 256\n  /new begins", str(tmp_path)):
        assert words in err
    full, err = said_to(folders, monkeypatch, capsys, b"a\n", "--context", 30)
    assert full and "the context of 30 tokens is full: /new" in err
    no_signs = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with contextlib.redirect_stdout(no_signs):
        from distill.measuring.stream import marks

        assert marks() == ("<", ">")


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_mistakes(folders: Path, capsys: Capture, monkeypatch: Patch, command: str) -> None:
    draft, port = folders / "draft", ["--port", 0] if command == "serve" else []
    assert "has no chat template" in tiny.refused(capsys, command, folders / "silent", draft, *port)
    lossy = ["-C", "verifier=block,n_min=2", "--sampler", "temperature=1"]
    assert "would change the target's distribution" in tiny.refused(
        capsys, command, folders / "target", draft, *lossy, *port
    )
    if port:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            number = taken.getsockname()[1]
            said = tiny.refused(capsys, command, folders / "target", draft, "--port", number)
            assert f"127.0.0.1:{number} cannot be listened at" in said
        monkeypatch.setattr("distill.cli.generate.importlib.util.find_spec", lambda name: None)
        assert "needs starlette and uvicorn" in tiny.refused(capsys, command)


# ── `distill serve` ──

ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "a = b"}]}],
    "max_tokens": 9,
}


def sent(server: Completions, path: str, body: Any) -> httpx2.Response:
    async def send() -> httpx2.Response:
        transport = httpx2.ASGITransport(app=server.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://here") as client:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await client.post(path, content=content)

    return asyncio.run(send())


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
        (ASKED | {"n": 2, "tools": [{}]}, "not supported here: tools, n: leave it out"),
        (ASKED | {"max_tokens": 0}, "max_tokens: "),
        ({"messages": []}, "0 tokens in a context"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content is not text"),
        ({"messages": [{"role": "user", "content": "value " * 300}]}, "in a context of 256"),
        (ASKED | {"stop": ""}, "an empty stop string"),
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
            goes_on.wait(0.05)

    async def ask() -> list[dict[str, Any]]:
        replies: list[dict[str, Any]] = []
        given = iter([{"type": "http.request", "body": json.dumps(ASKED).encode()}])

        async def receive() -> dict[str, Any]:
            if (first := next(given, None)) is not None:
                return first
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            replies.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b""}
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

"""`distill chat`, line by line, on a toy pair with a chat template."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import tiny
from tiny import Capture, Patch
from toys import blurred, save_toy, toy, toy_tokenizer

from distill.decoding.decode import Decoded, plain
from distill.engines.loaded import Opening, load_pair
from distill.recipe import Chat, Configuration, Corpus, Sampler, Target
from distill.serving.answering import Answerer, Continuation, answering, begin

pytest.importorskip("starlette", reason="needs the extra serve")
pytestmark = pytest.mark.usefixtures("one_thread")
TEMPLATE = (
    "{% for m in messages %}# {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# def: {% endif %}"
)
DRAFTING = Continuation(Configuration(length=3), Sampler(temperature=0))


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
            request = Continuation(Configuration(drafter="none"), Sampler(temperature=0)) if number == 2 else DRAFTING
            text = "".join(piece for piece, _ in answerer.answer(request, ids, 12, result))
            assert result.tokens == plain(fresh.target, ids, 12, fresh.ends).tokens
            assert text == fresh.text(result.tokens) and (number == 0 or answerer._held[: len(ids)] == ids)
            messages.append({"role": "assistant", "content": text})


def test_drawn_answers_keep_what_is_held_and_the_greedy_sessions(
    answerer: Answerer, folders: Path, monkeypatch: Patch
) -> None:
    """Each turn reads what is new, under a grammar too, and no drawn one evicts a session that learns."""
    (kept,) = answerer._sessions
    drawn = Continuation(Configuration(length=3, sampler="recipe"), Sampler(temperature=0.9))
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
            assert begin(fresh, None, request).text(ids, 9).tokens == result.tokens
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
        from distill.serving.terminal import marks

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

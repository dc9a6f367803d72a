"""Shared by the tests of writers: runs with prompts, and servers on loopback that misbehave."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
from loopback import LoopbackHandler, running

from distill.data.packing import pack
from distill.data.samples import Reply, Request, Sample, read_samples, write_samples
from distill.decoding.batch import refill
from distill.engines.model import Model
from distill.recipe import Recipe, Sampler, load_recipe
from distill.run import Run

TEXTS = (" value", " index = total", "(self):\n    return 7", " stream", "parser.token")


def begin(world: Path, folder: Path, prompts: int, *overrides: str) -> tuple[Recipe, Run]:
    """A run with train prompts of 3 to 8 tokens, cut out of the world's documents, and nothing else.

    Servers do not teach, unless the overrides name a teacher: the weights give the distributions.
    """
    from distill.engines.torch.hugging_face import encode, load_tokenizer

    taught = any(one.startswith("teacher.") for one in overrides)
    recipe = load_recipe(world / "recipe.yaml", [*([] if taught else ["teacher.kind=exact"]), *overrides])
    run = Run(folder, recipe)
    tokenizer = load_tokenizer(recipe.target.model)
    samples = []
    for number in range(prompts):
        start = 12 + 7 * (number // 20)  # after the first line, which is nearly the same in all
        ids = encode(tokenizer, tiny.document(number % 20))[start:][: 3 + number * 5 % 6]
        samples.append(Sample(f"p{number}", ids, source="code"))
    write_samples(run.path("corpus", "prompts-train.arrow"), samples)
    for split in ("validation", "test"):
        write_samples(run.path("corpus", f"prompts-{split}.arrow"), [])
        pack([], recipe.corpus.block, split_long=False).save(run.path("corpus", f"text-{split}.safetensors"))
    return recipe, run


def answer_lines(run: Run) -> list[dict[str, Any]]:
    """The rows of all files of answers, in the order of the files."""
    paths = sorted(run.path("answers", "train").glob("*.arrow"))
    return [vars(one) for path in paths for one in read_samples(path, "answers")]


def new_ids(
    model: Model, prompts: Sequence[Sequence[int]], sampler: Sampler, limit: int, ends: Collection[int] = ()
) -> list[list[int]]:
    """Up to `limit` new ids behind each prompt; its seed is its number."""
    asked = deque(Request(str(number), list(ids), number, limit) for number, ids in enumerate(prompts))
    found = {reply.id: reply.ids for reply in refill(model, asked, sampler, ends)}
    return [found[str(number)] for number in range(len(prompts))]


class Interrupted(Exception):
    """What `interrupt_after` raises in the place of a kill."""


def interrupt_after(monkeypatch: pytest.MonkeyPatch, kind: Any, replies: int) -> list[str]:
    """Let a kind of writer fail after so many replies, as a kill would; gives the requests that were asked for."""
    write, count, asked = kind.write, 0, []

    def broken(self: Any, waiting: deque[Request]) -> Iterator[Reply]:
        nonlocal count
        asked.extend(request.id for request in waiting)
        for reply in write(self, waiting):
            count += 1
            if count > replies:
                raise Interrupted
            yield reply

    monkeypatch.setattr(kind, "write", broken)
    return asked


def interrupted(monkeypatch: pytest.MonkeyPatch, kind: Any, replies: Iterable[int], work: Callable[[], object]) -> None:
    """Do the work again and again, each time until so many replies have come."""
    for count in replies:
        with monkeypatch.context() as patch, pytest.raises(Interrupted):
            interrupt_after(patch, kind, count)
            work()


class BadServer:
    """A server with OpenAI's API that answers as `behave(prompt, attempt)` says.

    `behave` gets the prompt as the request gave it and how often it was asked before, and returns "ok" or the kind of
    fault. `asked` counts requests by prompt, `bodies` keeps them all, `most` is how many ran at once.
    """

    def __init__(self, tokenizer: Any, behave: Callable[[Any, int], str]) -> None:
        self.tokenizer, self.behave = tokenizer, behave
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.names = ["tiny"]
        self.most = self._now = 0
        self._lock = threading.Lock()
        self._running = contextlib.ExitStack()

    def __enter__(self) -> BadServer:
        self.url = f"http://127.0.0.1:{self._running.enter_context(running(Handler, self))}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def text(self, prompt: Any) -> str:
        """The answer to a prompt, a function of its text."""
        shown = self.tokenizer.decode(prompt) if isinstance(prompt, list) else prompt
        return TEXTS[hashlib.sha256(shown.encode()).digest()[0] % len(TEXTS)]

    def post(self, handler: LoopbackHandler, body: dict[str, Any]) -> None:
        prompt = body["prompt"]
        with self._lock:
            self.bodies.append(body)
            self.headers.append(dict(handler.headers))
            self._now += 1
            self.most = max(self.most, self._now)
            attempt = self.asked[json.dumps(prompt)]
            self.asked[json.dumps(prompt)] += 1
        kind = self.behave(prompt, attempt)
        time.sleep({"slow": 1.5, "a moment": 0.02}.get(kind, 0))
        with self._lock:  # before the reply: whoever has read it may ask again before this thread goes on
            self._now -= 1
        self.reply(handler, body, prompt, kind)

    def reply(self, handler: LoopbackHandler, body: dict[str, Any], prompt: Any, kind: str) -> None:
        if kind == "cut":
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{")
            handler.wfile.flush()
            handler.connection.shutdown(socket.SHUT_RDWR)
            handler.close_connection = True
        elif kind == "no json":
            handler.reply(200, b"<html>busy</html>")
        elif kind.isdigit():
            more = {"Retry_After": "0"} if kind == "429" else {}
            handler.reply(int(kind), {"error": {"message": f"no: {handler.headers.get('Authorization')}"}}, **more)
        else:
            handler.reply(200, self.completion(body, prompt, kind))

    def completion(self, body: dict[str, Any], prompt: Any, kind: str) -> dict[str, Any]:
        from distill.engines.torch.hugging_face import encode

        text = self.text(prompt)
        new = encode(self.tokenizer, text)
        choice: dict[str, Any] = {"finish_reason": "stop", "index": 0, "text": text}
        if kind == "empty text":
            choice["text"] = ""
        if kind == "length":
            choice["finish_reason"] = "length"
        if kind == "other ids":
            choice["prompt_token_ids"] = [*prompt[:-1], prompt[-1] + 1]
        if kind == "ids":
            choice |= {"token_ids": new[::-1], "text": "another text", "stop_reason": None}
        return {
            "model": "another" if kind == "other model" else body["model"],
            "choices": [] if kind == "no choice" else [choice],
            "usage": {"prompt_tokens": len(prompt) + (kind == "other tokens"), "completion_tokens": len(new) + 1},
        }


class Handler(LoopbackHandler):
    owner: BadServer

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": name} for name in self.owner.names]})

    def do_POST(self) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.owner.post(self, self.body())

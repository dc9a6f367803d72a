"""`distill serve`: chat and text completions of a pair in OpenAI's form, one request at a time.

One thread decodes. Requests wait for it in a bounded queue. If a client disconnects, its request ends with the current
round.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import random
import socket
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from distill.data.requests import CHAT, TEXT, fault_of_request
from distill.decoding.decode import Decoded
from distill.engines.loaded import Opening
from distill.engines.torch.hugging_face import encode_text
from distill.errors import DataError, DistillError, RecipeError
from distill.files import parse_object
from distill.progress import note, noting, warn
from distill.recipe import Chat
from distill.serving.answering import Answerer, Continuation, answering
from distill.serving.requests import (
    grammar_of,
    limit_of,
    messages_of,
    prompt_of,
    sampler_of,
    stops_of,
    template_arguments,
    usage_of,
)

POLL_SECONDS = 0.1  # between two checks whether the client is still connected
READ_SECONDS = 30.0  # maximum time to read a request and render its prompt
MAX_BYTES = 16 * 2**20  # of a request
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Failed:
    """The reason why a request is not answered, with its HTTP status."""

    status: int
    words: object

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        words = ": ".join(line.strip() for line in str(self.words).splitlines())
        kind = {500: "server_error", 503: "unavailable_error"}.get(self.status, "invalid_request_error")
        return {"error": {"message": words, "type": kind, "code": self.status}}

    def reply(self) -> Response:
        """The whole reply."""
        return JSONResponse(self.body(), self.status)


def _bug(error: Exception) -> Failed:
    traceback.print_exception(error)
    return Failed(500, f"a bug in distill: {type(error).__name__}")


Piece = str | Failed | None  # a part of an answer. None ends the answer.


@dataclass
class Job:
    """A request under way: its prompt, the queue of its pieces, and whether its client has disconnected."""

    ids: list[int]
    limit: int
    request: Continuation
    stream: bool = False
    usage: bool | None = None
    pieces: asyncio.Queue[Piece] = field(default_factory=asyncio.Queue)
    gone: threading.Event = field(default_factory=threading.Event)
    result: Decoded = field(default_factory=Decoded)


async def _apart(call: Callable[[], Job]) -> Job:
    """The result of a call in a new thread. The end of the process does not wait for the thread."""
    loop, done = asyncio.get_running_loop(), concurrent.futures.Future[Job]()

    def run() -> None:
        done.set_running_or_notify_cancel()  # A thread cannot be ended.
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(done, loop=loop)


class Completions:
    """The routes, and the thread that decodes. At most `queue` requests wait for it.

    Requests must name one of the `hosts` (None: any), so that no web page reaches a server on loopback through another
    host name.
    """

    def __init__(
        self, answerer: Answerer, request: Continuation, name: str, queue: int, hosts: Collection[str] | None = None
    ) -> None:
        self.answerer, self.request, self.name, self.queue, self.hosts = answerer, request, name, queue, hosts
        self.jobs: list[Job] = []
        self.reading = 0  # requests that are being read
        self.thread = ThreadPoolExecutor(1)
        models = {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "distill"}]}
        routes = [Route(f"/v1/{path}", self.complete, methods=["POST"]) for path in ("chat/completions", "completions")]
        for path, content in (("/v1/models", models), ("/health", {"status": "ok"})):
            routes.append(Route(path, partial(self._static, content)))
        self.app = Starlette(routes=routes)

    async def _static(self, content: dict[str, Any], http: HttpRequest) -> Response:
        failed = self._foreign(http)
        return JSONResponse(content) if failed is None else failed.reply()

    async def complete(self, http: HttpRequest) -> Response:
        """Answer a request, whole or as events. A mistake gets status 400, and a full queue 503."""
        form = CHAT if "chat" in http.url.path else TEXT
        job = await self._read(http, form)
        if isinstance(job, Failed):
            return job.reply()
        self.jobs.append(job)
        loop = asyncio.get_running_loop()
        loop.run_in_executor(self.thread, self._decode, job, loop)
        kind = "chat.completion" if form == CHAT else "text_completion"
        head = {"id": f"cmpl-{uuid4().hex}", "object": kind, "created": int(time.time()), "model": self.name}
        if job.stream:
            head["object"] = kind + ".chunk" * (form == CHAT)
            return StreamingResponse(self._events(job, http, head), media_type="text/event-stream")
        text = ""
        async for piece in self._pieces(job, http):
            if isinstance(piece, Failed):
                return piece.reply()
            text += piece
        content = {"message": {"role": "assistant", "content": text}} if form == CHAT else {"text": text}
        choices = [{"index": 0, **content, "logprobs": None, "finish_reason": self._reason(job)}]
        return JSONResponse({**head, "choices": choices, **_figures(job)})

    async def _read(self, http: HttpRequest, form: str) -> Job | Failed:
        """The job of a request, or the reason for none. A thread renders the prompt, because templates may loop."""
        if len(self.jobs) + self.reading > self.queue:
            return Failed(503, f"the queue is full ({self.queue} requests). Try again later")
        self.reading += 1
        try:
            async with asyncio.timeout(READ_SECONDS):
                if (failed := self._foreign(http) or _no_json(http)) is not None:
                    return failed
                body = bytearray()
                async for part in http.stream():
                    body += part
                    if len(body) > MAX_BYTES:
                        return Failed(413, f"the request is larger than {MAX_BYTES} bytes")
                return await _apart(partial(self._job, bytes(body), form))
        except TimeoutError:
            return Failed(408, f"reading the request and rendering its prompt took more than {READ_SECONDS:g} s")
        except DistillError as error:
            return Failed(400, error)
        except ClientDisconnect:
            return Failed(400, "the client has disconnected")
        except Exception as error:
            return _bug(error)
        finally:
            self.reading -= 1

    def _foreign(self, http: HttpRequest) -> Failed | None:
        """The refusal of a request from another server's web page. None for any other request."""
        host, origin = http.headers.get("host", ""), http.headers.get("origin")
        try:
            name, page = urlsplit(f"//{host}").hostname, urlsplit(origin or "").netloc
        except ValueError:
            name, page = None, ""
        if self.hosts is not None and name not in self.hosts:
            return Failed(403, f"this server is not called {host[:60]}: ask at one of {', '.join(self.hosts)}")
        return None if origin is None or page == host else Failed(403, f"web pages of {origin[:60]} may not ask here")

    def _job(self, body: bytes, form: str) -> Job:
        """The job of a request. RecipeError, with the field's name, for a request that cannot be fulfilled."""
        asked = parse_object(body)
        if isinstance(asked, str):
            raise RecipeError(f"the request is {asked}, not a JSON object")
        if (fault := fault_of_request(asked, form)) is not None:
            raise RecipeError(*fault)
        stops, sampler = stops_of(asked), sampler_of(asked, self.request.sampler)
        usage, grammar = usage_of(asked), grammar_of(asked)
        if grammar is not None:
            try:
                self.answerer.constraint(*grammar[1:])
            except DistillError as error:
                raise RecipeError(f"`{grammar[0]}`: {error.what}", error.hint) from None
        if form == CHAT:
            ids = self._rendered(asked)
        else:
            prompt = prompt_of(asked)
            ids = encode_text(self.answerer.template.tokenizer, prompt) if isinstance(prompt, str) else prompt
        room = self.answerer.room(ids)
        if not all(0 <= token < self.answerer.pair.target.vocabulary_size for token in ids):
            raise RecipeError("`prompt`: a token id that the model does not have")
        seed = asked.get("seed")
        request = replace(
            self.request,
            configuration=self.request.configuration.model_copy(
                update={"sampler": "recipe" if sampler.temperature else "greedy"}
            ),
            sampler=sampler,
            seed=0 if not sampler.temperature else random.getrandbits(32) if seed in (None, -1) else seed,
            stop=stops,
            grammar=None if grammar is None else grammar[1:],
        )
        return Job(ids, limit_of(asked, room), request, bool(asked.get("stream")), usage)

    def _rendered(self, asked: Mapping[str, Any]) -> list[int]:
        """The token ids of a request's messages."""
        messages, tools = messages_of(asked), (asked.get("chat_template_kwargs") or {}).get("tools")
        arguments = template_arguments(asked, self.answerer.template.variables(tools))
        try:
            return self.answerer.prompt(messages, arguments)
        except DataError as error:
            raise RecipeError(f"`messages`: {error.what}", error.hint) from None

    def _decode(self, job: Job, loop: asyncio.AbstractEventLoop) -> None:
        """Decode a job in the thread, until its end or until its client has disconnected."""
        last, mistake = None, 400
        try:
            parts = self.answerer.answer(job.request, job.ids, job.limit, job.result)
            # From here on, the models or a grammar without a continuation cause an error.
            mistake = 500 if job.request.grammar is None else 400
            while not job.gone.is_set() and (part := next(parts, None)) is not None:
                loop.call_soon_threadsafe(job.pieces.put_nowait, part[0])
        except DistillError as error:
            last = Failed(mistake, error)
        except Exception as error:
            last = _bug(error)
        finally:
            self.jobs.remove(job)
            loop.call_soon_threadsafe(job.pieces.put_nowait, last)

    async def _pieces(self, job: Job, http: HttpRequest) -> AsyncIterator[str | Failed]:
        """The texts of a job as they come, or its failure. Nothing more comes after the client has disconnected."""
        polled = time.monotonic()
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    piece = await asyncio.wait_for(job.pieces.get(), POLL_SECONDS)
                    if piece is None:
                        return
                    yield piece
                if time.monotonic() - polled > POLL_SECONDS:
                    polled = time.monotonic()
                    if await http.is_disconnected():
                        return
        finally:
            job.gone.set()

    async def _events(self, job: Job, http: HttpRequest, head: dict[str, Any]) -> AsyncIterator[str]:
        """A job as events. The last event has its timings."""

        def event(text: str, reason: str | None = None, **more: Any) -> str:
            content = (
                {"text": text} if head["object"] == "text_completion" else {"delta": {"content": text} if text else {}}
            )
            choices = [{"index": 0, **content, "logprobs": None, "finish_reason": reason}]
            return f"data: {json.dumps({**head, 'choices': choices, **more})}\n\n"

        async for piece in self._pieces(job, http):
            if isinstance(piece, Failed):
                yield f"data: {json.dumps(piece.body())}\n\n"
                return
            if piece:
                yield event(piece)
        figures = _figures(job)
        usage = {} if job.usage is None else {"usage": figures.pop("usage")}
        yield event("", self._reason(job), **figures)
        if job.usage:
            yield f"data: {json.dumps({**head, 'choices': [], **usage})}\n\n"
        yield "data: [DONE]\n\n"

    def _reason(self, job: Job) -> str:
        tokens, ends = job.result.tokens, self.answerer.pair.ends
        return "length" if len(tokens) >= job.limit and tokens[-1] not in ends else "stop"


def _no_json(http: HttpRequest) -> Failed | None:
    """The refusal of another body than JSON. Web pages may send other bodies to foreign servers without asking."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    return None if kind == "application/json" else Failed(415, "send `Content-Type: application/json`")


def _figures(job: Job) -> dict[str, Any]:
    """Usage under OpenAI's names, and timings under llama-server's."""
    result, count, made = job.result, len(job.ids), len(job.result.tokens)
    drafted = {"draft_n": sum(each.drafted for each in result.rounds), "draft_n_accepted": sum(result.from_draft)}
    prompt = {"prompt_n": count, "prompt_ms": 1e3 * result.prefill_seconds}
    predicted = {"predicted_n": made, "predicted_ms": 1e3 * result.seconds}
    predicted["predicted_per_second"] = result.tokens_per_second()
    usage = {"prompt_tokens": count, "completion_tokens": made, "total_tokens": count + made}
    return {"usage": usage, "timings": {**prompt, **predicted, **drafted}}


def serve(
    opening: Opening, chat: Chat, request: Continuation, context: int, address: tuple[str, int], queue: int
) -> None:
    """Serve until SIGINT or SIGTERM. RecipeError, before models load, if the address cannot be listened at."""
    try:
        listening = socket.create_server(address, family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
    except OSError as error:
        hint = "choose another --port"
        raise RecipeError(f"{address[0]}:{address[1]} cannot be listened at: {error.strerror}", hint) from None
    hosts = {*LOOPBACK} if address[0] in LOOPBACK else None
    if hosts is None:
        warn(f"{address[0]} can be reached from outside: requests are neither encrypted nor checked")
    with listening, answering(opening, chat, request, context) as answerer:
        name = opening.target.model.rstrip("/").rpartition("/")[2]
        completions = Completions(answerer, request, name, queue, hosts)
        config = uvicorn.Config(completions.app, log_level="warning", access_log=False, lifespan="off")
        server: Any = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # `noting` handles signals.

        def stop(number: int) -> None:
            server.should_exit = True
            for job in completions.jobs:
                job.gone.set()

        note(f"http://{address[0]}:{listening.getsockname()[1]}/v1 answers; Ctrl-C ends it")
        with noting(stop):
            server.run(sockets=[listening])
        completions.thread.shutdown()

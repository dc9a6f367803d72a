"""`distill serve`: a pair behind chat and text completions in OpenAI's form, one request at a time.

A thread decodes; requests wait for it in a queue that has an end. A request whose client is gone ends with its round.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

import uvicorn
from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from distill.data.records import normal
from distill.decoding.decode import Decoded
from distill.engines.loaded import Opening
from distill.errors import DistillError, RecipeError, RunError
from distill.files import parse_object
from distill.measuring.stream import Answerer, Continuation, answering
from distill.progress import note, noting, warn
from distill.recipe import Chat

LOOK_SECONDS = 0.1  # between two looks whether the client is still there
# What would give another answer, and is refused unless its value asks for nothing.
UNSUPPORTED = (
    "tools functions logprobs top_logprobs logit_bias echo suffix grammar json_schema response_format n best_of"
)
NEUTRAL: tuple[Any, ...] = (None, False, 0, 1, [], {}, "", {"type": "text"})
Piece = str | DistillError | None  # of an answer; None ends it


class Asked(BaseModel):
    """The fields of a request that are read."""

    messages: list[dict[str, Any]] = []
    prompt: str | list[int] = ""
    stream: bool = False
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_k: int | None = None
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@dataclass
class Job:
    """A request under way: what it decodes, where its pieces go, and whether its client has left."""

    ids: list[int]
    limit: int
    request: Continuation
    pieces: asyncio.Queue[Piece] = field(default_factory=asyncio.Queue)
    gone: threading.Event = field(default_factory=threading.Event)
    result: Decoded = field(default_factory=Decoded)


class Completions:
    """The routes, and the one thread that decodes; at most `queue` requests wait for it."""

    def __init__(self, answerer: Answerer, request: Continuation, name: str, queue: int) -> None:
        self.answerer, self.request, self.name, self.queue = answerer, request, name, queue
        self.jobs: list[Job] = []
        self.thread = ThreadPoolExecutor(1)
        models = {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "distill"}]}
        routes = [Route(f"/v1/{path}", self.complete, methods=["POST"]) for path in ("chat/completions", "completions")]
        routes += [Route("/v1/models", lambda http: JSONResponse(models))]
        self.app = Starlette(routes=[*routes, Route("/health", lambda http: JSONResponse({"status": "ok"}))])

    async def complete(self, http: HttpRequest) -> Response:
        """Answer a request, whole or as events; a mistake gets status 400, a full queue 503."""
        try:
            asked = _parsed(await http.body())
            job = self._job(asked, chat := "chat" in http.url.path)
        except DistillError as error:
            return _fault(error)
        if len(self.jobs) > self.queue:
            return _fault(f"{self.queue} requests wait already: try again later", 503)
        self.jobs.append(job)
        loop = asyncio.get_running_loop()
        loop.run_in_executor(self.thread, self._decode, job, loop)
        kind = "chat.completion" if chat else "text_completion"
        head = {"id": f"cmpl-{uuid4().hex}", "object": kind, "created": int(time.time()), "model": self.name}
        if asked.stream:
            head["object"] = kind + ".chunk" * chat
            return StreamingResponse(self._events(job, http, head), media_type="text/event-stream")
        try:
            text = "".join([piece async for piece in self._pieces(job, http)])
        except DistillError as error:
            return _fault(error)
        content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choices = [{"index": 0, **content, "logprobs": None, "finish_reason": self._reason(job)}]
        return JSONResponse({**head, "choices": choices, **_figures(job)})

    def _job(self, asked: Asked, chat: bool) -> Job:
        """What a request decodes; DistillError for one that cannot be."""
        if chat:
            try:
                messages = [normal(one) for one in asked.messages]
            except ValueError as error:
                raise RecipeError(f"messages: {error}") from None
            ids = self.answerer.prompt(messages, asked.chat_template_kwargs) if messages else []
        else:
            ids = self.answerer.pair.encode(asked.prompt) if isinstance(asked.prompt, str) else asked.prompt
        room = self.answerer.room(ids)
        if not all(0 <= token < self.answerer.pair.target.vocabulary_size for token in ids):
            raise RecipeError("prompt: a token id that the model does not have")
        given = asked.model_dump(include={"temperature", "top_k", "top_p", "min_p"}, exclude_none=True)
        sampler = replace(self.request.sampler, **given)
        update = {"sampler": "recipe" if sampler.temperature else "greedy"}
        seed = random.getrandbits(32) if asked.seed is None else asked.seed
        request = replace(
            self.request,
            configuration=self.request.configuration.model_copy(update=update),
            sampler=sampler,
            seed=seed if sampler.temperature else 0,
            stop=(asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ()),
        )
        return Job(ids, min(asked.max_completion_tokens or asked.max_tokens or room, room), request)

    def _decode(self, job: Job, loop: asyncio.AbstractEventLoop) -> None:
        """In the thread: decode a job until its end, or until its client has left."""
        last: Piece = None
        try:
            parts = self.answerer.answer(job.request, job.ids, job.limit, job.result)
            while not job.gone.is_set() and (part := next(parts, None)) is not None:
                loop.call_soon_threadsafe(job.pieces.put_nowait, part[0])
        except Exception as error:
            last = error if isinstance(error, DistillError) else RunError(f"a bug in distill: {type(error).__name__}")
        finally:
            self.jobs.remove(job)
            loop.call_soon_threadsafe(job.pieces.put_nowait, last)

    async def _pieces(self, job: Job, http: HttpRequest) -> AsyncIterator[str]:
        """The texts of a job as they come; none any more once the client has left."""
        looked = time.monotonic()
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    piece = await asyncio.wait_for(job.pieces.get(), LOOK_SECONDS)
                    if piece is None:
                        return
                    if isinstance(piece, DistillError):
                        raise piece
                    yield piece
                if time.monotonic() - looked > LOOK_SECONDS:
                    looked = time.monotonic()
                    if await http.is_disconnected():
                        return
        finally:
            job.gone.set()

    async def _events(self, job: Job, http: HttpRequest, head: dict[str, Any]) -> AsyncIterator[str]:
        """A job as events, the last of which has its timings."""

        def event(text: str, reason: str | None = None, **more: Any) -> str:
            content = (
                {"text": text} if head["object"] == "text_completion" else {"delta": {"content": text} if text else {}}
            )
            choices = [{"index": 0, **content, "logprobs": None, "finish_reason": reason}]
            return f"data: {json.dumps({**head, 'choices': choices, **more})}\n\n"

        try:
            async for piece in self._pieces(job, http):
                if piece:
                    yield event(piece)
        except DistillError as error:
            yield f"data: {bytes(_fault(error).body).decode()}\n\n"
            return
        yield event("", self._reason(job), **_figures(job)) + "data: [DONE]\n\n"

    def _reason(self, job: Job) -> str:
        tokens, ends = job.result.tokens, self.answerer.pair.ends
        return "length" if len(tokens) >= job.limit and tokens[-1] not in ends else "stop"


def _parsed(body: bytes) -> Asked:
    """A request's fields; RecipeError for what is no such request, or asks for what is not done here."""
    found = parse_object(body)
    if isinstance(found, str):
        raise RecipeError(f"the request is {found}, not a JSON object")
    penalties = [name for name in found if name.endswith("_penalty")]
    if foreign := [name for name in (*UNSUPPORTED.split(), *penalties) if found.get(name) not in NEUTRAL]:
        raise RecipeError(f"not supported here: {', '.join(foreign)}", "leave it out")
    try:
        return Asked.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        raise RecipeError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _fault(error: object, status: int = 400) -> Response:
    words = ": ".join(line.strip() for line in str(error).splitlines())
    kind = "unavailable_error" if status == 503 else "invalid_request_error"
    return JSONResponse({"error": {"message": words, "type": kind, "code": status}}, status)


def _figures(job: Job) -> dict[str, Any]:
    """Usage as OpenAI names it, and timings as llama-server does."""
    result, count, made = job.result, len(job.ids), len(job.result.tokens)
    drafted = {"draft_n": sum(one.drafted for one in result.rounds), "draft_n_accepted": sum(result.from_draft)}
    prompt = {"prompt_n": count, "prompt_ms": 1e3 * result.prefill_seconds}
    predicted = {"predicted_n": made, "predicted_ms": 1e3 * result.seconds}
    predicted["predicted_per_second"] = result.tokens_per_second()
    usage = {"prompt_tokens": count, "completion_tokens": made, "total_tokens": count + made}
    return {"usage": usage, "timings": {**prompt, **predicted, **drafted}}


def serve(
    opening: Opening, chat: Chat, request: Continuation, context: int, address: tuple[str, int], queue: int
) -> None:
    """Serve until SIGINT or SIGTERM; RecipeError, before models load, for an address that cannot be listened at."""
    try:
        listening = socket.create_server(address, family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
    except OSError as error:
        hint = "choose another --port"
        raise RecipeError(f"{address[0]}:{address[1]} cannot be listened at: {error.strerror}", hint) from None
    if address[0] not in ("127.0.0.1", "localhost", "::1"):
        warn(f"{address[0]} can be reached from outside: requests are neither encrypted nor checked")
    with listening, answering(opening, chat, request, context) as answerer:
        own = Completions(answerer, request, opening.target.model.rstrip("/").rpartition("/")[2], queue)
        server: Any = uvicorn.Server(uvicorn.Config(own.app, log_level="warning", access_log=False, lifespan="off"))
        server.capture_signals = contextlib.nullcontext  # ours, below

        def stop(number: int) -> None:
            server.should_exit = True
            for job in own.jobs:
                job.gone.set()

        note(f"http://{address[0]}:{listening.getsockname()[1]}/v1 answers; Ctrl-C ends it")
        with noting(stop):
            server.run(sockets=[listening])
        own.thread.shutdown()

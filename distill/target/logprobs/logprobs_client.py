"""Requests to OpenAI-compatible servers: several base URLs, bounded concurrency, repeated where a fault may pass.

The API key comes from the environment and stands in no message, file or log.
"""

from __future__ import annotations

import os
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import httpx2

from distill.errors import EndpointError, RecipeError
from distill.files import parse_object
from distill.recipe import TeacherServer

Item = TypeVar("Item")
Found = TypeVar("Found")

PASSING = (408, 429)  # statuses after which the same request may succeed, beside all from 500 on
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 60.0
CONNECT_SECONDS = 20.0
SHOWN = 300  # characters of a server's message


class LogprobsClient:
    """A connection to the servers of one model; `repeated` counts the faults after which a request was sent again."""

    def __init__(self, settings: TeacherServer) -> None:
        self.settings = settings
        self.requests = 0
        self.repeated: Counter[str] = Counter()
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._turns = deque(settings.urls)
        self._key = _key(settings)
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        self._http = httpx2.Client(
            headers=headers,
            timeout=httpx2.Timeout(settings.timeout_seconds, connect=min(CONNECT_SECONDS, settings.timeout_seconds)),
            limits=httpx2.Limits(max_connections=settings.concurrency),
        )

    def get(self, url: str, path: str) -> dict[str, Any] | None:
        """The object at a path of one server; None where it has no such path. EndpointError as `post`."""
        return self._repeat([url], path, lambda place: self._http.get(place), missing=True)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The object with which a server answers; requests begin with each server in turn.

        Raises EndpointError for a reply that refuses the request, and where every repetition failed.
        """
        with self._lock:
            self._turns.rotate(-1)
            urls = list(self._turns)
        found = self._repeat(urls, path, lambda place: self._http.post(place, json=body))
        assert found is not None
        return found

    def each(self, function: Callable[[Item], Found], items: Sequence[Item]) -> list[Found]:
        """function(item) of each item, at most `concurrency` at a time; the first error ends all."""
        with ThreadPoolExecutor(max_workers=self.settings.concurrency) as pool:
            work = [pool.submit(function, item) for item in items]
            try:
                done, _ = wait(work, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
            except BaseException:
                self._stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [future.result() for future in work]

    def summary(self) -> str:
        """A sentence on the requests so far."""
        faults = ", ".join(f"{count} × {fault}" for fault, count in sorted(self.repeated.items()))
        return f"{self.requests} requests, {sum(self.repeated.values())} repeated" + (f" ({faults})" if faults else "")

    def _repeat(
        self, urls: Sequence[str], path: str, send: Callable[[str], httpx2.Response], missing: bool = False
    ) -> dict[str, Any] | None:
        with self._lock:
            self.requests += 1
        for attempt in range(self.settings.retries + 1):
            place = f"{urls[attempt % len(urls)]}/{path}"
            asked_wait = 0.0
            try:
                reply = send(place)
            except httpx2.RequestError as error:  # broken, refused or slow connections, and bodies that do not unpack
                fault = "timeout" if isinstance(error, httpx2.TimeoutException) else "broken connection"
            else:
                if missing and reply.status_code == 404:
                    return None
                if reply.status_code in PASSING or reply.status_code >= 500:
                    fault, asked_wait = f"HTTP {reply.status_code}", _asked_wait(reply)
                elif reply.status_code != 200:
                    raise self._refusal(place, reply)
                else:
                    found = parse_object(reply.content)
                    if not isinstance(found, str):
                        return found
                    fault = "no JSON"
            if attempt < self.settings.retries:
                with self._lock:
                    self.repeated[fault] += 1
                backoff = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2**attempt) * random.uniform(0.5, 1)
                if self._stopped.wait(max(backoff, asked_wait)):
                    break
        raise EndpointError(
            f"{place} gave no usable reply, {attempt + 1} times in a row, the last time: {fault}",
            "see the server's log; the same command goes on with what is missing. teacher.server.concurrency, retries "
            "and timeout_seconds can be changed without losing anything",
        )

    def _refusal(self, place: str, reply: httpx2.Response) -> EndpointError:
        status, message = reply.status_code, self._message(reply)
        settings = self.settings
        if status in (401, 403):
            hint = (
                f"correct the key in {settings.key_variable}"
                if settings.key_variable
                else "name the environment variable that holds the key in teacher.server.key_variable"
            )
        elif 300 <= status < 400:
            hint = "give the URL that it points to in teacher.server.urls"
        elif status == 404:
            hint = f"check teacher.server.urls (they end in /v1) and that the server has the model {settings.model}"
        elif "greater than max allowed" in message:
            hint = "start vLLM with a larger --max-logprobs, or lower teacher.top_k"
        elif status in (400, 422) and settings.prompts == "ids":
            hint = "if the server takes no token ids as a prompt, set teacher.server.prompts: text"
        else:
            hint = "see the server's log"
        return EndpointError(f"{place} refused a request (HTTP {status}): {message}", hint)

    def _message(self, reply: httpx2.Response) -> str:
        """A server's own message, on one line, without the key."""
        found: Any = parse_object(reply.content)
        for name in ("error", "message", "detail"):
            found = found.get(name, found) if isinstance(found, dict) else found
        text = " ".join((found if isinstance(found, str) else reply.text).split())
        if isinstance(found, str) and found.startswith("no JSON"):
            text = " ".join(reply.text.split())
        text = "".join(letter if letter.isprintable() else "?" for letter in text)
        return (text.replace(self._key, "***") if self._key else text)[:SHOWN] or "no message"

    def close(self) -> None:
        """Close all connections."""
        self._http.close()


def _key(settings: TeacherServer) -> str | None:
    if settings.key_variable is None:
        return None
    key = os.environ.get(settings.key_variable, "").strip()
    if not key:
        raise RecipeError(
            f"teacher.server.key_variable names {settings.key_variable}, which is not set in the environment",
            f"export {settings.key_variable}=…, or leave key_variable out",
        )
    if not (key.isascii() and key.isprintable()):
        raise RecipeError(f"the key in {settings.key_variable} holds characters that no header can", "correct it")
    return key


def _asked_wait(reply: httpx2.Response) -> float:
    """The seconds of a Retry-After header, at most the longest wait; 0 without one."""
    value = reply.headers.get("retry-after", "")
    return min(float(value), LONGEST_WAIT_SECONDS) if value.isascii() and value.isdigit() else 0.0

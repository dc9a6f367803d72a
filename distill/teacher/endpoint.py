"""Servers with OpenAI's API: several base URLs, keys from the environment, and requests that are sent again.

Nothing here puts a key, a header or a URL's secrets into a message.
"""

from __future__ import annotations

import datetime
import email.utils
import itertools
import os
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import httpx2

from distill.data.samples import listed
from distill.errors import EndpointError, server_words
from distill.files import parse_object
from distill.recipe.target import Servers

CONNECT_SECONDS = 10.0
FIRST_DELAY, LONGEST_DELAY, LONGEST_ASKED = 0.5, 60.0, 600.0  # seconds
AGAIN = {408, 425, 429}  # and 5xx
PARTING_SECONDS = 2.0  # for requests under way when the work ends early

Check = Callable[[dict[str, Any]], object] | None  # raises Unanswered for a reply that is to be asked for again
Item = TypeVar("Item")
Result = TypeVar("Result")


class ReplyError(Exception):
    """A request without a reply: the reason, what the server said about it, the seconds that it asks to wait, and the
    reply's status (None without a reply)."""

    def __init__(
        self, reason: str, detail: str = "", wait_seconds: float | None = None, status: int | None = None
    ) -> None:
        super().__init__(reason)
        self.reason, self.detail, self.wait_seconds, self.status = reason, detail, wait_seconds, status


class Refused(ReplyError):
    """The server would refuse this request again."""


class Unanswered(ReplyError):
    """No attempt at this request brought a reply; the reason of the last one."""


class Endpoint:
    """The servers of a recipe's section, such as `answers.writer`, which messages name. Threads may share it.

    `requests` counts what was asked, `counts` the attempts that failed, by reason. Raises EndpointError for a key or
    header that the environment lacks.
    """

    def __init__(self, settings: Servers, section: str) -> None:
        self.settings, self.section = settings, section
        self.requests = 0
        self.counts: Counter[str] = Counter()
        self._turns = itertools.count()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._secrets: list[str] = []
        headers = {name: self._secret(variable, f"headers.{name}") for name, variable in settings.headers.items()}
        if settings.key is not None:
            headers["Authorization"] = f"Bearer {self._secret(settings.key, 'key')}"
        self._client = httpx2.Client(
            headers=headers,
            timeout=httpx2.Timeout(settings.timeout, connect=min(CONNECT_SECONDS, settings.timeout)),
            limits=httpx2.Limits(max_connections=settings.concurrency, max_keepalive_connections=settings.concurrency),
        )

    def _secret(self, variable: str, setting: str) -> str:
        self._secrets.append(secret(variable, f"{self.section}.{setting}"))
        return self._secrets[-1]

    # ── requests ──

    def post(self, path: str, body: dict[str, Any], check: Check = None) -> dict[str, Any]:
        """The JSON object that a server replies with; requests begin at each URL in turn, further attempts at the next.

        Raises Refused, Unanswered after `retries` further attempts, and EndpointError where no request can succeed: a
        wrong key, an address without this API, a server of another model than `body` names.
        """

        def checked(reply: dict[str, Any]) -> None:
            model = reply.get("model") or body["model"]
            if model != body["model"]:
                raise EndpointError(
                    f"a server answers for the model {str(model)[:80]}, and {body['model']} was asked",
                    f"all servers of {self.section}.urls must hold the same target under one name",
                )
            if check is not None:
                check(reply)

        start, urls = next(self._turns), self.settings.urls
        places = [f"{urls[(start + number) % len(urls)]}/{path}" for number in range(len(urls))]
        return self._repeated(places, lambda place: self._client.post(place, json=body), checked)

    def _repeated(
        self, places: Sequence[str], send: Callable[[str], httpx2.Response], check: Check = None, optional: bool = False
    ) -> dict[str, Any]:
        """`send` to the places in turn until one replies; an empty object where an optional place does not exist."""
        with self._lock:
            self.requests += 1
        for attempt in range(self.settings.retries + 1):
            if self._closed.is_set():
                raise Unanswered("the client was closed")
            try:
                return self._attempt(places[attempt % len(places)], send, check, optional)
            except Unanswered as error:
                fault = error
            with self._lock:
                self.counts[fault.reason] += 1
            if attempt < self.settings.retries:
                self._closed.wait(delay_seconds(attempt, fault.wait_seconds))
        raise fault

    def _attempt(
        self, place: str, send: Callable[[str], httpx2.Response], check: Check, optional: bool
    ) -> dict[str, Any]:
        """A reply; raises Unanswered where another attempt may bring one."""
        try:
            response = send(place)
        except httpx2.TimeoutException:
            raise Unanswered("no reply in time") from None
        except (httpx2.TransportError, httpx2.DecodingError):
            raise Unanswered("broken connection") from None
        except RuntimeError:  # the client was closed meanwhile
            raise Unanswered("the client was closed") from None
        status = response.status_code
        if optional and status in (404, 405):
            return {}
        if status in AGAIN or status >= 500:
            wait_seconds = retry_after(response.headers.get("retry-after"))
            raise Unanswered(f"status {status}", self._message(response), wait_seconds, status)
        if status >= 300:
            raise self._refusal(place, status, response)
        reply = parse_object(response.content)
        if isinstance(reply, str):
            raise Unanswered("a reply that is not a JSON object", self._message(response))
        if check is not None:
            try:
                check(reply)
            except Unanswered as fault:
                fault.detail = fault.detail or self._message(response)
                raise
        return reply

    def _refusal(self, place: str, status: int, response: httpx2.Response) -> Exception:
        """The error for a status below 500 that is neither a success nor tried again."""
        message, section = self._message(response), self.section
        if status in (401, 403):
            key = self.settings.key
            hint = f"correct the key in {key}" if key else f"name the variable that holds its key: {section}.key"
            return EndpointError(f"{place} refuses this client (status {status}): {message}", hint)
        if status < 400 or status in (404, 405):
            return EndpointError(
                f"{place} gives no completions (status {status}): {message}",
                f"correct {section}.urls (most end with /v1; of a redirect, where it leads to) and {section}.model",
            )
        return Refused(f"status {status}", message)

    def _message(self, response: httpx2.Response) -> str:
        return server_words(response.content, self._secrets)

    def stream(self, ask: Callable[[Item], Result], waiting: deque[Item]) -> Generator[Result, None, None]:
        """ask(item) of each item that waits, in any order, `concurrency` at a time; more may be appended meanwhile.

        The first error ends all: no request is sent again, and those under way are left after a moment.
        """
        asked: SimpleQueue[Item | None] = SimpleQueue()
        replies: SimpleQueue[tuple[Result | None, BaseException | None]] = SimpleQueue()

        def work() -> None:
            while (item := asked.get()) is not None:
                try:
                    replies.put((ask(item), None))
                except BaseException as error:
                    replies.put((None, error))

        # Not a ThreadPoolExecutor: the interpreter waits for its threads, and a request may hang for minutes.
        threads = [threading.Thread(target=work, daemon=True) for _ in range(self.settings.concurrency)]
        for thread in threads:
            thread.start()
        running = 0
        try:
            while waiting or running:
                while waiting and running < len(threads):
                    asked.put(waiting.popleft())
                    running += 1
                reply, error = replies.get()
                running -= 1
                if error is not None:
                    raise error
                yield cast(Result, reply)
        finally:
            for _ in threads:
                asked.put(None)
            if running:
                self.stop()
            deadline = time.monotonic() + PARTING_SECONDS
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))

    def each(self, ask: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """ask(item) of each item, in their order; the first error ends all."""
        with closing(self.stream(lambda at: (at, ask(items[at])), deque(range(len(items))))) as replies:
            results = dict(replies)
        return [results[at] for at in range(len(items))]

    def summary(self) -> str:
        """A sentence on the requests so far."""
        faults = f" ({listed(self.counts, ' × ')})" if self.counts else ""
        return f"{self.requests} requests, {self.counts.total()} failed attempts{faults}"

    # ── models ──

    def served(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Each base URL, the name of the model to ask for, and what the server says about it.

        A gateway that lists no models passes where the recipe names the model: each reply names it too. Raises
        EndpointError where a server does not answer, or does not serve that model.
        """
        served, model = [], self.settings.model
        for url in self.settings.urls:
            models = self._models(url)
            if models is None:
                models = {} if model is None else {model: {}}
            names = ", ".join(name[:80] for name in list(models)[:5]) + (", …" if len(models) > 5 else "") or "none"
            if model not in models and (model is not None or len(models) != 1):
                what = (
                    f"serves {len(models)} models: {names}" if model is None else f"does not serve {model}, but {names}"
                )
                raise EndpointError(f"{url} {what}", f"name one of them in {self.section}.model, or correct its urls")
            name = model or next(iter(models))
            served.append((url, name, models[name]))
        if len({name for _, name, _ in served}) > 1:
            raise EndpointError(
                "the servers serve several models: " + ", ".join(f"{url} {name}" for url, name, _ in served),
                f"all must hold the same target under one name; name it: {self.section}.model",
            )
        return served

    def _models(self, url: str) -> dict[str, dict[str, Any]] | None:
        """The models that a server lists, by name; None where it lists none."""
        place, hint = f"{url}/models", f"start the server, or correct {self.section}.urls"
        seconds = min(CONNECT_SECONDS, self.settings.timeout)
        try:
            reply = self._repeated([place], lambda at: self._client.get(at, timeout=seconds), optional=True)
        except Refused as refusal:
            raise EndpointError(f"{place}: {refusal.reason}: {refusal.detail}", hint) from None
        except Unanswered as fault:
            raise EndpointError(f"{place} cannot be reached: {fault.reason} {fault.detail}".rstrip(), hint) from None
        entries = reply.get("data")
        if not isinstance(entries, list):
            return None
        return {str(entry["id"]): entry for entry in entries if isinstance(entry, dict) and "id" in entry}

    def stop(self) -> None:
        """Let no request be sent again."""
        self._closed.set()

    def close(self) -> None:
        """`stop`, and free the connections; safe to call twice."""
        self.stop()
        self._client.close()


def secret(variable: str, setting: str) -> str:
    """The value of an environment variable, which a `setting` names, for an HTTP header; EndpointError without one."""
    value = os.environ.get(variable, "").strip()
    if not value or not value.isascii() or not value.isprintable():
        fault = "is not set" if not value else "holds characters that no HTTP header can have"
        raise EndpointError(f"{setting}: the environment variable {variable} {fault}", f"export {variable}=…")
    return value


def delay_seconds(attempt: int, asked: float | None) -> float:
    """Seconds to wait after a failed attempt: doubled each time, spread by chance, and no less than the server asks."""
    delay = min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(attempt, 30)) * random.uniform(0.5, 1.0)
    return max(delay, min(asked or 0.0, LONGEST_ASKED))


def retry_after(value: str | None) -> float | None:
    """The seconds that a Retry-After header asks for, as a number or as a date; None for no header or another text."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        moment = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return max(0.0, (moment - datetime.datetime.now(datetime.UTC)).total_seconds())

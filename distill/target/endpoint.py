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

from distill.errors import EndpointError
from distill.files import parse_object
from distill.recipe import Servers

CONNECT_SECONDS = 10.0
FIRST_DELAY, LONGEST_DELAY, LONGEST_ASKED = 0.5, 60.0, 600.0  # seconds
AGAIN = {408, 425, 429}  # and 5xx
PARTING_SECONDS = 2.0  # for requests under way when the work ends early
SHOWN = 300  # characters of a server's message

Check = Callable[[dict[str, Any]], str | None]  # the fault of a reply that is to be asked for again
Item = TypeVar("Item")
Found = TypeVar("Found")


def _accept(found: dict[str, Any]) -> None:
    """The check that finds no fault."""


class Unusable(Exception):
    """A request without a reply: the reason, and what the server said about it, if anything."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


class Refused(Unusable):
    """The server would refuse this request again."""


class Unanswered(Unusable):
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
        value = os.environ.get(variable, "").strip()
        if not value or not value.isascii() or not value.isprintable():
            fault = "is not set" if not value else "holds characters that no HTTP header can have"
            raise EndpointError(
                f"{self.section}.{setting}: the environment variable {variable} {fault}", f"export {variable}=…"
            )
        self._secrets.append(value)
        return value

    def _shown(self, text: str) -> str:
        """A server's message on one line, without our secrets, which servers like to repeat."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:SHOWN]

    # ── requests ──

    def post(self, path: str, body: dict[str, Any], check: Check = _accept) -> dict[str, Any]:
        """The JSON object that a server replies with; requests begin at each URL in turn, further attempts at the next.

        Raises Refused, Unanswered after `retries` further attempts, and EndpointError where no request can succeed: a
        wrong key, an address without this API.
        """
        start, urls = next(self._turns), self.settings.urls
        places = [f"{urls[(start + number) % len(urls)]}/{path}" for number in range(len(urls))]
        return self._repeated(places, lambda place: self._client.post(place, json=body), check)

    def _repeated(
        self, places: Sequence[str], send: Callable[[str], httpx2.Response], check: Check, optional: bool = False
    ) -> dict[str, Any]:
        """`post` to places in turn; an empty object where an optional one does not exist."""
        reason = detail = ""
        with self._lock:
            self.requests += 1
        for attempt in range(self.settings.retries + 1):
            if self._closed.is_set():
                raise Unanswered("the client was closed")
            found, reason, detail, asked = self._attempt(places[attempt % len(places)], send, check, optional)
            if found is not None:
                return found
            with self._lock:
                self.counts[reason] += 1
            if attempt < self.settings.retries:
                self._closed.wait(delay_seconds(attempt, asked))
        raise Unanswered(reason, detail)

    def _attempt(
        self, place: str, send: Callable[[str], httpx2.Response], check: Check, optional: bool
    ) -> tuple[dict[str, Any] | None, str, str, float | None]:
        """A reply, or the reason to try again, the server's message and the seconds that it asks to wait."""
        try:
            response = send(place)
        except httpx2.TimeoutException:
            return None, "no reply in time", "", None
        except (httpx2.TransportError, httpx2.DecodingError):
            return None, "broken connection", "", None
        except RuntimeError:  # the client was closed meanwhile
            return None, "the client was closed", "", None
        status = response.status_code
        if optional and status in (404, 405):
            return {}, "", "", None
        if status in AGAIN or status >= 500:
            return None, f"status {status}", self._message(response), retry_after(response.headers.get("retry-after"))
        if status >= 300:
            raise self._refusal(place, status, response)
        found = parse_object(response.content)
        if isinstance(found, str):
            return None, "a reply that is no JSON object", "", None
        fault = check(found)
        return (found, "", "", None) if fault is None else (None, fault, "", None)

    def _refusal(self, place: str, status: int, response: httpx2.Response) -> Exception:
        """What a status below 500 means that is neither success nor a request to try again."""
        message, section = self._message(response), self.section
        if status in (401, 403):
            key = self.settings.key
            hint = f"correct the key in {key}" if key else f"name the variable that holds its key: {section}.key"
            return EndpointError(f"{place} refuses this client (status {status}): {message}", hint)
        if status < 400:
            return EndpointError(
                f"{place} points elsewhere (status {status})", f"give the URL that it points to in {section}.urls"
            )
        if status in (404, 405):
            return EndpointError(
                f"{place} gives no completions (status {status}): {message}",
                f"correct {section}.urls (most end with /v1) and {section}.model",
            )
        return Refused(f"status {status}", message)

    def _message(self, response: httpx2.Response) -> str:
        found = parse_object(response.content)
        error: Any = None
        if not isinstance(found, str):
            error = found.get("error", found.get("detail", found.get("message")))
        if isinstance(error, dict):
            error = error.get("message", error)
        return self._shown(str(error) if error else response.text) or "no message"

    def stream(self, ask: Callable[[Item], Found], waiting: deque[Item]) -> Generator[Found, None, None]:
        """ask(item) of each item that waits, in any order, `concurrency` at a time; more may be appended meanwhile.

        The first error ends all: no request is sent again, and those under way are left after a moment.
        """
        asked: SimpleQueue[Item | None] = SimpleQueue()
        replies: SimpleQueue[tuple[Found | None, BaseException | None]] = SimpleQueue()

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
                found, error = replies.get()
                running -= 1
                if error is not None:
                    raise error
                yield cast(Found, found)
        finally:
            for _ in threads:
                asked.put(None)
            if running:
                self.stop()
            deadline = time.monotonic() + PARTING_SECONDS
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))

    def each(self, ask: Callable[[Item], Found], items: Sequence[Item]) -> list[Found]:
        """ask(item) of each item, in their order; the first error ends all."""
        with closing(self.stream(lambda at: (at, ask(items[at])), deque(range(len(items))))) as replies:
            found = dict(replies)
        return [found[at] for at in range(len(items))]

    def summary(self) -> str:
        """A sentence on the requests so far."""
        faults = ", ".join(f"{count} × {reason}" for reason, count in sorted(self.counts.items()))
        return f"{self.requests} requests, {self.counts.total()} failed attempts" + (f" ({faults})" if faults else "")

    # ── models ──

    def served(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Each base URL, the name of the model to ask for, and what the server says about it.

        A gateway that lists no models passes where the recipe names the model: each reply names it too. Raises
        EndpointError where a server does not answer, or does not serve that model.
        """
        found = []
        for url in self.settings.urls:
            models, wanted = self._models(url), self.settings.model
            if wanted is not None and models is None:
                models = {wanted: {}}
            names = list(models or {})
            if wanted is None and len(names) != 1:
                raise EndpointError(
                    f"{url} serves {len(names)} models: {_listed(names)}", f"name one: {self.section}.model"
                )
            if wanted is not None and wanted not in names:
                raise EndpointError(
                    f"{url} does not serve {wanted}, but {_listed(names)}", f"correct {self.section}.model or urls"
                )
            found.append((url, wanted or names[0], (models or {})[wanted or names[0]]))
        if len({name for _, name, _ in found}) > 1:
            raise EndpointError(
                "the servers serve several models: " + ", ".join(f"{url} {name}" for url, name, _ in found),
                f"all must hold the same target under one name; name it: {self.section}.model",
            )
        return found

    def _models(self, url: str) -> dict[str, dict[str, Any]] | None:
        """What a server lists, by name; None where it has no such list."""
        place, hint = f"{url}/models", f"start the server, or correct {self.section}.urls"
        seconds = min(CONNECT_SECONDS, self.settings.timeout)
        try:
            found = self._repeated([place], lambda at: self._client.get(at, timeout=seconds), _accept, optional=True)
        except Refused as refusal:
            raise EndpointError(f"{place}: {refusal.reason}: {refusal.detail}", hint) from None
        except Unanswered as fault:
            raise EndpointError(f"{place} cannot be reached: {fault.reason} {fault.detail}".rstrip(), hint) from None
        listed = found.get("data")
        if not isinstance(listed, list):
            return None
        return {str(entry["id"]): entry for entry in listed if isinstance(entry, dict) and "id" in entry}

    def stop(self) -> None:
        """Let no request be sent again."""
        self._closed.set()

    def close(self) -> None:
        """`stop`, and free the connections; safe to call twice."""
        self.stop()
        self._client.close()


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


def _listed(names: list[str]) -> str:
    return ", ".join(name[:80] for name in names[:5]) + (", …" if len(names) > 5 else "") or "none"

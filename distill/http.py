"""HTTP client for all servers: writers of answers, sources of distributions, and servers under test.

Proxies come from the environment. Requests to this machine never use a proxy. A whole reply must arrive within
`seconds` and within a number of bytes. JSON replies are validated in full. The caller decides how often a failed
request is retried, with `retrying`. Timed requests are never retried. Messages contain no keys, headers or secrets of
URLs.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import ssl
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from queue import SimpleQueue
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import httpx2
import tenacity
from pydantic import BaseModel, ValidationError

from distill.errors import EndpointError, RecipeError, server_words
from distill.files import has_halves, parse_object

CONNECT_SECONDS = 10.0
FIRST_DELAY, LONGEST_DELAY, LONGEST_ASKED = 0.5, 60.0, 600.0  # seconds
RETRY_STATUSES = {408, 425, 429}  # and 5xx
KEYLESS = (401, 403)  # statuses of a request without the server's key
SMALL_REPLY = 2**24  # bytes of a reply whose size is not known from its request
EVENT = b"\ndata:"  # a space may follow
PARTING_SECONDS = 2.0  # for requests under way when the work ends early

Form = TypeVar("Form", bound=BaseModel)
Item = TypeVar("Item")
Result = TypeVar("Result")


class ReplyError(Exception):
    """A request without a usable reply: the reason, the server's words, the delay that it asks for, and the status of
    the reply (None without a reply)."""

    def __init__(
        self, reason: str, detail: str = "", wait_seconds: float | None = None, status: int | None = None
    ) -> None:
        super().__init__(reason)
        self.reason, self.detail, self.wait_seconds, self.status = reason, detail, wait_seconds, status


class Refused(ReplyError):
    """The server would refuse this request again."""


class Unanswered(ReplyError):
    """No usable reply came, and the next attempt may bring one."""


@dataclass(frozen=True)
class Received:
    """A reply of any status, `seconds` after its request. `started` and `times` are the moments of the request and of
    each `data: ` in the body (perf_counter)."""

    status: int
    content: bytes
    seconds: float
    started: float
    times: list[float]
    wait_seconds: float | None


class Deadline:
    """A time limit for the whole request within a `with` block. After `seconds` its connection is shut down.

    httpx's timeouts begin anew with each byte that a server sends, also within the headers.
    """

    def __init__(self, seconds: float) -> None:
        self.timer, self.stream, self.passed = threading.Timer(seconds, self._end), cast(Any, None), False
        self.timer.daemon = True

    def __enter__(self) -> None:
        self.timer.start()

    def __exit__(self, *_: object) -> None:
        self.timer.cancel()

    def note(self, event: str, info: Mapping[str, Any]) -> None:
        """Take the connection from httpcore's trace. With TLS, the second event has the wrapped connection."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            self.stream = info["return_value"]

    def _end(self) -> None:
        self.passed = True
        with contextlib.suppress(OSError, AttributeError):  # The connection has ended, or is not made yet.
            self.stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


class HttpClient:
    """Requests over up to `connections` connections. Threads may share the client.

    `key` names the environment variable with the server's key, and `setting` is its name in messages. The values of
    `headers` name environment variables, too. Raises EndpointError for a variable that the environment lacks.
    """

    def __init__(
        self,
        seconds: float,
        connections: int,
        key: str | None = None,
        setting: str = "key",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.seconds = seconds
        sent = {name: _secret(variable, f"headers.{name}") for name, variable in (headers or {}).items()}
        self._secrets = [*sent.values()]
        if key is not None:
            self._secrets.append(_secret(key, setting))
            sent["Authorization"] = f"Bearer {self._secrets[-1]}"
        # Each request gets a new connection. llama-server silently closes connections that streamed, and a request on
        # such a connection would break.
        limits = httpx2.Limits(max_connections=connections, max_keepalive_connections=0)
        timeout = httpx2.Timeout(seconds, connect=min(CONNECT_SECONDS, seconds))
        self._open = partial(httpx2.Client, headers=sent, timeout=timeout, limits=limits)
        self._clients: dict[bool, httpx2.Client] = {}  # by whether a client uses the environment's proxies

    def _client_of(self, url: str) -> httpx2.Client:
        """The client with or without proxies; EndpointError if the environment's proxy cannot be used."""
        proxied = not is_here(url)
        if proxied not in self._clients:
            try:
                client = self._open(trust_env=proxied, verify=_certificates(proxied))
                self._clients.setdefault(proxied, client)
            except (ImportError, ValueError, httpx2.InvalidURL) as error:
                raise EndpointError(
                    f"the proxy of the environment ({proxy_of(url) or 'HTTP_PROXY, ALL_PROXY'}) cannot be used: "
                    f"{str(error).partition('. ')[0]}",
                    "correct the variable, or unset it. A socks5 proxy needs `pip install socksio`",
                ) from error
        return self._clients[proxied]

    def send(self, url: str, body: dict[str, Any] | None = None, most_bytes: int = SMALL_REPLY) -> Received:
        """Return the reply to a GET, or to a POST of a body. Raise Unanswered without a whole reply of `most_bytes`."""
        client = self._client_of(url)
        parts: list[bytes] = []
        size = 0
        times, tail = list[float](), b"\n"
        deadline = Deadline(self.seconds)
        started = time.perf_counter()
        try:
            method, extensions = "GET" if body is None else "POST", {"trace": deadline.note}
            with deadline, client.stream(method, url, json=body, extensions=extensions) as response:
                for part in response.iter_bytes():
                    parts.append(part)
                    size += len(part)
                    if size > most_bytes:
                        raise Unanswered(f"a reply of more than {most_bytes} bytes")
                    tail += part
                    times += [time.perf_counter()] * tail.count(EVENT)
                    tail = tail[1 - len(EVENT) :]  # The next part may complete an event's name.
                wait_seconds = retry_after(response.headers.get("retry-after"))
            if deadline.passed:  # A reply without a length seems to end at the deadline.
                raise Unanswered("no reply in time")
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol):
            raise RecipeError(f"{url} is not the address of a server", "such as http://127.0.0.1:8080") from None
        except (httpx2.ConnectError, httpx2.ConnectTimeout):
            raise Unanswered("no connection") from None
        except httpx2.TimeoutException:
            raise Unanswered("no reply in time") from None
        except (httpx2.TransportError, httpx2.DecodingError):
            raise Unanswered("no reply in time" if deadline.passed else "broken connection") from None
        except RuntimeError:  # Another thread closed the client.
            raise Unanswered("the client was closed") from None
        seconds = time.perf_counter() - started
        return Received(response.status_code, b"".join(parts), seconds, started, times, wait_seconds)

    def words(self, content: bytes) -> str:
        """A server's message in a reply, without this client's secrets."""
        return server_words(content, self._secrets)

    def read(self, content: bytes, form: type[Form]) -> Form:
        """A JSON object of this form. Unanswered, with the server's words, for any other reply."""
        with contextlib.suppress(ValidationError):  # Nearly every reply is valid. Faults are examined below.
            return form.model_validate_json(content)
        parsed = parse_object(content, halves=True)
        if isinstance(parsed, str):
            raise Unanswered("a reply that is not a JSON object", self.words(content))
        if has_halves(parsed):  # U+FFFD replaces a character that the server cut.
            text = json.dumps(parsed, ensure_ascii=False).encode("utf-8", "surrogatepass")
            parsed = json.loads(text.decode("utf-8", "replace"))
        try:
            return form.model_validate(parsed)
        except ValidationError as error:
            place = error.errors(include_url=False, include_context=False)[0]["loc"][0]
            raise Unanswered(f"a reply without usable {place}", self.words(content)) from None

    def require_usable(self, received: Received) -> None:
        """Raise Unanswered for a status after which the same request may succeed later."""
        if received.status in RETRY_STATUSES or received.status >= 500:
            words = self.words(received.content)
            raise Unanswered(f"status {received.status}", words, received.wait_seconds, received.status)

    def close(self) -> None:
        """Free the connections; safe to call twice."""
        for client in self._clients.values():
            client.close()


@cache
def _certificates(from_environment: bool) -> ssl.SSLContext:
    """The certificates that servers are checked by. Reading them takes 25 ms, so all clients share them."""
    return httpx2.create_ssl_context(trust_env=from_environment)


def is_here(url: str) -> bool:
    """Whether an address is on this machine."""
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def proxy_of(url: str) -> str:
    """Scheme, host and port of the environment's proxy for an address, without its password. Empty without a proxy."""
    parts, proxies = urlsplit(url), urllib.request.getproxies()
    address = proxies.get(parts.scheme) or proxies.get("all") or ""
    if not address or is_here(url) or urllib.request.proxy_bypass(parts.hostname or ""):
        return ""
    scheme, _, rest = address.rpartition("://")
    return f"{scheme or 'http'}://{rest.rpartition('@')[2]}"


def proxy_hint(url: str) -> str:
    """Advice for a fault that the environment's proxy may have caused. Empty without a proxy."""
    proxy = proxy_of(url)
    return f"; the request went through the proxy {proxy}: NO_PROXY={urlsplit(url).hostname} avoids it" if proxy else ""


def _secret(variable: str, setting: str) -> str:
    """The value of an environment variable for an HTTP header. EndpointError, with the `setting`, without a value."""
    value = os.environ.get(variable, "").strip()
    if not value or not value.isascii() or not value.isprintable():
        fault = "is not set" if not value else "holds characters that no HTTP header can have"
        raise EndpointError(f"{setting}: the environment variable {variable} {fault}", f"export {variable}=…")
    return value


def delay_seconds(state: tenacity.RetryCallState) -> float:
    """Seconds to wait after a failed attempt: a random delay with a doubling limit, and at least the server's delay."""
    drawn = tenacity.wait_random_exponential(multiplier=FIRST_DELAY, max=LONGEST_DELAY)(state)
    fault = state.outcome.exception() if state.outcome is not None else None
    asked = fault.wait_seconds if isinstance(fault, ReplyError) else None
    return max(drawn, min(asked or 0.0, LONGEST_ASKED))


def retrying(retries: int, stop: threading.Event, note: Callable[[Unanswered], object]) -> tenacity.Retrying:
    """Call a function again after Unanswered, at most `retries` times and until `stop` is set. `note` gets each fault.

    The last fault is raised.
    """

    def after(state: tenacity.RetryCallState) -> None:
        fault = state.outcome.exception() if state.outcome is not None else None
        if isinstance(fault, Unanswered) and not stop.is_set():
            note(fault)

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(Unanswered),
        stop=tenacity.stop_after_attempt(retries + 1) | tenacity.stop_when_event_set(stop),
        wait=delay_seconds,
        sleep=tenacity.sleep_using_event(stop),
        after=after,
        reraise=True,
    )


def retry_after(value: str | None) -> float | None:
    """The seconds of a Retry-After header. None without a header, and for a date or another text."""
    return float(value) if value is not None and value.strip().isdecimal() else None


def at_once(
    ask: Callable[[Item], Result], waiting: deque[Item], count: int, stop: Callable[[], object]
) -> Generator[Result, None, None]:
    """Yield ask(item) for each waiting item, in any order, `count` at a time. More items may be appended.

    After the first error or the end of the caller, `stop` is called, and requests under way are abandoned after
    PARTING_SECONDS.
    """
    asked: SimpleQueue[Item | None] = SimpleQueue()
    replies: SimpleQueue[tuple[Result | None, BaseException | None]] = SimpleQueue()

    def work() -> None:
        while (item := asked.get()) is not None:
            try:
                replies.put((ask(item), None))
            except BaseException as error:
                replies.put((None, error))

    # The interpreter waits for the threads of a ThreadPoolExecutor, and a request may hang for minutes.
    threads: list[threading.Thread] = []
    running = 0
    try:
        while waiting or running:
            while waiting and running < count:
                if running == len(threads):
                    threads.append(threading.Thread(target=work, daemon=True))
                    threads[-1].start()
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
            stop()
        deadline = time.monotonic() + PARTING_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

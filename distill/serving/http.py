"""Requests to a server under test: one greedy completion at a time, streamed and timed, and one message for each fault.

Nothing here sends a request again: a failed one is a finding, not noise.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx2

from distill.errors import RecipeError, ServingError, server_words
from distill.files import parse_object
from distill.teacher.endpoint import secret

CONNECT_SECONDS = 10.0
CONNECTIONS = 256
KEYLESS = (401, 403)  # statuses of a request without the server's key


class Timing(NamedTuple):
    """Seconds of a streamed reply until its first event and until its end, and the moments of request and events."""

    first_seconds: float
    seconds: float
    started: float
    times: list[float]


class Http:
    """Requests to one address; threads may share it.

    `seconds` are those that a reply may take. `death` says how the server's process ended and shows its last lines,
    None while it runs or where it is not ours. `key` names the environment variable that holds the server's key.
    """

    def __init__(
        self, url: str, seconds: float, key: str | None = None, death: Callable[[], str | None] = lambda: None
    ) -> None:
        self.url, self.seconds, self.death = url.rstrip("/").removesuffix("/v1"), seconds, death
        self._key = "" if key is None else secret(key, "--key")
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            # A connection for each request: llama-server closes those that streamed, without a word, and one that is
            # taken again then breaks.
            self.client = httpx2.Client(
                base_url=self.url,
                headers=headers,
                trust_env=False,
                timeout=httpx2.Timeout(seconds, connect=min(CONNECT_SECONDS, seconds)),
                limits=httpx2.Limits(max_connections=CONNECTIONS, max_keepalive_connections=0),
            )
        except httpx2.InvalidURL:
            raise RecipeError(f"{url} is not the address of a server", "such as http://127.0.0.1:8080") from None

    def get(self, path: str) -> httpx2.Response:
        """A reply of any status; ServingError where none comes."""
        with self._explained():
            return self.client.get(path)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON object that the server replies with; ServingError for anything else."""
        with self._explained():
            response = self.client.post(path, json=body)
        if response.status_code != 200:
            raise self.refused(path, response.status_code, response.content)
        return self._object(path, response.content)

    def stream(self, path: str, body: dict[str, Any]) -> tuple[list[dict[str, Any]], Timing]:
        """The events of a streamed reply.

        Events are parsed after the last one, so that this client takes little time from a server on the same machine.
        """
        parts: list[bytes] = []
        times: list[float] = []
        started = time.perf_counter()
        with self._explained(), self.client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise self.refused(path, response.status_code, response.read())
            for part in response.iter_raw():
                parts.append(part)
                times += [time.perf_counter()] * part.count(b"data: ")
        seconds = time.perf_counter() - started
        events = []
        whole = b"".join(parts)
        for line in whole.splitlines():
            name, colon, value = line.partition(b": ")
            if not colon or value.strip() == b"[DONE]" or name not in (b"data", b"error"):
                continue
            event = self._object(path, value)
            if name == b"error" or "error" in event:
                raise self.refused(path, 200, value)
            events.append(event)
        if not events:
            raise self.unreadable(path, whole)
        return events, Timing(times[0] - started if times else seconds, seconds, started, times)

    def object(self, path: str, optional: bool = True) -> dict[str, Any]:
        """The JSON object at a path; of an optional one empty where there is none. ServingError for a missing key."""
        response = self.get(path)
        if response.status_code in KEYLESS or (response.status_code != 200 and not optional):
            raise self.refused(path, response.status_code, response.content)
        found = parse_object(response.content) if response.status_code == 200 else {}
        return {} if isinstance(found, str) else found

    def _object(self, path: str, content: bytes) -> dict[str, Any]:
        found = parse_object(content)
        if isinstance(found, str):
            raise self.unreadable(path, content)
        return found

    def words(self, content: bytes) -> str:
        """What the server says in a reply, without its key."""
        return server_words(content, [self._key])

    def unreadable(self, path: str, content: bytes) -> ServingError:
        """The fault of a reply whose form is none of llama-server's or vLLM's."""
        return ServingError(
            f"{self.url}{path} sent a reply that is neither llama-server's nor vLLM's: {self.words(content)}",
            "is this the address of llama-server or vLLM (--url), and its --kind?",
        )

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise the faults of a request as ServingError."""
        try:
            yield
        except httpx2.ConnectTimeout:
            raise ServingError(f"{self.url} cannot be reached", "start the server, or correct --url") from None
        except httpx2.TimeoutException:
            raise ServingError(
                f"{self.url} did not answer within {self.seconds:g} s",
                "ask for fewer --tokens, or wait longer (--reply-seconds)",
            ) from None
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol):
            raise RecipeError(f"{self.url} is not the address of a server", "such as http://127.0.0.1:8080") from None
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            raise self._broken(error) from None

    def _broken(self, error: Exception) -> ServingError:
        for _ in range(20):  # a process that was killed is known to be dead a moment later
            death = self.death()
            if death is not None:
                return ServingError(f"the server died under a request: {death}", "see why in its last lines")
            time.sleep(0.01)
        if isinstance(error, httpx2.ConnectError):
            return ServingError(f"{self.url} cannot be reached", "start the server, or correct --url")
        return ServingError(f"{self.url} broke the connection under a request", "see its log: it may have died")

    def refused(self, path: str, status: int, content: bytes) -> ServingError:
        """The fault of a request that the server did not take, in its own words."""
        text, hint = self.words(content), "see the server's log"
        if status in KEYLESS:
            hint = "name the environment variable that holds its key: --key NAME"
        elif status == 404:
            hint = "is this the address of llama-server or vLLM (--url), and its --kind?"
        elif "context" in text or "max_model_len" in text:
            hint = "give shorter prompts, fewer --tokens, or start the server with a larger context"
        return ServingError(f"{self.url}{path} refused a request (status {status}): {text}", hint)

    def close(self) -> None:
        """Free the connections."""
        self.client.close()

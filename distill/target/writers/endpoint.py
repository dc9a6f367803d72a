"""Servers with OpenAI's API: several base URLs, keys from the environment, and requests that are sent again.

Nothing here puts a key, a header or a URL's secrets into a message.
"""

from __future__ import annotations

import datetime
import email.utils
import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import httpx2

from distill.errors import EndpointError
from distill.recipe import Writer

CONNECT_SECONDS = 10.0
FIRST_DELAY, LONGEST_DELAY, LONGEST_ASKED = 0.5, 60.0, 600.0  # seconds
AGAIN = {408, 425, 429}  # and 5xx
SHOWN = 200  # characters of a server's message

Check = Callable[[dict[str, Any]], str | None]  # the fault of a reply that is to be asked for again


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
    """The servers of a recipe. Threads may share it; `counts` are the attempts that failed, by reason.

    Raises EndpointError for a key or header that the environment lacks.
    """

    def __init__(self, settings: Writer) -> None:
        self.settings = settings
        self.counts: Counter[str] = Counter()
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
                f"answers.writer.{setting}: the environment variable {variable} {fault}", f"export {variable}=…"
            )
        self._secrets.append(value)
        return value

    def _shown(self, text: str) -> str:
        """A server's message on one line, without our secrets, which servers like to repeat."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:SHOWN]

    # ── requests ──

    def post(self, path: str, body: dict[str, Any], check: Check, first: int = 0) -> dict[str, Any]:
        """The JSON object that a server replies with; attempt i goes to URL number `first` + i.

        Raises Refused, Unanswered after `retries` further attempts, and EndpointError where no request can succeed: a
        wrong key, an address without this API.
        """
        urls, reason, detail = self.settings.urls, "", ""
        for attempt in range(self.settings.retries + 1):
            if self._closed.is_set():
                raise Unanswered("the writer was closed")
            url = urls[(first + attempt) % len(urls)]
            found, reason, detail, asked = self._attempt(url, path, body, check)
            if found is not None:
                return found
            with self._lock:
                self.counts[reason] += 1
            if attempt < self.settings.retries:
                self._closed.wait(delay_seconds(attempt, asked))
        raise Unanswered(reason, detail)

    def _attempt(
        self, url: str, path: str, body: dict[str, Any], check: Check
    ) -> tuple[dict[str, Any] | None, str, str, float | None]:
        """A reply, or the reason to try again, the server's message and the seconds that it asks to wait."""
        try:
            response = self._client.post(f"{url}/{path}", json=body)
        except httpx2.TimeoutException:
            return None, "no reply in time", "", None
        except (httpx2.TransportError, httpx2.DecodingError):
            return None, "broken connection", "", None
        except RuntimeError:  # the client was closed meanwhile
            return None, "the writer was closed", "", None
        status = response.status_code
        if status in AGAIN or status >= 500:
            return None, f"status {status}", self._message(response), retry_after(response.headers.get("retry-after"))
        if status >= 300:
            raise self._refusal(url, path, status, response)
        found = _object(response)
        fault = "a reply that is no JSON object" if found is None else check(found)
        return (None, fault, "", None) if fault is not None else (found, "", "", None)

    def _refusal(self, url: str, path: str, status: int, response: httpx2.Response) -> Exception:
        """What a status below 500 means that is neither success nor a request to try again."""
        message = self._message(response)
        if status in (401, 403):
            key = self.settings.key
            hint = f"correct the key in {key}" if key else "name the variable that holds its key: answers.writer.key"
            return EndpointError(f"{url} refuses this client (status {status}): {message}", hint)
        if status < 400 or status in (404, 405):
            return EndpointError(
                f"{url}/{path} gives no completions (status {status}): {message}",
                "correct answers.writer.urls (most end with /v1) and answers.writer.model",
            )
        return Refused(f"status {status}", message)

    def _message(self, response: httpx2.Response) -> str:
        found = _object(response) or {}
        error = found.get("error", found.get("detail", found.get("message")))
        if isinstance(error, dict):
            error = error.get("message", error)
        return self._shown(str(error) if error else response.text) or "no message"

    # ── models ──

    def served(self) -> list[tuple[str, str]]:
        """Each base URL with the name of the model to ask for.

        Raises EndpointError where a server does not answer, or does not serve that model.
        """
        found = []
        for url in self.settings.urls:
            names = self._models(url)
            wanted = self.settings.model
            if wanted is None and len(names) != 1:
                raise EndpointError(
                    f"{url} serves {len(names)} models: {_listed(names)}", "name one: answers.writer.model"
                )
            if wanted is not None and wanted not in names:
                raise EndpointError(
                    f"{url} does not serve {wanted}, but {_listed(names)}", "correct answers.writer.model or urls"
                )
            found.append((url, wanted or names[0]))
        if len({name for _, name in found}) > 1:
            raise EndpointError(
                "the servers serve several models: " + ", ".join(f"{url} {name}" for url, name in found),
                "all must hold the same target under one name; name it: answers.writer.model",
            )
        return found

    def _models(self, url: str) -> list[str]:
        hint = "start the server, or correct answers.writer.urls"
        try:
            response = self._client.get(f"{url}/models", timeout=CONNECT_SECONDS)
        except httpx2.TimeoutException:
            raise EndpointError(f"{url}/models gives no reply within {CONNECT_SECONDS:g} seconds", hint) from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise EndpointError(f"{url} cannot be reached: {self._shown(str(error))}", hint) from None
        if response.status_code != 200:
            refusal = self._refusal(url, "models", response.status_code, response)
            if isinstance(refusal, EndpointError):
                raise refusal
            raise EndpointError(f"{url}/models: {refusal}", hint)
        listed = (_object(response) or {}).get("data")
        if not isinstance(listed, list):
            raise EndpointError(f"{url}/models gives no list of models", "is this a server with OpenAI's API?")
        return [str(entry["id"]) for entry in listed if isinstance(entry, dict) and "id" in entry]

    def stop(self) -> None:
        """Let no request be sent again."""
        self._closed.set()

    def close(self) -> None:
        """`stop`, and free the connections; safe to call twice."""
        self.stop()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


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


def _object(response: httpx2.Response) -> dict[str, Any] | None:
    try:
        found = response.json()
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _listed(names: list[str]) -> str:
    return ", ".join(name[:80] for name in names[:5]) + (", …" if len(names) > 5 else "") or "none"

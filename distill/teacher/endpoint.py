"""Servers with OpenAI's API that run a target: several base URLs in turn, one model, requests that are sent again."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any

from pydantic import BaseModel

from distill.data.samples import listed
from distill.errors import EndpointError
from distill.http import (
    KEYLESS,
    Form,
    HttpClient,
    Item,
    Received,
    Refused,
    Result,
    Unanswered,
    at_once,
    delay_seconds,
)
from distill.recipe.target import Servers

ABSENT = (404, 405)  # statuses of an address that is not there


class ModelEntry(BaseModel):
    """A model that a server lists; vLLM tells its context."""

    id: str
    max_model_len: int | None = None


class Models(BaseModel):
    """What /v1/models lists; `data` is None where a gateway lists none."""

    data: list[ModelEntry] | None = None


class FromModel(BaseModel):
    """A reply that may name the model that it comes from."""

    model: str | None = None


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
        self._client = HttpClient(
            settings.timeout, settings.concurrency, settings.key, f"{section}.key", settings.headers
        )

    # ── requests ──

    def post(self, path: str, body: dict[str, Any], form: type[Form]) -> Form:
        """A server's reply, of this form; requests begin at each URL in turn, further attempts at the next.

        Raises Refused, Unanswered after `retries` further attempts, and EndpointError where no request can succeed: a
        wrong key, an address without this API, a server of another model than `body` names.
        """
        start, urls = next(self._turns), self.settings.urls
        places = [f"{urls[(start + number) % len(urls)]}/{path}" for number in range(len(urls))]

        def read(place: str, received: Received) -> Form:
            if received.status >= 300:
                raise self._refusal(place, received)
            model = self._client.read(received.content, FromModel).model or body["model"]
            if model != body["model"]:
                raise EndpointError(
                    f"a server answers for the model {model[:80]}, and {body['model']} was asked",
                    f"all servers of {self.section}.urls must hold the same target under one name",
                )
            return self._client.read(received.content, form)

        return self._repeated(places, body, read)

    def _repeated(
        self, places: Sequence[str], body: dict[str, Any] | None, read: Callable[[str, Received], Result]
    ) -> Result:
        """What is read of the reply of the places in turn, the first that one of them gives."""
        with self._lock:
            self.requests += 1
        for attempt in range(self.settings.retries + 1):
            if self._closed.is_set():
                raise Unanswered("the client was closed")
            place = places[attempt % len(places)]
            try:
                received = self._client.send(place, body)
                self._client.require_usable(received)
                return read(place, received)
            except Unanswered as error:
                fault = error
            with self._lock:
                self.counts[fault.reason] += 1
            if attempt < self.settings.retries:
                self._closed.wait(delay_seconds(attempt, fault.wait_seconds))
        raise fault

    def _refusal(self, place: str, received: Received) -> Exception:
        """The error for a status below 500 that is neither a success nor tried again."""
        status, message, section = received.status, self._client.words(received.content), self.section
        if status in KEYLESS:
            key = self.settings.key
            hint = f"correct the key in {key}" if key else f"name the variable that holds its key: {section}.key"
            return EndpointError(f"{place} refuses this client (status {status}): {message}", hint)
        if status < 400 or status in ABSENT:
            return EndpointError(
                f"{place} gives no completions (status {status}): {message}",
                f"correct {section}.urls (most end with /v1; of a redirect, where it leads to) and {section}.model",
            )
        return Refused(f"status {status}", message)

    def stream(self, ask: Callable[[Item], Result], waiting: deque[Item]) -> Generator[Result, None, None]:
        """ask(item) of each item that waits, `concurrency` at a time, as of `at_once`."""
        return at_once(ask, waiting, self.settings.concurrency, self._closed.set)

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

    def served(self) -> list[tuple[str, str, int | None]]:
        """Each base URL, the name of the model to ask for, and its context where the server tells it.

        A gateway that lists no models passes where the recipe names the model: each reply names it too. Raises
        EndpointError where a server does not answer, or does not serve that model.
        """
        served, model = [], self.settings.model
        for url in self.settings.urls:
            listing = self._models(url)
            models = {one.id: one.max_model_len for one in listing or ()}
            if listing is None and model is not None:
                models = {model: None}
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

    def _models(self, url: str) -> list[ModelEntry] | None:
        """The models that a server lists; None where it lists none."""

        def read(place: str, received: Received) -> list[ModelEntry] | None:
            if received.status in ABSENT:
                return None
            if received.status >= 300:
                raise self._refusal(place, received)
            return self._client.read(received.content, Models).data

        place, hint = f"{url}/models", f"start the server, or correct {self.section}.urls"
        try:
            return self._repeated([place], None, read)
        except Refused as refusal:
            raise EndpointError(f"{place}: {refusal.reason}: {refusal.detail}", hint) from None
        except Unanswered as fault:
            raise EndpointError(f"{place} cannot be reached: {fault.reason} {fault.detail}".rstrip(), hint) from None

    def close(self) -> None:
        """Let no request be sent again, and free the connections; safe to call twice."""
        self._closed.set()
        self._client.close()

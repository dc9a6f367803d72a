"""Servers with OpenAI's API that run a target: several base URLs in turn, one model, requests that are sent again."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from distill.errors import EndpointError
from distill.files import read_json, write_json
from distill.http import KEYLESS, HttpClient, Item, Received, Refused, Result, Unanswered, at_once, delay_seconds
from distill.recipe.target import Servers

ABSENT = (404, 405)  # statuses of an address that is not there


class ModelEntry(BaseModel):
    """A model that a server lists; vLLM tells its context and where it comes from, llama-server its size."""

    id: str
    max_model_len: int | None = None
    root: str | None = None
    meta: dict[str, Any] | None = None

    @property
    def identity(self) -> list[Any]:
        """What tells it from another model."""
        return [self.id, self.root, *((self.meta or {}).get(name) for name in ("n_params", "size"))]


class Models(BaseModel):
    """What /v1/models lists; `data` is None where a gateway lists none."""

    data: list[ModelEntry] | None = None


class FromModel(BaseModel):
    """A reply that may name the model that it comes from."""

    model: str | None = None


Reply = TypeVar("Reply", bound=FromModel)


FIRST, WINDOW, GROWTH = 8, 4, 1.1  # requests at once; replies to each that are timed; of the throughput


class Rising:
    """How many requests are under way at once: 8 at first, then twice as many as long as that raises the tokens per
    second by a tenth, `most` at most."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.count, self.most, self._clock = min(FIRST, most), most, clock
        self._best, self._replies, self._tokens, self._began = 0.0, 0, 0, clock()

    def note(self, tokens: int) -> None:
        """A reply of this many tokens came."""
        self._replies, self._tokens = self._replies + 1, self._tokens + tokens
        if self.count == self.most or self._replies < WINDOW * self.count:
            return
        rate = self._tokens / max(1e-9, self._clock() - self._began)
        if rate < GROWTH * self._best:
            self.most = self.count = self.count // 2
            return
        self._best, self.count = rate, min(2 * self.count, self.most)
        self._replies, self._tokens, self._began = 0, 0, self._clock()


class Endpoint:
    """The servers of a recipe's section, such as `answers.writer`, which messages name. Threads may share it.

    `counts` has the attempts that failed, by reason. Raises EndpointError for a key or
    header that the environment lacks.
    """

    def __init__(self, settings: Servers, section: str) -> None:
        self.settings, self.section = settings, section
        self.rising = Rising(settings.concurrency)
        self.identities: list[list[Any]] = []  # of the servers' models, once `served` has asked
        self.counts: Counter[str] = Counter()
        self._turns = itertools.count()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._client = HttpClient(
            settings.timeout, settings.concurrency, settings.key, f"{section}.key", settings.headers
        )

    # ── requests ──

    def post(self, path: str, body: dict[str, Any], form: type[Reply]) -> Reply:
        """A server's reply, of this form; requests begin at each URL in turn, further attempts at the next.

        Raises Refused, Unanswered after `retries` further attempts, and EndpointError where no request can succeed: a
        wrong key, an address without this API, a server of another model than `body` names.
        """
        start, urls = next(self._turns), self.settings.urls
        places = [f"{urls[(start + number) % len(urls)]}/{path}" for number in range(len(urls))]

        def read(place: str, received: Received) -> Reply:
            if received.status >= 300:
                raise self._refusal(place, received)
            found = self._client.read(received.content, form)
            if found.model not in (None, "", body["model"]):
                raise EndpointError(
                    f"a server answers for the model {str(found.model)[:80]}, and {body['model']} was asked",
                    f"all servers of {self.section}.urls must hold the same target under one name",
                )
            return found

        return self._repeated(places, body, read)

    def _repeated(
        self, places: Sequence[str], body: dict[str, Any] | None, read: Callable[[str, Received], Result]
    ) -> Result:
        """What is read of the reply of the places in turn, the first that one of them gives."""
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

    def stream(
        self, ask: Callable[[Item], Result], waiting: deque[Item], tokens: Callable[[Result], int]
    ) -> Generator[Result, None, None]:
        """ask(item) of each item that waits, as of `at_once`, as many at a time as `rising` says of their tokens."""
        with closing(at_once(ask, waiting, lambda: self.rising.count, self._closed.set)) as replies:
            for reply in replies:
                self.rising.note(tokens(reply))
                yield reply

    def each(self, ask: Callable[[Item], Result], items: Sequence[Item], tokens: Callable[[Item], int]) -> list[Result]:
        """ask(item) of each item, in their order; the first error ends all."""
        waiting = deque(range(len(items)))
        with closing(
            self.stream(lambda at: (at, ask(items[at])), waiting, lambda one: tokens(items[one[0]]))
        ) as replies:
            results = dict(replies)
        return [results[at] for at in range(len(items))]

    # ── models ──

    def served(self) -> list[tuple[str, str, int | None]]:
        """Each base URL, the name of the model to ask for, and its context where the server tells it.

        A gateway that lists no models passes where the recipe names the model: each reply names it too. Raises
        EndpointError where a server does not answer, or does not serve that model.
        """
        served, model = [], self.settings.model
        for url in self.settings.urls:
            listing = self._models(url)
            self.identities += [one.identity for one in listing or () if model in (None, one.id)]
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

    def require_same(self, folder: Path) -> None:
        """Note in a stage's folder which model the servers have; EndpointError where what is there is another's."""
        path, found = folder / ".served.json", sorted({json.dumps(one) for one in self.identities})
        known: list[str] = read_json(path, [str]) if path.exists() else []
        if not known and found:
            write_json(path, found)
        elif not {*found} <= {*known}:
            raise EndpointError(
                f"{self.section}.urls serve {', '.join(found)}, and what is in {folder} comes from {', '.join(known)} "
                "(name, origin, parameters, bytes)",
                f"serve that model again; for the same weights by another name delete {path}; or --redo {folder.name}",
            )

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

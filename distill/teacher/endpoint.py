"""Servers with OpenAI's API that run a target: several base URLs in turn, one model, and retries."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from distill.devices import process_index
from distill.errors import EndpointError
from distill.files import read_json, write_json
from distill.http import (
    KEYLESS,
    SMALL_REPLY,
    HttpClient,
    Item,
    Received,
    Refused,
    Result,
    Unanswered,
    at_once,
    proxy_hint,
    retrying,
)
from distill.recipe.target import Servers

ABSENT = (404, 405)  # statuses of an address that does not exist
ENTRY_BYTES = 512  # A token of a reply takes less on average, with its text, its bytes and its log-probability.


def reply_bytes(tokens: int, entries: int = 0) -> int:
    """The most bytes of a reply of `tokens` tokens, with the log-probabilities of `entries` tokens at each."""
    return SMALL_REPLY + ENTRY_BYTES * tokens * (1 + entries)


class ModelEntry(BaseModel):
    """A model in a server's list. `owned_by` is the kind of server. vLLM adds its context, llama-server its size."""

    id: str
    owned_by: str | None = None
    max_model_len: int | None = None
    root: str | None = None
    meta: dict[str, Any] | None = None

    @property
    def identity(self) -> list[Any]:
        """The values that differ between models."""
        return [self.id, self.root, *((self.meta or {}).get(name) for name in ("n_params", "size"))]


class Models(BaseModel):
    """The reply of /v1/models. `data` is None for a gateway without a list."""

    data: list[ModelEntry] | None = None


class FromModel(BaseModel):
    """A reply that may name its model."""

    model: str | None = None


Reply = TypeVar("Reply", bound=FromModel)


class Endpoint:
    """The servers of a recipe's section, such as `answers.writer`. Threads may share an endpoint.

    `counts` has the failed attempts by reason. Raises EndpointError for a key or header that the environment lacks.
    """

    def __init__(self, settings: Servers, section: str) -> None:
        self.settings, self.section = settings, section
        self.identities: list[list[Any]] = []  # those of the servers' models, after `served`
        self.owners: set[str | None] = set()  # the kinds of servers, after `served`
        self.counts: Counter[str] = Counter()
        self._turns = itertools.count()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._client = HttpClient(
            settings.timeout, settings.connections, settings.key, f"{section}.key", settings.headers
        )
        self._retrying = retrying(settings.retries, self._closed, self._note)

    # ── requests ──

    def post(
        self,
        path: str,
        body: dict[str, Any],
        form: type[Reply],
        most_bytes: int = SMALL_REPLY,
        start: int | None = None,
    ) -> Reply:
        """A server's reply in the form `form`.

        Requests begin at each URL in turn, or at number `start`, and retries go to the next URL. A path with a leading
        / begins at the server's root instead of the URL. Raises Refused, and Unanswered after `retries` retries. Raises
        EndpointError for a wrong key, an address without this API, and a reply of another model than `body` names.
        """
        urls = [url.removesuffix("/v1") if path.startswith("/") else f"{url}/" for url in self.settings.urls]
        first = next(self._turns) if start is None else start
        places = [f"{urls[(first + number) % len(urls)]}{path}" for number in range(len(urls))]

        def read(place: str, received: Received) -> Reply:
            if received.status >= 300:
                raise self._refusal(place, received)
            reply = self._client.read(received.content, form)
            if "model" in body and reply.model not in (None, "", body["model"]):
                raise EndpointError(
                    f"a server answers for the model {str(reply.model)[:80]}, and {body['model']} was asked",
                    f"all servers of {self.section}.urls must hold the same target under one name",
                )
            return reply

        return self._repeated(places, body, read, most_bytes)

    def _repeated(
        self,
        places: Sequence[str],
        body: dict[str, Any] | None,
        read: Callable[[str, Received], Result],
        most_bytes: int = SMALL_REPLY,
    ) -> Result:
        """Return the first usable reply, as `read` gives it. Attempts go to the places in turn."""
        turns = itertools.cycle(places)

        def attempt() -> Result:
            if self._closed.is_set():
                raise Unanswered("the client was closed")
            place = next(turns)
            received = self._client.send(place, body, most_bytes)
            self._client.require_usable(received)
            return read(place, received)

        return self._retrying(attempt)

    def _note(self, fault: Unanswered) -> None:
        with self._lock:
            self.counts[fault.reason] += 1

    def _refusal(self, place: str, received: Received) -> Exception:
        """The error for a status below 500 that is no success and is not retried."""
        status, message, section = received.status, self._client.words(received.content), self.section
        if status in KEYLESS:
            key = self.settings.key
            hint = f"correct the key in {key}" if key else f"name the variable that holds its key: {section}.key"
            return EndpointError(
                f"{place} refuses this client (status {status}): {message}", f"{hint}{proxy_hint(place)}"
            )
        if status < 400 or status in ABSENT:
            return EndpointError(
                f"{place} gives no completions (status {status}): {message}",
                f"correct {section}.urls (most end with /v1; of a redirect, where it leads to) and {section}.model"
                f"{proxy_hint(place)}",
            )
        return Refused(f"status {status}", message)

    def stream(self, ask: Callable[[Item], Result], waiting: deque[Item]) -> Generator[Result, None, None]:
        """Yield ask(item) of each waiting item in any order, `connections` at a time. Items may be appended."""
        return at_once(ask, waiting, self.settings.connections, self._closed.set)

    def each(self, ask: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """ask(item) of each item, in order. The first error ends all requests."""
        waiting = deque(range(len(items)))
        with closing(self.stream(lambda at: (at, ask(items[at])), waiting)) as replies:
            results = dict(replies)
        return [results[at] for at in range(len(items))]

    # ── models ──

    def served(self) -> list[tuple[str, str, int | None]]:
        """Each base URL, the name of its model, and the model's context if the server tells it.

        A gateway without a list of models passes if the recipe names the model, because replies name it too. Raises
        EndpointError for a server that does not answer, or does not serve that model.
        """
        served, model = [], self.settings.model
        for url in self.settings.urls:
            listing = self._models(url)
            wanted = [entry for entry in listing or () if model in (None, entry.id)]
            self.identities += [entry.identity for entry in wanted]
            self.owners |= {entry.owned_by for entry in wanted} or {None}
            models = {entry.id: entry.max_model_len for entry in listing or ()}
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
        """Note the servers' model in a stage's folder. Raises EndpointError if the folder's files are of another model.

        Only the main process writes.
        """
        path, present = folder / ".served.json", sorted({json.dumps(identity) for identity in self.identities})
        known: list[str] = read_json(path, [str]) if path.exists() else []
        if not known:
            if present and process_index() == 0:
                write_json(path, present)
        elif not {*present} <= {*known}:
            raise EndpointError(
                f"{self.section}.urls serve {', '.join(present)}, and the files in {folder} come from "
                f"{', '.join(known)} (name, origin, parameters, bytes)",
                f"serve that model again; for the same weights by another name delete {path}; or --redo {folder.name}",
            )

    def _models(self, url: str) -> list[ModelEntry] | None:
        """The models in a server's list; None for a server without a list."""

        def read(place: str, received: Received) -> list[ModelEntry] | None:
            if received.status in ABSENT:
                return None
            if received.status >= 300:
                raise self._refusal(place, received)
            return self._client.read(received.content, Models).data

        place = f"{url}/models"
        hint = f"start the server, or correct {self.section}.urls{proxy_hint(url)}"
        try:
            return self._repeated([place], None, read)
        except Refused as refusal:
            raise EndpointError(f"{place}: {refusal.reason}: {refusal.detail}", hint) from None
        except Unanswered as fault:
            raise EndpointError(f"{place} cannot be reached: {fault.reason} {fault.detail}".rstrip(), hint) from None

    def close(self) -> None:
        """Stop retries and free the connections. May be called twice."""
        self._closed.set()
        self._client.close()

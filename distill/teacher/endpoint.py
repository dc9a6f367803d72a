"""Servers with OpenAI's API that run a target: several base URLs in turn, one model, requests that are sent again."""

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

ABSENT = (404, 405)  # statuses of an address that is not there
ENTRY_BYTES = 512  # at most, on average, of a token in a reply: its text, its bytes as numbers, its log-probability


def reply_bytes(tokens: int, entries: int = 0) -> int:
    """The most bytes of a reply that has so many tokens, with the log-probabilities of `entries` tokens at each."""
    return SMALL_REPLY + ENTRY_BYTES * tokens * (1 + entries)


class ModelEntry(BaseModel):
    """A model that a server lists; vLLM tells its context and where it comes from, llama-server its size. `owned_by`
    is the kind of server."""

    id: str
    owned_by: str | None = None
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


class Endpoint:
    """The servers of a recipe's section, such as `answers.writer`, which messages name. Threads may share it.

    `counts` has the attempts that failed, by reason. Raises EndpointError for a key or
    header that the environment lacks.
    """

    def __init__(self, settings: Servers, section: str) -> None:
        self.settings, self.section = settings, section
        self.identities: list[list[Any]] = []  # of the servers' models, once `served` has asked
        self.owners: set[str | None] = set()  # the kinds of servers, once `served` has asked
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
        """A server's reply, of this form; requests begin at each URL in turn, or at number `start`, and further
        attempts go to the next. A path with a leading / begins at the server's root, not at the URL.

        Raises Refused, Unanswered after `retries` further attempts, and EndpointError where no request can succeed: a
        wrong key, an address without this API, a server of another model than `body` names.
        """
        urls = [url.removesuffix("/v1") if path.startswith("/") else f"{url}/" for url in self.settings.urls]
        first = next(self._turns) if start is None else start
        places = [f"{urls[(first + number) % len(urls)]}{path}" for number in range(len(urls))]

        def read(place: str, received: Received) -> Reply:
            if received.status >= 300:
                raise self._refusal(place, received)
            found = self._client.read(received.content, form)
            if "model" in body and found.model not in (None, "", body["model"]):
                raise EndpointError(
                    f"a server answers for the model {str(found.model)[:80]}, and {body['model']} was asked",
                    f"all servers of {self.section}.urls must hold the same target under one name",
                )
            return found

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
        """The error for a status below 500 that is neither a success nor tried again."""
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
        """ask(item) of each item that waits, in any order, `connections` at a time; more may be appended."""
        return at_once(ask, waiting, self.settings.connections, self._closed.set)

    def each(self, ask: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """ask(item) of each item, in their order; the first error ends all."""
        waiting = deque(range(len(items)))
        with closing(self.stream(lambda at: (at, ask(items[at])), waiting)) as replies:
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
            own = [one for one in listing or () if model in (None, one.id)]
            self.identities += [one.identity for one in own]
            self.owners |= {one.owned_by for one in own} or {None}
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
        """Note in a stage's folder which model the servers have; EndpointError where what is there is another's.

        Of several processes, only the main one writes.
        """
        path, found = folder / ".served.json", sorted({json.dumps(one) for one in self.identities})
        known: list[str] = read_json(path, [str]) if path.exists() else []
        if not known:
            if found and process_index() == 0:
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

        place = f"{url}/models"
        hint = f"start the server, or correct {self.section}.urls{proxy_hint(url)}"
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

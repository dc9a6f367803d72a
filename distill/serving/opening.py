"""Clients of servers that are started here for as long as they are needed, or that already run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from distill.errors import ServingError
from distill.models.pairs import compare_pair
from distill.recipe import SamplerSettings
from distill.serving.clients import GREEDY, Client, LlamaClient, client_of
from distill.serving.http import Http
from distill.serving.llama_server import LlamaServer, Running, started

PLAIN, DRAFT = "plain", "draft"  # names of the two servers


@dataclass(frozen=True)
class Addresses:
    """Where servers run; `kind` None: asked of the server. `files` are target and draft as GGUF, for our decoder,
    `n_max` the draft length that the server was started with, None: found in its counters; `probabilistic`: it draws
    its drafts."""

    url: str
    plain: str | None = None
    kind: str | None = None
    key: str | None = None
    model: str | None = None
    files: tuple[Path, Path] | None = None
    n_max: int | None = None
    probabilistic: bool = False
    threads: int | None = None


@contextmanager
def opened(
    server: LlamaServer, seconds: tuple[float, float], sampler: SamplerSettings = GREEDY
) -> Iterator[LlamaClient]:
    """A client of a llama-server that runs within the block; ServingError where it has a draft and leaves it unused."""
    with started(server, seconds[0]) as running:

        def death() -> str | None:
            found = running.death()
            return None if found is None else f"{server.binary} ended ({found}); its last lines:\n{running.tail()}"

        with contextlib.closing(Http(running.url, seconds[1], death=death)) as http:
            client = LlamaClient(http, sampler)
            if server.draft is not None and client.drafts() is False:
                raise _unused(server, running)
            yield client


def _unused(server: LlamaServer, running: Running) -> ServingError:
    """Why a server runs without the draft that it was given: llama-server says so in its log alone."""
    reason = compare_pair(str(server.target), str(server.draft)).llama_cpp
    words = ("draft", "specul", "vocab")
    lines = [line for line in running.text().splitlines() if " I " not in line and any(word in line for word in words)]
    shown = "".join(f"\n    {line[:200]}" for line in lines[-4:])
    return ServingError(
        f"{server.binary} serves {server.target} without its draft{f': {reason}' if reason else ''}{shown}",
        "transplant the target's vocabulary into the draft (`distill transplant`)" if reason else "see its whole log",
    )


def connected(places: Addresses, seconds: float, stack: ExitStack, sampler: SamplerSettings) -> dict[str, Client]:
    """Clients of the servers that run; ServingError for one in the other's place."""
    clients: dict[str, Client] = {}
    for name, url in ((PLAIN, places.plain), (DRAFT, places.url)):
        if url is not None:
            http = stack.enter_context(contextlib.closing(Http(url, seconds, places.key)))
            clients[name] = client_of(http, sampler, places.kind, places.model)
    for name, client in clients.items():
        drafts = client.drafts()
        if name == PLAIN and drafts:
            raise ServingError(f"{client.url} drafts, and was given as the plain server", "correct --plain-url")
        if name != PLAIN and drafts is False:
            raise ServingError(
                f"{client.url} serves without a draft: it says so itself",
                "start it with the draft; llama-server drops one whose vocabulary does not fit and only logs it",
            )
    return clients


def require_vocabulary(clients: Mapping[str, Client], prompts: Sequence[Sequence[int]]) -> None:
    """Refuse ids that the server's model does not have, before it answers with the text of another."""
    largest = max(map(max, prompts))
    for client in clients.values():
        size = client.vocabulary_size() if isinstance(client, LlamaClient) else None
        if size is not None and largest >= size:
            raise ServingError(
                f"{client.url} serves a model of {size} tokens, and the prompts have token {largest}",
                "it is another model than the prompts are for: correct --url, or the run",
            )

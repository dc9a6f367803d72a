"""A check of servers that the user runs already: one that drafts and, beside it, one that decodes plainly."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from distill.errors import ServingError
from distill.results.serving_results import Difference, ServeReport
from distill.serving.check import PLAIN, Wanted, note_template, ours_of, replayed_on, report, shared
from distill.serving.client import Client
from distill.serving.differences import build_of, file_differences
from distill.serving.llama_client import LlamaClient
from distill.serving.llama_server import LlamaServer
from distill.serving.vllm import VllmClient, kind_of_server

FULL = 0.9  # of n_max drafted in a mean round: below, something ends drafts before n_max


@dataclass(frozen=True)
class Addresses:
    """Where the servers are; `kind` None: asked of the server. `files` are target and draft as GGUF, for our decoder,
    `n_max` the draft length that the server was started with, None: found in its counters."""

    url: str
    plain: str | None = None
    kind: str | None = None
    key: str | None = None
    model: str | None = None
    files: tuple[Path, Path] | None = None
    n_max: int | None = None
    threads: int | None = None


def check_addresses(wanted: Wanted, places: Addresses) -> ServeReport:
    """Compare the servers; ServingError for one that does not answer, refuses, or does not draft."""
    with ExitStack() as stack:
        clients: dict[str, Client] = {}
        for name, url in ((PLAIN, places.plain), ("draft", places.url)):
            if url is not None:
                clients[name] = _client(url, places, wanted.seconds[1])
                stack.callback(clients[name].close)
        drafting = clients["draft"]
        _require_roles(clients)
        _require_vocabulary(clients, wanted.ids)
        found = replayed_on(wanted, clients, "draft")
        length = places.n_max or _length(found.acceptance[0].by_position)
        pair = places.files or (Path(places.model or places.url), Path("?"))
        settings = LlamaServer(Path(drafting.kind), pair[0], pair[1], n_max=length or 0, threads=places.threads)
        if places.files is not None and length is not None:
            found.differences += ours_of(wanted, found, settings)
        elif places.files is not None:
            found.differences += file_differences(*places.files, wanted.made)
            found.notes.append(
                "the server does not say how many tokens it drafts: give --n-max for our decoder's figures"
            )
        found.differences += _early_ends(found.acceptance[0].drafted, drafting, length, found.texts)
        if isinstance(drafting, LlamaClient):
            note_template(wanted, drafting, found)
            build = build_of(drafting.properties())
        else:
            assert isinstance(drafting, VllmClient)
            build = drafting.version()
        for client in clients.values():
            if isinstance(client, VllmClient):
                client.alone = False
        found.speeds += shared(wanted, clients, "draft")
    found.speeds = [
        replace(one, configuration=f"n_max {length}" if length and one.configuration == "draft" else one.configuration)
        for one in found.speeds
    ]
    return report(wanted, found, drafting.kind, build, settings)


def _client(url: str, places: Addresses, seconds: float) -> Client:
    kind = places.kind or kind_of_server(url, seconds, places.key)
    if kind == "vllm":
        return VllmClient(url, seconds, places.key, places.model)
    return LlamaClient(url, seconds, places.key)


def _require_roles(clients: dict[str, Client]) -> None:
    for name, client in clients.items():
        drafts = client.drafts() if isinstance(client, LlamaClient | VllmClient) else None
        if name == PLAIN and drafts:
            raise ServingError(f"{client.url} drafts, and was given as the plain server", "correct --plain-url")
        if name != PLAIN and drafts is False:
            raise ServingError(
                f"{client.url} serves without a draft: it says so itself",
                "start it with the draft; llama-server drops one whose vocabulary does not fit and only logs it",
            )


def _require_vocabulary(clients: dict[str, Client], prompts: Sequence[Sequence[int]]) -> None:
    """Refuse ids that the server's model does not have, before it answers with the text of another."""
    for client in clients.values():
        if isinstance(client, LlamaClient):
            size = client.vocabulary_size()
            largest = max(max(prompt) for prompt in prompts)
            if size is not None and largest >= size:
                raise ServingError(
                    f"{client.url} serves a model of {size} tokens, and the prompts have token {largest}",
                    "it is another model than the prompts are for: correct --url, or the run",
                )


def _length(by_position: Sequence[float] | None) -> int | None:
    """n_max, of which the counters have one place for each token."""
    return len(by_position) if by_position else None


def _early_ends(drafted: int, client: Client, length: int | None, texts: Sequence[object]) -> list[Difference]:
    """A server whose rounds draft fewer tokens than n_max: it has a floor on their probability."""
    totals = client.totals()
    if totals is None or not totals.rounds or length is None:
        return []
    mean = totals.drafted / totals.rounds
    if mean >= FULL * length - 1 / length:
        return []
    return [
        Difference(
            "p_min, by the drafted tokens of a mean round",
            f"above 0: {mean:.2f} of {length} are drafted",
            "0",
            "leave --spec-draft-p-min out of the server's command, unless it is faster here",
        )
    ]

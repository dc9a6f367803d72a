"""Prompts replayed on servers: token ids, greedy, cold caches, the servers in turn, one or several requests at once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy

from distill.errors import ServingError
from distill.intervals import UNKNOWN, Interval, speed_ratio
from distill.progress import Progress
from distill.results.serving_results import ServedSpeed
from distill.serving.client import Client, Reply
from distill.serving.counts import CONFIDENCE, RESAMPLES

WARM_TOKENS = 8
PASSES = 2  # requests for each that is sent at once, at least


@dataclass(frozen=True)
class Replayed:
    """The replies of one configuration by prompt, one request at a time: `texts[prompt][repeat]`."""

    texts: list[list[Reply]]

    @property
    def first(self) -> list[Reply]:
        """The first reply to each prompt."""
        return [replies[0] for replies in self.texts]

    @property
    def tokens(self) -> list[int]:
        """Tokens of all replies, by prompt."""
        return [sum(reply.count for reply in replies) for replies in self.texts]

    @property
    def seconds(self) -> list[float]:
        """Seconds of all replies, by prompt."""
        return [sum(reply.seconds for reply in replies) for replies in self.texts]

    def over(self, base: Replayed) -> Interval:
        """Its speed over another's, of the same prompts."""
        return speed_ratio(self.tokens, self.seconds, base.tokens, base.seconds, RESAMPLES, CONFIDENCE)


def warm(client: Client, prompts: Sequence[Sequence[int]]) -> None:
    """One throw-away text: lazily made buffers and kernels are not to be measured."""
    client.complete(prompts[0], WARM_TOKENS)


def interleaved(
    clients: Mapping[str, Client], prompts: Sequence[Sequence[int]], limit: int, repeats: int, title: str
) -> dict[str, Replayed]:
    """Every prompt on every server, one request at a time; the servers' order turns from prompt to prompt."""
    found: dict[str, list[list[Reply]]] = {name: [[] for _ in prompts] for name in clients}
    order = list(clients.items())
    progress = Progress(title, repeats * len(prompts))
    for repeat in range(repeats):
        for place, prompt in enumerate(prompts):
            turn = (place + repeat) % len(order)
            for name, client in order[turn:] + order[:turn]:
                reply = client.complete(prompt, limit)
                _require_cold(client, reply)
                found[name][place].append(reply)
            progress.step()
    return {name: Replayed(texts) for name, texts in found.items()}


def _require_cold(client: Client, reply: Reply) -> None:
    if reply.cached:
        raise ServingError(
            f"{client.url} took {reply.cached} tokens of a prompt from its cache, though it was asked not to",
            "switch its prompt cache off: the times would be of a warm one",
        )


@dataclass(frozen=True)
class Together:
    """Requests that shared a server: their replies, and the seconds from the first one's start to the last's end."""

    replies: list[Reply]
    seconds: float


def together(client: Client, prompts: Sequence[Sequence[int]], limit: int, concurrency: int) -> Together:
    """Every prompt at least once, `concurrency` requests at a time; prompts are taken again until there are enough."""
    count = max(len(prompts), PASSES * concurrency)
    work = [prompts[number % len(prompts)] for number in range(count)]
    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        started = time.perf_counter()
        futures = [pool.submit(client.complete, prompt, limit) for prompt in work]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        try:
            for future in done:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        seconds = time.perf_counter() - started
    return Together([future.result() for future in futures], seconds)


def alone_speed(title: str, replayed: Replayed, base: Replayed | None) -> ServedSpeed:
    """The figures of requests sent one at a time."""
    return ServedSpeed(
        configuration=title,
        concurrency=1,
        requests=sum(map(len, replayed.texts)),
        tokens=sum(replayed.tokens),
        tokens_per_second=sum(replayed.tokens) / sum(replayed.seconds),
        first_seconds=_latency([reply for replies in replayed.texts for reply in replies]),
        speedup=UNKNOWN if base is None else replayed.over(base),
    )


def shared_speeds(
    clients: Mapping[str, Client], prompts: Sequence[Sequence[int]], limit: int, concurrency: int, repeats: int
) -> list[ServedSpeed]:
    """The figures of requests that share each server, the servers in turn; speedups over the first of them."""
    passes: dict[str, list[Together]] = {name: [] for name in clients}
    progress = Progress(f"{concurrency} requests at once", repeats * len(clients))
    order = list(clients)
    for repeat in range(repeats):
        for name in order if repeat % 2 == 0 else order[::-1]:
            passes[name].append(together(clients[name], prompts, limit, concurrency))
            progress.step()
    rates = {name: _rate(own) for name, own in passes.items()}
    base = rates[order[0]]
    found = []
    for name, own in passes.items():
        replies = [reply for one in own for reply in one.replies]
        ratio = UNKNOWN if name == order[0] else Interval(rates[name] / base, float("nan"), float("nan"))
        tokens = sum(reply.count for reply in replies)
        found.append(ServedSpeed(name, concurrency, len(replies), tokens, rates[name], _latency(replies), ratio))
    return found


def _rate(passes: Sequence[Together]) -> float:
    return sum(reply.count for one in passes for reply in one.replies) / sum(one.seconds for one in passes)


def _latency(replies: Sequence[Reply]) -> tuple[float, float]:
    first = [reply.first_seconds for reply in replies]
    return float(numpy.median(first)), float(numpy.quantile(first, 0.9))

"""Servers under load: a fixed number of requests at once, or requests that arrive at random.

It measures what users wait for, and the seconds of a step of the plain server: its cost curve, where the weights are
out of reach. Legend: P prompts, B requests in flight, T(B) seconds of a step that makes a token of each.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy

from distill.decoding.costs import CostCurve
from distill.errors import ServingError
from distill.http import Unanswered, at_once
from distill.machine import machine
from distill.progress import Progress
from distill.serving.clients import PLAIN, Client, LlamaClient, Replayed, Reply, sums_of
from distill.serving.results import ServedSpeed
from distill.serving.server import CONNECTIONS
from distill.tables import UNKNOWN, Numbers, speed_ratio

PASSES = 2  # requests for each that is sent at once, and to each prompt where they arrive, at least
MAX_RATE = 1000.0  # requests a second
MIN_STEPS = 4  # of a text with so many others
LEAST_SHARE = 0.02  # of all steps
TWO_PASSES = 1.8  # a step of two texts over one of one text, from which it may be two passes over the weights


# ── loads ──


@dataclass(frozen=True)
class Load:
    """`concurrency` requests at once, each followed by the next.

    With 0 of them requests arrive: `rate` a second in the mean by a Poisson process.
    """

    concurrency: int = 0
    rate: float = math.nan

    @property
    def title(self) -> str:
        """In words."""
        return f"{self.concurrency} at once" if self.concurrency else f"{self.rate:.3g} requests/s"

    def count(self, prompts: int) -> int:
        """Requests of one replay."""
        return max(prompts, PASSES * self.concurrency) if self.concurrency else PASSES * prompts

    def due(self, count: int, seed: int) -> Numbers:
        """Seconds [count] from the beginning at which requests are sent; 0 where each follows another."""
        if self.concurrency:
            return numpy.zeros(count)
        return numpy.cumsum(numpy.random.default_rng(seed).exponential(1 / self.rate, count))


# ── requests ──


@dataclass(frozen=True)
class Answered:
    """A request to a prompt, by its place, that was answered; the moment at which it was `due`."""

    prompt: int
    due: float
    reply: Reply

    def tokens_by(self, moment: float) -> float:
        """The tokens that had arrived by then."""
        if self.reply.end <= moment or not len(self.reply.times):
            return self.reply.count
        arrived = sum(one <= moment for one in self.reply.times)
        return self.reply.count * arrived / len(self.reply.times)


def send(client: Client, prompts: Sequence[Sequence[int]], limit: int, load: Load, seed: int) -> list[Answered]:
    """The requests of one replay, answered; prompts are taken again where they are fewer.

    A request that is due waits for nothing but one of CONNECTIONS; it counts from when it was due. The first fault
    ends all.
    """
    due, ended = load.due(load.count(len(prompts)), seed), threading.Event()
    begun = time.perf_counter()

    def ask(number: int) -> tuple[int, Answered]:
        turn, prompt = divmod(number, len(prompts))
        if ended.wait(max(0.0, begun + due[number] - time.perf_counter())):
            raise Unanswered("the load ended")
        reply = client.complete(prompts[prompt], limit, turn)
        return number, Answered(prompt, reply.started if load.concurrency else begun + float(due[number]), reply)

    count = min(load.concurrency or CONNECTIONS, len(due))
    with contextlib.closing(at_once(ask, deque(range(len(due))), count, ended.set)) as answered:
        return [request for _, request in sorted(answered, key=lambda one: one[0])]


# ── figures ──


@dataclass(frozen=True)
class Served:
    """What a configuration did under a load: the `wall` seconds that the load was on, with the tokens [P] and seconds
    [P] of the requests to each prompt in that time; and all requests."""

    requests: Sequence[Answered]
    tokens: Numbers
    seconds: Numbers
    wall: float

    @classmethod
    def alone(cls, replayed: Replayed) -> Served:
        """Of requests that were sent one at a time, other servers' between them."""
        requests = [Answered(place, reply.started, reply) for place, own in enumerate(replayed) for reply in own]
        tokens, seconds = sums_of(replayed)
        return cls(requests, tokens, seconds, float(seconds.sum()))

    @classmethod
    def under(cls, load: Load, replays: Sequence[Sequence[Answered]], prompts: int) -> Served:
        """Of whole replays. A load of so many at once is on until the first request ends that none follows: the rest
        would count a server that is less and less loaded."""
        tokens, seconds, wall = numpy.zeros(prompts), numpy.zeros(prompts), 0.0
        for replay in replays:
            until = max(one.reply.end for one in replay)
            if load.concurrency:
                last = max(one.reply.started for one in replay)
                until = min(one.reply.end for one in replay if one.reply.end > last)
            wall += until - min(one.due for one in replay)
            for one in replay:
                tokens[one.prompt] += one.tokens_by(until)
                seconds[one.prompt] += min(one.reply.end, until) - one.due
        return cls([one for replay in replays for one in replay], tokens, seconds, float(wall))

    def speed(self, configuration: str, load: Load, base: Served | None) -> ServedSpeed:
        """The figures, with the speedup over `base` of the same prompts."""
        replies = [one.reply for one in self.requests]
        count, rate = sum(reply.count for reply in replies), float(self.tokens.sum()) / self.wall
        later = [(one.seconds - one.first_seconds) / (one.count - 1) for one in replies if one.count > 1]
        columns = None if base is None else (self.tokens, self.seconds, base.tokens, base.seconds)
        return ServedSpeed(
            configuration=configuration,
            concurrency=load.concurrency,
            offered=load.rate,
            requests=len(replies),
            requests_per_second=rate * len(replies) / max(count, 1),
            tokens_per_second=rate,
            in_flight=float(self.seconds.sum()) / self.wall,
            first_seconds=percentiles([one.reply.started + one.reply.first_seconds - one.due for one in self.requests]),
            token_seconds=percentiles(later),
            speedup=UNKNOWN if columns is None else speed_ratio(*columns),
        )


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """The median and the 95th percentile; NaN of none."""
    if not values:
        return math.nan, math.nan
    return float(numpy.median(values)), float(numpy.quantile(values, 0.95))


def step_seconds(loads: Iterable[Sequence[Answered]]) -> dict[int, float]:
    """T(B) by B, from the texts of a plain server under several loads: the median over texts of a text's step.

    A text's step is the mean of the seconds between two of its tokens, because a client that is held up gets several at
    once. Those count in which B texts went on, none of them began or ended, and no request waited for its first token:
    steps that read prompts take longer. T(B) is that of the load in which B is most frequent: in others B texts go on
    for moments alone, as where texts end. A B that is rare in all of them is left out.
    """
    best: dict[int, tuple[float, list[float]]] = {}
    for requests in loads:
        replies = [one.reply for one in requests if len(one.reply.times) > 1]
        streams, sent = [numpy.array(one.times) for one in replies], numpy.sort([one.started for one in replies])
        first, last = (numpy.sort([times[place] for times in streams]) for place in (0, -1))
        means, gaps = defaultdict[int, list[float]](list), Counter[int]()
        for times in streams:
            left, right = times[:-1], times[1:]
            begun, ended = numpy.searchsorted(first, left, "right"), numpy.searchsorted(last, right, "left")
            steady = begun == numpy.searchsorted(sent, right, "right")
            steady &= ended == numpy.searchsorted(last, left, "right")
            for together, count in Counter((begun - ended)[steady].tolist()).items():
                gaps[together] += count
                if count >= MIN_STEPS:
                    means[together].append(float((right - left)[steady & (begun - ended == together)].mean()))
        for together, seconds in means.items():
            share = gaps[together] / gaps.total()
            if len(seconds) >= together and share >= max(LEAST_SHARE, best.get(together, (0.0, []))[0]):
                best[together] = share, seconds
    steps = {together: float(numpy.median(seconds)) for together, (_, seconds) in sorted(best.items())}
    return {together: step for together, step in steps.items() if step > 0}


def apart(steps: Mapping[int, float]) -> str:
    """Advice for a llama-server whose steps of two texts take about as long as two steps; empty for others."""
    if not {1, 2} <= steps.keys() or steps[2] < TWO_PASSES * steps[1]:
        return ""
    return (
        f"A step of two texts takes {steps[2] / steps[1]:.2f} times that of one. If the server has --parallel without "
        "--kv-unified, each slot has a cache of its own, and llama.cpp decodes only neighbouring slots together: with "
        "--kv-unified it decodes all in one pass over the weights."
    )


def speeds_under(
    clients: Mapping[str, Client],
    prompts: Sequence[Sequence[int]],
    limit: int,
    loads: Sequence[Load],
    repeats: int,
    replayed: Mapping[str, Replayed],
    title: str,
) -> tuple[list[ServedSpeed], dict[int, float]]:
    """Every load on each server, behind what was `replayed` one at a time; and the plain server's T(B). `title` is what
    the server that drafts is called.

    The same requests are sent to all, at the same times. Loads and servers take turns in every repeat, so that a slow
    spell of the machine meets all of them.
    """
    served = {name: Served.alone(own) for name, own in replayed.items()}
    every = [(Load(1), served)]
    replays: dict[tuple[Load, str], list[list[Answered]]] = {(load, name): [] for load in loads for name in clients}
    progress, order = Progress("under load", repeats * len(replays)), list(replays)
    for repeat in range(repeats):
        for load, name in order if repeat % 2 == 0 else order[::-1]:
            replays[load, name].append(send(clients[name], prompts, limit, load, repeat))
            progress.step(note=load.title)
    for load in loads:
        served = {name: Served.under(load, replays[load, name], len(prompts)) for name in clients}
        every.append((load, served))
    speeds = [
        own.speed(name if name == PLAIN else title, load, found.get(PLAIN) if name != PLAIN else None)
        for load, found in every
        for name, own in found.items()
    ]
    return speeds, step_seconds(found[PLAIN].requests for _, found in every if PLAIN in found)


# ── the cost curve of a server: m requests stand in for m tokens of one request, as in llama-batched-bench ──

REPEATS = 3  # of each number of requests, in turn
TIMED_TOKENS = 32  # new tokens of a request, at most
TOKENS = range(100, 1000)  # of made-up prompts, which no server has in a cache: in every vocabulary, none special
NOTE = (
    "Measured through the server, with m requests at once. m tokens of one request read one text and cost less "
    "(docs/plan.md), and what the server does between two steps is part of these: take the speedups for the least to "
    "expect."
)


def served_curve(client: Client, depth: int, new: int, limit: int) -> CostCurve:
    """T(1..m) in seconds of a server that does not draft, at prompts of `depth` tokens that `new` more follow.

    m runs to `limit`, or to the server's slots where those are fewer; TIMED_TOKENS tokens tell what many would. Raises
    ServingError for a server that drafts, and where fewer than two requests were ever decoded at once.
    """
    if client.drafts():
        raise ServingError(
            f"{client.url} drafts, so that its replies do not show what a step costs",
            "start it without its draft, and plan again",
        )
    slots = client.slots() if isinstance(client, LlamaClient) else None
    wanted = range(1, min(limit, slots or limit) + 1)
    client.alone, client.ignores_end = False, True
    timed, draw = min(new, TIMED_TOKENS), random.Random(0)
    progress = Progress(f"{client.url}: up to {wanted[-1]} requests at once", REPEATS * len(wanted))
    by_load: dict[int, list[Answered]] = {together: [] for together in wanted}
    for repeat in range(REPEATS):
        for together in wanted if repeat % 2 == 0 else wanted[::-1]:
            by_load[together] += send(
                client, [draw.choices(TOKENS, k=depth) for _ in range(together)], timed, Load(together), repeat
            )
            progress.step()
    steps = step_seconds(by_load.values())
    known = next((m for m in range(1, limit + 1) if m + 1 not in steps), limit) if 1 in steps else 0
    if known < 2:
        raise ServingError(
            f"{client.url} was never seen decoding {known + 1} request(s) at once",
            "let it serve several (llama-server: --parallel 8), ask for more --tokens, and keep other users away",
        )
    notes = [NOTE, *filter(None, [apart(steps) if isinstance(client, LlamaClient) else ""])]
    if known < limit:
        why = f"it has {slots} slots: --parallel" if slots is not None and slots < limit else "others were not steady"
        notes.append(f"It ends at m = {known} ({why}).")
    seconds = tuple(steps[m] for m in range(1, known + 1))
    middle = (depth + timed // 2,)
    return CostCurve(client.url, client.kind, middle, (seconds,), REPEATS, "seconds", " ".join(notes), machine())

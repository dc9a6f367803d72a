"""Servers under load: a fixed number of requests at once, each followed by the next, and what users wait for."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy

from distill.http import Unanswered, at_once
from distill.progress import Progress
from distill.serving.clients import PLAIN, Client, Replayed, Reply, sums_of
from distill.serving.results import ServedSpeed
from distill.tables import UNKNOWN, Numbers, speed_ratio

PASSES = 2  # requests for each that is sent at once, at least


# ── requests ──


@dataclass(frozen=True)
class Answered:
    """A request to a prompt, by its place, that was answered."""

    prompt: int
    reply: Reply

    def tokens_by(self, moment: float) -> float:
        """The tokens that had arrived by then."""
        if self.reply.end <= moment or not len(self.reply.times):
            return self.reply.count
        arrived = sum(one <= moment for one in self.reply.times)
        return self.reply.count * arrived / len(self.reply.times)


def send(client: Client, prompts: Sequence[Sequence[int]], limit: int, together: int) -> list[Answered]:
    """The requests of one replay, answered, this many at once; prompts are taken again where they are fewer.

    The first fault ends all.
    """
    ended = threading.Event()

    def ask(number: int) -> tuple[int, Answered]:
        turn, prompt = divmod(number, len(prompts))
        if ended.is_set():
            raise Unanswered("the load ended")
        return number, Answered(prompt, client.complete(prompts[prompt], limit, turn))

    waiting = deque(range(max(len(prompts), PASSES * together)))
    with contextlib.closing(at_once(ask, waiting, lambda: together, ended.set)) as answered:
        return [request for _, request in sorted(answered, key=lambda one: one[0])]


# ── figures ──


@dataclass(frozen=True)
class Served:
    """What a configuration did under a load: the `wall` seconds that the load was on, with the tokens [P] and seconds
    [P] of the requests to each of P prompts in that time; and all replies."""

    replies: Sequence[Reply]
    tokens: Numbers
    seconds: Numbers
    wall: float

    @classmethod
    def alone(cls, replayed: Replayed) -> Served:
        """Of requests that were sent one at a time, other servers' between them."""
        tokens, seconds = sums_of(replayed)
        return cls([reply for own in replayed for reply in own], tokens, seconds, float(seconds.sum()))

    @classmethod
    def under(cls, replays: Sequence[Sequence[Answered]], prompts: int) -> Served:
        """Of whole replays. A load of this many at once is on until the first request ends that none follows: the rest
        would count a server that is less and less loaded."""
        tokens, seconds, wall = numpy.zeros(prompts), numpy.zeros(prompts), 0.0
        for replay in replays:
            last = max(one.reply.started for one in replay)
            until = min(one.reply.end for one in replay if one.reply.end > last)
            wall += until - min(one.reply.started for one in replay)
            for one in replay:
                tokens[one.prompt] += one.tokens_by(until)
                seconds[one.prompt] += min(one.reply.end, until) - one.reply.started
        return cls([one.reply for replay in replays for one in replay], tokens, seconds, float(wall))

    def speed(self, configuration: str, together: int, base: Served | None) -> ServedSpeed:
        """The figures, with the speedup over `base` of the same prompts."""
        count, rate = sum(reply.count for reply in self.replies), float(self.tokens.sum()) / self.wall
        later = [(one.seconds - one.first_seconds) / (one.count - 1) for one in self.replies if one.count > 1]
        columns = None if base is None else (self.tokens, self.seconds, base.tokens, base.seconds)
        return ServedSpeed(
            configuration=configuration,
            concurrency=together,
            requests=len(self.replies),
            requests_per_second=rate * len(self.replies) / max(count, 1),
            tokens_per_second=rate,
            in_flight=float(self.seconds.sum()) / self.wall,
            first_seconds=percentiles([one.first_seconds for one in self.replies]),
            token_seconds=percentiles(later),
            speedup=UNKNOWN if columns is None else speed_ratio(*columns),
        )


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """The median and the 95th percentile; NaN of none."""
    if not values:
        return math.nan, math.nan
    return float(numpy.median(values)), float(numpy.quantile(values, 0.95))


def speeds_under(
    clients: Mapping[str, Client],
    prompts: Sequence[Sequence[int]],
    limit: int,
    loads: Sequence[int],
    repeats: int,
    replayed: Mapping[str, Replayed],
    title: str,
) -> list[ServedSpeed]:
    """Every load on each server, behind what was `replayed` one at a time; `title` is what the server that drafts is
    called.

    Loads and servers take turns in every repeat, so that a slow spell of the machine meets all of them.
    """
    served = {(1, name): Served.alone(own) for name, own in replayed.items()}
    replays: dict[tuple[int, str], list[list[Answered]]] = {(load, name): [] for load in loads for name in clients}
    progress, order = Progress("under load", repeats * len(replays)), list(replays)
    for repeat in range(repeats):
        for load, name in order if repeat % 2 == 0 else order[::-1]:
            replays[load, name].append(send(clients[name], prompts, limit, load))
            progress.step(note=f"{load} at once")
    served |= {of: Served.under(found, len(prompts)) for of, found in replays.items()}
    return [
        own.speed(name if name == PLAIN else title, load, served.get((load, PLAIN)) if name != PLAIN else None)
        for (load, name), own in served.items()
    ]

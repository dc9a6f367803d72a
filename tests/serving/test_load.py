"""Requests under load: simulated servers whose cost law is known.

`simulate` steps through continuous batching on a clock of its own, so that every figure has a closed form.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy
import pytest

from distill.errors import ServingError
from distill.serving.check import Answered, Reply, Served, send, speeds_under
from distill.serving.results import Counts

PROMPTS, LIMIT = 6, 61
BASE, SLOPE = 8.0, 1.0  # seconds of a step: T(m) = BASE + SLOPE·m


def steps(m: float) -> float:
    return BASE + SLOPE * m


@dataclass
class Stream:
    """A text that is being written."""

    number: int
    sent: float = 0.0
    times: list[float] = field(default_factory=list)


def simulate(together: int) -> list[Answered]:
    """The requests of one replay, so many at once; a step makes a token of each."""
    waiting = [Stream(number) for number in range(max(PROMPTS, 2 * together))]
    active, done, now = list[Stream](), list[Stream](), 0.0
    while waiting or active:
        while waiting and len(active) < together:
            waiting[0].sent = now + 1e-6  # a place is taken again after it was left
            active.append(waiting.pop(0))
        for stream in active:  # the first token comes from the prompt's step
            stream.times += [] if stream.times else [now]
        now += steps(len(active))
        for stream in active:
            stream.times += [now]
        done += [stream for stream in active if len(stream.times) == LIMIT]
        active = [stream for stream in active if len(stream.times) < LIMIT]
    return [request(one.number % PROMPTS, one.sent, one.times) for one in done]


def request(prompt: int, sent: float, times: Sequence[float]) -> Answered:
    counts = Counts.of_text(len(times))
    return Answered(prompt, Reply([], counts, len(times), times[0] - sent, times[-1] - sent, started=sent, times=times))


# Figures.


def test_a_load_is_over_when_a_place_stays_empty() -> None:
    """Two at once: of three requests the third ends by itself, which does not count."""
    first, second = [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    third = [5.0, 5.5, 6.0, 6.5, 7.0]
    replay = [request(0, 0.0, first), request(1, 0.0, second), request(2, 4.0, third)]
    found = Served.under([replay, replay], 3)
    assert found.wall == 12.0 and list(found.tokens) == [8, 12, 6] and list(found.seconds) == [8, 12, 4]
    speed = found.speed("x", 2, None)
    assert speed.in_flight == 2.0 and speed.tokens_per_second == 26 / 12 and speed.requests == 6
    assert speed.first_seconds == (1, 1)
    assert speed.token_seconds == pytest.approx(tuple(numpy.percentile([1.0, 1.0, 0.5] * 2, [50, 95])))
    slow = [request(one.prompt, 2 * one.reply.started, [2 * at for at in one.reply.times]) for one in replay]
    assert Served.under([replay], 3).speed("x", 2, Served.under([slow], 3)).speedup.mean == pytest.approx(2)


def test_so_many_at_once_are_in_flight() -> None:
    for together in (1, 2, 4, 8):
        speed = Served.under([simulate(together)], PROMPTS).speed("x", together, None)
        assert speed.in_flight == pytest.approx(together, rel=1e-4)
        assert speed.tokens_per_second == pytest.approx(together / steps(together), rel=0.03)


# Requests to a server: who waits for whom, and seconds of a clock that the client moves.


class Clock:
    """Seconds that pass only where a client says so."""

    def __init__(self) -> None:
        self.now = time.perf_counter()

    def perf_counter(self) -> float:
        return self.now


class Batching:
    """A client whose tokens take `seconds` of its clock each; `together` requests are answered once all are there.

    `fails` is the number of the request that fails.
    """

    kind, url = "batching", "http://batching"

    def __init__(self, seconds: float = 1.0, fails: int = -1, together: int = 1, clock: Clock | None = None) -> None:
        self.seconds, self.fails, self.numbers = seconds, fails, count()
        self.clock, self.together = clock or Clock(), threading.Barrier(together)
        self.lock, self.inside, self.most = threading.Lock(), 0, 0
        self.entered: list[float] = []

    def complete(self, ids: Sequence[int], limit: int, seed: int = 0) -> Reply:
        with self.lock:
            number = next(self.numbers)
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.entered.append(time.perf_counter())
        self.together.wait(60)
        with self.lock:
            self.inside -= 1
            if number == self.fails:
                raise ServingError("it failed", "see its log")
            started, whole = self.clock.now, limit * self.seconds
            self.clock.now += whole
        times = [started + place * self.seconds for place in range(1, limit + 1)]
        return Reply([], Counts.of_text(limit), limit, self.seconds, whole, started=started, times=times)


PLACES = [[1, 2]] * PROMPTS


def test_so_many_at_once() -> None:
    client = Batching(together=5)
    found = send(client, PLACES, 4, 5)  # type: ignore[arg-type]
    assert client.most == 5 and len(found) == 10 and [one.prompt for one in found] == [*range(6), *range(4)]


def test_the_first_fault_ends_a_load() -> None:
    with pytest.raises(ServingError, match="it failed"):
        send(Batching(fails=2), PLACES, 3, 4)  # type: ignore[arg-type]


def test_a_request_that_hangs_holds_nobody_after_a_fault() -> None:
    """Nor the end of the process, which waits for no thread of its kind."""
    released, threads = threading.Event(), list[threading.Thread]()

    class Hung(Batching):
        def complete(self, ids: Sequence[int], limit: int, seed: int = 0) -> Reply:
            threads.append(threading.current_thread())
            self.together.wait(60)
            if ids == [1]:
                raise ServingError("it is gone", "look")
            released.wait(600)
            return Reply([], Counts(), 0, 0.0, 0.0)

    with pytest.raises(ServingError, match="it is gone"):
        send(Hung(together=2), [[0], [1]], 1, 2)  # type: ignore[arg-type]
    assert len(threads) >= 2 and all(thread.daemon for thread in threads)
    released.set()


def test_every_load_on_each_server() -> None:
    clients = {"plain": Batching(5.0), "draft": Batching(1.0)}
    replayed = {name: [[one.complete([1], 6)] for _ in PLACES] for name, one in clients.items()}
    speeds = speeds_under(clients, PLACES, 6, [2, 4], 2, replayed, "draft")  # type: ignore[arg-type]
    assert [(one.configuration, one.concurrency, one.requests) for one in speeds] == [
        *(("plain", 1, 6), ("draft", 1, 6), ("plain", 2, 12), ("draft", 2, 12), ("plain", 4, 16), ("draft", 4, 16)),
    ]
    assert [one.speedup.mean for one in speeds[1:4:2]] == pytest.approx([5.0, 5.0])
    assert all(math.isnan(one.speedup.mean) for one in speeds[::2])

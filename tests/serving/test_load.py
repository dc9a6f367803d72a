"""Requests under load: simulated servers whose cost law is known.

`simulate` steps through continuous batching on a clock of its own, so that every figure has a closed form.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from typing import cast

import numpy
import pytest
from scipy.stats import expon, kstest

from distill.cli.serve import arrivals
from distill.errors import RecipeError, ServingError
from distill.serving.clients import Client, Reply
from distill.serving.load import (
    Answered,
    Load,
    Served,
    apart,
    send,
    served_curve,
    speeds_under,
    step_seconds,
)
from distill.serving.results import Counts
from distill.tables import Numbers

PROMPTS, LIMIT = 6, 61
BASE, SLOPE = 8.0, 1.0  # seconds of a step: T(m) = BASE + SLOPE·m


def steps(m: float) -> float:
    return BASE + SLOPE * m


@dataclass(frozen=True)
class Moments(Load):
    """Requests that arrive at given moments."""

    moments: tuple[float, ...] = ()

    def count(self, prompts: int) -> int:
        return len(self.moments)

    def due(self, count: int, seed: int) -> Numbers:
        return numpy.array(self.moments)


@dataclass
class Stream:
    """A text that is being written."""

    number: int
    due: float
    times: list[float] = field(default_factory=list)


def simulate(load: Load, prompt_seconds: float = 0.0, seed: int = 0) -> list[Answered]:
    """The requests of one replay; a step begins with reading the prompts that came, one after the other."""
    total = load.count(PROMPTS)
    waiting = [Stream(number, due) for number, due in enumerate(load.due(total, seed))]
    active, done, now = list[Stream](), list[Stream](), 0.0
    while waiting or active:
        while waiting and (len(active) < load.concurrency if load.concurrency else waiting[0].due <= now):
            stream = waiting.pop(0)
            stream.due = now + 1e-6 if load.concurrency else stream.due  # a place is taken again after it was left
            active.append(stream)
        if not active:
            now = waiting[0].due
            continue
        fresh = [stream for stream in active if not stream.times]
        now += prompt_seconds * len(fresh)
        for stream in fresh:  # the first token comes from the prompt's step
            stream.times.append(now)
        now += steps(len(active))
        for stream in active:
            stream.times += [now]
        done += [stream for stream in active if len(stream.times) == LIMIT]
        active = [stream for stream in active if len(stream.times) < LIMIT]
    return [request(one.number % PROMPTS, one.due, one.times) for one in done]


def request(prompt: int, due: float, times: Sequence[float]) -> Answered:
    counts = Counts.of_text(len(times))
    reply = Reply([], counts, len(times), times[0] - due, times[-1] - due, started=due, times=times)
    return Answered(prompt, due, reply)


def behind(before: Sequence[Answered], replay: Sequence[Answered]) -> list[Answered]:
    """A replay, later than others on the same clock."""
    later = max((one.reply.end for one in before), default=0.0) + 1e4
    return [request(one.prompt, one.due + later, [moment + later for moment in one.reply.times]) for one in replay]


class Simulated:
    """A server whose replays of each load, in the order of `loads`, are those of `simulate`."""

    def __init__(self, loads: Sequence[int], drafts: bool | None = None) -> None:
        self.url, self.kind, self.alone, self.ignores_end = "http://simulated", "vllm", True, False
        self.drafting, self.prompts, self.lock = drafts, list[tuple[int, ...]](), threading.Lock()
        replay = list[Answered]()
        for together in loads:
            replay += behind(replay, simulate(Load(together), prompt_seconds=1.0)[: 2 * together])
        self.replies = iter([one.reply for one in replay])

    def drafts(self) -> bool | None:
        return self.drafting

    def complete(self, ids: Sequence[int], limit: int, seed: int = 0) -> Reply:
        with self.lock:
            self.prompts.append(tuple(ids))
            return next(self.replies)


def test_the_curve_of_a_server_is_its_law() -> None:
    client = Simulated([1, 2, 3, 4, 4, 3, 2, 1, 1, 2, 3, 4])
    found = served_curve(cast("Client", client), 16, 61, 4)
    assert found.seconds == (tuple(pytest.approx(steps(m)) for m in range(1, 5)),)
    assert (found.depths, found.unit, found.backend) == ((32,), "seconds", "vllm") and "ends at" not in found.note
    assert client.ignores_end and not client.alone
    many = [*range(1, 17)]  # one at a time is then a hundredth of all steps
    longer = served_curve(cast("Client", Simulated([*many, *many[::-1], *many])), 16, 61, 16)
    assert longer.seconds == (tuple(pytest.approx(steps(m)) for m in many),)
    assert len(set(client.prompts)) == 30 and all(len(ids) == 16 for ids in client.prompts)  # B of every load


def test_a_server_without_steady_steps_has_no_curve() -> None:
    with pytest.raises(ServingError, match="drafts, so that"):
        served_curve(cast("Client", Simulated([], drafts=True)), 16, 61, 4)
    one_at_a_time = Simulated([1] * 30)
    with pytest.raises(ServingError, match=r"never seen decoding 2 request\(s\) at once"):
        served_curve(cast("Client", one_at_a_time), 16, 61, 2)


def test_advice_where_two_texts_take_two_passes() -> None:
    assert "--kv-unified" in apart({1: 1.0, 2: 1.95, 4: 2.0}) and "1.95 times" in apart({1: 1.0, 2: 1.95})
    assert apart({1: 1.0, 2: 1.6}) == apart({1: 1.0, 4: 4.0}) == apart({2: 2.0}) == ""


# Steps of the plain server.


def test_steps_are_read_from_requests_that_arrive() -> None:
    """Of any traffic: steps with prompts in them, and those behind which a text ends, do not count."""
    found = simulate(Load(rate=1 / 60), prompt_seconds=5.0, seed=3)
    for seed in range(4):
        found += behind(found, simulate(Load(rate=1 / 100), prompt_seconds=5.0, seed=seed))
    told = step_seconds([found])
    assert len(told) > 3 and told == pytest.approx({m: steps(m) for m in told})


def test_steps_of_a_client_that_is_held_up() -> None:
    """Several tokens are seen at once; the seconds of a step are the same. So is one text less at the very end."""
    seen = [4.0 * math.ceil(place / 4) for place in range(1, 42)]
    found = [request(0, 0.0, seen), request(1, 0.0, [*seen, 45.0])]
    assert step_seconds([found]) == pytest.approx({2: 1.0}, rel=0.05)


def test_a_large_load_does_not_make_a_small_one_rare() -> None:
    """One text at a time is a hundredth of all steps here, but all of those of its own load."""
    small = [request(0, 0.0, range(1, 42))]
    large = behind(small, [request(one, 0.0, range(2, 84, 2)) for one in range(100)])
    assert step_seconds([small, large]) == {1: 1.0, 100: 2.0}
    assert step_seconds([[*small, *large]]).keys() == {100}


# Figures.


def test_a_load_is_over_when_a_place_stays_empty() -> None:
    """Two at once: of three requests the third ends by itself, which does not count."""
    first, second = [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    third = [5.0, 5.5, 6.0, 6.5, 7.0]
    replay = [request(0, 0.0, first), request(1, 0.0, second), request(2, 4.0, third)]
    found = Served.under(Load(2), [replay, replay], 3)
    assert found.wall == 12.0 and list(found.tokens) == [8, 12, 6] and list(found.seconds) == [8, 12, 4]
    speed = found.speed("x", Load(2), None)
    assert speed.in_flight == 2.0 and speed.tokens_per_second == 26 / 12 and speed.requests == 6
    assert speed.first_seconds == (1, 1)
    assert speed.token_seconds == pytest.approx(tuple(numpy.percentile([1.0, 1.0, 0.5] * 2, [50, 95])))
    # Requests that arrive count to the last.
    load = Load(rate=1.0)
    arrived = Served.under(load, [replay], 3)
    assert arrived.wall == 7.0 and list(arrived.tokens) == [4, 6, 5]
    base = Served.under(load, [[replace(one, due=one.due - 1) for one in replay]], 3)
    assert arrived.speed("x", load, base).speedup.mean == pytest.approx((5 + 7 + 4) / (4 + 6 + 3))


def test_so_many_at_once_are_in_flight() -> None:
    for together in (1, 2, 4, 8):
        load = Load(together)
        speed = Served.under(load, [simulate(load)], PROMPTS).speed("x", load, None)
        assert speed.in_flight == pytest.approx(together, rel=1e-4)
        assert speed.tokens_per_second == pytest.approx(together / steps(together), rel=0.03)


# Arrivals.


def test_arrivals_are_a_poisson_process() -> None:
    size, rate = 4000, 2.5
    load = Load(rate=rate)
    due = load.due(size, 7)
    gaps = numpy.diff(due, prepend=0.0)
    assert kstest(gaps, expon(scale=1 / rate).cdf).pvalue > 1e-3
    for wrong in (kstest(gaps, expon(scale=1 / rate / 1.1).cdf), kstest(numpy.full(size, 1 / rate), expon().cdf)):
        assert wrong.pvalue < 1e-3
    inside = numpy.bincount(due.astype(int))[:-1]  # by second: the variance of a Poisson count is its mean
    assert inside.mean() == pytest.approx(rate, rel=0.05) and inside.var() == pytest.approx(rate, rel=0.1)
    assert list(load.due(size, 7)) == list(due) and list(load.due(size, 8)) != list(due)
    assert not Load(4).due(9, 0).any()


def test_rates() -> None:
    assert [load.rate for load in arrivals("2,0.5,2")] == [0.5, 2.0]
    for wrong in ("0", "-1", "a", "1,", "nan", "inf", "1e9", ""):
        with pytest.raises(RecipeError, match=r"--load .*numbers"):
            arrivals(wrong)


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
    found = send(client, PLACES, 4, Load(5), 0)  # type: ignore[arg-type]
    assert client.most == 5 and len(found) == 10 and [one.prompt for one in found] == [*range(6), *range(4)]
    assert all(one.due == one.reply.started for one in found)


def test_requests_are_sent_when_they_are_due() -> None:
    """None before it is due, and none waits for the reply to another: all five are there before one is answered."""
    load = Moments(rate=50.0, moments=(0.0, 0.02, 0.021, 0.08, 0.1))
    client = Batching(together=5)
    found = send(client, PLACES, 3, load, 0)  # type: ignore[arg-type]
    assert client.most == 5
    assert all(at >= one.due for at, one in zip(sorted(client.entered), found, strict=True))
    assert [b.due - a.due for a, b in pairwise(found)] == pytest.approx([0.02, 0.001, 0.059, 0.02])


def test_the_wait_for_a_connection_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("distill.serving.load.CONNECTIONS", 1)
    monkeypatch.setattr("distill.serving.load.time", clock)
    load = Moments(rate=50.0, moments=(0.0,) * 4)
    found = send(Batching(clock=clock), PLACES, 3, load, 0)  # type: ignore[arg-type]
    speed = Served.under(load, [found], PROMPTS).speed("x", load, None)
    assert speed.first_seconds == pytest.approx(tuple(numpy.percentile([1, 4, 7, 10], [50, 95])))
    assert speed.in_flight == pytest.approx((3 + 6 + 9 + 12) / 12)


@pytest.mark.parametrize("load", [Load(4), Load(rate=100.0)])
def test_the_first_fault_ends_a_load(load: Load) -> None:
    with pytest.raises(ServingError, match="it failed"):
        send(Batching(fails=2), PLACES, 3, load, 0)  # type: ignore[arg-type]


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
        send(Hung(together=2), [[0], [1]], 1, Load(2), 0)  # type: ignore[arg-type]
    assert len(threads) >= 2 and all(thread.daemon for thread in threads)
    released.set()


def test_every_load_on_each_server() -> None:
    clients = {"plain": Batching(5.0), "draft": Batching(1.0)}
    replayed = {name: [[one.complete([1], 6)] for _ in PLACES] for name, one in clients.items()}
    loads = [Load(2), Load(rate=600.0)]
    speeds, told = speeds_under(clients, PLACES, 6, loads, 2, replayed, "draft")  # type: ignore[arg-type]
    assert [(one.configuration, one.concurrency, one.requests) for one in speeds] == [
        *(("plain", 1, 6), ("draft", 1, 6), ("plain", 2, 12), ("draft", 2, 12), ("plain", 0, 24), ("draft", 0, 24)),
    ]
    assert [one.speedup.mean for one in speeds[1:4:2]] == pytest.approx([5.0, 5.0])
    assert all(math.isnan(one.speedup.mean) for one in speeds[::2])
    assert told == {1: pytest.approx(5.0)}

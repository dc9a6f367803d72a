"""distill/planning/cases.py: simulated cycles against closed forms and a simulator of another build."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

import pytest

from distill.planning.cases import LayerSwap, cycle_seconds


def by_events(compute: Sequence[float], transfer: Sequence[float], pause: float, steps: int) -> list[float]:
    """When each step ends, from a queue of events: two workers, the link and the processor, and two buffers."""
    streamed = [layer for layer, seconds in enumerate(transfer) if seconds]
    queue: list[tuple[float, int, str]] = [(pause, 0, "may compute")]
    order, loaded, freed, link_busy = 0, 0, 2, False  # layers sent, arrived; buffers that may be filled so far
    ends: list[float] = []
    layer, step, waiting = 0, 0, False
    number = 1

    def push(when: float, what: str) -> None:
        nonlocal number
        heapq.heappush(queue, (when, number, what))
        number += 1

    push(0.0, "link")
    while step < steps:
        now, _, what = heapq.heappop(queue)
        if what == "arrived":
            loaded, link_busy = loaded + 1, False
        if what == "may compute":
            waiting = True
        if what == "computed":
            if transfer[layer]:
                freed += 1
            layer += 1
            waiting = layer < len(compute)
            if layer == len(compute):
                ends.append(now)
                layer, step = 0, step + 1
                push(now + pause, "may compute")
        needed = step * len(streamed) + sum(one <= layer for one in streamed)
        if waiting and (not transfer[layer] or loaded >= needed):
            waiting = False
            push(now + compute[layer], "computed")
        if not link_busy and order < freed and streamed:
            push(now + transfer[streamed[order % len(streamed)]], "arrived")
            order, link_busy = order + 1, True
    return ends


@pytest.mark.parametrize("seed", range(20))
def test_any_chain_agrees_with_a_queue_of_events(seed: int) -> None:
    """Every fifth of equal layers, which are all streamed."""
    draws = random.Random(seed)
    layers = draws.randint(2, 12)
    compute = [draws.uniform(0.1, 1.0) for _ in range(layers)]
    transfer = [draws.choice([0.0, draws.uniform(0.1, 2.0)]) for _ in range(layers)]
    if seed % 5 == 0:
        compute, transfer = [compute[0]] * layers, [draws.uniform(0.1, 2.0)] * layers
    pause = draws.choice([0.0, draws.uniform(0.0, 5.0)])
    ends = by_events(compute, transfer, pause, 64)
    assert cycle_seconds(compute, transfer, pause) == pytest.approx((ends[63] - ends[31]) / 32, rel=1e-9)


def test_streamed_layers_set_the_pace() -> None:
    """6 of 10 layers, .1 s each over the link: it alone decides, so seven more tokens and their drafts are free."""
    swap = LayerSwap(6, 10, 0.1)
    target = [0.05 * (1 + 0.1 * m) for m in range(8)]
    plain, *verified = swap.applied(target, 0.005)
    assert plain == pytest.approx(0.6)
    assert [cost + n * 0.005 for n, cost in enumerate(verified, 1)] == pytest.approx([0.6] * 7)
    assert LayerSwap(1, 10, 1e-9).cost(0.05) == pytest.approx(0.05)

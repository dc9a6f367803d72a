"""distill/planning/cases.py: simulated cycles against closed forms and a simulator of another build."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

import pytest

from distill.planning.cases import LayerSwap, cycle_seconds
from distill.planning.hardware import Hardware, StepWork


def described(**figures: float) -> Hardware:
    sizes = {"memory_gb_per_s": 100.0, "compute_tflop_per_s": 10.0, "overhead_ms": 1e-9} | figures
    return Hardware.model_validate({"name": "a box"} | {k: {"value": v, "source": "made up"} for k, v in sizes.items()})


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


def test_jitter_costs_time_and_is_seeded() -> None:
    """Where products and transfers take alike, each waits for the slower of the two; where the link alone decides, the
    mean is that of its transfers."""
    even = [cycle_seconds([1.0] * 8, [1.0] * 8, 0.0, jitter=0.3) for _ in range(2)]
    assert even[0] == even[1] and all(8.2 < cycle < 9.5 for cycle in even)
    assert cycle_seconds([0.01] * 8, [1.0] * 8, 0.0, jitter=0.3) == pytest.approx(8.0, rel=0.02)


def test_what_does_not_fit_is_streamed() -> None:
    """10 layers of 1 GB and a head of 2 GB, on 9 GB of which .5 are reserved: 3.5 GB and two buffers go, 6 layers."""
    work = StepWork(10, 1e9, 12e9, 0.0, 1.0, 0.0, 6e9)
    swap = LayerSwap.of(work, described(memory_gb=9.0, link_gb_per_s=10.0), 0.5e9)
    assert swap.streamed == 6 and swap.transfer_seconds == pytest.approx(0.1)
    assert swap.seconds(1, 0) == pytest.approx(0.6, rel=1e-6)  # the link alone decides
    assert swap.seconds(8, 0, pause=0.05) == pytest.approx(0.6, rel=1e-6)  # seven more tokens and their drafts are free
    assert "6 of 10 layers (6.0 GB)" in swap.sentence(0)
    assert LayerSwap.of(work, described(memory_gb=13.0, link_gb_per_s=10.0), 0.5e9).streamed == 0
    assert LayerSwap.of(work, described(link_share=0.25, link_gb_per_s=10.0), 0.0).streamed == 3


def test_all_experts_of_a_layer_are_streamed() -> None:
    """The tokens choose experts when the layer is computed, too late to fetch only those."""
    work = StepWork(4, 0.5e9, 1e9, 8e9, 0.125, 0.0, 1e9)
    swap = LayerSwap.of(work, described(link_share=1.0, link_gb_per_s=10.0), 0.0)
    assert swap.layer_bytes == pytest.approx(0.5e9 + 8e9 * 0.875 / 4) and swap.streamed == 4

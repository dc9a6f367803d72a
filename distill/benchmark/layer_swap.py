"""Layer swapping: a target larger than the device's memory, whose other layers stream over a link in every step.

Two buffers hold a streamed layer each: while one is computed, the next is on its way. The weights do not depend on the
tokens, so that the first layers of the next step come while the draft works. Many tokens of a step then cost little
more than one: their products are done while the link is busy.

Legend: m tokens of a step, t seconds of a layer's transfer, c(m) seconds of its products, d seconds of drafting.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from distill.benchmark.hardware import Hardware, StepWork

BUFFERS = 2
STEPS = 64  # that are simulated; the first half fills the buffers
JITTERY_STEPS = 1024  # where transfers vary, so that the mean is known to a per cent or so


def cycle_seconds(
    compute: Sequence[float], transfer: Sequence[float], pause: float, jitter: float = 0.0, seed: int = 0
) -> float:
    """Seconds from one step to the next, in the long run: `compute` [L] and `transfer` [L] (0: the layer is resident)
    of each layer, and a `pause` between steps in which the link goes on.

    Every transfer and every layer's computation is an event. A transfer begins when the link is free and the layer that
    its buffer held has been computed; a layer begins when the one before it has been computed and its weights are
    there. `jitter` is the standard deviation of a transfer's time relative to its mean (log-normal).
    """
    draws, spread = random.Random(seed), math.sqrt(math.log1p(jitter**2))
    steps = JITTERY_STEPS if jitter else STEPS
    link = now = half = 0.0
    computed = [0.0] * BUFFERS  # when the layers in the buffers have been computed, the older one first
    for step in range(steps):
        if step == steps // 2:
            half = now
        now += pause
        for seconds, weights in zip(compute, transfer, strict=True):
            if weights:
                factor = math.exp(draws.gauss(-(spread**2) / 2, spread)) if jitter else 1.0
                link = max(link, computed.pop(0)) + weights * factor
                now = max(now, link)
            now += seconds
            if weights:
                computed.append(now)
    return (now - half) / (steps - steps // 2)


@dataclass(frozen=True)
class LayerSwap:
    """A target of which `streamed` layers, spread evenly over all, come over the link of `hardware` in each step.

    `layer_bytes` are those of a whole layer: which experts it needs is known too late to fetch only them.
    """

    work: StepWork
    hardware: Hardware
    streamed: int
    layer_bytes: float

    @classmethod
    def of(cls, work: StepWork, hardware: Hardware, reserved: float) -> LayerSwap:
        """As many layers stay as fit: of the device's memory without `reserved` bytes (the draft, caches) and the
        buffers, or of the share of the weights that the machine's file names."""
        layer = work.layer_bytes + work.expert_bytes * (1 - work.used) / work.layers
        total = work.shared_bytes + work.expert_bytes
        if hardware.memory_gb is not None:
            away = total - (hardware.memory_gb.value * 1e9 - reserved)
            if away > 0:
                away += BUFFERS * layer
        else:
            assert hardware.link_share is not None
            away = total * hardware.link_share.value
        return cls(work, hardware, min(work.layers, max(0, math.ceil(away / layer - 1e-9))), layer)

    @property
    def transfer_seconds(self) -> float:
        """t, of one layer."""
        assert self.hardware.link_gb_per_s is not None
        return self.layer_bytes / self.hardware.link_gb_per_s.value / 1e9

    def seconds(self, tokens: int, depth: int, pause: float = 0.0) -> float:
        """From step to step of `tokens` tokens behind `depth` cached ones, with a `pause` between them."""
        layers, work, machine = self.work.layers, self.work, self.hardware
        places = {place * layers // self.streamed for place in range(self.streamed)} if self.streamed else set()
        transfer = [self.transfer_seconds if place in places else 0.0 for place in range(layers)]
        head = work.shared_bytes + work.used * work.expert_bytes - layers * work.layer_bytes
        share = head / max(work.shared_bytes + work.used * work.expert_bytes, 1.0)
        whole = work.seconds(tokens, depth, machine)
        compute = [whole * (1 - share) / layers] * layers
        jitter = 0.0 if machine.link_jitter is None else machine.link_jitter.value
        return cycle_seconds([*compute, whole * share], [*transfer, 0.0], pause, jitter)

    def sentence(self, depth: int) -> str:
        """How much of the target streams, and how many tokens of a step its transfer hides."""
        if not self.streamed:
            return f"The whole target fits into the memory of {self.hardware.name}: nothing is streamed."
        single, hidden = self.seconds(1, depth), 1
        while hidden < 512 and self.seconds(2 * hidden, depth) <= 1.02 * single:
            hidden *= 2
        size, free = self.streamed * self.layer_bytes / 1e9, "512 or more" if hidden >= 512 else str(hidden)
        return (
            f"{self.streamed} of {self.work.layers} layers ({size:.1f} GB) stream over the link in every step, through "
            f"{BUFFERS} buffers: {single:.2f} s, {1 / single:.2f} tokens/s without a draft. Up to {free} tokens of a "
            "step cost as much as one, within 2 %."
        )

"""The choice of a draft's weights on a CPU, `draft_weights: auto`: as they are, or rounded to 8 or 4 bits."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from distill.engines.model import Model
from distill.engines.torch.products.linear import Bits
from distill.progress import Progress

TEXT = (
    "def mean(values: list[float]) -> float:\n    if not values:\n        raise ValueError('no values')\n"
    "    return sum(values) / len(values)\n\nThe function above returns the average of a list. It is called once for "
    "each group, so that an empty one is reported before a division. To use it, pass the numbers as floats:\n\n"
    "1. Read the table.\n2. Select the column.\n3. Print the mean of every group.\n"
)
REPEATS = 5  # of a timed step. The fastest counts.
MAX_DRAFTED = 8  # drafted tokens of the longest round that is considered
MIN_WEIGHTS = 4_000_000  # Products take a small part of a step of a smaller draft.
MIN_GAIN = 1.02  # Rounding must make decoding this many times as fast.


@dataclass(frozen=True)
class Weights:
    """The chosen type, None for the draft as it is, and the reason in words."""

    chosen: Bits | None
    words: str


def best_weights(target: Model, candidates: Mapping[Bits | None, Model], ids: Sequence[int]) -> Weights:
    """Return the weights with which drafting after `ids` is expected to be fastest.

    `candidates` holds the draft with each type of weights; None names the draft as it is. The steps of all models are
    timed. The acceptance is the mean overlap of target and draft at the positions of `ids`. A candidate's speed is that
    of its best draft length.
    """
    if len(candidates) == 1:
        return Weights(None, "")
    progress = Progress("types of the draft, timed once", len(candidates), brief=True)
    wanted = _distributions(target, ids)
    steps = [_step_seconds(target, ids, count) for count in (1, MAX_DRAFTED // 2 + 1)]
    speeds, words = dict[Bits | None, float](), list[str]()
    for bits, model in candidates.items():
        acceptance = float(wanted.minimum(_distributions(model, ids)).sum(-1).mean())
        seconds = _step_seconds(model, ids, 1)
        speeds[bits] = max(_speed(length, acceptance, steps, seconds) for length in range(MAX_DRAFTED + 1))
        words.append(f"{bits or 'as they are'}: a step {seconds * 1e3:.0f} ms, acceptance {acceptance:.2f}")
        progress.step()
    best = max(speeds, key=lambda bits: speeds[bits])
    chosen = best if speeds[best] > MIN_GAIN * speeds[None] else None
    return Weights(chosen, f"draft_weights auto: {chosen or 'as they are'} ({'; '.join(words)})")


def _speed(length: int, acceptance: float, target_seconds: Sequence[float], draft_seconds: float) -> float:
    """Return the tokens per second of a fixed draft length.

    `target_seconds` are T(1) and T(MAX_DRAFTED / 2 + 1). T(m) is taken from the line through both.
    """
    tokens = sum(acceptance**i for i in range(length + 1))
    first, later = target_seconds
    target = first + max(later - first, 0.0) * length / (MAX_DRAFTED // 2)
    return tokens / (target + length * draft_seconds)


def _distributions(model: Model, ids: Sequence[int]) -> Tensor:
    """Return the distributions [n, V] after each of `ids`."""
    model.rollback([0])
    return model.extend(ids).full().softmax(-1)


def _step_seconds(model: Model, ids: Sequence[int], count: int) -> float:
    """Return the seconds of the fastest of REPEATS steps of `count` tokens after `ids`."""
    seconds = []
    model.rollback([0])
    model.extend(ids, want=[len(ids) - 1])
    for _ in range(REPEATS + 1):  # The first step makes buffers.
        model.rollback([len(ids)])
        started = time.perf_counter()
        model.extend(ids[:count]).argmax()
        seconds.append(time.perf_counter() - started)
    model.rollback([0])
    return min(seconds[1:])

"""Which type of weights serves a draft on a CPU best: `draft_weights: auto`.

Legend: T target, D draft, n drafted tokens, a acceptance.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from distill.engines.model import Model
from distill.engines.torch.products import Bits
from distill.progress import Progress

TEXT = (
    "def mean(values: list[float]) -> float:\n    if not values:\n        raise ValueError('no values')\n"
    "    return sum(values) / len(values)\n\nThe function above returns the average of a list. It is called once for "
    "each group, so that an empty one is reported before a division. To use it, pass the numbers as floats:\n\n"
    "1. Read the table.\n2. Select the column.\n3. Print the mean of every group.\n"
)
REPEATS = 5  # of a step, of which the fastest counts
LONGEST = 8  # drafted tokens
LEAST = 4_000_000  # weights: the products of a smaller draft are not what its steps take
GAIN = 1.02  # times as fast: what rounding must bring


@dataclass(frozen=True)
class Weights:
    """What was chosen, and why in words."""

    chosen: Bits | None
    words: str


def best_weights(target: Model, candidates: Mapping[Bits | None, Model], ids: Sequence[int]) -> Weights:
    """The weights with which drafting after `ids` is expected to be fastest, from measured steps and acceptance.

    a is the mean overlap of both models' distributions at the places of `ids`; a candidate's speed is that of its best
    length. None names the draft as it is.
    """
    if len(candidates) == 1:
        return Weights(None, "")
    progress = Progress("types of the draft, timed once", len(candidates), brief=True)
    wanted = _distributions(target, ids)
    steps = [_seconds(target, ids, count) for count in (1, LONGEST // 2 + 1)]
    speeds, words = dict[Bits | None, float](), list[str]()
    for bits, model in candidates.items():
        accepted = float(wanted.minimum(_distributions(model, ids)).sum(-1).mean())
        step = _seconds(model, ids, 1)
        speeds[bits] = max(_speed(n, accepted, steps, step) for n in range(LONGEST + 1))
        words.append(f"{bits or 'as they are'}: a step {step * 1e3:.0f} ms, acceptance {accepted:.2f}")
        progress.step()
    best = max(speeds, key=lambda bits: speeds[bits])
    chosen = best if speeds[best] > GAIN * speeds[None] else None
    return Weights(chosen, f"draft_weights auto: {chosen or 'as they are'} ({'; '.join(words)})")


def _speed(length: int, accepted: float, steps: Sequence[float], draft: float) -> float:
    """Tokens per second of a fixed length; T(m) on the line through `steps`, T(1) and T(LONGEST / 2 + 1)."""
    tokens = sum(accepted**i for i in range(length + 1))
    target = steps[0] + max(steps[1] - steps[0], 0.0) * length / (LONGEST // 2)
    return tokens / (target + length * draft)


def _distributions(model: Model, ids: Sequence[int]) -> Tensor:
    """The distributions [n, V] after each of `ids`."""
    model.rollback([0])
    return model.extend(ids).full().softmax(-1)


def _seconds(model: Model, ids: Sequence[int], count: int) -> float:
    """The fastest of REPEATS steps of so many tokens after `ids`."""
    taken = []
    model.rollback([0])
    model.extend(ids, want=[len(ids) - 1])
    for _ in range(REPEATS + 1):  # the first one makes buffers
        model.rollback([len(ids)])
        started = time.perf_counter()
        model.extend(ids[:count]).argmax()
        taken.append(time.perf_counter() - started)
    model.rollback([0])
    return min(taken[1:])

"""Cost curves: the seconds a model takes for m tokens of one sequence at a depth.

Legend: m tokens of one step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from distill.models.base import Model


def measure_steps(
    model: Model, counts: Sequence[int], depth: int, repeats: int, vocabulary: int
) -> dict[int, tuple[float, float, float]]:
    """Median, lowest and highest seconds of a step of m tokens, for each m, after a warm-up that is thrown away.

    The counts are visited in turn, round after round, so that a slow spell of the machine touches all of them. The
    model is left with `depth` tokens committed.
    """
    model.rollback([0])
    model.extend([7 * i % vocabulary for i in range(depth)], want=[depth - 1])
    tokens = [(11 * i + 3) % vocabulary for i in range(max(counts))]
    seconds: dict[int, list[float]] = {m: [] for m in counts}
    for repeat in range(repeats + 1):
        for m in counts:
            started = time.perf_counter()
            model.extend(tokens[:m]).argmax()
            elapsed = time.perf_counter() - started
            model.rollback([depth])
            if repeat:
                seconds[m].append(elapsed)
    return {m: (statistics.median(taken), min(taken), max(taken)) for m, taken in seconds.items()}


def cost_curve(
    model: Model, title: str, backend: str, dtype: str, max_tokens: int, depth: int, repeats: int
) -> dict[str, Any]:
    """The curve of one model as profile.json keeps it; its lists run over m = 1..max_tokens."""
    depth = min(depth, model.capacity - max_tokens)
    counts = list(range(1, max_tokens + 1))
    found = measure_steps(model, counts, depth, repeats, model.vocabulary_size)
    return {
        "model": title,
        "backend": backend,
        "dtype": dtype,
        "depth": depth,
        "repeats": repeats,
        "tokens": counts,
        "seconds": [found[m][0] for m in counts],
        "low": [found[m][1] for m in counts],
        "high": [found[m][2] for m in counts],
    }


def predicted_speedup(target: dict[int, float], draft: float, length: int, accepted: Sequence[float]) -> float:
    """Decoding speed relative to plain for draft length γ, from step costs and acceptance by position (given reached).

    S = T(1)·(1 + Σ_i Π_{j≤i} a_j) / (T(γ + 1) + γ·D); `target` maps m to T(m), `draft` is D(1), `accepted` is a_1..a_γ.
    """
    survive, expected = 1.0, 1.0
    for position in range(length):
        survive *= accepted[position]
        expected += survive
    return target[1] * expected / (target[length + 1] + length * draft)

"""Cost curves: the seconds a model takes for m tokens of one sequence at a depth.

Legend: m tokens of one step, T target, D draft, n or γ drafted tokens.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from distill.errors import DataError
from distill.files import has_form, read_json, write_json
from distill.machine import machine
from distill.models.base import Model
from distill.progress import Progress
from distill.results.serialise import from_json

FORMAT = 1  # of saved curves
UNSTEADY = 1.5  # a median this many times the fastest repeat was disturbed by other programs


def measure_steps(
    model: Model, counts: Sequence[int], depth: int, repeats: int, vocabulary: int, progress: Progress | None = None
) -> dict[int, tuple[float, float, float]]:
    """Median, lowest and highest seconds of a step of m tokens, for each m, after a warm-up that does not count.

    The counts take turns, round after round, so that a slow period of the machine affects all of them. The model is
    left with `depth` tokens committed.
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
        if progress is not None:
            progress.step()
    return {m: (statistics.median(taken), min(taken), max(taken)) for m, taken in seconds.items()}


def doubt(medians: Sequence[float], fastest: Sequence[float]) -> str:
    """A warning for a curve of which a quarter or more was disturbed; empty for a steady one.

    Other programs can make a step slower, never faster. So medians far above the fastest repeat show that something
    else was running; where all repeats were slowed alike, nothing shows it.
    """
    disturbed = sum(median > UNSTEADY * low for median, low in zip(medians, fastest, strict=True))
    if 4 * disturbed < len(medians):
        return ""
    return (
        f"{disturbed} of {len(medians)} step sizes took more than {UNSTEADY:g} times their fastest repeat: other "
        "programs were using this machine, so measure again when it is quiet"
    )


def predicted_speedup(target: dict[int, float], draft: float, length: int, accepted: Sequence[float]) -> float:
    """Decoding speed relative to plain for draft length γ, from step costs and acceptance by position (given reached).

    S = T(1)·(1 + Σ_i Π_{j≤i} a_j) / (T(γ + 1) + γ·D); `target` maps m to T(m), `draft` is D(1), `accepted` is a_1..a_γ.
    """
    survive, expected = 1.0, 1.0
    for position in range(length):
        survive *= accepted[position]
        expected += survive
    return target[1] * expected / (target[length + 1] + length * draft)


@dataclass(frozen=True)
class StepCosts:
    """Seconds at one depth: the target's T(1..), the draft's D(1) and D(2), and the overhead of a round."""

    target: tuple[float, ...]
    draft: float
    draft_two: float
    overhead: float = 0.0

    def round_seconds(self, drafted: int) -> float:
        """T(n + 1) + D₀ + n·D, for a round whose first draft step takes one token."""
        return self.target[drafted] + self.overhead + drafted * self.draft


@dataclass(frozen=True)
class CostCurve:
    """Medians as measured, never smoothed: seconds[i][m − 1] of a step of m tokens at depths[i], depths rising.

    `fastest` and `slowest` are the extremes of the same repeats, empty where they were not recorded. `unit` is
    "seconds", or "T(1)" for an imported curve of relative costs; `note` is a caveat for readers.
    """

    model: str
    backend: str
    depths: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    repeats: int = 0
    unit: str = "seconds"
    note: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    fastest: tuple[tuple[float, ...], ...] = ()
    slowest: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.depths or len(self.depths) != len(self.seconds) or list(self.depths) != sorted(set(self.depths)):
            raise DataError(f"cost curve of {self.model}: {len(self.seconds)} rows for depths {list(self.depths)}")
        if not all(row and all(0 < value < math.inf for value in row) for row in self.seconds):
            raise DataError(f"cost curve of {self.model}: a step took no positive time", "measure the curve again")

    def at(self, depth: int) -> tuple[float, ...]:
        """T(1..) of the deepest bucket that is not deeper than `depth`; of the first one where all are deeper."""
        below = [i for i, bucket in enumerate(self.depths) if bucket <= depth]
        return self.seconds[below[-1] if below else 0]

    def relative(self, depth: int) -> list[float]:
        """Per-token cost of m = 1.. relative to m = 1: T(m) / (m·T(1))."""
        row = self.at(depth)
        return [seconds / (m * row[0]) for m, seconds in enumerate(row, start=1)]


def measure_curve(
    model: Model, title: str, backend: str, depths: Sequence[int], most: int, repeats: int, show_progress: bool = True
) -> CostCurve:
    """Time steps of m = 1..`most` tokens at each depth that the model's context leaves room for.

    The first pass is a warm-up and does not count. Raises DataError when no depth fits.
    """
    fitting = sorted({depth for depth in depths if depth + most <= model.capacity})
    if not fitting:
        raise DataError(
            f"{title}: a context of {model.capacity} has no room for {most} tokens at depth {min(depths)}",
            "measure at smaller depths or fewer tokens",
        )
    progress = None
    if show_progress:
        progress = Progress(f"{title}: passes over 1..{most} tokens", len(fitting) * (repeats + 1))
    medians, fastest, slowest = [], [], []
    for depth in fitting:
        found = measure_steps(model, range(1, most + 1), depth, repeats, model.vocabulary_size, progress)
        row, low, high = zip(*found.values(), strict=True)
        medians.append(row)
        fastest.append(low)
        slowest.append(high)
    note = doubt([*chain(*medians)], [*chain(*fastest)])
    return CostCurve(
        title,
        backend,
        tuple(fitting),
        tuple(medians),
        repeats,
        note=note,
        machine=machine(),
        fastest=tuple(fastest),
        slowest=tuple(slowest),
    )


@dataclass(frozen=True)
class PairCost:
    """The cost of a round: the target's curve, the draft's (m = 1, 2 at least), and seconds of everything else (D₀)."""

    target: CostCurve
    draft: CostCurve
    overhead_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.target.unit != self.draft.unit:
            raise DataError(
                f"the target's costs are in {self.target.unit}, the draft's in {self.draft.unit}",
                "measure both on one machine",
            )
        if min(len(row) for row in self.draft.seconds) < 2:
            raise DataError(f"the curve of {self.draft.model} has no D(2)", "measure it with at least 2 tokens")

    def at(self, depth: int) -> StepCosts:
        """The costs at a depth, each model's from its own nearest bucket below."""
        draft = self.draft.at(depth)
        return StepCosts(self.target.at(depth), draft[0], draft[1], self.overhead_seconds)

    def speedup(self, length: int, accepted: Sequence[float], depth: int) -> float:
        """S(n) of a fixed length from acceptance by position (given reached), overhead included; plain is 1."""
        costs = self.at(depth)
        if length >= len(costs.target) or length > len(accepted):
            raise DataError(
                f"draft length {length} needs T({length + 1}) and {length} acceptance rates; "
                f"there are {len(costs.target)} and {len(accepted)}",
                "measure a longer curve or ask for a smaller length",
            )
        target = dict(enumerate(costs.target, start=1))
        without_overhead = predicted_speedup(target, costs.draft, length, accepted)
        seconds = costs.round_seconds(length)
        return without_overhead * (seconds - costs.overhead) / seconds if length else without_overhead

    def best_length(self, accepted: Sequence[float], depth: int) -> tuple[int, float]:
        """The length of greatest S(n), the smallest on ties, and its S; 0 when plain decoding is best."""
        longest = min(len(self.at(depth).target) - 1, len(accepted))
        found = [self.speedup(n, accepted, depth) for n in range(longest + 1)]
        best = max(range(longest + 1), key=lambda n: found[n])
        return best, found[best]

    def save(self, path: Path) -> None:
        """Write the pair as JSON; see `load_costs`."""
        write_json(path, {"format": FORMAT, **asdict(self)})


def save_cost_curve(curve: CostCurve, path: Path) -> None:
    """Write one curve as JSON; see `load_cost_curve`."""
    write_json(path, {"format": FORMAT, **asdict(curve)})


def load_cost_curve(path: Path) -> CostCurve:
    """Read what `save_cost_curve` wrote; raises DataError when it is missing, damaged or of another format."""
    return _curve(_checked(path), path)


def load_costs(path: Path) -> PairCost:
    """Read what `PairCost.save` wrote; raises DataError when it is missing, damaged or of another format."""
    found = _checked(path)
    if not has_form(found, {"target": dict, "draft": dict, "overhead_seconds": (int, float)}):
        raise DataError(f"{path} does not hold the costs of a pair", "measure them again")
    return PairCost(_curve(found["target"], path), _curve(found["draft"], path), float(found["overhead_seconds"]))


def _checked(path: Path) -> dict[str, Any]:
    found = read_json(path)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise DataError(f"{path} holds no cost curve of format {FORMAT}", "measure it again with this version")
    return {name: value for name, value in found.items() if name != "format"}


def _curve(fields: Any, path: Path) -> CostCurve:
    unknown = sorted(set(fields) - set(CostCurve.__dataclass_fields__))
    if unknown:
        raise DataError(f"{path} does not hold a cost curve: {unknown[0][:60]!r} is no part of one", "measure it again")
    return from_json(fields, CostCurve, str(path))

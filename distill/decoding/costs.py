"""Cost curves: the seconds a model takes for m tokens of one sequence at a depth; and the draft lengths they favour.

Legend: m tokens of one step, T target, D draft, n or γ drafted tokens of a round.
"""

from __future__ import annotations

import math
import operator
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from distill.engines.model import Model, resent
from distill.errors import DataError
from distill.files import read_object, write_json
from distill.machine import machine
from distill.progress import Progress

FORMAT = 1  # of saved curves
MEASURE_IT = "write one with `distill profile MODEL --out FILE`"
UNSTEADY = 1.5  # a median this many times the fastest repeat was disturbed by other programs
STEADY, ENOUGH = 1.05, 3  # one this near to it is known well enough from this many repeats


def steady(seconds: Sequence[float]) -> bool:
    """Whether more repeats would hardly change the median: other programs make a step slower, never faster."""
    return len(seconds) >= ENOUGH and statistics.median(seconds) <= STEADY * min(seconds)


def step_seconds(
    model: Model,
    counts: Sequence[int],
    depth: int,
    repeats: int,
    progress: Progress | None = None,
    until_steady: bool = False,
) -> dict[int, list[float]]:
    """The seconds of each repeat of a step of m tokens, for each m, after a warm-up that does not count.

    The counts take turns, round after round, so that a slow period of the machine affects all of them; with
    `until_steady` only those go on that are not `steady`. The model is left with `depth` tokens committed.
    """
    vocabulary = model.vocabulary_size
    model.rollback([0])
    model.extend([7 * i % vocabulary for i in range(depth)], want=[depth - 1])
    tokens = [(11 * i + 3) % vocabulary for i in range(max(counts))]
    seconds: dict[int, list[float]] = {m: [] for m in counts}
    for repeat in range(repeats + 1):
        for m in counts:
            if until_steady and steady(seconds[m]):
                continue
            started = time.perf_counter()
            model.extend(tokens[:m]).argmax()
            elapsed = time.perf_counter() - started
            model.rollback([depth])
            if repeat:
                seconds[m].append(elapsed)
        if progress is not None:
            progress.step()
    return seconds


def measure_steps(
    model: Model, counts: Sequence[int], depth: int, repeats: int, until_steady: bool = False
) -> dict[int, float]:
    """The medians of `step_seconds`."""
    seconds = step_seconds(model, counts, depth, repeats, until_steady=until_steady)
    return {m: statistics.median(taken) for m, taken in seconds.items()}


def doubt(steps: Sequence[Sequence[float]]) -> str:
    """A warning for steps, the seconds of each, of which a quarter or more was disturbed; empty for steady ones.

    Other programs can make a step slower, never faster. So medians far above the fastest repeat show that something
    else was running; where all repeats were slowed alike, nothing shows it.
    """
    disturbed = sum(statistics.median(taken) > UNSTEADY * min(taken) for taken in steps)
    if 4 * disturbed < len(steps):
        return ""
    return (
        f"{disturbed} of {len(steps)} step sizes took more than {UNSTEADY:g} times their fastest repeat: other "
        "programs were using this machine, so measure again when it is quiet"
    )


@dataclass(frozen=True)
class Costs:
    """Seconds of a pair's steps at one depth.

    `target`: T(1..), of plain decoding and of verifying n = 1, 2, … drafted tokens. `draft` and `draft_two`: D(1) and
    D(2). `target_prompt`, `draft_prompt`: of reading a token of the prompt. `resent` returns how many tokens the
    target's next step computes again; None if it never does.
    """

    target: tuple[float, ...]
    draft: float
    draft_two: float
    target_prompt: float = 0.0
    draft_prompt: float = 0.0
    resent: Callable[[], int] | None = field(default=None, compare=False)

    def of_target(self, target: Model) -> Costs:
        """These costs with what the target's next step computes again."""
        return replace(self, resent=partial(resent, target)) if getattr(target, "resends", False) else self

    def draft_step(self, unread: int) -> float:
        """D of a step that reads this many tokens: beyond two it grows as the target's steps do, beyond these as a
        prompt."""
        if unread <= 2:
            return self.draft_two if unread == 2 else self.draft
        grown = self.draft * self.target[min(unread, len(self.target)) - 1] / self.target[0]
        return max(grown, self.draft_two) + max(unread - len(self.target), 0) * self.draft_prompt

    def again(self, drafted: int, expected: float, whole: float) -> float:
        """Seconds beyond T(n + 1) for tokens that are computed again, now and because of this round.

        `expected` tokens E come from the round, which is accepted whole with the probability S. If it is not, all of
        its tokens are computed again: E + r − (n + 1 + r)·S in the mean, where r are computed again now. Each costs as
        much as a token more in a step.
        """
        if self.resent is None:
            return 0.0
        now = self.resent()
        later = expected + now - (drafted + 1 + now) * whole
        return (now + later) * (self.target[-1] - self.target[0]) / max(len(self.target) - 1, 1)

    def predicted_speedup(self, length: int, accepted: Sequence[float], prompt: int = 0, new: float = 2) -> float:
        """Speed of a fixed `length` over plain decoding (Leviathan et al. 2023, eq. 1, with measured times), for `new`
        tokens after `prompt` tokens that both models read.

        accepted[i] is the acceptance at position i, given that it was reached.
        """
        tokens, seconds = tokens_per_round(accepted[:length]), self.target[length]
        if length:
            whole = math.prod(accepted[:length])  # of rounds follow one that was accepted whole
            seconds += length * self.draft + whole * (self.draft_two - self.draft)
        plain_seconds = prompt * self.target_prompt + (new - 1) * self.target[0]
        reading = prompt * (self.target_prompt + self.draft_prompt)
        return plain_seconds / (reading + (new - 1) / tokens * seconds)


REPEATS = 2  # of every timed step, besides a warm-up: the rounds of a session correct the costs
DEPTH = 128  # tokens in both contexts, at most: a longer prompt would take longer to read than all steps
PROMPT_STEP = 64  # tokens of the step that tells the price of reading a prompt


def measure_costs(target: Model, draft: Model, longest: int, depth: int = DEPTH) -> Costs:
    """The costs of rounds of up to `longest` drafted tokens; of a target alone, `draft` is the target.

    Other programs make a step slower, never faster, so that the fastest repeat counts. Longer steps are taken to cost
    no less (see `rising`). Raises DataError for a context without room for a round.
    """
    capacity = min(target.capacity, draft.capacity)
    if capacity < 3:
        raise DataError(f"a context of {capacity} tokens has no room for a drafted token")
    longest = min(longest, capacity - 2)
    depth = max(1, min(depth, capacity - max(longest + 1, PROMPT_STEP)))

    def fastest(model: Model, most: int) -> dict[int, float]:
        prompt = max(2, min(PROMPT_STEP, capacity - depth))
        # The first of two plain steps follows one of another size, which costs more in llama.cpp.
        steps = step_seconds(model, [1, *range(1, most + 1), prompt], depth, REPEATS)
        seconds = {count: min(taken) for count, taken in steps.items()}
        return seconds | {0: max(seconds[prompt] - seconds[1], 0.0) / (prompt - 1)}

    verified = fastest(target, longest + 1)
    steps = tuple(rising([verified[count] for count in range(1, longest + 2)]))
    if draft is target:
        return Costs(steps, 0.0, 0.0, verified[0])
    drafted = fastest(draft, 2)
    return Costs(steps, drafted[1], max(drafted[1], drafted[2]), verified[0], drafted[0])


@dataclass(frozen=True)
class CostCurve:
    """Medians as measured, never smoothed: seconds[i][m − 1] of a step of m tokens at depths[i], depths rising.

    `unit` is "seconds", or "T(1)" for an imported curve of relative costs; `note` is a caveat for readers.
    """

    model: str
    backend: str
    depths: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    repeats: int = 0
    unit: str = "seconds"
    note: str = ""
    machine: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.depths or len(self.depths) != len(self.seconds) or list(self.depths) != sorted(set(self.depths)):
            raise DataError(f"cost curve of {self.model}: {len(self.seconds)} rows for depths {list(self.depths)}")
        if not all(row and all(0 < value < math.inf for value in row) for row in self.seconds):
            hint = "measure the curve again"
            raise DataError(f"cost curve of {self.model}: the time of a step is not positive", hint)

    def at(self, depth: int) -> tuple[float, ...]:
        """T(1..) of the deepest bucket that is not deeper than `depth`; of the first one where all are deeper."""
        below = [i for i, bucket in enumerate(self.depths) if bucket <= depth]
        return self.seconds[below[-1] if below else 0]

    def relative(self, depth: int) -> list[float]:
        """Per-token cost of m = 1.. relative to m = 1: T(m) / (m·T(1))."""
        row = self.at(depth)
        return [seconds / (m * row[0]) for m, seconds in enumerate(row, start=1)]


def measure_curve(model: Model, title: str, backend: str, depths: Sequence[int], limit: int, repeats: int) -> CostCurve:
    """Time steps of m = 1..`limit` tokens at each depth that the model's context leaves room for.

    The first pass is a warm-up and does not count. Raises DataError when no depth fits.
    """
    fitting = sorted({depth for depth in depths if depth + limit <= model.capacity})
    if not fitting:
        raise DataError(f"{title}: a context of {model.capacity} has no room for {limit} tokens at depth {min(depths)}")
    progress = Progress(f"{title}: passes over 1..{limit} tokens", len(fitting) * (repeats + 1))
    rows = [step_seconds(model, range(1, limit + 1), depth, repeats, progress).values() for depth in fitting]
    medians = tuple(tuple(map(statistics.median, row)) for row in rows)
    return CostCurve(title, backend, tuple(fitting), medians, repeats, "seconds", doubt([*chain(*rows)]), machine())


def save_cost_curve(curve: CostCurve, path: Path) -> None:
    """Write a curve as JSON."""
    write_json(path, {"format": FORMAT, **asdict(curve)})


def load_cost_curve(path: Path) -> CostCurve:
    """A curve that `save_cost_curve` wrote; raises DataError for any other file."""
    if not path.is_file():
        raise DataError(f"there is no curve {path}", MEASURE_IT)
    saved = read_object(path, MEASURE_IT)
    if saved.pop("format", None) != FORMAT:
        raise DataError(f"{path} is not a cost curve of format {FORMAT}", MEASURE_IT)
    try:
        return TypeAdapter(CostCurve).validate_python(saved)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise DataError(f"{path}: `{where}` is missing or of another kind", MEASURE_IT) from None


def tokens_per_round(accepted: Sequence[float]) -> float:
    """τ = 1 + Σ_i Π_{j ≤ i} a_j, from the acceptance a_1..a_γ at each drafted position, given that it was reached."""
    return sum(accumulate(accepted, operator.mul), start=1.0)


def predicted_speedups(target: Sequence[float], draft: float, accepted: Sequence[float]) -> list[float]:
    """Decoding speed relative to plain for each draft length γ = 0.., as far as T(1..) and the acceptance reach.

    The best length is the first of the largest; at 0 plain decoding is faster.
    """
    costs = Costs(tuple(target), draft, draft)
    return [costs.predicted_speedup(n, accepted) for n in range(min(len(target) - 1, len(accepted)) + 1)]


def accepted_by_position(rounds: Sequence[tuple[int, int]]) -> list[float]:
    """Acceptance at each position, given that it was reached, from rounds of (drafted, accepted) tokens.

    It ends before the first position that no round reached.
    """
    rates: list[float] = []
    while reached := [accepted for drafted, accepted in rounds if drafted > len(rates) <= accepted]:
        rates.append(sum(accepted > len(rates) for accepted in reached) / len(reached))
    return rates


def rising(values: Sequence[float]) -> list[float]:
    """The values that never fall and are nearest to these in squares (pool adjacent violators, Ayer et al. 1955)."""
    pools: list[tuple[float, int]] = []  # means, and of how many values
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, many = pools.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]

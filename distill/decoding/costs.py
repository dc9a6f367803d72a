"""Cost curves: the seconds a model takes for m tokens of one sequence at a depth; and the draft lengths they favour.

Legend: m tokens of one step, T target, D draft, n or γ drafted tokens of a round.
"""

from __future__ import annotations

import math
import operator
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate, chain, count, takewhile
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
STEADY, ENOUGH = 1.05, 3  # one this near to it is known well enough from so many repeats


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
class StepCosts:
    """Seconds at one depth: the target's T(1..), the draft's D(1) and D(2), and the overhead of a round.

    `alone` are the target's T(1..) in rounds whose tokens no model drafts; empty where they are the same. `resent` says
    how many tokens the target's next step computes again; None where it never does. In rounds with a draft that is part
    of their time.
    """

    target: tuple[float, ...]
    draft: float
    draft_two: float
    overhead: float = 0.0
    alone: tuple[float, ...] = ()
    resent: Callable[[], int] | None = field(default=None, compare=False)

    def of_target(self, target: Model) -> StepCosts:
        """These costs with what the target's next step computes again."""
        return replace(self, resent=partial(resent, target)) if getattr(target, "resends", False) else self

    @property
    def undrafted(self) -> tuple[float, ...]:
        """T(1..) in rounds whose tokens come from text or counts."""
        return self.alone or self.target

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
        curve = self.undrafted
        return (now + later) * (curve[-1] - curve[0]) / max(len(curve) - 1, 1)


def range_start(depth: int, first: int) -> int:
    """Where the range of depths begins that a depth lies in: 0, then `first` or the next power of two after another."""
    return 0 if depth < first else 1 << (depth.bit_length() - 1)


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
            raise DataError(
                f"cost curve of {self.model}: the time of a step is not positive", "measure the curve again"
            )

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

    S(γ) = T(1)·τ / (T(γ + 1) + γ·D) (Leviathan et al. 2023, eq. 1, with measured times); `draft` is D(1), `accepted` is
    a_1.. as of `tokens_per_round`. The best length is the first of the largest; at 0 plain decoding is faster.
    """
    lengths = range(min(len(target) - 1, len(accepted)) + 1)
    return [target[0] * tokens_per_round(accepted[:n]) / (target[n] + n * draft) for n in lengths]


def accepted_by_position(rounds: Sequence[tuple[int, int]]) -> list[float]:
    """Acceptance at each position, given that it was reached, from rounds of (drafted, accepted) tokens.

    It ends before the first position that no round reached.
    """
    rates: list[float] = []
    while reached := [accepted for drafted, accepted in rounds if drafted > len(rates) <= accepted]:
        rates.append(sum(accepted > len(rates) for accepted in reached) / len(reached))
    return rates


# ── Costs of rounds, measured inside them (round_costs.py) ──


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


@dataclass(frozen=True)
class DraftSteps:
    """Seconds of a draft's steps: the first of a round, with one token and with two to read, and a later one."""

    first: float
    first_two: float
    later: float


NO_STEPS = DraftSteps(0.0, 0.0, 0.0)


def _curve(seconds: Mapping[int, float], first: int) -> tuple[float, ...]:
    """The seconds of `first`, `first` + 1, … drafted tokens, up to one that was not timed; they never fall."""
    return tuple(rising([seconds[drafted] for drafted in takewhile(seconds.__contains__, count(first))]))


@dataclass(frozen=True)
class PaidCosts:
    """Seconds of a pair's requests: of parts of rounds the medians, else means (see `typical`).

    `token`: of plain decoding; `verify[n]`: of a round of n drafted tokens without its draft steps, where the round
    before drafted another number. `by_argmax`: draft steps whose largest logit alone decides, as those of fixed
    lengths; `by_distribution`: those whose distribution is made and read. `target_prompt`, `draft_prompt`: of reading a
    token of the prompt. `settled[n]`: of whole rounds of n tokens drafted by argmax after two rounds of as many, the
    last of which was not accepted whole, or was: steps of a size that a model has just taken are cheaper (llama.cpp has
    their graph still), so that a fixed length costs other than its parts. Without n where no such round was timed.
    `alone[n]`, n = 0, 1, …: of the target's steps of n + 1 tokens, timed without a draft, the fastest repeats: behind a
    draft's steps and the reading of its distributions they take longer, in ik_llama.cpp by half.
    """

    token: float
    verify: Mapping[int, float]
    by_argmax: DraftSteps
    by_distribution: DraftSteps
    target_prompt: float
    draft_prompt: float
    settled: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    alone: Mapping[int, float] = field(default_factory=dict)

    def step_costs(self) -> StepCosts:
        """The costs that length rules and trees use, up to the first length that was not timed.

        What the first draft step costs beyond the others is the round's overhead. Rounds of more tokens are taken to
        cost no less (a shorter one could always be padded), which few repeats show only up to noise: see `rising`.
        """
        steps = self.by_distribution
        two = steps.later + max(steps.first_two - steps.first, 0.0)
        overhead = max(steps.first - steps.later, 0.0)
        return StepCosts((self.token, *_curve(self.verify, 1)), steps.later, two, overhead, _curve(self.alone, 0))

    def round_seconds(self, length: int, whole: float) -> float:
        """Seconds of a round of fixed `length` > 0; a share `whole` of rounds follow one that was accepted whole."""
        if length in self.settled:
            after_less, after_whole = self.settled[length]
            return after_less + whole * (after_whole - after_less)
        steps = self.by_argmax
        first = steps.first + whole * (steps.first_two - steps.first)
        return self.verify[length] + first + (length - 1) * steps.later

    def predicted_speedup(self, length: int, accepted: Sequence[float], prompt: int, new: float) -> float:
        """Speed of a fixed `length` > 0 over plain decoding, for `new` tokens after `prompt` tokens that both read.

        accepted[i] is the acceptance at position i, given that it was reached.
        """
        seconds = self.round_seconds(length, math.prod(accepted[:length]))
        return self.speedup_of_rounds(seconds, tokens_per_round(accepted[:length]), prompt, new)

    def speedup_of_rounds(self, seconds: float, tokens: float, prompt: int, new: float) -> float:
        """Speed of rounds of so many `seconds` and `tokens` over plain decoding: `new` tokens after `prompt` tokens.

        Both models read the prompt.
        """
        plain_seconds = prompt * self.target_prompt + (new - 1) * self.token
        reading = prompt * (self.target_prompt + self.draft_prompt)
        return plain_seconds / (reading + (new - 1) / tokens * seconds)

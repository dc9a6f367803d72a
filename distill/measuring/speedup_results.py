"""speedup.json as dataclasses, which tables, report page and model card read.

A `Configuration` (distill/recipe/configuration.py) is one way to decode. A `Measurement` is its result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from distill.files import Figure
from distill.measuring.evaluation_results import ByText
from distill.recipe.measuring import MOST_KL
from distill.tables import Interval, Value


@dataclass(frozen=True)
class PairMeasured:
    """The pair that a figure belongs to, and the backend that decoded it."""

    pair: str
    backend: str

    @property
    def key(self) -> tuple[str, str]:
        """The pair and the backend, which identify a part."""
        return self.pair, self.backend


CONTENDER_RATIO = 0.6  # A machine's speed hardly changes by more from one minute to another.


@dataclass(frozen=True)
class RoundFigures:
    """Where the seconds of a configuration's rounds go, without the prompt. For plain decoding, rounds are steps.

    Per round: `tokens` (τ), mean tokens of the target's step (`verified`), draft steps and seconds. `target_seconds`
    and `draft_seconds` are the time of all steps of each model. They are None if the device computes on after a call
    returns. `bound` is τ ÷ (T(m) + Σ D) in tokens per second, from steps timed with one model alone. It is NaN if every
    text ended with its first token.
    """

    tokens: float
    verified: float
    draft_steps: float
    seconds: float
    target_seconds: float | None
    draft_seconds: float | None
    bound: Figure

    @property
    def overhead_seconds(self) -> float | None:
        """The seconds that are spent in neither model."""
        if self.target_seconds is None or self.draft_seconds is None:
            return None
        return self.seconds - self.target_seconds - self.draft_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second after the prompt."""
        return self.tokens / self.seconds if self.seconds else math.nan


@dataclass(frozen=True)
class GroupFigures:
    """A configuration on the `count` prompts of a class (`group`), compared with plain decoding of the same prompts.

    The intervals of `speedup` and `tokens_per_round` resample prompts, or a suite's questions. They are NaN for one.
    """

    group: str
    count: int
    tokens_per_second: float
    tokens_per_round: float | None
    acceptance: float | None
    speedup: float | None
    speedup_low: Figure
    speedup_high: Figure
    tokens_low: Figure = math.nan
    tokens_high: Figure = math.nan


@dataclass(frozen=True)
class Measurement(PairMeasured):
    """The result of one configuration on all prompts, compared with plain decoding under the same sampler.

    `configuration` is its name in this table, and `settings` is everything that it reads. `length` is γ in the greedy
    sweep of fixed lengths (0: plain) and None for other configurations. `drafter` and `rule` are None if nothing is
    drafted. `sampler` is None for greedy. `identical`, `excused` and `different` count texts compared with plain greedy
    decoding. They are None for sampled texts. `lossy` is the reason why the text does not follow the target's
    distribution, or None. `predicted` is the speedup expected from the costs of steps and the conditional acceptance.
    `repeated` is the share of tokens that end three tokens which occurred before in the prompt or the text. Lookups
    profit from these, and degenerate text is full of them. `prompt_seconds` is the mean time to the first token, and
    `prompt_share` is its share of all seconds. The share is NaN for texts decoded at once, and in older results.
    `stopped` is the number of prompts after which the configuration was clearly slower than the fastest and was
    stopped. Its figures then compare these prompts. `positions` has the conditional acceptance of a draft's chains by
    drafted position.
    """

    configuration: str
    length: int | None
    drafter: str | None
    rule: str | None
    sampler: dict[str, int | float] | None
    tokens_per_second: float
    plain_tokens_per_second: float
    tokens_per_round: float | None
    acceptance: float | None
    speedup: Figure
    speedup_low: Figure
    speedup_high: Figure
    predicted: float | None
    identical: int | None
    excused: int | None
    different: int | None
    lossy: str | None
    repeated: float
    prompt_seconds: float
    rounds: RoundFigures
    by_class: list[GroupFigures] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    stopped: int | None = None
    positions: ByText = field(default_factory=dict)
    prompt_share: Figure = math.nan

    @property
    def is_plain(self) -> bool:
        """Whether nothing was drafted, under any sampler."""
        return self.drafter is None

    @property
    def distribution(self) -> str:
        """The distribution that the text follows, in words."""
        return "the target's" if self.lossy is None else f"LOSSY: {self.lossy}"

    @property
    def same_text(self) -> str:
        """How many greedy texts equal the plain ones, and how many differ at a rounding tie, or `sampled`."""
        if self.identical is None or self.excused is None or self.different is None:
            return "sampled"
        total = self.identical + self.excused + self.different
        return f"{self.identical}/{total}" + (f" (+{self.excused} ties)" if self.excused else "")


@dataclass(frozen=True)
class StepFigures:
    """Median seconds of a step of m tokens at a depth, with one model alone: T(m) of the target and D(m), by m."""

    depth: int
    target: dict[int, float]
    draft: dict[int, float]

    @property
    def by_model(self) -> dict[str, dict[int, float]]:
        """The steps of each model that was timed, by the model's name."""
        return {name: steps for name, steps in (("target", self.target), ("draft", self.draft)) if steps}


@dataclass(frozen=True)
class SpeedupPart(PairMeasured):
    """Everything that was measured of one pair by one backend.

    `kl` is the mean KL in nats from the target's own distributions to this backend's. It is None for the target's own
    backend, or if nothing was compared. `target` and `draft` are the models or files that were decoded. `pytorch` has
    PyTorch's settings, as in the report.
    """

    measurements: list[Measurement]
    steps: StepFigures
    kl: float | None = None
    target: str = ""
    draft: str | None = None
    pytorch: str = ""

    @property
    def plain(self) -> Measurement:
        """Plain greedy decoding."""
        return self.measurements[0]

    @property
    def by_position(self) -> dict[str, ByText]:
        """The positions of the longest greedy chain of a draft. Empty if none was drafted."""
        chains = [row for row in self.measurements if row.positions and row.sampler is None]
        longest = sorted(chains, key=lambda row: row.length or 0)[-1:]
        return {row.configuration: row.positions for row in longest}


@dataclass(frozen=True)
class InTurns(PairMeasured):
    """A way to decode, timed again with the engines taking turns.

    Its speedup is over the fastest plain decoding of all engines in the same turns. `place` is its place among the
    measurements of its part.
    """

    place: int
    configuration: str
    tokens_per_second: float
    speedup: Figure
    speedup_low: Figure
    speedup_high: Figure


def _fastest(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Return the fastest measurement of each pair and backend that drafted something."""
    best: dict[tuple[str, str], Measurement] = {}
    for row in measurements:
        if (
            row.acceptance is not None
            and math.isfinite(row.speedup)
            and (row.key not in best or row.speedup > best[row.key].speedup)
        ):
            best[row.key] = row
    return list(best.values())


@dataclass(frozen=True)
class SpeedupReport:
    """speedup.json of a run, or the measurement of any two models.

    `gguf` and `pytorch` name the engines' settings that are not the defaults. For any two models, `target` and `draft`
    are the names that the user gave, and `dropped` counts the records that were left out, by reason. A backend with a
    KL above MOST_KL does not decode the target's distributions. For all other backends, `in_turns` has plain decoding
    and the fastest way, the fastest first. `texts` names the source of the prompts, `table` the run or file whose
    n-grams were read. `suite` names a published suite and the part that was used. Its turns are the prompts. It is
    empty for other prompts. `asked` says in which form the prompts of files are asked.
    """

    command: str
    machine: dict[str, Any]
    prompts: int
    new_tokens: int
    sampler: dict[str, int | float]
    parts: list[SpeedupPart]
    in_turns: list[InTurns] = field(default_factory=list)
    gguf: str = ""
    pytorch: str = ""
    target: str = ""
    draft: str | None = None
    dropped: dict[str, int] = field(default_factory=dict)
    texts: str = ""
    table: str = ""
    verdict: str = ""
    suite: str = ""
    asked: str = ""
    version: Literal[1] = 1

    @property
    def measurements(self) -> list[Measurement]:
        """The measurements of all parts, in order."""
        return [measurement for part in self.parts for measurement in part.measurements]

    @property
    def _accepted(self) -> list[Measurement]:
        """The measurements of backends whose distributions are the target's, up to MOST_KL."""
        return [row for part in self.parts if (part.kl or 0) <= MOST_KL for row in part.measurements]

    @property
    def fastest_of_backends(self) -> dict[str, Measurement]:
        """The fastest fixed length of each backend's first pair. Its commands draft this many tokens, if it pays."""
        fastest = _fastest(row for row in self._accepted if row.length)
        return {row.backend: row for row in reversed(fastest)}

    @property
    def best(self) -> list[Measurement]:
        """The fastest way of each pair and backend to the target's greedy text, in the order of the table."""
        return _fastest(self.rivals)

    @property
    def _ways(self) -> list[Measurement]:
        """All lossless ways to the target's greedy text. If none of these drafts, the lossless sampled ways."""
        lossless = [row for row in self._accepted if row.lossy is None and (row.is_plain or row.acceptance is not None)]
        greedy, sampled = ([row for row in lossless if (row.sampler is None) == wanted] for wanted in (True, False))
        return sampled if sampled and all(row.is_plain for row in greedy) else greedy

    @property
    def rivals(self) -> list[Measurement]:
        """All lossless ways that drafted something, of backends whose KL is accepted."""
        return [row for row in self._ways if not row.is_plain]

    @property
    def contenders(self) -> set[tuple[str, str]]:
        """The engines that may be the fastest: their speed is at least CONTENDER_RATIO of the highest speed."""
        speeds: dict[tuple[str, str], float] = {}
        for row in (*self.plain, *self.best):
            speeds[row.key] = max(speeds.get(row.key, 0.0), row.tokens_per_second)
        return {key for key, speed in speeds.items() if speed >= CONTENDER_RATIO * max(speeds.values())}

    @property
    def fastest_way(self) -> Measurement:
        """The way to the target's greedy text with the most tokens per second, plain decoding included."""
        return max((*self.rivals, *self.plain), key=lambda row: row.tokens_per_second)

    @property
    def plain(self) -> list[Measurement]:
        """Plain decoding of each part, the fastest first."""
        return sorted((row for row in self._ways if row.is_plain), key=lambda row: -row.tokens_per_second)


def speedup_of(row: Measurement | GroupFigures) -> Value:
    """Return a speedup with its interval, or None if it was not measured."""
    return None if row.speedup is None else Interval(row.speedup, row.speedup_low, row.speedup_high)


def tokens_of(row: GroupFigures) -> Value:
    """Return the tokens per round with their interval, or None if nothing was drafted."""
    return None if row.tokens_per_round is None else Interval(row.tokens_per_round, row.tokens_low, row.tokens_high)

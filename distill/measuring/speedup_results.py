"""What the speedup stage measures: speedup.json as dataclasses, read by tables, report page and model card.

A `Configuration` (distill/recipe/configuration.py) is one way to decode; a `Measurement` is what it gave.
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
    """Which pair a figure belongs to, and by which backend it was decoded."""

    pair: str
    backend: str

    @property
    def key(self) -> tuple[str, str]:
        """Identifies the pair and backend."""
        return self.pair, self.backend


NEAR = 0.6  # one machine's minutes hardly differ by more


@dataclass(frozen=True)
class RoundFigures:
    """Where the seconds of a configuration's rounds go, the prompt apart; of plain decoding, of its steps.

    Of a round: its `tokens` (τ), mean tokens of the target's step (`verified`), draft steps and seconds;
    `target_seconds` and `draft_seconds` as they were paid in all steps of each model, None where a device computes on
    after a call returns. `bound` is τ ÷ (T(m) + Σ D), tokens per second, from steps timed with one model alone; NaN
    where every text ended with its first token.
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
        """What is spent in neither model."""
        if self.target_seconds is None or self.draft_seconds is None:
            return None
        return self.seconds - self.target_seconds - self.draft_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second behind the prompt."""
        return self.tokens / self.seconds if self.seconds else math.nan


@dataclass(frozen=True)
class GroupFigures:
    """A configuration on the `count` prompts of a class, which is the `group`, over plain decoding of the same.

    The intervals of `speedup` and `tokens_per_round` are by prompt, of a suite by question, NaN where there is one.
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
    """What one configuration gave on all prompts, beside the plain run of the same sampler.

    `configuration` is its name in this table, `settings` everything that it reads. `length` is γ of the greedy sweep of
    fixed lengths (0: plain) and None for every other configuration; `drafter` and `rule` are None where nothing is
    drafted. `sampler` is None for greedy.
    `identical`, `excused` and `different` count texts against the plain greedy run; None where texts are sampled.
    `lossy` is the reason why the text does not follow the target's distribution, None where it does.
    `predicted` is the speedup expected from the costs of steps and the conditional acceptance.
    `repeated` is the share of the tokens that end three tokens which stood before in the prompt or the text: lookups
    profit from these, and a degenerate text is full of them. `prompt_seconds` are the mean seconds until the first
    token. `stopped`: after this many prompts it was clearly slower than the fastest, and took no more; figures are over
    plain decoding of these. `positions` has the conditional acceptance of a draft's chains by drafted position.
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

    @property
    def is_plain(self) -> bool:
        """Whether nothing was drafted, under whatever sampler."""
        return self.drafter is None

    @property
    def distribution(self) -> str:
        """The distribution that the text follows, in words."""
        return "the target's" if self.lossy is None else f"LOSSY: {self.lossy}"

    @property
    def same_text(self) -> str:
        """How many greedy texts equal the plain ones, and how many diverge at a rounding tie; else `sampled`."""
        if self.identical is None or self.excused is None or self.different is None:
            return "sampled"
        total = self.identical + self.excused + self.different
        return f"{self.identical}/{total}" + (f" (+{self.excused} ties)" if self.excused else "")


@dataclass(frozen=True)
class StepFigures:
    """Median seconds of a step of m tokens, with one model alone, at a depth: T(m) by m of the target, D(m)."""

    depth: int
    target: dict[int, float]
    draft: dict[int, float]

    @property
    def by_model(self) -> dict[str, dict[int, float]]:
        """The models that were timed, by name."""
        return {name: steps for name, steps in (("target", self.target), ("draft", self.draft)) if steps}


@dataclass(frozen=True)
class SpeedupPart(PairMeasured):
    """All that was measured of one pair by one backend.

    `kl` is the mean KL in nats of the target's own distributions to those of this backend, None where this is its own,
    or nothing was compared. `target` and `draft` are the models or files that were decoded, `pytorch` as in the report.
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
        """The positions of the longest greedy chain of a draft; empty where none was drafted."""
        chains = [one for one in self.measurements if one.positions and one.sampler is None]
        longest = sorted(chains, key=lambda one: one.length or 0)[-1:]
        return {one.configuration: one.positions for one in longest}


@dataclass(frozen=True)
class InTurns(PairMeasured):
    """A way to decode, timed again with the engines taking turns: its speedup is over the fastest plain decoding of all
    engines in the same turns. `place` is its place among the measurements of its part."""

    place: int
    configuration: str
    tokens_per_second: float
    speedup: Figure
    speedup_low: Figure
    speedup_high: Figure


def _fastest(measurements: Iterable[Measurement]) -> list[Measurement]:
    """The fastest of each pair and backend, of those that drafted something."""
    best: dict[tuple[str, str], Measurement] = {}
    for one in measurements:
        if (
            one.acceptance is not None
            and math.isfinite(one.speedup)
            and (one.key not in best or one.speedup > best[one.key].speedup)
        ):
            best[one.key] = one
    return list(best.values())


@dataclass(frozen=True)
class SpeedupReport:
    """speedup.json of a run, and what was measured of any two models: every part in order, the command, the machine.

    `calibration` says what was fitted on which other texts, empty where nothing was. `gguf` and `pytorch` name the
    engines' settings that are not the defaults. Of any two models, `target` and `draft` are their names as they were
    given, and `dropped` counts the records that were left out, by reason. A backend whose KL is above MOST_KL is not
    the target's; of all others, `in_turns` has plain decoding and the fastest way, the fastest first. `texts` are what
    the prompts were taken from, `table` the run or file whose n-grams were read. `suite` names a published suite and
    what was taken of it, empty for other prompts; its turns are the prompts.
    `asked` says how prompts of files are asked.
    """

    command: str
    machine: dict[str, Any]
    prompts: int
    new_tokens: int
    sampler: dict[str, int | float]
    parts: list[SpeedupPart]
    calibration: str = ""
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
        """Of all parts, in order."""
        return [measurement for part in self.parts for measurement in part.measurements]

    @property
    def _accepted(self) -> list[Measurement]:
        """Those of backends that decode the target's own distributions, or nearly so."""
        return [one for part in self.parts if (part.kl or 0) <= MOST_KL for one in part.measurements]

    @property
    def fastest_of_backends(self) -> dict[str, Measurement]:
        """The fastest fixed length of each backend's first pair: what its commands draft, and whether they pay."""
        fastest = _fastest(one for one in self._accepted if one.length)
        return {one.backend: one for one in reversed(fastest)}

    @property
    def best(self) -> list[Measurement]:
        """The fastest way of each pair and backend to the target's greedy text, in the order of the table."""
        return _fastest(self.rivals)

    @property
    def _ways(self) -> list[Measurement]:
        """All lossless ways to the target's greedy text; where none of these drafts, of the sampled ones."""
        lossless = [one for one in self._accepted if one.lossy is None and (one.is_plain or one.acceptance is not None)]
        greedy, sampled = ([one for one in lossless if (one.sampler is None) == wanted] for wanted in (True, False))
        return sampled if sampled and all(one.is_plain for one in greedy) else greedy

    @property
    def rivals(self) -> list[Measurement]:
        """All lossless ways that drafted something, of backends whose KL is accepted."""
        return [one for one in self._ways if not one.is_plain]

    @property
    def contenders(self) -> set[tuple[str, str]]:
        """The engines that may be the fastest: with NEAR times the most tokens a second that were measured, or more."""
        speeds: dict[tuple[str, str], float] = {}
        for one in (*self.plain, *self.best):
            speeds[one.key] = max(speeds.get(one.key, 0.0), one.tokens_per_second)
        return {key for key, speed in speeds.items() if speed >= NEAR * max(speeds.values())}

    @property
    def fastest_way(self) -> Measurement:
        """What makes the target's greedy text with the most tokens a second, plain decoding included."""
        return max((*self.rivals, *self.plain), key=lambda one: one.tokens_per_second)

    @property
    def plain(self) -> list[Measurement]:
        """Plain decoding of each part, the fastest first."""
        return sorted((one for one in self._ways if one.is_plain), key=lambda one: -one.tokens_per_second)


def speedup_of(row: Measurement | GroupFigures) -> Value:
    """A speedup with its interval; None where it was not measured."""
    return None if row.speedup is None else Interval(row.speedup, row.speedup_low, row.speedup_high)


def tokens_of(row: GroupFigures) -> Value:
    """Return the tokens per round with their interval; None where nothing was drafted."""
    return None if row.tokens_per_round is None else Interval(row.tokens_per_round, row.tokens_low, row.tokens_high)

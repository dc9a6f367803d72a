"""What `distill speedup --target A --draft B` measures, as dataclasses: tables, JSON and files are made from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from distill.results.serialise import Figure
from distill.results.speedup_results import ChosenLength, Measurement, RoundFigures, StepFigures


@dataclass(frozen=True)
class GroupFigures:
    """One configuration on the prompts of a class, or on the rounds at a range of depths.

    `group` is the class, or the tokens in the context (`from`–`to`). Figures of a class include the prompts, those of
    a depth do not. `count` is of prompts or rounds. The speedup is over plain decoding of the same prompts, or at the
    same depths; None where plain decoding made no text there. The interval is by prompt, NaN where there is one.
    """

    group: str
    configuration: str
    count: int
    tokens: int
    tokens_per_second: float
    tokens_per_round: float | None
    acceptance: float | None
    speedup: float | None
    speedup_low: Figure
    speedup_high: Figure


@dataclass(frozen=True)
class BatchFigures:
    """B texts at once, by plain and speculative decoding: tokens per second of all together, the prompts included."""

    batch: int
    configuration: str
    tokens: int
    tokens_per_second: float
    plain_tokens_per_second: float
    tokens_per_round: float
    acceptance: float | None
    speedup: float


@dataclass(frozen=True)
class PairSpeedup:
    """A pair that no recipe made, on the user's own prompts.

    `classes` counts prompts. `gguf`
    and `pytorch` name the engine's settings that are not the defaults. `dropped` are records left out, by reason.
    """

    command: str
    machine: dict[str, Any]
    target: str
    draft: str | None
    backend: str
    gguf: str
    sampler: dict[str, int | float]
    prompts: int
    classes: dict[str, int]
    new_tokens: int
    dropped: dict[str, int]
    measurements: list[Measurement]
    chosen: ChosenLength | None
    rounds: list[RoundFigures]
    steps: StepFigures
    by_class: list[GroupFigures]
    by_depth: list[GroupFigures]
    reasons: list[str]
    batches: list[BatchFigures] = field(default_factory=list)
    not_batched: list[str] = field(default_factory=list)
    calibration: dict[str, Any] | None = None
    pytorch: str = ""

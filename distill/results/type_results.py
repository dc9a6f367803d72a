"""What the types of GGUF files do to a pair: acceptance, KL, size and speed by type of target, draft and cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distill.intervals import Interval


@dataclass(frozen=True)
class TypeRow:
    """A draft of one type, whose keys and values are cached in `cache`, with a target of one type.

    `acceptance` is that of single positions as served, `forward_kl` the KL from target to draft in nats. A draft step
    takes `draft_seconds`. `speedup` over the same target's plain decoding is predicted, with `length` tokens drafted a
    round (0: plain decoding is faster) and the acceptance the same at each position.
    """

    target: str
    draft: str
    cache: str
    draft_bytes: int
    forward_kl: Interval
    acceptance: Interval
    draft_seconds: float
    length: int
    speedup: float
    tokens_per_second: float


@dataclass(frozen=True)
class TargetType:
    """A target of one type: its size, and T(1), T(2), … in seconds."""

    target: str
    bytes: int
    seconds: list[float]


@dataclass(frozen=True)
class TypeTable:
    """All pairs of types, on the same texts, which the first target wrote: `tokens` behind `prompts` prompts."""

    command: str
    machine: dict[str, Any]
    sampler: dict[str, int | float]
    measure: str
    tokens: int
    prompts: int
    targets: list[TargetType]
    rows: list[TypeRow]

    @property
    def fastest(self) -> TypeRow:
        """The row of most predicted tokens a second."""
        return max(self.rows, key=lambda row: row.tokens_per_second)

"""What a rehearsal measured, stage by stage, and what the whole run is expected to take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rehearsed:
    """One stage: seconds, the part of them in loops whose length the recipe sets, peak memory and disk, as measured.

    `memory_bytes` is the process's peak resident size, `device_bytes` the peak allocated on accelerators (0 without).
    """

    stage: str
    seconds: float
    loop_seconds: float
    memory_bytes: int
    device_bytes: int
    disk_bytes: int


@dataclass(frozen=True)
class Expected:
    """The same stage in the whole run: seconds from `low` to `high`, peak memory and disk."""

    stage: str
    low: float
    high: float
    memory_bytes: int
    device_bytes: int
    disk_bytes: int


@dataclass(frozen=True)
class Rehearsal:
    """rehearsal.json. `config` is the shortened recipe; `expected` holds one entry for each of `stages`."""

    recipe: str
    config: str
    stages: list[Rehearsed]
    expected: list[Expected]

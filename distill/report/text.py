"""Formats of words and figures, shared by the report page and the model card."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Any, TypeGuard

from distill.intervals import Interval
from distill.results.speedup_results import Measurement, PairMeasured
from distill.results.tables import Cell

NOTHING = "–"

_ABSOLUTE = re.compile(r"(?<![^\s='\"\[,])/(?:[^\s/'\",\]]+/)+([^\s/'\",\]]+)")  # within a command
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffe\uffff]")


def clean(value: object) -> str:
    """Text that is safe to print: control characters and lone surrogates become visible signs."""
    text = str(value).replace("\r\n", "\n").encode("utf-8", "replace").decode("utf-8")
    return _CONTROL.sub(lambda match: chr(0x2400 + ord(match[0])) if ord(match[0]) < 32 else "\ufffd", text)


def placeless(value: Any) -> Any:
    """Text without the folders of this machine: absolute paths become their last name; in lists and dicts too."""
    if isinstance(value, dict):
        return {key: placeless(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [placeless(one) for one in value]
    if not isinstance(value, str):
        return value
    if os.path.isabs(value):
        return os.path.basename(os.path.normpath(value)) or value
    return _ABSOLUTE.sub(lambda match: match[1], value)


def known(value: Any) -> TypeGuard[float]:
    """Whether a figure was measured: a finite number, not None."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def number(value: Any, digits: int = 2) -> str:
    """A number with thousands separators; a dash where nothing was measured."""
    if not known(value):
        return NOTHING
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def significant(value: Any) -> str:
    """Three significant digits, for figures of any size."""
    if not known(value):
        return NOTHING
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e6:
        return f"{value:.2e}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def percent(value: Any) -> str:
    """Per cent to one decimal; a share below 1 is never rounded up to 100."""
    if not known(value):
        return NOTHING
    digits = next((digits for digits in (1, 2, 3) if value >= 1 or float(f"{100 * value:.{digits}f}") < 100), 4)
    return f"{100 * value:.{digits}f} %"


def size(value: Any) -> str:
    """Bytes in decimal units."""
    if not known(value):
        return NOTHING
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            return f"{value / factor:.{1 if value < 100 * factor else 0}f} {unit}"
    return f"{value:.0f} bytes"


def interval(measured: Interval | None, rate: bool = False) -> str:
    """A mean with its interval, as `.612 [.598, .627]` or in per cent; a dash where nothing was measured."""
    if measured is None or not known(measured.mean):
        return NOTHING
    mean, low, high = measured.mean, measured.low, measured.high
    if rate:
        bounds = f" [{100 * low:.1f}, {100 * high:.1f}]" if known(low) and known(high) else ""
        return percent(mean) + bounds
    return f"{mean:.3f}" + (f" [{low:.3f}, {high:.3f}]" if known(low) and known(high) else "")


def speedup_bounds(measurement: Measurement) -> str:
    """` [1.44, 1.60]`, the interval of a speedup; empty where it was not measured."""
    low, high = measurement.speedup_low, measurement.speedup_high
    return f" [{low:.2f}, {high:.2f}]" if known(low) and known(high) else ""


def speedup_interval(measurement: Measurement) -> str:
    """`1.52× [1.44, 1.60]`; a dash where it was not measured."""
    if not known(measurement.speedup):
        return NOTHING
    return f"{measurement.speedup:.2f}×{speedup_bounds(measurement)}"


def byte_cell(count: int) -> Cell:
    """A count of bytes, and its size in small type."""
    return Cell(number(count), small=size(count))


def pair_cell(one: PairMeasured) -> Cell:
    """The name of a pair."""
    return Cell(one.pair)


def machine_words(machine: Mapping[str, Any]) -> str:
    """Processor, cores and memory."""
    return f"{machine['cpu']}, {machine['cores']} cores, {size(machine['memory_bytes'])} memory"


def software_words(machine: Mapping[str, Any]) -> str:
    """The versions that figures depend on."""
    return f"Python {machine['python']}, torch {machine.get('torch')}, transformers {machine.get('transformers')}"


def listed(counts: Mapping[str, int]) -> str:
    """Counts by reason, in a row."""
    return ", ".join(f"{number(count)} {reason}" for reason, count in counts.items())

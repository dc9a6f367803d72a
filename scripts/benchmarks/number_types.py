"""Time products of matrices in float32 and bfloat16 on this CPU, at sizes of decoding and training.

OMP_NUM_THREADS=1 python scripts/benchmarks/number_types.py
"""

from __future__ import annotations

import statistics
import time

import torch

from distill.machine import faster_type, machine
from distill.tables import Table, document

SIZES = ((1, 576, 1536), (64, 576, 1536), (4096, 576, 1536), (2048, 576, 8192))  # SmolLM2's rows, inputs, outputs
REPEATS, SECONDS = 5, 0.3


def gflop_per_s(dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> float:
    """Return the median of REPEATS timings."""
    values, weights = torch.randn(rows, inputs, dtype=dtype), torch.randn(outputs, inputs, dtype=dtype)
    rates = []
    for _ in range(REPEATS + 1):  # The first one warms up.
        count, started = 0, time.perf_counter()
        while time.perf_counter() - started < SECONDS or not count:
            torch.nn.functional.linear(values, weights)
            count += 1
        rates.append(2 * rows * inputs * outputs * count / (time.perf_counter() - started) / 1e9)
    return statistics.median(rates[1:])


def main() -> None:
    """Print a table, and what `dtype: auto` selects here."""
    rows = []
    for size in SIZES:
        single, half = (gflop_per_s(dtype, *size) for dtype in (torch.float32, torch.bfloat16))
        rows.append([*size, single, half, half / single])
    heads = ["rows", "inputs", "outputs", "float32, GFLOP/s", "bfloat16", "bfloat16 ÷ float32"]
    note = (
        f"{machine()['cpu']}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}; "
        f"`dtype: auto` takes {faster_type('bfloat16') or 'bfloat16'} here"
    )
    print(document([Table(heads, rows, note=note)]))


if __name__ == "__main__":
    main()

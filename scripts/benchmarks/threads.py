"""Waiting threads that spin or sleep: seconds of a step and of a training step, alone and beside a second program.

    python scripts/benchmarks/threads.py [--target FOLDER]

Each setting of OpenMP's environment runs in a process of its own, then in two at once on the same cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SETTINGS: dict[str, dict[str, str]] = {
    "the library's default (spin)": {},
    "GOMP_SPINCOUNT=10000": {"GOMP_SPINCOUNT": "10000"},
    "OMP_WAIT_POLICY=PASSIVE (sleep)": {"OMP_WAIT_POLICY": "PASSIVE"},
    "OMP_NUM_THREADS=1": {"OMP_NUM_THREADS": "1"},
}


def measure(target: str) -> None:
    """Print the medians of 60 steps of one token and of 6 training steps of 4 × 512 tokens, in milliseconds."""
    import torch
    from transformers import AutoModelForCausalLM

    from distill.machine import thread_count
    from distill.models.torch_model import TorchModel

    torch.set_num_threads(thread_count())
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    decoder = TorchModel(model)
    decoder.extend(list(range(100, 228)))
    steps = [_timed(lambda: decoder.extend([5])) for _ in range(60)]
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, model.config.vocab_size, (4, 512))

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    trained = [_timed(step) for _ in range(6)]
    print(1e3 * statistics.median(steps), 1e3 * statistics.median(trained))


def _timed(work: object) -> float:
    started = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - started


def started(target: str, setting: dict[str, str]) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    return subprocess.Popen(
        [sys.executable, __file__, "--target", target, "--one"],
        stdout=subprocess.PIPE,
        text=True,
        env={**environment, "PYTHONPATH": str(ROOT), **setting},
    )


def figures(processes: list[subprocess.Popen[str]]) -> list[float]:
    """The means over processes of both medians."""
    found = [[float(value) for value in process.communicate()[0].split()] for process in processes]
    return [statistics.fmean(values) for values in zip(*found, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default=str(ROOT / "data" / "demo-target"))
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure(options.target)
        return
    print("| waiting threads | step, alone | training step, alone | step, two programs | training step, two programs |")
    print("|---|--:|--:|--:|--:|")
    for name, setting in SETTINGS.items():
        alone = figures([started(options.target, setting)])
        both = figures([started(options.target, setting), started(options.target, setting)])
        print(f"| {name} | " + " | ".join(f"{value:.1f} ms" for value in (*alone, *both)) + " |", flush=True)


if __name__ == "__main__":
    main()

"""Memory and time of training steps and of answers by the capacity of oneDNN's cache of primitives, on a CPU.

    python scripts/benchmarks/memory.py --steps 500
    python scripts/benchmarks/memory.py --workloads training answers --dtypes bfloat16 float32 --every 20 \
        --capacities 8 16 64 256 1024

oneDNN keeps a compiled primitive for each shape that it ever multiplied, 1,024 of them unless
ONEDNN_PRIMITIVE_CACHE_CAPACITY says otherwise; batches whose number of scored positions differs bring new shapes at
every step, and so do texts that grow by a token a step. The models are llama's, of SmolLM2-135M's width, with random
weights and few layers. A step of `training` is one of AdamW on `--batch` blocks of random documents with a compact
teacher of random entries; a step of `answers` is one token of each of `--batch` texts; one that ends makes room
for the next prompt. Each line is a process of its own; without --capacities the product's own value counts.

Peak is the most memory that the process ever held, resident what it holds then; seconds are the median of the steps
since the line before.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch
from random_training import random_model, random_teacher

from distill.machine import machine
from distill.models.batched import BatchedTorchModel
from distill.models.cpu_products import prepacked
from distill.packing import Packed, pack
from distill.teacher.distributions import CompactTeacher
from distill.training.losses.settings import LossSettings
from distill.training.step import Columns, Learner

VARIABLE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
WIDTH, MLP, HEADS = 576, 1536, (9, 3)  # of SmolLM2-135M
GIB = 2**30


def model(arguments: argparse.Namespace) -> Any:
    """A random llama."""
    return random_model("Llama", WIDTH, MLP, arguments.layers, HEADS, arguments.vocabulary)


def batch(arguments: argparse.Namespace, step: int) -> tuple[Packed, CompactTeacher]:
    """Blocks of documents of random lengths whose first part is not scored, and a teacher of their scored positions."""
    draw, generator = random.Random(step), torch.Generator().manual_seed(step)
    documents: list[tuple[list[int], int]] = []
    blocks = pack(documents, arguments.block, split_long=False)
    while len(blocks) < arguments.batch:
        size = draw.randrange(arguments.block // 8, arguments.block)
        ids = [draw.randrange(arguments.vocabulary) for _ in range(size)]
        documents.append((ids, draw.randrange(1, size // 2)))
        blocks = pack(documents, arguments.block, split_long=False)
    k = min(64, arguments.vocabulary // 2)
    return blocks, random_teacher(int(blocks.mask.sum()), k, arguments.vocabulary, generator, "cpu")


def training(arguments: argparse.Namespace) -> Callable[[int], None]:
    """A function that takes one training step."""
    draft = model(arguments).train()
    draft.config.use_cache = False
    learner = Learner(draft, Columns(arguments.vocabulary, None, torch.device("cpu")), 512)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=1e-5)
    losses = LossSettings({"jsd": 1.0})
    kind = getattr(torch, arguments.dtype)

    def step(number: int) -> None:
        blocks, teacher = batch(arguments, number)
        with torch.autocast("cpu", dtype=kind, enabled=kind != torch.float32):
            total, sums = learner(blocks, teacher, losses)
        (total / sums["positions"]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def answers(arguments: argparse.Namespace) -> Callable[[int], None]:
    """A function that gives each text a token, with prepacked layers, as stage answers decodes.

    A text that has reached its end, drawn at random, makes room for the next prompt, which is read alone.
    """
    fast, _ = prepacked(model(arguments).to(getattr(torch, arguments.dtype)).eval())
    texts = BatchedTorchModel(fast, arguments.batch, arguments.vocabulary)
    draw, ends = random.Random(0), [0] * arguments.batch

    def step(_: int) -> None:
        for row in range(arguments.batch):
            if texts.lengths[row] >= ends[row]:
                ends[row] = draw.randrange(arguments.block // 4, arguments.block)
                texts.rollback([0 if other == row else length for other, length in enumerate(texts.lengths)])
                counts = [draw.randrange(8, arguments.block // 4) * (other == row) for other in range(arguments.batch)]
                texts.extend([1] * sum(counts), counts).argmax()
        texts.extend([1] * arguments.batch, [1] * arguments.batch).argmax()

    return step


def peak_bytes() -> int:
    """The most memory that this process ever held."""
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else found * 1024


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Peak and resident bytes after each `--every` steps, and the median of their seconds."""
    torch.set_num_threads(arguments.threads)
    step = {"training": training, "answers": answers}[arguments.one](arguments)
    seconds = []
    for number in range(1, arguments.steps + 1):
        began = time.monotonic()
        step(number)
        seconds.append(time.monotonic() - began)
        if number % arguments.every == 0 or number == arguments.steps:
            resident = psutil.Process().memory_info().rss
            median = statistics.median(seconds)
            yield {"step": number, "peak": peak_bytes(), "resident": resident, "seconds": median}
            seconds = []


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workloads", nargs="+", choices=("training", "answers"), default=["training"])
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16"])
    parser.add_argument("--capacities", type=int, nargs="+")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--block", type=int, default=512)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", help=argparse.SUPPRESS)
    parser.add_argument("--one", choices=("training", "answers"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse()
    if arguments.one is not None:
        for found in measure(arguments):
            print(json.dumps(found), flush=True)
        return
    here = machine()
    print(
        f"`python scripts/benchmarks/memory.py {shlex.join(sys.argv[1:])}`, {datetime.date.today()}; {here['cpu']}, "
        f"{arguments.threads} threads, torch {here['torch']}\n"
    )
    print("| work | type | capacity | step | peak, GiB | resident, GiB | seconds per step |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for workload in arguments.workloads:
        for dtype in arguments.dtypes:
            for capacity in arguments.capacities or [None]:
                environment = dict(os.environ) if capacity is None else os.environ | {VARIABLE: str(capacity)}
                command = [sys.executable, *sys.argv, "--one", workload, "--dtype", dtype]
                with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
                    assert process.stdout is not None
                    for line in process.stdout:
                        found = json.loads(line)
                        print(
                            f"| {workload} | {dtype} | {capacity or environment.get(VARIABLE, 'default')} "
                            f"| {found['step']} | {found['peak'] / GIB:.2f} | {found['resident'] / GIB:.2f} "
                            f"| {found['seconds']:.3f} |",
                            flush=True,
                        )
                if process.returncode:
                    print(f"| {workload} | {dtype} | {capacity} | ended with status {process.returncode} | | | |")


if __name__ == "__main__":
    main()

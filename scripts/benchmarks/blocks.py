"""Training memory per token at short and long blocks, beyond weights, gradients and optimizer.

    python scripts/benchmarks/blocks.py --threads 2
    python scripts/benchmarks/blocks.py --device cuda --dtype bfloat16 --layers 24

A random draft of Qwen2.5-0.5B's shape (hidden size 896, 151,936 rows), by default at 2 of its 24 layers, takes
training steps of one block of each length, on random tokens in documents of `--document` tokens (0: one per block)
with a compact teacher of random entries. Every length is a process of its own, and so is `--mask`, which forces the
attention mask that a CPU and long blocks do without. Figures: the peak of a step above the memory before it (after a
short step, so that weights, their gradients and both moments of AdamW are there), divided by the block's tokens; and
the step's seconds.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import time

import torch
from random_training import Peak, random_model, random_teacher
from torch import Tensor

from distill.models import packed_forward
from distill.packing import Packed, pack
from distill.teacher.distributions import CompactTeacher
from distill.training.losses.settings import LossSettings
from distill.training.step import Columns, Learner


def return_freed_memory() -> None:
    """Give the C library's freed memory back to the system, where it can: a step that reuses it would not show."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc
    if trim is not None:
        trim(0)


def batch(arguments: argparse.Namespace, block: int, device: torch.device) -> tuple[Packed, CompactTeacher]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, arguments.vocabulary, (block,), generator=generator).tolist()
    size = min(arguments.document or block, block)
    blocks = pack(((ids[start : start + size], 1) for start in range(0, block, size)), block, split_long=False)
    teacher = random_teacher(int(blocks.mask.sum()), arguments.k, arguments.vocabulary, generator, device)
    return Packed(*(tensor.to(device) for tensor in blocks.tensors().values())), teacher


def measure(arguments: argparse.Namespace, block: int) -> dict[str, float]:
    """Bytes per token at the peak of a step, and its seconds."""
    device = torch.device(arguments.device)
    torch.set_num_threads(arguments.threads)
    if arguments.mask:
        packed_forward.masked_below = lambda device: 10**9
    model = random_model("Qwen2", 896, 4864, arguments.layers, (14, 2), arguments.vocabulary).to(device).train()
    model.config.use_cache = False
    learner = Learner(model, Columns(arguments.vocabulary, None, device), arguments.chunk)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=1e-5)
    short, long = batch(arguments, 64, device), batch(arguments, block, device)
    losses = LossSettings({"jsd": 1.0})
    kind = getattr(torch, arguments.dtype)

    def step(blocks: Packed, teacher: CompactTeacher) -> None:
        with torch.autocast(device.type, dtype=kind, enabled=kind != torch.float32):
            total, sums = learner(blocks, teacher, losses)
        loss: Tensor = total / sums["positions"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # gradients stay, so that their memory counts as there before

    step(*short)
    gc.collect()
    return_freed_memory()
    began = time.monotonic()
    with Peak(device) as peak:
        step(*long)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.monotonic() - began
    return {"bytes_per_token": peak.bytes / block, "seconds": seconds}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--document", type=int, default=0)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--mask", action="store_true", help="force the attention mask of short blocks")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.one is not None:
        print(json.dumps(measure(arguments, arguments.one)))
        return
    print("| attention | block | bytes per token | against the first | seconds per step |\n|---|---|---|---|---|")
    for options, name in (([], "as in training"), (["--mask"], "with a mask")):
        first = None
        for block in arguments.blocks:
            command = [sys.executable, *sys.argv, "--one", str(block), *options]
            result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if result.returncode:
                print(f"| {name} | {block} | ended with status {result.returncode} | | |", flush=True)
                continue
            found = json.loads(result.stdout)
            first = first or found["bytes_per_token"]
            ratio = found["bytes_per_token"] / first
            print(
                f"| {name} | {block} | {found['bytes_per_token']:,.0f} | {ratio:.2f} | {found['seconds']:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

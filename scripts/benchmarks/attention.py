"""Time training steps over packed documents, by the way that separates documents: tokens/s and memory by block length.

    python scripts/benchmarks/attention.py --blocks 512,1024,2048,4096

Layers with SmolLM2-135M's sizes and random weights read blocks of documents of 50 to 400 tokens, forward and backward.
Each way runs in a process of its own, on one thread or on a GPU: `masks` (boolean, S × S), `documents` (one at a time)
and `blocks` (FlexAttention's masks, only on a GPU), each plain and with `compile`. A `*` marks the way of
`distill train`. Tokens/s come from the fastest step after the third, in CPU time without a GPU. Memory is the process's
peak (VmHWM), or torch's peak on a GPU. `--device pretend` shows launches and waits of a step instead, on the device of
tests/pretend, which computes on the CPU.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from distill.engines.torch import blocks as forward
from distill.engines.torch.blocks import Packed, hidden_states, separation

ROOT = Path(__file__).resolve().parent.parent.parent
WAYS = ("masks", "documents", "blocks")


def model_of(device: torch.device, layers: int) -> Any:
    """Return layers of SmolLM2-135M's sizes, in bfloat16 on a GPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "intermediate_size": 1536}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, vocab_size=512, **heads))
    return model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)


def batch(positions: int, generator: torch.Generator) -> Packed:
    """Return a block of documents of 50 to 400 tokens."""
    lengths = torch.randint(50, 401, (positions // 50,), generator=generator)
    documents = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[None, :positions].int()
    ids = torch.randint(0, 512, documents.shape, generator=generator)
    return Packed(ids, documents, documents >= 0)


def kind_of(given: Any) -> str:
    """Return the way that `separation` took."""
    if not isinstance(given, torch.Tensor):
        return "blocks"
    return "documents" if given.dtype == torch.int32 else "masks"


def measure(way: str, positions: int, compiled: bool, device: torch.device, arguments: argparse.Namespace) -> None:
    """Print the time and memory of a way."""
    torch.set_num_threads(1)
    model, generator = model_of(device, arguments.layers), torch.Generator().manual_seed(1)
    if compiled:
        model.model.compile()
    taken = kind_of(separation(model, batch(positions, generator).documents, device))
    forward.masked_below = lambda _: 10**9 if way == "masks" else 0
    if way != "blocks" or taken != "blocks":
        forward.takes_block_masks = lambda *_: way == "blocks"

    clock = time.perf_counter if device.type == "cuda" else time.process_time

    def step() -> float:
        blocks = batch(positions, generator)
        start = clock()
        model.zero_grad()
        hidden_states(model, blocks).float().square().mean().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return clock() - start

    warm = sum(step() for _ in range(3))
    line = f"| {positions} | {way}{'*' if way == taken else ''} | {'yes' if compiled else 'no'} |"
    if device.type == "pretend":
        import pretend

        with pretend.counting() as counts:
            step()
        print(f"{line} {counts.launches} launches | {counts.waits} waits |", flush=True)
        return
    rate = positions / min(step() for _ in range(arguments.steps))
    used = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    mebibytes = (used or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) / 2**20
    print(f"{line} {rate:.0f} | {mebibytes:.0f} | {warm:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", default="512,1024,2048,4096", help="positions of a block")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", choices=("no", "yes", "both"), default="both")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.device == "pretend":
        sys.path.insert(0, str(ROOT / "tests"))
        import pretend

        pretend.load()
        given.compile = "no"
    if given.only:
        way, positions, compiled = given.only.split(",")
        measure(way, int(positions), compiled == "yes", torch.device(given.device), given)
        return
    pretending = given.device == "pretend"
    print("| block | way | compiled |", "launches | waits |" if pretending else "tokens/s | MiB | s of three steps |")
    print("|--:|---|---|--:|--:|" + ("" if pretending else "--:|"), flush=True)
    for positions in given.blocks.split(","):
        for way in WAYS[: None if given.device == "cuda" else 2]:
            for compiled in ("no", "yes") if given.compile == "both" else (given.compile,):
                command = [sys.executable, __file__, "--only", f"{way},{positions},{compiled}"]
                options = ("--layers", str(given.layers), "--steps", str(given.steps), "--device", given.device)
                subprocess.run([*command, *options], check=True)


if __name__ == "__main__":
    main()

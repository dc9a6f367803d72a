"""What an optimizer's step costs beside the tokens of the step: AdamW against Muon, on drafts of Qwen2.5-0.5B's shape.

    python scripts/benchmarks/optimizers.py --threads 2
    python scripts/benchmarks/optimizers.py --device cuda --dtype bfloat16 --layers 24 --tokens 4096

A random draft of hidden size 896 and 151,936 rows, with some of its 24 layers, takes training steps on random tokens
with a compact teacher of random entries. The forward and backward pass and the optimizer's step are timed apart, in
turns of both optimizers. What the layers and what the rest (embeddings, head) take is told apart by a second model with
half of the layers, and put together for 24. Memory is that of the optimizer's state.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from blocks import batch, draft
from torch import Tensor

from distill.machine import machine
from distill.recipe import Train, parse_section
from distill.training.losses.settings import LossSettings
from distill.training.optimizer import make_optimizer
from distill.training.plan import PlannedPart
from distill.training.step import Columns, Learner

OPTIMIZERS = ("adamw", "muon")
WHOLE = 24  # layers


def synchronised(device: torch.device) -> float:
    """The time, after all work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(options: argparse.Namespace, layers: int) -> dict[str, float]:
    """Median seconds of a pass over the tokens and of each optimizer's step, and bytes of each state."""
    device, kind = torch.device(options.device), getattr(torch, options.dtype)
    model = draft(argparse.Namespace(vocabulary=options.vocabulary, layers=layers), device)
    learner = Learner(model, Columns(options.vocabulary, None, device), options.chunk)
    shape = argparse.Namespace(vocabulary=options.vocabulary, document=0, k=options.k)
    blocks, teacher = batch(shape, options.tokens, device)
    part = PlannedPart("align", 0, 1, 1e-5, LossSettings({"jsd": 1.0}))
    found: dict[str, list[float]] = {"pass": [], **{name: [] for name in OPTIMIZERS}}
    state: dict[str, float] = {}
    optimizers: dict[str, Any] = {
        name: make_optimizer(model, parse_section(Train, {"optimizer": name, "rate": 1e-5}, "train"))
        for name in OPTIMIZERS
    }
    for turn in range(options.repeats + 1):
        began = synchronised(device)
        with torch.autocast(device.type, dtype=kind, enabled=kind != torch.float32):
            total, sums = learner(blocks, teacher, part)
        loss: Tensor = total / sums["positions"]
        loss.backward()
        seconds = synchronised(device) - began
        if turn:
            found["pass"].append(seconds)
        for name, optimizer in optimizers.items():
            began = synchronised(device)
            optimizer.step()
            if turn:  # the first step makes the state
                found[name].append(synchronised(device) - began)
            held = (value for one in optimizer.state.values() for value in one.values() if isinstance(value, Tensor))
            state[f"{name} state"] = float(sum(value.nbytes for value in held))
        model.zero_grad(set_to_none=True)
    return {name: statistics.median(values) for name, values in found.items()} | state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="of the larger model; the other has half of them")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    half = options.layers // 2
    small, large = measure(options, half), measure(options, options.layers)
    whole = {name: large[name] + (WHOLE - options.layers) * (large[name] - small[name]) / half for name in large}
    per_token = whole["pass"] / options.tokens
    print(f"{WHOLE} layers from {half} and {options.layers}; {options.tokens} tokens a pass, {options.repeats} turns")
    print("| | s per step | state, GiB |\n|---|--:|--:|")
    print(f"| forward and backward pass, {1e3 * per_token:.2f} ms a token | {whole['pass']:.2f} | |")
    for name in OPTIMIZERS:
        print(f"| {name} | {whole[name]:.2f} | {whole[f'{name} state'] / 2**30:.2f} |")
    # (tokens·t + muon) = 1.1 (tokens·t + adamw)
    enough = max(0.0, (whole["muon"] - 1.1 * whole["adamw"]) / (0.1 * per_token))
    print(f"a step with Muon takes at most 1.1 times one with AdamW from {enough:.0f} tokens a step on")
    print({key: value for key, value in machine().items() if key in ("cpu", "cores", "torch")})


if __name__ == "__main__":
    main()

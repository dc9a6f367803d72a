"""Steps of a model in PyTorch on a CPU, its linear layers prepacked and as torch has them, in turns.

    python scripts/benchmarks/prepacked.py data/demo-target                       # as it is
    python scripts/benchmarks/prepacked.py data/demo-target --tile 4 --layers 12  # grown, its text unchanged
    python scripts/benchmarks/prepacked.py MODEL --dtype bfloat16

Legend: T(m) seconds of a step of m tokens; medians.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from distill.machine import thread_count
from distill.models.cpu_products import prepacked
from distill.models.hugging_face import load_model
from distill.models.torch_model import TorchModel
from distill.speculative.costs.curve import measure_steps
from distill.surgery.grow import grow

COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)
DEPTH = 128
PROMPT = 256
TURNS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tile", type=int, help="with --layers: grow it first")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(thread_count())
    model = load_model(str(options.model.resolve()), "float32", torch.device("cpu"))
    if options.tile is not None:
        model = grow(model, options.tile, options.layers)
    model = model.to(getattr(torch, options.dtype)).eval()
    packed, reason = prepacked(model)
    if packed is model:
        raise SystemExit(f"nothing is prepacked here: {reason or 'this build or type has no such kernels'}")
    both = {"torch": TorchModel(model), "prepacked": TorchModel(packed)}
    seconds: dict[str, dict[int, list[float]]] = {name: {m: [] for m in (*COUNTS, PROMPT)} for name in both}
    for _ in range(TURNS):
        for name, one in both.items():
            for m, (median, _, _) in measure_steps(one, COUNTS, DEPTH, options.repeats, one.vocabulary_size).items():
                seconds[name][m].append(median)
            one.rollback([0])
            started = time.perf_counter()
            one.extend([7 * i % one.vocabulary_size for i in range(PROMPT)], want=[PROMPT - 1])
            seconds[name][PROMPT].append(time.perf_counter() - started)
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"{size:.1f}M parameters, {options.dtype}; ms")
    print("| | " + " | ".join(f"T({m})" for m in (*COUNTS, PROMPT)) + " |")
    print("|---|" + "--:|" * (len(COUNTS) + 1))
    for name, found in seconds.items():
        print(f"| {name} | " + " | ".join(f"{1e3 * sorted(taken)[TURNS // 2]:.1f}" for taken in found.values()) + " |")


if __name__ == "__main__":
    main()

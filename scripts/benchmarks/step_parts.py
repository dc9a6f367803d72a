"""Where the seconds of a training step go, by torch's profiler: products, attention, head, optimizer.

    python scripts/benchmarks/step_parts.py runs/smollm2-demo --threads 1

RUN has cut/ and teacher/ (`distill train RECIPE --until cut`). Steps are those of its recipe, from the first one on, of
which `--warm` are not counted; the first epoch of an exact teacher also sums its whole head at every position, later
ones do not: `--warm` at least as many steps as an epoch has leaves that out. Nothing is written into the run.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from distill.machine import machine
from distill.recipe import load_recipe
from distill.run import Run
from distill.training.loop import one_step
from distill.training.setup import set_up

# An operator belongs to the first of these whose word is in its own name or in that of an operator around it.
PARTS = {
    "head and its loss": ("_HeadLoss",),
    "optimizer: Muon": ("Optimizer.step#Muon.",),
    "optimizer: AdamW": ("Optimizer.step#AdamW.",),
    "attention": ("scaled_dot_product", "ScaledDotProduct"),
    "products of the layers": ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn_linear"),
}
REST = "the rest"


def part_of(event: Any) -> str:
    """The part that an event's own time belongs to."""
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    found = (part for part, words in PARTS.items() if any(word in name for word in words for name in names))
    return next(found, REST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("overrides", nargs="*", help="recipe overrides a.b=c")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--warm", type=int, default=2)
    options = parser.parse_args()
    recipe = load_recipe(options.run / "config.yaml", options.overrides)
    work = set_up(recipe, Run(options.run, recipe))
    torch.set_num_threads(options.threads or recipe.threads or torch.get_num_threads())
    for step in range(options.warm):
        one_step(work, step)
    tokens = 0
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for step in range(options.warm, options.warm + options.steps):
            tokens += int(one_step(work, step)["tokens"])
    spent: Counter[str] = Counter()
    for event in recorded.events():
        spent[part_of(event)] += event.self_cpu_time_total / 1e6
    whole = spent.total()
    positions = options.steps * recipe.train.batch * recipe.corpus.block
    print(
        f"{machine()['cpu']}, {torch.get_num_threads()} threads; {options.steps} steps of "
        f"{positions // options.steps} positions"
    )
    print(f"{whole / options.steps:.2f} s a step, {positions / whole:.0f} positions/s, {tokens / whole:.0f} scored/s\n")
    print("| part | s a step | share |\n|---|--:|--:|")
    for name, seconds in spent.most_common():
        print(f"| {name} | {seconds / options.steps:.2f} | {seconds / whole:.0%} |")


if __name__ == "__main__":
    main()

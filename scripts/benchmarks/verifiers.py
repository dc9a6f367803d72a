"""Tokens per round of every verifier and drafter on a finished run's pair, chain against tree, in PyTorch.

    python scripts/benchmarks/verifiers.py runs/demo --prompts 24 --tokens 96 > verifiers.md

Distinct test prompts, cold caches, configurations in turn on every prompt; intervals by prompt, ratios paired by
prompt.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path

import numpy
import torch

from distill.intervals import ratio_interval
from distill.models.base import Model
from distill.models.hugging_face import load_model, load_tokenizer, real_tokens
from distill.models.torch_model import TorchModel
from distill.recipe import load_recipe
from distill.run import Run
from distill.sampler import Sampler
from distill.speculative.decode import Decoded, decode, plain
from distill.speculative.draft import Drafter, FirstThen, LookupDrafter, ModelDrafter
from distill.speculative.lengths import Fixed
from distill.speculative.rules import Rules
from distill.speculative.trees.shape import Shape
from distill.speculative.trees.tree_drafter import TreeDrafter
from distill.speculative.verify import Random
from distill.texts import read_prompts

Make = Callable[[Model, Sampler, Random], Drafter]
WIDE = Shape.of_widths([3, 1, 1, 1])  # 12 nodes: three chains of four

SAMPLED: dict[str, tuple[str, Make]] = {
    "token, chain of 4": ("token", lambda d, s, r: ModelDrafter(d, Fixed(4), s, r)),
    "block, chain of 4": ("block", lambda d, s, r: ModelDrafter(d, Fixed(4), s, r)),
    "match, chain of the 4 best": ("match", lambda d, s, r: ModelDrafter(d, Fixed(4), s, r, argmax=True)),
    "distinct, 3 chains of 4": ("distinct", lambda d, s, r: TreeDrafter(d, s, r, 12, shape=WIDE, distinct=True)),
    "match, best-first tree of 12": ("match", lambda d, s, r: TreeDrafter(d, s, r, 12, depth=4)),
    "match, lookup of 4": ("match", lambda d, s, r: LookupDrafter(4)),
    "token, lookup then chain of 4": (
        "token",
        lambda d, s, r: FirstThen(LookupDrafter(4, shortest=2), ModelDrafter(d, Fixed(4), s, r)),
    ),
}
GREEDY: dict[str, tuple[str, Make]] = {
    "greedy, chain of 4": ("greedy", lambda d, s, r: ModelDrafter(d, Fixed(4), s, r)),
    "greedy, best-first tree of 12": ("greedy", lambda d, s, r: TreeDrafter(d, s, r, 12, depth=4)),
    "greedy, lookup of 4": ("greedy", lambda d, s, r: LookupDrafter(4)),
    "greedy, lookup then chain of 4": (
        "greedy",
        lambda d, s, r: FirstThen(LookupDrafter(4, shortest=2), ModelDrafter(d, Fixed(4), s, r)),
    ),
}


def measure(
    target: Model,
    draft: Model,
    prompts: list[list[int]],
    sampler: Sampler,
    configurations: dict[str, tuple[str, Make]],
    tokens: int,
) -> None:
    """Print the table of some configurations under one sampler."""
    found: dict[str, list[tuple[int, int, int]]] = {name: [] for name in configurations}
    speeds: dict[str, list[tuple[int, float]]] = {name: [] for name in ["plain", *configurations]}
    names = ["plain", *configurations]
    for number, prompt in enumerate(prompts):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            draws = random.Random(f"{number}/{name}").random
            if name == "plain":
                rules = Rules(sampler, "greedy" if sampler.temperature == 0 else "token", random=draws)
                made = plain(target, prompt, tokens, rules=rules)
            else:
                verifier, make = configurations[name]
                made = Decoded()
                rules = Rules(sampler, verifier, random=draws)
                for _ in decode(target, make(draft, sampler, draws), prompt, tokens, rules, made):
                    pass
                drafted = sum(r.drafted for r in made.rounds)
                found[name].append((sum(r.accepted + 1 for r in made.rounds), len(made.rounds), drafted))
            speeds[name].append((len(made.tokens), made.prefill_seconds + made.seconds))
    base = next(iter(configurations))
    base_rate = numpy.array([t / n for t, n, _ in found[base]])
    plain_rate = sum(t for t, _ in speeds["plain"]) / sum(s for _, s in speeds["plain"])
    print("| verifier and draft | drafted a round | tokens per round | over the first | tok/s over plain |")
    print("|---|--:|--:|--:|--:|")
    for name, rows in found.items():
        emitted, rounds, drafted = (numpy.array(column, float) for column in zip(*rows, strict=True))
        rate = ratio_interval(emitted, rounds, 2000, 0.95)
        paired = ratio_interval(emitted / rounds, base_rate, 2000, 0.95)
        speed = sum(t for t, _ in speeds[name]) / sum(s for _, s in speeds[name]) / plain_rate
        over = "1" if name == base else f"{paired.mean:.3f} [{paired.low:.3f}, {paired.high:.3f}]"
        print(
            f"| {name} | {drafted.sum() / rounds.sum():.2f} | {rate.mean:.2f} [{rate.low:.2f}, "
            f"{rate.high:.2f}] | {over} | {speed:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96)
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.run / "config.yaml")
    run = Run(arguments.run.resolve(), recipe)
    big = load_model(recipe.target.model, "float32", torch.device("cpu"))
    vocabulary = real_tokens(big.config, load_tokenizer(recipe.target.model))
    target = TorchModel(big, vocabulary)
    draft = TorchModel(load_model(str(run.path("draft")), "float32", torch.device("cpu")), vocabulary)
    prompts = [prompt.ids for prompt in read_prompts(run, "test")][: arguments.prompts]
    print(f"{len(prompts)} test prompts, {arguments.tokens} tokens each.\n\nSampler {recipe.sampler}:\n")
    measure(target, draft, prompts, Sampler.of(recipe.sampler), SAMPLED, arguments.tokens)
    print("\nGreedy:\n")
    measure(target, draft, prompts, Sampler(temperature=0), GREEDY, arguments.tokens)


if __name__ == "__main__":
    main()

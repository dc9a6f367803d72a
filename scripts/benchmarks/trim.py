"""Which tokens a trimmed head keeps: the target's mass on them at held-out positions, by how they are ranked.

    python scripts/benchmarks/trim.py runs/smollm2-demo --blocks 130 500 --sizes 4096 8192

RUN has an exact teacher store. Tokens are ranked on some of its blocks; the figure is the ceiling of acceptance, the
target's mass under the served sampler on the kept tokens, on 30 other blocks.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from distill.models.hugging_face import text_folder
from distill.recipe import load_recipe
from distill.run import Run
from distill.sampler import Sampler
from distill.surgery.vocabulary.trim import always_kept, expected_shares, rank_tokens
from distill.teacher.store import TeacherStore
from distill.vocabulary import Vocabulary

HELD_OUT = 30
CPU = torch.device("cpu")


def part_of(store: TeacherStore, blocks: list[int]) -> Any:
    """Some blocks of a store, as a teacher of their own."""
    return SimpleNamespace(
        packed=store.packed.take(torch.tensor(blocks)),
        blocks=len(blocks),
        vocabulary=store.vocabulary,
        teacher=lambda index, device: store.teacher(torch.tensor([blocks[i] for i in index.tolist()]), device),
    )


def main() -> None:
    """Print a row for each number of blocks and ranking."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--blocks", type=int, nargs="+", default=[130, 500])
    parser.add_argument("--sizes", type=int, nargs="+", default=[4096, 6144, 8192, 12288])
    options = parser.parse_args()
    recipe = load_recipe(options.run / "config.yaml")
    store, sampler = TeacherStore(Run(options.run, recipe)), Sampler.of(recipe.sampler)
    tokens = Vocabulary.read(text_folder(recipe.target.model))
    forced = [index for index in always_kept(tokens) if index < store.vocabulary]
    order = numpy.random.default_rng(0).permutation(store.blocks).tolist()
    if max(options.blocks) > store.blocks - HELD_OUT:
        sys.exit(f"{options.run} has {store.blocks} blocks, {HELD_OUT} of which are held out: give fewer --blocks")
    print("| positions | ranked by | " + " | ".join(f"{size} tokens" for size in options.sizes) + " |")
    print("|--:|---|" + "--:|" * len(options.sizes))
    for count in options.blocks:
        part = part_of(store, order[:count])
        written = part.packed.labels()[part.packed.mask].numpy()
        counts = {"answers": numpy.bincount(written, minlength=store.vocabulary)}
        expected = expected_shares(part, CPU, 10**9)
        ranks = {
            "counts": rank_tokens(counts, forced),
            "counts and distributions": rank_tokens(counts, forced, expected),
        }
        sums = {name: numpy.zeros(len(options.sizes)) for name in ranks}
        positions = 0
        for block in order[-HELD_OUT:]:
            teacher = store.teacher(torch.tensor([block]), CPU)
            if not len(teacher):
                continue
            found = sampler.probabilities(teacher.chunk(slice(0, len(teacher))).log_probabilities)
            positions += len(teacher)
            for name, ids in ranks.items():
                sums[name] += [float(found[:, ids[:size]].sum()) for size in options.sizes]
        for name, total in sums.items():
            print(f"| {len(written):,} | {name} | " + " | ".join(f"{value:.4f}" for value in total / positions) + " |")


if __name__ == "__main__":
    main()

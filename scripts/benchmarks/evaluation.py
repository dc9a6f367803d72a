"""What an evaluation costs beside the forward passes that it needs: seconds and memory of a pair of real shape.

    python scripts/benchmarks/evaluation.py --threads 2 --tokens 20480      # Qwen2.5-0.5B's shape, twice: half an hour
    python scripts/benchmarks/evaluation.py --threads 2 --tokens 4096 --layers 6

Both models are random. Turns alternate: two blocks are read by both models alone, then by one evaluation that goes on
from there. Memory is the peak of another evaluation above what the process held with both models loaded.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from random_training import Peak, random_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from distill.evaluation.measure import HELD, block_values, sum_by_document
from distill.machine import machine
from distill.models.packed_forward import packed_inputs
from distill.packing import Packed, pack
from distill.sampler import Sampler

VOCABULARY = 151_936
BLOCKS = 2  # of a turn, read at once


def evaluation(pair: list[Any], blocks: Packed, sampler: Sampler) -> Iterator[None]:
    """The evaluation of the blocks, which stops after every BLOCKS of them."""
    values = block_values(pair[0], {"draft": pair[1]}, blocks, sampler, VOCABULARY)
    own = -(-blocks.ids.shape[1] // (HELD // VOCABULARY)) * BLOCKS  # of one turn, as each block is one document
    while part := list(islice(values, own)):
        sum_by_document(part)
        yield


def main() -> None:
    """Measure and print one row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_480)
    parser.add_argument("--block", type=int, default=512)
    parser.add_argument("--layers", type=int, default=24, help="of the draft")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-p", type=float, default=1.0, help="below 1, the likeliest tokens are sorted")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pair = [
        random_model("Qwen2", 896, 4864, layers, (14, 2), VOCABULARY).to(device).eval()
        for layers in (24, options.layers)
    ]
    for model in pair:  # distributions as peaked as those of text: the mass of the likeliest tokens is sorted
        model.lm_head.weight.data.mul_(10)
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(0, VOCABULARY, (options.tokens // options.block, options.block), generator=generator)
    blocks = pack(((text.tolist(), 1) for text in texts), options.block, False)
    sampler = Sampler(options.temperature, top_p=options.top_p)
    bare = whole = 0.0
    with torch.inference_mode():
        with Peak(device) as peak:  # memory, before anything else was held
            next(evaluation(pair, blocks, sampler))
        print(f"  {peak.bytes / 1e9:.2f} GB above the weights", file=sys.stderr, flush=True)
        going = evaluation(pair, blocks, sampler)
        for start in range(0, len(blocks), BLOCKS):
            inputs = blocks.take(slice(start, start + BLOCKS))
            began = time.perf_counter()
            for model in pair:
                model(**packed_inputs(model, inputs)).logits.sum().item()
            turned = time.perf_counter()
            next(going)
            bare, whole = bare + turned - began, whole + time.perf_counter() - turned
            line = f"  {start + len(inputs)}/{len(blocks)} blocks, {bare:.1f} s bare, {whole:.1f} s evaluated"
            print(line, file=sys.stderr, flush=True)
    weights = sum(one.numel() * one.element_size() for model in pair for one in model.parameters())
    place = torch.cuda.get_device_name() if device.type == "cuda" else machine()["cpu"]
    print("| tokens | weights, GB | peak above them, GB | bare forward passes, s | evaluation, s | share | machine |")
    print("|--:|--:|--:|--:|--:|--:|---|")
    size = f"{weights / 1e9:.2f} | {peak.bytes / 1e9:.2f}"
    print(f"| {int(blocks.mask.sum())} | {size} | {bare:.1f} | {whole:.1f} | {bare / whole:.2f} | {place} |")


if __name__ == "__main__":
    main()

"""Every cut of the demo target, at several sizes, without healing: KL to the target on test text.

    python scripts/benchmarks/cuts.py > cuts.md

Scores are collected on one half of the validation text; greedy removals are chosen on the other half. Every figure is
measured on test text, which neither has seen. Intervals: 95 %, bootstrap over documents; the ratio to the plainest
method of the same size is paired by document.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch

from distill import divergences
from distill.intervals import ratio_interval
from distill.models.hugging_face import encode, load_model, load_tokenizer
from distill.packing import Packed, pack
from distill.surgery.change import size_of
from distill.surgery.cuts.layers import choose_layers, keep_layers
from distill.surgery.cuts.width import keep_neurons, narrow
from distill.surgery.divergence import TargetDistributions, scored_logits

DATA = Path(__file__).resolve().parents[2] / "data"
BLOCK, SCORE_BLOCKS, REPORT_BLOCKS = 512, 16, 40

Cut = Callable[[Any], Any]


def blocks_of(split: str, tokenizer: Any) -> Packed:
    texts = [path.read_text(encoding="utf-8") for path in sorted((DATA / split).rglob("*.py"))]
    return pack(((encode(tokenizer, text), 1) for text in texts), BLOCK, split_long=True)


@torch.inference_mode()
def document_kl(target: Any, model: Any, blocks: Packed, vocabulary: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Sums of KL(target ‖ model) and counts, by document of a block."""
    sums, counts = [], []
    for index in range(len(blocks)):
        part = blocks.take(slice(index, index + 1))
        p, q = (scored_logits(m, part)[:, :vocabulary].float().log_softmax(-1) for m in (target, model))
        kl = divergences.forward_kl(p, q).double()
        documents = part.documents[part.mask]
        for document in documents.unique():
            here = documents == document
            sums.append(float(kl[here].sum()))
            counts.append(int(here.sum()))
    return numpy.array(sums), numpy.array(counts)


def cuts(score: Packed, distributions: TargetDistributions) -> dict[str, dict[str, Cut]]:
    """Methods by size; the first of each size is the plainest one."""

    def layers(keep: int, rule: str) -> Cut:
        def cut(model: Any) -> None:
            keep_layers(model, choose_layers(model, keep, rule, blocks=score, loss=distributions.kl)[0])

        return cut

    def first(size: int) -> Cut:
        return lambda model: keep_neurons(model, [range(size)] * model.config.num_hidden_layers)

    def activation(size: int) -> Cut:
        return lambda model: narrow(model, score, size)

    table: dict[str, dict[str, Cut]] = {}
    for keep in (5, 4, 3, 2):
        table[f"{keep} of 6 layers"] = {
            "last but one": layers(keep, "last-but-one"),
            "influence": layers(keep, "influence"),
            "greedy": layers(keep, "greedy"),
        }
    for size in (640, 512, 384, 256):
        table[f"MLP {size} of 768"] = {"first K": first(size), "activation": activation(size)}
    return table


def main() -> None:
    target = load_model(str(DATA / "demo-target"), "float32", torch.device("cpu"))
    tokenizer = load_tokenizer(str(DATA / "demo-target"))
    vocabulary = min(target.config.vocab_size, len(tokenizer))
    validation = blocks_of("validation", tokenizer)
    score, losses = validation.take(slice(0, SCORE_BLOCKS)), validation.take(slice(SCORE_BLOCKS, 2 * SCORE_BLOCKS))
    distributions = TargetDistributions.measure(target, losses, vocabulary)
    test = blocks_of("test", tokenizer).take(slice(0, REPORT_BLOCKS))
    print(f"KL(target ‖ cut) in nats on {int(test.mask.sum())} test tokens, before any training.\n")
    print("| size | parameters | method | KL | over the plainest |\n|---|--:|---|--:|--:|")
    for size, methods in cuts(score, distributions).items():
        plainest: numpy.ndarray | None = None
        for name, cut in methods.items():
            model = copy.deepcopy(target)
            cut(model)
            sums, counts = document_kl(target, model, test, vocabulary)
            kl = ratio_interval(sums, counts, 2000, 0.95)
            row = f"| {size} | {size_of(model).parameters / 1e6:.2f}M | {name} "
            row += f"| {kl.mean:.3f} [{kl.low:.3f}, {kl.high:.3f}] |"
            if plainest is None:
                plainest = sums
                print(row + " 1 |", flush=True)
            else:
                ratio = ratio_interval(sums, plainest, 2000, 0.95)
                print(row + f" {ratio.mean:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] |", flush=True)


if __name__ == "__main__":
    main()

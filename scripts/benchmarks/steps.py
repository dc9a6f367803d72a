"""Measure the throughput of whole training steps at real shapes with random weights: exact and compact teachers.

    python scripts/benchmarks/steps.py                          # a GPU: Qwen2.5-0.5B draft, head of Qwen2.5-7B, bf16
    python scripts/benchmarks/steps.py --shape small            # any device, in fp32, to see that it works

Each kind of teacher takes the same steps: forward, loss over the head in chunks, backward, clipping, AdamW. The
distributions are in memory, so the time includes no disk reads. Model FLOP utilisation counts 6 FLOPs per parameter and
token of the draft (with the head, without the embedding), the head products of an exact teacher (2 · V · H), and
attention over half the square of a document. It is a share of --peak-tflops (dense; 989 for H100 and H200 in bf16, 312
for A100). Repeated work counts once.

Legend: N positions of a step, H hidden size, V vocabulary, L layers, S positions of a block.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from distill.devices import CPU, device_name, peak_memory_bytes, pick_device, synchronise, take_peaks
from distill.engines.torch.blocks import Packed, hidden_states
from distill.machine import machine
from distill.teacher.distributions import CompactTeacher, DenseTeacher, Head, Teacher
from distill.training.learner import Columns, Learner
from distill.training.optimizer import parameter_groups


class Shape(NamedTuple):
    """A Qwen2's hidden size, MLP width, layers, query heads, key heads and vocabulary. `tied`: its head is tied."""

    hidden: int
    mlp: int
    layers: int
    heads: tuple[int, int]
    vocabulary: int
    tied: bool = True


SHAPES = {  # draft, target
    "qwen": (Shape(896, 4864, 24, (14, 2), 151_936), Shape(3584, 18944, 28, (28, 4), 151_936, False)),
    "small": (Shape(128, 256, 2, (4, 2), 8192), Shape(256, 512, 4, (4, 2), 8192, False)),
}
KINDS = ("compact", "exact")
CHUNK, ENTRIES = 1024, 64  # positions whose logits exist at once, entries of the compact store
PEAKS = {"H100": 989.0, "H200": 989.0, "A100": 312.0}


def build(shape: Shape, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a random Qwen2 of a shape."""
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads[0],
        num_key_value_heads=shape.heads[1],
        max_position_embeddings=8192,
        tie_word_embeddings=shape.tied,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen2ForCausalLM(config).to(dtype)


def body_parameters(shape: Shape) -> int:
    """Return the number of weights in the layers' matrices."""
    attention = 2 * shape.hidden**2 + 2 * shape.hidden * (shape.hidden // shape.heads[0]) * shape.heads[1]
    return shape.layers * (attention + 3 * shape.hidden * shape.mlp)


def flops_per_token(draft: Shape, target: Shape, kind: str, block: int) -> float:
    """Return the FLOPs that a step needs for one token. See the module's docstring."""

    def attention(shape: Shape) -> float:
        return 2 * shape.layers * block * shape.hidden  # two products over half a square

    total = 6 * (body_parameters(draft) + draft.vocabulary * draft.hidden) + 3 * attention(draft)
    if kind == "exact":
        total += 2 * target.vocabulary * target.hidden
    return float(total)


def blocks_of(options: argparse.Namespace, vocabulary: int, device: torch.device) -> Packed:
    """Return blocks of four documents of random tokens. Every position counts."""
    shape = (options.blocks, options.block)
    position = torch.arange(options.block, device=device).expand(shape)
    quarter = options.block // 4
    ids = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0)).to(device)
    return Packed(ids.int(), (position // quarter).int(), position % quarter < quarter - 1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table. `arguments` replace those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--block", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--peak-tflops", type=float, default=None)
    options = parser.parse_args(arguments)
    device = pick_device(options.device)
    short = device.type != CPU and options.shape != "small"
    dtype = torch.bfloat16 if short else torch.float32
    name = device_name(device) if device.type != CPU else machine()["cpu"]
    peak = options.peak_tflops or next((value for key, value in PEAKS.items() if key in name), None)
    draft_shape, target_shape = SHAPES[options.shape]
    target = build(target_shape, device, dtype).eval()
    vocabulary = target_shape.vocabulary
    blocks = blocks_of(options, vocabulary, device)
    head = Head.of(target, vocabulary)
    with torch.no_grad():
        states = torch.cat([hidden_states(target, blocks.take(slice(i, i + 1))) for i in range(len(blocks))])
        stored = states[blocks.mask]
        top = [head.logits(part).log_softmax(-1).topk(ENTRIES) for part in stored.split(512)]
    ids, logs = torch.cat([part.indices for part in top]), torch.cat([part.values for part in top])
    tail = torch.log1p(-logs.exp().sum(-1).clamp(max=1 - 1e-6))
    losses = {"forward_kl": 0.9, "cross_entropy": 0.1}

    @torch.no_grad()
    def distributions(kind: str) -> Teacher:
        if kind == "compact":
            return CompactTeacher(ids.int(), logs.half(), tail, vocabulary)
        return DenseTeacher(stored, head)

    print(
        f"{name}, torch {torch.__version__}, Python {platform.python_version()}; {options.blocks} blocks of "
        f"{options.block} positions a step, weights float32, products {str(dtype).removeprefix('torch.')}\n"
    )
    print("| teacher | s per step | tokens/s | MFU | peak memory, GiB |\n|---|--:|--:|--:|--:|")
    for kind in options.kinds:
        draft = build(draft_shape, device, torch.float32).train()
        learner = Learner(draft, Columns(vocabulary, None, device), CHUNK)
        optimizer = torch.optim.AdamW(parameter_groups(draft), lr=1e-5)
        take_peaks()
        seconds = []
        for repeat in range(options.repeats + 2):
            started = time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16, enabled=short):
                total, sums = learner(blocks, distributions(kind), losses)
            total.backward()
            for parameter in learner.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(sums["positions"])
            torch.nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            synchronise(device)
            if repeat > 1:
                seconds.append(time.perf_counter() - started)
        tokens = options.blocks * options.block
        middle = statistics.median(seconds)
        use = flops_per_token(draft_shape, target_shape, kind, options.block // 4) * tokens / middle / 1e12
        memory = f"{peak_memory_bytes(device) / 2**30:.1f}" if device.type != CPU else "not measured"
        share = f"{use / peak:.1%}" if peak else f"{use:.3f} TFLOP/s"
        print(f"| {kind} | {middle:.3f} | {tokens / middle:.0f} | {share} | {memory} |", flush=True)
        del draft, learner, optimizer


if __name__ == "__main__":
    main()

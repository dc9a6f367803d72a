"""What the compact teacher store costs: time beside the forward passes, bytes on disk, reading speed.

    python scripts/benchmarks/store.py --threads 2

Forward passes of a random model of Qwen2.5-0.5B's shape (hidden size 896, 151,936 rows, 24 layers unless --layers says
otherwise) over blocks of random tokens, alone and with the store's entries made from their logits, in turns: the median
of the ratio. A shard of random entries is written as stage `teacher` does, and read from the page cache through
`TeacherStore`, block by block in a training's order. Every figure is given by the clock and by processor time, which
other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from distill.files import write_json
from distill.models.packed_forward import packed_inputs
from distill.packing import Packed, epoch_order, pack
from distill.recipe import parse_recipe
from distill.run import Run
from distill.target.logprobs.entries import ModelReader, compact_distributions
from distill.target.teacher import save_shard, shard_tensors
from distill.teacher.store import FORMAT, PACKED_BYTES, TeacherStore, shard_path


def random_model(arguments: argparse.Namespace) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=arguments.vocabulary,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=arguments.layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config).eval()


def random_blocks(count: int, block: int, vocabulary: int) -> Packed:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocabulary, (count, block), generator=generator).tolist()
    return pack(((row, 1) for row in ids), block, split_long=False)


def build(arguments: argparse.Namespace) -> None:
    """Forward passes alone, and with the entries; in turns."""
    model = random_model(arguments)
    blocks = random_blocks(1, arguments.block, arguments.vocabulary)
    reader = ModelReader(model, arguments.vocabulary)

    def alone() -> None:
        with torch.inference_mode():
            model(**packed_inputs(model, blocks))

    def stored() -> None:
        compact_distributions(reader, blocks, arguments.k, (1.0,))

    alone()
    stored()
    took: dict[str, list[dict[Any, float]]] = {"clock": [], "processor": []}
    for turn in range(arguments.repeats):
        for found in took.values():
            found.append({})
        for work in (alone, stored) if turn % 2 else (stored, alone):
            began, spent = time.perf_counter(), time.process_time()
            work()
            took["clock"][-1][work], took["processor"][-1][work] = (
                time.perf_counter() - began,
                time.process_time() - spent,
            )
    for name, found in took.items():
        ratios = [one[stored] / one[alone] - 1 for one in found]
        print(
            f"building, by {name}: {statistics.median(one[alone] for one in found):.2f} s for the forward pass of "
            f"{arguments.block} tokens; entries add {statistics.median(ratios):.1%} "
            f"(turns: {', '.join(f'{ratio:.1%}' for ratio in ratios)})",
            flush=True,
        )


def read(arguments: argparse.Namespace) -> None:
    """Bytes on disk, and the speed of reading blocks from the page cache."""
    count, block, k = arguments.shard_blocks, arguments.read_block, arguments.k
    blocks = random_blocks(count, block, arguments.vocabulary)
    generator = torch.Generator().manual_seed(2)

    def distributions(part: Packed) -> dict[str, torch.Tensor]:
        shape = (*part.ids.shape, k)
        return {
            "top_ids": torch.randint(0, arguments.vocabulary, shape, generator=generator, dtype=torch.int32),
            "top_log_probabilities": torch.randn(shape, generator=generator).half(),
            "log_tails": torch.randn(*part.ids.shape, 1, generator=generator),
        }

    with tempfile.TemporaryDirectory() as place:
        values = {"name": "store", "target": {"model": "m"}, "corpus": {"sources": [{"kind": "text", "path": "/t"}]}}
        run = Run(Path(place), parse_recipe(values, "benchmark"))
        path = shard_path(run.path("teacher"), 0)
        save_shard(path, shard_tensors(blocks, distributions, count))
        made = {name: "benchmark" for name in ("target", "target_digest", "tokenizer_digest", "dtype")}
        made |= {"format": FORMAT, "kind": "compact", "vocabulary": arguments.vocabulary, "temperatures": [1.0]}
        made |= {"sampler": {}, "quantise": None, "k": k, "shard_blocks": [count]}
        write_json(run.path("teacher", "manifest.json"), made)
        run.finish("teacher", "key", {}, [run.path("teacher")], time.time())
        size, tokens = path.stat().st_size, count * block
        store = TeacherStore(run)
        rest = size / tokens - k * (4 + 2)
        print(
            f"on disk: {size / 1e6:.0f} MB for {tokens} tokens of {k} entries: 6 bytes per entry, {rest:.2f} per token "
            f"(of which the blocks themselves {PACKED_BYTES})"
        )
        device = torch.device("cpu")
        speeds: dict[str, list[float]] = {"clock": [], "processor": []}
        for turn in range(arguments.repeats + 1):
            order = epoch_order(count, 0, turn)
            began, spent = time.perf_counter(), time.process_time()
            for index in order.split(arguments.read_batch):
                store.teacher(index, device)
            speeds["clock"].append(size / (time.perf_counter() - began) / 1e6)
            speeds["processor"].append(size / (time.process_time() - spent) / 1e6)
        for name, found in speeds.items():
            turns = found[1:]  # the first fills the page cache and maps the file
            print(
                f"reading from page cache, {arguments.read_batch} blocks of {block} at a time, by {name}: "
                f"{statistics.median(turns):.0f} MB/s (turns: {', '.join(f'{speed:.0f}' for speed in turns)})"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--block", type=int, default=512, help="tokens of a forward pass")
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shard-blocks", type=int, default=64)
    parser.add_argument("--read-block", type=int, default=1024)
    parser.add_argument("--read-batch", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    read(arguments)
    build(arguments)


if __name__ == "__main__":
    main()

"""Answers of very different lengths: refilled rows against fixed batches, and one GGUF file against a server of it.

    python scripts/benchmarks/answers.py [--prompts 96] [--rows 8] [--new-tokens 192]

The texts are those of the demo target, with limits drawn by seed, most of them short: a stand-in for a target whose
answers end at such lengths. Refilled rows and fixed batches run on the same requests in the same process, interleaved;
tokens that a fixed batch computes behind a text's end are not counted for either. The server is llama-cpp-python's own.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from writing_worlds import llama_server  # noqa: E402

from distill.machine import machine, thread_count  # noqa: E402
from distill.models.conversion.writer import export_gguf  # noqa: E402
from distill.models.hugging_face import encode, load_tokenizer  # noqa: E402
from distill.recipe import Recipe, parse_recipe  # noqa: E402
from distill.target.groups import open_writer  # noqa: E402
from distill.target.writers.local import TorchWriter  # noqa: E402
from distill.texts import Request  # noqa: E402

TARGET = ROOT / "data" / "demo-target"


def recipe_of(rows: int, new_tokens: int, **answers: Any) -> Recipe:
    return parse_recipe(
        {
            "name": "benchmark",
            "target": {"model": str(TARGET)},
            "corpus": {"sources": [{"kind": "tree", "path": str(ROOT / "data" / "test")}], "block": 64 + new_tokens},
            "answers": {"batch": rows, "prompt_tokens": 64, "new_tokens": new_tokens, **answers},
        },
        "benchmark",
    )


def requests(tokenizer: Any, count: int, longest: int) -> list[Request]:
    """Prompts of 8 to 64 tokens; the limit of one in eight is the longest, that of the others an eighth or less."""
    draw = random.Random(7)
    texts = [path.read_text() for path in sorted((ROOT / "data" / "test").rglob("*.py"))]
    found = []
    for number in range(count):
        ids = encode(tokenizer, texts[number % len(texts)][:4000])
        start = draw.randrange(max(1, len(ids) - 64))
        limit = longest if number % 8 == 0 else draw.randrange(4, max(5, longest // 8))
        found.append(Request(f"r{number}", ids[start : start + draw.randrange(8, 65)], number, limit))
    return found


def timed(recipe: Recipe, asked: list[Request], fixed: bool = False) -> tuple[int, float]:
    """Tokens and seconds; `fixed`: a batch ends before the next begins."""
    writer = open_writer(recipe)
    if fixed and isinstance(writer, TorchWriter):
        writer.engine = None  # which writes batch by batch
    started, tokens = time.perf_counter(), 0
    for reply in writer.write(deque(asked)):
        assert not reply.dropped, reply
        tokens += len(reply.ids)
    seconds = time.perf_counter() - started
    writer.close()
    return tokens, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(thread_count())
    asked = requests(load_tokenizer(str(TARGET)), options.prompts, options.new_tokens)
    own = recipe_of(options.rows, options.new_tokens)
    rates: dict[str, list[float]] = {"fixed batches": [], "refilled rows": []}
    for _ in range(options.repeats):
        for name, fixed in (("fixed batches", True), ("refilled rows", False)):
            tokens, seconds = timed(own, asked, fixed)
            rates[name].append(tokens / seconds)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "target.gguf"
        export_gguf(TARGET, path, "f16")
        gguf = recipe_of(options.rows, options.new_tokens, writer={"gguf": str(path)})
        tokens, seconds = timed(gguf, asked)
        rates["GGUF file, one text at a time"] = [tokens / seconds]
        with llama_server(path) as url:
            writer = {"urls": [url], "model": "tiny", "concurrency": options.rows}
            tokens, seconds = timed(recipe_of(options.rows, options.new_tokens, writer=writer), asked)
            rates["llama-cpp-python's server of that file"] = [tokens / seconds]
    print(
        f"{options.prompts} prompts, {options.rows} rows, up to {options.new_tokens} tokens; {thread_count()} threads"
    )
    print("| writer | tokens/s, median | lowest | highest |\n|---|--:|--:|--:|")
    for name, found in rates.items():
        ordered = sorted(found)
        print(f"| {name} | {ordered[len(ordered) // 2]:.0f} | {ordered[0]:.0f} | {ordered[-1]:.0f} |")
    ratios = sorted(b / a for a, b in zip(rates["fixed batches"], rates["refilled rows"], strict=True))
    print(f"refilled rows against fixed batches: {ratios[len(ratios) // 2]:.2f}× [{ratios[0]:.2f}, {ratios[-1]:.2f}]")
    print(json.dumps({"machine": {k: v for k, v in machine().items() if k in ("cpu", "cores", "torch")}}))


if __name__ == "__main__":
    main()

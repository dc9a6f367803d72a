"""Our plain decoder beside the greedy generation of the library that runs the target: it is to be within 5 %.

    python scripts/benchmarks/plain.py --target T --prompts FILE         # transformers' generate
    python scripts/benchmarks/plain.py --target T.gguf --prompts FILE    # llama-cpp-python's

Both decode every prompt, in turn; `ratio` is the median over prompts of our tokens a second over the library's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from distill.data.prompts import read_user_prompts, sources_of
from distill.decoding.decode import plain
from distill.engines.loaded import LoadedPair, load_pair
from distill.machine import thread_count
from distill.recipe import Chat, Corpus, Target

Generation = Callable[[Sequence[int], int], int]  # a prompt and a limit to how many tokens were made
CONTEXT = 1024


def transformers_generation(model: Any, ends: list[int]) -> Generation:
    def generate(prompt: Sequence[int], limit: int) -> int:
        ids = torch.tensor([list(prompt)], device=model.device)
        settings = {"pad_token_id": ends[0] if ends else 0, "eos_token_id": ends or None, "do_sample": False}
        with torch.inference_mode():
            made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, **settings)
        return int(made.shape[1] - ids.shape[1])

    return generate


def llama_generation(path: Path, context: int, threads: int, ends: list[int]) -> Generation:
    import llama_cpp

    model = llama_cpp.Llama(
        str(path),
        n_ctx=context,
        n_threads=threads,
        n_threads_batch=threads,
        n_gpu_layers=-1,
        flash_attn=True,
        verbose=False,
    )

    def generate(prompt: Sequence[int], limit: int) -> int:
        made = 0
        model.reset()
        for token in model.generate(list(prompt), temp=0.0, repeat_penalty=1.0, reset=True):
            made += 1
            if made == limit or token in ends:
                break
        return made

    return generate


def speeds(pair: LoadedPair, library: Generation, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, float]:
    """Medians of tokens a second, prompts included; the two take turns to be first."""
    found: dict[str, list[float]] = {"ours": [], "library": []}
    for index, prompt in enumerate([prompts[0], *prompts]):  # the first one warms up
        limit = min(tokens, pair.target.capacity - len(prompt))
        for who in ("ours", "library") if index % 2 else ("library", "ours"):
            started = time.perf_counter()
            ours = who == "ours"
            made = len(plain(pair.target, prompt, limit, pair.ends).tokens) if ours else library(prompt, limit)
            if index:
                found[who].append(made / (time.perf_counter() - started))
    ratios = [ours / theirs for ours, theirs in zip(found["ours"], found["library"], strict=True)]
    return {name: statistics.median(own) for name, own in (found | {"ratio": ratios}).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="Hugging Face folder or GGUF file")
    parser.add_argument("--prompts", required=True, type=Path, help="a file as `distill speedup --prompts` reads it")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    threads = thread_count(options.threads)
    torch.set_num_threads(threads)
    corpus, target = Corpus(sources=sources_of([options.prompts])), os.path.abspath(options.target)
    room = CONTEXT - options.tokens
    asked = read_user_prompts(target, corpus, Chat(), options.count, 0, 64, room)
    prompts = [prompt.ids for prompt in asked.measured]
    with load_pair(Target(model=target), None, tokens=CONTEXT, threads=threads) as pair:
        if pair.hugging_face is not None:
            library = transformers_generation(pair.hugging_face[0], pair.ends)
        else:
            library = llama_generation(Path(pair.reference), pair.target.capacity, threads, pair.ends)
        found = speeds(pair, library, prompts, options.tokens)
    print(f"ours {found['ours']:.1f} tok/s, library {found['library']:.1f} tok/s, ratio {found['ratio']:.3f}")


if __name__ == "__main__":
    main()

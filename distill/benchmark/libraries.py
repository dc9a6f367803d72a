"""The libraries' own greedy generation beside our plain decoder."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from distill.errors import DataError
from distill.machine import thread_count
from distill.models.loaded import LoadedPair
from distill.recipe import GgufOptions, Recipe
from distill.recipe.gguf import NO_DEVICE
from distill.results.speedup_results import PairMeasured, PlainReference
from distill.speculative.decode import plain

Library = Callable[[Sequence[int], int], int]  # a library's generation: a prompt and a limit to tokens made


def plain_reference(
    recipe: Recipe, pair: LoadedPair, label: PairMeasured, prompts: Sequence[Sequence[int]]
) -> PlainReference:
    """Our plain decoder beside the generation of the library that runs the target; a GGUF file is loaded again.

    Tokens per second of both, in turn on the same prompts. Their ratio is the median over prompts, each with the two
    orders, so that a slow spell of the machine does not decide.
    """
    target, ends = pair.target, pair.ends
    if pair.hugging_face is not None:
        name, library = "transformers generate", transformers_generation(pair.hugging_face[0], ends)
    else:
        name = "llama-cpp-python generate"
        library = llama_generation(Path(pair.reference), target.capacity, recipe.gguf_options("target"), ends)
    library(prompts[0], 4)
    plain(target, prompts[0], 4)
    speeds: dict[str, list[float]] = {"ours": [], "library": []}
    for index, prompt in enumerate(prompts):
        limit = min(recipe.speedup.new_tokens, target.capacity - len(prompt))
        for who in ("ours", "library") if index % 2 else ("library", "ours"):
            started = time.perf_counter()
            made = len(plain(target, prompt, limit, ends).tokens) if who == "ours" else library(prompt, limit)
            speeds[who].append(made / (time.perf_counter() - started))
    ours, theirs = numpy.array(speeds["ours"]), numpy.array(speeds["library"])
    medians = (float(numpy.median(values)) for values in (ours, theirs, ours / theirs))
    return PlainReference(*label.key, name, *medians)


def transformers_generation(model: Any, ends: list[int]) -> Library:
    """The library's own greedy generation; returns how many tokens it made."""

    def generate(prompt: Sequence[int], limit: int) -> int:
        ids = torch.tensor([list(prompt)], device=model.device)
        with torch.inference_mode():
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=limit,
                do_sample=False,
                pad_token_id=ends[0] if ends else 0,
                eos_token_id=ends or None,
            )
        return int(made.shape[1] - ids.shape[1])

    return generate


def llama_generation(path: Path, context: int, options: GgufOptions, ends: list[int]) -> Library:
    """llama-cpp-python's own greedy generation over the same file; returns how many tokens it made.

    Under the same options, but for `device`, which that library does not take: it uses all GPUs, or none.
    """
    import llama_cpp

    from distill.models.gguf.build import cache_type

    threads = thread_count(options.threads)
    layers = -1 if options.n_gpu_layers is None else options.n_gpu_layers
    if options.device == (NO_DEVICE,):
        layers = 0
    try:
        model = llama_cpp.Llama(
            str(path),
            n_ctx=context,
            n_threads=threads,
            n_threads_batch=options.threads_batch or threads,
            n_gpu_layers=layers,
            tensor_split=list(options.tensor_split) or None,
            n_ubatch=options.ubatch_size or 512,
            type_k=cache_type(options.cache_type_k),
            type_v=cache_type(options.cache_type_v),
            use_mmap=options.mmap is not False,
            use_mlock=options.mlock,
            flash_attn=options.flash_attn != "off",
            verbose=False,
        )
    except ValueError as error:  # the file was read before, under the same options, and is open for our decoder
        raise DataError(
            f"{path}: llama-cpp-python cannot load it again: {error}",
            "it may not fit in memory twice, or its disk fails",
        ) from error

    def generate(prompt: Sequence[int], limit: int) -> int:
        made = 0
        model.reset()
        for token in model.generate(list(prompt), temp=0.0, repeat_penalty=1.0, reset=True):
            made += 1
            if made == limit or token in ends:
                break
        return made

    return generate

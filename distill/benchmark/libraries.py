"""The libraries' own greedy generation, which the plain decoder is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from distill.machine import thread_count
from distill.recipe import GgufOptions
from distill.recipe.gguf import NO_DEVICE


def transformers_generation(model: Any, ends: list[int]) -> Callable[[Sequence[int], int], int]:
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


def llama_generation(
    path: Path, context: int, options: GgufOptions, ends: list[int]
) -> Callable[[Sequence[int], int], int]:
    """llama-cpp-python's own greedy generation over the same file; returns how many tokens it made.

    Under the same options, but for `device`, which that library does not take: it uses all GPUs, or none.
    """
    import llama_cpp

    from distill.models.gguf.build import cache_type

    threads = thread_count(options.threads)
    model = llama_cpp.Llama(
        str(path),
        n_ctx=context,
        n_threads=threads,
        n_threads_batch=options.threads_batch or threads,
        n_gpu_layers=0
        if options.device == (NO_DEVICE,)
        else -1
        if options.n_gpu_layers is None
        else options.n_gpu_layers,
        tensor_split=list(options.tensor_split) or None,
        n_ubatch=options.ubatch_size or 512,
        type_k=cache_type(options.cache_type_k),
        type_v=cache_type(options.cache_type_v),
        use_mmap=options.mmap is not False,
        use_mlock=options.mlock,
        flash_attn=options.flash_attn != "off",
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

"""The libraries' own greedy generation, which the plain decoder is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch


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
    path: Path, context: int, threads: int | None, ends: list[int]
) -> Callable[[Sequence[int], int], int]:
    """llama-cpp-python's own greedy generation over the same file; returns how many tokens it made."""
    import llama_cpp

    from distill.machine import thread_count

    count = thread_count(threads)
    model = llama_cpp.Llama(
        str(path), n_ctx=context, n_threads=count, n_threads_batch=count, verbose=False, flash_attn=False
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
